/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_lane.h"

#include "proto/sums.h"
#include "tests/support_clock.h"

#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define WAIT_NS UINT64_C(20000000000)
#define BACKGROUND 0xb7

void lt_die(const char *where, int line, const char *cond, const char *fmt, ...)
{
	va_list args;

	fprintf(stderr, "%s:%d: %s", where, line, cond);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fprintf(stderr, "\n");
	abort();
}

uint64_t lt_now(void)
{
	return support_clock_ns();
}

void *lt_alloc(size_t n, size_t bytes)
{
	void *p = calloc(n ? n : 1, bytes);

	LT_REQUIRE(p);
	return p;
}

static void *copy_of(const void *from, size_t bytes)
{
	void *p = lt_alloc(1, bytes ? bytes : 1);

	if (bytes)
		memcpy(p, from, bytes);
	return p;
}

/* ---- lanes ----------------------------------------------------------------------------------- */

void lt_begin(struct lt *lt)
{
	memset(lt, 0, sizeof(*lt));
	lt->wake_fd = kvp_wakefd_open();
	LT_REQUIRE(lt->wake_fd >= 0);
	kvp_inbox_init(&lt->inbox, kvp_wakefd_wake, &lt->wake_fd);
	lt->next_id = 1000;
}

const struct kvp_net_ops *lt_net(void)
{
	const char *net = getenv("KVP_TEST_NET");

	return net && strcmp(net, "verbs") == 0 ? &kvp_net_verbs : &kvp_net_ucx;
}

bool lt_rdma(struct kvp_net_verbs_config *verbs)
{
	kvp_net_verbs_defaults(verbs);
	verbs->devices = "rxe0";
	return getenv("KVP_TEST_NET") && lt_net() == &kvp_net_ucx;
}

/* KVP_TEST_MODE, over RDMA: direct, landing, auto. */
static uint32_t test_mode(const struct kvp_lane_config *config)
{
	const char *mode = getenv("KVP_TEST_MODE");

	if (mode && strcmp(mode, "direct") == 0 && config->pack)
		return KVP_DATA_DIRECT;
	return mode && strcmp(mode, "landing") == 0 ? KVP_DATA_LANDING : KVP_DATA_AUTO;
}

bool lt_direct(void)
{
	const struct kvp_lane_config config = { .pack = true };

	return &lt_configure || (getenv("KVP_TEST_NET") && test_mode(&config) == KVP_DATA_DIRECT);
}

struct kvp_lane *lt_lane(struct lt *lt, const struct kvp_lane_config *given)
{
	struct kvp_lane_config config = *given;
	struct kvp_net_verbs_config verbs;
	char err[256] = "";
	int r;

	config.rdma = lt_rdma(&verbs);
	config.verbs = &verbs;
	if (config.net == &kvp_net_ucx)
		config.net = lt_net();
	if (getenv("KVP_TEST_NET"))
		config.mode = test_mode(&config);
	if (&lt_configure)
		lt_configure(&config);
	config.name = config.name ? config.name : "host";
	config.slots = config.slots ? config.slots : 64;
	config.slot_bytes = config.slot_bytes ? config.slot_bytes : 1 << 20;
	config.wants_per_session = config.wants_per_session ? config.wants_per_session : 64;
	config.interface = "lo";
	config.gpu = &lt_gpu ? lt_gpu : NULL;
	if (&lt_gpu_net && config.net == &kvp_net_ucx && config.memory == KVP_RINGS_AUTO)
		config.net = lt_gpu_net(config.net);
	config.loop = &lt->inbox;
	r = kvp_lane_start(&lt->lanes[lt->n_lanes], &config, err, sizeof(err));
	LT_REQUIRE(r == 0, "%s", err);
	return lt->lanes[lt->n_lanes++];
}

static void drain(struct lt *lt)
{
	struct kvp_node *node;

	kvp_wakefd_clear(lt->wake_fd);
	node = kvp_inbox_take(&lt->inbox);
	while (node) {
		struct kvp_node *next = node->next;

		(void)kvp_board_take(KVP_CONTAINER_OF(node, struct kvp_board, node));
		node = next;
	}
}

