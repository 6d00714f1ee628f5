/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net_ucx.h"
#include "proto/util.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Turns of the worker in one progress(): more of them means fewer looks at the lane's inbox. */
#define PROGRESS_TURNS 4

static atomic_uint left_open; /* workers of this process that could not be destroyed */

int kvp_ucx_errno(ucs_status_t status)
{
	switch (status) {
	case UCS_OK:
		return 0;
	case UCS_ERR_NO_MEMORY:
		return -ENOMEM;
	case UCS_ERR_INVALID_PARAM:
	case UCS_ERR_INVALID_ADDR:
		return -EINVAL;
	case UCS_ERR_NO_RESOURCE:
	case UCS_ERR_BUSY:
		return -EAGAIN;
	case UCS_ERR_NO_DEVICE:
		return -ENODEV;
	case UCS_ERR_UNREACHABLE:
		return -EHOSTUNREACH;
	case UCS_ERR_TIMED_OUT:
	case UCS_ERR_ENDPOINT_TIMEOUT:
		return -ETIMEDOUT;
	case UCS_ERR_CONNECTION_RESET:
	case UCS_ERR_REJECTED:
		return -ECONNRESET;
	case UCS_ERR_CANCELED:
	case UCS_ERR_NOT_CONNECTED:
		return -ENOTCONN;
	default:
		return -EREMOTEIO;
	}
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* Runs inside UCX, where nothing may be closed: only notes it. */
static void on_error(void *arg, ucp_ep_h ucp, ucs_status_t status)
{
	struct kvp_net_ep *ep = arg;

	(void)ucp; /* the same as ep->ucp */
	if (ep->status == 0)
		ep->status = kvp_ucx_errno(status);
	if (ep->state != KVP_UCX_EP_OPEN)
		return;

	ep->state = KVP_UCX_EP_FAILED;
	ep->tell_failed = true;
	ep->net->n_tell++;
}

/* An endpoint that nothing was sent on. */
static void forget(struct kvp_net_ep *ep)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
	};
	ucs_status_ptr_t request = ucp_ep_close_nbx(ep->ucp, &param);

	if (UCS_PTR_IS_PTR(request))
		ucp_request_free(request); /* UCX ends it some time */
}

static int ucx_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, uint64_t number,
		       void *ep_arg, struct kvp_net_ep **out)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
			      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.err_mode = UCP_ERR_HANDLING_MODE_PEER,
		.err_handler.cb = on_error,
	};
	KVP_CLEANUP(kvp_freep) struct kvp_net_ep *ep = NULL;
	const void *inner;
	int r = kvp_ucx_address_unframe(addr, addr_bytes, &inner);

	(void)number; /* each has connections of its own, and nothing is written into our memory */
	if (r < 0)
		return r;

	ep = calloc(1, sizeof(*ep));
	if (!ep)
		return -ENOMEM;

	ep->net = net;
	ep->arg = ep_arg;
	ep->state = KVP_UCX_EP_OPEN;
	params.address = inner;
	params.err_handler.arg = ep;
	r = kvp_ucx_errno(ucp_ep_create(net->worker, &params, &ep->ucp));
	if (r < 0)
		return r;
	if (net->rdma && kvp_ucx_lanes_check(ep) < 0) {
		forget(ep);
		return -EPROTONOSUPPORT;
	}

	TAILQ_INSERT_TAIL(&net->eps, ep, link);
	net->stats.eps++;
	*out = KVP_TAKE(ep);
	return 0;
}

/* UCP is asked later, from progress(): a lane may call this out of a callback of UCX. */
static void ucx_ep_close(struct kvp_net *net, struct kvp_net_ep *ep)
{
	if (ep->state == KVP_UCX_EP_CLOSING)
		return;

	if (ep->tell_failed)
		net->n_tell--;
	ep->tell_failed = false;
	ep->state = KVP_UCX_EP_CLOSING;
	ep->close_since_ns = now_ns();
	net->n_closing++;
}

static void *ucx_ep_arg(struct kvp_net_ep *ep)
{
	return ep->arg;
}

static int tell_failed(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep && net->n_tell > 0; ep = next) {
		next = TAILQ_NEXT(ep, link); /* nothing here or in the callback removes it */
		if (!ep->tell_failed)
			continue;
		ep->tell_failed = false;
		net->n_tell--;
		n++;
		net->events->failed(net->arg, ep, ep->status);
	}
	return n;
}

static void close_post(struct kvp_net_ep *ep)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
	};
	ucs_status_ptr_t request = ucp_ep_close_nbx(ep->ucp, &param);

	ep->close_posted = true;
	ep->ucp = NULL;
	if (UCS_PTR_IS_PTR(request))
		ep->close_request = request;
}

