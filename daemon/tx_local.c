/* SPDX-License-Identifier: Apache-2.0 */

/* Local mode, the sender's side: the legs of a room move in step, so that one pass over the source
 * rows serves all destinations. */

#include <errno.h>

#include "daemon/copy.h"
#include "daemon/lane_impl.h"
#include "proto/util.h"

/* Legs whose rows are moved by one call. */
struct batch {
	struct kvp_tx_leg *legs[KVP_MOVE_TOGETHER];
	struct kvp_rx_piece pieces[KVP_MOVE_TOGETHER];
	uint32_t n;
	uint64_t bytes; /* moved */
};

void kvp_local_landed(struct kvp_tx_leg *leg, struct kvp_chunk *chunk, struct kvp_rx_piece *piece)
{
	struct kvp_tx *tx = leg->tx;
	struct kvp_board *board = tx->order->board;

	if (piece->leg)
		kvp_rx_local_landed(piece);
	chunk->to_gather--;
	chunk->to_land--;
	kvp_board_add(&board->pieces, 1);
	kvp_board_add(&board->bytes, piece->bytes);
	kvp_board_once(&board->first_data_ns, tx->lane->now_ns);
	atomic_store_explicit(&board->last_landed_ns, tx->lane->now_ns, memory_order_relaxed);
	tx->moved = true;
	kvp_tx_dirty(tx);
}

/* The piece is at its destination. */
static void leg_moved(struct kvp_tx_leg *leg, struct kvp_rx_piece *piece, struct batch *batch)
{
	struct kvp_chunk *chunk = leg->chunk;

	kvp_tx_leg_advance(leg);
	batch->bytes += piece->bytes;
	kvp_local_landed(leg, chunk, piece);
}

/* Bytes that are not rows, moved by the processor: at once. False: they are not right there. */
static bool leg_take_bytes(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
			   uint32_t segment)
{
	const uint8_t *from;

	if (!piece->bytes)
		return true;

	from = kvp_tx_blob(leg->tx, leg->chunk->order, piece->kind, segment) + piece->start;
	(void)kvp_rx_scatter(piece->leg, piece, from, &(uint64_t){ 0 });
	return kvp_local_right_bytes(leg, piece, from);
}

/* The destination's checks; rows go into the batch, everything else is moved here. */
static void leg_take(struct kvp_tx_leg *leg, struct batch *batch)
{
	struct kvp_tx *tx = leg->tx;
	struct kvp_rx_piece *piece = &batch->pieces[batch->n];
	struct kvp_wire_want want;
	uint32_t segment;
	int r;

	kvp_tx_describe(leg, &want, &segment);
	*piece = (struct kvp_rx_piece){ 0 };
	r = kvp_rx_local_accept(tx->lane, tx->local_tokens, &want, piece);
	if (r == -ESTALE) {
		leg->dropped = true; /* the loop ends the room: it has ended that destination */
		return;
	}
	if (r < 0) {
		kvp_tx_fail(tx, KVP__STATUS__STATUS_PROTOCOL,
			    "destination %u refused piece %u of chunk %u", leg->order->dest,
			    want.piece, want.seq);
		return;
	}
	if (kvp_lane_on_gpu(tx->lane) && want.kind != KVP_WIRE_EMPTY) {
		kvp_local_begin(leg, piece, segment);
		batch->bytes += (uint64_t)piece->tokens * tx->token_bytes + piece->bytes;
		return;
	}
	if (want.kind == KVP_WIRE_ROWS) {
		batch->legs[batch->n++] = leg;
		return;
	}
	if (leg_take_bytes(leg, piece, segment))
		leg_moved(leg, piece, batch);
}

/* Is what one leg moved the same at both ends? */
static bool batch_right(const struct batch *batch, uint32_t i, const struct kvp_move_source *source,
			const struct kvp_move *move)
{
	struct kvp_tx_leg *leg = batch->legs[i];
	const struct kvp_rx_piece *piece = &batch->pieces[i];
	struct kvp_part *parts = leg->tx->lane->parts;
	struct kvp_copy_piece src = {
		.leg = move->leg,
		.pool = source->src,
		.start = source->start,
		.tokens = source->tokens,
		.parts = parts,
	};
	struct kvp_copy_piece dst;

	if (!leg->order->leg.sums)
		return true;

	(void)kvp_piece_layout(move->leg, piece->set, source->start, piece->tokens, parts,
			       &src.n_parts);
	dst = src;
	dst.pool = move->dst;
	return kvp_local_right(leg, piece, &src, &dst);
}

