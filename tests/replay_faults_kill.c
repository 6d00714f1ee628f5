/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kills clients and daemons while a room is kept at a test point: what the surviving ends hear,
 * that everything is given back, that another room does not notice, and that the same room works
 * afterwards.
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_faults.h"

#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"

/* Stages of a scenario: each victim process has its own. */
enum { STARTED, GO };

enum victim { PREFILL_CLIENT, DECODE_CLIENT, PREFILL_DAEMON, DECODE_DAEMON, VICTIMS };

static const char *const victims[VICTIMS] = { "prefill client", "decode client", "prefill daemon",
					      "decode daemon" };

struct point {
	const char *name;
	bool at_prefill; /* which daemon keeps */
};

struct cell {
	struct rig *rig;
	const struct point *point;
	enum victim victim;
	uint64_t round; /* stages count in rounds */
	struct rig_daemon *prefill, *decode;
	struct fault_room room, other; /* other: runs meanwhile */
	uint64_t arrived;              /* at the destination when it failed */
};

static bool is_offer(const struct cell *cell)
{
	return !strcmp(cell->point->name, "offer");
}

static struct rig_daemon *keeper(const struct cell *cell)
{
	return cell->point->at_prefill ? cell->prefill : cell->decode;
}

static bool kills_daemon(const struct cell *cell)
{
	return cell->victim >= PREFILL_DAEMON;
}

static bool kills_keeper(const struct cell *cell)
{
	return kills_daemon(cell) && (cell->victim == PREFILL_DAEMON) == cell->point->at_prefill;
}

/* The part that is kept. A destination that has everything at `landed` is complete, rightly. */
static enum fault_part kept_part(const struct cell *cell)
{
	return strcmp(cell->point->name, "landed") ? FAULT_REST : FAULT_REST_OPEN;
}

/* What is kept there has been scattered: the rows of the part are there, though not all. */
static bool may_have_all(const struct cell *cell)
{
	return !strcmp(cell->point->name, "landed");
}

/* ---- the victims that are clients ------------------------------------------------------------ */

static void prefill_victim(void *arg)
{
	struct cell *cell = arg;

	fault_connect(&cell->room.src, "victim");
	fault_open(&cell->room);
	fault_submit(&cell->room, FAULT_FIRST);
	rig_stage_set(cell->rig, STARTED, cell->round);
	rig_stage_wait(cell->rig, GO, cell->round, FAULT_SECS);
	fault_submit(&cell->room, kept_part(cell));
}

static void decode_victim(void *arg)
{
	struct cell *cell = arg;

	fault_connect(&cell->room.dst, "victim");
	fault_expect(&cell->room);
	rig_stage_set(cell->rig, STARTED, cell->round);
}

/* ---- a cell --------------------------------------------------------------------------------- */

static pid_t cell_begin(struct cell *cell)
{
	pid_t pid = 0;

	if (cell->victim == DECODE_CLIENT)
		pid = fault_child(decode_victim, cell);
	else
		fault_expect(&cell->room);
	if (cell->victim == PREFILL_CLIENT) {
		pid = fault_child(prefill_victim, cell);
	} else {
		fault_open(&cell->room);
		fault_submit(&cell->room, FAULT_FIRST);
	}
	if (pid)
		rig_stage_wait(cell->rig, STARTED, cell->round, FAULT_SECS);
	return pid;
}

/* The room moves, and stops at the point. */
static pid_t cell_reach(struct cell *cell)
{
	pid_t pid;

	if (is_offer(cell))
		fault_hold(keeper(cell), cell->point->name, true);
	pid = cell_begin(cell);
	if (!is_offer(cell)) {
		if (cell->victim == PREFILL_CLIENT)
			fault_arrived(&cell->room.dst, FAULT_HALF);
		else
			RIG_REQUIRE(kvp_room_wait_delivered(cell->room.src.client,
							    cell->room.src.room, 1,
							    FAULT_SECS * 1000) == 0);
		if (cell->victim != DECODE_CLIENT)
			fault_arrived(&cell->room.dst, FAULT_HALF);
		fault_hold(keeper(cell), cell->point->name, true);
	}
	if (cell->victim == PREFILL_CLIENT)
		rig_stage_set(cell->rig, GO, cell->round);
	else
		fault_submit(&cell->room, kept_part(cell));
	fault_held(keeper(cell), cell->point->name);
	return pid;
}

