/* SPDX-License-Identifier: Apache-2.0 */

/* Endpoints of a lane, and where messages go. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

struct kvp_link *kvp_link_find(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_table_node *node = kvp_table_find(&lane->eps, id);

	return node ? KVP_CONTAINER_OF(node, struct kvp_link, node) : NULL;
}

static struct kvp_share *share_get(struct kvp_lane *lane, uint64_t session)
{
	struct kvp_table_node *node = kvp_table_find(&lane->shares_by_id, session);
	struct kvp_share *share;

	if (node) {
		share = KVP_CONTAINER_OF(node, struct kvp_share, node);
		share->refs++;
		return share;
	}

	share = calloc(1, sizeof(*share));
	if (!share)
		return NULL;

	share->node.id = session;
	share->refs = 1;
	TAILQ_INIT(&share->legs);
	(void)kvp_table_add(&lane->shares_by_id, &share->node); /* it was not there */
	return share;
}

void kvp_share_put(struct kvp_lane *lane, struct kvp_share *share)
{
	if (--share->refs > 0)
		return;

	if (share->queued)
		TAILQ_REMOVE(&lane->shares, share, link);
	kvp_table_remove(&lane->shares_by_id, &share->node);
	free(share);
}

static void link_free(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	struct kvp_return *ret;

	while ((ret = STAILQ_FIRST(&link->returns))) {
		STAILQ_REMOVE_HEAD(&link->returns, link);
		free(ret);
	}
	free(link->blocks);
	TAILQ_REMOVE(&lane->links, link, link);
	kvp_table_remove(&lane->eps, &link->node);
	kvp_share_put(lane, link->share);
	free(link->order->addr);
	free(link->order);
	free(link);
}

/* The transport has let go. Legs lose the link only now: until here each send of theirs could end.
 */
