/* SPDX-License-Identifier: Apache-2.0 */

/* How chunks are cut into pieces for a leg, and the slots that pieces are packed into. */

#include <errno.h>
#include <string.h>

#include "daemon/copy.h"
#include "daemon/lane_impl.h"
#include "proto/util.h"

/* Source rows of a local piece: enough to make the checks of a piece cheap, few enough that a turn
 * stays short. */
#define LOCAL_BYTES UINT64_C(2097152)
/* On a GPU: a chunk of most models in one launch, since each begins and ends with idle
 * multiprocessors; but a quarter of a millisecond at most, for which others wait. */
#define LOCAL_GPU_BYTES UINT64_C(67108864)
#define LOCAL_GPU_CHUNK UINT64_C(16384)
#define LOCAL_GPU_CHUNK_BYTES UINT64_C(536870912)

/* ---- cutting --------------------------------------------------------------------------------- */

static uint64_t gpu_tokens(uint64_t token_bytes)
{
	const uint64_t chunk = KVP_MIN(LOCAL_GPU_CHUNK_BYTES / token_bytes, LOCAL_GPU_CHUNK);

	return KVP_MAX(LOCAL_GPU_BYTES / token_bytes, chunk);
}

uint32_t kvp_tx_local_tokens(struct kvp_tx *tx)
{
	const struct kvp_order_pool *pool = tx->pool->order;
	uint64_t token = 0, tokens;
	uint32_t page = 1;

	for (uint32_t i = 0; i < pool->n_entries; i++) {
		if (pool->entries[i].klass == KVP_CLASS_BLOB)
			continue;
		token += pool->entries[i].row_bytes;
		page = KVP_MAX(page, pool->entries[i].rows_per_page);
	}
	token = KVP_MAX(token, UINT64_C(1));
	tx->token_bytes = token;
	tokens = kvp_lane_on_gpu(tx->lane) ? gpu_tokens(token) : LOCAL_BYTES / token;
	tokens = KVP_MIN(tokens, (uint64_t)KVP_PIECE_TOKENS_MAX);
	if (tokens > page)
		tokens -= tokens % page; /* whole pages make long runs */
	return (uint32_t)KVP_MAX(tokens, UINT64_C(1));
}

/* The entries of the chunk that take part in the leg; false: none. */
static bool leg_set(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk,
		    uint64_t *set)
{
	uint64_t any = 0;

	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++) {
		set[i] = chunk->entry_set[i] & leg->order->leg.src_mask[i];
		any |= set[i];
	}
	return any != 0;
}

static uint32_t piece_tokens(const struct kvp_tx_leg *leg)
{
	return leg->local ? leg->tx->local_tokens : leg->order->leg.piece_tokens;
}

static uint64_t row_pieces(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk)
{
	uint64_t set[KVP_LANE_MASK_WORDS];

	return leg_set(leg, chunk, set) ? KVP_DIV_UP(chunk->tokens, piece_tokens(leg)) : 0;
}

static uint64_t blob_pieces(const struct kvp_tx_leg *leg, uint64_t bytes)
{
	return KVP_MAX(KVP_DIV_UP(bytes, leg->slot_bytes), UINT64_C(1));
}

static bool leg_expects(const struct kvp_tx_leg *leg, uint32_t segment_id)
{
	if (!leg->order->segments)
		return true;

	for (uint32_t i = 0; i < leg->order->n_segments; i++)
		if (leg->order->segments[i] == segment_id)
			return true;
	return false;
}

uint64_t kvp_tx_pieces(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk)
{
	uint64_t n = row_pieces(leg, chunk);

	for (uint32_t i = 0; i < chunk->n_segments; i++)
		if (leg_expects(leg, chunk->segments[i].id))
			n += blob_pieces(leg, chunk->segments[i].bytes);
	if (leg->order->wants_meta && chunk->meta)
		n += blob_pieces(leg, chunk->meta_bytes);
	return KVP_MAX(n, UINT64_C(1));
}

/* The `skip`th slotful of a segment or the meta. */
static void describe_blob(const struct kvp_tx_leg *leg, uint64_t total, uint64_t skip,
			  struct kvp_wire_want *want)
{
	want->offset = skip * leg->slot_bytes;
	want->total = total;
	want->bytes = KVP_MIN(total - want->offset, leg->slot_bytes);
}

