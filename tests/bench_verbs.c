/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the project's posting and reaping adds to the bare calls: writes a second of one core, by
 * kvp_qp and by a loop of ibv_post_send() over lists of the same length on the same device. Then
 * requests and completions a megabyte, in whole slots and row by row.
 *
 * Needs an RDMA device: `make check-rdma` runs it. Argument: the device.
 */

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/net_verbs.h"
#include "daemon/nic.h"
#include "daemon/qp.h"
#include "proto/util.h"
#include "tests/support_verbs.h"

#define BATCH 32u
#define DEPTH 128u
#define WRITES 6400u
#define BYTES 64u
#define RUNS 21u
#define ROW 576u
#define PAGE (64 * ROW)
#define SLOT (1u << 20)

#define REQUIRE(cond)                                                                   \
	do {                                                                            \
		if (!(cond)) {                                                          \
			(void)fprintf(stderr, "bench_verbs:%d: %s\n", __LINE__, #cond); \
			exit(1);                                                        \
		}                                                                       \
	} while (0)

struct bench {
	struct kvp_nic nic;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp, *peer;
	struct ibv_mr *mr;
	uint8_t memory[2 * 4096];
};

static double cpu_s(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts); /* cannot fail for this clock */
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static struct ibv_qp *make_qp(struct bench *bench)
{
	struct ibv_qp_init_attr init = {
		.send_cq = bench->cq,
		.recv_cq = bench->cq,
		.cap = { DEPTH + 1, 1, KVP_QP_SGE_MAX, 1, 0 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = bench->nic.port,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp(bench->pd, &init);

	REQUIRE(qp);
	REQUIRE(ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				      IBV_QP_ACCESS_FLAGS) == 0);
	return qp;
}

static void bring_up(const struct bench *bench, struct ibv_qp *qp, const struct ibv_qp *peer)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = bench->nic.mtu,
		.dest_qp_num = peer->qp_num,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.dlid = bench->nic.lid,
			.port_num = bench->nic.port,
			.grh = { .dgid = bench->nic.gid,
				 .sgid_index = (uint8_t)bench->nic.gid_index,
				 .hop_limit = 64 },
		},
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 3,
		.rnr_retry = 6,
	};

	REQUIRE(ibv_modify_qp(qp, &rtr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				      IBV_QP_MIN_RNR_TIMER) == 0);
	REQUIRE(ibv_modify_qp(qp, &rts,
			      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void bench_open(struct bench *bench)
{
	bench->pd = ibv_alloc_pd(bench->context);
	REQUIRE(bench->pd);
	bench->cq = ibv_create_cq(bench->context, 2 * DEPTH + 2, NULL, NULL, 0);
	REQUIRE(bench->cq);
	bench->mr = ibv_reg_mr(bench->pd, bench->memory, sizeof(bench->memory),
			       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	REQUIRE(bench->mr);
	bench->qp = make_qp(bench);
	bench->peer = make_qp(bench);
	bring_up(bench, bench->qp, bench->peer);
	bring_up(bench, bench->peer, bench->qp);
}

static void bench_close(struct bench *bench)
{
	(void)ibv_destroy_qp(bench->qp);
	(void)ibv_destroy_qp(bench->peer);
	(void)ibv_dereg_mr(bench->mr);
	(void)ibv_destroy_cq(bench->cq);
	(void)ibv_dealloc_pd(bench->pd);
	(void)ibv_close_device(bench->context);
}

static void post_bare(struct bench *bench, uint64_t first)
{
	struct ibv_send_wr wr[BATCH], *bad;
	struct ibv_sge sge = { (uintptr_t)bench->memory, BYTES, bench->mr->lkey };

	for (unsigned i = 0; i < BATCH; i++) {
		wr[i] = (struct ibv_send_wr){
			.wr_id = first + i,
			.next = i + 1 < BATCH ? &wr[i + 1] : NULL,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.send_flags = i + 1 < BATCH ? 0 : IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)bench->memory + 4096, bench->mr->rkey },
		};
	}
	REQUIRE(ibv_post_send(bench->qp, wr, &bad) == 0);
}

/* CPU seconds of this thread and of what the kernel does in its name. */
static double run_bare(struct bench *bench)
{
	double from = cpu_s();
	uint64_t posted = 0, completed = 0;

	while (completed < WRITES) {
		struct ibv_wc wc[16];
		int n;

		while (posted < WRITES && posted - completed + BATCH <= DEPTH) {
			post_bare(bench, posted + 1);
			posted += BATCH;
		}
		n = ibv_poll_cq(bench->cq, 16, wc);
		for (int i = 0; i < n; i++) {
			REQUIRE(wc[i].status == IBV_WC_SUCCESS);
			completed = wc[i].wr_id;
		}
	}
	return cpu_s() - from;
}

static void count(void *arg, void *user, int status)
{
	(void)user;
	REQUIRE(status == 0);
	++*(uint64_t *)arg;
}

static double run_qp(struct bench *bench, struct kvp_qp *qp)
{
	const struct kvp_qp_request request = {
		.opcode = IBV_WR_RDMA_WRITE,
		.n_sge = 1,
		.sge[0] = { (uintptr_t)bench->memory, BYTES, bench->mr->lkey },
		.remote = (uintptr_t)bench->memory + 4096,
		.rkey = bench->mr->rkey,
		.user = bench,
	};
	double from = cpu_s();
	uint64_t added = 0, told = 0;

	while (told < WRITES) {
		struct ibv_wc wc[16];
		int n;

		while (added < WRITES && kvp_qp_room(qp) >= BATCH) {
			for (unsigned i = 0; i < BATCH; i++)
				REQUIRE(kvp_qp_add(qp, &request) == 0);
			REQUIRE(kvp_qp_ring(qp) == 0);
			added += BATCH;
		}
		n = ibv_poll_cq(bench->cq, 16, wc);
		for (int i = 0; i < n; i++)
			REQUIRE(kvp_qp_complete(qp, &wc[i], count, &told));
	}
	return cpu_s() - from;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void compare(struct bench *bench)
{
	double bare[RUNS], ours[RUNS];
	struct kvp_qp qp;

	bench_open(bench);
	REQUIRE(kvp_qp_init(&qp, bench->qp, DEPTH, 1) == 0);
	(void)run_bare(bench);
	for (unsigned i = 0; i < RUNS; i++) {
		bare[i] = run_bare(bench);
		ours[i] = run_qp(bench, &qp);
	}
	qsort(bare, RUNS, sizeof(bare[0]), by_value);
	qsort(ours, RUNS, sizeof(ours[0]), by_value);
	printf("%u writes of %u bytes, lists of %u, medians of %u runs in alternation\n"
	       "  bare ibv_post_send  %9.0f writes/s of CPU time\n"
	       "  kvp_qp              %9.0f writes/s of CPU time\n"
	       "  ratio               %9.3f (budget 0.8)\n",
	       WRITES, BYTES, BATCH, RUNS, WRITES / bare[RUNS / 2], WRITES / ours[RUNS / 2],
	       bare[RUNS / 2] / ours[RUNS / 2]);
	kvp_qp_fini(&qp);
	bench_close(bench);
}

static void put_all(struct vp_node *a, struct vp_node *b, bool whole, uint64_t *seq)
{
	size_t bytes = whole ? SLOT : ROW;
	uint64_t want = a->told;

	for (size_t at = 0; at + bytes <= SLOT; at += bytes) {
		while (vp_put(a, b, *seq, 0, (uint32_t)at, bytes, whole) != 0)
			vp_idle(a, b, 1);
		++*seq;
		want++;
	}
	REQUIRE(vp_turn(a, b, &a->told, want, 60000) && vp_turn(a, b, &b->data, *seq, 60000));
}

/* A slot into a window of the peer, in runs of a page of 64 rows. */
static void write_all(struct vp_node *a, struct vp_node *b, uint64_t *seq)
{
	const struct kvp_net_span span = { .base = b->land, .bytes = SLOT, .dmabuf_fd = -1 };
	uint32_t most = kvp_net_verbs.write_max(a->net);
	struct kvp_net_region *region;
	struct kvp_net_window *window;
	struct kvp_net_key key;
	uint64_t want = a->told, heard = b->messages;
	char err[256];
	int r;

	REQUIRE(kvp_net_verbs.region_add(b->net, &span, &region, err, sizeof(err)) == 0);
	REQUIRE(kvp_net_verbs.window_open(b->net, region, &window) == 0);
	while ((r = kvp_net_verbs.window_key(b->net, window, &key)) == -EAGAIN)
		(void)kvp_net_verbs.progress(b->net);
	REQUIRE(r == 0);
	for (uint32_t at = 0; at + PAGE <= SLOT;) {
		const struct vp_hdr hdr = { .seq = *seq };
		struct kvp_net_run runs[KVP_NET_RUNS_MAX];
		struct kvp_net_write write = { runs, 0, &hdr, sizeof(hdr), a };

		for (; write.n < most && at + PAGE <= SLOT; at += PAGE)
			runs[write.n++] = (struct kvp_net_run){ &key, a->pack + at, at, PAGE };
		while ((r = kvp_net_verbs.write(a->net, a->ep, &write)) == -EAGAIN)
			vp_idle(a, b, 1);
		REQUIRE(r == 0);
		++*seq;
		want++;
		heard++;
	}
	REQUIRE(vp_turn(a, b, &a->told, want, 60000) && vp_turn(a, b, &b->messages, heard, 60000));
	while (kvp_net_verbs.window_close(b->net, window) == -EAGAIN)
		(void)kvp_net_verbs.progress(b->net);
	kvp_net_verbs.region_remove(b->net, region);
}

static void per_megabyte(const char *device)
{
	static const char *const names[] = {
		"landing, one slot",
		"rows of 576 bytes, raw",
		"direct, packed, pages",
	};
	struct kvp_net_verbs_config config;
	struct vp_node a, b;
	uint64_t seq = 0, requests, signaled, bells;
	char err[256];

	kvp_net_verbs_defaults(&config);
	config.devices = device;
	REQUIRE(vp_open(&a, &config, SLOT, err, sizeof(err)) == 0);
	REQUIRE(vp_open(&b, &config, SLOT, err, sizeof(err)) == 0);
	REQUIRE(vp_connect(&a, &b) == 0);
	printf("a megabyte                 requests  doorbells  completions at sender, receiver\n");
	for (int way = 0; way < 3; way++) {
		uint64_t got = b.messages;

		requests = a.ep->paths[0].conn->qp.writes;
		signaled = a.ep->paths[0].conn->qp.signaled;
		bells = a.ep->paths[0].conn->qp.doorbells;
		if (way < 2)
			put_all(&a, &b, way == 0, &seq);
		else
			write_all(&a, &b, &seq);
		printf("  %-24s %8lu  %9lu  %12lu %8lu\n", names[way],
		       a.ep->paths[0].conn->qp.writes - requests,
		       a.ep->paths[0].conn->qp.doorbells - bells,
		       a.ep->paths[0].conn->qp.signaled - signaled, b.messages - got);
	}
	REQUIRE(a.bad == 0 && b.bad == 0);
	vp_close(&a);
	vp_close(&b);
}

int main(int argc, char **argv)
{
	static struct bench bench;
	const struct kvp_nic_wish wish = {
		.devices = argc > 1 ? argv[1] : "",
		.exclude = "",
		.near = "",
		.rail_of = "",
		.gid_index = -1,
	};
	struct kvp_nic nics[KVP_NIC_MAX];
	char err[256];

	if (kvp_nic_list(nics, &wish, err, sizeof(err)) == 0 ||
	    kvp_nic_open(&nics[0], &bench.context, err, sizeof(err)) < 0) {
		printf("no verbs here: %s\n", err);
		return 77;
	}
	bench.nic = nics[0];
	printf("device %s, %s\n", bench.nic.device,
	       strncmp(bench.nic.device, "rxe", 3) == 0
		       ? "soft RoCE: ratios count, speeds say nothing"
		       : "hardware");
	compare(&bench);
	per_megabyte(bench.nic.device);
	return 0;
}
