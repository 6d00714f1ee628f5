/* SPDX-License-Identifier: Apache-2.0 */

/* Destination ends: their life, what has arrived, and when they are complete. */

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

static struct kvp_rx *rx_find(struct kvp_lane *lane, uint64_t generation)
{
	struct kvp_table_node *node = kvp_table_find(&lane->rxs, generation);

	return node ? KVP_CONTAINER_OF(node, struct kvp_rx, node) : NULL;
}

static struct kvp_rx_leg *leg_find(struct kvp_rx *rx, uint32_t sender)
{
	struct kvp_rx_leg *leg;

	TAILQ_FOREACH (leg, &rx->legs, rx_link)
		if (leg->sender == sender)
			return leg;
	return NULL;
}

void kvp_rx_dirty(struct kvp_rx *rx)
{
	if (rx->dirty)
		return;

	rx->dirty = true;
	TAILQ_INSERT_TAIL(&rx->lane->dirty_rxs, rx, dirty_link);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

struct kvp_rx_piece *kvp_rx_piece_take(struct kvp_lane *lane)
{
	struct kvp_rx_piece *piece = TAILQ_FIRST(&lane->rx_free);

	if (piece)
		TAILQ_REMOVE(&lane->rx_free, piece, order);
	else if (lane->rx_fresh < KVP_LANE_RX_PIECES)
		piece = &lane->rx_pool[lane->rx_fresh++];
	else
		return NULL;

	lane->rx_live++;
	memset(piece, 0, sizeof(*piece));
	return piece;
}

void kvp_rx_piece_put(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	lane->rx_live--;
	piece->token = 0;
	piece->direct = false;
	TAILQ_INSERT_HEAD(&lane->rx_free, piece, order);
}

void kvp_rx_slot_put(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	if (!piece->slot)
		return;

	kvp_ring_put(&lane->land, piece->slot);
	piece->slot = NULL;
	piece->share->land_slots--;
	kvp_share_put(lane, piece->share);
	piece->share = NULL;
}

static void unqueue(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece)
{
	TAILQ_REMOVE(&leg->queued, piece, queue);
	leg->n_queued--;
	leg->rx->n_queued--;
	leg->link->wants_queued--;
}

/* A leg without wants is not served. */
void kvp_rx_share_forget(struct kvp_rx_leg *leg)
{
	struct kvp_share *share;

	if (!leg->share_queued)
		return;

	share = leg->link->share;
	leg->share_queued = false;
	TAILQ_REMOVE(&share->legs, leg, share_link);
	if (TAILQ_EMPTY(&share->legs) && share->queued) {
		share->queued = false;
		TAILQ_REMOVE(&leg->rx->lane->shares, share, link);
	}
}

/* Where the sender writes by itself, it may be about to: the slot must not be anyone else's. */
static bool piece_at_risk(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece)
{
	const struct kvp_net_ops *net = leg->rx->lane->config.net;

	if (!net || !net->put || !leg->link || leg->returned)
		return false;

	if (piece->direct) {
		piece->risk = leg->rx;
		leg->rx->n_risk++;
		if (leg->link->telling == piece)
			leg->link->telling = NULL; /* it is never written: RETURN follows */
	}
	piece->state = KVP_RX_AT_RISK;
	piece->leg = NULL;
	piece->link = leg->link;
	piece->generation = leg->rx->node.id;
	piece->sender = leg->sender;
	TAILQ_INSERT_TAIL(&leg->link->at_risk, piece, queue);
	return true;
}

void kvp_rx_risk_over(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	TAILQ_REMOVE(&piece->link->at_risk, piece, queue);
	kvp_rx_direct_over(piece->link, piece);
	kvp_rx_slot_put(lane, piece);
	kvp_rx_piece_put(lane, piece);
}

void kvp_rx_safe(struct kvp_link *link, uint64_t generation, uint32_t sender)
{
	struct kvp_rx_piece *piece, *next;

	for (piece = TAILQ_FIRST(&link->at_risk); piece; piece = next) {
		next = TAILQ_NEXT(piece, queue);
		if (generation && (piece->generation != generation || piece->sender != sender))
			continue;
		kvp_rx_risk_over(link->lane, piece);
	}
}

/* Takes one piece out of everything. The slot stays while the transport writes into it. */
static void piece_drop(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece)
{
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;

	switch (piece->state) {
	case KVP_RX_QUEUED:
		unqueue(leg, piece);
		break;
	case KVP_RX_GRANTED:
		rx->n_granted--;
		if (piece_at_risk(leg, piece))
			return;
		kvp_rx_direct_over(leg->link, piece);
		break;
	case KVP_RX_HERE:
		rx->n_here--;
		lane->here--;
		TAILQ_REMOVE(&lane->rx_here, piece, queue);
		break;
	case KVP_RX_MOVING: /* the slot is kept until the GPU is done with it */
		rx->n_moving--;
		TAILQ_REMOVE(&lane->scattering, piece, queue);
		break;
	default:
		break;
	}
	piece->leg = NULL;
	if (piece->receiving > 0) {
		piece->state = KVP_RX_ORPHAN;
		return;
	}
	kvp_rx_slot_put(lane, piece);
	kvp_rx_piece_put(lane, piece);
}

/* Drops all that the leg has wanted; LANDED that are not sent yet are dropped by the caller. */
static void leg_drop(struct kvp_rx_leg *leg)
{
	struct kvp_rx_piece *piece;

	if (leg->local)
		kvp_local_forget(leg->rx->lane, NULL, leg);
	while ((piece = TAILQ_FIRST(&leg->order))) {
		TAILQ_REMOVE(&leg->order, piece, order);
		leg->n_order--;
		if (piece->state == KVP_RX_LANDED && !piece->told && leg->link) {
			TAILQ_REMOVE(&leg->link->landed, piece, queue);
			leg->link->n_landed--;
		}
		piece_drop(leg, piece);
	}
	kvp_rx_share_forget(leg);
}

/* LANDED of pieces that have left leg->order already. */
static void leg_untell(struct kvp_rx_leg *leg)
{
	struct kvp_rx_piece *piece, *next;

	if (!leg->link)
		return;

	for (piece = TAILQ_FIRST(&leg->link->landed); piece; piece = next) {
		next = TAILQ_NEXT(piece, queue);
		if (piece->leg != leg)
			continue;
		TAILQ_REMOVE(&leg->link->landed, piece, queue);
		leg->link->n_landed--;
		kvp_rx_piece_put(leg->rx->lane, piece);
	}
}

void kvp_rx_leg_unlink(struct kvp_rx_leg *leg)
{
	leg_drop(leg);
	leg_untell(leg);
	if (!leg->link)
		return;

	if (leg->refuse)
		TAILQ_REMOVE(&leg->link->refusals, leg, refuse_link);
	leg->refuse = false;
	TAILQ_REMOVE(&leg->link->rx_legs, leg, link_link);
	leg->link = NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

KVP_PRINTF(3, 0)
static void rx_fail_v(struct kvp_rx *rx, Kvp__Status status, const char *fmt, va_list args)
{
	char text[KVP_BOARD_TEXT];
	struct kvp_rx_leg *leg;

	(void)vsnprintf(text, sizeof(text), fmt, args); /* cut texts are fine */
	rx->failed = true;
	(void)kvp_board_fail(rx->order->board, rx->lane->config.loop, status, "%s", text);
	TAILQ_FOREACH (leg, &rx->legs, rx_link)
		leg_drop(leg);
	kvp_rx_dirty(rx);
}

void kvp_rx_fail(struct kvp_rx *rx, Kvp__Status status, const char *fmt, ...)
{
	va_list args;

	if (rx->failed || rx->complete)
		return;

	va_start(args, fmt);
	rx_fail_v(rx, status, fmt, args);
	va_end(args);
}

static struct kvp_rx *rx_create(const struct kvp_order_rx *order)
{
	struct kvp_rx *rx = calloc(1, sizeof(*rx));

	if (!rx)
		return NULL;

	rx->blobs = calloc((size_t)order->n_segments + 1, sizeof(*rx->blobs));
	if (!rx->blobs) {
		free(rx);
		return NULL;
	}
	for (uint32_t i = 0; i < order->n_segments; i++)
		rx->blobs[i] = (struct kvp_rx_blob){ .total = order->segments[i].bytes,
						     .sender = UINT32_MAX };
	rx->blobs[order->n_segments].sender = UINT32_MAX;
	rx->blobs_left = order->n_segments + (order->meta_from >= 0);
	TAILQ_INIT(&rx->legs);
	TAILQ_INIT(&rx->windows);
	return rx;
}

void kvp_rx_add(struct kvp_lane *lane, struct kvp_order_rx *order)
{
	struct kvp_lane_pool *pool = kvp_lane_pool_find(lane, order->pool);
	struct kvp_board *board = order->board;
	struct kvp_rx *rx = pool ? rx_create(order) : NULL;

	if (!rx) {
		kvp_lane_refuse_end(lane, &order->order, board, pool);
		return;
	}

	rx->lane = lane;
	rx->order = order;
	rx->pool = pool;
	pool->refs++;
	rx->node.id = board->id;
	(void)kvp_table_add(&lane->rxs, &rx->node); /* generations are never reused */
	atomic_store_explicit(&board->arrived, order->prefix, memory_order_relaxed);
	kvp_rx_dirty(rx);
}

static struct kvp_rx_leg *leg_create(const struct kvp_rx *rx, const struct kvp_order_rx_leg *order)
{
	struct kvp_rx_leg *leg = calloc(1, sizeof(*leg));
	uint32_t n = order->leg.n_src;

	if (!leg)
		return NULL;

	leg->wanted = calloc((size_t)n * 2 + 1, sizeof(*leg->wanted));
	if (!leg->wanted) {
		free(leg);
		return NULL;
	}
	leg->landed = leg->wanted + n;
	for (uint32_t i = 0; i < 2 * n; i++)
		leg->wanted[i] = rx->order->prefix;
	leg->geom = order->leg;
	leg->sender = order->sender;
	leg->open_segment = UINT32_MAX;
	leg->arrived = rx->order->prefix;
	leg->local = order->ep == 0;
	leg->piece_tokens = leg->local ? 0 : order->leg.piece_tokens;
	TAILQ_INIT(&leg->order);
	TAILQ_INIT(&leg->queued);
	return leg;
}

/* What the code of both ends takes for granted. */
bool kvp_lane_geom_fits(const struct kvp_lane_geom *leg)
{
	if (leg->n_src > KVP_LANE_MASK_WORDS * 64 || leg->geom.n_pairs > KVP_PAIRS_MAX ||
	    leg->piece_tokens < 1 || leg->piece_tokens > KVP_PIECE_TOKENS_MAX)
		return false;

	for (uint32_t i = 0; i < leg->geom.n_pairs; i++) {
		uint16_t src = leg->geom.pairs[i].src_entry;

		if (src >= leg->n_src || leg->geom.src[src].group >= KVP_LANE_GROUPS)
			return false;
	}
	return true;
}

void kvp_rx_leg_add(struct kvp_lane *lane, struct kvp_order_rx_leg *order)
{
	struct kvp_rx *rx = rx_find(lane, order->generation);
	struct kvp_link *link = order->ep ? kvp_link_find(lane, order->ep) : NULL;
	struct kvp_rx_leg *leg = NULL;

	if (rx && !leg_find(rx, order->sender) && kvp_lane_geom_fits(&order->leg))
		leg = leg_create(rx, order);
	if (!leg) {
		if (rx)
			kvp_rx_fail(rx, KVP__STATUS__STATUS_NO_MEMORY,
				    "sender %u cannot be added on lane %s", order->sender,
				    lane->config.name);
		kvp_order_free(&order->order);
		return;
	}

	leg->rx = rx;
	leg->link = link;
	if (link) {
		TAILQ_INSERT_TAIL(&link->rx_legs, leg, link_link);
		kvp_direct_pool_want(lane, rx->pool);
	}
	TAILQ_INSERT_TAIL(&rx->legs, leg, rx_link);
	rx->n_legs++;
	free(order);
	kvp_rx_dirty(rx);
}

static void leg_free(struct kvp_rx_leg *leg)
{
	kvp_rx_leg_unlink(leg);
	TAILQ_REMOVE(&leg->rx->legs, leg, rx_link);
	free(leg->geom.block);
	free(leg->wanted);
	free(leg);
}

void kvp_rx_leave(struct kvp_rx *rx)
{
	struct kvp_lane *lane = rx->lane;
	struct kvp_board *board = rx->order->board;

	kvp_lane_pool_put(lane, rx->pool);
	kvp_order_free(&rx->order->order);
	free(rx->blobs);
	free(rx);
	kvp_board_wait(board, KVP_WAITS_NOTHING, lane->now_ns);
	kvp_board_post(board, lane->config.loop, KVP_BOARD_QUIET);
}

void kvp_rx_depart(struct kvp_rx *rx)
{
	struct kvp_lane *lane = rx->lane;

	if (kvp_mover_over(&lane->mover, rx->ticket))
		kvp_rx_leave(rx);
	else
		TAILQ_INSERT_TAIL(&lane->leaving_rxs, rx, dirty_link);
}

/*
 * Quiet at once, or when the GPU has passed what was launched: scatters of the processor run to
 * their end within a turn, and what the transport still writes goes into slots that are kept until
 * it is done. Where senders write into the pool by themselves, when none of them can any more.
 */
void kvp_rx_end(struct kvp_lane *lane, uint64_t generation)
{
	struct kvp_rx *rx = rx_find(lane, generation);
	struct kvp_rx_leg *leg;

	if (!rx)
		return;

	while ((leg = TAILQ_FIRST(&rx->legs)))
		leg_free(leg);
	if (rx->dirty)
		TAILQ_REMOVE(&lane->dirty_rxs, rx, dirty_link);
	kvp_table_remove(&lane->rxs, &rx->node);
	rx->ticket = lane->mover.last;
	if (!kvp_rx_take_back(rx))
		kvp_rx_depart(rx);
}

/* ---- progress -------------------------------------------------------------------------------- */

/* Least position that has landed in every entry of every leg. */
static uint64_t arrived(const struct kvp_rx *rx)
{
	uint64_t least = rx->order->end;
	const struct kvp_rx_leg *leg;

	if (rx->n_legs < rx->order->n_legs)
		return rx->order->prefix;

	TAILQ_FOREACH (leg, &rx->legs, rx_link)
		least = KVP_MIN(least, leg->arrived);
	return least;
}

/* All legs have sent their last piece; what is missing now will never come. */
static void check_missing(struct kvp_rx *rx)
{
	const struct kvp_order_rx *order = rx->order;

	for (uint32_t i = 0; i < order->n_segments; i++) {
		if (!rx->blobs[i].done) {
			kvp_rx_fail(rx, KVP__STATUS__STATUS_COVERAGE,
				    "all senders are done, but segment %u (%" PRIu64
				    " bytes) came from none",
				    order->segments[i].id, order->segments[i].bytes);
			return;
		}
	}
	kvp_rx_fail(rx, KVP__STATUS__STATUS_COVERAGE,
		    "all senders are done, but the meta of sender %d "
		    "did not come",
		    order->meta_from);
}

static void rx_complete(struct kvp_rx *rx)
{
	struct kvp_board *board = rx->order->board;

	if (rx->order->meta_bytes && rx->order->meta_from >= 0)
		*rx->order->meta_bytes = (uint32_t)rx->blobs[rx->order->n_segments].total;
	rx->complete = true;
	kvp_board_post(board, rx->lane->config.loop, KVP_BOARD_COMPLETE);
}

/* What keeps a want without a grant. */
static enum kvp_wait queued_wait(const struct kvp_rx *rx)
{
	const struct kvp_direct_pool *direct = rx->pool->direct;

	if (kvp_lane_held(rx->lane, KVP_HOLD_GRANT))
		return KVP_WAITS_HELD;
	return direct && direct->state == KVP_DIRECT_PENDING &&
			       rx->lane->config.mode == KVP_DATA_DIRECT
		       ? KVP_WAITS_MEMORY
		       : KVP_WAITS_LAND_SLOT;
}

static enum kvp_wait rx_wait(const struct kvp_rx *rx)
{
	if (rx->failed || rx->complete)
		return KVP_WAITS_NOTHING;
	if (rx->n_here && kvp_lane_held(rx->lane, KVP_HOLD_SCATTER))
		return KVP_WAITS_HELD;
	if (rx->n_here || rx->n_moving)
		return KVP_WAITS_GPU;
	if (rx->n_granted)
		return KVP_WAITS_DATA;
	if (rx->n_queued)
		return queued_wait(rx);
	return KVP_WAITS_SENDER;
}

void kvp_rx_settle(struct kvp_rx *rx)
{
	struct kvp_lane *lane = rx->lane;
	struct kvp_board *board = rx->order->board;
	const struct kvp_direct_pool *direct = rx->pool->direct;
	bool pool = direct && direct->state == KVP_DIRECT_UNABLE && rx->unable == direct->why;

	if (rx->unable)
		kvp_rx_fail(rx, KVP__STATUS__STATUS_UNSUPPORTED, "data.mode is direct, but %s%s%s",
			    kvp_why_text(rx->unable), pool ? ": " : "", pool ? direct->err : "");
	if (rx->moved && !rx->failed) {
		atomic_store_explicit(&board->arrived, arrived(rx), memory_order_release);
		kvp_board_progress(board, lane->now_ns);
	}
	if (!rx->failed && !rx->complete && rx->n_finished == rx->order->n_legs) {
		if (rx->blobs_left)
			check_missing(rx);
		else
			rx_complete(rx);
	}
	kvp_board_wait(board, rx_wait(rx), lane->now_ns);
	if (rx->moved)
		kvp_board_post(board, lane->config.loop, 0);
	rx->moved = false;
}

/* ---- messages -------------------------------------------------------------------------------- */

static void leg_refuse(struct kvp_rx_leg *leg, uint64_t cookie)
{
	if (leg->refuse || !leg->link)
		return;

	leg->refuse = true;
	leg->refuse_cookie = cookie;
	leg->refuse_status = leg->rx->order->board->status;
	TAILQ_INSERT_TAIL(&leg->link->refusals, leg, refuse_link);
}

static void leg_queue(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece)
{
	struct kvp_share *share = leg->link->share;
	struct kvp_lane *lane = leg->rx->lane;

	piece->state = KVP_RX_QUEUED;
	TAILQ_INSERT_TAIL(&leg->queued, piece, queue);
	leg->n_queued++;
	leg->rx->n_queued++;
	leg->link->wants_queued++;
	if (!leg->share_queued) {
		leg->share_queued = true;
		TAILQ_INSERT_TAIL(&share->legs, leg, share_link);
	}
	if (!share->queued) {
		share->queued = true;
		TAILQ_INSERT_TAIL(&lane->shares, share, link);
	}
}

/* The windows of wire.h, which a proper sender keeps. */
static bool window_full(struct kvp_rx_leg *leg)
{
	struct kvp_lane *lane = leg->rx->lane;
	uint32_t most = KVP_MAX(lane->config.wants_per_session, KVP_WIRE_EP_WANTS);

	if (leg->n_order < KVP_WIRE_LEG_WINDOW && leg->link->wants_queued < most &&
	    leg->link->n_landed < KVP_LANE_UNTOLD)
		return false;

	lane->counts.want_refused++;
	if (leg->link->n_landed >= KVP_LANE_UNTOLD) {
		kvp_rx_fail(leg->rx, KVP__STATUS__STATUS_LIMIT,
			    "sender %u: a want, but %u answers that its peer does not read, at "
			    "most %u",
			    leg->sender, leg->link->n_landed, KVP_LANE_UNTOLD);
		return true;
	}
	kvp_rx_fail(leg->rx, KVP__STATUS__STATUS_LIMIT,
		    "sender %u: want beyond %u of its leg or %u of its session", leg->sender,
		    KVP_WIRE_LEG_WINDOW, most);
	return true;
}

static int leg_want(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_rx_piece *piece;

	if (window_full(leg))
		return -1;

	piece = kvp_rx_piece_take(lane);
	if (!piece) {
		lane->counts.want_refused++;
		kvp_rx_fail(rx, KVP__STATUS__STATUS_LIMIT,
			    "sender %u: lane %s holds %u wants, its maximum", leg->sender,
			    lane->config.name, KVP_LANE_RX_PIECES);
		return -1;
	}
	if (kvp_rx_accept(leg, want, piece) < 0) {
		kvp_rx_piece_put(lane, piece);
		return -1;
	}

	piece->leg = leg;
	piece->cookie = want->cookie;
	piece->may_direct = want->direct;
	piece->since_ns = lane->now_ns;
	TAILQ_INSERT_TAIL(&leg->order, piece, order);
	leg->n_order++;
	kvp_board_once(&rx->order->board->first_want_ns, lane->now_ns);
	if (piece->bytes)
		leg_queue(leg, piece);
	else
		kvp_rx_landed(piece);
	kvp_rx_dirty(rx);
	return 0;
}

/* The leg that a message is about, while it can take one. */
static struct kvp_rx_leg *live_leg(struct kvp_lane *lane, uint64_t generation, uint32_t sender)
{
	struct kvp_rx *rx = rx_find(lane, generation);
	struct kvp_rx_leg *leg = rx && !rx->failed && !rx->complete ? leg_find(rx, sender) : NULL;

	return leg && leg->link && !leg->returned ? leg : NULL;
}

static void take_want(struct kvp_rx_leg *leg, const struct kvp_wire_want *want)
{
	if (leg_want(leg, want) < 0)
		leg_refuse(leg, want->cookie);
}

/* What the transport writes already is left to come. */
static void take_return(struct kvp_rx_leg *leg)
{
	struct kvp_rx_piece *piece, *next;

	leg->returned = true;
	for (piece = TAILQ_FIRST(&leg->order); piece; piece = next) {
		next = TAILQ_NEXT(piece, order);
		if (piece->state != KVP_RX_QUEUED &&
		    (piece->state != KVP_RX_GRANTED || piece->given > 0))
			continue;
		TAILQ_REMOVE(&leg->order, piece, order);
		leg->n_order--;
		piece_drop(leg, piece);
	}
	kvp_rx_share_forget(leg);
	kvp_rx_dirty(leg->rx);
}

/* The loop orders a leg before it tells the sender to go, but a turn looks at messages first. */
static void keep_late(struct kvp_lane *lane, const void *msg, size_t bytes)
{
	if (lane->n_late == KVP_LANE_LATE) {
		lane->counts.stale++;
		return;
	}
	memcpy(&lane->late[lane->n_late++], msg, bytes);
}

struct kvp_rx_piece *kvp_rx_newest(struct kvp_lane *lane, const struct kvp_wire_want *want)
{
	struct kvp_rx_leg *leg = live_leg(lane, want->generation, want->sender);

	return leg ? TAILQ_LAST(&leg->order, kvp_rx_pieces) : NULL;
}

void kvp_rx_want(struct kvp_lane *lane, const struct kvp_wire_want *want)
{
	struct kvp_rx_leg *leg = live_leg(lane, want->generation, want->sender);

	if (leg)
		take_want(leg, want);
	else
		keep_late(lane, want, sizeof(*want));
}

void kvp_rx_return(struct kvp_lane *lane, const struct kvp_wire_return *msg)
{
	struct kvp_rx_leg *leg = live_leg(lane, msg->generation, msg->sender);
	struct kvp_link *link;

	/* It comes behind all that the sender has written for the leg. */
	TAILQ_FOREACH (link, &lane->links, link)
		kvp_rx_safe(link, msg->generation, msg->sender);
	if (leg)
		take_return(leg);
	else
		keep_late(lane, msg, sizeof(*msg));
}

uint32_t kvp_rx_late(struct kvp_lane *lane)
{
	uint32_t n = lane->n_late;

	for (uint32_t i = 0; i < n; i++) {
		const union kvp_wire_msg *msg = &lane->late[i];
		bool want = msg->head.type == KVP_WIRE_WANT;
		struct kvp_rx_leg *leg =
			want ? live_leg(lane, msg->want.generation, msg->want.sender)
			     : live_leg(lane, msg->ret.generation, msg->ret.sender);

		if (!leg)
			lane->counts.stale++;
		else if (want)
			take_want(leg, &msg->want);
		else
			take_return(leg);
	}
	lane->n_late = 0;
	return n;
}

/* ---- a sender on this lane ------------------------------------------------------------------- */

struct kvp_rx_leg *kvp_rx_local_leg(struct kvp_lane *lane, uint64_t generation, uint32_t sender)
{
	struct kvp_rx *rx = rx_find(lane, generation);
	struct kvp_rx_leg *leg = rx && !rx->failed && !rx->complete ? leg_find(rx, sender) : NULL;

	return leg && leg->local ? leg : NULL;
}
