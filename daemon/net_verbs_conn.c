/* SPDX-License-Identifier: Apache-2.0 */

/* Connections: from the request to the proof that nothing of them runs any more. */

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

/* A tag names a connection in wr_ids and datagrams: index below, then how often it was used. 0 is
 * the datagram queue pair's. */
#define TAG_IDX_BITS 11u
#define TAG_IDX_MASK ((1u << TAG_IDX_BITS) - 1)
_Static_assert(KVP_VB_CONNS < TAG_IDX_MASK, "indices fit, 0 excepted");

struct kvp_vb_conn *kvp_vb_conn_find(struct kvp_net *net, uint32_t tag)
{
	uint32_t idx = (tag & TAG_IDX_MASK) - 1;
	struct kvp_vb_conn *conn = idx < KVP_VB_CONNS ? net->conns[idx] : NULL;

	return conn && conn->tag == tag ? conn : NULL;
}

static int take_idx(struct kvp_vb_conn *conn)
{
	struct kvp_net *net = conn->net;

	if (conn->rail->n_conns == conn->rail->n_conns_max)
		return -ENOBUFS;
	for (uint32_t i = 0; i < KVP_VB_CONNS; i++) {
		uint32_t idx = (net->next_idx + i) % KVP_VB_CONNS;

		if (net->conns[idx])
			continue;
		net->next_idx = idx + 1; /* late completions meet an unused number for long */
		net->conns[idx] = conn;
		net->epochs[idx]++;
		conn->idx = idx;
		conn->tag = (net->epochs[idx] << TAG_IDX_BITS | (idx + 1)) & KVP_QP_TAG_MAX;
		conn->rail->n_conns++;
		return 0;
	}
	return -ENOBUFS;
}

static int make_memory(struct kvp_vb_conn *conn)
{
	size_t bytes = (size_t)(conn->n_send + conn->n_recv) * KVP_VB_BUFFER_BYTES;

	conn->memory = aligned_alloc(64, bytes);
	if (!conn->memory)
		return -ENOMEM;

	memset(conn->memory, 0, bytes);
	conn->mr = ibv_reg_mr(conn->rail->pd, conn->memory, bytes, IBV_ACCESS_LOCAL_WRITE);
	return conn->mr ? 0 : -errno;
}

static int make_qp(struct kvp_vb_conn *conn)
{
	struct kvp_vb_rail *rail = conn->rail;
	const struct kvp_net_verbs_config *config = &conn->net->config;
	struct ibv_qp_init_attr init = {
		.send_cq = rail->cq,
		.recv_cq = rail->cq,
		.cap = {
			.max_send_wr = conn->n_send + 1, /* the marker of a drain */
			.max_recv_wr = conn->n_recv,
			.max_send_sge = KVP_QP_SGE_MAX,
			.max_recv_sge = 1,
			.max_inline_data = conn->in ? 0 : config->inline_bytes,
		},
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = config->pkey_index,
		.port_num = rail->nic.port,
		/* Only who receives is written to, and nobody is read from. */
		.qp_access_flags = conn->in ? IBV_ACCESS_REMOTE_WRITE : 0,
	};
	int r;

	conn->ibv = ibv_create_qp(rail->pd, &init);
	if (!conn->ibv && init.cap.max_inline_data) {
		init.cap.max_inline_data = 0; /* a wish, not a need */
		conn->ibv = ibv_create_qp(rail->pd, &init);
	}
	if (!conn->ibv)
		return -errno;

	conn->qpn = conn->ibv->qp_num;
	conn->inline_bytes = init.cap.max_inline_data;
	r = ibv_modify_qp(conn->ibv, &attr,
			  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (r)
		return -r;
	return kvp_qp_init(&conn->qp, conn->ibv, conn->n_send, conn->tag);
}

/* Before the peer can send anything. */
static int post_receives(struct kvp_vb_conn *conn)
{
	int r = 0;

	kvp_rq_init(&conn->rq, conn->ibv, conn->tag, conn->mr,
		    conn->memory + (size_t)conn->n_send * KVP_VB_BUFFER_BYTES, KVP_VB_BUFFER_BYTES);
	for (uint32_t i = 0; r == 0 && i < conn->n_recv; i++)
		r = kvp_rq_give(&conn->rq, i);
	return r == 0 ? kvp_rq_ring(&conn->rq) : r;
}

int kvp_vb_conn_create(struct kvp_vb_rail *rail, struct kvp_net_ep *ep, struct kvp_vb_in *in,
		       struct kvp_vb_conn **out)
{
	struct kvp_vb_conn *conn = calloc(1, sizeof(*conn));
	struct kvp_net *net = rail->net;
	int r;

	if (!conn)
		return -ENOMEM;

	conn->net = net;
	conn->rail = rail;
	conn->ep = ep;
	conn->in = in;
	conn->state = KVP_VB_CONNECTING;
	conn->since_ns = conn->tried_ns = conn->used_ns = conn->moved_ns = net->now_ns;
	conn->n_send = in ? KVP_VB_BACK_DEPTH : net->config.depth;
	conn->n_recv = in ? net->config.depth : KVP_VB_BACK_DEPTH;
	conn->psn = (uint32_t)kvp_vb_random(net) & 0xffffff;
	r = take_idx(conn);
	if (r < 0) {
		free(conn);
		return r;
	}
	TAILQ_INSERT_TAIL(&net->all, conn, link);
	net->n_connecting++;
	rail->n_by_state[conn->state]++;

	r = make_memory(conn);
	if (r == 0)
		r = make_qp(conn);
	if (r == 0)
		r = post_receives(conn);
	if (r < 0) {
		kvp_vb_conn_leave(conn);
		return r;
	}
	*out = conn;
	return 0;
}

/* ---- the end of it */

/* On the rail's thread: the connection is nobody's any more. */
static void destroy_rest(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);

	if (conn->ibv)
		(void)ibv_destroy_qp(conn->ibv);
	if (conn->mr)
		(void)ibv_dereg_mr(conn->mr);
	if (conn->ah)
		(void)ibv_destroy_ah(conn->ah);
}

