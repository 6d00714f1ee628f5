/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A lane: the thread of one device, with its rings, its transport and the objects that the loop
 * gave it. This header is all that the loop knows of it.
 *
 * Orders go in through an inbox, are owned by the lane from kvp_lane_order() on and are handled in
 * the order given. Boards (daemon/board.h) come back. Every object is added by one order, ended by
 * one order, and answers KVP_BOARD_QUIET when nothing of it is queued, running, or in the
 * transport's hands any more. Ids are drawn by the loop and never reused. An order about an unknown
 * id is dropped: the object has failed or ended meanwhile, and its board says so.
 *
 * All structs below are allocated by the loop with malloc; "owned" pointers too, each a block of
 * its own. The lane frees both.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/admits.h"
#include "daemon/board.h"
#include "daemon/config.h"
#include "daemon/inbox.h"
#include "daemon/net.h"
#include "proto/layout.h"
#include "proto/plan.h"

#define KVP_LANE_GROUPS 16u
#define KVP_LANE_MASK_WORDS 8u /* 512 entries */
#define KVP_LANE_META_MAX 65536u

enum kvp_order_type {
	KVP_ORDER_POOL_ADD,
	KVP_ORDER_POOL_END,
	KVP_ORDER_FENCE_ADD,
	KVP_ORDER_FENCE_END,
	KVP_ORDER_EP_ADD,
	KVP_ORDER_EP_END,
	KVP_ORDER_RX_ADD,
	KVP_ORDER_RX_LEG,
	KVP_ORDER_RX_END,
	KVP_ORDER_TX_ADD,
	KVP_ORDER_TX_LEG,
	KVP_ORDER_TX_START,
	KVP_ORDER_TX_CHUNK,
	KVP_ORDER_TX_RECALL,
	KVP_ORDER_TX_END,
	KVP_ORDER_HOLD, /* test builds */
};

struct kvp_order {
	struct kvp_node node;
	enum kvp_order_type type;
};

/* ..._END, TX_START, TX_RECALL, HOLD: no more than an id and a number. */
struct kvp_order_id {
	struct kvp_order order;
	uint64_t id;    /* pool, fence, ep, generation (rx), tx; HOLD: enum kvp_hold */
	uint32_t value; /* TX_RECALL: first seq to withdraw; HOLD: on or off */
};

/* Memory of a GPU that a pool lies in. */
struct kvp_lane_memory {
	bool vmm; /* else by IPC handle */
	uint8_t handle[64];
	uint64_t offset, bytes;         /* in the allocation, or the chunks */
	uint32_t first_chunk, n_chunks; /* VMM */
	/* As its owner made it, for NICs: index of its fd in chunk_fds, unless dmabuf_bytes is 0.
	 */
	uint32_t dmabuf;
	uint64_t dmabuf_offset, dmabuf_bytes; /* of the memory's first byte in it, of all of it */
};

/* Room in an order for the lane's own record of what it adds: that must not need memory, since the
 * client has its answer by then. */
#define KVP_LANE_RECORD_WORDS 8u

/* A mapped pool. POOL_END answers QUIET once no rx or tx uses it (the loop has ended those before).
 * Mapping and unmapping of host memory are the loop's. Memory of a GPU is mapped by its lane, which
 * says READY then, or FAILED and QUIET, and unmapped before QUIET. */
struct kvp_order_pool {
	struct kvp_order order;
	struct kvp_board *board; /* id = the pool's */
	uint32_t owner_uid;      /* slots are zeroed when they change uid */
	bool writable;
	uint32_t n_entries;
	struct kvp_entry *entries; /* owned [n_entries]; base is the offset in the fd */
	uint8_t **fd_maps;         /* owned array [n_fds] of mappings, or of device addresses */
	uint32_t n_fds;
	struct kvp_lane_memory *memories; /* owned [n_fds]; NULL: host memory */
	uint64_t owner;                   /* whose handles they are: the session */
	char home[48]; /* UUID of the GPU that has the memory; "": this lane's, or none */
	/* Owned [n_chunks], and the descriptors too: chunks, behind them dma-bufs. Closed once the
	 * pool is mapped; dma-bufs, where peers may write into it, once it is registered. */
	int *chunk_fds;
	uint64_t *chunk_bytes; /* owned [n_chunks]; of chunks */
	uint32_t n_chunks;
	uint64_t record[KVP_LANE_RECORD_WORDS]; /* the lane's */
};

