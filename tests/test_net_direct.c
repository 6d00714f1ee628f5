/* SPDX-License-Identifier: Apache-2.0 */

/* Windows of the verbs transport on a device made of nothing: who may write where, and until when.
 */

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"
#include "tests/fake_verbs.h"
#include "tests/support_clock.h"
#include "tests/support_verbs.h"

#define SLOT 65536u
#define POOL 1000000u

struct rig {
	struct vp_node a, b;
	uint8_t *pool; /* of b */
	int fd;
	struct kvp_net_region *region;
	struct kvp_net_window *window;
	struct kvp_net_key key;
};

/* After a reset. */
static void rig_open_on(struct rig *rig, const char *devices_a, const char *devices_b)
{
	struct kvp_net_verbs_config config;
	char err[256] = "";

	memset(rig, 0, sizeof(*rig));
	kvp_net_verbs_defaults(&config);
	config.devices = devices_a;
	cr_assert_eq(vp_open(&rig->a, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	config.devices = devices_b;
	cr_assert_eq(vp_open(&rig->b, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_connect(&rig->a, &rig->b), 0);
	cr_assert_eq(vp_connect(&rig->b, &rig->a), 0);
	rig->fd = memfd_create("pool", MFD_CLOEXEC);
	cr_assert_geq(rig->fd, 0);
	cr_assert_eq(ftruncate(rig->fd, POOL), 0);
	rig->pool = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_SHARED, rig->fd, 0);
	cr_assert_neq(rig->pool, MAP_FAILED);
}

static void rig_open(struct rig *rig)
{
	kvp_fake_reset();
	rig_open_on(rig, "", "");
}

static int region_add(struct rig *rig, int dmabuf_fd, char *err, size_t err_bytes)
{
	const struct kvp_net_span span = {
		.base = rig->pool + 4096,
		.bytes = POOL - 8192,
		.dmabuf_fd = dmabuf_fd,
		.dmabuf_offset = 4096,
	};

	return kvp_net_verbs.region_add(rig->b.net, &span, &rig->region, err, err_bytes);
}

static void window_open(struct rig *rig)
{
	int r;

	cr_assert_eq(kvp_net_verbs.window_open(rig->b.net, rig->region, &rig->window), 0);
	while ((r = kvp_net_verbs.window_key(rig->b.net, rig->window, &rig->key)) == -EAGAIN)
		(void)kvp_net_verbs.progress(rig->b.net);
	cr_assert_eq(r, 0);
}

static void window_close(struct rig *rig)
{
	while (kvp_net_verbs.window_close(rig->b.net, rig->window) == -EAGAIN)
		(void)kvp_net_verbs.progress(rig->b.net);
}

static void rig_close(struct rig *rig)
{
	if (rig->region)
		kvp_net_verbs.region_remove(rig->b.net, rig->region);
	vp_close(&rig->a);
	vp_close(&rig->b);
	(void)munmap(rig->pool, POOL);
	(void)close(rig->fd);
	cr_assert_eq(kvp_fake.n_mws, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
	cr_assert_eq(kvp_fake.n_qps, 0);
	cr_assert_eq(kvp_fake.n_cqs, 0);
}

/* Writes n runs of 100 bytes, 1000 apart, and their message. */
static int write_runs(struct rig *rig, uint64_t seq, uint64_t offset, uint32_t n)
{
	const struct vp_hdr hdr = { .seq = seq };
	struct kvp_net_run runs[KVP_NET_RUNS_MAX + 1];
	const struct kvp_net_write write = {
		.runs = runs, .n = n, .hdr = &hdr, .hdr_bytes = sizeof(hdr), .req = rig
	};

	memset(rig->a.pack, (int)seq + 1, SLOT);
	for (uint32_t i = 0; i < n && i < KVP_ARRAY_SIZE(runs); i++)
		runs[i] = (struct kvp_net_run){
			.key = &rig->key,
			.from = rig->a.pack + i * 100,
			.offset = offset + i * UINT64_C(1000),
			.bytes = 100,
		};
	return kvp_net_verbs.write(rig->a.net, rig->a.ep, &write);
}

static void write_taken(struct rig *rig, uint64_t seq, uint64_t offset, uint32_t n)
{
	int r;

	while ((r = write_runs(rig, seq, offset, n)) == -EAGAIN)
		vp_idle(&rig->a, &rig->b, 1);
	cr_assert_eq(r, 0, "%s", strerror(-r));
}

static void expect_written(const struct rig *rig, uint64_t seq, uint64_t offset, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *at = rig->pool + 4096 + offset + i * UINT64_C(1000);

		cr_assert_eq(at[-1], 0);
		cr_assert_eq(at[0], seq + 1);
		cr_assert_eq(at[99], seq + 1);
		cr_assert_eq(at[100], 0);
	}
}

/* The message is there when the bytes are. */
static void writes_arrive(struct rig *rig)
{
	window_open(rig);
	for (uint64_t i = 0; i < 20; i++) {
		uint32_t n = 1 + (uint32_t)i * 7 % kvp_net_verbs.write_max(rig->a.net);

		memset(rig->pool, 0, POOL);
		write_taken(rig, i, i * 3001 + 5, n);
		cr_assert(vp_turn(&rig->a, &rig->b, &rig->b.messages, i + 1, 2000));
		expect_written(rig, i, i * 3001 + 5, n);
	}
	cr_assert(vp_turn(&rig->a, &rig->b, &rig->a.sent_ok, 20, 2000));
	window_close(rig);
}

Test(net_direct, writes)
{
	struct rig rig;
	char err[256] = "";
	uint64_t signaled;

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0, "%s", err);
	writes_arrive(&rig);
	signaled = rig.a.ep->paths[0].conn->qp.signaled;
	cr_assert_leq(signaled, 21, "more than one completion a piece");
	rig_close(&rig);
}

/* A window that was bound before a rail was there has no key for it: its writes take the others. */
Test(net_direct, a_rail_that_comes_up_later)
{
	struct kvp_net_key old;
	struct rig rig;
	char err[256] = "";

	kvp_fake_reset();
	kvp_fake.n_devices = KVP_FAKE_DEVICES;
	kvp_fake.down[3] = kvp_fake.no_gid[3] = true;
	rig_open_on(&rig, "fake0,fake1", "fake2,fake3");
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0, "%s", err);
	window_open(&rig);
	write_taken(&rig, 0, 0, 4);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	kvp_fake.down[3] = kvp_fake.no_gid[3] = false;
	kvp_fake_event(3, IBV_EVENT_PORT_ACTIVE, NULL);
	for (unsigned i = 0; i < 5000 && !rig.a.ep->paths[1].conn; i++)
		vp_idle(&rig.a, &rig.b, 1);
	for (unsigned i = 0; i < 5000 && rig.a.ep->paths[1].conn->state != KVP_VB_OPEN; i++)
		vp_idle(&rig.a, &rig.b, 1);
	cr_assert_eq(rig.a.ep->paths[1].conn->state, KVP_VB_OPEN);
	for (uint64_t i = 1; i < 20; i++)
		write_taken(&rig, i, 0, 4);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 20, 2000));
	cr_assert_eq(rig.a.net->rails[1].bytes, 0);

	/* The next one has. */
	old = rig.key;
	window_close(&rig);
	window_open(&rig);
	cr_assert_eq(((const struct kvp_vb_key *)&old)->rkey[1], 0);
	cr_assert_neq(((const struct kvp_vb_key *)&rig.key)->rkey[1], 0);
	for (uint64_t i = 20; i < 60; i++)
		write_taken(&rig, i, 0, 4);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 60, 2000));
	cr_assert_gt(rig.a.net->rails[1].bytes, 0);
	expect_written(&rig, 59, 0, 4);
	cr_assert_eq(rig.a.failed, 0);
	window_close(&rig);
	rig_close(&rig);
}

