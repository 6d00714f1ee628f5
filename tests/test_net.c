/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/net.h"
#include "daemon/net_ucx.h"
#include "proto/util.h"
#include "tests/support_clock.h"
#include "tests/support_events.h"

static const struct kvp_net_ops *const ops = &kvp_net_ucx;

#define BIG (4u << 20)

struct hdr {
	uint64_t seq;
	uint64_t bytes;
	uint32_t drop; /* the receiver refuses it */
	uint32_t salt;
};

/* One net and what it saw. */
struct node {
	struct kvp_net *net;
	struct kvp_net_ep *ep;
	unsigned char addr[KVP_NET_ADDR_MAX];
	size_t addr_bytes;
	uint64_t next_seq, messages, data, lost, bad;
	uint64_t sent_ok, sent_bad, failed, closed;
	bool echo; /* answers every message with one of the same header */
	unsigned char *place;
};

static uint64_t now_ms(void)
{
	return support_clock_ns() / 1000000;
}

static void *on_message(void *arg, const void *data, size_t hdr_bytes, size_t bytes)
{
	struct node *node = arg;
	struct hdr hdr;

	if (hdr_bytes != sizeof(hdr) || (uintptr_t)data % 16 != 0) {
		node->bad++;
		return NULL;
	}
	memcpy(&hdr, data, sizeof(hdr));
	if (hdr.bytes != bytes || hdr.seq != node->next_seq)
		node->bad++;
	node->next_seq = hdr.seq + 1;
	node->messages++;
	if (node->echo && ops->send(node->net, node->ep, &hdr, sizeof(hdr), NULL, 0, NULL) < 0)
		node->bad++;
	return hdr.drop ? NULL : node->place;
}

static void on_data(void *arg, const void *data, size_t hdr_bytes, const void *payload,
		    size_t bytes)
{
	struct node *node = arg;
	struct hdr hdr;

	(void)hdr_bytes;
	memcpy(&hdr, data, sizeof(hdr));
	node->data++;
	if (hdr.bytes != bytes || !events_match(payload, bytes, hdr.seq))
		node->bad++;
}

static void on_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place)
{
	struct node *node = arg;

	(void)hdr;
	(void)hdr_bytes;
	node->lost++;
	if (place != node->place)
		node->bad++;
}

static void on_sent(void *arg, void *req, int status)
{
	struct node *node = arg;

	(void)req;
	if (status == 0)
		node->sent_ok++;
	else
		node->sent_bad++;
}

static void on_failed(void *arg, struct kvp_net_ep *ep, int status)
{
	struct node *node = arg;

	node->failed++;
	if (ep != node->ep || status >= 0)
		node->bad++;
}

static void on_closed(void *arg, void *ep_arg)
{
	struct node *node = arg;

	node->closed++;
	if (ep_arg != node)
		node->bad++;
	node->ep = NULL;
}

static const struct kvp_net_events events = {
	.message = on_message,
	.data = on_data,
	.lost = on_lost,
	.sent = on_sent,
	.failed = on_failed,
	.closed = on_closed,
};

static void node_open(struct node *node)
{
	struct kvp_net_config config = { .events = &events, .arg = node, .interface = "lo" };
	char err[128] = "";
	int r;

	*node = (struct node){ .place = malloc(BIG) };
	r = ops->open(&node->net, &config, err, sizeof(err));
	cr_assert_eq(r, 0, "%d %s", r, err);
	r = ops->address(node->net, node->addr, sizeof(node->addr));
	cr_assert_gt(r, 0);
	node->addr_bytes = (size_t)r;
}

static void node_close(struct node *node)
{
	ops->close(node->net);
	free(node->place);
}

static void node_connect(struct node *node, const struct node *to)
{
	cr_assert_eq(ops->ep_open(node->net, to->addr, to->addr_bytes, 0, node, &node->ep), 0);
	cr_assert_eq(ops->ep_arg(node->ep), node);
}

/* Turns both nets until the counter reaches `want`, at most 20 s. */
static void turn_until(struct node *a, struct node *b, const uint64_t *counter, uint64_t want)
{
	uint64_t until = now_ms() + 20000;

	while (*counter < want && now_ms() < until) {
		ops->progress(a->net);
		if (b)
			ops->progress(b->net);
	}
	cr_assert_geq(*counter, want, "waited for %lu, got %lu", want, *counter);
}

