/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The planner: which rows move between two ends that see the same tokens in different pages.
 *
 * Integers only: no allocation, no I/O, no state. Every function may be called on any thread.
 *
 * Words. P: tokens in a page. N: DCP size. W = P * N: tokens in a virtual page. I: interleave. The
 * owner of position p is rank (p / I) % N; a rank's rows of one virtual page fill one of its own
 * pages densely, in position order. A row is named by page and slot, or by page * P + slot.
 */

#include <stdbool.h>
#include <stdint.h>

/* Positions end below this, so that no sum of two of them overflows. */
#define KVP_POS_MAX (UINT64_C(1) << 62)

/*
 * Two ends whose turns repeat against each other only after more steps than this are refused as
 * geometry: it bounds the time of every function here whatever a client or a peer says. With an
 * interleave of 1 on both ends, or one end without DCP, there is no such limit.
 */
#define KVP_PLAN_STEPS_MAX 1024u

#define KVP_DCP_MAX 65536u /* ranks */

/* How one end sees the tokens of a group. */
struct kvp_side {
	uint32_t page;         /* P, at least 1 */
	uint32_t dcp_size;     /* N, 1 .. KVP_DCP_MAX; page * dcp_size fits 32 bits */
	uint32_t dcp_rank;     /* below dcp_size */
	uint32_t interleave;   /* I, at least 1, divides page */
	uint64_t pos0;         /* position of the first token of pages[0], a multiple of W */
	const uint32_t *pages; /* [n_pages] page numbers, borrowed; NULL: 0, 1, 2, ... */
	uint32_t n_pages;      /* also counts when pages is NULL; KVP_PAGES_ANY: no limit */
};

#define KVP_PAGES_ANY UINT32_MAX

/* Why a plan is refused. Tests look at the source first, then the destination. */
enum kvp_plan_error {
	KVP_PLAN_OK,
	KVP_PLAN_GEOMETRY, /* zero or too large sizes, rank outside, interleave not dividing page */
	KVP_PLAN_ALIGNMENT, /* pos0 is not a multiple of W */
	KVP_PLAN_SRC_RANGE, /* tokens outside the source's pages, or past KVP_POS_MAX */
	KVP_PLAN_DST_RANGE, /* tokens outside the destination's pages */
};

/* "ok", "geometry", "alignment", "src_range", "dst_range". */
const char *kvp_plan_error_name(enum kvp_plan_error error);

/* Tests one side's geometry and alignment: KVP_PLAN_OK, _GEOMETRY or _ALIGNMENT. */
enum kvp_plan_error kvp_side_check(const struct kvp_side *side);

/*
 * Tests what every function below takes for granted, for any values in the structs: each side's
 * geometry, then its alignment, then both against each other; then, unless tokens is 0, that
 * [start, start + tokens) lies within the source's pages, then the destination's.
 */
enum kvp_plan_error kvp_plan_check(const struct kvp_side *src, const struct kvp_side *dst,
				   uint64_t start, uint64_t tokens);

/* Tokens in a virtual page. */
static inline uint64_t kvp_side_vpage(const struct kvp_side *side)
{
	return (uint64_t)side->page * side->dcp_size;
}

/* The same tokens and page list for a replicated entry: every token's row, pages of W rows. */
struct kvp_side kvp_side_replicated(const struct kvp_side *side);

/* Rows of [start, start + tokens) that the side owns. The side is valid (kvp_side_check). */
uint64_t kvp_side_rows(const struct kvp_side *side, uint64_t start, uint64_t tokens);

/* The slot of `pos` in its page, and the index in the side's page list. The side owns pos. */
uint32_t kvp_side_slot(const struct kvp_side *side, uint64_t pos);
uint64_t kvp_side_page_idx(const struct kvp_side *side, uint64_t pos);

/*
 * Rows of [start, start + tokens) that the source holds and the destination owns: exact, and in
 * constant time or at most KVP_PLAN_STEPS_MAX steps. Page lists, pos0 and n_pages do not matter.
 */
uint64_t kvp_rows_count(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
			uint64_t tokens);

