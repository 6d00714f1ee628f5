/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Rooms: both ends' objects, their states and timers, the offers and accepts between daemons, and
 * the orders to the lanes. Loop thread only.
 *
 * Requests come from sessions (already decoded and checked by proto/msg), peer messages from
 * daemon/peer.h, news from the lanes as boards. Every change that the client can see calls
 * owner->changed(); the session then writes kvp_room_event() when its socket has room.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/config.h"
#include "daemon/lane.h"
#include "daemon/lists.h"
#include "daemon/pool.h"
#include "proto/kvpack.pb-c.h"
#include "proto/sums.h"

struct kvp_rooms;
struct kvp_room; /* one end: a destination or a sender */
struct kvp_peers;

#define KVP_ROOM_ERR 192u

/* The session's side of its rooms; embedded in the session, which outlives its rooms' use of it by
 * calling kvp_rooms_owner_lost(). */
struct kvp_room_owner {
	uint64_t id; /* session id */
	uint32_t uid;
	char name[64];
	uint32_t n_rooms;   /* live ends of this owner (gauge); checked against max_rooms */
	uint32_t max_rooms; /* by policy */
	/* The room's event has changed. Never called from within a request of the same owner: the
	 * session looks at kvp_room_owner_next() after each request too. */
	void (*changed)(struct kvp_room_owner *owner);
	struct kvp_room *rooms; /* list head, private to room.c */
	struct kvp_room *dirty; /* queue head, private to room.c */
};

struct kvp_rooms_config {
	uv_loop_t *loop;
	const struct kvp_config *config; /* borrowed */
	struct kvp_lane *const *lanes;   /* borrowed [n_lanes]; 0 is the host lane */
	uint32_t n_lanes;
	struct kvp_peers *peers; /* borrowed; its events are given to kvp_rooms_peer_events */
};

int kvp_rooms_create(struct kvp_rooms **out, const struct kvp_rooms_config *config);
/* All rooms are gone. Memory goes once the loop has run: call it before the loop ends. */
void kvp_rooms_destroy(struct kvp_rooms *rooms);

/*
 * Requests. Each returns a Kvp__Status and, unless OK, a text in `err` (KVP_ROOM_ERR bytes) that
 * names field, value and limit. All or nothing: a refused request has changed nothing. Lists are
 * looked up in `lists`; the session drops the lists that the message names afterwards.
 */
Kvp__Status kvp_rooms_expect(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     struct kvp_pool *pool, const Kvp__Expect *msg,
			     const struct kvp_lists *lists, char *err);
Kvp__Status kvp_rooms_open(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			   struct kvp_pool *pool, const Kvp__Open *msg, char *err);

/* A fence that a session registered: what a submit needs to know of it. */
struct kvp_room_fence {
	uint64_t id; /* the lane's name; 0: the chunk has no fence */
	uint32_t n_words;
};
Kvp__Status kvp_rooms_submit(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     const Kvp__Submit *msg, const struct kvp_room_fence *fence,
			     const struct kvp_lists *lists, char *err);
/* Answers later, once the lane has: done() runs exactly once, unless the owner is lost before; with
 * a text unless OK. */
typedef void kvp_recalled_fn(void *arg, uint64_t request, Kvp__Status status, uint32_t from,
			     const char *text);
Kvp__Status kvp_rooms_recall(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			     const Kvp__Recall *msg, kvp_recalled_fn *done, uint64_t request,
			     char *err);
Kvp__Status kvp_rooms_abort(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			    const Kvp__Abort *msg, char *err);
/* By decode's client; the peer session is made if need be. OK means: handed to the peer session. */
Kvp__Status kvp_rooms_renew(struct kvp_rooms *rooms, const Kvp__Renew *msg, char *err);
Kvp__Status kvp_rooms_decline(struct kvp_rooms *rooms, const Kvp__Decline *msg, char *err);

/* The client is gone: its rooms fail with CLIENT_LOST, at both ends; `owner` is not used
 * afterwards. */
void kvp_rooms_owner_lost(struct kvp_rooms *rooms, struct kvp_room_owner *owner, const char *why);
/* Every room of the pool fails with this status; the pool's n_users goes to 0 by and by. */
void kvp_rooms_pool_ends(struct kvp_rooms *rooms, struct kvp_pool *pool, Kvp__Status status,
			 const char *why);
/* Every room fails with this status (stuck lane: lane_idx, or UINT32_MAX for all). */
void kvp_rooms_fail_all(struct kvp_rooms *rooms, uint32_t lane_idx, Kvp__Status status,
			const char *why);
