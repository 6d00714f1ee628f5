/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A peer in direct mode that does not play by the rules, on a device made of nothing: as a receiver
 * that grants what it should not, and as a sender that says it wrote what it did not.
 */

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/wire.h"
#include "tests/fake_verbs.h"
#include "tests/support_lane.h"

#define SLOT 65536u
#define END 1000u
#define PIECE 128u /* tokens: two pages of the destination */
#define ROW 64u

struct raw {
	struct lt lt;
	struct kvp_lane *lane;
	struct kvp_net *net; /* the peer's */
	struct kvp_net_ep *ep;
	struct kvp_board ep_board; /* the lane's endpoint to it */
	struct lt_pipe pipe;       /* only its ids are used */
	struct lt_pool src, dst;
	struct lt_room room;
	union kvp_wire_msg got[64]; /* answers, oldest first */
	uint32_t n_got;
	uint8_t *memory; /* of the peer, known to its transport */
	uint32_t n_sent, n_failed;
	bool closed;
};

/* ---- the peer's transport -------------------------------------------------------------------- */

static void *on_message(void *arg, const void *hdr, size_t hdr_bytes, size_t bytes)
{
	struct raw *raw = arg;

	cr_assert_leq(hdr_bytes, sizeof(raw->got[0]));
	cr_assert_eq(bytes, 0);
	cr_assert_lt(raw->n_got, KVP_ARRAY_SIZE(raw->got));
	memset(&raw->got[raw->n_got], 0, sizeof(raw->got[0]));
	memcpy(&raw->got[raw->n_got++], hdr, hdr_bytes);
	return NULL;
}

static void on_data(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes)
{
	(void)arg;
	(void)hdr;
	(void)hdr_bytes;
	(void)data;
	(void)bytes;
}

static void on_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place)
{
	(void)arg;
	(void)hdr;
	(void)hdr_bytes;
	(void)place;
}

static void on_sent(void *arg, void *req, int status)
{
	(void)req;
	(void)status;
	((struct raw *)arg)->n_sent++;
}

static void on_failed(void *arg, struct kvp_net_ep *ep, int status)
{
	(void)ep;
	(void)status;
	((struct raw *)arg)->n_failed++;
}

static void on_closed(void *arg, void *ep_arg)
{
	(void)ep_arg;
	((struct raw *)arg)->closed = true;
}

static const struct kvp_net_events events = { on_message, on_data,   on_lost,
					      on_sent,    on_failed, on_closed };

static void peer_progress(struct raw *raw)
{
	while (kvp_net_verbs.progress(raw->net) > 0)
		;
}

static void peer_send(struct raw *raw, const void *hdr, size_t hdr_bytes)
{
	int r;

	do {
		r = kvp_net_verbs.send(raw->net, raw->ep, hdr, hdr_bytes, NULL, 0, NULL);
		peer_progress(raw);
	} while (r == -EAGAIN);
	cr_assert_eq(r, 0);
	peer_progress(raw);
}

struct answer_wait {
	struct raw *raw;
	enum kvp_wire_type type;
	union kvp_wire_msg *out;
};

static bool has_answer(void *arg)
{
	struct answer_wait *wait = arg;
	struct raw *raw = wait->raw;

	peer_progress(raw);
	for (uint32_t i = 0; i < raw->n_got; i++) {
		if (raw->got[i].head.type != wait->type)
			continue;
		*wait->out = raw->got[i];
		raw->n_got--;
		memmove(&raw->got[i], &raw->got[i + 1], (raw->n_got - i) * sizeof(raw->got[0]));
		return true;
	}
	return false;
}

static union kvp_wire_msg peer_wait(struct raw *raw, enum kvp_wire_type type)
{
	union kvp_wire_msg msg;
	struct answer_wait wait = { raw, type, &msg };

	lt_wait_until(&raw->lt, has_answer, &wait, "an answer of the lane");
	return msg;
}

struct board_wait {
	struct raw *raw;
	struct kvp_board *board;
	uint32_t flags;
};

static bool board_has(void *arg)
{
	struct board_wait *wait = arg;

	peer_progress(wait->raw);
	return kvp_board_flags(wait->board) & wait->flags;
}

