/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Older and newer speakers of the client and the peer protocol. tests/recorded has all that went
 * over the sockets of two clients, and between the two daemons, of a transfer by kvpack with
 * protocol 1.0: the room of the README's example, prefill on one daemon, decode on another. Each of
 * the four sides is played from there against what is built now. A record: direction ('c': from the
 * client or the daemon that dials, 'd': the answer), number of descriptors, 32-bit length, bytes.
 */

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/msg.h"
#include "proto/packet.h"
#include "proto/peer_msg.h"
#include "tests/support_faults.h"
#include "tests/support_old.h"

#define RECORDS 32u
#define ROOM 42u
#define PAGE 64u
#define ROW 576u
#define PAGES 32u
#define TOKENS 1000u
#define BYTES ((size_t)PAGES * PAGE * ROW)
#define V1_0 KVP_PROTO_VERSION(1u, 0u)
#define V1_2 KVP_PROTO_VERSION(1u, 2u)

static const uint8_t unknown_field[] = { 0xa0, 0x06, 0x01 }; /* 100, a varint */

struct record {
	char dir;
	uint8_t n_fds;
	uint32_t len;
	uint8_t *data;
};

struct recording {
	struct record records[RECORDS];
	uint32_t n;
};

/* Decode's pages; prefill's are 31, 30, ... */
static const uint32_t dst_pages[] = { 7, 3, 21, 4, 30, 9, 1, 12 };

static void recording_read(struct recording *rec, const char *name)
{
	const char *top = getenv("KVP_TOP");
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/tests/recorded/%s-1.0.bin", top ? top : ".", name);
	file = fopen(path, "re");
	RIG_REQUIRE(file, "%s: %s", path, strerror(errno));
	memset(rec, 0, sizeof(*rec));
	while (rec->n < RECORDS) {
		struct record *r = &rec->records[rec->n];

		if (fread(&r->dir, 1, 1, file) != 1)
			break;
		RIG_REQUIRE(fread(&r->n_fds, 1, 1, file) == 1 && fread(&r->len, 4, 1, file) == 1 &&
			    r->len <= KVP_LIMIT_PACKET);
		r->data = malloc(r->len);
		RIG_REQUIRE(r->data && fread(r->data, 1, r->len, file) == r->len);
		rec->n++;
	}
	(void)fclose(file);
	RIG_REQUIRE(rec->n > 4, "%s", path);
}

/* The i-th record of a direction. */
static struct record *nth(struct recording *rec, char dir, uint32_t i)
{
	uint32_t k;

	for (k = 0; k < rec->n; k++)
		if (rec->records[k].dir == dir && i-- == 0)
			return &rec->records[k];
	return NULL;
}

/* ---- the room's memory ---------------------------------------------------------------------- */

static uint8_t *memory(int *fd)
{
	void *mem;

	RIG_REQUIRE(kvp_memory_create("versions", BYTES, fd, &mem) == 0);
	return mem;
}

static uint8_t *source(int *fd)
{
	uint8_t *mem = memory(fd);
	uint32_t i;

	for (i = 0; i < PAGES * PAGE; i++)
		memset(mem + (size_t)i * ROW, (int)(i * 7 % 251 + 1), ROW);
	return mem;
}

/* Decode's rank owns every second token. */
static void check_rows(const uint8_t *src, const uint8_t *dst)
{
	uint8_t *want = calloc(1, BYTES);
	uint32_t pos;

	RIG_REQUIRE(want);
	for (pos = 1; pos < TOKENS; pos += 2)
		memcpy(want + ((size_t)dst_pages[pos / 128] * PAGE + pos % 128 / 2) * ROW,
		       src + ((size_t)(31 - pos / PAGE) * PAGE + pos % PAGE) * ROW, ROW);
	RIG_REQUIRE(!memcmp(want, dst, BYTES), "rows of an older client");
	free(want);
}

/* ---- old clients, this daemon --------------------------------------------------------------- */

struct talker {
	struct recording rec;
	int fd, mem_fd;
	uint32_t at; /* next of the client's packets */
	bool complete, failed, released;
};

static int dial(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	RIG_REQUIRE(fd >= 0 && connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0,
		    "%s: %s", path, strerror(errno));
	return fd;
}

static void readable(int fd)
{
	struct pollfd pfd = { .fd = fd, .events = POLLIN };

	RIG_REQUIRE(poll(&pfd, 1, FAULT_SECS * 1000) == 1, "nothing comes");
}

/* The next packet of the daemon. */
static Kvp__DaemonMsg *talker_hear(struct talker *talker)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	Kvp__DaemonMsg *msg;
	size_t n_fds = 0;
	int fd = -1;
	ssize_t n;

	readable(talker->fd);
	n = kvp_packet_recv(talker->fd, buf, sizeof(buf), &fd, &n_fds, 1);
	RIG_REQUIRE(n > 0, "the daemon has ended the connection");
	if (n_fds)
		(void)close(fd);
	msg = kvp__daemon_msg__unpack(NULL, (size_t)n, buf);
	RIG_REQUIRE(msg);
	if (msg->body_case == KVP__DAEMON_MSG__BODY_ROOM) {
		talker->complete |= msg->room->complete;
		talker->failed |= msg->room->failed;
		talker->released |= msg->room->released;
	}
	return msg;
}

