/* SPDX-License-Identifier: Apache-2.0 */

/* Messages, payloads, credits. */

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

#define TAIL_MAGIC 0x4c494154u

/* ---- payloads under way */

static struct kvp_vb_op *op_take(struct kvp_net *net, void *req)
{
	struct kvp_vb_op *op = TAILQ_FIRST(&net->free_ops);

	if (!op)
		return NULL;

	TAILQ_REMOVE(&net->free_ops, op, link);
	net->stats.pending++;
	op->req = req;
	op->mr = NULL;
	op->bounce = -1;
	op->status = 0;
	return op;
}

static void op_release(struct kvp_net *net, struct kvp_vb_op *op)
{
	if (op->mr)
		(void)ibv_dereg_mr(op->mr); /* no request uses it any more */
	if (op->bounce >= 0)
		net->free_bounces[net->n_free_bounces++] = (uint8_t)op->bounce;
	op->mr = NULL;
	op->bounce = -1;
	net->stats.pending--;
	TAILQ_INSERT_HEAD(&net->free_ops, op, link);
}

/* Told later: the lane may send from sent(), and a queue pair is being looked at now. */
void kvp_vb_op_done(void *arg, void *user, int status)
{
	struct kvp_net *net = arg;
	struct kvp_vb_op *op = user;

	op->status = status;
	TAILQ_INSERT_TAIL(&net->done_ops, op, link);
}

int kvp_vb_tell_sent(struct kvp_net *net)
{
	/* Only those of now: a lane that sends from sent() must not keep us here. */
	struct kvp_vb_ops done = TAILQ_HEAD_INITIALIZER(done);
	struct kvp_vb_op *op;
	int n = 0;

	TAILQ_CONCAT(&done, &net->done_ops, link);
	while ((op = TAILQ_FIRST(&done))) {
		void *req = op->req;
		int status = op->status;

		TAILQ_REMOVE(&done, op, link);
		op_release(net, op);
		net->events->sent(net->arg, req, status);
		n++;
	}
	return n;
}

int kvp_vb_msg_init(struct kvp_net *net)
{
	TAILQ_INIT(&net->free_ops);
	TAILQ_INIT(&net->done_ops);
	net->ops = calloc(KVP_VB_OPS, sizeof(*net->ops));
	net->places = calloc(KVP_VB_PLACES, sizeof(*net->places));
	net->bounce = aligned_alloc(4096, (size_t)KVP_VB_BOUNCES * KVP_VB_BOUNCE_BYTES);
	if (!net->ops || !net->places || !net->bounce)
		return -ENOMEM;

	for (uint32_t i = 0; i < KVP_VB_OPS; i++)
		TAILQ_INSERT_TAIL(&net->free_ops, &net->ops[i], link);
	for (uint32_t i = 0; i < KVP_VB_BOUNCES; i++)
		net->free_bounces[net->n_free_bounces++] = (uint8_t)i;
	net->bounce_mr =
		ibv_reg_mr(net->pd, net->bounce, (size_t)KVP_VB_BOUNCES * KVP_VB_BOUNCE_BYTES, 0);
	return net->bounce_mr ? 0 : -errno;
}

void kvp_vb_msg_fini(struct kvp_net *net)
{
	if (net->bounce_mr)
		(void)ibv_dereg_mr(net->bounce_mr);
	free(net->bounce);
	free(net->places);
	free(net->ops);
}

/* ---- sending */

/* The buffer that belongs to the request added next, or after it: free by the credit of its
 * sequence number. */
static uint8_t *next_buffer(struct kvp_net_ep *ep, unsigned ahead)
{
	uint64_t seq = ep->qp.posted + ep->qp.n_batch + 1 + ahead;

	return ep->memory + seq % ep->n_send * KVP_VB_BUFFER_BYTES;
}

/* Adds a SEND of a frame and a header. */
static int add_send(struct kvp_net_ep *ep, const struct kvp_vb_frame *frame, const void *hdr,
		    void *user)
{
	uint8_t *buffer = next_buffer(ep, 0);
	struct kvp_qp_request request = {
		.opcode = IBV_WR_SEND,
		.n_sge = 1,
		.sge[0] = {
			.addr = (uintptr_t)buffer,
			.length = (uint32_t)sizeof(*frame) + frame->hdr_bytes,
			.lkey = ep->mr->lkey,
		},
		.user = user,
	};

	memcpy(buffer, frame, sizeof(*frame));
	if (frame->hdr_bytes)
		memcpy(buffer + sizeof(*frame), hdr, frame->hdr_bytes);
	if (request.sge[0].length <= ep->inline_bytes)
		request.flags = IBV_SEND_INLINE;
	kvp_vb_conn_dirty(ep);
	return kvp_qp_add(&ep->qp, &request);
}

static int sendable(const struct kvp_net_ep *ep, unsigned requests)
{
	if (ep->state == KVP_VB_CONNECTING)
		return -EAGAIN;
	if (ep->state != KVP_VB_OPEN)
		return ep->state == KVP_VB_FAILED ? ep->status : -ENOTCONN;
	if (ep->credits == 0 || kvp_qp_room(&ep->qp) < requests)
		return -EAGAIN;
	return 0;
}

