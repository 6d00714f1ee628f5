/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Inside of the verbs transport, shared by its net_verbs*.c files only.
 *
 * A connection is a reliable-connected queue pair used in one direction: the end that opened it
 * sends messages and writes payloads; the other end receives, and sends nothing but credits. So two
 * lanes that talk both ways have two of them, and each end alone decides about its own.
 *
 * A connection is made by datagrams: the address of a net, which travels on the authenticated
 * control sessions, has the number of a datagram queue pair and 128 secret bits; who names them in
 * a request may connect. Requests are repeated until answered.
 *
 * Credits: a sender has as many messages under way as the receiver has posted receives for them,
 * so that the card never finds a receive missing. Receives that were posted again come back as
 * credits, a quarter of them at a time.
 */

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/net.h"
#include "daemon/nic.h"
#include "daemon/qp.h"

#define KVP_VB_CONNS 256u
#define KVP_VB_OPS 1024u
#define KVP_VB_REGIONS 64u
#define KVP_VB_PLACES 4096u
#define KVP_VB_ID_BYTES 16u
/* The other direction of a connection: credits only, of which few are under way at once. */
#define KVP_VB_BACK_DEPTH 8u
#define KVP_VB_CREDITS_MAX 65536u
#define KVP_VB_BUFFER_BYTES 320u
#define KVP_VB_UD_BYTES 128u
#define KVP_VB_UD_DEPTH 64u
#define KVP_VB_GRH_BYTES 40u
/* Payloads from unregistered memory are copied if they are at most so long. */
#define KVP_VB_BOUNCE_BYTES 4096u
#define KVP_VB_BOUNCES 64u
#define KVP_VB_REPEAT_NS UINT64_C(50000000)
#define KVP_VB_CONNECT_NS UINT64_C(5000000000)
/* A drain that takes longer ends by the destruction of the queue pair. */
#define KVP_VB_DRAIN_NS UINT64_C(1000000000)
#define KVP_VB_TICK_NS UINT64_C(10000000)

enum kvp_vb_kind {
	KVP_VB_MESSAGE = 1, /* the header follows */
	KVP_VB_PUT = 2,     /* the same, after its payload was written to `place` */
	KVP_VB_CREDIT = 3,  /* `credits` more messages may be sent */
};

/* Begin of everything that is sent. */
struct kvp_vb_frame {
	uint16_t kind;
	uint16_t hdr_bytes;
	uint32_t credits;
	uint64_t place;
	uint64_t bytes;
	uint64_t zero;
};
_Static_assert(sizeof(struct kvp_vb_frame) == 32, "layout");
_Static_assert(sizeof(struct kvp_vb_frame) + KVP_NET_HDR_MAX <= KVP_VB_BUFFER_BYTES, "fits");

/* Behind the payload of a write that says all by itself. */
struct kvp_vb_tail {
	uint32_t magic;
	uint16_t hdr_bytes;
	uint16_t zero;
	uint64_t bytes;
	unsigned char hdr[48];
};
_Static_assert(sizeof(struct kvp_vb_tail) == KVP_NET_TAIL_BYTES, "layout");

/* A struct kvp_net_key, as it is for this transport. */
struct kvp_vb_key {
	uint64_t addr;
	uint32_t rkey;
	uint16_t idx; /* | KVP_VB_APART: the header comes in a message, not behind the payload */
	uint16_t nonce;
};
#define KVP_VB_APART 0x8000u
_Static_assert(KVP_VB_PLACES <= KVP_VB_APART, "an index and a bit");
_Static_assert(sizeof(struct kvp_vb_key) == sizeof(struct kvp_net_key), "layout");

/* How to find a net. */
struct kvp_vb_address {
	uint32_t magic;
	uint16_t version;
	uint16_t lid;
	uint8_t gid[16];
	uint8_t id[KVP_VB_ID_BYTES]; /* random: names the net, and admits who knows it */
	uint32_t qpn, qkey;          /* of the datagram queue pair */
	uint8_t ethernet;
	uint8_t zero[7];
	uint64_t hash;
};
_Static_assert(sizeof(struct kvp_vb_address) == 64, "layout");

enum kvp_vb_ud_type {
	KVP_VB_REQUEST = 1,
	KVP_VB_REPLY = 2,
	KVP_VB_REJECT = 3,
	KVP_VB_BYE = 4,
};

