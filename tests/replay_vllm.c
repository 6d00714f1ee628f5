/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Plays vLLM's connector against real daemons: prefill submits while nobody expects yet, its blocks
 * are kept under a lease, decode comes later, or not at all. The calls and their order are those
 * of docs/engines.md, section 3.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_rig.h"

#define PAGE 16u
#define WINDOW_PAGE 32u /* of the sliding-window group */
#define BLOCKS 128u
#define LAYERS 4u
#define LATENT 576u
#define HEADS 4u
#define HEAD_BYTES 64u
#define INDEX_LAYER 100u
#define INDEX_ROW 128u
#define INDEX_SCALE 4u
#define SECS 20

#define DAEMON "[host]\nslots = 8\nslot_bytes = 256k\n[data]\nchecksum = required\n"

/* Stages that the ranks of a scenario wait for. */
enum { PUBLISHED, EXPECTED, PREFILL_DONE, DECODE_DONE };

enum model {
	LATENT_MODEL, /* one row a token and layer, one group */
	HYBRID_MODEL, /* K and V heads; layers 0, 1 attend to all, 2 and 3 to a window */
	HEADS_MODEL,  /* prefill keeps pages head by head, decode token by token; and an index */
};

/* What the router passes from prefill to decode (kv_transfer_params). */
struct params {
	uint64_t room;
	uint8_t key[KVP_KEY_BYTES];
	uint64_t end;
	uint64_t generation;
};

struct worker {
	struct rig *rig;
	const struct rig_daemon *daemon, *other; /* other: of the senders, at decode */
	struct params params;
	uint64_t cached; /* decode: tokens in its own prefix cache */
	uint64_t window; /* tokens of the sliding window */
	struct kvp_client *client;
	struct kvp_fence *fence;
	kvp_room_id room;
	struct rig_pool pool;
	enum model model;
	uint32_t tp_size, tp_rank, dcp_size, interleave;
	uint32_t n_senders; /* decode: data senders 0 .. n - 1, or its own rank's if 1 */
	uint32_t lease_ms;
	uint32_t n_chunks;
	uint32_t blocks[2][BLOCKS]; /* by group */
};

/* ---- both ----------------------------------------------------------------------------------- */

/* K and V of a layer lie in one array, side by side in each block. */
static void pool_kv(struct rig_pool *pool, uint32_t layer, uint32_t page, const struct worker *w)
{
	uint32_t row = HEADS / w->tp_size * HEAD_BYTES;
	struct kvp_entry_desc *k = rig_pool_entry(pool, layer, 2 * row, page, BLOCKS), *v;

	k->row_bytes = row;
	k->row_stride = row;
	k->full_bytes = 2 * HEADS * HEAD_BYTES;
	k->lo = w->tp_rank * row;
	k->group = w->model == HYBRID_MODEL && layer >= LAYERS / 2;
	v = rig_pool_blob(pool, layer, 0);
	*v = *k;
	v->offset += (uint64_t)page * row;
	v->bytes -= (uint64_t)page * row;
	v->lo += HEADS * HEAD_BYTES;
}

/* A further entry of the same layer, `skip` bytes into each page of the first. */
static struct kvp_entry_desc *pool_part(struct rig_pool *pool, const struct kvp_entry_desc *first,
					uint32_t skip)
{
	struct kvp_entry_desc *part = rig_pool_blob(pool, first->layer, 0);

	*part = *first;
	part->offset += skip;
	part->bytes -= skip;
	return part;
}

/* Pages of [K, then V][head][slot]: an entry a head. */
static void pool_heads(struct rig_pool *pool, uint32_t layer, const struct worker *w)
{
	uint32_t heads = HEADS / w->tp_size, i;
	struct kvp_entry_desc *first =
		rig_pool_entry(pool, layer, 2 * heads * HEAD_BYTES, PAGE, BLOCKS);

	first->row_stride = first->row_bytes = HEAD_BYTES;
	first->full_bytes = 2 * HEADS * HEAD_BYTES;
	first->lo = w->tp_rank * heads * HEAD_BYTES;
	for (i = 1; i < 2 * heads; i++)
		pool_part(pool, first, i * PAGE * HEAD_BYTES)->lo =
			first->lo + i % heads * HEAD_BYTES + i / heads * HEADS * HEAD_BYTES;
}

