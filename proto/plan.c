/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/plan.h"

#include <assert.h>

#include "proto/util.h"

/* ---- who owns what */

/* A side without DCP owns everything in turns of any length: 1 keeps the arithmetic uniform. */
static struct kvp_own own_of(const struct kvp_side *side)
{
	uint32_t turn = side->dcp_size == 1 ? 1 : side->interleave;

	return (struct kvp_own){
		.cycle = (uint64_t)turn * side->dcp_size,
		.turn = turn,
		.ranks = side->dcp_size,
		.rank = side->dcp_rank,
	};
}

/* Owned positions below x. */
static uint64_t own_below(const struct kvp_own *own, uint64_t x)
{
	uint64_t in_cycle = x % own->cycle;
	uint64_t first = (uint64_t)own->rank * own->turn;
	uint64_t part = in_cycle <= first ? 0 : KVP_MIN(in_cycle - first, (uint64_t)own->turn);

	return x / own->cycle * own->turn + part;
}

static uint64_t own_count(const struct kvp_own *own, uint64_t start, uint64_t tokens)
{
	return own_below(own, start + tokens) - own_below(own, start);
}

/* The most positions that a window of that many tokens can own: it begins with a turn. */
static uint64_t own_worst(const struct kvp_own *own, uint64_t tokens)
{
	return tokens / own->cycle * own->turn + KVP_MIN(tokens % own->cycle, (uint64_t)own->turn);
}

/* Index of an owned position among the owner's rows, and back. */
static uint64_t own_index(const struct kvp_own *own, uint64_t pos)
{
	return pos / own->cycle * own->turn + pos % own->turn;
}

static uint64_t own_pos(const struct kvp_own *own, uint64_t index)
{
	return index / own->turn * own->cycle + (uint64_t)own->rank * own->turn + index % own->turn;
}

/* The first owned position at or after pos. */
static uint64_t own_next(const struct kvp_own *own, uint64_t pos)
{
	uint64_t in_cycle = pos % own->cycle;
	uint64_t first = (uint64_t)own->rank * own->turn;

	if (in_cycle < first)
		return pos + (first - in_cycle);
	if (in_cycle < first + own->turn)
		return pos;
	return pos + (own->cycle - in_cycle) + first;
}

/* The end of the turn that the owned position is in. */
static uint64_t own_turn_end(const struct kvp_own *own, uint64_t pos)
{
	return own->ranks == 1 ? UINT64_MAX : pos - pos % own->turn + own->turn;
}

static bool own_same_turns(const struct kvp_own *a, const struct kvp_own *b)
{
	return a->turn == b->turn && a->ranks == b->ranks;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
	while (b) {
		uint64_t rest = a % b;

		a = b;
		b = rest;
	}
	return a;
}

/* Turns of the longer cycle until both repeat against each other. */
static uint64_t own_steps(const struct kvp_own *a, const struct kvp_own *b)
{
	return KVP_MIN(a->cycle, b->cycle) / gcd(a->cycle, b->cycle);
}

static uint64_t own_period(const struct kvp_own *a, const struct kvp_own *b)
{
	uint64_t period = KVP_MAX(a->cycle, b->cycle) * own_steps(a, b);

	assert(period); /* the sides were checked */
	return period;
}

/* ---- what two ends own together */

/* How two ends lie against each other; each kind has its own closed form. */
enum own_kind {
	OWN_SAME,     /* the same positions */
	OWN_DISJOINT, /* none */
	OWN_EVEN,     /* turns of one token: evenly spaced positions, or none */
	OWN_MIXED,    /* pieces of turns */
};

static enum own_kind own_kind(const struct kvp_own *a, const struct kvp_own *b)
{
	if (own_same_turns(a, b))
		return a->rank == b->rank ? OWN_SAME : OWN_DISJOINT;
	if (a->turn == 1 && b->turn == 1)
		return OWN_EVEN;
	return OWN_MIXED;
}

/* x with a * x = 1 (mod m), for a and m without common divisor and below 2^32; 0 when m is 1. */
static uint64_t inverse_mod(uint64_t a, uint64_t m)
{
	int64_t r0 = (int64_t)m, r1 = (int64_t)(a % m);
	int64_t t0 = 0, t1 = 1;

	if (m == 1)
		return 0;

	while (r1) {
		int64_t q = r0 / r1;
		int64_t r2 = r0 - q * r1, t2 = t0 - q * t1;

		r0 = r1;
		r1 = r2;
		t0 = t1;
		t1 = t2;
	}
	return (uint64_t)(t0 < 0 ? t0 + (int64_t)m : t0);
}

