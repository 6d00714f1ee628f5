/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_hostile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/util.h"
#include "tests/support_events.h"

/* ---- the transport --------------------------------------------------------------------------- */

static void *on_message(void *arg, const void *hdr, size_t hdr_bytes, size_t bytes)
{
	struct hostile *h = arg;
	const struct kvp_wire_grant *grant = hdr;
	union kvp_wire_msg *got = &h->got[h->n_got];

	LT_REQUIRE(hdr_bytes <= sizeof(*got));
	if (grant->head.type == KVP_WIRE_GRANT) {
		memcpy(&h->key, grant->key, sizeof(h->key));
		h->has_key = true;
	}
	if (bytes == 0 && h->n_got < KVP_ARRAY_SIZE(h->got)) {
		memset(got, 0, sizeof(*got));
		memcpy(got, hdr, hdr_bytes);
		h->n_got++;
	}
	if (bytes > 0 && grant->head.type == KVP_WIRE_DATA && h->n_data < KVP_ARRAY_SIZE(h->data))
		h->data[h->n_data++] = ((const struct kvp_wire_data *)hdr)->token;
	return NULL;
}

static void on_sent(void *arg, void *req, int status)
{
	struct hostile *h = arg;

	(void)status;
	free(req);
	h->n_sent_back++;
}

static const struct kvp_net_events events = { on_message, events_no_data,   events_no_lost,
					      on_sent,    events_no_failed, events_no_closed,
					      NULL };

void hostile_progress(struct hostile *h)
{
	while (h->ops->progress(h->net) > 0)
		;
}

void hostile_send(struct hostile *h, const void *hdr, size_t hdr_bytes)
{
	int r;

	do {
		r = h->ops->send(h->net, h->ep, hdr, hdr_bytes, NULL, 0, NULL);
		hostile_progress(h);
	} while (r == -EAGAIN);
	LT_REQUIRE(r == 0);
	hostile_progress(h);
}

/* ---- waits ----------------------------------------------------------------------------------- */

struct answer_wait {
	struct hostile *h;
	enum kvp_wire_type type;
	union kvp_wire_msg *out;
};

static bool has_answer(void *arg)
{
	struct answer_wait *wait = arg;
	struct hostile *h = wait->h;

	hostile_progress(h);
	for (uint32_t i = 0; i < h->n_got; i++) {
		if (h->got[i].head.type != wait->type)
			continue;
		*wait->out = h->got[i];
		h->n_got--;
		memmove(&h->got[i], &h->got[i + 1], (h->n_got - i) * sizeof(h->got[0]));
		return true;
	}
	return false;
}

union kvp_wire_msg hostile_wait(struct hostile *h, enum kvp_wire_type type)
{
	union kvp_wire_msg msg;
	struct answer_wait wait = { h, type, &msg };

	lt_wait_until(&h->lt, has_answer, &wait, "an answer of the lane");
	return msg;
}

struct board_wait {
	struct hostile *h;
	struct kvp_board *board;
	uint32_t flags;
};

static bool board_has(void *arg)
{
	struct board_wait *wait = arg;

	hostile_progress(wait->h);
	return kvp_board_flags(wait->board) & wait->flags;
}

void hostile_wait_board(struct hostile *h, struct kvp_board *board, uint32_t flags)
{
	struct board_wait wait = { h, board, flags };

	lt_wait_until(&h->lt, board_has, &wait, "a board");
}

/* ---- life ------------------------------------------------------------------------------------ */

struct hostile *hostile_begin(const struct kvp_lane_config *lane)
{
	struct hostile *h = lt_alloc(1, sizeof(*h));

	lt_begin(&h->lt);
	h->lane = lt_lane(&h->lt, lane);
	return h;
}

static void lane_endpoint(struct hostile *h)
{
	struct kvp_order_ep *order = lt_alloc(1, sizeof(*order));
	uint8_t addr[KVP_NET_ADDR_MAX];
	int n = h->ops->address(h->net, addr, sizeof(addr));

	LT_REQUIRE(n > 0);
	kvp_board_init(&h->ep_board, KVP_BOARD_EP, lt_id(&h->lt));
	order->order.type = KVP_ORDER_EP_ADD;
	order->board = &h->ep_board;
	order->session = 1;
	order->addr_bytes = (uint32_t)n;
	order->addr = lt_alloc(1, (size_t)n);
	memcpy(order->addr, addr, (size_t)n);
	kvp_lane_order(h->lane, &order->order);
	h->pipe.a.id = h->pipe.b.id = h->ep_board.id;
}

void hostile_open(struct hostile *h, const struct kvp_net_ops *ops, struct kvp_net_config config,
		  const struct kvp_net_memory *memory)
{
	char err[256] = "";
	uint32_t bytes;
	const void *addr = kvp_lane_address(h->lane, &bytes);

	h->ops = ops;
	config.events = &events;
	config.arg = h;
	LT_REQUIRE(ops->open(&h->net, &config, err, sizeof(err)) == 0, "%s", err);
	if (memory)
		LT_REQUIRE(ops->memory(h->net, memory, err, sizeof(err)) == 0, "%s", err);
	LT_REQUIRE(ops->ep_open(h->net, addr, bytes, 0, NULL, &h->ep) == 0);
	lane_endpoint(h);
}

void hostile_end(struct hostile *h)
{
	lt_order_id(h->lane, KVP_ORDER_EP_END, h->ep_board.id, 0);
	h->ops->ep_close(h->net, h->ep);
	hostile_wait_board(h, &h->ep_board, KVP_BOARD_QUIET);
	lt_pool_end(&h->src);
	lt_pool_end(&h->dst);
	h->ops->close(h->net);
	free(h->memory);
	lt_end(&h->lt);
	free(h);
}

/* ---- rooms ----------------------------------------------------------------------------------- */

void hostile_room(struct hostile *h, uint64_t end, uint64_t slot_bytes, uint32_t piece_tokens)
{
	h->room = (struct lt_room){ .lt = &h->lt,
				    .room = 42,
				    .end = end,
				    .n_senders = 1,
				    .n_dests = 1,
				    .meta_from = -1,
				    .slot_bytes = slot_bytes,
				    .piece_tokens = piece_tokens,
				    .pipe = &h->pipe };
	h->room.senders[0].pool = &h->src;
	h->room.dests[0].pool = &h->dst;
	h->n_got = 0;
}

void hostile_begin_tx(struct hostile *h)
{
	for (uint32_t d = 0; d < h->room.n_dests; d++)
		kvp_board_init(&h->room.dests[d].board, KVP_BOARD_RX, lt_id(&h->lt));
	lt_room_begin_tx(&h->room, 0);
	lt_room_start_tx(&h->room, 0);
}

void hostile_end_tx(struct hostile *h)
{
	struct kvp_board *board = &h->room.senders[0].board;

	lt_order_id(h->lane, KVP_ORDER_TX_END, board->id, 0);
	hostile_wait_board(h, board, KVP_BOARD_QUIET);
}
