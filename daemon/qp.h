/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One reliable-connected queue pair: posting and reaping. One thread, no allocation and no logging
 * on the path.
 *
 * A running sequence number is the credit, the wr_id and the order at once: work requests of a
 * reliable connection end in the order in which they were posted, so the completion of one says
 * that all before it are over, and only the last of a batch asks for one. What was added since the
 * last kvp_qp_ring() is a batch: one linked list, one doorbell.
 *
 * Each request with a `user` is told of exactly once: by a completion, by the flush after a
 * failure, or by kvp_qp_abandon() when the queue pair has been destroyed. Only then is its memory
 * the caller's again.
 */

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#define KVP_QP_BATCH_MAX 32u
#define KVP_QP_SGE_MAX 2u

/* wr_id: the owner's tag above, a bit that tells receives, and the sequence or buffer number. */
#define KVP_QP_SEQ_BITS 40u
#define KVP_QP_SEQ_MASK ((UINT64_C(1) << KVP_QP_SEQ_BITS) - 1)
#define KVP_QP_RECV_BIT (UINT64_C(1) << KVP_QP_SEQ_BITS)
#define KVP_QP_TAG_SHIFT (KVP_QP_SEQ_BITS + 1)
#define KVP_QP_TAG_MAX ((UINT32_C(1) << (64 - KVP_QP_TAG_SHIFT)) - 1)

enum kvp_qp_state {
	KVP_QP_OPEN,
	KVP_QP_FAILED,  /* nothing is added; until every posted request has been flushed */
	KVP_QP_DRAINED, /* the queue holds nothing any more; until it is destroyed */
};

/* Told of a request with a user: 0 or the negative errno of kvp_qp_errno(). Must not add. */
typedef void kvp_qp_done_fn(void *arg, void *user, int status);

/* One request. `remote` and `rkey` are of writes, `imm` of the opcodes that carry one. */
struct kvp_qp_request {
	enum ibv_wr_opcode opcode;
	unsigned n_sge;
	struct ibv_sge sge[KVP_QP_SGE_MAX];
	uint64_t remote;
	uint32_t rkey;
	uint32_t imm;
	unsigned flags; /* IBV_SEND_INLINE: the caller keeps to the limit of the queue pair */
	void *user;     /* NULL: nobody wants to know */
};

struct kvp_qp {
	struct ibv_qp *qp;  /* borrowed, with room for depth + 1 send requests */
	unsigned depth;     /* requests that may be posted and not over */
	uint64_t tag;       /* in place, as it goes into a wr_id */
	uint64_t posted;    /* sequence of the newest request given to the device */
	uint64_t completed; /* all up to this one are over */
	enum kvp_qp_state state;
	bool all_signaled;         /* by its owner, who adds nothing here: it needs no marker */
	int status;                /* why it failed */
	enum ibv_wc_status reason; /* the device's word for it; SUCCESS: it was ours */
	void **users;              /* owned ring [depth + 1], by sequence */
	unsigned n_batch;
	struct ibv_send_wr batch[KVP_QP_BATCH_MAX];
	struct ibv_sge sge[KVP_QP_BATCH_MAX][KVP_QP_SGE_MAX];
	uint64_t doorbells, signaled, writes; /* counted for displays */
};

/* `depth` is at least 1, `tag` at most KVP_QP_TAG_MAX. 0 or -ENOMEM. */
int kvp_qp_init(struct kvp_qp *qp, struct ibv_qp *ibv, unsigned depth, uint32_t tag);
/* The ibv_qp is the caller's to destroy. Fine on zeroes. */
void kvp_qp_fini(struct kvp_qp *qp);

/* How many requests may be added now without -EAGAIN. */
unsigned kvp_qp_room(const struct kvp_qp *qp);

/*
 * Adds a request to the batch; a full batch is posted first.
 * 0; -EAGAIN: no room until a completion; other: the queue pair is lost, the request was not taken.
 */
int kvp_qp_add(struct kvp_qp *qp, const struct kvp_qp_request *request);

/* Posts the batch, if any. On an error the queue pair is lost and has begun to drain: users of the
 * batch are told by then like all others. */
int kvp_qp_ring(struct kvp_qp *qp);

/*
 * Handles one completion of a send request of this queue pair (tag and receive bit are looked at by
 * the caller). The first one that is not a success loses the queue pair.
 * Returns whether it was of a request that is alive: false for anything stale.
 */
bool kvp_qp_complete(struct kvp_qp *qp, const struct ibv_wc *wc, kvp_qp_done_fn *done, void *arg);

/*
 * Gives the queue pair up: it goes to the error state, and a last request is posted whose flush
 * proves that all before it are over. Nothing happens if it has failed already.
 */
void kvp_qp_fail(struct kvp_qp *qp, int status);

/* The ibv_qp has been destroyed, so nothing of it runs: tells all that is left. */
void kvp_qp_abandon(struct kvp_qp *qp, kvp_qp_done_fn *done, void *arg);

/* Maps a completion status; the one place that does. */
int kvp_qp_errno(enum ibv_wc_status status);

/*
 * The receive side: equal buffers in one registered block, posted again by number. Requests are
 * collected and posted with one doorbell, like sends.
 */
struct kvp_rq {
	struct ibv_qp *qp; /* borrowed, with room for n receives */
	uint64_t tag;      /* in place, with the receive bit */
	uint64_t base;     /* address of buffer 0 */
	uint32_t lkey;
	uint32_t buffer_bytes;
	unsigned n_batch;
	struct ibv_recv_wr batch[KVP_QP_BATCH_MAX];
	struct ibv_sge sge[KVP_QP_BATCH_MAX];
	uint64_t posted; /* counted for displays */
};

void kvp_rq_init(struct kvp_rq *rq, struct ibv_qp *ibv, uint32_t tag, const struct ibv_mr *mr,
		 void *base, uint32_t buffer_bytes);
/* Buffer `idx` may be received into again. 0 or negative errno: the queue pair is lost. */
int kvp_rq_give(struct kvp_rq *rq, uint32_t idx);
int kvp_rq_ring(struct kvp_rq *rq);

static inline uint32_t kvp_qp_wr_tag(uint64_t wr_id)
{
	return (uint32_t)(wr_id >> KVP_QP_TAG_SHIFT);
}

static inline bool kvp_qp_wr_is_recv(uint64_t wr_id)
{
	return wr_id & KVP_QP_RECV_BIT;
}
