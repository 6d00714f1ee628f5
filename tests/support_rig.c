/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_rig.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tests/support_clock.h"

unsigned int rig_deadline_s = 120;

/* Whose failure it is, in messages. */
static char self[64] = "rig";

void (*rig_dying)(void);

void rig_die(const char *where, int line, const char *cond, const char *fmt, ...)
{
	va_list args;

	fflush(stdout);
	fprintf(stderr, "%s: %s:%d: not so: %s: ", self, where, line, cond);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fprintf(stderr, "\n");
	if (rig_dying)
		KVP_TAKE(rig_dying)();
	_exit(1);
}

uint64_t rig_now_ns(void)
{
	return support_clock_ns();
}

void rig_sleep_ms(unsigned int ms)
{
	(void)poll(NULL, 0, (int)ms); /* a signal only makes it shorter */
}

void rig_program(char *buf, size_t bytes, const char *name)
{
	const char *dir = getenv("KVP_BIN");
	char exe[4096];
	ssize_t n;
	int i;

	if (!dir) { /* tests/ is one level below the programs */
		n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
		RIG_REQUIRE(n > 0, "%s", strerror(errno));
		exe[n] = 0;
		for (i = 0; i < 2 && strrchr(exe, '/'); i++)
			*strrchr(exe, '/') = 0;
		dir = exe;
	}
	RIG_REQUIRE(snprintf(buf, bytes, "%s/%s", dir, name) < (int)bytes);
}

/* ---- daemons -------------------------------------------------------------------------------- */

void rig_begin(struct rig *rig)
{
	const char *tmp = getenv("TMPDIR");
	void *map;

	memset(rig, 0, sizeof(*rig));
	snprintf(rig->dir, sizeof(rig->dir), "%s/kvp-rig-XXXXXX",
		 tmp && strlen(tmp) < 32 ? tmp : "/tmp");
	RIG_REQUIRE(mkdtemp(rig->dir), "%s: %s", rig->dir, strerror(errno));
	map = mmap(NULL, RIG_STAGES * sizeof(uint64_t), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	RIG_REQUIRE(map != MAP_FAILED, "%s", strerror(errno));
	rig->stages = map;
}

/* KVP_TEST_CHECKSUM=on, required: sums. KVP_TEST_NET=verbs, or ucx: over RDMA, prefill's daemons on
 * rxe1, all others on rxe2; with KVP_TEST_RAILS=2 also on rxe3 and rxe4. KVP_TEST_MODE: how it
 * moves. */
static void transport_configure(const struct rig_daemon *daemon, FILE *file)
{
	const char *net = getenv("KVP_TEST_NET"), *mode = getenv("KVP_TEST_MODE");
	int first = daemon->name[0] == 'p' ? 1 : 2;

	if (!net)
		return;
	fprintf(file, "[data]\ntransport = %s\n", net);
	if (mode)
		fprintf(file, "mode = %s\n", mode);
	fprintf(file, "[ucx]\nnetwork = rdma\n");
	fprintf(file, "[verbs]\ndevice = rxe%d\n", first);
	if (getenv("KVP_TEST_CONNECT"))
		fprintf(file, "connect = %s\n", getenv("KVP_TEST_CONNECT"));
	if (getenv("KVP_TEST_RAILS"))
		fprintf(file, "device = rxe%d\n", first + 2);
}

/* A port that no connection gets from the kernel while the daemon is down between two starts. */
static unsigned port_pick(void)
{
	FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
	unsigned first = 0;
	char line[64];

	if (range) {
		if (fgets(line, sizeof(line), range))
			first = (unsigned)strtoul(line, NULL, 10);
		(void)fclose(range);
	}
	for (int i = 0; first > 12000 && i < 100; i++) {
		struct sockaddr_in addr = { .sin_family = AF_INET,
					    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		uint32_t random;
		int rc;

		RIG_REQUIRE(fd >= 0 && getrandom(&random, sizeof(random), 0) == sizeof(random));
		addr.sin_port = htons((uint16_t)(10000 + random % (first - 10000)));
		rc = bind(fd, (const struct sockaddr *)&addr, sizeof(addr));
		(void)close(fd);
		if (rc == 0)
			return ntohs(addr.sin_port);
	}
	return 0;
}

static void daemon_configure(struct rig_daemon *daemon, const char *path, const char *extra)
{
	FILE *file = fopen(path, "we");

	RIG_REQUIRE(file, "%s: %s", path, strerror(errno));
	fprintf(file, "[node]\nname = %s\n", daemon->name);
	fprintf(file, "[client]\nsocket = %s\nmode = 0600\ngroup =\n", daemon->socket);
	if (!daemon->address[0] && !daemon->alone)
		snprintf(daemon->address, sizeof(daemon->address), "127.0.0.1:%u", port_pick());
	fprintf(file, "[peer]\nlisten = %s\n", daemon->alone ? "" : daemon->address);
	if (daemon->timing)
		fprintf(file, "%s", daemon->timing);
	else /* on a slow machine nobody is dead because of a pause */
		fprintf(file, "heartbeat = 200ms\nlost_after = %ds\n", support_slow_ms(3));
	transport_configure(daemon, file);
	if (getenv("KVP_TEST_CHECKSUM"))
		fprintf(file, "[data]\nchecksum = %s\n", getenv("KVP_TEST_CHECKSUM"));
	fprintf(file, "%s", extra ? extra : "");
	RIG_REQUIRE(fclose(file) == 0);
}

static void daemon_exec(const struct rig_daemon *daemon, const char *config)
{
	char program[4096];
	int fd;

	rig_program(program, sizeof(program), daemon->program ? daemon->program : "kvpackd");
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	fd = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
		_exit(126);
	execl(program, "kvpackd", "--config", config, (char *)NULL);
	dprintf(2, "%s: %s\n", program, strerror(errno));
	_exit(127);
}

static void daemon_log(const struct rig_daemon *daemon)
{
	char line[512];
	FILE *file = fopen(daemon->log, "re");

	while (file && fgets(line, sizeof(line), file))
		fprintf(stderr, "  %s: %s", daemon->name, line);
	if (file)
		(void)fclose(file);
}

/* A client's hello is answered when the daemon serves; its address is known by then too. */
static void daemon_greet(struct rig_daemon *daemon)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_client *client;
	uint64_t until = rig_now_ns() + 60 * UINT64_C(1000000000); /* of an emulator */
	int status = 0, rc;

	options.socket = daemon->socket;
	while ((rc = kvp_client_open(&client, &options)) != 0) {
		if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid || rig_now_ns() > until) {
			daemon_log(daemon);
			rig_die(__FILE__, __LINE__, "daemon serves", "%s: %s, wait status %#x",
				daemon->name, strerror(-rc), (unsigned int)status);
		}
		rig_sleep_ms(10);
	}
	snprintf(daemon->address, sizeof(daemon->address), "%s", kvp_node_address(client));
	kvp_client_close(client);
}

