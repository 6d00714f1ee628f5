/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the files of daemon/room share; none of it is for others. Loop thread only.
 *
 * An end lives in three places: in the list of all ends, in the tables by (room, number) and by
 * (owner, handle), and on the lane as an rx or tx. It ends in this order: terminal state (complete,
 * done, failed) -> the lane is ordered to end it -> its board says QUIET -> pages, pool and peers
 * are given back, it leaves the table by room and becomes history -> its last event is written ->
 * freed.
 */

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <utlist.h>

#include "daemon/log.h"
#include "daemon/peer.h"
#include "daemon/room.h"
#include "daemon/room_map.h"
#include "proto/layout.h"
#include "proto/limits.h"
#include "proto/peer_msg.h"
#include "proto/sums.h"
#include "proto/util.h"

#define KVP_ROOM_OK KVP__STATUS__STATUS_OK
#define KVP_ROOM_STATUSES 40u
/* Offers wait for a socket with more than this unsent, so that a crowd of them cannot end it. */
#define KVP_ROOM_UNSENT_HIGH (4u << 20)
#define KVP_ROOM_UNSENT_RETRY_NS UINT64_C(20000000)

struct kvp_room_key {
	uint64_t room;
	uint32_t index, is_dest;
};

struct kvp_room_handle {
	uint64_t owner, handle;
};

/* ---- legs -------------------------------------------------------------------------------------
 */

enum kvp_dleg_state {
	KVP_DLEG_UNSENT,   /* until the peer's session is up; bounded by the offer timer */
	KVP_DLEG_OFFERED,  /* until the sender's open, its refusal, or the open timer */
	KVP_DLEG_ACCEPTED, /* Go is sent; until the room ends */
};

/* A destination's leg: one listed sender. */
struct kvp_dleg {
	struct kvp_room *room;
	struct kvp_peer *peer;        /* held; NULL once given back */
	struct kvp_dleg *prev, *next; /* of the peer's legs */
	uint32_t sender, n_dests;
	enum kvp_sums sums; /* accepted */
	enum kvp_dleg_state state : 8;
	bool data : 1;              /* role */
	bool local : 1;             /* accepted, and on the lane that the sender's pool is on */
	bool over : 1;              /* its sender has aborted it: no abort goes back */
	bool drained : 1;           /* its sender has nothing of it running any more */
	uint64_t since_ns;          /* of the state */
	struct kvp_lane_geom *geom; /* owned copy for the coverage check, until all have accepted */
};

enum kvp_sleg_state {
	KVP_SLEG_ACCEPTED, /* until Go, an abort, or the loss of the session */
	KVP_SLEG_GO,       /* until the destination's last word */
	KVP_SLEG_ENDED,    /* complete at the destination */
};

/* A sender's leg: one accepted offer. */
struct kvp_sleg {
	struct kvp_room *room;
	struct kvp_peer *peer;          /* borrowed; NULL once its session is over */
	struct kvp_sleg *prev, *next;   /* of the peer's legs */
	struct kvp_sleg *rprev, *rnext; /* of the room's legs */
	enum kvp_sleg_state state;
	uint32_t dest;
	uint64_t since_ns; /* accepted */
	uint64_t generation;
	bool data, local; /* local: the destination's end is on this lane */
	bool across;      /* it is, and its pool is on another GPU */
	bool over;        /* its destination has aborted it */
	enum kvp_sums sums;
	Kvp__PeerMsg *offer;       /* owned */
	struct kvp_lane_geom geom; /* owned until it goes to the lane with Go */
	uint64_t firsts[]; /* [send.n_groups] by source group: first position that it needs */
};

/* ---- the two kinds of ends ---------------------------------------------------------------------
 */

/* The part of a side's list that the pool's bitmap says is held. */
struct kvp_dest_held {
	uint32_t from, n;
};

