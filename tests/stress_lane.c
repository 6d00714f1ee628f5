/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A lane that moves rooms while three threads order, fence and look at it: for ThreadSanitizer.
 * Local mode only, since the transport is not built for it. Rooms end in all ways: complete,
 * aborted by either side in the midst, recalled. Every complete room is checked, and every pool
 * that is quiet is taken away at once.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/support_lane.h"

#define ORDERERS 2u
#define ROOMS 60u
#define TOKENS 600u

struct orderer {
	struct lt lt; /* its own loop side; the lane is shared */
	struct kvp_lane *lane;
	uint32_t seed, complete, aborted;
	_Atomic uint64_t word;       /* the fence's */
	_Atomic uint64_t fence_goal; /* what the engine thread brings the word to */
	struct kvp_board fence_board;
};

static struct orderer orderers[ORDERERS];
static _Atomic bool over;

static uint32_t rnd(struct orderer *orderer)
{
	orderer->seed = orderer->seed * 1664525u + 1013904223u;
	return orderer->seed >> 8;
}

/* The engine: its stream reaches the fences a little later. */
static void *engine_main(void *arg)
{
	(void)arg;
	while (!atomic_load(&over)) {
		for (uint32_t i = 0; i < ORDERERS; i++)
			atomic_store_explicit(&orderers[i].word,
					      atomic_load(&orderers[i].fence_goal),
					      memory_order_release);
	}
	return NULL;
}

static void *display_main(void *arg)
{
	struct kvp_lane *lane = arg;
	uint64_t turns = 0;

	while (!atomic_load(&over)) {
		struct kvp_lane_status status = lt_status(lane);

		LT_REQUIRE(status.turns >= turns);
		turns = status.turns;
		LT_REQUIRE(status.pack_slots == 0 || status.pack_free <= status.pack_slots);
	}
	return NULL;
}

static void fence_add(struct orderer *orderer)
{
	struct kvp_order_fence *fence = lt_alloc(1, sizeof(*fence));

	kvp_board_init(&orderer->fence_board, KVP_BOARD_FENCE, lt_id(&orderer->lt));
	fence->order.type = KVP_ORDER_FENCE_ADD;
	fence->board = &orderer->fence_board;
	fence->words = &orderer->word;
	fence->n_words = 1;
	kvp_lane_order(orderer->lane, &fence->order);
}

static void submit(struct orderer *orderer, struct lt_room *room)
{
	struct lt_chunk chunk = { .fence = orderer->fence_board.id };

	while (room->senders[0].next < TOKENS) {
		chunk.tokens = KVP_MIN(TOKENS - room->senders[0].next, UINT64_C(150));
		chunk.last = room->senders[0].next + chunk.tokens == TOKENS;
		chunk.fence_value = atomic_load(&orderer->fence_goal) + rnd(orderer) % 2;
		atomic_store(&orderer->fence_goal, chunk.fence_value);
		(void)lt_submit(room, 0, &chunk);
	}
}

static void run_room(struct orderer *orderer, uint64_t id)
{
	struct lt_room *room = lt_alloc(1, sizeof(*room));
	struct lt_pool *pools = lt_alloc(3, sizeof(*pools));
	struct lt_shape shape = { .page = 16,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = 40,
				  .layers = 2,
				  .row_bytes = 64,
				  .seed = id };
	uint32_t how = rnd(orderer) % 4;

	room->lt = &orderer->lt;
	room->room = id;
	room->end = TOKENS;
	room->n_senders = 1;
	room->n_dests = 2;
	room->meta_from = -1;
	room->slot_bytes = 1 << 16;
	lt_pool_make(&pools[0], &orderer->lt, orderer->lane, &shape);
	lt_pool_fill(&pools[0], id, 0, TOKENS);
	room->senders[0].pool = &pools[0];
	shape.dcp_size = 2;
	for (uint32_t d = 0; d < 2; d++) {
		shape.dcp_rank = d;
		lt_pool_make(&pools[1 + d], &orderer->lt, orderer->lane, &shape);
		room->dests[d].pool = &pools[1 + d];
	}
	lt_room_begin(room);
	submit(orderer, room);
	if (how == 1)
		lt_order_id(orderer->lane, KVP_ORDER_TX_RECALL, room->senders[0].board.id, 2);
	if (how >= 2) {
		lt_room_complete(room);
		lt_room_check(room);
		orderer->complete++;
	} else {
		orderer->aborted++;
	}
	lt_room_end(room);
	for (uint32_t i = 0; i < 3; i++)
		lt_pool_end(&pools[i]);
	free(pools);
	free(room);
}

static void *orderer_main(void *arg)
{
	struct orderer *orderer = arg;

	fence_add(orderer);
	for (uint32_t i = 0; i < ROOMS; i++)
		run_room(orderer, orderer->seed + i);
	lt_order_id(orderer->lane, KVP_ORDER_FENCE_END, orderer->fence_board.id, 0);
	lt_wait(&orderer->lt, &orderer->fence_board, KVP_BOARD_QUIET);
	return NULL;
}

/* All boards of a lane go to one inbox: each orderer has a lane of its own. */
int main(void)
{
	pthread_t threads[2 * ORDERERS + 1];
	uint32_t n = 0;

	for (uint32_t i = 0; i < ORDERERS; i++) {
		struct orderer *orderer = &orderers[i];
		struct kvp_lane_config config = { .slots = 4, .pack = true, .spin_ns = 20000 };

		lt_begin(&orderer->lt);
		orderer->lane = lt_lane(&orderer->lt, &config);
		orderer->seed = i + 1;
		LT_REQUIRE(pthread_create(&threads[n++], NULL, orderer_main, orderer) == 0);
	}
	for (uint32_t i = 0; i < ORDERERS; i++)
		LT_REQUIRE(pthread_create(&threads[n++], NULL, display_main, orderers[i].lane) ==
			   0);
	LT_REQUIRE(pthread_create(&threads[n++], NULL, engine_main, NULL) == 0);
	for (uint32_t i = 0; i < ORDERERS; i++)
		LT_REQUIRE(pthread_join(threads[i], NULL) == 0);
	atomic_store(&over, true);
	for (uint32_t i = ORDERERS; i < n; i++)
		LT_REQUIRE(pthread_join(threads[i], NULL) == 0);
	for (uint32_t i = 0; i < ORDERERS; i++) {
		printf("lane %u: %u complete, %u aborted\n", i, orderers[i].complete,
		       orderers[i].aborted);
		lt_end(&orderers[i].lt);
	}
	return 0;
}
