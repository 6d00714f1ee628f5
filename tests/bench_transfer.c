/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a transfer costs, as ratios within one run: packed against raw and against a naive put;
 * landing against a plain socket stream; local against memcpy; a small chunk against the round
 * trips it cannot avoid; a chunk with many open rooms against one with few; fairness of senders;
 * idle wake-ups.
 *
 * usage: bench_transfer [landing] [packed] [local] [latency] [rooms] [fair] [idle] [sums] (none:
 * all)
 */

#include <cjson/cJSON.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support_baseline.h"
#include "tests/support_rig.h"

#define LAYERS 7u
#define ROW 576u
#define PAGE 64u
#define DESTS 4u
#define CHUNK 8192u
#define REPS 5u
#define PAIRS 25u
#define SECS 120
#define FAIR_SENDERS 8u
#define FAIR_CHUNKS 48u
#define FEW_ROOMS 10u
#define MANY_ROOMS 10000u
#define SMALL_CHUNKS 1500u
#define ROUNDS 2000u
#define FIRST_ROOMS 300u /* below SMALL_CHUNKS */

/* The way of a page: when its submit began, and what the daemons noted then. */
enum {
	HOP_SUBMIT,
	HOP_LANE,   /* the sender's lane has the order */
	HOP_PACKED, /* the rows are in a slot */
	HOP_DATA,   /* the receiver's lane has the first byte */
	HOPS
};

enum { STAGE_READY, STAGE_GO, STAGE_DONE, STAGE_FIRST, STAGE_COUNT = 16 };

/* Results that the ranks, processes of their own, leave for the parent. */
static struct results {
	double secs[PAIRS], stream[PAIRS];
	double small[2][SMALL_CHUNKS];
	double turns[2][PAIRS];
	double hops[HOPS][FIRST_ROOMS];
} * results;

/* Two daemons stand for two nodes: each with half of the cores, or where the scheduler puts them.
 */
static bool apart;

static void place(enum kvp_base_node node)
{
	kvp_base_place(apart ? node : KVP_BASE_ANY);
}

struct job {
	struct rig *rig;
	const struct rig_daemon *own, *other; /* this end's daemon, the senders' daemon */
	uint32_t tokens;                      /* of a prompt */
	uint32_t n_dests, sender, n_senders;
	uint32_t layers, row, reps;
	uint32_t idle_rooms, idle_pages;
	bool paired; /* with a plain stream before each prompt */
};

/* Pairs of daemons that know nothing of each other, measured in turns. */
struct worlds {
	struct job send[2];
	uint32_t n;
};

static double gigabytes(const struct job *job)
{
	return (double)job->tokens * job->layers * job->row / 1e9;
}

static struct kvp_base_job baseline(uint32_t tokens, uint32_t reps)
{
	return (struct kvp_base_job){ .pool_bytes = (uint64_t)tokens * LAYERS * ROW,
				      .rows = (uint64_t)tokens * LAYERS,
				      .row_bytes = ROW,
				      .n_dests = DESTS,
				      .repetitions = reps,
				      .far = apart ? KVP_BASE_FAR : KVP_BASE_ANY };
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void pool_of(struct rig_pool *pool, const struct job *job, uint32_t pages, uint64_t salt)
{
	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < job->layers; i++)
		(void)rig_pool_entry(pool, i, job->row, PAGE, pages);
	rig_pool_allocate(pool, "bench", salt);
}

static void pool_register(struct rig_pool *pool, struct kvp_client *client)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	desc.entries = pool->entries;
	desc.n_entries = pool->n_entries;
	desc.fds = &pool->fd;
	desc.n_fds = 1;
	RIG_CALL(client, kvp_pool_register(client, &desc, &pool->id));
}

static kvp_room_id open_room(struct kvp_client *client, const struct job *job, uint32_t pool,
			     uint64_t room)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	kvp_room_id id;

	open.room = room;
	open.sender = job->sender;
	open.pool = pool;
	open.sides = &side;
	open.n_sides = 1;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	return id;
}

static void submit(struct kvp_client *client, kvp_room_id id, const uint32_t *pages, uint64_t start,
		   uint64_t tokens, bool last)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	side.pos0 = start;
	side.pages = pages + start / PAGE;
	side.n_pages = (uint32_t)KVP_DIV_UP(tokens, PAGE);
	chunk.start = start;
	chunk.tokens = tokens;
	chunk.last = last;
	chunk.sides = &side;
	chunk.n_sides = 1;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
}

