/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets every call of libibverbs fail in turn while two nodes (peers, rooms, real lanes) move a room
 * over RDMA, on a device that is none: the first calls of each function one by one, then all of
 * them; every work request once when it is posted and once when it completes; every binding of a
 * window. Landing only, and direct where it may; then with connections by librdmacm, of which every
 * call fails, and every event is lost once and once tells of a failure.
 *
 * A lane may refuse to start, with words. Otherwise both ends of the room end in time, with the
 * right bytes or with a status and a reason; once the fault is over a room completes, direct or,
 * where the device was found unfit for that, by landing; and nothing is left on the device.
 *
 *     torture_verbs [STRIDE FIRST]     every STRIDE-th fault from FIRST on
 */

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/net_verbs.h"
#include "tests/fake_rdmacm.h"
#include "tests/fake_verbs.h"
#include "tests/support_room.h"
#include "tests/torture_calls.h"

#define REPEATS 6u /* calls of one function that fail, each in a life of its own */
#define POSTS 40u  /* work requests that fail */
#define LIFE_MS 60000
#define WAIT_MS 15000

typedef long any_fn(long, long, long, long, long, long, long, long);

enum fn {
#define NUMBER(name, how, error) FN_##name,
	TORTURE_VERBS(NUMBER) FN_N
};

static const char *const fn_names[] = {
#define NAME(name, how, error) #name,
	TORTURE_VERBS(NAME)
};

enum kind { CALLS, POST, COMPLETION, BINDING, EVENT_LOST, EVENT_SPOILED };

struct fault {
	enum kind kind;
	uint32_t fn;
	uint32_t pass; /* so many succeed before */
	uint32_t fail; /* so many fail then */
};

static const struct way {
	const char *name;
	uint32_t mode;
	bool cm; /* connections by librdmacm */
} ways[] = {
	{ "landing", KVP_DATA_LANDING, false },
	{ "direct", KVP_DATA_AUTO, false },
	{ "by rdma_cm", KVP_DATA_LANDING, true },
};

/* What the lives and this process share. */
struct shared {
	_Atomic uint32_t armed, fn, pass, fail, fired;
	_Atomic uint32_t calls[FN_N];
	_Atomic uint64_t posted, events;
};

static struct shared *shared;
static unsigned tried, done, fired, found;

/* ---- the calls ------------------------------------------------------------------------------ */

enum { FAIL_NUL, FAIL_ONE, FAIL_POS };

static bool fails(uint32_t fn)
{
	atomic_fetch_add(&shared->calls[fn], 1);
	if (!atomic_load(&shared->armed) || atomic_load(&shared->fn) != fn)
		return false;
	/* Two lanes may come at once: who takes one of the counts has it. */
	for (uint32_t n = atomic_load(&shared->pass); n > 0;)
		if (atomic_compare_exchange_weak(&shared->pass, &n, n - 1))
			return false;
	for (uint32_t n = atomic_load(&shared->fail); n > 0;)
		if (atomic_compare_exchange_weak(&shared->fail, &n, n - 1)) {
			atomic_fetch_add(&shared->fired, 1);
			return true;
		}
	return false;
}

static long failure(int how, int error)
{
	if (how == FAIL_POS)
		return error;
	errno = error;
	return how == FAIL_NUL ? 0 : -1;
}

