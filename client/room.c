/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/lib.h"

static struct kvpl_room *room_of(struct kvpl_node *node)
{
	return KVP_CONTAINER_OF(node, struct kvpl_room, node);
}

struct kvpl_room *kvpl_room_create(struct kvp_client *client, bool is_dest)
{
	struct kvpl_room *room = calloc(1, sizeof(*room));

	if (!room)
		return NULL;
	room->node.id = client->next_room++;
	room->is_dest = is_dest;
	room->state = (struct kvp_room_state)KVP_ROOM_STATE_INIT;
	room->state.phase = is_dest ? KVP_ROOM_OFFERING : KVP_ROOM_WAITING;
	room->state.reason = "";
	kvpl_packets_init(&room->packets);
	if (kvpl_idmap_add(&client->rooms, &room->node) < 0) {
		free(room);
		return NULL;
	}
	return room;
}

struct kvpl_room *kvpl_room_find(const struct kvp_client *client, uint64_t id)
{
	struct kvpl_node *node = kvpl_idmap_find(&client->rooms, id);

	return node ? KVP_CONTAINER_OF(node, struct kvpl_room, node) : NULL;
}

/* ---- the queue of changed rooms ------------------------------------------------------------ */

static void room_changed(struct kvp_client *client, struct kvpl_room *room)
{
	client->handled++;
	if (room->is_changed)
		return;
	room->is_changed = true;
	room->next_changed = NULL;
	*client->changed_end = room;
	client->changed_end = &room->next_changed;
}

static void room_unchanged(struct kvp_client *client, struct kvpl_room *room)
{
	struct kvpl_room **link = &client->changed;

	if (!room->is_changed)
		return;
	while (*link != room)
		link = &(*link)->next_changed;
	*link = room->next_changed;
	if (!*link)
		client->changed_end = link;
	room->is_changed = false;
}

kvp_room_id kvp_room_next_changed(struct kvp_client *client)
{
	struct kvpl_room *room = client->changed;

	if (!room)
		return 0;
	room_unchanged(client, room);
	return room->node.id;
}

void kvpl_room_destroy(struct kvp_client *client, struct kvpl_room *room)
{
	room_unchanged(client, room);
	kvpl_idmap_remove(&client->rooms, &room->node);
	kvpl_packets_fini(&room->packets);
	free(room->meta);
	free(room);
}

void kvpl_rooms_fini(struct kvp_client *client)
{
	while (client->rooms.first)
		kvpl_room_destroy(client, room_of(client->rooms.first));
	kvpl_idmap_fini(&client->rooms);
}

/* ---- state: moves forward only ------------------------------------------------------------- */

static bool is_terminal(const struct kvpl_room *room)
{
	return room->state.failed || room->state.complete;
}

/* Nothing of it is sent again from here on. */
static void room_settle(struct kvpl_room *room)
{
	room->to_repeat = false;
	kvpl_packets_fini(&room->packets);
}

void kvpl_room_fail(struct kvp_client *client, struct kvpl_room *room, enum kvp_status status,
		    const char *text, bool retry)
{
	if (is_terminal(room))
		return;
	room->state.failed = 1;
	room->state.phase = KVP_ROOM_FAILED;
	room->state.status = status;
	room->state.retry = retry;
	(void)snprintf(room->reason, sizeof(room->reason), "%s", text);
	room->state.reason = room->reason;
	room_settle(room);
	room_changed(client, room);
}

void kvpl_room_release(struct kvp_client *client, struct kvpl_room *room)
{
	if (room->state.released)
		return;
	room->state.released = 1;
	room->grave = 0;
	if (room->is_dest)
		room->state.phase = KVP_ROOM_RELEASED;
	else if (room->state.failed)
		room->state.phase = KVP_ROOM_GONE;
	if (!room->is_dest)
		room->state.source_free = KVP_MAX(room->state.source_free, room->next_seq);
	room_settle(room);
	room_changed(client, room);
}

