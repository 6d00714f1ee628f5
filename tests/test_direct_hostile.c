/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A peer in direct mode that does not play by the rules, on a device made of nothing: as a receiver
 * that grants what it should not, and as a sender that says it wrote what it did not.
 */

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/wire.h"
#include "tests/fake_verbs.h"
#include "tests/support_hostile.h"

#define SLOT 65536u
#define END 1000u
#define PIECE 128u /* tokens: two pages of the destination */
#define ROW 64u

static struct hostile *raw_make(void)
{
	const struct kvp_lane_config config = {
		.slots = 8, .slot_bytes = SLOT, .pack = true, .net = &kvp_net_verbs
	};
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = 16,
				  .layers = 2,
				  .row_bytes = ROW };
	struct kvp_net_memory memory = { .stride = 4096, .n = 16 };
	struct hostile *raw = hostile_begin(&config);

	raw->memory = lt_alloc(16, 4096);
	memory.base = raw->memory;
	hostile_open(raw, &kvp_net_verbs, (struct kvp_net_config){ 0 }, &memory);
	lt_pool_make(&raw->src, &raw->lt, raw->lane, &shape);
	lt_pool_fill(&raw->src, 42, 0, END);
	lt_pool_make(&raw->dst, &raw->lt, raw->lane, &shape);
	return raw;
}

static void raw_end(struct hostile *raw)
{
	hostile_end(raw);
	cr_assert_eq(kvp_fake.n_mws, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
}

/* ---- a receiver ------------------------------------------------------------------------------ */

static struct kvp_wire_want begin_tx(struct hostile *raw)
{
	struct lt_chunk chunk = { .tokens = PIECE };

	hostile_room(raw, END, SLOT, PIECE);
	hostile_begin_tx(raw);
	(void)lt_submit(&raw->room, 0, &chunk);
	return hostile_wait(raw, KVP_WIRE_WANT).want;
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

static void answer(struct hostile *raw, const struct answers *answers)
{
	hostile_send(raw, &answers->window, sizeof(answers->window));
	hostile_send(raw, &answers->grant, sizeof(answers->grant));
	hostile_send(raw, &answers->runs, sizeof(answers->runs));
	if (answers->twice)
		hostile_send(raw, &answers->runs, sizeof(answers->runs));
}

Test(direct_hostile, grants)
{
	struct hostile *raw = raw_make();

	lt_hold(raw->lane, KVP_HOLD_SEND, true); /* the second RUNS finds the piece */
	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad_answers); i++) {
		const struct bad_answer *bad = &bad_answers[i];
		struct kvp_wire_want want = begin_tx(raw);
		struct kvp_board *board = &raw->room.senders[0].board;
		struct answers answers = proper(&want);

		cr_assert_eq(want.direct, 1);
		bad->spoil(&answers);
		answer(raw, &answers);
		hostile_wait_board(raw, board, KVP_BOARD_FAILED);
		cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL, "%zu: %s", i,
			     board->text);
		cr_assert(strstr(board->text, bad->text), "%zu: %s", i, board->text);
		hostile_end_tx(raw);
	}
	cr_assert_eq(kvp_fake_look().n_refused, 0, "something was written");
	raw_end(raw);
}

/* Of a room that is over, or of none: dropped, and counted. */
Test(direct_hostile, stale_answers)
{
	struct hostile *raw = raw_make();
	struct kvp_wire_want want = begin_tx(raw);
	struct answers answers = proper(&want);
	uint64_t stale;

	hostile_end_tx(raw);
	stale = lt_status(raw->lane).stale;
	answer(raw, &answers);
	want = begin_tx(raw); /* the lane has seen them by now */
	cr_assert_eq(lt_status(raw->lane).stale, stale + 3);
	answers = proper(&want);
	answers.window.cookie = answers.grant.cookie = answers.runs.cookie = UINT64_MAX;
	answer(raw, &answers);
	hostile_end_tx(raw);
	(void)begin_tx(raw);
	cr_assert_eq(lt_status(raw->lane).stale, stale + 6);
	hostile_end_tx(raw);
	raw_end(raw);
}

/* A receiver that names a place and gives no right to it: the sender loses the connection, no more.
 */
Test(direct_hostile, a_key_without_a_right)
{
	struct hostile *raw = raw_make();
	struct kvp_wire_want want = begin_tx(raw);
	struct answers answers = proper(&want);

	memset(answers.window.key, 0x77, sizeof(answers.window.key));
	answer(raw, &answers);
	hostile_wait_board(raw, &raw->ep_board, KVP_BOARD_FAILED);
	cr_assert_eq(raw->ep_board.status, KVP__STATUS__STATUS_PEER_LOST);
	cr_assert_gt(kvp_fake_look().n_refused, 0);
	hostile_end_tx(raw);
	raw_end(raw);
}

