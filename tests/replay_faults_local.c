/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Faults of a room inside one daemon, generated: each state that such a room stays in x prefill's
 * engine, decode's, or the daemon x killed, cut off, slow, or stopped for longer than all timers
 * and continued. Both ends hear what they must, with words, or complete. What is released is used
 * for something else at once, and nobody writes there any more. Other rooms of the daemon transfer
 * meanwhile, the same room completes on the same pages afterwards, and the daemon has as many
 * descriptors and mappings as before.
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_engine.h"
#include "tests/support_matrix.h"

#define CONFIG "[client]\nstall = 300ms\n"
#define STOP_MS 700u /* a timer of a room; what is stopped stands still for longer */
#define NEVER_MS 20000u
#define SLOW_MS 40u /* a slow daemon stands still for so long, then goes on for a tenth of it */

enum side { SRC, DST, SIDES };
enum state { READY, HALF, FENCE, STATES };
enum victim { PREFILL, DECODE, DAEMON }; /* the first two as sides */
enum fault { KILL, CUT, SLOW, STOP, FAULTS };
enum outcome {
	GONE,      /* its engine is dead */
	FAILS,     /* with a status and words, and is released */
	WAITS,     /* it lives, and completes when the fault is over */
	COMPLETES, /* while the fault lasts */
};

static const char *const states[] = { "ready", "half", "fence" };
static const char *const victims[] = { "prefill", "decode", "daemon" };
static const char *const faults[] = { "kill -9", "cut", "slow", "stop" };

struct must {
	enum outcome outcome;
	enum kvp_status status; /* of one that fails */
};

struct cell {
	struct rig_daemon *daemon;
	struct fault_room *room, *other; /* others' rooms, which nobody touches */
	struct engine *engines;          /* [SIDES] */
	enum state state;
	enum victim victim;
	enum fault fault;
	uint32_t fds, maps; /* of the daemon when nothing goes on */
	uint64_t fault_ns;
	bool dst_free, src_free; /* used for something else */
};

/* ---- what the ends must come to ------------------------------------------------------------- */

static struct must fails(enum kvp_status status)
{
	return (struct must){ FAILS, status };
}

static struct must ends(enum outcome outcome)
{
	return (struct must){ .outcome = outcome };
}

/* A library announces again what has not begun: nothing submitted, nothing arrived. */
static struct must must_by_daemon_kill(enum state state, enum side side)
{
	bool began = state == HALF || (state == FENCE && side == SRC);

	return began ? fails(KVP_STATUS_DAEMON_LOST) : ends(WAITS);
}

static struct must must(const struct cell *cell, enum side side)
{
	bool own = side == (enum side)cell->victim;

	switch (cell->fault) {
	case KILL:
		if (cell->victim == DAEMON)
			return must_by_daemon_kill(cell->state, side);
		return own ? ends(GONE) : fails(KVP_STATUS_CLIENT_LOST);
	case STOP: /* prefill has something to do, decode has not */
		if (cell->victim == DECODE)
			return ends(COMPLETES);
		return fails(cell->state == FENCE ? KVP_STATUS_FENCE_TIMEOUT : KVP_STATUS_TIMEOUT);
	default:
		if (cell->victim == DAEMON)
			return ends(COMPLETES);
		return fails(own ? KVP_STATUS_DAEMON_LOST : KVP_STATUS_CLIENT_LOST);
	}
}

/* ---- the room ------------------------------------------------------------------------------- */

/* Of what stands still one timer runs out, and it is known which; otherwise none does. */
static struct kvp_timers timers_of(const struct cell *cell)
{
	if (cell->fault != STOP)
		return (struct kvp_timers){ 0 };
	return (struct kvp_timers){
		.open_ms = cell->state == FENCE ? NEVER_MS : STOP_MS,
		.progress_ms = NEVER_MS,
		.fence_ms = STOP_MS,
	};
}

