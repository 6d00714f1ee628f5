/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lanes without a loop: pools, rooms and chunks as a test describes them, the orders that the loop
 * would give, and a checker that places every row by position with arithmetic of its own.
 *
 * Everything ends the process on failure (lt_die), so that it serves Criterion and plain mains.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/lane.h"
#include "proto/util.h"

#define LT_LANES 10u
#define LT_GROUPS 2u
#define LT_SENDERS 8u
#define LT_DESTS 8u
#define LT_ENTRIES 64u

_Noreturn void lt_die(const char *where, int line, const char *cond, const char *fmt, ...)
	KVP_PRINTF(4, 5);
/* The GPU that every lane gets; NULL: none, the lanes are the host's. */
extern const char *lt_gpu __attribute__((weak));

/* The transport of the next lane with a GPU, in the place of the one given. */
const struct kvp_net_ops *lt_gpu_net(const struct kvp_net_ops *net) __attribute__((weak));

/* What such lanes need to reach a pool's memory. */
void lt_gpu_register(void *mem, uint64_t bytes) __attribute__((weak));
void lt_gpu_unregister(void *mem) __attribute__((weak));

/* What else the lanes of a program are to have; NULL: nothing. */
void lt_configure(struct kvp_lane_config *config) __attribute__((weak));
/* Do packed pieces go straight into pools? */
bool lt_direct(void);

