/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode between two lanes, on a device made of nothing: what is written and counted, what
 * lands and why, and that nothing is released while the device may still write.
 */

#include <criterion/criterion.h>
#include <stdlib.h>

#include "proto/kvpack.pb-c.h"
#include "proto/wire.h"
#include "tests/fake_verbs.h"
#include "tests/support_direct.h"

/* ---- what is written ------------------------------------------------------------------------- */

/* Writes that the room's pieces take: a page of the destination and an entry at a time, cut where a
 * piece ends; pages that follow each other do not touch. */
static uint64_t expected_writes(const struct direct *scene)
{
	struct kvp_lane_geom geom = lt_geom(&scene->room, 0, 0);
	uint64_t n = 0;

	for (uint64_t chunk = 0; chunk < DIRECT_TOKENS; chunk += 700) {
		uint64_t end = KVP_MIN(chunk + 700, (uint64_t)DIRECT_TOKENS);

		for (uint64_t at = chunk; at < end; at += geom.piece_tokens) {
			uint64_t to = KVP_MIN(at + geom.piece_tokens, end);

			n += 3 * ((to - 1) / 128 - at / 128 + 1);
		}
	}
	free(geom.block);
	return n;
}

Test(direct, one_write_a_run)
{
	struct direct *scene = direct_make(
		&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT });
	struct kvp_board *rx = &scene->room.dests[0].board, *tx = &scene->room.senders[0].board;
	struct kvp_lane_status from, to;

	direct_transfer(scene, false);
	from = lt_status(scene->from);
	to = lt_status(scene->to);
	cr_assert_gt(to.pieces_direct, 0);
	cr_assert_eq(to.pieces_direct, to.pieces_landed);
	cr_assert_eq(to.bytes_direct, to.bytes_landed);
	cr_assert_eq(from.direct_writes, expected_writes(scene), "%llu writes",
		     (unsigned long long)from.direct_writes);
	cr_assert_eq(atomic_load(&rx->moved), KVP_MOVED_DIRECT);
	cr_assert_eq(atomic_load(&tx->moved), KVP_MOVED_DIRECT);
	cr_assert_eq(atomic_load(&rx->direct_pieces), to.pieces_direct);
	cr_assert_eq(atomic_load(&tx->direct_bytes), to.bytes_direct);
	cr_assert_eq(to.windows, 1);
	lt_room_end(&scene->room);
	direct_end(scene, true);
}

/* The grant of one room is of no use for the next. */
Test(direct, a_window_for_each_leg)
{
	struct direct *scene = direct_make(
		&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT });
	uint64_t binds;

	for (uint32_t i = 0; i < 3; i++) {
		binds = kvp_fake_look().n_binds;
		direct_transfer(scene, false);
		lt_room_end(&scene->room);
		cr_assert_eq(kvp_fake_look().n_binds, binds + 2, "bound and taken back");
		cr_assert_eq(kvp_fake_look().n_mws, 1, "used again");
	}
	direct_end(scene, true);
}

/* Three ranks that need the same rows. */
static void equal_dests(struct direct *scene, struct lt_pool *more)
{
	struct lt_shape shape = scene->dst.shape;

	scene->room.n_dests = 3;
	for (uint32_t i = 0; i < 2; i++) {
		shape.seed = 10 + i;
		lt_pool_make(&more[i], &scene->lt, scene->to, &shape);
		scene->room.dests[i + 1].pool = &more[i];
	}
}

/*
 * One of them is known to the device before the others: its pieces have their grants first. Those
 * of the others come behind them and hold slots already, since they share them.
 */
