/* SPDX-License-Identifier: Apache-2.0 */

/* Pieces that come with their want: the first of an idle leg, when a slot is free at once. */

#include "daemon/lane_impl.h"
#include "proto/util.h"

/* The piece that this want has just queued, if it may land now. */
static struct kvp_rx_piece *piece_now(struct kvp_lane *lane, const struct kvp_wire_want *want,
				      size_t bytes)
{
	struct kvp_rx_piece *piece = kvp_rx_newest(lane, want);

	if (!piece || piece->state != KVP_RX_QUEUED || piece->cookie != want->cookie ||
	    piece->payload != bytes || TAILQ_FIRST(&piece->leg->queued) != piece)
		return NULL;
	if (kvp_lane_held(lane, KVP_HOLD_GRANT) || kvp_lane_held(lane, KVP_HOLD_SCATTER))
		return NULL;
	return piece->leg->link->share->land_slots < KVP_MAX(lane->land.n / 4, 1u) ? piece : NULL;
}

void *kvp_rx_eager(struct kvp_lane *lane, const struct kvp_wire_want *want, size_t bytes)
{
	struct kvp_rx_piece *piece;
	struct kvp_slot *slot = NULL;

	kvp_rx_want(lane, want);
	piece = piece_now(lane, want, bytes);
	if (piece)
		slot = kvp_ring_take(&lane->land, piece->leg->rx->pool->order->owner_uid,
				     lane->now_ns);
	if (!slot) {
		lane->counts.eager_missed++;
		return NULL;
	}

	kvp_rx_piece_grant(piece->leg, slot, kvp_lane_token(lane));
	if (piece->leg->n_queued == 0)
		kvp_rx_share_forget(piece->leg);
	piece->need = bytes;
	piece->given = bytes;
	piece->receiving = 1;
	kvp_slot_dirty(slot, bytes);
	kvp_board_once(&piece->leg->rx->order->board->first_data_ns, lane->now_ns);
	lane->eager = piece;
	return kvp_slot_place(slot, piece->kind);
}

/*
 * The piece whose bytes came or were lost. A rendezvous, which only a peer of another make asks
 * for, is told of by the place that it was given, and late: other pieces may have come since, and
 * the room of this one may be over.
 */
static struct kvp_rx_piece *piece_at(struct kvp_lane *lane, const void *place)
{
	struct kvp_slot *slot = kvp_ring_at(&lane->land, place);
	struct kvp_rx_piece *piece = slot ? slot->user : lane->eager;

	if (!slot || piece == lane->eager)
		lane->eager = NULL;
	return piece && piece->receiving > 0 ? piece : NULL;
}

void kvp_rx_eager_data(struct kvp_lane *lane, const void *data, size_t bytes)
{
	struct kvp_rx_piece *piece = piece_at(lane, data);

	if (!piece)
		return;

	piece->receiving--;
	if (piece->state == KVP_RX_ORPHAN) {
		kvp_rx_orphan_done(lane, piece);
		return;
	}
	lane->counts.eager++;
	piece->got = bytes;
	if (kvp_lane_held(lane, KVP_HOLD_FLIP_LAND) && kvp_rx_keep(piece, 0, data, bytes))
		data = kvp_slot_place(piece->slot, piece->kind);
	if (!kvp_lane_on_gpu(lane) || kvp_rx_keep(piece, 0, data, bytes))
		kvp_rx_here(lane, piece, data);
}

void kvp_rx_eager_lost(struct kvp_lane *lane, const void *place)
{
	struct kvp_rx_piece *piece = piece_at(lane, place);

	if (piece)
		kvp_rx_piece_lost(lane, piece);
}