struct kvp_order_fence {
	struct kvp_order order;
	struct kvp_board *board;
	const _Atomic uint64_t *words; /* [n_words] the loop's mapping */
	uint32_t n_words;
	uint64_t record[KVP_LANE_RECORD_WORDS]; /* the lane's */
};

/* A data endpoint to one lane of a peer, for one session. A failed one says FAILED; its rx and tx
 * legs stall until the loop ends them. EP_END answers QUIET when the transport has let go of it. */
struct kvp_order_ep {
	struct kvp_order order;
	struct kvp_board *board; /* id = the endpoint's */
	uint64_t session;        /* whose fair share its wants and grants count against */
	uint64_t number;         /* of the session, for both ends the same */
	uint32_t addr_bytes;
	uint8_t *addr; /* owned */
};

/* Names of the bytes of a room that are not rows. */
struct kvp_lane_segment {
	uint32_t id, entry;
	uint64_t offset, bytes; /* checked against the entry by the loop */
};

/* At most what a lane keeps of an rx and of a tx, beside their orders. */
#define KVP_LANE_RX_BYTES 192u
#define KVP_LANE_TX_BYTES 192u

/* Destination end. Wants name its generation. */
struct kvp_order_rx {
	struct kvp_order order;
	struct kvp_board *board; /* id = the generation */
	uint64_t pool;
	uint64_t room;
	uint32_t dest;
	uint32_t n_legs; /* data senders: complete when that many legs are */
	uint32_t n_sides;
	uint32_t *pages; /* owned block of all lists */
	uint64_t prefix, end;
	uint32_t n_segments;
	struct kvp_lane_segment *segments; /* owned */
	int32_t meta_from;                 /* sender, or -1 */
	/* The meta lands here: [KVP_LANE_META_MAX], the loop's, NULL without meta. Valid with
	 * COMPLETE. */
	uint8_t *meta;
	uint32_t *meta_bytes;    /* the loop's; before COMPLETE */
	struct kvp_side sides[]; /* [n_sides] by group; pages point into `pages` */
};

/* What both ends of a leg compute alike. Owned: `block` holds everything that geom points to
 * (entries of both ends, sides without pages, starts, pairs). */
struct kvp_lane_geom {
	struct kvp_leg_geom geom;
	void *block;
	uint32_t n_src; /* entries of the source pool, masked ones included */
	uint64_t src_mask[KVP_LANE_MASK_WORDS]; /* those that take part */
	uint32_t piece_tokens;                  /* >= 1 */
	uint64_t slot_bytes; /* the smaller of both ends' slots, less what sums take; 0: this
				lane's. Segments are cut there */
	bool sums;           /* pieces have sums; never on a GPU's lane */
};

/* Adds a sender to an rx, after the loop has accepted it. Wants that come earlier are dropped (none
 * can: the sender starts after Go). */
struct kvp_order_rx_leg {
	struct kvp_order order;
	uint64_t generation;
	uint32_t sender;
	uint64_t ep; /* 0: local, fed by a tx of this lane */
	struct kvp_lane_geom leg;
};

/* Sender end. Chunks may come before its legs. */
struct kvp_order_tx {
	struct kvp_order order;
	struct kvp_board *board; /* id = the tx's */
	uint64_t pool;
	uint64_t room;
	uint32_t sender;
};

struct kvp_order_tx_leg {
	struct kvp_order order;
	uint64_t tx;
	uint32_t dest;
	uint64_t generation;
	uint64_t ep;     /* 0: local, the rx with that generation is on this lane */
	bool wants_meta; /* the destination takes the meta from this sender */
	/* Ids of the segments that the destination expects (owned); others are not sent to it.
	 * NULL: all are sent, and the receiver refuses what it does not know. */
	uint32_t n_segments;
	uint32_t *segments;
	struct kvp_lane_geom leg;
};

struct kvp_lane_chunk_side {
	uint64_t pos0;
	uint32_t n_pages;
	uint32_t *pages; /* into kvp_order_chunk.pages; NULL: group not in this chunk */
};

