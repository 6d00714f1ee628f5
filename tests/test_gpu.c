/* SPDX-License-Identifier: Apache-2.0 */

/* Lanes whose GPU fails, stops or has nothing to do with a pool; with the GPU that is none. */

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/pool.h"
#include "proto/kvpack.pb-c.h"
#include "tests/fake_gpu.h"
#include "tests/support_lane.h"

#define END 2048u
#define DESTS 2u

struct scene {
	struct lt lt;
	struct kvp_board lane_board;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src, dst[DESTS];
	struct lt_room room;
	bool local;
	uint32_t uid; /* of the pools */
};

static struct lt_shape shape_of(uint32_t page, uint32_t dcp_size)
{
	return (struct lt_shape){ .page = page,
				  .dcp_size = dcp_size,
				  .interleave = 1,
				  .n_pages = 2 * END / page / dcp_size,
				  .layers = 3,
				  .row_bytes = 144,
				  .seed = dcp_size };
}

static void room_make(struct scene *scene, uint64_t id)
{
	scene->room = (struct lt_room){
		.lt = &scene->lt,
		.room = id,
		.end = END,
		.n_senders = 1,
		.n_dests = DESTS,
		.meta_from = -1,
		.slot_bytes = 1 << 20,
		.pipe = scene->local ? NULL : &scene->pipe,
	};
	scene->room.senders[0].pool = &scene->src;
	for (uint32_t d = 0; d < DESTS; d++)
		scene->room.dests[d].pool = &scene->dst[d];
}

static void pools_make(struct scene *scene, uint32_t page)
{
	struct lt_shape shape = shape_of(page, 1);

	shape.uid = scene->uid;
	lt_pool_make(&scene->src, &scene->lt, scene->from, &shape);
	lt_pool_fill(&scene->src, 42, 0, END);
	shape = shape_of(page, DESTS);
	shape.uid = scene->uid;
	for (uint32_t d = 0; d < DESTS; d++) {
		shape.dcp_rank = d;
		lt_pool_make(&scene->dst[d], &scene->lt, scene->to, &shape);
	}
}

static struct scene *scene_over(const struct kvp_net_ops *net, uint32_t page)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	bool local = !net;
	struct kvp_lane_config config = {
		.slots = 8,
		.pack = true,
		.net = net,
		.flush = net == fake_gpu_net() ? KVP_FLUSH_ALWAYS : KVP_FLUSH_AUTO,
	};

	scene->local = local;
	lt_begin(&scene->lt);
	kvp_board_init(&scene->lane_board, KVP_BOARD_LANE, 1);
	config.board = &scene->lane_board;
	scene->from = lt_lane(&scene->lt, &config);
	config.board = NULL;
	scene->to = local ? scene->from : lt_lane(&scene->lt, &config);
	if (!local)
		lt_pipe_make(&scene->lt, &scene->pipe, scene->from, scene->to, 7);
	pools_make(scene, page);
	room_make(scene, 42);
	return scene;
}

static struct scene *scene_make(bool local, uint32_t page)
{
	return scene_over(local ? NULL : &kvp_net_ucx, page);
}

static void pools_end(struct scene *scene)
{
	lt_pool_end(&scene->src);
	for (uint32_t d = 0; d < DESTS; d++)
		lt_pool_end(&scene->dst[d]);
}

static void scene_end(struct scene *scene)
{
	pools_end(scene);
	if (!scene->local)
		lt_pipe_end(&scene->lt, &scene->pipe);
	lt_end(&scene->lt);
	free(scene);
}

static bool any_failed(void *arg)
{
	const struct lt_room *room = arg;
	uint32_t flags = kvp_board_flags(&room->senders[0].board);

	for (uint32_t d = 0; d < DESTS; d++)
		flags |= kvp_board_flags(&room->dests[d].board);
	return flags & KVP_BOARD_FAILED;
}

static const struct kvp_board *failed_board(const struct lt_room *room)
{
	for (uint32_t d = 0; d < DESTS; d++)
		if (kvp_board_flags(&room->dests[d].board) & KVP_BOARD_FAILED)
			return &room->dests[d].board;
	return &room->senders[0].board;
}

static void begin_room(struct scene *scene)
{
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 512);
}

