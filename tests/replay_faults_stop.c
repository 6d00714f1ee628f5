/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Daemons and clients that stand still (SIGSTOP) and go on later: a daemon that does not answer is
 * a lost peer, with all its slots given back while it still stands; an engine that is silent loses
 * nothing, unless it leaves its socket full.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/support_faults.h"

#define TIMING "heartbeat = 100ms\nlost_after = 1s\n"
#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"
#define BIG_DAEMON "[host]\nslots = 32\nslot_bytes = 1M\n"
#define BIG_ROW 32768u

struct pair {
	struct rig_daemon *prefill, *decode;
	struct fault_room room;
};

static void pair_begin(struct rig *rig, struct pair *pair, uint32_t row_bytes)
{
	const char *extra = row_bytes == BIG_ROW ? BIG_DAEMON : DAEMON;

	memset(pair, 0, sizeof(*pair));
	rig->timing = TIMING;
	pair->prefill = rig_daemon_start(rig, "prefill", extra);
	pair->decode = rig_daemon_start(rig, "decode", extra);
	fault_room_make_rows(&pair->room, 21, pair->prefill, pair->decode, row_bytes);
	fault_connect_both(&pair->room);
}

static void lost(const struct fault_end *end)
{
	struct kvp_room_state state = fault_fails(end, KVP_STATUS_PEER_LOST);

	RIG_REQUIRE(state.retry);
}

/* Keeps the second half at the point while that daemon or the other stands still. */
static void point_run(struct rig *rig, const char *point, bool at_prefill, bool stops_prefill)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	struct fault_end *standing, *other;
	struct rig_daemon *keeper, *victim, *survivor;
	struct fault_room local;
	uint32_t fds;

	pair_begin(rig, &pair, 576);
	keeper = at_prefill ? pair.prefill : pair.decode;
	victim = stops_prefill ? pair.prefill : pair.decode;
	survivor = stops_prefill ? pair.decode : pair.prefill;
	standing = stops_prefill ? &room->src : &room->dst;
	other = stops_prefill ? &room->dst : &room->src;
	fault_room_make(&local, 22, survivor, survivor);
	fault_connect_both(&local);
	fault_transfer(room);
	fault_reset(room);
	fds = fault_fds(survivor);
	fault_expect(room);
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	fault_arrived(&room->dst, FAULT_HALF);
	fault_hold(keeper, point, true);
	fault_submit(room, FAULT_REST);
	fault_held(keeper, point);

	fault_stop(victim->pid);
	if (keeper == survivor)
		fault_hold(keeper, point, false);
	lost(other);
	fault_released(other);
	fault_transfer(&local);
	fault_idle(survivor);
	fault_fds_back(survivor, fds);

	fault_go_on(victim->pid);
	if (keeper == victim)
		fault_hold(keeper, point, false);
	lost(standing);
	fault_released(standing);
	fault_check_rows(room, FAULT_HALF);
	fault_idle(victim);
	fault_reset(room);
	fault_transfer(room);
	fault_idle(victim);
	fault_close(&local);
	fault_close(room);
}

static void receiver_wants(struct rig *rig)
{
	point_run(rig, "grant", false, false);
}

static void receiver_data(struct rig *rig)
{
	point_run(rig, "send", true, false);
}

static void sender_granted(struct rig *rig)
{
	point_run(rig, "gather", true, true);
}

static void sender_data(struct rig *rig)
{
	point_run(rig, "scatter", false, true);
}

/* More is on its way than sockets hold: the transport keeps a quarter of the slots at most until
 * the peer goes on, or dies; the room waits for neither. */
static void full_pipe(struct rig *rig, bool dies)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, BIG_ROW);
	fault_expect(room);
	fault_open(room);
	(void)rig_await(room->src.client, room->src.room, KVP_WAIT_READY, FAULT_SECS);
	fault_hold(pair.prefill, "send", true);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_held(pair.prefill, "send");
	fault_stop(pair.decode->pid);
	fault_hold(pair.prefill, "send", false);
	lost(&room->src);
	fault_released(&room->src);
	fault_idle_but_sent(pair.prefill);
	if (dies) {
		rig_daemon_kill(pair.decode);
	} else {
		fault_go_on(pair.decode->pid);
		lost(&room->dst);
		fault_released(&room->dst);
	}
	fault_check_rows(room, 0);
	fault_idle(pair.prefill);
	fault_reset(room);
	if (dies) /* nothing had arrived: the library expects again */
		rig_daemon_restart(pair.decode, BIG_DAEMON);
	else
		fault_expect(room);
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_completes(room);
	fault_idle(pair.prefill);
	fault_idle(pair.decode);
	fault_close(room);
}

