/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/room_internal.h"

uint64_t kvp_room_now(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t wall_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_REALTIME, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

Kvp__Status kvp_room_refuse(char *err, Kvp__Status status, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(err, KVP_ROOM_ERR, fmt, args); /* cut texts are fine */
	va_end(args);
	return status;
}

bool kvp_room_status_retry(Kvp__Status status)
{
	switch (status) {
	case KVP__STATUS__STATUS_LIMIT:
	case KVP__STATUS__STATUS_TIMEOUT:
	case KVP__STATUS__STATUS_PEER_LOST:
	case KVP__STATUS__STATUS_CLIENT_LOST:
	case KVP__STATUS__STATUS_DAEMON_LOST:
	case KVP__STATUS__STATUS_LANE_STUCK:
	case KVP__STATUS__STATUS_STOPPING:
	case KVP__STATUS__STATUS_UNREACHABLE:
	case KVP__STATUS__STATUS_POOL_GONE:
	case KVP__STATUS__STATUS_TRANSPORT:
	case KVP__STATUS__STATUS_CORRUPT:
		return true;
	default:
		return false;
	}
}

bool kvp_room_key_fits(const struct kvp_room *room, const ProtobufCBinaryData *key)
{
	uint8_t differ = 0;

	if (key->len != room->secret_bytes)
		return false;
	for (size_t i = 0; i < key->len; i++)
		differ |= (uint8_t)(key->data[i] ^ room->secret[i]);
	return differ == 0;
}

/* Most ends have no label. */
static bool copy_text(struct kvp_room *room, char **to, const char *from)
{
	if (!from || !from[0])
		return true;
	*to = strndup(from, KVP_MAX_LABEL);
	if (!*to)
		return false;
	room->bytes += strlen(*to) + 1;
	return true;
}

/* ---- one end: begin and end --------------------------------------------------------------------
 */

struct kvp_room *kvp_room_new(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			      struct kvp_pool *pool, const struct kvp_room_key *key)
{
	size_t bytes = key->is_dest ? KVP_ROOM_DEST_BYTES : KVP_ROOM_SEND_BYTES;
	struct kvp_room *room = calloc(1, bytes);

	if (!room)
		return NULL;
	room->end_order = calloc(1, sizeof(*room->end_order));
	if (!room->end_order || !copy_text(room, &room->client, owner->name)) {
		free(room->end_order);
		free(room);
		return NULL;
	}
	room->key = *key;
	room->rooms = rooms;
	room->owner = owner;
	room->pool = pool;
	room->lane = pool->lane;
	room->lane_idx = pool->lane_idx;
	room->pool_client_id = pool->client_id;
	room->heap_idx = UINT32_MAX;
	room->deadline_ns = UINT64_MAX;
	room->created_ns = room->state_since_ns = kvp_room_now();
	room->bytes += bytes + sizeof(*room->end_order);
	kvp_pool_get(pool);
	room->uid = owner->uid;
	return room;
}

static void room_give_back_pool(struct kvp_room *room)
{
	struct kvp_pool *pool = KVP_TAKE(room->pool);

	if (pool)
		kvp_pool_put(pool);
}

/* Out of the list of all and the table by room: the id may be used again. */
static void room_unlist(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;

	if (!room->listed)
		return;
	room->listed = false;
	kvp_map_remove(&rooms->by_key, &room->by_key);
	kvp_room_walk_leave(room);
	DL_DELETE(rooms->all, room);
	rooms->stats.by_state[room->state]--;
}

static void room_unqueue(struct kvp_room *room)
{
	if (room->queued)
		DL_DELETE2(room->owner->dirty, room, dprev, dnext);
	room->queued = false;
}

static void room_leave_owner(struct kvp_room *room)
{
	if (!room->owner || !room->id)
		return;
	room_unqueue(room);
	kvp_map_remove(&room->rooms->by_handle, &room->by_handle);
	DL_DELETE2(room->owner->rooms, room, oprev, onext);
	room->owner->n_rooms--;
	room->owner = NULL;
}

void kvp_room_free(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;

	room_leave_owner(room);
	if (room->id) {
		kvp_room_timer_remove(room);
		room_unlist(room);
		rooms->n_rooms--;
		*(room->key.is_dest ? &rooms->n_dests : &rooms->n_sends) -= 1;
		rooms->stats.bytes_rooms -= room->bytes;
	}
	if (!room->key.is_dest && room->send.n_chunks - room->send.chunk_base == rooms->chunks_most)
		rooms->chunks_stale = rooms->chunks_most > 0;
	if (room->key.is_dest)
		kvp_dest_clear(room);
	else
		kvp_send_clear(room);
	room_give_back_pool(room);
	free(room->end_order);
	free(room->reason);
	free(room->label);
	free(room->client);
	free(room);
}

static Kvp__Status admit_limits(struct kvp_rooms *rooms, const struct kvp_room_owner *owner,
				char *err)
{
	if (owner->n_rooms >= owner->max_rooms)
		return kvp_room_refuse(
			err, KVP__STATUS__STATUS_LIMIT,
			"rooms of this client: %u, at most %u beside its user's others: max_rooms "
			"of [uid.N], [gid.N] or [limits]",
			owner->n_rooms, owner->max_rooms);
	if (rooms->n_rooms >= rooms->config->limits.max_rooms)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
				       "rooms of this daemon: %u, limit limits.max_rooms %u",
				       rooms->n_rooms, rooms->config->limits.max_rooms);
	return KVP_ROOM_OK;
}

