/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_baseline.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "proto/util.h"

#define STREAM_WRITE (1u << 20)
#define PUT_WINDOW 256u

double kvp_base_now(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail with this clock */
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* As at the first call: a process that was placed already has not all of them. */
static const cpu_set_t *all_cores(void)
{
	static cpu_set_t all;
	static bool known;

	if (!known)
		known = sched_getaffinity(0, sizeof(all), &all) == 0;
	return &all;
}

void kvp_base_place(enum kvp_base_node node)
{
	const cpu_set_t *all = all_cores();
	int n = CPU_COUNT(all), seen = 0;
	cpu_set_t half;

	CPU_ZERO(&half);
	for (int i = 0; i < CPU_SETSIZE; i++) {
		if (!CPU_ISSET(i, all))
			continue;
		if (node == KVP_BASE_ANY || n < 2 || (seen < n / 2) == (node == KVP_BASE_NEAR))
			CPU_SET(i, &half);
		seen++;
	}
	(void)sched_setaffinity(0, sizeof(half), &half); /* a subset of what is allowed */
}

static int compare_double(const void *a, const void *b)
{
	double x = *(const double *)a;
	double y = *(const double *)b;

	return (x > y) - (x < y);
}

double kvp_base_median(double *values, uint32_t n)
{
	qsort(values, n, sizeof(*values), compare_double);
	return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void *pool_map(uint64_t bytes, int fill)
{
	void *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (pool == MAP_FAILED)
		return NULL;
	memset(pool, fill, bytes); /* touched: no page fault is measured */
	return pool;
}

static int send_all(int fd, const void *buf, size_t bytes)
{
	const char *at = buf;

	while (bytes) {
		ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);

		if (n < 0)
			return -errno;
		at += n;
		bytes -= (size_t)n;
	}
	return 0;
}

static int recv_all(int fd, void *buf, size_t bytes)
{
	char *at = buf;

	while (bytes) {
		ssize_t n = recv(fd, at, bytes, 0);

		if (n <= 0)
			return n ? -errno : -ECONNRESET;
		at += n;
		bytes -= (size_t)n;
	}
	return 0;
}

/* A connected loopback TCP pair. */
static int tcp_pair(int fds[2])
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	socklen_t len = sizeof(addr);
	KVP_CLEANUP(kvp_closep) int listener = socket(AF_INET, SOCK_STREAM, 0);
	KVP_CLEANUP(kvp_closep) int a = socket(AF_INET, SOCK_STREAM, 0);
	int one = 1;
	int b;

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (listener < 0 || a < 0 || bind(listener, (struct sockaddr *)&addr, len) ||
	    listen(listener, 1) || getsockname(listener, (struct sockaddr *)&addr, &len) ||
	    connect(a, (struct sockaddr *)&addr, len))
		return -errno;
	b = accept(listener, NULL, NULL);
	if (b < 0)
		return -errno;
	if (setsockopt(a, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) ||
	    setsockopt(b, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))) {
		(void)close(b);
		return -errno;
	}
	fds[0] = KVP_TAKE_FD(a);
	fds[1] = b;
	return 0;
}

/* Bytes of the next call: no more than STREAM_WRITE, not past the pool's end. */
static uint64_t stream_step(const struct kvp_base_job *job, uint64_t at, uint64_t left)
{
	uint64_t n = KVP_MIN(left, job->pool_bytes - at);

	return KVP_MIN(n, (uint64_t)STREAM_WRITE);
}

/* The receiver: fills its pool from the socket, wrapping around, and answers each repetition. */
static int stream_child(int fd, const struct kvp_base_job *job)
{
	uint64_t total = job->rows * job->row_bytes;
	char *pool = pool_map(job->pool_bytes, 0);
	int r = pool ? send_all(fd, "", 1) : -ENOMEM;

	for (uint32_t i = 0; !r && i < job->repetitions; i++) {
		uint64_t at = 0;

		for (uint64_t left = total; left && !r;) {
			uint64_t n = stream_step(job, at, left);

			r = recv_all(fd, pool + at, n);
			at = (at + n) % job->pool_bytes;
			left -= n;
		}
		if (!r)
			r = send_all(fd, "", 1);
	}
	return r;
}

