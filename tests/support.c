/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "proto/limits.h"
#include "proto/msg.h"
#include "proto/packet.h"
#include "proto/util.h"
#include "tests/support_clock.h"

#define START_MS 20000
#define REPLY_MS 10000

void support_sleep_ms(unsigned ms)
{
	(void)poll(NULL, 0, (int)ms); /* a signal only makes it shorter */
}

uint64_t support_now_ms(void)
{
	return support_clock_ns() / 1000000;
}

void support_program(char *path, size_t bytes, const char *name)
{
	const char *dir = getenv("KVP_BIN");
	char exe[4096];
	ssize_t n;

	if (!dir) { /* tests/ is one level below the programs */
		n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
		cr_assert_gt(n, 0);
		exe[n] = 0;
		for (int i = 0; i < 2 && strrchr(exe, '/'); i++)
			*strrchr(exe, '/') = 0;
		dir = exe;
	}
	cr_assert_lt(snprintf(path, bytes, "%s/%s", dir, name), (int)bytes);
}

uint32_t support_fd_count(pid_t pid)
{
	char path[64];
	uint32_t n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	cr_assert(dir, "%s: %s", path, strerror(errno));
	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 2; /* . and .. */
}

/* ---- daemon */

void support_daemon_prepare(struct support_daemon *daemon, const char *extra)
{
	FILE *file;

	memset(daemon, 0, sizeof(*daemon));
	snprintf(daemon->dir, sizeof(daemon->dir), "/tmp/kvp-test-XXXXXX");
	cr_assert(mkdtemp(daemon->dir), "%s", strerror(errno));
	snprintf(daemon->socket, sizeof(daemon->socket), "%s/run/sock", daemon->dir);
	snprintf(daemon->config, sizeof(daemon->config), "%s/conf", daemon->dir);
	snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
	file = fopen(daemon->config, "w");
	cr_assert(file, "%s", strerror(errno));
	fprintf(file, "[client]\nsocket = %s\ngroup =\n[host]\nslots = 4\n%s\n", daemon->socket,
		extra ? extra : "");
	cr_assert_eq(fclose(file), 0);
}

static void exec_daemon(const struct support_daemon *daemon)
{
	char program[4096];
	int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

	support_program(program, sizeof(program), "kvpackd");
	if (log < 0 || dup2(log, STDERR_FILENO) < 0)
		_exit(126);
	/* What the test has open would only blur the daemon's own count. */
	for (int fd = 3; fd < 256; fd++)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	execl(program, program, "--config", daemon->config, (char *)NULL);
	_exit(127);
}

static int try_connect(const struct support_daemon *daemon)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	cr_assert_geq(fd, 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", daemon->socket);
	if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0)
		return fd;
	close(fd);
	return -1;
}

static void print_log(const struct support_daemon *daemon)
{
	char line[1024];
	FILE *file = fopen(daemon->log, "r");

	while (file && fgets(line, sizeof(line), file))
		fprintf(stderr, "    kvpackd: %s", line);
	if (file)
		fclose(file);
}

void support_daemon_run(struct support_daemon *daemon)
{
	uint64_t until = support_now_ms() + START_MS;
	int fd = -1;

	daemon->pid = fork();
	cr_assert_geq(daemon->pid, 0);
	if (daemon->pid == 0)
		exec_daemon(daemon);
	while (fd < 0) {
		if (support_now_ms() > until || waitpid(daemon->pid, NULL, WNOHANG) != 0) {
			print_log(daemon);
			cr_assert_fail("the daemon does not start");
		}
		fd = try_connect(daemon);
		if (fd < 0)
			support_sleep_ms(5);
	}
	close(fd);
	fd = support_hello(daemon, "probe");
	close(fd);
	support_sleep_ms(50); /* until the probe's end has been noticed */
	daemon->fds_at_start = support_fd_count(daemon->pid);
}

void support_daemon_start(struct support_daemon *daemon, const char *extra)
{
	support_daemon_prepare(daemon, extra);
	support_daemon_run(daemon);
}

