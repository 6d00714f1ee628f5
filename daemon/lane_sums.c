/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sums of what a lane of the host moves: computed of the rows in the source's pool, not in the slot
 * that they were packed into, and compared with the rows in the destination's pool, not with those
 * that came. So packing, the way, and the scatter are all between the two. From pool to pool on one
 * lane the rows themselves are compared, and sums computed of those that differ.
 */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/copy.h"
#include "daemon/lane_impl.h"
#include "daemon/sums.h"
#include "proto/util.h"

/* ---- source ---------------------------------------------------------------------------------- */

static uint64_t blob_seed(uint64_t offset, uint8_t kind, uint32_t id)
{
	return kvp_sum_seed_bytes(offset, kind == KVP_WIRE_META ? 0 : id);
}

static void put_sum(uint8_t *sums, uint32_t idx, uint64_t sum)
{
	memcpy(sums + (size_t)idx * KVP_SUM_BYTES, &sum, sizeof(sum));
}

static uint64_t get_sum(const uint8_t *sums, uint32_t idx)
{
	uint64_t sum;

	memcpy(&sum, sums + (size_t)idx * KVP_SUM_BYTES, sizeof(sum));
	return sum;
}

static void sum_rows(const struct kvp_tx_piece *rows, uint8_t *sums)
{
	const struct kvp_tx_leg *leg = rows->leg;
	const struct kvp_order_chunk *chunk = rows->chunk->order;
	struct kvp_side sides[KVP_LANE_GROUPS];
	struct kvp_copy_piece piece = {
		.leg = &leg->order->leg.geom,
		.pool = { leg->tx->pool->order->fd_maps, sides },
		.start = rows->start,
		.tokens = rows->tokens,
		.parts = leg->tx->lane->parts,
	};
	uint64_t set[KVP_LANE_MASK_WORDS];

	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++)
		set[i] = chunk->entry_set[i] & leg->order->leg.src_mask[i];
	kvp_tx_sides(leg, chunk, sides);
	(void)kvp_piece_layout(piece.leg, set, piece.start, rows->tokens, leg->tx->lane->parts,
			       &piece.n_parts);
	for (uint32_t i = 0; i < piece.n_parts; i++)
		put_sum(sums, i, kvp_sum_source(&piece, i));
}

void kvp_tx_sums(const struct kvp_tx_piece *piece, uint8_t *tail)
{
	const struct kvp_order_chunk *chunk = piece->chunk->order;
	uint8_t *sums = tail + (kvp_sums_offset(piece->bytes) - piece->bytes);
	const uint8_t *blob;
	uint32_t id;

	memset(tail, 0, piece->payload - piece->bytes);
	if (piece->kind == KVP_WIRE_ROWS) {
		sum_rows(piece, sums);
		return;
	}
	blob = kvp_tx_blob(piece->leg->tx, chunk, piece->kind, piece->segment) + piece->start;
	id = piece->kind == KVP_WIRE_SEGMENT ? chunk->segments[piece->segment].id : 0;
	put_sum(sums, 0,
		kvp_sum_bytes(blob, piece->bytes, blob_seed(piece->start, piece->kind, id)));
}

/* ---- destination ----------------------------------------------------------------------------- */

/* Two sums that differ, and of what. */
struct difference {
	const struct kvp_pair *pair; /* NULL: not of rows */
	uint32_t rows;
	uint64_t sent, landed;
};

static void describe(const struct kvp_rx_piece *piece, const struct difference *found, char *text,
		     size_t bytes)
{
	const struct kvp_rx_leg *leg = piece->leg;
	const uint64_t end =
		piece->start + (piece->kind == KVP_WIRE_ROWS ? piece->tokens : piece->bytes);
	char what[96];

	if (found->pair)
		(void)snprintf(what, sizeof(what), "entry %u, layer %u, %u rows of tokens",
			       found->pair->dst_entry,
			       leg->geom.geom.dst[found->pair->dst_entry].layer, found->rows);
	else if (piece->kind == KVP_WIRE_SEGMENT)
		(void)snprintf(what, sizeof(what), "segment %u, bytes",
			       leg->rx->order->segments[piece->segment].id);
	else
		(void)snprintf(what, sizeof(what), "meta, bytes");
	(void)snprintf(text, bytes,
		       "sender %u: %s [%" PRIu64 ", %" PRIu64 "): sum %016" PRIx64
		       " at the source, %016" PRIx64 " here",
		       leg->sender, what, piece->start, end, found->sent, found->landed);
}

static uint8_t *blob_place(const struct kvp_rx_piece *piece)
{
	const struct kvp_rx *rx = piece->leg->rx;

	return (piece->kind == KVP_WIRE_META ? rx->order->meta
					     : kvp_rx_segment_place(rx, piece->segment)) +
	       piece->start;
}

