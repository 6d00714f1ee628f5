/* SPDX-License-Identifier: Apache-2.0 */
/* The library against a scripted daemon on a real socket. */

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "client/kvpack.h"
#include "proto/util.h"
#include "tests/support_clock.h"
#include "tests/support_fake.h"

#define WAIT_MS support_slow_ms(10000) /* never reached when things work */

static struct fake *fake;
static struct kvp_client *client;

static void open_client(void)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;

	options.socket = fake->path;
	options.name = "tester";
	cr_assert_eq(kvp_client_open(&client, &options), 0, "%s", kvp_last_error(NULL));
}

static void setup(void)
{
	fake = fake_start(NULL, 1, true);
	open_client();
}

static void teardown(void)
{
	kvp_client_close(client);
	fake_free(fake);
}

TestSuite(client, .init = setup, .fini = teardown, .timeout = 60);

/* ---- helpers ------------------------------------------------------------------------------- */

struct result {
	unsigned n;
	enum kvp_status status;
	char text[256];
};

static void on_done(void *arg, enum kvp_status status, const char *text)
{
	struct result *result = arg;

	result->n++;
	result->status = status;
	(void)snprintf(result->text, sizeof(result->text), "%s", text);
}

static void until_done(const struct result *result)
{
	while (result->n == 0)
		cr_assert_geq(kvp_wait(client, WAIT_MS), 0);
}

static struct kvp_room_state state_of(kvp_room_id id)
{
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;

	cr_assert_eq(kvp_room_state(client, id, &state), 0);
	return state;
}

static uint32_t page_numbers[70000];

