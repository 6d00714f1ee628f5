/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <utlist.h>

#include "daemon/peer_internal.h"
#include "proto/msg.h"

static const uint32_t own_versions[2] = { KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX };

void kvp_peer_end(struct kvp_peer *peer, Kvp__Status status, const char *fmt, ...)
{
	bool wanted = status == KVP__STATUS__STATUS_OK || status == KVP__STATUS__STATUS_STOPPING;
	enum kvp_log_level level = wanted ? KVP_LOG_INFO : KVP_LOG_WARNING;
	va_list args;

	if (peer->state == KVP_PEER_ENDING || peer->state == KVP_PEER_BACKOFF)
		return;

	va_start(args, fmt);
	(void)vsnprintf(peer->reason, sizeof(peer->reason), fmt, args); /* cut texts are fine */
	va_end(args);
	peer->end_status = status;
	/* Not each dial of a row, and not whoever connects and goes without a word. */
	if (!peer->self && (peer->was_up || (peer->outgoing && peer->failures == 0) ||
			    status == KVP__STATUS__STATUS_PROTOCOL))
		kvp_log_limited(&peer->peers->log_limit, level, "peer %s %s", peer->name,
				peer->reason);
	kvp_peer_conn_close(peer->conn);
	peer->conn = NULL;
	peer->session = 0;
	kvp_peer_set_state(peer, KVP_PEER_ENDING);
	kvp_peer_set_timer(peer, 0);
	if (peer->twin)
		kvp_peer_end(peer->twin, status, "%s", peer->reason);
}

/* A process that dies closes its sockets one by one: what is heard first is not all there is. */
void kvp_peer_path_lost(struct kvp_peer *peer, const char *why)
{
	if (peer->state != KVP_PEER_UP || peer->path_lost)
		return;
	peer->path_lost = true;
	(void)snprintf(peer->reason, sizeof(peer->reason), "lost its data path: %s", why);
	kvp_peer_set_timer(peer, KVP_PEER_PATH_NS);
}

/* ---- hello ----------------------------------------------------------------------------------- */

static void hello_fill(const struct kvp_peers *peers, Kvp__PeerHello *hello)
{
	hello->version_min = own_versions[0];
	hello->version_max = own_versions[1];
	hello->incarnation.data = (uint8_t *)peers->incarnation;
	hello->incarnation.len = KVP_INCARNATION_BYTES;
	hello->address = peers->listening ? (char *)peers->address : (char *)"";
}

/* Greets; an answer carries the version, or the refusal. */
static int hello_send(struct kvp_peer *peer, uint32_t version, Kvp__Status status, const char *text)
{
	Kvp__PeerHello hello = KVP__PEER_HELLO__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	char node[KVP_MAX_LABEL + 1];
	int n;

	hello_fill(peer->peers, &hello);
	(void)snprintf(node, sizeof(node), "%.63s", peer->peers->config->node.name);
	kvp_text_clean(node);
	hello.node = node;
	hello.session = peer->number;
	hello.version = version;
	hello.status = status;
	hello.text = (char *)text;
	msg.body_case = KVP__PEER_MSG__BODY_HELLO;
	msg.hello = &hello;
	n = kvp_peer_conn_send(peer->conn, &msg);
	if (n < 0)
		return n;
	peer->bytes_sent += (uint64_t)n;
	peer->messages_sent++;
	return 0;
}

void kvp_peer_connected(struct kvp_peer *peer)
{
	kvp_peer_set_state(peer, KVP_PEER_HELLO);
	kvp_peer_set_timer(peer, peer->peers->config->peer.lost_after_ns);
	if (!peer->outgoing)
		return; /* the dialler speaks first */
	peer->number = 0;
	(void)uv_random(NULL, NULL, &peer->number, sizeof(peer->number), 0, NULL); /* else none */
	if (hello_send(peer, 0, KVP__STATUS__STATUS_OK, "") < 0)
		kvp_peer_end(peer, KVP__STATUS__STATUS_UNREACHABLE, "cannot be greeted");
}

