/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/pool.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <utlist.h>

#include "daemon/gpu.h"
#include "daemon/log.h"
#include "daemon/memfd.h"
#include "proto/limits.h"
#include "proto/util.h"

#define OK KVP__STATUS__STATUS_OK
#define INVALID KVP__STATUS__STATUS_INVALID

/* ---- mappings */

static void unmap(struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_fds; i++) {
		struct kvp_memfd mem = { pool->maps[i], pool->map_bytes[i], false };

		kvp_memfd_unmap(&mem);
		pool->maps[i] = NULL;
		pool->map_bytes[i] = 0;
	}
}

/* What a pool is to lie in. */
struct source {
	Kvp__Memory *const *memories; /* [n_memories]; none: each fd is a memfd */
	size_t n_memories;
	const int *fds; /* [n_fds] */
	uint32_t n_fds;
};

static bool source_on_gpu(const struct source *source)
{
	return source->n_memories > 0 && source->memories[0]->gpu.len > 0;
}

/* What fd_index of the entries counts. */
static uint32_t source_n(const struct source *source)
{
	return source->n_memories ? (uint32_t)source->n_memories : source->n_fds;
}

/* Address space that host pools of the uid take. Memfds may be far larger than what is in them. */
static uint64_t mapped_of(const struct kvp_pools *pools, uint32_t uid)
{
	const struct kvp_pool *pool;
	uint64_t bytes = 0;

	DL_FOREACH (pools->first, pool)
		for (uint32_t i = 0; pool->uid == uid && i < pool->n_fds; i++)
			bytes += pool->maps[i] ? pool->map_bytes[i] : 0;
	return bytes;
}

static Kvp__Status check_mapped(uint64_t mapped, uint64_t bytes, uint32_t idx, char *err)
{
	if (bytes <= KVP_LIMIT_MAPPED && mapped <= KVP_LIMIT_MAPPED - bytes)
		return OK;
	(void)snprintf(err, KVP_POOL_ERR,
		       "fd %u: %" PRIu64 " bytes, and %" PRIu64
		       " of this user are mapped, at most %" PRIu64 " together",
		       idx, bytes, mapped, (uint64_t)KVP_LIMIT_MAPPED);
	return KVP__STATUS__STATUS_LIMIT;
}

/* Size of a file as far as it is known before it is sealed. */
static uint64_t size_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
}

/* On refusal nothing is mapped. */
static Kvp__Status map(const struct kvp_pools *pools, struct kvp_pool *pool,
		       const struct source *source, char *err)
{
	uint64_t mapped = pool->on_gpu ? 0 : mapped_of(pools, pool->uid);
	bool writable = true;

	pool->n_dmabufs = 0;
	pool->dmabuf_reason[0] = '\0';
	for (uint32_t i = 0; i < pool->n_fds; i++) {
		struct kvp_memfd mem;
		char what[16];
		Kvp__Status status;

		if (pool->on_gpu) { /* its lane maps it */
			const Kvp__Memory *msg = source->memories[i];

			pool->map_bytes[i] = msg->bytes;
			pool->n_dmabufs += msg->dmabuf_bytes > 0;
			if (!pool->dmabuf_reason[0])
				(void)snprintf(pool->dmabuf_reason, sizeof(pool->dmabuf_reason),
					       "%s", msg->dmabuf_reason); /* fits */
			continue;
		}
		(void)snprintf(what, sizeof(what), "fd %u", i); /* always fits */
		status = check_mapped(mapped, size_of(source->fds[i]), i, err);
		if (status == OK)
			status = kvp_memfd_map(source->fds[i], what, true, &mem, err, KVP_POOL_ERR);
		if (status != OK) {
			unmap(pool);
			return status;
		}
		pool->maps[i] = mem.map;
		pool->map_bytes[i] = mem.bytes;
		mapped += mem.bytes;
		writable = writable && mem.writable;
	}
	pool->writable = writable;
	return OK;
}

/* Entries against the fds as measured now. */
static Kvp__Status check_extents(const struct kvp_pool *pool, char *err)
{
	for (uint32_t i = 0; i < pool->n_entries; i++) {
		char text[KVP_PLAN_ERR_BYTES];

		if (kvp_entry_check(&pool->entries[i], pool->map_bytes[pool->entries[i].fd_idx],
				    text, sizeof(text)) == 0)
			continue;
		(void)snprintf(err, KVP_POOL_ERR, "entries[%u]: %.200s", i, text); /* may be cut */
		return INVALID;
	}
	return OK;
}

