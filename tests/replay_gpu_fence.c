/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fences and pools on a GPU at bad moments, with real daemons: words that jump, wrap and go back, a
 * producer that dies as its fence is reached, answers that come too late, a pool that comes back at
 * the same address while a room is parked. Without a GPU on the driver that is none.
 *
 * usage: replay_gpu_fence [SCENARIO ...]
 */

#include <cjson/cJSON.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "tests/support_end.h"

#define PIECE (2 * END_PAGE) /* tokens of a chunk */
#define TOKENS (8 * PIECE)
#define DEATHS 8u
#define CONFIG "[gpu]\ndevices = all\nslots = 2\nslot_bytes = 1M\n"

enum { STAGE_HELD };

static uint64_t deadline(void)
{
	return rig_now_ns() + END_SECS * UINT64_C(1000000000);
}

static double has(const struct rig_daemon *daemon, const char *what)
{
	cJSON *status = rig_ask(daemon, "status", NULL);
	double n = rig_number(status, what);

	cJSON_Delete(status);
	return n;
}

/* So many pools, each with its memory, and so many fences. */
static void left(const struct rig_daemon *daemon, uint32_t pools, uint32_t fences)
{
	uint64_t until = deadline();

	while (has(daemon, "pools") != pools || has(daemon, "fences") != fences ||
	       end_lanes(daemon, "gpu", "imports") != pools) {
		RIG_REQUIRE(rig_now_ns() < until, "pools %.0f, fences %.0f, imports %.0f",
			    has(daemon, "pools"), has(daemon, "fences"),
			    end_lanes(daemon, "gpu", "imports"));
		rig_sleep_ms(2);
	}
}

static void nothing_left(const struct rig_daemon *daemon)
{
	left(daemon, 0, 0);
}

static void prefill_make(struct end *end, const struct rig_daemon *daemon, enum device_kind kind)
{
	end_make(end, &(struct end_plan){ daemon, .kind = kind, .room = 7, .tokens = TOKENS });
}

static void decode_make(struct end *end, const struct rig_daemon *daemon, enum device_kind kind)
{
	end_make(end, &(struct end_plan){ daemon, .kind = kind, .n_ranks = 1, .room = 7,
					  .tokens = TOKENS });
}

/* Waits until so many tokens are free at the source, and requires that no more are. */
static void only_free(struct end *end, uint32_t chunks)
{
	uint64_t until = deadline();

	while (rig_state(end->client, end->id).source_free < chunks) {
		RIG_REQUIRE(rig_now_ns() < until, "%u of %u chunks are read",
			    rig_state(end->client, end->id).source_free, chunks);
		RIG_REQUIRE(kvp_wait(end->client, 10) >= -ETIMEDOUT);
	}
	/* A lane that is wrong about it reads in its next looks: some of these. */
	for (uint32_t i = 0; i < 10; i++) {
		(void)kvp_wait(end->client, 2);
		RIG_REQUIRE(rig_state(end->client, end->id).source_free == chunks,
			    "%u chunks are read, and %u may be",
			    rig_state(end->client, end->id).source_free, chunks);
	}
}

/* ---- words ----------------------------------------------------------------------------------- */

/*
 * Chunks wait for these values of one word, in order. Rows are written just before the word has the
 * value that lets them be read; others are not there yet, so that one read too early shows.
 */
static void words(struct rig *rig)
{
	static const uint64_t awaited[] = { 1, 5, 7, 8, UINT64_C(1) << 32, UINT64_MAX, 3, 4 };
	static const struct {
		uint64_t word;
		uint32_t chunks; /* that may be read then */
	} steps[] = {
		{ 6, 2 },                       /* by more than one, between two */
		{ 2, 2 },                       /* back: what was read stays read */
		{ 7, 3 },                       /* one after the other */
		{ (UINT64_C(1) << 32) - 1, 4 }, /* all of the low half */
		{ UINT64_C(1) << 32, 5 },       /* none of it */
		{ UINT64_MAX - 1, 5 },          /* next to the end */
		{ UINT64_MAX, 8 },              /* the end: no value is above it */
		{ 0, 8 },                       /* and round: all are read */
	};
	const struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct kvp_fence *fence;
	struct end from, to;
	uint32_t n = 0;

	prefill_make(&from, daemon, DEVICE_IPC);
	decode_make(&to, daemon, DEVICE_CHUNKS);
	RIG_CALL(from.client, kvp_fence_create(from.client, 3, &fence));
	RIG_CALL(from.client, kvp_fence_map_device(fence));
	end_open(&from);
	end_expect(&to);
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(awaited); i++)
		end_submit(&from, (uint64_t)i * PIECE, PIECE, fence, awaited[i]);
	RIG_REQUIRE(!rig_await(from.client, from.id, KVP_WAIT_READY, END_SECS).failed);
	kvp_fence_signal(fence, 1, UINT64_MAX); /* another word */
	only_free(&from, 0);
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(steps); i++) {
		end_write(&from, (uint64_t)n * PIECE, (uint64_t)steps[i].chunks * PIECE);
		n = steps[i].chunks;
		RIG_CALL(from.client,
			 kvp_fence_stream_signal(fence, 0, steps[i].word, device_stream()));
		device_sync();
		only_free(&from, n);
	}
	end_await(&to);
	end_check(&to, TOKENS);
	end_close(&from);
	end_close(&to);
	nothing_left(daemon);
}