/* Pages of index rows and their scales: all rows, then all scales. */
static void pool_index(struct rig_pool *pool)
{
	struct kvp_entry_desc *rows =
		rig_pool_entry(pool, INDEX_LAYER, INDEX_ROW + INDEX_SCALE, PAGE, BLOCKS);
	struct kvp_entry_desc *scales;

	rows->row_stride = rows->row_bytes = INDEX_ROW;
	scales = pool_part(pool, rows, PAGE * INDEX_ROW);
	scales->row_stride = scales->row_bytes = INDEX_SCALE;
	scales->lo = INDEX_ROW;
}

static void pool_shape(struct worker *w)
{
	uint32_t layer;

	for (layer = 0; layer < LAYERS; layer++) {
		if (w->model == LATENT_MODEL)
			(void)rig_pool_entry(&w->pool, layer, LATENT, PAGE, BLOCKS);
		else if (w->model == HYBRID_MODEL)
			pool_kv(&w->pool, layer, layer < LAYERS / 2 ? PAGE : WINDOW_PAGE, w);
		else if (w->other)
			pool_kv(&w->pool, layer, PAGE, w);
		else
			pool_heads(&w->pool, layer, w);
	}
	if (w->model == HEADS_MODEL)
		pool_index(&w->pool);
}

static void worker_start(struct worker *w, const char *name)
{
	uint32_t group;

	w->client = rig_client(w->daemon, name);
	pool_shape(w);
	rig_pool_make(&w->pool, w->client, name, 77 + w->tp_rank);
	RIG_CALL(w->client, kvp_fence_create(w->client, LAYERS, &w->fence));
	for (group = 0; group < 2; group++)
		rig_pages(w->blocks[group], BLOCKS - 1, 1, BLOCKS, w->params.room * 5 + group);
	/* Below its window prefill has freed the blocks: its lists have the null block there. */
	if (!w->other && w->window)
		memset(w->blocks[1], 0,
		       (w->params.end - w->window) / WINDOW_PAGE * sizeof(w->blocks[1][0]));
}

static void worker_stop(struct worker *w)
{
	kvp_room_forget(w->client, w->room);
	kvp_fence_destroy(w->fence);
	kvp_client_close(w->client);
}

static uint32_t worker_groups(const struct worker *w)
{
	return w->model == HYBRID_MODEL ? 2 : 1;
}

/* The side of a group from the virtual page that holds `first` on. */
static struct kvp_side_desc worker_side(const struct worker *w, uint32_t group, uint64_t first)
{
	uint32_t page = group ? WINDOW_PAGE : PAGE;
	uint64_t vpage = (uint64_t)page * w->dcp_size, skip = first / vpage;

	return (struct kvp_side_desc){ .group = group,
				       .page = page,
				       .dcp_size = w->dcp_size,
				       .dcp_rank = w->tp_rank % w->dcp_size,
				       .interleave = w->interleave,
				       .pos0 = skip * vpage,
				       .n_pages =
					       (uint32_t)(KVP_DIV_UP(w->params.end, vpage) - skip),
				       .pages = w->blocks[group] + skip };
}

static struct rig_key worker_key(const struct worker *w)
{
	return (struct rig_key){ w->params.room, w->params.generation };
}

static void worker_fails(struct worker *w, enum kvp_status status)
{
	struct kvp_room_state state = rig_await(w->client, w->room, KVP_WAIT_TERMINAL, SECS);

	RIG_REQUIRE(state.failed && state.status == status, "status %s, not %s: %s",
		    kvp_status_name(state.status), kvp_status_name(status), state.reason);
	state = rig_await(w->client, w->room, KVP_WAIT_RELEASED, SECS);
	RIG_REQUIRE(state.failed && !state.complete);
}

/* ---- prefill -------------------------------------------------------------------------------- */