static void link_over(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	struct kvp_board *board = link->order->board;
	struct kvp_rx_leg *rx_leg;
	struct kvp_tx_leg *tx_leg;

	while ((rx_leg = TAILQ_FIRST(&link->rx_legs)))
		kvp_rx_leg_unlink(rx_leg);
	while ((tx_leg = TAILQ_FIRST(&link->tx_legs)))
		kvp_tx_leg_unlink(tx_leg);
	kvp_rx_safe(link, 0, 0);
	link_free(link);
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

static void link_fail(struct kvp_link *link, Kvp__Status status, const char *what, int err)
{
	struct kvp_lane *lane = link->lane;

	(void)kvp_board_fail(link->order->board, lane->config.loop, status, "%s: %s", what,
			     strerror(err < 0 ? -err : err));
	if (link->state == KVP_LINK_OPEN)
		link->state = KVP_LINK_BROKEN;
}

static void link_close(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;

	if (!link->net_ep) {
		link->state = KVP_LINK_CLOSED;
		return;
	}
	link->state = KVP_LINK_CLOSING;
	lane->links_closing++;
	kvp_lane_call(lane, "endpoint close");
	lane->config.net->ep_close(lane->net, link->net_ep);
	kvp_lane_call(lane, NULL);
}

static void link_open(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	int r;

	if (!lane->net) {
		link_fail(link, KVP__STATUS__STATUS_UNSUPPORTED, "lane without transport",
			  EOPNOTSUPP);
		return;
	}
	kvp_lane_call(lane, "endpoint open");
	r = lane->config.net->ep_open(lane->net, link->order->addr, link->order->addr_bytes,
				      link->order->number, link, &link->net_ep);
	kvp_lane_call(lane, NULL);
	if (r < 0)
		link_fail(link, KVP__STATUS__STATUS_TRANSPORT, "no data endpoint to the peer", r);
}

void kvp_link_add(struct kvp_lane *lane, struct kvp_order_ep *order)
{
	struct kvp_link *link = calloc(1, sizeof(*link));
	struct kvp_share *share = link ? share_get(lane, order->session) : NULL;
	struct kvp_board *board = order->board;

	if (!share) {
		free(link);
		kvp_order_free(&order->order);
		(void)kvp_board_fail(board, lane->config.loop, KVP__STATUS__STATUS_NO_MEMORY,
				     "lane %s has no memory", lane->config.name);
		kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
		return;
	}

	link->order = order;
	link->lane = lane;
	link->share = share;
	link->node.id = board->id;
	TAILQ_INIT(&link->landed);
	TAILQ_INIT(&link->at_risk);
	TAILQ_INIT(&link->refusals);
	TAILQ_INIT(&link->rx_legs);
	TAILQ_INIT(&link->ready);
	TAILQ_INIT(&link->wanted);
	TAILQ_INIT(&link->granted);
	TAILQ_INIT(&link->packed);
	TAILQ_INIT(&link->tx_legs);
	STAILQ_INIT(&link->returns);
	STAILQ_INIT(&link->free_blocks);
	(void)kvp_table_add(&lane->eps, &link->node); /* ids are never reused */
	TAILQ_INSERT_TAIL(&lane->links, link, link);
	link_open(link);
}

void kvp_link_end(struct kvp_lane *lane, uint64_t id)
{
	struct kvp_link *link = kvp_link_find(lane, id);
	struct kvp_tx_leg *leg;

	if (!link || link->ended)
		return;

	link->ended = true;
	TAILQ_FOREACH (leg, &link->tx_legs, link_link)
		kvp_tx_leg_drop(leg);
	if (link->state == KVP_LINK_OPEN || link->state == KVP_LINK_BROKEN)
		link_close(link);
	if (link->state == KVP_LINK_CLOSED)
		link_over(link);
}

void kvp_link_refused(struct kvp_link *link, int status)
{
	link->full = true;
	if (status != -EAGAIN)
		link_fail(link, KVP__STATUS__STATUS_TRANSPORT, "send to the peer", status);
}

int kvp_link_send(struct kvp_link *link, const void *msg, size_t bytes)
{
	int r;

	if (!kvp_link_open(link))
		return -EAGAIN;

	r = link->lane->config.net->send(link->lane->net, link->net_ep, msg, bytes, NULL, 0, NULL);
	if (r < 0) {
		kvp_link_refused(link, r);
		return -EAGAIN;
	}
	return 0;
}

/* Without memory the peer keeps the slots until it ends the leg itself. */
void kvp_link_return(struct kvp_link *link, uint64_t generation, uint32_t sender)
{
	struct kvp_return *ret;

	if (!link || link->ended || link->state != KVP_LINK_OPEN)
		return;

	ret = calloc(1, sizeof(*ret));
	if (!ret)
		return;

	ret->generation = generation;
	ret->sender = sender;
	STAILQ_INSERT_TAIL(&link->returns, ret, link);
}

uint32_t kvp_link_tend(struct kvp_link *link)
{
	struct kvp_return *ret;
	uint32_t n = 0;

	if (link->state == KVP_LINK_BROKEN) {
		link_close(link);
		n++;
	}
	while ((ret = STAILQ_FIRST(&link->returns))) {
		const struct kvp_wire_return msg = {
			.head = kvp_wire_head(KVP_WIRE_RETURN),
			.generation = ret->generation,
			.sender = ret->sender,
		};

		if (link->state == KVP_LINK_OPEN && kvp_link_send(link, &msg, sizeof(msg)) < 0)
			break;
		STAILQ_REMOVE_HEAD(&link->returns, link);
		free(ret);
		n++;
	}
	return n;
}

/* ---- what the transport reports -------------------------------------------------------------- */

static const size_t msg_bytes[] = {
	[KVP_WIRE_WANT] = sizeof(struct kvp_wire_want),
	[KVP_WIRE_GRANT] = sizeof(struct kvp_wire_grant),
	[KVP_WIRE_DATA] = sizeof(struct kvp_wire_data),
	[KVP_WIRE_LANDED] = sizeof(struct kvp_wire_landed),
	[KVP_WIRE_RETURN] = sizeof(struct kvp_wire_return),
	[KVP_WIRE_REFUSE] = sizeof(struct kvp_wire_refuse),
	[KVP_WIRE_WINDOW] = sizeof(struct kvp_wire_window),
	[KVP_WIRE_RUNS] = sizeof(struct kvp_wire_runs),
	[KVP_WIRE_WRITTEN] = sizeof(struct kvp_wire_written),
};

/* Is it as long as such a message? */
static bool is_whole(const union kvp_wire_msg *msg, size_t bytes)
{
	if (msg->head.type == KVP_WIRE_GRANT && bytes == KVP_WIRE_GRANT_LANDING_BYTES)
		return msg->grant.mode == KVP_WIRE_LANDING;
	return msg_bytes[msg->head.type] == bytes;
}

/* Copies a header into aligned memory; returns its type, 0 if it is none of ours. */
static unsigned parse(union kvp_wire_msg *msg, const void *hdr, size_t bytes)
{
	unsigned type;

	if (bytes < sizeof(msg->head) || bytes > sizeof(*msg))
		return 0;

	memset(msg, 0, sizeof(*msg));
	memcpy(msg, hdr, bytes);
	type = msg->head.type;
	if (msg->head.magic != KVP_WIRE_MAGIC || type >= KVP_ARRAY_SIZE(msg_bytes) ||
	    !is_whole(msg, bytes))
		return 0;
	return type;
}

static void *on_message(void *arg, const void *hdr, size_t hdr_bytes, size_t bytes)
{
	struct kvp_lane *lane = arg;
	union kvp_wire_msg msg;
	unsigned type = parse(&msg, hdr, hdr_bytes);

	/* A transport that writes has no place for a payload before its grant. */
	if (type == KVP_WIRE_WANT && bytes > 0 && !lane->config.net->put)
		return kvp_rx_eager(lane, &msg.want, bytes);
	if ((type == KVP_WIRE_DATA) != (bytes > 0))
		type = 0;

	switch (type) {
	case KVP_WIRE_DATA:
		return kvp_rx_message(lane, &msg.data, bytes);
	case KVP_WIRE_WANT:
		kvp_rx_want(lane, &msg.want);
		break;
	case KVP_WIRE_GRANT:
		kvp_tx_grant(lane, &msg.grant);
		break;
	case KVP_WIRE_LANDED:
		kvp_tx_landed(lane, &msg.landed);
		break;
	case KVP_WIRE_RETURN:
		kvp_rx_return(lane, &msg.ret);
		break;
	case KVP_WIRE_REFUSE:
		kvp_tx_refuse(lane, &msg.refuse);
		break;
	case KVP_WIRE_WINDOW:
		kvp_tx_window(lane, &msg.window);
		break;
	case KVP_WIRE_RUNS:
		kvp_tx_runs(lane, &msg.runs);
		break;
	case KVP_WIRE_WRITTEN:
		kvp_rx_written(lane, &msg.written);
		break;
	default:
		lane->counts.bad_messages++;
		break;
	}
	return NULL;
}

/* Only messages that on_message() accepted come here: DATA, and WANT. */
static void on_data(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes)
{
	union kvp_wire_msg msg;
	unsigned type = parse(&msg, hdr, hdr_bytes);

	if (type == KVP_WIRE_DATA)
		kvp_rx_data(arg, &msg.data, data, bytes);
	else if (type == KVP_WIRE_WANT)
		kvp_rx_eager_data(arg, data, bytes);
}

static void on_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place)
{
	union kvp_wire_msg msg;
	unsigned type = parse(&msg, hdr, hdr_bytes);

	if (type == KVP_WIRE_DATA)
		kvp_rx_lost(arg, &msg.data);
	else if (type == KVP_WIRE_WANT)
		kvp_rx_eager_lost(arg, place);
}

