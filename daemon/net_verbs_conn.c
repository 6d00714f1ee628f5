/* SPDX-License-Identifier: Apache-2.0 */

/* Connections: from the request to the proof that nothing of them runs any more. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

/* A tag names a connection in wr_ids and datagrams: index below, then how often it was used. 0 is
 * the datagram queue pair's. */
#define TAG_IDX_BITS 9u
#define TAG_IDX_MASK ((1u << TAG_IDX_BITS) - 1)
_Static_assert(KVP_VB_CONNS < TAG_IDX_MASK, "indices fit, 0 excepted");

struct kvp_net_ep *kvp_vb_conn_find(struct kvp_net *net, uint32_t tag)
{
	uint32_t idx = (tag & TAG_IDX_MASK) - 1;
	struct kvp_net_ep *ep = idx < KVP_VB_CONNS ? net->conns[idx] : NULL;

	return ep && ep->tag == tag ? ep : NULL;
}

static int take_idx(struct kvp_net *net, struct kvp_net_ep *ep)
{
	for (uint32_t i = 0; i < net->n_conns_max; i++) {
		uint32_t idx = (net->next_idx + i) % net->n_conns_max;

		if (net->conns[idx])
			continue;
		net->next_idx = idx + 1; /* late completions meet an unused number for long */
		net->conns[idx] = ep;
		net->epochs[idx]++;
		ep->idx = idx;
		ep->tag = (net->epochs[idx] << TAG_IDX_BITS | (idx + 1)) & KVP_QP_TAG_MAX;
		return 0;
	}
	return -ENOBUFS;
}

static int make_memory(struct kvp_net_ep *ep)
{
	size_t bytes = (size_t)(ep->n_send + ep->n_recv) * KVP_VB_BUFFER_BYTES;

	ep->memory = aligned_alloc(64, bytes);
	if (!ep->memory)
		return -ENOMEM;

	memset(ep->memory, 0, bytes);
	ep->mr = ibv_reg_mr(ep->net->pd, ep->memory, bytes, IBV_ACCESS_LOCAL_WRITE);
	return ep->mr ? 0 : -errno;
}

