/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/layout.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/util.h"

_Static_assert(KVP_MASK_WORDS * 64 == KVP_LIMIT_ENTRIES, "a mask has a bit for each entry");
_Static_assert(KVP_LIMIT_GROUPS < UINT8_MAX, "coverage keeps a group in a byte");

/* Where an error text goes. */
struct refusal {
	char *err;
	size_t bytes;
};

KVP_PRINTF(2, 3)
static int refuse(struct refusal to, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	if (to.bytes)
		(void)vsnprintf(to.err, to.bytes, fmt, args); /* a cut text is still a text */
	va_end(args);
	return -EINVAL;
}

/* ---- entries */

static uint64_t add_sat(uint64_t a, uint64_t b)
{
	return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Bytes from the first of n rows to the end of the last, at that stride; saturates. */
static uint64_t span(uint32_t n, uint64_t stride, uint64_t row_bytes)
{
	uint64_t bytes;

	return __builtin_mul_overflow(n - 1, stride, &bytes) ? UINT64_MAX
							     : add_sat(bytes, row_bytes);
}

static int extent_check(const struct kvp_entry *e, uint64_t fd_bytes, struct refusal to)
{
	if (!e->bytes || e->bytes > KVP_LIMIT_EXTENT)
		return refuse(to, "bytes %" PRIu64 " is not 1 .. %" PRIu64, e->bytes,
			      (uint64_t)KVP_LIMIT_EXTENT);
	if (e->base > fd_bytes || e->bytes > fd_bytes - e->base)
		return refuse(to, "base %" PRIu64 " + bytes %" PRIu64 " is past the fd's %" PRIu64,
			      e->base, e->bytes, fd_bytes);
	return 0;
}

static int row_check(const struct kvp_entry *e, struct refusal to)
{
	if (!e->row_bytes || e->row_bytes > KVP_LIMIT_ROW_BYTES)
		return refuse(to, "row_bytes %u is not 1 .. %u", e->row_bytes, KVP_LIMIT_ROW_BYTES);
	if (!e->full_bytes || e->full_bytes > KVP_LIMIT_FULL_BYTES)
		return refuse(to, "full_bytes %u is not 1 .. %u", e->full_bytes,
			      KVP_LIMIT_FULL_BYTES);
	if (e->lo > e->full_bytes || e->row_bytes > e->full_bytes - e->lo)
		return refuse(to, "lo %u + row_bytes %u is past full_bytes %u", e->lo, e->row_bytes,
			      e->full_bytes);
	return 0;
}

static int counts_check(const struct kvp_entry *e, struct refusal to)
{
	if (!e->rows_per_page || e->rows_per_page > KVP_LIMIT_VPAGE)
		return refuse(to, "rows_per_page %u is not 1 .. %u", e->rows_per_page,
			      KVP_LIMIT_VPAGE);
	if (!e->n_pages || e->n_pages > KVP_PAGES_MAX)
		return refuse(to, "n_pages %u is not 1 .. %u", e->n_pages, KVP_PAGES_MAX);
	if (e->group >= KVP_LIMIT_GROUPS)
		return refuse(to, "group %u is not below %u", e->group, KVP_LIMIT_GROUPS);
	return 0;
}

/* Rows lie apart when pages lie apart, or, slot by slot, when the pages fit between two slots. */
static int strides_check(const struct kvp_entry *e, struct refusal to)
{
	uint64_t rows = span(e->rows_per_page, e->row_stride, e->row_bytes);
	uint64_t pages = span(e->n_pages, e->page_stride, e->row_bytes);
	uint64_t last = add_sat(rows, pages == UINT64_MAX ? pages : pages - e->row_bytes);

	if (e->rows_per_page > 1 &&
	    (e->row_stride < e->row_bytes || e->row_stride > KVP_LIMIT_EXTENT))
		return refuse(to, "row_stride %" PRIu64 " is not row_bytes %u .. %" PRIu64,
			      e->row_stride, e->row_bytes, (uint64_t)KVP_LIMIT_EXTENT);
	if (e->n_pages > 1 && (e->page_stride < e->row_bytes || e->page_stride > KVP_LIMIT_EXTENT))
		return refuse(to, "page_stride %" PRIu64 " is not row_bytes %u .. %" PRIu64,
			      e->page_stride, e->row_bytes, (uint64_t)KVP_LIMIT_EXTENT);
	if (e->rows_per_page > 1 && e->n_pages > 1 && e->page_stride < rows &&
	    e->row_stride < pages)
		return refuse(to,
			      "page_stride %" PRIu64 " is below the %" PRIu64
			      " bytes of a page's rows",
			      e->page_stride, rows);
	if (last > e->bytes)
		return refuse(to, "rows end at %" PRIu64 ", past bytes %" PRIu64, last, e->bytes);
	return 0;
}

int kvp_entry_check(const struct kvp_entry *entry, uint64_t fd_bytes, char *err, size_t err_bytes)
{
	struct refusal to = { err, err_bytes };
	struct kvp_entry e = *entry;
	int r = extent_check(&e, fd_bytes, to);

	if (e.klass > KVP_CLASS_BLOB)
		return refuse(to, "class %u is not 0 .. %d", e.klass, KVP_CLASS_BLOB);
	if (r || e.klass == KVP_CLASS_BLOB)
		return r;

	r = row_check(&e, to);
	if (!r)
		r = counts_check(&e, to);
	if (r)
		return r;

	if (e.rows_per_page == 1)
		e.row_stride = 0;
	if (e.n_pages == 1)
		e.page_stride = 0;
	return strides_check(&e, to);
}

/* True if two entries hold rows of the same layer and class. */
static bool same_layer(const struct kvp_entry *a, const struct kvp_entry *b)
{
	return a->layer == b->layer && a->klass == b->klass;
}

/* The bytes of a full row that both hold: their number, and the first in *lo. */
static uint32_t overlap(const struct kvp_entry *a, const struct kvp_entry *b, uint32_t *lo)
{
	uint32_t hi = KVP_MIN(a->lo + a->row_bytes, b->lo + b->row_bytes);

	*lo = KVP_MAX(a->lo, b->lo);
	return hi > *lo ? hi - *lo : 0;
}

static int entries_refuse(const struct kvp_entry *entries, uint32_t i, uint32_t k,
			  struct refusal to)
{
	const struct kvp_entry *a = &entries[i], *b = &entries[k];
	uint32_t lo;

	if (a->full_bytes != b->full_bytes)
		return refuse(to, "entries %u and %u of layer %u: full_bytes %u and %u differ", i,
			      k, a->layer, a->full_bytes, b->full_bytes);
	if (overlap(a, b, &lo))
		return refuse(to,
			      "entries %u and %u of layer %u: both hold byte %u of a row, lo %u + "
			      "row_bytes %u and lo %u + row_bytes %u",
			      i, k, a->layer, lo, a->lo, a->row_bytes, b->lo, b->row_bytes);
	return 0;
}

int kvp_entries_check(const struct kvp_entry *entries, uint32_t n_entries, char *err,
		      size_t err_bytes)
{
	struct refusal to = { err, err_bytes };

	if (n_entries > KVP_LIMIT_ENTRIES)
		return refuse(to, "%u entries, at most %u", n_entries, KVP_LIMIT_ENTRIES);

	for (uint32_t k = 0; k < n_entries; k++) {
		for (uint32_t i = 0; i < k && entries[k].klass != KVP_CLASS_BLOB; i++) {
			int r = same_layer(&entries[i], &entries[k])
					? entries_refuse(entries, i, k, to)
					: 0;

			if (r)
				return r;
		}
	}
	return 0;
}

struct kvp_side kvp_entry_side(const struct kvp_entry *entry, const struct kvp_side *sides)
{
	const struct kvp_side *side = &sides[entry->group];

	return entry->klass == KVP_CLASS_REPLICATED ? kvp_side_replicated(side) : *side;
}

int kvp_sides_check(const struct kvp_entry *entries, uint32_t n_entries,
		    const struct kvp_side *sides, uint32_t n_sides, char *err, size_t err_bytes)
{
	struct refusal to = { err, err_bytes };

	for (uint32_t i = 0; i < n_entries; i++) {
		const struct kvp_entry *e = &entries[i];
		uint32_t page;

		if (e->klass == KVP_CLASS_BLOB)
			continue;
		if (e->group >= n_sides)
			return refuse(to, "entry %u: no side for its group %u, only %u", i,
				      e->group, n_sides);

		page = kvp_entry_side(e, sides).page;
		if (e->rows_per_page != page)
			return refuse(to, "entry %u: rows_per_page %u, but its side has %u", i,
				      e->rows_per_page, page);
	}
	return 0;
}

/* ---- pairing */

/* Adds the pairs of one destination entry behind the n that are there, by dst_off. */
static int entry_pair(const struct kvp_entry_list *src, const struct kvp_entry_list *dst,
		      uint32_t dst_idx, struct kvp_pair *pairs, uint32_t n, uint32_t max)
{
	const struct kvp_entry *to = &dst->entries[dst_idx];
	uint32_t first = n;

	for (uint32_t i = 0; i < src->n; i++) {
		const struct kvp_entry *from = &src->entries[i];
		uint32_t lo, bytes, at;

		if (!same_layer(from, to) || !kvp_mask_has(src->mask, i))
			continue;
		bytes = overlap(from, to, &lo);
		if (!bytes)
			continue;
		if (n == max)
			return -ENOSPC;

		for (at = n++; at > first && pairs[at - 1].dst_off > lo - to->lo; at--)
			pairs[at] = pairs[at - 1];
		pairs[at] = (struct kvp_pair){
			.src_entry = (uint16_t)i,
			.dst_entry = (uint16_t)dst_idx,
			.src_off = lo - from->lo,
			.dst_off = lo - to->lo,
			.bytes = bytes,
		};
	}
	return (int)n;
}

/* Names the first source entry whose full row is not the destination entry's; -1 if none. */
static int64_t entry_mismatch(const struct kvp_entry_list *src, const struct kvp_entry *to)
{
	for (uint32_t i = 0; i < src->n; i++) {
		if (same_layer(&src->entries[i], to) && kvp_mask_has(src->mask, i) &&
		    src->entries[i].full_bytes != to->full_bytes)
			return i;
	}
	return -1;
}

int kvp_pair_entries(const struct kvp_entry_list *src, const struct kvp_entry_list *dst,
		     struct kvp_pair *pairs, uint32_t max, char *err, size_t err_bytes)
{
	struct refusal to = { err, err_bytes };
	int n = 0;

	for (uint32_t i = 0; i < dst->n && n >= 0; i++) {
		const struct kvp_entry *entry = &dst->entries[i];
		int64_t bad;

		if (entry->klass == KVP_CLASS_BLOB || !kvp_mask_has(dst->mask, i))
			continue;
		bad = entry_mismatch(src, entry);
		if (bad >= 0)
			return refuse(to,
				      "source entry %u and destination entry %u of layer %u: "
				      "full_bytes %u and %u differ",
				      (uint32_t)bad, i, entry->layer, src->entries[bad].full_bytes,
				      entry->full_bytes);
		n = entry_pair(src, dst, i, pairs, (uint32_t)n, max);
	}
	if (n < 0)
		(void)refuse(to, "more than %u pairs of entries", max);
	return n;
}

/* ---- legs */

/* Which sides and window a pair has: rows are the same for all pairs with the same key. */
struct pair_key {
	uint32_t src_group, dst_group, klass;
};

static struct pair_key pair_key(const struct kvp_leg_geom *leg, const struct kvp_pair *pair)
{
	return (struct pair_key){
		.src_group = leg->src[pair->src_entry].group,
		.dst_group = leg->dst[pair->dst_entry].group,
		.klass = leg->dst[pair->dst_entry].klass,
	};
}

/* True, and *last becomes `key`, if it differs: pairs with the same key mostly come together. */
static bool pair_key_next(struct pair_key *last, struct pair_key key)
{
	if (last->src_group == key.src_group && last->dst_group == key.dst_group &&
	    last->klass == key.klass)
		return false;

	*last = key;
	return true;
}

#define KVP_PAIR_KEY_NONE ((struct pair_key){ UINT32_MAX, UINT32_MAX, UINT32_MAX })

#define PAIR_KEYS (KVP_LIMIT_GROUPS * KVP_LIMIT_GROUPS * 2u) /* blobs have no pairs */

_Static_assert(KVP_CLASS_BLOB == 2, "two classes have rows");

/* Rows by key: keys may come in any order, and each is looked at once. */
struct rows_memo {
	uint64_t known[PAIR_KEYS / 64];
	uint64_t rows[PAIR_KEYS];
};

/* Where the rows of a key are kept; *fresh: they are the caller's to find. */
static uint64_t *memo_rows(struct rows_memo *memo, struct pair_key key, bool *fresh)
{
	uint32_t idx = (key.src_group * KVP_LIMIT_GROUPS + key.dst_group) * 2 + key.klass;

	*fresh = !(memo->known[idx / 64] >> (idx % 64) & 1);
	memo->known[idx / 64] |= UINT64_C(1) << (idx % 64);
	return &memo->rows[idx];
}

static void memo_clear(struct rows_memo *memo)
{
	memset(memo->known, 0, sizeof(memo->known));
}

void kvp_leg_sides(const struct kvp_leg_geom *leg, const struct kvp_pair *pair,
		   struct kvp_side *src, struct kvp_side *dst)
{
	*src = kvp_entry_side(&leg->src[pair->src_entry], leg->src_sides);
	*dst = kvp_entry_side(&leg->dst[pair->dst_entry], leg->dst_sides);
}

int kvp_leg_check(const struct kvp_leg_geom *leg, char *err, size_t err_bytes)
{
	struct refusal to = { err, err_bytes };
	struct pair_key last = KVP_PAIR_KEY_NONE;

	if (leg->end > KVP_POS_MAX)
		return refuse(to, "end %" PRIu64 " is past %" PRIu64, leg->end, KVP_POS_MAX);

	for (uint32_t i = 0; i < leg->n_pairs; i++) {
		const struct kvp_pair *pair = &leg->pairs[i];
		enum kvp_plan_error error;
		struct kvp_side src, dst;

		if (!pair_key_next(&last, pair_key(leg, pair)))
			continue;
		kvp_leg_sides(leg, pair, &src, &dst);
		error = kvp_plan_check(&src, &dst, 0, 0);
		if (error)
			return refuse(to,
				      "groups %u and %u: %s (page %u dcp %u/%u interleave %u, page "
				      "%u dcp %u/%u interleave %u)",
				      last.src_group, last.dst_group, kvp_plan_error_name(error),
				      src.page, src.dcp_rank, src.dcp_size, src.interleave,
				      dst.page, dst.dcp_rank, dst.dcp_size, dst.interleave);
	}
	return 0;
}

static struct kvp_range clip(uint64_t first, uint64_t end, uint64_t start, uint64_t tokens)
{
	uint64_t lo = KVP_MAX(start, first), hi = KVP_MIN(add_sat(start, tokens), end);

	return (struct kvp_range){ .start = lo, .tokens = hi > lo ? hi - lo : 0 };
}

struct kvp_range kvp_leg_clip(const struct kvp_leg_geom *leg, const struct kvp_pair *pair,
			      uint64_t start, uint64_t tokens)
{
	return clip(leg->dst_starts[leg->dst[pair->dst_entry].group], leg->end, start, tokens);
}

uint64_t kvp_leg_rows(const struct kvp_leg_geom *leg, const struct kvp_pair *pair, uint64_t start,
		      uint64_t tokens)
{
	struct kvp_range range = kvp_leg_clip(leg, pair, start, tokens);
	struct kvp_side src, dst;

	kvp_leg_sides(leg, pair, &src, &dst);
	return kvp_rows_count(&src, &dst, range.start, range.tokens);
}

/* ---- pieces */

static uint64_t pair_worst(const struct kvp_leg_geom *leg, const struct kvp_pair *pair,
			   uint64_t tokens)
{
	struct kvp_side src, dst;

	kvp_leg_sides(leg, pair, &src, &dst);
	return kvp_rows_worst(&src, &dst, tokens);
}

uint64_t kvp_piece_worst(const struct kvp_leg_geom *leg, uint64_t tokens)
{
	struct pair_key last = KVP_PAIR_KEY_NONE;
	uint64_t rows = 0, bytes = 0;
	struct rows_memo memo;

	memo_clear(&memo);
	for (uint32_t i = 0; i < leg->n_pairs; i++) {
		const struct kvp_pair *pair = &leg->pairs[i];

		if (pair_key_next(&last, pair_key(leg, pair))) {
			bool fresh;
			uint64_t *known = memo_rows(&memo, last, &fresh);

			if (fresh)
				*known = pair_worst(leg, pair, tokens);
			rows = *known;
		}
		bytes += KVP_ALIGN_UP(rows * pair->bytes, (uint64_t)KVP_LAYOUT_ALIGN);
	}
	return bytes;
}

uint32_t kvp_piece_tokens(const struct kvp_leg_geom *leg, uint64_t slot_bytes)
{
	uint32_t fits = 0, beyond = KVP_PIECE_TOKENS_MAX + 1;

	while (beyond - fits > 1) {
		uint32_t mid = fits + (beyond - fits) / 2;

		if (kvp_piece_worst(leg, mid) <= slot_bytes)
			fits = mid;
		else
			beyond = mid;
	}
	return fits;
}

uint64_t kvp_entries_token_bytes(const struct kvp_entry *entries, uint32_t n_entries)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < n_entries; i++) {
		if (entries[i].klass != KVP_CLASS_BLOB)
			bytes += KVP_ALIGN_UP((uint64_t)entries[i].row_bytes, KVP_LAYOUT_ALIGN);
	}
	return bytes;
}

