/* SPDX-License-Identifier: Apache-2.0 */

/* Landing: grants, data into slots, from there into the pool, and the answers. */

#include <errno.h>
#include <string.h>

#include "daemon/copy.h"
#include "daemon/lane_impl.h"
#include "proto/util.h"

/* ---- grants ---------------------------------------------------------------------------------- */

void kvp_rx_piece_grant(struct kvp_rx_leg *leg, struct kvp_slot *slot, uint64_t token)
{
	struct kvp_rx_piece *piece = TAILQ_FIRST(&leg->queued);
	struct kvp_rx *rx = leg->rx;

	TAILQ_REMOVE(&leg->queued, piece, queue);
	leg->n_queued--;
	rx->n_queued--;
	leg->link->wants_queued--;
	rx->n_granted++;
	piece->state = KVP_RX_GRANTED;
	if (slot) {
		slot->token = token;
		slot->user = piece;
		piece->slot = slot;
		piece->share = leg->link->share;
		piece->share->refs++;
		piece->share->land_slots++;
	} else {
		piece->token = token;
	}
	atomic_fetch_or_explicit(&rx->order->board->moved,
				 slot ? KVP_MOVED_LANDING : KVP_MOVED_DIRECT, memory_order_relaxed);
	kvp_board_once(&rx->order->board->first_grant_ns, rx->lane->now_ns);
	kvp_rx_dirty(rx);
}

/* Index of the key of where the piece is to land. */
static uint32_t key_of(const struct kvp_lane *lane, const struct kvp_rx_piece *piece,
		       const struct kvp_slot *slot)
{
	bool twin = kvp_slot_place(slot, piece->kind) != slot->data;

	return (twin ? lane->config.slots : 0) + slot->idx;
}

static bool piece_grant(struct kvp_rx_leg *leg)
{
	struct kvp_rx_piece *piece = TAILQ_FIRST(&leg->queued);
	const struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_slot *slot;
	struct kvp_wire_grant msg;
	int r = kvp_rx_direct(leg, piece);

	if (r != 0)
		return r > 0;
	if (leg->link->share->land_slots >= KVP_MAX(lane->land.n / 4, 1u))
		return false;
	slot = kvp_ring_take(&lane->land, rx->pool->order->owner_uid, lane->now_ns);
	if (!slot) {
		lane->counts.slot_waits++;
		return false;
	}

	msg = (struct kvp_wire_grant){
		.head = kvp_wire_head(KVP_WIRE_GRANT),
		.cookie = piece->cookie,
		.token = kvp_lane_token(lane),
		.slot_bytes = lane->land.slot_bytes,
		.slot = slot->idx,
		.mode = KVP_WIRE_LANDING,
	};
	memcpy(msg.key, &lane->land_keys[key_of(lane, piece, slot)], sizeof(msg.key));
	if (kvp_link_send(leg->link, &msg, KVP_WIRE_GRANT_LANDING_BYTES) < 0) {
		kvp_ring_put(&lane->land, slot);
		return false;
	}

	kvp_rx_piece_grant(leg, slot, msg.token);
	return true;
}

/* Puts the legs of a room that has been served behind those of others; the served leg is the last.
 */
static void share_turn(struct kvp_share *share, struct kvp_rx_leg *served)
{
	const struct kvp_rx_leg *last = TAILQ_LAST(&share->legs, kvp_rx_legs);
	struct kvp_rx_leg *leg, *next;

	for (leg = TAILQ_FIRST(&share->legs); leg; leg = next) {
		next = leg == last ? NULL : TAILQ_NEXT(leg, share_link);
		if (leg == served || leg->rx->order->room != served->rx->order->room)
			continue;
		TAILQ_REMOVE(&share->legs, leg, share_link);
		TAILQ_INSERT_TAIL(&share->legs, leg, share_link);
	}
	TAILQ_REMOVE(&share->legs, served, share_link);
	TAILQ_INSERT_TAIL(&share->legs, served, share_link);
}

/* Grants one piece of the session: of the room whose turn it is, of the leg whose turn it is there.
 */
static bool share_grant(struct kvp_lane *lane, struct kvp_share *share)
{
	struct kvp_rx_leg *leg;

	/* Without direct mode nothing goes without a slot. */
	if (!kvp_lane_direct(lane) && share->land_slots >= KVP_MAX(lane->land.n / 4, 1u))
		return false;

	TAILQ_FOREACH (leg, &share->legs, share_link) {
		if (!kvp_link_open(leg->link) || leg->link->telling || !piece_grant(leg))
			continue;

		share_turn(share, leg);
		if (leg->n_queued == 0)
			kvp_rx_share_forget(leg);
		return true;
	}
	return false;
}

