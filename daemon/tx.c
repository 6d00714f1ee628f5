/* SPDX-License-Identifier: Apache-2.0 */

/* Sender ends: their life, chunks, and what of them is free and delivered. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

static struct kvp_tx *tx_find(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_table_node *node = kvp_table_find(&lane->txs, id);

	return node ? KVP_CONTAINER_OF(node, struct kvp_tx, node) : NULL;
}

void kvp_tx_dirty(struct kvp_tx *tx)
{
	if (tx->dirty)
		return;

	tx->dirty = true;
	TAILQ_INSERT_TAIL(&tx->lane->dirty_txs, tx, dirty_link);
}

static void local_forget(struct kvp_tx *tx)
{
	if (!tx->local_queued)
		return;

	tx->local_queued = false;
	TAILQ_REMOVE(&tx->lane->local, tx, local_link);
}

static void fence_forget(struct kvp_tx *tx)
{
	if (!tx->fence_queued)
		return;

	tx->fence_queued = false;
	TAILQ_REMOVE(&tx->lane->fenced, tx, fence_link);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static void chunk_free(struct kvp_tx *tx, struct kvp_chunk *chunk)
{
	TAILQ_REMOVE(&tx->chunks, chunk, link);
	kvp_order_free(&chunk->order->order);
	free(chunk);
}

/* How many pieces it takes in all is known once the legs are. */
static void chunk_count(struct kvp_tx *tx, struct kvp_chunk *chunk)
{
	struct kvp_tx_leg *leg;
	uint64_t n = 0;

	TAILQ_FOREACH (leg, &tx->legs, tx_link) {
		uint64_t pieces = kvp_tx_pieces(leg, chunk->order);

		if (pieces > UINT32_MAX) {
			kvp_tx_fail(tx, KVP__STATUS__STATUS_LIMIT,
				    "chunk %u takes %llu pieces for destination %u, at most %u",
				    chunk->order->seq, (unsigned long long)pieces, leg->order->dest,
				    UINT32_MAX);
			return;
		}
		n += pieces;
	}
	chunk->to_gather = n;
	chunk->to_land = n;
	chunk->counted = true;
}

static void leg_enter(struct kvp_tx_leg *leg, struct kvp_chunk *chunk)
{
	leg->chunk = chunk;
	leg->piece = 0;
	leg->n_pieces = chunk ? (uint32_t)kvp_tx_pieces(leg, chunk->order) : 0;
}

void kvp_tx_leg_advance(struct kvp_tx_leg *leg)
{
	leg->chunk->touched = true;
	leg->piece++;
	if (leg->piece == leg->n_pieces)
		leg_enter(leg, TAILQ_NEXT(leg->chunk, link));
}

/* Looks whether the next fences are reached; the first that is not puts the tx on the fence list.
 */
static void advance_fence(struct kvp_tx *tx)
{
	struct kvp_lane *lane = tx->lane;

	while (tx->unfenced) {
		int r = kvp_lane_fence_reached(lane, tx->unfenced->order);

		if (r < 0) {
			kvp_tx_fail(tx, KVP__STATUS__STATUS_NOT_FOUND,
				    "chunk %u: fence %llu word %u is not there",
				    tx->unfenced->order->seq,
				    (unsigned long long)tx->unfenced->order->fence,
				    tx->unfenced->order->fence_word);
			return;
		}
		if (r == 0)
			break;
		tx->unfenced->fenced = true;
		kvp_board_once(&tx->order->board->first_fence_ns, lane->now_ns);
		tx->unfenced = TAILQ_NEXT(tx->unfenced, link);
	}

	if (tx->unfenced && !tx->fence_queued) {
		tx->fence_queued = true;
		if (TAILQ_EMPTY(&lane->fenced))
			lane->fence_next_ns = lane->now_ns + KVP_LANE_FENCE_MIN_NS;
		lane->fence_since_ns = lane->now_ns;
		TAILQ_INSERT_TAIL(&lane->fenced, tx, fence_link);
	}
	if (!tx->unfenced)
		fence_forget(tx);
}

uint32_t kvp_tx_fences(struct kvp_lane *lane)
{
	struct kvp_tx *tx, *next;
	uint64_t step;
	uint32_t n = 0;

	if (TAILQ_EMPTY(&lane->fenced) || lane->now_ns < lane->fence_next_ns)
		return 0;

	for (tx = TAILQ_FIRST(&lane->fenced); tx; tx = next) {
		const struct kvp_chunk *was = tx->unfenced;

		next = TAILQ_NEXT(tx, fence_link);
		advance_fence(tx);
		if (tx->unfenced == was)
			continue;
		kvp_tx_kick_all(tx);
		kvp_tx_dirty(tx);
		n++;
	}
	if (n)
		lane->fence_since_ns = lane->now_ns;
	step = KVP_MAX((lane->now_ns - lane->fence_since_ns) / 8, KVP_LANE_FENCE_MIN_NS);
	lane->fence_next_ns = lane->now_ns + KVP_MIN(step, KVP_LANE_FENCE_MAX_NS);
	return n;
}

