/* SPDX-License-Identifier: Apache-2.0 */

/* The tables of a launch, done by the processor as a GPU would: every row where counting puts it.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "daemon/jobs.h"
#include "proto/util.h"
#include "tests/support_world.h"

#define MANY KVP_JOBS_RUNS

static struct kvp_jobs *jobs_make(uint32_t max_entries, uint32_t max_runs)
{
	struct kvp_jobs *jobs = calloc(1, sizeof(*jobs));

	jobs->entries = calloc(max_entries, sizeof(*jobs->entries));
	jobs->runs = calloc(max_runs, sizeof(*jobs->runs));
	jobs->max_entries = max_entries;
	jobs->max_runs = max_runs;
	return jobs;
}

static void jobs_free(struct kvp_jobs *jobs)
{
	free(jobs->entries);
	free(jobs->runs);
	free(jobs);
}

/* Steps in bytes, and the units of a run, fit the kernel's 32 bits. */
static void run_check(const struct kvp_move_entry *e, const struct kvp_move_run *run)
{
	uint64_t units = e->width >> e->unit_log;

	cr_assert_gt(run->n, 0);
	cr_assert_lt(run->n * units, UINT64_C(1) << 31);
	cr_assert_leq((uint64_t)run->src_step * e->src_row_stride, UINT32_MAX, "%u x %u",
		      run->src_step, e->src_row_stride);
	cr_assert_leq((uint64_t)run->dst_step * e->dst_row_stride, UINT32_MAX, "%u x %u",
		      run->dst_step, e->dst_row_stride);
}

/* What the kernel takes for granted of the tables. */
static void tables_check(const struct kvp_jobs *jobs)
{
	uint32_t widest = 0;

	for (uint32_t i = 0; i < jobs->n_entries; i++) {
		const struct kvp_move_entry *e = &jobs->entries[i];
		uint32_t units = e->width >> e->unit_log;

		cr_assert_eq(e->width % (1u << e->unit_log), 0);
		cr_assert_leq(e->first_run + e->n_runs, jobs->n_runs);
		widest = KVP_MAX(widest, (uint32_t)e->n_runs);
		for (uint32_t k = 0; k < 200; k++) {
			uint64_t n = world_draw(1u << 31);
			uint64_t q = e->magic ? (n * e->magic >> 32) >> e->shift : n >> e->shift;

			cr_assert_eq(q, n / units, "%lu / %u", n, units);
		}
		for (uint32_t k = 0; k < e->n_runs; k++)
			run_check(e, &jobs->runs[e->first_run + k]);
	}
	cr_assert_eq(jobs->widest, widest);
}

static uint32_t woven; /* launches whose pieces share their sources */

/* Blocks go through the pieces that read the same memory first: every entry is in one of them. */
static void pieces_check(const struct kvp_move_head *head, const struct kvp_move_entry *entries)
{
	const uint32_t each = head->pieces ? head->n_entries / head->pieces : 0;

	cr_assert_eq(each * head->pieces, head->n_entries);
	for (uint32_t i = each; i < head->n_entries; i++)
		cr_assert_eq(entries[i].src, entries[i - each].src);
	woven += head->pieces > 1;
}

/* Does the launches that the tables become: how many. */
static uint32_t launches_run(const struct kvp_jobs *jobs)
{
	static union kvp_move_params params;
	static const uint32_t most[][2] = {
#define MOST(name, entries, runs) { entries, runs },
		KVP_MOVE_KERNELS(MOST)
	};
	struct kvp_move_run *const runs[] = { params.small.runs, params.near.runs, params.wide.runs,
					      params.tall.runs, params.lengthy.runs };
	struct kvp_jobs_cut cut = { 0 };
	enum kvp_move_size size;
	uint32_t n = 0;

	for (; kvp_jobs_params(jobs, &cut, &params, &size); n++) {
		const struct kvp_jobs part = { .entries = params.small.entries,
					       .runs = runs[size],
					       .n_entries = params.head.n_entries };
		uint32_t widest = 0;

		cr_assert_leq(part.n_entries, most[size][0]);
		for (uint32_t i = 0; i < part.n_entries; i++) {
			const struct kvp_move_entry *e = &part.entries[i];

			cr_assert_leq(e->first_run + e->n_runs, most[size][1]);
			widest = KVP_MAX(widest, (uint32_t)e->n_runs);
		}
		cr_assert_eq(params.head.widest, widest);
		pieces_check(&params.head, part.entries);
		kvp_jobs_run_host(&part);
	}
	return n;
}