/* start_load_kv() of a new request. */
static void prefill_open(struct worker *w)
{
	struct kvp_side_desc sides[2];
	struct kvp_open open = KVP_OPEN_INIT;
	uint32_t mask;

	open.n_sides = worker_groups(w);
	sides[0] = worker_side(w, 0, 0);
	sides[1] = worker_side(w, 1, 0);
	open.room = w->params.room;
	open.key = w->params.key;
	open.sender = w->tp_rank;
	open.pool = w->pool.id;
	open.sides = sides;
	/* All ranks have the index; one sends it. */
	mask = (1u << (w->pool.n_entries - 2)) - 1;
	if (w->model == HEADS_MODEL && w->tp_rank > 0) {
		open.entry_mask = (const uint8_t *)&mask;
		open.mask_bytes = KVP_DIV_UP(w->pool.n_entries, 8u);
	}
	open.label = "request";
	open.timers.lease_ms = w->lease_ms;
	RIG_CALL(w->client, kvp_open(w->client, &open, NULL, NULL, &w->room));
}

static void prefill_compute(struct worker *w, uint64_t from, uint64_t to, const uint8_t *set)
{
	struct rig_key key = worker_key(w);
	struct kvp_side_desc side;
	uint32_t group;

	for (group = 0; group < worker_groups(w); group++) {
		side = worker_side(w, group, 0);
		rig_put_rows_of(w->pool.mem, &w->pool, &side, from, to, &key, set);
	}
}

struct submission {
	uint64_t from, to;
	const uint8_t *set;   /* NULL: all entries */
	uint64_t fence_value; /* 0: none */
	uint32_t fence_word;
	bool last;
};

static void prefill_submit(struct worker *w, const struct submission *s)
{
	struct kvp_side_desc sides[2];
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	uint32_t seq;

	sides[0] = worker_side(w, 0, s->from);
	sides[1] = worker_side(w, 1, s->from);
	chunk.start = s->from;
	chunk.tokens = s->to - s->from;
	chunk.sides = sides;
	chunk.n_sides = worker_groups(w);
	chunk.entry_set = s->set;
	chunk.set_bytes = s->set ? 1 : 0;
	chunk.last = s->last;
	if (s->fence_value) {
		chunk.fence = w->fence;
		chunk.fence_word = s->fence_word;
		chunk.fence_value = s->fence_value;
	}
	RIG_CALL(w->client, kvp_submit(w->client, w->room, &chunk, NULL, NULL, &seq));
	RIG_REQUIRE(seq == w->n_chunks, "seq %u, not %u", seq, w->n_chunks);
	w->n_chunks++;
}

/* Steps of 256 tokens, each saved when it has been computed; request_finished() says delay. */
static void prefill_save(struct worker *w, uint64_t from, uint64_t to)
{
	uint64_t next;

	for (; from < to; from = next) {
		next = KVP_MIN(from + 256, to);
		prefill_compute(w, from, next, NULL);
		prefill_submit(w, &(struct submission){ .from = from,
							.to = next,
							.last = next == w->params.end });
	}
}

/* get_finished(): the blocks are free, and are used for something else at once. */
static void prefill_finished(struct worker *w)
{
	int rc = kvp_room_wait_source_free(w->client, w->room, w->n_chunks, SECS * 1000);
	struct kvp_room_state state = rig_state(w->client, w->room);

	RIG_REQUIRE(rc == 0, "source_free %u of %u; %s", state.source_free, w->n_chunks,
		    state.reason);
	rig_pool_reset(&w->pool);
	state = rig_await(w->client, w->room, KVP_WAIT_TERMINAL, SECS);
	RIG_REQUIRE(state.complete && !state.failed, "%s: %s", kvp_status_name(state.status),
		    state.reason);
}

static void prefill_first_run(void *arg)
{
	struct worker *w = arg;

	worker_start(w, "prefill");
	prefill_open(w);
	prefill_save(w, 0, w->params.end);
	RIG_REQUIRE(rig_state(w->client, w->room).source_free == 0);
	rig_stage_set(w->rig, PUBLISHED + 8 * w->tp_rank, 1);
	prefill_finished(w);
	worker_stop(w);
}

/* ---- decode --------------------------------------------------------------------------------- */

static uint64_t decode_first(const struct worker *w, uint32_t group)
{
	uint64_t window =
		w->window && group && w->params.end > w->window ? w->params.end - w->window : 0;

	return KVP_MAX(w->cached, window);
}

