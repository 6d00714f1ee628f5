/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_verbs.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/uio.h>
#include <unistd.h>

#include "proto/util.h"

#define GRH_BYTES 40u
#define MW_RKEYS 0x10000u /* rkeys of windows begin here */
#define N_MAX 1024u

struct fake_wr {
	struct ibv_send_wr wr;
	struct ibv_sge sge[4];
	uint64_t number;
	STAILQ_ENTRY(fake_wr) link;
};

struct fake_recv {
	struct ibv_recv_wr wr;
	struct ibv_sge sge[2];
	STAILQ_ENTRY(fake_recv) link;
};

struct fake_wc {
	struct ibv_wc wc;
	STAILQ_ENTRY(fake_wc) link;
};

struct fake_cq {
	struct ibv_cq cq;
	bool armed;
	STAILQ_HEAD(, fake_wc) wcs;
};

struct fake_qp {
	struct ibv_qp qp;
	bool loose; /* reaches nobody and succeeds */
	bool sig_all;
	uint32_t dest;
	STAILQ_HEAD(, fake_wr) sends;
	STAILQ_HEAD(, fake_recv) recvs;
};

struct fake_mr {
	struct ibv_mr mr;
	int access;
	uint8_t *bytes; /* where its addresses begin in this process */
	void *map;      /* of a dma-buf; its whole pages */
	size_t mapped;
};

struct fake_mw {
	struct ibv_mw mw;
	uint32_t rkey;      /* that the device knows; the low byte changes with each binding */
	struct fake_mr *mr; /* NULL: not bound */
	uint64_t addr, bytes;
};

struct kvp_fake kvp_fake;
static struct fake_qp *qps[N_MAX];
static uint32_t next_qp, next_mr; /* looked at first */
static struct fake_mr *mrs[N_MAX];
static struct fake_mw *mws[N_MAX];
static struct fake_cq *cqs[N_MAX];
static bool holding_writes;
static uint64_t binds_most = UINT64_MAX;
#define DEVICE(n)                                                                                \
	{                                                                                        \
		.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fake" #n, \
		.dev_name = "uverbs" #n, .ibdev_path = "/nonexistent/fake" #n,                   \
	}
static struct ibv_device devices[KVP_FAKE_DEVICES] = { DEVICE(0), DEVICE(1), DEVICE(2), DEVICE(3) };

/* One that was opened. */
struct fake_context {
	struct ibv_context context;
	struct ibv_async_event events[16];
	unsigned n_events;
	LIST_ENTRY(fake_context) link;
};
static LIST_HEAD(, fake_context) contexts = LIST_HEAD_INITIALIZER(contexts);

/* One for all. It may be taken again by who has it. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void unlockp(int *unused)
{
	(void)unused;
	(void)pthread_mutex_unlock(&lock); /* ours */
}

/* Until the end of the function. */
#define LOCKED()                                                     \
	KVP_CLEANUP(unlockp) int locked = pthread_mutex_lock(&lock); \
	assert(locked == 0)

/* Guards kvp_fake.stiff: nobody waits with the other. */
static pthread_mutex_t stiff_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t well = PTHREAD_COND_INITIALIZER;

void kvp_fake_stick(unsigned device, bool stiff)
{
	(void)pthread_mutex_lock(&stiff_lock);
	kvp_fake.stiff[device] = stiff;
	(void)pthread_cond_broadcast(&well);
	(void)pthread_mutex_unlock(&stiff_lock);
}

static void wait_while_stiff(const struct ibv_context *context)
{
	(void)pthread_mutex_lock(&stiff_lock);
	while (kvp_fake.stiff[context->device - devices])
		(void)pthread_cond_wait(&well, &stiff_lock);
	(void)pthread_mutex_unlock(&stiff_lock);
}

void kvp_fake_reset(void)
{
	holding_writes = false;
	binds_most = UINT64_MAX;
	kvp_fake = (struct kvp_fake){
		.n_devices = 1,
		.port_state = IBV_PORT_ACTIVE,
		.max_cqe = 32767,
		.n_qps = kvp_fake.n_qps,
		.n_mrs = kvp_fake.n_mrs,
		.n_ahs = kvp_fake.n_ahs,
		.n_cqs = kvp_fake.n_cqs,
		.n_pds = kvp_fake.n_pds,
		.n_contexts = kvp_fake.n_contexts,
		.n_mws = kvp_fake.n_mws,
	};
}

