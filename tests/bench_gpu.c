/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a transfer costs between caches on a GPU: prompts between two daemons and within one, next
 * to a copy of the same bytes on the GPU; where the time of a small chunk goes; how long after a
 * stream has written a fence the rows move, and what waiting for it costs the processor.
 *
 * usage: bench_gpu [prompts] [small] [fences] [waiting]      (none: all)
 */

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support_baseline.h"
#include "tests/support_device.h"

#define LAYERS 7u
#define ROW 576u
#define PAGE 64u
#define DESTS 4u
#define CHUNK 8192u
#define REPS 5u
#define SECS 100
#define SMALL 200u /* rooms of a page */
#define CONFIG "[gpu]\ndevices = all\n"
#define STAGES 12u

enum { STAGE_DONE };

/* Times of one small room, seconds of CLOCK_MONOTONIC; the sender's, then the destination's. */
struct small {
	double submit, word, end;
	double sent[STAGES], got[STAGES];
};

static const char *const stage_names[STAGES] = { "created",      "offered",      "accepted",
						 "first chunk",  "first fence",  "first want",
						 "first grant",  "first packed", "first data",
						 "first unpack", "last landed",  "complete" };
enum { CREATED, OFFERED, ACCEPTED, GOT_CHUNK, FENCED, WANT, GRANT, PACKED, DATA, UNPACK, LANDED };

static struct results {
	double secs[REPS];
	struct small small[SMALL];
} * results;

struct job {
	struct rig *rig;
	const struct rig_daemon *own, *other; /* this end's daemon, the sender's */
	enum device_kind kind;
	uint32_t tokens, n_dests, reps;
	uint32_t wait_ms; /* small rooms: a fence is written so long after the submit; 0: none */
};

/* ---- ends ------------------------------------------------------------------------------------ */

static void pool_make(struct rig_pool *pool, const struct job *job, struct kvp_client *client,
		      uint32_t pages)
{
	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, ROW, PAGE, pages);
	device_pool_allocate(pool, "bench", 1, job->kind);
	device_pool_register(pool, client, "bench");
}

static kvp_room_id open_room(struct kvp_client *client, uint32_t pool, uint64_t room)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	kvp_room_id id;

	open.room = room;
	open.pool = pool;
	open.sides = &side;
	open.n_sides = 1;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	return id;
}

struct part {
	const uint32_t *pages;
	uint64_t start, tokens, end;
	const struct kvp_fence *fence;
	uint64_t value;
};

static void submit(struct kvp_client *client, kvp_room_id id, const struct part *part)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	side.pos0 = part->start;
	side.pages = part->pages + part->start / PAGE;
	side.n_pages = (uint32_t)KVP_DIV_UP(part->tokens, PAGE);
	chunk.start = part->start;
	chunk.tokens = part->tokens;
	chunk.last = part->start + part->tokens == part->end;
	chunk.sides = &side;
	chunk.n_sides = 1;
	chunk.fence = part->fence;
	chunk.fence_value = part->value;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
}

static kvp_room_id expect_room(struct kvp_client *client, const struct job *job, uint32_t pool,
			       uint64_t room, uint32_t dest, const uint32_t *pages)
{
	struct kvp_expect_sender sender = { job->other->address, 0, job->n_dests, KVP_ROLE_DATA };
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
	expect.pool = pool;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = job->tokens;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	return id;
}

