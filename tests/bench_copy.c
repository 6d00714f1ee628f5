/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast rows move on one thread, against memcpy of the same bytes between the same buffers.
 * Seven entries of 576-byte rows, pages of 64 in random order on both sides, one source rank to
 * four destination ranks, pools larger than the cache. Medians of runs in alternation.
 */

#include <stdio.h>
#include <string.h>

#include "daemon/copy.h"
#include "proto/layout.h"
#include "proto/util.h"
#include "tests/support_rows.h"

#define RUNS 7u
#define SLOT_BYTES (1u << 20)
#define N_SLOTS 4u

static unsigned char *slots;

static double run_memcpy(struct rows *rows)
{
	double start = rows_now();

	memcpy(rows->dst, rows->src, rows->pool_bytes);
	return rows_now() - start;
}

static double run_move(struct rows *rows, uint64_t chunk, bool together)
{
	struct kvp_move moves[ROWS_RANKS];
	double start = rows_now();

	for (uint32_t i = 0; i < ROWS_RANKS; i++)
		moves[i] = (struct kvp_move){
			.leg = &rows->legs[i],
			.dst = { .maps = &rows->dst_map[i], .sides = &rows->dst_sides[i] },
		};
	for (uint64_t at = 0; at < rows->tokens; at += chunk) {
		uint64_t tokens = KVP_MIN(chunk, rows->tokens - at);
		struct kvp_move_source source = {
			.src = { .maps = &rows->src, .sides = &rows->src_side },
			.n_entries = ROWS_ENTRIES,
			.start = at,
			.tokens = tokens,
		};

		if (together)
			kvp_move(&source, moves, ROWS_RANKS);
		for (uint32_t i = 0; !together && i < ROWS_RANKS; i++)
			kvp_move(&source, &moves[i], 1);
	}
	return rows_now() - start;
}

/* As a sender packs for ranks that are granted together: one pass fills a slot of each. */
static double run_gather_together(struct rows *rows)
{
	uint32_t tokens = kvp_piece_tokens(&rows->legs[0], SLOT_BYTES), slot = 0;
	double start = rows_now();

	for (uint64_t at = 0; at < rows->tokens; at += tokens) {
		struct kvp_part parts[ROWS_RANKS][ROWS_ENTRIES];
		struct kvp_copy_piece pieces[ROWS_RANKS];
		void *places[ROWS_RANKS];

		for (uint32_t i = 0; i < ROWS_RANKS; i++, slot = (slot + 1) % N_SLOTS) {
			pieces[i] = (struct kvp_copy_piece){
				.leg = &rows->legs[i],
				.pool = { .maps = &rows->src, .sides = &rows->src_side },
				.start = at,
				.tokens = KVP_MIN(tokens, rows->tokens - at),
				.parts = parts[i],
			};
			places[i] = slots + (uint64_t)slot * SLOT_BYTES;
			(void)kvp_piece_layout(pieces[i].leg, NULL, at, (uint32_t)pieces[i].tokens,
					       parts[i], &pieces[i].n_parts);
		}
		kvp_gather_together(pieces, places, ROWS_RANKS);
	}
	return rows_now() - start;
}

/* Through slots, as a sender and a receiver do; `parts` of one piece after the other. */
static double run_slots(struct rows *rows, bool gather, bool scatter)
{
	uint32_t tokens = kvp_piece_tokens(&rows->legs[0], SLOT_BYTES), slot = 0;
	double start = rows_now();

	for (uint64_t at = 0; at < rows->tokens; at += tokens) {
		uint64_t left = KVP_MIN(tokens, rows->tokens - at);

		for (uint32_t i = 0; i < ROWS_RANKS; i++, slot = (slot + 1) % N_SLOTS) {
			struct kvp_part parts[ROWS_ENTRIES];
			struct kvp_copy_piece piece = {
				.leg = &rows->legs[i],
				.start = at,
				.tokens = left,
				.parts = parts,
			};
			unsigned char *place = slots + (uint64_t)slot * SLOT_BYTES;

			(void)kvp_piece_layout(piece.leg, NULL, at, (uint32_t)piece.tokens, parts,
					       &piece.n_parts);
			piece.pool.maps = &rows->src;
			piece.pool.sides = &rows->src_side;
			if (gather)
				kvp_gather(&piece, place);
			piece.pool.maps = &rows->dst_map[i];
			piece.pool.sides = &rows->dst_sides[i];
			if (scatter)
				kvp_scatter(&piece, place);
		}
	}
	return rows_now() - start;
}

int main(void)
{
	static const char *const names[] = {
		"memcpy of the same bytes", "move, 4 ranks together, chunks of 8192",
		"move, 4 ranks one by one", "move together, chunks of 512",
		"gather into slots",        "scatter out of slots",
		"gather, then scatter",     "gather into slots, 4 ranks together",
	};
	double base, times[KVP_ARRAY_SIZE(names)][RUNS];
	static struct rows rows;

	rows_make(&rows, 1024);
	slots = rows_memory(N_SLOTS * SLOT_BYTES, 3);
	(void)run_memcpy(&rows);
	for (uint32_t i = 0; i < RUNS; i++) {
		times[0][i] = run_memcpy(&rows);
		times[1][i] = run_move(&rows, 8192, true);
		if (i == 0)
			rows_check(&rows, names[1]);
		times[2][i] = run_move(&rows, 8192, false);
		times[3][i] = run_move(&rows, 512, true);
		times[4][i] = run_slots(&rows, true, false);
		times[5][i] = run_slots(&rows, false, true);
		times[6][i] = run_slots(&rows, true, true);
		if (i == 0)
			rows_check(&rows, names[6]);
		times[7][i] = run_gather_together(&rows);
	}
	printf("copy: %u entries of %u-byte rows, %.0f MiB from pools to pools, one thread, median "
	       "of %u\n",
	       ROWS_ENTRIES, ROWS_BYTES, (double)rows.pool_bytes / (1 << 20), RUNS);
	base = rows_median(times[0], RUNS);
	for (uint32_t k = 0; k < KVP_ARRAY_SIZE(names); k++) {
		double seconds = rows_median(times[k], RUNS);

		printf("  %-42s %6.2f GB/s  %.2f of memcpy\n", names[k],
		       (double)rows.pool_bytes / seconds / 1e9, base / seconds);
	}
	return 0;
}