void lt_end(struct lt *lt)
{
	for (uint32_t i = 0; i < lt->n_lanes; i++)
		kvp_lane_stop(lt->lanes[i]);
	drain(lt);
	kvp_inbox_fini(&lt->inbox);
	(void)close(lt->wake_fd);
}

uint64_t lt_id(struct lt *lt)
{
	return lt->next_id++;
}

/* Where everything stands, for who wonders why it does not go on. */
static void dump(const struct lt *lt)
{
	for (uint32_t i = 0; i < lt->n_lanes; i++) {
		struct kvp_lane_status s = lt_status(lt->lanes[i]);

		(void)fprintf(
			stderr,
			"lane %u: %lu turns, %lu sleeps, work %d, slots %u/%u pack %u/%u land, "
			"%u wants, %lu sent %lu landed, raw %lu, no token %lu, stale %lu, bad "
			"%lu; net %s: %lu sent %lu received %lu dropped, %u eps, %u pending\n",
			i, s.turns, s.sleeps, s.has_work, s.pack_free, s.pack_slots, s.land_free,
			s.land_slots, s.wants_queued, s.pieces_sent, s.pieces_landed, s.raw_rows,
			s.no_token, s.stale, s.bad_messages, s.net_describe, s.net.sent_messages,
			s.net.recv_messages, s.net.dropped, s.net.eps, s.net.pending);
	}
}

void lt_wait_until(struct lt *lt, bool (*done)(void *arg), void *arg, const char *what)
{
	uint64_t until = lt_now() + WAIT_NS;

	for (;;) {
		struct pollfd pfd = { .fd = lt->wake_fd, .events = POLLIN };

		drain(lt);
		if (done(arg))
			return;
		if (lt_now() >= until)
			dump(lt);
		LT_REQUIRE(lt_now() < until, "waited too long for %s", what);
		(void)poll(&pfd, 1, 1);
	}
}

struct flags_wait {
	struct kvp_board *board;
	uint32_t flags;
};

/* What the lane still posts must be drained before the caller may free the board. */
static bool has_flags(void *arg)
{
	const struct flags_wait *wait = arg;
	uint32_t flags = kvp_board_flags(wait->board);

	return (flags & wait->flags) &&
	       (!(wait->flags & KVP_BOARD_QUIET) || !(flags & KVP_BOARD_POSTED));
}

void lt_wait(struct lt *lt, struct kvp_board *board, uint32_t flags)
{
	char what[KVP_BOARD_TEXT + 128];
	struct flags_wait wait = { board, flags };

	(void)snprintf(what, sizeof(what), "flags %x of board %u %llu: it has %x, waits for %s",
		       flags, board->kind, (unsigned long long)board->id, kvp_board_flags(board),
		       kvp_wait_name(atomic_load(&board->waits)));
	lt_wait_until(lt, has_flags, &wait, what);
}

void lt_order_id(struct kvp_lane *lane, enum kvp_order_type type, uint64_t id, uint32_t value)
{
	struct kvp_order_id *order = lt_alloc(1, sizeof(*order));

	order->order.type = type;
	order->id = id;
	order->value = value;
	kvp_lane_order(lane, &order->order);
}

struct kvp_lane_status lt_status(struct kvp_lane *lane)
{
	struct kvp_lane_status status;

	kvp_lane_status_read(lane, &status);
	return status;
}

struct held_wait {
	struct kvp_lane *lane;
	enum kvp_hold point;
	uint32_t n;
};

static bool is_held(void *arg)
{
	const struct held_wait *wait = arg;

	return lt_status(wait->lane).holds[wait->point] >= wait->n;
}

void lt_wait_held(struct lt *lt, struct kvp_lane *lane, enum kvp_hold point, uint32_t at_least)
{
	struct held_wait wait = { lane, point, at_least };

	lt_wait_until(lt, is_held, &wait, "pieces at a test point");
}

