/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

#include "daemon/peer.h"
#include "proto/msg.h"
#include "proto/peer_msg.h"
#include "tests/support_clock.h"

#define MS UINT64_C(1000000)

/* ---- a lane that only keeps what it is told ---------------------------------------------------
 */

struct kvp_lane {
	unsigned adds, ends;
	struct kvp_board *board;
	uint64_t ended;
	uint64_t number; /* of the last endpoint's session */
	const struct kvp_admits *admits;
	bool open_at_end; /* its session could still open something when it was to end */
};

void kvp_lane_order(struct kvp_lane *lane, struct kvp_order *order)
{
	if (order->type == KVP_ORDER_EP_ADD) {
		struct kvp_order_ep *add = (struct kvp_order_ep *)order;

		lane->adds++;
		lane->board = add->board;
		lane->number = add->number;
		free(add->addr);
	} else {
		lane->ends++;
		lane->open_at_end = kvp_admits_has(lane->admits, lane->number);
		lane->ended = ((struct kvp_order_id *)order)->id;
	}
	free(order);
}

void kvp_lane_status_read(const struct kvp_lane *lane, struct kvp_lane_status *out)
{
	memset(out, 0, sizeof(*out));
	out->turns = lane->adds;
}

/* ---- nodes ------------------------------------------------------------------------------------
 */

struct node {
	struct kvp_config config;
	uint8_t incarnation[16];
	struct kvp_lane lane;
	struct kvp_lane *lanes[1];
	struct kvp_peers *peers;
	struct kvp_admits *admits;
	struct kvp_peer *last; /* of the last event */
	unsigned ups, downs, messages;
	Kvp__Status status;
	char why[128];
	uint64_t room; /* of the last message */
};

static uv_loop_t loop;

static void on_up(void *arg, struct kvp_peer *peer)
{
	struct node *node = arg;

	node->ups++;
	node->last = peer;
}

static void on_down(void *arg, struct kvp_peer *peer, Kvp__Status status, const char *why)
{
	struct node *node = arg;

	(void)peer;
	node->downs++;
	node->status = status;
	(void)snprintf(node->why, sizeof(node->why), "%s", why);
}

static void on_message(void *arg, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct node *node = arg;

	node->messages++;
	node->last = peer;
	if (msg->body_case == KVP__PEER_MSG__BODY_GO)
		node->room = msg->go->leg->room;
}

static void node_start(struct node *node, uint8_t id, const char *listen)
{
	const struct kvp_peer_events events = { on_up, on_down, on_message };
	struct kvp_peers_config config;
	char err[256] = "";

	if (!node->config.peer.heartbeat_ns) {
		kvp_config_defaults(&node->config);
		node->config.peer.heartbeat_ns = 20 * MS;
		node->config.peer.lost_after_ns = 200 * MS * support_slow();
		node->config.peer.retry_min_ns = 10 * MS * support_slow();
		node->config.peer.retry_max_ns = 40 * MS * support_slow();
	}
	(void)snprintf(node->config.peer.listen, sizeof(node->config.peer.listen), "%s", listen);
	(void)snprintf(node->config.node.name, sizeof(node->config.node.name), "node%u", id);
	memset(node->incarnation, id, sizeof(node->incarnation));
	node->lanes[0] = &node->lane;
	node->admits = kvp_admits_create(8);
	cr_assert(node->admits);
	node->lane.admits = node->admits;
	config = (struct kvp_peers_config){ &loop, &node->config, node->incarnation, node->lanes,
					    1,     node->admits };
	cr_assert_eq(kvp_peers_create(&node->peers, &config, err, sizeof(err)), 0, "%s", err);
	kvp_peers_set_events(node->peers, &events, node);
}

static void tick_cb(uv_timer_t *timer)
{
	(void)timer;
}

/* Runs the loop until *what >= n, at most 5 s. */
static bool until(const unsigned *what, unsigned n)
{
	uint64_t give_up = support_clock_ns() + 5000 * MS;
	uv_timer_t timer;

	uv_timer_init(&loop, &timer);
	uv_timer_start(&timer, tick_cb, 1, 5);
	while (*what < n && support_clock_ns() < give_up)
		uv_run(&loop, UV_RUN_ONCE);
	uv_close((uv_handle_t *)&timer, NULL);
	uv_run(&loop, UV_RUN_NOWAIT);
	return *what >= n;
}

