/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ctl_doctor.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "client/ctl_table.h"
#include "proto/util.h"

#define GIDS_MAX 256u

/* What the drivers call a packet that was sent again, or that came in vain. */
static const char *const resend_names[] = {
	"completer_retry_err", "local_ack_timeout_err", "packet_seq_err",
	"rnr_nak_retry_err",   "rcvd_rnr_err",          "roce_slow_restart",
	"to_retransmits",      "rx_roce_retransmit",    "RetransSegs",
};
static const char *const error_names[] = {
	"req_cqe_error",
	"resp_cqe_error",
	"rcvd_seq_err",
	"retry_exceeded_err",
	"retry_rnr_exceeded_err",
	"link_downed",
	"req_remote_access_errors",
	"resp_remote_access_errors",
	"send_err",
	"rdma_recv_err",
	"max_retry_exceeded",
};

struct doctor {
	const char *root; /* of sysfs */
	const char *proc;
	cJSON *ports;    /* owned by the answer */
	cJSON *findings; /* owned by the answer */
};

static void find(struct doctor *doctor, const char *fmt, ...) KVP_PRINTF(2, 3);
static void find(struct doctor *doctor, const char *fmt, ...)
{
	char text[256];
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, args); /* cut at worst */
	va_end(args);
	(void)cJSON_AddItemToArray(doctor->findings, cJSON_CreateString(text));
}

/* What is not there, any more, or not for us says nothing; what cannot be looked at is said. */
static void missed(const char *path)
{
	if (errno != ENOENT && errno != ENOTDIR && errno != ESRCH && errno != EACCES)
		(void)fprintf(stderr, "kvpackctl: cannot look at %s: %m\n", path);
}

static FILE *look_into(const char *path)
{
	FILE *file = fopen(path, "re");

	if (!file)
		missed(path);
	return file;
}

/* The first line of a file below the root; "" when there is none. */
static const char *line_of(const struct doctor *doctor, char *buf, size_t bytes, const char *path)
{
	char full[PATH_MAX];
	FILE *file;

	buf[0] = '\0';
	if (snprintf(full, sizeof(full), "%s/%s", doctor->root, path) >= (int)sizeof(full))
		return buf;
	file = look_into(full);
	if (!file)
		return buf;
	if (fgets(buf, (int)bytes, file))
		buf[strcspn(buf, "\n")] = '\0';
	(void)fclose(file); /* was only read */
	return buf;
}

/* Sums counters that this driver has. */
static double sum_counters(const struct doctor *doctor, const char *port, const char *const *names,
			   size_t n)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++) {
		char path[512], text[64];

		(void)snprintf(path, sizeof(path), "%s/hw_counters/%s", port, names[i]);
		sum += strtod(line_of(doctor, text, sizeof(text), path), NULL); /* "" is 0 */
	}
	return sum;
}

/* "0000:0000:0000:0000:0000:ffff:0a09:0001" as people write it; 2 IPv4, 1 IPv6, 0 unusable. */
static int gid_rank(const char *gid, char *text, size_t bytes)
{
	struct in6_addr addr;

	if (inet_pton(AF_INET6, gid, &addr) != 1 || IN6_IS_ADDR_UNSPECIFIED(&addr) ||
	    IN6_IS_ADDR_LINKLOCAL(&addr))
		return 0;
	if (IN6_IS_ADDR_V4MAPPED(&addr))
		return inet_ntop(AF_INET, addr.s6_addr + 12, text, (socklen_t)bytes) ? 2 : 0;
	return inet_ntop(AF_INET6, &addr, text, (socklen_t)bytes) ? 1 : 0;
}

