/* SPDX-License-Identifier: Apache-2.0 */

/* Connections of the verbs transport by librdmacm, which is none as the device is. */

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"
#include "tests/fake_rdmacm.h"
#include "tests/fake_verbs.h"
#include "tests/support_verbs.h"

#define SLOT 65536u

/* Words of an answer, as they travel: magic, version, receives, errno. */
#define ANSWER(receives, error)                 \
	{                                       \
		0x4d435642u, 2, receives, error \
	}

static void open_one(struct vp_node *node)
{
	struct kvp_net_verbs_config config;
	char err[256] = "";

	kvp_net_verbs_defaults(&config);
	config.rdma_cm = true;
	cr_assert_eq(vp_open(node, &config, SLOT, err, sizeof(err)), 0, "%s", err);
}

static void open_pair(struct vp_node *a, struct vp_node *b)
{
	kvp_fake_reset();
	kvp_fake_cm_reset();
	open_one(a);
	open_one(b);
	cr_assert_eq(vp_connect(a, b), 0);
}

static void join(struct vp_node *a, struct vp_node *b)
{
	for (unsigned i = 0; i < 4000 && !a->ep->joined; i++)
		vp_idle(a, b, 1);
	cr_assert(a->ep->joined);
}

static void expect_nothing_left(void)
{
	cr_assert_eq(kvp_fake_cm.n_ids, 0);
	cr_assert_eq(kvp_fake_cm.n_channels, 0);
	cr_assert_eq(kvp_fake.n_qps + kvp_fake.n_mrs + kvp_fake.n_ahs + kvp_fake.n_cqs +
			     kvp_fake.n_pds + kvp_fake.n_contexts,
		     0);
}

static void close_pair(struct vp_node *a, struct vp_node *b)
{
	cr_assert_eq(a->bad, 0);
	cr_assert_eq(b->bad, 0);
	vp_close(a);
	vp_close(b);
	expect_nothing_left();
}

static void put(struct vp_node *a, struct vp_node *b, uint64_t seq)
{
	uint64_t before = b->data, until = vp_ms() + 4000;
	int r;

	while ((r = vp_put(a, b, seq, seq % VP_SLOTS, 0, SLOT, true)) == -EAGAIN) {
		cr_assert_lt(vp_ms(), until);
		vp_idle(a, b, 1);
	}
	cr_assert_eq(r, 0, "%s", strerror(-r));
	cr_assert(vp_turn(a, b, &b->data, before + 1, 10000));
	cr_assert(vp_turn(a, b, &a->sent_ok, seq + 1, 10000));
}

/* The one connection that the node has opened, or that was opened to it. */
static struct kvp_vb_conn *conn_of(const struct vp_node *node, bool in)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &node->net->all, link) {
		if ((conn->in != NULL) == in && conn->state != KVP_VB_FAILED)
			return conn;
	}
	cr_assert_fail("there is none");
	return NULL;
}

Test(net_cm, payloads_both_ways)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	cr_assert_eq(vp_connect(&b, &a), 0);
	for (uint64_t seq = 0; seq < 40; seq++) {
		put(&a, &b, seq);
		put(&b, &a, seq);
	}
	cr_assert_eq(a.failed + b.failed, 0);
	cr_assert_eq(kvp_fake_cm.n_ids, 2 + 4, "two that listen, two ends of two connections");
	close_pair(&a, &b);
}

/* Who has verbs.connect = control has no port to be called at. */
Test(net_cm, both_ends_have_to_have_it)
{
	struct kvp_net_verbs_config config;
	struct vp_node a, b;
	char err[256] = "";

	kvp_fake_reset();
	kvp_fake_cm_reset();
	kvp_net_verbs_defaults(&config);
	open_one(&a);
	cr_assert_eq(vp_open(&b, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_lt(vp_connect(&a, &b), 0);
	vp_close(&a);
	vp_close(&b);
	expect_nothing_left();
}

/* The words of a rejection arrive. */
Test(net_cm, a_stranger_is_rejected)
{
	struct vp_node a, b;

	vp_admitted = 7;
	open_pair(&a, &b);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 10000));
	cr_assert_geq(kvp_net_verbs.stats(b.net)->strangers, 1);
	cr_assert_geq(kvp_net_verbs.stats(b.net)->rejects, 1);
	cr_assert_eq(a.last_status, -EPERM, "%s", strerror(-a.last_status));
	vp_admitted = UINT64_MAX;
	close_pair(&a, &b);
}

