/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net_verbs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "daemon/log.h"
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
		.devices = "",
		.exclude = "",
		.near = "",
		.rail_of = "",
		.rails = KVP_NET_RAILS,
		.idle_ns = UINT64_C(60000000000),
		.gid_index = -1,
		.timeout = 14,    /* 67 ms */
		.retry_count = 3, /* soft RoCE takes 7 as for ever */
		.rnr_timer = 12,  /* 0.64 ms */
		.depth = 128,
		.inline_bytes = 192, /* a want fits */
		.keepalive_ns = UINT64_C(1000000000),
	};
}

/* ---- progress */

static void complete(struct kvp_vb_rail *rail, const struct ibv_wc *wc)
{
	uint32_t tag = kvp_qp_wr_tag(wc->wr_id);
	struct kvp_vb_conn *conn;

	if (tag == 0) {
		kvp_vb_ud_complete(rail, wc);
		return;
	}
	conn = kvp_vb_conn_find(rail->net, tag);
	if (!conn)
		return; /* of a queue pair that is gone */

	if (kvp_qp_wr_is_recv(wc->wr_id)) {
		conn->received++;
		if (wc->status == IBV_WC_SUCCESS)
			kvp_vb_received(conn, wc);
		else if (wc->status == IBV_WC_WR_FLUSH_ERR)
			conn->flushed = true; /* the request that has the reason tells, mostly */
		else
			kvp_vb_conn_fail(conn, kvp_qp_errno(wc->status));
		return;
	}
	(void)kvp_qp_complete(&conn->qp, wc, kvp_vb_item_done, rail->net);
	if (wc->status != IBV_WC_SUCCESS)
		kvp_vb_conn_fail(conn, conn->qp.status);
}

static int poll_rail(struct kvp_vb_rail *rail)
{
	struct ibv_wc wc[POLL_BATCH];
	int n = 0;

	for (int turn = 0; turn < POLL_TURNS; turn++) {
		int got = ibv_poll_cq(rail->cq, POLL_BATCH, wc);

		for (int i = 0; i < got; i++)
			complete(rail, &wc[i]);
		n += got > 0 ? got : 0;
		rail->empty = got < POLL_BATCH;
		if (rail->empty)
			break;
	}
	return n;
}

static int poll_completions(struct kvp_net *net)
{
	int n = 0;

	for (unsigned i = 0; i < net->n_rails; i++)
		n += poll_rail(&net->rails[i]);
	return n;
}

/* Connections that have something for the card: one doorbell each. */
static void flush(struct kvp_net *net)
{
	struct kvp_vb_conn *conn;

	for (unsigned i = 0; i < net->n_rails; i++)
		(void)kvp_rq_ring(&net->rails[i].ud_rq); /* a lost one is revived by the tick */
	while ((conn = TAILQ_FIRST(&net->dirty))) {
		TAILQ_REMOVE(&net->dirty, conn, dirty_link);
		conn->dirty = false;
		kvp_vb_flush(conn);
	}
}

static void set_timer(struct kvp_net *net)
{
	bool soon = net->n_draining > 0 || net->n_connecting > 0 || net->n_trouble > 0;
	struct itimerspec when = { .it_value = { 0 } };
	uint64_t ns = net->config.keepalive_ns;
	bool wanted;

	for (unsigned i = 0; i < net->n_rails; i++)
		soon = soon || net->rails[i].ud_qp.state != KVP_QP_OPEN;
	wanted = soon || !TAILQ_EMPTY(&net->all);
	for (unsigned i = 0; i < net->n_rails; i++)
		wanted = wanted || net->rails[i].look;
	if (soon)
		ns = KVP_MIN(ns, KVP_VB_REPEAT_NS);
	if (wanted)
		when.it_value = (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u),
						   .tv_nsec = (long)(ns % 1000000000u) };
	if (!wanted && !net->timer_on)
		return;
	(void)timerfd_settime(net->timer_fd, 0, &when, NULL); /* a valid time of a valid timer */
	net->timer_on = wanted;
}

