/* SPDX-License-Identifier: Apache-2.0 */

/* What displays see: live ends, and copies of those that are over. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

/* ---- waits and verdicts ------------------------------------------------------------------------
 */

struct wait_info {
	const char *name, *text, *verdict;
};

static const struct wait_info lane_waits[KVP_WAITS_N] = {
	[KVP_WAITS_NOTHING] = { "nothing", "it moves", "ok" },
	[KVP_WAITS_ENGINE] = { "engine", "the engine has submitted nothing more", "engine" },
	[KVP_WAITS_START] = { "start", "the destinations have not all come", "engine" },
	[KVP_WAITS_FENCE] = { "fence", "the engine's stream has not reached the fence", "engine" },
	[KVP_WAITS_WINDOW] = { "window", "as many pieces under way as allowed", "us" },
	[KVP_WAITS_GRANT] = { "grant", "the receiver has granted no slot", "peer" },
	[KVP_WAITS_PACK_SLOT] = { "pack slot", "no free slot in the pack ring", "us" },
	[KVP_WAITS_LANDED] = { "landed", "the receiver has not confirmed", "network" },
	[KVP_WAITS_SENDER] = { "sender",
			       "the senders have nothing to send yet; their nodes know why",
			       "engine" },
	[KVP_WAITS_LAND_SLOT] = { "landing slot", "no free slot in the landing ring", "us" },
	[KVP_WAITS_DATA] = { "data", "granted, the data has not come", "network" },
	[KVP_WAITS_HELD] = { "test point", "kept at a test point", "us" },
	[KVP_WAITS_GPU] = { "gpu", "the GPU has not finished a move", "us" },
	[KVP_WAITS_MEMORY] = { "memory", "the pool is being made known to the RDMA device", "us" },
};

static const struct wait_info room_waits[KVP_ROOM_WAITS_N - KVP_ROOM_WAITS_PEER] = {
	{ "peer", "the session to a listed peer is not up", "network" },
	{ "open", "a sender's engine has not opened the room", "engine" },
	{ "offers", "decode's engines have not all expected the room", "engine" },
	{ "end", "all is delivered, decode has not said complete", "peer" },
	{ "quiet", "over; the lane still has work of it", "us" },
};

static const struct wait_info *wait_info(uint32_t waits)
{
	if (waits < KVP_WAITS_N)
		return &lane_waits[waits];
	if (waits >= KVP_ROOM_WAITS_PEER && waits < KVP_ROOM_WAITS_N)
		return &room_waits[waits - KVP_ROOM_WAITS_PEER];
	return &lane_waits[KVP_WAITS_NOTHING];
}

static uint32_t dest_offering_waits(const struct kvp_room *room, uint64_t *since_ns)
{
	uint32_t waits = KVP_ROOM_WAITS_OPEN;
	uint64_t oldest = UINT64_MAX;

	for (uint32_t i = 0; i < room->dest.n_legs; i++) {
		const struct kvp_dleg *leg = &room->dest.legs[i];

		if (kvp_dleg_met(leg))
			continue;
		if (leg->state == KVP_DLEG_UNSENT)
			waits = KVP_ROOM_WAITS_PEER;
		oldest = KVP_MIN(oldest, leg->since_ns);
	}
	*since_ns = oldest == UINT64_MAX ? room->state_since_ns : oldest;
	return waits;
}

uint32_t kvp_room_waits(const struct kvp_room *room, uint64_t *since_ns)
{
	*since_ns = room->state_since_ns;
	if (room->released)
		return KVP_WAITS_NOTHING;
	if (kvp_room_terminal(room))
		return KVP_ROOM_WAITS_QUIET;
	switch (room->state) {
	case KVP__ROOM_STATE__ROOM_OFFERING:
		return dest_offering_waits(room, since_ns);
	case KVP__ROOM_STATE__ROOM_WAITING:
		return KVP_ROOM_WAITS_OFFERS;
	case KVP__ROOM_STATE__ROOM_CLOSING:
		return KVP_ROOM_WAITS_END;
	default:
		/* The lane may have nothing to do since before the room came so far. */
		*since_ns = KVP_MAX(*since_ns, atomic_load(&room->board.waits_since_ns));
		return atomic_load(&room->board.waits);
	}
}

/* Whose affair the failure is. */
static const char *status_verdict(const struct kvp_room *room)
{
	switch (room->status) {
	case KVP__STATUS__STATUS_OK:
		return "ok";
	case KVP__STATUS__STATUS_TIMEOUT:
		return wait_info(room->failed_waits)->verdict;
	case KVP__STATUS__STATUS_PEER_LOST:
	case KVP__STATUS__STATUS_PROTOCOL:
		return "peer";
	case KVP__STATUS__STATUS_UNREACHABLE:
	case KVP__STATUS__STATUS_TRANSPORT:
		return "network";
	case KVP__STATUS__STATUS_LIMIT:
	case KVP__STATUS__STATUS_LANE_STUCK:
	case KVP__STATUS__STATUS_STOPPING:
	case KVP__STATUS__STATUS_NO_MEMORY:
	case KVP__STATUS__STATUS_SYSTEM:
	case KVP__STATUS__STATUS_UNSUPPORTED:
	case KVP__STATUS__STATUS_CORRUPT:
		return "us";
	default:
		return "engine";
	}
}