/* Waits for the answer to a request; the caller's. */
static Kvp__DaemonMsg *talker_answer(struct talker *talker, uint64_t id)
{
	for (;;) {
		Kvp__DaemonMsg *msg = talker_hear(talker);

		if (msg->body_case == KVP__DAEMON_MSG__BODY_REPLY && msg->reply->id == id)
			return msg;
		kvp__daemon_msg__free_unpacked(msg, NULL);
	}
}

/* Plays the client's next packet; it has to be taken. */
static bool talker_play(struct talker *talker)
{
	const struct record *record = nth(&talker->rec, 'c', talker->at++);
	Kvp__DaemonMsg *answer;

	if (!record)
		return false;
	RIG_REQUIRE(kvp_packet_send(talker->fd, record->data, record->len, &talker->mem_fd,
				    record->n_fds) == 0);
	answer = talker_answer(talker, kvp_msg_peek_id(record->data, record->len));
	RIG_REQUIRE(answer->reply->status == KVP__STATUS__STATUS_OK, "packet %u: %s", talker->at,
		    answer->reply->text);
	if (answer->reply->hello)
		RIG_REQUIRE(answer->reply->hello->version == V1_0);
	kvp__daemon_msg__free_unpacked(answer, NULL);
	return true;
}

/* Where the recorded expectation says the other daemon was: ports of both have as many digits. */
static char *recorded_address(const struct recording *rec)
{
	uint32_t i;

	for (i = 0; i < rec->n; i++) {
		char *at = memmem(rec->records[i].data, rec->records[i].len, "127.0.0.1:", 10);

		if (at && rec->records[i].dir == 'c')
			return at;
	}
	rig_die(__FILE__, __LINE__, "an address is recorded", "none");
}

static void old_clients(struct rig *rig)
{
	struct rig_daemon *prefill = rig_daemon_start(rig, "prefill", NULL);
	struct rig_daemon *decode = rig_daemon_start(rig, "decode", NULL);
	struct talker src = { .fd = dial(prefill->socket) }, dst = { .fd = dial(decode->socket) };
	uint8_t *from = source(&src.mem_fd), *to = memory(&dst.mem_fd);

	recording_read(&src.rec, "prefill");
	recording_read(&dst.rec, "decode");
	RIG_REQUIRE(strlen(prefill->address) == 15, "%s", prefill->address);
	memcpy(recorded_address(&dst.rec), prefill->address, 15);
	while (talker_play(&dst))
		;
	while (talker_play(&src))
		;
	while (!dst.released)
		kvp__daemon_msg__free_unpacked(talker_hear(&dst), NULL);
	while (!src.released)
		kvp__daemon_msg__free_unpacked(talker_hear(&src), NULL);
	RIG_REQUIRE(dst.complete && src.complete && !dst.failed && !src.failed);
	check_rows(from, to);
	(void)close(src.fd);
	(void)close(dst.fd);
}

/* ---- this library, an old daemon ------------------------------------------------------------ */

struct old_daemon {
	char path[100];
	struct recording rec;
	int listener;
	bool newer;  /* what it says is that of a newer one */
	bool beyond; /* and instead of its second answer it says what nobody knows */
};

/* A request of the library: as the older one made it, but for the version range of hello. */
static void old_daemon_take(int fd, const struct record *record, bool newer)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	Kvp__ClientMsg *msg;
	int fds[KVP_LIMIT_FDS];
	size_t n_fds = 0;
	ssize_t n;

	readable(fd);
	n = kvp_packet_recv(fd, buf, sizeof(buf), fds, &n_fds, KVP_LIMIT_FDS);
	RIG_REQUIRE(n > 0 && (newer || n_fds == record->n_fds));
	while (n_fds)
		(void)close(fds[--n_fds]);
	msg = kvp__client_msg__unpack(NULL, (size_t)n, buf);
	RIG_REQUIRE(msg);
	if (msg->body_case != KVP__CLIENT_MSG__BODY_HELLO && !newer)
		RIG_REQUIRE((size_t)n == record->len && !memcmp(buf, record->data, record->len),
			    "request %llu is not what an older daemon knows",
			    (unsigned long long)msg->id);
	kvp__client_msg__free_unpacked(msg, NULL);
}

/* A newer one says more in all it says. */
static void newer_daemon_says(int fd, const struct record *record, int pidfd)
{
	Kvp__DaemonMsg *msg = kvp__daemon_msg__unpack(NULL, record->len, record->data);
	uint8_t buf[4096];
	size_t n;

	RIG_REQUIRE(msg);
	if (msg->body_case == KVP__DAEMON_MSG__BODY_REPLY && msg->reply->hello) {
		msg->reply->hello->version = KVP_PROTO_VERSION_MAX;
		msg->reply->hello->features = UINT64_C(1) << 63;
	}
	n = kvp__daemon_msg__get_packed_size(msg);
	RIG_REQUIRE(n + sizeof(unknown_field) <= sizeof(buf));
	kvp__daemon_msg__pack(msg, buf);
	memcpy(buf + n, unknown_field, sizeof(unknown_field));
	RIG_REQUIRE(kvp_packet_send(fd, buf, n + sizeof(unknown_field), &pidfd, record->n_fds) ==
		    0);
	kvp__daemon_msg__free_unpacked(msg, NULL);
}

