/* SPDX-License-Identifier: Apache-2.0 */

/* Several rails, and the loss of some, on devices made of nothing. */

#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "daemon/nic.h"
#include "proto/util.h"
#include "tests/fake_verbs.h"
#include "tests/support_clock.h"
#include "tests/support_verbs.h"

#define SLOT 65536u
#define HALF (VP_SLOTS / 2)

static const char *const names[] = { "", "fake0", "fake0,fake1", "fake0,fake1,fake2",
				     "fake0,fake1,fake2,fake3" };

struct pair {
	struct vp_node a, b;
	uint64_t seq, puts;
};

static struct kvp_net_verbs_config config_of(unsigned rails)
{
	struct kvp_net_verbs_config config;

	kvp_net_verbs_defaults(&config);
	config.devices = names[rails];
	config.depth = 32;
	return config;
}

static void open_nodes(struct pair *pair, const struct kvp_net_verbs_config *a,
		       const struct kvp_net_verbs_config *b)
{
	char err[256] = "";

	kvp_fake_reset();
	kvp_fake.n_devices = KVP_FAKE_DEVICES;
	pair->seq = pair->puts = 0;
	cr_assert_eq(vp_open(&pair->a, a, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_open(&pair->b, b, SLOT, err, sizeof(err)), 0, "%s", err);
}

static void open_pair(struct pair *pair, unsigned rails_a, unsigned rails_b)
{
	const struct kvp_net_verbs_config a = config_of(rails_a), b = config_of(rails_b);

	open_nodes(pair, &a, &b);
	cr_assert_eq(vp_connect(&pair->a, &pair->b), 0);
	cr_assert_eq(vp_connect(&pair->b, &pair->a), 0);
}

static void close_pair(struct pair *pair)
{
	cr_assert_eq(pair->a.bad, 0);
	cr_assert_eq(pair->b.bad, 0);
	vp_close(&pair->a);
	vp_close(&pair->b);
	cr_assert_eq(kvp_fake.n_qps, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
	cr_assert_eq(kvp_fake.n_ahs, 0);
	cr_assert_eq(kvp_fake.n_contexts, 0);
}

/* Payloads, whole and in parts, each followed by a message. A slot is used again only when the
 * transport and the receiver are done with it. */
static void pump(struct pair *pair, unsigned n)
{
	struct vp_node *a = &pair->a, *b = &pair->b;

	for (unsigned i = 0; i < n; i++) {
		uint32_t slot = (uint32_t)(pair->puts % VP_SLOTS);
		size_t bytes = 1 + (size_t)pair->puts * 211 % SLOT;
		uint32_t offset = pair->puts % 3 == 2 ? (uint32_t)(SLOT - bytes) / 2 : 0;
		uint64_t done = pair->puts > HALF ? pair->puts - HALF : 0;
		unsigned tries = 0;

		cr_assert(vp_turn(a, b, &a->told, done, 5000) &&
			  vp_turn(a, b, &b->data, done, 5000));
		while (vp_put(a, b, pair->seq, slot, offset, bytes, offset == 0) == -EAGAIN) {
			cr_assert_lt(++tries, 8000);
			vp_idle(a, b, 1);
		}
		pair->puts++;
		pair->seq++;
		while (vp_send(a, pair->seq) == -EAGAIN) {
			cr_assert_lt(++tries, 8000);
			vp_idle(a, b, 1);
		}
		pair->seq++;
	}
}

static void expect_all(struct pair *pair)
{
	struct vp_node *a = &pair->a, *b = &pair->b;

	cr_assert(vp_turn(a, b, &b->messages, pair->seq, 8000), "%lu of %lu", b->messages,
		  pair->seq);
	cr_assert(vp_turn(a, b, &a->sent_ok, pair->puts, 8000), "%lu of %lu", a->sent_ok,
		  pair->puts);
	cr_assert_eq(b->messages, pair->seq, "none twice");
	cr_assert_eq(b->data, pair->puts);
	cr_assert_eq(a->sent_bad, 0);
	cr_assert_eq(a->failed + b->failed, 0);
	cr_assert_eq(a->bad + b->bad, 0);
}

static unsigned conns_of(const struct vp_node *node)
{
	unsigned n = 0;

	for (unsigned i = 0; i < node->ep->n_paths; i++) {
		const struct kvp_vb_conn *conn = node->ep->paths[i].conn;

		n += conn && conn->state == KVP_VB_OPEN;
	}
	return n;
}

/* Until the endpoint of `a` has so many connections. */
static void wait_conns(struct pair *pair, unsigned n)
{
	for (unsigned i = 0; i < 10000 && conns_of(&pair->a) != n; i++)
		vp_idle(&pair->a, &pair->b, 1);
	cr_assert_eq(conns_of(&pair->a), n);
}

static uint64_t resent(const struct vp_node *node)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < node->net->n_rails; i++)
		n += node->net->rails[i].resent;
	return n;
}

