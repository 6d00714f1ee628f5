/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets every allocation and every call of the system, of UCX and of libuv fail in turn, in two
 * daemons and in the library, one place after the other: while the daemons start, while engines use
 * them, while they stop.
 *
 * A daemon may refuse to start, with words and exit status 1. Afterwards it must not crash, leak,
 * hang or report a wrong completion; and once the fault is over a whole round must succeed and
 * nothing be left of the last one.
 *
 * Part gpu is the start and the run with pools on a GPU that is none (tests/fake_cuda.c), and with
 * calls of its driver alone.
 *
 *     torture [part STRIDE FIRST]      part: start, run, restart, stop, gpu or
 * all (but gpu); every STRIDE-th fault from FIRST on
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/cuda.h"
#include "tests/torture_calls.h"
#include "tests/torture_pass.h"
#include "tests/torture_shim.h"

#define REPEATS 3u       /* calls of one place that fail, each in a round of its own */
#define ROUNDS_A_LIFE 20 /* then the daemons are stopped, which shows what has leaked */
#define START_MS 20000

enum who { PREFILL, DECODE, LIBRARY, WHOS };

static const char *const who_names[WHOS] = { "prefill daemon", "decode daemon", "library" };

#define CONFIG                                                        \
	"[host]\nslots = 4\nslot_bytes = 64k\n[timers]\noffer = 2s\n" \
	"open = 2s\nprogress = 2s\nfence = 2s\ndrain = 500ms\n"       \
	"lease = 2s\n[stop]\ndrain = 100ms\n"
#define GPU_CONFIG "[gpu]\ndevices = all\nslots = 4\nslot_bytes = 64k\n"
static const char *config = CONFIG;

enum {
#define NUMBER(name, how, error) FN_##name,
	TORTURE_CALLS(NUMBER) FN_N
};

struct fault {
	enum who who;
	uint32_t site, pass, fail;
};

static struct rig rig;
static struct torture *torture[WHOS];
static char torture_path[WHOS][128];
static struct rig_daemon *daemons[2];
static struct pass pass;
static unsigned tried, fired, found;
static uint32_t stride = 1, first;
static uint32_t first_fn; /* functions before it do not fail */
static unsigned lost;     /* GPUs, each to one daemon's process */

/* ---- names for people ----------------------------------------------------------------------- */

static const char *fn_name(uint32_t fn)
{
	static const char *const names[] = {
#define NAME(name, how, error) #name,
		TORTURE_CALLS(NAME)
	};
	static const char *const libs[] = { "malloc in cJSON", "malloc in libuv", "calloc in libuv",
#ifdef KVP_CUDA
#define CUDA_NAME(fn) #fn,
					    KVP_CUDA_CALLS(CUDA_NAME) KVP_CUDA_LATER(CUDA_NAME)
#endif
	};

	if (fn < KVP_ARRAY_SIZE(names))
		return names[fn];
	fn -= (uint32_t)KVP_ARRAY_SIZE(names);
	return fn < KVP_ARRAY_SIZE(libs) ? libs[fn] : "?";
}

static void print_fault(const struct fault *fault)
{
	const struct torture_site *site = &torture[fault->who]->sites[fault->site];
	char program[4096], command[5000];

	rig_program(program, sizeof(program), fault->who == LIBRARY ? "libkvpack.so.1" : "kvpackd");
	(void)printf("%s: call %u%s of %s at 0x%llx\n", who_names[fault->who], fault->pass + 1,
		     fault->fail > 1 ? " and all after it" : "", fn_name(site->fn),
		     (unsigned long long)site->place);
	(void)fflush(stdout);
	(void)snprintf(command, sizeof(command), "addr2line -pfi -e %s 0x%llx", program,
		       (unsigned long long)site->place - 1);
	if (site->place > 1 && site->place < TORTURE_ELSEWHERE)
		(void)!system(command); /* NOLINT(cert-env33-c): only words */
}