static int reap(pid_t pid, int r)
{
	int status = 0;

	if (waitpid(pid, &status, 0) < 0)
		return r ? r : -errno;
	return r ? r : WIFEXITED(status) && !WEXITSTATUS(status) ? 0 : -EIO;
}

int kvp_base_stream_open(struct kvp_base_stream *stream, const struct kvp_base_job *job)
{
	int fds[2] = { -1, -1 };
	char byte;
	int r = tcp_pair(fds);

	*stream = (struct kvp_base_stream){ .job = *job, .fd = -1, .pid = -1 };
	if (r)
		return r;
	stream->pid = fork();
	if (stream->pid == 0) {
		kvp_base_place(job->far);
		(void)close(fds[0]);
		_exit(stream_child(fds[1], job) ? 1 : 0);
	}
	stream->fd = fds[0];
	(void)close(fds[1]);
	if (stream->pid < 0)
		return -errno;
	stream->pool = pool_map(job->pool_bytes, 1);
	return stream->pool ? recv_all(stream->fd, &byte, 1) : -ENOMEM;
}

int kvp_base_stream_run(struct kvp_base_stream *stream, double *secs)
{
	const struct kvp_base_job *job = &stream->job;
	double start = kvp_base_now();
	uint64_t at = 0;
	char byte;
	int r = 0;

	for (uint64_t left = job->rows * job->row_bytes; left && !r;) {
		uint64_t n = stream_step(job, at, left);

		r = send_all(stream->fd, stream->pool + at, n);
		at = (at + n) % job->pool_bytes;
		left -= n;
	}
	if (!r)
		r = recv_all(stream->fd, &byte, 1);
	*secs = kvp_base_now() - start;
	return r;
}

int kvp_base_stream_close(struct kvp_base_stream *stream, int r)
{
	if (stream->pool)
		(void)munmap(stream->pool, stream->job.pool_bytes);
	if (stream->fd >= 0)
		(void)close(stream->fd); /* ends the child if it still reads */
	return stream->pid < 0 ? r : reap(stream->pid, r);
}

int kvp_base_stream(const struct kvp_base_job *job, double *secs)
{
	struct kvp_base_stream stream;
	int r = kvp_base_stream_open(&stream, job);

	for (uint32_t i = 0; !r && i < job->repetitions; i++)
		r = kvp_base_stream_run(&stream, &secs[i]);
	return kvp_base_stream_close(&stream, r);
}

int kvp_base_memcpy(const struct kvp_base_job *job, double *secs)
{
	uint64_t total = job->rows * job->row_bytes;
	char *src = pool_map(job->pool_bytes, 1);
	char *dst = pool_map(job->pool_bytes, 0);
	int r = src && dst ? 0 : -ENOMEM;

	for (uint32_t i = 0; !r && i < job->repetitions; i++) {
		double start = kvp_base_now();
		uint64_t at = 0;

		for (uint64_t left = total; left;) {
			uint64_t n = stream_step(job, at, left);

			memcpy(dst + at, src + at, n);
			at = (at + n) % job->pool_bytes;
			left -= n;
		}
		secs[i] = kvp_base_now() - start;
	}
	if (src)
		(void)munmap(src, job->pool_bytes);
	if (dst)
		(void)munmap(dst, job->pool_bytes);
	return r;
}

/* ---- round trips ---- */

static int pingpong(int fds[2], enum kvp_base_node far, uint32_t rounds, double *rtt)
{
	KVP_CLEANUP(kvp_freep) double *times = calloc(rounds, sizeof(*times));
	char msg[64] = { 0 };
	int r = times ? 0 : -ENOMEM;
	pid_t pid = r ? -1 : fork();

	if (pid == 0) {
		kvp_base_place(far);
		(void)close(fds[0]);
		while (!recv_all(fds[1], msg, sizeof(msg)) && !send_all(fds[1], msg, sizeof(msg)))
			;
		_exit(0);
	}
	(void)close(fds[1]);
	if (!r && pid < 0)
		r = -errno;
	kvp_base_place(far == KVP_BASE_ANY ? KVP_BASE_ANY : KVP_BASE_NEAR);
	for (uint32_t i = 0; !r && i < rounds; i++) {
		double start = kvp_base_now();

		r = send_all(fds[0], msg, sizeof(msg));
		if (!r)
			r = recv_all(fds[0], msg, sizeof(msg));
		times[i] = kvp_base_now() - start;
	}
	kvp_base_place(KVP_BASE_ANY);
	(void)close(fds[0]);
	if (pid > 0)
		r = reap(pid, r);
	if (!r)
		*rtt = kvp_base_median(times, rounds);
	return r;
}

