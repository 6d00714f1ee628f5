/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Hosts as network namespaces around a router: each host has one interface, eth0, with an address
 * of its own subnet. What the router drops without a word is a partition, of one host and either
 * way. Only rights to make namespaces are needed: those of root, or of a user in a namespace of his
 * own.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define NET_HOSTS 3u

struct rig_net {
	bool on; /* false: everything is on this host's loopback */
	int router, hosts[NET_HOSTS];
	int files, views[NET_HOSTS]; /* mounts: UCX looks for interfaces in /sys */
};

/* Moves the process into the router's namespace and makes the hosts; false and the reason when
 * that is not possible here. */
bool net_make(struct rig_net *net, char *why, size_t why_bytes);
/* Processes started between the two live on the host. */
void net_enter(const struct rig_net *net, uint32_t host);
void net_leave(const struct rig_net *net);
/* "10.77.1.2" */
void net_address(uint32_t host, char *buf, size_t bytes);

enum net_way { NET_OUT = 1, NET_IN = 2, NET_BOTH = 3 };
/* Drops what comes from the host, goes to it, or both; or stops dropping. */
void net_partition(const struct rig_net *net, uint32_t host, enum net_way way, bool on);

/* Which of a daemon's connections with another host: those of a port of either end, or all but
 * them. */
enum net_which { NET_OF_PORT, NET_BUT_PORT };
/* Resets connections of the process as its own kernel would (RST to the other end); returns how
 * many. Ports: where this daemon and the other accept. */
uint32_t net_cut(pid_t pid, const char *address, const uint16_t ports[2], enum net_which which);
