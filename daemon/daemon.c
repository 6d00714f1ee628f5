/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/daemon.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <uv.h>

#include <utlist.h>

#include "daemon/core.h"
#include "daemon/files.h"
#include "daemon/gpu.h"
#include "daemon/log.h"
#include "daemon/net.h"
#include "daemon/nic.h"
#include "daemon/notify.h"
#include "daemon/server.h"
#include "proto/util.h"

#define MS UINT64_C(1000000)
#define STOP_TICK_MS 10
/* Clients get so long to read how their rooms ended. */
#define STOP_READ_NS (2000 * MS)
/* Past all of it something hangs, most likely a lane in a foreign call. */
#define STOP_HANG_NS (10000 * MS)

enum stop_state {
	STOP_NOT,      /* ends by a signal */
	STOP_DRAINING, /* ends when no room moves, or by stop.drain */
	STOP_FAILING,  /* ends when clients have read, or by STOP_READ_NS */
	STOP_CLOSING,  /* ends when sessions, rooms, pools and fences are gone */
	STOP_PEERS,    /* ends when all peer sessions are closed */
	STOP_HANDLES,  /* ends when the loop has closed the last handles */
};

/* What the watchdog saw of a lane. */
struct watch {
	uint64_t turns, since_ns;
	bool probed; /* woken since: a sleeping lane has no reason not to turn */
	bool stuck;
};

struct kvp_daemon {
	struct kvp_core core;
	uv_loop_t loop;
	struct kvp_inbox inbox; /* boards from the lanes */
	uv_async_t wake;
	uv_signal_t sigterm, sigint, sighup;
	uv_timer_t watchdog; /* runs while a lane may have work */
	uv_timer_t stop_timer;
	struct watch watches[KVP_CORE_LANES];
	enum stop_state stop;
	uint64_t stop_deadline_ns, hang_deadline_ns;
	int exit_status;
	struct kvp_admits *admits; /* owned; outlives lanes and peers */
	struct kvp_board lane_boards[KVP_CORE_LANES];
	char gpus[KVP_GPU_MAX][KVP_GPU_UUID], gpu_names[KVP_GPU_MAX][16];
	struct kvp_gpu_refusal gpu_refusals[KVP_GPU_MAX];
	uint32_t n_gpu_refusals;
};

static void begin_stop(struct kvp_daemon *daemon, uint64_t drain_ns);

/* A process that has lost a GPU cannot use it again: its clients are told, then it ends. */
static void lane_lost(struct kvp_daemon *daemon, struct kvp_board *board)
{
	if (!(kvp_board_take(board) & KVP_BOARD_FAILED) || daemon->exit_status != 0)
		return;
	kvp_log(KVP_LOG_ERR, "%s: stopping, a new process can use the GPU again", board->text);
	daemon->exit_status = 1;
	if (daemon->stop == STOP_NOT)
		begin_stop(daemon, 0);
}

/* ---- boards */

static void board_take(struct kvp_daemon *daemon, struct kvp_board *board)
{
	if (!kvp_core_board(&daemon->core, board))
		lane_lost(daemon, board);
}

static void on_wake(uv_async_t *async)
{
	struct kvp_daemon *daemon = async->data;
	struct kvp_node *node = kvp_inbox_take(&daemon->inbox);

	while (node) {
		/* A board may be posted again, or freed, as soon as it is looked at. */
		struct kvp_node *next = node->next;

		board_take(daemon, KVP_CONTAINER_OF(node, struct kvp_board, node));
		node = next;
	}
}

static void wake(void *arg)
{
	(void)uv_async_send(arg); /* cannot fail */
}

/* ---- watchdog */

static bool may_have_work(const struct kvp_daemon *daemon)
{
	const struct kvp_pool *pool;

	if (kvp_rooms_count(daemon->core.rooms) > 0)
		return true;
	DL_FOREACH (daemon->core.pools.first, pool) {
		if (pool->state == KVP_POOL_ENDING)
			return true;
	}
	return false;
}

