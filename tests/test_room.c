/* SPDX-License-Identifier: Apache-2.0 */

/* Rooms, with a real lane: on one node by local mode, and between two over a real transport. */

#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

#include "tests/support_clock.h"
#include "tests/support_lane.h"
#include "tests/support_room.h"

#define OK KVP__STATUS__STATUS_OK
#define ST(name) KVP__STATUS__STATUS_##name
#define RS(name) KVP__ROOM_STATE__ROOM_##name

static uv_loop_t loop;
static struct sr_node a, b; /* a: prefill (or both), b: decode */
static struct sr_pool src, dst, dst2;

static const uint32_t src_pages[] = { 3, 0, 7, 5, 1, 6, 2, 4 };
static const uint32_t dst_pages[] = { 6, 2, 9, 4, 0, 8, 1, 3 };
static const uint32_t dst_more[] = { 12, 10, 15, 11, 14, 13, 5, 7 };

static const struct sr_shape plain = {
	.page = 8, .dcp_size = 1, .n_pages = 16, .layers = 3, .row_bytes = 64, .blob_bytes = 4096
};
static const struct sr_shape half0 = {
	.page = 8, .dcp_size = 2, .n_pages = 16, .layers = 3, .row_bytes = 64, .blob_bytes = 4096
};
static const struct sr_shape half1 = { .page = 8,
				       .dcp_size = 2,
				       .dcp_rank = 1,
				       .n_pages = 16,
				       .layers = 3,
				       .row_bytes = 64,
				       .blob_bytes = 4096 };

static void setup(void)
{
	uv_loop_init(&loop);
	sr_init(&a, &loop, 1);
	sr_init(&b, &loop, 2);
}

static void finish(void)
{
	if (b.rooms)
		sr_stop(&b);
	if (a.rooms)
		sr_stop(&a);
	uv_run(&loop, UV_RUN_NOWAIT);
	cr_assert_eq(uv_loop_close(&loop), 0);
}

TestSuite(room, .init = setup, .fini = finish, .timeout = 60);

/* One node, a plain source, a plain destination. */
static void local_pair(void)
{
	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &plain);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
}

static const char *self(void)
{
	return kvp_peers_address(a.peers);
}

static struct sr_expect expect_one(uint64_t handle)
{
	struct sr_expect expect = { .handle = handle,
				    .room = 7,
				    .pages = dst_pages,
				    .n_pages = 8,
				    .end = 64,
				    .n_senders = 1 };

	expect.senders[0].address = self();
	return expect;
}

static struct sr_chunk chunk_of(uint64_t handle, uint32_t seq, uint64_t start, uint64_t tokens)
{
	return (struct sr_chunk){ .handle = handle,
				  .seq = seq,
				  .start = start,
				  .tokens = tokens,
				  .pages = src_pages,
				  .n_pages = 8 };
}

static void submit(struct sr_node *node, const struct sr_chunk *chunk)
{
	cr_assert_eq(sr_submit(node, chunk), OK, "%s", node->err);
}

static void submit_all(uint64_t handle)
{
	struct sr_chunk chunk = chunk_of(handle, 0, 0, 24);

	submit(&a, &chunk);
	chunk = chunk_of(handle, 1, 24, 40);
	chunk.last = true;
	submit(&a, &chunk);
}

static void open_ok(uint64_t handle, uint64_t room, uint32_t sender)
{
	struct sr_open open = { .handle = handle, .room = room, .sender = sender };

	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
}

static void expect_ok(const struct sr_expect *expect)
{
	cr_assert_eq(sr_expect(&a, &dst, expect), OK, "%s", a.err);
}

/* ---- the good ways -----------------------------------------------------------------------------
 */

Test(room, decode_first)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	sr_run(&a, NULL, 20 * SR_MS);
	cr_assert_eq(a.ends[1].state, RS(OFFERING));
	cr_assert_eq(dst.pool->pages_held, 8u);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	cr_assert_eq(a.ends[2].end, 64u);
	submit_all(2);
	SR_UNTIL(&a, NULL, a.ends[1].complete && a.ends[2].complete);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].state, RS(RELEASED));
	cr_assert_eq(a.ends[2].state, RS(DONE));
	cr_assert_eq(a.ends[2].source_free, 2u);
	cr_assert_eq(a.ends[2].delivered, 2u);
	cr_assert_eq(a.ends[1].arrived, 64u);
	cr_assert_eq(dst.pool->pages_held, 0u);
	cr_assert_eq(dst.pool->n_users + src.pool->n_users, 0u);
	cr_assert_eq(a.owner.n_rooms, 0u);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, prefill_first_is_parked)
{
	struct sr_expect expect;

	local_pair();
	open_ok(2, 7, 0);
	submit_all(2);
	sr_run(&a, NULL, 20 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING));
	cr_assert_eq(a.ends[2].source_free, 0u);
	expect = expect_one(1);
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete && a.ends[2].complete);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, one_sender_two_ranks)
{
	struct sr_expect expect;

	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &half0);
	sr_pool_make(&dst2, &a, &half1);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
	expect = expect_one(1);
	expect.n_pages = 4;
	expect.senders[0].n_dests = 2;
	expect_ok(&expect);
	open_ok(3, 7, 0);
	sr_run(&a, NULL, 20 * SR_MS);
	cr_assert_eq(a.ends[3].state, RS(WAITING), "one of two destinations is not enough");
	expect.handle = 2;
	expect.dest = 1;
	expect.pages = dst_more;
	cr_assert_eq(sr_expect(&a, &dst2, &expect), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[3].state == RS(READY));
	submit_all(3);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released && a.ends[3].released);
	cr_assert(a.ends[1].complete && a.ends[2].complete && a.ends[3].complete);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
	sr_pool_check(&dst2, dst_more, 0, 0, 64);
}

Test(room, prefix_and_window)
{
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	expect = expect_one(1);
	expect.prefix = 16;
	expect.first = 40;
	expect.pos0 = 40;
	expect.n_pages = 3;
	expect_ok(&expect);
	cr_assert_eq(dst.pool->pages_held, 3u, "only what is needed is held");
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	cr_assert_eq(a.ends[2].prefix, 16u);
	chunk = chunk_of(2, 0, 0, 64);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	cr_assert(strstr(a.err, "16"), "%s", a.err);
	/* Positions below the window need no pages at the source. */
	chunk = chunk_of(2, 0, 16, 48);
	chunk.pos0 = 48;
	chunk.pages = src_pages + 6;
	chunk.n_pages = 2;
	chunk.last = true;
	cr_assert_eq(sr_submit(&a, &chunk), ST(SRC_RANGE), "%s", a.err);
	cr_assert(strstr(a.err, "40"), "%s", a.err);
	chunk.pos0 = 40;
	chunk.pages = src_pages + 5;
	chunk.n_pages = 3;
	submit(&a, &chunk);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete);
	sr_pool_check(&dst, dst_pages, 40, 40, 64);
}

