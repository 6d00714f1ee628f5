/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast rows move on one thread, against memcpy of the same bytes between the same buffers.
 * Seven entries of 576-byte rows, pages of 64 in random order on both sides, one source rank to
 * four destination ranks, pools larger than the cache. Medians of runs in alternation.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "daemon/copy.h"
#include "proto/layout.h"
#include "proto/util.h"

#define ENTRIES 7u
#define ROW 576u
#define PAGE 64u
#define RANKS 4u
#define RUNS 7u
#define SLOT_BYTES (1u << 20)
#define N_SLOTS 4u

struct bench {
	uint32_t n_pages; /* of the source pool; a destination has a quarter */
	uint64_t pool_bytes;
	unsigned char *src, *dst, *slots;
	unsigned char *dst_map[RANKS];
	struct kvp_entry src_entries[ENTRIES], dst_entries[ENTRIES];
	struct kvp_pair pairs[ENTRIES];
	uint32_t n_pairs;
	uint32_t *src_pages, *dst_pages[RANKS];
	struct kvp_side src_side, dst_sides[RANKS];
	uint64_t starts[1];
	struct kvp_leg_geom legs[RANKS];
};

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static unsigned char *memory(uint64_t bytes, int fill)
{
	unsigned char *p =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	memset(p, fill, bytes);
	return p;
}

static uint32_t *shuffled(uint32_t n, uint64_t seed)
{
	uint32_t *pages = malloc(n * sizeof(*pages));

	for (uint32_t i = 0; i < n; i++)
		pages[i] = i;
	for (uint32_t i = n - 1; i > 0; i--) {
		uint32_t j, other;

		seed = seed * UINT64_C(6364136223846793005) + 1;
		j = (uint32_t)((seed >> 33) % (i + 1));
		other = pages[j];
		pages[j] = pages[i];
		pages[i] = other;
	}
	return pages;
}

static void entries_make(struct kvp_entry *entries, uint32_t n_pages)
{
	uint64_t bytes = (uint64_t)n_pages * PAGE * ROW;

	for (uint32_t i = 0; i < ENTRIES; i++)
		entries[i] = (struct kvp_entry){
			.base = i * bytes,
			.bytes = bytes,
			.page_stride = PAGE * ROW,
			.row_stride = ROW,
			.layer = i,
			.row_bytes = ROW,
			.full_bytes = ROW,
			.rows_per_page = PAGE,
			.n_pages = n_pages,
			.klass = KVP_CLASS_SHARDED,
		};
}