int kvp_base_pingpong_unix(enum kvp_base_node far, uint32_t rounds, double *rtt)
{
	int fds[2] = { -1, -1 };

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds))
		return -errno;
	return pingpong(fds, far, rounds, rtt);
}

int kvp_base_pingpong_tcp(enum kvp_base_node far, uint32_t rounds, double *rtt)
{
	int fds[2] = { -1, -1 };
	int r = tcp_pair(fds);

	return r ? r : pingpong(fds, far, rounds, rtt);
}

/* ---- naive put: one ucp_put_nbx for each row, a window of them in flight ---- */

struct put_side {
	ucp_context_h context;
	ucp_worker_h worker;
	ucp_ep_h ep;
	ucp_rkey_h rkey;
	ucp_mem_h mem;
	char *pool;
	unsigned in_flight;
	int error;
};

static int put_open(struct put_side *side, uint64_t bytes)
{
	ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES,
				.features = UCP_FEATURE_RMA };
	ucp_worker_params_t wparams = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
					.thread_mode = UCS_THREAD_MODE_SINGLE };
	ucp_mem_map_params_t mparams = { .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS |
						       UCP_MEM_MAP_PARAM_FIELD_LENGTH };
	ucp_config_t *config;
	ucs_status_t st;

	side->pool = pool_map(bytes, 1);
	if (!side->pool || ucp_config_read(NULL, NULL, &config) != UCS_OK)
		return -ENOMEM;
	(void)ucp_config_modify(config, "TLS", "tcp"); /* a refusal shows in ucp_init */
	(void)ucp_config_modify(config, "NET_DEVICES", "lo");
	st = ucp_init(&params, config, &side->context);
	ucp_config_release(config);
	if (st != UCS_OK)
		return -EIO;
	mparams.address = side->pool;
	mparams.length = bytes;
	if (ucp_worker_create(side->context, &wparams, &side->worker) != UCS_OK ||
	    ucp_mem_map(side->context, &mparams, &side->mem) != UCS_OK)
		return -EIO;
	return 0;
}

static int put_child(int fd, const struct kvp_base_job *job)
{
	struct put_side side = { .error = 0 };
	ucp_address_t *addr;
	size_t addr_bytes, rkey_bytes;
	uint64_t head[3];
	void *rkey;
	char byte;
	int r = put_open(&side, job->pool_bytes);

	if (r || ucp_worker_get_address(side.worker, &addr, &addr_bytes) != UCS_OK ||
	    ucp_rkey_pack(side.context, side.mem, &rkey, &rkey_bytes) != UCS_OK)
		return -EIO;
	head[0] = addr_bytes;
	head[1] = rkey_bytes;
	head[2] = (uint64_t)(uintptr_t)side.pool;
	if (send_all(fd, head, sizeof(head)) || send_all(fd, addr, addr_bytes) ||
	    send_all(fd, rkey, rkey_bytes))
		return -EIO;
	for (;;) {
		ssize_t n = recv(fd, &byte, 1, MSG_DONTWAIT);

		if (n == 0)
			return 0;
		while (ucp_worker_progress(side.worker))
			;
	}
}

static int put_connect(struct put_side *side, int fd, uint64_t *remote)
{
	ucp_ep_params_t params = { .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS };
	uint64_t head[3];
	KVP_CLEANUP(kvp_freep) char *buf = NULL;
	int r = recv_all(fd, head, sizeof(head));

	if (r)
		return r;
	buf = malloc(head[0] + head[1]);
	if (!buf)
		return -ENOMEM;
	r = recv_all(fd, buf, head[0] + head[1]);
	if (r)
		return r;
	params.address = (const ucp_address_t *)buf;
	if (ucp_ep_create(side->worker, &params, &side->ep) != UCS_OK ||
	    ucp_ep_rkey_unpack(side->ep, buf + head[0], &side->rkey) != UCS_OK)
		return -EIO;
	*remote = head[2];
	return 0;
}