/* False: no memory, and it comes once only. */
static bool take_meta(struct kvpl_room *room, const ProtobufCBinaryData *meta)
{
	if (!room->is_dest || meta->len == 0 || room->meta)
		return true;
	room->meta = malloc(meta->len);
	if (!room->meta)
		return false;
	memcpy(room->meta, meta->data, meta->len);
	room->state.meta = room->meta;
	room->state.meta_bytes = (uint32_t)meta->len;
	return true;
}

static void room_complete(struct kvp_client *client, struct kvpl_room *room,
			  const Kvp__RoomEvent *event)
{
	if (!take_meta(room, &event->meta)) {
		kvpl_room_fail(client, room, KVP_STATUS_NO_MEMORY,
			       "all has come, but there is no memory for the meta", true);
		return;
	}
	room->state.complete = 1;
	room->state.phase = room->is_dest ? KVP_ROOM_COMPLETE : KVP_ROOM_DONE;
	if (!room->is_dest) { /* it may never have been seen ready */
		room->state.prefix = event->prefix;
		room->state.end = event->end;
	}
	room_settle(room);
	room_changed(client, room);
}

#define RAISE(field, value)                               \
	({                                                \
		bool is_higher_ = (value) > (field);      \
		(field) = is_higher_ ? (value) : (field); \
		is_higher_;                               \
	})

static bool is_phase_of(const struct kvpl_room *room, uint32_t phase)
{
	if (room->is_dest)
		return phase >= KVP_ROOM_OFFERING && phase <= KVP_ROOM_LANDING;
	return phase >= KVP_ROOM_WAITING && phase <= KVP_ROOM_CLOSING;
}

static void send_abort(struct kvp_client *client, const struct kvpl_room *room, const char *reason)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Abort body = KVP__ABORT__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_packets packets;

	body.handle = room->node.id;
	body.reason = (char *)reason;
	msg.body_case = KVP__CLIENT_MSG__BODY_ABORT;
	msg.abort = &body;
	kvpl_packets_init(&packets);
	if (kvpl_packet_make(client, &msg, NULL, 0, &packets) == 0)
		(void)kvpl_request_send(client, &packets, &to, NULL); /* its end is an end too */
}

/* The engine may have read the prefix already; offers after a restart of the daemon can differ. */
static bool has_new_prefix(const struct kvpl_room *room, const Kvp__RoomEvent *event)
{
	return !room->is_dest && room->state.phase >= KVP_ROOM_READY &&
	       event->state >= KVP__ROOM_STATE__ROOM_READY &&
	       (event->prefix != room->state.prefix || event->end != room->state.end);
}

static void room_advance(struct kvp_client *client, struct kvpl_room *room,
			 const Kvp__RoomEvent *event)
{
	bool is_moved = RAISE(room->state.source_free, event->source_free);

	is_moved |= RAISE(room->state.delivered, event->delivered);
	is_moved |= RAISE(room->state.arrived, event->arrived);
	if (!is_terminal(room) && is_phase_of(room, (uint32_t)event->state)) {
		if (has_new_prefix(room, event)) {
			kvpl_room_fail(client, room, KVP_STATUS_DAEMON_LOST,
				       "the daemon was lost, and decode now wants another range",
				       true);
			send_abort(client, room, "range changed");
			return;
		}
		if (!room->is_dest && event->state >= KVP__ROOM_STATE__ROOM_READY) {
			room->state.prefix = event->prefix;
			room->state.end = event->end;
		}
		is_moved |= RAISE(room->state.phase, (uint32_t)event->state);
	}
	if (room->is_dest &&
	    (room->state.phase == KVP_ROOM_LANDING || room->state.arrived > room->start))
		kvpl_packets_fini(&room->packets); /* in motion: will not be repeated */
	if (is_moved)
		room_changed(client, room);
}

void kvpl_room_event(struct kvp_client *client, const Kvp__RoomEvent *event)
{
	struct kvpl_room *room = kvpl_room_find(client, event->handle);

	if (!room || room->state.released)
		return; /* forgotten here, or crossed with our abort */
	room_advance(client, room, event);
	if (event->failed)
		kvpl_room_fail(client, room, (enum kvp_status)event->status, event->reason,
			       event->retry);
	else if (event->complete && !is_terminal(room))
		room_complete(client, room, event);
	if (event->released && is_terminal(room))
		kvpl_room_release(client, room);
}