struct kvp_room_dest {
	struct kvp_dleg *legs; /* owned [n_legs] */
	uint32_t n_legs, n_data;
	uint32_t n_groups;
	struct kvp_side *sides;     /* owned [n_groups]; pages point into `pages` */
	uint64_t *firsts;           /* owned [n_groups], not below prefix */
	uint32_t *pages;            /* owned */
	struct kvp_dest_held *held; /* owned [n_groups] */
	uint64_t n_held;
	struct kvp_lane_segment *segments; /* owned */
	uint32_t n_segments;
	int32_t meta_from;
	uint8_t *meta; /* owned; the lane writes it before COMPLETE */
	uint32_t meta_bytes;
	bool meta_told;
	uint8_t across;                /* enum kvp_across, of its one data leg */
	struct kvp_order_rx *rx_order; /* owned; until the lane is known. NULL: a lane has it */
};

/* What is remembered of a chunk until its sources are free. */
struct kvp_room_chunk {
	uint64_t start, tokens;
	uint64_t set[KVP_LANE_MASK_WORDS];
	uint64_t opened[KVP_LANE_MASK_WORDS]; /* entries of which it is the first chunk */
	uint64_t fence, fence_value;
	uint32_t fence_word;
	uint64_t pos0[KVP_LANE_GROUPS]; /* UINT64_MAX: group not in it */
	bool last;
};

struct kvp_room_sent_segment {
	uint64_t bytes;
	uint32_t id, seq;
};

struct kvp_room_send {
	uint64_t mask[KVP_LANE_MASK_WORDS]; /* entries that take part */
	uint32_t n_groups;
	struct kvp_side *sides; /* owned [n_groups]; page 0: none */
	struct kvp_sleg *legs;
	uint32_t n_legs, n_go, n_ended;
	uint32_t n_dests; /* 0: no offer yet */
	bool ready;
	uint64_t *needs; /* owned [n_groups]; from ready on: least of the legs' firsts */
	uint32_t n_chunks;
	bool last_seen;
	uint64_t *ends, *starts;         /* owned [n_entries]; UINT64_MAX: nothing yet */
	struct kvp_room_chunk *chunks;   /* owned ring [cap_chunks], a power of two */
	uint32_t cap_chunks, chunk_base; /* chunks below base are source free and forgotten */
	struct kvp_room_sent_segment *segments; /* owned */
	uint32_t n_segments, cap_segments;
	bool leased;
	uint64_t lease_ns;         /* deadline */
	kvp_recalled_fn *recalled; /* NULL: none is pending */
	uint64_t recall_request;
};

struct kvp_room_timers {
	uint64_t offer_ns, open_ns, progress_ns, fence_ns, lease_ns;
};

struct kvp_room {
	struct kvp_board board; /* kind RX or TX; id = generation, or the tx's */
	struct kvp_rooms *rooms;
	struct kvp_room_key key;
	struct kvp_room_handle handle;
	struct kvp_map_link by_key, by_handle;
	struct kvp_room *prev, *next;   /* all ends that are not released */
	struct kvp_room *oprev, *onext; /* of the owner */
	struct kvp_room *dprev, *dnext; /* of the owner's queue */
	bool queued;                    /* in that queue */
	bool listed;                    /* in the list of all and in the table by room */
	struct kvp_room_owner *owner;   /* NULL once lost */
	struct kvp_pool *pool;          /* NULL once given back */
	struct kvp_lane *lane;
	uint32_t lane_idx, pool_client_id;
	uint64_t id;      /* for displays */
	uint64_t seen_by; /* the last walk that came to it */
	uint8_t secret[KVP_KEY_BYTES];
	uint32_t secret_bytes;
	char *label, *client; /* owned; NULL: "" */
	uint32_t uid;         /* of the client */
	Kvp__RoomState state;
	Kvp__Status status;
	char *reason; /* owned; NULL: none, or no memory for it */
	bool retry, complete, failed, released;
	bool left;             /* to the next process: its end is not told */
	bool drain_told;       /* the drain timer has run out: said once */
	uint32_t failed_waits; /* what it waited for when it failed */
	uint64_t prefix, end;
	struct kvp_order_id *end_order; /* owned; NULL once it has gone out */
	struct kvp_room_timers timers;
	uint64_t deadline_ns; /* UINT64_MAX: none */
	uint32_t heap_idx;    /* UINT32_MAX: not in the heap */
	uint64_t created_ns, state_since_ns, ended_ns, ended_wall_ms;
	uint64_t offered_ns, accepted_ns, complete_ns, failed_ns, released_ns;
	uint64_t bytes; /* of memory, roughly */
	union {         /* by key.is_dest; there is memory for that kind only */
		struct kvp_room_dest dest;
		struct kvp_room_send send;
	};
};

