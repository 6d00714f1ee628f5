/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gpu_import.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/gpu_internal.h"
#include "proto/util.h"

#ifdef KVP_CUDA

#define PROBE_BYTES 4096u /* written to another GPU before it is relied on */

/* One opened allocation: by IPC handle (bytes of the whole allocation) or a mapped VMM range. */
struct kvp_gpu_import {
	uint64_t owner;
	unsigned char handle[KVP_GPU_IPC_BYTES]; /* IPC only */
	bool vmm;
	CUdeviceptr base;
	uint64_t bytes;  /* of the allocation, or reserved */
	uint64_t mapped; /* VMM: bytes mapped so far */
	uint32_t users;
	struct kvp_gpu_import *next;
};

struct kvp_gpu_imports {
	struct kvp_gpu *gpu; /* borrowed */
	const struct kvp_cuda *cuda;
	struct kvp_gpu_import *first;
	uint32_t n;
	uint64_t bytes;
	/* GPUs whose memory this one reaches; their contexts are held. */
	CUdevice peers[KVP_GPU_MAX];
	uint32_t n_peers;
};

static int fail(const struct kvp_gpu_imports *imports, CUresult res, const char *call, char *err,
		size_t err_bytes)
{
	int r = kvp_cuda_check(imports->cuda, res, call);

	(void)snprintf(err, err_bytes, "%s: %s", call, kvp_cuda_name(imports->cuda, res));
	/* Everybody on the GPU is told these words. */
	return r == -EIO ? kvp_gpu_check(imports->gpu, res, call) : r;
}

/* What the driver cannot open is the client's mistake, whatever the driver calls it. */
static int fail_open(const struct kvp_gpu_imports *imports, CUresult res, const char *call,
		     char *err, size_t err_bytes)
{
	int r = fail(imports, res, call, err, err_bytes);

	return r == -EREMOTEIO ? -EINVAL : r;
}

int kvp_gpu_imports_create(struct kvp_gpu_imports **out, struct kvp_gpu *gpu)
{
	struct kvp_gpu_imports *imports = calloc(1, sizeof(*imports));

	if (!imports)
		return -ENOMEM;
	imports->gpu = gpu;
	imports->cuda = kvp_gpu_cuda(gpu);
	*out = imports;
	return 0;
}

/* Takes the mapping away; failures are logged, there is nothing more to do about them. */
static void import_close(const struct kvp_gpu_imports *imports, struct kvp_gpu_import *import)
{
	const struct kvp_cuda *cuda = imports->cuda;

	if (!import->vmm) {
		(void)kvp_cuda_check(cuda, cuda->cuIpcCloseMemHandle(import->base),
				     "cuIpcCloseMemHandle");
	} else {
		if (import->mapped)
			(void)kvp_cuda_check(cuda, cuda->cuMemUnmap(import->base, import->mapped),
					     "cuMemUnmap");
		if (import->base)
			(void)kvp_cuda_check(cuda,
					     cuda->cuMemAddressFree(import->base, import->bytes),
					     "cuMemAddressFree");
	}
	free(import);
}

void kvp_gpu_imports_destroy(struct kvp_gpu_imports *imports)
{
	if (!imports)
		return;

	while (imports->first) {
		struct kvp_gpu_import *import = imports->first;

		imports->first = import->next;
		import_close(imports, import);
	}
	while (imports->n_peers > 0)
		(void)kvp_cuda_check(imports->cuda,
				     imports->cuda->cuDevicePrimaryCtxRelease(
					     imports->peers[--imports->n_peers]),
				     "cuDevicePrimaryCtxRelease");
	free(imports);
}

/* ---- memory of other GPUs -------------------------------------------------------------------- */

static bool device_of(const struct kvp_gpu_imports *imports, const char *name, CUdevice *device)
{
	const struct kvp_cuda *cuda = imports->cuda;
	char uuid[KVP_GPU_UUID];
	CUuuid bytes;
	int n = 0;

	if (cuda->cuDeviceGetCount(&n) != CUDA_SUCCESS)
		return false;
	for (int i = 0; i < n; i++) {
		if (cuda->cuDeviceGet(device, i) != CUDA_SUCCESS ||
		    cuda->cuDeviceGetUuid(&bytes, *device) != CUDA_SUCCESS)
			return false;
		kvp_gpu_uuid_text(uuid, (const uint8_t *)bytes.bytes);
		if (strcmp(uuid, name) == 0)
			return true;
	}
	return false;
}

