/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "proto/util.h"

#define POLL_BATCH 32
#define POLL_TURNS 4

static uint64_t clock_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

void kvp_net_verbs_defaults(struct kvp_net_verbs_config *config)
{
	*config = (struct kvp_net_verbs_config){
		.device = "",
		.exclude = "",
		.near = "",
		.gid_index = -1,
		.timeout = 14,    /* 67 ms */
		.retry_count = 3, /* soft RoCE takes 7 as for ever */
		.rnr_timer = 12,  /* 0.64 ms */
		.depth = 128,
		.inline_bytes = 192, /* a want fits */
		.keepalive_ns = UINT64_C(1000000000),
	};
}

/* ---- asynchronous events */

static void fail_all(struct kvp_net *net, int status)
{
	struct kvp_net_ep *ep;

	TAILQ_FOREACH (ep, &net->eps, link)
		kvp_vb_conn_fail(ep, status);
	TAILQ_FOREACH (ep, &net->passive, link)
		kvp_vb_conn_fail(ep, status);
}

static void fail_qp(struct kvp_net *net, const struct ibv_qp *qp)
{
	for (uint32_t i = 0; i < net->n_conns_max; i++) {
		if (net->conns[i] && net->conns[i]->ibv == qp)
			kvp_vb_conn_fail(net->conns[i], -EREMOTEIO);
	}
}

static void port_event(struct kvp_net *net, const struct ibv_async_event *event, bool down)
{
	if (event->element.port_num != net->nic.port)
		return;

	net->port_down = down;
	if (down)
		fail_all(net, -ENETDOWN);
}

static void on_event(struct kvp_net *net, const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_PORT_ERR:
		port_event(net, event, true);
		break;
	case IBV_EVENT_PORT_ACTIVE:
		port_event(net, event, false);
		break;
	case IBV_EVENT_DEVICE_FATAL:
		net->dead = true;
		fail_all(net, -ENODEV);
		break;
	case IBV_EVENT_CQ_ERR:
		net->dead = true; /* completions are lost: nothing is known any more */
		fail_all(net, -EIO);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		fail_qp(net, event->element.qp);
		break;
	default:
		break; /* nothing that concerns us */
	}
}

static int take_events(struct kvp_net *net)
{
	struct ibv_async_event event;
	int n = 0;

	while (ibv_get_async_event(net->context, &event) == 0) {
		on_event(net, &event);
		ibv_ack_async_event(&event);
		net->events_seen++;
		n++;
	}
	return n;
}

/* ---- progress */

static void complete(struct kvp_net *net, const struct ibv_wc *wc)
{
	uint32_t tag = kvp_qp_wr_tag(wc->wr_id);
	struct kvp_net_ep *ep;

	if (tag == 0) {
		kvp_vb_ud_complete(net, wc);
		return;
	}
	ep = kvp_vb_conn_find(net, tag);
	if (!ep)
		return; /* of a queue pair that is gone */

	if (kvp_qp_wr_is_recv(wc->wr_id)) {
		if (wc->status == IBV_WC_SUCCESS)
			kvp_vb_received(ep, wc);
		else if (wc->status == IBV_WC_WR_FLUSH_ERR)
			ep->flushed = true; /* the request that has the reason tells, mostly */
		else
			kvp_vb_conn_fail(ep, kvp_qp_errno(wc->status));
		return;
	}
	(void)kvp_qp_complete(&ep->qp, wc, kvp_vb_op_done, net);
	if (wc->status != IBV_WC_SUCCESS)
		kvp_vb_conn_fail(ep, ep->qp.status);
}

static int poll_completions(struct kvp_net *net)
{
	struct ibv_wc wc[POLL_BATCH];
	int n = 0;

	for (int turn = 0; turn < POLL_TURNS; turn++) {
		int got = ibv_poll_cq(net->cq, POLL_BATCH, wc);

		for (int i = 0; i < got; i++)
			complete(net, &wc[i]);
		n += got > 0 ? got : 0;
		if (got < POLL_BATCH)
			break;
	}
	return n;
}

/* Connections that have something for the card: one doorbell each. */
static void flush(struct kvp_net *net)
{
	struct kvp_net_ep *ep;

	(void)kvp_rq_ring(&net->ud_rq); /* a lost one is revived when something is sent */
	while ((ep = TAILQ_FIRST(&net->dirty))) {
		TAILQ_REMOVE(&net->dirty, ep, dirty_link);
		ep->dirty = false;
		kvp_vb_flush(ep);
	}
}

