/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/server.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <utlist.h>

#include "daemon/files.h"
#include "daemon/log.h"
#include "daemon/session_admit.h"
#include "daemon/session_settle.h"
#include "proto/util.h"

#define BACKLOG 128
#define ACCEPTS_PER_TURN 16
#define PAUSE_MS 100    /* without descriptors: until the next try */
#define LISTEN_FD 3     /* the first that systemd passes */
#define ACCEPT_NS 50000 /* after so long no more in a turn */
/* A turn's share for jobs: about what a session has. A turn without any work costs a hundredth. */
#define JOBS_NS 100000
#define REST_MS 1

static struct kvp_log_limit log_accept = KVP_LOG_LIMIT(10, 10);

/* What opening the socket needs, and where its error goes. */
struct opening {
	struct kvp_server *server;
	const struct kvp_config *config;
	char *err;
	size_t err_bytes;
};

static int KVP_PRINTF(3, 4) fail(const struct opening *open, int error, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(open->err, open->err_bytes, fmt, args); /* may be cut */
	va_end(args);
	return -error;
}

/* ---- the socket */

static int check_activated(const struct opening *open, int fd)
{
	int type = 0, domain = 0, listening = 0;
	struct sockaddr_un addr = { 0 };
	socklen_t len = sizeof(int);

	(void)getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len);
	(void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len);
	(void)getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &len); /* 0: refused below */
	if (type != SOCK_SEQPACKET || domain != AF_UNIX || !listening)
		return fail(open, EINVAL,
			    "LISTEN_FDS: descriptor %d is no listening AF_UNIX SOCK_SEQPACKET "
			    "socket (systemd: ListenSequentialPacket=)",
			    fd);
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
		return fail(open, errno, "LISTEN_FDS: fcntl: %s", strerror(errno));
	len = sizeof(addr) - 1; /* a path of full length has no end of its own */
	if (getsockname(fd, (struct sockaddr *)&addr, &len) == 0 && addr.sun_path[0])
		(void)snprintf(open->server->path, sizeof(open->server->path), "%s",
			       addr.sun_path); /* fits */
	return fd;
}

/* The socket that systemd passes; -ENOENT: none. */
static int take_activated(const struct opening *open)
{
	const char *pid = getenv("LISTEN_PID"), *fds = getenv("LISTEN_FDS");
	long n;

	if (!pid || !fds || strtol(pid, NULL, 10) != getpid())
		return -ENOENT;
	n = strtol(fds, NULL, 10);
	(void)unsetenv("LISTEN_PID"); /* fails for malformed names only */
	(void)unsetenv("LISTEN_FDS");
	if (n != 1)
		return fail(open, EINVAL, "LISTEN_FDS is %ld, allowed is 1", n);
	return check_activated(open, LISTEN_FD);
}

/* Makes the last directory of the path if it is missing; *dir is open and locked on success: two
 * daemons that start at once must not take each other's fresh socket for a stale one. */
static int lock_directory(const struct opening *open_, int *dir)
{
	char path[KVP_CONFIG_STR_MAX];
	char *slash;
	int fd;

	(void)snprintf(path, sizeof(path), "%s", open_->config->client.socket); /* fits */
	slash = strrchr(path, '/');
	if (slash && slash != path)
		*slash = 0;
	else
		(void)snprintf(path, sizeof(path), "%s", slash ? "/" : ".");
	if (mkdir(path, 0750) < 0 && errno != EEXIST)
		return fail(open_, errno, "client.socket: mkdir %s: %s", path, strerror(errno));
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return fail(open_, errno, "client.socket: open %s: %s", path, strerror(errno));
	while (flock(fd, LOCK_EX) < 0) {
		if (errno == EINTR)
			continue;
		(void)close(fd);
		return fail(open_, errno, "client.socket: flock %s: %s", path, strerror(errno));
	}
	*dir = fd;
	return 0;
}

