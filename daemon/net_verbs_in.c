/* SPDX-License-Identifier: Apache-2.0 */

/* What peers have opened: messages in the order of their numbers, whichever way they came. */

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

struct kvp_vb_in *kvp_vb_in_find(struct kvp_net *net, const uint8_t *id, uint32_t ep)
{
	struct kvp_vb_in *in;

	TAILQ_FOREACH (in, &net->ins, link) {
		if (in->ep == ep && !in->ending && memcmp(in->id, id, sizeof(in->id)) == 0)
			return in;
	}
	return NULL;
}

int kvp_vb_in_create(struct kvp_net *net, const struct kvp_vb_datagram *request,
		     struct kvp_vb_in **out)
{
	uint32_t window = request->window;
	struct kvp_vb_in *in;

	if (window < KVP_VB_WINDOW_MIN || window > KVP_VB_WINDOW_MAX || (window & (window - 1)))
		return -EPROTO;
	if (net->n_ins == KVP_VB_INS)
		return -ENOBUFS;
	in = calloc(1, sizeof(*in));
	if (!in)
		return -ENOMEM;
	in->held = calloc(window, sizeof(*in->held));
	if (!in->held) {
		free(in);
		return -ENOMEM;
	}

	in->net = net;
	in->ep = request->ep;
	in->number = request->number;
	in->window = window;
	memcpy(in->id, request->from, sizeof(in->id));
	TAILQ_INSERT_TAIL(&net->ins, in, link);
	net->n_ins++;
	*out = in;
	return 0;
}

void kvp_vb_in_end(struct kvp_vb_in *in)
{
	struct kvp_vb_conn *conn;

	if (in->ending)
		return;

	in->ending = in->net->ending = true;
	TAILQ_FOREACH (conn, &in->net->all, link) {
		if (conn->in == in)
			kvp_vb_conn_end(conn);
	}
}

static bool has_conn(const struct kvp_vb_in *in)
{
	const struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &in->net->all, link) {
		if (conn->in == in)
			return true;
	}
	return false;
}

void kvp_vb_turn_ins(struct kvp_net *net)
{
	struct kvp_vb_in *in, *next;

	if (!net->ending)
		return;
	net->ending = false;
	for (in = TAILQ_FIRST(&net->ins); in; in = next) {
		next = TAILQ_NEXT(in, link);
		if (!in->ending)
			continue;
		if (has_conn(in)) {
			net->ending = true;
			continue;
		}
		TAILQ_REMOVE(&net->ins, in, link);
		net->n_ins--;
		free(in->held);
		free(in);
	}
}

/* ---- delivery */

static void deliver(struct kvp_net *net, const struct kvp_vb_held *message)
{
	_Alignas(16) unsigned char copy[KVP_NET_HDR_MAX];
	void *want;

	memcpy(copy, message->hdr, message->hdr_bytes);
	net->stats.recv_messages++;
	net->stats.recv_bytes += message->bytes;
	want = net->events->message(net->arg, copy, message->hdr_bytes, message->bytes);
	if (message->bytes == 0)
		return;
	if (want != message->place) {
		net->stats.dropped++; /* it lies in a slot that nobody reads */
		if (want)
			net->events->lost(net->arg, copy, message->hdr_bytes, want);
		return;
	}
	net->events->data(net->arg, copy, message->hdr_bytes, message->place, message->bytes);
}

/* A message that no peer sends who keeps the rules. Without it the order has a hole: the end. */
static void malformed(struct kvp_vb_conn *conn)
{
	conn->net->stats.dropped++;
	if (conn->in)
		kvp_vb_in_end(conn->in);
}

/* A message has arrived: it waits until all before it have been delivered. */
static void take(struct kvp_vb_in *in, uint32_t low, const struct kvp_vb_held *message)
{
	uint64_t seq = kvp_vb_expand(in->next, low);
	struct kvp_vb_held *held = &in->held[seq & (in->window - 1)];

	if (seq < in->next || seq - in->next >= in->window || held->set) {
		in->net->stats.dropped++; /* no peer that keeps the rules sends it */
		return;
	}
	if (seq > in->next) {
		*held = *message;
		held->set = true;
		return;
	}
	in->next++;
	deliver(in->net, message);
	for (;;) {
		held = &in->held[in->next & (in->window - 1)];
		if (!held->set)
			return;
		held->set = false;
		in->next++;
		deliver(in->net, held);
	}
}

/* ---- after the loss of a connection */

/* One that has brought nothing yet may be up at this end only. */
static bool answers(const struct kvp_vb_conn *conn, const struct kvp_vb_in *in)
{
	return conn->in == in && conn->state == KVP_VB_OPEN && conn->received > 0 &&
	       kvp_qp_room(&conn->qp) > 0;
}

/* Says which messages are here, by the connection that the question came by, NULL: by any. An
 * answer that cannot be sent now is asked for again. */
static void tell_synced(struct kvp_vb_in *in, uint32_t tag, struct kvp_vb_conn *via)
{
	uint8_t bits[KVP_VB_WINDOW_MAX / 8] = { 0 };
	const struct kvp_vb_frame frame = {
		.kind = KVP_VB_SYNCED,
		.hdr_bytes = (uint16_t)(in->window / 8),
		.seq = (uint32_t)in->next,
		.tag = tag,
	};
	struct kvp_vb_conn *conn = via && answers(via, in) ? via : TAILQ_FIRST(&in->net->all);

	for (uint32_t i = 0; i < in->window; i++) {
		if (in->held[(in->next + i) & (in->window - 1)].set)
			bits[i / 8] = (uint8_t)(bits[i / 8] | 1u << i % 8);
	}
	for (; conn; conn = TAILQ_NEXT(conn, link)) {
		if (!answers(conn, in) || kvp_vb_add_frame(conn, &frame, bits) < 0)
			continue; /* the latter shows as a loss */
		in->told = in->next;
		return;
	}
}