void lt_hold(struct kvp_lane *lane, enum kvp_hold point, bool on)
{
	uint64_t until = lt_now() + WAIT_NS;

	lt_order_id(lane, KVP_ORDER_HOLD, point, on);
	/* What others send from now on may reach the lane before the order does. */
	while ((lt_status(lane).holds_on >> point & 1) != on) {
		LT_REQUIRE(lt_now() < until, "the lane takes no orders");
		(void)sched_yield();
	}
}

/* ---- pools ----------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= UINT64_C(0x9e3779b97f4a7c15);
	x ^= x >> 29;
	x *= UINT64_C(0xbf58476d1ce4e5b9);
	return x ^ x >> 32;
}

/* Byte `at` of the full row of a position. */
static uint8_t row_byte(uint64_t room, uint32_t layer, uint64_t pos, uint32_t at)
{
	return (uint8_t)(mix(room * 1315423911u + layer * 2654435761u + pos * 97 + at / 8) >>
			 (at % 8 * 8));
}

static void shuffle(uint32_t *pages, uint32_t n, uint64_t seed)
{
	for (uint32_t i = 0; i < n; i++)
		pages[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		uint32_t k = (uint32_t)(mix(seed + i) % i);
		uint32_t page = pages[i - 1];

		pages[i - 1] = pages[k];
		pages[k] = page;
	}
}

static void entry_add(struct lt_pool *pool, uint32_t layer, uint8_t klass)
{
	const struct lt_shape *shape = &pool->shape;
	uint32_t rows = klass == KVP_CLASS_REPLICATED ? shape->page * shape->dcp_size : shape->page;
	struct kvp_entry *entry = &pool->entries[pool->n_entries];
	uint64_t page_bytes = (uint64_t)rows * shape->row_bytes + 64;

	LT_REQUIRE(pool->n_entries < LT_ENTRIES);
	*entry = (struct kvp_entry){
		.base = pool->bytes,
		.bytes = page_bytes * shape->n_pages,
		.page_stride = page_bytes,
		.row_stride = shape->row_bytes,
		.layer = layer,
		.group = pool->n_entries % shape->groups,
		.row_bytes = shape->row_bytes,
		.lo = shape->lo,
		.full_bytes = shape->full_bytes,
		.rows_per_page = rows,
		.n_pages = shape->n_pages,
		.klass = klass,
	};
	pool->bytes += KVP_ALIGN_UP(entry->bytes, 4096u);
	pool->n_entries++;
}

static void add_fd(struct kvp_order_pool *order, int fd, uint64_t bytes)
{
	int copy = dup(fd);

	LT_REQUIRE(copy >= 0);
	order->chunk_bytes[order->n_chunks] = bytes;
	order->chunk_fds[order->n_chunks++] = copy;
}

/* As the loop fills it for a pool that lies in memory of a GPU. */
static void gpu_memory(const struct lt_pool *pool, struct kvp_order_pool *order)
{
	const uint64_t held[2] = { (uintptr_t)pool->mem, pool->bytes };
	struct kvp_lane_memory *memory = order->memories = lt_alloc(1, sizeof(*memory));

	order->chunk_fds = lt_alloc(2, sizeof(*order->chunk_fds));
	order->chunk_bytes = lt_alloc(2, sizeof(*order->chunk_bytes));
	memory->bytes = pool->bytes;
	memory->vmm = pool->shape.memory == LT_VMM;
	memory->n_chunks = memory->vmm;
	memcpy(memory->handle, held, sizeof(held));
	if (memory->vmm)
		add_fd(order, pool->fd, pool->bytes);
	if (!pool->shape.dmabuf)
		return;
	memory->dmabuf = order->n_chunks;
	memory->dmabuf_bytes = pool->bytes;
	add_fd(order, pool->fd, 0);
}

