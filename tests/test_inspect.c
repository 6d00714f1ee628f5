/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "client/kvpack.h"
#include "proto/msg.h"
#include "tests/support.h"

/*
 * Rooms as displays show them, through one daemon and one client that plays both engines. Where a
 * state has to stay, a test point holds it.
 */

TestSuite(inspect, .timeout = 60);

#define PAGES 16u
#define ROW 256u
#define TOKENS (4u * 64u)
#define ENTRY_BYTES ((uint64_t)PAGES * 64u * ROW)

static struct support_daemon daemon_;

struct engine {
	struct kvp_client *client;
	uint32_t src, dst; /* pools */
	int src_fd, dst_fd;
	uint8_t *src_mem, *dst_mem;
	kvp_room_id expect, open;
};

#define CALL(engine, call) cr_assert_eq((call), 0, "%s", kvp_last_error((engine)->client))

static void make_pool(struct engine *engine, const char *label, int *fd, uint8_t **mem,
		      uint32_t *pool)
{
	struct kvp_entry_desc entry = {
		.bytes = ENTRY_BYTES,
		.page_stride = 64u * ROW,
		.row_stride = ROW,
		.row_bytes = ROW,
		.full_bytes = ROW,
		.rows_per_page = 64,
		.n_pages = PAGES,
	};
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	void *addr;

	cr_assert_eq(kvp_memory_create(label, ENTRY_BYTES, fd, &addr), 0);
	*mem = addr;
	desc.entries = &entry;
	desc.n_entries = 1;
	desc.fds = fd;
	desc.n_fds = 1;
	desc.label = label;
	CALL(engine, kvp_pool_register(engine->client, &desc, pool));
}

static void engine_begin(struct engine *engine)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;

	memset(engine, 0, sizeof(*engine));
	options.socket = daemon_.socket;
	options.name = "engine";
	cr_assert_eq(kvp_client_open(&engine->client, &options), 0);
	make_pool(engine, "from", &engine->src_fd, &engine->src_mem, &engine->src);
	make_pool(engine, "to", &engine->dst_fd, &engine->dst_mem, &engine->dst);
	for (uint64_t i = 0; i < ENTRY_BYTES; i++)
		engine->src_mem[i] = (uint8_t)(i * 2654435761u >> 13);
}

static void engine_end(struct engine *engine)
{
	kvp_client_close(engine->client);
	munmap(engine->src_mem, ENTRY_BYTES);
	munmap(engine->dst_mem, ENTRY_BYTES);
	close(engine->src_fd);
	close(engine->dst_fd);
}

static const uint32_t src_pages[] = { 3, 1, 2, 0 }, dst_pages[] = { 9, 8, 12, 10 };

static struct kvp_side_desc side(const uint32_t *pages)
{
	return (struct kvp_side_desc){
		.page = 64, .dcp_size = 1, .interleave = 1, .n_pages = pages ? 4 : 0, .pages = pages
	};
}

static void expect_from(struct engine *engine, uint64_t room, const char *address)
{
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_side_desc sides = side(dst_pages);
	struct kvp_expect_sender sender = { address, 0, 1, KVP_ROLE_DATA };

	expect.room = room;
	expect.pool = engine->dst;
	expect.sides = &sides;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	expect.label = "request 7";
	CALL(engine, kvp_expect(engine->client, &expect, NULL, NULL, &engine->expect));
}

static void expect(struct engine *engine, uint64_t room)
{
	expect_from(engine, room, kvp_node_address(engine->client));
}

static void open_room(struct engine *engine, uint64_t room)
{
	struct kvp_open open = KVP_OPEN_INIT;
	struct kvp_side_desc sides = side(NULL);

	open.room = room;
	open.pool = engine->src;
	open.sides = &sides;
	open.n_sides = 1;
	open.label = "request 7";
	CALL(engine, kvp_open(engine->client, &open, NULL, NULL, &engine->open));
}

static void submit(struct engine *engine)
{
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_side_desc sides = side(src_pages);

	chunk.tokens = TOKENS;
	chunk.sides = &sides;
	chunk.n_sides = 1;
	chunk.last = 1;
	CALL(engine, kvp_submit(engine->client, engine->open, &chunk, NULL, NULL, NULL));
}

static struct kvp_room_state wait_room(struct engine *engine, kvp_room_id id,
				       enum kvp_wait_for what)
{
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;

