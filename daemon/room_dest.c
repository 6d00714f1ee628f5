/* SPDX-License-Identifier: Apache-2.0 */

/* A destination after its expect: offers, accepts, the lane's news, the end. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

static void leg_fill(const struct kvp_dleg *leg, Kvp__Leg *out)
{
	kvp__leg__init(out);
	out->room = leg->room->key.room;
	out->dest = leg->room->key.index;
	out->sender = leg->sender;
	out->generation = leg->room->board.id;
}

struct kvp_dleg *kvp_dest_leg(struct kvp_rooms *rooms, const struct kvp_peer *peer,
			      const Kvp__Leg *leg)
{
	struct kvp_room *room = kvp_room_find(rooms, leg->room, leg->dest, true);

	if (!room)
		return NULL;
	if (room->board.id != leg->generation) {
		rooms->stats.late_messages++;
		return NULL;
	}
	for (uint32_t i = 0; i < room->dest.n_legs; i++)
		if (room->dest.legs[i].sender == leg->sender && room->dest.legs[i].peer == peer)
			return &room->dest.legs[i];
	return NULL;
}

/* ---- offers ------------------------------------------------------------------------------------
 */

struct offer_parts {
	Kvp__Leg leg;
	Kvp__PeerSegment *segments, **segment_ptrs; /* owned */
	struct kvp_geom_packed packed;              /* owned */
};

static void offer_parts_fini(struct offer_parts *parts)
{
	free(parts->segments);
	free(parts->segment_ptrs);
	free(parts->packed.block);
}

static int offer_segments(const struct kvp_room_dest *dest, Kvp__Offer *offer,
			  struct offer_parts *parts)
{
	uint32_t n = dest->n_segments;

	if (n == 0)
		return 0;
	parts->segments = calloc(n, sizeof(*parts->segments));
	parts->segment_ptrs = calloc(n, sizeof(*parts->segment_ptrs));
	if (!parts->segments || !parts->segment_ptrs)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		kvp__peer_segment__init(&parts->segments[i]);
		parts->segments[i].id = dest->segments[i].id;
		parts->segments[i].bytes = dest->segments[i].bytes;
		parts->segment_ptrs[i] = &parts->segments[i];
	}
	offer->segments = parts->segment_ptrs;
	offer->n_segments = n;
	return 0;
}

/* What concerns the data; a leg without any carries none of it. */
static int offer_data(const struct kvp_dleg *leg, Kvp__Offer *offer, struct offer_parts *parts)
{
	const struct kvp_room *room = leg->room;
	const struct kvp_geom_end end = { room->pool->entries, room->pool->n_entries, NULL,
					  room->dest.sides, room->dest.n_groups };
	uint32_t addr_bytes = 0;
	int r = kvp_geom_pack(&parts->packed, &end, room->dest.firsts);

	if (r < 0)
		return r;
	offer->entries = parts->packed.entries;
	offer->n_entries = parts->packed.n_entries;
	offer->sides = parts->packed.sides;
	offer->n_sides = parts->packed.n_sides;
	offer->layout_tag.data = room->pool->tag;
	offer->layout_tag.len = room->pool->tag_bytes;
	offer->meta = room->dest.meta_from == (int32_t)leg->sender;
	offer->lane = room->lane_idx;
	offer->lane_address.data = (uint8_t *)kvp_lane_address(room->lane, &addr_bytes);
	offer->lane_address.len = addr_bytes;
	offer->slot_bytes = kvp_lane_slot_bytes(room->lane);
	offer->checksum = kvp_room_sums_word(room);
	return offer_segments(&room->dest, offer, parts);
}