/* Whoever finds the port may say what he likes. */
Test(net_cm, a_request_that_is_none_is_rejected)
{
	struct sockaddr_in to = { .sin_family = AF_INET }, from = to;
	struct rdma_conn_param param = { .private_data = "hello, who are you?" };
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct vp_node a, b;
	const uint32_t *words;

	open_pair(&a, &b);
	join(&a, &b);
	channel = rdma_create_event_channel();
	cr_assert_eq(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	from.sin_addr.s_addr = htonl(0x0a000009);
	to.sin_addr.s_addr = htonl(0x0a000001);
	to.sin_port = htons(b.net->rails[0].cm_port);
	cr_assert_eq(rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&to, 1), 0);
	for (uint8_t bytes = 0; bytes < 20; bytes += 19) {
		param.private_data_len = bytes;
		cr_assert_eq(rdma_connect(id, &param), 0);
		vp_idle(&a, &b, 30);
		cr_assert_eq(kvp_net_verbs.stats(b.net)->rejects, bytes ? 2 : 1);
		do {
			cr_assert_eq(rdma_get_cm_event(channel, &event), 0);
			words = event->param.conn.private_data;
			if (event->event == RDMA_CM_EVENT_REJECTED)
				cr_assert_eq(words[3], EPROTO);
		} while (rdma_ack_cm_event(event) == 0 && !words);
	}
	cr_assert_eq(rdma_destroy_id(id), 0);
	rdma_destroy_event_channel(channel);
	put(&a, &b, 0);
	close_pair(&a, &b);
}

/* A peer that is gone says so, without waiting for anything. */
Test(net_cm, the_end_of_the_other_end_is_told)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	put(&a, &b, 0);
	vp_close(&b);
	cr_assert(vp_turn(&a, NULL, &a.failed, 1, 10000));
	cr_assert_eq(a.bad, 0);
	vp_close(&a);
	expect_nothing_left();
}

/* Nobody listens there any more; the same for what reaches nobody. */
Test(net_cm, nobody_is_there)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	vp_close(&b);
	cr_assert(vp_turn(&a, NULL, &a.failed, 1, 10000));
	cr_assert_eq(a.told, 0);
	vp_close(&a);
	expect_nothing_left();

	kvp_fake_cm_reset();
	kvp_fake_cm.unreachable = true;
	open_one(&a);
	open_one(&b);
	cr_assert_eq(vp_connect(&a, &b), 0);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 10000));
	cr_assert_eq(a.last_status, -EHOSTUNREACH);
	close_pair(&a, &b);
}

/* ---- what may wait, waits elsewhere */

/* Neither who opens nor who is asked waits for the way to the other, or this would not end. */
Test(net_cm, a_way_that_is_long_in_coming_holds_nobody_up)
{
	struct vp_node a, b;

	kvp_fake_reset();
	kvp_fake_cm_reset();
	open_one(&a);
	open_one(&b);
	kvp_fake_stick(0, true);
	cr_assert_eq(vp_connect(&a, &b), 0);
	for (unsigned i = 0; i < 2; i++) {
		const struct vp_node *waits = i ? &a : &b;

		for (unsigned ms = 0; ms < 4000 && waits->net->n_calls == 0; ms++)
			vp_idle(&a, &b, 1);
		cr_assert_eq(waits->net->n_calls, 1);
		vp_idle(&a, &b, 20);
		cr_assert_not(a.ep->joined);
		kvp_fake_stick(0, false);
		while (waits->net->n_calls > 0)
			(void)kvp_net_verbs.progress(waits->net);
		kvp_fake_stick(0, i == 0);
	}
	put(&a, &b, 0);
	close_pair(&a, &b);
}

/* Nor for librdmacm to let go of what was one. */
Test(net_cm, an_id_that_is_not_let_go_of_holds_nobody_up)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	put(&a, &b, 0);
	kvp_fake_cm_stick(true);
	kvp_vb_conn_fail(conn_of(&a, false), -ECONNRESET);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 10000));
	kvp_net_verbs.ep_close(a.net, a.ep);
	cr_assert(vp_turn(&a, &b, &a.closed, 1, 10000));
	cr_assert_eq(a.net->n_calls, 1);
	cr_assert_eq(kvp_fake_cm_look().n_ids, 2 + 2);
	kvp_fake_cm_stick(false);
	for (unsigned ms = 0; ms < 4000 && kvp_fake_cm_look().n_ids > 2; ms++)
		vp_idle(&a, &b, 1);
	cr_assert_eq(kvp_fake_cm_look().n_ids, 2, "those that listen");
	close_pair(&a, &b);
}

