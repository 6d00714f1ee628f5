/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The way work changes hands between threads: an unbounded FIFO of intrusive nodes with a wake-up.
 *
 * Any thread pushes, one thread (the reader) takes. A pushed node is the reader's from that moment.
 * The inbox itself never refuses: whoever pushes keeps the number of nodes in flight below a limit
 * of its own.
 */

#include <pthread.h>

/* First or embedded member of whatever travels; KVP_CONTAINER_OF gets back to it. */
struct kvp_node {
	struct kvp_node *next;
};

/* Makes the reader look into the inbox soon. Runs on the pushing thread, without the lock, so it
 * may run late: after the reader has already taken the node. Must not block. */
typedef void kvp_wake_fn(void *arg);

struct kvp_inbox {
	pthread_mutex_t lock;   /* guards head and tail */
	struct kvp_node *head;  /* oldest first */
	struct kvp_node **tail; /* the last node's next, or &head: the inbox must not be moved */
	kvp_wake_fn *wake;
	void *wake_arg; /* borrowed, outlives the inbox */
};

void kvp_inbox_init(struct kvp_inbox *inbox, kvp_wake_fn *wake, void *wake_arg);

/* The inbox must be empty (the reader's last take got everything) and no thread may push any more.
 * A wake-up of a push that has not yet returned still uses wake_arg. */
void kvp_inbox_fini(struct kvp_inbox *inbox);

/* Appends a node, which is the reader's from now on, and wakes the reader if the inbox was empty.
 */
void kvp_inbox_push(struct kvp_inbox *inbox, struct kvp_node *node);

/*
 * Takes all nodes, oldest first, linked by next and ended by NULL; NULL when there are none.
 * Reader's thread only. What acknowledges the wake-up (kvp_wakefd_clear(); libuv does it by itself
 * before the callback) must come before the take: the other order loses a wake-up for a node that
 * arrives in between.
 */
struct kvp_node *kvp_inbox_take(struct kvp_inbox *inbox);

/* An eventfd for a reader that sleeps in poll(2); close it with close(2). Negative errno on error.
 */
int kvp_wakefd_open(void);

/* The kvp_wake_fn for it; `arg` points to the int that holds the descriptor. */
void kvp_wakefd_wake(void *arg);

/* Acknowledges all wake-ups so far; harmless when there were none. */
void kvp_wakefd_clear(int fd);
