/* SPDX-License-Identifier: Apache-2.0 */

/* Connections made by librdmacm, for fabrics where datagrams do not find their way. The queue pairs
 * stay ours: it only finds the route, carries our words, and says what the states need. */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

#define CM_MAGIC 0x4d435642u
#define CM_VERSION 2u
#define RESOLVE_MS 2000
#define BACKLOG 128

/* What travels with a request: who wants to whom, and for which endpoint. The names are random for
 * each lane of each process, so they stand for both. */
struct cm_request {
	uint32_t magic;
	uint8_t version;
	uint8_t fresh;
	uint16_t window;
	uint8_t to[KVP_VB_ID_BYTES], from[KVP_VB_ID_BYTES];
	uint32_t conn, ep;
	uint64_t number;
};
_Static_assert(sizeof(struct cm_request) <= 56, "all that a request has room for");

struct cm_answer {
	uint32_t magic;
	uint8_t version;
	uint8_t zero[3];
	uint32_t receives;
	uint32_t status; /* an errno: rejected */
};

/* Of an event, which has to be given back before anything is destroyed. */
struct cm_event {
	enum rdma_cm_event_type type;
	struct rdma_cm_id *id;
	void *context; /* of the id, which the rail's thread may destroy from then on */
	int status;
	unsigned bytes;
	_Alignas(8) uint8_t data[256];
};

static void sockaddr_of(const uint8_t *gid, uint16_t port, struct sockaddr_storage *out)
{
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
	struct sockaddr_in *v4 = (struct sockaddr_in *)out;

	memset(out, 0, sizeof(*out));
	if (IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)gid)) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		memcpy(&v4->sin_addr, gid + 12, sizeof(v4->sin_addr));
		return;
	}
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons(port);
	memcpy(&v6->sin6_addr, gid, sizeof(v6->sin6_addr));
}

/* For displays. */
static void gid_of(const struct sockaddr *addr, uint8_t gid[16])
{
	memset(gid, 0, 16);
	if (addr->sa_family == AF_INET6) {
		memcpy(gid, &((const struct sockaddr_in6 *)addr)->sin6_addr, 16);
	} else if (addr->sa_family == AF_INET) {
		gid[10] = gid[11] = 0xff;
		memcpy(gid + 12, &((const struct sockaddr_in *)addr)->sin_addr, 4);
	}
}

/* ---- states */

static int plan_state(struct kvp_vb_conn *conn, struct ibv_qp_attr *attr, int *mask)
{
	const struct kvp_net_verbs_config *config = &conn->net->config;

	if (rdma_init_qp_attr(conn->cm, attr, mask) < 0)
		return -errno;
	/* What the configuration says goes before what was agreed upon. */
	attr->path_mtu = KVP_MIN(attr->path_mtu, conn->rail->nic.mtu);
	attr->min_rnr_timer = config->rnr_timer;
	attr->timeout = config->timeout;
	attr->retry_cnt = config->retry_count;
	attr->rnr_retry = 6;
	attr->ah_attr.sl = config->service_level;
	attr->ah_attr.grh.traffic_class = config->traffic_class;
	return 0;
}

/* The kernel asks once more where the peer is, so this is a call that may wait. */
static int bring_up(struct kvp_vb_conn *conn, uint32_t credits)
{
	struct kvp_vb_plan *plan = &conn->plan;
	int r;

	*plan = (struct kvp_vb_plan){
		.join = true,
		.rtr = { .qp_state = IBV_QPS_RTR },
		.rts = { .qp_state = IBV_QPS_RTS },
		.credits = credits,
	};
	r = plan_state(conn, &plan->rtr, &plan->rtr_mask);
	if (r == 0)
		r = plan_state(conn, &plan->rts, &plan->rts_mask);
	if (r == 0)
		kvp_vb_conn_set_up(conn);
	return r;
}

static struct rdma_conn_param param_of(const struct kvp_vb_conn *conn, const void *data,
				       size_t bytes)
{
	return (struct rdma_conn_param){
		.private_data = data,
		.private_data_len = (uint8_t)bytes,
		.retry_count = conn->net->config.retry_count,
		.rnr_retry_count = 6,
		.qp_num = conn->ibv->qp_num,
	};
}

/* ---- who opens */

int kvp_vb_cm_connect(struct kvp_vb_conn *conn)
{
	struct kvp_vb_rail *rail = conn->rail;
	struct sockaddr_storage from, to;

	if (conn->to.port == 0)
		return -EPROTONOSUPPORT; /* the peer has verbs.connect = control */
	if (rdma_create_id(rail->cm, &conn->cm, (void *)(uintptr_t)conn->tag, RDMA_PS_TCP) < 0)
		return -errno;
	sockaddr_of(rail->nic.gid.raw, 0, &from);
	sockaddr_of(conn->to.gid, conn->to.port, &to);
	if (rdma_resolve_addr(conn->cm, (struct sockaddr *)&from, (struct sockaddr *)&to,
			      RESOLVE_MS) < 0)
		return -errno;
	return 0;
}

