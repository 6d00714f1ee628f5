/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_end.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "proto/util.h"

/* ---- steps ----------------------------------------------------------------------------------- */

void end_make(struct end *end, const struct end_plan *plan)
{
	const uint32_t n_ranks = plan->n_ranks ? plan->n_ranks : 1, n_pages = END_PAGES / n_ranks;
	const uint64_t salt = plan->n_ranks ? 2 + plan->rank : 1;

	memset(end, 0, sizeof(*end));
	end->plan = *plan;
	end->client = rig_client(plan->daemon, "engine");
	if (plan->kind != DEVICE_NONE)
		device_use(plan->gpu);
	for (uint32_t i = 0; i < END_LAYERS; i++)
		(void)rig_pool_entry(&end->pool, i, END_ROW, END_PAGE, n_pages);
	device_pool_allocate(&end->pool, "engine", salt, plan->kind);
	device_pool_register(&end->pool, end->client, "engine");
	rig_pages(end->pages, n_pages - 1, 1, n_pages, salt);
	end->side = (struct kvp_side_desc){
		.page = END_PAGE,
		.dcp_size = n_ranks,
		.dcp_rank = plan->rank,
		.interleave = 1,
		.n_pages = (uint32_t)KVP_DIV_UP(plan->tokens, (uint64_t)END_PAGE * n_ranks),
	};
	end->side.pages = end->pages;
}

void end_close(struct end *end)
{
	kvp_client_close(end->client);
	device_pool_free(&end->pool);
}

void end_open(struct end *end)
{
	struct kvp_side_desc side = end->side;
	struct kvp_open open = KVP_OPEN_INIT;

	side.pages = NULL;
	side.n_pages = 0;
	open.room = end->plan.room;
	open.pool = end->pool.id;
	open.sides = &side;
	open.n_sides = 1;
	RIG_CALL(end->client, kvp_open(end->client, &open, NULL, NULL, &end->id));
}

void end_expect(struct end *end)
{
	const struct rig_daemon *prefill = end->plan.prefill;
	struct kvp_expect_sender sender = { .n_dests = end->plan.n_ranks, .role = KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;

	sender.address = (prefill ? prefill : end->plan.daemon)->address;
	expect.room = end->plan.room;
	expect.dest = end->plan.rank;
	expect.pool = end->pool.id;
	expect.sides = &end->side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = end->plan.tokens;
	RIG_CALL(end->client, kvp_expect(end->client, &expect, NULL, NULL, &end->id));
}

void end_write(struct end *end, uint64_t from, uint64_t to)
{
	const struct rig_key key = { end->plan.room, 0 };

	rig_put_rows(end->pool.mem, &end->pool, &end->side, from, to, &key);
	device_pool_push(&end->pool);
}

void end_submit(struct end *end, uint64_t from, uint64_t tokens, struct kvp_fence *fence,
		uint64_t value)
{
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	chunk.sides = &end->side;
	chunk.n_sides = 1;
	chunk.start = from;
	chunk.tokens = tokens;
	chunk.last = from + tokens == end->plan.tokens;
	chunk.fence = fence;
	chunk.fence_value = value;
	RIG_CALL(end->client, kvp_submit(end->client, end->id, &chunk, NULL, NULL, NULL));
}

void end_await(struct end *end)
{
	struct kvp_room_state state = rig_await(end->client, end->id, KVP_WAIT_RELEASED, END_SECS);

	RIG_REQUIRE(!state.complete == end->plan.bereaved, "%s: %s", kvp_status_name(state.status),
		    state.reason);
}

void end_check(struct end *end, uint64_t to)
{
	const struct rig_key key = { end->plan.room, 0 };
	uint8_t *image = rig_pool_image(&end->pool);

	rig_put_rows(image, &end->pool, &end->side, 0, to, &key);
	device_pool_pull(&end->pool);
	rig_pool_check(&end->pool, image, "decode");
	free(image);
}

/* ---- lives ----------------------------------------------------------------------------------- */

void end_prefill(void *plan)
{
	struct end end;

	end_make(&end, plan);
	end_open(&end);
	end_write(&end, 0, end.plan.tokens);
	end_submit(&end, 0, end.plan.tokens, NULL, 0);
	end_await(&end);
	end_close(&end);
}

void end_decode(void *plan)
{
	struct end end;

	end_make(&end, plan);
	end_expect(&end);
	end_await(&end);
	if (!end.plan.bereaved)
		end_check(&end, end.plan.tokens);
	end_close(&end);
}

/* ---- what the daemon says -------------------------------------------------------------------- */

double end_lanes(const struct rig_daemon *daemon, const char *part, const char *name)
{
	cJSON *root = rig_ask(daemon, "lanes", NULL);
	const cJSON *lane, *item;
	bool found = false;
	double n = 0;

	cJSON_ArrayForEach (lane, cJSON_GetObjectItemCaseSensitive(root, "lanes")) {
		if (!cJSON_GetObjectItemCaseSensitive(lane, "gpu"))
			continue;
		item = part ? cJSON_GetObjectItemCaseSensitive(lane, part) : lane;
		item = cJSON_GetObjectItemCaseSensitive(item, name);
		if (cJSON_IsNumber(item)) {
			found = true;
			n += item->valuedouble;
		}
	}
	cJSON_Delete(root);
	return found ? n : -1;
}

void end_unmapped(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + END_SECS * UINT64_C(1000000000);

	while (end_lanes(daemon, "gpu", "imports") != 0) {
		RIG_REQUIRE(rig_now_ns() < until, "memory of clients stays mapped");
		rig_sleep_ms(2);
	}
}
