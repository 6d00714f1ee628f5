/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What kvpackd is made of, in this process and on a loop that the caller turns: server, sessions,
 * rooms, peers, and a real lane. Ends the process when it cannot be set up.
 */

#include <uv.h>

#include "daemon/core.h"

struct core_rig {
	struct kvp_core core;
	struct kvp_config config;
	uv_loop_t loop;
	struct kvp_inbox inbox;
	uv_async_t wake;
	char dir[64];
};

/* Defaults and a socket in a folder of its own; change config before the start. */
void core_init(struct core_rig *rig);
void core_start(struct core_rig *rig);
/* One turn of the loop; waits up to a millisecond for something to do when `wait`. */
void core_turn(struct core_rig *rig, bool wait);
/* No session, room, pool or fence is left. */
bool core_is_empty(const struct core_rig *rig);
/* A connected socket of a client; -1 with errno. */
int core_connect(const struct core_rig *rig);
/* Ends everything, and the folder. */
void core_stop(struct core_rig *rig);
