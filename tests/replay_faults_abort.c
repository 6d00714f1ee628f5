/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Aborts by either end, at every test point and in every state of a room: the other end hears why,
 * both are released though the point still keeps, and the same room with the same pages is taken
 * at once.
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_faults.h"

#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"

struct pair {
	struct rig_daemon *prefill, *decode;
	struct fault_room room;
};

static void pair_begin_at(struct rig *rig, struct pair *pair, bool local)
{
	memset(pair, 0, sizeof(*pair));
	pair->prefill = rig_daemon_start(rig, "prefill", DAEMON);
	pair->decode = local ? pair->prefill : rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&pair->room, 11, pair->prefill, pair->decode);
	fault_connect_both(&pair->room);
}

static void pair_begin(struct rig *rig, struct pair *pair)
{
	pair_begin_at(rig, pair, false);
}

static void both_idle(const struct pair *pair)
{
	fault_idle(pair->prefill);
	fault_idle(pair->decode);
}

static void fails_for(const struct fault_end *end, const char *reason)
{
	struct kvp_room_state state = fault_fails(end, KVP_STATUS_ABORTED);

	RIG_REQUIRE(strstr(state.reason, reason) && !state.retry, "%s", state.reason);
}

/* Announces the room anew while its last life may not be quite over. */
static void announce(struct fault_room *room, int (*try)(struct fault_room *room),
		     const struct fault_end *end)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	enum kvp_status status;

	while (try(room) < 0) {
		status = kvp_last_status(end->client);
		RIG_REQUIRE(status == KVP_STATUS_EXISTS && rig_now_ns() < until, "%s: %s",
			    kvp_status_name(status), kvp_last_error(end->client));
		rig_sleep_ms(1);
	}
}

/* Aborts, and announces the same room at once. */
static void retract(struct fault_room *room, bool by_src)
{
	struct fault_end *ends[2] = { &room->src, &room->dst };
	struct fault_end old[2] = { room->src, room->dst };
	uint32_t i;

	RIG_CALL(ends[!by_src]->client,
		 kvp_abort(ends[!by_src]->client, ends[!by_src]->room, "thought better of it"));
	announce(room, fault_try_expect, &room->dst);
	fails_for(&old[0], "thought better of it");
	announce(room, fault_try_open, &room->src);
	fails_for(&old[1], "thought better of it");
	for (i = 0; i < 2; i++)
		fault_released(&old[i]);
}

/* ---- at the test points --------------------------------------------------------------------- */

static void point_run(struct pair *pair, const char *point, bool at_prefill, bool by_src)
{
	const struct rig_daemon *keeper = at_prefill ? pair->prefill : pair->decode;
	struct fault_room *room = &pair->room;
	bool offer = !strcmp(point, "offer");

	fault_expect(room);
	if (offer)
		fault_hold(keeper, point, true);
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	if (!offer) {
		RIG_REQUIRE(kvp_room_wait_delivered(room->src.client, room->src.room, 1,
						    FAULT_SECS * 1000) == 0);
		fault_arrived(&room->dst, FAULT_HALF);
		fault_hold(keeper, point, true);
	}
	fault_submit(room, strcmp(point, "landed") ? FAULT_REST : FAULT_REST_OPEN);
	fault_held(keeper, point);
	retract(room, by_src);
	fault_check_rows(room, offer ? 0 : FAULT_HALF);
	fault_hold(keeper, point, false);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_completes(room);
	fault_reset(room);
	both_idle(pair);
}

static void points(struct rig *rig)
{
	static const struct {
		const char *name;
		bool at_prefill;
	} list[] = { { "offer", false }, { "want", true }, { "grant", false },
		     { "gather", true }, { "send", true }, { "scatter", false },
		     { "landed", false } };
	struct pair pair;
	size_t i;

	pair_begin(rig, &pair);
	for (i = 0; i < 2 * KVP_ARRAY_SIZE(list); i++) {
		printf("     %s: %s aborts\n", list[i / 2].name, i % 2 ? "prefill" : "decode");
		point_run(&pair, list[i / 2].name, list[i / 2].at_prefill, i % 2);
	}
	fault_close(&pair.room);
}

/* ---- in the states -------------------------------------------------------------------------- */

/* Nobody but the end itself is there. */
static void alone(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair);
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	RIG_CALL(room->src.client, kvp_abort(room->src.client, room->src.room, "alone"));
	fails_for(&room->src, "alone");
	RIG_REQUIRE(rig_await(room->src.client, room->src.room, KVP_WAIT_RELEASED, FAULT_SECS)
			    .source_free == 1);
	fault_released(&room->src);

	fault_expect(room);
	RIG_CALL(room->dst.client, kvp_abort(room->dst.client, room->dst.room, "alone"));
	fails_for(&room->dst, "alone");
	fault_released(&room->dst);
	both_idle(&pair);
	fault_transfer(room);
	fault_close(room);
}

