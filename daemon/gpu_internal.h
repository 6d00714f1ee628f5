/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What gpu*.c share. Compiled with a CUDA toolkit only. */

#include "daemon/cuda.h"
#include "daemon/gpu.h"

#ifdef KVP_CUDA
const struct kvp_cuda *kvp_gpu_cuda(const struct kvp_gpu *gpu);
CUdevice kvp_gpu_device(const struct kvp_gpu *gpu);
CUcontext kvp_gpu_ctx(const struct kvp_gpu *gpu);
/* Copies by a launch of its own, and waits for it. Both addresses are the device's. */
int kvp_gpu_copy_now(struct kvp_gpu *gpu, uint64_t src, uint64_t dst, uint32_t bytes);
/* kvp_cuda_check(), and keeps the words for kvp_gpu_error(). */
int kvp_gpu_check(struct kvp_gpu *gpu, CUresult res, const char *call);
void kvp_gpu_traits_read(const struct kvp_cuda *cuda, CUdevice device, struct kvp_gpu_traits *out);
#endif
