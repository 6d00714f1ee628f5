/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Looks for wrong bytes. One process owns the memory of all ranks, so it knows what each byte may
 * be at any moment: rows say to which room, generation and position they belong, pages are used
 * again as soon as they are released, sources are overwritten as soon as they are free. Meanwhile
 * rooms are aborted, daemons are killed, stopped, and stand still, clients go away, pools are
 * paused, and test points keep pieces. What comes too early, too late, or to another place shows.
 *
 * Phases of trouble alternate with calm ones, in which every room has to complete.
 *
 * KVP_SOAK_SECS (8), KVP_SOAK_SEED (random).
 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>

#include "tests/support_faults.h"
#include "tests/support_soak.h"

#define MS UINT64_C(1000000)
#define N_NODES 3u
#define N_SRCS 2u
#define N_DSTS 4u
#define N_RANKS (N_SRCS + N_DSTS)
#define N_ROOMS 48u
#define N_CHUNKS 10u
#define PREFIX 32u      /* a virtual page of any of the ranks */
#define WAIT_S 60       /* for a room to be over */
#define CALM_ROOMS 150u /* of a calm phase, once every pair of ranks has had one */
#define META 1u         /* id of its bytes; the segment has 0 */
#define PHASES (KVP_ROOM_RELEASED + 1)
#define SETTING                                                                              \
	"heartbeat = 200ms\nlost_after = 3s\nretry_min = 10ms\nretry_max = 100ms\n"          \
	"[host]\nslots = 8\nslot_bytes = 64k\n[stop]\ndrain = 100ms\n[timers]\nopen = 10s\n" \
	"[log]\nlevel = error\n"

enum node_state { RUNNING, STOPPING, STANDING };

struct node {
	struct rig_daemon *daemon;
	enum node_state state;
	uint64_t until_ns; /* stands still, or the test point keeps */
	const char *point; /* that keeps; NULL: none */
	uint64_t n_lost;   /* daemons so far */
};

struct rank {
	char name[8];
	struct node *node;
	struct kvp_client *client;
	struct soak_pool pool;
	uint32_t reserved; /* pages that rooms may still take */
	struct kvp_fence *fence;
	uint64_t fence_values[N_ROOMS * 2];
	bool pausing, paused;
};

enum end_state { UNBORN, LIVE, OVER };

struct chunk {
	uint64_t from, to;
	uint8_t set; /* of entries */
	bool fenced;
	uint64_t fence_value, signal_ns;
	uint32_t pages[SOAK_LIST], n_pages;
	struct kvp_side_desc side;
};

struct end {
	struct rank *rank;
	kvp_room_id id;
	enum end_state state;
	bool failed, complete;
	enum kvp_status status;
	uint64_t announce_ns;
};

struct src {
	struct end end;
	uint8_t mask;  /* of entries */
	bool early;    /* submits before it is ready */
	bool refused;  /* a submit was */
	uint32_t word; /* of the rank's fence */
	uint64_t submit_ns;
	uint32_t n_chunks, submitted, signalled, freed, delivered;
	struct chunk chunks[N_CHUNKS];
};

struct dst {
	struct end end;
	uint64_t first, arrived, n_lost; /* n_lost: of its node when it was announced */
	uint32_t pages[SOAK_LIST], n_pages;
	struct kvp_side_desc side;
	struct soak_place places[SOAK_TOKENS];
};

/* Wrong bytes of our own, one of each in the first calm phase: that they are noticed. */
enum spoil { SPOIL_ROW, SPOIL_STALE, SPOIL_GAP, SPOIL_FREE, SPOILS };

static const char *const spoils[SPOILS] = { "a bit of a row", "a row of another generation",
					    "a byte between rows", "a byte of a free page" };

enum mood {
	TROUBLED, /* anything may happen */
	WARMING,  /* nothing happens any more, but sessions may yet be found broken */
	CALM,     /* every room completes */
};

struct room {
	bool busy, aborted, id_spent;
	enum mood mood;                        /* in which it began */
	uint64_t id, generation, prefix, last; /* `last`: end of the tokens */
	uint32_t n_srcs, n_dsts, meta_bytes;
	uint64_t abort_ns, orphan_ns, deadline_ns;
	struct src srcs[2];
	struct dst dsts[2];
};

static struct world {
	struct rig *rig;
	uint64_t seed, now;
	struct node nodes[N_NODES];
	struct rank ranks[N_RANKS]; /* sources first */
	struct room rooms[N_ROOMS];
	enum mood mood;
	bool closing; /* no new rooms */
	uint64_t next_room, trouble_ns;
	uint32_t pairs[N_SRCS][N_DSTS]; /* rooms that completed while warming */
	uint64_t n_rooms, n_chunks, n_delivered, n_completes, n_aborts, n_calm;
	uint64_t n_kills, n_stops, n_stands, n_clients, n_pauses, n_holds;
	uint64_t n_local, n_abort_at[PHASES]; /* by the phase of the end that aborts */
	enum spoil spoil;                     /* the next one; SPOILS: all are done */
	uint64_t fails[40];
} all; /* for callbacks; passed on otherwise */

static uint64_t draw(struct world *world, uint64_t n)
{
	return rig_random(&world->seed) % KVP_MAX(n, UINT64_C(1));
}

static bool chance(struct world *world, uint32_t percent)
{
	return draw(world, 100) < percent;
}

/* Mostly at once, now and then late. */
static uint64_t soon(struct world *world)
{
	static const uint32_t up_to_us[] = { 1, 1, 300, 1000, 3000, 20000 };

	return world->now + draw(world, up_to_us[draw(world, 6)] * UINT64_C(1000));
}

static struct rig_key key_of(const struct room *room)
{
	return (struct rig_key){ room->id, room->generation };
}

static struct soak_who who(const struct room *room, const struct end *end, const char *what)
{
	return (struct soak_who){ end->rank->name, what, room->id, room->generation };
}