/* An order that means nothing, but makes a sleeping lane turn. */
static void probe(struct kvp_lane *lane)
{
	struct kvp_order_id *order = calloc(1, sizeof(*order));

	if (!order)
		return;                          /* the next tick tries again */
	order->order.type = KVP_ORDER_FENCE_END; /* of no fence: ids begin at 1 */
	kvp_lane_order(lane, &order->order);
}

static void fail_stuck(struct kvp_daemon *daemon, uint32_t i, const struct kvp_lane_status *status,
		       uint64_t now_ns)
{
	char why[KVP_BOARD_TEXT];
	bool again = daemon->watches[i].stuck;

	(void)snprintf(why, sizeof(why), "lane %s made no turn for %llu ms, in %s",
		       daemon->core.lane_names[i],
		       (unsigned long long)((now_ns - daemon->watches[i].since_ns) / MS),
		       status->call ? status->call : "its own code");
	if (!again)
		kvp_log(KVP_LOG_ERR, "%s: its rooms fail", why);
	daemon->core.lanes_stuck += !again;
	daemon->watches[i].stuck = true;
	daemon->core.stuck_at[i] = status->turns + 1;
	/* Also those that were made since: nothing else would end them. */
	kvp_rooms_fail_all(daemon->core.rooms, i, KVP__STATUS__STATUS_LANE_STUCK, why);
}

static void watch_lane(struct kvp_daemon *daemon, uint32_t i, uint64_t now_ns)
{
	struct watch *watch = &daemon->watches[i];
	static struct kvp_lane_status status; /* large; loop thread only */

	kvp_lane_status_read(daemon->core.lanes[i], &status);
	if (status.turns != watch->turns) {
		if (watch->stuck)
			kvp_log(KVP_LOG_NOTICE, "lane %s turns again", daemon->core.lane_names[i]);
		*watch = (struct watch){ .turns = status.turns, .since_ns = now_ns };
	} else if (!watch->probed) {
		probe(daemon->core.lanes[i]);
		watch->probed = true;
		watch->since_ns = now_ns;
	} else if (now_ns - watch->since_ns >= daemon->core.config->lane.stuck_after_ns) {
		fail_stuck(daemon, i, &status, now_ns);
	}
}

static void on_watchdog(uv_timer_t *timer)
{
	struct kvp_daemon *daemon = timer->data;

	for (uint32_t i = 0; i < daemon->core.n_lanes; i++)
		watch_lane(daemon, i, kvp_core_now_ns());
	if (!may_have_work(daemon))
		(void)uv_timer_stop(timer); /* an idle daemon does not wake up */
}

static void on_touched(struct kvp_core *core)
{
	struct kvp_daemon *daemon = core->touched_arg;
	uint64_t period = KVP_MAX(core->config->lane.stuck_after_ns / MS / 2, (uint64_t)10);

	if (uv_is_active((uv_handle_t *)&daemon->watchdog) || daemon->stop >= STOP_PEERS ||
	    !may_have_work(daemon))
		return;
	for (uint32_t i = 0; i < core->n_lanes; i++)
		daemon->watches[i].probed = false;
	(void)uv_timer_start(&daemon->watchdog, on_watchdog, period, period);
}

/* ---- stop */

static void stop_enter(struct kvp_daemon *daemon, enum stop_state state, uint64_t wait_ns)
{
	daemon->stop = state;
	daemon->stop_deadline_ns = kvp_core_now_ns() + wait_ns;
}

static void close_handle(uv_handle_t *handle)
{
	if (handle->loop && !uv_is_closing(handle))
		uv_close(handle, NULL);
}

/* Each lane takes a moment to close its transport; nobody is left to wait for the loop. */
static void stop_last(struct kvp_daemon *daemon)
{
	struct kvp_core *core = &daemon->core;

	kvp_rooms_destroy(core->rooms);
	kvp_peers_destroy(core->peers);
	kvp_server_destroy(core->server);
	for (uint32_t i = 0; i < core->n_lanes; i++)
		kvp_lane_stop(core->lanes[i]);
	(void)kvp_inbox_take(&daemon->inbox); /* nothing is left that a board could belong to */
	kvp_inbox_fini(&daemon->inbox);
	close_handle((uv_handle_t *)&daemon->wake);
	close_handle((uv_handle_t *)&daemon->sigterm);
	close_handle((uv_handle_t *)&daemon->sigint);
	close_handle((uv_handle_t *)&daemon->sighup);
	close_handle((uv_handle_t *)&daemon->watchdog);
	close_handle((uv_handle_t *)&daemon->stop_timer);
	daemon->stop = STOP_HANDLES;
}