Test(net_rails, any_number_to_any_number)
{
	static const unsigned counts[] = { 1, 2, 4 };

	for (unsigned i = 0; i < 3; i++) {
		for (unsigned k = 0; k < 3; k++) {
			struct pair pair;

			open_pair(&pair, counts[i], counts[k]);
			pump(&pair, 20);
			wait_conns(&pair, KVP_MAX(counts[i], counts[k]));
			pump(&pair, 100);
			expect_all(&pair);
			cr_assert_eq(conns_of(&pair.a), KVP_MAX(counts[i], counts[k]));
			cr_assert_eq(conns_of(&pair.b), 1, "it has no payloads");
			for (unsigned r = 0; r < counts[i]; r++)
				cr_assert_gt(pair.a.net->rails[r].bytes, 100000, "rail %u", r);
			close_pair(&pair);
		}
	}
}

Test(net_rails, all_are_described)
{
	struct pair pair;

	open_pair(&pair, 2, 1);
	cr_assert_str_eq(kvp_net_verbs.describe(pair.a.net),
			 "verbs fake0:1 gid 2 10.0.0.1 mtu 4096, fake1:1 gid 2 10.0.1.1 mtu 4096");
	close_pair(&pair);
}

/* What comes over a slow rail is waited for; what came over the other in the meantime is not
 * delivered before it. */
Test(net_rails, order_holds_across_rails)
{
	struct pair pair;
	uint64_t seq;

	open_pair(&pair, 2, 2);
	pump(&pair, 4);
	wait_conns(&pair, 2);
	expect_all(&pair);
	cr_assert_eq(conns_of(&pair.a), 2);

	kvp_fake.hold = true;
	seq = pair.seq;
	for (uint64_t i = 0; i < 8; i++)
		cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq++, (uint32_t)i, 0, 100, true), 0);
	pair.puts += 8;
	(void)kvp_net_verbs.progress(pair.a.net);
	while (kvp_fake_step(pair.a.ep->paths[1].conn->ibv))
		;
	(void)kvp_net_verbs.progress(pair.b.net);
	cr_assert_leq(pair.b.messages, seq + 1);
	while (kvp_fake_step(pair.a.ep->paths[0].conn->ibv))
		;
	kvp_fake.hold = false;
	expect_all(&pair);
	close_pair(&pair);
}

/* The n-th request fails, having arrived or not; the flush behind it takes others with it. Nothing
 * is lost, nothing comes twice, nothing that arrived is written again. */
static void failure_at(uint64_t n, bool late, unsigned rails, enum ibv_wc_status status)
{
	struct pair pair;

	open_pair(&pair, rails, rails);
	pump(&pair, 4);
	wait_conns(&pair, rails);
	expect_all(&pair);
	kvp_fake.fail_at = kvp_fake.n_posted + n;
	kvp_fake.fail_status = status;
	kvp_fake.fail_late = late;
	pump(&pair, 24);
	expect_all(&pair);
	for (unsigned i = 0; i < 4000 && pair.a.net->n_trouble > 0; i++)
		vp_idle(&pair.a, &pair.b, 1);
	cr_assert_eq(pair.a.net->n_trouble, 0);
	close_pair(&pair);
}

Test(net_rails, failure_at_every_request)
{
	for (uint64_t n = 1; n <= 60; n++) {
		failure_at(n, false, 2, IBV_WC_RETRY_EXC_ERR);
		failure_at(n, true, 2, IBV_WC_RETRY_EXC_ERR);
	}
}

Test(net_rails, failure_with_four_rails)
{
	for (uint64_t n = 1; n <= 60; n += 7)
		failure_at(n, n % 2, 4, IBV_WC_RETRY_EXC_ERR);
}

/* Soft RoCE says so of good requests, too. */
Test(net_rails, a_request_that_is_called_invalid_goes_over_another)
{
	for (uint64_t n = 1; n <= 12; n++)
		failure_at(n, n % 2, 2, IBV_WC_REM_INV_REQ_ERR);
}

/* Held requests of a lost connection never ran: all of them go again, in their order. */
Test(net_rails, what_the_card_still_had_goes_again)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 4);
	wait_conns(&pair, 2);
	expect_all(&pair);
	kvp_fake.hold = true;
	for (uint64_t i = 0; i < 8; i++)
		cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq++, (uint32_t)i, 0, 100, true), 0);
	pair.puts += 8;
	(void)kvp_net_verbs.progress(pair.a.net);
	kvp_fake.hold = false;
	kvp_fake_event(0, IBV_EVENT_PORT_ERR, NULL);
	while (kvp_fake_step(pair.a.ep->paths[1].conn->ibv))
		;
	expect_all(&pair);
	cr_assert_eq(resent(&pair.a), 4);
	pump(&pair, 24);
	expect_all(&pair);
	close_pair(&pair);
}

