/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Inside of a lane: what its thread owns. Shared by lane*.c, rx*.c, tx*.c and link.c only;
 * everything here is touched by the lane's thread alone, unless it says otherwise.
 *
 * Callbacks of the transport only check, copy and mark; messages are sent, and objects freed, by
 * the steps of the turn. An object that something happened to is marked dirty and settled at the
 * end of the turn: its board, its wait, and whether it is over.
 */

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/copy.h"
#include "daemon/lane.h"
#include "daemon/mover.h"
#include "daemon/ring.h"
#include "daemon/table.h"
#include "proto/kvpack.pb-c.h"
#include "proto/sums.h"
#include "proto/wire.h"

/* Wants that a lane holds, and pieces of one endpoint that have landed and were not told yet: a
 * peer that wants and never reads an answer must not take all. */
#define KVP_LANE_RX_PIECES 32768u
#define KVP_LANE_UNTOLD 4096u
#define KVP_LANE_TX_BITS 12u /* of a cookie: which piece */
#define KVP_LANE_TX_PIECES (1u << KVP_LANE_TX_BITS)
/* As many wants as the endpoints of 256 peers may have out; memory that is never touched costs
 * nothing. */
#define KVP_LANE_LATE 16384u
#define KVP_LANE_LOCAL_MOVES 256u
/* Dma-bufs of clients' memory that a lane keeps before they are registered, and of those that are:
 * each is a descriptor. */
#define KVP_LANE_DMABUFS 1024u
/* A GPU lane looks at its launches that often once it has spun for nothing. */
#define KVP_LANE_NAP_NS 20000
/* What a GPU lane launches in a turn, in the place of the numbers below. */
#define KVP_LANE_TURN_GPU_BYTES (UINT64_C(256) << 20)
/* Work of one turn: bounded, so that orders and fences are looked at every few milliseconds. */
#define KVP_LANE_TURN_PROGRESS 16u
#define KVP_LANE_TURN_GATHER_BYTES (8u << 20)
#define KVP_LANE_TURN_WANTS 64u
/* Packed bytes that an endpoint may have in the transport's hands before more is packed for it:
 * what is packed early has left the cache when it is sent. */
#define KVP_LANE_PACKED_BYTES (2u << 20)
#define KVP_LANE_TURN_LOCAL_BYTES (8u << 20)
/* Fences are looked at again after an eighth of the time that they were waited for already, within
 * these bounds: the longer a step takes, the less an eighth of it matters. */
#define KVP_LANE_FENCE_MIN_NS UINT64_C(20000)
#define KVP_LANE_FENCE_MAX_NS UINT64_C(100000)
/* While an endpoint closes, the transport's own deadlines need turns. */
#define KVP_LANE_CLOSE_POLL_NS UINT64_C(50000000)

struct kvp_lane;
struct kvp_rx_leg;
struct kvp_tx_leg;

TAILQ_HEAD(kvp_rx_pieces, kvp_rx_piece);
TAILQ_HEAD(kvp_tx_pieces, kvp_tx_piece);
TAILQ_HEAD(kvp_rx_legs, kvp_rx_leg);
TAILQ_HEAD(kvp_tx_legs, kvp_tx_leg);
TAILQ_HEAD(kvp_rxs, kvp_rx);
TAILQ_HEAD(kvp_txs, kvp_tx);
TAILQ_HEAD(kvp_links, kvp_link);
TAILQ_HEAD(kvp_shares, kvp_share);
TAILQ_HEAD(kvp_chunks, kvp_chunk);
STAILQ_HEAD(kvp_returns, kvp_return);
TAILQ_HEAD(kvp_local_moves, kvp_local_move);
TAILQ_HEAD(kvp_rx_windows, kvp_rx_window);
TAILQ_HEAD(kvp_direct_pools, kvp_direct_pool);
STAILQ_HEAD(kvp_run_blocks, kvp_run_block);

/* ---- objects that others refer to ------------------------------------------------------------ */

enum kvp_region_how {
	KVP_REGION_HOST,   /* memory of the host */
	KVP_REGION_DMABUF, /* of a GPU, by a dma-buf of its owner */
	KVP_REGION_VMM,    /* by one of our own mapping */
};

/* A part of a pool's memory that the transport knows, or will. */
struct kvp_direct_region {
	uint8_t *base;
	uint64_t bytes;
	uint32_t fd_idx;
	enum kvp_region_how how;
	struct kvp_net_region *net; /* owned; NULL: not yet */
};

enum kvp_direct_state {
	KVP_DIRECT_PENDING, /* in lane->registering, one region a turn */
	KVP_DIRECT_READY,
	KVP_DIRECT_UNABLE, /* the transport does not take the memory; `err` says why */
};

/* The memory of a pool that peers may be let write into. */
struct kvp_direct_pool {
	struct kvp_lane_pool *pool;
	enum kvp_direct_state state;
	enum kvp_why why; /* UNABLE */
	uint32_t n_regions, n_done;
	char err[160];
	TAILQ_ENTRY(kvp_direct_pool) link;
	struct kvp_direct_region regions[]; /* [n_regions] */
};

/* Both live in their orders. */
struct kvp_lane_pool {
	struct kvp_table_node node;
	struct kvp_direct_pool *direct; /* owned; NULL: nobody has asked for it */
	struct kvp_order_pool *order;   /* owned */
	uint32_t refs;                  /* rx and tx that use it */
	bool ended;
	uint16_t n_dmabufs;              /* that came with it and are open */
	struct kvp_gpu_import **imports; /* owned [order->n_fds]; NULL: host memory */
};

struct kvp_lane_fence {
	struct kvp_table_node node;
	struct kvp_order_fence *order; /* owned */
};
static_assert(sizeof(struct kvp_lane_pool) <= KVP_LANE_RECORD_WORDS * sizeof(uint64_t), "record");
static_assert(sizeof(struct kvp_lane_fence) <= KVP_LANE_RECORD_WORDS * sizeof(uint64_t), "record");

