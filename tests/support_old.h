/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The lane of a daemon of protocol 1.0, played by hand over a transport of its own: its messages
 * are as long as they were then, and it takes none that is longer. One piece at a time.
 */

#include <stdint.h>

#include "daemon/net.h"
#include "proto/wire.h"

#define OLD_GRANT_BYTES 72u

struct old_lane {
	struct kvp_net *net;
	struct kvp_net_ep *ep;
	uint8_t address[KVP_NET_ADDR_MAX];
	uint32_t address_bytes;
	union kvp_wire_msg got; /* the last message without a payload that it can read */
	uint32_t n_got, n_strange, n_payloads, n_sent;
	uint8_t *payload; /* of the last DATA, owned */
	uint64_t payload_bytes;
};

void old_lane_open(struct old_lane *lane);
/* To the lane with that address. */
void old_lane_connect(struct old_lane *lane, const void *address, size_t bytes);
void old_lane_close(struct old_lane *lane);
/* The next message without a payload; it has to be of that type. */
union kvp_wire_msg old_lane_hear(struct old_lane *lane, enum kvp_wire_type type);
/* Waits for a payload. */
void old_lane_land(struct old_lane *lane);
/* Returns when the payload has been sent, too; it may be NULL. */
void old_lane_say(struct old_lane *lane, const void *hdr, size_t hdr_bytes, const void *payload,
		  size_t bytes);
