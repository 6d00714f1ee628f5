/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The demo: two daemons on this machine as two nodes, four prefill ranks and four decode ranks as
 * processes, one prompt of 32,701 tokens, every row of every rank checked. The same with packing
 * off and with one daemon for both ends. Caches are on the first GPU where there is one and the
 * daemon was built with CUDA. The exit status says whether every byte was right.
 */

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support_device.h"

#define ROOM 7000u
#define RANKS 4u /* of each engine */
#define LAYERS 7u
#define ROW 576u
#define PAGE 64u
#define VPAGE (PAGE * RANKS)
#define TOKENS 32701u
#define CACHED 2048u
#define CHUNK 8192u
#define PREFILL_PAGES 640u
#define DECODE_PAGES 160u
#define MAX_REPS 5u
#define SECS 60

enum { STAGE_REP, STAGE_GO, STAGE_READY, STAGE_DONE = STAGE_READY + 2 * RANKS };

static uint32_t packed_reps = MAX_REPS; /* of what is packed */

/* What the scenarios, processes of their own, leave for the end. */
static struct shared {
	double seconds[MAX_REPS]; /* filled by the running scenario */
	uint64_t end_ns[RANKS];   /* when a decode rank saw complete */
	uint64_t checked;         /* ranks' pools compared */
	double packed_s, raw_s;   /* medians */
	char transport[128];
	char status[2][8192]; /* kvpackctl status of both nodes */
} * shared;

static enum device_kind caches;        /* where they are */
static const char *config;             /* of the daemons */
static char gpu[100] = "no GPU found"; /* its name, or why it is not used */

struct rank {
	struct rig *rig;
	const struct rig_daemon *own, *prefill_node;
	uint32_t rank, reps;
};

/* ---- the two kinds of rank ------------------------------------------------------------------ */

/* Longer than who started us waits, and can see what holds us up. */
static void completes(struct kvp_client *client, kvp_room_id room)
{
	struct kvp_room_state state = rig_await(client, room, KVP_WAIT_TERMINAL, 2 * SECS);

	RIG_REQUIRE(state.complete, "%s: %s", kvp_status_name(state.status), state.reason);
}

static void rank_ready(struct rank *r, uint32_t idx, uint32_t rep)
{
	rig_stage_set(r->rig, STAGE_READY + idx, rep + 1);
	rig_stage_wait(r->rig, STAGE_GO, rep + 1, SECS);
}

static void send_prompt(struct kvp_client *client, kvp_room_id room, const uint32_t *pages)
{
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	uint64_t at;

	for (at = CACHED; at < TOKENS; at += chunk.tokens) {
		chunk.start = at;
		chunk.tokens = KVP_MIN(CHUNK, TOKENS - at);
		chunk.last = at + chunk.tokens == TOKENS;
		side.pos0 = at;
		side.pages = pages + at / PAGE;
		side.n_pages = (uint32_t)KVP_DIV_UP(chunk.tokens, PAGE);
		chunk.sides = &side;
		chunk.n_sides = 1;
		RIG_CALL(client, kvp_submit(client, room, &chunk, NULL, NULL, NULL));
	}
}

