/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pools for benchmarks: one source rank, four destination ranks with DCP 4, pages in random order.
 */

#include <stdint.h>

#include "proto/layout.h"

#define ROWS_ENTRIES 7u
#define ROWS_BYTES 576u
#define ROWS_PAGE 64u
#define ROWS_RANKS 4u

struct rows {
	uint32_t n_pages; /* of the source pool; a destination has a quarter */
	uint64_t tokens;
	uint64_t pool_bytes; /* of the source pool, and of all destination pools together */
	unsigned char *src, *dst;
	unsigned char *dst_map[ROWS_RANKS];
	struct kvp_entry src_entries[ROWS_ENTRIES], dst_entries[ROWS_ENTRIES];
	struct kvp_pair pairs[ROWS_ENTRIES];
	uint32_t *src_pages, *dst_pages[ROWS_RANKS];
	struct kvp_side src_side, dst_sides[ROWS_RANKS];
	uint64_t starts[1];
	struct kvp_leg_geom legs[ROWS_RANKS];
};

/* Memory that a forked process shares, every page touched. Exits when there is none. */
unsigned char *rows_memory(uint64_t bytes, int fill);

/* The numbers below n in random order; the caller's (free). */
uint32_t *rows_shuffled(uint32_t n, uint64_t seed);

/* Makes the pools in such memory; n_pages is a multiple of four. */
void rows_make(struct rows *rows, uint32_t n_pages);

/* Exits unless every row is where it belongs. Knows nothing of the planner. */
void rows_check(const struct rows *rows, const char *what);

/* Seconds, and the median of n of them (which it sorts). */
double rows_now(void);
double rows_median(double *values, uint32_t n);
