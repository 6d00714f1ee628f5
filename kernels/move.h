/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The one kernel: copies rows between two places, each a pool or a slot. Gather, scatter and pool
 * to pool differ only in what the two places are. Shared by C and CUDA C++.
 *
 * A job is a set of runs (what the planner yields) applied to a set of entries. Both tables travel
 * by value as kernel parameters, in several launches where one is too small: no upload, no
 * synchronisation, and no block reads the host's memory over the bus. A slot is a place with
 * page_stride 0 and dense rows.
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
	uint32_t magic;     /* fast division by the units of a row: see entry_magic() */
	uint16_t first_run; /* its runs: [first_run, first_run + n_runs) of the table */
	uint16_t n_runs;
	uint16_t unit_log; /* log2 of the unit in bytes: 4, 3, 2, 1, 0 */
	uint16_t shift;    /* of the fast division */
};

#ifndef KVP_MOVE_THREADS
#define KVP_MOVE_THREADS 288
#endif
#ifndef KVP_MOVE_IN_FLIGHT
#define KVP_MOVE_IN_FLIGHT 2 /* units of a thread on their way at a time */
#endif

/* What every launch has in front of its tables. */
struct kvp_move_head {
	uint32_t n_entries;
	uint32_t widest; /* runs of the entry that has most */
	/* So many pieces have entries with the same sources, in the same order: entry i of piece p
	 * is [p * n_entries / pieces + i]. */
	uint32_t pieces;
	uint32_t zero;
};

/*
 * The same kernel with tables of several sizes, since the driver copies all of them at every
 * launch; at most 32,764 bytes of parameters (CUDA 12.1, sm_70 on). Many entries have few runs in a
 * piece, and the other way round.
 */
#define KVP_MOVE_KERNELS(X)        \
	X(kvp_move_small, 32, 144) \
	X(kvp_move_near, 64, 512)  \
	X(kvp_move_wide, 256, 672) \
	X(kvp_move_tall, 496, 192) \
	X(kvp_move_long, 64, 1200)

#define KVP_MOVE_PARAMS(name, n_entries, n_runs)          \
	struct name##_params {                            \
		struct kvp_move_head head;                \
		struct kvp_move_entry entries[n_entries]; \
		struct kvp_move_run runs[n_runs];         \
	};
KVP_MOVE_KERNELS(KVP_MOVE_PARAMS)
#define KVP_MOVE_PARAMS_MAX 32764u

#define KVP_MOVE_RUNS 1200u       /* of a launch at most, with few entries: */
#define KVP_MOVE_RUNS_ENTRIES 64u /* so many */

/* In which order the kernels are named above. */
enum kvp_move_size {
	KVP_MOVE_SMALL,
	KVP_MOVE_NEAR,
	KVP_MOVE_WIDE,
	KVP_MOVE_TALL,
	KVP_MOVE_LONG,
	KVP_MOVE_SIZES,
};

union kvp_move_params {
	struct kvp_move_head head;
	struct kvp_move_small_params small;
	struct kvp_move_near_params near;
	struct kvp_move_wide_params wide;
	struct kvp_move_tall_params tall;
	struct kvp_move_long_params lengthy;
};