static void ignored(void *arg, enum kvp_status status, const char *text)
{
	(void)arg;
	(void)status;
	(void)text;
}

static bool may_wait(int rc)
{
	return rc == -ENOTCONN || rc == -EAGAIN;
}

/* ---- making rooms --------------------------------------------------------------------------- */

static void chunk_add(struct world *world, struct src *src, uint64_t from, uint64_t to, uint8_t set)
{
	struct chunk *chunk = &src->chunks[src->n_chunks++];

	memset(chunk, 0, sizeof(*chunk));
	chunk->from = from;
	chunk->to = to;
	chunk->set = set;
	chunk->fenced = chance(world, 30);
	soak_side(&src->end.rank->pool, from, to, chunk->pages, &chunk->side);
	chunk->n_pages = KVP_MAX(chunk->side.n_pages, 1u);
}

/* Cuts the tokens into up to four ranges; layer by layer, or all entries at once. Only the last
 * chunk may be without tokens. */
static void chunks_plan(struct world *world, const struct room *room, struct src *src)
{
	bool by_layer = (src->mask & 1) && (src->mask & 6) && chance(world, 25);
	uint32_t cuts = (uint32_t)draw(world, 4), i;
	uint64_t from = room->prefix, to;

	for (i = 0; i <= cuts; i++, from = to) {
		to = i == cuts ? room->last : from + draw(world, room->last - from + 1);
		if (to == from)
			continue;
		if (by_layer)
			chunk_add(world, src, from, to, 1);
		chunk_add(world, src, from, to, by_layer ? src->mask & 6 : src->mask);
	}
	if (src->n_chunks == 0 || chance(world, 10))
		chunk_add(world, src, room->last, room->last, src->mask);
}

static uint64_t draw_tokens(struct world *world)
{
	static const uint32_t most[] = { 8, 32, 32, 64, 64, SOAK_TOKENS };

	return draw(world, most[draw(world, 6)]) + 1;
}

static void src_plan(struct world *world, struct room *room, struct rank *rank, uint8_t mask)
{
	struct src *src = &room->srcs[room->n_srcs];

	memset(src, 0, sizeof(*src));
	src->end.rank = rank;
	src->end.announce_ns = soon(world);
	src->mask = mask;
	src->early = chance(world, 50);
	src->word = (uint32_t)(room - world->rooms) * 2 + room->n_srcs++;
	chunks_plan(world, room, src);
}

static void dst_plan(struct world *world, struct room *room, struct rank *rank, bool window)
{
	struct dst *dst = &room->dsts[room->n_dsts++];

	memset(dst, 0, sizeof(*dst));
	dst->end.rank = rank;
	dst->end.announce_ns = soon(world);
	dst->first =
		window ? room->prefix + draw(world, room->last - room->prefix + 1) : room->prefix;
	soak_side(&rank->pool, dst->first, room->last, dst->pages, &dst->side);
	dst->n_pages = KVP_MAX(dst->side.n_pages, 1u);
}

/* One source or two with a layer each; one rank of decode, or two that share what is packed. */
static void ends_plan(struct world *world, struct room *room)
{
	struct rank *srcs = world->ranks, *dsts = world->ranks + N_SRCS;
	uint32_t a = (uint32_t)draw(world, N_SRCS), d = (uint32_t)draw(world, N_DSTS);
	bool both = d < 2 && chance(world, 50);

	if (chance(world, 25)) {
		src_plan(world, room, &srcs[a], 1 << 0 | 1 << 2 | 1 << SOAK_BLOB);
		src_plan(world, room, &srcs[1 - a], 1 << 1);
	} else {
		src_plan(world, room, &srcs[a], (1 << SOAK_ENTRIES) - 1);
	}
	dst_plan(world, room, &dsts[both ? 0 : d], !both && chance(world, 25));
	if (both)
		dst_plan(world, room, &dsts[1], false);
}

static uint32_t src_pages(const struct src *src)
{
	uint32_t i, n = 0;

	for (i = 0; i < src->n_chunks; i++)
		n += src->chunks[i].n_pages;
	return n;
}

static bool has_space(const struct rank *rank, uint32_t pages)
{
	return !rank->pausing && rank->reserved + pages <= SOAK_PAGES;
}

/* Pages for all that the room may need, or none: rooms never wait for each other's. */
static bool room_reserve(struct room *room)
{
	uint32_t i;

	for (i = 0; i < room->n_srcs; i++)
		if (!has_space(room->srcs[i].end.rank, src_pages(&room->srcs[i])))
			return false;
	for (i = 0; i < room->n_dsts; i++)
		if (!has_space(room->dsts[i].end.rank, room->dsts[i].n_pages))
			return false;
	for (i = 0; i < room->n_srcs; i++)
		room->srcs[i].end.rank->reserved += src_pages(&room->srcs[i]);
	for (i = 0; i < room->n_dsts; i++)
		room->dsts[i].end.rank->reserved += room->dsts[i].n_pages;
	return true;
}

/* The same id again, if it can be. */
static void room_begin(struct world *world, struct room *room)
{
	uint64_t id = room->id;
	bool was_aborted = room->aborted;
	bool again = id && !room->id_spent && chance(world, 60) &&
		     (world->mood == TROUBLED || room->mood == world->mood);

	if (world->closing)
		return;
	memset(room, 0, sizeof(*room));
	room->id = again ? id : ++world->next_room;
	room->generation = ++world->n_rooms;
	room->last = draw_tokens(world);
	if (room->last >= PREFIX && chance(world, 30))
		room->prefix = PREFIX * (1 + draw(world, room->last / PREFIX));
	room->meta_bytes = (uint32_t)draw(world, 200);
	room->mood = world->mood;
	/* An offer of the life before may be here still, when the abort is yet to come. */
	room->aborted = again && was_aborted;
	room->deadline_ns = world->now + WAIT_S * 1000 * MS;
	ends_plan(world, room);
	if (world->mood == TROUBLED && chance(world, 20))
		room->abort_ns = soon(world);
	if (room_reserve(room)) {
		room->busy = true;
		world->n_local += room->srcs[0].end.rank->node == room->dsts[0].end.rank->node;
	} else {
		room->id_spent = !again; /* was never used: the number is not either */
	}
}

