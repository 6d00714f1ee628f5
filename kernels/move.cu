/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/move.h"

/* Streaming accesses: rows are read once and written once, so they need not stay in the caches. */
template <typename unit> static __device__ __forceinline__ unit load(const unit *at)
{
	return __ldcs(at);
}

template <typename unit> static __device__ __forceinline__ void store(unit *at, unit value)
{
	__stcs(at, value);
}

/* idx / units, exact for idx < 2^31: a multiplication instead of a division for each unit. */
static __device__ __forceinline__ uint32_t row_of(uint32_t idx, const struct kvp_move_entry &e)
{
	return e.magic ? __umulhi(idx, e.magic) >> e.shift : idx >> e.shift;
}

/*
 * One block copies one run of one entry, unit by unit in row order, IN_FLIGHT units a thread at a
 * time: all loads are issued before the first store.
 */
template <typename unit, int IN_FLIGHT>
static __device__ __forceinline__ void copy_run(const struct kvp_move_entry &e,
						const struct kvp_move_run &run)
{
	const uint32_t units = e.width / sizeof(unit);
	const uint32_t total = run.n * units;
	const char *src = (const char *)e.src + run.src_page * e.src_page_stride +
			  (uint64_t)run.src_slot * e.src_row_stride;
	char *dst = (char *)e.dst + run.dst_page * e.dst_page_stride +
		    (uint64_t)run.dst_slot * e.dst_row_stride;
	const uint64_t src_step = (uint64_t)run.src_step * e.src_row_stride;
	const uint64_t dst_step = (uint64_t)run.dst_step * e.dst_row_stride;

	for (uint32_t i = threadIdx.x; i < total; i += IN_FLIGHT * KVP_MOVE_THREADS) {
		unit value[IN_FLIGHT];
		unit *to[IN_FLIGHT];

#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++) {
			const uint32_t at = i + k * KVP_MOVE_THREADS;
			const uint32_t row = row_of(at, e);
			const uint32_t col = at - row * units;

			to[k] = (unit *)(dst + row * dst_step) + col;
			if (at < total)
				value[k] = load((const unit *)(src + row * src_step) + col);
		}
#pragma unroll
		for (int k = 0; k < IN_FLIGHT; k++)
			if (i + k * KVP_MOVE_THREADS < total)
				store(to[k], value[k]);
	}
}

static __device__ __forceinline__ void move_block(const struct kvp_move_entry &e,
						  const struct kvp_move_run *table)
{
	if (blockIdx.x >= e.n_runs)
		return;

	const struct kvp_move_run run = table[e.first_run + blockIdx.x];

	switch (e.unit_log) {
	case 4:
		copy_run<uint4, KVP_MOVE_IN_FLIGHT>(e, run);
		break;
	case 3:
		copy_run<uint2, KVP_MOVE_IN_FLIGHT>(e, run);
		break;
	case 2:
		copy_run<uint32_t, KVP_MOVE_IN_FLIGHT>(e, run);
		break;
	case 1:
		copy_run<uint16_t, KVP_MOVE_IN_FLIGHT>(e, run);
		break;
	default:
		copy_run<uint8_t, KVP_MOVE_IN_FLIGHT>(e, run);
	}
}

extern "C" __global__ void __launch_bounds__(KVP_MOVE_THREADS)
kvp_move(const __grid_constant__ struct kvp_move_job job)
{
	move_block(job.entries[blockIdx.y], job.table);
}

extern "C" __global__ void __launch_bounds__(KVP_MOVE_THREADS)
kvp_move_near(const __grid_constant__ struct kvp_move_near_job near)
{
	move_block(near.job.entries[blockIdx.y], near.runs);
}
