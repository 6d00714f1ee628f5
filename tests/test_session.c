/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "proto/limits.h"
#include "proto/msg.h"
#include "proto/util.h"
#include "tests/support.h"
#include "tests/support_msg.h"

TestSuite(session, .timeout = 60);

static struct support_daemon daemon_;

static void setup(void)
{
	support_daemon_start(&daemon_, "[client]\nstall = 500ms\nmax_sessions = 4");
}

static void teardown(void)
{
	support_daemon_end(&daemon_);
}

/* A request with a small body; the fields of the others are made in the tests. */
static struct support_reply call_pause(int fd, uint32_t pool)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;

	body.pool = pool;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	return support_call(fd, &msg, NULL, 0);
}

static struct support_reply call_hello(int fd, uint32_t min, uint32_t max)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello body = KVP__HELLO__INIT;

	body.version_min = min;
	body.version_max = max;
	body.pid = 1;
	body.name = (char *)"raw";
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &body;
	return support_call(fd, &msg, NULL, 0);
}

static void assert_lives(int fd)
{
	struct support_reply reply = call_pause(fd, 99);

	cr_assert_eq(reply.status, KVP__STATUS__STATUS_NOT_FOUND, "%s", reply.text);
	cr_assert(strstr(reply.text, "99"), "%s", reply.text);
}

/* ---- hello */

Test(session, hello_comes_first_and_once, .init = setup, .fini = teardown)
{
	int fd = support_connect(&daemon_);
	struct support_reply reply = call_pause(fd, 1);

	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(reply.text, "hello"), "%s", reply.text);
	close(fd);

	fd = support_hello(&daemon_, "engine");
	reply = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	assert_lives(fd);
	close(fd);
}

Test(session, versions_without_overlap_are_named, .init = setup, .fini = teardown)
{
	int fd = support_connect(&daemon_);
	struct support_reply reply =
		call_hello(fd, KVP_PROTO_VERSION(7u, 1u), KVP_PROTO_VERSION(8u, 3u));

	cr_assert_eq(reply.status, KVP__STATUS__STATUS_VERSION);
	cr_assert(strstr(reply.text, "7.1") && strstr(reply.text, "8.3") &&
			  strstr(reply.text, "1.0"),
		  "%s", reply.text);
	/* A client that knows an older version may try again. */
	reply = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION(8u, 3u));
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	close(reply.fd);
	close(fd);
}

Test(session, silent_connection_ends, .init = setup, .fini = teardown)
{
	int fd = support_connect(&daemon_);

	cr_assert(support_closed(fd, 5000));
	close(fd);
}

Test(session, too_many_sessions_are_told_the_limit, .init = setup, .fini = teardown)
{
	int fds[4], more;
	struct support_reply reply;

	for (int i = 0; i < 4; i++)
		fds[i] = support_hello(&daemon_, "one of four");
	more = support_connect(&daemon_);
	reply = call_hello(more, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_LIMIT);
	cr_assert(strstr(reply.text, "4") && strstr(reply.text, "client.max_sessions"), "%s",
		  reply.text);
	cr_assert(support_closed(more, 5000));
	close(more);

	close(fds[0]);
	support_sleep_ms(100);
	fds[0] = support_hello(&daemon_, "takes the place");
	for (int i = 0; i < 4; i++)
		close(fds[i]);
}

/* ---- bad packets */

Test(session, garbage_ends_only_its_own_session, .init = setup, .fini = teardown)
{
	int good = support_hello(&daemon_, "good"), bad = support_hello(&daemon_, "bad");
	uint8_t junk[64];

	memset(junk, 0xff, sizeof(junk));
	for (int i = 0; i < 15; i++)
		cr_assert_eq(support_send(bad, junk, sizeof(junk), NULL, 0), 0);
	assert_lives(bad);
	for (int i = 0; i < 16; i++)
		(void)support_send(bad, junk, sizeof(junk), NULL, 0); /* may be closed already */
	cr_assert(support_closed(bad, 5000));
	assert_lives(good);
	close(bad);
	close(good);
}

