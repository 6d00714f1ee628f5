/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rxe/checks.h"

#include "tests/support_clock.h"

#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const struct kvp_check *const lists[] = { kvp_checks_rig, kvp_checks_net, kvp_checks_rails,
						 NULL };
static const struct kvp_check *const lists_two[] = { kvp_checks_rooms, kvp_checks_nodes, NULL };

double kvp_check_ms(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec / 1e6;
}

static void child(const struct kvp_check *check)
{
	(void)setpgid(0, 0); /* its children end with it */
	(void)alarm(check->seconds * (unsigned int)support_slow());
	check->run();
	(void)fflush(stdout);
	_Exit(0);
}

/* 0 passed, 1 failed, 77 skipped. */
static int run(const struct kvp_check *check)
{
	double from = kvp_check_ms();
	int status = 0;
	pid_t pid;

	(void)fflush(stdout); /* else the child prints it again */
	pid = fork();
	if (pid == 0)
		child(check);
	if (pid < 0 || waitpid(pid, &status, 0) != pid) {
		printf("FAIL %s: no process\n", check->name);
		return 1;
	}
	(void)kill(-pid, SIGKILL); /* what it has left running */

	if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77)) {
		printf("%s %s, %.0f ms\n", WEXITSTATUS(status) ? "skip" : "ok  ", check->name,
		       kvp_check_ms() - from);
		return WEXITSTATUS(status);
	}
	if (WIFSIGNALED(status))
		printf("  %s: %s\n", check->name,
		       WTERMSIG(status) == SIGALRM ? "out of time" : strsignal(WTERMSIG(status)));
	printf("FAIL %s, %.0f ms\n", check->name, kvp_check_ms() - from);
	return 1;
}

/* Arguments: beginnings of names, for only those. */
static bool wanted(const char *name, int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		if (strncmp(name, argv[i], strlen(argv[i])) == 0)
			return true;
	}
	return argc < 2;
}

int main(int argc, char **argv)
{
	const char *nodes = getenv("RDMA_NODES"); /* NOLINT(concurrency-mt-unsafe): one thread */
	const struct kvp_check *const *list = nodes && strcmp(nodes, "2") == 0 ? lists_two : lists;
	unsigned passed = 0, failed = 0, skipped = 0;

	for (; *list; list++) {
		for (const struct kvp_check *c = *list; c->name; c++) {
			int r = wanted(c->name, argc, argv) ? run(c) : -1;

			passed += r == 0;
			failed += r == 1;
			skipped += r == 77;
		}
	}
	printf("%u passed, %u failed", passed, failed);
	if (skipped > 0)
		printf(", %u skipped", skipped);
	printf("\n");
	return failed > 0;
}
