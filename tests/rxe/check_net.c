/* SPDX-License-Identifier: Apache-2.0 */

/* The verbs transport by itself, on the veth pair. */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"
#include "tests/rxe/checks.h"
#include "tests/support_verbs.h"

#define SLOT (256u << 10)

static struct kvp_net_verbs_config config_of(const char *device)
{
	struct kvp_net_verbs_config config;

	kvp_net_verbs_defaults(&config);
	config.rdma_cm = getenv("KVP_TEST_CONNECT"); /* NOLINT(concurrency-mt-unsafe) */
	config.devices = device;
	return config;
}

static void open_on(struct vp_node *node, const char *device)
{
	struct kvp_net_verbs_config config = config_of(device);
	char err[256] = "";
	int r = vp_open(node, &config, SLOT, err, sizeof(err));

	KVP_EXPECT(r == 0, "%s: %s", device, err);
}

static void open_pair(struct vp_node *a, struct vp_node *b)
{
	open_on(a, "rxe1");
	open_on(b, "rxe2");
	KVP_EXPECT(vp_connect(a, b) == 0);
	KVP_EXPECT(vp_connect(b, a) == 0);
}

static void close_pair(struct vp_node *a, struct vp_node *b)
{
	KVP_EXPECT(a->bad == 0 && b->bad == 0, "%lu and %lu bad", a->bad, b->bad);
	vp_close(a);
	vp_close(b);
}

static void a_device_is_chosen(void)
{
	struct kvp_net_verbs_config config = config_of("");
	struct vp_node node;
	char err[256] = "";

	config.exclude = "rxe0,rxe1,rxe3,rxe4";
	KVP_EXPECT(vp_open(&node, &config, SLOT, err, sizeof(err)) == 0, "%s", err);
	KVP_EXPECT(strcmp(kvp_net_verbs.describe(node.net),
			  "verbs rxe2:1 gid 1 10.9.1.2 mtu 4096") == 0,
		   "%s", kvp_net_verbs.describe(node.net));
	vp_close(&node);

	config.devices = "mlx5_9";
	KVP_EXPECT(vp_open(&node, &config, SLOT, err, sizeof(err)) == -ENODEV);
	KVP_EXPECT(strstr(err, "mlx5_9"), "%s", err);
	config = config_of("rxe1");
	config.gid_index = 0; /* the link-local one */
	KVP_EXPECT(vp_open(&node, &config, SLOT, err, sizeof(err)) == -ENODEV);
	KVP_EXPECT(strstr(err, "no RoCE v2 GID"), "%s", err);
	config = config_of("rxe1");
	KVP_EXPECT(vp_open(&node, &config, 9u << 20, err, sizeof(err)) == -EMSGSIZE);
	KVP_EXPECT(strstr(err, "too large"), "%s", err);
}

static void messages_are_echoed(void)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	b.echo = true;
	for (uint64_t i = 0; i < 600; i++) {
		while (vp_send(&a, i) == -EAGAIN)
			vp_idle(&a, &b, 1);
		if (i % 16 == 15)
			KVP_EXPECT(vp_turn(&a, &b, &a.messages, i - 15, 5000), "%lu", a.messages);
	}
	KVP_EXPECT(vp_turn(&a, &b, &a.messages, 600, 10000), "%lu of 600", a.messages);
	close_pair(&a, &b);
}

static void payloads_land(void)
{
	static const size_t sizes[] = { 1, 64, 576, 4096, 4097, 65536, SLOT };
	struct vp_node a, b;
	uint64_t seq = 0;

	open_pair(&a, &b);
	for (uint32_t round = 0; round < 4; round++) {
		for (uint32_t i = 0; i < KVP_ARRAY_SIZE(sizes); i++) {
			while (vp_put(&a, &b, seq, i, 0, sizes[i], round % 2 == 0) == -EAGAIN)
				vp_idle(&a, &b, 1);
			seq++;
		}
		KVP_EXPECT(vp_turn(&a, &b, &b.data, seq, 10000), "%lu of %lu", b.data, seq);
		KVP_EXPECT(vp_turn(&a, &b, &a.sent_ok, seq, 10000), "%lu sent", a.sent_ok);
	}
	close_pair(&a, &b);
}

