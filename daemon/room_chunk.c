/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunks: what a submit may say, what is remembered until the sources are free, recall.
 *
 * Before the destinations are known a chunk is checked against this end alone; what depends on them
 * (prefix, end, windows, segments) is checked when the room becomes ready, and from then on at each
 * submit.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

#define NOTHING UINT64_MAX

static unsigned long long ull(uint64_t value)
{
	return value;
}

static bool has(const uint64_t *set, uint32_t i)
{
	return set[i / 64] >> (i % 64) & 1;
}

static void set_bit(uint64_t *set, uint32_t i)
{
	set[i / 64] |= UINT64_C(1) << (i % 64);
}

static bool has_rows(const struct kvp_room *room, uint32_t i)
{
	return room->pool->entries[i].klass != KVP_CLASS_BLOB;
}

static struct kvp_room_chunk *chunk_at(const struct kvp_room_send *send, uint32_t seq)
{
	return &send->chunks[seq & (send->cap_chunks - 1)]; /* a power of two */
}

const struct kvp_room_chunk *kvp_chunks_fenced(const struct kvp_room *room)
{
	const struct kvp_room_send *send = &room->send;

	for (uint32_t seq = send->chunk_base; seq < send->n_chunks; seq++)
		if (chunk_at(send, seq)->fence)
			return chunk_at(send, seq);
	return NULL;
}

/* ---- checks of one chunk against this end ------------------------------------------------------
 */

static Kvp__Status take_set(const struct kvp_room *room, const Kvp__Submit *msg,
			    struct kvp_room_chunk *chunk, char *err)
{
	uint32_t n_entries = room->pool->n_entries;

	if (msg->entry_set.len == 0) {
		memcpy(chunk->set, room->send.mask, sizeof(chunk->set));
		return KVP_ROOM_OK;
	}
	for (uint32_t i = 0; i < msg->entry_set.len * 8; i++) {
		if (!(msg->entry_set.data[i / 8] >> (i % 8) & 1))
			continue;
		if (i >= n_entries || !has(room->send.mask, i))
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "entry_set has entry %u, which is not of the open's "
					       "entry_mask",
					       i);
		set_bit(chunk->set, i);
	}
	return KVP_ROOM_OK;
}

/* The pages of one group: they cover [pos0, end of the chunk), each a page of the pool. */
static Kvp__Status take_side(const struct kvp_room *room, const struct kvp_room_chunk *chunk,
			     const Kvp__ChunkSide *from, const struct kvp_list *list, char *err)
{
	const struct kvp_side *side = &room->send.sides[from->group];
	uint64_t vpage = kvp_side_vpage(side), end = chunk->start + chunk->tokens;
	uint64_t from_pos = KVP_MAX(from->pos0, chunk->start);
	uint32_t n = list ? list->n : 0;
	uint64_t needed = chunk->tokens && from_pos < end ? KVP_DIV_UP(end - from->pos0, vpage) : 0;

	if (from->pos0 % vpage)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ALIGNMENT,
				       "sides: pos0 of group %u is %llu, must be a multiple of "
				       "page %u x dcp_size %u",
				       from->group, ull(from->pos0), side->page, side->dcp_size);
	if (n < needed)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_SRC_RANGE,
				       "sides: too few pages for group %u: %u given, %llu needed "
				       "for positions %llu to %llu",
				       from->group, n, ull(needed), ull(from->pos0), ull(end));
	for (uint32_t i = 0; i < n; i++)
		if (list->pages[i] >= room->pool->group_pages[from->group])
			return kvp_room_refuse(err, KVP__STATUS__STATUS_SRC_RANGE,
					       "sides: page %u of group %u, the pool has pages 0 "
					       "to %u",
					       list->pages[i], from->group,
					       room->pool->group_pages[from->group] - 1);
	return KVP_ROOM_OK;
}