Kvp__Status kvp_room_admit(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			   const struct kvp_room_key *key, uint64_t handle, char *err)
{
	const struct kvp_room *other = kvp_room_find(rooms, key->room, key->index, key->is_dest);
	Kvp__Status status = kvp_room_no_legs(rooms, err, KVP_ROOM_ERR);

	if (status != KVP_ROOM_OK)
		return status;
	if (kvp_room_by_handle(rooms, owner, handle))
		return kvp_room_refuse(err, KVP__STATUS__STATUS_EXISTS,
				       "handle %llu is in use by this client",
				       (unsigned long long)handle);
	if (other)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_EXISTS,
				       "room 0x%llx has a live %s %u of client \"%s\"%s",
				       (unsigned long long)key->room,
				       key->is_dest ? "destination" : "sender", key->index,
				       other->client,
				       kvp_room_terminal(other) ? ", over but not released" : "");
	status = admit_limits(rooms, owner, err);
	if (status != KVP_ROOM_OK)
		rooms->stats.refused_limit++;
	return status;
}

void kvp_room_enter(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;

	room->id = ++rooms->last_id;
	room->handle.owner = room->owner->id;
	room->by_key.key[0] = room->key.room;
	room->by_key.key[1] = (uint64_t)room->key.index << 1 | room->key.is_dest;
	kvp_map_add(&rooms->by_key, &room->by_key);
	room->by_handle.key[0] = room->handle.owner;
	room->by_handle.key[1] = room->handle.handle;
	kvp_map_add(&rooms->by_handle, &room->by_handle);
	DL_APPEND(rooms->all, room);
	room->listed = true;
	rooms->stats.by_state[room->state]++;
	DL_APPEND2(room->owner->rooms, room, oprev, onext);
	room->owner->n_rooms++;
	rooms->n_rooms++;
	*(room->key.is_dest ? &rooms->n_dests : &rooms->n_sends) += 1;
	*(room->key.is_dest ? &rooms->stats.expected : &rooms->stats.opened) += 1;
	rooms->stats.bytes_rooms += room->bytes;
}

struct kvp_room *kvp_room_find(struct kvp_rooms *rooms, uint64_t room, uint32_t index, bool is_dest)
{
	struct kvp_map_link *link =
		kvp_map_find(&rooms->by_key, room, (uint64_t)index << 1 | is_dest);

	return link ? KVP_CONTAINER_OF(link, struct kvp_room, by_key) : NULL;
}

