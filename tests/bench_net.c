/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How fast payloads travel between two processes over loopback tcp, against a plain socket stream
 * from and to pools of the same size. "landing" gathers rows of seven entries into 1 MiB slots,
 * sends each as one message to be scattered at the other end, with at most WINDOW slots on their
 * way. The other lines send the pool as it lies in messages of one size. Every byte is compared at
 * the end of a mode's first run. Medians of runs in alternation.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/copy.h"
#include "daemon/net.h"
#include "proto/layout.h"
#include "proto/util.h"
#include "tests/support_events.h"
#include "tests/support_rows.h"

#define RUNS 7u
#define SLOT_BYTES_MAX (1u << 20)
#define WINDOW_MAX 256u
#define SOCKET_BYTES (1u << 20)
#define PAGES 1024u

static const struct kvp_net_ops *const ops = &kvp_net_ucx;

enum kind { SOCKET, LANDING, MESSAGES };

struct mode {
	enum kind kind;
	uint32_t bytes;  /* of a message, or of a slot */
	uint32_t window; /* messages on their way */
};

/* Few slots at a time stay in the cache between gather and send. */
static const struct mode modes[] = {
	{ SOCKET, SOCKET_BYTES, 0 }, { LANDING, 1u << 20, 4 }, { LANDING, 1u << 18, 4 },
	{ LANDING, 1u << 16, 16 },   { MESSAGES, 576, 256 },   { MESSAGES, 4032, 256 },
	{ MESSAGES, 36864, 64 },     { MESSAGES, 258048, 16 }, { MESSAGES, 1032192, 4 },
};

/* In front of every payload, and its answer. */
struct hdr {
	uint64_t start; /* LANDING: first token; MESSAGES: offset in the pool */
	uint32_t tokens, rank, mode, slot;
};

static struct rows rows;
static unsigned char *slots;

struct side {
	struct kvp_net *net;
	struct kvp_net_ep *ep;
	uint32_t busy;                 /* slots on their way */
	uint8_t slot_left[WINDOW_MAX]; /* sender: events until it is free: sent, answered */
	int control, stream;
};

static _Noreturn void die(const char *what)
{
	perror(what);
	exit(1);
}

static void piece_make(struct kvp_copy_piece *piece, struct kvp_part *parts, const struct hdr *hdr)
{
	*piece = (struct kvp_copy_piece){
		.leg = &rows.legs[hdr->rank],
		.start = hdr->start,
		.tokens = hdr->tokens,
		.parts = parts,
	};
	(void)kvp_piece_layout(piece->leg, NULL, hdr->start, hdr->tokens, parts, &piece->n_parts);
}

static void slot_event(struct side *side, uint32_t slot)
{
	if (--side->slot_left[slot] == 0)
		side->busy--;
}

static void *on_message(void *arg, const void *data, size_t hdr_bytes, size_t bytes)
{
	struct side *side = arg;
	struct hdr hdr;

	(void)hdr_bytes;
	memcpy(&hdr, data, sizeof(hdr));
	if (bytes == 0)
		slot_event(side, hdr.slot);
	return rows.dst;
}

static void on_data(void *arg, const void *data, size_t hdr_bytes, const void *payload,
		    size_t bytes)
{
	struct side *side = arg;
	struct kvp_part parts[ROWS_ENTRIES];
	struct kvp_copy_piece piece;
	struct hdr hdr;

	(void)hdr_bytes;
	memcpy(&hdr, data, sizeof(hdr));
	if (modes[hdr.mode].kind == MESSAGES) {
		memcpy(rows.dst + hdr.start, payload, bytes);
	} else {
		piece_make(&piece, parts, &hdr);
		piece.pool.maps = &rows.dst_map[hdr.rank];
		piece.pool.sides = &rows.dst_sides[hdr.rank];
		kvp_scatter(&piece, payload);
	}
	if (ops->send(side->net, side->ep, &hdr, sizeof(hdr), NULL, 0, NULL) < 0)
		die("answer");
}

static void on_sent(void *arg, void *req, int status)
{
	if (status < 0)
		die("send");
	slot_event(arg, (uint32_t)((uintptr_t)req - 1));
}

