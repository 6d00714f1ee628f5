/* SPDX-License-Identifier: Apache-2.0 */

/* What the loop orders: each order is freed here or goes on as a part of the object that it adds.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

static struct kvp_lane_fence *fence_find(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_table_node *node = kvp_table_find(&lane->fences, id);

	return node ? KVP_CONTAINER_OF(node, struct kvp_lane_fence, node) : NULL;
}

struct kvp_lane_pool *kvp_lane_pool_find(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_table_node *node = kvp_table_find(&lane->pools, id);

	return node ? KVP_CONTAINER_OF(node, struct kvp_lane_pool, node) : NULL;
}

void kvp_lane_refuse_end(struct kvp_lane *lane, struct kvp_order *order, struct kvp_board *board,
			 const struct kvp_lane_pool *pool)
{
	(void)kvp_board_fail(board, lane->config.loop,
			     pool ? KVP__STATUS__STATUS_NO_MEMORY : KVP__STATUS__STATUS_POOL_GONE,
			     pool ? "lane %s has no memory" : "lane %s has no such pool",
			     lane->config.name);
	kvp_order_free(order);
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

static void close_fds(struct kvp_order_pool *order, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		kvp_closep(&order->chunk_fds[i]);
		order->chunk_fds[i] = -1;
	}
}

void kvp_lane_pool_close_fds(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	close_fds(pool->order, pool->order->n_chunks);
	lane->n_dmabufs -= pool->n_dmabufs;
	pool->n_dmabufs = 0;
}

/* The mapping holds the memory. Dma-bufs are for NICs, and for pools of this lane. */
static void close_mapped(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	struct kvp_order_pool *order = pool->order;
	uint32_t chunks = 0, dmabufs;

	for (uint32_t i = 0; i < order->n_fds; i++)
		chunks += order->memories[i].n_chunks;
	dmabufs = order->n_chunks - chunks;
	if (!kvp_lane_direct(lane) || order->home[0] ||
	    lane->n_dmabufs + dmabufs > KVP_LANE_DMABUFS) {
		close_fds(order, order->n_chunks);
		return;
	}
	close_fds(order, chunks);
	pool->n_dmabufs = (uint16_t)dmabufs;
	lane->n_dmabufs += dmabufs;
}

static void order_pool_free(struct kvp_order_pool *order)
{
	close_fds(order, order->n_chunks);
	free(order->chunk_fds);
	free(order->chunk_bytes);
	free(order->memories);
	free(order->entries);
	free(order->fd_maps);
	free(order);
}

static void order_rx_free(struct kvp_order_rx *order)
{
	free(order->pages);
	free(order->segments);
	free(order);
}

static void order_chunk_free(struct kvp_order_chunk *order)
{
	free(order->pages);
	free(order->segments);
	free(order->meta);
	free(order);
}

void kvp_order_free(struct kvp_order *order)
{
	switch (order->type) {
	case KVP_ORDER_POOL_ADD:
		order_pool_free((struct kvp_order_pool *)order);
		return;
	case KVP_ORDER_EP_ADD:
		free(((struct kvp_order_ep *)order)->addr);
		break;
	case KVP_ORDER_RX_ADD:
		order_rx_free((struct kvp_order_rx *)order);
		return;
	case KVP_ORDER_RX_LEG:
		free(((struct kvp_order_rx_leg *)order)->leg.block);
		break;
	case KVP_ORDER_TX_LEG:
		free(((struct kvp_order_tx_leg *)order)->leg.block);
		free(((struct kvp_order_tx_leg *)order)->segments);
		break;
	case KVP_ORDER_TX_CHUNK:
		order_chunk_free((struct kvp_order_chunk *)order);
		return;
	default:
		break;
	}
	free(order);
}

/* Memory of a GPU is mapped here: the loop waits for READY. False: the pool is over. */
static bool pool_map(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	struct kvp_order_pool *order = pool->order;
	struct kvp_board *board = order->board;
	char err[KVP_BOARD_TEXT] = "";
	int r;

	if (!order->memories)
		return true;
	if (kvp_lane_on_gpu(lane)) {
		r = kvp_lane_pool_import(lane, pool, err, sizeof(err));
	} else {
		r = -EINVAL;
		(void)snprintf(err, sizeof(err), "lane %s has no GPU", lane->config.name);
	}
	if (r == 0) {
		close_mapped(lane, pool);
		kvp_board_post(board, lane->config.loop, KVP_BOARD_READY);
		return true;
	}
	(void)kvp_board_fail(board, lane->config.loop,
			     r == -ENOMEM                   ? KVP__STATUS__STATUS_NO_MEMORY
			     : r == -EINVAL || r == -ERANGE ? KVP__STATUS__STATUS_INVALID
							    : KVP__STATUS__STATUS_SYSTEM,
			     "%s", err);
	return false;
}