struct kvp_room *kvp_room_by_handle(struct kvp_rooms *rooms, const struct kvp_room_owner *owner,
				    uint64_t handle)
{
	struct kvp_map_link *link = kvp_map_find(&rooms->by_handle, owner->id, handle);

	return link ? KVP_CONTAINER_OF(link, struct kvp_room, by_handle) : NULL;
}

/* ---- states ------------------------------------------------------------------------------------
 */

void kvp_room_changed(struct kvp_room *room)
{
	struct kvp_room_owner *owner = room->owner;

	if (!owner || !room->id)
		return;
	if (!room->queued) {
		room->queued = true;
		DL_APPEND2(owner->dirty, room, dprev, dnext);
	}
	if (owner != room->rooms->requesting && owner->changed)
		owner->changed(owner);
}

void kvp_room_set_state(struct kvp_room *room, Kvp__RoomState state)
{
	if (room->state == state)
		return;
	if (room->listed) {
		room->rooms->stats.by_state[room->state]--;
		room->rooms->stats.by_state[state]++;
	}
	room->state = state;
	room->state_since_ns = kvp_room_now();
	kvp_room_changed(room);
}

static uint64_t shorter(uint64_t configured_ns, uint32_t asked_ms)
{
	uint64_t asked_ns = asked_ms * UINT64_C(1000000);

	return asked_ms && asked_ns < configured_ns ? asked_ns : configured_ns;
}

static void set_timers(struct kvp_room *room, const Kvp__Timers *msg)
{
	const struct kvp_config *config = room->rooms->config;

	room->timers = (struct kvp_room_timers){
		.offer_ns = shorter(config->timers.offer_ns, msg ? msg->offer_ms : 0),
		.open_ns = shorter(config->timers.open_ns, msg ? msg->open_ms : 0),
		.progress_ns = shorter(config->timers.progress_ns, msg ? msg->progress_ms : 0),
		.fence_ns = shorter(config->timers.fence_ns, msg ? msg->fence_ms : 0),
		.lease_ns = shorter(config->timers.lease_ns, msg ? msg->lease_ms : 0),
	};
}

bool kvp_room_introduce(struct kvp_room *room, uint64_t handle, const char *label,
			const Kvp__Timers *timers, const ProtobufCBinaryData *key)
{
	if (!copy_text(room, &room->label, label))
		return false;
	set_timers(room, timers);
	room->handle.handle = handle;
	room->secret_bytes = (uint32_t)KVP_MIN(key->len, (size_t)KVP_KEY_BYTES);
	if (room->secret_bytes)
		memcpy(room->secret, key->data, room->secret_bytes);
	return true;
}

int kvp_room_order_id(struct kvp_room *room, enum kvp_order_type type, uint32_t value)
{
	struct kvp_order_id *order = calloc(1, sizeof(*order));

	if (!order)
		return -ENOMEM;
	order->order.type = type;
	order->id = room->board.id;
	order->value = value;
	kvp_lane_order(room->lane, &order->order);
	return 0;
}

/* The lane is told; it answers QUIET in its own time. The order was made when the end was: this
 * must not need memory. */
static void room_order_end(struct kvp_room *room)
{
	struct kvp_order_id *order = KVP_TAKE(room->end_order);

	if (!order)
		return;
	if (room->key.is_dest)
		kvp_across_push(room); /* QUIET is a lane's word */
	order->order.type = room->key.is_dest ? KVP_ORDER_RX_END : KVP_ORDER_TX_END;
	order->id = room->board.id;
	kvp_lane_order(room->lane, &order->order);
}

static void room_over(struct kvp_room *room)
{
	room->ended_ns = kvp_room_now();
	room->ended_wall_ms = wall_ms();
	room_order_end(room);
	kvp_room_changed(room);
	kvp_room_timer_update(room);
}

/* What engines do every day is no warning. */
static enum kvp_log_level failure_level(Kvp__Status status)
{
	switch (status) {
	case KVP__STATUS__STATUS_ABORTED:
	case KVP__STATUS__STATUS_DECLINED:
	case KVP__STATUS__STATUS_LEASE:
	case KVP__STATUS__STATUS_CLIENT_LOST:
		return KVP_LOG_INFO;
	default:
		return KVP_LOG_WARNING;
	}
}

