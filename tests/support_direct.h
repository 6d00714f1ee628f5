/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Two lanes over the RDMA device that is none (tests/fake_verbs.c), each with a pool, and one room
 * between them in direct mode, or one that was to be. All that is not as it has to be ends the
 * test.
 */

#include "proto/kvpack.pb-c.h"
#include "tests/support_lane.h"

#define DIRECT_TOKENS 2000u
#define DIRECT_CHUNK 700u

struct direct {
	struct lt lt;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src, dst;
	struct lt_room room;
};

struct direct_wish {
	uint32_t from, to; /* modes of the sender and the receiver */
	uint64_t run_bytes;
	bool raw; /* the sender does not pack */
	bool sums;
	uint32_t dcp_size; /* of the source; the destination is one rank of two */
	/* Of the receiver's pool, and of all lanes. */
	enum lt_memory memory;
	bool dmabuf;
	enum kvp_ring_memory rings;
	enum kvp_flush flush;
};

struct direct *direct_make(const struct direct_wish *wish);
/* Waits until windows and regions are given back, and requires that nothing is left on the device.
 * `piped`: the endpoints are there yet. */
void direct_end(struct direct *direct, bool piped);
/* The whole room, with a check of its bytes. `held`: pieces wait until the device has tried the
 * pool, so that none lands because it came too early. */
void direct_transfer(struct direct *direct, bool held);
/* Requires that all of it has landed, for that reason. */
void direct_landed(const struct direct *direct, enum kvp_why why);
/* Begins the room, which has to fail with these words, and ends it. */
void direct_fails(struct direct *direct, Kvp__Status status, const char *text);
/* Waits until the device has writes that are not done. */
void direct_wait_writes(struct direct *direct);