static struct fake_qp *fake_of(struct ibv_qp *qp)
{
	return KVP_CONTAINER_OF(qp, struct fake_qp, qp);
}

static void wake(int fd)
{
	uint64_t one = 1;

	assert(write(fd, &one, sizeof(one)) == sizeof(one));
}

static void tell(struct fake_cq *cq)
{
	if (!cq->armed || !cq->cq.channel)
		return;
	cq->armed = false;
	wake(cq->cq.channel->fd);
}

static void complete(struct ibv_cq *ibv, const struct ibv_wc *wc)
{
	struct fake_cq *cq = KVP_CONTAINER_OF(ibv, struct fake_cq, cq);
	struct fake_wc *entry = calloc(1, sizeof(*entry));

	assert(entry);
	entry->wc = *wc;
	STAILQ_INSERT_TAIL(&cq->wcs, entry, link);
	tell(cq);
}

/* ---- running requests */

static bool device_has(const struct ibv_qp *qp, const bool flags[KVP_FAKE_DEVICES])
{
	return flags[qp->context->device - devices];
}

static void flush_receives(struct fake_qp *qp)
{
	struct fake_recv *recv;

	while (!device_has(&qp->qp, kvp_fake.silent) && (recv = STAILQ_FIRST(&qp->recvs))) {
		struct ibv_wc wc = {
			.wr_id = recv->wr.wr_id,
			.status = IBV_WC_WR_FLUSH_ERR,
			.qp_num = qp->qp.qp_num,
		};

		STAILQ_REMOVE_HEAD(&qp->recvs, link);
		free(recv);
		complete(qp->qp.recv_cq, &wc);
	}
}

static void lose(struct fake_qp *qp)
{
	qp->qp.state = IBV_QPS_ERR;
	flush_receives(qp);
}

static bool within(uint64_t addr, uint64_t bytes, uint64_t base, uint64_t length)
{
	return addr >= base && bytes <= length && addr - base <= length - bytes;
}

/* Where a write goes; NULL: nowhere. The key must be one of the device that is written through. */
static uint8_t *place_of(const struct ibv_qp *to, uint32_t rkey, uint64_t addr, uint64_t bytes)
{
	struct fake_mr *mr = rkey > 0 && rkey <= N_MAX ? mrs[rkey - 1] : NULL;
	struct fake_mw *mw = NULL;

	if (rkey >= MW_RKEYS && (rkey - MW_RKEYS) >> 8 < N_MAX)
		mw = mws[(rkey - MW_RKEYS) >> 8];
	if (mr && !(mr->access & IBV_ACCESS_REMOTE_WRITE))
		mr = NULL;
	if (mw && mw->rkey == rkey && mw->mr && within(addr, bytes, mw->addr, mw->bytes))
		mr = mw->mr;
	if (!mr || mr->mr.context != to->context ||
	    !within(addr, bytes, (uintptr_t)mr->mr.addr, mr->mr.length)) {
		kvp_fake.n_refused++;
		return NULL;
	}
	kvp_fake.n_writes++;
	return mr->bytes + (addr - (uintptr_t)mr->mr.addr);
}

/* The processor may not touch what a dma-buf is of, only the device. */
static const uint8_t *source_of(const struct ibv_send_wr *wr, const struct ibv_sge *sge)
{
	const struct fake_mr *mr = sge->lkey > 0 && sge->lkey <= N_MAX ? mrs[sge->lkey - 1] : NULL;

	if (!(wr->send_flags & IBV_SEND_INLINE) && mr && mr->map &&
	    within(sge->addr, sge->length, (uintptr_t)mr->mr.addr, mr->mr.length))
		return mr->bytes + (sge->addr - (uintptr_t)mr->mr.addr);
	return (const uint8_t *)(uintptr_t)sge->addr;
}