static void describe_rest(const struct kvp_tx_leg *leg, uint64_t idx, struct kvp_wire_want *want,
			  uint32_t *segment)
{
	const struct kvp_order_chunk *chunk = leg->chunk->order;

	for (uint32_t i = 0; i < chunk->n_segments; i++) {
		uint64_t n = blob_pieces(leg, chunk->segments[i].bytes);

		if (!leg_expects(leg, chunk->segments[i].id))
			continue;
		if (idx < n) {
			want->kind = KVP_WIRE_SEGMENT;
			want->segment = chunk->segments[i].id;
			*segment = i;
			describe_blob(leg, chunk->segments[i].bytes, idx, want);
			return;
		}
		idx -= n;
	}
	if (leg->order->wants_meta && chunk->meta) {
		want->kind = KVP_WIRE_META;
		describe_blob(leg, chunk->meta_bytes, idx, want);
	} else {
		want->kind = KVP_WIRE_EMPTY;
	}
}

void kvp_tx_describe(const struct kvp_tx_leg *leg, struct kvp_wire_want *want, uint32_t *segment)
{
	const struct kvp_order_chunk *chunk = leg->chunk->order;
	uint64_t n_rows = row_pieces(leg, chunk);
	uint64_t skip = (uint64_t)leg->piece * piece_tokens(leg);
	uint32_t n_parts;

	*segment = 0;
	*want = (struct kvp_wire_want){
		.head = kvp_wire_head(KVP_WIRE_WANT),
		.generation = leg->order->generation,
		.sender = leg->tx->order->sender,
		.seq = chunk->seq,
		.start = chunk->start,
		.tokens = chunk->tokens,
		.pieces = leg->n_pieces,
		.piece = leg->piece,
		.last = chunk->last,
		.direct = kvp_tx_can_direct(leg),
	};
	(void)leg_set(leg, chunk, want->entry_set);
	if (leg->piece >= n_rows) {
		describe_rest(leg, leg->piece - n_rows, want, segment);
		return;
	}

	want->kind = KVP_WIRE_ROWS;
	if (!leg->local) /* local rows do not lie in a slot */
		want->bytes = kvp_piece_layout(
			&leg->order->leg.geom, want->entry_set, chunk->start + skip,
			(uint32_t)KVP_MIN(chunk->tokens - skip, (uint64_t)piece_tokens(leg)), NULL,
			&n_parts);
}

/* ---- piece objects --------------------------------------------------------------------------- */

struct kvp_tx_piece *kvp_tx_piece_take(struct kvp_lane *lane)
{
	struct kvp_tx_piece *piece = TAILQ_FIRST(&lane->tx_free);

	if (piece)
		TAILQ_REMOVE(&lane->tx_free, piece, order);
	else if (lane->tx_fresh < KVP_LANE_TX_PIECES)
		piece = &lane->tx_pool[lane->tx_fresh++];
	else
		return NULL;

	lane->tx_live++;
	memset(piece, 0, sizeof(*piece));
	piece->nonce = kvp_lane_token(lane) >> KVP_LANE_TX_BITS;
	return piece;
}

void kvp_tx_piece_put(struct kvp_lane *lane, struct kvp_tx_piece *piece)
{
	lane->tx_live--;
	piece->leg = NULL;
	TAILQ_INSERT_HEAD(&lane->tx_free, piece, order);
}

struct kvp_tx_piece *kvp_tx_piece_find(struct kvp_lane *lane, uint64_t cookie)
{
	uint32_t idx = (uint32_t)cookie & (KVP_LANE_TX_PIECES - 1);
	struct kvp_tx_piece *piece;

	if (idx >= lane->tx_fresh)
		return NULL;

	piece = &lane->tx_pool[idx];
	return piece->leg && !piece->leg->dropped && piece->nonce == cookie >> KVP_LANE_TX_BITS
		       ? piece
		       : NULL;
}

uint64_t kvp_tx_piece_cookie(const struct kvp_lane *lane, const struct kvp_tx_piece *piece)
{
	return piece->nonce << KVP_LANE_TX_BITS | (uint64_t)(piece - lane->tx_pool);
}

void kvp_tx_gathered(struct kvp_tx_piece *piece)
{
	if (piece->gathered)
		return;

	piece->gathered = true;
	piece->chunk->to_gather--;
	kvp_board_once(&piece->leg->tx->order->board->first_packed_ns,
		       piece->leg->tx->lane->now_ns);
	kvp_tx_dirty(piece->leg->tx);
}