/* One end's rail goes silent, without an event. */
Test(net_rails, a_cut_rail_is_left_and_taken_again)
{
	struct pair pair;
	uint64_t bytes;

	open_pair(&pair, 2, 2);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	kvp_fake.cut[1] = true;
	pump(&pair, 60);
	expect_all(&pair);
	cr_assert_eq(conns_of(&pair.a), 1);
	bytes = pair.a.net->rails[1].bytes;
	kvp_fake.cut[1] = false;
	wait_conns(&pair, 2);
	pump(&pair, 40);
	expect_all(&pair);
	cr_assert_gt(pair.a.net->rails[1].bytes, bytes);
	close_pair(&pair);
}

Test(net_rails, a_port_goes_down_and_comes_back)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	kvp_fake_event(0, IBV_EVENT_PORT_ERR, NULL);
	pump(&pair, 40);
	expect_all(&pair);
	wait_conns(&pair, 1);
	kvp_fake_event(0, IBV_EVENT_PORT_ACTIVE, NULL);
	wait_conns(&pair, 2);
	pump(&pair, 40);
	expect_all(&pair);
	close_pair(&pair);
}

/* Two devices at each end, of which one is down when its net is opened. */
static void open_with_down(struct pair *pair, unsigned down)
{
	struct kvp_net_verbs_config a = config_of(2), b = config_of(2);
	char err[256] = "";

	kvp_fake_reset();
	kvp_fake.n_devices = KVP_FAKE_DEVICES;
	kvp_fake.down[down] = kvp_fake.no_gid[down] = true;
	pair->seq = pair->puts = 0;
	a.keepalive_ns = b.keepalive_ns = 20000000;
	b.devices = "fake2,fake3";
	cr_assert_eq(vp_open(&pair->a, &a, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_open(&pair->b, &b, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_connect(&pair->a, &pair->b), 0);
	cr_assert_eq(vp_connect(&pair->b, &pair->a), 0);
}

/* Either end's, and the address comes later than the port. The peer learns it, too. */
Test(net_rails, a_rail_that_is_down_at_the_start_comes_up)
{
	for (unsigned down = 0; down < KVP_FAKE_DEVICES; down++) {
		const struct vp_node *node;
		struct kvp_net_rail rails[KVP_NET_RAILS];
		struct pair pair;

		open_with_down(&pair, down);
		node = down < 2 ? &pair.a : &pair.b;
		cr_assert_eq(kvp_net_verbs.rails(node->net, rails), 2);
		cr_assert_eq(rails[down % 2].state, KVP_NET_RAIL_DOWN);
		cr_assert_eq(rails[1 - down % 2].state, KVP_NET_RAIL_UP);
		cr_assert_not_null(strstr(kvp_net_verbs.describe(node->net), ":1 down"));
		pump(&pair, 20);
		kvp_fake.down[down] = false;
		kvp_fake_event(down, IBV_EVENT_PORT_ACTIVE, NULL);
		vp_idle(&pair.a, &pair.b, 50);
		pump(&pair, 20);
		expect_all(&pair);
		cr_assert_eq(conns_of(&pair.a), 1, "without an address it is of no use");

		kvp_fake.no_gid[down] = false; /* without an event: it is looked for */
		wait_conns(&pair, 2);
		pump(&pair, 100);
		expect_all(&pair);
		cr_assert_gt(pair.a.net->rails[0].bytes, 100000);
		cr_assert_gt(pair.a.net->rails[1].bytes, 100000);
		cr_assert_null(strstr(kvp_net_verbs.describe(node->net), "down"));
		close_pair(&pair);
	}
}

/* An idle net sleeps, but looks at the port from time to time. */
Test(net_rails, a_sleeping_net_notices_that_its_rail_is_up)
{
	struct pair pair;
	struct pollfd pfd;

	open_with_down(&pair, 1);
	kvp_net_verbs.ep_close(pair.a.net, pair.a.ep);
	kvp_net_verbs.ep_close(pair.b.net, pair.b.ep);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.closed, 1, 2000));
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.b.closed, 1, 2000));
	kvp_fake.down[1] = kvp_fake.no_gid[1] = false;
	pfd = (struct pollfd){ .fd = kvp_net_verbs.fd(pair.a.net), .events = POLLIN };
	for (unsigned i = 0; i < 100 && pair.a.net->rails[1].port_down; i++) {
		while (kvp_net_verbs.progress(pair.a.net) > 0 || kvp_net_verbs.arm(pair.a.net) < 0)
			;
		if (pair.a.net->rails[1].port_down)
			cr_assert_eq(poll(&pfd, 1, support_slow_ms(5000)), 1);
	}
	cr_assert_not(pair.a.net->rails[1].port_down);
	close_pair(&pair);
}

