/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines as processes of their own, which do one thing at a time as they are told: so that any of
 * them can be killed, stopped, or cut off, and others still ask what its room's end has come to.
 * While it is told nothing, an engine processes its client's events.
 */

#include "tests/support_faults.h"

enum engine_op {
	ENGINE_CONNECT, /* opens the client, registers the pool and a fence */
	ENGINE_EXPECT,
	ENGINE_OPEN,
	ENGINE_SUBMIT, /* arg: enum fault_part */
	ENGINE_SUBMIT_FENCED,
	ENGINE_SIGNAL, /* what has been submitted with the fence may be read */
	ENGINE_STATE,
	ENGINE_WAIT,      /* arg: enum kvp_wait_for */
	ENGINE_DELIVERED, /* waits for arg chunks */
	ENGINE_ABORT,
	ENGINE_FORGET,
	ENGINE_CUT,   /* its socket is shut down under the library */
	ENGINE_FLOOD, /* asks until nothing more goes out, reads nothing until the daemon ends it */
};

struct engine_order {
	enum engine_op op;
	uint32_t arg, n_missing;
	struct kvp_timers timers; /* of what is expected or opened from now on */
};

struct engine_answer {
	int rc;
	struct kvp_room_state state; /* its pointers mean nothing here */
	char reason[256];            /* of the state; of the call if that was refused */
	uint64_t at_ns;
};

struct engine {
	pid_t pid; /* 0: none */
	int fd;
	struct fault_room *room;
	bool is_dst;
	struct kvp_timers timers;
	uint32_t n_missing;
};

/* An engine for that end of the room, connected. The end's memory is the caller's, too. */
void engine_start(struct engine *engine, struct fault_room *room, bool is_dst);
void engine_kill(struct engine *engine);
/* Gives an order; the next one only after the answer is taken. */
void engine_post(struct engine *engine, enum engine_op op, uint32_t arg);
/* False when no answer has come within so many milliseconds. */
bool engine_take(struct engine *engine, struct engine_answer *answer, uint32_t ms);
/* Both, and requires that the call worked. */
struct engine_answer engine_do(struct engine *engine, enum engine_op op, uint32_t arg);
/* Asks for the state until the room's end is in that phase or beyond it. */
void engine_reaches(struct engine *engine, enum kvp_room_phase phase);
/* The same until the destination has [0, position). */
void engine_arrived(struct engine *engine, uint64_t position);
