/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Choice of RDMA devices, their ports and GIDs: by configuration, or the usable ones that are
 * nearest to a PCI device. Usable is a port that is active and, on Ethernet, has a RoCE v2 GID that
 * is not link-local. One that is not may become it.
 */

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_NIC_NAME_MAX 64u
#define KVP_NIC_MAX 16u

struct kvp_nic_wish {
	const char *devices; /* names separated by commas, or "" for a choice */
	const char *exclude; /* names separated by commas, or "" */
	const char *near;    /* PCI address such as "0000:3b:00.0" to be near to, or "" */
	const char *rail_of; /* numbers of rails: "mlx5_0=0,mlx5_1=1", or "" */
	uint8_t port;        /* 0: the first that is usable */
	int gid_index;       /* -1: a choice */
};

struct kvp_nic {
	char device[KVP_NIC_NAME_MAX];
	uint8_t port;
	uint8_t number; /* of the rail */
	int gid_index;
	union ibv_gid gid;
	uint16_t lid; /* InfiniBand; 0 on Ethernet */
	bool ethernet;
	enum ibv_mtu mtu; /* active */
	uint32_t max_msg_bytes;
	unsigned distance; /* PCI hops to `near`, UINT_MAX: unknown */
	bool down;         /* not usable now: `gid` is zero, `lid` and `mtu` mean nothing */
};

/* Opens the device of one that was found; the caller closes the context. 0, or -ENODEV and `err`
 * has a text. */
int kvp_nic_open(const struct kvp_nic *nic, struct ibv_context **out, char *err, size_t err_bytes);

/*
 * All usable ones, at most KVP_NIC_MAX: in the order of `devices`, without it the nearest first.
 * Returns how many; `err` says in words what is wrong with the others, and with none that there is
 * none.
 */
int kvp_nic_list(struct kvp_nic *nics, const struct kvp_nic_wish *wish, char *err,
		 size_t err_bytes);

/*
 * Those that one lane uses as rails, with their numbers and in that order, at most `most`: all that
 * are named; else all that are equally near to the GPU; else one. Unequal kinds of links do not
 * mix. Where there is a usable one, those that are not yet are rails, too, if there is room for
 * them. `nics` has KVP_NIC_MAX elements; returns how many, and 0 with `err` as above.
 */
int kvp_nic_rails(struct kvp_nic *nics, uint32_t most, const struct kvp_nic_wish *wish, char *err,
		  size_t err_bytes);

/* Looks at the port again: 0 and all that may have changed, or a negative errno and the port is as
 * it was before, but down. `gid_index` as in a wish. */
int kvp_nic_look(struct kvp_nic *nic, struct ibv_context *context, int gid_index, char *err,
		 size_t err_bytes);

/* PCI hops between two paths below /sys/devices: what one must climb and descend. */
unsigned kvp_nic_distance(const char *a, const char *b);

/* A GID that packets can be sent from: 2 best (IPv4), 1 good, 0 unusable. */
int kvp_nic_gid_rank(const struct ibv_gid_entry *entry);

/* "10.0.0.1" or "fd00::1". */
const char *kvp_nic_gid_text(const union ibv_gid *gid, char *buf, size_t bytes);

/* Bytes that this process may register, UINT64_MAX without a limit (as with CAP_IPC_LOCK). */
uint64_t kvp_nic_memlock(void);
/* Says that so many bytes could not be registered for that limit, and what to do. */
void kvp_nic_memlock_text(const char *what, uint64_t bytes, char *err, size_t err_bytes);
/* Logs the limit where there is one: everything that is registered counts. */
void kvp_nic_memlock_warn(void);