/*
 * What an end costs, beside lists of pages and names: the numbers of docs/architecture.md 6.
 * Whoever adds a field here adds it ten thousand times.
 */
#define KVP_ROOM_DEST_BYTES (offsetof(struct kvp_room, dest) + sizeof(struct kvp_room_dest))
#define KVP_ROOM_SEND_BYTES (offsetof(struct kvp_room, send) + sizeof(struct kvp_room_send))
static_assert(KVP_ROOM_DEST_BYTES <= 960, "destination");
static_assert(KVP_ROOM_SEND_BYTES <= 1064, "sender");
static_assert(sizeof(struct kvp_dleg) <= 64, "sender of a destination");
static_assert(sizeof(struct kvp_sleg) <= 256, "destination of a sender");
static_assert(sizeof(struct kvp_room_chunk) <= 304, "chunk of a sender");

/* ---- all rooms ---------------------------------------------------------------------------------
 */

struct kvp_room_parked {
	struct kvp_peer *peer;               /* borrowed: dropped with its session */
	Kvp__PeerMsg *msg;                   /* owned, an offer */
	struct kvp_room_key key;             /* of the sender it is for */
	struct kvp_room_parked *prev, *next; /* all, oldest first */
	struct kvp_room_parked *knext;       /* same sender */
	uint64_t since_ns, bytes;            /* bytes: of the message, as it came */
	bool ended; /* complete there without this sender, which sends nothing and opens late */
};

/* Parked offers for one sender. */
struct kvp_room_parking {
	struct kvp_room_parked *first;
	struct kvp_map_link link;
};

/* A renewal or decline until its peer's session is up. */
struct kvp_room_note {
	struct kvp_peer *peer; /* held */
	Kvp__PeerMsg *msg;     /* owned */
	uint64_t deadline_ns;
	struct kvp_room_note *prev, *next;
};

/* What a peer's pointer leads to; exists while a list has something. */
struct kvp_room_peer {
	struct kvp_dleg *dlegs;
	struct kvp_sleg *slegs;
	uint32_t n_parked;
	uint64_t parked_bytes;
};

/* Bytes of all offers that may be parked at a time; one peer may have half of that, as of their
 * number. */
#define KVP_PARKED_BYTES (UINT64_C(256) << 20)

/* An accept that a test point keeps. */
struct kvp_room_kept {
	struct kvp_peer *peer;
	Kvp__PeerMsg *msg;
	struct kvp_room_kept *next;
};

struct kvp_rooms {
	uv_loop_t *loop;
	const struct kvp_config *config;
	struct kvp_lane *const *lanes;
	uint32_t n_lanes;
	struct kvp_peers *peers;
	struct kvp_room *all;
	struct kvp_map by_key, by_handle;
	uint32_t n_rooms, n_dests, n_sends; /* in memory */
	bool closed;
	bool draining; /* until told otherwise */
	char drain_reason[KVP_LIMIT_REASON + 1];
	uint64_t drain_since_ns;
	struct kvp_room_owner *requesting; /* whose request runs now */
	uint64_t last_id, last_tx;
	/* offers */
	struct kvp_map parking;
	struct kvp_room_parked *parked;
	uint32_t n_parked;
	uint64_t parked_bytes;
	uint64_t ended_at_ns; /* when the first of the ended ones goes; UINT64_MAX: none */
	struct kvp_room_note *notes;
	uint32_t n_notes;
	uint32_t chunks_most; /* of one open without source free, at least */
	bool chunks_stale;    /* that one has fewer since, or is gone */
	bool hold_offers;
	struct kvp_room_kept *kept;
	/* timer: a binary heap by deadline, one uv timer for its top */
	uv_timer_t timer;
	struct kvp_room **heap; /* owned */
	uint32_t n_heap, cap_heap;
	uint64_t timer_at_ns; /* UINT64_MAX: stopped */
	uint64_t notes_at_ns; /* the earliest of the notes */
	/* history: a ring of copies */
	struct kvp_room_view *history; /* owned [cap]; NULL with no history */
	uint32_t n_history, cap_history;
	uint64_t n_ended;           /* ever; the next one's place follows */
	struct kvp_room_walk *walk; /* borrowed; NULL: none */
	uint64_t n_walks;           /* ever */
	struct kvp_rooms_stats stats;
	struct kvp_log_limit log_limit;
	struct kvp_log_limit sums_limit; /* of legs that move without sums */
};

