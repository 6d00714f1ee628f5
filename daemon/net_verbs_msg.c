/* SPDX-License-Identifier: Apache-2.0 */

/* Messages, payloads, credits. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

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
void kvp_vb_item_end(struct kvp_vb_item *item, int status)
{
	item->state = KVP_VB_FREE;
	if (!item->op)
		return;
	item->op->status = status;
	TAILQ_INSERT_TAIL(&item->ep->net->done_ops, item->op, link);
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
	return 0;
}

void kvp_vb_msg_fini(struct kvp_net *net)
{
	free(net->bounce);
	free(net->places);
	free(net->ops);
}

/* ---- posting */

/* The buffer that belongs to the request added next: free by the credit of its sequence number. */
static uint8_t *next_buffer(struct kvp_vb_conn *conn)
{
	uint64_t seq = conn->qp.posted + conn->qp.n_batch + 1;

	return conn->memory + seq % conn->n_send * KVP_VB_BUFFER_BYTES;
}

/* Adds a SEND of a frame and a header. */
static int add_send(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame, const void *hdr,
		    void *user)
{
	uint8_t *buffer = next_buffer(conn);
	struct kvp_qp_request request = {
		.opcode = IBV_WR_SEND,
		.n_sge = 1,
		.sge[0] = {
			.addr = (uintptr_t)buffer,
			.length = (uint32_t)sizeof(*frame) + frame->hdr_bytes,
			.lkey = conn->mr->lkey,
		},
		.user = user,
	};

	memcpy(buffer, frame, sizeof(*frame));
	if (hdr) /* NULL: of no bytes */
		memcpy(buffer + sizeof(*frame), hdr, frame->hdr_bytes);
	if (request.sge[0].length <= conn->inline_bytes)
		request.flags = IBV_SEND_INLINE;
	kvp_vb_conn_dirty(conn);
	return kvp_qp_add(&conn->qp, &request);
}

int kvp_vb_add_frame(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame, const void *hdr)
{
	return add_send(conn, frame, hdr, NULL);
}

/* Finds, or makes, the key of the payload's memory for this rail. */
static int payload_sge(const struct kvp_vb_rail *rail, const struct kvp_vb_item *item,
		       struct ibv_sge *sge)
{
	struct kvp_net *net = rail->net;
	struct kvp_vb_op *op = item->op;
	const struct kvp_vb_region *region = kvp_vb_region(net, item->payload, item->bytes);
	uint8_t *copy;

	*sge = (struct ibv_sge){ (uintptr_t)item->payload, item->bytes, 0 };
	if (region) {
		sge->lkey = region->mr[rail->idx]->lkey;
		return 0;
	}
	if (item->bytes <= KVP_VB_BOUNCE_BYTES) {
		if (op->bounce < 0 && net->n_free_bounces == 0)
			return -EAGAIN;
		if (op->bounce < 0)
			op->bounce = net->free_bounces[--net->n_free_bounces];
		copy = net->bounce + (size_t)op->bounce * KVP_VB_BOUNCE_BYTES;
		memcpy(copy, item->payload, item->bytes);
		sge->addr = (uintptr_t)copy;
		sge->lkey = rail->bounce_mr->lkey;
		return 0;
	}
	/* Rare: a pool's own memory, which only unpacked pieces are sent from. */
	if (op->mr && op->mr_rail != rail) {
		(void)ibv_dereg_mr(op->mr); /* of a connection that is gone */
		op->mr = NULL;
	}
	if (!op->mr)
		op->mr = ibv_reg_mr(rail->pd, (void *)(uintptr_t)item->payload, item->bytes, 0);
	if (!op->mr)
		return -errno;
	op->mr_rail = rail;
	sge->lkey = op->mr->lkey;
	return 0;
}

static int post_message(struct kvp_vb_conn *conn, struct kvp_vb_item *item)
{
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_MESSAGE,
		.hdr_bytes = item->hdr_bytes,
		.seq = (uint32_t)item->seq,
	};
	int r = kvp_vb_post_runs(conn, item);

	return r == 0 ? add_send(conn, &frame, item->hdr, item) : r;
}

static uint32_t rkey_of(const struct kvp_vb_conn *conn, const struct kvp_vb_item *item)
{
	return item->key.rkey[conn->ep->paths[conn->path].end];
}