static void pool_order(struct lt_pool *pool)
{
	struct kvp_order_pool *order = lt_alloc(1, sizeof(*order));

	order->order.type = KVP_ORDER_POOL_ADD;
	order->board = &pool->board;
	order->owner_uid = pool->shape.uid;
	order->writable = true;
	order->n_entries = pool->n_entries;
	order->entries = copy_of(pool->entries, pool->n_entries * sizeof(pool->entries[0]));
	order->fd_maps = copy_of(&pool->mem, sizeof(pool->mem));
	order->n_fds = 1;
	if (pool->shape.memory != LT_HOST)
		gpu_memory(pool, order);
	kvp_lane_order(pool->lane, &order->order);
}

void lt_pool_make(struct lt_pool *pool, struct lt *lt, struct kvp_lane *lane,
		  const struct lt_shape *shape)
{
	memset(pool, 0, sizeof(*pool));
	pool->lt = lt;
	pool->lane = lane;
	pool->shape = *shape;
	pool->shape.groups = shape->groups ? shape->groups : 1;
	if (!shape->full_bytes)
		pool->shape.full_bytes = shape->row_bytes;
	for (uint32_t i = 0; i < shape->layers; i++)
		entry_add(pool, shape->first_layer + i, KVP_CLASS_SHARDED);
	for (uint32_t i = 0; i < shape->repl; i++)
		entry_add(pool, shape->first_layer + i, KVP_CLASS_REPLICATED);
	if (shape->blob_bytes) {
		pool->blob = pool->n_entries++;
		pool->entries[pool->blob] = (struct kvp_entry){ .base = pool->bytes,
								.bytes = shape->blob_bytes,
								.layer = 999,
								.klass = KVP_CLASS_BLOB };
		pool->bytes += KVP_ALIGN_UP(shape->blob_bytes, 4096u);
	}
	for (uint32_t g = 0; g < pool->shape.groups; g++) {
		pool->pages[g] = lt_alloc(shape->n_pages, sizeof(uint32_t));
		shuffle(pool->pages[g], shape->n_pages, shape->seed + g * 1000);
		pool->sides[g] = (struct kvp_side){
			.page = shape->page,
			.dcp_size = shape->dcp_size,
			.dcp_rank = shape->dcp_rank,
			.interleave = shape->interleave,
			.pages = pool->pages[g],
			.n_pages = shape->n_pages,
		};
	}
	pool->fd = memfd_create("pool", MFD_CLOEXEC);
	LT_REQUIRE(pool->fd >= 0 && ftruncate(pool->fd, (off_t)pool->bytes) == 0);
	pool->mem = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool->fd, 0);
	LT_REQUIRE(pool->mem != MAP_FAILED);
	memset(pool->mem, BACKGROUND, pool->bytes);
	if (&lt_gpu_register)
		lt_gpu_register(pool->mem, pool->bytes);
	kvp_board_init(&pool->board, KVP_BOARD_POOL, lt_id(lt));
	pool_order(pool);
}

/* Offset of a position's row in the pool, or UINT64_MAX if the rank does not hold it. */
static uint64_t row_place(const struct lt_pool *pool, const struct kvp_entry *entry, uint64_t pos)
{
	const struct lt_shape *shape = &pool->shape;
	uint64_t vpage = (uint64_t)shape->page * shape->dcp_size;
	uint32_t page = pool->pages[entry->group][pos / vpage];
	uint64_t in = pos % vpage, slot;

	if (entry->klass == KVP_CLASS_REPLICATED) {
		slot = in;
	} else {
		uint64_t turn = (uint64_t)shape->interleave * shape->dcp_size;

		if (pos / shape->interleave % shape->dcp_size != shape->dcp_rank)
			return UINT64_MAX;
		slot = in / turn * shape->interleave + in % shape->interleave;
	}
	return entry->base + page * entry->page_stride + slot * entry->row_stride;
}

static void put_row(const struct kvp_entry *entry, uint8_t *row, uint64_t room, uint64_t pos)
{
	for (uint32_t i = 0; i < entry->row_bytes; i++)
		row[i] = row_byte(room, entry->layer, pos, entry->lo + i);
}

static void put_rows(const struct lt_pool *pool, uint8_t *mem, uint64_t room, uint32_t e,
		     uint64_t from, uint64_t to)
{
	const struct kvp_entry *entry = &pool->entries[e];

	for (uint64_t pos = from; pos < to; pos++) {
		uint64_t at = row_place(pool, entry, pos);

		if (at != UINT64_MAX)
			put_row(entry, mem + at, room, pos);
	}
}

