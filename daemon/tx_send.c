/* SPDX-License-Identifier: Apache-2.0 */

/* Wants, grants, sends, and what comes back. */

#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

/* Pieces packed ahead for a link in one turn: enough that the first grants find their bytes ready,
 * few enough that these are still in the cache when they are sent. */
#define AHEAD_PER_TURN 2u

/* ---- wants ----------------------------------------------------------------------------------- */

static bool leg_ready(const struct kvp_tx_leg *leg)
{
	const struct kvp_tx *tx = leg->tx;

	return tx->started && !tx->failed && !tx->ended && !leg->dropped && leg->chunk &&
	       leg->chunk->fenced &&
	       (leg->local || (leg->link && leg->link->state == KVP_LINK_OPEN &&
			       leg->n_order < KVP_WIRE_LEG_WINDOW));
}

void kvp_tx_kick(struct kvp_tx_leg *leg)
{
	struct kvp_tx *tx = leg->tx;

	if (!leg_ready(leg))
		return;

	if (leg->local) {
		if (!tx->local_queued)
			TAILQ_INSERT_TAIL(&tx->lane->local, tx, local_link);
		tx->local_queued = true;
	} else {
		if (!leg->ready)
			TAILQ_INSERT_TAIL(&leg->link->ready, leg, ready_link);
		leg->ready = true;
	}
}

void kvp_tx_kick_all(struct kvp_tx *tx)
{
	struct kvp_tx_leg *leg;

	TAILQ_FOREACH (leg, &tx->legs, tx_link)
		kvp_tx_kick(leg);
}

static void piece_init(struct kvp_tx_piece *piece, struct kvp_tx_leg *leg,
		       const struct kvp_wire_want *want)
{
	uint64_t skip = (uint64_t)want->piece * leg->order->leg.piece_tokens;

	piece->leg = leg;
	piece->chunk = leg->chunk;
	piece->seq = leg->chunk->order->seq;
	piece->idx = want->piece;
	piece->kind = want->kind;
	piece->bytes = want->bytes;
	piece->payload = kvp_lane_payload(&leg->order->leg, want->bytes);
	piece->total = want->total;
	piece->start = want->offset;
	piece->since_ns = leg->tx->lane->now_ns;
	if (want->kind == KVP_WIRE_ROWS) {
		piece->start = want->start + skip;
		piece->tokens = (uint32_t)KVP_MIN(want->tokens - skip,
						  (uint64_t)leg->order->leg.piece_tokens);
	}
}

/* Wants the leg's next piece; false when that cannot be now. */
static bool leg_want(struct kvp_tx_leg *leg)
{
	struct kvp_tx *tx = leg->tx;
	struct kvp_lane *lane = tx->lane;
	struct kvp_tx_piece *piece = kvp_tx_piece_take(lane);
	struct kvp_wire_want want;

	if (!piece)
		return false;

	kvp_tx_describe(leg, &want, &piece->segment);
	piece_init(piece, leg, &want);
	want.cookie = kvp_tx_piece_cookie(lane, piece);
	if (!kvp_tx_eager(piece, &want) && kvp_link_send(leg->link, &want, sizeof(want)) < 0) {
		kvp_tx_piece_put(lane, piece);
		return false;
	}

	TAILQ_INSERT_TAIL(&leg->order_list, piece, order);
	leg->n_order++;
	leg->link->wants_out++;
	tx->n_wanted++;
	if (piece->bytes == 0)
		kvp_tx_gathered(piece);
	else if (!piece->eager)
		TAILQ_INSERT_TAIL(&leg->link->wanted, piece, queue);
	kvp_board_once(&tx->order->board->first_want_ns, lane->now_ns);
	kvp_tx_leg_advance(leg);
	kvp_tx_dirty(tx);
	return true;
}