uint64_t kvp_piece_layout(const struct kvp_leg_geom *leg, const uint64_t *src_mask, uint64_t start,
			  uint32_t tokens, struct kvp_part *parts, uint32_t *n_parts)
{
	struct pair_key last = KVP_PAIR_KEY_NONE;
	uint64_t rows = 0, end = 0;
	struct rows_memo memo;
	uint32_t n = 0;

	memo_clear(&memo);
	for (uint32_t i = 0; i < leg->n_pairs; i++) {
		const struct kvp_pair *pair = &leg->pairs[i];
		uint64_t offset = KVP_ALIGN_UP(end, (uint64_t)KVP_LAYOUT_ALIGN);

		if (!kvp_mask_has(src_mask, pair->src_entry))
			continue;
		if (pair_key_next(&last, pair_key(leg, pair))) {
			bool fresh;
			uint64_t *known = memo_rows(&memo, last, &fresh);

			if (fresh)
				*known = kvp_leg_rows(leg, pair, start, tokens);
			rows = *known;
		}
		if (!rows)
			continue;

		if (parts)
			parts[n] = (struct kvp_part){
				.offset = offset,
				.bytes = rows * pair->bytes,
				.pair = i,
				.rows = (uint32_t)rows,
			};
		n++;
		end = offset + rows * pair->bytes;
	}
	*n_parts = n;
	return end;
}

