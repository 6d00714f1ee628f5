/* SPDX-License-Identifier: Apache-2.0 */

/* What a lane publishes: a seqlock over words, so that readers on any thread never stop the lane.
 */

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

static enum kvp_wait rx_piece_wait(const struct kvp_rx_piece *piece)
{
	switch (piece->state) {
	case KVP_RX_HERE:
		return KVP_WAITS_HELD;
	case KVP_RX_MOVING:
		return KVP_WAITS_GPU;
	case KVP_RX_GRANTED:
	case KVP_RX_ORPHAN:
		return KVP_WAITS_DATA;
	default:
		return KVP_WAITS_NOTHING;
	}
}

static void land_slot(const struct kvp_slot *slot, struct kvp_lane_slot_status *out)
{
	const struct kvp_rx_piece *piece = slot->user;

	*out = (struct kvp_lane_slot_status){ 0 };
	if (slot->refs == 0 || !piece)
		return;

	out->room = piece->leg ? piece->leg->rx->order->room : 0;
	out->waits = rx_piece_wait(piece);
	out->since_ns = slot->since_ns;
}

static void pack_slot(const struct kvp_slot *slot, struct kvp_lane_slot_status *out)
{
	const struct kvp_tx *tx = slot->user;

	*out = (struct kvp_lane_slot_status){ 0 };
	if (slot->refs == 0 || !tx)
		return;

	out->room = tx->order->room;
	out->waits = tx->n_sent ? KVP_WAITS_LANDED : KVP_WAITS_GRANT;
	out->since_ns = slot->since_ns;
}

const char *kvp_hold_name(enum kvp_hold point)
{
	static const char *const names[KVP_HOLD_N] = {
		[KVP_HOLD_WANT] = "want",           [KVP_HOLD_GRANT] = "grant",
		[KVP_HOLD_GATHER] = "gather",       [KVP_HOLD_SEND] = "send",
		[KVP_HOLD_SCATTER] = "scatter",     [KVP_HOLD_LANDED] = "landed",
		[KVP_HOLD_OFFER] = "offer",         [KVP_HOLD_FLIP_PACK] = "flip_pack",
		[KVP_HOLD_FLIP_LAND] = "flip_land", [KVP_HOLD_FLIP_POOL] = "flip_pool",
		[KVP_HOLD_WILD] = "wild",
	};

	return names[point];
}

#ifdef KVP_TEST
static void count_link_holds(const struct kvp_link *link, uint32_t *holds)
{
	const struct kvp_tx_leg *leg;
	const struct kvp_tx_piece *piece;
	const struct kvp_rx_piece *landed;

	TAILQ_FOREACH (leg, &link->ready, ready_link)
		holds[KVP_HOLD_WANT]++;
	TAILQ_FOREACH (piece, &link->granted, queue) {
		holds[KVP_HOLD_GATHER]++;
		holds[KVP_HOLD_SEND] += !link->lane->config.pack;
	}
	TAILQ_FOREACH (piece, &link->packed, queue)
		holds[KVP_HOLD_SEND]++;
	TAILQ_FOREACH (landed, &link->landed, queue)
		holds[KVP_HOLD_LANDED]++;
	holds[KVP_HOLD_GRANT] += link->wants_queued;
}

static void count_holds(const struct kvp_lane *lane, uint32_t *holds)
{
	const struct kvp_link *link;
	const struct kvp_tx *tx;

	memset(holds, 0, sizeof(lane->counts.holds));
	TAILQ_FOREACH (link, &lane->links, link)
		count_link_holds(link, holds);
	TAILQ_FOREACH (tx, &lane->local, local_link)
		for (uint32_t i = KVP_HOLD_WANT; i <= KVP_HOLD_LANDED; i++)
			holds[i]++;
	holds[KVP_HOLD_SCATTER] += lane->here;
	for (uint32_t i = 0; i < KVP_HOLD_N; i++)
		if (!kvp_lane_held(lane, i))
			holds[i] = 0;
}
#else
static void count_holds(const struct kvp_lane *lane, uint32_t *holds)
{
	memset(holds, 0, sizeof(lane->counts.holds));
}
#endif