static void run(struct kvp_jobs *jobs)
{
	tables_check(jobs);
	(void)launches_run(jobs);
	kvp_jobs_reset(jobs);
}

Test(jobs, gather_and_scatter_move_the_right_rows)
{
	static struct world w;
	struct kvp_jobs *jobs = jobs_make(64, MANY);
	unsigned char *slots = malloc(RANKS_MAX << 20);
	uint32_t good = 0;

	for (uint32_t round = 0; round < 1500; round++) {
		world_make(&w);
		world_pools(&w);
		for (uint32_t r = 0; world_good(&w) && r < w.n_ranks; r++) {
			cr_assert(world_add_piece(&w, r, true, jobs, slots));
			good++;
		}
		if (world_good(&w)) {
			run(jobs); /* all ranks in one launch, as the lane does */
			for (uint32_t r = 0; r < w.n_ranks; r++)
				cr_assert(world_add_piece(&w, r, false, jobs, slots));
			run(jobs);
			world_check(&w, round);
		}
		world_free(&w);
	}
	cr_assert_gt(good, 1000);
	free(slots);
	jobs_free(jobs);
}

Test(jobs, move_moves_the_right_rows)
{
	static struct world w;
	struct kvp_jobs *jobs = jobs_make(64, MANY);
	uint32_t good = 0;

	for (uint32_t round = 0; round < 1500; round++) {
		struct kvp_move_source source;
		uint64_t bytes = 0;

		world_make(&w);
		world_pools(&w);
		source = world_source(&w);
		for (uint32_t r = 0; world_good(&w) && r < w.n_ranks; r++) {
			const struct kvp_move move = world_move(&w, r);

			cr_assert_eq(kvp_jobs_move(jobs, &source, &move), 0);
			bytes += kvp_move_bytes(&source, &move);
			cr_assert_eq(jobs->bytes, bytes);
		}
		if (world_good(&w)) {
			run(jobs);
			world_check(&w, round);
			good++;
		}
		kvp_jobs_reset(jobs);
		world_free(&w);
	}
	cr_assert_gt(good, 300);
	cr_assert_gt(woven, 100);
	jobs_free(jobs);
}

/* A move that does not fit leaves the tables as they were, and goes into the next ones. */
Test(jobs, full_tables_take_all_or_nothing)
{
	static struct world w;
	uint32_t full = 0;

	for (uint32_t round = 0; round < 600; round++) {
		struct kvp_jobs *jobs = jobs_make(2 + world_draw(12), 4 + world_draw(300));
		struct kvp_move_source source;
		bool all = true;

		world_make(&w);
		world_pools(&w);
		source = world_source(&w);
		for (uint32_t r = 0; world_good(&w) && r < w.n_ranks; r++) {
			const struct kvp_move move = world_move(&w, r);
			const struct kvp_jobs before = *jobs;

			if (kvp_jobs_move(jobs, &source, &move) == 0)
				continue;
			full++;
			cr_assert(before.n_entries == jobs->n_entries &&
				  before.n_runs == jobs->n_runs && before.widest == jobs->widest &&
				  before.bytes == jobs->bytes);
			run(jobs);
			all = kvp_jobs_move(jobs, &source, &move) == 0 && all;
		}
		run(jobs);
		if (world_good(&w) && all)
			world_check(&w, round);
		world_free(&w);
		jobs_free(jobs);
	}
	cr_assert_gt(full, 100);
}

