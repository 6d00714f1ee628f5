/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How a lane moves rows: with the processor, at once, or with a GPU, by launches that it polls.
 *
 * A move gets the ticket of its launch; 0 is that of what is done already. Moves of a turn go out
 * together by kvp_mover_launch(), or earlier when the tables of a launch are full. One thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/copy.h"
#include "daemon/gpu.h"
#include "daemon/gpu_import.h"
#include "daemon/ring.h"

struct kvp_mover {
	struct kvp_gpu *gpu;             /* owned; NULL: the processor moves */
	struct kvp_gpu_imports *imports; /* owned, with a GPU */
	uint64_t last;                   /* the newest ticket that a move was given */
	uint64_t over;                   /* tickets up to it are over */
	uint64_t failed;                 /* ticket of a launch that failed; 0: none */
	uint64_t zeros;                  /* device address of KVP_JOBS_ZEROS zero bytes, or 0 */
	bool dead;                       /* the GPU is lost to this process: nothing runs there */
};

/* Opens the GPU (UUID), binding the thread to it. `err` says why not. */
int kvp_mover_open(struct kvp_mover *mover, const char *gpu, char *err, size_t err_bytes);
/* Waits for the GPU; zeroes are fine. */
void kvp_mover_close(struct kvp_mover *mover);

/*
 * Each adds one move. 0 with its ticket; -EAGAIN: as many launches run as may; -E2BIG: it fits the
 * tables of no launch; -EIO: the GPU is lost. Nothing but the bytes of the pieces is touched.
 */
int kvp_mover_gather(struct kvp_mover *mover, const struct kvp_copy_piece *piece, uint8_t *slot,
		     uint64_t *ticket);
int kvp_mover_scatter(struct kvp_mover *mover, const struct kvp_copy_piece *piece,
		      const uint8_t *slot, uint64_t *ticket);
int kvp_mover_move(struct kvp_mover *mover, const struct kvp_move_source *source,
		   const struct kvp_move *move, uint64_t *ticket);
int kvp_mover_bytes(struct kvp_mover *mover, const uint8_t *src, uint8_t *dst, uint64_t bytes,
		    uint64_t *ticket);

/* Zeroes memory of the device; the mover has `zeros`. */
int kvp_mover_zero(struct kvp_mover *mover, const uint8_t *dst, uint64_t bytes, uint64_t *ticket);

/* Copies the host's memory to the device, before any launch after it. 0, or as the GPU says. */
int kvp_mover_write(struct kvp_mover *mover, uint8_t *dst, const void *src, uint64_t bytes);
/* Moves added after it see what NICs have written. */
int kvp_mover_flush(struct kvp_mover *mover);

/* What is not a launch can find the GPU lost, too: gives `r` back, and a sticky error makes the
 * mover dead. */
int kvp_mover_called(struct kvp_mover *mover, int r);

/* Could a move be added now? */
bool kvp_mover_ready(struct kvp_mover *mover);
/* Sends what was added on its way; a failure shows as `failed` or `dead`. */
void kvp_mover_launch(struct kvp_mover *mover);
/* Looks which launches are over: true when some are, or something failed. */
bool kvp_mover_poll(struct kvp_mover *mover);

static inline bool kvp_mover_over(const struct kvp_mover *mover, uint64_t ticket)
{
	return ticket <= mover->over;
}

/* Is anything on its way? */
static inline bool kvp_mover_busy(const struct kvp_mover *mover)
{
	return mover->last > mover->over;
}