/* Before the peer is told of any lane. */
static void admit(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;

	peer->admitted = peers->admits && kvp_admits_add(peers->admits, peer->number);
	if (peers->admits && !peer->admitted)
		kvp_log_limited(&peers->log_limit, KVP_LOG_WARNING,
				"peer %s: more sessions than may connect to lanes", peer->name);
}

void kvp_peer_unadmit(struct kvp_peer *peer)
{
	if (peer->admitted)
		kvp_admits_remove(peer->peers->admits, peer->number);
	peer->admitted = false;
}

void kvp_peer_up(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;

	peer->session = ++peers->next_session;
	peer->was_up = true;
	peer->path_lost = false;
	peer->failures = 0;
	peer->heartbeats = 0;
	peer->again_ns = peer->doubt_ns = 0;
	peer->last_heard_ns = peer->last_tick_ns = peer->idle_since_ns = kvp_peer_now();
	kvp_peer_set_state(peer, KVP_PEER_UP);
	admit(peer);
	if (!peer->self) {
		kvp_log_limited(&peers->log_limit, KVP_LOG_INFO, "peer %s is up", peer->name);
		kvp_peer_set_timer(peer, peers->config->peer.heartbeat_ns);
	}
	if (peers->events.up)
		peers->events.up(peers->events_arg, peer);
}

/* Whether the one's word is enough to end the other: the address was reached by a dial, or both
 * come from one host. Anyone else may say that an address is its own. */
static bool speaks_for(const struct kvp_peer *by, const struct kvp_peer *peer)
{
	return by->outgoing || kvp_peer_conn_same_host(by->conn, peer->conn);
}

/*
 * Somebody new speaks for an address: sessions of the process that was there before are over,
 * though its sockets may not say so yet. And if we are waiting to dial it again, now is the time.
 */
static void address_taken(struct kvp_peer *by)
{
	struct kvp_peer *peer, *tmp;

	if (!by->address[0])
		return;
	DL_FOREACH_SAFE (by->peers->list, peer, tmp) {
		if (peer == by || peer->self || strcmp(peer->address, by->address) != 0)
			continue;
		if (peer->state == KVP_PEER_BACKOFF && !peer->peers->stopping)
			kvp_peer_set_timer(peer, 0);
		else if (peer->state == KVP_PEER_UP &&
			 memcmp(peer->incarnation, by->incarnation, KVP_INCARNATION_BYTES) != 0 &&
			 speaks_for(by, peer))
			kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST,
				     "was started anew: another process answers there");
	}
}

static void hello_take(struct kvp_peer *peer, const Kvp__PeerHello *hello)
{
	if (!peer->outgoing && hello->address[0])
		(void)snprintf(peer->address, sizeof(peer->address), "%s", hello->address);
	/* An answer without it: the other end does not know of numbers, and neither do we then. */
	if (!peer->outgoing || hello->session != peer->number)
		peer->number = peer->outgoing ? 0 : hello->session;
	kvp_peer_set_name(peer, hello->node);
	memcpy(peer->incarnation, hello->incarnation.data, KVP_INCARNATION_BYTES);
}

static bool hello_is_own(const struct kvp_peer *peer, const Kvp__PeerHello *hello)
{
	return memcmp(hello->incarnation.data, peer->peers->incarnation, KVP_INCARNATION_BYTES) ==
	       0;
}

/* One host has part of peer.max_sessions. */
static int host_refused(struct kvp_peer *peer, char *err, size_t err_bytes)
{
	uint32_t max = peer->peers->config->peer.max_host_sessions;
	uint32_t n = kvp_peers_count_host(peer);

	if (n < max)
		return KVP__STATUS__STATUS_OK;
	peer->peers->refused_host++;
	(void)snprintf(err, err_bytes, /* fits */
		       "its host has %u connections, at most %u (peer.max_host_sessions)", n, max);
	return KVP__STATUS__STATUS_LIMIT;
}