static int offer_send(struct kvp_dleg *leg)
{
	const struct kvp_room *room = leg->room;
	KVP_CLEANUP(offer_parts_fini) struct offer_parts parts = { 0 };
	Kvp__Offer offer = KVP__OFFER__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	int r = 0;

	leg_fill(leg, &parts.leg);
	offer.leg = &parts.leg;
	offer.key.data = (uint8_t *)room->secret;
	offer.key.len = room->secret_bytes;
	offer.n_dests = leg->n_dests;
	offer.role = leg->data ? KVP__SENDER_ROLE__ROLE_DATA : KVP__SENDER_ROLE__ROLE_NONE;
	offer.prefix = room->prefix;
	offer.end = room->end;
	offer.layout_version = KVP_LAYOUT_VERSION;
	offer.transport = (char *)kvp_lane_transport(room->lane);
	if (leg->data)
		r = offer_data(leg, &offer, &parts);
	if (r < 0)
		return r;
	msg.body_case = KVP__PEER_MSG__BODY_OFFER;
	msg.offer = &offer;
	return kvp_peer_send(leg->peer, &msg);
}

static void check_accepted(struct kvp_room *room);

bool kvp_dleg_met(const struct kvp_dleg *leg)
{
	if (leg->state == KVP_DLEG_OFFERED)
		return !leg->data && leg->room->dest.n_data > 0;
	return leg->state == KVP_DLEG_ACCEPTED;
}

void kvp_dest_offer(struct kvp_dleg *leg)
{
	struct kvp_room *room = leg->room;
	uint32_t addr_bytes = 0;
	int r;

	if (leg->state != KVP_DLEG_UNSENT || kvp_room_terminal(room) ||
	    !kvp_peer_is_up(leg->peer) || kvp_peer_unsent(leg->peer) > KVP_ROOM_UNSENT_HIGH)
		return;
	(void)kvp_lane_address(room->lane, &addr_bytes);
	if (leg->data && !kvp_peer_is_self(leg->peer) && addr_bytes == 0) {
		kvp_room_fail(room, KVP__STATUS__STATUS_UNSUPPORTED,
			      "this daemon has no data transport to receive from peer %s: "
			      "peer.listen is not set",
			      kvp_peer_name(leg->peer));
		return;
	}
	r = offer_send(leg);
	if (r == -EMSGSIZE || r == -EINVAL || r == -ENOMEM) {
		kvp_room_fail(room, KVP__STATUS__STATUS_LIMIT,
			      "the offer to sender %u cannot be sent: %s", leg->sender,
			      uv_strerror(r));
		return;
	}
	if (r < 0)
		return; /* the session is over: the leg is offered again on the next */
	leg->state = KVP_DLEG_OFFERED;
	leg->since_ns = kvp_room_now();
	if (!room->offered_ns)
		room->offered_ns = leg->since_ns;
	check_accepted(room);
}

/* ---- accepts -----------------------------------------------------------------------------------
 */

static Kvp__Status accept_geom(struct kvp_dleg *leg, const Kvp__Accept *accept,
			       struct kvp_lane_geom *geom, struct kvp_lane_geom *copy, char *err)
{
	struct kvp_room *room = leg->room;
	uint64_t slot_bytes = KVP_MIN(accept->slot_bytes, kvp_lane_slot_bytes(room->pool->lane));
	struct kvp_geom_remote remote = { 0 };
	struct kvp_geom_spec spec;
	Kvp__Status status;

	status = kvp_geom_check_tags(room->pool, &accept->layout_tag, accept->layout_version, err);
	leg->sums = kvp_room_sums_agree(room, accept->checksum);
	if (status == KVP_ROOM_OK)
		status = kvp_geom_unpack(&remote, accept->entries, accept->n_entries, accept->sides,
					 accept->n_sides, err);
	if (status == KVP_ROOM_OK) {
		spec = (struct kvp_geom_spec){
			.src = { remote.entries, remote.n, remote.mask, remote.sides,
				 KVP_LANE_GROUPS },
			.dst = { room->pool->entries, room->pool->n_entries, NULL, room->dest.sides,
				 room->dest.n_groups },
			.starts = room->dest.firsts,
			.end = room->end,
			.slot_bytes = slot_bytes,
			.sender = leg->sender,
			.sums = leg->sums == KVP_SUMS_ON,
		};
		status = kvp_geom_build(geom, &spec, err);
		if (status == KVP_ROOM_OK)
			status =
				kvp_room_sums_settle(room, accept->checksum, geom, &leg->sums, err);
		if (status == KVP_ROOM_OK)
			status = kvp_geom_build(copy, &spec, err);
	}
	kvp_geom_remote_fini(&remote);
	return status;
}

