/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

double rows_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double rows_median(double *values, uint32_t n)
{
	qsort(values, n, sizeof(*values), by_value);
	return values[n / 2];
}

unsigned char *rows_memory(uint64_t bytes, int fill)
{
	unsigned char *p =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	memset(p, fill, bytes);
	return p;
}

uint32_t *rows_shuffled(uint32_t n, uint64_t seed)
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
	uint64_t bytes = (uint64_t)n_pages * ROWS_PAGE * ROWS_BYTES;

	for (uint32_t i = 0; i < ROWS_ENTRIES; i++)
		entries[i] = (struct kvp_entry){
			.base = i * bytes,
			.bytes = bytes,
			.page_stride = ROWS_PAGE * ROWS_BYTES,
			.row_stride = ROWS_BYTES,
			.layer = i,
			.row_bytes = ROWS_BYTES,
			.full_bytes = ROWS_BYTES,
			.rows_per_page = ROWS_PAGE,
			.n_pages = n_pages,
			.klass = KVP_CLASS_SHARDED,
		};
}

static void legs_make(struct rows *rows)
{
	struct kvp_entry_list src = { .entries = rows->src_entries, .n = ROWS_ENTRIES };
	struct kvp_entry_list dst = { .entries = rows->dst_entries, .n = ROWS_ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	int r = kvp_pair_entries(&src, &dst, rows->pairs, ROWS_ENTRIES, err, sizeof(err));

	if (r != ROWS_ENTRIES) {
		fprintf(stderr, "pairs: %s\n", err);
		exit(1);
	}
	rows->src_side = (struct kvp_side){
		.page = ROWS_PAGE,
		.dcp_size = 1,
		.interleave = 1,
		.pages = rows->src_pages,
		.n_pages = rows->n_pages,
	};
	for (uint32_t i = 0; i < ROWS_RANKS; i++) {
		rows->dst_sides[i] = (struct kvp_side){
			.page = ROWS_PAGE,
			.dcp_size = ROWS_RANKS,
			.dcp_rank = i,
			.interleave = 1,
			.pages = rows->dst_pages[i],
			.n_pages = rows->n_pages / ROWS_RANKS,
		};
		rows->legs[i] = (struct kvp_leg_geom){
			.pairs = rows->pairs,
			.src = rows->src_entries,
			.dst = rows->dst_entries,
			.src_sides = &rows->src_side,
			.dst_sides = &rows->dst_sides[i],
			.dst_starts = rows->starts,
			.end = (uint64_t)rows->n_pages * ROWS_PAGE,
			.n_pairs = ROWS_ENTRIES,
		};
	}
}

void rows_make(struct rows *rows, uint32_t n_pages)
{
	rows->n_pages = n_pages;
	rows->tokens = (uint64_t)n_pages * ROWS_PAGE;
	rows->pool_bytes = (uint64_t)n_pages * ROWS_PAGE * ROWS_BYTES * ROWS_ENTRIES;
	rows->src = rows_memory(rows->pool_bytes, 1);
	rows->dst = rows_memory(rows->pool_bytes, 2);
	for (uint64_t i = 0; i < rows->pool_bytes / 8; i++)
		((uint64_t *)(void *)rows->src)[i] = i * UINT64_C(0x9e3779b97f4a7c15);
	rows->src_pages = rows_shuffled(n_pages, 1);
	entries_make(rows->src_entries, n_pages);
	entries_make(rows->dst_entries, n_pages / ROWS_RANKS);
	for (uint32_t i = 0; i < ROWS_RANKS; i++) {
		rows->dst_pages[i] = rows_shuffled(n_pages / ROWS_RANKS, 2 + i);
		rows->dst_map[i] = rows->dst + i * (rows->pool_bytes / ROWS_RANKS);
	}
	legs_make(rows);
}

/* Independent of the planner: position p belongs to rank p mod 4. */
void rows_check(const struct rows *rows, const char *what)
{
	for (uint64_t pos = 0; pos < (uint64_t)rows->n_pages * ROWS_PAGE; pos++) {
		uint64_t rank = pos % ROWS_RANKS, local = pos / ROWS_RANKS;
		uint64_t from =
			rows->src_pages[pos / ROWS_PAGE] * (uint64_t)ROWS_PAGE + pos % ROWS_PAGE;
		uint64_t to = rows->dst_pages[rank][local / ROWS_PAGE] * (uint64_t)ROWS_PAGE +
			      local % ROWS_PAGE;

		for (uint32_t e = 0; e < ROWS_ENTRIES; e++)
			if (memcmp(rows->src + rows->src_entries[e].base + from * ROWS_BYTES,
				   rows->dst_map[rank] + rows->dst_entries[e].base +
					   to * ROWS_BYTES,
				   ROWS_BYTES) != 0) {
				fprintf(stderr, "%s: wrong row of position %lu\n", what, pos);
				exit(1);
			}
	}
}