static void gather(const struct ibv_send_wr *wr, uint8_t *out)
{
	for (int i = 0; i < wr->num_sge; i++) {
		memcpy(out, source_of(wr, &wr->sg_list[i]), wr->sg_list[i].length);
		out += wr->sg_list[i].length;
	}
}

static uint64_t bytes_of(const struct ibv_send_wr *wr)
{
	uint64_t bytes = 0;

	for (int i = 0; i < wr->num_sge; i++)
		bytes += wr->sg_list[i].length;
	return bytes;
}

static void receive(struct fake_qp *to, struct fake_recv *recv, const struct ibv_wc *wc)
{
	struct ibv_wc mine = *wc;

	mine.wr_id = recv->wr.wr_id;
	mine.qp_num = to->qp.qp_num;
	STAILQ_REMOVE_HEAD(&to->recvs, link);
	free(recv);
	if (!device_has(&to->qp, kvp_fake.deaf) || to->qp.qp_type == IBV_QPT_UD)
		complete(to->qp.recv_cq, &mine);
}

static enum ibv_wc_status run_write(struct fake_qp *to, const struct ibv_send_wr *wr)
{
	struct fake_recv *recv = STAILQ_FIRST(&to->recvs);
	bool imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct ibv_wc wc = {
		.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
		.wc_flags = IBV_WC_WITH_IMM,
		.imm_data = wr->imm_data,
		.byte_len = (uint32_t)bytes_of(wr),
	};
	uint8_t *place;

	if (imm && !recv)
		return IBV_WC_RNR_RETRY_EXC_ERR;
	place = wc.byte_len > 0
			? place_of(&to->qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wc.byte_len)
			: NULL;
	if (wc.byte_len > 0 && !place) {
		lose(to);
		return IBV_WC_REM_ACCESS_ERR;
	}
	if (place)
		gather(wr, place);
	if (imm)
		receive(to, recv, &wc);
	return IBV_WC_SUCCESS;
}

static enum ibv_wc_status run_send(struct fake_qp *to, const struct ibv_send_wr *wr, uint32_t from)
{
	struct fake_recv *recv = STAILQ_FIRST(&to->recvs);
	bool datagram = to->qp.qp_type == IBV_QPT_UD;
	uint32_t skip = datagram ? GRH_BYTES : 0;
	struct ibv_wc wc = {
		.opcode = IBV_WC_RECV,
		.byte_len = (uint32_t)bytes_of(wr) + skip,
		.src_qp = from,
	};

	if (!recv)
		return datagram ? IBV_WC_SUCCESS : IBV_WC_RNR_RETRY_EXC_ERR;
	if (recv->wr.num_sge < 1 || recv->sge[0].length < wc.byte_len) {
		lose(to);
		return IBV_WC_REM_INV_REQ_ERR;
	}
	gather(wr, (uint8_t *)(uintptr_t)recv->sge[0].addr + skip);
	receive(to, recv, &wc);
	return IBV_WC_SUCCESS;
}

static bool cut(const struct ibv_qp *qp)
{
	return qp && (device_has(qp, kvp_fake.cut) || device_has(qp, kvp_fake.down));
}

static enum ibv_wc_status run_bind(const struct ibv_send_wr *wr)
{
	struct fake_mw *mw = KVP_CONTAINER_OF(wr->bind_mw.mw, struct fake_mw, mw);
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;
	struct fake_mr *mr = info->mr ? KVP_CONTAINER_OF(info->mr, struct fake_mr, mr) : NULL;

	if (kvp_fake.fail_binding ||
	    (info->length > 0 &&
	     (!mr || !(mr->access & IBV_ACCESS_MW_BIND) ||
	      !within(info->addr, info->length, (uintptr_t)mr->mr.addr, mr->mr.length))))
		return IBV_WC_MW_BIND_ERR;

	kvp_fake.n_binds++;
	mw->rkey = wr->bind_mw.rkey;
	mw->mr = info->length > 0 ? mr : NULL;
	mw->addr = info->addr;
	mw->bytes = info->length;
	return IBV_WC_SUCCESS;
}