static Kvp__Status order_rx_leg(struct kvp_dleg *leg, const Kvp__Accept *accept, char *err)
{
	struct kvp_room *room = leg->room;
	struct kvp_order_rx_leg *order = calloc(1, sizeof(*order));
	Kvp__Status status;
	int r;

	if (!order)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	leg->geom = calloc(1, sizeof(*leg->geom));
	status = leg->geom ? accept_geom(leg, accept, &order->leg, leg->geom, err)
			   : kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	if (status == KVP_ROOM_OK) {
		r = kvp_peer_endpoint(leg->peer, room->lane_idx, accept->lane,
				      accept->lane_address.data, (uint32_t)accept->lane_address.len,
				      &order->ep);
		if (r < 0)
			status = kvp_room_refuse(err, KVP__STATUS__STATUS_TRANSPORT,
						 "no data path to lane %u: %s", accept->lane,
						 uv_strerror(r));
		leg->local = order->ep == 0;
	}
	if (status != KVP_ROOM_OK) {
		free(order->leg.block);
		free(order);
		return status;
	}
	order->order.type = KVP_ORDER_RX_LEG;
	order->generation = room->board.id;
	order->sender = leg->sender;
	kvp_lane_order(room->lane, &order->order);
	return KVP_ROOM_OK;
}

static void send_leg_msg(struct kvp_dleg *leg, bool end)
{
	Kvp__Leg wire;
	Kvp__Go go = KVP__GO__INIT;
	Kvp__LegEnd leg_end = KVP__LEG_END__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;

	leg_fill(leg, &wire);
	go.leg = leg_end.leg = &wire;
	msg.body_case = end ? KVP__PEER_MSG__BODY_END : KVP__PEER_MSG__BODY_GO;
	if (end)
		msg.end = &leg_end;
	else
		msg.go = &go;
	(void)kvp_peer_send(leg->peer,
			    &msg); /* else the session is over, and the room knows soon */
}

static Kvp__Status check_coverage(const struct kvp_room *room, char *err)
{
	struct kvp_leg_geom geoms[KVP_MAX_SENDERS];
	const struct kvp_need need = { room->pool->entries, room->dest.sides, room->dest.firsts,
				       room->end, room->pool->n_entries };
	char text[KVP_PLAN_ERR_BYTES];
	uint32_t n = 0;

	for (uint32_t i = 0; i < room->dest.n_legs; i++)
		if (room->dest.legs[i].data)
			geoms[n++] = room->dest.legs[i].geom->geom;
	if (n == 0 || kvp_coverage_check(&need, geoms, n, text, sizeof(text)) == 0)
		return KVP_ROOM_OK;
	return kvp_room_refuse(err, KVP__STATUS__STATUS_COVERAGE, "%.180s", text);
}

static void drop_geoms(struct kvp_room *room)
{
	for (uint32_t i = 0; i < room->dest.n_legs; i++) {
		struct kvp_lane_geom *geom = KVP_TAKE(room->dest.legs[i].geom);

		if (geom)
			free(geom->block);
		free(geom);
	}
}

static void all_accepted(struct kvp_room *room)
{
	char err[KVP_ROOM_ERR] = "";
	Kvp__Status status = check_coverage(room, err);

	drop_geoms(room);
	if (status != KVP_ROOM_OK) {
		kvp_room_fail(room, status, "%s", err);
		return;
	}
	room->accepted_ns = kvp_room_now();
	kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_ACCEPTED);
	if (room->dest.n_data == 0)
		kvp_room_succeed(room, KVP__ROOM_STATE__ROOM_COMPLETE);
	else
		kvp_dest_board(room, kvp_board_flags(&room->board));
}

/* Once nobody is waited for any more. */
static void check_accepted(struct kvp_room *room)
{
	if (room->accepted_ns || kvp_room_terminal(room))
		return;
	for (uint32_t i = 0; i < room->dest.n_legs; i++)
		if (!kvp_dleg_met(&room->dest.legs[i]))
			return;
	all_accepted(room);
}