/* The end of it, without what a daemon says when all is well. */
static void print_log(const struct rig_daemon *daemon)
{
	static char lines[60][512];
	unsigned n = 0;
	FILE *file = fopen(daemon->log, "re");

	while (file && fgets(lines[n % 60], sizeof(lines[0]), file))
		n += lines[n % 60][0] != '<' || lines[n % 60][1] < '5';
	for (unsigned i = n > 60 ? n - 60 : 0; i < n; i++)
		(void)printf("    %s: %s", daemon->name, lines[i % 60]);
	if (file)
		(void)fclose(file); /* only read */
}

static void finding(const struct fault *fault, const char *what)
{
	found++;
	(void)printf("FOUND %s\n  ", what);
	if (fault)
		print_fault(fault);
	for (int i = 0; i < 2; i++)
		print_log(daemons[i]);
	(void)fflush(stdout);
}

/* ---- faults --------------------------------------------------------------------------------- */

static void disarm(void)
{
	for (int i = 0; i < WHOS; i++) {
		torture[i]->site = TORTURE_SITES;
		torture[i]->fail = torture[i]->pass = 0;
		torture[i]->counting = 0;
	}
}

static void arm(const struct fault *fault)
{
	struct torture *block = torture[fault->who];

	block->fired = 0;
	block->pass = fault->pass;
	block->fail = fault->fail;
	block->site = fault->site;
}

static bool has_fired(const struct fault *fault)
{
	return torture[fault->who]->fired > 0;
}

static void count(bool on)
{
	for (int i = 0; i < WHOS; i++) {
		for (uint32_t site = 0; site < TORTURE_SITES && on; site++)
			torture[i]->sites[site].calls = 0;
		torture[i]->counting = on;
	}
}

/* A call that a signal has interrupted is made again; for ever there is no such thing. */
static bool can_last(uint32_t fn)
{
	static const int errors[] = {
#define ERROR(name, how, error) error,
		TORTURE_CALLS(ERROR)
	};

	return fn >= KVP_ARRAY_SIZE(errors) || errors[fn] != EINTR;
}

/* Each place that was seen: its first calls one by one, and if `lasting` then all of them. */
static void each_fault(uint32_t who, bool lasting, void (*fn)(const struct fault *fault))
{
	uint32_t calls[TORTURE_SITES];

	/* Places that only a fault leads to are not looked for. */
	for (uint32_t i = 0; i < TORTURE_SITES; i++)
		calls[i] = torture[who]->sites[i].calls;
	for (uint32_t i = 0; i < TORTURE_SITES; i++) {
		uint32_t n = torture[who]->sites[i].fn >= first_fn ? KVP_MIN(calls[i], REPEATS) : 0;
		uint32_t all = n > 0 && lasting && can_last(torture[who]->sites[i].fn);

		for (uint32_t k = 0; k < n + all; k++) {
			struct fault fault = { who, i, k < n ? k : 0, k < n ? 1 : UINT32_MAX };

			if (tried++ % stride == first)
				fn(&fault);
		}
	}
}

/* ---- daemons -------------------------------------------------------------------------------- */

static void start(int i)
{
	static const char *const names[] = { "a", "b" };

	(void)setenv("KVP_TORTURE", torture_path[i], 1);
	if (daemons[i])
		rig_daemon_restart(daemons[i], config);
	else
		daemons[i] = rig_daemon_start(&rig, names[i], config);
	(void)unsetenv("KVP_TORTURE");
}