/* What is refused costs the writer its connection, and the pool is as it was. */
static void expect_refused(struct rig *rig, uint64_t offset)
{
	memset(rig->pool, 0, POOL);
	write_taken(rig, 1, offset, 1);
	cr_assert(vp_turn(&rig->a, &rig->b, &rig->a.failed, 1, 2000));
	cr_assert_eq(rig->a.last_status, -EACCES);
	cr_assert_eq(kvp_fake.n_refused, 1);
	for (uint32_t i = 0; i < POOL; i++)
		cr_assert_eq(rig->pool[i], 0);
}

Test(net_direct, memory_of_a_dma_buf)
{
	struct rig rig;
	char err[256] = "";
	uint32_t mrs;

	rig_open(&rig);
	kvp_fake.refuse_dmabuf = EOPNOTSUPP;
	cr_assert_eq(region_add(&rig, rig.fd, err, sizeof(err)), -EOPNOTSUPP);
	cr_assert(strstr(err, "dma-buf"), "%s", err);
	kvp_fake.refuse_dmabuf = 0;
	mrs = kvp_fake.n_mrs;
	cr_assert_eq(region_add(&rig, rig.fd, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(kvp_fake.n_mrs, mrs, "no grant, no registration");
	writes_arrive(&rig);
	mrs = kvp_fake.n_mrs;
	window_open(&rig);
	cr_assert_eq(kvp_fake.n_mrs, mrs + 1, "one for each grant");
	window_close(&rig);
	cr_assert_eq(kvp_fake.n_mrs, mrs);
	cr_assert_eq(kvp_fake.n_mws, 0);
	expect_refused(&rig, 0);
	rig_close(&rig);
}

/* An allocation that began in the middle of a page where it was made, and begins elsewhere in one
 * here: what the device is told fits it. */
Test(net_direct, a_dma_buf_that_lies_otherwise_here)
{
	struct rig rig;
	char err[256] = "";
	struct kvp_net_span span;

	rig_open(&rig);
	span = (struct kvp_net_span){
		.base = rig.pool + 512,
		.bytes = POOL - 8192,
		.dmabuf_fd = rig.fd,
		.dmabuf_offset = 4096 + 100,
	};
	cr_assert_eq(kvp_net_verbs.region_add(rig.b.net, &span, &rig.region, err, sizeof(err)), 0,
		     "%s", err);
	window_open(&rig);
	memset(rig.pool, 0, POOL);
	write_taken(&rig, 0, 7, 3);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	expect_written(&rig, 0, 100 + 7, 3); /* which counts from 4096 */
	window_close(&rig);
	rig_close(&rig);
}

Test(net_direct, a_byte_past_the_window)
{
	struct rig rig;
	char err[256] = "";

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	write_taken(&rig, 0, POOL - 8192 - 100, 1);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	expect_refused(&rig, POOL - 8192 - 99);
	window_close(&rig);
	rig_close(&rig);
}

Test(net_direct, a_key_that_was_taken_back)
{
	struct rig rig;
	char err[256] = "";

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	write_taken(&rig, 0, 0, 1);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	window_close(&rig);
	expect_refused(&rig, 0);
	rig_close(&rig);
}

/* Another grant of the same memory has another key, also of a device that gives the number of a
 * registration again as soon as it is free. */
static void key_of_the_grant_before(bool dmabuf)
{
	struct rig rig;
	struct kvp_net_key old;
	char err[256] = "";

	rig_open(&rig);
	kvp_fake.same_keys = true;
	cr_assert_eq(region_add(&rig, dmabuf ? rig.fd : -1, err, sizeof(err)), 0);
	window_open(&rig);
	old = rig.key;
	window_close(&rig);
	window_open(&rig);
	cr_assert_neq(memcmp(&old, &rig.key, sizeof(old)), 0);
	rig.key = old;
	expect_refused(&rig, 0);
	window_close(&rig);
	rig_close(&rig);
}

Test(net_direct, a_key_of_the_grant_before)
{
	key_of_the_grant_before(false);
	key_of_the_grant_before(true);
}

/* A daemon that was started again at the same address: what the one before has granted reaches
 * nothing, neither over the old connection nor over one that is asked for in its name. */
Test(net_direct, a_grant_of_the_process_before)
{
	struct kvp_net_verbs_config config;
	struct rig rig;
	char err[256] = "";
	struct kvp_net_key old;

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	old = rig.key;
	write_taken(&rig, 0, 0, 1);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	window_close(&rig);
	kvp_net_verbs.region_remove(rig.b.net, rig.region);
	vp_close(&rig.b);

	kvp_net_verbs_defaults(&config);
	config.devices = "";
	cr_assert_eq(vp_open(&rig.b, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_connect(&rig.b, &rig.a), 0);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	memset(rig.pool, 0, POOL);
	rig.key = old;
	cr_assert_eq(write_runs(&rig, 1, 0, 1), 0);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.a.failed, 1, 10000));
	vp_idle(&rig.a, &rig.b, 20);
	for (uint32_t i = 0; i < POOL; i++)
		cr_assert_eq(rig.pool[i], 0, "byte %u", i);
	cr_assert_eq(rig.b.messages, 0);
	window_close(&rig);
	rig_close(&rig);
}

Test(net_direct, a_made_up_key)
{
	struct rig rig;
	char err[256] = "";
	struct kvp_vb_key key;

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	memcpy(&key, &rig.key, sizeof(key));
	key.rkey[0] = rig.region->mr[0]->rkey; /* that of the memory itself has no rights */
	memcpy(&rig.key, &key, sizeof(key));
	expect_refused(&rig, 0);
	window_close(&rig);
	rig_close(&rig);
}

/* A window that the device did not take back is gone, and its key for good. */
Test(net_direct, the_key_of_a_lost_window_is_not_given_again)
{
	struct kvp_net_key old;
	struct rig rig;
	char err[256];

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0, "%s", err);
	window_open(&rig);
	old = rig.key;
	kvp_fake.fail_binding = true;
	window_close(&rig);
	kvp_fake.fail_binding = false;
	cr_assert_eq(kvp_fake.n_mws, 0, "it was not lost");
	window_open(&rig);
	cr_assert_neq(memcmp(&old, &rig.key, sizeof(old)), 0);
	for (unsigned i = 0; i < 255; i++) {
		window_close(&rig);
		window_open(&rig);
		cr_assert_neq(memcmp(&old, &rig.key, sizeof(old)), 0);
	}
	window_close(&rig);
	rig_close(&rig);
}

