/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/jobs.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "proto/plan.h"
#include "proto/util.h"

#define UNIT_LOG_MAX 4u /* accesses of 16 bytes */
#define BYTES_ROW 4096u /* kvp_jobs_bytes() cuts plain bytes into rows of this */

/* How far the tables were filled when a piece began: where a refused one leaves them. */
struct mark {
	uint32_t n_entries, n_runs, widest;
	uint64_t bytes;
};

/* One end of an entry. */
struct place {
	uint64_t base, page_stride, row_stride;
};

/* Rows to add: the planner's walk, and which ends are slots (dense, counted from 0). */
struct walk {
	struct kvp_side src, dst;
	uint64_t start, tokens;
	bool src_slot, dst_slot;
};

void kvp_jobs_reset(struct kvp_jobs *jobs)
{
	jobs->n_entries = 0;
	jobs->n_runs = 0;
	jobs->widest = 0;
	jobs->bytes = 0;
}

static struct mark mark_take(const struct kvp_jobs *jobs)
{
	return (struct mark){ jobs->n_entries, jobs->n_runs, jobs->widest, jobs->bytes };
}

static int mark_undo(struct kvp_jobs *jobs, const struct mark *mark)
{
	jobs->n_entries = mark->n_entries;
	jobs->n_runs = mark->n_runs;
	jobs->widest = mark->widest;
	jobs->bytes = mark->bytes;
	return -ENOSPC;
}

/* Numbers below 2^31 divided by `units` as (n * magic) >> (32 + shift), or >> shift when magic is
 * 0. */
static void entry_magic(struct kvp_move_entry *entry, uint32_t units)
{
	uint32_t log = 0;

	assert(units > 0);
	while ((UINT64_C(1) << log) < units)
		log++;
	if (units == UINT64_C(1) << log) {
		entry->magic = 0;
		entry->shift = (uint16_t)log;
		return;
	}
	entry->magic = (uint32_t)((UINT64_C(1) << (31 + log)) / units + 1);
	entry->shift = (uint16_t)(log - 1);
}

/* The widest unit that every address of the entry is a multiple of. */
static void entry_unit(struct kvp_move_entry *entry)
{
	uint64_t bits = entry->src | entry->dst | entry->src_page_stride | entry->dst_page_stride |
			entry->src_row_stride | entry->dst_row_stride | entry->width;
	uint32_t log = UNIT_LOG_MAX;

	while (bits & ((1u << log) - 1))
		log--;
	entry->unit_log = (uint16_t)log;
	entry_magic(entry, entry->width >> log);
}

static int jobs_entry(struct kvp_jobs *jobs, const struct place *src, const struct place *dst,
		      uint32_t width, uint32_t first_run)
{
	struct kvp_move_entry *entry = &jobs->entries[jobs->n_entries];

	assert(entry && jobs->max_runs <= KVP_JOBS_RUNS);
	if (jobs->n_entries == jobs->max_entries || src->row_stride > UINT32_MAX ||
	    dst->row_stride > UINT32_MAX)
		return -ENOSPC;

	*entry = (struct kvp_move_entry){
		.src = src->base,
		.dst = dst->base,
		.src_page_stride = src->page_stride,
		.dst_page_stride = dst->page_stride,
		.src_row_stride = (uint32_t)src->row_stride,
		.dst_row_stride = (uint32_t)dst->row_stride,
		.width = width,
		.first_run = (uint16_t)first_run,
	};
	entry_unit(entry);
	jobs->n_entries++;
	return 0;
}

/* Rows of a run at most: a block's share stays small, and steps fit their fields and, in bytes, the
 * kernel's 32 bits. */
static uint32_t run_most(const struct kvp_move_entry *entry, const struct kvp_run *run)
{
	if (run->src_step > UINT16_MAX || run->dst_step > UINT16_MAX ||
	    (uint64_t)run->src_step * entry->src_row_stride > UINT32_MAX ||
	    (uint64_t)run->dst_step * entry->dst_row_stride > UINT32_MAX)
		return 1;
	return KVP_MAX(KVP_JOBS_RUN_BYTES / entry->width, 1u);
}

