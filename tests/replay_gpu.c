/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Engines with caches on a GPU, each a process, and real daemons: both kinds of memory, both ways,
 * fences that a stream writes, and what a dead, stopped or paused engine leaves behind. On a
 * machine without a GPU the driver is tests/fake_cuda.c, on which nothing runs long.
 *
 * usage: replay_gpu [SCENARIO ...]
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tests/support_device.h"

#define LAYERS 5u
#define ROW 576u
#define PAGE 64u
#define RANKS 2u /* of decode */
#define PAGES 96u
#define TOKENS 5000u
#define CHUNK 2048u
#define SECS 60
#define SECOND UINT64_C(1000000000)
#define CONFIG "[gpu]\ndevices = all\nslots = 4\nslot_bytes = 1M\n"
#define OWNED_BYTES ((fake ? UINT64_C(32) : UINT64_C(256)) << 20)
#define SLACK_BYTES (UINT64_C(16) << 20) /* of the driver's own */

enum { STAGE_READY, STAGE_GO, STAGE_DONE, STAGE_HELD, STAGE_VALUE };

static bool fake; /* no GPU: the driver that is none */

struct engine {
	struct rig *rig;
	const struct rig_daemon *own, *prefill_node;
	enum device_kind kind;
	uint32_t rank; /* of decode */
	bool fenced;
	uint64_t room;
	uint32_t rounds;
};

/* ---- engines --------------------------------------------------------------------------------- */

static void engine_pool(struct rig_pool *pool, const struct engine *e, struct kvp_client *client,
			uint32_t pages, uint64_t salt)
{
	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, ROW, PAGE, pages);
	device_pool_allocate(pool, "engine", salt, e->kind);
	device_pool_register(pool, client, "engine");
}

static kvp_room_id engine_open(const struct engine *e, struct kvp_client *client, uint32_t pool,
			       uint64_t room)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	kvp_room_id id;

	(void)e;
	open.room = room;
	open.pool = pool;
	open.sides = &side;
	open.n_sides = 1;
	open.timers.fence_ms = 1500;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	return id;
}

/* What is sent, and when it may be read. */
struct piece {
	const uint32_t *pages;
	uint64_t start, tokens;
	bool last;
	struct kvp_fence *fence;
	uint64_t value;
};

static void engine_submit(struct kvp_client *client, kvp_room_id id, const struct piece *piece)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	side.pos0 = piece->start;
	side.pages = piece->pages + piece->start / PAGE;
	side.n_pages = (uint32_t)KVP_DIV_UP(piece->tokens, PAGE);
	chunk.start = piece->start;
	chunk.tokens = piece->tokens;
	chunk.last = piece->last;
	chunk.sides = &side;
	chunk.n_sides = 1;
	chunk.fence = piece->fence;
	chunk.fence_value = piece->value;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
}

static kvp_room_id engine_expect(const struct engine *e, struct kvp_client *client, uint32_t pool,
				 const struct kvp_side_desc *side, uint64_t room, uint64_t end)
{
	struct kvp_expect_sender sender = { e->prefill_node->address, 0, side->dcp_size,
					    KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	kvp_room_id id;

	expect.room = room;
	expect.dest = e->rank;
	expect.pool = pool;
	expect.sides = side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = end;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	return id;
}

/* All chunks are submitted before any row is written. */
static void prefill(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "prefill");
	const struct rig_key key = { e->room, 0 };
	struct kvp_fence *fence;
	uint32_t pages[PAGES], n = 0;
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct rig_pool pool;
	kvp_room_id id;

	device_open(); /* a pool of the host does not, and a stream writes the fence anyway */
	engine_pool(&pool, e, client, PAGES, 1);
	RIG_CALL(client, kvp_fence_create(client, 1, &fence));
	RIG_CALL(client, kvp_fence_map_device(fence));
	rig_pages(pages, PAGES - 1, 1, PAGES, 7);
	side.pages = pages;
	side.n_pages = PAGES - 1;
	id = engine_open(e, client, pool.id, e->room);
	for (uint64_t at = 0; at < TOKENS; at += CHUNK) {
		const struct piece piece = {
			pages, at, KVP_MIN(CHUNK, TOKENS - at), at + CHUNK >= TOKENS, fence, ++n
		};

		engine_submit(client, id, &piece);
	}
	RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
	n = 0;
	for (uint64_t at = 0; at < TOKENS; at += CHUNK) {
		rig_put_rows(pool.mem, &pool, &side, at, KVP_MIN(at + CHUNK, TOKENS), &key);
		device_pool_push(&pool);
		RIG_CALL(client, kvp_fence_stream_signal(fence, 0, ++n, device_stream()));
	}
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	kvp_client_close(client);
	device_pool_free(&pool);
}