static void run_for(uint64_t ns)
{
	unsigned never = 0;
	uint64_t end = uv_hrtime() + ns;

	while (uv_hrtime() < end) {
		uv_timer_t timer;

		uv_timer_init(&loop, &timer);
		uv_timer_start(&timer, tick_cb, 1, 1); /* again: the first may be due at once */
		uv_run(&loop, UV_RUN_ONCE);
		uv_close((uv_handle_t *)&timer, NULL);
		uv_run(&loop, UV_RUN_NOWAIT);
	}
	(void)never;
}

static void node_stop(struct node *node)
{
	kvp_peers_stop(node->peers);
	while (!kvp_peers_idle(node->peers))
		uv_run(&loop, UV_RUN_ONCE);
	kvp_peers_destroy(node->peers);
	node->peers = NULL;
	kvp_admits_destroy(node->admits);
	node->admits = NULL;
}

static void setup(void)
{
	uv_loop_init(&loop);
}

static void finish(void)
{
	cr_assert_eq(uv_loop_close(&loop), 0);
}

TestSuite(peer, .init = setup, .fini = finish, .timeout = 30);

static void send_go(struct kvp_peer *peer, uint64_t room, int expected)
{
	Kvp__Leg leg = KVP__LEG__INIT;
	Kvp__Go go = KVP__GO__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;

	leg.room = room;
	leg.generation = 1;
	go.leg = &leg;
	msg.body_case = KVP__PEER_MSG__BODY_GO;
	msg.go = &go;
	cr_assert_eq(kvp_peer_send(peer, &msg), expected);
}

static int send_abort(struct kvp_peer *peer, char *text)
{
	Kvp__Leg leg = KVP__LEG__INIT;
	Kvp__LegAbort abort = KVP__LEG_ABORT__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;

	leg.generation = 1;
	abort.leg = &leg;
	abort.status = KVP__STATUS__STATUS_ABORTED;
	abort.text = text;
	msg.body_case = KVP__PEER_MSG__BODY_ABORT;
	msg.abort = &abort;
	return kvp_peer_send(peer, &msg);
}

static struct kvp_peer *dial(struct node *from, const char *address)
{
	char err[256] = "";
	struct kvp_peer *peer = kvp_peer_get(from->peers, address, err, sizeof(err));

	cr_assert_not_null(peer, "%s", err);
	return peer;
}

/* ---- a peer made by hand: raw frames over a blocking-free socket -------------------------------
 */

struct raw {
	uv_tcp_t tcp;
	uv_connect_t connect;
	uv_write_t write;
	char buf[4096];
	unsigned connected, bytes, eof;
};

static void raw_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
	struct raw *raw = handle->data;

	(void)suggested;
	*buf = uv_buf_init(raw->buf, sizeof(raw->buf));
}

static void raw_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
	struct raw *raw = stream->data;

	(void)buf;
	if (n < 0)
		raw->eof = 1;
	else
		raw->bytes += (unsigned)n;
}

static void raw_connected(uv_connect_t *req, int status)
{
	struct raw *raw = req->data;

	cr_assert_eq(status, 0);
	raw->connected = 1;
	uv_read_start((uv_stream_t *)&raw->tcp, raw_alloc, raw_read);
}

static void raw_open_from(struct raw *raw, const char *from, const char *address)
{
	struct sockaddr_in addr, own;

	memset(raw, 0, sizeof(*raw));
	uv_ip4_addr("127.0.0.1", (int)strtoul(strrchr(address, ':') + 1, NULL, 10), &addr);
	uv_tcp_init(&loop, &raw->tcp);
	raw->tcp.data = raw;
	raw->connect.data = raw;
	uv_ip4_addr(from, 0, &own);
	cr_assert_eq(uv_tcp_bind(&raw->tcp, (struct sockaddr *)&own, 0), 0);
	cr_assert_eq(
		uv_tcp_connect(&raw->connect, &raw->tcp, (struct sockaddr *)&addr, raw_connected),
		0);
	cr_assert(until(&raw->connected, 1));
}

static void raw_open(struct raw *raw, const char *address)
{
	raw_open_from(raw, "127.0.0.1", address);
}

static void raw_send(struct raw *raw, const void *data, size_t n)
{
	uv_buf_t buf = uv_buf_init((char *)data, (unsigned)n);

	cr_assert_eq(uv_try_write((uv_stream_t *)&raw->tcp, &buf, 1), (int)n);
}