static void other_begin(struct fault_room *other)
{
	fault_expect(other);
	fault_open(other);
	fault_submit(other, FAULT_FIRST);
	fault_submit(other, FAULT_REST);
}

/* Which ends hear of it, and what. At `offer` nothing moves yet: the end at the surviving daemon
 * waits on, and so does decode's own end, which its library repeats. */
static void cell_fails(struct cell *cell)
{
	struct kvp_room_state state;

	if (cell->victim != DECODE_CLIENT && !(is_offer(cell) && kills_daemon(cell))) {
		state = fault_fails(&cell->room.dst,
				    cell->victim == PREFILL_CLIENT   ? KVP_STATUS_CLIENT_LOST
				    : cell->victim == PREFILL_DAEMON ? KVP_STATUS_PEER_LOST
								     : KVP_STATUS_DAEMON_LOST);
		cell->arrived = state.arrived;
		RIG_REQUIRE(state.retry && state.arrived >= (is_offer(cell) ? 0 : FAULT_HALF) &&
				    (state.arrived <= FAULT_HALF || may_have_all(cell)),
			    "arrived %llu", (unsigned long long)state.arrived);
	}
	if (cell->victim != PREFILL_CLIENT && !(is_offer(cell) && cell->victim == DECODE_DAEMON)) {
		state = fault_fails(&cell->room.src,
				    cell->victim == DECODE_CLIENT   ? KVP_STATUS_CLIENT_LOST
				    : cell->victim == DECODE_DAEMON ? KVP_STATUS_PEER_LOST
								    : KVP_STATUS_DAEMON_LOST);
		RIG_REQUIRE(state.retry);
	}
}

static void cell_released(struct cell *cell)
{
	if (cell->victim != DECODE_CLIENT && !(is_offer(cell) && kills_daemon(cell)))
		fault_released(&cell->room.dst);
	if (cell->victim != PREFILL_CLIENT && !(is_offer(cell) && cell->victim == DECODE_DAEMON))
		fault_released(&cell->room.src);
}

/* The same room again, with the same pages. What waited on is not announced again. */
static void cell_again(struct cell *cell)
{
	bool waits = is_offer(cell) && kills_daemon(cell);

	if (cell->victim == PREFILL_DAEMON)
		rig_daemon_restart(cell->prefill, DAEMON);
	if (cell->victim == DECODE_DAEMON)
		rig_daemon_restart(cell->decode, DAEMON);
	if (!waits)
		fault_expect(&cell->room);
	if (!waits || cell->victim == PREFILL_DAEMON)
		fault_open(&cell->room);
	if (!waits || cell->victim == PREFILL_DAEMON) {
		fault_submit(&cell->room, FAULT_FIRST);
		fault_submit(&cell->room, FAULT_REST);
	}
	fault_completes(&cell->room);
	fault_reset(&cell->room);
}

static void other_make(struct cell *cell)
{
	struct rig_daemon *prefill = cell->victim == PREFILL_DAEMON ? cell->decode : cell->prefill;
	struct rig_daemon *decode = cell->victim == DECODE_DAEMON ? cell->prefill : cell->decode;

	fault_room_make(&cell->other, 1000 + cell->round, prefill, decode);
	fault_connect_both(&cell->other);
}

static void cell_kill(const struct cell *cell, pid_t pid)
{
	if (cell->victim == PREFILL_DAEMON)
		rig_daemon_kill(cell->prefill);
	else if (cell->victim == DECODE_DAEMON)
		rig_daemon_kill(cell->decode);
	else
		fault_kill(pid);
}

