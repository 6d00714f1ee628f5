/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load: 256 clients, 50,000 rooms and 256 light peers on one daemon. Prints the latency of each
 * kind of request with all of them there, what an object takes of memory, and how the daemon gets
 * over a lack of descriptors and of memory.
 *
 *     load                all of it
 *     load --small        few of each, no timing: only what must be so
 */

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "proto/msg.h"
#include "tests/support_peers.h"
#include "tests/support_raw.h"
#include "tests/support_rig.h"

#define CLIENTS_MAX 256u
#define SAMPLES 1000u
#define WAIT_NS UINT64_C(60000000000)

enum kind { HELLO, POOL, PAGES, EXPECT, OPEN, SUBMIT, RECALL, RENEW, ABORT, STATUS, ROOMS, KINDS };

static const char *const kind_names[KINDS] = { "hello", "pool_register",  "pages",        "expect",
					       "open",  "submit",         "recall",       "renew",
					       "abort", "inspect status", "inspect rooms" };

struct times {
	double *us;
	uint32_t n, cap;
};

static struct rig rig;
static struct rig_daemon *daemon_;
static struct peers *peers;
static struct raw clients[CLIENTS_MAX];
static struct times times[KINDS];
static uint32_t n_clients = CLIENTS_MAX, n_rooms = 50000, n_peers = 256, n_samples = SAMPLES;
static bool small;
static int pool_fd;
static uint64_t next_room = 1;

/* ---- requests ------------------------------------------------------------------------------- */

static void take_time(struct times *t, uint64_t from_ns)
{
	if (t->n == t->cap) {
		t->cap = KVP_MAX(2 * t->cap, 1024u);
		t->us = realloc(t->us, t->cap * sizeof(*t->us));
		RIG_REQUIRE(t->us);
	}
	t->us[t->n++] = (double)(rig_now_ns() - from_ns) / 1e3;
}

static int by_value(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static double percentile(struct times *t, double p)
{
	if (t->n == 0)
		return 0;
	qsort(t->us, t->n, sizeof(*t->us), by_value);
	return t->us[(size_t)(p * (double)(t->n - 1))];
}

/* Must succeed; counts its time. */
static void call(struct raw *client, enum kind kind, Kvp__ClientMsg *msg)
{
	uint64_t from = rig_now_ns();

	raw_call(client, msg, -1);
	take_time(&times[kind], from);
}

static void hello(struct raw *client)
{
	uint64_t from = rig_now_ns();

	raw_hello(client);
	take_time(&times[HELLO], from);
}

static void register_pool(struct raw *client)
{
	uint64_t from = rig_now_ns();
	char text[RAW_TEXT];

	RIG_REQUIRE(raw_register(client, 1, pool_fd, text) == KVP__STATUS__STATUS_OK, "%s", text);
	take_time(&times[POOL], from);
}

static void pages(struct raw *client, uint32_t list)
{
	uint64_t from = rig_now_ns();

	raw_pages(client, list);
	take_time(&times[PAGES], from);
}

/* Of one page, from one of the light peers. */
static void expect(struct raw *client)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Expect body = KVP__EXPECT__INIT;
	Kvp__ExpectSender sender = KVP__EXPECT_SENDER__INIT, *senders = &sender;
	Kvp__Side side = raw_side(), *sides = &side;

	pages(client, 1);
	side.list = 1;
	sender.address = (char *)peers_address(peers, (uint32_t)(next_room % n_peers));
	sender.n_dests = 1;
	body.handle = ++client->next_handle;
	body.room = next_room++;
	body.pool = 1;
	body.sides = &sides;
	body.n_sides = 1;
	body.end = RAW_PAGE;
	body.meta_from = -1;
	body.senders = &senders;
	body.n_senders = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_EXPECT;
	msg.expect = &body;
	call(client, EXPECT, &msg);
}

static void open_room(struct raw *client, uint64_t room)
{
	uint64_t from = rig_now_ns();

	raw_open(client, room);
	take_time(&times[OPEN], from);
}

static void open_(struct raw *client)
{
	open_room(client, next_room++);
}

static void submit(struct raw *client, uint64_t handle)
{
	uint64_t from;

	pages(client, 2);
	from = rig_now_ns();
	raw_submit(client, handle, 0);
	take_time(&times[SUBMIT], from);
}

static void recall(struct raw *client, uint64_t handle)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Recall body = KVP__RECALL__INIT;

	body.handle = handle;
	msg.body_case = KVP__CLIENT_MSG__BODY_RECALL;
	msg.recall = &body;
	call(client, RECALL, &msg);
}

