/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gpu.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/cuda.h"
#include "daemon/gpu_internal.h"
#include "proto/util.h"

#ifdef KVP_CUDA

#define BATCHES 8u /* launches that may run at a time */
#define MAX_ENTRIES                                                                   \
	512u /* of a batch, and its runs; what is too much for a launch takes several \
	      */
#define MAX_RUNS KVP_JOBS_RUNS
#define KVP_GPU_NOWHERE UINT64_C(0x1000) /* no memory has such an address */

extern const unsigned char kvp_move_image[]; /* fat binary, embedded by the build */

static const char *const kernels[] = {
#define KERNEL_NAME(name, n_entries, n_runs) #name,
	KVP_MOVE_KERNELS(KERNEL_NAME)
};

/* Tables of one launch, or of several; reused when its event has passed. */
struct batch {
	struct kvp_jobs jobs;
	CUevent done;
	uint64_t ticket; /* 0: not launched */
};

struct kvp_gpu {
	const struct kvp_cuda *cuda; /* borrowed, the process's */
	CUdevice device;
	CUcontext ctx; /* primary, held */
	CUstream stream;
	CUevent written; /* the newest of kvp_gpu_write(), on the default stream */
	CUmodule module;
	CUfunction kernels[KVP_MOVE_SIZES];
	struct batch batches[BATCHES]; /* used in turn */
	uint64_t launched, finished;   /* tickets */
	struct kvp_gpu_traits traits;
	struct kvp_gpu_stats stats;
	union kvp_move_params params; /* scratch of a launch: too large for comfort on the stack */
	char uuid[KVP_GPU_UUID], name[128];
	char error[96];
#ifdef KVP_TEST
	bool wild;
#endif
};

/* Keeps what a room's end will be told. */
static int check(struct kvp_gpu *gpu, CUresult res, const char *call)
{
	if (res != CUDA_SUCCESS)
		(void)snprintf(gpu->error, sizeof(gpu->error), "%s: %s", call,
			       kvp_cuda_name(gpu->cuda, res));
	return kvp_cuda_check(gpu->cuda, res, call);
}

int kvp_gpu_check(struct kvp_gpu *gpu, CUresult res, const char *call)
{
	return check(gpu, res, call);
}

int kvp_gpu_list(char uuids[][KVP_GPU_UUID], char *err, size_t err_bytes)
{
	const struct kvp_cuda *cuda = kvp_cuda_get(err, err_bytes);
	CUdevice device;
	CUuuid uuid;
	int n = 0;

	if (!cuda)
		return -ENODEV;
	if (kvp_cuda_check(cuda, cuda->cuDeviceGetCount(&n), "cuDeviceGetCount") < 0)
		n = 0;
	n = KVP_MIN(n, (int)KVP_GPU_MAX);
	for (int i = 0; i < n; i++) {
		int r = kvp_cuda_check(cuda, cuda->cuDeviceGet(&device, i), "cuDeviceGet");

		if (r == 0)
			r = kvp_cuda_check(cuda, cuda->cuDeviceGetUuid(&uuid, device),
					   "cuDeviceGetUuid");
		if (r < 0) {
			(void)snprintf(err, err_bytes, "GPU %d has no UUID: %s", i, strerror(-r));
			return r;
		}
		kvp_gpu_uuid_text(uuids[i], (const uint8_t *)uuid.bytes);
	}
	return n;
}

/* Ordinals differ between processes, so that the configuration and clients name UUIDs. */
static int find_device(struct kvp_gpu *gpu, const char *name, char *err, size_t err_bytes)
{
	int n = 0;
	int r = check(gpu, gpu->cuda->cuDeviceGetCount(&n), "cuDeviceGetCount");

	for (int i = 0; r == 0 && i < n; i++) {
		CUuuid uuid;
		char ordinal[16];

		r = check(gpu, gpu->cuda->cuDeviceGet(&gpu->device, i), "cuDeviceGet");
		if (r == 0)
			r = check(gpu, gpu->cuda->cuDeviceGetUuid(&uuid, gpu->device),
				  "cuDeviceGetUuid");
		if (r)
			break;
		kvp_gpu_uuid_text(gpu->uuid, (const uint8_t *)uuid.bytes);
		(void)snprintf(ordinal, sizeof(ordinal), "%d", i);
		if (!strcmp(name, gpu->uuid) || !strcmp(name, ordinal))
			return check(gpu,
				     gpu->cuda->cuDeviceGetName(gpu->name, (int)sizeof(gpu->name),
								gpu->device),
				     "cuDeviceGetName");
	}
	(void)snprintf(err, err_bytes, "no GPU %s among the %d that the driver lists", name, n);
	return r ? r : -ENODEV;
}