static kvp_room_id expect_room(struct kvp_client *client, const struct job *job,
			       const struct rig_pool *pool, uint64_t room, uint32_t dest,
			       const uint32_t *pages)
{
	struct kvp_expect_sender sender = { job->other->address, job->sender, job->n_dests,
					    KVP_ROLE_DATA };
	struct kvp_side_desc side = { .page = PAGE,
				      .dcp_size = job->n_dests,
				      .dcp_rank = dest,
				      .interleave = 1,
				      .pages = pages };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	kvp_room_id id;

	side.n_pages = (uint32_t)KVP_DIV_UP(job->tokens, PAGE * job->n_dests);
	expect.room = room;
	expect.dest = dest;
	expect.pool = pool->id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = job->tokens;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	return id;
}

/* Sends the prompt of a ready room: seconds from the first submit to all delivered. */
static double send_prompt(struct kvp_client *client, const struct job *job, kvp_room_id id,
			  const uint32_t *pages)
{
	uint32_t chunks = 0;
	double start = kvp_base_now(), secs;

	for (uint32_t at = 0; at < job->tokens; at += CHUNK, chunks++)
		submit(client, id, pages, at, KVP_MIN(CHUNK, job->tokens - at),
		       at + CHUNK >= job->tokens);
	RIG_REQUIRE(!kvp_room_wait_delivered(client, id, chunks, SECS * 1000));
	secs = kvp_base_now() - start;
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	kvp_room_forget(client, id);
	return secs;
}

/* One prompt after the other to n_dests destinations. */
static void prefill(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "prefill");
	uint32_t n_pages = (uint32_t)KVP_DIV_UP(job->tokens, PAGE) + 1;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(n_pages, sizeof(*pages));
	struct kvp_base_job base = baseline(job->tokens, job->reps);
	struct kvp_base_stream stream;
	struct rig_pool pool;

	if (job->paired)
		RIG_REQUIRE(!kvp_base_stream_open(&stream, &base));
	pool_of(&pool, job, n_pages, 1);
	pool_register(&pool, client);
	rig_pages(pages, n_pages - 1, 1, n_pages, 7);
	for (uint32_t rep = 0; rep < job->reps; rep++) {
		kvp_room_id id = open_room(client, job, pool.id, 100 + rep);

		RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
		if (job->paired)
			RIG_REQUIRE(!kvp_base_stream_run(&stream, &results->stream[rep]));
		results->secs[rep] = send_prompt(client, job, id, pages);
		rig_stage_set(job->rig, STAGE_DONE, rep + 1);
	}
	if (job->paired)
		RIG_REQUIRE(!kvp_base_stream_close(&stream, 0));
	kvp_client_close(client);
}

static void decode(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	uint32_t per_rank = (uint32_t)KVP_DIV_UP(job->tokens, PAGE * job->n_dests);
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(per_rank, sizeof(*pages));
	struct rig_pool *pools = calloc(job->n_dests, sizeof(*pools));
	kvp_room_id ids[DESTS];

	rig_pages(pages, per_rank, 1, per_rank + 1, 9);
	for (uint32_t d = 0; d < job->n_dests; d++) {
		pool_of(&pools[d], job, per_rank + 1, 2 + d);
		pool_register(&pools[d], client);
	}
	for (uint32_t rep = 0; rep < job->reps; rep++) {
		for (uint32_t d = 0; d < job->n_dests; d++)
			ids[d] = expect_room(client, job, &pools[d], 100 + rep, d, pages);
		for (uint32_t d = 0; d < job->n_dests; d++) {
			RIG_REQUIRE(rig_await(client, ids[d], KVP_WAIT_RELEASED, SECS).complete);
			kvp_room_forget(client, ids[d]);
		}
		rig_stage_wait(job->rig, STAGE_DONE, rep + 1, SECS);
	}
	free(pools);
	kvp_client_close(client);
}

/* Runs the prompts between two daemons, or on one; the median time of a prompt. */
enum where { LANDING, LANDING_PAIRED, LOCAL };