/* A test point keeps answers; true: kept. */
static bool accept_kept(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct kvp_room_kept *kept, **at = &rooms->kept;

	if (!rooms->hold_offers)
		return false;
	kept = calloc(1, sizeof(*kept));
	if (!kept)
		return false;
	kept->peer = peer;
	kept->msg = kvp_room_copy_msg(msg);
	if (!kept->msg) {
		free(kept);
		return false;
	}
	while (*at)
		at = &(*at)->next;
	*at = kept;
	return true;
}

void kvp_dest_accept(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct kvp_dleg *leg = kvp_dest_leg(rooms, peer, msg->accept->leg);
	char err[KVP_ROOM_ERR] = "";
	Kvp__Status status = KVP_ROOM_OK;

	if (!leg || leg->state != KVP_DLEG_OFFERED || kvp_room_terminal(leg->room))
		return; /* it crossed the end on its way */
	if (accept_kept(rooms, peer, msg))
		return;
	if (leg->data) {
		kvp_across_settle(leg, msg->accept->lane);
		status = order_rx_leg(leg, msg->accept, err);
	}
	if (status != KVP_ROOM_OK) {
		kvp_room_fail(leg->room, status, "sender %u on %s: %s", leg->sender,
			      kvp_peer_name(peer), err);
		return;
	}
	leg->state = KVP_DLEG_ACCEPTED;
	leg->since_ns = kvp_room_now();
	send_leg_msg(leg, false);
	check_accepted(leg->room);
	kvp_room_timer_update(leg->room);
}

/* ---- the lane's news and the end ---------------------------------------------------------------
 */

void kvp_dest_board(struct kvp_room *room, uint32_t flags)
{
	const struct kvp_board *board = &room->board;

	if (kvp_room_terminal(room))
		return;
	/* Not before all are met: a sender without data has to learn the end, too. */
	if (flags & KVP_BOARD_COMPLETE && room->accepted_ns) {
		kvp_room_succeed(room, KVP__ROOM_STATE__ROOM_COMPLETE);
		return;
	}
	if (room->state == KVP__ROOM_STATE__ROOM_ACCEPTED &&
	    (atomic_load(&board->progress) || atomic_load(&board->first_want_ns)))
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_LANDING);
	kvp_room_changed(room);
}

/* The last word to all senders. */
void kvp_dest_tell(struct kvp_room *room)
{
	drop_geoms(room);
	for (uint32_t i = 0; i < room->dest.n_legs; i++) {
		struct kvp_dleg *leg = &room->dest.legs[i];
		Kvp__Leg wire;

		if (leg->state == KVP_DLEG_UNSENT || leg->over || !leg->peer)
			continue;
		leg_fill(leg, &wire);
		if (room->complete)
			send_leg_msg(leg, true);
		else
			kvp_room_abort_leg(leg->peer, &wire, room->status, kvp_room_reason(room),
					   room->retry);
	}
}

void kvp_dest_quiet(struct kvp_room *room)
{
	struct kvp_room_dest *dest = &room->dest;

	for (uint32_t i = 0; i < dest->n_legs; i++)
		kvp_room_peer_drop_dleg(&dest->legs[i]);
	for (uint32_t g = 0; dest->held && g < dest->n_groups; g++) {
		if (dest->held[g].n)
			kvp_pool_unhold(room->pool, g, dest->sides[g].pages + dest->held[g].from,
					dest->held[g].n);
		dest->held[g].n = 0;
	}
	dest->n_held = 0;
}

void kvp_dest_clear(struct kvp_room *room)
{
	struct kvp_room_dest *dest = &room->dest;

	kvp_dest_quiet(room);
	drop_geoms(room);
	free(dest->legs);
	free(dest->sides);
	free(dest->firsts);
	free(dest->held);
	free(dest->pages);
	free(dest->segments);
	free(dest->meta);
	if (dest->rx_order)
		kvp_order_free(&dest->rx_order->order);
}
