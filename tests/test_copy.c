/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "daemon/copy.h"
#include "proto/util.h"
#include "tests/support_world.h"

Test(copy, rows_of_any_width_and_place)
{
	static const uint64_t widths[] = {
		1, 3, 15, 16, 17, 63, 64, 65, 128, 576, 640, 4096, 5000
	};
	unsigned char *src = malloc(1 << 18), *dst = malloc(1 << 18), *want = malloc(1 << 18);

	for (uint32_t i = 0; i < 2000; i++) {
		uint64_t width = widths[world_draw(KVP_ARRAY_SIZE(widths))], n = world_draw(20);
		uint64_t src_stride = width + (world_draw(2) ? world_draw(300) : 0);
		uint64_t dst_stride = width + (world_draw(2) ? world_draw(300) : 0);
		uint32_t src_off = world_draw(2) * world_draw(64),
			 dst_off = world_draw(2) * world_draw(64);

		world_fill(src, src_off + n * src_stride);
		memset(dst, 0xaa, dst_off + n * dst_stride + 64);
		memset(want, 0xaa, dst_off + n * dst_stride + 64);
		for (uint64_t k = 0; k < n; k++)
			for (uint64_t b = 0; b < width; b++)
				want[dst_off + k * dst_stride + b] =
					src[src_off + k * src_stride + b];
		kvp_copy_rows(dst + dst_off, dst_stride, src + src_off, src_stride, width, n);
		cr_assert_arr_eq(dst, want, dst_off + n * dst_stride + 64);
	}
	free(src);
	free(dst);
	free(want);
}

Test(copy, runs_in_turns)
{
	static const uint64_t widths[] = { 1, 16, 64, 100, 192, 576 };
	unsigned char *src = aligned_alloc(64, 1 << 18), *dst = aligned_alloc(64, 1 << 18);
	unsigned char *want = malloc(1 << 18);

	world_fill(src, 1 << 18);
	for (uint32_t i = 0; i < 500; i++) {
		uint64_t width = widths[world_draw(KVP_ARRAY_SIZE(widths))],
			 stride = width + 64 * world_draw(3);
		uint32_t off = world_draw(2) * world_draw(17), n_copies = world_draw(4);
		struct kvp_copy copies[4];

		memset(dst, 0xaa, 1 << 18);
		memset(want, 0xaa, 1 << 18);
		for (uint32_t c = 0; c < n_copies; c++) {
			copies[c] = (struct kvp_copy){
				.dst = dst + c * 32768 + off,
				.src = src + world_draw(1000),
				.dst_stride = stride,
				.src_stride = width * 3,
				.n = world_draw(30),
			};
			for (uint32_t k = 0; k < copies[c].n; k++)
				memcpy(want + c * 32768 + off + k * stride,
				       copies[c].src + k * width * 3, width);
		}
		kvp_copy_turns(copies, n_copies, width);
		kvp_copy_fence();
		cr_assert_arr_eq(dst, want, 1 << 18);
	}
	free(src);
	free(dst);
	free(want);
}

Test(copy, gather_and_scatter_move_the_right_rows)
{
	static struct world w;
	unsigned char *slot = malloc(4 << 20);
	uint32_t good = 0;

	for (uint32_t round = 0; round < 1500; round++) {
		world_make(&w);
		world_pools(&w);
		for (uint32_t r = 0; world_good(&w) && r < w.n_ranks; r++) {
			struct kvp_part parts[4 * ENTRIES];
			struct kvp_copy_piece piece;
			uint64_t bytes = world_piece(&w, r, true, parts, &piece);

			memset(slot, 0x55, bytes + 64);
			kvp_gather(&piece, slot);
			for (uint32_t i = 0; i < 64; i++)
				cr_assert_eq(slot[bytes + i], 0x55);
			piece.pool = (struct kvp_copy_pool){ w.dst_maps[r], &w.dst[r] };
			kvp_scatter(&piece, slot);
			good++;
		}
		if (world_good(&w))
			world_check(&w, round);
		world_free(&w);
	}
	cr_assert_gt(good, 1000);
	free(slot);
}