static void raw_hello(struct raw *raw, uint32_t version_min, uint32_t version_max, uint8_t id,
		      const char *address)
{
	Kvp__PeerHello hello = KVP__PEER_HELLO__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	uint8_t incarnation[16], frame[512];
	long n;

	memset(incarnation, id, sizeof(incarnation));
	hello.version_min = version_min;
	hello.version_max = version_max;
	hello.incarnation.data = incarnation;
	hello.incarnation.len = sizeof(incarnation);
	hello.node = (char *)"raw";
	hello.address = (char *)address;
	msg.body_case = KVP__PEER_MSG__BODY_HELLO;
	msg.hello = &hello;
	n = kvp_peer_encode(&msg, frame, sizeof(frame));
	cr_assert_gt(n, 0);
	raw_send(raw, frame, (size_t)n);
}

static void raw_close(struct raw *raw)
{
	uv_close((uv_handle_t *)&raw->tcp, NULL);
	uv_run(&loop, UV_RUN_NOWAIT);
}

/* ---- tests ------------------------------------------------------------------------------------
 */

Test(peer, hello_brings_both_up_and_messages_travel)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	cr_assert(kvp_peers_listening(a.peers));
	peer = dial(&a, kvp_peers_address(b.peers));
	send_go(peer, 7, -ENOTCONN);
	cr_assert(until(&a.ups, 1));
	cr_assert(until(&b.ups, 1));
	cr_assert(kvp_peer_is_up(peer));
	cr_assert_neq(kvp_peer_session(peer), 0u);
	send_go(peer, 42, 0);
	cr_assert(until(&b.messages, 1));
	cr_assert_eq(b.room, 42u);
	send_go(b.last, 43, 0);
	cr_assert(until(&a.messages, 1));
	cr_assert_eq(a.room, 43u);
	cr_assert_str_eq(kvp_peer_name(b.last) + 0, kvp_peer_name(b.last));
	cr_assert(strstr(kvp_peer_name(peer), "node2"));
	/* Heartbeats alone keep it up. */
	run_for(500 * MS);
	cr_assert_eq(a.downs, 0u);
	cr_assert_eq(b.downs, 0u);
	kvp_peer_put(peer);
	node_stop(&a);
	cr_assert(until(&b.downs, 1));
	node_stop(&b);
}

Test(peer, own_address_is_the_self_peer)
{
	struct node a = { 0 };
	struct kvp_peer *peer;
	uint64_t ep = 1;

	node_start(&a, 1, "");
	cr_assert_not(kvp_peers_listening(a.peers));
	peer = dial(&a, kvp_peers_address(a.peers));
	cr_assert(kvp_peer_is_self(peer));
	cr_assert(kvp_peer_is_up(peer));
	send_go(peer, 5, 0);
	cr_assert_eq(a.messages, 0u, "never from within the send");
	cr_assert(until(&a.messages, 1));
	cr_assert_neq(a.last, peer, "it arrives on the accepted end");
	cr_assert(kvp_peer_is_self(a.last));
	send_go(a.last, 6, 0);
	cr_assert(until(&a.messages, 2));
	cr_assert_eq(a.last, peer);
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, NULL, 0, &ep), 0);
	cr_assert_eq(ep, 0u);
	kvp_peer_put(peer);
	node_stop(&a);
}

Test(peer, own_incarnation_behind_another_name_is_self_too)
{
	struct node a = { 0 };
	struct kvp_peer *peer;
	char alias[64];

	node_start(&a, 1, "127.0.0.1:0");
	(void)snprintf(alias, sizeof(alias), "localhost:%s",
		       strrchr(kvp_peers_address(a.peers), ':') + 1);
	peer = dial(&a, alias);
	cr_assert_not(kvp_peer_is_up(peer));
	cr_assert(until(&a.ups, 2)); /* both ends */
	cr_assert(kvp_peer_is_self(peer));
	send_go(peer, 9, 0);
	cr_assert(until(&a.messages, 1));
	cr_assert_eq(a.room, 9u);
	kvp_peer_put(peer);
	node_stop(&a);
}

Test(peer, unknown_versions_are_refused)
{
	struct node a = { 0 };
	struct raw raw;

	node_start(&a, 1, "127.0.0.1:0");
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_hello(&raw, KVP_PROTO_VERSION(9u, 0u), KVP_PROTO_VERSION(9u, 3u), 7, "");
	cr_assert(until(&raw.eof, 1));
	cr_assert_gt(raw.bytes, 4u, "the refusal says why");
	cr_assert_eq(a.ups, 0u);
	raw_close(&raw);
	node_stop(&a);
}

