/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <criterion/criterion.h>

#include "proto/util.h"
#include "tests/support_plan.h"

/* ---- the cases of the vectors file */

static struct kvp_side side_parse(const cJSON *json, uint32_t *pages)
{
	const cJSON *list = cJSON_GetObjectItem(json, "pages"), *page;
	uint32_t n = 0;

	cJSON_ArrayForEach (page, list)
		pages[n++] = (uint32_t)page->valuedouble;
	return (struct kvp_side){
		.page = (uint32_t)cJSON_GetObjectItem(json, "page")->valuedouble,
		.dcp_size = (uint32_t)cJSON_GetObjectItem(json, "dcp_size")->valuedouble,
		.dcp_rank = (uint32_t)cJSON_GetObjectItem(json, "dcp_rank")->valuedouble,
		.interleave = (uint32_t)cJSON_GetObjectItem(json, "interleave")->valuedouble,
		.pos0 = (uint64_t)cJSON_GetObjectItem(json, "pos0")->valuedouble,
		.pages = pages,
		.n_pages = n,
	};
}

static uint64_t number(const cJSON *array, int idx)
{
	return (uint64_t)cJSON_GetArrayItem(array, idx)->valuedouble;
}

static void case_rows(const char *name, const struct plan_case *c, const cJSON *expect)
{
	const cJSON *row = cJSON_GetObjectItem(expect, "rows")->child;
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_rows_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	while (kvp_rows_next(&it, &run)) {
		for (uint32_t k = 0; k < run.n; k++, row = row->next) {
			cr_assert(row, "%s: more rows than expected", name);
			cr_assert_eq(run_src_row(c, &run, k), number(row, 0), "%s", name);
			cr_assert_eq(run_dst_row(c, &run, k), number(row, 1), "%s", name);
		}
	}
	cr_assert_null(row, "%s: rows missing", name);
}

static void case_packed(const char *name, const struct plan_case *c, const cJSON *expect)
{
	const cJSON *packed = cJSON_GetObjectItem(expect, "packed_runs")->child;
	struct kvp_packed_iter it;
	struct kvp_packed_run run;

	kvp_packed_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	for (; kvp_packed_next(&it, &run); packed = packed->next) {
		cr_assert(packed, "%s: more packed runs than expected", name);
		cr_assert_eq(run.packed, number(packed, 0), "%s", name);
		cr_assert_eq(run.dst_row, number(packed, 1), "%s", name);
		cr_assert_eq(run.n, number(packed, 2), "%s", name);
	}
	cr_assert_null(packed, "%s: packed runs missing", name);
}

static void case_test(const cJSON *json)
{
	static uint32_t pages[2][65536];
	const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(json, "name"));
	const cJSON *expect = cJSON_GetObjectItem(json, "expect");
	const cJSON *error = cJSON_GetObjectItem(expect, "error");
	struct plan_case c = {
		.src = side_parse(cJSON_GetObjectItem(json, "src"), pages[0]),
		.dst = side_parse(cJSON_GetObjectItem(json, "dst"), pages[1]),
		.start = (uint64_t)cJSON_GetObjectItem(json, "start")->valuedouble,
		.tokens = (uint64_t)cJSON_GetObjectItem(json, "tokens")->valuedouble,
	};
	enum kvp_plan_error got = kvp_plan_check(&c.src, &c.dst, c.start, c.tokens);

	if (error) {
		cr_assert_str_eq(kvp_plan_error_name(got), cJSON_GetStringValue(error), "%s", name);
		return;
	}
	cr_assert_eq(got, KVP_PLAN_OK, "%s: %s", name, kvp_plan_error_name(got));
	case_rows(name, &c, expect);
	case_packed(name, &c, expect);
	cr_assert_eq(kvp_rows_count(&c.src, &c.dst, c.start, c.tokens),
		     (uint64_t)cJSON_GetArraySize(cJSON_GetObjectItem(expect, "rows")), "%s", name);
	cr_assert_eq(kvp_raw_runs(&c.src, &c.dst, c.start, c.tokens),
		     (uint64_t)cJSON_GetObjectItem(expect, "raw_runs")->valuedouble, "%s", name);
	cr_assert_eq(kvp_packed_runs(&c.src, &c.dst, c.start, c.tokens),
		     (uint64_t)cJSON_GetArraySize(cJSON_GetObjectItem(expect, "packed_runs")), "%s",
		     name);
}