uint32_t kvp_rx_grants(struct kvp_lane *lane)
{
	uint32_t n = 0;
	size_t misses = 0;
	struct kvp_share *share;

	if (kvp_lane_held(lane, KVP_HOLD_GRANT))
		return 0;

	while (misses < lane->shares_by_id.n && (share = TAILQ_FIRST(&lane->shares))) {
		if (lane->land.n_free == 0 && !kvp_lane_direct(lane)) {
			lane->counts.slot_waits++;
			break;
		}
		TAILQ_REMOVE(&lane->shares, share, link);
		TAILQ_INSERT_TAIL(&lane->shares, share, link);
		if (share_grant(lane, share)) {
			n++;
			misses = 0;
		} else {
			misses++;
		}
	}
	return n;
}

/* ---- data ------------------------------------------------------------------------------------ */

/* The piece that a token stands for: exact, and only while the slot holds it. */
static struct kvp_rx_piece *piece_of(struct kvp_lane *lane, const struct kvp_wire_data *msg)
{
	struct kvp_slot *slot;

	if (msg->slot >= lane->land.n || msg->token == 0)
		return NULL;

	slot = &lane->land.slots[msg->slot];
	return slot->token == msg->token ? slot->user : NULL;
}

/* The parts of the piece in the slot; what is not rows has one. */
static uint32_t lay_out(struct kvp_lane *lane, const struct kvp_rx_piece *piece)
{
	uint32_t n_parts;

	if (piece->kind != KVP_WIRE_ROWS) {
		lane->parts[0] = (struct kvp_part){ .bytes = piece->bytes };
		return 1;
	}
	(void)kvp_piece_layout(&piece->leg->geom.geom, piece->set, piece->start, piece->tokens,
			       lane->parts, &n_parts);
	return n_parts;
}

/* Row by row: begins the part that comes next, at last the sums; false: there is none. */
static bool next_part(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	uint32_t n_parts = lay_out(lane, piece), idx = piece->part_idx;
	uint64_t tail =
		piece->payload > piece->bytes ? kvp_sums_offset(piece->bytes) : piece->payload;

	for (uint32_t i = 0; idx == 0 && i < n_parts; i++)
		piece->need += lane->parts[i].bytes;
	if (idx == 0)
		piece->need += piece->payload - tail;

	if (idx < n_parts) {
		piece->part_off = lane->parts[idx].offset;
		piece->part_end = piece->part_off + lane->parts[idx].bytes;
		piece->part_row = piece->kind == KVP_WIRE_ROWS
					  ? piece->leg->geom.geom.pairs[lane->parts[idx].pair].bytes
					  : (uint32_t)piece->bytes;
	} else if (idx == n_parts && tail < piece->payload) {
		piece->part_off = tail;
		piece->part_end = piece->payload;
		piece->part_row = (uint32_t)(piece->payload - tail);
	} else {
		return false;
	}
	piece->part_idx++;
	return true;
}

/* Row by row: is that the next row, in the order of the layout? */
static bool row_expected(struct kvp_lane *lane, struct kvp_rx_piece *piece,
			 const struct kvp_wire_data *msg, size_t bytes)
{
	if (piece->kind != KVP_WIRE_ROWS && piece->payload == piece->bytes)
		return false;
	if (piece->part_off == piece->part_end && !next_part(lane, piece))
		return false;
	if (msg->offset != piece->part_off || bytes != piece->part_row)
		return false;

	piece->part_off += bytes;
	return true;
}