static kvp_room_id expect_pages(uint32_t n_pages, kvp_done_fn *done, void *arg)
{
	struct kvp_side_desc side = { .page = 64, .dcp_size = 1, .interleave = 1 };
	struct kvp_expect_sender sender = { "127.0.0.1:7470", 0, 1, KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	kvp_room_id id = 0;

	side.n_pages = n_pages;
	side.pages = page_numbers;
	expect.room = 17;
	expect.pool = 1;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.prefix = 64;
	expect.end = 1024;
	expect.label = "request";
	cr_assert_eq(kvp_expect(client, &expect, done, arg, &id), 0, "%s", kvp_last_error(client));
	return id;
}

static kvp_room_id open_room(void)
{
	struct kvp_side_desc side = { .page = 64, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	kvp_room_id id = 0;

	open.room = 17;
	open.pool = 1;
	open.sides = &side;
	open.n_sides = 1;
	cr_assert_eq(kvp_open(client, &open, NULL, NULL, &id), 0, "%s", kvp_last_error(client));
	return id;
}

static int submit(kvp_room_id id, kvp_done_fn *done, void *arg, uint32_t *seq)
{
	struct kvp_side_desc side = { .n_pages = 1, .pages = page_numbers };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	chunk.tokens = 64;
	chunk.sides = &side;
	chunk.n_sides = 1;
	return kvp_submit(client, id, &chunk, done, arg, seq);
}

static uint32_t register_pool(void)
{
	struct kvp_entry_desc entry = { .bytes = 65536,
					.page_stride = 4096,
					.row_stride = 64,
					.row_bytes = 64,
					.full_bytes = 64,
					.rows_per_page = 64,
					.n_pages = 16 };
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	void *addr = NULL;
	uint32_t pool = 0;
	int fd = -1;

	cr_assert_eq(kvp_memory_create("pool", 65536, &fd, &addr), 0);
	desc.entries = &entry;
	desc.n_entries = 1;
	desc.fds = &fd;
	desc.n_fds = 1;
	desc.label = "kv";
	cr_assert_eq(kvp_pool_register(client, &desc, &pool), 0, "%s", kvp_last_error(client));
	(void)close(fd);
	(void)munmap(addr, 65536);
	return pool;
}

static void event(kvp_room_id id, Kvp__RoomState state, uint64_t arrived)
{
	Kvp__RoomEvent ev = KVP__ROOM_EVENT__INIT;

	ev.handle = id;
	ev.state = state;
	ev.arrived = arrived;
	fake_event(fake, &ev);
}

static void until_phase(kvp_room_id id, uint32_t phase)
{
	while (state_of(id).phase != phase)
		cr_assert_geq(kvp_wait(client, WAIT_MS), 0, "phase %u", state_of(id).phase);
}

/* Another daemon process behind the same path. */
static void restart(struct fake **old, uint8_t incarnation)
{
	*old = fake;
	fake_stop(fake);
	fake = fake_start((*old)->path, incarnation, true);
}

/* ---- connecting ---------------------------------------------------------------------------- */

Test(client, greets)
{
	const Kvp__ClientMsg *hello = fake_get(fake, 0);

	cr_expect_eq(hello->body_case, KVP__CLIENT_MSG__BODY_HELLO);
	cr_expect_str_eq(hello->hello->name, "tester");
	cr_expect_eq(hello->hello->pid, (uint32_t)getpid());
	cr_expect_str_eq(kvp_node_name(client), "node-a");
	cr_expect_str_eq(kvp_node_address(client), "127.0.0.1:7470");
	cr_expect_eq(kvp_client_events(client), POLLIN);
	cr_expect_eq(kvp_process(client), 0);
	cr_expect_eq(kvp_wait(client, 10), -ETIMEDOUT);
}

Test(client, a_refused_greeting_says_why)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct fake *other = fake_start(NULL, 9, false);
	struct kvp_client *none = NULL;

	other->refuse_kind = KVP__CLIENT_MSG__BODY_HELLO;
	other->refuse_status = KVP_STATUS_VERSION;
	options.socket = other->path;
	cr_expect_eq(kvp_client_open(&none, &options), -EREMOTEIO);
	cr_expect_str_eq(kvp_last_error(NULL), "refused by the script");
	cr_expect_eq(kvp_last_status(NULL), KVP_STATUS_VERSION);
	other->refuse_kind = 0;
	other->is_deaf = true;
	options.timeout_ms = 50;
	cr_expect_eq(kvp_client_open(&none, &options), -ENOTCONN);
	cr_expect(strstr(kvp_last_error(NULL), "taken the connection, but does not answer"), "%s",
		  kvp_last_error(NULL));
	options.socket = "/tmp/kvpack-test-nothing-here";
	cr_expect_eq(kvp_client_open(&none, &options), -ENOENT);
	cr_expect_null(none);
	fake_free(other);
}

Test(client, answers_find_their_requests_in_any_order)
{
	struct result results[3] = { { 0 } };
	uint64_t ids[3];

	fake->is_mute = true;
	for (unsigned i = 0; i < 3; i++)
		cr_assert_eq(
			kvp_renew(client, "127.0.0.1:1", 17, NULL, i, 100, on_done, &results[i]),
			0);
	for (unsigned i = 0; i < 3; i++)
		ids[i] = fake_get(fake, 1 + i)->id;
	fake_reply(fake, ids[2], KVP_STATUS_NOT_FOUND, "room 17: unknown");
	fake_reply(fake, ids[0], KVP_OK, "");
	fake_reply(fake, 4711, KVP_OK, "");
	until_done(&results[0]);
	cr_expect_eq(results[2].n, 1);
	cr_expect_eq(results[2].status, KVP_STATUS_NOT_FOUND);
	cr_expect_str_eq(results[2].text, "room 17: unknown");
	cr_expect_eq(results[0].status, KVP_OK);
	cr_expect_eq(results[1].n, 0);
	fake_reply(fake, ids[0], KVP_OK, ""); /* a second answer has no request */
	fake_reply(fake, ids[1], KVP_OK, "");
	until_done(&results[1]);
	cr_expect_eq(results[0].n, 1);
}

Test(client, malformed_arguments_never_reach_the_daemon)
{
	struct kvp_expect expect = KVP_EXPECT_INIT;
	kvp_room_id id = 99;

	expect.dest = 64;
	cr_expect_eq(kvp_expect(client, &expect, NULL, NULL, &id), -EINVAL);
	cr_expect_str_eq(kvp_last_error(client), "expect.dest is 64, allowed 0 to 63");
	cr_expect_eq(kvp_last_status(client), KVP_STATUS_INVALID);
	expect.size = 0;
	cr_expect_eq(kvp_expect(client, &expect, NULL, NULL, &id), -EINVAL);
	cr_expect_eq(kvp_abort(client, 5, NULL), -ENOENT);
	cr_expect_eq(submit(5, NULL, NULL, NULL), -ENOENT);
	cr_expect_eq(id, 99);
	cr_expect_eq(fake_count(fake), 1);
}

Test(client, a_forked_child_is_refused)
{
	int status = -1;
	pid_t pid = fork();

	if (pid == 0) {
		int r = kvp_process(client);

		kvp_client_close(client);
		_exit(r == -EINVAL ? 0 : 1);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_expect_eq(status, 0);
	cr_expect_eq(register_pool(), 1); /* the parent's connection is as it was */
}

Test(client, memory_can_be_sealed)
{
	void *addr = NULL;
	int fd = -1;

	cr_assert_eq(kvp_memory_create(NULL, 4096, &fd, &addr), 0);
	cr_expect_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	cr_expect_eq(fcntl(fd, F_GETFD), FD_CLOEXEC);
	cr_expect_eq(munmap(addr, 4096), 0);
	(void)close(fd);
	cr_expect_eq(kvp_memory_create(NULL, 0, &fd, &addr), -EINVAL);
}

Test(client, inspect_reads_the_file)
{
	char *json = NULL;

	(void)snprintf(fake->memfd_text, sizeof(fake->memfd_text), "{\"rooms\":[]}");
	cr_assert_eq(kvp_inspect(client, "rooms", NULL, &json), 0, "%s", kvp_last_error(client));
	cr_expect_str_eq(json, "{\"rooms\":[]}");
	free(json);
	fake->refuse_kind = KVP__CLIENT_MSG__BODY_INSPECT;
	fake->refuse_status = KVP_STATUS_DENIED;
	cr_expect_eq(kvp_inspect(client, "rooms", NULL, &json), -EREMOTEIO);
	cr_expect_eq(kvp_last_status(client), KVP_STATUS_DENIED);
}

/* ---- pools and fences ---------------------------------------------------------------------- */

Test(client, pool_life)
{
	struct result paused = { 0 };
	uint32_t pool = register_pool();
	void *addr = NULL;
	int fd = -1;

	cr_expect_eq(fake_get(fake, 1)->pool_register->pool, pool);
	cr_expect_eq(fake->n_fds[1], 1);
	cr_assert_eq(kvp_memory_create("pool", 65536, &fd, &addr), 0);
	cr_expect_eq(kvp_pool_resume(client, pool, &fd, 1), -EINVAL, "not paused");
	cr_expect_eq(kvp_pool_pause(client, pool, on_done, &paused), 0);
	until_done(&paused);
	cr_expect_eq(kvp_pool_resume(client, pool, &fd, 1), 0, "%s", kvp_last_error(client));
	cr_expect_eq(fake_get(fake, 3)->body_case, KVP__CLIENT_MSG__BODY_POOL_RESUME);
	cr_expect_eq(fake->n_fds[3], 1);
	cr_expect_eq(kvp_pool_unregister(client, pool, NULL, NULL), 0);
	cr_expect_eq(kvp_pool_unregister(client, pool, NULL, NULL), -ENOENT);
	(void)munmap(addr, 65536);
	(void)close(fd);
}

Test(client, fence_life)
{
	struct kvp_fence *fence = NULL;

	fake->refuse_kind = KVP__CLIENT_MSG__BODY_FENCE_REGISTER;
	fake->refuse_status = KVP_STATUS_LIMIT;

	cr_expect_eq(kvp_fence_create(client, 4, &fence), -EREMOTEIO);
	cr_expect_null(fence);
	fake->refuse_kind = 0;
	cr_assert_eq(kvp_fence_create(client, 4, &fence), 0);
	kvp_fence_signal(fence, 3, 7);
	kvp_fence_signal(fence, 4, 7); /* past the end: nothing */
	cr_expect_eq(kvp_fence_words(fence)[3], 7);
	kvp_fence_destroy(fence);
	cr_expect_eq(fake_get(fake, 3)->body_case, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER);
}

/* An answer that is only late must not leave the fence with the daemon. */
Test(client, a_fence_is_taken_back)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_fence *fence = NULL;
	uint32_t id;

	kvp_client_close(client);
	options.socket = fake->path;
	options.timeout_ms = (uint32_t)support_slow_ms(200);
	cr_assert_eq(kvp_client_open(&client, &options), 0);
	atomic_store(&fake->is_mute, true);
	cr_expect_eq(kvp_fence_create(client, 4, &fence), -ETIMEDOUT);
	cr_expect_null(fence);
	cr_assert_eq(fake_get(fake, 2)->body_case, KVP__CLIENT_MSG__BODY_FENCE_REGISTER);
	id = fake_get(fake, 2)->fence_register->fence;
	cr_assert_eq(fake_get(fake, 3)->body_case, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER);
	cr_expect_eq(fake_get(fake, 3)->fence_unregister->fence, id);
	atomic_store(&fake->is_mute, false);
	cr_assert_eq(kvp_fence_create(client, 4, &fence), 0);
	cr_expect_neq(fake_get(fake, 4)->fence_register->fence, id);
}

/* ---- rooms --------------------------------------------------------------------------------- */

Test(client, long_page_lists_go_ahead_in_parts)
{
	kvp_room_id id;

	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(page_numbers); i++)
		page_numbers[i] = i * 3;
	id = expect_pages(70000, NULL, NULL);
	cr_expect_eq(fake_get(fake, 1)->pages->n_pages, 32000);
	cr_expect_eq(fake_get(fake, 2)->pages->offset, 32000);
	cr_expect_eq(fake_get(fake, 3)->pages->n_pages, 6000);
	cr_expect_eq(fake_get(fake, 3)->pages->pages[5999], 69999 * 3);
	cr_expect_eq(fake_get(fake, 4)->expect->sides[0]->list, fake_get(fake, 1)->pages->list);
	cr_expect_eq(fake_get(fake, 4)->expect->handle, id);
	cr_expect_eq(state_of(id).phase, KVP_ROOM_OFFERING);
}

