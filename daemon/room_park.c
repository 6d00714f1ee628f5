/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Offers that came before their sender's open: bounded by limits.max_parked_offers, dropped with
 * the session that they came on, since their destination offers again on the next one.
 */

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

Kvp__PeerMsg *kvp_room_copy_msg(const Kvp__PeerMsg *msg)
{
	size_t bytes = protobuf_c_message_get_packed_size(&msg->base);
	KVP_CLEANUP(kvp_freep) uint8_t *buf = malloc(bytes);

	if (!buf)
		return NULL;
	protobuf_c_message_pack(&msg->base, buf);
	return kvp__peer_msg__unpack(NULL, bytes, buf);
}

static struct kvp_room_parking *parking_find(struct kvp_rooms *rooms,
					     const struct kvp_room_key *key)
{
	struct kvp_map_link *link = kvp_map_find(&rooms->parking, key->room, key->index);

	return link ? KVP_CONTAINER_OF(link, struct kvp_room_parking, link) : NULL;
}

static struct kvp_room_parking *parking_get(struct kvp_rooms *rooms, const struct kvp_room_key *key)
{
	struct kvp_room_parking *parking = parking_find(rooms, key);

	if (parking)
		return parking;
	parking = calloc(1, sizeof(*parking));
	if (!parking)
		return NULL;
	parking->link.key[0] = key->room;
	parking->link.key[1] = key->index;
	kvp_map_add(&rooms->parking, &parking->link);
	return parking;
}

static void parking_drop_empty(struct kvp_rooms *rooms, struct kvp_room_parking *parking)
{
	if (parking->first)
		return;
	kvp_map_remove(&rooms->parking, &parking->link);
	free(parking);
}

/* Out of both lists; the offer is the caller's. */
static void parked_unlink(struct kvp_rooms *rooms, struct kvp_room_parked *parked)
{
	struct kvp_room_parking *parking = parking_find(rooms, &parked->key);

	assert(parking); /* as long as it has one */
	LL_DELETE2(parking->first, parked, knext);
	DL_DELETE(rooms->parked, parked);
	rooms->n_parked--;
	parking_drop_empty(rooms, parking);
}

static void parked_free(struct kvp_room_parked *parked)
{
	kvp_peer_free(parked->msg);
	free(parked);
}

static void parked_drop(struct kvp_rooms *rooms, struct kvp_room_parked *parked)
{
	parked_unlink(rooms, parked);
	parked_free(parked);
}

/* A destination that offers anew has given up what it offered before. Only its own daemon can say
 * so: another peer's offer for the same destination is parked beside it. */
static void drop_older(struct kvp_rooms *rooms, const struct kvp_peer *peer,
		       const struct kvp_room_key *key, uint32_t dest)
{
	struct kvp_room_parking *parking = parking_find(rooms, key);
	struct kvp_room_parked *parked, *tmp;

	if (!parking)
		return;
	LL_FOREACH_SAFE2 (parking->first, parked, tmp, knext) {
		if (parked->peer != peer || parked->msg->offer->leg->dest != dest)
			continue;
		rooms->stats.late_messages++;
		parked_drop(rooms, parked);
		return; /* there is one at most; the parking may be gone */
	}
}

void kvp_park_offer(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	const Kvp__Leg *leg = msg->offer->leg;
	const struct kvp_room_key key = { leg->room, leg->sender, false };
	struct kvp_room_parked *parked;
	struct kvp_room_parking *parking;
	char text[96];

	drop_older(rooms, peer, &key, leg->dest);
	if (rooms->n_parked >= rooms->config->limits.max_parked_offers) {
		rooms->stats.refused_offers++;
		(void)snprintf(text, sizeof(text),
			       "parked offers: %u, limit limits.max_parked_offers %u",
			       rooms->n_parked, rooms->config->limits.max_parked_offers);
		kvp_room_abort_leg(peer, leg, KVP__STATUS__STATUS_LIMIT, text, true);
		return;
	}
	parked = calloc(1, sizeof(*parked));
	parking = parking_get(rooms, &key);
	if (parked)
		parked->msg = kvp_room_copy_msg(msg);
	if (!parked || !parking || !parked->msg) {
		if (parking)
			parking_drop_empty(rooms, parking);
		if (parked)
			kvp_peer_free(parked->msg);
		free(parked);
		kvp_room_abort_leg(peer, leg, KVP__STATUS__STATUS_NO_MEMORY, "no memory", true);
		return;
	}
	parked->peer = peer;
	parked->key = key;
	parked->since_ns = kvp_room_now();
	LL_APPEND2(parking->first, parked, knext);
	DL_APPEND(rooms->parked, parked);
	rooms->n_parked++;
}

