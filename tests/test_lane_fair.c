/* SPDX-License-Identifier: Apache-2.0 */

/* Several sessions, or several rooms of one, into one receiver: none gets much more than another.
 */

#include <criterion/criterion.h>
#include <stdlib.h>

#include "tests/support_lane.h"

#define SENDERS 8u
#define SLOT 32768u
#define TOKENS 4096u

struct fair {
	struct lt lt;
	struct kvp_lane *to, *from[SENDERS];
	struct lt_pipe pipes[SENDERS];
	struct lt_pool src[SENDERS], dst[SENDERS];
	struct lt_room rooms[SENDERS];
	uint64_t goal; /* bytes in all */
};

static void fair_make(struct fair *fair, uint32_t n_sessions)
{
	struct kvp_lane_config config = {
		.slots = 16, .slot_bytes = SLOT, .pack = true, .net = &kvp_net_ucx
	};
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = TOKENS / 64,
				  .layers = 2,
				  .row_bytes = 576 };

	lt_begin(&fair->lt);
	fair->to = lt_lane(&fair->lt, &config);
	for (uint32_t i = 0; i < n_sessions; i++) {
		fair->from[i] = lt_lane(&fair->lt, &config);
		lt_pipe_make(&fair->lt, &fair->pipes[i], fair->from[i], fair->to, i + 1);
	}
	for (uint32_t i = 0; i < SENDERS; i++) {
		struct lt_room *room = &fair->rooms[i];
		uint32_t session = i % n_sessions;

		shape.seed = i;
		lt_pool_make(&fair->src[i], &fair->lt, fair->from[session], &shape);
		lt_pool_make(&fair->dst[i], &fair->lt, fair->to, &shape);
		*room = (struct lt_room){ .lt = &fair->lt,
					  .room = i + 1,
					  .end = TOKENS,
					  .n_senders = 1,
					  .n_dests = 1,
					  .meta_from = -1,
					  .slot_bytes = SLOT,
					  .pipe = &fair->pipes[session] };
		room->senders[0].pool = &fair->src[i];
		room->dests[0].pool = &fair->dst[i];
	}
}

static void fair_end(struct fair *fair, uint32_t n_sessions)
{
	for (uint32_t i = 0; i < SENDERS; i++) {
		lt_room_end(&fair->rooms[i]);
		lt_pool_end(&fair->src[i]);
		lt_pool_end(&fair->dst[i]);
	}
	for (uint32_t i = 0; i < n_sessions; i++)
		lt_pipe_end(&fair->lt, &fair->pipes[i]);
	lt_end(&fair->lt);
}

static uint64_t landed(const struct fair *fair, uint32_t i)
{
	return atomic_load(&fair->rooms[i].dests[0].board.bytes);
}

static bool half_way(void *arg)
{
	const struct fair *fair = arg;
	uint64_t sum = 0;

	for (uint32_t i = 0; i < SENDERS; i++)
		sum += landed(fair, i);
	return sum >= fair->goal;
}

#define ROUNDS 5

/* Each of them has between a half and one and a half of an eighth. */
static bool is_fair(const struct fair *fair)
{
	uint64_t bytes[SENDERS], sum = 0;

	for (uint32_t i = 0; i < SENDERS; i++) {
		bytes[i] = landed(fair, i);
		sum += bytes[i];
	}
	for (uint32_t i = 0; i < SENDERS; i++) {
		if (bytes[i] * SENDERS * 2 > sum && bytes[i] * SENDERS * 2 < sum * 3)
			continue;
		cr_log_info("room %u has %llu of %llu", i, (unsigned long long)bytes[i],
			    (unsigned long long)sum);
		return false;
	}
	return true;
}

/* All wants are at the receiver before the first grant; half way through, each has its share. */
static bool fair_round(uint32_t n_sessions)
{
	struct fair *fair = calloc(1, sizeof(*fair));
	bool fine;

	cr_assert(fair);
	fair_make(fair, n_sessions);
	lt_hold(fair->to, KVP_HOLD_GRANT, true);
	for (uint32_t i = 0; i < SENDERS; i++) {
		lt_room_begin(&fair->rooms[i]);
		lt_submit_all(&fair->rooms[i], 0, TOKENS);
	}
	lt_wait_held(&fair->lt, fair->to, KVP_HOLD_GRANT, n_sessions == 1 ? 60 : 100);
	fair->goal = (uint64_t)SENDERS * TOKENS * 2 * 576 / 2;
	lt_hold(fair->to, KVP_HOLD_GRANT, false);
	lt_wait_until(&fair->lt, half_way, fair, "half of the bytes");
	fine = is_fair(fair);
	for (uint32_t i = 0; i < SENDERS; i++)
		lt_room_complete(&fair->rooms[i]);
	fair_end(fair, n_sessions);
	free(fair);
	return fine;
}

/* Nine threads share the processors with whatever else runs: a round in which one of them got no
 * time says nothing. A receiver that is unfair is so in each. */
static void fair_share(uint32_t n_sessions)
{
	uint32_t round = 0;

	while (!fair_round(n_sessions))
		cr_assert_lt(++round, ROUNDS, "%u unfair rounds", ROUNDS);
}

Test(lane_fair, eight_sessions)
{
	fair_share(SENDERS);
}

Test(lane_fair, eight_rooms_of_a_session)
{
	fair_share(1);
}
