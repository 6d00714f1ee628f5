/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode, the sender's side: pieces are packed as ever, and each run of the destination is one
 * write. Addresses are the receiver's; every run is compared with the window that it names before
 * anything is written, and all of them with the layout of the piece.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

bool kvp_tx_can_direct(const struct kvp_tx_leg *leg)
{
	const struct kvp_lane *lane = leg->tx->lane;

	return !leg->local && !leg->order->leg.sums && kvp_lane_direct(lane) && lane->config.pack;
}

static void refuse(struct kvp_tx_piece *piece, const char *what)
{
	kvp_tx_fail(piece->leg->tx, KVP__STATUS__STATUS_PROTOCOL,
		    "destination %u: %s for piece %u of chunk %u", piece->leg->order->dest, what,
		    piece->idx, piece->seq);
}

/* ---- what the receiver says ------------------------------------------------------------------ */

void kvp_tx_window(struct kvp_lane *lane, const struct kvp_wire_window *msg)
{
	struct kvp_tx_piece *piece = kvp_tx_piece_find(lane, msg->cookie);
	struct kvp_tx_leg *leg;

	if (!piece || piece->state != KVP_TX_WANTED) {
		lane->counts.stale++;
		return;
	}
	leg = piece->leg;
	if (!kvp_tx_can_direct(leg) || msg->idx != leg->n_windows ||
	    msg->idx >= KVP_WIRE_LEG_WINDOWS) {
		refuse(piece, "a window out of order");
		return;
	}
	if (!leg->windows)
		leg->windows = calloc(KVP_WIRE_LEG_WINDOWS, sizeof(*leg->windows));
	if (!leg->windows) {
		kvp_tx_fail(leg->tx, KVP__STATUS__STATUS_NO_MEMORY, "lane %s has no memory",
			    lane->config.name);
		return;
	}
	memcpy(&leg->windows[msg->idx].key, msg->key, sizeof(msg->key));
	leg->windows[msg->idx].bytes = msg->bytes;
	leg->n_windows++;
}

static bool have_blocks(struct kvp_link *link)
{
	if (link->blocks)
		return true;

	link->blocks = calloc(KVP_WIRE_EP_RUNS, sizeof(*link->blocks));
	if (!link->blocks)
		return false;
	for (uint32_t i = 0; i < KVP_WIRE_EP_RUNS; i++)
		STAILQ_INSERT_TAIL(&link->free_blocks, &link->blocks[i], link);
	return true;
}

bool kvp_tx_direct_granted(struct kvp_tx_piece *piece, const struct kvp_wire_grant *msg)
{
	if (!kvp_tx_can_direct(piece->leg) || piece->kind == KVP_WIRE_META || msg->n_runs == 0 ||
	    msg->n_runs > KVP_WIRE_PIECE_RUNS || !have_blocks(piece->leg->link))
		return false;

	STAILQ_INIT(&piece->runs);
	piece->n_runs = msg->n_runs;
	piece->direct = true;
	return true;
}

static bool in_window(const struct kvp_tx_leg *leg, const struct kvp_wire_run *run)
{
	const struct kvp_tx_window *window;

	if (run->window >= leg->n_windows || run->bytes == 0 || run->bytes > KVP_WIRE_RUN_BYTES)
		return false;

	window = &leg->windows[run->window];
	return run->offset <= window->bytes && run->bytes <= window->bytes - run->offset;
}

/* The parts of the piece in its slot; what is not rows has one. */
static uint32_t lay_out(const struct kvp_tx_piece *piece)
{
	const struct kvp_tx_leg *leg = piece->leg;
	const struct kvp_order_chunk *chunk = piece->chunk->order;
	struct kvp_part *parts = leg->tx->lane->parts;
	uint64_t set[KVP_LANE_MASK_WORDS];
	uint32_t n_parts;

	if (piece->kind != KVP_WIRE_ROWS) {
		parts[0] = (struct kvp_part){ .bytes = piece->bytes };
		return 1;
	}
	for (uint32_t i = 0; i < KVP_LANE_MASK_WORDS; i++)
		set[i] = chunk->entry_set[i] & leg->order->leg.src_mask[i];
	(void)kvp_piece_layout(&leg->order->leg.geom, set, piece->start, piece->tokens, parts,
			       &n_parts);
	return n_parts;
}

/* Steps over the run that the cursor stands at; false: it does not fit the layout. */
static bool step(struct kvp_tx_cursor *at, const struct kvp_part *parts, uint32_t n_parts)
{
	uint32_t bytes = at->block->runs[at->run].bytes;

	if (at->part >= n_parts || bytes > parts[at->part].bytes - at->done)
		return false;

	at->done += bytes;
	if (at->done == parts[at->part].bytes) {
		at->part++;
		at->done = 0;
	}
	if (++at->run == at->block->n) {
		at->block = STAILQ_NEXT(at->block, link);
		at->run = 0;
	}
	return true;
}

/* All runs are here: together they are the piece. */
static bool runs_fit(struct kvp_tx_piece *piece)
{
	const struct kvp_part *parts = piece->leg->tx->lane->parts;
	uint32_t n_parts = lay_out(piece);
	struct kvp_tx_cursor at = { .block = STAILQ_FIRST(&piece->runs) };

	piece->cursor = at;
	while (at.block)
		if (!step(&at, parts, n_parts))
			return false;
	return at.part == n_parts;
}

