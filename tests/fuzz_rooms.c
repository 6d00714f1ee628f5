/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Another daemon that says anything, against real peers, rooms and a lane. The input is a script of
 * requests of this node's own engine, of the other daemon's control messages over two real TCP
 * sessions (one dialled by each side), and of lane messages, which a transport made of nothing
 * hands over. Messages are made of small numbers and of generations, cookies and tokens that the
 * node has sent, so that they mean something; or they are bytes.
 *
 * Complete and failed exclude each other, pages that no expectation holds never change, and every
 * room becomes quiet.
 */

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/net.h"
#include "proto/peer_msg.h"
#include "proto/wire.h"
#include "tests/support_bytes.h"
#include "tests/support_room.h"

#define OPS_MAX 96u
#define KEPT 8u /* legs and lane messages that are remembered */
#define PAGE 4u
#define ROW 16u
#define N_PAGES 32u
#define USED_PAGES 16u /* expectations name pages below this */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require_at(bool ok, int line, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "fuzz_rooms.c:%d: not so: %s\n", line, what);
	abort();
}
#define REQUIRE(cond) require_at(cond, __LINE__, #cond)

/* ---- a transport made of nothing */

struct null_msg {
	uint8_t hdr[KVP_NET_HDR_MAX];
	size_t hdr_bytes, bytes;
	struct null_msg *next;
};

struct kvp_net_ep {
	void *arg;
	bool closing;
	struct kvp_net_ep *next;
};

struct kvp_net {
	const struct kvp_net_events *events;
	void *arg;
	struct kvp_net_ep *eps;
	void *sent[64]; /* requests to be reported */
	uint32_t n_sent;
	struct kvp_net_stats stats;
};

/* What goes in and out; under the lock. */
static struct {
	pthread_mutex_t lock;
	int wake;
	struct null_msg *in;
	union kvp_wire_msg out[KEPT];
	uint32_t n_out;
} wire = { .lock = PTHREAD_MUTEX_INITIALIZER, .wake = -1 };

static int null_open(struct kvp_net **out, const struct kvp_net_config *config, char *err,
		     size_t err_bytes)
{
	struct kvp_net *net = calloc(1, sizeof(*net));

	(void)err;
	(void)err_bytes;
	REQUIRE(net);
	net->events = config->events;
	net->arg = config->arg;
	*out = net;
	return 0;
}

static void null_gone(struct kvp_net *net, struct kvp_net_ep **at)
{
	struct kvp_net_ep *ep = *at;
	void *arg = ep->arg;

	*at = ep->next;
	free(ep);
	net->events->closed(net->arg, arg);
}

static void null_close(struct kvp_net *net)
{
	if (!net)
		return;
	while (net->eps)
		null_gone(net, &net->eps);
	free(net);
}

static int null_address(struct kvp_net *net, void *buf, size_t buf_bytes)
{
	(void)net;
	REQUIRE(buf_bytes >= 4);
	memcpy(buf, "none", 4);
	return 4;
}

static int null_ep_open(struct kvp_net *net, const void *addr, size_t addr_bytes, uint64_t number,
			void *ep_arg, struct kvp_net_ep **out)
{
	struct kvp_net_ep *ep;

	(void)number;
	if (addr_bytes == 0 || *(const uint8_t *)addr == 0xff)
		return -EINVAL;
	ep = calloc(1, sizeof(*ep));
	REQUIRE(ep);
	ep->arg = ep_arg;
	ep->next = net->eps;
	net->eps = ep;
	*out = ep;
	return 0;
}

static void null_ep_close(struct kvp_net *net, struct kvp_net_ep *ep)
{
	(void)net;
	ep->closing = true;
}

static void *null_ep_arg(struct kvp_net_ep *ep)
{
	return ep->arg;
}

static int null_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr, size_t hdr_bytes,
		     const void *payload, size_t bytes, void *req)
{
	(void)ep;
	(void)payload;
	(void)bytes;
	if (req && net->n_sent == KVP_ARRAY_SIZE(net->sent))
		return -EAGAIN;
	if (req)
		net->sent[net->n_sent++] = req;
	pthread_mutex_lock(&wire.lock);
	memset(&wire.out[wire.n_out % KEPT], 0, sizeof(wire.out[0]));
	memcpy(&wire.out[wire.n_out % KEPT], hdr, KVP_MIN(hdr_bytes, sizeof(wire.out[0])));
	wire.n_out++;
	pthread_mutex_unlock(&wire.lock);
	return 0;
}

