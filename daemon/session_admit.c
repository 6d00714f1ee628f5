/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session_admit.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/util.h"

#define OK KVP__STATUS__STATUS_OK

static struct kvp_log_limit log_refused = KVP_LOG_LIMIT(10, 10);

/* ---- when it is accepted */

static void KVP_PRINTF(4, 5) refuse(struct kvp_session *session, Kvp__Status status,
				    uint64_t *count, const char *fmt, ...)
{
	va_list args;

	session->refusal = status;
	session->refused = count;
	va_start(args, fmt);
	(void)vsnprintf(session->refusal_text, sizeof(session->refusal_text), fmt, args); /* fits */
	va_end(args);
}

/* Neither a process nor a user has all of client.max_sessions. */
static void check_limits(struct kvp_session *session)
{
	const struct kvp_config *config = session->core->config;
	const struct kvp_process *process = session->process;
	struct kvp_server *server = session->core->server;
	uint32_t n = kvp_server_sessions_of(server, session->owner.uid);

	if (server->n_sessions >= config->client.max_sessions)
		refuse(session, KVP__STATUS__STATUS_LIMIT, &server->refused_limit,
		       "%u clients are connected, at most %u (client.max_sessions)",
		       server->n_sessions, config->client.max_sessions);
	else if (process->n_sessions >= config->client.max_process_sessions)
		refuse(session, KVP__STATUS__STATUS_LIMIT, &server->refused_process,
		       "process %u has %u connections, at most %u (client.max_process_sessions)",
		       session->pid, process->n_sessions, config->client.max_process_sessions);
	else if (n >= session->policy.max_sessions)
		refuse(session, KVP__STATUS__STATUS_LIMIT, &server->refused_user,
		       "uid %u has %u connections, at most %u: max_sessions of [uid.N], [gid.N] "
		       "or [client]",
		       session->owner.uid, n, session->policy.max_sessions);
}

void kvp_session_judge(struct kvp_session *session)
{
	const uint32_t uid = session->owner.uid;

	if (kvp_config_policy(session->core->config, uid, session->gid, &session->policy) < 0) {
		refuse(session, KVP__STATUS__STATUS_DENIED, &session->core->server->refused_policy,
		       "uid %u, gid %u: policy.allow is listed, and there is no section [uid.%u] "
		       "or [gid.%u]",
		       uid, session->gid, uid, session->gid);
		return;
	}
	session->admin = session->policy.admin || uid == 0 || uid == geteuid();
	check_limits(session);
}

void kvp_session_enter(struct kvp_session *session)
{
	struct kvp_server *server = session->core->server;
	bool served = session->refusal == OK;

	*(served ? &server->n_sessions : &server->n_refused) += 1;
	*(served ? &session->process->n_sessions : &session->process->n_refused) += 1;
}

/* ---- the reserve */

/* NULL: there is one for it. */
static const char *reserve_full(const struct kvp_session *session)
{
	const struct kvp_server *server = session->core->server;

	if (server->n_reserved >= KVP_SESSION_RESERVE)
		return "all";
	if (!session->admin && server->n_reserved_others >= KVP_SESSION_RESERVE_OTHERS)
		return "those of users who are no administrators";
	if (session->process->n_reserved >= KVP_SESSION_RESERVE_PROCESS)
		return "those of one process";
	return NULL;
}

void kvp_session_reserve(struct kvp_session *session)
{
	struct kvp_server *server = session->core->server;
	const char *full = reserve_full(session);
	size_t n = strlen(session->refusal_text);

	if (full) {
		session->refused = &server->refused_reserve;
		(void)snprintf(session->refusal_text + n, sizeof(session->refusal_text) - n,
			       "; of the %u beyond that for observers (at most %u of others than "
			       "administrators, %u of a process) %s are taken",
			       KVP_SESSION_RESERVE, KVP_SESSION_RESERVE_OTHERS,
			       KVP_SESSION_RESERVE_PROCESS, full); /* may be cut */
		return;
	}
	session->refusal = OK;
	session->reserved = true;
	server->n_refused--;
	session->process->n_refused--;
	server->n_reserved++;
	server->n_reserved_others += !session->admin;
	session->process->n_reserved++;
}

/* ---- the end */

void kvp_session_refused(struct kvp_session *session)
{
	(*session->refused)++;
	session->refused = NULL;
	if (session->refusal == KVP__STATUS__STATUS_LIMIT)
		kvp_log_limited(&log_refused, KVP_LOG_WARNING, "a client is refused: %s",
				session->refusal_text);
}

void kvp_session_leave(struct kvp_session *session)
{
	struct kvp_server *server = session->core->server;
	struct kvp_process *process = session->process;

	if (session->reserved) {
		server->n_reserved--;
		server->n_reserved_others -= !session->admin;
		process->n_reserved--;
		return;
	}
	if (session->refusal == OK) {
		server->n_sessions--;
		process->n_sessions--;
		return;
	}
	server->n_refused--;
	process->n_refused--;
	if (session->refused) /* it never asked */
		kvp_session_refused(session);
}
