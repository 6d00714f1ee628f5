/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session_req.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <utlist.h>

#include "daemon/inspect.h"
#include "daemon/log.h"
#include "daemon/server.h"
#include "daemon/session_admit.h"
#include "daemon/session_io.h"
#include "daemon/session_settle.h"
#include "proto/check.h"
#include "proto/msg.h"
#include "proto/util.h"

#define OK KVP__STATUS__STATUS_OK

static struct kvp_log_limit log_bad = KVP_LOG_LIMIT(20, 10);

/* One request while it is handled. */
struct request {
	struct kvp_session *session;
	const Kvp__ClientMsg *msg;
	const int *fds; /* borrowed [n_fds] */
	uint32_t n_fds;
	Kvp__Reply *reply;
	int reply_fd;   /* goes out with the reply; -1: none */
	bool postponed; /* the answer comes later */
	char err[KVP_POOL_ERR];
};

static Kvp__Status KVP_PRINTF(3, 4)
	refuse(struct request *req, Kvp__Status status, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(req->err, sizeof(req->err), fmt, args); /* may be cut */
	va_end(args);
	return status;
}

/* ---- hello */

static uint64_t features(const struct kvp_core *core)
{
	uint64_t bits = core->n_lanes > 1 ? KVP_FEATURE_CUDA : 0; /* the first is the host's */

	/* A NIC of ours may reach pools by them. */
	if (core->n_lanes > 1 && strcmp(kvp_lane_transport(core->lanes[1]), "verbs") == 0)
		bits |= KVP_FEATURE_DMABUF;

#ifdef KVP_TEST
	bits |= KVP_FEATURE_TEST_HOLD;
#endif
	return bits;
}

static void greet(struct request *req, Kvp__HelloReply *hello, uint32_t version)
{
	struct kvp_session *session = req->session;
	struct kvp_core *core = session->core;

	hello->version = version;
	hello->features = features(core);
	hello->incarnation.data = core->incarnation;
	hello->incarnation.len = sizeof(core->incarnation);
	hello->node = (char *)core->config->node.name;
	hello->address = (char *)kvp_peers_address(core->peers);
	hello->max_entries = core->config->limits.max_entries;
	hello->max_rooms = session->policy.max_rooms;
	hello->session = session->owner.id;
	req->reply->hello = hello;
	if (core->pidfd >= 0)
		req->reply_fd = fcntl(core->pidfd, F_DUPFD_CLOEXEC, 0); /* -1: goes without */
}

/* The reply points to what is here, so it is sent from here. */
static Kvp__Status on_hello(struct request *req)
{
	struct kvp_session *session = req->session;
	const Kvp__Hello *msg = req->msg->hello;
	const uint32_t ours[2] = { KVP_PROTO_VERSION_MIN, KVP_PROTO_VERSION_MAX };
	const uint32_t theirs[2] = { msg->version_min, msg->version_max };
	static Kvp__HelloReply hello;
	uint32_t version = 0;
	int r;

	if (session->state != KVP_SESSION_NEW)
		return refuse(req, KVP__STATUS__STATUS_INVALID,
			      "hello: the session has been greeted already");
	r = kvp_version_choose(ours, theirs, &version, req->err, sizeof(req->err));
	if (r != 0)
		return (Kvp__Status)r;
	(void)snprintf(session->owner.name, sizeof(session->owner.name), "%s",
		       msg->name[0] ? msg->name : "unnamed");
	session->observer = msg->observer;
	if (session->refusal == KVP__STATUS__STATUS_LIMIT && session->observer)
		kvp_session_reserve(session);
	if (session->refusal != OK) {
		kvp_session_refused(session);
		session->end_after_flush = true;
		return refuse(req, session->refusal, "%s", session->refusal_text);
	}
	session->state = KVP_SESSION_UP;
	kvp_session_stop_stall(session); /* the deadline of hello */
	kvp__hello_reply__init(&hello);
	greet(req, &hello, version);
	kvp_log(KVP_LOG_DEBUG, "client %llu %s (pid %u, uid %u): session begins",
		(unsigned long long)session->owner.id, session->owner.name, session->pid,
		session->owner.uid);
	return OK;
}

