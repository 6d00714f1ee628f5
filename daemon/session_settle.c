/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session_settle.h"

#include <errno.h>
#include <stdlib.h>

#include <utlist.h>

#include "daemon/server.h"

struct kvp_settle {
	struct kvp_session_pending *pending; /* owned */
	uint64_t session;
	struct kvp_settle *prev, *next;
};

/* Rooms need no look of their own: a pool outlives whatever uses it. */
bool kvp_settle_left(const struct kvp_server *server, uint64_t id, uint32_t *uid)
{
	const struct kvp_session *session = kvp_server_session(server, id);
	const struct kvp_pool *pool;

	if (session) {
		*uid = session->owner.uid;
		return true;
	}
	DL_SEARCH_SCALAR(server->core->pools.first, pool, session, id);
	if (pool)
		*uid = pool->uid;
	return pool;
}

int kvp_settle_await(struct kvp_server *server, struct kvp_session_pending *pending,
		     uint64_t session)
{
	struct kvp_settle *settle = calloc(1, sizeof(*settle));

	if (!settle)
		return -ENOMEM;
	settle->pending = pending;
	settle->session = session;
	DL_APPEND(server->settles, settle);
	return 0;
}

static struct kvp_session_pending *settle_take(struct kvp_server *server, struct kvp_settle *settle)
{
	struct kvp_session_pending *pending = settle->pending;

	DL_DELETE(server->settles, settle);
	free(settle);
	return pending;
}

void kvp_settle_check(struct kvp_server *server)
{
	struct kvp_settle *settle, *tmp;
	uint32_t uid;

	DL_FOREACH_SAFE (server->settles, settle, tmp) {
		/* Who asked may be gone before what is asked about: nothing piles up here. */
		if (!settle->pending->session)
			kvp_session_forget(settle_take(server, settle));
		else if (!kvp_settle_left(server, settle->session, &uid))
			kvp_session_answer(settle_take(server, settle));
	}
}

void kvp_settle_clear(struct kvp_server *server)
{
	while (server->settles)
		kvp_session_forget(settle_take(server, server->settles));
}
