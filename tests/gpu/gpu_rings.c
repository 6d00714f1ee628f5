/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rings in a GPU's own memory, on a GPU: what the device says of itself, memory for rings of both
 * kinds with a dma-buf or the reason why there is none, gathers into such a ring compared byte by
 * byte, cleaning, and what the library exports of pools. Then real daemons: where their rings lie,
 * pools that are paused and resumed at the same address, a GPU without memory for a lane, and
 * landing between two daemons over rings on the device and in the host's memory.
 *
 * Prints a line for each; the exit status says whether all were right.
 */

#include <cjson/cJSON.h>
#include <cuda.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/device.h"
#include "client/kvpack.h"
#include "daemon/gpu.h"
#include "daemon/lane.h"
#include "proto/util.h"
#include "tests/gpu/common.h"
#include "tests/support_rig.h"
#include "tests/support_rows.h"

#define MIB (UINT64_C(1) << 20)
#define RING_BYTES (128 * MIB)
#define POOL_BYTES (512 * MIB)

static struct kvp_gpu *gpu;

static uint64_t free_bytes(void)
{
	size_t free_now, total;

	CHECK(cuMemGetInfo(&free_now, &total));
	return free_now;
}

/* How much of what was free is missing; the driver takes a little for itself now and then. */
static int64_t missing(uint64_t level)
{
	return (int64_t)(level - free_bytes());
}

static bool is_back(uint64_t level)
{
	return missing(level) <= (int64_t)(4 * MIB);
}

/* ---- memory of rings, without a daemon ------------------------------------------------------- */

static void run(void)
{
	uint64_t ticket, over = 0;

	if (kvp_gpu_launch(gpu, &ticket) < 0)
		exit(1);
	while (over < ticket)
		if (kvp_gpu_poll(gpu, &over) < 0)
			exit(1);
}

static void check_traits(void)
{
	const struct kvp_gpu_traits *t = kvp_gpu_traits(gpu);
	char text[160];

	snprintf(text, sizeof(text),
		 "vmm %d, vmm for NICs %d, plain for NICs %d, dma-buf %d, writes ordering %d, "
		 "flush %d",
		 t->vmm, t->vmm_rdma, t->rdma, t->dmabuf, t->ordering, t->can_flush);
	say(t->vmm, "the device says", text);
}

static void check_alloc(bool vmm)
{
	struct kvp_gpu_ring ring;
	uint64_t before = free_bytes(), during;
	char text[160], what[64];
	int r = kvp_gpu_ring_alloc(gpu, vmm, RING_BYTES, &ring);

	snprintf(what, sizeof(what), "ring of 128 MiB, %s memory", vmm ? "virtual" : "plain");
	if (r < 0) {
		say(false, what, kvp_gpu_error(gpu));
		return;
	}
	during = free_bytes();
	snprintf(text, sizeof(text), "for NICs: %s; dma-buf: %s%s", ring.rdma ? "yes" : "no",
		 ring.dmabuf >= 0 ? "yes" : "no, ", ring.dmabuf_reason);
	say(ring.bytes >= RING_BYTES && (ring.dmabuf >= 0 || ring.dmabuf_reason[0]), what, text);
	kvp_gpu_ring_free(gpu, &ring);
	snprintf(text, sizeof(text), "%llu MiB taken, %lld MiB not back",
		 (unsigned long long)((before - during) >> 20),
		 (long long)missing(before) / (1 << 20));
	say(is_back(before), "given back, dma-buf and all", text);
}

static void check_no_memory(void)
{
	struct kvp_gpu_ring ring;
	int r = kvp_gpu_ring_alloc(gpu, true, UINT64_C(1) << 42, &ring);

	say(r == -ENOMEM, "a ring of 4 TiB", r < 0 ? kvp_gpu_error(gpu) : "was made");
	r = kvp_gpu_ring_alloc(gpu, true, 2 * MIB, &ring);
	say(r == 0, "a small one after it", r < 0 ? kvp_gpu_error(gpu) : "");
	if (r == 0)
		kvp_gpu_ring_free(gpu, &ring);
}