Test(peer, a_malformed_frame_ends_one_session_only)
{
	static const uint8_t garbage[] = { 5, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff };
	static const uint8_t oversized[] = { 0xff, 0xff, 0xff, 0x7f };
	static const uint8_t no_hello[] = { 0x01, 0x10, 0, 0 }; /* 4097: not for a stranger */
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;
	struct raw raw;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	peer = dial(&b, kvp_peers_address(a.peers));
	cr_assert(until(&b.ups, 1));
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_send(&raw, garbage, sizeof(garbage));
	cr_assert(until(&raw.eof, 1));
	raw_close(&raw);
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_send(&raw, no_hello, sizeof(no_hello));
	cr_assert(until(&raw.eof, 1));
	raw_close(&raw);
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_hello(&raw, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "");
	cr_assert(until(&a.ups, 2));
	raw_send(&raw, oversized, sizeof(oversized));
	cr_assert(until(&raw.eof, 1));
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_PROTOCOL);
	raw_close(&raw);
	cr_assert(kvp_peer_is_up(peer));
	cr_assert_eq(b.downs, 0u);
	kvp_peer_put(peer);
	node_stop(&b);
	node_stop(&a);
}

Test(peer, a_silent_peer_is_lost)
{
	struct node a = { 0 };
	struct raw raw;

	node_start(&a, 1, "127.0.0.1:0");
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_hello(&raw, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "");
	cr_assert(until(&a.ups, 1));
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_PEER_LOST);
	cr_assert(strstr(a.why, "nothing heard for"), "%s", a.why);
	raw_close(&raw);
	node_stop(&a);
}

Test(peer, a_restarted_peer_is_reached_again)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;
	uint64_t session;
	char address[64];

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	(void)snprintf(address, sizeof(address), "%s", kvp_peers_address(b.peers));
	peer = dial(&a, address);
	cr_assert(until(&a.ups, 1));
	session = kvp_peer_session(peer);
	node_stop(&b);
	cr_assert(until(&a.downs, 3)); /* the session, then dials that fail */
	cr_assert_eq(a.status, KVP__STATUS__STATUS_UNREACHABLE);
	cr_assert_not(kvp_peer_is_up(peer));
	node_start(&b, 3, address);
	cr_assert(until(&a.ups, 2));
	cr_assert_neq(kvp_peer_session(peer), session);
	send_go(peer, 77, 0);
	cr_assert(until(&b.messages, 1));
	kvp_peer_put(peer);
	node_stop(&a);
	node_stop(&b);
}

Test(peer, a_newer_incarnation_ends_the_older_session)
{
	struct node a = { 0 };
	struct raw old, young;

	node_start(&a, 1, "127.0.0.1:0");
	a.config.peer.lost_after_ns = 5000 * MS;
	raw_open(&old, kvp_peers_address(a.peers));
	raw_hello(&old, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "127.0.0.1:9");
	cr_assert(until(&a.ups, 1));
	raw_open(&young, kvp_peers_address(a.peers));
	raw_hello(&young, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 10, "127.0.0.1:9");
	cr_assert(until(&a.ups, 2));
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_PEER_LOST);
	cr_assert(until(&old.eof, 1));
	cr_assert_eq(young.eof, 0u);
	raw_close(&old);
	raw_close(&young);
	node_stop(&a);
}

/* Another host that claims an address ends nobody's session; whoever is dialled there does. */
Test(peer, an_address_is_not_taken_by_claiming_it)
{
	struct node a = { 0 };
	struct raw old, other;

	node_start(&a, 1, "127.0.0.1:0");
	a.config.peer.lost_after_ns = 5000 * MS;
	raw_open(&old, kvp_peers_address(a.peers));
	raw_hello(&old, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "127.0.0.1:9");
	cr_assert(until(&a.ups, 1));
	raw_open_from(&other, "127.0.0.2", kvp_peers_address(a.peers));
	raw_hello(&other, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 10, "127.0.0.1:9");
	cr_assert(until(&a.ups, 2));
	run_for(50 * MS);
	cr_assert_eq(a.downs, 0u);
	cr_assert_eq(old.eof + other.eof, 0u);
	raw_close(&old);
	raw_close(&other);
	node_stop(&a);
}

