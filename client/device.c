/* SPDX-License-Identifier: Apache-2.0 */
#include "client/device.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The driver's ABI as far as it is used here, so that no toolkit is needed to build the library. */
typedef unsigned long long device_ptr;
typedef unsigned long long chunk_handle;

struct ipc_handle {
	char bytes[KVPL_IPC_BYTES];
};

enum {
	ATTR_CONTEXT = 1,
	ATTR_MEMORY_TYPE = 2,
	ATTR_DEVICE_ORDINAL = 9,
	ATTR_IS_LEGACY_IPC = 10,
	TYPE_DEVICE = 2,
	HANDLE_POSIX_FD = 1,
	DEVICE_DMABUF = 124, /* device attribute: dma-bufs can be made */
	RANGE_DMABUF_FD = 1,
	HOST_REGISTER_PORTABLE = 1,
	HOST_REGISTER_DEVICEMAP = 2,
};

/* clang-format off */
#define DRIVER_CALLS(X) \
	X(pointer_attribute, "cuPointerGetAttribute", (void *, int, device_ptr)) \
	X(address_range, "cuMemGetAddressRange_v2", (device_ptr *, size_t *, device_ptr)) \
	X(ipc_get, "cuIpcGetMemHandle", (struct ipc_handle *, device_ptr)) \
	X(retain_chunk, "cuMemRetainAllocationHandle", (chunk_handle *, void *)) \
	X(release_chunk, "cuMemRelease", (chunk_handle)) \
	X(export_chunk, "cuMemExportToShareableHandle", (void *, chunk_handle, int, unsigned long long)) \
	X(device_get, "cuDeviceGet", (int *, int)) \
	X(device_uuid, "cuDeviceGetUuid", (uint8_t *, int)) \
	X(device_attribute, "cuDeviceGetAttribute", (int *, int, int)) \
	X(ctx_push, "cuCtxPushCurrent_v2", (void *)) \
	X(ctx_pop, "cuCtxPopCurrent_v2", (void **)) \
	X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned int)) \
	X(host_unregister, "cuMemHostUnregister", (void *)) \
	X(host_pointer, "cuMemHostGetDevicePointer_v2", (device_ptr *, void *, unsigned int)) \
	X(stream_write, "cuStreamWriteValue64_v2", (void *, device_ptr, uint64_t, unsigned int)) \
	X(error_name, "cuGetErrorName", (int, const char **))
/* clang-format on */

static struct driver {
#define FIELD(name, symbol, args) int(*name) args;
	DRIVER_CALLS(FIELD)
#undef FIELD
	/* Not in drivers before 11.7; they serve all the same. */
	int (*range_handle)(void *, device_ptr, size_t, int, unsigned long long);
} driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool loaded;
static char load_err[KVPL_DEVICE_ERR];

static void load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!lib) {
		(void)snprintf(load_err, sizeof(load_err),
			       "no CUDA driver: libcuda.so.1 not found");
		return;
	}
#define LOAD(name, symbol, args)                                                                 \
	*(void **)&driver.name = dlsym(lib, symbol);                                             \
	if (!driver.name) {                                                                      \
		(void)snprintf(load_err, sizeof(load_err), "the driver lacks %s, it is too old", \
			       symbol);                                                          \
		return;                                                                          \
	}
	DRIVER_CALLS(LOAD)
#undef LOAD
	*(void **)&driver.range_handle = dlsym(lib, "cuMemGetHandleForAddressRange");
	loaded = true;
}

static int driver_get(char *err)
{
	(void)pthread_once(&once, load);
	if (loaded)
		return 0;
	(void)snprintf(err, KVPL_DEVICE_ERR, "%s", load_err);
	return -ENOSYS;
}

static int fail(int res, const char *call, char *err)
{
	const char *name = NULL;

	if (driver.error_name(res, &name) != 0 || !name)
		name = "unknown CUDA error";
	(void)snprintf(err, KVPL_DEVICE_ERR, "%s: %s", call, name);
	return -EINVAL;
}