static Kvp__Status take_sides(const struct kvp_room *room, const Kvp__Submit *msg,
			      const struct kvp_lists *lists, struct kvp_room_chunk *chunk,
			      char *err)
{
	for (uint32_t g = 0; g < KVP_LANE_GROUPS; g++)
		chunk->pos0[g] = NOTHING;
	for (size_t i = 0; i < msg->n_sides; i++) {
		const Kvp__ChunkSide *from = msg->sides[i];
		const struct kvp_list *list = from->list ? kvp_lists_find(lists, from->list) : NULL;
		Kvp__Status status;

		if (from->group >= room->send.n_groups || room->send.sides[from->group].page == 0)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "sides: group %u has no side in the open",
					       from->group);
		if (from->list && !list)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_NOT_FOUND,
					       "sides: list %u of group %u does not exist",
					       from->list, from->group);
		if (chunk->pos0[from->group] != NOTHING)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "sides: group %u stands twice", from->group);
		status = take_side(room, chunk, from, list, err);
		if (status != KVP_ROOM_OK)
			return status;
		chunk->pos0[from->group] = from->pos0;
	}
	for (uint32_t i = 0; chunk->tokens && i < room->pool->n_entries; i++)
		if (has(chunk->set, i) && has_rows(room, i) &&
		    chunk->pos0[room->pool->entries[i].group] == NOTHING)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "sides: none for group %u, which entry %u of the "
					       "chunk has",
					       room->pool->entries[i].group, i);
	return KVP_ROOM_OK;
}

/* Each entry goes on where its last chunk ended. */
static Kvp__Status check_order(const struct kvp_room *room, struct kvp_room_chunk *chunk, char *err)
{
	const struct kvp_room_send *send = &room->send;

	for (uint32_t i = 0; i < room->pool->n_entries; i++) {
		uint64_t at = send->ends[i];

		if (!has(chunk->set, i) || !has_rows(room, i))
			continue;
		if (at == NOTHING) {
			set_bit(chunk->opened, i);
			if (!send->ready)
				continue; /* compared with the prefix once that is known */
			at = room->prefix;
		}
		if (chunk->start != at)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
					       "start is %llu, entry %u goes on at %llu",
					       ull(chunk->start), i, ull(at));
	}
	if (send->ready && chunk->start + chunk->tokens > room->end)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "the chunk ends at %llu, past the end %llu",
				       ull(chunk->start + chunk->tokens), ull(room->end));
	return KVP_ROOM_OK;
}

/* With `last` all entries end at the same position, and at the room's end once that is known. */
static Kvp__Status check_last(const struct kvp_room *room, const struct kvp_room_chunk *chunk,
			      char *err)
{
	const struct kvp_room_send *send = &room->send;
	uint64_t end = chunk->start + chunk->tokens;

	for (uint32_t i = 0; i < room->pool->n_entries; i++) {
		uint64_t at = has(chunk->set, i) ? end : send->ends[i];

		if (!has(send->mask, i) || !has_rows(room, i) || at == end)
			continue;
		if (at == NOTHING)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
					       "last: the chunk ends at %llu, of entry %u nothing "
					       "was submitted",
					       ull(end), i);
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "last: the chunk ends at %llu, entry %u ends at %llu",
				       ull(end), i, ull(at));
	}
	if (send->ready && end != room->end)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "last: the chunk ends at %llu, the room at %llu", ull(end),
				       ull(room->end));
	return KVP_ROOM_OK;
}

/* Positions below pos0 have no pages: does a destination need them? */
static Kvp__Status check_windows(const struct kvp_room *room, const struct kvp_room_chunk *chunk,
				 char *err)
{
	uint64_t end = chunk->start + chunk->tokens;

	for (uint32_t g = 0; g < room->send.n_groups; g++) {
		uint64_t need = KVP_MAX(room->send.needs[g], chunk->start);

		if (chunk->pos0[g] == NOTHING || room->send.needs[g] == NOTHING || need >= end ||
		    need >= chunk->pos0[g])
			continue;
		return kvp_room_refuse(err, KVP__STATUS__STATUS_SRC_RANGE,
				       "sides: pages of group %u begin at %llu, a destination "
				       "needs positions from %llu",
				       g, ull(chunk->pos0[g]), ull(need));
	}
	return KVP_ROOM_OK;
}

/* ---- segments ----------------------------------------------------------------------------------
 */

