/* SPDX-License-Identifier: Apache-2.0 */

/* A peer that does not play by the rules: it speaks to a lane through a transport of its own. */

#include <criterion/criterion.h>
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "daemon/net_ucx.h"
#include "proto/kvpack.pb-c.h"
#include "tests/support_hostile.h"

#define SLOT 65536u
#define END 2000u
#define N_PLACES 64u
#define PLACE_BYTES ((size_t)SLOT + KVP_NET_TAIL_BYTES)

/* ---- the peer's transport -------------------------------------------------------------------- */

/* A transport that writes gets the payload into the slot that was granted last, whatever the header
 * says; without one nothing comes with the message. */
static size_t payload_of(const struct hostile *raw, size_t payload)
{
	if (!lt_net()->put)
		return payload;
	return raw->has_key ? KVP_MIN(payload, (size_t)SLOT) : 0;
}

static int peer_try(struct hostile *raw, const void *hdr, size_t hdr_bytes, uint8_t *bytes,
		    size_t payload)
{
	const struct kvp_net_put put = {
		.hdr = hdr,
		.hdr_bytes = hdr_bytes,
		.payload = bytes,
		.bytes = payload,
		.key = &raw->key,
		.whole = raw->whole,
		.req = bytes,
	};

	if (payload && lt_net()->put)
		return lt_net()->put(raw->net, raw->ep, &put);
	return lt_net()->send(raw->net, raw->ep, hdr, hdr_bytes, bytes, payload, bytes);
}

static void peer_send(struct hostile *raw, const void *hdr, size_t hdr_bytes, size_t wanted)
{
	size_t payload = payload_of(raw, wanted);
	uint8_t *bytes = payload ? calloc(1, payload) : NULL;
	int r;

	do {
		r = peer_try(raw, hdr, hdr_bytes, bytes, payload);
		hostile_progress(raw);
	} while (r == -EAGAIN);
	cr_assert_eq(r, 0);
}

/* ---- the lane's side ------------------------------------------------------------------------- */

/* The first want of a proper sender for [0, END) in one chunk. */
static void proper_want(struct hostile *raw)
{
	struct kvp_lane_geom geom = lt_geom(&raw->room, 0, 0);
	uint32_t n_parts;

	raw->want = (struct kvp_wire_want){
		.head = kvp_wire_head(KVP_WIRE_WANT),
		.generation = raw->room.dests[0].board.id,
		.cookie = 0x1234,
		.tokens = END,
		.entry_set = { 3 },
		.pieces = KVP_DIV_UP(END, geom.piece_tokens),
		.last = 1,
		.kind = KVP_WIRE_ROWS,
	};
	raw->want.bytes = kvp_piece_layout(&geom.geom, raw->want.entry_set, 0,
					   KVP_MIN(geom.piece_tokens, END), NULL, &n_parts);
	free(geom.block);
}

static void raw_begin_rx(struct hostile *raw)
{
	hostile_room(raw, END, SLOT, 0);
	lt_room_begin_rx(&raw->room);
	proper_want(raw);
}

static void raw_end_rx(struct hostile *raw)
{
	struct kvp_board *board = &raw->room.dests[0].board;

	lt_order_id(raw->lane, KVP_ORDER_RX_END, board->id, 0);
	lt_wait(&raw->lt, board, KVP_BOARD_QUIET);
}

static struct hostile *raw_make_with(bool pack, const struct kvp_net_ops *ops)
{
	const struct kvp_lane_config config = {
		.slots = 8, .slot_bytes = SLOT, .pack = pack, .net = ops
	};
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = 32,
				  .layers = 2,
				  .row_bytes = 576 };
	struct kvp_net_verbs_config verbs;
	struct kvp_net_config net = { .interface = "lo", .verbs = &verbs };
	struct hostile *raw = hostile_begin(&config);

	net.rdma = lt_rdma(&verbs);
	hostile_open(raw, lt_net(), net, NULL);
	lt_pool_make(&raw->src, &raw->lt, raw->lane, &shape);
	shape.dcp_size = 2;
	shape.n_pages = 16;
	lt_pool_make(&raw->dst, &raw->lt, raw->lane, &shape);
	return raw;
}