static void add_gid(const struct doctor *doctor, cJSON *row, const char *port)
{
	int best = 0;

	for (unsigned i = 0; i < GIDS_MAX; i++) {
		char path[512], gid[64], type[32], netdev[64], text[64];
		int rank;

		(void)snprintf(path, sizeof(path), "%s/gids/%u", port, i);
		if (!line_of(doctor, gid, sizeof(gid), path)[0])
			break;
		(void)snprintf(path, sizeof(path), "%s/gid_attrs/types/%u", port, i);
		(void)line_of(doctor, type, sizeof(type), path);
		rank = strcmp(type, "RoCE v2") == 0 ? gid_rank(gid, text, sizeof(text)) : 0;
		if (rank <= best)
			continue;
		best = rank;
		(void)snprintf(path, sizeof(path), "%s/gid_attrs/ndevs/%u", port, i);
		cJSON_DeleteItemFromObject(row, "gid_index");
		cJSON_DeleteItemFromObject(row, "address");
		cJSON_DeleteItemFromObject(row, "netdev");
		(void)cJSON_AddNumberToObject(row, "gid_index", i);
		(void)cJSON_AddStringToObject(row, "address", text);
		(void)cJSON_AddStringToObject(row, "netdev",
					      line_of(doctor, netdev, sizeof(netdev), path));
	}
}

static void judge(struct doctor *doctor, const cJSON *row)
{
	const char *device = ctl_text(row, "device");
	int port = (int)ctl_number(row, "port");

	if (strcmp(ctl_text(row, "state"), "ACTIVE") != 0)
		find(doctor, "%s port %d is %s: check cable, switch and `ip link`", device, port,
		     ctl_text(row, "state"));
	else if (strcmp(ctl_text(row, "link"), "Ethernet") == 0 && !ctl_member(row, "address"))
		find(doctor,
		     "%s port %d has no RoCE v2 address besides link-local ones: give its "
		     "network device an IP address",
		     device, port);
}

/* What the hardware has counted since it was started. */
static void add_counters(const struct doctor *doctor, cJSON *row, const char *port,
			 const char *prefix)
{
	char name[32];

	(void)snprintf(name, sizeof(name), "%sresends", prefix);
	(void)cJSON_AddNumberToObject(
		row, name, sum_counters(doctor, port, resend_names, KVP_ARRAY_SIZE(resend_names)));
	(void)snprintf(name, sizeof(name), "%serrors", prefix);
	(void)cJSON_AddNumberToObject(
		row, name, sum_counters(doctor, port, error_names, KVP_ARRAY_SIZE(error_names)));
}

static void add_port(struct doctor *doctor, const char *device, const char *number)
{
	cJSON *row = cJSON_CreateObject();
	char port[300], path[512], text[128];
	const char *state;

	(void)snprintf(port, sizeof(port), "class/infiniband/%.128s/ports/%.16s", device, number);
	(void)cJSON_AddStringToObject(row, "device", device);
	(void)cJSON_AddNumberToObject(row, "port", strtod(number, NULL)); /* a directory of sysfs */
	(void)snprintf(path, sizeof(path), "%s/state", port);
	state = line_of(doctor, text, sizeof(text), path);
	state += strcspn(state, ":") + (strchr(state, ':') ? 2 : 0); /* "4: ACTIVE" */
	(void)cJSON_AddStringToObject(row, "state", *state ? state : "unknown");
	(void)snprintf(path, sizeof(path), "%s/link_layer", port);
	(void)cJSON_AddStringToObject(row, "link", line_of(doctor, text, sizeof(text), path));
	(void)snprintf(path, sizeof(path), "%s/rate", port);
	(void)cJSON_AddStringToObject(row, "rate", line_of(doctor, text, sizeof(text), path));
	add_gid(doctor, row, port);
	(void)snprintf(path, sizeof(path), "class/net/%.64s/mtu", ctl_text(row, "netdev"));
	(void)cJSON_AddStringToObject(row, "mtu", line_of(doctor, text, sizeof(text), path));
	(void)snprintf(path, sizeof(path), "class/infiniband/%.128s/device/numa_node", device);
	(void)cJSON_AddStringToObject(row, "numa", line_of(doctor, text, sizeof(text), path));
	add_counters(doctor, row, port, "");
	(void)cJSON_AddItemToArray(doctor->ports, row);
	judge(doctor, row);
}