static void wait_board(struct raw *raw, struct kvp_board *board, uint32_t flags)
{
	struct board_wait wait = { raw, board, flags };

	lt_wait_until(&raw->lt, board_has, &wait, "a board");
}

/* ---- life ------------------------------------------------------------------------------------ */

static void lane_endpoint(struct raw *raw)
{
	struct kvp_order_ep *order = lt_alloc(1, sizeof(*order));
	uint8_t addr[KVP_NET_ADDR_MAX];
	int n = kvp_net_verbs.address(raw->net, addr, sizeof(addr));

	cr_assert_gt(n, 0);
	kvp_board_init(&raw->ep_board, KVP_BOARD_EP, lt_id(&raw->lt));
	order->order.type = KVP_ORDER_EP_ADD;
	order->board = &raw->ep_board;
	order->session = 1;
	order->addr_bytes = (uint32_t)n;
	order->addr = lt_alloc(1, (size_t)n);
	memcpy(order->addr, addr, (size_t)n);
	kvp_lane_order(raw->lane, &order->order);
	raw->pipe.a.id = raw->pipe.b.id = raw->ep_board.id;
}

static void peer_open(struct raw *raw)
{
	const struct kvp_net_config config = { .events = &events, .arg = raw };
	char err[256] = "";
	struct kvp_net_memory memory = { .stride = 4096, .n = 16 };
	uint32_t bytes;
	const void *addr = kvp_lane_address(raw->lane, &bytes);

	raw->memory = lt_alloc(16, 4096);
	memory.base = raw->memory;
	cr_assert_eq(kvp_net_verbs.open(&raw->net, &config, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(kvp_net_verbs.memory(raw->net, &memory, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(kvp_net_verbs.ep_open(raw->net, addr, bytes, NULL, &raw->ep), 0);
}

static struct raw *raw_make(void)
{
	struct raw *raw = lt_alloc(1, sizeof(*raw));
	struct kvp_lane_config config = {
		.slots = 8, .slot_bytes = SLOT, .pack = true, .net = &kvp_net_verbs
	};
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = 16,
				  .layers = 2,
				  .row_bytes = ROW };

	lt_begin(&raw->lt);
	raw->lane = lt_lane(&raw->lt, &config);
	peer_open(raw);
	lane_endpoint(raw);
	lt_pool_make(&raw->src, &raw->lt, raw->lane, &shape);
	lt_pool_fill(&raw->src, 42, 0, END);
	lt_pool_make(&raw->dst, &raw->lt, raw->lane, &shape);
	return raw;
}

static void raw_end(struct raw *raw)
{
	lt_order_id(raw->lane, KVP_ORDER_EP_END, raw->ep_board.id, 0);
	kvp_net_verbs.ep_close(raw->net, raw->ep);
	wait_board(raw, &raw->ep_board, KVP_BOARD_QUIET);
	lt_pool_end(&raw->src);
	lt_pool_end(&raw->dst);
	kvp_net_verbs.close(raw->net);
	free(raw->memory);
	lt_end(&raw->lt);
	cr_assert_eq(kvp_fake.n_mws, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
	free(raw);
}

static void raw_room(struct raw *raw)
{
	raw->room = (struct lt_room){ .lt = &raw->lt,
				      .room = 42,
				      .end = END,
				      .n_senders = 1,
				      .n_dests = 1,
				      .meta_from = -1,
				      .slot_bytes = SLOT,
				      .piece_tokens = PIECE,
				      .pipe = &raw->pipe };
	raw->room.senders[0].pool = &raw->src;
	raw->room.dests[0].pool = &raw->dst;
	raw->n_got = 0;
}

/* ---- a receiver ------------------------------------------------------------------------------ */

static struct kvp_wire_want begin_tx(struct raw *raw)
{
	struct lt_chunk chunk = { .tokens = PIECE };

	raw_room(raw);
	kvp_board_init(&raw->room.dests[0].board, KVP_BOARD_RX, lt_id(&raw->lt));
	lt_room_begin_tx(&raw->room, 0);
	lt_room_start_tx(&raw->room, 0);
	(void)lt_submit(&raw->room, 0, &chunk);
	return peer_wait(raw, KVP_WIRE_WANT).want;
}

/* The answers of a receiver, which a test spoils. */
struct answers {
	struct kvp_wire_window window;
	struct kvp_wire_grant grant;
	struct kvp_wire_runs runs;
	bool twice; /* RUNS */
};

/* Two entries of 128 rows, two pages of each. */
static struct answers proper(const struct kvp_wire_want *want)
{
	struct answers answers = {
		.window = { .head = kvp_wire_head(KVP_WIRE_WINDOW),
			    .cookie = want->cookie,
			    .bytes = 20000 },
		.grant = { .head = kvp_wire_head(KVP_WIRE_GRANT),
			   .cookie = want->cookie,
			   .token = 5,
			   .slot_bytes = want->bytes,
			   .mode = KVP_WIRE_DIRECT,
			   .n_runs = 4 },
		.runs = { .head = kvp_wire_head(KVP_WIRE_RUNS), .cookie = want->cookie, .n = 4 },
	};

	for (uint32_t i = 0; i < 4; i++)
		answers.runs.runs[i] = (struct kvp_wire_run){ i * 5000, 64 * ROW, 0 };
	return answers;
}

static void more_windows(struct answers *answers)
{
	answers->window.idx = 1;
}
static void far_window(struct answers *answers)
{
	answers->window.idx = KVP_WIRE_LEG_WINDOWS;
}
static void no_runs(struct answers *answers)
{
	answers->grant.n_runs = 0;
}
static void many_runs(struct answers *answers)
{
	answers->grant.n_runs = KVP_WIRE_PIECE_RUNS + 1;
}
static void small_grant(struct answers *answers)
{
	answers->grant.slot_bytes--;
}
static void other_mode(struct answers *answers)
{
	answers->grant.mode = 3;
}
static void past_the_window(struct answers *answers)
{
	answers->runs.runs[3].offset = 20000 - 64 * ROW + 1;
}
static void far_offset(struct answers *answers)
{
	answers->runs.runs[0].offset = UINT32_MAX;
}
static void unknown_window(struct answers *answers)
{
	answers->runs.runs[1].window = 1;
}
static void empty_run(struct answers *answers)
{
	answers->runs.runs[0].bytes = 0;
}
static void too_much(struct answers *answers)
{
	answers->runs.runs[3].bytes = 65 * ROW;
}
static void too_little(struct answers *answers)
{
	answers->runs.runs[3].bytes = 63 * ROW;
}
static void across_parts(struct answers *answers)
{
	answers->runs.runs[1].bytes = 65 * ROW;
	answers->runs.runs[2].bytes = 63 * ROW;
}
static void wrong_first(struct answers *answers)
{
	answers->runs.first = 1;
}
static void none_at_all(struct answers *answers)
{
	answers->runs.n = 0;
}
static void more_than_fit(struct answers *answers)
{
	answers->grant.n_runs = 100;
	answers->runs.n = KVP_WIRE_RUNS_MAX + 1;
}
static void more_than_granted(struct answers *answers)
{
	answers->grant.n_runs = 3;
}
static void again(struct answers *answers)
{
	answers->twice = true;
}

struct bad_answer {
	void (*spoil)(struct answers *answers);
	const char *text;
};

static const struct bad_answer bad_answers[] = {
	{ more_windows, "a window out of order" },
	{ far_window, "a window out of order" },
	{ no_runs, "in mode 2" },
	{ many_runs, "in mode 2" },
	{ small_grant, "granted" },
	{ other_mode, "in mode 3" },
	{ past_the_window, "runs outside" },
	{ far_offset, "runs outside" },
	{ unknown_window, "runs outside" },
	{ empty_run, "runs outside" },
	{ too_much, "runs outside" },
	{ too_little, "runs outside" },
	{ across_parts, "runs outside" },
	{ wrong_first, "runs outside" },
	{ none_at_all, "runs outside" },
	{ more_than_fit, "runs outside" },
	{ more_than_granted, "runs outside" },
	{ again, "runs outside" },
};

static void answer(struct raw *raw, const struct answers *answers)
{
	peer_send(raw, &answers->window, sizeof(answers->window));
	peer_send(raw, &answers->grant, sizeof(answers->grant));
	peer_send(raw, &answers->runs, sizeof(answers->runs));
	if (answers->twice)
		peer_send(raw, &answers->runs, sizeof(answers->runs));
}

static void end_tx(struct raw *raw)
{
	struct kvp_board *board = &raw->room.senders[0].board;

	lt_order_id(raw->lane, KVP_ORDER_TX_END, board->id, 0);
	wait_board(raw, board, KVP_BOARD_QUIET);
}

Test(direct_hostile, grants)
{
	struct raw *raw = raw_make();

	lt_hold(raw->lane, KVP_HOLD_SEND, true); /* the second RUNS finds the piece */
	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad_answers); i++) {
		const struct bad_answer *bad = &bad_answers[i];
		struct kvp_wire_want want = begin_tx(raw);
		struct kvp_board *board = &raw->room.senders[0].board;
		struct answers answers = proper(&want);

		cr_assert_eq(want.direct, 1);
		bad->spoil(&answers);
		answer(raw, &answers);
		wait_board(raw, board, KVP_BOARD_FAILED);
		cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL, "%zu: %s", i,
			     board->text);
		cr_assert(strstr(board->text, bad->text), "%zu: %s", i, board->text);
		end_tx(raw);
	}
	cr_assert_eq(kvp_fake_look().n_refused, 0, "something was written");
	raw_end(raw);
}

/* Of a room that is over, or of none: dropped, and counted. */
Test(direct_hostile, stale_answers)
{
	struct raw *raw = raw_make();
	struct kvp_wire_want want = begin_tx(raw);
	struct answers answers = proper(&want);
	uint64_t stale;

	end_tx(raw);
	stale = lt_status(raw->lane).stale;
	answer(raw, &answers);
	want = begin_tx(raw); /* the lane has seen them by now */
	cr_assert_eq(lt_status(raw->lane).stale, stale + 3);
	answers = proper(&want);
	answers.window.cookie = answers.grant.cookie = answers.runs.cookie = UINT64_MAX;
	answer(raw, &answers);
	end_tx(raw);
	(void)begin_tx(raw);
	cr_assert_eq(lt_status(raw->lane).stale, stale + 6);
	end_tx(raw);
	raw_end(raw);
}

/* A receiver that names a place and gives no right to it: the sender loses the connection, no more.
 */
Test(direct_hostile, a_key_without_a_right)
{
	struct raw *raw = raw_make();
	struct kvp_wire_want want = begin_tx(raw);
	struct answers answers = proper(&want);

	answer(raw, &answers);
	wait_board(raw, &raw->ep_board, KVP_BOARD_FAILED);
	cr_assert_eq(raw->ep_board.status, KVP__STATUS__STATUS_PEER_LOST);
	cr_assert_gt(kvp_fake_look().n_refused, 0);
	end_tx(raw);
	raw_end(raw);
}

/* ---- a sender -------------------------------------------------------------------------------- */

struct granted {
	struct kvp_wire_window window;
	struct kvp_wire_grant grant;
	struct kvp_wire_runs runs;
};

static struct granted begin_rx(struct raw *raw)
{
	struct kvp_wire_want want = {
		.head = kvp_wire_head(KVP_WIRE_WANT),
		.cookie = 0x1234,
		.tokens = END,
		.entry_set = { 3 },
		.pieces = KVP_DIV_UP(END, PIECE),
		.last = 1,
		.kind = KVP_WIRE_ROWS,
		.direct = 1,
		.bytes = UINT64_C(2) * PIECE * ROW,
	};
	struct granted granted;

	raw_room(raw);
	lt_room_begin_rx(&raw->room);
	want.generation = raw->room.dests[0].board.id;
	peer_send(raw, &want, sizeof(want));
	granted.window = peer_wait(raw, KVP_WIRE_WINDOW).window;
	granted.grant = peer_wait(raw, KVP_WIRE_GRANT).grant;
	granted.runs = peer_wait(raw, KVP_WIRE_RUNS).runs;
	cr_assert_eq(granted.grant.mode, KVP_WIRE_DIRECT);
	cr_assert_eq(granted.grant.n_runs, granted.runs.n);
	cr_assert_leq(granted.grant.n_runs, 4, "two pages, which may touch, of two entries");
	return granted;
}

static struct kvp_wire_written written(const struct granted *granted)
{
	return (struct kvp_wire_written){
		.head = kvp_wire_head(KVP_WIRE_WRITTEN),
		.token = granted->grant.token,
		.slot = granted->grant.slot,
		.n = granted->grant.n_runs,
	};
}

/* The sender's last word on a room: what it was granted is not used. */
static void end_rx(struct raw *raw)
{
	struct kvp_board *board = &raw->room.dests[0].board;
	const struct kvp_wire_return msg = {
		.head = kvp_wire_head(KVP_WIRE_RETURN),
		.generation = board->id,
	};

	lt_order_id(raw->lane, KVP_ORDER_RX_END, board->id, 0);
	peer_send(raw, &msg, sizeof(msg));
	wait_board(raw, board, KVP_BOARD_QUIET);
}

static void written_wrongly(struct raw *raw, uint32_t first, uint32_t n)
{
	struct granted granted = begin_rx(raw);
	struct kvp_board *board = &raw->room.dests[0].board;
	struct kvp_wire_written msg = written(&granted);

	msg.first = first;
	msg.n = n;
	peer_send(raw, &msg, sizeof(msg));
	wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL);
	cr_assert(strstr(board->text, "wrote runs"), "%s", board->text);
	end_rx(raw);
}