static void old_daemon_serve(void *arg)
{
	struct old_daemon *old = arg;
	int fd = accept(old->listener, NULL, NULL);
	uint32_t i;

	RIG_REQUIRE(fd >= 0);
	for (i = 0; i < old->rec.n; i++) {
		const struct record *record = &old->rec.records[i];
		int pidfd = -1;

		if (record->dir == 'c') {
			old_daemon_take(fd, record, old->newer);
			continue;
		}
		if (record->n_fds)
			pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
		if (old->beyond && i > 1) {
			static const uint8_t unknown[] = { 0xe2, 0x03, 0x00 }; /* 60, empty */

			RIG_REQUIRE(kvp_packet_send(fd, unknown, sizeof(unknown), NULL, 0) == 0);
			return;
		}
		if (old->newer)
			newer_daemon_says(fd, record, pidfd);
		else
			RIG_REQUIRE(kvp_packet_send(fd, record->data, record->len, &pidfd,
						    record->n_fds) == 0);
	}
}

static pid_t old_daemon_start(struct rig *rig, struct old_daemon *old, const char *name, bool newer)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };

	recording_read(&old->rec, strcmp(name, "beyond") ? name : "prefill");
	old->newer = newer;
	old->beyond = !strcmp(name, "beyond");
	snprintf(old->path, sizeof(old->path), "%s/%s", rig->dir, name);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", old->path);
	old->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	RIG_REQUIRE(old->listener >= 0 &&
		    bind(old->listener, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
		    listen(old->listener, 1) == 0);
	return fault_child(old_daemon_serve, old);
}

static struct kvp_client *library(const char *path, const char *name, int fd, uint32_t *pool)
{
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	struct kvp_entry_desc entry = { .klass = KVP_SHARDED };
	struct kvp_client *client;

	options.socket = path;
	options.name = name;
	RIG_REQUIRE(kvp_client_open(&client, &options) == 0, "%s", kvp_last_error(NULL));
	entry.bytes = BYTES;
	entry.page_stride = PAGE * ROW;
	entry.row_stride = ROW;
	entry.row_bytes = entry.full_bytes = ROW;
	entry.rows_per_page = PAGE;
	entry.n_pages = PAGES;
	desc.entries = &entry;
	desc.n_entries = 1;
	desc.fds = &fd;
	desc.n_fds = 1;
	desc.layout_tag = "example v1";
	desc.tag_bytes = 10;
	RIG_CALL(client, kvp_pool_register(client, &desc, pool));
	return client;
}

static kvp_room_id library_open(struct kvp_client *client, uint32_t pool)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_open open = KVP_OPEN_INIT;
	kvp_room_id id;

	open.room = ROOM;
	open.pool = pool;
	open.sides = &side;
	open.n_sides = 1;
	RIG_CALL(client, kvp_open(client, &open, NULL, NULL, &id));
	return id;
}

static void library_submit(struct kvp_client *client, kvp_room_id id)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	uint32_t pages[16], i;

	for (i = 0; i < 16; i++)
		pages[i] = 31 - i;
	side.pages = pages;
	side.n_pages = 16;
	chunk.tokens = TOKENS;
	chunk.sides = &side;
	chunk.n_sides = 1;
	chunk.last = 1;
	RIG_CALL(client, kvp_submit(client, id, &chunk, NULL, NULL, NULL));
}

static uint32_t offer_ms; /* of expectations; 0: the daemon's */

static kvp_room_id library_expect(struct kvp_client *client, uint32_t pool, const char *address)
{
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 2, .dcp_rank = 1, .interleave = 1 };
	struct kvp_expect_sender sender = { .address = address, .n_dests = 1 };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	kvp_room_id id;

	side.pages = dst_pages;
	side.n_pages = 8;
	expect.room = ROOM;
	expect.pool = pool;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = TOKENS;
	expect.timers.offer_ms = offer_ms;
	RIG_CALL(client, kvp_expect(client, &expect, NULL, NULL, &id));
	return id;
}

/* What it can do that 1.0 could not is refused here, in words, and never sent. */
static void library_ends(struct kvp_client *client, kvp_room_id id, pid_t pid, bool newer)
{
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	RIG_REQUIRE(newer || (kvp_drain(client, 1, "x") == -EREMOTEIO &&
			      kvp_last_status(client) == KVP_STATUS_UNSUPPORTED &&
			      strstr(kvp_last_error(client), "1.0")));
	kvp_client_close(client);
	fault_kill(pid);
}

static void serve_by_hand(struct rig *rig, bool newer)
{
	struct old_daemon prefill, decode;
	pid_t pids[2] = { old_daemon_start(rig, &prefill, "prefill", newer),
			  old_daemon_start(rig, &decode, "decode", newer) };
	struct kvp_client *client;
	char address[16] = "";
	uint32_t pool;
	kvp_room_id id;
	int fd;

	(void)memory(&fd);
	client = library(prefill.path, "prefill", fd, &pool);
	id = library_open(client, pool);
	library_submit(client, id);
	library_ends(client, id, pids[0], newer);
	memcpy(address, recorded_address(&decode.rec), 15);
	client = library(decode.path, "decode", fd, &pool);
	id = library_expect(client, pool, address);
	library_ends(client, id, pids[1], newer);
}

static void old_daemons(struct rig *rig)
{
	serve_by_hand(rig, false);
}

static void newer_daemons(struct rig *rig)
{
	serve_by_hand(rig, true);
}