/* ---- failures ------------------------------------------------------------------------------- */

/* Is it one that this room may have met? */
static bool is_expected(const struct room *room, enum kvp_status status)
{
	switch ((int)status) {
	/* An offer of the life before, whose end is on its way, has met the sender of this one:
	 * that life was aborted, or ended by trouble. */
	case KVP_STATUS_EXISTS:
	case KVP_STATUS_MISMATCH:
	case KVP_STATUS_ABORTED:
		return room->aborted || room->mood != CALM;
	case KVP_STATUS_CLIENT_LOST:
	case KVP_STATUS_DAEMON_LOST:
	case KVP_STATUS_PEER_LOST:
	case KVP_STATUS_POOL_GONE:
	case KVP_STATUS_STOPPING:
	case KVP_STATUS_TIMEOUT: /* of `open`, when the other end was lost with its daemon */
	case KVP_STATUS_TRANSPORT:
	case KVP_STATUS_UNREACHABLE:
		return room->mood != CALM;
	default:
		return false;
	}
}

static void end_failed(struct world *world, struct room *room, struct end *end,
		       const struct kvp_room_state *state)
{
	if (end->failed)
		return;
	RIG_REQUIRE(is_expected(room, state->status),
		    "room 0x%llx generation %llu at %s, phase %u: %s: %s",
		    (unsigned long long)room->id, (unsigned long long)room->generation,
		    end->rank->name, state->phase, kvp_status_name(state->status), state->reason);
	end->failed = true;
	end->status = state->status;
	world->fails[state->status]++;
	if (!room->orphan_ns)
		room->orphan_ns = world->now + draw(world, 500) * MS;
}

static void end_over(struct end *end)
{
	kvp_room_forget(end->rank->client, end->id);
	end->state = OVER;
}

/* ---- sources -------------------------------------------------------------------------------- */

static void src_open(struct room *room, struct src *src)
{
	struct kvp_open open = KVP_OPEN_INIT;
	uint32_t idx = (uint32_t)(src - room->srcs);
	int rc;

	open.room = room->id;
	open.sender = idx;
	open.pool = src->end.rank->pool.pool.id;
	open.sides = &src->end.rank->pool.side;
	open.n_sides = 1;
	open.entry_mask = &src->mask;
	open.mask_bytes = 1;
	open.label = "soak";
	rc = kvp_open(src->end.rank->client, &open, ignored, NULL, &src->end.id);
	RIG_REQUIRE(rc == 0 || may_wait(rc), "%s", kvp_last_error(src->end.rank->client));
	if (rc == 0)
		src->end.state = LIVE;
}

/* The answer may come when the room is over, and another in its place. */
static void *submit_arg(const struct room *room, const struct src *src)
{
	return (void *)(uintptr_t)(room->generation * N_ROOMS * 2 +
				   (uint32_t)(room - all.rooms) * 2 + (uint32_t)(src - room->srcs));
}

static void submitted(void *arg, enum kvp_status status, const char *text)
{
	uint64_t n = (uintptr_t)arg;
	struct room *room = &all.rooms[n / 2 % N_ROOMS];

	if (status == KVP_OK || room->generation != n / (N_ROOMS * 2))
		return;
	RIG_REQUIRE(is_expected(room, status) || status == KVP_STATUS_NOT_FOUND ||
			    status == KVP_STATUS_ORDER,
		    "submit: %s: %s", kvp_status_name(status), text);
	room->srcs[n % 2].refused = true; /* the room has failed, and will say so */
}

static int chunk_submit(const struct room *room, struct src *src, struct chunk *chunk)
{
	struct rank *rank = src->end.rank;
	struct kvp_segment segment = { .entry = SOAK_BLOB, .bytes = SOAK_SEGMENT };
	struct kvp_chunk body = KVP_CHUNK_INIT;
	struct rig_key key = key_of(room);
	uint8_t meta[256];

	body.start = chunk->from;
	body.tokens = chunk->to - chunk->from;
	body.sides = &chunk->side;
	body.n_sides = 1;
	body.entry_set = &chunk->set;
	body.set_bytes = 1;
	body.last = chunk == &src->chunks[src->n_chunks - 1];
	if (chunk->fenced) {
		chunk->fence_value = ++rank->fence_values[src->word];
		body.fence = rank->fence;
		body.fence_word = src->word;
		body.fence_value = chunk->fence_value;
	}
	if (body.last && src == room->srcs) {
		segment.offset = (uint64_t)chunk->pages[0] * SOAK_SEGMENT;
		body.segments = &segment;
		body.n_segments = 1;
		rig_put_segment(meta, room->meta_bytes, &key, META);
		body.meta = room->meta_bytes ? meta : NULL;
		body.meta_bytes = room->meta_bytes;
	}
	return kvp_submit(rank->client, src->end.id, &body, submitted, submit_arg(room, src), NULL);
}

static void src_submit(struct world *world, const struct room *room, struct src *src)
{
	struct chunk *chunk = &src->chunks[src->submitted];
	struct soak_pool *pool = &src->end.rank->pool;
	struct rig_key key = key_of(room);
	int rc;

	soak_take(pool, chunk->pages, chunk->n_pages);
	if (!chunk->fenced)
		soak_source_write(pool, &chunk->side, chunk->from, chunk->to, &key);
	rc = chunk_submit(room, src, chunk);
	src->submit_ns = soon(world);
	if (rc == 0) {
		world->n_chunks++;
		src->submitted++;
		chunk->signal_ns = soon(world);
		return;
	}
	soak_give(pool, chunk->pages, chunk->n_pages);
	RIG_REQUIRE(may_wait(rc) || rc == -EREMOTEIO, "%s", kvp_last_error(src->end.rank->client));
}