/* One that has keys for none of its rails: no rail will do, however long one waits. */
Test(direct_hostile, a_window_without_a_key)
{
	struct hostile *raw = raw_make();
	struct kvp_wire_want want = begin_tx(raw);
	struct answers answers = proper(&want);

	answer(raw, &answers);
	hostile_wait_board(raw, &raw->ep_board, KVP_BOARD_FAILED);
	cr_assert_eq(raw->ep_board.status, KVP__STATUS__STATUS_TRANSPORT);
	cr_assert_eq(kvp_fake_look().n_refused, 0, "something was written");
	hostile_end_tx(raw);
	raw_end(raw);
}

/* ---- a sender -------------------------------------------------------------------------------- */

struct granted {
	struct kvp_wire_window window;
	struct kvp_wire_grant grant;
	struct kvp_wire_runs runs;
};

static struct granted begin_rx(struct hostile *raw)
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

	hostile_room(raw, END, SLOT, PIECE);
	lt_room_begin_rx(&raw->room);
	want.generation = raw->room.dests[0].board.id;
	hostile_send(raw, &want, sizeof(want));
	granted.window = hostile_wait(raw, KVP_WIRE_WINDOW).window;
	granted.grant = hostile_wait(raw, KVP_WIRE_GRANT).grant;
	granted.runs = hostile_wait(raw, KVP_WIRE_RUNS).runs;
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
static void end_rx(struct hostile *raw)
{
	struct kvp_board *board = &raw->room.dests[0].board;
	const struct kvp_wire_return msg = {
		.head = kvp_wire_head(KVP_WIRE_RETURN),
		.generation = board->id,
	};

	lt_order_id(raw->lane, KVP_ORDER_RX_END, board->id, 0);
	hostile_send(raw, &msg, sizeof(msg));
	hostile_wait_board(raw, board, KVP_BOARD_QUIET);
}

static void written_wrongly(struct hostile *raw, uint32_t first, uint32_t n)
{
	struct granted granted = begin_rx(raw);
	struct kvp_board *board = &raw->room.dests[0].board;
	struct kvp_wire_written msg = written(&granted);

	msg.first = first;
	msg.n = n;
	hostile_send(raw, &msg, sizeof(msg));
	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL);
	cr_assert(strstr(board->text, "wrote runs"), "%s", board->text);
	end_rx(raw);
}

Test(direct_hostile, runs_that_were_not_granted)
{
	struct hostile *raw = raw_make();

	written_wrongly(raw, 1, 1);
	written_wrongly(raw, 0, 0);
	written_wrongly(raw, 0, 5);
	written_wrongly(raw, 0, UINT32_MAX);
	written_wrongly(raw, UINT32_MAX, 1);
	raw_end(raw);
}

static bool tokens_counted(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).no_token >= 4;
}

Test(direct_hostile, tokens)
{
	struct hostile *raw = raw_make();
	struct granted granted = begin_rx(raw);
	struct kvp_wire_written msg = written(&granted);

	msg.token ^= 1;
	hostile_send(raw, &msg, sizeof(msg));
	msg.token = 0;
	hostile_send(raw, &msg, sizeof(msg));
	msg = written(&granted);
	msg.slot++;
	hostile_send(raw, &msg, sizeof(msg));
	msg.slot = UINT32_MAX;
	hostile_send(raw, &msg, sizeof(msg));
	lt_wait_until(&raw->lt, tokens_counted, raw, "four to be dropped");
	cr_assert_eq(lt_status(raw->lane).pieces_landed, 0);

	/* The right one counts once, whatever was written. */
	msg = written(&granted);
	hostile_send(raw, &msg, sizeof(msg));
	(void)hostile_wait(raw, KVP_WIRE_LANDED);
	hostile_send(raw, &msg, sizeof(msg));
	end_rx(raw);
	cr_assert_eq(lt_status(raw->lane).pieces_direct, 1);
	cr_assert_eq(lt_status(raw->lane).no_token, 5);
	raw_end(raw);
}

/* The window of a room that is over does not open again, though the peer still has the key. */
Test(direct_hostile, writes_after_the_end)
{
	struct hostile *raw = raw_make();
	struct granted granted = begin_rx(raw);
	struct kvp_wire_written msg = written(&granted);
	struct kvp_net_key key;
	const struct kvp_net_run run = {
		.key = &key,
		.from = raw->memory,
		.offset = granted.runs.runs[0].offset,
		.bytes = 64,
	};
	struct kvp_net_write write = {
		.runs = &run, .n = 1, .hdr = &msg, .hdr_bytes = sizeof(msg), .req = lt_alloc(1, 1)
	};

	memcpy(&key, granted.window.key, sizeof(key));
	memset(raw->memory, 0x5a, 64);
	cr_assert_eq(kvp_net_verbs.write(raw->net, raw->ep, &write), 0);
	hostile_progress(raw);
	cr_assert_eq(kvp_fake_look().n_refused, 0, "it may write while it is granted");
	end_rx(raw);
	lt_pool_unmap(&raw->dst);
	write.req = lt_alloc(1, 1);
	cr_assert_eq(kvp_net_verbs.write(raw->net, raw->ep, &write), 0);
	hostile_progress(raw);
	cr_assert_eq(kvp_fake_look().n_refused, 1);
	raw_end(raw);
}