/* Where a message's payload goes; NULL: nowhere. */
void *kvp_rx_message(struct kvp_lane *lane, const struct kvp_wire_data *msg, size_t bytes)
{
	struct kvp_rx_piece *piece = piece_of(lane, msg);
	bool whole;

	/* Rows that come one by one are followed by a RETURN. */
	if (piece && piece->state == KVP_RX_AT_RISK && bytes == piece->payload) {
		kvp_rx_risk_over(lane, piece); /* it came for nobody, and after it nothing comes */
		piece = NULL;
	}
	if (!piece || piece->state != KVP_RX_GRANTED ||
	    (piece->need && piece->given == piece->need)) {
		lane->counts.no_token++;
		return NULL;
	}

	whole = piece->given == 0 && msg->offset == 0 && bytes == piece->payload;
	if (msg->total != piece->payload || (!whole && !row_expected(lane, piece, msg, bytes))) {
		lane->counts.bad_messages++;
		kvp_rx_fail(piece->leg->rx, KVP__STATUS__STATUS_PROTOCOL,
			    "sender %u: data of %zu bytes at %llu of %llu, the piece has %llu",
			    piece->leg->sender, bytes, (unsigned long long)msg->offset,
			    (unsigned long long)msg->total, (unsigned long long)piece->payload);
		return NULL;
	}

	if (whole)
		piece->need = bytes;
	piece->given += bytes;
	piece->receiving++;
	kvp_slot_dirty(piece->slot, msg->offset + bytes);
	kvp_board_once(&piece->leg->rx->order->board->first_data_ns, lane->now_ns);
	return kvp_slot_place(piece->slot, piece->kind) + msg->offset;
}

void kvp_rx_here(struct kvp_lane *lane, struct kvp_rx_piece *piece, const void *from)
{
	struct kvp_rx *rx = piece->leg->rx;

	rx->n_granted--;
	if (from == kvp_slot_place(piece->slot, piece->kind))
		kvp_lane_flip(lane, KVP_HOLD_FLIP_LAND, kvp_slot_place(piece->slot, piece->kind));
	/* What a GPU scatters goes out together, later in the turn. */
	if (kvp_lane_on_gpu(lane) || kvp_lane_held(lane, KVP_HOLD_SCATTER)) {
		piece->state = KVP_RX_HERE;
		rx->n_here++;
		lane->here++;
		TAILQ_INSERT_TAIL(&lane->rx_here, piece, queue);
		kvp_rx_dirty(rx);
		return;
	}
	/* The processor is done when this returns. */
	(void)kvp_rx_scatter(piece->leg, piece, from, &(uint64_t){ 0 });
	if (kvp_rx_sums_right(piece, from))
		kvp_rx_landed(piece);
}

void kvp_rx_orphan_done(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	if (piece->receiving > 0)
		return;

	kvp_rx_slot_put(lane, piece);
	kvp_rx_piece_put(lane, piece);
}

bool kvp_rx_keep(struct kvp_rx_piece *piece, uint64_t offset, const void *data, size_t bytes)
{
	struct kvp_rx *rx = piece->leg->rx;
	struct kvp_lane *lane = rx->lane;
	uint8_t *to = kvp_slot_place(piece->slot, piece->kind) + offset;
	int r;

	if (data == to)
		return true;
	if (!lane->rings.device || piece->kind == KVP_WIRE_META) {
		memcpy(to, data, bytes);
		return true;
	}
	kvp_lane_call(lane, "copy into a ring");
	r = kvp_mover_write(&lane->mover, to, data, bytes);
	kvp_lane_call(lane, "transport progress");
	if (r < 0)
		kvp_rx_move_failed(rx, r);
	return r == 0;
}

void kvp_rx_data(struct kvp_lane *lane, const struct kvp_wire_data *msg, const void *data,
		 size_t bytes)
{
	struct kvp_rx_piece *piece = piece_of(lane, msg);
	bool direct;

	if (!piece || piece->receiving == 0)
		return;

	piece->receiving--;
	if (piece->state == KVP_RX_ORPHAN) {
		kvp_rx_orphan_done(lane, piece);
		return;
	}

	/* A whole piece is scattered from where it lies, unless it has to be kept. */
	direct = bytes == piece->need && !kvp_lane_held(lane, KVP_HOLD_SCATTER) &&
		 !kvp_lane_held(lane, KVP_HOLD_FLIP_LAND) && !kvp_lane_on_gpu(lane);
	if (!direct && !kvp_rx_keep(piece, msg->offset, data, bytes))
		return;
	piece->got += bytes;
	if (piece->got == piece->need)
		kvp_rx_here(lane, piece, direct ? data : piece->slot->data);
}

void kvp_rx_piece_lost(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	if (piece->receiving == 0)
		return;

	piece->receiving--;
	if (piece->state == KVP_RX_ORPHAN)
		kvp_rx_orphan_done(lane, piece);
	else
		kvp_rx_fail(piece->leg->rx, KVP__STATUS__STATUS_PEER_LOST,
			    "sender %u: the transport lost a piece on its way", piece->leg->sender);
}

