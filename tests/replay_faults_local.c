/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Faults of a room inside one daemon, generated: each state that such a room stays in x prefill's
 * or decode's engine x killed, cut off, or reading nothing; and the daemon killed. The other end
 * hears it with words, decode's rows are those of the room or what was there before, the same room
 * completes on the same pages afterwards, and the daemon has as many descriptors and mappings as
 * before.
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_engine.h"

enum side { SRC, DST, SIDES };
enum state { READY, HALF, FENCE, STATES };
enum fault { KILL, CUT, SLOW, FAULTS };

static const char *const states[] = { "ready", "half", "fence" };
static const char *const sides[] = { "prefill", "decode" };
static const char *const faults[] = { "kill -9", "cut", "slow" };

struct cell {
	struct fault_room *room;
	struct engine *engines; /* [SIDES] */
	enum state state;
	enum side victim;
	enum fault fault;
};

static void reach(const struct cell *cell)
{
	struct engine *src = &cell->engines[SRC], *dst = &cell->engines[DST];

	(void)engine_do(dst, ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	engine_reaches(src, KVP_ROOM_READY);
	engine_reaches(dst, KVP_ROOM_ACCEPTED);
	if (cell->state == HALF) {
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
		(void)engine_do(src, ENGINE_DELIVERED, 1);
		engine_arrived(dst, FAULT_HALF);
	} else if (cell->state == FENCE) {
		(void)engine_do(src, ENGINE_SUBMIT_FENCED, FAULT_FIRST);
		engine_reaches(src, KVP_ROOM_SENDING);
	}
}

/* Failed with that status and words, and released. */
static void hear(struct engine *engine, enum kvp_status status)
{
	struct engine_answer answer = engine_do(engine, ENGINE_WAIT, KVP_WAIT_RELEASED);

	RIG_REQUIRE(answer.state.failed && !answer.state.complete && answer.state.retry &&
			    answer.state.status == status && answer.reason[0],
		    "%s: %s", kvp_status_name(answer.state.status), answer.reason);
	(void)engine_do(engine, ENGINE_FORGET, 0);
}

static void again(const struct cell *cell)
{
	struct engine *src = &cell->engines[SRC], *dst = &cell->engines[DST];

	fault_reset(cell->room);
	(void)engine_do(dst, ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
	for (int side = DST; side >= SRC; side--) {
		struct engine_answer answer =
			engine_do(&cell->engines[side], ENGINE_WAIT, KVP_WAIT_RELEASED);

		RIG_REQUIRE(answer.state.complete && !answer.state.failed, "%s", answer.reason);
	}
	fault_check_all(cell->room);
	(void)engine_do(dst, ENGINE_FORGET, 0);
	(void)engine_do(src, ENGINE_FORGET, 0);
	fault_reset(cell->room);
}

static void cell_run(const struct cell *cell)
{
	struct engine *victim = &cell->engines[cell->victim],
		      *other = &cell->engines[!cell->victim];

	printf("     %s/%s/%s\n", states[cell->state], sides[cell->victim], faults[cell->fault]);
	fflush(stdout);
	reach(cell);
	if (cell->fault == KILL)
		engine_kill(victim);
	else
		(void)engine_do(victim, cell->fault == CUT ? ENGINE_CUT : ENGINE_FLOOD, 0);
	hear(other, KVP_STATUS_CLIENT_LOST);
	if (cell->fault != KILL)
		hear(victim, KVP_STATUS_DAEMON_LOST);
	else
		engine_start(victim, cell->room, cell->victim == DST);
	fault_check_dest(cell->room, cell->state == HALF ? FAULT_HALF : 0);
	again(cell);
	fault_idle(cell->room->src.daemon);
}

static void engines(struct rig *rig)
{
	const struct rig_daemon *daemon =
		rig_daemon_start(rig, "node", "[client]\nstall = 300ms\n");
	struct fault_room room, other;
	struct engine both[SIDES];
	struct cell cell = { .room = &room, .engines = both };
	uint32_t fds, maps;

	fault_room_make(&room, 7, daemon, daemon);
	fault_room_make(&other, 8, daemon, daemon);
	fault_connect_both(&other);
	engine_start(&both[SRC], &room, false);
	engine_start(&both[DST], &room, true);
	again(&cell);
	fault_idle(daemon);
	fds = fault_fds(daemon);
	maps = fault_maps(daemon);
	for (int n = 0; n < STATES * SIDES * FAULTS; n++) {
		cell.state = (enum state)(n / (SIDES * FAULTS));
		cell.victim = (enum side)(n / FAULTS % SIDES);
		cell.fault = (enum fault)(n % FAULTS);
		cell_run(&cell);
		fault_transfer(&other); /* of others, which nobody has touched */
		fault_reset(&other);
		fault_fds_back(daemon, fds);
		fault_maps_back(daemon, maps);
	}
	engine_kill(&both[SRC]);
	engine_kill(&both[DST]);
	fault_close(&other);
}

/* What is in motion is lost at both ends, and the same room completes with the next daemon. */
static void the_daemon(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "node", NULL);
	struct engine both[SIDES];
	struct fault_room room;
	struct cell cell = { .room = &room, .engines = both, .state = HALF };

	fault_room_make(&room, 7, daemon, daemon);
	engine_start(&both[SRC], &room, false);
	engine_start(&both[DST], &room, true);
	reach(&cell);
	rig_daemon_kill(daemon);
	hear(&both[DST], KVP_STATUS_DAEMON_LOST);
	hear(&both[SRC], KVP_STATUS_DAEMON_LOST);
	fault_check_dest(&room, FAULT_HALF);
	rig_daemon_restart(daemon, NULL);
	again(&cell);
	fault_idle(daemon);
	engine_kill(&both[SRC]);
	engine_kill(&both[DST]);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = { { "engines", engines },
							 { "the_daemon", the_daemon } };

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
