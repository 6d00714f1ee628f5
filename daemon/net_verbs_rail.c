/* SPDX-License-Identifier: Apache-2.0 */

/* A rail: one port of one device, and what the device says by itself. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

/* ---- asynchronous events */

static void fail_all(struct kvp_vb_rail *rail, int status)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &rail->net->all, link) {
		if (conn->rail == rail)
			kvp_vb_conn_fail(conn, status);
	}
}

static void fail_qp(struct kvp_vb_rail *rail, const struct ibv_qp *qp)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &rail->net->all, link) {
		if (conn->ibv == qp)
			kvp_vb_conn_fail(conn, -EREMOTEIO);
	}
}

static void limit_mtu(struct kvp_vb_rail *rail)
{
	uint32_t most = rail->net->config.mtu;
	enum ibv_mtu wish = IBV_MTU_256;

	if (most == 0)
		return;
	while (wish < IBV_MTU_4096 && (128u << wish) < most)
		wish++;
	rail->nic.mtu = KVP_MIN(rail->nic.mtu, wish);
}

/* What peers are told. One that is down has no address. */
static void make_end(struct kvp_vb_rail *rail)
{
	struct kvp_vb_end *end = &rail->net->address.ends[rail->idx];

	*end = (struct kvp_vb_end){
		.qpn = rail->ud->qp_num,
		.qkey = end->qkey,
		.ethernet = rail->nic.ethernet,
		.number = rail->nic.number,
		.port = rail->cm_port,
	};
	if (rail->nic.down)
		return;
	end->lid = rail->nic.lid;
	memcpy(end->gid, rail->nic.gid.raw, sizeof(end->gid));
}

static int watch(int epoll_fd, int fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
	    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		return -errno;
	return 0;
}

/* Listening needs an address. */
static int open_cm(struct kvp_vb_rail *rail)
{
	int r;

	if (!rail->net->config.rdma_cm || rail->listener || rail->nic.down)
		return 0;
	r = kvp_vb_cm_init(rail);
	if (r == 0)
		r = watch(rail->net->epoll_fd, rail->cm->fd);
	if (r < 0)
		kvp_vb_cm_fini(rail);
	return r;
}

/* An address may come long after its port, and another one than there was before. */
static void look_again(struct kvp_vb_rail *rail)
{
	struct kvp_net *net = rail->net;
	struct kvp_vb_end before = net->address.ends[rail->idx];
	struct kvp_nic nic = rail->nic;
	char why[128] = "";
	int r = kvp_nic_look(&nic, rail->context, net->config.gid_index, why, sizeof(why));

	rail->looked_ns = net->now_ns;
	if (r < 0)
		return; /* the next look, unless the port goes down again */

	rail->nic = nic;
	limit_mtu(rail);
	r = open_cm(rail);
	if (r < 0) {
		kvp_log(KVP_LOG_WARNING, "verbs %s: rdma_cm: %s", nic.device, strerror(-r));
		return;
	}
	rail->look = false;
	make_end(rail);
	kvp_vb_describe(net);
	if (rail->port_down)
		kvp_log(KVP_LOG_NOTICE, "verbs %s: port %u is up", nic.device, nic.port);
	rail->port_down = false;
	kvp_vb_cm_drop_parked(rail);
	kvp_vb_ep_port_up(rail,
			  memcmp(&before, &net->address.ends[rail->idx], sizeof(before)) != 0);
}

void kvp_vb_rail_tick(struct kvp_net *net)
{
	for (unsigned i = 0; i < net->n_rails; i++) {
		struct kvp_vb_rail *rail = &net->rails[i];

		if (rail->look && !rail->dead &&
		    net->now_ns - rail->looked_ns >= net->config.keepalive_ns)
			look_again(rail);
	}
}

static void port_event(struct kvp_vb_rail *rail, const struct ibv_async_event *event)
{
	if (event->element.port_num != rail->nic.port || rail->dead)
		return;

	if (event->event_type != IBV_EVENT_PORT_ERR) {
		rail->look = true;
		look_again(rail);
		return;
	}
	rail->look = rail->nic.down; /* else there will be another event */
	if (rail->port_down)
		return;
	kvp_log(KVP_LOG_WARNING, "verbs %s: port %u is down", rail->nic.device, rail->nic.port);
	rail->port_down = true;
	fail_all(rail, -ENETDOWN);
}

static void on_event(struct kvp_vb_rail *rail, const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_GID_CHANGE:
		port_event(rail, event);
		break;
	case IBV_EVENT_DEVICE_FATAL: /* also what removal of the device says */
		rail->dead = true;
		fail_all(rail, -ENODEV);
		break;
	case IBV_EVENT_CQ_ERR:
		rail->dead = true; /* completions are lost: nothing is known any more */
		fail_all(rail, -EIO);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		fail_qp(rail, event->element.qp);
		break;
	default:
		break; /* nothing that concerns us */
	}
}

