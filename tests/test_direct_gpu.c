/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode into pools of a GPU, on a GPU and an RDMA device made of nothing: by which dma-buf
 * the device reaches them, that the GPU is told before anybody else, what lands and why, and that
 * nothing of it stays.
 */

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/wire.h"
#include "tests/fake_gpu.h"
#include "tests/fake_verbs.h"
#include "tests/support_direct.h"

#define ORDERED 100 /* the GPU sees by itself what a NIC writes */

static uint32_t fds_open(void)
{
	uint32_t n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static struct direct *scene_make(const struct direct_wish *wish)
{
	struct direct_wish full = *wish;

	full.from = KVP_DATA_DIRECT;
	full.run_bytes = 1;
	return direct_make(&full);
}

static void scene_end(struct direct *scene)
{
	direct_end(scene, true);
	cr_assert_eq(fake_gpu_imports, 0);
	cr_assert_eq(fake_gpu_rings, 0);
}

/* ---- what is written ------------------------------------------------------------------------- */

static struct kvp_lane_status goes_directly(const struct direct_wish *wish)
{
	uint32_t fds = fds_open();
	struct direct *scene = scene_make(wish);
	struct kvp_lane_status to;

	direct_transfer(scene, true);
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
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
	cr_assert_eq(to.regions_dmabuf, 1);
	cr_assert_eq(to.regions_vmm, 0);
	cr_assert_eq(to.flushes, 0, "it sees by itself");
	to = goes_directly(
		&(struct direct_wish){ .memory = LT_VMM, .dmabuf = true, .to = KVP_DATA_AUTO });
	cr_assert_eq(to.regions_dmabuf, 1);
	cr_assert_eq(to.regions_vmm, 0);
}

/* Chunks that came without one: the mapping is our own. */
static struct direct *scene_with_own_dmabuf(const struct direct_wish *wish)
{
	struct direct *scene = scene_make(wish);

	fake_gpu_import_fd = scene->dst.fd;
	return scene;
}

Test(direct_gpu, by_a_dma_buf_of_the_mapping)
{
	struct direct *scene;
	struct kvp_lane_status to;

	fake_gpu_ordering = ORDERED;
	scene = scene_with_own_dmabuf(
		&(struct direct_wish){ .memory = LT_VMM, .to = KVP_DATA_DIRECT });
	direct_transfer(scene, true);
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
	struct direct *scene;
	struct kvp_lane_status to;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(&(struct direct_wish){ .memory = LT_IPC,
						  .dmabuf = true,
						  .to = KVP_DATA_DIRECT,
						  .rings = KVP_RINGS_DEVICE });
	cr_assert(kvp_lane_rings(scene->from)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->from)->word, "dmabuf");
	direct_transfer(scene, true);
	to = lt_status(scene->to);
	cr_assert_gt(to.pieces_direct, 0);
	cr_assert_eq(to.pieces_direct, to.pieces_landed);
	lt_room_end(&scene->room);
	scene_end(scene);
}

/* Rings that the device takes neither by a dma-buf nor by their address: pinned memory, which
 * serves writes into a pool as well. The reason is shown. */
static struct direct *scene_refusing(const struct direct_wish *wish, int dmabuf, int mr)
{
	struct direct *scene;

	scene_end(scene_make(wish)); /* the first lanes of all reset the device */
	kvp_fake.refuse_dmabuf = dmabuf;
	kvp_fake.refuse_device_mr = mr;
	scene = scene_make(wish);
	kvp_fake.refuse_dmabuf = kvp_fake.refuse_device_mr = 0;
	return scene;
}

Test(direct_gpu, rings_by_their_address)
{
	const struct direct_wish wish = { .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT };
	struct direct *scene;

	fake_gpu_ordering = ORDERED;
	scene = scene_refusing(&wish, EOPNOTSUPP, 0);
	cr_assert(kvp_lane_rings(scene->to)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->to)->word, "peermem");
	scene_end(scene);
}

Test(direct_gpu, rings_of_the_host_where_the_device_refuses)
{
	const struct direct_wish wish = { .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT };
	struct direct *scene;

	fake_gpu_ordering = ORDERED;
	scene = scene_refusing(&wish, EOPNOTSUPP, EFAULT);
	cr_assert_not(kvp_lane_rings(scene->to)->device);
	cr_assert_str_eq(kvp_lane_rings(scene->to)->word, "not_registered");
	cr_assert(strstr(kvp_lane_rings(scene->to)->reason, "peer memory"), "%s",
		  kvp_lane_rings(scene->to)->reason);
	cr_assert(strstr(kvp_lane_rings(scene->to)->reason, "dma-buf"), "%s",
		  kvp_lane_rings(scene->to)->reason);
	direct_transfer(scene, true);
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
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
	cr_assert_gt(to.flushes, 0);
	cr_assert_leq(to.flushes, to.pieces_direct);
	fake_gpu_ordering = ORDERED;
	to = goes_directly(&(struct direct_wish){ .memory = LT_IPC,
						  .dmabuf = true,
						  .to = KVP_DATA_DIRECT,
						  .flush = KVP_FLUSH_ALWAYS });
	cr_assert_gt(to.flushes, 0, "since it was asked for");
}

