/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net_ucx.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void send_release(struct kvp_net *net, struct kvp_ucx_send *send)
{
	assert(send->ep); /* taken */
	send->ep->n_sends--;
	net->stats.pending--;
	send->ep = NULL;
	TAILQ_INSERT_HEAD(&net->free_sends, send, link);
}

/* Runs inside UCX: only moves the send, the lane hears of it from progress(). */
static void send_over(struct kvp_net *net, struct kvp_ucx_send *send, ucs_status_t status)
{
	assert(send->ep); /* taken */
	send->ucp = NULL;
	send->status = kvp_ucx_errno(status);
	if (send->status < 0 && send->ep->state == KVP_UCX_EP_CLOSING)
		send->status = -ENOTCONN;

	if (send->user)
		TAILQ_INSERT_TAIL(&net->done_sends, send, link);
	else
		send_release(net, send);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
	struct kvp_ucx_send *send = user_data;
	struct kvp_net *net = send->ep->net;

	ucp_request_free(request);
	TAILQ_REMOVE(&net->live_sends, send, link);
	send_over(net, send, status);
}

static struct kvp_ucx_send *send_take(struct kvp_net *net, struct kvp_net_ep *ep)
{
	struct kvp_ucx_send *send = TAILQ_FIRST(&net->free_sends);

	if (ep->n_sends >= KVP_UCX_SENDS_PER_EP || (!send && net->n_sends == KVP_UCX_SENDS))
		return NULL;

	if (send)
		TAILQ_REMOVE(&net->free_sends, send, link);
	else
		send = &net->sends[net->n_sends++];
	send->ep = ep;
	ep->n_sends++;
	net->stats.pending++;
	return send;
}

/* The parameters are those of net.h. NOLINTNEXTLINE(readability-function-size) */
int kvp_ucx_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		 const void *payload, size_t bytes, void *req)
{
	/* Always eager: the receiver has granted the place, a rendezvous would only add a round
	 * trip. */
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.flags = UCP_AM_SEND_FLAG_EAGER,
		.memory_type = kvp_ucx_memory_type(net, payload),
		.cb.send = on_sent,
	};
	struct kvp_ucx_send *send;
	ucs_status_ptr_t request;

	if (hdr_bytes == 0 || hdr_bytes > KVP_NET_HDR_MAX || (bytes > 0 && (!payload || !req)))
		return -EINVAL;
	if (ep->state != KVP_UCX_EP_OPEN)
		return -ENOTCONN;

	send = send_take(net, ep);
	if (!send)
		return -EAGAIN;

	memcpy(send->hdr, hdr, hdr_bytes);
	send->user = req;
	param.user_data = send;
	request = ucp_am_send_nbx(ep->ucp, KVP_UCX_AM_ID, send->hdr, hdr_bytes, payload, bytes,
				  &param);
	if (UCS_PTR_IS_ERR(request)) {
		send_release(net, send);
		return kvp_ucx_errno(UCS_PTR_STATUS(request));
	}

	net->stats.sent_messages++;
	net->stats.sent_bytes += bytes;
	send->ucp = request;
	if (request)
		TAILQ_INSERT_TAIL(&net->live_sends, send, link);
	else
		send_over(net, send, UCS_OK);
	return 0;
}

int kvp_ucx_tell_sent(struct kvp_net *net)
{
	/* Only those of now: a lane that sends from sent() must not keep us here. */
	struct kvp_ucx_sends done = TAILQ_HEAD_INITIALIZER(done);
	struct kvp_ucx_send *send;
	int n = 0;

	TAILQ_CONCAT(&done, &net->done_sends, link);
	while ((send = TAILQ_FIRST(&done))) {
		void *user = send->user;
		int status = send->status;

		TAILQ_REMOVE(&done, send, link);
		send_release(net, send);
		net->events->sent(net->arg, user, status);
		n++;
	}
	return n;
}

static void recv_over(struct kvp_ucx_recv *recv, bool arrived)
{
	struct kvp_net *net = recv->net;

	TAILQ_REMOVE(&net->live_recvs, recv, link);
	if (arrived)
		net->events->data(net->arg, recv->hdr, recv->hdr_bytes, recv->place, recv->bytes);
	else
		net->events->lost(net->arg, recv->hdr, recv->hdr_bytes, recv->place);
	TAILQ_INSERT_HEAD(&net->free_recvs, recv, link);
}