/* An endpoint between two lanes of one daemon may fail as any other. */
Test(peer, the_self_peer_comes_back)
{
	struct node a = { 0 };
	struct kvp_peer *peer;
	uint64_t session;

	node_start(&a, 1, "");
	peer = dial(&a, kvp_peers_address(a.peers));
	session = kvp_peer_session(peer);
	for (unsigned i = 1; i < 3; i++) {
		uint64_t refused;

		kvp_peer_fail(i % 2 ? peer : a.last, KVP__STATUS__STATUS_TRANSPORT, "a test");
		cr_assert(until(&a.downs, 2 * i));
		cr_assert_not(kvp_peer_is_up(peer));
		cr_assert(until(&a.ups, 2 + 2 * i));
		cr_assert(kvp_peer_is_up(peer));
		cr_assert_neq(kvp_peer_session(peer), session);
		cr_assert_eq(kvp_peers_count(a.peers, &refused), 0u);
		send_go(peer, i, 0);
		cr_assert(until(&a.messages, i));
		cr_assert_neq(a.last, peer);
	}
	kvp_peer_put(peer);
	node_stop(&a);
}

Test(peer, the_allow_list_decides_who_may_connect)
{
	uint64_t give_up = support_clock_ns() + 5000 * MS;
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;
	struct raw raw;

	kvp_config_defaults(&a.config);
	kvp_config_defaults(&b.config);
	(void)snprintf(a.config.peer.allow, sizeof(a.config.peer.allow), "10.0.0.0/8, ::1/128");
	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	raw_open(&raw, kvp_peers_address(a.peers));
	cr_assert(until(&raw.eof, 1));
	raw_close(&raw);
	/* Who calls is told where to look. */
	peer = dial(&b, kvp_peers_address(a.peers));
	while (!strstr(kvp_peer_reason(peer), "before it has greeted: its log says why") &&
	       support_clock_ns() < give_up)
		uv_run(&loop, UV_RUN_ONCE);
	cr_assert(strstr(kvp_peer_reason(peer), "(peer.allow"), "%s", kvp_peer_reason(peer));
	kvp_peer_put(peer);
	node_stop(&b);
	node_stop(&a);
}

Test(peer, sessions_are_limited)
{
	struct node a = { 0 };
	char err[256] = "";
	struct raw raw;
	struct kvp_peer *peer;

	kvp_config_defaults(&a.config);
	a.config.peer.max_sessions = 1;
	node_start(&a, 1, "127.0.0.1:0");
	peer = dial(&a, "127.0.0.1:9");
	cr_assert_null(kvp_peer_get(a.peers, "127.0.0.1:10", err, sizeof(err)));
	cr_assert(strstr(err, "max_sessions 1"), "%s", err);
	raw_open(&raw, kvp_peers_address(a.peers));
	cr_assert(until(&raw.eof, 1));
	raw_close(&raw);
	kvp_peer_put(peer);
	node_stop(&a);
}

/* Whoever has connected and does not greet keeps nobody out. */
Test(peer, the_silent_make_room)
{
	struct node a = { 0 };
	struct raw silent[2], young;
	struct kvp_peer *peer;

	kvp_config_defaults(&a.config);
	a.config.peer.max_sessions = 2;
	node_start(&a, 1, "127.0.0.1:0");
	raw_open(&silent[0], kvp_peers_address(a.peers));
	raw_open(&silent[1], kvp_peers_address(a.peers));
	raw_open(&young, kvp_peers_address(a.peers));
	raw_hello(&young, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "");
	cr_assert(until(&a.ups, 1));
	cr_assert(until(&silent[0].eof, 1));
	cr_assert_eq(silent[1].eof, 0u);
	peer = dial(&a, "127.0.0.1:9");
	cr_assert(until(&silent[1].eof, 1));
	cr_assert_eq(young.eof, 0u);
	kvp_peer_put(peer);
	raw_close(&silent[0]);
	raw_close(&silent[1]);
	raw_close(&young);
	node_stop(&a);
}

static void raw_greets(struct raw *raw, const char *from, const struct node *node, uint8_t id)
{
	raw_open_from(raw, from, kvp_peers_address(node->peers));
	raw_hello(raw, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, id, "");
}

