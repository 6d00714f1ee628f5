/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What is wrong with rooms, through the library, against real daemons: each is refused with a
 * status and a text that names field, value and limit, or fails the room at both ends; nothing is
 * lost: the same clients then make a transfer of which every byte is checked.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <criterion/criterion.h>

#include "tests/support.h"
#include "tests/support_faults.h"

#define BLOB 4096u
#define PEERS "[peer]\nlisten = 127.0.0.1:0\n"

/* A daemon of the one kind, as the other kind's helpers see it. */
struct served {
	struct support_daemon daemon;
	struct rig_daemon view;
};

static void serve(struct served *served, const char *name, const char *extra)
{
	struct kvp_client *client;

	support_daemon_start(&served->daemon, extra);
	memset(&served->view, 0, sizeof(served->view));
	snprintf(served->view.name, sizeof(served->view.name), "%s", name);
	snprintf(served->view.socket, sizeof(served->view.socket), "%s", served->daemon.socket);
	served->view.pid = served->daemon.pid;
	client = rig_client(&served->view, "probe");
	snprintf(served->view.address, sizeof(served->view.address), "%s",
		 kvp_node_address(client));
	kvp_client_close(client);
}

static void refused(const struct kvp_client *client, int rc, enum kvp_status status,
		    const char *const *says, const char *what)
{
	const char *text = kvp_last_error(client);

	cr_assert_lt(rc, 0, "%s: taken", what);
	cr_assert_eq(kvp_last_status(client), status, "%s: %s: %s", what,
		     kvp_status_name(kvp_last_status(client)), text);
	for (; *says; says++)
		cr_assert(strstr(text, *says), "%s: \"%s\" does not say \"%s\"", what, text, *says);
}

/* ---- expect --------------------------------------------------------------------------------- */

static struct kvp_side_desc *side_of(struct kvp_expect *expect)
{
	return (struct kvp_side_desc *)expect->sides;
}

static uint32_t *pages_of(struct kvp_expect *expect)
{
	return (uint32_t *)expect->sides[0].pages;
}

static struct kvp_segment *segment_of(struct kvp_expect *expect)
{
	return (struct kvp_segment *)expect->segments;
}

static struct kvp_expect_sender *sender_of(struct kvp_expect *expect)
{
	return (struct kvp_expect_sender *)expect->senders;
}

static const struct kvp_segment same_twice[] = { { 3, 2, 0, BLOB }, { 3, 2, 0, BLOB } };

#define EXPECT(name, statement)                              \
	static void expect_##name(struct kvp_expect *expect) \
	{                                                    \
		statement;                                   \
	}

EXPECT(page_outside, pages_of(expect)[3] = 32)
EXPECT(page_twice, pages_of(expect)[5] = pages_of(expect)[2])
EXPECT(too_few, side_of(expect)->n_pages = 7)
EXPECT(prefix_odd, expect->prefix = 48)
EXPECT(prefix_late, expect->prefix = 288)
EXPECT(pos0_odd, side_of(expect)->pos0 = 16)
EXPECT(pos0_late, side_of(expect)->pos0 = 32)
EXPECT(rank, side_of(expect)->dcp_rank = 2)
EXPECT(interleave, side_of(expect)->interleave = 3)
EXPECT(page_zero, side_of(expect)->page = 0)
EXPECT(page_other, side_of(expect)->page = 32)
EXPECT(group, side_of(expect)->group = 5)
EXPECT(no_side, expect->n_sides = 0)
EXPECT(dest, expect->dest = 64)
EXPECT(end_huge, expect->end = UINT64_C(1) << 50)
EXPECT(no_sender, expect->n_senders = 0)
EXPECT(sender, sender_of(expect)->sender = 64)
EXPECT(n_dests, sender_of(expect)->n_dests = 65)
EXPECT(only_none, (sender_of(expect)->role = KVP_ROLE_NONE, expect->meta_from = -1))
EXPECT(address, sender_of(expect)->address = "nowhere")
EXPECT(far_address, sender_of(expect)->address = "192.0.2.1:7470")
EXPECT(pool, expect->pool = 99)
EXPECT(segment_long, segment_of(expect)->bytes = BLOB + 1)
EXPECT(segment_empty, segment_of(expect)->bytes = 0)
EXPECT(segment_entry, segment_of(expect)->entry = 0)
EXPECT(segment_nowhere, segment_of(expect)->entry = 9)
EXPECT(segment_twice, (expect->segments = same_twice, expect->n_segments = 2))
EXPECT(meta_from, expect->meta_from = 5)

