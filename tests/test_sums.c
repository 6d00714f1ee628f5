/* SPDX-License-Identifier: Apache-2.0 */

/* Sums: their place in a slot, that both ends compute the same, and that no changed byte arrives.
 */

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/sums.h"
#include "proto/kvpack.pb-c.h"
#include "proto/sums.h"
#include "tests/support_lane.h"
#include "tests/support_world.h"

#define CORRUPT KVP__STATUS__STATUS_CORRUPT

/* ---- layout and agreement -------------------------------------------------------------------- */

Test(sums, lie_behind_the_piece_and_in_the_slot)
{
	static const uint32_t pairs[] = { 0, 1, 2, 61, 512, KVP_PAIRS_MAX };
	static const uint64_t slots[] = { 65536, 65536 + 300, 524288, KVP_LIMIT_SLOT_BYTES };

	cr_assert_eq(kvp_sums_bytes(0), 8u);
	cr_assert_eq(kvp_sums_bytes(1), 8u);
	cr_assert_eq(kvp_sums_bytes(7), 56u);
	cr_assert_eq(kvp_sums_offset(1), 8u);
	cr_assert_eq(kvp_sums_offset(4096), 4096u);
	cr_assert_eq(kvp_sums_end(4097, 3), 4104u + 24);
	for (size_t p = 0; p < KVP_ARRAY_SIZE(pairs); p++)
		for (size_t s = 0; s < KVP_ARRAY_SIZE(slots); s++) {
			uint64_t room = kvp_sums_room(slots[s], pairs[p]);

			cr_assert_gt(room, 0);
			cr_assert_eq(room % KVP_LAYOUT_ALIGN, 0);
			for (uint64_t less = 0; less < 17; less++)
				cr_assert_leq(kvp_sums_end(room - less, pairs[p]), slots[s]);
			cr_assert_gt(kvp_sums_end(room + KVP_LAYOUT_ALIGN, pairs[p]), slots[s]);
		}
	cr_assert_eq(kvp_sums_room(65536, 8192), 0u);
	cr_assert_eq(kvp_sums_room(64, 1), 0u);
}

Test(sums, are_agreed)
{
	const uint32_t can = KVP_SUMS_CAN, ask = can | KVP_SUMS_ASK, gpu = KVP_SUMS_GPU;
	const uint32_t must = ask | KVP_SUMS_MUST;
	const struct {
		uint32_t one, other;
		enum kvp_sums want;
	} cases[] = {
		{ can, can, KVP_SUMS_OFF },
		{ 0, can, KVP_SUMS_OFF },
		{ gpu, can, KVP_SUMS_OFF },
		{ ask, can, KVP_SUMS_ON },
		{ ask, ask, KVP_SUMS_ON },
		{ must, can, KVP_SUMS_ON },
		{ ask, 0, KVP_SUMS_NO_PEER },
		{ must, 0, KVP_SUMS_NO_PEER },
		{ ask, gpu, KVP_SUMS_NO_GPU },
		{ gpu | KVP_SUMS_ASK, can, KVP_SUMS_NO_GPU },
		{ gpu | KVP_SUMS_ASK, gpu, KVP_SUMS_NO_GPU },
		{ gpu | KVP_SUMS_ASK, 0, KVP_SUMS_NO_PEER },
		{ ask | 1u << 20, can | 1u << 21, KVP_SUMS_ON }, /* unknown bits */
	};

	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++) {
		cr_assert_eq(kvp_sums_agree(cases[i].one, cases[i].other), cases[i].want, "%zu", i);
		cr_assert_eq(kvp_sums_agree(cases[i].other, cases[i].one), cases[i].want, "%zu", i);
	}
	cr_assert_str_eq(kvp_sums_name(KVP_SUMS_NO_GPU), "gpu");
	cr_assert_str_eq(kvp_sums_text(KVP_SUMS_N), "unknown");
}

/* ---- of pools -------------------------------------------------------------------------------- */

