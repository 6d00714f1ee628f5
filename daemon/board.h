/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A board: what a lane tells the loop about one object. State, not a queue.
 *
 * The loop embeds a board in each object that a lane works on and hands the lane a pointer with the
 * order that adds the object. The lane stores values with release order and posts the board: it
 * stands in the loop's inbox at most once however often it changes, so the lane never allocates
 * and the loop is never flooded. The loop reads with acquire order, also at any other time
 * (displays, timers). The lane's last act is KVP_BOARD_QUIET: from then on it holds no pointer to
 * the board or to anything that came with the object. The loop may free when kvp_board_take(), on a
 * board that came out of its inbox, has returned QUIET, and only then: the flag seen at any other
 * time may belong to a board that the lane is still pushing.
 */

#include <stdatomic.h>
#include <stdint.h>

#include "daemon/inbox.h"
#include "proto/util.h"

enum kvp_board_kind {
	KVP_BOARD_POOL,
	KVP_BOARD_FENCE,
	KVP_BOARD_EP,
	KVP_BOARD_RX,    /* destination end of a room */
	KVP_BOARD_TX,    /* sender end of a room */
	KVP_BOARD_GUEST, /* a pool on the lane of another GPU */
	KVP_BOARD_LANE,  /* a lane's own: FAILED when its device is lost to the process */
};

/* What the object waits for now; each is a `waiting` row of kvpackctl with its oldest age. */
enum kvp_wait {
	KVP_WAITS_NOTHING,   /* moving, or over */
	KVP_WAITS_ENGINE,    /* the engine has submitted nothing more (tx) */
	KVP_WAITS_START,     /* chunks are here, destinations are not (tx) */
	KVP_WAITS_FENCE,     /* the engine's stream has not reached the fence (tx) */
	KVP_WAITS_WINDOW,    /* as many wants outstanding as allowed (tx) */
	KVP_WAITS_GRANT,     /* the receiver has granted no slot (tx) */
	KVP_WAITS_PACK_SLOT, /* no free slot in the pack ring (tx) */
	KVP_WAITS_LANDED,    /* sent; the receiver has not confirmed (tx) */
	KVP_WAITS_SENDER,    /* no want from any sender (rx) */
	KVP_WAITS_LAND_SLOT, /* a want is here, no landing slot is free (rx) */
	KVP_WAITS_DATA,      /* granted; the data has not come (rx) */
	KVP_WAITS_HELD,      /* kept at a test point */
	KVP_WAITS_GPU,       /* launched; the GPU has not finished */
	KVP_WAITS_MEMORY,    /* the pool is being made known to the RDMA device (rx) */
	KVP_WAITS_N,
};

/* How the bytes of an end have moved between daemons, a bit each. */
enum {
	KVP_MOVED_LANDING = 1u << 0,
	KVP_MOVED_DIRECT = 1u << 1,
};

/* Why a piece that might have been written directly went by a landing slot (rx). */
enum kvp_why {
	KVP_WHY_NONE,
	KVP_WHY_MODE,    /* data.mode is landing */
	KVP_WHY_SENDER,  /* the sender does not write directly */
	KVP_WHY_PENDING, /* the pool was not registered yet */
	KVP_WHY_MEMORY,  /* the pool cannot be registered */
	KVP_WHY_WINDOWS, /* no window was to be had */
	KVP_WHY_RUNS,    /* too many, or too short, runs */
	KVP_WHY_SUMS,    /* the leg has sums, which are for slots */
	KVP_WHY_UNSEEN,  /* the GPU would not see what a NIC wrote */
	KVP_WHY_N,
};
/* "mode", "sender", ...; and in words. */
const char *kvp_why_name(enum kvp_why why);
const char *kvp_why_text(enum kvp_why why);