static void room_log_failure(const struct kvp_room *room)
{
	kvp_log_limited(&room->rooms->log_limit, failure_level(room->status),
			"room 0x%llx %s %u \"%s\" of \"%s\" failed: %s: %s",
			(unsigned long long)room->key.room, room->key.is_dest ? "dest" : "sender",
			room->key.index, kvp_room_label(room), kvp_room_client(room),
			kvp_status_name((enum kvp_status)room->status), kvp_room_reason(room));
}

static void KVP_PRINTF(4, 0) room_fail_va(struct kvp_room *room, Kvp__Status status, bool retry,
					  const char *fmt, va_list args)
{
	char text[KVP_BOARD_TEXT];
	uint64_t since;

	if (kvp_room_terminal(room))
		return;
	room->failed_waits = kvp_room_waits(room, &since);
	room->failed = true;
	room->status = status;
	room->retry = retry;
	(void)vsnprintf(text, sizeof(text), fmt, args); /* cut texts are fine */
	room->reason = strdup(text);
	room->failed_ns = kvp_room_now();
	room->rooms->stats.failed_by_status[KVP_MIN((unsigned)status, KVP_ROOM_STATUSES - 1)]++;
	kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_FAILED);
	room_log_failure(room);
	if (room->left)
		; /* a peer hears that the session has ended, as after a crash */
	else if (room->key.is_dest)
		kvp_dest_tell(room);
	else
		kvp_send_tell(room);
	room_over(room);
}

void kvp_room_fail(struct kvp_room *room, Kvp__Status status, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	room_fail_va(room, status, kvp_room_status_retry(status), fmt, args);
	va_end(args);
}

void kvp_room_fail_as(struct kvp_room *room, Kvp__Status status, bool retry, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	room_fail_va(room, status, retry, fmt, args);
	va_end(args);
}

void kvp_room_succeed(struct kvp_room *room, Kvp__RoomState state)
{
	if (kvp_room_terminal(room))
		return;
	room->complete = true;
	room->complete_ns = kvp_room_now();
	room->rooms->stats.completed++;
	kvp_room_set_state(room, state);
	if (room->key.is_dest)
		kvp_dest_tell(room);
	room_over(room);
}

/* Nothing of the end is queued or running on the lane: pages and memory are the client's again. */
static void room_quiet(struct kvp_room *room)
{
	room->released = true;
	room->released_ns = kvp_room_now();
	if (room->key.is_dest)
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_RELEASED);
	else if (room->failed)
		kvp_room_set_state(room, KVP__ROOM_STATE__ROOM_GONE);
	kvp_room_timer_remove(room);
	kvp_room_history_add(room);
	if (room->key.is_dest)
		kvp_dest_quiet(room);
	else
		kvp_send_quiet(room);
	room_unlist(room);
	room_give_back_pool(room);
	if (room->owner)
		kvp_room_changed(room);
	else
		kvp_room_free(room);
}

void kvp_rooms_board(struct kvp_rooms *rooms, struct kvp_board *board)
{
	struct kvp_room *room = KVP_CONTAINER_OF(board, struct kvp_room, board);
	uint32_t flags = kvp_board_take(board);

	(void)rooms;
	if (room->released)
		return;
	if (flags & KVP_BOARD_FAILED)
		kvp_room_fail(room, (Kvp__Status)board->status, "%s", board->text);
	if (room->key.is_dest)
		kvp_dest_board(room, flags);
	else
		kvp_send_board(room, flags);
	if (flags & KVP_BOARD_QUIET)
		room_quiet(room);
	else
		kvp_room_timer_update(room);
}

/* ---- events for the owner ----------------------------------------------------------------------
 */

struct kvp_room *kvp_room_owner_next(struct kvp_room_owner *owner)
{
	struct kvp_room *room = owner->dirty;

	if (room)
		room_unqueue(room);
	return room;
}

void kvp_room_event_put_back(struct kvp_room *room)
{
	if (room->queued)
		return;
	room->queued = true;
	DL_PREPEND2(room->owner->dirty, room, dprev, dnext);
}