/* What both ends compute, and, of the packed rows, the hash without our code. */
static void check_piece(const struct world *w, uint32_t r, unsigned char *slot)
{
	struct kvp_part parts[4 * ENTRIES];
	struct kvp_copy_piece src = {
		.leg = &w->legs[r],
		.pool = { .maps = w->src_maps, .sides = &w->src },
		.start = w->start,
		.tokens = w->tokens,
		.parts = parts,
	};
	struct kvp_copy_piece dst;

	(void)kvp_piece_layout(&w->legs[r], NULL, w->start, (uint32_t)w->tokens, parts,
			       &src.n_parts);
	dst = src;
	dst.pool = (struct kvp_copy_pool){ w->dst_maps[r], &w->dst[r] };
	kvp_gather(&src, slot);
	kvp_scatter(&dst, slot);
	for (uint32_t i = 0; i < src.n_parts; i++) {
		uint64_t want = XXH3_64bits_withSeed(slot + parts[i].offset, parts[i].bytes,
						     kvp_sum_seed(w->start, parts[i].pair));

		cr_assert_eq(kvp_sum_source(&src, i), want);
		cr_assert_eq(kvp_sum_dest(&dst, i), want);
		cr_assert(kvp_rows_equal(&src, &dst, i));
#ifdef KVP_TEST
		*kvp_sum_first(&dst, i) ^= 1;
		cr_assert(!kvp_rows_equal(&src, &dst, i));
		cr_assert_neq(kvp_sum_dest(&dst, i), want);
		*kvp_sum_first(&dst, i) ^= 1;
#endif
	}
}

Test(sums, are_the_same_at_both_ends)
{
	static struct world w;
	unsigned char *slot = malloc(4 << 20);
	uint32_t good = 0;

	for (uint32_t round = 0; round < 1000; round++) {
		world_make(&w);
		world_pools(&w);
		for (uint32_t r = 0; world_good(&w) && r < w.n_ranks; r++, good++)
			check_piece(&w, r, slot);
		world_free(&w);
	}
	cr_assert_gt(good, 700);
	for (uint32_t n = 0; n < 20000; n += 1 + n / 3)
		cr_assert_eq(kvp_sum_bytes(slot + 1, n, 77), XXH3_64bits_withSeed(slot + 1, n, 77));
	cr_assert_neq(kvp_sum_seed(0, 0), kvp_sum_seed(1, 0));
	cr_assert_neq(kvp_sum_seed(0, 0), kvp_sum_seed(0, 1));
	free(slot);
}

#ifdef KVP_TEST

/* ---- of what lanes move ---------------------------------------------------------------------- */

struct scene {
	struct lt lt;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src, dst[2];
	struct lt_room room;
};

enum way { PACKED, RAW, LOCAL };

static struct scene *scene_make(enum way way)
{
	static const struct lt_shape src = { .page = 16,
					     .dcp_size = 1,
					     .interleave = 1,
					     .n_pages = 64,
					     .layers = 3,
					     .row_bytes = 576,
					     .blob_bytes = 200001,
					     .groups = 1,
					     .seed = 1 };
	struct scene *scene = calloc(1, sizeof(*scene));
	struct kvp_lane_config config = { .slots = 16,
					  .slot_bytes = 65536,
					  .pack = way != RAW,
					  .net = way == LOCAL ? NULL : &kvp_net_ucx };

	cr_assert(scene);
	lt_begin(&scene->lt);
	scene->from = lt_lane(&scene->lt, &config);
	scene->to = way == LOCAL ? scene->from : lt_lane(&scene->lt, &config);
	if (way != LOCAL)
		lt_pipe_make(&scene->lt, &scene->pipe, scene->from, scene->to, 7);
	scene->room = (struct lt_room){ .lt = &scene->lt,
					.room = 42,
					.n_senders = 1,
					.n_dests = 2,
					.end = 1000,
					.meta_from = -1,
					.slot_bytes = 65536,
					.sums = true,
					.pipe = way == LOCAL ? NULL : &scene->pipe };
	lt_pool_make(&scene->src, &scene->lt, scene->from, &src);
	lt_pool_fill(&scene->src, 42, 0, 1000);
	lt_blob_fill(scene->src.mem + scene->src.entries[scene->src.blob].base, 200001, 5);
	scene->room.senders[0].pool = &scene->src;
	for (uint32_t d = 0; d < 2; d++) {
		struct lt_shape shape = src;

		shape.dcp_size = 2;
		shape.dcp_rank = d;
		shape.seed = 100 + d;
		lt_pool_make(&scene->dst[d], &scene->lt, scene->to, &shape);
		scene->room.dests[d].pool = &scene->dst[d];
	}
	return scene;
}