/* Exit status; 128 + signal; -1: it does not end, and has been killed. */
static int wait_for(pid_t pid, int ms)
{
	uint64_t until = rig_now_ns() + (uint64_t)ms * 1000000u;
	int status;

	while (waitpid(pid, &status, WNOHANG) == 0) {
		if (rig_now_ns() > until) {
			(void)kill(pid, SIGKILL);
			(void)waitpid(pid, &status, 0);
			return -1;
		}
		rig_sleep_ms(1);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int stop(int i)
{
	pid_t pid = daemons[i]->pid;

	daemons[i]->pid = 0;
	(void)kill(pid, SIGTERM);
	return wait_for(pid, START_MS);
}

static void forget_log(int i)
{
	(void)!truncate(daemons[i]->log, 0); /* only to keep it short */
}

/* Both end as they should, and begin anew: what has leaked is said at the end. */
static void restart_both(const struct fault *fault)
{
	for (int i = 0; i < 2; i++) {
		int r = stop(i);

		if (r != 0)
			finding(fault, "at its end: exit status not 0");
		forget_log(i);
		start(i);
	}
}

static int ended[2]; /* raw statuses of those that are not alive */

static bool is_alive(int i)
{
	if (!daemons[i]->pid)
		return false;
	if (waitpid(daemons[i]->pid, &ended[i], WNOHANG) == 0)
		return true;
	daemons[i]->pid = 0;
	return false;
}

/* ---- rounds --------------------------------------------------------------------------------- */

/* What this process says comes between what the daemon says. */
static void say_into_log(void)
{
	int fd = open(daemons[0]->log, O_WRONLY | O_APPEND | O_CLOEXEC);

	if (fd >= 0)
		(void)dup2(fd, STDERR_FILENO);
}

/* A process of its own: a library that crashes takes nobody with it. */
static bool round_ends_well(bool faulty)
{
	pid_t pid;

	pass.next_room += 10;
	(void)fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		say_into_log();
		pass_run(&pass, faulty);
		exit(0); /* NOLINT(concurrency-mt-unsafe): one thread; leaks are told */
	}
	return wait_for(pid, 60000) == 0;
}

static bool settle_ends_well(void)
{
	pid_t pid;

	(void)fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		for (int i = 0; i < 2; i++)
			pass_settle(daemons[i]);
		_exit(0);
	}
	return wait_for(pid, 60000) == 0;
}

static bool faulty_round_ends_well(const struct fault *fault)
{
	arm(fault);
	return round_ends_well(true);
}

static const char *what_went_wrong(const struct fault *fault,
				   bool (*round)(const struct fault *fault))
{
	const char *what = NULL;

	if (!round(fault))
		what = "with a fault: a round did not end as it must";
	if (!has_fired(fault) && !what) {
		disarm();
		return NULL;
	}
	fired++;
	disarm();
	if (!is_alive(0) || !is_alive(1))
		return "a daemon is gone";
	if (!what && !settle_ends_well())
		what = "after a fault: something is left";
	if (!what && !round_ends_well(false))
		what = "after a fault: a round fails";
	return what;
}

/* Says what is wrong, if anything, and begins anew. */
static void look_at(const struct fault *fault, const char *what)
{
	static int rounds;

	if (what)
		finding(fault, what);
	for (int i = 0; i < 2 && what; i++) {
		if (is_alive(i))
			(void)stop(i); /* it has been told already */
		forget_log(i);
		start(i);
	}
	if (!what && ++rounds % ROUNDS_A_LIFE == 0)
		restart_both(fault);
}

static void try_run(const struct fault *fault)
{
	const char *what = what_went_wrong(fault, faulty_round_ends_well);

	/* Only those that have just met make such a call. */
	if (!what && !has_fired(fault)) {
		restart_both(NULL);
		what = what_went_wrong(fault, faulty_round_ends_well);
	}
	look_at(fault, what);
}

/* The first has the connections to make, the second has them; what counts is the one that makes
 * more calls of a place. */
static void count_rounds(void)
{
	static uint32_t calls[WHOS][TORTURE_SITES];

	count(true);
	RIG_REQUIRE(round_ends_well(false));
	for (int who = 0; who < WHOS; who++)
		for (uint32_t i = 0; i < TORTURE_SITES; i++)
			calls[who][i] = torture[who]->sites[i].calls;
	count(true);
	RIG_REQUIRE(round_ends_well(false));
	count(false);
	for (int who = 0; who < WHOS; who++)
		for (uint32_t i = 0; i < TORTURE_SITES; i++)
			if (torture[who]->sites[i].calls < calls[who][i])
				torture[who]->sites[i].calls = calls[who][i];
}

static void run_part(void)
{
	for (int i = 0; i < 2; i++)
		start(i);
	count_rounds();
	for (uint32_t who = 0; who < WHOS; who++)
		each_fault(who, true, try_run);
	restart_both(NULL);
	for (int i = 0; i < 2; i++)
		(void)stop(i);
}

/* ---- a daemon is restarted ------------------------------------------------------------------ */