static enum ibv_wc_status run(struct fake_qp *qp, const struct fake_wr *send)
{
	bool datagram = qp->qp.qp_type == IBV_QPT_UD;
	struct ibv_qp *to = kvp_fake_qp(datagram ? send->wr.wr.ud.remote_qpn : qp->dest);

	if (qp->qp.state == IBV_QPS_ERR)
		return IBV_WC_WR_FLUSH_ERR;
	if ((send->number == kvp_fake.fail_at && !kvp_fake.fail_late) ||
	    (kvp_fake.fail_writes && send->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM))
		return kvp_fake.fail_status;
	if (send->wr.opcode == IBV_WR_BIND_MW)
		return run_bind(&send->wr);
	if (qp->loose || (datagram && (kvp_fake.drop_datagrams || !to || cut(to) || cut(&qp->qp))))
		return IBV_WC_SUCCESS;
	if (!to || cut(to) || cut(&qp->qp) || to->state == IBV_QPS_ERR || to->state < IBV_QPS_RTR)
		return IBV_WC_RETRY_EXC_ERR;
	if (send->wr.opcode == IBV_WR_SEND)
		return run_send(fake_of(to), &send->wr, qp->qp.qp_num);
	return run_write(fake_of(to), &send->wr);
}

/* With the queue pair in the error state nothing waits. */
static bool is_held_write(const struct fake_qp *qp, const struct fake_wr *send)
{
	return holding_writes && qp->qp.state != IBV_QPS_ERR && bytes_of(&send->wr) > 0 &&
	       (send->wr.opcode == IBV_WR_RDMA_WRITE ||
		send->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
}

static bool is_held(const struct fake_qp *qp, const struct fake_wr *send)
{
	if (send->wr.opcode == IBV_WR_BIND_MW)
		return kvp_fake.n_binds >= binds_most && qp->qp.state != IBV_QPS_ERR;
	return is_held_write(qp, send);
}

bool kvp_fake_step(struct ibv_qp *ibv)
{
	LOCKED();
	struct fake_qp *qp = fake_of(ibv);
	struct fake_wr *send = STAILQ_FIRST(&qp->sends);
	struct ibv_wc wc = { .qp_num = ibv->qp_num };

	if (!send || is_held(qp, send) ||
	    (ibv->state == IBV_QPS_ERR && device_has(ibv, kvp_fake.silent)) ||
	    (ibv->state != IBV_QPS_ERR && ibv->qp_type == IBV_QPT_RC &&
	     device_has(ibv, kvp_fake.stuck)))
		return false;

	STAILQ_REMOVE_HEAD(&qp->sends, link);
	wc.wr_id = send->wr.wr_id;
	wc.status = run(qp, send);
	if (send->number == kvp_fake.fail_at && wc.status == IBV_WC_SUCCESS)
		wc.status = kvp_fake.fail_status;
	if (wc.status != IBV_WC_SUCCESS)
		lose(qp);
	if (wc.status != IBV_WC_SUCCESS || qp->sig_all || send->wr.send_flags & IBV_SEND_SIGNALED)
		complete(ibv->send_cq, &wc);
	free(send);
	return true;
}

/* ---- the table of the context */

static int post_send(struct ibv_qp *ibv, struct ibv_send_wr *list, struct ibv_send_wr **bad)
{
	LOCKED();
	struct fake_qp *qp = fake_of(ibv);

	kvp_fake.n_doorbells++;
	for (struct ibv_send_wr *wr = list; wr; wr = wr->next) {
		struct fake_wr *send;

		if (kvp_fake.n_posted + 1 == kvp_fake.refuse_at) {
			kvp_fake.refuse_at = 0; /* once */
			*bad = wr;
			return kvp_fake.refuse_errno;
		}
		send = calloc(1, sizeof(*send));
		assert(send && wr->num_sge <= 4);
		send->wr = *wr;
		send->number = ++kvp_fake.n_posted;
		if (wr->num_sge > 0)
			memcpy(send->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(send->sge[0]));
		send->wr.sg_list = send->sge;
		STAILQ_INSERT_TAIL(&qp->sends, send, link);
	}
	while (!kvp_fake.hold && kvp_fake_step(ibv))
		;
	return 0;
}

static int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *list, struct ibv_recv_wr **bad)
{
	LOCKED();
	struct fake_qp *qp = fake_of(ibv);

	(void)bad;
	kvp_fake.n_recv_doorbells++;
	for (struct ibv_recv_wr *wr = list; wr; wr = wr->next) {
		struct fake_recv *recv = calloc(1, sizeof(*recv));

		assert(recv && wr->num_sge <= 2);
		recv->wr = *wr;
		if (wr->num_sge > 0)
			memcpy(recv->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(recv->sge[0]));
		recv->wr.sg_list = recv->sge;
		STAILQ_INSERT_TAIL(&qp->recvs, recv, link);
	}
	if (ibv->state == IBV_QPS_ERR)
		flush_receives(qp);
	return 0;
}

