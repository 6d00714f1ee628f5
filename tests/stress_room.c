/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Many rooms at once on one node, ended in every way at any time: what completes has the right
 * bytes, everything becomes quiet, nothing stays held. Under TSan it looks at what loop and lane
 * share.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_room.h"

#define ROOMS 24u /* at once: a page range of the destination each */
#define PAGES 8u  /* of a room */
#define TOKENS (PAGES * 8u)
#define TOTAL 3000u /* rooms in all */

#define REQUIRE(cond)                                                                    \
	do {                                                                             \
		if (!(cond)) {                                                           \
			(void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
			abort();                                                         \
		}                                                                        \
	} while (0)

struct game {
	uint64_t room;
	uint32_t pages[PAGES];
	bool live, expected, opened;
	uint32_t seq;
	uint64_t at;   /* submitted up to here */
	unsigned fate; /* 0 .. 5: aborted by one of the ends when that many steps are over */
	unsigned steps;
};

static struct sr_node node;
static struct sr_pool src, dst;
static struct game games[ROOMS];
static uint32_t src_pages[PAGES];
static unsigned n_begun, n_complete, n_failed;

static uint64_t handle_of(unsigned i, bool dest)
{
	return 1 + 2 * i + dest;
}

static void begin(unsigned i)
{
	struct game *game = &games[i];
	uint32_t pages[PAGES];

	memcpy(pages, game->pages, sizeof(pages));
	*game = (struct game){ .room = 1 + n_begun % 64,
			       .live = true,
			       .fate = (unsigned)rand() % 40 };
	memcpy(game->pages, pages, sizeof(pages));
	/* The number is unique among the live ones, and used again soon. */
	game->room = game->room * ROOMS + i;
	memset(&node.ends[handle_of(i, true)], 0, sizeof(node.ends[0]));
	memset(&node.ends[handle_of(i, false)], 0, sizeof(node.ends[0]));
	n_begun++;
}

static void do_expect(struct game *game, unsigned i)
{
	struct sr_expect expect = { .handle = handle_of(i, true),
				    .room = game->room,
				    .pages = game->pages,
				    .n_pages = PAGES,
				    .end = TOKENS,
				    .n_senders = 1 };

	expect.senders[0].address = kvp_peers_address(node.peers);
	REQUIRE(sr_expect(&node, &dst, &expect) == KVP__STATUS__STATUS_OK);
	game->expected = true;
}

static void do_open(struct game *game, unsigned i)
{
	struct sr_open open = { .handle = handle_of(i, false), .room = game->room };

	REQUIRE(sr_open(&node, &src, &open) == KVP__STATUS__STATUS_OK);
	game->opened = true;
}

static void do_submit(struct game *game, unsigned i)
{
	uint64_t tokens = 1 + (uint64_t)rand() % (TOKENS - game->at);
	struct sr_chunk chunk = { .handle = handle_of(i, false),
				  .seq = game->seq,
				  .start = game->at,
				  .tokens = tokens,
				  .pages = src_pages,
				  .n_pages = PAGES,
				  .last = game->at + tokens == TOKENS };

	if (sr_submit(&node, &chunk) != KVP__STATUS__STATUS_OK)
		return; /* it has failed meanwhile */
	game->seq++;
	game->at += tokens;
}

static bool over(const struct game *game, unsigned i)
{
	return (!game->expected || node.ends[handle_of(i, true)].released) &&
	       (!game->opened || node.ends[handle_of(i, false)].released);
}

static void end(struct game *game, unsigned i)
{
	const struct sr_end *to = &node.ends[handle_of(i, true)];

	if (to->complete) {
		sr_pool_check(&dst, game->pages, 0, 0, TOKENS);
		n_complete++;
	} else {
		n_failed++;
	}
	game->live = false;
}

/* An end that stayed alone waits for its other half; here it is told that none comes. */
static void abort_rest(const struct game *game, unsigned i)
{
	for (unsigned dest = 0; dest < 2; dest++)
		if (dest ? game->expected : game->opened)
			(void)sr_abort(&node, handle_of(i, dest));
}

static void step(struct game *game, unsigned i)
{
	bool dead = node.ends[handle_of(i, true)].failed || node.ends[handle_of(i, false)].failed;

	if ((game->expected || game->opened) && over(game, i)) {
		end(game, i);
		return;
	}
	if (dead) {
		abort_rest(game, i);
		return;
	}
	if (game->steps++ == game->fate && game->expected + game->opened > 0) {
		(void)sr_abort(&node,
			       handle_of(i, game->expected && (!game->opened || rand() % 2)));
		return;
	}
	switch (rand() % 3) {
	case 0:
		if (!game->expected)
			do_expect(game, i);
		break;
	case 1:
		if (!game->opened)
			do_open(game, i);
		break;
	default:
		if (game->opened && game->at < TOKENS)
			do_submit(game, i);
		break;
	}
}

static void play(void)
{
	bool any = true;

	while (any) {
		any = false;
		for (unsigned i = 0; i < ROOMS; i++) {
			if (!games[i].live && n_begun < TOTAL)
				begin(i);
			if (!games[i].live)
				continue;
			any = true;
			step(&games[i], i);
		}
		sr_step(&node, NULL);
	}
}

int main(void)
{
	const struct sr_shape from = {
		.page = 8, .dcp_size = 1, .n_pages = PAGES, .layers = 2, .row_bytes = 64
	};
	const struct sr_shape to = {
		.page = 8, .dcp_size = 1, .n_pages = PAGES * ROOMS, .layers = 2, .row_bytes = 64
	};
	uv_loop_t loop;

	srand(7);
	kvp_log_setup(2, KVP_LOG_ERR);
	(void)uv_loop_init(&loop);
	sr_init(&node, &loop, 1);
	sr_start(&node, NULL);
	sr_pool_make(&src, &node, &from);
	sr_pool_make(&dst, &node, &to);
	for (uint32_t p = 0; p < PAGES; p++)
		src_pages[p] = (p * 3 + 1) % PAGES;
	for (uint32_t p = 0; p < PAGES * ROOMS; p++)
		games[p % ROOMS].pages[p / ROOMS] = p;
	sr_pool_fill(&src, src_pages, 0, 0, TOKENS);
	play();
	REQUIRE(dst.pool->pages_held == 0);
	REQUIRE(dst.pool->n_users + src.pool->n_users == 0);
	REQUIRE(node.owner.n_rooms == 0);
	sr_stop(&node);
	(void)uv_run(&loop, UV_RUN_NOWAIT);
	REQUIRE(uv_loop_close(&loop) == 0);
	sr_pool_free(&src);
	sr_pool_free(&dst);
	(void)printf("%u rooms, %u complete, %u failed\n", n_begun, n_complete, n_failed);
	REQUIRE(n_complete > 0 && n_failed > 0);
	return 0;
}
