/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The configuration file: one table of keys drives parsing, refusals, defaults and the listing.
 *
 * All durations are nanoseconds and all sizes bytes, whatever unit the file used. Once loaded, the
 * struct never changes; any thread may read it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "daemon/log.h"

#define KVP_CONFIG_STR_MAX 108u /* a socket's path has no more room either */
#define KVP_CONFIG_LIST_MAX 1024u
#define KVP_CONFIG_POLICIES_MAX 64u
#define KVP_CONFIG_GPUS_MAX 16u

enum kvp_trust {
	KVP_TRUST_LOOPBACK, /* loopback only */
	KVP_TRUST_TRUSTED,  /* the operator vouches for everything that can reach the port */
};

enum kvp_transport {
	KVP_TRANSPORT_UCX,
	KVP_TRANSPORT_VERBS,
	KVP_TRANSPORT_AUTO, /* verbs if there is a usable device, else ucx */
};

/* How bytes get into a destination pool over RDMA. */
enum kvp_data_mode {
	KVP_DATA_AUTO,    /* directly where it is possible and worth it, else by landing */
	KVP_DATA_DIRECT,  /* directly, or the room fails */
	KVP_DATA_LANDING, /* by landing */
};

/* Sums of what is moved, compared at the destination. */
enum kvp_checksum {
	KVP_CHECKSUM_OFF, /* if a peer wants them */
	KVP_CHECKSUM_ON,  /* where both ends can */
	KVP_CHECKSUM_REQUIRED,
};

/* Where the rings of a GPU's lane lie. */
enum kvp_ring_memory {
	KVP_RINGS_AUTO,   /* on the device where the transport takes that, else in the host's */
	KVP_RINGS_DEVICE, /* there, or the lane is refused */
	KVP_RINGS_HOST,   /* pinned memory of the host */
};

/* When the device is told to look at what a NIC has written. */
enum kvp_flush {
	KVP_FLUSH_AUTO, /* where it does not see that by itself */
	KVP_FLUSH_ALWAYS,
};

/* May a GPU write into the memory of another? */
enum kvp_peer_access {
	KVP_PEER_AUTO, /* where it can */
	KVP_PEER_OFF,
};

enum kvp_ucx_network {
	KVP_UCX_TCP,
	KVP_UCX_RDMA, /* the devices of verbs.device, by reliable connections */
};

enum kvp_connect {
	KVP_CONNECT_CONTROL, /* by what travels on the control sessions */
	KVP_CONNECT_RDMA_CM,
};

enum kvp_rail_policy {
	KVP_RAIL_ANY,
	KVP_RAIL_SAME, /* rails of the same number only, as in a rail-optimized fabric */
};

enum kvp_allow {
	KVP_ALLOW_LISTED, /* the daemon's own user, root, and what has a [uid.N] or [gid.N] section
			   */
	KVP_ALLOW_ALL,    /* whoever can open the socket */
};

/* One of peer.allow. */
struct kvp_network {
	uint8_t addr[16];
	uint8_t bits; /* of it, from the left */
	bool v6;
};

/* What one user may do: a [uid.N] or [gid.N] section, or the defaults. */
struct kvp_policy {
	bool is_gid;
	bool admin; /* may list what belongs to others */
	uint32_t id;
	uint32_t max_sessions;
	uint32_t max_rooms; /* at the same time, all sessions of the user together */
	uint32_t max_pools;
};

/* A [gpu.X] section. */
struct kvp_gpu_nics {
	char gpu[64]; /* UUID, or number of the lane */
	char nics[256];
};

