/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole sessions of two clients against a real server with rooms and a lane. The input is a script:
 * requests made of small numbers, so that they meet each other's pools and rooms, raw packets,
 * descriptors that do not fit, connections that end. Each request with an id gets exactly one
 * answer, no room is complete and failed, and nothing is left once the clients are gone.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/msg.h"
#include "proto/util.h"
#include "tests/support_bytes.h"
#include "tests/support_core.h"

#define CLIENTS 2u
#define OPS_MAX 64u
#define PAGE 4u
#define ROW 16u
#define N_PAGES 16u
#define MEM_BYTES (16u << 10)
#define BLOB_BYTES 256u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct client {
	int fd;
	bool ended; /* by the daemon */
	uint64_t last_id, asked, answered;
};

static struct core_rig rig;
static struct client clients[CLIENTS];
static int mem_fd, null_fd, pipe_fds[2];
static uint8_t packet[KVP_LIMIT_PACKET];

static void require_at(bool ok, int line, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "fuzz_session.c:%d: not so: %s\n", line, what);
	abort();
}
#define REQUIRE(cond) require_at(cond, __LINE__, #cond)

/* ---- what comes back */

static void take_event(const Kvp__RoomEvent *event)
{
	REQUIRE(!(event->complete && event->failed));
	REQUIRE(!event->failed || (event->status != 0 && event->reason[0]));
}

static void take_packet(struct client *client, size_t n)
{
	KVP_CLEANUP(kvp_msg_free_daemonp) Kvp__DaemonMsg *msg = NULL;
	char err[256];

	REQUIRE(kvp_msg_decode_daemon(packet, n, &msg, err, sizeof(err)) == 0);
	if (msg->body_case == KVP__DAEMON_MSG__BODY_ROOM) {
		take_event(msg->room);
		return;
	}
	client->answered++;
	REQUIRE(client->answered <= client->asked);
	REQUIRE(msg->reply->status == KVP__STATUS__STATUS_OK || msg->reply->text[0]);
}

static void read_all(struct client *client)
{
	while (client->fd >= 0 && !client->ended) {
		int fds[4];
		size_t n_fds = 0;
		ssize_t n = kvp_packet_recv(client->fd, packet, sizeof(packet), fds, &n_fds, 4);

		for (size_t i = 0; i < n_fds; i++)
			(void)close(fds[i]);
		if (n == -EAGAIN)
			return;
		if (n <= 0)
			client->ended = true;
		else
			take_packet(client, (size_t)n);
	}
}

static void turn(bool wait)
{
	core_turn(&rig, wait);
	for (uint32_t i = 0; i < CLIENTS; i++)
		read_all(&clients[i]);
}

/* ---- what goes out */

static void send_raw(struct client *client, const void *bytes, size_t n, const int *fds,
		     size_t n_fds)
{
	if (client->fd < 0 || client->ended || n == 0)
		return;
	for (int i = 0; i < 1000; i++) {
		int r = kvp_packet_send(client->fd, bytes, n, fds, n_fds);

		if (r == 0) {
			client->asked += kvp_msg_peek_id(bytes, n) != 0;
			return;
		}
		if (r != -EAGAIN)
			return;
		turn(true);
	}
	require_at(false, __LINE__, "the daemon reads");
}

static void send_msg(struct client *client, Kvp__ClientMsg *msg, const int *fds, size_t n_fds)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	long n;

	msg->id = ++client->last_id;
	n = kvp_msg_encode_client(msg, buf, sizeof(buf));
	if (n > 0)
		send_raw(client, buf, (size_t)n, fds, n_fds);
}

static void hello(struct client *client, bool observer)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello body = KVP__HELLO__INIT;

	body.version_min = KVP_PROTO_VERSION_MIN;
	body.version_max = KVP_PROTO_VERSION_MAX;
	body.name = (char *)"fuzz";
	body.pid = 1;
	body.observer = observer;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &body;
	send_msg(client, &msg, NULL, 0);
}

/* Mostly an engine, seldom one who only looks, seldom one who does not say who it is. */
static void begin(struct client *client, uint8_t who)
{
	*client = (struct client){ .fd = core_connect(&rig) };
	REQUIRE(client->fd >= 0);
	if (who < 240)
		hello(client, who >= 224);
}

