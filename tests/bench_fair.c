/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a quiet client notices of one that floods, by kind of flood. The flood is a process of its
 * own, as is one that only burns its processor: beside that one the quiet client waits for the
 * scheduler alone, and what is more beside a flood is the daemon's part.
 *
 * With four processors and more the daemon has two, the quiet client and the flood one each, and
 * nobody waits for the scheduler. With fewer the daemon has one, and the clients share the other:
 * then only the ratio to the burner says something of the daemon.
 *
 *     bench_fair [--rooms N] [--rounds N] [--free] [KIND ...]
 *
 * --free: the scheduler places them. Medians of the rounds, which take all kinds in turn.
 */

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "proto/packet.h"
#include "tests/support_raw.h"
#include "tests/support_rig.h"

#define SAMPLES 400u
#define ROUNDS_MAX 25u
#define CROWD 32u

static struct rig rig;
static struct rig_daemon *daemon_;
static int pool_fd;
static cpu_set_t cpus_daemon, cpus_quiet, cpus_flood;
static bool placed = true;
static uint32_t n_rooms = 5000, n_rounds = 5;

/* ---- places --------------------------------------------------------------------------------- */

static void be_on(const cpu_set_t *cpus)
{
	if (placed)
		RIG_REQUIRE(sched_setaffinity(0, sizeof(*cpus), cpus) == 0);
}

static void choose_places(void)
{
	int cpus[4], n = 0;
	cpu_set_t all;

	RIG_REQUIRE(sched_getaffinity(0, sizeof(all), &all) == 0);
	for (int i = 0; i < CPU_SETSIZE && n < 4; i++)
		if (CPU_ISSET(i, &all))
			cpus[n++] = i;
	placed = placed && n > 1;
	if (!placed) {
		(void)printf("%d processors, the scheduler places everybody\n", CPU_COUNT(&all));
		return;
	}
	CPU_SET(cpus[0], &cpus_daemon);
	if (n == 4)
		CPU_SET(cpus[1], &cpus_daemon);
	CPU_SET(cpus[n == 4 ? 2 : 1], &cpus_quiet);
	CPU_SET(cpus[n == 4 ? 3 : 1], &cpus_flood);
	(void)printf("%d processors: %d for the daemon, %s\n", CPU_COUNT(&all),
		     CPU_COUNT(&cpus_daemon),
		     n == 4 ? "one for the quiet client, one for the flood"
			    : "one for both clients: look at the ratio to the burner");
}

/* ---- floods --------------------------------------------------------------------------------- */

static void burn(void)
{
	for (volatile uint32_t i = 0;; i++)
		;
}

/* Sends the packet as fast as it goes, and reads the answers when it must. */
static void pour(struct raw *raws, uint32_t n_raws, Kvp__ClientMsg *msg)
{
	static uint8_t out[KVP_LIMIT_PACKET], in[4096];
	long n;

	msg->id = 9;
	n = kvp_msg_encode_client(msg, out, sizeof(out));
	RIG_REQUIRE(n > 0);
	for (uint32_t i = 0;; i = (i + 1) % n_raws) {
		while (kvp_packet_send(raws[i].fd, out, (size_t)n, NULL, 0) == 0)
			;
		while (recv(raws[i].fd, in, sizeof(in), MSG_DONTWAIT) > 0)
			;
	}
}

static void pour_aborts(uint32_t n_raws)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Abort body = KVP__ABORT__INIT;
	struct raw raws[CROWD];

	for (uint32_t i = 0; i < n_raws; i++)
		raw_greet(&raws[i], daemon_->socket);
	body.handle = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_ABORT;
	msg.abort = &body;
	pour(raws, n_raws, &msg);
}

static void flood_small(void)
{
	pour_aborts(1);
}

static void flood_crowd(void)
{
	pour_aborts(CROWD);
}

/* As long as packets may be: page numbers for a list, until that is full, and further. */
static void flood_large(void)
{
	static uint32_t pages[30000];
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Pages body = KVP__PAGES__INIT;
	struct raw raw;

	for (uint32_t i = 0; i < 30000; i++)
		pages[i] = (1u << 27) + i;
	raw_greet(&raw, daemon_->socket);
	body.list = 1;
	body.pages = pages;
	body.n_pages = 26000;
	msg.body_case = KVP__CLIENT_MSG__BODY_PAGES;
	msg.pages = &body;
	pour(&raw, 1, &msg);
}