/* One host may not have all sessions; it is told so, and others are let in. */
Test(peer, one_host_has_part_of_the_sessions)
{
	struct node a = { 0 };
	struct raw raws[2], more, other, again;
	uint64_t refused;

	kvp_config_defaults(&a.config);
	a.config.peer.max_host_sessions = 2;
	node_start(&a, 1, "127.0.0.1:0");
	raw_greets(&raws[0], "127.0.0.1", &a, 7);
	raw_greets(&raws[1], "127.0.0.1", &a, 8);
	cr_assert(until(&a.ups, 2));
	raw_greets(&more, "127.0.0.1", &a, 9);
	cr_assert(until(&more.eof, 1));
	cr_assert_gt(more.bytes, 4u);
	cr_assert_not_null(memmem(more.buf, more.bytes, "at most 2 (peer.max_host_sessions)", 34));
	cr_assert_eq(kvp_peers_of_host(a.peers, &refused), 2u);
	cr_assert_eq(refused, 1u);
	raw_greets(&other, "127.0.0.2", &a, 10);
	cr_assert(until(&a.ups, 3));
	raw_close(&raws[0]);
	cr_assert(until(&a.downs, 1));
	raw_greets(&again, "127.0.0.1", &a, 11);
	cr_assert(until(&a.ups, 4));
	cr_assert_eq(kvp_peers_of_host(a.peers, &refused), 2u);
	raw_close(&raws[1]);
	raw_close(&more);
	raw_close(&other);
	raw_close(&again);
	node_stop(&a);
}

static bool no_memory;

void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes)
{
	return no_memory ? NULL : __real_calloc(n, bytes);
}

/* libuv holds a connection that is not taken, and looks for no other until it is. */
Test(peer, accepting_goes_on_after_a_lack_of_memory)
{
	struct node a = { 0 };
	struct raw raws[2];
	unsigned pauses = 0;

	node_start(&a, 1, "127.0.0.1:0");
	no_memory = true;
	raw_greets(&raws[0], "127.0.0.1", &a, 7);
	raw_greets(&raws[1], "127.0.0.1", &a, 8);
	while (pauses < 2) {
		cr_assert_eq(a.ups, 0u);
		run_for(10 * MS);
		pauses = (unsigned)kvp_peers_accept_pauses(a.peers);
	}
	no_memory = false;
	cr_assert(until(&a.ups, 2));
	raw_close(&raws[0]);
	raw_close(&raws[1]);
	node_stop(&a);
}

/* Whoever stays longer than a heartbeat without a room is let go; a room calls it again. */
Test(peer, a_session_that_nobody_needs_is_let_go)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	a.config.peer.idle_ns = b.config.peer.idle_ns = 100 * MS;
	peer = dial(&a, kvp_peers_address(b.peers));
	cr_assert(until(&a.ups, 1));
	run_for(300 * MS);
	cr_assert_eq(a.downs + b.downs, 0u, "somebody holds it");
	kvp_peer_put(peer);
	cr_assert(until(&a.downs, 1));
	cr_assert(until(&b.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_OK);
	cr_assert(strstr(a.why, "not needed"), "%s", a.why);
	peer = dial(&a, kvp_peers_address(b.peers));
	cr_assert(until(&a.ups, 2));
	kvp_peer_put(peer);
	node_stop(&a);
	node_stop(&b);
}

/* The endpoints of one session may be all that a transport has between two daemons. */
Test(peer, an_idle_session_stays_beside_one_in_use)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer, *idle, *in_use;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	a.config.peer.idle_ns = b.config.peer.idle_ns = 50 * MS;
	peer = dial(&b, kvp_peers_address(a.peers));
	cr_assert(until(&a.ups, 1));
	in_use = a.last;
	kvp_peer_set_data(in_use, &a);
	idle = dial(&a, kvp_peers_address(b.peers));
	cr_assert(until(&a.ups, 2));
	kvp_peer_put(idle);
	run_for(200 * MS);
	cr_assert_eq(a.downs + b.downs, 0u);
	kvp_peer_set_data(in_use, NULL);
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_OK);
	kvp_peer_put(peer);
	node_stop(&a);
	node_stop(&b);
}

Test(peer, idle_0_keeps_sessions)
{
	struct node a = { 0 }, b = { 0 };

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	a.config.peer.idle_ns = 0;
	kvp_peer_put(dial(&a, kvp_peers_address(b.peers)));
	cr_assert_eq(a.ups, 0u, "nobody waits for it: gone at once");
	{
		struct kvp_peer *peer = dial(&a, kvp_peers_address(b.peers));

		cr_assert(until(&a.ups, 1));
		kvp_peer_put(peer);
	}
	run_for(200 * MS);
	cr_assert_eq(a.downs + b.downs, 0u);
	node_stop(&a);
	node_stop(&b);
}

