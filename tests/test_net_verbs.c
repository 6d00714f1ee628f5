/* SPDX-License-Identifier: Apache-2.0 */

/* The verbs transport, and the choice of a device, on a device made of nothing. */

#include <criterion/criterion.h>
#include <errno.h>
#include <linux/capability.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/net_verbs.h"
#include "daemon/nic.h"
#include "tests/fake_verbs.h"
#include "tests/support_clock.h"
#include "tests/support_verbs.h"

#define SLOT 65536u

static void open_pair(struct vp_node *a, struct vp_node *b, uint32_t depth)
{
	struct kvp_net_verbs_config config;
	char err[256] = "";

	kvp_fake_reset();
	kvp_net_verbs_defaults(&config);
	config.depth = depth;
	cr_assert_eq(vp_open(a, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_open(b, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	cr_assert_eq(vp_connect(a, b), 0);
	cr_assert_eq(vp_connect(b, a), 0);
}

/* Until both can send. */
static void join(struct vp_node *a, struct vp_node *b)
{
	for (unsigned i = 0; i < 4000 && !(a->ep->joined && b->ep->joined); i++)
		vp_idle(a, b, 1);
	cr_assert(a->ep->joined && b->ep->joined);
}

static void expect_nothing_left(void)
{
	cr_assert_eq(kvp_fake.n_qps, 0);
	cr_assert_eq(kvp_fake.n_mrs, 0);
	cr_assert_eq(kvp_fake.n_ahs, 0);
	cr_assert_eq(kvp_fake.n_cqs, 0);
	cr_assert_eq(kvp_fake.n_pds, 0);
	cr_assert_eq(kvp_fake.n_contexts, 0);
}

static void close_pair(struct vp_node *a, struct vp_node *b)
{
	cr_assert_eq(a->bad, 0);
	cr_assert_eq(b->bad, 0);
	vp_close(a);
	vp_close(b);
	expect_nothing_left();
}

static void send_until_taken(struct vp_node *a, struct vp_node *b, uint64_t seq)
{
	int r;

	while ((r = vp_send(a, seq)) == -EAGAIN)
		vp_idle(a, b, 1);
	cr_assert_eq(r, 0, "%s", strerror(-r));
}

Test(net_verbs, chooses_an_ipv4_gid_of_roce_v2)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	cr_assert_str_eq(kvp_net_verbs.describe(a.net), "verbs fake0:1 gid 2 10.0.0.1 mtu 4096");
	close_pair(&a, &b);
}

Test(net_verbs, says_why_no_device_will_do)
{
	struct kvp_net_verbs_config config;
	struct vp_node node;
	char err[256];

	kvp_fake_reset();
	kvp_net_verbs_defaults(&config);
	kvp_fake.port_state = IBV_PORT_DOWN;
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENODEV);
	cr_assert_not_null(strstr(err, "fake0: port 1 is"), "%s", err);
	kvp_fake.port_state = IBV_PORT_ACTIVE;
	config.gid_index = 1; /* RoCE v1 */
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENODEV);
	cr_assert_not_null(strstr(err, "no RoCE v2 GID at that index"), "%s", err);
	config.gid_index = -1;
	config.exclude = "other0, fake0";
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENODEV);
	cr_assert_not_null(strstr(err, "no RDMA device"), "%s", err);
	config.exclude = "fake";
	config.devices = "real0";
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENODEV);
	cr_assert_not_null(strstr(err, "real0"), "%s", err);
	expect_nothing_left();
}

Test(net_verbs, pci_distance)
{
	const char *gpu = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0";

	cr_assert_eq(kvp_nic_distance(gpu, gpu), 0);
	cr_assert_eq(kvp_nic_distance(gpu, "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.1"), 2);
	cr_assert_eq(kvp_nic_distance(gpu, "/sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0"), 4);
	cr_assert_eq(kvp_nic_distance(gpu, "/sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0"), 6);
	cr_assert_eq(kvp_nic_distance(gpu, "/sys/devices/pci0000:00/0000:00:01.0"), 1);
}