static void cell_run(struct cell *cell)
{
	struct rig_daemon *daemons[2] = { cell->prefill, cell->decode };
	uint32_t fds[2], i;
	pid_t pid;

	other_make(cell);
	cell->arrived = is_offer(cell) ? 0 : FAULT_HALF;
	for (i = 0; i < 2; i++)
		fds[i] = fault_fds(daemons[i]);
	pid = cell_reach(cell);
	other_begin(&cell->other);
	cell_kill(cell, pid);
	cell_fails(cell);
	if (!kills_keeper(cell))
		fault_hold(keeper(cell), cell->point->name, false);
	cell_released(cell);
	fault_completes(&cell->other);
	fault_check_rows(&cell->room, cell->arrived);
	for (i = 0; i < 2; i++)
		if (daemons[i]->pid && !(is_offer(cell) && kills_daemon(cell)))
			fault_idle(daemons[i]);
	fault_reset(&cell->room);
	cell_again(cell);
	for (i = 0; i < 2; i++) {
		fault_idle(daemons[i]);
		fault_fds_back(daemons[i], fds[i]);
	}
	fault_close(&cell->other);
}

/* ---- scenarios ------------------------------------------------------------------------------ */

static void point_run(struct rig *rig, const char *name, bool at_prefill)
{
	const struct point point = { name, at_prefill };
	struct cell cell = { .rig = rig, .point = &point };

	cell.prefill = rig_daemon_start(rig, "prefill", DAEMON);
	cell.decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&cell.room, 7, cell.prefill, cell.decode);
	fault_connect_both(&cell.room);
	fault_transfer(&cell.room);
	fault_reset(&cell.room);
	for (cell.victim = 0; cell.victim < VICTIMS; cell.victim++) {
		cell.round++;
		printf("     %s: kill the %s\n", name, victims[cell.victim]);
		cell_run(&cell);
	}
	fault_close(&cell.room);
}

static void want(struct rig *rig)
{
	point_run(rig, "want", true);
}

static void gather(struct rig *rig)
{
	point_run(rig, "gather", true);
}

static void send_point(struct rig *rig)
{
	point_run(rig, "send", true);
}

static void grant(struct rig *rig)
{
	point_run(rig, "grant", false);
}

static void scatter(struct rig *rig)
{
	point_run(rig, "scatter", false);
}

static void landed(struct rig *rig)
{
	point_run(rig, "landed", false);
}

static void offer(struct rig *rig)
{
	point_run(rig, "offer", false);
}

/* All is there, and its sender has not been told: decode's word counts, whoever dies then. */
static void complete(struct rig *rig)
{
	struct cell cell = { .rig = rig };

	cell.prefill = rig_daemon_start(rig, "prefill", DAEMON);
	cell.decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&cell.room, 7, cell.prefill, cell.decode);
	fault_connect_both(&cell.room);
	for (cell.victim = PREFILL_DAEMON; cell.victim < VICTIMS; cell.victim++) {
		fault_hold(cell.decode, "landed", true);
		fault_transfer(&cell.room);
		fault_idle(cell.prefill);
		cell_kill(&cell, 0);
		if (cell.victim == PREFILL_DAEMON)
			fault_hold(cell.decode, "landed", false);
		fault_idle(cell.victim == PREFILL_DAEMON ? cell.decode : cell.prefill);
		fault_reset(&cell.room);
		rig_daemon_restart(cell.victim == PREFILL_DAEMON ? cell.prefill : cell.decode,
				   DAEMON);
		fault_transfer(&cell.room);
		fault_reset(&cell.room);
	}
	fault_close(&cell.room);
}

/* One daemon serves both ends. */
static void local(struct rig *rig)
{
	static const struct point points[] = {
		{ "offer", false }, { "want", true }, { "scatter", false }, { "landed", false }
	};
	struct cell cell = { .rig = rig };
	size_t i;

	cell.prefill = cell.decode = rig_daemon_start(rig, "both", DAEMON);
	fault_room_make(&cell.room, 7, cell.prefill, cell.decode);
	fault_connect_both(&cell.room);
	for (i = 0; i < KVP_ARRAY_SIZE(points); i++) {
		cell.point = &points[i];
		for (cell.victim = 0; cell.victim <= DECODE_CLIENT; cell.victim++) {
			cell.round++;
			printf("     local, %s: kill the %s\n", points[i].name,
			       victims[cell.victim]);
			cell_run(&cell);
		}
	}
	fault_close(&cell.room);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "offer", offer },   { "want", want },         { "grant", grant },
		{ "gather", gather }, { "send", send_point },   { "scatter", scatter },
		{ "landed", landed }, { "complete", complete }, { "local", local },
	};

	if (!fault_points())
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
