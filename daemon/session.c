/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utlist.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "daemon/session_admit.h"
#include "daemon/session_io.h"
#include "daemon/session_req.h"
#include "daemon/session_settle.h"
#include "proto/packet.h"
#include "proto/util.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

static struct kvp_log_limit log_sessions = KVP_LOG_LIMIT(50, 10);

/* ---- end */

static void on_closed(uv_handle_t *handle)
{
	struct kvp_session *session = handle->data;

	assert(session->n_handles > 0);
	if (--session->n_handles > 0)
		return;
	kvp_server_forget(session->core->server, session);
	kvp_process_put(session->process);
	/* Only now: libuv has let go of the descriptors. */
	(void)close(session->fd);
	if (session->pidfd >= 0)
		(void)close(session->pidfd);
	free(session);
}

static void pool_gone(struct kvp_pool *pool, void *arg)
{
	struct kvp_pools *pools = arg;

	kvp_pool_free(pools, pool);
	kvp_settle_check(KVP_CONTAINER_OF(pools, struct kvp_core, pools)->server);
}

/* The lanes may still look at it: it outlives the session until it has ended. */
static void drop_pool(struct kvp_session *session, struct kvp_pool *pool, const char *why)
{
	struct kvp_pools *pools = &session->core->pools;

	switch (pool->state) {
	case KVP_POOL_PAUSED:
		kvp_pool_free(pools, pool);
		return;
	case KVP_POOL_ENDING:
		kvp_session_forget(pool->ended_arg);
		pool->ended = pool_gone;
		pool->ended_arg = pools;
		return;
	case KVP_POOL_STARTING:
		kvp_session_forget(pool->started_arg);
		kvp_pool_end(pool, false, pool_gone, pools);
		return;
	case KVP_POOL_ACTIVE:
		kvp_pool_end(pool, false, pool_gone, pools);
		kvp_rooms_pool_ends(session->core->rooms, pool, KVP__STATUS__STATUS_CLIENT_LOST,
				    why);
		return;
	}
}

static void drop_pools(struct kvp_session *session, const char *why)
{
	while (session->pools) {
		struct kvp_pool *pool = session->pools;

		session->pools = pool->session_next;
		session->n_pools--;
		drop_pool(session, pool, why);
	}
}

static void drop_fence(struct kvp_session *session, struct kvp_fence *fence)
{
	DL_DELETE(session->fences, fence);
	kvp_fence_end(fence, NULL, NULL);
}

static void drop_fences(struct kvp_session *session)
{
	while (session->fences)
		drop_fence(session, session->fences);
}

void kvp_session_end(struct kvp_session *session, const char *why)
{
	/* Who has only looked (kvpackctl) and goes is no news. */
	bool looked = session->state == KVP_SESSION_UP && !session->engine && !session->full &&
		      !session->reserved && session->n_bad == 0;

	if (session->state == KVP_SESSION_ENDING)
		return;
	kvp_log_limited(&log_sessions, looked ? KVP_LOG_DEBUG : KVP_LOG_INFO,
			"client %llu%s%s (pid %u): session ends: %s",
			(unsigned long long)session->owner.id, session->owner.name[0] ? " " : "",
			session->owner.name, session->pid, why);
	session->state = KVP_SESSION_ENDING;
	/* Before the fences: a sender's end must reach the lane ahead of what it waits for. */
	kvp_rooms_owner_lost(session->core->rooms, &session->owner, why);
	drop_pools(session, why);
	drop_fences(session);
	kvp_lists_clear(&session->lists);
	kvp_session_drop_output(session);
	(void)uv_poll_stop(&session->io); /* cannot fail */
	/* The client learns now, not when the last handle has closed. */
	(void)shutdown(session->fd, SHUT_RDWR);
	uv_close((uv_handle_t *)&session->io, on_closed);
	uv_close((uv_handle_t *)&session->stall, on_closed);
	if (session->pidfd >= 0)
		uv_close((uv_handle_t *)&session->death, on_closed);
	session->core->touched(session->core);
}

/* ---- what happens to it */

static void on_death(uv_poll_t *handle, int status, int events)
{
	struct kvp_session *session = handle->data;
	char why[64];

	(void)status; /* an error on a pidfd means as much */
	(void)events;
	(void)snprintf(why, sizeof(why), "process %u has ended", session->pid); /* fits */
	kvp_session_end(session, why);
}