void kvp_room_event_written(struct kvp_room *room)
{
	if (room->key.is_dest && room->complete)
		room->dest.meta_told = true;
	if (room->released)
		kvp_room_free(room);
}

static void event_fill_send(const struct kvp_room *room, Kvp__RoomEvent *event)
{
	const struct kvp_room_send *send = &room->send;
	const struct kvp_board *board = &room->board;
	bool done = room->complete;

	event->source_free = room->released ? send->n_chunks : atomic_load(&board->source_free);
	event->delivered = done ? send->n_chunks : atomic_load(&board->delivered);
	if (send->ready) {
		event->prefix = room->prefix;
		event->end = room->end;
	}
}

void kvp_room_event(struct kvp_room *room, Kvp__RoomEvent *event)
{
	kvp__room_event__init(event);
	event->handle = room->handle.handle;
	event->state = room->state;
	event->complete = room->complete;
	event->failed = room->failed;
	event->released = room->released;
	event->status = room->status;
	event->reason = (char *)kvp_room_reason(room);
	event->retry = room->retry;
	if (!room->key.is_dest) {
		event_fill_send(room, event);
		return;
	}
	event->arrived = room->complete ? room->end : atomic_load(&room->board.arrived);
	event->arrived = KVP_MAX(event->arrived, room->prefix);
	if (room->complete && !room->dest.meta_told && room->dest.meta_from >= 0) {
		event->meta.data = room->dest.meta;
		event->meta.len = room->dest.meta_bytes;
	}
}

/* ---- requests that concern both kinds ----------------------------------------------------------
 */

Kvp__Status kvp_rooms_abort(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			    const Kvp__Abort *msg, char *err)
{
	struct kvp_room *room = kvp_room_by_handle(rooms, owner, msg->handle);

	if (!room)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NOT_FOUND,
				       "handle %llu is no live room of this client",
				       (unsigned long long)msg->handle);
	if (kvp_room_terminal(room))
		return KVP_ROOM_OK; /* it crossed the end on its way: harmless */
	rooms->requesting = owner;
	rooms->stats.aborts++;
	kvp_room_fail(room, KVP__STATUS__STATUS_ABORTED, "%s %u aborted%s%s",
		      room->key.is_dest ? "destination" : "sender", room->key.index,
		      msg->reason[0] ? ": " : "", msg->reason);
	rooms->requesting = NULL;
	return KVP_ROOM_OK;
}

void kvp_rooms_owner_lost(struct kvp_rooms *rooms, struct kvp_room_owner *owner, const char *why)
{
	struct kvp_room *room, *tmp;

	(void)rooms;
	DL_FOREACH_SAFE2 (owner->rooms, room, tmp, onext) {
		if (!room->key.is_dest)
			room->send.recalled = NULL; /* nobody is there to hear it */
		room_leave_owner(room);
		kvp_room_fail(room, KVP__STATUS__STATUS_CLIENT_LOST, "client \"%s\" of %s %u: %s",
			      kvp_room_client(room), room->key.is_dest ? "destination" : "sender",
			      room->key.index, why);
		if (room->released)
			kvp_room_free(room);
	}
}

void kvp_rooms_pool_ends(struct kvp_rooms *rooms, struct kvp_pool *pool, Kvp__Status status,
			 const char *why)
{
	struct kvp_room *room, *tmp;

	DL_FOREACH_SAFE (rooms->all, room, tmp) {
		if (room->pool == pool)
			kvp_room_fail(room, status, "pool %u of \"%s\": %s", pool->client_id,
				      kvp_room_client(room), why);
	}
}

void kvp_rooms_fail_all(struct kvp_rooms *rooms, uint32_t lane_idx, Kvp__Status status,
			const char *why)
{
	struct kvp_room *room, *tmp;

	DL_FOREACH_SAFE (rooms->all, room, tmp) {
		if (lane_idx == UINT32_MAX || room->lane_idx == lane_idx)
			kvp_room_fail(room, status, "%s", why);
	}
}

