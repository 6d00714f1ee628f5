/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Failures that transfers of KV caches have had elsewhere, numbered as in docs/reliability.md, each
 * provoked here: what went wrong there must not, and the room that comes next has the right bytes.
 * Those that the construction rules out are shown by what makes it so.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tests/support_faults.h"

#define DAEMON "[host]\nslots = 8\nslot_bytes = 64k\n"
#define ROW 576u

struct pair {
	struct rig *rig;
	struct rig_daemon *prefill, *decode;
	struct fault_room room;
};

static void pair_begin(struct rig *rig, struct pair *pair, uint64_t id)
{
	memset(pair, 0, sizeof(*pair));
	pair->rig = rig;
	pair->prefill = rig_daemon_start(rig, "prefill", DAEMON);
	pair->decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(&pair->room, id, pair->prefill, pair->decode);
	fault_connect_both(&pair->room);
}

/* Nothing that happened has done harm. */
static void pair_end(struct pair *pair)
{
	fault_reset(&pair->room);
	fault_transfer(&pair->room);
	fault_idle(pair->prefill);
	fault_idle(pair->decode);
	fault_close(&pair->room);
}

static void begin_both(struct fault_room *room)
{
	fault_expect(room);
	fault_open(room);
	(void)rig_await(room->src.client, room->src.room, KVP_WAIT_READY, FAULT_SECS);
}

/* Half is there, and the rest is kept at the point. */
static void keep_rest(struct pair *pair, const struct rig_daemon *keeper, const char *point)
{
	begin_both(&pair->room);
	fault_submit(&pair->room, FAULT_FIRST);
	fault_arrived(&pair->room.dst, FAULT_HALF);
	fault_hold(keeper, point, true);
	fault_submit(&pair->room, FAULT_REST);
	fault_held(keeper, point);
}

static void says(const char *text, const char *const *words)
{
	for (; *words; words++)
		RIG_REQUIRE(strstr(text, *words), "\"%s\" does not say \"%s\"", text, *words);
}
#define SAYS(text, ...) says(text, (const char *const[]){ __VA_ARGS__, NULL })

static void refused(const struct fault_end *end, int rc, enum kvp_status status)
{
	RIG_REQUIRE(rc < 0 && kvp_last_status(end->client) == status, "%s, not %s: %s",
		    kvp_status_name(kvp_last_status(end->client)), kvp_status_name(status),
		    kvp_last_error(end->client));
}

/* A number of `status`, by its path. */
static uint64_t counter(const struct rig_daemon *daemon, const char *object, const char *name)
{
	cJSON *root = rig_ask(daemon, "status", NULL);
	const cJSON *at = cJSON_GetObjectItemCaseSensitive(root, object);
	uint64_t value;

	if (cJSON_IsArray(at))
		at = cJSON_GetArrayItem(at, 0);
	value = (uint64_t)rig_number(at, name);
	cJSON_Delete(root);
	return value;
}

/* ---- 1, 2: who may reuse pages, and when ----------------------------------------------------- */

/* 1: decode aborts while prefill's write is under way, and reuses the pages as soon as it may. */
static void f01_pages_reused_after_abort(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 1);
	for (int at_prefill = 0; at_prefill < 2; at_prefill++) {
		const struct rig_daemon *keeper = at_prefill ? pair.prefill : pair.decode;
		const char *point = at_prefill ? "send" : "scatter";

		keep_rest(&pair, keeper, point);
		RIG_CALL(room->dst.client, kvp_abort(room->dst.client, room->dst.room, NULL));
		(void)fault_fails(&room->dst, KVP_STATUS_ABORTED);
		fault_released(&room->dst);
		fault_reset(room); /* somebody else's rows */
		fault_hold(keeper, point, false);
		(void)fault_fails(&room->src, KVP_STATUS_ABORTED);
		fault_released(&room->src);
		fault_idle(pair.prefill);
		fault_idle(pair.decode);
		fault_check_untouched(room);
	}
	pair_end(&pair);
}