static double run_prompts(uint32_t tokens, const char *config, enum where where)
{
	struct rig rig;
	struct job send = { .rig = &rig,
			    .tokens = tokens,
			    .n_dests = DESTS,
			    .layers = LAYERS,
			    .row = ROW,
			    .reps = where == LANDING_PAIRED ? PAIRS : REPS,
			    .paired = where == LANDING_PAIRED };
	struct job receive = send;

	rig_begin(&rig);
	place(KVP_BASE_NEAR);
	send.own = rig_daemon_start(&rig, "prefill", config);
	place(where == LOCAL ? KVP_BASE_NEAR : KVP_BASE_FAR);
	receive.own = where == LOCAL ? send.own : rig_daemon_start(&rig, "decode", config);
	receive.other = send.own;
	rig_rank_start(&rig, "decode", decode, &receive);
	place(KVP_BASE_NEAR);
	rig_rank_start(&rig, "prefill", prefill, &send);
	place(KVP_BASE_ANY);
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
	return kvp_base_median(results->secs, send.reps);
}

/* Prompts of the same source in two worlds in turns, first in one, then in the other. */
static void prefill_turns(void *arg)
{
	struct worlds *worlds = arg;
	const struct job *job = &worlds->send[0];
	uint32_t n_pages = (uint32_t)KVP_DIV_UP(job->tokens, PAGE) + 1;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(n_pages, sizeof(*pages));
	struct kvp_client *clients[2];
	struct rig_pool pools[2];

	pool_of(&pools[0], job, n_pages, 1);
	pools[1] = pools[0];
	for (uint32_t w = 0; w < 2; w++) {
		clients[w] = rig_client(worlds->send[w].own, "prefill");
		pool_register(&pools[w], clients[w]);
	}
	rig_pages(pages, n_pages - 1, 1, n_pages, 7);
	for (uint32_t turn = 0; turn < 2 * job->reps; turn++) {
		uint32_t rep = turn / 2, w = (turn + rep) % 2;
		kvp_room_id id = open_room(clients[w], job, pools[w].id, 100 + rep);

		RIG_REQUIRE(!rig_await(clients[w], id, KVP_WAIT_READY, SECS).failed);
		results->turns[w][rep] = send_prompt(clients[w], job, id, pages);
		rig_stage_set(worlds->send[w].rig, STAGE_DONE, rep + 1);
	}
	for (uint32_t w = 0; w < 2; w++)
		kvp_client_close(clients[w]);
}

/* Of the prompts in the second world to those in the first, by turns; leaves the medians. */
static double run_turns(uint32_t tokens, const char *const configs[2], bool local, double *medians)
{
	struct rig rigs[2];
	struct worlds worlds = { .n = 2 };
	struct job receive[2];
	double ratios[PAIRS];

	for (uint32_t w = 0; w < 2; w++) {
		struct job *send = &worlds.send[w];

		*send = (struct job){ .rig = &rigs[w],
				      .tokens = tokens,
				      .n_dests = DESTS,
				      .layers = LAYERS,
				      .row = ROW,
				      .reps = PAIRS };
		rig_begin(&rigs[w]);
		send->own = rig_daemon_start(&rigs[w], "prefill", configs[w]);
		receive[w] = *send;
		if (!local)
			receive[w].own = rig_daemon_start(&rigs[w], "decode", configs[w]);
		receive[w].other = send->own;
		rig_rank_start(&rigs[w], "decode", decode, &receive[w]);
	}
	rig_rank_start(&rigs[0], "prefill", prefill_turns, &worlds);
	for (uint32_t w = 0; w < 2; w++) {
		rig_ranks_join(&rigs[w], SECS);
		rig_end(&rigs[w]);
		rig_remove(&rigs[w]);
		medians[w] = kvp_base_median(results->turns[w], PAIRS);
	}
	for (uint32_t i = 0; i < PAIRS; i++)
		ratios[i] = results->turns[1][i] / results->turns[0][i];
	return kvp_base_median(ratios, PAIRS);
}

/* Of a plain stream to a prompt, each prompt with the stream before it: what the machine does
 * besides falls on both. Leaves the prompt's and the stream's medians too. */
static double run_pairs(uint32_t tokens, double *packed, double *stream)
{
	double ratios[PAIRS];

	(void)run_prompts(tokens, NULL, LANDING_PAIRED);
	for (uint32_t i = 0; i < PAIRS; i++)
		ratios[i] = results->stream[i] / results->secs[i];
	*packed = kvp_base_median(results->secs, PAIRS);
	*stream = kvp_base_median(results->stream, PAIRS);
	return kvp_base_median(ratios, PAIRS);
}