Test(net_rails, a_dead_device_is_never_used_again)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	kvp_fake_event(1, IBV_EVENT_DEVICE_FATAL, NULL);
	pump(&pair, 40);
	wait_conns(&pair, 1);
	vp_idle(&pair.a, &pair.b, 60);
	pump(&pair, 40);
	expect_all(&pair);
	cr_assert_eq(conns_of(&pair.a), 1);
	close_pair(&pair);
}

/* The direction without payloads has one connection only; its loss is made up for by another. */
Test(net_rails, an_unused_rail_is_made_when_needed)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 4);
	expect_all(&pair);
	for (unsigned dev = 0; dev < 2; dev++) {
		uint64_t want = pair.a.messages + 1;

		kvp_fake_event(dev, IBV_EVENT_PORT_ERR, NULL);
		while (!pair.b.net->rails[dev].port_down)
			vp_idle(&pair.a, &pair.b, 1);
		while (vp_send(&pair.b, want - 1) == -EAGAIN)
			vp_idle(&pair.a, &pair.b, 1);
		cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.messages, want, 2000));
		kvp_fake_event(dev, IBV_EVENT_PORT_ACTIVE, NULL);
		while (pair.b.net->rails[dev].port_down)
			vp_idle(&pair.a, &pair.b, 1);
	}
	cr_assert_eq(pair.a.failed + pair.b.failed, 0);
	close_pair(&pair);
}

Test(net_rails, without_any_rail_it_fails_in_words)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	expect_all(&pair);
	kvp_fake.cut[0] = kvp_fake.cut[1] = true;
	for (uint64_t i = 0; i < 4; i++)
		cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq++, (uint32_t)i, 0, 100, true), 0);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.failed, 1, 8000));
	cr_assert_eq(pair.a.last_status, -ETIMEDOUT);
	cr_assert_not_null(
		strstr(kvp_net_verbs.ep_reason(pair.a.ep), "transport retry counter exceeded"),
		"%s", kvp_net_verbs.ep_reason(pair.a.ep));
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.told, pair.puts + 4, 2000));
	cr_assert_eq(pair.a.sent_bad, 4);
	kvp_net_verbs.ep_close(pair.a.net, pair.a.ep);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.closed, 1, 4000));
	close_pair(&pair);
}

/* Before an event says that the port is down. */
Test(net_rails, a_rail_without_a_way_is_passed_over)
{
	for (unsigned dev = 0; dev < 2; dev++) {
		const struct kvp_net_verbs_config config = config_of(2);
		struct pair pair;

		open_nodes(&pair, &config, &config);
		kvp_fake.no_way[dev] = true;
		cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
		cr_assert_eq(vp_connect(&pair.b, &pair.a), 0);
		pump(&pair, 20);
		expect_all(&pair);
		kvp_fake.no_way[1 - dev] = true;
		kvp_net_verbs.ep_close(pair.a.net, pair.a.ep);
		cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.closed, 1, 2000));
		pair.a.failed = 0;
		cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
		cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.failed, 1, 2000));
		cr_assert_eq(pair.a.last_status, -ENETUNREACH);
		close_pair(&pair);
	}
}

/* The fault is the request's: the other rail is not tried with it. */
Test(net_rails, a_bad_key_is_not_sent_again)
{
	struct pair pair;

	open_pair(&pair, 2, 2);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	expect_all(&pair);
	for (unsigned i = 0; i < KVP_VB_RAILS; i++)
		((struct kvp_vb_key *)&pair.b.keys[1])->rkey[i] ^= 0x5500;
	cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq, 1, 0, 64, true), 0);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.failed, 1, 2000));
	cr_assert_eq(pair.a.last_status, -EACCES);
	cr_assert_eq(resent(&pair.a), 0);
	close_pair(&pair);
}

/* Resent once: an item that fails on another rail, too, ends the endpoint. */
Test(net_rails, what_fails_twice_is_given_up)
{
	struct pair pair;

	open_pair(&pair, 4, 4);
	pump(&pair, 20);
	wait_conns(&pair, 4);
	expect_all(&pair);
	kvp_fake.fail_writes = true;
	kvp_fake.fail_status = IBV_WC_REM_OP_ERR;
	cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq, 1, 0, 64, true), 0);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.failed, 1, 2000));
	cr_assert_eq(pair.a.last_status, -EREMOTEIO);
	cr_assert_eq(resent(&pair.a), 1);
	close_pair(&pair);
}

