/* SPDX-License-Identifier: Apache-2.0 */

/* Endpoints: their rails, and what becomes of messages when one is lost. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

static struct kvp_log_limit log_limit = KVP_LOG_LIMIT(20, 10);

static void trouble(struct kvp_net_ep *ep)
{
	ep->net->n_trouble += !ep->trouble;
	ep->trouble = true;
}

static bool path_live(const struct kvp_vb_path *path)
{
	return path->conn && path->conn->state != KVP_VB_FAILED;
}

static bool path_open(const struct kvp_vb_path *path)
{
	return path->conn && path->conn->state == KVP_VB_OPEN;
}

static unsigned count(const struct kvp_net_ep *ep, bool (*is)(const struct kvp_vb_path *path))
{
	unsigned n = 0;

	for (unsigned i = 0; i < ep->n_paths; i++)
		n += is(&ep->paths[i]);
	return n;
}

static bool path_up(const struct kvp_net_ep *ep, const struct kvp_vb_path *path)
{
	return kvp_vb_rail_up(path->rail) && kvp_vb_end_known(&ep->peer.ends[path->end]);
}

/* It has no connection, and may get one now. */
static bool path_free(const struct kvp_net_ep *ep, const struct kvp_vb_path *path)
{
	return !path->conn && path_up(ep, path) && ep->net->now_ns >= path->retry_ns;
}

static void back_off(const struct kvp_net_ep *ep, struct kvp_vb_path *path)
{
	path->retry_ns = ep->net->now_ns + path->wait_ns;
	path->wait_ns = KVP_MIN(2 * path->wait_ns, KVP_VB_RETRY_MAX_NS);
}

/* ---- opening */

static void add_path(struct kvp_net_ep *ep, unsigned rail, unsigned end)
{
	struct kvp_net *net = ep->net;

	if (ep->n_paths == KVP_VB_RAILS ||
	    ep->peer.ends[end].ethernet != net->rails[rail].nic.ethernet)
		return;
	ep->paths[ep->n_paths++] = (struct kvp_vb_path){
		.rail = &net->rails[rail],
		.end = end,
		.wait_ns = KVP_VB_RETRY_MIN_NS,
	};
}

static void make_paths(struct kvp_net_ep *ep)
{
	const struct kvp_net *net = ep->net;
	unsigned n_ends = ep->peer.n_ends;

	if (!net->config.same_rail) {
		for (unsigned i = 0; i < KVP_MAX(net->n_rails, n_ends); i++)
			add_path(ep, i % net->n_rails, i % n_ends);
		return;
	}
	for (unsigned i = 0; i < net->n_rails; i++) {
		for (unsigned k = 0; k < n_ends; k++) {
			if (net->rails[i].nic.number == ep->peer.ends[k].number)
				add_path(ep, i, k);
		}
	}
}

static int path_connect(struct kvp_net_ep *ep, unsigned k)
{
	struct kvp_vb_path *path = &ep->paths[k];
	struct kvp_vb_conn *conn;
	int r = kvp_vb_conn_create(path->rail, ep, NULL, &conn);

	if (r < 0)
		return r;

	conn->path = k;
	conn->to = ep->peer.ends[path->end];
	if (path->rail->cm)
		r = kvp_vb_cm_connect(conn);
	if (r < 0) {
		kvp_vb_conn_leave(conn);
		return r;
	}
	path->conn = conn;
	if (!path->rail->cm)
		kvp_vb_conn_ask(conn);
	return 0;
}

/* A connection over one rail, another one for each endpoint, so that they share the load. */
static int connect_first(struct kvp_net_ep *ep)
{
	int r = -ENODEV;

	for (unsigned i = 0; i < ep->n_paths; i++) {
		unsigned k = (ep->id + i) % ep->n_paths;

		if (path_up(ep, &ep->paths[k]))
			r = path_connect(ep, k);
		else if (!ep->paths[k].rail->dead)
			r = -ENETDOWN;
		if (r == 0)
			break;
	}
	return r;
}

