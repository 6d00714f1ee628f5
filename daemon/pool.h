/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Registered KV pools: what a client registered, its mappings, who holds which page. Loop thread
 * only.
 *
 * STARTING (memory of a GPU only) -> ACTIVE; ACTIVE -> (pause) ENDING -> PAUSED -> (resume) ACTIVE;
 * (unregister, client death) ENDING -> GONE. ENDING waits for two things, in this order: every room
 * of the pool is over and quiet (n_users is 0), then the lane's KVP_BOARD_QUIET. Only then the
 * memory is unmapped and the request answered.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/board.h"
#include "daemon/config.h"
#include "daemon/lane.h"
#include "proto/kvpack.pb-c.h"
#include "proto/layout.h"
#include "proto/limits.h"

#define KVP_POOL_MEMORIES KVP_LIMIT_MEMORIES
#define KVP_POOL_PAGES_MAX (1u << 26) /* of a group: its bitmap stays below 8 MiB */
#define KVP_POOL_LABEL 64u

enum kvp_pool_state {
	KVP_POOL_STARTING, /* memory of a GPU: until its lane has mapped it */
	KVP_POOL_ACTIVE,
	KVP_POOL_ENDING,
	KVP_POOL_PAUSED,
};

enum kvp_guest_state {
	KVP_GUEST_NONE,     /* that lane has nothing of it; `reason` says why, or it is over */
	KVP_GUEST_STARTING, /* until the lane has mapped it, or says why not */
	KVP_GUEST_READY,
};

/* A pool on the lane of a GPU that is not its own. */
struct kvp_pool_guest {
	struct kvp_board board; /* kind GUEST; id: what that lane calls the pool */
	struct kvp_pool *pool;
	struct kvp_lane *lane; /* borrowed */
	uint32_t lane_idx;
	enum kvp_guest_state state;
	char reason[KVP_BOARD_TEXT];
	struct kvp_order_id *end_order; /* owned; NULL once it has gone out */
};

struct kvp_pool {
	struct kvp_board board; /* kind POOL, id = `id` */
	uint64_t id;            /* drawn anew at each register and resume: the lane's name of it */
	uint32_t client_id;     /* the client's name of it */
	uint64_t session;       /* id of the owning session */
	uint32_t uid;
	char client_name[KVP_POOL_LABEL];
	char label[KVP_POOL_LABEL];
	enum kvp_pool_state state;
	struct kvp_lane *lane; /* home; borrowed */
	uint32_t lane_idx;
	uint8_t tag[64];
	uint32_t tag_bytes;
	bool writable; /* false: can only send */
	bool on_gpu;
	uint32_t n_entries, n_groups, n_fds;
	struct kvp_entry *entries;             /* owned */
	uint32_t group_pages[KVP_LANE_GROUPS]; /* smallest n_pages of the group's entries; 0: no
						  rows */
	uint64_t *held[KVP_LANE_GROUPS]; /* owned bitmaps: page is in an unreleased expectation */
	uint64_t pages_held;
	uint8_t *maps[KVP_POOL_MEMORIES]; /* owned mappings of host memory */
	uint64_t map_bytes[KVP_POOL_MEMORIES];
	uint32_t n_dmabufs;                        /* memories of a GPU that came with one */
	char dmabuf_reason[KVP_DMABUF_REASON + 1]; /* why the first without has none */
	uint64_t bytes;                            /* of all entries */
	uint32_t n_users;              /* rooms (either end) that are not quiet and released */
	struct kvp_pool *prev, *next;  /* list of all pools (utlist) */
	struct kvp_pool *session_next; /* list of its session's pools */
	/* Runs once when STARTING is over: OK and ACTIVE, or why not and PAUSED (not to be used but
	 * by kvp_pool_free() or a new resume). Never after kvp_pool_end(). */
	void (*started)(struct kvp_pool *pool, Kvp__Status status, const char *why, void *arg);
	void *started_arg;
	/* Runs once when ENDING has ended (unmapped); the pool may be freed or paused then. */
	void (*ended)(struct kvp_pool *pool, void *arg);
	void *ended_arg;
	bool pausing;                  /* ENDING leads to PAUSED */
	bool ready, quiet;             /* what its lane has said, since it was handed over */
	struct kvp_pool_guest *guests; /* owned [n_guests]; memory of a GPU, where there are more */
	uint32_t n_guests;
	struct kvp_order_id *end_order; /* owned; NULL once it has gone out */
};