static int poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *out)
{
	LOCKED();
	struct fake_cq *cq = KVP_CONTAINER_OF(ibv, struct fake_cq, cq);
	struct fake_wc *entry;
	int i = 0;

	while (i < n && (entry = STAILQ_FIRST(&cq->wcs))) {
		STAILQ_REMOVE_HEAD(&cq->wcs, link);
		out[i++] = entry->wc;
		free(entry);
	}
	return i;
}

static int req_notify(struct ibv_cq *ibv, int solicited_only)
{
	LOCKED();
	(void)solicited_only;
	KVP_CONTAINER_OF(ibv, struct fake_cq, cq)->armed = true;
	return 0;
}

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	LOCKED();
	struct fake_mw *mw = calloc(1, sizeof(*mw));
	uint32_t i = 0;

	assert(mw);
	while (i < N_MAX && mws[i])
		i++;
	assert(i < N_MAX);
	mws[i] = mw;
	mw->mw = (struct ibv_mw){ .context = pd->context, .pd = pd, .type = type };
	mw->mw.rkey = mw->rkey = MW_RKEYS + (i << 8);
	kvp_fake.n_mws++;
	return &mw->mw;
}

static int dealloc_mw(struct ibv_mw *ibv)
{
	LOCKED();
	struct fake_mw *mw = KVP_CONTAINER_OF(ibv, struct fake_mw, mw);

	mws[(mw->rkey - MW_RKEYS) >> 8] = NULL;
	free(mw);
	kvp_fake.n_mws--;
	return 0;
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_send_wr *bad;
	struct ibv_send_wr wr = {
		.wr_id = bind->wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = bind->send_flags,
		.bind_mw = { mw, ibv_inc_rkey(mw->rkey), bind->bind_info },
	};
	int r = post_send(qp, &wr, &bad);

	if (r == 0)
		mw->rkey = wr.bind_mw.rkey;
	return r;
}

/* ---- the functions of the library */

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = calloc(KVP_FAKE_DEVICES + 1, sizeof(struct ibv_device *));

	assert(list);
	for (unsigned i = 0; i < kvp_fake.n_devices; i++)
		list[i] = &devices[i];
	if (n)
		*n = (int)kvp_fake.n_devices;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *dev)
{
	return dev->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *dev)
{
	LOCKED();
	struct fake_context *fake = calloc(1, sizeof(*fake));
	struct ibv_context *context = fake ? &fake->context : NULL;

	assert(context);
	context->device = dev;
	context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	context->cmd_fd = -1;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify;
	context->ops.alloc_mw = alloc_mw;
	context->ops.dealloc_mw = dealloc_mw;
	context->ops.bind_mw = bind_mw;
	LIST_INSERT_HEAD(&contexts, fake, link);
	kvp_fake.n_contexts++;
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	LOCKED();
	struct fake_context *fake = KVP_CONTAINER_OF(context, struct fake_context, context);

	LIST_REMOVE(fake, link);
	(void)close(context->async_fd);
	free(fake);
	kvp_fake.n_contexts--;
	return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	(void)context;
	*attr = (struct ibv_device_attr){
		.max_qp = 128,
		.max_qp_wr = 4096,
		.max_sge = 4,
		.max_cqe = kvp_fake.max_cqe,
		.max_mr_size = UINT64_C(1) << 40,
		.phys_port_cnt = 1,
		.device_cap_flags = kvp_fake.no_windows ? 0 : IBV_DEVICE_MEM_WINDOW,
		.max_mw = kvp_fake.no_windows ? 0 : (int)N_MAX,
	};
	return 0;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out)
{
	struct ibv_port_attr attr = {
		.state = kvp_fake.down[context->device - devices] ? IBV_PORT_DOWN
								  : kvp_fake.port_state,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = IBV_MTU_4096,
		.gid_tbl_len = 4,
		.max_msg_sz = 8u << 20,
		.pkey_tbl_len = 1,
		.link_layer = IBV_LINK_LAYER_ETHERNET,
	};

	if (port != 1)
		return EINVAL;
	memcpy(out, &attr, offsetof(struct ibv_port_attr, port_cap_flags2));
	return 0;
}