/* One request says all: the payload, its header behind it, and the place in the immediate. */
static int post_whole(struct kvp_vb_conn *conn, struct kvp_vb_item *item,
		      const struct ibv_sge *payload)
{
	uint8_t *buffer = next_buffer(conn);
	struct kvp_vb_tail tail = {
		.magic = KVP_VB_TAIL_MAGIC,
		.hdr_bytes = item->hdr_bytes,
		.bytes = item->bytes,
		.seq = (uint32_t)item->seq,
	};
	const struct kvp_qp_request request = {
		.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
		.n_sge = 2,
		.sge = { *payload, { (uintptr_t)buffer, sizeof(tail), conn->mr->lkey } },
		.remote = item->key.addr,
		.rkey = rkey_of(conn, item),
		.imm = (uint32_t)item->key.nonce << 16 | item->key.idx,
		.user = item,
	};

	memcpy(tail.hdr, item->hdr, item->hdr_bytes);
	memcpy(buffer, &tail, sizeof(tail));
	kvp_vb_conn_dirty(conn);
	return kvp_qp_add(&conn->qp, &request);
}

/* A part of a place: the header follows in a message, since behind the part comes another. */
static int post_part(struct kvp_vb_conn *conn, struct kvp_vb_item *item,
		     const struct ibv_sge *payload)
{
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_PUT,
		.hdr_bytes = item->hdr_bytes,
		.place = item->key.addr + item->offset,
		.bytes = item->bytes,
		.seq = (uint32_t)item->seq,
	};
	const struct kvp_qp_request request = {
		.opcode = IBV_WR_RDMA_WRITE,
		.n_sge = 1,
		.sge = { *payload },
		.remote = frame.place,
		.rkey = rkey_of(conn, item),
	};
	int r = kvp_qp_add(&conn->qp, &request);

	return r == 0 ? add_send(conn, &frame, item->hdr, item) : r;
}

int kvp_vb_item_post(struct kvp_vb_item *item)
{
	bool part = item->payload && !item->whole;
	unsigned requests = item->n_runs + (part ? 2 : 1);
	struct kvp_vb_conn *conn =
		kvp_vb_ep_pick(item->ep, requests, kvp_vb_run_ends(item), item->tried);
	struct ibv_sge sge;
	int r = conn ? 0 : -EAGAIN;

	if (conn && item->payload)
		r = payload_sge(conn->rail, item, &sge);
	if (r < 0)
		return r;

	item->tag = conn->tag;
	item->state = KVP_VB_POSTED;
	conn->credits--;
	conn->bytes_out += item->bytes;
	conn->rail->bytes += item->bytes;
	conn->used_ns = conn->net->now_ns;
	if (!item->payload)
		r = post_message(conn, item);
	else
		r = part ? post_part(conn, item, &sge) : post_whole(conn, item, &sge);
	if (r < 0) { /* the queue pair is lost, which says nothing of this item */
		item->state = KVP_VB_UNKNOWN;
		kvp_vb_conn_fail(conn, r);
	}
	return 0;
}

/* Of another rail it would be refused as well. */
static bool hopeless(int status)
{
	return status == -EACCES || status == -EFAULT || status == -EMSGSIZE;
}

/* It has failed over another rail, too, or, for want of one, over the same again and again. */
static bool given_up(const struct kvp_vb_item *item)
{
	return (item->tried & (item->tried - 1)) != 0 || item->failures > 2;
}

void kvp_vb_item_done(void *arg, void *user, int status)
{
	struct kvp_vb_item *item = user;
	struct kvp_net_ep *ep = item->ep;
	struct kvp_vb_conn *conn = kvp_vb_conn_find(arg, item->tag);

	if (conn)
		conn->bytes_out -= item->bytes;
	if (status == 0) {
		kvp_vb_item_end(item, 0);
		return;
	}
	item->state = KVP_VB_UNKNOWN;
	if (!conn || conn->state != KVP_VB_OPEN || status == -ECANCELED)
		return; /* flushed behind another */
	item->failures++;
	item->tried |= 1u << conn->path;
	if (ep->status == 0 && (given_up(item) || hopeless(status)))
		ep->status = status;
}

/* ---- sending */

static int sendable(const struct kvp_net_ep *ep)
{
	const struct kvp_vb_item *item = &ep->items[ep->next_seq & (ep->window - 1)];

	if (ep->state != KVP_VB_EP_OPEN)
		return ep->state == KVP_VB_EP_FAILED ? ep->status : -ENOTCONN;
	if (!TAILQ_EMPTY(&ep->again) || item->state != KVP_VB_FREE ||
	    ep->next_seq - ep->delivered >= ep->window)
		return -EAGAIN;
	return 0;
}

