/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>

#include "client/lib.h"

#define PACKETS_A_TURN 512u /* then the caller's loop has its turn */
#define ROUNDS_A_TURN 16u
#define SOCKET_BYTES (1 << 20)

/* epoll data: what it is, and which one, so that events of a closed connection are known. */
enum tag { TAG_TIMER, TAG_SOCK, TAG_PIDFD, TAG_GRAVE };

static uint64_t tag_of(enum tag tag, uint64_t serial)
{
	return serial << 2 | (uint64_t)tag;
}

int64_t kvpl_now_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail */
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

int64_t kvpl_deadline(int timeout_ms)
{
	return timeout_ms < 0 ? -1 : kvpl_now_ms() + timeout_ms;
}

/* ---- timer --------------------------------------------------------------------------------- */

static void timer_arm(struct kvp_client *client)
{
	struct itimerspec at = { 0 };
	int64_t left = client->timer_at - kvpl_now_ms();

	if (client->is_kicked || (client->timer_at >= 0 && left <= 0)) {
		at.it_value.tv_nsec = 1;
	} else if (client->timer_at >= 0) {
		at.it_value.tv_sec = left / 1000;
		at.it_value.tv_nsec = left % 1000 * 1000000;
	}
	(void)timerfd_settime(client->timer, 0, &at, NULL); /* a valid time on a valid timer */
}

static void timer_set(struct kvp_client *client, int64_t after_ms)
{
	client->timer_at = after_ms < 0 ? -1 : kvpl_now_ms() + after_ms;
	timer_arm(client);
}

void kvpl_conn_kick(struct kvp_client *client)
{
	if (client->is_kicked)
		return;
	client->is_kicked = true;
	timer_arm(client);
}

/* ---- connecting ---------------------------------------------------------------------------- */

static int watch(struct kvp_client *client, int fd, uint32_t events, uint64_t tag)
{
	struct epoll_event ev = { .events = events, .data.u64 = tag };

	if (epoll_ctl(client->epfd, EPOLL_CTL_ADD, fd, &ev) == 0 ||
	    (errno == EEXIST && epoll_ctl(client->epfd, EPOLL_CTL_MOD, fd, &ev) == 0))
		return 0;
	return -errno;
}

/* Out of the set first: a forked child may hold the same file, and then closing does not do it. */
static void unwatch_close(struct kvp_client *client, int *fd)
{
	if (*fd < 0)
		return;
	(void)epoll_ctl(client->epfd, EPOLL_CTL_DEL, *fd, NULL); /* it may not be in there */
	(void)close(*fd);                                        /* nothing is buffered in it */
	*fd = -1;
}

int kvpl_conn_init(struct kvp_client *client)
{
	client->sock = client->pidfd = client->timer = -1;
	client->timer_at = -1;
	client->backoff_ms = KVPL_BACKOFF_MIN_MS;
	client->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (client->epfd < 0)
		return -errno;
	client->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	if (client->timer < 0)
		return -errno;
	return watch(client, client->timer, EPOLLIN, tag_of(TAG_TIMER, 0));
}

/* In a forked child it only closes: changing the epoll set would change the parent's. */
void kvpl_conn_fini(struct kvp_client *client)
{
	if (client->sock >= 0 && client->pid == getpid())
		(void)shutdown(client->sock, SHUT_RDWR); /* a forked child may keep it open */
	kvp_closep(&client->sock);
	kvp_closep(&client->pidfd);
	kvp_closep(&client->timer);
	kvp_closep(&client->epfd);
	kvpl_packets_fini(&client->out);
	while (client->graves) {
		struct kvpl_grave *grave = client->graves;

		client->graves = grave->next;
		kvp_closep(&grave->pidfd);
		free(grave);
	}
	free(client->next_to_dig);
}

