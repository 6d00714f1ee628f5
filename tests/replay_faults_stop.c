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

#include <cjson/cJSON.h>

#include "tests/support_faults.h"

#define TIMING "heartbeat = 100ms\nlost_after = 1s\n"
#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"
#define BIG_DAEMON "[host]\nslots = 32\nslot_bytes = 1M\n"
#define BIG_ROW 32768u

struct pair {
	struct rig_daemon *prefill, *decode;
	struct fault_room room;
};

static void pair_begin_timed(struct rig *rig, struct pair *pair, uint32_t row_bytes,
			     const char *timing)
{
	const char *extra = row_bytes == BIG_ROW ? BIG_DAEMON : DAEMON;

	memset(pair, 0, sizeof(*pair));
	rig->timing = timing;
	pair->prefill = rig_daemon_start(rig, "prefill", extra);
	pair->decode = rig_daemon_start(rig, "decode", extra);
	fault_room_make_rows(&pair->room, 21, pair->prefill, pair->decode, row_bytes);
	fault_connect_both(&pair->room);
}

static void pair_begin(struct rig *rig, struct pair *pair, uint32_t row_bytes)
{
	pair_begin_timed(rig, pair, row_bytes, TIMING);
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

/* ---- a timer and a silence that end together ------------------------------------------------ */

#define ROOMS 4u
#define TIMER_MS 900u /* over just before the peer is lost */

/* All failures that the daemon remembers are that one's affair. */
static void blames(const struct rig_daemon *daemon, const char *who)
{
	cJSON *root = rig_ask(daemon, "failures", NULL);
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(root, "failures"), *failure;
	uint32_t n = 0;

	cJSON_ArrayForEach (failure, list) {
		const cJSON *verdict = cJSON_GetObjectItemCaseSensitive(failure, "verdict");

		RIG_REQUIRE(!strcmp(cJSON_GetStringValue(verdict), who), "%s: %s",
			    cJSON_GetStringValue(verdict), cJSON_Print(failure));
		n++;
	}
	RIG_REQUIRE(n > 0, "no failures");
	cJSON_Delete(root);
}

/* Rooms whose timers began at different times before the silence, so that no order of the daemon's
 * timers hides the wrong one. */
static void silence_wins(struct rig *rig, bool stops_prefill)
{
	struct fault_room rooms[ROOMS];
	struct pair pair;
	struct rig_daemon *victim, *survivor;

	pair_begin(rig, &pair, 576);
	victim = stops_prefill ? pair.prefill : pair.decode;
	survivor = stops_prefill ? pair.decode : pair.prefill;
	for (uint32_t i = 0; i < ROOMS; i++) {
		fault_room_make(&rooms[i], 31 + i, pair.prefill, pair.decode);
		rooms[i].timers =
			(struct kvp_timers){ .open_ms = TIMER_MS, .progress_ms = TIMER_MS };
		fault_connect_both(&rooms[i]);
		fault_expect(&rooms[i]);
		fault_open(&rooms[i]);
		(void)rig_await(rooms[i].src.client, rooms[i].src.room, KVP_WAIT_READY, FAULT_SECS);
		rig_sleep_ms(20);
	}
	fault_stop(victim->pid);
	for (uint32_t i = 0; i < ROOMS && !stops_prefill; i++)
		fault_submit(&rooms[i], FAULT_FIRST); /* waits for a grant */
	for (uint32_t i = 0; i < ROOMS; i++) {
		lost(stops_prefill ? &rooms[i].dst : &rooms[i].src);
		fault_released(stops_prefill ? &rooms[i].dst : &rooms[i].src);
	}
	blames(survivor, "peer");
	fault_go_on(victim->pid);
	for (uint32_t i = 0; i < ROOMS; i++) {
		lost(stops_prefill ? &rooms[i].src : &rooms[i].dst);
		fault_released(stops_prefill ? &rooms[i].src : &rooms[i].dst);
		fault_close(&rooms[i]);
	}
	blames(victim, "peer");
	fault_close(&pair.room);
}

static void silence_wins_at_decode(struct rig *rig)
{
	silence_wins(rig, true);
}

static void silence_wins_at_prefill(struct rig *rig)
{
	silence_wins(rig, false);
}

/* Heard again before it was lost: the timer is over, and it was the engine that kept still. */
static void silence_ends(struct rig *rig)
{
	struct pair pair;
	struct kvp_room_state state;

	pair_begin_timed(rig, &pair, 576, "heartbeat = 100ms\nlost_after = 10s\n");
	pair.room.timers.open_ms = 700;
	fault_expect(&pair.room);
	fault_open(&pair.room);
	(void)rig_await(pair.room.src.client, pair.room.src.room, KVP_WAIT_READY, FAULT_SECS);
	fault_stop(pair.prefill->pid);
	rig_sleep_ms(1200);
	(void)kvp_process(pair.room.dst.client);
	state = rig_state(pair.room.dst.client, pair.room.dst.room);
	RIG_REQUIRE(!state.failed, "%s: %s", kvp_status_name(state.status), state.reason);
	fault_go_on(pair.prefill->pid);
	state = fault_fails(&pair.room.dst, KVP_STATUS_TIMEOUT);
	RIG_REQUIRE(strstr(state.reason, "have submitted no more"), "%s", state.reason);
	blames(pair.decode, "engine");
	fault_released(&pair.room.dst);
	(void)fault_fails(&pair.room.src, KVP_STATUS_TIMEOUT);
	fault_released(&pair.room.src);
	fault_close(&pair.room);
}

/* Late with every sign of life, never lost: that does not put off the timer for ever. */
static void silence_again_and_again(struct rig *rig)
{
	struct pair pair;
	struct kvp_room_state state;
	pid_t pid;

	pair_begin(rig, &pair, 576);
	pair.room.timers.open_ms = 700;
	fault_expect(&pair.room);
	fault_open(&pair.room);
	(void)rig_await(pair.room.src.client, pair.room.src.room, KVP_WAIT_READY, FAULT_SECS);
	pid = fault_slow(pair.prefill, 300);
	state = fault_fails(&pair.room.dst, KVP_STATUS_TIMEOUT);
	RIG_REQUIRE(strstr(state.reason, "have submitted no more"), "%s", state.reason);
	fault_released(&pair.room.dst);
	fault_kill(pid);
	fault_go_on(pair.prefill->pid);
	(void)fault_fails(&pair.room.src, KVP_STATUS_TIMEOUT);
	fault_released(&pair.room.src);
	fault_close(&pair.room);
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
		{ "receiver_wants", receiver_wants },
		{ "receiver_data", receiver_data },
		{ "sender_granted", sender_granted },
		{ "sender_data", sender_data },
		{ "full_pipe_goes_on", full_pipe_goes_on },
		{ "full_pipe_dies", full_pipe_dies },
		{ "silence_wins_at_decode", silence_wins_at_decode },
		{ "silence_wins_at_prefill", silence_wins_at_prefill },
		{ "silence_ends", silence_ends },
		{ "silence_again_and_again", silence_again_and_again },
		{ "silent_engine", silent_engine },
		{ "deaf_engine", deaf_engine },
	};

	if (!fault_points())
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