/* What the agreed version does not have is no answer, and no end without words. */
static void newer_daemon_goes_beyond(struct rig *rig)
{
	struct old_daemon daemon;
	pid_t pid = old_daemon_start(rig, &daemon, "beyond", true);
	struct kvp_client_options options = KVP_CLIENT_OPTIONS_INIT;
	struct kvp_client *client;

	options.socket = daemon.path;
	options.name = "prefill";
	options.timeout_ms = 2000;
	RIG_REQUIRE(kvp_client_open(&client, &options) == 0, "%s", kvp_last_error(NULL));
	RIG_REQUIRE(kvp_drain(client, 1, "x") < 0 && kvp_last_error(client)[0]);
	RIG_REQUIRE((int)kvp_last_status(client) != 0, "%s", kvp_last_error(client));
	kvp_client_close(client);
	fault_kill(pid);
}

/* ---- old peers ------------------------------------------------------------------------------ */

static void frame_send(int fd, const void *data, uint32_t len)
{
	RIG_REQUIRE(send(fd, &len, 4, MSG_NOSIGNAL) == 4 &&
		    send(fd, data, len, MSG_NOSIGNAL) == (ssize_t)len);
}

/* The next frame that is no heartbeat; the caller's. */
static Kvp__PeerMsg *frame_hear(int fd)
{
	static uint8_t buf[256 << 10];
	Kvp__PeerMsg *msg;
	uint32_t len;

	for (;;) {
		readable(fd);
		RIG_REQUIRE(recv(fd, &len, 4, MSG_WAITALL) == 4 && len <= sizeof(buf) &&
			    recv(fd, buf, len, MSG_WAITALL) == (ssize_t)len);
		msg = kvp__peer_msg__unpack(NULL, len, buf);
		RIG_REQUIRE(msg);
		if (msg->body_case != KVP__PEER_MSG__BODY_HEARTBEAT)
			return msg;
		kvp__peer_msg__free_unpacked(msg, NULL);
	}
}

static int tcp_dial(const char *address)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	addr.sin_port = htons((uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10));
	RIG_REQUIRE(fd >= 0 && connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0,
		    "%s: %s", address, strerror(errno));
	return fd;
}

static int tcp_listen(char *address, size_t bytes)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	socklen_t len = sizeof(addr);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	RIG_REQUIRE(fd >= 0 && bind(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
		    listen(fd, 4) == 0 && getsockname(fd, (struct sockaddr *)&addr, &len) == 0);
	snprintf(address, bytes, "127.0.0.1:%u", ntohs(addr.sin_port));
	return fd;
}

/* Decode's daemon is old: it is answered as 1.0, and its offer is accepted. It goes away before the
 * data; then the room moves between daemons of today. */