struct expect_case {
	const char *name;
	void (*change)(struct kvp_expect *expect);
	enum kvp_status status;
	const char *says[4];
};

#define CASE(name, status, ...)                            \
	{                                                  \
#name, expect_##name, KVP_STATUS_##status, \
		{                                          \
			__VA_ARGS__                        \
		}                                          \
	}

static const struct expect_case expect_cases[] = {
	CASE(page_outside, DST_RANGE, "page 32", "0 to 31"),
	CASE(page_twice, PAGE_HELD, "twice"),
	CASE(too_few, DST_RANGE, "7 given", "8 needed"),
	CASE(prefix_odd, ALIGNMENT, "expect.prefix is 48", "page 16 x dcp_size 2"),
	CASE(prefix_late, INVALID, "prefix", "288", "256"),
	CASE(pos0_odd, ALIGNMENT, "pos0", "16", "page 16 x dcp_size 2"),
	CASE(pos0_late, DST_RANGE, "pos0", "32", "from 0"),
	CASE(rank, GEOMETRY, "dcp_rank is 2", "dcp_size 2"),
	CASE(interleave, GEOMETRY, "interleave is 3", "page 16"),
	CASE(page_zero, GEOMETRY, "page is 0", "1 to"),
	CASE(page_other, GEOMETRY, "rows_per_page 16", "32"),
	CASE(group, INVALID, "group 5", "no rows"),
	CASE(no_side, GEOMETRY, "none for group 0"),
	CASE(dest, INVALID, "dest is 64", "0 to 63"),
	CASE(end_huge, INVALID, "end is 1125899906842624"),
	CASE(no_sender, INVALID, "senders", "has 0", "1 to 64"),
	CASE(sender, INVALID, "sender is 64", "0 to 63"),
	CASE(n_dests, INVALID, "n_dests is 65", "1 to 64"),
	CASE(only_none, INVALID, "senders", "none with data"),
	CASE(address, INVALID, "nowhere"),
	CASE(far_address, DENIED, "192.0.2.1", "loopback"),
	CASE(pool, NOT_FOUND, "pool is 99"),
	CASE(segment_long, DST_RANGE, "segments: 3", "4097", "4096"),
	CASE(segment_empty, INVALID, "bytes is 0"),
	CASE(segment_entry, INVALID, "segments: 3", "entry 0", "no blob"),
	CASE(segment_nowhere, INVALID, "segments: 3", "entry 9"),
	CASE(segment_twice, INVALID, "segments.id", "3", "twice"),
	CASE(meta_from, INVALID, "meta_from", "5"),
};

Test(refusals, expectations)
{
	struct served served;
	struct fault_room room;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 31, &served.view, &served.view);
	fault_connect_both(&room);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(expect_cases); i++) {
		const struct expect_case *c = &expect_cases[i];

		room.on_expect = c->change;
		refused(room.dst.client, fault_try_expect(&room), c->status, c->says, c->name);
		room.on_expect = NULL;
		if (i % 4 == 0) {
			fault_transfer(&room);
			fault_reset(&room);
		}
	}
	fault_transfer(&room);
	fault_idle(&served.view);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* What is wrong only because of another room. */
Test(refusals, expectations_beside_others)
{
	static const char *const held[] = { "page", "held by room 0x21 destination 0", NULL };
	static const char *const second[] = { "room 0x21", "live destination 0", NULL };
	static const char *const opened[] = { "room 0x21", "live sender 0", NULL };
	static const char *const pool[] = { "pool is", "this client has none", NULL };
	struct served served;
	struct fault_room room, again;
	struct kvp_client *stranger;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 0x21, &served.view, &served.view);
	fault_connect_both(&room);
	fault_expect(&room);
	fault_open(&room);

	again = room;
	again.id = 0x22;
	refused(room.dst.client, fault_try_expect(&again), KVP_STATUS_PAGE_HELD, held, "held");
	again.id = 0x21;
	refused(room.dst.client, fault_try_expect(&again), KVP_STATUS_EXISTS, second, "second");
	refused(room.src.client, fault_try_open(&again), KVP_STATUS_EXISTS, opened, "opened");

	stranger = rig_client(&served.view, "stranger");
	again.id = 0x23;
	again.dst.client = again.src.client = stranger;
	refused(stranger, fault_try_expect(&again), KVP_STATUS_NOT_FOUND, pool, "pool");
	refused(stranger, fault_try_open(&again), KVP_STATUS_NOT_FOUND, pool, "pool");
	kvp_client_close(stranger);

	fault_submit(&room, FAULT_FIRST);
	fault_submit(&room, FAULT_REST);
	fault_completes(&room);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* ---- open and submit ------------------------------------------------------------------------- */