Test(session, malformed_request_with_an_id_is_answered, .init = setup, .fini = teardown)
{
	/* id 77, then a field of a length that the packet does not have */
	static const uint8_t cut[] = { 0x08, 77, 0x1a, 0x7f, 0x08 };
	/* id 78, then body number 900: nothing that this version knows */
	static const uint8_t unknown[] = { 0x08, 78, 0xa2, 0x38, 0x00 };
	/* id 0, then an abort */
	static const uint8_t no_id[] = { 0x08, 0, 0x82, 0x01, 0x00 };
	int fd = support_hello(&daemon_, "engine");
	struct support_reply reply;

	cr_assert_eq(support_send(fd, cut, sizeof(cut), NULL, 0), 0);
	cr_assert(support_recv(fd, &reply, 5000));
	cr_assert_eq(reply.id, 77);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert_neq(reply.text[0], 0);

	cr_assert_eq(support_send(fd, unknown, sizeof(unknown), NULL, 0), 0);
	cr_assert(support_recv(fd, &reply, 5000));
	cr_assert_eq(reply.id, 78);
	cr_assert_neq(reply.status, KVP__STATUS__STATUS_OK);

	cr_assert_eq(support_send(fd, no_id, sizeof(no_id), NULL, 0), 0);
	assert_lives(fd);
	close(fd);
}

Test(session, oversized_packet_is_refused_with_the_limit, .init = setup, .fini = teardown)
{
	static uint8_t big[KVP_LIMIT_PACKET + 1];
	int fd = support_hello(&daemon_, "engine"), size = 1 << 20;
	struct support_reply reply;

	cr_assert_eq(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size)), 0);
	big[0] = 0x08;
	big[1] = 55;
	cr_assert_eq(support_send(fd, big, sizeof(big), NULL, 0), 0);
	cr_assert(support_recv(fd, &reply, 5000));
	cr_assert_eq(reply.id, 55);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(reply.text, "128 KiB"), "%s", reply.text);
	assert_lives(fd);
	close(fd);
}

/* More descriptors than a packet may carry, by hand: the library's own function refuses to. */
static void send_many_fds(int fd, const void *bytes, size_t n, int n_fds)
{
	static char control[CMSG_SPACE(sizeof(int) * (KVP_LIMIT_FDS + 1))];
	struct iovec iov = { (void *)bytes, n };
	struct msghdr hdr = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control,
			      .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds) };
	struct cmsghdr *cmsg = CMSG_FIRSTHDR(&hdr);

	cmsg->cmsg_level = SOL_SOCKET;
	cmsg->cmsg_type = SCM_RIGHTS;
	cmsg->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
	for (int i = 0; i < n_fds; i++) {
		int one = STDIN_FILENO;

		memcpy(CMSG_DATA(cmsg) + (size_t)i * sizeof(int), &one, sizeof(one));
	}
	cr_assert_geq(sendmsg(fd, &hdr, MSG_NOSIGNAL), 0, "%s", strerror(errno));
}

Test(session, unexpected_descriptors_are_closed_and_refused, .init = setup, .fini = teardown)
{
	static const uint8_t start[] = { 0x08, 56, 0x22, 0x02, 0x08, 0x01 };
	int fd = support_hello(&daemon_, "engine"), extra[2] = { STDIN_FILENO, STDOUT_FILENO };
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;
	struct support_reply reply;

	body.pool = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	reply = support_call(fd, &msg, extra, 2);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(reply.text, "2") && strstr(reply.text, "fds"), "%s", reply.text);

	send_many_fds(fd, start, sizeof(start), KVP_LIMIT_FDS + 1);
	cr_assert(support_recv(fd, &reply, 5000));
	cr_assert_eq(reply.id, 56);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(reply.text, "240"), "%s", reply.text);
	assert_lives(fd);
	close(fd);
	/* teardown counts the daemon's descriptors */
}

/* ---- clients that go or stop */

/* Asks, and never reads an answer; returns how many requests went out. */
static int flood(int fd, int max)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;
	uint8_t buf[64];
	long n;
	int sent = 0;

	body.pool = 1;
	msg.id = 5;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	n = kvp_msg_encode_client(&msg, buf, sizeof(buf));
	while (sent < max) {
		ssize_t r = send(fd, buf, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (r < 0 && errno == EAGAIN)
			break;
		if (r < 0)
			return sent;
		sent++;
		if (sent % 256 == 0)
			support_sleep_ms(1);
	}
	return sent;
}

Test(session, client_that_never_reads_is_held_back_then_ended, .init = setup, .fini = teardown)
{
	int other = support_hello(&daemon_, "other"), fd = support_hello(&daemon_, "deaf");
	int sent = flood(fd, 100000);
	uint64_t until = support_now_ms() + 10000;

	cr_assert_lt(sent, 100000, "the daemon took everything");
	assert_lives(other);
	while (!support_log_has(&daemon_, "read nothing for 500 ms")) {
		cr_assert_lt(support_now_ms(), until, "the stalled session was not ended");
		support_sleep_ms(20);
	}
	cr_assert(support_closed(fd, 5000));
	assert_lives(other);
	close(other);
	close(fd);
}