static void old_decode_peer(struct rig *rig)
{
	struct rig_daemon *prefill = rig_daemon_start(rig, "prefill", NULL);
	struct rig_daemon *decode = rig_daemon_start(rig, "decode", NULL);
	struct kvp_client *src, *dst;
	struct recording rec;
	kvp_room_id sent, expected;
	uint32_t src_pool, dst_pool;
	int fd, from_fd, to_fd;
	uint8_t *from = source(&from_fd), *to = memory(&to_fd);
	Kvp__PeerMsg *msg;

	recording_read(&rec, "peer");
	src = library(prefill->socket, "prefill", from_fd, &src_pool);
	sent = library_open(src, src_pool);
	fd = tcp_dial(prefill->address);
	frame_send(fd, nth(&rec, 'c', 0)->data, nth(&rec, 'c', 0)->len);
	msg = frame_hear(fd);
	RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_HELLO && msg->hello->version == V1_0);
	kvp__peer_msg__free_unpacked(msg, NULL);
	frame_send(fd, nth(&rec, 'c', 1)->data, nth(&rec, 'c', 1)->len);
	msg = frame_hear(fd);
	RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_ACCEPT && msg->accept->leg->room == ROOM);
	kvp__peer_msg__free_unpacked(msg, NULL);
	(void)close(fd);

	dst = library(decode->socket, "decode", to_fd, &dst_pool);
	expected = library_expect(dst, dst_pool, prefill->address);
	library_submit(src, sent);
	RIG_REQUIRE(rig_await(dst, expected, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	RIG_REQUIRE(rig_await(src, sent, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	check_rows(from, to);
	kvp_client_close(src);
	kvp_client_close(dst);
}

/* An old decode offers: a daemon that asks for sums takes it without and counts that; one that must
 * have them refuses it. */
static Kvp__PeerMsg *old_offer(const struct rig_daemon *prefill)
{
	struct recording rec;
	int fd = tcp_dial(prefill->address);

	recording_read(&rec, "peer");
	frame_send(fd, nth(&rec, 'c', 0)->data, nth(&rec, 'c', 0)->len);
	kvp__peer_msg__free_unpacked(frame_hear(fd), NULL);
	frame_send(fd, nth(&rec, 'c', 1)->data, nth(&rec, 'c', 1)->len);
	return frame_hear(fd);
}

static void old_decode_without_sums(struct rig *rig)
{
	static const char *const wants[] = { "[data]\nchecksum = on\n",
					     "[data]\nchecksum = required\n" };
	static const char *const names[] = { "asks", "must" };

	for (unsigned i = 0; i < 2; i++) {
		struct rig_daemon *prefill = rig_daemon_start(rig, names[i], wants[i]);
		struct kvp_client *client;
		uint32_t pool;
		int fd;
		Kvp__PeerMsg *msg;
		char *json;

		(void)source(&fd);
		client = library(prefill->socket, "prefill", fd, &pool);
		(void)library_open(client, pool);
		msg = old_offer(prefill);
		if (i == 0) {
			RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_ACCEPT);
			RIG_CALL(client, kvp_inspect(client, "status", NULL, &json));
			RIG_REQUIRE(strstr(json, "\"unchecked_peer\""), "%s", json);
			free(json);
		} else {
			RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_ABORT);
			RIG_REQUIRE(msg->abort->status == KVP__STATUS__STATUS_UNSUPPORTED);
			RIG_REQUIRE(strstr(msg->abort->text, "data.checksum is required here"),
				    "%s", msg->abort->text);
		}
		kvp__peer_msg__free_unpacked(msg, NULL);
		kvp_client_close(client);
	}
}

/* ---- whole transfers with old peers --------------------------------------------------------- */

#define PIECE_ROWS (TOKENS / 2)
#define PIECE_BYTES ((size_t)PIECE_ROWS * ROW)

/* The piece as it lies in a slot: the rows that decode's rank owns, in the order of positions. */
static uint8_t *piece_of(const uint8_t *src)
{
	uint8_t *piece = malloc(PIECE_BYTES);
	uint32_t pos;

	RIG_REQUIRE(piece);
	for (pos = 1; pos < TOKENS; pos += 2)
		memcpy(piece + (size_t)(pos / 2) * ROW,
		       src + ((size_t)(31 - pos / PAGE) * PAGE + pos % PAGE) * ROW, ROW);
	return piece;
}

static Kvp__PeerMsg *recorded(struct recording *rec, char dir, uint32_t i,
			      Kvp__PeerMsg__BodyCase body)
{
	const struct record *record = nth(rec, dir, i);
	Kvp__PeerMsg *msg = kvp__peer_msg__unpack(NULL, record->len, record->data);

	RIG_REQUIRE(msg && msg->body_case == body);
	return msg;
}

/* As it is, or as a newer speaker has it: with a field that nobody knows. */
static void frame_pack(int fd, Kvp__PeerMsg *msg, bool newer)
{
	uint8_t buf[4096 + KVP_NET_ADDR_MAX];
	size_t n = kvp__peer_msg__get_packed_size(msg);

	RIG_REQUIRE(n + sizeof(unknown_field) <= sizeof(buf));
	kvp__peer_msg__pack(msg, buf);
	memcpy(buf + n, unknown_field, sizeof(unknown_field));
	frame_send(fd, buf, (uint32_t)(n + (newer ? sizeof(unknown_field) : 0)));
}

/* The recorded hello; of a newer speaker with its range, and features that nobody knows. */
static void hello_send(int fd, struct recording *rec, char dir, bool newer)
{
	Kvp__PeerMsg *msg = recorded(rec, dir, 0, KVP__PEER_MSG__BODY_HELLO);

	if (newer) {
		msg->hello->version_max = V1_2;
		msg->hello->features = UINT64_C(1) << 63;
		if (dir == 'd')
			msg->hello->version = KVP_PROTO_VERSION_MAX;
	}
	frame_pack(fd, msg, newer);
	kvp__peer_msg__free_unpacked(msg, NULL);
}

/* The recorded message, with the address of a lane that lives now in place of the recorded one. */
static void with_lane(ProtobufCBinaryData *address, struct old_lane *lane)
{
	free(address->data);
	address->data = malloc(lane->address_bytes);
	RIG_REQUIRE(address->data);
	address->len = lane->address_bytes;
	memcpy(address->data, lane->address, lane->address_bytes);
}

/* Keeps the session alive: daemons beat their hearts since the first one. */
static void beat(int fd, bool newer)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Heartbeat body = KVP__HEARTBEAT__INIT;

	msg.body_case = KVP__PEER_MSG__BODY_HEARTBEAT;
	msg.heartbeat = &body;
	frame_pack(fd, &msg, newer);
}

static void hear_leg(int fd, Kvp__PeerMsg__BodyCase body)
{
	Kvp__PeerMsg *msg = frame_hear(fd);

	RIG_REQUIRE(msg->body_case == body, "%d, not %d: %s", (int)msg->body_case, (int)body,
		    msg->body_case == KVP__PEER_MSG__BODY_ABORT ? msg->abort->text : "");
	kvp__peer_msg__free_unpacked(msg, NULL);
}

/* Whoever is played by hand may be slow. */
static struct rig_daemon *by_hand_daemon(struct rig *rig, const char *name)
{
	rig->timing = "lost_after = 20s\n";
	return rig_daemon_start(rig, name, NULL);
}

/* What it sends with the want is not used: it grants, in the form of 1.0, and gets the rows. */
static void old_decode_lands(struct old_lane *lane, const uint8_t *from)
{
	union kvp_wire_msg want = old_lane_hear(lane, KVP_WIRE_WANT);
	struct kvp_wire_grant grant = { .head = kvp_wire_head(KVP_WIRE_GRANT),
					.cookie = want.want.cookie,
					.token = 4711,
					.slot_bytes = 1 << 20,
					.mode = KVP_WIRE_LANDING };
	struct kvp_wire_landed landed = { .head = kvp_wire_head(KVP_WIRE_LANDED),
					  .cookie = want.want.cookie };
	uint8_t *piece = piece_of(from);

	RIG_REQUIRE(want.want.bytes == PIECE_BYTES && want.want.pieces == 1 && want.want.last == 1);
	old_lane_say(lane, &grant, OLD_GRANT_BYTES, NULL, 0);
	old_lane_land(lane);
	RIG_REQUIRE(lane->payload_bytes == PIECE_BYTES &&
			    !memcmp(lane->payload, piece, PIECE_BYTES),
		    "rows for an older peer");
	old_lane_say(lane, &landed, sizeof(landed), NULL, 0);
	free(piece);
}

