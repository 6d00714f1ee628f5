/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The move kernel by source pages, to compare with kernels/move.cu: one block moves the runs of all
 * ranks that lie in one page, so that the page is read once, front to back. The grid is x: groups
 * of `weave` pieces, y: runs, z: entries of a piece; `weave` is the zero of the head, filled by
 * tests/gpu/gpu_sweep.c.
 *   PAGE_KIND     0: by registers, PAGE_IN_FLIGHT units a thread at a time
 *                 1: one bulk copy for each rank's share of the page into shared memory, rows from
 *                    there by bulk copies (sm_90 on)
 *                 2: rows into shared memory by bulk copies, each rank's by one from there
 *   PAGE_THREADS, PAGE_BLOCKS  of a block; blocks of a multiprocessor at least
 */

#include "kernels/move.h"

#ifndef PAGE_KIND
#define PAGE_KIND 0
#endif
#ifndef PAGE_THREADS
#define PAGE_THREADS 288
#endif
#ifndef PAGE_IN_FLIGHT
#define PAGE_IN_FLIGHT 4
#endif
#ifndef PAGE_BLOCKS
#define PAGE_BLOCKS (PAGE_KIND ? 1 : 2048 / PAGE_THREADS)
#endif
#define RANKS 8u /* of a group at most, a power of two */

extern "C" __constant__ uint32_t kvp_move_config[4] = { PAGE_THREADS, 3, PAGE_KIND ? 1 : 0, 0 };

/* What a block moves: rows 0 .. rows-1 of the page, row i to its rank i % ranks. */
struct page {
	uint64_t src;
	uint32_t rows, width, step, log; /* ranks are 1 << log */
	uint64_t *dst;                   /* [ranks] */
};

static __device__ __forceinline__ uint4 load(uint64_t at)
{
	uint4 v;

	asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "l"(at));
	return v;
}

#if PAGE_KIND == 0
static __device__ __forceinline__ uint32_t row_of(uint32_t idx, const struct kvp_move_entry &e)
{
	return e.magic ? __umulhi(idx, e.magic) >> e.shift : idx >> e.shift;
}

static __device__ __forceinline__ void by_registers(const struct page &p,
						    const struct kvp_move_entry &e)
{
	const uint32_t units = p.width / 16, total = p.rows * units, ranks = (1u << p.log) - 1;

	for (uint32_t i = threadIdx.x; i < total; i += PAGE_IN_FLIGHT * PAGE_THREADS) {
		uint4 value[PAGE_IN_FLIGHT];

#pragma unroll
		for (int k = 0; k < PAGE_IN_FLIGHT; k++)
			if (i + k * PAGE_THREADS < total)
				value[k] = load(p.src + (i + k * PAGE_THREADS) * 16ull);
#pragma unroll
		for (int k = 0; k < PAGE_IN_FLIGHT; k++) {
			const uint32_t at = i + k * PAGE_THREADS, row = row_of(at, e);

			if (at < total)
				*(uint4 *)(p.dst[row & ranks] + (uint64_t)(row >> p.log) * p.step +
					   (at - row * units) * 16) = value[k];
		}
	}
}

#else
static __device__ __forceinline__ void bulk_in(uint32_t to, uint64_t from, uint32_t bytes,
					       uint32_t barrier)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		     " [%0], [%1], %2, [%3];" ::"r"(to),
		     "l"(from), "r"(bytes), "r"(barrier)
		     : "memory");
}

static __device__ __forceinline__ void bulk_out(uint64_t to, uint32_t from, uint32_t bytes)
{
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
		     "r"(from), "r"(bytes)
		     : "memory");
}

static __device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
		     "r"(bytes)
		     : "memory");
}

static __device__ __forceinline__ void wait_full(uint32_t barrier)
{
	asm volatile("{\n"
		     ".reg .pred done;\n"
		     "again:\n"
		     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
		     "@!done bra again;\n"
		     "}" ::"r"(barrier)
		     : "memory");
}

