/* SPDX-License-Identifier: Apache-2.0 */
/* kvpackctl: asks daemons for their state and prints it. */

#include <errno.h>
#include <getopt.h>
#include <glob.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl_doctor.h"
#include "client/ctl_plan.h"
#include "client/ctl_show.h"
#include "client/kvpack.h"
#include "proto/util.h"

#define RUN_DIR "/run/kvpack"
#define SOCKET_PATH 108u /* sun_path, with its end */
#define TIMEOUT_MS 5000u

enum { EXIT_OK = 0, EXIT_WRONG = 1, EXIT_USAGE = 2, EXIT_NO_DAEMON = 3, EXIT_REFUSED = 4 };

struct options {
	bool json, all, help;
	const char *socket, *instance, *label, *since, *reason;
	const struct ctl_command *command;
	char arg[256]; /* for the daemon */
};

/* What has been seen of all daemons. */
struct outcome {
	unsigned n_sockets, n_answers;
	int status;
	cJSON *answers; /* with --json: [{"socket", "answer"}] */
};

static int fail(int status, const char *fmt, ...) KVP_PRINTF(2, 3);
static int fail(int status, const char *fmt, ...)
{
	va_list ap;

	(void)fputs("kvpackctl: ", stderr);
	va_start(ap, fmt);
	(void)vfprintf(stderr, fmt, ap);
	va_end(ap);
	(void)fputc('\n', stderr);
	return status;
}

/* ---- help ---------------------------------------------------------------------------------- */

static void print_help(void)
{
	const struct ctl_command *command;

	(void)puts("Usage: kvpackctl [--json] [--socket PATH | --instance NAME] COMMAND ...\n"
		   "\n"
		   "Shows what kvpackd does now, and why something is slow or stuck.\n");
	for (unsigned i = 0; (command = ctl_command_at(i)); i++)
		(void)printf("  %-9s %-15s %s\n", command->name, command->usage, command->brief);
	(void)puts(
		"  plan      [--json] FILE|- what a transfer would be; needs no daemon\n"
		"  doctor    [--json]        RDMA devices and what stands in their way; no daemon\n"
		"\n"
		"  --json           the daemon's answer as it is, with exact values\n"
		"  --socket PATH    of the daemon to ask\n"
		"  --instance NAME  the same as --socket " RUN_DIR "/NAME/sock\n"
		"  --help           also after a command\n"
		"\n"
		"Without --socket and --instance: $KVPACK_SOCKET if it is set, else all "
		"of\n" RUN_DIR "/sock and " RUN_DIR "/*/sock.\n"
		"\n"
		"Exit status: 0 fine; 1 something is wrong (kvpackctl COMMAND --help says what "
		"counts),\n"
		"also when only some daemons answer; 2 usage; 3 no daemon reachable; 4 refused.");
}

static void print_command_help(const struct ctl_command *command)
{
	(void)printf("Usage: kvpackctl %s%s%s\n\n%s %s.\n\n%s\n", command->name,
		     command->usage[0] ? " " : "", command->usage,
		     command->what ? "The daemon" : "Shows", command->brief, command->help);
}

/* ---- asking -------------------------------------------------------------------------------- */

static int explain_open(const char *path, int r)
{
	if (r == -ENOENT || r == -ECONNREFUSED)
		return fail(
			EXIT_NO_DAEMON,
			"no daemon listens on %s: is kvpackd running? (systemctl status kvpackd)",
			path);
	if (r == -EACCES || r == -EPERM)
		return fail(EXIT_REFUSED,
			    "may not connect to %s: are you in the group that owns it? (ls -l %s)",
			    path, path);
	if (r == -EREMOTEIO)
		return fail(EXIT_REFUSED, "%s refused: %s", path, kvp_last_error(NULL));
	if (r == -ENOTCONN)
		return fail(EXIT_NO_DAEMON,
			    "%s: is kvpackd stopped, or does it hang? (systemctl status kvpackd)",
			    kvp_last_error(NULL));
	return fail(EXIT_NO_DAEMON, "%s does not answer: %s", path,
		    kvp_last_error(NULL)[0] ? kvp_last_error(NULL) : strerror(-r));
}