static bool is_idle(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.pack_free == status.pack_slots && status.land_free == status.land_slots &&
	       status.wants_queued == 0 && !status.has_work;
}

static void scene_end(struct scene *scene)
{
	lt_room_end(&scene->room);
	lt_wait_until(&scene->lt, is_idle, scene->from, "slots to come back");
	lt_wait_until(&scene->lt, is_idle, scene->to, "slots to come back");
	lt_pool_end(&scene->src);
	for (uint32_t d = 0; d < 2; d++)
		lt_pool_end(&scene->dst[d]);
	if (scene->room.pipe)
		lt_pipe_end(&scene->lt, &scene->pipe);
	lt_end(&scene->lt);
	free(scene);
}

/* What a chunk has besides rows. */
enum load { ROWS, SEGMENT, META };

static void load_room(struct scene *scene, enum load load)
{
	struct lt_room *room = &scene->room;

	if (load == SEGMENT) {
		room->n_segments = 1;
		room->segments[0] = (struct kvp_lane_segment){ 9, scene->dst[0].blob, 8, 150001 };
	}
	if (load == META)
		room->meta_from = 0;
	if (load != ROWS)
		room->end = 0;
}

static void submit(struct scene *scene, enum load load)
{
	static uint8_t meta[5000];
	struct kvp_lane_segment segment = { 9, scene->src.blob, 0, 150001 };
	struct lt_chunk chunk = { .last = true };

	if (load == ROWS) {
		lt_submit_all(&scene->room, 0, 400);
		return;
	}
	memset(meta, 0x3c, sizeof(meta));
	chunk.segments = &segment;
	chunk.n_segments = load == SEGMENT;
	chunk.meta = load == META ? meta : NULL;
	chunk.meta_bytes = sizeof(meta);
	(void)lt_submit(&scene->room, 0, &chunk);
}

static struct scene *run(enum way way, enum load load, int flip, bool sums)
{
	struct scene *scene = scene_make(way);

	scene->room.sums = sums;
	load_room(scene, load);
	if (flip >= 0) {
		lt_hold(scene->from, (enum kvp_hold)flip, true);
		lt_hold(scene->to, (enum kvp_hold)flip, true);
	}
	lt_room_begin(&scene->room);
	submit(scene, load);
	return scene;
}

static uint64_t checked(const struct scene *scene)
{
	return lt_status(scene->to).checked;
}

static bool has_checked(void *arg)
{
	return checked(arg) > 0;
}

Test(sums_lane, nothing_changes_when_nothing_is_wrong)
{
	for (enum way way = PACKED; way <= LOCAL; way++)
		for (enum load load = ROWS; load <= META; load++) {
			struct scene *scene = run(way, load, -1, true);

			lt_room_complete(&scene->room);
			if (load == ROWS)
				lt_room_check(&scene->room);
			if (load == SEGMENT)
				lt_blob_check(
					scene->dst[1].mem +
						scene->dst[1].entries[scene->dst[1].blob].base + 8,
					150001, 5);
			lt_wait_until(&scene->lt, has_checked, scene, "sums to be compared");
			cr_assert_eq(lt_status(scene->to).corrupt, 0);
			scene_end(scene);
		}
}

static bool has_counted(void *arg)
{
	return lt_status(arg).corrupt > 0;
}