static struct null_msg *null_take(void)
{
	struct null_msg *msg;

	pthread_mutex_lock(&wire.lock);
	msg = wire.in;
	if (msg)
		wire.in = msg->next;
	pthread_mutex_unlock(&wire.lock);
	return msg;
}

static void null_deliver(struct kvp_net *net, struct null_msg *msg)
{
	static uint8_t payload[128 << 10];
	size_t bytes = KVP_MIN(msg->bytes, sizeof(payload));
	void *place;

	memset(payload, 0x5a, bytes);
	place = net->events->message(net->arg, msg->hdr, msg->hdr_bytes, bytes);
	if (place && bytes > 0)
		memcpy(place, payload, bytes);
	if (place && bytes > 0)
		net->events->data(net->arg, msg->hdr, msg->hdr_bytes, place, bytes);
	free(msg);
}

static int null_progress(struct kvp_net *net)
{
	struct kvp_net_ep **at = &net->eps;
	struct null_msg *msg;
	uint64_t token;
	int n = 0;

	(void)!read(wire.wake, &token, sizeof(token)); /* nothing: nobody woke it */
	for (; (msg = null_take()); n++)
		null_deliver(net, msg);
	for (; net->n_sent > 0; n++)
		net->events->sent(net->arg, net->sent[--net->n_sent], 0);
	while (*at) {
		if (!(*at)->closing) {
			at = &(*at)->next;
			continue;
		}
		null_gone(net, at);
		n++;
	}
	return n;
}

static int null_arm(struct kvp_net *net)
{
	(void)net;
	return 0;
}

static int null_fd(struct kvp_net *net)
{
	(void)net;
	return wire.wake;
}

static const struct kvp_net_stats *null_stats(struct kvp_net *net)
{
	return &net->stats;
}

static const char *null_describe(struct kvp_net *net)
{
	(void)net;
	return "nothing";
}

static const struct kvp_net_ops null_net = {
	.name = "ucx", /* what offers have to say */
	.open = null_open,
	.close = null_close,
	.address = null_address,
	.ep_open = null_ep_open,
	.ep_close = null_ep_close,
	.ep_arg = null_ep_arg,
	.send = null_send,
	.progress = null_progress,
	.arm = null_arm,
	.fd = null_fd,
	.stats = null_stats,
	.describe = null_describe,
};

/* ---- the other daemon */

struct other {
	int fd;
	struct kvp_frames frames;
};

static struct sr_node node;
static uv_loop_t loop;
static struct sr_pool from, to;
static uint8_t *to_before;
static struct other others[2]; /* 0: has dialled; 1: was dialled */
static int listener;
static char listener_address[64];
static Kvp__Leg legs[KEPT];
static uint32_t n_legs;

static void keep_leg(const Kvp__Leg *leg)
{
	if (leg)
		legs[n_legs++ % KEPT] = *leg;
}

static void other_send(struct other *other, const Kvp__PeerMsg *msg)
{
	static uint8_t buf[KVP_LIMIT_FRAME + KVP_FRAME_HEAD];
	long n = kvp_peer_encode(msg, buf, sizeof(buf));

	if (n > 0 && other->fd >= 0)
		(void)send(other->fd, buf, (size_t)n,
			   MSG_DONTWAIT | MSG_NOSIGNAL); /* or it is lost */
}

static void other_hello(struct other *other, bool answer)
{
	static uint8_t incarnation[16] = { 0xee };
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__PeerHello hello = KVP__PEER_HELLO__INIT;

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.version = answer ? KVP_PROTO_VERSION_MAX : 0;
	hello.incarnation.data = incarnation;
	hello.incarnation.len = sizeof(incarnation);
	hello.node = (char *)"other";
	hello.address = listener_address;
	msg.body_case = KVP__PEER_MSG__BODY_HELLO;
	msg.hello = &hello;
	other_send(other, &msg);
}

static void other_take(struct other *other, const Kvp__PeerMsg *msg)
{
	switch (msg->body_case) {
	case KVP__PEER_MSG__BODY_HELLO:
		if (other == &others[1])
			other_hello(other, true);
		break;
	case KVP__PEER_MSG__BODY_OFFER:
		keep_leg(msg->offer->leg);
		break;
	case KVP__PEER_MSG__BODY_ACCEPT:
		keep_leg(msg->accept->leg);
		break;
	default:
		break;
	}
}

