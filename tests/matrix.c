/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs the fault matrix of tests/support_matrix.h and prints what became of each cell.
 *
 *     matrix sample       some that cover each state, victim and fault
 *     matrix all          all cells
 *     matrix CELL...      those whose "state/victim/fault" contains one of the texts
 *     matrix x20 ...      each so often: what is left behind of a cell adds up the more
 *     matrix table        what is predicted, as docs/reliability.md has it; runs nothing
 *     KVP_JOBS=N          worlds at once (8)
 *
 * A world is three daemons, each on a host of its own where namespaces can be made, and the engines
 * of one room between the first two; it runs the cells of one state one after the other, so that
 * what a cell leaves behind adds up. Each cell ends with the same room again, on the same pages.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/net.h"
#include "tests/support_engine.h"
#include "tests/support_matrix.h"
#include "tests/support_net.h"

#define MAX_CELLS ((uint32_t)MX_STATES * MX_VICTIMS * MX_FAULTS)
#define SAMPLE 11u /* every so many cells */
#define JOBS 8u
#define SLACK_MS 5000u /* for a machine that has other work */
/* What may come on top of what a daemon had at first. Data connections of a pair of daemons are one
 * or two, as they happen to meet; each brings buffers of UCX, which keeps them. A cell that leaves
 * anything behind passes these after some more cells, since they are never set anew. */
#define FDS_SLACK 2u
static const uint64_t heap_slack[2] = { 16u << 10, 8u << 20 };
/* UCX 1.18 takes 236 KB of small blocks in some later cell, once for a daemon, and keeps them. */
#define HEAP_SLACK_NEWER (256u << 10)
/* UCX 1.13 ends the process when it meets a connection of an earlier endpoint that a partition has
 * kept it from losing (docs/reliability.md, 6). That is one more way for a daemon to die; the cell
 * is run again, and said so. */
#define UCX_ABORT "UCT_TCP_EP_FLAG_ON_MATCH_CTX' failed"
#define UCX_TRIES 3u
#define WORLD_SECS 60u
#define CELL_SECS 20u

#define TIMING                                                                         \
	"heartbeat = 100ms\nlost_after = 600ms\nretry_min = 50ms\nretry_max = 200ms\n" \
	"plaintext = trusted\nallow = 127.0.0.0/8,10.77.0.0/16\n"
#define DAEMON                                                           \
	"[host]\nslots = 8\nslot_bytes = 64k\n[client]\nstall = 400ms\n" \
	"[timers]\ndrain = 500ms\n[limits]\nhistory = 0\n"
#define OWN_HOST "[ucx]\ninterface = eth0\ntcp_network = trusted\n"

enum host { PREFILL, DECODE, THIRD };
enum side { SRC, DST, SIDES };

/* Rooms that no fault may touch: by which daemons they are served. */
static const enum host others[][SIDES] = { { PREFILL, DECODE },
					   { PREFILL, THIRD },
					   { THIRD, DECODE } };
#define OTHERS ((uint32_t)KVP_ARRAY_SIZE(others))

enum { NOT_RUN, SKIPPED, RUNNING, GOOD, BAD };

struct result {
	uint32_t state;
	uint32_t status[SIDES]; /* of an end that has failed */
	uint32_t ms[SIDES];     /* from the fault to the event */
	char reason[SIDES][128];
	uint32_t aborts;   /* of UCX */
	uint32_t by_abort; /* it has failed by one */
};

struct world {
	struct rig *rig;
	struct rig_net net;
	struct rig_daemon *daemons[NET_HOSTS];
	uint32_t fds[NET_HOSTS], maps[NET_HOSTS];
	uint64_t heap[NET_HOSTS][2];
	struct fault_room room, others[OTHERS];
	struct engine engines[SIDES];
};

struct cell {
	struct world *w;
	const struct mx_cell *what;
	const struct mx_state_facts *facts;
	struct mx_must must[SIDES];
	struct result *result;
	struct rig_daemon *victim; /* daemon, or the client's */
	uint32_t host;             /* of it */
	enum side side;            /* of it */
	uint64_t fault_ns;
	bool held, heard[SIDES], reset;
};

static struct mx_cell cells[MAX_CELLS];
static uint32_t n_cells;
static struct result *results; /* [MAX_CELLS] shared by all processes */
static bool chosen[MAX_CELLS];

static void cell_name(const struct mx_cell *cell, char *buf, size_t bytes)
{
	snprintf(buf, bytes, "%s/%s/%s", mx_states[cell->state].name, mx_victims[cell->victim],
		 mx_faults[cell->fault]);
}

/* ---- the world ------------------------------------------------------------------------------ */

static void daemon_up(struct world *w, uint32_t host)
{
	char extra[512];

	snprintf(extra, sizeof(extra), "%s%s", DAEMON, w->net.on ? OWN_HOST : "");
	net_enter(&w->net, host);
	rig_daemon_restart(w->daemons[host], extra);
	net_leave(&w->net);
}

