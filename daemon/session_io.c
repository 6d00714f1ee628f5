/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session_io.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <utlist.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/limits.h"
#include "proto/msg.h"
#include "proto/packet.h"
#include "proto/util.h"

/* The longest reply: a hello, or a text. */
#define REPLY_MAX 2048u
/* An event carries up to KVP_MAX_META bytes and a reason. */
#define EVENT_MAX (KVP_MAX_META + 1024u)

struct kvp_session_reply {
	struct kvp_session_reply *prev, *next;
	int fd; /* owned; -1: none */
	size_t n;
	uint8_t bytes[];
};

static void free_reply(struct kvp_session *session, struct kvp_session_reply *reply)
{
	DL_DELETE(session->replies, reply);
	session->n_replies--;
	session->reply_bytes -= reply->n;
	if (reply->fd >= 0)
		(void)close(reply->fd);
	free(reply);
}

static int enqueue(struct kvp_session *session, const uint8_t *bytes, size_t n, int fd)
{
	struct kvp_session_reply *reply = malloc(sizeof(*reply) + n);

	if (!reply)
		return -ENOMEM;
	reply->fd = fd;
	reply->n = n;
	memcpy(reply->bytes, bytes, n);
	DL_APPEND(session->replies, reply);
	session->n_replies++;
	session->reply_bytes += n;
	return 0;
}

/* What the socket does not take at once waits. On success the fd is taken care of. */
static int send_or_queue(struct kvp_session *session, const uint8_t *bytes, size_t n, int fd)
{
	int r = -EAGAIN;

	if (!session->full && session->n_replies == 0)
		r = kvp_packet_send(session->fd, bytes, n, &fd, fd >= 0);
	if (r == -EAGAIN) {
		kvp_server_touch(session->core->server, session);
		return enqueue(session, bytes, n, fd);
	}
	if (r == 0 && fd >= 0)
		(void)close(fd); /* the client has its own now */
	return r;
}

const char *kvp_session_end_text(int error)
{
	switch (error) {
	case ECONNRESET:
		return "it closed the connection, and left something unread";
	case EPIPE:
		return "it has closed the connection, or its reading half";
	default:
		return strerror(error);
	}
}

void kvp_session_reply(struct kvp_session *session, const Kvp__Reply *reply, int fd)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	uint8_t bytes[REPLY_MAX];
	long n;
	int r = -ENOTCONN;

	msg.body_case = KVP__DAEMON_MSG__BODY_REPLY;
	msg.reply = (Kvp__Reply *)reply;
	n = kvp_msg_encode_daemon(&msg, bytes, sizeof(bytes));
	assert(n > 0); /* texts and names are bounded */
	if (session->state != KVP_SESSION_ENDING)
		r = send_or_queue(session, bytes, (size_t)n, fd);
	if (r == 0)
		return;
	if (fd >= 0)
		(void)close(fd);
	kvp_session_end(session, kvp_session_end_text(-r));
}

static int write_replies(struct kvp_session *session, bool *moved)
{
	while (session->replies) {
		struct kvp_session_reply *reply = session->replies;
		int r = kvp_packet_send(session->fd, reply->bytes, reply->n, &reply->fd,
					reply->fd >= 0);

		if (r < 0)
			return r;
		*moved = true;
		free_reply(session, reply);
	}
	return 0;
}

static int write_event(struct kvp_session *session, struct kvp_room *room)
{
	/* One thread writes all events; on the stack it would be large for the deepest path. */
	static uint8_t bytes[EVENT_MAX];
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	Kvp__RoomEvent event = KVP__ROOM_EVENT__INIT;
	long n;

	kvp_room_event(room, &event);
	msg.body_case = KVP__DAEMON_MSG__BODY_ROOM;
	msg.room = &event;
	n = kvp_msg_encode_daemon(&msg, bytes, sizeof(bytes));
	assert(n > 0);
	return kvp_packet_send(session->fd, bytes, (size_t)n, NULL, 0);
}

/* As kvp_session_write(), of events; *n counts them. */
static int write_events(struct kvp_session *session, uint32_t *n)
{
	for (*n = 0; *n < KVP_SESSION_TURN_EVENTS; ++*n) {
		struct kvp_room *room = kvp_room_owner_next(&session->owner);
		int r = room ? write_event(session, room) : 0;

		if (!room)
			return 0;
		if (r < 0) {
			kvp_room_event_put_back(room);
			return r;
		}
		kvp_room_event_written(room);
	}
	return session->owner.dirty != NULL;
}

int kvp_session_write(struct kvp_session *session, bool *moved)
{
	struct kvp_server *server = session->core->server;
	uint32_t n;
	int r = write_replies(session, moved);

	if (r < 0)
		return r;
	r = write_events(session, &n);
	*moved |= n > 0;
	session->n_events += n;
	server->events += n;
	server->turn_events = KVP_MAX(server->turn_events, n);
	server->event_turns_cut += r > 0;
	return r;
}

struct kvp_session_pending *kvp_session_postpone(struct kvp_session *session, uint64_t request)
{
	struct kvp_session_pending *pending = calloc(1, sizeof(*pending));

	if (!pending)
		return NULL;
	pending->session = session;
	pending->request = request;
	DL_APPEND(session->pending, pending);
	session->n_pending++;
	return pending;
}

static void unlink_pending(struct kvp_session_pending *pending)
{
	struct kvp_session *session = pending->session;

	if (!session)
		return;
	DL_DELETE(session->pending, pending);
	session->n_pending--;
	pending->session = NULL;
}

void kvp_session_forget(struct kvp_session_pending *pending)
{
	unlink_pending(pending);
	free(pending);
}

void kvp_session_answer(struct kvp_session_pending *pending)
{
	kvp_session_answer_with(pending, KVP__STATUS__STATUS_OK, "");
}

static void answer(struct kvp_session_pending *pending, Kvp__Reply *reply, int fd)
{
	struct kvp_session *session = pending->session;

	reply->id = pending->request;
	kvp_session_forget(pending);
	if (!session) {
		if (fd >= 0)
			(void)close(fd);
		return;
	}
	kvp_session_reply(session, reply, fd);
	/* It may be read again. */
	kvp_server_touch(session->core->server, session);
}

void kvp_session_answer_fd(struct kvp_session_pending *pending, int fd)
{
	Kvp__Reply reply = KVP__REPLY__INIT;

	answer(pending, &reply, fd);
}

void kvp_session_answer_with(struct kvp_session_pending *pending, Kvp__Status status,
			     const char *text)
{
	char copy[KVP_POOL_ERR];
	Kvp__Reply reply = KVP__REPLY__INIT;

	reply.status = status;
	(void)snprintf(copy, sizeof(copy), "%s", text); /* may be cut */
	kvp_text_clean(copy);
	if (status != KVP__STATUS__STATUS_OK)
		reply.text = copy;
	answer(pending, &reply, -1);
}

void kvp_session_drop_output(struct kvp_session *session)
{
	while (session->replies)
		free_reply(session, session->replies);
	while (session->pending)
		unlink_pending(session->pending);
	session->n_pending = 0; /* recalls have no record */
}
