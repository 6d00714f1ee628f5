/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data transport as a lane sees it: one small table of functions a transport.
 *
 * Threads: a net belongs to one lane; every call and every callback happens on that lane's thread.
 * Nothing here blocks. A message is a header of at most KVP_NET_HDR_MAX bytes, copied by send(),
 * and an optional payload, which stays the caller's memory and must not change until sent() has
 * run. Messages of one endpoint arrive in order or not at all, each at most once; arrival is known
 * to the sender only by an answer that the receiver sends.
 *
 * A callback may call everything but open(), close(), progress() and arm(). What it starts, such as
 * ep_close(), may go on in the next progress(). `hdr` is aligned to 16 bytes in callbacks, `data`
 * to nothing when it is the transport's own buffer.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_NET_HDR_MAX 256u
#define KVP_NET_ADDR_MAX 4096u
/* Ports of devices that one net may use. */
#define KVP_NET_RAILS 4u
/* Behind each landing place a transport that writes into the peer's memory needs so many bytes. */
#define KVP_NET_TAIL_BYTES 64u

struct kvp_net;
struct kvp_net_ep;

/* What the lane does with what the transport reports. `arg` is kvp_net_config.arg. */
struct kvp_net_events {
	/* A message without payload, or the first look at one with payload: returns where `bytes`
	 * of payload go (at least that many writable bytes that stay valid until data() or lost()),
	 * or NULL to drop it. Called with bytes == 0 for messages without payload: the return value
	 * is ignored. */
	void *(*message)(void *arg, const void *hdr, size_t hdr_bytes, size_t bytes);
	/* The payload of an accepted message. `data` is either what message() returned or the
	 * transport's own buffer, valid during the call only. */
	void (*data)(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes);
	/* The payload of an accepted message will never come (the endpoint died, or it was written
	 * elsewhere); `place` is what message() returned and is the lane's again. */
	void (*lost)(void *arg, const void *hdr, size_t hdr_bytes, void *place);
	/* A send is over and its payload is the lane's again: status 0 or negative errno.
	 * `req` is what send() was given. Also called for every pending send of a closed endpoint.
	 */
	void (*sent)(void *arg, void *req, int status);
	/* The endpoint failed by itself (peer died): no further sends succeed. The lane closes it.
	 */
	void (*failed)(void *arg, struct kvp_net_ep *ep, int status);
	/* ep_close() has ended: no request of it is alive, the pointer is dead. */
	void (*closed)(void *arg, void *ep_arg);
	/* May who names that session open connections to us? Of transports that ask; NULL: whoever
	 * knows our address may. */
	bool (*admits)(void *arg, uint64_t number);
};

/*
 * Where a peer may write, as the receiver's transport made it for one exposed place; opaque, and it
 * travels in a grant. All zeroes from a transport that knows no such thing.
 */
struct kvp_net_key {
	unsigned char bytes[32];
};

/* A message whose payload goes into an exposed place of the peer. */
struct kvp_net_put {
	const void *hdr, *payload;
	size_t hdr_bytes, bytes;
	const struct kvp_net_key *key;
	uint64_t offset; /* of the payload in the place */
	bool whole;      /* it is all that goes there; offset is 0 */
	void *req;       /* as of send(), never NULL */
};

/* Equal slots of memory that a transport is to know. */
struct kvp_net_memory {
	void *base;
	size_t stride, n; /* bytes from slot to slot, slots */
	bool landing;     /* KVP_NET_TAIL_BYTES at the end of each are the transport's, but for
			   * memory of a device */
	bool device;      /* a GPU's: the processor must not touch it */
	int dmabuf;       /* of a device: borrowed, outlives the net; -1: none */
	uint64_t dmabuf_offset; /* of base in it */
};

/* Memory of a client that peers are to write into. */
struct kvp_net_span {
	void *base; /* or its address on the device */
	size_t bytes;
	int dmabuf_fd; /* -1: host memory. Borrowed */
	uint64_t dmabuf_offset;
};
struct kvp_net_region;
struct kvp_net_window;

/* Runs of one call of write(). */
#define KVP_NET_RUNS_MAX 31u

/* A write into a window of the peer. */
struct kvp_net_run {
	const struct kvp_net_key *key;
	const void *from; /* in memory() */
	uint64_t offset;  /* in the window; the caller has compared it with the window's size */
	uint32_t bytes;
};

/* Writes, and the message that arrives behind the last of them. */
struct kvp_net_write {
	const struct kvp_net_run *runs; /* [n], copied, like the keys */
	uint32_t n;                     /* at least 1 */
	const void *hdr;
	size_t hdr_bytes;
	void *req; /* as of send(), never NULL */
};

