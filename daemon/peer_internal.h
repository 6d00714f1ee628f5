/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the files of daemon/peer share. Names that leave a file begin with kvp_peer_ or kvp_peers_;
 * none of them is for others. */

#include "daemon/log.h"
#include "daemon/peer.h"
#include "proto/peer_msg.h"
#include "proto/util.h"

#define KVP_PEER_UNSENT_MAX (8u << 20) /* bytes queued on a socket */
#define KVP_PEER_READ_BYTES 65536u
#define KVP_PEER_PATH_NS (50u * 1000000ull) /* for a dead peer's other sockets to say so */

enum kvp_peer_state {
	KVP_PEER_CONNECTING, /* ends by the connection, its failure, or the timer */
	KVP_PEER_HELLO,      /* ends by the other's hello or the timer */
	KVP_PEER_UP,         /* ends by an error or by silence for peer.lost_after */
	KVP_PEER_ENDING,     /* the news goes up in the next loop iteration */
	KVP_PEER_BACKOFF,    /* ends by the timer: dials again */
};

struct kvp_peer_conn; /* one TCP connection; peer_conn.c */

/* A data endpoint; outlives its session until the lane has let go of it. */
struct kvp_peer_ep {
	struct kvp_board board; /* kind EP */
	struct kvp_peer *peer;  /* NULL once the session is over */
	struct kvp_peers *peers;
	uint32_t lane_idx, peer_lane;
	uint32_t addr_bytes;
	uint8_t *addr;                   /* owned */
	struct kvp_order_id *end;        /* owned until ordered: the end must not need memory */
	struct kvp_peer_ep *prev, *next; /* of peers->eps */
};

struct kvp_peer {
	struct kvp_peers *peers; /* borrowed */
	struct kvp_peer *prev, *next;
	char address[KVP_LIMIT_ADDRESS +
		     1]; /* dialled: as given. accepted: where it accepts, or from */
	char node[KVP_MAX_LABEL + 1];
	char name[128];
	bool outgoing, self;
	bool was_up;    /* since the last dial or accept */
	bool dead;      /* unlinked; freed when its timer has closed */
	bool path_lost; /* `reason` says why; the timer ends the session */
	bool admitted;  /* its number is in peers->admits */
	bool last_look; /* the time of this state is over, and what has come is read once more */
	enum kvp_peer_state state;
	uint32_t holders, endpoints;
	uint64_t session, dial;
	uint64_t number; /* of the session, the same at both ends; 0: the other end has none */
	uint64_t since_ns, last_heard_ns, last_tick_ns, retry_at_ns, idle_since_ns;
	uint64_t again_ns; /* heard again after a silence; 0: never */
	uint64_t doubt_ns; /* the same of the first of the silences since it was beyond doubt */
	uint32_t failures; /* dials in a row without a session */
	uint8_t incarnation[KVP_INCARNATION_BYTES];
	uint64_t heartbeats; /* sent since it is up */
	uint64_t bytes_sent, bytes_recv, messages_sent, messages_recv, reconnects;
	struct kvp_peer_conn *conn; /* owned; NULL: none */
	struct kvp_peer *twin;      /* self: the other end */
	Kvp__Status end_status;
	char reason[128];
	struct sockaddr_storage from; /* accepted: the address that it came from */
	uint32_t of_host; /* accepted and up: how many of its host there are, counted on */
	void *data;
	uv_timer_t timer; /* one for every state */
};

/* A message to the self peer, until the next loop iteration. */
struct kvp_peer_looped {
	struct kvp_peer *to;
	Kvp__PeerMsg *msg; /* owned */
	struct kvp_peer_looped *next;
};

struct kvp_peers {
	uv_loop_t *loop;
	const struct kvp_config *config;
	const uint8_t *incarnation;
	struct kvp_lane *const *lanes;
	uint32_t n_lanes;
	struct kvp_admits *admits;
	struct kvp_peer_events events;
	void *events_arg;
	char address[KVP_LIMIT_ADDRESS + 1];
	bool listening, stopping;
	uint32_t n_handles; /* uv handles and requests that have not ended */
	uint32_t n_lookups; /* of these, names that are looked up */
	uint32_t n_peers;   /* in `list` without self peers */
	uint64_t refused;   /* for peer.max_sessions */
	uint64_t refused_host, accept_pauses;
	uint64_t next_session, next_ep, next_dial;
	struct kvp_peer *list;
	struct kvp_peer *self; /* in the list too; made on first use */
	struct kvp_peer_ep *eps;
	struct kvp_peer_looped *looped, **looped_tail;
	struct kvp_network *allow; /* owned */
	uint32_t n_allow;
	uv_tcp_t listener;
	uv_timer_t pause; /* with the listener: runs while accepting rests for want of memory */
	uv_idle_t idle;   /* runs while `looped` has something */
	char read_buf[KVP_PEER_READ_BYTES]; /* of whichever connection reads now */
	struct kvp_log_limit log_limit;
};

