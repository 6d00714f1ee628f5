/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Offers that came before their sender's open: bounded by limits.max_parked_offers and by their
 * bytes, of which one peer may have half each, dropped with the session that they came on, since
 * their destination offers again on the next one.
 */

#include <assert.h>
#include <errno.h>
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
	struct kvp_room_peer *data = kvp_peer_data(parked->peer);

	assert(parking && data); /* as long as they have one */
	LL_DELETE2(parking->first, parked, knext);
	DL_DELETE(rooms->parked, parked);
	rooms->n_parked--;
	rooms->parked_bytes -= parked->bytes;
	data->n_parked--;
	data->parked_bytes -= parked->bytes;
	kvp_room_peer_drop_empty(parked->peer);
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

/* Is there room for one more of that peer? If not, `text` says why. */
static bool park_room(const struct kvp_rooms *rooms, const struct kvp_room_peer *data,
		      uint64_t bytes, char *text, size_t text_bytes)
{
	const uint32_t most = rooms->config->limits.max_parked_offers;
	bool peers = data && (data->n_parked >= KVP_DIV_UP(most, 2u) ||
			      data->parked_bytes + bytes > KVP_PARKED_BYTES / 2);

	if (!peers && rooms->n_parked < most && rooms->parked_bytes + bytes <= KVP_PARKED_BYTES)
		return true;
	(void)snprintf(text, text_bytes,
		       "parked offers%s: %u of %llu bytes, limit %slimits.max_parked_offers %u and "
		       "%llu bytes",
		       peers ? " of this peer" : "", peers ? data->n_parked : rooms->n_parked,
		       (unsigned long long)(peers ? data->parked_bytes : rooms->parked_bytes),
		       peers ? "half of " : "", most,
		       (unsigned long long)KVP_PARKED_BYTES / (peers ? 2 : 1));
	return false;
}

/* A parked offer in no list yet. */
static struct kvp_room_parked *parked_make(struct kvp_peer *peer, const Kvp__PeerMsg *msg,
					   uint64_t bytes)
{
	const Kvp__Leg *leg = msg->offer->leg;
	struct kvp_room_parked *parked = calloc(1, sizeof(*parked));

	if (!parked)
		return NULL;
	parked->msg = kvp_room_copy_msg(msg);
	if (!parked->msg) {
		free(parked);
		return NULL;
	}
	parked->peer = peer;
	parked->key = (struct kvp_room_key){ leg->room, leg->sender, false };
	parked->bytes = bytes;
	parked->since_ns = kvp_room_now();
	return parked;
}

static int park(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg,
		uint64_t bytes)
{
	struct kvp_room_parked *parked = parked_make(peer, msg, bytes);
	struct kvp_room_parking *parking = parked ? parking_get(rooms, &parked->key) : NULL;
	struct kvp_room_peer *data = parking ? kvp_room_peer_data(peer) : NULL;

	if (!data) {
		if (parking)
			parking_drop_empty(rooms, parking);
		if (parked)
			parked_free(parked);
		return -ENOMEM;
	}
	LL_APPEND2(parking->first, parked, knext);
	DL_APPEND(rooms->parked, parked);
	rooms->n_parked++;
	rooms->parked_bytes += bytes;
	data->n_parked++;
	data->parked_bytes += bytes;
	return 0;
}

void kvp_park_offer(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	const Kvp__Leg *leg = msg->offer->leg;
	const struct kvp_room_key key = { leg->room, leg->sender, false };
	uint64_t bytes = protobuf_c_message_get_packed_size(&msg->base);
	char text[160];

	drop_older(rooms, peer, &key, leg->dest);
	if (!park_room(rooms, kvp_peer_data(peer), bytes, text, sizeof(text))) {
		rooms->stats.refused_offers++;
		kvp_room_abort_leg(peer, leg, KVP__STATUS__STATUS_LIMIT, text, true);
		return;
	}
	if (park(rooms, peer, msg, bytes) < 0)
		kvp_room_abort_leg(peer, leg, KVP__STATUS__STATUS_NO_MEMORY, "no memory", true);
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

/* What came for the offer while it was parked. */
static void take_parked(struct kvp_room *room, const struct kvp_room_parked *parked)
{
	struct kvp_sleg *leg;

	kvp_send_offer(room, parked->peer, parked->msg);
	leg = parked->ended ? kvp_send_leg(room->rooms, parked->peer, parked->msg->offer->leg)
			    : NULL;
	if (leg)
		kvp_send_ended(leg);
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
			take_parked(room, parked);
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
