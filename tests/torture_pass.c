/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/torture_pass.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tests/support_device.h"

#define TOKENS 256u
#define HALF 128u
#define PAGE 16u
#define ROW 512u
#define SEGMENT 2048u
#define CALL_MS 4000 /* of blocking calls, and until a room has ended */

/* Goes on, or leaves the function: a round with a fault may be refused anything, in time. */
#define TRY(pass, client, call)                                                 \
	do {                                                                    \
		int r_ = (call);                                                \
		RIG_REQUIRE(r_ == 0 || (pass)->faulty, "%s: %s", #call,         \
			    (client) ? kvp_last_error(client) : strerror(-r_)); \
		RIG_REQUIRE(r_ != -ETIMEDOUT, "%s: no answer", #call);          \
		if (r_ < 0)                                                     \
			return;                                                 \
	} while (0)

static void end_make(struct pass_end *end, const struct rig_daemon *daemon, uint64_t salt,
		     enum device_kind kind)
{
	end->daemon = daemon;
	(void)rig_pool_entry(&end->pool, 0, ROW, PAGE, 16);
	(void)rig_pool_entry(&end->pool, 1, ROW, PAGE, 16);
	(void)rig_pool_blob(&end->pool, 2, SEGMENT);
	device_pool_allocate(&end->pool, "torture", salt, kind);
	rig_pages(end->pages, TOKENS / PAGE, 0, 16, salt);
}

void pass_make(struct pass *pass, const struct rig_daemon *a, const struct rig_daemon *b, bool gpu)
{
	memset(pass, 0, sizeof(*pass));
	pass->next_room = 1;
	end_make(&pass->from, a, 1, gpu ? DEVICE_CHUNKS : DEVICE_NONE);
	end_make(&pass->near, a, 2, DEVICE_NONE);
	end_make(&pass->to, b, 3, gpu ? DEVICE_IPC : DEVICE_NONE);
}

static struct kvp_side_desc side_of(const struct pass_end *end)
{
	return (struct kvp_side_desc){
		.page = PAGE,
		.dcp_size = 1,
		.interleave = 1,
		.pages = end->pages,
		.n_pages = TOKENS / PAGE,
	};
}

/* ---- sessions and pools --------------------------------------------------------------------- */

static int end_connect(struct pass_end *end, bool reconnects)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;

	options.socket = end->daemon->socket;
	options.name = "torture";
	options.timeout_ms = CALL_MS;
	options.no_reconnect = !reconnects;
	return kvp_client_open(&end->client, &options);
}

static int end_register(struct pass_end *end)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	const struct kvp_mem mem = {
		.kind = end->pool.device ? KVP_MEM_DEVICE : KVP_MEM_FD,
		.fd = end->pool.fd,
		.addr = end->pool.device,
		.bytes = end->pool.device ? end->pool.bytes : 0,
	};

	desc.entries = end->pool.entries;
	desc.n_entries = end->pool.n_entries;
	desc.mems = &mem;
	desc.n_mems = 1;
	desc.layout_tag = "torture";
	desc.tag_bytes = 7;
	return kvp_pool_register(end->client, &desc, &end->pool.id);
}

static void ends_begin(struct pass *pass, bool reconnect)
{
	struct pass_end *ends[] = { &pass->from, &pass->near, &pass->to };

	for (size_t i = 0; i < KVP_ARRAY_SIZE(ends); i++) {
		TRY(pass, ends[i]->client, end_connect(ends[i], reconnect));
		TRY(pass, ends[i]->client, end_register(ends[i]));
	}
	TRY(pass, pass->from.client, kvp_fence_create(pass->from.client, 4, &pass->from.fence));
}

static bool ends_are_ready(const struct pass *pass)
{
	return pass->from.pool.id && pass->near.pool.id && pass->to.pool.id && pass->from.fence;
}

static void end_close(struct pass_end *end)
{
	kvp_fence_destroy(end->fence);
	end->fence = NULL;
	kvp_client_close(end->client);
	end->client = NULL;
	end->pool.id = 0;
}

static void ends_close(struct pass *pass)
{
	end_close(&pass->from);
	end_close(&pass->near);
	end_close(&pass->to);
}

/* ---- rooms ---------------------------------------------------------------------------------- */

