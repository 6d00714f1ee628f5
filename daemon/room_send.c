/* SPDX-License-Identifier: Apache-2.0 */

/* A sender: its open, the offers it accepts, the lane's news, the end. Chunks are in room_chunk.c.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

static unsigned long long ull(uint64_t value)
{
	return value;
}

static void leg_fill(const struct kvp_sleg *leg, Kvp__Leg *out)
{
	kvp__leg__init(out);
	out->room = leg->room->key.room;
	out->dest = leg->dest;
	out->sender = leg->room->key.index;
	out->generation = leg->generation;
}

struct kvp_sleg *kvp_send_leg(struct kvp_rooms *rooms, const struct kvp_peer *peer,
			      const Kvp__Leg *leg)
{
	struct kvp_room *room = kvp_room_find(rooms, leg->room, leg->sender, false);
	struct kvp_sleg *found;

	if (!room)
		return NULL;
	DL_FOREACH2 (room->send.legs, found, rnext) {
		if (found->dest != leg->dest || found->peer != peer)
			continue;
		if (found->generation == leg->generation)
			return found;
		rooms->stats.late_messages++;
	}
	return NULL;
}

/* ---- open --------------------------------------------------------------------------------------
 */

static Kvp__Status take_mask(struct kvp_room *room, const Kvp__Open *msg, char *err)
{
	const struct kvp_pool *pool = room->pool;

	for (uint32_t i = 0; i < pool->n_entries; i++) {
		bool in =
			msg->entry_mask.len == 0 || (i / 8 < msg->entry_mask.len &&
						     (msg->entry_mask.data[i / 8] >> (i % 8) & 1));

		if (in)
			room->send.mask[i / 64] |= UINT64_C(1) << (i % 64);
	}
	for (uint32_t i = pool->n_entries; i < msg->entry_mask.len * 8; i++)
		if (msg->entry_mask.data[i / 8] >> (i % 8) & 1)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "entry_mask has entry %u, pool %u has %u", i,
					       pool->client_id, pool->n_entries);
	return KVP_ROOM_OK;
}

static Kvp__Status take_side(struct kvp_room *room, const Kvp__Side *from, char *err)
{
	struct kvp_side *side;
	Kvp__Status status = kvp_geom_take_side(room->pool, from, room->send.sides,
						room->send.n_groups, &side, err);

	if (status != KVP_ROOM_OK)
		return status;
	side->n_pages = KVP_PAGES_ANY;
	if (kvp_side_check(side) != KVP_PLAN_OK)
		return kvp_geom_refuse_side(side, from->group, err);
	return KVP_ROOM_OK;
}

static Kvp__Status take_sides(struct kvp_room *room, const Kvp__Open *msg, char *err)
{
	struct kvp_room_send *send = &room->send;
	uint32_t n = KVP_MAX(room->pool->n_entries, 1u);
	struct kvp_geom_end end;

	send->n_groups = KVP_MAX(room->pool->n_groups, 1u);
	send->sides = calloc(send->n_groups, sizeof(*send->sides));
	send->needs = calloc(send->n_groups, sizeof(*send->needs));
	send->ends = malloc(n * sizeof(*send->ends));
	send->starts = malloc(n * sizeof(*send->starts));
	if (!send->sides || !send->needs || !send->ends || !send->starts)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	memset(send->ends, 0xff, n * sizeof(*send->ends));
	memset(send->starts, 0xff, n * sizeof(*send->starts));
	room->bytes += send->n_groups * (sizeof(*send->sides) + sizeof(*send->needs)) +
		       2 * n * sizeof(*send->ends);
	for (size_t i = 0; i < msg->n_sides; i++) {
		Kvp__Status status = take_side(room, msg->sides[i], err);

		if (status != KVP_ROOM_OK)
			return status;
	}
	end = (struct kvp_geom_end){ room->pool->entries, room->pool->n_entries, send->mask,
				     send->sides, send->n_groups };
	return kvp_geom_check_sides(&end, err);
}

static Kvp__Status open_fill(struct kvp_room *room, const Kvp__Open *msg, char *err)
{
	Kvp__Status status;

	if (!kvp_room_introduce(room, msg->handle, msg->label, msg->timers, &msg->key))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	room->state = KVP__ROOM_STATE__ROOM_WAITING;
	if (msg->timers && msg->timers->lease_ms) {
		room->send.leased = true;
		room->send.lease_ns = room->created_ns + room->timers.lease_ns;
	}
	status = take_mask(room, msg, err);
	return status == KVP_ROOM_OK ? take_sides(room, msg, err) : status;
}