static void conn_free(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);

	TAILQ_REMOVE(&conn->net->left, conn, link);
	conn->rail->n_conns--;
	if (conn->cm)
		kvp_vb_cm_drop(conn->rail, conn->cm);
	kvp_qp_fini(&conn->qp);
	free(conn->memory);
	free(conn);
}

void kvp_vb_conn_leave(struct kvp_vb_conn *conn)
{
	struct kvp_net *net = conn->net;

	assert(!conn->call.out && !conn->going);
	if (conn->dirty)
		TAILQ_REMOVE(&net->dirty, conn, dirty_link);
	net->n_connecting -= conn->state == KVP_VB_CONNECTING;
	net->n_draining -= conn->state == KVP_VB_FAILED;
	conn->rail->n_by_state[conn->state]--;
	net->conns[conn->idx] = NULL;
	conn->ep = NULL;
	conn->in = NULL;
	TAILQ_REMOVE(&net->all, conn, link);
	TAILQ_INSERT_TAIL(&net->left, conn, link);
	conn->call.what = "the end of a queue pair";
	conn->call.run = destroy_rest;
	conn->call.done = conn_free;
	kvp_vb_call(conn->rail, &conn->call);
}

static void destroy_qp(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);

	(void)ibv_destroy_qp(conn->going);
}

/* From here on the card touches nothing of it: the proof that the lane waits for. */
static void qp_destroyed(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);

	conn->going = NULL;
	kvp_qp_abandon(&conn->qp, kvp_vb_item_done, conn->net);
}

static void begin_destroy(struct kvp_vb_conn *conn)
{
	conn->going = conn->ibv;
	conn->ibv = NULL;
	conn->call.what = "the destruction of a queue pair";
	conn->call.run = destroy_qp;
	conn->call.done = qp_destroyed;
	kvp_vb_call(conn->rail, &conn->call);
}

/* ---- coming up */

static void set_state(struct kvp_vb_conn *conn, enum kvp_vb_state state)
{
	conn->rail->n_by_state[conn->state]--;
	conn->rail->n_by_state[state]++;
	conn->state = state;
}

static enum ibv_mtu common_mtu(const struct kvp_vb_rail *rail, uint8_t theirs)
{
	enum ibv_mtu ours = rail->nic.mtu;

	return theirs >= IBV_MTU_256 && theirs < ours ? (enum ibv_mtu)theirs : ours;
}

/* On the rail's thread. The way is asked for twice: for datagrams and for the queue pair. */
static void set_up(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);
	struct kvp_vb_plan *plan = &conn->plan;
	int r = 0;

	if (!conn->ah && !conn->cm) {
		conn->ah = ibv_create_ah(conn->rail->pd, &plan->way);
		r = conn->ah ? 0 : errno;
	}
	if (r == 0 && plan->join)
		r = ibv_modify_qp(conn->ibv, &plan->rtr, plan->rtr_mask);
	if (r == 0 && plan->join)
		r = ibv_modify_qp(conn->ibv, &plan->rts, plan->rts_mask);
	plan->status = -r;
}

static void not_set_up(struct kvp_vb_conn *conn, int status)
{
	if (!conn->in) {
		kvp_vb_conn_fail(conn, status);
		return;
	}
	if (conn->cm)
		kvp_vb_cm_refuse(conn, status);
	else
		kvp_vb_ud_refuse(conn, status);
	kvp_vb_in_not_made(conn); /* the peer knows nothing of it */
}