/* Gathers every rank's rows into the ring, and compares with what the processor gathers. */
static void check_gather(bool vmm)
{
	static struct rows rows;
	static struct kvp_part parts[ROWS_ENTRIES];
	struct kvp_gpu_ring ring;
	CUdeviceptr src;
	unsigned char *src_map, *want, *got;
	uint64_t at = 0, bytes = 0;
	uint32_t wrong = 0;

	memset(&rows, 0, sizeof(rows));
	rows_make(&rows, 512);
	want = calloc(1, RING_BYTES);
	got = malloc(RING_BYTES);
	CHECK(cuMemAlloc(&src, rows.pool_bytes));
	CHECK(cuMemcpyHtoD(src, rows.src, rows.pool_bytes));
	src_map = (unsigned char *)(uintptr_t)src;
	if (!want || !got || kvp_gpu_ring_alloc(gpu, vmm, RING_BYTES, &ring) < 0)
		exit(1);
	for (int pass = 0; pass < 2; pass++, at = 0)
		for (uint32_t r = 0; r < ROWS_RANKS; r++) {
			struct kvp_copy_piece piece = {
				.leg = &rows.legs[r],
				.pool = { pass ? &src_map : &rows.src, &rows.src_side },
				.tokens = rows.tokens,
				.parts = parts,
			};

			bytes = kvp_piece_layout(piece.leg, NULL, 0, (uint32_t)rows.tokens, parts,
						 &piece.n_parts);
			if (!pass)
				kvp_gather(&piece, want + at);
			else if (kvp_jobs_gather(kvp_gpu_jobs(gpu), &piece, ring.addr + at) < 0)
				exit(1);
			at += KVP_ALIGN_UP(bytes, 4096u);
		}
	run();
	at = ROWS_RANKS * KVP_ALIGN_UP(bytes, 4096u);
	CHECK(cuMemcpyDtoH(got, ring.addr, at));
	for (uint32_t r = 0; r < ROWS_RANKS; r++)
		wrong += memcmp(got + r * KVP_ALIGN_UP(bytes, 4096u),
				want + r * KVP_ALIGN_UP(bytes, 4096u), bytes) != 0;
	say(wrong == 0, vmm ? "gather into a ring, virtual memory" : "the same, plain memory",
	    wrong ? "ranks differ from the processor's gather" : "equal to the processor's gather");
	CHECK(cuMemFree(src));
	kvp_gpu_ring_free(gpu, &ring);
	free(want);
	free(got);
}

static bool all_are(const unsigned char *at, uint64_t n, unsigned char byte)
{
	for (uint64_t i = 0; i < n; i++)
		if (at[i] != byte)
			return false;
	return true;
}

/* What lanes do with slots besides: cleaning them, and copies from ordinary memory. */
static void check_cleaning(void)
{
	struct kvp_gpu_ring ring;
	unsigned char *host = malloc(16 * MIB), *zeros = calloc(1, KVP_JOBS_ZEROS);
	double t0, us;
	char text[96];

	if (!host || !zeros || kvp_gpu_ring_alloc(gpu, true, 16 * MIB, &ring) < 0)
		exit(1);
	memset(host, 0x7e, 16 * MIB);
	if (kvp_gpu_write(gpu, ring.addr, host, 16 * MIB) < 0 ||
	    kvp_gpu_write(gpu, ring.addr + 12 * MIB, zeros, KVP_JOBS_ZEROS) < 0 ||
	    kvp_jobs_zero(kvp_gpu_jobs(gpu), ring.addr + 12 * MIB, ring.addr + 4097, 8 * MIB - 5) <
		    0)
		exit(1);
	t0 = rows_now();
	run();
	us = (rows_now() - t0) * 1e6;
	CHECK(cuMemcpyDtoH(host, ring.addr, 12 * MIB));
	snprintf(text, sizeof(text), "8 MiB in %.0f us", us);
	say(all_are(host, 4097, 0x7e) && all_are(host + 4097, 8 * MIB - 5, 0) &&
		    all_are(host + 4097 + 8 * MIB - 5, 4 * MIB - 4097, 0x7e),
	    "a slot is cleaned, its neighbours are not", text);
	kvp_gpu_ring_free(gpu, &ring);
	free(host);
	free(zeros);
}