/*
 * Does what this GPU writes there arrive? Behind some IOMMUs it is lost without an error, whatever
 * the driver says of the two. `there`: memory of the other's context.
 */
static int probe_write(struct kvp_gpu_imports *imports, CUcontext ctx, CUdeviceptr there,
		       uint8_t *pattern)
{
	const struct kvp_cuda *cuda = imports->cuda;
	uint8_t back[PROBE_BYTES] = { 0 };
	CUresult res = cuda->cuMemcpyHtoD(there, back, PROBE_BYTES);
	int r = kvp_gpu_check(imports->gpu, res, "cuMemcpyHtoD");

	for (uint32_t i = 0; i < PROBE_BYTES; i++)
		pattern[i] = (uint8_t)(i * 7 + 1);
	(void)cuda->cuCtxSetCurrent(kvp_gpu_ctx(imports->gpu)); /* it has been before */
	if (r == 0)
		r = kvp_gpu_copy_now(imports->gpu, (uintptr_t)pattern, there, PROBE_BYTES);
	(void)cuda->cuCtxSetCurrent(ctx);
	if (r == 0)
		r = kvp_gpu_check(imports->gpu, cuda->cuMemcpyDtoH(back, there, PROBE_BYTES),
				  "cuMemcpyDtoH");
	return r == 0 && memcmp(back, pattern, PROBE_BYTES) != 0 ? -EOPNOTSUPP : r;
}

/* With a little memory of the other GPU; this one's context is current again when it returns. */
static int probe_peer(struct kvp_gpu_imports *imports, CUcontext ctx, char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	CUdeviceptr there = 0;
	void *pattern = NULL;
	int r = kvp_gpu_host_alloc(imports->gpu, PROBE_BYTES, &pattern);

	if (r == 0)
		r = kvp_gpu_check(imports->gpu, cuda->cuCtxSetCurrent(ctx), "cuCtxSetCurrent");
	if (r == 0)
		r = kvp_gpu_check(imports->gpu, cuda->cuMemAlloc(&there, PROBE_BYTES),
				  "cuMemAlloc");
	if (r == 0)
		r = probe_write(imports, ctx, there, pattern);
	if (there)
		(void)kvp_gpu_check(imports->gpu, cuda->cuMemFree(there), "cuMemFree"); /* logged */
	(void)cuda->cuCtxSetCurrent(kvp_gpu_ctx(imports->gpu));
	kvp_gpu_host_free(imports->gpu, pattern);
	if (r < 0)
		(void)snprintf(err, err_bytes, "a try to write the other GPU's memory: %s",
			       r == -EOPNOTSUPP ? "the bytes do not arrive" : strerror(-r));
	return r;
}

/* Its context is held as long as this one may reach its memory. */
static int enable_peer(struct kvp_gpu_imports *imports, CUdevice device, char *err,
		       size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	CUcontext ctx;
	CUresult res = cuda->cuDevicePrimaryCtxRetain(&ctx, device);
	int r;

	if (res != CUDA_SUCCESS)
		return fail(imports, res, "cuDevicePrimaryCtxRetain", err, err_bytes);
	res = cuda->cuCtxEnablePeerAccess(ctx, 0);
	if (res != CUDA_SUCCESS && res != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
		(void)kvp_cuda_check(cuda, cuda->cuDevicePrimaryCtxRelease(device),
				     "cuDevicePrimaryCtxRelease");
		return fail(imports, res, "cuCtxEnablePeerAccess", err, err_bytes);
	}
	r = probe_peer(imports, ctx, err, err_bytes);
	if (r < 0) {
		(void)kvp_cuda_check(cuda, cuda->cuDevicePrimaryCtxRelease(device),
				     "cuDevicePrimaryCtxRelease");
		return r;
	}
	imports->peers[imports->n_peers++] = device;
	return 0;
}

int kvp_gpu_import_peer(struct kvp_gpu_imports *imports, const char *uuid, char *err,
			size_t err_bytes)
{
	CUdevice device;
	CUresult res;
	int able = 0;

	if (!device_of(imports, uuid, &device)) {
		(void)snprintf(err, err_bytes, "the driver does not list %s", uuid);
		return -ENODEV;
	}
	for (uint32_t i = 0; i < imports->n_peers; i++)
		if (imports->peers[i] == device)
			return 0;
	res = imports->cuda->cuDeviceCanAccessPeer(&able, kvp_gpu_device(imports->gpu), device);
	if (res != CUDA_SUCCESS)
		return fail(imports, res, "cuDeviceCanAccessPeer", err, err_bytes);
	if (!able || imports->n_peers == KVP_GPU_MAX) {
		(void)snprintf(err, err_bytes, "no peer access from %s to %s",
			       kvp_gpu_uuid(imports->gpu), uuid);
		return -EOPNOTSUPP;
	}
	return enable_peer(imports, device, err, err_bytes);
}