static void opened(struct kvp_vb_conn *conn)
{
	conn->net->n_connecting--;
	conn->opened = true;
	set_state(conn, KVP_VB_OPEN);
	conn->since_ns = conn->tried_ns = conn->used_ns = conn->moved_ns = conn->net->now_ns;
	if (conn->in) {
		conn->in->joined = true;
		return;
	}
	conn->credits = conn->plan.credits;
	kvp_vb_ep_up(conn);
}

static void was_set_up(struct kvp_vb_call *call)
{
	struct kvp_vb_conn *conn = KVP_CONTAINER_OF(call, struct kvp_vb_conn, call);
	int r = conn->plan.status;

	if (conn->state == KVP_VB_FAILED) { /* meanwhile */
		kvp_qp_fail(&conn->qp, conn->status);
		return;
	}
	if (r == 0 && conn->cm)
		r = kvp_vb_cm_joined(conn);
	if (r < 0) {
		not_set_up(conn, r);
		return;
	}
	if (conn->plan.join)
		opened(conn);
	if (!conn->cm && (conn->in || !conn->plan.join)) {
		kvp_vb_ud_send(conn, conn->in ? KVP_VB_REPLY : KVP_VB_REQUEST);
		conn->repeat_ns = conn->net->now_ns + KVP_VB_REPEAT_NS;
	}
}

void kvp_vb_conn_set_up(struct kvp_vb_conn *conn)
{
	conn->call.what = "the way to a peer";
	conn->call.run = set_up;
	conn->call.done = was_set_up;
	kvp_vb_call(conn->rail, &conn->call);
}

void kvp_vb_conn_ask(struct kvp_vb_conn *conn)
{
	conn->plan.way = kvp_vb_way(conn->rail, &conn->to);
	kvp_vb_conn_set_up(conn);
}

void kvp_vb_conn_join(struct kvp_vb_conn *conn, const struct kvp_vb_datagram *peer)
{
	const struct kvp_net_verbs_config *config = &conn->net->config;

	if (conn->call.out)
		return; /* it joins already */

	conn->plan = (struct kvp_vb_plan){
		.way = kvp_vb_way(conn->rail, &conn->to),
		.join = true,
		.rtr = {
			.qp_state = IBV_QPS_RTR,
			.path_mtu = common_mtu(conn->rail, peer->mtu),
			.dest_qp_num = peer->qpn,
			.rq_psn = peer->psn & 0xffffff,
			.max_dest_rd_atomic = 0,
			.min_rnr_timer = config->rnr_timer,
			.ah_attr = kvp_vb_way(conn->rail, &conn->to),
		},
		.rts = {
			.qp_state = IBV_QPS_RTS,
			.timeout = config->timeout,
			.retry_cnt = config->retry_count,
			.rnr_retry = 6, /* 7 would be for ever; credits leave no reason for any */
			.sq_psn = conn->psn,
			.max_rd_atomic = 0,
		},
		.rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
		.rts_mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
		.credits = KVP_MIN(peer->receives, KVP_VB_CREDITS_MAX),
	};
	kvp_vb_conn_set_up(conn);
}

static void log_loss(const struct kvp_vb_conn *conn, int status)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(20, 10);
	union ibv_gid gid;
	char text[64];

	memcpy(gid.raw, conn->to.gid, sizeof(gid.raw));
	kvp_log_limited(&limit, KVP_LOG_WARNING, "verbs %s: connection %s %s %s: %s%s%s",
			conn->rail->nic.device, conn->in ? "from" : "to",
			kvp_nic_gid_text(&gid, text, sizeof(text)),
			conn->opened ? "lost" : "not made", strerror(-status),
			conn->qp.reason ? ", " : "",
			conn->qp.reason ? ibv_wc_status_str(conn->qp.reason) : "");
}

static void begin_drain(struct kvp_vb_conn *conn, int status)
{
	conn->net->n_connecting -= conn->state == KVP_VB_CONNECTING;
	conn->net->n_draining++;
	set_state(conn, KVP_VB_FAILED);
	conn->status = status;
	conn->since_ns = conn->net->now_ns;
	if (!conn->call.out) /* else when it is done: nothing was posted yet */
		kvp_qp_fail(&conn->qp, status);
}

void kvp_vb_conn_fail(struct kvp_vb_conn *conn, int status)
{
	if (conn->state == KVP_VB_FAILED)
		return;

	log_loss(conn, status);
	conn->rail->lost++;
	begin_drain(conn, status);
	if (conn->ep) /* the other end of it notices by itself */
		kvp_vb_ep_failing(conn);
}

void kvp_vb_conn_end(struct kvp_vb_conn *conn)
{
	if (conn->state == KVP_VB_FAILED)
		return;

	conn->quiet = true;
	begin_drain(conn, -ECANCELED);
}