static void client_closep(struct kvp_client **client)
{
	kvp_client_close(*client);
}

/* Drain and undrain change something first, then ask. */
static int act(const struct options *options, struct kvp_client *client)
{
	const char *name = options->command->name;

	if (strcmp(name, "drain") == 0)
		return kvp_drain(client, 1, options->reason);
	return strcmp(name, "undrain") == 0 ? kvp_drain(client, 0, NULL) : 0;
}

/* Sets *json to the daemon's answer, the caller's. An exit status. */
static int ask(const struct options *options, const char *path, char **json)
{
	KVP_CLEANUP(client_closep) struct kvp_client *client = NULL;
	struct kvp_client_options how = KVP_CLIENT_OPTIONS_INIT;
	int r;

	how.socket = path;
	how.name = "kvpackctl";
	how.timeout_ms = TIMEOUT_MS;
	how.no_reconnect = 1;
	how.observer = 1;
	r = kvp_client_open(&client, &how);
	if (r < 0)
		return explain_open(path, r);
	r = act(options, client);
	if (r == 0)
		r = kvp_inspect(client, options->command->what ?: options->command->name,
				options->arg, json);
	if (r == -EREMOTEIO || r == -EINVAL)
		return fail(EXIT_REFUSED, "%s refused: %s (%s)", path, kvp_last_error(client),
			    kvp_status_name(kvp_last_status(client)));
	if (r < 0)
		return fail(EXIT_NO_DAEMON, "%s does not answer: %s", path, kvp_last_error(client));
	return EXIT_OK;
}

static void answer_show(const struct options *options, struct outcome *outcome, const char *path,
			const cJSON *answer)
{
	if (options->json) {
		cJSON *item = cJSON_CreateObject();

		(void)cJSON_AddStringToObject(item, "socket", path);
		(void)cJSON_AddItemToObject(item, "answer", cJSON_Duplicate(answer, true));
		(void)cJSON_AddItemToArray(outcome->answers, item);
		return;
	}
	if (outcome->n_sockets > 1)
		(void)printf("%s== %s ==\n", outcome->n_answers > 1 ? "\n" : "", path);
	options->command->print(answer);
}

static void ask_and_show(const struct options *options, struct outcome *outcome, const char *path)
{
	KVP_CLEANUP(kvp_freep) char *json = NULL;
	cJSON *answer;
	int status = ask(options, path, &json);

	if (status != EXIT_OK) {
		outcome->status = KVP_MAX(outcome->status, status);
		return;
	}
	answer = cJSON_Parse(json);
	if (!answer) {
		status = fail(EXIT_WRONG, "%s answered with what is no JSON", path);
	} else {
		outcome->n_answers++;
		/* The daemon does not read them: a driver may take its time. */
		ctl_doctor_count(cJSON_GetObjectItemCaseSensitive(answer, "rails"));
		answer_show(options, outcome, path, answer);
		status = options->command->is_wrong(answer) ? EXIT_WRONG : EXIT_OK;
	}
	outcome->status = KVP_MAX(outcome->status, status);
	cJSON_Delete(answer);
}

/* One daemon's answer as it is, several in a list. */
static int print_json(const struct outcome *outcome)
{
	const cJSON *only = cJSON_GetArrayItem(outcome->answers, 0);
	KVP_CLEANUP(kvp_freep) char *text = NULL;

	if (outcome->n_answers == 0)
		return 0;
	text = cJSON_Print(outcome->n_sockets > 1
				   ? outcome->answers
				   : cJSON_GetObjectItemCaseSensitive(only, "answer"));
	return text && puts(text) >= 0 ? 0 : -1;
}

static int ask_all(const struct options *options, char **paths, size_t n)
{
	struct outcome outcome = { .n_sockets = (unsigned)n, .answers = cJSON_CreateArray() };

	for (size_t i = 0; i < n; i++)
		ask_and_show(options, &outcome, paths[i]);
	if (options->json && print_json(&outcome) < 0)
		outcome.status = EXIT_WRONG;
	cJSON_Delete(outcome.answers);
	if (outcome.n_answers > 0 && outcome.status == EXIT_NO_DAEMON)
		return EXIT_WRONG; /* some answered */
	return outcome.status;
}