void rig_daemon_restart(struct rig_daemon *daemon, const char *extra)
{
	char config[128];

	snprintf(config, sizeof(config), "%.*s.conf", (int)strlen(daemon->log) - 4, daemon->log);
	daemon_configure(daemon, config, extra);
	fflush(stdout);
	daemon->pid = fork();
	RIG_REQUIRE(daemon->pid >= 0, "%s", strerror(errno));
	if (!daemon->pid)
		daemon_exec(daemon, config);
	daemon_greet(daemon);
}

struct rig_daemon *rig_daemon_start(struct rig *rig, const char *name, const char *extra)
{
	struct rig_daemon *daemon = &rig->daemons[rig->n_daemons];
	char dir[sizeof(rig->dir)];

	RIG_REQUIRE(rig->n_daemons < RIG_DAEMONS);
	memcpy(dir, rig->dir, sizeof(dir));
	snprintf(daemon->name, sizeof(daemon->name), "%s", name);
	snprintf(daemon->socket, sizeof(daemon->socket), "%s/%s.sock", dir, name);
	snprintf(daemon->log, sizeof(daemon->log), "%s/%s.log", dir, name);
	daemon->timing = rig->timing;
	daemon->alone = rig->alone;
	daemon->program = rig->program;
	rig_daemon_restart(daemon, extra);
	rig->n_daemons++;
	return daemon;
}

