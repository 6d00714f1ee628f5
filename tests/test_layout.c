/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/layout.h"

#include <errno.h>
#include <string.h>

#include <criterion/criterion.h>

#include "proto/util.h"
#include "tests/support_plan.h"

/* ---- entries */

#define FD_BYTES (UINT64_C(1) << 30)

/* 100 pages of 64 rows of 576 bytes. */
static const struct kvp_entry good_entry = {
	.base = 4096,
	.bytes = 100 * 64 * 576,
	.page_stride = 64 * 576,
	.row_stride = 576,
	.row_bytes = 576,
	.full_bytes = 576,
	.rows_per_page = 64,
	.n_pages = 100,
};

static void entry_expect(const struct kvp_entry *entry, const char *want)
{
	char err[KVP_PLAN_ERR_BYTES] = "";
	int r = kvp_entry_check(entry, FD_BYTES, err, sizeof(err));

	cr_assert_eq(r, want ? -EINVAL : 0, "%s: %s", want ? want : "none", err);
	if (want)
		cr_assert(strstr(err, want), "'%s' does not name '%s'", err, want);
}

#define ENTRY_EXPECT(want, ...)                  \
	do {                                     \
		struct kvp_entry e = good_entry; \
		__VA_ARGS__;                     \
		entry_expect(&e, want);          \
	} while (0)

Test(layout, entry_fields)
{
	entry_expect(&good_entry, NULL);
	ENTRY_EXPECT("class 3", e.klass = 3);
	ENTRY_EXPECT("row_bytes 0 is not 1 .. 1048576", e.row_bytes = 0);
	ENTRY_EXPECT("row_bytes 1048577", e.row_bytes = e.full_bytes = (1 << 20) + 1);
	ENTRY_EXPECT("row_bytes 4294967295", e.row_bytes = UINT32_MAX);
	ENTRY_EXPECT("full_bytes 0", e.full_bytes = 0);
	ENTRY_EXPECT("full_bytes 4294967295", e.full_bytes = UINT32_MAX);
	ENTRY_EXPECT("lo 1 + row_bytes 576", e.lo = 1);
	ENTRY_EXPECT("lo 4294967295", e.lo = UINT32_MAX);
	ENTRY_EXPECT("rows_per_page 0", e.rows_per_page = 0);
	ENTRY_EXPECT("rows_per_page 4294967295", e.rows_per_page = UINT32_MAX);
	ENTRY_EXPECT("n_pages 0", e.n_pages = 0);
	ENTRY_EXPECT("n_pages 4294967295", e.n_pages = UINT32_MAX);
	ENTRY_EXPECT("group 16 is not below 16", e.group = 16);
	ENTRY_EXPECT(NULL, e.layer = UINT32_MAX);
}

Test(layout, entry_extent)
{
	ENTRY_EXPECT("bytes 0", e.bytes = 0);
	ENTRY_EXPECT("bytes 18446744073709551615", e.bytes = UINT64_MAX);
	ENTRY_EXPECT("past the fd's 1073741824", e.base = FD_BYTES - e.bytes + 1);
	ENTRY_EXPECT("past the fd's", e.base = UINT64_MAX);
	ENTRY_EXPECT("past the fd's", e.base = UINT64_MAX - 10);
	ENTRY_EXPECT(NULL, e.base = FD_BYTES - e.bytes);
	ENTRY_EXPECT("rows end at 3686400, past bytes 3686399", e.bytes--);
	ENTRY_EXPECT("rows end at", e.n_pages++);
	ENTRY_EXPECT("rows end at 18446744073709551615", e.n_pages = KVP_PAGES_MAX,
		     e.page_stride = KVP_LIMIT_EXTENT);
}

