/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/server.h"
#include "proto/msg.h"
#include "tests/support_clock.h"
#include "tests/support_core.h"

/*
 * How sessions share the loop: what kvpackd is made of, in this process, on a loop that is turned
 * by hand, so that turns can be counted.
 */

TestSuite(share, .timeout = 60);

#define PER_TURN 8u /* packets of one session */

static struct core_rig rig;

static void setup(void)
{
	core_init(&rig);
	core_start(&rig);
}

static void teardown(void)
{
	core_stop(&rig);
}

/* ---- clients -------------------------------------------------------------------------------- */

static bool send_msg(int fd, const Kvp__ClientMsg *msg)
{
	uint8_t buf[512];
	long n = kvp_msg_encode_client(msg, buf, sizeof(buf));

	cr_assert_gt(n, 0);
	return kvp_packet_send(fd, buf, (size_t)n, NULL, 0) == 0;
}

/* Of a room that is not there. */
static bool send_abort(int fd)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Abort body = KVP__ABORT__INIT;

	body.handle = 5;
	msg.id = 9;
	msg.body_case = KVP__CLIENT_MSG__BODY_ABORT;
	msg.abort = &body;
	return send_msg(fd, &msg);
}

/* So many packets have come; they are read. */
static unsigned replies(int fd)
{
	uint8_t buf[2048];
	unsigned n = 0;

	while (recv(fd, buf, sizeof(buf), MSG_DONTWAIT) > 0)
		n++;
	return n;
}

static int greet_on(int fd)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello body = KVP__HELLO__INIT;
	uint64_t until = support_clock_ns() + UINT64_C(20000000000);

	cr_assert_geq(fd, 0);
	body.version_min = body.version_max = KVP_PROTO_VERSION_MAX;
	body.name = (char *)"one";
	body.pid = (uint32_t)getpid();
	msg.id = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &body;
	cr_assert(send_msg(fd, &msg));
	while (replies(fd) == 0) {
		cr_assert_lt(support_clock_ns(), until);
		core_turn(&rig, true);
	}
	cr_assert_eq(rig.core.server->sessions->prev->state, KVP_SESSION_UP);
	return fd;
}

static int greet(void)
{
	return greet_on(core_connect(&rig));
}

/* As a process of its own, which lives until it is killed: the kernel tells who has connected. */
static int greet_as_other(pid_t *pid)
{
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int done[2];
	char byte;

	cr_assert(fd >= 0 && pipe(done) == 0);
	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", rig.config.client.socket);
	*pid = fork();
	cr_assert_geq(*pid, 0);
	if (*pid == 0) {
		if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0)
			(void)!write(done[1], "1", 1); /* the test fails without it */
		for (;;)
			(void)pause();
	}
	cr_assert_eq(read(done[0], &byte, 1), 1);
	(void)close(done[0]);
	(void)close(done[1]);
	return greet_on(fd);
}