static void daemon_first(struct world *w, uint32_t host, const char *name)
{
	struct rig_daemon *daemon = &w->rig->daemons[host];
	char extra[512];

	snprintf(extra, sizeof(extra), "%s%s", DAEMON, w->net.on ? OWN_HOST : "");
	if (w->net.on) {
		net_address(host, daemon->address, sizeof(daemon->address));
		snprintf(daemon->address + strlen(daemon->address),
			 sizeof(daemon->address) - strlen(daemon->address), ":0");
	}
	net_enter(&w->net, host);
	w->daemons[host] = rig_daemon_start(w->rig, name, extra);
	net_leave(&w->net);
}

static void room_whole(struct world *w)
{
	struct engine *src = &w->engines[SRC], *dst = &w->engines[DST];

	(void)engine_do(dst, ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
}

static void room_completes(struct world *w)
{
	for (int side = DST; side >= SRC; side--) {
		struct engine_answer answer =
			engine_do(&w->engines[side], ENGINE_WAIT, KVP_WAIT_TERMINAL);

		RIG_REQUIRE(answer.state.complete && !answer.state.failed, "%s: %s",
			    kvp_status_name(answer.state.status), answer.reason);
		(void)engine_do(&w->engines[side], ENGINE_WAIT, KVP_WAIT_RELEASED);
		if (side == DST)
			fault_check_all(&w->room);
		(void)engine_do(&w->engines[side], ENGINE_FORGET, 0);
	}
}

static void all_transfer(struct world *w)
{
	for (uint32_t i = 0; i < OTHERS; i++) {
		fault_transfer(&w->others[i]);
		fault_reset(&w->others[i]);
	}
	room_whole(w);
	room_completes(w);
	fault_reset(&w->room);
}

static void all_idle(const struct world *w)
{
	for (uint32_t i = 0; i < NET_HOSTS; i++)
		fault_idle(w->daemons[i]);
}

static const struct world *world_shown;
static struct result *result_shown; /* of the cell that runs; NULL: none */

static bool log_says(const struct rig_daemon *daemon, const char *text)
{
	char line[512];
	FILE *file = fopen(daemon->log, "re");
	bool found = false;

	while (file && !found && fgets(line, sizeof(line), file))
		found = strstr(line, text);
	if (file)
		(void)fclose(file);
	return found;
}

/* What the daemons say when a cell has failed; one that is dead, or stands still, says nothing. */
static void world_show(void)
{
	static const char *const what[] = { "rooms", "peers", "lanes" };
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;

	options.timeout_ms = 2000;
	for (uint32_t i = 0; i < NET_HOSTS; i++)
		if (result_shown && log_says(world_shown->daemons[i], UCX_ABORT))
			result_shown->by_abort = 1;
	for (uint32_t i = 0; i < NET_HOSTS; i++) {
		struct kvp_client *client;
		char *json;

		options.socket = world_shown->daemons[i]->socket;
		if (kvp_client_open(&client, &options) < 0) {
			fprintf(stderr, "%s: %s\n", world_shown->daemons[i]->name,
				kvp_last_error(NULL));
			continue;
		}
		for (size_t k = 0; k < KVP_ARRAY_SIZE(what); k++) {
			if (kvp_inspect(client, what[k], NULL, &json) < 0)
				continue;
			fprintf(stderr, "%s: %s\n", world_shown->daemons[i]->name, json);
			free(json);
		}
		kvp_client_close(client);
	}
}

static void world_begin(struct world *w, struct rig *rig)
{
	static const char *const names[] = { "prefill", "decode", "third" };
	char why[128];

	memset(w, 0, sizeof(*w));
	w->rig = rig;
	rig->timing = TIMING;
	if (!net_make(&w->net, why, sizeof(why)))
		printf("one host only: %s\n", why);
	for (uint32_t i = 0; i < NET_HOSTS; i++)
		daemon_first(w, i, names[i]);
	world_shown = w;
	rig_dying = world_show;
	fault_room_make(&w->room, 7, w->daemons[PREFILL], w->daemons[DECODE]);
	engine_start(&w->engines[SRC], &w->room, false);
	engine_start(&w->engines[DST], &w->room, true);
	for (uint32_t i = 0; i < OTHERS; i++) {
		fault_room_make(&w->others[i], 100 + i, w->daemons[others[i][SRC]],
				w->daemons[others[i][DST]]);
		fault_connect_both(&w->others[i]);
	}
	/* What is made once, for a daemon or for a peer that comes back, is made here. */
	for (uint32_t i = 0; i < NET_HOSTS; i++) {
		rig_daemon_kill(w->daemons[i]);
		daemon_up(w, i);
		all_transfer(w);
		all_transfer(w);
	}
	all_idle(w);
	for (uint32_t i = 0; i < NET_HOSTS; i++) {
		w->fds[i] = fault_fds(w->daemons[i]);
		w->maps[i] = fault_maps(w->daemons[i]);
		fault_heap(w->daemons[i], w->heap[i]);
	}
}

/* ---- reaching the state --------------------------------------------------------------------- */

static struct rig_daemon *keeper(const struct cell *cell)
{
	return cell->w->daemons[cell->facts->hold_at_src ? PREFILL : DECODE];
}

static void hold(struct cell *cell)
{
	fault_hold(keeper(cell), cell->facts->hold, true);
	cell->held = true;
}

static void lift(struct cell *cell)
{
	if (cell->held)
		fault_hold(keeper(cell), cell->facts->hold, false);
	cell->held = false;
}

static void both_ready(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC], *dst = &cell->w->engines[DST];

	(void)engine_do(dst, ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	engine_reaches(src, KVP_ROOM_READY);
	if (cell->what->state != MX_CLOSING)
		engine_reaches(dst, KVP_ROOM_ACCEPTED);
}

static void half(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC];

	both_ready(cell);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	(void)engine_do(src, ENGINE_DELIVERED, 1);
	/* Of what has landed decode says nothing before all senders are there. */
	if (cell->what->state != MX_CLOSING)
		engine_arrived(&cell->w->engines[DST], FAULT_HALF);
}

