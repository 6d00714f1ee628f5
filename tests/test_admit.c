/* SPDX-License-Identifier: Apache-2.0 */
/* Who gets in when all connections are taken: whoever only looks, a few at a time, for a while. */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "proto/limits.h"
#include "proto/msg.h"
#include "tests/support.h"

#define NOBODY 65534
#define SESSIONS 4
#define FLOOD 60 /* more than the daemon keeps to tell them why */
#define CONFIG "[client]\nmax_sessions = 4\nmax_process_sessions = 4\nmode = 0666\n"

TestSuite(admit, .timeout = 60);

static struct support_daemon daemon_;
static int fds[SESSIONS];

/* A daemon all of whose connections are taken. */
static void begin(const char *extra)
{
	char config[256];

	snprintf(config, sizeof(config), CONFIG "%s", extra);
	support_daemon_start(&daemon_, config);
	for (int i = 0; i < SESSIONS; i++)
		fds[i] = support_hello(&daemon_, "engine");
}

static void end(void)
{
	for (int i = 0; i < SESSIONS; i++)
		close(fds[i]);
	support_daemon_end(&daemon_);
}

static struct support_reply greet(int fd, bool observer)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	struct support_reply reply;

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.name = (char *)"operator";
	hello.pid = (uint32_t)getpid();
	hello.observer = observer;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	reply = support_call(fd, &msg, NULL, 0);
	if (reply.fd >= 0)
		close(reply.fd);
	return reply;
}

static int observer(void)
{
	int fd = support_connect(&daemon_);
	struct support_reply reply = greet(fd, true);

	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	return fd;
}

static bool told(bool as_observer, const char *text)
{
	int fd = support_connect(&daemon_);
	struct support_reply reply = greet(fd, as_observer);
	bool ended = support_closed(fd, 5000);

	close(fd);
	if (!ended || reply.status != KVP__STATUS__STATUS_LIMIT)
		return false;
	return strstr(reply.text, "4 clients are connected, at most 4 (client.max_sessions)") &&
	       strstr(reply.text, text);
}

static void is_refused(bool as_observer, const char *text)
{
	cr_assert(told(as_observer, text), "%s", text);
}

static void reserve_has(int fd, int used, int refused)
{
	cJSON *status = support_inspect(fd, "status", NULL);
	const cJSON *limit, *found = NULL;

	cJSON_ArrayForEach (limit, cJSON_GetObjectItem(status, "limits")) {
		const cJSON *name = cJSON_GetObjectItem(limit, "name");

		if (strcmp(cJSON_GetStringValue(name), "observers beyond these") == 0)
			found = limit;
	}
	cr_assert(found);
	cr_assert_eq(cJSON_GetObjectItem(found, "used")->valueint, used);
	cr_assert_eq(cJSON_GetObjectItem(found, "max")->valueint, 8);
	cr_assert_eq(cJSON_GetObjectItem(found, "refused")->valueint, refused);
	cJSON_Delete(status);
}

static int refused_sessions(int fd)
{
	cJSON *status = support_inspect(fd, "status", NULL);
	const cJSON *limit = cJSON_GetArrayItem(cJSON_GetObjectItem(status, "limits"), 0);
	int n = cJSON_GetObjectItem(limit, "refused")->valueint;

	cr_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(limit, "name")),
			 "client.max_sessions");
	cJSON_Delete(status);
	return n;
}

/* A process with connections of its own, as that user. */
static pid_t process(uid_t uid, int n, bool greets)
{
	int pipe_fds[2];
	pid_t pid;
	char ok;

	cr_assert_eq(pipe(pipe_fds), 0);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0) {
		if (uid && (setgid(uid) < 0 || setuid(uid) < 0))
			_exit(2);
		while (n-- > 0) {
			int fd = support_connect(&daemon_);

			if (greets && greet(fd, true).status != KVP__STATUS__STATUS_OK)
				_exit(1);
		}
		if (write(pipe_fds[1], "", 1) != 1)
			_exit(2);
		for (;;)
			(void)pause();
	}
	close(pipe_fds[1]);
	cr_assert_eq(read(pipe_fds[0], &ok, 1), 1, "it does not get in");
	close(pipe_fds[0]);
	return pid;
}