/* What a peer does not read does not pile up without an end. */
Test(peer, one_that_reads_nothing_is_lost_at_the_limit)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *other;
	struct raw raw;
	char text[256];
	unsigned sent = 0;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	a.config.peer.lost_after_ns = 60000 * MS;
	other = dial(&b, kvp_peers_address(a.peers));
	cr_assert(until(&a.ups, 1));
	raw_open(&raw, kvp_peers_address(a.peers));
	raw_hello(&raw, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 9, "");
	cr_assert(until(&a.ups, 2));
	uv_read_stop((uv_stream_t *)&raw.tcp);
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	while (send_abort(a.last, text) == 0)
		cr_assert_lt(++sent, 1u << 20, "no end");
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_PEER_LOST);
	cr_assert(strstr(a.why, "limit 8388608"), "%s", a.why);
	cr_assert_gt(sent, 8u << 20 >> 9, "not before the limit");
	cr_assert(kvp_peer_is_up(other), "others are not disturbed");
	raw_close(&raw);
	kvp_peer_put(other);
	node_stop(&b);
	node_stop(&a);
}

Test(peer, addresses_are_checked)
{
	static const char *const bad[] = { "",      "host",       ":1",
					   "host:", "host:70000", "host:12x",
					   "::1:5", "[::1]5",     "self:0102030405060708" };
	struct node a = { 0 };
	char err[256];

	node_start(&a, 1, "");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad); i++) {
		err[0] = '\0';
		cr_assert_null(kvp_peer_get(a.peers, bad[i], err, sizeof(err)), "%s", bad[i]);
		cr_assert_neq(err[0], '\0');
	}
	cr_assert_null(kvp_peer_get(a.peers, "10.1.2.3:7470", err, sizeof(err)));
	cr_assert(strstr(err, "loopback"), "%s", err);
	node_stop(&a);
}

/* Until the orders to end its endpoints are there; then the lane says that they have. */
static void lane_lets_go(struct node *node, struct kvp_board *const boards[2])
{
	kvp_peers_stop(node->peers);
	cr_assert(until(&node->lane.ends, 2));
	for (unsigned i = 0; i < 2; i++) {
		atomic_store(&boards[i]->flags, KVP_BOARD_QUIET);
		kvp_peers_board(node->peers, boards[i]);
	}
}