static void expect_failure(struct scene *scene, Kvp__Status status, const char *text)
{
	const struct kvp_board *board;

	lt_wait_until(&scene->lt, any_failed, &scene->room, "a failure");
	board = failed_board(&scene->room);
	cr_assert_eq(board->status, status, "%s", board->text);
	cr_assert(strstr(board->text, text), "%s", board->text);
	lt_room_end(&scene->room);
}

/* The room concerned fails with the driver's name for it; the next one has the lane in order. */
static void launch_fails(bool local)
{
	/* Local, one launch may be all there is; landing, a gather and a scatter are two. */
	for (int at = 1; at <= (local ? 1 : 2); at++) {
		struct scene *scene = scene_make(local, 64);

		atomic_store(&fake_gpu_fail_launch, at);
		begin_room(scene);
		expect_failure(scene, KVP__STATUS__STATUS_SYSTEM, "FAKE_ERROR_OUT_OF_RESOURCES");
		cr_assert_eq(atomic_load(&fake_gpu_fail_launch), 0);
		room_make(scene, 42);
		begin_room(scene);
		lt_room_complete(&scene->room);
		lt_room_check(&scene->room);
		lt_room_end(&scene->room);
		scene_end(scene);
	}
}

Test(gpu, a_launch_that_fails_when_local)
{
	launch_fails(true);
}

Test(gpu, a_launch_that_fails_when_landing)
{
	launch_fails(false);
}

/* Every end on the lane fails, the loop is told, and everything can be ended. */
Test(gpu, a_gpu_that_is_lost)
{
	for (int at = 1; at <= 4; at++) {
		struct scene *scene = scene_make(at % 2, 64);

		/* Nothing ends before the failure: else there might be too few polls for it. */
		atomic_store(&fake_gpu_stopped, 1);
		atomic_store(&fake_gpu_fail_poll, at);
		begin_room(scene);
		expect_failure(scene, KVP__STATUS__STATUS_SYSTEM, "FAKE_ERROR_ILLEGAL_ADDRESS");
		atomic_store(&fake_gpu_stopped, 0);
		if (scene->local) {
			lt_wait(&scene->lt, &scene->lane_board, KVP_BOARD_FAILED);
			room_make(scene, 43);
			begin_room(scene);
			expect_failure(scene, KVP__STATUS__STATUS_SYSTEM, "ILLEGAL_ADDRESS");
		}
		scene_end(scene);
	}
}

struct quiet {
	struct lt_room *room;
	uint64_t until_ns;
};

static bool not_quiet_yet(void *arg)
{
	const struct quiet *quiet = arg;

	cr_assert(!(kvp_board_flags(&quiet->room->senders[0].board) & KVP_BOARD_QUIET));
	return lt_now() > quiet->until_ns;
}

static bool has_launched(void *arg)
{
	return atomic_load(&fake_gpu_launches) > *(int *)arg;
}

/* An end is quiet only when the GPU has passed what was launched for it. */
static void quiet_waits(bool local)
{
	struct scene *scene = scene_make(local, 64);
	struct quiet quiet = { &scene->room, 0 };
	int before = atomic_load(&fake_gpu_launches);

	atomic_store(&fake_gpu_stopped, 1);
	begin_room(scene);
	lt_wait_until(&scene->lt, has_launched, &before, "a launch");
	lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id, 0);
	quiet.until_ns = lt_now() + 50000000;
	lt_wait_until(&scene->lt, not_quiet_yet, &quiet, "50 ms");
	cr_assert_eq(atomic_load(&scene->room.senders[0].board.source_free), 0);
	atomic_store(&fake_gpu_stopped, 0);
	lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_QUIET);
	lt_pool_unmap(&scene->src);
	for (uint32_t d = 0; d < DESTS; d++) {
		lt_order_id(scene->to, KVP_ORDER_RX_END, scene->room.dests[d].board.id, 0);
		lt_wait(&scene->lt, &scene->room.dests[d].board, KVP_BOARD_QUIET);
		lt_pool_unmap(&scene->dst[d]);
	}
	scene_end(scene);
}

Test(gpu, quiet_waits_for_the_gpu_when_local)
{
	quiet_waits(true);
}

Test(gpu, quiet_waits_for_the_gpu_when_landing)
{
	quiet_waits(false);
}