/* Somebody expects it, and with this size. */
static Kvp__Status check_segment_wanted(const struct kvp_room *room, uint32_t id, uint64_t bytes,
					char *err)
{
	const struct kvp_sleg *leg;
	bool wanted = false;

	DL_FOREACH2 (room->send.legs, leg, rnext) {
		const Kvp__Offer *offer = leg->offer->offer;

		for (size_t i = 0; i < offer->n_segments; i++) {
			if (offer->segments[i]->id != id)
				continue;
			if (offer->segments[i]->bytes != bytes)
				return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
						       "segments: %u has %llu bytes, destination "
						       "%u expects %llu",
						       id, ull(bytes), leg->dest,
						       ull(offer->segments[i]->bytes));
			wanted = true;
		}
	}
	if (wanted)
		return KVP_ROOM_OK;
	return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
			       "segments: %u is expected by no destination", id);
}

static bool any_data(const struct kvp_room *room)
{
	const struct kvp_sleg *leg;

	DL_FOREACH2 (room->send.legs, leg, rnext) {
		if (leg->data)
			return true;
	}
	return false;
}

static Kvp__Status check_segment(const struct kvp_room *room, const Kvp__SubmitSegment *from,
				 char *err)
{
	const struct kvp_room_send *send = &room->send;
	const struct kvp_pool *pool = room->pool;

	if (from->entry >= pool->n_entries || !has(send->mask, from->entry) ||
	    has_rows(room, from->entry))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "segments: %u is in entry %u, which is no blob entry of the "
				       "open",
				       from->id, from->entry);
	if (from->bytes > pool->entries[from->entry].bytes ||
	    from->offset > pool->entries[from->entry].bytes - from->bytes)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_SRC_RANGE,
				       "segments: %u ends at %llu of entry %u, which has %llu "
				       "bytes",
				       from->id, ull(from->offset + from->bytes), from->entry,
				       ull(pool->entries[from->entry].bytes));
	for (uint32_t i = 0; i < send->n_segments; i++)
		if (send->segments[i].id == from->id)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_EXISTS,
					       "segments: %u was submitted with chunk %u already",
					       from->id, send->segments[i].seq);
	if (!send->ready || !any_data(room))
		return KVP_ROOM_OK;
	return check_segment_wanted(room, from->id, from->bytes, err);
}

static Kvp__Status take_segments(struct kvp_room *room, const Kvp__Submit *msg, char *err)
{
	struct kvp_room_send *send = &room->send;
	uint32_t need = send->n_segments + (uint32_t)msg->n_segments;

	for (size_t i = 0; i < msg->n_segments; i++) {
		Kvp__Status status = check_segment(room, msg->segments[i], err);

		if (status != KVP_ROOM_OK)
			return status;
	}
	if (need > KVP_LIMIT_SEGMENTS * KVP_MAX_DESTS)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
				       "segments of this open: %u, limit %u", need,
				       KVP_LIMIT_SEGMENTS * KVP_MAX_DESTS);
	if (need > send->cap_segments) {
		uint32_t cap = KVP_MAX(need, 2 * send->cap_segments);
		void *grown = realloc(send->segments, cap * sizeof(*send->segments));

		if (!grown)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
		send->segments = grown;
		send->cap_segments = cap;
	}
	return KVP_ROOM_OK;
}

/* ---- submit ------------------------------------------------------------------------------------
 */

static Kvp__Status check_state(const struct kvp_room *room, const Kvp__Submit *msg, char *err)
{
	const struct kvp_room_send *send = &room->send;
	uint32_t limit = room->rooms->config->limits.max_parked_chunks;

	if (room->failed)
		return kvp_room_refuse(err, room->status, "the room has failed: %.150s",
				       kvp_room_reason(room));
	if (send->recalled)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER, "a recall is under way");
	if (send->last_seen || room->complete)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "seq is %u, chunk %u was the last", msg->seq,
				       send->n_chunks ? send->n_chunks - 1 : 0);
	if (msg->seq != send->n_chunks)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER, "seq is %u, expected %u",
				       msg->seq, send->n_chunks);
	if (send->n_chunks - send->chunk_base >= limit) {
		room->rooms->stats.refused_chunks++;
		return kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
				       "chunks without source free: %u, limit "
				       "limits.max_parked_chunks %u",
				       send->n_chunks - send->chunk_base, limit);
	}
	return KVP_ROOM_OK;
}