static int send_one(struct node *node, uint64_t seq, const void *payload, size_t bytes)
{
	struct hdr hdr = { .seq = seq, .bytes = bytes };

	return ops->send(node->net, node->ep, &hdr, sizeof(hdr), payload, bytes,
			 bytes ? node : NULL);
}

static int n_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

/* Swaps addresses with the other process. */
static void exchange(int fd, struct node *node, struct node *peer)
{
	cr_assert_eq(write(fd, node->addr, node->addr_bytes), (ssize_t)node->addr_bytes);
	peer->addr_bytes = (size_t)read(fd, peer->addr, sizeof(peer->addr));
	cr_assert_gt((ssize_t)peer->addr_bytes, 0);
}

/* A second process that answers messages, sleeping in poll when there is nothing to do. */
static _Noreturn void echo_process(int fd)
{
	struct node node, peer;

	alarm(60);
	node_open(&node);
	node.echo = true;
	exchange(fd, &node, &peer);
	node_connect(&node, &peer);
	for (;;) {
		struct pollfd pfd = { .fd = ops->fd(node.net), .events = POLLIN };

		if (ops->progress(node.net) > 0 || ops->arm(node.net) == -EBUSY)
			continue;
		poll(&pfd, 1, -1);
	}
}

static pid_t echo_start(struct node *node, struct node *peer)
{
	int fds[2];
	pid_t pid;

	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds), 0);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0)
		echo_process(fds[1]);
	node_open(node);
	exchange(fds[0], node, peer);
	close(fds[0]);
	close(fds[1]);
	node_connect(node, peer);
	return pid;
}

static void kill_and_reap(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

Test(net, keeps_order_and_bytes_of_every_size)
{
	static const size_t sizes[] = { 0,       1,       575,     576,     577,     4096,
					8192,    36864,   65535,   65536,   65537,   262144,
					1032192, 1048576, 1048577, 2097152, BIG - 1, BIG };
	unsigned char *payload[KVP_ARRAY_SIZE(sizes)];
	const uint64_t n = KVP_ARRAY_SIZE(sizes);
	struct node a, b;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	for (uint64_t i = 0; i < n; i++) {
		payload[i] = malloc(sizes[i] + 1);
		events_fill(payload[i], sizes[i], i);
		cr_assert_eq(send_one(&a, i, payload[i], sizes[i]), 0);
		if (sizes[i])
			memset(payload[i] + sizes[i], 0, 1);
	}
	cr_assert_eq(a.sent_ok, 0); /* never inside send() */
	turn_until(&a, &b, &b.data, n - 1);
	turn_until(&a, &b, &a.sent_ok, n - 1);
	cr_assert_eq(b.messages, n);
	cr_assert_eq(b.bad, 0);
	cr_assert_eq(ops->stats(a.net)->sent_messages, n);
	cr_assert_eq(ops->stats(b.net)->recv_messages, n);
	cr_assert_eq(ops->stats(a.net)->sent_bytes, ops->stats(b.net)->recv_bytes);
	cr_assert_eq(ops->stats(a.net)->pending, 0);
	cr_assert_str_eq(ops->describe(a.net), "tcp lo 127.0.0.1");
	for (uint64_t i = 0; i < n; i++)
		free(payload[i]);
	node_close(&a);
	node_close(&b);
}

Test(net, header_belongs_to_the_caller_again)
{
	struct node a, b;
	struct hdr hdr;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	for (uint64_t i = 0; i < 200; i++) {
		hdr = (struct hdr){ .seq = i };
		cr_assert_eq(ops->send(a.net, a.ep, &hdr, sizeof(hdr), NULL, 0, NULL), 0);
		memset(&hdr, 0xee, sizeof(hdr));
	}
	turn_until(&a, &b, &b.messages, 200);
	cr_assert_eq(b.bad, 0);
	node_close(&a);
	node_close(&b);
}

Test(net, answers_out_of_a_callback)
{
	struct node a, b;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	node_connect(&b, &a);
	b.echo = true;
	for (uint64_t i = 0; i < 100; i++)
		cr_assert_eq(send_one(&a, i, NULL, 0), 0);
	turn_until(&a, &b, &a.messages, 100);
	cr_assert_eq(a.bad + b.bad, 0);
	node_close(&a);
	node_close(&b);
}

Test(net, drops_what_the_lane_refuses)
{
	unsigned char *payload = malloc(BIG);
	struct node a, b;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	for (uint64_t i = 0; i < 20; i++) {
		struct hdr hdr = { .seq = i, .bytes = i * 100000, .drop = i % 2 };

		events_fill(payload, hdr.bytes, i);
		cr_assert_eq(ops->send(a.net, a.ep, &hdr, sizeof(hdr), payload, hdr.bytes, &a), 0);
		turn_until(&a, &b, &b.messages, i + 1);
		turn_until(&a, &b, &a.sent_ok, i + 1);
	}
	cr_assert_eq(b.bad, 0);
	cr_assert_eq(b.data, 9); /* of the even ones the first is empty */
	cr_assert_eq(ops->stats(b.net)->dropped, 10);
	free(payload);
	node_close(&a);
	node_close(&b);
}

/* Sends past our own checks, as a peer with other software would. */
static void send_raw(struct node *node, const void *hdr, size_t hdr_bytes, void *payload,
		     size_t bytes, uint32_t flags)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = flags,
	};
	ucs_status_ptr_t request = ucp_am_send_nbx(node->ep->ucp, KVP_UCX_AM_ID, hdr, hdr_bytes,
						   payload, bytes, &param);

	cr_assert(!UCS_PTR_IS_ERR(request));
	if (request)
		ucp_request_free(request); /* UCP ends it by itself */
}