Test(room, segments_and_meta_without_tokens)
{
	struct sr_expect expect;
	struct sr_chunk chunk = { .handle = 2,
				  .start = 64,
				  .last = true,
				  .no_side = true,
				  .n_segments = 2,
				  .meta = "first token: 42" };

	local_pair();
	memset(sr_blob(&src), 0x5a, 1000);
	expect = expect_one(1);
	expect.prefix = 64;
	expect.n_pages = 0;
	expect.meta_from = 1;
	expect.n_segments = 2;
	expect.segments[0] =
		(Kvp__ExpectSegment){ .id = 9, .entry = 3, .offset = 100, .bytes = 300 };
	expect.segments[1] =
		(Kvp__ExpectSegment){ .id = 4, .entry = 3, .offset = 900, .bytes = 50 };
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	chunk.segments[0] = (Kvp__SubmitSegment){ .id = 4, .entry = 3, .offset = 0, .bytes = 50 };
	chunk.segments[1] =
		(Kvp__SubmitSegment){ .id = 9, .entry = 3, .offset = 500, .bytes = 301 };
	cr_assert_eq(sr_submit(&a, &chunk), ST(MISMATCH), "%s", a.err);
	cr_assert(strstr(a.err, "301") && strstr(a.err, "300"), "%s", a.err);
	chunk.segments[1].bytes = 300;
	chunk.segments[1].id = 10;
	cr_assert_eq(sr_submit(&a, &chunk), ST(MISMATCH), "%s", a.err);
	chunk.segments[1].id = 9;
	chunk.segments[1].offset = 3900;
	cr_assert_eq(sr_submit(&a, &chunk), ST(SRC_RANGE), "%s", a.err);
	chunk.segments[1].offset = 500;
	chunk.segments[1].entry = 0;
	cr_assert_eq(sr_submit(&a, &chunk), ST(INVALID), "%s", a.err);
	chunk.segments[1].entry = 3;
	submit(&a, &chunk);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete);
	cr_assert_eq(a.ends[1].meta_bytes, strlen("first token: 42"));
	cr_assert_eq(memcmp(a.ends[1].meta, "first token: 42", 15), 0);
	cr_assert_eq(sr_blob(&dst)[100], 0x5a);
	cr_assert_eq(sr_blob(&dst)[399], 0x5a);
	cr_assert_eq(sr_blob(&dst)[400], 0);
}

Test(room, nothing_to_send_is_complete_at_once)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.prefix = 64;
	expect.n_pages = 0;
	expect.senders[0].none = true;
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete && a.ends[2].complete);
	/* With something expected, somebody must send. */
	expect.handle = 3;
	expect.prefix = 0;
	expect.n_pages = 8;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(INVALID), "%s", a.err);
	cr_assert_eq(dst.pool->pages_held, 0u);
}

Test(room, dummies_learn_the_end)
{
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	expect = expect_one(1);
	expect.senders[1].address = self();
	expect.senders[1].sender = 5;
	expect.senders[1].none = true;
	expect.n_senders = 2;
	expect_ok(&expect);
	open_ok(2, 7, 0);
	open_ok(3, 7, 5);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY) && a.ends[3].state == RS(READY));
	cr_assert_eq(a.ends[1].state, RS(ACCEPTED));
	/* A sender does not know that it is a dummy. */
	chunk = chunk_of(3, 0, 0, 64);
	chunk.last = true;
	submit(&a, &chunk);
	SR_UNTIL(&a, NULL, a.ends[3].source_free == 1);
	submit_all(2);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released && a.ends[3].released);
	cr_assert(a.ends[1].complete && a.ends[2].complete && a.ends[3].complete);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, layers_of_two_senders)
{
	static const uint8_t low[] = { 0x03 }, high[] = { 0x0c };
	struct sr_open open = { .handle = 2, .room = 7, .sender = 0, .mask = low, .mask_bytes = 1 };
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.senders[1].address = self();
	expect.senders[1].sender = 1;
	expect.n_senders = 2;
	expect_ok(&expect);
	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
	open = (struct sr_open){
		.handle = 3, .room = 7, .sender = 1, .mask = high, .mask_bytes = 1
	};
	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[1].state == RS(ACCEPTED));
	submit_all(2);
	SR_UNTIL(&a, NULL, a.ends[2].source_free == 2);
	cr_assert_not(a.ends[1].complete);
	submit_all(3);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released && a.ends[3].released);
	cr_assert(a.ends[1].complete);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, ids_are_free_again_once_released)
{
	struct sr_expect expect;

	local_pair();
	for (unsigned i = 0; i < 5; i++) {
		expect = expect_one(1);
		expect_ok(&expect);
		open_ok(2, 7, 0);
		submit_all(2);
		SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
		cr_assert(a.ends[1].complete && a.ends[2].complete);
		memset(a.ends, 0, sizeof(a.ends));
	}
}

/* ---- refusals of expect and open ---------------------------------------------------------------
 */

Test(room, second_live_ends_are_refused)
{
	struct sr_expect expect;
	struct sr_open open = { .handle = 4, .room = 7 };

	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	open_ok(2, 7, 0);
	expect.handle = 3;
	expect.pages = dst_more;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(EXISTS), "%s", a.err);
	cr_assert_eq(sr_open(&a, &src, &open), ST(EXISTS), "%s", a.err);
	expect.handle = 1;
	expect.room = 8;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(EXISTS), "%s", a.err);
	cr_assert(strstr(a.err, "handle"), "%s", a.err);
	cr_assert_eq(dst.pool->pages_held, 8u, "refusals hold nothing");
	cr_assert_eq(a.owner.n_rooms, 2u);
}