int support_daemon_stop(struct support_daemon *daemon)
{
	uint64_t until = support_now_ms() + 20000;
	int status;

	kill(daemon->pid, SIGTERM);
	while (waitpid(daemon->pid, &status, WNOHANG) == 0) {
		if (support_now_ms() > until) {
			kill(daemon->pid, SIGKILL);
			waitpid(daemon->pid, &status, 0);
			daemon->pid = 0;
			return -1;
		}
		support_sleep_ms(5);
	}
	daemon->pid = 0;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void support_daemon_clean(struct support_daemon *daemon)
{
	static const char *const names[] = { "run/sock", "run", "conf", "log", "" };
	char path[128];

	for (size_t i = 0; i < KVP_ARRAY_SIZE(names); i++) {
		snprintf(path, sizeof(path), "%s/%s", daemon->dir, names[i]);
		remove(path);
	}
}

void support_daemon_end(struct support_daemon *daemon)
{
	uint64_t until = support_now_ms() + 5000;
	uint32_t n;
	int status;

	if (waitpid(daemon->pid, NULL, WNOHANG) != 0) {
		print_log(daemon);
		cr_assert_fail("the daemon is gone");
	}
	while ((n = support_fd_count(daemon->pid)) != daemon->fds_at_start &&
	       support_now_ms() < until)
		support_sleep_ms(10);
	cr_expect_eq(n, daemon->fds_at_start, "%u descriptors, %u at start", n,
		     daemon->fds_at_start);
	status = support_daemon_stop(daemon);
	if (status != 0)
		print_log(daemon);
	cr_expect_eq(status, 0, "exit status %d", status);
	cr_expect_neq(access(daemon->socket, F_OK), 0, "the socket's file is still there");
	support_daemon_clean(daemon);
}

bool support_log_has(const struct support_daemon *daemon, const char *text)
{
	char line[2048];
	FILE *file = fopen(daemon->log, "r");
	bool has = false;

	while (file && !has && fgets(line, sizeof(line), file))
		has = strstr(line, text) != NULL;
	if (file)
		fclose(file);
	return has;
}

/* ---- packets */

int support_connect(const struct support_daemon *daemon)
{
	int fd = try_connect(daemon);

	cr_assert_geq(fd, 0, "connect: %s", strerror(errno));
	return fd;
}

int support_send(int fd, const void *bytes, size_t n, const int *fds, size_t n_fds)
{
	for (int i = 0; i < support_slow_ms(REPLY_MS); i++) {
		int r = kvp_packet_send(fd, bytes, n, fds, n_fds);

		if (r != -EAGAIN)
			return r;
		support_sleep_ms(1);
	}
	return -ETIMEDOUT;
}

void support_send_msg(int fd, const Kvp__ClientMsg *msg, const int *fds, size_t n_fds)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	long n = kvp_msg_encode_client(msg, buf, sizeof(buf));

	cr_assert_gt(n, 0);
	cr_assert_eq(support_send(fd, buf, (size_t)n, fds, n_fds), 0);
}

static bool readable(int fd, uint64_t until)
{
	struct pollfd pfd = { fd, POLLIN, 0 };
	uint64_t now = support_now_ms();

	return now < until && poll(&pfd, 1, support_slow_ms((int)(until - now))) == 1;
}

bool support_recv(int fd, struct support_reply *reply, int ms)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	uint64_t until = support_now_ms() + (uint64_t)ms;

	while (readable(fd, until)) {
		int fds[2];
		size_t n_fds = 0;
		char err[SUPPORT_TEXT];
		Kvp__DaemonMsg *msg = NULL;
		ssize_t n = kvp_packet_recv(fd, buf, sizeof(buf), fds, &n_fds, 2);

		if (n <= 0)
			return false;
		cr_assert_eq(kvp_msg_decode_daemon(buf, (size_t)n, &msg, err, sizeof(err)), 0, "%s",
			     err);
		cr_assert_leq(n_fds, 1);
		if (msg->body_case == KVP__DAEMON_MSG__BODY_REPLY) {
			reply->id = msg->reply->id;
			reply->status = msg->reply->status;
			reply->session = msg->reply->hello ? msg->reply->hello->session : 0;
			reply->recalled_from = msg->reply->recalled_from;
			reply->fd = n_fds ? fds[0] : -1;
			snprintf(reply->text, sizeof(reply->text), "%s", msg->reply->text);
			kvp_msg_free_daemon(msg);
			return true;
		}
		kvp_msg_free_daemon(msg);
	}
	return false;
}