/* Entries of a few lists of runs, each of which moves one byte of its own. */
static void lists_make(struct kvp_jobs *jobs, const unsigned char *src, unsigned char *dst)
{
	while (jobs->n_entries < jobs->max_entries) {
		const uint32_t first = jobs->n_runs, n_runs = world_draw(1u << world_draw(13));
		uint32_t n = 1 + world_draw(80);

		if (first + n_runs > jobs->max_runs)
			return;
		for (uint32_t i = 0; i < n_runs; i++)
			jobs->runs[jobs->n_runs++] =
				(struct kvp_move_run){ .src_slot = i, .dst_slot = i, .n = 1 };
		for (; n > 0 && jobs->n_entries < jobs->max_entries; n--) {
			uint64_t at = (uint64_t)jobs->n_entries << 13;

			jobs->entries[jobs->n_entries++] = (struct kvp_move_entry){
				.src = (uintptr_t)src + at,
				.dst = (uintptr_t)dst + at,
				.src_row_stride = 1,
				.dst_row_stride = 1,
				.width = 1,
				.first_run = (uint16_t)first,
				.n_runs = (uint16_t)n_runs,
			};
			jobs->widest = KVP_MAX(jobs->widest, n_runs);
		}
	}
}

Test(jobs, tables_larger_than_a_launch)
{
	const size_t bytes = (size_t)512 << 13;
	struct kvp_jobs *jobs = jobs_make(512, MANY);
	unsigned char *src = malloc(bytes), *dst = malloc(bytes), *want = malloc(bytes);
	uint32_t several = 0;

	world_fill(src, bytes);
	for (uint32_t round = 0; round < 60; round++) {
		memset(dst, 0, bytes);
		memset(want, 0, bytes);
		lists_make(jobs, src, dst);
		for (uint32_t i = 0; i < jobs->n_entries; i++)
			memcpy(want + ((size_t)i << 13), src + ((size_t)i << 13),
			       jobs->entries[i].n_runs);
		tables_check(jobs);
		several += launches_run(jobs) > 1;
		cr_assert_eq(memcmp(dst, want, bytes), 0, "round %u", round);
		kvp_jobs_reset(jobs);
	}
	cr_assert_gt(several, 20);
	free(src);
	free(dst);
	free(want);
	jobs_free(jobs);
}

Test(jobs, plain_bytes)
{
	struct kvp_jobs *jobs = jobs_make(8, 256);
	unsigned char *src = malloc(1 << 21), *dst = malloc(1 << 21), *want = malloc(1 << 21);

	world_fill(src, 1 << 21);
	for (uint32_t round = 0; round < 300; round++) {
		uint32_t from = world_draw(4096), to = world_draw(4096);
		uint32_t bytes = world_draw(round % 3 ? 9000 : 1 << 20);

		memset(dst, 0xaa, 1 << 21);
		memset(want, 0xaa, 1 << 21);
		memcpy(want + to, src + from, bytes);
		cr_assert_eq(
			kvp_jobs_bytes(jobs, (uintptr_t)src + from, (uintptr_t)dst + to, bytes), 0);
		run(jobs);
		cr_assert_eq(memcmp(dst, want, 1 << 21), 0, "round %u", round);
	}
	cr_assert_eq(kvp_jobs_bytes(jobs, 0, 4096, 1u << 30), -ENOSPC);
	cr_assert_eq(jobs->n_entries, 0);
	free(src);
	free(dst);
	free(want);
	jobs_free(jobs);
}

Test(jobs, zeroes)
{
	static const _Alignas(16) unsigned char zeros[KVP_JOBS_ZEROS];
	struct kvp_jobs *jobs = jobs_make(8, MANY);
	unsigned char *dst = malloc(1 << 21), *want = malloc(1 << 21);

	for (uint32_t round = 0; round < 200; round++) {
		uint64_t to = world_draw(1 << 20), bytes = world_draw(round % 2 ? 600 : 1 << 20);

		memset(dst, 0xaa, 1 << 21);
		memset(want, 0xaa, 1 << 21);
		memset(want + to, 0, bytes);
		cr_assert_eq(kvp_jobs_zero(jobs, (uintptr_t)zeros, (uintptr_t)dst + to, bytes), 0);
		run(jobs);
		cr_assert_eq(memcmp(dst, want, 1 << 21), 0, "round %u", round);
	}
	free(dst);
	free(want);
	jobs_free(jobs);
}

