/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>

#include "daemon/log.h"

#ifdef KVP_CUDA

static struct kvp_cuda table;
static bool loaded;
static char load_err[160];
static pthread_once_t once = PTHREAD_ONCE_INIT;

const char *kvp_cuda_name(const struct kvp_cuda *cuda, CUresult res)
{
	const char *name = NULL;

	if (cuda->cuGetErrorName(res, &name) != CUDA_SUCCESS || !name)
		return "unknown CUDA error";
	return name;
}

/* After these the context, and with it every GPU use of the process, is lost. */
static bool is_sticky(CUresult res)
{
	switch (res) {
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case CUDA_ERROR_ASSERT:
	case CUDA_ERROR_HARDWARE_STACK_ERROR:
	case CUDA_ERROR_ILLEGAL_INSTRUCTION:
	case CUDA_ERROR_MISALIGNED_ADDRESS:
	case CUDA_ERROR_INVALID_ADDRESS_SPACE:
	case CUDA_ERROR_INVALID_PC:
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_EXTERNAL_DEVICE:
		return true;
	default:
		return false;
	}
}

static int to_errno(CUresult res)
{
	if (is_sticky(res))
		return -EIO;
	switch (res) {
	case CUDA_SUCCESS:
		return 0;
	case CUDA_ERROR_OUT_OF_MEMORY:
		return -ENOMEM;
	case CUDA_ERROR_NO_DEVICE:
	case CUDA_ERROR_INVALID_DEVICE:
	case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
		return -ENODEV;
	case CUDA_ERROR_INVALID_VALUE:
	case CUDA_ERROR_INVALID_HANDLE:
		return -EINVAL;
	default:
		return -EREMOTEIO;
	}
}

int kvp_cuda_check(const struct kvp_cuda *cuda, CUresult res, const char *call)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(10, 10); /* handles are clients' */

	if (res != CUDA_SUCCESS)
		kvp_log_limited(&limit, KVP_LOG_WARNING, "%s failed: %s", call,
				kvp_cuda_name(cuda, res));
	return to_errno(res);
}

/* Names are looked up as cuda.h maps them: cuMemAlloc is cuMemAlloc_v2, and so on. */
static bool load_symbols(void)
{
#define LOAD_NAME(fn) #fn
#define LOAD(fn)                                                                                 \
	*(void **)&table.fn = dlsym(table.lib, LOAD_NAME(fn));                                   \
	if (!table.fn) {                                                                         \
		(void)snprintf(load_err, sizeof(load_err), "the driver lacks %s, it is too old", \
			       LOAD_NAME(fn));                                                   \
		return false;                                                                    \
	}
	KVP_CUDA_CALLS(LOAD)
#undef LOAD
#define LOAD(fn) *(void **)&table.fn = dlsym(table.lib, LOAD_NAME(fn));
	KVP_CUDA_LATER(LOAD)
#undef LOAD
#undef LOAD_NAME
	return true;
}

static void load(void)
{
	int n = 0;
	CUresult res;

	table.lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!table.lib) {
		(void)snprintf(load_err, sizeof(load_err),
			       "no CUDA driver: libcuda.so.1 not found");
		return;
	}
	if (!load_symbols())
		return;
	res = table.cuInit(0);
	if (res == CUDA_SUCCESS)
		res = table.cuDeviceGetCount(&n);
	if (res != CUDA_SUCCESS || n == 0) {
		(void)snprintf(load_err, sizeof(load_err), "no CUDA device: %s",
			       res == CUDA_SUCCESS ? "the driver lists none"
						   : kvp_cuda_name(&table, res));
		return;
	}
	loaded = true;
}

const struct kvp_cuda *kvp_cuda_get(char *err, size_t err_bytes)
{
	(void)pthread_once(&once, load);
	if (loaded)
		return &table;
	(void)snprintf(err, err_bytes, "%s", load_err);
	return NULL;
}

#else

const struct kvp_cuda *kvp_cuda_get(char *err, size_t err_bytes)
{
	(void)snprintf(err, err_bytes, "built without CUDA");
	return NULL;
}

#endif