/* Refuses new expectations and opens from now on, with STOPPING. */
void kvp_rooms_close(struct kvp_rooms *rooms);
/* The stop has come to its end: rooms in motion fail with STOPPING. Those of which nothing was
 * submitted are left as they are, and nobody is told: their clients announce them again to the next
 * process, and peers wait for that. */
void kvp_rooms_stop(struct kvp_rooms *rooms, const char *why);
/* After that: all that the owner has is left, or its end has been read. */
bool kvp_room_owner_told(const struct kvp_room_owner *owner);
/* On: the same until off, and the reason; what has no legs yet fails, since it will get none. Legs
 * that there are go on to their end. */
void kvp_rooms_drain(struct kvp_rooms *rooms, bool on, const char *reason);
/* NULL: not draining. */
const char *kvp_rooms_draining(const struct kvp_rooms *rooms, uint64_t *since_ns);

/* A board of kind RX or TX came out of the loop's inbox; this calls kvp_board_take(). */
void kvp_rooms_board(struct kvp_rooms *rooms, struct kvp_board *board);

/* Takes the next room of the owner whose event is to be sent; NULL: none. After the event of a dead
 * end (released, gone) has been written, call kvp_room_event_written(): it may free the room. */
struct kvp_room *kvp_room_owner_next(struct kvp_room_owner *owner);
/* Fills an event that is valid until the next call on this room (strings and meta are borrowed). */
void kvp_room_event(struct kvp_room *room, Kvp__RoomEvent *event);
/* The event could not be written now: it stays due. */
void kvp_room_event_put_back(struct kvp_room *room);
void kvp_room_event_written(struct kvp_room *room);

/* Ends with data in motion, counted by looking at all; and all ends that exist, quiet or not. */
uint32_t kvp_rooms_moving(const struct kvp_rooms *rooms);
uint32_t kvp_rooms_count(const struct kvp_rooms *rooms);

/* ---- for displays (daemon/inspect) ----------------------------------------------------------- */

/* What an end waits for outside its lane; numbers beyond enum kvp_wait. */
enum {
	KVP_ROOM_WAITS_PEER = 64, /* the session to a listed peer */
	KVP_ROOM_WAITS_OPEN,      /* a sender's engine has not opened */
	KVP_ROOM_WAITS_OFFERS,    /* decode's engines have not all expected */
	KVP_ROOM_WAITS_END,       /* all is delivered; decode's word is missing */
	KVP_ROOM_WAITS_QUIET,     /* over; the lane still has work of it */
	KVP_ROOM_WAITS_N,
};

struct kvp_room_leg_view {
	uint32_t sender, dest;
	uint64_t generation;
	char peer[64];
	const char *state;      /* "offered", "accepted", "moving", "ended" ... */
	const char *checksum;   /* as kvp_sums_name() */
	const char *mode;       /* "local", "landing", "direct", "direct+landing", "none" */
	const char *waits_text; /* what the leg itself waits for, "": its room says */
	uint64_t waits_since_ns;
};

/* One end, live or ended; ended ones are kept as such copies (limits.history of them). */
struct kvp_room_view {
	uint64_t room, session;
	uint32_t uid; /* of the client: others do not see whose label it is */
	bool is_dest;
	uint32_t index; /* dest or sender number */
	char label[64], client[64];
	Kvp__RoomState state;
	Kvp__Status status;
	char reason[KVP_BOARD_TEXT];
	bool retry, complete, failed, released;
	uint64_t prefix, end, arrived;
	uint32_t chunks, source_free, delivered;
	uint64_t created_ns, state_since_ns, ended_ns; /* CLOCK_MONOTONIC; 0: not yet */
	uint64_t ended_wall_ms;                        /* CLOCK_REALTIME; 0: live */
	uint32_t waits; /* enum kvp_wait, or KVP_ROOM_WAITS_... below */
	uint64_t waits_since_ns;
	const char *waits_text; /* in words, static */
	const char *verdict;    /* "engine", "us", "peer", "network", "ok" */
	const char *mode;       /* "local", "landing", "direct", "direct+landing", "" */
	const char *fell_back;  /* why a piece was not written directly, in words, or "" */
	uint64_t offered_ns, accepted_ns, first_want_ns, first_grant_ns, first_data_ns,
		last_landed_ns, complete_ns, failed_ns, released_ns; /* 0: not reached */
	uint64_t first_chunk_ns, first_fence_ns, first_packed_ns, first_unpack_ns;
	uint64_t pieces, bytes, raw_rows, gather_ns;
	uint64_t direct_pieces, direct_bytes; /* of those */
	uint64_t pages_held;                  /* destination, unreleased */
	uint32_t pool_client_id;
	uint32_t n_legs;
	uint64_t id;      /* unique in this daemon */
	uint64_t seen_by; /* the last walk that came to it while it lived */
};