/* Both ends of a session name it to their transports, and no other session the same. */
Test(peer, a_session_has_a_number)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *there, *back;
	struct kvp_board *boards[2][2];
	uint64_t ep = 0, first;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	there = dial(&a, kvp_peers_address(b.peers));
	cr_assert(until(&b.ups, 1));
	cr_assert(until(&a.ups, 1));
	cr_assert_eq(kvp_peer_endpoint(there, 0, 0, "addr", 4, &ep), 0);
	cr_assert_eq(kvp_peer_endpoint(b.last, 0, 0, "addr", 4, &ep), 0);
	first = a.lane.number;
	cr_assert_neq(first, 0u);
	cr_assert_eq(b.lane.number, first);
	boards[0][0] = a.lane.board;
	boards[1][0] = b.lane.board;

	back = dial(&b, kvp_peers_address(a.peers));
	cr_assert(until(&a.ups, 2));
	cr_assert(until(&b.ups, 2));
	cr_assert_eq(kvp_peer_endpoint(back, 0, 0, "addr", 4, &ep), 0);
	cr_assert_eq(kvp_peer_endpoint(a.last, 0, 0, "addr", 4, &ep), 0);
	cr_assert_neq(b.lane.number, first);
	cr_assert_eq(a.lane.number, b.lane.number);
	boards[0][1] = a.lane.board;
	boards[1][1] = b.lane.board;
	for (unsigned i = 0; i < 2; i++) {
		const struct node *node = i ? &b : &a;

		cr_assert(kvp_admits_has(node->admits, first));
		cr_assert(kvp_admits_has(node->admits, a.lane.number));
		cr_assert_not(kvp_admits_has(node->admits, first + 1));
		cr_assert_not(kvp_admits_has(node->admits, 0));
	}

	kvp_peer_put(there);
	kvp_peer_put(back);
	lane_lets_go(&a, boards[0]);
	lane_lets_go(&b, boards[1]);
	/* Sessions that are over open nothing. */
	cr_assert_not(kvp_admits_has(a.admits, first));
	cr_assert_not(kvp_admits_has(a.admits, a.lane.number));
	cr_assert_not(kvp_admits_has(b.admits, first));
	node_stop(&a);
	node_stop(&b);
}
Test(peer, endpoints_end_with_the_session)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;
	uint64_t ep = 0, again = 0;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	peer = dial(&a, kvp_peers_address(b.peers));
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, "addr", 4, &ep), -ENOTCONN);
	cr_assert(until(&a.ups, 1));
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, "addr", 4, &ep), 0);
	cr_assert_neq(ep, 0u);
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, "addr", 4, &again), 0);
	cr_assert_eq(again, ep);
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, "other", 5, &again), -EPROTO);
	cr_assert_eq(kvp_peer_endpoint(peer, 0, 0, "", 0, &again), -EINVAL);
	cr_assert_eq(a.lane.adds, 1u);
	/* The transport reports a broken endpoint: the session goes, the endpoint is ended once. */
	atomic_store(&a.lane.board->flags, KVP_BOARD_FAILED);
	(void)snprintf(a.lane.board->text, sizeof(a.lane.board->text), "port 1 is down");
	kvp_peers_board(a.peers, a.lane.board);
	cr_assert(until(&a.downs, 1));
	cr_assert_eq(a.status, KVP__STATUS__STATUS_TRANSPORT);
	cr_assert(strstr(a.why, "port 1 is down"), "%s", a.why);
	cr_assert_eq(a.lane.ends, 1u);
	cr_assert_eq(a.lane.ended, ep);
	cr_assert_not(a.lane.open_at_end, "the peer may open what nobody ends");
	/* It is dialled again, with an endpoint of its own. */
	cr_assert(until(&a.ups, 2));
	kvp_peer_put(peer);
	kvp_peers_stop(a.peers);
	run_for(50 * MS);
	cr_assert_not(kvp_peers_idle(a.peers), "the lane still has the endpoint");
	atomic_store(&a.lane.board->flags, KVP_BOARD_QUIET);
	kvp_peers_board(a.peers, a.lane.board);
	node_stop(&a);
	node_stop(&b);
}

/* This process stood still for longer than a dial and a greeting may take: what has come is seen.
 */
Test(peer, a_loop_that_is_late_loses_nobody)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer;
	struct raw raw;

	node_start(&a, 1, "127.0.0.1:0");
	b.config = a.config;
	b.config.peer.lost_after_ns = 60000 * MS;
	node_start(&b, 2, "127.0.0.1:0");
	peer = dial(&a, kvp_peers_address(b.peers));
	(void)poll(NULL, 0, support_slow_ms(250)); /* while it connects */
	cr_assert(until(&a.ups, 1));
	cr_assert(until(&b.ups, 1));

	raw_open(&raw, kvp_peers_address(a.peers));
	run_for(20 * MS); /* until it is accepted */
	raw_hello(&raw, KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX, 3, "");
	(void)poll(NULL, 0, support_slow_ms(250));
	cr_assert(until(&a.ups, 2));
	cr_assert_eq(a.downs + b.downs, 0u, "%s%s", a.why, b.why);
	kvp_peer_put(peer);
	raw_close(&raw);
	node_stop(&a);
	node_stop(&b);
}

static bool count_view(void *arg, const struct kvp_peer_view *view)
{
	unsigned *n = arg;

	cr_assert(view->address[0]);
	cr_assert(view->state[0]);
	(*n)++;
	return true;
}

Test(peer, views_list_all)
{
	struct node a = { 0 }, b = { 0 };
	struct kvp_peer *peer, *self;
	unsigned n = 0;

	node_start(&a, 1, "127.0.0.1:0");
	node_start(&b, 2, "127.0.0.1:0");
	peer = dial(&a, kvp_peers_address(b.peers));
	self = dial(&a, kvp_peers_address(a.peers));
	cr_assert(until(&a.ups, 3));
	kvp_peers_each(a.peers, count_view, &n);
	cr_assert_eq(n, 3u);
	kvp_peer_put(peer);
	kvp_peer_put(self);
	node_stop(&a);
	node_stop(&b);
}