uint64_t kvp_room_now(void);
/* Writes the text of a refusal and returns its status. */
Kvp__Status kvp_room_refuse(char *err, Kvp__Status status, const char *fmt, ...) KVP_PRINTF(3, 4);

/* room.c */
struct kvp_room *kvp_room_new(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			      struct kvp_pool *pool, const struct kvp_room_key *key);
/* Undoes what was done so far to an end that never became one, or frees one that is over. */
void kvp_room_free(struct kvp_room *room);
static inline void kvp_room_freep(struct kvp_room **room)
{
	if (*room)
		kvp_room_free(*room);
}
/* Limits, state of the daemon, ids in use. */
Kvp__Status kvp_room_admit(struct kvp_rooms *rooms, struct kvp_room_owner *owner,
			   const struct kvp_room_key *key, uint64_t handle, char *err);
/* Enters it everywhere: from now on it is an end. */
void kvp_room_enter(struct kvp_room *room);
struct kvp_room *kvp_room_find(struct kvp_rooms *rooms, uint64_t room, uint32_t index,
			       bool is_dest);
struct kvp_room *kvp_room_by_handle(struct kvp_rooms *rooms, const struct kvp_room_owner *owner,
				    uint64_t handle);
static inline const char *kvp_room_reason(const struct kvp_room *room)
{
	return room->reason ? room->reason : room->failed ? "no memory for the reason" : "";
}
static inline bool kvp_room_terminal(const struct kvp_room *room)
{
	return room->failed || room->complete;
}
/* Its event is due. */
void kvp_room_changed(struct kvp_room *room);
void kvp_room_set_state(struct kvp_room *room, Kvp__RoomState state);
/* What its client says of either end; false: no memory. */
bool kvp_room_introduce(struct kvp_room *room, uint64_t handle, const char *label,
			const Kvp__Timers *timers, const ProtobufCBinaryData *key);
/* Fails the end, tells all its legs, orders its end on the lane. Nothing when it is over. */
void kvp_room_fail(struct kvp_room *room, Kvp__Status status, const char *fmt, ...)
	KVP_PRINTF(3, 4);
/* The same with the other end's word on whether to retry. */
void kvp_room_fail_as(struct kvp_room *room, Kvp__Status status, bool retry, const char *fmt, ...)
	KVP_PRINTF(4, 5);
/* complete at a destination, done at a sender. */
void kvp_room_succeed(struct kvp_room *room, Kvp__RoomState state);
int kvp_room_order_id(struct kvp_room *room, enum kvp_order_type type, uint32_t value);
static inline const char *kvp_room_label(const struct kvp_room *room)
{
	return room->label ? room->label : "";
}
static inline const char *kvp_room_client(const struct kvp_room *room)
{
	return room->client ? room->client : "";
}
bool kvp_room_status_retry(Kvp__Status status);
/* Constant time in what the keys are; their lengths are no secret. */
bool kvp_room_key_fits(const struct kvp_room *room, const ProtobufCBinaryData *key);

/* room_dest.c, room_offer.c: messages that concern a destination */
void kvp_dest_tell(struct kvp_room *room);
void kvp_dest_board(struct kvp_room *room, uint32_t flags);
void kvp_dest_quiet(struct kvp_room *room);
void kvp_dest_clear(struct kvp_room *room);
/* The destination waits for this leg no more. Who sends nothing need not answer: the end reaches it
 * also before its open, but not before the offer. */
bool kvp_dleg_met(const struct kvp_dleg *leg);
void kvp_dest_offer(struct kvp_dleg *leg);
void kvp_dest_accept(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg);
struct kvp_dleg *kvp_dest_leg(struct kvp_rooms *rooms, const struct kvp_peer *peer,
			      const Kvp__Leg *leg);