/* Until the device has answered there is no key, and a window cannot be taken back. */
Test(net_direct, a_slow_device)
{
	struct rig rig;
	struct kvp_net_key key;
	char err[256] = "";

	rig_open(&rig);
	vp_idle(&rig.a, &rig.b, 5); /* connected */
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	kvp_fake.hold = true;
	cr_assert_eq(kvp_net_verbs.window_open(rig.b.net, rig.region, &rig.window), 0);
	(void)kvp_net_verbs.progress(rig.b.net);
	cr_assert_eq(kvp_net_verbs.window_key(rig.b.net, rig.window, &key), -EAGAIN);
	cr_assert_eq(kvp_net_verbs.window_close(rig.b.net, rig.window), -EAGAIN);
	cr_assert_eq(kvp_net_verbs.arm(rig.b.net), -EBUSY, "an answer would wake nobody");
	cr_assert(kvp_fake_step(rig.b.net->rails[0].binder.qp));
	(void)kvp_net_verbs.progress(rig.b.net);
	cr_assert_eq(kvp_net_verbs.window_key(rig.b.net, rig.window, &key), 0);
	cr_assert_eq(kvp_net_verbs.window_close(rig.b.net, rig.window), -EAGAIN);
	(void)kvp_net_verbs.progress(rig.b.net);
	cr_assert_eq(kvp_net_verbs.window_close(rig.b.net, rig.window), -EAGAIN);
	cr_assert_eq(kvp_net_verbs.window_key(rig.b.net, rig.window, &key), -EIO);
	cr_assert(kvp_fake_step(rig.b.net->rails[0].binder.qp));
	(void)kvp_net_verbs.progress(rig.b.net);
	cr_assert_eq(kvp_net_verbs.window_close(rig.b.net, rig.window), 0);
	kvp_fake.hold = false;
	rig_close(&rig);
}

