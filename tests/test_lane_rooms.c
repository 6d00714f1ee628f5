/* SPDX-License-Identifier: Apache-2.0 */

/* What rooms can do besides rows: segments, meta, layers apart, recall, fences, shared slots,
 * holds. */

#include <criterion/criterion.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "tests/support_clock.h"
#include "tests/support_lane.h"

struct scene {
	struct lt lt;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src, dst[LT_DESTS];
	struct lt_room room;
	bool local;
};

static const struct lt_shape src_shape = { .page = 64,
					   .dcp_size = 1,
					   .interleave = 1,
					   .n_pages = 32,
					   .layers = 3,
					   .row_bytes = 576,
					   .blob_bytes = 300000,
					   .seed = 1,
					   .uid = 1 };
static const struct lt_shape dst_shape = { .page = 64,
					   .dcp_size = 4,
					   .interleave = 1,
					   .n_pages = 8,
					   .layers = 3,
					   .row_bytes = 576,
					   .blob_bytes = 400000,
					   .seed = 2,
					   .uid = 2 };

struct scene_config {
	bool local, raw, equal;        /* equal: destinations see tokens alike */
	const struct kvp_net_ops *net; /* of the sender; NULL: ucx */
	uint64_t slot_bytes;
	uint32_t n_dests, slots;
	uint64_t end;
};

static struct scene *scene_make(const struct scene_config *c)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct kvp_lane_config config = {
		.slots = c->slots ? c->slots : 16,
		.slot_bytes = c->slot_bytes ? c->slot_bytes : 1 << 20,
		.pack = !c->raw,
		.net = c->local ? NULL : &kvp_net_ucx,
	};
	struct lt_room *room = &scene->room;

	cr_assert(scene);
	scene->local = c->local;
	lt_begin(&scene->lt);
	if (c->net)
		config.net = c->net;
	scene->from = lt_lane(&scene->lt, &config);
	config.net = c->local ? NULL : &kvp_net_ucx;
	scene->to = c->local ? scene->from : lt_lane(&scene->lt, &config);
	if (!c->local)
		lt_pipe_make(&scene->lt, &scene->pipe, scene->from, scene->to, 7);
	*room = (struct lt_room){
		.lt = &scene->lt,
		.room = 42,
		.end = c->end,
		.n_senders = 1,
		.n_dests = c->n_dests ? c->n_dests : 4,
		.meta_from = -1,
		.slot_bytes = config.slot_bytes,
		.pipe = c->local ? NULL : &scene->pipe,
	};
	lt_pool_make(&scene->src, &scene->lt, scene->from, &src_shape);
	lt_pool_fill(&scene->src, room->room, 0, 2048);
	lt_blob_fill(scene->src.mem + scene->src.entries[scene->src.blob].base, 300000, 5);
	room->senders[0].pool = &scene->src;
	for (uint32_t d = 0; d < room->n_dests; d++) {
		struct lt_shape shape = dst_shape;

		shape.dcp_rank = c->equal ? 0 : d % 4;
		shape.seed += d;
		lt_pool_make(&scene->dst[d], &scene->lt, scene->to, &shape);
		room->dests[d].pool = &scene->dst[d];
	}
	return scene;
}

static void scene_end(struct scene *scene)
{
	lt_pool_end(&scene->src);
	for (uint32_t d = 0; d < scene->room.n_dests; d++)
		lt_pool_end(&scene->dst[d]);
	if (!scene->local)
		lt_pipe_end(&scene->lt, &scene->pipe);
	lt_end(&scene->lt);
	free(scene);
}

static void submit(struct scene *scene, uint64_t tokens, bool last)
{
	struct lt_chunk chunk = { .tokens = tokens, .last = last };

	(void)lt_submit(&scene->room, 0, &chunk);
}

/* ---- segments and meta ----------------------------------------------------------------------- */