static int take_events(struct kvp_net *net)
{
	int n = 0;

	for (unsigned i = 0; i < net->n_rails; i++)
		n += kvp_vb_rail_events(&net->rails[i]);
	for (unsigned i = 0; i < net->n_rails; i++)
		n += kvp_vb_cm_events(&net->rails[i]);
	return n;
}

/*
 * Takes what the descriptors have to say, so that they do not wake us again. Each of it counts,
 * even if nothing else has come: an event may be of a completion that was taken before, and yet it
 * has used up what was asked for, as the timer has. Who sleeps then without arming again is not
 * woken by the next one.
 */
static int disarm(struct kvp_net *net)
{
	uint64_t count;
	int n = 0;

	net->armed = false;
	for (unsigned i = 0; i < net->n_rails; i++) {
		struct kvp_vb_rail *rail = &net->rails[i];
		struct ibv_cq *cq;
		void *context;

		for (; ibv_get_cq_event(rail->channel, &cq, &context) == 0; n++)
			ibv_ack_cq_events(rail->cq, 1);
	}
	if (read(net->timer_fd, &count, sizeof(count)) > 0) {
		net->tick_ns = 0; /* due now */
		n++;
	}
	if (read(net->calls_fd, &count, sizeof(count)) > 0)
		n++;
	return n + take_events(net);
}

static int tick(struct kvp_net *net)
{
	int n = take_events(net);

	net->tick_ns = net->now_ns;
	kvp_vb_rail_tick(net);
	kvp_vb_ud_tick(net);
	kvp_vb_conn_tick(net);
	kvp_vb_ep_tick(net);
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
	n += kvp_vb_direct_turn(net);
	if (net->now_ns - net->tick_ns >= KVP_VB_TICK_NS)
		n += tick(net);
	else if (net->config.rdma_cm && net->n_connecting + net->n_draining + net->n_calls > 0)
		n += take_events(net); /* also whether the port is down, before an id is dropped */
	n += kvp_vb_turn_calls(net);
	n += kvp_vb_tell_sent(net);
	n += kvp_vb_turn_conns(net);
	kvp_vb_turn_ins(net);
	n += kvp_vb_tell_failed(net);
	n += kvp_vb_turn_eps(net);
	flush(net);
	return n;
}

static int verbs_arm(struct kvp_net *net)
{
	flush(net);
	if (!TAILQ_EMPTY(&net->done_ops) || net->n_tell > 0 || kvp_vb_direct_busy(net))
		return -EBUSY;
	for (unsigned i = 0; i < net->n_rails; i++) {
		if (ibv_req_notify_cq(net->rails[i].cq, 0) != 0)
			return -EBUSY;
	}
	net->armed = true;
	set_timer(net);
	/* What came before the request to be told does not tell. */
	return poll_completions(net) > 0 ? -EBUSY : 0;
}

/* ---- life */

static int draw_secrets(struct kvp_net *net)
{
	/* At most 256 bytes are never cut short. */
	if (getrandom(net->address.id, sizeof(net->address.id), 0) != sizeof(net->address.id) ||
	    getrandom(&net->rng, sizeof(net->rng), 0) != sizeof(net->rng))
		return -EIO;
	net->rng |= 1;
	for (unsigned i = 0; i < KVP_VB_RAILS; i++) {
		uint32_t *qkey = &net->address.ends[i].qkey;

		if (getrandom(qkey, sizeof(*qkey), 0) != sizeof(*qkey))
			return -EIO;
		*qkey &= 0x7fffffff; /* the upper half means something else */
	}
	return 0;
}

static int open_parts(struct kvp_net *net)
{
	struct epoll_event event = { .events = EPOLLIN };

	net->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	net->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	net->calls_fd = kvp_wakefd_open();
	if (net->calls_fd < 0)
		return net->calls_fd;
	if (net->epoll_fd < 0 || net->timer_fd < 0 ||
	    epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, net->timer_fd, &event) < 0 ||
	    epoll_ctl(net->epoll_fd, EPOLL_CTL_ADD, net->calls_fd, &event) < 0)
		return -errno;
	return draw_secrets(net);
}

