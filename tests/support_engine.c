/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_engine.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ANSWER_MS (FAULT_SECS * 1000u)
#define FLOOD_MAX 100000u

/* ---- in the engine's process ---------------------------------------------------------------- */

struct self {
	int fd;
	struct fault_room *room;
	struct fault_end *end;
	bool is_dst;
	struct kvp_fence *fence;
	uint64_t fence_value;
};

static struct self self; /* of the engine's process */

static void fence_chunk(struct kvp_chunk *chunk)
{
	chunk->fence = self.fence;
	chunk->fence_value = ++self.fence_value;
}

/* The number may still be in use: its last life is over for one end before it is for the other. */
static int announce(int (*try)(struct fault_room *room))
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	int rc;

	(void)kvp_process(self.end->client);
	while ((rc = try(self.room)) < 0 &&
	       kvp_last_status(self.end->client) == KVP_STATUS_EXISTS && rig_now_ns() < until)
		(void)kvp_wait(self.end->client, 2);
	return rc;
}

static bool is_session(int fd)
{
	struct sockaddr_un addr = { 0 };
	socklen_t bytes = sizeof(addr);

	return getpeername(fd, (struct sockaddr *)&addr, &bytes) == 0 &&
	       addr.sun_family == AF_UNIX && !strcmp(addr.sun_path, self.end->daemon->socket);
}

/* The library's connection to the daemon: of the sockets that it watches. */
static int session_fd(void)
{
	char path[64], line[256];
	int fd, found = -1;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", kvp_client_fd(self.end->client));
	file = fopen(path, "re");
	RIG_REQUIRE(file, "%s: %s", path, strerror(errno));
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, "tfd:", 4) != 0)
			continue;
		fd = (int)strtol(line + 4, NULL, 10);
		if (is_session(fd))
			found = fd;
	}
	(void)fclose(file);
	RIG_REQUIRE(found >= 0, "no session");
	return found;
}

static void ignored(void *arg, enum kvp_status status, const char *text)
{
	(void)arg;
	(void)status;
	(void)text;
}

static void flood(void)
{
	struct pollfd pfd = { .fd = session_fd() }; /* only whether the daemon has hung up */
	struct kvp_client *client = self.end->client;
	const char *address = self.end->daemon->address;
	uint32_t i;
	int rc = 0;

	for (i = 0; i < FLOOD_MAX && rc == 0; i++)
		rc = kvp_renew(client, address, 99, NULL, 0, 1000, ignored, NULL);
	RIG_REQUIRE(rc < 0, "the daemon takes everything");
	RIG_REQUIRE(poll(&pfd, 1, ANSWER_MS) == 1, "the session goes on");
}

static int obey(const struct engine_order *order)
{
	struct kvp_client *client = self.end->client;

	self.room->timers = order->timers;
	self.room->n_missing = order->n_missing;
	switch (order->op) {
	case ENGINE_CONNECT:
		fault_connect(self.end, self.is_dst ? "decode" : "prefill");
		return kvp_fence_create(self.end->client, 1, &self.fence);
	case ENGINE_EXPECT:
		return announce(fault_try_expect);
	case ENGINE_OPEN:
		return announce(fault_try_open);
	case ENGINE_SUBMIT_FENCED:
		self.room->on_chunk = fence_chunk;
		/* fall through */
	case ENGINE_SUBMIT: {
		int rc = fault_try_submit(self.room, (enum fault_part)order->arg);

		self.room->on_chunk = NULL;
		return rc;
	}
	case ENGINE_SIGNAL:
		kvp_fence_signal(self.fence, 0, self.fence_value);
		return 0;
	case ENGINE_STATE:
		(void)kvp_process(client);
		return 0;
	case ENGINE_WAIT:
		return kvp_room_wait(client, self.end->room, (enum kvp_wait_for)order->arg,
				     ANSWER_MS);
	case ENGINE_DELIVERED:
		return kvp_room_wait_delivered(client, self.end->room, order->arg, ANSWER_MS);
	case ENGINE_ABORT:
		return kvp_abort(client, self.end->room, "thought better of it");
	case ENGINE_FORGET:
		kvp_room_forget(client, self.end->room);
		self.end->room = 0;
		return 0;
	case ENGINE_CUT:
		return shutdown(session_fd(), SHUT_RDWR) < 0 ? -errno : 0;
	case ENGINE_FLOOD:
		flood();
		return 0;
	}
	return -EINVAL;
}