static void check_flush(void)
{
	double t0 = rows_now(), us;
	char text[64];
	int r;

	if (!kvp_gpu_traits(gpu)->can_flush) {
		say(true, "flush of NICs' writes", "the device has none");
		return;
	}
	for (int i = 0; i < 100; i++)
		r = kvp_gpu_flush(gpu);
	us = (rows_now() - t0) * 1e4;
	snprintf(text, sizeof(text), "%.1f us", us);
	say(r == 0, "flush of NICs' writes", r ? kvp_gpu_error(gpu) : text);
}

/* ---- what the library exports ---------------------------------------------------------------- */

static void export_line(const char *what, uint64_t addr, uint64_t bytes)
{
	static struct kvpl_export out;
	char err[KVPL_DEVICE_ERR] = "", text[200];
	int r = kvpl_device_export(addr, bytes, &out, err);

	if (r < 0) {
		say(false, what, err);
		return;
	}
	kvpl_device_dmabuf(addr, bytes, &out);
	if (out.dmabuf >= 0)
		snprintf(text, sizeof(text), "dma-buf of %llu bytes, the pool at %llu; %u chunks",
			 (unsigned long long)out.dmabuf_bytes,
			 (unsigned long long)out.dmabuf_offset, out.n_chunks);
	else
		snprintf(text, sizeof(text), "no dma-buf: %s", out.dmabuf_reason);
	say(out.dmabuf >= 0 ? out.dmabuf_bytes - out.dmabuf_offset >= bytes : out.dmabuf_reason[0],
	    what, text);
	kvpl_export_fini(&out);
}

/* One range of as many physical chunks as `bytes` has; the mapping keeps them. */
static void map_chunks(CUdeviceptr va, uint64_t bytes, uint64_t chunk_bytes, bool for_nics)
{
	const CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
		.allocFlags.gpuDirectRDMACapable = for_nics,
	};
	const CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle chunk;

	for (uint64_t at = 0; at < bytes; at += chunk_bytes) {
		CHECK(cuMemCreate(&chunk, chunk_bytes, &prop, 0));
		CHECK(cuMemMap(va + at, chunk_bytes, 0, chunk, 0));
		CHECK(cuMemRelease(chunk));
	}
	CHECK(cuMemSetAccess(va, bytes, &access, 1));
}

static void check_exports(void)
{
	CUdeviceptr plain, va;
	uint64_t before;
	char text[64];

	CHECK(cuMemAlloc(&plain, 64 * MIB));
	export_line("export of cuMemAlloc memory", plain, 64 * MIB);
	export_line("export of a part of it, at an odd place", plain + 4097, 3 * MIB + 5);
	CHECK(cuMemFree(plain));
	before = free_bytes();
	for (int nics = 0; nics < 2; nics++) {
		CHECK(cuMemAddressReserve(&va, 64 * MIB, 0, 0, 0));
		map_chunks(va, 64 * MIB, 16 * MIB, nics);
		export_line(nics ? "export of 4 chunks made for NICs" : "export of 4 chunks", va,
			    64 * MIB);
		CHECK(cuMemUnmap(va, 64 * MIB));
		CHECK(cuMemAddressFree(va, 64 * MIB));
	}
	snprintf(text, sizeof(text), "%lld MiB missing", (long long)missing(before) / (1 << 20));
	say(is_back(before), "the exports' fds pin nothing once closed", text);
}