static const struct kvp_net_events events = {
	.message = on_message,
	.data = on_data,
	.lost = events_no_lost,
	.sent = on_sent,
	.failed = events_no_failed,
	.closed = events_no_closed,
};

static void side_open(struct side *side)
{
	struct kvp_net_config config = { .events = &events, .arg = side, .interface = "lo" };
	unsigned char addr[KVP_NET_ADDR_MAX];
	char err[128] = "";
	ssize_t n;

	if (ops->open(&side->net, &config, err, sizeof(err)) < 0) {
		fprintf(stderr, "%s\n", err);
		exit(1);
	}
	n = ops->address(side->net, addr, sizeof(addr));
	if (write(side->control, addr, (size_t)n) != n)
		die("write");
	n = read(side->control, addr, sizeof(addr));
	if (n <= 0 || ops->ep_open(side->net, addr, (size_t)n, 0, side, &side->ep) < 0)
		die("endpoint");
}

/* A tcp stream over loopback; [0] is the sender's end. */
static void stream_open(int fds[2])
{
	struct sockaddr_in addr = { .sin_family = AF_INET,
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(addr);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (bind(listener, (struct sockaddr *)&addr, len) < 0 || listen(listener, 1) < 0 ||
	    getsockname(listener, (struct sockaddr *)&addr, &len) < 0)
		die("listen");
	fds[0] = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fds[0], (struct sockaddr *)&addr, len) < 0)
		die("connect");
	fds[1] = accept(listener, NULL, NULL);
	close(listener);
}

static void stream_receive(int fd)
{
	for (uint64_t at = 0; at < rows.pool_bytes;) {
		ssize_t n = recv(fd, rows.dst + at, KVP_MIN(SOCKET_BYTES, rows.pool_bytes - at), 0);

		if (n <= 0)
			die("recv");
		at += (uint64_t)n;
	}
	if (send(fd, "", 1, 0) != 1)
		die("send");
}

static void stream_send(int fd)
{
	char end;

	for (uint64_t at = 0; at < rows.pool_bytes;) {
		ssize_t n = send(fd, rows.src + at, KVP_MIN(SOCKET_BYTES, rows.pool_bytes - at), 0);

		if (n <= 0)
			die("send");
		at += (uint64_t)n;
	}
	if (recv(fd, &end, 1, 0) != 1)
		die("recv");
}

/* Waits as a lane does: polls a little, then sleeps. */
static void wait_turn(struct side *side)
{
	struct pollfd pfd = { .fd = ops->fd(side->net), .events = POLLIN };

	for (uint32_t i = 0; i < 20; i++)
		if (ops->progress(side->net) > 0)
			return;
	if (ops->arm(side->net) == 0)
		poll(&pfd, 1, 1000);
}

static void send_slot(struct side *side, struct hdr *hdr, const void *payload, size_t bytes)
{
	int r;

	side->slot_left[hdr->slot] = 2;
	side->busy++;
	while ((r = ops->send(side->net, side->ep, hdr, sizeof(*hdr), payload, bytes,
			      (void *)((uintptr_t)hdr->slot + 1))) == -EAGAIN)
		wait_turn(side);
	if (r < 0)
		die("send");
}

static uint32_t slot_wait(struct side *side, uint32_t slot)
{
	(void)ops->progress(side->net);
	while (side->slot_left[slot] > 0)
		wait_turn(side);
	return slot;
}

static void landing_send(struct side *side, uint32_t mode)
{
	uint32_t tokens = kvp_piece_tokens(&rows.legs[0], modes[mode].bytes), n = 0;

	for (uint64_t at = 0; at < rows.tokens; at += tokens) {
		uint32_t left = (uint32_t)KVP_MIN(tokens, rows.tokens - at);

		for (uint32_t i = 0; i < ROWS_RANKS; i++, n++) {
			struct kvp_part parts[ROWS_ENTRIES];
			struct kvp_copy_piece piece;
			struct hdr hdr = {
				.start = at,
				.tokens = left,
				.rank = i,
				.mode = mode,
				.slot = slot_wait(side, n % modes[mode].window),
			};
			unsigned char *slot = slots + (uint64_t)hdr.slot * modes[mode].bytes;
			const struct kvp_part *last;

			piece_make(&piece, parts, &hdr);
			piece.pool.maps = &rows.src;
			piece.pool.sides = &rows.src_side;
			kvp_gather(&piece, slot);
			last = &parts[piece.n_parts - 1];
			send_slot(side, &hdr, slot, last->offset + last->bytes);
		}
	}
}

