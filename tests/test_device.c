/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the library exports of an engine's GPU memory, on a driver made of nothing: this program has
 * dlopen() and dlsym() of its own, which find the functions below.
 */

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/device.h"
#include "client/mems.h"
#include "proto/util.h"

#define MIB (1ull << 20)
#define REFUSED 1 /* as the driver numbers an invalid value */

enum kind { PLAIN, CHUNK };

/* An allocation, or a physical chunk of a range. */
struct range {
	unsigned long long base, bytes;
	enum kind kind;
};

static const struct range ranges[] = {
	{ 16 * MIB, 4 * MIB, PLAIN },
	{ 32 * MIB, 2 * MIB, CHUNK },
	{ 34 * MIB, 2 * MIB, CHUNK },
	{ 36 * MIB, 2 * MIB, CHUNK },
};

static struct {
	int contexts; /* pushed and not popped */
	int chunks;   /* retained and not released */
	int no_dmabufs, refuse_dmabuf, lacks_dmabuf;
	unsigned long long from, bytes; /* of the last dma-buf */
} fake;

static const struct range *range_of(unsigned long long at)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(ranges); i++)
		if (at - ranges[i].base < ranges[i].bytes)
			return &ranges[i];
	return NULL;
}

static int pointer_attribute(void *data, int attr, unsigned long long at)
{
	const struct range *range = range_of(at);
	int context;

	if (!range)
		return REFUSED;
	switch (attr) {
	case 1: /* context: memory of chunks belongs to none */
		*(void **)data = range->kind == PLAIN ? (void *)&context : NULL;
		return 0;
	case 2: /* memory type: of a device */
		*(unsigned int *)data = 2;
		return 0;
	case 9: /* ordinal */
		*(int *)data = 3;
		return 0;
	default: /* legacy IPC */
		*(int *)data = range->kind == PLAIN;
		return 0;
	}
}

static int address_range(unsigned long long *base, size_t *bytes, unsigned long long at)
{
	const struct range *range = range_of(at);

	if (!range)
		return REFUSED;
	*base = range->base;
	if (bytes)
		*bytes = range->bytes;
	return 0;
}

static int ipc_get(unsigned char *handle, unsigned long long at)
{
	memset(handle, (int)(at / MIB), 64);
	return 0;
}

static int retain_chunk(unsigned long long *handle, void *at)
{
	fake.chunks++;
	*handle = (uintptr_t)at;
	return 0;
}

static int release_chunk(unsigned long long handle)
{
	(void)handle;
	fake.chunks--;
	return 0;
}

static int export_chunk(void *fd, unsigned long long handle, int type, unsigned long long flags)
{
	cr_assert_eq(type, 1);
	cr_assert_eq(flags, 0);
	*(int *)fd = memfd_create("chunk", 0);
	return ftruncate(*(int *)fd, (off_t)range_of(handle)->bytes);
}

static int range_handle(void *fd, unsigned long long from, size_t bytes, int type,
			unsigned long long flags)
{
	cr_assert_eq(type, 1);
	cr_assert_eq(flags, 0);
	if (fake.refuse_dmabuf || from % 4096 || bytes % 4096)
		return REFUSED;
	fake.from = from;
	fake.bytes = bytes;
	*(int *)fd = memfd_create("dma-buf", 0);
	return 0;
}

static int device_get(int *device, int ordinal)
{
	*device = ordinal + 100;
	return 0;
}

static int device_uuid(unsigned char *uuid, int device)
{
	memset(uuid, device, 16);
	return 0;
}

static int device_attribute(int *value, int attr, int device)
{
	cr_assert_eq(attr, 124);
	cr_assert_eq(device, 103);
	*value = !fake.no_dmabufs;
	return 0;
}

static int ctx_push(void *ctx)
{
	cr_assert_not_null(ctx);
	fake.contexts++;
	return 0;
}

static int ctx_pop(void **ctx)
{
	(void)ctx;
	fake.contexts--;
	return 0;
}

static int error_name(int res, const char **name)
{
	*name = res == REFUSED ? "FAKE_ERROR_REFUSED" : "FAKE_ERROR";
	return 0;
}

static int unused(void)
{
	cr_assert(false, "not part of an export");
	return REFUSED;
}

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlsym(void *lib, const char *name);

void *__wrap_dlopen(const char *name, int flags)
{
	(void)flags;
	cr_assert_str_eq(name, "libcuda.so.1");
	return &fake;
}

void *__wrap_dlsym(void *lib, const char *name)
{
	static const struct {
		const char *name;
		void *call;
	} calls[] = {
		{ "cuPointerGetAttribute", (void *)pointer_attribute },
		{ "cuMemGetAddressRange_v2", (void *)address_range },
		{ "cuIpcGetMemHandle", (void *)ipc_get },
		{ "cuMemRetainAllocationHandle", (void *)retain_chunk },
		{ "cuMemRelease", (void *)release_chunk },
		{ "cuMemExportToShareableHandle", (void *)export_chunk },
		{ "cuMemGetHandleForAddressRange", (void *)range_handle },
		{ "cuDeviceGet", (void *)device_get },
		{ "cuDeviceGetUuid", (void *)device_uuid },
		{ "cuDeviceGetAttribute", (void *)device_attribute },
		{ "cuCtxPushCurrent_v2", (void *)ctx_push },
		{ "cuCtxPopCurrent_v2", (void *)ctx_pop },
		{ "cuGetErrorName", (void *)error_name },
	};

	cr_assert_eq(lib, &fake);
	if (fake.lacks_dmabuf && strcmp(name, "cuMemGetHandleForAddressRange") == 0)
		return NULL;
	for (size_t i = 0; i < KVP_ARRAY_SIZE(calls); i++)
		if (strcmp(calls[i].name, name) == 0)
			return calls[i].call;
	return (void *)unused;
}

