/* SPDX-License-Identifier: Apache-2.0 */

/* A daemon that takes nothing new: it stops, or an administrator empties the node. */

#include <stdio.h>

#include "daemon/room_internal.h"

Kvp__Status kvp_room_no_legs(const struct kvp_rooms *rooms, char *text, size_t bytes)
{
	if (!rooms->closed && !rooms->draining)
		return KVP_ROOM_OK;
	/* Cut texts are fine. */
	if (rooms->closed)
		(void)snprintf(text, bytes, "the daemon stops");
	else
		(void)snprintf(text, bytes, "the daemon is being drained%s%s",
			       rooms->drain_reason[0] ? ": " : "", rooms->drain_reason);
	return KVP__STATUS__STATUS_STOPPING;
}

/* The client's library announces it again when the daemon is lost: nothing has moved, as far as the
 * client can have been told. */
static bool can_be_left(const struct kvp_room *room)
{
	if (room->key.is_dest)
		return room->state == KVP__ROOM_STATE__ROOM_OFFERING ||
		       room->state == KVP__ROOM_STATE__ROOM_ACCEPTED;
	return room->send.n_chunks == 0 && (room->state == KVP__ROOM_STATE__ROOM_WAITING ||
					    room->state == KVP__ROOM_STATE__ROOM_READY);
}

void kvp_rooms_stop(struct kvp_rooms *rooms, const char *why)
{
	struct kvp_room *room, *tmp;

	DL_FOREACH_SAFE (rooms->all, room, tmp) {
		if (kvp_room_terminal(room))
			continue;
		room->left = can_be_left(room);
		if (!room->left)
			kvp_room_fail(room, KVP__STATUS__STATUS_STOPPING, "%s", why);
	}
}

bool kvp_room_owner_told(const struct kvp_room_owner *owner)
{
	const struct kvp_room *room;

	DL_FOREACH2 (owner->rooms, room, onext) {
		if (!room->left)
			return false;
	}
	return !owner->dirty;
}

/* Not all of its legs are there, and now they will not come. */
static bool lacks_legs(const struct kvp_room *room)
{
	return room->state == KVP__ROOM_STATE__ROOM_OFFERING ||
	       room->state == KVP__ROOM_STATE__ROOM_WAITING;
}

void kvp_rooms_drain(struct kvp_rooms *rooms, bool on, const char *reason)
{
	struct kvp_room *room, *tmp;
	char why[KVP_ROOM_ERR];
	Kvp__Status status;

	if (on && !rooms->draining)
		rooms->drain_since_ns = kvp_room_now();
	rooms->draining = on;
	(void)snprintf(rooms->drain_reason, sizeof(rooms->drain_reason), "%s", reason); /* fits */
	if (!on)
		return;
	status = kvp_room_no_legs(rooms, why, sizeof(why));
	kvp_park_refuse_all(rooms, status, why);
	DL_FOREACH_SAFE (rooms->all, room, tmp) {
		if (lacks_legs(room))
			kvp_room_fail(room, status, "%s", why);
	}
}

const char *kvp_rooms_draining(const struct kvp_rooms *rooms, uint64_t *since_ns)
{
	*since_ns = rooms->drain_since_ns;
	return rooms->draining ? rooms->drain_reason : NULL;
}
