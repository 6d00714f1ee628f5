/* SPDX-License-Identifier: Apache-2.0 */

/* Without packing: a message for each row of each entry, from where it lies in the pool. */

#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

/* Begins the part of the piece that comes next; false: there is none. */
static bool next_part(struct kvp_tx_piece *piece, struct kvp_raw_cursor *raw)
{
	const struct kvp_leg_geom *geom = &piece->leg->order->leg.geom;
	const struct kvp_order_chunk *chunk = piece->chunk->order;
	struct kvp_part *parts = piece->leg->tx->lane->parts;
	uint64_t set[KVP_LANE_MASK_WORDS];
	const struct kvp_pair *pair;
	const struct kvp_lane_chunk_side *list;
	struct kvp_range clip;
	struct kvp_side src, dst;
	uint32_t n_parts;

	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++)
		set[i] = chunk->entry_set[i] & piece->leg->order->leg.src_mask[i];
	(void)kvp_piece_layout(geom, set, piece->start, piece->tokens, parts, &n_parts);
	if (raw->part_idx >= n_parts)
		return false;

	pair = &geom->pairs[parts[raw->part_idx].pair];
	list = &chunk->sides[geom->src[pair->src_entry].group];
	clip = kvp_leg_clip(geom, pair, piece->start, piece->tokens);
	kvp_leg_sides(geom, pair, &src, &dst);
	src.pos0 = list->pos0;
	src.pages = list->pages;
	src.n_pages = list->n_pages;
	dst.pages = NULL; /* only which rows are the destination's counts here */
	dst.n_pages = KVP_PAGES_ANY;
	kvp_rows_begin(&raw->it, &src, &dst, clip.start, clip.tokens);
	raw->run.n = 0;
	raw->row = 0;
	raw->entry = pair->src_entry;
	raw->src_off = pair->src_off;
	raw->row_bytes = pair->bytes;
	raw->offset = parts[raw->part_idx].offset;
	raw->part_end = raw->offset + parts[raw->part_idx].bytes;
	raw->part_idx++;
	return true;
}

/* The next row's address; the cursor stands within a part. */
static const uint8_t *row_at(const struct kvp_tx_piece *piece, struct kvp_raw_cursor *raw)
{
	const struct kvp_order_pool *pool = piece->leg->tx->pool->order;
	const struct kvp_entry *entry = &pool->entries[raw->entry];
	uint32_t slot;

	if (raw->row == raw->run.n) {
		(void)kvp_rows_next(&raw->it, &raw->run); /* the part says that there is one */
		raw->row = 0;
	}
	slot = raw->run.src_slot + raw->row * raw->run.src_step;
	return pool->fd_maps[entry->fd_idx] + kvp_entry_row(entry, raw->run.src_page, slot) +
	       raw->src_off;
}

/* The sums lie in a pack slot until they are sent; false: there is none now. */
static bool have_tail(struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;
	struct kvp_lane *lane = tx->lane;

	if (piece->tail)
		return true;

	piece->tail = kvp_ring_take(&lane->pack, tx->pool->order->owner_uid, lane->now_ns);
	if (!piece->tail) {
		lane->counts.slot_waits++;
		return false;
	}
	piece->tail->user = tx;
	kvp_slot_dirty(piece->tail, piece->payload);
	kvp_tx_sums(piece, piece->tail->data + piece->bytes);
	return true;
}

/* The last message of a piece. */
static bool give_tail(struct kvp_tx_piece *piece, struct kvp_raw_cursor *raw)
{
	uint64_t at = kvp_sums_offset(piece->bytes);

	if (piece->tail && !kvp_tx_give(piece, piece->tail->data + at, at, piece->payload - at))
		return false;
	raw->piece = NULL;
	return true;
}

/* Bytes that are not rows. */
static bool give_blob(struct kvp_tx_piece *piece, struct kvp_raw_cursor *raw)
{
	const uint8_t *from =
		kvp_tx_blob(piece->leg->tx, piece->chunk->order, piece->kind, piece->segment) +
		piece->start;

	if (raw->offset == 0 && !kvp_tx_give(piece, from, 0, piece->bytes))
		return false;
	raw->offset = piece->bytes;
	return give_tail(piece, raw);
}

bool kvp_tx_raw(struct kvp_tx_piece *piece)
{
	struct kvp_lane *lane = piece->leg->tx->lane;
	struct kvp_raw_cursor *raw = &piece->leg->link->raw;

	if (raw->piece != piece)
		*raw = (struct kvp_raw_cursor){ .piece = piece };
	if (piece->payload > piece->bytes && !have_tail(piece))
		return false;
	if (piece->kind != KVP_WIRE_ROWS)
		return give_blob(piece, raw);
	for (;;) {
		if (raw->offset == raw->part_end && !next_part(piece, raw))
			break;
		if (!kvp_tx_give(piece, row_at(piece, raw), raw->offset, raw->row_bytes))
			return false;
		raw->offset += raw->row_bytes;
		raw->row++;
		lane->counts.raw_rows++;
		kvp_board_add(&piece->leg->tx->order->board->raw_rows, 1);
	}
	return give_tail(piece, raw);
}