/* A peer session's part in the rings; lives while an endpoint or a landing slot of the session
 * does. */
struct kvp_share {
	struct kvp_table_node node;
	uint32_t refs;
	uint32_t land_slots;     /* granted to it */
	uint32_t pack_slots;     /* pieces of it that hold one */
	uint32_t ahead;          /* of those, packed without a grant, and not granted yet */
	struct kvp_rx_legs legs; /* with wants in their queue; served in turns */
	bool queued;             /* in lane->shares */
	TAILQ_ENTRY(kvp_share) link;
};

/* What an ended sender leg still has to say; outlives the leg. */
struct kvp_return {
	uint64_t generation;
	uint32_t sender;
	STAILQ_ENTRY(kvp_return) link;
};

enum kvp_link_state {
	KVP_LINK_OPEN,
	KVP_LINK_BROKEN,  /* failed; closed in the next turn */
	KVP_LINK_CLOSING, /* until the transport says closed */
	KVP_LINK_CLOSED,
};

/* Where the sending of a piece row by row stands. */
struct kvp_raw_cursor {
	struct kvp_tx_piece *piece;         /* NULL: none has begun */
	uint32_t part_idx;                  /* the next part's */
	uint32_t row;                       /* of the run, the next to go */
	uint32_t entry, src_off, row_bytes; /* of the part */
	uint64_t offset;                    /* of the next row in the piece */
	uint64_t part_end;
	struct kvp_rows_iter it;
	struct kvp_run run;
};

/* A lane's view of an endpoint. */
struct kvp_link {
	struct kvp_table_node node;
	struct kvp_order_ep *order; /* owned */
	struct kvp_lane *lane;
	struct kvp_net_ep *net_ep; /* NULL when closed */
	struct kvp_share *share;
	enum kvp_link_state state;
	bool ended; /* by the loop */
	bool full;  /* the transport takes nothing until it has progressed */
	/* receiver */
	uint32_t wants_queued;
	uint32_t runs_out;            /* RUNS messages of pieces that have not landed */
	struct kvp_rx_piece *telling; /* granted; its RUNS are not all sent */
	struct kvp_rx_pieces landed;  /* [n_landed] LANDED to be sent */
	uint32_t n_landed;
	struct kvp_rx_pieces at_risk; /* slots that the peer may still write into */
	struct kvp_rx_legs refusals;  /* REFUSE to be sent */
	struct kvp_rx_legs rx_legs;   /* all that answer here */
	/* sender */
	uint32_t wants_out;           /* wants without a grant */
	uint32_t sending;             /* payloads in the transport's hands */
	uint64_t in_flight;           /* packed bytes among them */
	struct kvp_tx_legs ready;     /* legs with a piece to want, served in turns */
	struct kvp_tx_pieces wanted;  /* no grant yet, not packed */
	struct kvp_tx_pieces granted; /* to be packed; without packing, to be sent */
	struct kvp_tx_pieces packed;  /* granted and packed, to be sent */
	struct kvp_raw_cursor raw;    /* of the first of them, without packing */
	struct kvp_tx_legs tx_legs;   /* all that send here */
	struct kvp_returns returns;
	struct kvp_run_block *blocks; /* owned [KVP_WIRE_EP_RUNS]; NULL: no direct grant yet */
	struct kvp_run_blocks free_blocks;
	TAILQ_ENTRY(kvp_link) link; /* in lane->links */
};

/* ---- receiver -------------------------------------------------------------------------------- */

enum kvp_rx_piece_state {
	KVP_RX_QUEUED,  /* until a landing slot is free and its session's turn has come */
	KVP_RX_GRANTED, /* until the data is here */
	KVP_RX_HERE,    /* until the scatter: kept by a test point, or until the GPU takes it */
	KVP_RX_MOVING,  /* until the GPU has scattered it */
	KVP_RX_CORRUPT, /* its sums differ: until its rx fails, at once */
	KVP_RX_LANDED,  /* until LANDED is sent, and until the leg's older pieces have landed */
	KVP_RX_ORPHAN,  /* its rx is over; until the transport lets go of the slot */
	KVP_RX_AT_RISK, /* its rx is over, and the sender may still write into the slot by itself;
			 * until its data, its RETURN or the end of its endpoint */
};

struct kvp_rx_piece {
	struct kvp_rx_leg *leg;  /* NULL: orphan */
	struct kvp_slot *slot;   /* GRANTED, HERE, ORPHAN */
	struct kvp_share *share; /* of the slot */
	enum kvp_rx_piece_state state;
	uint8_t kind;    /* enum kvp_wire_kind */
	bool told;       /* LANDED is sent */
	bool passed;     /* counted in the leg's arrived positions, out of leg->order */
	bool direct;     /* granted without a slot: the sender writes into the pool */
	bool may_direct; /* the sender can */
	bool decided;    /* it goes by a slot */
	bool written;    /* HERE: it lies in the pool, and the GPU has to be told */
	uint32_t tokens;
	uint32_t n_runs, runs_told, runs_written; /* direct */
	uint64_t token;                           /* direct: what WRITTEN must name */
	struct kvp_rx *risk;                      /* direct, AT_RISK: the rx that waits for it */
	uint32_t segment;                         /* index in the rx's list */
	uint32_t receiving;                       /* messages that the transport still writes */
	uint32_t part_idx;           /* row by row: the part that the next row belongs to */
	uint64_t part_off, part_end; /* ... and the place of that row */
	uint32_t part_row;           /* ... and its bytes */
	uint64_t start;              /* ROWS: first position; SEGMENT, META: offset */
	uint64_t bytes;
	uint64_t payload;    /* as it travels: with its sums */
	uint64_t generation; /* AT_RISK: whose it was */
	uint32_t sender;
	struct kvp_link *link; /* AT_RISK: that the sender's messages come for */
	uint64_t given, got;   /* bytes announced by messages, bytes here */
	uint64_t need;         /* bytes that are to come; 0: no message yet */
	uint64_t cookie;
	uint64_t since_ns;
	uint64_t set[KVP_LANE_MASK_WORDS];
	TAILQ_ENTRY(kvp_rx_piece) order; /* leg->order: as wanted; also the free list */
	/* leg->queued, lane->rx_here, lane->scattering, link->landed, link->at_risk */
	TAILQ_ENTRY(kvp_rx_piece) queue;
};

