/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/fence.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/util.h"

static void destroy(struct kvp_fence *fence)
{
	if (!fence)
		return;
	kvp_memfd_unmap(&fence->mem);
	free(fence->end_order);
	free(fence);
}

static void destroyp(struct kvp_fence **fence)
{
	destroy(*fence);
}

static Kvp__Status hand_over(struct kvp_fence *fence, char *err)
{
	KVP_CLEANUP(kvp_freep) struct kvp_order_fence *order = calloc(1, sizeof(*order));

	fence->end_order = calloc(1, sizeof(*fence->end_order));
	if (!order || !fence->end_order) {
		(void)snprintf(err, KVP_FENCE_ERR, "no memory for a fence");
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	fence->id = ++fence->fences->last_id;
	kvp_board_init(&fence->board, KVP_BOARD_FENCE, fence->id);
	order->order.type = KVP_ORDER_FENCE_ADD;
	order->board = &fence->board;
	order->words = (const _Atomic uint64_t *)(const void *)fence->mem.map;
	order->n_words = fence->n_words;
	kvp_lane_order(fence->lane, &KVP_TAKE(order)->order);
	return KVP__STATUS__STATUS_OK;
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
	fence->lane = fences->lane;
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
	status = hand_over(fence, err);
	if (status != KVP__STATUS__STATUS_OK)
		return status;
	fences->n++;
	*out = KVP_TAKE(fence);
	return status;
}

void kvp_fence_end(struct kvp_fence *fence, void (*ended)(void *arg), void *arg)
{
	struct kvp_order_id *order = KVP_TAKE(fence->end_order);

	assert(!fence->ending);
	fence->ending = true;
	fence->ended = ended;
	fence->ended_arg = arg;
	order->order.type = KVP_ORDER_FENCE_END;
	order->id = fence->id;
	kvp_lane_order(fence->lane, &order->order);
}

void kvp_fence_board(struct kvp_board *board)
{
	struct kvp_fence *fence = KVP_CONTAINER_OF(board, struct kvp_fence, board);

	if (!(kvp_board_take(board) & KVP_BOARD_QUIET))
		return;
	assert(fence->ending && fence->fences->n > 0);
	fence->fences->n--;
	if (fence->ended)
		fence->ended(fence->ended_arg);
	destroy(fence);
}
