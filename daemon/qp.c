/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/qp.h"

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int kvp_qp_errno(enum ibv_wc_status status)
{
	switch (status) {
	case IBV_WC_SUCCESS:
		return 0;
	case IBV_WC_WR_FLUSH_ERR:
		return -ECANCELED;
	case IBV_WC_RETRY_EXC_ERR:
	case IBV_WC_RESP_TIMEOUT_ERR:
		return -ETIMEDOUT; /* the peer or the way to it is gone */
	case IBV_WC_RNR_RETRY_EXC_ERR:
		return -ENOBUFS; /* the peer has posted no receive */
	case IBV_WC_REM_ACCESS_ERR:
	case IBV_WC_LOC_ACCESS_ERR:
		return -EACCES;
	case IBV_WC_LOC_PROT_ERR:
	case IBV_WC_MW_BIND_ERR:
		return -EFAULT;
	case IBV_WC_LOC_LEN_ERR:
		return -EMSGSIZE;
	default: /* with IBV_WC_REM_INV_REQ_ERR, which soft RoCE says of good requests, too, where
		  * packets were lost */
		return -EREMOTEIO;
	}
}

int kvp_qp_init(struct kvp_qp *qp, struct ibv_qp *ibv, unsigned depth, uint32_t tag)
{
	assert(depth > 0 && tag <= KVP_QP_TAG_MAX);
	memset(qp, 0, sizeof(*qp));
	qp->users = calloc(depth + 1, sizeof(*qp->users));
	if (!qp->users)
		return -ENOMEM;

	qp->qp = ibv;
	qp->depth = depth;
	qp->tag = (uint64_t)tag << KVP_QP_TAG_SHIFT;
	return 0;
}

void kvp_qp_fini(struct kvp_qp *qp)
{
	free(qp->users);
	memset(qp, 0, sizeof(*qp));
}

unsigned kvp_qp_room(const struct kvp_qp *qp)
{
	if (qp->state != KVP_QP_OPEN)
		return 0;
	return qp->depth - (unsigned)(qp->posted - qp->completed) - qp->n_batch;
}

static void **user_of(struct kvp_qp *qp, uint64_t seq)
{
	return &qp->users[seq % (qp->depth + 1)];
}

int kvp_qp_add(struct kvp_qp *qp, const struct kvp_qp_request *request)
{
	unsigned i;
	int r;

	if (qp->state != KVP_QP_OPEN)
		return qp->status;
	if (kvp_qp_room(qp) == 0)
		return -EAGAIN;
	if (qp->n_batch == KVP_QP_BATCH_MAX) {
		r = kvp_qp_ring(qp);
		if (r < 0)
			return r;
	}

	i = qp->n_batch++;
	memcpy(qp->sge[i], request->sge, sizeof(qp->sge[i]));
	qp->batch[i] = (struct ibv_send_wr){
		.wr_id = qp->tag | ((qp->posted + qp->n_batch) & KVP_QP_SEQ_MASK),
		.sg_list = qp->sge[i],
		.num_sge = (int)request->n_sge,
		.opcode = request->opcode,
		.send_flags = request->flags,
		.imm_data = htobe32(request->imm),
		.wr.rdma = { .remote_addr = request->remote, .rkey = request->rkey },
	};
	*user_of(qp, qp->posted + qp->n_batch) = request->user;
	return 0;
}

int kvp_qp_ring(struct kvp_qp *qp)
{
	struct ibv_send_wr *bad = NULL;
	int err;

	if (qp->n_batch == 0 || qp->state != KVP_QP_OPEN)
		return 0;

	for (unsigned i = 0; i + 1 < qp->n_batch; i++)
		qp->batch[i].next = &qp->batch[i + 1];
	qp->batch[qp->n_batch - 1].next = NULL;
	qp->batch[qp->n_batch - 1].send_flags |= IBV_SEND_SIGNALED;
	err = ibv_post_send(qp->qp, qp->batch, &bad);
	if (err) {
		/* Credits leave no harmless reason, and what the device took of the batch may end
		 * without a word: only a drain tells when. */
		kvp_qp_fail(qp, err > 0 ? -err : err);
		return qp->status;
	}

	qp->doorbells++;
	qp->signaled++;
	qp->writes += qp->n_batch;
	qp->posted += qp->n_batch;
	qp->n_batch = 0;
	return 0;
}

/* A request without data or effect: in the error state it is flushed, after all before it. */
static int post_marker(struct kvp_qp *qp)
{
	struct ibv_send_wr *bad = NULL;
	struct ibv_send_wr wr = {
		.wr_id = qp->tag | ((qp->posted + 1) & KVP_QP_SEQ_MASK),
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
	};

	return ibv_post_send(qp->qp, &wr, &bad);
}

