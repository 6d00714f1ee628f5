/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode, the receiver's side: the transport knows the memory of the pool, a sender gets a
 * window of it for its leg and, with each grant, the runs of the piece there. Which bytes those are
 * is computed as for a scatter. A room is quiet only when nobody can write for it any more: its
 * senders have said so behind their last write, or their connections have ended; and its windows
 * are closed.
 */

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

/* ---- runs ------------------------------------------------------------------------------------ */

struct run_list {
	struct kvp_direct_run *runs;
	const struct kvp_direct_pool *direct;
	uint32_t n;
	uint32_t region; /* where the last bytes were */
	bool join;       /* the last run may grow */
	bool over;       /* there are too many, or a byte is in no region */
};

static const struct kvp_direct_region *region_at(struct run_list *list, const uint8_t *at)
{
	for (uint32_t i = 0; i < list->direct->n_regions; i++) {
		uint32_t idx = (list->region + i) % list->direct->n_regions;
		const struct kvp_direct_region *region = &list->direct->regions[idx];

		if (at < region->base || (size_t)(at - region->base) >= region->bytes)
			continue;
		list->region = idx;
		return region;
	}
	list->over = true;
	return NULL;
}

/* Bytes that may be added to the last run when the next begin at that offset. */
static uint64_t growth(const struct run_list *list, uint64_t offset)
{
	const struct kvp_direct_run *last = list->n ? &list->runs[list->n - 1] : NULL;

	if (!last || !list->join || last->region != list->region ||
	    (uint64_t)last->offset + last->bytes != offset)
		return 0;
	return KVP_WIRE_RUN_BYTES - last->bytes;
}

static void list_add(struct run_list *list, const uint8_t *at, uint64_t bytes)
{
	while (bytes > 0 && !list->over) {
		const struct kvp_direct_region *region = region_at(list, at);
		uint64_t offset, more, n;

		if (!region)
			return;
		offset = (uint64_t)(at - region->base);
		n = KVP_MIN(bytes, region->bytes - offset);
		more = KVP_MIN(growth(list, offset), n);
		if (more > 0) {
			list->runs[list->n - 1].bytes += (uint32_t)more;
			n = more;
		} else if (list->n == KVP_WIRE_PIECE_RUNS) {
			list->over = true;
		} else {
			n = KVP_MIN(n, (uint64_t)KVP_WIRE_RUN_BYTES);
			list->runs[list->n++] =
				(struct kvp_direct_run){ list->region, (uint32_t)offset,
							 (uint32_t)n };
			list->join = true;
		}
		at += n;
		bytes -= n;
	}
}

/* The rows of one part of the layout, as a scatter would place them. */
static void list_part(struct run_list *list, const struct kvp_rx *rx,
		      const struct kvp_leg_geom *geom, const struct kvp_rx_piece *piece,
		      const struct kvp_pair *pair)
{
	const struct kvp_entry *entry = &geom->dst[pair->dst_entry];
	uint8_t *map = rx->pool->order->fd_maps[entry->fd_idx] + pair->dst_off;
	struct kvp_range range = kvp_leg_clip(geom, pair, piece->start, piece->tokens);
	struct kvp_side src, dst;
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_leg_sides(geom, pair, &src, &dst);
	kvp_rows_begin(&it, &src, &dst, range.start, range.tokens);
	list->join = false;
	while (!list->over && kvp_rows_next(&it, &run)) {
		const uint8_t *at = map + kvp_entry_row(entry, run.dst_page, run.dst_slot);
		uint64_t stride = run.dst_step * entry->row_stride;

		if (stride == pair->bytes) {
			list_add(list, at, (uint64_t)run.n * pair->bytes);
			continue;
		}
		for (uint32_t i = 0; i < run.n && !list->over; i++)
			list_add(list, at + i * stride, pair->bytes);
	}
}

/* Writes the runs of a piece into lane->runs: false, there are too many. */
static bool plan(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, uint32_t *n)
{
	const struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_leg_geom geom = leg->geom.geom;
	struct run_list list = { .runs = lane->runs, .direct = rx->pool->direct };
	uint32_t n_parts;

	if (piece->kind == KVP_WIRE_SEGMENT) {
		list_add(&list, kvp_rx_segment_place(rx, piece->segment) + piece->start,
			 piece->bytes);
		*n = list.n;
		return !list.over;
	}
	geom.dst_sides = rx->order->sides;
	(void)kvp_piece_layout(&geom, piece->set, piece->start, piece->tokens, lane->parts,
			       &n_parts);
	for (uint32_t i = 0; i < n_parts && !list.over; i++)
		list_part(&list, rx, &geom, piece, &geom.pairs[lane->parts[i].pair]);
	*n = list.n;
	return !list.over;
}