void kvp_rx_lost(struct kvp_lane *lane, const struct kvp_wire_data *msg)
{
	struct kvp_rx_piece *piece = piece_of(lane, msg);

	if (piece)
		kvp_rx_piece_lost(lane, piece);
}

static void take_here(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	TAILQ_REMOVE(&lane->rx_here, piece, queue);
	lane->here--;
	piece->leg->rx->n_here--;
}

/* Scatters a piece that is here: 0, or what a mover says. */
static int piece_scatter(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	struct kvp_rx *rx = piece->leg->rx;
	uint64_t ticket = 0;
	int r;

	if (piece->written) {
		take_here(lane, piece);
		kvp_rx_landed(piece);
		return 0;
	}
	r = kvp_rx_scatter(piece->leg, piece, kvp_slot_place(piece->slot, piece->kind), &ticket);
	if (r == -EAGAIN)
		return r;
	if (r < 0) {
		kvp_rx_move_failed(rx, r); /* which drops the piece */
		return 0;
	}

	kvp_board_once(&rx->order->board->first_unpack_ns, lane->now_ns);
	if (!kvp_rx_sums_right(piece, kvp_slot_place(piece->slot, piece->kind)))
		return 0;
	take_here(lane, piece);
	if (kvp_mover_over(&lane->mover, ticket)) {
		kvp_rx_landed(piece);
		return 0;
	}
	piece->slot->ticket = ticket;
	piece->state = KVP_RX_MOVING;
	rx->n_moving++;
	TAILQ_INSERT_TAIL(&lane->scattering, piece, queue);
	kvp_rx_dirty(rx);
	return 0;
}

/* What is here was written by a NIC: the GPU has to see it. */
static void flush(struct kvp_lane *lane)
{
	struct kvp_rx_piece *piece;
	int r;

	kvp_lane_call(lane, "flush of a NIC's writes");
	r = kvp_mover_flush(&lane->mover);
	kvp_lane_call(lane, NULL);
	lane->counts.flushes++;
	lane->unseen = false;
	while (r < 0 && (piece = TAILQ_FIRST(&lane->rx_here)))
		kvp_rx_move_failed(piece->leg->rx, r); /* which drops its pieces */
}

uint32_t kvp_rx_scatters(struct kvp_lane *lane)
{
	struct kvp_rx_piece *piece;
	uint32_t n = 0;

	if (kvp_lane_held(lane, KVP_HOLD_SCATTER))
		return 0;

	if ((lane->rings.flush || lane->unseen) && !TAILQ_EMPTY(&lane->rx_here))
		flush(lane);
	while ((piece = TAILQ_FIRST(&lane->rx_here)) && piece_scatter(lane, piece) == 0)
		n++;
	return n;
}

/* ---- into the pool --------------------------------------------------------------------------- */

uint8_t *kvp_rx_segment_place(const struct kvp_rx *rx, uint32_t idx)
{
	const struct kvp_lane_segment *segment = &rx->order->segments[idx];
	const struct kvp_order_pool *pool = rx->pool->order;
	const struct kvp_entry *entry = &pool->entries[segment->entry];

	return pool->fd_maps[entry->fd_idx] + entry->base + segment->offset;
}

struct kvp_copy_piece kvp_rx_rows(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *rows)
{
	const struct kvp_rx *rx = leg->rx;
	struct kvp_copy_piece piece = {
		.leg = &leg->geom.geom,
		.pool = { rx->pool->order->fd_maps, rx->order->sides },
		.start = rows->start,
		.tokens = rows->tokens,
		.parts = rx->lane->parts,
	};

	(void)kvp_piece_layout(piece.leg, rows->set, rows->start, rows->tokens, rx->lane->parts,
			       &piece.n_parts);
	return piece;
}

static int scatter_rows(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *rows,
			const uint8_t *from, uint64_t *ticket)
{
	const struct kvp_rx *rx = leg->rx;
	struct kvp_copy_piece piece = kvp_rx_rows(leg, rows);

	return kvp_mover_scatter(&rx->lane->mover, &piece, from, ticket);
}