Test(layout, entry_strides)
{
	ENTRY_EXPECT("row_stride 575", e.row_stride = 575);
	ENTRY_EXPECT("row_stride 0", e.row_stride = 0);
	ENTRY_EXPECT("row_stride 18446744073709551615", e.row_stride = UINT64_MAX);
	ENTRY_EXPECT("page_stride 0", e.page_stride = 0);
	ENTRY_EXPECT("page_stride 18446744073709551615", e.page_stride = UINT64_MAX);
	ENTRY_EXPECT("page_stride 36863 is below the 36864", e.page_stride--);
	ENTRY_EXPECT(NULL, e.page_stride = 0, e.n_pages = 1); /* never used */
	ENTRY_EXPECT(NULL, e.row_stride = 0, e.rows_per_page = 1, e.page_stride = 576);
	/* padded pages and padded rows */
	ENTRY_EXPECT(NULL, e.page_stride += 64, e.bytes += 99 * 64);
	ENTRY_EXPECT(NULL, e.row_stride = 640, e.page_stride = 64 * 640, e.bytes = 100 * 64 * 640);
	/* one head of eight, head by head within a page, and token by token */
	ENTRY_EXPECT(NULL, e.row_bytes = 72, e.row_stride = 72);
	ENTRY_EXPECT(NULL, e.row_bytes = 72, e.lo = 72, e.bytes -= 72);
	/* slot by slot, all pages between two slots */
	ENTRY_EXPECT(NULL, e.page_stride = 576, e.row_stride = 57600);
	ENTRY_EXPECT("below", e.page_stride = 576, e.row_stride = 57599);
}

Test(layout, blob_needs_only_an_extent)
{
	struct kvp_entry blob = { .klass = KVP_CLASS_BLOB, .base = 64, .bytes = 100 };

	entry_expect(&blob, NULL);
	blob.bytes = FD_BYTES;
	entry_expect(&blob, "past the fd's");
	blob.bytes = 0;
	entry_expect(&blob, "bytes 0");
}

Test(layout, an_error_text_may_be_short_or_absent)
{
	struct kvp_entry e = good_entry;
	char err[8];

	e.row_bytes = 0;
	cr_assert_eq(kvp_entry_check(&e, FD_BYTES, err, sizeof(err)), -EINVAL);
	cr_assert_str_eq(err, "row_byt");
	cr_assert_eq(kvp_entry_check(&e, FD_BYTES, NULL, 0), -EINVAL);
}

static struct kvp_entry ranged(uint32_t layer, uint32_t lo, uint32_t bytes, uint32_t full)
{
	return (struct kvp_entry){ .layer = layer,
				   .lo = lo,
				   .row_bytes = bytes,
				   .full_bytes = full,
				   .rows_per_page = 4,
				   .n_pages = 1 };
}

Test(layout, entries_of_a_layer)
{
	static struct kvp_entry many[KVP_LIMIT_ENTRIES + 1];
	struct kvp_entry e[] = { ranged(1, 0, 8, 16), ranged(1, 8, 8, 16), ranged(2, 0, 8, 16),
				 ranged(2, 7, 8, 16) };
	char err[KVP_PLAN_ERR_BYTES];

	cr_assert_eq(kvp_entries_check(e, 3, err, sizeof(err)), 0);
	cr_assert_eq(kvp_entries_check(e, 4, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "entries 2 and 3 of layer 2"), "%s", err);
	e[3].klass = KVP_CLASS_REPLICATED;
	cr_assert_eq(kvp_entries_check(e, 4, err, sizeof(err)), 0);
	e[3].klass = e[2].klass = KVP_CLASS_BLOB;
	cr_assert_eq(kvp_entries_check(e, 4, err, sizeof(err)), 0);
	e[1].full_bytes = 17;
	cr_assert_eq(kvp_entries_check(e, 2, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "full_bytes 16 and 17"), "%s", err);
	cr_assert_eq(kvp_entries_check(many, KVP_LIMIT_ENTRIES + 1, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "513 entries, at most 512"), "%s", err);
}

Test(layout, sides_of_entries)
{
	const struct kvp_side side = { .page = 4, .dcp_size = 2, .interleave = 1 };
	struct kvp_entry e = ranged(0, 0, 8, 8);
	char err[KVP_PLAN_ERR_BYTES];

	cr_assert_eq(kvp_sides_check(&e, 1, &side, 1, err, sizeof(err)), 0);
	e.klass = KVP_CLASS_REPLICATED;
	cr_assert_eq(kvp_sides_check(&e, 1, &side, 1, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "rows_per_page 4, but its side has 8"), "%s", err);
	e.rows_per_page = 8;
	cr_assert_eq(kvp_sides_check(&e, 1, &side, 1, err, sizeof(err)), 0);
	e.group = 1;
	cr_assert_eq(kvp_sides_check(&e, 1, &side, 1, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "group 1"), "%s", err);
}

/* ---- pairing */

