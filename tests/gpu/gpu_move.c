/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The move kernel on a GPU: every byte against the planner's row-by-row rule, then its speed as a
 * fraction of a device-to-device copy of the same bytes in the same run.
 *
 * usage: gpu_move CUBIN LABEL THREADS [check]
 */

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/move.h"
#include "proto/plan.h"
#include "proto/util.h"

#define MAX_RANKS 8
#define LOTS (64u << 10)

static void die(const char *what, CUresult res)
{
	const char *name = "?";

	(void)cuGetErrorName(res, &name);
	fprintf(stderr, "%s: %s\n", what, name);
	exit(1);
}

#define CHECK(call)                       \
	do {                              \
		CUresult res_ = (call);   \
		if (res_ != CUDA_SUCCESS) \
			die(#call, res_); \
	} while (0)

struct shape {
	uint32_t layers, width, tokens, page, ranks, interleave;
	uint64_t start;
};

/* What a shape is run on. */
struct data {
	CUdeviceptr src, dst;
	uint32_t n_pages, n_runs, rows;
};

struct bench {
	CUfunction fn;
	CUstream stream;
	uint32_t threads;
	struct kvp_move_run *pinned; /* [LOTS] */
	CUdeviceptr pinned_dev;
	CUfunction near_fn;
	struct kvp_move_near_job args;
	uint32_t blocks;
	int near; /* runs by value when they fit */
	double host_us;
};

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0x9e3779b97f4a7c15u;
	x ^= x >> 29;
	return x;
}

/* Division by `units` for indices below 2^31 as the kernel does it. */
static void set_magic(struct kvp_move_entry *e)
{
	uint32_t units, log = 0;

	for (e->unit_log = 4;
	     e->unit_log && (e->width | e->src | e->dst | e->src_page_stride | e->dst_page_stride |
			     e->src_row_stride | e->dst_row_stride) &
				    ((1u << e->unit_log) - 1);)
		e->unit_log--;
	units = e->width >> e->unit_log;
	if (units == 0)
		exit(1);
	while ((1u << log) < units)
		log++;
	if (units == 1u << log) {
		e->magic = 0;
		e->shift = (uint16_t)log;
		return;
	}
	e->magic = (uint32_t)((UINT64_C(1) << (31 + log)) / units + 1);
	e->shift = (uint16_t)(log - 1);
}

static uint32_t *random_pages(uint32_t n, uint64_t seed)
{
	uint32_t *pages = calloc(n, sizeof(*pages));

	for (uint32_t i = 0; i < n; i++)
		pages[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		uint32_t j = (uint32_t)(mix(seed + i) % i);
		uint32_t t = pages[i - 1];

		pages[i - 1] = pages[j];
		pages[j] = t;
	}
	return pages;
}

static struct kvp_side side_of(uint32_t page, uint32_t ranks, uint32_t rank, uint32_t interleave)
{
	return (struct kvp_side){ .page = page,
				  .dcp_size = ranks,
				  .dcp_rank = rank,
				  .interleave = interleave,
				  .n_pages = KVP_PAGES_ANY };
}

/* The runs of all ranks, in source page order: blocks that are near in time read near addresses. */
static uint32_t plan_runs(const struct shape *s, const uint32_t *pages, uint32_t n_pages,
			  struct kvp_move_run *runs, uint32_t *rows)
{
	struct kvp_rows_iter it[MAX_RANKS];
	struct kvp_run run[MAX_RANKS];
	bool live[MAX_RANKS];
	struct kvp_side src = side_of(s->page, 1, 0, s->interleave);
	uint32_t n = 0, base = 0, next[MAX_RANKS];

	src.pages = pages;
	src.n_pages = n_pages;
	src.pos0 = s->start - s->start % s->page;
	for (uint32_t r = 0; r < s->ranks; r++) {
		struct kvp_side dst = side_of(s->page, s->ranks, r, s->interleave);

		next[r] = base;
		base += (uint32_t)kvp_rows_count(&src, &dst, s->start, s->tokens);
		kvp_rows_begin(&it[r], &src, &dst, s->start, s->tokens);
		live[r] = kvp_rows_next(&it[r], &run[r]);
	}
	*rows = base;
	for (;;) {
		uint32_t best = MAX_RANKS;

		for (uint32_t r = 0; r < s->ranks; r++)
			if (live[r] && (best == MAX_RANKS || run[r].pos < run[best].pos))
				best = r;
		if (best == MAX_RANKS)
			return n;
		runs[n] = (struct kvp_move_run){ .src_page = run[best].src_page,
						 .src_slot = run[best].src_slot,
						 .src_step = (uint16_t)run[best].src_step,
						 .dst_page = 0,
						 .dst_slot = next[best],
						 .dst_step = 1,
						 .n = run[best].n };
		n++;
		next[best] += run[best].n;
		live[best] = kvp_rows_next(&it[best], &run[best]);
	}
}

