/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/copy.h"
#include "proto/util.h"

#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define LINE 64u /* bytes of a cache line */

/* Rows ahead of the one that is copied: strides as long as ours defeat the hardware's prefetch. */
#define AHEAD 4u
#define AHEAD_WIDTH 4096u /* wider rows the hardware finds by itself */

static void rows_any(unsigned char *dst, uint64_t dst_stride, const unsigned char *src,
		     uint64_t src_stride, uint64_t width, uint64_t n)
{
	for (; n > 0; n--, dst += dst_stride, src += src_stride)
		memcpy(dst, src, width);
}

static void prefetch_row(const unsigned char *row, uint64_t width)
{
	for (uint64_t i = 0; i < width; i += LINE)
		__builtin_prefetch(row + i);
}

/* Copies rows and asks for those AHEAD of them, at last for the first ones of the next run. */
static void rows_ahead(unsigned char *out, const struct kvp_copy *now, const struct kvp_copy *next,
		       uint64_t width)
{
	for (uint32_t k = 0; k < now->n; k++) {
		if (k + AHEAD < now->n)
			prefetch_row(now->src + (k + AHEAD) * now->src_stride, width);
		else if (k + AHEAD - now->n < next->n)
			prefetch_row(next->src + (k + AHEAD - now->n) * next->src_stride, width);
		memcpy(out + k * width, now->src + k * now->src_stride, width);
	}
}

void kvp_copy_rows(void *dst, uint64_t dst_stride, const void *src, uint64_t src_stride,
		   uint64_t width, uint64_t n)
{
	if (n == 0)
		return;

	if (dst_stride == width && src_stride == width)
		memcpy(dst, src, width * n);
	else
		rows_any(dst, dst_stride, src, src_stride, width, n);
}

#ifdef __x86_64__
/* Whole lines only, dst at a multiple of 16. Full lines leave the write buffers without a read. */
static void row_stream(unsigned char *dst, const unsigned char *src, uint64_t width)
{
	for (uint64_t i = 0; i < width; i += LINE) {
		__m128i a = _mm_loadu_si128((const __m128i *)(src + i));
		__m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
		__m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
		__m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));

		_mm_stream_si128((__m128i *)(dst + i), a);
		_mm_stream_si128((__m128i *)(dst + i + 16), b);
		_mm_stream_si128((__m128i *)(dst + i + 32), c);
		_mm_stream_si128((__m128i *)(dst + i + 48), d);
	}
}

static bool can_stream(const struct kvp_copy *copies, uint32_t n_copies, uint64_t width)
{
	uint64_t bits = 0;

	for (uint32_t i = 0; i < n_copies; i++)
		bits |= (uintptr_t)copies[i].dst | copies[i].dst_stride;
	return width % LINE == 0 && bits % LINE == 0;
}

void kvp_copy_fence(void)
{
	_mm_sfence();
}
#else
static void row_stream(unsigned char *dst, const unsigned char *src, uint64_t width)
{
	memcpy(dst, src, width);
}

static bool can_stream(const struct kvp_copy *copies, uint32_t n_copies, uint64_t width)
{
	(void)copies;
	(void)n_copies;
	(void)width;
	return false;
}

void kvp_copy_fence(void)
{
}
#endif

static void copy_turns(const struct kvp_copy *copies, uint32_t n_copies, uint64_t width,
		       bool stream)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < n_copies; i++)
		n = KVP_MAX(n, copies[i].n);

	for (uint32_t k = 0; k < n; k++) {
		for (uint32_t i = 0; i < n_copies; i++) {
			const struct kvp_copy *copy = &copies[i];
			unsigned char *dst = copy->dst + k * copy->dst_stride;
			const unsigned char *src = copy->src + k * copy->src_stride;

			if (k >= copy->n)
				continue;
			if (width <= AHEAD_WIDTH && k + AHEAD < copy->n)
				prefetch_row(src + AHEAD * copy->src_stride, width);
			if (stream)
				row_stream(dst, src, width);
			else
				memcpy(dst, src, width);
		}
	}
}

void kvp_copy_turns(const struct kvp_copy *copies, uint32_t n_copies, uint64_t width)
{
	copy_turns(copies, n_copies, width, can_stream(copies, n_copies, width));
}

/* The rows of one pair of a leg, with one or both ends' own sides put in. */
static void rows_begin(struct kvp_rows_iter *it, const struct kvp_leg_geom *leg,
		       const struct kvp_pair *pair, uint64_t start, uint64_t tokens)
{
	struct kvp_range range = kvp_leg_clip(leg, pair, start, tokens);
	struct kvp_side src, dst;

	kvp_leg_sides(leg, pair, &src, &dst);
	kvp_rows_begin(it, &src, &dst, range.start, range.tokens);
}

static unsigned char *row_at(const struct kvp_copy_pool *pool, const struct kvp_entry *entry,
			     uint32_t page, uint32_t slot)
{
	return pool->maps[entry->fd_idx] + kvp_entry_row(entry, page, slot);
}