/* ---- windows --------------------------------------------------------------------------------- */

static struct kvp_rx_window *window_find(const struct kvp_rx_leg *leg, uint32_t region)
{
	struct kvp_rx_window *window;

	TAILQ_FOREACH (window, &leg->rx->windows, link)
		if (window->sender == leg->sender && window->region == region)
			return window;
	return NULL;
}

static int window_add(struct kvp_rx_leg *leg, uint32_t region, struct kvp_rx_window **out)
{
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;
	struct kvp_rx_window *window = calloc(1, sizeof(*window));
	int r;

	if (!window)
		return -ENOMEM;

	window->sender = leg->sender;
	window->region = region;
	r = lane->config.net->window_open(lane->net, rx->pool->direct->regions[region].net,
					  &window->net);
	if (r < 0) {
		free(window);
		return r;
	}
	TAILQ_INSERT_TAIL(&rx->windows, window, link);
	lane->counts.windows++;
	*out = window;
	return 0;
}

static int window_tell(struct kvp_rx_leg *leg, struct kvp_rx_window *window,
		       const struct kvp_net_key *key, uint64_t cookie)
{
	struct kvp_wire_window msg = {
		.head = kvp_wire_head(KVP_WIRE_WINDOW),
		.cookie = cookie,
		.bytes = leg->rx->pool->direct->regions[window->region].bytes,
		.idx = leg->n_windows,
	};

	if (leg->n_windows == KVP_WIRE_LEG_WINDOWS)
		return -ENOBUFS;
	memcpy(msg.key, key, sizeof(msg.key));
	if (kvp_link_send(leg->link, &msg, sizeof(msg)) < 0)
		return -EAGAIN;
	window->idx = leg->n_windows++;
	window->told = true;
	return 0;
}

/* The sender may write into the region, and knows it. */
static int window_ready(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, uint32_t region)
{
	struct kvp_lane *lane = leg->rx->lane;
	struct kvp_rx_window *window = window_find(leg, region);
	struct kvp_net_key key;
	int r = window ? 0 : window_add(leg, region, &window);

	if (r == 0)
		r = lane->config.net->window_key(lane->net, window->net, &key);
	if (r == 0 && !window->told)
		r = window_tell(leg, window, &key, piece->cookie);
	return r;
}

static int windows_ready(struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, uint32_t n)
{
	const struct kvp_direct_run *runs = leg->rx->lane->runs;
	bool wait = false;

	for (uint32_t i = 0; i < n; i++) {
		int r;

		if (i > 0 && runs[i].region == runs[i - 1].region)
			continue;
		r = window_ready(leg, piece, runs[i].region);
		if (r < 0 && r != -EAGAIN)
			return r;
		wait = wait || r < 0; /* those of other regions open meanwhile */
	}
	return wait ? -EAGAIN : 0;
}

static bool windows_closed(struct kvp_rx *rx)
{
	struct kvp_lane *lane = rx->lane;
	struct kvp_rx_window *window, *next;

	for (window = TAILQ_FIRST(&rx->windows); window; window = next) {
		next = TAILQ_NEXT(window, link);
		if (lane->config.net->window_close(lane->net, window->net) < 0)
			continue;
		TAILQ_REMOVE(&rx->windows, window, link);
		lane->counts.windows--;
		free(window);
	}
	return TAILQ_EMPTY(&rx->windows);
}

bool kvp_rx_take_back(struct kvp_rx *rx)
{
	if (rx->n_risk == 0 && windows_closed(rx))
		return false;

	TAILQ_INSERT_TAIL(&rx->lane->returning, rx, dirty_link);
	return true;
}