/* ---- what is open ---------------------------------------------------------------------------- */

static void imports_add(struct kvp_gpu_imports *imports, struct kvp_gpu_import *import)
{
	import->users = 1;
	import->next = imports->first;
	imports->first = import;
	imports->n++;
	imports->bytes += import->bytes;
}

void kvp_gpu_import_put(struct kvp_gpu_imports *imports, struct kvp_gpu_import *import)
{
	struct kvp_gpu_import **at = &imports->first;

	if (!import || --import->users > 0)
		return;

	while (*at != import)
		at = &(*at)->next;
	*at = import->next;
	imports->n--;
	imports->bytes -= import->bytes;
	import_close(imports, import);
}

uint32_t kvp_gpu_imports_count(const struct kvp_gpu_imports *imports, uint64_t *bytes)
{
	*bytes = imports->bytes;
	return imports->n;
}

/*
 * A handle does not say of which GPU it is, and where there is peer access one of another's memory
 * opens here, too: rows would cross the link unasked, whatever gpu.peer says and unprobed. Where
 * the driver does not answer there is nothing to hold against it.
 */
static int check_here(const struct kvp_gpu_imports *imports, CUdeviceptr at, char *err,
		      size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	unsigned int type = CU_MEMORYTYPE_DEVICE;
	CUdevice device = kvp_gpu_device(imports->gpu);
	int ordinal;

	(void)cuda->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
	if (cuda->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) ==
	    CUDA_SUCCESS)
		(void)cuda->cuDeviceGet(&device, ordinal);
	if (type == CU_MEMORYTYPE_DEVICE && device == kvp_gpu_device(imports->gpu))
		return 0;
	(void)snprintf(err, err_bytes, "it is memory of %s, not of %s",
		       type == CU_MEMORYTYPE_DEVICE ? "another GPU" : "the host",
		       kvp_gpu_uuid(imports->gpu));
	return -EINVAL;
}

static int check_chunks_here(const struct kvp_gpu_imports *imports,
			     const struct kvp_gpu_import *import,
			     const struct kvp_gpu_chunks *chunks, char *err, size_t err_bytes)
{
	CUdeviceptr at = import->base;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < chunks->n; i++) {
		r = check_here(imports, at, err, err_bytes);
		at += chunks->bytes[i];
	}
	return r;
}

static struct kvp_gpu_import *find_ipc(const struct kvp_gpu_imports *imports, uint64_t owner,
				       const void *handle)
{
	struct kvp_gpu_import *import = imports->first;

	while (import && (import->vmm || import->owner != owner ||
			  memcmp(import->handle, handle, KVP_GPU_IPC_BYTES) != 0))
		import = import->next;
	return import;
}