static struct hostile *raw_make_lane(bool pack)
{
	return raw_make_with(pack, &kvp_net_ucx);
}

static struct hostile *raw_make(void)
{
	return raw_make_lane(true);
}

/* ---- wants ----------------------------------------------------------------------------------- */

struct bad_want {
	const char *text;
	Kvp__Status status;
	void (*spoil)(struct kvp_wire_want *want);
};

static void bad_seq(struct kvp_wire_want *want)
{
	want->seq = 1;
}
static void bad_piece(struct kvp_wire_want *want)
{
	want->piece = 1;
}
static void bad_start(struct kvp_wire_want *want)
{
	want->start = 1;
	want->tokens--;
}
static void past_end(struct kvp_wire_want *want)
{
	want->tokens++;
}
static void overflow(struct kvp_wire_want *want)
{
	want->start = UINT64_MAX - 5;
	want->tokens = UINT64_MAX - 5;
}
static void huge(struct kvp_wire_want *want)
{
	want->tokens = UINT64_MAX;
}
static void short_last(struct kvp_wire_want *want)
{
	want->tokens--;
}
static void few_entries(struct kvp_wire_want *want)
{
	want->entry_set[0] = 1;
}
static void strange_entry(struct kvp_wire_want *want)
{
	want->entry_set[7] = UINT64_C(1) << 63;
}
static void no_pieces(struct kvp_wire_want *want)
{
	want->pieces = 0;
}
static void few_pieces(struct kvp_wire_want *want)
{
	want->pieces = 1;
}
static void bad_last(struct kvp_wire_want *want)
{
	want->last = 2;
}
static void bad_kind(struct kvp_wire_want *want)
{
	want->kind = KVP_WIRE_META;
}
static void bad_bytes(struct kvp_wire_want *want)
{
	want->bytes += 576;
}
static void huge_bytes(struct kvp_wire_want *want)
{
	want->bytes = UINT64_MAX;
}
static void segment_piece(struct kvp_wire_want *want)
{
	*want = (struct kvp_wire_want){ .head = want->head,
					.generation = want->generation,
					.cookie = want->cookie,
					.pieces = 1,
					.kind = KVP_WIRE_SEGMENT,
					.segment = 9,
					.bytes = 10,
					.total = 10 };
}
static void meta_piece(struct kvp_wire_want *want)
{
	segment_piece(want);
	want->kind = KVP_WIRE_META;
}
static void unknown_kind(struct kvp_wire_want *want)
{
	segment_piece(want);
	want->kind = 77;
}
static void full_empty(struct kvp_wire_want *want)
{
	segment_piece(want);
	want->kind = KVP_WIRE_EMPTY;
}

static const struct bad_want bad_wants[] = {
	{ "seq 1, expected 0", KVP__STATUS__STATUS_ORDER, bad_seq },
	{ "expected seq 0 piece 0", KVP__STATUS__STATUS_ORDER, bad_piece },
	{ "has ended at 0", KVP__STATUS__STATUS_ORDER, bad_start },
	{ "end past 2000", KVP__STATUS__STATUS_ORDER, past_end },
	{ "end past 2000", KVP__STATUS__STATUS_ORDER, overflow },
	{ "end past 2000", KVP__STATUS__STATUS_ORDER, huge },
	{ "ends at 1999, not 2000", KVP__STATUS__STATUS_ORDER, short_last },
	{ "entry 1 ends at 0", KVP__STATUS__STATUS_ORDER, few_entries },
	{ "entry 511", KVP__STATUS__STATUS_MISMATCH, strange_entry },
	{ "0 pieces", KVP__STATUS__STATUS_PROTOCOL, no_pieces },
	{ "1 pieces", KVP__STATUS__STATUS_PROTOCOL, few_pieces },
	{ "last is 2", KVP__STATUS__STATUS_PROTOCOL, bad_last },
	{ "kind 3", KVP__STATUS__STATUS_PROTOCOL, bad_kind },
	{ "here it takes", KVP__STATUS__STATUS_MISMATCH, bad_bytes },
	{ "slots have 65536", KVP__STATUS__STATUS_MISMATCH, huge_bytes },
	{ "segment 9 is not expected", KVP__STATUS__STATUS_MISMATCH, segment_piece },
	{ "meta from this sender", KVP__STATUS__STATUS_MISMATCH, meta_piece },
	{ "kind 77", KVP__STATUS__STATUS_PROTOCOL, unknown_kind },
	{ "empty piece", KVP__STATUS__STATUS_PROTOCOL, full_empty },
};