static void pair_expect(const struct kvp_pair *got, uint16_t src, uint16_t dst, uint32_t src_off,
			uint32_t dst_off, uint32_t bytes)
{
	cr_assert_eq(got->src_entry, src);
	cr_assert_eq(got->dst_entry, dst);
	cr_assert_eq(got->src_off, src_off);
	cr_assert_eq(got->dst_off, dst_off);
	cr_assert_eq(got->bytes, bytes);
}

/* Two of four head slices arrive in one entry, from entries in any order. */
Test(layout, pairs_are_overlaps)
{
	const struct kvp_entry src[] = { ranged(5, 8, 4, 16), ranged(5, 0, 8, 16),
					 ranged(5, 12, 4, 16), ranged(6, 0, 16, 16) };
	const struct kvp_entry dst[] = { ranged(6, 4, 4, 16), ranged(5, 4, 10, 16) };
	const uint64_t mask[KVP_MASK_WORDS] = { 0xe };
	struct kvp_entry_list from = { .entries = src, .n = 4 }, to = { .entries = dst, .n = 2 };
	struct kvp_pair pairs[8];
	char err[KVP_PLAN_ERR_BYTES];

	cr_assert_eq(kvp_pair_entries(&from, &to, pairs, 8, err, sizeof(err)), 4);
	pair_expect(&pairs[0], 3, 0, 4, 0, 4);
	pair_expect(&pairs[1], 1, 1, 4, 0, 4);
	pair_expect(&pairs[2], 0, 1, 0, 4, 4);
	pair_expect(&pairs[3], 2, 1, 0, 8, 2);

	cr_assert_eq(kvp_pair_entries(&from, &to, pairs, 3, err, sizeof(err)), -ENOSPC);
	cr_assert(strstr(err, "more than 3 pairs"), "%s", err);
	from.mask = mask;
	cr_assert_eq(kvp_pair_entries(&from, &to, pairs, 3, err, sizeof(err)), 3);
	pair_expect(&pairs[2], 2, 1, 0, 8, 2);
}

Test(layout, pairs_agree_in_class_and_width)
{
	struct kvp_entry src = ranged(5, 0, 8, 16), dst = ranged(5, 0, 8, 17);
	const struct kvp_entry_list from = { .entries = &src, .n = 1 };
	const struct kvp_entry_list to = { .entries = &dst, .n = 1 };
	struct kvp_pair pair;
	char err[KVP_PLAN_ERR_BYTES];

	cr_assert_eq(kvp_pair_entries(&from, &to, &pair, 1, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "full_bytes 16 and 17"), "%s", err);
	src.klass = KVP_CLASS_REPLICATED;
	cr_assert_eq(kvp_pair_entries(&from, &to, &pair, 1, err, sizeof(err)), 0);
	src.klass = dst.klass = KVP_CLASS_BLOB;
	cr_assert_eq(kvp_pair_entries(&from, &to, &pair, 1, err, sizeof(err)), 0);
}

/* ---- random legs: a full destination and up to MAX_LEGS senders that share the work */

#define MAX_LEGS 8u
#define MAX_LAYERS 4u
#define MAX_ROWS 200u /* tokens of a room */

struct world {
	struct kvp_entry dst[64], src[MAX_LEGS][64];
	struct kvp_side dst_sides[2], src_sides[MAX_LEGS][2];
	struct kvp_pair pairs[MAX_LEGS][256];
	struct kvp_leg_geom legs[MAX_LEGS];
	struct kvp_need need;
	uint64_t starts[2];
	uint32_t n_legs;
};

static uint32_t below(uint64_t *seed, uint64_t limit)
{
	return (uint32_t)(plan_random(seed) % limit);
}

/* A quarter of the bits set, about. */
static uint64_t sparse_bits(uint64_t *seed)
{
	uint64_t bits = plan_random(seed);

	return bits & plan_random(seed);
}

static struct kvp_side side_random(uint64_t *seed, uint32_t dcp_size)
{
	struct kvp_side side = { .page = 4u << below(seed, 3),
				 .dcp_size = dcp_size,
				 .dcp_rank = below(seed, dcp_size),
				 .interleave = 1u << below(seed, 3),
				 .n_pages = KVP_PAGES_ANY };
	return side;
}