static struct kvp_side_desc decode_side(const struct engine *e, uint32_t *pages)
{
	rig_pages(pages, PAGES / RANKS - 1, 1, PAGES / RANKS, 9);
	return (struct kvp_side_desc){ .page = PAGE,
				       .dcp_size = RANKS,
				       .dcp_rank = e->rank,
				       .interleave = 1,
				       .pages = pages,
				       .n_pages = KVP_DIV_UP(TOKENS, PAGE * RANKS) };
}

static void decode(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "decode");
	const struct rig_key key = { e->room, 0 };
	uint32_t pages[PAGES / RANKS];
	const struct kvp_side_desc side = decode_side(e, pages);
	struct rig_pool pool;
	uint8_t *image;
	kvp_room_id id;

	engine_pool(&pool, e, client, PAGES / RANKS, 2 + e->rank);
	id = engine_expect(e, client, pool.id, &side, e->room, TOKENS);
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	image = rig_pool_image(&pool);
	rig_put_rows(image, &pool, &side, 0, TOKENS, &key);
	device_pool_pull(&pool);
	rig_pool_check(&pool, image, "decode");
	free(image);
	kvp_client_close(client);
	device_pool_free(&pool);
}

/* What the daemon counts is what its lanes have done, the GPU's too. */
static void counts_add_up(const struct rig_daemon *daemon)
{
	static const char *const names[] = { "pieces_sent",  "bytes_sent",   "pieces_landed",
					     "bytes_landed", "pieces_local", "bytes_local" };
	cJSON *status = rig_ask(daemon, "status", NULL);
	char *json = cJSON_PrintUnformatted(status);
	double all = 0, sum;
	const cJSON *lane;

	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(names); i++) {
		sum = 0;
		cJSON_ArrayForEach (lane, cJSON_GetObjectItemCaseSensitive(status, "lanes"))
			sum += rig_number(lane, names[i]);
		RIG_REQUIRE(rig_number(cJSON_GetObjectItemCaseSensitive(status, "counters"),
				       names[i]) == sum,
			    "%s: lanes have %.0f: %s", names[i], sum, json);
		all += sum;
	}
	RIG_REQUIRE(all > 0, "%s", json);
	/* Sums that are asked for and cannot be are counted. */
	RIG_REQUIRE(!strstr(json, "\"unchecked_gpu\"") == !getenv("KVP_TEST_CHECKSUM"), "%s", json);
	cJSON_Delete(status);
	cJSON_free(json);
}

static void transfer(struct rig *rig, bool local, enum device_kind from, enum device_kind to)
{
	struct rig_daemon *here = rig_daemon_start(rig, "prefill", CONFIG);
	struct rig_daemon *there = local ? here : rig_daemon_start(rig, "decode", CONFIG);
	struct engine send = {
		.rig = rig, .own = here, .prefill_node = here, .kind = from, .room = 5
	};
	struct engine receive[RANKS];

	for (uint32_t r = 0; r < RANKS; r++) {
		receive[r] = send;
		receive[r].own = there;
		receive[r].kind = to;
		receive[r].rank = r;
		rig_rank_start(rig, "decode", decode, &receive[r]);
	}
	rig_rank_start(rig, "prefill", prefill, &send);
	rig_ranks_join(rig, SECS);
	counts_add_up(here);
	counts_add_up(there);
}