static void prefill(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "prefill");
	uint32_t n_pages = (uint32_t)KVP_DIV_UP(job->tokens, PAGE) + 1;
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(n_pages, sizeof(*pages));
	struct rig_pool pool;

	pool_make(&pool, job, client, n_pages);
	rig_pages(pages, n_pages - 1, 1, n_pages, 7);
	for (uint32_t rep = 0; rep < job->reps; rep++) {
		kvp_room_id id = open_room(client, pool.id, 100 + rep);
		uint32_t chunks = 0;
		double start;

		RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
		start = kvp_base_now();
		for (uint64_t at = 0; at < job->tokens; at += CHUNK, chunks++)
			submit(client, id,
			       &(struct part){ pages, at, KVP_MIN(CHUNK, job->tokens - at),
					       job->tokens, NULL, 0 });
		RIG_REQUIRE(!kvp_room_wait_delivered(client, id, chunks, SECS * 1000));
		results->secs[rep] = kvp_base_now() - start;
		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		kvp_room_forget(client, id);
		rig_stage_set(job->rig, STAGE_DONE, rep + 1);
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

static void decode(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	uint32_t per_rank = (uint32_t)KVP_DIV_UP(job->tokens, PAGE * job->n_dests);
	KVP_CLEANUP(kvp_freep) uint32_t *pages = calloc(per_rank, sizeof(*pages));
	struct rig_pool pools[DESTS];
	kvp_room_id ids[DESTS];

	rig_pages(pages, per_rank, 1, per_rank + 1, 9);
	for (uint32_t d = 0; d < job->n_dests; d++)
		pool_make(&pools[d], job, client, per_rank + 1);
	for (uint32_t rep = 0; rep < job->reps; rep++) {
		for (uint32_t d = 0; d < job->n_dests; d++)
			ids[d] = expect_room(client, job, pools[d].id, 100 + rep, d, pages);
		for (uint32_t d = 0; d < job->n_dests; d++) {
			RIG_REQUIRE(rig_await(client, ids[d], KVP_WAIT_RELEASED, SECS).complete);
			kvp_room_forget(client, ids[d]);
		}
		rig_stage_wait(job->rig, STAGE_DONE, rep + 1, SECS);
	}
	kvp_client_close(client);
	for (uint32_t d = 0; d < job->n_dests; d++)
		device_pool_free(&pools[d]);
}

/* ---- prompts --------------------------------------------------------------------------------- */

enum way { WAY_PACKED, WAY_RAW, WAY_LOCAL };

/* The median time of a prompt. Raw: the sender's cache is in host memory, since a transport cannot
 * read single rows of a GPU. */
static double run_prompts(uint32_t tokens, enum way way)
{
	const uint32_t reps = way == WAY_RAW ? tokens > 8192 ? 1 : 3 : REPS;
	struct rig rig;
	struct job send = {
		.rig = &rig, .kind = DEVICE_IPC, .tokens = tokens, .n_dests = DESTS, .reps = reps
	};
	struct job receive = send;

	rig_begin(&rig);
	if (way == WAY_RAW) {
		send.kind = DEVICE_NONE;
		send.own = rig_daemon_start(&rig, "prefill", "[lane]\npack = off\n");
	} else {
		send.own = rig_daemon_start(&rig, "prefill", CONFIG);
	}
	receive.own = way == WAY_LOCAL ? send.own : rig_daemon_start(&rig, "decode", CONFIG);
	receive.other = send.own;
	rig_rank_start(&rig, "decode", decode, &receive);
	rig_rank_start(&rig, "prefill", prefill, &send);
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
	return kvp_base_median(results->secs, reps);
}

static void copies(void *arg)
{
	const struct job *job = arg;
	const uint64_t bytes = (uint64_t)job->tokens * LAYERS * ROW;
	uint64_t from = device_alloc(bytes), to = device_alloc(bytes);

	for (uint32_t rep = 0; rep < REPS; rep++) {
		double start = kvp_base_now();

		device_copy(to, from, bytes);
		(void)device_drain();
		results->secs[rep] = kvp_base_now() - start;
	}
	device_free(from);
	device_free(to);
}

/* Launch to its polled end, in a process of its own. */
static double run_copies(uint32_t tokens)
{
	struct rig rig;
	struct job job = { .rig = &rig, .tokens = tokens };

	rig_begin(&rig);
	rig_rank_start(&rig, "copies", copies, &job);
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
	return kvp_base_median(results->secs, REPS);
}

static void bench_prompts(void)
{
	static const uint32_t tokens[] = { 4096, 32768, 131072 };

	puts("prompts, 7 entries of 576 bytes, pages of 64, DCP 4, chunks of 8192, caches on the "
	     "GPU, tcp");
	puts("(raw: the sender's cache in host memory; copy: device to device, launch to end)");
	puts("tokens  bytes MB  packed ms   GB/s    raw ms  raw/packed  local ms   GB/s   copy ms  "
	     "copy/local");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(tokens); i++) {
		double mb = (double)tokens[i] * LAYERS * ROW / 1e6;
		double packed = run_prompts(tokens[i], WAY_PACKED) * 1e3;
		double local = run_prompts(tokens[i], WAY_LOCAL) * 1e3;
		double copy = run_copies(tokens[i]) * 1e3;
		double raw = run_prompts(tokens[i], WAY_RAW) * 1e3;

		printf("%6u  %8.1f  %9.2f  %5.2f  %8.1f  %10.1f  %8.3f  %5.0f  %8.3f  %10.2f\n",
		       tokens[i], mb, packed, mb / packed, raw, raw / packed, local, mb / local,
		       copy, copy / local);
		fflush(stdout);
	}
}

