/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rooms between two GPUs of one daemon, by peer access where they have it: engines in processes of
 * their own, every byte compared, what the daemon says of how it moved. Without two GPUs on the
 * driver that is none, which can be told to refuse.
 *
 * usage: replay_gpu_peer [SCENARIO ...]
 */

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/util.h"
#include "tests/support_device.h"

#define PAGE 64u
#define PAGES 24u
#define ROW 576u
#define LAYERS 3u
#define RANKS 2u
#define TOKENS (UINT64_C(1000))
#define SECS 20
#define SLOTS "slots = 2\nslot_bytes = 1M\n"
#define CONFIG "[gpu]\ndevices = all\n" SLOTS

struct engine {
	struct rig *rig;
	const struct rig_daemon *daemon;
	enum device_kind kind;
	uint32_t rank;
	bool killed; /* in mid-move */
};

/* ---- engines --------------------------------------------------------------------------------- */

static struct kvp_client *engine_begin(const struct engine *e, int gpu, uint32_t pages,
				       struct rig_pool *pool)
{
	struct kvp_client *client = rig_client(e->daemon, "engine");

	device_use(gpu);
	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, ROW, PAGE, pages);
	device_pool_allocate(pool, "engine", 1 + e->rank, e->kind);
	device_pool_register(pool, client, "engine");
	return client;
}

static void engine_end(struct kvp_client *client, struct rig_pool *pool)
{
	kvp_client_close(client);
	device_pool_free(pool);
}

static void prefill(void *arg)
{
	const struct engine *e = arg;
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	const struct rig_key key = { 7, 0 };
	uint32_t pages[PAGES];
	struct rig_pool pool;
	struct kvp_client *client = engine_begin(e, 0, PAGES, &pool);
	kvp_room_id id;

	open.room = 7;
	open.sender = e->rank;
	open.pool = pool.id;
	open.sides = chunk.sides = &side;
	open.n_sides = chunk.n_sides = 1;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	rig_pages(pages, PAGES - 1, 1, PAGES, 7);
	side.pages = pages;
	side.n_pages = KVP_DIV_UP(TOKENS, PAGE);
	rig_put_rows(pool.mem, &pool, &side, 0, TOKENS, &key);
	device_pool_push(&pool);
	chunk.tokens = TOKENS;
	chunk.last = true;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
	if (e->killed) {
		(void)kvp_room_wait(client, id, KVP_WAIT_TERMINAL, SECS * 1000);
		_exit(0); /* the other end was killed */
	}
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	engine_end(client, &pool);
}

/* Rank 0 is on the sender's GPU, rank 1 on the other. */
static void decode(void *arg)
{
	const struct engine *e = arg;
	const struct rig_key key = { 7, 0 };
	uint32_t pages[PAGES / RANKS];
	struct kvp_side_desc side = { .page = PAGE,
				      .dcp_size = RANKS,
				      .dcp_rank = e->rank,
				      .interleave = 1,
				      .pages = pages,
				      .n_pages = KVP_DIV_UP(TOKENS, PAGE * RANKS) };
	struct kvp_expect_sender sender = { e->daemon->address, 0, RANKS, KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct rig_pool pool;
	struct kvp_client *client = engine_begin(e, e->rank ? 1 : 0, PAGES / RANKS, &pool);
	uint8_t *image;
	kvp_room_id id;

	rig_pages(pages, PAGES / RANKS - 1, 1, PAGES / RANKS, 9);
	expect.room = 7;
	expect.dest = e->rank;
	expect.pool = pool.id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, SECS).complete);
	image = rig_pool_image(&pool);
	rig_put_rows(image, &pool, &side, 0, TOKENS, &key);
	device_pool_pull(&pool);
	rig_pool_check(&pool, image, "decode");
	free(image);
	engine_end(client, &pool);
}

/* ---- what the daemon says -------------------------------------------------------------------- */

static double number(const cJSON *root, const char *part, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(
		cJSON_GetObjectItemCaseSensitive(root, part), name);

	RIG_REQUIRE(cJSON_IsNumber(item), "no number %s.%s", part, name);
	return item->valuedouble;
}

static uint32_t occurrences(const char *text, const char *what)
{
	uint32_t n = 0;

	for (const char *at = text; (at = strstr(at, what)); at++)
		n++;
	return n;
}