/* Room for one more chunk in the ring. */
static int ring_grow(struct kvp_room *room)
{
	struct kvp_room_send *send = &room->send;
	uint32_t n = send->n_chunks - send->chunk_base;
	uint32_t cap = send->cap_chunks ? 2 * send->cap_chunks : 1;
	struct kvp_room_chunk *ring;

	if (n < send->cap_chunks)
		return 0;
	ring = calloc(cap, sizeof(*ring));
	if (!ring)
		return -ENOMEM;
	for (uint32_t seq = send->chunk_base; seq < send->n_chunks; seq++)
		ring[seq & (cap - 1)] = *chunk_at(send, seq);
	free(send->chunks);
	send->chunks = ring;
	room->bytes += (cap - send->cap_chunks) * sizeof(*ring);
	room->rooms->stats.bytes_rooms += (cap - send->cap_chunks) * sizeof(*ring);
	send->cap_chunks = cap;
	return 0;
}

static void order_chunk_free(struct kvp_order_chunk *order)
{
	free(order->pages);
	free(order->segments);
	free(order->meta);
	free(order);
}

static void order_chunk_freep(struct kvp_order_chunk **order)
{
	if (*order)
		order_chunk_free(*order);
}

static int order_pages(struct kvp_order_chunk *order, const Kvp__Submit *msg,
		       const struct kvp_lists *lists)
{
	size_t total = 0, at = 0;

	for (size_t i = 0; i < msg->n_sides; i++) {
		const struct kvp_list *list = kvp_lists_find(lists, msg->sides[i]->list);

		total += list ? list->n : 0;
	}
	order->pages = malloc(KVP_MAX(total, (size_t)1) * sizeof(*order->pages));
	if (!order->pages)
		return -ENOMEM;
	for (size_t i = 0; i < msg->n_sides; i++) {
		const struct kvp_list *list = kvp_lists_find(lists, msg->sides[i]->list);
		struct kvp_lane_chunk_side *side = &order->sides[msg->sides[i]->group];

		side->pos0 = msg->sides[i]->pos0;
		side->pages = order->pages + at;
		side->n_pages = list ? list->n : 0;
		if (side->n_pages)
			memcpy(side->pages, list->pages, side->n_pages * sizeof(*side->pages));
		at += side->n_pages;
	}
	return 0;
}

static int order_extras(struct kvp_order_chunk *order, const Kvp__Submit *msg)
{
	order->segments = malloc(KVP_MAX(msg->n_segments, (size_t)1) * sizeof(*order->segments));
	if (!order->segments)
		return -ENOMEM;
	order->n_segments = (uint32_t)msg->n_segments;
	for (size_t i = 0; i < msg->n_segments; i++)
		order->segments[i] =
			(struct kvp_lane_segment){ msg->segments[i]->id, msg->segments[i]->entry,
						   msg->segments[i]->offset,
						   msg->segments[i]->bytes };
	if (msg->meta.len == 0)
		return 0;
	order->meta = malloc(msg->meta.len);
	if (!order->meta)
		return -ENOMEM;
	memcpy(order->meta, msg->meta.data, msg->meta.len);
	order->meta_bytes = (uint32_t)msg->meta.len;
	return 0;
}

static int order_chunk(struct kvp_room *room, const Kvp__Submit *msg,
		       const struct kvp_room_chunk *chunk, const struct kvp_lists *lists)
{
	KVP_CLEANUP(order_chunk_freep) struct kvp_order_chunk *order = calloc(1, sizeof(*order));

	if (!order || order_pages(order, msg, lists) < 0 || order_extras(order, msg) < 0)
		return -ENOMEM;
	order->order.type = KVP_ORDER_TX_CHUNK;
	order->tx = room->board.id;
	order->seq = msg->seq;
	order->last = msg->last;
	order->start = msg->start;
	order->tokens = msg->tokens;
	memcpy(order->entry_set, chunk->set, sizeof(order->entry_set));
	order->fence = chunk->fence;
	order->fence_word = chunk->fence_word;
	order->fence_value = chunk->fence_value;
	kvp_lane_order(room->lane, &KVP_TAKE(order)->order);
	return 0;
}

