/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Inside of the verbs transport, shared by its net_verbs*.c files only.
 *
 * A rail is a port of a device: a net has one to four. An endpoint has a connection for each pair
 * of rails that it uses, and numbers what it sends: the receiver delivers in that order, whichever
 * way it came.
 *
 * A connection is a reliable-connected queue pair used in one direction: the end that opened it
 * sends messages and writes payloads; the other end receives, and sends nothing but credits. So two
 * lanes that talk both ways have two of them, and each end alone decides about its own.
 *
 * A connection is made by datagrams: the address of a net, which travels on the authenticated
 * control sessions, has for each rail the number of a datagram queue pair, and 128 secret bits; who
 * names them in a request may connect. Requests are repeated until answered. Or, by configuration,
 * librdmacm carries the same words.
 *
 * Credits: a sender has as many messages under way as the receiver has posted receives for them,
 * so that the card never finds a receive missing. Receives that were posted again come back as
 * credits, a quarter of them at a time, with the number up to which all was delivered: no more than
 * a window ahead of it is sent.
 *
 * A connection that fails is drained. What it carried without an acknowledgement may have arrived
 * or not, and must not be written twice: its place may be another's by then. So the sender asks
 * over another rail (SYNC), the receiver makes sure that the lost connection brings nothing any
 * more, says what it has (SYNCED), and the rest, no more and no less, is sent again. It asks
 * also after what was acknowledged and not yet delivered: should that be missing, as when a card
 * does not tell of its receives, it is lost, and so is the endpoint.
 */

#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/queue.h>

#include "daemon/inbox.h"
#include "daemon/net.h"
#include "daemon/nic.h"
#include "daemon/qp.h"

#define KVP_VB_RAILS KVP_NET_RAILS
#define KVP_VB_CONNS 1024u
#define KVP_VB_INS 256u
/* Of one session: each lane of the other daemon has one endpoint to us, and so, where it is our
 * own, has each for the other direction. Of all sessions without a number together. */
#define KVP_VB_SESSION_INS 32u
#define KVP_VB_NUMBERLESS_INS 64u
#define KVP_VB_OPS 1024u
#define KVP_VB_REGIONS 64u
#define KVP_VB_PLACES 4096u
#define KVP_VB_WINDOWS 4096u
/* Windows that are being bound or unbound at a time, on a rail. */
#define KVP_VB_BIND_DEPTH 64u
/* Keys taken back that no grant gets again: what was sent with one is long over when so many more
 * have been taken back. */
#define KVP_VB_OLD_KEYS 256u
#define KVP_VB_ID_BYTES 16u
/* The other direction of a connection: few are under way at once. */
#define KVP_VB_BACK_DEPTH 8u
#define KVP_VB_CREDITS_MAX 65536u
#define KVP_VB_BUFFER_BYTES 320u
/* Messages of an endpoint that are under way: a power of two, twice the depth at most. */
#define KVP_VB_WINDOW_MIN 32u
#define KVP_VB_WINDOW_MAX 1024u
#define KVP_VB_SYNCS (2u * KVP_VB_RAILS)
#define KVP_VB_TAIL_MAGIC 0x4c494154u
#define KVP_VB_UD_BYTES 128u
#define KVP_VB_UD_DEPTH 64u
#define KVP_VB_GRH_BYTES 40u
/* Payloads from unregistered memory are copied if they are at most so long. */
#define KVP_VB_BOUNCE_BYTES 4096u
#define KVP_VB_BOUNCES 64u
#define KVP_VB_REPEAT_NS UINT64_C(50000000)
#define KVP_VB_CONNECT_NS UINT64_C(5000000000)
/* A drain, or an answer about a window, that takes longer, and so many looks at an empty queue, end
 * by the destruction of the queue pair. The looks are for a lane that did not run in the meantime.
 */
#define KVP_VB_DRAIN_NS UINT64_C(1000000000)
#define KVP_VB_DRAIN_LOOKS 8u
#define KVP_VB_TICK_NS UINT64_C(10000000)
/* A rail that failed is tried again after it, then after twice as long each time. */
#define KVP_VB_RETRY_MIN_NS UINT64_C(500000000)
#define KVP_VB_RETRY_MAX_NS UINT64_C(8000000000)
/* After the loss of the last connection all rails are tried at once, for so long. */
#define KVP_VB_LAST_NS UINT64_C(3000000000)