static void put_done(void *request, ucs_status_t status, void *arg)
{
	struct put_side *side = arg;

	side->in_flight--;
	if (status != UCS_OK)
		side->error = -EIO;
	ucp_request_free(request);
}

static int put_one(struct put_side *side, const char *src, uint64_t dst, size_t bytes)
{
	ucp_request_param_t param = { .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
						      UCP_OP_ATTR_FIELD_USER_DATA,
				      .cb = { .send = put_done },
				      .user_data = side };
	ucs_status_ptr_t req = ucp_put_nbx(side->ep, src, bytes, dst, side->rkey, &param);

	if (UCS_PTR_IS_ERR(req))
		return -EIO;
	if (UCS_PTR_IS_PTR(req))
		side->in_flight++;
	while (side->in_flight >= PUT_WINDOW)
		ucp_worker_progress(side->worker);
	return side->error;
}

static int put_flush(struct put_side *side)
{
	ucp_request_param_t param = { .op_attr_mask = 0 };
	ucs_status_ptr_t req = ucp_ep_flush_nbx(side->ep, &param);
	ucs_status_t st = UCS_OK;

	if (UCS_PTR_IS_PTR(req)) {
		do {
			ucp_worker_progress(side->worker);
			st = ucp_request_check_status(req);
		} while (st == UCS_INPROGRESS);
		ucp_request_free(req);
	} else {
		st = UCS_PTR_STATUS(req);
	}
	return st == UCS_OK ? side->error : -EIO;
}

static int put_parent(int fd, const struct kvp_base_job *job, double *secs)
{
	struct put_side side = { .error = 0 };
	uint64_t pool_rows = job->pool_bytes / job->row_bytes;
	uint64_t remote = 0;
	int r = put_open(&side, job->pool_bytes);

	if (!r)
		r = put_connect(&side, fd, &remote);
	for (uint32_t i = 0; !r && i < job->repetitions; i++) {
		double start = kvp_base_now();

		/* Strided at the source, dense at each destination, as DCP wants it. */
		for (uint64_t d = 0; !r && d < job->n_dests; d++)
			for (uint64_t row = d, at = 0; !r && row < job->rows;
			     row += job->n_dests, at++) {
				uint64_t dst = (d * (pool_rows / job->n_dests) + at) % pool_rows;

				r = put_one(&side, side.pool + row % pool_rows * job->row_bytes,
					    remote + dst * job->row_bytes, job->row_bytes);
			}
		if (!r)
			r = put_flush(&side);
		secs[i] = kvp_base_now() - start;
	}
	return r;
}

int kvp_base_put(const struct kvp_base_job *job, double *secs)
{
	int fds[2] = { -1, -1 };
	int r = tcp_pair(fds);
	pid_t pid[2];
	int status;

	if (r)
		return r;
	pid[0] = fork();
	if (pid[0] == 0) {
		kvp_base_place(job->far);
		(void)close(fds[0]);
		_exit(put_child(fds[1], job) ? 1 : 0);
	}
	(void)close(fds[1]);
	/* The sender too in a process of its own: UCX leaves nothing behind in the benchmark. */
	double *shared = mmap(NULL, job->repetitions * sizeof(*secs), PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid[1] = pid[0] < 0 || shared == MAP_FAILED ? -1 : fork();
	if (pid[1] == 0) {
		kvp_base_place(job->far == KVP_BASE_ANY ? KVP_BASE_ANY : KVP_BASE_NEAR);
		_exit(put_parent(fds[0], job, shared) ? 1 : 0);
	}
	(void)close(fds[0]);
	if (pid[1] < 0)
		return -EAGAIN;
	r = waitpid(pid[1], &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) ? -EIO : 0;
	r = reap(pid[0], r);
	if (!r)
		memcpy(secs, shared, job->repetitions * sizeof(*secs));
	(void)munmap(shared, job->repetitions * sizeof(*secs));
	return r;
}