static void landing_ipc(struct rig *rig)
{
	transfer(rig, false, DEVICE_IPC, DEVICE_IPC);
}

static void landing_chunks(struct rig *rig)
{
	transfer(rig, false, DEVICE_CHUNKS, DEVICE_CHUNKS);
}

static void landing_mixed(struct rig *rig)
{
	transfer(rig, false, DEVICE_IPC, DEVICE_NONE);
}

static void landing_without_sums(struct rig *rig)
{
	RIG_REQUIRE(setenv("KVP_TEST_CHECKSUM", "on", 1) == 0); /* of this scenario's process */
	transfer(rig, false, DEVICE_IPC, DEVICE_NONE);
}

static void local_ipc(struct rig *rig)
{
	transfer(rig, true, DEVICE_IPC, DEVICE_CHUNKS);
}

/* Two lanes of one daemon: as between two daemons. */
static void lanes_to_host(struct rig *rig)
{
	transfer(rig, true, DEVICE_CHUNKS, DEVICE_NONE);
}

static void lanes_from_host(struct rig *rig)
{
	transfer(rig, true, DEVICE_NONE, DEVICE_IPC);
}

/* ---- a torn read ----------------------------------------------------------------------------- */

#define TORN_PAGES (fake ? 256u : 1024u)
#define TORN_ROW 1024u
#define TORN_TOKENS (TORN_PAGES * PAGE)
#define TORN_WORDS (TORN_TOKENS * TORN_ROW / 4)
#define TORN_FILLS (fake ? 4u : 2500u) /* of 64 MiB: some 80 ms, 40 time slices */
#define TORN_AHEAD (fake ? 1u : 300u)
#define TORN_ROUNDS (fake ? 1u : 25u)

static struct torn {
	uint32_t torn, stale; /* rounds: mixed words; the words of another round alone */
	double producer_ms;   /* of a round */
} * torn;

static uint32_t torn_word(uint32_t round, uint32_t fill)
{
	return round << 16 | (fill & 0xffff);
}

static void torn_pool(struct rig_pool *pool, const struct engine *e, struct kvp_client *client)
{
	struct kvp_entry_desc *entry;

	memset(pool, 0, sizeof(*pool));
	entry = rig_pool_entry(pool, 0, TORN_ROW, PAGE, TORN_PAGES);
	entry->page_stride = (uint64_t)TORN_ROW * PAGE;
	device_pool_allocate(pool, "torn", 1, e->kind);
	device_pool_register(pool, client, "torn");
}

/* Fills the pool again and again while the daemon is told of the chunk, then the last time. */
static void torn_prefill(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "prefill");
	uint32_t *pages = calloc(TORN_PAGES, sizeof(*pages));
	struct kvp_fence *fence;
	struct rig_pool pool;

	RIG_REQUIRE(pages);
	torn_pool(&pool, e, client);
	RIG_CALL(client, kvp_fence_create(client, 1, &fence));
	RIG_CALL(client, kvp_fence_map_device(fence));
	rig_pages(pages, TORN_PAGES, 0, TORN_PAGES, 3);
	for (uint32_t round = 1; round <= e->rounds; round++) {
		kvp_room_id id = engine_open(e, client, pool.id, e->room + round);
		const struct piece piece = { pages, 0, TORN_TOKENS, true, e->fenced ? fence : NULL,
					     round };
		uint64_t from;

		RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
		from = rig_now_ns();
		for (uint32_t i = 1; i <= TORN_FILLS; i++) {
			device_fill(pool.device, torn_word(round, i), TORN_WORDS);
			if (i == TORN_AHEAD)
				engine_submit(client, id, &piece);
		}
		device_fill(pool.device, torn_word(round, 0), TORN_WORDS);
		RIG_CALL(client, kvp_fence_stream_signal(fence, 0, round, device_stream()));
		device_sync();
		torn->producer_ms = (double)(rig_now_ns() - from) / 1e6;
		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		kvp_room_forget(client, id);
		rig_stage_wait(e->rig, STAGE_DONE, round, SECS);
	}
	kvp_client_close(client);
	device_pool_free(&pool);
	free(pages);
}