/* How far a room goes before one end aborts. */
enum progress { READY, MOVING, CLOSING, DONE };

static void reach(struct fault_room *room, enum progress progress)
{
	room->n_missing = progress == CLOSING; /* it never opens, so decode cannot complete */
	fault_expect(room);
	fault_open(room);
	(void)rig_await(room->src.client, room->src.room, KVP_WAIT_READY, FAULT_SECS);
	if (progress == READY)
		return;
	fault_submit(room, FAULT_FIRST);
	RIG_REQUIRE(kvp_room_wait_delivered(room->src.client, room->src.room, 1,
					    FAULT_SECS * 1000) == 0);
	if (progress == MOVING)
		return;
	fault_submit(room, FAULT_REST);
	RIG_REQUIRE(kvp_room_wait_delivered(room->src.client, room->src.room, 2,
					    FAULT_SECS * 1000) == 0);
	while (progress == CLOSING &&
	       rig_state(room->src.client, room->src.room).phase != KVP_ROOM_CLOSING)
		RIG_REQUIRE(kvp_wait(room->src.client, FAULT_SECS * 1000) >= 0);
}

static void states(struct rig *rig)
{
	static const char *const names[] = { "ready", "moving", "closing" };
	struct pair pair;
	struct fault_room *room = &pair.room;
	enum progress progress;
	uint32_t by_src;

	pair_begin(rig, &pair);
	for (progress = READY; progress <= CLOSING; progress++) {
		for (by_src = 0; by_src < 2; by_src++) {
			printf("     %s: %s aborts\n", names[progress],
			       by_src ? "prefill" : "decode");
			reach(room, progress);
			room->n_missing = 0;
			retract(room, by_src);
			fault_submit(room, FAULT_FIRST);
			fault_submit(room, FAULT_REST);
			fault_completes(room);
			fault_reset(room);
			both_idle(&pair);
		}
	}
	fault_close(room);
}

/*
 * The same room and the same pages over and over, retracted wherever it happens to be: what a round
 * leaves behind, or writes late, shows in a later one. The bytes are other ones each time.
 */
static void loop_at(struct rig *rig, bool local)
{
	enum { ROUNDS = 1000 };
	uint64_t seed = rig_now_ns();
	struct pair pair;
	struct fault_room *room = &pair.room;
	uint32_t i, fds[2], maps[2];

	pair_begin_at(rig, &pair, local);
	fault_transfer(room);
	fault_reset(room);
	both_idle(&pair);
	fds[0] = fault_fds(pair.prefill);
	fds[1] = fault_fds(pair.decode);
	maps[0] = fault_maps(pair.prefill);
	maps[1] = fault_maps(pair.decode);
	printf("     seed %llu\n", (unsigned long long)seed);
	fault_expect(room);
	fault_open(room);
	for (i = 0; i < ROUNDS; i++) {
		if (i % 2)
			(void)rig_await(room->src.client, room->src.room, KVP_WAIT_READY,
					FAULT_SECS);
		fault_submit(room, FAULT_FIRST);
		if (rig_random(&seed) % 2)
			fault_submit(room, FAULT_REST_OPEN);
		while (rig_random(&seed) % 4)
			(void)kvp_process(room->dst.client);
		retract(room, rig_random(&seed) % 2);
		fault_check_rows(room, 0);
		fault_reset(room);
		fault_renew(room);
	}
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_completes(room);
	both_idle(&pair);
	fault_fds_back(pair.prefill, fds[0]);
	fault_fds_back(pair.decode, fds[1]);
	fault_maps_back(pair.prefill, maps[0]);
	fault_maps_back(pair.decode, maps[1]);
	fault_close(room);
}

static void loop(struct rig *rig)
{
	loop_at(rig, false);
}

static void loop_local(struct rig *rig)
{
	loop_at(rig, true);
}

/* Too late: nothing changes. */
static void late(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair);
	reach(room, DONE);
	(void)rig_await(room->dst.client, room->dst.room, KVP_WAIT_TERMINAL, FAULT_SECS);
	RIG_CALL(room->dst.client, kvp_abort(room->dst.client, room->dst.room, "late"));
	(void)rig_await(room->src.client, room->src.room, KVP_WAIT_TERMINAL, FAULT_SECS);
	RIG_CALL(room->src.client, kvp_abort(room->src.client, room->src.room, "late"));
	fault_completes(room);
	both_idle(&pair);
	fault_close(room);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "points", points }, { "alone", alone },           { "states", states },
		{ "loop", loop },     { "loop_local", loop_local }, { "late", late },
	};

	if (!fault_points())
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
