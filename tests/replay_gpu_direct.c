/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client's room through a whole daemon to writes straight into pools on a GPU: engines in
 * processes of their own, the host's lane and the GPU's of one daemon with an RDMA device between
 * them, which is none (tests/fake_verbs.c), as the GPU's driver is (tests/fake_cuda.c). The device
 * reaches the memory by the dma-buf alone. Every byte is compared, and what the daemon says of it.
 *
 * usage: replay_gpu_direct [SCENARIO ...]
 */

#include <cjson/cJSON.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/util.h"
#include "tests/support_device.h"
#include "tests/support_faults.h"

#define PAGE 64u
#define PAGES 24u
#define ROW 576u
#define LAYERS 3u
#define RANKS 2u
#define TOKENS (UINT64_C(1000))
#define SECS 20
/* The rings are the host's: the device that is none reads and writes what the processor can. */
#define CONFIG                                               \
	"[gpu]\ndevices = all\nslots = 4\nslot_bytes = 1M\n" \
	"[verbs]\ndevice = fake0\n[data]\ntransport = verbs\n"

struct engine {
	struct rig *rig;
	const struct rig_daemon *daemon;
	enum device_kind kind; /* of decode's pools */
	uint32_t rank;
	bool killed; /* an engine of the room is */
	uint64_t room;
};

/* ---- engines --------------------------------------------------------------------------------- */

static struct kvp_client *engine_begin(const struct engine *e, enum device_kind kind,
				       uint32_t pages, struct rig_pool *pool)
{
	struct kvp_client *client = rig_client(e->daemon, "engine");

	memset(pool, 0, sizeof(*pool));
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, ROW, PAGE, pages);
	device_pool_allocate(pool, "engine", 1 + e->rank, kind);
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
	const struct rig_key key = { e->room, 0 };
	uint32_t pages[PAGES];
	struct rig_pool pool;
	struct kvp_client *client = engine_begin(e, DEVICE_NONE, PAGES, &pool);
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;
	kvp_room_id id;

	open.room = e->room;
	open.pool = pool.id;
	open.sides = chunk.sides = &side;
	open.n_sides = chunk.n_sides = 1;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	rig_pages(pages, PAGES - 1, 1, PAGES, 7);
	side.pages = pages;
	side.n_pages = KVP_DIV_UP(TOKENS, PAGE);
	rig_put_rows(pool.mem, &pool, &side, 0, TOKENS, &key);
	chunk.tokens = TOKENS;
	chunk.last = true;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
	state = rig_await(client, id, KVP_WAIT_RELEASED, SECS);
	RIG_REQUIRE(!state.complete == e->killed, "%s", state.reason);
	engine_end(client, &pool);
}

static void decode(void *arg)
{
	const struct engine *e = arg;
	const struct rig_key key = { e->room, 0 };
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
	struct kvp_client *client = engine_begin(e, e->kind, PAGES / RANKS, &pool);
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;
	uint8_t *image;
	kvp_room_id id;

	rig_pages(pages, PAGES / RANKS - 1, 1, PAGES / RANKS, 9);
	expect.room = e->room;
	expect.dest = e->rank;
	expect.pool = pool.id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	state = rig_await(client, id, KVP_WAIT_RELEASED, SECS);
	if (e->killed)
		_exit(0); /* the other one was, first */
	RIG_REQUIRE(state.complete, "%s", state.reason);
	image = rig_pool_image(&pool);
	rig_put_rows(image, &pool, &side, 0, TOKENS, &key);
	device_pool_pull(&pool);
	rig_pool_check(&pool, image, "decode");
	free(image);
	engine_end(client, &pool);
}

/* ---- what the daemon says -------------------------------------------------------------------- */

/* A number of the GPU's lane: `part` of it, NULL: of its own. */
static double lane_number(const struct rig_daemon *daemon, const char *part, const char *name)
{
	cJSON *root = rig_ask(daemon, "lanes", NULL);
	const cJSON *lane, *item = NULL;
	double n = -1;

	cJSON_ArrayForEach (lane, cJSON_GetObjectItemCaseSensitive(root, "lanes"))
		if (cJSON_GetObjectItemCaseSensitive(lane, "gpu"))
			item = part ? cJSON_GetObjectItemCaseSensitive(lane, part) : lane;
	item = cJSON_GetObjectItemCaseSensitive(item, name);
	if (cJSON_IsNumber(item))
		n = item->valuedouble;
	cJSON_Delete(root);
	return n;
}

static void room_says(const struct rig_daemon *daemon, const char *room, const char *what)
{
	cJSON *root = rig_ask(daemon, "room", room);
	char *text = cJSON_PrintUnformatted(root);

	RIG_REQUIRE(strstr(text, what), "%s is not in %s", what, text);
	cJSON_free(text);
	cJSON_Delete(root);
}

/* Nothing that a peer could write to is left, and nothing of clients is mapped. */
static void nothing_stays(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);

	while (lane_number(daemon, NULL, "windows") != 0 ||
	       lane_number(daemon, NULL, "regions") != 0 ||
	       lane_number(daemon, "gpu", "imports") != 0) {
		RIG_REQUIRE(rig_now_ns() < until, "%.0f windows, %.0f regions, %.0f imports stay",
			    lane_number(daemon, NULL, "windows"),
			    lane_number(daemon, NULL, "regions"),
			    lane_number(daemon, "gpu", "imports"));
		rig_sleep_ms(2);
	}
}

