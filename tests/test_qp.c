/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>

#include "daemon/qp.h"
#include "proto/util.h"
#include "tests/fake_verbs.h"

#define N_MAX 256u

struct told {
	unsigned n; /* users told */
	uintptr_t who[N_MAX];
	int status[N_MAX];
};

static void done(void *arg, void *user, int status)
{
	struct told *told = arg;

	cr_assert_lt(told->n, N_MAX);
	told->who[told->n] = (uintptr_t)user;
	told->status[told->n++] = status;
}

static struct kvp_qp_request request(uintptr_t user)
{
	return (struct kvp_qp_request){
		.opcode = IBV_WR_RDMA_WRITE,
		.user = (void *)user, /* NOLINT: a number that comes back */
	};
}

static unsigned reap(struct kvp_fake_rig *rig, struct kvp_qp *qp, struct told *told)
{
	struct ibv_wc wc;
	unsigned n = 0;

	while (ibv_poll_cq(rig->cq, 1, &wc) > 0) {
		cr_assert(kvp_qp_complete(qp, &wc, done, told));
		n++;
	}
	return n;
}

static void expect_in_order(const struct told *told, unsigned n)
{
	cr_assert_eq(told->n, n, "%u told of %u", told->n, n);
	for (unsigned i = 0; i < n; i++)
		cr_assert_eq(told->who[i], i + 1);
}

Test(qp, one_doorbell_and_one_completion_a_batch)
{
	struct kvp_fake_rig rig;
	struct told told = { 0 };
	struct kvp_qp qp;

	kvp_fake_rig_open(&rig, 16);
	cr_assert_eq(kvp_qp_init(&qp, rig.qp, 16, 5), 0);
	for (uintptr_t i = 1; i <= 10; i++) {
		struct kvp_qp_request r = request(i);

		cr_assert_eq(kvp_qp_add(&qp, &r), 0);
	}
	cr_assert_eq(kvp_fake.n_doorbells, 0);
	cr_assert_eq(kvp_qp_ring(&qp), 0);
	cr_assert_eq(kvp_fake.n_doorbells, 1);
	cr_assert_eq(reap(&rig, &qp, &told), 1);
	expect_in_order(&told, 10);
	cr_assert_eq(kvp_qp_room(&qp), 16);
	cr_assert_eq(kvp_qp_ring(&qp), 0, "an empty batch rings no bell");
	cr_assert_eq(kvp_fake.n_doorbells, 1);
	kvp_qp_fini(&qp);
	kvp_fake_rig_close(&rig);
}

/* Every depth, every size of batch: nothing past the credits, all told once, in order. */
Test(qp, every_credit_level)
{
	for (unsigned depth = 1; depth <= 40; depth++) {
		for (unsigned batch = 1; batch <= depth + 1; batch++) {
			struct kvp_fake_rig rig;
			struct told told = { 0 };
			struct kvp_qp qp;
			uintptr_t next = 1;

			kvp_fake_rig_open(&rig, depth);
			kvp_fake.hold = true;
			cr_assert_eq(kvp_qp_init(&qp, rig.qp, depth, KVP_QP_TAG_MAX), 0);
			while (next <= 90) {
				struct kvp_qp_request r = request(next);
				unsigned room = kvp_qp_room(&qp);
				int e = kvp_qp_add(&qp, &r);

				cr_assert_eq(e, room > 0 ? 0 : -EAGAIN);
				if (e == 0 && next++ % batch != 0)
					continue;
				cr_assert_eq(kvp_qp_ring(&qp), 0);
				cr_assert_leq(qp.posted - qp.completed, depth);
				if (e == 0)
					continue;
				while (kvp_fake_step(rig.qp))
					;
				cr_assert_gt(reap(&rig, &qp, &told), 0);
			}
			cr_assert_eq(kvp_qp_ring(&qp), 0);
			while (kvp_fake_step(rig.qp))
				;
			(void)reap(&rig, &qp, &told);
			expect_in_order(&told, 90);
			kvp_qp_fini(&qp);
			kvp_fake_rig_close(&rig);
		}
	}
}

/* The n-th of 24 requests in batches of `batch` fails: those before it are good, it has the reason,
 * those after it are cancelled, and then the queue is known to be empty. */
