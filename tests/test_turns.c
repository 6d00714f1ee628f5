/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What one client may have of the loop before another gets its turn, in numbers and not in time:
 * the daemon is stopped while both ask, so that it finds both when it goes on.
 */

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/session.h"
#include "proto/msg.h"
#include "proto/packet.h"
#include "tests/support.h"

#define PAGE_ROWS 64u
#define ROOMS 400u

TestSuite(turns, .timeout = 60);

static struct support_daemon daemon_;

static void setup(void)
{
	support_daemon_start(&daemon_, NULL);
}

static void teardown(void)
{
	support_daemon_end(&daemon_);
}

static void stop(void)
{
	siginfo_t info;

	cr_assert_eq(kill(daemon_.pid, SIGSTOP), 0);
	cr_assert_eq(waitid(P_PID, (id_t)daemon_.pid, &info, WSTOPPED), 0);
}

static void go_on(void)
{
	cr_assert_eq(kill(daemon_.pid, SIGCONT), 0);
}

static double number(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	cr_assert(cJSON_IsNumber(item), "%s", name);
	return item->valuedouble;
}

static const cJSON *named(const cJSON *root, const char *list, const char *name)
{
	const cJSON *item;

	cJSON_ArrayForEach (item, cJSON_GetObjectItemCaseSensitive(root, list)) {
		const cJSON *its = cJSON_GetObjectItemCaseSensitive(item, "name");

		if (cJSON_IsString(its) && !strcmp(its->valuestring, name))
			return item;
	}
	cr_assert_fail("no %s of %s", name, list);
	return NULL;
}

static double of_client(int by, const char *client, const char *what)
{
	cJSON *root = support_inspect(by, "clients", "");
	double value = number(named(root, "clients", client), what);

	cJSON_Delete(root);
	return value;
}

static double of_limit(int by, const char *limit, const char *what)
{
	cJSON *root = support_inspect(by, "status", "");
	double value = number(named(root, "limits", limit), what);

	cJSON_Delete(root);
	return value;
}

static double counter(int by, const char *name)
{
	cJSON *root = support_inspect(by, "status", "");
	double value = number(cJSON_GetObjectItem(root, "counters"), name);

	cJSON_Delete(root);
	return value;
}

static void send_pause(int fd, uint64_t id)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;

	body.pool = 99;
	msg.id = id;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	support_send_msg(fd, &msg, NULL, 0);
}

static void send_inspect(int fd, uint64_t id, const char *what)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;

	body.what = (char *)what;
	body.arg = (char *)"";
	msg.id = id;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	support_send_msg(fd, &msg, NULL, 0);
}

static void open_room(int fd, uint64_t room)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Open body = KVP__OPEN__INIT;
	Kvp__Side side = KVP__SIDE__INIT, *sides = &side;
	struct support_reply reply;

	side.page = PAGE_ROWS;
	side.dcp_size = side.interleave = 1;
	body.handle = body.room = room;
	body.pool = 1;
	body.sides = &sides;
	body.n_sides = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_OPEN;
	msg.open = &body;
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
}

static void open_rooms(int fd, int *memory)
{
	Kvp__Entry entry = KVP__ENTRY__INIT;
	struct support_reply reply;

	support_entry(&entry, 0, 64, 4);
	*memory = support_memfd(entry.bytes);
	reply = support_register(fd, 1, &entry, memory, 1);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	for (uint64_t room = 1; room <= ROOMS; room++)
		open_room(fd, room);
}

Test(turns, a_flood_has_few_packets_before_another_client, .init = setup, .fini = teardown)
{
	const uint32_t sent = 100;
	int flood = support_hello(&daemon_, "flood"), quiet = support_hello(&daemon_, "quiet");
	double before = of_client(quiet, "flood", "requests"), had;
	struct support_reply reply;

	stop();
	for (uint32_t i = 0; i < sent; i++)
		send_pause(flood, 1000 + i);
	/* The answer is as of the turn in which the question is read. */
	send_inspect(quiet, 77, "clients");
	go_on();
	cr_assert(support_recv(quiet, &reply, 5000));
	cr_assert(reply.id == 77 && reply.fd >= 0);
	{
		char text[16384] = "";
		cJSON *root;

		cr_assert(pread(reply.fd, text, sizeof(text) - 1, 0) > 0);
		close(reply.fd);
		root = cJSON_Parse(text);
		cr_assert(root);
		had = number(named(root, "clients", "flood"), "requests") - before;
		cJSON_Delete(root);
	}
	cr_assert_leq(had, KVP_SESSION_TURN_PACKETS);
	for (uint32_t i = 0; i < sent; i++) {
		cr_assert(support_recv(flood, &reply, 5000));
		cr_assert_eq(reply.id, 1000 + i);
	}
	cr_assert_eq(of_client(quiet, "flood", "requests"), before + sent);
	cr_assert_leq(of_limit(quiet, "packets of a turn", "used"), KVP_SESSION_TURN_PACKETS);
	cr_assert_eq(of_limit(quiet, "packets of a turn", "max"), KVP_SESSION_TURN_PACKETS);
	cr_assert_gt((counter(quiet, "turns_cut") + 2) * KVP_SESSION_TURN_PACKETS, sent);
	close(flood);
	close(quiet);
}

