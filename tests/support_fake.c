/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_fake.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/util.h"

static void send_daemon(struct fake *fake, const Kvp__DaemonMsg *msg, const int *fds, size_t n_fds)
{
	static _Thread_local uint8_t buf[KVP_LIMIT_PACKET];
	long n = kvp_msg_encode_daemon(msg, buf, sizeof(buf));

	assert(n > 0);
	while (kvp_packet_send(fake->conn, buf, (size_t)n, fds, n_fds) == -EAGAIN)
		(void)poll(NULL, 0, 1); /* the client is slow */
}

void fake_event(struct fake *fake, Kvp__RoomEvent *event)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;

	msg.body_case = KVP__DAEMON_MSG__BODY_ROOM;
	msg.room = event;
	send_daemon(fake, &msg, NULL, 0);
}

void fake_reply(struct fake *fake, uint64_t id, int status, const char *text)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	Kvp__Reply reply = KVP__REPLY__INIT;

	reply.id = id;
	reply.status = (Kvp__Status)status;
	reply.text = (char *)text;
	reply.recalled_from = fake->recalled_from;
	msg.body_case = KVP__DAEMON_MSG__BODY_REPLY;
	msg.reply = &reply;
	send_daemon(fake, &msg, NULL, 0);
}

void fake_raw(struct fake *fake, const void *data, size_t n)
{
	assert(kvp_packet_send(fake->conn, data, n, NULL, 0) == 0);
}

static void reply_hello(struct fake *fake, uint64_t id)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	Kvp__Reply reply = KVP__REPLY__INIT;
	Kvp__HelloReply hello = KVP__HELLO_REPLY__INIT;
	uint8_t incarnation[KVP_INCARNATION_BYTES] = { fake->incarnation };

	hello.version = KVP_PROTO_VERSION_MAX;
	hello.incarnation.data = incarnation;
	hello.incarnation.len = sizeof(incarnation);
	hello.node = (char *)"node-a";
	hello.address = (char *)"127.0.0.1:7470";
	hello.session = fake->session;
	reply.id = id;
	reply.hello = &hello;
	msg.body_case = KVP__DAEMON_MSG__BODY_REPLY;
	msg.reply = &reply;
	send_daemon(fake, &msg, &fake->child_pidfd, fake->child ? 1 : 0);
}

static void reply_inspect(struct fake *fake, uint64_t id)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	Kvp__Reply reply = KVP__REPLY__INIT;
	int fd = memfd_create("json", MFD_CLOEXEC);
	size_t n = strlen(fake->memfd_text);

	assert(fd >= 0 && write(fd, fake->memfd_text, n) == (ssize_t)n);
	reply.id = id;
	msg.body_case = KVP__DAEMON_MSG__BODY_REPLY;
	msg.reply = &reply;
	send_daemon(fake, &msg, &fd, 1);
	(void)close(fd);
}

static void answer(struct fake *fake, const Kvp__ClientMsg *msg)
{
	int refused = (int)msg->body_case == fake->refuse_kind ? fake->refuse_status : 0;

	if (msg->body_case == KVP__CLIENT_MSG__BODY_HELLO && !refused)
		reply_hello(fake, msg->id);
	else if (fake->is_mute)
		return;
	else if (msg->body_case == KVP__CLIENT_MSG__BODY_INSPECT && !refused)
		reply_inspect(fake, msg->id);
	else
		fake_reply(fake, msg->id, refused, refused ? "refused by the script" : "");
}

/* False when the connection ended. */
static bool serve(struct fake *fake)
{
	static _Thread_local uint8_t buf[KVP_LIMIT_PACKET];
	int fds[KVP_LIMIT_FDS];
	size_t n_fds = 0;
	char err[256];
	Kvp__ClientMsg *msg = NULL;
	ssize_t n = kvp_packet_recv(fake->conn, buf, sizeof(buf), fds, &n_fds, KVP_LIMIT_FDS);

	if (n == -EAGAIN)
		return true;
	if (n <= 0)
		return false;
	for (size_t i = 0; i < n_fds; i++)
		(void)close(fds[i]);
	if (kvp_msg_decode_client(buf, (size_t)n, &msg, err, sizeof(err))) {
		(void)fprintf(stderr, "the library sent nonsense: %s\n", err);
		abort();
	}
	pthread_mutex_lock(&fake->lock);
	assert(fake->n_log < FAKE_LOG);
	fake->n_fds[fake->n_log] = n_fds;
	fake->log[fake->n_log++] = msg;
	pthread_mutex_unlock(&fake->lock);
	answer(fake, msg);
	return true;
}

