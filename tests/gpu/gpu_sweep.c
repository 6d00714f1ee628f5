/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Variants of the move kernel on a GPU, with the tables that a lane makes: pieces of at most 8 MiB,
 * up to eight in a launch; pool to pool, a chunk in one. Every byte of random worlds and of the
 * smaller shapes is compared; then the speed of each as a fraction of a device-to-device copy of
 * the same bytes in the same run, on buffers used in turn so that no cache holds them. Before each
 * is timed, a copy fills the caches with its lines, as an engine's kernels do: a variant may be
 * slower for that, and must not gain by what the one before it left. With "alone", each launch is
 * timed by itself, with a copy before it. With "once", nothing is timed: gathers of each shape run
 * once, each behind a copy, for a profiler that counts what they read and write.
 *
 * usage: gpu_sweep [alone | once] [NAME.cubin ...]     the kernel of the daemon comes first
 */

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/jobs.h"
#include "proto/util.h"
#include "tests/support_rows.h"
#include "tests/support_world.h"

#define MAX_RANKS 8u
#define MAX_LAYERS 61u
#define SLOT_BYTES (UINT64_C(8) << 20)
#define SLOTS 8u /* pieces of a launch */
#define MAX_LAUNCHES 64u
#define MAX_SETS 8u
#define REPEATS 8u /* launches between two events */
#define ROUNDS 21u
#define ONCE_BYTES UINT64_C(300000000)
#define SMEM_MAX 232448u

extern const unsigned char kvp_move_image[];

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

enum order { ENTRY_FIRST, RUN_FIRST, WOVEN, TILES };
enum what { GATHER, SCATTER, MOVE };

struct variant {
	char label[32];
	CUfunction kernels[KVP_MOVE_SIZES];
	uint32_t threads, order, stages, blocks;
};

struct shape {
	uint32_t layers, width, tokens, ranks;
	enum what what;
};

/* One launch, ready to go: tables of one set of buffers. */
struct launch {
	union kvp_move_params params;
	enum kvp_move_size size;
	uint32_t run_bytes; /* of the largest run */
};

/* Pools and tables of a shape. */
struct scene {
	const struct shape *shape;
	enum what what;
	uint32_t page, n_pages;
	uint64_t bytes, pool_bytes, slot_bytes; /* that move; of a pool; of all slots */
	uint32_t n_sets, n_launches;
	CUdeviceptr src, dst, slots; /* [n_sets] of each */
	struct kvp_entry src_entries[MAX_LAYERS], dst_entries[MAX_LAYERS];
	struct kvp_pair pairs[MAX_LAYERS];
	uint32_t *pages, *dst_pages[MAX_RANKS];
	struct kvp_side src_side, dst_sides[MAX_RANKS];
	uint64_t starts[1];
	struct kvp_leg_geom legs[MAX_RANKS];
	struct launch *launches; /* [n_sets][MAX_LAUNCHES] */
};

static struct variant variants[40];
static uint32_t n_variants;
static bool alone, once;              /* launches, each timed by itself; not timed */
static const struct variant in_parts; /* the copy, in as many parts as there are launches */
static CUstream stream;
static int n_sms;
static struct kvp_jobs jobs;