static void ep_free(struct kvp_net_ep *ep)
{
	for (uint32_t i = 0; ep->items && i < ep->window; i++)
		free(ep->items[i].runs);
	free(ep->items);
	free(ep);
}

static int ep_create(struct kvp_net *net, const struct kvp_vb_address *peer,
		     struct kvp_net_ep **out)
{
	struct kvp_net_ep *ep = calloc(1, sizeof(*ep));

	if (!ep)
		return -ENOMEM;

	ep->net = net;
	ep->id = net->next_ep++;
	ep->peer = *peer;
	ep->since_ns = ep->used_ns = net->now_ns;
	ep->window = KVP_VB_WINDOW_MIN;
	while (ep->window < KVP_VB_WINDOW_MAX && ep->window < 2 * net->config.depth)
		ep->window *= 2;
	TAILQ_INIT(&ep->again);
	make_paths(ep);
	ep->items = calloc(ep->window, sizeof(*ep->items));
	if (!ep->items || ep->n_paths == 0) {
		int r = ep->items ? -EHOSTUNREACH : -ENOMEM;

		ep_free(ep);
		return r;
	}
	for (uint32_t i = 0; i < ep->window; i++)
		ep->items[i].ep = ep;
	*out = ep;
	return 0;
}

int kvp_vb_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, uint64_t number,
		   void *ep_arg, struct kvp_net_ep **out)
{
	struct kvp_vb_address peer;
	struct kvp_net_ep *ep;
	int r = kvp_vb_address_check(addr, addr_bytes, &peer);

	if (r < 0)
		return r;
	r = ep_create(net, &peer, &ep);
	if (r < 0)
		return r;
	ep->arg = ep_arg;
	ep->number = number;
	r = connect_first(ep);
	if (r < 0) {
		ep_free(ep);
		return r;
	}
	TAILQ_INSERT_TAIL(&net->eps, ep, link);
	net->stats.eps++;
	*out = ep;
	return 0;
}

/* ---- failing */

static void reason_of(const struct kvp_vb_conn *conn, char *buf, size_t bytes)
{
	union ibv_gid gid;
	char text[64];

	memcpy(gid.raw, conn->to.gid, sizeof(gid.raw));
	(void)snprintf(buf, bytes, "%s to %s: %s", conn->rail->nic.device,
		       kvp_nic_gid_text(&gid, text, sizeof(text)),
		       conn->qp.reason ? ibv_wc_status_str(conn->qp.reason)
				       : strerror(-conn->status)); /* cut at worst */
}

void kvp_vb_ep_fail(struct kvp_net_ep *ep, int status, const char *reason)
{
	if (ep->state != KVP_VB_EP_OPEN)
		return;

	ep->state = KVP_VB_EP_FAILED;
	ep->status = status;
	if (reason != ep->reason)
		(void)snprintf(ep->reason, sizeof(ep->reason), "%s", reason); /* cut at worst */
	ep->since_ns = ep->net->now_ns;
	for (unsigned i = 0; i < ep->n_paths; i++) {
		if (ep->paths[i].conn)
			kvp_vb_conn_end(ep->paths[i].conn);
	}
	ep->tell_failed = true;
	ep->net->n_tell++;
	trouble(ep);
}

/* Is there a rail that is open, or has not just failed as well? */
static bool hopeful(const struct kvp_net_ep *ep)
{
	for (unsigned i = 0; i < ep->n_paths; i++) {
		if (path_live(&ep->paths[i]) || path_free(ep, &ep->paths[i]))
			return true;
	}
	return false;
}

/* All rails have failed of late. They are tried at once, however short ago their last try was, and
 * for a while: a port may be just coming back. A single rail has had its tries. */
static bool last_try(struct kvp_net_ep *ep)
{
	uint64_t now = ep->net->now_ns;

	if (!ep->joined || ep->n_paths == 1)
		return false;
	if (ep->last_ns == 0) {
		ep->last_ns = now + KVP_VB_LAST_NS;
		for (unsigned i = 0; i < ep->n_paths; i++)
			ep->paths[i].retry_ns = 0;
	}
	return now < ep->last_ns;
}