static int order_tx(struct kvp_room *room)
{
	struct kvp_order_tx *order = calloc(1, sizeof(*order));

	if (!order)
		return -ENOMEM;
	order->order.type = KVP_ORDER_TX_ADD;
	order->board = &room->board;
	order->pool = room->pool->id;
	order->room = room->key.room;
	order->sender = room->key.index;
	room->bytes += sizeof(*order) + KVP_LANE_TX_BYTES;
	kvp_lane_order(room->lane, &order->order);
	return 0;
}

static Kvp__Status rooms_open(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			      struct kvp_pool *pool, const Kvp__Open *msg, char *err)
{
	const struct kvp_room_key key = { msg->room, msg->sender, false };
	KVP_CLEANUP(kvp_room_freep) struct kvp_room *room = NULL;
	Kvp__Status status = kvp_room_admit(rooms, owner, &key, msg->handle, err);
	struct kvp_room *entered;

	if (status != KVP_ROOM_OK)
		return status;
	room = kvp_room_new(rooms, owner, pool, &key);
	if (!room)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	status = open_fill(room, msg, err);
	if (status != KVP_ROOM_OK)
		return status;
	kvp_board_init(&room->board, KVP_BOARD_TX, ++rooms->last_tx);
	if (order_tx(room) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	entered = KVP_TAKE(room);
	kvp_room_enter(entered);
	kvp_room_changed(entered);
	kvp_park_take(entered);
	kvp_room_timer_update(entered);
	return KVP_ROOM_OK;
}

Kvp__Status kvp_rooms_open(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			   struct kvp_pool *pool, const Kvp__Open *msg, char *err)
{
	Kvp__Status status;

	rooms->requesting = owner;
	status = rooms_open(rooms, owner, pool, msg, err);
	rooms->requesting = NULL;
	return status;
}

/* ---- offers ------------------------------------------------------------------------------------
 */

static size_t sleg_bytes(const struct kvp_room *room)
{
	return sizeof(struct kvp_sleg) + room->send.n_groups * sizeof(uint64_t);
}

void kvp_sleg_free(struct kvp_sleg *leg)
{
	struct kvp_room *room = leg->room;

	kvp_room_peer_drop_sleg(leg);
	DL_DELETE2(room->send.legs, leg, rprev, rnext);
	room->send.n_legs--;
	if (!room->send.legs && !room->send.ready)
		room->send.n_dests = 0; /* the next offers say anew */
	room->bytes -= sleg_bytes(room);
	room->rooms->stats.bytes_rooms -= sleg_bytes(room);
	kvp_peer_free(leg->offer);
	free(leg->geom.block);
	free(leg);
}

/* First positions that the leg's destination needs, by this end's groups. */
static void leg_firsts(struct kvp_sleg *leg)
{
	const struct kvp_leg_geom *geom = &leg->geom.geom;

	for (uint32_t i = 0; i < geom->n_pairs; i++) {
		uint32_t src_group = geom->src[geom->pairs[i].src_entry].group;
		uint32_t dst_group = geom->dst[geom->pairs[i].dst_entry].group;

		leg->firsts[src_group] =
			KVP_MIN(leg->firsts[src_group], geom->dst_starts[dst_group]);
	}
}

static Kvp__Status offer_geom(struct kvp_sleg *leg, const struct kvp_peer *peer, char *err)
{
	const struct kvp_room *room = leg->room;
	const struct kvp_pool *pool = room->pool;
	const Kvp__Offer *offer = leg->offer->offer;
	uint64_t slot_bytes = KVP_MIN(offer->slot_bytes, kvp_lane_slot_bytes(room->lane));
	struct kvp_geom_remote remote = { 0 };
	struct kvp_geom_spec spec;
	Kvp__Status status;

	status = kvp_geom_check_tags(pool, &offer->layout_tag, offer->layout_version, err);
	if (status != KVP_ROOM_OK)
		return status;
	leg->across = kvp_across_can(room, peer, offer);
	leg->local = leg->across || (kvp_peer_is_self(peer) && offer->lane == room->lane_idx);
	if (!leg->local && offer->lane_address.len == 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_UNSUPPORTED,
				       kvp_peer_is_self(peer)
					       ? "its pool is on lane %u, this one on lane %u of "
						 "the same daemon, and there is no data transport "
						 "between them: peer.listen is not set"
					       : "lane %u of the destination's daemon has no data "
						 "transport for this one's lane %u",
				       offer->lane, room->lane_idx);
	if (!leg->local && offer->transport[0] &&
	    strcmp(offer->transport, kvp_lane_transport(room->lane)) != 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_UNSUPPORTED,
				       "the destination's daemon moves data by %s, this one by %s: "
				       "data.transport",
				       offer->transport, kvp_lane_transport(room->lane));
	leg->sums = kvp_room_sums_agree(room, offer->checksum);
	status = kvp_geom_unpack(&remote, offer->entries, offer->n_entries, offer->sides,
				 offer->n_sides, err);
	if (status == KVP_ROOM_OK) {
		spec = (struct kvp_geom_spec){
			.src = { pool->entries, pool->n_entries, room->send.mask, room->send.sides,
				 room->send.n_groups },
			.dst = { remote.entries, remote.n, remote.mask, remote.sides,
				 KVP_LANE_GROUPS },
			.starts = remote.firsts,
			.end = offer->end,
			.slot_bytes = slot_bytes,
			.sender = room->key.index,
			.sums = leg->sums == KVP_SUMS_ON,
		};
		status = kvp_geom_build(&leg->geom, &spec, err);
		if (status == KVP_ROOM_OK)
			status = kvp_room_sums_settle(leg->room, offer->checksum, &leg->geom,
						      &leg->sums, err);
	}
	kvp_geom_remote_fini(&remote);
	return status;
}

/* What all offers to a sender must agree in. The first one says. */
static Kvp__Status offer_agrees(struct kvp_room *room, const Kvp__Offer *offer, char *err)
{
	struct kvp_room_send *send = &room->send;

	if (send->n_dests == 0) {
		send->n_dests = offer->n_dests;
		room->prefix = offer->prefix;
		room->end = offer->end;
		return KVP_ROOM_OK;
	}
	if (offer->n_dests != send->n_dests)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
				       "n_dests is %u from destination %u, %u from the others",
				       offer->n_dests, offer->leg->dest, send->n_dests);
	if (offer->prefix != room->prefix)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
				       "prefix is %llu from destination %u, %llu from the others",
				       ull(offer->prefix), offer->leg->dest, ull(room->prefix));
	if (offer->end != room->end)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
				       "end is %llu from destination %u, %llu from the others",
				       ull(offer->end), offer->leg->dest, ull(room->end));
	if (send->n_legs >= send->n_dests)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
				       "destination %u is one too many: n_dests is %u",
				       offer->leg->dest, send->n_dests);
	return KVP_ROOM_OK;
}