static void second_destination(struct kvp_expect *expect)
{
	((struct kvp_expect_sender *)expect->senders)->n_dests = 2;
	expect->dest = 1;
}

static void first_destination(struct kvp_expect *expect)
{
	((struct kvp_expect_sender *)expect->senders)->n_dests = 2;
}

/* 2: a sender with several decode ranks goes away while pieces for all of them are under way: each
 * of them is told, and each is released by its own proof. */
static void f02_every_destination_is_released(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room, second;

	pair_begin(rig, &pair, 2);
	fault_room_make(&second, 2, pair.prefill, pair.decode);
	fault_connect(&second.dst, "decode");
	room->on_expect = first_destination;
	second.on_expect = second_destination;
	fault_expect(&second);
	begin_both(room);
	fault_submit(room, FAULT_FIRST);
	fault_arrived(&room->dst, FAULT_HALF);
	fault_arrived(&second.dst, FAULT_HALF);
	fault_hold(pair.prefill, "send", true);
	fault_submit(room, FAULT_REST);
	fault_held(pair.prefill, "send");
	RIG_CALL(room->src.client, kvp_abort(room->src.client, room->src.room, NULL));
	(void)fault_fails(&room->dst, KVP_STATUS_ABORTED);
	(void)fault_fails(&second.dst, KVP_STATUS_ABORTED);
	fault_released(&room->dst);
	fault_released(&second.dst);
	fault_released(&room->src);
	fault_reset(room);
	fault_reset(&second);
	fault_hold(pair.prefill, "send", false);
	fault_idle(pair.prefill);
	fault_idle(pair.decode);
	fault_check_untouched(room);
	fault_check_untouched(&second);
	room->on_expect = NULL;
	pair_end(&pair);
}

/* ---- 3 to 5: geometry ------------------------------------------------------------------------ */

/* 3: an engine that registers other widths fails its own rooms, with both numbers. */
static void f03_other_widths_fail_alone(struct rig *rig)
{
	struct fault_room odd, mixed;
	struct kvp_room_state state;
	struct pair pair;

	pair_begin(rig, &pair, 3);
	fault_room_make_rows(&odd, 33, pair.prefill, pair.decode, 2 * ROW);
	fault_room_make(&mixed, 33, pair.prefill, pair.decode);
	fault_connect(&odd.src, "odd");
	fault_connect(&mixed.dst, "decode");
	fault_expect(&mixed);
	fault_open(&odd);
	state = fault_fails(&mixed.dst, KVP_STATUS_MISMATCH);
	SAYS(state.reason, "576", "1152");
	state = fault_fails(&odd.src, KVP_STATUS_MISMATCH);
	SAYS(state.reason, "576", "1152");
	RIG_REQUIRE(!state.retry);
	fault_released(&mixed.dst);
	fault_released(&odd.src);
	pair_end(&pair);
}

static void short_list(struct kvp_expect *expect)
{
	((struct kvp_side_desc *)expect->sides)->n_pages--;
}

/* 4: the ends' lists have different lengths as a rule, since pages of DCP ranks are pages of more
 * tokens; neither is matched with the other, both with the prompt. */
static void f04_page_lists_of_different_length(struct rig *rig)
{
	struct pair pair;

	pair_begin(rig, &pair, 4);
	pair.room.on_expect = short_list;
	refused(&pair.room.dst, fault_try_expect(&pair.room), KVP_STATUS_DST_RANGE);
	SAYS(kvp_last_error(pair.room.dst.client), "7 given", "8 needed");
	pair.room.on_expect = NULL;
	pair_end(&pair); /* 16 pages of 16 tokens there, 8 of 32 here */
}