/* Adds a run of the newest entry, in cuts of `most` rows. */
static int jobs_run(struct kvp_jobs *jobs, const struct kvp_run *run, uint32_t most)
{
	for (uint32_t at = 0; at < run->n; at += most) {
		if (jobs->n_runs == jobs->max_runs)
			return -ENOSPC;
		jobs->runs[jobs->n_runs++] = (struct kvp_move_run){
			.src_page = run->src_page,
			.dst_page = run->dst_page,
			.src_slot = run->src_slot + at * run->src_step,
			.dst_slot = run->dst_slot + at * run->dst_step,
			.src_step = (uint16_t)(most == 1 ? 0 : run->src_step),
			.dst_step = (uint16_t)(most == 1 ? 0 : run->dst_step),
			.n = KVP_MIN(run->n - at, most),
		};
	}
	return 0;
}

/* Adds the runs of a walk for the newest entry; a slot's rows are dense in walk order. */
static int jobs_walk(struct kvp_jobs *jobs, const struct walk *walk)
{
	const struct kvp_move_entry *entry = &jobs->entries[jobs->n_entries - 1];
	struct kvp_rows_iter it;
	struct kvp_run run;
	uint32_t row = 0, most = 0;

	kvp_rows_begin(&it, &walk->src, &walk->dst, walk->start, walk->tokens);
	while (kvp_rows_next(&it, &run)) {
		if (walk->src_slot) {
			run.src_page = 0;
			run.src_slot = row;
			run.src_step = 1;
		}
		if (walk->dst_slot) {
			run.dst_page = 0;
			run.dst_slot = row;
			run.dst_step = 1;
		}
		if (!most) /* steps are the same during a walk */
			most = run_most(entry, &run);
		if (jobs_run(jobs, &run, most) < 0)
			return -ENOSPC;
		row += run.n;
	}
	return 0;
}

/* Closes the entries from `first` on that have no runs yet: they all use the runs from first_run.
 */
static void jobs_close(struct kvp_jobs *jobs, uint32_t first_entry, uint32_t first_run)
{
	struct kvp_move_entry *entry = &jobs->entries[first_entry];

	entry->n_runs = (uint16_t)(jobs->n_runs - first_run);
	jobs->widest = KVP_MAX(jobs->widest, entry->n_runs);
}

/* May runs that were cut for one entry serve the other? Whatever their step is, it fits the
 * kernel's 32 bits with both strides, or with neither (run_most()). */
static bool strides_alike(const struct kvp_entry *a, const struct kvp_entry *b)
{
	return a->row_stride == b->row_stride ||
	       KVP_MAX(a->row_stride, b->row_stride) <= UINT32_MAX / UINT16_MAX;
}

/* Do the rows of two pairs lie in the same places of their pages, in runs cut alike? */
static bool pairs_alike(const struct kvp_leg_geom *leg, const struct kvp_pair *a,
			const struct kvp_pair *b)
{
	const struct kvp_entry *src = &leg->src[a->src_entry], *dst = &leg->dst[a->dst_entry];
	const struct kvp_entry *other = &leg->src[b->src_entry];
	const struct kvp_entry *there = &leg->dst[b->dst_entry];

	return src->group == other->group && src->klass == other->klass && a->bytes == b->bytes &&
	       dst->group == there->group && strides_alike(src, other) && strides_alike(dst, there);
}

/* An earlier entry of this piece whose pair has the same sides and the same cut: its runs serve
 * too. */
static const struct kvp_move_entry *find_alike(const struct kvp_jobs *jobs,
					       const struct kvp_leg_geom *leg,
					       const struct kvp_part *parts, uint32_t idx,
					       uint32_t first_entry)
{
	const struct kvp_pair *pair = &leg->pairs[parts[idx].pair];

	for (uint32_t i = 0; i < idx; i++)
		if (pairs_alike(leg, &leg->pairs[parts[i].pair], pair))
			return &jobs->entries[first_entry + i];
	return NULL;
}

/* Does the move take rows of the pair? */
static bool pair_moves(const struct kvp_move_source *source, const struct kvp_leg_geom *leg,
		       const struct kvp_pair *pair)
{
	return kvp_mask_has(source->mask, pair->src_entry) &&
	       kvp_leg_clip(leg, pair, source->start, source->tokens).tokens > 0;
}

/* The same for a move, whose entries are those of the pairs that move, in order. */
static const struct kvp_move_entry *
find_alike_pair(const struct kvp_jobs *jobs, const struct kvp_move_source *source,
		const struct kvp_leg_geom *leg, const struct kvp_pair *pair, uint32_t first_entry)
{
	for (const struct kvp_pair *at = leg->pairs; at < pair; at++) {
		if (!pair_moves(source, leg, at))
			continue;
		if (pairs_alike(leg, at, pair))
			return &jobs->entries[first_entry];
		first_entry++;
	}
	return NULL;
}