/* Legs in turns, so that those that pack alike want the same piece at about the same time. */
uint32_t kvp_tx_wants(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	uint32_t most = KVP_MIN(lane->config.wants_per_session, KVP_WIRE_EP_WANTS);
	struct kvp_tx_leg *leg;
	uint32_t n = 0;

	if (kvp_lane_held(lane, KVP_HOLD_WANT))
		return 0;

	while (n < KVP_LANE_TURN_WANTS && link->wants_out < KVP_MAX(most, 1u) &&
	       (leg = TAILQ_FIRST(&link->ready))) {
		if (leg_ready(leg)) {
			if (!kvp_link_open(link) || !leg_want(leg))
				break;
			n++;
		}
		TAILQ_REMOVE(&link->ready, leg, ready_link);
		leg->ready = false;
		kvp_tx_kick(leg);
	}
	return n;
}

/* ---- sends ----------------------------------------------------------------------------------- */

bool kvp_tx_give(struct kvp_tx_piece *piece, const uint8_t *from, uint64_t offset, uint64_t bytes)
{
	struct kvp_link *link = piece->leg->link;
	struct kvp_lane *lane = link->lane;
	const struct kvp_wire_data msg = {
		.head = kvp_wire_head(KVP_WIRE_DATA),
		.token = piece->token,
		.offset = offset,
		.total = piece->payload,
		.slot = piece->remote_slot,
	};
	const struct kvp_net_put put = {
		.hdr = &msg,
		.hdr_bytes = sizeof(msg),
		.payload = from,
		.bytes = bytes,
		.key = &piece->remote_key,
		.offset = offset,
		.whole = offset == 0 && bytes == piece->payload,
		.req = piece,
	};
	int r;

	if (!kvp_link_open(link))
		return false;

	if (lane->config.net->put)
		r = lane->config.net->put(lane->net, link->net_ep, &put);
	else
		r = lane->config.net->send(lane->net, link->net_ep, &msg, sizeof(msg), from, bytes,
					   piece);
	if (r < 0) {
		kvp_link_refused(link, r);
		return false;
	}
	piece->sends++;
	link->sending++;
	if (piece->slot)
		link->in_flight += bytes;
	lane->counts.bytes_sent += bytes;
	kvp_board_once(&piece->leg->tx->order->board->first_data_ns, lane->now_ns);
	return true;
}

/* Where a piece with a grant waits. */
static struct kvp_tx_pieces *queue_of(const struct kvp_tx_piece *piece)
{
	struct kvp_link *link = piece->leg->link;

	return piece->slot ? &link->packed : &link->granted;
}

/* All of the piece is the transport's. */
static void piece_given(struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;

	TAILQ_REMOVE(queue_of(piece), piece, queue);
	piece->state = KVP_TX_SENT;
	tx->n_granted--;
	tx->n_sent++;
	tx->lane->counts.pieces_sent++;
	kvp_tx_dirty(tx);
}

/* Bytes of an endpoint that may be packed and under way at a time. */
static uint64_t packed_most(const struct kvp_lane *lane)
{
	return kvp_lane_on_gpu(lane) ? UINT64_MAX : KVP_LANE_PACKED_BYTES;
}

/* 1: all of it is the transport's, 0: the GPU still packs it, or its runs have not come, -1:
 * nothing more goes now. */
static int send_one(struct kvp_tx_piece *piece)
{
	const uint8_t *from = kvp_slot_place(piece->slot, piece->kind);

	if (!kvp_mover_over(&piece->leg->tx->lane->mover, piece->slot->ticket))
		return 0;
	if (piece->direct)
		return kvp_tx_direct(piece);
	return kvp_tx_give(piece, from, 0, piece->payload) ? 1 : -1;
}

static uint32_t send_packed(struct kvp_link *link)
{
	struct kvp_tx_piece *piece, *next;
	uint32_t n = 0;

	if (kvp_lane_held(link->lane, KVP_HOLD_SEND))
		return 0;

	for (piece = TAILQ_FIRST(&link->packed); piece && kvp_link_open(link); piece = next) {
		int r = send_one(piece);

		next = TAILQ_NEXT(piece, queue);
		if (r < 0)
			break;
		if (r == 0)
			continue;
		piece_given(piece);
		n++;
	}
	return n;
}