/* Where the next run of the pair is in the source pool; n is 0 when there is none. */
static struct kvp_copy gather_next(const struct kvp_copy_pool *pool, const struct kvp_entry *entry,
				   const struct kvp_pair *pair, struct kvp_rows_iter *it)
{
	struct kvp_run run;

	if (!kvp_rows_next(it, &run))
		return (struct kvp_copy){ 0 };
	return (struct kvp_copy){
		.src = row_at(pool, entry, run.src_page, run.src_slot) + pair->src_off,
		.src_stride = run.src_step * entry->row_stride,
		.n = run.n,
	};
}

static void gather_part(const struct kvp_copy_piece *piece, const struct kvp_leg_geom *leg,
			const struct kvp_part *part, unsigned char *out)
{
	const struct kvp_pair *pair = &leg->pairs[part->pair];
	const struct kvp_entry *entry = &leg->src[pair->src_entry];
	struct kvp_copy now, next;
	struct kvp_rows_iter it;

	rows_begin(&it, leg, pair, piece->start, piece->tokens);
	now = gather_next(&piece->pool, entry, pair, &it);
	for (; now.n > 0; now = next) {
		next = gather_next(&piece->pool, entry, pair, &it);
		if (now.src_stride != pair->bytes && pair->bytes <= AHEAD_WIDTH)
			rows_ahead(out, &now, &next, pair->bytes);
		else
			kvp_copy_rows(out, pair->bytes, now.src, now.src_stride, pair->bytes,
				      now.n);
		out += (uint64_t)now.n * pair->bytes;
	}
}

void kvp_gather(const struct kvp_copy_piece *piece, void *slot)
{
	struct kvp_leg_geom leg = *piece->leg;

	leg.src_sides = piece->pool.sides;
	for (uint32_t i = 0; i < piece->n_parts; i++)
		gather_part(piece, &leg, &piece->parts[i],
			    (unsigned char *)slot + piece->parts[i].offset);
}

void kvp_scatter(const struct kvp_copy_piece *piece, const void *slot)
{
	struct kvp_leg_geom leg = *piece->leg;

	leg.dst_sides = piece->pool.sides;
	for (uint32_t i = 0; i < piece->n_parts; i++) {
		const struct kvp_pair *pair = &leg.pairs[piece->parts[i].pair];
		const struct kvp_entry *entry = &leg.dst[pair->dst_entry];
		const unsigned char *in = (const unsigned char *)slot + piece->parts[i].offset;
		struct kvp_rows_iter it;
		struct kvp_run run;

		rows_begin(&it, &leg, pair, piece->start, piece->tokens);
		while (kvp_rows_next(&it, &run)) {
			kvp_copy_rows(row_at(&piece->pool, entry, run.dst_page, run.dst_slot) +
					      pair->dst_off,
				      run.dst_step * entry->row_stride, in, pair->bytes,
				      pair->bytes, run.n);
			in += (uint64_t)run.n * pair->bytes;
		}
	}
}

/* One pair of one destination on its way through the source entry. */
struct walker {
	struct kvp_rows_iter it;
	struct kvp_run run; /* the next to copy */
	const struct kvp_copy_pool *src_pool;
	const struct kvp_entry *src;
	const struct kvp_pair *pair;
	unsigned char *out; /* a slot, where rows lie one behind the other; NULL: a pool */
	const struct kvp_copy_pool *dst_pool;
	const struct kvp_entry *dst;
};

static bool move_begin(struct walker *walker, const struct kvp_move_source *source,
		       const struct kvp_move *move, const struct kvp_pair *pair)
{
	struct kvp_leg_geom leg = *move->leg;

	leg.src_sides = source->src.sides;
	leg.dst_sides = move->dst.sides;
	*walker = (struct walker){
		.src_pool = &source->src,
		.src = &leg.src[pair->src_entry],
		.pair = pair,
		.dst_pool = &move->dst,
		.dst = &leg.dst[pair->dst_entry],
	};
	rows_begin(&walker->it, &leg, pair, source->start, source->tokens);
	return kvp_rows_next(&walker->it, &walker->run);
}

static struct kvp_copy walker_copy(const struct walker *walker)
{
	const struct kvp_run *run = &walker->run;
	struct kvp_copy copy = {
		.src = row_at(walker->src_pool, walker->src, run->src_page, run->src_slot) +
		       walker->pair->src_off,
		.src_stride = run->src_step * walker->src->row_stride,
		.dst = walker->out,
		.dst_stride = walker->pair->bytes,
		.n = run->n,
	};

	if (walker->out)
		return copy;
	copy.dst = row_at(walker->dst_pool, walker->dst, run->dst_page, run->dst_slot) +
		   walker->pair->dst_off;
	copy.dst_stride = run->dst_step * walker->dst->row_stride;
	return copy;
}

