/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_net.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support_rig.h"

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

#define SCRIPT 2048u

static bool fail(char *why, size_t bytes, const char *what)
{
	snprintf(why, bytes, "%s: %s", what, strerror(errno));
	return false;
}

static bool file_write(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	size_t len = strlen(text);
	bool good = fd >= 0 && write(fd, text, len) == (ssize_t)len;
	int error = errno;

	if (fd >= 0)
		(void)close(fd);
	errno = error;
	return good;
}

/* A namespace of one's own in which one is root. */
static bool user_make(char *why, size_t why_bytes)
{
	unsigned int uid = geteuid(), gid = getegid();
	char map[64];

	if (unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS) < 0)
		return fail(why, why_bytes, "no namespaces for this user");
	if (!file_write("/proc/self/setgroups", "deny"))
		return fail(why, why_bytes, "setgroups");
	snprintf(map, sizeof(map), "0 %u 1", uid);
	if (!file_write("/proc/self/uid_map", map))
		return fail(why, why_bytes, "uid_map");
	snprintf(map, sizeof(map), "0 %u 1", gid);
	return file_write("/proc/self/gid_map", map) || fail(why, why_bytes, "gid_map");
}

static int own(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	RIG_REQUIRE(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static void enter(int net, int files)
{
	RIG_REQUIRE(setns(net, CLONE_NEWNET) == 0 && setns(files, CLONE_NEWNS) == 0, "%s",
		    strerror(errno));
}

void net_enter(const struct rig_net *net, uint32_t host)
{
	if (net->on)
		enter(net->hosts[host], net->views[host]);
}

void net_leave(const struct rig_net *net)
{
	if (net->on)
		enter(net->router, net->files);
}

void net_address(uint32_t host, char *buf, size_t bytes)
{
	snprintf(buf, bytes, "10.77.%u.2", host + 1);
}

/* Runs lines of ip(8) in a namespace. */
static bool ip(int ns, char *why, size_t why_bytes, const char *script)
{
	int in[2], status;
	pid_t pid;

	RIG_REQUIRE(pipe2(in, O_CLOEXEC) == 0, "%s", strerror(errno));
	fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0, "%s", strerror(errno));
	if (!pid) {
		if (setns(ns, CLONE_NEWNET) < 0 || dup2(in[0], 0) < 0)
			_exit(126);
		(void)setenv("PATH", "/usr/sbin:/sbin:/usr/bin:/bin", 1); /* own process */
		execlp("ip", "ip", "-batch", "-", (char *)NULL);
		_exit(127);
	}
	(void)close(in[0]);
	/* It fits the pipe; what ip does not read, its status tells. */
	(void)!write(in[1], script, strlen(script));
	(void)close(in[1]);
	RIG_REQUIRE(waitpid(pid, &status, 0) == pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return true;
	snprintf(why, why_bytes, "%s",
		 WIFEXITED(status) && WEXITSTATUS(status) == 127 ? "no ip(8): package iproute2"
								 : "ip(8) fails here");
	return false;
}

static bool host_make(const struct rig_net *net, uint32_t i, char *why, size_t why_bytes)
{
	char script[SCRIPT];

	snprintf(script, sizeof(script),
		 "link add name h%u type veth peer name eth0 netns /proc/%d/fd/%d\n"
		 "addr add 10.77.%u.1/24 dev h%u\n"
		 "link set h%u up\n",
		 i, (int)getpid(), net->hosts[i], i + 1, i, i);
	if (!ip(net->router, why, why_bytes, script))
		return false;
	snprintf(script, sizeof(script),
		 "link set lo up\n"
		 "addr add 10.77.%u.2/24 dev eth0\n"
		 "link set eth0 up\n"
		 "route add default via 10.77.%u.1\n",
		 i + 1, i + 1);
	return ip(net->hosts[i], why, why_bytes, script);
}

/* The kernel says some time later that an interface is up. */
static void await_running(const struct rig_net *net, uint32_t host)
{
	uint64_t until = rig_now_ns() + UINT64_C(10000000000);
	struct ifreq req = { .ifr_name = "eth0" };
	int fd;

	enter(net->hosts[host], net->views[host]);
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	RIG_REQUIRE(fd >= 0, "%s", strerror(errno));
	while (ioctl(fd, SIOCGIFFLAGS, &req) < 0 || !(req.ifr_flags & IFF_RUNNING)) {
		RIG_REQUIRE(rig_now_ns() < until, "eth0 of host %u does not run", host);
		rig_sleep_ms(2);
	}
	(void)close(fd);
	enter(net->router, net->files);
}

/* A network, and mounts that show it in /sys. */
static bool spaces_make(struct rig_net *net, uint32_t i, char *why, size_t why_bytes)
{
	if (unshare(CLONE_NEWNET | CLONE_NEWNS) < 0)
		return fail(why, why_bytes, "namespaces");
	net->hosts[i] = own("/proc/self/ns/net");
	net->views[i] = own("/proc/self/ns/mnt");
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("sysfs", "/sys", "sysfs", MS_RDONLY, NULL) < 0)
		return fail(why, why_bytes, "mount of /sys");
	return true;
}

bool net_make(struct rig_net *net, char *why, size_t why_bytes)
{
	bool good = true;
	uint32_t i;

	memset(net, 0, sizeof(*net));
	if (unshare(CLONE_NEWNET | CLONE_NEWNS) < 0 && !user_make(why, why_bytes))
		return false;
	net->router = own("/proc/self/ns/net");
	net->files = own("/proc/self/ns/mnt");
	for (i = 0; good && i < NET_HOSTS; i++)
		good = spaces_make(net, i, why, why_bytes);
	enter(net->router, net->files);
	if (!good)
		return false;
	if (!file_write("/proc/sys/net/ipv4/ip_forward", "1"))
		return fail(why, why_bytes, "/proc/sys/net/ipv4/ip_forward");
	for (i = 0; i < NET_HOSTS; i++)
		if (!host_make(net, i, why, why_bytes))
			return false;
	for (i = 0; i < NET_HOSTS; i++)
		await_running(net, i);
	net->on = true;
	return true;
}

/* A rule that leads nowhere: the router drops the packet and tells nobody. */
static void rule(const struct rig_net *net, uint32_t priority, const char *match, bool on)
{
	char script[256], why[128];

	snprintf(script, sizeof(script), "rule %s priority %u %s blackhole\n", on ? "add" : "del",
		 priority, match);
	RIG_REQUIRE(ip(net->router, why, sizeof(why), script), "%s", why);
}

void net_partition(const struct rig_net *net, uint32_t host, enum net_way way, bool on)
{
	char match[64];

	RIG_REQUIRE(net->on);
	if (way & NET_OUT) {
		snprintf(match, sizeof(match), "iif h%u", host);
		rule(net, 100 + 2 * host, match, on);
	}
	if (way & NET_IN) {
		snprintf(match, sizeof(match), "to 10.77.%u.0/24", host + 1);
		rule(net, 101 + 2 * host, match, on);
	}
}

/* ---- cutting connections -------------------------------------------------------------------- */

static bool tcp_names(int fd, struct sockaddr_in names[2])
{
	socklen_t bytes = sizeof(names[0]);
	int protocol = 0;
	socklen_t protocol_bytes = sizeof(protocol);

	if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &protocol_bytes) < 0 ||
	    protocol != IPPROTO_TCP || getsockname(fd, (struct sockaddr *)&names[0], &bytes) < 0)
		return false;
	bytes = sizeof(names[1]);
	names[1].sin_family = AF_UNSPEC;
	return getpeername(fd, (struct sockaddr *)&names[1], &bytes) == 0 &&
	       names[1].sin_family == AF_INET;
}