/* One byte, at each place where it can change. */
static void check_caught(enum way way, enum load load, enum kvp_hold flip)
{
	struct scene *scene = run(way, load, (int)flip, true);
	static const char *const what[] = { "entry ", "segment 9, bytes", "meta, bytes" };
	struct kvp_board *board = NULL;
	bool failed = false;

	for (uint32_t d = 0; d < 2; d++) {
		board = &scene->room.dests[d].board;
		if (d == 1 && way == LOCAL) /* its sender has failed with the first */
			break;
		lt_wait(&scene->lt, board, KVP_BOARD_COMPLETE | KVP_BOARD_FAILED);
		cr_assert(kvp_board_flags(board) & KVP_BOARD_FAILED, "way %d load %d at %s", way,
			  load, kvp_hold_name(flip));
		cr_assert_eq(board->status, CORRUPT, "%s", board->text);
		cr_assert(strstr(board->text, what[load]), "%s", board->text);
		cr_assert(strstr(board->text, " at the source, "), "%s", board->text);
		cr_assert_leq(strlen(board->text), 125u); /* peers put their address before it */
		failed = true;
	}
	cr_assert(failed);
	if (way == LOCAL) {
		board = &scene->room.senders[0].board;
		lt_wait(&scene->lt, board, KVP_BOARD_FAILED);
		cr_assert_eq(board->status, CORRUPT, "%s", board->text);
		cr_assert(strstr(board->text, "destination 0: sender 0: "), "%s", board->text);
	}
	lt_wait_until(&scene->lt, has_counted, scene->to, "a corrupt piece to be counted");
	scene_end(scene);
}

Test(sums_lane, a_changed_byte_is_caught)
{
	for (enum load load = ROWS; load <= META; load++) {
		check_caught(PACKED, load, KVP_HOLD_FLIP_PACK);
		check_caught(PACKED, load, KVP_HOLD_FLIP_LAND);
		check_caught(PACKED, load, KVP_HOLD_FLIP_POOL);
		check_caught(RAW, load, KVP_HOLD_FLIP_LAND);
		check_caught(RAW, load, KVP_HOLD_FLIP_POOL);
		check_caught(LOCAL, load, KVP_HOLD_FLIP_POOL);
	}
}

/* That the points do what they say: without sums nobody notices. */
Test(sums_lane, without_sums_it_is_not)
{
	struct scene *scene = run(PACKED, ROWS, KVP_HOLD_FLIP_PACK, false);

	lt_room_complete(&scene->room);
	cr_assert_eq(checked(scene), 0);
	scene_end(scene);
}

/* Pieces that stood still before their scatter are compared after it, too. */
Test(sums_lane, a_kept_piece_is_compared)
{
	struct scene *scene = scene_make(PACKED);
	struct kvp_board *board = &scene->room.dests[0].board;

	lt_hold(scene->to, KVP_HOLD_SCATTER, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 400);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_SCATTER, 2);
	lt_hold(scene->to, KVP_HOLD_FLIP_POOL, true);
	lt_hold(scene->to, KVP_HOLD_SCATTER, false);
	lt_wait(&scene->lt, board, KVP_BOARD_COMPLETE | KVP_BOARD_FAILED);
	cr_assert_eq(board->status, CORRUPT, "%s", board->text);
	scene_end(scene);
}

Test(sums_lane, a_slot_that_other_legs_share_has_their_sums_too)
{
	struct scene *scene = scene_make(PACKED);
	struct lt_shape shape = scene->src.shape;
	struct lt_pool equal[2];

	/* Two destinations that take the same rows: one packing serves both. */
	for (uint32_t d = 0; d < 2; d++) {
		shape.seed = 200 + d;
		lt_pool_make(&equal[d], &scene->lt, scene->to, &shape);
		scene->room.dests[d].pool = &equal[d];
	}
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 400);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	cr_assert_gt(lt_status(scene->from).shared, 0);
	cr_assert_eq(lt_status(scene->to).corrupt, 0);
	lt_room_end(&scene->room);
	for (uint32_t d = 0; d < 2; d++)
		lt_pool_end(&equal[d]);
	scene->room.n_dests = scene->room.n_senders = 0;
	scene_end(scene);
}

#endif
