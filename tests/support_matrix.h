/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The fault matrix: every state of a room x every victim x every fault, and what each end of the
 * room must come to, which follows from a few facts about the state: who has announced the room,
 * how far the two daemons have agreed on it, and whether its bytes are in motion.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/kvpack.h"

/* ---- what there is -------------------------------------------------------------------------- */

enum mx_state {
	MX_OPENED,   /* prefill has opened, decode is not there */
	MX_PARKED,   /* the same, and a chunk is parked */
	MX_OFFERED,  /* decode has expected, prefill is not there */
	MX_ACCEPTED, /* prefill has accepted, decode's daemon has not said go */
	MX_READY,    /* both, nothing submitted */
	MX_FENCE,    /* a chunk waits for its fence */
	MX_HALF,     /* one half is there, nothing is under way */
	MX_WANT,     /* from here to MX_LANDED a piece of the rest is kept at a test point */
	MX_GATHER,
	MX_SEND,
	MX_GRANT,
	MX_SCATTER,
	MX_LANDED,   /* all rows are there, the last chunk is not */
	MX_CLOSING,  /* all is there, another sender of the room is missing */
	MX_COMPLETE, /* complete; landed has not been sent */
	MX_FAILED,   /* aborted while a piece was kept before its scatter */
	MX_DONE,     /* over at both ends and forgotten */
	MX_STATES,
};

enum mx_victim {
	MX_PREFILL_CLIENT,
	MX_DECODE_CLIENT,
	MX_PREFILL_DAEMON,
	MX_DECODE_DAEMON,
	MX_VICTIMS,
};

enum mx_fault {
	MX_KILL,
	MX_STOP,     /* longer than all timers, then continued */
	MX_CUT,      /* client: its session; daemon: its control connection with the other */
	MX_CUT_DATA, /* daemon: its data connections with the other */
	MX_LOST_OUT, /* partition of its host: what it sends is lost */
	MX_LOST_IN,  /* what is sent to it is lost */
	MX_LOST,     /* both */
	MX_SLOW,     /* client: reads nothing; daemon: stands still most of the time */
	MX_FAULTS,
};

/* How far the daemons have agreed. */
enum mx_leg { MX_LEG_NONE, MX_LEG_OFFERED, MX_LEG_ACCEPTED, MX_LEG_GO };

struct mx_state_facts {
	const char *name;
	const char *hold; /* test point; NULL: none */
	bool hold_at_src; /* whose daemon keeps */
	bool src, dst;    /* ends that exist */
	enum mx_leg leg;
	uint32_t submitted; /* chunks */
	uint32_t chunks;    /* of the room */
	uint64_t arrived;   /* at least; tokens */
	bool over;          /* complete, failed or done */
	const char *words;  /* for the table's legend */
};

extern const struct mx_state_facts mx_states[MX_STATES];
extern const char *const mx_victims[MX_VICTIMS];
extern const char *const mx_faults[MX_FAULTS];

struct mx_cell {
	enum mx_state state;
	enum mx_victim victim;
	enum mx_fault fault;
};

/* Cells in the order of the table; returns how many, at most MX_STATES * MX_VICTIMS * MX_FAULTS. */
uint32_t mx_cells(struct mx_cell *out);
bool mx_is_client(enum mx_victim victim);
/* Is it on prefill's node? */
bool mx_is_src(enum mx_victim victim);
bool mx_is_partition(enum mx_fault fault);
/* Are hosts of their own needed? */
bool mx_needs_net(const struct mx_cell *cell);

/* ---- what must come of it ------------------------------------------------------------------- */

/* Timers of the daemons and, where the victim is stopped, of the rooms. */
#define MX_HEARTBEAT_MS 100u
#define MX_LOST_AFTER_MS 600u
#define MX_STALL_MS 400u
#define MX_DRAIN_MS 500u
#define MX_OFFER_MS 700u
#define MX_FENCE_MS 900u
#define MX_OPEN_MS 1300u
#define MX_PROGRESS_MS 1500u
#define MX_STOP_MS 2200u /* beyond all of them, also beyond a loss and an offer */
#define MX_SLOW_MS 1000u

enum mx_outcome {
	MX_NO_END,    /* there is none at this end */
	MX_GONE,      /* its engine is dead */
	MX_WAITS,     /* lives on, and completes when the fault is over */
	MX_COMPLETES, /* during the fault */
	MX_FAILS,
	MX_KEEPS, /* was over before */
};

struct mx_must {
	enum mx_outcome outcome;
	uint64_t statuses;  /* MX_FAILS: any of them, by bit */
	uint32_t within_ms; /* of the fault, by configuration */
};

struct mx_must mx_must(const struct mx_cell *cell, bool is_dst);
/* Does the rest of the room complete while the victim, a client, stands still? */
bool mx_completes_without(const struct mx_cell *cell);
/* Where the statuses of kvpack.h say that the same request may succeed later. */
bool mx_retry(enum kvp_status status);
/* "peer_lost", "peer_lost or transport", "waits" */
void mx_must_text(const struct mx_must *must, char *buf, size_t bytes);