static void check_hang(const struct kvp_daemon *daemon)
{
	const struct kvp_core *core = &daemon->core;

	if (kvp_core_now_ns() < daemon->hang_deadline_ns)
		return;
	kvp_log(KVP_LOG_ERR,
		"stop: %u rooms, %u pools and %u fences are still in use by a lane: leaving anyway",
		core->rooms ? kvp_rooms_count(core->rooms) : 0, core->pools.n, core->fences.n);
	_exit(1); /* what an orderly way out would wait for does not come */
}

/* A name server that does not answer would hold up the stop for as long as libc asks it, and so
 * would an orderly way out, which joins the thread that does. Nobody needs the name any more. */
static void leave_names(const struct kvp_daemon *daemon)
{
	for (uint32_t i = 0; i < daemon->core.n_lanes; i++)
		kvp_lane_stop(daemon->core.lanes[i]);
	kvp_log(KVP_LOG_NOTICE, "stopped, without waiting for the name of a peer");
	_exit(daemon->exit_status);
}

/* Events that no client has read yet. */
static bool clients_have_read(const struct kvp_daemon *daemon)
{
	const struct kvp_session *session;

	DL_FOREACH (daemon->core.server->sessions, session) {
		if (session->n_replies > 0 || !kvp_room_owner_told(&session->owner))
			return false;
	}
	return true;
}

static bool all_quiet(const struct kvp_core *core)
{
	return (!core->rooms || kvp_rooms_count(core->rooms) == 0) && core->pools.n == 0 &&
	       core->fences.n == 0 && (!core->server || kvp_server_idle(core->server));
}

static void stop_step(struct kvp_daemon *daemon)
{
	struct kvp_core *core = &daemon->core;
	bool late = kvp_core_now_ns() >= daemon->stop_deadline_ns;

	switch (daemon->stop) {
	case STOP_DRAINING:
		if (core->rooms && kvp_rooms_moving(core->rooms) > 0 && !late)
			return;
		if (core->rooms)
			kvp_rooms_stop(core->rooms, "the daemon shuts down");
		stop_enter(daemon, STOP_FAILING, STOP_READ_NS);
		return;
	case STOP_FAILING:
		if (core->server && !clients_have_read(daemon) && !late)
			return;
		if (core->server)
			kvp_server_end_sessions(core->server, "the daemon shuts down");
		stop_enter(daemon, STOP_CLOSING, 0);
		return;
	case STOP_CLOSING:
		if (!all_quiet(core))
			return check_hang(daemon);
		if (core->peers)
			kvp_peers_stop(core->peers);
		stop_enter(daemon, STOP_PEERS, 0);
		return;
	case STOP_PEERS:
		if (core->peers && kvp_peers_wait_for_names(core->peers))
			leave_names(daemon);
		if (core->peers && !kvp_peers_idle(core->peers))
			return check_hang(daemon);
		stop_last(daemon);
		return;
	case STOP_NOT:
	case STOP_HANDLES:
		return;
	}
}

static void on_stop_timer(uv_timer_t *timer)
{
	stop_step(timer->data);
}

static void begin_stop(struct kvp_daemon *daemon, uint64_t drain_ns)
{
	struct kvp_core *core = &daemon->core;

	core->stopping = true;
	(void)kvp_notify("STOPPING=1"); /* its manager finds out anyway */
	if (core->server)
		kvp_server_close(core->server);
	if (core->rooms)
		kvp_rooms_close(core->rooms);
	daemon->hang_deadline_ns =
		kvp_core_now_ns() + drain_ns + core->config->timers.drain_ns + STOP_HANG_NS;
	stop_enter(daemon, STOP_DRAINING, drain_ns);
	(void)uv_timer_start(&daemon->stop_timer, on_stop_timer, 0, STOP_TICK_MS);
}