Test(plan, vectors)
{
	FILE *file = plan_vectors_open();
	char *line = NULL;
	size_t size = 0;
	int n = 0;

	if (!file)
		return;
	while (getline(&line, &size, file) > 0) {
		cJSON *json = cJSON_Parse(line);

		cr_assert(json, "line %d is not JSON", n + 1);
		case_test(json);
		cJSON_Delete(json);
		n++;
	}
	cr_assert_gt(n, 0);
	free(line);
	(void)fclose(file); /* only read */
}

/* ---- random geometries against positions walked one by one */

/* What the oracle saw: the rows, and how many writes they take. */
struct walked {
	struct oracle_row rows[PLAN_CASE_TOKENS];
	uint64_t n, raw, packed;
};

static void walk(const struct plan_case *c, struct walked *w)
{
	w->n = oracle_rows(c, w->rows);
	w->raw = w->packed = 0;
	for (uint64_t i = 0; i < w->n; i++) {
		const struct oracle_row *at = &w->rows[i];
		bool dst_next = i && at->dst == at[-1].dst + 1;

		w->packed += !dst_next;
		w->raw += !(dst_next && at->src == at[-1].src + 1);
	}
}

static void check_rows(const struct plan_case *c, const struct walked *w)
{
	struct kvp_rows_iter it;
	struct kvp_run run;
	uint64_t i = 0;

	kvp_rows_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	for (; kvp_rows_next(&it, &run); i += run.n) {
		cr_assert(run.n && i + run.n <= w->n, CASE_FMT, CASE_ARGS(c));
		cr_assert_eq(run.pos, w->rows[i].pos, CASE_FMT, CASE_ARGS(c));
		cr_assert_lt(run.src_slot + (run.n - 1) * run.src_step, c->src.page);
		cr_assert_lt(run.dst_slot + (run.n - 1) * run.dst_step, c->dst.page);
		for (uint32_t k = 0; k < run.n; k++) {
			cr_assert_eq(run_src_row(c, &run, k), w->rows[i + k].src, CASE_FMT,
				     CASE_ARGS(c));
			cr_assert_eq(run_dst_row(c, &run, k), w->rows[i + k].dst, CASE_FMT,
				     CASE_ARGS(c));
		}
	}
	cr_assert_eq(i, w->n, CASE_FMT, CASE_ARGS(c));
}

static void check_positions(const struct plan_case *c, const struct walked *w)
{
	for (uint64_t i = 0; i < w->n; i++) {
		uint64_t pos = w->rows[i].pos;
		uint64_t idx = kvp_side_page_idx(&c->dst, pos);

		cr_assert_eq((uint64_t)c->dst.pages[idx] * c->dst.page +
				     kvp_side_slot(&c->dst, pos),
			     w->rows[i].dst, CASE_FMT, CASE_ARGS(c));
	}
}

static void check_counts(const struct plan_case *c, const struct walked *w)
{
	struct kvp_side everyone = { .page = 1, .dcp_size = 1, .interleave = 1 };

	cr_assert_eq(kvp_rows_count(&c->src, &c->dst, c->start, c->tokens), w->n, CASE_FMT,
		     CASE_ARGS(c));
	cr_assert_eq(kvp_raw_runs(&c->src, &c->dst, c->start, c->tokens), w->raw, CASE_FMT,
		     CASE_ARGS(c));
	cr_assert_eq(kvp_packed_runs(&c->src, &c->dst, c->start, c->tokens), w->packed, CASE_FMT,
		     CASE_ARGS(c));
	cr_assert_geq(kvp_rows_worst(&c->src, &c->dst, c->tokens), w->n, CASE_FMT, CASE_ARGS(c));
	cr_assert_eq(kvp_side_rows(&c->dst, c->start, c->tokens),
		     kvp_rows_count(&everyone, &c->dst, c->start, c->tokens));
}

