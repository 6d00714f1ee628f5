/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/board.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void kvp_board_init(struct kvp_board *board, enum kvp_board_kind kind, uint64_t id)
{
	memset(board, 0, sizeof(*board));
	board->kind = kind;
	board->id = id;
}

uint32_t kvp_board_take(struct kvp_board *board)
{
	return atomic_fetch_and_explicit(&board->flags, ~KVP_BOARD_POSTED, memory_order_acq_rel) &
	       ~KVP_BOARD_POSTED;
}

void kvp_board_clear(struct kvp_board *board, uint32_t flags)
{
	(void)atomic_fetch_and_explicit(&board->flags, ~flags, memory_order_acq_rel);
}

/*
 * One atomic step sets QUIET and learns whether the board already stands in the inbox: if it does,
 * the loop may take and free it at once, so nothing here touches it afterwards.
 */
void kvp_board_post(struct kvp_board *board, struct kvp_inbox *loop, uint32_t flags)
{
	uint32_t old = atomic_fetch_or_explicit(&board->flags, flags | KVP_BOARD_POSTED,
						memory_order_acq_rel);

	if (!(old & KVP_BOARD_POSTED))
		kvp_inbox_push(loop, &board->node);
}

int kvp_board_fail(struct kvp_board *board, struct kvp_inbox *loop, uint32_t status,
		   const char *fmt, ...)
{
	va_list args;

	if (kvp_board_flags(board) & (KVP_BOARD_FAILED | KVP_BOARD_COMPLETE))
		return 0;

	board->status = status;
	va_start(args, fmt);
	(void)vsnprintf(board->text, sizeof(board->text), fmt, args); /* cut texts are fine */
	va_end(args);
	kvp_board_post(board, loop, KVP_BOARD_FAILED);
	return 1;
}

void kvp_board_wait(struct kvp_board *board, enum kvp_wait wait, uint64_t now_ns)
{
	if (atomic_load_explicit(&board->waits, memory_order_relaxed) == wait)
		return;

	atomic_store_explicit(&board->waits_since_ns, now_ns, memory_order_relaxed);
	atomic_store_explicit(&board->waits, wait, memory_order_release);
}

/* Only the lane writes: load and store instead of a locked add. */
void kvp_board_progress(struct kvp_board *board, uint64_t now_ns)
{
	uint64_t progress = atomic_load_explicit(&board->progress, memory_order_relaxed);

	atomic_store_explicit(&board->waits_since_ns, now_ns, memory_order_relaxed);
	atomic_store_explicit(&board->progress, progress + 1, memory_order_release);
}

const char *kvp_wait_name(enum kvp_wait wait)
{
	static const char *const names[KVP_WAITS_N] = {
		[KVP_WAITS_NOTHING] = "nothing",
		[KVP_WAITS_ENGINE] = "engine",
		[KVP_WAITS_START] = "start",
		[KVP_WAITS_FENCE] = "fence",
		[KVP_WAITS_WINDOW] = "window",
		[KVP_WAITS_GRANT] = "grant",
		[KVP_WAITS_PACK_SLOT] = "pack slot",
		[KVP_WAITS_LANDED] = "landed",
		[KVP_WAITS_SENDER] = "sender",
		[KVP_WAITS_LAND_SLOT] = "landing slot",
		[KVP_WAITS_DATA] = "data",
		[KVP_WAITS_HELD] = "test point",
		[KVP_WAITS_GPU] = "gpu",
		[KVP_WAITS_MEMORY] = "memory",
	};

	return (unsigned)wait < KVP_WAITS_N ? names[wait] : "unknown";
}

static const struct {
	const char *name, *text;
} whys[KVP_WHY_N] = {
	[KVP_WHY_NONE] = { "", "" },
	[KVP_WHY_MODE] = { "mode", "data.mode is landing here" },
	[KVP_WHY_SENDER] = { "sender", "the sender does not write directly: its data.mode or "
				       "lane.pack" },
	[KVP_WHY_PENDING] = { "pending", "the RDMA device did not know the pool yet" },
	[KVP_WHY_MEMORY] = { "memory", "the RDMA device does not take the pool's memory" },
	[KVP_WHY_WINDOWS] = { "windows", "no memory window was to be had" },
	[KVP_WHY_RUNS] = { "runs", "too many or too short runs of rows: data.direct_run_bytes" },
	[KVP_WHY_SUMS] = { "sums", "sums travel with slots: data.checksum" },
	[KVP_WHY_UNSEEN] = { "unseen", "the GPU cannot be told to look at what a NIC wrote" },
};

const char *kvp_why_name(enum kvp_why why)
{
	return (unsigned)why < KVP_WHY_N ? whys[why].name : "unknown";
}

const char *kvp_why_text(enum kvp_why why)
{
	return (unsigned)why < KVP_WHY_N ? whys[why].text : "unknown";
}
