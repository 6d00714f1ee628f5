/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What lanes say to each other over the data transport: binary, little-endian, one struct a
 * message.
 *
 *   sender                                     receiver
 *   WANT   a piece, checked here in full  -->  queued, or REFUSE and the room fails
 *          <-- GRANT a slot and its token
 *   DATA   naming only the token          -->  into the slot, scattered from there
 *          <-- LANDED
 *   RETURN what is wanted or granted and will not be used: sent when a leg ends early
 *
 * Direct mode, over transports that write into the peer's memory:
 *
 *          <-- WINDOW where the leg may write, once for each part of the pool that it comes to
 *          <-- GRANT without a slot, RUNS the bytes of the piece, in the order of the layout
 *   (a write for each run) WRITTEN        -->  counted
 *          <-- LANDED
 *
 * A piece without bytes is confirmed at once. The first piece of an idle leg may come with its
 * WANT, if it is small: a receiver that has a slot for it lands it without a grant, another ignores
 * the payload and grants as ever. The receiver knows the piece's range from its own geometry: a
 * sender names no row, page or address, and the receiver names places of its pool only when it
 * grants them.
 */

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_WIRE_MAGIC 0x3150564bu /* "KVP1" */
#define KVP_WIRE_MASK_WORDS 8u

/* Windows that both ends keep: wants of one endpoint without a grant, and pieces of one leg from
 * the oldest that has not landed to the newest that is wanted. */
#define KVP_WIRE_EP_WANTS 64u
#define KVP_WIRE_LEG_WINDOW 16u

/* Direct mode. Windows of a leg; runs of a piece, and the bytes of one; and RUNS messages of one
 * endpoint whose pieces have not landed. */
#define KVP_WIRE_LEG_WINDOWS 256u
#define KVP_WIRE_PIECE_RUNS 2048u
#define KVP_WIRE_RUN_BYTES (8u << 20)
#define KVP_WIRE_EP_RUNS 512u

/* Largest payload of a WANT. */
#define KVP_WIRE_EAGER_BYTES (512u << 10)

enum kvp_wire_type {
	KVP_WIRE_WANT = 1,
	KVP_WIRE_GRANT = 2,
	KVP_WIRE_DATA = 3,
	KVP_WIRE_LANDED = 4,
	KVP_WIRE_RETURN = 5,
	KVP_WIRE_REFUSE = 6,
	KVP_WIRE_WINDOW = 7,
	KVP_WIRE_RUNS = 8,
	KVP_WIRE_WRITTEN = 9,
};

enum kvp_wire_kind {
	KVP_WIRE_ROWS = 1,    /* piece i of the chunk: tokens from start + i * piece_tokens */
	KVP_WIRE_SEGMENT = 2, /* bytes [offset, offset + bytes) of a segment */
	KVP_WIRE_META = 3,    /* bytes [offset, offset + bytes) of the meta */
	KVP_WIRE_EMPTY = 4,   /* the only piece of a chunk that has nothing for this destination */
};

enum kvp_wire_mode {
	KVP_WIRE_LANDING = 1, /* DATA into a landing slot */
	KVP_WIRE_DIRECT = 2,  /* writes into the pool */
};

struct kvp_wire_head {
	uint32_t magic;
	uint8_t type; /* enum kvp_wire_type */
	uint8_t zero[3];
};

/* Fields of the chunk (seq .. entry_set) are the same in all wants of a chunk. */
struct kvp_wire_want {
	struct kvp_wire_head head;
	uint64_t generation;
	uint64_t cookie; /* comes back in GRANT, LANDED, REFUSE */
	uint32_t sender;
	uint32_t seq;
	uint64_t start, tokens;
	uint64_t entry_set[KVP_WIRE_MASK_WORDS]; /* by source entry; only those that take part */
	uint32_t pieces;                         /* of the chunk, at least 1 */
	uint32_t piece;                          /* index below `pieces` */
	uint8_t last;                            /* 1: the sender's last chunk */
	uint8_t kind;                            /* enum kvp_wire_kind */
	uint8_t direct;                          /* 1: the sender can write directly */
	uint8_t zero;
	uint32_t segment; /* id; 0 unless SEGMENT */
	uint64_t offset;  /* SEGMENT, META: where the piece begins; else 0 */
	uint64_t total;   /* SEGMENT, META: of the whole; else 0 */
	uint64_t bytes;   /* of the piece as it lies in a slot */
};

