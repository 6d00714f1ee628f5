/* SPDX-License-Identifier: Apache-2.0 */

/* Rows from pool to pool: local, and between two lanes over a real transport. */

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/support_lane.h"

/* A case: sides of both ends, and how it is sent. */
struct move_case {
	const char *name;
	struct lt_shape src, dst; /* ranks are set by the test */
	uint32_t n_senders, n_dests;
	uint64_t prefix, end, chunk, window, slot_bytes;
	bool raw;
	bool stages; /* each sender has layers of its own */
};

#define SHAPE(p, n, i, pages, l, r)                                                       \
	{                                                                                 \
		.page = p, .dcp_size = n, .interleave = i, .n_pages = pages, .layers = l, \
		.repl = r, .row_bytes = 576                                               \
	}

static const struct move_case cases[] = {
	{ "one to four", SHAPE(64, 1, 1, 32, 3, 0), SHAPE(64, 4, 1, 8, 3, 0), 1, 4, 0, 2048, 512, 0,
	  1 << 20, false, false },
	{ "ragged", SHAPE(64, 1, 1, 32, 2, 0), SHAPE(64, 4, 1, 8, 2, 0), 1, 4, 256, 1003, 200, 0,
	  1 << 20, false, false },
	{ "replicated too", SHAPE(16, 1, 1, 64, 2, 2), SHAPE(16, 4, 1, 16, 2, 2), 1, 4, 64, 777,
	  300, 0, 1 << 18, false, false },
	{ "two to four", SHAPE(64, 2, 1, 16, 2, 0), SHAPE(32, 4, 1, 16, 2, 0), 2, 4, 128, 1500, 700,
	  0, 1 << 20, false, false },
	{ "four to one", SHAPE(64, 4, 16, 8, 2, 0), SHAPE(16, 1, 1, 128, 2, 0), 4, 1, 0, 2000, 999,
	  0, 1 << 20, false, false },
	{ "tiny slots", SHAPE(64, 1, 1, 32, 3, 0), SHAPE(64, 2, 1, 16, 3, 0), 1, 2, 0, 2000, 2000,
	  0, 65536, false, false },
	{ "equal destinations", SHAPE(64, 1, 1, 32, 2, 0), SHAPE(64, 1, 1, 32, 2, 0), 1, 3, 0, 2000,
	  700, 0, 65536, false, false },
	{ "rank without rows", SHAPE(64, 1, 1, 4, 2, 0), SHAPE(64, 4, 1, 1, 2, 0), 1, 4, 0, 2, 2, 0,
	  1 << 20, false, false },
	{ "no tokens", SHAPE(64, 1, 1, 4, 2, 0), SHAPE(64, 4, 1, 1, 2, 0), 1, 4, 256, 256, 64, 0,
	  1 << 20, false, false },
	{ "unpacked", SHAPE(64, 1, 1, 16, 3, 1), SHAPE(64, 4, 1, 4, 3, 1), 1, 4, 0, 1000, 300, 0,
	  1 << 20, true, false },
	{ "stages", SHAPE(64, 1, 1, 32, 2, 0), SHAPE(64, 4, 1, 8, 4, 0), 2, 4, 256, 1900, 512, 0,
	  1 << 20, false, true },
};

static const struct move_case window_case = { "window",
					      SHAPE(64, 1, 1, 32, 4, 0),
					      SHAPE(64, 4, 1, 8, 4, 0),
					      1,
					      4,
					      256,
					      2000,
					      333,
					      512,
					      1 << 18,
					      false,
					      false };

struct scene {
	struct lt lt;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src[LT_SENDERS], dst[LT_DESTS];
	struct lt_room room;
	bool local;
};

