/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/inbox.h"
#include "proto/util.h"

struct item {
	int value;
	struct kvp_node node;
};

static void count_wake(void *arg)
{
	++*(int *)arg;
}

static int value_of(const struct kvp_node *node)
{
	return KVP_CONTAINER_OF(node, struct item, node)->value;
}

Test(inbox, keeps_order_and_wakes_once)
{
	struct item items[3] = { { .value = 1 }, { .value = 2 }, { .value = 3 } };
	struct kvp_inbox inbox;
	struct kvp_node *node;
	int wakes = 0;

	kvp_inbox_init(&inbox, count_wake, &wakes);
	cr_assert_null(kvp_inbox_take(&inbox));

	for (int i = 0; i < 3; i++)
		kvp_inbox_push(&inbox, &items[i].node);
	cr_assert_eq(wakes, 1);

	node = kvp_inbox_take(&inbox);
	for (int i = 0; i < 3; i++, node = node->next)
		cr_assert_eq(value_of(node), i + 1);
	cr_assert_null(node);
	cr_assert_null(kvp_inbox_take(&inbox));
	kvp_inbox_fini(&inbox);
}

Test(inbox, wakes_again_after_a_take)
{
	struct item first = { .value = 1 }, second = { .value = 2 };
	struct kvp_inbox inbox;
	int wakes = 0;

	kvp_inbox_init(&inbox, count_wake, &wakes);
	kvp_inbox_push(&inbox, &first.node);
	cr_assert_eq(kvp_inbox_take(&inbox), &first.node);
	kvp_inbox_push(&inbox, &second.node);
	cr_assert_eq(wakes, 2);
	cr_assert_eq(kvp_inbox_take(&inbox), &second.node);
	cr_assert_null(second.node.next);
	kvp_inbox_fini(&inbox);
}

static int readable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, 0);
}

Test(inbox, wakefd_merges_wakes_and_clears)
{
	int fd = kvp_wakefd_open();

	cr_assert_geq(fd, 0);
	cr_assert_eq(readable(fd), 0);
	kvp_wakefd_clear(fd); /* nothing to clear: must not block */

	kvp_wakefd_wake(&fd);
	kvp_wakefd_wake(&fd);
	cr_assert_eq(readable(fd), 1);
	kvp_wakefd_clear(fd);
	cr_assert_eq(readable(fd), 0);
	close(fd);
}
