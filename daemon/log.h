/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lines on stderr, with journal priorities where a journal (or a file) reads them.
 *
 * Any thread may log. A line is one write of at most KVP_LOG_LINE_MAX bytes and never waits: when
 * the reader of stderr is slow, lines are dropped and counted, since a daemon that stands still
 * because of its log is worse than a gap in the log. The next line that gets through tells how many
 * are missing.
 */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/util.h"

#define KVP_LOG_LINE_MAX 1024u

enum kvp_log_level { /* as in syslog(3) */
		     KVP_LOG_ERR = 3,
		     KVP_LOG_WARNING = 4,
		     KVP_LOG_NOTICE = 5,
		     KVP_LOG_INFO = 6,
		     KVP_LOG_DEBUG = 7,
};

/*
 * Sets where lines go and up to which level; without it: stderr, info. Call it before other threads
 * start. Lines begin with <N> if JOURNAL_STREAM is set or `fd` is no terminal, else with the
 * level's name. `fd` is borrowed. A pipe or terminal is opened a second time, so that O_NONBLOCK
 * does not hit other processes that share the descriptor; the caller ignores SIGPIPE.
 */
void kvp_log_setup(int fd, enum kvp_log_level max_level);

/* Whether a line of that level goes out: for what is expensive to format. */
bool kvp_log_enabled(enum kvp_log_level level);

/* Lines dropped so far because the reader was slow. */
uint64_t kvp_log_dropped(void);

/* Logs one line; no newline at the end. Control characters (a client's label may have some) become
 * '?', what is too long is cut. errno is kept. */
void kvp_log(enum kvp_log_level level, const char *fmt, ...) KVP_PRINTF(2, 3);

/*
 * Keeps what a client or a peer can trigger from filling the log: at most `burst` lines per
 * `period_ns`. One object for each kind of message, static with KVP_LOG_LIMIT or inside the object
 * that it is about. Any thread.
 */
struct kvp_log_limit {
	pthread_mutex_t lock; /* guards the counts below */
	uint32_t burst;       /* lines in a period */
	uint32_t used;        /* of burst, in this period */
	uint32_t suppressed;  /* since the last line that went out */
	uint64_t period_ns;
	uint64_t period_start_ns; /* CLOCK_MONOTONIC; 0: no line yet */
};

#define KVP_LOG_LIMIT(burst_, period_s_)                                 \
	{                                                                \
		.lock = PTHREAD_MUTEX_INITIALIZER, .burst = (burst_),    \
		.period_ns = (uint64_t)(period_s_)*UINT64_C(1000000000), \
	}

/* Takes one line out of the limit at `now_ns`. False: drop it. True: `*suppressed` is how many were
 * dropped before it. */
bool kvp_log_limit_take(struct kvp_log_limit *limit, uint64_t now_ns, uint32_t *suppressed);

/* kvp_log() within a limit; the first line after a gap ends with "(N similar lines suppressed)". */
void kvp_log_limited(struct kvp_log_limit *limit, enum kvp_log_level level, const char *fmt, ...)
	KVP_PRINTF(3, 4);