struct turns {
	struct kvp_lane *lane;
	uint64_t at_least;
};

static bool has_turned(void *arg)
{
	const struct turns *turns = arg;

	return lt_status(turns->lane).turns >= turns->at_least;
}

static bool tx_is_gone(void *lane)
{
	return lt_status(lane).txs == 0;
}

/* The sender's end is over: no destination may call itself complete, however long it lives on. */
static void expect_incomplete(struct scene *scene)
{
	struct lt_room *room = &scene->room;

	lt_wait(&scene->lt, &room->senders[0].board, KVP_BOARD_QUIET);
	for (uint32_t d = 0; d < DESTS; d++) {
		const struct kvp_board *board = &room->dests[d].board;

		lt_order_id(scene->to, KVP_ORDER_RX_END, board->id, 0);
		lt_wait(&scene->lt, &room->dests[d].board, KVP_BOARD_QUIET);
		cr_assert_lt(atomic_load(&board->arrived), room->end);
		cr_assert(!(kvp_board_flags(board) & KVP_BOARD_COMPLETE));
	}
}

/* What still waits for room in a launch when its sender is over is moved by nobody. */
Test(gpu, moves_that_were_never_launched)
{
	struct scene *scene = scene_make(true, 64);
	const uint32_t n = 5;

	atomic_store(&fake_gpu_stopped, 1);
	lt_room_begin(&scene->room);
	/* Each in a turn of its own: one more than launches of the fake GPU may run. */
	for (uint32_t i = 0; i < n; i++) {
		const struct lt_chunk chunk = { .tokens = i + 1 < n ? 64 : END - 64 * i,
						.last = i + 1 == n };
		uint64_t turns = lt_status(scene->from).turns;

		(void)lt_submit(&scene->room, 0, &chunk);
		/* It naps while the GPU is busy, and turns. */
		lt_wait_until(&scene->lt, has_turned, &(struct turns){ scene->from, turns + 2 },
			      "two turns");
	}
	lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id, 0);
	lt_wait_until(&scene->lt, tx_is_gone, scene->from, "the end of the sender");
	atomic_store(&fake_gpu_stopped, 0);
	expect_incomplete(scene);
	scene_end(scene);
}

/* Pages of one token make a run of each row: more than the fake GPU's tables hold. */
Test(gpu, a_piece_of_too_many_runs)
{
	for (int local = 0; local < 2; local++) {
		struct scene *scene = scene_make(local, 1);

		atomic_store(&fake_gpu_max_runs, 1000);
		scene->room.end = 2 * END;
		lt_room_begin(&scene->room);
		lt_submit_all(&scene->room, 0, 2 * END);
		lt_wait_until(&scene->lt, any_failed, &scene->room, "a failure");
		cr_assert_eq(failed_board(&scene->room)->status, KVP__STATUS__STATUS_LIMIT);
		cr_assert(strstr(failed_board(&scene->room)->text, "runs"));
		if (local) {
			lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id,
				    0);
			expect_incomplete(scene);
		} else {
			lt_room_end(&scene->room);
		}
		scene_end(scene);
	}
}

/* With grants held back: what was granted has come, and waits for its scatter. */
static bool all_granted_are_here(void *arg)
{
	const struct kvp_lane_status status = lt_status(arg);

	return status.holds_on & 1u << KVP_HOLD_GRANT && status.holds[KVP_HOLD_SCATTER] > 1 &&
	       status.land_slots - status.land_free == status.holds[KVP_HOLD_SCATTER];
}

static bool some_are_here(void *arg)
{
	return lt_status(arg).holds[KVP_HOLD_SCATTER] > 1;
}

static bool none_is_here(void *arg)
{
	const struct kvp_lane_status status = lt_status(arg);

	return status.land_free == status.land_slots && !status.gpu_busy;
}