/* A peer that knows the endpoint no more has lost what came of it: no rail will do. Other reasons
 * are this rail's: there may be no way back on a link that has just come up. */
void kvp_vb_ep_rejected(struct kvp_net_ep *ep, int status)
{
	if (status == -ECONNRESET && ep->joined && ep->status == 0)
		ep->status = status;
}

void kvp_vb_ep_failing(struct kvp_vb_conn *conn)
{
	struct kvp_net_ep *ep = conn->ep;

	ep->paths[conn->path].failed = true;
	back_off(ep, &ep->paths[conn->path]);
	if (ep->state != KVP_VB_EP_OPEN)
		return;

	/* Tries after the last loss are not what it was lost by. */
	if (conn->opened || ep->last_ns == 0 || ep->status < 0)
		reason_of(conn, ep->reason, sizeof(ep->reason));
	for (unsigned i = 0; i < KVP_VB_SYNCS; i++)
		ep->syncs[i].sent_ns = 0; /* it may have carried the question, or the answer */
	if (ep->status < 0 || (!hopeful(ep) && !last_try(ep))) {
		kvp_vb_ep_fail(ep, ep->status < 0 ? ep->status : conn->status, ep->reason);
		return;
	}
	trouble(ep);
}

void kvp_vb_ep_up(struct kvp_vb_conn *conn)
{
	struct kvp_net_ep *ep = conn->ep;
	struct kvp_vb_path *path = &ep->paths[conn->path];

	if (path->failed)
		kvp_log_limited(&log_limit, KVP_LOG_NOTICE, "verbs %s: connection is back",
				conn->rail->nic.device);
	path->failed = false;
	path->tell = false;
	path->wait_ns = KVP_VB_RETRY_MIN_NS;
	ep->joined = true;
	ep->alone_ns = 0;
	ep->last_ns = 0;
}

/* Of a connection that is gone: is it not sure that the message was delivered? One that ended
 * without a loss has brought what was acknowledged. */
static bool in_doubt(const struct kvp_vb_item *item, bool quiet)
{
	const struct kvp_net_ep *ep = item->ep;

	if (item->state != KVP_VB_FREE || quiet)
		return item->state == KVP_VB_UNKNOWN;
	return item->seq >= ep->delivered && item->seq < ep->next_seq;
}

/* Nothing of the connection runs any more. What it took with it has to be asked for. */
void kvp_vb_ep_gone(struct kvp_vb_conn *conn)
{
	struct kvp_net_ep *ep = conn->ep;
	uint32_t tag = conn->tag, i = 0;
	bool quiet = conn->quiet, unknown = false;

	kvp_vb_ud_send(conn, KVP_VB_BYE); /* else the peer finds out by its keepalive */
	ep->paths[conn->path].conn = NULL;
	kvp_vb_conn_leave(conn);
	for (uint32_t k = 0; k < ep->window; k++)
		unknown = unknown || (ep->items[k].tag == tag && in_doubt(&ep->items[k], quiet));
	if (!unknown || ep->state != KVP_VB_EP_OPEN)
		return;

	while (i < KVP_VB_SYNCS && ep->syncs[i].tag)
		i++;
	if (i == KVP_VB_SYNCS) {
		kvp_vb_ep_fail(ep, -EREMOTEIO, "rails fail faster than they recover");
		return;
	}
	ep->syncs[i] = (struct kvp_vb_sync){ .tag = tag };
	trouble(ep);
}

/* ---- what was lost on the way */

static bool bit(const uint8_t *bits, uint64_t i)
{
	return bits[i / 8] >> (i % 8) & 1;
}

/* Ends the items that the lost connection has brought, and queues the others. 0, or -EREMOTEIO: one
 * that was acknowledged is not there, and here no more. */