static void piece_kept(struct cell *cell)
{
	half(cell);
	hold(cell);
	(void)engine_do(&cell->w->engines[SRC], ENGINE_SUBMIT,
			cell->what->state == MX_LANDED ? FAULT_REST_OPEN : FAULT_REST);
	fault_held(keeper(cell), cell->facts->hold);
}

static void over_released(struct cell *cell)
{
	for (int side = SRC; side < SIDES; side++)
		(void)engine_do(&cell->w->engines[side], ENGINE_WAIT, KVP_WAIT_RELEASED);
}

static void accept_kept(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC];

	hold(cell);
	(void)engine_do(&cell->w->engines[DST], ENGINE_EXPECT, 0);
	(void)engine_do(src, ENGINE_OPEN, 0);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
	fault_held(keeper(cell), cell->facts->hold);
}

static void reach_early(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC];

	switch (cell->what->state) {
	case MX_OPENED:
	case MX_PARKED:
		(void)engine_do(src, ENGINE_OPEN, 0);
		if (cell->what->state == MX_PARKED)
			(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
		break;
	case MX_OFFERED:
		(void)engine_do(&cell->w->engines[DST], ENGINE_EXPECT, 0);
		fault_parked(cell->w->daemons[PREFILL]);
		break;
	case MX_ACCEPTED:
		accept_kept(cell);
		break;
	case MX_READY:
		both_ready(cell);
		break;
	default: /* MX_FENCE */
		both_ready(cell);
		(void)engine_do(src, ENGINE_SUBMIT_FENCED, FAULT_FIRST);
		engine_reaches(src, KVP_ROOM_SENDING);
		break;
	}
}

static void reach_late(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC], *dst = &cell->w->engines[DST];

	switch (cell->what->state) {
	case MX_HALF:
		half(cell);
		break;
	case MX_CLOSING:
		half(cell);
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
		engine_reaches(src, KVP_ROOM_CLOSING);
		break;
	case MX_COMPLETE:
		hold(cell);
		room_whole(cell->w);
		over_released(cell);
		break;
	case MX_FAILED:
		piece_kept(cell);
		(void)engine_do(dst, ENGINE_ABORT, 0);
		over_released(cell);
		break;
	case MX_DONE:
		room_whole(cell->w);
		room_completes(cell->w);
		fault_reset(&cell->w->room);
		break;
	default:
		piece_kept(cell);
		break;
	}
}

/* What stands still for long runs into timers of the room itself; otherwise only the fault counts.
 */
static void reach(struct cell *cell)
{
	static const struct kvp_timers stopping = { .offer_ms = MX_OFFER_MS,
						    .open_ms = MX_OPEN_MS,
						    .progress_ms = MX_PROGRESS_MS,
						    .fence_ms = MX_FENCE_MS };

	for (int side = SRC; side < SIDES; side++) {
		struct engine *engine = &cell->w->engines[side];

		engine->timers = cell->what->fault == MX_STOP ? stopping : (struct kvp_timers){ 0 };
		engine->n_missing = cell->what->state == MX_CLOSING;
	}
	if (cell->what->state <= MX_FENCE)
		reach_early(cell);
	else
		reach_late(cell);
}

/* ---- other rooms ---------------------------------------------------------------------------- */

/* A victim's own rooms are touched, of course: those of a client, or those of a daemon. */
static bool is_other(const struct cell *cell, uint32_t i)
{
	return mx_is_client(cell->what->victim) ||
	       (others[i][SRC] != cell->host && others[i][DST] != cell->host);
}