Test(lane_hostile, wants)
{
	struct hostile *raw = raw_make();

	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad_wants); i++) {
		struct kvp_board *board = &raw->room.dests[0].board;
		struct kvp_wire_want want;
		union kvp_wire_msg refuse;

		raw_begin_rx(raw);
		want = raw->want;
		bad_wants[i].spoil(&want);
		peer_send(raw, &want, sizeof(want), 0);
		refuse = hostile_wait(raw, KVP_WIRE_REFUSE);
		cr_assert_eq(refuse.refuse.cookie, 0x1234);
		hostile_wait_board(raw, board, KVP_BOARD_FAILED);
		cr_assert_eq(board->status, bad_wants[i].status, "%zu: %s", i, board->text);
		cr_assert(strstr(board->text, bad_wants[i].text), "%zu: %s", i, board->text);
		raw_end_rx(raw);
	}
	hostile_end(raw);
}

/* The status follows at the end of the turn. */
static bool one_refused(void *arg)
{
	return lt_status(arg).want_refused == 1;
}

Test(lane_hostile, wants_beyond_the_window)
{
	struct hostile *raw = raw_make();
	struct kvp_board *board = &raw->room.dests[0].board;
	uint32_t n;

	raw_begin_rx(raw);
	n = raw->want.pieces;
	cr_assert_gt(n, KVP_WIRE_LEG_WINDOW);
	for (uint32_t i = 0; i <= KVP_WIRE_LEG_WINDOW; i++) {
		peer_send(raw, &raw->want, sizeof(raw->want), 0);
		raw->want.piece++;
	}
	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_LIMIT, "%s", board->text);
	raw_end_rx(raw);
	lt_wait_until(&raw->lt, one_refused, raw->lane, "the want to be counted");
	hostile_end(raw);
}

/* Chunks without bytes land at once and take no place in a window: but who reads no answer to them
 * gets no more. */
Test(lane_hostile, answers_that_nobody_reads)
{
	struct hostile *raw = raw_make();
	struct kvp_board *board = &raw->room.dests[0].board;
	struct kvp_wire_want want;

	raw_begin_rx(raw);
	want = raw->want;
	want.tokens = want.bytes = want.last = 0;
	want.kind = KVP_WIRE_EMPTY;
	want.pieces = 1;
	memset(want.entry_set, 0, sizeof(want.entry_set));
	lt_hold(raw->lane, KVP_HOLD_LANDED, true);
	for (uint32_t i = 0; i <= KVP_LANE_UNTOLD; i++) {
		want.seq = i;
		peer_send(raw, &want, sizeof(want), 0);
	}
	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_LIMIT, "%s", board->text);
	cr_assert(strstr(board->text, "4096 answers"), "%s", board->text);
	lt_hold(raw->lane, KVP_HOLD_LANDED, false);
	raw_end_rx(raw);
	hostile_end(raw);
}

/* ---- a lane that has no time -------------------------------------------------------------------
 */

static atomic_bool is_busy, busy_wanted;

static int busy_progress(struct kvp_net *net)
{
	while (atomic_load(&busy_wanted)) {
		atomic_store(&is_busy, true);
		(void)sched_yield();
	}
	return lt_net()->progress(net);
}

static bool one_stale(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).stale == 1;
}

static bool lane_is_busy(void *arg)
{
	(void)arg;
	return atomic_load(&is_busy);
}

