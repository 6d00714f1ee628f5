/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_plan.h"

#include <stdlib.h>

#include "proto/util.h"

uint64_t plan_random(uint64_t *seed)
{
	uint64_t x = *seed += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ x >> 31) * UINT64_C(0xd6e8feb86659fd93);
	x = (x ^ x >> 29) * UINT64_C(0xd6e8feb86659fd93);
	return x ^ x >> 32;
}

static uint32_t below(uint64_t *seed, uint64_t limit)
{
	return (uint32_t)(plan_random(seed) % limit);
}

static struct kvp_side side_make(uint64_t *seed)
{
	static const uint32_t sizes[] = { 1, 1, 1, 2, 3, 4, 6, 8 };
	static const uint32_t pages[] = { 1, 2, 4, 6, 8, 12, 16, 64 };
	struct kvp_side side = { .page = pages[below(seed, KVP_ARRAY_SIZE(pages))],
				 .dcp_size = sizes[below(seed, KVP_ARRAY_SIZE(sizes))],
				 .interleave = 1 };

	side.dcp_rank = below(seed, side.dcp_size);
	if (below(seed, 2)) {
		do
			side.interleave = 1 + below(seed, side.page);
		while (side.page % side.interleave);
	}
	return side;
}

/* Distinct page numbers with some neighbours among them. */
static void pages_make(uint32_t *pages, uint32_t n, uint64_t *seed)
{
	for (uint32_t i = 0; i < n; i++)
		pages[i] = 1 + i;
	for (uint32_t i = 0; i + 1 < n; i++) {
		uint32_t k = below(seed, 2) ? i : i + below(seed, n - i), page = pages[k];

		pages[k] = pages[i];
		pages[i] = page;
	}
}

void plan_case_make(struct plan_case *c, uint64_t *seed)
{
	uint64_t ws, wd;

	c->src = side_make(seed);
	c->dst = side_make(seed);
	if (!below(seed, 8)) { /* equal ends, or two ranks of one */
		c->dst.dcp_size = c->src.dcp_size;
		c->dst.dcp_rank = below(seed, 2) ? c->src.dcp_rank : below(seed, c->src.dcp_size);
		c->dst.page = c->src.page * (1 + below(seed, 2));
		c->dst.interleave = c->src.interleave;
	}
	ws = kvp_side_vpage(&c->src);
	wd = kvp_side_vpage(&c->dst);

	c->dst.pos0 = wd * below(seed, 4);
	c->start = c->dst.pos0 + below(seed, KVP_MIN(3 * wd, UINT64_C(300)) + 1);
	c->tokens = below(seed, 4) ? below(seed, PLAN_CASE_TOKENS + 1) : below(seed, 12);
	c->src.pos0 = c->start - c->start % ws;
	if (c->src.pos0 && below(seed, 3) == 0)
		c->src.pos0 -= ws;

	c->src.n_pages = (uint32_t)KVP_DIV_UP(c->start + c->tokens - c->src.pos0, ws) + 1;
	c->dst.n_pages = (uint32_t)KVP_DIV_UP(c->start + c->tokens - c->dst.pos0, wd) + 1;
	c->src.pages = c->src_pages;
	c->dst.pages = c->dst_pages;
	pages_make(c->src_pages, c->src.n_pages, seed);
	pages_make(c->dst_pages, c->dst.n_pages, seed);
}

bool oracle_owns(const struct kvp_side *side, uint64_t pos)
{
	return pos / side->interleave % side->dcp_size == side->dcp_rank;
}

/* Walks all positions from pos0 and counts what the rank owns of each virtual page. */
struct oracle_side {
	const struct kvp_side *side;
	uint64_t in_page, idx, slot;
};

static bool oracle_step(struct oracle_side *walk, uint64_t pos, uint64_t *row)
{
	const struct kvp_side *side = walk->side;
	bool owns = oracle_owns(side, pos);

	if (owns)
		*row = (uint64_t)side->pages[walk->idx] * side->page + walk->slot++;
	if (++walk->in_page == kvp_side_vpage(side)) {
		walk->in_page = walk->slot = 0;
		walk->idx++;
	}
	return owns;
}

uint64_t oracle_rows(const struct plan_case *c, struct oracle_row *rows)
{
	struct oracle_side src = { .side = &c->src }, dst = { .side = &c->dst };
	uint64_t n = 0;

	if (c->tokens == 0)
		return 0; /* such a chunk may lie outside of all pages */

	for (uint64_t pos = KVP_MIN(c->src.pos0, c->dst.pos0); pos < c->start + c->tokens; pos++) {
		struct oracle_row row = { .pos = pos };
		bool s = pos >= c->src.pos0 && oracle_step(&src, pos, &row.src);
		bool d = pos >= c->dst.pos0 && oracle_step(&dst, pos, &row.dst);

		if (s && d && pos >= c->start)
			rows[n++] = row;
	}
	return n;
}

uint64_t run_src_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k)
{
	return (uint64_t)run->src_page * c->src.page + run->src_slot + k * run->src_step;
}

uint64_t run_dst_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k)
{
	return (uint64_t)run->dst_page * c->dst.page + run->dst_slot + k * run->dst_step;
}

FILE *plan_vectors_open(void)
{
	const char *folder = getenv("KVP_VECTORS"), *top = getenv("KVP_TOP");
	char path[4096];
	FILE *file;

	if (folder)
		(void)snprintf(path, sizeof(path), "%s/plan.jsonl", folder); /* too long: no file */
	else
		(void)snprintf(path, sizeof(path), "%s/../shared/vectors/plan.jsonl",
			       top ? top : ".");
	file = fopen(path, "r");
	if (!file && folder) {
		(void)fprintf(stderr, "%s: %m\n", path);
		abort(); /* a folder that was named has to be there */
	}
	if (!file)
		(void)fprintf(stderr, "no planner vectors here: set KVP_VECTORS to their folder\n");
	return file;
}