static int open_ipc(struct kvp_gpu_imports *imports, const struct kvp_gpu_ipc *what,
		    struct kvp_gpu_import **out, char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	KVP_CLEANUP(kvp_freep) struct kvp_gpu_import *import = calloc(1, sizeof(*import));
	CUipcMemHandle ipc;
	size_t bytes = 0;
	CUresult res;

	if (!import)
		return -ENOMEM;
	memcpy(&ipc, what->handle, sizeof(ipc));
	memcpy(import->handle, what->handle, KVP_GPU_IPC_BYTES);
	import->owner = what->owner;
	res = cuda->cuIpcOpenMemHandle(&import->base, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
	if (res != CUDA_SUCCESS)
		return fail_open(imports, res, "cuIpcOpenMemHandle", err, err_bytes);
	res = cuda->cuMemGetAddressRange(NULL, &bytes, import->base);
	if (res != CUDA_SUCCESS) {
		(void)cuda->cuIpcCloseMemHandle(import->base); /* the first error is told */
		return fail(imports, res, "cuMemGetAddressRange", err, err_bytes);
	}
	if (!what->peer && check_here(imports, import->base, err, err_bytes) < 0) {
		(void)cuda->cuIpcCloseMemHandle(import->base); /* the first error is told */
		return -EINVAL;
	}
	import->bytes = bytes;
	imports_add(imports, import);
	*out = KVP_TAKE(import);
	return 0;
}

static_assert(sizeof(CUipcMemHandle) == KVP_GPU_IPC_BYTES, "as the clients send it");

int kvp_gpu_import_ipc(struct kvp_gpu_imports *imports, const struct kvp_gpu_ipc *ipc,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	struct kvp_gpu_import *import = find_ipc(imports, ipc->owner, ipc->handle);
	const uint64_t offset = ipc->offset, bytes = ipc->bytes;
	int r;

	/* It may be open for the sake of a pool that lies on another GPU, and says so. */
	if (import && !ipc->peer && check_here(imports, import->base, err, err_bytes) < 0)
		return -EINVAL;
	if (import) {
		import->users++;
	} else {
		r = open_ipc(imports, ipc, &import, err, err_bytes);
		if (r)
			return r;
	}
	assert(import);
	if (offset > import->bytes || bytes > import->bytes - offset) {
		(void)snprintf(err, err_bytes,
			       "offset %llu + bytes %llu: past the allocation's %llu bytes",
			       (unsigned long long)offset, (unsigned long long)bytes,
			       (unsigned long long)import->bytes);
		kvp_gpu_import_put(imports, import);
		return -ERANGE;
	}
	*out = import;
	*addr = import->base + offset;
	return 0;
}

/* Maps one chunk behind those before. The handle is let go of at once: the mapping holds the
 * memory. */
static int map_chunk(const struct kvp_gpu_imports *imports, struct kvp_gpu_import *import, int fd,
		     uint64_t bytes, char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	CUmemGenericAllocationHandle handle;
	CUresult res = cuda->cuMemImportFromShareableHandle(
		&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

	if (res != CUDA_SUCCESS)
		return fail_open(imports, res, "cuMemImportFromShareableHandle", err, err_bytes);
	res = cuda->cuMemMap(import->base + import->mapped, bytes, 0, handle, 0);
	(void)kvp_cuda_check(cuda, cuda->cuMemRelease(handle), "cuMemRelease");
	if (res != CUDA_SUCCESS)
		return fail_open(imports, res, "cuMemMap", err, err_bytes);
	import->mapped += bytes;
	return 0;
}

static int map_chunks(const struct kvp_gpu_imports *imports, struct kvp_gpu_import *import,
		      const struct kvp_gpu_chunks *chunks, char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE,
			      .id = kvp_gpu_device(imports->gpu) },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult res = cuda->cuMemAddressReserve(&import->base, import->bytes, 0, 0, 0);
	int r = 0;

	if (res != CUDA_SUCCESS) {
		import->base = 0;
		return fail(imports, res, "cuMemAddressReserve", err, err_bytes);
	}
	for (uint32_t i = 0; r == 0 && i < chunks->n; i++)
		r = map_chunk(imports, import, chunks->fds[i], chunks->bytes[i], err, err_bytes);
	if (r)
		return r;
	res = cuda->cuMemSetAccess(import->base, import->bytes, &access, 1);
	return res == CUDA_SUCCESS ? 0 : fail(imports, res, "cuMemSetAccess", err, err_bytes);
}

int kvp_gpu_import_vmm(struct kvp_gpu_imports *imports, const struct kvp_gpu_chunks *chunks,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	struct kvp_gpu_import *import = calloc(1, sizeof(*import));
	int r;

	if (!import)
		return -ENOMEM;
	import->vmm = true;
	for (uint32_t i = 0; i < chunks->n; i++)
		import->bytes += chunks->bytes[i];
	r = map_chunks(imports, import, chunks, err, err_bytes);
	if (r == 0 && !chunks->peer)
		r = check_chunks_here(imports, import, chunks, err, err_bytes);
	if (r) {
		import_close(imports, import);
		return r;
	}
	imports_add(imports, import);
	*out = import;
	*addr = import->base;
	return 0;
}

int kvp_gpu_import_dmabuf(struct kvp_gpu_imports *imports, const struct kvp_gpu_import *import,
			  int *fd, char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = imports->cuda;
	CUresult res;
	int made = -1;

	if (!import->vmm || !kvp_gpu_traits(imports->gpu)->dmabuf) {
		(void)snprintf(err, err_bytes, "%s",
			       import->vmm ? "the device or its driver makes no dma-bufs"
					   : "no dma-buf is made of memory by IPC");
		return -EOPNOTSUPP;
	}
	res = cuda->cuMemGetHandleForAddressRange(&made, import->base, import->bytes,
						  CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (res != CUDA_SUCCESS)
		return fail(imports, res, "cuMemGetHandleForAddressRange", err, err_bytes);
	*fd = made;
	return 0;
}

#endif