static void other_end(struct other *other)
{
	if (other->fd >= 0)
		(void)close(other->fd);
	other->fd = -1;
	kvp_frames_fini(&other->frames);
	other->frames = (struct kvp_frames){ 0 };
}

/* What the node sends it decodes too. */
static void other_read(struct other *other)
{
	static uint8_t buf[65536];
	ssize_t n;

	if (other == &others[1] && other->fd < 0)
		other->fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	while (other->fd >= 0 && (n = recv(other->fd, buf, sizeof(buf), MSG_DONTWAIT)) != -1) {
		char err[256];
		Kvp__PeerMsg *msg;

		if (n == 0) {
			other_end(other);
			return;
		}
		REQUIRE(kvp_frames_push(&other->frames, buf, (size_t)n) == 0);
		while (kvp_frames_next(&other->frames, &msg, err, sizeof(err)) == 1) {
			other_take(other, msg);
			kvp_peer_free(msg);
		}
	}
	if (other->fd >= 0 && errno != EAGAIN)
		other_end(other);
}

static void turn(bool wait)
{
	if (wait)
		sr_step(&node, NULL);
	else
		(void)uv_run(&loop, UV_RUN_NOWAIT);
	for (int i = 0; i < 2; i++)
		other_read(&others[i]);
}

/* Dials the node, as another daemon would. */
static void other_dial(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	const char *own = kvp_peers_address(node.peers);

	others[0].fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	addr.sin_port = htons((uint16_t)strtoul(strrchr(own, ':') + 1, NULL, 10));
	if (connect(others[0].fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		other_end(&others[0]);
	else
		other_hello(&others[0], false);
}

/* ---- messages of the control session */

static void take_leg(struct bytes *in, Kvp__Leg *leg)
{
	uint8_t which = bytes_take(in);

	kvp__leg__init(leg);
	if (which < 200 && n_legs > 0) {
		*leg = legs[which % KVP_MIN(n_legs, KEPT)];
		if (which < 180)
			return;
	}
	leg->room = bytes_field(in, 2);
	leg->dest = (uint32_t)bytes_field(in, 2);
	leg->sender = (uint32_t)bytes_field(in, 2);
	if (which < 180 || which >= 190)
		leg->generation = 1 + bytes_field(in, 4);
}

static void take_geometry(struct bytes *in, Kvp__PeerEntry *entries, Kvp__PeerSide *side)
{
	uint8_t odd = bytes_take(in);

	for (uint32_t i = 0; i < 2; i++) {
		kvp__peer_entry__init(&entries[i]);
		entries[i].layer = i;
		entries[i].row_bytes = entries[i].full_bytes = ROW;
		entries[i].rows_per_page = PAGE;
	}
	kvp__peer_side__init(side);
	side->page = PAGE;
	side->dcp_size = side->interleave = 1;
	if (odd < 200)
		return;
	entries[0].row_bytes = (uint32_t)bytes_field(in, 64);
	entries[1].lo = (uint32_t)bytes_field(in, 64);
	entries[1].masked = bytes_take(in) % 2;
	side->page = (uint32_t)bytes_field(in, 16);
	side->dcp_size = (uint32_t)bytes_field(in, 4);
	side->dcp_rank = (uint32_t)bytes_field(in, 4);
	side->first = bytes_field(in, 64);
	side->pos0 = bytes_field(in, 64);
}

static void offer(struct other *other, struct bytes *in)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Offer body = KVP__OFFER__INIT;
	Kvp__Leg leg;
	Kvp__PeerEntry entries[2], *list[2] = { &entries[0], &entries[1] };
	Kvp__PeerSide side, *sides = &side;
	uint8_t address[2] = { 1, 0 };

	take_leg(in, &leg);
	take_geometry(in, entries, &side);
	body.leg = &leg;
	body.n_dests = 1 + (uint32_t)bytes_field(in, 2);
	body.role = (Kvp__SenderRole)(bytes_field(in, 8) % 8 == 7);
	body.prefix = bytes_field(in, 2) * PAGE;
	body.end = bytes_field(in, 65);
	body.layout_tag.data = (uint8_t *)"tag";
	body.layout_tag.len = bytes_take(in) < 240 ? 3 : 2;
	body.entries = list;
	body.n_entries = 2;
	body.sides = &sides;
	body.n_sides = 1;
	body.meta = bytes_take(in) > 200;
	address[0] = bytes_take(in) < 240 ? 1 : 0xff;
	body.lane = (uint32_t)bytes_field(in, 1);
	body.lane_address.data = address;
	body.lane_address.len = 2;
	body.slot_bytes = bytes_take(in) < 240 ? 65536 : bytes_field(in, 250);
	body.layout_version = KVP_LAYOUT_VERSION;
	body.transport = (char *)(bytes_take(in) < 240 ? "ucx" : "other");
	msg.body_case = KVP__PEER_MSG__BODY_OFFER;
	msg.offer = &body;
	other_send(other, &msg);
}

static void accept_(struct other *other, struct bytes *in)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Accept body = KVP__ACCEPT__INIT;
	Kvp__Leg leg;
	Kvp__PeerEntry entries[2], *list[2] = { &entries[0], &entries[1] };
	Kvp__PeerSide side, *sides = &side;
	uint8_t address[2] = { 1, 0 };

	take_leg(in, &leg);
	take_geometry(in, entries, &side);
	body.leg = &leg;
	body.layout_tag.data = (uint8_t *)"tag";
	body.layout_tag.len = bytes_take(in) < 240 ? 3 : 2;
	body.entries = list;
	body.n_entries = 2;
	body.sides = &sides;
	body.n_sides = 1;
	address[0] = bytes_take(in) < 240 ? 1 : 0xff;
	body.lane_address.data = address;
	body.lane_address.len = 2;
	body.slot_bytes = bytes_take(in) < 240 ? 65536 : bytes_field(in, 250);
	body.layout_version = KVP_LAYOUT_VERSION;
	msg.body_case = KVP__PEER_MSG__BODY_ACCEPT;
	msg.accept = &body;
	other_send(other, &msg);
}

