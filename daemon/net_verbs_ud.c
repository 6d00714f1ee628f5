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
#define VERSION 1u
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

int kvp_vb_address_check(const struct kvp_net *net, const void *addr, size_t addr_bytes,
			 struct kvp_vb_address *out)
{
	if (!addr || addr_bytes != sizeof(*out))
		return -EPROTO;

	memcpy(out, addr, sizeof(*out));
	if (out->magic != ADDRESS_MAGIC || out->version != VERSION ||
	    out->hash != address_hash(out))
		return -EPROTO;
	if (out->ethernet != net->nic.ethernet)
		return -EHOSTUNREACH;
	return 0;
}

struct ibv_ah_attr kvp_vb_way(const struct kvp_net *net, const uint8_t *gid, uint16_t lid)
{
	struct ibv_ah_attr attr = {
		.is_global = 1,
		.dlid = lid,
		.sl = net->config.service_level,
		.port_num = net->nic.port,
		.grh = {
			.sgid_index = (uint8_t)net->nic.gid_index,
			.hop_limit = 64,
			.traffic_class = net->config.traffic_class,
		},
	};

	memcpy(attr.grh.dgid.raw, gid, sizeof(attr.grh.dgid.raw));
	return attr;
}

/* ---- sending */

int kvp_vb_ud_ah(struct kvp_net_ep *ep)
{
	struct ibv_ah_attr attr = kvp_vb_way(ep->net, ep->peer.gid, ep->peer.lid);

	ep->ah = ibv_create_ah(ep->net->pd, &attr);
	return ep->ah ? 0 : -errno;
}

/* Posts at once: an address handle must not be destroyed before. */
static void send_to(struct kvp_net *net, struct ibv_ah *ah, const struct kvp_vb_address *to,
		    struct kvp_vb_datagram *datagram)
{
	uint64_t seq = net->ud_qp.posted + 1;
	uint8_t *buffer = net->ud_memory + seq % KVP_VB_UD_DEPTH * KVP_VB_UD_BYTES;
	struct ibv_sge sge = {
		.addr = (uintptr_t)buffer,
		.length = sizeof(*datagram),
		.lkey = net->ud_mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = net->ud_qp.tag | (seq & KVP_QP_SEQ_MASK),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ah, .remote_qpn = to->qpn, .remote_qkey = to->qkey },
	};
	struct ibv_send_wr *bad;

	if (!ah || kvp_qp_room(&net->ud_qp) == 0)
		return; /* whoever needs it repeats it */

	datagram->magic = DATAGRAM_MAGIC;
	datagram->version = VERSION;
	datagram->mtu = (uint8_t)net->nic.mtu;
	datagram->ethernet = net->nic.ethernet;
	datagram->lid = net->nic.lid;
	datagram->ud_qpn = net->address.qpn;
	datagram->ud_qkey = net->address.qkey;
	memcpy(datagram->to, to->id, sizeof(datagram->to));
	memcpy(datagram->from, net->address.id, sizeof(datagram->from));
	memcpy(datagram->gid, net->nic.gid.raw, sizeof(datagram->gid));
	memcpy(buffer, datagram, sizeof(*datagram));
	if (ibv_post_send(net->ud, &wr, &bad) == 0)
		net->ud_qp.posted++;
}

void kvp_vb_ud_send(struct kvp_net_ep *ep, enum kvp_vb_ud_type type)
{
	struct kvp_vb_datagram datagram = {
		.type = (uint8_t)type,
		.conn = ep->passive ? ep->peer_conn : ep->tag,
		.qpn = ep->ibv ? ep->ibv->qp_num : 0,
		.psn = ep->psn,
		.receives = ep->passive ? ep->n_recv : 0,
	};

	send_to(ep->net, ep->ah, &ep->peer, &datagram);
}

/* ---- receiving */

static struct kvp_net_ep *passive_find(struct kvp_net *net, const struct kvp_vb_datagram *datagram)
{
	struct kvp_net_ep *ep;

	TAILQ_FOREACH (ep, &net->passive, link) {
		if (ep->peer_conn == datagram->conn &&
		    memcmp(ep->peer.id, datagram->from, sizeof(datagram->from)) == 0)
			return ep;
	}
	return NULL;
}