Test(client, a_refused_page_list_is_the_reason)
{
	struct result result = { 0 };
	kvp_room_id id;

	fake->is_mute = true;
	id = expect_pages(3, on_done, &result);
	fake_reply(fake, fake_get(fake, 1)->id, KVP_STATUS_LIMIT, "pages: 9 of 8");
	fake_reply(fake, fake_get(fake, 2)->id, KVP_STATUS_NOT_FOUND, "list 1: unknown");
	until_done(&result);
	cr_expect_eq(result.status, KVP_STATUS_LIMIT);
	cr_expect_str_eq(result.text, "pages: 9 of 8");
	cr_expect_eq(state_of(id).phase, KVP_ROOM_RELEASED);
	cr_expect(state_of(id).failed && state_of(id).retry && state_of(id).released);
	cr_expect_str_eq(state_of(id).reason, "pages: 9 of 8");
}

Test(client, state_moves_forward_only)
{
	kvp_room_id id = expect_pages(1, NULL, NULL);
	Kvp__RoomEvent ev = KVP__ROOM_EVENT__INIT;

	event(id, KVP__ROOM_STATE__ROOM_LANDING, 512);
	event(id, KVP__ROOM_STATE__ROOM_ACCEPTED, 256);
	event(id, KVP__ROOM_STATE__ROOM_SENDING, 0);       /* not of a destination */
	event(id + 100, KVP__ROOM_STATE__ROOM_LANDING, 0); /* unknown */
	event(id, KVP__ROOM_STATE__ROOM_LANDING, 600);
	while (state_of(id).arrived != 600)
		cr_assert_geq(kvp_wait(client, WAIT_MS), 0);
	cr_expect_eq(state_of(id).phase, KVP_ROOM_LANDING);
	cr_expect_eq(kvp_room_next_changed(client), id);
	cr_expect_eq(kvp_room_next_changed(client), 0);

	ev.handle = id;
	ev.state = KVP__ROOM_STATE__ROOM_COMPLETE;
	ev.complete = true;
	ev.meta.data = (uint8_t *)"aux";
	ev.meta.len = 3;
	fake_event(fake, &ev);
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_TERMINAL, WAIT_MS), 0);
	ev.meta.len = 0;
	ev.complete = false;
	ev.failed = true;
	ev.status = KVP__STATUS__STATUS_TIMEOUT;
	ev.reason = (char *)"too late";
	fake_event(fake, &ev);
	event(id, KVP__ROOM_STATE__ROOM_LANDING, 10);
	ev.failed = false;
	ev.complete = ev.released = true;
	fake_event(fake, &ev);
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	cr_expect(state_of(id).complete && !state_of(id).failed && state_of(id).released);
	cr_expect_eq(state_of(id).phase, KVP_ROOM_RELEASED);
	cr_expect_eq(state_of(id).meta_bytes, 3);
	cr_expect_eq(memcmp(state_of(id).meta, "aux", 3), 0);
	cr_expect_str_eq(state_of(id).reason, "");
}