/* ---- strides beyond 32 bits ------------------------------------------------------------------ */

#define FAR_ROWS 64u
#define FAR_DCP 8u
#define FAR_SLOT UINT64_C(0x100000)

/* Where the kernel finds row k of a run, in its arithmetic. */
static uint64_t kernel_row(const struct kvp_move_entry *e, const struct kvp_move_run *run,
			   uint32_t k)
{
	const uint32_t step = run->src_step * e->src_row_stride;

	return e->src + run->src_page * e->src_page_stride +
	       (uint64_t)run->src_slot * e->src_row_stride + (uint64_t)k * step;
}

/*
 * Two layers of one group, with the same rows and other strides: every eighth row of pages whose
 * rows lie up to 4 GiB apart. Nothing is touched, only found.
 */
static void far_rows(struct kvp_jobs *jobs, const uint64_t strides[2])
{
	const uint32_t pages[] = { 3, 0x7ffffffe };
	const struct kvp_side from = {
		.page = FAR_ROWS, .dcp_size = 1, .interleave = 1, .pages = pages, .n_pages = 2
	};
	const struct kvp_side to = { .page = FAR_ROWS,
				     .dcp_size = FAR_DCP,
				     .dcp_rank = 5,
				     .interleave = 1,
				     .n_pages = KVP_PAGES_ANY };
	const struct kvp_pair pairs[] = { { 0, 0, 0, 0, 16 }, { 1, 1, 0, 0, 16 } };
	const struct kvp_part parts[] = { { .pair = 0, .rows = 16, .bytes = 256 },
					  { .offset = 256, .pair = 1, .rows = 16, .bytes = 256 } };
	struct kvp_entry entries[2] = { { .row_bytes = 16, .full_bytes = 16 } };
	unsigned char *const maps[] = { NULL };
	const uint64_t start = 0;
	const struct kvp_leg_geom leg = { .pairs = pairs,
					  .src = entries,
					  .dst = entries,
					  .src_sides = &from,
					  .dst_sides = &to,
					  .dst_starts = &start,
					  .end = 2 * FAR_ROWS,
					  .n_pairs = 2 };
	const struct kvp_copy_piece piece = { .leg = &leg,
					      .pool = { maps, &from },
					      .tokens = 2 * FAR_ROWS,
					      .parts = parts,
					      .n_parts = 2 };

	entries[0].rows_per_page = FAR_ROWS;
	entries[0].page_stride = 16;
	entries[1] = entries[0];
	for (uint32_t i = 0; i < 2; i++) {
		entries[i].layer = i;
		entries[i].base = UINT64_C(1) << 40;
		entries[i].row_stride = strides[i];
	}
	cr_assert_eq(kvp_jobs_gather(jobs, &piece, FAR_SLOT), 0);
	tables_check(jobs);
	for (uint32_t i = 0; i < 2; i++) {
		const struct kvp_move_entry *e = &jobs->entries[i];
		uint32_t row = 0;

		for (uint32_t r = 0; r < e->n_runs; r++)
			for (uint32_t k = 0; k < jobs->runs[e->first_run + r].n; k++, row++)
				cr_assert_eq(kernel_row(e, &jobs->runs[e->first_run + r], k),
					     kvp_entry_row(&entries[i], pages[row / 8],
							   row % 8 * FAR_DCP + 5),
					     "layer %u, row %u", i, row);
		cr_assert_eq(row, 16);
	}
	kvp_jobs_reset(jobs);
}

Test(jobs, rows_that_lie_far_apart)
{
	static const uint64_t strides[] = { 16, 65537, 65538, UINT64_C(1) << 29,
					    (UINT64_C(1) << 32) - 16 };
	struct kvp_jobs *jobs = jobs_make(8, 256);

	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(strides); i++)
		for (uint32_t k = 0; k < KVP_ARRAY_SIZE(strides); k++)
			far_rows(jobs, (uint64_t[]){ strides[i], strides[k] });
	jobs_free(jobs);
}