static void on_signal(uv_signal_t *handle, int signum)
{
	struct kvp_daemon *daemon = handle->data;

	if (signum == SIGHUP) {
		kvp_log(KVP_LOG_NOTICE, "SIGHUP: ignored: the configuration is read at start only");
		return;
	}
	if (daemon->stop == STOP_NOT) {
		kvp_log(KVP_LOG_NOTICE, "signal %d: stopping, %u rooms in motion", signum,
			kvp_rooms_moving(daemon->core.rooms));
		begin_stop(daemon, daemon->core.config->stop.drain_ns);
		return;
	}
	kvp_log(KVP_LOG_NOTICE, "signal %d again: stopping at once", signum);
	daemon->stop_deadline_ns = 0;
	if (daemon->stop == STOP_DRAINING) {
		stop_step(daemon);
		daemon->stop_deadline_ns = 0; /* nor is there time to read */
	}
}

/* ---- start */

/* Both outlive the lane's start, which is all that looks at them. */
static void verbs_config(struct kvp_net_verbs_config *verbs, const struct kvp_config *config)
{
	kvp_net_verbs_defaults(verbs);
	verbs->devices = config->verbs.device;
	verbs->exclude = config->nics.exclude;
	verbs->rail_of = config->rail_of;
	verbs->rails = config->nics.rails;
	verbs->same_rail = config->nics.rail_policy == KVP_RAIL_SAME;
	verbs->rdma_cm = config->verbs.connect == KVP_CONNECT_RDMA_CM;
	verbs->idle_ns = config->verbs.idle_ns;
	verbs->port = (uint8_t)config->verbs.port;
	if (strcmp(config->verbs.gid_index, "auto") != 0)
		verbs->gid_index = (int)strtol(config->verbs.gid_index, NULL, 10); /* digits */
	verbs->mtu = config->verbs.mtu;
	verbs->depth = config->verbs.depth;
	verbs->inline_bytes = (uint32_t)config->verbs.inline_bytes;
	verbs->timeout = (uint8_t)config->verbs.timeout;
	verbs->retry_count = (uint8_t)config->verbs.retry_count;
	verbs->rnr_timer = (uint8_t)config->verbs.rnr_timer;
	verbs->service_level = (uint8_t)config->verbs.service_level;
	verbs->traffic_class = (uint8_t)config->verbs.traffic_class;
	verbs->pkey_index = (uint16_t)config->verbs.pkey_index;
	verbs->keepalive_ns = config->verbs.keepalive_ns;
}

/* Whoever reaches a transport's port can write here: none without peers. */
static const struct kvp_net_ops *choose_net(const struct kvp_config *config,
					    const struct kvp_net_verbs_config *verbs)
{
	struct kvp_nic nics[KVP_NIC_MAX];
	const struct kvp_nic_wish wish = {
		.devices = verbs->devices,
		.rail_of = verbs->rail_of,
		.exclude = verbs->exclude,
		.near = "",
		.port = verbs->port,
		.gid_index = verbs->gid_index,
	};
	char why[256];

	if (!config->peer.listen[0])
		return NULL;
	if (config->data.transport == KVP_TRANSPORT_UCX)
		return &kvp_net_ucx;
	if (config->data.transport == KVP_TRANSPORT_VERBS)
		return &kvp_net_verbs; /* or the start fails: never silently something else */
	if (kvp_nic_list(nics, &wish, why, sizeof(why)) > 0)
		return &kvp_net_verbs;
	kvp_log(KVP_LOG_NOTICE, "data.transport auto: ucx, since %s", why);
	return &kvp_net_ucx;
}