Test(client, sender_watermarks)
{
	kvp_room_id id = open_room();
	Kvp__RoomEvent ev = KVP__ROOM_EVENT__INIT;
	uint32_t seq = 9;

	cr_expect_eq(submit(id, NULL, NULL, &seq), 0);
	cr_expect_eq(seq, 0);
	cr_expect_eq(submit(id, NULL, NULL, &seq), 0);
	cr_expect_eq(seq, 1);
	ev.handle = id;
	ev.state = KVP__ROOM_STATE__ROOM_SENDING;
	ev.source_free = 1;
	ev.prefix = 64;
	ev.end = 128;
	fake_event(fake, &ev);
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_READY, WAIT_MS), 0);
	cr_expect_eq(kvp_room_wait_source_free(client, id, 1, WAIT_MS), 0);
	cr_expect_eq(kvp_room_wait_source_free(client, id, 2, 1), -ETIMEDOUT);
	cr_expect_eq(state_of(id).prefix, 64);
	cr_expect_eq(state_of(id).end, 128);
	ev.failed = ev.released = true;
	ev.status = KVP__STATUS__STATUS_PEER_LOST;
	ev.reason = (char *)"peer b: gone";
	fake_event(fake, &ev);
	cr_expect_eq(kvp_room_wait_delivered(client, id, 1, WAIT_MS), -ECANCELED);
	cr_expect_eq(kvp_room_wait_source_free(client, id, 2, WAIT_MS), 0, "all is free");
	cr_expect_eq(state_of(id).phase, KVP_ROOM_GONE);
	cr_expect_eq(submit(id, NULL, NULL, &seq), -EREMOTEIO);
	cr_expect_str_eq(kvp_last_error(client), "room has failed: peer b: gone");
}

