/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Control sessions to other daemons: dialling with back-off, the hello, frames, heartbeats, data
 * endpoints. Knows nothing of rooms: messages and news go up through a table. Loop thread only.
 *
 * A dialled peer is found by address and lives while someone holds it (get/put) or its session is
 * up; an accepted one lives as long as its connection. The own address gives the self peer:
 * messages sent to it come back through the same events in the next loop iteration, on its twin
 * (the "accepted" end), so that local rooms take the same path; it needs no listening port.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/board.h"
#include "daemon/config.h"
#include "daemon/lane.h"
#include "proto/peer.pb-c.h"

struct kvp_peer;
struct kvp_peers;

struct kvp_peer_events {
	/* The session is up (hello done). A dialled peer that was lost comes up again with another
	 * session number; what was sent on the old one is gone. */
	void (*up)(void *arg, struct kvp_peer *peer);
	/* The session is over or a dial failed; `status`, `why` say how. A held dialled peer
	 * retries. */
	void (*down)(void *arg, struct kvp_peer *peer, Kvp__Status status, const char *why);
	/* A validated message other than hello and heartbeat. */
	void (*message)(void *arg, struct kvp_peer *peer, const Kvp__PeerMsg *msg);
	/* The data path to a lane of the peer failed: the session goes down next. */
};

struct kvp_peers_config {
	uv_loop_t *loop;
	const struct kvp_config *config; /* borrowed */
	const uint8_t *incarnation;      /* [16] borrowed */
	struct kvp_lane *const *lanes;   /* borrowed [n_lanes] */
	uint32_t n_lanes;
	struct kvp_admits *admits; /* borrowed: has the sessions that are up; NULL: nobody asks */
};

/* Listens when config peer.listen says so. On failure `err` says why. */
int kvp_peers_create(struct kvp_peers **out, const struct kvp_peers_config *config, char *err,
		     size_t err_bytes);
void kvp_peers_set_events(struct kvp_peers *peers, const struct kvp_peer_events *events, void *arg);
/* Closes everything; destroy after `closed` and loop iterations (kvp_peers_idle() is true). */
void kvp_peers_stop(struct kvp_peers *peers);
bool kvp_peers_idle(const struct kvp_peers *peers);
/* After kvp_peers_stop(): only names are still looked up, which nothing can hurry. */
bool kvp_peers_wait_for_names(const struct kvp_peers *peers);
void kvp_peers_destroy(struct kvp_peers *peers);

/* What others name as this node's address; "self" style address when there is no listening port:
 * usable by clients of this daemon only. */
const char *kvp_peers_address(const struct kvp_peers *peers);
bool kvp_peers_listening(const struct kvp_peers *peers);

/* Finds or dials the peer behind an address; the caller holds it until put. NULL with a text in
 * `err` and errno: EINVAL malformed address, EMFILE too many peers, EACCES policy, ENOMEM. */
struct kvp_peer *kvp_peer_get(struct kvp_peers *peers, const char *address, char *err,
			      size_t err_bytes);
void kvp_peer_put(struct kvp_peer *peer);

bool kvp_peer_is_up(const struct kvp_peer *peer);
bool kvp_peer_is_self(const struct kvp_peer *peer);
/* It has missed a sign of life, or is lost and the news is on its way. Within twice peer.lost_after
 * and some heartbeats it is lost, or not in doubt for longer than a heartbeat. */
bool kvp_peer_in_doubt(const struct kvp_peer *peer);
uint64_t
kvp_peer_session(const struct kvp_peer *peer); /* of the current session; never reused; 0: down */
const char *kvp_peer_name(const struct kvp_peer *peer);   /* "gpu-b (10.0.0.2:7470)" for texts */
const char *kvp_peer_reason(const struct kvp_peer *peer); /* why it was lost last, "" at first */
/* Bytes that wait for the socket. */
uint32_t kvp_peer_unsent(const struct kvp_peer *peer);
void *kvp_peer_data(const struct kvp_peer *peer); /* the user's pointer */
void kvp_peer_set_data(struct kvp_peer *peer, void *data);

/* Queues a message on the session; -ENOTCONN when down, -ENOBUFS past the unsent limit (the session
 * is ended then). */
int kvp_peer_send(struct kvp_peer *peer, const Kvp__PeerMsg *msg);
/* Ends the session because the peer broke the protocol. */
void kvp_peer_fail(struct kvp_peer *peer, Kvp__Status status, const char *why);

/* The data endpoint from own lane `lane_idx` to the peer's lane with that transport address, made
 * on first use; its id for orders goes to `ep`. A lane to itself: 0 (local mode); two lanes of this
 * daemon have an endpoint as those of two daemons do. Ends with the session. */
int kvp_peer_endpoint(struct kvp_peer *peer, uint32_t lane_idx, uint32_t peer_lane,
		      const void *addr, uint32_t addr_bytes, uint64_t *ep);

/* A board of kind EP came out of the loop's inbox; this calls kvp_board_take(). */
void kvp_peers_board(struct kvp_peers *peers, struct kvp_board *board);

/* Accepted ones that have greeted, of the host that has most, and how many were refused for
 * peer.max_host_sessions. */
uint32_t kvp_peers_of_host(const struct kvp_peers *peers, uint64_t *refused);
/* How often accepting rested for want of memory. */
uint64_t kvp_peers_accept_pauses(const struct kvp_peers *peers);
/* Peers that count against peer.max_sessions, and how many were refused for it. */
uint32_t kvp_peers_count(const struct kvp_peers *peers, uint64_t *refused);

struct kvp_peer_view {
	char address[64], node[64];
	bool outgoing, self, up;
	const char *state; /* "connecting", "hello", "up", "backing off", "closing" */
	uint8_t incarnation[16];
	uint64_t since_ns, last_heard_ns, retry_at_ns; /* CLOCK_MONOTONIC; 0: none */
	uint64_t bytes_sent, bytes_recv, messages_sent, messages_recv, reconnects;
	uint32_t holders, endpoints, unsent_bytes;
	uint32_t rails_open, rails; /* connections of its endpoints now, and possible ones */
	char reason[128];           /* why it was lost last */
};
typedef bool kvp_peer_view_fn(void *arg, const struct kvp_peer_view *view);
void kvp_peers_each(struct kvp_peers *peers, kvp_peer_view_fn *fn, void *arg);