/* The next item of the endpoint, with its header. */
static struct kvp_vb_item *next_item(struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes)
{
	struct kvp_vb_item *item = &ep->items[ep->next_seq & (ep->window - 1)];

	ep->used_ns = ep->net->now_ns;
	item->op = NULL;
	item->failures = 0;
	item->tried = 0;
	item->seq = ep->next_seq;
	item->payload = NULL;
	item->bytes = 0;
	item->n_runs = 0;
	item->hdr_bytes = (uint16_t)hdr_bytes;
	memcpy(item->hdr, hdr, hdr_bytes);
	return item;
}

/* Posts it, or forgets it. */
int kvp_vb_item_send(struct kvp_vb_item *item)
{
	struct kvp_net_ep *ep = item->ep;
	/* Keys for none of our rails: there is nothing to wait for. */
	int r = kvp_vb_ep_reaches(ep, kvp_vb_run_ends(item)) ? kvp_vb_item_post(item) : -EACCES;

	if (r < 0) {
		if (item->op)
			op_release(ep->net, item->op);
		return r;
	}
	ep->next_seq++;
	ep->net->stats.sent_messages++;
	ep->net->stats.sent_bytes += item->bytes;
	return 0;
}

int kvp_vb_item_begin(struct kvp_net_ep *ep, const struct kvp_net_write *write,
		      struct kvp_vb_item **out)
{
	struct kvp_vb_item *item;
	int r = sendable(ep);

	if (r < 0)
		return r;
	item = next_item(ep, write->hdr, write->hdr_bytes);
	if (!item->runs)
		item->runs = calloc(KVP_NET_RUNS_MAX, sizeof(*item->runs));
	if (!item->runs)
		return -ENOMEM;
	item->op = op_take(ep->net, write->req);
	*out = item;
	return item->op ? 0 : -EAGAIN;
}

int kvp_vb_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		const void *payload, size_t bytes, void *req)
{
	struct kvp_vb_item *item;
	int r;

	if (hdr_bytes == 0 || hdr_bytes > KVP_NET_HDR_MAX || payload || bytes > 0)
		return -EINVAL;
	r = sendable(ep);
	if (r < 0)
		return r;
	item = next_item(ep, hdr, hdr_bytes);
	if (req) {
		item->op = op_take(net, req);
		if (!item->op)
			return -EAGAIN;
	}
	return kvp_vb_item_send(item);
}

int kvp_vb_put(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_put *put)
{
	struct kvp_vb_item *item;
	int r;

	if (put->hdr_bytes == 0 || put->hdr_bytes > KVP_NET_HDR_MAX || !put->payload ||
	    put->bytes == 0 || put->bytes > net->max_msg_bytes || !put->req)
		return -EINVAL;
	r = sendable(ep);
	if (r < 0)
		return r;
	item = next_item(ep, put->hdr, put->hdr_bytes);
	item->op = op_take(net, put->req);
	if (!item->op)
		return -EAGAIN;

	ep->spread = true;
	item->payload = put->payload;
	item->bytes = (uint32_t)put->bytes;
	item->offset = put->offset;
	memcpy(&item->key, put->key, sizeof(item->key));
	item->whole = put->whole && !(item->key.idx & KVP_VB_APART) &&
		      put->hdr_bytes <= sizeof(((struct kvp_vb_tail *)NULL)->hdr);
	return kvp_vb_item_send(item);
}

/* ---- doorbells */

int kvp_vb_credit(struct kvp_vb_conn *conn)
{
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_CREDIT,
		.credits = conn->consumed,
		.seq = (uint32_t)conn->in->next,
	};
	int r = add_send(conn, &frame, NULL, NULL);

	if (r < 0)
		return r;
	conn->consumed = 0;
	conn->in->told = conn->in->next;
	return 0;
}

/* So that the sender runs out of neither. */
static bool credit_due(const struct kvp_vb_conn *conn)
{
	const struct kvp_vb_in *in = conn->in;

	return in && kvp_qp_room(&conn->qp) > 0 &&
	       (conn->consumed >= conn->n_recv / 4 || in->next - in->told >= in->window / 4);
}

/* Receives first: a credit must not be there before what it stands for. */
void kvp_vb_flush(struct kvp_vb_conn *conn)
{
	int r = conn->state == KVP_VB_OPEN ? kvp_rq_ring(&conn->rq) : 0;

	if (r == 0 && conn->state == KVP_VB_OPEN && credit_due(conn))
		r = kvp_vb_credit(conn);
	if (r == 0)
		r = kvp_qp_ring(&conn->qp);
	if (r < 0)
		kvp_vb_conn_fail(conn, r);
}