static void others_begin(struct cell *cell)
{
	for (uint32_t i = 0; i < OTHERS; i++) {
		struct fault_room *other = &cell->w->others[i];

		(void)kvp_process(other->src.client);
		(void)kvp_process(other->dst.client);
		if (!is_other(cell, i))
			continue;
		fault_expect(other);
		fault_open(other);
		fault_submit(other, FAULT_FIRST);
		fault_arrived(&other->dst, FAULT_HALF);
	}
}

static void others_end(struct cell *cell)
{
	for (uint32_t i = 0; i < OTHERS; i++) {
		if (!is_other(cell, i))
			continue;
		fault_submit(&cell->w->others[i], FAULT_REST);
		fault_completes(&cell->w->others[i]);
		fault_reset(&cell->w->others[i]);
	}
}

/* ---- the fault ------------------------------------------------------------------------------ */

static pid_t victim_pid(const struct cell *cell)
{
	return mx_is_client(cell->what->victim) ? cell->w->engines[cell->side].pid
						: cell->victim->pid;
}

static uint16_t port_of(const struct rig_daemon *daemon)
{
	return (uint16_t)strtoul(strrchr(daemon->address, ':') + 1, NULL, 10);
}

static void cut(const struct cell *cell)
{
	const struct world *w = cell->w;
	uint32_t other = cell->host == PREFILL ? DECODE : PREFILL;
	uint16_t ports[2] = { port_of(cell->victim), port_of(w->daemons[other]) };
	char address[32];
	uint32_t n;

	net_address(other, address, sizeof(address));
	n = net_cut(cell->victim->pid, address, ports,
		    cell->what->fault == MX_CUT ? NET_OF_PORT : NET_BUT_PORT);
	RIG_REQUIRE(n > 0, "no such connection");
}

/* Stands still all the time but for a few milliseconds, never as long as others wait. */
static void crawl(const struct cell *cell)
{
	while (rig_now_ns() < cell->fault_ns + MX_SLOW_MS * UINT64_C(1000000)) {
		fault_stop(cell->victim->pid);
		rig_sleep_ms(MX_HEARTBEAT_MS);
		fault_go_on(cell->victim->pid);
		rig_sleep_ms(4);
	}
}

static enum net_way way_of(enum mx_fault fault)
{
	return fault == MX_LOST_OUT ? NET_OUT : fault == MX_LOST_IN ? NET_IN : NET_BOTH;
}

static void inject(struct cell *cell)
{
	struct engine *engine = &cell->w->engines[cell->side];
	bool client = mx_is_client(cell->what->victim);

	cell->fault_ns = rig_now_ns();
	switch (cell->what->fault) {
	case MX_KILL:
		if (client)
			engine_kill(engine);
		else
			rig_daemon_kill(cell->victim);
		break;
	case MX_STOP:
		fault_stop(victim_pid(cell));
		break;
	case MX_CUT:
	case MX_CUT_DATA:
		if (client)
			(void)engine_do(engine, ENGINE_CUT, 0);
		else
			cut(cell);
		break;
	case MX_SLOW:
		if (client)
			(void)engine_do(engine, ENGINE_FLOOD, 0);
		else
			crawl(cell);
		break;
	default:
		net_partition(&cell->w->net, cell->host, way_of(cell->what->fault), true);
		break;
	}
}

static void undo(struct cell *cell)
{
	bool client = mx_is_client(cell->what->victim);

	switch (cell->what->fault) {
	case MX_KILL:
		if (client)
			engine_start(&cell->w->engines[cell->side], &cell->w->room,
				     cell->side == DST);
		else
			daemon_up(cell->w, cell->host);
		cell->held &= client || keeper(cell) != cell->victim;
		break;
	case MX_STOP:
		fault_go_on(victim_pid(cell));
		break;
	case MX_LOST_OUT:
	case MX_LOST_IN:
	case MX_LOST:
		net_partition(&cell->w->net, cell->host, way_of(cell->what->fault), false);
		break;
	default:
		break;
	}
}

/* ---- what the ends hear --------------------------------------------------------------------- */

/* An engine that stands still, or whose daemon does, hears when that is over. */
static bool hears_late(const struct cell *cell, enum side side)
{
	return cell->what->fault == MX_STOP && side == cell->side;
}

static void check_failed(struct cell *cell, enum side side, const struct engine_answer *answer)
{
	const struct mx_must *must = &cell->must[side];
	struct result *result = cell->result;
	char text[128];

	mx_must_text(must, text, sizeof(text));
	RIG_REQUIRE(answer->state.failed && !answer->state.complete,
		    "the %s end has not failed, it must: %s", side == DST ? "decode" : "prefill",
		    text);
	RIG_REQUIRE(must->statuses >> answer->state.status & 1, "%s end: %s, not %s: %s",
		    side == DST ? "decode" : "prefill", kvp_status_name(answer->state.status), text,
		    answer->reason);
	RIG_REQUIRE(strlen(answer->reason) >= 12 && strchr(answer->reason, ' '),
		    "no reason: \"%s\"", answer->reason);
	RIG_REQUIRE(!answer->state.retry == !mx_retry(answer->state.status), "retry: %u, %s",
		    answer->state.retry, kvp_status_name(answer->state.status));
	result->status[side] = answer->state.status;
	result->ms[side] = (uint32_t)((answer->at_ns - cell->fault_ns) / 1000000);
	snprintf(result->reason[side], sizeof(result->reason[side]), "%.127s", answer->reason);
	RIG_REQUIRE(result->ms[side] <= must->within_ms + SLACK_MS, "%u ms, %u are configured: %s",
		    result->ms[side], must->within_ms, answer->reason);
}