enum kvp_vb_kind {
	KVP_VB_MESSAGE = 1, /* the header follows */
	KVP_VB_PUT = 2,     /* the same, after its payload was written to `place` */
	KVP_VB_CREDIT = 3,  /* `credits` more messages may be sent; all below `seq` was delivered */
	KVP_VB_SYNC = 4,    /* what came by connection `tag`, which brings nothing any more? */
	KVP_VB_SYNCED = 5,  /* all below `seq`, and what the bits that follow say of the rest */
};

/* Begin of everything that is sent. */
struct kvp_vb_frame {
	uint16_t kind;
	uint16_t hdr_bytes;
	uint32_t credits;
	uint64_t place;
	uint64_t bytes;
	uint32_t seq; /* the low half */
	uint32_t tag;
};
_Static_assert(sizeof(struct kvp_vb_frame) == 32, "layout");
_Static_assert(sizeof(struct kvp_vb_frame) + KVP_NET_HDR_MAX <= KVP_VB_BUFFER_BYTES, "fits");
_Static_assert(KVP_VB_WINDOW_MAX / 8 <= KVP_NET_HDR_MAX, "a bit for each");

/* Behind the payload of a write that says all by itself. */
struct kvp_vb_tail {
	uint32_t magic;
	uint16_t hdr_bytes;
	uint16_t zero;
	uint32_t bytes;
	uint32_t seq;
	unsigned char hdr[48];
};
_Static_assert(sizeof(struct kvp_vb_tail) == KVP_NET_TAIL_BYTES, "layout");

/* A struct kvp_net_key, as it is for this transport. */
struct kvp_vb_key {
	uint64_t addr;
	uint32_t rkey[KVP_VB_RAILS]; /* by rail of the receiver */
	uint16_t idx; /* | KVP_VB_APART: the header comes in a message, not behind the payload */
	uint16_t nonce;
	uint32_t zero;
};
#define KVP_VB_APART 0x8000u
_Static_assert(KVP_VB_PLACES <= KVP_VB_APART, "an index and a bit");
_Static_assert(sizeof(struct kvp_vb_key) == sizeof(struct kvp_net_key), "layout");

/* How to find one rail of a net. */
struct kvp_vb_end {
	uint8_t gid[16];
	uint32_t qpn, qkey; /* of the datagram queue pair */
	uint16_t lid;
	uint8_t ethernet;
	uint8_t number; /* of the rail, for who joins only equal ones */
	uint16_t port;  /* for connections by librdmacm; 0: none are taken */
	uint16_t zero;
};
_Static_assert(sizeof(struct kvp_vb_end) == 32, "layout");

/* How to find a net. */
struct kvp_vb_address {
	uint32_t magic;
	uint16_t version;
	uint16_t n_ends;
	uint8_t id[KVP_VB_ID_BYTES]; /* random: names the net, and admits who knows it */
	struct kvp_vb_end ends[KVP_VB_RAILS];
	uint64_t hash;
};
_Static_assert(sizeof(struct kvp_vb_address) == 160, "layout");

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
	uint8_t mtu;   /* enum ibv_mtu */
	uint8_t fresh; /* REQUEST: the endpoint has sent nothing yet */
	uint8_t to[KVP_VB_ID_BYTES], from[KVP_VB_ID_BYTES];
	uint32_t conn; /* the opener's number of the connection */
	uint32_t ep;   /* the opener's number of the endpoint that it belongs to */
	uint32_t qpn, psn;
	uint32_t receives;     /* REPLY: posted for messages */
	uint32_t window;       /* REQUEST */
	uint64_t number;       /* REQUEST: of the endpoint's session */
	struct kvp_vb_end end; /* where answers go */
	uint32_t status;       /* REJECT: an errno */
	uint32_t zero;
};
_Static_assert(sizeof(struct kvp_vb_datagram) <= KVP_VB_UD_BYTES, "fits");

/* The queue pair that binds memory windows: connected to itself, so that it outlives peers. */
struct kvp_vb_binder {
	struct ibv_cq *cq; /* owned, polled while something is pending */
	struct ibv_qp *qp; /* owned; NULL: not needed yet, or lost */
	unsigned n_pending;
	uint64_t moved_ns; /* last answer, or the first request that waits for one */
	unsigned looks;    /* at its queue since, which was empty */
};

struct kvp_vb_rail;

/* A call that may wait. It is the rail's thread's while it is out, with all that `run` looks at. */
struct kvp_vb_call {
	struct kvp_node node;
	struct kvp_vb_rail *rail; /* borrowed */
	const char *what;         /* static, for logs */
	bool out;                 /* from kvp_vb_call() until `done` is called */
	uint64_t took_ns;
	void (*run)(struct kvp_vb_call *call);  /* on the rail's thread */
	void (*done)(struct kvp_vb_call *call); /* on the lane's, in progress(); may free it */
};

