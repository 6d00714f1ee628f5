/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside of the UCX transport, shared by its net_ucx*.c files only. */

#include "daemon/net.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <ucp/api/ucp.h>

/* Sends that may be alive at once: of the whole net, and of one endpoint, so that a peer that has
 * stopped reading cannot take the room of the others. */
#define KVP_UCX_SENDS 65536u
#define KVP_UCX_SENDS_PER_EP 256u
/* Rendezvous receives that may be alive at once; more are dropped. */
#define KVP_UCX_RECVS 256u
#define KVP_UCX_AM_ID 7u
#define KVP_UCX_DEVICE_RANGES 4u
/* A forced close takes milliseconds; past this the endpoint counts as stuck. */
#define KVP_UCX_CLOSE_NS UINT64_C(2000000000)
/* The last words of a worker to its peers, past its endpoints. */
#define KVP_UCX_SETTLE_NS UINT64_C(500000000)
/* Bytes of eager payload that travel as one fragment, without reassembly at the receiver. */
#define KVP_UCX_FRAGMENT_BYTES (1024u * 1024u)

struct kvp_ucx_send {
	struct kvp_net_ep *ep;              /* valid while alive: an endpoint outlives its sends */
	void *user;                         /* what sent() reports; NULL: nothing to report */
	void *ucp;                          /* UCP's request, NULL once it is over */
	size_t bytes;                       /* of payload */
	int status;                         /* result, once over */
	TAILQ_ENTRY(kvp_ucx_send) link;     /* in exactly one of free, live, done */
	unsigned char hdr[KVP_NET_HDR_MAX]; /* UCP may read the header until the send is over */
};
TAILQ_HEAD(kvp_ucx_sends, kvp_ucx_send);

struct kvp_ucx_recv {
	struct kvp_net *net;
	void *place; /* the lane's memory */
	size_t bytes;
	size_t hdr_bytes;
	TAILQ_ENTRY(kvp_ucx_recv) link; /* in exactly one of free, live */
	unsigned char hdr[KVP_NET_HDR_MAX];
};
TAILQ_HEAD(kvp_ucx_recvs, kvp_ucx_recv);

enum kvp_ucx_ep_state {
	KVP_UCX_EP_OPEN,    /* until the error callback or ep_close() */
	KVP_UCX_EP_FAILED,  /* no sends any more; until ep_close() */
	KVP_UCX_EP_CLOSING, /* until every send, UCP's flush (or a failure), and its close are over
			     */
};

struct kvp_net_ep {
	struct kvp_net *net; /* borrowed, outlives the endpoint */
	ucp_ep_h ucp;        /* owned until the close was posted */
	void *arg;           /* the lane's */
	void *flush_request; /* UCP's, while they are alive */
	void *close_request;
	uint64_t close_since_ns;
	uint32_t n_sends; /* taken and not yet told */
	int status;       /* why it failed; 0: it has not */
	enum kvp_ucx_ep_state state;
	bool tell_failed;  /* failed() is due */
	bool flush_posted; /* UCP was asked to write out what it took */
	bool close_posted; /* UCP was asked to close */
	bool stuck;        /* closing for too long, and counted as such */
	TAILQ_ENTRY(kvp_net_ep) link;
};
TAILQ_HEAD(kvp_ucx_eps, kvp_net_ep);

struct kvp_net {
	const struct kvp_net_events *events; /* borrowed */
	void *arg;
	ucp_context_h context;  /* owned */
	ucp_worker_h worker;    /* owned */
	int fd;                 /* the worker's */
	bool rdma;              /* lanes over anything else are refused */
	bool staged;            /* a device's memory is taken over tcp, too */
	bool believes;          /* UCX takes our word for what memory is */
	bool closing;           /* nothing is received any more */
	uint32_t n_closing;     /* endpoints in CLOSING that are not stuck */
	uint32_t n_tell;        /* endpoints with tell_failed */
	struct kvp_ucx_eps eps; /* every endpoint that exists */
	struct kvp_ucx_sends free_sends, live_sends, done_sends;
	struct kvp_ucx_recvs free_recvs, live_recvs;
	struct kvp_ucx_send *sends; /* owned, KVP_UCX_SENDS of them */
	uint32_t n_sends;           /* used so far: those behind were never touched */
	struct kvp_ucx_recv *recvs; /* owned, KVP_UCX_RECVS of them */
	struct kvp_net_stats stats;
	/* Memory of a device that is sent from and landed in. */
	struct kvp_ucx_range {
		const unsigned char *base;
		size_t bytes;
	} device[KVP_UCX_DEVICE_RANGES]; /* [n_device] */
	uint32_t n_device;
	size_t address_bytes;
	unsigned char address[KVP_NET_ADDR_MAX]; /* framed */
	char what[96];
};

/* Maps UCX's status to negative errno; the one place that does. */
int kvp_ucx_errno(ucs_status_t status);

/* net_ucx_config.c: makes the context for one interface; `what` gets the words for describe(). */
int kvp_ucx_context_create(struct kvp_net *net, const struct kvp_net_config *config, char *err,
			   size_t err_bytes);

/* net_ucx_lanes.c: 0 if what UCX prints of an endpoint names lanes of RDMA devices only; else
 * -EPROTONOSUPPORT, and `bad` has the transport of the first other one. */
int kvp_ucx_lanes_read(const char *text, char *bad, size_t bad_bytes);
int kvp_ucx_lanes_check(struct kvp_net_ep *ep);

/* net_ucx_device.c */
/* Does this UCX have what it takes for memory of GPUs? Asked before a context is made. */
bool kvp_ucx_has_cuda(void);
/*
 * Makes UCX take our word for what memory is, by its older protocols. The newer ones (the default
 * from 1.16 on) look for themselves, and do not find what was made by the driver's calls for
 * virtual memory: 1.18 and 1.22 read such a ring on an H200 as the host's, which is the end of the
 * process. Over tcp they are also half as fast (docs/benchmarks.md). False: it does not say that it
 * will.
 */
bool kvp_ucx_believes(ucp_config_t *config);
int kvp_ucx_device(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		   char *err, size_t err_bytes);
/* What UCX is told of memory of ours. */
ucs_memory_type_t kvp_ucx_memory_type(const struct kvp_net *net, const void *at);

/* net_ucx_addr.c: UCX trusts an address that it unpacks, so addresses travel in a frame of ours.
 * frame() writes at most `room` bytes and returns how many, or -ENOBUFS. unframe() returns the
 * length of UCX's address and sets *inner into `framed`, or -EPROTO for anything damaged. */
int kvp_ucx_address_frame(void *out, size_t room, const void *inner, size_t inner_bytes);
int kvp_ucx_address_unframe(const void *framed, size_t framed_bytes, const void **inner);

/* net_ucx_msg.c */
int kvp_ucx_msg_init(struct kvp_net *net);
int kvp_ucx_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		 const void *payload, size_t bytes, void *req);
/* Tells the lane of every send that is over; returns how many. */
int kvp_ucx_tell_sent(struct kvp_net *net);
/* After the worker is gone: ends what UCX did not end. */
void kvp_ucx_abandon(struct kvp_net *net);