static void messages_send(struct side *side, uint32_t mode)
{
	uint32_t bytes = modes[mode].bytes, n = 0;

	for (uint64_t at = 0; at < rows.pool_bytes; at += bytes, n++) {
		struct hdr hdr = { .start = at,
				   .mode = mode,
				   .slot = slot_wait(side, n % modes[mode].window) };

		send_slot(side, &hdr, rows.src + at, KVP_MIN(bytes, rows.pool_bytes - at));
	}
}

static double run(struct side *side, uint32_t mode)
{
	double start;

	if (write(side->control, &mode, sizeof(mode)) != sizeof(mode))
		die("write");
	if (read(side->control, &mode, sizeof(mode)) != sizeof(mode))
		die("read");
	start = rows_now();
	switch (modes[mode].kind) {
	case SOCKET:
		stream_send(side->stream);
		break;
	case LANDING:
		landing_send(side, mode);
		break;
	default:
		messages_send(side, mode);
		break;
	}
	while (side->busy > 0)
		wait_turn(side);
	return rows_now() - start;
}

static _Noreturn void receive(struct side *side)
{
	struct pollfd pfds[2] = { { .fd = side->control, .events = POLLIN },
				  { .fd = ops->fd(side->net), .events = POLLIN } };

	for (;;) {
		uint32_t mode, idle = 0;

		while (idle < 20)
			idle = ops->progress(side->net) > 0 ? 0 : idle + 1;
		if (ops->arm(side->net) < 0)
			continue;
		poll(pfds, 2, -1);
		if (!pfds[0].revents)
			continue;
		if (read(side->control, &mode, sizeof(mode)) != sizeof(mode))
			_exit(0);
		if (write(side->control, &mode, sizeof(mode)) != sizeof(mode))
			die("write");
		if (modes[mode].kind == SOCKET)
			stream_receive(side->stream);
	}
}

static void check(uint32_t mode)
{
	if (modes[mode].kind == LANDING) {
		rows_check(&rows, "landing");
	} else if (memcmp(rows.src, rows.dst, rows.pool_bytes) != 0) {
		fprintf(stderr, "wrong bytes in mode %u\n", mode);
		exit(1);
	}
	memset(rows.dst, 0, rows.pool_bytes);
}

int main(void)
{
	double times[KVP_ARRAY_SIZE(modes)][RUNS], base;
	struct side side = { 0 };
	int control[2], stream[2];
	pid_t pid;

	rows_make(&rows, PAGES);
	slots = rows_memory(UINT64_C(16) * SLOT_BYTES_MAX, 3);
	stream_open(stream);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, control) < 0)
		die("socketpair");
	pid = fork();
	side.control = control[pid == 0];
	side.stream = stream[pid == 0];
	close(control[pid != 0]);
	side_open(&side);
	if (pid == 0)
		receive(&side);

	for (uint32_t i = 0; i < RUNS; i++)
		for (uint32_t k = 0; k < KVP_ARRAY_SIZE(modes); k++) {
			times[k][i] = run(&side, k);
			if (i == 0)
				check(k);
		}
	close(side.control);
	waitpid(pid, NULL, 0);

	printf("net: %.0f MiB from pool to pool over %s, median of %u\n",
	       (double)rows.pool_bytes / (1 << 20), ops->describe(side.net), RUNS);
	base = rows_median(times[0], RUNS);
	for (uint32_t k = 0; k < KVP_ARRAY_SIZE(modes); k++) {
		static const char *const names[] = { "plain socket stream", "landing", "messages" };
		double seconds = rows_median(times[k], RUNS);

		printf("  %-20s %8u bytes  %6.2f GB/s  %5.2f of the stream\n", names[modes[k].kind],
		       modes[k].bytes, (double)rows.pool_bytes / seconds / 1e9, base / seconds);
	}
	ops->close(side.net);
	return 0;
}
