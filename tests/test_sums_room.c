/* SPDX-License-Identifier: Apache-2.0 */

/* Sums between rooms: what both ends want and can, and what they say when bytes differ. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "daemon/room_internal.h"
#include "tests/support_lane.h"
#include "tests/support_room.h"

#define OK KVP__STATUS__STATUS_OK
#define ST(name) KVP__STATUS__STATUS_##name

static uv_loop_t loop;
static struct sr_node a, b; /* a: prefill (or both), b: decode */
static struct sr_pool src, dst;

static const uint32_t src_pages[] = { 3, 0, 7, 5, 1, 6, 2, 4 };
static const uint32_t dst_pages[] = { 6, 2, 9, 4, 0, 8, 1, 3 };

static const struct sr_shape plain = {
	.page = 8, .dcp_size = 1, .n_pages = 16, .layers = 3, .row_bytes = 64
};

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
	sr_stop(&a);
	uv_run(&loop, UV_RUN_NOWAIT);
	cr_assert_eq(uv_loop_close(&loop), 0);
}

TestSuite(sums_room, .init = setup, .fini = finish, .timeout = 60);

static void start(uint32_t prefill, uint32_t decode, bool local)
{
	a.config.data.checksum = prefill;
	b.config.data.checksum = decode;
	sr_start(&a, local ? NULL : &kvp_net_ucx);
	if (!local)
		sr_start(&b, &kvp_net_ucx);
	sr_pool_make(&src, &a, &plain);
	sr_pool_make(&dst, local ? &a : &b, &plain);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
}

static void transfer(struct sr_node *decode)
{
	struct sr_expect expect = {
		.handle = 1, .room = 7, .pages = dst_pages, .n_pages = 8, .end = 64, .n_senders = 1
	};
	const struct sr_open open = { .handle = 2, .room = 7 };
	const struct sr_chunk chunk = {
		.handle = 2, .tokens = 64, .pages = src_pages, .n_pages = 8, .last = true
	};

	expect.senders[0].address = kvp_peers_address(a.peers);
	cr_assert_eq(sr_expect(decode, &dst, &expect), OK, "%s", decode->err);
	cr_assert_eq(sr_open(&a, &src, &open), OK, "%s", a.err);
	cr_assert_eq(sr_submit(&a, &chunk), OK, "%s", a.err);
	SR_UNTIL(&a, b.rooms ? &b : NULL, decode->ends[1].released && a.ends[2].released);
}

static uint64_t checked(const struct sr_node *node)
{
	struct kvp_lane_status status;

	kvp_lane_status_read(node->lanes[0], &status);
	return status.checked;
}

static uint64_t unchecked(const struct sr_node *node, enum kvp_sums why)
{
	struct kvp_rooms_stats stats;

	kvp_rooms_stats(node->rooms, &stats);
	return stats.unchecked[why];
}