Test(net_verbs, messages_and_payloads)
{
	struct vp_node a, b;
	uint64_t seq = 0;

	open_pair(&a, &b, 64);
	for (uint32_t i = 0; i < 300; i++) {
		size_t bytes = 1 + (size_t)i * 211 % SLOT;
		uint32_t offset = i % 2 ? (uint32_t)(SLOT - bytes) / 2 : 0;

		while (vp_put(&a, &b, seq, i % VP_SLOTS, offset, bytes, offset == 0) == -EAGAIN)
			vp_idle(&a, &b, 1);
		seq++;
		send_until_taken(&a, &b, seq++);
		cr_assert(vp_turn(&a, &b, &b.messages, seq, 2000));
	}
	cr_assert_eq(b.data, 300);
	cr_assert(vp_turn(&a, &b, &a.sent_ok, 300, 2000));
	close_pair(&a, &b);
}

/* Behind what lands in a device's memory nothing is written that the processor would have to read:
 * the header comes by a message. */
Test(net_verbs, payloads_into_a_device)
{
	static const unsigned char zeros[KVP_NET_TAIL_BYTES];
	struct vp_node a, b;

	vp_on_device = true;
	open_pair(&a, &b, 64);
	cr_assert_eq(kvp_fake.n_dmabufs, 4);
	for (uint32_t i = 0; i < 100; i++) {
		size_t bytes = 1 + (size_t)i * 211 % (SLOT - KVP_NET_TAIL_BYTES);
		uint32_t slot = i % VP_SLOTS;

		memset(b.land + slot * b.stride, 0, b.stride);
		while (vp_put(&a, &b, i, slot, 0, bytes, true) == -EAGAIN)
			vp_idle(&a, &b, 1);
		cr_assert(vp_turn(&a, &b, &b.data, i + 1, 2000));
		cr_assert_eq(memcmp(b.land + slot * b.stride + bytes, zeros, sizeof(zeros)), 0);
	}
	cr_assert(vp_turn(&a, &b, &a.sent_ok, 100, 2000));
	close_pair(&a, &b);
}

Test(net_verbs, says_whether_it_takes_memory_of_a_device)
{
	struct vp_node a, b;
	struct kvp_net_memory memory = { .stride = SLOT, .n = 4, .device = true, .dmabuf = 0 };
	const char *word;
	char err[200] = "";
	uint32_t before;

	open_pair(&a, &b, 64);
	memory.base = a.land;
	memory.dmabuf_offset = (uintptr_t)a.land % 4096;
	before = kvp_fake.n_mrs;
	cr_assert_eq(kvp_net_verbs.device(a.net, &memory, &word, err, sizeof(err)), 0);
	cr_assert_str_eq(word, "dmabuf");
	kvp_fake.refuse_dmabuf = EOPNOTSUPP;
	cr_assert_eq(kvp_net_verbs.device(a.net, &memory, &word, err, sizeof(err)), -EOPNOTSUPP);
	cr_assert_str_eq(word, "not_registered");
	cr_assert(strstr(err, "fake0") && strstr(err, "dma-buf"), "%s", err);
	memory.dmabuf = -1;
	cr_assert_eq(kvp_net_verbs.device(a.net, &memory, &word, err, sizeof(err)), 0);
	cr_assert_str_eq(word, "peermem");
	kvp_fake.refuse_mr = EFAULT;
	cr_assert_eq(kvp_net_verbs.device(a.net, &memory, &word, err, sizeof(err)), -EFAULT);
	cr_assert(strstr(err, "peer memory"), "%s", err);
	cr_assert_eq(kvp_fake.n_mrs, before);
	kvp_fake.refuse_mr = 0;
	close_pair(&a, &b);
}

/* The lane, which has named a place, is told that nothing comes there. */
Test(net_verbs, a_write_elsewhere_is_lost)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	b.keys[3] = b.keys[4];
	cr_assert_eq(vp_put(&a, &b, 0, 3, 0, 64, true), 0);
	cr_assert_eq(vp_put(&a, &b, 1, 5, 0, 64, true), 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 2, 2000));
	cr_assert_eq(b.data, 1);
	cr_assert_eq(b.lost, 1);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->dropped, 1);
	close_pair(&a, &b);
}

/* Whatever the depth: never more under way than there are receives, so the fake, which fails a send
 * without a receive at once, never does. */
Test(net_verbs, credits_at_every_depth)
{
	for (uint32_t depth = 16; depth <= 40; depth++) {
		struct vp_node a, b;

		open_pair(&a, &b, depth);
		join(&a, &b);
		for (uint64_t i = 0; i < 200; i++) {
			unsigned tries = 0;

			while (vp_send(&a, i) == -EAGAIN && tries++ < 1000) {
				/* The receiver looks only now and then. */
				(void)kvp_net_verbs.progress(a.net);
				if (tries % 3 == 0)
					(void)kvp_net_verbs.progress(b.net);
			}
			cr_assert_lt(tries, 1000);
		}
		cr_assert(vp_turn(&a, &b, &b.messages, 200, 2000));
		cr_assert_eq(a.failed + b.failed, 0);
		close_pair(&a, &b);
	}
}

