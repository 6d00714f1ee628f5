/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "daemon/copy.h"
#include "proto/util.h"

#define ENTRIES 3u
#define RANKS_MAX 4u

static uint64_t seed = 1;

static uint32_t draw(uint32_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)((seed >> 33) % below);
}

static void fill(unsigned char *buf, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		buf[i] = (unsigned char)draw(256);
}

Test(copy, rows_of_any_width_and_place)
{
	static const uint64_t widths[] = {
		1, 3, 15, 16, 17, 63, 64, 65, 128, 576, 640, 4096, 5000
	};
	unsigned char *src = malloc(1 << 18), *dst = malloc(1 << 18), *want = malloc(1 << 18);

	for (uint32_t i = 0; i < 2000; i++) {
		uint64_t width = widths[draw(KVP_ARRAY_SIZE(widths))], n = draw(20);
		uint64_t src_stride = width + (draw(2) ? draw(300) : 0);
		uint64_t dst_stride = width + (draw(2) ? draw(300) : 0);
		uint32_t src_off = draw(2) * draw(64), dst_off = draw(2) * draw(64);

		fill(src, src_off + n * src_stride);
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

	fill(src, 1 << 18);
	for (uint32_t i = 0; i < 500; i++) {
		uint64_t width = widths[draw(KVP_ARRAY_SIZE(widths))],
			 stride = width + 64 * draw(3);
		uint32_t off = draw(2) * draw(17), n_copies = draw(4);
		struct kvp_copy copies[4];

		memset(dst, 0xaa, 1 << 18);
		memset(want, 0xaa, 1 << 18);
		for (uint32_t c = 0; c < n_copies; c++) {
			copies[c] = (struct kvp_copy){
				.dst = dst + c * 32768 + off,
				.src = src + draw(1000),
				.dst_stride = stride,
				.src_stride = width * 3,
				.n = draw(30),
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

/* A source rank, up to RANKS_MAX destination ranks, and their pools. */
struct world {
	struct kvp_entry src_entries[ENTRIES], dst_entries[ENTRIES];
	struct kvp_pair pairs[4 * ENTRIES];
	uint32_t n_pairs, n_ranks;
	uint64_t start, tokens, positions, dst_start;
	struct kvp_side src, dst[RANKS_MAX], src_bare, dst_bare[RANKS_MAX];
	uint32_t src_pages[256], dst_pages[RANKS_MAX][256];
	unsigned char *src_maps[2], *dst_maps[RANKS_MAX][2], *want[RANKS_MAX][2];
	uint64_t src_bytes, dst_bytes;
	struct kvp_leg_geom legs[RANKS_MAX];
};

static void shuffle(uint32_t *pages, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		pages[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		uint32_t j = draw(i), other = pages[j];

		pages[j] = pages[i - 1];
		pages[i - 1] = other;
	}
}

static void side_make(struct kvp_side *side, uint32_t *pages, uint64_t positions)
{
	side->page = 1u << draw(5);
	side->interleave = 1u << draw(2);
	if (side->interleave > side->page)
		side->interleave = 1;
	side->pos0 = 0;
	side->n_pages = (uint32_t)((positions + kvp_side_vpage(side) - 1) / kvp_side_vpage(side));
	side->pages = pages;
	shuffle(pages, side->n_pages);
}

/* Lays the entries of a pool out in two fds, with gaps; returns the bytes of the larger one. */
static uint64_t entries_make(struct kvp_entry *entries, const struct kvp_side *side, uint32_t full,
			     uint32_t cut)
{
	uint64_t at[2] = { 0, 0 };

	for (uint32_t i = 0; i < ENTRIES; i++) {
		struct kvp_entry *entry = &entries[i];
		bool replicated = i == 2;

		entry->layer = replicated ? 9 : 4;
		entry->klass = replicated ? KVP_CLASS_REPLICATED : KVP_CLASS_SHARDED;
		entry->full_bytes = full;
		entry->lo = i == 1 ? cut : 0;
		entry->row_bytes = (i == 0 ? cut : full) - entry->lo;
		entry->rows_per_page = replicated ? (uint32_t)kvp_side_vpage(side) : side->page;
		entry->n_pages = side->n_pages;
		entry->row_stride = entry->row_bytes + draw(3) * 8;
		entry->page_stride = entry->row_stride * entry->rows_per_page + draw(3) * 64;
		entry->fd_idx = draw(2);
		entry->base = at[entry->fd_idx] + draw(100);
		entry->bytes = entry->page_stride * entry->n_pages;
		at[entry->fd_idx] = entry->base + entry->bytes;
	}
	return KVP_MAX(at[0], at[1]) + 1;
}

static void world_make(struct world *w)
{
	static const uint32_t fulls[] = { 16, 40, 128, 576 };
	uint32_t full = fulls[draw(4)], n_dcp = draw(3) ? RANKS_MAX : 1 + draw(3);
	struct kvp_entry_list src = { .entries = w->src_entries, .n = ENTRIES };
	struct kvp_entry_list dst = { .entries = w->dst_entries, .n = ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	int n;

	*w = (struct world){ .positions = 1 + draw(150), .n_ranks = n_dcp };
	w->src.dcp_size = draw(2) ? 1 : 1 + draw(4);
	w->src.dcp_rank = draw(w->src.dcp_size);
	side_make(&w->src, w->src_pages, w->positions);
	w->src_bytes = entries_make(w->src_entries, &w->src, full, full / 2);
	w->dst[0].dcp_size = n_dcp;
	side_make(&w->dst[0], w->dst_pages[0], w->positions);
	w->dst_bytes =
		entries_make(w->dst_entries, &w->dst[0], full, draw(2) ? full / 2 : full / 4);
	n = kvp_pair_entries(&src, &dst, w->pairs, KVP_ARRAY_SIZE(w->pairs), err, sizeof(err));
	cr_assert_gt(n, 0, "%s", err);
	w->n_pairs = (uint32_t)n;
	w->start = draw((uint32_t)w->positions);
	w->tokens = 1 + draw((uint32_t)(w->positions - w->start));
	w->dst_start = draw(2) ? 0 : draw((uint32_t)w->positions);
}

static void world_pools(struct world *w)
{
	w->src_bare = w->src;
	w->src_bare.pages = NULL;
	w->src_bare.n_pages = KVP_PAGES_ANY;
	for (uint32_t f = 0; f < 2; f++) {
		w->src_maps[f] = malloc(w->src_bytes);
		fill(w->src_maps[f], w->src_bytes);
	}
	for (uint32_t r = 0; r < w->n_ranks; r++) {
		w->dst[r] = w->dst[0];
		w->dst[r].dcp_rank = r;
		w->dst[r].pages = w->dst_pages[r];
		shuffle(w->dst_pages[r], w->dst[r].n_pages);
		w->dst_bare[r] = w->dst[r];
		w->dst_bare[r].pages = NULL;
		w->dst_bare[r].n_pages = KVP_PAGES_ANY;
		for (uint32_t f = 0; f < 2; f++) {
			w->dst_maps[r][f] = memset(malloc(w->dst_bytes), 0xaa, w->dst_bytes);
			w->want[r][f] = memset(malloc(w->dst_bytes), 0xaa, w->dst_bytes);
		}
		w->legs[r] = (struct kvp_leg_geom){
			.pairs = w->pairs,
			.src = w->src_entries,
			.dst = w->dst_entries,
			.src_sides = &w->src_bare,
			.dst_sides = &w->dst_bare[r],
			.dst_starts = &w->dst_start,
			.end = w->positions,
			.n_pairs = w->n_pairs,
		};
	}
}

static void world_free(struct world *w)
{
	for (uint32_t f = 0; f < 2; f++) {
		free(w->src_maps[f]);
		for (uint32_t r = 0; r < w->n_ranks; r++) {
			free(w->dst_maps[r][f]);
			free(w->want[r][f]);
		}
	}
}

/* Where a side keeps a position, by counting; NULL if it does not. */
static unsigned char *find(const struct kvp_side *side, const struct kvp_entry *entry,
			   unsigned char *const *maps, uint64_t pos)
{
	uint64_t w = (uint64_t)side->page * side->dcp_size, slot = 0;

	if (entry->klass == KVP_CLASS_REPLICATED) {
		slot = pos % w;
	} else {
		if (pos / side->interleave % side->dcp_size != side->dcp_rank)
			return NULL;
		for (uint64_t p = pos - pos % w; p < pos; p++)
			slot += p / side->interleave % side->dcp_size == side->dcp_rank;
	}
	return maps[entry->fd_idx] + entry->base + side->pages[pos / w] * entry->page_stride +
	       slot * entry->row_stride;
}

static void world_want(struct world *w, uint32_t r)
{
	for (uint64_t pos = KVP_MAX(w->start, w->dst_start); pos < w->start + w->tokens; pos++)
		for (uint32_t s = 0; s < ENTRIES; s++)
			for (uint32_t d = 0; d < ENTRIES; d++) {
				const struct kvp_entry *a = &w->src_entries[s];
				const struct kvp_entry *b = &w->dst_entries[d];
				unsigned char *from = find(&w->src, a, w->src_maps, pos);
				unsigned char *to = find(&w->dst[r], b, w->want[r], pos);

				if (!from || !to || a->layer != b->layer)
					continue;
				for (uint32_t x = 0; x < a->full_bytes; x++)
					if (x >= a->lo && x < a->lo + a->row_bytes && x >= b->lo &&
					    x < b->lo + b->row_bytes)
						to[x - b->lo] = from[x - a->lo];
			}
}

static void world_check(struct world *w, uint32_t round)
{
	for (uint32_t r = 0; r < w->n_ranks; r++) {
		world_want(w, r);
		for (uint32_t f = 0; f < 2; f++)
			cr_assert(memcmp(w->dst_maps[r][f], w->want[r][f], w->dst_bytes) == 0,
				  "round %u rank %u", round, r);
	}
}

/* A leg is only good when kvp_leg_check() says so: random turns may not repeat. */
static bool world_good(struct world *w)
{
	char err[KVP_PLAN_ERR_BYTES];

	for (uint32_t r = 0; r < w->n_ranks; r++)
		if (kvp_leg_check(&w->legs[r], err, sizeof(err)) < 0)
			return false;
	return true;
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
			struct kvp_copy_piece piece = {
				.leg = &w.legs[r],
				.pool = { .maps = w.src_maps, .sides = &w.src },
				.start = w.start,
				.tokens = w.tokens,
				.parts = parts,
			};
			uint64_t bytes =
				kvp_piece_layout(&w.legs[r], NULL, w.start, (uint32_t)w.tokens,
						 parts, &piece.n_parts);

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
		source = (struct kvp_move_source){
			.src = { .maps = w.src_maps, .sides = &w.src },
			.n_entries = ENTRIES,
			.start = w.start,
			.tokens = w.tokens,
		};
		/* Now and then more than one pass takes: repeating a move changes nothing. */
		for (uint32_t again = 0; again < (round % 10 == 0 ? 10 : 1); again++)
			for (uint32_t r = 0; r < w.n_ranks; r++)
				moves[n++] = (struct kvp_move){
					.leg = &w.legs[r],
					.dst = { .maps = w.dst_maps[r], .sides = &w.dst[r] },
				};
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
	source = (struct kvp_move_source){
		.src = { .maps = w.src_maps, .sides = &w.src },
		.n_entries = ENTRIES,
		.start = w.start,
		.tokens = w.tokens,
	};
	for (uint32_t r = 0; r < w.n_ranks; r++) {
		moves[r] = (struct kvp_move){
			.leg = &w.legs[r],
			.dst = { .maps = w.dst_maps[r], .sides = &w.dst[r] },
		};
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
