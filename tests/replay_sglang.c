/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Plays SGLang's disaggregation against real daemons: decode announces first, every rank is a
 * process, all ranks of a request use one room id, counts are known to decode only. The calls and
 * their order are those of docs/engines.md, section 2.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_rig.h"

#define PAGE 16u
#define ROW 576u
#define LAYERS 7u
#define DRAFT_LAYER 27u
#define DRAFT_ROW 128u
#define STATE_LAYER 100u
#define STATE_BYTES 3000u
#define META_BYTES 15900u
#define META_ID 0xa0a0u
#define PREFILL_PAGES 160u
#define DECODE_PAGES 160u
#define MAX_CHUNKS 64u
#define SECS 20

#define DAEMON "[host]\nslots = 8\nslot_bytes = 256k\n"

/* Numbers of the poll states that SGLang reduces over ranks. */
enum poll { FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS };

struct request {
	uint64_t room, generation;
	uint64_t prefix, end, chunk; /* tokens */
};

/* What both kinds of rank have. */
struct rank {
	struct rig *rig;
	const struct rig_daemon *daemon;
	struct request req;
	struct kvp_client *client;
	struct rig_pool pool;
	kvp_room_id room;
	enum poll polled; /* last; it never goes back but to FAILED */
};

struct prefill {
	struct rank rank;
	uint32_t sender;
	uint32_t layer_lo, layer_hi; /* of this pipeline stage */
	bool last_stage;             /* has draft, state, and meta */
	bool dummy;      /* all its destinations give it the role NONE; it does not know */
	bool early;      /* sends its cached prefix before it computes */
	bool aborted;    /* either end may abort at any time */
	bool state_only; /* another rank sends the same rows; its slice of the state is its own */
	uint32_t pages[PREFILL_PAGES];
	struct kvp_fence *fence;
	uint64_t fence_value;
	uint32_t n_chunks;
	uint64_t at; /* position of the next chunk */
};

struct source {
	const struct rig_daemon *daemon;
	uint32_t sender, n_dests, layer_lo, layer_hi;
	bool dummy, last_stage, state_only;
};

struct decode {
	struct rank rank;
	uint32_t dest, dcp_size, dcp_rank;
	struct source sources[16];
	uint32_t n_sources;
	uint32_t pages[DECODE_PAGES]; /* virtual pages of [0, end) */
};

/* ---- both ----------------------------------------------------------------------------------- */

static enum poll poll_of(const struct kvp_room_state *state)
{
	switch (state->phase) {
	case KVP_ROOM_WAITING:
		return BOOTSTRAPPING;
	case KVP_ROOM_READY:
	case KVP_ROOM_OFFERING:
	case KVP_ROOM_ACCEPTED:
		return WAITING_FOR_INPUT;
	case KVP_ROOM_SENDING:
	case KVP_ROOM_CLOSING:
	case KVP_ROOM_LANDING:
		return TRANSFERRING;
	case KVP_ROOM_DONE:
	case KVP_ROOM_COMPLETE:
		return SUCCESS;
	case KVP_ROOM_RELEASED:
		return state->complete ? SUCCESS : FAILED;
	default:
		return FAILED;
	}
}

/* One step of the scheduler: what happened, then the state. */
static enum poll rank_poll(struct rank *rank)
{
	struct kvp_room_state state;
	enum poll now;

	RIG_REQUIRE(kvp_process(rank->client) >= 0, "%s", kvp_last_error(rank->client));
	state = rig_state(rank->client, rank->room);
	now = poll_of(&state);
	RIG_REQUIRE(!(state.complete && state.failed));
	RIG_REQUIRE(now == FAILED || now >= rank->polled, "poll went back from %d to %d",
		    rank->polled, now);
	RIG_REQUIRE(rank->polled != FAILED || now == FAILED, "FAILED is not sticky");
	rank->polled = now;
	return now;
}

/* Polls until the state is reached or FAILED; returns the last. */
static enum poll rank_poll_until(struct rank *rank, enum poll want)
{
	uint64_t until = rig_now_ns() + (uint64_t)SECS * 1000000000u;
	enum poll now;

	while ((now = rank_poll(rank)) != FAILED && now < want) {
		RIG_REQUIRE(rig_now_ns() < until, "poll state is %d, not %d, after %d s", now, want,
			    SECS);
		(void)kvp_wait(rank->client, 20); /* a timeout only means that it polls again */
	}
	return now;
}

static void rank_reach(struct rank *rank, enum poll want)
{
	enum poll now = rank_poll_until(rank, want);
	struct kvp_room_state state = rig_state(rank->client, rank->room);

	RIG_REQUIRE(now >= want && now != FAILED, "room %llu failed: %s: %s",
		    (unsigned long long)rank->req.room, kvp_status_name(state.status),
		    state.reason);
}

