/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The first piece of an idle leg goes with its want: for a small chunk this saves the round trip of
 * want and grant. The slot is kept until the piece has landed, since the receiver may not have had
 * room for it and then grants as ever. A GPU's pieces do not: they are packed only later.
 */

#include "daemon/lane_impl.h"
#include "proto/util.h"

static bool may_go(const struct kvp_tx_piece *piece)
{
	const struct kvp_tx_leg *leg = piece->leg;
	const struct kvp_link *link = leg->link;
	const struct kvp_lane *lane = link->lane;

	/* Legs that pack alike wait for each other, to share the slot. */
	return piece->bytes > 0 && piece->payload <= KVP_WIRE_EAGER_BYTES && leg->n_order == 0 &&
	       !kvp_lane_on_gpu(lane) && !leg->alike->alike_next && link->wants_out == 0 &&
	       link->sending == 0 && !kvp_link_to_send(link) && lane->config.pack &&
	       lane->ahead < lane->pack.n / 2 && !lane->config.net->put &&
	       !kvp_lane_held(lane, KVP_HOLD_GATHER) && !kvp_lane_held(lane, KVP_HOLD_SEND);
}

/* It is in no list yet. If the receiver has no room for it, its slot waits for a grant like those
 * that were packed ahead, and what has been granted must find others. */
static bool pack_now(struct kvp_tx_piece *piece)
{
	bool packed;

	piece->state = KVP_TX_SENT;
	packed = kvp_tx_pack(piece) > 0;
	piece->state = KVP_TX_WANTED;
	if (packed)
		kvp_tx_is_ahead(piece);
	return packed;
}

bool kvp_tx_eager(struct kvp_tx_piece *piece, const struct kvp_wire_want *want)
{
	struct kvp_link *link = piece->leg->link;
	struct kvp_lane *lane = link->lane;
	int r;

	if (!may_go(piece) || !pack_now(piece))
		return false;

	r = lane->config.net->send(lane->net, link->net_ep, want, sizeof(*want), piece->slot->data,
				   piece->payload, piece);
	if (r < 0) {
		kvp_link_refused(link, r);
		kvp_tx_slot_put(piece);
		if (piece->gathered)
			piece->chunk->to_gather++;
		piece->gathered = false;
		return false;
	}
	piece->eager = true;
	piece->sends++;
	link->sending++;
	link->in_flight += piece->payload;
	lane->counts.bytes_sent += piece->payload;
	kvp_board_once(&piece->leg->tx->order->board->first_data_ns, lane->now_ns);
	return true;
}

void kvp_tx_eager_landed(struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;

	piece->leg->link->wants_out--;
	tx->n_wanted--;
	tx->lane->counts.pieces_sent++;
	piece->state = KVP_TX_SENT;
	if (piece->sends == 0)
		kvp_tx_slot_put(piece);
}