Test(net, drops_malformed_headers)
{
	static unsigned char junk[1024];
	struct hdr hdr = { .seq = 0 };
	struct node a, b;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	cr_assert_eq(ops->send(a.net, a.ep, &hdr, 0, NULL, 0, NULL), -EINVAL);
	cr_assert_eq(ops->send(a.net, a.ep, junk, KVP_NET_HDR_MAX + 1, NULL, 0, NULL), -EINVAL);
	cr_assert_eq(ops->send(a.net, a.ep, &hdr, sizeof(hdr), NULL, 5, &a), -EINVAL);
	cr_assert_eq(ops->send(a.net, a.ep, &hdr, sizeof(hdr), junk, 5, NULL), -EINVAL);
	send_raw(&a, NULL, 0, junk, 100, 0);
	send_raw(&a, junk, KVP_NET_HDR_MAX + 1, junk, 100, 0);
	send_raw(&a, junk, 1000, NULL, 0, 0);
	turn_until(&a, &b, &b.net->stats.dropped, 3);
	cr_assert_eq(b.messages + b.bad, 0);
	cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
	turn_until(&a, &b, &b.messages, 1);
	node_close(&a);
	node_close(&b);
}

Test(net, takes_a_rendezvous)
{
	struct hdr hdr = { .bytes = BIG };
	unsigned char *payload = malloc(BIG);
	struct node a, b;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	for (hdr.seq = 0; hdr.seq < 6; hdr.seq++) {
		uint64_t seen = b.data + ops->stats(b.net)->dropped;

		hdr.drop = hdr.seq % 3 == 2;
		events_fill(payload, BIG, hdr.seq);
		send_raw(&a, &hdr, sizeof(hdr), payload, BIG, UCP_AM_SEND_FLAG_RNDV);
		while (b.data + ops->stats(b.net)->dropped == seen) {
			ops->progress(a.net);
			ops->progress(b.net);
		}
	}
	cr_assert_eq(b.data, 4);
	cr_assert_eq(b.lost + b.bad, 0);
	node_close(&a);
	node_close(&b);
	free(payload);
}