/*
 * Two ends with turns of one token meet where p = a (mod A) and p = b (mod B): nowhere, or at one
 * residue modulo lcm(A, B). Writes the first such p at or after start.
 */
static bool even_first(const struct kvp_own *a, const struct kvp_own *b, uint64_t start,
		       uint64_t *pos)
{
	uint64_t g = gcd(a->ranks, b->ranks), m = b->ranks / g, step = a->ranks * m;
	uint64_t diff = ((uint64_t)b->rank + b->ranks - a->rank % b->ranks) % b->ranks;
	uint64_t residue, at = start % step;

	if (diff % g)
		return false;

	residue = a->rank + a->ranks * (diff / g % m * inverse_mod(a->ranks / g, m) % m);
	*pos = start + (residue >= at ? residue - at : step - (at - residue));
	return true;
}

static uint64_t even_count(const struct kvp_own *a, const struct kvp_own *b, uint64_t start,
			   uint64_t tokens)
{
	uint64_t first;

	if (!even_first(a, b, start, &first) || first - start >= tokens)
		return 0;
	return (tokens - 1 - (first - start)) / own_period(a, b) + 1;
}

/* Walks the turns of the longer cycle; what the other owns within a turn is a closed form. */
static uint64_t mixed_walk(const struct kvp_own *a, const struct kvp_own *b, uint64_t start,
			   uint64_t tokens)
{
	const struct kvp_own *big = a->cycle >= b->cycle ? a : b;
	const struct kvp_own *small = big == a ? b : a;
	uint64_t end = start + tokens, n = 0;

	for (uint64_t pos = own_next(big, start); pos < end;) {
		uint64_t stop = KVP_MIN(own_turn_end(big, pos), end);

		n += own_count(small, pos, stop - pos);
		pos = own_next(big, stop);
	}
	return n;
}

static uint64_t mixed_count(const struct kvp_own *a, const struct kvp_own *b, uint64_t start,
			    uint64_t tokens)
{
	uint64_t period, n = 0;

	if (a->ranks == 1)
		return own_count(b, start, tokens);
	if (b->ranks == 1)
		return own_count(a, start, tokens);

	period = own_period(a, b);
	if (tokens >= period)
		n = tokens / period * mixed_walk(a, b, start, period);
	return n + mixed_walk(a, b, start, tokens % period);
}

static uint64_t both_count(const struct kvp_own *a, const struct kvp_own *b, uint64_t start,
			   uint64_t tokens)
{
	if (!tokens)
		return 0; /* wherever it starts: that has not been looked at */

	switch (own_kind(a, b)) {
	case OWN_SAME:
		return own_count(a, start, tokens);
	case OWN_DISJOINT:
		return 0;
	case OWN_EVEN:
		return even_count(a, b, start, tokens);
	case OWN_MIXED:
		return mixed_count(a, b, start, tokens);
	}
	return 0;
}

/* ---- checks */

const char *kvp_plan_error_name(enum kvp_plan_error error)
{
	switch (error) {
	case KVP_PLAN_OK:
		return "ok";
	case KVP_PLAN_GEOMETRY:
		return "geometry";
	case KVP_PLAN_ALIGNMENT:
		return "alignment";
	case KVP_PLAN_SRC_RANGE:
		return "src_range";
	case KVP_PLAN_DST_RANGE:
		return "dst_range";
	}
	return "unknown";
}

enum kvp_plan_error kvp_side_check(const struct kvp_side *side)
{
	if (!side->page || !side->dcp_size || side->dcp_size > KVP_DCP_MAX ||
	    side->dcp_rank >= side->dcp_size || !side->interleave ||
	    side->page % side->interleave || kvp_side_vpage(side) > UINT32_MAX)
		return KVP_PLAN_GEOMETRY;
	if (side->pos0 % kvp_side_vpage(side))
		return KVP_PLAN_ALIGNMENT;
	return KVP_PLAN_OK;
}

static bool side_covers(const struct kvp_side *side, uint64_t start, uint64_t end)
{
	return start >= side->pos0 && (side->n_pages == KVP_PAGES_ANY ||
				       end - side->pos0 <= side->n_pages * kvp_side_vpage(side));
}