struct kvp_vb_datagram {
	uint32_t magic;
	uint8_t version;
	uint8_t type;
	uint8_t mtu;      /* enum ibv_mtu */
	uint8_t ethernet; /* of the sender's port */
	uint8_t to[KVP_VB_ID_BYTES], from[KVP_VB_ID_BYTES];
	uint32_t conn; /* the opener's number of the connection */
	uint32_t qpn, psn;
	uint32_t receives; /* REPLY: posted for messages */
	uint8_t gid[16];
	uint32_t ud_qpn, ud_qkey; /* where answers go */
	uint16_t lid;
	uint16_t status; /* REJECT: an errno */
	uint32_t zero;
};
_Static_assert(sizeof(struct kvp_vb_datagram) <= KVP_VB_UD_BYTES, "fits");

enum kvp_vb_state {
	KVP_VB_CONNECTING, /* until the reply, a rejection or KVP_VB_CONNECT_NS */
	KVP_VB_OPEN,       /* until it fails or is closed */
	KVP_VB_FAILED,     /* drains; until ep_close() */
	KVP_VB_CLOSING,    /* drains; until drained or KVP_VB_DRAIN_NS, then it is gone */
};

/* A connection: an endpoint of the lane, or (passive) one that a peer has opened. */
struct kvp_net_ep {
	struct kvp_net *net; /* borrowed, outlives it */
	void *arg;           /* the lane's; NULL: passive */
	bool passive;
	bool tell_failed; /* failed() is due */
	bool dirty;       /* in net->dirty */
	bool flushed;     /* its receives are: it is lost, at the next tick for want of a reason */
	uint32_t idx;     /* in net->conns */
	uint32_t tag;
	enum kvp_vb_state state;
	int status;         /* why it failed */
	struct ibv_qp *ibv; /* owned; NULL once destroyed */
	struct kvp_qp qp;
	struct kvp_rq rq;
	struct ibv_mr *mr; /* owned, of `memory` */
	uint8_t *memory;   /* owned: send buffers, then receive buffers */
	unsigned n_send, n_recv;
	unsigned inline_bytes;
	uint32_t credits;  /* messages that may be sent */
	uint32_t consumed; /* receives posted again and not yet told */
	uint32_t psn;
	struct kvp_vb_address peer; /* passive: what its request said */
	uint32_t peer_conn;         /* passive: the opener's number */
	struct ibv_ah *ah;          /* owned, for datagrams */
	uint64_t since_ns;          /* of the state */
	uint64_t repeat_ns;         /* CONNECTING: next request */
	uint64_t tried_ns;          /* last keepalive */
	uint64_t tried_completed;   /* completions by then */
	TAILQ_ENTRY(kvp_net_ep) link;
	TAILQ_ENTRY(kvp_net_ep) dirty_link;
};
TAILQ_HEAD(kvp_vb_eps, kvp_net_ep);

/* A payload under way. */
struct kvp_vb_op {
	void *req;
	struct ibv_mr *mr; /* owned: registered for this payload alone */
	int bounce;        /* index, -1: none */
	int status;
	TAILQ_ENTRY(kvp_vb_op) link; /* in free or done, else in none */
};
TAILQ_HEAD(kvp_vb_ops, kvp_vb_op);

struct kvp_vb_region {
	uint8_t *base;
	size_t bytes;
	struct ibv_mr *mr; /* owned */
	bool landing;
	bool device; /* a GPU's memory: the processor must not read what lies there */
};

struct kvp_vb_place {
	uint8_t *base;
	size_t bytes;
	uint16_t nonce;
};

struct kvp_net {
	const struct kvp_net_events *events; /* borrowed */
	void *arg;
	struct kvp_net_verbs_config config; /* strings are not used after open() */
	struct kvp_nic nic;
	struct ibv_context *context; /* owned, like all of these */
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *ud;
	struct ibv_mr *ud_mr;
	struct ibv_ah *reject_ah; /* of the last rejection, which may still need it */
	uint8_t *ud_memory;
	struct kvp_qp ud_qp;
	struct kvp_rq ud_rq;
	uint8_t *bounce;
	struct ibv_mr *bounce_mr;
	int epoll_fd, timer_fd;
	uint32_t n_conns_max; /* what the completion queue has room for */
	uint32_t next_idx;
	uint32_t epochs[KVP_VB_CONNS];
	struct kvp_net_ep *conns[KVP_VB_CONNS];
	struct kvp_vb_eps eps;     /* opened by the lane */
	struct kvp_vb_eps passive; /* opened by peers */
	struct kvp_vb_eps dirty;   /* with requests to be posted */
	struct kvp_vb_ops free_ops, done_ops;
	struct kvp_vb_op *ops; /* owned */
	uint8_t free_bounces[KVP_VB_BOUNCES];
	uint32_t n_free_bounces;
	struct kvp_vb_region regions[KVP_VB_REGIONS];
	uint32_t n_regions;
	struct kvp_vb_place *places; /* owned [KVP_VB_PLACES] */
	uint32_t n_places;
	struct kvp_vb_address address;
	bool closing;   /* nothing is received any more */
	bool port_down; /* said an asynchronous event */
	bool dead;      /* the device is gone */
	bool armed;
	bool timer_on;
	uint32_t n_tell, n_closing;
	uint64_t now_ns, tick_ns;
	uint64_t rng;
	struct kvp_net_stats stats;
	uint64_t events_seen, keepalives, rejects;
	char what[96];
};