enum {
	KVP_BOARD_FAILED = 1u << 0, /* status, text are set; written once */
	KVP_BOARD_COMPLETE =
		1u << 1, /* rx: everything landed and visible. tx: all delivered, last included */
	KVP_BOARD_QUIET = 1u << 2,    /* the lane is done with the object for good */
	KVP_BOARD_RECALLED = 1u << 3, /* tx: `recalled_from` answers the recall order; the loop
				       * clears it (kvp_board_clear) before it orders another */
	KVP_BOARD_READY = 1u << 4,    /* pool with memory of a GPU: it is mapped */
	KVP_BOARD_POSTED = 1u << 31,  /* in the loop's inbox, or on its way there */
};

#define KVP_BOARD_TEXT 192u

struct kvp_board {
	struct kvp_node node; /* in the loop's inbox while POSTED */
	uint32_t kind;        /* enum kvp_board_kind; fixed */
	uint64_t id;          /* of the loop's object; fixed */

	_Atomic uint32_t flags;
	uint32_t status;           /* Kvp__Status; before FAILED */
	char text[KVP_BOARD_TEXT]; /* before FAILED */

	_Atomic uint32_t source_free;   /* tx: chunks [0, n) are packed or dropped for every leg */
	_Atomic uint32_t delivered;     /* tx: chunks [0, n) have landed at every leg */
	_Atomic uint32_t recalled_from; /* tx */
	_Atomic uint64_t arrived;       /* rx: contiguous end position present in all entries */
	_Atomic uint64_t progress;      /* grows with everything that moves */

	_Atomic uint32_t waits;          /* enum kvp_wait */
	_Atomic uint64_t waits_since_ns; /* CLOCK_MONOTONIC */

	/* Stage times, CLOCK_MONOTONIC ns, 0 = not yet. */
	_Atomic uint64_t first_want_ns, first_grant_ns, first_data_ns, last_landed_ns;
	_Atomic uint64_t first_chunk_ns, first_fence_ns, first_packed_ns; /* tx */
	_Atomic uint64_t first_unpack_ns;                                 /* rx */
	/* Work done. */
	_Atomic uint32_t rails_open, rails; /* ep: connections over rails now, and possible ones */
	_Atomic uint64_t pieces, bytes, raw_rows, gather_ns;
	_Atomic uint64_t direct_pieces, direct_bytes; /* of those */
	_Atomic uint32_t moved;                       /* bits, KVP_MOVED_... */
	_Atomic uint32_t fell_back;                   /* rx: the last enum kvp_why */
};

/* The loop, before it hands the board out: everything zero, of that kind and id. */
void kvp_board_init(struct kvp_board *board, enum kvp_board_kind kind, uint64_t id);

/* The loop, on a board that came out of its inbox: it may be posted again from now on. Returns the
 * flags; what was stored before them is visible. */
uint32_t kvp_board_take(struct kvp_board *board);

/* The loop: takes flags back. */
void kvp_board_clear(struct kvp_board *board, uint32_t flags);

/* Any thread: the flags now. */
static inline uint32_t kvp_board_flags(const struct kvp_board *board)
{
	return atomic_load_explicit(&board->flags, memory_order_acquire);
}

/* The lane: sets flags (0: none) and sees to it that the loop looks at the board. With QUIET among
 * them the board is the loop's when this returns. */
void kvp_board_post(struct kvp_board *board, struct kvp_inbox *loop, uint32_t flags);

/* The lane: the object has failed, with a text that names field, value and limit. The first failure
 * stays; after COMPLETE there is none. Returns 1 if this was it, else 0. */
int kvp_board_fail(struct kvp_board *board, struct kvp_inbox *loop, uint32_t status,
		   const char *fmt, ...) KVP_PRINTF(4, 5);

/* The lane: what the object waits for. The time is kept while neither that nor `progress` changes.
 */
void kvp_board_wait(struct kvp_board *board, enum kvp_wait wait, uint64_t now_ns);

/* The lane: counts something that moved; the wait, if any, begins anew. */
void kvp_board_progress(struct kvp_board *board, uint64_t now_ns);

/* "nothing", "engine", "start", ...: for displays. */
const char *kvp_wait_name(enum kvp_wait wait);
