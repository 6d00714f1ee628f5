/* SPDX-License-Identifier: Apache-2.0 */

/* Local mode on a GPU: pieces move by launches, several of a leg at a time; both ends count one
 * when its launch is over. */

#include <errno.h>
#include <string.h>

#include "daemon/copy.h"
#include "daemon/lane_impl.h"
#include "proto/util.h"

void kvp_local_begin(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece, uint32_t segment)
{
	struct kvp_lane *lane = leg->tx->lane;
	struct kvp_local_move *move = TAILQ_FIRST(&lane->local_free); /* the caller has looked */

	TAILQ_REMOVE(&lane->local_free, move, link);
	lane->n_local_free--;
	*move = (struct kvp_local_move){
		.leg = leg,
		.chunk = leg->chunk,
		.piece = *piece,
		.segment = segment,
	};
	/* Until it has landed, the destination's leg is not over. */
	piece->leg->n_order++;
	piece->leg->rx->n_moving++;
	leg->tx->n_moving++;
	TAILQ_INSERT_TAIL(&lane->local_moving, move, link);
	kvp_tx_leg_advance(leg);
	kvp_tx_dirty(leg->tx);
	kvp_rx_dirty(piece->leg->rx);
	(void)kvp_local_place(lane); /* else later */
}

static int rows_place(struct kvp_lane *lane, struct kvp_local_move *move)
{
	struct kvp_tx *tx = move->leg->tx;
	const struct kvp_order_chunk *chunk = move->chunk->order;
	const struct kvp_rx_leg *to = move->piece.leg;
	struct kvp_side sides[KVP_LANE_GROUPS];
	const uint32_t n_entries = KVP_MIN(tx->pool->order->n_entries, KVP_LANE_MASK_WORDS * 64);
	const struct kvp_move_source source = {
		.src = { tx->pool->order->fd_maps, sides },
		.mask = chunk->entry_set,
		.n_entries = n_entries,
		.start = move->piece.start,
		.tokens = move->piece.tokens,
	};
	/* Each end knows the addresses and strides of its own entries only. */
	struct kvp_leg_geom geom = to->geom.geom;
	const struct kvp_move rows = {
		.leg = &geom,
		.dst = { to->rx->pool->order->fd_maps, to->rx->order->sides },
	};

	geom.src = move->leg->order->leg.geom.src;
	kvp_tx_sides(move->leg, chunk, sides);
	move->piece.bytes = kvp_move_bytes(&source, &rows);
	return kvp_mover_move(&lane->mover, &source, &rows, &move->ticket);
}

static int move_place(struct kvp_lane *lane, struct kvp_local_move *move)
{
	if (move->piece.kind == KVP_WIRE_ROWS)
		return rows_place(lane, move);
	return kvp_rx_scatter(
		move->piece.leg, &move->piece,
		kvp_tx_blob(move->leg->tx, move->chunk->order, move->piece.kind, move->segment) +
			move->piece.start,
		&move->ticket);
}

static void move_free(struct kvp_lane *lane, struct kvp_local_move *move)
{
	TAILQ_REMOVE(&lane->local_moving, move, link);
	TAILQ_INSERT_HEAD(&lane->local_free, move, link);
	lane->n_local_free++;
}

bool kvp_local_place(struct kvp_lane *lane)
{
	struct kvp_local_move *move = TAILQ_LAST(&lane->local_moving, kvp_local_moves), *before;
	int r;

	/* Those not placed are at the end of the list. */
	while (move && !move->placed && (before = TAILQ_PREV(move, kvp_local_moves, link)) &&
	       !before->placed)
		move = before;
	while (move && !move->placed) {
		move->skipped = !move->leg || !move->piece.leg;
		r = move->skipped ? 0 : move_place(lane, move);
		if (r == -EAGAIN)
			return false;
		if (r < 0) {
			kvp_tx_move_failed(move->leg->tx, r); /* forgets its moves */
			continue;
		}
		move->placed = true;
		move = TAILQ_NEXT(move, link);
	}
	return true;
}

/* What was never launched needs no place either: kvp_local_place() passes it, and it moves nothing.
 */
void kvp_local_forget(struct kvp_lane *lane, const struct kvp_tx_leg *tx,
		      const struct kvp_rx_leg *rx)
{
	struct kvp_local_move *move;

	TAILQ_FOREACH (move, &lane->local_moving, link) {
		if (tx && move->leg == tx) {
			move->leg->tx->n_moving--;
			move->leg = NULL;
		}
		if (rx && move->piece.leg == rx) {
			move->piece.leg->n_order--;
			move->piece.leg->rx->n_moving--;
			move->piece.leg = NULL;
		}
	}
}

static void move_landed(struct kvp_lane *lane, struct kvp_local_move *move)
{
	struct kvp_tx_leg *leg = move->leg;
	struct kvp_rx_piece piece = move->piece;
	struct kvp_chunk *chunk = move->chunk;

	move_free(lane, move);
	if (piece.leg) {
		piece.leg->rx->n_moving--;
		if (move->skipped)
			return; /* it is missing there, so that the leg is never over */
		piece.leg->n_order--;
	}
	if (leg) {
		leg->tx->n_moving--;
		kvp_local_landed(leg, chunk, &piece);
	} else if (piece.leg) {
		kvp_rx_local_landed(&piece);
	}
}

uint32_t kvp_local_moved(struct kvp_lane *lane)
{
	struct kvp_local_move *move;
	uint32_t n = 0;

	while ((move = TAILQ_FIRST(&lane->local_moving)) && move->placed &&
	       kvp_mover_over(&lane->mover, move->ticket)) {
		move_landed(lane, move);
		n++;
	}
	return n;
}