static void end(struct client *client)
{
	if (client->fd >= 0)
		(void)close(client->fd);
	client->fd = -1;
}

/* ---- requests */

/* Mostly none or the right one. */
static size_t take_fds(struct bytes *in, int *fds, size_t wanted)
{
	uint8_t how = bytes_take(in);
	size_t n = how < 240 ? wanted : how % 4;

	for (size_t i = 0; i < n; i++)
		fds[i] = how < 248 ? mem_fd : how % 2 ? null_fd : pipe_fds[0];
	return n;
}

static void take_entry(struct bytes *in, Kvp__Entry *entry, uint32_t i)
{
	kvp__entry__init(entry);
	entry->layer = i;
	entry->group = (uint32_t)bytes_field(in, 2);
	entry->klass = (Kvp__EntryClass)(bytes_field(in, 8) % 8 == 7 ? 2 : 0);
	if (entry->klass == KVP__ENTRY_CLASS__CLASS_BLOB) {
		entry->group = 0;
		entry->offset = MEM_BYTES - BLOB_BYTES;
		entry->bytes = BLOB_BYTES;
		return;
	}
	entry->row_bytes = entry->full_bytes = ROW;
	entry->row_stride = ROW;
	entry->page_stride = PAGE * ROW;
	entry->rows_per_page = PAGE;
	entry->n_pages = N_PAGES;
	entry->bytes = N_PAGES * PAGE * ROW;
	entry->offset = i * entry->bytes;
	if (bytes_take(in) < 240)
		return;
	entry->row_bytes = (uint32_t)bytes_field(in, 64);
	entry->page_stride = bytes_field(in, 250);
	entry->n_pages = (uint32_t)bytes_field(in, 64);
	entry->offset = bytes_field(in, 250);
}

static void pool_register(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;
	Kvp__Entry entries[3], *list[3];
	int fds[4];
	size_t n_fds;

	body.pool = 1 + (uint32_t)bytes_field(in, 3);
	body.n_entries = 1 + bytes_field(in, 3) % 3;
	for (uint32_t i = 0; i < body.n_entries; i++) {
		take_entry(in, &entries[i], i);
		list[i] = &entries[i];
	}
	body.entries = list;
	body.layout_tag.data = (uint8_t *)"t";
	body.layout_tag.len = 1;
	body.label = (char *)"pool";
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &body;
	n_fds = take_fds(in, fds, 1);
	send_msg(client, &msg, fds, n_fds);
}

/* Pause, resume, unregister; of fences register and unregister: a number each. */
static void pool_or_fence(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause pause = KVP__POOL_PAUSE__INIT;
	Kvp__PoolResume resume = KVP__POOL_RESUME__INIT;
	Kvp__PoolUnregister unregister = KVP__POOL_UNREGISTER__INIT;
	Kvp__FenceRegister fence = KVP__FENCE_REGISTER__INIT;
	Kvp__FenceUnregister unfence = KVP__FENCE_UNREGISTER__INIT;
	static const Kvp__ClientMsg__BodyCase kinds[] = {
		KVP__CLIENT_MSG__BODY_POOL_PAUSE,       KVP__CLIENT_MSG__BODY_POOL_RESUME,
		KVP__CLIENT_MSG__BODY_POOL_UNREGISTER,  KVP__CLIENT_MSG__BODY_FENCE_REGISTER,
		KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER,
	};
	uint32_t id;
	int fds[4];
	size_t n_fds = 0;

	msg.body_case = kinds[bytes_take(in) % KVP_ARRAY_SIZE(kinds)];
	id = 1 + (uint32_t)bytes_field(in, 3);
	pause.pool = resume.pool = unregister.pool = fence.fence = unfence.fence = id;
	fence.words = 1 + (uint32_t)bytes_field(in, 8);
	switch (msg.body_case) {
	case KVP__CLIENT_MSG__BODY_POOL_PAUSE:
		msg.pool_pause = &pause;
		break;
	case KVP__CLIENT_MSG__BODY_POOL_RESUME:
		msg.pool_resume = &resume;
		n_fds = take_fds(in, fds, 1);
		break;
	case KVP__CLIENT_MSG__BODY_POOL_UNREGISTER:
		msg.pool_unregister = &unregister;
		break;
	case KVP__CLIENT_MSG__BODY_FENCE_REGISTER:
		msg.fence_register = &fence;
		n_fds = take_fds(in, fds, 1);
		break;
	default:
		msg.fence_unregister = &unfence;
		break;
	}
	send_msg(client, &msg, fds, n_fds);
}