enum kvp_plan_error kvp_plan_check(const struct kvp_side *src, const struct kvp_side *dst,
				   uint64_t start, uint64_t tokens)
{
	enum kvp_plan_error error = kvp_side_check(src);
	struct kvp_own a, b;
	uint64_t end;

	if (!error)
		error = kvp_side_check(dst);
	if (error)
		return error;

	a = own_of(src);
	b = own_of(dst);
	if (own_kind(&a, &b) == OWN_MIXED && own_steps(&a, &b) > KVP_PLAN_STEPS_MAX)
		return KVP_PLAN_GEOMETRY;

	if (!tokens)
		return KVP_PLAN_OK;
	if (__builtin_add_overflow(start, tokens, &end) || end > KVP_POS_MAX ||
	    !side_covers(src, start, end))
		return KVP_PLAN_SRC_RANGE;
	return side_covers(dst, start, end) ? KVP_PLAN_OK : KVP_PLAN_DST_RANGE;
}

struct kvp_side kvp_side_replicated(const struct kvp_side *side)
{
	struct kvp_side all = *side;

	all.page = (uint32_t)kvp_side_vpage(side);
	all.dcp_size = 1;
	all.dcp_rank = 0;
	all.interleave = 1;
	return all;
}

uint64_t kvp_side_rows(const struct kvp_side *side, uint64_t start, uint64_t tokens)
{
	struct kvp_own own = own_of(side);

	return own_count(&own, start, tokens);
}

uint32_t kvp_side_slot(const struct kvp_side *side, uint64_t pos)
{
	struct kvp_own own = own_of(side);

	return (uint32_t)(own_index(&own, pos) % side->page);
}

uint64_t kvp_side_page_idx(const struct kvp_side *side, uint64_t pos)
{
	return (pos - side->pos0) / kvp_side_vpage(side);
}

/* ---- counts */

uint64_t kvp_rows_count(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
			uint64_t tokens)
{
	struct kvp_own a = own_of(src), b = own_of(dst);

	return both_count(&a, &b, start, tokens);
}

/*
 * Whole periods hold the same number of rows wherever they start. The rest holds no more than
 * either end can own in it, nor than a whole period, which keeps the bound from falling.
 */
static uint64_t mixed_worst(const struct kvp_own *a, const struct kvp_own *b, uint64_t tokens)
{
	uint64_t period = own_period(a, b);
	uint64_t rows = mixed_count(a, b, 0, period);
	uint64_t rest = KVP_MIN(own_worst(a, tokens % period), own_worst(b, tokens % period));

	return tokens / period * rows + KVP_MIN(rest, rows);
}

uint64_t kvp_rows_worst(const struct kvp_side *src, const struct kvp_side *dst, uint64_t tokens)
{
	struct kvp_own a = own_of(src), b = own_of(dst);
	uint64_t first;

	switch (own_kind(&a, &b)) {
	case OWN_SAME:
		return own_worst(&a, tokens);
	case OWN_DISJOINT:
		return 0;
	case OWN_EVEN:
		return even_first(&a, &b, 0, &first) ? KVP_DIV_UP(tokens, own_period(&a, &b)) : 0;
	case OWN_MIXED:
		break;
	}
	if (a.ranks == 1)
		return own_worst(&b, tokens);
	if (b.ranks == 1)
		return own_worst(&a, tokens);
	return mixed_worst(&a, &b, tokens);
}

/* True if `own` has any of the n positions pos, pos + step, ... */
static bool own_any(const struct kvp_own *own, uint64_t pos, uint64_t step, uint64_t n)
{
	if (step == 1)
		return own_count(own, pos, n) > 0;

	for (uint64_t k = 0; k < n; k++) {
		if (own_next(own, pos + k * step) == pos + k * step)
			return true;
	}
	return false;
}

static bool clash_walk(struct kvp_side a, struct kvp_side b, const struct kvp_own *own,
		       uint64_t start, uint64_t tokens)
{
	struct kvp_rows_iter it;
	struct kvp_run run;

	a.pages = b.pages = NULL; /* the range may lie outside them */
	kvp_rows_begin(&it, &a, &b, start, tokens);
	while (kvp_rows_next(&it, &run)) {
		if (own_any(own, run.pos, it.pos_step, run.n))
			return true;
	}
	return false;
}

/* Of what two ends share, the third asks only within the tokens until all three repeat. */
static uint64_t clash_tokens(const struct kvp_own own[3], uint64_t tokens)
{
	uint64_t period = own_period(&own[0], &own[1]), all;

	if (__builtin_mul_overflow(period / gcd(period, own[2].cycle), own[2].cycle, &all))
		return tokens;
	return KVP_MIN(tokens, all);
}

