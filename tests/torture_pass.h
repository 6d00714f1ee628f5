/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One round through what engines do with two daemons: pools, fences, rooms over the network, within
 * a daemon, given up and withdrawn, displays, a drain. In a round with a fault each step may be
 * refused, but must come back in time and say why; what is reported complete has the right bytes.
 */

#include "tests/support_rig.h"

struct pass_end {
	const struct rig_daemon *daemon;
	struct kvp_client *client;
	struct kvp_fence *fence;
	struct rig_pool pool;
	uint32_t pages[16];
};

struct pass {
	struct pass_end from, near, to; /* near: served by the sender's daemon too */
	uint64_t next_room;
	bool faulty; /* steps may fail */
	/* For pass_restart(): the first end's daemon may be restarted; it has been. A byte each. */
	int ready_fd, go_fd;
};

/* Allocates the memory of the three pools; `gpu`: of the first and the last on a GPU. */
void pass_make(struct pass *pass, const struct rig_daemon *a, const struct rig_daemon *b, bool gpu);
/* Ends the process when something is not as it must be. */
void pass_run(struct pass *pass, bool faulty);
/* One room: it is opened, a chunk waits for its fence; then its daemon is restarted, and the
 * library announces it again; then the other end comes. */
void pass_restart(struct pass *pass, bool faulty);
/* Waits until the daemon has no clients but one, no pools, fences and rooms; takes new legs. */
void pass_settle(const struct rig_daemon *daemon);