/* The first rows of the next run: the page after this one is anywhere. */
static void walker_prefetch(const struct walker *walker)
{
	struct kvp_copy next = walker_copy(walker);

	if (walker->pair->bytes > AHEAD_WIDTH)
		return;
	for (uint32_t k = 0; k < KVP_MIN(next.n, AHEAD); k++)
		prefetch_row(next.src + k * next.src_stride, walker->pair->bytes);
}

/* The run that is to be copied is behind it. */
static bool walker_next(struct walker *walker)
{
	if (walker->out)
		walker->out += walker->run.n * walker->pair->bytes;
	if (!kvp_rows_next(&walker->it, &walker->run))
		return false;
	walker_prefetch(walker);
	return true;
}

/*
 * Copies, of every walker whose next run is in the same source page and as wide as that of the
 * walker that is furthest behind, that run. Returns how many walkers are left.
 */
static uint32_t walkers_step(struct walker *walkers, uint32_t n)
{
	struct kvp_copy copies[KVP_MOVE_TOGETHER];
	const struct walker *first = walkers;
	uint32_t n_copies = 0, page, left = 0;
	bool stream = !walkers->out; /* slots are read soon: they stay in the cache */
	uint64_t width;

	for (uint32_t i = 1; i < n; i++)
		if (walkers[i].run.pos < first->run.pos)
			first = &walkers[i];
	page = first->run.src_page;
	width = first->pair->bytes;

	for (uint32_t i = 0; i < n; i++) {
		bool more = true;

		if (walkers[i].run.src_page == page && walkers[i].pair->bytes == width) {
			copies[n_copies++] = walker_copy(&walkers[i]);
			more = walker_next(&walkers[i]);
		}
		if (more && left != i)
			walkers[left] = walkers[i];
		left += more;
	}
	copy_turns(copies, n_copies, width, stream && can_stream(copies, n_copies, width));
	return left;
}

static void walkers_run(struct walker *walkers, uint32_t n)
{
	while (n > 0)
		n = walkers_step(walkers, n);
}

static void move_entry(const struct kvp_move_source *source, const struct kvp_move *moves,
		       uint32_t n_moves, uint32_t entry)
{
	struct walker walkers[KVP_MOVE_TOGETHER];
	uint32_t n = 0;

	for (uint32_t m = 0; m < n_moves; m++) {
		const struct kvp_leg_geom *leg = moves[m].leg;

		for (uint32_t p = 0; p < leg->n_pairs; p++) {
			if (leg->pairs[p].src_entry != entry)
				continue;
			if (move_begin(&walkers[n], source, &moves[m], &leg->pairs[p]))
				n++;
			if (n == KVP_MOVE_TOGETHER) {
				walkers_run(walkers, n);
				n = 0;
			}
		}
	}
	walkers_run(walkers, n);
}

static bool gather_begin(struct walker *walker, const struct kvp_copy_piece *piece,
			 const struct kvp_part *part, unsigned char *slot)
{
	struct kvp_leg_geom leg = *piece->leg;
	const struct kvp_pair *pair = &leg.pairs[part->pair];

	leg.src_sides = piece->pool.sides;
	*walker = (struct walker){
		.src_pool = &piece->pool,
		.src = &leg.src[pair->src_entry],
		.pair = pair,
		.out = slot + part->offset,
	};
	rows_begin(&walker->it, &leg, pair, piece->start, piece->tokens);
	return kvp_rows_next(&walker->it, &walker->run);
}

/* Destinations of one model differ in the tokens that they own: what stands at the same place of
 * their layouts comes from the same entry. Where it does not, nothing is lost but the one pass. */
void kvp_gather_together(const struct kvp_copy_piece *pieces, void *const *slots, uint32_t n)
{
	struct walker walkers[KVP_GATHER_TOGETHER];
	uint32_t n_parts = 0;

	for (uint32_t i = 0; i < n; i++)
		n_parts = KVP_MAX(n_parts, pieces[i].n_parts);
	for (uint32_t part = 0; part < n_parts; part++) {
		uint32_t n_walkers = 0;

		for (uint32_t i = 0; i < n; i++)
			if (part < pieces[i].n_parts &&
			    gather_begin(&walkers[n_walkers], &pieces[i], &pieces[i].parts[part],
					 slots[i]))
				n_walkers++;
		walkers_run(walkers, n_walkers);
	}
}

void kvp_move(const struct kvp_move_source *source, const struct kvp_move *moves, uint32_t n_moves)
{
	for (uint32_t entry = 0; entry < source->n_entries; entry++)
		if (kvp_mask_has(source->mask, entry))
			move_entry(source, moves, n_moves, entry);
	kvp_copy_fence();
}

uint64_t kvp_move_bytes(const struct kvp_move_source *source, const struct kvp_move *move)
{
	uint64_t bytes = 0;

	for (uint32_t p = 0; p < move->leg->n_pairs; p++) {
		const struct kvp_pair *pair = &move->leg->pairs[p];

		if (kvp_mask_has(source->mask, pair->src_entry))
			bytes += pair->bytes *
				 kvp_leg_rows(move->leg, pair, source->start, source->tokens);
	}
	return bytes;
}
