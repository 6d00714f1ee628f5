/* SPDX-License-Identifier: Apache-2.0 */

/* Two guests as two nodes, each with a daemon and an engine: rooms over two rails, of which one
 * goes down in the middle of a transfer and comes back. Node 0 has prefill, node 1 decode. */

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "tests/rxe/checks.h"
#include "tests/support_rig.h"

#define SHARE "/run/rdma-guest/"
#define ADDRESS "10.9.2.%d:7400" /* of the node's daemon, on the link that stays */
#define SECS 60
#define LAYERS 7u
#define ROW 576u
#define PAGE 64u
#define TOKENS 1024u
#define CHUNK 128u
#define AT_ONCE 3u /* rooms */
#define ROUNDS 5u
#define DOWN_IN 1u /* the round in which the link goes */
#define UP_AFTER 2u
#define N_PAGES (TOKENS / PAGE)
#define POOL_PAGES (AT_ONCE * N_PAGES + 1)

static const char config[] = "[peer]\nplaintext = trusted\nallow = 10.9.2.0/24\n"
			     "[data]\ntransport = verbs\nmode = landing\n"
			     /* A busy host stops a guest for longer than cards are silent. */
			     "[verbs]\ndevice = rxe0\ndevice = rxe1\ntimeout = 17\n";
static const struct rig_daemon *served; /* of this node, once it is there */

static void show_log(void)
{
	char command[160];

	(void)snprintf(command, sizeof(command), "tail -n 20 '%s' >&2", served->log);
	if (system(command) != 0) /* NOLINT: a path of our own */
		printf("  %s cannot be read\n", served->log);
}

static bool decode(void)
{
	const char *node = getenv("RDMA_NODE"); /* NOLINT(concurrency-mt-unsafe): one thread */

	return node && strcmp(node, "1") == 0;
}

static struct kvp_side_desc side_of(uint32_t pages[N_PAGES], uint32_t room)
{
	rig_pages(pages, N_PAGES, 1 + room * N_PAGES, 1 + (room + 1) * N_PAGES, room + 1);
	return (struct kvp_side_desc){
		.page = PAGE,
		.dcp_size = 1,
		.interleave = 1,
		.pages = pages,
		.n_pages = N_PAGES,
	};
}

static void make_pool(struct rig_pool *pool, struct kvp_client *client, const char *label)
{
	for (uint32_t i = 0; i < LAYERS; i++)
		(void)rig_pool_entry(pool, i, ROW, PAGE, POOL_PAGES);
	rig_pool_make(pool, client, label, decode() ? 2 : 1);
}

static uint64_t room_number(uint32_t round, uint32_t k)
{
	return 100 + round * AT_ONCE + k;
}

/* ---- prefill */

static void submit_all(struct kvp_client *client, kvp_room_id room, struct kvp_side_desc *side)
{
	uint32_t *pages = (uint32_t *)(uintptr_t)side->pages;

	for (uint32_t at = 0; at < TOKENS; at += CHUNK) {
		struct kvp_chunk chunk = KVP_CHUNK_INIT;
		struct kvp_side_desc part = *side;

		part.pos0 = at;
		part.pages = pages + at / PAGE;
		part.n_pages = CHUNK / PAGE;
		chunk.start = at;
		chunk.tokens = CHUNK;
		chunk.last = at + CHUNK == TOKENS;
		chunk.sides = &part;
		chunk.n_sides = 1;
		RIG_CALL(client, kvp_submit(client, room, &chunk, NULL, NULL, NULL));
	}
}