static int expect(struct pass *pass, struct pass_end *to, kvp_room_id *id)
{
	struct kvp_expect msg = KVP_EXPECT_INIT;
	struct kvp_expect_sender sender = { .address = pass->from.daemon->address, .n_dests = 1 };
	struct kvp_segment segment = { .id = 9, .entry = 2, .bytes = SEGMENT };
	struct kvp_side_desc side = side_of(to);

	msg.room = pass->next_room;
	msg.pool = to->pool.id;
	msg.sides = &side;
	msg.n_sides = 1;
	msg.senders = &sender;
	msg.n_senders = 1;
	msg.segments = &segment;
	msg.n_segments = 1;
	msg.meta_from = 0;
	msg.end = TOKENS;
	return kvp_expect(to->client, &msg, NULL, NULL, id);
}

static int open_(struct pass *pass, kvp_room_id *id)
{
	struct kvp_open msg = KVP_OPEN_INIT;
	struct kvp_side_desc side = side_of(&pass->from);

	side.pages = NULL;
	side.n_pages = 0;
	msg.room = pass->next_room;
	msg.pool = pass->from.pool.id;
	msg.sides = &side;
	msg.n_sides = 1;
	return kvp_open(pass->from.client, &msg, NULL, NULL, id);
}

static int submit(struct pass *pass, kvp_room_id id, bool second)
{
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_segment segment = { .id = 9, .entry = 2, .bytes = SEGMENT };
	struct kvp_side_desc side = side_of(&pass->from);

	chunk.start = second ? HALF : 0;
	chunk.tokens = HALF;
	chunk.sides = &side;
	chunk.n_sides = 1;
	if (second) {
		chunk.last = 1;
		chunk.segments = &segment;
		chunk.n_segments = 1;
		chunk.meta = "meta";
		chunk.meta_bytes = 4;
	} else {
		chunk.fence = pass->from.fence;
		chunk.fence_value = pass->next_room;
	}
	return kvp_submit(pass->from.client, id, &chunk, NULL, NULL, NULL);
}

/* Whatever has failed, an end ends: with success, or with a status and a reason. */
static struct kvp_room_state end_of(struct pass *pass, struct kvp_client *client, kvp_room_id id)
{
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;
	int r = kvp_room_wait(client, id, KVP_WAIT_TERMINAL, CALL_MS);

	RIG_REQUIRE(r == 0 || (pass->faulty && r != -ETIMEDOUT), "room %llu does not end: %s",
		    (unsigned long long)pass->next_room, strerror(-r));
	if (r < 0)
		return state;
	RIG_REQUIRE(kvp_room_state(client, id, &state) == 0);
	RIG_REQUIRE(!(state.complete && state.failed));
	RIG_REQUIRE(pass->faulty || state.complete, "%s: %s", kvp_status_name(state.status),
		    state.reason);
	RIG_REQUIRE(!state.failed || (state.status && state.reason[0]), "fails without a word");
	return state;
}

static void released(struct pass *pass, struct kvp_client *client, kvp_room_id id)
{
	int r = kvp_room_wait(client, id, KVP_WAIT_RELEASED, CALL_MS);

	RIG_REQUIRE(r == 0 || (pass->faulty && r != -ETIMEDOUT), "room %llu is not released: %s",
		    (unsigned long long)pass->next_room, strerror(-r));
	kvp_room_forget(client, id);
}

/* Exactly the room's bytes, if it says that it is complete. */
static void check_bytes(const struct pass *pass, const struct pass_end *to,
			const struct kvp_room_state *state)
{
	struct rig_key key = { pass->next_room, 1 };
	struct kvp_side_desc side = side_of(to);
	uint8_t *image;

	if (!state->complete)
		return;
	RIG_REQUIRE(state->meta_bytes == 4 && memcmp(state->meta, "meta", 4) == 0);
	device_pool_pull(&to->pool);
	image = rig_pool_image(&to->pool);
	rig_put_rows(image, &to->pool, &side, 0, TOKENS, &key);
	rig_put_segment(image + to->pool.entries[2].offset, SEGMENT, &key, 9);
	rig_pool_check(&to->pool, image, "of a complete room");
	free(image);
}

static void fill(struct pass *pass, struct pass_end *to)
{
	struct rig_key key = { pass->next_room, 1 };
	struct kvp_side_desc side = side_of(&pass->from);
	struct rig_pool *pool = &pass->from.pool;

	rig_pool_reset(&to->pool);
	rig_put_rows(pool->mem, pool, &side, 0, TOKENS, &key);
	rig_put_segment(pool->mem + pool->entries[2].offset, SEGMENT, &key, 9);
	device_pool_push(&to->pool);
	device_pool_push(pool);
}