static int open_stream(struct kvp_gpu *gpu)
{
	int r = check(gpu, gpu->cuda->cuDevicePrimaryCtxRetain(&gpu->ctx, gpu->device),
		      "cuDevicePrimaryCtxRetain");

	if (r == 0)
		r = check(gpu, gpu->cuda->cuCtxSetCurrent(gpu->ctx), "cuCtxSetCurrent");
	/* The highest priority: a gather is short and an engine's kernels are many. */
	if (r == 0)
		r = check(gpu,
			  gpu->cuda->cuStreamCreateWithPriority(&gpu->stream,
								CU_STREAM_NON_BLOCKING, -5),
			  "cuStreamCreateWithPriority");
	if (r == 0)
		r = check(gpu, gpu->cuda->cuEventCreate(&gpu->written, CU_EVENT_DISABLE_TIMING),
			  "cuEventCreate");
	if (r == 0)
		r = check(gpu, gpu->cuda->cuModuleLoadData(&gpu->module, kvp_move_image),
			  "cuModuleLoadData");
	for (int i = 0; r == 0 && i < KVP_MOVE_SIZES; i++)
		r = check(gpu,
			  gpu->cuda->cuModuleGetFunction(&gpu->kernels[i], gpu->module, kernels[i]),
			  "cuModuleGetFunction");
	return r;
}

