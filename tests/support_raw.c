/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_raw.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/packet.h"
#include "proto/util.h"
#include "tests/support_rig.h"

#define WAIT_NS UINT64_C(60000000000)

static uint8_t buf[KVP_LIMIT_PACKET];

void raw_connect(struct raw *raw, const char *socket_path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };

	*raw = (struct raw){ .fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) };
	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", socket_path);
	RIG_REQUIRE(raw->fd >= 0 &&
			    connect(raw->fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0,
		    "%s", strerror(errno));
}

/* Is it the reply to `id`? Then *status and text are its. */
static bool take_reply(size_t n, uint64_t id, Kvp__Status *status, char *text)
{
	Kvp__DaemonMsg *msg = NULL;
	bool is;

	RIG_REQUIRE(kvp_msg_decode_daemon(buf, n, &msg, NULL, 0) == 0);
	is = msg->body_case == KVP__DAEMON_MSG__BODY_REPLY && msg->reply->id == id;
	if (is) {
		*status = msg->reply->status;
		(void)snprintf(text, RAW_TEXT, "%s", msg->reply->text); /* may be cut */
	}
	kvp_msg_free_daemon(msg);
	return is;
}

static Kvp__Status wait_reply(struct raw *raw, uint64_t id, int *fd, char *text)
{
	uint64_t until = rig_now_ns() + WAIT_NS;
	Kvp__Status status = KVP__STATUS__STATUS_OK;
	int fds[2] = { -1, -1 };
	size_t n_fds = 0;
	bool is = false;

	while (!is) {
		struct pollfd pfd = { raw->fd, POLLIN, 0 };
		ssize_t n;

		RIG_REQUIRE(rig_now_ns() < until, "no answer");
		(void)poll(&pfd, 1, 1000); /* looks at the time again */
		n = kvp_packet_recv(raw->fd, buf, sizeof(buf), fds, &n_fds, 2);
		if (n == -EAGAIN)
			continue;
		RIG_REQUIRE(n > 0, "the daemon has closed: %s", n ? strerror((int)-n) : "");
		is = take_reply((size_t)n, id, &status, text);
	}
	if (n_fds && !fd)
		(void)close(fds[0]);
	if (fd)
		*fd = n_fds ? fds[0] : -1;
	return status;
}

Kvp__Status raw_call_fd(struct raw *raw, Kvp__ClientMsg *msg, int send_fd, int *got_fd, char *text)
{
	long n;
	int r;

	msg->id = ++raw->last_id;
	n = kvp_msg_encode_client(msg, buf, sizeof(buf));
	RIG_REQUIRE(n > 0);
	while ((r = kvp_packet_send(raw->fd, buf, (size_t)n, &send_fd, send_fd >= 0)) == -EAGAIN)
		rig_sleep_ms(1);
	RIG_REQUIRE(r == 0, "%s", strerror(-r));
	return wait_reply(raw, msg->id, got_fd, text);
}

void raw_call(struct raw *raw, Kvp__ClientMsg *msg, int send_fd)
{
	char text[RAW_TEXT];
	Kvp__Status status = raw_call_fd(raw, msg, send_fd, NULL, text);

	RIG_REQUIRE(status == KVP__STATUS__STATUS_OK, "request %d: %s", (int)msg->body_case, text);
}

void raw_hello(struct raw *raw)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello body = KVP__HELLO__INIT;

	body.version_min = body.version_max = KVP_PROTO_VERSION_MAX;
	body.name = (char *)"load";
	body.pid = (uint32_t)getpid();
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &body;
	raw_call(raw, &msg, -1);
}

void raw_greet(struct raw *raw, const char *socket_path)
{
	raw_connect(raw, socket_path);
	raw_hello(raw);
}

Kvp__Status raw_register(struct raw *raw, uint32_t id, int fd, char *text)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;
	Kvp__Entry entry = KVP__ENTRY__INIT, *entries = &entry;

	entry.row_bytes = entry.full_bytes = RAW_ROW;
	entry.row_stride = RAW_ROW;
	entry.page_stride = RAW_PAGE * RAW_ROW;
	entry.rows_per_page = RAW_PAGE;
	entry.n_pages = RAW_POOL_PAGES;
	entry.bytes = RAW_POOL_BYTES;
	body.pool = id;
	body.entries = &entries;
	body.n_entries = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &body;
	return raw_call_fd(raw, &msg, fd, NULL, text);
}

void raw_unregister(struct raw *raw, uint32_t id)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolUnregister body = KVP__POOL_UNREGISTER__INIT;

	body.pool = id;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_UNREGISTER;
	msg.pool_unregister = &body;
	raw_call(raw, &msg, -1);
}

void raw_pages(struct raw *raw, uint32_t list)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Pages body = KVP__PAGES__INIT;
	uint32_t page = raw->next_page++ % RAW_POOL_PAGES;

	body.list = list;
	body.pages = &page;
	body.n_pages = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_PAGES;
	msg.pages = &body;
	raw_call(raw, &msg, -1);
}

Kvp__Side raw_side(void)
{
	Kvp__Side side = KVP__SIDE__INIT;

	side.page = RAW_PAGE;
	side.dcp_size = side.interleave = 1;
	return side;
}

void raw_open(struct raw *raw, uint64_t room)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Open body = KVP__OPEN__INIT;
	Kvp__Side side = raw_side(), *sides = &side;

	body.handle = ++raw->next_handle;
	body.room = room;
	body.pool = 1;
	body.sides = &sides;
	body.n_sides = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_OPEN;
	msg.open = &body;
	raw_call(raw, &msg, -1);
}

void raw_submit(struct raw *raw, uint64_t handle, uint32_t seq)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Submit body = KVP__SUBMIT__INIT;
	Kvp__ChunkSide side = KVP__CHUNK_SIDE__INIT, *sides = &side;

	side.list = 2;
	body.handle = handle;
	body.seq = seq;
	body.start = seq;
	body.tokens = 1;
	body.sides = &sides;
	body.n_sides = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_SUBMIT;
	msg.submit = &body;
	raw_call(raw, &msg, -1);
}

void raw_abort(struct raw *raw, uint64_t handle)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Abort body = KVP__ABORT__INIT;

	body.handle = handle;
	msg.body_case = KVP__CLIENT_MSG__BODY_ABORT;
	msg.abort = &body;
	raw_call(raw, &msg, -1);
}

int raw_inspect(struct raw *raw, const char *what)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;
	char text[RAW_TEXT];
	int fd = -1;

	body.what = (char *)what;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	RIG_REQUIRE(raw_call_fd(raw, &msg, -1, &fd, text) == KVP__STATUS__STATUS_OK && fd >= 0,
		    "%s", text);
	return fd;
}
