/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The move kernel by blocks that take runs in turns, to compare with kernels/move.cu: the loads of
 * a block's next run are on their way, and its tables read, before the stores of the one at hand.
 *   TURNS_THREADS, TURNS_IN_FLIGHT  of a block; units of a thread in one run
 *   TURNS_BLOCKS                    of a multiprocessor
 */

#include "kernels/move.h"

#ifndef TURNS_THREADS
#define TURNS_THREADS 288
#endif
#ifndef TURNS_IN_FLIGHT
#define TURNS_IN_FLIGHT 2
#endif
#ifndef TURNS_BLOCKS
#define TURNS_BLOCKS 5
#endif

extern "C" __constant__ uint32_t kvp_move_config[4] = { TURNS_THREADS, 4, 0, TURNS_BLOCKS };

struct tile {
	uint64_t src, dst;
	uint32_t src_step, dst_step, width, n; /* n 0: there is none */
	uint32_t magic, shift, unit_log;
};

/* Pieces that read the same memory first, then the runs, then the entries of a piece. */
static __device__ __forceinline__ tile tile_of(const struct kvp_move_head &head,
					       const struct kvp_move_entry *entries,
					       const struct kvp_move_run *table, uint32_t at)
{
	const uint32_t each = head.n_entries / head.pieces, rest = at / head.pieces;
	const uint32_t layer = rest / head.widest, at_run = rest - layer * head.widest;
	tile t = {};

	if (layer >= each)
		return t;

	const struct kvp_move_entry &e = entries[(at - rest * head.pieces) * each + layer];

	if (at_run >= e.n_runs)
		return t;

	const struct kvp_move_run run = table[e.first_run + at_run];

	t.src = e.src + run.src_page * e.src_page_stride + (uint64_t)run.src_slot * e.src_row_stride;
	t.dst = e.dst + run.dst_page * e.dst_page_stride + (uint64_t)run.dst_slot * e.dst_row_stride;
	t.src_step = run.src_step * e.src_row_stride;
	t.dst_step = run.dst_step * e.dst_row_stride;
	t.width = e.width;
	t.n = run.n;
	t.magic = e.magic;
	t.shift = e.shift;
	t.unit_log = e.unit_log;
	return t;
}

static __device__ __forceinline__ uint4 load(uint64_t at)
{
	uint4 v;

	asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "l"(at));
	return v;
}

static __device__ __forceinline__ uint64_t at_unit(uint64_t base, uint32_t step, const tile &t,
						   uint32_t idx)
{
	const uint32_t units = t.width / 16;
	const uint32_t row = t.magic ? __umulhi(idx, t.magic) >> t.shift : idx >> t.shift;

	return base + (uint64_t)row * step + (idx - row * units) * 16;
}

static __device__ __forceinline__ bool is_simple(const tile &t)
{
	return t.unit_log == 4 && t.n * (t.width / 16) <= TURNS_THREADS * TURNS_IN_FLIGHT;
}

static __device__ __forceinline__ void tile_load(const tile &t, uint4 *value)
{
	const uint32_t total = t.n * (t.width / 16);

	if (!is_simple(t))
		return;
#pragma unroll
	for (int k = 0; k < TURNS_IN_FLIGHT; k++)
		if (threadIdx.x + k * TURNS_THREADS < total)
			value[k] = load(
				at_unit(t.src, t.src_step, t, threadIdx.x + k * TURNS_THREADS));
}

static __device__ __forceinline__ void tile_store(const tile &t, const uint4 *value)
{
	const uint32_t total = t.n * (t.width / 16);

#pragma unroll
	for (int k = 0; k < TURNS_IN_FLIGHT; k++)
		if (threadIdx.x + k * TURNS_THREADS < total)
			*(uint4 *)at_unit(t.dst, t.dst_step, t, threadIdx.x + k * TURNS_THREADS) =
				value[k];
}

/* What is longer, or not of units of 16 bytes. */
static __device__ void tile_plain(const tile &t)
{
	const uint32_t unit = t.unit_log == 4 ? 16 : 1, units = t.width / unit;

	for (uint32_t i = threadIdx.x; i < t.n * units; i += TURNS_THREADS) {
		const uint32_t row = i / units, col = (i - row * units) * unit;
		const uint64_t from = t.src + (uint64_t)row * t.src_step + col;
		const uint64_t to = t.dst + (uint64_t)row * t.dst_step + col;

		if (unit == 16)
			*(uint4 *)to = load(from);
		else
			*(char *)to = *(const char *)from;
	}
}

static __device__ __forceinline__ void move_turns(const struct kvp_move_head &head,
						  const struct kvp_move_entry *entries,
						  const struct kvp_move_run *table)
{
	const uint32_t n_tiles = head.n_entries * head.widest;
	uint32_t at = blockIdx.x;
	tile now = tile_of(head, entries, table, at);
	uint4 value[TURNS_IN_FLIGHT];

	tile_load(now, value);
	while (at < n_tiles) {
		const tile next = tile_of(head, entries, table, at + gridDim.x);
		uint4 coming[TURNS_IN_FLIGHT];

		tile_load(next, coming);
		if (is_simple(now))
			tile_store(now, value);
		else
			tile_plain(now);
		now = next;
#pragma unroll
		for (int k = 0; k < TURNS_IN_FLIGHT; k++)
			value[k] = coming[k];
		at += gridDim.x;
	}
}

#define KERNEL(name, n_entries, n_runs)                                                    \
	extern "C" __global__ void __launch_bounds__(TURNS_THREADS, TURNS_BLOCKS)          \
		name(const __grid_constant__ struct name##_params params)                  \
	{                                                                                  \
		asm volatile("griddepcontrol.launch_dependents;" ::: "memory");           \
		move_turns(params.head, params.entries, params.runs);                      \
		asm volatile("griddepcontrol.wait;" ::: "memory");                        \
	}
KVP_MOVE_KERNELS(KERNEL)