static int no_dots(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

/* Names in a directory of sysfs, sorted; the caller frees each and the list. */
static int names_in(const struct doctor *doctor, const char *path, struct dirent ***names)
{
	char full[PATH_MAX];
	int n;

	*names = NULL;
	if (snprintf(full, sizeof(full), "%s/%s", doctor->root, path) >= (int)sizeof(full))
		return 0;
	n = scandir(full, names, no_dots, alphasort);
	if (n < 0)
		missed(full);
	return n > 0 ? n : 0;
}

static void add_device(struct doctor *doctor, const char *device)
{
	struct dirent **ports;
	char path[300];
	int n;

	(void)snprintf(path, sizeof(path), "class/infiniband/%.128s/ports", device);
	n = names_in(doctor, path, &ports);
	for (int i = 0; i < n; i++) {
		add_port(doctor, device, ports[i]->d_name);
		free(ports[i]);
	}
	free(ports);
}

static void add_memlock(struct doctor *doctor, cJSON *answer)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_MEMLOCK, &limit) < 0) {
		(void)fprintf(stderr, "kvpackctl: getrlimit: %m\n");
		return;
	}
	if (limit.rlim_cur == RLIM_INFINITY) {
		(void)cJSON_AddStringToObject(answer, "memlock", "unlimited");
		return;
	}
	(void)cJSON_AddNumberToObject(answer, "memlock", (double)limit.rlim_cur);
	if (cJSON_GetArraySize(doctor->ports) > 0)
		find(doctor,
		     "this shell may lock %llu KiB, and so may a daemon that it starts: its rings "
		     "need more, ulimit -l",
		     (unsigned long long)limit.rlim_cur / 1024);
}

/* What a file of a process says behind some words; "" when it does not. */
static void process_says(const struct doctor *doctor, const char *pid, const char *name,
			 const char *words, char *out, size_t bytes)
{
	char path[PATH_MAX], line[256];
	FILE *file;

	out[0] = '\0';
	(void)snprintf(path, sizeof(path), "%s/%.32s/%s", doctor->proc, pid, name); /* or none */
	file = look_into(path);
	if (!file)
		return;
	while (!out[0] && fgets(line, sizeof(line), file)) {
		if (strncmp(line, words, strlen(words)) == 0)
			(void)snprintf(out, bytes, "%.*s", (int)bytes - 1, line + strlen(words));
	}
	(void)fclose(file); /* was only read */
	out[strcspn(out, "\n")] = '\0';
}

static int numbers(const struct dirent *entry)
{
	return entry->d_name[0] >= '1' && entry->d_name[0] <= '9';
}

static void add_daemon(struct doctor *doctor, cJSON *daemons, const char *pid)
{
	char name[32], limit[64];
	cJSON *row;

	process_says(doctor, pid, "comm", "", name, sizeof(name));
	process_says(doctor, pid, "limits", "Max locked memory", limit, sizeof(limit));
	if (strcmp(name, "kvpackd") != 0 || !limit[0])
		return;
	row = cJSON_CreateObject();
	(void)cJSON_AddNumberToObject(row, "pid", strtod(pid, NULL));
	(void)cJSON_AddItemToArray(daemons, row);
	if (limit[strspn(limit, " ")] == 'u') { /* the limit in force comes before the hard one */
		(void)cJSON_AddStringToObject(row, "memlock", "unlimited");
		return;
	}
	(void)cJSON_AddNumberToObject(row, "memlock", strtod(limit, NULL));
	if (cJSON_GetArraySize(doctor->ports) > 0)
		find(doctor,
		     "kvpackd, process %s, may lock %.0f KiB: put LimitMEMLOCK=infinity below "
		     "[Service] in its unit",
		     pid, strtod(limit, NULL) / 1024);
}

/* The limit that counts is the daemon's own. */
static void add_daemons(struct doctor *doctor, cJSON *answer)
{
	cJSON *daemons = cJSON_AddArrayToObject(answer, "daemons");
	struct dirent **pids;
	int n = scandir(doctor->proc, &pids, numbers, alphasort);

	if (n < 0)
		missed(doctor->proc);
	for (int i = 0; i < n; i++) {
		add_daemon(doctor, daemons, pids[i]->d_name);
		free(pids[i]);
	}
	if (n >= 0)
		free(pids);
}