/*
 * A forced close of an endpoint that has not written everything leaves its socket with UCX, to be
 * written out. When such a socket fails, UCX 1.13 frees it in one handler and uses it in the next.
 * So the close waits until all is written, or the socket has failed: a peer that stands still keeps
 * the slots that are on their way to it until it goes on or dies.
 */
static bool all_written(struct kvp_net_ep *ep)
{
	ucp_request_param_t param = { 0 };
	ucs_status_ptr_t request;

	if (!ep->flush_posted) {
		ep->flush_posted = true;
		request = ucp_ep_flush_nbx(ep->ucp, &param);
		if (UCS_PTR_IS_PTR(request))
			ep->flush_request = request;
	}
	return ep->n_sends == 0 && (!ep->flush_request ||
				    ucp_request_check_status(ep->flush_request) != UCS_INPROGRESS);
}

/* Whether neither the close nor a send of it is alive in UCX any more. */
static bool close_is_over(struct kvp_net_ep *ep)
{
	if (!ep->close_posted) {
		if (ep->status == 0 && !ep->net->closing && !all_written(ep))
			return false;
		if (ep->flush_request)
			ucp_request_free(ep->flush_request); /* UCX ends it some time */
		ep->flush_request = NULL;
		close_post(ep);
	}
	if (ep->close_request && ucp_request_check_status(ep->close_request) != UCS_INPROGRESS) {
		ucp_request_free(ep->close_request);
		ep->close_request = NULL;
	}
	return !ep->close_request && ep->n_sends == 0;
}

static void ep_gone(struct kvp_net *net, struct kvp_net_ep *ep)
{
	void *arg = ep->arg;

	if (ep->stuck)
		net->stats.stuck--;
	else if (ep->state == KVP_UCX_EP_CLOSING)
		net->n_closing--;
	TAILQ_REMOVE(&net->eps, ep, link);
	net->stats.eps--;
	free(ep);
	net->events->closed(net->arg, arg);
}

static int turn_closing(struct kvp_net *net)
{
	uint64_t now = now_ns();
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep; ep = next) {
		next = TAILQ_NEXT(ep, link); /* the callback removes none */
		if (ep->state != KVP_UCX_EP_CLOSING)
			continue;
		if (close_is_over(ep)) {
			ep_gone(net, ep);
			n++;
		} else if (!ep->stuck && now - ep->close_since_ns > KVP_UCX_CLOSE_NS) {
			/* Its buffers stay UCX's: only the end of the worker proves more. */
			ep->stuck = true;
			net->n_closing--;
			net->stats.stuck++;
		}
	}
	return n;
}

static int ucx_progress(struct kvp_net *net)
{
	int n = 0;

	for (int i = 0; i < PROGRESS_TURNS; i++) {
		unsigned done = ucp_worker_progress(net->worker);

		if (done == 0)
			break;
		n += (int)done;
	}
	if (!TAILQ_EMPTY(&net->done_sends))
		n += kvp_ucx_tell_sent(net);
	if (net->n_tell > 0)
		n += tell_failed(net);
	if (net->n_closing + net->stats.stuck > 0)
		n += turn_closing(net);
	return n;
}

static int ucx_arm(struct kvp_net *net)
{
	ucs_status_t status;

	if (!TAILQ_EMPTY(&net->done_sends) || net->n_tell > 0 || net->n_closing > 0)
		return -EBUSY;

	status = ucp_worker_arm(net->worker);
	if (status == UCS_ERR_BUSY)
		return -EBUSY;
	return kvp_ucx_errno(status);
}

static int ucx_fd(struct kvp_net *net)
{
	return net->fd;
}

static const struct kvp_net_stats *ucx_stats(struct kvp_net *net)
{
	return &net->stats;
}

static const char *ucx_describe(struct kvp_net *net)
{
	return net->what;
}

static int ucx_address(struct kvp_net *net, void *buf, size_t buf_bytes)
{
	if (buf_bytes < net->address_bytes)
		return -ENOBUFS;
	memcpy(buf, net->address, net->address_bytes);
	return (int)net->address_bytes;
}

static void close_endpoints(struct kvp_net *net)
{
	uint64_t start = now_ns();
	struct kvp_net_ep *ep;

	net->closing = true;
	TAILQ_FOREACH (ep, &net->eps, link)
		ucx_ep_close(net, ep);
	while (!TAILQ_EMPTY(&net->eps) && now_ns() - start < KVP_UCX_CLOSE_NS) {
		struct pollfd pfd = { .fd = net->fd, .events = POLLIN };

		if (ucx_progress(net) == 0)
			(void)poll(&pfd, 1, 1); /* only to be easy on the processor */
	}
}