Test(net_rails, idle_connections_end_and_come_back)
{
	struct kvp_net_verbs_config config = config_of(2);
	struct pair pair;

	config.idle_ns = 50000000;
	open_nodes(&pair, &config, &config);
	cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
	for (unsigned round = 0; round < 3; round++) {
		pump(&pair, 20);
		expect_all(&pair);
		for (unsigned i = 0; i < 4000 && kvp_fake.n_qps > 4; i++)
			vp_idle(&pair.a, &pair.b, 1);
		cr_assert_eq(kvp_fake.n_qps, 4, "only those for datagrams");
	}
	close_pair(&pair);
}

Test(net_rails, only_equal_numbers_are_joined)
{
	struct kvp_net_verbs_config a = config_of(2), b = config_of(2);
	struct pair pair;

	a.same_rail = b.same_rail = true;
	a.rail_of = "fake0=3,fake1=7";
	b.rail_of = "fake0=7, fake1=3";
	open_nodes(&pair, &a, &b);
	cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
	cr_assert_eq(pair.a.ep->n_paths, 2);
	for (unsigned i = 0; i < 2; i++) {
		const struct kvp_vb_path *path = &pair.a.ep->paths[i];

		cr_assert_eq(path->rail->nic.number, pair.a.ep->peer.ends[path->end].number);
	}
	/* Rails are in the order of their numbers. */
	cr_assert_str_eq(pair.b.net->rails[0].nic.device, "fake1");
	pump(&pair, 30);
	expect_all(&pair);
	close_pair(&pair);

	b.rail_of = "fake0=1,fake1=2";
	open_nodes(&pair, &a, &b);
	cr_assert_eq(vp_connect(&pair.a, &pair.b), -EHOSTUNREACH);
	close_pair(&pair);
}

/* ---- links that come and go */

/* Each end has devices of its own: 0 and 1, 2 and 3. */
static void open_apart(struct pair *pair, uint32_t depth)
{
	struct kvp_net_verbs_config a = config_of(2), b = config_of(2);

	b.devices = "fake2,fake3";
	a.depth = b.depth = depth;
	open_nodes(pair, &a, &b);
	cr_assert_eq(vp_connect(&pair->a, &pair->b), 0);
	cr_assert_eq(vp_connect(&pair->b, &pair->a), 0);
	pump(pair, 20);
	wait_conns(pair, 2);
	pump(pair, 20);
	expect_all(pair);
}

/* The connection of a node over its rail that a peer has opened, or that it has itself. */
static struct kvp_vb_conn *conn_of(const struct vp_node *node, unsigned rail, bool in)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &node->net->all, link) {
		if (conn->rail->idx == rail && !conn->in != in)
			return conn;
	}
	return NULL;
}

/* Makes it seem long ago that connections failed, or began to connect. */
static void age(const struct vp_node *node, enum kvp_vb_state state, uint64_t ns)
{
	struct kvp_vb_conn *conn;

	TAILQ_FOREACH (conn, &node->net->all, link) {
		if (conn->state == state)
			conn->since_ns -= ns;
	}
}

static void break_conn(struct pair *pair, const struct vp_node *node, struct kvp_vb_conn *conn)
{
	uint64_t lost = conn->rail->lost;
	struct kvp_vb_rail *rail = conn->rail;

	kvp_fake_event((node == &pair->a ? 0 : 2) + rail->idx, IBV_EVENT_QP_FATAL, conn->ibv);
	while (rail->lost == lost)
		(void)kvp_net_verbs.progress(node->net);
}

/* The other direction, without payloads. */
static void say(struct pair *pair, unsigned n)
{
	uint64_t want = pair->a.messages + n;

	for (uint64_t i = pair->a.messages; i < want; i++) {
		int r;

		while ((r = vp_send(&pair->b, i)) == -EAGAIN)
			vp_idle(&pair->a, &pair->b, 1);
		cr_assert_eq(r, 0, "%s", kvp_net_verbs.ep_reason(pair->b.ep));
	}
	cr_assert(vp_turn(&pair->a, &pair->b, &pair->a.messages, want, 8000));
}

/* More comes back from the card than is taken in a turn, and the clock says that it took too long.
 */
Test(net_rails, who_slept_looks_before_a_connection_is_given_up)
{
	struct pair pair;

	for (unsigned rail = 0; rail < 2; rail++) {
		open_apart(&pair, 256);
		break_conn(&pair, &pair.b, conn_of(&pair.b, rail, true));
		age(&pair.b, KVP_VB_FAILED, 10 * KVP_VB_DRAIN_NS);
		pump(&pair, 60);
		expect_all(&pair);
		close_pair(&pair);
	}
}