static int engine(const char *name, int mem)
{
	int fd = support_hello(&daemon_, name);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(support_register(fd, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	return fd;
}

static void assert_logged(const char *text)
{
	for (int i = 0; i < 500 && !support_log_has(&daemon_, text); i++)
		support_sleep_ms(10);
	cr_assert(support_log_has(&daemon_, text), "%s", text);
}

Test(session, an_engine_that_leaves_is_not_a_broken_network, .init = setup, .fini = teardown)
{
	int mem = support_memfd(1 << 20), fd = engine("hasty", mem);
	struct pollfd pfd = { fd, POLLIN, 0 };

	cr_assert_eq(flood(fd, 1), 1);
	cr_assert_eq(poll(&pfd, 1, 5000), 1);
	close(fd); /* with an answer in it */
	assert_logged("left something unread");

	fd = engine("half", mem);
	shutdown(fd, SHUT_RD);
	cr_assert_eq(flood(fd, 1), 1);
	assert_logged("its reading half");
	close(fd);
	close(mem);
}

Test(session, requests_answered_late_are_answered_in_order, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "slow");
	int sent = flood(fd, 2000);
	struct support_reply reply;

	for (int i = 0; i < sent; i++) {
		cr_assert(support_recv(fd, &reply, 5000), "%d of %d", i, sent);
		cr_assert_eq(reply.id, 5);
	}
	assert_lives(fd);
	close(fd);
}

static void wait_for_clients(int fd, double n)
{
	uint64_t until = support_now_ms() + 5000;

	while (support_status_number(fd, "clients") != n) {
		cr_assert_lt(support_now_ms(), until, "still not %g clients", n);
		support_sleep_ms(10);
	}
}

/* The child that registers pool 1; with `forks` a child of its own keeps the socket open. */
static _Noreturn void be_engine(int ready, bool forks)
{
	Kvp__Entry entry;
	int mem = support_memfd(1 << 20), fd = support_hello(&daemon_, "engine");
	struct support_reply reply;

	support_entry(&entry, 0, 256, 64);
	reply = support_register(fd, 1, &entry, &mem, 1);
	if (reply.status != KVP__STATUS__STATUS_OK)
		_exit(1);
	if (forks && fork() == 0) {
		while (getppid() != 1)
			support_sleep_ms(10);
		support_sleep_ms(2000);
		_exit(0);
	}
	(void)!write(ready, "x", 1);
	for (;;)
		pause();
}

static void kill_engine(bool forks)
{
	int watch = support_hello(&daemon_, "watch"), pipe_[2];
	char byte;
	pid_t pid;

	cr_assert_eq(pipe2(pipe_, O_CLOEXEC), 0);
	pid = fork();
	if (pid == 0)
		be_engine(pipe_[1], forks);
	close(pipe_[1]);
	cr_assert_eq(read(pipe_[0], &byte, 1), 1, "the engine did not come up");
	close(pipe_[0]);
	cr_assert_eq(support_status_number(watch, "clients"), 2);
	cr_assert_eq(support_status_number(watch, "pools"), 1);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	wait_for_clients(watch, 1);
	support_sleep_ms(50);
	cr_assert_eq(support_status_number(watch, "pools"), 0);
	close(watch);
}

Test(session, killed_client_leaves_nothing, .init = setup, .fini = teardown)
{
	kill_engine(false);
}

Test(session, forked_child_does_not_keep_the_session, .init = setup, .fini = teardown)
{
	kill_engine(true);
}

/* ---- test points, displays */

static struct support_reply call_hold(int fd, const char *point, bool on)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__TestHold body = KVP__TEST_HOLD__INIT;

	body.point = (char *)point;
	body.on = on;
	msg.body_case = KVP__CLIENT_MSG__BODY_TEST_HOLD;
	msg.test_hold = &body;
	return support_call(fd, &msg, NULL, 0);
}

Test(session, test_points_exist_in_test_builds_only, .init = setup, .fini = teardown)
{
	static const char *const points[] = { "want",    "grant",  "gather", "send",
					      "scatter", "landed", "offer" };
	int fd = support_hello(&daemon_, "tester");

#ifdef KVP_TEST
	for (size_t i = 0; i < KVP_ARRAY_SIZE(points); i++) {
		cr_assert_eq(call_hold(fd, points[i], true).status, KVP__STATUS__STATUS_OK);
		cr_assert_eq(call_hold(fd, points[i], false).status, KVP__STATUS__STATUS_OK);
	}
	cr_assert_eq(call_hold(fd, "nowhere", true).status, KVP__STATUS__STATUS_NOT_FOUND);
#else
	cr_assert_eq(call_hold(fd, points[0], true).status, KVP__STATUS__STATUS_UNSUPPORTED);
#endif
	close(fd);
}

