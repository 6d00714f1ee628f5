/* SPDX-License-Identifier: Apache-2.0 */

/* Datagrams: the address of a net, and how connections are asked for and granted. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

#define ADDRESS_MAGIC 0x42565641u
#define DATAGRAM_MAGIC 0x4256564bu
#define VERSION 3u
#define UD_RECV_BYTES (KVP_VB_GRH_BYTES + KVP_VB_UD_BYTES)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs are sent as they lie");

/* ---- address */

static uint64_t address_hash(const struct kvp_vb_address *address)
{
	return XXH3_64bits(address, offsetof(struct kvp_vb_address, hash));
}

void kvp_vb_address_seal(struct kvp_vb_address *address)
{
	address->magic = ADDRESS_MAGIC;
	address->version = VERSION;
	address->hash = address_hash(address);
}

int kvp_vb_address_check(const void *addr, size_t addr_bytes, struct kvp_vb_address *out)
{
	if (!addr || addr_bytes != sizeof(*out))
		return -EPROTO;

	memcpy(out, addr, sizeof(*out));
	if (out->magic != ADDRESS_MAGIC || out->version != VERSION ||
	    out->hash != address_hash(out) || out->n_ends == 0 || out->n_ends > KVP_VB_RAILS)
		return -EPROTO;
	return 0;
}

struct ibv_ah_attr kvp_vb_way(const struct kvp_vb_rail *rail, const struct kvp_vb_end *to)
{
	const struct kvp_net_verbs_config *config = &rail->net->config;
	struct ibv_ah_attr attr = {
		.is_global = 1,
		.dlid = to->lid,
		.sl = config->service_level,
		.port_num = rail->nic.port,
		.grh = {
			.sgid_index = (uint8_t)rail->nic.gid_index,
			.hop_limit = 64,
			.traffic_class = config->traffic_class,
		},
	};

	memcpy(attr.grh.dgid.raw, to->gid, sizeof(attr.grh.dgid.raw));
	return attr;
}

/* ---- sending */

/* Posts at once: an address handle must not be destroyed before. */
static void send_to(struct kvp_vb_rail *rail, struct ibv_ah *ah, const struct kvp_vb_end *to,
		    struct kvp_vb_datagram *datagram)
{
	struct kvp_net *net = rail->net;
	uint64_t seq = rail->ud_qp.posted + 1;
	uint8_t *buffer = rail->ud_memory + seq % KVP_VB_UD_DEPTH * KVP_VB_UD_BYTES;
	struct ibv_sge sge = {
		.addr = (uintptr_t)buffer,
		.length = sizeof(*datagram),
		.lkey = rail->ud_mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = rail->ud_qp.tag | (seq & KVP_QP_SEQ_MASK),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ah, .remote_qpn = to->qpn, .remote_qkey = to->qkey },
	};
	struct ibv_send_wr *bad;

	if (!ah || kvp_qp_room(&rail->ud_qp) == 0)
		return; /* whoever needs it repeats it */

	datagram->magic = DATAGRAM_MAGIC;
	datagram->version = VERSION;
	datagram->mtu = (uint8_t)rail->nic.mtu;
	datagram->end = net->address.ends[rail->idx];
	memcpy(datagram->from, net->address.id, sizeof(datagram->from));
	memcpy(buffer, datagram, sizeof(*datagram));
	if (ibv_post_send(rail->ud, &wr, &bad) == 0)
		rail->ud_qp.posted++;
}

void kvp_vb_ud_send(struct kvp_vb_conn *conn, enum kvp_vb_ud_type type)
{
	struct kvp_vb_datagram datagram = {
		.type = (uint8_t)type,
		.conn = conn->in ? conn->peer_conn : conn->tag,
		.ep = conn->in ? conn->in->ep : conn->ep->id,
		.qpn = conn->qpn,
		.psn = conn->psn,
	};

	if (conn->in) {
		datagram.receives = conn->n_recv;
		memcpy(datagram.to, conn->in->id, sizeof(datagram.to));
	} else {
		datagram.fresh = !conn->ep->joined;
		datagram.window = conn->ep->window;
		datagram.number = conn->ep->number;
		memcpy(datagram.to, conn->ep->peer.id, sizeof(datagram.to));
	}
	send_to(conn->rail, conn->ah, &conn->to, &datagram);
}

/* ---- receiving */

static struct kvp_vb_conn *conn_of(struct kvp_vb_in *in, uint32_t number)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &in->net->all, link) {
		if (conn->in == in && conn->peer_conn == number)
			return conn;
	}
	return NULL;
}