/* room_send.c */
void kvp_send_tell(struct kvp_room *room);
void kvp_send_board(struct kvp_room *room, uint32_t flags);
void kvp_send_quiet(struct kvp_room *room);
void kvp_send_clear(struct kvp_room *room);
/* An offer for an end that is not over. */
void kvp_send_offer(struct kvp_room *room, struct kvp_peer *peer, const Kvp__PeerMsg *msg);
void kvp_send_go(struct kvp_sleg *leg);
void kvp_send_ended(struct kvp_sleg *leg);
struct kvp_sleg *kvp_send_leg(struct kvp_rooms *rooms, const struct kvp_peer *peer,
			      const Kvp__Leg *leg);
void kvp_sleg_free(struct kvp_sleg *leg);

/* room_chunk.c */
/* What was submitted before the destinations were known, against what they say: false: failed. */
bool kvp_chunks_ready(struct kvp_room *room);
/* The room's chunks without source free were `before`. */
void kvp_chunks_counted(struct kvp_room *room, uint32_t before);
void kvp_chunks_freed(struct kvp_room *room, uint32_t source_free);
void kvp_chunks_recalled(struct kvp_room *room, uint32_t from);
/* The recall, if one is pending, ends with the room. */
void kvp_chunks_recall_ends(struct kvp_room *room);
/* The first chunk whose sources are not free and which has a fence; NULL: none. */
const struct kvp_room_chunk *kvp_chunks_fenced(const struct kvp_room *room);

/* room_park.c */
void kvp_park_offer(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg);
/* Gives the offers parked for this sender to it. */
void kvp_park_take(struct kvp_room *room);
void kvp_park_drop_peer(struct kvp_rooms *rooms, const struct kvp_peer *peer);
void kvp_park_abort(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg);
/* The room is complete at a destination whose offer is still parked. */
void kvp_park_end(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg);
/* Drops ended ones that nobody opened; returns when the next one is due, UINT64_MAX: never. */
uint64_t kvp_park_expire(struct kvp_rooms *rooms, uint64_t now);
void kvp_park_clear(struct kvp_rooms *rooms);
/* Tells those that offered. */
void kvp_park_refuse_all(struct kvp_rooms *rooms, Kvp__Status status, const char *why);
Kvp__PeerMsg *kvp_room_copy_msg(const Kvp__PeerMsg *msg);

/* room_peer.c */
/* 0 or -ENOMEM. */
/* NULL: no memory. Dropped again once it is empty. */
struct kvp_room_peer *kvp_room_peer_data(struct kvp_peer *peer);
void kvp_room_peer_drop_empty(struct kvp_peer *peer);
int kvp_room_peer_add_dleg(struct kvp_dleg *leg);
int kvp_room_peer_add_sleg(struct kvp_sleg *leg);
/* Out of the list; a destination's hold ends too. */
void kvp_room_peer_drop_dleg(struct kvp_dleg *leg);
void kvp_room_peer_drop_sleg(struct kvp_sleg *leg);
void kvp_room_peer_events(struct kvp_rooms *rooms);
void kvp_room_abort_leg(struct kvp_peer *peer, const Kvp__Leg *leg, Kvp__Status status,
			const char *text, bool retry);
/* What an errno of kvp_peer_get() means to a client. */
Kvp__Status kvp_room_peer_status(int error);
/* Notes whose time is over; returns the next deadline. */
uint64_t kvp_notes_expire(struct kvp_rooms *rooms, uint64_t now);
void kvp_notes_clear(struct kvp_rooms *rooms);
/* Accepts that a test point keeps; NULL: of all peers. */
void kvp_rooms_drop_kept(struct kvp_rooms *rooms, const struct kvp_peer *peer);

/* room_across.c: between two GPUs of this daemon */
/* May the sender's lane receive? Then no lane is given the end before the accept. */
bool kvp_across_defer(const struct kvp_room *room);
/* A data sender has accepted, on that lane: chooses the end's, and gives it the end. */
void kvp_across_settle(struct kvp_dleg *leg, uint32_t lane_idx);
/* Gives the end to its lane, if none has it. */
void kvp_across_push(struct kvp_room *room);
/* Will the end that offers be on the sender's lane, though its pool is not? */
bool kvp_across_can(const struct kvp_room *send, const struct kvp_peer *peer,
		    const Kvp__Offer *offer);