/* ---- sections -------------------------------------------------------------------------------- */

static const uint32_t prompts[] = { 4096, 32768, 131072 };

static void landing(uint32_t tokens)
{
	struct job job = { .tokens = tokens, .layers = LAYERS, .row = ROW };
	double packed, stream, ratio = run_pairs(tokens, &packed, &stream);

	printf("%-8s  %6u  %8.1f  %10.2f  %5.2f  %9.2f  %14.2f\n", apart ? "apart" : "anywhere",
	       tokens, gigabytes(&job) * 1e3, packed * 1e3, gigabytes(&job) / packed, stream * 1e3,
	       ratio);
	fflush(stdout);
}

static void bench_landing(void)
{
	puts("landing over tcp, 7 entries of 576 bytes, pages of 64, one sender, DCP 4, chunks of "
	     "8192, each prompt after a plain stream of as many bytes");
	puts("nodes     tokens  bytes MB  landing ms   GB/s  stream ms  stream/landing");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(prompts); i++) {
		apart = true;
		landing(prompts[i]);
		apart = false;
		landing(prompts[i]);
	}
}

static void bench_sums(void)
{
	static const char *const configs[2] = { NULL, "[data]\nchecksum = on\n" };

	puts("data.checksum: the same prompts in turns without and with sums");
	puts("tokens  way      without ms  with ms  with/without");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(prompts); i++) {
		for (uint32_t local = 0; local < 2; local++) {
			double medians[2];
			double ratio = run_turns(prompts[i], configs, local != 0, medians);

			printf("%6u  %-7s  %10.2f  %7.2f  %12.2f\n", prompts[i],
			       local ? "local" : "landing", medians[0] * 1e3, medians[1] * 1e3,
			       ratio);
			fflush(stdout);
		}
	}
}

static void bench_packed(void)
{
	puts("the same prompts packed, with packing off, and as naive puts; nodes apart");
	puts("tokens  packed ms  raw ms  put ms  raw/packed  put/packed");
	apart = true;
	for (size_t i = 0; i < KVP_ARRAY_SIZE(prompts); i++) {
		struct kvp_base_job base = baseline(prompts[i], REPS);
		double puts_s[REPS], packed, raw, put;

		packed = run_prompts(prompts[i], NULL, LANDING);
		RIG_REQUIRE(!kvp_base_put(&base, puts_s));
		raw = run_prompts(prompts[i], "[lane]\npack = off\n", LANDING);
		put = kvp_base_median(puts_s, REPS);
		printf("%6u  %9.2f  %6.1f  %6.1f  %10.2f  %10.2f\n", prompts[i], packed * 1e3,
		       raw * 1e3, put * 1e3, raw / packed, put / packed);
		fflush(stdout);
	}
	apart = false;
}

static void bench_local(void)
{
	static const uint32_t tokens[] = { 32768, 131072 };

	puts("local mode, the same prompt, both ends on one daemon");
	puts("tokens  local ms   GB/s  memcpy ms  memcpy/local");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(tokens); i++) {
		struct kvp_base_job base = baseline(tokens[i], REPS);
		struct job job = { .tokens = tokens[i], .layers = LAYERS, .row = ROW };
		double copies[REPS], copy_s, local;

		local = run_prompts(tokens[i], NULL, LOCAL);
		RIG_REQUIRE(!kvp_base_memcpy(&base, copies));
		copy_s = kvp_base_median(copies, REPS);
		printf("%6u  %8.2f  %5.2f  %9.2f  %12.2f\n", tokens[i], local * 1e3,
		       gigabytes(&job) / local, copy_s * 1e3, copy_s / local);
	}
}

/* One end of a room of small chunks. */
struct small {
	struct job *job;
	struct kvp_client *client;
	uint32_t *pages;
	kvp_room_id id;
};

