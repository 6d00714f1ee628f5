/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One connection of a client: requests in, exactly one reply to each, events of its rooms out.
 * Loop thread only.
 *
 * NEW -> (hello) UP -> ENDING -> freed. A session ends when the client closes the socket, when its
 * process ends (whichever is noticed first: a forked child may keep the socket open), when it does
 * not read for client.stall, does not greet for as long, or sends nonsense again and again. Its
 * rooms fail at once; its pools and fences are unmapped when their lane has let go of them, which
 * may be after the session itself is gone.
 */

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/core.h"
#include "daemon/lists.h"
#include "daemon/process.h"
#include "proto/kvpack.pb-c.h"

/* Replies that wait for room in the socket or for a lane: with so many the session is not read. */
#define KVP_SESSION_BACKLOG 64u
/* Packets of the sessions of one process, and events to it, before the others get their turn. */
#define KVP_SESSION_TURN_PACKETS 8u
#define KVP_SESSION_TURN_EVENTS 32u
/* After so long no more packet is read in a turn either: some cost more than others. */
#define KVP_SESSION_TURN_NS 50000u
/* Malformed packets in a row after which a session ends. */
#define KVP_SESSION_BAD_MAX 16u

struct kvp_session_reply;
struct kvp_session_pending;

enum kvp_session_state { KVP_SESSION_NEW, KVP_SESSION_UP, KVP_SESSION_ENDING };

struct kvp_session {
	struct kvp_room_owner owner; /* id, uid and name of the session */
	struct kvp_core *core;       /* borrowed */
	enum kvp_session_state state;
	int fd;                      /* owned */
	int pidfd;                   /* owned; -1: the kernel does not say */
	struct kvp_process *process; /* whose it is; counted */
	uv_poll_t io;                /* the socket */
	uv_poll_t death;             /* the pidfd */
	uv_timer_t stall;   /* runs while not greeted or the socket is full; of the reserve */
	uint32_t n_handles; /* not yet closed */
	int events;         /* what `io` polls for */
	uint32_t gid, pid;  /* as the kernel says; pid 0: not visible from here */
	bool admin;
	bool observer;        /* it may only look, and drain */
	bool reserved;        /* it has a connection beyond the limits */
	bool engine;          /* it has had a pool */
	bool end_after_flush; /* refused: ends when the reply is out */
	bool full;            /* the socket took no more */
	bool hung_up;         /* the client has: what it sent is read, also while it rests */
	bool touched;         /* in the server's list of sessions to flush */
	uint64_t full_since_ns, created_ns;
	struct kvp_policy policy;
	Kvp__Status refusal; /* answer to hello, unless OK */
	char refusal_text[KVP_POOL_ERR];
	uint64_t *refused; /* the server's count of such refusals, if this one is not in it yet */

	struct kvp_lists lists;
	struct kvp_pool *pools;   /* owned; chained by session_next */
	struct kvp_fence *fences; /* owned */
	uint32_t n_pools, n_fences;

	struct kvp_session_reply *replies; /* owned, oldest first (utlist) */
	uint32_t n_replies;
	uint64_t reply_bytes;
	struct kvp_session_pending *pending; /* requests that a lane answers */
	uint32_t n_pending;
	bool looking; /* a display is being made for it, and until then nothing else is read */
	uint32_t bad_in_row;
	uint64_t n_requests, n_bad, n_events;

	struct kvp_session *prev, *next; /* the server's (utlist) */
	struct kvp_session *touched_next;
};

/*
 * Takes over a connected socket (non-blocking); one that is refused (session_admit.h) only lives to
 * answer hello with that. Owns fd whatever happens. NULL: the client is gone already, or no memory.
 */
struct kvp_session *kvp_session_create(struct kvp_core *core, int fd, uint64_t id);
/* Rooms fail with CLIENT_LOST and `why`; the memory goes when the handles have closed. */
void kvp_session_end(struct kvp_session *session, const char *why);
/* Writes what is due, as far as the socket takes it. Called by the server for touched sessions. */
void kvp_session_flush(struct kvp_session *session);

/* It has greeted, or reads again: no deadline, but for one of the reserve. */
void kvp_session_stop_stall(struct kvp_session *session);

/* The session's pool of that name in any state, NULL: none. */
struct kvp_pool *kvp_session_pool(const struct kvp_session *session, uint32_t client_id);