/* Rows behind a fence are written late: until then there is something else. In order, since a word
 * that has reached a chunk's value has reached those of the chunks before. */
static void src_signal(const struct world *world, const struct room *room, struct src *src)
{
	struct rig_key key = key_of(room);

	for (; src->signalled < src->submitted; src->signalled++) {
		struct chunk *chunk = &src->chunks[src->signalled];

		if (!chunk->fenced || src->signalled < src->freed)
			continue;
		if (chunk->signal_ns > world->now)
			return;
		soak_source_write(&src->end.rank->pool, &chunk->side, chunk->from, chunk->to, &key);
		kvp_fence_signal(src->end.rank->fence, src->word, chunk->fence_value);
	}
}

/* Sources that are free are something else at once. */
static void src_free(struct world *world, struct src *src, uint32_t n)
{
	struct soak_pool *pool = &src->end.rank->pool;

	RIG_REQUIRE(n <= src->submitted, "source free %u of %u", n, src->submitted);
	for (; src->freed < n; src->freed++) {
		struct chunk *chunk = &src->chunks[src->freed];

		soak_source_scribble(pool, chunk->pages, chunk->n_pages, (uint8_t)draw(world, 256));
		soak_give(pool, chunk->pages, chunk->n_pages);
		src->end.rank->reserved -= chunk->n_pages;
	}
}

/* The rows of a chunk have landed at all destinations whose pages are still theirs. */
static void chunk_landed(const struct room *room, const struct chunk *chunk)
{
	uint32_t i;

	for (i = 0; i < room->n_dsts; i++) {
		const struct dst *dst = &room->dsts[i];
		struct soak_who whose = who(room, &dst->end, "delivered chunk");
		uint64_t from = KVP_MAX(chunk->from, dst->first);

		if (dst->end.state == LIVE && from < chunk->to)
			soak_dest_rows(&dst->end.rank->pool, dst->places + (from - dst->first),
				       chunk->to - from, chunk->set, &whose);
	}
}

static void src_over(struct world *world, struct src *src)
{
	uint32_t i;

	src_free(world, src, src->submitted);
	for (i = src->submitted; i < src->n_chunks; i++)
		src->end.rank->reserved -= src->chunks[i].n_pages;
	end_over(&src->end);
}

static void src_look(struct world *world, struct room *room, struct src *src)
{
	struct kvp_room_state state = rig_state(src->end.rank->client, src->end.id);

	RIG_REQUIRE(!(state.complete && state.failed));
	if (state.phase >= KVP_ROOM_READY && state.phase <= KVP_ROOM_DONE)
		RIG_REQUIRE(state.prefix == room->prefix && state.end == room->last,
			    "prefix %llu end %llu", (unsigned long long)state.prefix,
			    (unsigned long long)state.end);
	if (state.failed)
		end_failed(world, room, &src->end, &state);
	src->end.complete = state.complete;
	for (; src->delivered < KVP_MIN(state.delivered, src->submitted); src->delivered++) {
		world->n_delivered++;
		chunk_landed(room, &src->chunks[src->delivered]);
	}
	src_free(world, src, KVP_MIN(state.source_free, src->submitted));
	if (state.released)
		src_over(world, src);
	else if (!state.failed && src->submitted < src->n_chunks && !src->refused &&
		 world->now >= src->submit_ns && (src->early || state.phase >= KVP_ROOM_READY))
		src_submit(world, room, src);
	if (src->end.state == LIVE)
		src_signal(world, room, src);
}

static void src_step(struct world *world, struct room *room, struct src *src)
{
	if (src->end.state == UNBORN && world->now >= src->end.announce_ns &&
	    !src->end.rank->pausing)
		src_open(room, src);
	if (src->end.state == LIVE)
		src_look(world, room, src);
}

/* ---- destinations --------------------------------------------------------------------------- */

static int dst_try(const struct room *room, struct dst *dst)
{
	struct kvp_segment segment = { .entry = SOAK_BLOB, .bytes = SOAK_SEGMENT };
	struct kvp_expect_sender senders[2];
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_side_desc side = dst->side;
	uint32_t i;

	for (i = 0; i < room->n_srcs; i++)
		senders[i] = (struct kvp_expect_sender){
			.address = room->srcs[i].end.rank->node->daemon->address,
			.sender = i,
			.n_dests = room->n_dsts,
		};
	if (dst->first > room->prefix)
		side.first = dst->first;
	segment.offset = (uint64_t)dst->pages[0] * SOAK_SEGMENT;
	expect.room = room->id;
	expect.dest = (uint32_t)(dst - room->dsts);
	expect.pool = dst->end.rank->pool.pool.id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.segments = &segment;
	expect.n_segments = 1;
	expect.senders = senders;
	expect.n_senders = room->n_srcs;
	expect.meta_from = room->meta_bytes ? 0 : -1;
	expect.prefix = room->prefix;
	expect.end = room->last;
	expect.label = "soak";
	return kvp_expect(dst->end.rank->client, &expect, ignored, NULL, &dst->end.id);
}

static void dst_expect(const struct room *room, struct dst *dst)
{
	struct soak_pool *pool = &dst->end.rank->pool;
	struct rig_key key = key_of(room);
	int rc;

	soak_take(pool, dst->pages, dst->n_pages);
	rc = dst_try(room, dst);
	if (rc) {
		RIG_REQUIRE(may_wait(rc), "%s", kvp_last_error(dst->end.rank->client));
		soak_give(pool, dst->pages, dst->n_pages);
		return;
	}
	dst->end.state = LIVE;
	dst->arrived = dst->first;
	dst->n_lost = dst->end.rank->node->n_lost;
	soak_dest_begin(pool, &dst->side, dst->first, room->last, &key, dst->places);
}

