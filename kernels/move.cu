/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/move.h"

/*
 * Variants that tests/gpu/variants.sh compares; the defaults are what was fastest there.
 *   KVP_MOVE_LOADS, KVP_MOVE_STORES  0: streaming (evict first), 1: plain, 2: past L1, 3: past L1
 *                                    and kept in L2 as long as what others leave there
 *   KVP_MOVE_MIN_BLOCKS              of a multiprocessor, for the registers of a thread
 *   KVP_MOVE_ORDER                   0: blocks go through all entries, then through the runs;
 *                                    1: through the runs of an entry, then through the entries;
 *                                    2: through the pieces that read the same memory, then the runs
 */
#ifndef KVP_MOVE_LOADS
#define KVP_MOVE_LOADS 3
#endif
#ifndef KVP_MOVE_STORES
#define KVP_MOVE_STORES 3
#endif
#ifndef KVP_MOVE_MIN_BLOCKS
#define KVP_MOVE_MIN_BLOCKS (2048 / KVP_MOVE_THREADS) /* all it has room for */
#endif
#ifndef KVP_MOVE_ORDER
#define KVP_MOVE_ORDER 2
#endif
#ifndef KVP_MOVE_WHOLE
#define KVP_MOVE_WHOLE 2 /* lines of 128 bytes are fetched whole: 0: never, 1: always, 2: for slots */
#endif

/* For who launches a cubin: threads, order, stages and blocks of a multiprocessor (0: all). */
extern "C" __constant__ uint32_t kvp_move_config[4] = { KVP_MOVE_THREADS, KVP_MOVE_ORDER, 0, 0 };

/*
 * Rows are read once and written once, so they need not stay in the caches; yet they go through L2
 * as ordinary lines. What is marked for early eviction replaces only its like, and is left with a
 * corner of L2 whenever others (an engine's kernels, a copy) have filled it before: 0.91 and 0.83
 * of a copy where ordinary lines get 0.93 and 0.90.
 */
static __device__ __forceinline__ uint64_t as_others()
{
	uint64_t policy;

	asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
	return policy;
}

/* WHOLE: what shares lines of 128 bytes with these rows is wanted soon, too. */
template <bool WHOLE, typename unit> static __device__ __forceinline__ unit load(const unit *at)
{
	return KVP_MOVE_LOADS == 1 ? __ldg(at) : __ldcs(at);
}

#define KVP_MOVE_LOAD(words, v, ...)                                        \
	asm volatile("ld.global.nc.L1::no_allocate" words                   \
		     : "=r"((v).x), "=r"((v).y), "=r"((v).z), "=r"((v).w)   \
		     : __VA_ARGS__)

template <bool WHOLE> static __device__ __forceinline__ uint4 load(const uint4 *at)
{
	uint4 v;

	if (KVP_MOVE_LOADS < 2)
		return KVP_MOVE_LOADS == 1 ? __ldg(at) : __ldcs(at);
	if (KVP_MOVE_LOADS == 2)
		KVP_MOVE_LOAD(".L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];", v, "l"(at));
	else if (WHOLE)
		KVP_MOVE_LOAD(".L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;", v,
			      "l"(at), "l"(as_others()));
	else
		KVP_MOVE_LOAD(".L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;", v, "l"(at),
			      "l"(as_others()));
	return v;
}

template <typename unit> static __device__ __forceinline__ void store(unit *at, unit value)
{
	if (KVP_MOVE_STORES == 0)
		__stcs(at, value);
	else if (KVP_MOVE_STORES == 2)
		__stcg(at, value);
	else
		*at = value;
}

static __device__ __forceinline__ void store(uint4 *at, uint4 value)
{
	if (KVP_MOVE_STORES != 3) {
		store<uint4>(at, value);
		return;
	}
	asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at),
		     "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "l"(as_others())
		     : "memory");
}

/* idx / units, exact for idx < 2^31: a multiplication instead of a division for each unit. */
static __device__ __forceinline__ uint32_t row_of(uint32_t idx, const struct kvp_move_entry &e)
{
	return e.magic ? __umulhi(idx, e.magic) >> e.shift : idx >> e.shift;
}

/* Unit `idx` of a run's rows, `step` bytes apart; DENSE: one row follows the other. */
template <typename unit, bool DENSE>
static __device__ __forceinline__ uint64_t at_unit(uint64_t base, uint32_t step, uint32_t idx,
						   uint32_t units, const struct kvp_move_entry &e)
{
	if (DENSE)
		return base + idx * (uint64_t)sizeof(unit);

	const uint32_t row = row_of(idx, e);

	return base + (uint64_t)row * step + (idx - row * units) * sizeof(unit);
}

/*
 * One block copies one run of one entry, unit by unit in row order, IN_FLIGHT units a thread at a
 * time: all loads are issued before the first store.
 */
