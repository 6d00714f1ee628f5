/* SPDX-License-Identifier: Apache-2.0 */

/* The request that begins a destination: everything is checked and held before it exists. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

static unsigned long long ull(uint64_t value)
{
	return value;
}

/* First position that a group needs. */
static uint64_t side_first(const Kvp__Expect *msg, const Kvp__Side *side)
{
	return KVP_MAX(side->first, msg->prefix);
}

static Kvp__Status check_side_geometry(const struct kvp_side *side, const Kvp__Side *msg,
				       uint64_t prefix, char *err)
{
	switch (kvp_side_check(side)) {
	case KVP_PLAN_OK:
		break;
	case KVP_PLAN_ALIGNMENT:
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ALIGNMENT,
				       "sides: pos0 of group %u is %llu, must be a multiple of "
				       "page %u x dcp_size %u",
				       msg->group, ull(side->pos0), side->page, side->dcp_size);
	default:
		return kvp_geom_refuse_side(side, msg->group, err);
	}
	if (prefix % kvp_side_vpage(side))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_ALIGNMENT,
				       "prefix is %llu, must be a multiple of page %u x dcp_size "
				       "%u of group %u",
				       ull(prefix), side->page, side->dcp_size, msg->group);
	return KVP_ROOM_OK;
}

/* The pages of [first, end): all there, each a page of the pool. */
static Kvp__Status check_pages(const struct kvp_pool *pool, const struct kvp_side *side,
			       uint32_t group, uint64_t first, uint64_t end, char *err)
{
	uint64_t vpage = kvp_side_vpage(side);
	uint64_t needed = first < end ? KVP_DIV_UP(end - side->pos0, vpage) : 0;

	if (first < end && side->pos0 > first)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_DST_RANGE,
				       "sides: pos0 of group %u is %llu, positions from %llu are "
				       "needed",
				       group, ull(side->pos0), ull(first));
	if (side->n_pages < needed)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_DST_RANGE,
				       "sides: too few pages for group %u: %u given, %llu needed",
				       group, side->n_pages, ull(needed));
	for (uint32_t i = 0; i < side->n_pages; i++)
		if (side->pages[i] >= pool->group_pages[group])
			return kvp_room_refuse(err, KVP__STATUS__STATUS_DST_RANGE,
					       "sides: page %u of group %u, the pool has pages 0 "
					       "to %u",
					       side->pages[i], group, pool->group_pages[group] - 1);
	return KVP_ROOM_OK;
}

static Kvp__Status take_side(struct kvp_room *room, const Kvp__Expect *msg, const Kvp__Side *from,
			     const struct kvp_lists *lists, char *err)
{
	const struct kvp_pool *pool = room->pool;
	const struct kvp_list *list = from->list ? kvp_lists_find(lists, from->list) : NULL;
	struct kvp_side *side;
	Kvp__Status status;

	if (from->list && !list)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NOT_FOUND,
				       "sides: list %u of group %u does not exist", from->list,
				       from->group);
	status = kvp_geom_take_side(pool, from, room->dest.sides, room->dest.n_groups, &side, err);
	if (status != KVP_ROOM_OK)
		return status;
	side->pos0 = from->pos0;
	side->pages = list ? list->pages : NULL; /* the session's, until they are copied */
	side->n_pages = list ? list->n : 0;
	room->dest.firsts[from->group] = side_first(msg, from);
	status = check_side_geometry(side, from, msg->prefix, err);
	if (status != KVP_ROOM_OK)
		return status;
	return check_pages(pool, side, from->group, side_first(msg, from), msg->end, err);
}

/* One block of the lists' used parts; sides point into it from now on. */
static int copy_pages(struct kvp_room *room)
{
	struct kvp_room_dest *dest = &room->dest;
	uint64_t total = 0, at = 0;

	for (uint32_t g = 0; g < dest->n_groups; g++) {
		struct kvp_side *side = &dest->sides[g];
		uint64_t used;

		if (!side->page)
			continue;
		used = dest->firsts[g] < room->end
			       ? KVP_DIV_UP(room->end - side->pos0, kvp_side_vpage(side))
			       : 0;
		side->n_pages = (uint32_t)used;
		dest->held[g].from =
			used ? (uint32_t)((dest->firsts[g] - side->pos0) / kvp_side_vpage(side))
			     : 0;
		total += used;
	}
	dest->pages = malloc(KVP_MAX(total, (uint64_t)1) * sizeof(*dest->pages));
	if (!dest->pages)
		return -ENOMEM;
	for (uint32_t g = 0; g < dest->n_groups; g++) {
		struct kvp_side *side = &dest->sides[g];

		if (side->n_pages && side->pages)
			memcpy(dest->pages + at, side->pages, side->n_pages * sizeof(uint32_t));
		side->pages = dest->pages + at;
		at += side->n_pages;
	}
	room->bytes += total * sizeof(uint32_t);
	return 0;
}