#define WRAP(name, how, error)                                                              \
	long __real_##name(long, long, long, long, long, long, long, long);                 \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h); \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h)  \
	{                                                                                   \
		if (fails(FN_##name))                                                       \
			return failure(FAIL_##how, error);                                  \
		return __real_##name(a, b, c, d, e, f, g, h);                               \
	}
/* NOLINTNEXTLINE(readability-function-size): eight arguments stand for any */
TORTURE_VERBS(WRAP)

/* ---- a life --------------------------------------------------------------------------------- */

static const struct sr_shape shape = { 16, 1, 0, 16, 2, 256, 0, "torture" };
static const uint32_t src_pages[] = { 3, 1, 2, 0, 7, 9, 8, 5 };
static const uint32_t dst_pages[] = { 9, 8, 12, 10, 1, 0, 15, 4 };

#define TOKENS 128u

static struct sr_node a, b;
static struct sr_pool src, dst;

static void must(bool ok, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "%s\n", what);
	_exit(1);
}

static bool is_over(const struct sr_end *end)
{
	return end->released && (end->complete || end->failed);
}

static void submit(uint64_t handle, uint32_t seq)
{
	struct sr_chunk chunk = {
		.handle = handle,
		.seq = seq,
		.start = (uint64_t)seq * TOKENS / 2,
		.tokens = TOKENS / 2,
		.pages = src_pages,
		.n_pages = 8,
		.last = seq == 1,
	};
	Kvp__Status status = sr_submit(&a, &chunk);

	must(status == KVP__STATUS__STATUS_OK || a.ends[handle].failed, a.err);
}

/* True: complete at both ends. */
static bool transfer(uint64_t room)
{
	struct sr_expect expect = { .handle = room, .room = room, .pages = dst_pages };
	struct sr_open open = { .handle = room, .room = room };
	uint64_t until = uv_hrtime() + WAIT_MS * SR_MS;
	const struct sr_end *to = &b.ends[room], *from = &a.ends[room];

	expect.n_pages = 8;
	expect.end = TOKENS;
	expect.n_senders = 1;
	expect.senders[0].address = kvp_peers_address(a.peers);
	memset(dst.mem, 0, dst.bytes);
	sr_pool_fill(&src, src_pages, 0, 0, TOKENS);
	must(sr_expect(&b, &dst, &expect) == KVP__STATUS__STATUS_OK, b.err);
	must(sr_open(&a, &src, &open) == KVP__STATUS__STATUS_OK, a.err);
	submit(room, 0);
	submit(room, 1);
	while (!(is_over(to) && is_over(from)) && uv_hrtime() < until)
		sr_step(&a, &b);
	must(is_over(to) && is_over(from), "a room does not end");
	must(!to->failed || (to->status && to->reason[0]), "decode hears no reason");
	must(!from->failed || (from->status && from->reason[0]), "prefill hears no reason");
	must(!from->complete || to->complete, "complete at prefill only");
	if (to->complete)
		sr_pool_check(&dst, dst_pages, 0, 0, TOKENS);
	return to->complete && from->complete;
}

static void node_init(struct sr_node *node, uv_loop_t *loop, uint8_t id, const struct way *way)
{
	static struct kvp_net_verbs_config verbs;

	sr_init(node, loop, id);
	kvp_net_verbs_defaults(&verbs);
	verbs.rdma_cm = way->cm;
	node->verbs = &verbs;
	node->mode = way->mode;
	node->config.timers.offer_ns = node->config.timers.open_ns = 3000 * SR_MS;
	node->config.timers.progress_ns = 2000 * SR_MS;
	node->config.timers.drain_ns = 500 * SR_MS;
}

static void arm(const struct fault *fault)
{
	kvp_fake_reset();
	kvp_fake_cm_reset();
	if (!fault)
		return;
	switch (fault->kind) {
	case CALLS:
		shared->fn = fault->fn;
		shared->pass = fault->pass;
		shared->fail = fault->fail;
		shared->armed = 1;
		return;
	case POST:
		kvp_fake.refuse_at = fault->pass + 1;
		kvp_fake.refuse_errno = ENOMEM;
		return;
	case COMPLETION:
		kvp_fake.fail_at = fault->pass + 1;
		kvp_fake.fail_status = IBV_WC_RETRY_EXC_ERR;
		return;
	case BINDING:
		kvp_fake.fail_binding = true;
		return;
	case EVENT_LOST:
		kvp_fake_cm.lose_at = fault->pass + 1;
		return;
	case EVENT_SPOILED:
		kvp_fake_cm.spoil_at = fault->pass + 1;
		return;
	}
}

static bool start_both(bool faulty)
{
	bool up = sr_try_start(&a, &kvp_net_verbs);

	must(up || (faulty && a.err[0]), "prefill's lane refuses to start without a word");
	if (!up)
		return false;
	up = sr_try_start(&b, &kvp_net_verbs);
	must(up || (faulty && b.err[0]), "decode's lane refuses to start without a word");
	if (!up)
		sr_stop(&a);
	return up;
}

/* The number that fails may come up only now; of what is lost without a word an attempt has to run
 * into its time limit. */
static bool recovers(const struct fault *fault)
{
	uint64_t rooms = 1;

	if (fault && fault->kind == EVENT_LOST)
		rooms = 6;
	else if (fault && fault->kind != CALLS)
		rooms = 2;
	for (uint64_t i = 0; i < rooms; i++)
		if (transfer(2 + i))
			return true;
	return false;
}

static void live(const struct fault *fault, const struct way *way)
{
	uv_loop_t loop;
	bool complete;

	must(uv_loop_init(&loop) == 0, "uv_loop_init");
	node_init(&a, &loop, 1, way);
	node_init(&b, &loop, 2, way);
	arm(fault);
	if (start_both(fault)) {
		sr_pool_make(&src, &a, &shape);
		sr_pool_make(&dst, &b, &shape);
		complete = transfer(1);
		must(complete || fault, "a room without a fault fails");
		shared->armed = 0;
		shared->posted = kvp_fake_look().n_posted;
		shared->events = kvp_fake_cm_look().n_events;
		must(fault || way->mode != KVP_DATA_AUTO || kvp_fake_look().n_binds > 0,
		     "nothing was written directly");
		must(recovers(fault), "a room after the fault fails");
		sr_stop(&b);
		sr_stop(&a);
		sr_pool_free(&src);
		sr_pool_free(&dst);
	}
	must(uv_loop_close(&loop) == 0, "the loop has handles left");
	must(kvp_fake.n_qps + kvp_fake.n_mrs + kvp_fake.n_ahs + kvp_fake.n_cqs + kvp_fake.n_pds +
			     kvp_fake.n_contexts + kvp_fake.n_mws ==
		     0,
	     "something is left on the device");
	must(kvp_fake_cm.n_ids + kvp_fake_cm.n_channels == 0, "an id or a channel is left");
}

/* ---- all lives ------------------------------------------------------------------------------ */

/* In a process of its own: 0, an exit status, 128 + a signal, or -1 when it did not end. */
static int life(const struct fault *fault, const struct way *way, FILE *log)
{
	uint64_t until = uv_hrtime() + LIFE_MS * SR_MS;
	int status;
	pid_t pid;

	(void)fflush(stdout);
	rewind(log);
	(void)ftruncate(fileno(log), 0); /* only words */
	shared->armed = shared->fired = 0;
	pid = fork();
	must(pid >= 0, "fork");
	if (pid == 0) {
		(void)dup2(fileno(log), STDERR_FILENO);
		live(fault, way);
		exit(0); /* NOLINT(concurrency-mt-unsafe): one thread; leaks are told */
	}
	while (waitpid(pid, &status, WNOHANG) == 0) {
		if (uv_hrtime() > until) {
			(void)kill(pid, SIGKILL);
			(void)waitpid(pid, &status, 0);
			return -1;
		}
		(void)usleep(1000);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void print_found(const struct fault *fault, const struct way *way, int status, FILE *log)
{
	static const char *const kinds[] = { "",
					     "posting of request",
					     "completion of request",
					     "binding of windows",
					     "loss of event",
					     "failure for event" };
	char line[512];

	found++;
	if (fault && fault->kind == CALLS)
		(void)printf("FOUND call %u%s of %s", fault->pass + 1,
			     fault->fail > 1 ? " and all after it" : "", fn_names[fault->fn]);
	else
		(void)printf("FOUND %s %u", fault ? kinds[fault->kind] : "no fault",
			     fault ? fault->pass + 1 : 0);
	(void)printf(", %s: exit status %d\n", way->name, status);
	rewind(log);
	while (fgets(line, sizeof(line), log))
		(void)printf("    %s", line);
}

static void try_fault(const struct fault *fault, const struct way *way, FILE *log,
		      const uint32_t pick[2])
{
	int status;

	if (tried++ % pick[0] != pick[1])
		return;
	done++;
	status = life(fault, way, log);
	fired += fault->kind != CALLS || shared->fired > 0;
	if (status != 0)
		print_found(fault, way, status, log);
}

/* One by one, all, and all from half of them on. */
static void try_calls(uint32_t fn, uint32_t calls, const struct way *way, FILE *log,
		      const uint32_t pick[2])
{
	uint32_t n = KVP_MIN(calls, REPEATS);

	for (uint32_t k = 0; k < n; k++)
		try_fault(&(struct fault){ CALLS, fn, k, 1 }, way, log, pick);
	if (calls > 0)
		try_fault(&(struct fault){ CALLS, fn, 0, UINT32_MAX }, way, log, pick);
	if (calls > 1)
		try_fault(&(struct fault){ CALLS, fn, calls / 2, UINT32_MAX }, way, log, pick);
}

/* What connections by librdmacm do in another way, or at other times. */
static bool is_of_cm(uint32_t fn)
{
	return strncmp(fn_names[fn], "rdma_", 5) == 0 || fn == FN_ibv_create_qp ||
	       fn == FN_ibv_modify_qp;
}

static void try_way(const struct way *way, FILE *log, const uint32_t pick[2])
{
	uint32_t calls[FN_N], posts, events;
	int status;

	for (uint32_t fn = 0; fn < FN_N; fn++)
		shared->calls[fn] = 0;
	status = life(NULL, way, log);
	if (status != 0)
		print_found(NULL, way, status, log);
	for (uint32_t fn = 0; fn < FN_N; fn++)
		calls[fn] = shared->calls[fn];
	posts = (uint32_t)KVP_MIN(shared->posted, (uint64_t)POSTS);
	events = (uint32_t)shared->events;
	for (uint32_t fn = 0; fn < FN_N; fn++)
		if (!way->cm || is_of_cm(fn))
			try_calls(fn, calls[fn], way, log, pick);
	for (uint32_t k = 0; k < events; k++) {
		try_fault(&(struct fault){ EVENT_LOST, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ EVENT_SPOILED, 0, k, 1 }, way, log, pick);
	}
	for (uint32_t k = 0; k < posts && !way->cm; k++) {
		try_fault(&(struct fault){ POST, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ COMPLETION, 0, k, 1 }, way, log, pick);
	}
	if (way->mode == KVP_DATA_AUTO)
		try_fault(&(struct fault){ BINDING, 0, 0, 1 }, way, log, pick);
}

int main(int argc, char **argv)
{
	uint32_t pick[2] = { 1, 0 };
	FILE *log = tmpfile();

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	must(log && shared != MAP_FAILED, "no memory");
	pick[0] = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1;
	pick[1] = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
	must(pick[1] < pick[0], "torture_verbs [STRIDE FIRST]");
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(ways); i++)
		try_way(&ways[i], log, pick);
	(void)fclose(log);
	(void)printf("verbs: %u faults of %u, %u have struck, %u findings\n", done, tried, fired,
		     found);
	return found > 0 || fired == 0;
}