static int connect_to(const char *path, int *out)
{
	KVP_CLEANUP(kvp_closep)
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int size = SOCKET_BYTES;
	size_t len = strlen(path);

	if (fd < 0)
		return -errno;
	if (len >= sizeof(addr.sun_path))
		return -ENAMETOOLONG;
	memcpy(addr.sun_path, path, len);
	/* More room than the default means fewer turns; the kernel may give less. */
	(void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return -errno;
	*out = KVP_TAKE_FD(fd);
	return 0;
}

/* At the loss of a connection it is too late to want memory: its rooms would never end. */
static int grave_prepare(struct kvp_client *client)
{
	if (!client->next_to_dig)
		client->next_to_dig = calloc(1, sizeof(*client->next_to_dig));
	return client->next_to_dig ? 0 : -ENOMEM;
}

static int send_hello(struct kvp_client *client)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_HELLO };
	struct kvpl_packets packets;
	int r;

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.name = client->name;
	hello.pid = (uint32_t)client->pid;
	hello.observer = client->observer;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, &msg, NULL, 0, &packets);
	return r < 0 ? r : kvpl_request_send(client, &packets, &to, NULL);
}

int kvpl_conn_start(struct kvp_client *client)
{
	KVP_CLEANUP(kvp_closep) int fd = -1;
	int r = grave_prepare(client);

	if (r == 0)
		r = connect_to(client->path, &fd);
	if (r == 0)
		r = watch(client, fd, EPOLLIN, tag_of(TAG_SOCK, client->session + 1));
	if (r < 0)
		return kvpl_fail(client, r, KVP_STATUS_DAEMON_LOST, "cannot connect to %s: %s",
				 client->path, strerror(-r));
	client->sock = KVP_TAKE_FD(fd);
	client->session++;
	client->conn = KVPL_GREETING;
	client->wants_out = client->is_broken = false;
	timer_set(client, KVPL_GREETING_MS);
	r = send_hello(client);
	if (r < 0) {
		unwatch_close(client, &client->sock);
		client->conn = KVPL_DOWN;
	}
	return r;
}

static void reconnect_later(struct kvp_client *client)
{
	if (client->no_reconnect || client->is_closing || !client->was_up) {
		timer_set(client, -1);
		return;
	}
	timer_set(client, client->backoff_ms);
	client->backoff_ms = KVP_MIN(client->backoff_ms * 2, KVPL_BACKOFF_MAX_MS);
}

/* ---- losing -------------------------------------------------------------------------------- */

static bool is_grave_of(const struct kvpl_grave *grave, const struct kvp_client *client)
{
	return memcmp(grave->incarnation, client->incarnation, KVP_INCARNATION_BYTES) == 0;
}

/* One for each connection; of a daemon that does not number them one for all. */
static uint64_t grave_dig(struct kvp_client *client)
{
	struct kvpl_grave *grave = client->graves;

	while (grave && (!is_grave_of(grave, client) || grave->session != client->settle))
		grave = grave->next;
	if (grave) {
		unwatch_close(client, &client->pidfd);
		return grave->serial;
	}
	grave = KVP_TAKE(client->next_to_dig);
	grave->serial = ++client->next_grave;
	grave->session = client->settle;
	memcpy(grave->incarnation, client->incarnation, KVP_INCARNATION_BYTES);
	grave->pidfd = KVP_TAKE_FD(client->pidfd);
	if (grave->pidfd >= 0 &&
	    watch(client, grave->pidfd, EPOLLIN, tag_of(TAG_GRAVE, grave->serial)) < 0) {
		(void)close(grave->pidfd); /* the next incarnation is the proof then */
		grave->pidfd = -1;
	}
	grave->next = client->graves;
	client->graves = grave;
	return grave->serial;
}

/* Nothing of it can touch memory any more: its process is dead, or says so. */
static void grave_close(struct kvp_client *client, uint64_t serial)
{
	struct kvpl_grave **link = &client->graves;
	struct kvpl_grave *grave;

	while (*link && (*link)->serial != serial)
		link = &(*link)->next;
	grave = *link;
	if (!grave)
		return;
	*link = grave->next;
	unwatch_close(client, &grave->pidfd);
	free(grave);
	client->handled++;
	kvpl_rooms_buried(client, serial);
	if (client->conn == KVPL_UP)
		kvpl_rooms_repeat(client);
}