static void torn_count(const struct rig_pool *pool, uint32_t round)
{
	const uint32_t *words = (const uint32_t *)(const void *)pool->mem;
	bool mixed = false;

	for (uint64_t i = 1; i < TORN_WORDS && !mixed; i++)
		mixed = words[i] != words[0];
	torn->torn += mixed;
	torn->stale += !mixed && words[0] != torn_word(round, 0);
}

static void torn_decode(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "decode");
	uint32_t *pages = calloc(TORN_PAGES, sizeof(*pages));
	struct kvp_side_desc side = {
		.page = PAGE, .dcp_size = 1, .interleave = 1, .pages = pages, .n_pages = TORN_PAGES
	};
	struct rig_pool pool;

	RIG_REQUIRE(pages);
	torn_pool(&pool, e, client);
	rig_pages(pages, TORN_PAGES, 0, TORN_PAGES, 4);
	for (uint32_t round = 1; round <= e->rounds; round++) {
		kvp_room_id id =
			engine_expect(e, client, pool.id, &side, e->room + round, TORN_TOKENS);

		RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
		kvp_room_forget(client, id);
		device_pool_pull(&pool);
		torn_count(&pool, round);
		rig_stage_set(e->rig, STAGE_DONE, round);
	}
	kvp_client_close(client);
	device_pool_free(&pool);
	free(pages);
}

static void torn_rounds(struct rig *rig, bool fenced, bool local)
{
	struct rig_daemon *here = &rig->daemons[0], *there = &rig->daemons[local ? 0 : 1];
	struct engine send = { .rig = rig,
			       .own = here,
			       .prefill_node = here,
			       .kind = DEVICE_IPC,
			       .fenced = fenced,
			       .rounds = TORN_ROUNDS };
	struct engine receive = send;

	receive.own = there;
	memset(torn, 0, sizeof(*torn));
	rig_stage_set(rig, STAGE_DONE, 0);
	rig_rank_start(rig, "decode", torn_decode, &receive);
	rig_rank_start(rig, "prefill", torn_prefill, &send);
	rig_ranks_join(rig, SECS);
	printf("     %s, %s fence: of %u reads %u torn, %u of another time; the producer ran for "
	       "%.1f ms\n",
	       local ? "local" : "landing", fenced ? "with the" : "without a", TORN_ROUNDS,
	       torn->torn, torn->stale, torn->producer_ms);
	fflush(stdout);
	if (fenced)
		RIG_REQUIRE(torn->torn == 0 && torn->stale == 0, "a fence did not hold");
	else if (!fake)
		RIG_REQUIRE(torn->torn > 0,
			    "no read was torn without a fence: this proves nothing");
}

