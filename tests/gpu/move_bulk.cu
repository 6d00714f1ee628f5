/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The move kernel by bulk copies through shared memory (sm_90 on), to compare with kernels/move.cu.
 * A block is one warp; tiles are the runs of all entries, entry first; STAGES tiles of a block are
 * on their way at a time.
 *   BULK_STAGES  tiles of a block in shared memory
 *   BULK_BLOCKS  of a multiprocessor, which take tiles in turns; 0: a block for each tile
 */

#include "kernels/move.h"

#ifndef BULK_STAGES
#define BULK_STAGES 1
#endif
#ifndef BULK_BLOCKS
#define BULK_BLOCKS 0
#endif
#define WARP 32

extern "C" __constant__ uint32_t kvp_move_config[4] = { WARP, 3, BULK_STAGES, BULK_BLOCKS };

struct tile {
	uint64_t src, dst;
	uint32_t src_step, dst_step, width, n; /* n 0: there is none */
	uint32_t unit_log;
};

static __device__ __forceinline__ uint64_t evict_first()
{
	uint64_t policy;

	asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
	return policy;
}

static __device__ __forceinline__ tile tile_of(const struct kvp_move_head &head,
					       const struct kvp_move_entry *entries,
					       const struct kvp_move_run *table, uint32_t at)
{
	const uint32_t at_run = at / head.n_entries;
	tile t = {};

	if (at_run >= head.widest)
		return t;

	const struct kvp_move_entry &e = entries[at - at_run * head.n_entries];

	if (at_run >= e.n_runs)
		return t;

	const struct kvp_move_run run = table[e.first_run + at_run];

	t.src = e.src + run.src_page * e.src_page_stride + (uint64_t)run.src_slot * e.src_row_stride;
	t.dst = e.dst + run.dst_page * e.dst_page_stride + (uint64_t)run.dst_slot * e.dst_row_stride;
	t.src_step = run.src_step * e.src_row_stride;
	t.dst_step = run.dst_step * e.dst_row_stride;
	t.width = e.width;
	t.n = run.n;
	t.unit_log = e.unit_log;
	return t;
}

/* Bulk copies take multiples of 16 bytes at such addresses; all else goes a byte at a time. */
static __device__ void copy_bytes(const tile &t)
{
	for (uint32_t i = threadIdx.x; i < t.n * t.width; i += WARP) {
		const uint32_t row = i / t.width, col = i - row * t.width;

		((char *)t.dst)[(uint64_t)row * t.dst_step + col] =
			((const char *)t.src)[(uint64_t)row * t.src_step + col];
	}
}

static __device__ __forceinline__ void tile_load(const tile &t, uint32_t stage, uint32_t barrier,
						 uint64_t policy)
{
	if (t.n == 0 || t.unit_log != 4)
		return;

	const bool dense = t.src_step == t.width;
	const uint32_t n = dense ? 1 : t.n, bytes = dense ? t.n * t.width : t.width;

	if (threadIdx.x == 0)
		asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
			     "r"(t.n * t.width)
			     : "memory");
	__syncwarp();
	for (uint32_t row = threadIdx.x; row < n; row += WARP)
		asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
			     ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(stage + row * bytes),
			     "l"(t.src + (uint64_t)row * t.src_step), "r"(bytes), "r"(barrier),
			     "l"(policy)
			     : "memory");
}

static __device__ __forceinline__ void tile_store(const tile &t, uint32_t stage, uint64_t policy)
{
	const bool dense = t.dst_step == t.width;
	const uint32_t n = dense ? 1 : t.n, bytes = dense ? t.n * t.width : t.width;

	for (uint32_t row = threadIdx.x; row < n; row += WARP)
		asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint"
			     " [%0], [%1], %2, %3;" ::"l"(t.dst + (uint64_t)row * t.dst_step),
			     "r"(stage + row * bytes), "r"(bytes), "l"(policy)
			     : "memory");
}

static __device__ __forceinline__ void wait_full(uint32_t barrier, uint32_t parity)
{
	asm volatile("{\n"
		     ".reg .pred done;\n"
		     "again:\n"
		     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
		     "@!done bra again;\n"
		     "}" ::"r"(barrier),
		     "r"(parity)
		     : "memory");
}

static __device__ __forceinline__ void move_tiles(const struct kvp_move_head &head,
						  const struct kvp_move_entry *entries,
						  const struct kvp_move_run *table)
{
	extern __shared__ __align__(128) unsigned char stages[];
	__shared__ __align__(8) uint64_t full[BULK_STAGES];
	const uint32_t n_tiles = head.n_entries * head.widest, step = gridDim.x;
	const uint64_t policy = evict_first();
	uint32_t bytes, phases = 0;
	uint32_t first = (uint32_t)__cvta_generic_to_shared(stages);
	uint32_t barrier = (uint32_t)__cvta_generic_to_shared(full);
	tile tiles[BULK_STAGES];

	asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
	bytes /= BULK_STAGES;
	if (threadIdx.x == 0) {
		for (int s = 0; s < BULK_STAGES; s++)
			asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + s * 8));
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
		asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
	}
	__syncwarp();
#pragma unroll
	for (int s = 0; s < BULK_STAGES; s++) {
		tiles[s] = tile_of(head, entries, table, blockIdx.x + s * step);
		tile_load(tiles[s], first + s * bytes, barrier + s * 8, policy);
	}
	for (uint32_t at = blockIdx.x; at < n_tiles;) {
#pragma unroll
		for (int s = 0; s < BULK_STAGES; s++, at += step) {
			const bool bulk = tiles[s].n && tiles[s].unit_log == 4;

			if (bulk) {
				wait_full(barrier + s * 8, phases >> s & 1);
				phases ^= 1u << s;
				tile_store(tiles[s], first + s * bytes, policy);
			} else if (tiles[s].n) {
				copy_bytes(tiles[s]);
			}
			asm volatile("cp.async.bulk.commit_group;" ::: "memory");
			/* The stage before this one is read out, or waits for this one alone. */
			if (BULK_STAGES > 1) {
				const int b = (s + BULK_STAGES - 1) % BULK_STAGES;

				asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
				__syncwarp();
				if (at >= blockIdx.x + step) {
					tiles[b] = tile_of(head, entries, table,
							   at + (BULK_STAGES - 1) * step);
					tile_load(tiles[b], first + b * bytes, barrier + b * 8,
						  policy);
				}
			} else if (at + step < n_tiles) {
				asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
				__syncwarp();
				tiles[s] = tile_of(head, entries, table, at + step);
				tile_load(tiles[s], first, barrier, policy);
			}
		}
	}
	asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

#define KERNEL(name, n_entries, n_runs)                                                    \
	extern "C" __global__ void __launch_bounds__(WARP)                                 \
		name(const __grid_constant__ struct name##_params params)                  \
	{                                                                                  \
		move_tiles(params.head, params.entries, params.runs);                      \
	}
KVP_MOVE_KERNELS(KERNEL)