static void must_register(struct raw *raw)
{
	char text[RAW_TEXT];

	RIG_REQUIRE(raw_register(raw, 1, pool_fd, text) == KVP__STATUS__STATUS_OK, "%s", text);
}

static void flood_pools(void)
{
	struct raw raw;

	raw_greet(&raw, daemon_->socket);
	for (;;) {
		must_register(&raw);
		raw_unregister(&raw, 1);
	}
}

static void flood_chunks(void)
{
	struct raw raw;

	raw_greet(&raw, daemon_->socket);
	must_register(&raw);
	for (uint64_t room = UINT64_C(1) << 40;; room++) {
		raw_open(&raw, room);
		for (uint32_t i = 0; i < 16; i++) {
			raw_pages(&raw, 2);
			raw_submit(&raw, raw.next_handle, i);
		}
		raw_abort(&raw, raw.next_handle);
	}
}

static void flood_connects(void)
{
	for (;;) {
		struct raw raw;

		raw_greet(&raw, daemon_->socket);
		(void)close(raw.fd);
	}
}

static void inspect_on(const char *what)
{
	struct raw raw;

	raw_greet(&raw, daemon_->socket);
	for (;;)
		(void)close(raw_inspect(&raw, what));
}

static void flood_rooms(void)
{
	inspect_on("rooms");
}

static void flood_status(void)
{
	inspect_on("status");
}

struct kind {
	const char *name, *text;
	void (*run)(void);
};

static const struct kind kinds[] = {
	{ "alone", "alone", NULL },
	{ "burner", "beside one that burns its processor", burn },
	{ "small", "beside one that pours small packets", flood_small },
	{ "crowd", "beside 32 connections that do", flood_crowd },
	{ "large", "beside one that pours the largest", flood_large },
	{ "pools", "beside one that registers pools", flood_pools },
	{ "chunks", "beside one that sends chunks", flood_chunks },
	{ "connects", "beside one that connects again and again", flood_connects },
	{ "rooms", "beside one that lists all rooms", flood_rooms },
	{ "status", "beside one that asks for the status", flood_status },
};
enum { ALONE, BURNER, KINDS = KVP_ARRAY_SIZE(kinds) };

/* ---- the quiet client ----------------------------------------------------------------------- */

struct result {
	double p50[ROUNDS_MAX], p99[ROUNDS_MAX], max;
};