/* The chunk that a leg's wants belong to now. */
struct kvp_rx_chunk {
	uint64_t start, tokens;
	uint64_t set[KVP_LANE_MASK_WORDS];
	uint32_t n_pieces, n_rows;
	bool last;
};

struct kvp_rx_leg {
	struct kvp_rx *rx;
	struct kvp_link *link;     /* NULL: local, or its endpoint is gone */
	struct kvp_lane_geom geom; /* owned block */
	uint32_t sender;
	bool local;
	bool last_seen, returned, finished;
	bool share_queued;     /* in share->legs */
	bool refuse;           /* in link->refusals */
	uint32_t piece_tokens; /* 0: local, before its first want */
	uint32_t seq, piece;   /* the next want's */
	uint32_t open_segment; /* begun, not finished: index; UINT32_MAX: none */
	struct kvp_rx_chunk chunk;
	uint32_t n_order, n_queued;
	struct kvp_rx_pieces order, queued;
	uint64_t refuse_cookie;
	uint32_t refuse_status;
	uint32_t n_windows; /* that its sender was told */
	uint64_t arrived;   /* least landed position over its entries */
	uint64_t *wanted;   /* [n_src] by source entry: wanted up to here */
	uint64_t *landed;   /* [n_src] landed without a gap up to here */
	TAILQ_ENTRY(kvp_rx_leg) rx_link, link_link, share_link, refuse_link;
};

/* A segment, or the meta. */
struct kvp_rx_blob {
	uint64_t wanted, landed, total;
	uint32_t sender; /* UINT32_MAX: not begun */
	bool done;       /* landed in full */
};

/* Where the sender of one leg may write. */
struct kvp_rx_window {
	uint32_t sender, region;
	uint32_t idx; /* that the sender knows it by */
	bool told;
	struct kvp_net_window *net; /* owned */
	TAILQ_ENTRY(kvp_rx_window) link;
};

/* A run of a piece in the pool. */
struct kvp_direct_run {
	uint32_t region, offset, bytes;
};

struct kvp_rx {
	struct kvp_table_node node; /* id: generation */
	struct kvp_lane *lane;
	struct kvp_order_rx *order; /* owned */
	struct kvp_lane_pool *pool;
	struct kvp_rx_legs legs;
	uint32_t n_legs, n_finished;
	uint32_t n_queued, n_granted, n_here; /* pieces by state */
	uint32_t n_moving;                    /* on the GPU */
	uint64_t ticket;                      /* over: the rx is, too */
	uint32_t blobs_left;                  /* segments and meta that have not landed */
	struct kvp_rx_blob *blobs;            /* owned [n_segments + 1]; the last is the meta */
	struct kvp_rx_windows windows;        /* of all legs; the rx is over when they are closed */
	uint32_t n_risk;                      /* pieces that senders may still write */
	enum kvp_why unable;                  /* data.mode is direct, and a piece cannot go so */
	bool failed, complete, dirty, moved;
	TAILQ_ENTRY(kvp_rx) dirty_link; /* also lane->leaving_rxs, lane->returning */
};

static_assert(sizeof(struct kvp_rx) + sizeof(struct kvp_rx_blob) <= KVP_LANE_RX_BYTES, "rx");

/* A piece on its way from pool to pool, on a GPU. */
struct kvp_local_move {
	struct kvp_tx_leg *leg; /* NULL: over */
	struct kvp_chunk *chunk;
	struct kvp_rx_piece piece; /* its leg is NULL when the destination is over */
	uint32_t segment;          /* index in the chunk's list */
	uint64_t ticket;
	bool placed;  /* in a launch; else it waits for room in one */
	bool skipped; /* an end was over before that: nothing has moved */
	TAILQ_ENTRY(kvp_local_move) link;
};

/* ---- sender ---------------------------------------------------------------------------------- */

enum kvp_tx_piece_state {
	KVP_TX_WANTED,  /* until GRANT, or LANDED without bytes */
	KVP_TX_GRANTED, /* until it is packed and the transport has taken it */
	KVP_TX_SENT,    /* until sent() and LANDED, in either order */
};

/* Runs of a piece, as they came in one message. */
struct kvp_run_block {
	uint32_t n;
	struct kvp_wire_run runs[KVP_WIRE_RUNS_MAX];
	STAILQ_ENTRY(kvp_run_block) link; /* in the piece, or link->free_blocks */
};

/* The next run of a piece that is written, and where its bytes lie in the slot. */
struct kvp_tx_cursor {
	const struct kvp_run_block *block;
	uint32_t run;  /* of the block */
	uint32_t part; /* of the piece's layout */
	uint64_t done; /* bytes of that part */
};

/* What a leg has been told of the destination's pool. */
struct kvp_tx_window {
	struct kvp_net_key key;
	uint64_t bytes;
};