static void torn_reads(struct rig *rig)
{
	(void)rig_daemon_start(rig, "prefill", "[gpu]\ndevices = all\n");
	(void)rig_daemon_start(rig, "decode", "[gpu]\ndevices = all\n");
	torn = mmap(NULL, sizeof(*torn), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	RIG_REQUIRE(torn != MAP_FAILED);
	for (int local = 1; local >= 0; local--)
		for (int fenced = 0; fenced <= 1; fenced++)
			torn_rounds(rig, fenced, local);
}

/* ---- fences that are late, and those that never come ----------------------------------------- */

/* Its fence never comes: it stops in the middle of its step, or dies. */
static void stalled_prefill(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "stalled");
	struct kvp_room_state state;
	struct kvp_fence *fence;
	uint32_t pages[PAGES];
	struct rig_pool pool;
	kvp_room_id id;

	engine_pool(&pool, e, client, PAGES, 1);
	RIG_CALL(client, kvp_fence_create(client, 1, &fence));
	rig_pages(pages, PAGES - 1, 1, PAGES, 7);
	id = engine_open(e, client, pool.id, e->room);
	RIG_REQUIRE(!rig_await(client, id, KVP_WAIT_READY, SECS).failed);
	engine_submit(client, id, &(struct piece){ pages, 0, CHUNK, false, fence, 1 });
	rig_stage_set(e->rig, STAGE_HELD, e->rank + 1);
	if (e->rank == 1)
		(void)raise(SIGKILL);
	state = rig_await(client, id, KVP_WAIT_TERMINAL, SECS);
	RIG_REQUIRE(state.failed && state.status == KVP_STATUS_FENCE_TIMEOUT, "%s: %s",
		    kvp_status_name(state.status), state.reason);
	kvp_client_close(client);
}

/* Its room fails with what became of the producer. */
static void stalled_decode(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "decode");
	uint32_t pages[PAGES / RANKS];
	struct kvp_side_desc side = decode_side(e, pages);
	struct kvp_room_state state;
	struct rig_pool pool;
	kvp_room_id id;

	side.dcp_size = 1;
	side.dcp_rank = 0;
	side.n_pages = CHUNK / PAGE;
	engine_pool(&pool, e, client, PAGES / RANKS, 2 + e->rank);
	id = engine_expect(e, client, pool.id, &side, e->room, CHUNK);
	state = rig_await(client, id, KVP_WAIT_TERMINAL, SECS);
	RIG_REQUIRE(state.failed && (state.status == KVP_STATUS_FENCE_TIMEOUT ||
				     state.status == KVP_STATUS_CLIENT_LOST),
		    "%s: %s", kvp_status_name(state.status), state.reason);
	(void)rig_await(client, id, KVP_WAIT_RELEASED, SECS);
	kvp_client_close(client);
}

/* One producer stops, one dies, a third goes on at full speed meanwhile. */
static void stalled(struct rig *rig)
{
	struct rig_daemon *here = rig_daemon_start(rig, "prefill", CONFIG);
	struct rig_daemon *there = rig_daemon_start(rig, "decode", CONFIG);
	struct engine e[6];
	pid_t dead;
	int status;

	for (uint32_t i = 0; i < 2; i++) {
		e[i] = (struct engine){ .rig = rig,
					.own = here,
					.prefill_node = here,
					.kind = DEVICE_IPC,
					.rank = i,
					.room = 10 + i };
		e[2 + i] = e[i];
		e[2 + i].own = there;
	}
	/* Ranks that end by a signal are not the rig's: it would count them as failed. */
	for (uint32_t i = 0; i < 2; i++) {
		e[2 + i].rank = 0;
		rig_rank_start(rig, "stalled decode", stalled_decode, &e[2 + i]);
	}
	dead = rig_fork("stalled", stalled_prefill, &e[1]);
	rig_stage_wait(rig, STAGE_HELD, 2, SECS);
	rig_rank_start(rig, "stalled", stalled_prefill, &e[0]);
	e[4] = (struct engine){
		.rig = rig, .own = here, .prefill_node = here, .kind = DEVICE_IPC, .room = 5
	};
	e[5] = e[4];
	e[5].own = there;
	{
		struct engine second = e[5];

		second.rank = 1;
		rig_rank_start(rig, "decode", decode, &e[5]);
		rig_rank_start(rig, "decode", decode, &second);
		rig_rank_start(rig, "prefill", prefill, &e[4]);
		rig_ranks_join(rig, SECS);
	}
	RIG_REQUIRE(waitpid(dead, &status, 0) == dead && WIFSIGNALED(status));
}