static void on_sent(void *arg, void *req, int status)
{
	kvp_tx_sent(arg, req, status);
}

static void on_failed(void *arg, struct kvp_net_ep *ep, int status)
{
	struct kvp_lane *lane = arg;
	const struct kvp_net_ops *net = lane->config.net;
	const char *reason = net->ep_reason ? net->ep_reason(ep) : "";
	char what[192];

	(void)snprintf(what, sizeof(what), "data endpoint lost%s%s", reason[0] ? ": " : "",
		       reason); /* cut at worst */
	link_fail(net->ep_arg(ep), KVP__STATUS__STATUS_PEER_LOST, what, status);
}

static void on_closed(void *arg, void *ep_arg)
{
	struct kvp_lane *lane = arg;
	struct kvp_link *link = ep_arg;

	lane->links_closing--;
	link->net_ep = NULL;
	link->state = KVP_LINK_CLOSED;
	if (link->ended)
		link_over(link);
}

static bool on_admits(void *arg, uint64_t number)
{
	const struct kvp_lane *lane = arg;

	return !lane->config.admits || kvp_admits_has(lane->config.admits, number);
}

const struct kvp_net_events kvp_lane_events = {
	.message = on_message,
	.data = on_data,
	.lost = on_lost,
	.sent = on_sent,
	.failed = on_failed,
	.closed = on_closed,
	.admits = on_admits,
};