static void alone(struct rig *rig)
{
	char err[160];

	(void)rig;
	context();
	RIG_REQUIRE(kvp_gpu_open(&gpu, "0", err, sizeof(err)) == 0, "%s", err);
	printf("%s %s\n", kvp_gpu_name(gpu), kvp_gpu_uuid(gpu));
	check_traits();
	check_alloc(true);
	check_alloc(false);
	check_no_memory();
	check_gather(true);
	check_gather(false);
	check_cleaning();
	check_flush();
	check_exports();
	kvp_gpu_close(gpu);
	RIG_REQUIRE(bad == 0, "%d lines say FAIL", bad);
}

/* ---- with daemons ---------------------------------------------------------------------------- */

#define PAGE 64u
#define ROW 576u
#define LAYERS 8u
#define PAGES 1024u /* of each of two ranges: sources, destinations */
#define TOKENS (PAGES * PAGE)
#define LAYER_BYTES ((uint64_t)PAGES * PAGE * ROW)
#define ROWS_OF_POOL (LAYERS * LAYER_BYTES)

/* A pool of 302 MB on the device: dense pages, a layer behind the other. */
struct dev_pool {
	CUdeviceptr at;
	uint32_t id;
};

static void pool_register(struct dev_pool *pool, struct kvp_client *client, CUdeviceptr at)
{
	struct kvp_entry_desc entries[LAYERS] = { 0 };
	const struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .addr = at, .bytes = ROWS_OF_POOL };
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	for (uint32_t i = 0; i < LAYERS; i++)
		entries[i] = (struct kvp_entry_desc){
			.layer = i,
			.klass = KVP_SHARDED,
			.offset = i * LAYER_BYTES,
			.bytes = LAYER_BYTES,
			.page_stride = PAGE * ROW,
			.row_stride = ROW,
			.row_bytes = ROW,
			.full_bytes = ROW,
			.rows_per_page = PAGE,
			.n_pages = PAGES,
		};
	desc.entries = entries;
	desc.n_entries = LAYERS;
	desc.mems = &mem;
	desc.n_mems = 1;
	pool->at = at;
	RIG_CALL(client, kvp_pool_register(client, &desc, &pool->id));
}

/* A pattern that differs from place to place and from seed to seed. */
static void pool_fill(CUdeviceptr at, uint32_t seed)
{
	uint32_t *host = malloc(ROWS_OF_POOL);

	RIG_REQUIRE(host);
	for (uint64_t i = 0; i < ROWS_OF_POOL / 4; i++)
		host[i] = (uint32_t)i * 2654435761u + seed;
	CHECK(cuMemcpyHtoD(at, host, ROWS_OF_POOL));
	free(host);
}

static bool pools_equal(CUdeviceptr a, CUdeviceptr b)
{
	void *one = malloc(ROWS_OF_POOL), *two = malloc(ROWS_OF_POOL);
	bool equal;

	RIG_REQUIRE(one && two);
	CHECK(cuMemcpyDtoH(one, a, ROWS_OF_POOL));
	CHECK(cuMemcpyDtoH(two, b, ROWS_OF_POOL));
	equal = memcmp(one, two, ROWS_OF_POOL) == 0;
	free(one);
	free(two);
	return equal;
}

struct ends {
	struct kvp_client *prefill, *decode;
	struct dev_pool from, to;
};

