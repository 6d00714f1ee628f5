/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lets every call of libibverbs fail in turn while two nodes (peers, rooms, real lanes) move a room
 * over RDMA, on a device that is none: the first calls of each function one by one, then all of
 * them; every work request once when it is posted, once when it completes and once when it has had
 * its effect; every binding of a window, which also is not answered. Landing only, and direct where
 * it may.
 *
 * Then with connections by librdmacm. By landing: its calls, and what these connections call at
 * other times; every event is lost once, and once tells of a failure. Directly or not at all: all
 * of the above, more calls of each function, and every event also comes late: once a little, once
 * when nobody waits for it any more.
 *
 * A lane may refuse to start, with words. Otherwise both ends of the room end in time, with the
 * right bytes or with a status and a reason, and from then on nothing writes into the pool; once
 * the fault is over a room completes, direct or, where the device was found unfit for that, by
 * landing; and nothing is left on the device. Where a room may only go directly, a pool that the
 * device has refused is registered anew for that.
 *
 *     torture_verbs [STRIDE FIRST [WAY]]     every STRIDE-th fault from FIRST on, of one way or all
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

#define POSTS 40u /* work requests that fail */
#define LIFE_MS 60000
#define WAIT_MS 15000
#define LATE_MS 100      /* others overtake it */
#define TOO_LATE_MS 5500 /* its connection was given up */
#define FREE_BYTE 0x5a   /* in a pool that nobody may write into */

typedef long any_fn(long, long, long, long, long, long, long, long);

/* Those that the header of libibverbs takes from the table of the context. */
#define INLINE_VERBS(CALL)                     \
	CALL(ibv_alloc_mw, NUL, ENOMEM)        \
	CALL(ibv_bind_mw, POS, ENOMEM)         \
	CALL(ibv_poll_cq, ONE, EIO)            \
	CALL(ibv_poll_cq_of_windows, ONE, EIO) \
	CALL(ibv_post_recv, POS, ENOMEM)       \
	CALL(ibv_req_notify_cq, POS, EIO)

enum fn {
#define NUMBER(name, how, error) FN_##name,
	TORTURE_VERBS(NUMBER) INLINE_VERBS(NUMBER) FN_N
};

static const char *const fn_names[] = {
#define NAME(name, how, error) #name,
	TORTURE_VERBS(NAME) INLINE_VERBS(NAME)
};

enum kind {
	CALLS,
	POST,
	COMPLETION,
	COMPLETION_LATE, /* it has had its effect */
	BINDING,
	SILENCE, /* a request of a window, and all after it, has no answer */
	EVENT_LOST,
	EVENT_SPOILED,
	EVENT_UNANSWERED, /* spoiled, and no rejection leaves */
	EVENT_LATE,
	EVENT_TOO_LATE,
};

struct fault {
	enum kind kind;
	uint32_t fn;
	uint32_t pass; /* so many succeed before */
	uint32_t fail; /* so many fail then */
};

static const struct way {
	const char *name;
	uint32_t mode;
	bool cm;          /* connections by librdmacm */
	bool whole;       /* all faults, not only those that are this way's */
	uint32_t repeats; /* calls of one function that fail, each in a life of its own */
} ways[] = {
	{ "landing", KVP_DATA_LANDING, false, true, 6 },
	{ "direct", KVP_DATA_AUTO, false, true, 6 },
	{ "by rdma_cm", KVP_DATA_LANDING, true, false, 6 },
	{ "direct by rdma_cm", KVP_DATA_DIRECT, true, true, 32 },
};

