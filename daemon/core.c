/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core.h"

#include <assert.h>

bool kvp_core_board(struct kvp_core *core, struct kvp_board *board)
{
	switch ((enum kvp_board_kind)board->kind) {
	case KVP_BOARD_POOL:
		kvp_pool_board(board);
		return true;
	case KVP_BOARD_GUEST:
		kvp_pool_guest_board(board);
		return true;
	case KVP_BOARD_FENCE:
		kvp_fence_board(board);
		return true;
	case KVP_BOARD_EP:
		kvp_peers_board(core->peers, board);
		return true;
	case KVP_BOARD_RX:
	case KVP_BOARD_TX:
		kvp_rooms_board(core->rooms, board);
		return true;
	case KVP_BOARD_LANE:
		return false;
	}
	assert(false); /* there is no other kind */
	return false;
}