static void on_stall(uv_timer_t *timer)
{
	struct kvp_session *session = timer->data;
	const char *what = session->reserved ? "had a connection of the reserve"
			   : session->full   ? "read nothing"
					     : "did not say hello";
	char why[96];

	(void)snprintf(why, sizeof(why), "it %s for %llu ms (client.stall)", what,
		       (unsigned long long)session->core->config->client.stall_ns / 1000000);
	session->core->server->stalls += session->full;
	kvp_session_end(session, why);
}

/* One of the reserve has its time from the beginning, whatever it does. */
static void start_stall(struct kvp_session *session)
{
	if (!session->reserved)
		(void)uv_timer_start(&session->stall, on_stall, /* fails without a callback only */
				     session->core->config->client.stall_ns / 1000000, 0);
}

void kvp_session_stop_stall(struct kvp_session *session)
{
	if (!session->reserved)
		(void)uv_timer_stop(&session->stall); /* cannot fail */
}

static bool wants_input(const struct kvp_session *session)
{
	return session->n_replies + session->n_pending < KVP_SESSION_BACKLOG &&
	       !session->end_after_flush && !session->looking &&
	       (!session->process->resting || session->hung_up);
}

static void on_socket(uv_poll_t *handle, int status, int events);

/* Polls for what can be dealt with now. */
static void update_poll(struct kvp_session *session)
{
	int events = UV_DISCONNECT | (wants_input(session) ? UV_READABLE : 0) |
		     (session->full ? UV_WRITABLE : 0);

	if (session->state == KVP_SESSION_ENDING || events == session->events)
		return;
	session->events = events;
	(void)uv_poll_start(&session->io, events, on_socket); /* fails for closed handles only */
}

/* False: nothing more to read now, or the session has ended. */
static bool read_one(struct kvp_session *session)
{
	struct kvp_server *server = session->core->server;
	int fds[KVP_LIMIT_FDS];
	size_t n_fds = 0;
	ssize_t n;

	/* So that the id of a packet that is lost cannot be read from an older one. */
	memset(server->buffer, 0, 16);
	n = kvp_packet_recv(session->fd, server->buffer, sizeof(server->buffer), fds, &n_fds,
			    KVP_LIMIT_FDS);
	if (n == -EAGAIN)
		return false;
	if (n == -EMSGSIZE) {
		kvp_session_refuse_packet(session, server->buffer, 16,
					  "packet: more than 128 KiB, more than 240 file "
					  "descriptors, or too many open here");
	} else if (n <= 0) {
		kvp_session_end(session, n == 0 ? "it closed the connection"
						: kvp_session_end_text((int)-n));
		return false;
	} else {
		kvp_session_packet(session, server->buffer, (size_t)n, fds, n_fds);
	}
	return session->state != KVP_SESSION_ENDING;
}

/* One packet at least, or the other connections of its process could keep it from ever being read;
 * further ones as long as the process has not had its turn. What is left makes the loop come back
 * at once. */
static void read_some(struct kvp_session *session, uint64_t from_ns)
{
	struct kvp_server *server = session->core->server;
	struct kvp_process *process = session->process;
	uint32_t n = 0;

	kvp_process_turn(process, server->turn);
	while (wants_input(session) && session->state != KVP_SESSION_ENDING) {
		if (n > 0 && !kvp_process_may_read(process, kvp_core_now_ns() - from_ns)) {
			server->turns_cut++;
			break;
		}
		if (!read_one(session))
			break;
		n++;
		process->turn_packets++;
	}
	server->turn_packets = KVP_MAX(server->turn_packets, n);
}

static void account(struct kvp_session *session, uint64_t from_ns)
{
	uint64_t took = kvp_core_now_ns() - from_ns;

	kvp_turns_count(&session->core->server->client_turns, took);
	if (kvp_process_account(session->process, from_ns, took))
		kvp_server_rest(session->core->server, session->process);
}

static void on_socket(uv_poll_t *handle, int status, int events)
{
	struct kvp_session *session = handle->data;
	bool hung_up = status < 0 || (events & UV_DISCONNECT);
	uint64_t from_ns = kvp_core_now_ns();

	if (events & UV_WRITABLE)
		kvp_session_flush(session);
	if (hung_up && !session->hung_up && session->process->resting) {
		events |= UV_READABLE; /* was not asked for */
	}
	session->hung_up |= hung_up;
	read_some(session, from_ns);
	account(session, from_ns); /* its end too */
	if (session->state == KVP_SESSION_ENDING)
		return;
	/* What it sent before it closed has been read, or can never be answered. */
	if (hung_up && (!wants_input(session) || !(events & UV_READABLE))) {
		kvp_session_end(session, "it closed the connection");
		return;
	}
	session->core->touched(session->core);
	kvp_server_touch(session->core->server, session);
	update_poll(session);
}