Test(room, pages_are_checked)
{
	static const uint32_t twice[] = { 1, 2, 3, 4, 5, 6, 7, 2 };
	static const uint32_t outside[] = { 1, 2, 3, 4, 5, 6, 7, 16 };
	static const uint32_t shared[] = { 10, 11, 12, 13, 14, 15, 5, 4 };
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.pages = twice;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(PAGE_HELD), "%s", a.err);
	cr_assert(strstr(a.err, "page 2 ") && strstr(a.err, "twice"), "%s", a.err);
	expect.pages = outside;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(DST_RANGE), "%s", a.err);
	cr_assert(strstr(a.err, "page 16"), "%s", a.err);
	expect.pages = dst_pages;
	expect.n_pages = 7;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(DST_RANGE), "%s", a.err);
	cr_assert(strstr(a.err, "7 given, 8 needed"), "%s", a.err);
	expect.n_pages = 8;
	expect.prefix = 12;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(ALIGNMENT), "%s", a.err);
	expect.prefix = 0;
	expect.pos0 = 8;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(DST_RANGE), "%s", a.err);
	expect.pos0 = 0;
	cr_assert_eq(dst.pool->pages_held, 0u);
	expect_ok(&expect);
	expect.handle = 2;
	expect.room = 0xabc;
	expect.pages = shared;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(PAGE_HELD), "%s", a.err);
	cr_assert(strstr(a.err, "page 4 ") && strstr(a.err, "room 0x7"), "%s", a.err);
	cr_assert_eq(dst.pool->pages_held, 8u);
}

Test(room, segments_and_senders_of_an_expect_are_checked)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.n_segments = 1;
	expect.segments[0] =
		(Kvp__ExpectSegment){ .id = 1, .entry = 3, .offset = 4000, .bytes = 97 };
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(DST_RANGE), "%s", a.err);
	expect.segments[0].entry = 1;
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(INVALID), "%s", a.err);
	expect.n_segments = 0;
	expect.senders[0].address = "nonsense";
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(INVALID), "%s", a.err);
	cr_assert(strstr(a.err, "nonsense"), "%s", a.err);
	expect.senders[0].address = "10.9.8.7:7470";
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(DENIED), "%s", a.err);
	cr_assert_eq(dst.pool->pages_held, 0u);
	cr_assert_eq(dst.pool->n_users, 0u);
}

Test(room, limits_are_named)
{
	struct sr_expect expect;
	struct sr_open open = { .handle = 2, .room = 8 };
	struct kvp_rooms_stats stats;

	a.config.limits.max_rooms = 1;
	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	cr_assert_eq(sr_open(&a, &src, &open), ST(LIMIT), "%s", a.err);
	cr_assert(strstr(a.err, "limits.max_rooms 1"), "%s", a.err);
	a.owner.max_rooms = 1;
	cr_assert_eq(sr_open(&a, &src, &open), ST(LIMIT), "%s", a.err);
	cr_assert(strstr(a.err, "at most 1 beside its user's others: max_rooms"), "%s", a.err);
	kvp_rooms_stats(a.rooms, &stats);
	cr_assert_eq(stats.refused_limit, 2u);
	cr_assert_eq(stats.dests, 1u);
}

/* ---- offers ------------------------------------------------------------------------------------
 */

Test(room, a_wrong_key_is_refused_and_the_open_stays)
{
	struct sr_open open = { .handle = 2, .room = 7, .key = "0123456789abcdef" };
	struct sr_expect expect;

	local_pair();
	cr_assert_eq(sr_open(&a, &src, &open), OK);
	expect = expect_one(1);
	expect.key = "0123456789abcdeX";
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released);
	cr_assert(a.ends[1].failed);
	cr_assert_eq(a.ends[1].status, ST(DENIED));
	cr_assert_eq(a.ends[2].state, RS(WAITING));
	memset(&a.ends[1], 0, sizeof(a.ends[1]));
	expect.key = open.key;
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
}

Test(room, different_tags_fail_both)
{
	struct sr_shape other = plain;
	struct sr_expect expect;

	other.tag = "fp8\tinstead"; /* in hex: who reads it has a terminal */
	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &other);
	expect = expect_one(1);
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].status, ST(MISMATCH));
	cr_assert_eq(a.ends[2].status, ST(MISMATCH));
	cr_assert(strstr(a.ends[1].reason, "\"tag\""), "%s", a.ends[1].reason);
	cr_assert(strstr(a.ends[1].reason, "\"66703809696e7374656164\""), "%s", a.ends[1].reason);
	cr_assert_eq(a.ends[2].state, RS(GONE));
	cr_assert_not(a.ends[1].retry);
}

Test(room, different_widths_fail_both)
{
	struct sr_shape other = plain;
	struct sr_expect expect;

	other.row_bytes = 48;
	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &other);
	expect = expect_one(1);
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].status, ST(MISMATCH), "%s", a.ends[1].reason);
}

Test(room, offers_must_agree)
{
	struct sr_expect expect;

	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &half0);
	sr_pool_make(&dst2, &a, &half1);
	expect = expect_one(1);
	expect.n_pages = 4;
	expect.senders[0].n_dests = 2;
	expect_ok(&expect);
	expect.handle = 2;
	expect.dest = 1;
	expect.pages = dst_more;
	expect.end = 48;
	cr_assert_eq(sr_expect(&a, &dst2, &expect), OK, "%s", a.err);
	open_ok(3, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released && a.ends[3].released);
	cr_assert_eq(a.ends[3].status, ST(MISMATCH));
	cr_assert(strstr(a.ends[3].reason, "48") && strstr(a.ends[3].reason, "64"), "%s",
		  a.ends[3].reason);
	cr_assert(a.ends[1].failed && a.ends[2].failed);
}

Test(room, missing_layers_fail_by_coverage)
{
	static const uint8_t low[] = { 0x03 };
	struct sr_open open = { .handle = 2, .room = 7, .mask = low, .mask_bytes = 1 };
	struct sr_expect expect;

	local_pair();
	cr_assert_eq(sr_open(&a, &src, &open), OK);
	expect = expect_one(1);
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].status, ST(COVERAGE), "%s", a.ends[1].reason);
	cr_assert_eq(a.ends[2].status, ST(COVERAGE), "%s", a.ends[2].reason);
}

Test(room, parked_offers_are_limited)
{
	struct sr_expect expect;
	struct kvp_rooms_stats stats;

	a.config.limits.max_parked_offers = 1;
	local_pair();
	expect = expect_one(1);
	expect.end = 8;
	expect.n_pages = 1;
	expect_ok(&expect);
	expect.handle = 2;
	expect.room = 8;
	expect.pages = dst_more;
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(LIMIT));
	cr_assert(strstr(a.ends[2].reason, "max_parked_offers 1"), "%s", a.ends[2].reason);
	cr_assert(a.ends[2].retry);
	kvp_rooms_stats(a.rooms, &stats);
	cr_assert_eq(stats.parked_offers, 1u);
	/* An aborted expectation takes its offer along. */
	cr_assert_eq(sr_abort(&a, 1), OK);
	SR_UNTIL(&a, NULL, a.ends[1].released);
	sr_run(&a, NULL, 20 * SR_MS);
	kvp_rooms_stats(a.rooms, &stats);
	cr_assert_eq(stats.parked_offers, 0u);
}