/* ---- memory of the dead ---------------------------------------------------------------------- */

/* Free memory gets back to `level` within a second of `since`; how long it took, in ms. */
static double memory_back(uint64_t level, uint64_t since, const char *what)
{
	uint64_t until = since + (fake ? 5 : 1) * SECOND;

	while (device_free_bytes() + SLACK_BYTES < level) {
		RIG_REQUIRE(rig_now_ns() < until, "%s: %lld MiB have not come back in a second",
			    what, (long long)(level - device_free_bytes()) >> 20);
		rig_sleep_ms(1);
	}
	return (double)(rig_now_ns() - since) / 1e6;
}

static void owned_pool(struct rig_pool *pool, const struct engine *e, struct kvp_client *client)
{
	const uint32_t row = 1024;

	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, row, PAGE,
				     (uint32_t)(OWNED_BYTES / LAYERS / (row * PAGE + 64)));
	device_pool_allocate(pool, "owner", 1, e->kind);
	device_pool_register(pool, client, "owner");
}

/* When it is its turn: a pool of some size, registered; then it waits to be killed. */
static void owner(void *arg)
{
	const struct engine *e = arg;
	struct rig_pool pool;

	rig_stage_wait(e->rig, STAGE_GO, e->rounds, SECS);
	owned_pool(&pool, e, rig_client(e->own, "owner"));
	rig_stage_set(e->rig, STAGE_HELD, e->rounds);
	for (;;)
		rig_sleep_ms(1000);
}

static void kill_owner(struct rig *rig, const struct engine *e, pid_t pid)
{
	uint64_t before = device_free_bytes(), since, left;

	rig_stage_set(rig, STAGE_GO, e->rounds);
	rig_stage_wait(rig, STAGE_HELD, e->rounds, SECS);
	left = device_free_bytes();
	RIG_REQUIRE(left + OWNED_BYTES / 2 < before, "the pool takes nothing");
	RIG_REQUIRE(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
	since = rig_now_ns();
	printf("     %s: %lld MiB were back %.0f ms after the death of their owner\n",
	       e->kind == DEVICE_IPC ? "IPC handle" : "fds of chunks",
	       (long long)(before - left) >> 20, memory_back(before, since, "a dead client"));
	fflush(stdout);
}

static void pause_done(void *arg, enum kvp_status status, const char *text)
{
	RIG_REQUIRE(status == KVP_OK, "%s", text);
	*(uint64_t *)arg = rig_now_ns();
}

/* In a process of its own: what the rig's own process holds must not change. */
static void pause_engine(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "pauser");
	struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .fd = -1 };
	struct rig_pool pool;
	uint64_t empty, since = 0;

	device_open();
	empty = device_free_bytes();
	owned_pool(&pool, e, client);
	for (int i = 0; i < (fake ? 1 : 3); i++) {
		since = 0;
		RIG_CALL(client, kvp_pool_pause(client, pool.id, pause_done, &since));
		while (!since) {
			RIG_REQUIRE(kvp_process(client) >= 0);
			rig_sleep_ms(1);
		}
		device_pool_free(&pool);
		(void)memory_back(empty, rig_now_ns(), "a paused pool");
		device_pool_allocate(&pool, "pauser", 1, e->kind);
		mem.addr = pool.device;
		mem.bytes = pool.bytes;
		RIG_CALL(client, kvp_pool_resume_mems(client, pool.id, &mem, 1));
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

/* What opens the GPU must not be the child of a process that has: all start before this one does.
 */
static void owners(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "prefill", CONFIG);
	struct engine e[2] = { { .rig = rig, .own = daemon, .kind = DEVICE_IPC, .rounds = 1 },
			       { .rig = rig, .own = daemon, .kind = DEVICE_CHUNKS, .rounds = 2 } };
	pid_t pids[2];

	for (uint32_t i = 0; i < 2; i++) {
		rig_rank_start(rig, "pauser", pause_engine, &e[i]);
		rig_ranks_join(rig, SECS);
	}
	for (uint32_t i = 0; i < 2; i++)
		pids[i] = rig_fork("owner", owner, &e[i]);
	for (uint32_t i = 0; i < 2; i++)
		kill_owner(rig, &e[i], pids[i]);
}