/*
 * Whether what UCX has to say of its own is out too. It answers a peer that is on its way in, and
 * when a worker is destroyed before such an answer could be sent, an assertion of UCX 1.13 fails.
 */
static bool worker_settles(struct kvp_net *net)
{
	ucp_request_param_t param = { 0 };
	ucs_status_ptr_t request = ucp_worker_flush_nbx(net->worker, &param);
	uint64_t start = now_ns();
	ucs_status_t status;

	if (!UCS_PTR_IS_PTR(request))
		return UCS_PTR_STATUS(request) == UCS_OK;

	while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS &&
	       now_ns() - start < KVP_UCX_SETTLE_NS) {
		struct pollfd pfd = { .fd = net->fd, .events = POLLIN };

		if (ucx_progress(net) == 0)
			(void)poll(&pfd, 1, 1); /* only to be easy on the processor */
	}
	ucp_request_free(request); /* UCX ends it some time */
	return status == UCS_OK;
}

/* Without progress() a worker that is left open calls nobody, and touches no memory of ours. */
static void worker_end(struct kvp_net *net)
{
	if (worker_settles(net)) {
		ucp_worker_destroy(net->worker);
	} else {
		(void)atomic_fetch_add_explicit(&left_open, 1, memory_order_relaxed);
		net->context = NULL;
	}
}

unsigned kvp_net_ucx_left_open(void)
{
	return atomic_load_explicit(&left_open, memory_order_relaxed);
}

static void ucx_close(struct kvp_net *net)
{
	if (!net)
		return;

	if (net->worker) {
		close_endpoints(net);
		worker_end(net);
		kvp_ucx_abandon(net);
		while (!TAILQ_EMPTY(&net->eps))
			ep_gone(net, TAILQ_FIRST(&net->eps));
	}
	if (net->context)
		ucp_cleanup(net->context);
	free(net->sends);
	free(net->recvs);
	free(net);
}

static void net_closep(struct kvp_net **net)
{
	ucx_close(*net);
}

static int address_make(struct kvp_net *net)
{
	ucp_address_t *address;
	size_t bytes;
	int r = kvp_ucx_errno(ucp_worker_get_address(net->worker, &address, &bytes));

	if (r < 0)
		return r;

	r = kvp_ucx_address_frame(net->address, sizeof(net->address), address, bytes);
	ucp_worker_release_address(net->worker, address);
	if (r < 0)
		return r;
	net->address_bytes = (size_t)r;
	return 0;
}

static int worker_make(struct kvp_net *net)
{
	ucp_worker_params_t params = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SINGLE,
	};
	ucp_worker_h worker;
	int r = kvp_ucx_errno(ucp_worker_create(net->context, &params, &worker));

	if (r < 0)
		return r;

	net->worker = worker;
	r = kvp_ucx_msg_init(net);
	if (r < 0)
		return r;

	r = kvp_ucx_errno(ucp_worker_get_efd(net->worker, &net->fd));
	if (r < 0)
		return r;
	return address_make(net);
}

static int ucx_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		    size_t err_bytes)
{
	KVP_CLEANUP(net_closep) struct kvp_net *net = calloc(1, sizeof(*net));
	int r;

	if (!net)
		return -ENOMEM;

	net->events = config->events;
	net->arg = config->arg;
	net->fd = -1;
	net->rdma = config->rdma;
	net->staged = config->staged;
	TAILQ_INIT(&net->eps);
	r = kvp_ucx_context_create(net, config, err, err_bytes);
	if (r < 0)
		return r;

	r = worker_make(net);
	if (r < 0) {
		char ports[80] = "";

		if (config->port_lo)
			(void)snprintf(ports, sizeof(ports),
				       " (are ports %u to %u, of ucx.port_lo and port_hi, free?)",
				       config->port_lo, config->port_hi); /* fits */
		(void)snprintf(err, err_bytes, "ucx worker on %s: %s%s", config->interface,
			       strerrordesc_np(-r), ports); /* cut at worst */
		return r;
	}

	*out = KVP_TAKE(net);
	return 0;
}

const struct kvp_net_ops kvp_net_ucx = {
	.name = "ucx",
	.open = ucx_open,
	.close = ucx_close,
	.address = ucx_address,
	.ep_open = ucx_ep_open,
	.ep_close = ucx_ep_close,
	.ep_arg = ucx_ep_arg,
	.send = kvp_ucx_send,
	.device = kvp_ucx_device,
	.progress = ucx_progress,
	.arm = ucx_arm,
	.fd = ucx_fd,
	.stats = ucx_stats,
	.describe = ucx_describe,
};