/* What the daemons have brought is changed, looked at, and put right again. */
static void spoil_complete(struct world *world, const struct room *room, struct dst *dst)
{
	struct soak_pool *soak = &dst->end.rank->pool;
	struct soak_who whose = who(room, &dst->end, "(spoiled on purpose)");
	struct rig_key stale = { room->id, room->generation - 1 };
	const struct kvp_entry_desc *narrow = &soak->pool.entries[1];
	uint8_t *page =
		soak->pool.mem + narrow->offset + (uint64_t)dst->pages[0] * narrow->page_stride;

	if (dst->first == room->last || !dst->places[0].mine || world->mood != CALM)
		return;
	page += (uint64_t)dst->places[0].own * narrow->row_stride;
	if (world->spoil == SPOIL_ROW)
		*page ^= 1;
	else if (world->spoil == SPOIL_GAP)
		page[narrow->row_bytes] ^= 0x80;
	else
		rig_put_rows(soak->pool.mem, &soak->pool, &dst->side, dst->first, dst->first + 1,
			     &stale);
	soak_dest_all(soak, dst->pages, dst->n_pages, &whose);
	RIG_REQUIRE(soak_wrong > 0, "%s is not noticed", spoils[world->spoil]);
	printf("noticed: %s, %llu bytes\n", spoils[world->spoil++], (unsigned long long)soak_wrong);
	soak_wrong = 0;
	soak_dest_repair(soak, dst->pages, dst->n_pages);
}

static void dst_complete(struct world *world, const struct room *room, struct dst *dst,
			 const struct kvp_room_state *state)
{
	struct soak_who whose = who(room, &dst->end, "complete destination");
	struct rig_key key = key_of(room);
	uint8_t meta[256];

	if (dst->end.complete)
		return;
	dst->end.complete = true;
	world->n_completes++;
	soak_dest_all(&dst->end.rank->pool, dst->pages, dst->n_pages, &whose);
	if (world->spoil < SPOIL_FREE && soak_wrong == 0)
		spoil_complete(world, room, dst);
	rig_put_segment(meta, room->meta_bytes, &key, META);
	RIG_REQUIRE(state->meta_bytes == room->meta_bytes &&
			    (!room->meta_bytes || !memcmp(state->meta, meta, room->meta_bytes)),
		    "room 0x%llx: meta of %u bytes, not %u", (unsigned long long)room->id,
		    state->meta_bytes, room->meta_bytes);
}

static void dst_over(struct world *world, const struct room *room, struct dst *dst)
{
	struct soak_pool *pool = &dst->end.rank->pool;
	struct soak_who whose = who(room, &dst->end, "released destination");

	(void)world;
	if (dst->end.complete)
		soak_dest_all(pool, dst->pages, dst->n_pages, &whose);
	soak_dest_end(pool, dst->pages, dst->n_pages, &whose);
	soak_give(pool, dst->pages, dst->n_pages);
	dst->end.rank->reserved -= dst->n_pages;
	end_over(&dst->end);
}

static void dst_look(struct world *world, struct room *room, struct dst *dst)
{
	struct kvp_room_state state = rig_state(dst->end.rank->client, dst->end.id);
	struct soak_who whose = who(room, &dst->end, "arrived prefix");

	RIG_REQUIRE(!(state.complete && state.failed));
	RIG_REQUIRE(state.arrived <= room->last, "arrived %llu of %llu",
		    (unsigned long long)state.arrived, (unsigned long long)room->last);
	if (state.failed)
		end_failed(world, room, &dst->end, &state);
	if (state.arrived > dst->arrived) {
		soak_dest_rows(&dst->end.rank->pool, dst->places + (dst->arrived - dst->first),
			       state.arrived - dst->arrived, (1 << SOAK_ROWS) - 1, &whose);
		dst->arrived = state.arrived;
	}
	if (state.complete)
		dst_complete(world, room, dst, &state);
	if (state.released)
		dst_over(world, room, dst);
}

static void dst_step(struct world *world, struct room *room, struct dst *dst)
{
	if (dst->end.state == UNBORN && world->now >= dst->end.announce_ns &&
	    !dst->end.rank->pausing)
		dst_expect(room, dst);
	if (dst->end.state == LIVE)
		dst_look(world, room, dst);
}

/* ---- rooms ---------------------------------------------------------------------------------- */

static struct end *room_end(struct room *room, uint32_t i)
{
	return i < room->n_srcs ? &room->srcs[i].end : &room->dsts[i - room->n_srcs].end;
}

static uint32_t room_ends(const struct room *room)
{
	return room->n_srcs + room->n_dsts;
}

/* An end that is not to be announced any more. */
static void end_skip(struct room *room, uint32_t i)
{
	struct end *end = room_end(room, i);

	end->rank->reserved -=
		i < room->n_srcs ? src_pages(&room->srcs[i]) : room->dsts[i - room->n_srcs].n_pages;
	end->state = OVER;
}

static void end_abort(struct world *world, struct room *room, struct end *end)
{
	room->aborted = true;
	world->n_aborts++;
	world->n_abort_at[rig_state(end->rank->client, end->id).phase]++;
	RIG_CALL(end->rank->client, kvp_abort(end->rank->client, end->id, "soak"));
}

static void room_abort(struct world *world, struct room *room)
{
	struct end *end = room_end(room, (uint32_t)draw(world, room_ends(room)));

	if (end->state == UNBORN)
		return; /* later */
	room->abort_ns = 0;
	if (end->state == LIVE)
		end_abort(world, room, end);
}

/* An end has failed, and those that had not met it yet would wait for long. */
static void room_orphans(struct world *world, struct room *room)
{
	uint32_t i;

	room->orphan_ns = world->now + 500 * MS;
	for (i = 0; i < room_ends(room); i++) {
		struct end *end = room_end(room, i);

		if (end->state == UNBORN)
			end_skip(room, i);
		else if (end->state == LIVE && !end->failed && !end->complete)
			end_abort(world, room, end);
	}
}

/* Decode's word counts: what a sender calls complete cannot have failed there, unless the word was
 * lost with decode's daemon on its way to the client, which may have expected it again then. */