/* The answer waits until the lost connection can bring nothing any more. */
static void on_sync(struct kvp_vb_conn *via, uint32_t tag)
{
	struct kvp_vb_in *in = via->in;
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &in->net->all, link) {
		if (conn->in == in && conn->peer_conn == tag && conn != via) {
			kvp_vb_conn_end(conn);
			return;
		}
	}
	tell_synced(in, tag, via);
}

void kvp_vb_in_not_made(struct kvp_vb_conn *conn)
{
	struct kvp_vb_in *in = conn->in;

	kvp_vb_conn_leave(conn);
	if (!in->joined && !has_conn(in))
		kvp_vb_in_end(in); /* nobody counts on it */
}

/* Even if it has not drained: what is here is known, and who sent the rest knows whether it can be
 * sent again. */
void kvp_vb_in_gone(struct kvp_vb_conn *conn)
{
	struct kvp_vb_in *in = conn->in;
	uint32_t tag = conn->peer_conn;

	kvp_vb_in_not_made(conn);
	if (!in->ending)
		tell_synced(in, tag, NULL);
}

/* ---- receives */

static void on_whole(struct kvp_vb_conn *conn, const struct ibv_wc *wc)
{
	struct kvp_net *net = conn->net;
	uint32_t imm = be32toh(wc->imm_data);
	const struct kvp_vb_place *place = &net->places[imm & 0xffff];
	struct kvp_vb_held message = { .set = false };
	struct kvp_vb_tail tail;

	if (!conn->in || (imm & 0xffff) >= net->n_places || place->apart ||
	    place->nonce != imm >> 16 || wc->byte_len <= sizeof(tail) ||
	    wc->byte_len > place->bytes + sizeof(tail)) {
		malformed(conn);
		return;
	}
	message.bytes = wc->byte_len - sizeof(tail);
	memcpy(&tail, place->base + message.bytes, sizeof(tail));
	if (tail.magic != KVP_VB_TAIL_MAGIC || tail.bytes != message.bytes || tail.hdr_bytes == 0 ||
	    tail.hdr_bytes > sizeof(tail.hdr)) {
		malformed(conn);
		return;
	}
	message.place = place->base;
	message.hdr_bytes = tail.hdr_bytes;
	memcpy(message.hdr, tail.hdr, tail.hdr_bytes);
	take(conn->in, tail.seq, &message);
}

/* To who opened the connection. */
static void on_back(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame, const uint8_t *rest)
{
	struct kvp_net_ep *ep = conn->ep;
	uint64_t next = kvp_vb_expand(ep->delivered, frame->seq);

	if (frame->kind == KVP_VB_SYNCED) {
		kvp_vb_ep_synced(conn, frame, rest);
		return;
	}
	if (frame->kind != KVP_VB_CREDIT) {
		malformed(conn);
		return;
	}
	if (frame->credits <= KVP_VB_CREDITS_MAX - conn->credits)
		conn->credits += frame->credits;
	if (next > ep->delivered && next <= ep->next_seq)
		ep->delivered = next;
}

static void on_numbered(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame,
			const uint8_t *hdr)
{
	struct kvp_vb_held message = { .hdr_bytes = frame->hdr_bytes };

	if (frame->hdr_bytes == 0 || (frame->kind == KVP_VB_PUT) != (frame->bytes > 0)) {
		malformed(conn);
		return;
	}
	memcpy(message.hdr, hdr, frame->hdr_bytes);
	message.place = (void *)(uintptr_t)frame->place; /* compared, not followed */
	message.bytes = frame->bytes;
	take(conn->in, frame->seq, &message);
}

static void on_frame(struct kvp_vb_conn *conn, const uint8_t *buffer, uint32_t bytes)
{
	struct kvp_vb_frame frame;
	bool fits;

	if (bytes < sizeof(frame)) {
		malformed(conn);
		return;
	}
	memcpy(&frame, buffer, sizeof(frame));
	fits = frame.hdr_bytes <= KVP_NET_HDR_MAX && frame.hdr_bytes == bytes - sizeof(frame);
	if (fits && !conn->in)
		on_back(conn, &frame, buffer + sizeof(frame));
	else if (fits && frame.kind == KVP_VB_SYNC)
		on_sync(conn, frame.tag);
	else if (fits && (frame.kind == KVP_VB_MESSAGE || frame.kind == KVP_VB_PUT))
		on_numbered(conn, &frame, buffer + sizeof(frame));
	else
		malformed(conn);
}

void kvp_vb_received(struct kvp_vb_conn *conn, const struct ibv_wc *wc)
{
	uint32_t idx = (uint32_t)(wc->wr_id & KVP_QP_SEQ_MASK);
	int r;

	if (idx >= conn->n_recv)
		return;

	if (!conn->net->closing && !(conn->in && conn->in->ending)) {
		if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
			on_whole(conn, wc);
		else
			on_frame(conn,
				 (const uint8_t *)(uintptr_t)conn->rq.base +
					 (size_t)idx * KVP_VB_BUFFER_BYTES,
				 wc->byte_len);
	}
	if (conn->state == KVP_VB_FAILED)
		return; /* it only drains */
	r = kvp_rq_give(&conn->rq, idx);
	if (r < 0) {
		kvp_vb_conn_fail(conn, r);
		return;
	}
	if (conn->in)
		conn->consumed++;
	kvp_vb_conn_dirty(conn);
}