/* Of the verbs transport; kvp_net_verbs_defaults() fills it. */
struct kvp_net_verbs_config {
	const char *devices; /* names separated by commas, a rail each; "": a choice */
	const char *exclude; /* devices never chosen, separated by commas */
	const char *near;    /* PCI address of the lane's GPU, or "" */
	const char *rail_of; /* numbers of rails: "mlx5_0=0,mlx5_1=1", or "" */
	uint32_t rails;      /* at most so many, 1..KVP_NET_RAILS */
	bool rdma_cm;        /* connections are made by librdmacm */
	bool same_rail;      /* connections join rails of the same number only */
	uint64_t idle_ns;    /* a connection without messages for so long is ended */
	int gid_index;       /* -1: the best RoCE v2 one */
	uint8_t port;        /* 0: the first that is active */
	uint8_t timeout;     /* of an unanswered packet: 4.096 us * 2^n, 1..31 */
	uint8_t retry_count; /* 1..7 resends before a connection is lost */
	uint8_t rnr_timer;   /* code of the wait when a peer has posted no receive, 1..31 */
	uint8_t service_level, traffic_class;
	uint16_t pkey_index;
	uint32_t mtu;          /* bytes: 256..4096, 0: the port's */
	uint32_t depth;        /* requests of one connection under way, 16..4096 */
	uint32_t inline_bytes; /* payloads up to this travel in the request, if the device can */
	uint64_t keepalive_ns; /* an idle connection is tried that often */
};

struct kvp_net_config {
	const struct kvp_net_events *events; /* borrowed, outlives the net */
	void *arg;
	const char *interface;                    /* network interface to bind, such as "lo" */
	uint16_t port_lo, port_hi;                /* listening ports that may be used; 0, 0: any */
	const struct kvp_net_verbs_config *verbs; /* borrowed; of transports over RDMA only */
	bool rdma;                                /* UCX: over the devices of `verbs`, not tcp */
	bool device; /* memory of the calling thread's GPU is wanted, if that can be */
	bool staged; /* and also if the transport itself copies it through the host's */
};

/* Transport-wide numbers, for gauges. Written by the lane's thread only. */
struct kvp_net_stats {
	uint64_t sent_messages, sent_bytes; /* given to the transport */
	uint64_t recv_messages, recv_bytes;
	uint64_t dropped; /* messages that message() refused */
	/* RDMA: connections of peers that were not taken, idle connections that were tried, what
	 * devices told by themselves (ports down and up, failures). */
	uint64_t rejects, keepalives, events;
	/* Of calls that may wait for the network or a device: those that do now, and those that
	 * took half a second or more. */
	uint64_t calls_out, calls_slow;
	uint64_t strangers;    /* of the rejected: named no session, or had more than one needs */
	uint32_t eps, pending; /* endpoints open, sends not over */
	uint32_t stuck;        /* endpoints whose close exceeds its deadline: their
				* memory is the lane's again only after close() */
};

enum kvp_net_rail_state {
	KVP_NET_RAIL_UP,
	KVP_NET_RAIL_DOWN, /* the port is */
	KVP_NET_RAIL_DEAD, /* the device is gone */
};

/* One port of a device, for displays. */
struct kvp_net_rail {
	char device[32];
	char address[46]; /* the GID it sends from */
	uint16_t mtu;     /* bytes */
	uint16_t port, number, gid_index;
	uint32_t state; /* enum kvp_net_rail_state */
	/* Queue pairs, by state: made and not up, up, in error. */
	uint32_t connecting, open, failed;
	uint64_t bytes;        /* of payload sent */
	uint64_t lost, resent; /* queue pairs that failed; messages that went over another rail */
};

struct kvp_net_ops {
	const char *name;
	/* Opens the transport. On failure `err` (at least 128 bytes) says why in words. */
	int (*open)(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		    size_t err_bytes);
	/* Closes it, forcing every endpoint; sent() runs for what was pending, lost() for what was
	 * accepted, closed() for every endpoint there was. The one call that may take long: up to
	 * two seconds when a peer does not react. NULL is fine. */
	void (*close)(struct kvp_net *net);
	/* Writes this net's address for peers; returns its length or negative errno. */
	int (*address)(struct kvp_net *net, void *buf, size_t buf_bytes);
	/* Opens an endpoint to the net with that address (validated by the transport as far as it
	 * can be). `number`: the same for the peer's endpoint of the same session, with which it
	 * shares its end, and for no other. `ep_arg` comes back in closed(). */
	int (*ep_open)(struct kvp_net *net, const void *addr, size_t addr_bytes, uint64_t number,
		       void *ep_arg, struct kvp_net_ep **out);
	/* Begins to close; closed() follows from progress() once what was taken is written out or
	 * the peer is gone. Past the transport's own deadline (a peer that stands still) the
	 * endpoint counts as `stuck`: its memory is in quarantine until closed(), which close()
	 * always brings. */
	void (*ep_close)(struct kvp_net *net, struct kvp_net_ep *ep);
	void *(*ep_arg)(struct kvp_net_ep *ep);
	/* Why it failed, in words; valid until closed(). NULL: a transport without such words. */
	const char *(*ep_reason)(struct kvp_net_ep *ep);
	/* 0: taken, sent(req) follows exactly once (never inside this call unless `req` is NULL:
	 * then no callback at all, for messages without payload); -EAGAIN: no room now, retry after
	 * the next progress() that returned > 0; other: endpoint is broken. */
	int (*send)(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		    const void *payload, size_t bytes, void *req);