static bool all_400(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return atomic_load(&raw->room.dests[0].board.pieces) == 400;
}

/* While a lane is at work, its loop may accept many legs and their senders begin: their wants come
 * before the orders that tell of the legs, and none may be lost. */
Test(lane_hostile, wants_before_the_orders_of_their_legs)
{
	const struct kvp_wire_landed landed = { kvp_wire_head(KVP_WIRE_LANDED), 1 };
	struct kvp_net_ops ops = *lt_net();
	struct kvp_wire_want want;
	struct hostile *raw;

	if ((&lt_gpu && lt_gpu) || lt_net()->put) /* that lane's transport is another */
		return;
	ops.progress = busy_progress;
	raw = raw_make_with(true, &ops);
	peer_send(raw, &landed, sizeof(landed), 0); /* the connection is there */
	lt_wait_until(&raw->lt, one_stale, raw, "an answer to nothing");
	atomic_store(&busy_wanted, true);
	lt_order_id(raw->lane, KVP_ORDER_FENCE_END, 0, 0); /* wakes it */
	lt_wait_until(&raw->lt, lane_is_busy, raw, "the lane to be at work");
	raw_begin_rx(raw);
	want = raw->want;
	want.tokens = want.bytes = want.last = 0;
	want.kind = KVP_WIRE_EMPTY;
	want.pieces = 1;
	memset(want.entry_set, 0, sizeof(want.entry_set));
	for (want.seq = 0; want.seq < 400; want.seq++)
		peer_send(raw, &want, sizeof(want), 0);
	atomic_store(&busy_wanted, false);
	lt_wait_until(&raw->lt, all_400, raw, "all chunks");
	cr_assert_eq(lt_status(raw->lane).stale, 1);
	raw_end_rx(raw);
	hostile_end(raw);
}

/* ---- payloads of wants by rendezvous --------------------------------------------------------- */

static bool want_seen(void *arg)
{
	struct hostile *raw = arg;

	if (atomic_load(&raw->room.dests[0].board.first_want_ns) != 0)
		return true; /* without progress: the payload is still to be fetched */
	raw->ops->progress(raw->net);
	return false;
}

/* A want with its payload, which UCX fetches from us while we progress. */
static void rendezvous_want(struct hostile *raw, void *payload)
{
	ucp_request_param_t param = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
				      .flags = UCP_AM_SEND_FLAG_RNDV };
	ucs_status_ptr_t request =
		ucp_am_send_nbx(raw->ep->ucp, KVP_UCX_AM_ID, &raw->want, sizeof(raw->want), payload,
				raw->want.bytes, &param);

	cr_assert(!UCS_PTR_IS_ERR(request));
	if (request)
		ucp_request_free(request); /* UCP ends it by itself */
	lt_wait_until(&raw->lt, want_seen, raw, "the want");
}

/* A room with such a want, which the lane has a place for: not one that it hears of before the
 * room. */
static void rendezvous_room(struct hostile *raw, void *payload)
{
	for (;;) {
		raw_begin_rx(raw);
		rendezvous_want(raw, payload);
		if (atomic_load(&raw->room.dests[0].board.first_data_ns) != 0)
			return;
		raw_end_rx(raw);
	}
}

static bool slots_free(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).land_free == 8;
}

/* Such a payload is there long after its want: when its room is over, or when the next is there. */
Test(lane_hostile, wants_by_rendezvous)
{
	struct hostile *raw = raw_make();
	uint8_t *payload = calloc(1, SLOT);

	/* UCX itself writes such a payload, and knows nothing of a driver that is none. */
	if (lt_net() == &kvp_net_ucx && !(&lt_gpu && lt_gpu)) {
		rendezvous_room(raw, payload);
		raw_end_rx(raw);
		rendezvous_room(raw, payload);
		cr_assert_eq(hostile_wait(raw, KVP_WIRE_LANDED).landed.cookie, 0x1234);
		raw_end_rx(raw);
		lt_wait_until(&raw->lt, slots_free, raw, "all slots");
	}
	hostile_end(raw);
	free(payload);
}