/* Far more than there are credits, requests and bounces; the receiver looks rarely. */
static void credits_hold(void)
{
	struct vp_node a, b;
	uint64_t refused = 0;

	open_pair(&a, &b);
	for (uint64_t i = 0; i < 1500; i++) {
		while (vp_put(&a, &b, i, (uint32_t)(i % VP_SLOTS), (uint32_t)(i % 8) * 64, 64,
			      false) == -EAGAIN) {
			refused++;
			vp_idle(&a, refused % 4 == 0 ? &b : NULL, 1);
		}
	}
	KVP_EXPECT(vp_turn(&a, &b, &b.messages, 1500, 20000), "%lu arrived", b.messages);
	KVP_EXPECT(vp_turn(&a, &b, &a.sent_ok, 1500, 5000), "%lu sent", a.sent_ok);
	KVP_EXPECT(refused > 0);
	KVP_EXPECT(a.failed == 0 && b.failed == 0);
	vp_close(&a);
	vp_close(&b);
}

static void a_bad_key_loses_the_connection(void)
{
	struct vp_node a, b;
	uint64_t from = vp_ms();
	uint32_t rkey;

	open_pair(&a, &b);
	while (vp_put(&a, &b, 0, 0, 0, 64, true) == -EAGAIN)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.data, 1, 5000));
	memcpy(&rkey, b.keys[1].bytes + 8, sizeof(rkey));
	rkey ^= 0x5500;
	memcpy(b.keys[1].bytes + 8, &rkey, sizeof(rkey));
	KVP_EXPECT(vp_put(&a, &b, 1, 1, 0, 64, true) == 0);
	KVP_EXPECT(vp_turn(&a, &b, &a.failed, 1, 5000));
	KVP_EXPECT(a.last_status == -EACCES, "%s", strerror(-a.last_status));
	KVP_EXPECT(vp_turn(&a, &b, &a.told, 2, 5000) && a.sent_bad == 1);
	KVP_EXPECT(b.data == 1);

	/* Only that connection: the other way goes on, and a new one is made. */
	KVP_EXPECT(vp_send(&b, 0) == 0 && vp_turn(&a, &b, &a.messages, 1, 5000));
	kvp_net_verbs.ep_close(a.net, a.ep);
	KVP_EXPECT(vp_turn(&a, &b, &a.closed, 1, 5000));
	KVP_EXPECT(vp_connect(&a, &b) == 0);
	b.next_seq = 2;
	while (vp_put(&a, &b, 2, 2, 0, 64, true) == -EAGAIN)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.data, 2, 5000));
	printf("  in all %lu ms\n", vp_ms() - from);
	close_pair(&a, &b);
}

static uint64_t counter(const char *device, const char *name)
{
	char path[128], text[32] = "";
	FILE *file;

	(void)snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/1/hw_counters/%s",
		       device, name);
	file = fopen(path, "re");
	KVP_EXPECT(file, "%s", path);
	KVP_EXPECT(fgets(text, sizeof(text), file));
	(void)fclose(file); /* was only read */
	return strtoull(text, NULL, 10);
}

/* A pair of which `a` believes that there are receives without end. */
static void open_without_credits(struct vp_node *a, struct vp_node *b, uint8_t rnr_timer)
{
	struct kvp_net_verbs_config config = config_of("rxe2");
	char err[256] = "";

	config.rnr_timer = rnr_timer;
	open_on(a, "rxe1");
	KVP_EXPECT(vp_open(b, &config, SLOT, err, sizeof(err)) == 0, "%s", err);
	KVP_EXPECT(vp_connect(a, b) == 0);
	KVP_EXPECT(vp_connect(b, a) == 0);
	while (vp_send(a, 0) == -EAGAIN)
		vp_idle(a, b, 1);
	KVP_EXPECT(vp_turn(a, b, &b->messages, 1, 5000));
	a->ep->paths[0].conn->credits = 100000;
}

/* More than the receives that are there; the receiver does not turn. */
static uint64_t send_too_many(struct vp_node *a)
{
	uint64_t seq = 1;

	for (; seq <= 160; seq++) {
		while (a->failed == 0 && vp_send(a, seq) == -EAGAIN)
			vp_idle(a, NULL, 1);
		if (a->failed > 0)
			break;
	}
	return seq - 1;
}