/* Decode does not wait for a sender that sends nothing: it may open when all is over there. */
Test(room, a_sender_of_nothing_opens_late)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.n_senders = 2;
	expect.senders[1].address = self();
	expect.senders[1].sender = 1;
	expect.senders[1].none = true;
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	submit_all(2);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].state, RS(RELEASED));
	open_ok(3, 7, 1);
	SR_UNTIL(&a, NULL, a.ends[3].released);
	cr_assert_eq(a.ends[3].state, RS(DONE), "%s", a.ends[3].reason);
}

/* Nobody parks so many that others cannot. */
Test(room, one_peer_parks_half)
{
	struct sr_expect expect;

	a.config.limits.max_parked_offers = 3;
	local_pair();
	for (uint32_t i = 1; i <= 3; i++) {
		expect = expect_one(i);
		expect.handle = expect.room = i;
		expect.end = 8;
		expect.n_pages = 1;
		expect.pages = &dst_more[i];
		expect_ok(&expect);
	}
	SR_UNTIL(&a, NULL, a.ends[3].released);
	cr_assert_eq(a.ends[3].status, ST(LIMIT));
	cr_assert(strstr(a.ends[3].reason, "of this peer: 2 "), "%s", a.ends[3].reason);
	cr_assert(strstr(a.ends[3].reason, "half of limits.max_parked_offers 3"), "%s",
		  a.ends[3].reason);
	cr_assert_not(a.ends[1].released || a.ends[2].released);
}

/* ---- chunks ------------------------------------------------------------------------------------
 */

Test(room, chunks_are_checked)
{
	static const uint8_t first[] = { 1 }, rest[] = { 6 }, blob[] = { 0x20 };
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	open_ok(2, 7, 0);
	chunk = chunk_of(2, 1, 0, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	chunk = chunk_of(3, 0, 0, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(NOT_FOUND), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 65);
	cr_assert_eq(sr_submit(&a, &chunk), ST(SRC_RANGE), "%s", a.err);
	cr_assert(strstr(a.err, "8 given, 9 needed"), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 8);
	chunk.pos0 = 4;
	cr_assert_eq(sr_submit(&a, &chunk), ST(ALIGNMENT), "%s", a.err);
	chunk.pos0 = 0;
	chunk.pages = dst_more; /* 15 and so on are fine: the pool has 16 */
	submit(&a, &chunk);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err); /* the same again */
	cr_assert(strstr(a.err, "seq is 0") && strstr(a.err, "1"), "%s", a.err);
	chunk = chunk_of(2, 1, 16, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	cr_assert(strstr(a.err, "16") && strstr(a.err, "8"), "%s", a.err);
	chunk = chunk_of(2, 1, 8, 8);
	chunk.set = blob;
	chunk.set_bytes = 1;
	cr_assert_eq(sr_submit(&a, &chunk), ST(INVALID), "%s", a.err);
	chunk.set = first;
	submit(&a, &chunk);
	/* Entries go on one by one. */
	chunk.seq = 2;
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	chunk.set = rest;
	chunk.last = true;
	chunk.tokens = 7;
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	chunk.tokens = 8;
	submit(&a, &chunk);
	chunk = chunk_of(2, 3, 16, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	cr_assert(strstr(a.err, "last"), "%s", a.err);
	/* Decode wants more than was submitted. */
	expect = expect_one(1);
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(ORDER), "%s", a.ends[2].reason);
	cr_assert_eq(a.ends[1].status, ST(ORDER), "%s", a.ends[1].reason);
	cr_assert_eq(a.ends[2].source_free, 3u);
}

Test(room, past_the_end_and_outside_the_pool)
{
	static const uint32_t outside[] = { 1, 16 };
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	expect = expect_one(1);
	expect.end = 40;
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	chunk = chunk_of(2, 0, 0, 41);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	cr_assert(strstr(a.err, "41") && strstr(a.err, "40"), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 32);
	chunk.last = true;
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 16);
	chunk.pages = outside;
	chunk.n_pages = 2;
	cr_assert_eq(sr_submit(&a, &chunk), ST(SRC_RANGE), "%s", a.err);
	cr_assert(strstr(a.err, "page 16"), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 16);
	chunk.no_side = true;
	cr_assert_eq(sr_submit(&a, &chunk), ST(INVALID), "%s", a.err);
	chunk = chunk_of(2, 0, 0, 40);
	chunk.last = true;
	submit(&a, &chunk);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete);
	sr_pool_check(&dst, dst_pages, 0, 0, 40);
}

Test(room, parked_chunks_are_limited)
{
	struct sr_chunk chunk;

	a.config.limits.max_parked_chunks = 2;
	local_pair();
	open_ok(2, 7, 0);
	chunk = chunk_of(2, 0, 0, 8);
	submit(&a, &chunk);
	chunk = chunk_of(2, 1, 8, 8);
	submit(&a, &chunk);
	chunk = chunk_of(2, 2, 16, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(LIMIT), "%s", a.err);
	cr_assert(strstr(a.err, "max_parked_chunks 2"), "%s", a.err);
}

