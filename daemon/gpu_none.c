/* SPDX-License-Identifier: Apache-2.0 */

/* Built without a CUDA toolkit: no GPU can be opened, so nothing below kvp_gpu_open() is reached.
 */

#include <errno.h>
#include <stdio.h>

#include "daemon/cuda.h"
#include "daemon/gpu.h"
#include "daemon/gpu_import.h"

#ifndef KVP_CUDA

int kvp_gpu_list(char uuids[][KVP_GPU_UUID], char *err, size_t err_bytes)
{
	(void)uuids;
	(void)kvp_cuda_get(err, err_bytes); /* says why */
	return -ENODEV;
}

const char *kvp_gpu_build(void)
{
	return "not built in";
}

int kvp_gpu_open(struct kvp_gpu **out, const char *name, char *err, size_t err_bytes)
{
	(void)out;
	(void)snprintf(err, err_bytes, "GPU %s: built without CUDA", name);
	return -ENODEV;
}

void kvp_gpu_close(struct kvp_gpu *gpu)
{
	(void)gpu;
}

void kvp_gpu_pci(const struct kvp_gpu *gpu, char out[KVP_GPU_PCI])
{
	(void)gpu;
	out[0] = '\0';
}

const char *kvp_gpu_uuid(const struct kvp_gpu *gpu)
{
	(void)gpu;
	return "";
}

const char *kvp_gpu_name(const struct kvp_gpu *gpu)
{
	(void)gpu;
	return "";
}

const char *kvp_gpu_error(const struct kvp_gpu *gpu)
{
	(void)gpu;
	return "";
}

int kvp_gpu_host_alloc(struct kvp_gpu *gpu, uint64_t bytes, void **out)
{
	(void)gpu;
	(void)bytes;
	(void)out;
	return -ENODEV;
}

void kvp_gpu_host_free(struct kvp_gpu *gpu, void *host)
{
	(void)gpu;
	(void)host;
}

const struct kvp_gpu_traits *kvp_gpu_traits(const struct kvp_gpu *gpu)
{
	static const struct kvp_gpu_traits none;

	(void)gpu;
	return &none;
}

int kvp_gpu_ring_alloc(struct kvp_gpu *gpu, bool vmm, uint64_t bytes, struct kvp_gpu_ring *out)
{
	(void)gpu;
	(void)vmm;
	(void)bytes;
	(void)out;
	return -ENODEV;
}

void kvp_gpu_ring_free(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring)
{
	(void)gpu;
	(void)ring;
}

int kvp_gpu_write(struct kvp_gpu *gpu, uint64_t addr, const void *from, uint64_t bytes)
{
	(void)gpu;
	(void)addr;
	(void)from;
	(void)bytes;
	return -ENODEV;
}

int kvp_gpu_flush(struct kvp_gpu *gpu)
{
	(void)gpu;
	return -ENODEV;
}

int kvp_gpu_drain(struct kvp_gpu *gpu)
{
	(void)gpu;
	return -ENODEV;
}

struct kvp_jobs *kvp_gpu_jobs(struct kvp_gpu *gpu)
{
	(void)gpu;
	return NULL;
}

int kvp_gpu_launch(struct kvp_gpu *gpu, uint64_t *ticket)
{
	(void)gpu;
	(void)ticket;
	return -ENODEV;
}

#ifdef KVP_TEST
void kvp_gpu_wild(struct kvp_gpu *gpu, bool on)
{
	(void)gpu;
	(void)on;
}
#endif

uint64_t kvp_gpu_next(const struct kvp_gpu *gpu)
{
	(void)gpu;
	return 0;
}

int kvp_gpu_poll(struct kvp_gpu *gpu, uint64_t *ticket)
{
	(void)gpu;
	(void)ticket;
	return -ENODEV;
}

int kvp_gpu_imports_create(struct kvp_gpu_imports **out, struct kvp_gpu *gpu)
{
	(void)out;
	(void)gpu;
	return -ENODEV;
}

void kvp_gpu_imports_destroy(struct kvp_gpu_imports *imports)
{
	(void)imports;
}

int kvp_gpu_import_ipc(struct kvp_gpu_imports *imports, const struct kvp_gpu_ipc *ipc,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	(void)imports;
	(void)ipc;
	(void)out;
	(void)addr;
	(void)snprintf(err, err_bytes, "built without CUDA");
	return -ENODEV;
}

int kvp_gpu_import_vmm(struct kvp_gpu_imports *imports, const struct kvp_gpu_chunks *chunks,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	(void)imports;
	(void)chunks;
	(void)out;
	(void)addr;
	(void)snprintf(err, err_bytes, "built without CUDA");
	return -ENODEV;
}

int kvp_gpu_import_peer(struct kvp_gpu_imports *imports, const char *uuid, char *err,
			size_t err_bytes)
{
	(void)imports;
	(void)uuid;
	(void)snprintf(err, err_bytes, "built without CUDA");
	return -ENODEV;
}

int kvp_gpu_import_dmabuf(struct kvp_gpu_imports *imports, const struct kvp_gpu_import *import,
			  int *fd, char *err, size_t err_bytes)
{
	(void)imports;
	(void)import;
	(void)fd;
	(void)snprintf(err, err_bytes, "built without CUDA");
	return -ENODEV;
}

void kvp_gpu_import_put(struct kvp_gpu_imports *imports, struct kvp_gpu_import *import)
{
	(void)imports;
	(void)import;
}

uint32_t kvp_gpu_imports_count(const struct kvp_gpu_imports *imports, uint64_t *bytes)
{
	(void)imports;
	*bytes = 0;
	return 0;
}

#endif