static Kvp__Status take_sides(struct kvp_room *room, const Kvp__Expect *msg,
			      const struct kvp_lists *lists, char *err)
{
	struct kvp_room_dest *dest = &room->dest;
	struct kvp_geom_end end;

	dest->n_groups = KVP_MAX(room->pool->n_groups, 1u);
	dest->sides = calloc(dest->n_groups, sizeof(*dest->sides));
	dest->firsts = calloc(dest->n_groups, sizeof(*dest->firsts));
	dest->held = calloc(dest->n_groups, sizeof(*dest->held));
	if (!dest->sides || !dest->firsts || !dest->held)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	for (uint32_t g = 0; g < dest->n_groups; g++)
		dest->firsts[g] = msg->end; /* needs nothing */
	room->bytes += dest->n_groups *
		       (sizeof(*dest->sides) + sizeof(*dest->firsts) + sizeof(*dest->held));
	for (size_t i = 0; i < msg->n_sides; i++) {
		Kvp__Status status = take_side(room, msg, msg->sides[i], lists, err);

		if (status != KVP_ROOM_OK)
			return status;
	}
	if (copy_pages(room) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	end = (struct kvp_geom_end){ room->pool->entries, room->pool->n_entries, NULL, dest->sides,
				     dest->n_groups };
	return kvp_geom_check_sides(&end, err);
}

/* Who holds that page: for the text only, on the way of a refusal. */
static const struct kvp_room *page_holder(const struct kvp_rooms *rooms,
					  const struct kvp_pool *pool, uint32_t group,
					  uint32_t page)
{
	const struct kvp_room *room;

	DL_FOREACH (rooms->all, room) {
		const struct kvp_room_dest *dest = &room->dest;

		if (!room->key.is_dest || room->pool != pool || group >= dest->n_groups)
			continue;
		for (uint32_t i = 0; i < dest->held[group].n; i++)
			if (dest->sides[group].pages[dest->held[group].from + i] == page)
				return room;
	}
	return NULL;
}

static Kvp__Status refuse_held(const struct kvp_room *room, uint32_t group, uint32_t page,
			       char *err)
{
	const struct kvp_room *holder = page_holder(room->rooms, room->pool, group, page);

	if (!holder)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_PAGE_HELD,
				       "sides: page %u of group %u stands twice", page, group);
	return kvp_room_refuse(err, KVP__STATUS__STATUS_PAGE_HELD,
			       "sides: page %u of group %u is held by room 0x%llx destination %u "
			       "\"%s\"%s",
			       page, group, ull(holder->key.room), holder->key.index,
			       kvp_room_label(holder),
			       kvp_room_terminal(holder) ? ", over but not released" : "");
}

static Kvp__Status hold_pages(struct kvp_room *room, char *err)
{
	struct kvp_room_dest *dest = &room->dest;

	for (uint32_t g = 0; g < dest->n_groups; g++) {
		const struct kvp_side *side = &dest->sides[g];
		uint32_t from = dest->held[g].from, n = side->n_pages - from, bad = 0;
		int r;

		if (!side->page || n == 0)
			continue;
		r = kvp_pool_hold(room->pool, g, side->pages + from, n, &bad);
		if (r == -EBUSY)
			return refuse_held(room, g, bad, err);
		if (r < 0)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_DST_RANGE,
					       "sides: page %u of group %u is outside the pool",
					       bad, g);
		dest->held[g].n = n;
		dest->n_held += n;
	}
	return KVP_ROOM_OK;
}