/* 5: what does not fit a slot is split, never sent row by row. */
static void f05_split_not_degraded(struct rig *rig)
{
	struct pair pair;
	struct fault_room wide;

	pair_begin(rig, &pair, 5);
	fault_room_make_rows(&wide, 55, pair.prefill, pair.decode, 16384);
	fault_connect_both(&wide);
	fault_transfer(&wide); /* 4 MiB through slots of 64 KiB */
	RIG_REQUIRE(counter(pair.prefill, "lanes", "raw_rows") == 0);
	RIG_REQUIRE(counter(pair.prefill, "lanes", "pieces_sent") >= 64);
	fault_close(&wide);
	pair_end(&pair);
}

/* ---- 6: a peer that failed ------------------------------------------------------------------- */

/* 6: it is tried again, each time. */
static void f06_no_peer_is_given_up(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 6);
	for (uint32_t i = 0; i < 4; i++) {
		keep_rest(&pair, pair.prefill, "send");
		rig_daemon_kill(pair.prefill);
		(void)fault_fails(&room->dst, KVP_STATUS_PEER_LOST);
		fault_released(&room->dst);
		(void)fault_fails(&room->src, KVP_STATUS_DAEMON_LOST);
		fault_released(&room->src);
		fault_reset(room);
		fault_expect(room); /* nobody is there yet */
		rig_daemon_restart(pair.prefill, DAEMON);
		fault_open(room);
		fault_submit(room, FAULT_FIRST);
		fault_submit(room, FAULT_REST);
		fault_completes(room);
		fault_reset(room);
	}
	pair_end(&pair);
}

/* ---- 7: rows that are not written yet -------------------------------------------------------- */

static struct kvp_fence *fence;

static void behind_fence(struct kvp_chunk *chunk)
{
	chunk->fence = fence;
	chunk->fence_value = 1;
}

/* 7: all is submitted before the engine has computed it. */
static void f07_rows_behind_their_fence(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room, other;

	pair_begin(rig, &pair, 7);
	RIG_CALL(room->src.client, kvp_fence_create(room->src.client, 1, &fence));
	fault_poison(room);
	begin_both(room);
	room->on_chunk = behind_fence;
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	room->on_chunk = NULL;
	/* A whole room goes through the same lanes meanwhile: who reads early has read by then. */
	fault_room_make(&other, 77, pair.prefill, pair.decode);
	fault_connect_both(&other);
	fault_transfer(&other);
	fault_close(&other);
	(void)kvp_process(room->src.client);
	(void)kvp_process(room->dst.client);
	RIG_REQUIRE(rig_state(room->src.client, room->src.room).source_free == 0);
	RIG_REQUIRE(rig_state(room->dst.client, room->dst.room).arrived == 0);
	fault_check_untouched(room);
	fault_restore(room); /* the forward */
	kvp_fence_signal(fence, 0, 1);
	fault_completes(room);
	kvp_fence_destroy(fence);
	pair_end(&pair);
}

/* ---- 8, 9: everything exactly once ----------------------------------------------------------- */

static void too_early_last(struct kvp_chunk *chunk)
{
	chunk->last = 1;
}

/* 8: a prompt whose tail was never sent is not complete. */
static void f08_no_tail_no_success(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 8);
	begin_both(room);
	room->on_chunk = too_early_last;
	refused(&room->src, fault_try_submit(room, FAULT_FIRST), KVP_STATUS_ORDER);
	SAYS(kvp_last_error(room->src.client), "last", "128", "256");
	room->on_chunk = NULL;
	refused(&room->src, fault_try_submit(room, FAULT_REST), KVP_STATUS_ORDER);
	fault_submit(room, FAULT_FIRST);
	fault_arrived(&room->dst, FAULT_HALF);
	RIG_CALL(room->src.client, kvp_abort(room->src.client, room->src.room, NULL));
	RIG_REQUIRE(fault_fails(&room->dst, KVP_STATUS_ABORTED).arrived == FAULT_HALF);
	fault_released(&room->dst);
	(void)fault_fails(&room->src, KVP_STATUS_ABORTED);
	fault_released(&room->src);
	pair_end(&pair);
}