struct kvp_vb_caller {
	pthread_t thread;
	bool on; /* the thread is there */
	struct kvp_inbox todo;
	sem_t wake;
	struct kvp_vb_call last; /* ends the thread */
};

enum kvp_vb_state {
	KVP_VB_CONNECTING, /* until the reply, a rejection or KVP_VB_CONNECT_NS */
	KVP_VB_OPEN,       /* until it fails or is ended */
	KVP_VB_FAILED,     /* drains; until drained, or destroyed after KVP_VB_DRAIN_NS */
	KVP_VB_STATES,
};

/* A rejection that waits for a way to whom it is for. */
struct kvp_vb_refusal {
	struct kvp_vb_call call;
	struct ibv_ah_attr way;
	struct ibv_ah *ah;  /* owned */
	struct ibv_ah *old; /* owned: of the last one, which is over by now */
	struct kvp_vb_datagram datagram;
	struct kvp_vb_end end;
};

/* An id of librdmacm that is nobody's any more. */
struct kvp_vb_id {
	struct kvp_vb_call call;
	struct rdma_cm_id *id; /* owned */
	SLIST_ENTRY(kvp_vb_id) link;
};
SLIST_HEAD(kvp_vb_ids, kvp_vb_id);

struct kvp_vb_rail {
	struct kvp_net *net; /* borrowed, outlives it */
	struct kvp_vb_binder binder;
	uint32_t old_keys[KVP_VB_OLD_KEYS]; /* of dma-bufs and windows, of late; a ring */
	unsigned n_old_keys;                /* ever put into it */
	unsigned idx;
	struct kvp_nic nic;
	struct ibv_context *context; /* owned, like all of these */
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	bool empty; /* so it was found last */
	struct ibv_qp *ud;
	struct ibv_mr *ud_mr, *bounce_mr;
	struct kvp_vb_caller caller;
	struct ibv_ah *reject_ah;      /* of the last rejection, which may still need it */
	struct kvp_vb_refusal refusal; /* the next, while its call is out */
	uint8_t *ud_memory;
	struct kvp_qp ud_qp;
	struct kvp_rq ud_rq;
	uint64_t ud_failed_ns;         /* when it was found failed; 0: it is not */
	struct rdma_event_channel *cm; /* NULL: connections are made by datagrams */
	struct rdma_cm_id *listener;
	struct kvp_vb_ids parked; /* owned: to be destroyed when the port is up */
	unsigned n_parked;        /* at most KVP_VB_CONNS: each is an object of the kernel's, too */
	uint16_t cm_port;
	uint32_t n_conns, n_conns_max; /* what the completion queue has room for */
	uint32_t n_by_state[KVP_VB_STATES];
	bool port_down;        /* was so at the start, or said an asynchronous event */
	bool look;             /* the port may be usable by now, or its address have changed */
	bool dead;             /* the device is gone */
	uint64_t looked_ns;    /* when it was looked at last */
	uint64_t bytes;        /* payload sent */
	uint64_t lost, resent; /* connections that failed, messages that others sent again */
};

/* What a connection needs to come up, for its call. */
struct kvp_vb_plan {
	struct ibv_ah_attr way; /* for datagrams */
	bool join;              /* the peer's queue pair is known */
	struct ibv_qp_attr rtr, rts;
	int rtr_mask, rts_mask;
	uint32_t credits; /* the peer's receives */
	int status;       /* how it went */
};