static struct place place_pool(const struct kvp_copy_pool *pool, const struct kvp_entry *entry,
			       uint32_t off)
{
	/* With one row in a page the stride may be anything: no row is found by it. */
	const bool unused = entry->rows_per_page == 1 && entry->row_stride > UINT32_MAX;

	return (struct place){ (uint64_t)(uintptr_t)pool->maps[entry->fd_idx] + entry->base + off,
			       entry->page_stride, unused ? 0 : entry->row_stride };
}

/* The sides of a pair with the page lists of the pools at hand; a NULL pool keeps the leg's
 * geometry. */
static void walk_sides(struct walk *walk, const struct kvp_leg_geom *leg,
		       const struct kvp_pair *pair, const struct kvp_copy_pool *src,
		       const struct kvp_copy_pool *dst)
{
	kvp_leg_sides(leg, pair, &walk->src, &walk->dst);
	if (src)
		walk->src = kvp_entry_side(&leg->src[pair->src_entry], src->sides);
	if (dst)
		walk->dst = kvp_entry_side(&leg->dst[pair->dst_entry], dst->sides);
}

/* One part of a piece, between the pool and the slot. */
static int jobs_part(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint32_t idx,
		     uint64_t slot, bool gather, uint32_t first_entry)
{
	const struct kvp_part *part = &piece->parts[idx];
	const struct kvp_pair *pair = &piece->leg->pairs[part->pair];
	const struct kvp_entry *entry =
		gather ? &piece->leg->src[pair->src_entry] : &piece->leg->dst[pair->dst_entry];
	const struct place pool =
		place_pool(&piece->pool, entry, gather ? pair->src_off : pair->dst_off);
	const struct place dense = { slot + part->offset, 0, pair->bytes };
	const struct kvp_move_entry *alike =
		find_alike(jobs, piece->leg, piece->parts, idx, first_entry);
	const struct kvp_range range = kvp_leg_clip(piece->leg, pair, piece->start, piece->tokens);
	struct walk walk = { .start = range.start,
			     .tokens = range.tokens,
			     .src_slot = !gather,
			     .dst_slot = gather };
	uint32_t first = alike ? alike->first_run : jobs->n_runs;
	uint32_t at = jobs->n_entries;

	if (jobs_entry(jobs, gather ? &pool : &dense, gather ? &dense : &pool, pair->bytes, first) <
	    0)
		return -ENOSPC;
	jobs->bytes += part->bytes;
	if (alike) {
		jobs->entries[at].n_runs = alike->n_runs;
		return 0;
	}
	walk_sides(&walk, piece->leg, pair, gather ? &piece->pool : NULL,
		   gather ? NULL : &piece->pool);
	if (jobs_walk(jobs, &walk) < 0)
		return -ENOSPC;
	jobs_close(jobs, at, first);
	return 0;
}

static int jobs_piece(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint64_t slot,
		      bool gather)
{
	const struct mark mark = mark_take(jobs);

	for (uint32_t i = 0; i < piece->n_parts; i++)
		if (jobs_part(jobs, piece, i, slot, gather, mark.n_entries) < 0)
			return mark_undo(jobs, &mark);
	return 0;
}

int kvp_jobs_gather(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint64_t slot)
{
	return jobs_piece(jobs, piece, slot, true);
}

int kvp_jobs_scatter(struct kvp_jobs *jobs, const struct kvp_copy_piece *piece, uint64_t slot)
{
	return jobs_piece(jobs, piece, slot, false);
}

static int jobs_pair(struct kvp_jobs *jobs, const struct kvp_move_source *source,
		     const struct kvp_move *move, const struct kvp_pair *pair, uint32_t first_entry)
{
	const struct kvp_leg_geom *leg = move->leg;
	const struct place src =
		place_pool(&source->src, &leg->src[pair->src_entry], pair->src_off);
	const struct place dst = place_pool(&move->dst, &leg->dst[pair->dst_entry], pair->dst_off);
	const struct kvp_range range = kvp_leg_clip(leg, pair, source->start, source->tokens);
	const struct kvp_move_entry *alike = find_alike_pair(jobs, source, leg, pair, first_entry);
	struct walk walk = { .start = range.start, .tokens = range.tokens };
	uint32_t first = alike ? alike->first_run : jobs->n_runs, at = jobs->n_entries;

	if (jobs_entry(jobs, &src, &dst, pair->bytes, first) < 0)
		return -ENOSPC;
	jobs->bytes += kvp_leg_rows(leg, pair, source->start, source->tokens) * pair->bytes;
	if (alike) {
		jobs->entries[at].n_runs = alike->n_runs;
		return 0;
	}
	walk_sides(&walk, leg, pair, &source->src, &move->dst);
	if (jobs_walk(jobs, &walk) < 0)
		return -ENOSPC;
	jobs_close(jobs, at, first);
	return 0;
}