static void nobodys_segment(struct kvp_chunk *chunk)
{
	((struct kvp_segment *)chunk->segments)->id = 4;
}

static void same_segment(struct kvp_chunk *chunk)
{
	chunk->start = FAULT_TOKENS;
	chunk->tokens = 0;
	chunk->n_sides = 0;
}

/* 9: what belongs to a request as a whole has one writer, and is written once. */
static void f09_one_writer_of_each_segment(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 9);
	begin_both(room);
	fault_submit(room, FAULT_FIRST);
	room->on_chunk = nobodys_segment;
	refused(&room->src, fault_try_submit(room, FAULT_REST), KVP_STATUS_MISMATCH);
	room->on_chunk = NULL;
	fault_submit(room, FAULT_REST_OPEN);
	room->on_chunk = same_segment;
	refused(&room->src, fault_try_submit(room, FAULT_REST), KVP_STATUS_EXISTS);
	SAYS(kvp_last_error(room->src.client), "segments: 3", "already");
	room->on_chunk = NULL;
	fault_submit(room, FAULT_LAST);
	fault_completes(room);
	pair_end(&pair);
}

/* ---- 10: aborts ------------------------------------------------------------------------------ */

/* 10: an abort is heard by both, and nothing makes a success of it afterwards: the rest is let go,
 * and would complete the room. */
static void f10_failed_stays_failed(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 10);
	for (int by_src = 0; by_src < 2; by_src++) {
		struct fault_end *end = by_src ? &room->src : &room->dst;
		struct kvp_room_state state;

		keep_rest(&pair, pair.decode, "scatter");
		RIG_CALL(end->client, kvp_abort(end->client, end->room, "no longer needed"));
		state = fault_fails(&room->src, KVP_STATUS_ABORTED);
		SAYS(state.reason, "no longer needed");
		state = fault_fails(&room->dst, KVP_STATUS_ABORTED);
		SAYS(state.reason, "no longer needed");
		fault_hold(pair.decode, "scatter", false);
		fault_idle(pair.prefill);
		fault_idle(pair.decode);
		(void)kvp_process(room->dst.client);
		(void)kvp_process(room->src.client);
		RIG_REQUIRE(!rig_state(room->dst.client, room->dst.room).complete);
		RIG_REQUIRE(!rig_state(room->src.client, room->src.room).complete);
		fault_released(&room->dst);
		fault_released(&room->src);
		fault_reset(room);
	}
	pair_end(&pair);
}

/* ---- 11: descriptors ------------------------------------------------------------------------- */

/* 11: connections are of peers, not of rooms; what a dead peer had is closed. */
static void f11_descriptors_do_not_grow(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	uint32_t fds[2];

	pair_begin(rig, &pair, 11);
	fault_transfer(room);
	fault_reset(room);
	fault_transfer(room);
	fault_idle(pair.prefill);
	fault_idle(pair.decode);
	fds[0] = fault_fds(pair.prefill);
	fds[1] = fault_fds(pair.decode);
	for (uint32_t i = 0; i < 60; i++) {
		room->id = 1000 + i;
		fault_restore(room); /* rows tell the room */
		fault_reset(room);
		fault_transfer(room);
		if (i % 20 != 19)
			continue;
		rig_daemon_kill(pair.prefill);
		rig_daemon_restart(pair.prefill, DAEMON);
	}
	fault_idle(pair.prefill);
	fault_idle(pair.decode);
	fault_fds_back(pair.prefill, fds[0]);
	fault_fds_back(pair.decode, fds[1]);
	pair_end(&pair);
}

/* ---- 12 to 14: ends that do not come --------------------------------------------------------- */

/* 12: prefill's lease is over, its pages are somebody else's, and decode comes. Nothing pulls:
 * without an open nothing is read. */