/* Waits for a child until a deadline; returns its exit status, 128 + signal, or -1. */
static int child_wait(pid_t pid, uint64_t until_ns)
{
	int status;

	while (waitpid(pid, &status, WNOHANG) == 0) {
		if (rig_now_ns() > until_ns)
			return -1;
		rig_sleep_ms(2);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int rig_daemon_stop(struct rig_daemon *daemon)
{
	int rc;

	if (!daemon->pid)
		return 0;
	(void)kill(daemon->pid, SIGTERM);
	rc = child_wait(daemon->pid, rig_now_ns() + 30 * UINT64_C(1000000000));
	daemon->pid = 0;
	return rc;
}

void rig_daemon_kill(struct rig_daemon *daemon)
{
	RIG_REQUIRE(kill(daemon->pid, SIGKILL) == 0, "%s: %s", daemon->name, strerror(errno));
	RIG_REQUIRE(child_wait(daemon->pid, rig_now_ns() + 30 * UINT64_C(1000000000)) ==
		    128 + SIGKILL);
	daemon->pid = 0;
}

void rig_remove(struct rig *rig)
{
	struct dirent *entry;
	DIR *dir = getenv("KVP_RIG_KEEP") ? NULL : opendir(rig->dir);

	while (dir && (entry = readdir(dir)) != NULL) /* NOLINT(concurrency-mt-unsafe): own dir */
		(void)unlinkat(dirfd(dir), entry->d_name, 0); /* . and .. do not go */
	if (dir)
		(void)closedir(dir);
	(void)rmdir(rig->dir);
	(void)munmap(rig->stages, RIG_STAGES * sizeof(uint64_t));
}

void rig_end(struct rig *rig)
{
	uint32_t i;
	int rc;

	for (i = 0; i < rig->n_daemons; i++) {
		rc = rig_daemon_stop(&rig->daemons[i]);
		if (rc)
			daemon_log(&rig->daemons[i]);
		RIG_REQUIRE(rc == 0, "%s: exit status %d", rig->daemons[i].name, rc);
	}
}

/* ---- ranks ---------------------------------------------------------------------------------- */

pid_t rig_fork(const char *name, void (*fn)(void *arg), void *arg)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0, "%s", strerror(errno));
	if (!pid) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		snprintf(self, sizeof(self), "%s", name);
		fn(arg);
		fflush(stdout);
		_exit(0);
	}
	return pid;
}

void rig_rank_start(struct rig *rig, const char *name, void (*fn)(void *arg), void *arg)
{
	struct rig_rank *rank = &rig->ranks[rig->n_ranks];

	RIG_REQUIRE(rig->n_ranks < RIG_RANKS);
	snprintf(rank->name, sizeof(rank->name), "%s", name);
	rank->pid = rig_fork(name, fn, arg);
	rig->n_ranks++;
}

void rig_ranks_join(struct rig *rig, int secs)
{
	uint64_t until = rig_now_ns() + (uint64_t)secs * 1000000000u;
	uint32_t i, bad = 0;
	int rc;

	for (i = 0; i < rig->n_ranks; i++) {
		rc = child_wait(rig->ranks[i].pid, until);
		if (rc) {
			fprintf(stderr, "%s: %s %d\n", rig->ranks[i].name,
				rc < 0 ? "has not ended" : "exit status", rc);
			bad++;
			until = KVP_MIN(until, rig_now_ns() + 2 * UINT64_C(1000000000));
		}
	}
	if (bad)
		for (i = 0; i < rig->n_daemons; i++)
			daemon_log(&rig->daemons[i]);
	RIG_REQUIRE(bad == 0, "%u of %u ranks failed", bad, rig->n_ranks);
	rig->n_ranks = 0;
}

void rig_stage_set(struct rig *rig, uint32_t stage, uint64_t value)
{
	atomic_store_explicit(&rig->stages[stage], value, memory_order_release);
}

uint64_t rig_stage_get(const struct rig *rig, uint32_t stage)
{
	return atomic_load_explicit(&rig->stages[stage], memory_order_acquire);
}

void rig_stage_wait(const struct rig *rig, uint32_t stage, uint64_t value, int secs)
{
	uint64_t until = rig_now_ns() + (uint64_t)secs * 1000000000u;

	while (rig_stage_get(rig, stage) < value) {
		RIG_REQUIRE(rig_now_ns() < until, "stage %u is %llu, not %llu, after %d s", stage,
			    (unsigned long long)rig_stage_get(rig, stage),
			    (unsigned long long)value, secs);
		rig_sleep_ms(1);
	}
}

/* ---- scenarios ------------------------------------------------------------------------------ */