/* A connection. */
struct kvp_vb_conn {
	struct kvp_net *net; /* borrowed, outlives it */
	struct kvp_vb_rail *rail;
	struct kvp_net_ep *ep; /* who opened it, NULL: a peer did */
	struct kvp_vb_in *in;  /* of the peer's endpoint; NULL: our own opened it */
	unsigned path;         /* of the endpoint */
	bool dirty;            /* in net->dirty */
	bool flushed;   /* its receives are: it is lost, at the next tick for want of a reason */
	bool quiet;     /* its end is no loss */
	bool opened;    /* it was open once */
	unsigned looks; /* FAILED: at an empty completion queue */
	uint32_t idx;   /* in net->conns */
	uint32_t tag;
	enum kvp_vb_state state;
	int status;           /* why it failed */
	struct ibv_qp *ibv;   /* owned; NULL: destroyed, or about to be */
	struct ibv_qp *going; /* the same, then */
	uint32_t qpn;
	struct kvp_vb_call call;
	struct kvp_vb_plan plan;
	struct kvp_qp qp;
	struct kvp_rq rq;
	struct ibv_mr *mr; /* owned, of `memory` */
	uint8_t *memory;   /* owned: send buffers, then receive buffers */
	unsigned n_send, n_recv;
	unsigned inline_bytes;
	uint32_t credits;   /* messages that may be sent */
	uint32_t consumed;  /* receives posted again and not yet told */
	uint64_t received;  /* receives over, well or not */
	uint64_t bytes_out; /* payload under way */
	uint32_t psn;
	struct kvp_vb_end to;          /* the peer's rail */
	uint32_t peer_conn;            /* passive: the opener's number */
	struct ibv_ah *ah;             /* owned, for datagrams */
	struct rdma_cm_id *cm;         /* owned; NULL: made by datagrams */
	uint64_t since_ns;             /* of the state */
	uint64_t repeat_ns;            /* CONNECTING: next request */
	uint64_t used_ns;              /* last message */
	uint64_t tried_ns;             /* last keepalive */
	uint64_t tried_completed;      /* completions by then */
	uint64_t moved_completed;      /* completions when they were looked at last */
	uint64_t moved_ns;             /* when there were more, or none was awaited */
	TAILQ_ENTRY(kvp_vb_conn) link; /* in net->all, or of no use any more in net->left */
	TAILQ_ENTRY(kvp_vb_conn) dirty_link;
};
TAILQ_HEAD(kvp_vb_conns, kvp_vb_conn);

/* A payload under way. */
struct kvp_vb_op {
	void *req;
	struct ibv_mr *mr; /* owned: registered for this payload alone */
	const struct kvp_vb_rail *mr_rail;
	int bounce; /* index, -1: none */
	int status;
	TAILQ_ENTRY(kvp_vb_op) link; /* in free or done, else in none */
};
TAILQ_HEAD(kvp_vb_ops, kvp_vb_op);

enum kvp_vb_item_state {
	KVP_VB_FREE,
	KVP_VB_POSTED,  /* with connection `tag`, until it is acknowledged */
	KVP_VB_UNKNOWN, /* its connection failed; until SYNCED */
	KVP_VB_AGAIN,   /* in ep->again; until a connection has room */
};

/* A write into a window of the peer. */
struct kvp_vb_run {
	const void *from;
	uint64_t remote;
	uint32_t bytes;
	uint32_t rkey[KVP_VB_RAILS]; /* by rail of the receiver */
};

/* A message of an endpoint, with what is needed to send it again. */
struct kvp_vb_item {
	struct kvp_net_ep *ep;
	struct kvp_vb_op *op; /* NULL: nobody wants to know */
	enum kvp_vb_item_state state;
	uint32_t tag;
	unsigned failures; /* its own, not those of others before it */
	uint32_t tried;    /* the paths over which it failed so, a bit each */
	uint64_t seq;
	uint16_t kind, hdr_bytes;
	bool whole;
	const void *payload;
	uint32_t bytes;
	uint32_t n_runs;         /* of direct writes, in the place of a payload */
	struct kvp_vb_run *runs; /* owned [KVP_NET_RUNS_MAX]; NULL: never needed */
	uint64_t offset;
	struct kvp_vb_key key;
	unsigned char hdr[KVP_NET_HDR_MAX];
	TAILQ_ENTRY(kvp_vb_item) link;
};
TAILQ_HEAD(kvp_vb_items, kvp_vb_item);

/* A pair of rails that an endpoint may use. */
struct kvp_vb_path {
	struct kvp_vb_rail *rail; /* ours */
	unsigned end;             /* the peer's, in its address */
	struct kvp_vb_conn *conn; /* NULL: none now */
	bool failed;              /* its last connection did */
	bool tell;                /* the peer learns by a connection where our rail is now */
	uint64_t retry_ns;        /* no new connection before that */
	uint64_t wait_ns;         /* the next wait */
};

/* A connection that is gone and of which some messages may have arrived. */
struct kvp_vb_sync {
	uint32_t tag;     /* 0: none */
	uint64_t sent_ns; /* 0: not asked */
};

enum kvp_vb_ep_state {
	KVP_VB_EP_OPEN,
	KVP_VB_EP_FAILED,  /* until ep_close() */
	KVP_VB_EP_CLOSING, /* until its connections are drained, then it is gone */
};