static int send_accept(const struct kvp_sleg *leg)
{
	const struct kvp_room *room = leg->room;
	const struct kvp_geom_end end = { room->pool->entries, room->pool->n_entries,
					  room->send.mask, room->send.sides, room->send.n_groups };
	struct kvp_geom_packed packed = { 0 };
	Kvp__Accept accept = KVP__ACCEPT__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	uint32_t addr_bytes = 0;
	Kvp__Leg wire;
	int r;

	leg_fill(leg, &wire);
	accept.leg = &wire;
	accept.layout_version = KVP_LAYOUT_VERSION;
	if (leg->data) {
		r = kvp_geom_pack(&packed, &end, NULL);
		if (r < 0)
			return r;
		accept.entries = packed.entries;
		accept.n_entries = packed.n_entries;
		accept.sides = packed.sides;
		accept.n_sides = packed.n_sides;
		accept.layout_tag.data = room->pool->tag;
		accept.layout_tag.len = room->pool->tag_bytes;
		accept.lane = room->lane_idx;
		accept.lane_address.data = (uint8_t *)kvp_lane_address(room->lane, &addr_bytes);
		accept.lane_address.len = addr_bytes;
		accept.slot_bytes = kvp_lane_slot_bytes(room->lane);
		accept.checksum = kvp_room_sums_word(room);
	}
	msg.body_case = KVP__PEER_MSG__BODY_ACCEPT;
	msg.accept = &accept;
	r = kvp_peer_send(leg->peer, &msg);
	free(packed.block);
	return r;
}