/* UUIDs that gpu.devices names, checked by the driver when it says `all`. */
static int choose_gpus(struct kvp_daemon *daemon, char *err, size_t err_bytes)
{
	const char *devices = daemon->core.config->gpu.devices;
	char list[KVP_CONFIG_LIST_MAX], *rest = list, *name;
	int n = 0;

	if (strcmp(devices, "none") == 0)
		return 0;
	if (strcmp(devices, "all") == 0) {
		char why[192] = "";

		n = kvp_gpu_list(daemon->gpus, why, sizeof(why));
		if (n < 0)
			(void)snprintf(err, err_bytes, "gpu.devices = all: %s", why); /* fits */
		return n;
	}
	(void)snprintf(list, sizeof(list), "%s", devices); /* fits */
	while ((name = strtok_r(rest, ", ", &rest))) {
		if (n == (int)KVP_GPU_MAX || strlen(name) >= KVP_GPU_UUID) {
			(void)snprintf(err, err_bytes, "gpu.devices: \"%.60s\": at most %u UUIDs",
				       name, KVP_GPU_MAX);
			return -EINVAL;
		}
		(void)snprintf(daemon->gpus[n++], KVP_GPU_UUID, "%s", name); /* fits */
	}
	return n;
}

static void log_gpu(const char *name, const struct kvp_lane *lane)
{
	const struct kvp_lane_rings *rings = kvp_lane_rings(lane);

	kvp_log(KVP_LOG_NOTICE, "lane %s: %s, rings %s (%s): %s", name, kvp_lane_device(lane),
		rings->device ? "on the device" : "in pinned host memory", rings->word,
		rings->reason);
}

/* A GPU without memory for a lane costs its pools, not the daemon. */
static void refuse_gpu(struct kvp_daemon *daemon, const char *uuid, const char *reason)
{
	struct kvp_gpu_refusal *refusal = &daemon->gpu_refusals[daemon->n_gpu_refusals++];

	(void)snprintf(refusal->uuid, sizeof(refusal->uuid), "%s", uuid);       /* fits */
	(void)snprintf(refusal->reason, sizeof(refusal->reason), "%s", reason); /* may be cut */
	kvp_log(KVP_LOG_ERR, "pools of %s are refused: %s", uuid, reason);
}

/* A lane for each GPU, like the host's but for its device and rings. */
static int start_gpus(struct kvp_daemon *daemon, const struct kvp_lane_config *host, char *err,
		      size_t err_bytes)
{
	struct kvp_core *core = &daemon->core;
	int n = choose_gpus(daemon, err, err_bytes);

	for (int i = 0; i < n; i++) {
		struct kvp_net_verbs_config verbs = *host->verbs;
		struct kvp_lane_config lane = *host;
		uint32_t at = core->n_lanes;
		int r;

		(void)snprintf(daemon->gpu_names[i], sizeof(daemon->gpu_names[i]), "gpu%d", i);
		kvp_board_init(&daemon->lane_boards[at], KVP_BOARD_LANE, at);
		lane.name = daemon->gpu_names[i];
		lane.gpu = daemon->gpus[i];
		verbs.devices = kvp_config_gpu_nics(core->config, daemon->gpus[i], (uint32_t)i);
		lane.verbs = &verbs;
		lane.slots = core->config->gpu.slots;
		lane.slot_bytes = core->config->gpu.slot_bytes;
		lane.memory = (enum kvp_ring_memory)core->config->pack.memory;
		lane.flush = (enum kvp_flush)core->config->gpu.flush;
		lane.board = &daemon->lane_boards[at];
		r = kvp_lane_start(&core->lanes[at], &lane, err, err_bytes);
		if (r == -ENOMEM) {
			refuse_gpu(daemon, lane.gpu, err);
			continue;
		}
		if (r < 0)
			return r;
		core->lane_names[at] = lane.name;
		core->n_lanes++;
		log_gpu(lane.name, core->lanes[at]);
	}
	return KVP_MIN(n, 0);
}

/* Sessions with this very daemon do not count for peer.max_sessions. */
static int start_admits(struct kvp_daemon *daemon, char *err, size_t err_bytes)
{
	daemon->admits = kvp_admits_create(2 * daemon->core.config->peer.max_sessions);
	if (daemon->admits)
		return 0;
	(void)snprintf(err, err_bytes, "no memory for %u sessions of peers",
		       daemon->core.config->peer.max_sessions); /* fits */
	return -ENOMEM;
}