/* The other end of a round in which the prefill daemon is restarted: false: it does not stop. */
static bool restart_prefill(int ready_fd, int go_fd, const struct fault *fault)
{
	struct pollfd poll_ready = { .fd = ready_fd, .events = POLLIN };
	char byte = 0;
	bool ok;

	if (poll(&poll_ready, 1, START_MS) != 1 || read(ready_fd, &byte, 1) != 1)
		return true; /* it has been refused something before; its end is looked at */
	if (fault && fault->who != LIBRARY)
		arm(fault);
	torture[PREFILL]->counting = torture[DECODE]->counting = torture[LIBRARY]->counting;
	ok = stop(0) == 0;
	torture[PREFILL]->counting = 0;
	if (fault && fault->who == PREFILL) { /* its start is a part of its own */
		torture[PREFILL]->site = TORTURE_SITES;
		torture[PREFILL]->fail = torture[PREFILL]->pass = 0;
	}
	start(0);
	(void)!write(go_fd, &byte, 1); /* it may be gone */
	return ok;
}

static bool restart_round_ends_well(const struct fault *fault)
{
	int ready[2], go[2];
	pid_t pid;
	bool ok;

	pass.next_room += 10;
	RIG_REQUIRE(pipe2(ready, O_CLOEXEC) == 0 && pipe2(go, O_CLOEXEC) == 0);
	if (fault && fault->who == LIBRARY)
		arm(fault);
	(void)fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		(void)close(ready[0]);
		(void)close(go[1]);
		pass.ready_fd = ready[1];
		pass.go_fd = go[0];
		say_into_log();
		pass_restart(&pass, fault != NULL);
		exit(0); /* NOLINT(concurrency-mt-unsafe): one thread; leaks are told */
	}
	(void)close(ready[1]);
	(void)close(go[0]);
	ok = restart_prefill(ready[0], go[1], fault);
	ok = wait_for(pid, 60000) == 0 && ok;
	(void)close(ready[0]);
	(void)close(go[1]);
	return ok;
}

static void try_restart(const struct fault *fault)
{
	look_at(fault, what_went_wrong(fault, restart_round_ends_well));
}

static void restart_part(void)
{
	for (int i = 0; i < 2; i++)
		start(i);
	RIG_REQUIRE(restart_round_ends_well(NULL));
	count(true);
	torture[PREFILL]->counting = torture[DECODE]->counting = 0;
	RIG_REQUIRE(restart_round_ends_well(NULL));
	count(false);
	/* The library looks for its daemon until it finds one: nothing fails for ever. */
	for (uint32_t who = 0; who < WHOS; who++)
		each_fault(who, who != LIBRARY, try_restart);
	restart_both(NULL);
	for (int i = 0; i < 2; i++)
		(void)stop(i);
}

/* ---- a GPU ---------------------------------------------------------------------------------- */

/* Its driver cannot tell any more what is over, so nothing of it is used again: it fails its rooms,
 * and stops. */
static bool gpu_is_lost(int i)
{
	FILE *file = fopen(daemons[i]->log, "re");
	char line[512];
	bool is = false;

	while (file && fgets(line, sizeof(line), file))
		is = is || strstr(line, "the GPU is lost to this process");
	if (file)
		(void)fclose(file); /* only read */
	return is;
}

/* By itself where the GPU is lost. */
static int end_of(int i)
{
	pid_t pid;

	if (!is_alive(i))
		return WIFEXITED(ended[i]) ? WEXITSTATUS(ended[i]) : 128 + WTERMSIG(ended[i]);
	if (!gpu_is_lost(i))
		return stop(i);
	pid = daemons[i]->pid;
	daemons[i]->pid = 0;
	return wait_for(pid, START_MS);
}

/* The next processes have the GPU again; NULL: all is well then. */
static const char *after_loss(void)
{
	const char *what = NULL;

	for (int i = 0; i < 2; i++) {
		bool was_lost = gpu_is_lost(i);
		int status = end_of(i);

		lost += was_lost;
		if (status != 0 && !(was_lost && status == 1))
			what = "a daemon that lost its GPU, or its peer, does not stop as it must";
	}
	for (int i = 0; i < 2 && !what; i++) {
		forget_log(i);
		start(i);
	}
	return what || round_ends_well(false) ? what : "after a restart: a round fails";
}