/* Who does not read its answers is not read either, and its requests are not lost. */
Test(turns, answers_that_nobody_reads_hold_up_who_asked, .init = setup, .fini = teardown)
{
	int flood = support_hello(&daemon_, "flood"), quiet = support_hello(&daemon_, "quiet");
	uint64_t sent = 0, answered = 0, until = support_now_ms() + 10000;
	struct support_reply reply;
	double unsent = 0;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;
	uint8_t packet[64];
	long n;

	body.pool = 99;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	do {
		msg.id = 1000 + sent;
		n = kvp_msg_encode_client(&msg, packet, sizeof(packet));
		cr_assert(n > 0 && support_now_ms() < until);
		if (kvp_packet_send(flood, packet, (size_t)n, NULL, 0) == 0) {
			sent++;
			continue;
		}
		/* Both directions are full, or the daemon has not come to it yet. */
		unsent = of_client(quiet, "flood", "unsent_bytes");
	} while (n > 0 && (sent < KVP_SESSION_BACKLOG || unsent == 0));
	cr_assert_leq(of_client(quiet, "flood", "requests"), (double)(sent + 1));
	while (answered < sent && support_recv(flood, &reply, 5000))
		cr_assert_eq(reply.id, 1000 + answered++);
	cr_assert_eq(answered, sent);
	close(flood);
	close(quiet);
}

Test(turns, events_of_many_rooms_go_out_in_turns, .init = setup, .fini = teardown)
{
	int owner = support_hello(&daemon_, "owner"), quiet = support_hello(&daemon_, "quiet");
	int memory;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolUnregister body = KVP__POOL_UNREGISTER__INIT;
	struct support_reply reply;
	double before;

	open_rooms(owner, &memory);
	before = of_client(quiet, "owner", "events");
	body.pool = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_UNREGISTER;
	msg.pool_unregister = &body;
	reply = support_call(owner, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	while (of_client(quiet, "owner", "rooms") > 0)
		(void)support_recv(owner, &reply, 10); /* skips events */
	cr_assert_geq(of_client(quiet, "owner", "events") - before, ROOMS);
	cr_assert_eq(of_limit(quiet, "events of a turn", "used"), KVP_SESSION_TURN_EVENTS);
	cr_assert_eq(of_limit(quiet, "events of a turn", "max"), KVP_SESSION_TURN_EVENTS);
	cr_assert_gt(counter(quiet, "event_turns_cut"), 0);
	close(memory);
	close(owner);
	close(quiet);
}

Test(turns, a_list_of_rooms_is_made_in_many_turns, .init = setup, .fini = teardown)
{
	int lister = support_hello(&daemon_, "lister"), quiet = support_hello(&daemon_, "quiet");
	int memory;
	double turns = 0;
	cJSON *root;
	const cJSON *item, *jobs;

	open_rooms(lister, &memory);
	for (int i = 0; i < 3; i++) {
		root = support_inspect(lister, "rooms", "");
		cr_assert_eq(cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(root, "rooms")),
			     ROOMS);
		cJSON_Delete(root);
	}
	root = support_inspect(quiet, "status", "");
	jobs = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(root, "loop"),
						"job_turns");
	cJSON_ArrayForEach (item, cJSON_GetObjectItemCaseSensitive(jobs, "log2_us"))
		turns += item->valuedouble;
	cJSON_Delete(root);
	/* A room takes microseconds, a turn's share is a hundred of them. */
	cr_assert_gt(turns, 6);
	close(memory);
	close(lister);
	close(quiet);
}