/* 0: link-local; 1: RoCE v1; 2, unless no_gid: RoCE v2 of 10.0.0.1 (10.0.1.1 on fake1, ...); 3:
 * unused. */
int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t idx,
		      struct ibv_gid_entry *entry, uint32_t flags, size_t entry_bytes)
{
	static const uint8_t v4[16] = { [10] = 0xff, [11] = 0xff, [12] = 10, [15] = 1 };

	(void)flags;
	assert(entry_bytes == sizeof(*entry));
	if (port != 1 || idx > 2 || (idx == 2 && kvp_fake.no_gid[context->device - devices]))
		return ENODATA;
	memset(entry, 0, sizeof(*entry));
	entry->gid_index = idx;
	entry->port_num = 1;
	entry->gid_type = idx == 1 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
	memcpy(entry->gid.raw, v4, sizeof(v4));
	entry->gid.raw[14] = (uint8_t)(context->device - devices);
	if (idx == 0)
		entry->gid = (union ibv_gid){ .raw = { 0xfe, 0x80, [15] = 1 } };
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	LOCKED();
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	assert(pd);
	pd->context = context;
	kvp_fake.n_pds++;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	LOCKED();
	free(pd);
	kvp_fake.n_pds--;
	return 0;
}

static bool can_read(const void *at)
{
	char byte;
	struct iovec to = { &byte, 1 }, from = { (void *)(uintptr_t)at, 1 };

	return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1;
}

static struct ibv_mr *add_mr(struct ibv_pd *pd, const struct fake_mr *given)
{
	LOCKED();
	struct fake_mr *mr;
	uint32_t i = kvp_fake.same_keys ? 0 : next_mr, tried = 0;

	errno = kvp_fake.refuse_mr;
	if (!errno && kvp_fake.refuse_device_mr && !can_read(given->bytes))
		errno = kvp_fake.refuse_device_mr;
	if (errno)
		return NULL;
	mr = calloc(1, sizeof(*mr));
	assert(mr);
	for (; tried < N_MAX && mrs[i]; tried++)
		i = (i + 1) % N_MAX;
	assert(tried < N_MAX);
	next_mr = (i + 1) % N_MAX;
	mrs[i] = mr;
	*mr = *given;
	mr->mr.context = pd->context;
	mr->mr.pd = pd;
	mr->mr.lkey = i + 1;
	mr->mr.rkey = i + 1;
	kvp_fake.n_mrs++;
	return &mr->mr;
}

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	const struct fake_mr mr = {
		.mr = { .addr = addr, .length = length },
		.access = access,
		.bytes = addr,
	};

	return add_mr(pd, &mr);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				unsigned access)
{
	(void)iova;
	return ibv_reg_mr(pd, addr, length, (int)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
				 int fd, int access)
{
	struct fake_mr mr = {
		.mr = { .addr = (void *)(uintptr_t)iova, .length = length },
		.access = access,
	};
	size_t in_page = offset % 4096;

	assert(fd >= 0);
	assert(in_page == iova % 4096); /* or the kernel refuses it */
	errno = kvp_fake.refuse_dmabuf;
	if (errno)
		return NULL;
	kvp_fake.n_dmabufs++;
	/* What can be mapped is written to; else addresses are taken for this process's. */
	mr.mapped = length + in_page;
	mr.map = mmap(NULL, mr.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		      (off_t)(offset - in_page));
	if (mr.map == MAP_FAILED)
		return ibv_reg_mr(pd, (void *)(uintptr_t)iova, length, access);
	mr.bytes = (uint8_t *)mr.map + in_page;
	return add_mr(pd, &mr);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	LOCKED();
	struct fake_mr *fake = KVP_CONTAINER_OF(mr, struct fake_mr, mr);

	for (uint32_t i = 0; i < N_MAX; i++)
		assert(!mws[i] || mws[i]->mr != fake);
	mrs[mr->lkey - 1] = NULL;
	if (fake->mapped)
		(void)munmap(fake->map, fake->mapped);
	free(fake);
	kvp_fake.n_mrs--;
	return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));

	assert(channel);
	channel->context = context;
	channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	(void)close(channel->fd);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
			     struct ibv_comp_channel *channel, int comp_vector)
{
	LOCKED();
	struct fake_cq *cq = calloc(1, sizeof(*cq));
	uint32_t i = 0;