/* ---- slots ----------------------------------------------------------------------------------- */

const uint8_t *kvp_tx_blob(const struct kvp_tx *tx, const struct kvp_order_chunk *chunk,
			   uint8_t kind, uint32_t segment)
{
	const struct kvp_order_pool *pool = tx->pool->order;
	const struct kvp_entry *entry;

	if (kind == KVP_WIRE_META)
		return chunk->meta;

	entry = &pool->entries[chunk->segments[segment].entry];
	return pool->fd_maps[entry->fd_idx] + entry->base + chunk->segments[segment].offset;
}

void kvp_tx_sides(const struct kvp_tx_leg *leg, const struct kvp_order_chunk *chunk,
		  struct kvp_side *sides)
{
	for (uint32_t i = 0; i < KVP_LANE_GROUPS; i++) {
		if (!(leg->groups >> i & 1))
			continue;
		sides[i] = leg->order->leg.geom.src_sides[i];
		sides[i].pos0 = chunk->sides[i].pos0;
		sides[i].pages = chunk->sides[i].pages;
		sides[i].n_pages = chunk->sides[i].n_pages;
	}
}

/* What lies between two parts is sent along: it must not be what was there before. On a device the
 * zeroes go out with the launch of the gather, or before it: its ticket is theirs, too. */
static int fill_gaps(struct kvp_lane *lane, const struct kvp_copy_piece *piece, uint8_t *slot)
{
	for (uint32_t i = 0; i + 1 < piece->n_parts; i++) {
		uint64_t end = piece->parts[i].offset + piece->parts[i].bytes;
		uint64_t bytes = piece->parts[i + 1].offset - end;
		uint64_t ticket;
		int r = 0;

		if (!lane->rings.device)
			memset(slot + end, 0, bytes);
		else if (bytes > 0)
			r = kvp_mover_zero(&lane->mover, slot + end, bytes, &ticket);
		if (r < 0)
			return r;
	}
	return 0;
}

/* What a piece of rows is to a mover; its parts go to `parts`, its sides to `sides`. */
static void describe_rows(const struct kvp_tx_piece *rows, struct kvp_side *sides,
			  struct kvp_part *parts, struct kvp_copy_piece *piece)
{
	const struct kvp_tx_leg *leg = rows->leg;
	uint64_t set[KVP_LANE_MASK_WORDS];

	*piece = (struct kvp_copy_piece){
		.leg = &leg->order->leg.geom,
		.pool = { leg->tx->pool->order->fd_maps, sides },
		.start = rows->start,
		.tokens = rows->tokens,
		.parts = parts,
	};
	(void)leg_set(leg, rows->chunk->order, set);
	kvp_tx_sides(leg, rows->chunk->order, sides);
	(void)kvp_piece_layout(piece->leg, set, piece->start, rows->tokens, parts, &piece->n_parts);
}

/* Fills the slot, or has the GPU do it; the slot has the ticket then. As the calls of a mover. */
static int fill_slot(struct kvp_tx_piece *rows, struct kvp_slot *slot)
{
	struct kvp_lane *lane = rows->leg->tx->lane;
	struct kvp_side sides[KVP_LANE_GROUPS];
	struct kvp_copy_piece piece;
	const uint8_t *blob;
	int r;

	if (rows->kind != KVP_WIRE_ROWS) {
		blob = kvp_tx_blob(rows->leg->tx, rows->chunk->order, rows->kind, rows->segment) +
		       rows->start;
		if (rows->kind == KVP_WIRE_SEGMENT)
			return kvp_mover_bytes(&lane->mover, blob, slot->data, rows->bytes,
					       &slot->ticket);
		/* The meta is host memory. */
		memcpy(kvp_slot_place(slot, rows->kind), blob, rows->bytes);
		return 0;
	}
	describe_rows(rows, sides, lane->parts, &piece);
	r = fill_gaps(lane, &piece, slot->data);
	return r < 0 ? r : kvp_mover_gather(&lane->mover, &piece, slot->data, &slot->ticket);
}

void kvp_tx_not_ahead(struct kvp_tx_piece *piece)
{
	if (!piece->ahead)
		return;
	piece->ahead = false;
	piece->leg->tx->lane->ahead--;
	piece->leg->link->share->ahead--;
}