/* Everything is checked and ordered: from here on nothing can be refused. */
static void chunk_commit(struct kvp_room *room, const Kvp__Submit *msg,
			 const struct kvp_room_chunk *chunk)
{
	struct kvp_room_send *send = &room->send;

	*chunk_at(send, msg->seq) = *chunk;
	for (uint32_t i = 0; i < room->pool->n_entries; i++) {
		if (!has(chunk->set, i) || !has_rows(room, i))
			continue;
		if (has(chunk->opened, i))
			send->starts[i] = chunk->start;
		send->ends[i] = chunk->start + chunk->tokens;
	}
	for (size_t i = 0; i < msg->n_segments; i++)
		send->segments[send->n_segments++] =
			(struct kvp_room_sent_segment){ msg->segments[i]->bytes,
							msg->segments[i]->id, msg->seq };
	send->n_chunks++;
	kvp_chunks_counted(room, send->n_chunks - send->chunk_base - 1);
	send->last_seen = msg->last;
	if (room->state == KVP__ROOM_STATE__ROOM_READY)
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_SENDING);
	kvp_room_timer_update(room);
}

static Kvp__Status chunk_check(struct kvp_room *room, const Kvp__Submit *msg,
			       const struct kvp_lists *lists, struct kvp_room_chunk *chunk,
			       char *err)
{
	Kvp__Status status;

	/* An event may have told the client of a source that the loop has not counted yet. */
	kvp_chunks_freed(room, atomic_load(&room->board.source_free));
	status = check_state(room, msg, err);
	if (status == KVP_ROOM_OK)
		status = take_set(room, msg, chunk, err);
	if (status == KVP_ROOM_OK)
		status = check_order(room, chunk, err);
	if (status == KVP_ROOM_OK)
		status = take_sides(room, msg, lists, chunk, err);
	if (status == KVP_ROOM_OK && msg->last)
		status = check_last(room, chunk, err);
	if (status == KVP_ROOM_OK && room->send.ready)
		status = check_windows(room, chunk, err);
	if (status == KVP_ROOM_OK && msg->meta.len > 0 && !msg->last)
		status = kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					 "meta has %zu bytes, allowed with last only",
					 msg->meta.len);
	if (status == KVP_ROOM_OK && msg->meta.len > KVP_LANE_META_MAX)
		status = kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					 "meta has %zu bytes, limit %u", msg->meta.len,
					 KVP_LANE_META_MAX);
	return status == KVP_ROOM_OK ? take_segments(room, msg, err) : status;
}

static struct kvp_room *find_sender(struct kvp_rooms *rooms, const struct kvp_room_owner *owner,
				    uint64_t handle, char *err)
{
	struct kvp_room *room = kvp_room_by_handle(rooms, owner, handle);

	if (room && !room->key.is_dest)
		return room;
	(void)kvp_room_refuse(err, KVP__STATUS__STATUS_NOT_FOUND,
			      "handle %llu is no live sender of this client", ull(handle));
	return NULL;
}

Kvp__Status kvp_rooms_submit(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     const Kvp__Submit *msg, const struct kvp_room_fence *fence,
			     const struct kvp_lists *lists, char *err)
{
	struct kvp_room *room = find_sender(rooms, owner, msg->handle, err);
	struct kvp_room_chunk chunk = { .start = msg->start, .tokens = msg->tokens };
	Kvp__Status status;

	if (!room)
		return KVP__STATUS__STATUS_NOT_FOUND;
	if (fence && fence->id) {
		chunk.fence = fence->id;
		chunk.fence_word = msg->fence_word;
		chunk.fence_value = msg->fence_value;
		if (msg->fence_word >= fence->n_words)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "fence_word is %u, the fence has %u words",
					       msg->fence_word, fence->n_words);
	}
	chunk.last = msg->last;
	rooms->requesting = owner;
	status = chunk_check(room, msg, lists, &chunk, err);
	if (status == KVP_ROOM_OK &&
	    (ring_grow(room) < 0 || order_chunk(room, msg, &chunk, lists) < 0))
		status = kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	if (status == KVP_ROOM_OK)
		chunk_commit(room, msg, &chunk);
	rooms->requesting = NULL;
	return status;
}

