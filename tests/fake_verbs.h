/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Devices that exist in this process only: the functions of libibverbs that the daemon calls,
 * defined here, so that a program that links this file reaches no card and no kernel. Queue pairs
 * reach each other by number, also from one device to another. Work requests run when they are
 * posted, or, while `hold` is on, one by one when the test says so. The functions of the library
 * may be called by several threads; those for tests, and the fields of kvp_fake, are for when none
 * runs, unless they say otherwise.
 */

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#define KVP_FAKE_DEVICES 4u

struct kvp_fake {
	bool hold;         /* requests wait for kvp_fake_step(); see kvp_fake_hold_writes() */
	bool no_windows;   /* the devices have no memory windows */
	bool fail_binding; /* binding one fails */
	/* The send request with that number (from 1, counted over all queue pairs since reset) ends
	 * with `fail_status`; 0: none. */
	uint64_t fail_at;
	enum ibv_wc_status fail_status;
	bool fail_late;   /* it has had its effect, only the sender does not know */
	bool fail_writes; /* so do all writes with an immediate */
	/* Posting the request with that number is refused with `refuse_errno`, after those before
	 * it in the same list were taken; 0: none. */
	uint64_t refuse_at;
	int refuse_errno;
	bool refuse_modify;           /* ibv_modify_qp() fails */
	int refuse_mr, refuse_dmabuf; /* registering is refused with that errno; 0: it is not */
	bool same_keys;               /* a number that is free is given again at once */
	int refuse_device_mr; /* the same by address, of memory that the processor cannot read */
	bool drop_datagrams;  /* UD sends reach nobody */
	unsigned n_devices;   /* fake0, fake1, ...: 1 after a reset */
	/* Nothing leaves the device or comes to it: requests time out, datagrams are lost. */
	bool cut[KVP_FAKE_DEVICES];
	bool silent[KVP_FAKE_DEVICES];  /* what the error state flushes is not told */
	bool stuck[KVP_FAKE_DEVICES];   /* requests of connections are never done */
	bool deaf[KVP_FAKE_DEVICES];    /* receives that ended well are not told */
	bool no_way[KVP_FAKE_DEVICES];  /* the routing table says so */
	bool stiff[KVP_FAKE_DEVICES];   /* kvp_fake_stick() */
	enum ibv_port_state port_state; /* as queried */
	bool down[KVP_FAKE_DEVICES];    /* so is the port, and it is cut */
	bool no_gid[KVP_FAKE_DEVICES];  /* that could be sent from */
	int max_cqe;
	/* What has happened. */
	uint64_t n_posted, n_doorbells, n_recv_doorbells;
	uint32_t n_dmabufs; /* regions by a dma-buf, so far */
	uint32_t n_qps, n_mrs, n_ahs, n_cqs, n_pds, n_contexts, n_mws;
	uint64_t n_writes, n_binds; /* that ran */
	uint64_t n_refused;         /* writes without the right */
};

extern struct kvp_fake kvp_fake;

/* Defaults, and forgets what was counted; objects stay. */
/* Whoever destroys a queue pair of it, or asks for a way from it, waits until it is well again. */
void kvp_fake_stick(unsigned device, bool stiff);
void kvp_fake_reset(void);

/* Runs the oldest held request of a queue pair; false: there was none. */
bool kvp_fake_step(struct ibv_qp *qp);

/* Any thread: writes wait from now on, and what is behind them on their queue pairs; off: all that
 * waits runs. */
void kvp_fake_hold_writes(bool on);
/* Any thread: writes that wait. */
uint32_t kvp_fake_held(void);
/* Any thread: bindings of windows wait once so many have run since the reset, and what is behind
 * them on their queue pairs; UINT64_MAX: all that waits runs. */
void kvp_fake_hold_binds(uint64_t after);
/* A late word of a completion that was taken before: all queues that are armed tell, and are armed
 * no more. */
void kvp_fake_stray_events(void);
/* Any thread: a copy of kvp_fake. */
struct kvp_fake kvp_fake_look(void);

/* A context, protection domain, queue and a queue pair whose requests reach nobody and succeed. */
struct kvp_fake_rig {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};
void kvp_fake_rig_open(struct kvp_fake_rig *rig, unsigned depth);
void kvp_fake_rig_close(struct kvp_fake_rig *rig);

/* An asynchronous event of every context of a device. `qp` NULL: of port 1. */
void kvp_fake_event(unsigned dev, enum ibv_event_type type, struct ibv_qp *qp);

/* The queue pair with that number. */
struct ibv_qp *kvp_fake_qp(uint32_t number);