/* What was written is kept until then: nobody has heard of it. */
Test(direct_gpu, nothing_is_told_before_the_gpu)
{
	struct direct *scene;
	struct kvp_board *board;

	fake_gpu_can_flush = 1;
	scene = scene_make(
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
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
	struct direct *scene;

	fake_gpu_can_flush = 1;
	scene = scene_make(
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
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
	struct direct *scene;

	fake_gpu_can_flush = 1;
	fake_gpu_fail_flush = 1;
	scene = scene_make(
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
	direct_fails(scene, KVP__STATUS__STATUS_SYSTEM, "FAKE_ERROR");
	scene_end(scene);
}

/* ---- what lands ------------------------------------------------------------------------------ */

static void lands(const struct direct_wish *wish, enum kvp_why why)
{
	struct direct *scene = scene_make(wish);

	direct_transfer(scene, true);
	direct_landed(scene, why);
	cr_assert_eq(lt_status(scene->to).regions, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

static void refused(const struct direct_wish *wish, const char *text)
{
	struct direct_wish forced = *wish;
	struct direct *scene;

	forced.to = KVP_DATA_DIRECT;
	scene = scene_make(&forced);
	direct_fails(scene, KVP__STATUS__STATUS_UNSUPPORTED, text);
	scene_end(scene);
}

Test(direct_gpu, landing_without_a_dma_buf)
{
	const struct direct_wish ipc = { .memory = LT_IPC, .to = KVP_DATA_AUTO };
	const struct direct_wish vmm = { .memory = LT_VMM, .to = KVP_DATA_AUTO };

	fake_gpu_ordering = ORDERED;
	lands(&ipc, KVP_WHY_MEMORY);
	refused(&ipc, "its owner gave no dma-buf");
	lands(&vmm, KVP_WHY_MEMORY);
	refused(&vmm, "by our own: cuMemGetHandleForAddressRange: FAKE_ERROR");
}

Test(direct_gpu, landing_since_the_device_takes_no_dma_buf)
{
	const struct direct_wish wish = {
		.memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_AUTO, .rings = KVP_RINGS_HOST
	};
	struct direct *scene;

	fake_gpu_ordering = ORDERED;
	goes_directly(&wish); /* the first lanes of all reset the device */
	kvp_fake.refuse_dmabuf = EOPNOTSUPP;
	lands(&wish, KVP_WHY_MEMORY);
	refused(&wish, "of a dma-buf: Operation not supported");
	kvp_fake.refuse_dmabuf = 0;
	scene = scene_make(&wish);
	direct_transfer(scene, true);
	cr_assert_gt(lt_status(scene->to).pieces_direct, 0);
	lt_room_end(&scene->room);
	scene_end(scene);
}

Test(direct_gpu, landing_where_the_gpu_would_not_see_it)
{
	const struct direct_wish wish = { .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_AUTO };
	const struct direct_wish always = {
		.memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_AUTO, .flush = KVP_FLUSH_ALWAYS
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
	struct direct *scene;
	uint32_t mrs, dmabufs;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(&(struct direct_wish){
		.memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT, .rings = KVP_RINGS_HOST });
	direct_transfer(scene, true);
	lt_room_end(&scene->room);
	mrs = kvp_fake_look().n_mrs;
	dmabufs = kvp_fake_look().n_dmabufs;
	for (uint32_t i = 0; i < 3; i++) {
		direct_transfer(scene, true);
		cr_assert_eq(kvp_fake_look().n_mrs, mrs + 1);
		lt_room_end(&scene->room);
		cr_assert_eq(kvp_fake_look().n_mrs, mrs, "taken back");
		cr_assert_eq(kvp_fake_look().n_dmabufs, dmabufs + i + 1);
	}
	scene_end(scene);
}

/* Pages are not released, nor is the registration, while the device may still write. */
Test(direct_gpu, released_after_the_last_late_write)
{
	struct direct *scene;
	struct kvp_board *board;

	fake_gpu_ordering = ORDERED;
	scene = scene_make(
		&(struct direct_wish){ .memory = LT_IPC, .dmabuf = true, .to = KVP_DATA_DIRECT });
	board = &scene->room.dests[0].board;
	kvp_fake_hold_writes(true);
	lt_room_begin(&scene->room);
	lt_submit_all(&scene->room, 0, 700);
	direct_wait_writes(scene);
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