static void scene_pools(struct scene *scene, const struct move_case *c, uint32_t groups)
{
	struct lt_room *room = &scene->room;

	for (uint32_t s = 0; s < c->n_senders; s++) {
		struct lt_shape shape = c->src;

		shape.groups = groups;
		shape.seed = s + 1;
		shape.dcp_rank = c->stages ? 0 : s % shape.dcp_size;
		shape.first_layer = c->stages ? s * shape.layers : 0;
		lt_pool_make(&scene->src[s], &scene->lt, scene->from, &shape);
		lt_pool_fill(&scene->src[s], room->room, 0, c->end);
		room->senders[s].pool = &scene->src[s];
	}
	for (uint32_t d = 0; d < c->n_dests; d++) {
		struct lt_shape shape = c->dst;

		shape.groups = groups;
		shape.seed = 100 + d;
		shape.dcp_rank = d % shape.dcp_size;
		lt_pool_make(&scene->dst[d], &scene->lt, scene->to, &shape);
		room->dests[d].pool = &scene->dst[d];
	}
}

static struct scene *scene_make(const struct move_case *c, bool local, uint32_t groups)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct kvp_lane_config config = {
		.slots = 16,
		.slot_bytes = c->slot_bytes,
		.pack = !c->raw,
		.net = local ? NULL : &kvp_net_ucx,
	};

	cr_assert(scene);
	scene->local = local;
	lt_begin(&scene->lt);
	scene->from = lt_lane(&scene->lt, &config);
	scene->to = local ? scene->from : lt_lane(&scene->lt, &config);
	if (!local)
		lt_pipe_make(&scene->lt, &scene->pipe, scene->from, scene->to, 7);
	scene->room = (struct lt_room){
		.lt = &scene->lt,
		.room = 42,
		.prefix = c->prefix,
		.end = c->end,
		.window = c->window,
		.n_senders = c->n_senders,
		.n_dests = c->n_dests,
		.meta_from = -1,
		.slot_bytes = c->slot_bytes,
		.pipe = local ? NULL : &scene->pipe,
	};
	scene_pools(scene, c, groups);
	return scene;
}

static void scene_end(struct scene *scene)
{
	for (uint32_t s = 0; s < scene->room.n_senders; s++)
		lt_pool_end(&scene->src[s]);
	for (uint32_t d = 0; d < scene->room.n_dests; d++)
		lt_pool_end(&scene->dst[d]);
	if (!scene->local)
		lt_pipe_end(&scene->lt, &scene->pipe);
	lt_end(&scene->lt);
	free(scene);
}

/* The status is published at the end of the turn in which a board was posted. */
static bool is_idle(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.pack_free == status.pack_slots && status.land_free == status.land_slots &&
	       status.pack_held == 0 && status.wants_queued == 0 && !status.has_work;
}

static void check_idle(struct lt *lt, struct kvp_lane *lane)
{
	lt_wait_until(lt, is_idle, lane, "slots to come back");
	cr_assert_eq(lt_status(lane).no_token, 0);
	cr_assert_eq(lt_status(lane).bad_messages, 0);
}

static void run_case(const struct move_case *c, bool local, uint32_t groups, bool sums)
{
	struct scene *scene = scene_make(c, local, groups);

	scene->room.sums = sums;

	lt_room_begin(&scene->room);
	for (uint32_t s = 0; s < c->n_senders; s++)
		lt_submit_all(&scene->room, s, c->chunk);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	lt_room_end(&scene->room);
	check_idle(&scene->lt, scene->from);
	check_idle(&scene->lt, scene->to);
	if (c->raw && !local && !(&lt_gpu && lt_gpu)) /* a GPU packs whatever it is told */
		cr_assert_gt(lt_status(scene->from).raw_rows, 0);
	scene_end(scene);
}

Test(lane, local)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++)
		run_case(&cases[i], true, 1, false);
}

Test(lane, landing)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++)
		run_case(&cases[i], false, 1, false);
}

/* Sums are for slots: where only direct writes may be, such a leg fails. */
Test(lane, with_sums)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++) {
		run_case(&cases[i], true, 1, true);
		if (!lt_direct())
			run_case(&cases[i], false, 1, true);
	}
	run_case(&window_case, true, 2, true);
	if (!lt_direct())
		run_case(&window_case, false, 2, true);
}

Test(lane, groups_and_windows)
{
	run_case(&window_case, true, 2, false);
	run_case(&window_case, false, 2, false);
}