static void fill_args(struct bench *b, const struct shape *s, uint32_t first, uint32_t layers,
		      const struct data *d)
{
	uint64_t entry_bytes = (uint64_t)d->n_pages * s->page * s->width;

	b->args.job.n_entries = layers;
	b->args.job.table = (const struct kvp_move_run *)b->pinned_dev;
	b->near = d->n_runs <= KVP_MOVE_RUNS && getenv("NEAR");
	if (b->near)
		memcpy(b->args.runs, b->pinned, d->n_runs * sizeof(*b->pinned));
	for (uint32_t l = 0; l < layers; l++) {
		struct kvp_move_entry *e = &b->args.job.entries[l];

		*e = (struct kvp_move_entry){ .src = d->src + (first + l) * entry_bytes,
					      .dst = d->dst +
						     (uint64_t)(first + l) * d->rows * s->width,
					      .src_page_stride = (uint64_t)s->page * s->width,
					      .src_row_stride = s->width,
					      .dst_row_stride = s->width,
					      .width = s->width,
					      .n_runs = d->n_runs };
		set_magic(e);
	}
	b->blocks = d->n_runs;
}

static void launch(struct bench *b)
{
	void *params[] = { &b->args };

	CHECK(cuLaunchKernel(b->near ? b->near_fn : b->fn, b->blocks, b->args.job.n_entries, 1,
			     b->threads, 1, 1, 0, b->stream, params, NULL));
}

/* All layers, in as many launches as the entry table needs. */
static void pack_all(struct bench *b, const struct shape *s, const struct data *d)
{
	for (uint32_t l = 0; l < s->layers; l += KVP_MOVE_ENTRIES) {
		fill_args(b, s, l, KVP_MIN(s->layers - l, (uint32_t)KVP_MOVE_ENTRIES), d);
		launch(b);
	}
}

static int compare_float(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + 255) / 256 * 256;
}

/* Sets of buffers that are used in turn, so that no cache holds them: 8 or as many as make 800 MB.
 */
static uint64_t sets_of(uint64_t bytes)
{
	uint64_t n = 800000000 / bytes;

	return n < 1 ? 1 : n > 8 ? 8 : n;
}