static void open_sender(struct kvp_open *open)
{
	open->sender = 64;
}

static void open_mask(struct kvp_open *open)
{
	static const uint8_t mask[] = { 0x0f };

	open->entry_mask = mask;
	open->mask_bytes = 1;
}

static void open_side(struct kvp_open *open)
{
	((struct kvp_side_desc *)open->sides)->interleave = 5;
}

static void open_pool(struct kvp_open *open)
{
	open->pool = 99;
}

Test(refusals, opens)
{
	static const struct {
		const char *name;
		void (*change)(struct kvp_open *open);
		enum kvp_status status;
		const char *says[4];
	} cases[] = {
		{ "sender", open_sender, KVP_STATUS_INVALID, { "sender is 64", "0 to 63" } },
		{ "mask", open_mask, KVP_STATUS_INVALID, { "entry_mask", "3" } },
		{ "side", open_side, KVP_STATUS_GEOMETRY, { "interleave is 5", "page 16" } },
		{ "pool", open_pool, KVP_STATUS_NOT_FOUND, { "pool is 99" } },
	};
	struct served served;
	struct fault_room room;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 41, &served.view, &served.view);
	fault_connect_both(&room);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++) {
		room.on_open = cases[i].change;
		refused(room.src.client, fault_try_open(&room), cases[i].status, cases[i].says,
			cases[i].name);
		room.on_open = NULL;
		fault_transfer(&room);
		fault_reset(&room);
	}
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

static struct kvp_side_desc *chunk_side(struct kvp_chunk *chunk)
{
	return (struct kvp_side_desc *)chunk->sides;
}

static struct kvp_segment *chunk_segment(struct kvp_chunk *chunk)
{
	return (struct kvp_segment *)chunk->segments;
}

#define CHUNK(name, statement)                            \
	static void chunk_##name(struct kvp_chunk *chunk) \
	{                                                 \
		statement;                                \
	}

static const uint8_t foreign_set[] = { 0x80 };

CHUNK(gap, chunk->start += 16)
CHUNK(overlap, (chunk->start -= 16, chunk_side(chunk)->pos0 -= 16, chunk_side(chunk)->n_pages += 1))
CHUNK(again, (chunk->start = 0, chunk_side(chunk)->pos0 = 0))
CHUNK(past_end, chunk->tokens += 16)
CHUNK(early_last, (chunk->tokens -= 16))
CHUNK(page, ((uint32_t *)chunk->sides[0].pages)[2] = 32)
CHUNK(too_few, chunk_side(chunk)->n_pages = 3)
CHUNK(pos0, chunk_side(chunk)->pos0 += 1)
CHUNK(group, chunk_side(chunk)->group = 3)
CHUNK(no_side, chunk->n_sides = 0)
CHUNK(set, (chunk->entry_set = foreign_set, chunk->set_bytes = 1))
CHUNK(meta, chunk->last = 0)
CHUNK(segment_size, chunk_segment(chunk)->bytes = 100)
CHUNK(segment_id, chunk_segment(chunk)->id = 4)
CHUNK(segment_entry, chunk_segment(chunk)->entry = 1)
CHUNK(segment_past, chunk_segment(chunk)->offset = 1)
CHUNK(segment_twice, (chunk->segments = same_twice, chunk->n_segments = 2))

#define CHUNK_CASE(name, status, ...)                     \
	{                                                 \
#name, chunk_##name, KVP_STATUS_##status, \
		{                                         \
			__VA_ARGS__                       \
		}                                         \
	}