Test(client, refused_chunks_give_their_numbers_back)
{
	struct result results[3] = { { 0 } };
	kvp_room_id id = open_room();
	uint32_t seq = 9;

	fake->refuse_kind = KVP__CLIENT_MSG__BODY_SUBMIT;
	fake->refuse_status = KVP_STATUS_ORDER;
	for (unsigned i = 0; i < 3; i++) {
		cr_expect_eq(submit(id, on_done, &results[i], &seq), 0);
		cr_expect_eq(seq, i);
	}
	until_done(&results[2]);
	fake->refuse_kind = 0;
	cr_expect_eq(submit(id, NULL, NULL, &seq), 0);
	cr_expect_eq(seq, 0);
	cr_expect_eq(submit(id, NULL, NULL, &seq), 0);
	fake->recalled_from = 1;
	cr_expect_eq(kvp_recall(client, id, 0, &seq), 0);
	cr_expect_eq(seq, 1);
	cr_expect_eq(submit(id, NULL, NULL, &seq), 0);
	cr_expect_eq(seq, 1);
}

Test(client, forget_aborts_a_live_room)
{
	kvp_room_id id = expect_pages(1, NULL, NULL);

	kvp_room_forget(client, id);
	cr_expect_eq(fake_get(fake, 3)->abort->handle, id);
	cr_expect_str_eq(fake_get(fake, 3)->abort->reason, "forgotten");
	event(id, KVP__ROOM_STATE__ROOM_LANDING, 512);
	(void)kvp_wait(client, 50);
	cr_expect_eq(kvp_room_state(client, id, &(struct kvp_room_state)KVP_ROOM_STATE_INIT),
		     -ENOENT);
	cr_expect_eq(kvp_room_next_changed(client), 0);
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_READY, 10), -ENOENT);
}

