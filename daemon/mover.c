/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/mover.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/util.h"

int kvp_mover_open(struct kvp_mover *mover, const char *gpu, char *err, size_t err_bytes)
{
	int r = kvp_gpu_open(&mover->gpu, gpu, err, err_bytes);

	if (r < 0)
		return r;
	r = kvp_gpu_imports_create(&mover->imports, mover->gpu);
	if (r < 0)
		(void)snprintf(err, err_bytes, "GPU %s: %s", gpu, strerror(-r));
	return r;
}

void kvp_mover_close(struct kvp_mover *mover)
{
	kvp_gpu_imports_destroy(mover->imports);
	kvp_gpu_close(mover->gpu);
	*mover = (struct kvp_mover){ 0 };
}

/* After a sticky error nothing runs, and nothing ever will: no move has to be waited for. */
static void mover_failed(struct kvp_mover *mover, uint64_t ticket, int r)
{
	mover->failed = ticket;
	if (r != -EIO) {
		mover->last = ticket - 1; /* all before it have ended, and it has not begun */
		return;
	}
	mover->dead = true;
	mover->over = mover->last;
}

static int launch(struct kvp_mover *mover)
{
	uint64_t next = kvp_gpu_next(mover->gpu), ticket;
	int r = kvp_gpu_launch(mover->gpu, &ticket);

	if (r < 0)
		mover_failed(mover, next, r);
	return r;
}

void kvp_mover_launch(struct kvp_mover *mover)
{
	if (mover->gpu && !mover->dead && !mover->failed)
		(void)launch(mover); /* it is kept in the mover */
}

bool kvp_mover_poll(struct kvp_mover *mover)
{
	uint64_t over = mover->over;
	int r;

	if (!mover->gpu || mover->dead || !kvp_mover_busy(mover))
		return mover->failed != 0;
	r = kvp_gpu_poll(mover->gpu, &over);
	if (r < 0)
		mover_failed(mover, mover->over + 1, -EIO); /* nothing says any more what is over */
	else if (over > mover->over)
		mover->over = over;
	else
		return mover->failed != 0;
	return true;
}

bool kvp_mover_ready(struct kvp_mover *mover)
{
	return !mover->gpu || mover->dead || (!mover->failed && kvp_gpu_jobs(mover->gpu));
}

/* One move, whatever it is. */
struct step {
	enum { STEP_GATHER, STEP_SCATTER, STEP_MOVE, STEP_BYTES, STEP_ZERO } kind;
	const struct kvp_copy_piece *piece;
	const struct kvp_move_source *source;
	const struct kvp_move *move;
	uint64_t src, dst, bytes;
};

static int step_add(struct kvp_jobs *jobs, const struct step *step)
{
	switch (step->kind) {
	case STEP_GATHER:
		return kvp_jobs_gather(jobs, step->piece, step->dst);
	case STEP_SCATTER:
		return kvp_jobs_scatter(jobs, step->piece, step->src);
	case STEP_MOVE:
		return kvp_jobs_move(jobs, step->source, step->move);
	case STEP_ZERO:
		return kvp_jobs_zero(jobs, step->src, step->dst, step->bytes);
	default:
		return kvp_jobs_bytes(jobs, step->src, step->dst, step->bytes);
	}
}

/* Adds it to the tables at hand, or to the next ones when these are too full. */
static int add(struct kvp_mover *mover, const struct step *step, uint64_t *ticket)
{
	for (;;) {
		/* Until the lane has ended what was in it, a failed launch's ticket must not be
		 * given to others. */
		struct kvp_jobs *jobs =
			mover->dead || mover->failed ? NULL : kvp_gpu_jobs(mover->gpu);
		bool empty;

		if (!jobs)
			return mover->dead ? -EIO : -EAGAIN;
		empty = jobs->n_entries == 0;
		if (step_add(jobs, step) == 0)
			break;
		if (empty)
			return -E2BIG;
		if (launch(mover) < 0)
			return -EAGAIN; /* who was in it fails; this one tries again */
	}
	*ticket = kvp_gpu_jobs(mover->gpu)->n_entries ? kvp_gpu_next(mover->gpu) : 0;
	mover->last = KVP_MAX(mover->last, *ticket);
	return 0;
}

int kvp_mover_gather(struct kvp_mover *mover, const struct kvp_copy_piece *piece, uint8_t *slot,
		     uint64_t *ticket)
{
	const struct step step = { STEP_GATHER, .piece = piece, .dst = (uintptr_t)slot };

	if (mover->gpu)
		return add(mover, &step, ticket);
	kvp_gather(piece, slot);
	*ticket = 0;
	return 0;
}

int kvp_mover_scatter(struct kvp_mover *mover, const struct kvp_copy_piece *piece,
		      const uint8_t *slot, uint64_t *ticket)
{
	const struct step step = { STEP_SCATTER, .piece = piece, .src = (uintptr_t)slot };

	if (mover->gpu)
		return add(mover, &step, ticket);
	kvp_scatter(piece, slot);
	*ticket = 0;
	return 0;
}

int kvp_mover_move(struct kvp_mover *mover, const struct kvp_move_source *source,
		   const struct kvp_move *move, uint64_t *ticket)
{
	const struct step step = { STEP_MOVE, .source = source, .move = move };

	if (mover->gpu)
		return add(mover, &step, ticket);
	kvp_move(source, move, 1);
	*ticket = 0;
	return 0;
}

int kvp_mover_bytes(struct kvp_mover *mover, const uint8_t *src, uint8_t *dst, uint64_t bytes,
		    uint64_t *ticket)
{
	const struct step step = { STEP_BYTES, .src = (uintptr_t)src, .dst = (uintptr_t)dst,
				   .bytes = bytes };

	if (mover->gpu)
		return add(mover, &step, ticket);
	memcpy(dst, src, bytes);
	*ticket = 0;
	return 0;
}

int kvp_mover_zero(struct kvp_mover *mover, const uint8_t *dst, uint64_t bytes, uint64_t *ticket)
{
	const struct step step = { STEP_ZERO, .src = mover->zeros, .dst = (uintptr_t)dst,
				   .bytes = bytes };

	return add(mover, &step, ticket);
}

int kvp_mover_called(struct kvp_mover *mover, int r)
{
	if (r == -EIO && !mover->dead)
		mover_failed(mover, mover->last + 1, r);
	return r;
}

int kvp_mover_write(struct kvp_mover *mover, uint8_t *dst, const void *src, uint64_t bytes)
{
	return mover->dead ? -EIO
			   : kvp_mover_called(
				     mover, kvp_gpu_write(mover->gpu, (uintptr_t)dst, src, bytes));
}

int kvp_mover_flush(struct kvp_mover *mover)
{
	return mover->dead ? -EIO : kvp_mover_called(mover, kvp_gpu_flush(mover->gpu));
}