/* Released: from here on the engine does with its memory what it likes. */
static void dst_free(struct cell *cell, uint64_t arrived)
{
	fault_check_dest(&cell->w->room, arrived);
	fault_reset(&cell->w->room);
	cell->reset = true;
}

static void end_failed(struct cell *cell, enum side side)
{
	struct engine *engine = &cell->w->engines[side];
	struct engine_answer answer = engine_do(engine, ENGINE_WAIT, KVP_WAIT_TERMINAL);

	check_failed(cell, side, &answer);
	RIG_REQUIRE(side == SRC || answer.state.arrived >= cell->facts->arrived, "arrived %llu",
		    (unsigned long long)answer.state.arrived);
	(void)engine_do(engine, ENGINE_WAIT, KVP_WAIT_RELEASED);
	if (side == DST)
		dst_free(cell, answer.state.arrived);
	else
		fault_poison(&cell->w->room);
}

/* Its daemon has let go of its memory when it has unmapped it. */
static void end_gone(struct cell *cell, enum side side)
{
	struct world *w = cell->w;

	fault_maps_back(w->daemons[side], w->maps[side] - 2); /* pool and fence */
	if (side == DST && cell->facts->dst && !cell->facts->over)
		dst_free(cell, cell->facts->arrived);
	else if (side == SRC)
		fault_poison(&w->room);
}

static void end_completes(struct cell *cell, enum side side)
{
	struct engine_answer answer =
		engine_do(&cell->w->engines[side], ENGINE_WAIT, KVP_WAIT_TERMINAL);

	RIG_REQUIRE(answer.state.complete && !answer.state.failed, "%s: %s",
		    kvp_status_name(answer.state.status), answer.reason);
	if (side == DST)
		fault_check_all(&cell->w->room);
}

static void end_lives(struct cell *cell, enum side side)
{
	struct engine_answer answer = engine_do(&cell->w->engines[side], ENGINE_STATE, 0);

	RIG_REQUIRE(!answer.state.failed && !answer.state.complete, "the %s end does not wait: %s",
		    side == DST ? "decode" : "prefill", answer.reason);
}

static void end_keeps(struct cell *cell, enum side side)
{
	struct engine_answer answer = engine_do(&cell->w->engines[side], ENGINE_STATE, 0);
	bool failed = cell->what->state == MX_FAILED;

	RIG_REQUIRE(answer.state.failed == failed && answer.state.complete != failed &&
			    answer.state.released,
		    "the %s end has changed: %s", side == DST ? "decode" : "prefill",
		    answer.reason);
}

static void hear(struct cell *cell, enum side side)
{
	if (cell->heard[side])
		return;
	cell->heard[side] = true;
	switch (cell->must[side].outcome) {
	case MX_FAILS:
		end_failed(cell, side);
		break;
	case MX_GONE:
		end_gone(cell, side);
		break;
	case MX_COMPLETES:
		end_completes(cell, side);
		break;
	case MX_WAITS:
		end_lives(cell, side);
		break;
	case MX_KEEPS:
		end_keeps(cell, side);
		break;
	case MX_NO_END:
		break;
	}
}

/* ---- while it lasts ------------------------------------------------------------------------- */

/* Decode's engine stands still: prefill's does all that is left to do. */
static void prefill_goes_on(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC];
	uint32_t n = cell->facts->submitted;

	if (cell->facts->leg < MX_LEG_ACCEPTED)
		(void)engine_do(src, ENGINE_OPEN, 0);
	if (cell->what->state == MX_FENCE)
		(void)engine_do(src, ENGINE_SIGNAL, 0);
	if (n == 0)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	if (n < 2)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
	else if (n < cell->facts->chunks)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_LAST);
}

static void sleep_until(const struct cell *cell, uint32_t ms)
{
	uint64_t at = cell->fault_ns + ms * UINT64_C(1000000), now = rig_now_ns();

	if (now < at)
		rig_sleep_ms((unsigned int)((at - now) / 1000000 + 1));
}

static bool keeper_answers(const struct cell *cell)
{
	return mx_is_client(cell->what->victim) || keeper(cell) != cell->victim ||
	       (cell->what->fault != MX_KILL && cell->what->fault != MX_STOP);
}