/* A GPU that has no memory for a lane is not served, in words; the daemon serves the host. */
static void no_memory(struct rig *rig)
{
	const struct engine e = { .rig = rig, .kind = DEVICE_IPC };
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .fd = -1 };
	struct rig_pool pool, host;
	struct kvp_client *client;
	char *json = NULL;
	uint64_t hog;

	device_open();
	memset(&pool, 0, sizeof(pool));
	memset(&host, 0, sizeof(host));
	(void)rig_pool_entry(&pool, 0, ROW, PAGE, PAGES);
	(void)rig_pool_entry(&host, 0, ROW, PAGE, PAGES);
	device_pool_allocate(&pool, "engine", 1, e.kind);
	hog = device_alloc(device_free_bytes() - (UINT64_C(64) << 20));
	client = rig_client(rig_daemon_start(rig, "node", CONFIG), "engine");
	mem.addr = pool.device;
	mem.bytes = pool.bytes;
	desc.entries = pool.entries;
	desc.n_entries = pool.n_entries;
	desc.mems = &mem;
	desc.n_mems = 1;
	RIG_REQUIRE(kvp_pool_register(client, &desc, &pool.id) < 0);
	RIG_REQUIRE(kvp_last_status(client) == KVP_STATUS_NO_MEMORY &&
			    strstr(kvp_last_error(client), "is not served: lane gpu0: "),
		    "%s", kvp_last_error(client));
	RIG_CALL(client, kvp_inspect(client, "lanes", NULL, &json));
	RIG_REQUIRE(strstr(json, "\"gpus_refused\":[{\"gpu\":\"GPU-"), "%s", json);
	free(json);
	rig_pool_make(&host, client, "host", 2);
	kvp_client_close(client);
	device_free(hog);
	device_pool_free(&pool);
}

/* ---- death in mid-transfer ------------------------------------------------------------------- */

