/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode into pools of a GPU, on a GPU and an RDMA device made of nothing: by which dma-buf
 * the device reaches them, that the GPU is told before anybody else, what lands and why, and that
 * nothing of it stays.
 */

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/wire.h"
#include "tests/fake_gpu.h"
#include "tests/fake_verbs.h"
#include "tests/support_lane.h"

#define END 2000u
#define SLOT 65536u
#define ORDERED 100 /* the GPU sees by itself what a NIC writes */

struct scene {
	struct lt lt;
	struct kvp_lane *from, *to;
	struct lt_pipe pipe;
	struct lt_pool src, dst;
	struct lt_room room;
};

struct wish {
	enum lt_memory memory;
	bool dmabuf;
	uint32_t mode; /* of the receiver */
	enum kvp_ring_memory rings;
	enum kvp_flush flush;
};

static uint32_t fds_open(void)
{
	uint32_t n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void make_pools(struct scene *scene, const struct wish *wish)
{
	struct lt_shape shape = { .page = 64,
				  .dcp_size = 1,
				  .interleave = 1,
				  .n_pages = 32,
				  .layers = 3,
				  .row_bytes = 576,
				  .seed = 1,
				  .uid = 1 };

	lt_pool_make(&scene->src, &scene->lt, scene->from, &shape);
	lt_pool_fill(&scene->src, 42, 0, END);
	shape.dcp_size = 2;
	shape.n_pages = 16;
	shape.seed = 2;
	shape.memory = wish->memory;
	shape.dmabuf = wish->dmabuf;
	lt_pool_make(&scene->dst, &scene->lt, scene->to, &shape);
}

static struct scene *scene_make(const struct wish *wish)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct kvp_lane_config config = {
		.slots = 8,
		.slot_bytes = SLOT,
		.pack = true,
		.net = &kvp_net_verbs,
		.mode = KVP_DATA_DIRECT,
		.memory = wish->rings,
		.flush = wish->flush,
		.direct_run_bytes = 1,
	};

	cr_assert(scene);
	lt_begin(&scene->lt);
	scene->from = lt_lane(&scene->lt, &config);
	config.mode = wish->mode;
	scene->to = lt_lane(&scene->lt, &config);
	lt_pipe_make(&scene->lt, &scene->pipe, scene->from, scene->to, 7);
	make_pools(scene, wish);
	scene->room = (struct lt_room){
		.lt = &scene->lt,
		.room = 42,
		.end = END,
		.n_senders = 1,
		.n_dests = 1,
		.meta_from = -1,
		.slot_bytes = SLOT,
		.pipe = &scene->pipe,
	};
	scene->room.senders[0].pool = &scene->src;
	scene->room.dests[0].pool = &scene->dst;
	return scene;
}

static bool all_is_back(void *arg)
{
	struct kvp_lane_status status = lt_status(arg);

	return status.windows == 0 && status.regions == 0 && status.region_bytes == 0 &&
	       status.regions_dmabuf == 0 && status.regions_vmm == 0 && status.imports == 0;
}