Test(direct, equal_destinations_whose_windows_come_late)
{
	struct direct *scene = direct_make(
		&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT });
	struct lt_pool more[2];

	equal_dests(scene, more);
	lt_hold(scene->from, KVP_HOLD_GATHER, true);
	kvp_fake_hold_binds(kvp_fake_look().n_binds + 1);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_held(&scene->lt, scene->from, KVP_HOLD_GATHER, KVP_WIRE_LEG_WINDOW);
	kvp_fake_hold_binds(UINT64_MAX);
	lt_wait_held(&scene->lt, scene->from, KVP_HOLD_GATHER, 3 * KVP_WIRE_LEG_WINDOW);
	lt_hold(scene->from, KVP_HOLD_GATHER, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	cr_assert_gt(lt_status(scene->from).shared, 0);
	lt_room_end(&scene->room);
	for (uint32_t i = 0; i < 2; i++)
		lt_pool_end(&more[i]);
	direct_end(scene, true);
}

/* ---- what lands ------------------------------------------------------------------------------ */

static void lands(const struct direct_wish *wish, enum kvp_why why)
{
	struct direct *scene = direct_make(wish);

	direct_transfer(scene, false);
	direct_landed(scene, why);
	lt_room_end(&scene->room);
	direct_end(scene, true);
}

Test(direct, landing_by_configuration)
{
	lands(&(struct direct_wish){ .from = KVP_DATA_LANDING,
				     .to = KVP_DATA_AUTO,
				     .run_bytes = 1 },
	      KVP_WHY_SENDER);
	lands(&(struct direct_wish){ .from = KVP_DATA_AUTO,
				     .to = KVP_DATA_LANDING,
				     .run_bytes = 1 },
	      KVP_WHY_MODE);
	lands(
		&(struct direct_wish){
			.from = KVP_DATA_AUTO, .to = KVP_DATA_AUTO, .run_bytes = 1, .raw = true },
		KVP_WHY_SENDER);
}

static void no_windows(struct kvp_fake *fake)
{
	fake->no_windows = true;
}

static void no_binding(struct kvp_fake *fake)
{
	fake->fail_binding = true;
}

/* Pieces come before the registration: a room that is kept until it has been tried. */
static void lands_for_lack(void (*spoil)(struct kvp_fake *fake), enum kvp_why why)
{
	struct direct *scene = direct_make(&(struct direct_wish){
		.from = KVP_DATA_AUTO, .to = KVP_DATA_AUTO, .run_bytes = 1 });
	struct kvp_lane_status to;

	spoil(&kvp_fake);
	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 3);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	to = lt_status(scene->to);
	cr_assert_eq(to.pieces_direct, 0);
	cr_assert_gt(to.fell_back[why], 0);
	lt_room_end(&scene->room);
	direct_end(scene, true);
}

Test(direct, landing_for_lack_of_windows)
{
	lands_for_lack(no_windows, KVP_WHY_MEMORY);
}

Test(direct, landing_since_windows_fail)
{
	lands_for_lack(no_binding, KVP_WHY_WINDOWS);
}

/* From two ranks to one every second row is another's: a write a row is not worth it. */
Test(direct, landing_of_scattered_rows)
{
	const struct direct_wish wish = { .run_bytes = 4096, .dcp_size = 2 };
	struct direct *scene = direct_make(&wish);
	struct lt_pool other;
	struct kvp_lane_status to;
	struct lt_shape shape = scene->src.shape;

	shape.dcp_rank = 1;
	shape.seed = 9;
	lt_pool_make(&other, &scene->lt, scene->from, &shape);
	lt_pool_fill(&other, 42, 0, DIRECT_TOKENS);
	scene->room.n_senders = 2;
	scene->room.senders[1].pool = &other;
	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_submit_all(&scene->room, 1, DIRECT_TOKENS);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 3);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	to = lt_status(scene->to);
	cr_assert_eq(to.pieces_direct, 0);
	cr_assert_gt(to.fell_back[KVP_WHY_RUNS], 0);
	lt_room_end(&scene->room);
	lt_pool_end(&other);
	direct_end(scene, true);
}

static void refused(const struct direct_wish *wish, void (*spoil)(struct kvp_fake *fake),
		    const char *text)
{
	struct direct *scene = direct_make(wish);

	if (spoil)
		spoil(&kvp_fake);
	direct_fails(scene, KVP__STATUS__STATUS_UNSUPPORTED, text);
	direct_end(scene, true);
}