/* ---- coverage */

/*
 * Who sends some bytes of an entry: for each leg its source group plus one, or 0. Bytes with the
 * same contributors, class and destination group have the same answer.
 */
struct contributors {
	uint32_t dst_group, klass;
	uint8_t group[KVP_MAX_SENDERS];
};

#define COVERAGE_GOOD 16u

struct coverage {
	const struct kvp_need *need;
	const struct kvp_leg_geom *legs;
	uint32_t n_legs;
	uint32_t next[KVP_MAX_SENDERS]; /* by leg: its first pair that ends past what was tested */
	struct contributors good[COVERAGE_GOOD]; /* the last that were found right */
	uint32_t next_good;
	uint64_t steps; /* taken so far */
	struct refusal to;
};

/* Bytes [at, stop) of the row of one entry. */
struct stretch {
	uint32_t entry, at, stop;
};

static bool pair_passed(const struct kvp_pair *pair, const struct stretch *s)
{
	return pair->dst_entry < s->entry ||
	       (pair->dst_entry == s->entry && pair->dst_off + pair->bytes <= s->at);
}

/*
 * Collects who sends the byte s->at; s->stop becomes where that changes. Pairs are sorted as bytes
 * are visited and those of one leg never overlap, so each leg needs one cursor.
 */
static void stretch_collect(struct coverage *cov, struct stretch *s, struct contributors *who)
{
	const struct kvp_entry *entry = &cov->need->entries[s->entry];

	memset(who, 0, sizeof(*who));
	who->dst_group = entry->group;
	who->klass = entry->klass;
	s->stop = entry->row_bytes;
	for (uint32_t i = 0; i < cov->n_legs; i++) {
		const struct kvp_leg_geom *leg = &cov->legs[i];
		const struct kvp_pair *pair;

		while (cov->next[i] < leg->n_pairs && pair_passed(&leg->pairs[cov->next[i]], s))
			cov->next[i]++;
		if (cov->next[i] == leg->n_pairs)
			continue;

		pair = &leg->pairs[cov->next[i]];
		if (pair->dst_entry != s->entry)
			continue;
		if (pair->dst_off > s->at) {
			s->stop = KVP_MIN(s->stop, pair->dst_off);
		} else {
			s->stop = KVP_MIN(s->stop, pair->dst_off + pair->bytes);
			who->group[i] = (uint8_t)(leg->src[pair->src_entry].group + 1);
		}
	}
}