/* ---- data ------------------------------------------------------------------------------------ */

static bool dropped_all(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).no_token >= 6;
}

/* Data that names no live token goes nowhere; the room goes on. */
Test(lane_hostile, tokens)
{
	struct hostile *raw = raw_make();
	union kvp_wire_msg grant;
	struct kvp_wire_data data = { .head = kvp_wire_head(KVP_WIRE_DATA) }, bad;

	raw_begin_rx(raw);
	peer_send(raw, &raw->want, sizeof(raw->want), 0);
	grant = hostile_wait(raw, KVP_WIRE_GRANT);
	cr_assert_eq(grant.grant.cookie, 0x1234);
	cr_assert_eq(grant.grant.mode, KVP_WIRE_LANDING);
	data.token = grant.grant.token;
	data.slot = grant.grant.slot;
	data.total = raw->want.bytes;

	bad = data;
	bad.token ^= 1;
	peer_send(raw, &bad, sizeof(bad), raw->want.bytes);
	bad.token = 0;
	peer_send(raw, &bad, sizeof(bad), raw->want.bytes);
	bad = data;
	bad.slot ^= 1;
	peer_send(raw, &bad, sizeof(bad), raw->want.bytes);
	bad.slot = 8;
	peer_send(raw, &bad, sizeof(bad), raw->want.bytes);
	bad.slot = UINT32_MAX;
	peer_send(raw, &bad, sizeof(bad), 3u << 20); /* by a writing transport: less */

	peer_send(raw, &data, sizeof(data), raw->want.bytes);
	cr_assert_eq(hostile_wait(raw, KVP_WIRE_LANDED).landed.cookie, 0x1234);
	peer_send(raw, &data, sizeof(data), raw->want.bytes); /* a replay */
	lt_wait_until(&raw->lt, dropped_all, raw, "drops");
	cr_assert_eq(lt_status(raw->lane).no_token, 6);
	cr_assert_not(kvp_board_flags(&raw->room.dests[0].board) & KVP_BOARD_FAILED);
	raw_end_rx(raw);
	hostile_end(raw);
}

static void bad_data(uint64_t offset, uint64_t total_more, size_t payload_less)
{
	struct hostile *raw = raw_make();
	struct kvp_board *board = &raw->room.dests[0].board;
	struct kvp_wire_data data = { .head = kvp_wire_head(KVP_WIRE_DATA) };
	union kvp_wire_msg grant;

	raw_begin_rx(raw);
	peer_send(raw, &raw->want, sizeof(raw->want), 0);
	grant = hostile_wait(raw, KVP_WIRE_GRANT);
	data.token = grant.grant.token;
	data.slot = grant.grant.slot;
	data.total = raw->want.bytes + total_more;
	data.offset = offset;
	raw->whole = true;
	peer_send(raw, &data, sizeof(data), raw->want.bytes - payload_less);
	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL, "%s", board->text);
	raw_end_rx(raw);
	lt_pool_check(&raw->dst, 1, 0, 0, 0); /* nothing was written */
	hostile_end(raw);
}

Test(lane_hostile, data_that_does_not_fit)
{
	bad_data(1, 0, 0);
	bad_data(UINT64_MAX - 100, 0, 0);
	bad_data(0, 1, 0);
	bad_data(0, 0, 1);
	bad_data(576, 0, 10);
}

/* The same row twice, while another never comes. */
Test(lane_hostile, a_row_twice)
{
	struct hostile *raw = raw_make();
	struct kvp_board *board = &raw->room.dests[0].board;
	struct kvp_wire_data data = { .head = kvp_wire_head(KVP_WIRE_DATA) };
	union kvp_wire_msg grant;

	raw_begin_rx(raw);
	peer_send(raw, &raw->want, sizeof(raw->want), 0);
	grant = hostile_wait(raw, KVP_WIRE_GRANT);
	data.token = grant.grant.token;
	data.slot = grant.grant.slot;
	data.total = raw->want.bytes;
	peer_send(raw, &data, sizeof(data), 576);
	peer_send(raw, &data, sizeof(data), 576);
	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_PROTOCOL, "%s", board->text);
	raw_end_rx(raw);
	hostile_end(raw);
}