struct kvp_tx_piece {
	struct kvp_tx_leg *leg;  /* NULL: over, but its slot is still in the transport's hands */
	struct kvp_link *orphan; /* then: whose transport */
	struct kvp_chunk *chunk;
	struct kvp_slot *slot; /* packed */
	struct kvp_slot *tail; /* row by row: has the sums */
	enum kvp_tx_piece_state state;
	uint8_t kind;
	bool ahead; /* packed without a grant */
	bool landed, gathered;
	bool gathering; /* in lane->gathering */
	bool eager;     /* its bytes went with the want */
	bool direct;    /* granted so */
	uint32_t n_runs, runs_here, runs_sent;
	struct kvp_run_blocks runs; /* not yet written */
	struct kvp_tx_cursor cursor;
	uint32_t idx; /* in the chunk */
	uint32_t tokens;
	uint32_t segment; /* index in the chunk's list */
	uint32_t sends;   /* in the transport's hands */
	uint32_t seq;     /* of its chunk, which may be over before it */
	uint64_t nonce;   /* the upper bits of the cookie: nobody guesses those of another */
	uint32_t remote_slot;
	struct kvp_net_key remote_key;
	uint64_t token;
	uint64_t start; /* ROWS: first position; SEGMENT, META: offset */
	uint64_t bytes, total;
	uint64_t payload; /* as it travels: with its sums */
	uint64_t since_ns;
	TAILQ_ENTRY(kvp_tx_piece) order; /* leg->order; also the free list */
	TAILQ_ENTRY(kvp_tx_piece) queue; /* link->wanted, link->granted, link->packed */
	TAILQ_ENTRY(kvp_tx_piece) moving;
};

struct kvp_chunk {
	struct kvp_order_chunk *order; /* owned */
	uint64_t to_gather, to_land;   /* pieces, over all legs, once counted */
	bool counted;                  /* the room has started */
	bool fenced;                   /* its fence is reached, or it has none */
	bool touched;                  /* a piece of it was wanted or moved */
	TAILQ_ENTRY(kvp_chunk) link;
};

struct kvp_tx_leg {
	struct kvp_tx *tx;
	struct kvp_link *link;          /* NULL: local, or its endpoint is gone */
	struct kvp_order_tx_leg *order; /* owned, with its geometry */
	uint64_t slot_bytes;
	uint32_t groups; /* source groups that its pairs use, a bit each */
	bool local;
	bool ready;              /* in link->ready */
	bool dropped;            /* over: pieces go when the transport lets go of them */
	struct kvp_chunk *chunk; /* the next piece's; NULL: none is there */
	uint32_t piece;          /* the next piece's index, below n_pieces */
	uint32_t n_pieces;       /* of that chunk */
	uint32_t n_order;
	struct kvp_tx_pieces order_list; /* from the oldest that has not landed */
	struct kvp_tx_window *windows;   /* owned [KVP_WIRE_LEG_WINDOWS]; NULL: none is known */
	uint32_t n_windows;
	/* Legs that pack alike: the first of them, the next of them, and how far any has packed. */
	struct kvp_tx_leg *alike, *alike_next;
	uint64_t packed; /* of the first: seq << 32 | (idx + 1) */
	TAILQ_ENTRY(kvp_tx_leg) tx_link, link_link, ready_link;
};

struct kvp_tx {
	struct kvp_table_node node;
	struct kvp_lane *lane;
	struct kvp_order_tx *order; /* owned */
	struct kvp_lane_pool *pool;
	struct kvp_tx_legs legs;
	struct kvp_chunks chunks;   /* not yet delivered, by seq */
	struct kvp_chunk *unfenced; /* the first that waits for its fence */
	uint32_t n_legs;
	uint32_t next_seq;
	uint32_t local_tokens;                /* of a local piece */
	uint64_t token_bytes;                 /* of a token's rows in all entries */
	uint32_t n_wanted, n_granted, n_sent; /* pieces by state */
	uint32_t n_moving;                    /* on the GPU */
	uint64_t ticket;                      /* over: the tx is, too */
	bool started, failed, ended, last_seen, dirty, moved;
	bool local_queued, fence_queued;
	TAILQ_ENTRY(kvp_tx) dirty_link, local_link, fence_link; /* dirty: also lane->leaving_txs */
};

static_assert(sizeof(struct kvp_tx) <= KVP_LANE_TX_BYTES, "tx");

/* ---- the lane -------------------------------------------------------------------------------- */

#define KVP_LANE_STATUS_WORDS (sizeof(struct kvp_lane_status) / sizeof(uint64_t))
#define KVP_LANE_TOKENS 512u

struct kvp_lane {
	struct kvp_lane_config config;
	pthread_t thread;
	sem_t started;
	int start_result;
	char start_err[256];
	struct kvp_inbox inbox; /* any thread pushes */
	int wake_fd;
	_Atomic bool stop;

	struct kvp_net *net;
	uint8_t addr[KVP_NET_ADDR_MAX];
	uint32_t addr_bytes;

	uint64_t now_ns; /* once a turn, and after long work */
	struct kvp_mover mover;
	struct kvp_ring pack, land;
	struct kvp_lane_rings rings;
	void *ring_memory;               /* owned pinned memory: of both rings, or of their twins */
	struct kvp_gpu_ring ring_device; /* owned memory of both rings on the device */
	char device[176];
	struct kvp_tx_pieces gathering; /* on the GPU, by ticket */
	struct kvp_rx_pieces scattering;
	struct kvp_local_move *local_pool; /* owned [KVP_LANE_LOCAL_MOVES], with a GPU */
	struct kvp_local_moves local_free;
	struct kvp_local_moves local_moving; /* by ticket; the last may not be launched yet */
	uint32_t n_local_free;
	struct kvp_rxs leaving_rxs; /* ended; until the GPU has passed */
	struct kvp_txs leaving_txs;
	struct kvp_rxs returning; /* ended; until nobody can write for them */
	struct kvp_direct_pools registering;
	struct kvp_direct_run *runs; /* owned [KVP_WIRE_PIECE_RUNS], scratch */
	/* Owned, by slot, then by slot those of the twins; zeroes if the transport has none. */
	struct kvp_net_key *land_keys;
	struct kvp_table pools, fences, eps, shares_by_id, rxs, txs;
	struct kvp_links links;
	uint32_t links_closing;
	struct kvp_shares shares;     /* with wants in their queue; served in turns */
	struct kvp_rx_piece *eager;   /* between the two calls for a WANT with a payload */
	struct kvp_rx_pieces rx_here; /* kept before the scatter */
	/* Messages of legs that are not known yet: their orders may be in the inbox already. */
	union kvp_wire_msg late[KVP_LANE_LATE];
	uint32_t n_late;
	struct kvp_rxs dirty_rxs;
	struct kvp_txs dirty_txs, local, fenced;
	uint64_t fence_next_ns, fence_since_ns;
	uint32_t ahead;     /* pieces packed without a grant */
	uint32_t here;      /* pieces in rx_here */
	bool unseen;        /* some of them were written into pools of the GPU */
	uint32_t n_dmabufs; /* of pools, not registered */
	uint32_t holds;     /* bits by enum kvp_hold */

