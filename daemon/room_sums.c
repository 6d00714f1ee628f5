/* SPDX-License-Identifier: Apache-2.0 */

/* Whether the pieces of a leg carry sums: what this end says of itself, and what comes of it. */

#include "daemon/room_internal.h"

uint32_t kvp_room_sums_word(const struct kvp_room *room)
{
	static const uint32_t wants[] = {
		[KVP_CHECKSUM_OFF] = 0,
		[KVP_CHECKSUM_ON] = KVP_SUMS_ASK,
		[KVP_CHECKSUM_REQUIRED] = KVP_SUMS_ASK | KVP_SUMS_MUST,
	};

	return wants[room->rooms->config->data.checksum] |
	       (kvp_lane_gpu(room->lane)[0] ? KVP_SUMS_GPU : KVP_SUMS_CAN);
}

enum kvp_sums kvp_room_sums_agree(const struct kvp_room *room, uint32_t other)
{
	return kvp_sums_agree(kvp_room_sums_word(room), other);
}

Kvp__Status kvp_room_sums_settle(struct kvp_room *room, uint32_t other,
				 const struct kvp_lane_geom *geom, enum kvp_sums *sums, char *err)
{
	uint32_t word = kvp_room_sums_word(room);

	if (*sums == KVP_SUMS_ON && !geom->sums)
		*sums = KVP_SUMS_NO_SLOT;
	if (*sums == KVP_SUMS_OFF || *sums == KVP_SUMS_ON)
		return KVP_ROOM_OK;
	if ((word | other) & KVP_SUMS_MUST)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_UNSUPPORTED,
				       "data.checksum is required %s, but %s",
				       word & KVP_SUMS_MUST ? "here" : "at the other end",
				       kvp_sums_text(*sums));
	room->rooms->stats.unchecked[*sums]++;
	kvp_log_limited(&room->rooms->sums_limit, KVP_LOG_NOTICE,
			"room 0x%llx %s %u moves without sums: %s",
			(unsigned long long)room->key.room, room->key.is_dest ? "dest" : "sender",
			room->key.index, kvp_sums_text(*sums));
	return KVP_ROOM_OK;
}