static void set_timer(struct kvp_net *net)
{
	struct kvp_net_ep *ep;
	bool connecting = net->n_closing > 0 || net->ud_qp.state != KVP_QP_OPEN;
	bool wanted = !TAILQ_EMPTY(&net->eps) || !TAILQ_EMPTY(&net->passive) || connecting;
	struct itimerspec when = { .it_value = { 0 } };
	uint64_t ns = net->config.keepalive_ns;

	TAILQ_FOREACH (ep, &net->eps, link)
		connecting = connecting || ep->state == KVP_VB_CONNECTING;
	if (connecting)
		ns = KVP_MIN(ns, KVP_VB_REPEAT_NS);
	if (wanted)
		when.it_value = (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u),
						   .tv_nsec = (long)(ns % 1000000000u) };
	if (!wanted && !net->timer_on)
		return;
	(void)timerfd_settime(net->timer_fd, 0, &when, NULL); /* a valid time of a valid timer */
	net->timer_on = wanted;
}

/* After a sleep: takes what the descriptors have to say, so that they do not wake us again. */
static int disarm(struct kvp_net *net)
{
	struct ibv_cq *cq;
	void *context;
	uint64_t expired;
	int n = 0;

	net->armed = false;
	while (ibv_get_cq_event(net->channel, &cq, &context) == 0)
		ibv_ack_cq_events(net->cq, 1);
	if (read(net->timer_fd, &expired, sizeof(expired)) > 0)
		net->tick_ns = 0; /* due now */
	n += take_events(net);
	return n;
}

static int tick(struct kvp_net *net)
{
	int n = take_events(net);

	net->tick_ns = net->now_ns;
	kvp_vb_ud_tick(net);
	kvp_vb_conn_tick(net);
	return n;
}

static int verbs_progress(struct kvp_net *net)
{
	int n = 0;

	net->now_ns = clock_ns();
	if (net->armed)
		n += disarm(net);
	flush(net);
	n += poll_completions(net);
	if (net->now_ns - net->tick_ns >= KVP_VB_TICK_NS)
		n += tick(net);
	n += kvp_vb_tell_sent(net);
	n += kvp_vb_tell_failed(net);
	n += kvp_vb_turn_closing(net);
	flush(net);
	return n;
}

static int verbs_arm(struct kvp_net *net)
{
	flush(net);
	if (!TAILQ_EMPTY(&net->done_ops) || net->n_tell > 0)
		return -EBUSY;
	if (ibv_req_notify_cq(net->cq, 0) != 0)
		return -EBUSY;
	net->armed = true;
	set_timer(net);
	/* What came before the request to be told does not tell. */
	return poll_completions(net) > 0 ? -EBUSY : 0;
}

/* ---- life */

static int watch(int epoll_fd, int fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
	    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		return -errno;
	return 0;
}

static int open_fds(struct kvp_net *net)
{
	int r;

	net->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	net->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (net->epoll_fd < 0 || net->timer_fd < 0)
		return -errno;
	r = watch(net->epoll_fd, net->channel->fd);
	if (r == 0)
		r = watch(net->epoll_fd, net->context->async_fd);
	return r == 0 ? watch(net->epoll_fd, net->timer_fd) : r;
}

/* One queue for all: as many connections as it has room for in full. */
static int open_cq(struct kvp_net *net)
{
	struct ibv_device_attr attr;
	uint32_t each = net->config.depth + KVP_VB_BACK_DEPTH + 1;
	uint32_t ud = 2 * KVP_VB_UD_DEPTH + 1;
	uint32_t entries;
	int r = ibv_query_device(net->context, &attr);

	if (r)
		return -r;
	if (attr.max_qp_wr > 0)
		net->config.depth = KVP_MIN(net->config.depth, (uint32_t)attr.max_qp_wr / 2);
	entries = KVP_MIN(KVP_VB_CONNS * each + ud, (uint32_t)attr.max_cqe);
	if (entries < each + ud)
		return -ENOSPC;
	net->n_conns_max = KVP_MIN((entries - ud) / each, KVP_VB_CONNS);
	net->channel = ibv_create_comp_channel(net->context);
	if (!net->channel)
		return -errno;
	net->cq = ibv_create_cq(net->context, (int)entries, net, net->channel, 0);
	return net->cq ? 0 : -errno;
}

static void make_address(struct kvp_net *net)
{
	struct kvp_vb_address *address = &net->address;

	address->lid = net->nic.lid;
	address->ethernet = net->nic.ethernet;
	memcpy(address->gid, net->nic.gid.raw, sizeof(address->gid));
	address->qpn = net->ud->qp_num;
	kvp_vb_address_seal(address);
}

static int draw_secrets(struct kvp_net *net)
{
	/* At most 256 bytes are never cut short. */
	if (getrandom(net->address.id, sizeof(net->address.id), 0) != sizeof(net->address.id) ||
	    getrandom(&net->address.qkey, sizeof(net->address.qkey), 0) !=
		    sizeof(net->address.qkey) ||
	    getrandom(&net->rng, sizeof(net->rng), 0) != sizeof(net->rng))
		return -EIO;
	net->address.qkey &= 0x7fffffff; /* the upper half means something else */
	net->rng |= 1;
	return 0;
}

