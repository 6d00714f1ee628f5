/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_direct.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fake_verbs.h"

static void make_pools(struct direct *direct, const struct direct_wish *wish)
{
	struct lt_shape shape = { .page = 64,
				  .dcp_size = wish->dcp_size ? wish->dcp_size : 1,
				  .interleave = 1,
				  .n_pages = 32,
				  .layers = 3,
				  .row_bytes = 576,
				  .seed = 1,
				  .uid = 1 };

	lt_pool_make(&direct->src, &direct->lt, direct->from, &shape);
	lt_pool_fill(&direct->src, 42, 0, DIRECT_TOKENS);
	shape.dcp_size = wish->dcp_size ? 1 : 2;
	shape.n_pages = wish->dcp_size ? 32 : 16;
	shape.seed = 2;
	shape.memory = wish->memory;
	shape.dmabuf = wish->dmabuf;
	lt_pool_make(&direct->dst, &direct->lt, direct->to, &shape);
}

struct direct *direct_make(const struct direct_wish *wish)
{
	struct direct *direct = lt_alloc(1, sizeof(*direct));
	struct kvp_lane_config config = {
		.slots = 8,
		.slot_bytes = 65536,
		.pack = !wish->raw,
		.net = &kvp_net_verbs,
		.mode = wish->from,
		.memory = wish->rings,
		.flush = wish->flush,
		.direct_run_bytes = wish->run_bytes,
	};

	lt_begin(&direct->lt);
	direct->from = lt_lane(&direct->lt, &config);
	config.mode = wish->to;
	config.pack = true;
	direct->to = lt_lane(&direct->lt, &config);
	lt_pipe_make(&direct->lt, &direct->pipe, direct->from, direct->to, 7);
	make_pools(direct, wish);
	direct->room = (struct lt_room){
		.lt = &direct->lt,
		.room = 42,
		.end = DIRECT_TOKENS,
		.n_senders = 1,
		.n_dests = 1,
		.meta_from = -1,
		.slot_bytes = config.slot_bytes,
		.sums = wish->sums,
		.pipe = &direct->pipe,
	};
	direct->room.senders[0].pool = &direct->src;
	direct->room.dests[0].pool = &direct->dst;
	return direct;
}

/* What is shown follows at the end of the turn. */
static bool all_is_back(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.windows == 0 && status.regions == 0 && status.region_bytes == 0 &&
	       status.regions_dmabuf == 0 && status.regions_vmm == 0 && status.imports == 0;
}

void direct_end(struct direct *direct, bool piped)
{
	lt_pool_end(&direct->src);
	lt_pool_end(&direct->dst);
	lt_wait_until(&direct->lt, all_is_back, direct->to, "windows and regions to be given back");
	if (piped)
		lt_pipe_end(&direct->lt, &direct->pipe);
	lt_end(&direct->lt);
	LT_REQUIRE(kvp_fake.n_mws + kvp_fake.n_mrs + kvp_fake.n_qps + kvp_fake.n_cqs +
				   kvp_fake.n_pds ==
			   0,
		   "%u windows, %u regions, %u queue pairs, %u queues, %u domains are left",
		   kvp_fake.n_mws, kvp_fake.n_mrs, kvp_fake.n_qps, kvp_fake.n_cqs, kvp_fake.n_pds);
	free(direct);
}

void direct_transfer(struct direct *direct, bool held)
{
	if (held)
		lt_hold(direct->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&direct->room);
	lt_submit_all(&direct->room, 0, DIRECT_CHUNK);
	if (held) {
		lt_wait_held(&direct->lt, direct->to, KVP_HOLD_GRANT, 3);
		lt_hold(direct->to, KVP_HOLD_GRANT, false);
	}
	lt_room_complete(&direct->room);
	lt_room_check(&direct->room);
}

void direct_landed(const struct direct *direct, enum kvp_why why)
{
	const struct kvp_board *board = &direct->room.dests[0].board;
	struct kvp_lane_status to = lt_status(direct->to);

	LT_REQUIRE(to.pieces_direct == 0);
	LT_REQUIRE(to.fell_back[why] == to.pieces_landed, "%s: %llu", kvp_why_name(why),
		   (unsigned long long)to.fell_back[why]);
	LT_REQUIRE(atomic_load(&board->moved) == KVP_MOVED_LANDING);
	LT_REQUIRE(atomic_load(&board->fell_back) == why);
}

void direct_fails(struct direct *direct, Kvp__Status status, const char *text)
{
	struct kvp_board *board = &direct->room.dests[0].board;

	lt_room_begin(&direct->room);
	lt_submit_all(&direct->room, 0, DIRECT_CHUNK);
	lt_wait(&direct->lt, board, KVP_BOARD_FAILED | KVP_BOARD_COMPLETE);
	LT_REQUIRE(board->status == status && strstr(board->text, text), "status %u: %s",
		   board->status, board->text);
	lt_room_end(&direct->room);
}

static bool writes_wait(void *arg)
{
	(void)arg;
	return kvp_fake_held() > 0;
}

void direct_wait_writes(struct direct *direct)
{
	lt_wait_until(&direct->lt, writes_wait, NULL, "writes at the device");
}