static void f12_too_late_for_the_lease(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;
	struct kvp_room_state state;

	pair_begin(rig, &pair, 12);
	room->timers = (struct kvp_timers){ .open_ms = 300, .lease_ms = 200 };
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	state = rig_await(room->src.client, room->src.room, KVP_WAIT_TERMINAL, FAULT_SECS);
	RIG_REQUIRE(state.failed && (state.status == KVP_STATUS_LEASE ||
				     state.status == KVP_STATUS_TIMEOUT),
		    "%s", state.reason);
	fault_released(&room->src);
	fault_poison(room);
	fault_expect(room);
	(void)fault_fails(&room->dst, KVP_STATUS_TIMEOUT);
	fault_released(&room->dst);
	fault_check_untouched(room);
	fault_restore(room);
	room->timers = (struct kvp_timers){ 0 };
	pair_end(&pair);
}

static void page_beyond(struct kvp_expect *expect)
{
	((uint32_t *)expect->sides[0].pages)[3] = 32;
}

static void source_beyond(struct kvp_chunk *chunk)
{
	((uint32_t *)chunk->sides[0].pages)[2] = 32;
}

/* 13: page numbers outside the pool are refused before anything is read or written; a room of an
 * older generation reaches nothing. */
static void f13_stale_and_impossible_pages(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 13);
	room->on_expect = page_beyond;
	refused(&room->dst, fault_try_expect(room), KVP_STATUS_DST_RANGE);
	SAYS(kvp_last_error(room->dst.client), "page 32", "0 to 31");
	room->on_expect = NULL;
	begin_both(room);
	room->on_chunk = source_beyond;
	refused(&room->src, fault_try_submit(room, FAULT_FIRST), KVP_STATUS_SRC_RANGE);
	SAYS(kvp_last_error(room->src.client), "page 32", "0 to 31");
	room->on_chunk = NULL;

	/* The rest of its first life is let go when the second one has the same pages. */
	fault_submit(room, FAULT_FIRST);
	fault_arrived(&room->dst, FAULT_HALF);
	fault_hold(pair.prefill, "send", true);
	fault_submit(room, FAULT_REST);
	fault_held(pair.prefill, "send");
	RIG_CALL(room->dst.client, kvp_abort(room->dst.client, room->dst.room, NULL));
	(void)fault_fails(&room->dst, KVP_STATUS_ABORTED);
	fault_released(&room->dst);
	(void)fault_fails(&room->src, KVP_STATUS_ABORTED);
	fault_released(&room->src);
	fault_reset(room);
	room->generation++; /* other rows */
	fault_restore(room);
	begin_both(room);
	fault_hold(pair.prefill, "send", false);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_completes(room);
	pair_end(&pair);
}

/* 14: a writer that never writes: the end that waits says so, and what for. */
static void f14_waits_are_bounded(struct rig *rig)
{
	static const struct {
		const char *name;
		bool at_prefill;
	} points[] = { { "want", true }, { "grant", false }, { "gather", true }, { "send", true } };
	struct pair pair;
	struct fault_room *room = &pair.room;
	struct kvp_room_state state;

	pair_begin(rig, &pair, 14);
	room->timers = (struct kvp_timers){ .open_ms = 600, .progress_ms = 400 };
	for (size_t i = 0; i < KVP_ARRAY_SIZE(points); i++) {
		const struct rig_daemon *keeper = points[i].at_prefill ? pair.prefill : pair.decode;

		keep_rest(&pair, keeper, points[i].name);
		state = fault_fails(&room->dst, KVP_STATUS_TIMEOUT);
		RIG_REQUIRE(state.retry && strstr(state.reason, " s"), "%s", state.reason);
		(void)fault_fails(&room->src, KVP_STATUS_TIMEOUT);
		fault_released(&room->dst);
		fault_released(&room->src);
		fault_hold(keeper, points[i].name, false);
		fault_reset(room);
	}
	room->timers = (struct kvp_timers){ 0 };
	pair_end(&pair);
}