static int make_qp(struct kvp_net_ep *ep)
{
	struct kvp_net *net = ep->net;
	struct ibv_qp_init_attr init = {
		.send_cq = net->cq,
		.recv_cq = net->cq,
		.cap = {
			.max_send_wr = ep->n_send + 1, /* the marker of a drain */
			.max_recv_wr = ep->n_recv,
			.max_send_sge = KVP_QP_SGE_MAX,
			.max_recv_sge = 1,
			.max_inline_data = ep->passive ? 0 : net->config.inline_bytes,
		},
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = net->config.pkey_index,
		.port_num = net->nic.port,
		/* Only who receives is written to, and nobody is read from. */
		.qp_access_flags = ep->passive ? IBV_ACCESS_REMOTE_WRITE : 0,
	};
	int r;

	ep->ibv = ibv_create_qp(net->pd, &init);
	if (!ep->ibv && init.cap.max_inline_data) {
		init.cap.max_inline_data = 0; /* a wish, not a need */
		ep->ibv = ibv_create_qp(net->pd, &init);
	}
	if (!ep->ibv)
		return -errno;

	ep->inline_bytes = init.cap.max_inline_data;
	r = ibv_modify_qp(ep->ibv, &attr,
			  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (r)
		return -r;
	return kvp_qp_init(&ep->qp, ep->ibv, ep->n_send, ep->tag);
}

/* Before the peer can send anything. */
static int post_receives(struct kvp_net_ep *ep)
{
	int r = 0;

	kvp_rq_init(&ep->rq, ep->ibv, ep->tag, ep->mr,
		    ep->memory + (size_t)ep->n_send * KVP_VB_BUFFER_BYTES, KVP_VB_BUFFER_BYTES);
	for (uint32_t i = 0; r == 0 && i < ep->n_recv; i++)
		r = kvp_rq_give(&ep->rq, i);
	return r == 0 ? kvp_rq_ring(&ep->rq) : r;
}

int kvp_vb_conn_create(struct kvp_net *net, bool passive, struct kvp_net_ep **out)
{
	struct kvp_net_ep *ep = calloc(1, sizeof(*ep));
	int r;

	if (!ep)
		return -ENOMEM;

	ep->net = net;
	ep->passive = passive;
	ep->state = KVP_VB_CONNECTING;
	ep->since_ns = ep->tried_ns = net->now_ns;
	ep->n_send = passive ? KVP_VB_BACK_DEPTH : net->config.depth;
	ep->n_recv = passive ? net->config.depth : KVP_VB_BACK_DEPTH;
	ep->psn = (uint32_t)kvp_vb_random(net) & 0xffffff;
	r = take_idx(net, ep);
	if (r < 0) {
		free(ep);
		return r;
	}
	TAILQ_INSERT_TAIL(passive ? &net->passive : &net->eps, ep, link);
	if (!passive)
		net->stats.eps++;

	r = make_memory(ep);
	if (r == 0)
		r = make_qp(ep);
	if (r == 0)
		r = post_receives(ep);
	if (r < 0) {
		kvp_vb_conn_destroy(ep);
		return r;
	}
	*out = ep;
	return 0;
}

void kvp_vb_conn_destroy(struct kvp_net_ep *ep)
{
	struct kvp_net *net = ep->net;

	/* When this returns the card touches nothing of it: the proof that the lane waits for. */
	if (ep->ibv)
		(void)ibv_destroy_qp(ep->ibv);
	if (ep->qp.users)
		kvp_qp_abandon(&ep->qp, kvp_vb_op_done, net);
	kvp_qp_fini(&ep->qp);
	if (ep->mr)
		(void)ibv_dereg_mr(ep->mr);
	if (ep->ah)
		(void)ibv_destroy_ah(ep->ah);
	free(ep->memory);
	if (ep->dirty)
		TAILQ_REMOVE(&net->dirty, ep, dirty_link);
	if (ep->tell_failed)
		net->n_tell--;
	TAILQ_REMOVE(ep->passive ? &net->passive : &net->eps, ep, link);
	if (!ep->passive)
		net->stats.eps--;
	net->conns[ep->idx] = NULL;
	free(ep);
}

static enum ibv_mtu common_mtu(const struct kvp_net *net, uint8_t theirs)
{
	enum ibv_mtu ours = net->nic.mtu;

	return theirs >= IBV_MTU_256 && theirs < ours ? (enum ibv_mtu)theirs : ours;
}

int kvp_vb_conn_up(struct kvp_net_ep *ep, const struct kvp_vb_datagram *peer)
{
	struct kvp_net *net = ep->net;
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = common_mtu(net, peer->mtu),
		.dest_qp_num = peer->qpn,
		.rq_psn = peer->psn & 0xffffff,
		.max_dest_rd_atomic = 0,
		.min_rnr_timer = net->config.rnr_timer,
		.ah_attr = kvp_vb_way(net, peer->gid, peer->lid),
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = net->config.timeout,
		.retry_cnt = net->config.retry_count,
		.rnr_retry = 6, /* 7 would be for ever; credits leave no reason for any */
		.sq_psn = ep->psn,
		.max_rd_atomic = 0,
	};
	int r = ibv_modify_qp(ep->ibv, &rtr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				      IBV_QP_MIN_RNR_TIMER);

	if (r == 0)
		r = ibv_modify_qp(ep->ibv, &rts,
				  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					  IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					  IBV_QP_MAX_QP_RD_ATOMIC);
	if (r)
		return -r;

	ep->state = KVP_VB_OPEN;
	ep->since_ns = ep->tried_ns = net->now_ns;
	return 0;
}

static void log_loss(const struct kvp_net_ep *ep, int status)
{
	union ibv_gid gid;
	char text[64];

	memcpy(gid.raw, ep->peer.gid, sizeof(gid.raw));
	kvp_log(KVP_LOG_WARNING, "verbs %s: connection %s %s lost: %s%s%s", ep->net->nic.device,
		ep->passive ? "from" : "to", kvp_nic_gid_text(&gid, text, sizeof(text)),
		strerror(-status), ep->qp.reason ? ", " : "",
		ep->qp.reason ? ibv_wc_status_str(ep->qp.reason) : "");
}

void kvp_vb_conn_fail(struct kvp_net_ep *ep, int status)
{
	if (ep->state != KVP_VB_CONNECTING && ep->state != KVP_VB_OPEN)
		return;

	log_loss(ep, status);
	ep->state = KVP_VB_FAILED;
	ep->status = status;
	ep->since_ns = ep->net->now_ns;
	kvp_qp_fail(&ep->qp, status);
	if (ep->passive)
		return; /* its peer notices by itself */
	ep->tell_failed = true;
	ep->net->n_tell++;
}

void kvp_vb_conn_dirty(struct kvp_net_ep *ep)
{
	if (ep->dirty)
		return;

	ep->dirty = true;
	TAILQ_INSERT_TAIL(&ep->net->dirty, ep, dirty_link);
}

int kvp_vb_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, void *ep_arg,
		   struct kvp_net_ep **out)
{
	struct kvp_vb_address peer;
	struct kvp_net_ep *ep;
	int r = kvp_vb_address_check(net, addr, addr_bytes, &peer);