void kvp_vb_conn_dirty(struct kvp_vb_conn *conn)
{
	if (conn->dirty)
		return;

	conn->dirty = true;
	TAILQ_INSERT_TAIL(&conn->net->dirty, conn, dirty_link);
}

/* All that was posted has come back, in both directions. */
static bool drained(const struct kvp_vb_conn *conn)
{
	return conn->qp.state == KVP_QP_DRAINED && (!conn->in || conn->received == conn->rq.posted);
}

/* Nothing comes back any more. A lane that did not run for a while has to look first: what came in
 * the meantime may be more than it takes in a turn. */
static bool overdue(struct kvp_vb_conn *conn)
{
	conn->looks += conn->rail->empty;
	return conn->looks >= KVP_VB_DRAIN_LOOKS &&
	       conn->net->now_ns - conn->since_ns >= KVP_VB_DRAIN_NS;
}

/* May it go by the destruction of its queue pair, which is the proof where a drain is none? Who
 * receives needs that in any case: what a peer may still send must not be written any more. */
static bool to_be_destroyed(struct kvp_vb_conn *conn)
{
	if (conn->in && (conn->in->ending || drained(conn)))
		return true;
	return conn->net->closing || overdue(conn);
}

/* A connection that has failed, one step on; how much was done. */
static int step(struct kvp_vb_conn *conn)
{
	bool proven = !conn->ibv || (!conn->in && drained(conn));

	if (!proven && !to_be_destroyed(conn))
		return 0;
	if (!proven)
		begin_destroy(conn);
	else if (conn->in)
		kvp_vb_in_gone(conn);
	else
		kvp_vb_ep_gone(conn);
	return 1;
}

int kvp_vb_turn_conns(struct kvp_net *net)
{
	struct kvp_vb_conn *conn, *next;
	int n = 0;

	for (conn = TAILQ_FIRST(&net->all); conn && net->n_draining > 0; conn = next) {
		next = TAILQ_NEXT(conn, link); /* only this one is removed */
		if (conn->state == KVP_VB_FAILED && !conn->call.out)
			n += step(conn);
	}
	return n;
}

/* A write of nothing, or (nobody may write to who opened a connection) credits, however few:
 * answered by a peer that lives. Not while the last one is out. */
static void keepalive(struct kvp_vb_conn *conn)
{
	const struct kvp_qp_request nothing = { .opcode = IBV_WR_RDMA_WRITE };
	struct kvp_net *net = conn->net;

	if (net->now_ns - conn->tried_ns < net->config.keepalive_ns)
		return;

	conn->tried_ns = net->now_ns;
	if (conn->qp.completed != conn->tried_completed || conn->qp.posted != conn->qp.completed) {
		conn->tried_completed = conn->qp.completed; /* it lives, or the card is trying */
		return;
	}
	net->keepalives++;
	if (conn->in)
		(void)kvp_vb_credit(conn); /* what cannot be posted shows as a loss */
	else if (kvp_qp_add(&conn->qp, &nothing) == 0)
		kvp_vb_conn_dirty(conn);
}

/* Longer than the card tries: its timer may run four times as long as was asked for. */
static uint64_t patience(const struct kvp_net *net)
{
	uint64_t once_ns = UINT64_C(4096) << net->config.timeout;

	return 4 * once_ns * (net->config.retry_count + 1u) + net->config.keepalive_ns;
}

/* Cards lose their timers: soft RoCE does so at times when the peer's link goes down. Then they
 * never tell what became of a request. */
static bool stuck(struct kvp_vb_conn *conn)
{
	const struct kvp_net *net = conn->net;
	const struct kvp_qp *qp = &conn->qp;

	if (qp->completed != conn->moved_completed || qp->posted == qp->completed) {
		conn->moved_completed = qp->completed;
		conn->moved_ns = net->now_ns;
		return false;
	}
	return net->config.timeout > 0 && conn->rail->empty &&
	       net->now_ns - conn->moved_ns > patience(net);
}

/* Nobody has sent anything over it for long. */
static bool idle(const struct kvp_vb_conn *conn)
{
	const struct kvp_net *net = conn->net;

	return conn->ep && net->config.idle_ns > 0 &&
	       net->now_ns - conn->used_ns >= net->config.idle_ns && conn->qp.n_batch == 0 &&
	       conn->qp.posted == conn->qp.completed;
}

void kvp_vb_conn_tick(struct kvp_net *net)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &net->all, link) {
		if (conn->flushed)
			kvp_vb_conn_fail(conn, -ECONNRESET);
		if (conn->state != KVP_VB_OPEN)
			continue;
		if (stuck(conn))
			kvp_vb_conn_fail(conn, -ETIMEDOUT);
		else if (idle(conn))
			kvp_vb_conn_end(conn);
		else
			keepalive(conn);
	}
}