/* All tokens from pool to pool; seconds from the submit to complete. The meta goes along. */
static double transfer(struct ends *ends, uint64_t number)
{
	static uint32_t pages[PAGES];
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_expect_sender sender = { .n_dests = 1 };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_open open = KVP_OPEN_INIT;
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_room_state state;
	kvp_room_id sent, expected;
	char meta[3000];
	double t0;

	for (uint32_t i = 0; i < PAGES; i++)
		pages[i] = i;
	memset(meta, (int)number, sizeof(meta));
	open.room = expect.room = number;
	open.pool = ends->from.id;
	open.sides = expect.sides = &side;
	open.n_sides = expect.n_sides = 1;
	RIG_CALL(ends->prefill, kvp_open(ends->prefill, &open, NULL, NULL, &sent));
	side.pages = pages;
	side.n_pages = PAGES;
	sender.address = kvp_node_address(ends->prefill);
	expect.pool = ends->to.id;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	expect.meta_from = 0;
	RIG_CALL(ends->decode, kvp_expect(ends->decode, &expect, NULL, NULL, &expected));
	(void)rig_await(ends->prefill, sent, KVP_WAIT_READY, 30);
	chunk.tokens = TOKENS;
	chunk.sides = &side;
	chunk.n_sides = 1;
	chunk.last = 1;
	chunk.meta = meta;
	chunk.meta_bytes = sizeof(meta);
	t0 = rows_now();
	RIG_CALL(ends->prefill, kvp_submit(ends->prefill, sent, &chunk, NULL, NULL, NULL));
	state = rig_await(ends->decode, expected, KVP_WAIT_TERMINAL, 60);
	t0 = rows_now() - t0;
	RIG_REQUIRE(state.complete, "%s", state.reason);
	RIG_REQUIRE(state.meta_bytes == sizeof(meta) && !memcmp(state.meta, meta, sizeof(meta)));
	(void)rig_await(ends->prefill, sent, KVP_WAIT_RELEASED, 30);
	(void)rig_await(ends->decode, expected, KVP_WAIT_RELEASED, 30);
	kvp_room_forget(ends->decode, expected);
	kvp_room_forget(ends->prefill, sent);
	return t0;
}

/* "device (cuda): ..." of the first lane with a GPU. */
static void rings_of(struct kvp_client *client, char *text, size_t bytes)
{
	char *json = NULL;
	cJSON *all, *lane, *rings = NULL;

	RIG_CALL(client, kvp_inspect(client, "lanes", NULL, &json));
	all = cJSON_Parse(json);
	cJSON_ArrayForEach (lane, cJSON_GetObjectItem(all, "lanes"))
		if (!rings)
			rings = cJSON_GetObjectItem(lane, "gpu");
	RIG_REQUIRE(rings, "%s", json);
	snprintf(text, bytes, "%s (%s): %s", cJSON_GetObjectItem(rings, "rings")->valuestring,
		 cJSON_GetObjectItem(rings, "rings_why")->valuestring,
		 cJSON_GetObjectItem(rings, "rings_reason")->valuestring);
	cJSON_Delete(all);
	free(json);
}

/* Waits for the device to have `level` bytes free again; says how long it took. */
static double memory_back(uint64_t level)
{
	double t0 = rows_now();

	while (!is_back(level) && rows_now() - t0 < 5)
		usleep(1000);
	return (rows_now() - t0) * 1e3;
}

static void back_line(uint64_t level, const char *what)
{
	double ms = memory_back(level);
	char text[96];

	snprintf(text, sizeof(text), "level reached %.1f ms after the answer and the free", ms);
	say(ms < 1000, what, text);
}

static void resume(struct ends *ends, CUdeviceptr at)
{
	const struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .addr = at, .bytes = ROWS_OF_POOL };

	RIG_CALL(ends->prefill, kvp_pool_resume_mems(ends->prefill, ends->from.id, &mem, 1));
	ends->from.at = at;
}

static void pause_source(struct ends *ends)
{
	RIG_CALL(ends->prefill, kvp_pool_pause(ends->prefill, ends->from.id, NULL, NULL));
}

/* The engine frees the memory below its range and brings other memory there. */
static void paused_virtual(struct ends *ends)
{
	uint64_t level = free_bytes();
	CUdeviceptr va;

	CHECK(cuMemAddressReserve(&va, POOL_BYTES, 0, 0, 0));
	map_chunks(va, POOL_BYTES, 128 * MIB, false);
	pool_fill(va, 1);
	pool_register(&ends->from, ends->prefill, va);
	(void)transfer(ends, 1);
	say(pools_equal(va, ends->to.at), "a room over virtual memory", "every byte equal");
	for (uint32_t round = 2; round < 4; round++) {
		pause_source(ends);
		CHECK(cuMemUnmap(va, POOL_BYTES));
		back_line(level, "paused: virtual memory is back");
		map_chunks(va, POOL_BYTES, 128 * MIB, false);
		pool_fill(va, round);
		resume(ends, va);
		(void)transfer(ends, round);
		say(pools_equal(va, ends->to.at), "resumed at the same address",
		    "new bytes, every one equal");
	}
	RIG_CALL(ends->prefill, kvp_pool_unregister(ends->prefill, ends->from.id, NULL, NULL));
	CHECK(cuMemUnmap(va, POOL_BYTES));
	CHECK(cuMemAddressFree(va, POOL_BYTES));
	back_line(level, "unregistered: memory is back");
}