/* Opens rooms and sends as long as it lives. */
static void endless_prefill(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "endless");
	uint32_t pages[PAGES];
	struct rig_pool pool;

	engine_pool(&pool, e, client, PAGES, 1);
	rig_pages(pages, PAGES - 1, 1, PAGES, 7);
	for (uint64_t room = e->room;; room++) {
		kvp_room_id id = engine_open(e, client, pool.id, room);

		for (uint64_t at = 0; at < TOKENS; at += CHUNK)
			engine_submit(client, id,
				      &(struct piece){ pages, at, KVP_MIN(CHUNK, TOKENS - at),
						       at + CHUNK >= TOKENS, NULL, 0 });
		(void)kvp_room_wait(client, id, KVP_WAIT_TERMINAL, SECS * 1000);
		kvp_room_forget(client, id);
		rig_stage_set(e->rig, STAGE_VALUE, room);
		if (rig_stage_get(e->rig, STAGE_GO))
			break; /* the other end is dead, and this one lives */
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

static void endless_decode(void *arg)
{
	const struct engine *e = arg;
	struct kvp_client *client = rig_client(e->own, "endless");
	uint32_t pages[PAGES / RANKS];
	struct kvp_side_desc side = decode_side(e, pages);
	struct rig_pool pool;

	engine_pool(&pool, e, client, PAGES / RANKS, 2 + e->rank);
	for (uint64_t room = e->room;; room++) {
		kvp_room_id id = engine_expect(e, client, pool.id, &side, room, TOKENS);

		(void)kvp_room_wait(client, id, KVP_WAIT_RELEASED, SECS * 1000);
		kvp_room_forget(client, id);
		if (rig_stage_get(e->rig, STAGE_GO))
			break;
	}
	kvp_client_close(client);
	device_pool_free(&pool);
}

/* Kills one end while rooms come and go; the daemons serve others afterwards. */
static void killed(struct rig *rig, bool producer)
{
	struct rig_daemon *here = rig_daemon_start(rig, "prefill", CONFIG);
	struct rig_daemon *there = rig_daemon_start(rig, "decode", CONFIG);
	struct engine send = {
		.rig = rig, .own = here, .prefill_node = here, .kind = DEVICE_IPC, .room = 100
	};
	struct engine receive[RANKS + 1] = { send, send, send };
	pid_t source, sinks[RANKS];
	int status;

	source = rig_fork("prefill", endless_prefill, &send);
	for (uint32_t r = 0; r < RANKS; r++) {
		receive[r].own = there;
		receive[r].rank = r;
		sinks[r] = rig_fork("decode", endless_decode, &receive[r]);
	}
	rig_stage_wait(rig, STAGE_VALUE, fake ? 102 : 105, SECS);
	RIG_REQUIRE(kill(producer ? source : sinks[0], SIGKILL) == 0);
	RIG_REQUIRE(waitpid(producer ? source : sinks[0], &status, 0) > 0 && WIFSIGNALED(status));
	rig_stage_set(rig, STAGE_GO, 1);
	/* Those left see their rooms fail, or wait for a room that never comes: these are ended. */
	for (uint32_t r = producer ? 0 : 1; r < RANKS; r++)
		(void)kill(sinks[r], SIGKILL);
	if (!producer)
		(void)kill(source, SIGKILL);
	while (waitpid(-1, &status, WNOHANG) > 0)
		;
	send.room = 5;
	for (uint32_t r = 0; r < RANKS; r++) {
		receive[r] = send;
		receive[r].own = there;
		receive[r].rank = r;
		rig_rank_start(rig, "decode", decode, &receive[r]);
	}
	rig_rank_start(rig, "prefill", prefill, &send);
	rig_ranks_join(rig, SECS);
}

static void producer_killed(struct rig *rig)
{
	killed(rig, true);
}

static void consumer_killed(struct rig *rig)
{
	killed(rig, false);
}

/* ---------------------------------------------------------------------------------------------- */

/* Free memory of the GPU, as a child sees it that goes away again. */
static uint64_t level(void)
{
	int fds[2];
	uint64_t bytes = 0;
	pid_t pid;

	RIG_REQUIRE(pipe(fds) == 0);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		bytes = device_free_bytes();
		_exit(write(fds[1], &bytes, sizeof(bytes)) != sizeof(bytes));
	}
	RIG_REQUIRE(read(fds[0], &bytes, sizeof(bytes)) == sizeof(bytes));
	RIG_REQUIRE(waitpid(pid, NULL, 0) == pid);
	(void)close(fds[0]);
	(void)close(fds[1]);
	return bytes;
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "landing", landing_ipc },
		{ "landing, chunks", landing_chunks },
		{ "landing, to the host", landing_mixed },
		{ "landing, without sums", landing_without_sums },
		{ "local", local_ipc },
		{ "one daemon, GPU to host", lanes_to_host },
		{ "one daemon, host to GPU", lanes_from_host },
		{ "torn reads", torn_reads },
		{ "fences that never come", stalled },
		{ "memory of owners", owners },
		{ "no memory for a lane", no_memory },
		{ "producer killed", producer_killed },
		{ "consumer killed", consumer_killed },
	};
	uint64_t before, after;
	int rc;

	if (!device_or_fake(argv))
		return 77;
	fake = device_is_fake();
	before = level();
	rc = rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
	after = level();
	printf("GPU memory free before: %llu MiB, after: %llu MiB\n",
	       (unsigned long long)before >> 20, (unsigned long long)after >> 20);
	return rc || after + SLACK_BYTES < before;
}