void kvp_tx_slot_put(struct kvp_tx_piece *piece)
{
	struct kvp_lane *lane = piece->leg->tx->lane;

	if (piece->tail)
		kvp_ring_put(&lane->pack, piece->tail);
	piece->tail = NULL;
	if (!piece->slot)
		return;

	if (piece->gathering) {
		piece->gathering = false;
		piece->leg->tx->n_moving--;
		TAILQ_REMOVE(&lane->gathering, piece, moving);
	}
	kvp_ring_put(&lane->pack, piece->slot);
	piece->slot = NULL;
	piece->leg->link->share->pack_slots--;
	kvp_tx_not_ahead(piece);
}

void kvp_tx_is_ahead(struct kvp_tx_piece *piece)
{
	piece->ahead = true;
	piece->leg->tx->lane->ahead++;
	piece->leg->link->share->ahead++;
}

/* The piece uses the slot from now on; without a grant it was packed ahead. */
static void use_slot(struct kvp_tx_piece *piece, struct kvp_slot *slot)
{
	struct kvp_link *link = piece->leg->link;

	piece->slot = slot;
	link->share->pack_slots++;
	if (piece->state == KVP_TX_WANTED) {
		TAILQ_REMOVE(&link->wanted, piece, queue);
		kvp_tx_is_ahead(piece);
	} else if (piece->state == KVP_TX_GRANTED) {
		TAILQ_REMOVE(&link->granted, piece, queue);
		TAILQ_INSERT_TAIL(&link->packed, piece, queue);
	}
	if (kvp_mover_over(&link->lane->mover, slot->ticket)) {
		kvp_tx_gathered(piece);
		return;
	}
	piece->gathering = true;
	piece->leg->tx->n_moving++;
	TAILQ_INSERT_TAIL(&link->lane->gathering, piece, moving);
	kvp_tx_dirty(piece->leg->tx);
}

/* What has landed may name a chunk that is over, in whose place another one is by now. */
static bool same_chunk(const struct kvp_tx_piece *piece, const struct kvp_tx_piece *other)
{
	return !piece->landed && piece->chunk == other->chunk;
}

/* Other legs that wait for the same bytes use the slot too. */
static void share_slot(struct kvp_tx_piece *piece)
{
	struct kvp_lane *lane = piece->leg->tx->lane;
	struct kvp_tx_leg *leg = piece->leg->alike;
	struct kvp_tx_piece *other;

	for (; leg; leg = leg->alike_next) {
		TAILQ_FOREACH (other, &leg->order_list, order)
			if (same_chunk(other, piece) && other->idx == piece->idx)
				break;
		if (!other || other->slot || other->state == KVP_TX_SENT)
			continue;
		if (other->state == KVP_TX_WANTED && lane->ahead >= lane->pack.n / 2)
			continue;
		piece->slot->refs++;
		use_slot(other, piece->slot);
		lane->counts.shared++;
	}
}

static void count_repack(const struct kvp_tx_piece *piece)
{
	struct kvp_tx_leg *first = piece->leg->alike;
	uint64_t at = (uint64_t)piece->chunk->order->seq << 32 | (piece->idx + 1);

	if (!first->alike_next)
		return;
	if (at <= first->packed)
		piece->leg->tx->lane->counts.repacked++;
	else
		first->packed = at;
}

/* Pieces that are packed in one pass over their source rows. */
struct pack {
	struct kvp_tx_piece *pieces[KVP_GATHER_TOGETHER];
	struct kvp_slot *slots[KVP_GATHER_TOGETHER];
	uint32_t n;
};

/* Puts the piece into the pack; false: it gets no slot now. */
static bool pack_add(struct pack *pack, struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;
	struct kvp_lane *lane = tx->lane;
	const struct kvp_share *share = piece->leg->link->share;
	uint32_t most = KVP_MAX(lane->pack.n / 4, 1u);
	struct kvp_slot *slot;

	/* What is packed ahead waits for grants, and those may wait for granted pieces. */
	if (piece->state != KVP_TX_WANTED)
		most += share->ahead;
	if (share->pack_slots + pack->n >= most)
		return false;

	slot = kvp_ring_take(&lane->pack, tx->pool->order->owner_uid, lane->now_ns);
	if (!slot) {
		lane->counts.slot_waits += pack->n == 0;
		return false;
	}
	slot->user = tx;
	kvp_slot_dirty(slot, piece->payload);
	pack->pieces[pack->n] = piece;
	pack->slots[pack->n++] = slot;
	return true;
}

