/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode: memory of pools as the transport knows it. The host's is registered by its address.
 * A GPU's is reached by a dma-buf: the one that its owner sent along, or one of this process's own
 * mapping where that is made of chunks. Without either, or where the GPU would not see what was
 * written, the pool's pieces land.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/lane_impl.h"
#include "daemon/log.h"
#include "proto/util.h"

/* Offsets in a window have 32 bits; some devices take no more at once either. */
#define REGION_BYTES (UINT64_C(2) << 30)

/* What entries take up of one mapping: all that lies between their ends. */
static void extent(const struct kvp_order_pool *pool, uint32_t fd_idx, uint64_t *from, uint64_t *to)
{
	*from = UINT64_MAX;
	*to = 0;
	for (uint32_t i = 0; i < pool->n_entries; i++) {
		const struct kvp_entry *entry = &pool->entries[i];

		if (entry->fd_idx != fd_idx)
			continue;
		*from = KVP_MIN(*from, entry->base);
		*to = KVP_MAX(*to, entry->base + entry->bytes);
	}
	*from = KVP_MIN(*from, *to);
}

static uint64_t count_regions(const struct kvp_order_pool *pool)
{
	uint64_t from, to, n = 0;

	for (uint32_t i = 0; i < pool->n_fds; i++) {
		extent(pool, i, &from, &to);
		n += KVP_DIV_UP(to - from, REGION_BYTES);
	}
	return n;
}

static void cut_regions(struct kvp_direct_pool *direct, const struct kvp_order_pool *pool)
{
	uint64_t from, to;

	for (uint32_t i = 0; i < pool->n_fds; i++) {
		extent(pool, i, &from, &to);
		for (; from < to; from += REGION_BYTES)
			direct->regions[direct->n_regions++] = (struct kvp_direct_region){
				.base = pool->fd_maps[i] + from,
				.bytes = KVP_MIN(to - from, REGION_BYTES),
				.fd_idx = i,
			};
	}
}

void kvp_direct_pool_want(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	uint64_t n;

	if (pool->direct || !kvp_lane_direct(lane))
		return;

	n = count_regions(pool->order);
	if (n == 0 || n > KVP_WIRE_LEG_WINDOWS)
		return;
	pool->direct = calloc(1, sizeof(*pool->direct) + n * sizeof(pool->direct->regions[0]));
	if (!pool->direct)
		return;

	pool->direct->pool = pool;
	pool->direct->why = KVP_WHY_MEMORY;
	cut_regions(pool->direct, pool->order);
	TAILQ_INSERT_TAIL(&lane->registering, pool->direct, link);
}

static void count_region(struct kvp_lane *lane, const struct kvp_direct_region *region, int n)
{
	lane->counts.regions += (uint64_t)n;
	lane->counts.region_bytes += (uint64_t)n * region->bytes;
	if (region->how == KVP_REGION_DMABUF)
		lane->counts.regions_dmabuf += (uint64_t)n;
	if (region->how == KVP_REGION_VMM)
		lane->counts.regions_vmm += (uint64_t)n;
}

static void forget_regions(struct kvp_lane *lane, struct kvp_direct_pool *direct)
{
	while (direct->n_done > 0) {
		struct kvp_direct_region *region = &direct->regions[--direct->n_done];

		lane->config.net->region_remove(lane->net, region->net);
		region->net = NULL;
		count_region(lane, region, -1);
	}
}

static void settle_pool(struct kvp_lane *lane, struct kvp_direct_pool *direct,
			enum kvp_direct_state state)
{
	direct->state = state;
	TAILQ_REMOVE(&lane->registering, direct, link);
	kvp_lane_pool_close_fds(lane, direct->pool); /* the transport has its own */
}

void kvp_direct_pool_free(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	if (!pool->direct)
		return;

	if (pool->direct->state == KVP_DIRECT_PENDING)
		settle_pool(lane, pool->direct, KVP_DIRECT_UNABLE);
	kvp_lane_call(lane, "end of a registration");
	forget_regions(lane, pool->direct);
	kvp_lane_call(lane, NULL);
	free(pool->direct);
	pool->direct = NULL;
}

/* ---- memory of a GPU ------------------------------------------------------------------------- */

bool kvp_direct_flushes(const struct kvp_lane *lane)
{
	return kvp_lane_on_gpu(lane) &&
	       (kvp_gpu_traits(lane->mover.gpu)->ordering < KVP_GPU_ORDERED ||
		lane->config.flush == KVP_FLUSH_ALWAYS);
}

/* What a NIC writes has to be seen by what the engine launches once it is told. */
static bool is_seen(const struct kvp_lane *lane, struct kvp_direct_pool *direct)
{
	if (!kvp_direct_flushes(lane) || kvp_gpu_traits(lane->mover.gpu)->can_flush)
		return true;

	direct->why = KVP_WHY_UNSEEN;
	(void)snprintf(direct->err, sizeof(direct->err), "%s",
		       lane->config.flush == KVP_FLUSH_ALWAYS
			       ? "gpu.flush is always, and the device cannot be told to"
			       : "the device does not see what a NIC writes, and cannot be "
				 "told to"); /* fits */
	return false;
}