/* The same by the handles of plain allocations, whose addresses the driver chooses. */
static void paused_plain(struct ends *ends)
{
	uint64_t level = free_bytes();
	CUdeviceptr plain, again;

	CHECK(cuMemAlloc(&plain, ROWS_OF_POOL));
	pool_fill(plain, 7);
	pool_register(&ends->from, ends->prefill, plain);
	(void)transfer(ends, 7);
	say(pools_equal(plain, ends->to.at), "a room over plain memory", "every byte equal");
	pause_source(ends);
	CHECK(cuMemFree(plain));
	back_line(level, "paused: plain memory is back");
	CHECK(cuMemAlloc(&again, ROWS_OF_POOL));
	pool_fill(again, 8);
	resume(ends, again);
	(void)transfer(ends, 8);
	say(pools_equal(again, ends->to.at),
	    again == plain ? "resumed at the same address" : "resumed at another address",
	    "new bytes, every one equal");
}

static void paused_pools(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "node", "[gpu]\ndevices = all\n");
	struct ends ends = { 0 };
	CUdeviceptr to;
	char text[256];

	context();
	ends.prefill = rig_client(daemon, "prefill");
	ends.decode = rig_client(daemon, "decode");
	rings_of(ends.prefill, text, sizeof(text));
	say(true, "one daemon: its rings", text);
	CHECK(cuMemAlloc(&to, ROWS_OF_POOL));
	pool_register(&ends.to, ends.decode, to);
	paused_virtual(&ends);
	paused_plain(&ends);
	kvp_client_close(ends.prefill);
	kvp_client_close(ends.decode);
	RIG_REQUIRE(bad == 0, "%d lines say FAIL", bad);
}

/* ---- a GPU without memory -------------------------------------------------------------------- */

static char *lanes_json(struct kvp_client *client)
{
	char *json = NULL;

	RIG_CALL(client, kvp_inspect(client, "lanes", NULL, &json));
	return json;
}

/* Takes all but so many bytes; the caller's to free. */
static CUdeviceptr leave(uint64_t bytes)
{
	CUdeviceptr hog = 0;
	uint64_t all = free_bytes();

	RIG_REQUIRE(all > bytes);
	CHECK(cuMemAlloc(&hog, (all - bytes) / MIB * MIB));
	return hog;
}

/* A lane of this process: 8 GiB of rings, and 2 GiB are free. */
static void few_slots(void)
{
	const struct kvp_lane_config config = { .name = "gpu0",
						.gpu = "0",
						.slots = 256,
						.slot_bytes = 16 * MIB,
						.memory = KVP_RINGS_DEVICE };
	static struct kvp_lane_status status;
	struct kvp_lane *lane;
	char err[256], text[256];
	int r = kvp_lane_start(&lane, &config, err, sizeof(err));

	if (r < 0) {
		say(false, "8 GiB of rings, 2 GiB free", err);
		return;
	}
	kvp_lane_status_read(lane, &status);
	snprintf(text, sizeof(text), "%u slots each, %s: %s", status.pack_slots,
		 kvp_lane_rings(lane)->word, kvp_lane_rings(lane)->reason);
	say(status.pack_slots < 256 && kvp_lane_rings(lane)->device, "8 GiB of rings, 2 GiB free",
	    text);
	kvp_lane_stop(lane);
}

