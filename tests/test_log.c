/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/log.h"

/* Everything that is in the pipe now, as a string in a static buffer. */
static const char *drain(int fd)
{
	static char text[1 << 17];
	ssize_t n;

	cr_assert_eq(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	n = read(fd, text, sizeof(text) - 1);
	text[n > 0 ? n : 0] = '\0';
	return text;
}

Test(log, priorities_and_levels)
{
	int fds[2];

	cr_assert_eq(pipe(fds), 0);
	kvp_log_setup(fds[1], KVP_LOG_INFO);
	kvp_log(KVP_LOG_ERR, "room %d label %s", 7, "a");
	kvp_log(KVP_LOG_DEBUG, "not shown");
	kvp_log(KVP_LOG_INFO, "shown");
	cr_assert_str_eq(drain(fds[0]), "<3>room 7 label a\n<6>shown\n");
	cr_assert(kvp_log_enabled(KVP_LOG_INFO));
	cr_assert_not(kvp_log_enabled(KVP_LOG_DEBUG));
}

Test(log, control_characters_do_not_make_lines)
{
	int fds[2];

	cr_assert_eq(pipe(fds), 0);
	kvp_log_setup(fds[1], KVP_LOG_INFO);
	kvp_log(KVP_LOG_INFO, "label %s", "x\n<0>forged\x7f\x1b[0m");
	cr_assert_str_eq(drain(fds[0]), "<6>label x?<0>forged??[0m\n");
}

Test(log, long_lines_are_cut)
{
	char longer[3000];
	const char *text;
	int fds[2];

	memset(longer, 'a', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	cr_assert_eq(pipe(fds), 0);
	kvp_log_setup(fds[1], KVP_LOG_INFO);
	kvp_log(KVP_LOG_INFO, "%s", longer);
	text = drain(fds[0]);
	cr_assert_eq(strlen(text), KVP_LOG_LINE_MAX);
	cr_assert_str_eq(text + strlen(text) - 5, "a...\n");
}

Test(log, errno_is_kept)
{
	int fds[2];

	cr_assert_eq(pipe(fds), 0);
	kvp_log_setup(fds[1], KVP_LOG_INFO);
	close(fds[0]);
	signal(SIGPIPE, SIG_IGN);
	errno = EXDEV;
	kvp_log(KVP_LOG_INFO, "nobody reads");
	cr_assert_eq(errno, EXDEV);
	cr_assert_eq(kvp_log_dropped(), 1);
}

/* A full sink must not stop the caller; the test's time-out would tell. */
static void check_full(int in, int out)
{
	uint64_t dropped;

	kvp_log_setup(in, KVP_LOG_INFO);
	for (int i = 0; i < 20000; i++)
		kvp_log(KVP_LOG_INFO, "line %d of more than any pipe or socket buffer holds", i);
	dropped = kvp_log_dropped();
	cr_assert_gt(dropped, 0);

	for (int i = 0; i < 64 && strlen(drain(out)) > 0; i++)
		;
	kvp_log(KVP_LOG_INFO, "again");
	cr_assert_eq(kvp_log_dropped(), dropped);
	cr_assert(strstr(drain(out), "lines lost\n"));
}

Test(log, full_pipe_drops, .timeout = 20)
{
	int fds[2];

	cr_assert_eq(pipe(fds), 0);
	check_full(fds[1], fds[0]);
	cr_assert_eq(fcntl(fds[1], F_GETFL) & O_NONBLOCK, 0); /* others share this description */
}

Test(log, full_socket_drops, .timeout = 20)
{
	int fds[2];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
	check_full(fds[1], fds[0]);
}

Test(log, files_are_appended_in_place)
{
	char path[] = "/tmp/kvp-log-XXXXXX";
	int fd = mkstemp(path);
	char text[128] = { 0 };

	cr_assert_geq(fd, 0);
	unlink(path);
	cr_assert_eq(write(fd, "before\n", 7), 7);
	kvp_log_setup(fd, KVP_LOG_INFO);
	kvp_log(KVP_LOG_WARNING, "after");
	cr_assert_gt(pread(fd, text, sizeof(text) - 1, 0), 0);
	cr_assert_str_eq(text, "before\n<4>after\n");
}

#define S UINT64_C(1000000000)

Test(log, limit_counts_what_it_suppresses)
{
	struct kvp_log_limit limit = KVP_LOG_LIMIT(2, 10);
	uint32_t suppressed = 99;

	cr_assert(kvp_log_limit_take(&limit, 100 * S, &suppressed));
	cr_assert_eq(suppressed, 0);
	cr_assert(kvp_log_limit_take(&limit, 101 * S, &suppressed));
	for (int i = 0; i < 5; i++)
		cr_assert_not(kvp_log_limit_take(&limit, 109 * S, &suppressed));
	cr_assert(kvp_log_limit_take(&limit, 110 * S, &suppressed));
	cr_assert_eq(suppressed, 5);
	cr_assert(kvp_log_limit_take(&limit, 110 * S, &suppressed));
	cr_assert_eq(suppressed, 0);
	cr_assert_not(kvp_log_limit_take(&limit, 119 * S, &suppressed));
}

Test(log, limited_lines_say_how_many)
{
	struct kvp_log_limit limit = KVP_LOG_LIMIT(1, 3600);
	int fds[2];

	cr_assert_eq(pipe(fds), 0);
	kvp_log_setup(fds[1], KVP_LOG_INFO);
	for (int i = 0; i < 3; i++)
		kvp_log_limited(&limit, KVP_LOG_WARNING, "bad message %d", i);
	cr_assert_str_eq(drain(fds[0]), "<4>bad message 0\n");

	limit.period_ns = 0; /* every line begins a new period */
	kvp_log_limited(&limit, KVP_LOG_WARNING, "bad message");
	cr_assert_str_eq(drain(fds[0]), "<4>bad message (2 similar lines suppressed)\n");
}