/* Each on the second chunk of a room that is ready. */
static const struct {
	const char *name;
	void (*change)(struct kvp_chunk *chunk);
	enum kvp_status status;
	const char *says[4];
} chunk_cases[] = {
	CHUNK_CASE(gap, ORDER, "start is 144", "128"),
	CHUNK_CASE(overlap, ORDER, "start is 112", "128"),
	CHUNK_CASE(again, ORDER, "start is 0", "128"),
	CHUNK_CASE(past_end, ORDER, "272", "256"),
	CHUNK_CASE(early_last, ORDER, "last", "240", "256"),
	CHUNK_CASE(page, SRC_RANGE, "page 32", "0 to 31"),
	CHUNK_CASE(too_few, SRC_RANGE, "3 given", "8 needed"),
	CHUNK_CASE(pos0, ALIGNMENT, "pos0", "129", "page 16"),
	CHUNK_CASE(group, INVALID, "group 3"),
	CHUNK_CASE(no_side, INVALID, "none for group 0"),
	CHUNK_CASE(set, INVALID, "entry_set", "entry 7"),
	CHUNK_CASE(meta, INVALID, "meta", "last"),
	CHUNK_CASE(segment_size, MISMATCH, "segments: 3", "100", "4096"),
	CHUNK_CASE(segment_id, MISMATCH, "segments: 4", "no destination"),
	CHUNK_CASE(segment_entry, INVALID, "segments: 3", "entry 1", "no blob"),
	CHUNK_CASE(segment_past, SRC_RANGE, "segments: 3", "4097", "4096"),
	CHUNK_CASE(segment_twice, INVALID, "3", "twice"),
};

static void last_twice(struct kvp_chunk *chunk)
{
	chunk->start = FAULT_TOKENS;
	chunk->tokens = 0;
	chunk->n_segments = 0;
}

Test(refusals, chunks)
{
	static const char *const last[] = { "was the last", NULL };
	static const char *const unknown[] = { "room 999", NULL };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct served served;
	struct fault_room room;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 51, &served.view, &served.view);
	fault_connect_both(&room);
	fault_expect(&room);
	fault_open(&room);
	(void)rig_await(room.src.client, room.src.room, KVP_WAIT_READY, FAULT_SECS);
	refused(room.src.client, kvp_submit(room.src.client, 999, &chunk, NULL, NULL, NULL),
		KVP_STATUS_NOT_FOUND, unknown, "unknown room");
	fault_submit(&room, FAULT_FIRST);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(chunk_cases); i++) {
		room.on_chunk = chunk_cases[i].change;
		refused(room.src.client, fault_try_submit(&room, FAULT_REST), chunk_cases[i].status,
			chunk_cases[i].says, chunk_cases[i].name);
	}
	room.on_chunk = NULL;
	fault_submit(&room, FAULT_REST);
	room.on_chunk = last_twice;
	cr_assert_lt(fault_try_submit(&room, FAULT_REST), 0);
	room.on_chunk = NULL;
	fault_completes(&room);
	fault_reset(&room);

	/* Before anybody expects, after the last. */
	fault_open(&room);
	fault_submit(&room, FAULT_FIRST);
	fault_submit(&room, FAULT_REST);
	room.on_chunk = last_twice;
	refused(room.src.client, fault_try_submit(&room, FAULT_REST), KVP_STATUS_ORDER, last,
		"after the last");
	room.on_chunk = NULL;
	fault_expect(&room);
	fault_completes(&room);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* A segment in a later chunk again. */
Test(refusals, segment_in_two_chunks)
{
	static const char *const says[] = { "segments: 3", "chunk 0 already", NULL };
	struct served served;
	struct fault_room room;
	struct kvp_segment segment = { .id = 3, .entry = 2, .bytes = BLOB };
	struct kvp_chunk early = KVP_CHUNK_INIT;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 52, &served.view, &served.view);
	fault_connect_both(&room);
	fault_expect(&room);
	fault_open(&room);
	early.segments = &segment;
	early.n_segments = 1;
	RIG_CALL(room.src.client,
		 kvp_submit(room.src.client, room.src.room, &early, NULL, NULL, NULL));
	fault_submit(&room, FAULT_FIRST);
	refused(room.src.client, fault_try_submit(&room, FAULT_REST), KVP_STATUS_EXISTS, says,
		"twice");
	RIG_CALL(room.src.client, kvp_abort(room.src.client, room.src.room, NULL));
	(void)fault_fails(&room.dst, KVP_STATUS_ABORTED);
	fault_released(&room.dst);
	fault_released(&room.src);
	fault_reset(&room);
	fault_transfer(&room);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* ---- where the ends disagree ------------------------------------------------------------------
 */