/* Whether one follows the turns of another, or owns everything: that leaves a question of two. */
static bool clash_of_two(const struct kvp_own own[3], int *of)
{
	for (int i = 0; i < 3; i++) {
		*of = i;
		if (own[i].ranks == 1 || own_same_turns(&own[i], &own[(i + 1) % 3]))
			return true;
	}
	return false;
}

bool kvp_rows_clash(const struct kvp_side *a, const struct kvp_side *b, const struct kvp_side *dst,
		    uint64_t start, uint64_t tokens)
{
	const struct kvp_own own[] = { own_of(a), own_of(b), own_of(dst) };
	const struct kvp_own *x, *y, *z;
	int i;

	if (!clash_of_two(own, &i))
		return clash_walk(*a, *b, &own[2], start, clash_tokens(own, tokens));

	x = &own[i];
	y = &own[(i + 1) % 3];
	z = &own[(i + 2) % 3];
	return (x->ranks == 1 || x->rank == y->rank) && both_count(y, z, start, tokens) > 0;
}

static uint64_t both_steps(const struct kvp_own *a, const struct kvp_own *b)
{
	return own_kind(a, b) == OWN_MIXED && a->ranks > 1 && b->ranks > 1 ? own_steps(a, b) : 1;
}

uint64_t kvp_rows_count_steps(const struct kvp_side *src, const struct kvp_side *dst)
{
	struct kvp_own a = own_of(src), b = own_of(dst);

	return both_steps(&a, &b);
}

uint64_t kvp_rows_clash_steps(const struct kvp_side *a, const struct kvp_side *b,
			      const struct kvp_side *dst, uint64_t tokens)
{
	const struct kvp_own own[] = { own_of(a), own_of(b), own_of(dst) };
	int i;

	if (clash_of_two(own, &i)) {
		const struct kvp_own *x = &own[i], *y = &own[(i + 1) % 3];

		return x->ranks == 1 || x->rank == y->rank ? both_steps(y, &own[(i + 2) % 3]) : 1;
	}

	tokens = clash_tokens(own, tokens);
	if (own_kind(&own[0], &own[1]) == OWN_EVEN)
		return tokens / own_period(&own[0], &own[1]) + 1;
	/* A run ends where a turn of either does: pages are whole turns. */
	return tokens / own[0].cycle + tokens / own[1].cycle + both_steps(&own[0], &own[1]) + 2;
}

/* ---- runs */

static struct kvp_rows_end end_of(const struct kvp_side *side)
{
	return (struct kvp_rows_end){
		.pages = side->pages,
		.page0 = side->pos0 / kvp_side_vpage(side),
		.page = side->page,
		.step = 1,
	};
}

static void end_place(struct kvp_rows_end *end, uint64_t index)
{
	end->idx = index / end->page - end->page0;
	end->slot = (uint32_t)(index % end->page);
}

static uint32_t end_page(const struct kvp_rows_end *end)
{
	return end->pages ? end->pages[end->idx] : (uint32_t)end->idx;
}

/* Rows up to the end of the page. */
static uint32_t end_room(const struct kvp_rows_end *end)
{
	uint32_t slots = end->page - end->slot;

	return end->step == 1 ? slots : (slots - 1) / end->step + 1;
}

static void end_advance(struct kvp_rows_end *end, uint32_t n)
{
	uint64_t slot = end->slot + (uint64_t)n * end->step;

	if (slot >= end->page) { /* the next page, as a rule: no division */
		end->idx++;
		slot -= end->page;
	}
	if (slot >= end->page) {
		end->idx += slot / end->page;
		slot %= end->page;
	}
	end->slot = (uint32_t)slot;
}

void kvp_rows_begin(struct kvp_rows_iter *it, const struct kvp_side *src,
		    const struct kvp_side *dst, uint64_t start, uint64_t tokens)
{
	*it = (struct kvp_rows_iter){
		.src_own = own_of(src),
		.dst_own = own_of(dst),
		.src = end_of(src),
		.dst = end_of(dst),
		.end = start + tokens,
		.pos = start,
		.pos_step = 1,
	};
	it->left = both_count(&it->src_own, &it->dst_own, start, tokens);
	if (!it->left)
		return;

	switch (own_kind(&it->src_own, &it->dst_own)) {
	case OWN_SAME:
		it->same = true;
		it->pos = own_below(&it->src_own, start);
		end_place(&it->src, it->pos);
		end_place(&it->dst, it->pos);
		break;
	case OWN_EVEN:
		(void)even_first(&it->src_own, &it->dst_own, start, &it->pos); /* rows exist */
		it->pos_step = own_period(&it->src_own, &it->dst_own);
		it->src.step = (uint32_t)(it->pos_step / it->src_own.ranks);
		it->dst.step = (uint32_t)(it->pos_step / it->dst_own.ranks);
		end_place(&it->src, it->pos / it->src_own.ranks);
		end_place(&it->dst, it->pos / it->dst_own.ranks);
		break;
	default:
		return; /* stretch by stretch, as rows_refill() finds them */
	}
	it->seg_left = it->left;
}