static int ask_instances(const struct options *options)
{
	glob_t found = { 0 };
	int status;
	int flags = glob(RUN_DIR "/sock", 0, NULL, &found) == 0 ? GLOB_APPEND : 0;

	(void)glob(RUN_DIR "/*/sock", flags, NULL, &found); /* what it found is counted */
	if (found.gl_pathc == 0 && access(RUN_DIR, R_OK | X_OK) < 0 && errno == EACCES)
		status = fail(EXIT_REFUSED,
			      "may not look into " RUN_DIR ": are you in the group that owns it? "
			      "(ls -ld " RUN_DIR ")");
	else if (found.gl_pathc == 0)
		status = fail(EXIT_NO_DAEMON,
			      "no daemon listens on " RUN_DIR "/sock: is kvpackd running? "
			      "(systemctl status kvpackd)");
	else
		status = ask_all(options, found.gl_pathv, found.gl_pathc);
	globfree(&found);
	return status;
}

static int run(const struct options *options)
{
	const char *env = getenv("KVPACK_SOCKET");
	char path[SOCKET_PATH];
	char *one = path;

	if (options->socket)
		one = (char *)options->socket;
	else if (options->instance)
		(void)snprintf(path, sizeof(path), RUN_DIR "/%s/sock", options->instance);
	else if (env && env[0])
		one = (char *)env;
	else
		return ask_instances(options);
	return ask_all(options, &one, 1);
}

/* ---- arguments ----------------------------------------------------------------------------- */

/* "10m" in seconds; -1 when it is none. */
static long parse_time(const char *text)
{
	static const struct {
		const char *unit;
		long seconds;
	} units[] = { { "", 1 }, { "s", 1 }, { "m", 60 }, { "h", 3600 }, { "d", 86400 } };
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (end == text || errno || value < 0 || value > 1000000000)
		return -1;
	for (size_t i = 0; i < KVP_ARRAY_SIZE(units); i++) {
		if (strcmp(end, units[i].unit) == 0)
			return value * units[i].seconds;
	}
	return -1;
}

static int usage(const char *what, const char *value)
{
	return fail(EXIT_USAGE, "%s%s (kvpackctl --help)", what, value);
}

/* What the command's own options mean to the daemon. */
static int take_argument(struct options *options, const char *operand)
{
	const char *name = options->command->name;
	bool is_room = strcmp(name, "room") == 0;
	long since = options->since ? parse_time(options->since) : 0;

	if (options->since && strcmp(name, "failures") != 0)
		return usage("--since belongs to failures, not to ", name);
	if (options->label && !is_room)
		return usage("--label belongs to room, not to ", name);
	if (options->reason && strcmp(name, "drain") != 0)
		return usage("--reason belongs to drain, not to ", name);
	if (options->all && strcmp(name, "rooms") != 0)
		return usage("--all belongs to rooms, not to ", name);
	if (operand && !is_room)
		return usage("too many arguments: ", operand);
	if (is_room && !operand == !options->label)
		return usage("room needs ID or --label L", "");
	if (since < 0)
		return usage("--since takes a number with s, m, h or d, not ", options->since);
	if (options->since)
		(void)snprintf(options->arg, sizeof(options->arg), "%ld", since);
	else if (options->label)
		(void)snprintf(options->arg, sizeof(options->arg), "label:%s", options->label);
	else if (options->all || operand)
		(void)snprintf(options->arg, sizeof(options->arg), "%s",
			       options->all ? "all" : operand);
	return EXIT_OK;
}

static int check_instance(const char *name)
{
	const size_t max = SOCKET_PATH - sizeof(RUN_DIR "//sock");

	if (strchr(name, '/'))
		return usage("--instance is a name, not ", name);
	if (strlen(name) > max)
		return fail(EXIT_USAGE, "--instance %s: %zu bytes, at most %zu (kvpackctl --help)",
			    name, strlen(name), max);
	return EXIT_OK;
}