/* Entries of all layers for bytes [lo, hi) of each full row, cut where `cuts` has a bit. */
static uint32_t entries_make(struct kvp_entry *out, uint32_t lo, uint32_t hi, uint64_t cuts,
			     const struct kvp_side *sides)
{
	uint32_t n = 0;

	for (uint32_t layer = 0; layer < MAX_LAYERS; layer++) {
		for (uint32_t at = lo, stop; at < hi; at = stop) {
			for (stop = at + 1; stop < hi && !(cuts >> stop & 1); stop++)
				;
			out[n] = ranged(layer, at, stop - at, 16);
			out[n].group = layer & 1;
			out[n].klass = layer == 3 ? KVP_CLASS_REPLICATED : KVP_CLASS_SHARDED;
			out[n].rows_per_page = kvp_entry_side(&out[n], sides).page;
			n++;
		}
	}
	return n;
}

static void leg_make(struct world *w, uint32_t idx, uint32_t n_src, const uint64_t *mask)
{
	struct kvp_entry_list from = { .entries = w->src[idx], .n = n_src, .mask = mask };
	struct kvp_entry_list to = { .entries = w->dst, .n = w->need.n_entries };
	char err[KVP_PLAN_ERR_BYTES];
	int n = kvp_pair_entries(&from, &to, w->pairs[idx], 256, err, sizeof(err));

	cr_assert_geq(n, 0, "%s", err);
	w->legs[idx] = (struct kvp_leg_geom){
		.pairs = w->pairs[idx],
		.src = w->src[idx],
		.dst = w->dst,
		.src_sides = w->src_sides[idx],
		.dst_sides = w->dst_sides,
		.dst_starts = w->starts,
		.end = w->need.end,
		.n_pairs = (uint32_t)n,
		.sender = 10 + idx,
	};
	cr_assert_eq(kvp_leg_check(&w->legs[idx], err, sizeof(err)), 0, "%s", err);
}

/* `parts` senders by bytes, each of `ranks` DCP ranks; replicated entries from rank 0 only. */
static void world_make(struct world *w, uint64_t *seed)
{
	uint32_t parts = 1u << below(seed, 2), ranks = 1 + below(seed, 4), dcp = 1 + below(seed, 4);
	uint32_t lo = below(seed, 8), hi = 16 - below(seed, 8), n_dst;

	for (int g = 0; g < 2; g++) {
		w->dst_sides[g] = side_random(seed, dcp);
		w->starts[g] = below(seed, 2) ? 0 : below(seed, MAX_ROWS);
	}
	n_dst = entries_make(w->dst, lo, hi, sparse_bits(seed), w->dst_sides);
	w->need = (struct kvp_need){ .entries = w->dst,
				     .sides = w->dst_sides,
				     .starts = w->starts,
				     .end = below(seed, MAX_ROWS),
				     .n_entries = n_dst };
	w->n_legs = parts * ranks;
	for (uint32_t i = 0; i < w->n_legs; i++) {
		uint32_t from = i / ranks * (16 / parts), n;
		uint64_t mask[KVP_MASK_WORDS] = { UINT64_MAX };

		for (int g = 0; g < 2; g++) {
			w->src_sides[i][g] = i ? w->src_sides[0][g] : side_random(seed, ranks);
			w->src_sides[i][g].dcp_rank = i % ranks;
		}
		n = entries_make(w->src[i], from, from + 16 / parts, sparse_bits(seed),
				 w->src_sides[i]);
		for (uint32_t k = 0; i % ranks && k < n; k++) {
			if (w->src[i][k].klass == KVP_CLASS_REPLICATED)
				mask[0] &= ~(UINT64_C(1) << k);
		}
		leg_make(w, i, n, mask);
	}
}

/* How often all senders together send one byte of one row, by looking at each pair. */
static uint32_t times_sent(const struct world *w, uint32_t entry, uint32_t byte, uint64_t pos)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < w->n_legs; i++) {
		for (uint32_t k = 0; k < w->legs[i].n_pairs; k++) {
			const struct kvp_pair *pair = &w->legs[i].pairs[k];
			struct kvp_side src, dst;

			kvp_leg_sides(&w->legs[i], pair, &src, &dst);
			n += pair->dst_entry == entry && byte >= pair->dst_off &&
			     byte - pair->dst_off < pair->bytes && oracle_owns(&src, pos);
		}
	}
	return n;
}

static bool covered(const struct world *w)
{
	for (uint32_t e = 0; e < w->need.n_entries; e++) {
		struct kvp_side dst = kvp_entry_side(&w->dst[e], w->dst_sides);

		for (uint32_t byte = 0; byte < w->dst[e].row_bytes; byte++) {
			for (uint64_t p = w->starts[w->dst[e].group]; p < w->need.end; p++) {
				if (oracle_owns(&dst, p) && times_sent(w, e, byte, p) != 1)
					return false;
			}
		}
	}
	return true;
}

