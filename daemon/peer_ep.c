/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <utlist.h>

#include "daemon/peer_internal.h"

static void ep_free(struct kvp_peer_ep *ep)
{
	DL_DELETE(ep->peers->eps, ep);
	free(ep->addr);
	free(ep->end);
	free(ep);
}

static void ep_freep(struct kvp_peer_ep **ep)
{
	if (!*ep)
		return;
	free((*ep)->addr);
	free((*ep)->end);
	free(*ep);
}

static struct kvp_peer_ep *ep_find(struct kvp_peer *peer, uint32_t lane_idx, uint32_t peer_lane)
{
	struct kvp_peer_ep *ep;

	DL_FOREACH (peer->peers->eps, ep) {
		if (ep->peer == peer && ep->lane_idx == lane_idx && ep->peer_lane == peer_lane)
			return ep;
	}
	return NULL;
}

static int ep_order_add(struct kvp_peer_ep *ep)
{
	struct kvp_order_ep *order = calloc(1, sizeof(*order));
	uint8_t *addr = malloc(ep->addr_bytes);

	if (!order || !addr) {
		free(order);
		free(addr);
		return -ENOMEM;
	}
	memcpy(addr, ep->addr, ep->addr_bytes);
	order->order.type = KVP_ORDER_EP_ADD;
	order->board = &ep->board;
	order->session = ep->peer->session;
	order->number = ep->peer->number;
	order->addr_bytes = ep->addr_bytes;
	order->addr = addr;
	kvp_lane_order(ep->peers->lanes[ep->lane_idx], &order->order);
	return 0;
}

static int ep_new(struct kvp_peer *peer, uint32_t lane_idx, uint32_t peer_lane, const void *addr,
		  uint32_t addr_bytes, struct kvp_peer_ep **out)
{
	KVP_CLEANUP(ep_freep) struct kvp_peer_ep *ep = calloc(1, sizeof(*ep));
	struct kvp_peers *peers = peer->peers;
	int r;

	if (!ep)
		return -ENOMEM;
	ep->addr = malloc(addr_bytes);
	ep->end = calloc(1, sizeof(*ep->end));
	if (!ep->addr || !ep->end)
		return -ENOMEM;
	memcpy(ep->addr, addr, addr_bytes);
	ep->addr_bytes = addr_bytes;
	ep->peer = peer;
	ep->peers = peers;
	ep->lane_idx = lane_idx;
	ep->peer_lane = peer_lane;
	kvp_board_init(&ep->board, KVP_BOARD_EP, ++peers->next_ep);
	r = ep_order_add(ep);
	if (r < 0)
		return r;
	peer->endpoints++;
	DL_APPEND(peers->eps, ep);
	*out = KVP_TAKE(ep);
	return 0;
}

int kvp_peer_endpoint(struct kvp_peer *peer, uint32_t lane_idx, uint32_t peer_lane,
		      const void *addr, uint32_t addr_bytes, uint64_t *ep_id)
{
	struct kvp_peer_ep *ep;
	int r;

	if (peer->self && peer_lane == lane_idx) {
		*ep_id = 0;
		return 0;
	}
	if (peer->state != KVP_PEER_UP)
		return -ENOTCONN;
	if (addr_bytes == 0 || lane_idx >= peer->peers->n_lanes)
		return -EINVAL;
	ep = ep_find(peer, lane_idx, peer_lane);
	if (ep && (ep->addr_bytes != addr_bytes || memcmp(ep->addr, addr, addr_bytes) != 0))
		return -EPROTO; /* a lane's address never changes within a session */
	if (!ep) {
		r = ep_new(peer, lane_idx, peer_lane, addr, addr_bytes, &ep);
		if (r < 0)
			return r;
	}
	*ep_id = ep->board.id;
	return 0;
}

void kvp_peer_count_rails(const struct kvp_peer *peer, struct kvp_peer_view *view)
{
	const struct kvp_peer_ep *ep;

	DL_FOREACH (peer->peers->eps, ep) {
		if (ep->peer != peer)
			continue;
		view->rails_open +=
			atomic_load_explicit(&ep->board.rails_open, memory_order_relaxed);
		view->rails += atomic_load_explicit(&ep->board.rails, memory_order_relaxed);
	}
}

void kvp_peer_end_endpoints(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;
	struct kvp_peer_ep *ep;

	DL_FOREACH (peers->eps, ep) {
		if (ep->peer != peer)
			continue;
		ep->peer = NULL;
		ep->end->order.type = KVP_ORDER_EP_END;
		ep->end->id = ep->board.id;
		kvp_lane_order(peers->lanes[ep->lane_idx], &KVP_TAKE(ep->end)->order);
	}
	peer->endpoints = 0;
}

void kvp_peers_board(struct kvp_peers *peers, struct kvp_board *board)
{
	struct kvp_peer_ep *ep = KVP_CONTAINER_OF(board, struct kvp_peer_ep, board);
	uint32_t flags = kvp_board_take(board);

	(void)peers;
	if (flags & KVP_BOARD_FAILED && ep->peer)
		kvp_peer_path_lost(ep->peer, board->text);
	if (flags & KVP_BOARD_QUIET)
		ep_free(ep);
}