/* ---- what the entries say */

static struct kvp_entry entry_of(const Kvp__Entry *msg)
{
	return (struct kvp_entry){
		.base = msg->offset,
		.bytes = msg->bytes,
		.page_stride = msg->page_stride,
		.row_stride = msg->row_stride,
		.layer = msg->layer,
		.group = msg->group,
		.fd_idx = msg->fd_index,
		.row_bytes = msg->row_bytes,
		.lo = msg->lo,
		.full_bytes = msg->full_bytes,
		.rows_per_page = msg->rows_per_page,
		.n_pages = msg->n_pages,
		.klass = (uint8_t)msg->klass,
	};
}

static Kvp__Status check_entry(const struct kvp_pool *pool, uint32_t i, char *err)
{
	const struct kvp_entry *entry = &pool->entries[i];

	if (entry->fd_idx >= pool->n_fds)
		(void)snprintf(err, KVP_POOL_ERR, "entries[%u].fd_index is %u, %u fds came along",
			       i, entry->fd_idx, pool->n_fds);
	else if (entry->group >= KVP_LANE_GROUPS)
		(void)snprintf(err, KVP_POOL_ERR, "entries[%u].group is %u, allowed are 0 to %u", i,
			       entry->group, KVP_LANE_GROUPS - 1);
	else if (entry->klass != KVP_CLASS_BLOB && entry->n_pages > KVP_POOL_PAGES_MAX)
		(void)snprintf(err, KVP_POOL_ERR, "entries[%u].n_pages is %u, at most %u", i,
			       entry->n_pages, KVP_POOL_PAGES_MAX);
	else if (pool->on_gpu && entry->klass != KVP_CLASS_BLOB && entry->rows_per_page > 1 &&
		 entry->row_stride > UINT32_MAX)
		(void)snprintf(err, KVP_POOL_ERR,
			       "entries[%u].row_stride is %" PRIu64 ", at most %u on a GPU", i,
			       entry->row_stride, UINT32_MAX);
	else
		return OK;
	return INVALID;
}

static void count_groups(struct kvp_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_entries; i++) {
		const struct kvp_entry *entry = &pool->entries[i];
		uint32_t *pages = &pool->group_pages[entry->group];

		pool->bytes += entry->bytes;
		if (entry->klass == KVP_CLASS_BLOB)
			continue;
		*pages = *pages ? KVP_MIN(*pages, entry->n_pages) : entry->n_pages;
		pool->n_groups = KVP_MAX(pool->n_groups, entry->group + 1);
	}
}