Test(plan, random_geometries)
{
	static struct walked w;
	static struct plan_case c;
	uint64_t seed = 1, rows = 0;

	for (int i = 0; i < 20000; i++) {
		plan_case_make(&c, &seed);
		cr_assert_eq(kvp_plan_check(&c.src, &c.dst, c.start, c.tokens), KVP_PLAN_OK,
			     CASE_FMT, CASE_ARGS(&c));
		walk(&c, &w);
		check_rows(&c, &w);
		check_positions(&c, &w);
		check_counts(&c, &w);
		rows += w.n;
	}
	cr_assert_gt(rows, 100000); /* the cases are not empty ones */
}

/* One page more or less than the range needs decides. */
Test(plan, ranges_are_exact)
{
	static struct plan_case c;
	uint64_t seed = 7;

	for (int i = 0; i < 5000; i++) {
		uint64_t ws, wd;

		plan_case_make(&c, &seed);
		if (!c.tokens)
			continue;
		ws = kvp_side_vpage(&c.src);
		wd = kvp_side_vpage(&c.dst);
		c.src.n_pages = (uint32_t)KVP_DIV_UP(c.start + c.tokens - c.src.pos0, ws);
		c.dst.n_pages = (uint32_t)KVP_DIV_UP(c.start + c.tokens - c.dst.pos0, wd);
		cr_assert_eq(kvp_plan_check(&c.src, &c.dst, c.start, c.tokens), KVP_PLAN_OK);
		c.dst.n_pages--;
		cr_assert_eq(kvp_plan_check(&c.src, &c.dst, c.start, c.tokens), KVP_PLAN_DST_RANGE);
		c.src.n_pages--;
		cr_assert_eq(kvp_plan_check(&c.src, &c.dst, c.start, c.tokens), KVP_PLAN_SRC_RANGE);
		cr_assert_eq(kvp_plan_check(&c.src, &c.dst, c.start, 0), KVP_PLAN_OK);
	}
}

/* ---- bounds */

Test(plan, worst_holds_for_every_start)
{
	static struct plan_case c;
	uint64_t seed = 3;

	for (int i = 0; i < 400; i++) {
		bool mixed;
		uint64_t last = 0;

		plan_case_make(&c, &seed);
		mixed = c.src.dcp_size > 1 && c.dst.dcp_size > 1 &&
			(c.src.interleave > 1 || c.dst.interleave > 1);
		for (uint64_t tokens = 0; tokens < 80; tokens += 1 + tokens / 8) {
			uint64_t worst = kvp_rows_worst(&c.src, &c.dst, tokens), most = 0;

			for (uint64_t start = 0; start < 700; start++)
				most = KVP_MAX(most, kvp_rows_count(&c.src, &c.dst, start, tokens));
			cr_assert_geq(worst, most, CASE_FMT, CASE_ARGS(&c));
			cr_assert_geq(worst, last, CASE_FMT, CASE_ARGS(&c));
			if (!mixed)
				cr_assert_eq(worst, most, CASE_FMT, CASE_ARGS(&c));
			last = worst;
		}
	}
}

Test(plan, worst_never_falls)
{
	static struct plan_case c;
	uint64_t seed = 4;

	for (int i = 0; i < 1000; i++) {
		uint64_t last = 0;

		plan_case_make(&c, &seed);
		for (uint64_t tokens = 0; tokens < 300; tokens++) {
			uint64_t worst = kvp_rows_worst(&c.src, &c.dst, tokens);

			cr_assert(worst >= last && worst <= tokens, CASE_FMT, CASE_ARGS(&c));
			last = worst;
		}
	}
}

Test(plan, a_million_tokens_are_split_exactly)
{
	const struct kvp_side src = { .page = 64, .dcp_size = 3, .dcp_rank = 1, .interleave = 16 };
	struct kvp_side dst = { .page = 48, .dcp_size = 8, .interleave = 3 };
	uint64_t sum = 0;

	for (; dst.dcp_rank < dst.dcp_size; dst.dcp_rank++)
		sum += kvp_rows_count(&src, &dst, 12345, 1000003);
	cr_assert_eq(sum, kvp_side_rows(&src, 12345, 1000003));
}