static int ask(struct kvp_vb_conn *conn)
{
	const struct kvp_net_ep *ep = conn->ep;
	struct cm_request request = {
		.magic = CM_MAGIC,
		.version = CM_VERSION,
		.fresh = !ep->joined,
		.window = (uint16_t)ep->window,
		.conn = conn->tag,
		.ep = ep->id,
		.number = ep->number,
	};
	struct rdma_conn_param param = param_of(conn, &request, sizeof(request));

	memcpy(request.to, ep->peer.id, sizeof(request.to));
	memcpy(request.from, conn->net->address.id, sizeof(request.from));
	return rdma_connect(conn->cm, &param) < 0 ? -errno : 0;
}

static int answered(struct kvp_vb_conn *conn, const struct cm_event *event)
{
	struct cm_answer answer;

	if (conn->call.out)
		return 0; /* it joins already */
	if (event->bytes < sizeof(answer))
		return -EPROTO;
	memcpy(&answer, event->data, sizeof(answer));
	if (answer.magic != CM_MAGIC || answer.version != CM_VERSION)
		return -EPROTO;
	return bring_up(conn, KVP_MIN(answer.receives, KVP_VB_CREDITS_MAX));
}

static int rejected(const struct kvp_vb_conn *conn, const struct cm_event *event)
{
	struct cm_answer answer;
	int r = -ECONNREFUSED;

	if (event->bytes >= sizeof(answer)) {
		memcpy(&answer, event->data, sizeof(answer));
		if (answer.magic == CM_MAGIC && answer.status > 0 && answer.status < 4096)
			r = -(int)answer.status;
	}
	if (conn->ep)
		kvp_vb_ep_rejected(conn->ep, r);
	return r;
}

/* ---- who is asked */

static int take_request(struct kvp_vb_rail *rail, struct rdma_cm_id *id,
			const struct cm_request *request)
{
	struct kvp_vb_datagram ask = {
		.fresh = request->fresh,
		.conn = request->conn,
		.ep = request->ep,
		.window = request->window,
		.number = request->number,
		.end = { .ethernet = rail->nic.ethernet },
	};

	memcpy(ask.from, request->from, sizeof(ask.from));
	gid_of(rdma_get_peer_addr(id), ask.end.gid);
	return kvp_vb_ud_accept(rail, &ask, id);
}

int kvp_vb_cm_accept(struct kvp_vb_conn *conn)
{
	conn->cm->context = (void *)(uintptr_t)conn->tag; /* what it says is the connection's */
	return bring_up(conn, 0);
}

static int say_yes(struct kvp_vb_conn *conn)
{
	const struct cm_answer answer = {
		.magic = CM_MAGIC,
		.version = CM_VERSION,
		.receives = conn->n_recv,
	};
	struct rdma_conn_param param = param_of(conn, &answer, sizeof(answer));

	return rdma_accept(conn->cm, &param);
}

int kvp_vb_cm_joined(struct kvp_vb_conn *conn)
{
	return (conn->in ? say_yes(conn) : rdma_establish(conn->cm)) < 0 ? -errno : 0;
}

static void say_no(struct kvp_net *net, struct rdma_cm_id *id, int status)
{
	const struct cm_answer answer = {
		.magic = CM_MAGIC,
		.version = CM_VERSION,
		.status = (uint32_t)-status,
	};

	net->rejects++;
	(void)rdma_reject(id, &answer, sizeof(answer)); /* else it runs into its time limit */
}

void kvp_vb_cm_refuse(const struct kvp_vb_conn *conn, int status)
{
	say_no(conn->net, conn->cm, status);
}

static void on_request(struct kvp_vb_rail *rail, const struct cm_event *event)
{
	struct kvp_net *net = rail->net;
	struct cm_request request;
	int r = -EPROTO;

	memcpy(&request, event->data, sizeof(request));
	if (event->bytes >= sizeof(request) && request.magic == CM_MAGIC &&
	    request.version == CM_VERSION && !net->closing &&
	    memcmp(request.to, net->address.id, sizeof(request.to)) == 0)
		r = take_request(rail, event->id, &request);
	if (r == 0)
		return;

	say_no(net, event->id, r);
	kvp_vb_cm_drop(rail, event->id);
}

/* ---- events */

/* A step of a connection that we open; what comes when it has failed meanwhile is nobody's. */
static int on_step(struct kvp_vb_conn *conn, const struct cm_event *event)
{
	if (!conn->ep || conn->state != KVP_VB_CONNECTING)
		return 0;
	if (event->type == RDMA_CM_EVENT_ADDR_RESOLVED)
		return rdma_resolve_route(conn->cm, RESOLVE_MS) < 0 ? -errno : 0;
	if (event->type == RDMA_CM_EVENT_ROUTE_RESOLVED)
		return ask(conn);
	return answered(conn, event);
}