/* Refuses with the place, then the words. */
KVP_PRINTF(3, 4)
static int stretch_refuse(const struct coverage *cov, const struct stretch *s, const char *fmt, ...)
{
	const struct kvp_entry *entry = &cov->need->entries[s->entry];
	char what[128];
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(what, sizeof(what), fmt, args); /* cut where it is too long */
	va_end(args);
	return refuse(cov->to, "entry %u, layer %u, bytes %u to %u: %s", s->entry, entry->layer,
		      entry->lo + s->at, entry->lo + s->stop, what);
}

/* The contributors' sides; returns how many. `leg` says whose each is. */
static uint32_t contributor_sides(const struct coverage *cov, const struct contributors *who,
				  struct kvp_side *sides, uint32_t *leg)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < cov->n_legs; i++) {
		const struct kvp_side *side;

		if (!who->group[i])
			continue;
		side = &cov->legs[i].src_sides[who->group[i] - 1];
		sides[n] = who->klass == KVP_CLASS_REPLICATED ? kvp_side_replicated(side) : *side;
		leg[n++] = i;
	}
	return n;
}

/* Names the senders that were found, as far as they fit. */
static int stretch_refuse_sum(const struct coverage *cov, const struct stretch *s,
			      const uint32_t *leg, uint32_t n, uint64_t sum, uint64_t rows)
{
	char names[64];
	size_t used = 0;

	for (uint32_t i = 0; i < n && used < sizeof(names); i++)
		used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%u", i ? "," : "",
					 cov->legs[leg[i]].sender);
	if (n == 1)
		return stretch_refuse(cov, s, "sender %s sends %" PRIu64 " of %" PRIu64 " rows",
				      names, sum, rows);
	return stretch_refuse(cov, s, "senders %s%s send %" PRIu64 " of %" PRIu64 " rows", names,
			      used < sizeof(names) ? "" : "...", sum, rows);
}