/* The room ends without success, for a reason that both ends see, and everything comes free. */
static void rank_fails(struct rank *rank, enum kvp_status status, enum kvp_status or_status)
{
	struct kvp_room_state state = rig_await(rank->client, rank->room, KVP_WAIT_TERMINAL, SECS);

	RIG_REQUIRE(state.failed && !state.complete, "phase %u", state.phase);
	RIG_REQUIRE(state.status == status || state.status == or_status, "status %s, not %s: %s",
		    kvp_status_name(state.status), kvp_status_name(status), state.reason);
	RIG_REQUIRE(state.reason[0], "no reason");
	state = rig_await(rank->client, rank->room, KVP_WAIT_RELEASED, SECS);
	RIG_REQUIRE(state.failed && poll_of(&state) == FAILED);
}

static void rank_aborted(struct rank *rank)
{
	rank_fails(rank, KVP_STATUS_ABORTED, KVP_STATUS_ABORTED);
}

static void rank_forget(struct rank *rank)
{
	kvp_room_forget(rank->client, rank->room);
	rank->room = 0;
}

/* ---- prefill -------------------------------------------------------------------------------- */

static void prefill_start(struct prefill *p, const char *name)
{
	struct rig_pool *pool = &p->rank.pool;
	uint32_t layer;

	p->rank.client = rig_client(p->rank.daemon, name);
	for (layer = p->layer_lo; layer < p->layer_hi; layer++)
		(void)rig_pool_entry(pool, layer, ROW, PAGE, PREFILL_PAGES);
	if (p->last_stage) {
		rig_pool_entry(pool, DRAFT_LAYER, DRAFT_ROW, PAGE, PREFILL_PAGES)->klass =
			KVP_REPLICATED;
		(void)rig_pool_blob(pool, STATE_LAYER, STATE_BYTES);
	}
	rig_pool_make(pool, p->rank.client, name, 1000 + p->sender);
	RIG_CALL(p->rank.client, kvp_fence_create(p->rank.client, 2, &p->fence));
	rig_pages(p->pages, PREFILL_PAGES - 1, 1, PREFILL_PAGES, p->rank.req.room + p->sender);
}

/* The sender object is constructed. */
static void prefill_open(struct prefill *p, uint32_t open_ms)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	uint16_t mask;

	open.room = p->rank.req.room;
	open.sender = p->sender;
	open.pool = p->rank.pool.id;
	open.sides = &side;
	open.n_sides = 1;
	mask = (uint16_t)(1u << (p->rank.pool.n_entries - 1)); /* the state, no rows */
	if (p->state_only) {
		open.entry_mask = (const uint8_t *)&mask;
		open.mask_bytes = sizeof(mask);
	}
	open.label = "request";
	open.timers.open_ms = open_ms;
	p->rank.polled = BOOTSTRAPPING;
	p->n_chunks = 0;
	RIG_CALL(p->rank.client, kvp_open(p->rank.client, &open, NULL, NULL, &p->rank.room));
}

static struct rig_key prefill_key(const struct prefill *p)
{
	return (struct rig_key){ p->rank.req.room,
				 p->rank.req.generation * 1000 + p->sender + (p->dummy ? 500 : 0) };
}

static struct kvp_side_desc prefill_side(const struct prefill *p)
{
	return (struct kvp_side_desc){ .page = PAGE,
				       .dcp_size = 1,
				       .interleave = 1,
				       .n_pages = PREFILL_PAGES - 1,
				       .pages = p->pages };
}

/* The model writes the rows of a token range. */
static void prefill_compute(struct prefill *p, uint64_t start, uint64_t tokens)
{
	struct kvp_side_desc side = prefill_side(p);
	struct rig_key key = prefill_key(p);

	rig_put_rows(p->rank.pool.mem, &p->rank.pool, &side, start, start + tokens, &key);
	if (p->last_stage)
		rig_put_segment(p->rank.pool.mem +
					p->rank.pool.entries[p->rank.pool.n_entries - 1].offset,
				STATE_BYTES, &key, p->sender);
}

/* Decode does not wait for a dummy, and aborts when it likes: then there is nothing to send any
 * more. */
static void prefill_refused(struct prefill *p)
{
	char why[256];
	struct kvp_room_state state;

	snprintf(why, sizeof(why), "%s", kvp_last_error(p->rank.client));
	(void)rig_await(p->rank.client, p->rank.room, KVP_WAIT_TERMINAL, 1);
	state = rig_state(p->rank.client, p->rank.room);
	RIG_REQUIRE((p->dummy && state.complete) || (p->aborted && state.failed), "submit: %s",
		    why);
}