	CALL(engine, kvp_room_wait(engine->client, id, what, 10000));
	CALL(engine, kvp_room_state(engine->client, id, &state));
	return state;
}

static cJSON *ask(struct engine *engine, const char *what, const char *arg)
{
	char *text = NULL;
	cJSON *json;

	CALL(engine, kvp_inspect(engine->client, what, arg, &text));
	json = cJSON_Parse(text);
	cr_assert(json, "%s", text);
	free(text);
	return json;
}

static const cJSON *get(const cJSON *json, const char *list, int i)
{
	const cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, list), i);

	cr_assert(item, "%s has no item %d", list, i);
	return item;
}

static const char *text(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	cr_assert(cJSON_IsString(item), "no text %s", name);
	return item->valuestring;
}

static double number(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	cr_assert(cJSON_IsNumber(item), "no number %s", name);
	return item->valuedouble;
}

static void setup(void)
{
	support_daemon_start(&daemon_, NULL);
}

static void teardown(void)
{
	support_daemon_end(&daemon_);
}

Test(inspect, a_waiting_room_says_what_it_waits_for, .init = setup, .fini = teardown)
{
	struct engine engine;
	cJSON *json;

	engine_begin(&engine);
	open_room(&engine, 0x17);
	json = ask(&engine, "room", "0x17");
	cr_assert_str_eq(text(get(json, "rooms", 0), "role"), "send");
	cr_assert_str_eq(text(get(json, "rooms", 0), "state"), "waiting");
	cr_assert_str_eq(text(get(json, "rooms", 0), "client"), "engine");
	cr_assert_neq(text(get(json, "rooms", 0), "waits_for")[0], 0);
	cJSON_Delete(json);
	json = ask(&engine, "waiting", NULL);
	cr_assert_eq(number(get(json, "waiting", 0), "count"), 1);
	cr_assert(strstr(text(get(json, "waiting", 0), "example"), "0x17"));
	cJSON_Delete(json);
	json = ask(&engine, "status", NULL);
	cr_assert_eq(number(cJSON_GetObjectItem(json, "rooms"), "send"), 1);
	cr_assert_eq(number(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "rooms"), "by_state"),
			    "waiting"),
		     1);
	cr_assert_neq(text(json, "ucx")[0], 0);
	cr_assert_eq(text(json, "ucx_doubt")[0], 0); /* without peers it is not used */
	cJSON_Delete(json);

	CALL(&engine, kvp_abort(engine.client, engine.open, "enough"));
	cr_assert_eq(wait_room(&engine, engine.open, KVP_WAIT_RELEASED).failed, 1);
	json = ask(&engine, "failures", "60");
	cr_assert_str_eq(text(get(json, "failures", 0), "status"), "aborted");
	cr_assert(strstr(text(get(json, "failures", 0), "reason"), "enough"));
	cJSON_Delete(json);
	json = ask(&engine, "room", "label:request 7");
	cr_assert(cJSON_IsTrue(cJSON_GetObjectItem(get(json, "rooms", 0), "ended")));
	cJSON_Delete(json);
	engine_end(&engine);
}

Test(inspect, a_finished_room_has_its_stages, .init = setup, .fini = teardown)
{
	struct engine engine;
	cJSON *json;

	engine_begin(&engine);
	expect(&engine, 5);
	open_room(&engine, 5);
	submit(&engine);
	json = ask(&engine, "pins", NULL);
	cJSON_Delete(json);
	cr_assert_eq(wait_room(&engine, engine.expect, KVP_WAIT_RELEASED).complete, 1);
	cr_assert_eq(wait_room(&engine, engine.open, KVP_WAIT_RELEASED).complete, 1);
	for (uint32_t i = 0; i < 4; i++)
		cr_assert_eq(memcmp(engine.dst_mem + dst_pages[i] * 64u * ROW,
				    engine.src_mem + src_pages[i] * 64u * ROW, 64u * ROW),
			     0, "page %u", i);
	json = ask(&engine, "room", "5");
	cr_assert_eq(cJSON_GetArraySize(cJSON_GetObjectItem(json, "rooms")), 2);
	for (int i = 0; i < 2; i++) {
		const cJSON *room = get(json, "rooms", i);

		cr_assert_str_eq(text(room, "room"), "0x5");
		cr_assert_str_eq(text(room, "mode"), "local");
		cr_assert_str_eq(text(room, "waits_for"), "");
		cr_assert_eq(number(room, "tokens"), TOKENS);
		cr_assert_gt(cJSON_GetArraySize(cJSON_GetObjectItem(room, "stages")), 2);
	}
	cJSON_Delete(json);
	json = ask(&engine, "pins", NULL);
	cr_assert_eq(cJSON_GetArraySize(cJSON_GetObjectItem(json, "pins")), 0);
	cJSON_Delete(json);
	engine_end(&engine);
}