/* A file that a dead daemon left is removed; a living daemon, and any other file, is not. */
static int remove_stale(const struct opening *open, const struct sockaddr_un *addr)
{
	KVP_CLEANUP(kvp_closep) int fd = -1;
	struct stat st;

	if (lstat(addr->sun_path, &st) < 0)
		return errno == ENOENT ? 0
				       : fail(open, errno, "client.socket: %s: %s", addr->sun_path,
					      strerror(errno));
	if (!S_ISSOCK(st.st_mode))
		return fail(open, EEXIST, "client.socket: %s exists and is no socket",
			    addr->sun_path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return fail(open, errno, "socket: %s", strerror(errno));
	if (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 || errno != ECONNREFUSED)
		return fail(open, EADDRINUSE, "client.socket: another daemon serves %s",
			    addr->sun_path);
	if (unlink(addr->sun_path) < 0)
		return fail(open, errno, "client.socket: unlink %s: %s", addr->sun_path,
			    strerror(errno));
	return 0;
}

/* The configured group, if it exists and we may; otherwise our own keeps the socket. */
static void give_to_group(const struct opening *open)
{
	const char *name = open->config->client.group;
	const struct group *group = name[0] ? getgrnam(name) : NULL; /* no other thread asks */

	if (!name[0] || geteuid() != 0)
		return;
	if (!group) {
		kvp_log(KVP_LOG_NOTICE,
			"client.group: no group %s here: only root reaches the socket", name);
		return;
	}
	if (chown(open->config->client.socket, (uid_t)-1, group->gr_gid) < 0)
		kvp_log(KVP_LOG_WARNING, "chown %s: %s", open->config->client.socket,
			strerror(errno));
}

static int bind_listen(const struct opening *open, const struct sockaddr_un *addr)
{
	KVP_CLEANUP(kvp_closep)
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	mode_t mask;
	struct stat st;
	int r;

	if (fd < 0)
		return fail(open, errno, "socket: %s", strerror(errno));
	/* Nobody else gets in before the mode and the group are set. */
	mask = umask(0177);
	r = bind(fd, (const struct sockaddr *)addr, sizeof(*addr));
	(void)umask(mask);
	if (r < 0)
		return fail(open, errno, "client.socket: bind %s: %s", addr->sun_path,
			    strerror(errno));
	give_to_group(open);
	if (chmod(addr->sun_path, open->config->client.mode) < 0 || listen(fd, BACKLOG) < 0 ||
	    lstat(addr->sun_path, &st) < 0)
		return fail(open, errno, "client.socket: %s: %s", addr->sun_path, strerror(errno));
	open->server->file_dev = st.st_dev;
	open->server->file_ino = st.st_ino;
	return KVP_TAKE_FD(fd);
}

static int open_socket(const struct opening *open)
{
	KVP_CLEANUP(kvp_closep) int dir = -1;
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int r = take_activated(open);

	open->server->activated = r >= 0;
	if (r != -ENOENT)
		return r;
	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", open->config->client.socket);
	r = lock_directory(open, &dir);
	if (r == 0)
		r = remove_stale(open, &addr);
	return r < 0 ? r : bind_listen(open, &addr);
}

/* ---- accept */

static void on_listener(uv_poll_t *poll, int status, int events);

static void on_pause_over(uv_timer_t *timer)
{
	struct kvp_server *server = timer->data;

	if (server->fd >= 0)
		(void)uv_poll_start(&server->listener, UV_READABLE, on_listener); /* as before */
}

/* The connection stays in the backlog; polling on would spin. */
static void pause_accept(struct kvp_server *server, int error)
{
	server->accept_pauses++;
	kvp_log_limited(&log_accept, KVP_LOG_WARNING, "accept: %s: next try in %d ms%s",
			strerror(error), PAUSE_MS,
			error == EMFILE ? "; RLIMIT_NOFILE: " KVP_FILES_ADVICE : "");
	(void)uv_poll_stop(&server->listener);
	(void)uv_timer_start(&server->pause, on_pause_over, PAUSE_MS, 0);
}

/* Of all, or of one process: the oldest is the least likely to be about to greet. */
static void end_oldest_refused(struct kvp_server *server, const struct kvp_process *process)
{
	struct kvp_session *session;

	DL_FOREACH (server->sessions, session) {
		if (session->refusal == KVP__STATUS__STATUS_OK ||
		    session->state == KVP_SESSION_ENDING ||
		    (process && session->process != process))
			continue;
		kvp_session_end(session, "no room even to be told why it is refused");
		return;
	}
}

static void begin_session(struct kvp_server *server, int fd)
{
	uint64_t from_ns = kvp_core_now_ns();
	struct kvp_session *session = kvp_session_create(server->core, fd, ++server->last_id);

	if (!session)
		return;
	server->accepted++;
	kvp_session_enter(session);
	if (kvp_process_account(session->process, from_ns, kvp_core_now_ns() - from_ns))
		kvp_server_rest(server, session->process);
	DL_APPEND(server->sessions, session);
	if (session->process->n_refused > KVP_SERVER_REFUSED_PROCESS)
		end_oldest_refused(server, session->process);
	else if (server->n_refused > KVP_SERVER_REFUSED_MAX)
		end_oldest_refused(server, NULL);
}

/* False: nobody waits, or nobody can be let in now. */
static bool accept_one(struct kvp_server *server)
{
	int fd = accept4(server->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd >= 0) {
		begin_session(server, fd);
		return true;
	}
	if (errno == EINTR || errno == ECONNABORTED)
		return true;
	if (errno != EAGAIN)
		pause_accept(server, errno);
	return false;
}

static void on_listener(uv_poll_t *poll, int status, int events)
{
	struct kvp_server *server = poll->data;
	uint64_t from_ns = kvp_core_now_ns(), took = 0;

	(void)status; /* accept says what is wrong */
	(void)events;
	for (int i = 0; i < ACCEPTS_PER_TURN && took < ACCEPT_NS && accept_one(server); i++)
		took = kvp_core_now_ns() - from_ns;
	kvp_turns_count(&server->accept_turns, kvp_core_now_ns() - from_ns);
}

/* ---- flush */

static struct kvp_session *take_flushing(struct kvp_server *server)
{
	struct kvp_session *session = server->flushing;

	if (!session)
		return NULL;
	server->flushing = session->touched_next;
	session->touched = false;
	return session;
}

static void on_work(uv_idle_t *handle);

/* Who has more than a turn's events is touched again meanwhile: that is for the next turn, which
 * comes at once. */
static void on_prepare(uv_prepare_t *handle)
{
	struct kvp_server *server = handle->data;
	struct kvp_session *session = server->touched;

	server->turn++;
	server->touched = NULL;
	server->flushing = session;
	while ((session = take_flushing(server)))
		kvp_session_flush(session);
	if (server->touched)
		(void)uv_idle_start(&server->work, on_work); /* fails without a callback only */
}

void kvp_server_touch(struct kvp_server *server, struct kvp_session *session)
{
	if (session->touched || session->state == KVP_SESSION_ENDING)
		return;
	session->touched = true;
	LL_PREPEND2(server->touched, session, touched_next);
}

/* ---- rest */

static void on_rested(uv_timer_t *timer)
{
	struct kvp_server *server = timer->data;
	struct kvp_session *session;
	struct kvp_process *process;

	DL_FOREACH (server->sessions, session) {
		if (session->process->resting)
			kvp_server_touch(server, session);
	}
	DL_FOREACH (server->processes, process)
		process->resting = false;
}

void kvp_server_rest(struct kvp_server *server, struct kvp_process *process)
{
	process->resting = true;
	server->rests++;
	if (!uv_is_active((uv_handle_t *)&server->rest))
		(void)uv_timer_start(&server->rest, on_rested, REST_MS, 0); /* as above */
}

/* ---- jobs */

/* Out of the list: its step or drop may free it. NULL: none. */
static struct kvp_server_job *take_job(struct kvp_server *server)
{
	struct kvp_server_job *job = server->jobs;

	if (job)
		DL_DELETE(server->jobs, job);
	return job;
}

/* False: no job is left. */
static bool step_job(struct kvp_server *server)
{
	struct kvp_server_job *job = take_job(server);

	if (job && job->step(job))
		DL_PREPEND(server->jobs, job);
	return server->jobs;
}

static void on_work(uv_idle_t *handle)
{
	struct kvp_server *server = handle->data;
	uint64_t from_ns = kvp_core_now_ns(), took = 0;
	bool more = server->jobs;

	while (more && took < JOBS_NS) {
		more = step_job(server);
		took = kvp_core_now_ns() - from_ns;
	}
	if (took)
		kvp_turns_count(&server->job_turns, took);
	if (!more)
		(void)uv_idle_stop(handle); /* cannot fail */
}

void kvp_server_defer(struct kvp_server *server, struct kvp_server_job *job)
{
	DL_APPEND(server->jobs, job);
	(void)uv_idle_start(&server->work, on_work); /* fails without a callback only */
}

static void drop_jobs(struct kvp_server *server)
{
	struct kvp_server_job *job;

	while ((job = take_job(server)))
		job->drop(job);
}

/* ---- life */

static void remove_file(const struct kvp_server *server)
{
	struct stat st;

	/* Another daemon may have replaced it meanwhile. */
	if (!server->activated && lstat(server->path, &st) == 0 && st.st_dev == server->file_dev &&
	    st.st_ino == server->file_ino)
		(void)unlink(server->path); /* the next start removes it too */
}

/* Of these only the listener's start can fail, for a handle that is closing. */
static void start_handles(struct kvp_server *server)
{
	uv_loop_t *loop = server->core->loop;

	(void)uv_timer_init(loop, &server->pause);
	(void)uv_prepare_init(loop, &server->flush);
	(void)uv_idle_init(loop, &server->work);
	(void)uv_timer_init(loop, &server->rest);
	server->listener.data = server->pause.data = server->flush.data = server;
	server->work.data = server->rest.data = server;
	server->n_handles = 5;
	(void)uv_prepare_start(&server->flush, on_prepare);
	(void)uv_poll_start(&server->listener, UV_READABLE, on_listener);
}

int kvp_server_create(struct kvp_server **out, struct kvp_core *core, char *err, size_t err_bytes)
{
	KVP_CLEANUP(kvp_freep) struct kvp_server *server = calloc(1, sizeof(*server));
	const struct opening open = { server, core->config, err, err_bytes };
	int r;

	if (!server)
		return fail(&open, ENOMEM, "no memory");
	server->core = core;
	(void)snprintf(server->path, sizeof(server->path), "%s", core->config->client.socket);
	server->fd = open_socket(&open);
	if (server->fd < 0)
		return server->fd;
	r = uv_poll_init(core->loop, &server->listener, server->fd);
	if (r < 0) {
		remove_file(server);
		(void)close(server->fd);
		return fail(&open, -r, "client.socket: poll: %s", uv_strerror(r));
	}
	start_handles(server);
	*out = KVP_TAKE(server);
	return 0;
}

static void on_closed(uv_handle_t *handle)
{
	struct kvp_server *server = handle->data;

	server->n_handles--;
}

void kvp_server_close(struct kvp_server *server)
{
	if (server->fd < 0)
		return;
	(void)uv_poll_stop(&server->listener); /* cannot fail */
	uv_close((uv_handle_t *)&server->listener, on_closed);
	uv_close((uv_handle_t *)&server->pause, on_closed);
	remove_file(server);
	(void)close(server->fd); /* polled no more */
	server->fd = -1;
}

void kvp_server_end_sessions(struct kvp_server *server, const char *why)
{
	struct kvp_session *session;

	DL_FOREACH (server->sessions, session)
		kvp_session_end(session, why);
	drop_jobs(server);
	if (uv_is_closing((uv_handle_t *)&server->flush))
		return;
	uv_close((uv_handle_t *)&server->flush, on_closed);
	uv_close((uv_handle_t *)&server->work, on_closed);
	uv_close((uv_handle_t *)&server->rest, on_closed);
}

bool kvp_server_idle(const struct kvp_server *server)
{
	return !server->sessions && server->n_handles == 0;
}

void kvp_server_destroy(struct kvp_server *server)
{
	if (!server)
		return;
	assert(kvp_server_idle(server) && server->fd < 0);
	kvp_settle_clear(server);
	kvp_process_clear(&server->processes);
	free(server);
}

void kvp_server_forget(struct kvp_server *server, struct kvp_session *session)
{
	assert(!server->flushing); /* handles close elsewhere in the loop */
	if (session->touched)
		LL_DELETE2(server->touched, session, touched_next);
	DL_DELETE(server->sessions, session);
	kvp_session_leave(session);
	kvp_settle_check(server);
}

struct kvp_session *kvp_server_session(const struct kvp_server *server, uint64_t id)
{
	struct kvp_session *session;

	DL_SEARCH_SCALAR(server->sessions, session, owner.id, id);
	return session;
}

uint32_t kvp_server_sessions_of(const struct kvp_server *server, uint32_t uid)
{
	const struct kvp_process *process;
	uint32_t n = 0;

	DL_FOREACH (server->processes, process)
		n += process->uid == uid ? process->n_sessions : 0;
	return n;
}

uint32_t kvp_server_rooms_of(const struct kvp_server *server, uint32_t uid)
{
	const struct kvp_session *session;
	uint32_t n = 0;

	DL_FOREACH (server->sessions, session)
		n += session->owner.uid == uid ? session->owner.n_rooms : 0;
	return n;
}

uint32_t kvp_server_pools_of(const struct kvp_server *server, uint32_t uid)
{
	const struct kvp_pool *pool;
	uint32_t n = 0;

	DL_FOREACH (server->core->pools.first, pool)
		n += pool->uid == uid;
	return n;
}