static void segments_and_meta(const struct scene_config *c)
{
	struct scene *scene = scene_make(c);
	struct lt_room *room = &scene->room;
	uint32_t blob = scene->dst[0].blob;
	struct kvp_lane_segment from[3] = { { 11, scene->src.blob, 100, 250000 },
					    { 12, scene->src.blob, 0, 1 },
					    { 13, scene->src.blob, 299000, 1000 } };
	uint8_t meta[50000], image[300000];
	struct lt_chunk chunk = { .tokens = 0 };

	room->n_segments = 3;
	room->segments[0] = (struct kvp_lane_segment){ 13, blob, 7, 1000 };
	room->segments[1] = (struct kvp_lane_segment){ 11, blob, 2048, 250000 };
	room->segments[2] = (struct kvp_lane_segment){ 12, blob, 399999, 1 };
	room->meta_from = 0;
	lt_blob_fill(meta, sizeof(meta), 77);
	lt_blob_fill(image, sizeof(image), 5);
	lt_room_begin(room);
	chunk.n_segments = 1;
	chunk.segments = &from[0];
	(void)lt_submit(room, 0, &chunk); /* a segment alone */
	submit(scene, 1000, false);
	chunk = (struct lt_chunk){ .tokens = room->end - 1000,
				   .last = true,
				   .n_segments = 2,
				   .segments = &from[1],
				   .meta = meta,
				   .meta_bytes = sizeof(meta) };
	(void)lt_submit(room, 0, &chunk);
	lt_room_complete(room);
	lt_room_check(room);
	for (uint32_t d = 0; d < room->n_dests; d++) {
		const uint8_t *at = scene->dst[d].mem + scene->dst[d].entries[blob].base;

		cr_assert_eq(memcmp(at + 7, image + 299000, 1000), 0);
		cr_assert_eq(memcmp(at + 2048, image + 100, 250000), 0);
		cr_assert_eq(at[399999], image[0]);
		cr_assert_eq(room->dests[d].meta_bytes, sizeof(meta));
		cr_assert_eq(memcmp(room->dests[d].meta, meta, sizeof(meta)), 0);
	}
	lt_room_end(room);
	scene_end(scene);
}

Test(lane_rooms, segments_and_meta)
{
	segments_and_meta(&(struct scene_config){ .local = true, .end = 1500 });
	segments_and_meta(&(struct scene_config){ .end = 1500 });
	segments_and_meta(&(struct scene_config){ .end = 1500, .slot_bytes = 65536 });
	segments_and_meta(&(struct scene_config){ .end = 1500, .raw = true });
}

static void expect_failure(struct scene *scene, Kvp__Status status, const char *text)
{
	struct kvp_board *board = &scene->room.dests[0].board;

	lt_wait(&scene->lt, board, KVP_BOARD_COMPLETE | KVP_BOARD_FAILED);
	cr_assert(kvp_board_flags(board) & KVP_BOARD_FAILED);
	cr_assert_eq(board->status, status, "status %u: %s", board->status, board->text);
	cr_assert(strstr(board->text, text), "%s", board->text);
	/* The sender learns it too, unless all that it sent was taken. */
	if (status != KVP__STATUS__STATUS_COVERAGE)
		lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_FAILED);
	lt_room_end(&scene->room);
	scene_end(scene);
}

static void bad_segments(bool local)
{
	struct scene_config c = { .local = local, .n_dests = 1, .end = 64 };
	struct scene *scene = scene_make(&c);
	struct kvp_lane_segment from[2] = { { 11, scene->src.blob, 0, 1000 },
					    { 11, scene->src.blob, 0, 1000 } };
	struct lt_chunk chunk = { .n_segments = 1, .segments = from };
	struct kvp_lane_segment want = { 11, scene->dst[0].blob, 0, 999 };

	scene->room.n_segments = 1;
	scene->room.segments[0] = want;
	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	expect_failure(scene, KVP__STATUS__STATUS_MISMATCH, "expected 999");

	scene = scene_make(&c);
	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	expect_failure(scene, KVP__STATUS__STATUS_MISMATCH, "segment 11 is not expected");

	want.bytes = 1000;
	scene = scene_make(&c);
	scene->room.n_segments = 1;
	scene->room.segments[0] = want;
	chunk.n_segments = 2;
	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	expect_failure(scene, KVP__STATUS__STATUS_ORDER, "second time");

	scene = scene_make(&c);
	scene->room.n_segments = 1;
	scene->room.segments[0] = want;
	lt_room_begin(&scene->room);
	submit(scene, 64, true);
	expect_failure(scene, KVP__STATUS__STATUS_COVERAGE, "segment 11");

	scene = scene_make(&c);
	scene->room.meta_from = 0;
	lt_room_begin(&scene->room);
	submit(scene, 64, true);
	expect_failure(scene, KVP__STATUS__STATUS_COVERAGE, "meta");
}