/* Callbacks come last: by then everything says that the connection is gone. */
static void conn_lose(struct kvp_client *client)
{
	bool was_up = client->conn == KVPL_UP;

	(void)shutdown(client->sock, SHUT_RDWR);
	unwatch_close(client, &client->sock);
	client->conn = KVPL_DOWN;
	client->handled++;
	kvpl_packets_fini(&client->out);
	if (was_up) {
		uint64_t grave = grave_dig(client);

		client->backoff_ms = KVPL_BACKOFF_MIN_MS;
		kvpl_pools_lose(client);
		kvpl_rooms_lose(client, grave);
	}
	unwatch_close(client, &client->pidfd);
	reconnect_later(client);
	kvpl_requests_lose(client);
}

/* The same; of a daemon that has not greeted the text says what it did instead. */
static void conn_mute(struct kvp_client *client, const char *did)
{
	if (client->conn == KVPL_GREETING)
		(void)kvpl_fail(client, 0, KVP_STATUS_DAEMON_LOST, "%s %s", client->path, did);
	conn_lose(client);
}

/* The reason is in last_error. */
static void conn_garbled(struct kvp_client *client)
{
	char did[128];

	(void)snprintf(did, sizeof(did), "says what is not understood here: %.80s",
		       client->last_error); /* fits */
	conn_mute(client, did);
}

/* ---- greeting ------------------------------------------------------------------------------ */

static void grave_settle(struct kvp_client *client, const struct kvpl_grave *grave)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Settle settle = KVP__SETTLE__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_SETTLE, .object = grave->serial };
	struct kvpl_packets packets;

	settle.session = grave->session;
	msg.body_case = KVP__CLIENT_MSG__BODY_SETTLE;
	msg.settle = &settle;
	kvpl_packets_init(&packets);
	/* Without it the pages are free when the daemon ends. */
	if (kvpl_packet_make(client, &msg, NULL, 0, &packets) == 0)
		(void)kvpl_request_send(client, &packets, &to, NULL);
}

void kvpl_conn_settled(struct kvp_client *client, uint64_t grave, enum kvp_status status)
{
	if (status == KVP_OK)
		grave_close(client, grave);
}

static void conn_up(struct kvp_client *client)
{
	struct kvpl_grave *grave, *next;

	client->conn = KVPL_UP;
	client->was_up = true;
	client->handled++;
	timer_set(client, -1);
	kvpl_pools_repeat(client);
	kvpl_fences_repeat(client);
	for (grave = client->graves; grave; grave = next) {
		next = grave->next;
		if (is_grave_of(grave, client)) {
			kvpl_rooms_same_daemon(client, grave->serial);
			if (grave->session)
				grave_settle(client, grave);
		} else if (grave->pidfd < 0) {
			grave_close(client, grave->serial);
		}
	}
	kvpl_rooms_repeat(client);
}

void kvpl_conn_greeted(struct kvp_client *client, const Kvp__Reply *reply, int pidfd)
{
	KVP_CLEANUP(kvp_closep) int fd = pidfd;
	const Kvp__HelloReply *hello = reply->hello;

	if (reply->status != KVP__STATUS__STATUS_OK || !hello ||
	    hello->version < KVP_PROTO_VERSION_MIN || hello->version > KVP_PROTO_VERSION_MAX) {
		bool is_refused = reply->status != KVP__STATUS__STATUS_OK;

		(void)kvpl_fail(client, 0,
				is_refused ? (enum kvp_status)reply->status : KVP_STATUS_VERSION,
				"%s", is_refused ? reply->text : "hello: answer without a version");
		client->backoff_ms = KVPL_BACKOFF_MAX_MS; /* it will not change its mind soon */
		conn_lose(client);
		return;
	}
	client->version = hello->version;
	client->features = hello->features;
	client->settle = hello->session;
	memcpy(client->incarnation, hello->incarnation.data, KVP_INCARNATION_BYTES);
	(void)snprintf(client->node, sizeof(client->node), "%s", hello->node);
	(void)snprintf(client->address, sizeof(client->address), "%s", hello->address);
	if (fd >= 0 && watch(client, fd, EPOLLIN, tag_of(TAG_PIDFD, client->session)) == 0)
		client->pidfd = KVP_TAKE_FD(fd);
	conn_up(client);
}