/* The daemon does not read: the library keeps a bounded amount, then says so, and loses nothing. */
Test(client, back_pressure)
{
	static uint8_t meta[KVP_MAX_META];
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	kvp_room_id id = open_room();
	struct result result = { 0 };
	unsigned n = 0;
	int r;

	chunk.last = 1;
	chunk.meta = meta;
	chunk.meta_bytes = sizeof(meta);
	fake->is_deaf = true;
	(void)poll(NULL, 0, 50);
	while ((r = kvp_submit(client, id, &chunk, on_done, &result, NULL)) == 0)
		n++;
	cr_expect_eq(r, -EAGAIN);
	cr_expect_geq(n, 250);
	cr_expect_lt(n, 2000);
	fake->is_deaf = false;
	while (result.n < n)
		cr_assert_geq(kvp_wait(client, WAIT_MS), 0);
	for (unsigned i = 0; i < n; i++)
		cr_expect_eq(fake_get(fake, 2 + i)->submit->seq, i);
	cr_expect_eq(kvp_submit(client, id, &chunk, NULL, NULL, NULL), 0);
}

/* ---- losing the daemon --------------------------------------------------------------------- */

Test(client, restart_repeats_what_is_not_in_motion)
{
	struct fake *old;
	int fd = kvp_client_fd(client);
	uint32_t pool = register_pool();
	struct kvp_fence *fence = NULL;
	kvp_room_id fresh, landing, idle, moving;

	cr_assert_eq(kvp_fence_create(client, 1, &fence), 0);
	fresh = expect_pages(2, NULL, NULL);
	landing = expect_pages(1, NULL, NULL);
	idle = open_room();
	moving = open_room();
	cr_assert_eq(submit(moving, NULL, NULL, NULL), 0);
	event(landing, KVP__ROOM_STATE__ROOM_LANDING, 128);
	event(fresh, KVP__ROOM_STATE__ROOM_ACCEPTED, 64);
	until_phase(fresh, KVP_ROOM_ACCEPTED);

	restart(&old, 2);
	cr_assert_eq(kvp_room_wait(client, moving, KVP_WAIT_TERMINAL, WAIT_MS), 0);
	cr_expect_eq(state_of(moving).status, KVP_STATUS_DAEMON_LOST);
	cr_expect(state_of(moving).retry && !state_of(moving).released);
	cr_expect(state_of(landing).failed && !state_of(landing).released);
	cr_expect(!state_of(fresh).failed && !state_of(idle).failed);

	/* The new one gets pools and fences; rooms only when the old one is dead. */
	while (fake_count(fake) < 3)
		(void)kvp_wait(client, 20);
	cr_expect_eq(fake_get(fake, 1)->pool_register->pool, pool);
	cr_expect_eq(fake_get(fake, 2)->fence_register->fence, 1);
	cr_expect_eq(fake->n_fds[2], 1);
	(void)kvp_wait(client, 100);
	(void)kvp_wait(client, 100);
	cr_expect_eq(fake_count(fake), 3);
	cr_expect_not(state_of(landing).released);
	cr_expect_eq(submit(idle, on_done, NULL, NULL), -ENOTCONN);

	fake_kill_child(old);
	cr_assert_eq(kvp_room_wait(client, landing, KVP_WAIT_RELEASED, WAIT_MS), 0);
	cr_expect_eq(state_of(landing).phase, KVP_ROOM_RELEASED);
	cr_expect_eq(state_of(moving).phase, KVP_ROOM_GONE);
	cr_expect_eq(state_of(moving).source_free, 1);
	cr_expect_eq(fake_get(fake, 3)->pages->n_pages, 2);
	cr_expect_eq(fake_get(fake, 4)->expect->handle, fresh);
	cr_expect_eq(fake_get(fake, 5)->open->handle, idle);
	cr_expect_eq(state_of(fresh).phase, KVP_ROOM_ACCEPTED);
	cr_expect_eq(kvp_client_fd(client), fd);
	cr_expect_eq(submit(idle, NULL, NULL, NULL), 0, "%s", kvp_last_error(client));
	cr_expect_eq(kvp_last_status(client), KVP_STATUS_DAEMON_LOST);
	kvp_fence_destroy(fence);
	fake_free(fake);
	fake = old;
}