Test(session, every_display_answers, .init = setup, .fini = teardown)
{
	static const char *const lists[][2] = {
		{ "status", "limits" },    { "clients", "clients" }, { "pools", "pools" },
		{ "rooms", "rooms" },      { "waiting", "waiting" }, { "failures", "failures" },
		{ "pins", "pins" },        { "peers", "peers" },     { "lanes", "lanes" },
		{ "version", "features" },
	};
	int fd = support_hello(&daemon_, "ctl");
	cJSON *json;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(lists); i++) {
		json = support_inspect(fd, lists[i][0], NULL);
		cr_assert(cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(json, lists[i][1])), "%s",
			  lists[i][0]);
		cJSON_Delete(json);
	}
	json = support_inspect(fd, "room", "0x17");
	cr_assert(cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(json, "rooms")));
	cJSON_Delete(json);
	json = support_inspect(fd, "clients", NULL);
	cr_assert_str_eq(
		cJSON_GetObjectItemCaseSensitive(
			cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(json, "clients"), 0),
			"name")
			->valuestring,
		"ctl");
	cJSON_Delete(json);
	close(fd);
}

Test(session, unknown_display_is_refused, .init = setup, .fini = teardown)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;
	int fd = support_hello(&daemon_, "ctl");
	struct support_reply reply;

	body.what = (char *)"weather";
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_NOT_FOUND);
	cr_assert(strstr(reply.text, "weather"), "%s", reply.text);
	body.what = (char *)"room";
	body.arg = (char *)"12cows";
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(reply.text, "12cows"), "%s", reply.text);
	close(fd);
}

/* ---- objects of others */

/* A valid request of that kind with numbers that no session has made. */
static struct support_reply call_sample(int fd, Kvp__ClientMsg__BodyCase body)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	struct support_reply reply = { .status = KVP__STATUS__STATUS_OK };

	for (unsigned i = 0; i < SUPPORT_N_CLIENT; i++) {
		size_t n = support_client_msg(i, buf);
		Kvp__ClientMsg *msg = NULL;

		cr_assert_eq(kvp_msg_decode_client(buf, n, &msg, NULL, 0), 0);
		if (msg->body_case == body)
			reply = support_call(fd, msg, NULL, 0);
		kvp_msg_free_client(msg);
	}
	return reply;
}

Test(session, what_is_not_its_own_does_not_exist, .init = setup, .fini = teardown)
{
	static const Kvp__ClientMsg__BodyCase bodies[] = {
		KVP__CLIENT_MSG__BODY_POOL_PAUSE, KVP__CLIENT_MSG__BODY_POOL_UNREGISTER,
		KVP__CLIENT_MSG__BODY_EXPECT,     KVP__CLIENT_MSG__BODY_OPEN,
		KVP__CLIENT_MSG__BODY_SUBMIT,     KVP__CLIENT_MSG__BODY_RECALL,
		KVP__CLIENT_MSG__BODY_ABORT,      KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER,
	};
	int fd = support_hello(&daemon_, "engine");

	for (size_t i = 0; i < KVP_ARRAY_SIZE(bodies); i++) {
		struct support_reply reply = call_sample(fd, bodies[i]);

		cr_expect_eq(reply.status, KVP__STATUS__STATUS_NOT_FOUND, "body %d: status %d: %s",
			     (int)bodies[i], (int)reply.status, reply.text);
		cr_expect_neq(reply.text[0], 0, "body %d", (int)bodies[i]);
	}
	close(fd);
}

static struct support_reply call_settle(int fd, uint64_t session)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Settle body = KVP__SETTLE__INIT;

	body.session = session;
	msg.body_case = KVP__CLIENT_MSG__BODY_SETTLE;
	msg.settle = &body;
	return support_call(fd, &msg, NULL, 0);
}