static void order_take(void)
{
	struct engine_order order;
	struct engine_answer answer = { .state = KVP_ROOM_STATE_INIT };

	if (recv(self.fd, &order, sizeof(order), 0) != sizeof(order))
		_exit(0); /* nobody is there any more */
	answer.rc = obey(&order);
	answer.at_ns = rig_now_ns();
	if (answer.rc == 0 && self.end->room &&
	    kvp_room_state(self.end->client, self.end->room, &answer.state) == 0)
		snprintf(answer.reason, sizeof(answer.reason), "%s", answer.state.reason);
	else if (answer.rc < 0)
		snprintf(answer.reason, sizeof(answer.reason), "%s",
			 kvp_last_error(self.end->client));
	RIG_REQUIRE(send(self.fd, &answer, sizeof(answer), MSG_NOSIGNAL) == sizeof(answer));
}

static void engine_main(void *arg)
{
	struct pollfd fds[2] = { { .fd = self.fd, .events = POLLIN }, { .fd = -1 } };

	(void)arg;
	for (;;) {
		int ms = -1;

		if (self.end->client) {
			fds[1].fd = kvp_client_fd(self.end->client);
			fds[1].events = kvp_client_events(self.end->client);
			ms = kvp_client_timeout(self.end->client);
		}
		if (poll(fds, 2, ms) < 0)
			continue;
		if (fds[0].revents)
			order_take();
		else if (self.end->client)
			(void)kvp_process(self.end->client);
	}
}

/* ---- in the caller's ------------------------------------------------------------------------ */

void engine_start(struct engine *engine, struct fault_room *room, bool is_dst)
{
	int pair[2];

	RIG_REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "%s",
		    strerror(errno));
	*engine = (struct engine){ .fd = pair[0], .room = room, .is_dst = is_dst };
	self = (struct self){ .fd = pair[1],
			      .room = room,
			      .end = is_dst ? &room->dst : &room->src,
			      .is_dst = is_dst };
	engine->pid = fault_child(engine_main, NULL);
	(void)close(pair[1]);
	(void)engine_do(engine, ENGINE_CONNECT, 0);
}

void engine_kill(struct engine *engine)
{
	fault_kill(engine->pid);
	(void)close(engine->fd);
	engine->pid = 0;
}

void engine_post(struct engine *engine, enum engine_op op, uint32_t arg)
{
	struct engine_order order = {
		.op = op, .arg = arg, .n_missing = engine->n_missing, .timers = engine->timers
	};

	RIG_REQUIRE(send(engine->fd, &order, sizeof(order), MSG_NOSIGNAL) == sizeof(order),
		    "the %s engine is gone", engine->is_dst ? "decode" : "prefill");
}

bool engine_take(struct engine *engine, struct engine_answer *answer, uint32_t ms)
{
	struct pollfd pfd = { .fd = engine->fd, .events = POLLIN };

	if (poll(&pfd, 1, (int)ms) <= 0)
		return false;
	RIG_REQUIRE(recv(engine->fd, answer, sizeof(*answer), 0) == sizeof(*answer),
		    "the %s engine is gone", engine->is_dst ? "decode" : "prefill");
	return true;
}

struct engine_answer engine_do(struct engine *engine, enum engine_op op, uint32_t arg)
{
	struct engine_answer answer;

	engine_post(engine, op, arg);
	RIG_REQUIRE(engine_take(engine, &answer, ANSWER_MS + 10000), "no answer to order %d",
		    (int)op);
	RIG_REQUIRE(answer.rc == 0, "order %d to the %s engine: %s: %s", (int)op,
		    engine->is_dst ? "decode" : "prefill", strerror(-answer.rc), answer.reason);
	return answer;
}

void engine_reaches(struct engine *engine, enum kvp_room_phase phase)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	struct engine_answer answer = engine_do(engine, ENGINE_STATE, 0);

	while (answer.state.phase < (uint32_t)phase) {
		RIG_REQUIRE(rig_now_ns() < until, "phase %u, not %u", answer.state.phase,
			    (unsigned int)phase);
		rig_sleep_ms(2);
		answer = engine_do(engine, ENGINE_STATE, 0);
	}
	RIG_REQUIRE(!answer.state.failed, "%s", answer.reason);
}

void engine_arrived(struct engine *engine, uint64_t position)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	struct engine_answer answer = engine_do(engine, ENGINE_STATE, 0);

	while (answer.state.arrived < position) {
		RIG_REQUIRE(!answer.state.failed && rig_now_ns() < until, "arrived %llu; %s",
			    (unsigned long long)answer.state.arrived, answer.reason);
		rig_sleep_ms(2);
		answer = engine_do(engine, ENGINE_STATE, 0);
	}
}
