/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Memory of other processes on a GPU: opened once per allocation, counted, closed when the last
 * user is done. The lane's thread only; nothing of the lane's stream may still use an import when
 * it is put.
 *
 * An open mapping pins the exporter's memory even after its death, so users put as soon as they
 * can.
 */

#include <stddef.h>
#include <stdint.h>

#include "daemon/gpu.h"

#define KVP_GPU_IPC_BYTES 64u
#define KVP_GPU_CHUNKS 512u /* physical chunks of one VMM range */

struct kvp_gpu_import;
struct kvp_gpu_imports;

/* The table of a GPU's imports. */
int kvp_gpu_imports_create(struct kvp_gpu_imports **out, struct kvp_gpu *gpu);
/* Closes what is left. */
void kvp_gpu_imports_destroy(struct kvp_gpu_imports *imports);

/* A legacy IPC handle and what is wanted of its allocation. */
struct kvp_gpu_ipc {
	const void *handle; /* [KVP_GPU_IPC_BYTES] */
	uint64_t owner;     /* the client's session: handles of two processes may look alike */
	uint64_t offset, bytes;
	bool peer; /* of another GPU, which kvp_gpu_import_peer() was asked about */
};

/*
 * Opens a handle. The allocation must hold [offset, offset + bytes); *addr is the address of its
 * byte `offset`. Errors with a text in `err`: -EINVAL not a handle of this GPU, freed, or of this
 * very process; -ERANGE the allocation is smaller; -EIO the GPU is lost.
 */
int kvp_gpu_import_ipc(struct kvp_gpu_imports *imports, const struct kvp_gpu_ipc *ipc,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes);

/* Physical chunks exported as POSIX fds, mapped one behind the other. The fds stay the caller's. */
struct kvp_gpu_chunks {
	const int *fds;        /* [n] */
	const uint64_t *bytes; /* [n] multiples of the device's granularity */
	uint32_t n;
	bool peer; /* as above */
};
int kvp_gpu_import_vmm(struct kvp_gpu_imports *imports, const struct kvp_gpu_chunks *chunks,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes);

/*
 * Memory of another GPU (UUID) can be imported from here on, for this one to read and write: peer
 * access is enabled, once. -EOPNOTSUPP: there is none between the two; -ENODEV: there is no such
 * GPU; else as the driver says, with a text in `err`.
 */
int kvp_gpu_import_peer(struct kvp_gpu_imports *imports, const char *uuid, char *err,
			size_t err_bytes);

/*
 * A dma-buf of a range of chunks, all of it, which the caller closes; -EOPNOTSUPP, or what the
 * driver says, with a text in `err`.
 */
int kvp_gpu_import_dmabuf(struct kvp_gpu_imports *imports, const struct kvp_gpu_import *import,
			  int *fd, char *err, size_t err_bytes);

void kvp_gpu_import_put(struct kvp_gpu_imports *imports, struct kvp_gpu_import *import);

/* Imports open now, and their bytes. */
uint32_t kvp_gpu_imports_count(const struct kvp_gpu_imports *imports, uint64_t *bytes);