struct kvp_net_ep {
	struct kvp_net *net; /* borrowed, outlives it */
	void *arg;           /* the lane's */
	uint64_t number;     /* of the session */
	uint32_t id;
	enum kvp_vb_ep_state state;
	int status;         /* why it failed */
	char reason[160];   /* the same in words */
	bool tell_failed;   /* failed() is due */
	bool joined;        /* a connection was open once: the peer knows of us */
	bool spread;        /* has payloads: all rails are wanted */
	bool trouble;       /* something is to be done every turn */
	uint64_t used_ns;   /* last message */
	uint64_t since_ns;  /* of the state */
	uint64_t alone_ns;  /* without an open connection since; 0: not so */
	uint64_t last_ns;   /* all rails have failed: one has to be open by then; 0: not so */
	uint64_t delivered; /* the peer has given all below to its lane */
	uint64_t next_seq;
	uint32_t window;
	struct kvp_vb_item *items; /* owned [window], by sequence */
	struct kvp_vb_items again;
	struct kvp_vb_sync syncs[KVP_VB_SYNCS];
	unsigned n_paths, turn;
	struct kvp_vb_path paths[KVP_VB_RAILS];
	struct kvp_vb_address peer;
	TAILQ_ENTRY(kvp_net_ep) link;
};
TAILQ_HEAD(kvp_vb_eps, kvp_net_ep);

/* A message that came before one that must be delivered first. */
struct kvp_vb_held {
	bool set;
	uint16_t hdr_bytes;
	void *place;  /* of the payload */
	size_t bytes; /* 0: none */
	_Alignas(16) unsigned char hdr[KVP_NET_HDR_MAX];
};

/* What an endpoint of a peer has opened to us. */
struct kvp_vb_in {
	struct kvp_net *net;         /* borrowed, outlives it */
	uint8_t id[KVP_VB_ID_BYTES]; /* of the peer's net */
	uint64_t number;             /* of the session */
	uint32_t ep;
	uint32_t window;
	uint64_t next;            /* to be delivered */
	uint64_t told;            /* `next` as the peer knows it */
	struct kvp_vb_held *held; /* owned [window], by sequence */
	bool joined;              /* a connection was open once: the peer may count on it */
	bool ending;              /* it takes nothing more, and goes after its last connection */
	TAILQ_ENTRY(kvp_vb_in) link;
};
TAILQ_HEAD(kvp_vb_ins, kvp_vb_in);

struct kvp_vb_region {
	uint8_t *base;
	size_t bytes;
	struct ibv_mr *mr[KVP_VB_RAILS]; /* owned */
	bool landing;
	bool device; /* a GPU's memory: the processor must not read what lies there */
};

/* Memory of a client. */
struct kvp_net_region {
	uint64_t addr; /* that peers name */
	size_t bytes;
	struct ibv_mr *mr[KVP_VB_RAILS]; /* owned; NULL: a dma-buf, or a dead rail */
	int dmabuf_fd; /* owned; -1: host memory. Each window registers it for itself */
	uint64_t dmabuf_offset;
};

enum kvp_vb_window_state {
	KVP_VB_WINDOW_IDLE, /* nobody can write */
	KVP_VB_WINDOW_BINDING,
	KVP_VB_WINDOW_BOUND,
	KVP_VB_WINDOW_UNBINDING,
	KVP_VB_WINDOW_LOST, /* nobody can write: a device has refused, or let go */
};

struct kvp_net_window {
	enum kvp_vb_window_state state;
	bool failed;                      /* LOST once nothing is pending */
	uint32_t pending;                 /* rails that have not answered, a bit each */
	struct ibv_mw *mw[KVP_VB_RAILS];  /* owned, bound again and again; NULL: none */
	struct ibv_mr *mr[KVP_VB_RAILS];  /* owned: of a dma-buf, in the place of windows */
	struct kvp_net_region *region;    /* borrowed while not idle */
	TAILQ_ENTRY(kvp_net_window) link; /* in net->windows or net->idle_windows */
};
TAILQ_HEAD(kvp_vb_windows, kvp_net_window);

struct kvp_vb_place {
	uint8_t *base;
	size_t bytes;
	uint16_t nonce;
	bool apart; /* in a device's memory: no header can be read there */
};