/* sender.send(): the rows need not be there yet when `fenced`. */
static void prefill_submit(struct prefill *p, uint64_t tokens, bool fenced, bool last)
{
	struct kvp_segment segment = { p->sender, p->rank.pool.n_entries - 1, 0, STATE_BYTES };
	struct kvp_side_desc side = prefill_side(p);
	struct rig_key key = prefill_key(p);
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	uint8_t meta[META_BYTES];
	uint32_t seq;

	side.pos0 = p->at / PAGE * PAGE;
	side.pages = p->pages + p->at / PAGE;
	side.n_pages = (uint32_t)(KVP_DIV_UP(p->at + tokens, PAGE) - p->at / PAGE);
	chunk.start = p->at;
	chunk.tokens = tokens;
	chunk.sides = &side;
	chunk.n_sides = 1;
	if (fenced) {
		chunk.fence = p->fence;
		chunk.fence_word = 1;
		chunk.fence_value = p->fence_value + 1;
	}
	chunk.last = last;
	if (last && p->last_stage) {
		rig_put_segment(meta, sizeof(meta), &key, META_ID);
		chunk.segments = &segment;
		chunk.n_segments = 1;
		chunk.meta = p->state_only ? NULL : meta;
		chunk.meta_bytes = p->state_only ? 0 : sizeof(meta);
	}
	p->at += tokens;
	if (kvp_submit(p->rank.client, p->rank.room, &chunk, NULL, NULL, &seq)) {
		prefill_refused(p);
		return;
	}
	RIG_REQUIRE(seq == p->n_chunks, "seq %u, not %u", seq, p->n_chunks);
	p->n_chunks++;
}

static void prefill_signal(struct prefill *p)
{
	kvp_fence_signal(p->fence, 1, ++p->fence_value);
}

/* Submits first, computes then, and signals: the daemon must not read early. */
static void prefill_send(struct prefill *p, uint64_t tokens, bool last)
{
	uint64_t start = p->at;

	prefill_submit(p, tokens, true, last);
	rig_sleep_ms(2);
	prefill_compute(p, start, tokens);
	prefill_signal(p);
}

static void prefill_send_all(struct prefill *p)
{
	const struct request *req = &p->rank.req;
	uint64_t tokens;

	if (p->early && p->at + 4u * PAGE < req->end) {
		prefill_compute(p, p->at, 4u * PAGE);
		prefill_submit(p, 4u * PAGE, false, false);
	}
	do {
		tokens = KVP_MIN(req->end - p->at, req->chunk);
		prefill_send(p, tokens, p->at + tokens == req->end);
	} while (p->at < req->end);
}

/* Sources are free: what is written there now must not arrive anywhere. */
static void prefill_sources_free(struct prefill *p)
{
	int rc = kvp_room_wait_source_free(p->rank.client, p->rank.room, p->n_chunks, SECS * 1000);

	RIG_REQUIRE(rc == 0, "source_free %u of %u",
		    rig_state(p->rank.client, p->rank.room).source_free, p->n_chunks);
	rig_pool_reset(&p->rank.pool);
}

static void prefill_wait_ready(struct prefill *p)
{
	struct kvp_room_state state;

	rank_reach(&p->rank, WAITING_FOR_INPUT);
	state = rig_state(p->rank.client, p->rank.room);
	RIG_REQUIRE(state.prefix == p->rank.req.prefix && state.end == p->rank.req.end);
	p->at = state.prefix; /* pop_decode_prefix_len() */
}

static void prefill_finish(struct prefill *p)
{
	kvp_fence_destroy(p->fence);
	kvp_client_close(p->rank.client);
}

static void prefill_run(void *arg)
{
	struct prefill *p = arg;
	char name[32];

	snprintf(name, sizeof(name), "prefill %u", p->sender);
	prefill_start(p, name);
	prefill_open(p, 0);
	prefill_wait_ready(p);
	prefill_send_all(p);
	prefill_sources_free(p);
	rank_reach(&p->rank, SUCCESS);
	rank_forget(&p->rank);
	prefill_finish(p);
}

/* ---- decode --------------------------------------------------------------------------------- */

static uint64_t decode_vpage(const struct decode *d)
{
	return (uint64_t)PAGE * d->dcp_size;
}

static void decode_start(struct decode *d, const char *name)
{
	struct rig_pool *pool = &d->rank.pool;
	uint32_t layer;

	d->rank.client = rig_client(d->rank.daemon, name);
	for (layer = 0; layer < LAYERS; layer++)
		(void)rig_pool_entry(pool, layer, ROW, PAGE, DECODE_PAGES);
	rig_pool_entry(pool, DRAFT_LAYER, DRAFT_ROW, (uint32_t)decode_vpage(d), DECODE_PAGES)
		->klass = KVP_REPLICATED;
	(void)rig_pool_blob(pool, STATE_LAYER, 16u * STATE_BYTES);
	rig_pool_make(pool, d->rank.client, name, 2000 + d->dest);
	/* One list of virtual pages for all ranks of the engine. */
	rig_pages(d->pages, DECODE_PAGES - 1, 1, DECODE_PAGES, d->rank.req.room ^ 0xdec0de);
}

static struct kvp_side_desc decode_side(const struct decode *d, uint64_t pos0)
{
	uint64_t skip = pos0 / decode_vpage(d);

	return (struct kvp_side_desc){
		.page = PAGE,
		.dcp_size = d->dcp_size,
		.dcp_rank = d->dcp_rank,
		.interleave = 1,
		.pos0 = pos0,
		.n_pages = (uint32_t)(KVP_DIV_UP(d->rank.req.end, decode_vpage(d)) - skip),
		.pages = d->pages + skip
	};
}

