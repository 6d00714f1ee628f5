/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gives the lanes of the rig the first GPU, and that GPU the memory of the rig's pools. Two lanes
 * of three get a transport that sends from the GPU's memory, so that their rings lie there: UCX,
 * given a copy.
 */

#include <criterion/criterion.h>
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>

#include "tests/support_lane.h"

const char *lt_gpu = "0";

/* The context that lanes use, too. */
static void bind(void)
{
	CUdevice device;
	CUcontext ctx;

	LT_REQUIRE(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS);
	LT_REQUIRE(cuDevicePrimaryCtxRetain(&ctx, device) == CUDA_SUCCESS); /* for good */
	LT_REQUIRE(cuCtxSetCurrent(ctx) == CUDA_SUCCESS);
}

void lt_gpu_register(void *mem, uint64_t bytes)
{
	CUdeviceptr at = 0;

	bind();
	LT_REQUIRE(cuMemHostRegister(mem, bytes,
				     CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE) ==
		   CUDA_SUCCESS);
	LT_REQUIRE(cuMemHostGetDevicePointer(&at, mem, 0) == CUDA_SUCCESS);
	LT_REQUIRE(at == (CUdeviceptr)(uintptr_t)mem, "the GPU has it elsewhere");
}

void lt_gpu_unregister(void *mem)
{
	LT_REQUIRE(cuMemHostUnregister(mem) == CUDA_SUCCESS);
}

/* ---- a transport that sends from the device ---------------------------------------------------
 */

#define RINGS_MAX 64u

/* A ring that some lane's transport was asked about, and where its slots are copied to be sent. */
static struct ring {
	uint64_t base, bytes;
	uint8_t *copy; /* owned, until the program ends */
} rings[RINGS_MAX];
static uint32_t n_rings;
static pthread_mutex_t rings_lock = PTHREAD_MUTEX_INITIALIZER;

static struct kvp_net_ops device_ops;

static int device_device(struct kvp_net *net, const struct kvp_net_memory *memory,
			 const char **word, char *err, size_t err_bytes)
{
	struct ring ring = { 0 };

	(void)net;
	(void)err;
	(void)err_bytes;
	*word = "copied";
	if (!memory)
		return 0;
	ring.base = (uintptr_t)memory->base;
	ring.bytes = memory->stride * memory->n;
	ring.copy = malloc(ring.bytes);
	LT_REQUIRE(ring.copy && memory->device);
	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	LT_REQUIRE(n_rings < RINGS_MAX);
	rings[n_rings++] = ring;
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
	return 0;
}

/* A slot is copied when it is sent; it is not reused before that has ended. The newest ring counts:
 * addresses come again. */
static const void *copied(const void *at, size_t bytes)
{
	const void *to = at;

	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	for (uint32_t i = n_rings; i-- > 0 && to == at;) {
		uint64_t skip = (uintptr_t)at - rings[i].base;

		if (skip >= rings[i].bytes)
			continue;
		to = rings[i].copy + skip;
		LT_REQUIRE(cuMemcpyDtoH(rings[i].copy + skip, (uintptr_t)at, bytes) ==
			   CUDA_SUCCESS);
	}
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
	return to;
}

static int device_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr,
		       size_t hdr_bytes, const void *payload, size_t bytes, void *req)
{
	const void *from = payload ? copied(payload, bytes) : NULL;

	return kvp_net_ucx.send(net, ep, hdr, hdr_bytes, from, bytes, req);
}

static void make_ops(void)
{
	device_ops = kvp_net_ucx;
	device_ops.device = device_device;
	device_ops.send = device_send;
}

/* Which lanes, differs from test to test. */
const struct kvp_net_ops *lt_gpu_net(const struct kvp_net_ops *net)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	static unsigned n;

	LT_REQUIRE(pthread_once(&once, make_ops) == 0);
	if (n == 0)
		for (const char *c = criterion_current_test->name; *c; c++)
			n += (unsigned char)*c;
	return n++ % 3 ? &device_ops : net;
}