static int start_lane(struct kvp_daemon *daemon, char *err, size_t err_bytes)
{
	struct kvp_core *core = &daemon->core;
	const struct kvp_config *config = core->config;
	struct kvp_net_verbs_config verbs;
	struct kvp_lane_config lane = {
		.name = "host",
		.slots = config->host.slots,
		.slot_bytes = config->host.slot_bytes,
		.spin_ns = config->lane.spin_ns,
		.spin_yields = config->lane.spin_yields,
		.pack = config->lane.pack,
		.wants_per_session = config->limits.max_wants,
		.interface = config->ucx.interface,
		.port_lo = config->ucx.port_lo,
		.port_hi = config->ucx.port_hi,
		.verbs = &verbs,
		.rdma = config->ucx.network == KVP_UCX_RDMA,
		.mode = config->data.mode,
		.direct_run_bytes = config->data.direct_run_bytes,
		.admits = daemon->admits,
		.loop = &daemon->inbox,
	};
	int r;

	verbs_config(&verbs, config);
	lane.net = choose_net(config, &verbs);
	r = kvp_lane_start(&core->lanes[0], &lane, err, err_bytes);

	if (r < 0)
		return r;
	core->lane_names[0] = lane.name;
	core->n_lanes = 1;
	r = start_gpus(daemon, &lane, err, err_bytes);
	if (r < 0)
		return r;
	core->pools = (struct kvp_pools){ .config = config,
					  .lanes = core->lanes,
					  .n_lanes = core->n_lanes,
					  .refusals = daemon->gpu_refusals,
					  .n_refusals = daemon->n_gpu_refusals };
	core->fences.lanes = core->lanes;
	core->fences.n_lanes = core->n_lanes;
	return 0;
}

static int start_tables(struct kvp_daemon *daemon, char *err, size_t err_bytes)
{
	struct kvp_core *core = &daemon->core;
	const struct kvp_peers_config peers = {
		.loop = &daemon->loop,
		.config = core->config,
		.incarnation = core->incarnation,
		.lanes = core->lanes,
		.n_lanes = core->n_lanes,
		.admits = daemon->admits,
	};
	struct kvp_rooms_config rooms = {
		.loop = &daemon->loop,
		.config = core->config,
		.lanes = core->lanes,
		.n_lanes = core->n_lanes,
	};
	int r = kvp_peers_create(&core->peers, &peers, err, err_bytes);

	if (r < 0)
		return r;
	rooms.peers = core->peers;
	r = kvp_rooms_create(&core->rooms, &rooms);
	if (r < 0) {
		(void)snprintf(err, err_bytes, "rooms: %s", strerror(-r)); /* fits */
		return r;
	}
	return kvp_server_create(&core->server, core, err, err_bytes);
}

static int start_signal(struct kvp_daemon *daemon, uv_signal_t *handle, int signum)
{
	int r = uv_signal_init(&daemon->loop, handle);

	if (r < 0)
		return r;
	handle->data = daemon;
	return uv_signal_start(handle, on_signal, signum);
}

/* The stop needs no more than the timers, which are first. */
static int start_handles(struct kvp_daemon *daemon)
{
	int r;

	(void)uv_timer_init(&daemon->loop, &daemon->watchdog); /* cannot fail */
	(void)uv_timer_init(&daemon->loop, &daemon->stop_timer);
	daemon->watchdog.data = daemon->stop_timer.data = daemon;
	r = uv_async_init(&daemon->loop, &daemon->wake, on_wake);
	if (r < 0)
		return r;
	daemon->wake.data = daemon;
	r = start_signal(daemon, &daemon->sigterm, SIGTERM);
	if (r == 0)
		r = start_signal(daemon, &daemon->sigint, SIGINT);
	if (r == 0)
		r = start_signal(daemon, &daemon->sighup, SIGHUP);
	return r;
}

