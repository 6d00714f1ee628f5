/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/peer.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <utlist.h>

#include "daemon/peer_internal.h"

#define PEER_BACKLOG 64
#define PAUSE_MS 100 /* without memory for a connection: until the next try */

uint64_t kvp_peer_now(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- one peer -------------------------------------------------------------------------------- */

void kvp_peer_set_state(struct kvp_peer *peer, enum kvp_peer_state state)
{
	peer->state = state;
	peer->last_look = false;
	peer->since_ns = kvp_peer_now();
	if (state != KVP_PEER_BACKOFF)
		peer->retry_at_ns = 0;
}

void kvp_peer_set_name(struct kvp_peer *peer, const char *node)
{
	(void)snprintf(peer->node, sizeof(peer->node), "%s", node); /* cut names are fine */
	if (node[0])
		(void)snprintf(peer->name, sizeof(peer->name), "%.48s (%.70s)", peer->node,
			       peer->address);
	else
		(void)snprintf(peer->name, sizeof(peer->name), "%.120s", peer->address);
}

void kvp_peer_set_timer(struct kvp_peer *peer, uint64_t ns)
{
	/* Fails only on a closing handle, and then the peer is gone. */
	(void)uv_timer_start(&peer->timer, kvp_peer_on_timer, KVP_DIV_UP(ns, 1000000u), 0);
}

struct kvp_peer *kvp_peer_new(struct kvp_peers *peers, const char *address, bool outgoing)
{
	struct kvp_peer *peer = calloc(1, sizeof(*peer));

	if (!peer)
		return NULL;
	if (uv_timer_init(peers->loop, &peer->timer) < 0) {
		free(peer);
		return NULL;
	}
	peers->n_handles++;
	peers->n_peers++;
	peer->peers = peers;
	peer->timer.data = peer;
	peer->outgoing = outgoing;
	(void)snprintf(peer->address, sizeof(peer->address), "%s", address);
	kvp_peer_set_name(peer, "");
	kvp_peer_set_state(peer, KVP_PEER_CONNECTING);
	DL_APPEND(peers->list, peer);
	return peer;
}

static void peer_closed(uv_handle_t *handle)
{
	struct kvp_peer *peer = handle->data;

	peer->peers->n_handles--;
	free(peer);
}

static bool of_same_host(const struct kvp_peer *a, const struct kvp_peer *b)
{
	return a->of_host > 0 && kvp_peer_same_host((const struct sockaddr *)&a->from,
						    (const struct sockaddr *)&b->from);
}

uint32_t kvp_peers_count_host(struct kvp_peer *peer)
{
	const struct kvp_peer *other;
	uint32_t n = 0;

	DL_FOREACH (peer->peers->list, other)
		n += of_same_host(other, peer);
	if (n < peer->peers->config->peer.max_host_sessions)
		peer->of_host = n + 1;
	return n;
}

/* The others of its host close ranks: the highest number is how many there are. */
static void uncount_host(struct kvp_peer *peer)
{
	struct kvp_peer *other;

	if (peer->of_host == 0)
		return;
	DL_FOREACH (peer->peers->list, other)
		other->of_host -= other->of_host > peer->of_host && of_same_host(other, peer);
	peer->of_host = 0;
}

void kvp_peer_destroy(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;

	if (peer->dead)
		return;
	peer->dead = true;
	uncount_host(peer);
	kvp_peer_conn_close(peer->conn);
	peer->conn = NULL;
	kvp_peers_drop_looped(peers, peer);
	kvp_peer_unadmit(peer);
	if (peer->twin && peer->twin->twin == peer)
		peer->twin->twin = NULL;
	if (peers->self == peer)
		peers->self = NULL;
	if (!peer->self)
		peers->n_peers--;
	DL_DELETE(peers->list, peer);
	uv_close((uv_handle_t *)&peer->timer, peer_closed);
}

bool kvp_peers_full(struct kvp_peers *peers)
{
	struct kvp_peer *peer;

	if (peers->n_peers < peers->config->peer.max_sessions)
		return false;

	/* Who greets does so at once. */
	DL_FOREACH (peers->list, peer) {
		if (peer->outgoing || peer->state != KVP_PEER_HELLO)
			continue;
		peers->refused++;
		kvp_log_limited(&peers->log_limit, KVP_LOG_WARNING,
				"peer %s let go before its hello: peer.max_sessions is %u",
				peer->name, peers->config->peer.max_sessions);
		kvp_peer_destroy(peer);
		return false;
	}
	return true;
}

static struct kvp_peer *get_refused(int error, char *err, size_t err_bytes, const char *fmt, ...)
	KVP_PRINTF(4, 5);
static struct kvp_peer *get_refused(int error, char *err, size_t err_bytes, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(err, err_bytes, fmt, args); /* cut texts are fine */
	va_end(args);
	errno = error;
	return NULL;
}

/* A peer that is not known yet: may it be dialled? */
static struct kvp_peer *get_new(struct kvp_peers *peers, const char *address, char *err,
				size_t err_bytes)
{
	char host[KVP_LIMIT_ADDRESS + 1], port[8];
	struct sockaddr_storage addr;
	struct kvp_peer *peer;

	if (kvp_peer_split(address, host, sizeof(host), port, sizeof(port)) < 0)
		return get_refused(
			EINVAL, err, err_bytes,
			"address \"%.80s\" is not host:port, nor this daemon's \"%.60s\"", address,
			peers->address);
	if (kvp_peer_numeric(host, port, &addr) &&
	    !kvp_peer_may_dial(peers, (const struct sockaddr *)&addr))
		return get_refused(
			EACCES, err, err_bytes,
			"address %.80s is beyond loopback, and peer.plaintext = loopback", address);
	if (peers->stopping)
		return get_refused(ECANCELED, err, err_bytes, "the daemon stops");
	if (kvp_peers_full(peers)) {
		peers->refused++;
		return get_refused(EMFILE, err, err_bytes, "peers: %u, limit peer.max_sessions %u",
				   peers->n_peers, peers->config->peer.max_sessions);
	}
	peer = kvp_peer_new(peers, address, true);
	if (!peer)
		return get_refused(ENOMEM, err, err_bytes, "no memory for a peer");
	peer->holders = 1;
	kvp_peer_dial(peer);
	return peer;
}

struct kvp_peer *kvp_peer_get(struct kvp_peers *peers, const char *address, char *err,
			      size_t err_bytes)
{
	struct kvp_peer *peer;

	if (strcmp(address, peers->address) == 0) {
		peer = kvp_peer_self_get(peers);
		return peer ? peer : get_refused(ENOMEM, err, err_bytes, "no memory for a peer");
	}
	DL_FOREACH (peers->list, peer) {
		if (peer->outgoing && strcmp(peer->address, address) == 0) {
			peer->holders++;
			return peer;
		}
	}
	return get_new(peers, address, err, err_bytes);
}

void kvp_peer_put(struct kvp_peer *peer)
{
	peer->holders--;
	peer->idle_since_ns = kvp_peer_now();
	if (peer->holders > 0 || peer->state == KVP_PEER_UP || peer->state == KVP_PEER_ENDING)
		return; /* an idle session stays for a while; an end still has to be told */
	kvp_peer_destroy(peer);
}

bool kvp_peer_is_up(const struct kvp_peer *peer)
{
	return peer->state == KVP_PEER_UP;
}

/* Longer than a sign of life takes, by half. */
static uint64_t silence_ns(const struct kvp_peer *peer)
{
	return peer->peers->config->peer.heartbeat_ns * 3 / 2;
}

void kvp_peer_heard(struct kvp_peer *peer)
{
	uint64_t now = kvp_peer_now();

	if (now - peer->last_heard_ns > silence_ns(peer)) {
		/* Was it beyond doubt before this silence, for as long as somebody may not look? */
		if (peer->last_heard_ns - peer->again_ns >= peer->peers->config->peer.heartbeat_ns)
			peer->doubt_ns = now;
		peer->again_ns = now;
	}
	peer->last_heard_ns = now;
}

/*
 * A silence ends by a word or by the loss. What is heard first after it may be old: this process
 * may have stood still, and the end of the connection is behind that; the next sign of life is not
 * old. One that is late again and again is believed in the end, between two silences.
 */
bool kvp_peer_in_doubt(const struct kvp_peer *peer)
{
	uint64_t now = kvp_peer_now();

	if (peer->state == KVP_PEER_ENDING || peer->path_lost)
		return true;
	if (peer->state != KVP_PEER_UP || peer->self)
		return false;
	return now - peer->last_heard_ns > silence_ns(peer) ||
	       (now - peer->again_ns <= silence_ns(peer) &&
		now - peer->doubt_ns <= peer->peers->config->peer.lost_after_ns);
}

bool kvp_peer_is_self(const struct kvp_peer *peer)
{
	return peer->self;
}

uint64_t kvp_peer_session(const struct kvp_peer *peer)
{
	return peer->session;
}

const char *kvp_peer_name(const struct kvp_peer *peer)
{
	return peer->name;
}

const char *kvp_peer_reason(const struct kvp_peer *peer)
{
	return peer->reason;
}

uint32_t kvp_peer_unsent(const struct kvp_peer *peer)
{
	return peer->conn ? kvp_peer_conn_unsent(peer->conn) : 0;
}

void *kvp_peer_data(const struct kvp_peer *peer)
{
	return peer->data;
}

void kvp_peer_set_data(struct kvp_peer *peer, void *data)
{
	peer->data = data;
}

int kvp_peer_send(struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	int n;

	if (peer->state != KVP_PEER_UP)
		return -ENOTCONN;
	n = peer->self ? kvp_peer_self_send(peer, msg) : kvp_peer_conn_send(peer->conn, msg);
	if (n == -EMSGSIZE || n == -EINVAL)
		return n; /* the message's fault, not the session's */
	if (n == -ENOBUFS)
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST,
			     "does not read: %u bytes unsent, limit %u",
			     kvp_peer_conn_unsent(peer->conn), KVP_PEER_UNSENT_MAX);
	else if (n < 0)
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST, "cannot be written to: %s",
			     uv_strerror(n));
	if (n < 0)
		return n;
	peer->bytes_sent += (uint64_t)n;
	peer->messages_sent++;
	return 0;
}

