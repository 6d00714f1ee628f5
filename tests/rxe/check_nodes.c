/* SPDX-License-Identifier: Apache-2.0 */

/* Two guests as two nodes. Both run this; node 1 is killed like by a power cut. */

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "proto/util.h"
#include "tests/rxe/checks.h"
#include "tests/support_verbs.h"

#define SHARE "/run/rdma-guest/"
#define SLOT (256u << 10)
#define N 40u
/* Payloads that a node sends beyond those it has had: the peer may be as far behind again, and has
 * looked at the slot of payload i - VP_SLOTS before payload i. */
#define AHEAD 4u
static_assert(2 * AHEAD + 4 <= VP_SLOTS, "a slot is looked at before it is written to again");

/* What one node tells the other. */
struct card {
	uint64_t addr_bytes;
	unsigned char addr[256];
	struct kvp_net_key keys[VP_SLOTS];
};

static bool second(void)
{
	const char *node = getenv("RDMA_NODE"); /* NOLINT(concurrency-mt-unsafe): one thread */

	return node && strcmp(node, "1") == 0;
}

static void show_card(const struct vp_node *node)
{
	struct card card = { .addr_bytes = node->addr_bytes };
	const char *path = second() ? SHARE "card.1" : SHARE "card.0";
	char part[64];
	int fd;

	KVP_EXPECT(node->addr_bytes <= sizeof(card.addr));
	memcpy(card.addr, node->addr, node->addr_bytes);
	memcpy(card.keys, node->keys, sizeof(card.keys));
	(void)snprintf(part, sizeof(part), "%s.part", path); /* fits */
	fd = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	KVP_EXPECT(fd >= 0 && write(fd, &card, sizeof(card)) == sizeof(card));
	(void)close(fd);
	KVP_EXPECT(rename(part, path) == 0);
}

static void see_card(struct vp_node *peer)
{
	struct card card;
	uint64_t until = vp_ms() + 30000;
	int fd;

	while ((fd = open(second() ? SHARE "card.0" : SHARE "card.1", O_RDONLY)) < 0) {
		KVP_EXPECT(vp_ms() < until, "the other node is silent");
		(void)usleep(100000);
	}
	KVP_EXPECT(read(fd, &card, sizeof(card)) == sizeof(card));
	(void)close(fd);
	*peer = (struct vp_node){ .addr_bytes = card.addr_bytes };
	memcpy(peer->addr, card.addr, card.addr_bytes);
	memcpy(peer->keys, card.keys, sizeof(card.keys));
}

static void exchange(struct vp_node *node, struct vp_node *peer)
{
	for (uint64_t i = 0; i < N; i++) {
		size_t bytes = 1 + (size_t)i * 6151 % SLOT;

		while (vp_put(node, peer, i, (uint32_t)(i % VP_SLOTS), 0, bytes, true) == -EAGAIN)
			vp_idle(node, NULL, 1);
		KVP_EXPECT(vp_turn(node, NULL, &node->data, i > AHEAD ? i - AHEAD : 0, 20000));
	}
	KVP_EXPECT(vp_turn(node, NULL, &node->data, N, 20000), "%lu of %u", node->data, N);
	KVP_EXPECT(vp_turn(node, NULL, &node->sent_ok, N, 20000), "%lu of %u", node->sent_ok, N);
	KVP_EXPECT(node->bad == 0);
}

static void payloads_cross_and_a_power_cut_is_noticed(void)
{
	struct kvp_net_verbs_config config;
	struct vp_node node, peer;
	char err[256];
	uint64_t from;
	int fd;

	kvp_net_verbs_defaults(&config);
	/* A busy host loses packets, and soft RoCE a connection then, or stops a guest for longer
	 * than cards are silent. */
	config.devices = "rxe0,rxe1";
	config.timeout = 17; /* 0.5 s */
	KVP_EXPECT(vp_open(&node, &config, SLOT, err, sizeof(err)) == 0, "%s", err);
	show_card(&node);
	see_card(&peer);
	KVP_EXPECT(vp_connect(&node, &peer) == 0);
	exchange(&node, &peer);
	printf("  %u payloads each way, %s\n", N, kvp_net_verbs.describe(node.net));
	if (second()) {
		vp_idle(&node, NULL, 60000);
		KVP_EXPECT(false, "still alive");
	}

	vp_idle(&node, NULL, 1000);
	KVP_EXPECT(node.failed == 0);
	fd = open(SHARE "kill.1", O_WRONLY | O_CREAT, 0600);
	KVP_EXPECT(fd >= 0);
	(void)close(fd);
	from = vp_ms();
	KVP_EXPECT(vp_turn(&node, NULL, &node.failed, 1, 10000), "nobody noticed");
	printf("  noticed after %lu ms: %s\n", vp_ms() - from, strerror(-node.last_status));
	kvp_net_verbs.ep_close(node.net, node.ep);
	KVP_EXPECT(vp_turn(&node, NULL, &node.closed, 1, 5000));
	vp_close(&node);
}

const struct kvp_check kvp_checks_nodes[] = {
	{ "nodes: payloads cross, and a power cut is noticed",
	  payloads_cross_and_a_power_cut_is_noticed, 90 },
	{ NULL, NULL, 0 },
};