/* receiver.send_metadata() */
static void decode_expect(struct decode *d, uint32_t open_ms)
{
	struct kvp_side_desc side = decode_side(d, d->rank.req.prefix);
	struct kvp_expect_sender senders[16];
	struct kvp_segment segments[16];
	struct kvp_expect expect = KVP_EXPECT_INIT;
	uint32_t i;

	expect.room = d->rank.req.room;
	expect.dest = d->dest;
	expect.pool = d->rank.pool.id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = senders;
	expect.n_senders = d->n_sources;
	expect.segments = segments;
	for (i = 0; i < d->n_sources; i++) {
		senders[i] = (struct kvp_expect_sender){
			d->sources[i].daemon->address, d->sources[i].sender, d->sources[i].n_dests,
			d->sources[i].dummy ? KVP_ROLE_NONE : KVP_ROLE_DATA
		};
		if (d->sources[i].dummy || !d->sources[i].last_stage)
			continue;
		segments[expect.n_segments++] =
			(struct kvp_segment){ d->sources[i].sender, LAYERS + 1,
					      (4u + i) * STATE_BYTES, STATE_BYTES };
		if (!d->sources[i].state_only)
			expect.meta_from = (int32_t)d->sources[i].sender;
	}
	expect.prefix = d->rank.req.prefix;
	expect.end = d->rank.req.end;
	expect.label = "request";
	expect.timers.open_ms = open_ms;
	d->rank.polled = BOOTSTRAPPING;
	RIG_CALL(d->rank.client, kvp_expect(d->rank.client, &expect, NULL, NULL, &d->rank.room));
}

/* The entries of this pool that a source fills. */
static void decode_set(const struct source *source, uint8_t set[2])
{
	uint32_t layer;

	memset(set, 0, 2);
	for (layer = source->layer_lo; layer < source->layer_hi; layer++)
		set[0] = (uint8_t)(set[0] | 1u << layer);
	if (source->last_stage)
		set[0] = (uint8_t)(set[0] | 1u << LAYERS);
}

/* What one source has to do with the image; true if it sent the meta. */
static bool decode_put(const struct decode *d, uint32_t i, uint8_t *image)
{
	struct kvp_side_desc side = decode_side(d, d->rank.req.prefix);
	const struct source *source = &d->sources[i];
	struct rig_key key = { d->rank.req.room, d->rank.req.generation * 1000 + source->sender };
	uint8_t set[2];

	if (source->dummy)
		return false;
	decode_set(source, set);
	if (!source->state_only)
		rig_put_rows_of(image, &d->rank.pool, &side, d->rank.req.prefix, d->rank.req.end,
				&key, set);
	if (!source->last_stage)
		return false;
	rig_put_segment(image + d->rank.pool.entries[LAYERS + 1].offset + (4u + i) * STATE_BYTES,
			STATE_BYTES, &key, source->sender);
	return !source->state_only;
}

static void decode_check(struct decode *d, const char *what)
{
	uint8_t *image = rig_pool_image(&d->rank.pool), meta[META_BYTES];
	struct kvp_room_state state = rig_state(d->rank.client, d->rank.room);
	uint32_t i;

	for (i = 0; i < d->n_sources; i++) {
		struct rig_key key = { d->rank.req.room,
				       d->rank.req.generation * 1000 + d->sources[i].sender };

		if (!decode_put(d, i, image))
			continue;
		rig_put_segment(meta, sizeof(meta), &key, META_ID);
		RIG_REQUIRE(state.meta_bytes == sizeof(meta), "%u bytes of meta", state.meta_bytes);
		RIG_REQUIRE(!memcmp(state.meta, meta, sizeof(meta)));
	}
	RIG_REQUIRE(state.arrived == d->rank.req.end, "arrived %llu",
		    (unsigned long long)state.arrived);
	rig_pool_check(&d->rank.pool, image, what);
	free(image);
}

static void decode_run(void *arg)
{
	struct decode *d = arg;
	char name[32];

	snprintf(name, sizeof(name), "decode %u", d->dest);
	decode_start(d, name);
	decode_expect(d, 0);
	rank_reach(&d->rank, SUCCESS);
	decode_check(d, name);
	(void)rig_await(d->rank.client, d->rank.room, KVP_WAIT_RELEASED, SECS);
	rank_reach(&d->rank, SUCCESS);
	rank_forget(&d->rank);
	kvp_client_close(d->rank.client);
}

/* ---- whole engines -------------------------------------------------------------------------- */

struct layout {
	uint32_t prefill_tp, decode_tp, dcp;
	uint32_t stages, prefill_daemons, decode_daemons; /* 0: one */
	bool early;
	bool state; /* all prefill ranks have state that decode needs, one of them sends the rows */
};