Test(lane_rooms, bad_segments)
{
	bad_segments(true);
	bad_segments(false);
}

/* ---- layer by layer -------------------------------------------------------------------------- */

static void layers(bool local)
{
	struct scene_config c = { .local = local, .end = 1000 };
	struct scene *scene = scene_make(&c);
	uint64_t set[KVP_LANE_MASK_WORDS] = { 0 };

	lt_room_begin(&scene->room);
	for (uint32_t part = 0; part < 2; part++) {
		for (uint32_t layer = 0; layer < 3; layer++) {
			struct lt_chunk chunk = { .start = part * 400,
						  .tokens = part ? 600 : 400,
						  .entry_set = set,
						  .last = part == 1 && layer == 2 };

			set[0] = UINT64_C(1) << layer;
			(void)lt_submit(&scene->room, 0, &chunk);
		}
	}
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	lt_room_end(&scene->room);
	scene_end(scene);
}

Test(lane_rooms, layer_by_layer)
{
	layers(true);
	layers(false);
}

Test(lane_rooms, a_layer_that_is_missing_at_the_end)
{
	struct scene *scene = scene_make(&(struct scene_config){ .end = 100, .n_dests = 1 });
	uint64_t set[KVP_LANE_MASK_WORDS] = { 3 };
	struct lt_chunk chunk = { .tokens = 100, .entry_set = set, .last = true };

	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	expect_failure(scene, KVP__STATUS__STATUS_ORDER, "entry 2 ends at 0, not 100");
}

/* ---- order of calls -------------------------------------------------------------------------- */

static bool delivered_two(void *arg)
{
	struct lt_room *room = arg;

	return atomic_load(&room->senders[0].board.delivered) == 2 &&
	       atomic_load(&room->senders[0].board.waits) == KVP_WAITS_FENCE;
}

/* Chunks before the destinations; then recall of what nobody has begun, and other chunks instead.
 */
static void recall(bool local)
{
	struct scene *scene = scene_make(&(struct scene_config){ .local = local, .end = 1500 });
	struct lt_room *room = &scene->room;
	struct kvp_board *board = &room->senders[0].board;
	_Atomic uint64_t word = 0;
	struct kvp_board fence_board;
	struct kvp_order_fence *fence = calloc(1, sizeof(*fence));
	struct lt_chunk late = { .tokens = 500, .fence_value = 9, .last = true };

	kvp_board_init(&fence_board, KVP_BOARD_FENCE, lt_id(&scene->lt));
	fence->order.type = KVP_ORDER_FENCE_ADD;
	fence->board = &fence_board;
	fence->words = &word;
	fence->n_words = 1;
	kvp_lane_order(scene->from, &fence->order);
	late.fence = fence_board.id;

	lt_room_begin_rx(room);
	lt_room_begin_tx(room, 0);
	submit(scene, 500, false);
	submit(scene, 400, false);
	late.tokens = 600;
	(void)lt_submit(room, 0, &late);
	lt_room_start_tx(room, 0);
	lt_wait_until(&scene->lt, delivered_two, room, "two chunks");

	lt_order_id(scene->from, KVP_ORDER_TX_RECALL, board->id, 1);
	lt_wait(&scene->lt, board, KVP_BOARD_RECALLED);
	cr_assert_eq(atomic_load(&board->recalled_from), 2);
	kvp_board_clear(board, KVP_BOARD_RECALLED);
	lt_order_id(scene->from, KVP_ORDER_TX_RECALL, board->id, 0);
	lt_wait(&scene->lt, board, KVP_BOARD_RECALLED);
	cr_assert_eq(atomic_load(&board->recalled_from), 2);

	room->senders[0].seq = 2;
	room->senders[0].next = 900;
	late.tokens = 300;
	late.fence_value = 3;
	late.last = false;
	(void)lt_submit(room, 0, &late);
	submit(scene, 300, true);
	atomic_store(&word, 3);
	lt_room_complete(room);
	lt_room_check(room);
	lt_room_end(room);
	lt_order_id(scene->from, KVP_ORDER_FENCE_END, fence_board.id, 0);
	lt_wait(&scene->lt, &fence_board, KVP_BOARD_QUIET);
	scene_end(scene);
}