int kvp_vb_rail_events(struct kvp_vb_rail *rail)
{
	struct ibv_async_event event;
	int n = 0;

	while (ibv_get_async_event(rail->context, &event) == 0) {
		on_event(rail, &event);
		ibv_ack_async_event(&event);
		rail->net->events_seen++;
		n++;
	}
	return n;
}

/* ---- life */

/* One queue for all of the rail: as many connections as it has room for in full. */
static int open_cq(struct kvp_vb_rail *rail)
{
	struct kvp_net *net = rail->net;
	struct ibv_device_attr attr;
	uint32_t each, entries, ud = 2 * KVP_VB_UD_DEPTH + 1;
	int r = ibv_query_device(rail->context, &attr);

	if (r)
		return -r;
	if (attr.max_qp_wr > 0)
		net->config.depth = KVP_MIN(net->config.depth, (uint32_t)attr.max_qp_wr / 2);
	each = net->config.depth + KVP_VB_BACK_DEPTH + 1;
	entries = KVP_MIN(KVP_VB_CONNS * each + ud, (uint32_t)attr.max_cqe);
	if (entries < each + ud)
		return -ENOSPC;
	rail->n_conns_max = KVP_MIN((entries - ud) / each, KVP_VB_CONNS);
	rail->channel = ibv_create_comp_channel(rail->context);
	if (!rail->channel)
		return -errno;
	rail->cq = ibv_create_cq(rail->context, (int)entries, rail, rail->channel, 0);
	return rail->cq ? 0 : -errno;
}

static int open_parts(struct kvp_vb_rail *rail)
{
	struct kvp_net *net = rail->net;
	int r;

	limit_mtu(rail);
	rail->pd = ibv_alloc_pd(rail->context);
	if (!rail->pd)
		return -errno;
	r = open_cq(rail);
	if (r == 0)
		r = watch(net->epoll_fd, rail->channel->fd);
	if (r == 0)
		r = watch(net->epoll_fd, rail->context->async_fd);
	if (r < 0)
		return r;
	rail->bounce_mr =
		ibv_reg_mr(rail->pd, net->bounce, (size_t)KVP_VB_BOUNCES * KVP_VB_BOUNCE_BYTES, 0);
	if (!rail->bounce_mr)
		return -errno;
	r = kvp_vb_ud_init(rail);
	if (r == 0)
		r = kvp_vb_calls_start(rail);
	return r == 0 ? open_cm(rail) : r;
}

int kvp_vb_rail_open(struct kvp_net *net, const struct kvp_nic *nic, char *err, size_t err_bytes)
{
	struct kvp_vb_rail *rail = &net->rails[net->n_rails];
	int r;

	*rail = (struct kvp_vb_rail){
		.net = net,
		.idx = net->n_rails,
		.nic = *nic,
		.port_down = nic->down,
		.look = nic->down,
	};
	net->n_rails++; /* closed even if it does not come up */
	r = kvp_nic_open(nic, &rail->context, err, err_bytes);
	if (r < 0)
		return r;
	r = open_parts(rail);
	if (r == -ENOMEM && kvp_nic_memlock() != UINT64_MAX) {
		kvp_nic_memlock_text(nic->device, KVP_VB_BOUNCES * KVP_VB_BOUNCE_BYTES, err,
				     err_bytes);
		return r;
	}
	if (r < 0) {
		(void)snprintf(err, err_bytes, "verbs on %s: %s", nic->device,
			       strerror(-r)); /* cut at worst */
		return r;
	}
	if (rail->idx == 0 || nic->max_msg_bytes < net->max_msg_bytes)
		net->max_msg_bytes = nic->max_msg_bytes;
	make_end(rail);
	return 0;
}

void kvp_vb_rail_close(struct kvp_vb_rail *rail)
{
	kvp_vb_calls_stop(rail); /* one that did not come up */
	kvp_vb_cm_fini(rail);
	kvp_vb_ud_fini(rail);
	if (rail->bounce_mr)
		(void)ibv_dereg_mr(rail->bounce_mr);
	if (rail->cq)
		(void)ibv_destroy_cq(rail->cq); /* events were acknowledged, queue pairs are gone */
	if (rail->channel)
		(void)ibv_destroy_comp_channel(rail->channel);
	if (rail->pd)
		(void)ibv_dealloc_pd(rail->pd);
	if (rail->context)
		(void)ibv_close_device(rail->context);
}