static void narrow_source(struct fault_room *room)
{
	room->src.pool.entries[0].row_bytes = 288;
}

static void other_width(struct fault_room *room)
{
	room->src.pool.entries[0].full_bytes = 1152;
}

static void other_half(struct fault_room *room)
{
	room->src.pool.entries[1].full_bytes = room->dst.pool.entries[1].full_bytes = 1152;
	room->src.pool.entries[1].lo = 576;
}

static void other_layer(struct fault_room *room)
{
	room->src.pool.entries[1].layer = 7;
}

static void other_tag(struct fault_room *room)
{
	room->src.tag = "others";
}

static void expect_prefix(struct kvp_expect *expect)
{
	expect->prefix = 32;
}

static void expect_less(struct kvp_expect *expect)
{
	expect->end = 224;
}

static void expect_segment(struct kvp_expect *expect)
{
	segment_of(expect)->bytes = BLOB - 8;
}

static void prefix_differs(struct fault_room *room)
{
	room->on_expect = expect_prefix;
}

static void end_differs(struct fault_room *room)
{
	room->on_expect = expect_less;
}

static void segment_differs(struct fault_room *room)
{
	room->on_expect = expect_segment;
}

static void no_segment(struct kvp_chunk *chunk)
{
	chunk->n_segments = 0;
}

static void no_meta(struct kvp_chunk *chunk)
{
	chunk->meta = NULL;
	chunk->meta_bytes = 0;
}

static void segment_missing(struct fault_room *room)
{
	room->on_chunk = no_segment;
}

static void meta_missing(struct fault_room *room)
{
	room->on_chunk = no_meta;
}

static const struct {
	const char *name;
	void (*change)(struct fault_room *room);
	enum kvp_status status;
	const char *says[3];
} mismatches[] = {
	{ "other_tag", other_tag, KVP_STATUS_MISMATCH, { "layout_tag" } },
	{ "other_width", other_width, KVP_STATUS_MISMATCH, { "full_bytes", "1152" } },
	{ "narrow_source", narrow_source, KVP_STATUS_COVERAGE, { "entr" } },
	{ "other_half", other_half, KVP_STATUS_COVERAGE, { "entr" } },
	{ "other_layer", other_layer, KVP_STATUS_COVERAGE, { "entr" } },
	{ "prefix_differs", prefix_differs, KVP_STATUS_ORDER, { "from 0", "32" } },
	{ "end_differs", end_differs, KVP_STATUS_ORDER, { "256", "224" } },
	{ "segment_differs", segment_differs, KVP_STATUS_MISMATCH, { "4096", "4088" } },
	{ "segment_missing", segment_missing, KVP_STATUS_COVERAGE, { "segment 3" } },
	{ "meta_missing", meta_missing, KVP_STATUS_COVERAGE, { "meta" } },
};

/* Both ends learn it, and let go. */
static void mismatch(const struct rig_daemon *src, const struct rig_daemon *dst, size_t i)
{
	struct fault_end *ends[2];
	struct fault_room room;

	fault_room_make(&room, 0x61, src, dst);
	mismatches[i].change(&room);
	fault_connect_both(&room);
	fault_open(&room);
	fault_submit(&room, FAULT_FIRST);
	fault_submit(&room, FAULT_REST);
	fault_expect(&room);
	ends[0] = &room.src;
	ends[1] = &room.dst;
	for (int k = 0; k < 2; k++) {
		struct kvp_room_state state = fault_fails(ends[k], mismatches[i].status);
		const char *const *says;

		cr_assert(!state.retry, "%s", mismatches[i].name);
		for (says = mismatches[i].says; *says; says++)
			cr_assert(strstr(state.reason, *says), "%s: \"%s\" does not say \"%s\"",
				  mismatches[i].name, state.reason, *says);
		fault_released(ends[k]);
	}
	fault_close(&room);
}