/* Messages that are no more than a leg or a few numbers. */
static void small(struct other *other, struct bytes *in)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Go go = KVP__GO__INIT;
	Kvp__LegAbort abort_ = KVP__LEG_ABORT__INIT;
	Kvp__LegEnd end = KVP__LEG_END__INIT;
	Kvp__Drained drained = KVP__DRAINED__INIT;
	Kvp__PeerRenew renew = KVP__PEER_RENEW__INIT;
	Kvp__PeerDecline decline = KVP__PEER_DECLINE__INIT;
	Kvp__Heartbeat beat = KVP__HEARTBEAT__INIT;
	uint8_t which = bytes_take(in) % 7;
	Kvp__Leg leg;

	take_leg(in, &leg);
	go.leg = abort_.leg = end.leg = drained.leg = &leg;
	abort_.status = (Kvp__Status)(bytes_take(in) % 34);
	abort_.text = (char *)"the other says so";
	abort_.retry = bytes_take(in) % 2;
	renew.room = decline.room = leg.room;
	renew.sender = decline.sender = leg.sender;
	renew.lease_ms = (uint32_t)bytes_field(in, 250);
	msg.body_case = (Kvp__PeerMsg__BodyCase)(KVP__PEER_MSG__BODY_GO + which);
	switch (msg.body_case) {
	case KVP__PEER_MSG__BODY_GO:
		msg.go = &go;
		break;
	case KVP__PEER_MSG__BODY_ABORT:
		msg.abort = &abort_;
		break;
	case KVP__PEER_MSG__BODY_END:
		msg.end = &end;
		break;
	case KVP__PEER_MSG__BODY_DRAINED:
		msg.drained = &drained;
		break;
	case KVP__PEER_MSG__BODY_RENEW:
		msg.renew = &renew;
		break;
	case KVP__PEER_MSG__BODY_DECLINE:
		msg.decline = &decline;
		break;
	default:
		msg.heartbeat = &beat;
		break;
	}
	other_send(other, &msg);
}

/* A frame of any bytes, or bytes that are no frame. */
static void raw(struct other *other, struct bytes *in)
{
	uint8_t buf[KVP_FRAME_HEAD + 256];
	size_t n = bytes_take(in), head = bytes_take(in) < 250 ? KVP_FRAME_HEAD : 0;
	const uint8_t *bytes = bytes_span(in, &n);

	memset(buf, 0, sizeof(buf));
	buf[0] = (uint8_t)n;
	memcpy(buf + head, bytes, n);
	if (other->fd >= 0)
		(void)send(other->fd, buf, head + n,
			   MSG_DONTWAIT | MSG_NOSIGNAL); /* or it is lost */
}