/* The dialler's greeting. */
static void hello_accepted(struct kvp_peer *peer, const Kvp__PeerHello *hello)
{
	const uint32_t theirs[2] = { hello->version_min, hello->version_max };
	char err[KVP_LIMIT_TEXT + 1] = "";
	uint32_t version = 0;
	int status = kvp_version_choose(own_versions, theirs, &version, err, sizeof(err));

	hello_take(peer, hello);
	if (status == 0 && !hello_is_own(peer, hello))
		status = host_refused(peer, err, sizeof(err));
	version = status ? 0 : version;
	if (hello_send(peer, version, (Kvp__Status)status, err) < 0) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST, "cannot be answered");
		return;
	}
	if (status) {
		kvp_peer_end(peer, (Kvp__Status)status, "is refused: %s", err);
		return;
	}
	if (hello_is_own(peer, hello))
		return; /* the dialling end sees it too, and closes */
	address_taken(peer);
	kvp_peer_up(peer);
}

/* The answer to ours. */
static void hello_answered(struct kvp_peer *peer, const Kvp__PeerHello *hello)
{
	if (hello->version < own_versions[0] || hello->version > own_versions[1]) {
		Kvp__Status status = hello->status ? hello->status : KVP__STATUS__STATUS_VERSION;

		if (hello->version)
			kvp_peer_end(peer, status, "chose version %u.%u, of %u.%u to %u.%u",
				     hello->version >> 16, hello->version & 0xffff,
				     own_versions[0] >> 16, own_versions[0] & 0xffff,
				     own_versions[1] >> 16, own_versions[1] & 0xffff);
		else
			kvp_peer_end(peer, status, "refused the session: %s", hello->text);
		return;
	}
	hello_take(peer, hello);
	if (hello_is_own(peer, hello)) {
		if (kvp_peer_become_self(peer) < 0)
			kvp_peer_end(peer, KVP__STATUS__STATUS_NO_MEMORY, "needs memory");
		return;
	}
	address_taken(peer);
	kvp_peer_up(peer);
}

void kvp_peer_received(struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	bool hello = msg->body_case == KVP__PEER_MSG__BODY_HELLO;

	peer->messages_recv++;
	if (hello != (peer->state == KVP_PEER_HELLO)) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_PROTOCOL, "broke the protocol: %s",
			     hello ? "a second hello" : "no hello first");
		return;
	}
	if (hello && peer->outgoing)
		hello_answered(peer, msg->hello);
	else if (hello)
		hello_accepted(peer, msg->hello);
	else if (msg->body_case != KVP__PEER_MSG__BODY_HEARTBEAT && peer->peers->events.message)
		peer->peers->events.message(peer->peers->events_arg, peer, msg);
}

/* ---- time ------------------------------------------------------------------------------------ */

static void heartbeat_send(struct kvp_peer *peer)
{
	Kvp__Heartbeat beat = KVP__HEARTBEAT__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	uint64_t turns[KVP_LIMIT_LANES];
	struct kvp_lane_status status;

	for (uint32_t i = 0; i < peer->peers->n_lanes; i++) {
		kvp_lane_status_read(peer->peers->lanes[i], &status);
		turns[i] = status.turns;
	}
	beat.count = ++peer->heartbeats;
	beat.lane_turns = turns;
	beat.n_lane_turns = peer->peers->n_lanes;
	msg.body_case = KVP__PEER_MSG__BODY_HEARTBEAT;
	msg.heartbeat = &beat;
	(void)kvp_peer_send(peer, &msg); /* a failure has ended the session */
}

/* A transport may end all that two daemons have between them with the endpoints of one session. */
static bool other_in_use(const struct kvp_peer *peer)
{
	const struct kvp_peer *other;

	DL_FOREACH (peer->peers->list, other) {
		if (other != peer && other->state == KVP_PEER_UP && other->data &&
		    memcmp(other->incarnation, peer->incarnation, KVP_INCARNATION_BYTES) == 0)
			return true;
	}
	return false;
}