static void find_way(struct kvp_vb_call *call)
{
	struct kvp_vb_refusal *refusal = KVP_CONTAINER_OF(call, struct kvp_vb_refusal, call);

	if (refusal->old)
		(void)ibv_destroy_ah(refusal->old);
	refusal->ah = ibv_create_ah(call->rail->pd, &refusal->way);
}

static void send_refusal(struct kvp_vb_call *call)
{
	struct kvp_vb_refusal *refusal = KVP_CONTAINER_OF(call, struct kvp_vb_refusal, call);
	struct kvp_vb_rail *rail = call->rail;

	rail->reject_ah = refusal->ah;
	refusal->ah = refusal->old = NULL;
	send_to(rail, rail->reject_ah, &refusal->end, &refusal->datagram);
}

/* One at a time: others ask again. */
static void reject(struct kvp_vb_rail *rail, const struct kvp_vb_datagram *request, int status)
{
	struct kvp_vb_refusal *refusal = &rail->refusal;

	rail->net->rejects++;
	if (refusal->call.out)
		return;

	refusal->old = rail->reject_ah;
	rail->reject_ah = NULL;
	refusal->end = request->end;
	refusal->way = kvp_vb_way(rail, &request->end);
	refusal->datagram = (struct kvp_vb_datagram){
		.type = KVP_VB_REJECT,
		.conn = request->conn,
		.ep = request->ep,
		.status = (uint32_t)-status,
	};
	memcpy(refusal->datagram.to, request->from, sizeof(request->from));
	refusal->call.what = "the way to a peer";
	refusal->call.run = find_way;
	refusal->call.done = send_refusal;
	kvp_vb_call(rail, &refusal->call);
}

void kvp_vb_ud_refuse(const struct kvp_vb_conn *conn, int status)
{
	struct kvp_vb_datagram request = {
		.conn = conn->peer_conn,
		.ep = conn->in->ep,
		.end = conn->to,
	};

	memcpy(request.from, conn->in->id, sizeof(request.from));
	reject(conn->rail, &request, status);
}

static int accept_conn(struct kvp_vb_rail *rail, struct kvp_vb_in *in,
		       const struct kvp_vb_datagram *request, struct rdma_cm_id *cm)
{
	struct kvp_vb_conn *conn;
	int r = kvp_vb_conn_create(rail, NULL, in, &conn);

	if (r < 0)
		return r;

	conn->to = request->end;
	conn->peer_conn = request->conn;
	conn->cm = cm;
	if (!cm) {
		kvp_vb_conn_join(conn, request);
		return 0;
	}
	r = kvp_vb_cm_accept(conn);
	if (r < 0) {
		conn->cm = NULL; /* who rejects needs it */
		kvp_vb_conn_leave(conn);
	}
	return r;
}

static bool is_admitted(const struct kvp_net *net, uint64_t number)
{
	return !net->events->admits || net->events->admits(net->arg, number);
}

/* What is left of sessions that are over, and of which no endpoint of ours says so. */
static void drop_left(struct kvp_net *net)
{
	const struct kvp_net_ep *ep;
	struct kvp_vb_in *in;

	TAILQ_FOREACH (in, &net->ins, link) {
		ep = TAILQ_FIRST(&net->eps);
		while (ep && ep->number != in->number)
			ep = TAILQ_NEXT(ep, link);
		if (!ep && !is_admitted(net, in->number))
			kvp_vb_in_end(in);
	}
}

/* A new endpoint of a peer: of a session that is up, which has no more of them than it needs. */
static int admit(struct kvp_net *net, uint64_t number)
{
	const uint32_t most = number ? KVP_VB_SESSION_INS : KVP_VB_NUMBERLESS_INS;
	const struct kvp_vb_in *in;
	uint32_t n = 0;

	if (net->n_ins >= KVP_VB_INS / 2)
		drop_left(net);
	TAILQ_FOREACH (in, &net->ins, link)
		n += in->number == number;
	if (n < most && is_admitted(net, number))
		return 0;
	net->stats.strangers++;
	return n < most ? -EPERM : -EDQUOT;
}

/* An endpoint that has sent something was known here, or what it sent is lost. */
int kvp_vb_ud_accept(struct kvp_vb_rail *rail, const struct kvp_vb_datagram *request,
		     struct rdma_cm_id *cm)
{
	struct kvp_vb_in *in = kvp_vb_in_find(rail->net, request->from, request->ep);
	bool new = !in;
	int r;