/* The sender's steps, up to the first that is refused. */
static void send_all(struct pass *pass, kvp_room_id *id, bool *all)
{
	struct kvp_client *client = pass->from.client;

	TRY(pass, client, open_(pass, id));
	TRY(pass, client, submit(pass, *id, false));
	kvp_fence_signal(pass->from.fence, 0, pass->next_room);
	TRY(pass, client, submit(pass, *id, true));
	*all = true;
}

static void transfer(struct pass *pass, struct pass_end *to)
{
	struct kvp_client *from = pass->from.client;
	kvp_room_id sent = 0, expected = 0;
	struct kvp_room_state state;
	bool all = false;

	pass->next_room++;
	fill(pass, to);
	TRY(pass, to->client, expect(pass, to, &expected));
	send_all(pass, &sent, &all);
	if (!all) /* an engine whose prefill fails says so */
		(void)kvp_abort(to->client, expected, "nothing comes"); /* may be over */
	state = end_of(pass, to->client, expected);
	check_bytes(pass, to, &state);
	released(pass, to->client, expected);
	if (!sent)
		return;
	if (!state.complete)
		(void)kvp_abort(from, sent, "the other end is over"); /* may be over too */
	(void)end_of(pass, from, sent);
	released(pass, from, sent);
}

/* Expected, and given up before anybody has come. */
static void give_up(struct pass *pass)
{
	struct kvp_client *client = pass->to.client;
	kvp_room_id id = 0;

	pass->next_room++;
	TRY(pass, client, expect(pass, &pass->to, &id));
	TRY(pass, client, kvp_abort(client, id, "given up"));
	released(pass, client, id);
}

/* Opened ahead of decode, prolonged and declined by it, chunks withdrawn. */
static void withdraw(struct pass *pass)
{
	struct kvp_client *client = pass->from.client, *other = pass->to.client;
	const char *address = pass->from.daemon->address;
	kvp_room_id id = 0;
	uint32_t from;

	pass->next_room++;
	TRY(pass, client, open_(pass, &id));
	TRY(pass, client, submit(pass, id, false));
	TRY(pass, client, kvp_recall(client, id, 0, &from));
	TRY(pass, other, kvp_renew(other, address, pass->next_room, NULL, 0, 2000, NULL, NULL));
	TRY(pass, other,
	    kvp_decline(other, address, pass->next_room, NULL, 0, "not wanted", NULL, NULL));
	/* A decline that is lost leaves the open to its timer. */
	if (pass->faulty)
		(void)kvp_abort(client, id, "the round ends");
	RIG_REQUIRE(kvp_room_wait(client, id, KVP_WAIT_TERMINAL, CALL_MS) != -ETIMEDOUT);
	released(pass, client, id);
}

/* ---- the rest ------------------------------------------------------------------------------- */

static void look(struct pass *pass)
{
	static const char *const whats[] = { "status",   "clients", "pools", "rooms", "waiting",
					     "failures", "pins",    "peers", "lanes", "version" };
	struct kvp_client *client = pass->from.client;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(whats); i++) {
		char *json = NULL;

		TRY(pass, client, kvp_inspect(client, whats[i], NULL, &json));
		RIG_REQUIRE(json && json[0] == '{', "%s: %s", whats[i], json ? json : "nothing");
		free(json);
	}
}

static void pause_resume(struct pass *pass)
{
	struct pass_end *end = &pass->near;

	TRY(pass, end->client, kvp_pool_pause(end->client, end->pool.id, NULL, NULL));
	TRY(pass, end->client, kvp_pool_resume(end->client, end->pool.id, &end->pool.fd, 1));
	TRY(pass, end->client, kvp_pool_unregister(end->client, end->pool.id, NULL, NULL));
}

/* Refused while it is on, taken afterwards; pass_settle() ends it where that has failed. */
static void drain(struct pass *pass)
{
	struct kvp_client *client = pass->from.client;
	kvp_room_id id = 0;
	int r;

	TRY(pass, client, kvp_drain(client, 1, "torture"));
	pass->next_room++;
	r = open_(pass, &id);
	RIG_REQUIRE(r < 0 && r != -ETIMEDOUT, "a drained daemon takes a leg: %d", r);
	TRY(pass, client, kvp_drain(client, 0, NULL));
	pass->next_room++;
	TRY(pass, client, open_(pass, &id));
	TRY(pass, client, kvp_abort(client, id, "the round ends"));
	released(pass, client, id);
}