/* On the node where nobody opens it, too: that is where the operator has to look. */
Test(inspect, an_offer_that_nobody_opens_is_shown_where_it_waits)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct support_daemon prefill;
	struct engine engine, there = { 0 };
	uint64_t until = support_now_ms() + 10000;
	cJSON *json = NULL;
	int n = 0;

	support_daemon_start(&daemon_, "[peer]\nlisten = 127.0.0.1:0\n");
	support_daemon_start(&prefill, "[peer]\nlisten = 127.0.0.1:0\n");
	options.socket = prefill.socket;
	cr_assert_eq(kvp_client_open(&there.client, &options), 0);
	engine_begin(&engine);
	expect_from(&engine, 0x19, kvp_node_address(there.client));
	while (n == 0) {
		cr_assert_lt(support_now_ms(), until, "no offer comes");
		cJSON_Delete(json);
		json = ask(&there, "waiting", NULL);
		n = cJSON_GetArraySize(cJSON_GetObjectItem(json, "waiting"));
	}
	cr_assert_eq(number(get(json, "waiting", 0), "count"), 1);
	cr_assert(strstr(text(get(json, "waiting", 0), "cause"), "no engine here has opened"));
	cr_assert_str_eq(text(get(json, "waiting", 0), "example"), "0x19 send 0");
	cJSON_Delete(json);
	json = ask(&there, "room", "0x19");
	cr_assert_eq(cJSON_GetArraySize(cJSON_GetObjectItem(json, "rooms")), 0);
	cr_assert_eq(number(get(json, "offers", 0), "sender"), 0);
	cr_assert_neq(text(get(json, "offers", 0), "peer")[0], 0);
	cJSON_Delete(json);
	engine_end(&engine);
	kvp_client_close(there.client);
	cr_assert_eq(support_daemon_stop(&daemon_), 0);
	cr_assert_eq(support_daemon_stop(&prefill), 0);
	support_daemon_clean(&daemon_);
	support_daemon_clean(&prefill);
}

/* ---- many rooms */

#define MANY 400u

static void open_many(struct engine *engine)
{
	for (uint64_t i = 1; i <= MANY; i++)
		open_room(engine, i);
}

static void ask_for_rooms(int fd, uint64_t id)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;

	body.what = (char *)"rooms";
	msg.id = id;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	support_send_msg(fd, &msg, NULL, 0);
}

static void check_rooms(int fd)
{
	bool seen[MANY + 1] = { false };
	struct stat st;
	const cJSON *room;
	unsigned n = 0;
	cJSON *json;
	char *all;

	cr_assert_eq(fstat(fd, &st), 0);
	all = calloc(1, (size_t)st.st_size + 1);
	cr_assert(all && pread(fd, all, (size_t)st.st_size, 0) == st.st_size);
	json = cJSON_Parse(all);
	cr_assert(json, "%s", all);
	cJSON_ArrayForEach (room, cJSON_GetObjectItemCaseSensitive(json, "rooms")) {
		uint64_t number_of = strtoull(text(room, "room"), NULL, 16);

		cr_assert(number_of >= 1 && number_of <= MANY && !seen[number_of]);
		seen[number_of] = true;
		n++;
	}
	cr_assert_eq(n, MANY);
	cJSON_Delete(json);
	free(all);
}

/* Lists are made one after the other, a little a turn; a session that goes before its own was made,
 * or while it is, disturbs no other, and what a session asks behind it is answered behind it. */
Test(inspect, many_list_many_rooms_at_once, .init = setup, .fini = teardown)
{
	struct engine engine;
	struct support_reply reply;
	int fds[6];

	engine_begin(&engine);
	open_many(&engine);
	for (int i = 0; i < 6; i++) {
		fds[i] = support_hello(&daemon_, "looks");
		ask_for_rooms(fds[i], 100);
		ask_for_rooms(fds[i], 101);
	}
	close(fds[0]);
	close(fds[3]);
	for (int i = 0; i < 6; i++) {
		if (i == 0 || i == 3)
			continue;
		for (uint64_t id = 100; id <= 101; id++) {
			cr_assert(support_recv(fds[i], &reply, 20000));
			cr_assert_eq(reply.id, id);
			cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
			check_rooms(reply.fd);
			close(reply.fd);
		}
		close(fds[i]);
	}
	engine_end(&engine);
}