	struct kvp_rx_piece *rx_pool; /* owned [KVP_LANE_RX_PIECES] */
	struct kvp_tx_piece *tx_pool; /* owned [KVP_LANE_TX_PIECES] */
	uint32_t rx_fresh, tx_fresh;  /* never used from here on */
	uint32_t rx_live, tx_live;
	struct kvp_rx_pieces rx_free;
	struct kvp_tx_pieces tx_free;
	struct kvp_part *parts; /* owned [KVP_GATHER_TOGETHER * KVP_PAIRS_MAX], scratch */

	uint64_t tokens[KVP_LANE_TOKENS]; /* random numbers not yet used */
	uint32_t n_tokens;

	struct kvp_lane_status counts; /* counters; the rest is filled when published */
	/* Seqlock: odd while it is written. */
	_Atomic uint64_t status_seq;
	_Atomic uint64_t status_words[KVP_LANE_STATUS_WORDS];
	_Atomic uint64_t turns, turn_ns, call_since_ns;
	_Atomic(const char *) call;
};

static_assert(sizeof(struct kvp_lane_status) % sizeof(uint64_t) == 0, "copied as words");

uint64_t kvp_lane_now(void);
/* Adds to a counter of a board that only the lane writes. */
void kvp_board_add(_Atomic uint64_t *counter, uint64_t n);
/* Stores now if nothing is stored yet. */
void kvp_board_once(_Atomic uint64_t *stamp, uint64_t now_ns);

/* Is the geometry of a leg within what the lane's structs can hold? */
bool kvp_lane_geom_fits(const struct kvp_lane_geom *leg);

static inline bool kvp_lane_held(const struct kvp_lane *lane, enum kvp_hold point)
{
#ifdef KVP_TEST
	return lane->holds >> point & 1;
#else
	(void)lane;
	(void)point;
	return false;
#endif
}

/* The foreign call that the lane is about to make, for whoever wonders why it hangs; NULL: back. */
void kvp_lane_call(struct kvp_lane *lane, const char *call);

/* A random number that is not 0. */
uint64_t kvp_lane_token(struct kvp_lane *lane);

/* Publishes the status; lane_status.c */
void kvp_lane_publish(struct kvp_lane *lane);

struct kvp_lane_pool *kvp_lane_pool_find(struct kvp_lane *lane, uint64_t id);
/* Takes an order of a room's end for which there is no pool (NULL), or no memory. */
void kvp_lane_refuse_end(struct kvp_lane *lane, struct kvp_order *order, struct kvp_board *board,
			 const struct kvp_lane_pool *pool);
void kvp_lane_pool_put(struct kvp_lane *lane, struct kvp_lane_pool *pool);
/* Closes the dma-bufs that came with a pool, if they are open. */
void kvp_lane_pool_close_fds(struct kvp_lane *lane, struct kvp_lane_pool *pool);
/* Is the chunk's fence reached? Negative: it does not exist. */
int kvp_lane_fence_reached(struct kvp_lane *lane, const struct kvp_order_chunk *chunk);

/* lane_orders.c: handles one order, which is the lane's. */
void kvp_lane_handle(struct kvp_lane *lane, struct kvp_order *order);

/* ---- link.c: endpoints and messages ---------------------------------------------------------- */

extern const struct kvp_net_events kvp_lane_events;

void kvp_link_add(struct kvp_lane *lane, struct kvp_order_ep *order);
void kvp_link_end(struct kvp_lane *lane, uint64_t id);
struct kvp_link *kvp_link_find(struct kvp_lane *lane, uint64_t id);
/* Sends a message without payload: 0, or -EAGAIN (also when the link is not open). */
int kvp_link_send(struct kvp_link *link, const void *msg, size_t bytes);
/* The transport refused: nothing goes out on this link until it has progressed, or ever. */
void kvp_link_refused(struct kvp_link *link, int status);
/* Sends RETURNs that are due, closes what is broken; returns how much was done. */
uint32_t kvp_link_tend(struct kvp_link *link);
/* Tells the peer that what the leg has wanted or been granted will not be used. */
void kvp_link_return(struct kvp_link *link, uint64_t generation, uint32_t sender);
void kvp_share_put(struct kvp_lane *lane, struct kvp_share *share);

/* Has it pieces with a grant? */
static inline bool kvp_link_to_send(const struct kvp_link *link)
{
	return !TAILQ_EMPTY(&link->granted) || !TAILQ_EMPTY(&link->packed);
}

static inline bool kvp_link_open(const struct kvp_link *link)
{
	return link && link->state == KVP_LINK_OPEN && !link->full;
}

/* ---- rx*.c: receiver ------------------------------------------------------------------------- */