/* Says that a room uses the pool from now on, and no longer; the latter may start the unmap. */
void kvp_pool_get(struct kvp_pool *pool);
void kvp_pool_put(struct kvp_pool *pool);

/*
 * Marks pages of a group as held by an expectation, all or none. 0; -ERANGE: *bad is outside the
 * pool; -EBUSY: *bad is held already (or stands twice in the list).
 */
int kvp_pool_hold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n,
		  uint32_t *bad);
void kvp_pool_unhold(struct kvp_pool *pool, uint32_t group, const uint32_t *pages, uint32_t n);

/* A GPU whose pools are refused: its lane could not be started. */
struct kvp_gpu_refusal {
	char uuid[48];
	char reason[200];
};

/* All pools of the daemon; embedded. */
struct kvp_pools {
	const struct kvp_config *config; /* borrowed */
	struct kvp_lane *const *lanes;   /* borrowed [n_lanes]; 0 is the host lane */
	uint32_t n_lanes;
	const struct kvp_gpu_refusal *refusals; /* borrowed [n_refusals] */
	uint32_t n_refusals;
	struct kvp_pool *first; /* utlist */
	uint32_t n;             /* in any state */
	uint64_t refused;       /* for max_pools */
	uint64_t refused_entries;
	uint64_t last_id;
};

/* Who registers. */
struct kvp_pool_client {
	uint64_t session;
	uint32_t uid;
	const char *name;
};

/* Room for any text below. */
#define KVP_POOL_ERR 256u

/*
 * Seals, measures and maps the memfds, checks the entries against them and hands the pool to its
 * lane. The fds stay the caller's; the mappings do not need them. Unless STATUS_OK nothing has
 * changed and `err` (KVP_POOL_ERR bytes) names field, value and limit. With memory of a GPU the
 * pool is STARTING then, and the caller sets started() and started_arg at once.
 */
Kvp__Status kvp_pools_register(struct kvp_pools *pools, const struct kvp_pool_client *client,
			       const Kvp__PoolRegister *msg, const int *fds, uint32_t n_fds,
			       struct kvp_pool **out, char *err);
/* Maps new memory below a PAUSED pool: as many as before, on the same device. As above. */
Kvp__Status kvp_pools_resume(struct kvp_pools *pools, struct kvp_pool *pool,
			     const Kvp__PoolResume *msg, const int *fds, uint32_t n_fds, char *err);
/*
 * ACTIVE or STARTING -> ENDING; the caller fails the pool's rooms next. ended() runs once, later:
 * the memory is unmapped then and the pool PAUSED, to be resumed or freed.
 */
void kvp_pool_end(struct kvp_pool *pool, bool pausing,
		  void (*ended)(struct kvp_pool *pool, void *arg), void *arg);
/* A board of kind POOL was taken from the loop's inbox. */
void kvp_pool_board(struct kvp_board *board);
/* STARTING or ENDING is over once all lanes have answered. */
void kvp_pool_settle(struct kvp_pool *pool);

/* ---- pool_guest.c: on the lanes of other GPUs ------------------------------------------------ */

/* What the lane calls the pool, its own or another that reaches it; 0: it does not. */
uint64_t kvp_pool_on(const struct kvp_pool *pool, uint32_t lane_idx);
/* Does any lane but its own reach it? */
bool kvp_pool_has_guests(const struct kvp_pool *pool);
/* With the order for its own lane, which is about to go there. */
void kvp_pool_guests_start(struct kvp_pools *pools, struct kvp_pool *pool,
			   const struct kvp_order_pool *home);
/* Once no room uses the pool. */
void kvp_pool_guests_end(struct kvp_pool *pool);
bool kvp_pool_guests_answered(const struct kvp_pool *pool);
bool kvp_pool_guests_quiet(const struct kvp_pool *pool);
void kvp_pool_guests_free(struct kvp_pool *pool);
/* A board of kind GUEST was taken from the loop's inbox. */
void kvp_pool_guest_board(struct kvp_board *board);
/* Frees a pool that has ended or is paused. */
void kvp_pool_free(struct kvp_pools *pools, struct kvp_pool *pool);