void lt_pool_fill(struct lt_pool *pool, uint64_t room, uint64_t from, uint64_t to)
{
	for (uint32_t e = 0; e < pool->n_entries; e++)
		if (pool->entries[e].klass != KVP_CLASS_BLOB)
			put_rows(pool, pool->mem, room, e, from, to);
}

void lt_pool_check(const struct lt_pool *pool, uint64_t room, uint64_t from, uint64_t to,
		   uint64_t window)
{
	uint8_t *image = lt_alloc(1, pool->bytes);

	memset(image, BACKGROUND, pool->bytes);
	for (uint32_t e = 0; e < pool->n_entries; e++) {
		const struct kvp_entry *entry = &pool->entries[e];

		if (entry->klass == KVP_CLASS_BLOB)
			memcpy(image + entry->base, pool->mem + entry->base, entry->bytes);
		else
			put_rows(pool, image, room, e, from + (entry->group == 1 ? window : 0), to);
	}
	for (uint64_t i = 0; i < pool->bytes; i++)
		LT_REQUIRE(image[i] == pool->mem[i],
			   "byte %llu of pool %llu is %02x, expected %02x", (unsigned long long)i,
			   (unsigned long long)pool->board.id, pool->mem[i], image[i]);
	free(image);
}

void lt_pool_unmap(struct lt_pool *pool)
{
	LT_REQUIRE(mprotect(pool->mem, pool->bytes, PROT_NONE) == 0);
}

void lt_pool_end(struct lt_pool *pool)
{
	lt_order_id(pool->lane, KVP_ORDER_POOL_END, pool->board.id, 0);
	lt_wait(pool->lt, &pool->board, KVP_BOARD_QUIET);
	if (&lt_gpu_unregister)
		lt_gpu_unregister(pool->mem);
	(void)munmap(pool->mem, pool->bytes);
	(void)close(pool->fd);
	for (uint32_t g = 0; g < LT_GROUPS; g++)
		free(pool->pages[g]);
}

void lt_blob_fill(uint8_t *to, uint64_t bytes, uint64_t key)
{
	for (uint64_t i = 0; i < bytes; i++)
		to[i] = (uint8_t)(mix(key * 31 + i / 8) >> (i % 8 * 8));
}

void lt_blob_check(const uint8_t *at, uint64_t bytes, uint64_t key)
{
	for (uint64_t i = 0; i < bytes; i++)
		LT_REQUIRE(at[i] == (uint8_t)(mix(key * 31 + i / 8) >> (i % 8 * 8)),
			   "blob byte %llu", (unsigned long long)i);
}

/* ---- rooms ----------------------------------------------------------------------------------- */

static void ep_order(struct kvp_board *board, struct kvp_lane *from, struct kvp_lane *to,
		     uint64_t session)
{
	struct kvp_order_ep *order = lt_alloc(1, sizeof(*order));
	uint32_t bytes;
	const void *addr = kvp_lane_address(to, &bytes);

	order->order.type = KVP_ORDER_EP_ADD;
	order->board = board;
	order->session = session;
	order->addr_bytes = bytes;
	order->addr = copy_of(addr, bytes);
	kvp_lane_order(from, &order->order);
}

void lt_pipe_make(struct lt *lt, struct lt_pipe *pipe, struct kvp_lane *a, struct kvp_lane *b,
		  uint64_t session)
{
	memset(pipe, 0, sizeof(*pipe));
	pipe->lane_a = a;
	pipe->lane_b = b;
	kvp_board_init(&pipe->a, KVP_BOARD_EP, lt_id(lt));
	kvp_board_init(&pipe->b, KVP_BOARD_EP, lt_id(lt));
	ep_order(&pipe->a, a, b, session);
	ep_order(&pipe->b, b, a, session);
}