/* Closes what was exported so far. */
void kvpl_export_fini(struct kvpl_export *out)
{
	for (uint32_t i = 0; i < out->n_chunks; i++)
		(void)close(out->fds[i]); /* ours */
	out->n_chunks = 0;
	if (out->dmabuf >= 0)
		(void)close(out->dmabuf); /* ours */
	out->dmabuf = -1;
}

static int export_ipc(device_ptr addr, struct kvpl_export *out, char *err)
{
	struct ipc_handle handle;
	device_ptr base = 0;
	int res = driver.address_range(&base, NULL, addr);

	if (res)
		return fail(res, "cuMemGetAddressRange", err);
	res = driver.ipc_get(&handle, addr);
	if (res)
		return fail(res, "cuIpcGetMemHandle", err);
	memcpy(out->handle, handle.bytes, sizeof(out->handle));
	out->offset = addr - base;
	return 0;
}

/* One physical chunk as an fd. */
static int export_chunk(device_ptr addr, int *fd, char *err)
{
	chunk_handle handle;
	int res = driver.retain_chunk(&handle, (void *)(uintptr_t)addr);

	if (res)
		return fail(res, "cuMemRetainAllocationHandle", err);
	res = driver.export_chunk(fd, handle, HANDLE_POSIX_FD, 0);
	(void)driver.release_chunk(handle); /* the mapping keeps it */
	return res ? fail(res, "cuMemExportToShareableHandle (was the memory made shareable?)", err)
		   : 0;
}

static int export_chunks(device_ptr addr, uint64_t bytes, struct kvpl_export *out, char *err)
{
	device_ptr at = addr;
	int r = 0;

	while (r == 0 && at < addr + bytes) {
		device_ptr base = 0;
		size_t size = 0;
		int res = driver.address_range(&base, &size, at);

		if (res)
			return fail(res, "cuMemGetAddressRange", err);
		if (out->n_chunks == KVPL_DEVICE_CHUNKS) {
			(void)snprintf(err, KVPL_DEVICE_ERR,
				       "more than %u physical chunks: register the pool in parts",
				       KVPL_DEVICE_CHUNKS);
			return -E2BIG;
		}
		if (at == addr)
			out->offset = addr - base;
		r = export_chunk(base, &out->fds[out->n_chunks], err);
		if (r == 0)
			out->chunk_bytes[out->n_chunks++] = size;
		at = base + size;
	}
	return r;
}

/* The context that owns the memory is current from here on, until ctx_pop(). */
static int enter(device_ptr addr, uint8_t (*gpu)[16], char *err)
{
	void *ctx = NULL;
	unsigned int type = 0;
	int ordinal = 0, device = 0;
	int res = driver.pointer_attribute(&type, ATTR_MEMORY_TYPE, addr);

	if (res == 0 && type != TYPE_DEVICE) {
		(void)snprintf(err, KVPL_DEVICE_ERR, "0x%llx is not device memory", addr);
		return -EINVAL;
	}
	if (res == 0)
		res = driver.pointer_attribute(&ctx, ATTR_CONTEXT, addr);
	if (res == 0)
		res = driver.pointer_attribute(&ordinal, ATTR_DEVICE_ORDINAL, addr);
	if (res)
		return fail(res, "cuPointerGetAttribute", err);
	res = driver.device_get(&device, ordinal);
	if (res == 0)
		res = driver.device_uuid(*gpu, device);
	if (res)
		return fail(res, "cuDeviceGetUuid", err);
	/* Memory of the virtual memory calls belongs to no context: the caller's serves. */
	res = ctx ? driver.ctx_push(ctx) : 0;
	return res ? fail(res, "cuCtxPushCurrent", err) : ctx != NULL;
}