/* Like one gather after the other, also where legs have no part or other ones. */
Test(copy, gather_together_is_gather)
{
	static struct world w;
	static unsigned char slots[2][KVP_GATHER_TOGETHER][1 << 20];
	uint32_t good = 0;

	for (uint32_t round = 0; round < 600; round++) {
		struct kvp_part parts[KVP_GATHER_TOGETHER][4 * ENTRIES];
		struct kvp_copy_piece pieces[KVP_GATHER_TOGETHER];
		void *places[KVP_GATHER_TOGETHER];
		uint32_t n;

		world_make(&w);
		world_pools(&w);
		n = world_good(&w) ? KVP_MIN(w.n_ranks, KVP_GATHER_TOGETHER) : 0;
		for (uint32_t r = 0; r < n; r++) {
			uint64_t set = r && world_draw(3) == 0 ? world_draw(1u << ENTRIES) : 0;
			uint64_t mask[8] = { set };
			uint64_t bytes;

			pieces[r] = (struct kvp_copy_piece){
				.leg = &w.legs[r],
				.pool = { .maps = w.src_maps, .sides = &w.src },
				.start = w.start,
				.tokens = w.tokens,
				.parts = parts[r],
			};
			bytes = kvp_piece_layout(&w.legs[r], set ? mask : NULL, w.start,
						 (uint32_t)w.tokens, parts[r], &pieces[r].n_parts);
			cr_assert_leq(bytes + 64, sizeof(slots[0][r]));
			memset(slots[0][r], 0x55, bytes + 64);
			memset(slots[1][r], 0x55, bytes + 64);
			kvp_gather(&pieces[r], slots[0][r]);
			places[r] = slots[1][r];
		}
		kvp_gather_together(pieces, places, n);
		for (uint32_t r = 0; r < n; r++)
			cr_assert_eq(memcmp(slots[0][r], slots[1][r], sizeof(slots[0][r])), 0,
				     "round %u, rank %u of %u", round, r, n);
		good += n > 1;
		world_free(&w);
	}
	cr_assert_gt(good, 100);
}

Test(copy, move_moves_the_right_rows)
{
	static struct world w;
	uint32_t good = 0;

	for (uint32_t round = 0; round < 1500; round++) {
		struct kvp_move moves[RANKS_MAX * 10];
		struct kvp_move_source source;
		uint32_t n = 0;

		world_make(&w);
		world_pools(&w);
		source = world_source(&w);
		/* Now and then more than one pass takes: repeating a move changes nothing. */
		for (uint32_t again = 0; again < (round % 10 == 0 ? 10 : 1); again++)
			for (uint32_t r = 0; r < w.n_ranks; r++)
				moves[n++] = world_move(&w, r);
		if (world_good(&w)) {
			kvp_move(&source, moves, n);
			world_check(&w, round);
			good++;
		}
		world_free(&w);
	}
	cr_assert_gt(good, 300);
}

Test(copy, move_leaves_masked_entries_out)
{
	static struct world w;
	struct kvp_move moves[RANKS_MAX];
	uint64_t mask = 1u << 2, all = 0, some = 0;
	struct kvp_move_source source;

	do
		world_make(&w);
	while (w.src.dcp_size != 1 || w.dst_start > 0);
	world_pools(&w);
	source = world_source(&w);
	for (uint32_t r = 0; r < w.n_ranks; r++) {
		moves[r] = world_move(&w, r);
		all += kvp_move_bytes(&source, &moves[r]);
	}
	source.mask = &mask;
	for (uint32_t r = 0; r < w.n_ranks; r++)
		some += kvp_move_bytes(&source, &moves[r]);
	cr_assert_eq(some, w.tokens * w.n_ranks * w.src_entries[2].row_bytes);
	cr_assert_eq(all, some + w.tokens * w.src_entries[2].row_bytes);
	kvp_move(&source, moves, w.n_ranks);
	for (uint32_t r = 0; r < w.n_ranks; r++) {
		struct kvp_entry *dst = w.dst_entries;

		for (uint64_t i = 0; i < dst[0].bytes; i++)
			cr_assert_eq(w.dst_maps[r][dst[0].fd_idx][dst[0].base + i], 0xaa);
	}
	world_free(&w);
}