void kvp_peer_fail(struct kvp_peer *peer, Kvp__Status status, const char *why)
{
	kvp_peer_end(peer, status, "%s", why);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static void handle_closed(uv_handle_t *handle)
{
	struct kvp_peers *peers = handle->data;

	peers->n_handles--;
}

static void on_pause_over(uv_timer_t *timer);

/* libuv does not look at the listener again before the connection that it holds is taken. */
static void accept_or_pause(struct kvp_peers *peers)
{
	if (kvp_peer_accept(peers) == 0)
		return;
	peers->accept_pauses++;
	kvp_log_limited(&peers->log_limit, KVP_LOG_WARNING,
			"peers: no memory to accept one: next try in %d ms", PAUSE_MS);
	(void)uv_timer_start(&peers->pause, on_pause_over, PAUSE_MS, 0); /* has a callback */
}

static void on_pause_over(uv_timer_t *timer)
{
	accept_or_pause(timer->data);
}

static void on_connection(uv_stream_t *listener, int status)
{
	if (status == 0)
		accept_or_pause(listener->data);
}

/* What others are told: node.advertise, else the bound address; the port is the real one. */
static int set_address(struct kvp_peers *peers, char *err, size_t err_bytes)
{
	const struct kvp_config *config = peers->config;
	struct sockaddr_storage addr = { 0 };
	int addr_bytes = sizeof(addr);
	char bound[64], host[KVP_LIMIT_ADDRESS + 1], port[8], real[KVP_LIMIT_ADDRESS + 1],
		real_port[8];
	const char *given = config->node.advertise;
	int r = uv_tcp_getsockname(&peers->listener, (struct sockaddr *)&addr, &addr_bytes);

	if (r < 0) {
		(void)snprintf(err, err_bytes, "peer.listen: %s", uv_strerror(r));
		return r;
	}
	kvp_peer_print_addr((const struct sockaddr *)&addr, bound, sizeof(bound));
	if (kvp_peer_split(bound, real, sizeof(real), real_port, sizeof(real_port)) < 0)
		return -EINVAL;
	if (given[0]) {
		if (kvp_peer_split(given, host, sizeof(host), port, sizeof(port)) < 0) {
			(void)snprintf(err, err_bytes, "node.advertise \"%s\" is not host:port",
				       given);
			return -EINVAL;
		}
		(void)snprintf(peers->address, sizeof(peers->address),
			       strchr(host, ':') ? "[%.200s]:%s" : "%.200s:%s", host,
			       strtoul(port, NULL, 10) ? port : real_port);
	} else if (strcmp(real, "0.0.0.0") == 0 || strcmp(real, "::") == 0) {
		(void)snprintf(peers->address, sizeof(peers->address), "%.200s:%s",
			       config->node.name, real_port);
	} else {
		(void)snprintf(peers->address, sizeof(peers->address), "%s", bound);
	}
	return 0;
}

static int start_listening(struct kvp_peers *peers, char *err, size_t err_bytes)
{
	const char *listen = peers->config->peer.listen;
	char host[KVP_LIMIT_ADDRESS + 1], port[8];
	struct sockaddr_storage addr;
	int r;

	if (kvp_peer_split(listen, host, sizeof(host), port, sizeof(port)) < 0 ||
	    !kvp_peer_numeric(host, port, &addr)) {
		(void)snprintf(err, err_bytes, "peer.listen \"%s\" is no numeric address:port",
			       listen);
		return -EINVAL;
	}
	r = uv_tcp_init(peers->loop, &peers->listener);
	if (r == 0) {
		peers->n_handles++;
		peers->listening = true;
		peers->listener.data = peers->pause.data = peers;
		(void)uv_timer_init(peers->loop, &peers->pause); /* cannot fail */
		peers->n_handles++;
		r = uv_tcp_bind(&peers->listener, (const struct sockaddr *)&addr, 0);
	}
	if (r == 0)
		r = uv_listen((uv_stream_t *)&peers->listener, PEER_BACKLOG, on_connection);
	if (r < 0) {
		(void)snprintf(err, err_bytes, "peer.listen %s: %s%s", listen, uv_strerror(r),
			       r == UV_EADDRINUSE      ? " (ss -ltnp shows by whom)"
			       : r == UV_EADDRNOTAVAIL ? ": it is none of this machine's (ip addr)"
						       : "");
		return r;
	}
	return set_address(peers, err, err_bytes);
}

static int peers_setup(struct kvp_peers *peers, char *err, size_t err_bytes)
{
	int r = kvp_peer_parse_allow(peers, peers->config->peer.allow, err, err_bytes);

	if (r < 0)
		return r;
	if (peers->config->peer.listen[0])
		return start_listening(peers, err, err_bytes);
	(void)snprintf(peers->address, sizeof(peers->address),
		       "self:%02x%02x%02x%02x%02x%02x%02x%02x", peers->incarnation[0],
		       peers->incarnation[1], peers->incarnation[2], peers->incarnation[3],
		       peers->incarnation[4], peers->incarnation[5], peers->incarnation[6],
		       peers->incarnation[7]);
	return 0;
}

int kvp_peers_create(struct kvp_peers **out, const struct kvp_peers_config *config, char *err,
		     size_t err_bytes)
{
	struct kvp_peers *peers = calloc(1, sizeof(*peers));
	int r;

	(void)snprintf(err, err_bytes, "no memory for peers");
	if (!peers)
		return -ENOMEM;
	peers->loop = config->loop;
	peers->config = config->config;
	peers->incarnation = config->incarnation;
	peers->lanes = config->lanes;
	peers->admits = config->admits;
	peers->n_lanes = config->n_lanes;
	peers->looped_tail = &peers->looped;
	peers->log_limit = (struct kvp_log_limit)KVP_LOG_LIMIT(20, 10);
	r = uv_idle_init(config->loop, &peers->idle);
	if (r < 0) {
		free(peers);
		return r;
	}
	peers->idle.data = peers;
	peers->n_handles++;
	r = peers_setup(peers, err, err_bytes);
	if (r < 0) {
		kvp_peers_stop(peers);
		while (!kvp_peers_idle(peers))
			(void)uv_run(peers->loop, UV_RUN_ONCE); /* only our closes are due */
		kvp_peers_destroy(peers);
		return r;
	}
	*out = peers;
	return 0;
}

void kvp_peers_set_events(struct kvp_peers *peers, const struct kvp_peer_events *events, void *arg)
{
	peers->events = *events;
	peers->events_arg = arg;
}

void kvp_peers_stop(struct kvp_peers *peers)
{
	struct kvp_peer *peer, *tmp;

	if (peers->stopping)
		return;
	peers->stopping = true;
	if (peers->listening) {
		uv_close((uv_handle_t *)&peers->listener, handle_closed);
		uv_close((uv_handle_t *)&peers->pause, handle_closed);
	}
	peers->listening = false;
	DL_FOREACH_SAFE (peers->list, peer, tmp) {
		if (peer->state == KVP_PEER_BACKOFF && peer->holders == 0)
			kvp_peer_destroy(peer);
		else if (peer->state == KVP_PEER_BACKOFF)
			(void)uv_timer_stop(&peer->timer); /* cannot fail */
		else
			kvp_peer_end(peer, KVP__STATUS__STATUS_STOPPING,
				     "is let go: this daemon stops");
	}
	uv_close((uv_handle_t *)&peers->idle, handle_closed);
}

bool kvp_peers_idle(const struct kvp_peers *peers)
{
	return peers->stopping && !peers->list && !peers->eps && peers->n_handles == 0;
}

bool kvp_peers_wait_for_names(const struct kvp_peers *peers)
{
	return peers->stopping && !peers->list && !peers->eps && peers->n_lookups > 0 &&
	       peers->n_handles == peers->n_lookups;
}

void kvp_peers_destroy(struct kvp_peers *peers)
{
	if (!peers)
		return;
	while (peers->looped) {
		struct kvp_peer_looped *looped = peers->looped;

		peers->looped = looped->next;
		kvp_peer_free(looped->msg);
		free(looped);
	}
	free(peers->allow);
	free(peers);
}

const char *kvp_peers_address(const struct kvp_peers *peers)
{
	return peers->address;
}

bool kvp_peers_listening(const struct kvp_peers *peers)
{
	return peers->listening;
}

uint32_t kvp_peers_of_host(const struct kvp_peers *peers, uint64_t *refused)
{
	const struct kvp_peer *peer;
	uint32_t n = 0;

	DL_FOREACH (peers->list, peer)
		n = KVP_MAX(n, peer->of_host);
	*refused = peers->refused_host;
	return n;
}

uint64_t kvp_peers_accept_pauses(const struct kvp_peers *peers)
{
	return peers->accept_pauses;
}

uint32_t kvp_peers_count(const struct kvp_peers *peers, uint64_t *refused)
{
	*refused = peers->refused;
	return peers->n_peers;
}

static const char *state_name(const struct kvp_peer *peer)
{
	static const char *const names[] = {
		[KVP_PEER_CONNECTING] = "connecting",
		[KVP_PEER_HELLO] = "hello",
		[KVP_PEER_UP] = "up",
		[KVP_PEER_ENDING] = "closing",
		[KVP_PEER_BACKOFF] = "backing off",
	};

	return names[peer->state];
}

static void view_fill(const struct kvp_peer *peer, struct kvp_peer_view *view)
{
	*view = (struct kvp_peer_view){
		.outgoing = peer->outgoing,
		.self = peer->self,
		.up = peer->state == KVP_PEER_UP,
		.state = state_name(peer),
		.since_ns = peer->since_ns,
		.last_heard_ns = peer->last_heard_ns,
		.retry_at_ns = peer->retry_at_ns,
		.bytes_sent = peer->bytes_sent,
		.bytes_recv = peer->bytes_recv,
		.messages_sent = peer->messages_sent,
		.messages_recv = peer->messages_recv,
		.reconnects = peer->reconnects,
		.holders = peer->holders,
		.endpoints = peer->endpoints,
		.unsent_bytes = peer->conn ? kvp_peer_conn_unsent(peer->conn) : 0,
	};
	(void)snprintf(view->address, sizeof(view->address), "%.63s", peer->address);
	(void)snprintf(view->node, sizeof(view->node), "%.63s", peer->node);
	(void)snprintf(view->reason, sizeof(view->reason), "%s", peer->reason);
	memcpy(view->incarnation, peer->incarnation, sizeof(view->incarnation));
	kvp_peer_count_rails(peer, view);
}

void kvp_peers_each(struct kvp_peers *peers, kvp_peer_view_fn *fn, void *arg)
{
	struct kvp_peer_view view;
	struct kvp_peer *peer;

	DL_FOREACH (peers->list, peer) {
		view_fill(peer, &view);
		if (!fn(arg, &view))
			return;
	}
}