static void process_end(pid_t pid)
{
	cr_assert_eq(kill(pid, SIGKILL), 0);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

/* The exit status of kvpackctl. */
static int ctl(const char *args, const char *shows)
{
	char program[4096], command[4600], out[16384];
	size_t n;
	int status;
	FILE *p;

	support_program(program, sizeof(program), "kvpackctl");
	snprintf(command, sizeof(command), "%s --socket %s %s 2>&1", program, daemon_.socket, args);
	p = popen(command, "r");
	cr_assert(p);
	n = fread(out, 1, sizeof(out) - 1, p);
	out[n] = 0;
	status = pclose(p);
	cr_assert(strstr(out, shows), "kvpackctl %s: %s", args, out);
	return WEXITSTATUS(status);
}

Test(admit, an_operator_sees_why_nobody_gets_in)
{
	begin("stall = 60s\n");
	is_refused(false, "");
	/* A limit that is reached is worth a look: status 1. */
	cr_assert_eq(ctl("status", "limit reached: client.max_sessions is 4; 1 refused so far"), 1);
	cr_assert_eq(ctl("clients", "engine"), 0);
	(void)ctl("drain --reason night", "night");
	(void)ctl("undrain", "");
	end();
}

Test(admit, observers_may_only_look)
{
	int mem = support_memfd(1 << 20), fd;
	struct support_reply reply;
	Kvp__Entry entry;

	begin("stall = 60s\n");
	support_entry(&entry, 0, 256, 64);
	fd = observer();
	reply = support_register(fd, 1, &entry, &mem, 1);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_DENIED);
	cr_assert(strstr(reply.text, "hello.observer"), "%s", reply.text);
	reserve_has(fd, 1, 0);
	close(fd);

	close(fds[0]); /* and with a connection that anybody may have */
	while (support_status_number(fds[1], "clients") > SESSIONS - 1)
		support_sleep_ms(5);
	fds[0] = observer();
	reply = support_register(fds[0], 1, &entry, &mem, 1);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_DENIED);
	reserve_has(fds[0], 0, 0);
	cr_assert_eq(refused_sessions(fds[0]), 0, "nobody was refused");
	close(mem);
	end();
}

Test(admit, the_reserve_has_an_end)
{
	pid_t pids[3];
	int own[2];

	begin("stall = 60s\n");
	own[0] = observer();
	own[1] = observer();
	is_refused(true, "2 of a process) those of one process are taken");
	for (int i = 0; i < 3; i++)
		pids[i] = process(0, 2, true);
	reserve_has(own[0], 8, 1);
	is_refused(true, "of the 8 beyond that for observers");
	is_refused(true, "all are taken");
	reserve_has(own[0], 8, 3);
	for (int i = 0; i < 3; i++)
		process_end(pids[i]);
	cr_assert_eq(refused_sessions(own[0]), 0, "they count where they were refused");
	close(own[0]);
	close(own[1]);
	end();
}

Test(admit, others_than_administrators_have_half)
{
	pid_t pids[2], pid;
	char run[128];
	int status;

	if (geteuid() != 0)
		cr_skip_test("needs root to become another user");
	begin("stall = 60s\n[policy]\nallow = all\n");
	snprintf(run, sizeof(run), "%s/run", daemon_.dir);
	cr_assert_eq(chmod(daemon_.dir, 0755), 0);
	cr_assert_eq(chmod(run, 0755), 0);
	pids[0] = process(NOBODY, 2, true);
	pids[1] = process(NOBODY, 2, true);
	pid = fork();
	if (pid == 0) {
		if (setgid(NOBODY) < 0 || setuid(NOBODY) < 0)
			_exit(2);
		_exit(told(true, "those of users who are no administrators are taken") ? 0 : 1);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
	close(observer());
	process_end(pids[0]);
	process_end(pids[1]);
	end();
}

Test(admit, nobody_keeps_a_connection_of_the_reserve)
{
	uint64_t until = support_now_ms() + 20000;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect inspect = KVP__INSPECT__INIT;
	uint8_t ask[64];
	long n;
	int fd;

	inspect.what = (char *)"clients";
	inspect.arg = (char *)"";
	msg.id = 7;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &inspect;
	n = kvp_msg_encode_client(&msg, ask, sizeof(ask));
	begin("stall = 300ms\n");
	fd = observer();
	while (!support_closed(fd, 5)) {                         /* which reads what was answered */
		(void)support_send(fd, ask, (size_t)n, NULL, 0); /* it may have ended now */
		cr_assert_lt(support_now_ms(), until, "it asks on");
	}
	close(fd);
	for (int i = 0; i < 500 && !support_log_has(&daemon_, "had a connection of the reserve");
	     i++)
		support_sleep_ms(10);
	cr_assert(support_log_has(&daemon_, "had a connection of the reserve for 300 ms"));
	close(observer());
	end();
}

Test(admit, silent_connections_keep_nobody_out)
{
	pid_t pids[6];

	begin("stall = 60s\n");
	pids[0] = process(0, FLOOD, false);
	cr_assert_eq(ctl("status", "client.max_sessions"), 1);
	for (int i = 1; i < 6; i++)
		pids[i] = process(0, 8, false);
	cr_assert_eq(ctl("status", "client.max_sessions"), 1);
	for (int i = 0; i < 6; i++)
		process_end(pids[i]);
	end();
}
