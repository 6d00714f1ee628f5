/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon is replaced under load: engines are connected, a queue of rooms waits for the other end,
 * some rooms are moving, others come and go through the other daemons. Only the rooms that moved
 * there are lost; the queue is announced again by the library and completes. Every byte is checked.
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_faults.h"
#include "tests/support_soak.h"

#define N_PARKED 100u /* of each kind: opened, expected */
#define N_MOVING 12u
#define TOKENS (2 * SOAK_PAGE)
#define DAEMON "[host]\nslots = 16\nslot_bytes = 64k\n[stop]\ndrain = 100ms\n"

struct rank {
	struct kvp_client *client;
	struct soak_pool pool;
};

enum kind { OPENED, EXPECTED, MOVING };

struct room {
	enum kind kind;
	uint64_t id;
	kvp_room_id src, dst;
	bool opened, expected;
	uint32_t from[2], to[2];
	struct kvp_side_desc from_side, to_side;
	struct soak_place places[TOKENS];
};

struct hot {
	struct rig_daemon *prefill, *decode;
	struct rank src, dst;
	struct room rooms[2 * N_PARKED + N_MOVING];
	struct fault_room other; /* through a third daemon */
	uint64_t n_others;
};

static struct rig_key key_of(const struct room *room)
{
	return (struct rig_key){ room->id, 1 };
}

static void rank_begin(struct rank *rank, const struct rig_daemon *daemon, const char *name,
		       uint64_t salt)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	soak_pool_make(&rank->pool, 1, 0, 1, salt);
	rank->client = rig_client(daemon, name);
	desc.entries = rank->pool.pool.entries;
	desc.n_entries = rank->pool.pool.n_entries;
	desc.fds = &rank->pool.pool.fd;
	desc.n_fds = 1;
	desc.label = name;
	RIG_CALL(rank->client, kvp_pool_register(rank->client, &desc, &rank->pool.pool.id));
}

static void room_expect(struct hot *hot, struct room *room)
{
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_expect_sender sender = { .address = hot->prefill->address, .n_dests = 1 };
	struct kvp_segment segment = { .entry = SOAK_BLOB, .bytes = SOAK_SEGMENT };

	segment.offset = (uint64_t)room->to[0] * SOAK_SEGMENT;
	expect.room = room->id;
	expect.pool = hot->dst.pool.pool.id;
	expect.sides = &room->to_side;
	expect.n_sides = 1;
	expect.segments = &segment;
	expect.n_segments = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	RIG_CALL(hot->dst.client, kvp_expect(hot->dst.client, &expect, NULL, NULL, &room->dst));
	room->expected = true;
}

static void room_open(struct hot *hot, struct room *room)
{
	struct kvp_open open = KVP_OPEN_INIT;

	open.room = room->id;
	open.pool = hot->src.pool.pool.id;
	open.sides = &hot->src.pool.side;
	open.n_sides = 1;
	RIG_CALL(hot->src.client, kvp_open(hot->src.client, &open, NULL, NULL, &room->src));
	room->opened = true;
}

/* The first half, or the rest. */
static void room_submit(struct hot *hot, struct room *room, bool rest)
{
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_segment segment = { .entry = SOAK_BLOB, .bytes = SOAK_SEGMENT };

	segment.offset = (uint64_t)room->from[0] * SOAK_SEGMENT;
	chunk.start = rest ? TOKENS / 2 : 0;
	chunk.tokens = TOKENS / 2;
	chunk.sides = &room->from_side;
	chunk.n_sides = 1;
	chunk.last = rest;
	chunk.segments = &segment;
	chunk.n_segments = rest;
	RIG_CALL(hot->src.client, kvp_submit(hot->src.client, room->src, &chunk, NULL, NULL, NULL));
}

static void room_prepare(struct hot *hot, struct room *room)
{
	struct rig_key key = key_of(room);

	soak_take(&hot->src.pool, room->from, 2);
	soak_take(&hot->dst.pool, room->to, 2);
	soak_side(&hot->src.pool, 0, TOKENS, room->from, &room->from_side);
	soak_side(&hot->dst.pool, 0, TOKENS, room->to, &room->to_side);
	soak_source_write(&hot->src.pool, &room->from_side, 0, TOKENS, &key);
	soak_dest_begin(&hot->dst.pool, &room->to_side, 0, TOKENS, &key, room->places);
}

/* Decode's library has to know that the room moves, or it would take it for one that waits. */
static void await_arrived(struct hot *hot, const struct room *room)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);

	while (rig_state(hot->dst.client, room->dst).arrived < TOKENS / 2) {
		RIG_REQUIRE(rig_now_ns() < until);
		(void)kvp_wait(hot->dst.client, 100);
	}
}

static void rooms_begin(struct hot *hot)
{
	uint32_t i;

	for (i = 0; i < KVP_ARRAY_SIZE(hot->rooms); i++) {
		struct room *room = &hot->rooms[i];

		room->id = i + 1;
		room->kind = i < N_PARKED ? OPENED : i < 2 * N_PARKED ? EXPECTED : MOVING;
		room_prepare(hot, room);
		if (room->kind != EXPECTED)
			room_open(hot, room);
		if (room->kind != OPENED)
			room_expect(hot, room);
		if (room->kind == MOVING)
			room_submit(hot, room, false);
	}
	for (i = 2 * N_PARKED; i < KVP_ARRAY_SIZE(hot->rooms); i++) {
		RIG_REQUIRE(kvp_room_wait_delivered(hot->src.client, hot->rooms[i].src, 1,
						    FAULT_SECS * 1000) == 0);
		await_arrived(hot, &hot->rooms[i]);
	}
}