static void small_begin(struct small *end, struct job *job)
{
	struct rig_pool pool;

	*end = (struct small){ .job = job, .client = rig_client(job->own, "prefill") };
	end->pages = calloc(SMALL_CHUNKS, sizeof(*end->pages));
	pool_of(&pool, job, SMALL_CHUNKS + 1, 1);
	pool_register(&pool, end->client);
	rig_pages(end->pages, SMALL_CHUNKS, 1, SMALL_CHUNKS + 1, 7);
	end->id = open_room(end->client, job, pool.id, 1);
	RIG_REQUIRE(!rig_await(end->client, end->id, KVP_WAIT_READY, SECS).failed);
}

/* The time from submit to delivered. */
static double small_chunk(struct small *end, uint32_t i)
{
	double start = kvp_base_now();

	submit(end->client, end->id, end->pages, (uint64_t)i * PAGE, PAGE, i + 1 == SMALL_CHUNKS);
	RIG_REQUIRE(!kvp_room_wait_delivered(end->client, end->id, i + 1, SECS * 1000));
	return kvp_base_now() - start;
}

static void small_end(struct small *end)
{
	RIG_REQUIRE(rig_await(end->client, end->id, KVP_WAIT_RELEASED, SECS).complete);
	rig_stage_set(end->job->rig, STAGE_DONE, 1);
	kvp_client_close(end->client);
	free(end->pages);
}

/* Small chunks one after the other, in turns between the worlds. */
static void prefill_small(void *arg)
{
	struct worlds *worlds = arg;
	struct small ends[2];

	for (uint32_t w = 0; w < worlds->n; w++)
		small_begin(&ends[w], &worlds->send[w]);
	for (uint32_t i = 0; i < SMALL_CHUNKS; i++)
		for (uint32_t w = 0; w < worlds->n; w++)
			results->small[w][i] = small_chunk(&ends[w], i);
	for (uint32_t w = 0; w < worlds->n; w++)
		small_end(&ends[w]);
}

/* The room of the small chunks, among idle ones that wait for a prefill that never comes. */
static void decode_small(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	uint32_t n_pages = SMALL_CHUNKS + job->idle_pages;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(n_pages, sizeof(*pages));
	struct job idle = *job;
	struct rig_pool pool;
	kvp_room_id id;

	idle.tokens = PAGE;
	pool_of(&pool, job, n_pages + 1, 2);
	pool_register(&pool, client);
	rig_pages(pages, n_pages, 1, n_pages + 1, 9);
	for (uint32_t i = 0; i < job->idle_rooms; i++)
		(void)expect_room(client, &idle, &pool, 1000 + i, 0, pages + SMALL_CHUNKS + i);
	id = expect_room(client, job, &pool, 1, 0, pages);
	rig_stage_set(job->rig, STAGE_READY, 1);
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_TERMINAL, SECS).complete);
	rig_stage_wait(job->rig, STAGE_DONE, 1, SECS);
	kvp_client_close(client);
}

/* 64-token chunks from submit to delivered, with idle rooms beside them; p50 of each world. */
static void run_small(const uint32_t *idle_rooms, uint32_t n, const struct job *shape, double *p50)
{
	struct rig rigs[2];
	struct worlds worlds = { .n = n };
	struct job receive[2];

	for (uint32_t w = 0; w < n; w++) {
		struct job *send = &worlds.send[w];

		*send = *shape;
		send->rig = &rigs[w];
		send->idle_rooms = idle_rooms[w];
		/* Pools of one size: far pages cost more than near ones, whatever the rooms. */
		send->idle_pages = idle_rooms[n - 1];
		rig_begin(&rigs[w]);
		place(KVP_BASE_NEAR);
		send->own = rig_daemon_start(&rigs[w], "prefill", NULL);
		place(KVP_BASE_FAR);
		receive[w] = *send;
		receive[w].own = rig_daemon_start(&rigs[w], "decode", NULL);
		receive[w].other = send->own;
		rig_rank_start(&rigs[w], "decode", decode_small, &receive[w]);
		rig_stage_wait(&rigs[w], STAGE_READY, 1, SECS);
	}
	place(KVP_BASE_NEAR);
	rig_rank_start(&rigs[0], "prefill", prefill_small, &worlds);
	place(KVP_BASE_ANY);
	for (uint32_t w = 0; w < n; w++) {
		rig_ranks_join(&rigs[w], SECS);
		rig_end(&rigs[w]);
		rig_remove(&rigs[w]);
		p50[w] = kvp_base_median(results->small[w], SMALL_CHUNKS);
	}
}