static int take_option(struct options *options, int opt)
{
	switch (opt) {
	case 'j':
		options->json = true;
		return EXIT_OK;
	case 's':
		options->socket = optarg;
		return EXIT_OK;
	case 'i':
		options->instance = optarg;
		return check_instance(optarg);
	case 'l':
		options->label = optarg;
		return EXIT_OK;
	case 't':
		options->since = optarg;
		return EXIT_OK;
	case 'r':
		options->reason = optarg;
		return EXIT_OK;
	case 'a':
		options->all = true;
		return EXIT_OK;
	case 'h':
		options->help = true;
		return EXIT_OK;
	default:
		return EXIT_USAGE; /* getopt has said what is wrong */
	}
}

static const struct option long_options[] = {
	{ "json", no_argument, NULL, 'j' },
	{ "socket", required_argument, NULL, 's' },
	{ "instance", required_argument, NULL, 'i' },
	{ "label", required_argument, NULL, 'l' },
	{ "since", required_argument, NULL, 't' },
	{ "all", no_argument, NULL, 'a' },
	{ "reason", required_argument, NULL, 'r' },
	{ "help", no_argument, NULL, 'h' },
	{ 0 },
};

/* Options may stand before and after the command; plan and doctor have their own. */
static int run_alone(int argc, char **argv, bool json)
{
	KVP_CLEANUP(kvp_freep) char **args = calloc((size_t)argc + 2, sizeof(*args));
	int n = 0;

	if (!args)
		return fail(EXIT_WRONG, "out of memory");
	args[n++] = argv[0];
	if (json)
		args[n++] = (char *)"--json";
	for (int i = 1; i < argc; i++)
		args[n++] = argv[i];
	optind = 0; /* starts over */
	return strcmp(argv[0], "plan") == 0 ? ctl_plan(n, args) : ctl_doctor(n, args);
}

static int take_options(struct options *options, int argc, char **argv, const char *shape)
{
	int opt, r = EXIT_OK;

	while (r == EXIT_OK && (opt = getopt_long(argc, argv, shape, long_options, NULL)) != -1)
		r = take_option(options, opt);
	return r;
}

static int main_run(int argc, char **argv)
{
	struct options options = { 0 };
	const char *operand = NULL;
	int r = take_options(&options, argc, argv, "+jh");

	if (r != EXIT_OK)
		return r;
	if (optind >= argc) {
		if (!options.help)
			return usage("which command?", "");
		print_help();
		return EXIT_OK;
	}
	if (strcmp(argv[optind], "plan") == 0 || strcmp(argv[optind], "doctor") == 0)
		return run_alone(argc - optind, argv + optind, options.json);
	options.command = ctl_command_find(argv[optind]);
	if (!options.command)
		return usage("unknown command ", argv[optind]);
	optind++;
	while (optind < argc && r == EXIT_OK) {
		r = take_options(&options, argc, argv, "+jh");
		if (r == EXIT_OK && optind < argc && operand)
			r = usage("too many arguments: ", argv[optind]);
		else if (r == EXIT_OK && optind < argc)
			operand = argv[optind++];
	}
	if (r == EXIT_OK && options.help) {
		print_command_help(options.command);
		return EXIT_OK;
	}
	if (r == EXIT_OK)
		r = take_argument(&options, operand);
	if (r != EXIT_OK)
		return r;
	if (strcmp(options.command->name, "version") == 0 && !options.json) {
		(void)printf("kvpackctl %s\n", KVP_VERSION);
		(void)fflush(stdout); /* before what is said about daemons */
		r = run(&options);
		return r == EXIT_NO_DAEMON ? EXIT_OK : r;
	}
	return run(&options);
}

/* An answer that lacks something for want of memory would be a wrong one. */
static void *json_malloc(size_t bytes)
{
	void *mem = malloc(bytes);

	if (!mem)
		exit(fail(EXIT_WRONG, "out of memory")); /* NOLINT(concurrency-mt-unsafe) */
	return mem;
}

int main(int argc, char **argv)
{
	cJSON_Hooks hooks = { json_malloc, free };
	int status;

	cJSON_InitHooks(&hooks);
	status = main_run(argc, argv);
	if (fflush(stdout) != 0 || ferror(stdout))
		return fail(EXIT_WRONG, "cannot write to standard output: %s", strerror(errno));
	return status;
}
