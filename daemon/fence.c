/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/fence.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/util.h"

static void destroy(struct kvp_fence *fence)
{
	if (!fence)
		return;
	kvp_memfd_unmap(&fence->mem);
	for (uint32_t i = 0; i < fence->n_parts; i++)
		free(fence->parts[i].end_order);
	free(fence);
}

static void destroyp(struct kvp_fence **fence)
{
	destroy(*fence);
}

static void hand_over(struct kvp_fence *fence, struct kvp_order_fence **orders)
{
	fence->id = ++fence->fences->last_id;
	for (uint32_t i = 0; i < fence->n_parts; i++) {
		struct kvp_fence_part *part = &fence->parts[i];
		struct kvp_order_fence *order = KVP_TAKE(orders[i]);

		assert(order);
		kvp_board_init(&part->board, KVP_BOARD_FENCE, fence->id);
		part->fence = fence;
		order->order.type = KVP_ORDER_FENCE_ADD;
		order->board = &part->board;
		order->words = (const _Atomic uint64_t *)(const void *)fence->mem.map;
		order->n_words = fence->n_words;
		kvp_lane_order(fence->fences->lanes[i], &order->order);
	}
}

/* All lanes get it or none: what that takes is made before. */
static Kvp__Status give_to_lanes(struct kvp_fence *fence, char *err)
{
	struct kvp_order_fence *orders[KVP_FENCE_LANES] = { NULL };
	bool all = true;

	for (uint32_t i = 0; i < fence->n_parts; i++) {
		orders[i] = calloc(1, sizeof(*orders[i]));
		fence->parts[i].end_order = calloc(1, sizeof(*fence->parts[i].end_order));
		all = all && orders[i] && fence->parts[i].end_order;
	}
	if (all) {
		hand_over(fence, orders);
		return KVP__STATUS__STATUS_OK;
	}
	for (uint32_t i = 0; i < fence->n_parts; i++)
		free(orders[i]);
	(void)snprintf(err, KVP_FENCE_ERR, "no memory for a fence");
	return KVP__STATUS__STATUS_NO_MEMORY;
}

/* A memfd may be far larger than its words: address space is for all. */
static void keep_words(struct kvp_memfd *mem, uint32_t words)
{
	uint64_t keep = KVP_ALIGN_UP(words * sizeof(uint64_t), (uint64_t)sysconf(_SC_PAGESIZE));

	if (keep >= mem->bytes)
		return;
	(void)munmap((uint8_t *)mem->map + keep, mem->bytes - keep); /* of a mapping of ours */
	mem->bytes = keep;
}

Kvp__Status kvp_fence_register(struct kvp_fences *fences, const Kvp__FenceRegister *msg, int fd,
			       struct kvp_fence **out, char *err)
{
	KVP_CLEANUP(destroyp) struct kvp_fence *fence = calloc(1, sizeof(*fence));
	Kvp__Status status;

	if (!fence) {
		(void)snprintf(err, KVP_FENCE_ERR, "no memory for a fence");
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	fence->client_id = msg->fence;
	fence->n_words = msg->words;
	fence->n_parts = KVP_MIN(fences->n_lanes, KVP_FENCE_LANES);
	fence->fences = fences;
	status = kvp_memfd_map(fd, "fd 0", false, &fence->mem, err, KVP_FENCE_ERR);
	if (status != KVP__STATUS__STATUS_OK)
		return status;
	if (msg->words < 1 || msg->words > fence->mem.bytes / sizeof(uint64_t)) {
		(void)snprintf(err, KVP_FENCE_ERR,
			       "words is %u, fd 0 has %" PRIu64 " bytes: room for %" PRIu64,
			       msg->words, fence->mem.bytes, fence->mem.bytes / 8);
		return KVP__STATUS__STATUS_INVALID;
	}
	keep_words(&fence->mem, msg->words);
	status = give_to_lanes(fence, err);
	if (status != KVP__STATUS__STATUS_OK)
		return status;
	fences->n++;
	*out = KVP_TAKE(fence);
	return status;
}

void kvp_fence_end(struct kvp_fence *fence, void (*ended)(void *arg), void *arg)
{
	assert(!fence->ending);
	fence->ending = true;
	fence->ended = ended;
	fence->ended_arg = arg;
	for (uint32_t i = 0; i < fence->n_parts; i++) {
		struct kvp_order_id *order = KVP_TAKE(fence->parts[i].end_order);

		order->order.type = KVP_ORDER_FENCE_END;
		order->id = fence->id;
		kvp_lane_order(fence->fences->lanes[i], &order->order);
	}
}

void kvp_fence_board(struct kvp_board *board)
{
	struct kvp_fence *fence = KVP_CONTAINER_OF(board, struct kvp_fence_part, board)->fence;

	if (!(kvp_board_take(board) & KVP_BOARD_QUIET) || ++fence->n_quiet < fence->n_parts)
		return;
	assert(fence->ending && fence->fences->n > 0);
	fence->fences->n--;
	if (fence->ended)
		fence->ended(fence->ended_arg);
	destroy(fence);
}
