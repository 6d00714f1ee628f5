/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Rooms that are made to fail, on top of tests/support_rig: a source and a destination whose
 * memory the scenario's process can see whoever serves it, test points of the daemons, and what a
 * daemon shows of its slots, rooms and descriptors. Every wait is for something that is seen.
 */

#include "tests/support_rig.h"

#define FAULT_TOKENS 256u
#define FAULT_HALF 128u
#define FAULT_SECS 20 /* for anything that has to happen */

struct fault_end {
	const struct rig_daemon *daemon; /* that serves it */
	const char *tag;                 /* of the pool's layout; NULL: that of all others */
	struct kvp_client *client;
	struct rig_pool pool;
	uint32_t pages[FAULT_TOKENS / 16];
	kvp_room_id room;
};

/* One sender, one destination that owns every other token. */
struct fault_room {
	uint64_t id, generation;
	struct fault_end src, dst;
	const char *address; /* that the expectation names; NULL: of the source's daemon */
	uint32_t n_missing;  /* senders that the expectation names and nobody opens, from 1 on */
	struct kvp_timers timers;
	/* Change a request before it is made; NULL: as it is. What it points to may be written. */
	void (*on_expect)(struct kvp_expect *expect);
	void (*on_open)(struct kvp_open *open);
	void (*on_chunk)(struct kvp_chunk *chunk);
};

/* What a submit brings: half of the tokens, or the rest with segment (and last, and meta), or after
 * an open rest the last chunk without tokens. */
enum fault_part { FAULT_FIRST, FAULT_REST_OPEN, FAULT_REST, FAULT_LAST };

/* Allocates both pools and writes the source's rows. */
void fault_room_make_rows(struct fault_room *room, uint64_t id, const struct rig_daemon *src,
			  const struct rig_daemon *dst, uint32_t row_bytes);
/* The same with rows of 576 bytes. */
void fault_room_make(struct fault_room *room, uint64_t id, const struct rig_daemon *src,
		     const struct rig_daemon *dst);
/* Opens a client for the end and registers its pool. */
void fault_connect(struct fault_end *end, const char *name);
void fault_connect_both(struct fault_room *room);
void fault_close(struct fault_room *room);
/* 0 or negative errno as of the library; the others require success. */
int fault_try_expect(struct fault_room *room);
int fault_try_open(struct fault_room *room);
int fault_try_submit(struct fault_room *room, enum fault_part part);
void fault_expect(struct fault_room *room);
void fault_open(struct fault_room *room);
void fault_submit(struct fault_room *room, enum fault_part part);
/* Both ends from the start to the release, with a check of every byte of both pools. */
void fault_transfer(struct fault_room *room);
/* The second half of that: waits for both ends. */
void fault_completes(struct fault_room *room);

/* Requires that the end fails in time with this status and a reason, never complete. */
struct kvp_room_state fault_fails(const struct fault_end *end, enum kvp_status status);
/* Requires that it is released in time, still failed. Forgets the room. */
void fault_released(struct fault_end *end);
/* Waits until the destination has [0, position). */
void fault_arrived(const struct fault_end *end, uint64_t position);
/* The source is as it was; the destination has the rows below `arrived`, and at other places that
 * are the room's either its bytes or what was there before. */
void fault_check_rows(const struct fault_room *room, uint64_t arrived);
/* The destination alone. */
void fault_check_dest(const struct fault_room *room, uint64_t arrived);
/* The same of both, with all rows and the segment. */
void fault_check_all(const struct fault_room *room);
/* Other bytes from now on, in the source too; for rooms of which nothing was submitted. */
void fault_renew(struct fault_room *room);
/* The destination's memory as at first; for rooms that are released. */
void fault_reset(struct fault_room *room);
/* Nothing has been written there since. */
void fault_check_untouched(const struct fault_room *room);
/* The source's memory as an engine that uses it for something else; and as at first. */
void fault_poison(struct fault_room *room);
void fault_restore(struct fault_room *room);

/* Keeps what reaches the test point, or lets go. */
void fault_hold(const struct rig_daemon *daemon, const char *point, bool on);
/* Waits until the point keeps something. */
void fault_held(const struct rig_daemon *daemon, const char *point);
/* Waits until the daemon has no rooms, no work, and all its slots. */
void fault_idle(const struct rig_daemon *daemon);
/* The same, but for slots on their way to a peer that does not read. */
void fault_idle_but_sent(const struct rig_daemon *daemon);
/* Waits until an offer is parked there. */
void fault_parked(const struct rig_daemon *daemon);
/* Waits until the daemon has no session with the peer that is as old as that. */
void fault_session_lost(const struct rig_daemon *daemon, const struct rig_daemon *peer,
			uint64_t since_ns);
/* Memfds that the daemon has mapped. */
uint32_t fault_maps(const struct rig_daemon *daemon);
void fault_maps_back(const struct rig_daemon *daemon, uint32_t maps);
/* Bytes that its allocator has given out: in arenas, and as mappings of their own. */
void fault_heap(const struct rig_daemon *daemon, uint64_t bytes[2]);
uint32_t fault_fds(const struct rig_daemon *daemon);
/* Waits until the daemon has no more descriptors than that. */
void fault_fds_back(const struct rig_daemon *daemon, uint32_t fds);
/* Do the daemons of this build have test points? Prints that they have not. */
bool fault_points(void);

/* A process that runs fn(arg) and then serves nothing until it is killed. */
pid_t fault_child(void (*fn)(void *arg), void *arg);
void fault_kill(pid_t pid);
/* A child stands still from the return on, and goes on. */
void fault_stop(pid_t pid);
void fault_go_on(pid_t pid);
/* A process that makes the daemon stand still all the time but for a tenth of `ms`, until it is
 * killed; it may leave the daemon standing. */
pid_t fault_slow(const struct rig_daemon *daemon, unsigned int ms);
