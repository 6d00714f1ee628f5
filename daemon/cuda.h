/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The CUDA driver as a table of functions, loaded at run time: one build serves nodes with and
 * without a GPU. This list is the only place that names driver calls. Built without a CUDA toolkit,
 * loading always fails and says so.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef KVP_CUDA
#include <cuda.h>

/* clang-format off */
#define KVP_CUDA_CALLS(X) \
	X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) \
	X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetAttribute) \
	X(cuDeviceGetPCIBusId) X(cuDeviceCanAccessPeer) X(cuCtxEnablePeerAccess) \
	X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxSetCurrent) \
	X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel) \
	X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamWaitEvent) \
	X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) \
	X(cuMemAlloc) X(cuMemFree) X(cuMemGetInfo) X(cuMemHostAlloc) X(cuMemFreeHost) \
	X(cuMemsetD8Async) \
	X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) X(cuMemGetAddressRange) \
	X(cuMemImportFromShareableHandle) X(cuMemGetAllocationPropertiesFromHandle) \
	X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) \
	X(cuMemRelease) X(cuMemCreate) X(cuMemGetAllocationGranularity) X(cuMemcpyHtoD) X(cuMemcpyDtoH) \
	X(cuPointerGetAttribute) X(cuPointerSetAttribute)
/* NULL in older drivers. */
#define KVP_CUDA_LATER(X) \
	X(cuMemGetHandleForAddressRange) X(cuFlushGPUDirectRDMAWrites) X(cuLaunchKernelEx)
/* clang-format on */

struct kvp_cuda {
#define KVP_CUDA_FIELD(fn) __typeof__(&(fn)) fn;
	KVP_CUDA_CALLS(KVP_CUDA_FIELD)
	KVP_CUDA_LATER(KVP_CUDA_FIELD)
#undef KVP_CUDA_FIELD
	void *lib;
};

/*
 * A driver result as one of ours: 0; -ENOMEM; -ENODEV; -EINVAL; -EIO for a sticky error, after
 * which the process can use the GPU no more; -EREMOTEIO for others. Logs the failure with the
 * call's name.
 */
int kvp_cuda_check(const struct kvp_cuda *cuda, CUresult res, const char *call);
/* "CUDA_ERROR_..." */
const char *kvp_cuda_name(const struct kvp_cuda *cuda, CUresult res);
#else
struct kvp_cuda;
#endif

/*
 * The driver, loaded and initialised on first use and kept for the process; NULL when there is
 * none, with the reason in `err`. Never called by a daemon whose configuration names no GPU.
 */
const struct kvp_cuda *kvp_cuda_get(char *err, size_t err_bytes);