int kvp_jobs_move(struct kvp_jobs *jobs, const struct kvp_move_source *source,
		  const struct kvp_move *move)
{
	const struct mark mark = mark_take(jobs);

	for (uint32_t i = 0; i < move->leg->n_pairs; i++) {
		const struct kvp_pair *pair = &move->leg->pairs[i];

		if (pair_moves(source, move->leg, pair) &&
		    jobs_pair(jobs, source, move, pair, mark.n_entries) < 0)
			return mark_undo(jobs, &mark);
	}
	return 0;
}

/* Bytes as rows; the source's rows lie `src_step` bytes apart: 0 for all the same. */
static int jobs_plain(struct kvp_jobs *jobs, uint64_t src, uint32_t src_step, uint64_t dst,
		      uint64_t bytes)
{
	const struct mark mark = mark_take(jobs);
	const uint64_t rows = bytes / BYTES_ROW, rest = bytes % BYTES_ROW;
	const struct place from = { src, 0, src_step }, to = { dst, 0, BYTES_ROW };
	const struct place from_rest = { src + rows * src_step, 0, rest };
	const struct place to_rest = { dst + rows * BYTES_ROW, 0, rest };
	const struct kvp_run all = { .src_step = 1, .dst_step = 1, .n = (uint32_t)rows };
	const struct kvp_run one = { .src_step = 1, .dst_step = 1, .n = 1 };

	if (rows && (jobs_entry(jobs, &from, &to, BYTES_ROW, jobs->n_runs) < 0 ||
		     jobs_run(jobs, &all, KVP_JOBS_RUN_BYTES / BYTES_ROW) < 0))
		return mark_undo(jobs, &mark);
	if (rows)
		jobs_close(jobs, mark.n_entries, mark.n_runs);
	if (rest) {
		uint32_t first = jobs->n_runs, at = jobs->n_entries;

		if (jobs_entry(jobs, &from_rest, &to_rest, (uint32_t)rest, first) < 0 ||
		    jobs_run(jobs, &one, 1) < 0)
			return mark_undo(jobs, &mark);
		jobs_close(jobs, at, first);
	}
	jobs->bytes += bytes;
	return 0;
}

int kvp_jobs_bytes(struct kvp_jobs *jobs, uint64_t src, uint64_t dst, uint64_t bytes)
{
	return jobs_plain(jobs, src, BYTES_ROW, dst, bytes);
}

static_assert(KVP_JOBS_ZEROS >= BYTES_ROW, "a row of zeroes");

int kvp_jobs_zero(struct kvp_jobs *jobs, uint64_t zeros, uint64_t dst, uint64_t bytes)
{
	return jobs_plain(jobs, zeros, 0, dst, bytes);
}

/* The smallest kernel that takes so many; KVP_MOVE_SIZES: none. */
static enum kvp_move_size size_of(uint32_t n_entries, uint32_t n_runs)
{
	static const uint32_t most[][2] = {
#define MOST(name, entries, runs) { entries, runs },
		KVP_MOVE_KERNELS(MOST)
	};
	int i = KVP_MOVE_SMALL;

	while (i < KVP_MOVE_SIZES && (n_entries > most[i][0] || n_runs > most[i][1]))
		i++;
	return (enum kvp_move_size)i;
}

static_assert(sizeof(union kvp_move_params) <= KVP_MOVE_PARAMS_MAX, "what a launch takes");

/* Entries [first, first + n) and the runs [run, run + n_runs) of the table, which are all of theirs
 * or a part of all. */
struct window {
	uint32_t first, n, run, n_runs;
};

/* As many entries as one launch takes with all their runs; n 0: not even one. */
static struct window window_whole(const struct kvp_jobs *jobs, uint32_t first)
{
	struct window w = { .first = first, .run = jobs->entries[first].first_run };