static void reconnect(struct other *other, struct bytes *in)
{
	other_end(other);
	if (bytes_take(in) > 200)
		turn(true);
	if (other == &others[0])
		other_dial(); /* the node dials the other itself */
}

/* ---- messages of the lane */

/* A cookie or a token that the lane has sent, or any. */
static uint64_t take_secret(struct bytes *in, unsigned type)
{
	uint8_t which = bytes_take(in);
	uint64_t secret = bytes_take(in);

	pthread_mutex_lock(&wire.lock);
	for (uint32_t i = 0; i < KEPT && which < 230; i++) {
		const union kvp_wire_msg *msg = &wire.out[(i + which) % KEPT];

		if (msg->head.type != type)
			continue;
		secret = type == KVP_WIRE_GRANT ? msg->grant.token : msg->want.cookie;
		break;
	}
	pthread_mutex_unlock(&wire.lock);
	return secret;
}

static void take_want(struct bytes *in, struct kvp_wire_want *want)
{
	Kvp__Leg leg;

	take_leg(in, &leg);
	want->generation = leg.generation;
	want->cookie = bytes_take(in);
	want->sender = leg.sender;
	want->seq = (uint32_t)bytes_field(in, 3);
	want->start = bytes_field(in, 65);
	want->tokens = bytes_field(in, 65);
	want->entry_set[0] = bytes_take(in) < 200 ? 3 : bytes_field(in, 4);
	want->pieces = 1 + (uint32_t)bytes_field(in, 2);
	want->piece = (uint32_t)bytes_field(in, 2);
	want->last = bytes_take(in) % 2;
	want->kind = bytes_take(in) < 200 ? KVP_WIRE_ROWS : (uint8_t)bytes_field(in, 6);
	want->segment = (uint32_t)bytes_field(in, 6);
	want->offset = bytes_take(in) < 200 ? 0 : bytes_field(in, 250);
	want->total = bytes_take(in) < 200 ? 0 : bytes_field(in, 250);
	/* Two entries, each from a multiple of 256 bytes on. */
	want->bytes = bytes_take(in) < 200
			      ? (want->tokens * ROW + 255) / 256 * 256 + want->tokens * ROW
			      : bytes_field(in, 250);
}

static size_t take_wire(struct bytes *in, union kvp_wire_msg *msg, size_t *payload)
{
	uint8_t type = 1 + bytes_take(in) % 6;
	Kvp__Leg leg;

	memset(msg, 0, sizeof(*msg));
	msg->head = kvp_wire_head((enum kvp_wire_type)type);
	*payload = 0;
	switch (type) {
	case KVP_WIRE_WANT:
		take_want(in, &msg->want);
		*payload = bytes_take(in) > 128 ? msg->want.bytes : 0;
		return sizeof(msg->want);
	case KVP_WIRE_GRANT:
		msg->grant.cookie = take_secret(in, KVP_WIRE_WANT);
		msg->grant.token = bytes_take(in);
		msg->grant.slot_bytes = bytes_take(in) < 240 ? 65536 : bytes_field(in, 250);
		msg->grant.slot = (uint32_t)bytes_field(in, 8);
		msg->grant.mode = bytes_take(in) < 240 ? KVP_WIRE_LANDING : bytes_take(in);
		return sizeof(msg->grant);
	case KVP_WIRE_DATA:
		msg->data.token = take_secret(in, KVP_WIRE_GRANT);
		msg->data.offset = bytes_take(in) < 200 ? 0 : bytes_field(in, 250);
		msg->data.total = bytes_field(in, 250) * (1 + bytes_field(in, 20));
		msg->data.slot = (uint32_t)bytes_field(in, 8);
		*payload = bytes_take(in) < 200 ? msg->data.total : bytes_field(in, 250);
		return sizeof(msg->data);
	case KVP_WIRE_LANDED:
		msg->landed.cookie = take_secret(in, KVP_WIRE_WANT);
		return sizeof(msg->landed);
	case KVP_WIRE_RETURN:
		take_leg(in, &leg);
		msg->ret.generation = leg.generation;
		msg->ret.sender = leg.sender;
		return sizeof(msg->ret);
	default:
		msg->refuse.cookie = take_secret(in, KVP_WIRE_WANT);
		msg->refuse.status = bytes_take(in);
		return sizeof(msg->refuse);
	}
}