/* So that a display need not look at all rooms for the fullest one. */
void kvp_chunks_counted(struct kvp_room *room, uint32_t before)
{
	struct kvp_rooms *rooms = room->rooms;
	uint32_t n = room->send.n_chunks - room->send.chunk_base;

	if (n < before && before == rooms->chunks_most)
		rooms->chunks_stale = true;
	rooms->chunks_most = KVP_MAX(rooms->chunks_most, n);
}

void kvp_chunks_freed(struct kvp_room *room, uint32_t source_free)
{
	struct kvp_room_send *send = &room->send;

	uint32_t base = KVP_MIN(source_free, send->n_chunks);
	uint32_t before = send->n_chunks - send->chunk_base;

	send->chunk_base = KVP_MAX(send->chunk_base, base);
	kvp_chunks_counted(room, before);
}

/* ---- ready -------------------------------------------------------------------------------------
 */

static Kvp__Status parked_positions(const struct kvp_room *room, char *err)
{
	const struct kvp_room_send *send = &room->send;

	for (uint32_t i = 0; i < room->pool->n_entries; i++) {
		uint64_t end = send->ends[i];

		if (end == NOTHING)
			continue;
		if (send->starts[i] != room->prefix)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
					       "entry %u was submitted from %llu, decode's prefix "
					       "is %llu",
					       i, ull(send->starts[i]), ull(room->prefix));
		if (end > room->end || (send->last_seen && end != room->end))
			return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
					       "entry %u was submitted up to %llu, decode's end is "
					       "%llu",
					       i, ull(end), ull(room->end));
	}
	return KVP_ROOM_OK;
}

static int by_segment_id(const void *a, const void *b)
{
	uint32_t x = (*(const Kvp__PeerSegment *const *)a)->id;
	uint32_t y = (*(const Kvp__PeerSegment *const *)b)->id;

	return x < y ? -1 : x > y;
}

/* All that destinations expect, by id; NULL: no memory, or nothing. */
static const Kvp__PeerSegment **all_wanted(const struct kvp_room *room, size_t *n)
{
	const struct kvp_sleg *leg;
	const Kvp__PeerSegment **all;

	*n = 0;
	DL_FOREACH2 (room->send.legs, leg, rnext)
		*n += leg->offer->offer->n_segments;
	all = *n ? malloc(*n * sizeof(*all)) : NULL;
	if (!all)
		return NULL;
	*n = 0;
	DL_FOREACH2 (room->send.legs, leg, rnext)
		for (size_t i = 0; i < leg->offer->offer->n_segments; i++)
			all[(*n)++] = leg->offer->offer->segments[i];
	qsort(all, *n, sizeof(*all), by_segment_id);
	return all;
}

/* Is every wanted one with that id of that size, and is there one? */
static bool wanted_fits(const Kvp__PeerSegment *const *all, size_t n,
			const struct kvp_room_sent_segment *segment)
{
	size_t from = 0, to = n;

	while (from < to) {
		size_t mid = from + (to - from) / 2;

		if (all[mid]->id < segment->id)
			from = mid + 1;
		else
			to = mid;
	}
	for (to = from; to < n && all[to]->id == segment->id; to++)
		if (all[to]->bytes != segment->bytes)
			return false;
	return to > from;
}

/* There may be very many on both sides, and this is the loop. */
static Kvp__Status parked_segments(const struct kvp_room *room, char *err)
{
	const struct kvp_room_send *send = &room->send;
	size_t n;
	KVP_CLEANUP(kvp_freep) const Kvp__PeerSegment **all = all_wanted(room, &n);
	Kvp__Status status = KVP_ROOM_OK;

	for (uint32_t i = 0; status == KVP_ROOM_OK && i < send->n_segments; i++)
		if (!all || !wanted_fits(all, n, &send->segments[i]))
			status = check_segment_wanted(room, send->segments[i].id,
						      send->segments[i].bytes, err);
	return status;
}

