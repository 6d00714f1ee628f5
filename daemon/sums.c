/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/sums.h"

#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

#include "proto/sums.h"
#include "proto/util.h"

/* The hash is several times faster over thousands of bytes than over hundreds: what is shorter and
 * does not lie one behind the other is put so in blocks. */
#define BLOCK 8192u
#define BLOCK_RUN 2048u /* what is longer is not copied */

/* Rows ahead of the one that is read: strides as long as ours defeat the hardware's prefetch. */
#define AHEAD 4u

/* Chooses by what the processor has; not in every build of the library. The states are the same. */
extern XXH_errorcode XXH3_64bits_update_dispatch(XXH3_state_t *state, const void *at, size_t bytes)
	__attribute__((weak));

struct hash {
	XXH3_state_t state;
	size_t n; /* bytes in the block */
	unsigned char block[BLOCK];
};

static void hash_begin(struct hash *hash, uint64_t seed)
{
	XXH3_INITSTATE(&hash->state);
	(void)XXH3_64bits_reset_withSeed(&hash->state, seed); /* fails for NULL only, as updates */
	hash->n = 0;
}

static void update(struct hash *hash, const void *at, size_t bytes)
{
	if (XXH3_64bits_update_dispatch)
		(void)XXH3_64bits_update_dispatch(&hash->state, at, bytes);
	else
		(void)XXH3_64bits_update(&hash->state, at, bytes);
}

static void flush(struct hash *hash)
{
	if (hash->n)
		update(hash, hash->block, hash->n);
	hash->n = 0;
}

static void add(struct hash *hash, const unsigned char *at, size_t bytes)
{
	if (bytes > BLOCK_RUN || hash->n + bytes > BLOCK)
		flush(hash);
	if (bytes > BLOCK_RUN) {
		update(hash, at, bytes);
		return;
	}
	memcpy(hash->block + hash->n, at, bytes);
	hash->n += bytes;
}

static void prefetch(const unsigned char *row, uint32_t width)
{
	for (uint32_t i = 0; i < KVP_MIN(width, BLOCK_RUN); i += 64)
		__builtin_prefetch(row + i);
}

static void add_rows(struct hash *hash, const struct kvp_copy *rows, uint32_t width)
{
	if (rows->src_stride == width) {
		add(hash, rows->src, (size_t)rows->n * width);
		return;
	}
	for (uint32_t k = 0; k < rows->n; k++) {
		if (k + AHEAD < rows->n)
			prefetch(rows->src + (k + AHEAD) * rows->src_stride, width);
		add(hash, rows->src + k * rows->src_stride, width);
	}
}

static uint64_t hash_end(struct hash *hash)
{
	flush(hash);
	return XXH3_64bits_digest(&hash->state);
}

/* The runs of a part in one end's pool. */
struct walk {
	struct kvp_rows_iter it;
	const struct kvp_copy_pool *pool;
	const struct kvp_entry *entry;
	uint32_t off;
	bool source;
};

static void walk_begin(struct walk *walk, const struct kvp_copy_piece *piece, uint32_t idx,
		       bool source)
{
	const struct kvp_leg_geom *leg = piece->leg;
	const struct kvp_pair *pair = &leg->pairs[piece->parts[idx].pair];
	const struct kvp_range range = kvp_leg_clip(leg, pair, piece->start, piece->tokens);
	struct kvp_side src, dst;

	walk->pool = &piece->pool;
	walk->source = source;
	walk->entry = source ? &leg->src[pair->src_entry] : &leg->dst[pair->dst_entry];
	walk->off = source ? pair->src_off : pair->dst_off;
	kvp_leg_sides(leg, pair, &src, &dst);
	*(source ? &src : &dst) = kvp_entry_side(walk->entry, piece->pool.sides);
	kvp_rows_begin(&walk->it, &src, &dst, range.start, range.tokens);
}