void kvp_tx_chunk(struct kvp_lane *lane, struct kvp_order_chunk *order)
{
	struct kvp_tx *tx = tx_find(lane, order->tx);
	struct kvp_chunk *chunk =
		tx && !tx->failed && !tx->ended ? calloc(1, sizeof(*chunk)) : NULL;
	struct kvp_tx_leg *leg;

	if (!chunk) {
		if (tx)
			kvp_tx_fail(tx, KVP__STATUS__STATUS_NO_MEMORY, "lane %s has no memory",
				    lane->config.name);
		kvp_order_free(&order->order);
		return;
	}

	chunk->order = order;
	TAILQ_INSERT_TAIL(&tx->chunks, chunk, link);
	tx->next_seq = order->seq + 1;
	tx->last_seen = tx->last_seen || order->last;
	if (!tx->unfenced)
		tx->unfenced = chunk;
	kvp_board_once(&tx->order->board->first_chunk_ns, lane->now_ns);
	kvp_tx_dirty(tx);
	if (!tx->started)
		return;

	chunk_count(tx, chunk);
	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		if (!leg->chunk)
			leg_enter(leg, chunk);
	advance_fence(tx);
	kvp_tx_kick_all(tx);
}

static void recall_from(struct kvp_tx *tx, struct kvp_chunk *chunk)
{
	struct kvp_tx_leg *leg;

	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		if (leg->chunk && leg->chunk->order->seq >= chunk->order->seq)
			leg_enter(leg, NULL);
	if (tx->unfenced && tx->unfenced->order->seq >= chunk->order->seq) {
		tx->unfenced = NULL;
		fence_forget(tx);
	}
	tx->next_seq = chunk->order->seq;
	while (chunk) {
		struct kvp_chunk *next = TAILQ_NEXT(chunk, link);

		if (chunk->order->last)
			tx->last_seen = false;
		chunk_free(tx, chunk);
		chunk = next;
	}
}

