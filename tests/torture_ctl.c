/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets every allocation and every call of the system in kvpackctl fail in turn, for each of its
 * commands, beside a daemon that has a client, a pool, and a room that waits.
 *
 * It must end in time with one of its statuses, and leak nothing. Where it says nothing on standard
 * error, its status and its answer are those that it gives without a fault.
 *
 *     ctl [STRIDE FIRST]     every STRIDE-th fault from FIRST on
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support_rig.h"
#include "tests/torture_calls.h"
#include "tests/torture_shim.h"

#define REPEATS 3u /* calls of one place that fail, each in a process of its own */
#define END_MS 20000
#define MAX_ARGS 4u
#define MAX_STATUS 4 /* of kvpackctl */
#define TIMES 2u     /* commands that a place fails in */

static const char plan_line[] =
	"{\"name\":\"one\",\"src\":{\"page\":4,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1,"
	"\"pos0\":0,"
	"\"pages\":[3,1,2]},\"dst\":{\"page\":2,\"dcp_size\":2,\"dcp_rank\":1,\"interleave\":1,"
	"\"pos0\":0,\"pages\":[5,6,7]},\"start\":1,\"tokens\":9}\n";

struct command {
	const char *args[MAX_ARGS];
	bool exact; /* the same bytes each time; otherwise as many lines */
};

#define PLAN_FILE "plan" /* stands for its path */

static const struct command commands[] = {
	{ { "--help" }, true },
	{ { "rooms", "--help" }, true },
	{ { "version" }, true },
	{ { "status" }, false },
	{ { "--json", "status" }, false },
	{ { "clients" }, false },
	{ { "pools" }, false },
	{ { "rooms", "--all" }, false },
	{ { "room", "7" }, false },
	{ { "waiting" }, false },
	{ { "failures", "--since", "10m" }, false },
	{ { "pins" }, false },
	{ { "peers" }, false },
	{ { "lanes" }, false },
	{ { "drain", "--reason", "torture" }, false },
	{ { "undrain" }, false },
	{ { "plan", PLAN_FILE }, true },
	{ { "plan", "--json", PLAN_FILE }, true },
	{ { "doctor" }, false },
	{ { "doctor", "--json" }, false },
};

struct said {
	int status;
	char *out, *err;
};

struct fault {
	uint32_t site, pass, fail;
};

static struct rig rig;
static struct torture *torture;
static struct rig_daemon *daemon_;
static char torture_path[128], plan_path[128], out_path[128], err_path[128], proc_path[128];
static uint32_t stride = 1, first;
static unsigned tried, done, fired, found;

static const char *const fn_names[] = {
#define NAME(name, how, error) #name,
	TORTURE_CALLS(NAME)
};

static const int fn_errors[] = {
#define ERROR(name, how, error) error,
	TORTURE_CALLS(ERROR)
};

/* ---- one process ---------------------------------------------------------------------------- */

static char *read_file(const char *path)
{
	FILE *file = fopen(path, "re");
	char *text = calloc(1, 1u << 18);

	RIG_REQUIRE(file && text);
	text[fread(text, 1, (1u << 18) - 1, file)] = 0;
	(void)fclose(file); /* only read */
	return text;
}