void lt_pipe_end(struct lt *lt, struct lt_pipe *pipe)
{
	lt_order_id(pipe->lane_a, KVP_ORDER_EP_END, pipe->a.id, 0);
	lt_order_id(pipe->lane_b, KVP_ORDER_EP_END, pipe->b.id, 0);
	lt_wait(lt, &pipe->a, KVP_BOARD_QUIET);
	lt_wait(lt, &pipe->b, KVP_BOARD_QUIET);
}

struct geom_block {
	struct kvp_entry src[LT_ENTRIES], dst[LT_ENTRIES];
	struct kvp_side src_sides[KVP_LANE_GROUPS], dst_sides[KVP_LANE_GROUPS];
	uint64_t starts[KVP_LANE_GROUPS];
	struct kvp_pair pairs[LT_ENTRIES * 4];
};

static uint64_t first_of(const struct lt_room *room, uint32_t group)
{
	return room->prefix + (group == 1 ? room->window : 0);
}

struct kvp_lane_geom lt_geom(const struct lt_room *room, uint32_t sender, uint32_t dest)
{
	const struct lt_pool *src = room->senders[sender].pool, *dst = room->dests[dest].pool;
	struct geom_block *block = lt_alloc(1, sizeof(*block));
	struct kvp_lane_geom geom = { .block = block, .n_src = src->n_entries };
	struct kvp_entry_list from = { block->src, src->n_entries, NULL };
	struct kvp_entry_list to = { block->dst, dst->n_entries, NULL };
	char err[KVP_PLAN_ERR_BYTES] = "";
	int n;

	memcpy(block->src, src->entries, sizeof(block->src));
	memcpy(block->dst, dst->entries, sizeof(block->dst));
	for (uint32_t g = 0; g < KVP_LANE_GROUPS; g++) {
		block->src_sides[g] = src->sides[g < src->shape.groups ? g : 0];
		block->dst_sides[g] = dst->sides[g < dst->shape.groups ? g : 0];
		block->src_sides[g].pages = block->dst_sides[g].pages = NULL;
		block->src_sides[g].n_pages = block->dst_sides[g].n_pages = KVP_PAGES_ANY;
		block->starts[g] = first_of(room, g);
	}
	n = kvp_pair_entries(&from, &to, block->pairs, KVP_ARRAY_SIZE(block->pairs), err,
			     sizeof(err));
	LT_REQUIRE(n >= 0, "%s", err);
	for (int i = 0; i < n; i++)
		geom.src_mask[block->pairs[i].src_entry / 64] |= UINT64_C(1)
								 << block->pairs[i].src_entry % 64;
	geom.geom = (struct kvp_leg_geom){
		.pairs = block->pairs,
		.src = block->src,
		.dst = block->dst,
		.src_sides = block->src_sides,
		.dst_sides = block->dst_sides,
		.dst_starts = block->starts,
		.end = room->end,
		.n_pairs = (uint32_t)n,
		.sender = sender,
	};
	geom.sums = room->sums && !(&lt_gpu && lt_gpu);
	geom.slot_bytes =
		geom.sums ? kvp_sums_room(room->slot_bytes, geom.geom.n_pairs) : room->slot_bytes;
	LT_REQUIRE(kvp_leg_check(&geom.geom, err, sizeof(err)) == 0, "%s", err);
	geom.piece_tokens = room->piece_tokens;
	if (!geom.piece_tokens)
		geom.piece_tokens = kvp_piece_tokens(&geom.geom, geom.slot_bytes);
	LT_REQUIRE(geom.piece_tokens > 0);
	return geom;
}