Test(lane_rooms, recall_and_fences)
{
	recall(true);
	recall(false);
}

Test(lane_rooms, a_fence_that_is_never_reached)
{
	struct scene *scene = scene_make(&(struct scene_config){ .end = 64 });
	struct kvp_board *board = &scene->room.senders[0].board;
	_Atomic uint64_t word = 0;
	struct kvp_board fence_board;
	struct kvp_order_fence *fence = calloc(1, sizeof(*fence));
	struct lt_chunk chunk = { .tokens = 64, .last = true, .fence_value = 1 };

	kvp_board_init(&fence_board, KVP_BOARD_FENCE, lt_id(&scene->lt));
	fence->order.type = KVP_ORDER_FENCE_ADD;
	fence->board = &fence_board;
	fence->words = &word;
	fence->n_words = 1;
	kvp_lane_order(scene->from, &fence->order);
	chunk.fence = fence_board.id;
	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	while (atomic_load(&board->waits) != KVP_WAITS_FENCE)
		;
	lt_room_end(&scene->room);
	cr_assert_eq(atomic_load(&board->source_free), 1); /* dropped: free too */
	cr_assert_eq(lt_status(scene->from).pieces_sent, 0);
	lt_order_id(scene->from, KVP_ORDER_FENCE_END, fence_board.id, 0);
	lt_wait(&scene->lt, &fence_board, KVP_BOARD_QUIET);
	scene_end(scene);
}

Test(lane_rooms, a_fence_that_is_not_there)
{
	struct scene *scene = scene_make(&(struct scene_config){ .end = 64, .local = true });
	struct lt_chunk chunk = { .tokens = 64, .last = true, .fence = 4711, .fence_value = 1 };
	struct kvp_board *board = &scene->room.senders[0].board;

	lt_room_begin(&scene->room);
	(void)lt_submit(&scene->room, 0, &chunk);
	lt_wait(&scene->lt, board, KVP_BOARD_FAILED);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_NOT_FOUND);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- pieces of one pass ---------------------------------------------------------------------- */

/* Ranks that own other tokens of the same pages: as above, but each rank has a slot of its own. */
Test(lane_rooms, ranks_of_one_prompt_are_packed_together)
{
	struct scene_config c = { .end = 2048, .slot_bytes = 65536, .slots = 64 };
	struct scene *scene = scene_make(&c);
	struct kvp_lane_status status;

	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 4);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	status = lt_status(scene->from);
	if (!(&lt_gpu && lt_gpu)) /* a GPU's launch packs what is ready, of whatever leg */
		cr_assert_gt(status.together, 0);
	cr_assert_eq(status.shared, 0);
	cr_assert_eq(status.pack_free, status.pack_slots);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- shared slots ---------------------------------------------------------------------------- */

Test(lane_rooms, equal_destinations_share_slots)
{
	struct scene_config c = { .equal = true, .end = 2048, .slot_bytes = 65536, .slots = 64 };
	struct scene *scene = scene_make(&c);
	struct kvp_lane_status status;

	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 4);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	status = lt_status(scene->from);
	cr_assert_gt(status.shared, 0);
	cr_assert_eq(status.pieces_sent, status.shared + status.repacked + status.pieces_sent / 4,
		     "sent %llu shared %llu repacked %llu", (unsigned long long)status.pieces_sent,
		     (unsigned long long)status.shared, (unsigned long long)status.repacked);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- test points ----------------------------------------------------------------------------- */

static bool slots_are_back(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.land_free == status.land_slots && status.pack_free == status.pack_slots &&
	       status.wants_queued == 0;
}

static bool slots_are_granted(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.land_free < status.land_slots;
}

static bool rxs_are_gone(void *arg)
{
	return lt_status(arg).rxs == 0;
}

