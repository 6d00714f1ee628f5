/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The part of librdmacm that the daemon calls, for ids of one process that meet there, on the
 * devices of tests/fake_verbs.c. Queue pairs stay the caller's. Events come as the kernel brings
 * them: private data is padded to what a message has room for, an id that ends tells its peer, and
 * events that nobody has fetched go with it. Who ends an id waits until its events are given back.
 * Functions of the library: any thread.
 */

#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>

struct kvp_fake_cm {
	/* The event with that number (from 1, since the reset) never comes, or tells of a failure
	 * in its place; of a request, the words are others. 0: none. */
	uint64_t lose_at, spoil_at;
	/* The event with that number, and all behind it of the same id, wait for
	 * kvp_fake_cm_release(); 0: none. */
	uint64_t late_at;
	bool unreachable; /* no request arrives anywhere */
	/* What has happened. */
	uint64_t n_events; /* that were to come */
	uint32_t n_channels, n_ids;
	uint32_t n_late; /* that wait */
};

extern struct kvp_fake_cm kvp_fake_cm; /* for when no other thread runs */

/* Forgets what was counted and is to fail; objects stay. */
void kvp_fake_cm_reset(void);
/* Any thread: whoever ends an id waits until that is no more so. */
void kvp_fake_cm_stick(bool stiff);
/* An event of the id, with these words as private data (NULL: none), whatever its state is. */
void kvp_fake_cm_say(struct rdma_cm_id *id, enum rdma_cm_event_type type, const void *data,
		     size_t bytes);
/* Any thread: what is late comes now. */
void kvp_fake_cm_release(void);
/* Any thread: a copy of kvp_fake_cm. */
struct kvp_fake_cm kvp_fake_cm_look(void);
