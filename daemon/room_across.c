/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rooms between two GPUs of this daemon. Where the sender's GPU reaches the memory of the
 * destination's, the destination's end is given to the sender's lane, and all goes as between two
 * pools of one GPU: its kernel writes the rows into the other's memory. Which lane that is, is
 * known with the sender's accept; until then no lane has the end. Otherwise it lands in slots of
 * the pool's own lane.
 */

#include "daemon/room_internal.h"

const char *kvp_across_name(enum kvp_across across)
{
	static const char *const names[KVP_ACROSS_N] = {
		[KVP_ACROSS_NONE] = "",           [KVP_ACROSS_PEER] = "peer",
		[KVP_ACROSS_OFF] = "off",         [KVP_ACROSS_UNABLE] = "unable",
		[KVP_ACROSS_SENDERS] = "senders",
	};

	return names[across];
}

const char *kvp_across_text(enum kvp_across across)
{
	static const char *const texts[KVP_ACROSS_N] = {
		[KVP_ACROSS_NONE] = "",
		[KVP_ACROSS_PEER] = "",
		[KVP_ACROSS_OFF] = "between two GPUs, and gpu.peer is off",
		[KVP_ACROSS_UNABLE] = "between two GPUs, and the sender's does not reach the "
				      "destination's memory: kvpackctl pools says why",
		[KVP_ACROSS_SENDERS] = "between two GPUs, and from several senders: an end is on "
				       "one lane",
	};

	return texts[across];
}

static const struct kvp_dleg *data_leg(const struct kvp_room *room)
{
	for (uint32_t i = 0; i < room->dest.n_legs; i++)
		if (room->dest.legs[i].data)
			return &room->dest.legs[i];
	return NULL;
}

bool kvp_across_defer(const struct kvp_room *room)
{
	const struct kvp_dleg *leg = data_leg(room);

	return room->dest.n_data == 1 && leg && leg->peer && kvp_peer_is_self(leg->peer) &&
	       kvp_pool_has_guests(room->pool);
}

void kvp_across_push(struct kvp_room *room)
{
	struct kvp_order_rx *order = KVP_TAKE(room->dest.rx_order);

	if (order)
		kvp_lane_order(room->lane, &order->order);
}

/* Is the sender on the lane of another GPU of this daemon? */
static bool is_across(const struct kvp_dleg *leg, uint32_t lane_idx)
{
	const struct kvp_room *room = leg->room;
	const struct kvp_rooms *rooms = room->rooms;

	return kvp_peer_is_self(leg->peer) && room->pool->on_gpu && lane_idx != room->lane_idx &&
	       lane_idx < rooms->n_lanes && kvp_lane_gpu(rooms->lanes[lane_idx])[0];
}

static enum kvp_across obstacle(const struct kvp_room *room)
{
	if (room->rooms->config->gpu.peer == KVP_PEER_OFF)
		return KVP_ACROSS_OFF;
	return room->dest.n_data > 1 ? KVP_ACROSS_SENDERS : KVP_ACROSS_UNABLE;
}

void kvp_across_settle(struct kvp_dleg *leg, uint32_t lane_idx)
{
	struct kvp_room *room = leg->room;
	struct kvp_rooms *rooms = room->rooms;
	uint64_t pool = kvp_pool_on(room->pool, lane_idx);
	enum kvp_across across = KVP_ACROSS_NONE;

	if (is_across(leg, lane_idx)) {
		across = room->dest.rx_order && pool ? KVP_ACROSS_PEER : obstacle(room);
		rooms->stats.across[across]++;
		room->dest.across = (uint8_t)across;
	}
	if (across == KVP_ACROSS_PEER) {
		room->lane = rooms->lanes[lane_idx];
		room->lane_idx = lane_idx;
		room->dest.rx_order->pool = pool;
	}
	kvp_across_push(room);
}

/* ---- the sender's side ----------------------------------------------------------------------- */

/* The other end, if it is in this daemon. */
static const struct kvp_room *dest_of(const struct kvp_room *send, const struct kvp_peer *peer,
				      uint32_t dest, uint64_t generation)
{
	const struct kvp_room *room = NULL;

	if (kvp_peer_is_self(peer))
		room = kvp_room_find(send->rooms, send->key.room, dest, true);
	return room && room->board.id == generation ? room : NULL;
}

bool kvp_across_can(const struct kvp_room *send, const struct kvp_peer *peer,
		    const Kvp__Offer *offer)
{
	const struct kvp_room *room = dest_of(send, peer, offer->leg->dest, offer->leg->generation);

	return room && room->dest.rx_order && offer->lane != send->lane_idx &&
	       kvp_pool_on(room->pool, send->lane_idx) != 0;
}

uint32_t kvp_across_lane(const struct kvp_sleg *leg)
{
	const struct kvp_room *room = dest_of(leg->room, leg->peer, leg->dest, leg->generation);

	return room ? room->lane_idx : leg->offer->offer->lane;
}
