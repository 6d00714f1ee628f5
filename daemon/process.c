/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/process.h"

#include <stdlib.h>

#include <utlist.h>

#include "daemon/session.h"
#include "proto/util.h"

/* Of the loop's time a process may have half in the long run, and so much at once. One that always
 * has more to ask would otherwise keep the loop's thread running, and the scheduler would let such
 * a thread wait when somebody else's request comes. */
#define SHARE_NS 2000000
#define TURN_NS 500000 /* of that, a turn at most */

static void drop(struct kvp_process **list, struct kvp_process *process)
{
	DL_DELETE(*list, process);
	free(process);
}

static void forget_old(struct kvp_process **list, uint64_t now_ns)
{
	struct kvp_process *process, *tmp;

	DL_FOREACH_SAFE (*list, process, tmp) {
		if (process->n_handles == 0 && (now_ns - process->read_ns) / 2 >= process->taken_ns)
			drop(list, process);
	}
}

struct kvp_process *kvp_process_get(struct kvp_process **list, uint32_t pid, uint32_t uid,
				    uint64_t now_ns)
{
	struct kvp_process *process;

	forget_old(list, now_ns);
	DL_FOREACH (*list, process) {
		if (process->pid == pid && process->uid == uid)
			break;
	}
	if (!process) {
		process = calloc(1, sizeof(*process));
		if (!process)
			return NULL;
		process->pid = pid;
		process->uid = uid;
		process->read_ns = now_ns;
		DL_APPEND(*list, process);
	}
	process->n_handles++;
	return process;
}

void kvp_process_put(struct kvp_process *process)
{
	process->n_handles--;
}

void kvp_process_clear(struct kvp_process **list)
{
	struct kvp_process *process, *tmp;

	DL_FOREACH_SAFE (*list, process, tmp)
		drop(list, process);
}

bool kvp_process_may_read(const struct kvp_process *process, uint64_t ns)
{
	return process->turn_packets < KVP_SESSION_TURN_PACKETS &&
	       process->turn_ns + ns < KVP_SESSION_TURN_NS;
}

void kvp_process_turn(struct kvp_process *process, uint64_t turn)
{
	if (process->turn == turn)
		return;
	process->turn = turn;
	process->turn_ns = 0;
	process->turn_packets = 0;
}

/* What has passed before is half forgotten. A turn that takes longer was not the loop's: others had
 * the processor, which is no client's fault. */
bool kvp_process_account(struct kvp_process *process, uint64_t from_ns, uint64_t took)
{
	uint64_t forgotten = (from_ns - process->read_ns) / 2;

	process->turn_ns += took;
	process->taken_ns -= KVP_MIN(process->taken_ns, forgotten);
	process->taken_ns += KVP_MIN(took, (uint64_t)TURN_NS);
	process->read_ns = from_ns;
	return process->taken_ns > SHARE_NS;
}
