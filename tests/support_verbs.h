/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Nets of the verbs transport with a ring each, for tests on a device that is real or is not. Slots
 * are filled with a pattern of the sequence number that a message carries, and looked at on
 * arrival.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/net.h"

#define VP_SLOTS 16u

struct vp_hdr {
	uint64_t seq;
	uint64_t bytes; /* of the payload */
	uint32_t slot, offset;
	uint32_t refuse; /* the receiver names no place */
	uint32_t zero;
};

struct vp_node {
	struct kvp_net *net;
	struct kvp_net_ep *ep;
	unsigned char addr[KVP_NET_ADDR_MAX];
	size_t addr_bytes;
	size_t slot_bytes, stride;
	unsigned char *land, *pack; /* VP_SLOTS slots each */
	struct kvp_net_key keys[VP_SLOTS];
	uint64_t next_seq;
	uint64_t messages, data, bad, sent_ok, sent_bad, failed, closed;
	uint64_t lost; /* payloads that were not where their message was expected to have them */
	uint64_t told; /* sent() calls */
	int last_status;
	bool echo; /* answers each message by one without payload */
	uint64_t echoed, owed;
};

/* Slots of nodes opened from now on are registered as a device's, by a dma-buf. */
extern bool vp_on_device;

/* Answers what came before there was a way back. */
void vp_echo(struct vp_node *node);

/* 0, or the transport's error with its words in `err`. */
int vp_open(struct vp_node *node, const struct kvp_net_verbs_config *config, size_t slot_bytes,
	    char *err, size_t err_bytes);
void vp_close(struct vp_node *node);
int vp_connect(struct vp_node *node, const struct vp_node *to);
/* The one number of a session that nodes know from now on; UINT64_MAX: all. */
extern uint64_t vp_admitted;
/* Turns both (b may be NULL) until the counter has reached `want`; false after so many ms. */
bool vp_turn(struct vp_node *a, struct vp_node *b, const uint64_t *counter, uint64_t want,
	     unsigned ms);
/* Turns both for so long. */
void vp_idle(struct vp_node *a, struct vp_node *b, unsigned ms);
int vp_send(struct vp_node *node, uint64_t seq);
/* Fills the pack slot of that number and puts it, or a part of it, into a slot of the peer. */
int vp_put(struct vp_node *node, const struct vp_node *to, uint64_t seq, uint32_t slot,
	   uint32_t offset, size_t bytes, bool whole);
uint64_t vp_ms(void);