static Kvp__Status make_bitmaps(struct kvp_pool *pool, char *err)
{
	for (uint32_t g = 0; g < KVP_LANE_GROUPS; g++) {
		if (!pool->group_pages[g])
			continue;
		pool->held[g] = calloc(KVP_DIV_UP(pool->group_pages[g], 64u), sizeof(uint64_t));
		if (pool->held[g])
			continue;
		(void)snprintf(err, KVP_POOL_ERR, "no memory for the pages of group %u", g);
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	return OK;
}

static Kvp__Status check_token_fits(const struct kvp_pool *pool, char *err)
{
	uint64_t need = kvp_entries_token_bytes(pool->entries, pool->n_entries);
	uint64_t slot = kvp_lane_slot_bytes(pool->lane);

	if (need <= slot)
		return OK;
	(void)snprintf(err, KVP_POOL_ERR,
		       "entries: one token of the pool takes %" PRIu64
		       " bytes of a slot, slots have %" PRIu64 " bytes (%s.slot_bytes)",
		       need, slot, pool->on_gpu ? "gpu" : "host");
	return INVALID;
}

static Kvp__Status take_entries(struct kvp_pool *pool, const Kvp__PoolRegister *msg, char *err)
{
	char text[KVP_PLAN_ERR_BYTES];

	pool->entries = calloc(msg->n_entries, sizeof(*pool->entries));
	if (!pool->entries) {
		(void)snprintf(err, KVP_POOL_ERR, "no memory for %zu entries", msg->n_entries);
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	pool->n_entries = (uint32_t)msg->n_entries;
	for (uint32_t i = 0; i < pool->n_entries; i++) {
		pool->entries[i] = entry_of(msg->entries[i]);
		if (check_entry(pool, i, err) != OK)
			return INVALID;
	}
	if (kvp_entries_check(pool->entries, pool->n_entries, text, sizeof(text)) < 0) {
		(void)snprintf(err, KVP_POOL_ERR, "entries: %.240s", text); /* may be cut */
		return INVALID;
	}
	count_groups(pool);
	return OK;
}

static Kvp__Status check_counts(struct kvp_pools *pools, const Kvp__PoolRegister *msg, uint32_t n,
				char *err)
{
	uint32_t most = msg->n_memories ? KVP_POOL_MEMORIES : KVP_LIMIT_FDS;

	if (n < 1 || n > most) {
		(void)snprintf(err, KVP_POOL_ERR, "%u %s came along, allowed are 1 to %u", n,
			       msg->n_memories ? "memories" : "fds", most);
		return INVALID;
	}
	if (msg->n_entries < 1 || msg->n_entries > 64u * KVP_LANE_MASK_WORDS) {
		(void)snprintf(err, KVP_POOL_ERR, "entries: %zu, allowed are 1 to %u",
			       msg->n_entries, 64u * KVP_LANE_MASK_WORDS);
		return INVALID;
	}
	if (msg->layout_tag.len > sizeof(((struct kvp_pool *)0)->tag)) {
		(void)snprintf(err, KVP_POOL_ERR, "layout_tag: %zu bytes, at most %zu",
			       msg->layout_tag.len, sizeof(((struct kvp_pool *)0)->tag));
		return INVALID;
	}
	if (msg->n_entries > pools->config->limits.max_entries) {
		pools->refused_entries++;
		(void)snprintf(err, KVP_POOL_ERR, "entries: %zu, at most %u (limits.max_entries)",
			       msg->n_entries, pools->config->limits.max_entries);
		return KVP__STATUS__STATUS_LIMIT;
	}
	if (pools->n >= pools->config->limits.max_pools) {
		pools->refused++;
		(void)snprintf(err, KVP_POOL_ERR,
			       "%u pools are registered, at most %u (limits.max_pools)", pools->n,
			       pools->config->limits.max_pools);
		return KVP__STATUS__STATUS_LIMIT;
	}
	return OK;
}

/* ---- orders */

static void free_order(struct kvp_order_pool **order)
{
	if (*order)
		kvp_order_free(&(*order)->order);
}

static Kvp__Status no_memory(char *err)
{
	(void)snprintf(err, KVP_POOL_ERR, "no memory to hand the pool to its lane");
	return KVP__STATUS__STATUS_NO_MEMORY;
}

/* The lane gets descriptors of its own: the packet's are closed when it has been answered. */
static Kvp__Status take_chunks(struct kvp_order_pool *order, const struct source *source, char *err)
{
	order->chunk_fds = calloc(source->n_fds + 1, sizeof(*order->chunk_fds));
	order->chunk_bytes = calloc(source->n_fds + 1, sizeof(*order->chunk_bytes));
	if (!order->chunk_fds || !order->chunk_bytes)
		return no_memory(err);
	for (uint32_t i = 0; i < source->n_fds; i++) {
		order->chunk_fds[i] = fcntl(source->fds[i], F_DUPFD_CLOEXEC, 0);
		if (order->chunk_fds[i] < 0) {
			(void)snprintf(err, KVP_POOL_ERR, "fd %u: %s", i, strerror(errno));
			return KVP__STATUS__STATUS_SYSTEM;
		}
		order->n_chunks = i + 1;
	}
	return OK;
}

/* Their fds are the last, from index `at` on: the message has been checked. */
static void take_dmabufs(struct kvp_order_pool *order, const struct source *source, uint32_t at)
{
	for (size_t i = 0; i < source->n_memories; i++) {
		const Kvp__Memory *msg = source->memories[i];
		struct kvp_lane_memory *memory = &order->memories[i];

		memory->dmabuf = msg->dmabuf_bytes ? at++ : 0;
		memory->dmabuf_bytes = msg->dmabuf_bytes;
		memory->dmabuf_offset = msg->dmabuf_offset;
	}
}

/* What the lane needs to import. */
static Kvp__Status take_memories(struct kvp_order_pool *order, const struct source *source,
				 char *err)
{
	uint32_t chunk = 0;
	Kvp__Status status;

	order->memories = calloc(source->n_memories, sizeof(*order->memories));
	if (!order->memories)
		return no_memory(err);
	status = take_chunks(order, source, err);
	if (status != OK)
		return status;
	for (size_t i = 0; i < source->n_memories; i++) {
		const Kvp__Memory *msg = source->memories[i];
		struct kvp_lane_memory *memory = &order->memories[i];

		memory->vmm = msg->kind == KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
		memory->offset = msg->offset;
		memory->bytes = msg->bytes;
		memory->first_chunk = chunk;
		memory->n_chunks = (uint32_t)msg->n_chunk_bytes;
		if (!memory->vmm)
			memcpy(memory->handle, msg->handle.data, sizeof(memory->handle));
		for (size_t k = 0; k < msg->n_chunk_bytes; k++)
			order->chunk_bytes[chunk++] = msg->chunk_bytes[k];
	}
	take_dmabufs(order, source, chunk);
	return OK;
}

/* Gives the mapped pool to its lane under a new id. */
static Kvp__Status hand_over(struct kvp_pools *pools, struct kvp_pool *pool,
			     const struct source *source, char *err)
{
	KVP_CLEANUP(free_order) struct kvp_order_pool *order = calloc(1, sizeof(*order));
	Kvp__Status status = OK;

	if (!order)
		return no_memory(err);
	order->order.type = KVP_ORDER_POOL_ADD;
	order->entries = calloc(pool->n_entries, sizeof(*order->entries));
	order->fd_maps = calloc(pool->n_fds, sizeof(*order->fd_maps));
	if (!order->entries || !order->fd_maps)
		return no_memory(err);
	if (pool->on_gpu)
		status = take_memories(order, source, err);
	if (status != OK)
		return status;
	memcpy(order->entries, pool->entries, pool->n_entries * sizeof(*order->entries));
	memcpy(order->fd_maps, pool->maps, pool->n_fds * sizeof(*order->fd_maps));
	pool->id = ++pools->last_id;
	kvp_board_init(&pool->board, KVP_BOARD_POOL, pool->id);
	pool->state = pool->on_gpu ? KVP_POOL_STARTING : KVP_POOL_ACTIVE;
	pool->ready = pool->quiet = false;
	order->board = &pool->board;
	order->owner_uid = pool->uid;
	order->owner = pool->session;
	order->writable = pool->writable;
	order->n_entries = pool->n_entries;
	order->n_fds = pool->n_fds;
	kvp_pool_guests_start(pools, pool, order);
	kvp_lane_order(pool->lane, &KVP_TAKE(order)->order);
	return OK;
}

/* The order is allocated when the pool is made: an end must not fail for want of memory. */
static void order_end(struct kvp_pool *pool)
{
	struct kvp_order_id *order = KVP_TAKE(pool->end_order);

	order->order.type = KVP_ORDER_POOL_END;
	order->id = pool->id;
	order->value = 0;
	kvp_lane_order(pool->lane, &order->order);
	kvp_pool_guests_end(pool);
}

static Kvp__Status start(struct kvp_pools *pools, struct kvp_pool *pool,
			 const struct source *source, char *err)
{
	Kvp__Status status;

	if (!pool->end_order)
		pool->end_order = calloc(1, sizeof(*pool->end_order));
	if (!pool->end_order) {
		(void)snprintf(err, KVP_POOL_ERR, "no memory for a pool");
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	status = map(pools, pool, source, err);
	if (status == OK)
		status = check_extents(pool, err);
	if (status == OK)
		status = hand_over(pools, pool, source, err);
	if (status != OK)
		unmap(pool);
	return status;
}

/* ---- life */

static void destroy(struct kvp_pool *pool)
{
	if (!pool)
		return;
	unmap(pool);
	kvp_pool_guests_free(pool);
	for (uint32_t g = 0; g < KVP_LANE_GROUPS; g++)
		free(pool->held[g]);
	free(pool->end_order);
	free(pool->entries);
	free(pool);
}

static void destroyp(struct kvp_pool **pool)
{
	destroy(*pool);
}

static struct kvp_pool *create(const struct kvp_pool_client *client, const Kvp__PoolRegister *msg,
			       const struct source *source)
{
	struct kvp_pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->client_id = msg->pool;
	pool->session = client->session;
	pool->uid = client->uid;
	(void)snprintf(pool->client_name, sizeof(pool->client_name), "%s", client->name);
	(void)snprintf(pool->label, sizeof(pool->label), "%s", msg->label ? msg->label : "");
	if (msg->layout_tag.len)
		memcpy(pool->tag, msg->layout_tag.data, msg->layout_tag.len);
	pool->tag_bytes = (uint32_t)msg->layout_tag.len;
	pool->n_fds = source_n(source);
	pool->on_gpu = source_on_gpu(source);
	return pool;
}

/* The lane of the device that the memory is of. */
static Kvp__Status choose_lane(const struct kvp_pools *pools, const struct source *source,
			       uint32_t *lane_idx, char *err)
{
	char uuid[KVP_GPU_UUID];

	*lane_idx = 0;
	if (!source_on_gpu(source))
		return OK;
	kvp_gpu_uuid_text(uuid, source->memories[0]->gpu.data);
	for (uint32_t i = 0; i < pools->n_lanes; i++) {
		if (strcmp(kvp_lane_gpu(pools->lanes[i]), uuid) != 0)
			continue;
		*lane_idx = i;
		return OK;
	}
	for (uint32_t i = 0; i < pools->n_refusals; i++) {
		if (strcmp(pools->refusals[i].uuid, uuid) != 0)
			continue;
		(void)snprintf(err, KVP_POOL_ERR, "memories: of %s, which is not served: %.170s",
			       uuid, pools->refusals[i].reason); /* may be cut */
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	(void)snprintf(err, KVP_POOL_ERR,
		       "memories: of %s, which this daemon does not use (gpu.devices is %.60s)",
		       uuid, pools->config->gpu.devices);
	return KVP__STATUS__STATUS_UNSUPPORTED;
}

static Kvp__Status fill(struct kvp_pools *pools, struct kvp_pool *pool,
			const Kvp__PoolRegister *msg, const struct source *source, char *err)
{
	Kvp__Status status = choose_lane(pools, source, &pool->lane_idx, err);

	pool->lane = pools->lanes[pool->lane_idx];
	if (status == OK)
		status = take_entries(pool, msg, err);
	if (status == OK)
		status = check_token_fits(pool, err);
	if (status == OK)
		status = make_bitmaps(pool, err);
	if (status == OK)
		status = start(pools, pool, source, err);
	return status;
}

Kvp__Status kvp_pools_register(struct kvp_pools *pools, const struct kvp_pool_client *client,
			       const Kvp__PoolRegister *msg, const int *fds, uint32_t n_fds,
			       struct kvp_pool **out, char *err)
{
	const struct source source = { msg->memories, msg->n_memories, fds, n_fds };
	KVP_CLEANUP(destroyp) struct kvp_pool *pool = NULL;
	Kvp__Status status = check_counts(pools, msg, source_n(&source), err);

	if (status != OK)
		return status;
	pool = create(client, msg, &source);
	if (!pool) {
		(void)snprintf(err, KVP_POOL_ERR, "no memory for a pool");
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	status = fill(pools, pool, msg, &source, err);
	if (status != OK)
		return status;
	DL_APPEND(pools->first, pool);
	pools->n++;
	*out = KVP_TAKE(pool);
	return OK;
}

Kvp__Status kvp_pools_resume(struct kvp_pools *pools, struct kvp_pool *pool,
			     const Kvp__PoolResume *msg, const int *fds, uint32_t n_fds, char *err)
{
	const struct source source = { msg->memories, msg->n_memories, fds, n_fds };
	uint32_t lane_idx = 0;
	Kvp__Status status;

	if (pool->state != KVP_POOL_PAUSED) {
		(void)snprintf(err, KVP_POOL_ERR, "pool %u is %s, only a paused one resumes",
			       pool->client_id,
			       pool->state == KVP_POOL_ENDING     ? "still being unmapped"
			       : pool->state == KVP_POOL_STARTING ? "still being mapped"
								  : "active");
		return INVALID;
	}
	if (source_n(&source) != pool->n_fds) {
		(void)snprintf(err, KVP_POOL_ERR,
			       "%u %s came along, pool %u was registered with %u",
			       source_n(&source), source.n_memories ? "memories" : "fds",
			       pool->client_id, pool->n_fds);
		return INVALID;
	}
	status = choose_lane(pools, &source, &lane_idx, err);
	if (status != OK)
		return status;
	if (lane_idx != pool->lane_idx) {
		(void)snprintf(err, KVP_POOL_ERR, "memories: not on the device of pool %u (%s)",
			       pool->client_id, kvp_lane_device(pool->lane));
		return INVALID;
	}
	return start(pools, pool, &source, err);
}

void kvp_pool_end(struct kvp_pool *pool, bool pausing,
		  void (*ended)(struct kvp_pool *pool, void *arg), void *arg)
{
	assert(pool->state == KVP_POOL_ACTIVE || pool->state == KVP_POOL_STARTING);
	pool->state = KVP_POOL_ENDING;
	pool->started = NULL;
	pool->pausing = pausing;
	pool->ended = ended;
	pool->ended_arg = arg;
	if (pool->n_users == 0)
		order_end(pool);
}

void kvp_pool_get(struct kvp_pool *pool)
{
	assert(pool->state == KVP_POOL_ACTIVE);
	pool->n_users++;
}

void kvp_pool_put(struct kvp_pool *pool)
{
	assert(pool->n_users > 0);
	if (--pool->n_users == 0 && pool->state == KVP_POOL_ENDING)
		order_end(pool);
}

/* Its lane has mapped it, or could not and has forgotten it; then no other keeps it. */
static void settle_start(struct kvp_pool *pool)
{
	if ((!pool->ready && !pool->quiet) || !kvp_pool_guests_answered(pool))
		return;
	if (pool->quiet) {
		kvp_pool_guests_end(pool);
		if (!kvp_pool_guests_quiet(pool))
			return;
	}
	pool->state = pool->quiet ? KVP_POOL_PAUSED : KVP_POOL_ACTIVE;
	if (pool->started)
		pool->started(pool, pool->quiet ? (Kvp__Status)pool->board.status : OK,
			      pool->quiet ? pool->board.text : "", pool->started_arg);
}

void kvp_pool_settle(struct kvp_pool *pool)
{
	if (pool->state == KVP_POOL_STARTING) {
		settle_start(pool);
		return;
	}
	if (pool->state != KVP_POOL_ENDING || !pool->quiet || !kvp_pool_guests_quiet(pool))
		return;
	unmap(pool);
	pool->state = KVP_POOL_PAUSED;
	pool->ended(pool, pool->ended_arg);
}

void kvp_pool_board(struct kvp_board *board)
{
	struct kvp_pool *pool = KVP_CONTAINER_OF(board, struct kvp_pool, board);
	uint32_t flags = kvp_board_take(board);

	if (flags & KVP_BOARD_READY)
		pool->ready = true;
	if (flags & KVP_BOARD_QUIET) {
		/* Nothing but an order of ours ends a pool that is mapped, and it goes out when no
		 * room uses it. */
		assert(pool->state == KVP_POOL_STARTING ||
		       (pool->state == KVP_POOL_ENDING && pool->n_users == 0));
		pool->quiet = true;
	}
	kvp_pool_settle(pool);
}

void kvp_pool_free(struct kvp_pools *pools, struct kvp_pool *pool)
{
	assert(pool->state == KVP_POOL_PAUSED && pools->n > 0);
	DL_DELETE(pools->first, pool);
	pools->n--;
	destroy(pool);
}

/* ---- pages */

static bool test_and_set(uint64_t *bits, uint32_t page)
{
	uint64_t bit = UINT64_C(1) << (page % 64);
	bool was = bits[page / 64] & bit;

	bits[page / 64] |= bit;
	return was;
}

static void clear(uint64_t *bits, const uint32_t *pages, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		bits[pages[i] / 64] &= ~(UINT64_C(1) << (pages[i] % 64));
}

int kvp_pool_hold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n,
		  uint32_t *bad)
{
	for (uint32_t i = 0; i < n; i++) {
		bool inside = group < KVP_LANE_GROUPS && pages[i] < pool->group_pages[group];

		if (inside && !test_and_set(pool->held[group], pages[i]))
			continue;
		if (i > 0)
			clear(pool->held[group], pages, i);
		*bad = pages[i];
		return inside ? -EBUSY : -ERANGE;
	}
	pool->pages_held += n;
	return 0;
}

void kvp_pool_unhold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n)
{
	if (n == 0)
		return;
	assert(group < KVP_LANE_GROUPS && pool->pages_held >= n);
	clear(pool->held[group], pages, n);
	pool->pages_held -= n;
}