/* A device that fails to take a window back loses it altogether; the next one works. */
Test(net_direct, a_device_that_refuses)
{
	struct rig rig;
	char err[256] = "";

	rig_open(&rig);
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	window_open(&rig);
	cr_assert_eq(kvp_fake.n_mws, 1);
	kvp_fake.fail_binding = true;
	window_close(&rig);
	cr_assert_eq(kvp_fake.n_mws, 0);
	kvp_fake.fail_binding = false;
	window_open(&rig);
	write_taken(&rig, 0, 0, 1);
	cr_assert(vp_turn(&rig.a, &rig.b, &rig.b.messages, 1, 2000));
	window_close(&rig);
	expect_refused(&rig, 0);
	rig_close(&rig);
}

static int (*true_poll)(struct ibv_cq *cq, int n, struct ibv_wc *wc);

/* Of the queue where windows answer, which has no channel. */
static int poll_fails(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	return cq->channel ? true_poll(cq, n, wc) : -1;
}

/* Steps until the device has answered, or has been taken as one that does not: in how many ms. */
static uint64_t wait_answer(struct rig *rig, int (*done)(struct rig *rig), int expected)
{
	uint64_t since = vp_ms();
	int r;

	while ((r = done(rig)) == -EAGAIN && vp_ms() - since < 10000)
		(void)kvp_net_verbs.progress(rig->b.net);
	cr_assert_eq(r, expected, "%s", strerror(-r));
	return vp_ms() - since;
}