/* ---- copies ------------------------------------------------------------------------------------
 */

/* How bytes get from or to another daemon; the lane counts by room. */
static const char *moved_mode(const struct kvp_room *room)
{
	uint32_t moved = atomic_load(&room->board.moved);

	if (!(moved & KVP_MOVED_DIRECT))
		return "landing";
	return moved & KVP_MOVED_LANDING ? "direct+landing" : "direct";
}

static const char *leg_mode(const struct kvp_room *room, bool data, bool local, bool across)
{
	if (!data)
		return "none";
	if (local)
		return across ? "peer" : "local";
	return moved_mode(room);
}

static bool dleg_across(const struct kvp_dleg *leg)
{
	return leg->room->dest.across == KVP_ACROSS_PEER;
}

/* Before the sender has accepted it may be on another lane of this daemon. */
static bool dleg_local(const struct kvp_dleg *leg)
{
	return leg->local ||
	       (leg->state != KVP_DLEG_ACCEPTED && leg->peer && kvp_peer_is_self(leg->peer));
}

/* "local" if all of it is. */
static const char *room_mode(const struct kvp_room *room)
{
	const struct kvp_sleg *sleg;
	const char *mode = "";

	if (room->key.is_dest) {
		for (uint32_t i = 0; i < room->dest.n_legs; i++)
			if (room->dest.legs[i].data && room->dest.legs[i].peer &&
			    (!mode[0] || strcmp(mode, "local") == 0))
				mode = leg_mode(room, true, dleg_local(&room->dest.legs[i]),
						dleg_across(&room->dest.legs[i]));
		return mode;
	}
	DL_FOREACH2 (room->send.legs, sleg, rnext) {
		if (sleg->data && (!mode[0] || strcmp(mode, "local") == 0))
			mode = leg_mode(room, true, sleg->local, sleg->across);
	}
	return mode;
}

static void view_board(const struct kvp_board *board, struct kvp_room_view *view)
{
	view->first_want_ns = atomic_load(&board->first_want_ns);
	view->first_grant_ns = atomic_load(&board->first_grant_ns);
	view->first_data_ns = atomic_load(&board->first_data_ns);
	view->last_landed_ns = atomic_load(&board->last_landed_ns);
	view->first_chunk_ns = atomic_load(&board->first_chunk_ns);
	view->first_fence_ns = atomic_load(&board->first_fence_ns);
	view->first_packed_ns = atomic_load(&board->first_packed_ns);
	view->first_unpack_ns = atomic_load(&board->first_unpack_ns);
	view->pieces = atomic_load(&board->pieces);
	view->bytes = atomic_load(&board->bytes);
	view->raw_rows = atomic_load(&board->raw_rows);
	view->gather_ns = atomic_load(&board->gather_ns);
	view->direct_pieces = atomic_load(&board->direct_pieces);
	view->direct_bytes = atomic_load(&board->direct_bytes);
	view->fell_back = kvp_why_text((enum kvp_why)atomic_load(&board->fell_back));
}

static void view_names(const struct kvp_room *room, struct kvp_room_view *view)
{
	(void)snprintf(view->label, sizeof(view->label), "%s", kvp_room_label(room)); /* fits */
	(void)snprintf(view->client, sizeof(view->client), "%s", kvp_room_client(room));
	(void)snprintf(view->reason, sizeof(view->reason), "%s", kvp_room_reason(room));
	view->room = room->key.room;
	view->session = room->handle.owner;
	view->uid = room->uid;
	view->is_dest = room->key.is_dest;
	view->index = room->key.index;
	view->pool_client_id = room->pool_client_id;
	view->id = room->id;
	view->seen_by = room->seen_by;
}

static void view_times(const struct kvp_room *room, struct kvp_room_view *view)
{
	view->created_ns = room->created_ns;
	view->state_since_ns = room->state_since_ns;
	view->ended_ns = room->ended_ns;
	view->ended_wall_ms = room->ended_wall_ms;
	view->offered_ns = room->offered_ns;
	view->accepted_ns = room->accepted_ns;
	view->complete_ns = room->complete_ns;
	view->failed_ns = room->failed_ns;
	view->released_ns = room->released_ns;
}