static void on_conn(struct kvp_vb_conn *conn, const struct cm_event *event)
{
	int r = 0;

	switch (event->type) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		r = on_step(conn, event);
		break;
	case RDMA_CM_EVENT_REJECTED:
		r = rejected(conn, event);
		break;
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
	case RDMA_CM_EVENT_CONNECT_ERROR:
		r = -EHOSTUNREACH;
		break;
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		r = -ENODEV;
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		if (conn->in)
			kvp_vb_conn_end(conn); /* as a BYE */
		else
			r = -ECONNRESET;
		break;
	default:
		break; /* nothing to be done */
	}
	if (r < 0)
		kvp_vb_conn_fail(conn, r);
}

int kvp_vb_cm_events(struct kvp_vb_rail *rail)
{
	struct rdma_cm_event *given;
	int n = 0;

	while (rail->cm && rdma_get_cm_event(rail->cm, &given) == 0) {
		struct cm_event event = {
			.type = given->event,
			.id = given->id,
			.context = given->id->context,
			.status = given->status,
			.bytes = given->param.conn.private_data_len,
		};
		struct kvp_vb_conn *conn;

		if (given->param.conn.private_data)
			memcpy(event.data, given->param.conn.private_data, event.bytes);
		else
			event.bytes = 0;
		(void)rdma_ack_cm_event(given); /* the copy is ours */
		n++;
		if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) {
			on_request(rail, &event);
			continue;
		}
		conn = kvp_vb_conn_find(rail->net, (uint32_t)(uintptr_t)event.context);
		if (conn && conn->cm == event.id)
			on_conn(conn, &event);
	}
	return n;
}

/* ---- life */

int kvp_vb_cm_init(struct kvp_vb_rail *rail)
{
	struct sockaddr_storage addr;
	int flags;

	rail->cm = rdma_create_event_channel();
	if (!rail->cm)
		return -errno;
	flags = fcntl(rail->cm->fd, F_GETFL);
	if (flags < 0 || fcntl(rail->cm->fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return -errno;
	if (rdma_create_id(rail->cm, &rail->listener, NULL, RDMA_PS_TCP) < 0)
		return -errno;
	sockaddr_of(rail->nic.gid.raw, 0, &addr);
	if (rdma_bind_addr(rail->listener, (struct sockaddr *)&addr) < 0 ||
	    rdma_listen(rail->listener, BACKLOG) < 0)
		return -errno;
	rail->cm_port = ntohs(rdma_get_src_port(rail->listener));
	return 0;
}

/* The end of an id tells the peer, by a datagram of the kernel's own queue pair. While the port is
 * down it could not leave, and after a datagram that could not leave soft RoCE's never receives
 * anything again: nobody would be connected any more until the device is made anew. */
static bool is_parked(const struct kvp_vb_rail *rail)
{
	return rail->port_down && !rail->dead && !rail->net->closing &&
	       rail->n_parked < KVP_VB_CONNS;
}

/* On the rail's thread: who destroys an id waits for what is said of it, and until all events of it
 * were given back. */
static void destroy_id(struct kvp_vb_call *call)
{
	(void)rdma_destroy_id(KVP_CONTAINER_OF(call, struct kvp_vb_id, call)->id);
}

static void id_over(struct kvp_vb_call *call)
{
	free(KVP_CONTAINER_OF(call, struct kvp_vb_id, call));
}

static void end_id(struct kvp_vb_rail *rail, struct kvp_vb_id *ended)
{
	ended->call.what = "the end of a connection's id";
	ended->call.run = destroy_id;
	ended->call.done = id_over;
	kvp_vb_call(rail, &ended->call);
}

void kvp_vb_cm_drop(struct kvp_vb_rail *rail, struct rdma_cm_id *id)
{
	struct kvp_vb_id *ended = calloc(1, sizeof(*ended));

	if (!ended) {
		(void)rdma_destroy_id(
			id); /* no event of it is kept; without memory the lane waits */
		return;
	}
	ended->id = id;
	if (!is_parked(rail)) {
		end_id(rail, ended);
		return;
	}
	SLIST_INSERT_HEAD(&rail->parked, ended, link);
	rail->n_parked++;
}

void kvp_vb_cm_drop_parked(struct kvp_vb_rail *rail)
{
	struct kvp_vb_id *ended;

	while ((ended = SLIST_FIRST(&rail->parked))) {
		SLIST_REMOVE_HEAD(&rail->parked, link);
		rail->n_parked--;
		end_id(rail, ended);
	}
}

/* No call is out, and what is called from now on is done at once. */
void kvp_vb_cm_fini(struct kvp_vb_rail *rail)
{
	kvp_vb_cm_drop_parked(rail);
	if (rail->listener)
		(void)rdma_destroy_id(rail->listener); /* no event of it is kept */
	if (rail->cm)
		rdma_destroy_event_channel(rail->cm);
	rail->listener = NULL;
	rail->cm = NULL;
}