/* The n-th request of all fails: everything taken is told once, the endpoint fails once, and after
 * it is closed a new one works. */
Test(net_verbs, failure_at_every_request)
{
	for (uint64_t n = 1; n <= VP_SLOTS; n++) {
		struct vp_node a, b;
		uint64_t taken = 0;

		open_pair(&a, &b, 32);
		join(&a, &b);
		kvp_fake.fail_at = kvp_fake.n_posted + n;
		kvp_fake.fail_status = IBV_WC_RETRY_EXC_ERR;
		for (uint64_t i = 0; i < VP_SLOTS; i++) {
			taken += vp_put(&a, &b, i, (uint32_t)i, 0, 100, true) == 0;
			if (i % 3 == 0)
				(void)kvp_net_verbs.progress(a.net);
		}
		cr_assert(vp_turn(&a, &b, &a.told, taken, 2000), "%lu of %lu", a.told, taken);
		cr_assert(vp_turn(&a, &b, &a.failed, 1, 2000));
		cr_assert_eq(a.sent_ok, n - 1);
		cr_assert(vp_turn(&a, &b, &b.messages, n - 1, 2000));
		cr_assert_eq(a.last_status, -ETIMEDOUT);
		kvp_net_verbs.ep_close(a.net, a.ep);
		cr_assert(vp_turn(&a, &b, &a.closed, 1, 2000));
		cr_assert_eq(a.told, taken);

		cr_assert_eq(vp_connect(&a, &b), 0);
		b.next_seq = 50;
		send_until_taken(&a, &b, 50);
		cr_assert(vp_turn(&a, &b, &b.messages, n, 2000));
		close_pair(&a, &b);
	}
}

/* A close tells of all that is under way before it says closed, even if the card is silent. */
Test(net_verbs, close_with_requests_at_the_card)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	kvp_fake.hold = true;
	for (uint64_t i = 0; i < 10; i++)
		cr_assert_eq(vp_put(&a, &b, i, (uint32_t)i, 0, 1000, true), 0);
	(void)kvp_net_verbs.progress(a.net);
	kvp_net_verbs.ep_close(a.net, a.ep);
	cr_assert(vp_turn(&a, &b, &a.closed, 1, 4000));
	cr_assert_eq(a.sent_bad, 10);
	cr_assert_eq(b.data, 0);
	kvp_fake.hold = false;
	close_pair(&a, &b);
}

/* closed() promises that the peer cannot write here any more: its connection is gone too. */
Test(net_verbs, closing_shuts_the_peer_out)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	kvp_net_verbs.ep_close(b.net, b.ep);
	cr_assert(vp_turn(&b, NULL, &b.closed, 1, 2000));
	cr_assert_eq(vp_put(&a, &b, 1, 1, 0, 64, true), 0);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 2000));
	cr_assert_eq(b.land[b.stride], 0, "it was written to");
	close_pair(&a, &b);
}

Test(net_verbs, lost_datagrams_are_repeated)
{
	struct vp_node a, b;

	kvp_fake_reset();
	kvp_fake.drop_datagrams = true;
	{
		struct kvp_net_verbs_config config;
		char err[256];

		kvp_net_verbs_defaults(&config);
		cr_assert_eq(vp_open(&a, &config, SLOT, err, sizeof(err)), 0);
		cr_assert_eq(vp_open(&b, &config, SLOT, err, sizeof(err)), 0);
	}
	cr_assert_eq(vp_connect(&a, &b), 0);
	vp_idle(&a, &b, 120);
	cr_assert_eq(vp_send(&a, 0), -EAGAIN);
	kvp_fake.drop_datagrams = false;
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	cr_assert_eq(kvp_fake.n_qps, 4, "one of each end, and two for datagrams");
	close_pair(&a, &b);
}

Test(net_verbs, wrong_addresses)
{
	struct vp_node a, b;
	struct kvp_net_ep *ep;

	open_pair(&a, &b, 32);
	for (size_t i = 0; i < b.addr_bytes; i++) {
		b.addr[i] ^= 1;
		cr_assert_lt(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, 0, &a, &ep), 0);
		b.addr[i] ^= 1;
	}
	cr_assert_lt(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes - 1, 0, &a, &ep), 0);
	cr_assert_lt(kvp_net_verbs.ep_open(a.net, NULL, 0, 0, &a, &ep), 0);
	close_pair(&a, &b);
}

