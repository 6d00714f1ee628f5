/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Fences: 64-bit timeline words in a client's memfd that say when rows may be read. The daemon only
 * reads them. Loop thread only.
 *
 * A fence ends like a pool: its lanes answer KVP_BOARD_QUIET, then it is unmapped and freed.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/board.h"
#include "daemon/lane.h"
#include "daemon/memfd.h"

#define KVP_FENCE_LANES 16u

struct kvp_fence;

/* What one lane has of a fence. */
struct kvp_fence_part {
	struct kvp_board board; /* kind FENCE, id = that of the fence */
	struct kvp_fence *fence;
	struct kvp_order_id *end_order; /* owned; NULL once it has gone out */
};

struct kvp_fence {
	uint64_t id;        /* the lanes' name of it */
	uint32_t client_id; /* the client's name of it */
	uint32_t n_words;
	bool ending;
	struct kvp_memfd mem;                         /* owned */
	struct kvp_fence_part parts[KVP_FENCE_LANES]; /* of each lane */
	uint32_t n_parts, n_quiet;
	void (*ended)(void *arg); /* just before the free; may be NULL */
	void *ended_arg;
	struct kvp_fences *fences;     /* borrowed */
	struct kvp_fence *prev, *next; /* of its session (utlist) */
};

/* All fences of the daemon; embedded. */
struct kvp_fences {
	struct kvp_lane *const *lanes; /* borrowed [n_lanes]; each polls the words of its rooms */
	uint32_t n_lanes;
	uint32_t n;
	uint64_t last_id;
};

#define KVP_FENCE_ERR 256u

/* Seals, measures and maps the memfd, which stays the caller's. Unless STATUS_OK nothing has
 * changed and `err` (KVP_FENCE_ERR bytes) says why. */
Kvp__Status kvp_fence_register(struct kvp_fences *fences, const Kvp__FenceRegister *msg, int fd,
			       struct kvp_fence **out, char *err);
/* No chunk may name it any more; ended() (may be NULL) runs when it is unmapped, then it is freed.
 * The caller has taken it out of its list. */
void kvp_fence_end(struct kvp_fence *fence, void (*ended)(void *arg), void *arg);
/* A board of kind FENCE was taken from the loop's inbox. */
void kvp_fence_board(struct kvp_board *board);
