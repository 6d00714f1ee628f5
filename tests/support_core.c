/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/server.h"
#include "proto/util.h"
#include "tests/support_clock.h"

static void must(bool ok, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "support_core: %s\n", what);
	abort();
}

static void push(void *arg)
{
	(void)uv_async_send(arg); /* cannot fail */
}

static void on_wake(uv_async_t *async)
{
	struct core_rig *rig = async->data;
	struct kvp_node *node = kvp_inbox_take(&rig->inbox);

	while (node) {
		struct kvp_node *next = node->next; /* the board may be gone afterwards */
		struct kvp_board *board = KVP_CONTAINER_OF(node, struct kvp_board, node);

		if (!kvp_core_board(&rig->core, board))
			(void)kvp_board_take(board); /* no lane is lost here */
		node = next;
	}
}

static void on_touched(struct kvp_core *core)
{
	(void)core; /* no watchdog here */
}

void core_init(struct core_rig *rig)
{
	memset(rig, 0, sizeof(*rig));
	kvp_config_defaults(&rig->config);
	(void)snprintf(rig->dir, sizeof(rig->dir), "/tmp/kvp-core-XXXXXX");
	must(mkdtemp(rig->dir), "mkdtemp");
	(void)snprintf(rig->config.client.socket, sizeof(rig->config.client.socket), "%s/sock",
		       rig->dir);
	rig->config.client.group[0] = 0;
	rig->config.host.slots = 4;
	rig->config.host.slot_bytes = 64 << 10;
}

static void start_lane(struct core_rig *rig)
{
	struct kvp_core *core = &rig->core;
	const struct kvp_lane_config lane = {
		.name = "host",
		.slots = rig->config.host.slots,
		.slot_bytes = rig->config.host.slot_bytes,
		.pack = true,
		.wants_per_session = rig->config.limits.max_wants,
		.interface = "lo",
		.loop = &rig->inbox,
	};
	char err[256] = "";

	must(kvp_lane_start(&core->lanes[0], &lane, err, sizeof(err)) == 0, err);
	core->lane_names[0] = "host";
	core->n_lanes = 1;
	core->pools =
		(struct kvp_pools){ .config = &rig->config, .lanes = core->lanes, .n_lanes = 1 };
	core->fences.lanes = core->lanes;
	core->fences.n_lanes = 1;
}

void core_start(struct core_rig *rig)
{
	struct kvp_core *core = &rig->core;
	struct kvp_peers_config peers = { &rig->loop, &rig->config, core->incarnation, core->lanes,
					  1,          NULL };
	struct kvp_rooms_config rooms = { &rig->loop, &rig->config, core->lanes, 1, NULL };
	char err[256] = "";

	must(uv_loop_init(&rig->loop) == 0, "uv_loop_init");
	must(uv_async_init(&rig->loop, &rig->wake, on_wake) == 0, "uv_async_init");
	rig->wake.data = rig;
	kvp_inbox_init(&rig->inbox, push, &rig->wake);
	core->loop = &rig->loop;
	core->config = &rig->config;
	core->config_path = "";
	core->started_ns = kvp_core_now_ns();
	core->pidfd = -1;
	core->touched = on_touched;
	memset(core->incarnation, 7, sizeof(core->incarnation));
	start_lane(rig);
	must(kvp_peers_create(&core->peers, &peers, err, sizeof(err)) == 0, err);
	rooms.peers = core->peers;
	must(kvp_rooms_create(&core->rooms, &rooms) == 0, "kvp_rooms_create");
	must(kvp_server_create(&core->server, core, err, sizeof(err)) == 0, err);
}

static void on_tick(uv_timer_t *timer)
{
	(void)timer;
}

void core_turn(struct core_rig *rig, bool wait)
{
	uv_timer_t timer;

	if (!wait) {
		(void)uv_run(&rig->loop, UV_RUN_NOWAIT);
		return;
	}
	(void)uv_timer_init(&rig->loop, &timer);
	(void)uv_timer_start(&timer, on_tick, 1, 1); /* again: the first may be due at once */
	(void)uv_run(&rig->loop, UV_RUN_ONCE);
	uv_close((uv_handle_t *)&timer, NULL);
	(void)uv_run(&rig->loop, UV_RUN_NOWAIT);
}

bool core_is_empty(const struct core_rig *rig)
{
	const struct kvp_core *core = &rig->core;

	return !core->server->sessions && kvp_rooms_count(core->rooms) == 0 && core->pools.n == 0 &&
	       core->fences.n == 0;
}

int core_connect(const struct core_rig *rig)
{
	KVP_CLEANUP(kvp_closep)
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un addr = { .sun_family = AF_UNIX };

	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", rig->config.client.socket);
	if (fd < 0 || connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return -1;
	return KVP_TAKE_FD(fd);
}

void core_stop(struct core_rig *rig)
{
	struct kvp_core *core = &rig->core;
	uint64_t give_up = support_clock_ns() + UINT64_C(20000000000);

	kvp_server_close(core->server);
	kvp_rooms_close(core->rooms);
	kvp_server_end_sessions(core->server, "the test ends");
	while (!(core_is_empty(rig) && kvp_server_idle(core->server)) &&
	       support_clock_ns() < give_up)
		core_turn(rig, true);
	must(core_is_empty(rig), "something is left");
	kvp_peers_stop(core->peers);
	while (!kvp_peers_idle(core->peers) && support_clock_ns() < give_up)
		core_turn(rig, true);
	must(kvp_peers_idle(core->peers), "peers do not end");
	kvp_rooms_destroy(core->rooms);
	kvp_peers_destroy(core->peers);
	kvp_server_destroy(core->server);
	kvp_lane_stop(core->lanes[0]);
	(void)kvp_inbox_take(&rig->inbox);
	kvp_inbox_fini(&rig->inbox);
	uv_close((uv_handle_t *)&rig->wake, NULL);
	(void)uv_run(&rig->loop, UV_RUN_DEFAULT);
	must(uv_loop_close(&rig->loop) == 0, "uv_loop_close");
	(void)rmdir(rig->dir);
}