/*
 * A bound on kvp_rows_count() over every start: never too low, never falls as tokens grow, and
 * exact unless both ends have DCP with different turns, one of them longer than a token.
 */
uint64_t kvp_rows_worst(const struct kvp_side *src, const struct kvp_side *dst, uint64_t tokens);

/* How many steps kvp_rows_count() may take for these ends: 1 .. KVP_PLAN_STEPS_MAX. */
uint64_t kvp_rows_count_steps(const struct kvp_side *src, const struct kvp_side *dst);

/* True if a position in [start, start + tokens) is held by both `a` and `b` and owned by `dst`. */
bool kvp_rows_clash(const struct kvp_side *a, const struct kvp_side *b, const struct kvp_side *dst,
		    uint64_t start, uint64_t tokens);

/* How many steps that may take, which three ends with different turns leave without a limit. */
uint64_t kvp_rows_clash_steps(const struct kvp_side *a, const struct kvp_side *b,
			      const struct kvp_side *dst, uint64_t tokens);

/* Rows in position order, within one page on each side: row k is at slot + k * step. */
struct kvp_run {
	uint64_t pos; /* of the first row */
	uint32_t src_page, src_slot, src_step;
	uint32_t dst_page, dst_slot, dst_step;
	uint32_t n; /* rows, at least 1 */
};

/* Who owns which positions: the part of a side that page lists do not touch. Private. */
struct kvp_own {
	uint64_t cycle; /* turn * ranks */
	uint32_t turn, ranks, rank;
};

/* One end of an iterator: where its next row is. Private. */
struct kvp_rows_end {
	const uint32_t *pages;
	uint64_t page0; /* owned pages below pages[0] */
	uint64_t idx;   /* in pages */
	uint32_t page, slot, step;
};

/* A walk over the runs of a plan. Embedded by the caller, no clean-up; fields are private. */
struct kvp_rows_iter {
	struct kvp_own src_own, dst_own;
	struct kvp_rows_end src, dst;
	uint64_t end;      /* position */
	uint64_t left;     /* rows not returned yet, in all */
	uint64_t seg_left; /* rows not returned yet at constant steps */
	uint64_t pos;      /* of the next row; when `same`, its index among the owner's rows */
	uint64_t pos_step;
	bool same; /* both ends own the same positions */
};

/*
 * Begins a walk over the rows that kvp_rows_count() counts. The plan has passed kvp_plan_check();
 * the page lists, if any, stay valid and unchanged during the walk.
 */
void kvp_rows_begin(struct kvp_rows_iter *it, const struct kvp_side *src,
		    const struct kvp_side *dst, uint64_t start, uint64_t tokens);

/*
 * Writes the next run and returns true; false when all rows have been returned. From no DCP to any
 * (or back) at interleave 1, and between equal owners, a run ends only where a page ends.
 */
bool kvp_rows_next(struct kvp_rows_iter *it, struct kvp_run *run);

/* A write of packed rows: rows packed .. packed + n - 1 go to destination rows dst_row, ... */
struct kvp_packed_run {
	uint64_t packed, dst_row, n;
};

/* A walk over the writes that a plan takes once its rows are packed. Fields are private. */
struct kvp_packed_iter {
	struct kvp_rows_iter rows;
	struct kvp_run run; /* what is left of it */
	uint64_t packed;    /* index of the next row */
	uint32_t dst_page;  /* rows of a destination page */
};

/* Begins and continues that walk, like kvp_rows_begin() and kvp_rows_next(). */
void kvp_packed_begin(struct kvp_packed_iter *it, const struct kvp_side *src,
		      const struct kvp_side *dst, uint64_t start, uint64_t tokens);
bool kvp_packed_next(struct kvp_packed_iter *it, struct kvp_packed_run *out);

/*
 * How many writes the rows of one dense entry take: raw, where a write ends when the source row or
 * the destination row does not advance by one; packed, where only the destination counts.
 */
uint64_t kvp_raw_runs(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
		      uint64_t tokens);
uint64_t kvp_packed_runs(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
			 uint64_t tokens);
