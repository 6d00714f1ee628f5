/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/inbox.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

void kvp_inbox_init(struct kvp_inbox *inbox, kvp_wake_fn *wake, void *wake_arg)
{
	pthread_mutex_init(&inbox->lock, NULL);
	inbox->head = NULL;
	inbox->tail = &inbox->head;
	inbox->wake = wake;
	inbox->wake_arg = wake_arg;
}

void kvp_inbox_fini(struct kvp_inbox *inbox)
{
	assert(!inbox->head);
	pthread_mutex_destroy(&inbox->lock);
}

void kvp_inbox_push(struct kvp_inbox *inbox, struct kvp_node *node)
{
	bool was_empty;

	node->next = NULL;
	pthread_mutex_lock(&inbox->lock);
	was_empty = !inbox->head;
	*inbox->tail = node;
	inbox->tail = &node->next;
	pthread_mutex_unlock(&inbox->lock);

	/* A reader that was woken for an older node takes this one too: only the first node after
	 * a take needs a wake-up. Outside the lock, or the woken reader would run into it. */
	if (was_empty)
		inbox->wake(inbox->wake_arg);
}

struct kvp_node *kvp_inbox_take(struct kvp_inbox *inbox)
{
	struct kvp_node *all;

	pthread_mutex_lock(&inbox->lock);
	all = inbox->head;
	inbox->head = NULL;
	inbox->tail = &inbox->head;
	pthread_mutex_unlock(&inbox->lock);
	return all;
}

int kvp_wakefd_open(void)
{
	int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

void kvp_wakefd_wake(void *arg)
{
	const int *fd = arg;
	uint64_t one = 1;
	ssize_t n;

	/* EAGAIN means that 2^64 - 2 wake-ups are pending: the reader is as awake as can be. */
	do {
		n = write(*fd, &one, sizeof(one));
	} while (n < 0 && errno == EINTR);
}

void kvp_wakefd_clear(int fd)
{
	uint64_t count;
	ssize_t n;

	/* One read takes the whole count; EAGAIN means that there was none. */
	do {
		n = read(fd, &count, sizeof(count));
	} while (n < 0 && errno == EINTR);
}