Test(direct_hostile, runs_that_were_not_granted)
{
	struct raw *raw = raw_make();

	written_wrongly(raw, 1, 1);
	written_wrongly(raw, 0, 0);
	written_wrongly(raw, 0, 5);
	written_wrongly(raw, 0, UINT32_MAX);
	written_wrongly(raw, UINT32_MAX, 1);
	raw_end(raw);
}

static bool tokens_counted(void *arg)
{
	struct raw *raw = arg;

	peer_progress(raw);
	return lt_status(raw->lane).no_token >= 4;
}

Test(direct_hostile, tokens)
{
	struct raw *raw = raw_make();
	struct granted granted = begin_rx(raw);
	struct kvp_wire_written msg = written(&granted);

	msg.token ^= 1;
	peer_send(raw, &msg, sizeof(msg));
	msg.token = 0;
	peer_send(raw, &msg, sizeof(msg));
	msg = written(&granted);
	msg.slot++;
	peer_send(raw, &msg, sizeof(msg));
	msg.slot = UINT32_MAX;
	peer_send(raw, &msg, sizeof(msg));
	lt_wait_until(&raw->lt, tokens_counted, raw, "four to be dropped");
	cr_assert_eq(lt_status(raw->lane).pieces_landed, 0);

	/* The right one counts once, whatever was written. */
	msg = written(&granted);
	peer_send(raw, &msg, sizeof(msg));
	(void)peer_wait(raw, KVP_WIRE_LANDED);
	peer_send(raw, &msg, sizeof(msg));
	end_rx(raw);
	cr_assert_eq(lt_status(raw->lane).pieces_direct, 1);
	cr_assert_eq(lt_status(raw->lane).no_token, 5);
	raw_end(raw);
}

/* The window of a room that is over does not open again, though the peer still has the key. */
Test(direct_hostile, writes_after_the_end)
{
	struct raw *raw = raw_make();
	struct granted granted = begin_rx(raw);
	struct kvp_wire_written msg = written(&granted);
	struct kvp_net_key key;
	const struct kvp_net_run run = {
		.key = &key,
		.from = raw->memory,
		.offset = granted.runs.runs[0].offset,
		.bytes = 64,
	};
	const struct kvp_net_write write = {
		.runs = &run, .n = 1, .hdr = &msg, .hdr_bytes = sizeof(msg), .req = raw
	};

	memcpy(&key, granted.window.key, sizeof(key));
	memset(raw->memory, 0x5a, 64);
	cr_assert_eq(kvp_net_verbs.write(raw->net, raw->ep, &write), 0);
	peer_progress(raw);
	cr_assert_eq(kvp_fake_look().n_refused, 0, "it may write while it is granted");
	end_rx(raw);
	lt_pool_unmap(&raw->dst);
	cr_assert_eq(kvp_net_verbs.write(raw->net, raw->ep, &write), 0);
	peer_progress(raw);
	cr_assert_eq(kvp_fake_look().n_refused, 1);
	raw_end(raw);
}