Test(plan, clash)
{
	static struct plan_case c, other;
	uint64_t seed = 5;
	int clashes = 0, n = 20000;

	for (int i = 0; i < n; i++) {
		struct kvp_side third;
		bool want = false;

		plan_case_make(&c, &seed);
		plan_case_make(&other, &seed);
		third = plan_random(&seed) % 2 ? other.src : other.dst;
		c.tokens %= 60;
		for (uint64_t p = c.start; p < c.start + c.tokens; p++)
			want = want || (oracle_owns(&c.src, p) && oracle_owns(&third, p) &&
					oracle_owns(&c.dst, p));
		cr_assert_eq(kvp_rows_clash(&c.src, &third, &c.dst, c.start, c.tokens), want,
			     CASE_FMT, CASE_ARGS(&c));
		clashes += want;
	}
	cr_assert(clashes > n / 10 && clashes < n - n / 10, "%d", clashes);
}

Test(plan, replicated_side_has_every_row)
{
	const uint32_t pages[] = { 7, 3 };
	const struct kvp_side side = { .page = 4,
				       .dcp_size = 2,
				       .dcp_rank = 1,
				       .interleave = 2,
				       .pos0 = 8,
				       .pages = pages,
				       .n_pages = 2 };
	struct kvp_side all = kvp_side_replicated(&side);

	cr_assert_eq(kvp_side_check(&all), KVP_PLAN_OK);
	cr_assert_eq(all.page, 8);
	cr_assert_eq(kvp_side_rows(&all, 8, 16), 16);
	cr_assert_eq(kvp_side_page_idx(&all, 17), 1);
	cr_assert_eq(kvp_side_slot(&all, 17), 1);
	cr_assert_eq(all.pages, pages);
}

/* ---- hostile values */

struct hostile {
	struct kvp_side src, dst;
	uint64_t start, tokens;
	enum kvp_plan_error want;
};

#define GOOD                                                                                   \
	{                                                                                      \
		.page = 64, .dcp_size = 4, .dcp_rank = 3, .interleave = 1, .n_pages = 1u << 20 \
	}
#define SIDE(...)           \
	{                   \
		__VA_ARGS__ \
	}

