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
 * the board or to anything that came with the object, and the loop may free.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/inbox.h"

enum kvp_board_kind {
	KVP_BOARD_POOL,
	KVP_BOARD_FENCE,
	KVP_BOARD_EP,
	KVP_BOARD_RX, /* destination end of a room */
	KVP_BOARD_TX, /* sender end of a room */
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
	KVP_WAITS_N,
};

enum {
	KVP_BOARD_FAILED = 1u << 0,   /* status, text are set; written once */
	KVP_BOARD_COMPLETE = 1u << 1, /* rx: everything landed and visible. tx: all delivered, last included */
	KVP_BOARD_QUIET = 1u << 2,    /* the lane is done with the object for good */
	KVP_BOARD_RECALLED = 1u << 3, /* tx: `recalled_from` answers the recall order */
};

#define KVP_BOARD_TEXT 192u

struct kvp_board {
	struct kvp_node node;        /* in the loop's inbox while `posted` */
	_Atomic bool posted;
	uint32_t kind;               /* enum kvp_board_kind; fixed */
	uint64_t id;                 /* of the loop's object; fixed */

	_Atomic uint32_t flags;
	uint32_t status;             /* Kvp__Status; before FAILED */
	char text[KVP_BOARD_TEXT];   /* before FAILED */

	_Atomic uint32_t source_free;   /* tx: chunks [0, n) are packed or dropped for every leg */
	_Atomic uint32_t delivered;     /* tx: chunks [0, n) have landed at every leg */
	_Atomic uint32_t recalled_from; /* tx */
	_Atomic uint64_t arrived;       /* rx: contiguous end position present in all entries */
	_Atomic uint64_t progress;      /* grows with everything that moves */

	_Atomic uint32_t waits;         /* enum kvp_wait */
	_Atomic uint64_t waits_since_ns; /* CLOCK_MONOTONIC */

	/* Stage times, CLOCK_MONOTONIC ns, 0 = not yet. */
	_Atomic uint64_t first_want_ns, first_grant_ns, first_data_ns, last_landed_ns;
	/* Work done. */
	_Atomic uint64_t pieces, bytes, raw_rows, gather_ns;
};