/* What the lives and this process share. */
struct shared {
	_Atomic uint32_t armed, fn, pass, fail, fired;
	_Atomic uint32_t calls[FN_N];
	_Atomic uint64_t posted, binds, events;
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

static void wrap_table(struct ibv_context *context);

static long passed(uint32_t fn, long r)
{
	if (fn == FN_ibv_open_device && r)
		wrap_table((struct ibv_context *)r);
	return r;
}

#define WRAP(name, how, error)                                                              \
	long __real_##name(long, long, long, long, long, long, long, long);                 \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h); \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h)  \
	{                                                                                   \
		if (fails(FN_##name))                                                       \
			return failure(FAIL_##how, error);                                  \
		return passed(FN_##name, __real_##name(a, b, c, d, e, f, g, h));            \
	}
/* NOLINTNEXTLINE(readability-function-size): eight arguments stand for any */
TORTURE_VERBS(WRAP)

/* The same for all contexts. */
static struct ibv_context_ops real;

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	if (!fails(FN_ibv_alloc_mw))
		return real.alloc_mw(pd, type);
	errno = ENOMEM;
	return NULL;
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	return fails(FN_ibv_bind_mw) ? ENOMEM : real.bind_mw(qp, mw, bind);
}

/* The queue where windows answer has no channel: nobody sleeps until they do. */
static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *out)
{
	uint32_t fn = cq->channel ? FN_ibv_poll_cq : FN_ibv_poll_cq_of_windows;

	return fails(fn) ? -1 : real.poll_cq(cq, n, out);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *list, struct ibv_recv_wr **bad)
{
	if (!fails(FN_ibv_post_recv))
		return real.post_recv(qp, list, bad);
	*bad = list;
	return ENOMEM;
}

static int req_notify(struct ibv_cq *cq, int solicited_only)
{
	return fails(FN_ibv_req_notify_cq) ? EIO : real.req_notify_cq(cq, solicited_only);
}

static void wrap_table(struct ibv_context *context)
{
	real = context->ops;
	context->ops.alloc_mw = alloc_mw;
	context->ops.bind_mw = bind_mw;
	context->ops.poll_cq = poll_cq;
	context->ops.post_recv = post_recv;
	context->ops.req_notify_cq = req_notify;
}

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

/* What is late comes when it has been so for long enough. */
static void step(const struct fault *fault)
{
	static uint64_t since;
	uint64_t now = uv_hrtime();

	sr_step(&a, &b);
	if (kvp_fake_cm_look().n_late == 0)
		since = now;
	else if (now - since > (fault->kind == EVENT_LATE ? LATE_MS : TOO_LATE_MS) * SR_MS)
		kvp_fake_cm_release();
}

/* The room is over at decode: what it has brought is right, and the pool is its owner's again. */
static void take_back(const struct sr_end *to)
{
	if (to->complete)
		sr_pool_check(&dst, dst_pages, 0, 0, TOKENS);
	memset(dst.mem, FREE_BYTE, dst.bytes);
}

static void check_untouched(void)
{
	for (uint64_t i = 0; i < dst.bytes; i++)
		must(dst.mem[i] == FREE_BYTE, "written into a pool that is its owner's again");
}

static void wait_for(const struct sr_end *to, const struct sr_end *from, const struct fault *fault)
{
	uint64_t until = uv_hrtime() + WAIT_MS * SR_MS;
	bool taken = false;

	while (!(is_over(to) && is_over(from)) && uv_hrtime() < until) {
		step(fault);
		if (is_over(to) && !taken)
			take_back(to);
		taken = is_over(to);
	}
	must(is_over(to) && is_over(from), "a room does not end");
	must(!to->failed || (to->status && to->reason[0]), "decode hears no reason");
	must(!from->failed || (from->status && from->reason[0]), "prefill hears no reason");
	must(!from->complete || to->complete, "complete at prefill only");
	for (unsigned i = 0; i < 5; i++)
		step(fault);
	check_untouched();
}

/* True: complete at both ends. */
static bool transfer(uint64_t room, const struct fault *fault)
{
	struct sr_expect expect = { .handle = room, .room = room, .pages = dst_pages };
	struct sr_open open = { .handle = room, .room = room };
	const struct sr_end *to = &b.ends[room], *from = &a.ends[room];
	uint64_t binds = kvp_fake_look().n_binds;

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
	wait_for(to, from, fault);
	must(!to->complete || b.mode != KVP_DATA_DIRECT || kvp_fake_look().n_binds > binds,
	     "complete, and nothing was written directly");
	return to->complete && from->complete;
}

static void on_ended(struct kvp_pool *pool, void *arg)
{
	(void)pool;
	(void)arg;
}

/* The device has refused it: a pool is tried once. */
static void renew_dst(void)
{
	uint64_t until = uv_hrtime() + WAIT_MS * SR_MS;

	must(dst.pool->n_users == 0, "a pool is in use after its rooms");
	kvp_pool_end(dst.pool, true, on_ended, NULL);
	while (dst.pool->state != KVP_POOL_PAUSED && uv_hrtime() < until)
		sr_step(&a, &b);
	must(dst.pool->state == KVP_POOL_PAUSED, "a pool does not end");
	kvp_pool_free(&b.pools, dst.pool);
	sr_pool_free(&dst);
	sr_pool_make(&dst, &b, &shape);
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
	case COMPLETION_LATE:
		kvp_fake.fail_late = fault->kind == COMPLETION_LATE;
		kvp_fake.fail_at = fault->pass + 1;
		kvp_fake.fail_status = IBV_WC_RETRY_EXC_ERR;
		return;
	case BINDING:
		kvp_fake.fail_binding = true;
		return;
	case SILENCE:
		kvp_fake_hold_binds(fault->pass);
		return;
	case EVENT_LOST:
		kvp_fake_cm.lose_at = fault->pass + 1;
		return;
	case EVENT_UNANSWERED:
		shared->fn = FN_rdma_reject;
		shared->pass = 0;
		shared->fail = UINT32_MAX;
		shared->armed = 1;
		kvp_fake_cm.spoil_at = fault->pass + 1;
		return;
	case EVENT_SPOILED:
		kvp_fake_cm.spoil_at = fault->pass + 1;
		return;
	case EVENT_LATE:
	case EVENT_TOO_LATE:
		kvp_fake_cm.late_at = fault->pass + 1;
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
 * into its time limit; and of a pool that may only be written into directly the first room after
 * the fault may hear that the device has refused it. */
static bool recovers(const struct fault *fault)
{
	uint64_t rooms = 1;

	if (fault && (fault->kind == EVENT_LOST || fault->kind == EVENT_TOO_LATE ||
		      fault->kind == EVENT_UNANSWERED))
		rooms = 6;
	else if (fault && (fault->kind != CALLS || b.mode == KVP_DATA_DIRECT))
		rooms = 2;
	for (uint64_t i = 0; i < rooms; i++) {
		const struct sr_end *last = &b.ends[1 + i];

		if (b.mode == KVP_DATA_DIRECT && last->status == KVP__STATUS__STATUS_UNSUPPORTED)
			renew_dst();
		if (transfer(2 + i, fault))
			return true;
	}
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
		complete = transfer(1, fault);
		must(complete || fault, "a room without a fault fails");
		shared->armed = 0;
		if (way->mode == KVP_DATA_DIRECT)
			kvp_fake.fail_binding = false; /* or it could only go by landing */
		kvp_fake_hold_binds(UINT64_MAX);
		shared->binds = kvp_fake_look().n_binds;
		shared->posted = kvp_fake_look().n_posted;
		shared->events = kvp_fake_cm_look().n_events;
		must(fault || way->mode == KVP_DATA_LANDING || kvp_fake_look().n_binds > 0,
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
					     "late completion of request",
					     "binding of windows",
					     "no answer to binding",
					     "loss of event",
					     "failure for event",
					     "failure and no rejection for event",
					     "lateness of event",
					     "great lateness of event" };
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
	fired += (fault->kind != CALLS && fault->kind != EVENT_UNANSWERED) || shared->fired > 0;
	if (status != 0)
		print_found(fault, way, status, log);
}

/* One by one, all, and all from half of them on. */
static void try_calls(uint32_t fn, uint32_t calls, const struct way *way, FILE *log,
		      const uint32_t pick[2])
{
	uint32_t n = KVP_MIN(calls, way->repeats);

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
	unsigned before[2] = { tried, done };
	uint32_t calls[FN_N], posts, binds, events;
	int status;

	for (uint32_t fn = 0; fn < FN_N; fn++)
		shared->calls[fn] = 0;
	status = life(NULL, way, log);
	if (status != 0)
		print_found(NULL, way, status, log);
	for (uint32_t fn = 0; fn < FN_N; fn++)
		calls[fn] = shared->calls[fn];
	posts = (uint32_t)KVP_MIN(shared->posted, (uint64_t)POSTS);
	binds = (uint32_t)shared->binds;
	events = (uint32_t)shared->events;
	for (uint32_t fn = 0; fn < FN_N; fn++)
		if (way->whole || is_of_cm(fn))
			try_calls(fn, calls[fn], way, log, pick);
	for (uint32_t k = 0; k < events; k++) {
		try_fault(&(struct fault){ EVENT_LOST, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ EVENT_SPOILED, 0, k, 1 }, way, log, pick);
		if (!way->whole)
			continue;
		try_fault(&(struct fault){ EVENT_UNANSWERED, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ EVENT_LATE, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ EVENT_TOO_LATE, 0, k, 1 }, way, log, pick);
	}
	for (uint32_t k = 0; k < posts && way->whole; k++) {
		try_fault(&(struct fault){ POST, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ COMPLETION, 0, k, 1 }, way, log, pick);
		try_fault(&(struct fault){ COMPLETION_LATE, 0, k, 1 }, way, log, pick);
	}
	for (uint32_t k = 0; k < binds; k++)
		try_fault(&(struct fault){ SILENCE, 0, k, 1 }, way, log, pick);
	if (binds > 0)
		try_fault(&(struct fault){ BINDING, 0, 0, 1 }, way, log, pick);
	(void)printf("verbs, %s: %u faults of %u\n", way->name, done - before[1],
		     tried - before[0]);
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
	must(pick[1] < pick[0], "torture_verbs [STRIDE FIRST [WAY]]");
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(ways); i++)
		if (argc < 4 || strcmp(argv[3], ways[i].name) == 0)
			try_way(&ways[i], log, pick);
	(void)fclose(log);
	(void)printf("verbs: %u faults of %u, %u have struck, %u findings\n", done, tried, fired,
		     found);
	return found > 0 || fired == 0;
}