static cJSON *examine(struct doctor *doctor)
{
	cJSON *answer = cJSON_CreateObject();
	struct dirent **devices;
	int n = names_in(doctor, "class/infiniband", &devices);

	doctor->ports = cJSON_AddArrayToObject(answer, "ports");
	doctor->findings = cJSON_AddArrayToObject(answer, "findings");
	for (int i = 0; i < n; i++) {
		add_device(doctor, devices[i]->d_name);
		free(devices[i]);
	}
	free(devices);
	if (n == 0)
		find(doctor, "no RDMA device: data.transport = verbs cannot start, auto means ucx");
	add_memlock(doctor, answer);
	add_daemons(doctor, answer);
	return answer;
}

static void print_memlock(const char *who, const cJSON *limit)
{
	if (cJSON_IsNumber(limit))
		(void)printf("%s may lock %.0f KiB\n", who, limit->valuedouble / 1024);
	else if (limit)
		(void)printf("%s may lock as much as it wants\n", who);
}

static void print_words(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "DEVICE", "device", CTL_TEXT },
		{ "PORT", "port", CTL_COUNT },
		{ "STATE", "state", CTL_TEXT },
		{ "LINK", "link", CTL_TEXT },
		{ "RATE", "rate", CTL_TEXT },
		{ "GID", "gid_index", CTL_COUNT },
		{ "ADDRESS", "address", CTL_TEXT },
		{ "NETDEV", "netdev", CTL_TEXT },
		{ "MTU", "mtu", CTL_TEXT },
		{ "NUMA", "numa", CTL_TEXT },
		{ "CARD RESENDS", "resends", CTL_COUNT },
		{ "CARD ERRORS", "errors", CTL_COUNT },
	};
	const cJSON *finding, *daemon;

	ctl_table_print(columns, KVP_ARRAY_SIZE(columns), ctl_member(answer, "ports"),
			"no RDMA ports");
	(void)printf("\n");
	print_memlock("this shell", ctl_member(answer, "memlock"));
	cJSON_ArrayForEach (daemon, ctl_member(answer, "daemons")) {
		char who[48];

		(void)snprintf(who, sizeof(who), "kvpackd, process %.0f,",
			       ctl_number(daemon, "pid")); /* fits */
		print_memlock(who, ctl_member(daemon, "memlock"));
	}
	cJSON_ArrayForEach (finding, ctl_member(answer, "findings"))
		(void)printf("- %s\n", cJSON_GetStringValue(finding));
	if (cJSON_GetArraySize(ctl_member(answer, "findings")) == 0)
		(void)printf("nothing stands in the way of RDMA\n");
}

static struct doctor doctor_of_here(void)
{
	const char *root = getenv("KVP_SYSFS"); /* NOLINT(concurrency-mt-unsafe): one thread */
	const char *proc = getenv("KVP_PROC");  /* NOLINT(concurrency-mt-unsafe): one thread */

	return (struct doctor){ .root = root ? root : "/sys", .proc = proc ? proc : "/proc" };
}

void ctl_doctor_count(cJSON *rails)
{
	const struct doctor doctor = doctor_of_here();
	cJSON *rail;

	cJSON_ArrayForEach (rail, rails) {
		char port[300];

		(void)snprintf(port, sizeof(port), "class/infiniband/%.128s/ports/%.0f",
			       ctl_text(rail, "device"), ctl_number(rail, "port"));
		add_counters(&doctor, rail, port, "hw_");
	}
}

int ctl_doctor(int argc, char **argv)
{
	struct doctor doctor = doctor_of_here();
	bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
	cJSON *answer;
	bool wrong;

	if (argc == 2 && strcmp(argv[1], "--help") == 0) {
		(void)puts("usage: kvpackctl doctor [--json]\n\n"
			   "Lists RDMA ports, what daemons here may lock, and what stands in the "
			   "way of RDMA.\nExits with 1 when anything does: also when there is no "
			   "RDMA device, which is no\nfault where data.transport is ucx over tcp.");
		return 0;
	}
	if (argc > 1 + json) {
		(void)fprintf(stderr, "kvpackctl: doctor takes --json alone, not %s\n",
			      argv[1 + json]);
		return 2;
	}
	answer = examine(&doctor);
	wrong = cJSON_GetArraySize(doctor.findings) > 0;
	if (json) {
		char *text = cJSON_Print(answer);

		(void)printf("%s\n", text ? text : "");
		free(text);
	} else {
		print_words(answer);
	}
	cJSON_Delete(answer);
	return wrong;
}
