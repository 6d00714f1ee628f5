/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target over files, without libFuzzer: each find stays a test, with any compiler.
 * Arguments are files or folders; without arguments the target sees the empty input only.
 */

#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/util.h"

#define INPUT_MAX (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned n_inputs;

static int replay_file(const char *path)
{
	KVP_CLEANUP(kvp_freep) uint8_t *data = NULL;
	FILE *file = fopen(path, "rb");
	uint8_t *exact;
	size_t n;

	if (!file)
		return -errno;

	data = malloc(INPUT_MAX);
	n = data ? fread(data, 1, INPUT_MAX, file) : 0;
	(void)fclose(file); /* only read */
	if (!data)
		return -ENOMEM;

	/* Exactly as large as the input, so that a read past its end is seen. */
	exact = realloc(data, n ? n : 1);
	if (!exact)
		return -ENOMEM;
	data = exact;
	(void)LLVMFuzzerTestOneInput(data, n);
	n_inputs++;
	return 0;
}

static int replay_dir(const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *entry;
	char name[4096];
	int r = 0;

	if (!dir)
		return -errno;

	while (r == 0 && (entry = readdir(dir))) {
		if (entry->d_name[0] == '.')
			continue;
		if (snprintf(name, sizeof(name), "%s/%s", path, entry->d_name) >= (int)sizeof(name))
			r = -ENAMETOOLONG;
		else
			r = replay_file(name);
	}
	(void)closedir(dir); /* only read */
	return r;
}

int main(int argc, char **argv)
{
	(void)LLVMFuzzerTestOneInput((const uint8_t *)"", 0);

	for (int i = 1; i < argc; i++) {
		struct stat st;
		int r = stat(argv[i], &st) < 0 ? -errno : 0;

		if (r == 0)
			r = S_ISDIR(st.st_mode) ? replay_dir(argv[i]) : replay_file(argv[i]);
		if (r < 0) {
			(void)fprintf(stderr, "%s: error %d\n", argv[i], -r);
			return 1;
		}
	}
	(void)printf("%u inputs\n", n_inputs);
	return 0;
}