static bool is_worth_a_retry(enum kvp_status status)
{
	return status == KVP_STATUS_LIMIT || status == KVP_STATUS_NO_MEMORY ||
	       status == KVP_STATUS_STOPPING || status == KVP_STATUS_PAGE_HELD;
}

void kvpl_room_answered(struct kvp_client *client, const struct kvpl_request *req,
			enum kvp_status status, const char *text)
{
	struct kvpl_room *room = kvpl_room_find(client, req->object);

	if (!room || status == KVP_STATUS_DAEMON_LOST)
		return; /* kvpl_rooms_lose() has decided */
	if (req->kind == KVPL_SUBMIT) {
		/* What was sent behind a refused chunk is refused too: the numbers start again
		 * there. */
		if (status != KVP_OK && req->epoch == room->epoch) {
			room->next_seq = req->seq;
			room->epoch++;
		}
		return;
	}
	room->is_answered = true;
	if (status != KVP_OK) {
		kvpl_room_fail(client, room, status, text, is_worth_a_retry(status));
		kvpl_room_release(client, room); /* the daemon never had it */
	}
}

/* ---- losing the daemon --------------------------------------------------------------------- */

static bool is_in_motion(const struct kvpl_room *room)
{
	if (!room->is_answered)
		return true; /* its own request ends as lost, so the room does */
	if (!room->is_dest)
		return room->next_seq > 0;
	return room->state.phase == KVP_ROOM_LANDING || room->state.arrived > room->start;
}

void kvpl_rooms_lose(struct kvp_client *client, uint64_t grave)
{
	for (struct kvpl_node *node = client->rooms.first; node; node = node->next) {
		struct kvpl_room *room = room_of(node);

		if (room->state.released || room->to_repeat || room->grave)
			continue;
		room->grave = grave;
		if (is_terminal(room))
			continue;
		room->to_repeat = !is_in_motion(room) && !client->no_reconnect;
		if (!room->to_repeat)
			kvpl_room_fail(client, room, KVP_STATUS_DAEMON_LOST,
				       "the connection to the daemon was lost", true);
	}
}

void kvpl_rooms_buried(struct kvp_client *client, uint64_t grave)
{
	for (struct kvpl_node *node = client->rooms.first; node; node = node->next) {
		struct kvpl_room *room = room_of(node);

		if (room->grave != grave)
			continue;
		room->grave = 0;
		if (!room->to_repeat)
			kvpl_room_release(client, room);
	}
}

void kvpl_rooms_same_daemon(struct kvp_client *client, uint64_t grave)
{
	for (struct kvpl_node *node = client->rooms.first; node; node = node->next) {
		struct kvpl_room *room = room_of(node);

		if (room->grave == grave && room->to_repeat)
			kvpl_room_fail(client, room, KVP_STATUS_DAEMON_LOST,
				       "the daemon ended the connection", true);
	}
}

void kvpl_rooms_repeat(struct kvp_client *client)
{
	client->has_repeats = false;
	for (struct kvpl_node *node = client->rooms.first; node; node = node->next) {
		struct kvpl_room *room = room_of(node);
		struct kvpl_reply_to to = { .kind = KVPL_ROOM, .object = node->id };
		struct kvpl_packets packets;
		int r;

		if (!room->to_repeat || room->grave)
			continue;
		kvpl_packets_init(&packets);
		r = kvpl_packets_copy(&packets, &room->packets);
		if (r == 0)
			r = kvpl_request_send(client, &packets, &to, NULL);
		else
			kvpl_packets_fini(&packets);
		if (r == -EAGAIN) {
			client->has_repeats = true; /* the rest when the queue is shorter */
			return;
		}
		room->to_repeat = false;
		if (r < 0) {
			kvpl_room_fail(client, room, KVP_STATUS_DAEMON_LOST,
				       "the daemon was lost, and the request could not be repeated",
				       true);
			kvpl_room_release(client, room);
		}
	}
}

/* ---- calls --------------------------------------------------------------------------------- */