static void check_on(uint32_t prefill, uint32_t decode, bool want)
{
	start(prefill, decode, false);
	transfer(&b);
	cr_assert(b.ends[1].complete && a.ends[2].complete, "%s", b.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
	SR_UNTIL(&a, &b, !want || checked(&b) > 0);
	cr_assert_eq(checked(&b) > 0, want);
	cr_assert_eq(unchecked(&a, KVP_SUMS_NO_PEER) + unchecked(&b, KVP_SUMS_NO_PEER), 0u);
}

Test(sums_room, wanted_by_nobody)
{
	check_on(KVP_CHECKSUM_OFF, KVP_CHECKSUM_OFF, false);
}

Test(sums_room, wanted_by_prefill)
{
	check_on(KVP_CHECKSUM_ON, KVP_CHECKSUM_OFF, true);
}

Test(sums_room, wanted_by_decode)
{
	check_on(KVP_CHECKSUM_OFF, KVP_CHECKSUM_ON, true);
}

Test(sums_room, required)
{
	check_on(KVP_CHECKSUM_REQUIRED, KVP_CHECKSUM_OFF, true);
}

Test(sums_room, local)
{
	start(KVP_CHECKSUM_ON, 0, true);
	transfer(&a);
	cr_assert(a.ends[1].complete && a.ends[2].complete, "%s", a.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
	SR_UNTIL(&a, NULL, checked(&a) > 0);
}

/* A token's rows fill the slot: there is no place for sums. */
static void start_full(uint32_t prefill)
{
	static const struct sr_shape full = {
		.page = 8, .dcp_size = 1, .n_pages = 16, .layers = 1, .row_bytes = 65536
	};

	a.config.data.checksum = prefill;
	a.config.host.slot_bytes = b.config.host.slot_bytes = 65536;
	sr_start(&a, &kvp_net_ucx);
	sr_start(&b, &kvp_net_ucx);
	sr_pool_make(&src, &a, &full);
	sr_pool_make(&dst, &b, &full);
	sr_pool_fill(&src, src_pages, 0, 0, 64);
	transfer(&b);
}

Test(sums_room, no_place)
{
	start_full(KVP_CHECKSUM_ON);
	cr_assert(b.ends[1].complete && a.ends[2].complete, "%s", b.ends[1].reason);
	sr_pool_check(&dst, dst_pages, 0, 0, 64);
	cr_assert_eq(checked(&b), 0u);
	cr_assert_eq(unchecked(&a, KVP_SUMS_NO_SLOT), 1u);
	cr_assert_eq(unchecked(&b, KVP_SUMS_NO_SLOT), 1u);
}

/* A leg without rows, to a peer that says its slots have no more bytes than the sums: what is left
 * for a segment must not come out as no limit at all. */
Test(sums_geom, no_place_for_bytes)
{
	const struct kvp_entry blob = {
		.klass = KVP_CLASS_BLOB, .bytes = 4096, .row_bytes = 1, .full_bytes = 1
	};
	const uint64_t starts[KVP_LANE_GROUPS] = { 0 };
	char err[KVP_ROOM_ERR];

	for (uint64_t slot = 1; slot < 300; slot++) {
		const struct kvp_geom_spec spec = {
			.src = { .entries = &blob, .n = 1 },
			.dst = { .entries = &blob, .n = 1 },
			.starts = starts,
			.end = 64,
			.slot_bytes = slot,
			.sums = true,
		};
		struct kvp_lane_geom geom;

		cr_assert_eq(kvp_geom_build(&geom, &spec, err), OK, "%s", err);
		cr_expect_gt(geom.slot_bytes, 0u, "slot %u", (unsigned)slot);
		cr_expect_leq(geom.sums ? kvp_sums_end(geom.slot_bytes, geom.geom.n_pairs)
					: geom.slot_bytes,
			      slot);
		free(geom.block);
	}
}

Test(sums_room, no_place_and_required)
{
	start_full(KVP_CHECKSUM_REQUIRED);
	cr_assert_eq(a.ends[2].status, ST(UNSUPPORTED), "%s", a.ends[2].reason);
	cr_assert_eq(b.ends[1].status, ST(UNSUPPORTED), "%s", b.ends[1].reason);
	cr_assert(strstr(b.ends[1].reason, "data.checksum is required here, but a token's rows"),
		  "%s", b.ends[1].reason);
}

#ifdef KVP_TEST

static void hold(struct sr_node *node, enum kvp_hold point)
{
	lt_hold(node->lanes[0], point, true);
}

/* Both ends say the same, each with its view of the other in front. */
static void check_corrupt(const struct sr_end *end, const char *front)
{
	cr_assert(end->failed);
	cr_assert_eq(end->status, ST(CORRUPT), "%s", end->reason);
	cr_assert(end->retry);
	cr_assert(strncmp(end->reason, front, strlen(front)) == 0, "%s", end->reason);
	cr_assert(strstr(end->reason, "sender 0: entry 0, layer "), "%s", end->reason);
	cr_assert(strstr(end->reason, "64 rows of tokens [0, 64): sum "), "%s", end->reason);
	cr_assert(strstr(end->reason, " here"), "%s", end->reason);
}

Test(sums_room, both_ends_learn_of_a_changed_byte)
{
	start(KVP_CHECKSUM_OFF, KVP_CHECKSUM_ON, false);
	hold(&a, KVP_HOLD_FLIP_PACK);
	transfer(&b);
	check_corrupt(&b.ends[1], "sender 0: ");
	check_corrupt(&a.ends[2], "destination 0 on ");
	cr_assert_str_eq(strstr(a.ends[2].reason, ": sender 0: ") + 2, b.ends[1].reason);
	cr_assert_eq(dst.pool->pages_held, 0u);
}

Test(sums_room, local_and_a_changed_byte)
{
	start(KVP_CHECKSUM_ON, 0, true);
	hold(&a, KVP_HOLD_FLIP_POOL);
	transfer(&a);
	cr_assert_eq(a.ends[1].status, ST(CORRUPT), "%s", a.ends[1].reason);
	cr_assert_eq(a.ends[2].status, ST(CORRUPT), "%s", a.ends[2].reason);
	cr_assert(strstr(a.ends[2].reason, "sender 0: entry 2, layer "), "%s", a.ends[2].reason);
}

#endif
