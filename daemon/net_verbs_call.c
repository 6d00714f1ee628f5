/* SPDX-License-Identifier: Apache-2.0 */

/* Calls that may wait: who asks for a way to a peer waits for its answer, up to seconds; who
 * destroys a queue pair, until the device has let go of it. Of neither may the lane wait, whose
 * other rails are well: each rail has a thread for them. */

#include <errno.h>
#include <signal.h>
#include <time.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

/* Told when it took longer. */
#define LONG_NS UINT64_C(500000000)

static uint64_t clock_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

static void run(struct kvp_vb_call *call)
{
	uint64_t from = clock_ns();

	call->run(call);
	call->took_ns = clock_ns() - from;
}

static void finish(struct kvp_net *net, struct kvp_vb_call *call)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(20, 10);

	net->n_calls--;
	call->out = false;
	net->stats.calls_slow += call->took_ns >= LONG_NS;
	if (call->took_ns >= LONG_NS)
		kvp_log_limited(&limit, KVP_LOG_WARNING, "verbs %s: %s took %llu ms",
				call->rail->nic.device, call->what,
				(unsigned long long)(call->took_ns / 1000000));
	call->done(call);
}

/* ---- the rail's thread */

static void wake_caller(void *arg)
{
	(void)sem_post(arg); /* no more than calls that are out */
}

static void *caller_main(void *arg)
{
	struct kvp_vb_caller *caller = arg;
	bool on = true;

	while (on) {
		struct kvp_node *node;

		while (sem_wait(&caller->wake) < 0 && errno == EINTR)
			;
		node = kvp_inbox_take(&caller->todo);
		while (node) {
			struct kvp_vb_call *call = KVP_CONTAINER_OF(node, struct kvp_vb_call, node);

			node = node->next;
			if (call == &caller->last) {
				on = false;
				break;
			}
			run(call);
			kvp_inbox_push(&call->rail->net->calls_done, &call->node);
		}
	}
	return NULL;
}

int kvp_vb_calls_start(struct kvp_vb_rail *rail)
{
	struct kvp_vb_caller *caller = &rail->caller;
	sigset_t all, before;
	int r;

	kvp_inbox_init(&caller->todo, wake_caller, &caller->wake);
	(void)sem_init(&caller->wake, 0, 0); /* a valid value */
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the loop's */
	r = pthread_create(&caller->thread, NULL, caller_main, caller);
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (r) {
		kvp_inbox_fini(&caller->todo);
		(void)sem_destroy(&caller->wake);
		return -r;
	}
	caller->on = true;
	return 0;
}

void kvp_vb_calls_stop(struct kvp_vb_rail *rail)
{
	struct kvp_vb_caller *caller = &rail->caller;

	if (!caller->on)
		return;

	kvp_inbox_push(&caller->todo, &caller->last.node);
	(void)pthread_join(caller->thread, NULL); /* ours, once */
	kvp_inbox_fini(&caller->todo);
	(void)sem_destroy(&caller->wake);
	caller->on = false;
}

/* ---- the lane's */

void kvp_vb_call(struct kvp_vb_rail *rail, struct kvp_vb_call *call)
{
	call->rail = rail;
	call->out = true;
	rail->net->n_calls++;
	if (rail->caller.on) {
		kvp_inbox_push(&rail->caller.todo, &call->node);
		return;
	}
	run(call); /* the net closes */
	finish(rail->net, call);
}

int kvp_vb_turn_calls(struct kvp_net *net)
{
	struct kvp_node *node = net->n_calls > 0 ? kvp_inbox_take(&net->calls_done) : NULL;
	int n = 0;

	for (; node; n++) {
		struct kvp_vb_call *call = KVP_CONTAINER_OF(node, struct kvp_vb_call, node);

		node = node->next; /* done() may free it, or call again */
		finish(net, call);
	}
	return n;
}
