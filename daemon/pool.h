/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Registered KV pools: what a client registered, its mappings, who holds which page. Loop thread only.
 *
 * ACTIVE -> (pause) ENDING -> PAUSED -> (resume) ACTIVE; (unregister, client death) ENDING -> GONE.
 * ENDING waits for two things, in this order: every room of the pool is over and quiet (n_users is 0),
 * then the lane's KVP_BOARD_QUIET. Only then the memory is unmapped and the request answered.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/board.h"
#include "daemon/lane.h"
#include "proto/layout.h"

#define KVP_POOL_FDS 16u
#define KVP_POOL_LABEL 64u

enum kvp_pool_state { KVP_POOL_ACTIVE, KVP_POOL_ENDING, KVP_POOL_PAUSED };

struct kvp_pool {
	struct kvp_board board;      /* kind POOL, id = `id` */
	uint64_t id;                 /* drawn anew at each register and resume: the lane's name of it */
	uint32_t client_id;          /* the client's name of it */
	uint64_t session;            /* id of the owning session */
	uint32_t uid;
	char client_name[KVP_POOL_LABEL];
	char label[KVP_POOL_LABEL];
	enum kvp_pool_state state;
	struct kvp_lane *lane;       /* home; borrowed */
	uint32_t lane_idx;
	uint8_t tag[64];
	uint32_t tag_bytes;
	bool writable;               /* false: can only send */
	uint32_t n_entries, n_groups, n_fds;
	struct kvp_entry *entries;   /* owned */
	uint32_t group_pages[KVP_LANE_GROUPS]; /* smallest n_pages of the group's entries; 0: no rows */
	uint64_t *held[KVP_LANE_GROUPS];       /* owned bitmaps: page is in an unreleased expectation */
	uint64_t pages_held;
	int fds[KVP_POOL_FDS];       /* owned; -1 while paused */
	uint8_t *maps[KVP_POOL_FDS]; /* owned mappings */
	uint64_t map_bytes[KVP_POOL_FDS];
	uint64_t bytes;              /* of all entries */
	uint32_t n_users;            /* rooms (either end) that are not quiet and released */
	struct kvp_pool *prev, *next; /* list of all pools (utlist) */
	/* Runs once when ENDING has ended (unmapped); the pool may be freed or paused then. */
	void (*ended)(struct kvp_pool *pool, void *arg);
	void *ended_arg;
	bool pausing;                /* ENDING leads to PAUSED */
};

/* Says that a room uses the pool from now on, and no longer; the latter may start the unmap. */
void kvp_pool_get(struct kvp_pool *pool);
void kvp_pool_put(struct kvp_pool *pool);

/*
 * Marks pages of a group as held by an expectation, all or none. 0; -ERANGE: *bad is outside the pool;
 * -EBUSY: *bad is held already (or stands twice in the list).
 */
int kvp_pool_hold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n,
		  uint32_t *bad);
void kvp_pool_unhold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n);