/* Which key asks for a device that may not be there. */
static void start_hint(const struct kvp_core *core)
{
	const struct kvp_config *config = core->config;
	bool verbs = config->data.transport == KVP_TRANSPORT_VERBS;

	if (core->n_lanes == 0 && config->peer.listen[0] &&
	    (verbs || config->ucx.network == KVP_UCX_RDMA))
		kvp_log(KVP_LOG_NOTICE, "start: %s needs an RDMA device: kvpackctl doctor",
			verbs ? "data.transport = verbs" : "ucx.network = rdma");
}

static int start(struct kvp_daemon *daemon)
{
	struct kvp_core *core = &daemon->core;
	char err[256] = "";
	int r = start_handles(daemon);

	if (r < 0)
		(void)snprintf(err, sizeof(err), "event loop: %s", uv_strerror(r)); /* fits */
	if (r == 0)
		r = start_admits(daemon, err, sizeof(err));
	if (r == 0)
		r = start_lane(daemon, err, sizeof(err));
	if (r == 0)
		r = start_tables(daemon, err, sizeof(err));
	if (r < 0) {
		kvp_log(KVP_LOG_ERR, "start: %s", err);
		start_hint(core);
		return r;
	}
	kvp_log(KVP_LOG_NOTICE, "kvpackd %s: node %s serves %s, peers %s", KVP_VERSION,
		core->config->node.name, core->server->path,
		kvp_peers_listening(core->peers) ? kvp_peers_address(core->peers) : "none");
	r = kvp_notify("READY=1");
	if (r < 0)
		kvp_log(KVP_LOG_WARNING, "NOTIFY_SOCKET: %s", strerror(-r));
	return 0;
}

static int init(struct kvp_daemon *daemon, const struct kvp_config *config, const char *path)
{
	struct kvp_core *core = &daemon->core;
	int r = uv_loop_init(&daemon->loop);
	ssize_t n;

	if (r < 0) {
		kvp_log(KVP_LOG_ERR, "start: event loop: %s", uv_strerror(r));
		return r;
	}
	core->loop = &daemon->loop;
	core->config = config;
	core->config_path = path ? path : "";
	core->started_ns = kvp_core_now_ns();
	core->touched = on_touched;
	core->touched_arg = daemon;
	/* Up to 256 bytes cannot fail once the kernel has its entropy, which it waits for. */
	n = getrandom(core->incarnation, sizeof(core->incarnation), 0);
	assert(n == sizeof(core->incarnation));
	(void)n;
	core->pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0); /* -1: clients do without */
	kvp_inbox_init(&daemon->inbox, wake, &daemon->wake);
	return 0;
}

int kvp_daemon_run(const struct kvp_config *config, const char *config_path)
{
	KVP_CLEANUP(kvp_freep) struct kvp_daemon *daemon = calloc(1, sizeof(*daemon));
	char err[256];
	int r;

	if (!daemon) {
		kvp_log(KVP_LOG_ERR, "start: no memory");
		return 1;
	}
	kvp_net_ucx_give_back_signals();
	/* A client or a log that has gone away is an error code, not the end. */
	(void)signal(SIGPIPE, SIG_IGN);
	r = kvp_files_check(config, err, sizeof(err));
	if (r < 0) {
		kvp_log(KVP_LOG_ERR, "start: %s", err);
		return 1;
	}
	if (init(daemon, config, config_path) < 0)
		return 1;
	if (start(daemon) < 0) {
		daemon->exit_status = 1;
		begin_stop(daemon, 0);
	}
	(void)uv_run(&daemon->loop, UV_RUN_DEFAULT); /* returns when all handles are closed */
	r = uv_loop_close(&daemon->loop);
	assert(r == 0); /* every handle was closed */
	(void)r;
	if (daemon->core.pidfd >= 0)
		(void)close(daemon->core.pidfd);
	kvp_admits_destroy(daemon->admits);
	if (daemon->exit_status == 0)
		kvp_log(KVP_LOG_NOTICE, "stopped");
	if (kvp_net_ucx_left_open() > 0) {
		kvp_log(KVP_LOG_NOTICE, "left UCX as it was: a peer does not take its last words");
		_exit(daemon->exit_status); /* UCX's own exit handlers are not made for it */
	}
	return daemon->exit_status;
}
