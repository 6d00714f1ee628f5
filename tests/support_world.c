/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/util.h"

static uint64_t seed = 1;

uint32_t world_draw(uint32_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)((seed >> 33) % below);
}

void world_fill(unsigned char *buf, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		buf[i] = (unsigned char)world_draw(256);
}

static unsigned char *memory(size_t bytes)
{
	return &world_memory ? world_memory(bytes) : malloc(bytes);
}

static void memory_free(void *at)
{
	if (&world_memory_free)
		world_memory_free(at);
	else
		free(at);
}

static void require(bool good, const char *what, uint32_t round)
{
	if (good)
		return;
	fprintf(stderr, "%s, round %u\n", what, round);
	abort();
}

static void shuffle(uint32_t *pages, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		pages[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		uint32_t j = world_draw(i), other = pages[j];

		pages[j] = pages[i - 1];
		pages[i - 1] = other;
	}
}

static void side_make(struct kvp_side *side, uint32_t *pages, uint64_t positions)
{
	side->page = 1u << world_draw(5);
	side->interleave = 1u << world_draw(2);
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
		entry->row_stride = entry->row_bytes + world_draw(3) * 8;
		entry->page_stride = entry->row_stride * entry->rows_per_page + world_draw(3) * 64;
		entry->fd_idx = world_draw(2);
		entry->base = at[entry->fd_idx] + world_draw(100);
		entry->bytes = entry->page_stride * entry->n_pages;
		at[entry->fd_idx] = entry->base + entry->bytes;
	}
	return KVP_MAX(at[0], at[1]) + 1;
}

void world_make(struct world *w)
{
	static const uint32_t fulls[] = { 16, 40, 128, 576 };
	uint32_t full = fulls[world_draw(4)], n_dcp = world_draw(3) ? RANKS_MAX : 1 + world_draw(3);
	struct kvp_entry_list src = { .entries = w->src_entries, .n = ENTRIES };
	struct kvp_entry_list dst = { .entries = w->dst_entries, .n = ENTRIES };
	char err[KVP_PLAN_ERR_BYTES];
	int n;

	*w = (struct world){ .positions = 1 + world_draw(150), .n_ranks = n_dcp };
	w->src.dcp_size = world_draw(2) ? 1 : 1 + world_draw(4);
	w->src.dcp_rank = world_draw(w->src.dcp_size);
	side_make(&w->src, w->src_pages, w->positions);
	w->src_bytes = entries_make(w->src_entries, &w->src, full, full / 2);
	w->dst[0].dcp_size = n_dcp;
	side_make(&w->dst[0], w->dst_pages[0], w->positions);
	w->dst_bytes =
		entries_make(w->dst_entries, &w->dst[0], full, world_draw(2) ? full / 2 : full / 4);
	n = kvp_pair_entries(&src, &dst, w->pairs, KVP_ARRAY_SIZE(w->pairs), err, sizeof(err));
	require(n > 0, err, 0);
	w->n_pairs = (uint32_t)n;
	w->start = world_draw((uint32_t)w->positions);
	w->tokens = 1 + world_draw((uint32_t)(w->positions - w->start));
	w->dst_start = world_draw(2) ? 0 : world_draw((uint32_t)w->positions);
}

void world_pools(struct world *w)
{
	w->src_bare = w->src;
	w->src_bare.pages = NULL;
	w->src_bare.n_pages = KVP_PAGES_ANY;
	for (uint32_t f = 0; f < 2; f++) {
		w->src_maps[f] = memory(w->src_bytes);
		world_fill(w->src_maps[f], w->src_bytes);
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
			w->dst_maps[r][f] = memset(memory(w->dst_bytes), 0xaa, w->dst_bytes);
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

void world_free(struct world *w)
{
	for (uint32_t f = 0; f < 2; f++) {
		memory_free(w->src_maps[f]);
		for (uint32_t r = 0; r < w->n_ranks; r++) {
			memory_free(w->dst_maps[r][f]);
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

void world_check(struct world *w, uint32_t round)
{
	for (uint32_t r = 0; r < w->n_ranks; r++) {
		world_want(w, r);
		for (uint32_t f = 0; f < 2; f++)
			require(memcmp(w->dst_maps[r][f], w->want[r][f], w->dst_bytes) == 0,
				"wrong bytes", round);
	}
}

bool world_good(struct world *w)
{
	char err[KVP_PLAN_ERR_BYTES];

	for (uint32_t r = 0; r < w->n_ranks; r++)
		if (kvp_leg_check(&w->legs[r], err, sizeof(err)) < 0)
			return false;
	return true;
}

/* ---- moves ----------------------------------------------------------------------------------- */

struct kvp_move_source world_source(const struct world *w)
{
	return (struct kvp_move_source){
		.src = { .maps = w->src_maps, .sides = &w->src },
		.n_entries = ENTRIES,
		.start = w->start,
		.tokens = w->tokens,
	};
}

struct kvp_move world_move(const struct world *w, uint32_t r)
{
	return (struct kvp_move){
		.leg = &w->legs[r],
		.dst = { .maps = w->dst_maps[r], .sides = &w->dst[r] },
	};
}

uint64_t world_piece(const struct world *w, uint32_t r, bool gather, struct kvp_part *parts,
		     struct kvp_copy_piece *piece)
{
	*piece = (struct kvp_copy_piece){
		.leg = &w->legs[r],
		.pool = { gather ? w->src_maps : w->dst_maps[r], gather ? &w->src : &w->dst[r] },
		.start = w->start,
		.tokens = w->tokens,
		.parts = parts,
	};
	return kvp_piece_layout(&w->legs[r], NULL, w->start, (uint32_t)w->tokens, parts,
				&piece->n_parts);
}

bool world_add_piece(const struct world *w, uint32_t r, bool gather, struct kvp_jobs *jobs,
		     const unsigned char *slot)
{
	struct kvp_part parts[4 * ENTRIES];
	struct kvp_copy_piece piece;
	const uint64_t at = (uintptr_t)slot + ((uint64_t)r << 20);

	(void)world_piece(w, r, gather, parts, &piece);
	return (gather ? kvp_jobs_gather(jobs, &piece, at) : kvp_jobs_scatter(jobs, &piece, at)) ==
	       0;
}

bool world_add_moves(const struct world *w, struct kvp_jobs *jobs)
{
	const struct kvp_move_source source = world_source(w);

	for (uint32_t r = 0; r < w->n_ranks; r++) {
		const struct kvp_move move = world_move(w, r);

		if (kvp_jobs_move(jobs, &source, &move) < 0)
			return false;
	}
	return true;
}