/* Imports of clients' memory, of all lanes. */
static double imports(const struct rig_daemon *daemon)
{
	cJSON *root = rig_ask(daemon, "lanes", NULL);
	const cJSON *lane;
	double n = 0;

	cJSON_ArrayForEach (lane, cJSON_GetObjectItemCaseSensitive(root, "lanes"))
		if (cJSON_GetObjectItemCaseSensitive(lane, "gpu"))
			n += number(lane, "gpu", "imports");
	cJSON_Delete(root);
	return n;
}

/* Waits until nothing of the clients' memory is mapped. */
static void imports_gone(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);

	while (imports(daemon) > 0) {
		RIG_REQUIRE(rig_now_ns() < until, "memory of clients stays mapped");
		rig_sleep_ms(2);
	}
}

/* Modes of the rooms' legs that are over, and bytes by peer access. */
static void moved(const struct rig_daemon *daemon, uint32_t peer, const char *slow_path)
{
	cJSON *status = rig_ask(daemon, "status", NULL), *rooms = rig_ask(daemon, "room", "7");
	char *text = cJSON_PrintUnformatted(rooms), *all = cJSON_PrintUnformatted(status);
	char want[64];

	RIG_REQUIRE(occurrences(text, "\"mode\":\"peer\"") >= peer, "%s", text);
	RIG_REQUIRE(peer || !strstr(text, "\"mode\":\"peer\""), "%s", text);
	RIG_REQUIRE(number(status, "counters", "rooms_peer") == peer, "%s", all);
	RIG_REQUIRE((number(status, "counters", "bytes_peer") > 0) == (peer > 0), "%s", all);
	if (peer)
		RIG_REQUIRE(number(status, "counters", "pieces_landed") == 0, "%s", all);
	snprintf(want, sizeof(want), "\"name\":\"%s\"", slow_path ? slow_path : "peer_");
	RIG_REQUIRE(!strstr(all, want) == !slow_path, "%s", all);
	cJSON_free(text);
	cJSON_free(all);
	cJSON_Delete(status);
	cJSON_Delete(rooms);
}

/* What is said of pools while they are there: why another GPU does not reach them. */
static void pools_say(const struct rig_daemon *daemon, const char *what)
{
	cJSON *pools = rig_ask(daemon, "pools", NULL);
	char *text = cJSON_PrintUnformatted(pools);

	RIG_REQUIRE(strstr(text, what), "%s is not in %s", what, text);
	cJSON_free(text);
	cJSON_Delete(pools);
}

/* ---- scenarios ------------------------------------------------------------------------------- */

/* A daemon that sees two GPUs; `peer`: as in tests/fake_cuda.c. */
static struct rig_daemon *start(struct rig *rig, const char *peer, const char *config)
{
	struct rig_daemon *daemon;

	if (device_is_fake() && peer)
		RIG_REQUIRE(setenv("KVP_FAKE_CUDA_PEER", peer, 1) == 0);
	daemon = rig_daemon_start(rig, "node", config);
	RIG_REQUIRE(unsetenv("KVP_FAKE_CUDA_PEER") == 0);
	return daemon;
}

static void transfer(struct rig *rig, const struct rig_daemon *daemon, enum device_kind kind)
{
	struct engine send = { .rig = rig, .daemon = daemon, .kind = kind };
	struct engine receive[RANKS];

	for (uint32_t r = 0; r < RANKS; r++) {
		receive[r] = send;
		receive[r].rank = r;
		rig_rank_start(rig, "decode", decode, &receive[r]);
	}
	rig_rank_start(rig, "prefill", prefill, &send);
	rig_ranks_join(rig, SECS);
	imports_gone(daemon);
}

static void by_handles(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG);

	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 1, NULL);
}

static void by_chunks(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG);

	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 1, NULL);
}

/* There is no transport to land by. */
static void without_transport(struct rig *rig)
{
	const struct rig_daemon *daemon;

	rig->alone = true;
	daemon = start(rig, NULL, CONFIG);
	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 1, NULL);
}

static void already(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, "already", CONFIG);

	transfer(rig, daemon, DEVICE_IPC);
	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 2, NULL);
}

static void off(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG "peer = off\n");

	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 0, "peer_off");
}

/* Not possible, or not to be had: it lands, and that is said. */
static void refused(struct rig *rig, const char *peer, const char *why)
{
	const struct rig_daemon *daemon = start(rig, peer, CONFIG);
	const struct engine e = { .rig = rig, .daemon = daemon, .kind = DEVICE_IPC };
	struct rig_pool pool;
	struct kvp_client *client;

	transfer(rig, daemon, DEVICE_IPC);
	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 0, "peer_unable");
	client = engine_begin(&e, 1, PAGES, &pool);
	pools_say(daemon, why);
	engine_end(client, &pool);
}