void kvp_qp_fail(struct kvp_qp *qp, int status)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	if (qp->state != KVP_QP_OPEN)
		return;

	qp->state = KVP_QP_FAILED;
	qp->status = status;
	/* What was not posted counts as posted: the marker behind it tells its users. */
	qp->posted += qp->n_batch;
	qp->n_batch = 0;
	/* If the device refuses either, nothing flushes, and the owner's deadline destroys. */
	if (ibv_modify_qp(qp->qp, &attr, IBV_QP_STATE) != 0 || qp->all_signaled ||
	    post_marker(qp) != 0)
		return;
	qp->posted++;
	*user_of(qp, qp->posted) = NULL;
}

/* All up to `seq` are over: tells their users. */
static void retire(struct kvp_qp *qp, uint64_t seq, int status, kvp_qp_done_fn *done, void *arg)
{
	while (qp->completed < seq) {
		void **slot = user_of(qp, ++qp->completed);
		void *user = *slot;

		*slot = NULL;
		if (user)
			done(arg, user, status);
	}
}

bool kvp_qp_complete(struct kvp_qp *qp, const struct ibv_wc *wc, kvp_qp_done_fn *done, void *arg)
{
	uint64_t ahead = (wc->wr_id - qp->completed) & KVP_QP_SEQ_MASK;
	uint64_t seq = qp->completed + ahead;
	int status = kvp_qp_errno(wc->status);

	if (ahead == 0 || seq > qp->posted)
		return false;

	if (wc->status == IBV_WC_SUCCESS) {
		retire(qp, seq, 0, done, arg);
	} else if (qp->state == KVP_QP_OPEN) {
		/* The first that failed: those before it did not, or they would have told. */
		retire(qp, seq - 1, 0, done, arg);
		qp->reason = wc->status;
		kvp_qp_fail(qp, status);
		retire(qp, seq, status, done, arg);
	} else {
		/* Those that did not tell either ended well or were never posted. Who must be sure
		 * that they arrived asks the peer. */
		retire(qp, seq, status, done, arg);
	}
	if (qp->state == KVP_QP_FAILED && qp->completed == qp->posted)
		qp->state = KVP_QP_DRAINED;
	return true;
}

void kvp_qp_abandon(struct kvp_qp *qp, kvp_qp_done_fn *done, void *arg)
{
	qp->posted += qp->n_batch;
	qp->n_batch = 0;
	if (qp->state == KVP_QP_OPEN)
		qp->status = -ECANCELED;
	retire(qp, qp->posted, qp->status, done, arg);
	qp->state = KVP_QP_DRAINED;
}

void kvp_rq_init(struct kvp_rq *rq, struct ibv_qp *ibv, uint32_t tag, const struct ibv_mr *mr,
		 void *base, uint32_t buffer_bytes)
{
	memset(rq, 0, sizeof(*rq));
	rq->qp = ibv;
	rq->tag = (uint64_t)tag << KVP_QP_TAG_SHIFT | KVP_QP_RECV_BIT;
	rq->base = (uintptr_t)base;
	rq->lkey = mr->lkey;
	rq->buffer_bytes = buffer_bytes;
}

int kvp_rq_give(struct kvp_rq *rq, uint32_t idx)
{
	unsigned i;
	int r = rq->n_batch == KVP_QP_BATCH_MAX ? kvp_rq_ring(rq) : 0;

	if (r < 0)
		return r;

	i = rq->n_batch++;
	rq->sge[i] = (struct ibv_sge){
		.addr = rq->base + (uint64_t)idx * rq->buffer_bytes,
		.length = rq->buffer_bytes,
		.lkey = rq->lkey,
	};
	rq->batch[i] = (struct ibv_recv_wr){
		.wr_id = rq->tag | idx,
		.sg_list = &rq->sge[i],
		.num_sge = 1,
	};
	return 0;
}

int kvp_rq_ring(struct kvp_rq *rq)
{
	struct ibv_recv_wr *bad = NULL;
	int err;

	if (rq->n_batch == 0)
		return 0;

	for (unsigned i = 0; i + 1 < rq->n_batch; i++)
		rq->batch[i].next = &rq->batch[i + 1];
	rq->batch[rq->n_batch - 1].next = NULL;
	err = ibv_post_recv(rq->qp, rq->batch, &bad);
	if (err)
		return err > 0 ? -err : err;

	rq->posted += rq->n_batch;
	rq->n_batch = 0;
	return 0;
}
