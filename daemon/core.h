/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the sessions and the displays share with the daemon that owns it. Loop thread only. */

#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#include <uv.h>

#include "daemon/config.h"
#include "daemon/fence.h"
#include "daemon/lane.h"
#include "daemon/peer.h"
#include "daemon/pool.h"
#include "daemon/room.h"

#define KVP_CORE_LANES 16u

struct kvp_server;

struct kvp_core {
	uv_loop_t *loop;
	const struct kvp_config *config;
	const char *config_path;                /* "": built-in values */
	uint8_t incarnation[16];                /* random; of this process */
	uint64_t started_ns;                    /* CLOCK_MONOTONIC */
	int pidfd;                              /* of this process; -1: the kernel has none */
	struct kvp_lane *lanes[KVP_CORE_LANES]; /* owned; 0 is the host lane */
	const char *lane_names[KVP_CORE_LANES];
	uint32_t n_lanes;
	struct kvp_peers *peers; /* owned */
	struct kvp_rooms *rooms; /* owned */
	struct kvp_pools pools;
	struct kvp_fences fences;
	struct kvp_server *server; /* owned */
	bool stopping;
	/* A request has been handled: the lanes may have work to be watched. */
	void (*touched)(struct kvp_core *core);
	void *touched_arg;
	uint64_t lanes_stuck; /* times that a lane was found stuck */
	/* 1 more than the turns of each lane when it was found so last: until then it still is. */
	uint64_t stuck_at[KVP_CORE_LANES];
};

/* Hands what a lane has said to whom it is about; false: it is about the lane itself, and still to
 * be taken. */
bool kvp_core_board(struct kvp_core *core, struct kvp_board *board);

static inline uint64_t kvp_core_now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail with this clock */
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}
