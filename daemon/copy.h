/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Moves rows between host pools and slots with the processor.
 *
 * Nothing here allocates, blocks or checks: ranges, pages and parts have passed the planner's
 * checks against the pools that are mapped. Any widths, strides and alignments are right; widths
 * that are multiples of 64 bytes are fast. Safe on any thread; the caller sees to it that nothing
 * else writes to the bytes meanwhile. When a call returns, its writes are visible as ordinary ones
 * are.
 */

#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

/* Rows to copy: row k from src + k * src_stride to dst + k * dst_stride. No overlap of the two. */
struct kvp_copy {
	unsigned char *dst;
	const unsigned char *src;
	uint64_t dst_stride, src_stride; /* bytes */
	uint32_t n;                      /* rows */
};

/* Copies n rows of `width` bytes. For destinations that are read soon: they stay in the cache. */
void kvp_copy_rows(void *dst, uint64_t dst_stride, const void *src, uint64_t src_stride,
		   uint64_t width, uint64_t n);

/*
 * Copies the rows of several runs in turns, one row of each, so that runs that share a source page
 * read it in one pass. Past the cache where the destinations are aligned: for large pools. The
 * writes are ordered before later ones only by kvp_copy_fence().
 */
void kvp_copy_turns(const struct kvp_copy *copies, uint32_t n_copies, uint64_t width);
void kvp_copy_fence(void);

/* One end's pool of a leg. */
struct kvp_copy_pool {
	unsigned char *const *maps;   /* mapped fds, by kvp_entry.fd_idx */
	const struct kvp_side *sides; /* by group, with this end's page lists */
};

/* A piece as kvp_piece_layout() laid it out. */
struct kvp_copy_piece {
	const struct kvp_leg_geom *leg; /* its own sides' page lists and pos0 are not used */
	struct kvp_copy_pool pool; /* the source's for a gather, the destination's for a scatter */
	uint64_t start, tokens;
	const struct kvp_part *parts; /* [n_parts] */
	uint32_t n_parts;
};

/* Copies the piece's rows from the source pool into the slot. */
void kvp_gather(const struct kvp_copy_piece *piece, void *slot);

/* Pieces that one pass over the source fills. */
#define KVP_GATHER_TOGETHER 4u

/*
 * The same for up to KVP_GATHER_TOGETHER pieces of the same tokens of the same source pool, each
 * into its own slot: what several destinations need of a source page is read while it is near.
 */
void kvp_gather_together(const struct kvp_copy_piece *pieces, void *const *slots, uint32_t n);

/* Copies the piece's rows from the slot into the destination pool. */
void kvp_scatter(const struct kvp_copy_piece *piece, const void *slot);

/* A destination of kvp_move(). */
struct kvp_move {
	const struct kvp_leg_geom *leg; /* its own sides' page lists and pos0 are not used */
	struct kvp_copy_pool dst;
};

/* What kvp_move() moves. */
struct kvp_move_source {
	struct kvp_copy_pool src;
	const uint64_t *mask; /* source entries that take part, NULL: all */
	uint32_t n_entries;   /* of the source pool */
	uint64_t start, tokens;
};

/* Destinations that one pass over the source serves; more take more passes. */
#define KVP_MOVE_TOGETHER 32u

/*
 * Copies rows from the source pool straight into the pools of `n_moves` destinations, whose legs
 * all have that source. Give it all destinations of a chunk at once: each source page is then read
 * from memory once, not once a destination.
 */
void kvp_move(const struct kvp_move_source *source, const struct kvp_move *moves, uint32_t n_moves);

/* Bytes that such a call moves for one destination. */
uint64_t kvp_move_bytes(const struct kvp_move_source *source, const struct kvp_move *move);
