/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One GPU as its lane uses it: context, stream, kernel, pinned memory, launches that nobody waits
 * for.
 *
 * All calls on the lane's thread. Launches end in order; each has a ticket, a number that grows.
 * Errors are negative errno; -EIO is sticky: the process must end (the caller's decision).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/jobs.h"

struct kvp_gpu;

#define KVP_GPU_UUID 48u /* bytes of "GPU-..." */
#define KVP_GPU_MAX 15u
#define KVP_GPU_PCI 16u /* bytes of "0000:3b:00.0" */

/* "GPU-xxxxxxxx-..." of 16 bytes. */
void kvp_gpu_uuid_text(char out[KVP_GPU_UUID], const uint8_t bytes[16]);
/* The UUIDs of the GPUs that the driver lists, at most KVP_GPU_MAX; -ENODEV with words in `err`. */
int kvp_gpu_list(char uuids[][KVP_GPU_UUID], char *err, size_t err_bytes);
/* "13.0 in driver, kernels for sm_80 ..." or why there is none; loads no driver. */
const char *kvp_gpu_build(void);

/* The device with that UUID ("GPU-...") or ordinal; `err` says why not. Binds the calling thread.
 */
int kvp_gpu_open(struct kvp_gpu **out, const char *name, char *err, size_t err_bytes);
void kvp_gpu_close(struct kvp_gpu *gpu);
const char *kvp_gpu_uuid(const struct kvp_gpu *gpu);
const char *kvp_gpu_name(const struct kvp_gpu *gpu);
/* Its PCI address as sysfs has it; "" if it has none. */
void kvp_gpu_pci(const struct kvp_gpu *gpu, char out[KVP_GPU_PCI]);

/* Pinned host memory, readable and writable by the device at the same address. */
int kvp_gpu_host_alloc(struct kvp_gpu *gpu, uint64_t bytes, void **out);
void kvp_gpu_host_free(struct kvp_gpu *gpu, void *host);

/* What the device says of itself. */
struct kvp_gpu_traits {
	bool vmm;      /* it has the virtual memory calls */
	bool vmm_rdma; /* such memory can be made for NICs */
	bool rdma;     /* other memory can be reached by NICs */
	bool dmabuf;
	bool can_flush; /* kvp_gpu_flush() works */
	bool overlap;   /* a launch can begin while the one before it ends */
	int ordering;   /* enum CUGPUDirectRDMAWritesOrdering: from KVP_GPU_ORDERED on launches see
			 * what a NIC wrote before */
};
#define KVP_GPU_ORDERED 100
const struct kvp_gpu_traits *kvp_gpu_traits(const struct kvp_gpu *gpu);

/* Memory of the device for rings. */
struct kvp_gpu_ring {
	uint64_t addr, bytes; /* as many as asked for, or more */
	bool vmm, mapped;
	bool rdma;  /* a NIC may reach it, if its driver finds it */
	int dmabuf; /* owned, of all of it; -1: none */
	char dmabuf_reason[96];
};
/* `vmm`: by the virtual memory calls, with the flag for NICs if the device has it; else plain, as
 * the peer memory interface wants it. -ENOMEM or another negative errno, kvp_gpu_error() says more.
 */
int kvp_gpu_ring_alloc(struct kvp_gpu *gpu, bool vmm, uint64_t bytes, struct kvp_gpu_ring *out);
/* Nothing on the stream, and no NIC, uses it any more. */
void kvp_gpu_ring_free(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring);

/* Copies ordinary host memory to the device: launches after it see the bytes, and `from` is free
 * when it returns. */
int kvp_gpu_write(struct kvp_gpu *gpu, uint64_t addr, const void *from, uint64_t bytes);
/* Launches after it see what NICs have written so far: for devices below KVP_GPU_ORDERED. */
int kvp_gpu_flush(struct kvp_gpu *gpu);

/*
 * The tables to fill for the next launch, empty unless something was added; NULL while too many
 * launches are running (try again when one has ended).
 */
struct kvp_jobs *kvp_gpu_jobs(struct kvp_gpu *gpu);
/*
 * Launches what the tables hold, as one launch where it fits one. Sets *ticket, also when there was
 * nothing to launch (the last one's then).
 */
int kvp_gpu_launch(struct kvp_gpu *gpu, uint64_t *ticket);
/* The ticket that what the tables hold will have. */
uint64_t kvp_gpu_next(const struct kvp_gpu *gpu);
/* The last error in words, with the driver's name of it. */
const char *kvp_gpu_error(const struct kvp_gpu *gpu);
/* All launches with tickets up to *ticket are over, and their writes visible to the host and to
 * other processes' later work on the device. Never waits. Negative errno when one failed. */
int kvp_gpu_poll(struct kvp_gpu *gpu, uint64_t *ticket);
/* Waits for everything launched: only on the way out. */
int kvp_gpu_drain(struct kvp_gpu *gpu);

#ifdef KVP_TEST
/* While on, launches read memory that is not there: a real sticky error, for tests. */
void kvp_gpu_wild(struct kvp_gpu *gpu, bool on);
#endif

struct kvp_gpu_stats {
	uint64_t launches, runs, bytes;
	uint64_t full; /* times that no tables were free */
};
const struct kvp_gpu_stats *kvp_gpu_stats(const struct kvp_gpu *gpu);