static void pages(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Pages body = KVP__PAGES__INIT;
	uint32_t numbers[N_PAGES];

	body.list = 1 + (uint32_t)bytes_field(in, 4);
	body.offset = (uint32_t)bytes_field(in, 1);
	body.n_pages = bytes_field(in, N_PAGES) % (N_PAGES + 1);
	for (size_t i = 0; i < body.n_pages; i++)
		numbers[i] = (uint32_t)bytes_field(in, N_PAGES);
	body.pages = numbers;
	msg.body_case = KVP__CLIENT_MSG__BODY_PAGES;
	msg.pages = &body;
	send_msg(client, &msg, NULL, 0);
}

static void take_side(struct bytes *in, Kvp__Side *side)
{
	kvp__side__init(side);
	side->group = (uint32_t)bytes_field(in, 2);
	side->page = PAGE;
	side->dcp_size = side->interleave = 1;
	side->list = 1 + (uint32_t)bytes_field(in, 4);
	if (bytes_take(in) < 200)
		return;
	side->dcp_size = (uint32_t)bytes_field(in, 4);
	side->dcp_rank = (uint32_t)bytes_field(in, 4);
	side->interleave = (uint32_t)bytes_field(in, 5);
	side->pos0 = bytes_field(in, 64);
	side->first = bytes_field(in, 64);
}

/* Own address, one where nobody listens, and nonsense. */
static char *take_address(struct bytes *in)
{
	uint8_t which = bytes_take(in);

	if (which < 230)
		return (char *)kvp_peers_address(rig.core.peers);
	return which < 245 ? (char *)"127.0.0.1:1" : (char *)"nowhere";
}

static void take_timers(struct bytes *in, Kvp__Timers *timers)
{
	kvp__timers__init(timers);
	timers->offer_ms = (uint32_t)bytes_field(in, 3);
	timers->open_ms = (uint32_t)bytes_field(in, 3);
	timers->progress_ms = (uint32_t)bytes_field(in, 3);
}

static void expect(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Expect body = KVP__EXPECT__INIT;
	Kvp__Side sides[2], *side_list[2] = { &sides[0], &sides[1] };
	Kvp__ExpectSender senders[2], *sender_list[2] = { &senders[0], &senders[1] };
	Kvp__ExpectSegment segment = KVP__EXPECT_SEGMENT__INIT, *segments = &segment;
	Kvp__Timers timers;

	body.handle = 1 + bytes_field(in, 4);
	body.room = bytes_field(in, 2);
	body.dest = (uint32_t)bytes_field(in, 2);
	body.pool = 1 + (uint32_t)bytes_field(in, 3);
	body.n_sides = 1 + bytes_field(in, 2) % 2;
	for (size_t i = 0; i < body.n_sides; i++)
		take_side(in, &sides[i]);
	body.sides = side_list;
	body.prefix = bytes_field(in, 2) * PAGE;
	body.end = bytes_field(in, 65);
	segment.id = 5;
	segment.entry = (uint32_t)bytes_field(in, 3);
	segment.bytes = bytes_field(in, 64);
	body.segments = &segments;
	body.n_segments = bytes_take(in) > 200;
	body.meta_from = (int32_t)(bytes_field(in, 3) - 1);
	body.n_senders = 1 + bytes_field(in, 2) % 2;
	for (uint32_t i = 0; i < body.n_senders; i++) {
		kvp__expect_sender__init(&senders[i]);
		senders[i].address = take_address(in);
		senders[i].sender = (uint32_t)bytes_field(in, 2);
		senders[i].n_dests = 1 + (uint32_t)bytes_field(in, 2);
	}
	body.senders = sender_list;
	if (bytes_take(in) > 230) {
		take_timers(in, &timers);
		body.timers = &timers;
	}
	msg.body_case = KVP__CLIENT_MSG__BODY_EXPECT;
	msg.expect = &body;
	send_msg(client, &msg, NULL, 0);
}