static void *fake_run(void *arg)
{
	struct fake *fake = arg;

	while (!fake->is_stopped) {
		struct pollfd pfd[2] = {
			{ .fd = fake->conn >= 0 ? fake->conn : fake->listener, .events = POLLIN },
			{ .fd = fake->wake[0], .events = POLLIN },
		};

		if (fake->is_deaf)
			pfd[0].fd = -1;
		(void)poll(pfd, 2, 20); /* looks at the flags again */
		if (!(pfd[0].revents & (POLLIN | POLLHUP)))
			continue;
		if (fake->conn < 0) {
			fake->conn = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
		} else if (!serve(fake)) {
			(void)close(fake->conn);
			fake->conn = -1;
		}
	}
	return NULL;
}

static void child_start(struct fake *fake)
{
	/* Not pidfd_open(), which valgrind does not know. */
	fake->child = (pid_t)syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, NULL, &fake->child_pidfd,
				     NULL, NULL);
	assert(fake->child >= 0);
	if (fake->child == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (int fd = 3; fd < 256; fd++)
			(void)close(fd); /* or it would keep the test's sockets open */
		for (;;)
			(void)pause();
	}
	assert(fake->child_pidfd >= 0);
}

struct fake *fake_start(const char *path, uint8_t incarnation, bool has_child)
{
	struct fake *fake = calloc(1, sizeof(*fake));
	struct sockaddr_un addr = { .sun_family = AF_UNIX };

	assert(fake);
	fake->conn = fake->child_pidfd = -1;
	fake->incarnation = incarnation;
	if (!path) {
		(void)snprintf(fake->dir, sizeof(fake->dir), "/tmp/kvpack-test-XXXXXX");
		assert(mkdtemp(fake->dir));
		(void)snprintf(fake->path, sizeof(fake->path), "%s/sock", fake->dir);
	} else {
		(void)snprintf(fake->path, sizeof(fake->path), "%s", path);
	}
	if (has_child)
		child_start(fake);
	(void)unlink(fake->path);
	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", fake->path);
	fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert(bind(fake->listener, (struct sockaddr *)&addr, sizeof(addr)) == 0);
	assert(listen(fake->listener, 16) == 0);
	assert(pipe(fake->wake) == 0);
	assert(pthread_mutex_init(&fake->lock, NULL) == 0);
	assert(pthread_create(&fake->thread, NULL, fake_run, fake) == 0);
	return fake;
}

void fake_stop(struct fake *fake)
{
	if (fake->listener < 0)
		return;
	fake->is_stopped = true;
	(void)!write(fake->wake[1], "", 1); /* a full pipe wakes as well */
	(void)pthread_join(fake->thread, NULL);
	(void)close(fake->listener);
	if (fake->conn >= 0)
		(void)close(fake->conn);
	(void)close(fake->wake[0]);
	(void)close(fake->wake[1]);
	fake->listener = fake->conn = -1;
}

void fake_kill_child(struct fake *fake)
{
	if (!fake->child)
		return;
	(void)kill(fake->child, SIGKILL);
	(void)waitpid(fake->child, NULL, 0);
	(void)close(fake->child_pidfd);
	fake->child = 0;
}

void fake_free(struct fake *fake)
{
	fake_stop(fake);
	fake_kill_child(fake);
	for (unsigned i = 0; i < fake->n_log; i++)
		kvp_msg_free_client(fake->log[i]);
	if (fake->dir[0]) {
		(void)unlink(fake->path);
		(void)rmdir(fake->dir);
	}
	free(fake);
}

unsigned fake_count(struct fake *fake)
{
	unsigned n;

	pthread_mutex_lock(&fake->lock);
	n = fake->n_log;
	pthread_mutex_unlock(&fake->lock);
	return n;
}

const Kvp__ClientMsg *fake_get(struct fake *fake, unsigned n)
{
	for (unsigned tries = 0; fake_count(fake) <= n; tries++) {
		if (tries > 5000) {
			(void)fprintf(stderr, "message %u did not come\n", n);
			abort();
		}
		(void)poll(NULL, 0, 2);
	}
	return fake->log[n];
}