/* start_load_kv(): blocks have been allocated. */
static void decode_expect(struct worker *w, uint32_t open_ms)
{
	struct kvp_side_desc sides[2];
	struct kvp_expect_sender senders[8];
	struct kvp_expect expect = KVP_EXPECT_INIT;
	uint32_t i, group;

	expect.n_sides = worker_groups(w);
	for (group = 0; group < expect.n_sides; group++) {
		sides[group] = worker_side(w, group, decode_first(w, group));
		sides[group].first = decode_first(w, group);
	}
	expect.n_senders = w->n_senders;
	for (i = 0; i < w->n_senders; i++)
		senders[i] = (struct kvp_expect_sender){ w->other->address,
							 w->n_senders > 1 ? i : w->tp_rank, 1,
							 KVP_ROLE_DATA };
	expect.room = w->params.room;
	expect.key = w->params.key;
	expect.dest = w->tp_rank;
	expect.pool = w->pool.id;
	expect.sides = sides;
	expect.senders = senders;
	expect.end = w->params.end;
	expect.label = "request";
	expect.timers.open_ms = open_ms;
	RIG_CALL(w->client, kvp_expect(w->client, &expect, NULL, NULL, &w->room));
	rig_stage_set(w->rig, EXPECTED + 8 * w->tp_rank, 1);
}

/* The image of the pool with the rows of [from, to) in it. */
static void decode_put(const struct worker *w, uint8_t *image, uint64_t from, uint64_t to)
{
	struct rig_key key = worker_key(w);
	struct kvp_side_desc side;
	uint64_t first;
	uint32_t group;

	for (group = 0; group < worker_groups(w); group++) {
		first = KVP_MAX(from, decode_first(w, group));
		side = worker_side(w, group, first);
		if (first < to)
			rig_put_rows(image, &w->pool, &side, first, to, &key);
	}
}

static void decode_loaded(struct worker *w)
{
	struct kvp_room_state state = rig_await(w->client, w->room, KVP_WAIT_TERMINAL, SECS);

	RIG_REQUIRE(state.complete && !state.failed, "%s: %s", kvp_status_name(state.status),
		    state.reason);
	RIG_REQUIRE(state.arrived == w->params.end, "arrived %llu",
		    (unsigned long long)state.arrived);
}

static void decode_check(struct worker *w)
{
	uint8_t *image = rig_pool_image(&w->pool);

	decode_loaded(w);
	decode_put(w, image, 0, w->params.end);
	rig_pool_check(&w->pool, image, "loaded");
	free(image);
	(void)rig_await(w->client, w->room, KVP_WAIT_RELEASED, SECS);
}

static void decode_late_run(void *arg)
{
	struct worker *w = arg;

	worker_start(w, "decode");
	rig_stage_wait(w->rig, PUBLISHED + 8 * w->tp_rank, 1, SECS);
	rig_sleep_ms(200); /* in the queue */
	decode_expect(w, 0);
	decode_check(w);
	worker_stop(w);
}

static int decode_renew(struct worker *w, uint32_t sender, uint32_t lease_ms)
{
	return kvp_renew(w->client, w->other->address, w->params.room, w->params.key, sender,
			 lease_ms, NULL, NULL);
}

/* ---- scenarios ------------------------------------------------------------------------------ */

static struct worker prefill[8], decode[8];

static void setup(struct rig *rig, struct worker like, uint32_t prefill_tp, uint32_t decode_tp)
{
	const struct rig_daemon *p = rig_daemon_start(rig, "p0", DAEMON);
	const struct rig_daemon *d = rig_daemon_start(rig, "d0", DAEMON);
	uint64_t seed = like.params.room;
	uint32_t i;

	for (i = 0; i < KVP_KEY_BYTES; i++)
		like.params.key[i] = (uint8_t)rig_random(&seed);
	like.rig = rig;
	like.params.generation = 1;
	for (i = 0; i < prefill_tp; i++) {
		prefill[i] = like;
		prefill[i].daemon = p;
		prefill[i].tp_size = prefill_tp;
		prefill[i].tp_rank = i;
		prefill[i].dcp_size = 1;
		prefill[i].interleave = 1;
	}
	for (i = 0; i < decode_tp; i++) {
		decode[i] = like;
		decode[i].daemon = d;
		decode[i].other = p;
		decode[i].tp_size = decode_tp;
		decode[i].tp_rank = i;
		decode[i].n_senders = KVP_MAX(prefill_tp / decode_tp, 1u);
	}
}