static void decode_whole(struct rig *rig, bool newer)
{
	struct rig_daemon *prefill = by_hand_daemon(rig, "prefill");
	struct kvp_client *client;
	struct recording rec;
	struct old_lane lane;
	Kvp__PeerMsg *msg, *offer;
	uint32_t pool;
	kvp_room_id id;
	int fd, from_fd;
	uint8_t *from = source(&from_fd);

	recording_read(&rec, "peer");
	old_lane_open(&lane);
	client = library(prefill->socket, "prefill", from_fd, &pool);
	id = library_open(client, pool);
	library_submit(client, id);
	fd = tcp_dial(prefill->address);
	hello_send(fd, &rec, 'c', newer);
	hear_leg(fd, KVP__PEER_MSG__BODY_HELLO);
	offer = recorded(&rec, 'c', 1, KVP__PEER_MSG__BODY_OFFER);
	with_lane(&offer->offer->lane_address, &lane);
	frame_pack(fd, offer, newer);
	kvp__peer_msg__free_unpacked(offer, NULL);
	msg = frame_hear(fd);
	RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_ACCEPT);
	old_lane_connect(&lane, msg->accept->lane_address.data, msg->accept->lane_address.len);
	kvp__peer_msg__free_unpacked(msg, NULL);
	beat(fd, newer);
	frame_send(fd, nth(&rec, 'c', 2)->data, nth(&rec, 'c', 2)->len); /* go */
	old_decode_lands(&lane, from);
	frame_send(fd, nth(&rec, 'c', 3)->data, nth(&rec, 'c', 3)->len); /* end */
	RIG_REQUIRE(rig_await(client, id, KVP_WAIT_RELEASED, FAULT_SECS).complete);
	hear_leg(fd, KVP__PEER_MSG__BODY_DRAINED);
	(void)close(fd);
	old_lane_close(&lane);
	kvp_client_close(client);
}

/* It wants as 1.0 did, without the first piece, and knows no grant but that of 72 bytes. */
static void old_prefill_sends(struct old_lane *lane, uint64_t generation, const uint8_t *from)
{
	struct kvp_wire_want want = { .head = kvp_wire_head(KVP_WIRE_WANT),
				      .generation = generation,
				      .cookie = 815,
				      .tokens = TOKENS,
				      .entry_set = { 1 },
				      .pieces = 1,
				      .last = 1,
				      .kind = KVP_WIRE_ROWS,
				      .bytes = PIECE_BYTES };
	struct kvp_wire_data data = { .head = kvp_wire_head(KVP_WIRE_DATA), .total = PIECE_BYTES };
	uint8_t *piece = piece_of(from);
	union kvp_wire_msg msg;

	old_lane_say(lane, &want, sizeof(want), NULL, 0);
	msg = old_lane_hear(lane, KVP_WIRE_GRANT);
	RIG_REQUIRE(msg.grant.cookie == want.cookie && msg.grant.mode == KVP_WIRE_LANDING);
	data.token = msg.grant.token;
	data.slot = msg.grant.slot;
	old_lane_say(lane, &data, sizeof(data), piece, PIECE_BYTES);
	RIG_REQUIRE(old_lane_hear(lane, KVP_WIRE_LANDED).landed.cookie == want.cookie);
	free(piece);
}

/* A room of decode's daemon, whose prefill is played. */
struct prefill {
	struct kvp_client *client; /* decode's */
	kvp_room_id id;
	uint8_t *to; /* decode's memory */
	int listener, fd;
	uint64_t generation;
	struct old_lane lane;
};

/* Accepts what is offered: with its lane, or with that of the recording, which is gone. */
static void prefill_accepts(struct prefill *prefill, struct recording *rec, bool newer,
			    bool has_lane)
{
	Kvp__PeerMsg *msg = frame_hear(prefill->fd);
	Kvp__PeerMsg *accept_msg = recorded(rec, 'd', 1, KVP__PEER_MSG__BODY_ACCEPT);

	RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_OFFER && msg->offer->leg->room == ROOM);
	prefill->generation = msg->offer->leg->generation;
	accept_msg->accept->leg->generation = prefill->generation;
	if (has_lane) {
		old_lane_open(&prefill->lane);
		old_lane_connect(&prefill->lane, msg->offer->lane_address.data,
				 msg->offer->lane_address.len);
		with_lane(&accept_msg->accept->lane_address, &prefill->lane);
	}
	frame_pack(prefill->fd, accept_msg, newer);
	kvp__peer_msg__free_unpacked(msg, NULL);
	kvp__peer_msg__free_unpacked(accept_msg, NULL);
}

