/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum log_sink {
	LOG_SINK_PLAIN,  /* write(2): a file, or a description of ours with O_NONBLOCK */
	LOG_SINK_SOCKET, /* send(2) with MSG_DONTWAIT: the journal's stream socket */
};

/* Written by kvp_log_setup() before threads start, except the counters. */
static struct {
	int fd;
	enum log_sink sink;
	enum kvp_log_level max_level;
	bool priorities;
	int owned_fd; /* what setup opened, or -1 */
	_Atomic uint64_t dropped;
	_Atomic uint64_t told; /* of dropped, already said in a line */
} log_state = {
	.fd = STDERR_FILENO,
	.max_level = KVP_LOG_INFO,
	.owned_fd = -1,
};

/* Opens a pipe or terminal again, without blocking; -1 when that is not possible. */
static int log_reopen(int fd)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd); /* fits any int */
	return open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

void kvp_log_setup(int fd, enum kvp_log_level max_level)
{
	struct stat st;

	if (log_state.owned_fd >= 0)
		(void)close(log_state.owned_fd); /* only written to, line by line */
	log_state.owned_fd = -1;
	log_state.fd = fd;
	log_state.sink = LOG_SINK_PLAIN;
	log_state.max_level = max_level;
	log_state.priorities = getenv("JOURNAL_STREAM") || !isatty(fd);

	if (fstat(fd, &st) < 0)
		return;
	if (S_ISSOCK(st.st_mode)) {
		log_state.sink = LOG_SINK_SOCKET;
	} else if (S_ISFIFO(st.st_mode) || S_ISCHR(st.st_mode)) {
		/* Not for plain files: a second description would have its own position. */
		log_state.owned_fd = log_reopen(fd);
		if (log_state.owned_fd >= 0)
			log_state.fd = log_state.owned_fd;
	}
}

bool kvp_log_enabled(enum kvp_log_level level)
{
	return level <= log_state.max_level;
}

uint64_t kvp_log_dropped(void)
{
	return atomic_load_explicit(&log_state.dropped, memory_order_relaxed);
}

/* One call a line: up to PIPE_BUF bytes a pipe takes all or nothing, so lines do not mix. */
static bool log_write(const char *line, size_t bytes)
{
	ssize_t n;

	do {
		if (log_state.sink == LOG_SINK_SOCKET)
			n = send(log_state.fd, line, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
		else
			n = write(log_state.fd, line, bytes);
	} while (n < 0 && errno == EINTR);

	return n == (ssize_t)bytes;
}

static const char *log_level_name(enum kvp_log_level level)
{
	switch (level) {
	case KVP_LOG_ERR:
		return "error";
	case KVP_LOG_WARNING:
		return "warning";
	case KVP_LOG_NOTICE:
		return "notice";
	case KVP_LOG_INFO:
		return "info";
	case KVP_LOG_DEBUG:
		return "debug";
	}
	return "?";
}

/* Writes the start of a line; returns its length, which leaves most of the line free. */
static size_t log_prefix(char *line, enum kvp_log_level level)
{
	int n;

	if (log_state.priorities)
		n = snprintf(line, KVP_LOG_LINE_MAX, "<%d>", (int)level);
	else
		n = snprintf(line, KVP_LOG_LINE_MAX, "%s: ", log_level_name(level));
	return n < 0 ? 0 : (size_t)n;
}

static char log_printable(char c)
{
	if ((unsigned char)c < 0x20 || c == 0x7f)
		return '?';
	return c;
}

static void log_line(enum kvp_log_level level, const char *text)
{
	char line[KVP_LOG_LINE_MAX];
	size_t n = log_prefix(line, level);

	for (; *text && n < sizeof(line) - 1; text++, n++)
		line[n] = log_printable(*text);
	if (*text)
		line[n - 1] = line[n - 2] = line[n - 3] = '.'; /* shows that it was cut */
	line[n++] = '\n';

	if (!log_write(line, n))
		atomic_fetch_add_explicit(&log_state.dropped, 1, memory_order_relaxed);
}

/* Says once how many lines were lost. Itself lost, it counts as one more and is said later. */
static void log_tell_dropped(void)
{
	uint64_t dropped = kvp_log_dropped();
	uint64_t told = atomic_load_explicit(&log_state.told, memory_order_relaxed);
	char text[64];

	if (dropped == told || !atomic_compare_exchange_strong(&log_state.told, &told, dropped))
		return;

	(void)snprintf(text, sizeof(text), "log: %llu lines lost",
		       (unsigned long long)(dropped - told));
	log_line(KVP_LOG_WARNING, text);
	if (kvp_log_dropped() != dropped)
		atomic_fetch_sub(&log_state.told, dropped - told);
}

KVP_PRINTF(2, 0)
static void log_formatted(enum kvp_log_level level, const char *fmt, va_list args,
			  uint32_t suppressed)
{
	int saved = errno;
	char text[KVP_LOG_LINE_MAX + 1]; /* one more: log_line() sees that it was cut */
	int n = vsnprintf(text, sizeof(text), fmt, args);

	if (n < 0)
		n = 0;
	if (suppressed && (size_t)n < sizeof(text))
		(void)snprintf(text + n, sizeof(text) - (size_t)n, " (%u similar lines suppressed)",
			       suppressed);
	log_tell_dropped();
	log_line(level, text);
	errno = saved;
}

void kvp_log(enum kvp_log_level level, const char *fmt, ...)
{
	va_list args;

	if (!kvp_log_enabled(level))
		return;

	va_start(args, fmt);
	log_formatted(level, fmt, args, 0);
	va_end(args);
}

bool kvp_log_limit_take(struct kvp_log_limit *limit, uint64_t now_ns, uint32_t *suppressed)
{
	bool allowed;

	pthread_mutex_lock(&limit->lock);
	if (limit->period_start_ns == 0 || now_ns - limit->period_start_ns >= limit->period_ns) {
		limit->period_start_ns = now_ns;
		limit->used = 0;
	}
	allowed = limit->used < limit->burst;
	if (allowed) {
		limit->used++;
		*suppressed = limit->suppressed;
		limit->suppressed = 0;
	} else {
		limit->suppressed++;
	}
	pthread_mutex_unlock(&limit->lock);
	return allowed;
}

void kvp_log_limited(struct kvp_log_limit *limit, enum kvp_log_level level, const char *fmt, ...)
{
	struct timespec now;
	uint32_t suppressed;
	va_list args;

	if (!kvp_log_enabled(level))
		return;

	(void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail with this clock */
	if (!kvp_log_limit_take(limit, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
				&suppressed))
		return;

	va_start(args, fmt);
	log_formatted(level, fmt, args, suppressed);
	va_end(args);
}