static void play(struct rig *rig, void (*prefill_fn)(void *), void (*decode_fn)(void *))
{
	uint32_t i;
	char name[32];

	for (i = 0; i < prefill[0].tp_size; i++) {
		snprintf(name, sizeof(name), "prefill %u", i);
		rig_rank_start(rig, name, prefill_fn, &prefill[i]);
	}
	for (i = 0; i < decode[0].tp_size; i++) {
		snprintf(name, sizeof(name), "decode %u", i);
		rig_rank_start(rig, name, decode_fn, &decode[i]);
	}
	rig_ranks_join(rig, 60);
}

static void prefill_first(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 71, .end = 901 },
			       .dcp_size = 2,
			       .interleave = PAGE,
			       .lease_ms = 5000 },
	      2, 2);
	play(rig, prefill_first_run, decode_late_run);
}

static void dcp_interleave_1(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 72, .end = 1003 }, .dcp_size = 4, .interleave = 1 },
	      4, 4);
	play(rig, prefill_first_run, decode_late_run);
}

static void dcp_interleave_4(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 73, .end = 1003 }, .dcp_size = 4, .interleave = 4 },
	      4, 4);
	play(rig, prefill_first_run, decode_late_run);
}

static void dcp_interleave_block(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 74, .end = 1003 }, .dcp_size = 4, .interleave = PAGE },
	      4, 4);
	play(rig, prefill_first_run, decode_late_run);
}

static void cached_at_decode(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 75, .end = 803 },
			       .dcp_size = 2,
			       .interleave = 1,
			       .cached = 320 },
	      2, 2);
	play(rig, prefill_first_run, decode_late_run);
}

static void page_groups(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 76, .end = 811 },
			       .model = HYBRID_MODEL,
			       .dcp_size = 1,
			       .interleave = 1,
			       .window = 200,
			       .cached = 48 },
	      2, 1);
	play(rig, prefill_first_run, decode_late_run);
}

static void head_major_pages(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 84, .end = 811 },
			       .model = HEADS_MODEL,
			       .dcp_size = 1,
			       .interleave = 1,
			       .cached = 48 },
	      2, 1);
	play(rig, prefill_first_run, decode_late_run);
}

/* ---- leases --------------------------------------------------------------------------------- */

static void renewed_decode(void *arg)
{
	struct worker *w = arg;
	uint32_t i;

	worker_start(w, "decode");
	rig_stage_wait(w->rig, PUBLISHED, 1, SECS);
	for (i = 0; i < 10; i++) { /* in the queue, for two leases and more */
		RIG_CALL(w->client, decode_renew(w, 0, 600));
		rig_sleep_ms(150);
	}
	decode_expect(w, 0);
	decode_check(w);
	worker_stop(w);
}

static void renew_while_queued(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 77, .end = 500 },
			       .dcp_size = 1,
			       .interleave = 1,
			       .lease_ms = 600 },
	      1, 1);
	play(rig, prefill_first_run, renewed_decode);
}

/* Nobody comes: all chunks are free, once, and the blocks are the engine's. */
static void prefill_in_vain(struct worker *w, enum kvp_status status)
{
	worker_start(w, "prefill");
	prefill_open(w);
	prefill_save(w, 0, w->params.end);
	rig_stage_set(w->rig, PUBLISHED, 1);
	worker_fails(w, status);
	RIG_REQUIRE(rig_state(w->client, w->room).source_free == w->n_chunks, "source_free %u",
		    rig_state(w->client, w->room).source_free);
	rig_stage_set(w->rig, PREFILL_DONE, 1);
	worker_stop(w);
}

static void declined_prefill(void *arg)
{
	prefill_in_vain(arg, KVP_STATUS_DECLINED);
}

static void declining_decode(void *arg)
{
	struct worker *w = arg;
	uint64_t from;
	uint8_t wrong[KVP_KEY_BYTES] = { 1 };

	worker_start(w, "decode");
	rig_stage_wait(w->rig, PUBLISHED, 1, SECS);
	/* Whoever does not have the key declines nothing. */
	RIG_CALL(w->client, kvp_decline(w->client, w->other->address, w->params.room, wrong, 0,
					"not mine", NULL, NULL));
	rig_sleep_ms(200);
	RIG_REQUIRE(rig_stage_get(w->rig, PREFILL_DONE) == 0, "declined without the key");
	from = rig_now_ns();
	RIG_CALL(w->client, kvp_decline(w->client, w->other->address, w->params.room, w->params.key,
					0, "cancelled in the queue", NULL, NULL));
	rig_stage_wait(w->rig, PREFILL_DONE, 1, SECS);
	RIG_REQUIRE(rig_now_ns() - from < 2000000000u, "a decline took %.1f s",
		    (double)(rig_now_ns() - from) / 1e9);
	worker_stop(w);
}