Test(client, a_dead_process_is_noticed_without_eof)
{
	kvp_room_id id = expect_pages(1, NULL, NULL);

	event(id, KVP__ROOM_STATE__ROOM_LANDING, 128);
	until_phase(id, KVP_ROOM_LANDING);
	fake_kill_child(fake);
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	cr_expect_eq(state_of(id).status, KVP_STATUS_DAEMON_LOST);
}

Test(client, the_same_daemon_again_fails_all_rooms)
{
	struct fake *old;
	kvp_room_id id = expect_pages(1, NULL, NULL);

	restart(&old, 1);
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_TERMINAL, WAIT_MS), 0);
	cr_expect_eq(state_of(id).status, KVP_STATUS_DAEMON_LOST);
	cr_expect(state_of(id).retry && !state_of(id).released);
	fake_kill_child(old);
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	fake_free(fake);
	fake = old;
}

/* The daemon lives on and says itself when it has let go of what the connection had. */
Test(client, a_lost_connection_is_settled)
{
	struct fake *old, *first = fake;
	const Kvp__ClientMsg *msg;
	unsigned n = 0;
	kvp_room_id id;

	kvp_client_close(client);
	fake = fake_start(NULL, 7, true);
	fake->session = 41;
	open_client();
	id = expect_pages(1, NULL, NULL);
	restart(&old, 7);
	fake->is_mute = true;
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_TERMINAL, WAIT_MS), 0);
	cr_expect_eq(state_of(id).status, KVP_STATUS_DAEMON_LOST);
	do {
		(void)kvp_wait(client, 10);
		msg = fake_get(fake, n++);
	} while (msg->body_case != KVP__CLIENT_MSG__BODY_SETTLE);
	cr_expect_eq(msg->settle->session, 41);
	cr_expect(!state_of(id).released);
	fake_reply(fake, msg->id, KVP__STATUS__STATUS_OK, "");
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	fake_kill_child(old);
	fake_kill_child(fake);
	fake_free(fake);
	fake_free(old);
	fake = first;
}

Test(client, without_pidfd_another_incarnation_is_the_proof)
{
	struct fake *old, *first = fake;
	kvp_room_id id;

	kvp_client_close(client);
	fake = fake_start(NULL, 5, false);
	open_client();
	id = expect_pages(1, NULL, NULL);
	event(id, KVP__ROOM_STATE__ROOM_LANDING, 128);
	until_phase(id, KVP_ROOM_LANDING);
	restart(&old, 6);
	cr_assert_eq(kvp_room_wait(client, id, KVP_WAIT_TERMINAL, WAIT_MS), 0);
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	fake_free(fake);
	fake_free(old);
	fake = first;
}

