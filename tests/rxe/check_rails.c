/* SPDX-License-Identifier: Apache-2.0 */

/* Two rails, each a veth pair, and the loss of one. */

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"
#include "tests/rxe/checks.h"
#include "tests/support_verbs.h"

#define SLOT (256u << 10)
#define HALF (VP_SLOTS / 2)

struct pair {
	struct vp_node a, b;
	uint64_t puts;
};

static void open_on(struct vp_node *node, const char *devices)
{
	struct kvp_net_verbs_config config;
	char err[256] = "";
	int r;

	kvp_net_verbs_defaults(&config);
	config.rdma_cm = getenv("KVP_TEST_CONNECT"); /* NOLINT(concurrency-mt-unsafe) */
	config.devices = devices;
	r = vp_open(node, &config, SLOT, err, sizeof(err));
	KVP_EXPECT(r == 0, "%s: %s", devices, err);
}

static void open_pair(struct pair *pair)
{
	pair->puts = 0;
	open_on(&pair->a, "rxe1,rxe3");
	open_on(&pair->b, "rxe2,rxe4");
	KVP_EXPECT(vp_connect(&pair->a, &pair->b) == 0);
	KVP_EXPECT(vp_connect(&pair->b, &pair->a) == 0);
}

static void close_pair(struct pair *pair)
{
	KVP_EXPECT(pair->a.bad == 0 && pair->b.bad == 0, "%lu and %lu bad", pair->a.bad,
		   pair->b.bad);
	vp_close(&pair->a);
	vp_close(&pair->b);
}

/* A slot is used again only when transport and receiver are done with it. */
static void pump(struct pair *pair, unsigned n)
{
	struct vp_node *a = &pair->a, *b = &pair->b;

	for (unsigned i = 0; i < n; i++, pair->puts++) {
		uint64_t done = pair->puts > HALF ? pair->puts - HALF : 0;
		size_t bytes = 1 + (size_t)pair->puts * 6151 % SLOT;

		KVP_EXPECT(vp_turn(a, b, &a->told, done, 20000), "%lu told of %lu", a->told, done);
		KVP_EXPECT(vp_turn(a, b, &b->data, done, 20000), "%lu here of %lu", b->data, done);
		while (vp_put(a, b, pair->puts, (uint32_t)(pair->puts % VP_SLOTS), 0, bytes,
			      pair->puts % 4 != 3) == -EAGAIN)
			vp_idle(a, b, 1);
		KVP_EXPECT(a->failed == 0, "%s", kvp_net_verbs.ep_reason(a->ep));
	}
}

static void expect_all(struct pair *pair)
{
	struct vp_node *a = &pair->a, *b = &pair->b;

	KVP_EXPECT(vp_turn(a, b, &b->data, pair->puts, 20000), "%lu of %lu", b->data, pair->puts);
	KVP_EXPECT(vp_turn(a, b, &a->sent_ok, pair->puts, 20000), "%lu sent", a->sent_ok);
	KVP_EXPECT(b->data == pair->puts && a->sent_bad == 0 && a->failed + b->failed == 0);
}

static uint64_t bytes_of(const struct pair *pair, unsigned rail)
{
	return pair->a.net->rails[rail].bytes;
}

static void both_are_used(void)
{
	struct pair pair;

	open_pair(&pair);
	for (uint64_t from = vp_ms(); bytes_of(&pair, 0) == 0 || bytes_of(&pair, 1) == 0;) {
		KVP_EXPECT(vp_ms() - from < 20000, "one is never used");
		pump(&pair, 2);
		vp_idle(&pair.a, &pair.b, 5);
	}
	pump(&pair, 200);
	expect_all(&pair);
	printf("  %s: %lu and %lu bytes\n", kvp_net_verbs.describe(pair.a.net), bytes_of(&pair, 0),
	       bytes_of(&pair, 1));
	KVP_EXPECT(bytes_of(&pair, 0) > 1u << 20 && bytes_of(&pair, 1) > 1u << 20);
	close_pair(&pair);
}

static void link_set(unsigned pair, const char *state)
{
	char command[160];

	(void)snprintf(command, sizeof(command),
		       "ip link set veth%u %s && ip route replace 10.9.%u.2/32 dev veth%u src "
		       "10.9.%u.1 2>/dev/null; true",
		       pair, state, pair, pair, pair);
	KVP_EXPECT(system(command) == 0, "%s", command); /* NOLINT: a fixed string */
}

