/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines with a cache on a GPU (or, to meet them, in the host's memory), on top of
 * tests/support_device: one room at a time, prefill or a rank of decode that owns every n-th token.
 * Step by step, or as the whole life of a process.
 */

#include "tests/support_device.h"

#define END_PAGE 64u
#define END_ROW 576u
#define END_LAYERS 3u
#define END_PAGES 24u /* of the pool that has all tokens; a rank's has its part */
#define END_SECS 30   /* for anything that has to happen */

struct end_plan {
	const struct rig_daemon *daemon;  /* its own; borrowed */
	const struct rig_daemon *prefill; /* that decode waits for; NULL: the same */
	enum device_kind kind;
	int gpu;                /* of its memory, by its ordinal */
	uint32_t n_ranks, rank; /* of decode; without ranks it is prefill */
	uint64_t room, tokens;
	bool bereaved; /* another engine of the room is killed: it does not complete */
};

struct end {
	struct end_plan plan;
	struct kvp_client *client;
	struct rig_pool pool;
	uint32_t pages[END_PAGES];
	struct kvp_side_desc side;
	kvp_room_id id;
};

/* Opens the client, allocates the pool, registers it. */
void end_make(struct end *end, const struct end_plan *plan);
void end_close(struct end *end);
/* The room of the plan, for prefill and for decode. */
void end_open(struct end *end);
void end_expect(struct end *end);
/* Writes the rows of positions [from, to). */
void end_write(struct end *end, uint64_t from, uint64_t to);
/* A chunk, the last one if it ends where the room does; `fence` may be NULL. */
void end_submit(struct end *end, uint64_t from, uint64_t tokens, struct kvp_fence *fence,
		uint64_t value);
/* Requires the end's success, or its failure, if it is bereaved. */
void end_await(struct end *end);
/* The rows below `to` are there, and no other byte was touched. */
void end_check(struct end *end, uint64_t to);

/* An engine's life, of a plan, for rig_rank_start() and rig_fork(): all tokens in one chunk; all
 * bytes checked, unless bereaved. */
void end_prefill(void *plan);
void end_decode(void *plan);

/* The sum of a number over the lanes with a GPU: `part` of a lane, NULL: its own. Below 0: none
 * of them has it. */
double end_lanes(const struct rig_daemon *daemon, const char *part, const char *name);
/* Waits until nothing of the clients' memory on GPUs is mapped. */
void end_unmapped(const struct rig_daemon *daemon);