/* What is ready in a turn is scattered together, whatever rooms and destinations it is for. */
Test(gpu, pieces_that_are_here_are_scattered_by_one_launch)
{
	struct scene *scene = scene_make(false, 64);
	struct kvp_lane_status before, after;

	lt_hold(scene->to, KVP_HOLD_SCATTER, true);
	begin_room(scene);
	lt_wait_until(&scene->lt, some_are_here, scene->to, "pieces");
	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_wait_until(&scene->lt, all_granted_are_here, scene->to, "all that was granted");
	before = lt_status(scene->to);
	lt_hold(scene->to, KVP_HOLD_SCATTER, false);
	lt_wait_until(&scene->lt, none_is_here, scene->to, "the scatter");
	after = lt_status(scene->to);
	cr_assert_eq(after.pieces_landed, before.pieces_landed + before.holds[KVP_HOLD_SCATTER]);
	cr_assert_eq(after.launches, before.launches + 1);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- pools in memory of a GPU ---------------------------------------------------------------- */

struct memory_pool {
	struct kvp_board board;
	struct kvp_lane *lane;
	const char *home; /* NULL: this lane's GPU */
};

static void memory_pool(struct lt *lt, struct memory_pool *pool,
			const struct kvp_lane_memory *memory, int fd)
{
	struct kvp_order_pool *order = calloc(1, sizeof(*order));

	kvp_board_init(&pool->board, KVP_BOARD_POOL, lt_id(lt));
	order->order.type = KVP_ORDER_POOL_ADD;
	order->board = &pool->board;
	(void)snprintf(order->home, sizeof(order->home), "%s", pool->home ? pool->home : "");
	order->n_entries = 1;
	order->entries = calloc(1, sizeof(*order->entries));
	order->fd_maps = calloc(1, sizeof(*order->fd_maps));
	order->n_fds = 1;
	order->memories = malloc(sizeof(*memory));
	*order->memories = *memory;
	order->chunk_fds = malloc(sizeof(int));
	order->chunk_bytes = malloc(sizeof(uint64_t));
	if (fd >= 0) {
		order->chunk_fds[0] = fd;
		order->chunk_bytes[0] = memory->bytes;
		order->n_chunks = 1;
	}
	kvp_lane_order(pool->lane, &order->order);
}

Test(gpu, memory_is_mapped_by_the_lane)
{
	const struct kvp_lane_config config = { .slots = 4, .pack = true };
	struct lt lt;
	struct memory_pool pool = { .home = NULL };
	struct kvp_lane_memory ipc = { .bytes = 8192 }, vmm = { .vmm = true, .bytes = 8192 };
	uint64_t held[2];
	int fd = memfd_create("chunk", 0);

	vmm.n_chunks = 1;
	lt_begin(&lt);
	pool.lane = lt_lane(&lt, &config);
	held[1] = 10000;
	held[0] = (uint64_t)(uintptr_t)&lt;
	memcpy(ipc.handle, held, sizeof(held));
	memory_pool(&lt, &pool, &ipc, -1);
	lt_wait(&lt, &pool.board, KVP_BOARD_READY);
	cr_assert_eq(atomic_load(&fake_gpu_imports), 1);
	lt_order_id(pool.lane, KVP_ORDER_POOL_END, pool.board.id, 0);
	lt_wait(&lt, &pool.board, KVP_BOARD_QUIET);
	cr_assert_eq(atomic_load(&fake_gpu_imports), 0);

	ipc.offset = 4096; /* past the allocation */
	memory_pool(&lt, &pool, &ipc, -1);
	lt_wait(&lt, &pool.board, KVP_BOARD_QUIET);
	cr_assert(kvp_board_flags(&pool.board) & KVP_BOARD_FAILED);
	cr_assert(strstr(pool.board.text, "memories[0]: cuIpcOpenMemHandle"), "%s",
		  pool.board.text);
	cr_assert_eq(pool.board.status, KVP__STATUS__STATUS_INVALID);

	cr_assert_eq(ftruncate(fd, 8192), 0);
	memory_pool(&lt, &pool, &vmm, fd); /* the lane closes it */
	lt_wait(&lt, &pool.board, KVP_BOARD_READY);
	lt_order_id(pool.lane, KVP_ORDER_POOL_END, pool.board.id, 0);
	lt_wait(&lt, &pool.board, KVP_BOARD_QUIET);
	cr_assert_eq(atomic_load(&fake_gpu_imports), 0);
	lt_end(&lt);
}

Test(gpu, memory_of_another_gpu)
{
	const struct kvp_lane_config config = { .slots = 4, .pack = true };
	struct memory_pool pool = { .home = "GPU-other" };
	struct kvp_lane_memory ipc = { .bytes = 8192 };
	uint64_t held[2] = { 0, 10000 };
	struct lt lt;

	held[0] = (uint64_t)(uintptr_t)&lt;
	memcpy(ipc.handle, held, sizeof(held));
	lt_begin(&lt);
	pool.lane = lt_lane(&lt, &config);
	atomic_store(&fake_gpu_no_peer, 1);
	memory_pool(&lt, &pool, &ipc, -1);
	lt_wait(&lt, &pool.board, KVP_BOARD_QUIET);
	cr_assert(kvp_board_flags(&pool.board) & KVP_BOARD_FAILED);
	cr_assert_str_eq(pool.board.text, "no peer access to GPU-other");
	cr_assert_eq(atomic_load(&fake_gpu_imports), 0);

	atomic_store(&fake_gpu_no_peer, 0);
	memory_pool(&lt, &pool, &ipc, -1);
	lt_wait(&lt, &pool.board, KVP_BOARD_READY);
	lt_order_id(pool.lane, KVP_ORDER_POOL_END, pool.board.id, 0);
	lt_wait(&lt, &pool.board, KVP_BOARD_QUIET);
	cr_assert_eq(atomic_load(&fake_gpu_imports), 0);
	lt_end(&lt);
}

/* ---- where rings lie ------------------------------------------------------------------------- */

struct rings_case {
	const char *name;
	enum kvp_ring_memory memory;
	enum kvp_flush flush;
	int net; /* 0 none, 1 takes the device's memory, 2 does not */
	bool can_flush;
	uint64_t device_bytes, host_bytes; /* 0: enough */
	/* expected */
	const char *word; /* NULL: the lane does not start */
	const char *reason;
	bool device;
	uint32_t slots;
	int error;
};

#define SLOT_BYTES (UINT64_C(1) << 20)

static const struct rings_case rings_cases[] = {
	{ "a transport that takes it", KVP_RINGS_AUTO, .net = 1, .word = "fake", .device = true,
	  .slots = 8, .reason = "virtual memory" },
	{ "the host's by configuration", KVP_RINGS_HOST, .net = 1, .word = "configured", .slots = 8,
	  .reason = "pack.memory" },
	{ "a transport that does not", KVP_RINGS_AUTO, .net = 2, .word = "ucx_without_cuda",
	  .slots = 8, .reason = "ucx " },
	{ "no transport", KVP_RINGS_AUTO, .word = "no_transport", .slots = 8,
	  .reason = "no peers" },
	{ "no transport, the device's all the same", KVP_RINGS_DEVICE, .word = "no_transport",
	  .device = true, .slots = 8, .reason = "pack.memory" },
	{ "the device's or nothing", KVP_RINGS_DEVICE, .net = 2, .error = -EOPNOTSUPP,
	  .reason = "pack.memory is device: ucx " },
	{ "little memory", KVP_RINGS_AUTO, .net = 1, .device_bytes = 5 * SLOT_BYTES, .word = "fake",
	  .device = true, .slots = 2, .reason = "virtual" },
	{ "no memory there", KVP_RINGS_AUTO, .net = 1, .device_bytes = 1, .word = "no_memory",
	  .slots = 8, .reason = "FAKE_ERROR" },
	{ "little memory anywhere", KVP_RINGS_AUTO, .net = 1, .device_bytes = 1,
	  .host_bytes = 9 * SLOT_BYTES, .word = "no_memory", .slots = 4, .reason = "FAKE" },
	{ "no memory anywhere", KVP_RINGS_AUTO, .net = 1, .device_bytes = 1, .host_bytes = 1,
	  .error = -ENOMEM, .reason = "rings of 2 slots" },
	{ "no memory for what must be there", KVP_RINGS_DEVICE, .net = 1, .device_bytes = 1,
	  .error = -ENOMEM, .reason = "pack.memory is device: " },
	{ "a flush that cannot be", KVP_RINGS_AUTO, KVP_FLUSH_ALWAYS, .net = 1, .word = "no_flush",
	  .slots = 8, .reason = "gpu.flush" },
	{ "a flush that can", KVP_RINGS_AUTO, KVP_FLUSH_ALWAYS, .net = 1, .can_flush = true,
	  .word = "fake", .device = true, .slots = 8, .reason = "virtual" },
};

static void rings_case(const struct rings_case *c)
{
	const struct kvp_net_ops *nets[] = { NULL, fake_gpu_net(), &kvp_net_ucx };
	const struct kvp_lane_config config = {
		.name = "gpu0",
		.gpu = "GPU-fake",
		.slots = 8,
		.slot_bytes = SLOT_BYTES,
		.memory = c->memory,
		.flush = c->flush,
		.net = nets[c->net],
		.interface = "lo",
	};
	const struct kvp_lane_rings *rings;
	struct kvp_lane *lane;
	char err[256] = "";
	int r;

	atomic_store(&fake_gpu_device_bytes, c->device_bytes ? c->device_bytes : UINT64_MAX);
	atomic_store(&fake_gpu_host_bytes, c->host_bytes ? c->host_bytes : UINT64_MAX);
	atomic_store(&fake_gpu_can_flush, c->can_flush);
	r = kvp_lane_start(&lane, &config, err, sizeof(err));
	cr_assert_eq(r, c->error, "%s: %s", c->name, err);
	if (r < 0) {
		cr_assert(strstr(err, c->reason), "%s: %s", c->name, err);
		cr_assert_eq(atomic_load(&fake_gpu_rings), 0, "%s", c->name);
		return;
	}
	rings = kvp_lane_rings(lane);
	cr_assert_str_eq(rings->word, c->word, "%s: %s", c->name, rings->reason);
	cr_assert(strstr(rings->reason, c->reason), "%s: %s", c->name, rings->reason);
	cr_assert_eq(rings->device, c->device, "%s", c->name);
	cr_assert_eq(rings->flush, c->device && c->flush == KVP_FLUSH_ALWAYS, "%s", c->name);
	cr_assert_eq(atomic_load(&fake_gpu_rings), c->device, "%s", c->name);
	cr_assert_eq(lt_status(lane).pack_slots, c->slots, "%s", c->name);
	cr_assert_eq(lt_status(lane).land_slots, c->slots, "%s", c->name);
	kvp_lane_stop(lane);
	cr_assert_eq(atomic_load(&fake_gpu_rings), 0, "%s", c->name);
}

Test(gpu, rings_lie_where_they_can)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(rings_cases); i++)
		rings_case(&rings_cases[i]);
}

