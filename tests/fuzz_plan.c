/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner against the oracle of the tests, which walks positions: what is refused, the rows,
 * their number, and the writes once they are packed.
 */

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/plan.h"
#include "proto/util.h"
#include "tests/support_bytes.h"
#include "tests/support_plan.h"

/* Positions that the oracle may have to walk. */
#define WALK_MAX 20000u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Like assert(), in every build. */
static void require(bool ok)
{
	if (!ok)
		abort();
}

static void take_side(struct bytes *in, struct kvp_side *side, uint32_t *pages)
{
	uint64_t first;

	side->page = (uint32_t)bytes_field(in, 64);
	side->dcp_size = (uint32_t)bytes_field(in, 10);
	side->dcp_rank = (uint32_t)bytes_field(in, 10);
	side->interleave = (uint32_t)bytes_field(in, 10);
	side->pos0 = bytes_field(in, 6);
	if (side->pos0 < 6)
		side->pos0 *= kvp_side_vpage(side);
	side->n_pages = (uint32_t)bytes_field(in, 200);
	first = bytes_field(in, 64);
	side->pages = pages;
	/* Neighbours, and jumps between them. */
	for (uint32_t i = 0; i < PLAN_CASE_PAGES; i++)
		pages[i] = (uint32_t)(first + i + (i % 3 == 2 ? 1000u : 0));
	if (side->n_pages > PLAN_CASE_PAGES)
		side->pages = NULL; /* 0, 1, 2, ... */
}

/* ---- the definition, once more */

static bool fits(const struct kvp_side *side)
{
	return side->page && side->dcp_size && side->dcp_size <= KVP_DCP_MAX &&
	       side->dcp_rank < side->dcp_size && side->interleave &&
	       side->page % side->interleave == 0 &&
	       (uint64_t)side->page * side->dcp_size <= UINT32_MAX;
}

static bool covers(const struct kvp_side *side, unsigned __int128 start, unsigned __int128 end)
{
	unsigned __int128 pages =
		side->n_pages == KVP_PAGES_ANY ? (unsigned __int128)1 << 64 : side->n_pages;

	return start >= side->pos0 && end <= side->pos0 + pages * kvp_side_vpage(side);
}

/* What a plan must be refused for, but for ends that repeat against each other too late. */
static enum kvp_plan_error expected(const struct plan_case *c)
{
	const struct kvp_side *sides[] = { &c->src, &c->dst };
	unsigned __int128 end = (unsigned __int128)c->start + c->tokens;

	for (int i = 0; i < 2; i++) {
		if (!fits(sides[i]))
			return KVP_PLAN_GEOMETRY;
		if (sides[i]->pos0 % kvp_side_vpage(sides[i]))
			return KVP_PLAN_ALIGNMENT;
	}
	if (c->tokens == 0)
		return KVP_PLAN_OK;
	if (end > KVP_POS_MAX || !covers(&c->src, c->start, end))
		return KVP_PLAN_SRC_RANGE;
	return covers(&c->dst, c->start, end) ? KVP_PLAN_OK : KVP_PLAN_DST_RANGE;
}

/* Two ends with DCP and different turns: the only ones that a limit of steps can refuse. */
static bool may_repeat_late(const struct kvp_side *a, const struct kvp_side *b)
{
	return a->dcp_size > 1 && b->dcp_size > 1 &&
	       (a->interleave != b->interleave || a->dcp_size != b->dcp_size) &&
	       (a->interleave > 1 || b->interleave > 1);
}

/* ---- rows */

static bool is_small(const struct plan_case *c)
{
	uint64_t low = KVP_MIN(c->src.pos0, c->dst.pos0);

	return c->src.pages && c->dst.pages && c->tokens <= PLAN_CASE_TOKENS &&
	       c->start + c->tokens - low <= WALK_MAX;
}

/* Writes of rows that were packed one behind the other. */
static uint64_t count_packed(const struct oracle_row *rows, uint64_t n)
{
	uint64_t writes = 0;

	for (uint64_t i = 0; i < n; i++)
		writes += i == 0 || rows[i].dst != rows[i - 1].dst + 1;
	return writes;
}

static uint64_t count_raw(const struct oracle_row *rows, uint64_t n)
{
	uint64_t writes = 0;

	for (uint64_t i = 0; i < n; i++)
		writes += i == 0 || rows[i].dst != rows[i - 1].dst + 1 ||
			  rows[i].src != rows[i - 1].src + 1;
	return writes;
}

static void compare(const struct plan_case *c)
{
	static struct oracle_row rows[PLAN_CASE_TOKENS];
	uint64_t n = oracle_rows(c, rows), at = 0;
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_rows_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	while (kvp_rows_next(&it, &run)) {
		require(run.n > 0 && at < n && run.pos == rows[at].pos);
		for (uint32_t k = 0; k < run.n; k++, at++)
			require(at < n && run_src_row(c, &run, k) == rows[at].src &&
				run_dst_row(c, &run, k) == rows[at].dst);
	}
	require(at == n);
	require(kvp_rows_count(&c->src, &c->dst, c->start, c->tokens) == n);
	require(kvp_rows_worst(&c->src, &c->dst, c->tokens) >= n);
	require(kvp_raw_runs(&c->src, &c->dst, c->start, c->tokens) == count_raw(rows, n));
	require(kvp_packed_runs(&c->src, &c->dst, c->start, c->tokens) == count_packed(rows, n));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct plan_case c;
	struct bytes in = { data, size };
	enum kvp_plan_error want, got;

	take_side(&in, &c.src, c.src_pages);
	take_side(&in, &c.dst, c.dst_pages);
	c.start = bytes_field(&in, 200) + bytes_field(&in, 200);
	c.tokens = bytes_field(&in, 250) * (1 + bytes_field(&in, 2));
	want = expected(&c);
	got = kvp_plan_check(&c.src, &c.dst, c.start, c.tokens);
	/* Sides are looked at one after the other, so that only the kind of an error is fixed. */
	if (got == KVP_PLAN_GEOMETRY && want != got)
		require((fits(&c.src) && fits(&c.dst) && may_repeat_late(&c.src, &c.dst)) ||
			!fits(&c.dst));
	else
		require(want == got);
	if (got != KVP_PLAN_OK)
		return 0;
	if (is_small(&c))
		compare(&c);
	else
		require(kvp_rows_count(&c.src, &c.dst, c.start, c.tokens) <=
			kvp_rows_worst(&c.src, &c.dst, c.tokens));
	return 0;
}