	while (first + w.n < jobs->n_entries) {
		const struct kvp_move_entry *e = &jobs->entries[first + w.n];
		uint32_t run = KVP_MIN(w.run, e->first_run);
		uint32_t end = KVP_MAX(w.run + w.n_runs, (uint32_t)e->first_run + e->n_runs);

		if (size_of(w.n + 1, end - run) == KVP_MOVE_SIZES)
			break;
		w.n++;
		w.run = run;
		w.n_runs = end - run;
	}
	return w;
}

/* A part of the runs of an entry that has too many, with the entries after it that share them. */
static struct window window_part(const struct kvp_jobs *jobs, const struct kvp_jobs_cut *cut)
{
	const struct kvp_move_entry *e = &jobs->entries[cut->entry];
	struct window w = { .first = cut->entry,
			    .run = e->first_run + cut->run,
			    .n_runs = KVP_MIN(e->n_runs - cut->run, KVP_MOVE_RUNS) };

	while (w.n < KVP_MOVE_RUNS_ENTRIES && w.first + w.n < jobs->n_entries &&
	       e[w.n].first_run == e->first_run && e[w.n].n_runs == e->n_runs)
		w.n++;
	return w;
}

/* Pieces of ranks name the same sources, layer by layer. For those that go into slots it is no
 * use: they are as fast one after the other. */
static uint32_t count_pieces(const struct kvp_move_entry *entries, uint32_t n)
{
	uint32_t each = 1;

	if (n == 0 || entries[0].dst_page_stride == 0)
		return 1;

	while (each < n && entries[each].src != entries[0].src)
		each++;
	if (n % each)
		return 1;
	for (uint32_t i = each; i < n; i++)
		if (entries[i].src != entries[i - each].src)
			return 1;
	return n / each;
}

static enum kvp_move_size window_params(const struct kvp_jobs *jobs, const struct window *w,
					union kvp_move_params *params)
{
	const enum kvp_move_size size = size_of(w->n, w->n_runs);
	struct kvp_move_run *const runs[] = { params->small.runs, params->near.runs,
					      params->wide.runs, params->tall.runs,
					      params->lengthy.runs };
	struct kvp_move_entry *entries = params->tall.entries; /* in the same place in all */
	uint32_t widest = 0;

	assert(size < KVP_MOVE_SIZES);
	memcpy(entries, jobs->entries + w->first, w->n * sizeof(*entries));
	for (uint32_t i = 0; i < w->n; i++) {
		struct kvp_move_entry *e = &entries[i];

		e->first_run = (uint16_t)(KVP_MAX((uint32_t)e->first_run, w->run) - w->run);
		e->n_runs = (uint16_t)KVP_MIN((uint32_t)e->n_runs, w->n_runs - e->first_run);
		widest = KVP_MAX(widest, e->n_runs);
	}
	params->head = (struct kvp_move_head){
		.n_entries = w->n,
		.widest = widest,
		.pieces = count_pieces(entries, w->n),
	};
	memcpy(runs[size], jobs->runs + w->run, w->n_runs * sizeof(*jobs->runs));
	return size;
}

bool kvp_jobs_params(const struct kvp_jobs *jobs, struct kvp_jobs_cut *cut,
		     union kvp_move_params *params, enum kvp_move_size *size)
{
	struct window w;

	if (cut->entry == jobs->n_entries)
		return false;

	w = window_whole(jobs, cut->entry);
	if (w.n == 0)
		w = window_part(jobs, cut);
	cut->run += w.n_runs;
	if (w.run + w.n_runs >= jobs->entries[w.first].first_run + jobs->entries[w.first].n_runs)
		*cut = (struct kvp_jobs_cut){ w.first + w.n, 0 };
	*size = window_params(jobs, &w, params);
	return true;
}

void kvp_jobs_run_host(const struct kvp_jobs *jobs)
{
	for (uint32_t e = 0; e < jobs->n_entries; e++) {
		const struct kvp_move_entry *entry = &jobs->entries[e];

		for (uint32_t i = 0; i < entry->n_runs; i++) {
			const struct kvp_move_run *run = &jobs->runs[entry->first_run + i];
			const char *src = (const char *)(uintptr_t)entry->src +
					  run->src_page * entry->src_page_stride +
					  (uint64_t)run->src_slot * entry->src_row_stride;
			char *dst = (char *)(uintptr_t)entry->dst +
				    run->dst_page * entry->dst_page_stride +
				    (uint64_t)run->dst_slot * entry->dst_row_stride;

			kvp_copy_rows(dst, (uint64_t)run->dst_step * entry->dst_row_stride, src,
				      (uint64_t)run->src_step * entry->src_row_stride, entry->width,
				      run->n);
		}
	}
}