static void abort_room(struct raw *client, uint64_t handle)
{
	uint64_t from = rig_now_ns();

	raw_abort(client, handle);
	take_time(&times[ABORT], from);
}

static void renew(struct raw *client)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Renew body = KVP__RENEW__INIT;

	body.address = (char *)peers_address(peers, (uint32_t)(times[RENEW].n % n_peers));
	body.room = 1;
	body.lease_ms = 1000;
	msg.body_case = KVP__CLIENT_MSG__BODY_RENEW;
	msg.renew = &body;
	call(client, RENEW, &msg);
}

static cJSON *inspect(struct raw *client, enum kind kind)
{
	uint64_t from = rig_now_ns();
	int fd = raw_inspect(client, kind == STATUS ? "status" : "rooms");
	struct stat st;
	cJSON *root;
	char *json;

	take_time(&times[kind], from);
	RIG_REQUIRE(fstat(fd, &st) == 0);
	json = calloc(1, (size_t)st.st_size + 1);
	RIG_REQUIRE(json && pread(fd, json, (size_t)st.st_size, 0) == st.st_size);
	(void)close(fd);
	root = cJSON_Parse(json);
	RIG_REQUIRE(root, "%s", json);
	free(json);
	return root;
}

/* A number of the status: "clients", or "rooms" and "dest". */
static double status_number(const char *name, const char *below)
{
	cJSON *root = inspect(&clients[0], STATUS);
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, name);
	double value;

	if (below)
		item = cJSON_GetObjectItemCaseSensitive(item, below);
	RIG_REQUIRE(cJSON_IsNumber(item), "%s", name);
	value = item->valuedouble;
	cJSON_Delete(root);
	return value;
}

/* ---- memory --------------------------------------------------------------------------------- */

/* A line of the daemon's status in the kernel's words, in bytes. */
static double memory(const char *name)
{
	char path[64], line[256];
	double kib = 0;
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)daemon_->pid);
	file = fopen(path, "re");
	RIG_REQUIRE(file);
	while (fgets(line, sizeof(line), file)) {
		if (!strncmp(line, name, strlen(name)))
			kib = strtod(line + strlen(name) + 1, NULL);
	}
	(void)fclose(file); /* only read */
	return kib * 1024;
}

static void print_memory(const char *what, uint32_t n, double before)
{
	if (!small)
		(void)printf("  %-34s %8.0f bytes\n", what, (memory("VmRSS:") - before) / n);
}

/* ---- the parts ------------------------------------------------------------------------------ */

static void wait_for(const char *what, bool (*is_so)(void))
{
	uint64_t until = rig_now_ns() + WAIT_NS;

	while (!is_so()) {
		RIG_REQUIRE(rig_now_ns() < until, "waited too long for %s", what);
		rig_sleep_ms(2);
	}
}

static bool all_offered(void)
{
	return peers_offers(peers) >= n_rooms / 2;
}

static void fill(void)
{
	const uint32_t half = n_rooms / 2;
	double before = memory("VmRSS:");

	if (!small)
		(void)printf("memory of\n");
	for (uint32_t i = 0; i < n_clients; i++) {
		raw_connect(&clients[i], daemon_->socket);
		hello(&clients[i]);
	}
	print_memory("a session", n_clients, before);
	RIG_REQUIRE(n_clients > 0);
	before = memory("VmRSS:");
	for (uint32_t i = 0; i < n_clients; i++)
		register_pool(&clients[i]);
	print_memory("a pool", n_clients, before);
	before = memory("VmRSS:");
	for (uint32_t i = 0; i < n_peers; i++)
		renew(&clients[i % n_clients]);
	while (peers_words(peers) < n_peers)
		rig_sleep_ms(2);
	RIG_REQUIRE(peers_up(peers) == n_peers);
	print_memory("a peer", n_peers, before);
	before = memory("VmRSS:");
	for (uint32_t i = 0; i < half; i++)
		open_(&clients[i % n_clients]);
	print_memory("a sender's end, parked", half, before);
	before = memory("VmRSS:");
	for (uint32_t i = 0; i < half; i++)
		expect(&clients[i % n_clients]);
	wait_for("all offers", all_offered);
	print_memory("a destination, offered", half, before);
	RIG_REQUIRE(status_number("rooms", "send") == half &&
		    status_number("rooms", "dest") == half);
}

/* ---- all rooms at once ----------------------------------------------------------------------- */

/* Rooms that come and go while others are listed have numbers from here on. */
#define PASSING (UINT64_C(1) << 40)