static Kvp__Status on_settle(struct request *req)
{
	struct kvp_session *session = req->session;
	uint64_t old = req->msg->settle->session;
	struct kvp_session_pending *pending;
	uint32_t uid;

	if (old >= session->owner.id)
		return refuse(req, KVP__STATUS__STATUS_INVALID,
			      "settle.session is %llu: no earlier one than this, %llu",
			      (unsigned long long)old, (unsigned long long)session->owner.id);
	if (!kvp_settle_left(session->core->server, old, &uid))
		return OK;
	if (uid != session->owner.uid)
		return refuse(req, KVP__STATUS__STATUS_DENIED,
			      "settle.session is %llu: another user's", (unsigned long long)old);
	pending = kvp_session_postpone(session, req->msg->id);
	if (!pending || kvp_settle_await(session->core->server, pending, old) < 0) {
		if (pending)
			kvp_session_forget(pending);
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	}
	req->postponed = true;
	return OK;
}

/* ---- pools and fences */

static Kvp__Status find_pool(struct request *req, uint32_t id, struct kvp_pool **pool)
{
	*pool = kvp_session_pool(req->session, id);
	if (*pool)
		return OK;
	return refuse(req, KVP__STATUS__STATUS_NOT_FOUND, "pool is %u: this client has none such",
		      id);
}

static Kvp__Status find_active_pool(struct request *req, uint32_t id, struct kvp_pool **pool)
{
	Kvp__Status status = find_pool(req, id, pool);

	if (!*pool || (*pool)->state == KVP_POOL_ACTIVE)
		return status;
	return refuse(req, KVP__STATUS__STATUS_POOL_GONE, "pool is %u: it is %s", id,
		      (*pool)->state == KVP_POOL_PAUSED     ? "paused"
		      : (*pool)->state == KVP_POOL_STARTING ? "being mapped"
		      : (*pool)->pausing                    ? "being paused"
							    : "being unregistered");
}

static Kvp__Status check_pool_limit(struct request *req)
{
	const struct kvp_session *session = req->session;
	uint32_t n = kvp_server_pools_of(session->core->server, session->owner.uid);

	if (session->core->stopping)
		return refuse(req, KVP__STATUS__STATUS_STOPPING, "the daemon shuts down");
	if (n < session->policy.max_pools)
		return OK;
	session->core->pools.refused++;
	return refuse(req, KVP__STATUS__STATUS_LIMIT,
		      "uid %u has %u pools, at most %u: max_pools of [uid.N], [gid.N] or [limits]",
		      session->owner.uid, n, session->policy.max_pools);
}

static void pool_unlist(struct kvp_session *session, struct kvp_pool *pool)
{
	LL_DELETE2(session->pools, pool, session_next);
	session->n_pools--;
}

static void on_pool_registered(struct kvp_pool *pool, Kvp__Status status, const char *why,
			       void *arg)
{
	struct kvp_session_pending *pending = arg;
	struct kvp_session *session = pending->session;
	char text[KVP_POOL_ERR];

	(void)snprintf(text, sizeof(text), "%s", why); /* it goes with the pool; may be cut */
	if (status != OK) {
		pool_unlist(session, pool);
		kvp_pool_free(&session->core->pools, pool);
	}
	kvp_session_answer_with(pending, status, text);
}

/* A pool that could not be mapped stays paused. */
static void on_pool_resumed(struct kvp_pool *pool, Kvp__Status status, const char *why, void *arg)
{
	(void)pool;
	kvp_session_answer_with(arg, status, why);
}