struct kvp_net {
	const struct kvp_net_events *events; /* borrowed */
	void *arg;
	struct kvp_net_verbs_config config; /* strings are not used after open() */
	struct kvp_vb_rail rails[KVP_VB_RAILS];
	unsigned n_rails;
	uint32_t max_msg_bytes; /* the least of the rails */
	uint8_t *bounce;        /* owned */
	int epoll_fd, timer_fd, calls_fd;
	struct kvp_inbox calls_done; /* wakes calls_fd */
	uint32_t n_calls;
	uint32_t next_idx, next_ep;
	uint32_t epochs[KVP_VB_CONNS];
	struct kvp_vb_conn *conns[KVP_VB_CONNS];
	struct kvp_vb_conns all, left;
	struct kvp_vb_conns dirty; /* with requests to be posted */
	struct kvp_vb_eps eps;     /* opened by the lane */
	struct kvp_vb_ins ins;     /* opened by peers */
	uint32_t n_ins;
	struct kvp_vb_ops free_ops, done_ops;
	struct kvp_vb_op *ops; /* owned */
	uint8_t free_bounces[KVP_VB_BOUNCES];
	uint32_t n_free_bounces;
	struct kvp_vb_region regions[KVP_VB_REGIONS];
	uint32_t n_regions;
	uint64_t locked_bytes;       /* of them, once for each rail */
	struct kvp_vb_place *places; /* owned [KVP_VB_PLACES] */
	uint32_t n_places;
	struct kvp_vb_windows windows, idle_windows;
	uint32_t n_windows, n_windows_max;
	struct kvp_vb_address address;
	bool closing; /* nothing is received any more */
	bool ending;  /* some of ins are */
	bool armed;
	bool timer_on;
	uint32_t n_tell, n_draining, n_trouble, n_connecting;
	uint64_t now_ns, tick_ns;
	uint64_t rng;
	struct kvp_net_stats stats;
	uint64_t events_seen, keepalives, rejects;
	char what[512];
};

uint64_t kvp_vb_random(struct kvp_net *net);

/* net_verbs_call.c */
int kvp_vb_calls_start(struct kvp_vb_rail *rail);
/* Makes those that are out, and ends the thread: what is called from now on is done at once. */
void kvp_vb_calls_stop(struct kvp_vb_rail *rail);
/* Before: what, run, done. It must not be out. */
void kvp_vb_call(struct kvp_vb_rail *rail, struct kvp_vb_call *call);
/* Those that are over: how many. */
int kvp_vb_turn_calls(struct kvp_net *net);

/* net_verbs_rail.c */
int kvp_vb_rail_open(struct kvp_net *net, const struct kvp_nic *nic, char *err, size_t err_bytes);
void kvp_vb_rail_close(struct kvp_vb_rail *rail);
/* Asynchronous events: how many there were. */
int kvp_vb_rail_events(struct kvp_vb_rail *rail);
/* Looks again at ports that may be usable by now. */
void kvp_vb_rail_tick(struct kvp_net *net);
/* After a change of an address: seals it, and the text. */
void kvp_vb_describe(struct kvp_net *net);

/* Has the end an address yet? One that is down when its net is opened gets it later. */
static inline bool kvp_vb_end_known(const struct kvp_vb_end *end)
{
	static const uint8_t none[16];

	return memcmp(end->gid, none, sizeof(none)) != 0;
}

static inline bool kvp_vb_rail_up(const struct kvp_vb_rail *rail)
{
	return !rail->dead && !rail->port_down;
}

/* net_verbs_mem.c */
int kvp_vb_memory(struct kvp_net *net, const struct kvp_net_memory *memory, char *err,
		  size_t err_bytes);
int kvp_vb_device(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		  char *err, size_t err_bytes);
int kvp_vb_expose(struct kvp_net *net, void *place, size_t bytes, struct kvp_net_key *key);
/* The region that these bytes lie in, or NULL. */
const struct kvp_vb_region *kvp_vb_region(const struct kvp_net *net, const void *at, size_t bytes);
void kvp_vb_memory_fini(struct kvp_net *net);

/* net_verbs_direct.c: windows into memory of clients, and writes through them */
void kvp_vb_direct_init(struct kvp_net *net);
void kvp_vb_direct_fini(struct kvp_net *net);
int kvp_vb_direct_turn(struct kvp_net *net);
/* Is a window being bound or unbound? Nothing would wake us then. */
bool kvp_vb_direct_busy(const struct kvp_net *net);
int kvp_vb_region_add(struct kvp_net *net, const struct kvp_net_span *span,
		      struct kvp_net_region **out, char *err, size_t err_bytes);
void kvp_vb_region_remove(struct kvp_net *net, struct kvp_net_region *region);
int kvp_vb_window_open(struct kvp_net *net, struct kvp_net_region *region,
		       struct kvp_net_window **out);
int kvp_vb_window_key(struct kvp_net *net, const struct kvp_net_window *window,
		      struct kvp_net_key *key);