/* Who does not know the secret half of an address is not answered. */
Test(net_verbs, a_stranger_is_not_connected)
{
	struct kvp_vb_address address;
	struct vp_node a, b;
	uint32_t qps;

	open_pair(&a, &b, 32);
	join(&a, &b);
	kvp_net_verbs.ep_close(a.net, a.ep);
	cr_assert(vp_turn(&a, &b, &a.closed, 1, 2000));
	for (int i = 0; i < 1000 && kvp_fake.n_qps > 2; i++) /* those for datagrams stay */
		vp_idle(&a, &b, 2);
	qps = kvp_fake.n_qps;
	memcpy(&address, b.addr, sizeof(address));
	address.id[3] ^= 1;
	kvp_vb_address_seal(&address);
	memcpy(b.addr, &address, sizeof(address));
	cr_assert_eq(vp_connect(&a, &b), 0);
	vp_idle(&a, &b, 120);
	cr_assert_eq(kvp_fake.n_qps, qps + 1, "only the stranger's own");
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 8000));
	cr_assert_eq(a.last_status, -ETIMEDOUT);
	close_pair(&a, &b);
}

/* The secret of an address is not enough: a session that is up has to be named. */
Test(net_verbs, a_connection_of_no_session_is_rejected)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	vp_admitted = 7;
	cr_assert_eq(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, 8, &a, &a.ep), 0);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 4000));
	cr_assert_eq(a.last_status, -EPERM);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->strangers, 1);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->rejects, 1);
	cr_assert_eq(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, 7, &a, &a.ep), 0);
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	cr_assert_eq(kvp_net_verbs.stats(b.net)->strangers, 1);
	close_pair(&a, &b);
}

/* One that opens and opens: what others need stays, and what is left of him goes with his session.
 */
Test(net_verbs, a_session_has_part_of_the_connections)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	for (uint64_t number = 7; number < 10; number++) {
		vp_admitted = number;
		a.failed = 0;
		for (uint32_t i = 0; i <= KVP_VB_SESSION_INS; i++)
			cr_assert_eq(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, number, &a,
							   &a.ep),
				     0);
		cr_assert(vp_turn(&a, &b, &a.failed, 1, 8000));
		cr_assert_eq(a.last_status, -EDQUOT);
	}
	cr_assert_eq(b.net->n_ins, 1 + 3 * KVP_VB_SESSION_INS);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->strangers, 3);

	/* The next finds half of the places taken. The first, to whom an endpoint of ours leads,
	 * stays. */
	vp_admitted = 10;
	for (uint32_t i = 0; i < KVP_VB_SESSION_INS; i++)
		cr_assert_eq(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, 10, &a, &a.ep), 0);
	for (unsigned i = 0; i < 4000 && !a.ep->joined; i++)
		vp_idle(&a, &b, 1);
	vp_idle(&a, &b, 2);
	cr_assert_eq(b.net->n_ins, 1 + KVP_VB_SESSION_INS);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->strangers, 3);
	vp_close(&a);
	vp_close(&b);
	expect_nothing_left();
}

Test(net_verbs, too_many_connections_are_rejected)
{
	struct kvp_net_verbs_config config;
	struct vp_node a[3], b;
	char err[256];

	kvp_fake_reset();
	kvp_net_verbs_defaults(&config);
	config.depth = 16;
	for (uint32_t i = 0; i < 3; i++)
		cr_assert_eq(vp_open(&a[i], &config, SLOT, err, sizeof(err)), 0);
	kvp_fake.max_cqe = 2 * (16 + KVP_VB_BACK_DEPTH + 1) + 2 * KVP_VB_UD_DEPTH + 1;
	cr_assert_eq(vp_open(&b, &config, SLOT, err, sizeof(err)), 0);
	for (uint32_t i = 0; i < 3; i++)
		cr_assert_eq(vp_connect(&a[i], &b), 0);
	send_until_taken(&a[0], &b, 0);
	send_until_taken(&a[1], &b, 1);
	cr_assert(vp_turn(&a[2], &b, &a[2].failed, 1, 2000));
	cr_assert_eq(a[2].last_status, -ENOBUFS);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->rejects, 1);
	cr_assert_eq(kvp_net_verbs.stats(b.net)->strangers, 0);
	for (uint32_t i = 0; i < 3; i++)
		vp_close(&a[i]);
	vp_close(&b);
	expect_nothing_left();
}