/* As far as the go. */
static void prefill_begin(struct prefill *prefill, struct rig *rig, bool newer, bool has_lane)
{
	struct rig_daemon *decode = by_hand_daemon(rig, "decode");
	struct recording rec;
	char address[64];
	Kvp__PeerMsg *msg;
	uint32_t pool;
	int to_fd;

	memset(prefill, 0, sizeof(*prefill));
	recording_read(&rec, "peer");
	prefill->listener = tcp_listen(address, sizeof(address));
	prefill->to = memory(&to_fd);
	prefill->client = library(decode->socket, "decode", to_fd, &pool);
	prefill->id = library_expect(prefill->client, pool, address);
	prefill->fd = accept(prefill->listener, NULL, NULL);
	RIG_REQUIRE(prefill->fd >= 0);
	msg = frame_hear(prefill->fd);
	RIG_REQUIRE(msg->body_case == KVP__PEER_MSG__BODY_HELLO && msg->hello->version_min <= V1_0);
	kvp__peer_msg__free_unpacked(msg, NULL);
	hello_send(prefill->fd, &rec, 'd', newer);
	prefill_accepts(prefill, &rec, newer, has_lane);
	beat(prefill->fd, newer);
	hear_leg(prefill->fd, KVP__PEER_MSG__BODY_GO);
}

static struct kvp_room_state prefill_end(struct prefill *prefill, bool has_lane)
{
	struct kvp_room_state state =
		rig_await(prefill->client, prefill->id, KVP_WAIT_RELEASED, FAULT_SECS);

	(void)close(prefill->fd);
	(void)close(prefill->listener);
	if (has_lane)
		old_lane_close(&prefill->lane);
	return state;
}

static void prefill_whole(struct rig *rig, bool newer)
{
	struct prefill prefill;
	int from_fd;
	uint8_t *from = source(&from_fd);

	prefill_begin(&prefill, rig, newer, true);
	old_prefill_sends(&prefill.lane, prefill.generation, from);
	hear_leg(prefill.fd, KVP__PEER_MSG__BODY_END);
	RIG_REQUIRE(prefill_end(&prefill, true).complete);
	check_rows(from, prefill.to);
	kvp_client_close(prefill.client);
}

/* The offer says nothing that it needs to know more for. Its data path is gone with it, so the room
 * fails then, and is released. */
static void old_prefill_peer(struct rig *rig)
{
	struct prefill prefill;

	prefill_begin(&prefill, rig, false, false);
	RIG_REQUIRE(shutdown(prefill.fd, SHUT_RDWR) == 0);
	RIG_REQUIRE(prefill_end(&prefill, false).retry);
	kvp_client_close(prefill.client);
}

static void old_decode_whole(struct rig *rig)
{
	decode_whole(rig, false);
}

static void old_prefill_whole(struct rig *rig)
{
	prefill_whole(rig, false);
}

/* ---- newer ones ----------------------------------------------------------------------------- */

/* A hello with that range, unknown features and an unknown field; returns the answer. */
static Kvp__DaemonMsg *newer_hello(struct talker *talker, uint32_t min, uint32_t max)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	uint8_t buf[256];
	size_t n;

	hello.version_min = min;
	hello.version_max = max;
	hello.features = UINT64_C(1) << 63;
	hello.name = (char *)"newer";
	hello.pid = (uint32_t)getpid();
	msg.id = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	n = kvp__client_msg__pack(&msg, buf);
	memcpy(buf + n, unknown_field, sizeof(unknown_field));
	RIG_REQUIRE(kvp_packet_send(talker->fd, buf, n + sizeof(unknown_field), NULL, 0) == 0);
	return talker_answer(talker, 1);
}

static void newer_client(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "prefill", NULL);
	static const uint8_t unknown_request[] = { 0x08, 0x02, 0xe2, 0x03, 0x00 }; /* 60, empty */
	struct talker talker = { .fd = dial(daemon->socket) };
	Kvp__DaemonMsg *answer = newer_hello(&talker, V1_0, V1_2);

	RIG_REQUIRE(answer->reply->status == KVP__STATUS__STATUS_OK &&
			    answer->reply->hello->version == KVP_PROTO_VERSION_MAX,
		    "%s", answer->reply->text);
	kvp__daemon_msg__free_unpacked(answer, NULL);
	RIG_REQUIRE(kvp_packet_send(talker.fd, unknown_request, sizeof(unknown_request), NULL, 0) ==
		    0);
	answer = talker_answer(&talker, 2);
	RIG_REQUIRE(answer->reply->status == KVP__STATUS__STATUS_INVALID && answer->reply->text[0]);
	kvp__daemon_msg__free_unpacked(answer, NULL);
	(void)close(talker.fd);

	talker.fd = dial(daemon->socket);
	answer = newer_hello(&talker, V1_2, V1_2);
	RIG_REQUIRE(answer->reply->status == KVP__STATUS__STATUS_VERSION &&
			    strstr(answer->reply->text, "1.0 to 1.1") &&
			    strstr(answer->reply->text, "1.2 to 1.2"),
		    "%s", answer->reply->text);
	kvp__daemon_msg__free_unpacked(answer, NULL);
	(void)close(talker.fd);
}

static Kvp__PeerMsg *newer_peer_hello(int fd, struct recording *rec, uint32_t min, uint32_t max)
{
	Kvp__PeerMsg *msg =
		kvp__peer_msg__unpack(NULL, nth(rec, 'c', 0)->len, nth(rec, 'c', 0)->data);
	uint8_t buf[512];
	size_t n;

	RIG_REQUIRE(msg && msg->body_case == KVP__PEER_MSG__BODY_HELLO);
	msg->hello->version_min = min;
	msg->hello->version_max = max;
	msg->hello->features = UINT64_C(1) << 63;
	n = kvp__peer_msg__pack(msg, buf);
	memcpy(buf + n, unknown_field, sizeof(unknown_field));
	frame_send(fd, buf, (uint32_t)(n + sizeof(unknown_field)));
	kvp__peer_msg__free_unpacked(msg, NULL);
	return frame_hear(fd);
}