/* ---- 15, 16: memory -------------------------------------------------------------------------- */

/* 15: the moment that complete is said, every byte is there, for any process that maps the pool. */
static void f15_complete_is_visible(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 15);
	for (uint32_t i = 0; i < 20; i++) {
		room->generation++;
		fault_restore(room);
		fault_reset(room);
		begin_both(room);
		fault_submit(room, FAULT_FIRST);
		fault_submit(room, FAULT_REST);
		(void)rig_await(room->dst.client, room->dst.room, KVP_WAIT_TERMINAL, FAULT_SECS);
		fault_check_all(room); /* before anything else is waited for */
		fault_completes(room);
	}
	pair_end(&pair);
}

/* 16: memory is measured by the daemon, not believed. */
static void f16_memory_is_measured(struct rig *rig)
{
	struct pair pair;
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_entry_desc entry;
	uint32_t pool;

	pair_begin(rig, &pair, 16);
	entry = pair.room.dst.pool.entries[0];
	entry.n_pages *= 64;
	entry.bytes *= 64;
	desc.entries = &entry;
	desc.n_entries = 1;
	desc.fds = &pair.room.dst.pool.fd;
	desc.n_fds = 1;
	refused(&pair.room.dst, kvp_pool_register(pair.room.dst.client, &desc, &pool),
		KVP_STATUS_INVALID);
	RIG_REQUIRE(ftruncate(pair.room.dst.pool.fd, 4096) < 0, "a registered pool can shrink");
	pair_end(&pair);
}

/* ---- 17, 18, 19 ------------------------------------------------------------------------------ */

/* 17: as many tokens as the ranks' rows together, twice what one rank has. */
static void all_rows(struct kvp_expect *expect)
{
	struct kvp_side_desc *side = (struct kvp_side_desc *)expect->sides;
	uint32_t *pages = (uint32_t *)side->pages;

	for (uint32_t i = 0; i < 8; i++)
		pages[i] = i;
}

static void f17_capacity_in_one_unit(struct rig *rig)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct pair pair;
	struct fault_end *dst = &pair.room.dst;
	struct kvp_client *client;

	pair_begin(rig, &pair, 17);
	/* A pool of 8 pages of 16 rows for a prompt of 256 tokens, every second of them its own. */
	client = rig_client(pair.decode, "small");
	for (uint32_t i = 0; i < 2; i++) {
		dst->pool.entries[i].n_pages = 8;
		dst->pool.entries[i].bytes = 8 * dst->pool.entries[i].page_stride;
	}
	kvp_client_close(dst->client);
	dst->client = client;
	desc.entries = dst->pool.entries;
	desc.n_entries = dst->pool.n_entries;
	desc.fds = &dst->pool.fd;
	desc.n_fds = 1;
	desc.layout_tag = "faults";
	desc.tag_bytes = 6;
	RIG_CALL(client, kvp_pool_register(client, &desc, &dst->pool.id));
	for (uint32_t i = 0; i < 8; i++)
		dst->pages[i] = i;
	pair.room.on_expect = all_rows;
	fault_transfer(&pair.room);
	pair_end(&pair);
}

/* 18: what was known of a process ends with it, though its name and address live on. */
static void f18_nothing_stale_after_a_restart(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	pair_begin(rig, &pair, 18);
	for (int which = 0; which < 2; which++) {
		struct rig_daemon *victim = which ? pair.decode : pair.prefill;

		fault_transfer(room);
		fault_reset(room);
		rig_daemon_kill(victim);
		rig_daemon_restart(victim, DAEMON);
		fault_transfer(room); /* other data ports, the same address */
		fault_reset(room);
	}
	pair_end(&pair);
}

static void rows_as_pages(struct kvp_expect *expect)
{
	uint32_t *pages = (uint32_t *)expect->sides[0].pages;

	for (uint32_t i = 0; i < expect->sides[0].n_pages; i++)
		pages[i] *= expect->sides[0].page;
}

