/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A node that is emptied before maintenance: nothing new begins there, in words that name the
 * reason; rooms whose ends have met go on to their end, and what is over is released; until
 * undrain.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "daemon/net.h"
#include "tests/support_faults.h"

#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"
#define WHY "new kernel"

struct nodes {
	struct rig_daemon *prefill, *decode;
	struct fault_room moving, ready, parked, fresh;
};

static void nodes_begin(struct rig *rig, struct nodes *nodes)
{
	memset(nodes, 0, sizeof(*nodes));
	nodes->prefill = rig_daemon_start(rig, "prefill", DAEMON);
	nodes->decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&nodes->moving, 1, nodes->prefill, nodes->decode);
	fault_room_make(&nodes->ready, 2, nodes->prefill, nodes->decode);
	fault_room_make(&nodes->parked, 3, nodes->prefill, nodes->decode);
	fault_room_make(&nodes->fresh, 4, nodes->prefill, nodes->decode);
	fault_connect_both(&nodes->moving);
	fault_connect_both(&nodes->ready);
	fault_connect_both(&nodes->parked);
	fault_connect_both(&nodes->fresh);
}

static void nodes_end(struct nodes *nodes)
{
	fault_close(&nodes->moving);
	fault_close(&nodes->ready);
	fault_close(&nodes->parked);
	fault_close(&nodes->fresh);
}

/* Runs kvpackctl on the daemon; it has to say `text`, and to exit with `status`. */
static void ctl(const struct rig_daemon *daemon, const char *args, const char *text, int status)
{
	char program[4096], command[4500], out[16384];
	size_t n;
	FILE *pipe;
	int rc;

	rig_program(program, sizeof(program), "kvpackctl");
	snprintf(command, sizeof(command), "%s --socket %s %s 2>&1", program, daemon->socket, args);
	pipe = popen(command, "re");
	RIG_REQUIRE(pipe);
	n = fread(out, 1, sizeof(out) - 1, pipe);
	out[n] = 0;
	rc = pclose(pipe);
	RIG_REQUIRE(WIFEXITED(rc) && WEXITSTATUS(rc) == status && strstr(out, text),
		    "kvpackctl %s: 0x%x: %s", args, rc, out);
}

/* One room under way, one ready, one that only one end has announced. */
static void begin_rooms(struct nodes *nodes, bool prefill_parked)
{
	fault_expect(&nodes->moving);
	fault_open(&nodes->moving);
	fault_submit(&nodes->moving, FAULT_FIRST);
	fault_arrived(&nodes->moving.dst, FAULT_HALF);
	fault_expect(&nodes->ready);
	fault_open(&nodes->ready);
	(void)rig_await(nodes->ready.src.client, nodes->ready.src.room, KVP_WAIT_READY, FAULT_SECS);
	(void)rig_await(nodes->ready.dst.client, nodes->ready.dst.room, KVP_WAIT_READY, FAULT_SECS);
	if (prefill_parked)
		fault_open(&nodes->parked);
	else
		fault_expect(&nodes->parked);
}

static void refused(struct fault_end *end, int rc)
{
	RIG_REQUIRE(rc < 0 && kvp_last_status(end->client) == KVP_STATUS_STOPPING &&
			    strstr(kvp_last_error(end->client), "drained: " WHY),
		    "%d: %s: %s", rc, kvp_status_name(kvp_last_status(end->client)),
		    kvp_last_error(end->client));
}

static void fails_drained(struct fault_end *end)
{
	struct kvp_room_state state = fault_fails(end, KVP_STATUS_STOPPING);

	RIG_REQUIRE(state.retry && strstr(state.reason, "drained: " WHY), "%s", state.reason);
	fault_released(end);
}

static void complete_rooms(struct nodes *nodes)
{
	fault_submit(&nodes->moving, FAULT_REST);
	fault_completes(&nodes->moving);
	fault_submit(&nodes->ready, FAULT_FIRST);
	fault_submit(&nodes->ready, FAULT_REST);
	fault_completes(&nodes->ready);
	fault_reset(&nodes->moving);
	fault_reset(&nodes->ready);
}

static void drains(struct rig *rig, bool prefill)
{
	struct nodes nodes;
	struct rig_daemon *drained;
	struct fault_end *parked;

	nodes_begin(rig, &nodes);
	drained = prefill ? nodes.prefill : nodes.decode;
	parked = prefill ? &nodes.parked.src : &nodes.parked.dst;
	begin_rooms(&nodes, prefill);
	ctl(drained, "drain --reason '" WHY "'", WHY ": no new legs", 0);
	ctl(drained, "status", WHY ": no new legs", 0);
	if (strncmp(kvp_net_ucx_version(), "1.13.", 5) == 0 && !getenv("KVP_TEST_NET"))
		ctl(drained, "status", "its tcp can end this daemon", 0);
	fails_drained(parked);
	ctl(drained, "status", "2 rooms left", 0);
	if (prefill) {
		refused(&nodes.fresh.src, fault_try_open(&nodes.fresh));
		fault_expect(&nodes.fresh); /* its own daemon knows of nothing */
		fails_drained(&nodes.fresh.dst);
	} else {
		refused(&nodes.fresh.dst, fault_try_expect(&nodes.fresh));
	}
	complete_rooms(&nodes);
	fault_idle(drained);
	ctl(drained, "drain --reason '" WHY "'", "no rooms left", 0);

	ctl(drained, "undrain", "takes new legs", 0);
	fault_transfer(&nodes.parked);
	fault_transfer(&nodes.fresh);
	fault_idle(nodes.prefill);
	fault_idle(nodes.decode);
	nodes_end(&nodes);
}

static void prefill(struct rig *rig)
{
	drains(rig, true);
}

static void decode(struct rig *rig)
{
	drains(rig, false);
}

/* A room that is aborted meanwhile is released, and a restart takes legs again. */
static void over(struct rig *rig)
{
	struct nodes nodes;

	nodes_begin(rig, &nodes);
	begin_rooms(&nodes, true);
	ctl(nodes.decode, "drain", "no new legs, 2 rooms left", 0);
	RIG_CALL(nodes.moving.dst.client,
		 kvp_abort(nodes.moving.dst.client, nodes.moving.dst.room, "enough"));
	(void)fault_fails(&nodes.moving.dst, KVP_STATUS_ABORTED);
	fault_released(&nodes.moving.dst);
	(void)fault_fails(&nodes.moving.src, KVP_STATUS_ABORTED);
	fault_released(&nodes.moving.src);
	RIG_CALL(nodes.ready.src.client,
		 kvp_abort(nodes.ready.src.client, nodes.ready.src.room, "enough"));
	(void)fault_fails(&nodes.ready.dst, KVP_STATUS_ABORTED);
	fault_released(&nodes.ready.dst);
	fault_idle(nodes.decode);
	RIG_REQUIRE(rig_daemon_stop(nodes.decode) == 0);
	rig_daemon_restart(nodes.decode, DAEMON);
	fault_reset(&nodes.moving);
	(void)kvp_process(nodes.parked.dst.client);
	fault_expect(&nodes.parked);
	fault_submit(&nodes.parked, FAULT_FIRST);
	fault_submit(&nodes.parked, FAULT_REST);
	fault_completes(&nodes.parked);
	nodes_end(&nodes);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "prefill", prefill },
		{ "decode", decode },
		{ "over", over },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
