/* SPDX-License-Identifier: Apache-2.0 */

/* Prints what planning costs: runs of a prompt for all its ranks, slot layouts, coverage. */

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "proto/layout.h"
#include "proto/util.h"

#define BENCH_TOKENS 32768u
#define BENCH_ENTRIES 512u
#define BENCH_ROUNDS 101

static uint32_t src_pages[BENCH_TOKENS], dst_pages[BENCH_TOKENS];

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail with these arguments */
	return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static uint64_t median(uint64_t *ns)
{
	qsort(ns, BENCH_ROUNDS, sizeof(*ns), compare);
	return ns[BENCH_ROUNDS / 2];
}

static uint64_t plan_ranks(const struct kvp_side *src, struct kvp_side dst, uint64_t *rows,
			   uint64_t *sum)
{
	uint64_t runs = 0;

	for (dst.dcp_rank = 0; dst.dcp_rank < dst.dcp_size; dst.dcp_rank++) {
		struct kvp_rows_iter it;
		struct kvp_run run;

		kvp_rows_begin(&it, src, &dst, 0, BENCH_TOKENS);
		for (; kvp_rows_next(&it, &run); runs++) {
			*rows += run.n;
			*sum += run.src_page + run.src_slot + run.dst_page + run.dst_slot;
		}
	}
	return runs;
}

static void bench_runs(const char *what, struct kvp_side src, struct kvp_side dst)
{
	uint64_t ns[BENCH_ROUNDS], runs = 0, rows = 0, sum = 0;

	src.pages = src_pages;
	dst.pages = dst_pages;
	src.n_pages = dst.n_pages = BENCH_TOKENS;
	for (int i = 0; i < BENCH_ROUNDS; i++) {
		uint64_t from = now_ns();

		rows = 0;
		runs = plan_ranks(&src, dst, &rows, &sum);
		ns[i] = now_ns() - from;
	}
	printf("%-28s %6u tokens, %u ranks: %7llu rows in %6llu runs, %8llu ns, %.1f ns a run "
	       "(sum %llx)\n",
	       what, BENCH_TOKENS, dst.dcp_size, (unsigned long long)rows, (unsigned long long)runs,
	       (unsigned long long)median(ns), (double)median(ns) / (double)runs,
	       (unsigned long long)sum);
}

/* A destination of many entries and 64 senders, each with one DCP rank of all of them. */
struct room {
	struct kvp_entry entries[BENCH_ENTRIES];
	struct kvp_pair pairs[BENCH_ENTRIES];
	struct kvp_part parts[BENCH_ENTRIES];
	struct kvp_side sides[KVP_MAX_SENDERS], dst;
	struct kvp_leg_geom legs[KVP_MAX_SENDERS];
	uint64_t starts[1];
	struct kvp_need need;
};

static void room_make(struct room *room)
{
	struct kvp_entry_list list = { .entries = room->entries, .n = BENCH_ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	int n;

	for (uint32_t i = 0; i < BENCH_ENTRIES; i++)
		room->entries[i] = (struct kvp_entry){
			.layer = i, .row_bytes = 576, .full_bytes = 576, .rows_per_page = 64
		};
	room->dst = (struct kvp_side){ .page = 64, .dcp_size = 8, .dcp_rank = 3, .interleave = 1 };
	room->need = (struct kvp_need){ .entries = room->entries,
					.sides = &room->dst,
					.starts = room->starts,
					.end = BENCH_TOKENS,
					.n_entries = BENCH_ENTRIES };
	n = kvp_pair_entries(&list, &list, room->pairs, BENCH_ENTRIES, err, sizeof(err));
	for (uint32_t i = 0; i < KVP_MAX_SENDERS; i++) {
		room->sides[i] = (struct kvp_side){
			.page = 64, .dcp_size = KVP_MAX_SENDERS, .dcp_rank = i, .interleave = 1
		};
		room->legs[i] = (struct kvp_leg_geom){ .pairs = room->pairs,
						       .src = room->entries,
						       .dst = room->entries,
						       .src_sides = &room->sides[i],
						       .dst_sides = &room->dst,
						       .dst_starts = room->starts,
						       .end = BENCH_TOKENS,
						       .n_pairs = (uint32_t)n,
						       .sender = i };
	}
}

static int bench_room(void)
{
	static struct room room;
	uint64_t pair[BENCH_ROUNDS], cover[BENCH_ROUNDS], tokens[BENCH_ROUNDS],
		layout[BENCH_ROUNDS];
	struct kvp_entry_list list = { .entries = room.entries, .n = BENCH_ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	uint32_t fits = 0, n = 0;

	room_make(&room);
	for (int i = 0; i < BENCH_ROUNDS; i++) {
		uint64_t t0 = now_ns(), t1, t2, t3;

		(void)kvp_pair_entries(&list, &list, room.pairs, BENCH_ENTRIES, err, sizeof(err));
		t1 = now_ns();
		if (kvp_coverage_check(&room.need, room.legs, KVP_MAX_SENDERS, err, sizeof(err))) {
			fprintf(stderr, "coverage: %s\n", err);
			return 1;
		}
		t2 = now_ns();
		fits = kvp_piece_tokens(&room.legs[3], 8u << 20);
		t3 = now_ns();
		(void)kvp_piece_layout(&room.legs[3], NULL, 0, fits, room.parts, &n);
		layout[i] = now_ns() - t3;
		pair[i] = t1 - t0;
		cover[i] = t2 - t1;
		tokens[i] = t3 - t2;
	}
	printf("%u entries: pair %llu ns, coverage by %u senders %llu ns, piece_tokens (%u) %llu "
	       "ns, "
	       "layout of %u parts %llu ns\n",
	       BENCH_ENTRIES, (unsigned long long)median(pair), KVP_MAX_SENDERS,
	       (unsigned long long)median(cover), fits, (unsigned long long)median(tokens), n,
	       (unsigned long long)median(layout));
	return 0;
}

int main(void)
{
	const struct kvp_side whole = { .page = 64, .dcp_size = 1, .interleave = 1 };
	struct kvp_side four = { .page = 64, .dcp_size = 4, .interleave = 1 };
	struct kvp_side eight = { .page = 64, .dcp_size = 8, .interleave = 1 };

	for (uint32_t i = 0; i < BENCH_TOKENS; i++) {
		src_pages[i] = i * 7919 % BENCH_TOKENS;
		dst_pages[i] = i * 104729 % BENCH_TOKENS;
	}
	bench_runs("no DCP to DCP 8", whole, eight);
	bench_runs("DCP 4 rank 0 to DCP 8", four, eight);
	bench_runs("DCP 8 rank 0 to no DCP", eight, whole);
	eight.interleave = 16;
	bench_runs("to DCP 8, interleave 16", whole, eight);
	eight.interleave = 2;
	bench_runs("DCP 4 to 8, interleave 1, 2", four, eight);
	return bench_room();
}