/* An offer that the sender cannot serve any more, since it has failed over one before. */
static void refuse_parked(const struct kvp_room *room, struct kvp_room_parked *parked)
{
	if (kvp_room_key_fits(room, &parked->msg->offer->key))
		kvp_room_abort_leg(parked->peer, parked->msg->offer->leg, room->status,
				   kvp_room_reason(room), room->retry);
	else
		kvp_room_abort_leg(parked->peer, parked->msg->offer->leg,
				   KVP__STATUS__STATUS_DENIED, "refused", false);
}

void kvp_park_take(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;
	struct kvp_room_parking *parking = parking_find(rooms, &room->key);

	while (parking) {
		struct kvp_room_parked *parked = parking->first;

		parked_unlink(rooms, parked);
		if (kvp_room_terminal(room))
			refuse_parked(room, parked);
		else
			kvp_send_offer(room, parked->peer, parked->msg);
		parked_free(parked);
		parking = parking_find(rooms, &room->key); /* may be gone */
	}
}

void kvp_park_drop_peer(struct kvp_rooms *rooms, const struct kvp_peer *peer)
{
	struct kvp_room_parked *parked, *tmp;

	DL_FOREACH_SAFE (rooms->parked, parked, tmp) {
		if (parked->peer == peer)
			parked_drop(rooms, parked);
	}
}

static struct kvp_room_parked *parked_find(struct kvp_rooms *rooms, const struct kvp_peer *peer,
					   const Kvp__Leg *leg)
{
	const struct kvp_room_key key = { leg->room, leg->sender, false };
	struct kvp_room_parking *parking = parking_find(rooms, &key);
	struct kvp_room_parked *parked = parking ? parking->first : NULL;

	for (; parked; parked = parked->knext) {
		const Kvp__Leg *own = parked->msg->offer->leg;

		if (parked->peer == peer && own->dest == leg->dest &&
		    own->generation == leg->generation)
			return parked;
	}
	return NULL;
}

void kvp_park_abort(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg)
{
	struct kvp_room_parked *parked = parked_find(rooms, peer, leg);

	if (parked)
		parked_drop(rooms, parked);
}

void kvp_park_end(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg)
{
	struct kvp_room_parked *parked = parked_find(rooms, peer, leg);

	if (!parked || parked->msg->offer->role != KVP__SENDER_ROLE__ROLE_NONE) {
		rooms->stats.late_messages++;
		return;
	}
	parked->ended = true;
	parked->since_ns = kvp_room_now();
	rooms->ended_at_ns =
		KVP_MIN(rooms->ended_at_ns, parked->since_ns + rooms->config->timers.open_ns);
	kvp_room_timer_arm(rooms);
}

uint64_t kvp_park_expire(struct kvp_rooms *rooms, uint64_t now)
{
	struct kvp_room_parked *parked, *tmp;
	uint64_t next = UINT64_MAX;

	if (now < rooms->ended_at_ns)
		return rooms->ended_at_ns;
	DL_FOREACH_SAFE (rooms->parked, parked, tmp) {
		uint64_t at = parked->since_ns + rooms->config->timers.open_ns;

		if (!parked->ended)
			continue;
		if (at > now)
			next = KVP_MIN(next, at);
		else
			parked_drop(rooms, parked);
	}
	return next;
}

void kvp_park_refuse_all(struct kvp_rooms *rooms, Kvp__Status status, const char *why)
{
	while (rooms->parked) {
		struct kvp_room_parked *parked = rooms->parked;

		parked_unlink(rooms, parked);
		kvp_room_abort_leg(parked->peer, parked->msg->offer->leg, status, why,
				   kvp_room_status_retry(status));
		parked_free(parked);
	}
}

void kvp_park_clear(struct kvp_rooms *rooms)
{
	while (rooms->parked)
		parked_drop(rooms, rooms->parked);
}

void kvp_rooms_each_parked(const struct kvp_rooms *rooms, kvp_parked_view_fn *fn, void *arg)
{
	const struct kvp_room_parked *parked;

	DL_FOREACH (rooms->parked, parked) {
		const struct kvp_parked_view view = {
			.room = parked->key.room,
			.since_ns = parked->since_ns,
			.sender = parked->key.index,
			.dest = parked->msg->offer->leg->dest,
			.peer = kvp_peer_name(parked->peer),
		};

		if (parked->ended || kvp_peer_is_self(parked->peer))
			continue;
		if (!fn(arg, &view))
			return;
	}
}