/* Endpoints are shown with their peers, by the loop. */
static void tell_rails(struct kvp_lane *lane)
{
	struct kvp_link *link;

	TAILQ_FOREACH (link, &lane->links, link) {
		struct kvp_board *board = link->order->board;
		uint32_t open = 0, all = 0;

		if (link->net_ep)
			lane->config.net->ep_rails(link->net_ep, &open, &all);
		atomic_store_explicit(&board->rails_open, open, memory_order_relaxed);
		atomic_store_explicit(&board->rails, all, memory_order_relaxed);
	}
}

static void fill(struct kvp_lane *lane, struct kvp_lane_status *out)
{
	const struct kvp_link *link;

	out->pack_slots = lane->pack.n;
	out->pack_free = lane->pack.n_free;
	out->pack_held = lane->ahead;
	out->land_slots = lane->land.n;
	out->land_free = lane->land.n_free;
	out->rxs = (uint32_t)lane->rxs.n;
	out->txs = (uint32_t)lane->txs.n;
	out->eps = (uint32_t)lane->eps.n;
	out->wants_queued = out->wants_most = 0;
	TAILQ_FOREACH (link, &lane->links, link) {
		out->wants_queued += link->wants_queued;
		out->wants_most = KVP_MAX(out->wants_most, link->wants_queued);
	}
	out->has_work = lane->rx_live > 0 || lane->tx_live > 0 || !TAILQ_EMPTY(&lane->local) ||
			lane->links_closing > 0 || !TAILQ_EMPTY(&lane->returning);
	for (uint32_t i = 0; i < KVP_MIN(lane->pack.n, KVP_LANE_SLOTS_SHOWN); i++)
		pack_slot(&lane->pack.slots[i], &out->pack[i]);
	for (uint32_t i = 0; i < KVP_MIN(lane->land.n, KVP_LANE_SLOTS_SHOWN); i++)
		land_slot(&lane->land.slots[i], &out->land[i]);
	count_holds(lane, out->holds);
	out->holds_on = lane->holds;
	if (lane->mover.gpu) {
		out->launches = lane->mover.last;
		out->gpu_busy = lane->mover.last - lane->mover.over;
		out->imports = kvp_gpu_imports_count(lane->mover.imports, &out->import_bytes);
	}
	if (lane->net && lane->config.net->rails) {
		out->n_rails = lane->config.net->rails(lane->net, out->rails);
		tell_rails(lane);
	}
	if (lane->net) {
		out->net = *lane->config.net->stats(lane->net);
		(void)snprintf(out->net_describe, sizeof(out->net_describe), "%s",
			       lane->config.net->describe(lane->net)); /* cut is fine */
	}
}

void kvp_lane_publish(struct kvp_lane *lane)
{
	uint64_t words[KVP_LANE_STATUS_WORDS];
	uint64_t seq = atomic_load_explicit(&lane->status_seq, memory_order_relaxed);

	fill(lane, &lane->counts);
	memcpy(words, &lane->counts, sizeof(words));

	atomic_store_explicit(&lane->status_seq, seq + 1, memory_order_relaxed);
	atomic_thread_fence(memory_order_release);
	for (size_t i = 0; i < KVP_LANE_STATUS_WORDS; i++)
		atomic_store_explicit(&lane->status_words[i], words[i], memory_order_relaxed);
	atomic_store_explicit(&lane->status_seq, seq + 2, memory_order_release);
}

void kvp_lane_status_read(const struct kvp_lane *lane, struct kvp_lane_status *out)
{
	uint64_t words[KVP_LANE_STATUS_WORDS] = { 0 };
	uint64_t before, after;

	do {
		before = atomic_load_explicit(&lane->status_seq, memory_order_acquire);
		for (size_t i = 0; i < KVP_LANE_STATUS_WORDS; i++)
			words[i] =
				atomic_load_explicit(&lane->status_words[i], memory_order_relaxed);
		atomic_thread_fence(memory_order_acquire);
		after = atomic_load_explicit(&lane->status_seq, memory_order_relaxed);
	} while (before != after || before % 2);

	memcpy(out, words, sizeof(words));
	out->turns = atomic_load_explicit(&lane->turns, memory_order_relaxed);
	out->turn_ns = atomic_load_explicit(&lane->turn_ns, memory_order_relaxed);
	out->call = atomic_load_explicit(&lane->call, memory_order_acquire);
	out->call_since_ns = atomic_load_explicit(&lane->call_since_ns, memory_order_relaxed);
}