/* ---- noise ----------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static uint64_t rnd(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state;
}

/* A message of a right type and size with some bytes changed, or one of random bytes. */
static size_t noise(struct hostile *raw, union kvp_wire_msg *msg)
{
	static const size_t sizes[] = {
		[KVP_WIRE_WANT] = sizeof(struct kvp_wire_want),
		[KVP_WIRE_GRANT] = sizeof(struct kvp_wire_grant),
		[KVP_WIRE_DATA] = sizeof(struct kvp_wire_data),
		[KVP_WIRE_LANDED] = sizeof(struct kvp_wire_landed),
		[KVP_WIRE_RETURN] = sizeof(struct kvp_wire_return),
		[KVP_WIRE_REFUSE] = sizeof(struct kvp_wire_refuse),
	};
	uint8_t *bytes = (uint8_t *)msg;
	size_t n = 1 + rnd() % sizeof(*msg);

	for (size_t i = 0; i < sizeof(*msg); i++)
		bytes[i] = (uint8_t)rnd();
	if (rnd() % 8 == 0)
		return n;

	msg->head = kvp_wire_head((enum kvp_wire_type)(1 + rnd() % 6));
	n = sizes[msg->head.type];
	if (msg->head.type == KVP_WIRE_WANT) {
		msg->want = raw->want;
		for (uint64_t i = rnd() % 4; i > 0; i--)
			bytes[sizeof(msg->head) + rnd() % (n - sizeof(msg->head))] ^=
				(uint8_t)(1u << rnd() % 8);
	} else if (msg->head.type == KVP_WIRE_RETURN) {
		msg->ret.generation = raw->want.generation;
		msg->ret.sender = (uint32_t)(rnd() % 2);
	} else if (msg->head.type == KVP_WIRE_DATA) {
		msg->data.slot = (uint32_t)(rnd() % 10);
	}
	return n;
}

static bool all_back(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	raw->n_got = 0;
	return raw->n_sent_back >= 500;
}

Test(lane_hostile, noise)
{
	struct hostile *raw = raw_make();
	struct kvp_lane_status status;

	for (uint32_t round = 0; round < 200; round++) {
		raw_begin_rx(raw);
		for (uint32_t i = 0; i < 50; i++) {
			union kvp_wire_msg msg;
			size_t n = noise(raw, &msg);
			bool payload = msg.head.type == KVP_WIRE_DATA ? rnd() % 8 : !(rnd() % 16);

			peer_send(raw, &msg, n, payload ? 1 + rnd() % 70000 : 0);
			if (raw->n_got > 200)
				raw->n_got = 0;
		}
		raw_end_rx(raw);
	}
	lt_wait_until(&raw->lt, all_back, raw, "sends to end");
	status = lt_status(raw->lane);
	cr_assert_gt(status.bad_messages, 0);
	cr_assert_gt(status.no_token, 0);
	cr_assert_gt(status.stale, 0);
	lt_pool_check(&raw->dst, 1, 0, 0, 0);
	hostile_end(raw);
}

/* ---- a receiver ------------------------------------------------------------------------------ */

static union kvp_wire_msg raw_begin_tx(struct hostile *raw)
{
	hostile_room(raw, END, SLOT, 0);
	hostile_begin_tx(raw);
	lt_submit_all(&raw->room, 0, END);
	return hostile_wait(raw, KVP_WIRE_WANT);
}

static void expect_tx(struct hostile *raw, Kvp__Status status, const char *text)
{
	struct kvp_board *board = &raw->room.senders[0].board;

	hostile_wait_board(raw, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, status, "%s", board->text);
	cr_assert(strstr(board->text, text), "%s", board->text);
	hostile_end_tx(raw);
}