static void peer_of(const struct kvp_vb_datagram *datagram, struct kvp_vb_address *peer)
{
	*peer = (struct kvp_vb_address){
		.lid = datagram->lid,
		.qpn = datagram->ud_qpn,
		.qkey = datagram->ud_qkey,
		.ethernet = datagram->ethernet,
	};
	memcpy(peer->gid, datagram->gid, sizeof(peer->gid));
	memcpy(peer->id, datagram->from, sizeof(peer->id));
}

static void reject(struct kvp_net *net, const struct kvp_vb_datagram *request, int status)
{
	struct kvp_vb_datagram datagram = {
		.type = KVP_VB_REJECT,
		.conn = request->conn,
		.status = (uint16_t)-status,
	};
	struct ibv_ah_attr attr = kvp_vb_way(net, request->gid, request->lid);
	struct kvp_vb_address peer;

	net->rejects++;
	if (net->reject_ah)
		(void)ibv_destroy_ah(net->reject_ah);
	net->reject_ah = ibv_create_ah(net->pd, &attr);
	peer_of(request, &peer);
	send_to(net, net->reject_ah, &peer, &datagram);
}

static int accept_request(struct kvp_net *net, const struct kvp_vb_datagram *request,
			  struct kvp_net_ep **out)
{
	struct kvp_net_ep *ep;
	int r = kvp_vb_conn_create(net, true, &ep);

	if (r < 0)
		return r;

	peer_of(request, &ep->peer);
	ep->peer_conn = request->conn;
	r = kvp_vb_ud_ah(ep);
	if (r == 0)
		r = kvp_vb_conn_up(ep, request);
	if (r < 0) {
		kvp_vb_conn_destroy(ep);
		return r;
	}
	ep->credits = KVP_VB_BACK_DEPTH;
	*out = ep;
	return 0;
}

static void on_request(struct kvp_net *net, const struct kvp_vb_datagram *request)
{
	struct kvp_net_ep *ep = passive_find(net, request);
	int r = 0;

	if (request->ethernet != net->nic.ethernet)
		r = -EHOSTUNREACH;
	else if (!ep)
		r = accept_request(net, request, &ep);
	if (r < 0)
		reject(net, request, r);
	else if (ep->state == KVP_VB_OPEN)
		kvp_vb_ud_send(ep, KVP_VB_REPLY); /* the first, or again: the last was lost */
}

static void on_reply(struct kvp_net *net, const struct kvp_vb_datagram *reply)
{
	struct kvp_net_ep *ep = kvp_vb_conn_find(net, reply->conn);
	int r;

	if (!ep || ep->passive || ep->state != KVP_VB_CONNECTING ||
	    memcmp(ep->peer.id, reply->from, sizeof(reply->from)) != 0)
		return;

	if (reply->type == KVP_VB_REJECT) {
		kvp_vb_conn_fail(ep, reply->status ? -(int)reply->status : -ECONNREFUSED);
		return;
	}
	r = kvp_vb_conn_up(ep, reply);
	if (r < 0) {
		kvp_vb_conn_fail(ep, r);
		return;
	}
	ep->credits = KVP_MIN(reply->receives, KVP_VB_CREDITS_MAX);
}

static void on_bye(struct kvp_net *net, const struct kvp_vb_datagram *bye)
{
	struct kvp_net_ep *ep = passive_find(net, bye);

	if (ep)
		kvp_vb_conn_destroy(ep);
}