Test(net, bounds_what_one_peer_holds)
{
	size_t bytes = 1 << 20;
	unsigned char *payload = malloc(bytes);
	struct node a, b;
	uint64_t taken = 0;
	int r;

	node_open(&a);
	node_open(&b);
	node_connect(&a, &b);
	memset(payload, 1, bytes);
	while ((r = send_one(&a, taken, payload, bytes)) == 0)
		taken++;
	cr_assert_eq(r, -EAGAIN);
	cr_assert_eq(taken, KVP_UCX_SENDS_PER_EP);
	cr_assert_eq(ops->stats(a.net)->pending, taken);
	turn_until(&a, &b, &a.sent_ok, 1);
	cr_assert_eq(send_one(&a, taken, NULL, 0), 0);
	turn_until(&a, &b, &a.sent_ok, taken);
	cr_assert_eq(a.sent_ok, taken);
	cr_assert_eq(ops->stats(a.net)->pending, 0);
	node_close(&a);
	node_close(&b);
	free(payload);
}

Test(net, refuses_garbage_addresses)
{
	unsigned char addr[KVP_NET_ADDR_MAX + 16] = { 0 };
	struct kvp_net_ep *ep = NULL;
	struct node a, b;

	node_open(&a);
	node_open(&b);
	cr_assert_eq(ops->ep_open(a.net, NULL, 0, 0, &a, &ep), -EPROTO);
	for (size_t bytes = 0; bytes < sizeof(addr); bytes += 97)
		cr_assert_eq(ops->ep_open(a.net, addr, bytes, 0, &a, &ep), -EPROTO);
	for (size_t bytes = 0; bytes < b.addr_bytes; bytes++)
		cr_assert_eq(ops->ep_open(a.net, b.addr, bytes, 0, &a, &ep), -EPROTO);
	for (size_t bit = 0; bit < 8 * b.addr_bytes; bit++) {
		memcpy(addr, b.addr, b.addr_bytes);
		addr[bit / 8] ^= (unsigned char)(1u << bit % 8);
		cr_assert_eq(ops->ep_open(a.net, addr, b.addr_bytes, 0, &a, &ep), -EPROTO);
	}
	memcpy(addr, b.addr, b.addr_bytes);
	cr_assert_eq(ops->ep_open(a.net, addr, b.addr_bytes + 1, 0, &a, &ep), -EPROTO);
	cr_assert_null(ep);
	cr_assert_eq(ops->address(a.net, addr, a.addr_bytes - 1), -ENOBUFS);
	node_close(&a);
	node_close(&b);
}

Test(net, says_why_it_cannot_open)
{
	struct kvp_net_config config = { .events = &events, .interface = "nonesuch0" };
	struct kvp_net *net = NULL;
	char err[128] = "";

	cr_assert_eq(ops->open(&net, &config, err, sizeof(err)), -ENODEV);
	cr_assert(strstr(err, "nonesuch0"), "%s", err);
	config.interface = "lo";
	config.port_lo = 2;
	config.port_hi = 1;
	cr_assert_eq(ops->open(&net, &config, err, sizeof(err)), -EINVAL);
	cr_assert_null(net);
	ops->close(NULL);
}

/* An operator is told of a UCX that can end the process, once it is in use. */
Test(net, names_what_is_known_of_this_ucx)
{
	unsigned major, minor, patch;
	bool old;
	struct node a;

	ucp_get_version(&major, &minor, &patch);
	old = major == 1 && minor < 14;
	cr_expect_str_empty(kvp_net_ucx_doubt());
	node_open(&a);
	cr_expect_eq(strstr(kvp_net_ucx_doubt(), "UCX 1.14") != NULL, old);
	cr_expect_eq(kvp_net_ucx_doubt()[0] != '\0', old);
	node_close(&a);
}

/* Else it may read the memory of a GPU as the host's. */
Test(net, ucx_takes_our_word_for_what_memory_is)
{
	ucp_config_t *config = NULL;
	char *text = NULL;
	size_t bytes = 0;
	FILE *file = open_memstream(&text, &bytes);

	cr_assert_eq(ucp_config_read(NULL, NULL, &config), UCS_OK);
	cr_assert_eq(ucp_config_modify(config, "PROTO_ENABLE", "y"), UCS_OK);
	cr_assert(kvp_ucx_believes(config));
	ucp_config_print(config, file, NULL, UCS_CONFIG_PRINT_CONFIG);
	fclose(file);
	cr_assert(strstr(text, "UCX_PROTO_ENABLE=n"), "%s", text);
	free(text);
	ucp_config_release(config);
}

