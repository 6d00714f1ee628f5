/* SPDX-License-Identifier: Apache-2.0 */

/* Local mode, the receiver's side: the same checks of the same wants, but nothing lies in a slot.
 */

#include <errno.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

int kvp_rx_local_accept(struct kvp_lane *lane, uint32_t piece_tokens,
			const struct kvp_wire_want *want, struct kvp_rx_piece *piece)
{
	struct kvp_rx_leg *leg = kvp_rx_local_leg(lane, want->generation, want->sender);

	if (!leg)
		return -ESTALE;

	if (leg->piece_tokens == 0)
		leg->piece_tokens = piece_tokens;
	kvp_board_once(&leg->rx->order->board->first_want_ns, lane->now_ns);
	piece->leg = leg;
	return kvp_rx_accept(leg, want, piece);
}

void kvp_rx_local_landed(struct kvp_rx_piece *piece)
{
	struct kvp_rx_leg *leg = piece->leg;
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_board *board = rx->order->board;

	kvp_rx_blob_landed(rx, piece);
	kvp_rx_pass(leg, piece);
	kvp_rx_check_finished(leg);
	lane->counts.pieces_local++;
	lane->counts.bytes_local += piece->bytes;
	if (rx->pool->order->home[0]) {
		lane->counts.pieces_peer++;
		lane->counts.bytes_peer += piece->bytes;
	}
	kvp_board_add(&board->pieces, 1);
	kvp_board_add(&board->bytes, piece->bytes);
	kvp_board_once(&board->first_data_ns, lane->now_ns);
	atomic_store_explicit(&board->last_landed_ns, lane->now_ns, memory_order_relaxed);
	rx->moved = true;
	kvp_rx_dirty(rx);
}