/* The port goes, and is back before the drain is over, which never ends at one end or both. */
static void silent_cards(bool at_a, bool at_b)
{
	struct pair pair;

	open_apart(&pair, 32);
	kvp_fake.silent[1] = at_a;
	kvp_fake.silent[3] = at_b;
	kvp_fake_event(1, IBV_EVENT_PORT_ERR, NULL);
	kvp_fake_event(3, IBV_EVENT_PORT_ERR, NULL);
	pump(&pair, 4);
	vp_idle(&pair.a, &pair.b, 25);
	kvp_fake_event(1, IBV_EVENT_PORT_ACTIVE, NULL);
	kvp_fake_event(3, IBV_EVENT_PORT_ACTIVE, NULL);
	vp_idle(&pair.a, &pair.b, 25);
	age(&pair.a, KVP_VB_FAILED, KVP_VB_DRAIN_NS);
	age(&pair.b, KVP_VB_FAILED, KVP_VB_DRAIN_NS);
	pump(&pair, 40);
	expect_all(&pair);
	wait_conns(&pair, 2);
	say(&pair, 4);
	pump(&pair, 20);
	expect_all(&pair);
	close_pair(&pair);
}

Test(net_rails, a_card_that_does_not_flush_costs_nothing_but_time)
{
	silent_cards(true, false);
	silent_cards(false, true);
	silent_cards(true, true);
}

/* What the sender's card calls arrived, and the receiver's never told, is lost: in words. */
Test(net_rails, what_was_acknowledged_and_is_lost_ends_the_endpoint)
{
	struct pair pair;

	open_apart(&pair, 32);
	kvp_fake.deaf[3] = true;
	for (uint32_t i = 0; i < 4; i++)
		cr_assert_eq(vp_put(&pair.a, &pair.b, pair.seq + i, i, 0, 100, true), 0);
	cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.sent_ok, pair.puts + 4, 2000));
	kvp_fake_event(3, IBV_EVENT_PORT_ERR, NULL);
	for (unsigned i = 0; i < 2000 && pair.a.failed == 0; i++) {
		vp_idle(&pair.a, &pair.b, 1);
		age(&pair.b, KVP_VB_FAILED, KVP_VB_DRAIN_NS);
		if (conn_of(&pair.a, 1, false)) /* else its keepalive finds out, later */
			conn_of(&pair.a, 1, false)->tried_ns = 0;
	}
	cr_assert_eq(pair.a.failed, 1);
	cr_assert_not_null(strstr(kvp_net_verbs.ep_reason(pair.a.ep), "acknowledged"), "%s",
			   kvp_net_verbs.ep_reason(pair.a.ep));
	cr_assert_lt(pair.b.messages, pair.seq + 4);
	close_pair(&pair);
}

/* The only connection, and the other rail has failed so short ago that it is not yet tried again.
 */
Test(net_rails, the_last_connection_fails_while_the_other_rail_waits)
{
	for (unsigned rail = 0; rail < 2; rail++) {
		struct kvp_vb_path *paths;
		struct pair pair;

		open_apart(&pair, 32);
		paths = pair.b.ep->paths;
		while (!paths[rail].conn) { /* its first is on the other */
			say(&pair, 1);
			break_conn(&pair, &pair.b, conn_of(&pair.b, 1 - rail, false));
			paths[rail].retry_ns = 0;
			paths[1 - rail].retry_ns = UINT64_MAX;
			say(&pair, 1);
			vp_idle(&pair.a, &pair.b, 5);
		}
		paths[1 - rail].retry_ns = UINT64_MAX;
		cr_assert_eq(conns_of(&pair.b), 1);
		break_conn(&pair, &pair.b, paths[rail].conn);
		say(&pair, 10);
		cr_assert_eq(pair.b.failed, 0);
		close_pair(&pair);
	}
}

/* The card forgets its requests: it neither does them nor says that it could not. */
Test(net_rails, a_card_that_never_tells_is_not_waited_for)
{
	struct kvp_net_verbs_config config = config_of(2);
	struct pair pair;

	config.timeout = 8; /* 1 ms */
	config.keepalive_ns = 20000000;
	open_nodes(&pair, &config, &config);
	cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
	cr_assert_eq(vp_connect(&pair.b, &pair.a), 0);
	pump(&pair, 20);
	wait_conns(&pair, 2);
	kvp_fake.stuck[1] = true;
	pump(&pair, 40);
	expect_all(&pair);
	cr_assert_gt(resent(&pair.a), 0);
	kvp_fake.stuck[1] = false;
	wait_conns(&pair, 2);
	pump(&pair, 40);
	expect_all(&pair);
	close_pair(&pair);
}

