/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three producers against one reader that sleeps in poll(2): nothing is lost or reordered, and no
 * wake-up goes missing (the reader would sleep until the deadline). Every node is written by its
 * producer and freed by the reader, so that TSan sees the hand-over.
 */

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/inbox.h"
#include "proto/util.h"

#define N_PRODUCERS 3
#define N_EACH 100000u
#define DEADLINE_MS 60000

struct item {
	struct kvp_node node;
	unsigned producer, seq;
};

struct producer {
	pthread_t thread;
	struct kvp_inbox *inbox; /* borrowed */
	unsigned idx;
};

static void *produce(void *arg)
{
	struct producer *self = arg;

	for (unsigned seq = 0; seq < N_EACH; seq++) {
		struct item *item = malloc(sizeof(*item));

		if (!item)
			abort();
		item->producer = self->idx;
		item->seq = seq;
		kvp_inbox_push(self->inbox, &item->node);
		if (seq % 1000 == 0)
			usleep(1); /* lets the reader fall asleep now and then */
	}
	return NULL;
}

/* Returns how many items were taken; -1 when one is out of order. */
static int drain(struct kvp_inbox *inbox, unsigned *next_seq)
{
	struct kvp_node *node = kvp_inbox_take(inbox);
	int n = 0;

	while (node) {
		struct item *item = KVP_CONTAINER_OF(node, struct item, node);
		bool in_order = item->seq == next_seq[item->producer]++;

		node = node->next;
		free(item);
		if (!in_order)
			return -1;
		n++;
	}
	return n;
}

static int consume(struct kvp_inbox *inbox, int fd)
{
	unsigned next_seq[N_PRODUCERS] = { 0 }, total = 0, wakes = 0;

	while (total < N_PRODUCERS * N_EACH) {
		struct pollfd p = { .fd = fd, .events = POLLIN };
		int n;

		if (poll(&p, 1, DEADLINE_MS) != 1) {
			(void)printf("no wake-up after %u items\n", total);
			return 1;
		}
		kvp_wakefd_clear(fd);
		wakes++;
		n = drain(inbox, next_seq);
		if (n < 0) {
			(void)printf("out of order after %u items\n", total);
			return 1;
		}
		total += (unsigned)n;
	}
	(void)printf("%u items, %u wake-ups\n", total, wakes);
	return 0;
}

int main(void)
{
	struct producer producers[N_PRODUCERS];
	struct kvp_inbox inbox;
	int fd = kvp_wakefd_open();
	int r;

	if (fd < 0)
		return 1;

	kvp_inbox_init(&inbox, kvp_wakefd_wake, &fd);
	for (unsigned i = 0; i < N_PRODUCERS; i++) {
		producers[i] = (struct producer){ .inbox = &inbox, .idx = i };
		if (pthread_create(&producers[i].thread, NULL, produce, &producers[i]) != 0)
			return 1;
	}

	r = consume(&inbox, fd);
	if (r != 0)
		return r; /* producers may still run: no clean end from here */

	for (unsigned i = 0; i < N_PRODUCERS; i++)
		pthread_join(producers[i].thread, NULL);
	kvp_inbox_fini(&inbox);
	close(fd);
	return 0;
}