static Kvp__Status take_segments(struct kvp_room *room, const Kvp__Expect *msg, char *err)
{
	struct kvp_room_dest *dest = &room->dest;
	const struct kvp_pool *pool = room->pool;

	if (msg->n_segments == 0)
		return KVP_ROOM_OK;
	dest->segments = calloc(msg->n_segments, sizeof(*dest->segments));
	if (!dest->segments)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	dest->n_segments = (uint32_t)msg->n_segments;
	room->bytes += msg->n_segments * sizeof(*dest->segments);
	for (size_t i = 0; i < msg->n_segments; i++) {
		const Kvp__ExpectSegment *from = msg->segments[i];

		if (from->entry >= pool->n_entries ||
		    pool->entries[from->entry].klass != KVP_CLASS_BLOB)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "segments: %u is in entry %u, which is no blob "
					       "entry of pool %u",
					       from->id, from->entry, pool->client_id);
		if (from->bytes > pool->entries[from->entry].bytes ||
		    from->offset > pool->entries[from->entry].bytes - from->bytes)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_DST_RANGE,
					       "segments: %u ends at %llu of entry %u, which has "
					       "%llu bytes",
					       from->id, ull(from->offset + from->bytes),
					       from->entry, ull(pool->entries[from->entry].bytes));
		dest->segments[i] = (struct kvp_lane_segment){ from->id, from->entry, from->offset,
							       from->bytes };
	}
	return KVP_ROOM_OK;
}

/* Something must come from a sender with data. */
static bool needs_data(const struct kvp_room *room)
{
	const struct kvp_pool *pool = room->pool;

	if (room->dest.n_segments || room->dest.meta_from >= 0)
		return true;
	for (uint32_t i = 0; i < pool->n_entries; i++) {
		const struct kvp_entry *entry = &pool->entries[i];

		if (entry->klass != KVP_CLASS_BLOB && room->dest.firsts[entry->group] < room->end)
			return true;
	}
	return false;
}

static Kvp__Status take_senders(struct kvp_room *room, const Kvp__Expect *msg, char *err)
{
	struct kvp_room_dest *dest = &room->dest;

	dest->legs = calloc(msg->n_senders, sizeof(*dest->legs));
	if (!dest->legs)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	dest->n_legs = (uint32_t)msg->n_senders;
	room->bytes += msg->n_senders * sizeof(*dest->legs);
	for (size_t i = 0; i < msg->n_senders; i++) {
		const Kvp__ExpectSender *from = msg->senders[i];
		struct kvp_dleg *leg = &dest->legs[i];

		leg->room = room;
		leg->sender = from->sender;
		leg->n_dests = from->n_dests;
		leg->data = from->role == KVP__SENDER_ROLE__ROLE_DATA;
		leg->since_ns = room->created_ns;
		dest->n_data += leg->data;
		errno = EINVAL;
		leg->peer = kvp_peer_get(room->rooms->peers, from->address, err, KVP_ROOM_ERR);
		if (!leg->peer)
			return kvp_room_peer_status(errno);
		if (kvp_room_peer_add_dleg(leg) < 0)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	}
	if (dest->n_data == 0 && needs_data(room))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "senders: none with data, but positions, segments or meta "
				       "are expected");
	return KVP_ROOM_OK;
}

static void order_rx_free(struct kvp_order_rx *order)
{
	if (!order)
		return;
	free(order->pages);
	free(order->segments);
	free(order);
}

static void order_rx_freep(struct kvp_order_rx **order)
{
	order_rx_free(*order);
}

static uint64_t n_pages_of(const struct kvp_room_dest *dest)
{
	uint64_t n = 0;

	for (uint32_t g = 0; g < dest->n_groups; g++)
		n += dest->sides[g].n_pages;
	return n;
}