static void fail_at(unsigned n, unsigned batch, bool hold)
{
	struct kvp_fake_rig rig;
	struct told told = { 0 };
	struct kvp_qp qp;
	unsigned taken = 0;

	kvp_fake_rig_open(&rig, 24);
	kvp_fake.hold = hold;
	kvp_fake.fail_at = n;
	kvp_fake.fail_status = IBV_WC_RETRY_EXC_ERR;
	cr_assert_eq(kvp_qp_init(&qp, rig.qp, 24, 1), 0);
	for (uintptr_t i = 1; i <= 24; i++) {
		struct kvp_qp_request r = request(i);

		if (kvp_qp_add(&qp, &r) == 0)
			taken++;
		if (i % batch == 0)
			(void)kvp_qp_ring(&qp); /* lost or not: complete() tells */
	}
	(void)kvp_qp_ring(&qp);
	while (kvp_fake_step(rig.qp))
		(void)reap(&rig, &qp, &told);
	(void)reap(&rig, &qp, &told);
	while (kvp_fake_step(rig.qp)) /* the marker */
		;
	(void)reap(&rig, &qp, &told);

	expect_in_order(&told, taken);
	for (unsigned i = 0; i < taken; i++)
		cr_assert_eq(told.status[i],
			     i + 1 < n    ? 0
			     : i + 1 == n ? -ETIMEDOUT
					  : -ECANCELED,
			     "request %u of failure %u: %d", i + 1, n, told.status[i]);
	cr_assert_eq(qp.state, KVP_QP_DRAINED);
	cr_assert_eq(qp.reason, IBV_WC_RETRY_EXC_ERR);
	cr_assert_eq(kvp_qp_room(&qp), 0);
	kvp_qp_fini(&qp);
	kvp_fake_rig_close(&rig);
}

Test(qp, failure_at_every_write)
{
	for (unsigned n = 1; n <= 24; n++) {
		for (unsigned batch = 1; batch <= 24; batch++) {
			fail_at(n, batch, false);
			fail_at(n, batch, true);
		}
	}
}

/* The device refuses the n-th of a list, having taken those before it without a signal. */
Test(qp, refusal_at_every_write)
{
	for (unsigned n = 1; n <= 20; n++) {
		struct kvp_fake_rig rig;
		struct told told = { 0 };
		struct kvp_qp_request r;
		struct kvp_qp qp;

		kvp_fake_rig_open(&rig, 20);
		kvp_fake.refuse_at = n;
		kvp_fake.refuse_errno = ENOMEM;
		cr_assert_eq(kvp_qp_init(&qp, rig.qp, 20, 1), 0);
		for (uintptr_t i = 1; i <= 20; i++) {
			r = request(i);
			cr_assert_eq(kvp_qp_add(&qp, &r), 0);
		}
		cr_assert_eq(kvp_qp_ring(&qp), -ENOMEM);
		r = request(99);
		cr_assert_eq(kvp_qp_add(&qp, &r), -ENOMEM, "lost for good");
		(void)reap(&rig, &qp, &told);
		expect_in_order(&told, 20);
		for (unsigned i = 0; i < 20; i++)
			cr_assert_lt(told.status[i], 0, "none is known to have arrived");
		cr_assert_eq(qp.state, KVP_QP_DRAINED);
		kvp_qp_fini(&qp);
		kvp_fake_rig_close(&rig);
	}
}

/* Given up with requests at the device, some of which still end well. */
Test(qp, flush_order_after_giving_up)
{
	for (unsigned ended = 0; ended <= 12; ended++) {
		struct kvp_fake_rig rig;
		struct told told = { 0 };
		struct kvp_qp qp;

		kvp_fake_rig_open(&rig, 16);
		kvp_fake.hold = true;
		cr_assert_eq(kvp_qp_init(&qp, rig.qp, 16, 1), 0);
		for (uintptr_t i = 1; i <= 14; i++) {
			struct kvp_qp_request r = request(i);

			cr_assert_eq(kvp_qp_add(&qp, &r), 0);
			if (i % 4 == 0)
				cr_assert_eq(kvp_qp_ring(&qp), 0);
		}
		for (unsigned i = 0; i < ended; i++)
			cr_assert(kvp_fake_step(rig.qp));
		kvp_qp_fail(&qp, -ENETDOWN); /* 13 and 14 never reach the device */
		cr_assert_eq(qp.state, KVP_QP_FAILED);
		while (kvp_fake_step(rig.qp))
			;
		(void)reap(&rig, &qp, &told);
		expect_in_order(&told, 14);
		for (unsigned i = 0; i < 14; i++)
			cr_assert_eq(told.status[i] == 0, i < ended / 4 * 4,
				     "only what a completion proved has arrived");
		cr_assert_eq(qp.state, KVP_QP_DRAINED);
		kvp_qp_fini(&qp);
		kvp_fake_rig_close(&rig);
	}
}