static int sort_items(struct kvp_net_ep *ep, uint32_t tag, uint64_t next, const uint8_t *bits)
{
	struct kvp_vb_rail *rail = NULL;
	unsigned n = 0;
	int r = 0;

	for (uint64_t seq = ep->next_seq - KVP_MIN(ep->next_seq, (uint64_t)ep->window);
	     seq < ep->next_seq; seq++) {
		struct kvp_vb_item *item = &ep->items[seq & (ep->window - 1)];

		bool here = seq < next || (seq - next < ep->window && bit(bits, seq - next));

		if (item->tag != tag || item->seq != seq)
			continue;
		if (item->state == KVP_VB_FREE && !here)
			r = -EREMOTEIO;
		if (item->state != KVP_VB_UNKNOWN)
			continue;
		if (here) {
			kvp_vb_item_end(item, 0);
			continue;
		}
		item->state = KVP_VB_AGAIN;
		TAILQ_INSERT_TAIL(&ep->again, item, link);
		n++;
	}
	for (unsigned i = 0; i < ep->n_paths && !rail; i++) {
		if (path_open(&ep->paths[i]))
			rail = ep->paths[i].rail;
	}
	if (rail)
		rail->resent += n;
	kvp_log_limited(&log_limit, KVP_LOG_NOTICE,
			"verbs: %u messages of a lost connection go over another", n);
	return r;
}

void kvp_vb_ep_synced(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame,
		      const uint8_t *bits)
{
	struct kvp_net_ep *ep = conn->ep;
	uint64_t next = kvp_vb_expand(ep->delivered, frame->seq);

	if (ep->state != KVP_VB_EP_OPEN || frame->tag == 0 || next > ep->next_seq ||
	    frame->hdr_bytes != ep->window / 8)
		return;
	for (unsigned i = 0; i < KVP_VB_SYNCS; i++) {
		if (ep->syncs[i].tag != frame->tag)
			continue;
		ep->syncs[i].tag = 0;
		ep->delivered = KVP_MAX(ep->delivered, next);
		if (sort_items(ep, frame->tag, next, bits) < 0)
			kvp_vb_ep_fail(ep, -EREMOTEIO, "a message is lost that was acknowledged");
		return;
	}
}

static int sync_step(struct kvp_net_ep *ep)
{
	uint64_t now = ep->net->now_ns;
	int n = 0;

	for (unsigned i = 0; i < KVP_VB_SYNCS; i++) {
		const struct kvp_vb_frame frame = {
			.kind = KVP_VB_SYNC,
			.tag = ep->syncs[i].tag,
		};
		struct kvp_vb_conn *conn;

		if (frame.tag == 0 ||
		    (ep->syncs[i].sent_ns && now - ep->syncs[i].sent_ns < 4 * KVP_VB_REPEAT_NS))
			continue;
		conn = kvp_vb_ep_pick(ep, 1, UINT32_MAX, 0);
		if (!conn)
			break;
		conn->credits--;
		ep->syncs[i].sent_ns = now;
		n++;
		if (kvp_vb_add_frame(conn, &frame, NULL) < 0) {
			kvp_vb_conn_fail(conn, -EREMOTEIO);
			break;
		}
	}
	return n;
}

static int again_step(struct kvp_net_ep *ep)
{
	struct kvp_vb_item *item;
	int n = 0;

	while (ep->state == KVP_VB_EP_OPEN && (item = TAILQ_FIRST(&ep->again))) {
		int r;

		TAILQ_REMOVE(&ep->again, item, link);
		r = kvp_vb_item_post(item);
		if (r == 0) {
			n++;
			continue;
		}
		TAILQ_INSERT_HEAD(&ep->again, item, link);
		if (r != -EAGAIN)
			kvp_vb_ep_fail(ep, r, strerror(-r));
		break;
	}
	return n;
}

