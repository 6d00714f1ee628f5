/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Clients whose connection has ended while this daemon lives ask when its memory is theirs again.
 * Loop thread only.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/session_io.h"

struct kvp_server;

/* Whose it was: true and the user, while anything of that session is left. */
bool kvp_settle_left(const struct kvp_server *server, uint64_t session, uint32_t *uid);
/* Answers the request when nothing of the session is left. Takes it over; 0 or -ENOMEM. */
int kvp_settle_await(struct kvp_server *server, struct kvp_session_pending *pending,
		     uint64_t session);
/* A pool or a session has gone: answers, and forgets what ended sessions have asked. */
void kvp_settle_check(struct kvp_server *server);
/* Forgets all requests. */
void kvp_settle_clear(struct kvp_server *server);