static void nothing_left(void)
{
	cr_assert_eq(fake.contexts, 0);
	cr_assert_eq(fake.chunks, 0);
}

static bool is_open(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0;
}

/* The pool begins within a page of the host; the dma-buf has whole ones. */
Test(device, a_dmabuf_of_a_part_of_an_allocation)
{
	static struct kvpl_export out;
	char err[KVPL_DEVICE_ERR] = "";
	int fd;

	cr_assert_eq(kvpl_device_export(17 * MIB + 100, MIB, &out, err), 0, "%s", err);
	cr_assert_eq(out.n_chunks, 0);
	cr_assert_eq(out.offset, MIB + 100);
	cr_assert_eq(out.gpu[15], 103);
	cr_assert_eq(out.dmabuf, -1); /* only when asked for */
	kvpl_device_dmabuf(17 * MIB + 100, MIB, &out);
	cr_assert_geq(out.dmabuf, 0, "%s", out.dmabuf_reason);
	cr_assert_eq(fake.from, 17 * MIB);
	cr_assert_eq(fake.bytes, MIB + 4096);
	cr_assert_eq(out.dmabuf_bytes, MIB + 4096);
	cr_assert_eq(out.dmabuf_offset, 100);
	fd = out.dmabuf;
	kvpl_export_fini(&out);
	cr_assert_not(is_open(fd));
	nothing_left();
}

struct why {
	int *sign;
	const char *reason;
};

Test(device, no_dmabuf_is_no_failure)
{
	static struct kvpl_export out;
	const struct why whys[] = {
		{ &fake.no_dmabufs, "makes no dma-bufs" },
		{ &fake.refuse_dmabuf, "cuMemGetHandleForAddressRange: FAKE_ERROR_REFUSED" },
	};
	char err[KVPL_DEVICE_ERR] = "";

	for (size_t i = 0; i < KVP_ARRAY_SIZE(whys); i++) {
		*whys[i].sign = 1;
		cr_assert_eq(kvpl_device_export(16 * MIB, MIB, &out, err), 0, "%s", err);
		kvpl_device_dmabuf(16 * MIB, MIB, &out);
		cr_assert_eq(out.dmabuf, -1);
		cr_assert(strstr(out.dmabuf_reason, whys[i].reason), "%s", out.dmabuf_reason);
		kvpl_export_fini(&out);
		*whys[i].sign = 0;
	}
	nothing_left();
}

Test(device, a_driver_without_dmabufs_serves_all_the_same)
{
	static struct kvpl_export out;
	char err[KVPL_DEVICE_ERR] = "";

	fake.lacks_dmabuf = 1;
	cr_assert_eq(kvpl_device_export(16 * MIB, MIB, &out, err), 0, "%s", err);
	kvpl_device_dmabuf(16 * MIB, MIB, &out);
	cr_assert_eq(out.dmabuf, -1);
	cr_assert(strstr(out.dmabuf_reason, "lacks"), "%s", out.dmabuf_reason);
	nothing_left();
}

/* Chunks of a memory from anywhere in its first one; the dma-bufs of all behind all chunks. */
Test(device, fds_of_chunks_come_first)
{
	static struct kvpl_mems mems;
	const struct kvp_mem list[] = {
		{ .kind = KVP_MEM_DEVICE, .addr = 33 * MIB, .bytes = 4 * MIB },
		{ .kind = KVP_MEM_DEVICE, .addr = 16 * MIB, .bytes = 4 * MIB },
	};
	char err[KVPL_DEVICE_ERR] = "";
	int last;

	for (uint32_t dmabufs = 0; dmabufs < 2; dmabufs++) {
		cr_assert_eq(kvpl_mems_init(&mems, list, 2, dmabufs, err), 0, "%s", err);
		cr_assert_eq(mems.n_fds, 3 + 2 * dmabufs);
		cr_assert_eq(mems.list[0]->kind, KVP__MEMORY_KIND__MEMORY_CUDA_VMM);
		cr_assert_eq(mems.list[0]->n_chunk_bytes, 3);
		cr_assert_eq(mems.list[0]->offset, MIB);
		cr_assert_eq(mems.list[0]->dmabuf_bytes, dmabufs * 4 * MIB);
		cr_assert_eq(mems.list[1]->kind, KVP__MEMORY_KIND__MEMORY_CUDA_IPC);
		cr_assert_eq(mems.list[1]->dmabuf_bytes, dmabufs * 4 * MIB);
		for (size_t i = 0; i < mems.n_fds; i++) {
			struct stat st;

			cr_assert_eq(fstat(mems.fds[i], &st), 0);
			cr_assert_eq(st.st_size, i < 3 ? 2 * MIB : 0);
		}
		last = mems.fds[mems.n_fds - 1];
		kvpl_mems_fini(&mems);
		cr_assert_not(is_open(last));
		nothing_left();
	}
}

/* A refused memory takes what was exported before with it. */
Test(device, memory_that_is_none)
{
	static struct kvpl_mems mems;
	const struct kvp_mem list[] = {
		{ .kind = KVP_MEM_DEVICE, .addr = 32 * MIB, .bytes = 6 * MIB },
		{ .kind = KVP_MEM_DEVICE, .addr = 99 * MIB, .bytes = 6 * MIB },
	};
	char err[KVPL_DEVICE_ERR] = "";
	int next = dup(0);

	close(next);
	cr_assert_eq(kvpl_mems_init(&mems, list, 2, true, err), -EINVAL);
	cr_assert(strstr(err, "mems[1]: cuPointerGetAttribute: FAKE_ERROR_REFUSED"), "%s", err);
	cr_assert_not(is_open(next)); /* the first chunk's was that */
	nothing_left();
}