/* Without any connection: over all rails that may do. */
static int connect_step(struct kvp_net_ep *ep)
{
	uint64_t now = ep->net->now_ns;
	int n = 0;

	if (count(ep, path_open) > 0)
		return 0;
	if (ep->alone_ns == 0)
		ep->alone_ns = now;
	for (unsigned i = 0; i < ep->n_paths; i++) {
		if (!path_free(ep, &ep->paths[i]))
			continue;
		if (path_connect(ep, i) == 0)
			n++;
		else
			back_off(ep, &ep->paths[i]);
	}
	if ((count(ep, path_live) == 0 && now - ep->alone_ns > KVP_VB_CONNECT_NS) ||
	    now - ep->alone_ns > 2 * KVP_VB_CONNECT_NS || (ep->last_ns > 0 && now > ep->last_ns))
		kvp_vb_ep_fail(ep, -ETIMEDOUT, ep->reason[0] ? ep->reason : "no rail is usable");
	return n;
}

/* ---- the turn */

static bool better(const struct kvp_vb_conn *conn, const struct kvp_vb_conn *than, uint32_t avoid)
{
	bool bad = avoid >> conn->path & 1, worse = avoid >> than->path & 1;

	return bad != worse ? worse : conn->bytes_out < than->bytes_out;
}

bool kvp_vb_ep_reaches(const struct kvp_net_ep *ep, uint32_t ends)
{
	for (unsigned i = 0; i < ep->n_paths; i++) {
		if (ends >> ep->paths[i].end & 1)
			return true;
	}
	return false;
}

struct kvp_vb_conn *kvp_vb_ep_pick(struct kvp_net_ep *ep, unsigned requests, uint32_t ends,
				   uint32_t avoid)
{
	struct kvp_vb_conn *best = NULL;
	bool live = false;

	ep->turn++;
	for (unsigned i = 0; i < ep->n_paths; i++) {
		struct kvp_vb_path *path = &ep->paths[(ep->turn + i) % ep->n_paths];
		struct kvp_vb_conn *conn = path->conn;

		live = live || path_live(path);
		if (!path_open(path) || !(ends >> path->end & 1) || conn->credits == 0 ||
		    kvp_qp_room(&conn->qp) < requests)
			continue;
		if (!best || better(conn, best, avoid))
			best = conn;
	}
	if (!live)
		trouble(ep); /* all were idle: they come back */
	return best;
}

static void end_items(struct kvp_net_ep *ep, int status)
{
	for (uint32_t i = 0; i < ep->window; i++) {
		if (ep->items[i].state != KVP_VB_FREE)
			kvp_vb_item_end(&ep->items[i], status);
	}
	TAILQ_INIT(&ep->again);
}

/* What the peer's net has opened to us for the same session goes with our own endpoint to it: from
 * closed() on it cannot write here any more. Is it gone? */
static bool ins_gone(struct kvp_net *net, const struct kvp_net_ep *ep)
{
	struct kvp_vb_in *in;
	bool gone = true;

	TAILQ_FOREACH (in, &net->ins, link) {
		if (in->number != ep->number || memcmp(in->id, ep->peer.id, sizeof(in->id)) != 0)
			continue;
		kvp_vb_in_end(in);
		gone = false;
	}
	return gone;
}

static void ep_over(struct kvp_net_ep *ep)
{
	struct kvp_net *net = ep->net;
	void *arg = ep->arg;

	end_items(ep, -ECANCELED);
	TAILQ_REMOVE(&net->eps, ep, link);
	net->stats.eps--;
	net->n_trouble -= ep->trouble;
	ep_free(ep);
	(void)kvp_vb_tell_sent(net); /* before closed(); the count is for progress() */
	net->events->closed(net->arg, arg);
}

static bool has_conn(const struct kvp_vb_path *path)
{
	return path->conn;
}

static bool well(const struct kvp_net_ep *ep)
{
	for (unsigned i = 0; i < KVP_VB_SYNCS; i++) {
		if (ep->syncs[i].tag)
			return false;
	}
	return TAILQ_EMPTY(&ep->again) && count(ep, path_open) > 0;
}