static void room_agrees(const struct room *room)
{
	uint32_t i, k;

	for (i = 0; i < room->n_srcs; i++)
		for (k = 0; k < room->n_dsts; k++)
			RIG_REQUIRE(!room->srcs[i].end.complete || !room->dsts[k].end.failed ||
					    room->dsts[k].end.rank->node->n_lost !=
						    room->dsts[k].n_lost,
				    "room 0x%llx is complete at its sender, and failed: %s",
				    (unsigned long long)room->id,
				    kvp_status_name(room->dsts[k].end.status));
}

static void room_over(struct world *world, struct room *room)
{
	uint32_t i, k, n = 0;

	room_agrees(room);
	room->busy = false;
	for (i = 0; i < room_ends(room); i++)
		n += room_end(room, i)->complete;
	world->n_calm += room->mood == CALM;
	RIG_REQUIRE(n == room_ends(room) || room->mood != CALM);
	if (room->mood != WARMING || n < room_ends(room))
		return;
	for (i = 0; i < room->n_srcs; i++)
		for (k = 0; k < room->n_dsts; k++)
			world->pairs[room->srcs[i].end.rank - world->ranks]
				    [room->dsts[k].end.rank - world->ranks - N_SRCS]++;
}

static void room_late(const struct world *world, struct room *room)
{
	uint32_t i;

	for (i = 0; i < room_ends(room); i++) {
		const struct end *end = room_end(room, i);
		struct kvp_room_state state = KVP_ROOM_STATE_INIT;

		if (end->state == LIVE)
			state = rig_state(end->rank->client, end->id);
		printf("  %s: state %d phase %u failed %u complete %u source_free %u arrived "
		       "%llu\n",
		       end->rank->name, (int)end->state, state.phase, state.failed, state.complete,
		       state.source_free, (unsigned long long)state.arrived);
	}
	rig_die(__FILE__, __LINE__, "room is over", "room 0x%llx after %d s, room %llu of the run",
		(unsigned long long)room->id, WAIT_S, (unsigned long long)world->n_rooms);
}

static void room_step(struct world *world, struct room *room)
{
	uint32_t i, over = 0;

	for (i = 0; i < room->n_srcs; i++)
		src_step(world, room, &room->srcs[i]);
	for (i = 0; i < room->n_dsts; i++)
		dst_step(world, room, &room->dsts[i]);
	if (room->abort_ns && world->now >= room->abort_ns)
		room_abort(world, room);
	if (room->orphan_ns && world->now >= room->orphan_ns)
		room_orphans(world, room);
	for (i = 0; i < room_ends(room); i++)
		over += room_end(room, i)->state == OVER;
	if (over == room_ends(room))
		room_over(world, room);
	else if (world->now > room->deadline_ns)
		room_late(world, room);
}

/* ---- ranks ---------------------------------------------------------------------------------- */

static void rank_connect(struct rank *rank)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	rank->client = rig_client(rank->node->daemon, rank->name);
	desc.entries = rank->pool.pool.entries;
	desc.n_entries = rank->pool.pool.n_entries;
	desc.fds = &rank->pool.pool.fd;
	desc.n_fds = 1;
	desc.layout_tag = "soak 1";
	desc.tag_bytes = 6;
	desc.label = rank->name;
	RIG_CALL(rank->client, kvp_pool_register(rank->client, &desc, &rank->pool.pool.id));
	RIG_CALL(rank->client, kvp_fence_create(rank->client, N_ROOMS * 2, &rank->fence));
	memset(rank->fence_values, 0, sizeof(rank->fence_values));
}

static void rank_make(struct world *world, uint32_t i)
{
	static const struct {
		const char *name;
		uint32_t node, dcp_size, dcp_rank, interleave;
	} list[N_RANKS] = {
		{ "p0", 0, 1, 0, 1 }, { "p1", 1, 1, 0, 1 }, { "d0", 1, 2, 0, 1 },
		{ "d1", 2, 2, 1, 1 }, { "d2", 0, 1, 0, 1 }, { "d3", 2, 4, 3, 4 },
	};
	struct rank *rank = &world->ranks[i];

	memset(rank, 0, sizeof(*rank));
	snprintf(rank->name, sizeof(rank->name), "%s", list[i].name);
	rank->node = &world->nodes[list[i].node];
	soak_pool_make(&rank->pool, list[i].dcp_size, list[i].dcp_rank, list[i].interleave,
		       rig_random(&world->seed));
	rank_connect(rank);
}

static void rank_scan(const struct rank *rank)
{
	struct soak_who whose = { rank->name, "scan", 0, 0 };

	soak_scan(&rank->pool, &whose);
}

/* The engine dies: its memory is nobody's any more, and its rooms fail at the other ends. */
static void rank_dies(struct world *world, uint32_t idx)
{
	struct rank *rank = &world->ranks[idx];
	uint32_t r, i;

	rank_scan(rank);
	kvp_client_close(rank->client);
	for (r = 0; r < N_ROOMS; r++) {
		struct room *room = &world->rooms[r];

		for (i = 0; room->busy && i < room_ends(room); i++) {
			if (room_end(room, i)->rank != rank)
				continue;
			room_end(room, i)->state = OVER;
			room->id_spent = true; /* its daemon has yet to see it */
			if (!room->orphan_ns)
				room->orphan_ns = world->now + draw(world, 500) * MS;
		}
	}
	soak_pool_free(&rank->pool);
	rank_make(world, idx);
	world->n_clients++;
}

static void paused(void *arg, enum kvp_status status, const char *text)
{
	struct rank *rank = arg;

	RIG_REQUIRE(status == KVP_OK || status == KVP_STATUS_DAEMON_LOST, "pause: %s: %s",
		    kvp_status_name(status), text);
	rank->paused = status == KVP_OK;
	rank->pausing = rank->paused; /* a daemon that had been lost before has the pool again */
}