static Kvp__Status parked_check(const struct kvp_room *room, char *err)
{
	const struct kvp_room_send *send = &room->send;
	Kvp__Status status = parked_positions(room, err);

	for (uint32_t seq = send->chunk_base; status == KVP_ROOM_OK && seq < send->n_chunks; seq++)
		status = check_windows(room, chunk_at(send, seq), err);
	if (status == KVP_ROOM_OK && any_data(room))
		status = parked_segments(room, err);
	return status;
}

bool kvp_chunks_ready(struct kvp_room *room)
{
	char err[KVP_ROOM_ERR] = "";
	Kvp__Status status = parked_check(room, err);

	if (status == KVP_ROOM_OK)
		return true;
	kvp_room_fail(room, status, "%s", err);
	return false;
}

/* ---- recall ------------------------------------------------------------------------------------
 */

static void recall_answer(struct kvp_room *room, Kvp__Status status, uint32_t from)
{
	kvp_recalled_fn *done = KVP_TAKE(room->send.recalled);
	char text[KVP_ROOM_ERR] = "";

	if (status != KVP_ROOM_OK)
		(void)kvp_room_refuse(text, status, "the room is over: %.150s",
				      kvp_room_reason(room));
	if (done && room->owner)
		done(room->owner, room->send.recall_request, status, from, text);
}

Kvp__Status kvp_rooms_recall(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     const Kvp__Recall *msg, kvp_recalled_fn *done, uint64_t request,
			     char *err)
{
	struct kvp_room *room = find_sender(rooms, owner, msg->handle, err);

	if (!room)
		return KVP__STATUS__STATUS_NOT_FOUND;
	if (kvp_room_terminal(room))
		return kvp_room_refuse(err, room->failed ? room->status : KVP__STATUS__STATUS_ORDER,
				       "the room is over: %.150s",
				       room->failed ? kvp_room_reason(room) : "done");
	if (room->send.recalled)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "a recall of this room is under way");
	if (msg->seq > room->send.n_chunks)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ORDER,
				       "seq is %u, the next chunk is %u", msg->seq,
				       room->send.n_chunks);
	kvp_board_clear(&room->board, KVP_BOARD_RECALLED);
	if (kvp_room_order_id(room, KVP_ORDER_TX_RECALL, msg->seq) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	room->send.recalled = done;
	room->send.recall_request = request;
	return KVP_ROOM_OK;
}

/* The lane has dropped chunks from `from` on: as if they had never been submitted. */
void kvp_chunks_recalled(struct kvp_room *room, uint32_t from)
{
	struct kvp_room_send *send = &room->send;
	uint32_t before = send->n_chunks - send->chunk_base;

	while (send->n_chunks > from && send->n_chunks > send->chunk_base) {
		const struct kvp_room_chunk *chunk = chunk_at(send, send->n_chunks - 1);

		for (uint32_t i = 0; i < room->pool->n_entries; i++) {
			if (!has(chunk->set, i) || !has_rows(room, i))
				continue;
			send->ends[i] = has(chunk->opened, i) ? NOTHING : chunk->start;
			if (has(chunk->opened, i))
				send->starts[i] = NOTHING;
		}
		send->n_chunks--;
		send->last_seen = false;
	}
	kvp_chunks_counted(room, before);
	while (send->n_segments && send->segments[send->n_segments - 1].seq >= send->n_chunks)
		send->n_segments--;
	if (room->state == KVP__ROOM_STATE__ROOM_SENDING && send->n_chunks == 0)
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_READY);
	recall_answer(room, KVP_ROOM_OK, send->n_chunks);
}

void kvp_chunks_recall_ends(struct kvp_room *room)
{
	recall_answer(room, room->failed ? room->status : KVP_ROOM_OK, room->send.n_chunks);
}