/* The lane is mapping the pool: the request is answered when it has. */
static void await_pool(struct request *req, struct kvp_pool *pool,
		       struct kvp_session_pending *pending, bool resuming)
{
	if (pool->state != KVP_POOL_STARTING) {
		kvp_session_forget(pending);
		return;
	}
	pool->started = resuming ? on_pool_resumed : on_pool_registered;
	pool->started_arg = pending;
	req->postponed = true;
}

static Kvp__Status on_pool_register(struct request *req)
{
	struct kvp_session *session = req->session;
	const Kvp__PoolRegister *msg = req->msg->pool_register;
	struct kvp_pool_client client = { session->owner.id, session->owner.uid,
					  session->owner.name };
	struct kvp_session_pending *pending;
	struct kvp_pool *pool = NULL;
	Kvp__Status status = check_pool_limit(req);

	if (status != OK)
		return status;
	if (kvp_session_pool(session, msg->pool))
		return refuse(req, KVP__STATUS__STATUS_EXISTS, "pool is %u: in use", msg->pool);
	pending = kvp_session_postpone(session, req->msg->id);
	if (!pending)
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for the request");
	status = kvp_pools_register(&session->core->pools, &client, msg, req->fds, req->n_fds,
				    &pool, req->err);
	if (status != OK) {
		kvp_session_forget(pending);
		return status;
	}
	LL_PREPEND2(session->pools, pool, session_next);
	session->n_pools++;
	session->engine = true;
	await_pool(req, pool, pending, false);
	return OK;
}

static void on_pool_paused(struct kvp_pool *pool, void *arg)
{
	(void)pool; /* stays with its session */
	kvp_session_answer(arg);
}

static void on_pool_unregistered(struct kvp_pool *pool, void *arg)
{
	struct kvp_session_pending *pending = arg;
	struct kvp_session *session = pending->session;

	/* A session that ended has put its own function in place of this one. */
	assert(session);
	LL_DELETE2(session->pools, pool, session_next);
	session->n_pools--;
	kvp_pool_free(&session->core->pools, pool);
	kvp_session_answer(pending);
}

static Kvp__Status end_pool(struct request *req, struct kvp_pool *pool, bool pausing)
{
	struct kvp_session_pending *pending = kvp_session_postpone(req->session, req->msg->id);

	if (!pending)
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for the request");
	req->postponed = true;
	kvp_pool_end(pool, pausing, pausing ? on_pool_paused : on_pool_unregistered, pending);
	kvp_rooms_pool_ends(req->session->core->rooms, pool, KVP__STATUS__STATUS_POOL_GONE,
			    pausing ? "the pool is being paused"
				    : "the pool is being unregistered");
	return OK;
}

static Kvp__Status on_pool_pause(struct request *req)
{
	struct kvp_pool *pool;
	Kvp__Status status = find_active_pool(req, req->msg->pool_pause->pool, &pool);

	return status == OK ? end_pool(req, pool, true) : status;
}

/* Whoever asked for it does not wait any more: a mapping that comes later would pin the memory. */
static Kvp__Status take_back_pool(struct request *req, struct kvp_pool *pool)
{
	struct kvp_session_pending *starting = pool->started_arg;
	Kvp__Status status = end_pool(req, pool, false);

	if (status == OK)
		kvp_session_answer_with(starting, KVP__STATUS__STATUS_POOL_GONE,
					"the pool is being unregistered");
	return status;
}

static Kvp__Status on_pool_unregister(struct request *req)
{
	struct kvp_session *session = req->session;
	struct kvp_pool *pool;
	Kvp__Status status = find_pool(req, req->msg->pool_unregister->pool, &pool);

	if (status != OK)
		return status;
	if (pool->state == KVP_POOL_ENDING)
		return find_active_pool(req, pool->client_id, &pool);
	if (pool->state == KVP_POOL_STARTING)
		return take_back_pool(req, pool);
	if (pool->state == KVP_POOL_ACTIVE)
		return end_pool(req, pool, false);
	LL_DELETE2(session->pools, pool, session_next);
	session->n_pools--;
	kvp_pool_free(&session->core->pools, pool);
	return OK;
}