/* The word that the port is down comes while the queue pair goes: the id is not told of. */
Test(net_cm, an_id_is_kept_while_the_port_is_down)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	put(&a, &b, 0);
	kvp_fake_stick(0, true);
	kvp_vb_conn_fail(conn_of(&a, false), -ECONNRESET);
	for (unsigned ms = 0; ms < 4000 && TAILQ_EMPTY(&a.net->left); ms++)
		vp_idle(&a, &b, 1);
	kvp_fake_event(0, IBV_EVENT_PORT_ERR, NULL);
	kvp_fake_stick(0, false);
	for (unsigned ms = 0; ms < 4000 && !TAILQ_EMPTY(&a.net->left); ms++)
		vp_idle(&a, NULL, 1);
	cr_assert(TAILQ_EMPTY(&a.net->left));
	cr_assert_eq(kvp_fake_cm_look().n_ids, 2 + 2);
	kvp_fake_event(0, IBV_EVENT_PORT_ACTIVE, NULL);
	for (unsigned ms = 0; ms < 4000 && kvp_fake_cm_look().n_ids > 2; ms++)
		vp_idle(&a, &b, 1);
	cr_assert_eq(kvp_fake_cm_look().n_ids, 2);
	close_pair(&a, &b);
}

/* However long it is down: what is past the limit goes at once. */
Test(net_cm, only_so_many_ids_are_kept)
{
	struct kvp_vb_rail *rail;
	struct rdma_cm_id *id;
	struct vp_node a, b;
	uint32_t before;

	open_pair(&a, &b);
	rail = &a.net->rails[0];
	kvp_fake_event(0, IBV_EVENT_PORT_ERR, NULL);
	for (unsigned ms = 0; ms < 4000 && !rail->port_down; ms++)
		vp_idle(&a, NULL, 1);
	cr_assert(rail->port_down);
	before = kvp_fake_cm_look().n_ids - rail->n_parked;
	for (unsigned i = 0; i < KVP_VB_CONNS + 3; i++) {
		cr_assert_eq(rdma_create_id(rail->cm, &id, NULL, RDMA_PS_TCP), 0);
		kvp_vb_cm_drop(rail, id);
	}
	cr_assert_eq(rail->n_parked, KVP_VB_CONNS);
	while (a.net->n_calls > 0)
		(void)kvp_net_verbs.progress(a.net);
	cr_assert_leq(kvp_fake_cm_look().n_ids, before + KVP_VB_CONNS);
	kvp_fake_event(0, IBV_EVENT_PORT_ACTIVE, NULL);
	for (unsigned ms = 0; ms < 4000 && rail->n_parked + a.net->n_calls > 0; ms++)
		vp_idle(&a, NULL, 1);
	cr_assert_eq(rail->n_parked, 0);
	close_pair(&a, &b);
}

/* Who is asked and finds no way says so in words. */
Test(net_cm, a_peer_that_finds_no_way_back)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	while (a.net->rails[0].n_by_state[KVP_VB_CONNECTING] == 0 || kvp_fake_cm.n_events < 3)
		(void)kvp_net_verbs.progress(a.net);
	kvp_fake.refuse_modify = true;
	cr_assert(vp_turn(&b, NULL, &b.net->rejects, 1, 10000));
	kvp_fake.refuse_modify = false;
	cr_assert_eq(b.net->rejects, 1);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 10000));
	cr_assert_eq(a.last_status, -EINVAL, "%s", strerror(-a.last_status));
	cr_assert_eq(b.net->n_ins, 0);
	close_pair(&a, &b);
}

/* Any event, of a connection in any state, at either end: nothing but the connection can be lost by
 * it, and what was sent arrives or is told as lost. */
static void hear(enum rdma_cm_event_type type, bool in, bool failed, const uint32_t *words)
{
	struct vp_node a, b;
	struct kvp_vb_conn *conn;

	open_pair(&a, &b);
	put(&a, &b, 0);
	conn = conn_of(in ? &b : &a, in);
	if (failed)
		kvp_vb_conn_fail(conn, -ECONNRESET);
	kvp_fake_cm_say(conn->cm, type, words, words ? 16 : 0);
	vp_idle(&a, &b, 20);
	cr_assert_eq(a.told, 1);
	cr_assert_eq(b.data, 1);
	close_pair(&a, &b);
}

Test(net_cm, events_in_any_state)
{
	static const uint32_t good[] = ANSWER(64, 0), reset[] = ANSWER(0, ECONNRESET),
			      odd[] = { 1, 2, 3, 4 };
	const uint32_t *const words[] = { NULL, good, reset, odd };

	for (int type = RDMA_CM_EVENT_ADDR_RESOLVED; type <= RDMA_CM_EVENT_TIMEWAIT_EXIT; type++) {
		bool speaks =
			type == RDMA_CM_EVENT_CONNECT_RESPONSE || type == RDMA_CM_EVENT_REJECTED;

		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			continue; /* always of an id that is new */
		for (unsigned i = 0; i < (speaks ? 4 * KVP_ARRAY_SIZE(words) : 4); i++)
			hear((enum rdma_cm_event_type)type, i & 1, i & 2, words[i / 4]);
	}
}