static int get_key(struct rig *rig)
{
	return kvp_net_verbs.window_key(rig->b.net, rig->window, &rig->key);
}

static int get_back(struct rig *rig)
{
	return kvp_net_verbs.window_close(rig->b.net, rig->window);
}

/* An answer that never comes, to the request that makes a window or to the one that takes it back:
 * the window is destroyed, no write goes through it, and the next one works. */
static void no_answer(bool fails, bool back)
{
	struct rig rig;
	char err[256] = "";
	uint64_t ms;

	rig_open(&rig);
	true_poll = rig.b.net->rails[0].context->ops.poll_cq;
	cr_assert_eq(region_add(&rig, -1, err, sizeof(err)), 0);
	if (back)
		window_open(&rig);
	if (fails)
		rig.b.net->rails[0].context->ops.poll_cq = poll_fails;
	else
		kvp_fake_hold_binds(kvp_fake.n_binds);
	if (!back) {
		cr_assert_eq(kvp_net_verbs.window_open(rig.b.net, rig.region, &rig.window), 0);
		ms = wait_answer(&rig, get_key, -EIO);
		cr_assert_eq(get_back(&rig), 0);
	} else {
		ms = wait_answer(&rig, get_back, 0);
	}
	cr_assert(fails || ms * support_slow() >= 500, "%llu ms", (unsigned long long)ms);
	cr_assert_eq(kvp_fake.n_mws, 0);
	if (back)
		expect_refused(&rig, 0);
	rig.b.net->rails[0].context->ops.poll_cq = true_poll;
	kvp_fake_hold_binds(UINT64_MAX);
	window_open(&rig);
	window_close(&rig);
	rig_close(&rig);
}

Test(net_direct, an_answer_that_never_comes)
{
	no_answer(false, false);
	no_answer(false, true);
}

Test(net_direct, a_queue_of_answers_that_fails)
{
	no_answer(true, false);
	no_answer(true, true);
}

Test(net_direct, calls_that_make_no_sense)
{
	const struct vp_hdr hdr = { .seq = 0 };
	struct kvp_net_span span = { .bytes = 0, .dmabuf_fd = -1 };
	struct kvp_net_region *region;
	struct kvp_net_run run;
	struct kvp_net_write write = { .runs = &run, .n = 1, .hdr = &hdr, .req = &run };
	struct rig rig;
	char err[256] = "";

	rig_open(&rig);
	cr_assert_eq(kvp_net_verbs.region_add(rig.b.net, &span, &region, err, sizeof(err)),
		     -EINVAL);
	span.bytes = UINT64_C(1) << 32;
	cr_assert_eq(kvp_net_verbs.region_add(rig.b.net, &span, &region, err, sizeof(err)),
		     -EINVAL);
	cr_assert_eq(write_runs(&rig, 0, 0, KVP_NET_RUNS_MAX + 1), -EINVAL);
	cr_assert_eq(kvp_net_verbs.write(rig.a.net, rig.a.ep, &write), -EINVAL, "no message");
	write.hdr_bytes = sizeof(hdr);
	run = (struct kvp_net_run){ .key = &rig.key, .from = rig.a.pack, .bytes = 0 };
	cr_assert_eq(kvp_net_verbs.write(rig.a.net, rig.a.ep, &write), -EMSGSIZE);
	run = (struct kvp_net_run){ .key = &rig.key, .from = rig.pool, .bytes = 1 };
	cr_assert_eq(kvp_net_verbs.write(rig.a.net, rig.a.ep, &write), -EFAULT, "not known");
	rig_close(&rig);
}