static bool rank_is_used(struct world *world, const struct rank *rank)
{
	uint32_t r, i;

	for (r = 0; r < N_ROOMS; r++)
		for (i = 0; world->rooms[r].busy && i < room_ends(&world->rooms[r]); i++)
			if (room_end(&world->rooms[r], i)->rank == rank &&
			    room_end(&world->rooms[r], i)->state == LIVE)
				return true;
	return false;
}

static void rank_pause(struct world *world, struct rank *rank)
{
	rank->pausing = true;
	if (kvp_pool_pause(rank->client, rank->pool.pool.id, paused, rank) != 0)
		rank->pausing = false; /* not connected now */
	world->n_pauses += rank->pausing;
}

/* Paused: every byte is the client's alone until it resumes. */
static void rank_resume(struct world *world, struct rank *rank)
{
	if (!rank->paused || rank_is_used(world, rank))
		return;
	rank_scan(rank);
	RIG_CALL(rank->client,
		 kvp_pool_resume(rank->client, rank->pool.pool.id, &rank->pool.pool.fd, 1));
	rank->paused = rank->pausing = false;
}

/* ---- trouble -------------------------------------------------------------------------------- */

static bool node_is_free(const struct world *world, const struct node *node)
{
	uint32_t i;

	for (i = 0; i < N_RANKS; i++)
		if (world->ranks[i].node == node && world->ranks[i].pausing)
			return false;
	return node->state == RUNNING && !node->point;
}

static void node_kill(struct world *world, struct node *node)
{
	rig_daemon_kill(node->daemon);
	node->n_lost++;
	rig_daemon_restart(node->daemon, NULL);
	world->n_kills++;
}

static void node_stop(struct world *world, struct node *node)
{
	RIG_REQUIRE(kill(node->daemon->pid, SIGTERM) == 0, "%s", strerror(errno));
	node->state = STOPPING;
	node->n_lost++;
	world->n_stops++;
}

static void node_stand(struct world *world, struct node *node)
{
	RIG_REQUIRE(kill(node->daemon->pid, SIGSTOP) == 0, "%s", strerror(errno));
	node->state = STANDING;
	node->until_ns = world->now + (chance(world, 20) ? 3500 : draw(world, 200)) * MS;
	world->n_stands++;
}

static void node_hold(struct world *world, struct node *node)
{
	static const char *const points[] = { "offer", "want",    "grant", "gather",
					      "send",  "scatter", "landed" };

#ifdef KVP_TEST
	node->point = points[draw(world, KVP_ARRAY_SIZE(points))];
	fault_hold(node->daemon, node->point, true);
	node->until_ns = world->now + draw(world, 60) * MS;
	world->n_holds++;
#else
	(void)world;
	(void)node;
	(void)points;
#endif
}

static void trouble(struct world *world)
{
	struct node *node = &world->nodes[draw(world, N_NODES)];
	uint32_t idx = (uint32_t)draw(world, N_RANKS), what = (uint32_t)draw(world, 12);
	struct rank *rank = &world->ranks[idx];

	if (world->now < world->trouble_ns)
		return;
	world->trouble_ns = world->now + draw(world, 250) * MS;
	if (what >= 8)
		node = rank->node;
	if (!node_is_free(world, node))
		return;
	if (what < 2) {
		node_kill(world, node);
	} else if (what < 4) {
		node_stop(world, node);
	} else if (what < 5) {
		node_stand(world, node);
	} else if (what < 8) {
		node_hold(world, node);
	} else if (what < 9) {
		rank_dies(world, idx);
	} else if (what < 10) {
		rank_pause(world, rank);
	}
}

/* Brings back what is away and due. */
static void node_step(struct world *world, struct node *node)
{
	int status;

	RIG_REQUIRE(node->state != RUNNING || waitpid(node->daemon->pid, &status, WNOHANG) == 0,
		    "%s ended by itself: status 0x%x", node->daemon->name, status);
	if (node->state == STOPPING && waitpid(node->daemon->pid, &status, WNOHANG) > 0) {
		RIG_REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0,
			    "%s: status 0x%x when stopped", node->daemon->name, status);
		rig_daemon_restart(node->daemon, NULL);
		node->state = RUNNING;
	} else if (node->state == STANDING && world->now >= node->until_ns) {
		RIG_REQUIRE(kill(node->daemon->pid, SIGCONT) == 0, "%s", strerror(errno));
		node->state = RUNNING;
	} else if (node->point && world->now >= node->until_ns) {
		fault_hold(node->daemon, node->point, false);
		node->point = NULL;
	}
}

/* ---- turns ---------------------------------------------------------------------------------- */

static void clients_turn(struct world *world)
{
	struct pollfd fds[N_RANKS];
	uint32_t i;

	for (i = 0; i < N_RANKS; i++)
		fds[i] = (struct pollfd){ .fd = kvp_client_fd(world->ranks[i].client),
					  .events = kvp_client_events(world->ranks[i].client) };
	(void)poll(fds, N_RANKS, 1);
	for (i = 0; i < N_RANKS; i++)
		RIG_REQUIRE(kvp_process(world->ranks[i].client) >= 0);
	world->now = soak_now = rig_now_ns(); /* one turn is one moment */
}

/* Returns how many rooms there are. */
static uint32_t turn(struct world *world)
{
	uint32_t i, busy = 0;

	clients_turn(world);
	for (i = 0; i < N_ROOMS; i++) {
		if (!world->rooms[i].busy)
			room_begin(world, &world->rooms[i]);
		if (world->rooms[i].busy)
			room_step(world, &world->rooms[i]);
		busy += world->rooms[i].busy;
	}
	for (i = 0; i < N_NODES; i++)
		node_step(world, &world->nodes[i]);
	for (i = 0; i < N_RANKS; i++)
		rank_resume(world, &world->ranks[i]);
	RIG_REQUIRE(soak_wrong == 0, "%llu wrong bytes", (unsigned long long)soak_wrong);
	return busy;
}