/* A queue pair that is lost shows as failed(). */
static int added(struct kvp_net_ep *ep, int r, size_t bytes)
{
	if (r < 0) {
		kvp_vb_conn_fail(ep, r);
		return 0; /* requests taken so far are told by the drain */
	}
	ep->credits--;
	ep->net->stats.sent_messages++;
	ep->net->stats.sent_bytes += bytes;
	return 0;
}

int kvp_vb_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		const void *payload, size_t bytes, void *req)
{
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_MESSAGE,
		.hdr_bytes = (uint16_t)hdr_bytes,
	};
	struct kvp_vb_op *op = NULL;
	int r;

	if (hdr_bytes == 0 || hdr_bytes > KVP_NET_HDR_MAX || payload || bytes > 0)
		return -EINVAL;
	r = sendable(ep, 1);
	if (r < 0)
		return r;
	if (req) {
		op = op_take(net, req);
		if (!op)
			return -EAGAIN;
	}
	return added(ep, add_send(ep, &frame, hdr, op), 0);
}

/* Finds, or makes, the key of the payload's memory. */
static int payload_sge(struct kvp_net *net, struct kvp_vb_op *op, const struct kvp_net_put *put,
		       struct ibv_sge *sge)
{
	const struct kvp_vb_region *region = kvp_vb_region(net, put->payload, put->bytes);
	uint8_t *copy;

	*sge = (struct ibv_sge){ (uintptr_t)put->payload, (uint32_t)put->bytes, 0 };
	if (region) {
		sge->lkey = region->mr->lkey;
		return 0;
	}
	if (put->bytes <= KVP_VB_BOUNCE_BYTES) {
		if (net->n_free_bounces == 0)
			return -EAGAIN;
		op->bounce = net->free_bounces[--net->n_free_bounces];
		copy = net->bounce + (size_t)op->bounce * KVP_VB_BOUNCE_BYTES;
		memcpy(copy, put->payload, put->bytes);
		sge->addr = (uintptr_t)copy;
		sge->lkey = net->bounce_mr->lkey;
		return 0;
	}
	/* Rare: a pool's own memory, which only unpacked pieces are sent from. */
	op->mr = ibv_reg_mr(net->pd, (void *)(uintptr_t)put->payload, put->bytes, 0);
	if (!op->mr)
		return -errno;
	sge->lkey = op->mr->lkey;
	return 0;
}

/* One request says all: the payload, its header behind it, and the place in the immediate. */
static int put_whole(struct kvp_net_ep *ep, const struct kvp_net_put *put,
		     const struct kvp_vb_key *key, const struct ibv_sge *payload, void *user)
{
	uint8_t *buffer = next_buffer(ep, 0);
	struct kvp_vb_tail tail = {
		.magic = TAIL_MAGIC,
		.hdr_bytes = (uint16_t)put->hdr_bytes,
		.bytes = put->bytes,
	};
	const struct kvp_qp_request request = {
		.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
		.n_sge = 2,
		.sge = { *payload, { (uintptr_t)buffer, sizeof(tail), ep->mr->lkey } },
		.remote = key->addr,
		.rkey = key->rkey,
		.imm = (uint32_t)key->nonce << 16 | key->idx,
		.user = user,
	};

	memcpy(tail.hdr, put->hdr, put->hdr_bytes);
	memcpy(buffer, &tail, sizeof(tail));
	kvp_vb_conn_dirty(ep);
	return kvp_qp_add(&ep->qp, &request);
}

/* A part of a place: the header follows in a message, since behind the part comes another. */
static int put_part(struct kvp_net_ep *ep, const struct kvp_net_put *put,
		    const struct kvp_vb_key *key, const struct ibv_sge *payload, void *user)
{
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_PUT,
		.hdr_bytes = (uint16_t)put->hdr_bytes,
		.place = key->addr + put->offset,
		.bytes = put->bytes,
	};
	const struct kvp_qp_request request = {
		.opcode = IBV_WR_RDMA_WRITE,
		.n_sge = 1,
		.sge = { *payload },
		.remote = frame.place,
		.rkey = key->rkey,
	};
	int r = kvp_qp_add(&ep->qp, &request);

	return r == 0 ? add_send(ep, &frame, put->hdr, user) : r;
}

int kvp_vb_put(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_put *put)
{
	struct kvp_vb_key key;
	struct kvp_vb_op *op;
	struct ibv_sge sge;
	bool whole;
	int r;

	if (put->hdr_bytes == 0 || put->hdr_bytes > KVP_NET_HDR_MAX || !put->payload ||
	    put->bytes == 0 || put->bytes > net->nic.max_msg_bytes || !put->req)
		return -EINVAL;
	memcpy(&key, put->key, sizeof(key));
	whole = put->whole && !(key.idx & KVP_VB_APART) &&
		put->hdr_bytes <= sizeof(((struct kvp_vb_tail *)NULL)->hdr);
	r = sendable(ep, whole ? 1 : 2);
	if (r < 0)
		return r;
	op = op_take(net, put->req);
	if (!op)
		return -EAGAIN;

	r = payload_sge(net, op, put, &sge);
	if (r < 0) {
		op_release(net, op);
		return r;
	}
	r = whole ? put_whole(ep, put, &key, &sge, op) : put_part(ep, put, &key, &sge, op);
	return added(ep, r, put->bytes);
}