uint32_t kvp_direct_turn(struct kvp_lane *lane)
{
	struct kvp_rx *rx, *next;
	uint32_t n = kvp_direct_register(lane);

	for (rx = TAILQ_FIRST(&lane->returning); rx; rx = next) {
		next = TAILQ_NEXT(rx, dirty_link);
		if (rx->n_risk > 0 || !windows_closed(rx))
			continue;
		TAILQ_REMOVE(&lane->returning, rx, dirty_link);
		kvp_rx_depart(rx);
		n++;
	}
	return n;
}

/* ---- grants ---------------------------------------------------------------------------------- */

static uint32_t messages(uint32_t n_runs)
{
	return KVP_DIV_UP(n_runs, KVP_WIRE_RUNS_MAX);
}

/* Sends RUNS of lane->runs from where the sender's knowledge ends. */
static uint32_t tell(struct kvp_link *link, struct kvp_rx_piece *piece)
{
	const struct kvp_direct_run *runs = link->lane->runs;
	uint32_t sent = 0;

	while (piece->runs_told < piece->n_runs) {
		struct kvp_wire_runs msg = {
			.head = kvp_wire_head(KVP_WIRE_RUNS),
			.cookie = piece->cookie,
			.first = piece->runs_told,
			.n = KVP_MIN(piece->n_runs - piece->runs_told, KVP_WIRE_RUNS_MAX),
		};

		for (uint32_t i = 0; i < msg.n; i++) {
			const struct kvp_direct_run *run = &runs[msg.first + i];
			const struct kvp_rx_window *window = window_find(piece->leg, run->region);

			msg.runs[i].offset = run->offset;
			msg.runs[i].bytes = run->bytes & 0xffffff;
			msg.runs[i].window = window->idx & 0xff;
		}
		if (kvp_link_send(link, &msg, sizeof(msg)) < 0)
			return sent;
		piece->runs_told += msg.n;
		sent++;
	}
	link->telling = NULL;
	return sent;
}

uint32_t kvp_rx_tell(struct kvp_link *link)
{
	struct kvp_rx_piece *piece = link->telling;
	uint32_t n;
	bool same;

	if (!piece || !kvp_link_open(link))
		return 0;

	same = plan(piece->leg, piece, &n) && n == piece->n_runs;
	assert(same); /* nothing that it comes from changes */
	return tell(link, piece);
}

static int grant(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece, uint32_t n)
{
	struct kvp_lane *lane = leg->rx->lane;
	struct kvp_link *link = leg->link;
	const struct kvp_wire_grant msg = {
		.head = kvp_wire_head(KVP_WIRE_GRANT),
		.cookie = piece->cookie,
		.token = kvp_lane_token(lane),
		.slot_bytes = piece->bytes,
		.slot = (uint32_t)(piece - lane->rx_pool),
		.mode = KVP_WIRE_DIRECT,
		.n_runs = n,
	};

	if (link->runs_out + messages(n) > KVP_WIRE_EP_RUNS ||
	    kvp_link_send(link, &msg, sizeof(msg)) < 0)
		return -EAGAIN;

	kvp_rx_piece_grant(leg, NULL, msg.token);
	piece->direct = true;
	piece->n_runs = n;
	link->runs_out += messages(n);
	link->telling = piece;
	(void)tell(link, piece); /* what does not go now goes in later turns */
	return 0;
}

/* What speaks against a direct grant; -EAGAIN: it depends on what comes. */
static int obstacle(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece)
{
	const struct kvp_lane *lane = leg->rx->lane;
	const struct kvp_direct_pool *direct = leg->rx->pool->direct;

	if (lane->config.mode == KVP_DATA_LANDING)
		return KVP_WHY_MODE;
	if (leg->geom.sums)
		return KVP_WHY_SUMS;
	if (!piece->may_direct)
		return KVP_WHY_SENDER;
	if (!direct || direct->state == KVP_DIRECT_UNABLE)
		return direct ? (int)direct->why : KVP_WHY_MEMORY;
	if (direct->state == KVP_DIRECT_PENDING)
		return lane->config.mode == KVP_DATA_DIRECT ? -EAGAIN : KVP_WHY_PENDING;
	return KVP_WHY_NONE;
}

static int worth(const struct kvp_rx_leg *leg, const struct kvp_rx_piece *piece, uint32_t *n)
{
	const struct kvp_lane_config *config = &leg->rx->lane->config;

	if (!plan(leg, piece, n) || *n == 0)
		return KVP_WHY_RUNS;
	if (config->mode == KVP_DATA_AUTO && piece->bytes / *n < config->direct_run_bytes)
		return KVP_WHY_RUNS;
	return KVP_WHY_NONE;
}