uint64_t kvp_vb_random(struct kvp_net *net);

/* net_verbs_mem.c */
int kvp_vb_memory(struct kvp_net *net, const struct kvp_net_memory *memory, char *err,
		  size_t err_bytes);
int kvp_vb_device(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		  char *err, size_t err_bytes);
int kvp_vb_expose(struct kvp_net *net, void *place, size_t bytes, struct kvp_net_key *key);
/* The region that these bytes lie in, or NULL. */
const struct kvp_vb_region *kvp_vb_region(const struct kvp_net *net, const void *at, size_t bytes);
void kvp_vb_memory_fini(struct kvp_net *net);

/* net_verbs_conn.c */
int kvp_vb_conn_create(struct kvp_net *net, bool passive, struct kvp_net_ep **out);
/* Destroys the queue pair, tells its requests, frees. */
void kvp_vb_conn_destroy(struct kvp_net_ep *ep);
/* Brings the queue pair up against the peer's, which the datagram describes. */
int kvp_vb_conn_up(struct kvp_net_ep *ep, const struct kvp_vb_datagram *peer);
/* Loses the connection; an endpoint's failed() follows, a passive one is destroyed at the tick. */
void kvp_vb_conn_fail(struct kvp_net_ep *ep, int status);
void kvp_vb_conn_dirty(struct kvp_net_ep *ep);
struct kvp_net_ep *kvp_vb_conn_find(struct kvp_net *net, uint32_t tag);
int kvp_vb_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, void *ep_arg,
		   struct kvp_net_ep **out);
void kvp_vb_ep_close(struct kvp_net *net, struct kvp_net_ep *ep);
/* Steps of progress(); each returns how much was done. */
int kvp_vb_tell_failed(struct kvp_net *net);
int kvp_vb_turn_closing(struct kvp_net *net);
/* Keepalives, and the end of lost passive connections. */
void kvp_vb_conn_tick(struct kvp_net *net);

/* net_verbs_ud.c: making connections */
int kvp_vb_ud_init(struct kvp_net *net);
void kvp_vb_ud_fini(struct kvp_net *net);
void kvp_vb_ud_complete(struct kvp_net *net, const struct ibv_wc *wc);
int kvp_vb_ud_ah(struct kvp_net_ep *ep);
void kvp_vb_ud_send(struct kvp_net_ep *ep, enum kvp_vb_ud_type type);
void kvp_vb_ud_tick(struct kvp_net *net);
int kvp_vb_address_check(const struct kvp_net *net, const void *addr, size_t addr_bytes,
			 struct kvp_vb_address *out);
void kvp_vb_address_seal(struct kvp_vb_address *address);
/* Attributes of the way to a peer. */
struct ibv_ah_attr kvp_vb_way(const struct kvp_net *net, const uint8_t *gid, uint16_t lid);

/* net_verbs_msg.c */
int kvp_vb_msg_init(struct kvp_net *net);
void kvp_vb_msg_fini(struct kvp_net *net);
int kvp_vb_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		const void *payload, size_t bytes, void *req);
int kvp_vb_put(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_put *put);
/* A receive of a connection has ended well. */
void kvp_vb_received(struct kvp_net_ep *ep, const struct ibv_wc *wc);
/* Gives credits back, even none: 0 or as kvp_qp_add(). */
int kvp_vb_credit(struct kvp_net_ep *ep);
/* Gives credits back if there are enough, and rings. */
void kvp_vb_flush(struct kvp_net_ep *ep);
void kvp_vb_op_done(void *arg, void *user, int status);
/* Tells the lane of every payload that is over; returns how many. */
int kvp_vb_tell_sent(struct kvp_net *net);