void kvp_room_view_fill(const struct kvp_room *room, struct kvp_room_view *view)
{
	memset(view, 0, sizeof(*view));
	view_names(room, view);
	view_times(room, view);
	view_board(&room->board, view);
	view->state = room->state;
	view->status = room->status;
	view->retry = room->retry;
	view->complete = room->complete;
	view->failed = room->failed;
	view->released = room->released;
	view->prefix = room->prefix;
	view->end = room->end;
	view->waits = kvp_room_waits(room, &view->waits_since_ns);
	view->waits_text = room->released ? "" : wait_info(view->waits)->text;
	view->verdict =
		kvp_room_terminal(room) ? status_verdict(room) : wait_info(view->waits)->verdict;
	view->mode = room_mode(room);
	if (room->key.is_dest) {
		if (room->dest.across > KVP_ACROSS_PEER)
			view->fell_back = kvp_across_text((enum kvp_across)room->dest.across);
		view->arrived = room->complete ? room->end : atomic_load(&room->board.arrived);
		view->n_legs = room->dest.n_legs;
		view->pages_held = room->released ? 0 : room->dest.n_held;
		return;
	}
	view->chunks = room->send.n_chunks;
	view->source_free =
		room->released ? room->send.n_chunks : atomic_load(&room->board.source_free);
	view->delivered =
		room->complete ? room->send.n_chunks : atomic_load(&room->board.delivered);
	view->n_legs = room->send.n_legs;
}

/* ---- history -----------------------------------------------------------------------------------
 */

/* The ring's pages are touched as it fills: a long history costs nothing before there is one. */
static bool history_have(struct kvp_rooms *rooms)
{
	if (rooms->history)
		return true;
	rooms->cap_history = rooms->config->limits.history;
	if (rooms->cap_history)
		rooms->history = calloc(rooms->cap_history, sizeof(*rooms->history));
	return rooms->history != NULL;
}

void kvp_room_history_add(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;

	if (!history_have(rooms))
		return;
	kvp_room_view_fill(room, &rooms->history[rooms->n_ended++ % rooms->cap_history]);
	rooms->n_history = KVP_MIN(rooms->n_history + 1, rooms->cap_history);
}

/* ---- legs --------------------------------------------------------------------------------------
 */

static void dleg_view(const struct kvp_dleg *leg, struct kvp_room_leg_view *out)
{
	static const char *const states[] = {
		[KVP_DLEG_UNSENT] = "waiting for the peer",
		[KVP_DLEG_OFFERED] = "offered",
		[KVP_DLEG_ACCEPTED] = "accepted",
	};
	static const char *const waits[] = {
		[KVP_DLEG_UNSENT] = "a session with the peer",
		[KVP_DLEG_OFFERED] = "prefill to open the room",
		[KVP_DLEG_ACCEPTED] = "",
	};
	bool over = leg->over || leg->drained;

	*out = (struct kvp_room_leg_view){
		.sender = leg->sender,
		.dest = leg->room->key.index,
		.generation = leg->room->board.id,
		.state = leg->over      ? "aborted by the sender"
			 : leg->drained ? "drained"
					: states[leg->state],
		.mode = leg_mode(leg->room, leg->data, dleg_local(leg), dleg_across(leg)),
		.checksum = kvp_sums_name(leg->sums),
		.waits_text = over ? "" : waits[leg->state],
		.waits_since_ns = leg->since_ns,
	};
	(void)snprintf(out->peer, sizeof(out->peer), "%.63s",
		       leg->peer ? kvp_peer_name(leg->peer) : "");
}

static void sleg_view(const struct kvp_sleg *leg, struct kvp_room_leg_view *out)
{
	static const char *const states[] = {
		[KVP_SLEG_ACCEPTED] = "accepted",
		[KVP_SLEG_GO] = "moving",
		[KVP_SLEG_ENDED] = "ended",
	};
	static const char *const waits[] = {
		[KVP_SLEG_ACCEPTED] = "the destination's word to go",
		[KVP_SLEG_GO] = "",
		[KVP_SLEG_ENDED] = "",
	};

	*out = (struct kvp_room_leg_view){
		.sender = leg->room->key.index,
		.dest = leg->dest,
		.generation = leg->generation,
		.state = leg->over ? "aborted by the destination" : states[leg->state],
		.mode = leg_mode(leg->room, leg->data, leg->local, leg->across),
		.checksum = kvp_sums_name(leg->sums),
		.waits_text = leg->over ? "" : waits[leg->state],
		.waits_since_ns = leg->since_ns,
	};
	(void)snprintf(out->peer, sizeof(out->peer), "%.63s",
		       leg->peer ? kvp_peer_name(leg->peer) : "");
}

/* A long list of rooms must not be searched for each of them. */
static const struct kvp_room *room_of(struct kvp_rooms *rooms, const struct kvp_room_view *view)
{
	const struct kvp_room *room = kvp_room_find(rooms, view->room, view->index, view->is_dest);

	return room && room->id == view->id ? room : NULL;
}

uint32_t kvp_room_legs(struct kvp_rooms *rooms, const struct kvp_room_view *view,
		       struct kvp_room_leg_view *out, uint32_t max)
{
	const struct kvp_room *room = room_of(rooms, view);
	const struct kvp_sleg *sleg;
	uint32_t n = 0;

	if (!room)
		return 0;
	if (room->key.is_dest) {
		for (; n < room->dest.n_legs && n < max; n++)
			dleg_view(&room->dest.legs[n], &out[n]);
		return n;
	}
	DL_FOREACH2 (room->send.legs, sleg, rnext) {
		if (n == max)
			break;
		sleg_view(sleg, &out[n++]);
	}
	return n;
}