/* That both daemons have lost their session, be there a room to tell or not. */
static void sessions_lost(const struct cell *cell)
{
	struct rig_daemon *const *daemons = cell->w->daemons;

	if (mx_is_client(cell->what->victim) || !mx_needs_net(cell->what))
		return;
	fault_session_lost(daemons[PREFILL], daemons[DECODE], cell->fault_ns);
	fault_session_lost(daemons[DECODE], daemons[PREFILL], cell->fault_ns);
}

static void client_stands(struct cell *cell)
{
	lift(cell); /* what the point keeps would run into a timer of its own */
	if (cell->side == DST && cell->facts->dst && !cell->facts->over &&
	    mx_completes_without(cell->what))
		prefill_goes_on(cell);
}

static void during(struct cell *cell)
{
	if (cell->what->fault == MX_STOP && mx_is_client(cell->what->victim))
		client_stands(cell);
	for (int side = SIDES - 1; side >= SRC; side--)
		if (!hears_late(cell, (enum side)side))
			hear(cell, (enum side)side);
	sessions_lost(cell);
	for (int side = SRC; side < SIDES; side++)
		if (cell->must[side].outcome == MX_WAITS)
			end_lives(cell, (enum side)side);
	if (keeper_answers(cell))
		lift(cell);
	others_end(cell);
	if (cell->what->fault == MX_STOP)
		sleep_until(cell, MX_STOP_MS);
}

/* ---- afterwards ----------------------------------------------------------------------------- */

/* What still was on its way has come by now, and has gone nowhere. */
static void late_bytes(struct cell *cell)
{
	for (uint32_t i = 0; i < OTHERS; i++) {
		if (is_other(cell, i))
			continue;
		fault_transfer(&cell->w->others[i]);
		fault_reset(&cell->w->others[i]);
	}
	if (cell->reset)
		fault_check_untouched(&cell->w->room);
	fault_restore(&cell->w->room);
}

static bool lives(const struct cell *cell, enum side side)
{
	return cell->must[side].outcome == MX_WAITS;
}

/* The sender that is missing will not come: the room is taken back. */
static void closing_aborted(struct cell *cell)
{
	(void)engine_do(&cell->w->engines[DST], ENGINE_ABORT, 0);
	for (int side = SRC; side < SIDES; side++) {
		(void)engine_do(&cell->w->engines[side], ENGINE_WAIT, KVP_WAIT_RELEASED);
		cell->must[side].outcome = MX_FAILS;
	}
	fault_reset(&cell->w->room);
}

static void src_rest(struct cell *cell)
{
	struct engine *src = &cell->w->engines[SRC];
	uint32_t n = lives(cell, SRC) ? cell->facts->submitted : 0;
	uint32_t chunks = lives(cell, SRC) ? cell->facts->chunks : 2;

	if (!lives(cell, SRC))
		(void)engine_do(src, ENGINE_OPEN, 0);
	else if (cell->what->state == MX_FENCE)
		(void)engine_do(src, ENGINE_SIGNAL, 0);
	if (n == 0)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_FIRST);
	if (n < 2)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_REST);
	else if (n < chunks)
		(void)engine_do(src, ENGINE_SUBMIT, FAULT_LAST);
}

/* The same room on the same pages. */
static void again(struct cell *cell)
{
	struct world *w = cell->w;

	if (cell->what->state == MX_CLOSING && lives(cell, DST))
		closing_aborted(cell);
	for (int side = SRC; side < SIDES; side++) {
		struct engine *engine = &w->engines[side];

		engine->n_missing = 0;
		engine->timers = (struct kvp_timers){ 0 };
		if (!lives(cell, (enum side)side))
			(void)engine_do(engine, ENGINE_FORGET, 0);
	}
	if (!lives(cell, DST)) {
		fault_reset(&w->room);
		(void)engine_do(&w->engines[DST], ENGINE_EXPECT, 0);
	}
	src_rest(cell);
	room_completes(w);
	fault_reset(&w->room);
}

/* Nothing is left behind. */
static void clean(const struct cell *cell)
{
	const uint64_t newer = strncmp(kvp_net_ucx_version(), "1.13.", 5) ? HEAP_SLACK_NEWER : 0;
	struct world *w = cell->w;
	uint64_t heap[2];

	all_idle(w);
	for (uint32_t i = 0; i < NET_HOSTS; i++) {
		fault_fds_back(w->daemons[i], w->fds[i] + FDS_SLACK);
		fault_maps_back(w->daemons[i], w->maps[i]);
		fault_heap(w->daemons[i], heap);
		for (uint32_t k = 0; k < 2; k++)
			RIG_REQUIRE(heap[k] <= w->heap[i][k] + heap_slack[k] + newer,
				    "%s: %llu bytes of heap, %llu before", w->daemons[i]->name,
				    (unsigned long long)heap[k], (unsigned long long)w->heap[i][k]);
	}
}