static bool take_runs(struct kvp_tx_piece *piece, const struct kvp_wire_runs *msg)
{
	struct kvp_link *link = piece->leg->link;
	struct kvp_run_block *block = STAILQ_FIRST(&link->free_blocks);

	if (!block || msg->n == 0 || msg->n > KVP_WIRE_RUNS_MAX || msg->first != piece->runs_here ||
	    msg->n > piece->n_runs - piece->runs_here)
		return false;
	for (uint32_t i = 0; i < msg->n; i++)
		if (!in_window(piece->leg, &msg->runs[i]))
			return false;

	STAILQ_REMOVE_HEAD(&link->free_blocks, link);
	block->n = msg->n;
	memcpy(block->runs, msg->runs, msg->n * sizeof(msg->runs[0]));
	STAILQ_INSERT_TAIL(&piece->runs, block, link);
	piece->runs_here += msg->n;
	return piece->runs_here < piece->n_runs || runs_fit(piece);
}

void kvp_tx_runs(struct kvp_lane *lane, const struct kvp_wire_runs *msg)
{
	struct kvp_tx_piece *piece = kvp_tx_piece_find(lane, msg->cookie);

	if (!piece || piece->state != KVP_TX_GRANTED || !piece->direct) {
		lane->counts.stale++;
		return;
	}
	if (!take_runs(piece, msg)) {
		lane->counts.bad_messages++;
		refuse(piece, "runs outside of what was granted, or of the piece,");
	}
}

void kvp_tx_runs_put(struct kvp_link *link, struct kvp_tx_piece *piece)
{
	if (!piece->direct || !link)
		return;

	STAILQ_CONCAT(&link->free_blocks, &piece->runs);
}

/* ---- writes ---------------------------------------------------------------------------------- */

/* The next writes, as many as go at once; the cursor stays. */
static uint32_t fill(const struct kvp_tx_piece *piece, uint32_t n_parts, struct kvp_net_run *out)
{
	const struct kvp_tx_leg *leg = piece->leg;
	const struct kvp_part *parts = leg->tx->lane->parts;
	const struct kvp_lane *lane = leg->tx->lane;
	uint32_t most = KVP_MIN(lane->config.net->write_max(lane->net), KVP_NET_RUNS_MAX);
	struct kvp_tx_cursor at = piece->cursor;
	uint32_t n = 0;

	while (at.block && n < most) {
		const struct kvp_wire_run *run = &at.block->runs[at.run];

		out[n++] = (struct kvp_net_run){
			.key = &leg->windows[run->window].key,
			.from = kvp_slot_place(piece->slot, piece->kind) + parts[at.part].offset +
				at.done,
			.offset = run->offset,
			.bytes = run->bytes,
		};
		(void)step(&at, parts, n_parts); /* they fit, or the room had failed */
	}
	return n;
}

/* The transport has taken that many. */
static void advance(struct kvp_tx_piece *piece, uint32_t n_parts, uint32_t n)
{
	struct kvp_link *link = piece->leg->link;
	struct kvp_lane *lane = link->lane;

	for (uint32_t i = 0; i < n; i++)
		(void)step(&piece->cursor, lane->parts, n_parts); /* as above */
	while (STAILQ_FIRST(&piece->runs) != piece->cursor.block) {
		struct kvp_run_block *block = STAILQ_FIRST(&piece->runs);

		STAILQ_REMOVE_HEAD(&piece->runs, link);
		STAILQ_INSERT_HEAD(&link->free_blocks, block, link);
	}
	piece->runs_sent += n;
	piece->sends++;
	link->sending++;
	link->in_flight += piece->payload; /* without sums */
	lane->counts.direct_writes += n;
	kvp_board_once(&piece->leg->tx->order->board->first_data_ns, lane->now_ns);
}

static int write_some(struct kvp_tx_piece *piece, uint32_t n_parts)
{
	struct kvp_link *link = piece->leg->link;
	struct kvp_lane *lane = link->lane;
	struct kvp_net_run runs[KVP_NET_RUNS_MAX];
	uint32_t n = fill(piece, n_parts, runs);
	const struct kvp_wire_written msg = {
		.head = kvp_wire_head(KVP_WIRE_WRITTEN),
		.token = piece->token,
		.slot = piece->remote_slot,
		.first = piece->runs_sent,
		.n = n,
	};
	const struct kvp_net_write write = {
		.runs = runs,
		.n = n,
		.hdr = &msg,
		.hdr_bytes = sizeof(msg),
		.req = piece,
	};
	int r = lane->config.net->write(lane->net, link->net_ep, &write);

	if (r < 0)
		kvp_link_refused(link, r);
	else
		advance(piece, n_parts, n);
	return r;
}

int kvp_tx_direct(struct kvp_tx_piece *piece)
{
	struct kvp_lane *lane = piece->leg->tx->lane;
	uint32_t n_parts;

	if (piece->runs_here < piece->n_runs)
		return 0;

	n_parts = lay_out(piece);
	while (piece->runs_sent < piece->n_runs)
		if (!kvp_link_open(piece->leg->link) || write_some(piece, n_parts) < 0)
			return -1;
	lane->counts.bytes_sent += piece->bytes;
	return 1;
}