/* A process of its own until it is killed. */
static pid_t beside(void (*run)(void))
{
	pid_t pid;

	(void)fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid > 0)
		return pid;
	run();
	_exit(0);
}

static void end_beside(pid_t pid)
{
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

/* Each room that stays is in the list once. */
static void list_rooms(struct raw *client)
{
	cJSON *root = inspect(client, ROOMS);
	uint8_t *seen = calloc(next_room, 1);
	const cJSON *item;
	uint32_t n = 0;

	RIG_REQUIRE(seen);
	cJSON_ArrayForEach (item, cJSON_GetObjectItemCaseSensitive(root, "rooms")) {
		const cJSON *name = cJSON_GetObjectItemCaseSensitive(item, "room");
		uint64_t room = cJSON_IsString(name) ? strtoull(name->valuestring, NULL, 16) : 0;

		RIG_REQUIRE(room > 0 && (room >= PASSING || room < next_room));
		if (room >= PASSING)
			continue;
		RIG_REQUIRE(!seen[room], "room %llu twice", (unsigned long long)room);
		seen[room] = 1;
		n++;
	}
	RIG_REQUIRE(n == n_rooms, "%u rooms of %u are listed", n, n_rooms);
	free(seen);
	cJSON_Delete(root);
}

static void pass_rooms(void)
{
	struct raw client;

	raw_connect(&client, daemon_->socket);
	hello(&client);
	register_pool(&client);
	for (uint64_t i = 0;; i++) {
		open_room(&client, PASSING + i);
		abort_room(&client, client.next_handle);
	}
}

static void list_among_passing(void)
{
	pid_t pid = beside(pass_rooms);

	for (int i = 0; i < 2; i++) {
		double before = status_number("counters", "aborts");

		while (status_number("counters", "aborts") < before + 10)
			rig_sleep_ms(1);
		list_rooms(&clients[i]);
	}
	end_beside(pid);
}

/* With all rooms there. */
static void measure(void)
{
	for (uint32_t i = 0; i < n_samples; i++) {
		struct raw *client = &clients[i % n_clients];

		open_(client);
		submit(client, client->next_handle);
		recall(client, client->next_handle);
		abort_room(client, client->next_handle);
		renew(client);
	}
	for (uint32_t i = 0; i < n_samples / 20; i++)
		cJSON_Delete(inspect(&clients[i % n_clients], STATUS));
	for (uint32_t i = 0; i < n_samples / 100; i++)
		list_rooms(&clients[i % n_clients]);
	if (small)
		return;
	(void)printf("\n%-16s %8s %10s %10s %10s  (us)\n", "request", "n", "p50", "p99", "max");
	for (int i = 0; i < KINDS; i++)
		(void)printf("%-16s %8u %10.0f %10.0f %10.0f\n", kind_names[i], times[i].n,
			     percentile(&times[i], 0.5), percentile(&times[i], 0.99),
			     percentile(&times[i], 1));
}

/* ---- limits on purpose ---------------------------------------------------------------------- */

/* The number that its next descriptor gets: others below and above may be taken. */
static uint32_t next_fd(void)
{
	char path[64];
	uint32_t fd = 0;

	do
		(void)snprintf(path, sizeof(path), "/proc/%d/fd/%u", (int)daemon_->pid, fd++);
	while (access(path, F_OK) == 0);
	return fd - 1;
}

static uint32_t fd_limit;

static bool table_is_full(void)
{
	return next_fd() >= fd_limit;
}

/* A slow path that has never been gone is not shown. */
static double accept_pauses(void)
{
	cJSON *root = inspect(&clients[0], STATUS);
	const cJSON *path;
	double n = 0;

	cJSON_ArrayForEach (path, cJSON_GetObjectItemCaseSensitive(root, "slow_paths")) {
		const cJSON *name = cJSON_GetObjectItemCaseSensitive(path, "name");

		if (!strcmp(cJSON_GetStringValue(name), "accept_pauses"))
			n = cJSON_GetObjectItemCaseSensitive(path, "count")->valuedouble;
	}
	cJSON_Delete(root);
	return n;
}

/* Without descriptors for more, those that are there are served, and the rest as soon as it can. */
static void no_descriptors(void)
{
	struct rlimit old, low;
	struct raw more[8];
	double before = accept_pauses();

	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_NOFILE, NULL, &old) == 0);
	low = old;
	low.rlim_cur = next_fd() + 4;
	fd_limit = (uint32_t)low.rlim_cur;
	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_NOFILE, &low, NULL) == 0);
	for (int i = 0; i < 8; i++)
		raw_connect(&more[i], daemon_->socket);
	wait_for("no descriptor to be left", table_is_full);
	for (int i = 0; i < 8; i++) /* turns in which it tries to accept the others */
		renew(&clients[0]);
	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_NOFILE, &old, NULL) == 0);
	RIG_REQUIRE(accept_pauses() > before, "accept did not pause");
	for (int i = 0; i < 8; i++) {
		hello(&more[i]);
		(void)close(more[i].fd);
	}
}