Test(session, what_an_ended_session_had_settles, .init = setup, .fini = teardown)
{
	struct support_reply reply;
	Kvp__Entry entry;
	int old = support_connect(&daemon_), fd = support_connect(&daemon_), mem;
	uint64_t first, second;

	reply = call_hello(old, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	first = reply.session;
	close(reply.fd);
	reply = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	second = reply.session;
	close(reply.fd);
	cr_assert(first > 0 && second > first);
	mem = support_memfd(1 << 20);
	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(support_register(old, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	close(old);
	reply = call_settle(fd, first); /* waits for the end, and for the unmap */
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	cr_assert_eq(support_status_number(fd, "pools"), 0);
	reply = call_settle(fd, first);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "nothing is left: %s", reply.text);
	reply = call_settle(fd, second);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_INVALID, "%s", reply.text);
	cr_assert(strstr(reply.text, "no earlier one"), "%s", reply.text);
	assert_lives(fd);
	close(mem);
	close(fd);
}

/* Runs check() as another user in a child of its own. */
static void as_nobody(const struct support_daemon *daemon, bool (*check)(int fd))
{
	char run[128];
	int status;
	pid_t pid;

	snprintf(run, sizeof(run), "%s/run", daemon->dir);
	cr_assert_eq(chmod(daemon->dir, 0755), 0);
	cr_assert_eq(chmod(run, 0755), 0);
	pid = fork();
	if (pid == 0) {
		int fd;

		if (setgid(65534) < 0 || setuid(65534) < 0)
			_exit(2);
		fd = support_connect(daemon);
		_exit(check(fd) ? 0 : 1);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
}

static bool is_denied(int fd)
{
	struct support_reply reply = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);

	return reply.status == KVP__STATUS__STATUS_DENIED && strstr(reply.text, "65534") &&
	       support_closed(fd, 5000);
}

Test(session, unlisted_user_is_told_why)
{
	struct support_daemon daemon;

	if (geteuid() != 0)
		cr_skip_test("needs root to become another user");
	support_daemon_start(&daemon, "[client]\nmode = 0666");
	as_nobody(&daemon, is_denied);
	support_daemon_end(&daemon);
}

static bool sees_no_names(int fd)
{
	bool ok = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX).status ==
		  KVP__STATUS__STATUS_OK;
	cJSON *pools = support_inspect(fd, "pools", NULL);
	cJSON *clients = support_inspect(fd, "clients", NULL);
	const cJSON *pool = cJSON_GetArrayItem(cJSON_GetObjectItem(pools, "pools"), 0);
	const cJSON *theirs = cJSON_GetArrayItem(cJSON_GetObjectItem(clients, "clients"), 0);
	const cJSON *own = cJSON_GetArrayItem(cJSON_GetObjectItem(clients, "clients"), 1);

	ok = ok && pool && cJSON_HasObjectItem(pool, "state") &&
	     !cJSON_HasObjectItem(pool, "label");
	ok = ok && theirs && !cJSON_HasObjectItem(theirs, "name") &&
	     !cJSON_HasObjectItem(theirs, "pid");
	ok = ok && own && cJSON_HasObjectItem(own, "name");
	cJSON_Delete(pools);
	cJSON_Delete(clients);
	return ok;
}