static void all_mismatches(const struct rig_daemon *src, const struct rig_daemon *dst)
{
	struct fault_room room;

	fault_room_make(&room, 0x61, src, dst);
	fault_connect_both(&room);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(mismatches); i++) {
		mismatch(src, dst, i);
		fault_transfer(&room);
		fault_reset(&room);
	}
	fault_close(&room);
}

Test(refusals, ends_disagree_on_one_node)
{
	struct served served;

	serve(&served, "both", PEERS);
	all_mismatches(&served.view, &served.view);
	support_daemon_end(&served.daemon);
}

Test(refusals, ends_disagree_on_two_nodes)
{
	struct served src, dst;

	serve(&src, "prefill", PEERS);
	serve(&dst, "decode", PEERS);
	all_mismatches(&src.view, &dst.view);
	fault_idle(&src.view);
	fault_idle(&dst.view);
	cr_assert_eq(support_daemon_stop(&src.daemon), 0);
	cr_assert_eq(support_daemon_stop(&dst.daemon), 0);
	support_daemon_clean(&src.daemon);
	support_daemon_clean(&dst.daemon);
}

/* A wrong key concerns the offer alone: the open waits on for the right one. */
static const char key_a[KVP_KEY_BYTES] = "aaaaaaaaaaaaaaa",
		  key_b[KVP_KEY_BYTES] = "bbbbbbbbbbbbbbb";

static void expect_key_a(struct kvp_expect *expect)
{
	expect->key = key_a;
}

static void expect_key_b(struct kvp_expect *expect)
{
	expect->key = key_b;
}

static void open_key_a(struct kvp_open *open)
{
	open->key = key_a;
}

Test(refusals, wrong_key)
{
	void (*const wrong[])(struct kvp_expect * expect) = { NULL, expect_key_b };
	struct served served;
	struct fault_room room;

	serve(&served, "both", PEERS);
	fault_room_make(&room, 71, &served.view, &served.view);
	fault_connect_both(&room);
	room.on_open = open_key_a;
	fault_open(&room);
	for (size_t i = 0; i < KVP_ARRAY_SIZE(wrong); i++) {
		room.on_expect = wrong[i];
		fault_expect(&room);
		(void)fault_fails(&room.dst, KVP_STATUS_DENIED);
		fault_released(&room.dst);
	}
	cr_assert_eq(rig_state(room.src.client, room.src.room).phase, KVP_ROOM_WAITING);
	room.on_expect = expect_key_a;
	fault_expect(&room);
	fault_submit(&room, FAULT_FIRST);
	fault_submit(&room, FAULT_REST);
	fault_completes(&room);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* ---- limits --------------------------------------------------------------------------------- */

static void expect_many_pages(struct kvp_expect *expect)
{
	static const uint32_t many[65];

	side_of(expect)->pages = many;
	side_of(expect)->n_pages = 65;
}

/* A maximum as the status shows it. */
static void gauge(struct kvp_client *client, const char *name, double used, double max,
		  double refusals)
{
	const cJSON *limit = NULL;
	char *text = NULL;
	cJSON *status;

	RIG_CALL(client, kvp_inspect(client, "status", NULL, &text));
	status = cJSON_Parse(text);
	cJSON_ArrayForEach (limit, cJSON_GetObjectItemCaseSensitive(status, "limits")) {
		if (!strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(limit, "name")), name))
			break;
	}
	cr_assert(limit, "%s: no gauge: %s", name, text);
	cr_expect_eq(cJSON_GetNumberValue(cJSON_GetObjectItem(limit, "used")), used, "%s", text);
	cr_expect_eq(cJSON_GetNumberValue(cJSON_GetObjectItem(limit, "max")), max, "%s", text);
	cr_expect_eq(cJSON_GetNumberValue(cJSON_GetObjectItem(limit, "refused")), refusals, "%s",
		     text);
	cJSON_Delete(status);
	free(text);
}