/* When the daemon noted this of a room, in seconds of CLOCK_MONOTONIC. */
static double stage_time(const cJSON *stages, const char *what)
{
	const cJSON *stage;

	cJSON_ArrayForEach (stage, stages) {
		const cJSON *name = cJSON_GetObjectItem(stage, "name");

		if (cJSON_IsString(name) && !strcmp(name->valuestring, what))
			return cJSON_GetObjectItem(stage, "monotonic_us")->valuedouble / 1e6;
	}
	rig_die(__FILE__, __LINE__, what, "no such stage of the room");
}

static cJSON *room_json(struct kvp_client *client, uint64_t room)
{
	char arg[32], *text = NULL;
	cJSON *json;

	snprintf(arg, sizeof(arg), "0x%llx", (unsigned long long)room);
	RIG_CALL(client, kvp_inspect(client, "room", arg, &text));
	json = cJSON_Parse(text);
	free(text);
	return json;
}

static const cJSON *room_stages(const cJSON *json)
{
	return cJSON_GetObjectItem(cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rooms"), 0),
				   "stages");
}

/* One room after the other, a page each. */
static void prefill_pages(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "prefill");
	struct rig_pool pool;

	pool_of(&pool, job, FIRST_ROOMS, 1);
	pool_register(&pool, client);
	for (uint32_t i = 0; i < FIRST_ROOMS; i++) {
		kvp_room_id id = open_room(client, job, pool.id, 1 + i);
		const uint32_t pages[] = { i };
		cJSON *json;

		RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
		results->hops[HOP_SUBMIT][i] = kvp_base_now();
		submit(client, id, pages, 0, PAGE, true);
		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		json = room_json(client, 1 + i);
		results->hops[HOP_LANE][i] = stage_time(room_stages(json), "first chunk");
		results->hops[HOP_PACKED][i] = stage_time(room_stages(json), "first packed");
		cJSON_Delete(json);
		kvp_room_forget(client, id);
		rig_stage_wait(job->rig, STAGE_DONE, i + 1, SECS);
	}
	kvp_client_close(client);
}

static void decode_pages(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	struct rig_pool pool;

	pool_of(&pool, job, FIRST_ROOMS, 2);
	pool_register(&pool, client);
	for (uint32_t i = 0; i < FIRST_ROOMS; i++) {
		const uint32_t pages[] = { FIRST_ROOMS - 1 - i };
		kvp_room_id id = expect_room(client, job, &pool, 1 + i, 0, pages);
		cJSON *json;

		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		json = room_json(client, 1 + i);
		results->hops[HOP_DATA][i] = stage_time(room_stages(json), "first data");
		cJSON_Delete(json);
		kvp_room_forget(client, id);
		rig_stage_set(job->rig, STAGE_DONE, i + 1);
	}
	kvp_client_close(client);
}

static void run_pages(const struct job *shape)
{
	struct rig rig;
	struct job send = *shape, receive = *shape;

	rig_begin(&rig);
	send.rig = receive.rig = &rig;
	place(KVP_BASE_NEAR);
	send.own = rig_daemon_start(&rig, "prefill", NULL);
	rig_rank_start(&rig, "prefill", prefill_pages, &send);
	place(KVP_BASE_FAR);
	receive.own = rig_daemon_start(&rig, "decode", NULL);
	receive.other = send.own;
	rig_rank_start(&rig, "decode", decode_pages, &receive);
	place(KVP_BASE_ANY);
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
}

/* The median over pairs of processes: where they may share a core, that decides a pair's time. */
static double round_trip(int (*pingpong)(enum kvp_base_node far, uint32_t rounds, double *rtt))
{
	double rtts[PAIRS];

	for (uint32_t i = 0; i < PAIRS; i++)
		RIG_REQUIRE(
			!pingpong(apart ? KVP_BASE_FAR : KVP_BASE_ANY, ROUNDS / PAIRS, &rtts[i]));
	return kvp_base_median(rtts, PAIRS);
}

static double hop(uint32_t from, uint32_t to)
{
	double times[FIRST_ROOMS];

	for (uint32_t i = 0; i < FIRST_ROOMS; i++)
		times[i] = results->hops[to][i] - results->hops[from][i];
	return kvp_base_median(times, FIRST_ROOMS) * 1e6;
}