struct kvp_config {
	struct {
		char name[KVP_CONFIG_STR_MAX];      /* "" in the file: the host's name */
		char advertise[KVP_CONFIG_STR_MAX]; /* "": from peer.listen */
	} node;
	struct {
		uint32_t level; /* enum kvp_log_level */
	} log;
	struct {
		char socket[KVP_CONFIG_STR_MAX];
		uint32_t mode;                  /* permission bits */
		char group[KVP_CONFIG_STR_MAX]; /* "": left alone */
		uint64_t stall_ns;
		uint32_t max_sessions, max_process_sessions;
	} client;
	struct {
		char listen[KVP_CONFIG_STR_MAX]; /* "": no peers */
		uint32_t plaintext;              /* enum kvp_trust */
		char allow[KVP_CONFIG_LIST_MAX]; /* CIDRs, separated by commas */
		uint64_t heartbeat_ns;
		uint64_t lost_after_ns;
		uint64_t retry_min_ns;
		uint64_t retry_max_ns;
		uint64_t idle_ns; /* 0: never */
		uint32_t max_sessions, max_host_sessions;
	} peer;
	struct {
		char interface[KVP_CONFIG_STR_MAX];
		uint16_t port_lo; /* 0 and 0: any */
		uint16_t port_hi;
		uint32_t tcp_network; /* enum kvp_trust */
		uint32_t network;     /* enum kvp_ucx_network */
	} ucx;
	struct {
		uint32_t transport; /* enum kvp_transport */
		uint32_t mode;      /* enum kvp_data_mode */
		uint64_t direct_run_bytes;
		uint32_t checksum; /* enum kvp_checksum */
	} data;
	struct {
		char device[KVP_CONFIG_LIST_MAX];   /* separated by commas; "": a choice */
		char gid_index[KVP_CONFIG_STR_MAX]; /* a number, or "auto" */
		uint32_t port;                      /* 0: the first that is active */
		uint32_t mtu;                       /* 0: the port's */
		uint32_t depth;
		uint64_t inline_bytes;
		uint32_t timeout, retry_count,
			rnr_timer; /* codes of the InfiniBand specification */
		uint32_t service_level, traffic_class, pkey_index;
		uint64_t keepalive_ns;
		uint64_t idle_ns; /* 0: never */
		uint32_t connect; /* enum kvp_connect */
	} verbs;
	struct {
		char exclude[KVP_CONFIG_LIST_MAX]; /* devices, separated by commas */
		uint32_t rails;
		uint32_t rail_policy; /* enum kvp_rail_policy */
	} nics;
	struct {
		uint64_t spin_ns; /* `auto` is resolved when loaded */
		bool spin_yields; /* few cores: no key, found when loaded */
		uint64_t stuck_after_ns;
		bool pack;
	} lane;
	struct {
		uint32_t slots; /* of the pack ring, and as many of the landing ring */
		uint64_t slot_bytes;
	} host;
	struct {
		char devices[KVP_CONFIG_LIST_MAX]; /* "none", "all" or UUIDs, separated by commas */
		uint32_t slots;
		uint64_t slot_bytes;
		uint32_t flush; /* enum kvp_flush */
		uint32_t peer;  /* enum kvp_peer_access */
	} gpu;
	struct {
		uint32_t memory; /* enum kvp_ring_memory */
	} pack;
	struct {
		uint32_t max_rooms;
		uint32_t max_pools;
		uint32_t max_entries;       /* of one pool */
		uint32_t max_room_pages;    /* of one list */
		uint32_t max_parked_offers; /* offers without an open */
		uint32_t max_parked_chunks; /* of one open */
		uint32_t max_lists;         /* of one session */
		uint32_t max_wants;         /* of one peer session */
		uint32_t history;           /* ended rooms that are remembered */
	} limits;
	struct {
		uint64_t offer_ns;
		uint64_t open_ns;
		uint64_t progress_ns;
		uint64_t fence_ns;
		uint64_t drain_ns;
		uint64_t lease_ns;
	} timers;
	struct {
		uint64_t drain_ns;
	} stop;
	struct {
		uint32_t allow; /* enum kvp_allow */
	} policy;
	uint32_t n_policies;
	struct kvp_policy policies[KVP_CONFIG_POLICIES_MAX];
	uint32_t n_gpu_nics;
	struct kvp_gpu_nics gpu_nics[KVP_CONFIG_GPUS_MAX];
	char rail_of[KVP_CONFIG_LIST_MAX]; /* "mlx5_0=0,mlx5_1=1" */
};

enum kvp_config_type {
	KVP_CONFIG_STR,
	KVP_CONFIG_LIST, /* a string; repeated keys append */
	KVP_CONFIG_COUNT,
	KVP_CONFIG_BYTES,
	KVP_CONFIG_DURATION,
	KVP_CONFIG_SPIN, /* a duration or `auto` */
	KVP_CONFIG_MODE, /* octal */
	KVP_CONFIG_BOOL,
	KVP_CONFIG_CHOICE,
};

struct kvp_config_choice {
	const char *name;
	uint32_t value;
};

struct kvp_config_key {
	const char *section, *key;
	enum kvp_config_type type;
	uint32_t offset, size; /* of the field in struct kvp_config */
	uint64_t min, max;     /* inclusive; of strings: length in bytes */
	const char *def;       /* as in the file */
	const struct kvp_config_choice
		*choices; /* ended by a NULL name; of KVP_CONFIG_CHOICE only */
	const char *help;
};

/* All keys outside [uid.N], [gid.N], [gpu.X] and [rail_of], section by section. */
const struct kvp_config_key *kvp_config_keys(size_t *n_keys);

/* Sets all defaults, with `lane.spin` and `node.name` resolved for this machine. */
void kvp_config_defaults(struct kvp_config *config);

/*
 * Loads a file over the defaults and checks the whole; `path` NULL: the defaults alone.
 * On failure `err` gets one line that names file, line, key, value and what is allowed, and
 * `config` is not to be used.
 * Returns 0; -EINVAL bad content; other negative errno: the file cannot be read.
 */
int kvp_config_load(struct kvp_config *config, const char *path, char *err, size_t err_bytes);

/* The same from an open stream; `name` stands for it in messages. */
int kvp_config_read(struct kvp_config *config, FILE *file, const char *name, char *err,
		    size_t err_bytes);

/*
 * What a client with that user and primary group may do: its [uid.N] section, else its [gid.N]
 * section, else (own user, root, or policy.allow = all) the limits of [limits].
 * Returns 0; -EACCES: not admitted, `policy` untouched.
 */
int kvp_config_policy(const struct kvp_config *config, uint32_t uid, uint32_t gid,
		      struct kvp_policy *policy);

/* "10.0.0.0/8", "::1"; 0, or -EINVAL. */
int kvp_config_network(const char *text, struct kvp_network *net);

/* The devices of a GPU, by its UUID or its place among the GPU lanes: those of its [gpu.X], else
 * those of verbs.device. */
const char *kvp_config_gpu_nics(const struct kvp_config *config, const char *uuid, uint32_t idx);

/* Writes every key with its value now in force, in the syntax of the file. */
void kvp_config_print(const struct kvp_config *config, FILE *out);