static void on_datagram(struct kvp_net *net, const void *data, size_t bytes)
{
	struct kvp_vb_datagram datagram;

	if (bytes != sizeof(datagram))
		return;

	memcpy(&datagram, data, sizeof(datagram));
	if (datagram.magic != DATAGRAM_MAGIC || datagram.version != VERSION || net->closing ||
	    memcmp(datagram.to, net->address.id, sizeof(datagram.to)) != 0)
		return; /* a stranger's, or for a net that was here before */

	switch (datagram.type) {
	case KVP_VB_REQUEST:
		on_request(net, &datagram);
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

void kvp_vb_ud_complete(struct kvp_net *net, const struct ibv_wc *wc)
{
	uint32_t idx = (uint32_t)(wc->wr_id & KVP_QP_SEQ_MASK);

	if (!kvp_qp_wr_is_recv(wc->wr_id)) {
		(void)kvp_qp_complete(&net->ud_qp, wc, nobody, NULL); /* lost ones are repeated */
		return;
	}
	if (idx >= KVP_VB_UD_DEPTH || wc->status != IBV_WC_SUCCESS)
		return;
	if (wc->byte_len >= KVP_VB_GRH_BYTES)
		on_datagram(net,
			    (const uint8_t *)(uintptr_t)net->ud_rq.base + idx * UD_RECV_BYTES +
				    KVP_VB_GRH_BYTES,
			    wc->byte_len - KVP_VB_GRH_BYTES);
	(void)kvp_rq_give(&net->ud_rq, idx); /* a lost queue pair shows when something is sent */
}

static int ud_up(struct kvp_net *net)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = net->config.pkey_index,
		.port_num = net->nic.port,
		.qkey = net->address.qkey,
	};
	int r = ibv_modify_qp(net->ud, &attr,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);

	attr.qp_state = IBV_QPS_RTR;
	if (r == 0)
		r = ibv_modify_qp(net->ud, &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 0;
	if (r == 0)
		r = ibv_modify_qp(net->ud, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
	return -r;
}

static int ud_receives(struct kvp_net *net)
{
	int r = 0;

	kvp_rq_init(&net->ud_rq, net->ud, 0, net->ud_mr,
		    net->ud_memory + KVP_VB_UD_DEPTH * KVP_VB_UD_BYTES, UD_RECV_BYTES);
	for (uint32_t i = 0; r == 0 && i < KVP_VB_UD_DEPTH; i++)
		r = kvp_rq_give(&net->ud_rq, i);
	return r == 0 ? kvp_rq_ring(&net->ud_rq) : r;
}

/* A datagram that could not leave, as while the link is down, stops the queue pair for good. Its
 * number is known to peers, so it is the same one that comes back. */
static void ud_revive(struct kvp_net *net)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

	if (net->ud_qp.state != KVP_QP_DRAINED || net->dead || net->port_down)
		return;
	if (ibv_modify_qp(net->ud, &attr, IBV_QP_STATE) != 0 || ud_up(net) < 0 ||
	    ud_receives(net) < 0)
		return; /* the next tick tries again */
	net->ud_qp.state = KVP_QP_OPEN;
}

void kvp_vb_ud_tick(struct kvp_net *net)
{
	struct kvp_net_ep *ep;

	ud_revive(net);
	TAILQ_FOREACH (ep, &net->eps, link) {
		if (ep->state != KVP_VB_CONNECTING)
			continue;
		if (net->now_ns - ep->since_ns > KVP_VB_CONNECT_NS) {
			kvp_vb_conn_fail(ep, -ETIMEDOUT);
		} else if (net->now_ns >= ep->repeat_ns) {
			kvp_vb_ud_send(ep, KVP_VB_REQUEST);
			ep->repeat_ns = net->now_ns + KVP_VB_REPEAT_NS;
		}
	}
}

/* ---- life */

int kvp_vb_ud_init(struct kvp_net *net)
{
	struct ibv_qp_init_attr init = {
		.send_cq = net->cq,
		.recv_cq = net->cq,
		.cap = { KVP_VB_UD_DEPTH + 1, KVP_VB_UD_DEPTH, 1, 1, 0 },
		.qp_type = IBV_QPT_UD,
	};
	size_t bytes = KVP_VB_UD_DEPTH * (KVP_VB_UD_BYTES + UD_RECV_BYTES);
	int r;

	net->ud_memory = calloc(1, bytes);
	if (!net->ud_memory)
		return -ENOMEM;
	net->ud_mr = ibv_reg_mr(net->pd, net->ud_memory, bytes, IBV_ACCESS_LOCAL_WRITE);
	if (!net->ud_mr)
		return -errno;
	net->ud = ibv_create_qp(net->pd, &init);
	if (!net->ud)
		return -errno;
	r = kvp_qp_init(&net->ud_qp, net->ud, KVP_VB_UD_DEPTH, 0);
	if (r == 0)
		r = ud_up(net);
	if (r < 0)
		return r;

	net->ud_qp.all_signaled = true; /* a marker would need an address */

	return ud_receives(net);
}

void kvp_vb_ud_fini(struct kvp_net *net)
{
	if (net->ud)
		(void)ibv_destroy_qp(net->ud); /* cannot fail: nothing else refers to it */
	kvp_qp_fini(&net->ud_qp);
	if (net->reject_ah)
		(void)ibv_destroy_ah(net->reject_ah);
	if (net->ud_mr)
		(void)ibv_dereg_mr(net->ud_mr);
	free(net->ud_memory);
}