static size_t describe_rail(const struct kvp_vb_rail *rail, char *buf, size_t bytes)
{
	const struct kvp_nic *nic = &rail->nic;
	const char *comma = rail->idx > 0 ? "," : "";
	char gid[64];

	if (nic->down)
		return (size_t)snprintf(buf, bytes, "%s %s:%u down", comma, nic->device, nic->port);
	return (size_t)snprintf(buf, bytes, "%s %s:%u gid %d %s mtu %u", comma, nic->device,
				nic->port, nic->gid_index,
				kvp_nic_gid_text(&nic->gid, gid, sizeof(gid)), 128u << nic->mtu);
}

void kvp_vb_describe(struct kvp_net *net)
{
	size_t used = (size_t)snprintf(net->what, sizeof(net->what), "verbs");

	for (unsigned i = 0; i < net->n_rails && used < sizeof(net->what); i++)
		used += describe_rail(&net->rails[i], net->what + used,
				      sizeof(net->what) - used); /* cut at worst */
	kvp_vb_address_seal(&net->address);
}

static void verbs_free(struct kvp_net *net)
{
	kvp_vb_direct_fini(net);
	kvp_vb_memory_fini(net);
	for (unsigned i = 0; i < net->n_rails; i++)
		kvp_vb_rail_close(&net->rails[i]);
	kvp_vb_msg_fini(net);
	kvp_inbox_fini(&net->calls_done);
	kvp_closep(&net->calls_fd);
	kvp_closep(&net->timer_fd);
	kvp_closep(&net->epoll_fd);
	free(net);
}

static int open_rails(struct kvp_net *net, char *err, size_t err_bytes)
{
	const struct kvp_net_verbs_config *config = &net->config;
	const struct kvp_nic_wish wish = {
		.devices = config->devices,
		.exclude = config->exclude,
		.near = config->near,
		.rail_of = config->rail_of,
		.port = config->port,
		.gid_index = config->gid_index,
	};
	struct kvp_nic nics[KVP_NIC_MAX];
	int n = kvp_nic_rails(nics, config->rails, &wish, err, err_bytes);

	for (int i = 0; i < n; i++) {
		int r = kvp_vb_rail_open(net, &nics[i], err, err_bytes);

		if (r < 0 && nics[i].down) { /* nobody counted on it */
			kvp_log(KVP_LOG_WARNING, "verbs: left out: %s", err);
			kvp_vb_rail_close(&net->rails[--net->n_rails]);
		} else if (r < 0) {
			return r;
		}
	}
	return net->n_rails > 0 ? 0 : -ENODEV;
}

static int verbs_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		      size_t err_bytes)
{
	struct kvp_net *net = calloc(1, sizeof(*net));
	int r;

	if (!net)
		return -ENOMEM;

	net->events = config->events;
	net->arg = config->arg;
	net->epoll_fd = net->timer_fd = net->calls_fd = -1;
	kvp_inbox_init(&net->calls_done, kvp_wakefd_wake, &net->calls_fd);
	net->now_ns = clock_ns();
	TAILQ_INIT(&net->all);
	TAILQ_INIT(&net->left);
	TAILQ_INIT(&net->dirty);
	TAILQ_INIT(&net->eps);
	TAILQ_INIT(&net->ins);
	kvp_vb_direct_init(net);
	kvp_net_verbs_defaults(&net->config);
	if (config->verbs)
		net->config = *config->verbs;
	r = open_parts(net);
	if (r == 0)
		r = kvp_vb_msg_init(net);
	if (r < 0)
		(void)snprintf(err, err_bytes, "verbs: %s", strerror(-r)); /* fits */
	else
		r = open_rails(net, err, err_bytes);
	if (r < 0) {
		verbs_free(net);
		return r;
	}
	net->address.n_ends = (uint16_t)net->n_rails;
	kvp_vb_describe(net);
	kvp_nic_memlock_warn();
	*out = net;
	return 0;
}