static void prefill_run(void *arg)
{
	struct rank *r = arg;
	struct kvp_client *client = rig_client(r->own, "prefill");
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct rig_key key = { ROOM, r->rank };
	struct rig_pool pool = { 0 };
	uint32_t i, pages[PREFILL_PAGES];
	kvp_room_id room;

	for (i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(&pool, i, ROW, PAGE, PREFILL_PAGES);
	device_pool_allocate(&pool, "prefill", 10 + r->rank, caches);
	device_pool_register(&pool, client, "prefill");
	rig_pages(pages, PREFILL_PAGES - 1, 1, PREFILL_PAGES, 100 + r->rank);
	side.pages = pages;
	side.n_pages = PREFILL_PAGES - 1;
	rig_put_rows(pool.mem, &pool, &side, 0, TOKENS, &key);
	device_pool_push(&pool);
	for (i = 0; i < r->reps; i++) {
		struct kvp_open open = KVP_OPEN_INIT;

		open.room = ROOM + i;
		open.sender = r->rank;
		open.pool = pool.id;
		open.sides = &side;
		open.n_sides = 1;
		open.label = "demo";
		RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &room));
		RIG_REQUIRE(!rig_await(client, room, KVP_WAIT_READY, SECS).failed);
		rank_ready(r, r->rank, i);
		send_prompt(client, room, pages);
		completes(client, room);
		kvp_room_forget(client, room);
		rig_stage_wait(r->rig, STAGE_REP, i + 1, SECS);
	}
	kvp_client_close(client);
}

/* The tokens that decode has from elsewhere are in its pool already; they must stay. */
static void decode_cached(uint8_t *mem, const struct rig_pool *pool,
			  const struct kvp_side_desc *side)
{
	struct rig_key key = { ROOM, 900 };

	rig_put_rows(mem, pool, side, 0, CACHED, &key);
}

static void decode_check(const struct rank *r, const struct rig_pool *pool,
			 const struct kvp_side_desc *side)
{
	uint8_t *image = rig_pool_image(pool);
	struct rig_key key = { ROOM, r->rank };

	decode_cached(image, pool, side);
	rig_put_rows(image, pool, side, CACHED, TOKENS, &key);
	device_pool_pull(pool);
	rig_pool_check(pool, image, "demo");
	free(image);
	__atomic_fetch_add(&shared->checked, 1, __ATOMIC_RELAXED);
}

static void decode_expect(const struct rank *r, struct kvp_client *client, uint32_t pool,
			  const struct kvp_side_desc *all, uint32_t rep, kvp_room_id *room)
{
	struct kvp_expect_sender sender = { r->prefill_node->address, r->rank, 1, KVP_ROLE_DATA };
	struct kvp_side_desc side = *all;
	struct kvp_expect expect = KVP_EXPECT_INIT;

	side.pos0 = CACHED;
	side.pages += CACHED / VPAGE;
	side.n_pages -= CACHED / VPAGE;
	expect.room = ROOM + rep;
	expect.dest = r->rank;
	expect.pool = pool;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.prefix = CACHED;
	expect.end = TOKENS;
	expect.label = "demo";
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, room));
}