bool rig_run(const struct rig_scenario *scenario)
{
	struct rig rig;
	pid_t pid;
	int rc;

	rig_begin(&rig);
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		(void)setpgid(0, 0);
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		snprintf(self, sizeof(self), "%s", scenario->name);
		scenario->run(&rig);
		rig_end(&rig);
		_exit(0);
	}
	rc = child_wait(pid, rig_now_ns() + rig_deadline_s * UINT64_C(1000000000));
	if (rc < 0)
		fprintf(stderr, "%s: not over after %u s\n", scenario->name, rig_deadline_s);
	(void)kill(-pid, SIGKILL); /* what a failed scenario left; nobody otherwise */
	if (rc < 0)
		(void)waitpid(pid, NULL, 0);
	rig_remove(&rig);
	return rc == 0;
}

static bool scenario_named(int argc, char **argv, const char *name)
{
	int i;

	for (i = 1; i < argc; i++)
		if (!strcmp(argv[i], name))
			return true;
	return argc < 2;
}

int rig_main(int argc, char **argv, const struct rig_scenario *scenarios, size_t n)
{
	unsigned int passed = 0, failed = 0;
	uint64_t from;
	size_t i;
	bool ok;

	for (i = 0; i < n; i++) {
		if (!scenario_named(argc, argv, scenarios[i].name))
			continue;
		from = rig_now_ns();
		ok = rig_run(&scenarios[i]);
		printf("%-4s %s, %.1f s\n", ok ? "ok" : "FAIL", scenarios[i].name,
		       (double)(rig_now_ns() - from) / 1e9);
		passed += ok;
		failed += !ok;
	}
	printf("%u passed, %u failed\n", passed, failed);
	return failed || !passed;
}

void rig_sections(int argc, char **argv, const struct rig_section *sections, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (scenario_named(argc, argv, sections[i].name))
			sections[i].run();
		fflush(stdout);
	}
}

/* ---- bytes ---------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
	x ^= x >> 32;
	x *= UINT64_C(0xd6e8feb86659fd93);
	x ^= x >> 32;
	x *= UINT64_C(0xd6e8feb86659fd93);
	return x ^ x >> 32;
}

uint64_t rig_random(uint64_t *seed)
{
	*seed += UINT64_C(0x9e3779b97f4a7c15);
	return mix(*seed);
}

/* Bytes [lo, lo + n) of an endless sequence that the seed gives. */
static void put_bytes(uint8_t *out, uint64_t seed, uint64_t lo, uint64_t n)
{
	uint64_t word, off, take;

	while (n) {
		word = mix(seed + (lo / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15));
		off = lo % 8;
		if (off == 0 && n >= 8) {
			memcpy(out, &word, 8);
			take = 8;
		} else {
			take = KVP_MIN(8 - off, n);
			memcpy(out, (uint8_t *)&word + off, take);
		}
		out += take;
		lo += take;
		n -= take;
	}
}

static uint64_t row_seed(const struct rig_key *key, const struct kvp_entry_desc *entry,
			 uint64_t pos)
{
	uint64_t seed = mix(key->room + 1) ^ mix(key->generation + UINT64_C(0x51ed));

	seed = mix(seed + (uint64_t)entry->layer * 4 + entry->klass);
	return mix(seed + pos * UINT64_C(0xa0761d6478bd642f));
}

void rig_put_segment(uint8_t *mem, uint64_t bytes, const struct rig_key *key, uint32_t id)
{
	put_bytes(mem, mix(mix(key->room + 7) ^ (key->generation << 32 | id)), 0, bytes);
}

void rig_pages(uint32_t *pages, uint32_t n, uint32_t lo, uint32_t hi, uint64_t seed)
{
	uint32_t *all = malloc((size_t)(hi - lo) * sizeof(*all));
	uint32_t i, k, t;

	RIG_REQUIRE(all && lo < hi && n <= hi - lo);
	for (i = 0; i < hi - lo; i++)
		all[i] = lo + i;
	for (i = 0; i < n && i < hi - lo; i++) {
		k = i + (uint32_t)(rig_random(&seed) % (hi - lo - i));
		t = all[k];
		all[k] = all[i];
		all[i] = t;
		pages[i] = t;
	}
	free(all);
}

/* ---- pools ---------------------------------------------------------------------------------- */

