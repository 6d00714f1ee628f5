/* SPDX-License-Identifier: Apache-2.0 */

/* Memory of the device for rings: what a NIC may reach, and what it takes that the device sees what
 * a NIC has written. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/gpu_internal.h"
#include "proto/util.h"

#ifdef KVP_CUDA

static int attribute(const struct kvp_cuda *cuda, CUdevice device, CUdevice_attribute which)
{
	int value = 0;

	/* A driver that does not know it has not got it. */
	return cuda->cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

void kvp_gpu_traits_read(const struct kvp_cuda *cuda, CUdevice device, struct kvp_gpu_traits *out)
{
	const int gdr = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
	const int options =
		attribute(cuda, device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);

	*out = (struct kvp_gpu_traits){
		.vmm = attribute(cuda, device,
				 CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
		.vmm_rdma = attribute(cuda, device, gdr),
		.rdma = attribute(cuda, device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
		.dmabuf = cuda->cuMemGetHandleForAddressRange &&
			  attribute(cuda, device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
		.ordering = attribute(cuda, device,
				      CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
		.can_flush = cuda->cuFlushGPUDirectRDMAWrites &&
			     (options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST),
		.overlap =
			cuda->cuLaunchKernelEx &&
			attribute(cuda, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 9,
	};
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* One physical allocation behind a range of its own; the mapping keeps it. */
static int alloc_vmm(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring)
{
	const struct kvp_cuda *cuda = kvp_gpu_cuda(gpu);
	const CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, .id = kvp_gpu_device(gpu) },
		.allocFlags.gpuDirectRDMACapable = kvp_gpu_traits(gpu)->vmm_rdma,
	};
	const CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle = 0;
	CUdeviceptr addr = 0;
	size_t unit = 1;
	int r = kvp_gpu_check(gpu,
			      cuda->cuMemGetAllocationGranularity(
				      &unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
			      "cuMemGetAllocationGranularity");

	if (r < 0)
		return r;
	ring->bytes = KVP_DIV_UP(ring->bytes, (uint64_t)unit) * unit;
	r = kvp_gpu_check(gpu, cuda->cuMemCreate(&handle, ring->bytes, &prop, 0), "cuMemCreate");
	if (r < 0)
		return r;
	r = kvp_gpu_check(gpu, cuda->cuMemAddressReserve(&addr, ring->bytes, 0, 0, 0),
			  "cuMemAddressReserve");
	if (r == 0) {
		ring->addr = addr;
		r = kvp_gpu_check(gpu, cuda->cuMemMap(addr, ring->bytes, 0, handle, 0), "cuMemMap");
		ring->mapped = r == 0;
	}
	(void)kvp_gpu_check(gpu, cuda->cuMemRelease(handle), "cuMemRelease"); /* logged */
	if (r == 0)
		r = kvp_gpu_check(gpu, cuda->cuMemSetAccess(addr, ring->bytes, &access, 1),
				  "cuMemSetAccess");
	return r;
}

/* What the peer memory interface of a NIC's driver can reach; copies of ours must not return before
 * the device has them. */
static int alloc_plain(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring)
{
	const struct kvp_cuda *cuda = kvp_gpu_cuda(gpu);
	unsigned int on = 1;
	CUdeviceptr addr = 0;
	int r = kvp_gpu_check(gpu, cuda->cuMemAlloc(&addr, ring->bytes), "cuMemAlloc");

	if (r < 0)
		return r;
	ring->addr = addr;
	return kvp_gpu_check(
		gpu, cuda->cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, addr),
		"cuPointerSetAttribute");
}

static bool is_rdma_capable(struct kvp_gpu *gpu, const struct kvp_gpu_ring *ring)
{
	unsigned int able = 0;

	if (!ring->vmm)
		return kvp_gpu_traits(gpu)->rdma;
	/* The flag of the allocation was only a wish. */
	return kvp_gpu_cuda(gpu)->cuPointerGetAttribute(
		       &able, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, ring->addr) ==
		       CUDA_SUCCESS &&
	       able;
}

static void export_dmabuf(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring)
{
	const struct kvp_cuda *cuda = kvp_gpu_cuda(gpu);
	CUresult res;
	int fd = -1;

	if (!kvp_gpu_traits(gpu)->dmabuf) {
		(void)snprintf(ring->dmabuf_reason, sizeof(ring->dmabuf_reason),
			       "the device or its driver makes no dma-bufs");
		return;
	}
	res = cuda->cuMemGetHandleForAddressRange(&fd, ring->addr, ring->bytes,
						  CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (res == CUDA_SUCCESS)
		ring->dmabuf = fd;
	else
		(void)snprintf(ring->dmabuf_reason, sizeof(ring->dmabuf_reason),
			       "cuMemGetHandleForAddressRange: %s", kvp_cuda_name(cuda, res));
}

int kvp_gpu_ring_alloc(struct kvp_gpu *gpu, bool vmm, uint64_t bytes, struct kvp_gpu_ring *out)
{
	struct kvp_gpu_ring ring = { .vmm = vmm, .dmabuf = -1 };
	int r;

	ring.bytes = KVP_ALIGN_UP(bytes, UINT64_C(65536)); /* whole pages of the host, too */
	r = vmm ? alloc_vmm(gpu, &ring) : alloc_plain(gpu, &ring);
	if (r < 0) {
		kvp_gpu_ring_free(gpu, &ring);
		return r;
	}
	ring.rdma = is_rdma_capable(gpu, &ring);
	export_dmabuf(gpu, &ring);
	*out = ring;
	return 0;
}

void kvp_gpu_ring_free(struct kvp_gpu *gpu, struct kvp_gpu_ring *ring)
{
	const struct kvp_cuda *cuda = kvp_gpu_cuda(gpu);

	kvp_closep(&ring->dmabuf); /* it pins the memory */
	if (ring->addr && !ring->vmm)
		(void)kvp_gpu_check(gpu, cuda->cuMemFree(ring->addr), "cuMemFree"); /* logged */
	if (ring->mapped)
		(void)kvp_gpu_check(gpu, cuda->cuMemUnmap(ring->addr, ring->bytes), "cuMemUnmap");
	if (ring->addr && ring->vmm)
		(void)kvp_gpu_check(gpu, cuda->cuMemAddressFree(ring->addr, ring->bytes),
				    "cuMemAddressFree");
	*ring = (struct kvp_gpu_ring){ .dmabuf = -1 };
}

/* ---- what comes from outside ----------------------------------------------------------------- */

int kvp_gpu_flush(struct kvp_gpu *gpu)
{
	const struct kvp_cuda *cuda = kvp_gpu_cuda(gpu);

	return kvp_gpu_check(
		gpu,
		cuda->cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
						 CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
		"cuFlushGPUDirectRDMAWrites");
}

#endif