static Kvp__Status on_pool_resume(struct request *req)
{
	struct kvp_session_pending *pending;
	struct kvp_pool *pool;
	Kvp__Status status = find_pool(req, req->msg->pool_resume->pool, &pool);

	if (status != OK)
		return status;
	if (req->session->core->stopping)
		return refuse(req, KVP__STATUS__STATUS_STOPPING, "the daemon shuts down");
	pending = kvp_session_postpone(req->session, req->msg->id);
	if (!pending)
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for the request");
	status = kvp_pools_resume(&req->session->core->pools, pool, req->msg->pool_resume, req->fds,
				  req->n_fds, req->err);
	if (status != OK)
		kvp_session_forget(pending);
	else
		await_pool(req, pool, pending, true);
	return status;
}

static struct kvp_fence *find_fence(const struct kvp_session *session, uint32_t id)
{
	struct kvp_fence *fence;

	DL_SEARCH_SCALAR(session->fences, fence, client_id, id);
	return fence;
}

/* As many as pools: each is a mapping. */
static Kvp__Status on_fence_register(struct request *req)
{
	struct kvp_session *session = req->session;
	const Kvp__FenceRegister *msg = req->msg->fence_register;
	uint32_t max = session->policy.max_pools;
	struct kvp_fence *fence = NULL;
	Kvp__Status status;

	if (find_fence(session, msg->fence))
		return refuse(req, KVP__STATUS__STATUS_EXISTS, "fence is %u: in use", msg->fence);
	if (session->n_fences >= max)
		return refuse(
			req, KVP__STATUS__STATUS_LIMIT,
			"the session has %u fences, at most %u: max_pools of [uid.N], [gid.N] "
			"or [limits]",
			session->n_fences, max);
	if (req->n_fds != 1)
		return refuse(req, KVP__STATUS__STATUS_INVALID,
			      "fence_register.fds: %u, allowed is 1", req->n_fds);
	status = kvp_fence_register(&session->core->fences, msg, req->fds[0], &fence, req->err);
	if (status != OK)
		return status;
	DL_APPEND(session->fences, fence);
	session->n_fences++;
	return OK;
}

static void on_fence_ended(void *arg)
{
	kvp_session_answer(arg);
}

static Kvp__Status on_fence_unregister(struct request *req)
{
	struct kvp_session *session = req->session;
	struct kvp_fence *fence = find_fence(session, req->msg->fence_unregister->fence);
	struct kvp_session_pending *pending;

	if (!fence)
		return refuse(req, KVP__STATUS__STATUS_NOT_FOUND,
			      "fence is %u: this client has none such",
			      req->msg->fence_unregister->fence);
	pending = kvp_session_postpone(session, req->msg->id);
	if (!pending)
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for the request");
	req->postponed = true;
	DL_DELETE(session->fences, fence);
	session->n_fences--;
	kvp_fence_end(fence, on_fence_ended, pending);
	return OK;
}

/* ---- rooms */