/* The piece of the leg that has the same tokens, if it is to be packed too. */
static struct kvp_tx_piece *same_tokens(const struct kvp_tx_leg *leg, const struct pack *pack)
{
	const struct kvp_tx_piece *first = pack->pieces[0];
	const struct kvp_lane *lane = leg->tx->lane;
	struct kvp_tx_piece *piece;

	/* Legs that pack alike share one slot anyway. */
	for (uint32_t i = 0; i < pack->n; i++)
		if (leg->alike == pack->pieces[i]->leg->alike)
			return NULL;
	if (leg->link != first->leg->link)
		return NULL;

	TAILQ_FOREACH (piece, &leg->order_list, order)
		if (same_chunk(piece, first) && piece->kind == KVP_WIRE_ROWS &&
		    piece->start == first->start)
			break;
	if (!piece || piece->tokens != first->tokens || piece->bytes == 0 || piece->slot ||
	    piece->state == KVP_TX_SENT)
		return NULL;
	if (piece->state == KVP_TX_WANTED && lane->ahead + pack->n >= lane->pack.n / 2)
		return NULL;
	return piece;
}

/* Destinations that own other tokens of the same pages: read once, these are still in the cache. */
static void pack_others(struct pack *pack)
{
	struct kvp_tx *tx = pack->pieces[0]->leg->tx;
	struct kvp_tx_piece *piece;
	struct kvp_tx_leg *leg;

	TAILQ_FOREACH (leg, &tx->legs, tx_link) {
		if (pack->n == KVP_GATHER_TOGETHER)
			return;
		piece = same_tokens(leg, pack);
		if (piece && !pack_add(pack, piece))
			return;
	}
}

static int fill_together(const struct pack *pack)
{
	struct kvp_lane *lane = pack->pieces[0]->leg->tx->lane;
	struct kvp_side sides[KVP_GATHER_TOGETHER][KVP_LANE_GROUPS];
	struct kvp_copy_piece pieces[KVP_GATHER_TOGETHER];
	void *places[KVP_GATHER_TOGETHER];

	if (pack->n == 1)
		return fill_slot(pack->pieces[0], pack->slots[0]);

	for (uint32_t i = 0; i < pack->n; i++) {
		describe_rows(pack->pieces[i], sides[i], lane->parts + i * KVP_PAIRS_MAX,
			      &pieces[i]);
		(void)fill_gaps(lane, &pieces[i], pack->slots[i]->data); /* not on a device */
		places[i] = pack->slots[i]->data;
	}
	kvp_gather_together(pieces, places, pack->n);
	lane->counts.together += pack->n;
	return 0;
}

/* Behind the bytes of a piece stand its sums, where both ends want them. */
static void piece_filled(struct kvp_tx_piece *piece, struct kvp_slot *slot)
{
	uint8_t *place = kvp_slot_place(slot, piece->kind);

	if (piece->payload > piece->bytes)
		kvp_tx_sums(piece, place + piece->bytes);
	kvp_lane_flip(piece->leg->tx->lane, KVP_HOLD_FLIP_PACK, place);
}

uint64_t kvp_tx_pack(struct kvp_tx_piece *piece)
{
	struct kvp_tx *tx = piece->leg->tx;
	struct kvp_lane *lane = tx->lane;
	struct pack pack = { .n = 0 };
	uint64_t begin_ns = kvp_lane_now(), bytes = 0;
	int r;

	if (!kvp_mover_ready(&lane->mover) || !pack_add(&pack, piece))
		return 0;
	if (piece->kind == KVP_WIRE_ROWS && !kvp_lane_on_gpu(lane))
		pack_others(&pack);

	r = fill_together(&pack);
	if (r < 0) {
		kvp_ring_put(&lane->pack, pack.slots[0]); /* a GPU's: it was alone */
		if (r != -EAGAIN)
			kvp_tx_move_failed(tx, r);
		return 0;
	}
	for (uint32_t i = 0; i < pack.n; i++)
		piece_filled(pack.pieces[i], pack.slots[i]);
	kvp_board_add(&tx->order->board->gather_ns, kvp_lane_now() - begin_ns);
	for (uint32_t i = 0; i < pack.n; i++) {
		use_slot(pack.pieces[i], pack.slots[i]);
		bytes += pack.pieces[i]->bytes;
		if (piece->kind != KVP_WIRE_ROWS)
			continue;
		count_repack(pack.pieces[i]);
		share_slot(pack.pieces[i]);
	}
	return bytes;
}