int kvp_gpu_host_alloc(struct kvp_gpu *gpu, uint64_t bytes, void **out)
{
	return check(gpu,
		     gpu->cuda->cuMemHostAlloc(
			     out, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
		     "cuMemHostAlloc");
}

void kvp_gpu_host_free(struct kvp_gpu *gpu, void *host)
{
	if (host)
		(void)check(gpu, gpu->cuda->cuMemFreeHost(host), "cuMemFreeHost"); /* logged */
}

static int batch_init(struct kvp_gpu *gpu, struct batch *batch)
{
	batch->jobs.max_entries = MAX_ENTRIES;
	batch->jobs.max_runs = MAX_RUNS;
	batch->jobs.entries = calloc(MAX_ENTRIES, sizeof(*batch->jobs.entries));
	batch->jobs.runs = calloc(MAX_RUNS, sizeof(*batch->jobs.runs));
	if (!batch->jobs.entries || !batch->jobs.runs)
		return -ENOMEM;
	return check(gpu, gpu->cuda->cuEventCreate(&batch->done, CU_EVENT_DISABLE_TIMING),
		     "cuEventCreate");
}

static void batch_fini(struct kvp_gpu *gpu, struct batch *batch)
{
	if (batch->done)
		(void)check(gpu, gpu->cuda->cuEventDestroy(batch->done), "cuEventDestroy");
	free(batch->jobs.runs);
	free(batch->jobs.entries);
}

void kvp_gpu_close(struct kvp_gpu *gpu)
{
	if (!gpu)
		return;

	if (gpu->stream) {
		(void)kvp_gpu_drain(gpu); /* logged; nothing may run on what is freed next */
		for (uint32_t i = 0; i < BATCHES; i++)
			batch_fini(gpu, &gpu->batches[i]);
		if (gpu->written)
			(void)check(gpu, gpu->cuda->cuEventDestroy(gpu->written), "cuEventDestroy");
		(void)check(gpu, gpu->cuda->cuStreamDestroy(gpu->stream), "cuStreamDestroy");
	}
	if (gpu->module)
		(void)check(gpu, gpu->cuda->cuModuleUnload(gpu->module), "cuModuleUnload");
	if (gpu->ctx)
		(void)check(gpu, gpu->cuda->cuDevicePrimaryCtxRelease(gpu->device),
			    "cuDevicePrimaryCtxRelease");
	free(gpu);
}

static void closep(struct kvp_gpu **gpu)
{
	kvp_gpu_close(*gpu);
}

int kvp_gpu_open(struct kvp_gpu **out, const char *name, char *err, size_t err_bytes)
{
	KVP_CLEANUP(closep) struct kvp_gpu *gpu = calloc(1, sizeof(*gpu));
	int r;

	if (!gpu) {
		(void)snprintf(err, err_bytes, "out of memory");
		return -ENOMEM;
	}
	gpu->cuda = kvp_cuda_get(err, err_bytes);
	if (!gpu->cuda)
		return -ENODEV;
	r = find_device(gpu, name, err, err_bytes);
	if (r)
		return r;
	kvp_gpu_traits_read(gpu->cuda, gpu->device, &gpu->traits);
	r = open_stream(gpu);
	for (uint32_t i = 0; r == 0 && i < BATCHES; i++)
		r = batch_init(gpu, &gpu->batches[i]);
	if (r) {
		(void)snprintf(err, err_bytes, "GPU %s (%s) cannot be opened: %s", gpu->uuid,
			       gpu->name, gpu->error[0] ? gpu->error : strerror(-r));
		return r;
	}
	*out = KVP_TAKE(gpu);
	return 0;
}

const struct kvp_cuda *kvp_gpu_cuda(const struct kvp_gpu *gpu)
{
	return gpu->cuda;
}

CUdevice kvp_gpu_device(const struct kvp_gpu *gpu)
{
	return gpu->device;
}

CUcontext kvp_gpu_ctx(const struct kvp_gpu *gpu)
{
	return gpu->ctx;
}

const struct kvp_gpu_traits *kvp_gpu_traits(const struct kvp_gpu *gpu)
{
	return &gpu->traits;
}

const char *kvp_gpu_uuid(const struct kvp_gpu *gpu)
{
	return gpu->uuid;
}

const char *kvp_gpu_name(const struct kvp_gpu *gpu)
{
	return gpu->name;
}

void kvp_gpu_pci(const struct kvp_gpu *gpu, char out[KVP_GPU_PCI])
{
	if (gpu->cuda->cuDeviceGetPCIBusId(out, (int)KVP_GPU_PCI, gpu->device) != CUDA_SUCCESS)
		out[0] = '\0';
	for (char *p = out; *p; p++)
		*p = (char)tolower((unsigned char)*p);
}

const struct kvp_gpu_stats *kvp_gpu_stats(const struct kvp_gpu *gpu)
{
	return &gpu->stats;
}

static struct batch *next_batch(struct kvp_gpu *gpu)
{
	return &gpu->batches[gpu->launched % BATCHES];
}

struct kvp_jobs *kvp_gpu_jobs(struct kvp_gpu *gpu)
{
	struct batch *batch = next_batch(gpu);

	if (batch->ticket > gpu->finished) {
		gpu->stats.full++;
		return NULL;
	}
	if (batch->ticket) {
		kvp_jobs_reset(&batch->jobs);
		batch->ticket = 0;
	}
	return &batch->jobs;
}

/* What follows a launch of the same tables need not wait for its last blocks. */
static int launch_next(struct kvp_gpu *gpu, enum kvp_move_size size)
{
	const struct kvp_move_head *head = &gpu->params.head;
	CUlaunchAttribute overlap = {
		.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
		.value.programmaticStreamSerializationAllowed = 1,
	};
	const CUlaunchConfig config = {
		.gridDimX = head->pieces,
		.gridDimY = head->widest,
		.gridDimZ = head->n_entries / head->pieces,
		.blockDimX = KVP_MOVE_THREADS,
		.blockDimY = 1,
		.blockDimZ = 1,
		.hStream = gpu->stream,
		.attrs = &overlap,
		.numAttrs = 1,
	};
	void *params[] = { &gpu->params };

	return check(gpu, gpu->cuda->cuLaunchKernelEx(&config, gpu->kernels[size], params, NULL),
		     "cuLaunchKernelEx(kvp_move)");
}

static int launch_params(struct kvp_gpu *gpu, enum kvp_move_size size, bool first)
{
	const struct kvp_move_head *head = &gpu->params.head;
	void *params[] = { &gpu->params };

#ifdef KVP_TEST
	if (gpu->wild)
		gpu->params.small.entries[0].src = KVP_GPU_NOWHERE; /* as in all sizes */
#endif
	gpu->stats.launches++;
	if (!first && gpu->traits.overlap)
		return launch_next(gpu, size);
	return check(gpu,
		     gpu->cuda->cuLaunchKernel(gpu->kernels[size], head->pieces, head->widest,
					       head->n_entries / head->pieces, KVP_MOVE_THREADS, 1,
					       1, 0, gpu->stream, params, NULL),
		     "cuLaunchKernel(kvp_move)");
}

int kvp_gpu_launch(struct kvp_gpu *gpu, uint64_t *ticket)
{
	struct batch *batch = next_batch(gpu);
	struct kvp_jobs_cut cut = { 0 };
	enum kvp_move_size size;
	bool first = true;
	int r = 0;

	if (batch->ticket || batch->jobs.n_entries == 0) {
		*ticket = gpu->launched;
		return 0;
	}
	while (r == 0 && kvp_jobs_params(&batch->jobs, &cut, &gpu->params, &size)) {
		if (gpu->params.head.widest == 0) /* none has rows */
			continue;
		r = launch_params(gpu, size, first);
		first = false;
	}
	if (r == 0)
		r = check(gpu, gpu->cuda->cuEventRecord(batch->done, gpu->stream), "cuEventRecord");
	if (r) {
		/* A part of it may run; nobody has a ticket for that. */
		int sync = gpu->cuda->cuStreamSynchronize(gpu->stream) == CUDA_SUCCESS ? 0 : -EIO;

		kvp_jobs_reset(&batch->jobs);
		return sync ? sync : r;
	}
	gpu->stats.runs += batch->jobs.n_runs;
	gpu->stats.bytes += batch->jobs.bytes;
	batch->ticket = ++gpu->launched;
	*ticket = gpu->launched;
	return 0;
}

int kvp_gpu_copy_now(struct kvp_gpu *gpu, uint64_t src, uint64_t dst, uint32_t bytes)
{
	struct kvp_move_entry entries[2] = { 0 };
	struct kvp_move_run runs[8] = { 0 };
	struct kvp_jobs jobs = {
		.entries = entries,
		.runs = runs,
		.max_entries = KVP_ARRAY_SIZE(entries),
		.max_runs = KVP_ARRAY_SIZE(runs),
	};
	struct kvp_jobs_cut cut = { 0 };
	enum kvp_move_size size;
	int r = kvp_jobs_bytes(&jobs, src, dst, bytes);

	if (r == 0 && kvp_jobs_params(&jobs, &cut, &gpu->params, &size))
		r = launch_params(gpu, size, true);
	if (r == 0)
		r = check(gpu, gpu->cuda->cuStreamSynchronize(gpu->stream), "cuStreamSynchronize");
	return r;
}

/*
 * From pageable memory such a copy returns when the driver has taken the bytes; what brings them to
 * their place belongs to the default stream, with which ours has no order. Where the driver waits
 * for it (plain memory that is marked so), this costs nothing.
 */
int kvp_gpu_write(struct kvp_gpu *gpu, uint64_t addr, const void *from, uint64_t bytes)
{
	int r = check(gpu, gpu->cuda->cuMemcpyHtoD(addr, from, bytes), "cuMemcpyHtoD");

	if (r == 0)
		r = check(gpu, gpu->cuda->cuEventRecord(gpu->written, NULL), "cuEventRecord");
	if (r == 0)
		r = check(gpu, gpu->cuda->cuStreamWaitEvent(gpu->stream, gpu->written, 0),
			  "cuStreamWaitEvent");
	return r;
}

#ifdef KVP_TEST
void kvp_gpu_wild(struct kvp_gpu *gpu, bool on)
{
	gpu->wild = on;
}
#endif

uint64_t kvp_gpu_next(const struct kvp_gpu *gpu)
{
	return gpu->launched + 1;
}

const char *kvp_gpu_error(const struct kvp_gpu *gpu)
{
	return gpu->error;
}

int kvp_gpu_poll(struct kvp_gpu *gpu, uint64_t *ticket)
{
	while (gpu->finished < gpu->launched) {
		const struct batch *batch = &gpu->batches[gpu->finished % BATCHES];
		CUresult res = gpu->cuda->cuEventQuery(batch->done);

		if (res == CUDA_ERROR_NOT_READY)
			break;
		if (res != CUDA_SUCCESS)
			return check(gpu, res, "cuEventQuery");
		gpu->finished++;
	}
	*ticket = gpu->finished;
	return 0;
}

int kvp_gpu_drain(struct kvp_gpu *gpu)
{
	int r = check(gpu, gpu->cuda->cuStreamSynchronize(gpu->stream), "cuStreamSynchronize");

	if (r == 0)
		gpu->finished = gpu->launched;
	return r;
}

const char *kvp_gpu_build(void)
{
	return "kernels for sm_80, sm_90, sm_100 and later; the driver is loaded when "
	       "gpu.devices names a GPU";
}

#endif