void kvp_rx_add(struct kvp_lane *lane, struct kvp_order_rx *order);
void kvp_rx_leg_add(struct kvp_lane *lane, struct kvp_order_rx_leg *order);
void kvp_rx_end(struct kvp_lane *lane, uint64_t generation);
/* The link of the leg is gone. */
void kvp_rx_leg_unlink(struct kvp_rx_leg *leg);
void kvp_rx_dirty(struct kvp_rx *rx);
void kvp_rx_settle(struct kvp_rx *rx);
/* Fails the rx, once, and drops what it waits for. */
void kvp_rx_fail(struct kvp_rx *rx, Kvp__Status status, const char *fmt, ...) KVP_PRINTF(3, 4);

/* Tests a want against the leg and takes it into account: 0 and the piece's index-free description
 * in `piece` (leg, kind, range, bytes, set), or -EPROTO and the rx has failed. rx_want.c */
int kvp_rx_accept(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
		  struct kvp_rx_piece *piece);
void kvp_rx_want(struct kvp_lane *lane, const struct kvp_wire_want *want);
void kvp_rx_return(struct kvp_lane *lane, const struct kvp_wire_return *msg);
/* After the orders: messages that came before the order that they need. */
uint32_t kvp_rx_late(struct kvp_lane *lane);
/* The leg of a sender on this lane whose room is live, or NULL. rx.c */
struct kvp_rx_leg *kvp_rx_local_leg(struct kvp_lane *lane, uint64_t generation, uint32_t sender);
/* A sender on this lane: tests the want and fills `piece` with what is to be moved; the leg is in
 * it. 0; -ESTALE: there is no such destination now; -EPROTO: it has failed, its text says why.
 * rx_local.c */
int kvp_rx_local_accept(struct kvp_lane *lane, uint32_t piece_tokens,
			const struct kvp_wire_want *want, struct kvp_rx_piece *piece);
/* The accepted piece is in the pool. */
void kvp_rx_local_landed(struct kvp_rx_piece *piece);

/* ---- lane_sums.c: what was moved, compared -------------------------------------------------- */

/* Bytes of a piece as they travel: with its sums, if the leg has them and it any bytes. */
static inline uint64_t kvp_lane_payload(const struct kvp_lane_geom *leg, uint64_t bytes)
{
	return leg->sums && bytes ? kvp_sums_end(bytes, leg->geom.n_pairs) : bytes;
}
/* Writes the sums of the piece's source behind the place of its bytes. */
void kvp_tx_sums(const struct kvp_tx_piece *piece, uint8_t *tail);
/* The piece is in the pool, and came with its sums behind `from`: do they say the same? False: the
 * rx has failed and has dropped the piece. */
bool kvp_rx_sums_right(struct kvp_rx_piece *piece, const uint8_t *from);
/* The same of a piece that went from pool to pool; false: both ends have failed. */
bool kvp_local_right(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
		     const struct kvp_copy_piece *src, const struct kvp_copy_piece *dst);
bool kvp_local_right_bytes(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
			   const uint8_t *from);

/* A byte changes, in test builds. */
static inline void kvp_lane_flip(const struct kvp_lane *lane, enum kvp_hold point, uint8_t *at)
{
	if (kvp_lane_held(lane, point) && !lane->config.gpu)
		*at ^= 0x10;
}

/* rx_land.c */
void *kvp_rx_message(struct kvp_lane *lane, const struct kvp_wire_data *data, size_t bytes);
void kvp_rx_data(struct kvp_lane *lane, const struct kvp_wire_data *msg, const void *data,
		 size_t bytes);
void kvp_rx_lost(struct kvp_lane *lane, const struct kvp_wire_data *msg);
void kvp_rx_piece_lost(struct kvp_lane *lane, struct kvp_rx_piece *piece);
/* The transport is done with one message of an orphan. */
void kvp_rx_orphan_done(struct kvp_lane *lane, struct kvp_rx_piece *piece);
/* Puts bytes that came into the piece's slot, if they do not lie there. False: the rx has failed.
 */
bool kvp_rx_keep(struct kvp_rx_piece *piece, uint64_t offset, const void *data, size_t bytes);
/* A WANT with its payload: where the payload goes, and then that it is there, or never will be.
 * NULL: it is an ordinary WANT. rx_eager.c */
void *kvp_rx_eager(struct kvp_lane *lane, const struct kvp_wire_want *want, size_t bytes);
void kvp_rx_eager_data(struct kvp_lane *lane, const void *data, size_t bytes);
void kvp_rx_eager_lost(struct kvp_lane *lane, const void *place);
/* The piece at the head of the leg's queue lands in this slot. */
void kvp_rx_piece_grant(struct kvp_rx_leg *leg, struct kvp_slot *slot, uint64_t token);
/* All bytes of the piece are here; they may lie in the transport's memory. */
void kvp_rx_here(struct kvp_lane *lane, struct kvp_rx_piece *piece, const void *from);
/* The newest piece of a live leg; NULL: there is none. */
struct kvp_rx_piece *kvp_rx_newest(struct kvp_lane *lane, const struct kvp_wire_want *want);
/* The piece's bytes are in the pool. */
void kvp_rx_landed(struct kvp_rx_piece *piece);
/* Counts a landed piece into the leg's positions; pieces come in order. */
void kvp_rx_pass(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece);
/* All that the leg wanted has landed: is it over? */
void kvp_rx_check_finished(struct kvp_rx_leg *leg);
/* Counts bytes of a segment or the meta that have landed. */
void kvp_rx_blob_landed(struct kvp_rx *rx, const struct kvp_rx_piece *piece);
/* Moves a piece into the pool, or the meta to its place: as the calls of a mover. */
int kvp_rx_scatter(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, const uint8_t *from,
		   uint64_t *ticket);
