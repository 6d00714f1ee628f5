/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvpackd. Exit status: 0 stopped by a signal, or the option has been served; 1 failed while
 * starting or running (the log says why); 2 wrong usage or configuration.
 */

#include <getopt.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/daemon.h"
#include "daemon/gpu.h"
#include "daemon/log.h"
#include "daemon/net.h"

enum { EXIT_USAGE = 2 };

static void help(FILE *out)
{
	(void)fputs(
		"usage: kvpackd [--config PATH] [--check-config]\n"
		"       kvpackd --version | --help\n"
		"\n"
		"Moves KV caches between the engines of this node and other nodes.\n"
		"\n"
		"  -c, --config PATH   configuration file; without it: built-in values\n"
		"      --check-config  test the configuration, print it as understood, and leave\n"
		"      --version       versions of kvpackd and of what it uses\n"
		"  -h, --help          this text\n"
		"\n"
		"exit status: 0 stopped by a signal, 1 failed (the log says why), 2 wrong usage\n"
		"or configuration\n",
		out);
}

static void version(void)
{
	(void)printf("kvpackd %s\nUCX %s\nCUDA %s\n", KVP_VERSION, kvp_net_ucx_version(),
		     kvp_gpu_build());
}

static int check_config(const struct kvp_config *config)
{
	kvp_config_print(config, stdout);
	return fflush(stdout) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "config", required_argument, NULL, 'c' },
		{ "check-config", no_argument, NULL, 'k' },
		{ "version", no_argument, NULL, 'v' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct kvp_config config; /* as long as the process */
	static char full[PATH_MAX];
	const char *path = NULL;
	bool check = false;
	char err[512];
	int opt;

	while ((opt = getopt_long(argc, argv, "c:h", options, NULL)) != -1) { /* one thread yet */
		switch (opt) {
		case 'c':
			path = optarg;
			break;
		case 'k':
			check = true;
			break;
		case 'v':
			return version(), 0;
		case 'h':
			return help(stdout), 0;
		default:
			return help(stderr), EXIT_USAGE;
		}
	}
	if (optind < argc) {
		(void)fprintf(stderr, "kvpackd: unexpected argument \"%s\"\n", argv[optind]);
		return help(stderr), EXIT_USAGE;
	}
	if (kvp_config_load(&config, path, err, sizeof(err)) < 0) {
		(void)fprintf(stderr, "kvpackd: %s\n", err);
		return EXIT_USAGE;
	}
	if (check)
		return check_config(&config);
	if (path && realpath(path, full))
		path = full; /* for displays: who asks is elsewhere */
	kvp_log_setup(STDERR_FILENO, (enum kvp_log_level)config.log.level);
	return kvp_daemon_run(&config, path);
}