/* Soon enough: the card waits, and only its counter says so. */
static void missing_receives_are_waited_for(void)
{
	uint64_t before = counter("rxe1", "rcvd_rnr_err");
	struct vp_node a, b;

	open_without_credits(&a, &b, 28); /* 164 ms */
	KVP_EXPECT(send_too_many(&a) == 160);
	vp_idle(&a, NULL, 50);
	KVP_EXPECT(vp_turn(&a, &b, &b.messages, 161, 10000), "%lu", b.messages);
	KVP_EXPECT(a.failed + b.failed == 0);
	printf("  the card was told %lu times to wait\n", counter("rxe1", "rcvd_rnr_err") - before);
	KVP_EXPECT(counter("rxe1", "rcvd_rnr_err") > before);
	close_pair(&a, &b);
}

/* Never: the connection is lost, with the reason. */
static void missing_receives_lose_the_connection(void)
{
	struct vp_node a, b;
	uint64_t from;

	open_without_credits(&a, &b, 12);
	from = vp_ms();
	(void)send_too_many(&a);
	KVP_EXPECT(vp_turn(&a, NULL, &a.failed, 1, 10000), "nobody noticed");
	printf("  noticed after %lu ms: %s\n", vp_ms() - from, kvp_net_verbs.ep_reason(a.ep));
	KVP_EXPECT(a.last_status == -ENOBUFS, "%s", strerror(-a.last_status));
	KVP_EXPECT(strstr(kvp_net_verbs.ep_reason(a.ep), "RNR"));
	KVP_EXPECT(a.net->rails[0].lost == 1);
	kvp_net_verbs.ep_close(a.net, a.ep);
	KVP_EXPECT(vp_turn(&a, &b, &a.closed, 1, 5000));
	close_pair(&a, &b);
}

/* One that reaches beyond the ring is refused by the card, one into a slot that was not named is
 * dropped by the receiver. */
static void writes_are_bounded(void)
{
	struct vp_node a, b;

	open_pair(&a, &b);
	while (vp_put(&a, &b, 0, 0, 0, 64, true) == -EAGAIN)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.data, 1, 5000));
	b.keys[3] = b.keys[4];
	KVP_EXPECT(vp_put(&a, &b, 1, 3, 0, 64, true) == 0);
	KVP_EXPECT(vp_turn(&a, &b, &b.messages, 2, 5000));
	KVP_EXPECT(b.data == 1 && b.lost == 1 && kvp_net_verbs.stats(b.net)->dropped == 1);
	KVP_EXPECT(vp_put(&a, &b, 2, VP_SLOTS - 1, (uint32_t)a.stride - 32, 64, false) == 0);
	KVP_EXPECT(vp_turn(&a, &b, &a.failed, 1, 5000));
	KVP_EXPECT(a.last_status == -EACCES, "%s", strerror(-a.last_status));
	close_pair(&a, &b);
}

/* Another process, which echoes until it is killed. */
static _Noreturn void echo_process(int fd)
{
	struct vp_node node, peer;

	open_on(&node, "rxe2");
	node.echo = true;
	KVP_EXPECT(write(fd, node.addr, node.addr_bytes) == (ssize_t)node.addr_bytes);
	peer.addr_bytes = (size_t)read(fd, peer.addr, sizeof(peer.addr));
	KVP_EXPECT(vp_connect(&node, &peer) == 0);
	for (;; vp_echo(&node))
		(void)kvp_net_verbs.progress(node.net);
}

static pid_t start_echo(struct vp_node *a, struct vp_node *peer)
{
	int fds[2];
	pid_t pid;

	KVP_EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0);
	(void)fflush(stdout);
	pid = fork();
	if (pid == 0)
		echo_process(fds[1]);
	open_on(a, "rxe1");
	peer->addr_bytes = (size_t)read(fds[0], peer->addr, sizeof(peer->addr));
	KVP_EXPECT(write(fds[0], a->addr, a->addr_bytes) == (ssize_t)a->addr_bytes);
	KVP_EXPECT(vp_connect(a, peer) == 0);
	while (vp_send(a, 0) == -EAGAIN)
		vp_idle(a, NULL, 1);
	KVP_EXPECT(vp_turn(a, NULL, &a->messages, 1, 10000), "no echo");
	return pid;
}