static void legs_make(struct bench *bench)
{
	struct kvp_entry_list src = { .entries = bench->src_entries, .n = ENTRIES };
	struct kvp_entry_list dst = { .entries = bench->dst_entries, .n = ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	int r = kvp_pair_entries(&src, &dst, bench->pairs, ENTRIES, err, sizeof(err));

	if (r != ENTRIES) {
		fprintf(stderr, "pairs: %s\n", err);
		exit(1);
	}
	bench->src_side = (struct kvp_side){
		.page = PAGE,
		.dcp_size = 1,
		.interleave = 1,
		.pages = bench->src_pages,
		.n_pages = bench->n_pages,
	};
	for (uint32_t i = 0; i < RANKS; i++) {
		bench->dst_sides[i] = (struct kvp_side){
			.page = PAGE,
			.dcp_size = RANKS,
			.dcp_rank = i,
			.interleave = 1,
			.pages = bench->dst_pages[i],
			.n_pages = bench->n_pages / RANKS,
		};
		bench->legs[i] = (struct kvp_leg_geom){
			.pairs = bench->pairs,
			.src = bench->src_entries,
			.dst = bench->dst_entries,
			.src_sides = &bench->src_side,
			.dst_sides = &bench->dst_sides[i],
			.dst_starts = bench->starts,
			.end = (uint64_t)bench->n_pages * PAGE,
			.n_pairs = ENTRIES,
		};
	}
}

static void bench_make(struct bench *bench, uint32_t n_pages)
{
	bench->n_pages = n_pages;
	bench->pool_bytes = (uint64_t)n_pages * PAGE * ROW * ENTRIES;
	bench->src = memory(bench->pool_bytes, 1);
	bench->dst = memory(bench->pool_bytes, 2);
	bench->slots = memory(N_SLOTS * SLOT_BYTES, 3);
	for (uint64_t i = 0; i < bench->pool_bytes / 8; i++)
		((uint64_t *)(void *)bench->src)[i] = i * UINT64_C(0x9e3779b97f4a7c15);
	bench->src_pages = shuffled(n_pages, 1);
	entries_make(bench->src_entries, n_pages);
	entries_make(bench->dst_entries, n_pages / RANKS);
	for (uint32_t i = 0; i < RANKS; i++) {
		bench->dst_pages[i] = shuffled(n_pages / RANKS, 2 + i);
		bench->dst_map[i] = bench->dst + i * (bench->pool_bytes / RANKS);
	}
	legs_make(bench);
}

/* Independent of the planner: position p belongs to rank p mod 4. */
static void check(const struct bench *bench)
{
	for (uint64_t pos = 0; pos < (uint64_t)bench->n_pages * PAGE; pos++) {
		uint64_t rank = pos % RANKS, local = pos / RANKS;
		uint64_t from = bench->src_pages[pos / PAGE] * (uint64_t)PAGE + pos % PAGE;
		uint64_t to = bench->dst_pages[rank][local / PAGE] * (uint64_t)PAGE + local % PAGE;

		for (uint32_t e = 0; e < ENTRIES; e++)
			if (memcmp(bench->src + bench->src_entries[e].base + from * ROW,
				   bench->dst_map[rank] + bench->dst_entries[e].base + to * ROW,
				   ROW) != 0) {
				fprintf(stderr, "wrong row of position %lu\n", pos);
				exit(1);
			}
	}
}

static double run_memcpy(struct bench *bench)
{
	double start = now();

	memcpy(bench->dst, bench->src, bench->pool_bytes);
	return now() - start;
}

static double run_move(struct bench *bench, uint64_t chunk, bool together)
{
	struct kvp_move moves[RANKS];
	double start = now();

	for (uint32_t i = 0; i < RANKS; i++)
		moves[i] = (struct kvp_move){
			.leg = &bench->legs[i],
			.dst = { .maps = &bench->dst_map[i], .sides = &bench->dst_sides[i] },
		};
	for (uint64_t at = 0; at < (uint64_t)bench->n_pages * PAGE; at += chunk) {
		struct kvp_move_source source = {
			.src = { .maps = &bench->src, .sides = &bench->src_side },
			.n_entries = ENTRIES,
			.start = at,
			.tokens = KVP_MIN(chunk, bench->n_pages * (uint64_t)PAGE - at),
		};

		if (together)
			kvp_move(&source, moves, RANKS);
		for (uint32_t i = 0; !together && i < RANKS; i++)
			kvp_move(&source, &moves[i], 1);
	}
	return now() - start;
}

/* Through slots, as a sender and a receiver do; `parts` of one 1 MiB piece after the other. */
static double run_slots(struct bench *bench, bool gather, bool scatter)
{
	uint32_t tokens = kvp_piece_tokens(&bench->legs[0], SLOT_BYTES), slot = 0;
	double start = now();

	for (uint64_t at = 0; at < (uint64_t)bench->n_pages * PAGE; at += tokens) {
		for (uint32_t i = 0; i < RANKS; i++, slot = (slot + 1) % N_SLOTS) {
			struct kvp_part parts[ENTRIES];
			struct kvp_copy_piece piece = {
				.leg = &bench->legs[i],
				.start = at,
				.tokens = KVP_MIN(tokens, bench->n_pages * (uint64_t)PAGE - at),
				.parts = parts,
			};
			unsigned char *place = bench->slots + (uint64_t)slot * SLOT_BYTES;

			(void)kvp_piece_layout(piece.leg, NULL, at, (uint32_t)piece.tokens, parts,
					       &piece.n_parts);
			piece.pool.maps = &bench->src;
			piece.pool.sides = &bench->src_side;
			if (gather)
				kvp_gather(&piece, place);
			piece.pool.maps = &bench->dst_map[i];
			piece.pool.sides = &bench->dst_sides[i];
			if (scatter)
				kvp_scatter(&piece, place);
		}
	}
	return now() - start;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	static const char *const names[] = {
		"memcpy of the same bytes", "move, 4 ranks together, chunks of 8192",
		"move, 4 ranks one by one", "move together, chunks of 512",
		"gather into slots",        "scatter out of slots",
		"gather, then scatter",
	};
	double times[KVP_ARRAY_SIZE(names)][RUNS];
	static struct bench bench;

	bench_make(&bench, argc > 1 ? (uint32_t)atoi(argv[1]) * 4 : 2048);
	(void)run_memcpy(&bench);
	for (uint32_t i = 0; i < RUNS; i++) {
		times[0][i] = run_memcpy(&bench);
		times[1][i] = run_move(&bench, 8192, true);
		if (i == 0)
			check(&bench);
		times[2][i] = run_move(&bench, 8192, false);
		times[3][i] = run_move(&bench, 512, true);
		times[4][i] = run_slots(&bench, true, false);
		times[5][i] = run_slots(&bench, false, true);
		times[6][i] = run_slots(&bench, true, true);
		if (i == 0)
			check(&bench);
	}
	printf("copy: %u entries of %u-byte rows, %.0f MiB from pool to pools, one thread, median "
	       "of "
	       "%u\n",
	       ENTRIES, ROW, (double)bench.pool_bytes / (1 << 20), RUNS);
	for (uint32_t k = 0; k < KVP_ARRAY_SIZE(names); k++)
		qsort(times[k], RUNS, sizeof(double), by_value);
	for (uint32_t k = 0; k < KVP_ARRAY_SIZE(names); k++)
		printf("  %-42s %6.2f GB/s  %.2f of memcpy\n", names[k],
		       (double)bench.pool_bytes / times[k][RUNS / 2] / 1e9,
		       times[0][RUNS / 2] / times[k][RUNS / 2]);
	return 0;
}
