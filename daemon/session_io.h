/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a session writes: replies first, then events of its rooms while the socket has room. */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/session.h"

/* Sends or queues a reply with at most one fd (-1: none), which is the session's from here on. On
 * failure the session has ended. */
void kvp_session_reply(struct kvp_session *session, const Kvp__Reply *reply, int fd);

/* Why a session ends on whose socket a call has failed, for people: a client that closes with
 * something unread is no network that breaks. */
const char *kvp_session_end_text(int error);

/* Writes until nothing is due (0), the turn's events are out (1), the socket is full (-EAGAIN) or
 * broken (other negative errno); *moved: something went out. */
int kvp_session_write(struct kvp_session *session, bool *moved);

/* A request whose answer comes later. The record stays until kvp_session_answer(), even when the
 * session ends before. */
struct kvp_session_pending {
	struct kvp_session *session; /* NULL: it has ended */
	uint64_t request;
	struct kvp_session_pending *prev, *next;
};
struct kvp_session_pending *kvp_session_postpone(struct kvp_session *session, uint64_t request);
/* Answers with OK and frees the record. */
void kvp_session_answer(struct kvp_session_pending *pending);
/* The same with an fd, which is the session's from here on. */
void kvp_session_answer_fd(struct kvp_session_pending *pending, int fd);
/* Answers with a status and, unless OK, a text. */
void kvp_session_answer_with(struct kvp_session_pending *pending, Kvp__Status status,
			     const char *text);
/* Nobody will answer: frees the record. */
void kvp_session_forget(struct kvp_session_pending *pending);

/* Frees queued replies; requests that wait for a lane will be answered to nobody. */
void kvp_session_drop_output(struct kvp_session *session);