static const struct hostile hostiles[] = {
	{ GOOD, GOOD, 0, 1, KVP_PLAN_OK },
	{ SIDE(0, 1, 0, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 0, 0, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, 4, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, UINT32_MAX, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, 0, 0, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, 0, 3, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, 0, 128, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(65536, 65536, 0, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(UINT32_MAX, UINT32_MAX, 0, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(UINT32_MAX, 2, 0, 1, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(1, 65537, 0, 1, 0, NULL, 1), GOOD, 0, 0, KVP_PLAN_GEOMETRY },
	{ SIDE(1, UINT32_MAX, 0, 1, 0, NULL, 1), GOOD, 0, 0, KVP_PLAN_GEOMETRY },
	{ SIDE(65521, 2, 0, 65521, 0, NULL, 1), SIDE(65519, 2, 0, 65519, 0, NULL, 1), 0, 1,
	  KVP_PLAN_GEOMETRY },
	{ SIDE(UINT32_MAX, 1, 0, UINT32_MAX, 0, NULL, 1), GOOD, 0, 1, KVP_PLAN_OK },
	{ GOOD, SIDE(0, 1, 0, 1, 0, NULL, 1), 0, 1, KVP_PLAN_GEOMETRY },
	{ SIDE(64, 4, 0, 1, 255, NULL, 1), GOOD, 0, 1, KVP_PLAN_ALIGNMENT },
	{ SIDE(64, 4, 0, 1, UINT64_MAX, NULL, 1), GOOD, 0, 0, KVP_PLAN_ALIGNMENT },
	{ GOOD, SIDE(64, 4, 0, 1, 64, NULL, 1), 0, 0, KVP_PLAN_ALIGNMENT },
	{ GOOD, GOOD, UINT64_MAX, 1, KVP_PLAN_SRC_RANGE },
	{ GOOD, GOOD, 1, UINT64_MAX, KVP_PLAN_SRC_RANGE },
	{ GOOD, GOOD, 0, UINT64_MAX, KVP_PLAN_SRC_RANGE },
	{ GOOD, GOOD, UINT64_MAX, UINT64_MAX, KVP_PLAN_SRC_RANGE },
	{ GOOD, GOOD, UINT64_MAX, 0, KVP_PLAN_OK },
	{ GOOD, GOOD, 0, (256ull << 20) + 1, KVP_PLAN_SRC_RANGE },
	{ GOOD, GOOD, 0, 256ull << 20, KVP_PLAN_OK },
	{ SIDE(64, 1, 0, 1, 0, NULL, KVP_PAGES_ANY), GOOD, 0, (256ull << 20) + 1,
	  KVP_PLAN_DST_RANGE },
	{ SIDE(64, 1, 0, 1, 1ull << 63, NULL, KVP_PAGES_ANY), GOOD, 1ull << 63, 1,
	  KVP_PLAN_SRC_RANGE },
	{ SIDE(64, 1, 0, 1, 0, NULL, 0), GOOD, 0, 1, KVP_PLAN_SRC_RANGE },
	{ SIDE(64, 1, 0, 1, 64, NULL, 9), GOOD, 63, 1, KVP_PLAN_SRC_RANGE },
	{ SIDE(64, 1, 0, 1, 0, NULL, 9), SIDE(64, 1, 0, 1, 64, NULL, 9), 63, 1,
	  KVP_PLAN_DST_RANGE },
	{ SIDE(1u << 31, 1, 0, 1, 0, NULL, 1u << 31), SIDE(1u << 31, 1, 0, 1, 0, NULL, 1u << 31), 0,
	  1ull << 62, KVP_PLAN_OK },
};

Test(plan, hostile_values)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(hostiles); i++) {
		const struct hostile *h = &hostiles[i];

		cr_assert_eq(
			kvp_plan_check(&h->src, &h->dst, h->start, h->tokens), h->want,
			"row %zu: %s", i,
			kvp_plan_error_name(kvp_plan_check(&h->src, &h->dst, h->start, h->tokens)));
	}
}

static uint32_t edge(uint64_t *seed)
{
	static const uint32_t edges[] = {
		0, 1, 2, 3, 7, 64, 65535, 65536, 1u << 20, 1u << 31, UINT32_MAX - 1, UINT32_MAX
	};

	return edges[plan_random(seed) % KVP_ARRAY_SIZE(edges)];
}

static uint64_t wide_edge(uint64_t *seed)
{
	uint64_t shift = plan_random(seed) % 64;

	return (UINT64_C(1) << shift) + plan_random(seed) % 3 - 1;
}

static struct kvp_side edge_side(uint64_t *seed)
{
	struct kvp_side side;

	do {
		side = (struct kvp_side){
			.page = edge(seed),
			.dcp_size = edge(seed),
			.dcp_rank = edge(seed),
			.interleave = plan_random(seed) % 2 ? 1 : edge(seed),
			.n_pages = plan_random(seed) % 2 ? KVP_PAGES_ANY : edge(seed),
		};
		if (side.dcp_size)
			side.dcp_rank %= side.dcp_size;
	} while (kvp_side_check(&side));
	if (plan_random(seed) % 2)
		side.pos0 = wide_edge(seed) / kvp_side_vpage(&side) * kvp_side_vpage(&side);
	return side;
}

/* Whatever passes the check is planned without overflow, division by zero or endless loop. */
Test(plan, hostile_values_that_pass)
{
	uint64_t seed = 11;
	int passed = 0;

	for (int i = 0; i < 300000; i++) {
		struct kvp_side src = edge_side(&seed), dst = edge_side(&seed);
		uint64_t start = wide_edge(&seed), tokens = wide_edge(&seed);
		struct kvp_rows_iter it;
		struct kvp_run run;
		uint64_t count, rows = 0;

		if (plan_random(&seed) % 2)
			start = KVP_MAX(src.pos0, dst.pos0);
		if (kvp_plan_check(&src, &dst, start, tokens))
			continue;
		count = kvp_rows_count(&src, &dst, start, tokens);
		cr_assert_leq(count, kvp_rows_worst(&src, &dst, tokens));
		kvp_rows_begin(&it, &src, &dst, start, tokens);
		for (int k = 0; k < 20 && kvp_rows_next(&it, &run); k++) {
			rows += run.n;
			cr_assert(run.pos >= start && run.pos - start < tokens);
		}
		cr_assert_leq(rows, count);
		passed++;
	}
	cr_assert_gt(passed, 1000);
}