Test(client, done_runs_exactly_once_at_loss)
{
	struct result results[2] = { { 0 } };
	struct fake *old;
	kvp_room_id id;

	fake->is_mute = true;
	cr_assert_eq(kvp_renew(client, "127.0.0.1:1", 17, NULL, 0, 9, on_done, &results[0]), 0);
	id = expect_pages(1, on_done, &results[1]);
	(void)fake_get(fake, 3);
	restart(&old, 2);
	until_done(&results[1]);
	cr_expect_eq(results[0].status, KVP_STATUS_DAEMON_LOST);
	cr_expect_eq(results[1].status, KVP_STATUS_DAEMON_LOST);
	cr_expect(state_of(id).failed && !state_of(id).released, "it may have been accepted");
	fake_kill_child(old);
	cr_expect_eq(kvp_room_wait(client, id, KVP_WAIT_RELEASED, WAIT_MS), 0);
	(void)kvp_wait(client, 200);
	cr_expect_eq(results[0].n, 1);
	cr_expect_eq(results[1].n, 1);
	fake_free(fake);
	fake = old;
}

Test(client, close_ends_requests)
{
	struct result result = { 0 };

	fake->is_mute = true;
	cr_assert_eq(kvp_renew(client, "127.0.0.1:1", 17, NULL, 0, 9, on_done, &result), 0);
	kvp_client_close(client);
	client = NULL;
	cr_expect_eq(result.n, 1);
	cr_expect_eq(result.status, KVP_STATUS_DAEMON_LOST);
}

static void *start_late(void *path)
{
	(void)poll(NULL, 0, 300);
	return fake_start(path, 2, false);
}

Test(client, a_blocking_call_waits_for_the_new_daemon)
{
	struct fake *old = fake;
	pthread_t thread;
	void *late = NULL;

	fake_stop(fake);
	cr_assert_gt(kvp_wait(client, WAIT_MS), 0);
	cr_assert_eq(pthread_create(&thread, NULL, start_late, old->path), 0);
	cr_expect_eq(register_pool(), 1);
	cr_assert_eq(pthread_join(thread, &late), 0);
	kvp_client_close(client);
	client = NULL;
	fake_free(late);
}

Test(client, garbage_from_the_daemon_ends_the_connection)
{
	struct result result = { 0 };

	fake->is_mute = true;
	cr_assert_eq(kvp_renew(client, "127.0.0.1:1", 17, NULL, 0, 9, on_done, &result), 0);
	(void)fake_get(fake, 1);
	fake_raw(fake, "\xff\xff\xff", 3);
	until_done(&result);
	cr_expect_eq(result.status, KVP_STATUS_DAEMON_LOST);
	fake->is_mute = false;
	cr_expect_eq(register_pool(), 1); /* over the new connection */
}

Test(client, paused_pool_meets_a_new_daemon)
{
	struct fake *old;
	uint32_t pool = register_pool();
	void *addr = NULL;
	int fd = -1;

	cr_assert_eq(kvp_pool_pause(client, pool, NULL, NULL), 0);
	restart(&old, 2);
	while (fake_count(fake) < 1)
		(void)kvp_wait(client, 20);
	cr_assert_eq(kvp_memory_create("pool", 65536, &fd, &addr), 0);
	cr_expect_eq(kvp_pool_resume(client, pool, &fd, 1), 0, "%s", kvp_last_error(client));
	cr_expect_eq(fake_get(fake, 1)->body_case, KVP__CLIENT_MSG__BODY_POOL_REGISTER);
	(void)munmap(addr, 65536);
	(void)close(fd);
	fake_free(fake);
	fake = old;
}