static bool checked(const struct world *w, char *err)
{
	return kvp_coverage_check(&w->need, w->legs, w->n_legs, err, KVP_PLAN_ERR_BYTES) == 0;
}

/* Loses, doubles or bends something. */
static void world_spoil(struct world *w, uint64_t *seed)
{
	struct kvp_leg_geom *leg = &w->legs[below(seed, w->n_legs)];
	struct kvp_pair *pairs = w->pairs[leg - w->legs];

	switch (below(seed, 5)) {
	case 0: /* a sender is missing */
		*leg = w->legs[--w->n_legs];
		break;
	case 1: /* one pair is missing */
		if (leg->n_pairs)
			memmove(pairs, pairs + 1, --leg->n_pairs * sizeof(*pairs));
		break;
	case 2: /* a byte is missing */
		if (leg->n_pairs && pairs[leg->n_pairs - 1].bytes > 1)
			pairs[leg->n_pairs - 1].bytes--;
		break;
	case 3: /* a rank sends what another has */
		w->src_sides[leg - w->legs][0].dcp_rank = 0;
		break;
	default: /* turns of another length */
		w->src_sides[leg - w->legs][1].interleave = 1u << below(seed, 3);
		break;
	}
}

Test(layout, coverage_of_random_rooms)
{
	static struct world w;
	uint64_t seed = 21;
	int spoilt = 0, fine = 0;

	for (int i = 0; i < 300; i++) {
		char err[KVP_PLAN_ERR_BYTES] = "";
		bool want;

		world_make(&w, &seed);
		cr_assert(checked(&w, err), "world %d: %s", i, err);
		world_spoil(&w, &seed);
		want = covered(&w);
		cr_assert_eq(checked(&w, err), want, "world %d: %s", i, err);
		fine += want;
		spoilt += !want;
	}
	cr_assert(spoilt > 50 && fine > 20, "%d spoilt, %d fine", spoilt, fine);
}

static void coverage_expect(const struct world *w, const char *want)
{
	char err[KVP_PLAN_ERR_BYTES] = "";

	cr_assert(!checked(w, err));
	cr_assert_str_eq(err, want);
}

/* One layer, bytes 0 to 16, two senders by halves. */
static void halves_make(struct world *w)
{
	const struct kvp_side one = { .page = 4, .dcp_size = 1, .interleave = 1 };

	*w = (struct world){ .n_legs = 2 };
	w->dst_sides[0] = w->src_sides[0][0] = w->src_sides[1][0] = one;
	w->dst[0] = (struct kvp_entry){ .klass = KVP_CLASS_BLOB };
	w->dst[1] = ranged(7, 0, 16, 16);
	w->src[0][0] = ranged(7, 0, 8, 16);
	w->src[1][0] = ranged(7, 8, 8, 16);
	w->need = (struct kvp_need){ .entries = w->dst,
				     .sides = w->dst_sides,
				     .starts = w->starts,
				     .end = 10,
				     .n_entries = 2 };
	leg_make(w, 0, 1, NULL);
	leg_make(w, 1, 1, NULL);
}

Test(layout, coverage_names_what_is_wrong)
{
	static struct world w;
	char err[KVP_PLAN_ERR_BYTES];

	halves_make(&w);
	cr_assert(checked(&w, err));

	w.n_legs = 1;
	coverage_expect(&w, "entry 1, layer 7, bytes 8 to 16: no sender sends them");
	w.n_legs = 0;
	coverage_expect(&w, "entry 1, layer 7, bytes 0 to 16: no sender sends them");
	w.need.end = 0;
	cr_assert(checked(&w, err)); /* nothing is needed */

	halves_make(&w);
	w.src[1][0] = ranged(7, 6, 10, 16);
	leg_make(&w, 1, 1, NULL);
	coverage_expect(&w,
			"entry 1, layer 7, bytes 6 to 8: both sender 10 and sender 11 send them");

	halves_make(&w);
	w.src_sides[1][0].dcp_size = 2;
	coverage_expect(&w, "entry 1, layer 7, bytes 8 to 16: sender 11 sends 5 of 10 rows");
	w.starts[0] = 9;
	coverage_expect(&w, "entry 1, layer 7, bytes 8 to 16: sender 11 sends 0 of 1 rows");

	halves_make(&w);
	w.src[0][0] = ranged(7, 8, 8, 16);
	leg_make(&w, 0, 1, NULL);
	w.dst[1].lo = 8;
	w.dst[1].row_bytes = 8;
	leg_make(&w, 0, 1, NULL);
	leg_make(&w, 1, 1, NULL);
	w.src_sides[0][0].dcp_size = w.src_sides[1][0].dcp_size = 4;
	w.src_sides[1][0].dcp_rank = 1;
	coverage_expect(&w, "entry 1, layer 7, bytes 8 to 16: senders 10,11 send 6 of 10 rows");
}

