/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pools of one GPU on the lanes of others. A lane whose GPU can reach the memory maps it too, so
 * that it can move rows into it without a slot; the pool's own lane does not take part. A pool has
 * ended only when all of them have let go of it.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "proto/util.h"

static const struct kvp_pool_guest *find(const struct kvp_pool *pool, uint32_t lane_idx)
{
	for (uint32_t i = 0; i < pool->n_guests; i++)
		if (pool->guests[i].lane_idx == lane_idx)
			return &pool->guests[i];
	return NULL;
}

uint64_t kvp_pool_on(const struct kvp_pool *pool, uint32_t lane_idx)
{
	const struct kvp_pool_guest *guest = find(pool, lane_idx);

	if (pool->state != KVP_POOL_ACTIVE)
		return 0;
	if (lane_idx == pool->lane_idx)
		return pool->id;
	return guest && guest->state == KVP_GUEST_READY ? guest->board.id : 0;
}

bool kvp_pool_has_guests(const struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_guests; i++)
		if (pool->guests[i].state == KVP_GUEST_READY)
			return true;
	return false;
}

bool kvp_pool_guests_answered(const struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_guests; i++)
		if (pool->guests[i].state == KVP_GUEST_STARTING)
			return false;
	return true;
}

bool kvp_pool_guests_quiet(const struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_guests; i++)
		if (pool->guests[i].state != KVP_GUEST_NONE)
			return false;
	return true;
}

/* ---- begin ----------------------------------------------------------------------------------- */

static void *copy_of(const void *from, size_t bytes)
{
	void *copy = malloc(KVP_MAX(bytes, (size_t)1));

	if (!copy)
		return NULL;
	if (bytes)
		memcpy(copy, from, bytes);
	return copy;
}

static int copy_fds(struct kvp_order_pool *order, const struct kvp_order_pool *home)
{
	for (uint32_t i = 0; i < home->n_chunks; i++) {
		order->chunk_fds[i] = fcntl(home->chunk_fds[i], F_DUPFD_CLOEXEC, 0);
		if (order->chunk_fds[i] < 0)
			return -errno;
		order->n_chunks = i + 1;
	}
	return 0;
}

static void order_freep(struct kvp_order_pool **order)
{
	if (*order)
		kvp_order_free(&(*order)->order);
}

static int copy_order(const struct kvp_order_pool *home, struct kvp_order_pool **out)
{
	KVP_CLEANUP(order_freep) struct kvp_order_pool *order = copy_of(home, sizeof(*home));
	int r;

	if (!order)
		return -ENOMEM;
	order->n_chunks = 0;
	order->entries = copy_of(home->entries, home->n_entries * sizeof(*home->entries));
	order->fd_maps = copy_of(home->fd_maps, home->n_fds * sizeof(*home->fd_maps));
	order->memories = copy_of(home->memories, home->n_fds * sizeof(*home->memories));
	order->chunk_bytes = copy_of(home->chunk_bytes, home->n_chunks * sizeof(uint64_t));
	order->chunk_fds = calloc(home->n_chunks + 1, sizeof(*order->chunk_fds));
	if (!order->entries || !order->fd_maps || !order->memories || !order->chunk_bytes ||
	    !order->chunk_fds)
		return -ENOMEM;
	r = copy_fds(order, home);
	if (r == 0)
		*out = KVP_TAKE(order);
	return r;
}

static void guest_start(struct kvp_pools *pools, struct kvp_pool_guest *guest,
			const struct kvp_order_pool *home)
{
	struct kvp_pool *pool = guest->pool;
	struct kvp_order_pool *order = NULL;
	int r;

	guest->state = KVP_GUEST_NONE;
	if (pools->config->gpu.peer == KVP_PEER_OFF) {
		(void)snprintf(guest->reason, sizeof(guest->reason), "gpu.peer is off");
		return;
	}
	if (!guest->end_order)
		guest->end_order = calloc(1, sizeof(*guest->end_order));
	r = guest->end_order ? copy_order(home, &order) : -ENOMEM;
	if (!order) {
		(void)snprintf(guest->reason, sizeof(guest->reason), "%s", strerror(-r));
		return;
	}
	guest->reason[0] = '\0';
	guest->state = KVP_GUEST_STARTING;
	kvp_board_init(&guest->board, KVP_BOARD_GUEST, ++pools->last_id);
	order->board = &guest->board;
	(void)snprintf(order->home, sizeof(order->home), "%s", kvp_lane_gpu(pool->lane)); /* fits */
	kvp_lane_order(guest->lane, &order->order);
}

/* One for each other GPU. Without memory there are none, and rooms land. */
static void guests_make(struct kvp_pools *pools, struct kvp_pool *pool)
{
	pool->guests = calloc(pools->n_lanes, sizeof(*pool->guests));
	for (uint32_t i = 0; pool->guests && i < pools->n_lanes; i++)
		if (i != pool->lane_idx && kvp_lane_gpu(pools->lanes[i])[0])
			pool->guests[pool->n_guests++] = (struct kvp_pool_guest){
				.pool = pool, .lane = pools->lanes[i], .lane_idx = i
			};
}

void kvp_pool_guests_start(struct kvp_pools *pools, struct kvp_pool *pool,
			   const struct kvp_order_pool *home)
{
	if (!pool->on_gpu)
		return;
	if (!pool->guests)
		guests_make(pools, pool);
	for (uint32_t i = 0; i < pool->n_guests; i++)
		guest_start(pools, &pool->guests[i], home);
}

/* ---- end ------------------------------------------------------------------------------------- */

void kvp_pool_guests_end(struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_guests; i++) {
		struct kvp_pool_guest *guest = &pool->guests[i];
		struct kvp_order_id *order;

		if (guest->state == KVP_GUEST_NONE || !guest->end_order)
			continue;
		order = KVP_TAKE(guest->end_order);
		order->order.type = KVP_ORDER_POOL_END;
		order->id = guest->board.id;
		kvp_lane_order(guest->lane, &order->order);
	}
}

void kvp_pool_guests_free(struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_guests; i++)
		free(pool->guests[i].end_order);
	free(pool->guests);
	pool->guests = NULL;
	pool->n_guests = 0;
}

void kvp_pool_guest_board(struct kvp_board *board)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(10, 10); /* pools are clients' */
	struct kvp_pool_guest *guest = KVP_CONTAINER_OF(board, struct kvp_pool_guest, board);
	struct kvp_pool *pool = guest->pool;
	uint32_t flags = kvp_board_take(board);

	if (flags & KVP_BOARD_FAILED && !guest->reason[0]) {
		(void)snprintf(guest->reason, sizeof(guest->reason), "%s", board->text);
		kvp_log_limited(&limit, KVP_LOG_NOTICE,
				"pool %u of \"%s\": not reached from %s, rooms from there land: %s",
				pool->client_id, pool->client_name, kvp_lane_device(guest->lane),
				guest->reason);
	}
	if (flags & KVP_BOARD_QUIET)
		guest->state = KVP_GUEST_NONE;
	else if (flags & KVP_BOARD_READY && guest->state == KVP_GUEST_STARTING)
		guest->state = KVP_GUEST_READY;
	kvp_pool_settle(pool);
}
