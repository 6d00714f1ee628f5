/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A peer that is played by hand: it speaks to a lane through a transport of its own, and says what
 * a test wants. The lane has a pool of either kind, and one room at a time.
 */

#include "proto/wire.h"
#include "tests/support_lane.h"

struct hostile {
	struct lt lt;
	struct kvp_lane *lane;
	const struct kvp_net_ops *ops; /* of the peer's transport */
	struct kvp_net *net;
	struct kvp_net_ep *ep;
	struct kvp_board ep_board; /* the lane's endpoint to it */
	struct lt_pipe pipe;       /* only its ids are used */
	struct lt_pool src, dst;
	struct lt_room room;
	union kvp_wire_msg got[256]; /* answers, oldest first */
	uint32_t n_got;
	uint32_t n_sent_back;   /* sends that are over */
	struct kvp_net_key key; /* of the last grant */
	bool has_key;
	uint64_t data[64]; /* tokens of payloads, oldest first */
	uint32_t n_data;
	/* The test's own. */
	struct kvp_wire_want want;
	uint8_t *memory; /* of the peer, known to its transport */
	uint32_t n_granted;
	bool whole; /* payloads have their headers behind them: only one at a time in a slot */
};

/* Begins, with a lane. The pools are the test's to make, and ended with the rest. */
struct hostile *hostile_begin(const struct kvp_lane_config *lane);
/* Opens the transport, with `config` but for its events, and an endpoint each way. */
void hostile_open(struct hostile *h, const struct kvp_net_ops *ops, struct kvp_net_config config,
		  const struct kvp_net_memory *memory);
void hostile_end(struct hostile *h);

/* Handles what has come. Of messages with a payload only the token is kept; of a send that is over,
 * `req` is freed. */
void hostile_progress(struct hostile *h);
/* Sends a message without a payload. */
void hostile_send(struct hostile *h, const void *hdr, size_t hdr_bytes);
/* Waits for an answer of that type, and takes it out of `got`. */
union kvp_wire_msg hostile_wait(struct hostile *h, enum kvp_wire_type type);
void hostile_wait_board(struct hostile *h, struct kvp_board *board, uint32_t flags);

/* Prepares the next room, from `src` to `dst`, of as many tokens. */
void hostile_room(struct hostile *h, uint64_t end, uint64_t slot_bytes, uint32_t piece_tokens);
/* Begins and starts its sender, to as many destinations as the room has, for which the peer is to
 * be the receiver. */
void hostile_begin_tx(struct hostile *h);
void hostile_end_tx(struct hostile *h);