/* ---- a producer that dies as its fence is reached -------------------------------------------- */

struct death {
	struct rig *rig;
	const struct rig_daemon *daemon;
	uint32_t round;
};

/* The word has its value, and the process is gone a little later, or at once. */
static void dying(void *arg)
{
	const struct death *death = arg;
	struct kvp_fence *fence;
	struct end from;
	uint64_t until;

	prefill_make(&from, death->daemon, death->round % 2 ? DEVICE_CHUNKS : DEVICE_IPC);
	RIG_CALL(from.client, kvp_fence_create(from.client, 1, &fence));
	RIG_CALL(from.client, kvp_fence_map_device(fence));
	end_open(&from);
	end_submit(&from, 0, TOKENS, fence, 1);
	RIG_REQUIRE(!rig_await(from.client, from.id, KVP_WAIT_READY, END_SECS).failed);
	end_write(&from, 0, TOKENS);
	until = rig_now_ns() + death->round / 2 * UINT64_C(150000);
	RIG_CALL(from.client, kvp_fence_stream_signal(fence, 0, 1, device_stream()));
	device_sync();
	while (rig_now_ns() < until)
		;
	(void)raise(SIGKILL);
}

/* All rows or a failure that names the producer; its pages are its own again in both cases. */
static void bereaved(void *arg)
{
	const struct death *death = arg;
	struct kvp_room_state state;
	struct end to;

	decode_make(&to, death->daemon, DEVICE_IPC);
	end_expect(&to);
	rig_stage_set(death->rig, STAGE_HELD, death->round + 1);
	state = rig_await(to.client, to.id, KVP_WAIT_RELEASED, END_SECS);
	RIG_REQUIRE(state.complete || state.status == KVP_STATUS_CLIENT_LOST, "%s: %s",
		    kvp_status_name(state.status), state.reason);
	printf("     %s\n", state.complete ? "complete" : state.reason);
	fflush(stdout);
	if (state.complete)
		end_check(&to, TOKENS);
	end_close(&to);
}

static void deaths(struct rig *rig)
{
	struct death death = { .rig = rig, .daemon = rig_daemon_start(rig, "node", CONFIG) };
	int status;
	pid_t pid;

	for (death.round = 0; death.round < DEATHS; death.round++) {
		rig_rank_start(rig, "decode", bereaved, &death);
		rig_stage_wait(rig, STAGE_HELD, death.round + 1, END_SECS);
		pid = rig_fork("prefill", dying, &death);
		RIG_REQUIRE(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
		rig_ranks_join(rig, END_SECS);
		nothing_left(death.daemon);
	}
}

/* ---- answers that come too late -------------------------------------------------------------- */

/* The daemon is stopped while it is asked, and goes on when nobody waits any more. */
static void late_answers(struct rig *rig)
{
	const struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_entry_desc entry = { .klass = KVP_BLOB, .bytes = 4096 };
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .fd = -1, .bytes = 4096 };
	struct kvp_fence *fence = NULL;
	struct kvp_client *client;
	uint32_t pool = 0;

	options.socket = daemon->socket;
	options.timeout_ms = 1000;
	RIG_REQUIRE(kvp_client_open(&client, &options) == 0);
	mem.addr = device_alloc(1 << 20);
	desc.entries = &entry;
	desc.n_entries = desc.n_mems = 1;
	desc.mems = &mem;
	RIG_REQUIRE(kill(daemon->pid, SIGSTOP) == 0);
	RIG_REQUIRE(kvp_fence_create(client, 4, &fence) == -ETIMEDOUT && !fence);
	RIG_REQUIRE(kvp_pool_register(client, &desc, &pool) == -ETIMEDOUT);
	RIG_REQUIRE(kill(daemon->pid, SIGCONT) == 0);
	/* By the same connection: answered after what was asked before. */
	RIG_CALL(client, kvp_fence_create(client, 4, &fence));
	RIG_CALL(client, kvp_pool_register(client, &desc, &pool));
	left(daemon, 1, 1);
	kvp_client_close(client);
	nothing_left(daemon);
	device_free(mem.addr);
}

/* ---- owners that are gone before their memory is mapped -------------------------------------- */