/* Three ends that any two of can be planned, but that meet again only after a very long time. */
Test(layout, coverage_that_takes_too_long)
{
	static struct world w;
	char err[KVP_PLAN_ERR_BYTES];

	halves_make(&w);
	w.src[0][0] = w.src[1][0] = w.dst[1];
	w.dst_sides[0] = (struct kvp_side){ .page = 5, .dcp_size = 199, .interleave = 5 };
	w.src_sides[0][0] = (struct kvp_side){ .page = 2, .dcp_size = 509, .interleave = 2 };
	w.src_sides[1][0] = (struct kvp_side){ .page = 3, .dcp_size = 337, .interleave = 3 };
	w.src_sides[1][0].dcp_rank = 200;
	leg_make(&w, 0, 1, NULL);
	leg_make(&w, 1, 1, NULL);
	cr_assert(!checked(&w, err));
	cr_assert(strstr(err, "rows"), "%s", err); /* it has looked */
	w.need.end = KVP_POS_MAX;
	cr_assert(!checked(&w, err));
	cr_assert(strstr(err, "turns that meet too late"), "%s", err);
	cr_assert(strstr(err, "at most 1048576"), "%s", err);
}

/* 64 senders, one DCP rank each, of a pool with many entries. */
Test(layout, coverage_by_64_ranks)
{
	static struct world w;
	static struct kvp_leg_geom legs[KVP_MAX_SENDERS];
	static struct kvp_side sides[KVP_MAX_SENDERS];
	char err[KVP_PLAN_ERR_BYTES] = "";

	halves_make(&w);
	w.src[0][0] = w.dst[1];
	leg_make(&w, 0, 1, NULL);
	w.need.end = 1000;
	for (uint32_t i = 0; i < KVP_MAX_SENDERS; i++) {
		legs[i] = w.legs[0];
		sides[i] = w.src_sides[0][0];
		sides[i].dcp_size = KVP_MAX_SENDERS;
		sides[i].dcp_rank = i;
		legs[i].src_sides = &sides[i];
		legs[i].sender = i;
	}
	cr_assert_eq(kvp_coverage_check(&w.need, legs, 64, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(kvp_coverage_check(&w.need, legs, 63, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "send 985 of 1000 rows"), "%s", err);
	sides[5].dcp_rank = 4;
	cr_assert_eq(kvp_coverage_check(&w.need, legs, 64, err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "both sender 4 and sender 5"), "%s", err);
}

/* ---- pieces */

static void parts_check(const struct kvp_leg_geom *leg, const uint64_t *mask, uint64_t start,
			uint32_t tokens, uint64_t slot_bytes)
{
	static struct kvp_part parts[256], again[256];
	uint32_t n, n_again;
	uint64_t bytes = kvp_piece_layout(leg, mask, start, tokens, parts, &n), end = 0;
	uint32_t part = 0;

	cr_assert_leq(bytes, slot_bytes);
	for (uint32_t i = 0; i < leg->n_pairs; i++) {
		const struct kvp_pair *pair = &leg->pairs[i];
		struct kvp_range range = kvp_leg_clip(leg, pair, start, tokens);
		struct kvp_side src, dst;
		uint32_t rows = 0;

		kvp_leg_sides(leg, pair, &src, &dst);
		for (uint64_t p = range.start; p < range.start + range.tokens; p++)
			rows += oracle_owns(&src, p) && oracle_owns(&dst, p);
		if (!rows || !kvp_mask_has(mask, pair->src_entry))
			continue;

		cr_assert_lt(part, n);
		cr_assert_eq(parts[part].pair, i);
		cr_assert_eq(parts[part].rows, rows);
		cr_assert_eq(parts[part].bytes, (uint64_t)rows * pair->bytes);
		cr_assert_eq(parts[part].offset % KVP_LAYOUT_ALIGN, 0);
		cr_assert(parts[part].offset >= end && parts[part].offset < end + KVP_LAYOUT_ALIGN);
		end = parts[part].offset + parts[part].bytes;
		part++;
	}
	cr_assert_eq(part, n);
	cr_assert_eq(bytes, end);
	cr_assert_eq(kvp_piece_layout(leg, mask, start, tokens, NULL, &n_again), bytes);
	cr_assert_eq(n_again, n);
	(void)kvp_piece_layout(leg, mask, start, tokens, again, &n_again); /* the same again */
	cr_assert_arr_eq(again, parts, n * sizeof(*parts));
}

Test(layout, pieces_fit_and_agree)
{
	static struct world w;
	uint64_t seed = 31;
	int cut = 0;

	for (int i = 0; i < 300; i++) {
		const uint64_t mask[KVP_MASK_WORDS] = { plan_random(&seed) };

		world_make(&w, &seed);
		for (uint32_t k = 0; k < w.n_legs; k++) {
			const struct kvp_leg_geom *leg = &w.legs[k];
			uint64_t slot = 256 * (leg->n_pairs + below(&seed, leg->n_pairs + 1)) +
					below(&seed, 256);
			uint32_t tokens = kvp_piece_tokens(leg, slot);

			cr_assert_leq(kvp_piece_worst(leg, tokens), slot);
			cr_assert(tokens == KVP_PIECE_TOKENS_MAX ||
				  kvp_piece_worst(leg, tokens + 1) > slot);
			if (!tokens || !leg->n_pairs)
				continue;
			tokens = KVP_MIN(tokens, MAX_ROWS);
			cut += tokens < w.need.end;
			for (uint64_t at = below(&seed, 9); at < MAX_ROWS; at += tokens)
				parts_check(leg, at & 1 ? mask : NULL, at, tokens, slot);
		}
	}
	cr_assert_gt(cut, 20);
}

/* 7 entries of 576-byte rows to one of four ranks: a quarter of the tokens. */
Test(layout, piece_of_a_real_pool)
{
	const struct kvp_side src = { .page = 64, .dcp_size = 1, .interleave = 1 };
	const struct kvp_side dst = { .page = 64, .dcp_size = 4, .dcp_rank = 2, .interleave = 1 };
	const uint64_t starts[] = { 0 };
	struct kvp_entry entries[7];
	struct kvp_pair pairs[7];
	struct kvp_leg_geom leg = { .pairs = pairs,
				    .src = entries,
				    .dst = entries,
				    .src_sides = &src,
				    .dst_sides = &dst,
				    .dst_starts = starts,
				    .end = 1 << 20,
				    .n_pairs = 7 };
	struct kvp_part parts[7];
	uint32_t n;

	for (uint32_t i = 0; i < 7; i++) {
		entries[i] = ranged(i, 0, 576, 576);
		pairs[i] = (struct kvp_pair){ (uint16_t)i, (uint16_t)i, 0, 0, 576 };
	}
	cr_assert_eq(kvp_entries_token_bytes(entries, 7), 7 * 768);
	cr_assert_eq(kvp_piece_tokens(&leg, 767), 0);
	cr_assert_eq(kvp_piece_tokens(&leg, 7 * 768 - 1), 0);
	cr_assert_eq(kvp_piece_tokens(&leg, 7 * 768), 4); /* no two of one rank among them */
	cr_assert_eq(kvp_piece_worst(&leg, 8192), 7 * 2048 * 576);
	cr_assert_eq(kvp_piece_layout(&leg, NULL, 3, 4, parts, &n), 6 * 768 + 576);
	cr_assert_eq(n, 7);
	cr_assert_eq(kvp_piece_layout(&leg, NULL, 3, 3, parts, &n), 0); /* positions 3, 4, 5 */
	cr_assert_eq(n, 0);
}

Test(layout, legs_that_cannot_be_planned)
{
	static struct world w;
	char err[KVP_PLAN_ERR_BYTES];

	halves_make(&w);
	w.src_sides[0][0].interleave = 3;
	cr_assert_eq(kvp_leg_check(&w.legs[0], err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "geometry"), "%s", err);
	halves_make(&w);
	w.legs[0].end = KVP_POS_MAX + 1;
	cr_assert_eq(kvp_leg_check(&w.legs[0], err, sizeof(err)), -EINVAL);
	cr_assert(strstr(err, "end 4611686018427387905"), "%s", err);
}