static Kvp__Status offer_take(struct kvp_room *room, struct kvp_peer *peer, const Kvp__PeerMsg *msg,
			      char *err)
{
	struct kvp_sleg *leg;
	Kvp__Status status = offer_agrees(room, msg->offer, err);
	int r;

	if (status != KVP_ROOM_OK)
		return status;
	leg = calloc(1, sleg_bytes(room));
	if (!leg)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	leg->room = room;
	leg->dest = msg->offer->leg->dest;
	leg->generation = msg->offer->leg->generation;
	leg->since_ns = kvp_room_now();
	leg->data = msg->offer->role == KVP__SENDER_ROLE__ROLE_DATA;
	leg->offer = kvp_room_copy_msg(msg);
	memset(leg->firsts, 0xff, room->send.n_groups * sizeof(leg->firsts[0]));
	DL_APPEND2(room->send.legs, leg, rprev, rnext);
	room->send.n_legs++;
	room->bytes += sleg_bytes(room);
	room->rooms->stats.bytes_rooms += sleg_bytes(room);
	if (!leg->offer)
		status = kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	else if (leg->data)
		status = offer_geom(leg, peer, err);
	if (status == KVP_ROOM_OK && leg->data)
		leg_firsts(leg);
	if (status == KVP_ROOM_OK) {
		leg->peer = peer;
		r = kvp_room_peer_add_sleg(leg);
		if (r < 0)
			leg->peer = NULL;
		else
			r = send_accept(leg);
		if (r < 0 && r != -ENOTCONN)
			status = kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
						 "the accept cannot be sent: %s", uv_strerror(r));
	}
	if (status != KVP_ROOM_OK)
		kvp_sleg_free(leg);
	return status;
}

static struct kvp_sleg *leg_of_dest(const struct kvp_room *room, uint32_t dest)
{
	struct kvp_sleg *leg;

	DL_FOREACH2 (room->send.legs, leg, rnext) {
		if (leg->dest == dest)
			return leg;
	}
	return NULL;
}

/*
 * A wrong key or a second end concerns the offer alone; where the ends disagree, nobody can be
 * served any more, and all learn it at once.
 */
void kvp_send_offer(struct kvp_room *room, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	const Kvp__Offer *offer = msg->offer;
	char err[KVP_ROOM_ERR] = "";
	struct kvp_sleg *leg;
	Kvp__Status status;

	if (!kvp_room_key_fits(room, &offer->key)) {
		kvp_log_limited(&room->rooms->log_limit, KVP_LOG_WARNING,
				"room 0x%llx sender %u: destination %u of peer %s gave a wrong key",
				ull(room->key.room), room->key.index, offer->leg->dest,
				kvp_peer_name(peer));
		kvp_room_abort_leg(peer, offer->leg, KVP__STATUS__STATUS_DENIED, "refused", false);
		return;
	}
	leg = leg_of_dest(room, offer->leg->dest);
	if (leg && leg->state == KVP_SLEG_ACCEPTED && leg->peer != peer &&
	    leg->generation == offer->leg->generation) {
		/* Offered again on a new session: the old one is over, only we have not heard it.
		 */
		kvp_sleg_free(leg);
		leg = NULL;
	}
	if (leg) {
		(void)snprintf(err, sizeof(err), "sender %u has a live leg to destination %u",
			       room->key.index, offer->leg->dest);
		kvp_room_abort_leg(peer, offer->leg, KVP__STATUS__STATUS_EXISTS, err, false);
		return;
	}
	status = offer_take(room, peer, msg, err);
	if (status == KVP_ROOM_OK) {
		kvp_room_timer_update(room);
		return;
	}
	kvp_room_abort_leg(peer, offer->leg, status, err, kvp_room_status_retry(status));
	kvp_room_fail(room, status, "destination %u on %s: %s", offer->leg->dest,
		      kvp_peer_name(peer), err);
}

/* ---- go and ready ------------------------------------------------------------------------------
 */

static int order_tx_leg(struct kvp_sleg *leg)
{
	struct kvp_room *room = leg->room;
	const Kvp__Offer *offer = leg->offer->offer;
	struct kvp_order_tx_leg *order = calloc(1, sizeof(*order));
	const uint32_t lane = kvp_across_lane(leg);
	int r = -ENOMEM;

	if (!order)
		return r;
	order->segments = malloc(KVP_MAX(offer->n_segments, (size_t)1) * sizeof(uint32_t));
	if (order->segments)
		r = kvp_peer_endpoint(leg->peer, room->lane_idx, lane, offer->lane_address.data,
				      (uint32_t)offer->lane_address.len, &order->ep);
	if (r < 0) {
		free(order->segments);
		free(order);
		return r;
	}
	leg->local = order->ep == 0;
	leg->across = leg->local && lane != offer->lane;
	order->order.type = KVP_ORDER_TX_LEG;
	order->tx = room->board.id;
	order->dest = leg->dest;
	order->generation = leg->generation;
	order->wants_meta = offer->meta;
	order->n_segments = (uint32_t)offer->n_segments;
	for (size_t i = 0; i < offer->n_segments; i++)
		order->segments[i] = offer->segments[i]->id;
	order->leg = leg->geom;
	memset(&leg->geom, 0, sizeof(leg->geom)); /* the lane's now */
	kvp_lane_order(room->lane, &order->order);
	return 0;
}

