/* SPDX-License-Identifier: Apache-2.0 */
#include "client/mems.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int mems_fd(struct kvpl_mems *out, int fd, char *err)
{
	if (out->n_fds == KVP_LIMIT_FDS) {
		(void)snprintf(err, KVPL_DEVICE_ERR,
			       "the memories take more than %u fds: register the "
			       "pool in parts",
			       KVP_LIMIT_FDS);
		return -E2BIG;
	}
	out->fds[out->n_fds++] = fd;
	return 0;
}

/* They travel behind all other fds. Without one the pool is as good as without a NIC. */
static void mems_dmabufs(struct kvpl_mems *out, const struct kvp_mem *mems)
{
	for (size_t i = 0; i < out->n; i++) {
		struct kvpl_export *export = &out->exports[i];
		Kvp__Memory *memory = &out->memories[i];

		if (mems[i].kind != KVP_MEM_DEVICE)
			continue;
		if (out->n_fds == KVP_LIMIT_FDS)
			(void)snprintf(export->dmabuf_reason, sizeof(export->dmabuf_reason),
				       "no room for its fd among the %u of a packet",
				       KVP_LIMIT_FDS);
		else
			kvpl_device_dmabuf(mems[i].addr, mems[i].bytes, export);
		memory->dmabuf_reason = export->dmabuf_reason;
		if (export->dmabuf < 0)
			continue;
		memory->dmabuf_bytes = export->dmabuf_bytes;
		memory->dmabuf_offset = export->dmabuf_offset;
		out->fds[out->n_fds++] = export->dmabuf;
	}
}

/* Exported, described; the chunks' fds stay the export's. */
static int mems_device(struct kvpl_mems *out, const struct kvp_mem *mem, char *err)
{
	struct kvpl_export *export = &out->exports[out->n];
	Kvp__Memory *memory = &out->memories[out->n];
	int r = kvpl_device_export(mem->addr, mem->bytes, export, err);

	if (r)
		return r;
	memory->gpu.data = export->gpu;
	memory->gpu.len = sizeof(export->gpu);
	memory->offset = export->offset;
	memory->bytes = mem->bytes;
	if (export->n_chunks == 0) {
		memory->kind = KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
		memory->handle.data = export->handle;
		memory->handle.len = sizeof(export->handle);
		return 0;
	}
	memory->kind = KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
	memory->chunk_bytes = export->chunk_bytes;
	memory->n_chunk_bytes = export->n_chunks;
	for (uint32_t i = 0; r == 0 && i < export->n_chunks; i++)
		r = mems_fd(out, export->fds[i], err);
	return r;
}

static int mems_one(struct kvpl_mems *out, const struct kvp_mem *mem, char *err)
{
	Kvp__Memory *memory = &out->memories[out->n];

	kvp__memory__init(memory);
	out->list[out->n] = memory;
	if (mem->kind == KVP_MEM_FD)
		return mems_fd(out, mem->fd, err);
	if (mem->kind == KVP_MEM_DEVICE && mem->bytes > 0)
		return mems_device(out, mem, err);
	(void)snprintf(err, KVPL_DEVICE_ERR, "kind %u, bytes %llu", mem->kind,
		       (unsigned long long)mem->bytes);
	return -EINVAL;
}

int kvpl_mems_init(struct kvpl_mems *out, const struct kvp_mem *mems, uint32_t n, bool dmabufs,
		   char *err)
{
	char why[KVPL_DEVICE_ERR] = "";
	int r = 0;

	memset(out, 0, sizeof(*out));
	if (n < 1 || n > KVPL_MEMS_MAX) {
		(void)snprintf(err, KVPL_DEVICE_ERR, "pool.n_mems is %u, allowed 1 to %u", n,
			       KVPL_MEMS_MAX);
		return -EINVAL;
	}
	out->exports = calloc(n, sizeof(*out->exports));
	if (!out->exports)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++)
		out->exports[i].dmabuf = -1;
	for (uint32_t i = 0; r == 0 && i < n; i++) {
		r = mems_one(out, &mems[i], why);
		out->n++; /* the failed one too: its export may hold fds */
	}
	if (r) {
		(void)snprintf(err, KVPL_DEVICE_ERR, "mems[%zu]: %.140s", out->n - 1, why);
		kvpl_mems_fini(out);
	} else if (dmabufs) {
		mems_dmabufs(out, mems);
	}
	return r;
}

void kvpl_mems_fini(struct kvpl_mems *out)
{
	for (size_t i = 0; out->exports && i < out->n; i++)
		kvpl_export_fini(&out->exports[i]);
	free(out->exports);
	memset(out, 0, sizeof(*out));
}