/* Without memory a pool is refused with words, and the others are served. */
static void no_memory(void)
{
	const uint64_t bytes = UINT64_C(1) << 30;
	struct rlimit old, low;
	char text[RAW_TEXT] = "";
	Kvp__Status status;
	int fd = memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	RIG_REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_AS, NULL, &old) == 0);
	low = old;
	low.rlim_cur = (rlim_t)memory("VmSize:") + (bytes >> 1);
	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_AS, &low, NULL) == 0);
	status = raw_register(&clients[0], 7, fd, text);
	renew(&clients[1 % n_clients]);
	RIG_REQUIRE(prlimit(daemon_->pid, RLIMIT_AS, &old, NULL) == 0);
	RIG_REQUIRE(status != KVP__STATUS__STATUS_OK && text[0], "it was taken");
	if (!small)
		(void)printf("without memory   refused: %s\n", text);
	RIG_REQUIRE(raw_register(&clients[0], 7, fd, text) == KVP__STATUS__STATUS_OK, "%s", text);
	(void)close(fd);
}

/* ---- the end -------------------------------------------------------------------------------- */

static void read_events(void)
{
	static uint8_t buf[KVP_LIMIT_PACKET];

	for (uint32_t i = 0; i < n_clients; i++) {
		while (recv(clients[i].fd, buf, sizeof(buf), MSG_DONTWAIT) > 0)
			;
	}
}

static bool no_destinations(void)
{
	read_events();
	return status_number("rooms", "dest") == 0;
}

static bool alone(void)
{
	return status_number("clients", NULL) == 1 && status_number("rooms", "send") == 0 &&
	       status_number("pools", NULL) == 0;
}

static void finish(void)
{
	uint64_t from = rig_now_ns();

	peers_abort_all(peers);
	wait_for("the rooms to fail", no_destinations);
	if (!small)
		(void)printf("peers give up    %u rooms failed, told and released in %.0f ms\n",
			     n_rooms / 2, (double)(rig_now_ns() - from) / 1e6);
	from = rig_now_ns();
	for (uint32_t i = 0; i < n_clients; i++)
		(void)close(clients[i].fd);
	raw_connect(&clients[0], daemon_->socket);
	hello(&clients[0]);
	wait_for("everything to be gone", alone);
	if (!small)
		(void)printf("clients go       %u rooms and %u pools gone in %.0f ms\n",
			     n_rooms / 2, n_clients, (double)(rig_now_ns() - from) / 1e6);
	(void)close(clients[0].fd);
}

int main(int argc, char **argv)
{
	struct rlimit files = { 8192, 8192 };
	void *map;

	small = argc > 1 && !strcmp(argv[1], "--small");
	if (small) {
		n_clients = 8;
		n_rooms = 400;
		n_peers = 8;
		n_samples = 40;
	}
	if (setrlimit(RLIMIT_NOFILE, &files) < 0) { /* what there is may do */
		(void)getrlimit(RLIMIT_NOFILE, &files);
		files.rlim_cur = files.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &files);
	}
	rig_begin(&rig);
	rig.timing =
		"heartbeat = 1s\nlost_after = 30s\nmax_sessions = 600\nmax_host_sessions = 600\n";
	daemon_ = rig_daemon_start(
		&rig, "loaded",
		"[client]\nmax_sessions = 300\nmax_process_sessions = 300\nstall = 60s\n[limits]\n"
		"max_rooms = 60000\nmax_pools = 400\n[timers]\noffer = 600s\n"
		"open = 600s\nprogress = 600s\nlease = 600s\n");
	RIG_REQUIRE(kvp_memory_create("pool", RAW_POOL_BYTES, &pool_fd, &map) == 0);
	peers = peers_start(n_peers);
	fill();
	list_among_passing();
	measure();
	no_descriptors();
	no_memory();
	finish();
	peers_stop(peers);
	rig_end(&rig);
	rig_remove(&rig);
	(void)printf("%u clients, %u rooms, %u peers: nothing left\n", n_clients, n_rooms, n_peers);
	return 0;
}