static double now_us(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* ---- variants -------------------------------------------------------------------------------- */

static void variant_add(const char *path)
{
	static const char *const names[] = {
#define KERNEL_NAME(name, n_entries, n_runs) #name,
		KVP_MOVE_KERNELS(KERNEL_NAME)
	};
	struct variant *v = &variants[n_variants++];
	const char *base = path ? strrchr(path, '/') : NULL;
	uint32_t config[4];
	CUdeviceptr at;
	size_t bytes;
	CUmodule module;

	snprintf(v->label, sizeof(v->label), "%.24s", path ? base ? base + 1 : path : "daemon");
	v->label[strcspn(v->label, ".")] = 0;
	if (path)
		CHECK(cuModuleLoad(&module, path));
	else
		CHECK(cuModuleLoadData(&module, kvp_move_image));
	CHECK(cuModuleGetGlobal(&at, &bytes, module, "kvp_move_config"));
	CHECK(cuMemcpyDtoH(config, at, sizeof(config)));
	v->threads = config[0];
	v->order = config[1];
	v->stages = config[2];
	v->blocks = config[3];
	for (int i = 0; i < KVP_MOVE_SIZES; i++) {
		CHECK(cuModuleGetFunction(&v->kernels[i], module, names[i]));
		if (v->stages)
			CHECK(cuFuncSetAttribute(v->kernels[i],
						 CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
						 (int)SMEM_MAX - 1024));
	}
}

static bool variant_takes(const struct variant *v, const struct launch *launch)
{
	return v->stages * launch->run_bytes <= SMEM_MAX - 1024;
}

static void set_grid(const struct variant *v, const struct launch *launch, CUlaunchConfig *config)
{
	const struct kvp_move_head *head = &launch->params.head;
	const uint32_t n = head->n_entries, widest = head->widest;

	config->gridDimX = n;
	config->gridDimY = widest;
	config->gridDimZ = 1;
	if (v->order == RUN_FIRST) {
		config->gridDimX = widest;
		config->gridDimY = n;
	} else if (v->order == WOVEN) {
		config->gridDimX = head->pieces;
		config->gridDimZ = n / head->pieces;
	} else if (v->order == TILES) {
		config->gridDimX = n * widest;
		config->gridDimY = 1;
		if (v->blocks)
			config->gridDimX = KVP_MIN(n * widest, (uint32_t)n_sms * v->blocks);
	}
}

/* Those of one set of tables overlap, but the first. */
static void launch_one(const struct variant *v, struct launch *launch, bool first)
{
	CUlaunchAttribute overlap = {
		.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
		.value.programmaticStreamSerializationAllowed = 1,
	};
	CUlaunchConfig config = {
		.blockDimX = v->threads,
		.blockDimY = 1,
		.blockDimZ = 1,
		.sharedMemBytes = v->stages * launch->run_bytes,
		.hStream = stream,
		.attrs = &overlap,
		.numAttrs = first ? 0 : 1,
	};
	void *params[] = { &launch->params };

	if (launch->params.head.widest == 0)
		return;
	set_grid(v, launch, &config);
	CHECK(cuLaunchKernelEx(&config, v->kernels[launch->size], params, NULL));
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void *pinned_alloc(size_t bytes)
{
	void *at;

	CHECK(cuMemHostAlloc(&at, bytes, CU_MEMHOSTALLOC_DEVICEMAP));
	return at;
}

static uint32_t largest_run(void)
{
	uint32_t most = 0;

	for (uint32_t i = 0; i < jobs.n_entries; i++) {
		const struct kvp_move_entry *e = &jobs.entries[i];

		for (uint32_t k = 0; e->unit_log == 4 && k < e->n_runs; k++)
			most = KVP_MAX(most, jobs.runs[e->first_run + k].n * e->width);
	}
	return KVP_ALIGN_UP(most, 128u);
}

/* What the tables hold, as launches of their own: how many. */
static uint32_t tables_take(struct launch *launches, uint32_t most)
{
	struct kvp_jobs_cut cut = { 0 };
	uint32_t n = 0;

	while (cut.entry < jobs.n_entries) {
		if (n == most)
			die("too many launches", CUDA_ERROR_INVALID_VALUE);
		(void)kvp_jobs_params(&jobs, &cut, &launches[n].params, &launches[n].size);
		launches[n++].run_bytes = largest_run();
	}
	kvp_jobs_reset(&jobs);
	return n;
}

static void jobs_make(void)
{
	jobs.max_entries = 512;
	jobs.max_runs = 65535;
	jobs.entries = calloc(jobs.max_entries, sizeof(*jobs.entries));
	jobs.runs = calloc(jobs.max_runs, sizeof(*jobs.runs));
}

/* ---- random worlds --------------------------------------------------------------------------- */

unsigned char *world_memory(size_t bytes)
{
	return pinned_alloc(bytes);
}

void world_memory_free(void *at)
{
	CHECK(cuMemFreeHost(at));
}

static void run_tables(const struct variant *v)
{
	static struct launch launches[MAX_LAUNCHES];
	uint32_t n = tables_take(launches, MAX_LAUNCHES);

	for (uint32_t i = 0; i < n; i++)
		launch_one(v, &launches[i], i == 0);
	CHECK(cuStreamSynchronize(stream));
}

/* A wrong byte ends the program. */
static void check_worlds(const struct variant *v, uint32_t rounds)
{
	static struct world w;
	unsigned char *slot = world_memory(RANKS_MAX << 20);

	for (uint32_t round = 0; round < rounds; round++) {
		world_make(&w);
		world_pools(&w);
		if (world_good(&w) && round % 2) {
			if (!world_add_moves(&w, &jobs))
				exit(1);
			run_tables(v);
		} else if (world_good(&w)) {
			for (int gather = 1; gather >= 0; gather--) {
				for (uint32_t r = 0; r < w.n_ranks; r++)
					if (!world_add_piece(&w, r, gather, &jobs, slot))
						exit(1);
				run_tables(v);
			}
		}
		if (world_good(&w))
			world_check(&w, round);
		world_free(&w);
	}
	world_memory_free(slot);
}

/* ---- scenes ---------------------------------------------------------------------------------- */

static void entries_make(struct kvp_entry *entries, const struct scene *s, uint32_t n_pages)
{
	const uint64_t stride = (uint64_t)s->page * s->shape->width;

	for (uint32_t i = 0; i < s->shape->layers; i++)
		entries[i] = (struct kvp_entry){
			.base = i * n_pages * stride,
			.bytes = n_pages * stride,
			.page_stride = stride,
			.row_stride = s->shape->width,
			.layer = i,
			.row_bytes = s->shape->width,
			.full_bytes = s->shape->width,
			.rows_per_page = s->page,
			.n_pages = n_pages,
			.klass = KVP_CLASS_SHARDED,
		};
}

static void legs_make(struct scene *s)
{
	const uint32_t ranks = s->shape->ranks;
	struct kvp_entry_list src = { .entries = s->src_entries, .n = s->shape->layers };
	struct kvp_entry_list dst = { .entries = s->dst_entries, .n = s->shape->layers };
	char err[KVP_PLAN_ERR_BYTES];

	if (kvp_pair_entries(&src, &dst, s->pairs, MAX_LAYERS, err, sizeof(err)) !=
	    (int)s->shape->layers)
		die(err, CUDA_ERROR_INVALID_VALUE);
	s->src_side = (struct kvp_side){ .page = s->page,
					 .dcp_size = 1,
					 .interleave = 1,
					 .pages = s->pages,
					 .n_pages = s->n_pages };
	for (uint32_t r = 0; r < ranks; r++) {
		s->dst_pages[r] = rows_shuffled(s->n_pages / ranks, 2 + r);
		s->dst_sides[r] = (struct kvp_side){ .page = s->page,
						     .dcp_size = ranks,
						     .dcp_rank = r,
						     .interleave = 1,
						     .pages = s->dst_pages[r],
						     .n_pages = s->n_pages / ranks };
		s->legs[r] = (struct kvp_leg_geom){
			.pairs = s->pairs,
			.src = s->src_entries,
			.dst = s->dst_entries,
			.src_sides = &s->src_side,
			.dst_sides = &s->dst_sides[r],
			.dst_starts = s->starts,
			.end = s->shape->tokens,
			.n_pairs = s->shape->layers,
		};
	}
}

/* Addresses of a set of buffers; those of the pool of a rank. */
static unsigned char *at_set(CUdeviceptr base, uint32_t set, uint64_t bytes)
{
	return (unsigned char *)(uintptr_t)(base + set * bytes);
}

/* The piece of a rank that has the given tokens; its slot is where it lies in the packed order. */
static void piece_add(struct scene *s, uint32_t set, uint32_t r, struct kvp_range range,
		      uint64_t *slot)
{
	static struct kvp_part parts[MAX_LAYERS];
	const bool gather = s->what != SCATTER;
	unsigned char *src = at_set(s->src, set, s->pool_bytes);
	unsigned char *dst =
		at_set(s->dst, set, s->pool_bytes) + r * (s->pool_bytes / s->shape->ranks);
	struct kvp_copy_piece piece = {
		.leg = &s->legs[r],
		.pool = { gather ? &src : &dst, gather ? &s->src_side : &s->dst_sides[r] },
		.start = range.start,
		.tokens = range.tokens,
		.parts = parts,
	};
	const struct kvp_move_source source = { .src = { &src, &s->src_side },
						.n_entries = s->shape->layers,
						.start = range.start,
						.tokens = range.tokens };
	const struct kvp_move move = { &s->legs[r], { &dst, &s->dst_sides[r] } };
	uint64_t bytes = kvp_piece_layout(piece.leg, NULL, range.start, (uint32_t)range.tokens,
					  parts, &piece.n_parts);
	const uint64_t at = s->slots + set * s->slot_bytes + *slot;
	int result;

	if (s->what == MOVE)
		result = kvp_jobs_move(&jobs, &source, &move);
	else
		result = gather ? kvp_jobs_gather(&jobs, &piece, at)
				: kvp_jobs_scatter(&jobs, &piece, at);
	if (result < 0)
		die("tables are full", CUDA_ERROR_INVALID_VALUE);
	*slot += KVP_ALIGN_UP(bytes, 4096u);
}

/* As a lane does: pieces of all ranks in turns, eight to a launch; a chunk that only moves in one.
 */
static void tables_make(struct scene *s, uint32_t set)
{
	const uint64_t rank_bytes = s->bytes / s->shape->ranks;
	const uint32_t cuts = s->what == MOVE ? 1 : (uint32_t)KVP_DIV_UP(rank_bytes, SLOT_BYTES);
	const uint64_t tokens = KVP_ALIGN_UP(KVP_DIV_UP(s->shape->tokens, cuts), 256u);
	struct launch *launch = &s->launches[(uint64_t)set * MAX_LAUNCHES];
	uint64_t slot = 0;
	uint32_t pieces = 0;

	s->n_launches = 0;
	for (uint64_t start = 0; start < s->shape->tokens; start += tokens)
		for (uint32_t r = 0; r < s->shape->ranks; r++) {
			const struct kvp_range range = { start, KVP_MIN(tokens,
									s->shape->tokens - start) };

			piece_add(s, set, r, range, &slot);
			if (++pieces % SLOTS == 0)
				s->n_launches += tables_take(&launch[s->n_launches],
							     MAX_LAUNCHES - s->n_launches);
		}
	s->n_launches += tables_take(&launch[s->n_launches], MAX_LAUNCHES - s->n_launches);
}

static void scene_make(struct scene *s, const struct shape *shape, uint32_t max_sets)
{
	*s = (struct scene){
		.shape = shape, .what = shape->what, .page = 64, .n_pages = shape->tokens / 64
	};
	s->bytes = (uint64_t)shape->layers * shape->width * shape->tokens;
	s->pool_bytes = KVP_ALIGN_UP(s->bytes, 4096u);
	s->slot_bytes = s->pool_bytes + (UINT64_C(1) << 20) + s->pool_bytes / 64;
	s->n_sets = (uint32_t)(UINT64_C(800000000) / s->bytes);
	s->n_sets = KVP_MIN(s->n_sets, max_sets);
	s->n_sets = KVP_MAX(s->n_sets, 1u);
	s->pages = rows_shuffled(s->n_pages, 1);
	entries_make(s->src_entries, s, s->n_pages);
	entries_make(s->dst_entries, s, s->n_pages / shape->ranks);
	legs_make(s);
	CHECK(cuMemAlloc(&s->src, s->n_sets * s->pool_bytes));
	CHECK(cuMemAlloc(&s->dst, s->n_sets * s->pool_bytes));
	CHECK(cuMemAlloc(&s->slots, s->n_sets * s->slot_bytes));
	s->launches = calloc((uint64_t)s->n_sets * MAX_LAUNCHES, sizeof(*s->launches));
	if (!s->launches)
		exit(1);
	for (uint32_t set = 0; set < s->n_sets; set++)
		tables_make(s, set);
}

static void scene_end(struct scene *s)
{
	CHECK(cuMemFree(s->src));
	CHECK(cuMemFree(s->dst));
	CHECK(cuMemFree(s->slots));
	free(s->launches);
	free(s->pages);
	for (uint32_t r = 0; r < s->shape->ranks; r++)
		free(s->dst_pages[r]);
}

static void scene_launch(struct scene *s, const struct variant *v, uint32_t set)
{
	for (uint32_t i = 0; i < s->n_launches; i++)
		launch_one(v, &s->launches[(uint64_t)set * MAX_LAUNCHES + i], i == 0);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* By counting: position p is row p / ranks of rank p % ranks. */
static uint64_t wrong_rows(const struct scene *s, const uint8_t *src, const uint8_t *dst)
{
	const uint32_t ranks = s->shape->ranks, width = s->shape->width, page = s->page;
	uint64_t wrong = 0;

	for (uint64_t pos = 0; pos < s->shape->tokens; pos++) {
		const uint32_t rank = (uint32_t)(pos % ranks);
		const uint64_t local = pos / ranks;
		const uint64_t from = (uint64_t)s->pages[pos / page] * page + pos % page;
		const uint64_t to =
			(uint64_t)s->dst_pages[rank][local / page] * page + local % page;

		for (uint32_t l = 0; l < s->shape->layers; l++)
			wrong += memcmp(src + s->src_entries[l].base + from * width,
					dst + rank * (s->pool_bytes / ranks) +
						s->dst_entries[l].base + to * width,
					width) != 0;
	}
	return wrong;
}

static void run_scene(struct scene *s, const struct variant *v, enum what what)
{
	s->what = what;
	tables_make(s, 0);
	scene_launch(s, v, 0);
	CHECK(cuStreamSynchronize(stream));
}

/* Pool to pool, and the same by slots. */
static void check_scene(const struct variant *v, const struct shape *shape)
{
	static struct scene s;
	uint8_t *src, *dst;

	scene_make(&s, shape, 1);
	src = malloc(s.bytes);
	dst = malloc(s.bytes);
	if (!src || !dst)
		exit(1);
	for (uint64_t i = 0; i < s.bytes; i++)
		src[i] = (uint8_t)(i * UINT64_C(0x9e3779b97f4a7c15) >> 56);
	CHECK(cuMemcpyHtoD(s.src, src, s.bytes));
	for (int slots = 0; slots < 2; slots++) {
		uint64_t wrong;

		CHECK(cuMemsetD8(s.dst, 0, s.pool_bytes));
		CHECK(cuCtxSynchronize());
		run_scene(&s, v, slots ? GATHER : MOVE);
		if (slots)
			run_scene(&s, v, SCATTER);
		CHECK(cuMemcpyDtoH(dst, s.dst, s.bytes));
		wrong = wrong_rows(&s, src, dst);
		if (wrong) {
			fprintf(stderr, "%s: %llu rows are wrong\n", v->label,
				(unsigned long long)wrong);
			exit(1);
		}
	}
	free(src);
	free(dst);
	scene_end(&s);
}

/* ---- speed ----------------------------------------------------------------------------------- */

static void copy_in(struct scene *s, uint32_t set, uint32_t parts)
{
	const uint64_t each = KVP_ALIGN_UP(s->bytes / parts, 4096u);

	for (uint64_t at = 0; at < s->bytes; at += each)
		CHECK(cuMemcpyDtoDAsync(s->dst + set * s->pool_bytes + at,
					s->src + set * s->pool_bytes + at,
					KVP_MIN(each, s->bytes - at), stream));
}

/* One of a variant, or (NULL) the copy. */
static void one_of(struct scene *s, const struct variant *v, uint32_t set)
{
	if (v && v != &in_parts)
		scene_launch(s, v, set);
	else
		copy_in(s, set, v ? s->n_launches : 1);
}

/* Median us of one. */
static double time_of(struct scene *s, const struct variant *v)
{
	const uint32_t repeats = alone ? 1 : REPEATS;
	double us[ROUNDS];
	CUevent from, to;

	CHECK(cuEventCreate(&from, 0));
	CHECK(cuEventCreate(&to, 0));
	for (uint32_t k = 0; k < s->n_sets; k++)
		one_of(s, NULL, k);
	for (uint32_t i = 0; i < ROUNDS + 2; i++) {
		float ms;

		if (alone)
			one_of(s, NULL, (i + s->n_sets / 2) % s->n_sets);
		CHECK(cuEventRecord(from, stream));
		for (uint32_t k = 0; k < repeats; k++)
			one_of(s, v, (k + (alone ? i : 0)) % s->n_sets);
		CHECK(cuEventRecord(to, stream));
		CHECK(cuStreamSynchronize(stream));
		CHECK(cuEventElapsedTime(&ms, from, to));
		if (i >= 2)
			us[i - 2] = (double)ms * 1000 / repeats;
	}
	(void)cuEventDestroy(from);
	(void)cuEventDestroy(to);
	qsort(us, ROUNDS, sizeof(us[0]), by_value);
	return us[ROUNDS / 2];
}

/* Of the processor for one set: the tables, and the launches with them. */
static void host_of(struct scene *s, const struct variant *v, double *tables, double *launches)
{
	double t[ROUNDS], l[ROUNDS];

	for (uint32_t i = 0; i < ROUNDS; i++) {
		uint64_t slot = 0;
		double from = now_us();

		for (uint32_t r = 0; r < s->shape->ranks; r++)
			if (jobs.n_entries + s->shape->layers <= jobs.max_entries)
				piece_add(s, 0, r, (struct kvp_range){ 0, s->shape->tokens },
					  &slot);
		t[i] = now_us() - from;
		kvp_jobs_reset(&jobs);
		from = now_us();
		scene_launch(s, v, 0);
		l[i] = now_us() - from;
		CHECK(cuStreamSynchronize(stream));
	}
	qsort(t, ROUNDS, sizeof(t[0]), by_value);
	qsort(l, ROUNDS, sizeof(l[0]), by_value);
	*tables = t[ROUNDS / 2];
	*launches = l[ROUNDS / 2];
}

static const struct shape shapes[] = {
	{ 7, 576, 2048, 4, GATHER },   { 7, 576, 8192, 4, GATHER },  { 14, 576, 8192, 4, GATHER },
	{ 61, 576, 8192, 4, GATHER },  { 61, 656, 8192, 4, GATHER }, { 61, 1152, 8192, 4, GATHER },
	{ 61, 576, 32768, 4, GATHER }, { 7, 576, 8192, 8, GATHER },  { 7, 576, 8192, 4, SCATTER },
	{ 61, 576, 8192, 4, SCATTER }, { 7, 576, 2048, 4, MOVE },    { 7, 576, 8192, 4, MOVE },
	{ 61, 576, 8192, 4, MOVE },
};

static void table_head(const double *copy)
{
	static const char *const words[] = { "gather", "scatter", "move" };

	printf("%-24s", "entries x row");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %3ux%-4u", shapes[i].layers, shapes[i].width);
	printf("\n%-24s", "tokens / ranks");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %5u/%-2u", shapes[i].tokens, shapes[i].ranks);
	printf("\n%-24s", "what");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %8s", words[shapes[i].what]);
	printf("\n%-24s", "MB");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %8.1f",
		       shapes[i].layers * (double)shapes[i].width * shapes[i].tokens / 1e6);
	printf("\n%-24s", "copy, us");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %8.2f", copy[i]);
	puts("");
}

/* Each gather behind a copy of other buffers, which leaves its lines in the caches. */
static void run_once(void)
{
	static struct scene s;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++) {
		const struct shape *shape = &shapes[i];

		if (shape->what != GATHER ||
		    (uint64_t)shape->layers * shape->width * shape->tokens > ONCE_BYTES)
			continue;
		scene_make(&s, shape, 2);
		for (uint32_t v = 0; v < n_variants; v++) {
			if (!variant_takes(&variants[v], &s.launches[0]))
				continue;
			printf("%s: %u x %u, %.1f MB, %u ranks, %u launches\n", variants[v].label,
			       shape->layers, shape->width, (double)s.bytes / 1e6, shape->ranks,
			       s.n_launches);
			one_of(&s, NULL, s.n_sets - 1);
			one_of(&s, &variants[v], 0);
			CHECK(cuStreamSynchronize(stream));
		}
		scene_end(&s);
	}
}

static void host_lines(void)
{
	static struct scene s;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++) {
		double tables, launches;

		scene_make(&s, &shapes[i], 1);
		host_of(&s, &variants[0], &tables, &launches);
		printf("host, %u x %u, %.1f MB, %u launch(es): tables %.1f us, a launch %.1f us\n",
		       shapes[i].layers, shapes[i].width, (double)s.bytes / 1e6, s.n_launches,
		       tables, launches / s.n_launches);
		scene_end(&s);
	}
}