/* A token range. The loop has checked: seq, start against the previous end of each entry in the
 * set, pages against the pool, ranges against the pages, segments against the pool, last against
 * the end. */
struct kvp_order_chunk {
	struct kvp_order order;
	uint64_t tx;
	uint32_t seq;
	bool last;
	uint64_t start, tokens;
	uint64_t entry_set[KVP_LANE_MASK_WORDS];
	struct kvp_lane_chunk_side sides[KVP_LANE_GROUPS]; /* by source group */
	uint32_t *pages;                                   /* owned block */
	uint64_t fence;                                    /* 0: none */
	uint32_t fence_word;
	uint64_t fence_value;
	uint32_t n_segments;
	struct kvp_lane_segment *segments; /* owned */
	uint32_t meta_bytes;
	uint8_t *meta; /* owned, NULL: none; goes to legs whose receiver wants it */
};

struct kvp_lane;

struct kvp_lane_config {
	const char *name; /* "host", "gpu0" */
	const char *gpu;  /* UUID; NULL: host memory */
	uint32_t slots;   /* of each ring */
	uint64_t slot_bytes;
	uint64_t spin_ns;
	bool spin_yields;              /* gives way between two looks: few cores */
	enum kvp_ring_memory memory;   /* of a GPU's rings */
	enum kvp_flush flush;          /* of a GPU */
	bool pack;                     /* false: one message per row, counted and shown */
	uint32_t wants_per_session;    /* queued at this receiver */
	const struct kvp_net_ops *net; /* NULL: local mode only, no transport is opened */
	const char *interface;
	uint16_t port_lo, port_hi;
	const struct kvp_net_verbs_config *verbs; /* borrowed, for transports over RDMA */
	bool rdma;                                /* as of struct kvp_net_config */
	uint32_t mode;                            /* enum kvp_data_mode */
	uint64_t direct_run_bytes;       /* auto: pieces whose runs are shorter on average land */
	const struct kvp_admits *admits; /* borrowed, outlives it: who may connect; NULL: all */
	struct kvp_board *board;         /* the lane's own, or NULL */
	/* Boards are pushed here. Called on the lane's thread. */
	struct kvp_inbox *loop;
};

/* Starts the thread and opens the transport; returns when the lane is ready or has failed, with the
 * reason in `err`; -ENOMEM: its device has too little memory. */
int kvp_lane_start(struct kvp_lane **out, const struct kvp_lane_config *config, char *err,
		   size_t err_bytes);
/* All objects have been ended and are quiet. Stops the thread, joins, frees. */
void kvp_lane_stop(struct kvp_lane *lane);

/* Any thread; never blocks. The order is the lane's from here on. */
void kvp_lane_order(struct kvp_lane *lane, struct kvp_order *order);

/* Frees an order that no lane has been given, and what it owns. */
void kvp_order_free(struct kvp_order *order);

/* This lane's transport address (fixed after start); 0 bytes without transport. */
const void *kvp_lane_address(const struct kvp_lane *lane, uint32_t *bytes);
uint64_t kvp_lane_slot_bytes(const struct kvp_lane *lane);
/* The UUID of the lane's GPU, "" for host memory; and what to call the device. */
const char *kvp_lane_gpu(const struct kvp_lane *lane);
const char *kvp_lane_device(const struct kvp_lane *lane);
/* "ucx", "verbs"; "" without transport. */
const char *kvp_lane_transport(const struct kvp_lane *lane);

/* Where the rings lie and why there; fixed once the lane has started. */
struct kvp_lane_rings {
	bool device;      /* else in the host's memory, pinned if a GPU uses them */
	bool flush;       /* the GPU is told to look at what a NIC wrote */
	const char *word; /* how the transport takes the device's, or why there are none there */
	char reason[192]; /* the same in words; "" with host memory only */
};
const struct kvp_lane_rings *kvp_lane_rings(const struct kvp_lane *lane);

#define KVP_LANE_SLOTS_SHOWN 64u

struct kvp_lane_slot_status {
	uint64_t room;  /* 0: free */
	uint32_t waits; /* enum kvp_wait */
	uint64_t since_ns;
};

