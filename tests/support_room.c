/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_room.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utlist.h>

#include "tests/support_clock.h"

/* Like assert(), also for calls that must happen. */
static void must(bool ok, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "support_room: %s\n", what);
	abort();
}

/* ---- nodes ------------------------------------------------------------------------------------
 */

static void on_wake_push(void *arg)
{
	(void)uv_async_send(arg);
}

static void on_wake(uv_async_t *wake)
{
	struct sr_node *node = wake->data;
	struct kvp_node *item = kvp_inbox_take(&node->inbox);

	while (item) {
		struct kvp_board *board = KVP_CONTAINER_OF(item, struct kvp_board, node);

		item = item->next; /* the board may be gone afterwards */
		switch (board->kind) {
		case KVP_BOARD_RX:
		case KVP_BOARD_TX:
			kvp_rooms_board(node->rooms, board);
			break;
		case KVP_BOARD_EP:
			kvp_peers_board(node->peers, board);
			break;
		case KVP_BOARD_POOL:
			kvp_pool_board(board);
			break;
		default:
			(void)kvp_board_take(board);
			break;
		}
	}
}

void sr_init(struct sr_node *node, uv_loop_t *loop, uint8_t id)
{
	memset(node, 0, sizeof(*node));
	node->loop = loop;
	kvp_config_defaults(&node->config);
	node->config.peer.heartbeat_ns = 100 * SR_MS;
	node->config.peer.lost_after_ns = 2000 * SR_MS * support_slow();
	node->config.peer.retry_min_ns = 20 * SR_MS;
	node->config.peer.retry_max_ns = 100 * SR_MS;
	node->config.host.slots = 8;
	node->config.host.slot_bytes = 64 << 10;
	(void)snprintf(node->config.node.name, sizeof(node->config.node.name), "node%u", id);
	memset(node->incarnation, id, sizeof(node->incarnation));
	node->owner.id = 1000u + id;
	node->owner.max_rooms = 1000;
	(void)snprintf(node->owner.name, sizeof(node->owner.name), "client%u", id);
}

static void close_wake(struct sr_node *node)
{
	kvp_inbox_fini(&node->inbox);
	uv_close((uv_handle_t *)&node->wake, NULL);
	(void)uv_run(node->loop, UV_RUN_NOWAIT);
}

bool sr_try_start(struct sr_node *node, const struct kvp_net_ops *net)
{
	struct kvp_lane_config lane = {
		.name = "host",
		.slots = node->config.host.slots,
		.slot_bytes = node->config.host.slot_bytes,
		.pack = true,
		.wants_per_session = node->config.limits.max_wants,
		.net = net,
		.interface = "lo",
		.verbs = node->verbs,
		.mode = node->mode,
		.loop = &node->inbox,
	};
	struct kvp_peers_config peers = { node->loop, &node->config, node->incarnation, node->lanes,
					  1,          NULL };
	struct kvp_rooms_config rooms = { node->loop, &node->config, node->lanes, 1, NULL };

	if (net && !node->config.peer.listen[0])
		(void)snprintf(node->config.peer.listen, sizeof(node->config.peer.listen),
			       "127.0.0.1:0");
	must(uv_async_init(node->loop, &node->wake, on_wake) == 0, "uv_async_init");
	node->wake.data = node;
	kvp_inbox_init(&node->inbox, on_wake_push, &node->wake);
	if (kvp_lane_start(&node->lanes[0], &lane, node->err, sizeof(node->err)) < 0) {
		close_wake(node);
		return false;
	}
	must(kvp_peers_create(&node->peers, &peers, node->err, sizeof(node->err)) == 0, node->err);
	rooms.peers = node->peers;
	must(kvp_rooms_create(&node->rooms, &rooms) == 0, "kvp_rooms_create");
	node->pools =
		(struct kvp_pools){ .config = &node->config, .lanes = node->lanes, .n_lanes = 1 };
	return true;
}

void sr_start(struct sr_node *node, const struct kvp_net_ops *net)
{
	must(sr_try_start(node, net), node->err);
}