/* The receiver is over first. Where the sender may still write into its pools, it is not quiet
 * before the sender has said that it will not. */
static void receiver_ends_first(struct scene *scene, struct kvp_lane *lane, enum kvp_hold point)
{
	bool writes = lt_direct() && (point == KVP_HOLD_GATHER || point == KVP_HOLD_SEND);
	struct lt_room *room = &scene->room;
	uint32_t n_quiet = 0;

	for (uint32_t d = 0; d < room->n_dests; d++)
		lt_order_id(scene->to, KVP_ORDER_RX_END, room->dests[d].board.id, 0);
	lt_wait_until(&scene->lt, rxs_are_gone, scene->to, "destinations to end");
	if (writes) {
		for (uint32_t d = 0; d < room->n_dests; d++)
			n_quiet += (kvp_board_flags(&room->dests[d].board) & KVP_BOARD_QUIET) != 0;
		cr_assert_lt(n_quiet, room->n_dests, "released under a sender's hands");
		lt_hold(lane, point, false);
		lt_order_id(scene->from, KVP_ORDER_TX_END, room->senders[0].board.id, 0);
	}
	for (uint32_t d = 0; d < room->n_dests; d++) {
		lt_wait(&scene->lt, &room->dests[d].board, KVP_BOARD_QUIET);
		lt_pool_unmap(&scene->dst[d]);
	}
	if (!writes) {
		lt_hold(lane, point, false);
		lt_order_id(scene->from, KVP_ORDER_TX_END, room->senders[0].board.id, 0);
	}
	lt_wait(&scene->lt, &room->senders[0].board, KVP_BOARD_QUIET);
}

/* Aborts while pieces stand at a test point; then the pools are taken away, and the rest of the
 * room's messages must find nothing. A second room on the same lanes works. */
static void abort_at(enum kvp_hold point, bool sender_first, bool raw)
{
	bool rx_side =
		point == KVP_HOLD_GRANT || point == KVP_HOLD_SCATTER || point == KVP_HOLD_LANDED;
	struct scene_config c = { .end = 2048, .slot_bytes = 65536, .raw = raw };
	struct scene *scene = scene_make(&c);
	struct lt_room *room = &scene->room;
	struct kvp_lane *lane = rx_side ? scene->to : scene->from;

	lt_hold(lane, point, true);
	lt_room_begin(room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, lane, point, 1);
	/* What has been scattered is there, whether its LANDED is sent or not. */
	for (uint32_t d = 0; d < room->n_dests && point != KVP_HOLD_LANDED; d++)
		cr_assert_not(kvp_board_flags(&room->dests[d].board) & KVP_BOARD_COMPLETE);

	if (sender_first) {
		lt_order_id(scene->from, KVP_ORDER_TX_END, room->senders[0].board.id, 0);
		lt_wait(&scene->lt, &room->senders[0].board, KVP_BOARD_QUIET);
		lt_pool_unmap(&scene->src);
		lt_hold(lane, point, false);
		for (uint32_t d = 0; d < room->n_dests; d++) {
			lt_order_id(scene->to, KVP_ORDER_RX_END, room->dests[d].board.id, 0);
			lt_wait(&scene->lt, &room->dests[d].board, KVP_BOARD_QUIET);
		}
	} else {
		receiver_ends_first(scene, lane, point);
	}
	lt_wait_until(&scene->lt, slots_are_back, scene->from, "pack slots to come back");
	lt_wait_until(&scene->lt, slots_are_back, scene->to, "landing slots to come back");
	scene_end(scene);
}

Test(lane_rooms, abort_by_the_sender_at_each_test_point)
{
	for (enum kvp_hold point = KVP_HOLD_WANT; point <= KVP_HOLD_LANDED; point++)
		if (point != KVP_HOLD_SCATTER || !lt_direct())
			abort_at(point, true, false);
}

Test(lane_rooms, abort_by_the_receiver_at_each_test_point)
{
	for (enum kvp_hold point = KVP_HOLD_WANT; point <= KVP_HOLD_LANDED; point++)
		if (point != KVP_HOLD_SCATTER || !lt_direct())
			abort_at(point, false, false);
}