/* Returns false to stop. */
typedef bool kvp_room_view_fn(void *arg, const struct kvp_room_view *view);

/*
 * A walk over all live ends, oldest first, then (`ended`) over the last ended ones, newest first.
 * It is made in steps, between which ends may come and go: each that was there at the begin is seen
 * at most once, and exactly once as long as it lives or is remembered; those that are made later
 * are not seen. One walk at a time; the struct is the caller's, its fields are private.
 */
struct kvp_room_walk {
	struct kvp_rooms *rooms; /* NULL: it has ended */
	kvp_room_view_fn *fn;
	void *arg;
	bool ended, past_live;
	struct kvp_room *at; /* the next live one; NULL: none is left */
	uint64_t last_id, number;
	uint64_t ended_at; /* so many had ended, up to the next one */
};
void kvp_room_walk_begin(struct kvp_room_walk *walk, struct kvp_rooms *rooms, bool ended,
			 kvp_room_view_fn *fn, void *arg);
/* Looks at up to `n`; false: that was all. */
bool kvp_room_walk_step(struct kvp_room_walk *walk, uint32_t n);
/* Harmless on zeroed memory. */
void kvp_room_walk_end(struct kvp_room_walk *walk);
/* Legs of a live end; writes up to max, returns how many. An end whose id is free again has none.
 */
uint32_t kvp_room_legs(struct kvp_rooms *rooms, const struct kvp_room_view *view,
		       struct kvp_room_leg_view *out, uint32_t max);

/* An offer of another daemon that waits for an engine of this node to open its room. */
struct kvp_parked_view {
	uint64_t room, since_ns;
	uint32_t sender, dest;
	const char *peer; /* as long as the call */
};
typedef bool kvp_parked_view_fn(void *arg, const struct kvp_parked_view *view);
/* Oldest first. */
void kvp_rooms_each_parked(const struct kvp_rooms *rooms, kvp_parked_view_fn *fn, void *arg);

#define KVP_ROOM_STATES_N ((unsigned)KVP__ROOM_STATE__ROOM_RELEASED + 1)

/* How a room between two GPUs of this daemon moves. */
enum kvp_across {
	KVP_ACROSS_NONE, /* it is not between two */
	KVP_ACROSS_PEER, /* by peer access; the others land */
	KVP_ACROSS_OFF,
	KVP_ACROSS_UNABLE,
	KVP_ACROSS_SENDERS,
	KVP_ACROSS_N,
};
/* "peer", "off", ...; and why it lands, in words, or "". */
const char *kvp_across_name(enum kvp_across across);
const char *kvp_across_text(enum kvp_across across);

struct kvp_rooms_stats {
	uint32_t dests, sends, parked_offers;
	uint32_t notes;                       /* renewals and declines that wait for peers */
	uint32_t chunks_most;                 /* without source free, of one open */
	uint32_t remembered;                  /* ended ones */
	uint32_t by_state[KVP_ROOM_STATES_N]; /* live ends */
	uint64_t completed, failed_by_status[40], opened, expected;
	uint64_t late_messages; /* of older generations, dropped */
	uint64_t refused_limit; /* ends refused for max_rooms */
	uint64_t refused_offers, refused_notes, refused_chunks;
	uint64_t aborts, renews, declines;
	uint64_t across[KVP_ACROSS_N];  /* destinations between two GPUs, by how they moved */
	uint64_t unchecked[KVP_SUMS_N]; /* legs without the sums that an end wants, by reason */
	uint64_t drains_late;           /* ends not quiet within timers.drain */
	uint64_t bytes_rooms;           /* memory of live ends, roughly */
};
void kvp_rooms_stats(struct kvp_rooms *rooms, struct kvp_rooms_stats *out);

#ifdef KVP_TEST
/* Test point: answers to offers are kept while on. */
void kvp_rooms_hold_offers(struct kvp_rooms *rooms, bool on);
uint32_t kvp_rooms_kept_offers(const struct kvp_rooms *rooms);
#endif
