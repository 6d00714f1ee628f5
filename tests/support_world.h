/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Random worlds: a source rank, up to four destination ranks, and their pools in memory, with any
 * strides, widths, byte ranges and page orders; and where every row belongs, by counting.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/copy.h"
#include "daemon/jobs.h"

#define ENTRIES 3u
#define RANKS_MAX 4u

struct world {
	struct kvp_entry src_entries[ENTRIES], dst_entries[ENTRIES];
	struct kvp_pair pairs[4 * ENTRIES];
	uint32_t n_pairs, n_ranks;
	uint64_t start, tokens, positions, dst_start;
	struct kvp_side src, dst[RANKS_MAX], src_bare, dst_bare[RANKS_MAX];
	uint32_t src_pages[256], dst_pages[RANKS_MAX][256];
	unsigned char *src_maps[2], *dst_maps[RANKS_MAX][2], *want[RANKS_MAX][2];
	uint64_t src_bytes, dst_bytes;
	struct kvp_leg_geom legs[RANKS_MAX];
};

/* Where the pools' memory comes from, if a program has a place of its own for it. */
unsigned char *world_memory(size_t bytes) __attribute__((weak));
void world_memory_free(void *at) __attribute__((weak));

/* Below that number; the same sequence in every run. */
uint32_t world_draw(uint32_t below);
void world_fill(unsigned char *buf, size_t bytes);
/* Pools are laid out, but have no memory yet. */
void world_make(struct world *w);
/* Gives them memory and the legs; kvp_leg_check() may find fault with these. */
void world_pools(struct world *w);
void world_free(struct world *w);
/* A leg is only good when kvp_leg_check() says so: random turns may not repeat. */
bool world_good(struct world *w);
/* What moves everything at once, and to one rank. */
struct kvp_move_source world_source(const struct world *w);
struct kvp_move world_move(const struct world *w, uint32_t r);
/* The whole range as one piece for a rank, out of the source's pool or into the rank's. `parts` has
 * room for 4 * ENTRIES; returns the piece's bytes in a slot. */
uint64_t world_piece(const struct world *w, uint32_t r, bool gather, struct kvp_part *parts,
		     struct kvp_copy_piece *piece);
/* The same into tables: a piece that has a MiB of the slot for each rank, and all moves. False: the
 * tables are full. */
bool world_add_piece(const struct world *w, uint32_t r, bool gather, struct kvp_jobs *jobs,
		     const unsigned char *slot);
bool world_add_moves(const struct world *w, struct kvp_jobs *jobs);
/* Every byte of all destination pools. Ends the test. */
void world_check(struct world *w, uint32_t round);