static void lane(struct other *other, struct bytes *in)
{
	struct null_msg *msg = calloc(1, sizeof(*msg)), **tail = &wire.in;
	union kvp_wire_msg head;
	const uint64_t one = 1;

	(void)other;
	REQUIRE(msg);
	if (bytes_take(in) < 250) {
		msg->hdr_bytes = take_wire(in, &head, &msg->bytes);
		memcpy(msg->hdr, &head, msg->hdr_bytes);
	} else {
		const void *span;

		msg->hdr_bytes = bytes_take(in);
		span = bytes_span(in, &msg->hdr_bytes); /* which may make it less */
		memcpy(msg->hdr, span, msg->hdr_bytes);
		msg->bytes = bytes_take(in);
	}
	pthread_mutex_lock(&wire.lock);
	while (*tail)
		tail = &(*tail)->next;
	*tail = msg;
	pthread_mutex_unlock(&wire.lock);
	(void)!write(wire.wake, &one, sizeof(one)); /* full: it wakes as well */
	if (bytes_take(in) % 2)
		turn(true);
}

/* ---- requests of the node's own engine */

static uint32_t take_pages(struct bytes *in, uint32_t *pages)
{
	uint32_t n = (uint32_t)(bytes_field(in, USED_PAGES) % (USED_PAGES + 1));
	uint32_t base = (uint32_t)(bytes_field(in, USED_PAGES) % USED_PAGES);

	for (uint32_t i = 0; i < n; i++)
		pages[i] = (base + i) % USED_PAGES;
	return n;
}

static void expect(struct other *other, struct bytes *in)
{
	struct sr_expect msg = { 0 };
	uint32_t pages[USED_PAGES];

	(void)other;
	msg.handle = 1 + bytes_field(in, 3) % 3;
	msg.room = bytes_field(in, 2);
	msg.dest = (uint32_t)(bytes_field(in, 2) % 64);
	msg.n_pages = take_pages(in, pages);
	msg.pages = pages;
	msg.end = bytes_take(in) % (USED_PAGES * PAGE + 1);
	msg.meta_from = bytes_take(in) > 220;
	msg.n_senders = 1 + bytes_take(in) % 2;
	for (uint32_t i = 0; i < msg.n_senders; i++) {
		msg.senders[i].address =
			bytes_take(in) < 200 ? listener_address : kvp_peers_address(node.peers);
		msg.senders[i].sender = i;
		msg.senders[i].n_dests = 1 + bytes_take(in) % 2;
	}
	if (sr_expect(&node, &to, &msg) == KVP__STATUS__STATUS_OK)
		node.ends[msg.handle] = (struct sr_end){ 0 };
}

static void open_(struct other *other, struct bytes *in)
{
	struct sr_open msg = { 0 };

	(void)other;
	msg.handle = 4 + bytes_field(in, 3) % 3;
	msg.room = bytes_field(in, 2);
	msg.sender = (uint32_t)(bytes_field(in, 2) % 64);
	if (sr_open(&node, &from, &msg) == KVP__STATUS__STATUS_OK)
		node.ends[msg.handle] = (struct sr_end){ 0 };
}

static void submit(struct other *other, struct bytes *in)
{
	struct sr_chunk msg = { 0 };
	uint32_t pages[USED_PAGES];

	(void)other;
	msg.handle = 4 + bytes_field(in, 3) % 3;
	msg.seq = (uint32_t)(bytes_field(in, 3) % 1000);
	msg.start = bytes_take(in) % 64u;
	msg.tokens = bytes_take(in) % 65u;
	msg.pos0 = bytes_take(in) % 4u * PAGE;
	msg.n_pages = take_pages(in, pages);
	msg.pages = pages;
	msg.last = bytes_take(in) % 2;
	msg.meta = msg.last && bytes_take(in) % 2 ? "meta" : NULL;
	(void)sr_submit(&node, &msg); /* accepted or not */
}