Test(lane_rooms, abort_unpacked)
{
	abort_at(KVP_HOLD_SEND, true, true);
	abort_at(KVP_HOLD_SCATTER, true, true);
	abort_at(KVP_HOLD_SCATTER, false, true);
}

/* What a sender was granted and did not use comes back without an end of the receiver's room. */
Test(lane_rooms, unused_grants_are_returned)
{
	struct scene *scene =
		scene_make(&(struct scene_config){ .end = 2048, .slot_bytes = 65536 });

	lt_hold(scene->from, KVP_HOLD_GATHER, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->from, KVP_HOLD_GATHER, 2);
	if (!lt_direct()) /* they travel while the sender packs */
		lt_wait_until(&scene->lt, slots_are_granted, scene->to, "grants");
	lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id, 0);
	lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_QUIET);
	lt_wait_until(&scene->lt, slots_are_back, scene->to, "grants to come back");
	for (uint32_t d = 0; d < scene->room.n_dests; d++) {
		lt_order_id(scene->to, KVP_ORDER_RX_END, scene->room.dests[d].board.id, 0);
		lt_wait(&scene->lt, &scene->room.dests[d].board, KVP_BOARD_QUIET);
	}
	scene_end(scene);
}

/* However much it wants: the rest is for others. */
Test(lane_rooms, a_session_holds_a_quarter_of_the_landing_ring)
{
	struct scene *scene =
		scene_make(&(struct scene_config){ .end = 2048, .slot_bytes = 65536 });
	struct kvp_lane_status status;

	if (lt_direct())
		cr_skip_test("no slots are taken");
	lt_hold(scene->to, KVP_HOLD_SCATTER, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_SCATTER, 4);
	status = lt_status(scene->to);
	cr_assert_eq(status.land_slots - status.land_free, 4, "%u of %u are free", status.land_free,
		     status.land_slots);
	cr_assert_gt(status.wants_queued, 16);
	lt_hold(scene->to, KVP_HOLD_SCATTER, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* Without a grant a sender packs no more than half of its ring: with fewer slots than it would like
 * to fill, too, so that pieces with a grant find one. */
Test(lane_rooms, half_of_the_pack_ring_is_packed_ahead)
{
	struct scene *scene =
		scene_make(&(struct scene_config){ .end = 2048, .slot_bytes = 65536, .slots = 2 });
	struct kvp_lane_status status;

	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 40);
	status = lt_status(scene->from);
	cr_assert_leq(status.pack_held, 1);
	cr_assert_geq(status.pack_free, 1);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* The endpoint goes first, in the midst of everything. */
Test(lane_rooms, endpoints_end_before_rooms)
{
	struct scene *scene =
		scene_make(&(struct scene_config){ .end = 2048, .slot_bytes = 65536 });
	enum kvp_hold point = lt_direct() ? KVP_HOLD_LANDED : KVP_HOLD_SCATTER;

	lt_hold(scene->to, point, true);
	lt_room_begin(&scene->room);
	submit(scene, 2048, true);
	lt_wait_held(&scene->lt, scene->to, point, 1);
	lt_pipe_end(&scene->lt, &scene->pipe);
	lt_room_end(&scene->room);
	for (uint32_t d = 0; d < scene->room.n_dests; d++)
		lt_pool_unmap(&scene->dst[d]);
	lt_pool_unmap(&scene->src);
	scene->local = true;
	scene_end(scene);
}

/* ---- idle ------------------------------------------------------------------------------------ */

Test(lane_rooms, an_idle_lane_sleeps)
{
	struct scene *scene = scene_make(&(struct scene_config){ .end = 2048 });
	struct timespec pause = { .tv_nsec = 600000000 };
	uint64_t until = support_clock_ns() + 5 * UINT64_C(1000000000);
	uint64_t before, after;

	lt_room_begin(&scene->room);
	submit(scene, 1024, false);
	submit(scene, 1024, true);
	lt_room_complete(&scene->room);
	/* What comes last may come late; then there is a while without any. */
	do {
		before = lt_status(scene->from).turns;
		(void)nanosleep(&pause, NULL);
		after = lt_status(scene->from).turns;
	} while (before != after && support_clock_ns() < until);
	cr_assert_eq(before, after, "%llu turns", (unsigned long long)(after - before));
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- a transport that fails ------------------------------------------------------------------ */

static const struct kvp_net_events *true_events;
static struct kvp_net_events false_events;
static atomic_bool next_fails;

static void false_sent(void *arg, void *req, int status)
{
	if (req && atomic_exchange(&next_fails, false))
		status = -EIO;
	true_events->sent(arg, req, status);
}

static int false_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		      size_t err_bytes)
{
	struct kvp_net_config own = *config;

	true_events = config->events;
	false_events = *config->events;
	false_events.sent = false_sent;
	own.events = &false_events;
	return lt_net()->open(out, &own, err, err_bytes);
}

static bool has_all_slots(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.pack_free == status.pack_slots;
}

/* One send fails while its endpoint lives: the room does, once, and leaves nothing behind. */
static void one_send_fails(uint64_t tokens)
{
	struct kvp_net_ops failing = *lt_net();
	struct scene_config c = { .n_dests = 1, .end = tokens, .net = &failing };
	struct scene *scene;

	if (lt_direct()) /* over another transport than this one */
		return;
	failing.open = false_open;
	scene = scene_make(&c);
	lt_room_begin(&scene->room);
	atomic_store(&next_fails, true);
	submit(scene, tokens, true);
	lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_FAILED);
	cr_expect_eq(scene->room.senders[0].board.status, KVP__STATUS__STATUS_TRANSPORT);
	lt_room_end(&scene->room);
	lt_wait_until(&scene->lt, has_all_slots, scene->from, "all pack slots are free");
	scene_end(scene);
}

Test(lane_rooms, a_send_fails_with_its_want, .timeout = 60)
{
	one_send_fails(64);
}

Test(lane_rooms, a_send_fails_after_its_grant, .timeout = 60)
{
	one_send_fails(2048);
}

/* ---- a transport that is slow to let go ------------------------------------------------------ */

static atomic_bool lets_go;
static void *late_arg, *late_reqs[64];
static unsigned n_late;

static void late_sent(void *arg, void *req, int status)
{
	if (!req || status < 0 || atomic_load(&lets_go) || n_late == KVP_ARRAY_SIZE(late_reqs)) {
		true_events->sent(arg, req, status);
		return;
	}
	late_arg = arg;
	late_reqs[n_late++] = req;
}

static int late_progress(struct kvp_net *net)
{
	int n = 0;

	while (atomic_load(&lets_go) && n_late > 0) {
		true_events->sent(late_arg, late_reqs[--n_late], 0);
		n++;
	}
	return n + lt_net()->progress(net);
}

static int late_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		     size_t err_bytes)
{
	struct kvp_net_config own = *config;

	true_events = config->events;
	false_events = *config->events;
	false_events.sent = late_sent;
	own.events = &false_events;
	return lt_net()->open(out, &own, err, err_bytes);
}

static bool delivered_14(void *arg)
{
	return atomic_load(&((struct kvp_board *)arg)->delivered) == 14;
}

/*
 * Pieces stay in their leg while the transport holds an older one, though the peer has them and
 * their chunks are over: they must not be taken for those of new chunks, which may lie in the same
 * memory.
 */
Test(lane_rooms, landed_pieces_outlive_their_chunks, .timeout = 60)
{
	struct kvp_net_ops late = *lt_net();
	struct scene_config c = { .n_dests = 1, .end = 128, .net = &late };
	struct scene *scene;

	if (lt_direct()) /* over another transport than this one */
		return;
	late.open = late_open;
	late.progress = late_progress;
	scene = scene_make(&c);
	lt_room_begin(&scene->room);
	submit(scene, 64, false);
	for (unsigned i = 0; i < 13; i++)
		submit(scene, 0, false);
	lt_wait_until(&scene->lt, delivered_14, &scene->room.senders[0].board, "14 chunks");
	submit(scene, 64, true);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	atomic_store(&lets_go, true);
	lt_room_end(&scene->room);
	lt_wait_until(&scene->lt, has_all_slots, scene->from, "all pack slots are free");
	scene_end(scene);
}