/* Rooms of two users in turns: slots are cleaned between them, and the GPU is told to look before
 * it scatters what came. */
Test(gpu, rooms_over_rings_on_the_device)
{
	struct scene *scene;

	atomic_store(&fake_gpu_can_flush, 1);
	scene = scene_over(fake_gpu_net(), 64);
	for (uint32_t round = 0; round < 6; round++) {
		pools_end(scene);
		scene->uid = round % 2;
		pools_make(scene, 64);
		room_make(scene, 42);
		begin_room(scene);
		lt_room_complete(&scene->room);
		lt_room_check(&scene->room);
		lt_room_end(&scene->room);
	}
	cr_assert_eq(atomic_load(&fake_gpu_rings), 2);
	cr_assert_gt(atomic_load(&fake_gpu_flushes), 0);
	cr_assert_eq(lt_status(scene->to).flushes, (uint64_t)atomic_load(&fake_gpu_flushes));
	scene_end(scene);
}

/* A GPU without memory for a lane: its pools are refused, in words, and nothing else is. */
Test(gpu, pools_of_a_gpu_that_is_not_served)
{
	static struct kvp_config config;
	const struct kvp_gpu_refusal refusal = { "GPU-07070707-0707-0707-0707-070707070707",
						 "rings of 2 slots of 8388608 bytes: no memory" };
	struct kvp_lane *const lanes[1] = { NULL };
	struct kvp_pools pools = {
		.config = &config, .lanes = lanes, .refusals = &refusal, .n_refusals = 1
	};
	const struct kvp_pool_client client = { .name = "engine" };
	uint8_t uuid[16], handle[64] = { 0 };
	Kvp__PoolRegister msg = KVP__POOL_REGISTER__INIT;
	Kvp__Memory memory = KVP__MEMORY__INIT, *memories = &memory;
	Kvp__Entry entry = KVP__ENTRY__INIT, *entries = &entry;
	struct kvp_pool *pool = NULL;
	char err[KVP_POOL_ERR] = "";

	kvp_config_defaults(&config);
	memset(uuid, 7, sizeof(uuid));
	memory.kind = KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
	memory.gpu = (ProtobufCBinaryData){ sizeof(uuid), uuid };
	memory.handle = (ProtobufCBinaryData){ sizeof(handle), handle };
	msg.memories = &memories;
	msg.n_memories = 1;
	msg.entries = &entries;
	msg.n_entries = 1;
	cr_assert_eq(kvp_pools_register(&pools, &client, &msg, NULL, 0, &pool, err),
		     KVP__STATUS__STATUS_NO_MEMORY);
	cr_assert(strstr(err, "GPU-07070707-") && strstr(err, "not served: rings of 2"), "%s", err);
	memset(uuid, 8, sizeof(uuid));
	cr_assert_eq(kvp_pools_register(&pools, &client, &msg, NULL, 0, &pool, err),
		     KVP__STATUS__STATUS_UNSUPPORTED);
	cr_assert(strstr(err, "does not use"), "%s", err);
}