int kvp_room_state(const struct kvp_client *client, kvp_room_id id, struct kvp_room_state *state)
{
	const struct kvpl_room *room = kvpl_room_find(client, id);
	size_t size = state->size;

	if (!room)
		return -ENOENT;
	if (size < sizeof(size_t))
		return -EINVAL;
	memcpy(state, &room->state, KVP_MIN(size, sizeof(*state)));
	state->size = size;
	return 0;
}

static struct kvpl_room *find_or_fail(struct kvp_client *client, uint64_t id)
{
	struct kvpl_room *room = kvpl_room_find(client, id);

	if (!room)
		(void)kvpl_fail(client, -ENOENT, KVP_STATUS_NOT_FOUND, "room %llu is unknown",
				(unsigned long long)id);
	return room;
}

int kvp_abort(struct kvp_client *client, kvp_room_id id, const char *reason)
{
	char text[KVP_LIMIT_REASON + 1];
	struct kvpl_room *room;
	int r = kvpl_check_process(client);

	if (r < 0)
		return r;
	room = find_or_fail(client, id);
	if (!room)
		return -ENOENT;
	if (room->state.released)
		return 0;
	(void)snprintf(text, sizeof(text), "%s", reason ?: "");
	kvp_text_clean(text);
	if (room->to_repeat) {
		kvpl_room_fail(client, room, KVP_STATUS_ABORTED, text, false);
		if (!room->grave)
			kvpl_room_release(client, room);
	} else if (client->conn == KVPL_UP && !is_terminal(room)) {
		send_abort(client, room, text);
	}
	return 0;
}

void kvp_room_forget(struct kvp_client *client, kvp_room_id id)
{
	struct kvpl_room *room = kvpl_room_find(client, id);

	if (!room || client->pid != getpid())
		return;
	(void)kvp_abort(client, id, "forgotten"); /* it is found, and the process is right */
	kvpl_room_destroy(client, room);
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* 1: it is as awaited, 0: not yet, negative errno: it never will be. */
typedef int await_fn(const struct kvpl_room *room, uint32_t arg);

static int await_phase(const struct kvpl_room *room, uint32_t arg)
{
	switch ((enum kvp_wait_for)arg) {
	case KVP_WAIT_READY:
		return is_terminal(room) ||
		       room->state.phase >= (room->is_dest ? KVP_ROOM_ACCEPTED : KVP_ROOM_READY);
	case KVP_WAIT_TERMINAL:
		return is_terminal(room);
	case KVP_WAIT_RELEASED:
		return room->state.released != 0;
	}
	return 1;
}

static int await_source_free(const struct kvpl_room *room, uint32_t n)
{
	if (room->state.source_free >= n)
		return 1;
	return room->state.released ? -ECANCELED : 0;
}

static int await_delivered(const struct kvpl_room *room, uint32_t n)
{
	if (room->state.delivered >= n)
		return 1;
	return is_terminal(room) ? -ECANCELED : 0;
}

static int await_room(struct kvp_client *client, kvp_room_id id, await_fn *await, uint32_t arg,
		      int timeout_ms)
{
	int64_t deadline = kvpl_deadline(timeout_ms);
	int r = kvpl_check_process(client);

	while (r == 0) {
		const struct kvpl_room *room = find_or_fail(client, id);

		if (!room)
			return -ENOENT;
		r = await(room, arg);
		if (r != 0)
			return r < 0 ? r : 0;
		r = kvpl_conn_turn(client, deadline);
	}
	return r;
}

int kvp_room_wait(struct kvp_client *client, kvp_room_id id, enum kvp_wait_for what, int timeout_ms)
{
	return await_room(client, id, await_phase, what, timeout_ms);
}

int kvp_room_wait_source_free(struct kvp_client *client, kvp_room_id id, uint32_t n, int timeout_ms)
{
	return await_room(client, id, await_source_free, n, timeout_ms);
}

int kvp_room_wait_delivered(struct kvp_client *client, kvp_room_id id, uint32_t n, int timeout_ms)
{
	return await_room(client, id, await_delivered, n, timeout_ms);
}