static void read_event(struct sr_node *node, struct kvp_room *room)
{
	Kvp__RoomEvent event;
	struct sr_end *end;

	kvp_room_event(room, &event);
	must(event.handle < SR_HANDLES, "handle too large for the test");
	end = &node->ends[event.handle];
	must(!(event.complete && event.failed), "complete and failed");
	must(!end->complete || event.complete, "complete is sticky");
	must(!end->failed || event.failed, "failed is sticky");
	must(event.source_free >= end->source_free || event.released, "source_free goes back");
	end->state = event.state;
	end->complete = event.complete;
	end->failed = event.failed;
	end->released = event.released;
	end->retry = event.retry;
	end->status = event.status;
	(void)snprintf(end->reason, sizeof(end->reason), "%s", event.reason);
	end->source_free = event.source_free;
	end->delivered = event.delivered;
	end->arrived = event.arrived;
	end->prefix = event.prefix;
	end->end = event.end;
	end->events++;
	if (event.meta.len) {
		end->meta_bytes = (uint32_t)event.meta.len;
		memcpy(end->meta, event.meta.data, KVP_MIN(event.meta.len, sizeof(end->meta)));
	}
	kvp_room_event_written(room);
}

static void read_events(struct sr_node *node)
{
	struct kvp_room *room;

	if (!node || !node->rooms || node->deaf)
		return;
	while ((room = kvp_room_owner_next(&node->owner)))
		read_event(node, room);
}

static void on_tick(uv_timer_t *timer)
{
	(void)timer;
}

void sr_step(struct sr_node *a, struct sr_node *b)
{
	uv_timer_t timer;

	(void)uv_timer_init(a->loop, &timer);
	(void)uv_timer_start(&timer, on_tick, 2, 2); /* again: the first may be due at once */
	(void)uv_run(a->loop, UV_RUN_ONCE);
	uv_close((uv_handle_t *)&timer, NULL);
	(void)uv_run(a->loop, UV_RUN_NOWAIT);
	read_events(a);
	read_events(b);
}

void sr_run(struct sr_node *a, struct sr_node *b, uint64_t ns)
{
	uint64_t end = uv_hrtime() + ns;

	while (uv_hrtime() < end)
		sr_step(a, b);
}

static void on_pool_ended(struct kvp_pool *pool, void *arg)
{
	(void)pool;
	(void)arg;
}

void sr_stop(struct sr_node *node)
{
	uint64_t give_up = support_clock_ns() + 20000 * SR_MS;

	kvp_rooms_close(node->rooms);
	kvp_rooms_owner_lost(node->rooms, &node->owner, "the test ends");
	while (kvp_rooms_count(node->rooms) > 0 && support_clock_ns() < give_up)
		sr_step(node, NULL);
	must(kvp_rooms_count(node->rooms) == 0, "rooms do not become quiet");
	while (node->pools.first) {
		struct kvp_pool *pool = node->pools.first;

		must(pool->n_users == 0, "a pool is in use");
		kvp_pool_end(pool, true, on_pool_ended, NULL);
		while (pool->state != KVP_POOL_PAUSED && support_clock_ns() < give_up)
			sr_step(node, NULL);
		kvp_pool_free(&node->pools, pool);
	}
	kvp_peers_stop(node->peers);
	while (!kvp_peers_idle(node->peers) && support_clock_ns() < give_up)
		sr_step(node, NULL);
	must(kvp_peers_idle(node->peers), "peers do not end");
	kvp_rooms_destroy(node->rooms);
	node->rooms = NULL;
	kvp_peers_destroy(node->peers);
	kvp_lane_stop(node->lanes[0]);
	(void)kvp_inbox_take(&node->inbox);
	kvp_lists_clear(&node->lists);
	close_wake(node);
}

/* ---- pools ------------------------------------------------------------------------------------
 */

static uint32_t entry_bytes(const struct sr_shape *shape)
{
	return shape->n_pages * shape->page * shape->row_bytes;
}