static void a_killed_peer_is_noticed(void)
{
	struct vp_node a, peer = { 0 };
	pid_t pid = start_echo(&a, &peer);
	uint64_t from;

	vp_idle(&a, NULL, 200);
	KVP_EXPECT(a.failed == 0);
	(void)kill(pid, SIGKILL);
	from = vp_ms();
	KVP_EXPECT(vp_turn(&a, NULL, &a.failed, 1, 8000), "an idle connection did not notice");
	printf("  noticed after %lu ms: %s\n", vp_ms() - from, strerror(-a.last_status));
	kvp_net_verbs.ep_close(a.net, a.ep);
	KVP_EXPECT(vp_turn(&a, NULL, &a.closed, 1, 5000));
	KVP_EXPECT(a.bad == 0);
	vp_close(&a);
}

static void a_killed_peer_fails_what_is_under_way(void)
{
	struct vp_node a, peer = { 0 };
	pid_t pid = start_echo(&a, &peer);
	uint64_t seq = 1;

	(void)kill(pid, SIGKILL);
	for (; seq <= 5; seq++)
		KVP_EXPECT(vp_put(&a, &a, seq, (uint32_t)seq, 0, 4096, true) == 0);
	KVP_EXPECT(vp_turn(&a, NULL, &a.failed, 1, 8000));
	KVP_EXPECT(vp_turn(&a, NULL, &a.told, 5, 5000), "%lu told", a.told);
	KVP_EXPECT(a.sent_bad == 5);
	KVP_EXPECT(vp_send(&a, seq) < 0 && vp_send(&a, seq) != -EAGAIN);
	vp_close(&a);
}

static void nobody_there_times_out(void)
{
	struct vp_node a, b;

	open_on(&a, "rxe1");
	open_on(&b, "rxe2");
	KVP_EXPECT(vp_connect(&a, &b) == 0);
	KVP_EXPECT(vp_send(&a, 0) == -EAGAIN);
	KVP_EXPECT(vp_turn(&a, NULL, &a.failed, 1, 8000), "b never turns");
	KVP_EXPECT(a.last_status == -ETIMEDOUT);
	close_pair(&a, &b);
}

static void link_set(const char *device, const char *state)
{
	char command[96];

	(void)snprintf(command, sizeof(command), "ip link set %s %s", device, state);
	KVP_EXPECT(system(command) == 0, "%s", command); /* NOLINT: a fixed string */
}

static void a_link_goes_down_and_up(void)
{
	struct vp_node a, b;
	uint64_t from;

	open_pair(&a, &b);
	while (vp_put(&a, &b, 0, 0, 0, 64, true) == -EAGAIN)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.data, 1, 5000));
	link_set("veth1", "down");
	from = vp_ms();
	KVP_EXPECT(vp_turn(&a, &b, &a.failed, 1, 8000));
	KVP_EXPECT(vp_turn(&a, &b, &b.failed, 1, 8000));
	printf("  noticed after %lu ms: %s\n", vp_ms() - from, strerror(-a.last_status));
	kvp_net_verbs.ep_close(a.net, a.ep);
	kvp_net_verbs.ep_close(b.net, b.ep);
	KVP_EXPECT(vp_turn(&a, &b, &a.closed, 1, 5000) && vp_turn(&a, &b, &b.closed, 1, 5000));
	KVP_EXPECT(vp_connect(&a, &b) == -ENETDOWN);

	link_set("veth1", "up");
	KVP_EXPECT(system("ip route replace 10.9.1.2/32 dev veth1 src 10.9.1.1") == 0);
	from = vp_ms();
	while (vp_connect(&a, &b) == -ENETDOWN && vp_ms() - from < 5000)
		vp_idle(&a, &b, 10);
	KVP_EXPECT(a.ep, "the port did not come back");
	b.next_seq = 1;
	while (vp_put(&a, &b, 1, 0, 0, 64, true) == -EAGAIN && a.failed < 2)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.data, 2, 5000), "%s", strerror(-a.last_status));
	printf("  back after %lu ms\n", vp_ms() - from);
	close_pair(&a, &b);
}