static void decline(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 78, .end = 500 },
			       .dcp_size = 1,
			       .interleave = 1,
			       .lease_ms = 20000 },
	      1, 1);
	play(rig, declined_prefill, declining_decode);
}

static void expired_prefill(void *arg)
{
	prefill_in_vain(arg, KVP_STATUS_LEASE);
}

static void too_late_decode(void *arg)
{
	struct worker *w = arg;

	worker_start(w, "decode");
	rig_stage_wait(w->rig, PREFILL_DONE, 1, SECS);
	decode_expect(w, 400);
	worker_fails(w, KVP_STATUS_TIMEOUT);
	RIG_REQUIRE(rig_state(w->client, w->room).retry, "a later prefill may serve it");
	worker_stop(w);
}

static void lease_expires(struct rig *rig)
{
	setup(rig,
	      (struct worker){ .params = { .room = 79, .end = 500 },
			       .dcp_size = 1,
			       .interleave = 1,
			       .lease_ms = 500 },
	      1, 1);
	play(rig, expired_prefill, too_late_decode);
}

/* ---- preemption ----------------------------------------------------------------------------- */

/* Blocks of parked chunks are taken away; the request comes back later with other blocks. */
static void recalling_prefill(void *arg)
{
	struct worker *w = arg;
	uint32_t i, k, t, from;

	worker_start(w, "prefill");
	prefill_open(w);
	prefill_save(w, 0, 512);
	prefill_submit(w, &(struct submission){ .from = 512, .to = 600, .fence_value = 1 });
	RIG_CALL(w->client, kvp_recall(w->client, w->room, 1, &from)); /* handle_preemptions() */
	RIG_REQUIRE(from == 1, "recalled from %u", from);
	w->n_chunks = 1;
	for (i = 256 / PAGE, k = BLOCKS - 2; i < k; i++, k--) {
		t = w->blocks[0][i];
		w->blocks[0][i] = w->blocks[0][k];
		w->blocks[0][k] = t;
	}
	w->params.generation = 2;
	prefill_compute(w, 256, w->params.end, NULL);
	rig_stage_set(w->rig, PUBLISHED, 1);
	prefill_submit(w, &(struct submission){ .from = 256, .to = 600 });

	/* Again, with decode there: what waits for its fence can be recalled, what has gone cannot.
	 */
	prefill_submit(w, &(struct submission){ .from = 600, .to = 700, .fence_value = 2 });
	RIG_REQUIRE(kvp_room_wait_delivered(w->client, w->room, 2, SECS * 1000) == 0);
	RIG_CALL(w->client, kvp_recall(w->client, w->room, 0, &from));
	RIG_REQUIRE(from == 2, "recalled from %u", from);
	w->n_chunks = 2;
	prefill_submit(w, &(struct submission){ .from = 600, .to = w->params.end, .last = true });
	prefill_finished(w);
	worker_stop(w);
}

static void recalled_decode(void *arg)
{
	struct worker *w = arg;
	uint8_t *image;

	worker_start(w, "decode");
	rig_stage_wait(w->rig, PUBLISHED, 1, SECS);
	decode_expect(w, 0);
	decode_loaded(w);
	image = rig_pool_image(&w->pool);
	decode_put(w, image, 0, 256);
	w->params.generation = 2;
	decode_put(w, image, 256, w->params.end);
	rig_pool_check(&w->pool, image, "after two recalls");
	free(image);
	worker_stop(w);
}

static void preempted_and_recalled(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 80, .end = 777 }, .dcp_size = 1, .interleave = 1 },
	      1, 1);
	play(rig, recalling_prefill, recalled_decode);
}

