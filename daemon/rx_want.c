/* SPDX-License-Identifier: Apache-2.0 */

/* What a receiver asks of every want. Nothing that the peer says is used before it was tested here.
 */

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

#define ORDER KVP__STATUS__STATUS_ORDER
#define MISMATCH KVP__STATUS__STATUS_MISMATCH
#define PROTOCOL KVP__STATUS__STATUS_PROTOCOL

#define REFUSE(leg, status, fmt, ...) \
	(kvp_rx_fail((leg)->rx, (status), "sender %u: " fmt, (leg)->sender, __VA_ARGS__), -EPROTO)

static bool set_empty(const uint64_t *set)
{
	uint64_t any = 0;

	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++)
		any |= set[i];
	return any == 0;
}

/* Each entry of the set goes on where it has ended. */
static int check_start(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	uint64_t end = leg->rx->order->end;

	if (want->tokens == 0)
		return 0;
	if (want->start > end || want->tokens > end - want->start)
		return REFUSE(leg, ORDER,
			      "seq %u: tokens [%" PRIu64 ", + %" PRIu64 ") end past %" PRIu64,
			      want->seq, want->start, want->tokens, end);

	for (uint32_t i = 0; i < leg->geom.n_src; i++) {
		if (kvp_mask_has(want->entry_set, i) && leg->wanted[i] != want->start)
			return REFUSE(leg, ORDER,
				      "seq %u: start %" PRIu64
				      ", but entry %u has ended at %" PRIu64,
				      want->seq, want->start, i, leg->wanted[i]);
	}
	return 0;
}

/* After the last chunk each entry that takes part has reached the end. */
static int check_last(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	uint64_t end = leg->rx->order->end;

	for (uint32_t i = 0; want->last && i < leg->geom.n_src; i++) {
		uint64_t to = leg->wanted[i];

		if (!kvp_mask_has(leg->geom.src_mask, i))
			continue;
		if (want->tokens && kvp_mask_has(want->entry_set, i))
			to = want->start + want->tokens;
		if (to != end)
			return REFUSE(leg, ORDER,
				      "seq %u is the last, but entry %u ends at %" PRIu64
				      ", not %" PRIu64,
				      want->seq, i, to, end);
	}
	return 0;
}

static int check_set(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++) {
		uint64_t extra = want->entry_set[i] & ~leg->geom.src_mask[i];

		if (extra)
			return REFUSE(leg, MISMATCH,
				      "seq %u: entry set has entry %u, which takes no part",
				      want->seq, i * 64 + (uint32_t)__builtin_ctzll(extra));
	}
	return 0;
}

/* The first want of a chunk. */
static int begin_chunk(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	struct kvp_rx_chunk *chunk = &leg->chunk;
	uint64_t n_rows;

	if (leg->last_seen)
		return REFUSE(leg, ORDER, "seq %u after the last", want->seq);
	if (want->seq != leg->seq)
		return REFUSE(leg, ORDER, "seq %u, expected %u", want->seq, leg->seq);
	if (want->last > 1)
		return REFUSE(leg, PROTOCOL, "seq %u: last is %u, at most 1", want->seq,
			      want->last);
	if (check_set(leg, want) < 0 || check_start(leg, want) < 0 || check_last(leg, want) < 0)
		return -EPROTO;

	n_rows = set_empty(want->entry_set) ? 0 : KVP_DIV_UP(want->tokens, leg->piece_tokens);
	if (want->pieces == 0 || want->pieces < n_rows)
		return REFUSE(leg, PROTOCOL, "seq %u: %u pieces, but its rows take %" PRIu64,
			      want->seq, want->pieces, n_rows);

	*chunk = (struct kvp_rx_chunk){
		.start = want->start,
		.tokens = want->tokens,
		.n_pieces = want->pieces,
		.n_rows = (uint32_t)n_rows,
		.last = want->last,
	};
	memcpy(chunk->set, want->entry_set, sizeof(chunk->set));
	for (uint32_t i = 0; want->tokens && i < leg->geom.n_src; i++)
		if (kvp_mask_has(chunk->set, i))
			leg->wanted[i] = want->start + want->tokens;
	return 0;
}

/* Further wants of a chunk say the same of it. */
static int same_chunk(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	const struct kvp_rx_chunk *chunk = &leg->chunk;

	if (want->seq != leg->seq || want->piece != leg->piece)
		return REFUSE(leg, ORDER, "seq %u piece %u, expected seq %u piece %u", want->seq,
			      want->piece, leg->seq, leg->piece);
	if (want->start != chunk->start || want->tokens != chunk->tokens ||
	    want->pieces != chunk->n_pieces || want->last != chunk->last ||
	    memcmp(want->entry_set, chunk->set, sizeof(chunk->set)) != 0)
		return REFUSE(leg, PROTOCOL, "seq %u piece %u describes another chunk than piece 0",
			      want->seq, want->piece);
	return 0;
}

static int check_rows(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
		      struct kvp_rx_piece *piece)
{
	uint64_t skip = (uint64_t)want->piece * leg->piece_tokens;
	uint32_t n_parts;
	uint64_t bytes;

	piece->start = want->start + skip;
	piece->tokens = (uint32_t)KVP_MIN(want->tokens - skip, (uint64_t)leg->piece_tokens);
	if (leg->local) /* nothing lies in a slot */
		return 0;
	bytes = kvp_piece_layout(&leg->geom.geom, want->entry_set, piece->start, piece->tokens,
				 NULL, &n_parts);
	if (want->bytes != bytes)
		return REFUSE(leg, MISMATCH,
			      "seq %u piece %u has %" PRIu64 " bytes, here it takes %" PRIu64,
			      want->seq, want->piece, want->bytes, bytes);
	return 0;
}