int kvp_vb_window_close(struct kvp_net *net, struct kvp_net_window *window);
uint32_t kvp_vb_write_max(struct kvp_net *net);
int kvp_vb_write(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_write *write);
/* The peer's rails, a bit each, for which all of its runs have keys. */
uint32_t kvp_vb_run_ends(const struct kvp_vb_item *item);
/* Posts an item's runs, behind which its message goes. */
int kvp_vb_post_runs(struct kvp_vb_conn *conn, const struct kvp_vb_item *item);

/* net_verbs_conn.c: one connection */
/* `ep` or `in` is its owner. */
int kvp_vb_conn_create(struct kvp_vb_rail *rail, struct kvp_net_ep *ep, struct kvp_vb_in *in,
		       struct kvp_vb_conn **out);
/* It is of no use any more, and nothing of it is under way: it is taken out of the net, and what is
 * left of it goes by itself. */
void kvp_vb_conn_leave(struct kvp_vb_conn *conn);
/* Finds a way to the peer, and asks it (kvp_vb_ud_send()). */
void kvp_vb_conn_ask(struct kvp_vb_conn *conn);
/* Brings the queue pair up against the peer's, which the datagram describes. Who was asked answers
 * then, or rejects. */
void kvp_vb_conn_join(struct kvp_vb_conn *conn, const struct kvp_vb_datagram *peer);
/* The same for who has filled the plan. No call is out. */
void kvp_vb_conn_set_up(struct kvp_vb_conn *conn);
/* Loses the connection: it drains. */
void kvp_vb_conn_fail(struct kvp_vb_conn *conn, int status);
/* The same, without a word: nobody has lost anything. */
void kvp_vb_conn_end(struct kvp_vb_conn *conn);
void kvp_vb_conn_dirty(struct kvp_vb_conn *conn);
struct kvp_vb_conn *kvp_vb_conn_find(struct kvp_net *net, uint32_t tag);
/* Connections that have drained leave: how many. */
int kvp_vb_turn_conns(struct kvp_net *net);
/* Keepalives, idle connections, and the end of those that lost their receives. */
void kvp_vb_conn_tick(struct kvp_net *net);

/* net_verbs_ep.c: endpoints and their rails */
int kvp_vb_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, uint64_t number,
		   void *ep_arg, struct kvp_net_ep **out);
void kvp_vb_ep_close(struct kvp_net *net, struct kvp_net_ep *ep);
/* A connection of the endpoint has come up, failed, or is gone. */
void kvp_vb_ep_up(struct kvp_vb_conn *conn);
void kvp_vb_ep_failing(struct kvp_vb_conn *conn);
/* The peer does not want a connection, of which it will be told as failing. */
void kvp_vb_ep_rejected(struct kvp_net_ep *ep, int status);
void kvp_vb_ep_gone(struct kvp_vb_conn *conn);
void kvp_vb_ep_fail(struct kvp_net_ep *ep, int status, const char *reason);
/* The best connection with room for so many requests and a message to one of those rails of the
 * peer (a bit each), or NULL; of a path to be avoided (a bit each) only if there is no other. */
struct kvp_vb_conn *kvp_vb_ep_pick(struct kvp_net_ep *ep, unsigned requests, uint32_t ends,
				   uint32_t avoid);
/* Has it a way, open or not, to one of those rails of the peer? */
bool kvp_vb_ep_reaches(const struct kvp_net_ep *ep, uint32_t ends);
/* A message without a number has come from the receiver. */
void kvp_vb_ep_synced(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame,
		      const uint8_t *bits);
int kvp_vb_tell_failed(struct kvp_net *net);
/* Steps of endpoints that are not well, or close; how much was done. */
int kvp_vb_turn_eps(struct kvp_net *net);
/* Rails that were lost, or are wanted now. */
void kvp_vb_ep_tick(struct kvp_net *net);
/* The port is back: no waiting any more. `moved`: with an address that no peer knows. */
void kvp_vb_ep_port_up(struct kvp_vb_rail *rail, bool moved);
/* A rail of a peer, which was down when its address was made, says where it is. */
void kvp_vb_ep_learn(struct kvp_net *net, const uint8_t *from, const struct kvp_vb_end *end);

/* net_verbs_in.c: what peers have opened */
struct kvp_vb_in *kvp_vb_in_find(struct kvp_net *net, const uint8_t *id, uint32_t ep);
int kvp_vb_in_create(struct kvp_net *net, const struct kvp_vb_datagram *request,
		     struct kvp_vb_in **out);
/* Takes nothing more of it, and ends its connections. Once it is found no more nothing writes here
 * in its name. */