/* The rank mapping of docs/engines.md 2.5 for MLA: which senders a decode rank hears, and how. */
static void layout_sources(struct decode *d, const struct layout *lay, const struct prefill *all)
{
	uint32_t fan_in = KVP_MAX(lay->prefill_tp / lay->decode_tp, 1u);
	uint32_t fan_out = KVP_MAX(lay->decode_tp / lay->prefill_tp, 1u);
	uint32_t k, stage, tp;

	for (k = 0; k < fan_in; k++)
		for (stage = 0; stage < lay->stages; stage++) {
			tp = fan_in > 1 ? d->dest * fan_in + k : d->dest / fan_out;
			const struct prefill *p = &all[tp * lay->stages + stage];

			d->sources[d->n_sources++] = (struct source){
				.daemon = p->rank.daemon,
				.sender = p->sender,
				.n_dests = fan_out,
				.layer_lo = p->layer_lo,
				.layer_hi = p->layer_hi,
				.dummy = p->dummy,
				.last_stage = p->last_stage,
				.state_only = p->state_only,
			};
		}
}

static void layout_prefill(struct rig *rig, const struct layout *lay, const struct request *req,
			   struct prefill *all)
{
	uint32_t i, stage, fan_in = KVP_MAX(lay->prefill_tp / lay->decode_tp, 1u);

	for (i = 0; i < lay->prefill_tp * lay->stages; i++) {
		stage = i % lay->stages;
		all[i].rank.rig = rig;
		all[i].rank.daemon = &rig->daemons[stage % lay->prefill_daemons];
		all[i].rank.req = *req;
		all[i].sender = i;
		all[i].layer_lo = LAYERS * stage / lay->stages;
		all[i].layer_hi = LAYERS * (stage + 1) / lay->stages;
		all[i].last_stage = stage == lay->stages - 1;
		all[i].state_only = i / lay->stages % fan_in != 0 && lay->state;
		all[i].dummy = i / lay->stages % fan_in != 0 && !lay->state;
		all[i].early = lay->early;
	}
}

/* Starts daemons and ranks, and waits for a request to be served. */
static void layout_play(struct rig *rig, struct layout *lay, const struct request *req)
{
	struct prefill *prefill;
	struct decode *decode = calloc(lay->decode_tp, sizeof(*decode));
	char name[32];
	uint32_t i;

	lay->stages = KVP_MAX(lay->stages, 1u);
	lay->prefill_daemons = KVP_MAX(lay->prefill_daemons, 1u);
	lay->decode_daemons = KVP_MAX(lay->decode_daemons, 1u);
	prefill = calloc((size_t)lay->prefill_tp * lay->stages, sizeof(*prefill));
	RIG_REQUIRE(prefill && decode);
	for (i = 0; i < lay->prefill_daemons + lay->decode_daemons; i++) {
		snprintf(name, sizeof(name), "%s%u", i < lay->prefill_daemons ? "p" : "d", i);
		(void)rig_daemon_start(rig, name, DAEMON);
	}
	layout_prefill(rig, lay, req, prefill);
	for (i = 0; i < lay->decode_tp; i++) {
		decode[i].rank.rig = rig;
		decode[i].rank.daemon = &rig->daemons[lay->prefill_daemons +
						      i * lay->decode_daemons / lay->decode_tp];
		decode[i].rank.req = *req;
		decode[i].dest = i;
		decode[i].dcp_size = lay->dcp;
		decode[i].dcp_rank = i % lay->dcp;
		layout_sources(&decode[i], lay, prefill);
		snprintf(name, sizeof(name), "decode %u", i);
		rig_rank_start(rig, name, decode_run, &decode[i]);
	}
	for (i = 0; i < lay->prefill_tp * lay->stages; i++) {
		snprintf(name, sizeof(name), "prefill %u", i);
		rig_rank_start(rig, name, prefill_run, &prefill[i]);
	}
	rig_ranks_join(rig, 60);
	free(prefill);
	free(decode);
}

static void tp4_to_tp4_dcp4(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){
			    .prefill_tp = 4,
			    .decode_tp = 4,
			    .dcp = 4,
		    },
		    &(struct request){ .room = 41, .generation = 1, .end = 1501, .chunk = 512 });
}

static void tp8_to_tp4_dummies(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){
			    .prefill_tp = 8,
			    .decode_tp = 4,
			    .dcp = 4,
		    },
		    &(struct request){ .room = 42, .generation = 1, .end = 777, .chunk = 256 });
}

static void tp4_to_tp2_sharded_state(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){ .prefill_tp = 4, .decode_tp = 2, .dcp = 2, .state = true },
		    &(struct request){ .room = 50, .generation = 1, .end = 777, .chunk = 256 });
}

static void tp2_to_tp8_shared_dcp_ranks(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){
			    .prefill_tp = 2,
			    .decode_tp = 8,
			    .dcp = 4,
		    },
		    &(struct request){ .room = 43, .generation = 1, .end = 801, .chunk = 400 });
}

static void two_stages_on_two_daemons(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){
			    .prefill_tp = 2,
			    .decode_tp = 2,
			    .dcp = 2,
			    .stages = 2,
			    .prefill_daemons = 2,
		    },
		    &(struct request){ .room = 44, .generation = 1, .end = 1111, .chunk = 320 });
}