/* One rail leads nowhere, and just when that is noticed the other one fails. */
Test(net_rails, a_connection_fails_while_the_other_rail_cannot_connect)
{
	struct pair pair;

	open_apart(&pair, 32);
	kvp_fake.cut[1] = true;
	break_conn(&pair, &pair.a, conn_of(&pair.a, 1, false));
	for (unsigned i = 0; i < 4000; i++) {
		const struct kvp_vb_conn *conn = pair.a.ep->paths[1].conn;

		if (conn && conn->state == KVP_VB_CONNECTING)
			break;
		vp_idle(&pair.a, &pair.b, 1);
	}
	break_conn(&pair, &pair.a, conn_of(&pair.a, 0, false));
	age(&pair.a, KVP_VB_CONNECTING, 2 * KVP_VB_CONNECT_NS);
	pump(&pair, 20);
	expect_all(&pair);
	kvp_fake.cut[1] = false;
	wait_conns(&pair, 2);
	close_pair(&pair);
}

/* Receiver first, who tells nobody; sender first, whose word gets lost. */
Test(net_rails, ends_notice_at_different_times)
{
	for (unsigned rail = 0; rail < 2; rail++) {
		struct pair pair;

		open_apart(&pair, 32);
		break_conn(&pair, &pair.b, conn_of(&pair.b, rail, true));
		pump(&pair, 40);
		expect_all(&pair);
		wait_conns(&pair, 2);
		kvp_fake.drop_datagrams = true;
		break_conn(&pair, &pair.a, conn_of(&pair.a, rail, false));
		pump(&pair, 40);
		expect_all(&pair);
		kvp_fake.drop_datagrams = false;
		wait_conns(&pair, 2);
		pump(&pair, 40);
		expect_all(&pair);
		close_pair(&pair);
	}
}

/* As while the link has just come up, and nobody there has answered who has which address. */
Test(net_rails, a_peer_that_finds_no_way_back_yet)
{
	const struct kvp_vb_path *path;
	struct pair pair;

	open_apart(&pair, 32);
	path = &pair.a.ep->paths[1];
	break_conn(&pair, &pair.a, conn_of(&pair.a, 1, false));
	while (!path->conn || path->conn->state != KVP_VB_CONNECTING || path->conn->call.out)
		(void)kvp_net_verbs.progress(pair.a.net);
	kvp_fake.refuse_modify = true;
	(void)vp_turn(&pair.b, NULL, &pair.b.net->rejects, 1, 2000);
	kvp_fake.refuse_modify = false;
	cr_assert_gt(pair.b.net->rejects, 0);
	pump(&pair, 20);
	expect_all(&pair);
	wait_conns(&pair, 2);
	pump(&pair, 20);
	expect_all(&pair);
	close_pair(&pair);
}

/* What was never connected is nobody's endpoint. */
Test(net_rails, who_finds_no_way_back_keeps_nothing)
{
	struct kvp_net_verbs_config a = config_of(2), b = config_of(2);
	struct pair pair;

	b.devices = "fake2,fake3";
	open_nodes(&pair, &a, &b);
	kvp_fake.no_way[2] = kvp_fake.no_way[3] = true;
	for (unsigned i = 0; i < 3; i++) {
		cr_assert_eq(vp_connect(&pair.a, &pair.b), 0);
		(void)vp_turn(&pair.b, &pair.a, &pair.b.net->rejects, pair.b.net->rejects + 1,
			      4000);
		kvp_net_verbs.ep_close(pair.a.net, pair.a.ep);
		cr_assert(vp_turn(&pair.a, &pair.b, &pair.a.closed, i + 1, 4000));
		cr_assert_eq(pair.b.net->n_ins, 0);
	}
	close_pair(&pair);
}

/* Now the one, then the other; with a word of the device, and without. */
static void flap(bool told)
{
	struct pair pair;

	open_apart(&pair, 32);
	for (unsigned i = 0; i < 40; i++) {
		unsigned dev = i * 7 / 2 % KVP_FAKE_DEVICES;

		if (told)
			kvp_fake_event(dev, IBV_EVENT_PORT_ERR, NULL);
		kvp_fake.cut[dev] = true;
		pump(&pair, 6);
		say(&pair, 1);
		kvp_fake.cut[dev] = false;
		if (told)
			kvp_fake_event(dev, IBV_EVENT_PORT_ACTIVE, NULL);
		pump(&pair, i % 3);
	}
	expect_all(&pair);
	wait_conns(&pair, 2);
	pump(&pair, 40);
	expect_all(&pair);
	close_pair(&pair);
}