	(void)comp_vector;
	assert(cq);
	STAILQ_INIT(&cq->wcs);
	cq->cq.context = context;
	cq->cq.channel = channel;
	cq->cq.cq_context = cq_context;
	cq->cq.cqe = cqe;
	while (i < N_MAX && cqs[i])
		i++;
	assert(i < N_MAX);
	cqs[i] = cq;
	kvp_fake.n_cqs++;
	return &cq->cq;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
	LOCKED();
	struct fake_cq *cq = KVP_CONTAINER_OF(ibv, struct fake_cq, cq);
	struct ibv_wc wc;

	while (poll_cq(ibv, 1, &wc) > 0)
		;
	for (uint32_t i = 0; i < N_MAX; i++)
		if (cqs[i] == cq)
			cqs[i] = NULL;
	free(cq);
	kvp_fake.n_cqs--;
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	uint64_t n;

	*cq = NULL;
	*cq_context = NULL;
	return read(channel->fd, &n, sizeof(n)) == sizeof(n) ? 0 : -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	(void)cq;
	(void)n;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	LOCKED();
	struct fake_qp *qp = calloc(1, sizeof(*qp));
	uint32_t i = next_qp, tried = 0;

	assert(qp);
	for (; tried < N_MAX && qps[i]; tried++)
		i = (i + 1) % N_MAX;
	assert(tried < N_MAX);
	next_qp = (i + 1) %
		  N_MAX; /* as devices do: a number that peers still know is not used soon */
	qps[i] = qp;
	STAILQ_INIT(&qp->sends);
	STAILQ_INIT(&qp->recvs);
	qp->qp.context = pd->context;
	qp->qp.pd = pd;
	qp->qp.send_cq = attr->send_cq;
	qp->qp.recv_cq = attr->recv_cq;
	qp->qp.qp_num = i + 1;
	qp->qp.qp_type = attr->qp_type;
	qp->sig_all = attr->sq_sig_all;
	kvp_fake.n_qps++;
	return &qp->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_AV)
		wait_while_stiff(qp->context);
	LOCKED();
	if (kvp_fake.refuse_modify)
		return EINVAL;

	if (mask & IBV_QP_DEST_QPN)
		fake_of(qp)->dest = attr->dest_qp_num;
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	if (qp->state != IBV_QPS_ERR)
		return 0;

	flush_receives(fake_of(qp));
	while (!kvp_fake.hold && kvp_fake_step(qp))
		;
	return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
		 struct ibv_qp_init_attr *init)
{
	(void)mask;
	(void)init;
	attr->qp_state = qp->state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
	wait_while_stiff(ibv->context);
	LOCKED();
	struct fake_qp *qp = fake_of(ibv);
	struct fake_wr *send;
	struct fake_recv *recv;