/* 19: token numbers where pages are meant do not get past the registration. */
static void f19_rows_for_pages(struct rig *rig)
{
	struct pair pair;

	pair_begin(rig, &pair, 19);
	pair.room.on_expect = rows_as_pages;
	refused(&pair.room.dst, fault_try_expect(&pair.room), KVP_STATUS_DST_RANGE);
	SAYS(kvp_last_error(pair.room.dst.client), "0 to 31");
	pair.room.on_expect = NULL;
	pair_end(&pair);
}

/* ---- 20, 21 ---------------------------------------------------------------------------------- */

/* 20: a pool of which one token does not fit a slot is refused: what fits is computed from the
 * same numbers as where it is put. */
static void f20_larger_than_a_slot(struct rig *rig)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct fault_room huge, full;
	struct pair pair;
	uint32_t pool;

	pair_begin(rig, &pair, 20);
	fault_room_make_rows(&huge, 202, pair.prefill, pair.decode, 40000); /* two layers of it */
	desc.entries = huge.src.pool.entries;
	desc.n_entries = huge.src.pool.n_entries;
	desc.fds = &huge.src.pool.fd;
	desc.n_fds = 1;
	refused(&pair.room.src, kvp_pool_register(pair.room.src.client, &desc, &pool),
		KVP_STATUS_INVALID);
	SAYS(kvp_last_error(pair.room.src.client), "80", "65536", "slot");
	fault_room_make_rows(&full, 203, pair.prefill, pair.decode, 32768); /* to the last byte */
	fault_connect_both(&full);
	fault_transfer(&full);
	fault_close(&full);
	pair_end(&pair);
}

static void make_replicated(struct fault_end *end, uint32_t rows_per_page)
{
	struct kvp_entry_desc *entry = &end->pool.entries[1];

	/* Rows of every token, of half the width: they take the same place. */
	entry->klass = KVP_REPLICATED;
	entry->rows_per_page = rows_per_page;
	entry->row_bytes = entry->full_bytes = ROW / 2;
	entry->row_stride = ROW / 2;
}

/* 21: an entry of which every rank has all rows stands beside one that is spread over them. */
static void f21_replicated_beside_sharded(struct rig *rig)
{
	struct pair pair;
	struct fault_room *room = &pair.room;

	memset(&pair, 0, sizeof(pair));
	pair.prefill = rig_daemon_start(rig, "prefill", DAEMON);
	pair.decode = rig_daemon_start(rig, "decode", DAEMON);
	fault_room_make(room, 21, pair.prefill, pair.decode);
	make_replicated(&room->src, 16);
	make_replicated(&room->dst, 32);
	fault_restore(room);
	fault_connect_both(room);
	fault_transfer(room); /* compares with a count that knows no formula */
	pair_end(&pair);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "01", f01_pages_reused_after_abort },
		{ "02", f02_every_destination_is_released },
		{ "03", f03_other_widths_fail_alone },
		{ "04", f04_page_lists_of_different_length },
		{ "05", f05_split_not_degraded },
		{ "06", f06_no_peer_is_given_up },
		{ "07", f07_rows_behind_their_fence },
		{ "08", f08_no_tail_no_success },
		{ "09", f09_one_writer_of_each_segment },
		{ "10", f10_failed_stays_failed },
		{ "11", f11_descriptors_do_not_grow },
		{ "12", f12_too_late_for_the_lease },
		{ "13", f13_stale_and_impossible_pages },
		{ "14", f14_waits_are_bounded },
		{ "15", f15_complete_is_visible },
		{ "16", f16_memory_is_measured },
		{ "17", f17_capacity_in_one_unit },
		{ "18", f18_nothing_stale_after_a_restart },
		{ "19", f19_rows_for_pages },
		{ "20", f20_larger_than_a_slot },
		{ "21", f21_replicated_beside_sharded },
	};

	if (!fault_points())
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