Test(room, recall_takes_parked_chunks_back)
{
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	open_ok(2, 7, 0);
	submit_all(2);
	cr_assert_eq(sr_recall(&a, 2, 1), OK, "%s", a.err);
	chunk = chunk_of(2, 2, 64, 8);
	cr_assert_eq(sr_submit(&a, &chunk), ST(ORDER));
	SR_UNTIL(&a, NULL, a.recalls == 1);
	cr_assert_eq(a.recall_status, OK);
	cr_assert_eq(a.recall_from, 1u);
	/* Submitted again in other pieces. */
	chunk = chunk_of(2, 1, 24, 8);
	submit(&a, &chunk);
	chunk = chunk_of(2, 2, 32, 32);
	chunk.last = true;
	submit(&a, &chunk);
	cr_assert_eq(sr_recall(&a, 2, 0), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.recalls == 2);
	cr_assert_eq(a.recall_from, 0u);
	submit_all(2);
	expect = expect_one(1);
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert(a.ends[1].complete, "%s", a.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

/* ---- the other ways to end ---------------------------------------------------------------------
 */

Test(room, aborts_reach_the_other_end)
{
	struct sr_expect expect;

	local_pair();
	for (unsigned round = 0; round < 4; round++) {
		uint64_t who = round % 2 ? 1 : 2;

		memset(a.ends, 0, sizeof(a.ends));
		expect = expect_one(1);
		expect_ok(&expect);
		open_ok(2, 7, 0);
		if (round >= 2)
			SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
		cr_assert_eq(sr_abort(&a, who), OK);
		SR_UNTIL(&a, NULL, a.ends[who].released);
		if (round >= 2) {
			SR_UNTIL(&a, NULL, a.ends[3 - who].released);
			cr_assert_eq(a.ends[3 - who].status, ST(ABORTED));
			cr_assert(strstr(a.ends[3 - who].reason, "the test says so"), "%s",
				  a.ends[3 - who].reason);
		}
		cr_assert_eq(a.ends[who].status, ST(ABORTED));
		/* What has not met may wait for the other: it is ended by hand. */
		if (!a.ends[3 - who].released)
			(void)sr_abort(&a, 3 - who);
		SR_UNTIL(&a, NULL, a.owner.n_rooms == 0);
		cr_assert_eq(dst.pool->pages_held, 0u);
	}
}

Test(room, a_lost_client_fails_its_rooms_at_both_ends)
{
	struct kvp_room_owner other = { .id = 77, .max_rooms = 10, .name = "other" };
	struct sr_expect expect;
	Kvp__Open msg = KVP__OPEN__INIT;
	Kvp__Side side = KVP__SIDE__INIT, *sides = &side;

	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	side.page = 8;
	side.dcp_size = side.interleave = 1;
	msg.handle = 5;
	msg.room = 7;
	msg.sides = &sides;
	msg.n_sides = 1;
	cr_assert_eq(kvp_rooms_open(a.rooms, &other, src.pool, &msg, a.err), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[1].state == RS(ACCEPTED));
	kvp_rooms_owner_lost(a.rooms, &other, "its process ended");
	cr_assert_eq(other.n_rooms, 0u);
	SR_UNTIL(&a, NULL, a.ends[1].released);
	cr_assert_eq(a.ends[1].status, ST(CLIENT_LOST));
	cr_assert(a.ends[1].retry);
	cr_assert(strstr(a.ends[1].reason, "its process ended"), "%s", a.ends[1].reason);
	SR_UNTIL(&a, NULL, kvp_rooms_count(a.rooms) == 0);
}

Test(room, the_end_of_a_pool_fails_its_rooms)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	kvp_rooms_pool_ends(a.rooms, src.pool, ST(POOL_GONE), "paused");
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[1].status, ST(POOL_GONE));
	cr_assert_eq(src.pool->n_users, 0u);
	kvp_rooms_close(a.rooms);
	cr_assert_eq(sr_expect(&a, &dst, &expect), ST(STOPPING), "%s", a.err);
}

/* ---- timers ------------------------------------------------------------------------------------
 */

Test(room, an_unreachable_peer_is_named)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.senders[0].address = "127.0.0.1:9";
	expect.timers.offer_ms = 200;
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released);
	cr_assert_eq(a.ends[1].status, ST(UNREACHABLE));
	cr_assert(strstr(a.ends[1].reason, "127.0.0.1:9") &&
			  strstr(a.ends[1].reason, "connection refused"),
		  "%s", a.ends[1].reason);
	cr_assert(a.ends[1].retry);
}

Test(room, an_open_that_does_not_come_times_out)
{
	struct sr_expect expect;

	local_pair();
	expect = expect_one(1);
	expect.timers.open_ms = 100;
	expect.senders[0].sender = 2;
	expect_ok(&expect);
	SR_UNTIL(&a, NULL, a.ends[1].released);
	cr_assert_eq(a.ends[1].status, ST(TIMEOUT));
	cr_assert(strstr(a.ends[1].reason, "sender 2 on node1") &&
			  strstr(a.ends[1].reason, "has not opened"),
		  "%s", a.ends[1].reason);
}

Test(room, a_request_cannot_lengthen_a_timer)
{
	struct sr_open open = { .handle = 2, .room = 7, .timers.open_ms = 3600000 };

	a.config.timers.open_ns = 100 * SR_MS;
	local_pair();
	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(TIMEOUT));
	cr_assert(strstr(a.ends[2].reason, "within 0.1 s"), "%s", a.ends[2].reason);
}

Test(room, a_lease_ends_or_is_renewed_or_declined)
{
	struct sr_open open = {
		.handle = 2, .room = 7, .key = "0123456789abcdef", .timers.lease_ms = 200
	};
	Kvp__Renew renew = KVP__RENEW__INIT;
	Kvp__Decline decline = KVP__DECLINE__INIT;

	local_pair();
	cr_assert_eq(sr_open(&a, &src, &open), OK);
	renew.address = decline.address = (char *)self();
	renew.room = decline.room = 7;
	renew.key.data = decline.key.data = (uint8_t *)open.key;
	renew.key.len = decline.key.len = 16;
	renew.lease_ms = 400;
	cr_assert_eq(kvp_rooms_renew(a.rooms, &renew, a.err), OK, "%s", a.err);
	sr_run(&a, NULL, 280 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING), "renewed");
	SR_UNTIL(&a, NULL, a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(LEASE), "%s", a.ends[2].reason);
	memset(&a.ends[2], 0, sizeof(a.ends[2]));
	cr_assert_eq(sr_open(&a, &src, &open), OK);
	decline.key.data = (uint8_t *)"0123456789abcdeX";
	cr_assert_eq(kvp_rooms_decline(a.rooms, &decline, a.err), OK, "%s", a.err);
	sr_run(&a, NULL, 20 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING), "a wrong key does nothing");
	decline.key.data = (uint8_t *)open.key;
	decline.reason = (char *)"cancelled";
	cr_assert_eq(kvp_rooms_decline(a.rooms, &decline, a.err), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(DECLINED));
	cr_assert(strstr(a.ends[2].reason, "cancelled"), "%s", a.ends[2].reason);
}

Test(room, a_fence_that_is_not_reached_times_out)
{
	static _Atomic uint64_t words[2];
	static struct kvp_board board;
	struct kvp_order_fence *order = calloc(1, sizeof(*order));
	struct sr_open open = { .handle = 2, .room = 7, .timers.fence_ms = 150 };
	struct sr_expect expect;
	struct sr_chunk chunk;

	local_pair();
	kvp_board_init(&board, KVP_BOARD_FENCE, 1);
	order->order.type = KVP_ORDER_FENCE_ADD;
	order->board = &board;
	order->words = words;
	order->n_words = 2;
	kvp_lane_order(a.lanes[0], &order->order);
	expect = expect_one(1);
	expect_ok(&expect);
	cr_assert_eq(sr_open(&a, &src, &open), OK);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	chunk = chunk_of(2, 0, 0, 64);
	chunk.fence = (struct kvp_room_fence){ 1, 2 };
	chunk.fence_value = 77;
	chunk.last = true;
	submit(&a, &chunk);
	SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(FENCE_TIMEOUT), "%s", a.ends[2].reason);
	cr_assert(strstr(a.ends[2].reason, "value 77"), "%s", a.ends[2].reason);
	cr_assert_eq(a.ends[1].status, ST(FENCE_TIMEOUT));
	struct kvp_order_id *end = calloc(1, sizeof(*end));
	end->order.type = KVP_ORDER_FENCE_END;
	end->id = 1;
	kvp_lane_order(a.lanes[0], &end->order);
}