/* Nobody has any business in a page that has been given back. */
static void spoil_free(struct world *world)
{
	struct rank *rank = &world->ranks[N_SRCS];
	struct soak_pool *soak = &rank->pool;
	uint8_t *mem = soak->pool.mem + soak->pool.entries[0].offset +
		       (uint64_t)soak->free[soak->n_free - 1] * soak->pool.entries[0].page_stride;

	*mem ^= 0x10;
	rank_scan(rank);
	*mem ^= 0x10;
	RIG_REQUIRE(soak_wrong == 1, "%llu bytes of a free page", (unsigned long long)soak_wrong);
	printf("noticed: %s\n", spoils[world->spoil++]);
	soak_wrong = 0;
}

/* No new rooms until those that there are, and all trouble, are over. */
static void settle(struct world *world)
{
	uint32_t i, away = 1;

	world->closing = true;
	while (away) {
		away = turn(world);
		for (i = 0; i < N_NODES; i++)
			away += !node_is_free(world, &world->nodes[i]);
	}
	world->closing = false;
	for (i = 0; i < N_RANKS; i++)
		rank_scan(&world->ranks[i]);
	if (world->spoil == SPOIL_FREE && soak_wrong == 0)
		spoil_free(world);
}

static void with_trouble(struct world *world, uint64_t until_ns)
{
	while (world->now < until_ns) {
		(void)turn(world);
		trouble(world);
	}
}

static bool is_warm(const struct world *world)
{
	uint32_t s, d;

	for (s = 0; s < N_SRCS; s++)
		for (d = 0; d < N_DSTS; d++)
			if (!world->pairs[s][d])
				return false;
	return true;
}

/* What was cut has been noticed once each pair of ranks has had a room; then none may fail. */
static void without_trouble(struct world *world)
{
	uint64_t n = world->n_calm + CALM_ROOMS;

	memset(world->pairs, 0, sizeof(world->pairs));
	world->mood = WARMING;
	while (!is_warm(world))
		(void)turn(world);
	world->mood = CALM;
	while (world->n_calm < n || world->spoil < SPOIL_FREE)
		(void)turn(world);
	settle(world);
	world->mood = TROUBLED;
}

static unsigned long long ull(uint64_t value)
{
	return value;
}

static void summary(const struct world *world, uint64_t seed, double secs)
{
	uint64_t n_restarts = world->n_kills + world->n_stops;
	uint32_t i;

	printf("%.1f s, seed %llu: rooms %llu, chunks %llu, delivered %llu, completes %llu (calm "
	       "rooms %llu)\n",
	       secs, ull(seed), ull(world->n_rooms), ull(world->n_chunks), ull(world->n_delivered),
	       ull(world->n_completes), ull(world->n_calm));
	printf("aborts %llu, restarts %llu (killed %llu, stopped %llu), standing still %llu, "
	       "clients lost %llu, pools paused %llu, points held %llu\n",
	       ull(world->n_aborts), ull(n_restarts), ull(world->n_kills), ull(world->n_stops),
	       ull(world->n_stands), ull(world->n_clients), ull(world->n_pauses),
	       ull(world->n_holds));
	printf("rooms inside a daemon %llu; pages taken %llu, used before %llu, given back in that "
	       "turn %llu; aborts by phase:",
	       ull(world->n_local), ull(soak_taken), ull(soak_reused), ull(soak_at_once));
	for (i = 0; i < KVP_ARRAY_SIZE(world->n_abort_at); i++)
		printf(" %llu", ull(world->n_abort_at[i]));
	printf("\nends failed:");
	for (i = 0; i < KVP_ARRAY_SIZE(world->fails); i++)
		if (world->fails[i])
			printf(" %s %llu", kvp_status_name((enum kvp_status)i),
			       ull(world->fails[i]));
	printf("\nbytes checked %.1f GB, wrong bytes %llu\n", (double)soak_checked / 1e9,
	       ull(soak_wrong));
	fflush(stdout);
}

static uint64_t knob(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void soak(struct rig *rig)
{
	static const char *const names[N_NODES] = { "pa", "b", "c" };
	uint64_t seed, from = rig_now_ns(), until;
	struct world *world = &all;
	uint32_t i;

	RIG_REQUIRE(getrandom(&seed, sizeof(seed), 0) == sizeof(seed));
	world->seed = seed = knob("KVP_SOAK_SEED", seed >> 32);
	until = from + knob("KVP_SOAK_SECS", 8) * 1000 * MS;
	/* Half of the worlds have sums: nothing that happens in them explains one that differs. */
	if (seed % 2)
		(void)setenv("KVP_TEST_CHECKSUM", "on", 0); /* without memory it has none */
	printf("soak: seed %llu%s\n", (unsigned long long)seed, seed % 2 ? ", with sums" : "");
	fflush(stdout);
	rig->timing = SETTING;
	for (i = 0; i < N_NODES; i++)
		world->nodes[i].daemon = rig_daemon_start(rig, names[i], NULL);
	for (i = 0; i < N_RANKS; i++)
		rank_make(world, i);
	world->now = rig_now_ns();
	do {
		with_trouble(world, KVP_MIN(until, world->now + 3000 * MS));
		settle(world);
		without_trouble(world);
	} while (world->now < until);
	settle(world);
	rig_end(rig);
	for (i = 0; i < N_RANKS; i++) { /* nobody is left who could write */
		rank_scan(&world->ranks[i]);
		kvp_client_close(world->ranks[i].client);
		soak_pool_free(&world->ranks[i].pool);
	}
	summary(world, seed, (double)(rig_now_ns() - from) / 1e9);
	RIG_REQUIRE(soak_wrong == 0, "%llu wrong bytes", (unsigned long long)soak_wrong);
	RIG_REQUIRE(world->spoil == SPOILS && soak_at_once > 0, "nothing was tested");
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = { { "soak", soak } };

	rig_deadline_s = (unsigned int)knob("KVP_SOAK_SECS", 8) + 120;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