static void other_room(struct hot *hot)
{
	fault_transfer(&hot->other);
	fault_reset(&hot->other);
	hot->n_others++;
}

/* Ends of a kind that fail, once the clients have heard: of rooms in motion, both. */
static uint32_t lost(struct hot *hot, enum kind kind)
{
	uint32_t i, n = 0;

	for (i = 0; i < KVP_ARRAY_SIZE(hot->rooms); i++) {
		const struct room *room = &hot->rooms[i];

		if (room->kind != kind)
			continue;
		n += room->opened && rig_state(hot->src.client, room->src).failed;
		n += room->expected && rig_state(hot->dst.client, room->dst).failed;
	}
	return n;
}

static void await_moving(struct hot *hot)
{
	uint32_t i;

	for (i = 2 * N_PARKED; i < KVP_ARRAY_SIZE(hot->rooms); i++) {
		const struct room *room = &hot->rooms[i];

		RIG_REQUIRE(
			rig_await(hot->src.client, room->src, KVP_WAIT_RELEASED, FAULT_SECS).retry);
		RIG_REQUIRE(
			rig_await(hot->dst.client, room->dst, KVP_WAIT_RELEASED, FAULT_SECS).retry);
	}
}

static void room_over(struct hot *hot, struct room *room)
{
	struct soak_who who = { "decode", "complete room", room->id, 1 };

	RIG_REQUIRE(rig_await(hot->dst.client, room->dst, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	RIG_REQUIRE(rig_await(hot->src.client, room->src, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	soak_dest_all(&hot->dst.pool, room->to, 2, &who);
	kvp_room_forget(hot->src.client, room->src);
	kvp_room_forget(hot->dst.client, room->dst);
}

/* The other end of each comes now; those that were lost are tried once more, as they were told. */
static void rooms_end(struct hot *hot)
{
	uint32_t i;

	for (i = 0; i < KVP_ARRAY_SIZE(hot->rooms); i++) {
		struct room *room = &hot->rooms[i];

		if (room->kind == MOVING) {
			kvp_room_forget(hot->src.client, room->src);
			kvp_room_forget(hot->dst.client, room->dst);
		}
		if (room->kind != OPENED)
			room_open(hot, room);
		if (room->kind != EXPECTED)
			room_expect(hot, room);
		room_submit(hot, room, false);
		room_submit(hot, room, true);
		if (i % 16 == 0)
			other_room(hot);
	}
	for (i = 0; i < KVP_ARRAY_SIZE(hot->rooms); i++)
		room_over(hot, &hot->rooms[i]);
}

static void hot_end(struct hot *hot)
{
	struct soak_who who = { "", "whole pool", 0, 0 };

	/* All rooms are complete: what may have come has come. */
	soak_scan(&hot->src.pool, &who);
	soak_scan(&hot->dst.pool, &who);
	RIG_REQUIRE(soak_wrong == 0);
	fault_idle(hot->prefill);
	fault_idle(hot->decode);
	kvp_client_close(hot->src.client);
	kvp_client_close(hot->dst.client);
	soak_pool_free(&hot->src.pool);
	soak_pool_free(&hot->dst.pool);
	fault_close(&hot->other);
}

static void replaced(struct rig *rig, bool prefill, bool orderly)
{
	static struct hot hot;
	struct rig_daemon *third, *victim;
	uint32_t n_lost;

	memset(&hot, 0, sizeof(hot));
	hot.prefill = rig_daemon_start(rig, "prefill", DAEMON);
	hot.decode = rig_daemon_start(rig, "decode", DAEMON);
	third = rig_daemon_start(rig, prefill ? "prefill2" : "decode2", DAEMON);
	victim = prefill ? hot.prefill : hot.decode;
	rank_begin(&hot.src, hot.prefill, "prefill", 1);
	rank_begin(&hot.dst, hot.decode, "decode", 2);
	fault_room_make(&hot.other, 1000, third, prefill ? hot.decode : hot.prefill);
	fault_connect_both(&hot.other);
	rooms_begin(&hot);
	other_room(&hot);
	if (orderly)
		RIG_REQUIRE(rig_daemon_stop(victim) == 0);
	else
		rig_daemon_kill(victim);
	other_room(&hot);
	rig_daemon_restart(victim, DAEMON);
	await_moving(&hot);
	other_room(&hot);
	n_lost = lost(&hot, OPENED) + lost(&hot, EXPECTED);
	RIG_REQUIRE(n_lost == 0 && lost(&hot, MOVING) == 2 * N_MOVING, "%u of %u parked rooms lost",
		    n_lost, 2 * N_PARKED);
	rooms_end(&hot);
	printf("     %s %s: %u rooms parked, 0 lost; %u moving, %u lost; %llu through others, 0 "
	       "lost\n",
	       victim->name, orderly ? "stopped" : "killed", 2 * N_PARKED, N_MOVING, N_MOVING,
	       (unsigned long long)hot.n_others);
	fflush(stdout);
	hot_end(&hot);
}

static void prefill_killed(struct rig *rig)
{
	replaced(rig, true, false);
}

static void decode_killed(struct rig *rig)
{
	replaced(rig, false, false);
}

static void prefill_stopped(struct rig *rig)
{
	replaced(rig, true, true);
}

static void decode_stopped(struct rig *rig)
{
	replaced(rig, false, true);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "prefill_killed", prefill_killed },
		{ "decode_killed", decode_killed },
		{ "prefill_stopped", prefill_stopped },
		{ "decode_stopped", decode_stopped },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