/* Legs take chunks in order: those that none has touched are the newest ones. */
void kvp_tx_recall(struct kvp_lane *lane, uint64_t id, uint32_t seq)
{
	struct kvp_tx *tx = tx_find(lane, id);
	struct kvp_chunk *chunk;

	if (!tx)
		return;

	TAILQ_FOREACH (chunk, &tx->chunks, link)
		if (chunk->order->seq >= seq && !chunk->touched)
			break;
	if (chunk)
		recall_from(tx, chunk);
	atomic_store_explicit(&tx->order->board->recalled_from, tx->next_seq, memory_order_release);
	kvp_board_post(tx->order->board, lane->config.loop, KVP_BOARD_RECALLED);
	kvp_tx_dirty(tx);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void drop_all(struct kvp_tx *tx)
{
	struct kvp_tx_leg *leg;

	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		kvp_tx_leg_drop(leg);
	local_forget(tx);
	fence_forget(tx);
}

void kvp_tx_fail(struct kvp_tx *tx, Kvp__Status status, const char *fmt, ...)
{
	char text[KVP_BOARD_TEXT];
	va_list args;

	if (tx->failed || tx->ended)
		return;

	va_start(args, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, args); /* cut texts are fine */
	va_end(args);
	tx->failed = true;
	(void)kvp_board_fail(tx->order->board, tx->lane->config.loop, status, "%s", text);
	drop_all(tx);
	kvp_tx_dirty(tx);
}

void kvp_tx_add(struct kvp_lane *lane, struct kvp_order_tx *order)
{
	struct kvp_lane_pool *pool = kvp_lane_pool_find(lane, order->pool);
	struct kvp_tx *tx = pool ? calloc(1, sizeof(*tx)) : NULL;
	struct kvp_board *board = order->board;

	if (!tx) {
		kvp_lane_refuse_end(lane, &order->order, board, pool);
		return;
	}

	tx->lane = lane;
	tx->order = order;
	tx->pool = pool;
	pool->refs++;
	tx->node.id = board->id;
	TAILQ_INIT(&tx->legs);
	TAILQ_INIT(&tx->chunks);
	(void)kvp_table_add(&lane->txs, &tx->node); /* ids are never reused */
	kvp_tx_dirty(tx);
}

/* Do two legs put the same bytes into the same places of a slot? */
static bool pack_alike(const struct kvp_tx_leg *a, const struct kvp_tx_leg *b)
{
	const struct kvp_lane_geom *x = &a->order->leg, *y = &b->order->leg;

	if (x->geom.n_pairs != y->geom.n_pairs || x->piece_tokens != y->piece_tokens ||
	    x->geom.end != y->geom.end || x->sums != y->sums ||
	    memcmp(x->src_mask, y->src_mask, sizeof(x->src_mask)) != 0)
		return false;

	for (uint32_t i = 0; i < x->geom.n_pairs; i++) {
		const struct kvp_pair *p = &x->geom.pairs[i], *q = &y->geom.pairs[i];
		struct kvp_side s, t, u, v;

		if (p->src_entry != q->src_entry || p->src_off != q->src_off ||
		    p->bytes != q->bytes)
			return false;
		if (x->geom.dst_starts[x->geom.dst[p->dst_entry].group] !=
		    y->geom.dst_starts[y->geom.dst[q->dst_entry].group])
			return false;
		kvp_leg_sides(&x->geom, p, &s, &t);
		kvp_leg_sides(&y->geom, q, &u, &v);
		if (t.page != v.page || t.dcp_size != v.dcp_size || t.dcp_rank != v.dcp_rank ||
		    t.interleave != v.interleave)
			return false;
	}
	return true;
}

/* Puts the leg behind the first that packs like it. */
static void find_alike(struct kvp_tx *tx, struct kvp_tx_leg *leg)
{
	struct kvp_tx_leg *other;

	leg->alike = leg;
	if (leg->local)
		return;

	TAILQ_FOREACH (other, &tx->legs, tx_link) {
		if (other == leg || other->local || other->alike != other ||
		    !pack_alike(other, leg))
			continue;
		leg->alike = other;
		leg->alike_next = other->alike_next;
		other->alike_next = leg;
		return;
	}
}

void kvp_tx_leg_add(struct kvp_lane *lane, struct kvp_order_tx_leg *order)
{
	struct kvp_tx *tx = tx_find(lane, order->tx);
	struct kvp_tx_leg *leg = NULL;

	if (tx && !tx->started && !tx->failed && !tx->ended && kvp_lane_geom_fits(&order->leg))
		leg = calloc(1, sizeof(*leg));
	if (!leg) {
		if (tx)
			kvp_tx_fail(tx, KVP__STATUS__STATUS_NO_MEMORY,
				    "destination %u cannot be added on lane %s", order->dest,
				    lane->config.name);
		kvp_order_free(&order->order);
		return;
	}

	leg->tx = tx;
	leg->order = order;
	leg->local = order->ep == 0;
	leg->link = leg->local ? NULL : kvp_link_find(lane, order->ep);
	leg->slot_bytes = lane->pack.slot_bytes;
	if (order->leg.slot_bytes)
		leg->slot_bytes = KVP_MIN(leg->slot_bytes, order->leg.slot_bytes);
	TAILQ_INIT(&leg->order_list);
	TAILQ_INSERT_TAIL(&tx->legs, leg, tx_link);
	if (leg->link)
		TAILQ_INSERT_TAIL(&leg->link->tx_legs, leg, link_link);
	tx->n_legs++;
	for (uint32_t i = 0; i < order->leg.geom.n_pairs; i++)
		leg->groups |= 1u << order->leg.geom.src[order->leg.geom.pairs[i].src_entry].group;
	find_alike(tx, leg);
	kvp_tx_dirty(tx);
}

void kvp_tx_start(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_tx *tx = tx_find(lane, id);
	struct kvp_chunk *chunk;
	struct kvp_tx_leg *leg;

	if (!tx || tx->started || tx->failed || tx->ended)
		return;

	tx->started = true;
	tx->local_tokens = kvp_tx_local_tokens(tx);
	TAILQ_FOREACH (chunk, &tx->chunks, link)
		chunk_count(tx, chunk);
	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		leg_enter(leg, TAILQ_FIRST(&tx->chunks));
	advance_fence(tx);
	kvp_tx_kick_all(tx);
	kvp_tx_dirty(tx);
}

void kvp_tx_leg_unlink(struct kvp_tx_leg *leg)
{
	kvp_tx_leg_drop(leg);
	if (!leg->link)
		return;

	TAILQ_REMOVE(&leg->link->tx_legs, leg, link_link);
	leg->link = NULL;
	kvp_tx_dirty(leg->tx);
}

/* Quiet follows from kvp_tx_settle() when the transport has let go of every piece. */
void kvp_tx_end(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_tx *tx = tx_find(lane, id);

	if (!tx || tx->ended)
		return;

	tx->ended = true;
	drop_all(tx);
	kvp_tx_dirty(tx);
}

static void leg_free(struct kvp_tx_leg *leg)
{
	if (leg->link)
		TAILQ_REMOVE(&leg->link->tx_legs, leg, link_link);
	TAILQ_REMOVE(&leg->tx->legs, leg, tx_link);
	free(leg->windows);
	kvp_order_free(&leg->order->order);
	free(leg);
}

void kvp_tx_leave(struct kvp_tx *tx)
{
	struct kvp_lane *lane = tx->lane;
	struct kvp_board *board = tx->order->board;

	kvp_lane_pool_put(lane, tx->pool);
	atomic_store_explicit(&board->source_free, tx->next_seq, memory_order_release);
	kvp_order_free(&tx->order->order);
	free(tx);
	kvp_board_wait(board, KVP_WAITS_NOTHING, lane->now_ns);
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

/* A GPU may still read the source: it leaves when that is over. */
static void tx_free(struct kvp_tx *tx)
{
	struct kvp_lane *lane = tx->lane;
	struct kvp_tx_leg *leg;
	struct kvp_chunk *chunk;

	while ((leg = TAILQ_FIRST(&tx->legs)))
		leg_free(leg);
	while ((chunk = TAILQ_FIRST(&tx->chunks)))
		chunk_free(tx, chunk);
	kvp_table_remove(&lane->txs, &tx->node);
	tx->ticket = lane->mover.last;
	if (kvp_mover_over(&lane->mover, tx->ticket))
		kvp_tx_leave(tx);
	else
		TAILQ_INSERT_TAIL(&lane->leaving_txs, tx, dirty_link);
}

/* ---- progress -------------------------------------------------------------------------------- */

static bool tx_held(const struct kvp_tx *tx)
{
	const struct kvp_lane *lane = tx->lane;

	return (tx->n_granted &&
		(kvp_lane_held(lane, KVP_HOLD_GATHER) || kvp_lane_held(lane, KVP_HOLD_SEND))) ||
	       (!tx->n_granted && !tx->n_sent && !tx->n_wanted && !tx->unfenced &&
		!TAILQ_EMPTY(&tx->chunks) && kvp_lane_held(lane, KVP_HOLD_WANT));
}

static enum kvp_wait tx_wait(const struct kvp_tx *tx)
{
	const struct kvp_chunk *chunk = TAILQ_FIRST(&tx->chunks);

	if (tx->failed || (!chunk && tx->last_seen))
		return KVP_WAITS_NOTHING;
	if (!chunk)
		return KVP_WAITS_ENGINE;
	if (!tx->started)
		return KVP_WAITS_START;
	if (tx_held(tx))
		return KVP_WAITS_HELD;
	if (tx->n_moving)
		return KVP_WAITS_GPU;
	if (tx->n_sent)
		return KVP_WAITS_LANDED;
	if (tx->n_granted)
		return KVP_WAITS_PACK_SLOT;
	if (tx->n_wanted)
		return KVP_WAITS_GRANT;
	return !chunk->fenced ? KVP_WAITS_FENCE : KVP_WAITS_WINDOW;
}

/* What of the chunks is over; `source_free` and `delivered` only grow, except by a recall, which
 * withdraws only chunks that were neither. */
static void pop_chunks(struct kvp_tx *tx)
{
	struct kvp_board *board = tx->order->board;
	struct kvp_chunk *chunk;
	uint32_t gathered = tx->next_seq;

	while ((chunk = TAILQ_FIRST(&tx->chunks)) && chunk->counted && chunk->fenced &&
	       chunk->to_gather == 0 && chunk->to_land == 0)
		chunk_free(tx, chunk);
	atomic_store_explicit(&board->delivered, chunk ? chunk->order->seq : tx->next_seq,
			      memory_order_release);

	TAILQ_FOREACH (chunk, &tx->chunks, link) {
		if (!chunk->counted || !chunk->fenced || chunk->to_gather > 0) {
			gathered = chunk->order->seq;
			break;
		}
	}
	atomic_store_explicit(&board->source_free, gathered, memory_order_release);
}

static bool tx_quiet(const struct kvp_tx *tx)
{
	const struct kvp_tx_leg *leg;

	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		if (leg->n_order > 0)
			return false;
	return true;
}

void kvp_tx_settle(struct kvp_tx *tx)
{
	struct kvp_lane *lane = tx->lane;
	struct kvp_board *board = tx->order->board;

	if (tx->ended) {
		if (tx_quiet(tx))
			tx_free(tx);
		return;
	}

	if (!tx->failed) {
		pop_chunks(tx);
		if (tx->last_seen && TAILQ_EMPTY(&tx->chunks) &&
		    !(kvp_board_flags(board) & KVP_BOARD_COMPLETE))
			kvp_board_post(board, lane->config.loop, KVP_BOARD_COMPLETE);
	}
	if (tx->moved) {
		kvp_board_progress(board, lane->now_ns);
		kvp_board_post(board, lane->config.loop, 0);
	}
	tx->moved = false;
	kvp_board_wait(board, tx_wait(tx), lane->now_ns);
}