static void on_received(void *request, ucs_status_t status, size_t length, void *user_data)
{
	struct kvp_ucx_recv *recv = user_data;

	ucp_request_free(request);
	recv_over(recv, status == UCS_OK && length == recv->bytes);
}

/* A peer of ours never asks for a rendezvous; one with another UCX configuration may. */
static void recv_rendezvous(struct kvp_ucx_recv *recv, void *descriptor)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.memory_type = kvp_ucx_memory_type(recv->net, recv->place),
		.cb.recv_am = on_received,
		.user_data = recv,
	};
	struct kvp_net *net = recv->net;
	ucs_status_ptr_t request;

	TAILQ_REMOVE(&net->free_recvs, recv, link);
	TAILQ_INSERT_TAIL(&net->live_recvs, recv, link);
	request = ucp_am_recv_data_nbx(net->worker, descriptor, recv->place, recv->bytes, &param);
	if (!UCS_PTR_IS_PTR(request))
		recv_over(recv, !UCS_PTR_IS_ERR(request));
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_bytes, void *data,
			       size_t bytes, const ucp_am_recv_param_t *param)
{
	struct kvp_net *net = arg;
	bool rendezvous = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
	struct kvp_ucx_recv *recv = TAILQ_FIRST(&net->free_recvs);
	/* UCX puts the header behind the payload, so at any address: the lane gets it aligned. */
	_Alignas(16) unsigned char hdr[KVP_NET_HDR_MAX];
	void *place;

	if (header_bytes == 0 || header_bytes > sizeof(hdr) || net->closing ||
	    (rendezvous && !recv)) {
		net->stats.dropped++;
		return UCS_OK;
	}

	net->stats.recv_messages++;
	net->stats.recv_bytes += bytes;
	memcpy(hdr, header, header_bytes);
	place = net->events->message(net->arg, hdr, header_bytes, bytes);
	if (bytes == 0)
		return UCS_OK;
	if (!place) {
		net->stats.dropped++;
		return UCS_OK;
	}

	if (!rendezvous) {
		net->events->data(net->arg, hdr, header_bytes, data, bytes);
		return UCS_OK;
	}

	recv->place = place;
	recv->bytes = bytes;
	recv->hdr_bytes = header_bytes;
	memcpy(recv->hdr, hdr, header_bytes);
	recv_rendezvous(recv, data);
	return UCS_OK;
}

int kvp_ucx_msg_init(struct kvp_net *net)
{
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
			      UCP_AM_HANDLER_PARAM_FIELD_ARG,
		.id = KVP_UCX_AM_ID,
		.cb = on_message,
		.arg = net,
	};

	TAILQ_INIT(&net->free_sends);
	TAILQ_INIT(&net->live_sends);
	TAILQ_INIT(&net->done_sends);
	TAILQ_INIT(&net->free_recvs);
	TAILQ_INIT(&net->live_recvs);
	net->sends = calloc(KVP_UCX_SENDS, sizeof(*net->sends));
	net->recvs = calloc(KVP_UCX_RECVS, sizeof(*net->recvs));
	if (!net->sends || !net->recvs)
		return -ENOMEM;

	for (size_t i = 0; i < KVP_UCX_RECVS; i++) {
		net->recvs[i].net = net;
		TAILQ_INSERT_TAIL(&net->free_recvs, &net->recvs[i], link);
	}
	return kvp_ucx_errno(ucp_worker_set_am_recv_handler(net->worker, &handler));
}

void kvp_ucx_abandon(struct kvp_net *net)
{
	struct kvp_ucx_send *send;
	struct kvp_ucx_recv *recv;

	while ((send = TAILQ_FIRST(&net->live_sends))) {
		TAILQ_REMOVE(&net->live_sends, send, link);
		send_over(net, send, UCS_ERR_CANCELED);
	}
	(void)kvp_ucx_tell_sent(net); /* the count is for progress() */
	while ((recv = TAILQ_FIRST(&net->live_recvs)))
		recv_over(recv, false);
}
