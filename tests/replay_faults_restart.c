/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Daemons that are started again under both clients: rooms that only wait are announced anew by the
 * library and go on; rooms in motion fail with the advice to try again.
 */

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "tests/support_faults.h"

#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"
#define STOPPING DAEMON "[stop]\ndrain = 100ms\n"

struct pair {
	struct rig_daemon *prefill, *decode;
	struct fault_room room;
};

enum which { PREFILL = 1, DECODE = 2, BOTH = 3 };

static const char *const names[] = { "", "prefill", "decode", "both" };

static void pair_begin(struct rig *rig, struct pair *pair, const char *extra)
{
	memset(pair, 0, sizeof(*pair));
	pair->prefill = rig_daemon_start(rig, "prefill", extra);
	pair->decode = rig_daemon_start(rig, "decode", extra);
	fault_room_make(&pair->room, 91, pair->prefill, pair->decode);
	fault_connect_both(&pair->room);
}

/* As systemd does it. Clients hear of it before they ask for anything. */
static void restart_orderly(struct pair *pair, enum which which)
{
	if (which & PREFILL)
		RIG_REQUIRE(rig_daemon_stop(pair->prefill) == 0);
	if (which & DECODE)
		RIG_REQUIRE(rig_daemon_stop(pair->decode) == 0);
	if (which & PREFILL)
		rig_daemon_restart(pair->prefill, STOPPING);
	if (which & DECODE)
		rig_daemon_restart(pair->decode, STOPPING);
	(void)kvp_process(pair->room.src.client);
	(void)kvp_process(pair->room.dst.client);
}

/* The clients hear of it before they ask for anything. */
static void restart(struct pair *pair, enum which which)
{
	if (which == BOTH) /* neither shall see the other go first */
		(void)kill(pair->decode->pid, SIGSTOP);
	if (which & PREFILL)
		rig_daemon_kill(pair->prefill);
	if (which & DECODE)
		rig_daemon_kill(pair->decode);
	if (which & PREFILL)
		rig_daemon_restart(pair->prefill, DAEMON);
	if (which & DECODE)
		rig_daemon_restart(pair->decode, DAEMON);
	(void)kvp_process(pair->room.src.client);
	(void)kvp_process(pair->room.dst.client);
}

static void room_over(struct pair *pair)
{
	fault_submit(&pair->room, FAULT_FIRST);
	fault_submit(&pair->room, FAULT_REST);
	fault_completes(&pair->room);
	fault_reset(&pair->room);
	fault_idle(pair->prefill);
	fault_idle(pair->decode);
}

/* One end is there and waits for the other. */
static void parked_by(struct rig *rig, void (*how)(struct pair *pair, enum which which))
{
	struct pair pair;
	enum which which;

	pair_begin(rig, &pair, DAEMON);
	for (which = PREFILL; which <= BOTH; which++) {
		printf("     decode waits, %s restarted\n", names[which]);
		fault_expect(&pair.room);
		how(&pair, which);
		fault_open(&pair.room);
		room_over(&pair);
		printf("     prefill waits, %s restarted\n", names[which]);
		fault_open(&pair.room);
		how(&pair, which);
		fault_expect(&pair.room);
		room_over(&pair);
	}
	fault_close(&pair.room);
}

static void parked(struct rig *rig)
{
	parked_by(rig, restart);
}

static void parked_orderly(struct rig *rig)
{
	parked_by(rig, restart_orderly);
}

/* Both ends are ready and nothing has been submitted. The end whose daemon is new is announced anew
 * by its library; the other had accepted a peer that is gone, and is told to try again. */
static void ready_by(struct rig *rig, void (*how)(struct pair *pair, enum which which),
		     enum which last)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	enum which which;

	pair_begin(rig, &pair, DAEMON);
	for (which = PREFILL; which <= last; which++) {
		printf("     ready, %s restarted\n", names[which]);
		fault_expect(room);
		fault_open(room);
		(void)rig_await(room->src.client, room->src.room, KVP_WAIT_READY, FAULT_SECS);
		(void)rig_await(room->dst.client, room->dst.room, KVP_WAIT_READY, FAULT_SECS);
		how(&pair, which);
		if (which == PREFILL) {
			RIG_REQUIRE(fault_fails(&room->dst, KVP_STATUS_PEER_LOST).retry);
			fault_released(&room->dst);
			fault_expect(room);
		} else if (which == DECODE) {
			RIG_REQUIRE(fault_fails(&room->src, KVP_STATUS_PEER_LOST).retry);
			fault_released(&room->src);
			fault_open(room);
		}
		room_over(&pair);
	}
	fault_close(room);
}

static void ready(struct rig *rig)
{
	ready_by(rig, restart, BOTH);
}

static void ready_orderly(struct rig *rig)
{
	ready_by(rig, restart_orderly, DECODE); /* one goes before the other */
}

static void moving(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	enum which which;

	pair_begin(rig, &pair, DAEMON);
	for (which = PREFILL; which <= BOTH; which++) {
		printf("     moving, %s restarted\n", names[which]);
		fault_expect(room);
		fault_open(room);
		fault_submit(room, FAULT_FIRST);
		fault_arrived(&room->dst, FAULT_HALF);
		RIG_REQUIRE(kvp_room_wait_delivered(room->src.client, room->src.room, 1,
						    FAULT_SECS * 1000) == 0);
		restart(&pair, which);
		RIG_REQUIRE(fault_fails(&room->src, which & PREFILL ? KVP_STATUS_DAEMON_LOST
								    : KVP_STATUS_PEER_LOST)
				    .retry);
		RIG_REQUIRE(fault_fails(&room->dst, which & DECODE ? KVP_STATUS_DAEMON_LOST
								   : KVP_STATUS_PEER_LOST)
				    .retry);
		fault_released(&room->src);
		fault_released(&room->dst);
		fault_check_rows(room, FAULT_HALF);
		fault_reset(room);
		fault_expect(room);
		fault_open(room);
		room_over(&pair);
	}
	fault_close(room);
}

/* As systemd stops it: what moves has drain's time, then fails with the reason at both ends. */
static void stopped(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	struct rig_daemon *victim;
	uint32_t i;

	pair_begin(rig, &pair, STOPPING);
	for (i = 0; i < 2; i++) {
		victim = i ? pair.decode : pair.prefill;
		fault_expect(room);
		fault_open(room);
		fault_submit(room, FAULT_FIRST);
		fault_arrived(&room->dst, FAULT_HALF);
		RIG_REQUIRE(rig_daemon_stop(victim) == 0);
		RIG_REQUIRE(fault_fails(&room->src, KVP_STATUS_STOPPING).retry);
		RIG_REQUIRE(fault_fails(&room->dst, KVP_STATUS_STOPPING).retry);
		fault_released(&room->src);
		fault_released(&room->dst);
		fault_check_rows(room, FAULT_HALF);
		fault_reset(room);
		rig_daemon_restart(victim, STOPPING);
		fault_transfer(room);
		fault_reset(room);
	}
	fault_close(room);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "parked", parked }, { "parked_orderly", parked_orderly },
		{ "ready", ready },   { "ready_orderly", ready_orderly },
		{ "moving", moving }, { "stopped", stopped },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