static int ep_step(struct kvp_net_ep *ep)
{
	bool gone = count(ep, has_conn) == 0;
	int n = 0;

	if (ep->state == KVP_VB_EP_OPEN) {
		n += connect_step(ep);
		n += sync_step(ep);
		n += again_step(ep);
		if (ep->state == KVP_VB_EP_OPEN && well(ep)) {
			ep->trouble = false;
			ep->net->n_trouble--;
		}
		return n;
	}
	if (!gone)
		return 0;
	if (ep->state == KVP_VB_EP_CLOSING) {
		if (!ins_gone(ep->net, ep))
			return 0;
		ep_over(ep);
		return 1;
	}
	end_items(ep, ep->status);
	ep->trouble = false;
	ep->net->n_trouble--;
	return 1;
}

int kvp_vb_turn_eps(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep && net->n_trouble > 0; ep = next) {
		next = TAILQ_NEXT(ep, link); /* the callback removes none */
		if (ep->trouble)
			n += ep_step(ep);
	}
	return n;
}

void kvp_vb_ep_close(struct kvp_net *net, struct kvp_net_ep *ep)
{
	if (ep->state == KVP_VB_EP_CLOSING)
		return;

	if (ep->tell_failed)
		net->n_tell--;
	ep->tell_failed = false;
	ep->state = KVP_VB_EP_CLOSING;
	ep->since_ns = net->now_ns;
	for (unsigned i = 0; i < ep->n_paths; i++) {
		if (ep->paths[i].conn)
			kvp_vb_conn_end(ep->paths[i].conn);
	}
	trouble(ep);
}

int kvp_vb_tell_failed(struct kvp_net *net)
{
	struct kvp_net_ep *ep, *next;
	int n = 0;

	for (ep = TAILQ_FIRST(&net->eps); ep && net->n_tell > 0; ep = next) {
		next = TAILQ_NEXT(ep, link); /* the callback removes none */
		if (!ep->tell_failed)
			continue;
		ep->tell_failed = false;
		net->n_tell--;
		n++;
		net->events->failed(net->arg, ep, ep->status);
	}
	return n;
}

/* More rails: for payloads, when the first does not answer soon, and those that have to tell. */
static void widen(struct kvp_net_ep *ep)
{
	uint64_t now = ep->net->now_ns, idle_ns = ep->net->config.idle_ns;
	bool slow = !ep->joined && now - ep->since_ns >= KVP_VB_RETRY_MIN_NS;

	if (idle_ns > 0 && now - ep->used_ns >= idle_ns)
		return;
	for (unsigned i = 0; i < ep->n_paths; i++) {
		struct kvp_vb_path *path = &ep->paths[i];

		if ((ep->spread || slow || path->tell) && path_free(ep, path) &&
		    path_connect(ep, i) < 0)
			back_off(ep, path); /* a route may come later than its port */
	}
}

void kvp_vb_ep_tick(struct kvp_net *net)
{
	struct kvp_net_ep *ep;

	TAILQ_FOREACH (ep, &net->eps, link) {
		if (ep->state == KVP_VB_EP_OPEN && count(ep, has_conn) < ep->n_paths)
			widen(ep);
	}
}

void kvp_vb_ep_port_up(struct kvp_vb_rail *rail, bool moved)
{
	struct kvp_net_ep *ep;

	TAILQ_FOREACH (ep, &rail->net->eps, link) {
		for (unsigned i = 0; i < ep->n_paths; i++) {
			struct kvp_vb_path *path = &ep->paths[i];

			if (path->rail != rail)
				continue;
			path->retry_ns = 0;
			path->tell = path->tell || moved;
		}
	}
}

void kvp_vb_ep_learn(struct kvp_net *net, const uint8_t *from, const struct kvp_vb_end *end)
{
	struct kvp_net_ep *ep;

	if (!kvp_vb_end_known(end))
		return;
	TAILQ_FOREACH (ep, &net->eps, link) {
		if (memcmp(ep->peer.id, from, sizeof(ep->peer.id)) != 0)
			continue;
		for (unsigned i = 0; i < ep->peer.n_ends; i++) {
			struct kvp_vb_end *old = &ep->peer.ends[i];

			/* An address that came by the control session stays. */
			if (!kvp_vb_end_known(old) && old->qpn == end->qpn &&
			    old->qkey == end->qkey && old->ethernet == end->ethernet)
				*old = *end;
		}
	}
}