static void try_gpu(const struct fault *fault)
{
	const char *what = what_went_wrong(fault, faulty_round_ends_well);

	if (what && (gpu_is_lost(0) || gpu_is_lost(1)))
		what = after_loss();
	else if (!what) /* what it leaves is said at its end */
		restart_both(fault);
	if (!what)
		return;
	finding(fault, what);
	for (int i = 0; i < 2; i++) {
		if (is_alive(i))
			(void)stop(i);
		forget_log(i);
		start(i);
	}
}

static void gpu_part(void)
{
	for (int i = 0; i < 2; i++)
		start(i);
	count_rounds();
	for (uint32_t who = PREFILL; who <= DECODE; who++)
		each_fault(who, true, try_gpu);
	restart_both(NULL);
	for (int i = 0; i < 2; i++)
		(void)stop(i);
}

/* ---- start and stop ------------------------------------------------------------------------- */

/* Starts without the rig's impatience. */
static pid_t spawn(const struct rig_daemon *daemon)
{
	char program[4096], conf[160];
	pid_t pid;
	int fd;

	rig_program(program, sizeof(program), "kvpackd");
	(void)snprintf(conf, sizeof(conf), "%.*s.conf", (int)strlen(daemon->log) - 4, daemon->log);
	(void)setenv("KVP_TORTURE", torture_path[0], 1);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		fd = open(daemon->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
		if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
			_exit(126);
		(void)execl(program, "kvpackd", "--config", conf, (char *)NULL);
		_exit(127);
	}
	(void)unsetenv("KVP_TORTURE");
	return pid;
}

/* It serves, or is gone: then *status says how. */
static bool serves(const struct rig_daemon *daemon, pid_t pid, int *status)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	uint64_t until = rig_now_ns() + START_MS * UINT64_C(1000000);
	struct kvp_client *client;

	options.socket = daemon->socket;
	options.timeout_ms = 3000;
	while (kvp_client_open(&client, &options) != 0) {
		int raw;

		if (waitpid(pid, &raw, WNOHANG) == pid) {
			*status = WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
			return false;
		}
		if (rig_now_ns() > until) {
			*status = -1;
			(void)kill(pid, SIGKILL);
			(void)waitpid(pid, NULL, 0);
			return false;
		}
		rig_sleep_ms(5);
	}
	kvp_client_close(client);
	return true;
}

static bool has_words(const struct rig_daemon *daemon)
{
	struct stat st;

	return stat(daemon->log, &st) == 0 && st.st_size > 0;
}

static void try_start(const struct fault *fault)
{
	int status = 0;
	pid_t pid;

	forget_log(0);
	arm(fault);
	pid = spawn(daemons[0]);
	if (!serves(daemons[0], pid, &status)) {
		/* 2: the configuration cannot be read. */
		if ((status != 1 && status != 2) || !has_words(daemons[0]))
			finding(fault, "it neither serves nor refuses to start");
	} else {
		disarm();
		(void)kill(pid, SIGTERM);
		if (wait_for(pid, START_MS) != 0)
			finding(fault, "after a fault at the start: exit status not 0");
	}
	fired += has_fired(fault);
	disarm();
}

static void try_stop(const struct fault *fault)
{
	int status;

	forget_log(0);
	start(0);
	arm(fault);
	status = stop(0);
	fired += has_fired(fault);
	disarm();
	if (status != 0)
		finding(fault, "while it stops: exit status not 0");
}

/* The places that are seen from here on until the daemon serves, and until it has ended. */
static void start_part(void)
{
	count(true);
	for (int i = 0; i < 2; i++)
		start(i);
	count(false);
	for (int i = 0; i < 2; i++)
		RIG_REQUIRE(stop(i) == 0);
	each_fault(PREFILL, false, try_start);
}

static void stop_part(void)
{
	for (int i = 0; i < 2; i++)
		start(i);
	count(true);
	RIG_REQUIRE(stop(0) == 0);
	count(false);
	each_fault(PREFILL, false, try_stop);
	(void)stop(1);
}