	/* May that memory of a device be sent from, and landed in? NULL: could any, which spares
	 * making some? 0, and *word says how: "dmabuf",
	 * "peermem", "cuda"; it may be given to send(), or to memory() next. Else negative errno,
	 * and *word and `err` say why not. NULL: never. What a transport that has no put() lands in
	 * a device, data() has to copy there. */
	int (*device)(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		      char *err, size_t err_bytes);

	/* ---- of transports that write into the memory of the peer. NULL: payloads come with their
	 * messages, by send(). With them set, payloads go by put() only. */

	/* Makes `n` slots of memory known, `stride` bytes apart, for the life of the net: `landing`
	 * ones may be exposed, others are only sent from. 0 or negative errno, with words in `err`
	 * of open()'s size. */
	int (*memory)(struct kvp_net *net, const struct kvp_net_memory *memory, char *err,
		      size_t err_bytes);
	/* Makes the key of a place in landing memory. message() of a put into it must return the
	 * place (+ offset), and data() is called with it. Who has been given a key can write there
	 * until his endpoint's connection has ended: closed() of an endpoint says that for the net
	 * that it leads to. */
	int (*expose)(struct kvp_net *net, void *place, size_t bytes, struct kvp_net_key *key);
	/* Like send(), with a payload, into the place of a key that came from that peer. */
	int (*put)(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_put *put);

	/* ---- of those among them that let peers write into other memory too; NULL: they do not */

	/* Makes memory known, at most 4 GiB less a byte. The one call that takes time in proportion
	 * to its bytes. 0, or negative errno with words in `err`. */
	int (*region_add)(struct kvp_net *net, const struct kvp_net_span *span,
			  struct kvp_net_region **out, char *err, size_t err_bytes);
	/* No window of it is left. */
	void (*region_remove)(struct kvp_net *net, struct kvp_net_region *region);
	/* Makes a key for writes into the region, which window_key() has once the device knows it.
	 * 0; -EAGAIN: not now; -ENOBUFS: as many windows as there may be; other: it cannot. */
	int (*window_open)(struct kvp_net *net, struct kvp_net_region *region,
			   struct kvp_net_window **out);
	/* 0: the window is open; -EAGAIN: not yet; other: it never will be. */
	int (*window_key)(struct kvp_net *net, const struct kvp_net_window *window,
			  struct kvp_net_key *key);
	/* Closes it, whatever its state. 0: nobody can write through it any more, not even what was
	 * under way, and the pointer is dead; -EAGAIN: call again after progress(). A peer that
	 * writes through a closed window loses its connection. */
	int (*window_close)(struct kvp_net *net, struct kvp_net_window *window);
	/* Like put(): all of the runs and the message, or nothing. At most write_max() runs. */
	int (*write)(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_write *write);
	uint32_t (*write_max)(struct kvp_net *net);

	/* Does what can be done now; returns how many things happened. */
	int (*progress)(struct kvp_net *net);
	/* Prepares to sleep in poll(fd()): 0 armed, -EBUSY: progress again first, and what was
	 * refused may go now. Once armed, a progress() that returns 0 leaves it so. */
	int (*arm)(struct kvp_net *net);
	int (*fd)(struct kvp_net *net);
	const struct kvp_net_stats *(*stats)(struct kvp_net *net);
	/* Fills in its rails, and which of them the endpoint uses now, of how many. NULL: it has no
	 * such things. */
	uint32_t (*rails)(struct kvp_net *net, struct kvp_net_rail rails[KVP_NET_RAILS]);
	void (*ep_rails)(struct kvp_net_ep *ep, uint32_t *open, uint32_t *all);
	/* "tcp lo 127.0.0.1", what really carries the data; for status displays. */
	const char *(*describe)(struct kvp_net *net);
};

extern const struct kvp_net_ops kvp_net_ucx;
extern const struct kvp_net_ops kvp_net_verbs;

void kvp_net_verbs_defaults(struct kvp_net_verbs_config *config);

/* UCX takes over SIGSEGV, SIGHUP and others when it is loaded: a daemon wants its core dumps. This
 * sets them to what they were then, and so has to come before anybody handles one. */
void kvp_net_ucx_give_back_signals(void);
/*
 * How many transports of UCX have been closed without their end, since a peer did not take what UCX
 * had to tell it. They call nobody any more, but what UCX runs at exit() is not made for them: a
 * process that has some has to leave by _exit(). Any thread.
 */
unsigned kvp_net_ucx_left_open(void);
/* The version of the UCX library in use, such as "1.13.1". Any thread. */
const char *kvp_net_ucx_version(void);
/*
 * What is known to be wrong with that library, since a transport over tcp was opened in this
 * process; "" if nothing, or if none was. Any thread.
 */
const char *kvp_net_ucx_doubt(void);