int kvpl_device_export(uint64_t addr, uint64_t bytes, struct kvpl_export *out, char *err)
{
	void *popped;
	int legacy = 0;
	int r = driver_get(err);
	int pushed;

	memset(out, 0, sizeof(*out));
	out->dmabuf = -1;
	if (r)
		return r;
	pushed = enter(addr, &out->gpu, err);
	if (pushed < 0)
		return pushed;
	r = driver.pointer_attribute(&legacy, ATTR_IS_LEGACY_IPC, addr);
	if (r)
		r = fail(r, "cuPointerGetAttribute", err);
	else
		r = legacy ? export_ipc(addr, out, err) : export_chunks(addr, bytes, out, err);
	if (pushed)
		(void)driver.ctx_pop(&popped); /* what was pushed above */
	if (r)
		kvpl_export_fini(out);
	return r;
}

static void no_dmabuf(struct kvpl_export *out, const char *why)
{
	(void)snprintf(out->dmabuf_reason, sizeof(out->dmabuf_reason), "%.63s", why);
}

/* Whole pages of the host, as the driver wants them: never past what was allocated, since that is
 * in such units itself. */
static void export_dmabuf(device_ptr addr, uint64_t bytes, struct kvpl_export *out)
{
	device_ptr page = (device_ptr)sysconf(_SC_PAGESIZE);
	device_ptr from = addr / page * page, to = (addr + bytes + page - 1) / page * page;
	char err[KVPL_DEVICE_ERR];
	int fd = -1, ordinal = 0, device = 0, able = 0;
	int res = driver.pointer_attribute(&ordinal, ATTR_DEVICE_ORDINAL, addr);

	if (res == 0)
		res = driver.device_get(&device, ordinal);
	if (res == 0)
		res = driver.device_attribute(&able, DEVICE_DMABUF, device);
	if (res == 0 && !able) {
		no_dmabuf(out, "the device or its kernel driver makes no dma-bufs");
		return;
	}
	if (res == 0)
		res = driver.range_handle(&fd, from, to - from, RANGE_DMABUF_FD, 0);
	if (res) {
		(void)fail(res, "cuMemGetHandleForAddressRange", err); /* only for its words */
		no_dmabuf(out, err);
		return;
	}
	out->dmabuf = fd;
	out->dmabuf_bytes = to - from;
	out->dmabuf_offset = addr - from;
}

void kvpl_device_dmabuf(uint64_t addr, uint64_t bytes, struct kvpl_export *out)
{
	char err[KVPL_DEVICE_ERR];
	uint8_t gpu[16];
	void *popped;
	int pushed;

	if (!driver.range_handle) {
		no_dmabuf(out, "the driver lacks cuMemGetHandleForAddressRange");
		return;
	}
	pushed = enter(addr, &gpu, err);
	if (pushed < 0) {
		no_dmabuf(out, err);
		return;
	}
	export_dmabuf(addr, bytes, out);
	if (pushed)
		(void)driver.ctx_pop(&popped); /* what was pushed above */
}

int kvpl_device_map_host(void *host, size_t bytes, uint64_t *addr, char *err)
{
	device_ptr ptr = 0;
	int r = driver_get(err);
	int res;

	if (r)
		return r;
	res = driver.host_register(host, bytes, HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP);
	if (res)
		return fail(res, "cuMemHostRegister", err);
	res = driver.host_pointer(&ptr, host, 0);
	if (res) {
		(void)driver.host_unregister(host); /* the first error is told */
		return fail(res, "cuMemHostGetDevicePointer", err);
	}
	*addr = ptr;
	return 0;
}

void kvpl_device_unmap_host(void *host)
{
	(void)driver.host_unregister(host); /* the memory goes anyway */
}

int kvpl_device_stream_write(void *stream, uint64_t addr, uint64_t value, char *err)
{
	int res = driver.stream_write(stream, addr, value, 0);

	return res ? fail(res, "cuStreamWriteValue64", err) : 0;
}