static void limit_mtu(struct kvp_net *net)
{
	enum ibv_mtu wish = IBV_MTU_256;

	if (net->config.mtu == 0)
		return;
	while (wish < IBV_MTU_4096 && (128u << wish) < net->config.mtu)
		wish++;
	net->nic.mtu = KVP_MIN(net->nic.mtu, wish);
}

static int open_parts(struct kvp_net *net)
{
	int r = draw_secrets(net);

	limit_mtu(net);
	if (r < 0)
		return r;
	net->pd = ibv_alloc_pd(net->context);
	if (!net->pd)
		return -errno;
	r = open_cq(net);
	if (r == 0)
		r = open_fds(net);
	if (r == 0)
		r = kvp_vb_msg_init(net);
	if (r == 0)
		r = kvp_vb_ud_init(net);
	return r;
}

static void describe(struct kvp_net *net)
{
	char gid[64];

	(void)snprintf(net->what, sizeof(net->what), "verbs %s:%u gid %d %s mtu %u",
		       net->nic.device, net->nic.port, net->nic.gid_index,
		       kvp_nic_gid_text(&net->nic.gid, gid, sizeof(gid)),
		       128u << net->nic.mtu); /* cut at worst */
}

static void verbs_free(struct kvp_net *net)
{
	kvp_vb_ud_fini(net);
	kvp_vb_msg_fini(net);
	kvp_vb_memory_fini(net);
	if (net->cq)
		(void)ibv_destroy_cq(net->cq); /* events were acknowledged, queue pairs are gone */
	if (net->channel)
		(void)ibv_destroy_comp_channel(net->channel);
	if (net->pd)
		(void)ibv_dealloc_pd(net->pd);
	if (net->context)
		(void)ibv_close_device(net->context);
	kvp_closep(&net->timer_fd);
	kvp_closep(&net->epoll_fd);
	free(net);
}

static int verbs_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		      size_t err_bytes)
{
	struct kvp_net *net = calloc(1, sizeof(*net));
	struct kvp_nic_wish wish;
	int r;

	if (!net)
		return -ENOMEM;

	net->events = config->events;
	net->arg = config->arg;
	net->epoll_fd = net->timer_fd = -1;
	net->now_ns = clock_ns();
	TAILQ_INIT(&net->eps);
	TAILQ_INIT(&net->passive);
	TAILQ_INIT(&net->dirty);
	kvp_net_verbs_defaults(&net->config);
	if (config->verbs)
		net->config = *config->verbs;
	wish = (struct kvp_nic_wish){
		.device = net->config.device,
		.exclude = net->config.exclude,
		.near = net->config.near,
		.port = net->config.port,
		.gid_index = net->config.gid_index,
	};
	r = kvp_nic_open(&net->nic, &net->context, &wish, err, err_bytes);
	if (r == 0) {
		r = open_parts(net);
		if (r < 0)
			(void)snprintf(err, err_bytes, "verbs on %s: %s", net->nic.device,
				       strerror(-r)); /* cut at worst */
	}
	if (r < 0) {
		verbs_free(net);
		return r;
	}
	make_address(net);
	describe(net);
	*out = net;
	return 0;
}

static void verbs_close(struct kvp_net *net)
{
	struct kvp_net_ep *ep;

	if (!net)
		return;

	net->closing = true;
	net->now_ns = clock_ns();
	TAILQ_FOREACH (ep, &net->eps, link)
		kvp_vb_ep_close(net, ep);
	(void)poll_completions(net); /* what has ended well is told so */
	(void)kvp_vb_turn_closing(net);
	while ((ep = TAILQ_FIRST(&net->passive)))
		kvp_vb_conn_destroy(ep);
	(void)kvp_vb_tell_sent(net);
	verbs_free(net);
}

static int verbs_address(struct kvp_net *net, void *buf, size_t buf_bytes)
{
	if (buf_bytes < sizeof(net->address))
		return -ENOBUFS;

	memcpy(buf, &net->address, sizeof(net->address));
	return sizeof(net->address);
}

static void *verbs_ep_arg(struct kvp_net_ep *ep)
{
	return ep->arg;
}

static int verbs_fd(struct kvp_net *net)
{
	return net->epoll_fd;
}

static const struct kvp_net_stats *verbs_stats(struct kvp_net *net)
{
	return &net->stats;
}

static const char *verbs_describe(struct kvp_net *net)
{
	return net->what;
}

const struct kvp_net_ops kvp_net_verbs = {
	.name = "verbs",
	.open = verbs_open,
	.close = verbs_close,
	.address = verbs_address,
	.ep_open = kvp_vb_ep_open,
	.ep_close = kvp_vb_ep_close,
	.ep_arg = verbs_ep_arg,
	.send = kvp_vb_send,
	.device = kvp_vb_device,
	.memory = kvp_vb_memory,
	.expose = kvp_vb_expose,
	.put = kvp_vb_put,
	.progress = verbs_progress,
	.arm = verbs_arm,
	.fd = verbs_fd,
	.stats = verbs_stats,
	.describe = verbs_describe,
};