uint64_t kvp_peer_now(void);

/* peer.c */
/* A new peer in the list, in state CONNECTING, its timer idle; NULL without memory. */
struct kvp_peer *kvp_peer_new(struct kvp_peers *peers, const char *address, bool outgoing);
/* Unlinks and frees once its handles have closed; it has no connection any more. */
void kvp_peer_destroy(struct kvp_peer *peer);
void kvp_peer_set_state(struct kvp_peer *peer, enum kvp_peer_state state);
void kvp_peer_set_name(struct kvp_peer *peer, const char *node);
void kvp_peer_set_timer(struct kvp_peer *peer, uint64_t ns);
/* No room for one more, also not in place of one that has connected and not greeted: that one is
 * let go. */
bool kvp_peers_full(struct kvp_peers *peers);
/* Counts an accepted one that has greeted; how many of its host were there before. At the limit it
 * is not counted. */
uint32_t kvp_peers_count_host(struct kvp_peer *peer);

/* peer_addr.c */
/* Splits "host:port" or "[v6]:port". 0 or -EINVAL. */
int kvp_peer_split(const char *address, char *host, size_t host_bytes, char *port,
		   size_t port_bytes);
int kvp_peer_parse_allow(struct kvp_peers *peers, const char *list, char *err, size_t err_bytes);
bool kvp_peer_allowed(const struct kvp_peers *peers, const struct sockaddr *addr);
/* Whatever their ports. */
bool kvp_peer_same_host(const struct sockaddr *a, const struct sockaddr *b);
/* False: a numeric address beyond loopback; names are judged once they are resolved. */
bool kvp_peer_may_dial(const struct kvp_peers *peers, const struct sockaddr *addr);
/* A numeric address; false when `host` is a name. */
bool kvp_peer_numeric(const char *host, const char *port, struct sockaddr_storage *out);
void kvp_peer_print_addr(const struct sockaddr *addr, char *out, size_t out_bytes);

/* peer_conn.c */
/* Begins to connect; failures come as kvp_peer_end(). */
void kvp_peer_dial(struct kvp_peer *peer);
/* Lets the one in that waits; -ENOMEM: it still waits, and libuv tells of no other before it. */
int kvp_peer_accept(struct kvp_peers *peers);
/* Closes in its own time; `conn` is gone for the caller. */
void kvp_peer_conn_close(struct kvp_peer_conn *conn);
/* 0; -EMSGSIZE; -ENOBUFS; -ENOMEM; a socket's error. */
int kvp_peer_conn_send(struct kvp_peer_conn *conn, const Kvp__PeerMsg *msg);
/* Do both lead to one host? False where that cannot be said. */
bool kvp_peer_conn_same_host(const struct kvp_peer_conn *a, const struct kvp_peer_conn *b);
uint32_t kvp_peer_conn_unsent(const struct kvp_peer_conn *conn);

/* peer_session.c */
/* The connection stands: greets, or waits for the greeting. */
void kvp_peer_connected(struct kvp_peer *peer);
/* A message came; may end the session. */
void kvp_peer_received(struct kvp_peer *peer, const Kvp__PeerMsg *msg);
/* The session or the dial is over. Closes at once; the news goes up in the next iteration, so
 * that nobody is called back from within what he does. */
void kvp_peer_end(struct kvp_peer *peer, Kvp__Status status, const char *fmt, ...) KVP_PRINTF(3, 4);
/* A data endpoint of the session has failed: ends the session, after a moment in which its own
 * connection may say that the peer itself is gone. */
void kvp_peer_path_lost(struct kvp_peer *peer, const char *why);
void kvp_peer_on_timer(uv_timer_t *timer);
void kvp_peer_up(struct kvp_peer *peer);
/* Something came from it. */
void kvp_peer_heard(struct kvp_peer *peer);
/* Its number opens no data connections any more. */
void kvp_peer_unadmit(struct kvp_peer *peer);

/* peer_self.c */
struct kvp_peer *kvp_peer_self_get(struct kvp_peers *peers);
/* Gives a dialled peer that turned out to be this daemon, or one that is known to be, its twin, and
 * brings it up. */
int kvp_peer_become_self(struct kvp_peer *peer);
int kvp_peer_self_send(struct kvp_peer *peer, const Kvp__PeerMsg *msg);
void kvp_peers_on_idle(uv_idle_t *idle);
/* Drops what is under way to a peer that ends. */
void kvp_peers_drop_looped(struct kvp_peers *peers, const struct kvp_peer *peer);

/* peer_ep.c */
/* Orders the end of all endpoints of the peer's session. */
void kvp_peer_end_endpoints(struct kvp_peer *peer);
/* Adds up what the lanes say of its endpoints. */
void kvp_peer_count_rails(const struct kvp_peer *peer, struct kvp_peer_view *view);
