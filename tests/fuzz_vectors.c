/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any text as a file of planner cases: kvpackctl plan reads it or refuses it with the line, in
 * both of its forms.
 */

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/ctl_plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
	if (!ok)
		abort();
}

/* Row by row, a plan of a million tokens takes its time: numbers of four digits and more are for
 * the form in words, which counts by formula. */
static bool has_large_numbers(const uint8_t *data, size_t size)
{
	size_t digits = 0;

	for (size_t i = 0; i < size; i++) {
		digits = isdigit(data[i]) ? digits + 1 : 0;
		if (digits > 3 || data[i] == 'e' || data[i] == 'E')
			return true;
	}
	return false;
}

/* What the command prints goes nowhere; its complaints are told by the exit status. */
static int run(char *path, bool json)
{
	char plan[] = "plan", option[] = "--json";
	char *argv[] = { plan, json ? option : path, json ? path : NULL, NULL };
	FILE *out = stdout, *err = stderr;
	static FILE *null;
	int r;

	if (!null)
		null = fopen("/dev/null", "we");
	require(null);
	stdout = null;
	stderr = null;
	r = ctl_plan(json ? 3 : 2, argv);
	stdout = out;
	stderr = err;
	return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static int fd = -1;
	char path[64];
	int words;

	if (fd < 0)
		fd = memfd_create("vectors", MFD_CLOEXEC);
	require(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (has_large_numbers(data, size)) {
		(void)run(path, false); /* 0 or 2 */
		return 0;
	}
	words = run(path, false);
	require(words == 0 || words == 2);
	require(run(path, true) == words);
	return 0;
}