struct kvp_rx_piece *kvp_rx_piece_take(struct kvp_lane *lane);
void kvp_rx_piece_put(struct kvp_lane *lane, struct kvp_rx_piece *piece);
/* Gives the landing slot back, if the piece has one. */
void kvp_rx_slot_put(struct kvp_lane *lane, struct kvp_rx_piece *piece);
/* Slots that the peer may have written into until now are safe: those of one sender of a
 * generation, or (generation 0) all of the link. */
void kvp_rx_safe(struct kvp_link *link, uint64_t generation, uint32_t sender);
/* The leg has no want in its queue any more. */
void kvp_rx_share_forget(struct kvp_rx_leg *leg);
/* Steps of the turn; each returns how much was done. */
uint32_t kvp_rx_scatters(struct kvp_lane *lane);
uint32_t kvp_rx_answers(struct kvp_link *link);
uint32_t kvp_rx_grants(struct kvp_lane *lane);

/* ---- rx_direct.c: pools that senders write into ---------------------------------------------- */

/* Does this lane's transport write into pools, and may it? */
static inline bool kvp_lane_direct(const struct kvp_lane *lane)
{
	return lane->net && lane->config.net->write && lane->config.mode != KVP_DATA_LANDING;
}
/* An rx uses the pool: its memory is to be known to the transport. */
void kvp_direct_pool_want(struct kvp_lane *lane, struct kvp_lane_pool *pool);
/* No window into the pool is left. */
void kvp_direct_pool_free(struct kvp_lane *lane, struct kvp_lane_pool *pool);
/* Registers one region of those that are wanted: how many. rx_register.c, like the two above */
uint32_t kvp_direct_register(struct kvp_lane *lane);
/* Has the GPU to be told to look at what a NIC wrote into its pools? */
bool kvp_direct_flushes(const struct kvp_lane *lane);
/* Steps of the turn: registers, closes windows. */
uint32_t kvp_direct_turn(struct kvp_lane *lane);
/* Grants the piece at the head of the leg's queue: 1 granted, 0 it has to land, -EAGAIN not now. */
int kvp_rx_direct(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece);
/* Sends the RUNS of the piece that was granted last. */
uint32_t kvp_rx_tell(struct kvp_link *link);
void kvp_rx_written(struct kvp_lane *lane, const struct kvp_wire_written *msg);
/* The sender is done with a direct piece, or cannot write any more. */
void kvp_rx_direct_over(struct kvp_link *link, struct kvp_rx_piece *piece);
/* A piece that was AT_RISK is not any more. rx.c */
void kvp_rx_risk_over(struct kvp_lane *lane, struct kvp_rx_piece *piece);
/* The rx has ended: false if nobody can write for it; else it is lane->returning's until then. */
bool kvp_rx_take_back(struct kvp_rx *rx);
/* Quiet now, or when the GPU has passed. rx.c */
void kvp_rx_depart(struct kvp_rx *rx);
/* Where the rows of a piece belong in the pool, and in a slot; laid out in the lane's parts, which
 * the next piece uses again. rx_land.c */
struct kvp_copy_piece kvp_rx_rows(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *rows);

/* Where a segment lies in the pool. rx_land.c */
uint8_t *kvp_rx_segment_place(const struct kvp_rx *rx, uint32_t idx);

/* ---- tx*.c: sender --------------------------------------------------------------------------- */

void kvp_tx_add(struct kvp_lane *lane, struct kvp_order_tx *order);
/* Tokens of a local piece: all its source rows together fit a cache. */
uint32_t kvp_tx_local_tokens(struct kvp_tx *tx);
void kvp_tx_leg_add(struct kvp_lane *lane, struct kvp_order_tx_leg *order);
void kvp_tx_start(struct kvp_lane *lane, uint64_t id);
void kvp_tx_chunk(struct kvp_lane *lane, struct kvp_order_chunk *order);
void kvp_tx_recall(struct kvp_lane *lane, uint64_t id, uint32_t seq);
void kvp_tx_end(struct kvp_lane *lane, uint64_t id);
void kvp_tx_leg_unlink(struct kvp_tx_leg *leg);
void kvp_tx_dirty(struct kvp_tx *tx);
void kvp_tx_settle(struct kvp_tx *tx);
void kvp_tx_fail(struct kvp_tx *tx, Kvp__Status status, const char *fmt, ...) KVP_PRINTF(3, 4);
/* The leg may have a piece to want now. */
void kvp_tx_kick(struct kvp_tx_leg *leg);
void kvp_tx_kick_all(struct kvp_tx *tx);
/* The leg's next piece after this one. */
void kvp_tx_leg_advance(struct kvp_tx_leg *leg);
/* How many pieces the chunk takes for the leg, at least 1. tx_piece.c */
uint64_t kvp_tx_pieces(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk);
/* Describes the leg's next piece; *segment is its index in the chunk's list. */
void kvp_tx_describe(const struct kvp_tx_leg *leg, struct kvp_wire_want *want, uint32_t *segment);
/* The pieces themselves. */
struct kvp_tx_piece *kvp_tx_piece_take(struct kvp_lane *lane);
void kvp_tx_piece_put(struct kvp_lane *lane, struct kvp_tx_piece *piece);
struct kvp_tx_piece *kvp_tx_piece_find(struct kvp_lane *lane, uint64_t cookie);
/* What the receiver names the piece by. */
uint64_t kvp_tx_piece_cookie(const struct kvp_lane *lane, const struct kvp_tx_piece *piece);
/* Fills the sides of the groups that the leg uses with the chunk's page lists. */
void kvp_tx_sides(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk,
		  struct kvp_side *sides);
/* Where a segment of a chunk, or its meta, lies. */
const uint8_t *kvp_tx_blob(const struct kvp_tx *tx, const struct kvp_order_chunk *chunk,
			   uint8_t kind, uint32_t segment);
/* The piece's source: all of it is packed, or the transport is done with it. */
void kvp_tx_gathered(struct kvp_tx_piece *piece);
/* Copies the piece into a slot, for all legs that can use the same, and with it pieces of other
 * legs that need other rows of the same pages. Bytes packed; 0: no slot now. */