static void decode_on_two_daemons(struct rig *rig)
{
	layout_play(
		rig,
		&(struct layout){ .prefill_tp = 1, .decode_tp = 4, .dcp = 4, .decode_daemons = 2 },
		&(struct request){ .room = 45, .generation = 1, .end = 1400, .chunk = 512 });
}

static void one_daemon_for_both(struct rig *rig)
{
	struct request req = { .room = 46, .generation = 1, .end = 1023, .chunk = 512 };
	struct prefill p = { .rank = { .rig = rig, .req = req },
			     .layer_hi = LAYERS,
			     .last_stage = true };
	struct decode d = { .rank = { .rig = rig, .req = req }, .dcp_size = 4, .dcp_rank = 3 };

	p.rank.daemon = d.rank.daemon = rig_daemon_start(rig, "n0", DAEMON);
	d.sources[0] = (struct source){ p.rank.daemon, 0, 1, 0, LAYERS, false, true, false };
	d.n_sources = 1;
	rig_rank_start(rig, "decode", decode_run, &d);
	rig_rank_start(rig, "prefill", prefill_run, &p);
	rig_ranks_join(rig, 60);
}

static void cached_prefix(struct rig *rig)
{
	/* W is 64: decode holds 3 virtual pages; prefill holds 4 pages more and sends them early.
	 */
	layout_play(
		rig, &(struct layout){ .prefill_tp = 4, .decode_tp = 4, .dcp = 4, .early = true },
		&(struct request){
			.room = 47, .generation = 1, .prefix = 192, .end = 1000, .chunk = 304 });
}

static void full_prefix_hit(struct rig *rig)
{
	layout_play(rig,
		    &(struct layout){
			    .prefill_tp = 2,
			    .decode_tp = 2,
			    .dcp = 2,
		    },
		    &(struct request){
			    .room = 48, .generation = 1, .prefix = 320, .end = 320, .chunk = 304 });
}

/* ---- a pair that starts over ---------------------------------------------------------------- */

enum { STAGE_PREFILL, STAGE_DECODE };

static void pair_start(struct rig *rig, struct prefill *p, struct decode *d, struct request req)
{
	*p = (struct prefill){ .rank = { .rig = rig, .req = req },
			       .layer_hi = LAYERS,
			       .last_stage = true };
	*d = (struct decode){ .rank = { .rig = rig, .req = req }, .dcp_size = 4, .dcp_rank = 1 };
	p->rank.daemon = rig_daemon_start(rig, "p0", DAEMON);
	d->rank.daemon = rig_daemon_start(rig, "d0", DAEMON);
	d->sources[0] = (struct source){ p->rank.daemon, 0, 1, 0, LAYERS, false, true, false };
	d->n_sources = 1;
}

static void retract_prefill(void *arg)
{
	struct prefill *p = arg;

	prefill_start(p, "prefill");
	prefill_open(p, 0);
	prefill_wait_ready(p);
	prefill_send(p, 256, false);
	prefill_submit(p, 256, true, false); /* its fence is never reached */
	RIG_REQUIRE(rank_poll_until(&p->rank, SUCCESS) == FAILED);
	rank_aborted(&p->rank);
	prefill_sources_free(p);
	rank_forget(&p->rank);
	prefill_signal(p); /* the stream gets there at last: nobody waits any more */

	rig_stage_wait(p->rank.rig, STAGE_DECODE, 1, SECS); /* decode's second offer is parked */
	p->rank.req.generation = 2;
	prefill_open(p, 0);
	prefill_wait_ready(p);
	prefill_send_all(p);
	prefill_sources_free(p);
	rank_reach(&p->rank, SUCCESS);
	rank_forget(&p->rank);
	prefill_finish(p);
}

static void retract_decode(void *arg)
{
	struct decode *d = arg;
	struct kvp_room_state state;
	uint64_t until = rig_now_ns() + (uint64_t)SECS * 1000000000u;

	decode_start(d, "decode");
	decode_expect(d, 0);
	do {
		RIG_REQUIRE(rank_poll(&d->rank) != FAILED && rig_now_ns() < until);
		(void)kvp_wait(d->rank.client, 20); /* polls again */
		state = rig_state(d->rank.client, d->rank.room);
	} while (state.arrived < 256);
	RIG_REQUIRE(state.arrived == 256 && !state.complete);
	RIG_CALL(d->rank.client, kvp_abort(d->rank.client, d->rank.room, "retracted"));
	rank_aborted(&d->rank);
	RIG_REQUIRE(rig_state(d->rank.client, d->rank.room).arrived == 256);
	rank_forget(&d->rank);

	/* The pages are the engine's again; the same ones and the same room id, from the start. */
	rig_pool_reset(&d->rank.pool);
	d->rank.req.generation = 2;
	decode_expect(d, 0);
	rig_stage_set(d->rank.rig, STAGE_DECODE, 1);
	rank_reach(&d->rank, SUCCESS);
	decode_check(d, "after the retract");
	rank_forget(&d->rank);
	kvp_client_close(d->rank.client);
}