/* ---- displays ----------------------------------------------------------------------------------
 */

struct seen {
	unsigned n, live;
	struct kvp_room_view last;
};

static bool see(void *arg, const struct kvp_room_view *view)
{
	struct seen *seen = arg;

	seen->n++;
	seen->live += !view->released;
	seen->last = *view;
	cr_assert_not_null(view->waits_text);
	cr_assert_not_null(view->verdict);
	cr_assert_not_null(view->mode);
	return true;
}

static void walk_all(bool ended, struct seen *seen)
{
	struct kvp_room_walk walk;

	kvp_room_walk_begin(&walk, a.rooms, ended, see, seen);
	while (kvp_room_walk_step(&walk, 1))
		;
	kvp_room_walk_end(&walk);
}

Test(room, views_and_history)
{
	struct seen seen = { 0 };
	struct kvp_room_leg_view leg;
	struct sr_expect expect;

	a.config.limits.history = 3;
	local_pair();
	expect = expect_one(1);
	expect_ok(&expect);
	walk_all(false, &seen);
	cr_assert_eq(seen.n, 1u);
	cr_assert_str_eq(seen.last.label, "dest");
	cr_assert_eq(seen.last.waits, (uint32_t)KVP_ROOM_WAITS_OPEN);
	cr_assert_str_eq(seen.last.verdict, "engine");
	cr_assert_eq(kvp_room_legs(a.rooms, &seen.last, &leg, 1), 1u);
	cr_assert_str_eq(leg.state, "offered");
	cr_assert_str_eq(leg.waits_text, "prefill to open the room");
	cr_assert_gt(leg.waits_since_ns, 0u);
	cr_assert_str_eq(leg.mode, "local");
	for (unsigned i = 0; i < 2; i++) {
		open_ok(2, 7, 0);
		submit_all(2);
		SR_UNTIL(&a, NULL, a.ends[1].released && a.ends[2].released);
		memset(a.ends, 0, sizeof(a.ends));
		if (i == 0)
			expect_ok(&expect);
	}
	memset(&seen, 0, sizeof(seen));
	walk_all(false, &seen);
	cr_assert_eq(seen.n, 0u);
	walk_all(true, &seen);
	cr_assert_eq(seen.n, 3u, "limited by limits.history");
	cr_assert_eq(seen.live, 0u);
	cr_assert_str_eq(seen.last.verdict, "ok");
	cr_assert_str_eq(seen.last.mode, "local");
}

#define WALKED 60u

/* How often each room was seen; it is named by its handle here. */
static bool see_room(void *arg, const struct kvp_room_view *view)
{
	unsigned *seen = arg;

	cr_assert_lt(view->room, SR_HANDLES);
	seen[view->room]++;
	return true;
}

static void open_walked(uint64_t handle)
{
	struct sr_open open = { .handle = handle, .room = handle };

	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
}

/* It fails, is quiet, and becomes history. */
static void abort_walked(uint64_t handle)
{
	cr_assert_eq(sr_abort(&a, handle), OK, "%s", a.err);
	SR_UNTIL(&a, NULL, a.ends[handle].released);
}

static uint64_t next_random(uint64_t *state)
{
	*state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
	return *state >> 33;
}

/* Rooms 1 to 60 are there; a walk looks at a few at a time, and between that any of them ends, seen
 * or not, and others come. With history each of the 60 is seen once, without it each that stays. */
static void walk_while_they_go(bool ended, uint64_t *random)
{
	unsigned seen[SR_HANDLES] = { 0 };
	bool gone[SR_HANDLES] = { false };
	struct kvp_room_walk walk;
	uint64_t later = WALKED + 1;
	bool more = true;

	memset(a.ends, 0, sizeof(a.ends));
	for (uint64_t i = 1; i <= WALKED; i++)
		open_walked(i);
	kvp_room_walk_begin(&walk, a.rooms, ended, see_room, seen);
	while (more) {
		uint64_t handle = 1 + next_random(random) % WALKED;

		if (!gone[handle])
			abort_walked(handle);
		gone[handle] = true;
		if (later < SR_HANDLES)
			open_walked(later++);
		more = kvp_room_walk_step(&walk, 1 + (uint32_t)(next_random(random) % 5));
	}
	kvp_room_walk_end(&walk);
	for (uint64_t i = 1; i <= WALKED; i++) {
		cr_assert(seen[i] == 1 || (seen[i] == 0 && gone[i] && !ended),
			  "room %llu was seen %u times", (unsigned long long)i, seen[i]);
		if (!gone[i])
			abort_walked(i);
	}
	for (uint64_t i = WALKED + 1; i < later; i++) {
		cr_assert_eq(seen[i], 0u, "room %llu came later", (unsigned long long)i);
		abort_walked(i);
	}
}

Test(room, a_walk_sees_each_room_once)
{
	struct kvp_rooms_stats stats;
	struct seen none = { 0 };
	uint64_t random = 7;

	a.config.limits.history = SR_HANDLES;
	local_pair();
	for (unsigned round = 0; round < 8; round++)
		walk_while_they_go(false, &random);
	walk_all(false, &none);
	cr_assert_eq(none.n, 0u);
	kvp_rooms_stats(a.rooms, &stats);
	cr_assert_eq(stats.remembered, SR_HANDLES);
	for (unsigned i = 0; i < KVP_ROOM_STATES_N; i++)
		cr_assert_eq(stats.by_state[i], 0u, "state %u", i);
}

/* What has ended before a walk is seen by it too, so each world sees one. */
Test(room, a_walk_with_history_sees_each_room_once)
{
	uint64_t random = 11;

	a.config.limits.history = 4 * SR_HANDLES;
	local_pair();
	walk_while_they_go(true, &random);
}