static void scene_end(struct scene *scene)
{
	lt_pool_end(&scene->src);
	lt_pool_end(&scene->dst);
	lt_wait_until(&scene->lt, all_is_back, scene->to, "windows and regions to be given back");
	lt_pipe_end(&scene->lt, &scene->pipe);
	lt_end(&scene->lt);
	cr_assert_eq(kvp_fake.n_mws, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
	cr_assert_eq(kvp_fake.n_qps, 0);
	cr_assert_eq(kvp_fake.n_pds, 0);
	cr_assert_eq(fake_gpu_imports, 0);
	cr_assert_eq(fake_gpu_rings, 0);
	free(scene);
}

/* The room is kept until its pool has been tried: no piece lands since it came too early. */
static void transfer(struct scene *scene)
{
	lt_hold(scene->to, KVP_HOLD_GRANT, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_GRANT, 3);
	lt_hold(scene->to, KVP_HOLD_GRANT, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
}

/* ---- what is written ------------------------------------------------------------------------- */

static struct kvp_lane_status goes_directly(const struct wish *wish)
{
	uint32_t fds = fds_open();
	struct scene *scene = scene_make(wish);
	struct kvp_lane_status to;

	transfer(scene);
	to = lt_status(scene->to);
	cr_assert_gt(to.pieces_direct, 0);
	cr_assert_eq(to.pieces_direct, to.pieces_landed);
	cr_assert_eq(atomic_load(&scene->room.dests[0].board.moved), KVP_MOVED_DIRECT);
	cr_assert_eq(to.windows, 1);
	lt_room_end(&scene->room);
	scene_end(scene);
	cr_assert_eq(fds_open(), fds, "a descriptor stays");
	return to;
}

Test(direct_gpu, by_the_owners_dma_buf)
{
	struct kvp_lane_status to;

	fake_gpu_ordering = ORDERED;
	to = goes_directly(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	cr_assert_eq(to.regions_dmabuf, 1);
	cr_assert_eq(to.regions_vmm, 0);
	cr_assert_eq(to.flushes, 0, "it sees by itself");
	to = goes_directly(
		&(struct wish){ .memory = LT_VMM, .dmabuf = true, .mode = KVP_DATA_AUTO });
	cr_assert_eq(to.regions_dmabuf, 1);
	cr_assert_eq(to.regions_vmm, 0);
}

/* Chunks that came without one: the mapping is our own. */
static struct scene *scene_with_own_dmabuf(const struct wish *wish)
{
	struct scene *scene = scene_make(wish);

	fake_gpu_import_fd = scene->dst.fd;
	return scene;
}

Test(direct_gpu, by_a_dma_buf_of_the_mapping)
{
	struct scene *scene;
	struct kvp_lane_status to;

	fake_gpu_ordering = ORDERED;
	scene = scene_with_own_dmabuf(&(struct wish){ .memory = LT_VMM, .mode = KVP_DATA_DIRECT });
	transfer(scene);
	to = lt_status(scene->to);
	cr_assert_eq(to.regions_vmm, 1);
	cr_assert_eq(to.regions_dmabuf, 0);
	cr_assert_eq(to.pieces_direct, to.pieces_landed);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* From the ring of one GPU, which the device reads by a dma-buf, into the pool of another. */
Test(direct_gpu, from_a_ring_on_the_device)
{
	struct scene *scene;
	struct kvp_lane_status to;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(&(struct wish){ .memory = LT_IPC,
					   .dmabuf = true,
					   .mode = KVP_DATA_DIRECT,
					   .rings = KVP_RINGS_DEVICE });
	cr_assert(kvp_lane_rings(scene->from)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->from)->word, "dmabuf");
	transfer(scene);
	to = lt_status(scene->to);
	cr_assert_gt(to.pieces_direct, 0);
	cr_assert_eq(to.pieces_direct, to.pieces_landed);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* Rings that the device takes neither by a dma-buf nor by their address: pinned memory, which
 * serves writes into a pool as well. The reason is shown. */
static struct scene *scene_refusing(const struct wish *wish, int dmabuf, int mr)
{
	struct scene *scene;

	scene_end(scene_make(wish)); /* the first lanes of all reset the device */
	kvp_fake.refuse_dmabuf = dmabuf;
	kvp_fake.refuse_device_mr = mr;
	scene = scene_make(wish);
	kvp_fake.refuse_dmabuf = kvp_fake.refuse_device_mr = 0;
	return scene;
}

Test(direct_gpu, rings_by_their_address)
{
	const struct wish wish = { .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT };
	struct scene *scene;

	fake_gpu_ordering = ORDERED;
	scene = scene_refusing(&wish, EOPNOTSUPP, 0);
	cr_assert(kvp_lane_rings(scene->to)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->to)->word, "peermem");
	scene_end(scene);
}

Test(direct_gpu, rings_of_the_host_where_the_device_refuses)
{
	const struct wish wish = { .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT };
	struct scene *scene;

	fake_gpu_ordering = ORDERED;
	scene = scene_refusing(&wish, EOPNOTSUPP, EFAULT);
	cr_assert_not(kvp_lane_rings(scene->to)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->to)->word, "not_registered");
	cr_assert(strstr(kvp_lane_rings(scene->to)->reason, "peer memory"), "%s",
		  kvp_lane_rings(scene->to)->reason);
	cr_assert(strstr(kvp_lane_rings(scene->to)->reason, "dma-buf"), "%s",
		  kvp_lane_rings(scene->to)->reason);
	transfer(scene);
	cr_assert_gt(lt_status(scene->to).pieces_direct, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- what the GPU sees ----------------------------------------------------------------------- */

Test(direct_gpu, the_gpu_is_told_first)
{
	struct kvp_lane_status to;

	fake_gpu_can_flush = 1;
	to = goes_directly(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	cr_assert_gt(to.flushes, 0);
	cr_assert_leq(to.flushes, to.pieces_direct);
	fake_gpu_ordering = ORDERED;
	to = goes_directly(&(struct wish){ .memory = LT_IPC,
					   .dmabuf = true,
					   .mode = KVP_DATA_DIRECT,
					   .flush = KVP_FLUSH_ALWAYS });
	cr_assert_gt(to.flushes, 0, "since it was asked for");
}

/* What was written is kept until then: nobody has heard of it. */
Test(direct_gpu, nothing_is_told_before_the_gpu)
{
	struct scene *scene;
	struct kvp_board *board;

	fake_gpu_can_flush = 1;
	scene = scene_make(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	board = &scene->room.dests[0].board;
	lt_hold(scene->to, KVP_HOLD_SCATTER, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_SCATTER, 3);
	cr_assert_gt(lt_status(scene->to).pieces_direct, 0);
	cr_assert_eq(lt_status(scene->to).pieces_landed, 0);
	cr_assert_eq(lt_status(scene->to).flushes, 0);
	cr_assert_eq(atomic_load(&board->arrived), 0);
	lt_hold(scene->to, KVP_HOLD_SCATTER, false);
	lt_room_complete(&scene->room);
	lt_room_check(&scene->room);
	cr_assert_gt(lt_status(scene->to).flushes, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

static bool holds_nothing(void *arg)
{
	return lt_status(arg).holds[KVP_HOLD_SCATTER] == 0;
}

/* A room that ends with pieces in that state leaves nothing; some may be on their way still. */
Test(direct_gpu, an_end_between_write_and_flush)
{
	struct scene *scene;

	fake_gpu_can_flush = 1;
	scene = scene_make(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	lt_hold(scene->to, KVP_HOLD_SCATTER, true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_held(&scene->lt, scene->to, KVP_HOLD_SCATTER, 3);
	lt_room_end(&scene->room);
	lt_wait_until(&scene->lt, holds_nothing, scene->to, "nothing is held");
	lt_hold(scene->to, KVP_HOLD_SCATTER, false);
	scene_end(scene);
}

Test(direct_gpu, a_flush_that_fails)
{
	struct scene *scene;
	struct kvp_board *board;

	fake_gpu_can_flush = 1;
	fake_gpu_fail_flush = 1;
	scene = scene_make(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	board = &scene->room.dests[0].board;
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait(&scene->lt, board, KVP_BOARD_FAILED | KVP_BOARD_COMPLETE);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_SYSTEM, "%s", board->text);
	cr_assert(strstr(board->text, "FAKE_ERROR"), "%s", board->text);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* ---- what lands ------------------------------------------------------------------------------ */

static void lands(const struct wish *wish, enum kvp_why why)
{
	struct scene *scene = scene_make(wish);
	struct kvp_board *board = &scene->room.dests[0].board;
	struct kvp_lane_status to;

	transfer(scene);
	to = lt_status(scene->to);
	cr_assert_eq(to.pieces_direct, 0);
	cr_assert_eq(to.fell_back[why], to.pieces_landed, "%s: %llu", kvp_why_name(why),
		     (unsigned long long)to.fell_back[why]);
	cr_assert_eq(atomic_load(&board->moved), KVP_MOVED_LANDING);
	cr_assert_eq(atomic_load(&board->fell_back), why);
	cr_assert_eq(to.regions, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

static void refused(const struct wish *wish, const char *text)
{
	struct wish forced = *wish;
	struct scene *scene;
	struct kvp_board *board;

	forced.mode = KVP_DATA_DIRECT;
	scene = scene_make(&forced);
	board = &scene->room.dests[0].board;
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait(&scene->lt, board, KVP_BOARD_FAILED | KVP_BOARD_COMPLETE);
	cr_assert_eq(board->status, KVP__STATUS__STATUS_UNSUPPORTED);
	cr_assert(strstr(board->text, text), "%s", board->text);
	lt_room_end(&scene->room);
	scene_end(scene);
}

Test(direct_gpu, landing_without_a_dma_buf)
{
	const struct wish ipc = { .memory = LT_IPC, .mode = KVP_DATA_AUTO };
	const struct wish vmm = { .memory = LT_VMM, .mode = KVP_DATA_AUTO };

	fake_gpu_ordering = ORDERED;
	lands(&ipc, KVP_WHY_MEMORY);
	refused(&ipc, "its owner gave no dma-buf");
	lands(&vmm, KVP_WHY_MEMORY);
	refused(&vmm, "by our own: cuMemGetHandleForAddressRange: FAKE_ERROR");
}

Test(direct_gpu, landing_since_the_device_takes_no_dma_buf)
{
	const struct wish wish = {
		.memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_AUTO, .rings = KVP_RINGS_HOST
	};
	struct scene *scene;

	fake_gpu_ordering = ORDERED;
	goes_directly(&wish); /* the first lanes of all reset the device */
	kvp_fake.refuse_dmabuf = EOPNOTSUPP;
	lands(&wish, KVP_WHY_MEMORY);
	refused(&wish, "of a dma-buf: Operation not supported");
	kvp_fake.refuse_dmabuf = 0;
	scene = scene_make(&wish);
	transfer(scene);
	cr_assert_gt(lt_status(scene->to).pieces_direct, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

Test(direct_gpu, landing_where_the_gpu_would_not_see_it)
{
	const struct wish wish = { .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_AUTO };
	const struct wish always = {
		.memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_AUTO, .flush = KVP_FLUSH_ALWAYS
	};

	lands(&wish, KVP_WHY_UNSEEN);
	refused(&wish, "the device does not see what a NIC writes");
	fake_gpu_ordering = ORDERED;
	lands(&always, KVP_WHY_UNSEEN);
	refused(&always, "gpu.flush is always");
}

/* ---- grants ---------------------------------------------------------------------------------- */

/* The grant of one room is of no use for the next: another registration, another key. */
Test(direct_gpu, a_registration_for_each_leg)
{
	struct scene *scene;
	uint32_t mrs, dmabufs;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(&(struct wish){ .memory = LT_IPC,
					   .dmabuf = true,
					   .mode = KVP_DATA_DIRECT,
					   .rings = KVP_RINGS_HOST });
	transfer(scene);
	lt_room_end(&scene->room);
	mrs = kvp_fake_look().n_mrs;
	dmabufs = kvp_fake_look().n_dmabufs;
	for (uint32_t i = 0; i < 3; i++) {
		transfer(scene);
		cr_assert_eq(kvp_fake_look().n_mrs, mrs + 1);
		lt_room_end(&scene->room);
		cr_assert_eq(kvp_fake_look().n_mrs, mrs, "taken back");
		cr_assert_eq(kvp_fake_look().n_dmabufs, dmabufs + i + 1);
	}
	scene_end(scene);
}

static bool writes_wait(void *arg)
{
	(void)arg;
	return kvp_fake_held() > 0;
}

/* Pages are not released, nor is the registration, while the device may still write. */
Test(direct_gpu, released_after_the_last_late_write)
{
	struct scene *scene;
	struct kvp_board *board;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(
		&(struct wish){ .memory = LT_IPC, .dmabuf = true, .mode = KVP_DATA_DIRECT });
	board = &scene->room.dests[0].board;
	kvp_fake_hold_writes(true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	lt_wait_until(&scene->lt, writes_wait, NULL, "writes at the device");
	lt_order_id(scene->to, KVP_ORDER_RX_END, board->id, 0);
	lt_order_id(scene->from, KVP_ORDER_TX_END, scene->room.senders[0].board.id, 0);
	lt_wait(&scene->lt, &scene->room.senders[0].board, KVP_BOARD_QUIET);
	cr_assert_not(kvp_board_flags(board) & KVP_BOARD_QUIET, "released under its hands");
	cr_assert_gt(lt_status(scene->to).windows, 0);
	kvp_fake_hold_writes(false);
	lt_wait(&scene->lt, board, KVP_BOARD_QUIET);
	cr_assert_eq(kvp_fake_look().n_refused, 0);
	scene_end(scene);
}