Test(session, names_of_other_users_are_not_shown)
{
	struct support_daemon daemon;
	Kvp__Entry entry;
	int fd, mem;

	if (geteuid() != 0)
		cr_skip_test("needs root to become another user");
	support_daemon_start(&daemon, "[client]\nmode = 0666\n[policy]\nallow = all");
	fd = support_hello(&daemon, "secret name");
	mem = support_memfd(1 << 20);
	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(support_register(fd, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	as_nobody(&daemon, sees_no_names);
	close(mem);
	close(fd);
	support_daemon_end(&daemon);
}

static bool is_not_told(int fd)
{
	struct support_reply reply = call_hello(fd, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);

	/* The session before is the test's, and lives. */
	return reply.status == KVP__STATUS__STATUS_OK &&
	       call_settle(fd, reply.session - 1).status == KVP__STATUS__STATUS_DENIED;
}

Test(session, sessions_of_other_users_are_not_settled)
{
	struct support_daemon daemon;
	int fd;

	if (geteuid() != 0)
		cr_skip_test("needs root to become another user");
	support_daemon_start(&daemon, "[client]\nmode = 0666\n[policy]\nallow = all");
	fd = support_hello(&daemon, "first");
	as_nobody(&daemon, is_not_told);
	close(fd);
	support_daemon_end(&daemon);
}

Test(session, a_user_has_limits_over_all_its_sessions)
{
	struct support_daemon daemon;
	struct support_reply reply;
	Kvp__Entry entry;
	char extra[128];
	int one, two, mem;

	snprintf(extra, sizeof(extra), "[uid.%u]\nmax_pools = 2", geteuid());
	support_daemon_start(&daemon, extra);
	one = support_hello(&daemon, "one");
	two = support_hello(&daemon, "two");
	mem = support_memfd(1 << 20);
	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(support_register(one, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	cr_assert_eq(support_register(two, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	reply = support_register(one, 2, &entry, &mem, 1);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_LIMIT);
	cr_assert(strstr(reply.text, "2") && strstr(reply.text, "max_pools"), "%s", reply.text);
	close(mem);
	close(one);
	close(two);
	support_daemon_end(&daemon);
}

Test(session, a_process_has_part_of_the_connections)
{
	struct support_daemon daemon;
	struct support_reply reply;
	int fds[2], more, status;
	pid_t pid;

	support_daemon_start(&daemon, "[client]\nmax_sessions = 8\nmax_process_sessions = 2");
	for (int i = 0; i < 2; i++)
		fds[i] = support_hello(&daemon, "one of two");
	more = support_connect(&daemon);
	reply = call_hello(more, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_LIMIT);
	cr_assert(strstr(reply.text, "has 2 connections, at most 2") &&
			  strstr(reply.text, "client.max_process_sessions"),
		  "%s", reply.text);
	cr_assert(support_closed(more, 5000));
	close(more);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0) {
		(void)support_hello(&daemon, "another process");
		_exit(7);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
	for (int i = 0; i < 2; i++)
		close(fds[i]);
	support_daemon_end(&daemon);
}

Test(session, a_user_has_part_of_the_connections)
{
	struct support_daemon daemon;
	struct support_reply reply;
	char extra[128];
	int fds[3], more, n = 0;
	cJSON *status, *limit;

	snprintf(extra, sizeof(extra), "[uid.%u]\nmax_sessions = 3\nadmin = yes", geteuid());
	support_daemon_start(&daemon, extra);
	for (int i = 0; i < 3; i++)
		fds[i] = support_hello(&daemon, "one of three");
	more = support_connect(&daemon);
	reply = call_hello(more, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_LIMIT);
	cr_assert(strstr(reply.text, "has 3 connections, at most 3") &&
			  strstr(reply.text, "max_sessions of [uid.N]"),
		  "%s", reply.text);
	cr_assert(support_closed(more, 5000));
	close(more);
	status = support_inspect(fds[0], "status", NULL);
	cJSON_ArrayForEach (limit, cJSON_GetObjectItem(status, "limits")) {
		if (strcmp(cJSON_GetObjectItem(limit, "of")->valuestring, "user") != 0)
			continue;
		cr_assert_eq(cJSON_GetObjectItem(limit, "used")->valueint, 3);
		cr_assert_eq(cJSON_GetObjectItem(limit, "max")->valueint, 3);
		cr_assert_eq(cJSON_GetObjectItem(limit, "refused")->valueint, 1);
		n++;
	}
	cr_assert_eq(n, 1);
	cJSON_Delete(status);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	support_daemon_end(&daemon);
}

/* A network of its own with a name server that never answers; false: we may not. */
static bool silent_name_server(const char *dir)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(53) };
	struct ifreq ifr = { .ifr_name = "lo" };
	char path[128];
	FILE *file;
	int fd;

	if (unshare(CLONE_NEWNS | CLONE_NEWNET) < 0 ||
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return false;
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	cr_assert(fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &ifr) == 0);
	ifr.ifr_flags |= IFF_UP;
	cr_assert(ioctl(fd, SIOCSIFFLAGS, &ifr) == 0);
	/* As long as the test: nobody reads from it. */
	cr_assert_eq(bind(fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
	snprintf(path, sizeof(path), "%s/resolv.conf", dir);
	file = fopen(path, "we");
	cr_assert(file && fputs("nameserver 127.0.0.1\n", file) >= 0 && fclose(file) == 0);
	return mount(path, "/etc/resolv.conf", NULL, MS_BIND, NULL) == 0;
}

Test(session, a_name_server_that_is_silent_does_not_hold_up_the_stop)
{
	struct support_daemon daemon;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Renew body = KVP__RENEW__INIT;
	struct support_reply reply;
	int fd;

	support_daemon_prepare(&daemon, "[peer]\nlisten = 127.0.0.1:0\nplaintext = trusted\n"
					"[ucx]\ntcp_network = trusted");
	if (!silent_name_server(daemon.dir)) {
		support_daemon_clean(&daemon);
		cr_skip_test("needs namespaces of its own");
	}
	support_daemon_run(&daemon);
	fd = support_hello(&daemon, "engine");
	body.address = (char *)"nobody.kvpack.example:7470";
	body.room = 1;
	body.lease_ms = 60000;
	msg.body_case = KVP__CLIENT_MSG__BODY_RENEW;
	msg.renew = &body;
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	cr_assert_eq(support_daemon_stop(&daemon), 0);
	cr_assert(support_log_has(&daemon, "without waiting for the name of a peer"));
	close(fd);
	support_daemon_clean(&daemon);
}

Test(session, stop_tells_the_clients, .init = setup)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(support_register(fd, 1, &entry, &mem, 1).status, KVP__STATUS__STATUS_OK);
	cr_assert_eq(support_daemon_stop(&daemon_), 0);
	cr_assert(support_closed(fd, 1000));
	close(mem);
	close(fd);
	support_daemon_clean(&daemon_);
}

/* With peers, the transport's library is there, which has handlers of its own. */
Test(session, a_reload_is_refused_in_words_and_ends_nothing)
{
	struct support_daemon daemon;
	int fd;

	support_daemon_start(&daemon, "[peer]\nlisten = 127.0.0.1:0");
	fd = support_hello(&daemon, "engine");
	cr_assert_eq(kill(daemon.pid, SIGHUP), 0);
	for (int i = 0; i < 500 && !support_log_has(&daemon, "SIGHUP"); i++)
		support_sleep_ms(10);
	cr_assert(support_log_has(&daemon, "the configuration is read at start only"));
	assert_lives(fd);
	close(fd);
	support_daemon_end(&daemon);
}

/* ---- the socket */

Test(session, daemon_without_descriptors_pauses_and_recovers)
{
	struct support_daemon daemon;
	struct rlimit limit, old;
	int fds[8], n = 0, late;

	support_daemon_start(&daemon, NULL);
	cr_assert_eq(prlimit(daemon.pid, RLIMIT_NOFILE, NULL, &old), 0);
	/* A session takes two: three fit. */
	limit = old;
	limit.rlim_cur = daemon.fds_at_start + 7;
	cr_assert_eq(prlimit(daemon.pid, RLIMIT_NOFILE, &limit, NULL), 0);
	for (n = 0; n < 8; n++)
		fds[n] = support_connect(&daemon); /* the backlog takes them all */
	late = fds[7];
	for (int i = 0; i < 200 && !support_log_has(&daemon, "accept:"); i++)
		support_sleep_ms(10);
	cr_assert(support_log_has(&daemon, "accept:"));
	cr_assert(support_log_has(&daemon, "LimitNOFILE="));
	for (int i = 0; i < 7; i++)
		close(fds[i]);
	cr_assert_eq(call_hello(late, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX).status,
		     KVP__STATUS__STATUS_OK);
	close(late);
	cr_assert_eq(prlimit(daemon.pid, RLIMIT_NOFILE, &old, NULL), 0);
	support_daemon_end(&daemon);
}

/* Starts it with such a limit, hard and soft; what it exits with, or -1: it serves, and is stopped.
 */
static int start_with_files(struct support_daemon *daemon, rlim_t soft, rlim_t hard)
{
	struct rlimit limit = { .rlim_cur = soft, .rlim_max = hard };
	char program[4096];
	int status;

	support_program(program, sizeof(program), "kvpackd");
	remove(daemon->log); /* of the one before */
	daemon->pid = fork();
	if (daemon->pid == 0) {
		int log = open(daemon->log, O_WRONLY | O_CREAT, 0600);

		dup2(log, STDERR_FILENO);
		close(log);
		setrlimit(RLIMIT_NOFILE, &limit);
		execl(program, program, "--config", daemon->config, (char *)NULL);
		_exit(127);
	}
	while (!support_log_has(daemon, "serves")) {
		if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		support_sleep_ms(5);
	}
	cr_assert_eq(support_daemon_stop(daemon), 0);
	return -1;
}

Test(session, too_few_descriptors_are_named_at_start)
{
	struct support_daemon daemon;

	if (getenv("KVP_WRAP")) /* valgrind needs more itself; .ci/run has it in other stages */
		cr_skip_test("under valgrind a process does not start with 24 descriptors");
	support_daemon_prepare(&daemon, "[client]\nmax_sessions = 100\n");
	cr_assert_eq(start_with_files(&daemon, 24, 24), 1);
	cr_assert(
		support_log_has(&daemon, "RLIMIT_NOFILE is 24 open files, 64 are needed to start"));
	cr_assert(support_log_has(&daemon, "LimitNOFILE=65536"));

	/* Enough to start, not for all. */
	cr_assert_eq(start_with_files(&daemon, 100, 100), -1);
	cr_assert(support_log_has(&daemon,
				  "RLIMIT_NOFILE is 100 open files, client.max_sessions = 100"));
	cr_assert(support_log_has(&daemon, "may need 632"));
	cr_assert(support_log_has(&daemon, "LimitNOFILE=65536"));

	/* What it may raise it raises. */
	cr_assert_eq(start_with_files(&daemon, 24, 1000), -1);
	cr_assert(!support_log_has(&daemon, "RLIMIT_NOFILE"));
	daemon.pid = 0;
	support_daemon_clean(&daemon);
}

static void leave_stale_socket(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	cr_assert_eq(bind(fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
	close(fd);
}

Test(session, stale_socket_is_replaced_and_a_living_one_is_not)
{
	struct support_daemon daemon, second;
	char run[128], program[4096];
	int status;
	pid_t pid;

	support_daemon_prepare(&daemon, NULL);
	snprintf(run, sizeof(run), "%s/run", daemon.dir);
	cr_assert_eq(mkdir(run, 0750), 0);
	leave_stale_socket(daemon.socket);
	support_daemon_run(&daemon);

	second = daemon;
	snprintf(second.log, sizeof(second.log), "%s/log2", daemon.dir);
	support_program(program, sizeof(program), "kvpackd");
	pid = fork();
	if (pid == 0) {
		int log = open(second.log, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

		dup2(log, STDERR_FILENO);
		execl(program, program, "--config", second.config, (char *)NULL);
		_exit(127);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %x", status);
	cr_assert(support_log_has(&second, "another daemon serves"));
	remove(second.log);
	close(support_hello(&daemon, "still served"));
	support_daemon_end(&daemon);
}

Test(session, socket_has_mode_and_directory_as_configured)
{
	struct support_daemon daemon;
	struct stat st;
	char run[128];

	support_daemon_start(&daemon, "[client]\nmode = 0600");
	cr_assert_eq(stat(daemon.socket, &st), 0);
	cr_assert_eq(st.st_mode & 07777, 0600);
	snprintf(run, sizeof(run), "%s/run", daemon.dir);
	cr_assert_eq(stat(run, &st), 0);
	cr_assert_eq(st.st_mode & 0777, 0750);
	support_daemon_end(&daemon);
}

/* systemd's way: the listening socket is descriptor 3, and ready is told to a datagram socket. */
Test(session, takes_a_socket_from_its_manager_and_tells_when_ready)
{
	struct support_daemon daemon;
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	char notify[100], text[64] = "", program[4096], pid_text[16];
	int listener, manager, fd;
	cJSON *status;
	ssize_t n;

	support_daemon_prepare(&daemon, NULL);
	snprintf(daemon.socket, sizeof(daemon.socket), "%s/act", daemon.dir);
	snprintf(notify, sizeof(notify), "%s/notify", daemon.dir);
	manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", notify);
	cr_assert_eq(bind(manager, (struct sockaddr *)&addr, sizeof(addr)), 0);
	listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", daemon.socket);
	cr_assert_eq(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
	cr_assert_eq(listen(listener, 8), 0);

	support_program(program, sizeof(program), "kvpackd");
	daemon.pid = fork();
	if (daemon.pid == 0) {
		snprintf(pid_text, sizeof(pid_text), "%d", (int)getpid());
		setenv("LISTEN_PID", pid_text, 1);
		setenv("LISTEN_FDS", "1", 1);
		setenv("NOTIFY_SOCKET", notify, 1);
		if (listener != 3)
			dup2(listener, 3);
		else
			fcntl(3, F_SETFD, 0);
		execl(program, program, "--config", daemon.config, (char *)NULL);
		_exit(127);
	}
	n = recv(manager, text, sizeof(text) - 1, 0);
	cr_assert_gt(n, 0);
	cr_assert_str_eq(text, "READY=1");
	close(listener);
	fd = support_hello(&daemon, "activated");
	status = support_inspect(fd, "status", "");
	cr_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(status, "socket")), daemon.socket,
			 "not the one of the configuration");
	cJSON_Delete(status);
	close(fd);
	cr_assert_eq(support_daemon_stop(&daemon), 0);
	memset(text, 0, sizeof(text));
	n = recv(manager, text, sizeof(text) - 1, MSG_DONTWAIT);
	cr_assert_gt(n, 0);
	cr_assert_str_eq(text, "STOPPING=1");
	close(manager);
	cr_assert_eq(access(daemon.socket, F_OK), 0, "the manager's file is not the daemon's");
	remove(daemon.socket);
	remove(notify);
	support_daemon_clean(&daemon);
}

static int run_kvpackd(const char *arg, const char *value)
{
	char program[4096];
	int status;
	pid_t pid;

	support_program(program, sizeof(program), "kvpackd");
	pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

		dup2(null, STDOUT_FILENO);
		dup2(null, STDERR_FILENO);
		execl(program, program, arg, value, (char *)NULL);
		_exit(127);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status));
	return WEXITSTATUS(status);
}

Test(session, exit_statuses)
{
	cr_assert_eq(run_kvpackd("--version", NULL), 0);
	cr_assert_eq(run_kvpackd("--help", NULL), 0);
	cr_assert_eq(run_kvpackd("--check-config", NULL), 0);
	cr_assert_eq(run_kvpackd("--frobnicate", NULL), 2);
	cr_assert_eq(run_kvpackd("stray", NULL), 2);
	cr_assert_eq(run_kvpackd("--config", "/nowhere/at/all"), 2);
}