	while ((send = STAILQ_FIRST(&qp->sends))) {
		STAILQ_REMOVE_HEAD(&qp->sends, link);
		free(send);
	}
	while ((recv = STAILQ_FIRST(&qp->recvs))) {
		STAILQ_REMOVE_HEAD(&qp->recvs, link);
		free(recv);
	}
	qps[ibv->qp_num - 1] = NULL;
	free(qp);
	kvp_fake.n_qps--;
	return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	wait_while_stiff(pd->context);
	LOCKED();
	struct ibv_ah *ah;

	(void)attr;
	if (kvp_fake.no_way[pd->context->device - devices]) {
		errno = ENETUNREACH;
		return NULL;
	}
	ah = calloc(1, sizeof(*ah));
	assert(ah);
	ah->context = pd->context;
	ah->pd = pd;
	kvp_fake.n_ahs++;
	return ah;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
	LOCKED();
	free(ah);
	kvp_fake.n_ahs--;
	return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	LOCKED();
	struct fake_context *fake = KVP_CONTAINER_OF(context, struct fake_context, context);
	uint64_t n;

	if (fake->n_events == 0 || read(context->async_fd, &n, sizeof(n)) != sizeof(n)) {
		errno = EAGAIN;
		return -1;
	}
	*event = fake->events[0];
	memmove(fake->events, fake->events + 1, --fake->n_events * sizeof(fake->events[0]));
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

/* ---- for tests */

void kvp_fake_event(unsigned dev, enum ibv_event_type type, struct ibv_qp *qp)
{
	struct fake_context *fake;

	LIST_FOREACH(fake, &contexts, link)
	{
		struct ibv_async_event *event = &fake->events[fake->n_events];

		if (fake->context.device != &devices[dev])
			continue;
		assert(++fake->n_events <= KVP_ARRAY_SIZE(fake->events));
		event->event_type = type;
		if (qp)
			event->element.qp = qp;
		else
			event->element.port_num = 1;
		wake(fake->context.async_fd);
	}
}

static bool step_any(void)
{
	bool any = false;

	for (uint32_t i = 0; i < N_MAX; i++)
		while (qps[i] && kvp_fake_step(&qps[i]->qp))
			any = true;
	return any;
}

void kvp_fake_hold_writes(bool on)
{
	LOCKED();

	holding_writes = on;
	while (!on && step_any())
		;
}

void kvp_fake_hold_binds(uint64_t after)
{
	LOCKED();

	binds_most = after;
	while (after == UINT64_MAX && step_any())
		;
}

void kvp_fake_stray_events(void)
{
	LOCKED();

	for (uint32_t i = 0; i < N_MAX; i++)
		if (cqs[i])
			tell(cqs[i]);
}

uint32_t kvp_fake_held(void)
{
	LOCKED();
	uint32_t n = 0;

	for (uint32_t i = 0; i < N_MAX; i++) {
		const struct fake_wr *send;

		if (!qps[i])
			continue;
		STAILQ_FOREACH (send, &qps[i]->sends, link)
			n += is_held_write(qps[i], send);
	}
	return n;
}

struct kvp_fake kvp_fake_look(void)
{
	LOCKED();

	return kvp_fake;
}

struct ibv_qp *kvp_fake_qp(uint32_t number)
{
	return number > 0 && number <= N_MAX && qps[number - 1] ? &qps[number - 1]->qp : NULL;
}

void kvp_fake_rig_open(struct kvp_fake_rig *rig, unsigned depth)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC };

	kvp_fake_reset();
	rig->context = ibv_open_device(&devices[0]);
	rig->pd = ibv_alloc_pd(rig->context);
	rig->cq = ibv_create_cq(rig->context, (int)depth + 1, NULL, NULL, 0);
	attr.send_cq = rig->cq;
	attr.recv_cq = rig->cq;
	rig->qp = ibv_create_qp(rig->pd, &attr);
	rig->qp->state = IBV_QPS_RTS;
	fake_of(rig->qp)->loose = true;
}

void kvp_fake_rig_close(struct kvp_fake_rig *rig)
{
	if (rig->qp)
		(void)ibv_destroy_qp(rig->qp);
	(void)ibv_destroy_cq(rig->cq);
	(void)ibv_dealloc_pd(rig->pd);
	(void)ibv_close_device(rig->context);
}