Test(net, listens_within_its_ports)
{
	struct node b = { .place = malloc(BIG) };
	struct kvp_net_config config = {
		.events = &events, .arg = &b, .interface = "lo", .port_lo = 0, .port_hi = 0
	};
	char err[128] = "", line[256], want[16];
	bool found = false;
	FILE *tcp;

	config.port_lo = config.port_hi = (uint16_t)(20000 + getpid() % 10000);
	cr_assert_eq(ops->open(&b.net, &config, err, sizeof(err)), 0, "%s", err);
	snprintf(want, sizeof(want), "0100007F:%04X", config.port_lo);
	tcp = fopen("/proc/net/tcp", "r");
	while (fgets(line, sizeof(line), tcp))
		found |= strstr(line, want) && strstr(line, "00000000:0000 0A");
	fclose(tcp);
	cr_assert(found);
	node_close(&b);
}

Test(net, dead_peer_fails_the_endpoint_once)
{
	size_t bytes = 1 << 20;
	unsigned char *payload = calloc(1, bytes);
	uint64_t taken = 0, start;
	struct node a, peer;
	pid_t pid = echo_start(&a, &peer);

	cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
	turn_until(&a, NULL, &a.messages, 1);
	kill(pid, SIGSTOP); /* so that sends are under way when it dies */
	while (taken < 64 && send_one(&a, 0, payload, bytes) == 0)
		taken++;
	start = now_ms();
	kill_and_reap(pid);
	turn_until(&a, NULL, &a.failed, 1);
	cr_assert_lt(now_ms() - start, 3000);
	cr_assert_eq(send_one(&a, 0, NULL, 0), -ENOTCONN);
	ops->ep_close(a.net, a.ep);
	turn_until(&a, NULL, &a.closed, 1);
	cr_assert_eq(a.sent_ok + a.sent_bad, taken);
	cr_assert_gt(a.sent_bad, 0);
	cr_assert_eq(a.failed, 1);
	cr_assert_eq(a.bad, 0);
	node_close(&a);
	free(payload);
}

/* What is on its way stays the transport's while the peer stands still, and ends when it dies. */
Test(net, close_waits_for_pending_sends)
{
	size_t bytes = 1 << 20;
	unsigned char *payload = calloc(1, bytes);
	uint64_t taken = 0;
	struct node a, peer;
	pid_t pid = echo_start(&a, &peer);

	cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
	turn_until(&a, NULL, &a.messages, 1);
	kill(pid, SIGSTOP);
	while (taken < 64 && send_one(&a, 0, payload, bytes) == 0)
		taken++;
	for (int i = 0; i < 1000; i++)
		ops->progress(a.net);
	cr_assert_lt(a.sent_ok, taken);

	ops->ep_close(a.net, a.ep);
	ops->ep_close(a.net, a.ep); /* once is enough, twice harmless */
	cr_assert_eq(a.closed, 0);
	cr_assert_eq(send_one(&a, 0, NULL, 0), -ENOTCONN);
	for (int i = 0; i < 1000; i++)
		ops->progress(a.net);
	cr_assert_eq(a.closed, 0);
	kill_and_reap(pid);
	turn_until(&a, NULL, &a.closed, 1);
	cr_assert_eq(a.sent_ok + a.sent_bad, taken);
	cr_assert_gt(a.sent_bad, 0);
	cr_assert_eq(a.failed, 0);
	cr_assert_eq(ops->stats(a.net)->pending, 0);
	cr_assert_eq(ops->stats(a.net)->eps + ops->stats(a.net)->stuck, 0);
	node_close(&a);
	free(payload);
}

Test(net, closing_the_net_ends_all)
{
	unsigned char *payload = calloc(1, 1 << 20);
	uint64_t taken = 0;
	struct node a, peer;
	pid_t pid = echo_start(&a, &peer);

	kill(pid, SIGSTOP);
	while (taken < 64 && send_one(&a, 0, payload, 1 << 20) == 0)
		taken++;
	ops->close(a.net);
	cr_assert_eq(a.sent_ok + a.sent_bad, taken);
	cr_assert_eq(a.closed, 1);
	free(a.place);
	free(payload);
	kill_and_reap(pid);
}