struct kvp_wire_grant {
	struct kvp_wire_head head;
	uint64_t cookie;
	uint64_t token; /* random, never 0 */
	uint64_t slot_bytes;
	uint32_t slot;
	uint32_t mode;   /* enum kvp_wire_mode */
	uint8_t key[32]; /* how the transport reaches the slot, if it needs to know */
	/* LANDING: the message ends here, as daemons that know no direct mode have it. */
	uint32_t n_runs; /* DIRECT: that follow; `slot` then only names the piece in WRITTEN */
	uint32_t zero;
};

#define KVP_WIRE_GRANT_LANDING_BYTES offsetof(struct kvp_wire_grant, n_runs)

/* The payload follows: the whole piece, or one row of one entry at its place in the piece; rows
 * come in the order of the layout. */
struct kvp_wire_data {
	struct kvp_wire_head head;
	uint64_t token;
	uint64_t offset;
	uint64_t total; /* bytes of the piece */
	uint32_t slot;
	uint32_t zero;
};

struct kvp_wire_landed {
	struct kvp_wire_head head;
	uint64_t cookie;
};

/* Everything that the leg has wanted or been granted and not begun to send. */
struct kvp_wire_return {
	struct kvp_wire_head head;
	uint64_t generation;
	uint32_t sender;
	uint32_t zero;
};

struct kvp_wire_refuse {
	struct kvp_wire_head head;
	uint64_t cookie;
	uint32_t status; /* Status of kvpack.proto */
	uint32_t zero;
};

/* A part of the destination pool that the leg of the piece may write into until it is over. */
struct kvp_wire_window {
	struct kvp_wire_head head;
	uint64_t cookie; /* of a piece of the leg that has no grant yet */
	uint64_t bytes;
	uint32_t idx; /* 0, 1, ... in the order in which the leg is told */
	uint32_t zero;
	uint8_t key[32];
};

struct kvp_wire_run {
	uint32_t offset;     /* in the window */
	uint32_t bytes : 24; /* at least 1, at most KVP_WIRE_RUN_BYTES */
	uint32_t window : 8;
};

#define KVP_WIRE_RUNS_MAX 28u

/* The next runs of a piece with a direct grant. Together they take the rows of the piece, part
 * after part, no run across two parts; or the bytes of a segment. */
struct kvp_wire_runs {
	struct kvp_wire_head head;
	uint64_t cookie;
	uint32_t first; /* index of runs[0] among the runs of the piece */
	uint32_t n;
	uint64_t zero;
	struct kvp_wire_run runs[KVP_WIRE_RUNS_MAX];
};

/* Behind the writes of the next `n` runs of a piece, on the same connection. */
struct kvp_wire_written {
	struct kvp_wire_head head;
	uint64_t token;
	uint32_t slot;     /* as the grant has it */
	uint32_t first, n; /* runs */
	uint32_t zero;
};

/* Memory is copied to the wire as it is. */
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");
static_assert(sizeof(struct kvp_wire_head) == 8, "layout");
static_assert(sizeof(struct kvp_wire_want) == 152, "layout");
static_assert(offsetof(struct kvp_wire_want, start) == 32, "layout");
static_assert(offsetof(struct kvp_wire_want, pieces) == 112, "layout");
static_assert(offsetof(struct kvp_wire_want, segment) == 124, "layout");
static_assert(offsetof(struct kvp_wire_want, bytes) == 144, "layout");
static_assert(sizeof(struct kvp_wire_grant) == 80, "layout");
static_assert(KVP_WIRE_GRANT_LANDING_BYTES == 72, "layout");
static_assert(sizeof(struct kvp_wire_data) == 40, "layout");
static_assert(sizeof(struct kvp_wire_landed) == 16, "layout");
static_assert(sizeof(struct kvp_wire_return) == 24, "layout");
static_assert(sizeof(struct kvp_wire_refuse) == 24, "layout");
static_assert(sizeof(struct kvp_wire_window) == 64, "layout");
static_assert(sizeof(struct kvp_wire_run) == 8, "layout");
static_assert(sizeof(struct kvp_wire_runs) == 256, "layout");
static_assert(sizeof(struct kvp_wire_written) == 32, "layout");

/* Space for any of them. */
union kvp_wire_msg {
	struct kvp_wire_head head;
	struct kvp_wire_want want;
	struct kvp_wire_grant grant;
	struct kvp_wire_data data;
	struct kvp_wire_landed landed;
	struct kvp_wire_return ret;
	struct kvp_wire_refuse refuse;
	struct kvp_wire_window window;
	struct kvp_wire_runs runs;
	struct kvp_wire_written written;
};

static inline struct kvp_wire_head kvp_wire_head(enum kvp_wire_type type)
{
	return (struct kvp_wire_head){ .magic = KVP_WIRE_MAGIC, .type = (uint8_t)type };
}