Test(refusals, limits)
{
	static const char *const rooms[] = { "rooms of this client: 1", "max_rooms", NULL };
	static const char *const chunks[] = { "chunks", "1", "max_parked_chunks 1", NULL };
	static const char *const pages[] = { "65 pages", "at most 64", "max_room_pages", NULL };
	struct served served;
	struct fault_room room, other;

	serve(&served, "both",
	      PEERS "[limits]\nmax_rooms = 2\nmax_parked_chunks = 1\nmax_room_pages = 64\n");
	fault_room_make(&room, 81, &served.view, &served.view);
	fault_connect_both(&room);
	room.on_expect = expect_many_pages;
	refused(room.dst.client, fault_try_expect(&room), KVP_STATUS_LIMIT, pages, "pages");
	room.on_expect = NULL;
	gauge(room.dst.client, "limits.max_room_pages", 0, 64, 1);

	fault_open(&room);
	fault_submit(&room, FAULT_FIRST);
	refused(room.src.client, fault_try_submit(&room, FAULT_REST), KVP_STATUS_LIMIT, chunks,
		"chunks");
	gauge(room.src.client, "limits.max_parked_chunks", 1, 1, 1);
	fault_expect(&room);

	other = room;
	other.id = 82;
	refused(room.src.client, fault_try_open(&other), KVP_STATUS_LIMIT, rooms, "rooms");
	gauge(room.src.client, "limits.max_rooms", 2, 2, 1);
	gauge(room.src.client, "limits.max_pools", 2, 1024, 0);
	gauge(room.src.client, "limits.max_entries", 3, 512, 0);
	gauge(room.src.client, "client.max_sessions", 2, 256, 0);
	gauge(room.src.client, "client.max_process_sessions", 2, 64, 0);
	RIG_REQUIRE(kvp_room_wait_source_free(room.src.client, room.src.room, 1,
					      FAULT_SECS * 1000) == 0);
	fault_submit(&room, FAULT_REST);
	fault_completes(&room);
	gauge(room.src.client, "limits.max_parked_chunks", 0, 1, 1);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* Of a room at a peer that is not there: the renewal waits for it. */
static int renew(struct kvp_client *client, uint64_t room)
{
	return kvp_renew(client, "127.0.0.1:9", room, NULL, 0, 1000, NULL, NULL);
}

/* Offers that no engine has opened are not a daemon that is full. */
Test(refusals, parked_offers_have_a_gauge)
{
	static const char *const renewals[] = { "renewals", "1", "max_parked_offers 1", NULL };
	struct served served;
	struct fault_room room;

	serve(&served, "both", PEERS "[limits]\nmax_parked_offers = 1\n");
	fault_room_make(&room, 83, &served.view, &served.view);
	fault_connect_both(&room);
	gauge(room.dst.client, "limits.max_parked_offers", 0, 1, 0);
	fault_expect(&room);
	fault_parked(&served.view);
	gauge(room.dst.client, "limits.max_parked_offers", 1, 1, 0);
	RIG_CALL(room.dst.client, renew(room.dst.client, 84));
	refused(room.dst.client, renew(room.dst.client, 85), KVP_STATUS_LIMIT, renewals,
		"renewals");
	gauge(room.dst.client, "limits.max_parked_offers (renewals)", 1, 1, 1);
	fault_open(&room);
	fault_submit(&room, FAULT_FIRST);
	fault_submit(&room, FAULT_REST);
	fault_completes(&room);
	gauge(room.dst.client, "limits.max_parked_offers", 0, 1, 0);
	fault_close(&room);
	support_daemon_end(&served.daemon);
}

/* Pieces that wait for slots of the receiver, at a test point. */
Test(refusals, wants_have_a_gauge)
{
	struct served src, dst;
	struct fault_room room;

	serve(&src, "prefill", PEERS);
	serve(&dst, "decode", PEERS);
	fault_room_make(&room, 86, &src.view, &dst.view);
	fault_connect_both(&room);
	gauge(room.dst.client, "limits.max_wants", 0, 64, 0);
	fault_hold(&dst.view, "grant", true);
	fault_expect(&room);
	fault_open(&room);
	fault_submit(&room, FAULT_FIRST);
	fault_held(&dst.view, "grant");
	gauge(room.dst.client, "limits.max_wants", 1, 64, 0);
	fault_hold(&dst.view, "grant", false);
	fault_submit(&room, FAULT_REST);
	fault_completes(&room);
	fault_idle(&dst.view);
	gauge(room.dst.client, "limits.max_wants", 0, 64, 0);
	fault_close(&room);
	cr_assert_eq(support_daemon_stop(&src.daemon), 0);
	cr_assert_eq(support_daemon_stop(&dst.daemon), 0);
	support_daemon_clean(&src.daemon);
	support_daemon_clean(&dst.daemon);
}