	if (request->end.ethernet != rail->nic.ethernet)
		return -EHOSTUNREACH;
	if (new && !request->fresh)
		return -ECONNRESET;
	if (new) {
		r = admit(rail->net, request->number);
		if (r == 0)
			r = kvp_vb_in_create(rail->net, request, &in);
		if (r < 0)
			return r;
	}
	r = accept_conn(rail, in, request, cm);
	if (r < 0 && new)
		kvp_vb_in_end(in);
	return r;
}

static void on_request(struct kvp_vb_rail *rail, const struct kvp_vb_datagram *request)
{
	struct kvp_vb_in *in = kvp_vb_in_find(rail->net, request->from, request->ep);
	struct kvp_vb_conn *conn = in ? conn_of(in, request->conn) : NULL;
	int r;

	kvp_vb_ep_learn(rail->net, request->from, &request->end);
	if (conn) {
		if (conn->state == KVP_VB_OPEN)
			kvp_vb_ud_send(conn, KVP_VB_REPLY); /* again: the last was lost */
		return;
	}
	r = kvp_vb_ud_accept(rail, request, NULL);
	if (r < 0)
		reject(rail, request, r);
}

static void on_reply(struct kvp_net *net, const struct kvp_vb_datagram *reply)
{
	struct kvp_vb_conn *conn = kvp_vb_conn_find(net, reply->conn);
	int r;

	if (!conn || !conn->ep || conn->state != KVP_VB_CONNECTING ||
	    memcmp(conn->ep->peer.id, reply->from, sizeof(reply->from)) != 0)
		return;

	if (reply->type == KVP_VB_REJECT) {
		r = reply->status > 0 && reply->status < 4096 ? -(int)reply->status : -ECONNREFUSED;
		kvp_vb_ep_rejected(conn->ep, r);
		kvp_vb_conn_fail(conn, r);
		return;
	}
	kvp_vb_conn_join(conn, reply);
}

static void on_bye(struct kvp_net *net, const struct kvp_vb_datagram *bye)
{
	struct kvp_vb_in *in = kvp_vb_in_find(net, bye->from, bye->ep);
	struct kvp_vb_conn *conn = in ? conn_of(in, bye->conn) : NULL;

	if (conn)
		kvp_vb_conn_end(conn);
}

static void on_datagram(struct kvp_vb_rail *rail, const void *data, size_t bytes)
{
	struct kvp_net *net = rail->net;
	struct kvp_vb_datagram datagram;

	if (bytes != sizeof(datagram))
		return;

	memcpy(&datagram, data, sizeof(datagram));
	if (datagram.magic != DATAGRAM_MAGIC || datagram.version != VERSION || net->closing ||
	    memcmp(datagram.to, net->address.id, sizeof(datagram.to)) != 0)
		return; /* a stranger's, or for a net that was here before */

	switch (datagram.type) {
	case KVP_VB_REQUEST:
		on_request(rail, &datagram);
		break;
	case KVP_VB_REPLY:
	case KVP_VB_REJECT:
		on_reply(net, &datagram);
		break;
	case KVP_VB_BYE:
		on_bye(net, &datagram);
		break;
	default:
		break;
	}
}

static void nobody(void *arg, void *user, int status)
{
	(void)arg;
	(void)user;
	(void)status;
}

void kvp_vb_ud_complete(struct kvp_vb_rail *rail, const struct ibv_wc *wc)
{
	uint32_t idx = (uint32_t)(wc->wr_id & KVP_QP_SEQ_MASK);

	if (!kvp_qp_wr_is_recv(wc->wr_id)) {
		(void)kvp_qp_complete(&rail->ud_qp, wc, nobody, NULL); /* lost ones are repeated */
		return;
	}
	if (idx >= KVP_VB_UD_DEPTH || wc->status != IBV_WC_SUCCESS)
		return;
	if (wc->byte_len >= KVP_VB_GRH_BYTES)
		on_datagram(rail,
			    (const uint8_t *)(uintptr_t)rail->ud_rq.base + idx * UD_RECV_BYTES +
				    KVP_VB_GRH_BYTES,
			    wc->byte_len - KVP_VB_GRH_BYTES);
	(void)kvp_rq_give(&rail->ud_rq, idx); /* a lost queue pair shows when something is sent */
}