/* Sends its registration to a daemon that is stopped, and dies. */
static void hasty(void *arg)
{
	const struct death *death = arg;
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .fd = -1 };
	struct rig_pool pool = { 0 };
	struct kvp_client *client;

	options.socket = death->daemon->socket;
	options.timeout_ms = 1000;
	RIG_REQUIRE(kvp_client_open(&client, &options) == 0);
	(void)rig_pool_entry(&pool, 0, END_ROW, END_PAGE, END_PAGES);
	device_pool_allocate(&pool, "hasty", 1, death->round % 2 ? DEVICE_CHUNKS : DEVICE_IPC);
	mem.addr = pool.device;
	mem.bytes = pool.bytes;
	desc.entries = pool.entries;
	desc.n_entries = desc.n_mems = 1;
	desc.mems = &mem;
	rig_stage_set(death->rig, STAGE_HELD, 2 * death->round + 1);
	rig_stage_wait(death->rig, STAGE_HELD, 2 * death->round + 2, END_SECS);
	RIG_REQUIRE(kvp_pool_register(client, &desc, &pool.id) == -ETIMEDOUT);
	(void)raise(SIGKILL);
}

/* A pool comes and goes. */
static void probe(void *arg)
{
	const struct death *death = arg;
	struct end end;

	prefill_make(&end, death->daemon, DEVICE_IPC);
	end_close(&end);
}

/* Its end is there as soon as its pool: the lane may still be mapping that. */
static void hasty_owners(struct rig *rig)
{
	struct death death = { .rig = rig, .daemon = rig_daemon_start(rig, "node", CONFIG) };
	int status;
	pid_t pid;

	for (death.round = 0; death.round < 2; death.round++) {
		pid = rig_fork("hasty", hasty, &death);
		rig_stage_wait(rig, STAGE_HELD, 2 * death.round + 1, END_SECS);
		RIG_REQUIRE(kill(death.daemon->pid, SIGSTOP) == 0);
		rig_stage_set(rig, STAGE_HELD, 2 * death.round + 2);
		RIG_REQUIRE(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
		RIG_REQUIRE(kill(death.daemon->pid, SIGCONT) == 0);
		/* Behind it in the daemon's queue, and served. */
		rig_rank_start(rig, "probe", probe, &death);
		rig_ranks_join(rig, END_SECS);
		nothing_left(death.daemon);
	}
}

/* ---- the same address ------------------------------------------------------------------------ */

static void paused(void *arg, enum kvp_status status, const char *text)
{
	RIG_REQUIRE(status == KVP_OK, "%s", text);
	*(bool *)arg = true;
}

/* The memory goes and other memory comes, where the old one was. */
static void pool_back(struct end *end)
{
	struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .fd = -1 };
	bool is_paused = false;

	RIG_CALL(end->client, kvp_pool_pause(end->client, end->pool.id, paused, &is_paused));
	while (!is_paused)
		RIG_REQUIRE(kvp_wait(end->client, 10) >= -ETIMEDOUT);
	device_pool_renew(&end->pool);
	mem.addr = end->pool.device;
	mem.bytes = end->pool.bytes;
	RIG_CALL(end->client, kvp_pool_resume_mems(end->client, end->pool.id, &mem, 1));
}

/* Rooms that are parked when the pool is paused fail; those after it read and write new memory. */
static void same_address(struct rig *rig)
{
	const struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct kvp_room_state state;
	struct end from, to;

	prefill_make(&from, daemon, DEVICE_CHUNKS);
	decode_make(&to, daemon, DEVICE_CHUNKS);
	for (uint64_t room = 7; room < 10; room++) {
		from.plan.room = to.plan.room = 100 + room;
		end_open(&from); /* nobody expects it: it is parked with a chunk */
		end_submit(&from, 0, TOKENS, NULL, 0);
		pool_back(&from);
		state = rig_await(from.client, from.id, KVP_WAIT_RELEASED, END_SECS);
		RIG_REQUIRE(state.failed && state.status == KVP_STATUS_POOL_GONE, "%s: %s",
			    kvp_status_name(state.status), state.reason);
		end_expect(&to); /* nobody sends it any more */
		pool_back(&to);
		state = rig_await(to.client, to.id, KVP_WAIT_RELEASED, END_SECS);
		RIG_REQUIRE(state.failed, "%s", state.reason);
		left(daemon, 2, 0);

		from.plan.room = to.plan.room = room;
		end_open(&from);
		end_expect(&to);
		end_write(&from, 0, TOKENS);
		end_submit(&from, 0, TOKENS, NULL, 0);
		end_await(&to);
		end_await(&from);
		end_check(&to, TOKENS);
		kvp_room_forget(from.client, from.id);
		kvp_room_forget(to.client, to.id);
	}
	end_close(&from);
	end_close(&to);
	nothing_left(daemon);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "words", words },
		{ "producers that die", deaths },
		{ "late answers", late_answers },
		{ "owners in a hurry", hasty_owners },
		{ "the same address", same_address },
	};

	if (!device_or_fake(argv))
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