/* Without packing: pieces in the order of their grants. */
static uint32_t send_raw(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	struct kvp_tx_piece *piece;
	uint32_t n = 0;

	if (kvp_lane_held(lane, KVP_HOLD_GATHER) || kvp_lane_held(lane, KVP_HOLD_SEND))
		return 0;

	while ((piece = TAILQ_FIRST(&link->granted)) && kvp_link_open(link) && kvp_tx_raw(piece)) {
		piece_given(piece);
		n++;
	}
	return n;
}

/* The next piece that has a grant and no slot. It is packed then, and with it others that share its
 * slot. */
static bool pack_next(struct kvp_link *link, uint64_t *budget)
{
	struct kvp_tx_piece *piece = TAILQ_FIRST(&link->granted);
	uint64_t bytes;

	if (!piece || !kvp_link_open(link) || kvp_lane_held(link->lane, KVP_HOLD_GATHER))
		return false;
	if (*budget < piece->bytes || link->in_flight >= packed_most(link->lane))
		return false;

	bytes = kvp_tx_pack(piece);
	*budget -= KVP_MIN(*budget, bytes);
	return bytes > 0;
}

/*
 * What is packed goes first, whatever was granted before it: its slot may be what an older piece
 * without one waits for.
 */
uint32_t kvp_tx_sends(struct kvp_link *link)
{
	/* A piece of any size goes when it is the first. */
	uint64_t budget = kvp_lane_on_gpu(link->lane)
				  ? KVP_LANE_TURN_GPU_BYTES
				  : KVP_MAX((uint64_t)KVP_LANE_TURN_GATHER_BYTES,
					    link->lane->pack.slot_bytes);
	uint32_t n;

	if (!link->lane->config.pack)
		return send_raw(link);

	n = send_packed(link);
	while (pack_next(link, &budget))
		n += send_packed(link);
	return n;
}

uint32_t kvp_tx_ahead(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	struct kvp_tx_piece *piece;
	uint32_t n = 0;

	if (!lane->config.pack || kvp_lane_held(lane, KVP_HOLD_GATHER) || !kvp_link_open(link) ||
	    kvp_link_to_send(link) || link->sending > 0)
		return 0;

	while (n < AHEAD_PER_TURN && lane->ahead < KVP_MIN(lane->pack.n / 2, AHEAD_PER_TURN) &&
	       (piece = TAILQ_FIRST(&link->wanted)) && kvp_tx_pack(piece))
		n++;
	return n;
}

/* ---- what comes back ------------------------------------------------------------------------- */

/* Pieces at the head that are over leave the window. */
static void leg_pop(struct kvp_tx_leg *leg)
{
	struct kvp_tx_piece *piece;

	while ((piece = TAILQ_FIRST(&leg->order_list)) && piece->landed && piece->sends == 0) {
		TAILQ_REMOVE(&leg->order_list, piece, order);
		leg->n_order--;
		kvp_tx_piece_put(leg->tx->lane, piece);
	}
	kvp_tx_kick(leg);
}

void kvp_tx_grant(struct kvp_lane *lane, const struct kvp_wire_grant *msg)
{
	struct kvp_tx_piece *piece = kvp_tx_piece_find(lane, msg->cookie);
	struct kvp_tx *tx;

	if (!piece || piece->state != KVP_TX_WANTED) {
		lane->counts.stale++;
		return;
	}

	tx = piece->leg->tx;
	if (piece->bytes == 0 || msg->slot_bytes < piece->payload ||
	    !(msg->mode == KVP_WIRE_DIRECT ? kvp_tx_direct_granted(piece, msg)
					   : msg->mode == KVP_WIRE_LANDING)) {
		kvp_tx_fail(tx, KVP__STATUS__STATUS_PROTOCOL,
			    "destination %u granted %llu bytes in mode %u for a piece of %llu",
			    piece->leg->order->dest, (unsigned long long)msg->slot_bytes, msg->mode,
			    (unsigned long long)piece->bytes);
		return;
	}

	if (!piece->slot)
		TAILQ_REMOVE(&piece->leg->link->wanted, piece, queue);
	kvp_tx_not_ahead(piece);
	piece->token = msg->token;
	piece->remote_slot = msg->slot;
	memcpy(&piece->remote_key, msg->key, sizeof(piece->remote_key));
	piece->state = KVP_TX_GRANTED;
	piece->leg->link->wants_out--;
	tx->n_wanted--;
	tx->n_granted++;
	TAILQ_INSERT_TAIL(queue_of(piece), piece, queue);
	kvp_board_once(&tx->order->board->first_grant_ns, lane->now_ns);
	atomic_fetch_or_explicit(&tx->order->board->moved,
				 piece->direct ? KVP_MOVED_DIRECT : KVP_MOVED_LANDING,
				 memory_order_relaxed);
	kvp_tx_dirty(tx);
}