static int ud_up(struct kvp_vb_rail *rail)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = rail->net->config.pkey_index,
		.port_num = rail->nic.port,
		.qkey = rail->net->address.ends[rail->idx].qkey,
	};
	int r = ibv_modify_qp(rail->ud, &attr,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);

	attr.qp_state = IBV_QPS_RTR;
	if (r == 0)
		r = ibv_modify_qp(rail->ud, &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 0;
	if (r == 0)
		r = ibv_modify_qp(rail->ud, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
	return -r;
}

static int ud_receives(struct kvp_vb_rail *rail)
{
	int r = 0;

	kvp_rq_init(&rail->ud_rq, rail->ud, 0, rail->ud_mr,
		    rail->ud_memory + KVP_VB_UD_DEPTH * KVP_VB_UD_BYTES, UD_RECV_BYTES);
	for (uint32_t i = 0; r == 0 && i < KVP_VB_UD_DEPTH; i++)
		r = kvp_rq_give(&rail->ud_rq, i);
	return r == 0 ? kvp_rq_ring(&rail->ud_rq) : r;
}

/* A datagram that could not leave, as while the link is down, stops the queue pair for good. Its
 * number is known to peers, so it is the same one that comes back. */
static void ud_revive(struct kvp_vb_rail *rail)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	uint64_t now = rail->net->now_ns;

	if (rail->ud_qp.state == KVP_QP_OPEN)
		return;
	if (rail->ud_failed_ns == 0)
		rail->ud_failed_ns = now;
	if (rail->ud_qp.state == KVP_QP_FAILED && now - rail->ud_failed_ns >= KVP_VB_DRAIN_NS)
		kvp_qp_abandon(&rail->ud_qp, nobody, NULL);
	/* Receives from before are all seen first: they are given again below. */
	if (rail->ud_qp.state != KVP_QP_DRAINED || !kvp_vb_rail_up(rail) || !rail->empty)
		return;
	if (ibv_modify_qp(rail->ud, &attr, IBV_QP_STATE) != 0 || ud_up(rail) < 0 ||
	    ud_receives(rail) < 0)
		return; /* the next tick tries again */
	rail->ud_qp.state = KVP_QP_OPEN;
	rail->ud_failed_ns = 0;
}

void kvp_vb_ud_tick(struct kvp_net *net)
{
	struct kvp_vb_conn *conn;

	for (unsigned i = 0; i < net->n_rails; i++)
		ud_revive(&net->rails[i]);
	if (net->n_connecting == 0)
		return;
	TAILQ_FOREACH (conn, &net->all, link) {
		if (conn->state != KVP_VB_CONNECTING)
			continue;
		if (net->now_ns - conn->since_ns > KVP_VB_CONNECT_NS) {
			kvp_vb_conn_fail(conn, -ETIMEDOUT);
		} else if (conn->ep && !conn->cm && !conn->call.out &&
			   net->now_ns >= conn->repeat_ns) {
			kvp_vb_ud_send(conn, KVP_VB_REQUEST);
			conn->repeat_ns = net->now_ns + KVP_VB_REPEAT_NS;
		}
	}
}

/* ---- life */

int kvp_vb_ud_init(struct kvp_vb_rail *rail)
{
	struct ibv_qp_init_attr init = {
		.send_cq = rail->cq,
		.recv_cq = rail->cq,
		.cap = { KVP_VB_UD_DEPTH + 1, KVP_VB_UD_DEPTH, 1, 1, 0 },
		.qp_type = IBV_QPT_UD,
	};
	size_t bytes = KVP_VB_UD_DEPTH * (KVP_VB_UD_BYTES + UD_RECV_BYTES);
	int r;

	rail->ud_memory = calloc(1, bytes);
	if (!rail->ud_memory)
		return -ENOMEM;
	rail->ud_mr = ibv_reg_mr(rail->pd, rail->ud_memory, bytes, IBV_ACCESS_LOCAL_WRITE);
	if (!rail->ud_mr)
		return -errno;
	rail->ud = ibv_create_qp(rail->pd, &init);
	if (!rail->ud)
		return -errno;
	r = kvp_qp_init(&rail->ud_qp, rail->ud, KVP_VB_UD_DEPTH, 0);
	if (r == 0)
		r = ud_up(rail);
	if (r < 0)
		return r;

	rail->ud_qp.all_signaled = true; /* a marker would need an address */

	return ud_receives(rail);
}

void kvp_vb_ud_fini(struct kvp_vb_rail *rail)
{
	if (rail->ud)
		(void)ibv_destroy_qp(rail->ud); /* cannot fail: nothing else refers to it */
	kvp_qp_fini(&rail->ud_qp);
	if (rail->reject_ah)
		(void)ibv_destroy_ah(rail->reject_ah); /* no call is out */
	if (rail->ud_mr)
		(void)ibv_dereg_mr(rail->ud_mr);
	free(rail->ud_memory);
}