static struct kvp_side need_side(const struct coverage *cov, const struct stretch *s)
{
	return kvp_entry_side(&cov->need->entries[s->entry], cov->need->sides);
}

static struct kvp_range need_range(const struct coverage *cov, const struct stretch *s)
{
	uint64_t first = cov->need->starts[cov->need->entries[s->entry].group];

	return clip(first, cov->need->end, 0, UINT64_MAX);
}

/* Counts the steps of what is about to be looked at. */
static int stretch_steps(struct coverage *cov, const struct stretch *s, uint64_t steps)
{
	cov->steps = add_sat(cov->steps, steps);
	if (cov->steps <= KVP_COVERAGE_STEPS_MAX)
		return 0;
	return stretch_refuse(cov, s,
			      "turns that meet too late: %" PRIu64 " steps to compare, at most %u",
			      cov->steps, KVP_COVERAGE_STEPS_MAX);
}

/* Contributor k shares no needed position with those before it. */
static int stretch_disjoint(struct coverage *cov, const struct stretch *s,
			    const struct kvp_side *sides, const uint32_t *leg, uint32_t k)
{
	struct kvp_side dst = need_side(cov, s);
	struct kvp_range range = need_range(cov, s);

	for (uint32_t i = 0; i < k; i++) {
		uint32_t a = cov->legs[leg[i]].sender, b = cov->legs[leg[k]].sender;
		int r;

		if (kvp_plan_check(&sides[i], &sides[k], 0, 0))
			return stretch_refuse(cov, s, "turns of senders %u and %u do not match", a,
					      b);
		r = stretch_steps(cov, s,
				  kvp_rows_clash_steps(&sides[i], &sides[k], &dst, range.tokens));
		if (r)
			return r;
		if (kvp_rows_clash(&sides[i], &sides[k], &dst, range.start, range.tokens))
			return stretch_refuse(cov, s, "both sender %u and sender %u send them", a,
					      b);
	}
	return 0;
}

