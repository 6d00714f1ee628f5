/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_matrix.h"

#include <stdio.h>
#include <string.h>

#include "tests/support_faults.h"

#define BIT(status) (UINT64_C(1) << (status))
#define PEER_LOST BIT(KVP_STATUS_PEER_LOST)
#define CLIENT_LOST BIT(KVP_STATUS_CLIENT_LOST)
#define DAEMON_LOST BIT(KVP_STATUS_DAEMON_LOST)
#define TRANSPORT BIT(KVP_STATUS_TRANSPORT)
#define TIMEOUT BIT(KVP_STATUS_TIMEOUT)
#define TIMERS (TIMEOUT | BIT(KVP_STATUS_UNREACHABLE))
#define FENCE BIT(KVP_STATUS_FENCE_TIMEOUT)
#define AT_ONCE_MS \
	50u /* a data path that is lost waits so long for the control connection's word */

const struct mx_state_facts mx_states[MX_STATES] = {
	[MX_OPENED] = { "opened", NULL, false, true, false, MX_LEG_NONE, 0, 2, 0, false,
			"prefill has opened, decode has not expected" },
	[MX_PARKED] = { "parked", NULL, false, true, false, MX_LEG_NONE, 1, 2, 0, false,
			"the same, and a chunk is submitted" },
	[MX_OFFERED] = { "offered", NULL, false, false, true, MX_LEG_OFFERED, 0, 2, 0, false,
			 "decode has expected, prefill has not opened" },
	[MX_ACCEPTED] = { "accepted", "offer", false, true, true, MX_LEG_ACCEPTED, 2, 2, 0, false,
			  "all is submitted, prefill's accept is under way" },
	[MX_READY] = { "ready", NULL, false, true, true, MX_LEG_GO, 0, 2, 0, false,
		       "both agree, nothing is submitted" },
	[MX_FENCE] = { "fence", NULL, false, true, true, MX_LEG_GO, 1, 2, 0, false,
		       "a chunk waits for its fence" },
	[MX_HALF] = { "half", NULL, false, true, true, MX_LEG_GO, 1, 2, FAULT_HALF, false,
		      "half has arrived, nothing is under way" },
	[MX_WANT] = { "want", "want", true, true, true, MX_LEG_GO, 2, 2, FAULT_HALF, false,
		      "half has arrived; pieces of the rest are kept before their wants are sent" },
	[MX_GATHER] = { "gather", "gather", true, true, true, MX_LEG_GO, 2, 2, FAULT_HALF, false,
			"granted, before the gather" },
	[MX_SEND] = { "send", "send", true, true, true, MX_LEG_GO, 2, 2, FAULT_HALF, false,
		      "packed, before the send" },
	[MX_GRANT] = { "grant", "grant", false, true, true, MX_LEG_GO, 2, 2, FAULT_HALF, false,
		       "wanted, before the grant" },
	[MX_SCATTER] = { "scatter", "scatter", false, true, true, MX_LEG_GO, 2, 2, FAULT_HALF,
			 false, "in landing slots, before the scatter" },
	[MX_LANDED] = { "landed", "landed", false, true, true, MX_LEG_GO, 2, 3, FAULT_HALF, false,
			"all rows scattered, before the sender is told; the last chunk is to "
			"come" },
	[MX_CLOSING] = { "closing", NULL, false, true, true, MX_LEG_GO, 2, 2, 0, false,
			 "all that one sender has is in place, another data sender of the room is "
			 "missing" },
	[MX_COMPLETE] = { "complete", "landed", false, true, true, MX_LEG_GO, 2, 2, FAULT_TOKENS,
			  true, "complete; the sender's lane has not heard that it landed" },
	[MX_FAILED] = { "failed", "scatter", false, true, true, MX_LEG_GO, 2, 2, FAULT_HALF, true,
			"aborted while data was in landing slots" },
	[MX_DONE] = { "done", NULL, false, false, false, MX_LEG_NONE, 2, 2, 0, true,
		      "over and forgotten; both daemons idle" },
};

const char *const mx_victims[MX_VICTIMS] = { "prefill client", "decode client", "prefill daemon",
					     "decode daemon" };

const char *const mx_faults[MX_FAULTS] = {
	[MX_KILL] = "kill -9",      [MX_STOP] = "stop",     [MX_CUT] = "cut",
	[MX_CUT_DATA] = "data cut", [MX_LOST_OUT] = "mute", [MX_LOST_IN] = "deaf",
	[MX_LOST] = "partition",    [MX_SLOW] = "slow",
};

bool mx_is_client(enum mx_victim victim)
{
	return victim <= MX_DECODE_CLIENT;
}

bool mx_is_src(enum mx_victim victim)
{
	return victim == MX_PREFILL_CLIENT || victim == MX_PREFILL_DAEMON;
}

bool mx_is_partition(enum mx_fault fault)
{
	return fault == MX_LOST_OUT || fault == MX_LOST_IN || fault == MX_LOST;
}

bool mx_needs_net(const struct mx_cell *cell)
{
	return mx_is_partition(cell->fault) || cell->fault == MX_CUT_DATA ||
	       (cell->fault == MX_CUT && !mx_is_client(cell->victim));
}

uint32_t mx_cells(struct mx_cell *out)
{
	struct mx_cell cell;
	uint32_t n = 0, s, v, f;

	for (s = 0; s < MX_STATES; s++)
		for (v = 0; v < MX_VICTIMS; v++)
			for (f = 0; f < MX_FAULTS; f++) {
				cell = (struct mx_cell){ (enum mx_state)s, (enum mx_victim)v,
							 (enum mx_fault)f };
				/* There is no network between a client and its daemon. */
				if (mx_is_client(cell.victim) && mx_needs_net(&cell))
					continue;
				out[n++] = cell;
			}
	return n;
}