static uint64_t blob_sum(const struct kvp_rx_piece *piece, const uint8_t *at)
{
	const struct kvp_order_rx *order = piece->leg->rx->order;
	uint32_t id = piece->kind == KVP_WIRE_SEGMENT ? order->segments[piece->segment].id : 0;

	return kvp_sum_bytes(at, piece->bytes, blob_seed(piece->start, piece->kind, id));
}

/* Compares a piece of rows in the pool with what was sent. */
static bool rows_differ(const struct kvp_rx_piece *rows, const uint8_t *sums,
			struct difference *found)
{
	const struct kvp_rx_leg *leg = rows->leg;
	struct kvp_copy_piece piece = kvp_rx_rows(leg, rows);

#ifdef KVP_TEST
	kvp_lane_flip(leg->rx->lane, KVP_HOLD_FLIP_POOL, kvp_sum_first(&piece, piece.n_parts - 1));
#endif
	for (uint32_t i = 0; i < piece.n_parts; i++) {
		*found = (struct difference){
			.pair = &piece.leg->pairs[piece.parts[i].pair],
			.rows = piece.parts[i].rows,
			.sent = get_sum(sums, i),
			.landed = kvp_sum_dest(&piece, i),
		};
		if (found->sent != found->landed)
			return true;
	}
	return false;
}

bool kvp_rx_sums_right(struct kvp_rx_piece *piece, const uint8_t *from)
{
	struct kvp_rx *rx = piece->leg->rx;
	const uint8_t *sums = from + kvp_sums_offset(piece->bytes);
	struct difference found = { 0 };
	char text[KVP_BOARD_TEXT];
	bool differ;

	if (piece->payload == piece->bytes)
		return true;

	rx->lane->counts.checked++;
	if (piece->kind == KVP_WIRE_ROWS) {
		differ = rows_differ(piece, sums, &found);
	} else {
		kvp_lane_flip(rx->lane, KVP_HOLD_FLIP_POOL, blob_place(piece));
		found.sent = get_sum(sums, 0);
		found.landed = blob_sum(piece, blob_place(piece));
		differ = found.sent != found.landed;
	}
	if (!differ)
		return true;

	rx->lane->counts.corrupt++;
	describe(piece, &found, text, sizeof(text));
	if (piece->state == KVP_RX_GRANTED) /* nothing of it is to come: it is not at risk */
		piece->state = KVP_RX_CORRUPT;
	kvp_rx_fail(rx, KVP__STATUS__STATUS_CORRUPT, "%s", text);
	return false;
}

/* ---- from pool to pool ----------------------------------------------------------------------- */

static bool local_fail(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
		       const struct difference *found)
{
	struct kvp_tx *tx = leg->tx;
	uint32_t dest = leg->order->dest;
	char text[KVP_BOARD_TEXT];

	tx->lane->counts.corrupt++;
	describe(piece, found, text, sizeof(text));
	kvp_rx_fail(piece->leg->rx, KVP__STATUS__STATUS_CORRUPT, "%s", text);
	kvp_tx_fail(tx, KVP__STATUS__STATUS_CORRUPT, "destination %u: %.160s", dest, text);
	return false;
}

bool kvp_local_right(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
		     const struct kvp_copy_piece *src, const struct kvp_copy_piece *dst)
{
	struct kvp_lane *lane = leg->tx->lane;

	if (!leg->order->leg.sums)
		return true;

	lane->counts.checked++;
#ifdef KVP_TEST
	if (dst->n_parts > 0)
		kvp_lane_flip(lane, KVP_HOLD_FLIP_POOL, kvp_sum_first(dst, dst->n_parts - 1));
#endif
	for (uint32_t i = 0; i < src->n_parts; i++) {
		struct difference found = {
			.pair = &dst->leg->pairs[dst->parts[i].pair],
			.rows = dst->parts[i].rows,
		};

		if (kvp_rows_equal(src, dst, i))
			continue;
		found.sent = kvp_sum_source(src, i);
		found.landed = kvp_sum_dest(dst, i);
		return local_fail(leg, piece, &found);
	}
	return true;
}

bool kvp_local_right_bytes(struct kvp_tx_leg *leg, const struct kvp_rx_piece *piece,
			   const uint8_t *from)
{
	struct kvp_lane *lane = leg->tx->lane;
	struct difference found = { 0 };

	if (!leg->order->leg.sums || piece->bytes == 0)
		return true;

	lane->counts.checked++;
	kvp_lane_flip(lane, KVP_HOLD_FLIP_POOL, blob_place(piece));
	if (memcmp(from, blob_place(piece), piece->bytes) == 0)
		return true;
	found.sent = blob_sum(piece, from);
	found.landed = blob_sum(piece, blob_place(piece));
	return local_fail(leg, piece, &found);
}