/* Without the right to lock all, whoever runs the test. */
static void limit_memlock(rlim_t bytes)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = { 0 };
	const struct rlimit limit = { .rlim_cur = bytes, .rlim_max = bytes };

	cr_assert_eq(syscall(SYS_capget, &header, data), 0);
	data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
	cr_assert_eq(syscall(SYS_capset, &header, data), 0);
	cr_assert_eq(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
}

/* Rings that are too large are refused before the kernel does it, with what to do. */
Test(net_verbs, a_memlock_limit_is_said_at_the_start)
{
	struct kvp_net_verbs_config config;
	struct vp_node node;
	char err[256] = "";

	kvp_fake_reset();
	kvp_fake.n_devices = 2;
	kvp_net_verbs_defaults(&config);
	config.devices = "fake0,fake1";
	limit_memlock(VP_SLOTS * SLOT * 4); /* two rings, each on two rails, without their tails */
	cr_assert_eq(kvp_nic_memlock(), VP_SLOTS * SLOT * 4);
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENOMEM);
	cr_assert(strstr(err, "LimitMEMLOCK=infinity below [Service]"), "%s", err);
	cr_assert(strstr(err, "the limit is 4194304:"), "%s", err);
	config.devices = "fake0";
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), 0, "%s", err);
	vp_close(&node);

	kvp_fake.refuse_mr = ENOMEM; /* the kernel has less, since others lock memory, too */
	cr_assert_eq(vp_open(&node, &config, SLOT, err, sizeof(err)), -ENOMEM);
	cr_assert(strstr(err, "LimitMEMLOCK=infinity"), "%s", err);
	kvp_fake.refuse_mr = 0;
	expect_nothing_left();
}

/* Credits make it impossible, so they are made up: the peer's card has no receive left. */
Test(net_verbs, a_missing_receive_is_said)
{
	struct kvp_net_rail rails[KVP_NET_RAILS];
	struct vp_node a, b;
	uint64_t seq = 0;

	open_pair(&a, &b, 32);
	send_until_taken(&a, &b, seq++);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	a.ep->paths[0].conn->credits = 1000;
	while (a.failed == 0 && seq < 100) {
		if (vp_send(&a, seq) == 0)
			seq++;
		(void)kvp_net_verbs.progress(a.net);
	}
	cr_assert_eq(a.failed, 1);
	cr_assert_eq(a.last_status, -ENOBUFS);
	cr_assert_not_null(strstr(kvp_net_verbs.ep_reason(a.ep), "RNR retry counter exceeded"),
			   "%s", kvp_net_verbs.ep_reason(a.ep));
	cr_assert_eq(kvp_net_verbs.rails(a.net, rails), 1);
	cr_assert_eq(rails[0].lost, 1);
	close_pair(&a, &b);
}

/* Two sessions of the same nets, one for each direction, of which one ends at one end. */
Test(net_verbs, the_end_of_a_session_leaves_the_other)
{
	struct kvp_net_ep *others[2];
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	others[0] = a.ep;
	others[1] = b.ep;
	cr_assert_eq(kvp_net_verbs.ep_open(a.net, b.addr, b.addr_bytes, 7, &a, &a.ep), 0);
	cr_assert_eq(kvp_net_verbs.ep_open(b.net, a.addr, a.addr_bytes, 7, &b, &b.ep), 0);
	join(&a, &b);
	send_until_taken(&a, &b, 0);
	send_until_taken(&b, &a, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));

	kvp_net_verbs.ep_close(b.net, others[1]);
	cr_assert(vp_turn(&a, &b, &b.closed, 1, 2000));
	b.ep = TAILQ_FIRST(&b.net->eps);
	for (uint64_t i = 1; i < 50; i++) {
		send_until_taken(&a, &b, i);
		send_until_taken(&b, &a, i);
	}
	cr_assert(vp_turn(&a, &b, &b.messages, 50, 2000));
	cr_assert(vp_turn(&a, &b, &a.messages, 50, 2000));
	cr_assert_eq(a.failed + b.failed, 0);

	/* And the one that has ended cannot be written to any more. */
	a.ep = others[0];
	send_until_taken(&a, &b, 50);
	cr_assert(vp_turn(&a, &b, &a.failed, 1, 4000));
	cr_assert_eq(b.messages, 50);
	close_pair(&a, &b);
}

