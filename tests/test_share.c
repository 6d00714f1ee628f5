/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/server.h"
#include "proto/msg.h"
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

static int greet(void)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello body = KVP__HELLO__INIT;
	uint64_t until = uv_hrtime() + UINT64_C(20000000000);
	int fd = core_connect(&rig);

	cr_assert_geq(fd, 0);
	body.version_min = body.version_max = KVP_PROTO_VERSION_MAX;
	body.name = (char *)"one";
	body.pid = (uint32_t)getpid();
	msg.id = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &body;
	cr_assert(send_msg(fd, &msg));
	while (replies(fd) == 0) {
		cr_assert_lt(uv_hrtime(), until);
		core_turn(&rig, true);
	}
	cr_assert_eq(rig.core.server->sessions->prev->state, KVP_SESSION_UP);
	return fd;
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
	uint64_t until = uv_hrtime() + UINT64_C(30000000000);

	while (!session->resting) {
		cr_assert_lt(uv_hrtime(), until, "it never rests");
		session->taken_ns = 10000000;
		session->read_ns = kvp_core_now_ns();
		core_turn(&rig, false);
	}
}

/* It is not read while it rests, others are, and nothing that it asks is lost. */
Test(share, who_takes_all_rests, .init = setup, .fini = teardown)
{
	int loud = greet(), quiet = greet();
	struct kvp_session *session = rig.core.server->sessions;
	uint64_t until = uv_hrtime() + UINT64_C(30000000000);
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
			cr_assert_lt(uv_hrtime(), until, "%u of %u are answered", done, sent);
			core_turn(&rig, true);
			done += replies(loud);
		}
	}
	close(loud);
	close(quiet);
}

/* What was sent before the end is read, also while its sender rests: the last is answered before
 * the connection ends. */
Test(share, who_rests_and_goes_has_been_read, .init = setup, .fini = teardown)
{
	int loud = greet();
	uint64_t until = uv_hrtime() + UINT64_C(30000000000), before;
	unsigned sent = 0;

	for (int i = 0; i < 40 && send_abort(loud); i++)
		sent++;
	has_taken_much(rig.core.server->sessions);
	before = rig.core.server->requests;
	cr_assert_gt(sent + 1, before, "all was read already");
	shutdown(loud, SHUT_WR);
	while (rig.core.server->requests < sent + 1 && rig.core.server->sessions) {
		cr_assert_lt(uv_hrtime(), until);
		core_turn(&rig, true);
		(void)replies(loud);
	}
	cr_assert_eq(rig.core.server->requests, sent + 1);
}