/* Where the leg's destination receives. */
uint32_t kvp_across_lane(const struct kvp_sleg *leg);

/* room_sums.c */
/* enum kvp_sums_word of this end. */
uint32_t kvp_room_sums_word(const struct kvp_room *room);
/* What comes of it with the other end's word. */
enum kvp_sums kvp_room_sums_agree(const struct kvp_room *room, uint32_t other);
/* Once the geometry is built; refuses what an end requires and cannot have. */
Kvp__Status kvp_room_sums_settle(struct kvp_room *room, uint32_t other,
				 const struct kvp_lane_geom *geom, enum kvp_sums *sums, char *err);

/* room_geom.c */
struct kvp_geom_end {
	const struct kvp_entry *entries;
	uint32_t n;
	const uint64_t *mask;         /* NULL: all */
	const struct kvp_side *sides; /* [n_sides] by group; page 0: none */
	uint32_t n_sides;
};
struct kvp_geom_spec {
	struct kvp_geom_end src, dst;
	const uint64_t *starts; /* [dst.n_sides] by dst group */
	uint64_t end, slot_bytes;
	uint32_t sender;
	bool sums; /* if a slot has room for a token beside them */
};
/* Builds what both ends compute alike; `out->block` is the caller's. */
Kvp__Status kvp_geom_build(struct kvp_lane_geom *out, const struct kvp_geom_spec *spec, char *err);
/* Entries and sides as they travel. `mask`: entries that take part, NULL: all. */
struct kvp_geom_remote {
	struct kvp_entry *entries; /* owned */
	uint32_t n;
	uint64_t mask[KVP_LANE_MASK_WORDS];
	struct kvp_side sides[KVP_LANE_GROUPS];
	uint64_t firsts[KVP_LANE_GROUPS];
};
Kvp__Status kvp_geom_unpack(struct kvp_geom_remote *out, Kvp__PeerEntry *const *entries,
			    size_t n_entries, Kvp__PeerSide *const *sides, size_t n_sides,
			    char *err);
void kvp_geom_remote_fini(struct kvp_geom_remote *remote);
struct kvp_geom_packed {
	Kvp__PeerEntry **entries;
	Kvp__PeerSide **sides;
	size_t n_entries, n_sides;
	void *block; /* owned, all of the above */
};
int kvp_geom_pack(struct kvp_geom_packed *out, const struct kvp_geom_end *end,
		  const uint64_t *firsts);
/* The place among an end's sides [n_sides] for one that its client says, with what is checked alike
 * at both ends; without pages and pos0. */
Kvp__Status kvp_geom_take_side(const struct kvp_pool *pool, const Kvp__Side *from,
			       struct kvp_side *sides, uint32_t n_sides, struct kvp_side **out,
			       char *err);
Kvp__Status kvp_geom_refuse_side(const struct kvp_side *side, uint32_t group, char *err);
/* Every entry that takes part follows a side of its group. */
Kvp__Status kvp_geom_check_sides(const struct kvp_geom_end *end, char *err);
Kvp__Status kvp_geom_check_tags(const struct kvp_pool *pool, const ProtobufCBinaryData *tag,
				uint32_t layout_version, char *err);

/* room_timer.c */
int kvp_room_timer_init(struct kvp_rooms *rooms);
/* Computes the end's next deadline anew. */
void kvp_room_timer_update(struct kvp_room *room);
void kvp_room_timer_remove(struct kvp_room *room);
void kvp_room_timer_arm(struct kvp_rooms *rooms);

/* room_drain.c */
/* Why no new leg may begin, written to `text`; OK: it may. */
Kvp__Status kvp_room_no_legs(const struct kvp_rooms *rooms, char *text, size_t bytes);

/* room_walk.c */
/* It leaves the list of all: a walk that is about to come to it goes on behind it. */
void kvp_room_walk_leave(struct kvp_room *room);

/* room_history.c */
void kvp_room_history_add(struct kvp_room *room);
void kvp_room_view_fill(const struct kvp_room *room, struct kvp_room_view *view);
uint32_t kvp_room_waits(const struct kvp_room *room, uint64_t *since_ns);