static void run_child(const struct command *command)
{
	char program[4096];
	char *argv[MAX_ARGS + 2] = { (char *)"kvpackctl" };
	int out = open(out_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	int err = open(err_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	for (uint32_t i = 0; i < MAX_ARGS && command->args[i]; i++)
		argv[i + 1] = !strcmp(command->args[i], PLAN_FILE) && i > 0
				      ? plan_path
				      : (char *)command->args[i];
	if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
		_exit(126);
	rig_program(program, sizeof(program), "kvpackctl");
	(void)setenv("KVP_TORTURE", torture_path, 1);
	(void)setenv("KVPACK_SOCKET", daemon_->socket, 1);
	(void)execv(program, argv);
	_exit(127);
}

/* status: as exited, 128 + signal, or -1 when it did not end. */
static struct said run(const struct command *command)
{
	uint64_t until = rig_now_ns() + END_MS * UINT64_C(1000000);
	struct said said = { 0 };
	int raw = 0;
	pid_t pid;

	(void)fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0)
		run_child(command);
	while (waitpid(pid, &raw, WNOHANG) == 0) {
		if (rig_now_ns() > until) {
			(void)kill(pid, SIGKILL);
			(void)waitpid(pid, &raw, 0);
			said.status = -1;
			break;
		}
		rig_sleep_ms(1);
	}
	if (said.status == 0)
		said.status = WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
	said.out = read_file(out_path);
	said.err = read_file(err_path);
	return said;
}

static void said_free(struct said *said)
{
	free(said->out);
	free(said->err);
}

/* ---- faults --------------------------------------------------------------------------------- */

static unsigned lines(const char *text)
{
	unsigned n = 0;

	for (; *text; text++)
		n += *text == '\n';
	return n;
}

/* NULL: as it must be. */
static const char *wrong(const struct command *command, const struct said *should,
			 const struct said *said)
{
	if (said->status < 0)
		return "it does not end";
	if (said->status > MAX_STATUS)
		return "it crashes, or leaks";
	if (said->err[0] && !should->err[0])
		return NULL; /* it says so */
	if (said->status != should->status)
		return "another status, without a word";
	if (command->exact ? strcmp(said->out, should->out) != 0
			   : lines(said->out) != lines(should->out))
		return "another answer, without a word";
	return NULL;
}

static void print_found(const struct command *command, const struct fault *fault,
			const struct said *said, const char *what)
{
	const struct torture_site *site = &torture->sites[fault->site];
	uint32_t fn = site->fn;
	char program[4096], line[5000];

	found++;
	(void)printf("FOUND %s: kvpackctl", what);
	for (uint32_t i = 0; i < MAX_ARGS && command->args[i]; i++)
		(void)printf(" %s", command->args[i]);
	(void)printf(": status %d: call %u%s of %s\n", said->status, fault->pass + 1,
		     fault->fail > 1 ? " and all after it" : "",
		     fn < KVP_ARRAY_SIZE(fn_names) ? fn_names[fn] : "malloc in cJSON");
	(void)printf("%.4000s", said->err);
	(void)fflush(stdout);
	rig_program(program, sizeof(program), "kvpackctl");
	(void)snprintf(line, sizeof(line), "addr2line -pfi -e %s 0x%llx", program,
		       (unsigned long long)site->place - 1);
	if (site->place > 1 && site->place < TORTURE_ELSEWHERE)
		(void)!system(line); /* NOLINT(cert-env33-c): only words */
}

static void try_fault(const struct command *command, const struct fault *fault,
		      const struct said *should)
{
	struct said said;
	const char *what;

	if (tried++ % stride != first)
		return;
	done++;
	torture->fired = 0;
	torture->pass = fault->pass;
	torture->fail = fault->fail;
	torture->site = fault->site;
	said = run(command);
	torture->site = TORTURE_SITES;
	what = wrong(command, should, &said);
	fired += torture->fired > 0;
	if (what)
		print_found(command, fault, &said, what);
	said_free(&said);
}

/* A call that a signal has interrupted is made again; for ever there is no such thing. */
static bool can_last(uint32_t fn)
{
	return fn >= KVP_ARRAY_SIZE(fn_errors) || fn_errors[fn] != EINTR;
}

static void try_command(const struct command *command, uint32_t *times)
{
	uint32_t calls[TORTURE_SITES];
	struct said should;

	for (uint32_t i = 0; i < TORTURE_SITES; i++)
		torture->sites[i].calls = 0;
	torture->counting = 1;
	should = run(command);
	torture->counting = 0;
	RIG_REQUIRE(should.status >= 0 && should.status <= MAX_STATUS && should.out[0],
		    "%s: %d: %s", command->args[0], should.status, should.err);
	for (uint32_t i = 0; i < TORTURE_SITES; i++)
		calls[i] = torture->sites[i].calls;
	for (uint32_t i = 0; i < TORTURE_SITES; i++) {
		uint32_t n = KVP_MIN(calls[i], REPEATS);

		if (n == 0 || times[i]++ >= TIMES)
			continue;
		for (uint32_t k = 0; k < n; k++)
			try_fault(command, &(struct fault){ i, k, 1 }, &should);
		if (can_last(torture->sites[i].fn))
			try_fault(command, &(struct fault){ i, 0, UINT32_MAX }, &should);
	}
	said_free(&should);
}

/* ---- what there is to show ------------------------------------------------------------------ */

static void put_line(const char *dir, const char *name, const char *line)
{
	char path[512];
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s%s", dir, name);
	for (char *at = path + 1; (at = strchr(at, '/')); at++) {
		*at = 0;
		RIG_REQUIRE(mkdir(path, 0700) == 0 || errno == EEXIST);
		*at = '/';
	}
	file = fopen(path, "we");
	RIG_REQUIRE(file && fprintf(file, "%s\n", line) > 0 && fclose(file) == 0);
}

/* Trees that look like those of sysfs and of processes, for the doctor. */
static void write_trees(void)
{
#define PORT "/class/infiniband/mlx5_0/ports/1/"
	put_line(rig.dir, PORT "state", "4: ACTIVE");
	put_line(rig.dir, PORT "link_layer", "Ethernet");
	put_line(rig.dir, PORT "rate", "400 Gb/sec (4X NDR)");
	put_line(rig.dir, PORT "gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0001");
	put_line(rig.dir, PORT "gid_attrs/types/0", "RoCE v2");
	put_line(rig.dir, PORT "gid_attrs/ndevs/0", "eth7");
	put_line(rig.dir, PORT "hw_counters/packet_seq_err", "2");
	put_line(rig.dir, "/class/infiniband/mlx5_0/device/numa_node", "1");
	put_line(rig.dir, "/proc/41/comm", "kvpackd");
	put_line(rig.dir, "/proc/41/limits", "Max locked memory         8192 8192 bytes");
	(void)setenv("KVP_SYSFS", rig.dir, 1);
	(void)snprintf(proc_path, sizeof(proc_path), "%s/proc", rig.dir);
	(void)setenv("KVP_PROC", proc_path, 1);
}

static void write_plan(void)
{
	FILE *file = fopen(plan_path, "we");

	RIG_REQUIRE(file && fputs(plan_line, file) >= 0 && fclose(file) == 0);
}

static void share(void)
{
	int fd = open(torture_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	RIG_REQUIRE(fd >= 0 && ftruncate(fd, sizeof(*torture)) == 0);
	torture = mmap(NULL, sizeof(*torture), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	RIG_REQUIRE(torture != MAP_FAILED);
	(void)close(fd);
	torture->site = TORTURE_SITES;
}

static void open_room(struct kvp_client *client, struct rig_pool *pool)
{
	struct kvp_open msg = KVP_OPEN_INIT;
	struct kvp_side_desc side = { .page = 16, .dcp_size = 1, .interleave = 1 };
	kvp_room_id id;

	(void)rig_pool_entry(pool, 0, 512, 16, 16);
	rig_pool_make(pool, client, "torture", 1);
	msg.room = 7;
	msg.pool = pool->id;
	msg.sides = &side;
	msg.n_sides = 1;
	RIG_REQUIRE(kvp_open(client, &msg, NULL, NULL, &id) == 0, "%s", kvp_last_error(client));
}

int main(int argc, char **argv)
{
	static uint32_t times[TORTURE_SITES];
	static struct rig_pool pool;
	struct kvp_client *client;

	stride = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1;
	first = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
	RIG_REQUIRE(first < stride, "ctl [STRIDE FIRST]");
	torture_options();
	rig_begin(&rig);
	(void)snprintf(torture_path, sizeof(torture_path), "%s/ctl.torture", rig.dir);
	(void)snprintf(plan_path, sizeof(plan_path), "%s/plan", rig.dir);
	(void)snprintf(out_path, sizeof(out_path), "%s/out", rig.dir);
	(void)snprintf(err_path, sizeof(err_path), "%s/err", rig.dir);
	share();
	write_plan();
	write_trees();
	daemon_ = rig_daemon_start(&rig, "a", "[timers]\nopen = 1h\n");
	client = rig_client(daemon_, "torture");
	open_room(client, &pool);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(commands); i++)
		try_command(&commands[i], times);
	kvp_client_close(client);
	RIG_REQUIRE(rig_daemon_stop(daemon_) == 0);
	rig_remove(&rig);
	(void)printf("ctl: %u faults of %u, %u have struck, %u findings\n", done, tried, fired,
		     found);
	return found > 0 || fired == 0;
}