void kvp_vb_in_end(struct kvp_vb_in *in);
/* A receive has ended well. */
void kvp_vb_received(struct kvp_vb_conn *conn, const struct ibv_wc *wc);
/* A connection to us goes: it brings nothing any more. */
void kvp_vb_in_gone(struct kvp_vb_conn *conn);
/* The same, of one that was never open. */
void kvp_vb_in_not_made(struct kvp_vb_conn *conn);
/* The end of those whose connections are gone. */
void kvp_vb_turn_ins(struct kvp_net *net);
/* A number of which the low half came, next to one that is known. */
static inline uint64_t kvp_vb_expand(uint64_t near, uint32_t low)
{
	return near + (uint64_t)(int64_t)(int32_t)(low - (uint32_t)near);
}

/* net_verbs_ud.c: making connections */
int kvp_vb_ud_init(struct kvp_vb_rail *rail);
void kvp_vb_ud_fini(struct kvp_vb_rail *rail);
void kvp_vb_ud_complete(struct kvp_vb_rail *rail, const struct ibv_wc *wc);
/* Says no to who asked for this connection. */
void kvp_vb_ud_refuse(const struct kvp_vb_conn *conn, int status);
/* Makes the connection that a request of a peer asks for, and answers it; `cm`: by librdmacm, which
 * the connection owns then. Negative errno: it is to be rejected. */
int kvp_vb_ud_accept(struct kvp_vb_rail *rail, const struct kvp_vb_datagram *request,
		     struct rdma_cm_id *cm);
void kvp_vb_ud_send(struct kvp_vb_conn *conn, enum kvp_vb_ud_type type);
void kvp_vb_ud_tick(struct kvp_net *net);
int kvp_vb_address_check(const void *addr, size_t addr_bytes, struct kvp_vb_address *out);
void kvp_vb_address_seal(struct kvp_vb_address *address);
/* Attributes of the way to a peer. */
struct ibv_ah_attr kvp_vb_way(const struct kvp_vb_rail *rail, const struct kvp_vb_end *to);

/* net_verbs_cm.c: the same by librdmacm */
int kvp_vb_cm_init(struct kvp_vb_rail *rail);
void kvp_vb_cm_fini(struct kvp_vb_rail *rail);
/* The id of a connection that is gone. It is destroyed on the rail's thread. */
void kvp_vb_cm_drop(struct kvp_vb_rail *rail, struct rdma_cm_id *id);
/* Those that waited for the port. */
void kvp_vb_cm_drop_parked(struct kvp_vb_rail *rail);
int kvp_vb_cm_connect(struct kvp_vb_conn *conn);
/* Who is asked brings the queue pair up, and says so then. */
int kvp_vb_cm_accept(struct kvp_vb_conn *conn);
/* The queue pair is up: says so to the peer. */
int kvp_vb_cm_joined(struct kvp_vb_conn *conn);
/* Says no to who asked for this connection. */
void kvp_vb_cm_refuse(const struct kvp_vb_conn *conn, int status);
/* How many events there were. */
int kvp_vb_cm_events(struct kvp_vb_rail *rail);

/* net_verbs_msg.c */
int kvp_vb_msg_init(struct kvp_net *net);
void kvp_vb_msg_fini(struct kvp_net *net);
int kvp_vb_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		const void *payload, size_t bytes, void *req);
int kvp_vb_put(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_put *put);
/* Posts an item, which was never posted or not received. -EAGAIN: no room; else it is posted, or
 * its connection has failed under it. */
int kvp_vb_item_post(struct kvp_vb_item *item);
/* The next item of the endpoint, to be filled and given to kvp_vb_item_send(); as send(). */
int kvp_vb_item_begin(struct kvp_net_ep *ep, const struct kvp_net_write *write,
		      struct kvp_vb_item **out);
int kvp_vb_item_send(struct kvp_vb_item *item);
/* The item is over. */
void kvp_vb_item_end(struct kvp_vb_item *item, int status);
/* Of the queue pairs: a request with an item is over. */
void kvp_vb_item_done(void *arg, void *user, int status);
/* Adds a SEND that is no item. */
int kvp_vb_add_frame(struct kvp_vb_conn *conn, const struct kvp_vb_frame *frame, const void *hdr);
/* Gives credits back, even none: 0 or as kvp_qp_add(). */
int kvp_vb_credit(struct kvp_vb_conn *conn);
/* Gives credits back if there are enough, and rings. */
void kvp_vb_flush(struct kvp_vb_conn *conn);
/* Tells the lane of every payload that is over; returns how many. */
int kvp_vb_tell_sent(struct kvp_net *net);
