/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns pieces into the tables of one launch of the move kernel (kernels/move.h). Integers and
 * addresses only: no driver call, nothing is dereferenced, so the tables are tested without a GPU
 * by kvp_jobs_run_host(), the reference that every kernel is compared with.
 *
 * Addresses in kvp_copy_pool.maps and slots are the device's here. The tables are the caller's
 * memory; a batch is used by one thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/copy.h"
#include "kernels/move.h"

/* A block copies at most about this much: runs of long or many rows are split. */
#define KVP_JOBS_RUN_BYTES 32768u
#define KVP_JOBS_ZEROS 4096u
#define KVP_JOBS_RUNS 65535u /* of a table, at most: what an entry can name */

struct kvp_jobs {
	struct kvp_move_entry *entries; /* [max_entries] */
	struct kvp_move_run *runs;      /* [max_runs], KVP_JOBS_RUNS at most */
	uint32_t n_entries, max_entries;
	uint32_t n_runs, max_runs;
	uint32_t widest; /* runs of the entry that has most: the width of the grid */
	uint64_t bytes;  /* that move */
};

/* Empties the tables. */
void kvp_jobs_reset(struct kvp_jobs *jobs);

/* Each adds one piece, all or nothing: 0, or -ENOSPC when the tables are too full for it. */
int kvp_jobs_gather(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint64_t slot);
int kvp_jobs_scatter(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint64_t slot);
/* Pool to pool, for one destination. */
int kvp_jobs_move(struct kvp_jobs *jobs, const struct kvp_move_source *source,
		  const struct kvp_move *move);
/* Plain bytes, such as a segment. */
int kvp_jobs_bytes(struct kvp_jobs *jobs, uint64_t src, uint64_t dst, uint64_t bytes);

/* Zeroes bytes; `zeros` is the address of KVP_JOBS_ZEROS zero bytes. */
int kvp_jobs_zero(struct kvp_jobs *jobs, uint64_t zeros, uint64_t dst, uint64_t bytes);

/* How much of the tables is in launches: zeroes at first. */
struct kvp_jobs_cut {
	uint32_t entry, run; /* the next; run counts from its entry's first */
};

/*
 * Fills the parameters of the next launch: as much as fits one, for the smallest kernel that takes
 * it, whose number it returns in `size`. False when all is in launches. head.widest 0: no entry has
 * rows, and there is nothing to launch.
 */
bool kvp_jobs_params(const struct kvp_jobs *jobs, struct kvp_jobs_cut *cut,
		     union kvp_move_params *params, enum kvp_move_size *size);

/* Does what the kernel does, with the processor; addresses are the host's. */
void kvp_jobs_run_host(const struct kvp_jobs *jobs);