uint64_t kvp_tx_pack(struct kvp_tx_piece *piece);
/* The piece has a slot, and waits for its grant; it has its grant, or goes. */
void kvp_tx_is_ahead(struct kvp_tx_piece *piece);
void kvp_tx_not_ahead(struct kvp_tx_piece *piece);
void kvp_tx_slot_put(struct kvp_tx_piece *piece);
void kvp_tx_grant(struct kvp_lane *lane, const struct kvp_wire_grant *msg);
void kvp_tx_landed(struct kvp_lane *lane, const struct kvp_wire_landed *msg);
void kvp_tx_refuse(struct kvp_lane *lane, const struct kvp_wire_refuse *msg);
void kvp_tx_sent(struct kvp_lane *lane, struct kvp_tx_piece *piece, int status);
/* Frees what of the leg's pieces the transport does not hold. */
void kvp_tx_leg_drop(struct kvp_tx_leg *leg);
/* Packs the piece and sends it with its want: true if the transport has taken both. tx_eager.c */
bool kvp_tx_eager(struct kvp_tx_piece *piece, const struct kvp_wire_want *want);
/* The receiver has landed what came with the want. */
void kvp_tx_eager_landed(struct kvp_tx_piece *piece);
uint32_t kvp_tx_sends(struct kvp_link *link);
uint32_t kvp_tx_wants(struct kvp_link *link);
uint32_t kvp_tx_ahead(struct kvp_link *link);
uint32_t kvp_tx_local(struct kvp_lane *lane);
/* A leg (of either end, the other NULL) is over: its moves go on without it. tx_local_gpu.c */
void kvp_local_forget(struct kvp_lane *lane, const struct kvp_tx_leg *tx,
		      const struct kvp_rx_leg *rx);
/* The destination has accepted the leg's next piece: moves it on the GPU. */
void kvp_local_begin(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece, uint32_t segment);
/* Launches what could not be launched before: true if nothing is left. */
bool kvp_local_place(struct kvp_lane *lane);
/* Moves that are over: how many. */
uint32_t kvp_local_moved(struct kvp_lane *lane);
/* Both ends count a piece that is at its destination. tx_local.c */
void kvp_local_landed(struct kvp_tx_leg *leg, struct kvp_chunk *chunk, struct kvp_rx_piece *piece);

/* ---- lane_gpu.c: what only a lane with a GPU has -------------------------------------------- */

/* On the lane's thread: opens the GPU. `err` says why not. */
int kvp_lane_gpu_open(struct kvp_lane *lane, char *err, size_t err_bytes);
void kvp_lane_gpu_close(struct kvp_lane *lane);
/* What the GPU has finished, and rooms that a failure of it ends: how much was done. */
uint32_t kvp_lane_moved(struct kvp_lane *lane);
/* Maps the memories of a pool: 0, or negative errno with a text. */
int kvp_lane_pool_import(struct kvp_lane *lane, struct kvp_lane_pool *pool, char *err,
			 size_t err_bytes);
void kvp_lane_pool_unmap(struct kvp_lane *lane, struct kvp_lane_pool *pool);
/* An end that the GPU refused to move for: what its room is told. */
void kvp_tx_move_failed(struct kvp_tx *tx, int err);
void kvp_rx_move_failed(struct kvp_rx *rx, int err);
/* Ends of rooms whose last launches are over leave for good. */
void kvp_tx_leave(struct kvp_tx *tx);
void kvp_rx_leave(struct kvp_rx *rx);

static inline bool kvp_lane_on_gpu(const struct kvp_lane *lane)
{
	return lane->config.gpu != NULL;
}

/* ---- lane_rings.c: memory of the rings of a lane with a GPU --------------------------------- */

/* Once the transport is open: makes the rings, smaller ones when there is no more memory. */
int kvp_lane_rings_make(struct kvp_lane *lane, char *err, size_t err_bytes);
/* The transport is closed, and nothing runs on the GPU. */
void kvp_lane_rings_free(struct kvp_lane *lane);
/* Makes the rings known to a transport that writes into its peer's memory. */
int kvp_lane_rings_tell(struct kvp_lane *lane, char *err, size_t err_bytes);

/* Where a piece of that kind lies in its slot: engines' bytes are read by the processor. */
static inline uint8_t *kvp_slot_place(const struct kvp_slot *slot, uint8_t kind)
{
	return slot->twin && kind == KVP_WIRE_META ? slot->twin : slot->data;
}
uint32_t kvp_tx_fences(struct kvp_lane *lane);
/* Sends a granted piece from where it lies, row by row: true when all of it is the transport's. */
bool kvp_tx_raw(struct kvp_tx_piece *piece);
/* Gives the transport a part of a granted piece: false when it takes nothing now. */
bool kvp_tx_give(struct kvp_tx_piece *piece, const uint8_t *from, uint64_t offset, uint64_t bytes);

/* ---- tx_direct.c: writes into the pool of the destination ----------------------------------- */

bool kvp_tx_can_direct(const struct kvp_tx_leg *leg);
void kvp_tx_window(struct kvp_lane *lane, const struct kvp_wire_window *msg);
void kvp_tx_runs(struct kvp_lane *lane, const struct kvp_wire_runs *msg);
/* A direct grant, else as kvp_tx_grant(): false if it makes no sense. */
bool kvp_tx_direct_granted(struct kvp_tx_piece *piece, const struct kvp_wire_grant *msg);
/* Writes a packed piece: 1 when all of it is the transport's, 0 when its runs are not here, -1 when
 * nothing more goes now. */
int kvp_tx_direct(struct kvp_tx_piece *piece);
/* Gives the places for runs back. */
void kvp_tx_runs_put(struct kvp_link *link, struct kvp_tx_piece *piece);