static void end_other(pid_t pid)
{
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

/* ---- tests ---------------------------------------------------------------------------------- */

Test(share, a_turn_has_something_of_each, .init = setup, .fini = teardown)
{
	int loud = greet(), quiet = greet();
	unsigned done = 0, turns = 0;

	for (int i = 0; i < 60; i++)
		cr_assert(send_abort(loud));
	cr_assert(send_abort(quiet));
	core_turn(&rig, false);
	cr_assert_eq(replies(quiet), 1u);
	done = replies(loud);
	cr_assert(done > 0 && done <= PER_TURN, "%u in the first turn", done);
	while (done < 60 && turns++ < 100000) {
		unsigned n;

		core_turn(&rig, turns % 16 == 0); /* it may rest: then time has to pass */
		n = replies(loud);
		cr_assert_leq(n, 2 * PER_TURN); /* one that waits may be two */
		done += n;
	}
	cr_assert_eq(done, 60u);
	close(loud);
	close(quiet);
}

/* The first that has greeted has taken so much that it rests after its next packets. */
static void has_taken_much(struct kvp_session *session)
{
	uint64_t until = support_clock_ns() + UINT64_C(30000000000);

	while (!session->process->resting) {
		cr_assert_lt(support_clock_ns(), until, "it never rests");
		session->process->taken_ns = 10000000;
		session->process->read_ns = kvp_core_now_ns();
		core_turn(&rig, false);
	}
}

/* It is not read while it rests, others are, and nothing that it asks is lost. */
Test(share, who_takes_all_rests, .init = setup, .fini = teardown)
{
	pid_t pid;
	int loud = greet(), quiet = greet_as_other(&pid);
	struct kvp_session *session = rig.core.server->sessions;
	uint64_t until = support_clock_ns() + UINT64_C(30000000000);
	unsigned sent = 0, done = 0;

	for (unsigned round = 1; round <= 5; round++) {
		for (int i = 0; i < 40 && send_abort(loud); i++)
			sent++;
		has_taken_much(session);
		cr_assert_geq(rig.core.server->rests, round);
		done += replies(loud);
		cr_assert(send_abort(quiet));
		core_turn(&rig, false);
		cr_assert_eq(replies(quiet), 1u);
		while (done < sent) {
			cr_assert_lt(support_clock_ns(), until, "%u of %u are answered", done,
				     sent);
			core_turn(&rig, true);
			done += replies(loud);
		}
	}
	close(loud);
	close(quiet);
	end_other(pid);
}

/* Connections of one process have a turn together, and each something of it. */
Test(share, more_connections_get_no_more, .init = setup, .fini = teardown)
{
	int fds[4];
	unsigned n = 0;

	for (int i = 0; i < 4; i++)
		fds[i] = greet();
	for (int i = 0; i < 4; i++)
		for (unsigned k = 0; k < 2 * PER_TURN; k++)
			cr_assert(send_abort(fds[i]));
	core_turn(&rig, false);
	for (int i = 0; i < 4; i++) {
		unsigned had = replies(fds[i]);

		cr_assert_gt(had, 0u);
		n += had;
	}
	cr_assert_leq(n, PER_TURN + 3);
	for (int i = 0; i < 4; i++)
		close(fds[i]);
}

/* Nor does whoever connects again and again: what it has had is remembered. */
Test(share, a_new_connection_rests_too, .init = setup, .fini = teardown)
{
	int fd = greet();
	struct kvp_process *process = rig.core.server->sessions->process;
	uint64_t until = support_clock_ns() + UINT64_C(20000000000), rests;

	process->taken_ns = UINT64_C(3600000000000); /* an hour */
	close(fd);
	while (rig.core.server->sessions) {
		cr_assert_lt(support_clock_ns(), until);
		core_turn(&rig, true);
	}
	rests = rig.core.server->rests;
	fd = core_connect(&rig);
	while (!rig.core.server->sessions) {
		cr_assert_lt(support_clock_ns(), until);
		core_turn(&rig, true);
	}
	cr_assert_eq(rig.core.server->sessions->process, process);
	cr_assert_gt(rig.core.server->rests, rests);
	close(fd);
}

/* What was sent before the end is read, also while its sender rests: the last is answered before
 * the connection ends. */
Test(share, who_rests_and_goes_has_been_read, .init = setup, .fini = teardown)
{
	int loud = greet();
	uint64_t until = support_clock_ns() + UINT64_C(30000000000), before;
	unsigned sent = 0;

	for (int i = 0; i < 40 && send_abort(loud); i++)
		sent++;
	has_taken_much(rig.core.server->sessions);
	before = rig.core.server->requests;
	cr_assert_gt(sent + 1, before, "all was read already");
	shutdown(loud, SHUT_WR);
	while (rig.core.server->requests < sent + 1 && rig.core.server->sessions) {
		cr_assert_lt(support_clock_ns(), until);
		core_turn(&rig, true);
		(void)replies(loud);
	}
	cr_assert_eq(rig.core.server->requests, sent + 1);
}