/* A consistent copy of what the lane publishes once a turn. */
struct kvp_lane_status {
	uint64_t turns, turn_ns; /* time of the last turn */
	const char *call;        /* foreign call it is in, NULL: none (static string) */
	uint64_t call_since_ns;
	bool has_work;                             /* something is queued or running */
	uint32_t pack_slots, pack_free, pack_held; /* held: packed ahead of a grant */
	uint32_t land_slots, land_free;
	uint32_t wants_queued; /* at this receiver */
	uint32_t wants_most;   /* of one endpoint, among them */
	uint32_t rxs, txs, eps;
	/* From here to import_bytes: 64-bit counts, which are added up for the whole daemon. */
	uint64_t pieces_sent, pieces_landed, bytes_sent, bytes_landed;
	uint64_t pieces_local, bytes_local;
	uint64_t pieces_peer, bytes_peer; /* of those: into memory of another GPU */
	uint64_t raw_rows;                /* rows sent one by one, packing off */
	uint64_t repacked;     /* pieces packed again because grants came too far apart */
	uint64_t together;     /* pieces packed in one pass with those of other destinations */
	uint64_t shared;       /* pieces that went out from a slot packed for another destination */
	uint64_t eager;        /* pieces that landed with their want */
	uint64_t eager_missed; /* payloads of wants that found no slot and were sent again */
	uint64_t no_token;     /* data dropped: token not live */
	uint64_t stale;        /* wants, grants, landed of ended objects dropped */
	uint64_t bad_messages; /* malformed headers dropped */
	uint64_t want_refused; /* wants beyond a session's limit */
	uint64_t slot_waits;   /* times a piece had to wait for a slot */
	uint64_t spins, sleeps, wakes;
	uint64_t pieces_direct, bytes_direct; /* of those landed: written into the pool */
	uint64_t direct_writes;               /* of sent ones: requests that wrote into pools */
	uint64_t checked, corrupt;            /* pieces whose sums were compared; differed */
	uint64_t fell_back[KVP_WHY_N];        /* pieces that landed in a slot, by reason */
	uint64_t windows, regions;            /* open to peers now, and registered */
	uint64_t region_bytes;
	uint64_t regions_dmabuf, regions_vmm; /* of them, a GPU's by dma-bufs: its owner's, ours */
	uint64_t launches, gpu_busy;          /* launches sent out; of them not over */
	uint64_t flushes;                     /* times the GPU was told to look at a NIC's writes */
	uint64_t imports, import_bytes;       /* memory of clients on the GPU, mapped now */
	uint32_t holds[12];                   /* test builds: pieces kept at each test point */
	uint64_t holds_on;                    /* those that are on: bits by enum kvp_hold */
	struct kvp_lane_slot_status pack[KVP_LANE_SLOTS_SHOWN], land[KVP_LANE_SLOTS_SHOWN];
	struct kvp_net_stats net;
	char net_describe[256];
	uint64_t n_rails;
	struct kvp_net_rail rails[KVP_NET_RAILS];
};

/* Any thread; lock-free for the lane (seqlock). */
void kvp_lane_status_read(const struct kvp_lane *lane, struct kvp_lane_status *out);

/* Test points: pieces that reach one stay there while it is on. Compiled in with KVP_TEST only. */
enum kvp_hold {
	KVP_HOLD_WANT,    /* tx: before a want is sent */
	KVP_HOLD_GRANT,   /* rx: before a grant is sent */
	KVP_HOLD_GATHER,  /* tx: granted, before the gather */
	KVP_HOLD_SEND,    /* tx: packed, before the send */
	KVP_HOLD_SCATTER, /* rx: data here, before the scatter */
	KVP_HOLD_LANDED,  /* rx: scattered, before landed is sent */
	KVP_HOLD_OFFER,   /* loop: offer sent, answers are not handled */
	/* These keep nothing: while one is on, a byte of every piece changes there. */
	KVP_HOLD_FLIP_PACK, /* tx: packed */
	KVP_HOLD_FLIP_LAND, /* rx: in the landing slot */
	KVP_HOLD_FLIP_POOL, /* rx: in the pool */
	/* Nor does this one: launches read where a GPU has no memory, which it does not survive. */
	KVP_HOLD_WILD,
	KVP_HOLD_N,
};
/* "want", "grant", ... */
const char *kvp_hold_name(enum kvp_hold point);
