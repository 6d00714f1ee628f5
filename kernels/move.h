/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The one kernel: copies rows between two places, each a pool or a slot. Gather, scatter and pool
 * to pool differ only in what the two places are. Shared by C and CUDA C++.
 *
 * A job is a set of runs (what the planner yields) applied to a set of entries. The run table and
 * the entry table travel by value as kernel parameters, or lie in pinned host memory that the
 * kernel reads: no upload, no synchronisation. A slot is a place with page_stride 0 and dense rows.
 */

#include <stdint.h>

/* Rows k = 0 .. n-1: source slot src_slot + k * src_step of src_page, likewise the destination. */
struct kvp_move_run {
	uint32_t src_page, dst_page;
	uint32_t src_slot, dst_slot;
	uint16_t src_step, dst_step;
	uint32_t n;
};

/* One pair of places. Bytes; addresses are the device's. */
struct kvp_move_entry {
	uint64_t src, dst; /* of page 0, slot 0, byte range offset included */
	uint64_t src_page_stride, dst_page_stride;
	uint32_t src_row_stride, dst_row_stride;
	uint32_t width;     /* bytes of a row that move */
	uint32_t first_run; /* its runs: [first_run, first_run + n_runs) of the table */
	uint32_t n_runs;
	uint32_t magic;    /* fast division by the units of a row: see kvp_move_magic() */
	uint16_t unit_log; /* log2 of the unit in bytes: 4, 3, 2, 1, 0 */
	uint16_t shift;    /* of the fast division */
};

#ifndef KVP_MOVE_THREADS
#define KVP_MOVE_THREADS 96
#endif
#ifndef KVP_MOVE_IN_FLIGHT
#define KVP_MOVE_IN_FLIGHT 6 /* units of a thread on their way at a time */
#endif
#define KVP_MOVE_ENTRIES 64 /* of a launch */
#ifndef KVP_MOVE_RUNS
#define KVP_MOVE_RUNS 512 /* of a launch with the runs by value */
#endif

/*
 * What a launch needs beside the runs. Block (x, y) copies run x of entry y; entries with fewer
 * runs than the grid is wide leave the rest at once.
 */
struct kvp_move_job {
	uint32_t n_entries;
	const struct kvp_move_run *table; /* pinned host memory, as the device sees it */
	struct kvp_move_entry entries[KVP_MOVE_ENTRIES];
};

/* The same with the runs by value: at most 32,764 bytes of parameters (CUDA 12.1, sm_70 on). */
struct kvp_move_near_job {
	struct kvp_move_job job;
	struct kvp_move_run runs[KVP_MOVE_RUNS];
};