Test(lane_hostile, answers)
{
	struct hostile *raw = raw_make();
	union kvp_wire_msg want = raw_begin_tx(raw);
	struct kvp_wire_grant grant = { .head = kvp_wire_head(KVP_WIRE_GRANT),
					.cookie = want.want.cookie,
					.token = 5,
					.slot_bytes = SLOT,
					.mode = 2 };
	struct kvp_wire_landed landed = { kvp_wire_head(KVP_WIRE_LANDED), want.want.cookie };
	struct kvp_wire_refuse refuse = { .head = kvp_wire_head(KVP_WIRE_REFUSE) };

	peer_send(raw, &grant, sizeof(grant), 0);
	expect_tx(raw, KVP__STATUS__STATUS_PROTOCOL, "in mode 2");

	want = raw_begin_tx(raw);
	grant.cookie = want.want.cookie;
	grant.mode = KVP_WIRE_LANDING;
	grant.slot_bytes = want.want.bytes - 1;
	peer_send(raw, &grant, sizeof(grant), 0);
	expect_tx(raw, KVP__STATUS__STATUS_PROTOCOL, "for a piece of");

	want = raw_begin_tx(raw);
	landed.cookie = want.want.cookie;
	peer_send(raw, &landed, sizeof(landed), 0);
	expect_tx(raw, KVP__STATUS__STATUS_PROTOCOL, "which was not sent");

	want = raw_begin_tx(raw);
	refuse.cookie = want.want.cookie;
	refuse.status = KVP__STATUS__STATUS_MISMATCH;
	peer_send(raw, &refuse, sizeof(refuse), 0);
	expect_tx(raw, KVP__STATUS__STATUS_MISMATCH, "refused piece ");

	want = raw_begin_tx(raw);
	refuse.cookie = want.want.cookie;
	refuse.status = 4711;
	peer_send(raw, &refuse, sizeof(refuse), 0);
	expect_tx(raw, KVP__STATUS__STATUS_PROTOCOL, "refused piece ");

	/* Wrong cookies, grants twice: dropped and counted; the room goes on, up to its send. */
	lt_hold(raw->lane, KVP_HOLD_SEND, true);
	want = raw_begin_tx(raw);
	grant.cookie = want.want.cookie ^ (UINT64_C(1) << 40);
	grant.slot_bytes = SLOT;
	peer_send(raw, &grant, sizeof(grant), 0);
	grant.cookie = UINT64_MAX;
	peer_send(raw, &grant, sizeof(grant), 0);
	grant.cookie = want.want.cookie;
	peer_send(raw, &grant, sizeof(grant), 0);
	peer_send(raw, &grant, sizeof(grant), 0);
	lt_wait_held(&raw->lt, raw->lane, KVP_HOLD_SEND, 1);
	cr_assert_eq(lt_status(raw->lane).holds[KVP_HOLD_SEND], 1);
	hostile_end_tx(raw);
	cr_assert_geq(lt_status(raw->lane).stale, 3);
	hostile_end(raw);
}

static void make_places(struct hostile *raw)
{
	struct kvp_net_memory memory = {
		.stride = PLACE_BYTES, .n = N_PLACES, .landing = true, .dmabuf = -1
	};
	char err[256] = "";

	if (!lt_net()->memory)
		return;
	raw->memory = lt_alloc(N_PLACES, PLACE_BYTES);
	memory.base = raw->memory;
	cr_assert_eq(lt_net()->memory(raw->net, &memory, err, sizeof(err)), 0, "%s", err);
}

/* Its token is its cookie. */
static void grant(struct hostile *raw, const struct kvp_wire_want *want)
{
	struct kvp_wire_grant msg = { .head = kvp_wire_head(KVP_WIRE_GRANT),
				      .cookie = want->cookie,
				      .token = want->cookie,
				      .slot_bytes = SLOT,
				      .slot = raw->n_granted++,
				      .mode = KVP_WIRE_LANDING };
	struct kvp_net_key key = { { 0 } };

	cr_assert_lt(msg.slot, N_PLACES);
	if (raw->memory)
		cr_assert_eq(lt_net()->expose(raw->net, raw->memory + msg.slot * PLACE_BYTES, SLOT,
					      &key),
			     0);
	memcpy(msg.key, &key, sizeof(msg.key));
	peer_send(raw, &msg, sizeof(msg), 0);
}