/*
 * A transport may be closed at any moment of a peer's way in, when answers of UCX's own to a peer
 * that does not turn have not been sent yet. Both ends, after any number of turns.
 */
Test(net, closes_while_a_peer_connects, .timeout = 120)
{
	for (int both = 0; both < 40; both++) {
		for (int alone = 0; alone < 8; alone++) {
			struct node a, b;

			node_open(&a);
			node_open(&b);
			node_connect(&a, &b);
			cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
			for (int i = 0; i < both; i++) {
				ops->progress(a.net);
				ops->progress(b.net);
			}
			for (int i = 0; i < alone; i++)
				ops->progress(b.net);
			node_close(&b);
			cr_assert_eq(a.bad + b.bad, 0);
			node_close(&a);
			cr_assert_eq(a.closed, 1);
		}
	}
	if (kvp_net_ucx_left_open() > 0)
		_exit(0); /* as a daemon would */
}

Test(net, reconnects_without_a_leak)
{
	struct node a, b;
	int before = 0;

	node_open(&a);
	for (int i = 0; i < 20; i++) {
		node_open(&b);
		node_connect(&a, &b);
		node_connect(&b, &a);
		a.messages = a.next_seq = 0;
		b.echo = true;
		cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
		turn_until(&a, &b, &a.messages, 1);
		ops->ep_close(a.net, a.ep);
		turn_until(&a, &b, &a.closed, (uint64_t)i + 1);
		node_close(&b);
		while (ops->progress(a.net) > 0)
			;
		if (i == 1)
			before = n_fds();
	}
	cr_assert_leq(n_fds(), before);
	cr_assert_eq(a.bad, 0);
	node_close(&a);
}

Test(net, reconnects_after_kills_without_a_leak)
{
	struct node a, peer;
	int before = 0;

	for (int i = 0; i < 5; i++) {
		pid_t pid = echo_start(&a, &peer);

		cr_assert_eq(send_one(&a, 0, NULL, 0), 0);
		turn_until(&a, NULL, &a.messages, 1);
		kill_and_reap(pid);
		turn_until(&a, NULL, &a.failed, 1);
		node_close(&a);
		if (i == 1)
			before = n_fds();
	}
	cr_assert_leq(n_fds(), before);
}

Test(net, reopens_an_endpoint_to_the_same_peer)
{
	struct node a, b;

	node_open(&a);
	node_open(&b);
	for (uint64_t i = 0; i < 20; i++) {
		node_connect(&a, &b);
		cr_assert_eq(send_one(&a, i, NULL, 0), 0);
		turn_until(&a, &b, &b.messages, i + 1);
		ops->ep_close(a.net, a.ep);
		turn_until(&a, &b, &a.closed, i + 1);
	}
	cr_assert_eq(a.bad + b.bad, 0);
	node_close(&a);
	node_close(&b);
}

Test(net, no_wake_up_is_lost)
{
	struct node a, peer;
	pid_t pid = echo_start(&a, &peer);
	uint64_t slept = 0;

	for (uint64_t i = 0; i < 10000; i++) {
		cr_assert_eq(send_one(&a, i, NULL, 0), 0);
		while (a.messages <= i) {
			struct pollfd pfd = { .fd = ops->fd(a.net), .events = POLLIN };

			if (ops->progress(a.net) > 0 || ops->arm(a.net) == -EBUSY)
				continue;
			slept++;
			cr_assert_eq(poll(&pfd, 1, support_slow_ms(5000)), 1, "lost at %lu", i);
		}
	}
	cr_assert_gt(slept, 0);
	cr_assert_eq(a.bad, 0);
	kill_and_reap(pid);
	node_close(&a);
}

Test(net, sleeps_without_peers)
{
	struct node a;
	struct pollfd pfd;

	node_open(&a);
	while (ops->progress(a.net) > 0 || ops->arm(a.net) == -EBUSY)
		;
	pfd = (struct pollfd){ .fd = ops->fd(a.net), .events = POLLIN };
	cr_assert_eq(poll(&pfd, 1, 3000), 0);
	node_close(&a);
}