static void not_possible(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "no", "no peer access from GPU-");
}

static void enabling_fails(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "fails", "cuCtxEnablePeerAccess: CUDA_ERROR_TOO_MANY_PEERS");
}

static void lost_writes(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "drops", "the bytes do not arrive");
}

static pid_t engine_fork(void (*fn)(void *), struct engine *e)
{
	pid_t pid = fork();

	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		fn(e);
		_exit(0);
	}
	return pid;
}

static void busy(const char *path, bool on)
{
	int fd;

	if (!on) {
		RIG_REQUIRE(unlink(path) == 0);
		return;
	}
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	RIG_REQUIRE(fd >= 0);
	(void)close(fd);
}

static void wait_launches(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);
	double n = 0;

	while (n == 0) {
		cJSON *root = rig_ask(daemon, "lanes", NULL);
		const cJSON *lane;

		cJSON_ArrayForEach (lane, cJSON_GetObjectItemCaseSensitive(root, "lanes"))
			if (cJSON_GetObjectItemCaseSensitive(lane, "gpu"))
				n += number(lane, "gpu", "busy");
		cJSON_Delete(root);
		RIG_REQUIRE(rig_now_ns() < until, "nothing is launched");
		rig_sleep_ms(2);
	}
}

static uint32_t ends_failed(const struct rig_daemon *daemon)
{
	cJSON *root = rig_ask(daemon, "status", NULL);
	uint32_t n = (uint32_t)number(root, "counters", "failed");

	cJSON_Delete(root);
	return n;
}

/*
 * The owner of the pool on the other GPU dies while a launch writes into it. Neither lane lets go
 * of the memory before the launch is over; both do then, and others are served.
 */
static void killed(struct rig *rig)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);
	const struct rig_daemon *daemon;
	struct engine e = { .rig = rig, .kind = DEVICE_IPC, .killed = true };
	struct engine ranks[RANKS];
	pid_t source, sinks[RANKS];
	char path[128];

	if (!device_is_fake())
		return;
	snprintf(path, sizeof(path), "%s/busy", rig->dir);
	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_BUSY", path, 1) == 0);
	daemon = e.daemon = start(rig, NULL, CONFIG);
	RIG_REQUIRE(unsetenv("KVP_FAKE_CUDA_BUSY") == 0);
	busy(path, true);
	source = engine_fork(prefill, &e);
	for (uint32_t r = 0; r < RANKS; r++) {
		ranks[r] = e;
		ranks[r].rank = r;
		sinks[r] = engine_fork(decode, &ranks[r]);
	}
	wait_launches(daemon);
	/* Each of three pools is mapped by both lanes. */
	RIG_REQUIRE(imports(daemon) == 6, "%.0f", imports(daemon));
	RIG_REQUIRE(kill(sinks[1], SIGKILL) == 0 && waitpid(sinks[1], NULL, 0) == sinks[1]);
	while (ends_failed(daemon) < 2) {
		RIG_REQUIRE(rig_now_ns() < until, "the rooms do not fail");
		rig_sleep_ms(2);
	}
	RIG_REQUIRE(imports(daemon) == 6, "%.0f: memory that a launch uses is unmapped",
		    imports(daemon));
	busy(path, false);
	(void)kill(sinks[0], SIGKILL);
	RIG_REQUIRE(waitpid(sinks[0], NULL, 0) == sinks[0]);
	(void)kill(source, SIGKILL);
	RIG_REQUIRE(waitpid(source, NULL, 0) == source);
	imports_gone(daemon);
	transfer(rig, daemon, DEVICE_CHUNKS);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "by handles", by_handles },
		{ "by chunks", by_chunks },
		{ "without a transport", without_transport },
		{ "already enabled", already },
		{ "off", off },
		{ "not possible", not_possible },
		{ "enabling fails", enabling_fails },
		{ "writes that do not arrive", lost_writes },
		{ "killed in mid-move", killed },
	};

	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_GPUS", "2", 1) == 0);
	if (!device_or_fake(argv))
		return 77;
	if (device_count() < 2) {
		puts("one GPU: nothing to move between");
		return 77;
	}
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
