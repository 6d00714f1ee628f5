/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Nodes for tests of rooms: peers, rooms, a real lane and pools in memfds, all in one process and
 * on one loop. Rows say which layer and position they are of; the checker places them by counting.
 */

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/peer.h"
#include "daemon/room.h"
#include "tests/support_clock.h"

#define SR_HANDLES 64u
#define SR_MS UINT64_C(1000000)

/* The last event of one handle. */
struct sr_end {
	Kvp__RoomState state;
	bool complete, failed, released, retry;
	Kvp__Status status;
	char reason[256];
	uint32_t source_free, delivered, meta_bytes;
	uint64_t arrived, prefix, end;
	uint8_t meta[64];
	uint32_t events;
};

struct sr_node {
	uv_loop_t *loop;
	struct kvp_config config;
	uint8_t incarnation[16];
	struct kvp_inbox inbox;
	uv_async_t wake;
	struct kvp_lane *lanes[1];
	struct kvp_peers *peers;
	struct kvp_rooms *rooms;
	struct kvp_pools pools;
	struct kvp_room_owner owner;
	struct kvp_lists lists;
	struct sr_end ends[SR_HANDLES]; /* by handle */
	uint32_t next_list, next_pool;
	bool deaf;                                /* events are not read */
	const struct kvp_net_verbs_config *verbs; /* borrowed; for that transport */
	uint32_t mode;                            /* enum kvp_data_mode */
	char err[256];
	Kvp__Status recall_status;
	uint32_t recall_from, recalls;
};

/* Sets defaults (short heartbeats); change config before the start. */
void sr_init(struct sr_node *node, uv_loop_t *loop, uint8_t id);
/* `net` (NULL: local mode only): with a data transport and a listening port. */
void sr_start(struct sr_node *node, const struct kvp_net_ops *net);
/* The same where the lane may fail to start: false, with the reason in `err`, and nothing is left.
 */
bool sr_try_start(struct sr_node *node, const struct kvp_net_ops *net);
/* Lets go of everything and runs the loop until it is gone. Pools are freed. */
void sr_stop(struct sr_node *node);
/* Runs the loop once, at most a few milliseconds, and reads events. */
void sr_step(struct sr_node *a, struct sr_node *b);
void sr_run(struct sr_node *a, struct sr_node *b, uint64_t ns);

/* Runs until the condition holds; asserts that it does within 10 s. */
#define SR_UNTIL(a, b, cond)                                            \
	do {                                                            \
		uint64_t give_up_ = support_clock_ns() + 10000 * SR_MS; \
		while (!(cond) && support_clock_ns() < give_up_)        \
			sr_step(a, b);                                  \
		cr_assert(cond, "%s", #cond);                           \
	} while (0)

/* ---- pools ------------------------------------------------------------------------------------
 */

struct sr_shape {
	uint32_t page, dcp_size, dcp_rank, n_pages, layers, row_bytes;
	uint64_t blob_bytes; /* one more entry, 0: none */
	const char *tag;     /* NULL: "tag" */
};

struct sr_pool {
	struct sr_shape shape;
	struct kvp_pool *pool;
	uint8_t *mem;
	uint64_t bytes;
};

void sr_pool_make(struct sr_pool *pool, struct sr_node *node, const struct sr_shape *shape);
void sr_pool_free(struct sr_pool *pool);
uint8_t *sr_blob(struct sr_pool *pool);
/* Rows of positions [from, to) with pages[] from pos0 on: written, or asserted to be there. */
void sr_pool_fill(struct sr_pool *pool, const uint32_t *pages, uint64_t pos0, uint64_t from,
		  uint64_t to);
void sr_pool_check(const struct sr_pool *pool, const uint32_t *pages, uint64_t pos0, uint64_t from,
		   uint64_t to);

/* ---- requests ---------------------------------------------------------------------------------
 */

struct sr_expect {
	uint64_t handle, room;
	uint32_t dest;
	const uint32_t *pages;
	uint32_t n_pages;
	uint64_t pos0, first, prefix, end;
	struct {
		const char *address;
		uint32_t sender, n_dests;
		bool none;
	} senders[4];
	uint32_t n_senders;
	int32_t meta_from; /* 0 in here is -1; else sender + 1 */
	uint32_t n_segments;
	Kvp__ExpectSegment segments[4];
	const char *key;
	Kvp__Timers timers;
};
Kvp__Status sr_expect(struct sr_node *node, struct sr_pool *pool, const struct sr_expect *expect);

struct sr_open {
	uint64_t handle, room;
	uint32_t sender;
	const char *key;
	const uint8_t *mask;
	uint32_t mask_bytes;
	Kvp__Timers timers;
};
Kvp__Status sr_open(struct sr_node *node, struct sr_pool *pool, const struct sr_open *open);

struct sr_chunk {
	uint64_t handle;
	uint32_t seq;
	uint64_t start, tokens, pos0;
	const uint32_t *pages;
	uint32_t n_pages;
	bool no_side;
	const uint8_t *set;
	uint32_t set_bytes;
	bool last;
	struct kvp_room_fence fence;
	uint64_t fence_value;
	uint32_t n_segments;
	Kvp__SubmitSegment segments[4];
	const char *meta;
};
Kvp__Status sr_submit(struct sr_node *node, const struct sr_chunk *chunk);
Kvp__Status sr_abort(struct sr_node *node, uint64_t handle);
Kvp__Status sr_recall(struct sr_node *node, uint64_t handle, uint32_t seq);