static Kvp__Status on_pages(struct request *req)
{
	const Kvp__Pages *msg = req->msg->pages;
	const struct kvp_config *config = req->session->core->config;
	struct kvp_lists *lists = &req->session->lists;
	const struct kvp_list *list = kvp_lists_find(lists, msg->list);
	int r = kvp_lists_append(lists, msg->list, msg->offset, msg->pages, (uint32_t)msg->n_pages,
				 config->limits.max_lists, config->limits.max_room_pages);

	switch (r) {
	case 0:
		return OK;
	case -EINVAL:
		return refuse(req, KVP__STATUS__STATUS_INVALID,
			      "pages.offset is %u, list %u has %u pages so far", msg->offset,
			      msg->list, list ? list->n : 0);
	case -ENOSPC:
		req->session->core->server->refused_pages++;
		return refuse(req, KVP__STATUS__STATUS_LIMIT,
			      "list %u would have %llu pages, at most %u (limits.max_room_pages)",
			      msg->list, (unsigned long long)msg->offset + msg->n_pages,
			      config->limits.max_room_pages);
	case -EMFILE:
		req->session->core->server->refused_lists++;
		return refuse(req, KVP__STATUS__STATUS_LIMIT,
			      "the session builds %u lists, at most %u (limits.max_lists)",
			      lists->n_lists, config->limits.max_lists);
	default:
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for %zu pages",
			      msg->n_pages);
	}
}

/* A user's rooms count over all its sessions: what the others hold is not ours to use. */
static void share_rooms(struct kvp_session *session)
{
	uint32_t all = kvp_server_rooms_of(session->core->server, session->owner.uid);
	uint32_t others = all - session->owner.n_rooms;

	session->owner.max_rooms =
		session->policy.max_rooms > others ? session->policy.max_rooms - others : 0;
}

/* Its pool may not be there either, if it was to be registered when the stop had begun: that is not
 * what is wrong. */
static Kvp__Status check_stopping(struct request *req)
{
	return req->session->core->stopping
		       ? refuse(req, KVP__STATUS__STATUS_STOPPING, "the daemon shuts down")
		       : OK;
}

static Kvp__Status expect(struct request *req)
{
	struct kvp_session *session = req->session;
	struct kvp_pool *pool;
	Kvp__Status status = check_stopping(req);

	if (status == OK)
		status = find_active_pool(req, req->msg->expect->pool, &pool);
	if (status != OK)
		return status;
	share_rooms(session);
	return kvp_rooms_expect(session->core->rooms, &session->owner, pool, req->msg->expect,
				&session->lists, req->err);
}

/* Accepted or not, the lists that a request names are used up. */
static Kvp__Status on_expect(struct request *req)
{
	const Kvp__Expect *msg = req->msg->expect;
	Kvp__Status status = expect(req);

	for (size_t i = 0; i < msg->n_sides; i++)
		kvp_lists_drop(&req->session->lists, msg->sides[i]->list);
	return status;
}

static Kvp__Status on_open(struct request *req)
{
	struct kvp_session *session = req->session;
	struct kvp_pool *pool;
	Kvp__Status status = check_stopping(req);

	if (status == OK)
		status = find_active_pool(req, req->msg->open->pool, &pool);
	if (status != OK)
		return status;
	share_rooms(session);
	return kvp_rooms_open(session->core->rooms, &session->owner, pool, req->msg->open,
			      req->err);
}

static Kvp__Status submit(struct request *req)
{
	struct kvp_session *session = req->session;
	const Kvp__Submit *msg = req->msg->submit;
	struct kvp_room_fence named = { 0, 0 };

	if (msg->fence) {
		const struct kvp_fence *fence = find_fence(session, msg->fence);

		if (!fence)
			return refuse(req, KVP__STATUS__STATUS_NOT_FOUND,
				      "submit.fence is %u: this client has none such", msg->fence);
		if (msg->fence_word >= fence->n_words)
			return refuse(req, KVP__STATUS__STATUS_INVALID,
				      "submit.fence_word is %u, fence %u has words 0 to %u",
				      msg->fence_word, msg->fence, fence->n_words - 1);
		named = (struct kvp_room_fence){ fence->id, fence->n_words };
	}
	return kvp_rooms_submit(session->core->rooms, &session->owner, msg, &named, &session->lists,
				req->err);
}

static Kvp__Status on_submit(struct request *req)
{
	const Kvp__Submit *msg = req->msg->submit;
	Kvp__Status status = submit(req);

	for (size_t i = 0; i < msg->n_sides; i++)
		kvp_lists_drop(&req->session->lists, msg->sides[i]->list);
	return status;
}