/* Sums are behind the bytes of a slot. */
Test(direct, landing_with_sums)
{
	lands(
		&(struct direct_wish){
			.from = KVP_DATA_AUTO, .to = KVP_DATA_AUTO, .run_bytes = 1, .sums = true },
		KVP_WHY_SUMS);
	refused(&(struct direct_wish){ .from = KVP_DATA_AUTO, .to = KVP_DATA_DIRECT, .sums = true },
		NULL, "data.mode is direct, but sums travel with slots");
}

/* What was written into a slot and is not right has come: nothing is waited for, the slot is free.
 */
Test(direct, a_slot_with_a_changed_byte)
{
	const struct direct_wish wish = { .run_bytes = 1, .sums = true };
	struct direct *scene = direct_make(&wish);

	lt_hold(scene->from, KVP_HOLD_FLIP_PACK, true);
	direct_fails(scene, KVP__STATUS__STATUS_CORRUPT, "");
	direct_end(scene, true);
}

Test(direct, forced_it_does_not_land)
{
	refused(&(struct direct_wish){ .from = KVP_DATA_LANDING, .to = KVP_DATA_DIRECT }, NULL,
		"data.mode is direct, but the sender does not write directly");
	refused(&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT }, no_windows,
		"fake0 has no memory windows");
	kvp_fake_reset();
	refused(&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT }, no_binding,
		"no memory window was to be had");
}

/* ---- late writes ----------------------------------------------------------------------------- */

static bool rxs_are_gone(void *arg)
{
	return lt_status(arg).rxs == 0;
}

/* A room whose writes wait in the sender's device; both ends are over. */
static struct direct *scene_with_late_writes(void)
{
	struct direct *scene = direct_make(
		&(struct direct_wish){ .from = KVP_DATA_DIRECT, .to = KVP_DATA_DIRECT });

	kvp_fake_hold_writes(true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	direct_wait_writes(scene);
	lt_order_id(scene->to, KVP_ORDER_RX_END, scene->room.dests[0].board.id, 0);
	lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id, 0);
	/* The sender's pages were packed: it is not kept by its device. */
	lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_QUIET);
	lt_pool_unmap(&scene->src);
	lt_wait_until(&scene->lt, rxs_are_gone, scene->to, "the destination to end");
	return scene;
}

static void expect_held(struct direct *scene)
{
	cr_assert_not(kvp_board_flags(&scene->room.dests[0].board) & KVP_BOARD_QUIET,
		      "released under the device's hands");
	cr_assert_gt(lt_status(scene->to).windows, 0);
}

/* The writes happen after the end of the room, and before its pages are anybody else's. */
Test(direct, released_after_the_last_late_write)
{
	struct direct *scene = scene_with_late_writes();
	uint64_t writes = kvp_fake_look().n_writes;

	expect_held(scene);
	kvp_fake_hold_writes(false);
	lt_wait(&scene->lt, &scene->room.dests[0].board, KVP_BOARD_QUIET);
	cr_assert_gt(kvp_fake_look().n_writes, writes, "they did happen");
	cr_assert_eq(kvp_fake_look().n_refused, 0);
	lt_pool_unmap(&scene->dst);
	direct_end(scene, true);
}

/* Nobody says that they are over: the end of the endpoints is waited for, and after it the device
 * lets nothing through. */
Test(direct, released_after_the_end_of_the_connection)
{
	struct direct *scene = scene_with_late_writes();

	expect_held(scene);
	lt_order_id(scene->to, KVP_ORDER_EP_END, scene->pipe.b.id, 0);
	lt_wait(&scene->lt, &scene->pipe.b, KVP_BOARD_QUIET);
	lt_wait(&scene->lt, &scene->room.dests[0].board, KVP_BOARD_QUIET);
	lt_pool_unmap(&scene->dst);
	kvp_fake_hold_writes(false); /* one that came through would end the process */
	lt_order_id(scene->from, KVP_ORDER_EP_END, scene->pipe.a.id, 0);
	lt_wait(&scene->lt, &scene->pipe.a, KVP_BOARD_QUIET);
	direct_end(scene, false);
}