/* Who only looks writes no line into the log; an engine that goes does. */
Test(inspect, looking_is_no_news, .init = setup, .fini = teardown)
{
	struct engine engine;
	int fd = support_hello(&daemon_, "who looks");

	cJSON_Delete(support_inspect(fd, "rooms", NULL));
	close(fd);
	engine_begin(&engine);
	engine_end(&engine);
	while (!support_log_has(&daemon_, "engine (pid"))
		support_sleep_ms(5);
	cr_assert(!support_log_has(&daemon_, "who looks"));
}

#ifdef KVP_TEST
/* The daemon is stopped for good while lists are asked for: they are let go. */
Test(inspect, stop_lets_go_of_lists)
{
	struct engine engine;
	int fd;

	support_daemon_start(&daemon_, "[stop]\ndrain = 10m");
	engine_begin(&engine);
	open_many(&engine);
	fd = support_hello(&daemon_, "looks");
	kill(daemon_.pid, SIGSTOP);
	for (uint64_t id = 1; id < 20; id++)
		ask_for_rooms(fd, id);
	kill(daemon_.pid, SIGTERM);
	kill(daemon_.pid, SIGCONT);
	cr_assert_eq(support_daemon_stop(&daemon_), 0);
	close(fd);
	engine_end(&engine);
	support_daemon_clean(&daemon_);
}
#endif

/* ---- pools under rooms */

#ifdef KVP_TEST
static void hold(const char *point, bool on)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__TestHold body = KVP__TEST_HOLD__INIT;
	int fd = support_hello(&daemon_, "tester");

	body.point = (char *)point;
	body.on = on;
	msg.body_case = KVP__CLIENT_MSG__BODY_TEST_HOLD;
	msg.test_hold = &body;
	cr_assert_eq(support_call(fd, &msg, NULL, 0).status, KVP__STATUS__STATUS_OK);
	close(fd);
}

Test(inspect, pages_of_a_held_room_are_pinned, .init = setup, .fini = teardown)
{
	struct engine engine;
	cJSON *json;

	engine_begin(&engine);
	hold("gather", true);
	expect(&engine, 9);
	open_room(&engine, 9);
	submit(&engine);
	(void)wait_room(&engine, engine.open, KVP_WAIT_READY);
	json = ask(&engine, "pins", NULL);
	cr_assert_eq(number(get(json, "pins", 0), "pages"), 4);
	cr_assert_str_eq(text(get(json, "pins", 0), "label"), "request 7");
	cJSON_Delete(json);
	hold("gather", false);
	cr_assert_eq(wait_room(&engine, engine.expect, KVP_WAIT_RELEASED).complete, 1);
	engine_end(&engine);
}
#endif

/* Pause while rooms use the pool: they fail with the reason, the answer comes after the unmap. */
Test(inspect, pause_fails_the_rooms_of_a_pool, .init = setup, .fini = teardown)
{
	struct engine engine;
	struct kvp_room_state state;

	engine_begin(&engine);
	open_room(&engine, 3);
	CALL(&engine, kvp_pool_pause(engine.client, engine.src, NULL, NULL));
	state = wait_room(&engine, engine.open, KVP_WAIT_RELEASED);
	cr_assert_eq(state.status, KVP_STATUS_POOL_GONE);
	cr_assert(strstr(state.reason, "paused"), "%s", state.reason);
	CALL(&engine, kvp_pool_resume(engine.client, engine.src, &engine.src_fd, 1));
	expect(&engine, 4);
	open_room(&engine, 4);
	submit(&engine);
	cr_assert_eq(wait_room(&engine, engine.expect, KVP_WAIT_TERMINAL).complete, 1);
	CALL(&engine, kvp_pool_unregister(engine.client, engine.src, NULL, NULL));
	CALL(&engine, kvp_pool_unregister(engine.client, engine.dst, NULL, NULL));
	engine_end(&engine);
}

#ifdef KVP_TEST
/* The daemon stops with a room that moves and does not end in time: it fails with the reason, and
 * the client reads that before the connection ends. */