static bool is_meant(const struct sockaddr_in names[2], const char *address,
		     const uint16_t ports[2], enum net_which which)
{
	bool of_port = ntohs(names[0].sin_port) == ports[0] || ntohs(names[1].sin_port) == ports[1];
	char text[INET_ADDRSTRLEN] = "";

	(void)inet_ntop(AF_INET, &names[1].sin_addr, text, sizeof(text)); /* it fits */
	return !strcmp(text, address) && of_port == (which == NET_OF_PORT);
}

/* Connecting to nowhere is how TCP aborts a connection that somebody else still has open. */
static bool cut_one(int fd, const char *address, const uint16_t ports[2], enum net_which which)
{
	const struct sockaddr nowhere = { .sa_family = AF_UNSPEC };
	struct sockaddr_in names[2];

	if (!tcp_names(fd, names) || !is_meant(names, address, ports, which))
		return false;
	RIG_REQUIRE(connect(fd, &nowhere, sizeof(nowhere)) == 0, "%s", strerror(errno));
	return true;
}

uint32_t net_cut(pid_t pid, const char *address, const uint16_t ports[2], enum net_which which)
{
	int pidfd = (int)syscall(SYS_pidfd_open, pid, 0), fd;
	const struct dirent *entry;
	uint32_t n = 0;
	char path[64];
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	RIG_REQUIRE(pidfd >= 0 && dir, "%s", strerror(errno));
	while ((entry = readdir(dir)) != NULL) { /* NOLINT(concurrency-mt-unsafe): own dir */
		fd = (int)syscall(SYS_pidfd_getfd, pidfd, strtol(entry->d_name, NULL, 10), 0);
		if (fd < 0)
			continue; /* . and .., or closed meanwhile */
		n += cut_one(fd, address, ports, which);
		(void)close(fd);
	}
	(void)closedir(dir);
	(void)close(pidfd);
	return n;
}