/* The lane's own copy of everything. */
static int order_rx(struct kvp_room *room)
{
	struct kvp_room_dest *dest = &room->dest;
	uint64_t n_pages = n_pages_of(dest);
	size_t bytes = sizeof(struct kvp_order_rx) + dest->n_groups * sizeof(struct kvp_side);
	KVP_CLEANUP(order_rx_freep) struct kvp_order_rx *order = calloc(1, bytes);

	if (!order)
		return -ENOMEM;
	order->pages = malloc(KVP_MAX(n_pages, (uint64_t)1) * sizeof(*order->pages));
	order->segments = malloc(KVP_MAX(dest->n_segments, 1u) * sizeof(*order->segments));
	if (!order->pages || !order->segments)
		return -ENOMEM;
	if (n_pages)
		memcpy(order->pages, dest->pages, n_pages * sizeof(*order->pages));
	if (dest->n_segments)
		memcpy(order->segments, dest->segments,
		       dest->n_segments * sizeof(*order->segments));
	order->order.type = KVP_ORDER_RX_ADD;
	order->board = &room->board;
	order->pool = room->pool->id;
	order->room = room->key.room;
	order->dest = room->key.index;
	order->n_legs = dest->n_data;
	order->n_sides = dest->n_groups;
	for (uint32_t g = 0; g < dest->n_groups; g++) {
		order->sides[g] = dest->sides[g];
		if (dest->sides[g].page)
			order->sides[g].pages = order->pages + (dest->sides[g].pages - dest->pages);
	}
	order->prefix = room->prefix;
	order->end = room->end;
	order->n_segments = dest->n_segments;
	order->meta_from = dest->meta_from;
	order->meta = dest->meta;
	order->meta_bytes = &dest->meta_bytes;
	room->bytes += bytes + n_pages * sizeof(*order->pages) + KVP_LANE_RX_BYTES;
	dest->rx_order = KVP_TAKE(order);
	if (kvp_across_defer(room))
		atomic_store_explicit(&room->board.arrived, room->prefix, memory_order_relaxed);
	else
		kvp_across_push(room);
	return 0;
}

/* Random, since it is all that a want or a RETURN between lanes names: whoever is no sender of the
 * room must not guess it. Of so many none is drawn twice. 0: there are no random numbers. */
static uint64_t draw_generation(void)
{
	uint64_t generation = 0;

	while (generation == 0)
		if (uv_random(NULL, NULL, &generation, sizeof(generation), 0, NULL) < 0)
			break;
	return generation;
}

static Kvp__Status expect_fill(struct kvp_room *room, const Kvp__Expect *msg,
			       const struct kvp_lists *lists, char *err)
{
	Kvp__Status status;

	if (!kvp_room_introduce(room, msg->handle, msg->label, msg->timers, &msg->key))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	room->prefix = msg->prefix;
	room->end = msg->end;
	room->state = KVP__ROOM_STATE__ROOM_OFFERING;
	room->dest.meta_from = msg->meta_from;
	if (msg->meta_from >= 0) {
		room->dest.meta = malloc(KVP_LANE_META_MAX);
		if (!room->dest.meta)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
		room->bytes += KVP_LANE_META_MAX;
	}
	status = take_sides(room, msg, lists, err);
	if (status == KVP_ROOM_OK)
		status = take_segments(room, msg, err);
	if (status == KVP_ROOM_OK)
		status = hold_pages(room, err);
	if (status == KVP_ROOM_OK)
		status = take_senders(room, msg, err);
	return status;
}

static Kvp__Status rooms_expect(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
				struct kvp_pool *pool, const Kvp__Expect *msg,
				const struct kvp_lists *lists, char *err)
{
	const struct kvp_room_key key = { msg->room, msg->dest, true };
	KVP_CLEANUP(kvp_room_freep) struct kvp_room *room = NULL;
	Kvp__Status status = kvp_room_admit(rooms, owner, &key, msg->handle, err);
	struct kvp_room *entered;

	if (status != KVP_ROOM_OK)
		return status;
	if (!pool->writable)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "pool %u is mapped for reading only: its fds are sealed "
				       "against writing",
				       pool->client_id);
	room = kvp_room_new(rooms, owner, pool, &key);
	if (!room)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	status = expect_fill(room, msg, lists, err);
	if (status != KVP_ROOM_OK)
		return status;
	kvp_board_init(&room->board, KVP_BOARD_RX, draw_generation());
	if (room->board.id == 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_SYSTEM, "no random numbers");
	if (order_rx(room) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	entered = KVP_TAKE(room);
	kvp_room_enter(entered);
	kvp_room_changed(entered);
	for (uint32_t i = 0; i < entered->dest.n_legs; i++)
		kvp_dest_offer(&entered->dest.legs[i]);
	kvp_room_timer_update(entered);
	return KVP_ROOM_OK;
}

Kvp__Status kvp_rooms_expect(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     struct kvp_pool *pool, const Kvp__Expect *msg,
			     const struct kvp_lists *lists, char *err)
{
	Kvp__Status status;

	rooms->requesting = owner;
	status = rooms_expect(rooms, owner, pool, msg, lists, err);
	rooms->requesting = NULL;
	return status;
}