void kvp_tx_landed(struct kvp_lane *lane, const struct kvp_wire_landed *msg)
{
	struct kvp_tx_piece *piece = kvp_tx_piece_find(lane, msg->cookie);
	struct kvp_board *board;
	struct kvp_tx *tx;

	if (!piece || piece->landed) {
		lane->counts.stale++;
		return;
	}

	tx = piece->leg->tx;
	board = tx->order->board;
	if (piece->state == KVP_TX_WANTED && piece->bytes == 0) {
		piece->leg->link->wants_out--;
		tx->n_wanted--;
	} else if (piece->state == KVP_TX_WANTED && piece->eager) {
		kvp_tx_eager_landed(piece);
	} else if (piece->state == KVP_TX_SENT) {
		tx->n_sent--;
	} else {
		kvp_tx_fail(tx, KVP__STATUS__STATUS_PROTOCOL,
			    "destination %u confirmed piece %u of chunk %u, which was not sent",
			    piece->leg->order->dest, piece->idx, piece->seq);
		return;
	}

	piece->landed = true;
	if (piece->direct) {
		kvp_board_add(&board->direct_pieces, 1);
		kvp_board_add(&board->direct_bytes, piece->bytes);
	}
	piece->chunk->to_land--;
	kvp_board_add(&board->pieces, 1);
	kvp_board_add(&board->bytes, piece->bytes);
	atomic_store_explicit(&board->last_landed_ns, lane->now_ns, memory_order_relaxed);
	tx->moved = true;
	kvp_tx_dirty(tx);
	leg_pop(piece->leg);
}

void kvp_tx_refuse(struct kvp_lane *lane, const struct kvp_wire_refuse *msg)
{
	struct kvp_tx_piece *piece = NULL;
	Kvp__Status status = KVP__STATUS__STATUS_PROTOCOL;
	struct kvp_tx_leg *leg;

	/* The want that the receiver could not take may name the newest piece of the leg only; not
	 * one that it has confirmed. */
	piece = kvp_tx_piece_find(lane, msg->cookie);
	if (!piece || piece->landed) {
		lane->counts.stale++;
		return;
	}
	if (msg->status > KVP__STATUS__STATUS_OK &&
	    msg->status <= (uint32_t)KVP__STATUS__STATUS_CORRUPT)
		status = (Kvp__Status)msg->status;
	leg = piece->leg;
	kvp_tx_fail(leg->tx, status, "destination %u refused piece %u of chunk %u: status %u",
		    leg->order->dest, piece->idx, piece->seq, msg->status);
}

/*
 * The leg is over, and the transport has not let go of the slot. The slot is a copy: the sources
 * are free, and nobody waits for a peer that does not read.
 */
static void piece_orphan(struct kvp_tx_piece *piece)
{
	struct kvp_tx_leg *leg = piece->leg;

	kvp_tx_not_ahead(piece);
	TAILQ_REMOVE(&leg->order_list, piece, order);
	leg->n_order--;
	piece->slot->user = NULL;
	piece->orphan = leg->link;
	piece->leg = NULL;
}