static bool all_granted(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).holds[KVP_HOLD_GATHER] == raw->n_granted;
}

/* Plays the receiver until the sender has heard of all pieces. */
static bool all_landed(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	while (raw->n_got > 0) {
		union kvp_wire_msg msg = raw->got[--raw->n_got];

		cr_assert_eq(msg.head.type, KVP_WIRE_WANT);
		grant(raw, &msg.want);
	}
	while (raw->n_data > 0) {
		struct kvp_wire_landed msg = { kvp_wire_head(KVP_WIRE_LANDED),
					       raw->data[--raw->n_data] };

		peer_send(raw, &msg, sizeof(msg), 0);
	}
	return kvp_board_flags(&raw->room.senders[0].board) & KVP_BOARD_COMPLETE;
}

static bool all_rows_sent(void *arg)
{
	struct hostile *raw = arg;

	hostile_progress(raw);
	return lt_status(raw->lane).raw_rows == 100;
}

/* Of rows that were sent one by one, a receiver that failed does not know which is the last: it is
 * told, or would keep the slot. */
Test(lane_hostile, rows_sent_one_by_one_are_returned)
{
	struct hostile *raw = raw_make_lane(false);
	struct kvp_wire_grant grant = { .head = kvp_wire_head(KVP_WIRE_GRANT),
					.token = 5,
					.slot_bytes = SLOT,
					.mode = KVP_WIRE_LANDING };
	struct kvp_wire_want want;

	if (lt_net() == &kvp_net_ucx && !(&lt_gpu && lt_gpu)) { /* a GPU always packs */
		hostile_room(raw, 100, SLOT, 0);                /* 50 rows of 2 layers: one piece */
		hostile_begin_tx(raw);
		lt_submit_all(&raw->room, 0, 100);
		want = hostile_wait(raw, KVP_WIRE_WANT).want;
		grant.cookie = want.cookie;
		peer_send(raw, &grant, sizeof(grant), 0);
		lt_wait_until(&raw->lt, all_rows_sent, raw, "rows");
		hostile_end_tx(raw);
		cr_assert_eq(hostile_wait(raw, KVP_WIRE_RETURN).ret.generation, want.generation);
	}
	hostile_end(raw);
}

/*
 * Two destinations that need the same rows, with more grants than the sender may have slots, those
 * of one before all of the other: what was granted last shares the slots of the first pieces, and
 * must not wait for the others.
 */
Test(lane_hostile, grants_of_one_destination_before_the_other)
{
	struct hostile *raw = raw_make();
	struct kvp_wire_want wants[2 * KVP_WIRE_LEG_WINDOW];

	make_places(raw);
	lt_hold(raw->lane, KVP_HOLD_GATHER, true);
	hostile_room(raw, END, SLOT, 0);
	raw->room.n_dests = 2;
	raw->room.dests[1].pool = &raw->dst;
	hostile_begin_tx(raw);
	lt_submit_all(&raw->room, 0, END);
	for (uint32_t i = 0; i < KVP_ARRAY_SIZE(wants); i++)
		wants[i] = hostile_wait(raw, KVP_WIRE_WANT).want;
	for (uint32_t d = 0; d < 2; d++)
		for (uint32_t i = 0; i < KVP_ARRAY_SIZE(wants); i++)
			if (wants[i].generation == raw->room.dests[d].board.id)
				grant(raw, &wants[i]);
	lt_wait_until(&raw->lt, all_granted, raw, "the grants to arrive");
	lt_hold(raw->lane, KVP_HOLD_GATHER, false);
	lt_wait_until(&raw->lt, all_landed, raw, "all pieces");
	cr_assert_gt(lt_status(raw->lane).shared, 0);
	hostile_end_tx(raw);
	hostile_end(raw);
}