static void latency(const struct kvp_base_job *base)
{
	const struct job shape = { .tokens = PAGE, .n_dests = 1, .layers = LAYERS, .row = ROW };
	struct job small = shape;
	double unix_us = round_trip(kvp_base_pingpong_unix) * 1e6;
	double tcp_us = round_trip(kvp_base_pingpong_tcp) * 1e6;
	double copies[REPS], copy_us, chunk;

	RIG_REQUIRE(!kvp_base_memcpy(base, copies));
	copy_us = kvp_base_median(copies, REPS) / FIRST_ROOMS * 1e6;
	run_pages(&shape);
	small.tokens = SMALL_CHUNKS * PAGE;
	run_small(&(uint32_t){ 0 }, 1, &small, &chunk);
	printf("%10.1f  %6.1f  %7.1f  %10.1f  %9.1f  %10.1f  %11.1f  %6.1f  %9.2f\n",
	       hop(HOP_SUBMIT, HOP_DATA), hop(HOP_SUBMIT, HOP_LANE), hop(HOP_LANE, HOP_PACKED),
	       hop(HOP_PACKED, HOP_DATA), chunk * 1e6, unix_us, tcp_us, copy_us,
	       hop(HOP_SUBMIT, HOP_DATA) / (unix_us + tcp_us + copy_us));
	fflush(stdout);
}

static void bench_latency(void)
{
	/* As many pages as rooms, so that neither side finds its page in the cache. */
	struct kvp_base_job base = { .pool_bytes = (uint64_t)FIRST_ROOMS * PAGE * LAYERS * ROW,
				     .rows = (uint64_t)FIRST_ROOMS * PAGE * LAYERS,
				     .row_bytes = ROW,
				     .n_dests = 1,
				     .repetitions = REPS };

	puts("one 64-token page of 7 x 576 bytes, p50 us, from submit to the first byte at the "
	     "other end and in between; to delivered");
	puts("nodes   first byte  submit to lane  packed  first byte  delivered  socket rtt  "
	     "control rtt  memcpy  first/sum");
	for (int i = 0; i < 2; i++) {
		apart = i == 0;
		printf("%s", apart ? "apart   " : "anywhere");
		latency(&base);
	}
	apart = false;
}

static void bench_rooms(void)
{
	static const uint32_t rooms[] = { FEW_ROOMS, MANY_ROOMS };
	const struct job shape = {
		.tokens = SMALL_CHUNKS * PAGE, .n_dests = 1, .layers = 1, .row = 64
	};
	double p50[2];

	run_small(rooms, 2, &shape, p50);
	printf("chunk with %u open rooms %.1f us, with %u %.1f us, p50, in turns: ratio %.2f\n",
	       FEW_ROOMS, p50[0] * 1e6, MANY_ROOMS, p50[1] * 1e6, p50[1] / p50[0]);
}

/* ---- fairness: each sender on a daemon of its own, all into one receiver ----------------------
 */

static void prefill_fair(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "prefill");
	uint32_t n_pages = CHUNK / PAGE * 2;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(job->tokens / PAGE, sizeof(*pages));
	struct rig_pool pool;
	kvp_room_id id;

	pool_of(&pool, job, n_pages, 1);
	pool_register(&pool, client);
	for (uint32_t i = 0; i < job->tokens / PAGE; i++)
		pages[i] = i % n_pages;
	id = open_room(client, job, pool.id, 1 + job->sender);
	RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
	rig_stage_set(job->rig, STAGE_COUNT + FAIR_SENDERS + job->sender, 1);
	rig_stage_wait(job->rig, STAGE_GO, 1, SECS);
	for (uint32_t i = 0; i < FAIR_CHUNKS; i++)
		submit(client, id, pages, (uint64_t)i * CHUNK / 4, CHUNK / 4, i + 1 == FAIR_CHUNKS);
	for (uint32_t i = 1; i <= FAIR_CHUNKS; i++) {
		RIG_REQUIRE(!kvp_room_wait_delivered(client, id, i, SECS * 1000));
		if (!rig_stage_get(job->rig, STAGE_FIRST))
			rig_stage_set(job->rig, STAGE_COUNT + job->sender,
				      rig_state(client, id).delivered);
	}
	rig_stage_set(job->rig, STAGE_FIRST, 1);
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	kvp_client_close(client);
}