static void pool_free(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	struct kvp_board *board = pool->order->board;

	kvp_direct_pool_free(lane, pool);
	kvp_lane_pool_close_fds(lane, pool);
	kvp_lane_pool_unmap(lane, pool);
	kvp_table_remove(&lane->pools, &pool->node);
	order_pool_free(pool->order); /* and the pool with it */
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

static void pool_add(struct kvp_lane *lane, struct kvp_order_pool *order)
{
	struct kvp_lane_pool *pool = (struct kvp_lane_pool *)(void *)order->record;

	memset(pool, 0, sizeof(*pool));
	pool->order = order;
	pool->node.id = order->board->id;
	(void)kvp_table_add(&lane->pools, &pool->node); /* ids are new */
	if (!pool_map(lane, pool))
		pool_free(lane, pool);
}

void kvp_lane_pool_put(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	if (--pool->refs == 0 && pool->ended)
		pool_free(lane, pool);
}

static void pool_end(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_lane_pool *pool = kvp_lane_pool_find(lane, id);

	if (!pool)
		return;

	pool->ended = true;
	if (pool->refs == 0)
		pool_free(lane, pool);
}

static void fence_add(struct kvp_lane *lane, struct kvp_order_fence *order)
{
	struct kvp_lane_fence *fence = (struct kvp_lane_fence *)(void *)order->record;

	fence->order = order;
	fence->node.id = order->board->id;
	(void)kvp_table_add(&lane->fences, &fence->node); /* ids are new */
}

/* Words are read in a turn only, and looked up each time: nothing refers to the fence. */
static void fence_end(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_lane_fence *fence = fence_find(lane, id);
	struct kvp_board *board;

	if (!fence)
		return;

	board = fence->order->board;
	kvp_table_remove(&lane->fences, &fence->node);
	free(fence->order); /* and the fence with it */
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

int kvp_lane_fence_reached(struct kvp_lane *lane, const struct kvp_order_chunk *chunk)
{
	const struct kvp_lane_fence *fence;

	if (chunk->fence == 0)
		return 1;

	fence = fence_find(lane, chunk->fence);
	if (!fence || chunk->fence_word >= fence->order->n_words)
		return -1;
	return atomic_load_explicit(&fence->order->words[chunk->fence_word],
				    memory_order_acquire) >= chunk->fence_value;
}

static void hold(struct kvp_lane *lane, uint64_t point, bool on)
{
	if (point >= KVP_HOLD_N)
		return;

	if (on)
		lane->holds |= 1u << point;
	else
		lane->holds &= ~(1u << point);
#ifdef KVP_TEST
	if (point == KVP_HOLD_WILD && kvp_lane_on_gpu(lane))
		kvp_gpu_wild(lane->mover.gpu, on);
#endif
}

/* Orders that are no more than an id and a number. */
static void handle_id(struct kvp_lane *lane, struct kvp_order_id *order)
{
	switch (order->order.type) {
	case KVP_ORDER_POOL_END:
		pool_end(lane, order->id);
		break;
	case KVP_ORDER_FENCE_END:
		fence_end(lane, order->id);
		break;
	case KVP_ORDER_EP_END:
		kvp_link_end(lane, order->id);
		break;
	case KVP_ORDER_RX_END:
		kvp_rx_end(lane, order->id);
		break;
	case KVP_ORDER_TX_START:
		kvp_tx_start(lane, order->id);
		break;
	case KVP_ORDER_TX_RECALL:
		kvp_tx_recall(lane, order->id, order->value);
		break;
	case KVP_ORDER_TX_END:
		kvp_tx_end(lane, order->id);
		break;
	case KVP_ORDER_HOLD:
		hold(lane, order->id, order->value != 0);
		break;
	default:
		break;
	}
	free(order);
}

void kvp_lane_handle(struct kvp_lane *lane, struct kvp_order *order)
{
	switch (order->type) {
	case KVP_ORDER_POOL_ADD:
		pool_add(lane, (struct kvp_order_pool *)order);
		break;
	case KVP_ORDER_FENCE_ADD:
		fence_add(lane, (struct kvp_order_fence *)order);
		break;
	case KVP_ORDER_EP_ADD:
		kvp_link_add(lane, (struct kvp_order_ep *)order);
		break;
	case KVP_ORDER_RX_ADD:
		kvp_rx_add(lane, (struct kvp_order_rx *)order);
		break;
	case KVP_ORDER_RX_LEG:
		kvp_rx_leg_add(lane, (struct kvp_order_rx_leg *)order);
		break;
	case KVP_ORDER_TX_ADD:
		kvp_tx_add(lane, (struct kvp_order_tx *)order);
		break;
	case KVP_ORDER_TX_LEG:
		kvp_tx_leg_add(lane, (struct kvp_order_tx_leg *)order);
		break;
	case KVP_ORDER_TX_CHUNK:
		kvp_tx_chunk(lane, (struct kvp_order_chunk *)order);
		break;
	default:
		handle_id(lane, (struct kvp_order_id *)order);
		break;
	}
}