static void decode_run(void *arg)
{
	struct rank *r = arg;
	struct kvp_client *client = rig_client(r->own, "decode");
	uint32_t i, pages[DECODE_PAGES];
	struct kvp_side_desc side = { .page = PAGE,
				      .dcp_size = RANKS,
				      .dcp_rank = r->rank,
				      .interleave = 1,
				      .n_pages = KVP_DIV_UP(TOKENS, VPAGE),
				      .pages = pages };
	struct rig_pool pool = { 0 };
	kvp_room_id room;

	for (i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(&pool, i, ROW, PAGE, DECODE_PAGES);
	device_pool_allocate(&pool, "decode", 20 + r->rank, caches);
	device_pool_register(&pool, client, "decode");
	rig_pages(pages, DECODE_PAGES - 1, 1, DECODE_PAGES, 200); /* the same on all ranks */
	for (i = 0; i < r->reps; i++) {
		rig_pool_reset(&pool);
		decode_cached(pool.mem, &pool, &side);
		device_pool_push(&pool);
		decode_expect(r, client, pool.id, &side, i, &room);
		rank_ready(r, RANKS + r->rank, i);
		completes(client, room);
		shared->end_ns[r->rank] = rig_now_ns();
		rig_stage_set(r->rig, STAGE_DONE + r->rank, i + 1);
		decode_check(r, &pool, &side);
		(void)rig_await(client, room, KVP_WAIT_RELEASED, SECS);
		kvp_room_forget(client, room);
		rig_stage_wait(r->rig, STAGE_REP, i + 1, SECS);
	}
	kvp_client_close(client);
}

/* ---- what happened -------------------------------------------------------------------------- */

/* The sum of all numbers with that name in a JSON value. */
static double json_sum(const cJSON *value, const char *name)
{
	const cJSON *child;
	double sum = 0;

	cJSON_ArrayForEach (child, value) {
		if (child->string && !strcmp(child->string, name) && cJSON_IsNumber(child))
			sum += child->valuedouble;
		else
			sum += json_sum(child, name);
	}
	return sum;
}

/* The first text with that name. */
static const char *json_text(const cJSON *value, const char *name)
{
	const cJSON *child;
	const char *text;

	cJSON_ArrayForEach (child, value) {
		if (child->string && !strcmp(child->string, name) && cJSON_IsString(child))
			return child->valuestring;
		text = json_text(child, name);
		if (text)
			return text;
	}
	return NULL;
}

/* Operations that the node's lanes have made to send rows. */
static double lane_operations(const struct rig_daemon *daemon)
{
	struct kvp_client *client = rig_client(daemon, "demo");
	const char *text;
	double sum;
	cJSON *json;
	char *s;

	RIG_CALL(client, kvp_inspect(client, "lanes", NULL, &s));
	json = cJSON_Parse(s);
	RIG_REQUIRE(json);
	sum = json_sum(json, "raw_rows");
	if (sum == 0)
		sum = json_sum(json, "pieces_sent") + json_sum(json, "pieces_local");
	text = json_text(json, "transport");
	if (text)
		snprintf(shared->transport, sizeof(shared->transport), "%s", text);
	cJSON_Delete(json);
	free(s);
	kvp_client_close(client);
	return sum;
}

/* Writes as one operation each: until the row before is not the neighbour at both ends. */
static uint64_t raw_operations(void)
{
	uint32_t src[PREFILL_PAGES], dst[DECODE_PAGES], rank, slot, count[RANKS] = { 0 };
	uint64_t pos, from, to, last_from[RANKS], last_to[RANKS], n = 0;

	rig_pages(dst, DECODE_PAGES - 1, 1, DECODE_PAGES, 200);
	rig_pages(src, PREFILL_PAGES - 1, 1, PREFILL_PAGES, 100); /* alike for the other ranks */
	for (rank = 0; rank < RANKS; rank++)
		last_from[rank] = last_to[rank] = UINT64_MAX - 1;
	for (pos = 0; pos < TOKENS; pos++) {
		rank = pos % RANKS;
		slot = count[rank]++ % PAGE;
		from = (uint64_t)src[pos / PAGE] * PAGE + pos % PAGE;
		to = (uint64_t)dst[pos / VPAGE] * PAGE + slot;
		if (pos >= CACHED && (from != last_from[rank] + 1 || to != last_to[rank] + 1))
			n++;
		last_from[rank] = from;
		last_to[rank] = to;
	}
	return n * LAYERS;
}

static const char *grouped(uint64_t n, char buf[32])
{
	char digits[24];
	int len = snprintf(digits, sizeof(digits), "%llu", (unsigned long long)n), i, k = 0;

	for (i = 0; i < len; i++) {
		if (i && (len - i) % 3 == 0)
			buf[k++] = ',';
		buf[k++] = digits[i];
	}
	buf[k] = 0;
	return buf;
}

static int by_value(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static double report(const char *what, uint32_t reps, double operations)
{
	uint64_t rows = (uint64_t)(TOKENS - CACHED) * LAYERS, bytes = rows * ROW;
	char a[32], b[32], c[32];
	double median;

	qsort(shared->seconds, reps, sizeof(double), by_value);
	median = shared->seconds[reps / 2];
	printf("%-26s %9s %9s %9s %8.1f MB %8.1f ms %7.2f GB/s\n", what, grouped(rows, a),
	       grouped(raw_operations(), b), grouped((uint64_t)(operations / reps + 0.5), c),
	       (double)bytes / 1e6, median * 1e3, (double)bytes / median / 1e9);
	fflush(stdout);
	return median;
}

/* ---- one run of everything ------------------------------------------------------------------ */

static void node_status(const struct rig_daemon *daemon, char *buf, size_t bytes)
{
	char program[4096], command[4400];
	FILE *pipe;
	size_t n;

	rig_program(program, sizeof(program), "kvpackctl");
	snprintf(command, sizeof(command), "'%s' --socket '%s' status", program, daemon->socket);
	pipe = popen(command, "re"); /* NOLINT(cert-env33-c): paths of our own */
	RIG_REQUIRE(pipe);
	n = fread(buf, 1, bytes - 1, pipe);
	buf[n] = 0;
	RIG_REQUIRE(pclose(pipe) == 0, "kvpackctl status: %s", buf);
}

/* What holds the rooms up, for who has waited in vain. */
static const struct rig *watched;
static pid_t watcher;

static void say_why(void)
{
	static const char *const what[] = { "waiting", "lanes", "peers", "failures" };
	char program[4096], command[4400], line[512];

	if (!watched || getpid() != watcher) /* ranks say what they have seen themselves */
		return;
	rig_program(program, sizeof(program), "kvpackctl");
	for (uint32_t i = 0; i < watched->n_daemons * KVP_ARRAY_SIZE(what); i++) {
		const struct rig_daemon *daemon = &watched->daemons[i / KVP_ARRAY_SIZE(what)];
		FILE *pipe;

		snprintf(command, sizeof(command), "'%s' --socket '%s' %s 2>&1", program,
			 daemon->socket, what[i % KVP_ARRAY_SIZE(what)]);
		pipe = popen(command, "re"); /* NOLINT(cert-env33-c): paths of our own */
		while (pipe && fgets(line, sizeof(line), pipe))
			fprintf(stderr, "  %s: %s", daemon->name, line);
		if (pipe)
			(void)pclose(pipe); /* it has said what it could */
	}
}

static void one_transfer(struct rig *rig, uint32_t rep, bool show)
{
	uint64_t from, end = 0;
	uint32_t i;

	for (i = 0; i < 2 * RANKS; i++)
		rig_stage_wait(rig, STAGE_READY + i, rep + 1, SECS);
	for (i = 0; show && i < 2; i++) /* all rooms are open, nothing moves yet */
		node_status(&rig->daemons[i], shared->status[i], sizeof(shared->status[i]));
	from = rig_now_ns();
	rig_stage_set(rig, STAGE_GO, rep + 1);
	for (i = 0; i < RANKS; i++) {
		rig_stage_wait(rig, STAGE_DONE + i, rep + 1, SECS);
		end = KVP_MAX(end, shared->end_ns[i]);
	}
	shared->seconds[rep] = (double)(end - from) / 1e9;
	rig_stage_set(rig, STAGE_REP, rep + 1);
}

static double transfers(struct rig *rig, const char *what, uint32_t reps, bool show)
{
	struct rank ranks[2 * RANKS];
	double operations;
	char name[32];
	uint32_t i;

	for (i = 0; i < 2 * RANKS; i++) {
		ranks[i] = (struct rank){ rig, &rig->daemons[i < RANKS ? 0 : rig->n_daemons - 1],
					  &rig->daemons[0], i % RANKS, reps };
		snprintf(name, sizeof(name), "%s %u", i < RANKS ? "prefill" : "decode", i % RANKS);
		rig_rank_start(rig, name, i < RANKS ? prefill_run : decode_run, &ranks[i]);
	}
	watched = rig;
	watcher = getpid();
	rig_dying = say_why;
	operations = -lane_operations(&rig->daemons[0]);
	for (i = 0; i < reps; i++)
		one_transfer(rig, i, show && i == reps - 1);
	operations += lane_operations(&rig->daemons[0]);
	rig_ranks_join(rig, SECS);
	return report(what, reps, operations);
}

static void packed(struct rig *rig)
{
	(void)rig_daemon_start(rig, "prefill", config);
	(void)rig_daemon_start(rig, "decode", config);
	shared->packed_s = transfers(rig, "node to node", packed_reps, true);
}

/* In host memory: a transport cannot read single rows of a GPU. */
static void unpacked(struct rig *rig)
{
	caches = DEVICE_NONE;
	(void)rig_daemon_start(rig, "prefill", "[lane]\npack = off\n");
	(void)rig_daemon_start(rig, "decode", "[lane]\npack = off\n");
	shared->raw_s = transfers(
		rig, config ? "host memory, packing off" : "node to node, packing off", 3, false);
}

static void local(struct rig *rig)
{
	(void)rig_daemon_start(rig, "both", config);
	(void)transfers(rig, "local, one daemon", packed_reps, false);
}

static void introduce(void)
{
	printf("kvpack: two daemons on this machine as two nodes, caches %s, %s\n"
	       "prefill  TP %u, %u processes    decode  TP %u, DCP %u, %u processes    one room "
	       "id\n"
	       "model    %u entries of %u-byte rows, pages of %u tokens in random order at both "
	       "ends\n"
	       "prompt   %u tokens, %u of them cached at decode, the rest in chunks of %u\n\n",
	       config ? "on a GPU" : "in host memory", gpu, RANKS, RANKS, RANKS, RANKS, RANKS,
	       LAYERS, ROW, PAGE, TOKENS, CACHED, CHUNK);
	printf("%-26s %9s %9s %9s %11s %11s %12s\n", "", "rows", "raw ops", "ops made", "bytes",
	       "time", "rate");
	fflush(stdout);
}

static void choose_caches(void)
{
	char name[60];

	if (!device_found(name, sizeof(name)))
		return;
	snprintf(gpu, sizeof(gpu), "%s%s", name,
		 device_served() ? "" : " is not used: built without CUDA");
	if (!device_served())
		return;
	caches = DEVICE_IPC;
	config = "[gpu]\ndevices = all\n";
}

int main(void)
{
	static const struct rig_scenario scenarios[] = { { "node to node", packed },
							 { "packing off", unpacked },
							 { "local", local } };
	/* Row by row takes minutes where the network is emulated, and a median says nothing. */
	const bool raw = !getenv("KVP_TEST_NET");
	uint64_t pools;
	bool ok = true;
	size_t i;

	if (!raw)
		packed_reps = 2;
	pools = RANKS * (packed_reps + (raw ? 3 : 0) + packed_reps);

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	RIG_REQUIRE(shared != MAP_FAILED);
	choose_caches();
	introduce();
	for (i = 0; i < KVP_ARRAY_SIZE(scenarios); i++)
		ok = ((scenarios[i].run == unpacked && !raw) || rig_run(&scenarios[i])) && ok;
	if (!ok || shared->checked != pools) {
		printf("FAILED: %llu of %llu pools were right\n",
		       (unsigned long long)shared->checked, (unsigned long long)pools);
		return 1;
	}
	printf("\ntimes are medians of %u (packing off: 3), from the first submit to the last "
	       "complete;\n"
	       "packing makes it %.1f times faster; data went over %s\n"
	       "checked: %llu pools of decode ranks%s, every row equal to its source, no other "
	       "byte "
	       "touched\n",
	       packed_reps, shared->raw_s / shared->packed_s,
	       shared->transport[0] ? shared->transport : "UCX",
	       (unsigned long long)shared->checked, config ? " on the GPU" : "");
	for (i = 0; i < 2; i++)
		printf("\n$ kvpackctl status    (node %s, before the last transfer)\n%s",
		       i ? "decode" : "prefill", shared->status[i]);
	return 0;
}