static void reach(const struct cell *cell)
{
	struct engine *src = &cell->engines[SRC], *dst = &cell->engines[DST];

	src->timers = dst->timers = timers_of(cell);
	(void)engine_do(dst, ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	src->timers = dst->timers = (struct kvp_timers){ 0 };
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

/* What prefill has left to do in that state. */
static void prefill_goes_on(const struct cell *cell)
{
	struct engine *src = &cell->engines[SRC];

	if (cell->state == FENCE)
		(void)engine_do(src, ENGINE_SIGNAL, 0);
	else if (cell->state == READY)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
}

static void completes(const struct cell *cell, enum side side)
{
	struct engine *engine = &cell->engines[side];
	struct engine_answer answer = engine_do(engine, ENGINE_WAIT, KVP_WAIT_RELEASED);

	RIG_REQUIRE(answer.state.complete && !answer.state.failed, "%s: %s", victims[side],
		    answer.reason);
	if (side == DST)
		fault_check_all(cell->room);
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
	completes(cell, DST);
	completes(cell, SRC);
	fault_reset(cell->room);
}

/* ---- what the ends hear --------------------------------------------------------------------- */

/* From here on the engine does with its memory what it likes. */
static void memory_free(struct cell *cell, enum side side, uint64_t arrived)
{
	if (side == SRC) {
		fault_poison(cell->room);
		cell->src_free = true;
		return;
	}
	fault_check_dest(cell->room, arrived);
	fault_reset(cell->room);
	cell->dst_free = true;
}

static void failed(struct cell *cell, enum side side, enum kvp_status status)
{
	struct engine *engine = &cell->engines[side];
	struct engine_answer answer = engine_do(engine, ENGINE_WAIT, KVP_WAIT_RELEASED);

	RIG_REQUIRE(answer.state.failed && !answer.state.complete &&
			    answer.state.status == status &&
			    !answer.state.retry == !mx_retry(status) &&
			    strlen(answer.reason) >= 12 && strchr(answer.reason, ' '),
		    "%s: %s, not %s: \"%s\"", victims[side], kvp_status_name(answer.state.status),
		    kvp_status_name(status), answer.reason);
	memory_free(cell, side, answer.state.arrived);
	(void)engine_do(engine, ENGINE_FORGET, 0);
}

static void lives(const struct cell *cell, enum side side)
{
	struct engine_answer answer = engine_do(&cell->engines[side], ENGINE_STATE, 0);

	RIG_REQUIRE(!answer.state.failed && !answer.state.complete && !answer.state.released,
		    "%s: %s", victims[side], answer.reason);
}

static void hear(struct cell *cell, enum side side)
{
	struct must what = must(cell, side);

	switch (what.outcome) {
	case GONE: /* its daemon has let go of its memory when it has unmapped it */
		fault_maps_back(cell->daemon, cell->maps - 2);
		memory_free(cell, side, side == DST && cell->state == HALF ? FAULT_HALF : 0);
		break;
	case FAILS:
		failed(cell, side, what.status);
		break;
	case WAITS:
		lives(cell, side);
		break;
	case COMPLETES:
		completes(cell, side);
		break;
	}
}

/* Decode first: its pages are what is written. */
static void both_hear(struct cell *cell)
{
	hear(cell, DST);
	hear(cell, SRC);
}

/* ---- the faults ----------------------------------------------------------------------------- */

static void others_transfer(struct cell *cell)
{
	fault_transfer(cell->other);
	fault_reset(cell->other);
}

static void client_kill(struct cell *cell)
{
	struct engine *victim = &cell->engines[cell->victim];

	engine_kill(victim);
	both_hear(cell);
	others_transfer(cell);
	engine_start(victim, cell->room, cell->victim == DECODE);
}

static void client_ends(struct cell *cell, enum engine_op op)
{
	(void)engine_do(&cell->engines[cell->victim], op, 0);
	both_hear(cell);
	others_transfer(cell);
}

static void stand_until_over(const struct cell *cell)
{
	uint64_t until = cell->fault_ns + (STOP_MS + STOP_MS / 4) * UINT64_C(1000000);
	uint64_t now = rig_now_ns();

	if (now < until)
		rig_sleep_ms((unsigned int)((until - now) / 1000000));
}

/* Decode's engine has nothing to do, so prefill goes on; the other way round a timer runs out. */
static void client_stop(struct cell *cell)
{
	enum side other = cell->victim == PREFILL ? DST : SRC;
	pid_t pid = cell->engines[cell->victim].pid;

	fault_stop(pid);
	if (other == SRC)
		prefill_goes_on(cell);
	hear(cell, other);
	others_transfer(cell);
	stand_until_over(cell);
	fault_go_on(pid);
	hear(cell, (enum side)cell->victim);
}

/* What has not begun is announced again; where prefill's end had begun, prefill opens again. */
static void daemon_kill(struct cell *cell)
{
	struct engine *src = &cell->engines[SRC];

	rig_daemon_kill(cell->daemon);
	both_hear(cell);
	rig_daemon_restart(cell->daemon, CONFIG);
	if (must(cell, DST).outcome != WAITS)
		return;
	if (must(cell, SRC).outcome == WAITS) {
		prefill_goes_on(cell);
	} else {
		fault_restore(cell->room);
		cell->src_free = false;
		(void)engine_do(src, ENGINE_OPEN, 0);
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
	}
	completes(cell, DST);
	completes(cell, SRC);
}

/* While it stands still nothing is over, and no page is anybody else's. */
static void daemon_stop(struct cell *cell)
{
	fault_stop(cell->daemon->pid);
	stand_until_over(cell);
	lives(cell, DST);
	lives(cell, SRC);
	fault_go_on(cell->daemon->pid);
	both_hear(cell);
}

static void daemon_slow(struct cell *cell)
{
	pid_t pid = fault_slow(cell->daemon, SLOW_MS);

	prefill_goes_on(cell);
	both_hear(cell);
	others_transfer(cell);
	fault_kill(pid);
	fault_go_on(cell->daemon->pid);
}

static void strike(struct cell *cell)
{
	bool daemon = cell->victim == DAEMON;

	cell->fault_ns = rig_now_ns();
	switch (cell->fault) {
	case KILL:
		(daemon ? daemon_kill : client_kill)(cell);
		break;
	case CUT:
		client_ends(cell, ENGINE_CUT);
		break;
	case SLOW:
		if (daemon)
			daemon_slow(cell);
		else
			client_ends(cell, ENGINE_FLOOD);
		break;
	default:
		(daemon ? daemon_stop : client_stop)(cell);
		break;
	}
}

/* ---- cells ---------------------------------------------------------------------------------- */

static void cell_run(struct cell *cell)
{
	printf("     %s/%s/%s\n", states[cell->state], victims[cell->victim], faults[cell->fault]);
	fflush(stdout);
	cell->dst_free = cell->src_free = false;
	reach(cell);
	strike(cell);
	fault_idle(cell->daemon);
	if (cell->state == FENCE) /* too late: nobody looks at it any more */
		(void)engine_do(&cell->engines[SRC], ENGINE_SIGNAL, 0);
	others_transfer(cell); /* the lane has turned since */
	if (cell->dst_free)
		fault_check_untouched(cell->room);
	if (cell->src_free)
		fault_restore(cell->room);
	again(cell);
	fault_idle(cell->daemon);
	fault_fds_back(cell->daemon, cell->fds);
	fault_maps_back(cell->daemon, cell->maps);
}

/* All cells of some victims. */
static void run(struct rig *rig, enum victim from, enum victim to)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct fault_room room, other;
	struct engine both[SIDES];
	struct cell cell = { daemon, &room, &other, both, READY, PREFILL, KILL, 0, 0, 0, 0, 0 };
	const enum victim n = to - from + 1;

	fault_room_make(&room, 7, daemon, daemon);
	fault_room_make(&other, 8, daemon, daemon);
	fault_connect_both(&other);
	engine_start(&both[SRC], &room, false);
	engine_start(&both[DST], &room, true);
	again(&cell);
	fault_idle(daemon);
	cell.fds = fault_fds(daemon);
	cell.maps = fault_maps(daemon);
	for (unsigned int i = 0; i < STATES * n * FAULTS; i++) {
		cell.state = (enum state)(i / (n * FAULTS));
		cell.victim = (enum victim)(from + i / FAULTS % n);
		cell.fault = (enum fault)(i % FAULTS);
		/* What is between an engine and the daemon is cut with either as its victim. */
		if (cell.victim != DAEMON || cell.fault != CUT)
			cell_run(&cell);
	}
	engine_kill(&both[SRC]);
	engine_kill(&both[DST]);
	fault_close(&other);
}

static void engines(struct rig *rig)
{
	run(rig, PREFILL, DECODE);
}

static void the_daemon(struct rig *rig)
{
	run(rig, DAEMON, DAEMON);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = { { "engines", engines },
							 { "the_daemon", the_daemon } };

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