static bool walk_next(struct walk *walk, struct kvp_copy *rows)
{
	const struct kvp_entry *entry = walk->entry;
	struct kvp_run run;
	uint32_t page, slot, step;

	if (!kvp_rows_next(&walk->it, &run))
		return false;
	page = walk->source ? run.src_page : run.dst_page;
	slot = walk->source ? run.src_slot : run.dst_slot;
	step = walk->source ? run.src_step : run.dst_step;
	*rows = (struct kvp_copy){
		.src = walk->pool->maps[entry->fd_idx] + kvp_entry_row(entry, page, slot) +
		       walk->off,
		.src_stride = step * entry->row_stride,
		.n = run.n,
	};
	return true;
}

static uint64_t sum(const struct kvp_copy_piece *piece, uint32_t idx, bool source)
{
	const uint32_t pair = piece->parts[idx].pair;
	struct kvp_copy rows;
	struct hash hash;
	struct walk walk;

	hash_begin(&hash, kvp_sum_seed(piece->start, pair));
	walk_begin(&walk, piece, idx, source);
	while (walk_next(&walk, &rows))
		add_rows(&hash, &rows, piece->leg->pairs[pair].bytes);
	return hash_end(&hash);
}

uint64_t kvp_sum_source(const struct kvp_copy_piece *piece, uint32_t idx)
{
	return sum(piece, idx, true);
}

uint64_t kvp_sum_dest(const struct kvp_copy_piece *piece, uint32_t idx)
{
	return sum(piece, idx, false);
}

uint64_t kvp_sum_bytes(const void *at, uint64_t bytes, uint64_t seed)
{
	struct hash hash;

	hash_begin(&hash, seed);
	add(&hash, at, bytes);
	return hash_end(&hash);
}

/* Compares the rows of a run, asking for those of the source that come next. */
static bool run_equal(const struct kvp_copy *run, uint32_t width)
{
	if (run->src_stride == width && run->dst_stride == width)
		return memcmp(run->dst, run->src, (size_t)run->n * width) == 0;
	for (uint32_t k = 0; k < run->n; k++) {
		const unsigned char *src = run->src + k * run->src_stride;

		if (k + AHEAD < run->n)
			prefetch(src + AHEAD * run->src_stride, width);
		if (memcmp(run->dst + k * run->dst_stride, src, width) != 0)
			return false;
	}
	return true;
}

bool kvp_rows_equal(const struct kvp_copy_piece *src, const struct kvp_copy_piece *dst,
		    uint32_t idx)
{
	const struct kvp_leg_geom *leg = src->leg;
	const struct kvp_pair *pair = &leg->pairs[src->parts[idx].pair];
	const struct kvp_range range = kvp_leg_clip(leg, pair, src->start, src->tokens);
	const struct kvp_entry *from = &leg->src[pair->src_entry], *to = &leg->dst[pair->dst_entry];
	const struct kvp_side src_side = kvp_entry_side(from, src->pool.sides);
	const struct kvp_side dst_side = kvp_entry_side(to, dst->pool.sides);
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_rows_begin(&it, &src_side, &dst_side, range.start, range.tokens);
	while (kvp_rows_next(&it, &run)) {
		const struct kvp_copy rows = {
			.dst = dst->pool.maps[to->fd_idx] +
			       kvp_entry_row(to, run.dst_page, run.dst_slot) + pair->dst_off,
			.src = src->pool.maps[from->fd_idx] +
			       kvp_entry_row(from, run.src_page, run.src_slot) + pair->src_off,
			.dst_stride = run.dst_step * to->row_stride,
			.src_stride = run.src_step * from->row_stride,
			.n = run.n,
		};

		if (!run_equal(&rows, pair->bytes))
			return false;
	}
	return true;
}

#ifdef KVP_TEST
unsigned char *kvp_sum_first(const struct kvp_copy_piece *piece, uint32_t idx)
{
	struct kvp_copy rows = { 0 };
	struct walk walk;

	walk_begin(&walk, piece, idx, false);
	(void)walk_next(&walk, &rows); /* a part has a row */
	return (unsigned char *)rows.src;
}
#endif