static void cell_run(struct world *w, const struct mx_cell *what, struct result *result)
{
	struct cell cell = { .w = w, .what = what, .result = result };

	cell.facts = &mx_states[what->state];
	cell.side = mx_is_src(what->victim) ? SRC : DST;
	cell.host = cell.side == SRC ? PREFILL : DECODE;
	cell.victim = w->daemons[cell.host];
	for (int side = SRC; side < SIDES; side++)
		cell.must[side] = mx_must(what, side == DST);
	others_begin(&cell);
	reach(&cell);
	inject(&cell);
	during(&cell);
	undo(&cell);
	for (int side = SIDES - 1; side >= SRC; side--)
		hear(&cell, (enum side)side);
	lift(&cell);
	late_bytes(&cell);
	again(&cell);
	clean(&cell);
}

/* ---- running them --------------------------------------------------------------------------- */

static enum mx_state state_of_world; /* of this process */
/* In one world, whose slack stays the same: the more often, the less can be left behind unseen. */
static uint32_t repeats = 1;

static void world_run(struct rig *rig)
{
	struct world w;
	char name[96];

	world_begin(&w, rig);
	for (uint32_t i = 0; i < n_cells; i++) {
		if (!chosen[i] || cells[i].state != state_of_world || results[i].state != NOT_RUN)
			continue;
		if (mx_needs_net(&cells[i]) && !w.net.on) {
			results[i].state = SKIPPED;
			continue;
		}
		cell_name(&cells[i], name, sizeof(name));
		results[i].state = RUNNING;
		result_shown = &results[i];
		printf("     %s\n", name);
		fflush(stdout);
		for (uint32_t n = 0; n < repeats; n++)
			cell_run(&w, &cells[i], &results[i]);
		results[i].state = GOOD;
	}
}

static uint32_t left_of(enum mx_state state)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < n_cells; i++)
		n += chosen[i] && cells[i].state == state && results[i].state == NOT_RUN;
	return n;
}

static void cell_failed(struct result *result, const char *name)
{
	result->state = BAD;
	if (result->by_abort && ++result->aborts < UCX_TRIES)
		result->state = NOT_RUN;
	result->by_abort = 0;
	printf("%s %s\n", result->state == BAD ? "FAIL" : "UCX ABORTED, again:", name);
}

/* A cell that fails takes its world with it; the rest gets a new one. */
static void state_run(enum mx_state state)
{
	const struct rig_scenario scenario = { mx_states[state].name, world_run };
	uint32_t in_vain = 0;
	char name[96];

	state_of_world = state;
	for (uint32_t n; (n = left_of(state)) > 0;) {
		rig_deadline_s = WORLD_SECS + n * repeats * CELL_SECS;
		if (rig_run(&scenario))
			continue;
		for (uint32_t i = 0; i < n_cells; i++) {
			if (cells[i].state != state || results[i].state != RUNNING)
				continue;
			cell_name(&cells[i], name, sizeof(name));
			cell_failed(&results[i], name);
		}
		if (left_of(state) == n && ++in_vain == UCX_TRIES)
			return; /* not even the world comes up */
	}
}

static uint32_t jobs(void)
{
	const char *text = getenv("KVP_JOBS");
	unsigned long n = text ? strtoul(text, NULL, 10) : JOBS;

	return n ? (uint32_t)n : 1;
}

static void run_all(void)
{
	uint32_t running = 0;

	for (uint32_t s = 0; s < MX_STATES; s++) {
		if (left_of((enum mx_state)s) == 0)
			continue;
		if (running == jobs()) {
			RIG_REQUIRE(wait(NULL) > 0);
			running--;
		}
		fflush(stdout);
		if (fork() == 0) {
			state_run((enum mx_state)s);
			fflush(stdout);
			_exit(0);
		}
		running++;
	}
	while (running--)
		RIG_REQUIRE(wait(NULL) > 0);
}

/* ---- printing ------------------------------------------------------------------------------- */

static void end_text(const struct mx_cell *cell, const struct result *result, bool is_dst,
		     char *buf, size_t bytes)
{
	struct mx_must must = mx_must(cell, is_dst);

	if (result && result->state == GOOD && must.outcome == MX_FAILS)
		must.statuses = UINT64_C(1) << result->status[is_dst];
	mx_must_text(&must, buf, bytes);
}

static void cell_print(const struct mx_cell *cell, const struct result *result)
{
	char src[96], dst[96];

	end_text(cell, result, false, src, sizeof(src));
	end_text(cell, result, true, dst, sizeof(dst));
	if (result && result->state != GOOD)
		printf(" %s |", result->state == SKIPPED ? "skipped"
				: result->state == BAD   ? "**wrong**"
							 : "");
	else if (!strcmp(src, dst))
		printf(" %s |", src);
	else
		printf(" %s, %s |", src, dst);
}

