/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Entries of a pool, what moves between paired entries, how a piece lies in a slot, and whether
 * all senders of a destination together send everything once.
 *
 * Integers only: no allocation, no I/O, no state. Every function may be called on any thread.
 * Where a function takes `err`, it writes there, on failure only, one line that names what is
 * wrong, its value and the limit; KVP_PLAN_ERR_BYTES is always enough.
 */

#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"
#include "proto/plan.h"

#define KVP_PLAN_ERR_BYTES 256u

/* Both ends must name the same version before a piece travels. */
#define KVP_LAYOUT_VERSION 1u
#define KVP_LAYOUT_ALIGN 256u /* each part of a slot starts at a multiple of this */

#define KVP_PAIRS_MAX 4096u      /* of a leg */
#define KVP_PAGES_MAX (1u << 31) /* of an entry */
#define KVP_PIECE_TOKENS_MAX (1u << 20)

enum kvp_entry_class {
	KVP_CLASS_SHARDED = 0,    /* rows of the tokens that the rank owns */
	KVP_CLASS_REPLICATED = 1, /* rows of all tokens on every rank; pages of W rows */
	KVP_CLASS_BLOB = 2,       /* no rows; reached by segments only */
};

/*
 * One array of a pool. The row at (page, slot) begins at base + page * page_stride + slot *
 * row_stride of its fd and holds bytes [lo, lo + row_bytes) of a full row of full_bytes.
 * Of a blob only fd_idx, base and bytes count.
 */
struct kvp_entry {
	uint64_t base;          /* offset in the fd, bytes */
	uint64_t bytes;         /* extent from base; every row lies within */
	uint64_t page_stride;   /* bytes; ignored with one page */
	uint64_t row_stride;    /* bytes; ignored with one row in a page */
	uint32_t layer;         /* id that both ends use */
	uint32_t group;         /* index of its page list, below KVP_LIMIT_GROUPS */
	uint32_t fd_idx;        /* which of the pool's fds */
	uint32_t row_bytes;     /* 1 .. KVP_LIMIT_ROW_BYTES */
	uint32_t lo;            /* first byte within the full row */
	uint32_t full_bytes;    /* at least lo + row_bytes, at most KVP_LIMIT_FULL_BYTES */
	uint32_t rows_per_page; /* P of its group's side; W if replicated */
	uint32_t n_pages;       /* 1 .. KVP_PAGES_MAX */
	uint8_t klass;          /* enum kvp_entry_class */
};

/* Offset in the entry's fd of its row at (page, slot). */
static inline uint64_t kvp_entry_row(const struct kvp_entry *entry, uint32_t page, uint32_t slot)
{
	return entry->base + page * entry->page_stride + slot * entry->row_stride;
}

/*
 * Tests one entry against the limits and the size of its fd: no row outside the entry or the fd, no
 * two rows of it on the same bytes (other entries may lie between its rows, as in head-major
 * pools; pages may lie between the rows of a page). 0 or -EINVAL.
 */
int kvp_entry_check(const struct kvp_entry *entry, uint64_t fd_bytes, char *err, size_t err_bytes);

/*
 * Tests the entries of a pool against each other: at most KVP_LIMIT_ENTRIES; those of one layer and
 * class agree in full_bytes and have disjoint byte ranges. 0 or -EINVAL.
 */
int kvp_entries_check(const struct kvp_entry *entries, uint32_t n_entries, char *err,
		      size_t err_bytes);

/* The side that an entry's rows follow: its group's, or the replicated form of it. */
struct kvp_side kvp_entry_side(const struct kvp_entry *entry, const struct kvp_side *sides);

/*
 * Tests valid sides (kvp_side_check) against entries: every entry with rows has a side, and
 * rows_per_page is that side's P (W if replicated). 0 or -EINVAL.
 */
int kvp_sides_check(const struct kvp_entry *entries, uint32_t n_entries,
		    const struct kvp_side *sides, uint32_t n_sides, char *err, size_t err_bytes);

/* Bytes that move between the rows of two entries: the overlap of their byte ranges. */
struct kvp_pair {
	uint16_t src_entry, dst_entry; /* indices */
	uint32_t src_off, dst_off;     /* of the overlap within each entry's row */
	uint32_t bytes;                /* of the overlap, at least 1 */
};

/* A pool's entries as kvp_pair_entries() looks at them. */
struct kvp_entry_list {
	const struct kvp_entry *entries; /* [n] */
	uint32_t n;
	const uint64_t *mask; /* bit i of word i / 64: entry i counts; NULL: all do */
};

#define KVP_MASK_WORDS (KVP_LIMIT_ENTRIES / 64) /* of a mask over any pool's entries */

/* Bit `idx` of such a mask; a NULL mask has all bits. */
static inline bool kvp_mask_has(const uint64_t *mask, uint32_t idx)
{
	return !mask || (mask[idx / 64] >> (idx % 64) & 1);
}