/* A barrier for each share of 1 / ranks of the page. */
static __device__ __forceinline__ void by_bulk(const struct page &p)
{
	extern __shared__ __align__(128) unsigned char stage[];
	__shared__ __align__(8) uint64_t full[RANKS];
	const uint32_t smem = (uint32_t)__cvta_generic_to_shared(stage), ranks = 1u << p.log;
	const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(full);
	const uint32_t share = p.rows >> p.log, bytes = share * p.width; /* of a rank */

	if (threadIdx.x == 0) {
		for (uint32_t k = 0; k < ranks; k++)
			asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + k * 8));
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
		asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
		for (uint32_t k = 0; k < ranks; k++) {
			expect(barrier + k * 8, bytes);
			if (PAGE_KIND == 1)
				bulk_in(smem + k * bytes, p.src + (uint64_t)k * bytes, bytes,
					barrier + k * 8);
		}
	}
	__syncthreads();
	if (PAGE_KIND == 1) {
		for (uint32_t row = threadIdx.x; row < p.rows; row += PAGE_THREADS) {
			wait_full(barrier + row / share * 8);
			bulk_out(p.dst[row & (ranks - 1)] + (uint64_t)(row >> p.log) * p.step,
				 smem + row * p.width, p.width);
		}
	} else {
		for (uint32_t row = threadIdx.x; row < p.rows; row += PAGE_THREADS)
			bulk_in(smem + (row & (ranks - 1)) * bytes + (row >> p.log) * p.width,
				p.src + (uint64_t)row * p.width, p.width,
				barrier + (row & (ranks - 1)) * 8);
		if (threadIdx.x < ranks) {
			wait_full(barrier + threadIdx.x * 8);
			bulk_out(p.dst[threadIdx.x], smem + threadIdx.x * bytes, bytes);
		}
	}
	asm volatile("cp.async.bulk.commit_group;" ::: "memory");
	asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif

/* What is no page of all ranks: a run after the other, a byte at a time or 16. */
static __device__ void one_run(const struct kvp_move_entry &e, const struct kvp_move_run &run)
{
	const uint64_t src = e.src + run.src_page * e.src_page_stride +
			     (uint64_t)run.src_slot * e.src_row_stride;
	const uint64_t dst = e.dst + run.dst_page * e.dst_page_stride +
			     (uint64_t)run.dst_slot * e.dst_row_stride;
	const uint32_t unit = e.unit_log == 4 ? 16 : 1, units = e.width / unit;

	for (uint32_t i = threadIdx.x; i < run.n * units; i += PAGE_THREADS) {
		const uint32_t row = i / units, col = (i - row * units) * unit;
		const uint64_t from = src + (uint64_t)row * run.src_step * e.src_row_stride + col;
		const uint64_t to = dst + (uint64_t)row * run.dst_step * e.dst_row_stride + col;

		if (unit == 16)
			*(uint4 *)to = load(from);
		else
			*(char *)to = *(const char *)from;
	}
}

static __device__ __forceinline__ void move_page(const struct kvp_move_head &head,
						 const struct kvp_move_entry *entries,
						 const struct kvp_move_run *table)
{
	__shared__ uint64_t dst[RANKS];
	const uint32_t ranks = head.zero, first = blockIdx.x * ranks * gridDim.z + blockIdx.z;
	const struct kvp_move_entry &e = entries[first];
	bool fits = e.n_runs > blockIdx.y && e.unit_log == 4 && ranks > 1;
	struct kvp_move_run run = {};

	if (fits) {
		run = table[e.first_run + blockIdx.y];
		fits = run.src_step == ranks && e.src_row_stride == e.width;
	}
	if (fits && threadIdx.x < ranks) {
		const struct kvp_move_entry &o = entries[first + threadIdx.x * gridDim.z];

		fits = o.n_runs > blockIdx.y && o.src == e.src && o.width == e.width &&
		       o.unit_log == 4;
		if (fits) {
			const struct kvp_move_run r = table[o.first_run + blockIdx.y];

			fits = r.src_page == run.src_page && r.n == run.n && r.src_step == ranks &&
			       r.src_slot == run.src_slot + threadIdx.x &&
			       r.dst_step * o.dst_row_stride == run.dst_step * e.dst_row_stride;
			if (PAGE_KIND == 2)
				fits = fits && r.dst_step * o.dst_row_stride == o.width;
			dst[threadIdx.x] = o.dst + r.dst_page * o.dst_page_stride +
					   (uint64_t)r.dst_slot * o.dst_row_stride;
		}
	}
	if (__syncthreads_and(fits)) {
		const struct page p = {
			e.src + run.src_page * e.src_page_stride +
				(uint64_t)run.src_slot * e.src_row_stride,
			run.n * ranks,
			e.width,
			run.dst_step * e.dst_row_stride,
			31u - __clz(ranks),
			dst,
		};

#if PAGE_KIND
		by_bulk(p);
#else
		by_registers(p, e);
#endif
		return;
	}
	for (uint32_t k = 0; k < ranks; k++) {
		const struct kvp_move_entry &o = entries[first + k * gridDim.z];

		if (o.n_runs > blockIdx.y)
			one_run(o, table[o.first_run + blockIdx.y]);
	}
}

#define KERNEL(name, n_entries, n_runs)                                                     \
	extern "C" __global__ void __launch_bounds__(PAGE_THREADS, PAGE_BLOCKS)            \
		name(const __grid_constant__ struct name##_params params)                   \
	{                                                                                   \
		asm volatile("griddepcontrol.launch_dependents;" ::: "memory");            \
		move_page(params.head, params.entries, params.runs);                        \
		asm volatile("griddepcontrol.wait;" ::: "memory");                         \
	}
KVP_MOVE_KERNELS(KERNEL)