static void newer_peer(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "prefill", NULL);
	struct recording rec;
	Kvp__PeerMsg *msg;
	int fd = tcp_dial(daemon->address);

	recording_read(&rec, "peer");
	msg = newer_peer_hello(fd, &rec, V1_0, V1_2);
	RIG_REQUIRE(msg->hello && msg->hello->version == KVP_PROTO_VERSION_MAX);
	kvp__peer_msg__free_unpacked(msg, NULL);
	(void)close(fd);
	fd = tcp_dial(daemon->address);
	msg = newer_peer_hello(fd, &rec, V1_2, V1_2);
	RIG_REQUIRE(msg->hello && msg->hello->version == 0 &&
			    msg->hello->status == KVP__STATUS__STATUS_VERSION &&
			    strstr(msg->hello->text, "1.0 to 1.1") &&
			    strstr(msg->hello->text, "1.2 to 1.2"),
		    "%s", msg->hello ? msg->hello->text : "");
	kvp__peer_msg__free_unpacked(msg, NULL);
	(void)close(fd);
}

/* Newer ones that are as careful as they have to be: everything comes through. */
static void newer_decode_whole(struct rig *rig)
{
	decode_whole(rig, true);
}

static void newer_prefill_whole(struct rig *rig)
{
	prefill_whole(rig, true);
}

/* The prefill daemon that we dial has no version for us, or takes one that we have not named: the
 * room is told so when its time is over. Nothing is taken for a version of ours. */
static void newer_prefill_refuses(struct rig *rig)
{
	static const char *const words[] = { "1.2 to 1.2", "chose version 1.2, of 1.0 to 1.1" };
	struct rig_daemon *decode = by_hand_daemon(rig, "decode");
	char address[64];
	int listener, to_fd;
	struct kvp_client *client;
	struct recording rec;
	uint32_t pool;

	(void)memory(&to_fd);
	recording_read(&rec, "peer");
	client = library(decode->socket, "decode", to_fd, &pool);
	offer_ms = 1000;
	for (uint32_t i = 0; i < 2; i++) {
		Kvp__PeerMsg *msg = recorded(&rec, 'd', 0, KVP__PEER_MSG__BODY_HELLO);
		struct kvp_room_state state;
		kvp_room_id id;
		int fd;

		listener = tcp_listen(address, sizeof(address));
		id = library_expect(client, pool, address);
		fd = accept(listener, NULL, NULL);

		RIG_REQUIRE(fd >= 0);
		hear_leg(fd, KVP__PEER_MSG__BODY_HELLO);
		msg->hello->version_min = msg->hello->version_max = V1_2;
		msg->hello->version = i == 0 ? 0 : V1_2;
		if (i == 0) {
			msg->hello->status = KVP__STATUS__STATUS_VERSION;
			msg->hello->text = strdup("this daemon speaks 1.2 to 1.2, the other 1.0 "
						  "to 1.1");
		}
		frame_pack(fd, msg, true);
		kvp__peer_msg__free_unpacked(msg, NULL);
		state = rig_await(client, id, KVP_WAIT_RELEASED, FAULT_SECS);
		RIG_REQUIRE(state.failed && !state.complete && strstr(state.reason, words[i]),
			    "%s: %s", kvp_status_name(state.status), state.reason);
		kvp_room_forget(client, id);
		(void)close(fd);
		(void)close(listener);
	}
	kvp_client_close(client);
}

/* A message that the agreed version does not have ends that session, with its room and a reason,
 * and nothing else: the daemon goes on to serve. */
static void newer_prefill_goes_beyond(struct rig *rig)
{
	static const uint8_t unknown_message[] = { 0xe2, 0x03, 0x00 }; /* 60, empty */
	struct kvp_room_state state;
	struct prefill prefill;

	prefill_begin(&prefill, rig, true, true);
	frame_send(prefill.fd, unknown_message, sizeof(unknown_message));
	state = prefill_end(&prefill, true);
	RIG_REQUIRE(state.failed && !state.complete && state.reason[0], "%s",
		    kvp_status_name(state.status));
	kvp_client_close(prefill.client);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "old_clients", old_clients },
		{ "old_daemons", old_daemons },
		{ "old_decode_peer", old_decode_peer },
		{ "old_prefill_peer", old_prefill_peer },
		{ "old_decode_without_sums", old_decode_without_sums },
		{ "old_decode_whole", old_decode_whole },
		{ "old_prefill_whole", old_prefill_whole },
		{ "newer_daemons", newer_daemons },
		{ "newer_daemon_goes_beyond", newer_daemon_goes_beyond },
		{ "newer_decode_whole", newer_decode_whole },
		{ "newer_prefill_whole", newer_prefill_whole },
		{ "newer_prefill_refuses", newer_prefill_refuses },
		{ "newer_prefill_goes_beyond", newer_prefill_goes_beyond },
		{ "newer_client", newer_client },
		{ "newer_peer", newer_peer },
	};

	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