int kvp_rx_scatter(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, const uint8_t *from,
		   uint64_t *ticket)
{
	struct kvp_rx *rx = leg->rx;

	switch (piece->kind) {
	case KVP_WIRE_ROWS:
		return scatter_rows(leg, piece, from, ticket);
	case KVP_WIRE_SEGMENT:
		return kvp_mover_bytes(&rx->lane->mover, from,
				       kvp_rx_segment_place(rx, piece->segment) + piece->start,
				       piece->bytes, ticket);
	case KVP_WIRE_META: /* host memory on both ends */
		memcpy(rx->order->meta + piece->start, from, piece->bytes);
		return 0;
	default:
		return 0;
	}
}

void kvp_rx_blob_landed(struct kvp_rx *rx, const struct kvp_rx_piece *piece)
{
	struct kvp_rx_blob *blob;

	if (piece->kind != KVP_WIRE_SEGMENT && piece->kind != KVP_WIRE_META)
		return;

	blob = &rx->blobs[piece->segment];
	blob->landed += piece->bytes;
	if (blob->landed == blob->total && !blob->done) {
		blob->done = true;
		rx->blobs_left--;
	}
}

void kvp_rx_pass(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece)
{
	uint64_t least = leg->rx->order->end;

	if (piece->kind != KVP_WIRE_ROWS)
		return;

	for (uint32_t i = 0; i < leg->geom.n_src; i++) {
		if (!kvp_mask_has(leg->geom.src_mask, i))
			continue;
		if (kvp_mask_has(piece->set, i))
			leg->landed[i] = piece->start + piece->tokens;
		least = KVP_MIN(least, leg->landed[i]);
	}
	leg->arrived = least;
}

void kvp_rx_check_finished(struct kvp_rx_leg *leg)
{
	if (leg->finished || !leg->last_seen || leg->n_order > 0)
		return;

	leg->finished = true;
	leg->arrived = leg->rx->order->end;
	leg->rx->n_finished++;
}

void kvp_rx_landed(struct kvp_rx_piece *piece)
{
	struct kvp_rx_leg *leg = piece->leg;
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_board *board = rx->order->board;
	struct kvp_rx_piece *oldest;

	kvp_rx_slot_put(lane, piece);
	kvp_rx_blob_landed(rx, piece);
	piece->state = KVP_RX_LANDED;
	TAILQ_INSERT_TAIL(&leg->link->landed, piece, queue);
	leg->link->n_landed++;
	lane->counts.pieces_landed++;
	lane->counts.bytes_landed += piece->bytes;
	kvp_board_add(&board->pieces, 1);
	kvp_board_add(&board->bytes, piece->bytes);
	atomic_store_explicit(&board->last_landed_ns, lane->now_ns, memory_order_relaxed);

	while ((oldest = TAILQ_FIRST(&leg->order)) && oldest->state == KVP_RX_LANDED) {
		TAILQ_REMOVE(&leg->order, oldest, order);
		leg->n_order--;
		kvp_rx_pass(leg, oldest);
		oldest->passed = true;
		if (oldest->told)
			kvp_rx_piece_put(lane, oldest);
	}
	kvp_rx_check_finished(leg);
	rx->moved = true;
	kvp_rx_dirty(rx);
}

/* ---- answers --------------------------------------------------------------------------------- */

uint32_t kvp_rx_answers(struct kvp_link *link)
{
	struct kvp_lane *lane = link->lane;
	struct kvp_rx_piece *piece;
	struct kvp_rx_leg *leg;
	uint32_t n = 0;

	while (!kvp_lane_held(lane, KVP_HOLD_LANDED) && (piece = TAILQ_FIRST(&link->landed))) {
		const struct kvp_wire_landed msg = { kvp_wire_head(KVP_WIRE_LANDED),
						     piece->cookie };

		if (kvp_link_send(link, &msg, sizeof(msg)) < 0)
			return n;
		TAILQ_REMOVE(&link->landed, piece, queue);
		link->n_landed--;
		piece->told = true;
		if (piece->passed)
			kvp_rx_piece_put(lane, piece);
		n++;
	}
	while ((leg = TAILQ_FIRST(&link->refusals))) {
		const struct kvp_wire_refuse msg = {
			.head = kvp_wire_head(KVP_WIRE_REFUSE),
			.cookie = leg->refuse_cookie,
			.status = leg->refuse_status,
		};

		if (kvp_link_send(link, &msg, sizeof(msg)) < 0)
			return n;
		TAILQ_REMOVE(&link->refusals, leg, refuse_link);
		leg->refuse = false;
		n++;
	}
	return n;
}