static void decode_fair(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	uint32_t n_pages = job->tokens / PAGE;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(n_pages, sizeof(*pages));
	struct rig_pool pool;
	kvp_room_id id;

	pool_of(&pool, job, n_pages + 1, 2);
	pool_register(&pool, client);
	rig_pages(pages, n_pages, 1, n_pages + 1, 9);
	id = expect_room(client, job, &pool, 1 + job->sender, 0, pages);
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	kvp_client_close(client);
}

static void bench_fair(void)
{
	struct rig rig;
	struct job send[FAIR_SENDERS], receive[FAIR_SENDERS];
	const struct rig_daemon *decode_node;
	uint64_t least = UINT64_MAX, most = 0;

	rig_begin(&rig);
	decode_node = rig_daemon_start(&rig, "decode", NULL);
	for (uint32_t i = 0; i < FAIR_SENDERS; i++) {
		char name[16];

		snprintf(name, sizeof(name), "prefill%u", i);
		send[i] = (struct job){ .rig = &rig,
					.tokens = FAIR_CHUNKS * CHUNK / 4,
					.n_dests = 1,
					.sender = i,
					.layers = LAYERS,
					.row = ROW };
		send[i].own = rig_daemon_start(&rig, name, NULL);
		receive[i] = send[i];
		receive[i].own = decode_node;
		receive[i].other = send[i].own;
		rig_rank_start(&rig, "decode", decode_fair, &receive[i]);
		rig_rank_start(&rig, "prefill", prefill_fair, &send[i]);
	}
	for (uint32_t i = 0; i < FAIR_SENDERS; i++)
		rig_stage_wait(&rig, STAGE_COUNT + FAIR_SENDERS + i, 1, SECS);
	rig_stage_set(&rig, STAGE_GO, 1);
	rig_stage_wait(&rig, STAGE_FIRST, 1, SECS);
	for (uint32_t i = 0; i < FAIR_SENDERS; i++) {
		uint64_t n = rig_stage_get(&rig, STAGE_COUNT + i);

		least = KVP_MIN(least, n);
		most = KVP_MAX(most, n);
	}
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
	printf("%u senders on daemons of their own into one receiver: when the first has delivered "
	       "all "
	       "%u chunks, the last has %llu: ratio %.2f\n",
	       FAIR_SENDERS, FAIR_CHUNKS, (unsigned long long)least, (double)least / (double)most);
}

/* ---- idle ------------------------------------------------------------------------------------ */

/* Context switches of all threads of a process so far: each wake-up costs at least one. */
static uint64_t switches(pid_t pid)
{
	char path[64];
	uint64_t sum = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	RIG_REQUIRE(dir);
	for (const struct dirent *e = readdir(dir); e; e = readdir(dir)) {
		char line[128], file[352];
		FILE *status;

		if (e->d_name[0] == '.')
			continue;
		snprintf(file, sizeof(file), "%s/%s/status", path, e->d_name);
		status = fopen(file, "re");
		while (status && fgets(line, sizeof(line), status)) {
			const char *at = strstr(line, "ctxt_switches:");

			if (at)
				sum += strtoull(at + strlen("ctxt_switches:"), NULL, 10);
		}
		if (status)
			(void)fclose(status);
	}
	(void)closedir(dir);
	return sum;
}

static void bench_idle(void)
{
	struct rig rig;
	const struct rig_daemon *daemon;
	uint64_t before;

	rig_begin(&rig);
	daemon = rig_daemon_start(&rig, "idle", NULL);
	rig_sleep_ms(1500); /* what the greeting left is over */
	before = switches(daemon->pid);
	rig_sleep_ms(10000);
	printf("idle daemon without peers: %llu wake-ups in 10 s\n",
	       (unsigned long long)(switches(daemon->pid) - before));
	rig_end(&rig);
	rig_remove(&rig);
}

/* ---------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
	static const struct rig_section sections[] = {
		{ "landing", bench_landing }, { "packed", bench_packed }, { "local", bench_local },
		{ "latency", bench_latency }, { "rooms", bench_rooms },   { "fair", bench_fair },
		{ "idle", bench_idle },       { "sums", bench_sums },
	};

	results = mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		       -1, 0);
	RIG_REQUIRE(results != MAP_FAILED);
	rig_sections(argc, argv, sections, KVP_ARRAY_SIZE(sections));
	return 0;
}