/* Once per heartbeat while the session is up. */
static void session_tick(struct kvp_peer *peer)
{
	const struct kvp_config *config = peer->peers->config;
	uint64_t now = kvp_peer_now();
	uint64_t silent = now - peer->last_heard_ns;
	/* When it was this process that stood still, what the peer sent is still unread. */
	bool late = now - peer->last_tick_ns > 2 * config->peer.heartbeat_ns;

	peer->last_tick_ns = now;
	if (peer->path_lost) {
		char why[sizeof(peer->reason)];

		memcpy(why, peer->reason, sizeof(why));
		kvp_peer_end(peer, KVP__STATUS__STATUS_TRANSPORT, "%s", why);
		return;
	}
	if (silent > config->peer.lost_after_ns && !late) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST,
			     "stopped answering: nothing heard for %.1f s", (double)silent / 1e9);
		return;
	}
	if (peer->outgoing && peer->holders == 0 && config->peer.idle_ns > 0 &&
	    now - peer->idle_since_ns > config->peer.idle_ns && !other_in_use(peer)) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_OK, "is not needed any more");
		return;
	}
	heartbeat_send(peer);
	if (peer->state == KVP_PEER_UP)
		kvp_peer_set_timer(peer, config->peer.heartbeat_ns);
}

/* Between the smallest and the largest delay, doubled each time, and spread so that daemons that
 * lost the same peer do not come back together. */
static uint64_t retry_delay(const struct kvp_peer *peer)
{
	const struct kvp_config *config = peer->peers->config;
	uint32_t shift = KVP_MIN(peer->failures, 16u);
	uint64_t delay = KVP_MIN(config->peer.retry_min_ns << shift, config->peer.retry_max_ns);
	uint64_t jitter = 0;

	(void)uv_random(NULL, NULL, &jitter, sizeof(jitter), 0, NULL); /* else no jitter */
	return delay - delay / 4 + jitter % (delay / 2 + 1);
}

/* The news of the end goes up, the data path is taken down, and a peer that is wanted is dialled
 * again. Rooms order the ends of their legs before the endpoints end: the lane keeps the order. */
static void session_over(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;
	uint64_t delay;

	if (peers->events.down && (peer->was_up || peer->outgoing))
		peers->events.down(peers->events_arg, peer, peer->end_status, peer->reason);
	kvp_peer_unadmit(peer); /* first, or the peer opens what nobody ends */
	kvp_peer_end_endpoints(peer);
	if (!peer->outgoing || peer->holders == 0) {
		kvp_peer_destroy(peer);
		return;
	}
	if (peers->stopping) {
		kvp_peer_set_state(peer,
				   KVP_PEER_BACKOFF); /* without a timer: until the last put */
		return;
	}
	delay = retry_delay(peer);
	peer->failures++;
	peer->retry_at_ns = kvp_peer_now() + delay;
	kvp_peer_set_state(peer, KVP_PEER_BACKOFF);
	kvp_peer_set_timer(peer, delay);
}

/* Timers come before sockets in a turn of the loop. When it was this process that stood still, or
 * had no processor, the connection or the greeting may be there and nobody has looked. */
static bool looks_once_more(struct kvp_peer *peer)
{
	if (peer->last_look ||
	    (peer->state != KVP_PEER_CONNECTING && peer->state != KVP_PEER_HELLO))
		return false;
	peer->last_look = true;
	kvp_peer_set_timer(peer, 1000000);
	return true;
}

void kvp_peer_on_timer(uv_timer_t *timer)
{
	struct kvp_peer *peer = timer->data;

	if (looks_once_more(peer))
		return;
	switch (peer->state) {
	case KVP_PEER_CONNECTING:
		kvp_peer_end(peer, KVP__STATUS__STATUS_UNREACHABLE,
			     "cannot be reached: no connection within %.1f s",
			     (double)peer->peers->config->peer.lost_after_ns / 1e9);
		break;
	case KVP_PEER_HELLO:
		kvp_peer_end(peer, KVP__STATUS__STATUS_UNREACHABLE, "did not greet within %.1f s",
			     (double)peer->peers->config->peer.lost_after_ns / 1e9);
		break;
	case KVP_PEER_UP:
		session_tick(peer);
		break;
	case KVP_PEER_ENDING:
		session_over(peer);
		break;
	case KVP_PEER_BACKOFF:
		peer->reconnects++;
		if (!peer->self)
			kvp_peer_dial(peer);
		else if (kvp_peer_become_self(peer) < 0)
			kvp_peer_set_timer(peer, retry_delay(peer));
		break;
	}
}