static void full_pipe_goes_on(struct rig *rig)
{
	full_pipe(rig, false);
}

static void full_pipe_dies(struct rig *rig)
{
	full_pipe(rig, true);
}

/* ---- clients -------------------------------------------------------------------------------- */

struct engine {
	struct rig *rig;
	struct fault_room *room;
};

enum { EXPECTED, COMPLETED };

static void decode_engine(void *arg)
{
	struct engine *engine = arg;

	fault_connect(&engine->room->dst, "silent");
	fault_expect(engine->room);
	rig_stage_set(engine->rig, EXPECTED, 1);
	(void)rig_await(engine->room->dst.client, engine->room->dst.room, KVP_WAIT_RELEASED,
			FAULT_SECS);
	RIG_REQUIRE(rig_state(engine->room->dst.client, engine->room->dst.room).complete);
	rig_stage_set(engine->rig, COMPLETED, 1);
}

/* All progress is the daemon's. */
static void silent_engine(struct rig *rig)
{
	struct pair pair;
	struct engine engine = { rig, &pair.room };
	pid_t pid;

	pair_begin(rig, &pair, 576);
	pid = fault_child(decode_engine, &engine);
	rig_stage_wait(rig, EXPECTED, 1, FAULT_SECS);
	fault_stop(pid);
	fault_open(&pair.room);
	fault_submit(&pair.room, FAULT_FIRST);
	fault_submit(&pair.room, FAULT_REST);
	RIG_REQUIRE(
		rig_await(pair.room.src.client, pair.room.src.room, KVP_WAIT_RELEASED, FAULT_SECS)
			.complete);
	fault_check_all(&pair.room);
	RIG_REQUIRE(rig_stage_get(rig, COMPLETED) == 0);
	fault_go_on(pid);
	rig_stage_wait(rig, COMPLETED, 1, FAULT_SECS);
	fault_kill(pid);
	fault_close(&pair.room);
}

static void ignored(void *arg, enum kvp_status status, const char *text)
{
	(void)arg;
	(void)status;
	(void)text;
}

/* Asks until nothing more goes out, and never reads. */
static void flooding_engine(void *arg)
{
	struct engine *engine = arg;
	struct fault_room *room = engine->room;
	uint32_t i;
	int rc = 0;

	fault_connect(&room->src, "deaf");
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	for (i = 0; i < 20000 && rc == 0; i++)
		rc = kvp_renew(room->src.client, room->src.daemon->address, 99, NULL, 0, 1000,
			       ignored, NULL);
	rig_stage_set(engine->rig, EXPECTED, 1);
}

static void deaf_engine(struct rig *rig)
{
	struct fault_room room;
	struct engine engine = { rig, &room };
	struct rig_daemon *prefill, *decode;
	struct kvp_room_state state;
	pid_t pid;

	prefill = rig_daemon_start(rig, "prefill", DAEMON "[client]\nstall = 500ms\n");
	decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&room, 23, prefill, decode);
	fault_connect_both(&room);
	pid = fault_child(flooding_engine, &engine);
	rig_stage_wait(rig, EXPECTED, 1, FAULT_SECS);
	fault_expect(&room);
	state = fault_fails(&room.dst, KVP_STATUS_CLIENT_LOST);
	RIG_REQUIRE(strstr(state.reason, "read nothing"), "%s", state.reason);
	fault_released(&room.dst);
	fault_idle(prefill);
	fault_reset(&room);
	fault_transfer(&room);
	fault_kill(pid);
	fault_close(&room);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "receiver_wants", receiver_wants },       { "receiver_data", receiver_data },
		{ "sender_granted", sender_granted },       { "sender_data", sender_data },
		{ "full_pipe_goes_on", full_pipe_goes_on }, { "full_pipe_dies", full_pipe_dies },
		{ "silent_engine", silent_engine },         { "deaf_engine", deaf_engine },
	};

	if (!fault_points())
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