static void verbs_close(struct kvp_net *net)
{
	struct kvp_net_ep *ep;
	struct kvp_vb_in *in;

	if (!net)
		return;

	net->closing = true;
	net->now_ns = clock_ns();
	for (unsigned i = 0; i < net->n_rails; i++)
		kvp_vb_calls_stop(&net->rails[i]);
	(void)kvp_vb_turn_calls(net);
	TAILQ_FOREACH (ep, &net->eps, link)
		kvp_vb_ep_close(net, ep);
	TAILQ_FOREACH (in, &net->ins, link)
		kvp_vb_in_end(in);
	(void)poll_completions(net);       /* what has ended well is told so */
	while (kvp_vb_turn_conns(net) > 0) /* a step of each */
		;
	kvp_vb_turn_ins(net);
	(void)kvp_vb_turn_eps(net);
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

static const char *verbs_ep_reason(struct kvp_net_ep *ep)
{
	return ep->reason;
}

static void fill_rail(const struct kvp_vb_rail *rail, struct kvp_net_rail *out)
{
	const struct kvp_nic *nic = &rail->nic;

	*out = (struct kvp_net_rail){
		.port = nic->port,
		.number = nic->number,
		.gid_index = nic->down ? 0 : (uint16_t)nic->gid_index,
		.mtu = (uint16_t)(nic->down ? 0 : 128u << nic->mtu),
		.connecting = rail->n_by_state[KVP_VB_CONNECTING],
		.open = rail->n_by_state[KVP_VB_OPEN],
		.failed = rail->n_by_state[KVP_VB_FAILED],
		.bytes = rail->bytes,
		.lost = rail->lost,
		.resent = rail->resent,
	};
	(void)snprintf(out->device, sizeof(out->device), "%.31s", nic->device); /* cut at worst */
	if (!nic->down)
		(void)kvp_nic_gid_text(&nic->gid, out->address, sizeof(out->address));
	if (rail->dead)
		out->state = KVP_NET_RAIL_DEAD;
	else if (rail->port_down)
		out->state = KVP_NET_RAIL_DOWN;
}

static uint32_t verbs_rails(struct kvp_net *net, struct kvp_net_rail rails[KVP_NET_RAILS])
{
	for (unsigned i = 0; i < net->n_rails; i++)
		fill_rail(&net->rails[i], &rails[i]);
	return net->n_rails;
}

static void verbs_ep_rails(struct kvp_net_ep *ep, uint32_t *open, uint32_t *all)
{
	*open = 0;
	*all = ep->n_paths;
	for (unsigned i = 0; i < ep->n_paths; i++)
		*open += ep->paths[i].conn && ep->paths[i].conn->state == KVP_VB_OPEN;
}

static int verbs_fd(struct kvp_net *net)
{
	return net->epoll_fd;
}

static const struct kvp_net_stats *verbs_stats(struct kvp_net *net)
{
	net->stats.rejects = net->rejects;
	net->stats.keepalives = net->keepalives;
	net->stats.calls_out = net->n_calls;
	net->stats.events = net->events_seen;
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
	.ep_reason = verbs_ep_reason,
	.send = kvp_vb_send,
	.device = kvp_vb_device,
	.memory = kvp_vb_memory,
	.expose = kvp_vb_expose,
	.put = kvp_vb_put,
	.region_add = kvp_vb_region_add,
	.region_remove = kvp_vb_region_remove,
	.window_open = kvp_vb_window_open,
	.window_key = kvp_vb_window_key,
	.window_close = kvp_vb_window_close,
	.write = kvp_vb_write,
	.write_max = kvp_vb_write_max,
	.progress = verbs_progress,
	.arm = verbs_arm,
	.fd = verbs_fd,
	.stats = verbs_stats,
	.rails = verbs_rails,
	.ep_rails = verbs_ep_rails,
	.describe = verbs_describe,
};