/* The piece goes by a slot, or, where that may not be, its room fails at the end of the turn. */
static int fall_back(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece, enum kvp_why why)
{
	struct kvp_rx *rx = leg->rx;
	struct kvp_lane *lane = rx->lane;

	if (lane->config.mode == KVP_DATA_DIRECT) {
		rx->unable = why;
		kvp_rx_dirty(rx);
		return -EAGAIN;
	}
	piece->decided = true;
	lane->counts.fell_back[why]++;
	atomic_store_explicit(&rx->order->board->fell_back, why, memory_order_relaxed);
	return 0;
}

int kvp_rx_direct(struct kvp_rx_leg *leg, struct kvp_rx_piece *piece)
{
	const struct kvp_net_ops *net = leg->rx->lane->config.net;
	uint32_t n = 0;
	int why, r;

	/* The meta goes into memory of the daemon's own. */
	if (!net->write || piece->decided || piece->kind == KVP_WIRE_META)
		return 0;

	why = obstacle(leg, piece);
	if (why == KVP_WHY_NONE)
		why = worth(leg, piece, &n);
	if (why < 0)
		return why;
	if (why != KVP_WHY_NONE)
		return fall_back(leg, piece, (enum kvp_why)why);

	r = windows_ready(leg, piece, n);
	if (r == 0)
		r = grant(leg, piece, n);
	if (r == 0)
		return 1;
	return r == -EAGAIN ? r : fall_back(leg, piece, KVP_WHY_WINDOWS);
}

/* ---- what is written ------------------------------------------------------------------------- */

void kvp_rx_direct_over(struct kvp_link *link, struct kvp_rx_piece *piece)
{
	if (!piece->direct)
		return;

	piece->direct = false;
	piece->token = 0;
	if (piece->risk)
		piece->risk->n_risk--;
	piece->risk = NULL;
	if (!link)
		return;
	link->runs_out -= messages(piece->n_runs);
	if (link->telling == piece)
		link->telling = NULL;
}

static void piece_written(struct kvp_lane *lane, struct kvp_rx_piece *piece)
{
	struct kvp_rx *rx = piece->leg->rx;
	struct kvp_board *board = rx->order->board;

	rx->n_granted--;
	lane->counts.pieces_direct++;
	lane->counts.bytes_direct += piece->bytes;
	kvp_board_add(&board->direct_pieces, 1);
	kvp_board_add(&board->direct_bytes, piece->bytes);
	kvp_board_once(&board->first_data_ns, lane->now_ns);
	kvp_rx_direct_over(piece->leg->link, piece);
	if (!kvp_direct_flushes(lane)) {
		kvp_rx_landed(piece);
		return;
	}
	/* In the pool, and perhaps not yet for the GPU: told once for all of the turn. */
	piece->written = true;
	piece->state = KVP_RX_HERE;
	rx->n_here++;
	lane->here++;
	lane->unseen = true;
	TAILQ_INSERT_TAIL(&lane->rx_here, piece, queue);
	kvp_rx_dirty(rx);
}

void kvp_rx_written(struct kvp_lane *lane, const struct kvp_wire_written *msg)
{
	struct kvp_rx_piece *piece = msg->slot < lane->rx_fresh ? &lane->rx_pool[msg->slot] : NULL;

	if (!piece || !piece->direct || msg->token == 0 || piece->token != msg->token) {
		lane->counts.no_token++;
		return;
	}
	if (msg->first != piece->runs_written || msg->n == 0 ||
	    msg->n > piece->runs_told - piece->runs_written) {
		lane->counts.bad_messages++;
		if (piece->leg)
			kvp_rx_fail(piece->leg->rx, KVP__STATUS__STATUS_PROTOCOL,
				    "sender %u: wrote runs [%u, + %u), expected from %u up to %u",
				    piece->leg->sender, msg->first, msg->n, piece->runs_written,
				    piece->runs_told);
		return;
	}
	piece->runs_written += msg->n;
	if (piece->runs_written < piece->n_runs)
		return;
	if (piece->state != KVP_RX_AT_RISK) {
		piece_written(lane, piece);
		return;
	}
	lane->counts.no_token++;
	kvp_rx_risk_over(lane, piece);
}