static void retract_same_room(struct rig *rig)
{
	static struct prefill p;
	static struct decode d;

	pair_start(rig, &p, &d,
		   (struct request){ .room = 49, .generation = 1, .end = 1000, .chunk = 256 });
	rig_rank_start(rig, "decode", retract_decode, &d);
	rig_rank_start(rig, "prefill", retract_prefill, &p);
	rig_ranks_join(rig, 60);
}

/* ---- aborts --------------------------------------------------------------------------------- */

enum who { BY_DECODE = 1, BY_PREFILL = 2, BY_BOTH = 3 };
enum when { ALONE, AT_READY, MIDWAY, AT_RANDOM, AFTER_COMPLETE };

static const struct {
	enum who who;
	enum when when;
} rounds[] = {
	{ BY_DECODE, ALONE },        { BY_PREFILL, ALONE },         { BY_DECODE, AT_READY },
	{ BY_PREFILL, AT_READY },    { BY_BOTH, AT_READY },         { BY_DECODE, MIDWAY },
	{ BY_PREFILL, MIDWAY },      { BY_BOTH, MIDWAY },           { BY_DECODE, AT_RANDOM },
	{ BY_PREFILL, AT_RANDOM },   { BY_BOTH, AT_RANDOM },        { BY_DECODE, AT_RANDOM },
	{ BY_PREFILL, AT_RANDOM },   { BY_BOTH, AT_RANDOM },        { BY_DECODE, AT_RANDOM },
	{ BY_PREFILL, AT_RANDOM },   { BY_DECODE, AFTER_COMPLETE }, { BY_PREFILL, AFTER_COMPLETE },
	{ BY_BOTH, AFTER_COMPLETE },
};

/* Both ranks have ended the round: its number. */
static void round_meet(struct rank *rank, uint32_t mine, uint32_t theirs, uint32_t round)
{
	rig_stage_set(rank->rig, mine, round);
	rig_stage_wait(rank->rig, theirs, round, SECS);
}

static void rank_abort(struct rank *rank)
{
	RIG_CALL(rank->client, kvp_abort(rank->client, rank->room, "a test of aborts"));
}

static void random_delay(const struct rank *rank)
{
	uint64_t seed = rank->req.room, until = rig_now_ns() + rig_random(&seed) % 4000000;

	while (rig_now_ns() < until)
		;
}

static void abort_prefill_alone(struct prefill *p, enum who who, uint32_t round)
{
	if (who == BY_DECODE) {
		round_meet(&p->rank, 2, 3, round);
		prefill_open(p, 300); /* decode has come and gone, or is seen to go now */
		rank_fails(&p->rank, KVP_STATUS_TIMEOUT, KVP_STATUS_ABORTED);
	} else {
		prefill_open(p, 0);
		rank_abort(&p->rank);
		rank_aborted(&p->rank);
		round_meet(&p->rank, 2, 3, round);
	}
}

static void abort_decode_alone(struct decode *d, enum who who, uint32_t round)
{
	if (who == BY_DECODE) {
		decode_expect(d, 0);
		rank_abort(&d->rank);
		rank_aborted(&d->rank);
		round_meet(&d->rank, 3, 2, round);
	} else {
		round_meet(&d->rank, 3, 2, round);
		decode_expect(d, 300); /* prefill has come and gone */
		rank_fails(&d->rank, KVP_STATUS_TIMEOUT, KVP_STATUS_TIMEOUT);
	}
}

static void abort_prefill_round(struct prefill *p, enum who who, enum when when)
{
	struct kvp_room_state state;
	uint32_t seen = 0;

	prefill_open(p, 0);
	p->at = 0;
	if (rank_poll_until(&p->rank, WAITING_FOR_INPUT) == FAILED)
		return; /* decode was faster */
	if (when == MIDWAY) {
		prefill_send(p, 256, false);
		prefill_submit(p, 256, true, false); /* its fence comes too late */
		while (seen < 1 && rank_poll(&p->rank) != FAILED) {
			(void)kvp_wait(p->rank.client, 20); /* polls again */
			seen = rig_state(p->rank.client, p->rank.room).delivered;
		}
	} else if (when != AT_READY) {
		prefill_compute(p, 0, p->rank.req.end);
		prefill_submit(p, 512, false, false);
		prefill_submit(p, p->rank.req.end - 512, false, true);
	}
	if (when == AT_RANDOM)
		random_delay(&p->rank);
	if (when == AFTER_COMPLETE)
		rank_reach(&p->rank, SUCCESS);
	if (who & BY_PREFILL)
		rank_abort(&p->rank);
	state = rig_await(p->rank.client, p->rank.room, KVP_WAIT_TERMINAL, SECS);
	RIG_REQUIRE(when != AFTER_COMPLETE || (state.complete && !state.failed));
}