/* A device that will not even flush: its destruction ends everything. */
Test(qp, abandon_tells_the_rest)
{
	struct kvp_fake_rig rig;
	struct told told = { 0 };
	struct kvp_qp qp;

	kvp_fake_rig_open(&rig, 8);
	kvp_fake.hold = true;
	cr_assert_eq(kvp_qp_init(&qp, rig.qp, 8, 1), 0);
	for (uintptr_t i = 1; i <= 6; i++) {
		struct kvp_qp_request r = request(i);

		cr_assert_eq(kvp_qp_add(&qp, &r), 0);
		if (i == 3)
			cr_assert_eq(kvp_qp_ring(&qp), 0);
	}
	kvp_fake.refuse_modify = true;
	kvp_qp_fail(&qp, -EIO);
	cr_assert_eq(reap(&rig, &qp, &told), 0);
	cr_assert_neq(qp.state, KVP_QP_DRAINED);
	(void)ibv_destroy_qp(rig.qp);
	rig.qp = NULL;
	kvp_qp_abandon(&qp, done, &told);
	expect_in_order(&told, 6);
	cr_assert_eq(told.status[5], -EIO);
	cr_assert_eq(qp.state, KVP_QP_DRAINED);
	kvp_qp_fini(&qp);
	kvp_fake_rig_close(&rig);
}

Test(qp, stale_completions_are_nobodys)
{
	struct kvp_fake_rig rig;
	struct told told = { 0 };
	struct ibv_wc wc = { .status = IBV_WC_SUCCESS };
	struct kvp_qp_request r = request(1);
	struct kvp_qp qp;

	kvp_fake_rig_open(&rig, 4);
	cr_assert_eq(kvp_qp_init(&qp, rig.qp, 4, 1), 0);
	for (uint64_t id = 0; id < 6; id++) {
		wc.wr_id = id;
		cr_assert_not(kvp_qp_complete(&qp, &wc, done, &told));
	}
	cr_assert_eq(kvp_qp_add(&qp, &r), 0);
	wc.wr_id = 1;
	cr_assert_not(kvp_qp_complete(&qp, &wc, done, &told), "added, not posted");
	cr_assert_eq(told.n, 0);
	cr_assert_eq(kvp_qp_ring(&qp), 0);
	cr_assert_eq(reap(&rig, &qp, &told), 1);
	cr_assert_eq(told.n, 1);
	kvp_qp_fini(&qp);
	kvp_fake_rig_close(&rig);
}

/* The sequence in a wr_id has 40 bits; a queue pair outlives them. */
Test(qp, sequence_wraps_in_the_wr_id)
{
	struct kvp_fake_rig rig;
	struct told told = { 0 };
	struct kvp_qp qp;

	kvp_fake_rig_open(&rig, 8);
	cr_assert_eq(kvp_qp_init(&qp, rig.qp, 8, KVP_QP_TAG_MAX), 0);
	qp.posted = qp.completed = KVP_QP_SEQ_MASK - 10;
	for (uintptr_t i = 1; i <= 40; i++) {
		struct kvp_qp_request r = request(i);

		cr_assert_eq(kvp_qp_add(&qp, &r), 0);
		if (i % 5 == 0) {
			cr_assert_eq(kvp_qp_ring(&qp), 0);
			cr_assert_eq(reap(&rig, &qp, &told), 1);
		}
	}
	expect_in_order(&told, 40);
	kvp_qp_fini(&qp);
	kvp_fake_rig_close(&rig);
}

Test(qp, receives_are_posted_in_batches)
{
	struct kvp_fake_rig rig;
	uint8_t memory[64][32];
	struct ibv_mr *mr;
	struct kvp_rq rq;

	kvp_fake_rig_open(&rig, 8);
	mr = ibv_reg_mr(rig.pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	kvp_rq_init(&rq, rig.qp, 3, mr, memory, sizeof(memory[0]));
	for (uint32_t i = 0; i < 64; i++)
		cr_assert_eq(kvp_rq_give(&rq, i), 0);
	cr_assert_eq(kvp_rq_ring(&rq), 0);
	cr_assert_eq(kvp_rq_ring(&rq), 0);
	cr_assert_eq(kvp_fake.n_recv_doorbells, 2);
	cr_assert_eq(rq.posted, 64);
	(void)ibv_dereg_mr(mr);
	kvp_fake_rig_close(&rig);
}