static void orphan_sent(struct kvp_lane *lane, struct kvp_tx_piece *piece)
{
	struct kvp_link *link = piece->orphan;

	link->sending--;
	link->in_flight -= piece->payload;
	if (--piece->sends > 0)
		return;

	kvp_ring_put(&lane->pack, piece->slot);
	link->share->pack_slots--;
	kvp_tx_piece_put(lane, piece);
}

static void sent_dropped(struct kvp_tx_piece *piece)
{
	struct kvp_tx_leg *leg = piece->leg;

	if (piece->sends > 0)
		return;

	kvp_tx_slot_put(piece);
	TAILQ_REMOVE(&leg->order_list, piece, order);
	leg->n_order--;
	kvp_tx_piece_put(leg->tx->lane, piece);
	kvp_tx_dirty(leg->tx);
}

void kvp_tx_sent(struct kvp_lane *lane, struct kvp_tx_piece *piece, int status)
{
	struct kvp_tx_leg *leg = piece->leg;

	if (!leg) {
		orphan_sent(lane, piece);
		return;
	}
	piece->sends--;
	leg->link->sending--;
	if (piece->slot)
		leg->link->in_flight -= piece->payload;
	if (leg->dropped) {
		sent_dropped(piece);
		return;
	}
	if (status < 0) {
		/* A broken endpoint has told so itself: the loop ends what used it. */
		if (leg->link->state == KVP_LINK_OPEN)
			kvp_tx_fail(leg->tx, KVP__STATUS__STATUS_TRANSPORT,
				    "destination %u: send of piece %u of chunk %u failed: %s",
				    leg->order->dest, piece->idx, piece->seq,
				    strerror(-status)); /* which drops the piece too */
		return;
	}
	if (piece->sends > 0 || piece->state != KVP_TX_SENT)
		return;

	kvp_tx_slot_put(piece);
	if (!piece->gathered)
		kvp_tx_gathered(piece);
	if (piece->landed)
		leg_pop(leg);
}

/* ---- the end of a leg ------------------------------------------------------------------------ */

static bool piece_unwant(struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;
	struct kvp_link *link = piece->leg->link;

	switch (piece->state) {
	case KVP_TX_WANTED:
		if (piece->landed) /* it had no bytes */
			return false;
		if (piece->bytes && !piece->slot)
			TAILQ_REMOVE(&link->wanted, piece, queue);
		link->wants_out--;
		tx->n_wanted--;
		return true;
	case KVP_TX_GRANTED:
		TAILQ_REMOVE(queue_of(piece), piece, queue);
		if (link->raw.piece == piece)
			link->raw.piece = NULL;
		tx->n_granted--;
		return true;
	default:
		tx->n_sent -= !piece->landed;
		/* Of messages that come one by one none says that it is the last. */
		return !piece->landed && !tx->lane->config.pack &&
		       (piece->kind == KVP_WIRE_ROWS || piece->payload != piece->bytes);
	}
}

void kvp_tx_leg_drop(struct kvp_tx_leg *leg)
{
	struct kvp_tx_piece *piece, *next;
	bool unused = false;

	if (leg->local)
		kvp_local_forget(leg->tx->lane, leg, NULL);
	if (leg->dropped)
		return;

	leg->dropped = true;
	if (leg->ready)
		TAILQ_REMOVE(&leg->link->ready, leg, ready_link);
	leg->ready = false;
	for (piece = TAILQ_FIRST(&leg->order_list); piece; piece = next) {
		next = TAILQ_NEXT(piece, order);
		unused = piece_unwant(piece) || unused;
		kvp_tx_runs_put(leg->link, piece);
		if (piece->sends > 0) {
			if (piece->slot)
				piece_orphan(piece);
			continue;
		}
		kvp_tx_slot_put(piece);
		TAILQ_REMOVE(&leg->order_list, piece, order);
		leg->n_order--;
		kvp_tx_piece_put(leg->tx->lane, piece);
	}
	if (unused)
		kvp_link_return(leg->link, leg->order->generation, leg->tx->order->sender);
	kvp_tx_dirty(leg->tx);
}