static uint32_t segment_index(const struct kvp_order_rx *order, uint32_t id)
{
	for (uint32_t i = 0; i < order->n_segments; i++)
		if (order->segments[i].id == id)
			return i;
	return UINT32_MAX;
}

/* Bytes of a segment or the meta: in order, once, from one sender. */
static int check_blob(struct kvp_rx_leg *leg, const struct kvp_wire_want *want, uint32_t idx)
{
	struct kvp_rx_blob *blob = &leg->rx->blobs[idx];
	const char *what = idx == leg->rx->order->n_segments ? "meta" : "segment";

	if (blob->sender != UINT32_MAX && (blob->sender != leg->sender || leg->open_segment != idx))
		return REFUSE(leg, ORDER, "%s %u comes a second time (first from sender %u)", what,
			      want->segment, blob->sender);
	if (want->total != blob->total)
		return REFUSE(leg, MISMATCH, "%s %u has %" PRIu64 " bytes, expected %" PRIu64, what,
			      want->segment, want->total, blob->total);
	if (want->offset != blob->wanted || want->bytes > blob->total - blob->wanted ||
	    (want->bytes == 0) != (blob->total == 0))
		return REFUSE(leg, ORDER,
			      "%s %u: bytes [%" PRIu64 ", + %" PRIu64 "), expected from %" PRIu64
			      " up to %" PRIu64,
			      what, want->segment, want->offset, want->bytes, blob->wanted,
			      blob->total);

	blob->sender = leg->sender;
	blob->wanted += want->bytes;
	leg->open_segment = blob->wanted < blob->total ? idx : UINT32_MAX;
	return 0;
}

static int check_segment(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
			 struct kvp_rx_piece *piece)
{
	piece->segment = segment_index(leg->rx->order, want->segment);
	if (piece->segment == UINT32_MAX)
		return REFUSE(leg, MISMATCH, "segment %u is not expected", want->segment);
	return check_blob(leg, want, piece->segment);
}

static int check_meta(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
		      struct kvp_rx_piece *piece)
{
	struct kvp_rx *rx = leg->rx;
	uint32_t idx = rx->order->n_segments;

	if (rx->order->meta_from < 0 || (uint32_t)rx->order->meta_from != leg->sender ||
	    !rx->order->meta)
		return REFUSE(leg, MISMATCH, "meta from this sender, expected from %d",
			      rx->order->meta_from);
	if (want->total > KVP_LANE_META_MAX)
		return REFUSE(leg, MISMATCH, "meta of %" PRIu64 " bytes, at most %u", want->total,
			      KVP_LANE_META_MAX);
	if (rx->blobs[idx].sender == UINT32_MAX)
		rx->blobs[idx].total = want->total;
	piece->segment = idx;
	return check_blob(leg, want, idx);
}

static int check_piece(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
		       struct kvp_rx_piece *piece)
{
	bool rows = want->piece < leg->chunk.n_rows;

	if (!leg->local &&
	    (want->bytes > leg->rx->lane->land.slot_bytes ||
	     kvp_lane_payload(&leg->geom, want->bytes) > leg->rx->lane->land.slot_bytes))
		return REFUSE(leg, MISMATCH,
			      "seq %u piece %u has %" PRIu64 " bytes, slots have %" PRIu64,
			      want->seq, want->piece, want->bytes, leg->rx->lane->land.slot_bytes);
	if (rows != (want->kind == KVP_WIRE_ROWS))
		return REFUSE(leg, PROTOCOL, "seq %u piece %u of %u has kind %u, %u have rows",
			      want->seq, want->piece, want->pieces, want->kind, leg->chunk.n_rows);
	if (leg->open_segment != UINT32_MAX && want->kind != KVP_WIRE_SEGMENT &&
	    want->kind != KVP_WIRE_META)
		return REFUSE(leg, ORDER, "seq %u piece %u comes within a segment", want->seq,
			      want->piece);

	piece->kind = want->kind;
	piece->start = want->offset;
	piece->bytes = want->bytes;
	piece->payload = leg->local ? want->bytes : kvp_lane_payload(&leg->geom, want->bytes);
	memcpy(piece->set, want->entry_set, sizeof(piece->set));
	switch (want->kind) {
	case KVP_WIRE_ROWS:
		return check_rows(leg, want, piece);
	case KVP_WIRE_SEGMENT:
		return check_segment(leg, want, piece);
	case KVP_WIRE_META:
		return check_meta(leg, want, piece);
	case KVP_WIRE_EMPTY:
		if (want->bytes == 0 && want->pieces == 1)
			return 0;
		return REFUSE(leg, PROTOCOL,
			      "seq %u: an empty piece of %" PRIu64 " bytes, one of %u", want->seq,
			      want->bytes, want->pieces);
	default:
		return REFUSE(leg, PROTOCOL, "piece kind %u is unknown", want->kind);
	}
}

int kvp_rx_accept(struct kvp_rx_leg *leg, const struct kvp_wire_want *want,
		  struct kvp_rx_piece *piece)
{
	int r = leg->piece == 0 && want->piece == 0 ? begin_chunk(leg, want)
						    : same_chunk(leg, want);

	if (r < 0)
		return r;
	r = check_piece(leg, want, piece);
	if (r < 0)
		return r;

	leg->piece++;
	if (leg->piece < leg->chunk.n_pieces)
		return 0;

	if (leg->open_segment != UINT32_MAX)
		return REFUSE(leg, ORDER, "seq %u ends within a segment", want->seq);
	leg->piece = 0;
	leg->seq++;
	leg->last_seen = leg->chunk.last;
	return 0;
}