bool support_closed(int fd, int ms)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	uint64_t until = support_now_ms() + (uint64_t)ms;

	while (readable(fd, until)) {
		int fds[2];
		size_t n_fds = 0;
		ssize_t n = kvp_packet_recv(fd, buf, sizeof(buf), fds, &n_fds, 2);

		if (n <= 0 && n != -EAGAIN)
			return true;
		for (size_t i = 0; i < n_fds; i++)
			close(fds[i]);
	}
	return false;
}

struct support_reply support_call(int fd, Kvp__ClientMsg *msg, const int *fds, size_t n_fds)
{
	static uint64_t last_id = 1000;
	struct support_reply reply = { .fd = -1 };

	msg->id = ++last_id;
	support_send_msg(fd, msg, fds, n_fds);
	cr_assert(support_recv(fd, &reply, REPLY_MS), "no reply to request %llu",
		  (unsigned long long)msg->id);
	cr_assert_eq(reply.id, msg->id);
	return reply;
}

int support_hello(const struct support_daemon *daemon, const char *name)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	struct support_reply reply;
	int fd = support_connect(daemon);

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.name = (char *)name;
	hello.pid = (uint32_t)getpid();
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s", reply.text);
	/* Valgrind has no pidfds. */
	cr_assert(reply.fd >= 0 || getenv("KVP_WRAP"), "no pidfd came with hello");
	if (reply.fd >= 0)
		close(reply.fd);
	return fd;
}

/* ---- pools and displays */

int support_memfd(uint64_t bytes)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	cr_assert_geq(fd, 0);
	cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
	return fd;
}

void support_entry(Kvp__Entry *entry, uint32_t layer, uint32_t row_bytes, uint32_t n_pages)
{
	kvp__entry__init(entry);
	entry->layer = layer;
	entry->row_bytes = row_bytes;
	entry->full_bytes = row_bytes;
	entry->rows_per_page = 64;
	entry->n_pages = n_pages;
	entry->row_stride = row_bytes;
	entry->page_stride = 64ull * row_bytes;
	entry->bytes = entry->page_stride * n_pages;
}

struct support_reply support_register(int fd, uint32_t pool, Kvp__Entry *entry, const int *fds,
				      size_t n_fds)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;

	body.pool = pool;
	body.entries = &entry;
	body.n_entries = 1;
	body.label = (char *)"test pool";
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &body;
	return support_call(fd, &msg, fds, n_fds);
}

cJSON *support_inspect(int fd, const char *what, const char *arg)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect inspect = KVP__INSPECT__INIT;
	struct support_reply reply;
	struct stat st;
	char *text;
	cJSON *json;

	inspect.what = (char *)what;
	inspect.arg = (char *)(arg ? arg : "");
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &inspect;
	reply = support_call(fd, &msg, NULL, 0);
	cr_assert_eq(reply.status, KVP__STATUS__STATUS_OK, "%s: %s", what, reply.text);
	cr_assert_geq(reply.fd, 0);
	cr_assert_eq(fstat(reply.fd, &st), 0);
	text = calloc(1, (size_t)st.st_size + 1);
	cr_assert(text);
	cr_assert_eq(pread(reply.fd, text, (size_t)st.st_size, 0), st.st_size);
	close(reply.fd);
	json = cJSON_Parse(text);
	cr_assert(json, "%s: %s", what, text);
	free(text);
	return json;
}

double support_status_number(int fd, const char *name)
{
	cJSON *json = support_inspect(fd, "status", NULL);
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
	double value;

	cr_assert(cJSON_IsNumber(item), "%s", name);
	value = item->valuedouble;
	cJSON_Delete(json);
	return value;
}