void kvp_session_flush(struct kvp_session *session)
{
	bool moved = false;
	int r;

	if (session->state == KVP_SESSION_ENDING)
		return;
	r = kvp_session_write(session, &moved);
	if (r > 0) { /* there is more, and others have something too */
		kvp_server_touch(session->core->server, session);
		r = 0;
	}
	if (r < 0 && r != -EAGAIN) {
		kvp_session_end(session, kvp_session_end_text(-r));
		return;
	}
	if (r == 0 && session->end_after_flush && session->n_replies == 0) {
		kvp_session_end(session, session->refusal_text);
		return;
	}
	if (r == -EAGAIN && (!session->full || moved)) {
		session->full_since_ns = kvp_core_now_ns();
		start_stall(session);
	} else if (r == 0 && session->full) {
		kvp_session_stop_stall(session);
	}
	session->full = r == -EAGAIN;
	update_poll(session);
}

static void on_changed(struct kvp_room_owner *owner)
{
	struct kvp_session *session = KVP_CONTAINER_OF(owner, struct kvp_session, owner);

	kvp_server_touch(session->core->server, session);
}

/* ---- begin */

static int open_pidfd(int fd, uint32_t pid)
{
	socklen_t len = sizeof(int);
	int pidfd;

	if (pid == 0)
		return -1; /* in a namespace that we cannot see: the socket has to do */
	/* The kernel's own choice cannot be a process that got the number later. */
	if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len) == 0)
		return pidfd;
	return (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
}

static int init_handle(struct kvp_session *session, uv_poll_t *poll, int fd)
{
	int r = uv_poll_init(session->core->loop, poll, fd);

	if (r < 0)
		return r;
	poll->data = session;
	session->n_handles++;
	return 0;
}

static int start_handles(struct kvp_session *session)
{
	int r = init_handle(session, &session->io, session->fd);

	if (r < 0)
		return r;
	(void)uv_timer_init(session->core->loop, &session->stall); /* cannot fail */
	session->stall.data = session;
	session->n_handles++;
	if (session->pidfd >= 0 && init_handle(session, &session->death, session->pidfd) < 0) {
		(void)close(session->pidfd); /* the end of the connection is noticed anyway */
		session->pidfd = -1;
	}
	if (session->pidfd >= 0)
		(void)uv_poll_start(&session->death, UV_READABLE, on_death); /* as below */
	start_stall(session);
	update_poll(session);
	return 0;
}

struct kvp_session *kvp_session_create(struct kvp_core *core, int fd, uint64_t id)
{
	KVP_CLEANUP(kvp_closep) int owned = fd;
	KVP_CLEANUP(kvp_closep) int pidfd = -1;
	KVP_CLEANUP(kvp_freep) struct kvp_session *session = calloc(1, sizeof(*session));
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (!session || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return NULL;
	pidfd = open_pidfd(fd, (uint32_t)cred.pid);
	session->core = core;
	session->fd = fd;
	session->pidfd = pidfd;
	session->pid = (uint32_t)cred.pid;
	session->gid = cred.gid;
	session->owner.id = id;
	session->owner.uid = cred.uid;
	session->owner.changed = on_changed;
	session->created_ns = kvp_core_now_ns();
	session->refusal = KVP__STATUS__STATUS_OK;
	session->process = kvp_process_get(&core->server->processes, session->pid,
					   session->owner.uid, session->created_ns);
	if (!session->process)
		return NULL;
	kvp_session_judge(session);
	if (start_handles(session) < 0) {
		kvp_process_put(session->process);
		return NULL;
	}
	(void)KVP_TAKE_FD(owned); /* the session's now */
	(void)KVP_TAKE_FD(pidfd);
	return KVP_TAKE(session);
}

struct kvp_pool *kvp_session_pool(const struct kvp_session *session, uint32_t client_id)
{
	struct kvp_pool *pool;

	LL_SEARCH_SCALAR2(session->pools, pool, client_id, client_id, session_next);
	return pool;
}