/* Every position that the destination needs of these bytes is held by exactly one contributor. */
static int stretch_check(struct coverage *cov, const struct stretch *s,
			 const struct contributors *who)
{
	struct kvp_side dst = need_side(cov, s);
	struct kvp_range range = need_range(cov, s);
	uint64_t rows = kvp_side_rows(&dst, range.start, range.tokens), sum = 0;
	struct kvp_side sides[KVP_MAX_SENDERS];
	uint32_t leg[KVP_MAX_SENDERS], n;

	if (!rows)
		return 0;

	n = contributor_sides(cov, who, sides, leg);
	if (!n)
		return stretch_refuse(cov, s, "no sender sends them");

	for (uint32_t k = 0; k < n; k++) {
		int r = stretch_steps(cov, s, kvp_rows_count_steps(&sides[k], &dst));

		if (!r)
			r = stretch_disjoint(cov, s, sides, leg, k);
		if (r)
			return r;
		sum += kvp_rows_count(&sides[k], &dst, range.start, range.tokens);
	}
	return sum == rows ? 0 : stretch_refuse_sum(cov, s, leg, n, sum, rows);
}

static bool known_good(const struct coverage *cov, const struct contributors *who)
{
	for (uint32_t i = 0; i < COVERAGE_GOOD; i++)
		if (!memcmp(who, &cov->good[i], sizeof(*who)))
			return true;
	return false;
}

int kvp_coverage_check(const struct kvp_need *need, const struct kvp_leg_geom *legs,
		       uint32_t n_legs, char *err, size_t err_bytes)
{
	struct coverage cov = { .need = need, .legs = legs, .n_legs = n_legs };

	assert(n_legs <= KVP_MAX_SENDERS);
	cov.to = (struct refusal){ err, err_bytes };
	for (uint32_t i = 0; i < COVERAGE_GOOD; i++)
		cov.good[i].dst_group = UINT32_MAX;
	for (uint32_t i = 0; i < need->n_entries; i++) {
		struct stretch s = { .entry = i };

		if (need->entries[i].klass == KVP_CLASS_BLOB)
			continue;
		for (; s.at < need->entries[i].row_bytes; s.at = s.stop) {
			struct contributors who;
			int r;

			stretch_collect(&cov, &s, &who);
			if (known_good(&cov, &who))
				continue;
			r = stretch_check(&cov, &s, &who);
			if (r)
				return r;
			cov.good[cov.next_good++ % COVERAGE_GOOD] = who;
		}
	}
	return 0;
}