void sr_pool_make(struct sr_pool *pool, struct sr_node *node, const struct sr_shape *shape)
{
	Kvp__Entry entries[16], *ptrs[16];
	Kvp__PoolRegister msg = KVP__POOL_REGISTER__INIT;
	struct kvp_pool_client client = { node->owner.id, 0, node->owner.name };
	const char *tag = shape->tag ? shape->tag : "tag";
	uint32_t n = shape->layers + (shape->blob_bytes > 0);
	int fd = memfd_create("room-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	pool->shape = *shape;
	pool->bytes = (uint64_t)shape->layers * entry_bytes(shape) + shape->blob_bytes;
	must(fd >= 0 && ftruncate(fd, (off_t)pool->bytes) == 0, "memfd");
	pool->mem = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	must(pool->mem != MAP_FAILED, "mmap");
	for (uint32_t i = 0; i < n; i++) {
		bool blob = i == shape->layers;

		kvp__entry__init(&entries[i]);
		entries[i].layer = i;
		entries[i].klass =
			blob ? KVP__ENTRY_CLASS__CLASS_BLOB : KVP__ENTRY_CLASS__CLASS_SHARDED;
		entries[i].offset = (uint64_t)i * entry_bytes(shape);
		entries[i].bytes = blob ? shape->blob_bytes : entry_bytes(shape);
		entries[i].page_stride = (uint64_t)shape->page * shape->row_bytes;
		entries[i].row_stride = shape->row_bytes;
		entries[i].row_bytes = entries[i].full_bytes = blob ? 0 : shape->row_bytes;
		entries[i].rows_per_page = blob ? 0 : shape->page;
		entries[i].n_pages = blob ? 0 : shape->n_pages;
		ptrs[i] = &entries[i];
	}
	msg.pool = ++node->next_pool;
	msg.layout_tag.data = (uint8_t *)tag;
	msg.layout_tag.len = strlen(tag);
	msg.entries = ptrs;
	msg.n_entries = n;
	msg.label = (char *)"test";
	must(kvp_pools_register(&node->pools, &client, &msg, &fd, 1, &pool->pool, node->err) ==
		     KVP__STATUS__STATUS_OK,
	     node->err);
	(void)close(fd);
}

void sr_pool_free(struct sr_pool *pool)
{
	(void)munmap(pool->mem, pool->bytes);
}

uint8_t *sr_blob(struct sr_pool *pool)
{
	return pool->mem + (uint64_t)pool->shape.layers * entry_bytes(&pool->shape);
}

/* Where the row of a position is; NULL: the rank does not own it. Interleave 1. */
static uint8_t *row_at(const struct sr_pool *pool, uint32_t layer, const uint32_t *pages,
		       uint64_t pos0, uint64_t pos)
{
	const struct sr_shape *s = &pool->shape;
	uint64_t vpage = (uint64_t)s->page * s->dcp_size;
	uint32_t slot = 0;

	if (pos % s->dcp_size != s->dcp_rank)
		return NULL;
	for (uint64_t p = pos - pos % vpage; p < pos; p++)
		slot += p % s->dcp_size == s->dcp_rank;
	return pool->mem + (uint64_t)layer * entry_bytes(s) +
	       ((uint64_t)pages[(pos - pos0) / vpage] * s->page + slot) * s->row_bytes;
}

static uint8_t row_byte(uint32_t layer, uint64_t pos, uint32_t i)
{
	return (uint8_t)(layer * 31 + pos * 7 + (pos >> 8) * 13 + i * 3 + 1);
}

void sr_pool_fill(struct sr_pool *pool, const uint32_t *pages, uint64_t pos0, uint64_t from,
		  uint64_t to)
{
	for (uint32_t l = 0; l < pool->shape.layers; l++)
		for (uint64_t pos = from; pos < to; pos++) {
			uint8_t *row = row_at(pool, l, pages, pos0, pos);

			for (uint32_t i = 0; row && i < pool->shape.row_bytes; i++)
				row[i] = row_byte(l, pos, i);
		}
}

void sr_pool_check(const struct sr_pool *pool, const uint32_t *pages, uint64_t pos0, uint64_t from,
		   uint64_t to)
{
	for (uint32_t l = 0; l < pool->shape.layers; l++)
		for (uint64_t pos = from; pos < to; pos++) {
			const uint8_t *row = row_at(pool, l, pages, pos0, pos);

			for (uint32_t i = 0; row && i < pool->shape.row_bytes; i++)
				must(row[i] == row_byte(l, pos, i), "a row has other bytes");
		}
}

/* ---- requests ---------------------------------------------------------------------------------
 */

static uint32_t make_list(struct sr_node *node, const uint32_t *pages, uint32_t n)
{
	uint32_t id = ++node->next_list;

	if (n == 0)
		return 0;
	must(kvp_lists_append(&node->lists, id, 0, pages, n, 64, 1 << 20) == 0, "list");
	return id;
}

static void set_key(ProtobufCBinaryData *to, const char *key)
{
	to->data = (uint8_t *)key;
	to->len = key ? strlen(key) : 0;
}

static bool timers_given(const Kvp__Timers *timers)
{
	return timers->offer_ms || timers->open_ms || timers->progress_ms || timers->fence_ms ||
	       timers->lease_ms;
}

/* Copies with the message header that the test's initialiser does not know. */
static Kvp__Timers *take_timers(Kvp__Timers *to, const Kvp__Timers *from)
{
	kvp__timers__init(to);
	to->offer_ms = from->offer_ms;
	to->open_ms = from->open_ms;
	to->progress_ms = from->progress_ms;
	to->fence_ms = from->fence_ms;
	to->lease_ms = from->lease_ms;
	return timers_given(from) ? to : NULL;
}

static void fill_side(Kvp__Side *side, const struct sr_pool *pool)
{
	kvp__side__init(side);
	side->page = pool->shape.page;
	side->dcp_size = pool->shape.dcp_size;
	side->dcp_rank = pool->shape.dcp_rank;
	side->interleave = 1;
}

Kvp__Status sr_expect(struct sr_node *node, struct sr_pool *pool, const struct sr_expect *expect)
{
	Kvp__Expect msg = KVP__EXPECT__INIT;
	Kvp__ExpectSender senders[4], *sender_ptrs[4];
	Kvp__ExpectSegment segments[4], *segment_ptrs[4];
	Kvp__Side side, *sides = &side;
	Kvp__Timers timers;
	Kvp__Status status;

	fill_side(&side, pool);
	side.pos0 = expect->pos0;
	side.first = expect->first;
	side.list = make_list(node, expect->pages, expect->n_pages);
	for (uint32_t i = 0; i < expect->n_senders; i++) {
		kvp__expect_sender__init(&senders[i]);
		senders[i].address = (char *)expect->senders[i].address;
		senders[i].sender = expect->senders[i].sender;
		senders[i].n_dests = KVP_MAX(expect->senders[i].n_dests, 1u);
		senders[i].role = expect->senders[i].none ? KVP__SENDER_ROLE__ROLE_NONE
							  : KVP__SENDER_ROLE__ROLE_DATA;
		sender_ptrs[i] = &senders[i];
	}
	for (uint32_t i = 0; i < expect->n_segments; i++) {
		kvp__expect_segment__init(&segments[i]);
		segments[i].id = expect->segments[i].id;
		segments[i].entry = expect->segments[i].entry;
		segments[i].offset = expect->segments[i].offset;
		segments[i].bytes = expect->segments[i].bytes;
		segment_ptrs[i] = &segments[i];
	}
	msg.handle = expect->handle;
	msg.room = expect->room;
	set_key(&msg.key, expect->key);
	msg.dest = expect->dest;
	msg.pool = pool->pool->client_id;
	msg.sides = &sides;
	msg.n_sides = pool->shape.layers > 0;
	msg.prefix = expect->prefix;
	msg.end = expect->end;
	msg.segments = segment_ptrs;
	msg.n_segments = expect->n_segments;
	msg.meta_from = expect->meta_from - 1;
	msg.senders = sender_ptrs;
	msg.n_senders = expect->n_senders;
	msg.label = (char *)"dest";
	msg.timers = take_timers(&timers, &expect->timers);
	node->err[0] = '\0';
	status = kvp_rooms_expect(node->rooms, &node->owner, pool->pool, &msg, &node->lists,
				  node->err);
	kvp_lists_drop(&node->lists, side.list);
	return status;
}

Kvp__Status sr_open(struct sr_node *node, struct sr_pool *pool, const struct sr_open *open)
{
	Kvp__Open msg = KVP__OPEN__INIT;
	Kvp__Side side, *sides = &side;
	Kvp__Timers timers;

	fill_side(&side, pool);
	msg.handle = open->handle;
	msg.room = open->room;
	set_key(&msg.key, open->key);
	msg.sender = open->sender;
	msg.pool = pool->pool->client_id;
	msg.sides = &sides;
	msg.n_sides = pool->shape.layers > 0;
	msg.entry_mask.data = (uint8_t *)open->mask;
	msg.entry_mask.len = open->mask_bytes;
	msg.label = (char *)"sender";
	msg.timers = take_timers(&timers, &open->timers);
	node->err[0] = '\0';
	return kvp_rooms_open(node->rooms, &node->owner, pool->pool, &msg, node->err);
}

Kvp__Status sr_submit(struct sr_node *node, const struct sr_chunk *chunk)
{
	Kvp__Submit msg = KVP__SUBMIT__INIT;
	Kvp__SubmitSegment segments[4], *segment_ptrs[4];
	Kvp__ChunkSide side = KVP__CHUNK_SIDE__INIT, *sides = &side;
	Kvp__Status status;

	for (uint32_t i = 0; i < chunk->n_segments; i++) {
		kvp__submit_segment__init(&segments[i]);
		segments[i].id = chunk->segments[i].id;
		segments[i].entry = chunk->segments[i].entry;
		segments[i].offset = chunk->segments[i].offset;
		segments[i].bytes = chunk->segments[i].bytes;
		segment_ptrs[i] = &segments[i];
	}
	side.pos0 = chunk->pos0;
	side.list = make_list(node, chunk->pages, chunk->n_pages);
	msg.handle = chunk->handle;
	msg.seq = chunk->seq;
	msg.start = chunk->start;
	msg.tokens = chunk->tokens;
	msg.sides = &sides;
	msg.n_sides = !chunk->no_side;
	msg.entry_set.data = (uint8_t *)chunk->set;
	msg.entry_set.len = chunk->set_bytes;
	msg.last = chunk->last;
	msg.fence_value = chunk->fence_value;
	msg.segments = segment_ptrs;
	msg.n_segments = chunk->n_segments;
	set_key(&msg.meta, chunk->meta);
	node->err[0] = '\0';
	status = kvp_rooms_submit(node->rooms, &node->owner, &msg, &chunk->fence, &node->lists,
				  node->err);
	kvp_lists_drop(&node->lists, side.list);
	return status;
}

Kvp__Status sr_abort(struct sr_node *node, uint64_t handle)
{
	Kvp__Abort msg = KVP__ABORT__INIT;

	msg.handle = handle;
	msg.reason = (char *)"the test says so";
	return kvp_rooms_abort(node->rooms, &node->owner, &msg, node->err);
}

static void on_recalled(void *arg, uint64_t request, Kvp__Status status, uint32_t from,
			const char *text)
{
	struct sr_node *node = KVP_CONTAINER_OF(arg, struct sr_node, owner);

	(void)request;
	node->recalls++;
	must(status == KVP__STATUS__STATUS_OK || text[0], "a recall fails without a word");
	node->recall_status = status;
	node->recall_from = from;
}

Kvp__Status sr_recall(struct sr_node *node, uint64_t handle, uint32_t seq)
{
	Kvp__Recall msg = KVP__RECALL__INIT;

	msg.handle = handle;
	msg.seq = seq;
	return kvp_rooms_recall(node->rooms, &node->owner, &msg, on_recalled, 1, node->err);
}