static double now_us(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

#define ROUNDS 31

/* Median time of the work in us: copy (how 0) or pack (how 1), on rotating halves of the buffers.
 */
static float time_one(struct bench *b, const struct shape *s, int how, const struct data *d)
{
	CUevent from, to;
	float ms[ROUNDS];
	uint64_t bytes = (uint64_t)d->rows * s->width * s->layers;
	uint64_t dst_bytes = round_up((uint64_t)s->tokens * s->width * s->layers);
	uint64_t src_bytes = round_up((uint64_t)d->n_pages * s->page * s->width * s->layers);
	uint64_t sets = sets_of(dst_bytes);
	double host = 0;

	CHECK(cuEventCreate(&from, 0));
	CHECK(cuEventCreate(&to, 0));
	for (int i = 0; i < ROUNDS + 3; i++) {
		CHECK(cuEventRecord(from, b->stream));
		double t0 = now_us();

		for (int k = 0; k < 8; k++) {
			struct data at = *d;

			at.src += k % sets * src_bytes;
			at.dst += k % sets * dst_bytes;
			if (how)
				pack_all(b, s, &at);
			else
				CHECK(cuMemcpyDtoDAsync(at.dst, at.src, bytes, b->stream));
		}
		host = now_us() - t0;
		CHECK(cuEventRecord(to, b->stream));
		CHECK(cuStreamSynchronize(b->stream));
		if (i >= 3)
			CHECK(cuEventElapsedTime(&ms[i - 3], from, to));
	}
	qsort(ms, ROUNDS, sizeof(ms[0]), compare_float);
	(void)cuEventDestroy(from);
	(void)cuEventDestroy(to);
	b->host_us = host / 8;
	return ms[ROUNDS / 2] * 1000.0f / 8;
}

static uint64_t check_bytes(const struct shape *s, const uint32_t *pages, const uint8_t *src,
			    const uint8_t *dst, uint32_t n_pages, uint32_t rows)
{
	uint64_t wrong = 0, entry_bytes = (uint64_t)n_pages * s->page * s->width;
	uint64_t pos0 = s->start - s->start % s->page;
	uint32_t at = 0;

	for (uint32_t r = 0; r < s->ranks; r++)
		for (uint64_t p = s->start; p < s->start + s->tokens; p++) {
			if (p / s->interleave % s->ranks != r)
				continue;
			for (uint32_t l = 0; l < s->layers; l++) {
				uint64_t row = (uint64_t)pages[(p - pos0) / s->page] * s->page +
					       p % s->page;

				wrong += memcmp(src + l * entry_bytes + row * s->width,
						dst + ((uint64_t)l * rows + at) * s->width,
						s->width) != 0;
			}
			at++;
		}
	return wrong + (at != rows);
}

static void one_shape(struct bench *b, const char *label, const struct shape *s, int timing)
{
	uint32_t n_pages = (s->tokens + s->page - 1) / s->page + 2, rows;
	uint32_t *pages = random_pages(n_pages, s->tokens);
	uint64_t src_bytes = (uint64_t)n_pages * s->page * s->width * s->layers;
	uint64_t dst_bytes = (uint64_t)s->tokens * s->width * s->layers;
	uint32_t n_runs = plan_runs(s, pages, n_pages, b->pinned, &rows);
	uint8_t *host_src = malloc(src_bytes), *host_dst = malloc(dst_bytes);
	CUdeviceptr src, dst;
	struct data d;
	float copy = 0, pack = 0;
	uint64_t wrong;

	for (uint64_t i = 0; i + 8 <= src_bytes; i += 8) {
		uint64_t v = mix(i + 1);

		memcpy(host_src + i, &v, 8);
	}
	CHECK(cuMemAlloc(&src, timing ? round_up(src_bytes) * sets_of(dst_bytes) : src_bytes));
	CHECK(cuMemAlloc(&dst, timing ? round_up(dst_bytes) * sets_of(dst_bytes) : dst_bytes));
	CHECK(cuMemcpyHtoD(src, host_src, src_bytes));
	CHECK(cuMemsetD8(dst, 0xee, dst_bytes));
	CHECK(cuCtxSynchronize());
	d = (struct data){ src, dst, n_pages, n_runs, rows };
	pack_all(b, s, &d);
	CHECK(cuStreamSynchronize(b->stream));
	CHECK(cuMemcpyDtoH(host_dst, dst, dst_bytes));
	wrong = check_bytes(s, pages, host_src, host_dst, n_pages, rows);
	if (timing) {
		copy = time_one(b, s, 0, &d);
		pack = time_one(b, s, 1, &d);
	}
	printf("%-8s L %2u w %4u T %6u P %2u N %u I %2u start %llu runs %5u: %s", label, s->layers,
	       s->width, s->tokens, s->page, s->ranks, s->interleave, (unsigned long long)s->start,
	       n_runs, wrong ? "WRONG" : "right");
	if (timing)
		printf("  copy %7.1f us %5.2f TB/s  pack %7.1f us  ratio %.3f  host %.1f us %s",
		       copy, 2e-6 * (double)dst_bytes / copy, pack, copy / pack, b->host_us,
		       b->near ? "near" : "far");
	puts("");
	if (wrong)
		exit(1);
	CHECK(cuMemFree(src));
	CHECK(cuMemFree(dst));
	free(pages);
	free(host_src);
	free(host_dst);
}

static void random_shapes(struct bench *b, const char *label)
{
	static const uint32_t widths[] = { 132, 576, 656, 1152, 3, 5, 10, 17, 64, 258, 1000 };
	static const uint32_t sizes[] = { 1, 2, 4, 16, 64 };

	for (uint64_t i = 0; i < 120; i++) {
		struct shape s = { .layers = 1 + (uint32_t)(mix(i * 7 + 1) % 5),
				   .width = widths[mix(i * 7 + 2) % KVP_ARRAY_SIZE(widths)],
				   .tokens = 1 + (uint32_t)(mix(i * 7 + 3) % 700),
				   .page = sizes[mix(i * 7 + 4) % KVP_ARRAY_SIZE(sizes)],
				   .ranks = 1 + (uint32_t)(mix(i * 7 + 5) % 8),
				   .interleave = 1,
				   .start = mix(i * 7 + 6) % 1000 };

		if (i % 3 == 0)
			s.interleave = s.page;
		one_shape(b, label, &s, 0);
	}
}

int main(int argc, char **argv)
{
	static struct bench b;
	bool small = getenv("SMALL");
	static const struct shape timed[] = {
		{ 7, 576, 2048, 64, 4, 1, 0 },   { 7, 576, 8192, 64, 4, 1, 0 },
		{ 14, 576, 8192, 64, 4, 1, 0 },  { 61, 576, 8192, 64, 4, 1, 0 },
		{ 61, 1152, 8192, 64, 4, 1, 0 }, { 61, 656, 8192, 64, 4, 1, 0 },
		{ 61, 576, 32768, 64, 4, 1, 0 }, { 7, 576, 8192, 64, 8, 1, 0 },
	};
	CUdevice dev;
	CUcontext ctx;
	CUmodule mod;

	if (argc < 4)
		return 2;
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&dev, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuModuleLoad(&mod, argv[1]));
	CHECK(cuModuleGetFunction(&b.fn, mod, "kvp_move"));
	CHECK(cuModuleGetFunction(&b.near_fn, mod, "kvp_move_near"));
	CHECK(cuStreamCreate(&b.stream, CU_STREAM_NON_BLOCKING));
	b.threads = (uint32_t)strtoul(argv[3], NULL, 10);
	CHECK(cuMemHostAlloc((void **)&b.pinned, LOTS * sizeof(*b.pinned),
			     CU_MEMHOSTALLOC_DEVICEMAP));
	CHECK(cuMemHostGetDevicePointer(&b.pinned_dev, b.pinned, 0));
	if (argc > 4)
		random_shapes(&b, argv[2]);
	for (size_t i = 0; i < (small ? 3 : KVP_ARRAY_SIZE(timed)); i++)
		one_shape(&b, argv[2], &timed[i], 1);
	return 0;
}