/* ---- turns --------------------------------------------------------------------------------- */

static void watch_out(struct kvp_client *client, bool wants_out)
{
	if (client->wants_out == wants_out)
		return;
	client->wants_out = wants_out;
	if (watch(client, client->sock, wants_out ? EPOLLIN | EPOLLOUT : EPOLLIN,
		  tag_of(TAG_SOCK, client->session)) < 0) {
		client->is_broken = true;
		kvpl_conn_kick(client);
	}
}

static size_t packet_write(const struct kvpl_packet *packet, uint8_t *buf)
{
	size_t n = 0;

	buf[n++] = 0x08; /* field 1, varint */
	for (uint64_t id = packet->id;; id >>= 7) {
		buf[n++] = (uint8_t)((id & 0x7f) | (id > 0x7f ? 0x80 : 0));
		if (id <= 0x7f)
			break;
	}
	memcpy(buf + n, packet->tail, packet->len);
	return n + packet->len;
}

void kvpl_conn_flush(struct kvp_client *client)
{
	int r = 0;

	if (client->sock < 0 || client->is_broken)
		return;
	while (client->out.head) {
		struct kvpl_packet *packet = client->out.head;
		struct kvpl_packets sent;

		r = kvp_packet_send(client->sock, client->buf, packet_write(packet, client->buf),
				    packet->fds, packet->n_fds);
		if (r < 0)
			break;
		client->out.head = packet->next;
		if (!client->out.head)
			client->out.end = &client->out.head;
		client->out.bytes -= packet->len;
		kvpl_packets_init(&sent);
		kvpl_packets_add(&sent, packet);
		kvpl_packets_fini(&sent);
	}
	if (r == 0 || r == -EAGAIN) {
		watch_out(client, r != 0);
		return;
	}
	/* Not here: the caller is in the middle of something, and last words may be unread. */
	client->is_broken = true;
	kvpl_conn_kick(client);
}

/* Handles one packet; false when the connection is of no use any more. */
static bool packet_handle(struct kvp_client *client, size_t len, int fd)
{
	KVP_CLEANUP(kvp_msg_free_daemonp) Kvp__DaemonMsg *msg = NULL;
	int r = kvp_msg_decode_daemon(client->buf, len, &msg, client->last_error,
				      sizeof(client->last_error));

	if (r) {
		client->last_status = KVP_STATUS_PROTOCOL;
		kvp_closep(&fd);
		return false;
	}
	if (msg->body_case == KVP__DAEMON_MSG__BODY_REPLY) {
		if (msg->reply->id == 0 && msg->reply->status != KVP__STATUS__STATUS_OK)
			(void)kvpl_fail(client, 0, (enum kvp_status)msg->reply->status, "%s",
					msg->reply->text);
		kvpl_request_answer(client, msg->reply, fd);
		return true;
	}
	kvp_closep(&fd);
	kvpl_room_event(client, msg->room);
	return true;
}

static void sock_readable(struct kvp_client *client, unsigned max)
{
	uint64_t session = client->session;

	/* A callback may have reconnected: then the rest is another connection's. */
	for (unsigned i = 0; i < max && client->session == session && client->sock >= 0; i++) {
		size_t n_fds = 0;
		int fd = -1;
		ssize_t n = kvp_packet_recv(client->sock, client->buf, KVP_LIMIT_PACKET, &fd,
					    &n_fds, 1);

		if (n == -EAGAIN)
			return;
		if (n <= 0) {
			conn_mute(client, "has closed the connection without an answer");
			return;
		}
		if (!packet_handle(client, (size_t)n, n_fds ? fd : -1)) {
			if (client->session == session && client->sock >= 0)
				conn_garbled(client);
			return;
		}
	}
}