static void open_(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Open body = KVP__OPEN__INIT;
	Kvp__Side sides[2], *side_list[2] = { &sides[0], &sides[1] };
	uint8_t mask[1];
	Kvp__Timers timers;

	body.handle = 1 + bytes_field(in, 4);
	body.room = bytes_field(in, 2);
	body.sender = (uint32_t)bytes_field(in, 2);
	body.pool = 1 + (uint32_t)bytes_field(in, 3);
	body.n_sides = 1 + bytes_field(in, 2) % 2;
	for (size_t i = 0; i < body.n_sides; i++) {
		take_side(in, &sides[i]);
		sides[i].list = 0;
	}
	body.sides = side_list;
	mask[0] = bytes_take(in);
	body.entry_mask.data = mask;
	body.entry_mask.len = mask[0] > 128;
	if (bytes_take(in) > 230) {
		take_timers(in, &timers);
		body.timers = &timers;
	}
	msg.body_case = KVP__CLIENT_MSG__BODY_OPEN;
	msg.open = &body;
	send_msg(client, &msg, NULL, 0);
}

static void submit(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Submit body = KVP__SUBMIT__INIT;
	Kvp__ChunkSide sides[2], *side_list[2] = { &sides[0], &sides[1] };
	Kvp__SubmitSegment segment = KVP__SUBMIT_SEGMENT__INIT, *segments = &segment;

	body.handle = 1 + bytes_field(in, 4);
	body.seq = (uint32_t)bytes_field(in, 3);
	body.start = bytes_field(in, 65);
	body.tokens = bytes_field(in, 65);
	body.n_sides = 1 + bytes_field(in, 2) % 2;
	for (size_t i = 0; i < body.n_sides; i++) {
		kvp__chunk_side__init(&sides[i]);
		sides[i].group = (uint32_t)bytes_field(in, 2);
		sides[i].pos0 = bytes_field(in, 16) * PAGE;
		sides[i].list = 1 + (uint32_t)bytes_field(in, 4);
	}
	body.sides = side_list;
	if (bytes_take(in) > 200) {
		body.fence = (uint32_t)bytes_field(in, 4);
		body.fence_word = (uint32_t)bytes_field(in, 8);
		body.fence_value = bytes_field(in, 2);
	}
	segment.id = 5;
	segment.entry = (uint32_t)bytes_field(in, 3);
	segment.bytes = bytes_field(in, 64);
	body.segments = &segments;
	body.n_segments = bytes_take(in) > 200;
	body.last = bytes_take(in) % 2;
	if (body.last && bytes_take(in) > 128) {
		body.meta.data = packet;
		body.meta.len = bytes_field(in, 250) % KVP_MAX_META;
	}
	msg.body_case = KVP__CLIENT_MSG__BODY_SUBMIT;
	msg.submit = &body;
	send_msg(client, &msg, NULL, 0);
}

/* Requests about a room that are no more than a few numbers. */
static void about_room(struct client *client, struct bytes *in)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Recall recall = KVP__RECALL__INIT;
	Kvp__Abort abort_ = KVP__ABORT__INIT;
	Kvp__Renew renew = KVP__RENEW__INIT;
	Kvp__Decline decline = KVP__DECLINE__INIT;
	uint8_t which = bytes_take(in) % 4;

	recall.handle = abort_.handle = 1 + bytes_field(in, 4);
	recall.seq = (uint32_t)bytes_field(in, 4);
	renew.room = decline.room = recall.handle - 1;
	renew.sender = decline.sender = recall.seq;
	renew.address = decline.address = take_address(in);
	renew.lease_ms = (uint32_t)bytes_field(in, 250);
	switch (which) {
	case 0:
		msg.body_case = KVP__CLIENT_MSG__BODY_RECALL;
		msg.recall = &recall;
		break;
	case 1:
		msg.body_case = KVP__CLIENT_MSG__BODY_ABORT;
		msg.abort = &abort_;
		break;
	case 2:
		msg.body_case = KVP__CLIENT_MSG__BODY_RENEW;
		msg.renew = &renew;
		break;
	default:
		msg.body_case = KVP__CLIENT_MSG__BODY_DECLINE;
		msg.decline = &decline;
		break;
	}
	send_msg(client, &msg, NULL, 0);
}

