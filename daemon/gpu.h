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

/* Pinned host memory, readable and writable by the device at the same address. */
int kvp_gpu_host_alloc(struct kvp_gpu *gpu, uint64_t bytes, void **out);
void kvp_gpu_host_free(struct kvp_gpu *gpu, void *host);
/* Device memory. */
int kvp_gpu_alloc(struct kvp_gpu *gpu, uint64_t bytes, uint64_t *addr);
void kvp_gpu_free(struct kvp_gpu *gpu, uint64_t addr);

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

struct kvp_gpu_stats {
	uint64_t launches, near_launches, runs, bytes;
	uint64_t full; /* times that no tables were free */
};
const struct kvp_gpu_stats *kvp_gpu_stats(const struct kvp_gpu *gpu);