int main(int argc, char **argv)
{
	static struct scene s;
	static double us[KVP_ARRAY_SIZE(variants)][KVP_ARRAY_SIZE(shapes)];
	double copy[KVP_ARRAY_SIZE(shapes)], parts[KVP_ARRAY_SIZE(shapes)];
	CUdevice device;
	CUcontext ctx;

	(void)setvbuf(stdout, NULL, _IOLBF, 0); /* who is stopped has said what was done */
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, device));
	CHECK(cuCtxSetCurrent(ctx));
	CHECK(cuDeviceGetAttribute(&n_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	jobs_make();
	variant_add(NULL);
	alone = argc > 1 && !strcmp(argv[1], "alone");
	once = argc > 1 && !strcmp(argv[1], "once");
	for (int i = 1 + (alone || once); i < argc && n_variants < KVP_ARRAY_SIZE(variants); i++)
		variant_add(argv[i]);
	if (once) {
		run_once();
		return 0;
	}
	for (uint32_t v = 0; v < n_variants; v++) {
		check_worlds(&variants[v], v ? 20 : 600);
		check_scene(&variants[v], &shapes[0]);
		check_scene(&variants[v], &shapes[7]);
	}
	printf("%u variants: every byte right\n", n_variants);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++) {
		scene_make(&s, &shapes[i], MAX_SETS);
		copy[i] = time_of(&s, NULL);
		for (uint32_t v = 0; v < n_variants; v++)
			us[v][i] = variant_takes(&variants[v], &s.launches[0])
					   ? time_of(&s, &variants[v])
					   : 0;
		parts[i] = time_of(&s, &in_parts);
		copy[i] = (copy[i] + time_of(&s, NULL)) / 2;
		scene_end(&s);
	}
	table_head(copy);
	printf("%-24s", "copy, in parts");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
		printf(" %8.3f", copy[i] / parts[i]);
	puts("");
	for (uint32_t v = 0; v < n_variants; v++) {
		printf("%-24s", variants[v].label);
		for (size_t i = 0; i < KVP_ARRAY_SIZE(shapes); i++)
			printf(" %8.3f", us[v][i] > 0 ? copy[i] / us[v][i] : 0);
		puts("");
	}
	if (!alone)
		host_lines();
	return 0;
}