Test(net, gives_signals_back)
{
	static const int signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE };
	struct sigaction old, ours = { .sa_handler = SIG_IGN };
	struct node a;
	Dl_info info;

	kvp_net_ucx_give_back_signals();
	cr_assert_eq(sigaction(SIGHUP, &ours, NULL), 0);
	node_open(&a);
	cr_assert_eq(sigaction(SIGHUP, NULL, &old), 0);
	cr_assert_eq(old.sa_handler, SIG_IGN, "what is set later is nobody else's");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(signals); i++) {
		cr_assert_eq(sigaction(signals[i], NULL, &old), 0);
		if (dladdr((void *)old.sa_handler, &info)) /* else the default, or our own */
			cr_assert_null(strstr(info.dli_fname, "libucs"));
	}
	node_close(&a);
}

Test(net, unreachable_peer_does_not_block)
{
	struct node a, b;
	uint64_t start;
	int r;

	node_open(&a);
	node_open(&b);
	ops->close(b.net); /* nobody listens there now */
	free(b.place);
	start = now_ms();
	r = ops->ep_open(a.net, b.addr, b.addr_bytes, 0, &a, &a.ep);
	if (r == 0) { /* found out later: then by failed() */
		turn_until(&a, NULL, &a.failed, 1);
		ops->ep_close(a.net, a.ep);
		turn_until(&a, NULL, &a.closed, 1);
	}
	cr_assert_lt(now_ms() - start, 3000);
	cr_assert_leq(r, 0);
	cr_assert_eq(ops->stats(a.net)->eps, 0);
	node_close(&a);
}

/* ---- over RDMA, which is refused to what is not */

Test(net, lanes_are_read)
{
	static const struct {
		const char *text, *bad;
	} cases[] = {
		{ "# UCP endpoint 0x1\n#   lane[0]:  0:rc_verbs/rxe0:1.0 md[0]  -> md[0]/ib am\n",
		  NULL },
		{ "# lane[0]: 1:rc_mlx5/mlx5_0:1.0 md[0]\n# lane[1]: 2:rc_mlx5/mlx5_1:1.0 md[1]\n",
		  NULL },
		{ "# lane[0]: 1:rc_mlx5/mlx5_0:1.0 md[0]\n# lane[1]: 0:tcp/eth0.0 md[1]\n", "tcp" },
		{ "# lane[0]: 3:posix/memory.0 md[2]\n", "posix" },
		{ "# lane[0]: 3:cma/memory.0 md[2]\n", "cma" },
		{ "# UCP endpoint 0x1\n", "no lane" },
		{ "", "no lane" },
	};

	for (size_t i = 0; i < KVP_ARRAY_SIZE(cases); i++) {
		char bad[32];
		int r = kvp_ucx_lanes_read(cases[i].text, bad, sizeof(bad));

		cr_assert_eq(r, cases[i].bad ? -EPROTONOSUPPORT : 0, "case %zu", i);
		if (r < 0)
			cr_assert_str_eq(bad, cases[i].bad);
	}
}

/* As if UCX had chosen tcp although it was told otherwise. */
Test(net, an_endpoint_over_tcp_is_refused_in_rdma_mode)
{
	struct node a, b;
	struct kvp_net_ep *ep;

	node_open(&a);
	node_open(&b);
	a.net->rdma = true;
	cr_assert_eq(ops->ep_open(a.net, b.addr, b.addr_bytes, 0, &a, &ep), -EPROTONOSUPPORT);
	cr_assert_eq(ops->stats(a.net)->eps, 0);
	a.net->rdma = false;
	node_connect(&a, &b);
	node_close(&a);
	node_close(&b);
}

Test(net, rdma_without_a_device_does_not_start)
{
	struct kvp_net_verbs_config verbs;
	struct kvp_net_config config = { .verbs = &verbs, .rdma = true };
	struct kvp_net *net;
	char err[256] = "";

	kvp_net_verbs_defaults(&verbs);
	verbs.devices = "mlx5_99";
	cr_assert_eq(ops->open(&net, &config, err, sizeof(err)), -ENODEV);
	cr_assert(strstr(err, "mlx5_99"), "%s", err);
}