/* ---- predictions ---------------------------------------------------------------------------- */

static struct mx_must fails(uint64_t statuses, uint32_t within_ms)
{
	return (struct mx_must){ MX_FAILS, statuses, within_ms };
}

static struct mx_must is(enum mx_outcome outcome)
{
	return (struct mx_must){ .outcome = outcome };
}

bool mx_completes_without(const struct mx_cell *cell)
{
	const struct mx_state_facts *facts = &mx_states[cell->state];

	if (cell->state == MX_CLOSING)
		return false;
	if (cell->victim == MX_PREFILL_CLIENT)
		return facts->submitted == facts->chunks;
	return facts->dst;
}

/* The other end's engine goes on where it can; what the victim owes runs into a timer. */
static struct mx_must client_stops(const struct mx_cell *cell)
{
	if (mx_completes_without(cell))
		return is(MX_COMPLETES);
	return fails(cell->state == MX_FENCE ? TIMEOUT | FENCE : TIMEOUT, MX_OPEN_MS);
}

static struct mx_must client_ends(const struct mx_cell *cell, bool is_own)
{
	uint32_t within_ms = cell->fault == MX_SLOW ? MX_STALL_MS : 0;

	if (is_own)
		return cell->fault == MX_KILL ? is(MX_GONE) : fails(DAEMON_LOST, within_ms);
	if (mx_states[cell->state].leg < MX_LEG_ACCEPTED)
		return is(MX_WAITS);
	return fails(CLIENT_LOST, within_ms);
}

/* The library announces again what is not in motion. */
static struct mx_must daemon_dies(const struct mx_cell *cell, bool is_own, bool is_dst)
{
	const struct mx_state_facts *facts = &mx_states[cell->state];

	if (is_own)
		return (is_dst ? facts->arrived : facts->submitted) > 0 ? fails(DAEMON_LOST, 0)
									: is(MX_WAITS);
	return facts->leg == MX_LEG_GO ? fails(PEER_LOST, AT_ONCE_MS) : is(MX_WAITS);
}

/* Where nothing was agreed, the end offers again, or waits, until its timer. When the victim goes
 * on it finds its timers over and its sessions ended; only that of a fence waits for no peer. */
static struct mx_must daemon_stops(const struct mx_cell *cell, bool is_own)
{
	bool agreed = mx_states[cell->state].leg == MX_LEG_GO;
	uint64_t fence = cell->state == MX_FENCE ? FENCE : 0;

	if (is_own)
		return fails(agreed ? PEER_LOST | fence : TIMERS, MX_STOP_MS);
	return agreed ? fails(PEER_LOST, MX_LOST_AFTER_MS + MX_HEARTBEAT_MS)
		      : fails(TIMERS, MX_LOST_AFTER_MS + MX_OPEN_MS);
}

static struct mx_must session_ends(const struct mx_cell *cell)
{
	if (mx_states[cell->state].leg != MX_LEG_GO)
		return is(MX_WAITS);
	if (cell->fault == MX_CUT)
		return fails(PEER_LOST, 0);
	if (cell->fault == MX_CUT_DATA)
		return fails(PEER_LOST | TRANSPORT, AT_ONCE_MS);
	return fails(PEER_LOST, MX_LOST_AFTER_MS + MX_HEARTBEAT_MS);
}

struct mx_must mx_must(const struct mx_cell *cell, bool is_dst)
{
	const struct mx_state_facts *facts = &mx_states[cell->state];
	bool is_own = mx_is_src(cell->victim) != is_dst;

	if (facts->over)
		return mx_is_client(cell->victim) && is_own && cell->fault == MX_KILL
			       ? is(MX_GONE)
			       : is(facts->dst ? MX_KEEPS : MX_NO_END);
	/* Prefill opens while decode's engine stands still. */
	if (cell->victim == MX_DECODE_CLIENT && cell->fault == MX_STOP && facts->dst)
		return client_stops(cell);
	if (!(is_dst ? facts->dst : facts->src))
		return mx_is_client(cell->victim) && is_own && cell->fault == MX_KILL
			       ? is(MX_GONE)
			       : is(MX_NO_END);
	if (mx_is_client(cell->victim))
		return cell->fault == MX_STOP ? client_stops(cell) : client_ends(cell, is_own);
	switch (cell->fault) {
	case MX_KILL:
		return daemon_dies(cell, is_own, is_dst);
	case MX_STOP:
		return daemon_stops(cell, is_own);
	case MX_SLOW:
		return is(MX_WAITS);
	default:
		return session_ends(cell);
	}
}

bool mx_retry(enum kvp_status status)
{
	switch (status) {
	case KVP_STATUS_LIMIT:
	case KVP_STATUS_TIMEOUT:
	case KVP_STATUS_PEER_LOST:
	case KVP_STATUS_CLIENT_LOST:
	case KVP_STATUS_DAEMON_LOST:
	case KVP_STATUS_UNREACHABLE:
	case KVP_STATUS_TRANSPORT:
		return true;
	default:
		return false;
	}
}

void mx_must_text(const struct mx_must *must, char *buf, size_t bytes)
{
	static const char *const words[] = {
		[MX_NO_END] = "-",    [MX_GONE] = "gone",
		[MX_WAITS] = "waits", [MX_COMPLETES] = "completes",
		[MX_FAILS] = "",      [MX_KEEPS] = "stays",
	};
	uint32_t i;

	snprintf(buf, bytes, "%s", words[must->outcome]);
	for (i = 0; must->outcome == MX_FAILS && i < 64; i++)
		if (must->statuses >> i & 1)
			snprintf(buf + strlen(buf), bytes - strlen(buf), "%s%s",
				 buf[0] ? " or " : "", kvp_status_name((enum kvp_status)i));
}