static void prefill_round(struct kvp_client *client, const struct rig_pool *pool, uint32_t round)
{
	uint32_t pages[AT_ONCE][N_PAGES];
	struct kvp_side_desc sides[AT_ONCE];
	kvp_room_id rooms[AT_ONCE];

	for (uint32_t k = 0; k < AT_ONCE; k++) {
		struct rig_key key = { room_number(round, k), 0 };
		struct kvp_open open = KVP_OPEN_INIT;

		sides[k] = side_of(pages[k], k);
		rig_put_rows(pool->mem, pool, &sides[k], 0, TOKENS, &key);
		open.room = room_number(round, k);
		open.pool = pool->id;
		open.sides = &sides[k];
		open.n_sides = 1;
		RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &rooms[k]));
	}
	for (uint32_t k = 0; k < AT_ONCE; k++) {
		RIG_REQUIRE(!rig_await(client, rooms[k], KVP_WAIT_READY, SECS).failed);
		submit_all(client, rooms[k], &sides[k]);
	}
	for (uint32_t k = 0; k < AT_ONCE; k++) {
		struct kvp_room_state state = rig_await(client, rooms[k], KVP_WAIT_TERMINAL, SECS);

		RIG_REQUIRE(state.complete, "round %u, room %u: %s", round, k, state.reason);
		kvp_room_forget(client, rooms[k]);
	}
}

/* ---- decode */

static void link_set(const char *state)
{
	char command[64];

	(void)snprintf(command, sizeof(command), "ip link set eth1 %s", state);
	RIG_REQUIRE(system(command) == 0, "%s", command); /* NOLINT: a fixed string */
}

/* When something has come, and not all. */
static void break_in_the_middle(struct kvp_client *client, const kvp_room_id *rooms)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);

	while (rig_state(client, rooms[0]).arrived == 0) {
		RIG_REQUIRE(rig_now_ns() < until);
		RIG_REQUIRE(kvp_process(client) >= 0, "%s", kvp_last_error(client));
	}
	link_set("down");
	RIG_REQUIRE(!rig_state(client, rooms[AT_ONCE - 1]).complete, "it was too late");
}

static void decode_round(struct kvp_client *client, const struct rig_pool *pool, uint32_t round)
{
	struct kvp_expect_sender sender = { NULL, 0, 1, KVP_ROLE_DATA };
	uint8_t *image;
	uint32_t pages[N_PAGES];
	kvp_room_id rooms[AT_ONCE];
	char address[32];

	(void)snprintf(address, sizeof(address), ADDRESS, 1);
	sender.address = address;
	rig_pool_reset((struct rig_pool *)(uintptr_t)pool);
	image = rig_pool_image(pool);
	for (uint32_t k = 0; k < AT_ONCE; k++) {
		struct rig_key key = { room_number(round, k), 0 };
		struct kvp_side_desc side = side_of(pages, k);
		struct kvp_expect expect = KVP_EXPECT_INIT;

		expect.room = room_number(round, k);
		expect.pool = pool->id;
		expect.sides = &side;
		expect.n_sides = 1;
		expect.senders = &sender;
		expect.n_senders = 1;
		expect.end = TOKENS;
		RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &rooms[k]));
		rig_put_rows(image, pool, &side, 0, TOKENS, &key);
	}
	if (round == DOWN_IN)
		break_in_the_middle(client, rooms);
	for (uint32_t k = 0; k < AT_ONCE; k++) {
		struct kvp_room_state state = rig_await(client, rooms[k], KVP_WAIT_TERMINAL, SECS);

		RIG_REQUIRE(state.complete, "round %u, room %u: %s", round, k, state.reason);
	}
	rig_pool_check(pool, image, "decode");
	free(image);
	for (uint32_t k = 0; k < AT_ONCE; k++) {
		(void)rig_await(client, rooms[k], KVP_WAIT_RELEASED, SECS);
		kvp_room_forget(client, rooms[k]);
	}
	if (round == UP_AFTER)
		link_set("up");
}

/* ---- both */

struct rail {
	double lost, sent; /* of the second rail */
	double resent;     /* of both */
};

static double number_of(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	RIG_REQUIRE(cJSON_IsNumber(item), "no %s", name);
	return item->valuedouble;
}

/* What the daemon shows. */
static struct rail rails_of(struct kvp_client *client)
{
	struct rail rail = { 0 };
	const cJSON *list, *one;
	cJSON *root;
	char *text;