static struct kvp_entry_desc *pool_append(struct rig_pool *pool, uint64_t bytes)
{
	struct kvp_entry_desc *entry = &pool->entries[pool->n_entries];

	RIG_REQUIRE(pool->n_entries < RIG_ENTRIES);
	pool->n_entries++;
	memset(entry, 0, sizeof(*entry));
	entry->offset = pool->bytes;
	entry->bytes = bytes;
	pool->bytes = KVP_ALIGN_UP(pool->bytes + bytes, UINT64_C(256));
	return entry;
}

struct kvp_entry_desc *rig_pool_entry(struct rig_pool *pool, uint32_t layer, uint32_t row_bytes,
				      uint32_t rows_per_page, uint32_t n_pages)
{
	uint64_t stride = (uint64_t)row_bytes * rows_per_page + 64;
	struct kvp_entry_desc *entry = pool_append(pool, stride * n_pages);

	entry->layer = layer;
	entry->klass = KVP_SHARDED;
	entry->page_stride = stride;
	entry->row_stride = row_bytes;
	entry->row_bytes = row_bytes;
	entry->full_bytes = row_bytes;
	entry->rows_per_page = rows_per_page;
	entry->n_pages = n_pages;
	return entry;
}

struct kvp_entry_desc *rig_pool_blob(struct rig_pool *pool, uint32_t layer, uint64_t bytes)
{
	struct kvp_entry_desc *entry = pool_append(pool, bytes);

	entry->layer = layer;
	entry->klass = KVP_BLOB;
	return entry;
}

void rig_pool_allocate(struct rig_pool *pool, const char *label, uint64_t salt)
{
	void *mem;

	RIG_REQUIRE(kvp_memory_create(label, pool->bytes, &pool->fd, &mem) == 0);
	pool->mem = mem;
	pool->salt = salt;
	rig_pool_reset(pool);
}

void rig_pool_make(struct rig_pool *pool, struct kvp_client *client, const char *label,
		   uint64_t salt)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	rig_pool_allocate(pool, label, salt);
	desc.entries = pool->entries;
	desc.n_entries = pool->n_entries;
	desc.fds = &pool->fd;
	desc.n_fds = 1;
	desc.layout_tag = "rig 1";
	desc.tag_bytes = 5;
	desc.label = label;
	RIG_CALL(client, kvp_pool_register(client, &desc, &pool->id));
}

void rig_pool_reset(struct rig_pool *pool)
{
	put_bytes(pool->mem, mix(pool->salt ^ UINT64_C(0xbac6)), 0, pool->bytes);
}

uint8_t *rig_pool_image(const struct rig_pool *pool)
{
	uint8_t *image = malloc(pool->bytes);

	RIG_REQUIRE(image);
	put_bytes(image, mix(pool->salt ^ UINT64_C(0xbac6)), 0, pool->bytes);
	return image;
}

void rig_pool_place(const struct rig_pool *pool, uint64_t at, char *buf, size_t bytes)
{
	const struct kvp_entry_desc *entry;
	uint64_t off;
	uint32_t i;

	snprintf(buf, bytes, "between entries");
	for (i = 0; i < pool->n_entries; i++) {
		entry = &pool->entries[i];
		if (at < entry->offset || at >= entry->offset + entry->bytes)
			continue;
		off = at - entry->offset;
		if (entry->klass == KVP_BLOB)
			snprintf(buf, bytes, "blob entry %u byte %llu", i, (unsigned long long)off);
		else
			snprintf(
				buf, bytes, "entry %u layer %u page %llu slot %llu byte %llu", i,
				entry->layer, (unsigned long long)(off / entry->page_stride),
				(unsigned long long)(off % entry->page_stride / entry->row_stride),
				(unsigned long long)(off % entry->page_stride % entry->row_stride));
		return;
	}
}

void rig_pool_check(const struct rig_pool *pool, const uint8_t *image, const char *what)
{
	uint64_t at, bad = 0, first = 0;
	char place[128];

	if (!memcmp(pool->mem, image, pool->bytes))
		return;
	for (at = 0; at < pool->bytes; at++)
		if (pool->mem[at] != image[at] && !bad++)
			first = at;
	rig_pool_place(pool, first, place, sizeof(place));
	rig_die(__FILE__, __LINE__, "pool is as expected", "%s: %llu bytes differ, first: %s", what,
		(unsigned long long)bad, place);
}