/*
 * Pairs entries with the same layer and class (never blobs) whose byte ranges overlap. Writes at
 * most `max` pairs, by ascending dst_entry, then dst_off. Returns how many; -EINVAL when full_bytes
 * differ; -ENOSPC when there are more than max.
 */
int kvp_pair_entries(const struct kvp_entry_list *src, const struct kvp_entry_list *dst,
		     struct kvp_pair *pairs, uint32_t max, char *err, size_t err_bytes);

/*
 * What both ends of a leg know alike. Everything is borrowed. Page lists of the sides are not
 * looked at here, nor are pos0 and n_pages: rows follow from geometry and positions.
 */
struct kvp_leg_geom {
	const struct kvp_pair *pairs; /* [n_pairs] as kvp_pair_entries() wrote them */
	const struct kvp_entry *src, *dst;
	const struct kvp_side *src_sides; /* by src group */
	const struct kvp_side *dst_sides; /* by dst group */
	const uint64_t *dst_starts;       /* by dst group: first position it needs (its window) */
	uint64_t end;                     /* positions needed end here, in every group */
	uint32_t n_pairs;
	uint32_t sender; /* for error texts */
};

/* A range of positions. */
struct kvp_range {
	uint64_t start, tokens;
};

/*
 * Tests that each pair's sides can be planned against each other (kvp_plan_check without ranges)
 * and that the leg's positions end at or below KVP_POS_MAX. 0 or -EINVAL.
 */
int kvp_leg_check(const struct kvp_leg_geom *leg, char *err, size_t err_bytes);

/* The sides that the rows of a pair follow. Page lists are those of the leg's sides. */
void kvp_leg_sides(const struct kvp_leg_geom *leg, const struct kvp_pair *pair,
		   struct kvp_side *src, struct kvp_side *dst);

/* The part of [start, start + tokens) that the pair's destination needs; tokens may become 0. */
struct kvp_range kvp_leg_clip(const struct kvp_leg_geom *leg, const struct kvp_pair *pair,
			      uint64_t start, uint64_t tokens);

/* Rows of a pair in a token range, clipped as above. */
uint64_t kvp_leg_rows(const struct kvp_leg_geom *leg, const struct kvp_pair *pair, uint64_t start,
		      uint64_t tokens);

/*
 * The largest number of tokens, up to KVP_PIECE_TOKENS_MAX, of which any piece of the leg fits
 * slot_bytes; 0 when a single token does not.
 */
uint32_t kvp_piece_tokens(const struct kvp_leg_geom *leg, uint64_t slot_bytes);

/* Bytes that any piece of that many tokens can need, what kvp_piece_tokens() compares. */
uint64_t kvp_piece_worst(const struct kvp_leg_geom *leg, uint64_t tokens);

/* Slot bytes that a single token of a pool can need at worst, each row whole: for registration. */
uint64_t kvp_entries_token_bytes(const struct kvp_entry *entries, uint32_t n_entries);

/* What a piece carries of one pair: rows * pair.bytes, dense, in position order. */
struct kvp_part {
	uint64_t offset; /* in the slot, a multiple of KVP_LAYOUT_ALIGN */
	uint64_t bytes;
	uint32_t pair; /* index */
	uint32_t rows; /* at least 1 */
};

/*
 * Lays out the piece [start, start + tokens) in a slot: the pairs of the entries in `src_mask` that
 * have rows there, in pair order. `parts` has room for n_pairs, or is NULL to measure only.
 * Returns the bytes that the piece takes, counted to the end of its last part; *n_parts is always
 * written. tokens is at most KVP_PIECE_TOKENS_MAX.
 */
uint64_t kvp_piece_layout(const struct kvp_leg_geom *leg, const uint64_t *src_mask, uint64_t start,
			  uint32_t tokens, struct kvp_part *parts, uint32_t *n_parts);

/* What a destination needs, for kvp_coverage_check(). Borrowed. */
struct kvp_need {
	const struct kvp_entry *entries; /* [n_entries]; blobs need nothing */
	const struct kvp_side *sides;    /* by group */
	const uint64_t *starts;          /* by group: first position needed */
	uint64_t end;
	uint32_t n_entries;
};

/*
 * A coverage check that takes more steps than this is refused. Ends whose turns fit each other at
 * all stay far below; what a client or a peer can say has no other limit.
 */
#define KVP_COVERAGE_STEPS_MAX (1u << 20)

/*
 * Tests that the senders' legs together send each byte of each needed row exactly once. Legs have
 * passed kvp_leg_check() and share the destination `need`; at most KVP_MAX_SENDERS. 0; or -EINVAL
 * with the first entry, layer, byte range and senders where it fails.
 */
int kvp_coverage_check(const struct kvp_need *need, const struct kvp_leg_geom *legs,
		       uint32_t n_legs, char *err, size_t err_bytes);