/* Asleep in poll(2), as an idle lane is. */
static void sleep_wakes_up(void)
{
	struct vp_node a, b;
	unsigned wakes = 0;
	uint64_t until;

	open_pair(&a, &b);
	while (vp_send(&a, 0) == -EAGAIN)
		vp_idle(&a, &b, 1);
	KVP_EXPECT(vp_turn(&a, &b, &b.messages, 1, 5000));
	for (uint64_t i = 1; i <= 20; i++) {
		struct pollfd pfd = { .fd = kvp_net_verbs.fd(b.net), .events = POLLIN };

		KVP_EXPECT(vp_send(&a, i) == 0);
		(void)kvp_net_verbs.progress(a.net);
		while (b.messages < i + 1) {
			if (kvp_net_verbs.progress(b.net) > 0 || kvp_net_verbs.arm(b.net) < 0)
				continue;
			if (kvp_net_verbs.progress(b.net) > 0)
				continue;
			KVP_EXPECT(poll(&pfd, 1, 5000) == 1, "slept on, message %lu", i);
		}
	}
	/* Idle: the keepalives of two connections, no more. */
	for (until = vp_ms() + 3000; vp_ms() < until;) {
		struct pollfd pfds[2] = { { .fd = kvp_net_verbs.fd(a.net), .events = POLLIN },
					  { .fd = kvp_net_verbs.fd(b.net), .events = POLLIN } };

		if (kvp_net_verbs.progress(a.net) + kvp_net_verbs.progress(b.net) > 0 ||
		    kvp_net_verbs.arm(a.net) < 0 || kvp_net_verbs.arm(b.net) < 0 ||
		    kvp_net_verbs.progress(a.net) + kvp_net_verbs.progress(b.net) > 0)
			continue;
		(void)poll(pfds, 2, 1000);
		wakes++;
	}
	printf("  %u wake-ups of two idle nets in 3 s\n", wakes);
	KVP_EXPECT(wakes <= 30, "%u", wakes);
	close_pair(&a, &b);
}

/* What this device answers for memory of a GPU: the words that its rooms land with. It has no such
 * call and does not look at the descriptor; a real dma-buf cannot be had of this kernel. */
static void a_dma_buf_is_refused(void)
{
	struct kvp_net_span span = { .base = (void *)4096, .bytes = 1u << 20 };
	struct kvp_net_region *region = NULL;
	struct vp_node node;
	char err[256] = "";
	int r;

	span.dmabuf_fd = memfd_create("memory", MFD_CLOEXEC);
	KVP_EXPECT(span.dmabuf_fd >= 0);
	open_on(&node, "rxe1");
	r = kvp_net_verbs.region_add(node.net, &span, &region, err, sizeof(err));
	printf("  %s\n", err);
	KVP_EXPECT(r == -EOPNOTSUPP && !region, "%s", strerror(-r));
	KVP_EXPECT(strstr(err, "rxe1: registering 1048576 bytes of a dma-buf: "), "%s", err);
	(void)close(span.dmabuf_fd);
	vp_close(&node);
}

const struct kvp_check kvp_checks_net[] = {
	{ "net: a dma-buf is refused", a_dma_buf_is_refused, 20 },
	{ "net: a device is chosen", a_device_is_chosen, 20 },
	{ "net: messages are echoed", messages_are_echoed, 30 },
	{ "net: payloads land", payloads_land, 30 },
	{ "net: credits hold", credits_hold, 40 },
	{ "net: a bad key loses the connection", a_bad_key_loses_the_connection, 20 },
	{ "net: writes are bounded", writes_are_bounded, 20 },
	{ "net: missing receives are waited for", missing_receives_are_waited_for, 30 },
	{ "net: missing receives lose the connection", missing_receives_lose_the_connection, 30 },
	{ "net: a killed peer is noticed", a_killed_peer_is_noticed, 30 },
	{ "net: a killed peer fails what is under way", a_killed_peer_fails_what_is_under_way, 30 },
	{ "net: nobody there times out", nobody_there_times_out, 20 },
	{ "net: sleep wakes up", sleep_wakes_up, 30 },
	{ "net: a link goes down and up", a_link_goes_down_and_up, 40 },
	{ NULL, NULL, 0 },
};