static void abort_prefill(void *arg)
{
	struct prefill *p = arg;
	struct kvp_room_state state;
	uint32_t i;

	prefill_start(p, "prefill");
	p->aborted = true;
	for (i = 0; i < KVP_ARRAY_SIZE(rounds); i++) {
		p->rank.req.room++;
		if (rounds[i].when == ALONE) {
			abort_prefill_alone(p, rounds[i].who, i + 1);
		} else {
			abort_prefill_round(p, rounds[i].who, rounds[i].when);
			state = rig_state(p->rank.client, p->rank.room);
			if (state.failed)
				rank_aborted(&p->rank);
			rig_stage_set(p->rank.rig, 4, (i + 1) * 2 + state.complete);
		}
		prefill_signal(p);
		rank_forget(&p->rank);
		round_meet(&p->rank, STAGE_PREFILL, STAGE_DECODE, i + 1);
	}
	p->aborted = false;
	p->rank.req.room++;
	prefill_open(p, 0);
	prefill_wait_ready(p);
	prefill_send_all(p);
	rank_reach(&p->rank, SUCCESS);
	prefill_finish(p);
}

static void abort_decode_round(struct decode *d, enum who who, enum when when)
{
	struct kvp_room_state state;

	decode_expect(d, 0);
	if (when == AT_READY) {
		do {
			(void)kvp_wait(d->rank.client, 20); /* polls again */
			state = rig_state(d->rank.client, d->rank.room);
		} while (state.phase == KVP_ROOM_OFFERING);
	} else if (when == MIDWAY) {
		while (rank_poll(&d->rank) != FAILED &&
		       rig_state(d->rank.client, d->rank.room).arrived < 256)
			(void)kvp_wait(d->rank.client, 20); /* polls again */
	} else if (when == AT_RANDOM) {
		(void)rank_poll_until(&d->rank, TRANSFERRING);
		random_delay(&d->rank);
	} else {
		rank_reach(&d->rank, SUCCESS);
		decode_check(d, "before an abort that comes late");
	}
	if (who & BY_DECODE)
		rank_abort(&d->rank);
}

/* Prefill never believes in success alone; it misses one only if it aborted. */
static void abort_agree(struct decode *d, enum who who, uint32_t i, bool complete)
{
	bool there;

	rig_stage_wait(d->rank.rig, 4, (i + 1) * 2, SECS);
	there = rig_stage_get(d->rank.rig, 4) & 1;
	RIG_REQUIRE(there == complete || (complete && (who & BY_PREFILL)),
		    "round %u: decode %d, prefill %d", i, complete, there);
}

static void abort_decode(void *arg)
{
	struct decode *d = arg;
	struct kvp_room_state state;
	uint8_t *image;
	uint32_t i;

	decode_start(d, "decode");
	image = rig_pool_image(&d->rank.pool);
	for (i = 0; i < KVP_ARRAY_SIZE(rounds); i++) {
		d->rank.req.room++;
		if (rounds[i].when == ALONE) {
			abort_decode_alone(d, rounds[i].who, i + 1);
		} else {
			abort_decode_round(d, rounds[i].who, rounds[i].when);
			state = rig_await(d->rank.client, d->rank.room, KVP_WAIT_TERMINAL, SECS);
			if (state.complete)
				decode_check(d, "completed before the abort");
			else
				rank_aborted(&d->rank);
			(void)rig_await(d->rank.client, d->rank.room, KVP_WAIT_RELEASED, SECS);
			abort_agree(d, rounds[i].who, i, state.complete);
		}
		rank_forget(&d->rank);
		rig_pool_reset(&d->rank.pool);
		round_meet(&d->rank, STAGE_DECODE, STAGE_PREFILL, i + 1);
		rig_pool_check(&d->rank.pool, image, "written after released");
	}
	free(image);
	d->rank.req.room++;
	decode_expect(d, 0);
	rank_reach(&d->rank, SUCCESS);
	decode_check(d, "after all aborts");
	kvp_client_close(d->rank.client);
}

static void abort_at_any_time(struct rig *rig)
{
	static struct prefill p;
	static struct decode d;

	pair_start(rig, &p, &d,
		   (struct request){ .room = 500, .generation = 1, .end = 1001, .chunk = 256 });
	rig_rank_start(rig, "decode", abort_decode, &d);
	rig_rank_start(rig, "prefill", abort_prefill, &p);
	rig_ranks_join(rig, 90);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "tp4_to_tp4_dcp4", tp4_to_tp4_dcp4 },
		{ "tp8_to_tp4_dummies", tp8_to_tp4_dummies },
		{ "tp4_to_tp2_sharded_state", tp4_to_tp2_sharded_state },
		{ "tp2_to_tp8_shared_dcp_ranks", tp2_to_tp8_shared_dcp_ranks },
		{ "two_stages_on_two_daemons", two_stages_on_two_daemons },
		{ "decode_on_two_daemons", decode_on_two_daemons },
		{ "one_daemon_for_both", one_daemon_for_both },
		{ "cached_prefix", cached_prefix },
		{ "full_prefix_hit", full_prefix_hit },
		{ "retract_same_room", retract_same_room },
		{ "abort_at_any_time", abort_at_any_time },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