#define LT_REQUIRE(cond, ...)                                               \
	do {                                                                \
		if (!(cond))                                                \
			lt_die(__FILE__, __LINE__, #cond, " " __VA_ARGS__); \
	} while (0)

/* ---- lanes ----------------------------------------------------------------------------------- */

struct lt {
	struct kvp_inbox inbox; /* boards of all lanes */
	int wake_fd;
	struct kvp_lane *lanes[LT_LANES];
	uint32_t n_lanes;
	uint64_t next_id;
};

void lt_begin(struct lt *lt);
/* Adds a lane; fields that are 0 get the rig's defaults. Transport only if `net` is set. */
/* UCX, unless KVP_TEST_NET=verbs: what lanes get that ask for UCX. KVP_TEST_NET=ucx: over RDMA. */
const struct kvp_net_ops *lt_net(void);
/* Fills the devices of tests; is UCX to use them? */
bool lt_rdma(struct kvp_net_verbs_config *verbs);
struct kvp_lane *lt_lane(struct lt *lt, const struct kvp_lane_config *config);
/* Stops the lanes; every object has been ended. */
void lt_end(struct lt *lt);
uint64_t lt_id(struct lt *lt);
/* Takes boards until this one has one of the flags. */
void lt_wait(struct lt *lt, struct kvp_board *board, uint32_t flags);
/* The same for a condition of the test's own, looked at after each board and each millisecond. */
void lt_wait_until(struct lt *lt, bool (*done)(void *arg), void *arg, const char *what);
void lt_order_id(struct kvp_lane *lane, enum kvp_order_type type, uint64_t id, uint32_t value);
/* Switches a test point and waits for the lane to have seen it. */
void lt_hold(struct kvp_lane *lane, enum kvp_hold point, bool on);
/* Waits until that many pieces stand at a test point. */
void lt_wait_held(struct lt *lt, struct kvp_lane *lane, enum kvp_hold point, uint32_t at_least);
struct kvp_lane_status lt_status(struct kvp_lane *lane);
uint64_t lt_now(void);
/* Zeroed memory, never NULL. */
void *lt_alloc(size_t n, size_t bytes);

/* ---- pools ----------------------------------------------------------------------------------- */

/* What a pool's memory is to its lane. */
enum lt_memory {
	LT_HOST, /* mapped by the loop */
	LT_IPC,  /* of a GPU, imported by handle */
	LT_VMM,  /* of a GPU, one chunk */
};

/* A pool of `layers` sharded entries and `repl` replicated ones; entry i is of group i % groups. */
struct lt_shape {
	uint32_t page, dcp_size, dcp_rank, interleave;
	uint32_t n_pages; /* of each entry */
	uint32_t layers, repl, first_layer;
	uint32_t row_bytes;
	uint32_t lo, full_bytes; /* 0: whole rows */
	uint32_t groups;         /* 0: 1 */
	uint64_t blob_bytes;     /* one more entry, 0: none */
	uint64_t seed;           /* of page order */
	uint32_t uid;
	enum lt_memory memory;
	bool dmabuf; /* of a GPU: one comes along */
};

struct lt_pool {
	struct lt *lt;
	struct kvp_lane *lane;
	struct lt_shape shape;
	struct kvp_board board;
	struct kvp_entry entries[LT_ENTRIES];
	uint32_t n_entries, blob; /* index of the blob */
	uint8_t *mem;
	uint64_t bytes;
	int fd;                     /* of the memory */
	uint32_t *pages[LT_GROUPS]; /* [n_pages] in random order */
	struct kvp_side sides[LT_GROUPS];
};

void lt_pool_make(struct lt_pool *pool, struct lt *lt, struct kvp_lane *lane,
		  const struct lt_shape *shape);
/* Writes the rows of positions [from, to) that the pool's side owns. */
void lt_pool_fill(struct lt_pool *pool, uint64_t room, uint64_t from, uint64_t to);
/* Requires that exactly the rows of [from, to), `window` later for group 1, are there, and the
 * background elsewhere; the blob is not looked at. */
void lt_pool_check(const struct lt_pool *pool, uint64_t room, uint64_t from, uint64_t to,
		   uint64_t window);
/* Takes the memory away: a late access crashes. */
void lt_pool_unmap(struct lt_pool *pool);
/* Ends the pool on its lane and frees the rest. */
void lt_pool_end(struct lt_pool *pool);
void lt_blob_fill(uint8_t *to, uint64_t bytes, uint64_t key);
void lt_blob_check(const uint8_t *at, uint64_t bytes, uint64_t key);

/* ---- rooms ----------------------------------------------------------------------------------- */

struct lt_dest {
	struct lt_pool *pool;
	struct kvp_board board; /* id: the generation */
	uint8_t meta[KVP_LANE_META_MAX];
	uint32_t meta_bytes;
};

struct lt_sender {
	struct lt_pool *pool;
	struct kvp_board board;
	uint32_t seq;
	uint64_t next; /* position */
};

/* An endpoint each way between two lanes. */
struct lt_pipe {
	struct kvp_board a, b; /* a: on the first lane, to the second */
	struct kvp_lane *lane_a, *lane_b;
};
void lt_pipe_make(struct lt *lt, struct lt_pipe *pipe, struct kvp_lane *a, struct kvp_lane *b,
		  uint64_t session);
void lt_pipe_end(struct lt *lt, struct lt_pipe *pipe);

struct lt_room {
	struct lt *lt;
	uint64_t room, prefix, end;
	uint64_t window; /* group 1 needs positions from prefix + window on */
	struct lt_sender senders[LT_SENDERS];
	struct lt_dest dests[LT_DESTS];
	uint32_t n_senders, n_dests;
	uint32_t n_segments;
	struct kvp_lane_segment segments[4]; /* at the destination */
	int32_t meta_from;
	uint64_t slot_bytes;   /* for piece_tokens */
	uint32_t piece_tokens; /* 0: what fits slot_bytes */
	bool sums;             /* pieces have sums; not with a GPU */
	/* NULL: local. Else [senders][dests]. */
	struct lt_pipe *pipe; /* one for all */
	bool pipe_reversed;   /* senders are on pipe->lane_b */
};

/* The caller has set room .. meta_from and the pools. Gives all orders up to TX_START. */
void lt_room_begin(struct lt_room *room);
void lt_room_begin_rx(struct lt_room *room);
void lt_room_begin_tx(struct lt_room *room, uint32_t sender);
/* TX_LEG for each destination, and TX_START. */
void lt_room_start_tx(struct lt_room *room, uint32_t sender);

struct lt_chunk {
	uint64_t tokens;
	bool last;
	uint64_t fence;
	uint32_t fence_word;
	uint64_t fence_value;
	const uint64_t *entry_set; /* NULL: all */
	uint64_t start;            /* with an entry_set */
	uint32_t n_segments;
	const struct kvp_lane_segment *segments; /* copied */
	const uint8_t *meta;                     /* copied */
	uint32_t meta_bytes;
};
/* Returns its seq. */
uint32_t lt_submit(struct lt_room *room, uint32_t sender, const struct lt_chunk *chunk);
/* [prefix, end) in chunks of that many tokens. */
void lt_submit_all(struct lt_room *room, uint32_t sender, uint64_t chunk_tokens);
/* Waits until all destinations are complete and all senders have been told. */
void lt_room_complete(struct lt_room *room);
/* Ends all ends and waits for quiet. */
void lt_room_end(struct lt_room *room);
void lt_room_check(struct lt_room *room);
/* The geometry of one leg, as both daemons would compute it. */
struct kvp_lane_geom lt_geom(const struct lt_room *room, uint32_t sender, uint32_t dest);
