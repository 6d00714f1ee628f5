/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The CUDA driver as the library uses it: to export a pool that the engine has on a GPU and to let
 * its streams write fences. Loaded on first use, never linked, never needed for host pools. Any
 * thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"

#define KVPL_IPC_BYTES 64u
#define KVPL_DEVICE_CHUNKS 128u
#define KVPL_DEVICE_ERR 160u

/* How another process reaches device memory. */
struct kvpl_export {
	uint8_t gpu[16];   /* UUID */
	uint64_t offset;   /* of the first byte in the allocation, or in the first chunk */
	uint32_t n_chunks; /* 0: by the IPC handle */
	uint8_t handle[KVPL_IPC_BYTES];
	int fds[KVPL_DEVICE_CHUNKS];              /* owned [n_chunks], see kvpl_export_fini() */
	uint64_t chunk_bytes[KVPL_DEVICE_CHUNKS]; /* [n_chunks] physical chunks, in order of address
						   */
	/* For NICs, when asked for; what the driver refuses is no failure of the export. */
	int dmabuf;                                /* owned; -1: none */
	uint64_t dmabuf_bytes, dmabuf_offset;      /* of the dma-buf, of the first byte in it */
	char dmabuf_reason[KVP_DMABUF_REASON + 1]; /* why there is none */
};

/*
 * Exports [addr, addr + bytes) of this process's GPU memory, by a legacy IPC handle where the
 * allocation has one, else by the fds of its physical chunks. 0; -ENOSYS no driver here; -EINVAL
 * not device memory, or memory that cannot be shared; -E2BIG too many chunks. `err` has
 * KVPL_DEVICE_ERR bytes.
 */
int kvpl_device_export(uint64_t addr, uint64_t bytes, struct kvpl_export *out, char *err);
/* Adds a dma-buf of the same range, or why there is none. */
void kvpl_device_dmabuf(uint64_t addr, uint64_t bytes, struct kvpl_export *out);
/* Closes the fds. */
void kvpl_export_fini(struct kvpl_export *out);

/* Makes host memory writable by the device of the calling thread's context; *addr is its address
 * there. */
int kvpl_device_map_host(void *host, size_t bytes, uint64_t *addr, char *err);
void kvpl_device_unmap_host(void *host);
/* Queues a 64-bit store behind what the stream has been given. */
int kvpl_device_stream_write(void *stream, uint64_t addr, uint64_t value, char *err);
