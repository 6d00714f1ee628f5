/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/inspect.h"

#include <utlist.h>

#include "daemon/server.h"
#include "daemon/session_admit.h"
#include "proto/util.h"
#include "proto/wire.h"

/*
 * The configured maxima: how near they are, and how often each has refused something. A maximum of
 * the daemon that is reached is worth an operator's look; one of a single object (`of`) is the
 * business of whoever made that, so its gauge is the fullest of them.
 */

struct gauge {
	const char *name, *of;
	uint64_t used, max, refused;
};

static void add(cJSON *list, const struct gauge *gauge)
{
	cJSON *limit = cJSON_CreateObject();

	(void)cJSON_AddStringToObject(limit, "name", gauge->name);
	(void)cJSON_AddStringToObject(limit, "of", gauge->of);
	kvp_inspect_num(limit, "used", gauge->used);
	kvp_inspect_num(limit, "max", gauge->max);
	kvp_inspect_num(limit, "refused", gauge->refused);
	kvp_inspect_append(list, limit);
}

static uint32_t largest_pool(const struct kvp_pools *pools)
{
	const struct kvp_pool *pool;
	uint32_t n = 0;

	LL_FOREACH(pools->first, pool)
	n = KVP_MAX(n, pool->n_entries);
	return n;
}

static uint32_t most_of_process(const struct kvp_server *server)
{
	const struct kvp_process *process;
	uint32_t n = 0;

	DL_FOREACH (server->processes, process)
		n = KVP_MAX(n, process->n_sessions);
	return n;
}

#define USERS 64u /* that are looked at: of more, those that came first */

/* Of the user who may have the fewest more. */
static struct gauge most_of_user(const struct kvp_server *server)
{
	struct gauge most = { "max_sessions of a user", "user", 0, 0, server->refused_user };
	struct user {
		uint32_t uid, n;
	} users[USERS];
	const struct kvp_process *process;
	const struct kvp_session *session;
	uint32_t n = 0, i;

	DL_FOREACH (server->processes, process) {
		for (i = 0; i < n && users[i].uid != process->uid; i++)
			;
		if (i == USERS)
			continue;
		if (i == n)
			users[n++] = (struct user){ .uid = process->uid };
		users[i].n += process->n_sessions;
	}
	DL_FOREACH (server->sessions, session) {
		uint32_t max = session->policy.max_sessions;

		for (i = 0; i < n && users[i].uid != session->owner.uid; i++)
			;
		if (session->refusal != KVP__STATUS__STATUS_OK || session->reserved || i == n)
			continue;
		if (most.max == 0 || (int64_t)max - users[i].n < (int64_t)(most.max - most.used)) {
			most.used = users[i].n;
			most.max = max;
		}
	}
	return most;
}

static void lists_most(const struct kvp_server *server, uint32_t *lists, uint32_t *pages)
{
	const struct kvp_session *session;
	const struct kvp_list *list;

	*lists = *pages = 0;
	DL_FOREACH (server->sessions, session) {
		*lists = KVP_MAX(*lists, session->lists.n_lists);
		LL_FOREACH(session->lists.first, list)
		*pages = KVP_MAX(*pages, list->n);
	}
}

void kvp_inspect_limits(const struct kvp_core *core, cJSON *status,
			const struct kvp_rooms_stats *rooms, const struct kvp_lane_status *lanes)
{
	cJSON *list = cJSON_AddArrayToObject(status, "limits");
	const struct kvp_config *config = core->config;
	const struct kvp_server *server = core->server;
	uint64_t refused_peers, refused_host;
	uint32_t of_host = kvp_peers_of_host(core->peers, &refused_host);
	uint32_t lists, pages, peers = kvp_peers_count(core->peers, &refused_peers);

	lists_most(server, &lists, &pages);
	const struct gauge gauges[] = {
		{ "client.max_sessions", "daemon", server->n_sessions, config->client.max_sessions,
		  server->refused_limit },
		{ "client.max_process_sessions", "process", most_of_process(server),
		  config->client.max_process_sessions, server->refused_process },
		most_of_user(server),
		{ "observers beyond these", "daemon", server->n_reserved, KVP_SESSION_RESERVE,
		  server->refused_reserve },
		/* The rest has its turn later: nothing is refused. */
		{ "packets of a turn", "process", server->turn_packets, KVP_SESSION_TURN_PACKETS,
		  0 },
		{ "events of a turn", "client", server->turn_events, KVP_SESSION_TURN_EVENTS, 0 },
		{ "peer.max_sessions", "daemon", peers, config->peer.max_sessions, refused_peers },
		{ "peer.max_host_sessions", "host", of_host, config->peer.max_host_sessions,
		  refused_host },
		{ "limits.max_rooms", "daemon", (uint64_t)rooms->dests + rooms->sends,
		  config->limits.max_rooms, rooms->refused_limit },
		{ "limits.max_pools", "daemon", core->pools.n, config->limits.max_pools,
		  core->pools.refused },
		{ "limits.max_parked_offers", "daemon", rooms->parked_offers,
		  config->limits.max_parked_offers, rooms->refused_offers },
		{ "limits.max_parked_offers (renewals)", "daemon", rooms->notes,
		  config->limits.max_parked_offers, rooms->refused_notes },
		{ "limits.max_wants", "peer", lanes->wants_most,
		  KVP_MAX(config->limits.max_wants, KVP_WIRE_EP_WANTS), lanes->want_refused },
		{ "limits.max_parked_chunks", "open", rooms->chunks_most,
		  config->limits.max_parked_chunks, rooms->refused_chunks },
		{ "limits.max_entries", "pool", largest_pool(&core->pools),
		  config->limits.max_entries, core->pools.refused_entries },
		{ "limits.max_lists", "client", lists, config->limits.max_lists,
		  server->refused_lists },
		{ "limits.max_room_pages", "list", pages, config->limits.max_room_pages,
		  server->refused_pages },
	};

	for (size_t i = 0; i < KVP_ARRAY_SIZE(gauges); i++)
		add(list, &gauges[i]);
}