/* ---- small rooms ----------------------------------------------------------------------------- */

static void read_stages(const cJSON *room, double at[STAGES])
{
	const cJSON *stage;

	cJSON_ArrayForEach (stage, cJSON_GetObjectItem(room, "stages")) {
		const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(stage, "name"));

		for (uint32_t i = 0; i < STAGES; i++)
			if (name && !strcmp(name, stage_names[i]))
				at[i] = cJSON_GetObjectItem(stage, "monotonic_us")->valuedouble /
					1e6;
	}
}

/* The times of a room's end at this daemon. */
static void room_stages(struct kvp_client *client, uint64_t number, const char *role,
			double at[STAGES])
{
	char arg[32], *text = NULL;
	const cJSON *room;
	cJSON *json;

	snprintf(arg, sizeof(arg), "%llu", (unsigned long long)number);
	RIG_CALL(client, kvp_inspect(client, "room", arg, &text));
	json = cJSON_Parse(text);
	cJSON_ArrayForEach (room, cJSON_GetObjectItem(json, "rooms")) {
		const char *is = cJSON_GetStringValue(cJSON_GetObjectItem(room, "role"));

		if (is && !strcmp(is, role))
			read_stages(room, at);
	}
	cJSON_Delete(json);
	free(text);
}

static void small_prefill(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "prefill");
	struct kvp_fence *fence;
	struct rig_pool pool;

	pool_make(&pool, job, client, SMALL);
	RIG_CALL(client, kvp_fence_create(client, 1, &fence));
	RIG_CALL(client, kvp_fence_map_device(fence));
	for (uint32_t i = 0; i < job->reps; i++) {
		kvp_room_id id = open_room(client, pool.id, 1 + i);
		struct small *small = &results->small[i];
		const uint32_t pages[] = { i };

		RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
		small->submit = kvp_base_now();
		submit(client, id,
		       &(struct part){ pages, 0, PAGE, PAGE, job->wait_ms ? fence : NULL, i + 1 });
		if (job->wait_ms) {
			rig_sleep_ms(job->wait_ms);
			RIG_CALL(client, kvp_fence_stream_signal(fence, 0, i + 1, device_stream()));
			while (__atomic_load_n(kvp_fence_words(fence), __ATOMIC_ACQUIRE) < i + 1)
				;
			small->word = kvp_base_now();
		}
		RIG_REQUIRE(!kvp_room_wait_delivered(client, id, 1, SECS * 1000));
		small->end = kvp_base_now();
		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		kvp_room_forget(client, id);
		room_stages(client, 1 + i, "send", small->sent);
		rig_stage_wait(job->rig, STAGE_DONE, i + 1, SECS);
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

static void small_decode(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "decode");
	struct rig_pool pool;

	pool_make(&pool, job, client, SMALL);
	for (uint32_t i = 0; i < job->reps; i++) {
		const uint32_t pages[] = { SMALL - 1 - i };
		kvp_room_id id = expect_room(client, job, pool.id, 1 + i, 0, pages);

		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		room_stages(client, 1 + i, "dest", results->small[i].got);
		kvp_room_forget(client, id);
		rig_stage_set(job->rig, STAGE_DONE, i + 1);
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

static uint32_t run_small(bool local, uint32_t wait_ms, uint32_t reps)
{
	struct rig rig;
	struct job send = { .rig = &rig,
			    .kind = DEVICE_IPC,
			    .tokens = PAGE,
			    .n_dests = 1,
			    .reps = reps,
			    .wait_ms = wait_ms };
	struct job receive = send;

	memset(results, 0, sizeof(*results));
	rig_begin(&rig);
	send.own = rig_daemon_start(&rig, "prefill", CONFIG);
	receive.own = local ? send.own : rig_daemon_start(&rig, "decode", CONFIG);
	receive.other = send.own;
	rig_rank_start(&rig, "decode", small_decode, &receive);
	rig_rank_start(&rig, "prefill", small_prefill, &send);
	rig_ranks_join(&rig, SECS);
	rig_end(&rig);
	rig_remove(&rig);
	return reps;
}

/* From the end of one step to that of the next. */
struct step {
	const char *name;
	double (*at)(const struct small *small);
};

#define AT(name, field)                                \
	static double at_##name(const struct small *s) \
	{                                              \
		return s->field;                       \
	}
AT(submit, submit)
AT(word, word)
AT(chunk, sent[GOT_CHUNK])
AT(fenced, sent[FENCED])
AT(want, sent[WANT])
AT(grant, sent[GRANT])
AT(packed, sent[PACKED])
AT(sent, sent[DATA])
AT(arrived, got[DATA])
AT(unpack, got[UNPACK])
AT(landed, got[LANDED])
AT(confirmed, sent[LANDED])
AT(end, end)

/* p50 and p99 of the time between two steps, in us; steps that a room did not take are left out. */
static void line(const char *name, double (*from)(const struct small *),
		 double (*to)(const struct small *), uint32_t n)
{
	double us[SMALL];
	uint32_t k = 0;

	for (uint32_t i = n / 10; i < n; i++) { /* the first ones warm up */
		const struct small *small = &results->small[i];

		if (from(small) > 0 && to(small) > 0)
			us[k++] = (to(small) - from(small)) * 1e6;
	}
	if (k == 0)
		return;
	(void)kvp_base_median(us, k); /* sorts */
	printf("  %-44s %8.1f %8.1f\n", name, us[k / 2], us[k - 1 - k / 100]);
}

static void bench_small(void)
{
	uint32_t n = run_small(false, 0, SMALL);

	puts("a page of 64 tokens of 7 x 576 bytes, GPU to GPU over tcp, us: p50 p99 of each step");
	line("submit to the lane", at_submit, at_chunk, n);
	line("lane to the want", at_chunk, at_want, n);
	line("want to its grant", at_want, at_grant, n);
	line("lane to packed by the GPU", at_chunk, at_packed, n);
	line("packed (or sent with the want) to sent", at_packed, at_sent, n);
	line("sent to arrived", at_sent, at_arrived, n);
	line("arrived to its scatter's launch", at_arrived, at_unpack, n);
	line("launch to landed", at_unpack, at_landed, n);
	line("landed to confirmed at the sender", at_landed, at_confirmed, n);
	line("confirmed to the engine", at_confirmed, at_end, n);
	line("submit to delivered, all of it", at_submit, at_end, n);
	n = run_small(true, 0, SMALL);
	puts("the same within a daemon");
	line("submit to the lane", at_submit, at_chunk, n);
	line("lane to landed", at_chunk, at_landed, n);
	line("landed to the engine", at_landed, at_end, n);
	line("submit to delivered, all of it", at_submit, at_end, n);
	fflush(stdout);
}

static void bench_fences(void)
{
	static const uint32_t waits[] = { 1, 5, 25 };

	puts("a fence that a stream writes some time after the submit, us: p50 p99, local");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(waits); i++) {
		uint32_t n = run_small(true, waits[i], 100);
		char name[64];

		snprintf(name, sizeof(name), "%u ms: word seen by the engine to by the lane",
			 waits[i]);
		line(name, at_word, at_fenced, n);
		line("      word seen by the engine to delivered", at_word, at_end, n);
	}
	fflush(stdout);
}

/* ---- waiting for fences ---------------------------------------------------------------------- */

#define WAIT_S 2u

#define STAT_BEFORE 12u /* blanks behind the name, up to the two times */

/* Processor time of a process so far, in seconds. */
static double cpu_of(pid_t pid)
{
	char path[64], line[512] = "", *at, *end;
	unsigned long ticks;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "re");
	RIG_REQUIRE(file && fgets(line, sizeof(line), file));
	(void)fclose(file);
	at = strrchr(line, ')'); /* the name may have anything in it */
	for (uint32_t i = 0; at && i < STAT_BEFORE; i++)
		at = strchr(at + 1, ' ');
	RIG_REQUIRE(at);
	ticks = strtoul(at, &end, 10);
	ticks += strtoul(end, NULL, 10);
	return (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

/* So many rooms within a daemon whose fence does not come for a while. */
static void waiting(void *arg)
{
	struct job *job = arg;
	struct kvp_client *client = rig_client(job->own, "waiting");
	KVP_CLEANUP(kvp_freep) kvp_room_id *ids = calloc(2 * (size_t)job->reps + 1, sizeof(*ids));
	struct kvp_fence *fence;
	struct rig_pool pool;

	RIG_REQUIRE(ids);
	pool_make(&pool, job, client, 2 * job->reps + 1);
	RIG_CALL(client, kvp_fence_create(client, 1, &fence));
	for (uint32_t i = 0; i < job->reps; i++) {
		const uint32_t from[] = { i }, to[] = { job->reps + i };

		ids[2 * i] = open_room(client, pool.id, 1 + i);
		ids[2 * i + 1] = expect_room(client, job, pool.id, 1 + i, 0, to);
		RIG_REQUIRE(!rig_await(client, ids[2 * i], KVP_WAIT_READY, SECS).failed);
		submit(client, ids[2 * i], &(struct part){ from, 0, PAGE, PAGE, fence, 1 });
	}
	rig_sleep_ms(200); /* what the submits cost is over */
	results->secs[0] = cpu_of(job->own->pid);
	rig_sleep_ms(WAIT_S * 1000);
	results->secs[0] = (cpu_of(job->own->pid) - results->secs[0]) / WAIT_S;
	kvp_fence_signal(fence, 0, 1);
	for (uint32_t i = 0; i < 2 * job->reps; i++)
		RIG_REQUIRE(rig_await(client, ids[i], KVP_WAIT_RELEASED, SECS).complete);
	kvp_client_close(client);
	device_pool_free(&pool);
}

static void bench_waiting(void)
{
	static const uint32_t rooms[] = { 0, 1, 10, 100, 1000 };

	puts("processor time of a daemon while rooms wait for fences (and while none does)");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(rooms); i++) {
		struct rig rig;
		struct job job = { .rig = &rig,
				   .kind = DEVICE_IPC,
				   .tokens = PAGE,
				   .n_dests = 1,
				   .reps = rooms[i] };

		rig_begin(&rig);
		job.own = job.other = rig_daemon_start(&rig, "node", CONFIG);
		rig_rank_start(&rig, "waiting", waiting, &job);
		rig_ranks_join(&rig, SECS);
		rig_end(&rig);
		rig_remove(&rig);
		printf("  %4u rooms %44.1f %% of a core\n", rooms[i], results->secs[0] * 100);
		fflush(stdout);
	}
}

/* ---------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
	static const struct rig_section sections[] = { { "small", bench_small },
						       { "fences", bench_fences },
						       { "waiting", bench_waiting },
						       { "prompts", bench_prompts } };
	char gpu[100];

	if (!device_served() || !device_found(gpu, sizeof(gpu))) {
		puts("no GPU, or built without CUDA");
		return 77;
	}
	printf("on %s\n", gpu);
	results = mmap(NULL, sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		       -1, 0);
	RIG_REQUIRE(results != MAP_FAILED);
	rig_sections(argc, argv, sections, KVP_ARRAY_SIZE(sections));
	return 0;
}