/* A session that has ended has said so to the rooms: they do not call this for it. */
static void on_recalled(void *arg, uint64_t request, Kvp__Status status, uint32_t from,
			const char *text)
{
	struct kvp_session *session = KVP_CONTAINER_OF(arg, struct kvp_session, owner);
	Kvp__Reply reply = KVP__REPLY__INIT;
	char copy[KVP_POOL_ERR];

	(void)snprintf(copy, sizeof(copy), "%s", text); /* may be cut */
	kvp_text_clean(copy);
	reply.id = request;
	reply.status = status;
	reply.text = copy;
	reply.recalled_from = from;
	session->n_pending--;
	kvp_session_reply(session, &reply, -1);
	kvp_server_touch(session->core->server, session);
}

static Kvp__Status on_recall(struct request *req)
{
	struct kvp_session *session = req->session;
	Kvp__Status status;

	session->n_pending++;
	req->postponed = true;
	status = kvp_rooms_recall(session->core->rooms, &session->owner, req->msg->recall,
				  on_recalled, req->msg->id, req->err);
	if (status != OK) {
		session->n_pending--;
		req->postponed = false;
	}
	return status;
}

static Kvp__Status on_abort(struct request *req)
{
	return kvp_rooms_abort(req->session->core->rooms, &req->session->owner, req->msg->abort,
			       req->err);
}

static Kvp__Status on_renew(struct request *req)
{
	return kvp_rooms_renew(req->session->core->rooms, req->msg->renew, req->err);
}

static Kvp__Status on_decline(struct request *req)
{
	return kvp_rooms_decline(req->session->core->rooms, req->msg->decline, req->err);
}

/* ---- the whole daemon */

static Kvp__Status on_drain(struct request *req)
{
	const struct kvp_session *session = req->session;
	const Kvp__Drain *msg = req->msg->drain;

	if (!session->admin)
		return refuse(req, KVP__STATUS__STATUS_DENIED,
			      "drain: uid %u is no administrator (admin of [uid.N] or [gid.N])",
			      session->owner.uid);
	if (msg->on)
		kvp_log(KVP_LOG_NOTICE, "drain by %s (uid %u)%s%s: no new legs, %u rooms here",
			session->owner.name, session->owner.uid, msg->reason[0] ? ": " : "",
			msg->reason, kvp_rooms_count(session->core->rooms));
	else
		kvp_log(KVP_LOG_NOTICE, "drain is over, by %s (uid %u)", session->owner.name,
			session->owner.uid);
	kvp_rooms_drain(session->core->rooms, msg->on, msg->reason);
	return OK;
}

/* ---- looking inside */

static Kvp__Status look(struct request *req, const struct kvp_inspect *ask, const char *what)
{
	struct kvp_session_pending *pending = kvp_session_postpone(req->session, req->msg->id);
	Kvp__Status status;

	if (!pending)
		return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory for the request");
	status = kvp_inspect_look(ask, what, pending);
	if (status != OK)
		kvp_session_forget(pending);
	req->postponed = status == OK;
	return status;
}

static Kvp__Status on_inspect(struct request *req)
{
	struct kvp_session *session = req->session;
	const Kvp__Inspect *msg = req->msg->inspect;
	struct kvp_inspect ask = {
		.core = session->core,
		.arg = msg->arg,
		.all = msg->all,
		.admin = session->admin,
		.uid = session->owner.uid,
		.now_ns = kvp_core_now_ns(),
		.err = req->err,
		.err_bytes = sizeof(req->err),
	};
	int fd;

	if (kvp_inspect_is_look(msg->what))
		return look(req, &ask, msg->what);
	fd = kvp_inspect_answer(&ask, msg->what);
	if (fd < 0)
		return (Kvp__Status)-fd;
	req->reply_fd = fd;
	return OK;
}