template <typename unit, int IN_FLIGHT, bool SRC_DENSE, bool DST_DENSE, bool WHOLE>
static __device__ __forceinline__ void copy_run(const struct kvp_move_entry &e,
						const struct kvp_move_run &run)
{
	const uint32_t units = e.width / sizeof(unit);
	const uint32_t total = run.n * units;
	const uint64_t src = e.src + run.src_page * e.src_page_stride +
			     (uint64_t)run.src_slot * e.src_row_stride;
	const uint64_t dst = e.dst + run.dst_page * e.dst_page_stride +
			     (uint64_t)run.dst_slot * e.dst_row_stride;
	/* Whoever makes the tables sees to it that these fit. */
	const uint32_t src_step = run.src_step * e.src_row_stride;
	const uint32_t dst_step = run.dst_step * e.dst_row_stride;

	for (uint32_t i = threadIdx.x; i < total; i += IN_FLIGHT * KVP_MOVE_THREADS) {
		unit value[IN_FLIGHT];

#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++) {
			const uint32_t at = i + k * KVP_MOVE_THREADS;

			if (at < total)
				value[k] = load<WHOLE>(
					(const unit *)at_unit<unit, SRC_DENSE>(src, src_step, at,
									       units, e));
		}
#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++) {
			const uint32_t at = i + k * KVP_MOVE_THREADS;

			if (at < total)
				store((unit *)at_unit<unit, DST_DENSE>(dst, dst_step, at, units, e),
				      value[k]);
		}
	}
}

/*
 * What rows of today's caches take: 16 bytes at a time. Between pools all ranks of a chunk move by
 * one launch: until the next rank's rows are read, the lines that they share with these leave L2.
 */
static __device__ __forceinline__ void copy_wide(const struct kvp_move_entry &e,
						 const struct kvp_move_run &run)
{
	const bool src_dense = run.src_step * e.src_row_stride == e.width;
	const bool dst_dense = run.dst_step * e.dst_row_stride == e.width;
	const bool slot = e.src_page_stride == 0 || e.dst_page_stride == 0;

	if (dst_dense && src_dense)
		copy_run<uint4, KVP_MOVE_IN_FLIGHT, true, true, true>(e, run);
	else if (src_dense)
		copy_run<uint4, KVP_MOVE_IN_FLIGHT, true, false, true>(e, run);
	else if (dst_dense && (KVP_MOVE_WHOLE == 1 || (KVP_MOVE_WHOLE == 2 && slot)))
		copy_run<uint4, KVP_MOVE_IN_FLIGHT, false, true, true>(e, run);
	else if (dst_dense)
		copy_run<uint4, KVP_MOVE_IN_FLIGHT, false, true, false>(e, run);
	else
		copy_run<uint4, KVP_MOVE_IN_FLIGHT, false, false, false>(e, run);
}

static __device__ __forceinline__ void move_block(const struct kvp_move_entry *entries,
						  const struct kvp_move_run *table)
{
	/* A grid is x: pieces, y: runs, z: entries of a piece. Ranks have rows in the same lines of
	 * 128 bytes, so that what reads these runs at about the same time. */
	const uint32_t at_entry = KVP_MOVE_ORDER == 2   ? blockIdx.x * gridDim.z + blockIdx.z
				  : KVP_MOVE_ORDER == 1 ? blockIdx.y
							: blockIdx.x;
	const uint32_t at_run = KVP_MOVE_ORDER == 1 ? blockIdx.x : blockIdx.y;
	const struct kvp_move_entry &e = entries[at_entry];

	if (at_run >= e.n_runs)
		return;

	const struct kvp_move_run run = table[e.first_run + at_run];

	switch (e.unit_log) {
	case 4:
		copy_wide(e, run);
		break;
	case 3:
		copy_run<uint2, KVP_MOVE_IN_FLIGHT, false, false, false>(e, run);
		break;
	case 2:
		copy_run<uint32_t, KVP_MOVE_IN_FLIGHT, false, false, false>(e, run);
		break;
	case 1:
		copy_run<uint16_t, KVP_MOVE_IN_FLIGHT, false, false, false>(e, run);
		break;
	default:
		copy_run<uint8_t, KVP_MOVE_IN_FLIGHT, false, false, false>(e, run);
	}
}

/*
 * From sm_90 on a launch may ask to begin when all blocks of the one before it have begun, so that
 * no multiprocessor idles between the launches of one set of tables, which do not depend on each
 * other. It ends after the one before it, as others expect who wait for it alone.
 */
static __device__ __forceinline__ void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ void end_after_previous()
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define KVP_MOVE_KERNEL(name, n_entries, n_runs)                                              \
	extern "C" __global__ void __launch_bounds__(KVP_MOVE_THREADS, KVP_MOVE_MIN_BLOCKS)  \
		name(const __grid_constant__ struct name##_params params)                    \
	{                                                                                     \
		let_next_begin();                                                            \
		move_block(params.entries, params.runs);                                     \
		end_after_previous();                                                        \
	}
KVP_MOVE_KERNELS(KVP_MOVE_KERNEL)