static void send_needs(struct kvp_room *room)
{
	struct kvp_room_send *send = &room->send;
	const struct kvp_sleg *leg;

	memset(send->needs, 0xff, send->n_groups * sizeof(*send->needs));
	DL_FOREACH2 (send->legs, leg, rnext) {
		for (uint32_t g = 0; g < send->n_groups; g++)
			send->needs[g] = KVP_MIN(send->needs[g], leg->firsts[g]);
	}
}

static void send_ready(struct kvp_room *room)
{
	struct kvp_room_send *send = &room->send;

	send_needs(room);
	send->ready = true;
	room->accepted_ns = kvp_room_now();
	if (!kvp_chunks_ready(room))
		return;
	if (kvp_room_order_id(room, KVP_ORDER_TX_START, 0) < 0) {
		kvp_room_fail(room, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
		return;
	}
	kvp_room_set_state(room, send->n_chunks ? KVP__ROOM_STATE__ROOM_SENDING
						: KVP__ROOM_STATE__ROOM_READY);
	kvp_room_changed(room);
}

void kvp_send_go(struct kvp_sleg *leg)
{
	struct kvp_room *room = leg->room;
	int r = 0;

	if (leg->state != KVP_SLEG_ACCEPTED || kvp_room_terminal(room))
		return;
	if (leg->data)
		r = order_tx_leg(leg);
	if (r < 0) {
		kvp_room_fail(room, KVP__STATUS__STATUS_TRANSPORT,
			      "no data path to destination %u on %s: %s", leg->dest,
			      kvp_peer_name(leg->peer), uv_strerror(r));
		return;
	}
	leg->state = KVP_SLEG_GO;
	if (++room->send.n_go == room->send.n_dests)
		send_ready(room);
	kvp_room_timer_update(room);
}

/* ---- the lane's news and the end ---------------------------------------------------------------
 */

void kvp_send_board(struct kvp_room *room, uint32_t flags)
{
	const struct kvp_board *board = &room->board;

	kvp_chunks_freed(room, atomic_load(&board->source_free));
	if (flags & KVP_BOARD_RECALLED && room->send.recalled && !room->failed) {
		kvp_board_clear(&room->board, KVP_BOARD_RECALLED);
		kvp_chunks_recalled(room, atomic_load(&board->recalled_from));
	}
	if (!kvp_room_terminal(room) && flags & KVP_BOARD_COMPLETE)
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_CLOSING);
	kvp_room_changed(room);
}

/* Decode's word about this leg: everything is there. */
void kvp_send_ended(struct kvp_sleg *leg)
{
	struct kvp_room *room = leg->room;

	/* Decode does not wait for a sender that sends nothing: its end may come without a go. */
	if (!leg->data)
		kvp_send_go(leg);
	if (leg->state != KVP_SLEG_GO || kvp_room_terminal(room))
		return;
	leg->state = KVP_SLEG_ENDED;
	if (++room->send.n_ended == room->send.n_dests) {
		kvp_chunks_recall_ends(room);
		kvp_room_succeed(room, KVP__ROOM_STATE__ROOM_DONE);
	}
}

/* The end without success, to all destinations that do not know it yet. */
void kvp_send_tell(struct kvp_room *room)
{
	struct kvp_sleg *leg;

	kvp_chunks_recall_ends(room);
	DL_FOREACH2 (room->send.legs, leg, rnext) {
		Kvp__Leg wire;

		if (leg->over || leg->state == KVP_SLEG_ENDED || !leg->peer)
			continue;
		leg_fill(leg, &wire);
		kvp_room_abort_leg(leg->peer, &wire, room->status, kvp_room_reason(room),
				   room->retry);
	}
}

static void send_drained(const struct kvp_sleg *leg)
{
	Kvp__Drained drained = KVP__DRAINED__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Leg wire;

	leg_fill(leg, &wire);
	drained.leg = &wire;
	msg.body_case = KVP__PEER_MSG__BODY_DRAINED;
	msg.drained = &drained;
	(void)kvp_peer_send(leg->peer, &msg); /* a lost session has drained, too */
}

void kvp_send_quiet(struct kvp_room *room)
{
	while (room->send.legs) {
		struct kvp_sleg *leg = room->send.legs;

		if (leg->peer)
			send_drained(leg);
		kvp_sleg_free(leg);
	}
}

void kvp_send_clear(struct kvp_room *room)
{
	struct kvp_room_send *send = &room->send;

	while (send->legs)
		kvp_sleg_free(send->legs);
	free(send->sides);
	free(send->needs);
	free(send->ends);
	free(send->starts);
	free(send->chunks);
	free(send->segments);
}