Test(inspect, stop_fails_rooms_with_the_reason)
{
	struct engine engine;
	struct kvp_room_state state;

	support_daemon_start(&daemon_, "[stop]\ndrain = 100ms");
	engine_begin(&engine);
	hold("gather", true);
	expect(&engine, 3);
	open_room(&engine, 3);
	submit(&engine);
	(void)wait_room(&engine, engine.open, KVP_WAIT_READY);
	kill(daemon_.pid, SIGTERM);
	state = wait_room(&engine, engine.open, KVP_WAIT_TERMINAL);
	cr_assert_eq(state.status, KVP_STATUS_STOPPING, "%s", state.reason);
	engine_end(&engine);
	cr_assert_eq(support_daemon_stop(&daemon_), 0);
	support_daemon_clean(&daemon_);
}

/* The second signal does not wait for rooms, nor for clients to read. */
Test(inspect, second_signal_stops_at_once)
{
	struct engine engine;
	uint64_t from;

	support_daemon_start(&daemon_, "[stop]\ndrain = 10m");
	engine_begin(&engine);
	hold("gather", true);
	expect(&engine, 3);
	open_room(&engine, 3);
	submit(&engine);
	(void)wait_room(&engine, engine.open, KVP_WAIT_READY);
	kill(daemon_.pid, SIGTERM);
	while (!support_log_has(&daemon_, "signal 15: stopping, 1 rooms"))
		support_sleep_ms(5);
	from = support_now_ms();
	cr_assert_eq(support_daemon_stop(&daemon_), 0);
	cr_assert_lt(support_now_ms() - from, 10000);
	engine_end(&engine);
	support_daemon_clean(&daemon_);
}

/* A thread of the daemon other than the loop; 0: none. */
static pid_t lane_thread(void)
{
	char path[64];
	pid_t tid = 0;
	struct dirent *entry;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)daemon_.pid);
	dir = opendir(path);
	cr_assert(dir);
	while ((entry = readdir(dir))) {
		int id = (int)strtol(entry->d_name, NULL, 10);

		if (id > 0 && id != daemon_.pid)
			tid = id;
	}
	closedir(dir);
	return tid;
}

/* Stops one thread as a hanging driver call would: the loop goes on, answers, and tells. */
Test(inspect, a_stuck_lane_fails_its_rooms)
{
	struct engine engine, other = { 0 };
	struct kvp_room_state state;
	pid_t tid;
	cJSON *json;

	support_daemon_start(&daemon_, "[lane]\nstuck_after = 300ms");
	engine_begin(&engine);
	tid = lane_thread();
	cr_assert_neq(tid, 0);
	if (ptrace(PTRACE_SEIZE, tid, NULL, NULL) < 0)
		cr_skip_test("may not trace a thread here");
	cr_assert_eq(ptrace(PTRACE_INTERRUPT, tid, NULL, NULL), 0);
	cr_assert_eq(waitpid(tid, NULL, __WALL), tid);
	open_room(&engine, 3);
	state = wait_room(&engine, engine.open, KVP_WAIT_TERMINAL);
	cr_assert_eq(state.status, KVP_STATUS_LANE_STUCK, "%s", state.reason);
	cr_assert(strstr(state.reason, "lane host"), "%s", state.reason);
	cr_assert_eq(state.released, 0);
	json = ask(&engine, "status", NULL);
	cr_assert_str_eq(text(get(json, "slow_paths", 0), "name"), "lanes_stuck");
	cr_assert(cJSON_IsTrue(cJSON_GetObjectItem(get(json, "lanes", 0), "stuck")));
	cJSON_Delete(json);
	other.client = engine.client;
	other.src = engine.src;
	open_room(&other, 5);
	state = wait_room(&other, other.open, KVP_WAIT_TERMINAL);
	cr_assert_eq(state.status, KVP_STATUS_LANE_STUCK, "%s", state.reason);

	cr_assert_eq(ptrace(PTRACE_DETACH, tid, NULL, NULL), 0);
	cr_assert_eq(wait_room(&engine, engine.open, KVP_WAIT_RELEASED).released, 1);
	json = ask(&engine, "lanes", NULL);
	cr_assert(cJSON_IsFalse(cJSON_GetObjectItem(get(json, "lanes", 0), "stuck")));
	cJSON_Delete(json);
	expect(&engine, 4);
	open_room(&engine, 4);
	submit(&engine);
	cr_assert_eq(wait_room(&engine, engine.expect, KVP_WAIT_TERMINAL).complete, 1);
	engine_end(&engine);
	support_daemon_end(&daemon_);
}
#endif