Test(net_rails, links_flap_faster_than_all_timers)
{
	flap(true);
	flap(false);
}

/* Nobody's other rails wait for a device that does not let go of a queue pair, or for a peer that
 * does not say where it is. The lane turns all the while, or this would not end. */
Test(net_rails, a_device_that_makes_wait_holds_nobody_up)
{
	struct pair pair;

	open_apart(&pair, 32);
	for (unsigned i = 0; i < 2; i++) {
		kvp_fake_stick(1, true);
		break_conn(&pair, &pair.a, conn_of(&pair.a, 1, false));
		pump(&pair, 40);
		expect_all(&pair);
		say(&pair, 3);
		cr_assert_gt(kvp_net_verbs.stats(pair.a.net)->calls_out, 0, "nothing waits");
		vp_idle(&pair.a, &pair.b, 600);
		cr_assert_eq(conns_of(&pair.a), 1);
		kvp_fake_stick(1, false);
		wait_conns(&pair, 2);
		pump(&pair, 20);
		expect_all(&pair);
	}
	cr_assert_eq(kvp_net_verbs.stats(pair.a.net)->calls_out, 0);
	cr_assert_geq(kvp_net_verbs.stats(pair.a.net)->calls_slow, 2);
	close_pair(&pair);
}

static void *unstick(void *unused)
{
	kvp_fake_stick(1, false);
	return unused;
}

/* A net that closes waits for it: the memory is the caller's again. */
Test(net_rails, who_closes_waits_for_the_device)
{
	struct pair pair;
	pthread_t thread;

	open_apart(&pair, 32);
	kvp_fake_stick(1, true);
	break_conn(&pair, &pair.a, conn_of(&pair.a, 1, false));
	vp_idle(&pair.a, &pair.b, 5);
	cr_assert_gt(pair.a.net->n_calls, 0);
	cr_assert_eq(pthread_create(&thread, NULL, unstick, NULL), 0);
	close_pair(&pair);
	cr_assert_eq(pthread_join(thread, NULL), 0);
}

/* The card has not told of a datagram: the queue pair that connects is taken back into use. */
Test(net_rails, a_datagram_that_is_never_told_of)
{
	struct kvp_vb_rail *rail;
	struct pair pair;

	open_apart(&pair, 32);
	rail = &pair.a.net->rails[1];
	kvp_fake.silent[1] = true;
	rail->ud_qp.posted++;
	kvp_qp_fail(&rail->ud_qp, -EIO);
	vp_idle(&pair.a, &pair.b, 25);
	kvp_fake.silent[1] = false;
	cr_assert_eq(rail->ud_qp.state, KVP_QP_FAILED);
	rail->ud_failed_ns -= KVP_VB_DRAIN_NS;
	break_conn(&pair, &pair.a, conn_of(&pair.a, 1, false));
	wait_conns(&pair, 2);
	cr_assert_eq(rail->ud_qp.state, KVP_QP_OPEN);
	pump(&pair, 20);
	expect_all(&pair);
	close_pair(&pair);
}

Test(net_rails, rails_are_chosen)
{
	struct kvp_nic_wish wish = {
		.devices = "",
		.exclude = "",
		.near = "",
		.rail_of = "",
		.gid_index = -1,
	};
	struct kvp_nic nics[KVP_NIC_MAX];
	char err[256];

	kvp_fake_reset();
	kvp_fake.n_devices = 4;
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 1, "near to nothing");
	wish.devices = "fake3,fake1";
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 2);
	cr_assert_str_eq(nics[0].device, "fake3", "as they are named");
	cr_assert_eq(kvp_nic_rails(nics, 1, &wish, err, sizeof(err)), 1);
	kvp_fake.down[3] = true;
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 2, "it may come up");
	cr_assert(nics[0].down && !nics[1].down && nics[1].number == 1);
	cr_assert_eq(kvp_nic_rails(nics, 1, &wish, err, sizeof(err)), 1);
	cr_assert_str_eq(nics[0].device, "fake1", "who is up first");
	cr_assert_eq(kvp_nic_list(nics, &wish, err, sizeof(err)), 1);
	kvp_fake.down[1] = true;
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 0);
	cr_assert(strstr(err, "fake1: port 1 is") && strstr(err, "fake3: port 1 is"), "%s", err);
	kvp_fake.down[1] = kvp_fake.down[3] = false;
	wish.rail_of = "fake3=1,fake1=0";
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 2);
	cr_assert_str_eq(nics[0].device, "fake1", "by number");
	wish.exclude = "fake1";
	cr_assert_eq(kvp_nic_rails(nics, 4, &wish, err, sizeof(err)), 1);
	cr_assert_eq(nics[0].number, 1);
}