static int by_value(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static double median(double *values, uint32_t n)
{
	qsort(values, n, sizeof(*values), by_value);
	return values[n / 2];
}

/* Asks now and then. */
static void quiet(struct raw *raw, struct result *result, uint32_t round)
{
	static double us[SAMPLES];
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause body = KVP__POOL_PAUSE__INIT;
	char text[RAW_TEXT];

	body.pool = 99;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_PAUSE;
	msg.pool_pause = &body;
	for (uint32_t i = 0; i < SAMPLES; i++) {
		uint64_t from = rig_now_ns();

		RIG_REQUIRE(raw_call_fd(raw, &msg, -1, NULL, text) ==
			    KVP__STATUS__STATUS_NOT_FOUND);
		us[i] = (double)(rig_now_ns() - from) / 1e3;
		rig_sleep_ms(1);
	}
	qsort(us, SAMPLES, sizeof(us[0]), by_value);
	result->p50[round] = us[SAMPLES / 2];
	result->p99[round] = us[SAMPLES * 99 / 100];
	result->max = KVP_MAX(result->max, us[SAMPLES - 1]);
}

static void beside(struct raw *raw, const struct kind *kind, struct result *result, uint32_t round)
{
	pid_t pid = kind->run ? fork() : 0;

	RIG_REQUIRE(pid >= 0);
	if (pid == 0 && kind->run) {
		be_on(&cpus_flood);
		kind->run();
	}
	rig_sleep_ms(50);
	quiet(raw, result, round);
	if (!kind->run)
		return;
	RIG_REQUIRE(waitpid(pid, NULL, WNOHANG) == 0, "%s: it has ended", kind->name);
	(void)kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
}

/* ---- what the daemon says ------------------------------------------------------------------- */

static void print_turns(struct raw *raw)
{
	static char text[1 << 18];
	int fd = raw_inspect(raw, "status");
	cJSON *root, *of;

	RIG_REQUIRE(pread(fd, text, sizeof(text) - 1, 0) > 0);
	(void)close(fd);
	root = cJSON_Parse(text);
	RIG_REQUIRE(root);
	(void)printf("\nturns of the daemon's loop that took less than 2, 4, 8 ... us\n");
	cJSON_ArrayForEach (of, cJSON_GetObjectItemCaseSensitive(root, "loop")) {
		const cJSON *n;

		(void)printf("%-14s", of->string);
		cJSON_ArrayForEach (n, cJSON_GetObjectItemCaseSensitive(of, "log2_us"))
			(void)printf(" %.0f", n->valuedouble);
		(void)printf("\n");
	}
	cJSON_Delete(root);
}

/* ---- all ------------------------------------------------------------------------------------ */

static void fill(struct raw *raw)
{
	raw_greet(raw, daemon_->socket);
	must_register(raw);
	for (uint64_t room = 1; room <= n_rooms; room++)
		raw_open(raw, room);
}

static bool is_wanted(const struct kind *kind, int argc, char **argv)
{
	bool any = false;

	for (int i = 1; i < argc; i++) {
		if (!strncmp(argv[i], "--", 2)) {
			i += strcmp(argv[i], "--free") != 0;
			continue;
		}
		any = true;
		if (!strcmp(argv[i], kind->name))
			return true;
	}
	return !any || kind == &kinds[ALONE] || kind == &kinds[BURNER];
}

static void options(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--free"))
			placed = false;
		else if (!strcmp(argv[i], "--rooms") && i + 1 < argc)
			n_rooms = (uint32_t)strtoul(argv[++i], NULL, 10);
		else if (!strcmp(argv[i], "--rounds") && i + 1 < argc)
			n_rounds = (uint32_t)strtoul(argv[++i], NULL, 10);
	}
	RIG_REQUIRE(n_rounds > 0 && n_rounds <= ROUNDS_MAX, "--rounds: 1 to %u", ROUNDS_MAX);
}

static void print(struct result *results, int argc, char **argv)
{
	double alone = median(results[ALONE].p99, n_rounds);
	double burner = median(results[BURNER].p99, n_rounds);

	(void)printf("%u rooms; medians of %u rounds of %u requests\n\n", n_rooms, n_rounds,
		     SAMPLES);
	(void)printf("%-42s %8s %8s %8s  (us) %12s %12s\n", "a quiet client", "p50", "p99", "max",
		     "p99 / alone", "p99 / burner");
	for (size_t i = 0; i < KINDS; i++) {
		if (!is_wanted(&kinds[i], argc, argv))
			continue;
		(void)printf("%-42s %8.0f %8.0f %8.0f       %12.2f %12.2f\n", kinds[i].text,
			     median(results[i].p50, n_rounds), median(results[i].p99, n_rounds),
			     results[i].max, median(results[i].p99, n_rounds) / alone,
			     median(results[i].p99, n_rounds) / burner);
	}
}

int main(int argc, char **argv)
{
	static struct result results[KINDS];
	struct raw filler, asker;
	void *map;

	(void)setvbuf(stdout, NULL, _IOLBF, 0); /* or it is printed by each child */
	options(argc, argv);
	choose_places();
	rig_begin(&rig);
	be_on(&cpus_daemon);
	daemon_ = rig_daemon_start(&rig, "fair", "[timers]\nopen = 600s\n");
	be_on(&cpus_quiet);
	RIG_REQUIRE(kvp_memory_create("pool", RAW_POOL_BYTES, &pool_fd, &map) == 0);
	fill(&filler);
	raw_greet(&asker, daemon_->socket);
	for (uint32_t round = 0; round < n_rounds; round++)
		for (size_t i = 0; i < KINDS; i++)
			if (is_wanted(&kinds[i], argc, argv))
				beside(&asker, &kinds[i], &results[i], round);
	print(results, argc, argv);
	print_turns(&asker);
	(void)close(filler.fd);
	(void)close(asker.fd);
	rig_end(&rig);
	rig_remove(&rig);
	return 0;
}