void pass_run(struct pass *pass, bool faulty)
{
	pass->faulty = faulty;
	ends_begin(pass, false);
	if (ends_are_ready(pass)) {
		transfer(pass, &pass->to);
		transfer(pass, &pass->near);
		give_up(pass);
		withdraw(pass);
		look(pass);
		drain(pass);
		pause_resume(pass);
	}
	ends_close(pass);
}

/* ---- a restart ------------------------------------------------------------------------------ */

/* The daemon is another one now; the library finds it while it waits. */
static void restart_meet(struct pass *pass, kvp_room_id sent, kvp_room_id *expected)
{
	struct kvp_client *from = pass->from.client;

	TRY(pass, pass->to.client, expect(pass, &pass->to, expected));
	TRY(pass, from, kvp_room_wait(from, sent, KVP_WAIT_READY, CALL_MS));
	TRY(pass, from, submit(pass, sent, false));
	kvp_fence_signal(pass->from.fence, 0, pass->next_room);
	TRY(pass, from, submit(pass, sent, true));
}

static void restart_end(struct pass *pass, kvp_room_id sent, kvp_room_id expected)
{
	struct kvp_client *from = pass->from.client, *to = pass->to.client;
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;

	if (expected) {
		/* Where the sender was refused something, nothing more comes. */
		if (pass->faulty &&
		    kvp_room_wait(to, expected, KVP_WAIT_TERMINAL, CALL_MS / 2) != 0)
			(void)kvp_abort(to, expected, "nothing comes"); /* may be over */
		state = end_of(pass, to, expected);
		check_bytes(pass, &pass->to, &state);
		released(pass, to, expected);
	}
	if (!state.complete)
		(void)kvp_abort(from, sent, "the other end is over"); /* may be over too */
	(void)end_of(pass, from, sent);
	released(pass, from, sent);
}

static void restart_room(struct pass *pass)
{
	struct kvp_client *from = pass->from.client;
	kvp_room_id sent = 0, expected = 0;
	char byte = 0;

	pass->next_room++;
	fill(pass, &pass->to);
	TRY(pass, from, open_(pass, &sent));
	RIG_REQUIRE(write(pass->ready_fd, &byte, 1) == 1 && read(pass->go_fd, &byte, 1) == 1);
	restart_meet(pass, sent, &expected);
	restart_end(pass, sent, expected);
}

void pass_restart(struct pass *pass, bool faulty)
{
	pass->faulty = faulty;
	ends_begin(pass, true);
	if (ends_are_ready(pass))
		restart_room(pass);
	ends_close(pass);
}

/* ---- what is left --------------------------------------------------------------------------- */

static double number(const cJSON *json, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);

	RIG_REQUIRE(cJSON_IsNumber(item), "%s", name);
	return item->valuedouble;
}

static bool is_settled(struct kvp_client *client, char **text)
{
	const cJSON *rooms;
	cJSON *json;
	bool ok;

	free(*text);
	*text = NULL;
	RIG_REQUIRE(kvp_inspect(client, "status", NULL, text) == 0, "%s", kvp_last_error(client));
	json = cJSON_Parse(*text);
	rooms = cJSON_GetObjectItemCaseSensitive(json, "rooms");
	ok = number(json, "clients") == 1 && number(json, "pools") == 0 &&
	     number(json, "fences") == 0 && number(rooms, "dest") == 0 &&
	     number(rooms, "send") == 0;
	cJSON_Delete(json);
	return ok;
}

void pass_settle(const struct rig_daemon *daemon)
{
	struct kvp_client *client = rig_client(daemon, "settle");
	uint64_t until = rig_now_ns() + 8u * UINT64_C(1000000000);
	char *text = NULL;

	RIG_REQUIRE(kvp_drain(client, 0, NULL) == 0, "%s", kvp_last_error(client));
	while (!is_settled(client, &text)) {
		RIG_REQUIRE(rig_now_ns() < until, "%s: something is left: %s", daemon->name, text);
		rig_sleep_ms(2);
	}
	free(text);
	kvp_client_close(client);
}