static const struct mx_cell *cell_of(uint32_t state, uint32_t victim, uint32_t fault)
{
	for (uint32_t i = 0; i < n_cells; i++)
		if (cells[i].state == state && cells[i].victim == victim && cells[i].fault == fault)
			return &cells[i];
	return NULL;
}

/* One table a victim: rows are states, columns faults; what prefill's end comes to, then decode's.
 */
static void table_print(bool predicted)
{
	const struct mx_cell *cell;

	for (uint32_t v = 0; v < MX_VICTIMS; v++) {
		printf("\n### %s\n\n| state |", mx_victims[v]);
		for (uint32_t f = 0; f < MX_FAULTS; f++)
			if (cell_of(0, v, f))
				printf(" %s |", mx_faults[f]);
		printf("\n| --- |");
		for (uint32_t f = 0; f < MX_FAULTS; f++)
			if (cell_of(0, v, f))
				printf(" --- |");
		printf("\n");
		for (uint32_t s = 0; s < MX_STATES; s++) {
			printf("| %s |", mx_states[s].name);
			for (uint32_t f = 0; f < MX_FAULTS; f++) {
				cell = cell_of(s, v, f);
				if (cell)
					cell_print(cell, predicted ? NULL : &results[cell - cells]);
			}
			printf("\n");
		}
	}
}

static const struct result *slowest(uint32_t fault, bool client, uint32_t status, uint32_t *n,
				    uint32_t *side)
{
	const struct result *worst = NULL;

	*n = 0;
	for (uint32_t i = 0; i < n_cells; i++)
		for (uint32_t k = SRC; k < SIDES; k++) {
			if (results[i].state != GOOD || results[i].status[k] != status ||
			    cells[i].fault != fault || mx_is_client(cells[i].victim) != client)
				continue;
			++*n;
			if (!worst || results[i].ms[k] > worst->ms[*side]) {
				worst = &results[i];
				*side = k;
			}
		}
	return worst;
}

/* The slowest event of each kind, with its words. */
static void times_print(void)
{
	uint32_t n, side = 0;

	printf("\n| fault | status | events | slowest, ms | reason of that one |\n"
	       "| --- | --- | --- | --- | --- |\n");
	for (uint32_t f = 0; f < MX_FAULTS; f++)
		for (uint32_t client = 0; client < 2; client++)
			for (uint32_t status = 1; status < 32; status++) {
				const struct result *worst = slowest(f, client, status, &n, &side);

				if (worst)
					printf("| %s, %s | %s | %u | %u | %s |\n", mx_faults[f],
					       client ? "client" : "daemon",
					       kvp_status_name((enum kvp_status)status), n,
					       worst->ms[side], worst->reason[side]);
			}
}

static int summary(void)
{
	uint32_t count[BAD + 1] = { 0 }, aborts = 0;

	for (uint32_t i = 0; i < n_cells; i++) {
		count[results[i].state] += chosen[i];
		aborts += results[i].aborts;
	}
	if (aborts)
		printf("UCX ended a daemon %u times; those cells were run again\n", aborts);
	if (count[SKIPPED])
		printf("SKIPPED: %u cells need network namespaces, which cannot be made here\n",
		       count[SKIPPED]);
	printf("%u passed, %u failed, %u skipped\n", count[GOOD],
	       count[BAD] + count[NOT_RUN] + count[RUNNING], count[SKIPPED]);
	return count[GOOD] == 0 || count[BAD] + count[NOT_RUN] + count[RUNNING] > 0;
}

/* ---- choosing ------------------------------------------------------------------------------- */

static void choose(int argc, char **argv)
{
	char name[96];

	for (int a = 1; a < argc; a++)
		if (argv[a][0] == 'x' && argv[a][1] >= '1' && argv[a][1] <= '9')
			repeats = (uint32_t)strtoul(argv[a] + 1, NULL, 10);
	for (uint32_t i = 0; i < n_cells; i++) {
		cell_name(&cells[i], name, sizeof(name));
		for (int a = 1; a < argc; a++)
			chosen[i] |= !strcmp(argv[a], "all") ||
				     (!strcmp(argv[a], "sample") && i % SAMPLE == 0) ||
				     strstr(name, argv[a]);
	}
}

int main(int argc, char **argv)
{
	bool all = argc == 2 && !strcmp(argv[1], "all");

	/* Large blocks are mappings of their own however often they are freed: those of UCX. */
	(void)setenv("MALLOC_MMAP_THRESHOLD_", "65536", 1); /* fails without memory only */
	/* And what is free counts as free. */
	(void)setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1);

	n_cells = mx_cells(cells);
	if (argc == 2 && !strcmp(argv[1], "table")) {
		table_print(true);
		return 0;
	}
	if (!fault_points())
		return 77;
	results = mmap(NULL, MAX_CELLS * sizeof(*results), PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	RIG_REQUIRE(results != MAP_FAILED, "%s", strerror(errno));
	choose(argc, argv);
	run_all();
	if (all)
		table_print(false);
	times_print();
	return summary();
}