	if (r < 0)
		return r;
	if (net->dead)
		return -ENODEV;
	if (net->port_down)
		return -ENETDOWN;

	r = kvp_vb_conn_create(net, false, &ep);
	if (r < 0)
		return r;

	ep->arg = ep_arg;
	ep->peer = peer;
	r = kvp_vb_ud_ah(ep);
	if (r < 0) {
		kvp_vb_conn_destroy(ep);
		return r;
	}
	kvp_vb_ud_send(ep, KVP_VB_REQUEST);
	ep->repeat_ns = net->now_ns + KVP_VB_REPEAT_NS;
	*out = ep;
	return 0;
}

/* What the peer's net has opened to us goes with our own endpoint to it: from closed() on it cannot
 * write here any more. */
static void end_passive(struct kvp_net *net, const struct kvp_net_ep *active)
{
	struct kvp_net_ep *ep, *next;

	for (ep = TAILQ_FIRST(&net->passive); ep; ep = next) {
		next = TAILQ_NEXT(ep, link);
		if (memcmp(ep->peer.id, active->peer.id, sizeof(ep->peer.id)) == 0)
			kvp_vb_conn_destroy(ep);
	}
}

void kvp_vb_ep_close(struct kvp_net *net, struct kvp_net_ep *ep)
{
	if (ep->state == KVP_VB_CLOSING)
		return;

	if (ep->tell_failed)
		net->n_tell--;
	ep->tell_failed = false;
	kvp_qp_fail(&ep->qp, -ECANCELED);
	ep->state = KVP_VB_CLOSING;
	ep->since_ns = net->now_ns;
	net->n_closing++;
}

int kvp_vb_tell_failed(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep && net->n_tell > 0; ep = next) {
		next = TAILQ_NEXT(ep, link); /* the callback removes none */
		if (!ep->tell_failed)
			continue;
		ep->tell_failed = false;
		net->n_tell--;
		n++;
		net->events->failed(net->arg, ep, ep->status);
	}
	return n;
}

static void ep_gone(struct kvp_net *net, struct kvp_net_ep *ep)
{
	void *arg = ep->arg;

	kvp_vb_ud_send(ep, KVP_VB_BYE); /* else the peer finds out by its keepalive */
	end_passive(net, ep);
	net->n_closing--;
	kvp_vb_conn_destroy(ep);
	(void)kvp_vb_tell_sent(net); /* before closed(); the count is for progress() */
	net->events->closed(net->arg, arg);
}

int kvp_vb_turn_closing(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep && net->n_closing > 0; ep = next) {
		next = TAILQ_NEXT(ep, link);
		if (ep->state != KVP_VB_CLOSING)
			continue;
		if (ep->qp.state != KVP_QP_DRAINED &&
		    net->now_ns - ep->since_ns < KVP_VB_DRAIN_NS && !net->closing)
			continue;
		ep_gone(net, ep);
		n++;
	}
	return n;
}

/* A write of nothing, or (nobody may write to who opened a connection) credits, however few:
 * answered by a peer that lives. Not while the last one is out. */
static void keepalive(struct kvp_net_ep *ep)
{
	const struct kvp_qp_request nothing = { .opcode = IBV_WR_RDMA_WRITE };
	struct kvp_net *net = ep->net;

	if (net->now_ns - ep->tried_ns < net->config.keepalive_ns)
		return;

	ep->tried_ns = net->now_ns;
	if (ep->qp.completed != ep->tried_completed || ep->qp.posted != ep->qp.completed) {
		ep->tried_completed = ep->qp.completed; /* it lives, or the card is trying */
		return;
	}
	net->keepalives++;
	if (ep->passive)
		(void)kvp_vb_credit(ep); /* what cannot be posted shows as a loss */
	else if (kvp_qp_add(&ep->qp, &nothing) == 0)
		kvp_vb_conn_dirty(ep);
}

void kvp_vb_conn_tick(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;

	for (uint32_t i = 0; i < net->n_conns_max; i++) {
		if (net->conns[i] && net->conns[i]->flushed)
			kvp_vb_conn_fail(net->conns[i], -ECONNRESET);
	}
	TAILQ_FOREACH (ep, &net->eps, link) {
		if (ep->state == KVP_VB_OPEN)
			keepalive(ep);
	}
	for (ep = TAILQ_FIRST(&net->passive); ep; ep = next) {
		next = TAILQ_NEXT(ep, link);
		if (ep->state == KVP_VB_OPEN)
			keepalive(ep);
		else
			kvp_vb_conn_destroy(ep);
	}
}