void kvp_rooms_close(struct kvp_rooms *rooms)
{
	rooms->closed = true;
	kvp_notes_clear(rooms);
}

/* Data is on its way, or decode's word on it. Parked and idle rooms lose nothing by a stop. */
static bool room_moves(const struct kvp_room *room)
{
	return room->state == KVP__ROOM_STATE__ROOM_SENDING ||
	       room->state == KVP__ROOM_STATE__ROOM_CLOSING ||
	       room->state == KVP__ROOM_STATE__ROOM_LANDING;
}

uint32_t kvp_rooms_moving(const struct kvp_rooms *rooms)
{
	const struct kvp_room *room;
	uint32_t n = 0;

	DL_FOREACH (rooms->all, room)
		n += room_moves(room);
	return n;
}

uint32_t kvp_rooms_count(const struct kvp_rooms *rooms)
{
	return rooms->n_rooms;
}

/* Looks at all ends, which takes milliseconds when there are many: only if the fullest is not
 * known. */
static uint32_t chunks_most(const struct kvp_rooms *rooms)
{
	const struct kvp_room *room;
	uint32_t n = 0;

	DL_FOREACH (rooms->all, room) {
		if (!room->key.is_dest)
			n = KVP_MAX(n, room->send.n_chunks - room->send.chunk_base);
	}
	return n;
}

void kvp_rooms_stats(struct kvp_rooms *rooms, struct kvp_rooms_stats *out)
{
	if (rooms->chunks_stale)
		rooms->chunks_most = chunks_most(rooms);
	rooms->chunks_stale = false;
	*out = rooms->stats;
	out->dests = rooms->n_dests;
	out->sends = rooms->n_sends;
	out->parked_offers = rooms->n_parked;
	out->notes = rooms->n_notes;
	out->chunks_most = rooms->chunks_most;
	out->remembered = rooms->n_history;
}

/* ---- all ---------------------------------------------------------------------------------------
 */

static void rooms_free(struct kvp_rooms *rooms)
{
	kvp_map_fini(&rooms->by_key);
	kvp_map_fini(&rooms->by_handle);
	kvp_map_fini(&rooms->parking);
	free(rooms->heap);
	free(rooms->history);
	free(rooms);
}

static int rooms_maps(struct kvp_rooms *rooms)
{
	uint64_t seed = 0;
	int r = uv_random(NULL, NULL, &seed, sizeof(seed), 0, NULL);

	if (r == 0)
		r = kvp_map_init(&rooms->by_key, seed);
	if (r == 0)
		r = kvp_map_init(&rooms->by_handle, seed);
	return r == 0 ? kvp_map_init(&rooms->parking, seed) : r;
}

int kvp_rooms_create(struct kvp_rooms **out, const struct kvp_rooms_config *config)
{
	struct kvp_rooms *rooms = calloc(1, sizeof(*rooms));
	int r;

	if (!rooms)
		return -ENOMEM;
	rooms->loop = config->loop;
	rooms->config = config->config;
	rooms->lanes = config->lanes;
	rooms->n_lanes = config->n_lanes;
	rooms->peers = config->peers;
	rooms->log_limit = (struct kvp_log_limit)KVP_LOG_LIMIT(20, 10);
	rooms->sums_limit = (struct kvp_log_limit)KVP_LOG_LIMIT(1, 60);
	r = rooms_maps(rooms);
	if (r == 0)
		r = kvp_room_timer_init(rooms);
	if (r < 0) {
		rooms_free(rooms);
		return r;
	}
	kvp_room_peer_events(rooms);
	*out = rooms;
	return 0;
}

static void rooms_closed(uv_handle_t *handle)
{
	struct kvp_rooms *rooms = handle->data;

	rooms_free(rooms);
}

void kvp_rooms_destroy(struct kvp_rooms *rooms)
{
	if (!rooms)
		return;
	kvp_park_clear(rooms);
	kvp_notes_clear(rooms);
	kvp_rooms_drop_kept(rooms, NULL);
	uv_close((uv_handle_t *)&rooms->timer, rooms_closed);
}