static void went_directly(const struct rig_daemon *daemon)
{
	double landed = lane_number(daemon, NULL, "pieces_landed");

	RIG_REQUIRE(landed > 0 && lane_number(daemon, NULL, "pieces_direct") == landed,
		    "%.0f of %.0f pieces", lane_number(daemon, NULL, "pieces_direct"), landed);
	RIG_REQUIRE(lane_number(daemon, NULL, "bytes_direct") >= TOKENS * ROW * LAYERS);
	room_says(daemon, "7", "\"mode\":\"direct\"");
}

/* ---- scenarios ------------------------------------------------------------------------------- */

static struct rig_daemon *start(struct rig *rig, const char *config)
{
	rig->program = "tests/fake/kvpackd";
	return rig_daemon_start(rig, "node", config);
}

/* Of each decode rank's pool a window is open. */
static void wait_windows(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);

	while (lane_number(daemon, NULL, "windows") < RANKS) {
		RIG_REQUIRE(rig_now_ns() < until, "%.0f windows are open",
			    lane_number(daemon, NULL, "windows"));
		rig_sleep_ms(2);
	}
}

static void begin(struct rig *rig, struct engine *ranks, const struct rig_daemon *daemon,
		  enum device_kind kind)
{
	for (uint32_t r = 0; r < RANKS; r++) {
		ranks[r] = (struct engine){ rig, daemon, kind, r, false, 7 };
		rig_rank_start(rig, "decode", decode, &ranks[r]);
	}
	rig_rank_start(rig, "prefill", prefill, &ranks[0]);
}

/* Nothing is written before it was seen by which dma-bufs the device reaches the pools. */
static void transfer(struct rig *rig, const struct rig_daemon *daemon, enum device_kind kind,
		     const char *regions)
{
	struct engine ranks[RANKS];

	fault_hold(daemon, "send", true);
	begin(rig, ranks, daemon, kind);
	wait_windows(daemon);
	RIG_REQUIRE(lane_number(daemon, NULL, regions) == RANKS, "%s: %.0f", regions,
		    lane_number(daemon, NULL, regions));
	fault_hold(daemon, "send", false);
	rig_ranks_join(rig, SECS);
	nothing_stays(daemon);
}

/* An allocation with an IPC handle: by the dma-buf that its owner has sent along. */
static void by_the_owners_dma_buf(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
}

static void by_the_owners_dma_buf_of_chunks(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	transfer(rig, daemon, DEVICE_CHUNKS, "regions_dmabuf");
	went_directly(daemon);
}

/* The owner of the chunks cannot make one: the daemon makes it of its own mapping. */
static void by_a_dma_buf_of_the_mapping(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_DMABUF", "no", 1) == 0); /* for the engines */
	transfer(rig, daemon, DEVICE_CHUNKS, "regions_vmm");
	went_directly(daemon);
}

static void the_gpu_is_told(struct rig *rig)
{
	const struct rig_daemon *daemon =
		start(rig, CONFIG "mode = direct\n[gpu]\nflush = always\n");

	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
	RIG_REQUIRE(lane_number(daemon, "gpu", "flushes") > 0);
}

/* The device takes no dma-buf: the rooms land, and it is said why. */
static void refused(struct rig *rig)
{
	struct engine ranks[RANKS];
	const struct rig_daemon *daemon;

	RIG_REQUIRE(setenv("KVP_FAKE_VERBS_DMABUF", "refused", 1) == 0);
	daemon = start(rig, CONFIG "mode = auto\n");
	RIG_REQUIRE(unsetenv("KVP_FAKE_VERBS_DMABUF") == 0);
	begin(rig, ranks, daemon, DEVICE_IPC);
	rig_ranks_join(rig, SECS);
	nothing_stays(daemon);
	RIG_REQUIRE(lane_number(daemon, NULL, "pieces_direct") == 0);
	RIG_REQUIRE(lane_number(daemon, "fell_back", "memory") > 0 ||
		    lane_number(daemon, "fell_back", "pending") > 0);
	room_says(daemon, "7", "\"mode\":\"landing\"");
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

/*
 * A decode engine dies while a peer has the keys of its pool and has not written yet: they are
 * taken back, the memory is let go of, and who comes next is served.
 */
static void killed(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");
	struct engine ranks[RANKS], send = { rig, daemon, DEVICE_IPC, 0, true, 7 };
	pid_t source, sinks[RANKS];
	int status = -1;

	fault_hold(daemon, "send", true);
	for (uint32_t r = 0; r < RANKS; r++) {
		ranks[r] = send;
		ranks[r].rank = r;
		sinks[r] = engine_fork(decode, &ranks[r]);
	}
	source = engine_fork(prefill, &send);
	wait_windows(daemon);
	for (uint32_t r = 0; r < RANKS; r++)
		RIG_REQUIRE(kill(sinks[r], SIGKILL) == 0 && waitpid(sinks[r], NULL, 0) == sinks[r]);
	RIG_REQUIRE(waitpid(source, &status, 0) == source && status == 0, "%#x", (unsigned)status);
	nothing_stays(daemon);
	RIG_REQUIRE(lane_number(daemon, NULL, "pieces_landed") == 0);
	fault_hold(daemon, "send", false);
	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "by the owner's dma-buf", by_the_owners_dma_buf },
		{ "by the owner's dma-buf of chunks", by_the_owners_dma_buf_of_chunks },
		{ "by a dma-buf of the mapping", by_a_dma_buf_of_the_mapping },
		{ "the GPU is told", the_gpu_is_told },
		{ "refused", refused },
		{ "killed with keys out", killed },
	};

	if (!device_or_fake(argv))
		return 77;
	if (!device_is_fake()) {
		puts("a real GPU: the RDMA device that is none cannot write there");
		return 77;
	}
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