static int span_add(struct kvp_lane *lane, struct kvp_direct_region *region, int dmabuf,
		    uint64_t dmabuf_offset, char *err, size_t err_bytes)
{
	const struct kvp_net_span span = {
		.base = region->base,
		.bytes = region->bytes,
		.dmabuf_fd = dmabuf,
		.dmabuf_offset = dmabuf_offset,
	};

	return lane->config.net->region_add(lane->net, &span, &region->net, err, err_bytes);
}

/* By the dma-buf that its owner has made. */
static int owners_add(struct kvp_lane *lane, const struct kvp_direct_pool *direct,
		      struct kvp_direct_region *region, char *err, size_t err_bytes)
{
	const struct kvp_order_pool *order = direct->pool->order;
	const struct kvp_lane_memory *memory = &order->memories[region->fd_idx];
	uint64_t offset = (uint64_t)(region->base - order->fd_maps[region->fd_idx]);

	if (!memory->dmabuf_bytes) {
		(void)snprintf(err, err_bytes, "memory of a GPU, and its owner gave no dma-buf");
		return -EOPNOTSUPP;
	}
	if (order->chunk_fds[memory->dmabuf] < 0) {
		(void)snprintf(err, err_bytes, "more than %u dma-bufs of pools", KVP_LANE_DMABUFS);
		return -ENOBUFS;
	}
	region->how = KVP_REGION_DMABUF;
	return span_add(lane, region, order->chunk_fds[memory->dmabuf],
			memory->dmabuf_offset + offset, err, err_bytes);
}

/* By one of our own mapping of its chunks; of memory by IPC the driver makes none. */
static int own_add(struct kvp_lane *lane, const struct kvp_direct_pool *direct,
		   struct kvp_direct_region *region, char *err, size_t err_bytes)
{
	const struct kvp_order_pool *order = direct->pool->order;
	uint64_t offset = (uint64_t)(region->base - order->fd_maps[region->fd_idx]);
	int fd = -1;
	int r = kvp_gpu_import_dmabuf(lane->mover.imports, direct->pool->imports[region->fd_idx],
				      &fd, err, err_bytes);

	if (r < 0)
		return r;
	region->how = KVP_REGION_VMM;
	r = span_add(lane, region, fd, order->memories[region->fd_idx].offset + offset, err,
		     err_bytes);
	(void)close(fd); /* the transport has its own, if it took it */
	return r;
}

static int gpu_add(struct kvp_lane *lane, struct kvp_direct_pool *direct,
		   struct kvp_direct_region *region)
{
	char first[72] = "", second[72] = "";
	int r;

	if (!is_seen(lane, direct))
		return -EOPNOTSUPP;
	if (lane->counts.regions_dmabuf + lane->counts.regions_vmm == KVP_LANE_DMABUFS) {
		(void)snprintf(direct->err, sizeof(direct->err),
			       "%u dma-bufs are registered, as many as may be", KVP_LANE_DMABUFS);
		return -ENOBUFS;
	}
	r = owners_add(lane, direct, region, first, sizeof(first));
	if (r < 0 && direct->pool->order->memories[region->fd_idx].vmm)
		r = own_add(lane, direct, region, second, sizeof(second));
	if (r < 0)
		(void)snprintf(direct->err, sizeof(direct->err), "%s%s%s",
			       first[0] ? first : strerror(-r), second[0] ? "; by our own: " : "",
			       second); /* fits */
	return r;
}

/* ---- registration ---------------------------------------------------------------------------- */

static int region_add(struct kvp_lane *lane, struct kvp_direct_pool *direct,
		      struct kvp_direct_region *region)
{
	if (direct->pool->order->memories)
		return gpu_add(lane, direct, region);
	region->how = KVP_REGION_HOST;
	return span_add(lane, region, -1, 0, direct->err, sizeof(direct->err));
}

/* One region a turn: pinning takes time in proportion to its bytes. */
static void register_one(struct kvp_lane *lane, struct kvp_direct_pool *direct)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(10, 10); /* pools are clients' */
	struct kvp_direct_region *region = &direct->regions[direct->n_done];
	int r;

	kvp_lane_call(lane, "registration of a pool");
	r = region_add(lane, direct, region);
	kvp_lane_call(lane, NULL);
	lane->now_ns = kvp_lane_now();
	if (r < 0) {
		kvp_log_limited(&limit, KVP_LOG_NOTICE, "lane %s: no direct writes into a pool: %s",
				lane->config.name, direct->err[0] ? direct->err : strerror(-r));
		forget_regions(lane, direct);
		settle_pool(lane, direct, KVP_DIRECT_UNABLE);
		return;
	}
	direct->n_done++;
	count_region(lane, region, 1);
	if (direct->n_done == direct->n_regions)
		settle_pool(lane, direct, KVP_DIRECT_READY);
}

uint32_t kvp_direct_register(struct kvp_lane *lane)
{
	struct kvp_direct_pool *direct = TAILQ_FIRST(&lane->registering);

	if (!direct)
		return 0;
	register_one(lane, direct);
	return 1;
}
