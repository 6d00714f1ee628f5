/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sums and pools on a GPU, which can have none: who must have them is refused with the reason at
 * both ends, whichever end asks and inside one daemon too; who would like them gets the rows, and
 * that there were no sums is counted. Without a GPU on the driver that is none.
 *
 * usage: replay_gpu_sums [SCENARIO ...]
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_device.h"

#define PAGE 64u
#define PAGES 8u
#define ROW 576u
#define TOKENS (4 * PAGE)
#define ROOM 9u
#define SECS 15

struct end {
	struct kvp_client *client;
	struct rig_pool pool;
	uint32_t pages[PAGES];
	struct kvp_side_desc side;
	kvp_room_id id;
};

/* What a daemon is configured with; NULL: nothing of sums. */
static struct rig_daemon *daemon_with(struct rig *rig, const char *name, const char *sums)
{
	char extra[256];

	snprintf(extra, sizeof(extra), "[gpu]\ndevices = all\nslots = 2\nslot_bytes = 1M\n%s%s\n",
		 sums ? "[data]\nchecksum = " : "", sums ? sums : "");
	return rig_daemon_start(rig, name, extra);
}

static void end_make(struct end *end, const struct rig_daemon *daemon, uint64_t salt)
{
	memset(end, 0, sizeof(*end));
	end->client = rig_client(daemon, "engine");
	(void)rig_pool_entry(&end->pool, 0, ROW, PAGE, PAGES);
	device_open();
	device_pool_allocate(&end->pool, "engine", salt, DEVICE_IPC);
	device_pool_register(&end->pool, end->client, "engine");
	rig_pages(end->pages, PAGES - 1, 1, PAGES, salt);
	end->side = (struct kvp_side_desc){
		.page = PAGE, .dcp_size = 1, .interleave = 1, .n_pages = TOKENS / PAGE
	};
	end->side.pages = end->pages;
}

static void end_close(struct end *end)
{
	kvp_client_close(end->client);
	device_pool_free(&end->pool);
}

static void ends_begin(struct end *from, struct end *to, const struct rig_daemon *prefill)
{
	struct kvp_expect_sender sender = { prefill->address, 0, 1, KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_open open = KVP_OPEN_INIT;
	struct kvp_side_desc side = from->side;

	side.pages = NULL;
	side.n_pages = 0;
	open.room = expect.room = ROOM;
	open.pool = from->pool.id;
	open.sides = &side;
	open.n_sides = 1;
	RIG_CALL(from->client, kvp_open(from->client, &open, NULL, NULL, &from->id));
	expect.pool = to->pool.id;
	expect.sides = &to->side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	RIG_CALL(to->client, kvp_expect(to->client, &expect, NULL, NULL, &to->id));
}

static void end_submit(struct end *from)
{
	const struct rig_key key = { ROOM, 0 };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;

	rig_put_rows(from->pool.mem, &from->pool, &from->side, 0, TOKENS, &key);
	device_pool_push(&from->pool);
	chunk.sides = &from->side;
	chunk.n_sides = 1;
	chunk.tokens = TOKENS;
	chunk.last = 1;
	RIG_CALL(from->client, kvp_submit(from->client, from->id, &chunk, NULL, NULL, NULL));
}

static void end_check(struct end *to, bool rows)
{
	const struct rig_key key = { ROOM, 0 };
	uint8_t *image = rig_pool_image(&to->pool);

	if (rows)
		rig_put_rows(image, &to->pool, &to->side, 0, TOKENS, &key);
	device_pool_pull(&to->pool);
	rig_pool_check(&to->pool, image, "decode");
	free(image);
}

static void refused(struct end *end)
{
	struct kvp_room_state state = rig_await(end->client, end->id, KVP_WAIT_RELEASED, SECS);

	RIG_REQUIRE(state.failed && !state.complete && state.status == KVP_STATUS_UNSUPPORTED &&
			    !state.retry && strstr(state.reason, "data.checksum is required") &&
			    strstr(state.reason, "GPU"),
		    "%s: %s", kvp_status_name(state.status), state.reason);
}

/* One room that may not move without sums: not a byte of it does. */
static void must_fail(const struct rig_daemon *prefill, const struct rig_daemon *decode)
{
	struct end from, to;

	end_make(&from, prefill, 1);
	end_make(&to, decode, 2);
	ends_begin(&from, &to, prefill);
	refused(&from);
	refused(&to);
	end_check(&to, false);
	end_close(&from);
	end_close(&to);
}

static void required_by_decode(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", NULL);

	must_fail(prefill, daemon_with(rig, "decode", "required"));
}

static void required_by_prefill(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "required");

	must_fail(prefill, daemon_with(rig, "decode", NULL));
}

static void required_by_one_asked_by_other(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "on");

	must_fail(prefill, daemon_with(rig, "decode", "required"));
}

static void required_inside_one_daemon(struct rig *rig)
{
	const struct rig_daemon *node = daemon_with(rig, "node", "required");

	must_fail(node, node);
}

static void counted(const struct rig_daemon *daemon)
{
	struct kvp_client *client = rig_client(daemon, "probe");
	char *json;

	RIG_CALL(client, kvp_inspect(client, "status", NULL, &json));
	RIG_REQUIRE(strstr(json, "\"unchecked_gpu\""), "%s", json);
	free(json);
	kvp_client_close(client);
}

static void asked_is_counted(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "on");
	const struct rig_daemon *decode = daemon_with(rig, "decode", NULL);
	struct end from, to;

	end_make(&from, prefill, 1);
	end_make(&to, decode, 2);
	ends_begin(&from, &to, prefill);
	end_submit(&from);
	RIG_REQUIRE(rig_await(to.client, to.id, KVP_WAIT_RELEASED, SECS).complete);
	RIG_REQUIRE(rig_await(from.client, from.id, KVP_WAIT_RELEASED, SECS).complete);
	end_check(&to, true);
	counted(prefill);
	end_close(&from);
	end_close(&to);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "required_by_decode", required_by_decode },
		{ "required_by_prefill", required_by_prefill },
		{ "required_by_one_asked_by_other", required_by_one_asked_by_other },
		{ "required_inside_one_daemon", required_inside_one_daemon },
		{ "asked_is_counted", asked_is_counted },
	};

	if (!device_or_fake(argv))
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
