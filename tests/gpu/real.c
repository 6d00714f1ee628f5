/* SPDX-License-Identifier: Apache-2.0 */

/* Gives the lanes of the rig the first GPU, and that GPU the memory of the rig's pools. */

#include <cuda.h>

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