static uint32_t fds_open(void)
{
	uint32_t n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void pool_ended(struct kvp_pool *pool, void *arg)
{
	(void)pool;
	*(bool *)arg = true;
}

/* A dma-buf travels behind the chunks: these are mapped, and no descriptor stays. */
Test(gpu, dmabufs_of_pools_come_behind_their_chunks)
{
	static struct kvp_config config;
	const char *gpu = "GPU-07070707-0707-0707-0707-070707070707";
	const struct kvp_pool_client client = { .name = "engine", .session = 1 };
	struct kvp_lane_config lane = {
		.name = "gpu0", .gpu = gpu, .slots = 4, .slot_bytes = 65536
	};
	struct kvp_lane *lanes[1];
	struct kvp_pools pools = { .config = &config, .lanes = lanes, .n_lanes = 1 };
	uint8_t uuid[16];
	uint64_t chunk = 2 * 4096;
	Kvp__PoolRegister msg = KVP__POOL_REGISTER__INIT;
	Kvp__Memory memory = KVP__MEMORY__INIT, *memories = &memory;
	Kvp__Entry entry = KVP__ENTRY__INIT, *entries = &entry;
	int fds[2] = { memfd_create("chunk", 0), memfd_create("dma-buf", 0) };
	struct kvp_pool *pool = NULL;
	char err[KVP_POOL_ERR] = "";
	bool ended = false;
	uint32_t open;
	struct lt lt;

	kvp_config_defaults(&config);
	lt_begin(&lt);
	lane.loop = &lt.inbox;
	cr_assert_eq(kvp_lane_start(&lanes[0], &lane, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(ftruncate(fds[0], (off_t)chunk), 0);
	memset(uuid, 7, sizeof(uuid));
	memory.kind = KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
	memory.gpu = (ProtobufCBinaryData){ sizeof(uuid), uuid };
	memory.bytes = memory.dmabuf_bytes = chunk;
	memory.chunk_bytes = &chunk;
	memory.n_chunk_bytes = 1;
	entry.klass = KVP__ENTRY_CLASS__CLASS_BLOB;
	entry.bytes = chunk;
	msg.memories = &memories;
	msg.n_memories = 1;
	msg.entries = &entries;
	msg.n_entries = 1;
	open = fds_open();
	cr_assert_eq(kvp_pools_register(&pools, &client, &msg, fds, 2, &pool, err),
		     KVP__STATUS__STATUS_OK, "%s", err);
	cr_assert_eq(pool->n_dmabufs, 1);
	lt_wait(&lt, &pool->board, KVP_BOARD_READY);
	kvp_pool_board(&pool->board);
	cr_assert_eq(atomic_load(&fake_gpu_imports), 1);
	cr_assert_eq(fds_open(), open);
	kvp_pool_end(pool, false, pool_ended, &ended);
	lt_wait(&lt, &pool->board, KVP_BOARD_QUIET);
	kvp_pool_board(&pool->board);
	cr_assert(ended);
	kvp_pool_free(&pools, pool);
	kvp_lane_stop(lanes[0]);
	lt_end(&lt);
	close(fds[0]);
	close(fds[1]);
}