/* It may be let go at any moment. */
Test(room, a_walk_may_end_early)
{
	unsigned seen[SR_HANDLES] = { 0 };
	struct kvp_room_walk walk = { 0 };

	local_pair();
	kvp_room_walk_end(&walk);
	open_walked(1);
	open_walked(2);
	kvp_room_walk_begin(&walk, a.rooms, false, see_room, seen);
	cr_assert(kvp_room_walk_step(&walk, 1));
	kvp_room_walk_end(&walk);
	abort_walked(2);
	kvp_room_walk_begin(&walk, a.rooms, true, see_room, seen);
	cr_assert(!kvp_room_walk_step(&walk, 10));
	kvp_room_walk_end(&walk);
	cr_assert_eq(seen[1], 2u);
	cr_assert_eq(seen[2], 1u);
	abort_walked(1);
}

/* ---- two nodes ---------------------------------------------------------------------------------
 */

static void two_nodes(void)
{
	sr_start(&a, &kvp_net_ucx);
	sr_start(&b, &kvp_net_ucx);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &b, &plain);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
}

Test(room, between_nodes)
{
	struct sr_expect expect;

	two_nodes();
	expect = expect_one(1);
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, &b, a.ends[2].state == RS(READY));
	submit_all(2);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert(b.ends[1].complete && a.ends[2].complete, "%s", b.ends[1].reason);
	cr_assert_eq(a.ends[2].delivered, 2u);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, offers_are_made_again_on_a_new_session)
{
	struct sr_expect expect;
	char address[64];

	/* Nobody listens yet: the offer waits for the peer. */
	sr_start(&a, &kvp_net_ucx);
	(void)snprintf(address, sizeof(address), "%s", self());
	sr_stop(&a);
	sr_start(&b, &kvp_net_ucx);
	sr_pool_make(&dst, &b, &plain);
	expect = expect_one(1);
	expect.senders[0].address = address;
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	sr_run(&b, NULL, 100 * SR_MS);
	cr_assert_eq(b.ends[1].state, RS(OFFERING));
	for (unsigned i = 0; i < 2; i++) {
		/* The first time the peer goes with the offer parked. */
		struct kvp_rooms_stats stats = { 0 };

		sr_init(&a, &loop, (uint8_t)(10 + i));
		(void)snprintf(a.config.peer.listen, sizeof(a.config.peer.listen), "%s", address);
		sr_start(&a, &kvp_net_ucx);
		while (stats.parked_offers == 0) {
			sr_step(&b, &a);
			kvp_rooms_stats(a.rooms, &stats);
		}
		if (i == 0)
			sr_stop(&a);
	}
	cr_assert_eq(b.ends[1].state, RS(OFFERING));
	sr_pool_make(&src, &a, &plain);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
	open_ok(2, 7, 0);
	submit_all(2);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert(b.ends[1].complete, "%s", b.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, a_lost_peer_fails_what_was_accepted)
{
	struct sr_expect expect;

	two_nodes();
	expect = expect_one(1);
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, &b, a.ends[2].state == RS(READY) && b.ends[1].state == RS(ACCEPTED));
	kvp_peers_stop(b.peers);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(PEER_LOST), "%s", a.ends[2].reason);
	cr_assert(strstr(a.ends[2].reason, "node2"), "%s", a.ends[2].reason);
	cr_assert(a.ends[2].retry);
}

Test(room, aborted_in_motion_between_nodes)
{
	struct sr_expect expect;
	struct sr_chunk chunk;

	two_nodes();
	for (unsigned round = 0; round < 6; round++) {
		memset(a.ends, 0, sizeof(a.ends));
		memset(b.ends, 0, sizeof(b.ends));
		expect = expect_one(1);
		cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
		open_ok(2, 7, 0);
		SR_UNTIL(&a, &b, a.ends[2].state == RS(READY));
		chunk = chunk_of(2, 0, 0, 40);
		submit(&a, &chunk);
		if (round % 3 == 1)
			SR_UNTIL(&a, &b, a.ends[2].source_free == 1);
		cr_assert_eq(round % 2 ? sr_abort(&a, 2) : sr_abort(&b, 1), OK);
		SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
		cr_assert(b.ends[1].failed && a.ends[2].failed);
		cr_assert_eq(a.ends[2].source_free, 1u);
		cr_assert_eq(dst.pool->pages_held, 0u);
	}
}

/* ---- offers made by hand -----------------------------------------------------------------------
 */

static unsigned n_answers;

static void on_answer(void *arg, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	(void)arg;
	(void)peer;
	n_answers += msg->body_case == KVP__PEER_MSG__BODY_ACCEPT;
}

static void ignore_up(void *arg, struct kvp_peer *peer)
{
	(void)arg;
	(void)peer;
}

static void ignore_down(void *arg, struct kvp_peer *peer, Kvp__Status status, const char *why)
{
	(void)arg;
	(void)peer;
	(void)status;
	(void)why;
}

/* A destination that is not there: its daemon's messages are the test's. */
static struct kvp_peer *by_hand(struct sr_node *node)
{
	static const struct kvp_peer_events events = { ignore_up, ignore_down, on_answer };
	struct kvp_peer *peer;

	kvp_peers_set_events(node->peers, &events, NULL);
	peer = kvp_peer_get(node->peers, self(), node->err, sizeof(node->err));
	cr_assert_not_null(peer, "%s", node->err);
	SR_UNTIL(&a, node, kvp_peer_is_up(peer));
	return peer;
}

static void say(struct kvp_peer *peer, uint64_t generation, bool go_on)
{
	Kvp__Leg leg = KVP__LEG__INIT;
	Kvp__Offer offer = KVP__OFFER__INIT;
	Kvp__Go go = KVP__GO__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;

	leg.room = 7;
	leg.generation = generation;
	offer.leg = go.leg = &leg;
	offer.n_dests = 1;
	offer.role = KVP__SENDER_ROLE__ROLE_NONE;
	msg.body_case = go_on ? KVP__PEER_MSG__BODY_GO : KVP__PEER_MSG__BODY_OFFER;
	if (go_on)
		msg.go = &go;
	else
		msg.offer = &offer;
	cr_assert_eq(kvp_peer_send(peer, &msg), 0);
}

Test(room, an_offer_made_again_replaces_the_one_of_a_dead_session)
{
	struct kvp_rooms_stats stats;
	struct kvp_peer *before, *after;
	struct sr_node c;

	sr_start(&a, &kvp_net_ucx);
	sr_pool_make(&src, &a, &plain);
	sr_start(&b, NULL);
	sr_init(&c, &loop, 2); /* the same process as b, as a sees it */
	sr_start(&c, NULL);
	before = by_hand(&b);
	after = by_hand(&c);
	n_answers = 0;
	open_ok(2, 7, 0);
	say(before, 5, false);
	SR_UNTIL(&a, NULL, n_answers == 1);
	say(after, 4, false); /* of another generation: there is a live leg */
	say(after, 5, false);
	SR_UNTIL(&a, NULL, n_answers == 2);
	say(before, 5, true);
	sr_run(&a, NULL, 30 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING), "the old session's word does not count");
	say(after, 3, true);
	sr_run(&a, NULL, 30 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING), "nor an older generation's");
	kvp_rooms_stats(a.rooms, &stats);
	cr_assert_eq(stats.late_messages, 1u);
	say(after, 5, true);
	SR_UNTIL(&a, NULL, a.ends[2].state == RS(READY));
	kvp_peer_put(before);
	kvp_peer_put(after);
	sr_stop(&c);
}