/* Goes to the next positions in a row that both own; there are some. */
static void rows_refill(struct kvp_rows_iter *it)
{
	uint64_t pos = it->pos, next = own_next(&it->src_own, pos);
	uint64_t stop;

	do {
		pos = own_next(&it->dst_own, next);
		next = own_next(&it->src_own, pos);
	} while (next != pos);

	stop = KVP_MIN(own_turn_end(&it->src_own, pos), own_turn_end(&it->dst_own, pos));
	it->pos = pos;
	it->seg_left = KVP_MIN(stop, it->end) - pos;
	end_place(&it->src, own_index(&it->src_own, pos));
	end_place(&it->dst, own_index(&it->dst_own, pos));
}

bool kvp_rows_next(struct kvp_rows_iter *it, struct kvp_run *run)
{
	uint32_t n;

	if (!it->left)
		return false;
	if (!it->seg_left)
		rows_refill(it);

	n = KVP_MIN(end_room(&it->src), end_room(&it->dst));
	if (n > it->seg_left)
		n = (uint32_t)it->seg_left;

	*run = (struct kvp_run){
		.pos = it->same ? own_pos(&it->src_own, it->pos) : it->pos,
		.src_page = end_page(&it->src),
		.src_slot = it->src.slot,
		.src_step = it->src.step,
		.dst_page = end_page(&it->dst),
		.dst_slot = it->dst.slot,
		.dst_step = it->dst.step,
		.n = n,
	};
	end_advance(&it->src, n);
	end_advance(&it->dst, n);
	it->pos += n * it->pos_step;
	it->left -= n;
	it->seg_left -= n;
	return true;
}

/* ---- writes */

uint64_t kvp_raw_runs(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
		      uint64_t tokens)
{
	uint64_t runs = 0, next_src = 0, next_dst = 0;
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_rows_begin(&it, src, dst, start, tokens);
	while (kvp_rows_next(&it, &run)) {
		uint64_t s = (uint64_t)run.src_page * src->page + run.src_slot;
		uint64_t d = (uint64_t)run.dst_page * dst->page + run.dst_slot;
		bool joined = runs && s == next_src && d == next_dst;

		runs += (run.src_step == 1 && run.dst_step == 1 ? 1 : run.n) - joined;
		next_src = s + (uint64_t)(run.n - 1) * run.src_step + 1;
		next_dst = d + (uint64_t)(run.n - 1) * run.dst_step + 1;
	}
	return runs;
}

void kvp_packed_begin(struct kvp_packed_iter *it, const struct kvp_side *src,
		      const struct kvp_side *dst, uint64_t start, uint64_t tokens)
{
	kvp_rows_begin(&it->rows, src, dst, start, tokens);
	it->run = (struct kvp_run){ 0 };
	it->packed = 0;
	it->dst_page = dst->page;
}

/* The destination row that comes next; false at the end. */
static bool packed_peek(struct kvp_packed_iter *it, uint64_t *row)
{
	if (!it->run.n && !kvp_rows_next(&it->rows, &it->run))
		return false;

	*row = (uint64_t)it->run.dst_page * it->dst_page + it->run.dst_slot;
	return true;
}

bool kvp_packed_next(struct kvp_packed_iter *it, struct kvp_packed_run *out)
{
	uint64_t row, first, n = 0;

	if (!packed_peek(it, &first))
		return false;

	do {
		uint32_t take = it->run.dst_step == 1 ? it->run.n : 1;

		it->run.dst_slot += take * it->run.dst_step;
		it->run.n -= take;
		n += take;
	} while (packed_peek(it, &row) && row == first + n);

	*out = (struct kvp_packed_run){ .packed = it->packed, .dst_row = first, .n = n };
	it->packed += n;
	return true;
}

uint64_t kvp_packed_runs(const struct kvp_side *src, const struct kvp_side *dst, uint64_t start,
			 uint64_t tokens)
{
	struct kvp_packed_iter it;
	struct kvp_packed_run run;
	uint64_t runs = 0;

	kvp_packed_begin(&it, src, dst, start, tokens);
	while (kvp_packed_next(&it, &run))
		runs++;
	return runs;
}