static void give_up(struct other *other, struct bytes *in)
{
	uint64_t handle = 1 + bytes_field(in, 6) % 6;

	(void)other;
	if (bytes_take(in) % 2)
		(void)sr_abort(&node, handle); /* there may be none */
	else
		(void)sr_recall(&node, handle, bytes_take(in) % 4);
}

static void wait_a_little(struct other *other, struct bytes *in)
{
	uint8_t n = bytes_take(in) % 3;

	(void)other;
	for (uint8_t i = 0; i <= n; i++)
		turn(true);
}

typedef void op_fn(struct other *other, struct bytes *in);

static op_fn *const ops[] = {
	offer, offer, accept_, accept_, small, small,  raw,     reconnect,
	lane,  lane,  lane,    expect,  open_, submit, give_up, wait_a_little,
};

/* ---- one input */

/* Pages that no expectation may name hold what they held. */
static void check_pages(void)
{
	const size_t bytes = (size_t)N_PAGES * PAGE * ROW, used = (size_t)USED_PAGES * PAGE * ROW;

	for (size_t layer = 0; layer < 2; layer++)
		REQUIRE(memcmp(to.mem + layer * bytes + used, to_before + layer * bytes + used,
			       bytes - used) == 0);
}

static void settle(void)
{
	uint64_t give_up_at = uv_hrtime() + UINT64_C(20000000000);

	kvp_rooms_owner_lost(node.rooms, &node.owner, "the input ends");
	REQUIRE(node.owner.n_rooms == 0 && !node.owner.dirty);
	while (kvp_rooms_count(node.rooms) > 0 && uv_hrtime() < give_up_at)
		turn(true);
	REQUIRE(kvp_rooms_count(node.rooms) == 0);
	REQUIRE(from.pool->n_users == 0 && to.pool->n_users == 0 && to.pool->pages_held == 0);
	for (int i = 0; i < 2; i++)
		other_end(&others[i]);
	turn(true);
	memset(node.ends, 0, sizeof(node.ends));
	check_pages();
}

static void stop(void)
{
	sr_stop(&node);
	sr_pool_free(&from);
	sr_pool_free(&to);
	free(to_before);
	(void)close(listener);
	(void)uv_run(&loop, UV_RUN_NOWAIT);
	(void)uv_loop_close(&loop); /* a peer's timer may still be closing */
}

static void start_listener(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	socklen_t len = sizeof(addr);

	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	REQUIRE(bind(listener, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
		listen(listener, 16) == 0 &&
		getsockname(listener, (struct sockaddr *)&addr, &len) == 0);
	(void)snprintf(listener_address, sizeof(listener_address), "127.0.0.1:%u",
		       ntohs(addr.sin_port));
}

static void setup(void)
{
	const struct sr_shape shape = {
		.page = PAGE, .dcp_size = 1, .n_pages = N_PAGES, .layers = 2, .row_bytes = ROW
	};
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	REQUIRE(null >= 0);
	(void)signal(SIGPIPE, SIG_IGN); /* as the daemon does */
	kvp_log_setup(null, KVP_LOG_ERR);
	wire.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	start_listener();
	REQUIRE(uv_loop_init(&loop) == 0);
	sr_init(&node, &loop, 1);
	node.config.limits.max_parked_offers = 6;
	node.config.limits.max_parked_chunks = 4;
	node.config.limits.history = 8;
	node.config.timers.drain_ns = 5 * SR_MS;
	node.config.peer.retry_min_ns = node.config.peer.retry_max_ns = SR_MS;
	node.owner.max_rooms = 6;
	sr_start(&node, &null_net);
	sr_pool_make(&from, &node, &shape);
	sr_pool_make(&to, &node, &shape);
	memset(from.mem, 0x11, from.bytes);
	memset(to.mem, 0x22, to.bytes);
	to_before = malloc(to.bytes);
	REQUIRE(to_before);
	memcpy(to_before, to.mem, to.bytes);
	others[0].fd = others[1].fd = -1;
	REQUIRE(atexit(stop) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct bytes in = { data, size };
	static bool ready;

	if (!ready)
		setup();
	ready = true;
	n_legs = 0;
	other_dial();
	turn(false);
	for (uint32_t i = 0; i < OPS_MAX && in.left > 0; i++) {
		uint8_t op = bytes_take(&in);

		ops[op % KVP_ARRAY_SIZE(ops)](&others[op / 128], &in);
		turn(false);
	}
	settle();
	return 0;
}