/* ---- all ------------------------------------------------------------------------------------ */

static void share(enum who who, const char *name)
{
	int fd;

	(void)snprintf(torture_path[who], sizeof(torture_path[who]), "%s/%s.torture", rig.dir,
		       name);
	fd = open(torture_path[who], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	RIG_REQUIRE(fd >= 0 && ftruncate(fd, sizeof(struct torture)) == 0);
	torture[who] =
		mmap(NULL, sizeof(struct torture), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	RIG_REQUIRE(torture[who] != MAP_FAILED);
	(void)close(fd);
}

/* The driver that is none is found first, by this process and the daemons. */
static void use_fake_gpu(void)
{
	char dir[4096], path[4200], machine[16];

	rig_program(dir, sizeof(dir), "../tests/fake");
	(void)snprintf(path, sizeof(path), "%s/libcuda.so.1", dir);
	if (access(path, R_OK) < 0) {
		(void)printf("built without CUDA\n");
		exit(77); /* NOLINT(concurrency-mt-unsafe): one thread */
	}
	(void)snprintf(machine, sizeof(machine), "%d", (int)getpid()); /* fits */
	(void)setenv("LD_LIBRARY_PATH", dir, 1);
	(void)setenv("KVP_FAKE_CUDA", machine, 1);
}

/* The library in this process has been loaded by now: its file is named before the start. */
static void again_with_library(char **argv, bool gpu)
{
	char dir[64] = "/tmp/kvp-torture-XXXXXX", path[128];
	int fd;

	if (getenv("KVP_TORTURE_LIB"))
		return;
	RIG_REQUIRE(mkdtemp(dir));
	(void)snprintf(path, sizeof(path), "%s/lib", dir);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	RIG_REQUIRE(fd >= 0 && ftruncate(fd, sizeof(struct torture)) == 0);
	(void)close(fd);
	(void)setenv("KVP_TORTURE_LIB", path, 1);
	torture_options();
	if (gpu)
		use_fake_gpu();
	(void)execv("/proc/self/exe", argv);
	_exit(127);
}

static void share_library(void)
{
	const char *path = getenv("KVP_TORTURE_LIB");
	char dir[128];
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

	RIG_REQUIRE(fd >= 0);
	torture[LIBRARY] =
		mmap(NULL, sizeof(struct torture), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	RIG_REQUIRE(torture[LIBRARY] != MAP_FAILED);
	(void)close(fd);
	(void)snprintf(dir, sizeof(dir), "%s", path);
	(void)unlink(path);
	*strrchr(dir, '/') = 0;
	(void)rmdir(dir);
}

static void setup(void)
{
	rig_begin(&rig);
	share(PREFILL, "prefill");
	share(DECODE, "decode");
	share_library();
	disarm();
}

int main(int argc, char **argv)
{
	const char *part = argc > 1 ? argv[1] : "all";
	bool all = !strcmp(part, "all"), gpu = !strcmp(part, "gpu");

	again_with_library(argv, gpu);
	if (gpu)
		config = GPU_CONFIG CONFIG;
	stride = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1;
	first = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
	RIG_REQUIRE(stride > 0 && first < stride);
	setup();
	for (int i = 0; i < 2; i++)
		start(i);
	pass_make(&pass, daemons[0], daemons[1], gpu);
	for (int i = 0; i < 2; i++)
		RIG_REQUIRE(stop(i) == 0, "%s", daemons[i]->name);
	if (gpu)
		first_fn = (uint32_t)FN_N + TORTURE_LIB_KINDS;
	if (all || gpu || !strcmp(part, "start"))
		start_part();
	if (gpu)
		gpu_part();
	if (all || !strcmp(part, "run"))
		run_part();
	if (all || !strcmp(part, "restart"))
		restart_part();
	if (all || !strcmp(part, "stop"))
		stop_part();
	rig_remove(&rig);
	(void)printf("%s: %u faults of %u, %u have struck, %u findings", part,
		     (tried + stride - 1) / stride, tried, fired, found);
	if (gpu)
		(void)printf("; %u times the GPU was lost to a process", lost);
	(void)putchar('\n');
	return found > 0 || fired == 0;
}