#ifdef KVP_TEST
static Kvp__Status hold_lanes(struct request *req, enum kvp_hold point, bool on)
{
	const struct kvp_core *core = req->session->core;

	for (uint32_t i = 0; i < core->n_lanes; i++) {
		struct kvp_order_id *order = calloc(1, sizeof(*order));

		if (!order)
			return refuse(req, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
		order->order.type = KVP_ORDER_HOLD;
		order->id = point;
		order->value = on;
		kvp_lane_order(core->lanes[i], &order->order);
	}
	return OK;
}

static Kvp__Status on_test_hold(struct request *req)
{
	const Kvp__TestHold *msg = req->msg->test_hold;

	for (unsigned i = 0; i < KVP_HOLD_N; i++) {
		if (strcmp(msg->point, kvp_hold_name((enum kvp_hold)i)) != 0)
			continue;
		if (i != KVP_HOLD_OFFER)
			return hold_lanes(req, i, msg->on);
		kvp_rooms_hold_offers(req->session->core->rooms, msg->on);
		return OK;
	}
	return refuse(req, KVP__STATUS__STATUS_NOT_FOUND,
		      "test_hold.point is \"%.40s\": no such point", msg->point);
}
#else
static Kvp__Status on_test_hold(struct request *req)
{
	return refuse(req, KVP__STATUS__STATUS_UNSUPPORTED,
		      "test_hold: the daemon was built without test points");
}
#endif

/* ---- dispatch */

typedef Kvp__Status handler(struct request *req);

static handler *const handlers[] = {
	[KVP__CLIENT_MSG__BODY_HELLO] = on_hello,
	[KVP__CLIENT_MSG__BODY_POOL_REGISTER] = on_pool_register,
	[KVP__CLIENT_MSG__BODY_POOL_PAUSE] = on_pool_pause,
	[KVP__CLIENT_MSG__BODY_POOL_RESUME] = on_pool_resume,
	[KVP__CLIENT_MSG__BODY_POOL_UNREGISTER] = on_pool_unregister,
	[KVP__CLIENT_MSG__BODY_FENCE_REGISTER] = on_fence_register,
	[KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER] = on_fence_unregister,
	[KVP__CLIENT_MSG__BODY_PAGES] = on_pages,
	[KVP__CLIENT_MSG__BODY_EXPECT] = on_expect,
	[KVP__CLIENT_MSG__BODY_OPEN] = on_open,
	[KVP__CLIENT_MSG__BODY_SUBMIT] = on_submit,
	[KVP__CLIENT_MSG__BODY_RECALL] = on_recall,
	[KVP__CLIENT_MSG__BODY_RENEW] = on_renew,
	[KVP__CLIENT_MSG__BODY_DECLINE] = on_decline,
	[KVP__CLIENT_MSG__BODY_ABORT] = on_abort,
	[KVP__CLIENT_MSG__BODY_INSPECT] = on_inspect,
	[KVP__CLIENT_MSG__BODY_DRAIN] = on_drain,
	[KVP__CLIENT_MSG__BODY_TEST_HOLD] = on_test_hold,
	[KVP__CLIENT_MSG__BODY_SETTLE] = on_settle,
};

static bool observer_may(unsigned body)
{
	return body == KVP__CLIENT_MSG__BODY_HELLO || body == KVP__CLIENT_MSG__BODY_INSPECT ||
	       body == KVP__CLIENT_MSG__BODY_DRAIN ||
	       body == KVP__CLIENT_MSG__BODY_SETTLE; /* a library that has lost one before */
}

static Kvp__Status dispatch(struct request *req)
{
	unsigned body = req->msg->body_case;

	if (body >= KVP_ARRAY_SIZE(handlers) || !handlers[body])
		return refuse(req, KVP__STATUS__STATUS_INVALID, "message: unknown kind %u", body);
	if (req->session->state == KVP_SESSION_NEW && body != KVP__CLIENT_MSG__BODY_HELLO)
		return refuse(req, KVP__STATUS__STATUS_INVALID, "hello must be the first request");
	if (req->session->observer && !observer_may(body))
		return refuse(req, KVP__STATUS__STATUS_DENIED,
			      "hello.observer was true: inspect and drain are all that this "
			      "connection may ask");
	return handlers[body](req);
}

static void handle(struct kvp_session *session, const Kvp__ClientMsg *msg, const int *fds,
		   size_t n_fds)
{
	Kvp__Reply reply = KVP__REPLY__INIT;
	struct request req = {
		.session = session,
		.msg = msg,
		.fds = fds,
		.n_fds = (uint32_t)n_fds,
		.reply = &reply,
		.reply_fd = -1,
	};
	Kvp__Status status;

	reply.id = msg->id;
	session->n_requests++;
	session->core->server->requests++;
	status = (Kvp__Status)kvp_msg_check_fds(msg, n_fds, req.err, sizeof(req.err));
	if (status == OK)
		status = dispatch(&req);
	reply.status = status;
	if (status != OK) {
		kvp_text_clean(req.err);
		reply.text = req.err;
	}
	if (!req.postponed)
		kvp_session_reply(session, &reply, req.reply_fd);
}

static void count_bad(struct kvp_session *session, const char *text)
{
	session->n_bad++;
	session->core->server->bad_packets++;
	kvp_log_limited(&log_bad, KVP_LOG_NOTICE, "client %llu %s (pid %u): refused a packet: %s",
			(unsigned long long)session->owner.id, session->owner.name, session->pid,
			text);
	if (++session->bad_in_row >= KVP_SESSION_BAD_MAX)
		kvp_session_end(session, "too many malformed packets in a row");
}

static void reply_refused(struct kvp_session *session, uint64_t id, Kvp__Status status, char *text)
{
	Kvp__Reply reply = KVP__REPLY__INIT;

	kvp_text_clean(text);
	reply.id = id;
	reply.status = status;
	reply.text = text;
	kvp_session_reply(session, &reply, -1);
}

void kvp_session_refuse_packet(struct kvp_session *session, const uint8_t *buf, size_t n,
			       const char *text)
{
	uint64_t id = kvp_msg_peek_id(buf, n);
	char copy[KVP_POOL_ERR];

	(void)snprintf(copy, sizeof(copy), "%s", text); /* may be cut */
	if (id != 0)
		reply_refused(session, id, KVP__STATUS__STATUS_INVALID, copy);
	if (session->state != KVP_SESSION_ENDING)
		count_bad(session, copy);
}

/* Wrong values in a request that can be read are an engine's mistake, which gets its answer each
 * time; what cannot be read is no client of ours. */
static bool is_readable(const uint8_t *buf, size_t n)
{
	ProtobufCMessage *msg = kvp_unpack(&kvp__client_msg__descriptor, buf, n);

	if (!msg)
		return false;
	protobuf_c_message_free_unpacked(msg, NULL);
	return kvp_msg_peek_id(buf, n) != 0;
}

void kvp_session_packet(struct kvp_session *session, const uint8_t *buf, size_t n, const int *fds,
			size_t n_fds)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = NULL;
	char err[KVP_POOL_ERR] = "";
	int status = kvp_msg_decode_client(buf, n, &msg, err, sizeof(err));

	if (status == 0) {
		session->bad_in_row = 0;
		handle(session, msg, fds, n_fds);
	} else if (is_readable(buf, n)) {
		session->bad_in_row = 0;
		reply_refused(session, kvp_msg_peek_id(buf, n), (Kvp__Status)status, err);
	} else {
		kvp_session_refuse_packet(session, buf, n, err);
	}
	for (size_t i = 0; i < n_fds; i++)
		(void)close(fds[i]); /* whoever needed the memory has mapped it */
}