static void rx_order(struct lt_room *room, uint32_t d)
{
	struct lt_dest *dest = &room->dests[d];
	const struct lt_pool *pool = dest->pool;
	struct kvp_order_rx *order =
		lt_alloc(1, sizeof(*order) + pool->shape.groups * sizeof(order->sides[0]));

	order->order.type = KVP_ORDER_RX_ADD;
	order->board = &dest->board;
	order->pool = pool->board.id;
	order->room = room->room;
	order->dest = d;
	order->n_legs = room->n_senders;
	order->n_sides = pool->shape.groups;
	order->pages = lt_alloc(pool->shape.n_pages * pool->shape.groups, sizeof(uint32_t));
	for (uint32_t g = 0; g < pool->shape.groups; g++) {
		uint32_t *pages = order->pages + g * pool->shape.n_pages;

		memcpy(pages, pool->pages[g], pool->shape.n_pages * sizeof(*pages));
		order->sides[g] = pool->sides[g];
		order->sides[g].pages = pages;
	}
	order->prefix = room->prefix;
	order->end = room->end;
	order->n_segments = room->n_segments;
	order->segments = copy_of(room->segments, room->n_segments * sizeof(room->segments[0]));
	order->meta_from = room->meta_from;
	order->meta = room->meta_from >= 0 ? dest->meta : NULL;
	order->meta_bytes = &dest->meta_bytes;
	kvp_lane_order(pool->lane, &order->order);
}

static uint64_t dest_ep(const struct lt_room *room)
{
	if (!room->pipe)
		return 0;
	return room->pipe_reversed ? room->pipe->a.id : room->pipe->b.id;
}

static uint64_t sender_ep(const struct lt_room *room)
{
	if (!room->pipe)
		return 0;
	return room->pipe_reversed ? room->pipe->b.id : room->pipe->a.id;
}

void lt_room_begin_rx(struct lt_room *room)
{
	for (uint32_t d = 0; d < room->n_dests; d++) {
		kvp_board_init(&room->dests[d].board, KVP_BOARD_RX, lt_id(room->lt));
		rx_order(room, d);
		for (uint32_t s = 0; s < room->n_senders; s++) {
			struct kvp_order_rx_leg *leg = lt_alloc(1, sizeof(*leg));

			leg->order.type = KVP_ORDER_RX_LEG;
			leg->generation = room->dests[d].board.id;
			leg->sender = s;
			leg->ep = dest_ep(room);
			leg->leg = lt_geom(room, s, d);
			kvp_lane_order(room->dests[d].pool->lane, &leg->order);
		}
	}
}

void lt_room_begin_tx(struct lt_room *room, uint32_t s)
{
	struct lt_sender *sender = &room->senders[s];
	struct kvp_order_tx *order = lt_alloc(1, sizeof(*order));

	kvp_board_init(&sender->board, KVP_BOARD_TX, lt_id(room->lt));
	sender->seq = 0;
	sender->next = room->prefix;
	order->order.type = KVP_ORDER_TX_ADD;
	order->board = &sender->board;
	order->pool = sender->pool->board.id;
	order->room = room->room;
	order->sender = s;
	kvp_lane_order(sender->pool->lane, &order->order);
}

void lt_room_start_tx(struct lt_room *room, uint32_t s)
{
	struct lt_sender *sender = &room->senders[s];

	for (uint32_t d = 0; d < room->n_dests; d++) {
		struct kvp_order_tx_leg *leg = lt_alloc(1, sizeof(*leg));

		leg->order.type = KVP_ORDER_TX_LEG;
		leg->tx = sender->board.id;
		leg->dest = d;
		leg->generation = room->dests[d].board.id;
		leg->ep = sender_ep(room);
		leg->wants_meta = room->meta_from == (int32_t)s;
		leg->leg = lt_geom(room, s, d);
		kvp_lane_order(sender->pool->lane, &leg->order);
	}
	lt_order_id(sender->pool->lane, KVP_ORDER_TX_START, sender->board.id, 0);
}

void lt_room_begin(struct lt_room *room)
{
	lt_room_begin_rx(room);
	for (uint32_t s = 0; s < room->n_senders; s++) {
		lt_room_begin_tx(room, s);
		lt_room_start_tx(room, s);
	}
}

