/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lanes against what the machine does without them: local mode against memcpy, landing over tcp
 * against a plain socket stream, packed against unpacked. Two lanes (threads) of one process, lo;
 * baselines are two processes. Ratios are of medians over rounds in alternation.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_baseline.h"
#include "tests/support_lane.h"

#define ROUNDS 5u
#define LAYERS 7u
#define ROW_BYTES 576u
#define DESTS 4u

struct bench {
	struct lt lt;
	struct lt_pool src, dst[DESTS];
	struct lt_pipe pipe;
	struct kvp_lane *from, *to;
	uint64_t tokens, room;
	bool local;
};

static void bench_make(struct bench *bench, uint64_t tokens, bool local, bool pack)
{
	struct kvp_lane_config config = {
		.pack = pack,
		.net = local ? NULL : &kvp_net_ucx,
		.spin_ns = 50000,
	};
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = (uint32_t)(tokens / 64),
				  .layers = LAYERS,
				  .row_bytes = ROW_BYTES,
				  .seed = 1 };

	memset(bench, 0, sizeof(*bench));
	bench->tokens = tokens;
	bench->local = local;
	bench->room = 42;
	lt_begin(&bench->lt);
	bench->from = lt_lane(&bench->lt, &config);
	bench->to = local ? bench->from : lt_lane(&bench->lt, &config);
	if (!local)
		lt_pipe_make(&bench->lt, &bench->pipe, bench->from, bench->to, 1);
	lt_pool_make(&bench->src, &bench->lt, bench->from, &shape);
	lt_pool_fill(&bench->src, bench->room, 0, tokens);
	shape.dcp_size = DESTS;
	shape.n_pages /= DESTS;
	for (uint32_t d = 0; d < DESTS; d++) {
		shape.dcp_rank = d;
		shape.seed = d + 10;
		lt_pool_make(&bench->dst[d], &bench->lt, bench->to, &shape);
	}
}

static void bench_end(struct bench *bench)
{
	lt_pool_end(&bench->src);
	for (uint32_t d = 0; d < DESTS; d++)
		lt_pool_end(&bench->dst[d]);
	if (!bench->local)
		lt_pipe_end(&bench->lt, &bench->pipe);
	lt_end(&bench->lt);
}

/* One room, chunks of 8192 tokens: seconds from the first submit to the last complete. */
static double run_room(struct bench *bench, bool check)
{
	struct lt_room *room = lt_alloc(1, sizeof(*room));
	double begin, secs;

	room->lt = &bench->lt;
	room->room = bench->room;
	room->end = bench->tokens;
	room->n_senders = 1;
	room->n_dests = DESTS;
	room->meta_from = -1;
	room->slot_bytes = 1 << 20;
	room->pipe = bench->local ? NULL : &bench->pipe;
	room->senders[0].pool = &bench->src;
	for (uint32_t d = 0; d < DESTS; d++)
		room->dests[d].pool = &bench->dst[d];
	lt_room_begin(room);
	begin = kvp_base_now();
	lt_submit_all(room, 0, 8192);
	for (uint32_t d = 0; d < DESTS; d++)
		lt_wait(room->lt, &room->dests[d].board, KVP_BOARD_COMPLETE);
	secs = kvp_base_now() - begin;
	lt_room_complete(room);
	if (check)
		lt_room_check(room);
	lt_room_end(room);
	free(room);
	return secs;
}

static double run_mode(uint64_t tokens, bool local, bool pack, bool check)
{
	struct bench *bench = lt_alloc(1, sizeof(*bench));
	double secs[3];

	bench_make(bench, tokens, local, pack);
	(void)run_room(bench, check); /* pages of the pools and slots are touched, caches warm */
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(secs); i++)
		secs[i] = run_room(bench, false);
	bench_end(bench);
	free(bench);
	return kvp_base_median(secs, KVP_ARRAY_SIZE(secs));
}

static double run_base(const struct kvp_base_job *job,
		       int (*base)(const struct kvp_base_job *job, double *secs))
{
	double secs[3];
	int r = base(job, secs);

	LT_REQUIRE(r == 0, "baseline: %s", strerror(-r));
	return kvp_base_median(secs, KVP_ARRAY_SIZE(secs));
}

static void show(const char *name, double bytes, double secs, double base, const char *of)
{
	printf("  %-28s %8.2f ms  %6.2f GB/s", name, secs * 1e3, bytes / secs / 1e9);
	if (base > 0)
		printf("  %.2f of %s", base / secs, of);
	printf("\n");
}

static void bench_size(uint64_t tokens)
{
	const struct kvp_base_job job = {
		.pool_bytes = tokens * LAYERS * ROW_BYTES,
		.rows = tokens * LAYERS,
		.row_bytes = ROW_BYTES,
		.n_dests = DESTS,
		.repetitions = 3,
	};
	double bytes = (double)job.pool_bytes, secs[5][ROUNDS], m[5];

	for (uint32_t i = 0; i < ROUNDS; i++) {
		secs[0][i] = run_base(&job, kvp_base_memcpy);
		secs[1][i] = run_mode(tokens, true, true, i == 0);
		secs[2][i] = run_base(&job, kvp_base_stream);
		secs[3][i] = run_mode(tokens, false, true, i == 0);
		secs[4][i] = run_mode(tokens, false, false, i == 0);
	}
	for (uint32_t k = 0; k < 5; k++)
		m[k] = kvp_base_median(secs[k], ROUNDS);
	printf("lane: %llu tokens, %u entries of %u-byte rows to %u ranks (%.0f MB)\n",
	       (unsigned long long)tokens, LAYERS, ROW_BYTES, DESTS, bytes / 1e6);
	show("memcpy", bytes, m[0], 0, "");
	show("local mode", bytes, m[1], m[0], "memcpy");
	show("socket stream", bytes, m[2], 0, "");
	show("landing over tcp", bytes, m[3], m[2], "a socket stream");
	show("landing, unpacked", bytes, m[4], m[2], "a socket stream");
	printf("  packed is %.1f times as fast as unpacked\n", m[4] / m[3]);
}

int main(int argc, char **argv)
{
	static const uint64_t sizes[] = { 4096, 32768 };

	if (argc > 1) {
		bench_size(strtoull(argv[1], NULL, 10));
		return 0;
	}
	for (size_t i = 0; i < KVP_ARRAY_SIZE(sizes); i++)
		bench_size(sizes[i]);
	return 0;
}