/* The request will not come back. */
static void aborting_prefill(void *arg)
{
	struct worker *w = arg;

	worker_start(w, "prefill");
	prefill_open(w);
	prefill_save(w, 0, 512);
	prefill_submit(w, &(struct submission){ .from = 512, .to = 600, .fence_value = 1 });
	RIG_CALL(w->client, kvp_abort(w->client, w->room, "preempted"));
	worker_fails(w, KVP_STATUS_ABORTED);
	RIG_REQUIRE(rig_state(w->client, w->room).source_free == w->n_chunks);
	rig_pool_reset(&w->pool); /* its blocks are another request's now */
	rig_stage_set(w->rig, PREFILL_DONE, 1);
	worker_stop(w);
}

static void preempted_and_aborted(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 81, .end = 777 }, .dcp_size = 1, .interleave = 1 },
	      1, 1);
	play(rig, aborting_prefill, too_late_decode);
}

/* Decode loses blocks while it loads: what arrived is a prefix; the rest is nobody's. */
static void stalled_prefill(void *arg)
{
	struct worker *w = arg;

	worker_start(w, "prefill");
	prefill_open(w);
	prefill_save(w, 0, 512);
	prefill_submit(w, &(struct submission){ .from = 512, .to = 600, .fence_value = 1 });
	worker_fails(w, KVP_STATUS_ABORTED);
	RIG_REQUIRE(rig_state(w->client, w->room).source_free == w->n_chunks);
	worker_stop(w);
}

static void preempted_decode(void *arg)
{
	struct worker *w = arg;
	uint64_t until = rig_now_ns() + (uint64_t)SECS * 1000000000u;
	uint8_t *image;

	worker_start(w, "decode");
	decode_expect(w, 0);
	while (rig_state(w->client, w->room).arrived < 512) {
		RIG_REQUIRE(rig_now_ns() < until);
		(void)kvp_wait(w->client, 20); /* looks again */
	}
	RIG_CALL(w->client, kvp_abort(w->client, w->room, "preempted"));
	worker_fails(w, KVP_STATUS_ABORTED);
	RIG_REQUIRE(rig_state(w->client, w->room).arrived == 512); /* blocks beyond are errors */
	image = rig_pool_image(&w->pool);
	decode_put(w, image, 0, 512);
	rig_pool_check(&w->pool, image, "the prefix that arrived");
	free(image);
	worker_stop(w);
}

static void decode_preempted(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 82, .end = 777 }, .dcp_size = 1, .interleave = 1 },
	      1, 1);
	play(rig, stalled_prefill, preempted_decode);
}

/* ---- layer by layer ------------------------------------------------------------------------- */

static void layerwise_prefill(void *arg)
{
	struct worker *w = arg;
	uint64_t from, to = 0, step = 0;
	uint32_t layer;
	uint8_t set;

	worker_start(w, "prefill");
	prefill_open(w);
	for (from = 0; from < w->params.end; from = to) {
		to = KVP_MIN(from + 300, w->params.end);
		step++;
		for (layer = 0; layer < LAYERS; layer++) { /* save_kv_layer() */
			set = (uint8_t)(1u << layer);
			prefill_submit(w, &(struct submission){ .from = from,
								.to = to,
								.set = &set,
								.fence_value = step,
								.fence_word = layer });
			prefill_compute(w, from, to, &set);
			kvp_fence_signal(w->fence, layer, step);
		}
		rig_stage_set(w->rig, PUBLISHED + 8 * w->tp_rank, 1);
	}
	prefill_submit(w, &(struct submission){ .from = to, .to = to, .last = true });
	prefill_finished(w);
	worker_stop(w);
}

static void layerwise_save(struct rig *rig)
{
	setup(rig,
	      (struct worker){
		      .params = { .room = 83, .end = 1000 }, .dcp_size = 2, .interleave = 1 },
	      2, 2);
	play(rig, layerwise_prefill, decode_late_run);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "prefill_first", prefill_first },
		{ "renew_while_queued", renew_while_queued },
		{ "decline", decline },
		{ "lease_expires", lease_expires },
		{ "preempted_and_recalled", preempted_and_recalled },
		{ "preempted_and_aborted", preempted_and_aborted },
		{ "decode_preempted", decode_preempted },
		{ "page_groups", page_groups },
		{ "head_major_pages", head_major_pages },
		{ "cached_at_decode", cached_at_decode },
		{ "layerwise_save", layerwise_save },
		{ "dcp_interleave_1", dcp_interleave_1 },
		{ "dcp_interleave_4", dcp_interleave_4 },
		{ "dcp_interleave_block", dcp_interleave_block },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