Test(net_verbs, port_events)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	kvp_fake_event(0, IBV_EVENT_PORT_ERR, NULL);
	cr_assert(vp_turn(&a, NULL, &a.failed, 1, 2000));
	cr_assert_eq(a.last_status, -ENETDOWN);
	kvp_net_verbs.ep_close(a.net, a.ep);
	cr_assert(vp_turn(&a, &b, &a.closed, 1, 2000));
	cr_assert_eq(vp_connect(&a, &b), -ENETDOWN);
	kvp_fake_event(0, IBV_EVENT_PORT_ACTIVE, NULL);
	vp_idle(&a, &b, 30); /* it is the port of both: who hears late drops what is new */
	cr_assert_eq(vp_connect(&a, &b), 0);
	b.next_seq = 1;
	send_until_taken(&a, &b, 1);
	cr_assert(vp_turn(&a, &b, &b.messages, 2, 2000));
	cr_assert_eq(kvp_net_verbs.stats(a.net)->events, 2);
	close_pair(&a, &b);
}

Test(net_verbs, a_dead_device_fails_all)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	join(&a, &b);
	kvp_fake_event(0, IBV_EVENT_DEVICE_FATAL, NULL);
	cr_assert(vp_turn(&a, NULL, &a.failed, 1, 2000));
	kvp_net_verbs.ep_close(a.net, a.ep);
	cr_assert(vp_turn(&a, NULL, &a.closed, 1, 4000));
	cr_assert_eq(vp_connect(&a, &b), -ENODEV);
	close_pair(&a, &b);
}

Test(net_verbs, an_idle_connection_is_tried)
{
	struct kvp_net_verbs_config config;
	struct vp_node a, b;
	char err[256];

	kvp_fake_reset();
	kvp_net_verbs_defaults(&config);
	config.keepalive_ns = 20000000 * support_slow();
	cr_assert_eq(vp_open(&a, &config, SLOT, err, sizeof(err)), 0);
	cr_assert_eq(vp_open(&b, &config, SLOT, err, sizeof(err)), 0);
	cr_assert_eq(vp_connect(&a, &b), 0);
	send_until_taken(&a, &b, 0);
	vp_idle(&a, &b, 200);
	cr_assert_eq(a.failed, 0);
	cr_assert_gt(kvp_net_verbs.stats(a.net)->keepalives, 0);
	vp_close(&b); /* its queue pairs are gone without a word */
	cr_assert(vp_turn(&a, NULL, &a.failed, 1, 2000));
	vp_close(&a);
	expect_nothing_left();
}

/* Whoever sleeps after it sleeps on nothing, unless he is told to arm again. */
Test(net_verbs, an_event_without_a_completion)
{
	struct vp_node a, b;
	struct pollfd pfd;

	open_pair(&a, &b, 32);
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	while (kvp_net_verbs.progress(b.net) > 0 || kvp_net_verbs.arm(b.net) < 0)
		;
	kvp_fake_stray_events();
	cr_assert_gt(kvp_net_verbs.progress(b.net), 0, "armed no more, and nobody knows");
	while (kvp_net_verbs.progress(b.net) > 0 || kvp_net_verbs.arm(b.net) < 0)
		;
	cr_assert_eq(vp_send(&a, 1), 0);
	(void)kvp_net_verbs.progress(a.net);
	pfd = (struct pollfd){ .fd = kvp_net_verbs.fd(b.net), .events = POLLIN };
	cr_assert_eq(poll(&pfd, 1, support_slow_ms(2000)), 1);
	cr_assert(vp_turn(&a, &b, &b.messages, 2, 2000));
	close_pair(&a, &b);
}

Test(net_verbs, sleep_wakes_up)
{
	struct vp_node a, b;

	open_pair(&a, &b, 32);
	send_until_taken(&a, &b, 0);
	cr_assert(vp_turn(&a, &b, &b.messages, 1, 2000));
	for (uint64_t i = 1; i <= 20; i++) {
		struct pollfd pfd = { .fd = kvp_net_verbs.fd(b.net), .events = POLLIN };

		while (kvp_net_verbs.progress(b.net) > 0 || kvp_net_verbs.arm(b.net) < 0 ||
		       kvp_net_verbs.progress(b.net) > 0)
			;
		cr_assert_eq(vp_send(&a, i), 0);
		(void)kvp_net_verbs.progress(a.net);
		cr_assert_eq(poll(&pfd, 1, support_slow_ms(2000)), 1);
		cr_assert(vp_turn(&a, &b, &b.messages, i + 1, 2000));
	}
	close_pair(&a, &b);
}