static void batch_move(struct kvp_tx *tx, struct batch *batch)
{
	const struct kvp_order_chunk *chunk = batch->legs[0]->chunk->order;
	uint32_t n_entries = KVP_MIN(tx->pool->order->n_entries, KVP_LANE_MASK_WORDS * 64);
	struct kvp_side sides[KVP_LANE_GROUPS];
	const struct kvp_move_source source = {
		.src = { tx->pool->order->fd_maps, sides },
		.mask = chunk->entry_set,
		.n_entries = n_entries,
		.start = batch->pieces[0].start,
		.tokens = batch->pieces[0].tokens,
	};
	struct kvp_leg_geom geoms[KVP_MOVE_TOGETHER];
	struct kvp_move moves[KVP_MOVE_TOGETHER];
	uint64_t begin_ns = kvp_lane_now();

	for (uint32_t i = 0; i < batch->n; i++) {
		const struct kvp_rx_leg *to = batch->pieces[i].leg;

		kvp_tx_sides(batch->legs[i], chunk, sides);
		/* Each end knows the addresses and strides of its own entries only. */
		geoms[i] = to->geom.geom;
		geoms[i].src = batch->legs[i]->order->leg.geom.src;
		moves[i] = (struct kvp_move){
			.leg = &geoms[i],
			.dst = { to->rx->pool->order->fd_maps, to->rx->order->sides },
		};
	}
	kvp_move(&source, moves, batch->n);
	kvp_board_add(&tx->order->board->gather_ns, kvp_lane_now() - begin_ns);
	/* One that is not right ends the room: what else was moved counts no more. */
	for (uint32_t i = 0; i < batch->n; i++)
		if (!batch_right(batch, i, &source, &moves[i]))
			return;
	for (uint32_t i = 0; i < batch->n; i++) {
		batch->pieces[i].bytes = kvp_move_bytes(&source, &moves[i]);
		leg_moved(batch->legs[i], &batch->pieces[i], batch);
	}
}

static bool leg_has_work(const struct kvp_tx_leg *leg)
{
	return leg->local && !leg->dropped && leg->chunk && leg->chunk->fenced;
}

static uint64_t leg_place(const struct kvp_tx_leg *leg)
{
	return (uint64_t)leg->chunk->order->seq << 32 | leg->piece;
}

/* One piece of each of the legs that are furthest behind; false when no leg has one. */
static bool tx_step(struct kvp_tx *tx, struct batch *batch)
{
	struct kvp_tx_leg *leg;
	uint64_t place = UINT64_MAX;
	uint32_t n = 0;

	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		if (leg_has_work(leg))
			place = KVP_MIN(place, leg_place(leg));
	if (place == UINT64_MAX)
		return false;

	batch->n = 0;
	TAILQ_FOREACH (leg, &tx->legs, tx_link) {
		if (n == KVP_MOVE_TOGETHER || tx->failed)
			break;
		if (!leg_has_work(leg) || leg_place(leg) != place)
			continue;
		leg_take(leg, batch);
		n++;
	}
	if (batch->n > 0 && !tx->failed)
		batch_move(tx, batch);
	return true;
}

static bool local_held(const struct kvp_lane *lane)
{
	return kvp_lane_held(lane, KVP_HOLD_WANT) || kvp_lane_held(lane, KVP_HOLD_GRANT) ||
	       kvp_lane_held(lane, KVP_HOLD_GATHER) || kvp_lane_held(lane, KVP_HOLD_SEND) ||
	       kvp_lane_held(lane, KVP_HOLD_SCATTER) || kvp_lane_held(lane, KVP_HOLD_LANDED);
}

/* A GPU takes a step's pieces only while there is room for all of them. */
static bool local_room(struct kvp_lane *lane)
{
	return !kvp_lane_on_gpu(lane) ||
	       (lane->n_local_free >= KVP_MOVE_TOGETHER && kvp_local_place(lane));
}

/* Rooms in turns, a step each. */
uint32_t kvp_tx_local(struct kvp_lane *lane)
{
	uint64_t most = kvp_lane_on_gpu(lane) ? KVP_LANE_TURN_GPU_BYTES : KVP_LANE_TURN_LOCAL_BYTES;
	struct batch batch;
	struct kvp_tx *tx;
	uint32_t n = 0;

	if (TAILQ_EMPTY(&lane->local) || local_held(lane))
		return 0;

	batch.bytes = 0;
	while (batch.bytes < most && n < KVP_LANE_TURN_WANTS && local_room(lane) &&
	       (tx = TAILQ_FIRST(&lane->local))) {
		bool more = tx_step(tx, &batch);

		n++;
		if (!tx->local_queued) /* it has failed */
			continue;
		TAILQ_REMOVE(&lane->local, tx, local_link);
		if (more)
			TAILQ_INSERT_TAIL(&lane->local, tx, local_link);
		else
			tx->local_queued = false;
	}
	return n;
}