static void timer_fired(struct kvp_client *client)
{
	uint64_t n;
	int64_t now = kvpl_now_ms();

	(void)!read(client->timer, &n, sizeof(n)); /* may have been set anew: then it says EAGAIN */
	client->is_kicked = false;
	if (client->is_broken && client->sock >= 0) {
		sock_readable(client, UINT32_MAX);
		if (client->is_broken && client->sock >= 0)
			conn_lose(client);
	} else if (client->timer_at >= 0 && now >= client->timer_at) {
		client->timer_at = -1;
		if (client->conn == KVPL_GREETING)
			conn_mute(client, "has taken the connection, but does not answer");
		else if (client->conn == KVPL_DOWN && kvpl_conn_start(client) < 0)
			reconnect_later(client);
	}
	timer_arm(client);
}

static void pidfd_readable(struct kvp_client *client, uint64_t session)
{
	sock_readable(client, UINT32_MAX); /* its last words */
	if (client->session == session && client->sock >= 0)
		conn_lose(client);
}

static void event_handle(struct kvp_client *client, const struct epoll_event *ev)
{
	uint64_t serial = ev->data.u64 >> 2;

	switch ((enum tag)(ev->data.u64 & 3)) {
	case TAG_TIMER:
		timer_fired(client);
		break;
	case TAG_SOCK:
		if (serial != client->session || client->sock < 0)
			break;
		if (ev->events & EPOLLOUT)
			kvpl_conn_flush(client);
		if (ev->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
			sock_readable(client, PACKETS_A_TURN);
		if (client->has_repeats && client->conn == KVPL_UP &&
		    client->out.bytes < KVPL_OUT_MAX / 2)
			kvpl_rooms_repeat(client);
		break;
	case TAG_PIDFD:
		if (serial == client->session && client->sock >= 0)
			pidfd_readable(client, serial);
		break;
	case TAG_GRAVE:
		grave_close(client, serial);
		break;
	}
}

/* What is ready now; several rounds, since one event brings the next. */
static unsigned conn_process(struct kvp_client *client)
{
	unsigned before = client->handled;

	for (unsigned round = 0; round < ROUNDS_A_TURN; round++) {
		struct epoll_event ev[8];
		int n = epoll_wait(client->epfd, ev, (int)KVP_ARRAY_SIZE(ev), 0);

		if (n <= 0)
			break;
		for (int i = 0; i < n; i++)
			event_handle(client, &ev[i]);
	}
	return client->handled - before;
}

int kvpl_conn_turn(struct kvp_client *client, int64_t deadline_ms)
{
	struct pollfd pfd = { .fd = client->epfd, .events = POLLIN };
	int64_t left = -1;
	int n;

	if (conn_process(client) > 0)
		return 0;
	if (deadline_ms >= 0) {
		left = deadline_ms - kvpl_now_ms();
		if (left <= 0)
			return -ETIMEDOUT;
		left = KVP_MIN(left, (int64_t)INT32_MAX);
	}
	n = poll(&pfd, 1, (int)left);
	if (n < 0 && errno != EINTR)
		return -errno;
	(void)conn_process(client);
	return 0;
}

int kvpl_conn_wait_up(struct kvp_client *client, int64_t deadline_ms)
{
	while (client->conn != KVPL_UP) {
		bool is_final = client->no_reconnect || !client->was_up;

		if (client->conn == KVPL_DOWN && is_final)
			return -ENOTCONN;
		if (kvpl_conn_turn(client, deadline_ms) == -ETIMEDOUT)
			return kvpl_fail(
				client, -ENOTCONN, KVP_STATUS_DAEMON_LOST,
				client->conn == KVPL_GREETING
					? "%s has taken the connection, but does not answer"
					: "%s is not connected",
				client->path);
	}
	return 0;
}

int kvp_process(struct kvp_client *client)
{
	int r = kvpl_check_process(client);

	return r < 0 ? r : (int)conn_process(client);
}

int kvp_wait(struct kvp_client *client, int timeout_ms)
{
	int64_t deadline = kvpl_deadline(timeout_ms);
	unsigned before = client->handled;
	int r = kvpl_check_process(client);

	while (r == 0 && client->handled == before)
		r = kvpl_conn_turn(client, deadline);
	return r < 0 ? r : (int)(client->handled - before);
}