/* In the middle of a transfer; nothing fails, nothing is lost, and the link is used again. */
static void a_link_goes_down_and_up(unsigned which)
{
	unsigned rail = which / 2;
	struct pair pair;
	uint64_t before, from;

	open_pair(&pair);
	pump(&pair, 60);
	link_set(which, "down");
	pump(&pair, 100);
	expect_all(&pair);
	printf("  %lu messages went over the other rail\n",
	       pair.a.net->rails[0].resent + pair.a.net->rails[1].resent);
	before = bytes_of(&pair, rail);
	link_set(which, "up");
	from = vp_ms();
	while (bytes_of(&pair, rail) == before) {
		KVP_EXPECT(vp_ms() - from < 20000, "the rail is not used again");
		pump(&pair, 2);
		vp_idle(&pair.a, &pair.b, 5);
	}
	printf("  used again after %lu ms\n", vp_ms() - from);
	pump(&pair, 60);
	expect_all(&pair);
	close_pair(&pair);
}

static void the_first_link(void)
{
	a_link_goes_down_and_up(1);
}

static void the_second_link(void)
{
	a_link_goes_down_and_up(3);
}

/* Packets vanish, no event says so: only the timers of the card notice. */
static void a_link_goes_silent(void)
{
	struct pair pair;
	uint64_t from;

	open_pair(&pair);
	pump(&pair, 60);
	expect_all(&pair);
	KVP_EXPECT(system("tc qdisc add dev veth3 root netem loss 100%") == 0); /* NOLINT */
	from = vp_ms();
	pump(&pair, 60);
	expect_all(&pair);
	printf("  %lu ms for 60 payloads, %lu messages went over the other rail\n", vp_ms() - from,
	       pair.a.net->rails[0].resent + pair.a.net->rails[1].resent);
	KVP_EXPECT(pair.a.net->rails[1].lost == 1);
	KVP_EXPECT(system("tc qdisc del dev veth3 root") == 0); /* NOLINT */
	close_pair(&pair);
}

static bool says(const char *folder, unsigned number, const char *file, const char *word)
{
	char path[96], text[32] = "";
	FILE *f;

	(void)snprintf(path, sizeof(path), "%s%u%s", folder, number, file); /* fits */
	f = fopen(path, "re");
	if (f) {
		(void)!fgets(text, sizeof(text), f); /* nothing is no word */
		(void)fclose(f);
	}
	return strstr(text, word);
}

/* After a while without link the kernel takes up to a second to notice that it is back, at the ends
 * that were not set, and whatever comes next would lose its first packets. */
static void wait_for_links(void)
{
	uint64_t from = vp_ms();

	for (unsigned i = 1; i <= 4; i++) {
		while (!says("/sys/class/net/veth", i, "/operstate", "up") ||
		       !says("/sys/class/infiniband/rxe", i, "/ports/1/state", "ACTIVE")) {
			KVP_EXPECT(vp_ms() - from < 20000, "link %u does not come up", i);
			(void)usleep(10000);
		}
	}
}

static void without_any_it_fails_in_words(void)
{
	struct pair pair;

	open_pair(&pair);
	pump(&pair, 60);
	expect_all(&pair);
	link_set(1, "down");
	link_set(3, "down");
	KVP_EXPECT(vp_turn(&pair.a, &pair.b, &pair.a.failed, 1, 20000));
	printf("  %s\n", kvp_net_verbs.ep_reason(pair.a.ep));
	KVP_EXPECT(kvp_net_verbs.ep_reason(pair.a.ep)[0]);
	link_set(1, "up");
	link_set(3, "up");
	close_pair(&pair);
	wait_for_links();
}

const struct kvp_check kvp_checks_rails[] = {
	{ "rails: both are used", both_are_used, 40 },
	{ "rails: the first link goes down and up", the_first_link, 60 },
	{ "rails: the second link goes down and up", the_second_link, 60 },
	{ "rails: a link goes silent", a_link_goes_silent, 60 },
	{ "rails: without any it fails in words", without_any_it_fails_in_words, 60 },
	{ NULL, NULL, 0 },
};