	RIG_CALL(client, kvp_inspect(client, "peers", NULL, &text));
	root = cJSON_Parse(text);
	list = cJSON_GetObjectItemCaseSensitive(root, "rails");
	RIG_REQUIRE(cJSON_GetArraySize(list) == 2, "%s", text);
	cJSON_ArrayForEach (one, list) {
		rail.lost = number_of(one, "qps_lost");
		rail.sent = number_of(one, "bytes_sent");
		rail.resent += number_of(one, "resent");
	}
	cJSON_Delete(root);
	free(text);
	return rail;
}

static void say(const char *name)
{
	char path[64];
	int fd;

	(void)snprintf(path, sizeof(path), SHARE "%s.%d", name, decode());
	fd = open(path, O_WRONLY | O_CREAT, 0600);
	RIG_REQUIRE(fd >= 0);
	(void)close(fd);
}

static bool other_said(const char *name)
{
	char path[64];

	(void)snprintf(path, sizeof(path), SHARE "%s.%d", name, !decode());
	return access(path, F_OK) == 0;
}

static void wait_for_other(const char *name, const char *or_else)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);

	while (!other_said(name) && !(or_else && other_said(or_else))) {
		RIG_REQUIRE(rig_now_ns() < until, "the other node does not say %s", name);
		rig_sleep_ms(20);
	}
}

static const char *round_name(uint32_t round, char *buf, size_t bytes)
{
	(void)snprintf(buf, bytes, "rooms-round-%u", round); /* fits */
	return buf;
}

/* More rooms until the link is used again. */
static void prefill_all(struct kvp_client *client, const struct rig_pool *pool)
{
	struct rail rail;
	uint32_t round = 0;
	double before;
	char name[32];

	while (round < ROUNDS)
		prefill_round(client, pool, round++);
	rail = rails_of(client);
	RIG_REQUIRE(rail.lost > 0, "the link was not lost");
	before = rail.sent;
	for (; rail.sent == before; round++, rail = rails_of(client)) {
		RIG_REQUIRE(round < 100, "the link is not used again");
		say(round_name(round, name, sizeof(name)));
		prefill_round(client, pool, round);
	}
	say("rooms-used");
	printf("  %u rooms of %u bytes, none failed; %.0f queue pairs lost, %.0f messages sent "
	       "again, the link was used again\n",
	       round * AT_ONCE, TOKENS * LAYERS * ROW, rail.lost, rail.resent);
}

static void decode_all(struct kvp_client *client, const struct rig_pool *pool)
{
	uint32_t round = 0;
	char name[32];

	while (round < ROUNDS)
		decode_round(client, pool, round++);
	for (;; round++) {
		wait_for_other(round_name(round, name, sizeof(name)), "rooms-used");
		if (!other_said(name))
			break;
		decode_round(client, pool, round);
	}
}

static void no_room_fails(void)
{
	struct rig_pool pool = { 0 };
	struct rig_daemon *daemon;
	struct kvp_client *client;
	struct rig rig;

	rig_begin(&rig);
	(void)snprintf(rig.daemons[0].address, sizeof(rig.daemons[0].address), ADDRESS,
		       1 + decode());
	daemon = rig_daemon_start(&rig, decode() ? "decode" : "prefill", config);
	served = daemon;
	rig_dying = show_log;
	client = rig_client(daemon, decode() ? "decode" : "prefill");
	make_pool(&pool, client, decode() ? "decode" : "prefill");
	say("rooms-ready");
	wait_for_other("rooms-ready", NULL);
	if (decode())
		decode_all(client, &pool);
	else
		prefill_all(client, &pool);
	say("rooms-done");
	wait_for_other("rooms-done", NULL);
	kvp_client_close(client);
	rig_end(&rig);
	rig_remove(&rig);
}

const struct kvp_check kvp_checks_rooms[] = {
	{ "rooms: a link goes in the middle of a transfer, none fails", no_room_fails, 150 },
	{ NULL, NULL, 0 },
};