static void put_row(uint8_t *mem, const struct kvp_entry_desc *entry, const uint64_t place[2],
		    uint64_t pos, const struct rig_key *key)
{
	uint64_t at = entry->offset + place[0] * entry->page_stride + place[1] * entry->row_stride;

	RIG_REQUIRE(place[0] < entry->n_pages && place[1] < entry->rows_per_page,
		    "page %llu slot %llu", (unsigned long long)place[0],
		    (unsigned long long)place[1]);
	put_bytes(mem + at, row_seed(key, entry, pos), entry->lo, entry->row_bytes);
}

void rig_put_rows_of(uint8_t *mem, const struct rig_pool *pool, const struct kvp_side_desc *side,
		     uint64_t from, uint64_t to, const struct rig_key *key, const uint8_t *set)
{
	uint64_t pos, owned = 0, all = 0, place[2];
	const struct kvp_entry_desc *entry;
	uint32_t i, page = 0;
	bool mine;

	/* `owned` and `all` count rows since pos0; a page is full after P of the rank's own rows,
	 * or W of all: both become full with the same token. */
	for (pos = side->pos0; pos < to; pos++) {
		mine = pos / side->interleave % side->dcp_size == side->dcp_rank;
		for (i = 0; pos >= from && i < pool->n_entries; i++) {
			entry = &pool->entries[i];
			if (entry->klass == KVP_BLOB || entry->group != side->group ||
			    (set && !(set[i / 8] >> i % 8 & 1)))
				continue;
			if (!mine && entry->klass == KVP_SHARDED)
				continue;
			RIG_REQUIRE(page < side->n_pages, "page list of %u ends", side->n_pages);
			place[0] = side->pages[page];
			place[1] = entry->klass == KVP_SHARDED ? owned : all;
			put_row(mem, entry, place, pos, key);
		}
		owned += mine;
		if (++all == (uint64_t)side->page * side->dcp_size) {
			all = owned = 0;
			page++;
		}
	}
}

void rig_put_rows(uint8_t *mem, const struct rig_pool *pool, const struct kvp_side_desc *side,
		  uint64_t from, uint64_t to, const struct rig_key *key)
{
	rig_put_rows_of(mem, pool, side, from, to, key, NULL);
}

/* ---- clients -------------------------------------------------------------------------------- */

struct kvp_client *rig_client(const struct rig_daemon *daemon, const char *name)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_client *client;
	int rc;

	options.socket = daemon->socket;
	options.name = name;
	options.timeout_ms = 20000;
	rc = kvp_client_open(&client, &options);
	RIG_REQUIRE(rc == 0, "%s: %s", daemon->name, strerror(-rc));
	return client;
}

struct cJSON *rig_ask(const struct rig_daemon *daemon, const char *what, const char *arg)
{
	struct kvp_client *client = rig_client(daemon, "probe");
	char *json = NULL;
	cJSON *root;

	RIG_CALL(client, kvp_inspect(client, what, arg, &json));
	root = cJSON_Parse(json);
	RIG_REQUIRE(root, "%s", json);
	free(json);
	kvp_client_close(client);
	return root;
}

void rig_says(const struct rig_daemon *daemon, const char *what, const char *arg, const char *text)
{
	cJSON *root = rig_ask(daemon, what, arg);
	char *json = cJSON_PrintUnformatted(root);

	RIG_REQUIRE(json && strstr(json, text), "%s is not in %s", text, json);
	cJSON_free(json);
	cJSON_Delete(root);
}

double rig_number(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	RIG_REQUIRE(cJSON_IsNumber(item), "no number %s", name);
	return item->valuedouble;
}

struct kvp_room_state rig_state(const struct kvp_client *client, kvp_room_id id)
{
	struct kvp_room_state state = KVP_ROOM_STATE_INIT;

	RIG_REQUIRE(kvp_room_state(client, id, &state) == 0);
	return state;
}

struct kvp_room_state rig_await(struct kvp_client *client, kvp_room_id id, enum kvp_wait_for what,
				int secs)
{
	int rc = kvp_room_wait(client, id, what, support_slow_ms(secs * 1000));
	struct kvp_room_state state = rig_state(client, id);

	RIG_REQUIRE(rc == 0, "waiting for %d: %s; phase %u, status %s: %s", (int)what,
		    strerror(-rc), state.phase, kvp_status_name(state.status), state.reason);
	return state;
}