static void no_memory(struct rig *rig)
{
	const struct kvp_mem mem = { .kind = KVP_MEM_DEVICE, .bytes = ROWS_OF_POOL };
	struct kvp_entry_desc entry = { .klass = KVP_SHARDED,
					.bytes = LAYER_BYTES,
					.page_stride = PAGE * ROW,
					.row_stride = ROW,
					.row_bytes = ROW,
					.full_bytes = ROW,
					.rows_per_page = PAGE,
					.n_pages = PAGES };
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_mem mems[1] = { mem };
	struct kvp_client *client;
	struct rig_daemon *daemon;
	CUdeviceptr own, hog;
	uint32_t id;
	char *json;
	int r;

	context();
	CHECK(cuMemAlloc(&own, ROWS_OF_POOL));
	hog = leave(2048 * MIB);
	few_slots();
	CHECK(cuMemFree(hog));

	hog = leave(64 * MIB); /* not even a context */
	daemon = rig_daemon_start(rig, "none", "[gpu]\ndevices = all\n");
	client = rig_client(daemon, "engine");
	mems[0].addr = own;
	desc.entries = &entry;
	desc.n_entries = 1;
	desc.mems = mems;
	desc.n_mems = 1;
	r = kvp_pool_register(client, &desc, &id);
	say(r < 0 && strstr(kvp_last_error(client), "not served"),
	    "no memory for a lane: the daemon lives", kvp_last_error(client));
	json = lanes_json(client);
	say(strstr(json, "gpus_refused") != NULL, "and says so in its lanes", "");
	free(json);
	kvp_client_close(client);
	CHECK(cuMemFree(hog));
	CHECK(cuMemFree(own));
	RIG_REQUIRE(bad == 0, "%d lines say FAIL", bad);
}

/* ---- landing --------------------------------------------------------------------------------- */

#define TIMES 5u

/* Between two daemons on this GPU: which rings, and how fast. */
static void land(struct rig *rig, const char *memory, uint64_t room)
{
	struct ends ends = { 0 };
	char extra[128], name[16], text[256], line[400];
	double secs[TIMES];
	CUdeviceptr at[2];
	bool equal = true;

	snprintf(extra, sizeof(extra), "[gpu]\ndevices = all\n[pack]\nmemory = %s\n", memory);
	snprintf(name, sizeof(name), "p-%s", memory);
	ends.prefill = rig_client(rig_daemon_start(rig, name, extra), "prefill");
	snprintf(name, sizeof(name), "d-%s", memory);
	ends.decode = rig_client(rig_daemon_start(rig, name, extra), "decode");
	for (int i = 0; i < 2; i++)
		CHECK(cuMemAlloc(&at[i], ROWS_OF_POOL));
	pool_register(&ends.from, ends.prefill, at[0]);
	pool_register(&ends.to, ends.decode, at[1]);
	for (uint32_t i = 0; i < TIMES; i++) {
		pool_fill(at[0], (uint32_t)room + i);
		secs[i] = transfer(&ends, room + i);
		equal = equal && pools_equal(at[0], at[1]);
	}
	rings_of(ends.decode, text, sizeof(text));
	snprintf(line, sizeof(line), "%.2f GB/s, every byte %s; %s",
		 (double)ROWS_OF_POOL / rows_median(secs, TIMES) / 1e9, equal ? "equal" : "WRONG",
		 text);
	snprintf(text, sizeof(text), "landing, pack.memory = %s", memory);
	say(equal, text, line);
	kvp_client_close(ends.prefill);
	kvp_client_close(ends.decode);
	for (int i = 0; i < 2; i++)
		CHECK(cuMemFree(at[i]));
}

static void landing(struct rig *rig)
{
	context();
	land(rig, "host", 100);
	land(rig, "auto", 200);
	if (getenv("KVP_TEST_DEVICE")) /* else the daemons refuse to start */
		land(rig, "device", 300);
	RIG_REQUIRE(bad == 0, "%d lines say FAIL", bad);
}

static const struct rig_scenario scenarios[] = {
	{ "memory of rings", alone },
	{ "pools paused and resumed", paused_pools },
	{ "a GPU without memory", no_memory },
	{ "landing between two daemons", landing },
};

int main(int argc, char **argv)
{
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