/* ---- receiving */

static void deliver(struct kvp_net *net, const void *hdr, size_t hdr_bytes, void *place,
		    size_t bytes)
{
	_Alignas(16) unsigned char copy[KVP_NET_HDR_MAX];
	void *want;

	memcpy(copy, hdr, hdr_bytes);
	net->stats.recv_messages++;
	net->stats.recv_bytes += bytes;
	want = net->events->message(net->arg, copy, hdr_bytes, bytes);
	if (bytes == 0)
		return;
	if (!want || want != place) {
		net->stats.dropped++; /* it lies in a slot that nobody reads */
		return;
	}
	net->events->data(net->arg, copy, hdr_bytes, place, bytes);
}

static void on_whole(struct kvp_net_ep *ep, const struct ibv_wc *wc)
{
	struct kvp_net *net = ep->net;
	uint32_t imm = be32toh(wc->imm_data);
	const struct kvp_vb_place *place = &net->places[imm & 0xffff];
	struct kvp_vb_tail tail;
	size_t bytes;

	if ((imm & 0xffff) >= net->n_places || place->nonce != imm >> 16 ||
	    wc->byte_len <= sizeof(tail) || wc->byte_len > place->bytes + sizeof(tail)) {
		net->stats.dropped++;
		return;
	}
	bytes = wc->byte_len - sizeof(tail);
	memcpy(&tail, place->base + bytes, sizeof(tail));
	if (tail.magic != TAIL_MAGIC || tail.bytes != bytes || tail.hdr_bytes == 0 ||
	    tail.hdr_bytes > sizeof(tail.hdr)) {
		net->stats.dropped++;
		return;
	}
	deliver(net, tail.hdr, tail.hdr_bytes, place->base, bytes);
}

static void on_frame(struct kvp_net_ep *ep, const uint8_t *buffer, uint32_t bytes)
{
	struct kvp_net *net = ep->net;
	struct kvp_vb_frame frame;

	if (bytes < sizeof(frame)) {
		net->stats.dropped++;
		return;
	}
	memcpy(&frame, buffer, sizeof(frame));
	if (frame.kind == KVP_VB_CREDIT && !ep->passive) {
		if (frame.credits <= KVP_VB_CREDITS_MAX - ep->credits)
			ep->credits += frame.credits;
		return;
	}
	if (!ep->passive || frame.hdr_bytes == 0 || frame.hdr_bytes > KVP_NET_HDR_MAX ||
	    frame.hdr_bytes != bytes - sizeof(frame)) {
		net->stats.dropped++;
		return;
	}
	if (frame.kind == KVP_VB_MESSAGE)
		deliver(net, buffer + sizeof(frame), frame.hdr_bytes, NULL, 0);
	else if (frame.kind == KVP_VB_PUT && frame.bytes > 0)
		deliver(net, buffer + sizeof(frame), frame.hdr_bytes,
			(void *)(uintptr_t)frame.place, frame.bytes); /* compared, not followed */
	else
		net->stats.dropped++;
}

void kvp_vb_received(struct kvp_net_ep *ep, const struct ibv_wc *wc)
{
	uint32_t idx = (uint32_t)(wc->wr_id & KVP_QP_SEQ_MASK);
	int r;

	if (idx >= ep->n_recv)
		return;

	if (!ep->net->closing) {
		if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
			on_whole(ep, wc);
		else
			on_frame(ep,
				 (const uint8_t *)(uintptr_t)ep->rq.base +
					 (size_t)idx * KVP_VB_BUFFER_BYTES,
				 wc->byte_len);
	}
	r = kvp_rq_give(&ep->rq, idx);
	if (r < 0) {
		kvp_vb_conn_fail(ep, r);
		return;
	}
	if (ep->passive)
		ep->consumed++;
	kvp_vb_conn_dirty(ep);
}

/* ---- doorbells */

int kvp_vb_credit(struct kvp_net_ep *ep)
{
	const struct kvp_vb_frame frame = { .kind = KVP_VB_CREDIT, .credits = ep->consumed };
	int r = add_send(ep, &frame, NULL, NULL);

	if (r == 0)
		ep->consumed = 0;
	return r;
}

/* Receives first: a credit must not be there before what it stands for. */
void kvp_vb_flush(struct kvp_net_ep *ep)
{
	int r = ep->state == KVP_VB_OPEN ? kvp_rq_ring(&ep->rq) : 0;

	if (r == 0 && ep->passive && ep->consumed >= ep->n_recv / 4 && kvp_qp_room(&ep->qp) > 0)
		r = kvp_vb_credit(ep);
	if (r == 0)
		r = kvp_qp_ring(&ep->qp);
	if (r < 0)
		kvp_vb_conn_fail(ep, r);
}
