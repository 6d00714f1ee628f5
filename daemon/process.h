/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A client's process: what it may have of the daemon it has for all its connections together, or
 * whoever wants more would only have to connect again. Loop thread only.
 */

#include <stdbool.h>
#include <stdint.h>

struct kvp_process {
	uint32_t pid, uid;   /* pid 0: all of the user that are not visible from here */
	uint32_t n_handles;  /* connections, refused and closing ones too */
	uint32_t n_sessions; /* admitted ones */
	bool resting;        /* not read for a moment: it takes more than its share */
	uint64_t taken_ns;   /* of the loop, as far as it still counts */
	uint64_t read_ns;    /* when that was last counted */
	/* waiting to be told why they are refused; connections of the reserve */
	uint32_t n_refused, n_reserved;
	/* in this turn */
	uint64_t turn, turn_ns;
	uint32_t turn_packets;
	struct kvp_process *prev, *next;
};

/* Finds it in the list, or makes it; counts the connection. NULL: no memory. */
struct kvp_process *kvp_process_get(struct kvp_process **list, uint32_t pid, uint32_t uid,
				    uint64_t now_ns);
/* Without connections it stays for some milliseconds, until what it has had is forgotten. */
void kvp_process_put(struct kvp_process *process);
/* Frees all. */
void kvp_process_clear(struct kvp_process **list);

/* May one of its sessions read one more packet in this turn of the loop? `ns`: what the session has
 * had of it, not yet counted. */
bool kvp_process_may_read(const struct kvp_process *process, uint64_t ns);
/* Begins to count anew if the turn is another. */
void kvp_process_turn(struct kvp_process *process, uint64_t turn);
/* A session of it had the loop from `from_ns` on, for `took` ns. True: it has to rest. */
bool kvp_process_account(struct kvp_process *process, uint64_t from_ns, uint64_t took);