static void inspect(struct client *client, struct bytes *in)
{
	static const char *const whats[] = { "status", "version", "lanes",  "clients", "pools",
					     "peers",  "rooms",   "room",   "waiting", "failures",
					     "pins",   "config",  "nothing" };
	static const char *const args[] = {
		"", "1", "0x0", "label:", "-1", "99999999999999999999"
	};
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;

	body.what = (char *)whats[bytes_take(in) % KVP_ARRAY_SIZE(whats)];
	body.arg = (char *)args[bytes_take(in) % KVP_ARRAY_SIZE(args)];
	body.all = bytes_take(in) % 2;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	send_msg(client, &msg, NULL, 0);
}

static void raw(struct client *client, struct bytes *in)
{
	size_t n = (size_t)bytes_take(in) + (bytes_take(in) > 250 ? 4096u : 0), n_fds;
	const uint8_t *bytes;
	int fds[4];

	n_fds = take_fds(in, fds, 0);
	bytes = bytes_span(in, &n);
	send_raw(client, bytes, n, fds, n_fds);
}

static void reconnect(struct client *client, struct bytes *in)
{
	end(client);
	if (bytes_take(in) > 200)
		turn(true);
	begin(client, bytes_take(in));
}

static void wait_a_little(struct client *client, struct bytes *in)
{
	uint8_t n = bytes_take(in) % 4;

	(void)client;
	for (uint8_t i = 0; i <= n; i++)
		turn(true);
}

typedef void op_fn(struct client *client, struct bytes *in);

static op_fn *const ops[] = {
	raw,        pool_register, pool_register, pool_or_fence, pages,  pages,
	expect,     expect,        open_,         open_,         submit, submit,
	about_room, inspect,       wait_a_little, reconnect,
};

/* ---- the end of an input */

static bool all_answered(void)
{
	for (uint32_t i = 0; i < CLIENTS; i++) {
		if (clients[i].fd >= 0 && !clients[i].ended &&
		    clients[i].answered < clients[i].asked)
			return false;
	}
	return true;
}

#ifdef KVP_TEST
/* A packet may have asked to keep pieces somewhere. */
static void let_go(void)
{
	for (unsigned i = 0; i < KVP_HOLD_N; i++) {
		struct kvp_order_id *order = calloc(1, sizeof(*order));

		REQUIRE(order);
		order->order.type = KVP_ORDER_HOLD;
		order->id = i;
		kvp_lane_order(rig.core.lanes[0], &order->order);
	}
	kvp_rooms_hold_offers(rig.core.rooms, false);
}
#else
static void let_go(void)
{
}
#endif

static void settle(void)
{
	uint64_t give_up = uv_hrtime() + UINT64_C(20000000000);

	let_go();
	while (!all_answered() && uv_hrtime() < give_up)
		turn(true);
	REQUIRE(all_answered());
	for (uint32_t i = 0; i < CLIENTS; i++)
		end(&clients[i]);
	while (!core_is_empty(&rig) && uv_hrtime() < give_up)
		core_turn(&rig, true);
	REQUIRE(core_is_empty(&rig));
}

static void stop(void)
{
	core_stop(&rig);
}

static void setup(void)
{
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	mem_fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	REQUIRE(null_fd >= 0 && mem_fd >= 0 && ftruncate(mem_fd, MEM_BYTES) == 0);
	REQUIRE(pipe2(pipe_fds, O_CLOEXEC) == 0);
	(void)signal(SIGPIPE, SIG_IGN); /* as the daemon does */
	kvp_log_setup(null_fd, KVP_LOG_ERR);
	core_init(&rig);
	rig.config.limits.max_pools = 5;
	rig.config.limits.max_rooms = 6;
	rig.config.limits.max_lists = 4;
	rig.config.limits.max_parked_chunks = 3;
	rig.config.limits.history = 8;
	rig.config.peer.retry_min_ns = rig.config.peer.retry_max_ns = 1000000;
	core_start(&rig);
	REQUIRE(atexit(stop) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct bytes in = { data, size };
	static bool ready;

	if (!ready)
		setup();
	ready = true;
	for (uint32_t i = 0; i < CLIENTS; i++)
		begin(&clients[i], bytes_take(&in));
	for (uint32_t i = 0; i < OPS_MAX && in.left > 0; i++) {
		uint8_t op = bytes_take(&in);

		ops[op % KVP_ARRAY_SIZE(ops)](&clients[op / 128], &in);
		turn(false);
	}
	settle();
	return 0;
}