Test(room, parked_offers_learn_that_their_sender_failed)
{
	struct sr_expect expect;

	sr_start(&a, NULL);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, &a, &half0);
	expect = expect_one(1);
	expect.n_pages = 4;
	expect.senders[0].n_dests = 3;
	expect_ok(&expect);
	for (uint32_t i = 1; i < 3; i++) {
		expect.handle = 1 + i;
		expect.dest = i;
		expect.pages = dst_more + 2 * i;
		expect.n_pages = 1;
		expect.end = 16;
		expect_ok(&expect);
	}
	sr_run(&a, NULL, 20 * SR_MS);
	open_ok(4, 7,
		0); /* the second offer disagrees with the first; the third hears of it, too */
	for (uint32_t i = 1; i <= 4; i++) {
		SR_UNTIL(&a, NULL, a.ends[i].released);
		cr_assert_eq(a.ends[i].status, ST(MISMATCH), "%s", a.ends[i].reason);
	}
}

/* ---- ends at named points ----------------------------------------------------------------------
 */

#ifdef KVP_TEST

static void hold(struct sr_node *node, enum kvp_hold point, bool on)
{
	lt_hold(node->lanes[0], point, on);
}

static uint32_t held(const struct sr_node *node, enum kvp_hold point)
{
	struct kvp_lane_status status;

	kvp_lane_status_read(node->lanes[0], &status);
	return status.holds[point];
}

enum killer { ABORT_SRC, ABORT_DST, LOSE_SESSION, LOSE_CLIENT, KILLERS };

static void kill_by(enum killer killer)
{
	struct kvp_peer *peer;

	switch (killer) {
	case ABORT_SRC:
		cr_assert_eq(sr_abort(&a, 2), OK);
		break;
	case ABORT_DST:
		cr_assert_eq(sr_abort(&b, 1), OK);
		break;
	case LOSE_SESSION:
		peer = kvp_peer_get(b.peers, self(), b.err, sizeof(b.err));
		cr_assert_not_null(peer);
		kvp_peer_fail(peer, ST(PROTOCOL), "is cut off by the test");
		kvp_peer_put(peer);
		break;
	default:
		kvp_rooms_owner_lost(a.rooms, &a.owner, "killed");
		break;
	}
}

static void begin_transfer(bool whole)
{
	struct sr_expect expect = expect_one(1);
	struct sr_chunk chunk = chunk_of(2, 0, 0, 24);

	memset(a.ends, 0, sizeof(a.ends));
	memset(b.ends, 0, sizeof(b.ends));
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	open_ok(2, 7, 0);
	SR_UNTIL(&a, &b, a.ends[2].state == RS(READY));
	if (whole)
		submit_all(2);
	else
		submit(&a, &chunk); /* the end is far: nothing can complete */
}

Test(room, ends_at_every_point_of_the_data_path, .timeout = 120)
{
	static const struct {
		enum kvp_hold point;
		bool at_src;
	} points[] = { { KVP_HOLD_WANT, true },     { KVP_HOLD_GRANT, false },
		       { KVP_HOLD_GATHER, true },   { KVP_HOLD_SEND, true },
		       { KVP_HOLD_SCATTER, false }, { KVP_HOLD_LANDED, false } };

	two_nodes();
	for (unsigned p = 0; p < KVP_ARRAY_SIZE(points); p++)
		for (unsigned k = 0; k < KILLERS; k++) {
			struct sr_node *node = points[p].at_src ? &a : &b;

			hold(node, points[p].point, true);
			begin_transfer(false);
			SR_UNTIL(&a, &b, held(node, points[p].point) > 0);
			kill_by((enum killer)k);
			/* Quiet though the pieces are still held: nobody touches the pages. */
			SR_UNTIL(&a, &b, b.ends[1].released && kvp_rooms_count(a.rooms) == 0);
			cr_assert(b.ends[1].failed);
			cr_assert_eq(dst.pool->pages_held, 0u);
			hold(node, points[p].point, false);
		}
	/* Nothing is left behind: the same room goes through. */
	begin_transfer(true);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert(b.ends[1].complete, "%s", b.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
}

Test(room, a_stalled_receiver_times_out)
{
	struct sr_expect expect;
	struct sr_open open = { .handle = 2, .room = 7, .timers.progress_ms = 150 };

	open.timers.progress_ms *= (uint32_t)support_slow();
	two_nodes();
	hold(&b, KVP_HOLD_GRANT, true);
	expect = expect_one(1);
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
	SR_UNTIL(&a, &b, a.ends[2].state == RS(READY));
	submit_all(2);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert_eq(a.ends[2].status, ST(TIMEOUT), "%s", a.ends[2].reason);
	cr_assert(strstr(a.ends[2].reason, "grant"), "%s", a.ends[2].reason);
	cr_assert(a.ends[2].retry);
	hold(&b, KVP_HOLD_GRANT, false);
}

Test(room, held_offers_and_a_session_that_goes)
{
	struct sr_expect expect;

	two_nodes();
	kvp_rooms_hold_offers(b.rooms, true);
	expect = expect_one(1);
	cr_assert_eq(sr_expect(&b, &dst, &expect), OK, "%s", b.err);
	open_ok(2, 7, 0);
	sr_run(&a, &b, 50 * SR_MS);
	cr_assert_eq(b.ends[1].state, RS(OFFERING));
	cr_assert_eq(a.ends[2].state, RS(WAITING));
	/* The accept is lost with its session: both wait for the next, none fails. */
	kill_by(LOSE_SESSION);
	sr_run(&a, &b, 50 * SR_MS);
	cr_assert_eq(a.ends[2].state, RS(WAITING));
	kvp_rooms_hold_offers(b.rooms, false);
	SR_UNTIL(&a, &b, a.ends[2].state == RS(READY));
	submit_all(2);
	SR_UNTIL(&a, &b, b.ends[1].released && a.ends[2].released);
	cr_assert(b.ends[1].complete, "%s", b.ends[1].reason);
}

#endif