uint32_t lt_submit(struct lt_room *room, uint32_t s, const struct lt_chunk *chunk)
{
	struct lt_sender *sender = &room->senders[s];
	const struct lt_pool *pool = sender->pool;
	struct kvp_order_chunk *order = lt_alloc(1, sizeof(*order));

	order->order.type = KVP_ORDER_TX_CHUNK;
	order->tx = sender->board.id;
	order->seq = sender->seq++;
	order->last = chunk->last;
	order->start = chunk->entry_set ? chunk->start : sender->next;
	order->tokens = chunk->tokens;
	if (chunk->entry_set)
		memcpy(order->entry_set, chunk->entry_set, sizeof(order->entry_set));
	else
		memset(order->entry_set, 0xff, sizeof(order->entry_set));
	order->pages = lt_alloc(pool->shape.n_pages * pool->shape.groups, sizeof(uint32_t));
	for (uint32_t g = 0; g < pool->shape.groups; g++) {
		order->sides[g].n_pages = pool->shape.n_pages;
		order->sides[g].pages = order->pages + g * pool->shape.n_pages;
		memcpy(order->sides[g].pages, pool->pages[g],
		       pool->shape.n_pages * sizeof(uint32_t));
	}
	order->fence = chunk->fence;
	order->fence_word = chunk->fence_word;
	order->fence_value = chunk->fence_value;
	order->n_segments = chunk->n_segments;
	order->segments = copy_of(chunk->segments, chunk->n_segments * sizeof(*chunk->segments));
	if (chunk->meta) {
		order->meta = copy_of(chunk->meta, chunk->meta_bytes);
		order->meta_bytes = chunk->meta_bytes;
	}
	if (!chunk->entry_set)
		sender->next += chunk->tokens;
	kvp_lane_order(pool->lane, &order->order);
	return sender->seq - 1;
}

void lt_submit_all(struct lt_room *room, uint32_t s, uint64_t chunk_tokens)
{
	struct lt_sender *sender = &room->senders[s];

	do {
		struct lt_chunk chunk = { .tokens = room->end - sender->next };

		if (chunk.tokens > chunk_tokens)
			chunk.tokens = chunk_tokens;
		chunk.last = sender->next + chunk.tokens == room->end;
		(void)lt_submit(room, s, &chunk);
	} while (sender->next < room->end);
}

void lt_room_complete(struct lt_room *room)
{
	for (uint32_t d = 0; d < room->n_dests; d++) {
		struct kvp_board *board = &room->dests[d].board;

		lt_wait(room->lt, board, KVP_BOARD_COMPLETE | KVP_BOARD_FAILED);
		LT_REQUIRE(kvp_board_flags(board) & KVP_BOARD_COMPLETE, "destination %u: %s", d,
			   board->text);
		LT_REQUIRE(atomic_load(&board->arrived) == room->end);
	}
	for (uint32_t s = 0; s < room->n_senders; s++) {
		struct kvp_board *board = &room->senders[s].board;

		lt_wait(room->lt, board, KVP_BOARD_COMPLETE | KVP_BOARD_FAILED);
		LT_REQUIRE(kvp_board_flags(board) & KVP_BOARD_COMPLETE, "sender %u: %s", s,
			   board->text);
		LT_REQUIRE(atomic_load(&board->delivered) == room->senders[s].seq);
		LT_REQUIRE(atomic_load(&board->source_free) == room->senders[s].seq);
	}
}

void lt_room_end(struct lt_room *room)
{
	for (uint32_t d = 0; d < room->n_dests; d++)
		lt_order_id(room->dests[d].pool->lane, KVP_ORDER_RX_END, room->dests[d].board.id,
			    0);
	for (uint32_t s = 0; s < room->n_senders; s++)
		lt_order_id(room->senders[s].pool->lane, KVP_ORDER_TX_END,
			    room->senders[s].board.id, 0);
	for (uint32_t d = 0; d < room->n_dests; d++)
		lt_wait(room->lt, &room->dests[d].board, KVP_BOARD_QUIET);
	for (uint32_t s = 0; s < room->n_senders; s++)
		lt_wait(room->lt, &room->senders[s].board, KVP_BOARD_QUIET);
}

void lt_room_check(struct lt_room *room)
{
	for (uint32_t d = 0; d < room->n_dests; d++)
		lt_pool_check(room->dests[d].pool, room->room, room->prefix, room->end,
			      room->window);
}
