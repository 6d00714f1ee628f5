/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_gpu.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu.h"
#include "daemon/gpu_import.h"
#include "proto/util.h"
#include "tests/support_lane.h"

#define BATCHES 4u
#define ENTRIES 512u
#define RUNS 4096u /* few: pieces of the tests fill more than one launch */
#define LATE_NS 150000u
#define OLD_BYTE 0x7e /* what a ring is full of at first */

_Atomic int fake_gpu_fail_launch, fake_gpu_fail_poll, fake_gpu_stopped, fake_gpu_launches;
_Atomic int fake_gpu_no_peer;
_Atomic int fake_gpu_imports, fake_gpu_max_runs = RUNS;
_Atomic uint64_t fake_gpu_device_bytes = UINT64_MAX, fake_gpu_host_bytes = UINT64_MAX;
_Atomic int fake_gpu_rings, fake_gpu_can_flush, fake_gpu_flushes;
_Atomic int fake_gpu_ordering, fake_gpu_fail_flush, fake_gpu_no_dmabuf;
_Atomic int fake_gpu_import_fd = -1;
const char *lt_gpu = "GPU-fake";

struct batch {
	struct kvp_jobs jobs;
	uint64_t ticket, due_ns;
};

/* A ring's memory: the device's side of it can only be touched while a launch runs. */
struct ring {
	uint8_t *device, *mirror;
	uint64_t bytes;
	struct kvp_gpu *gpu;
	struct ring *next;
};

/* Of all GPUs: the transport of any lane looks there. */
static struct ring *rings;
static pthread_mutex_t rings_lock = PTHREAD_MUTEX_INITIALIZER;

struct kvp_gpu {
	struct batch batches[BATCHES];
	uint64_t launched, finished;
	uint64_t seed;
	char name[KVP_GPU_UUID];
	bool dead;
};

/* Counts down to the failure that a test asked for. */
static bool fails(_Atomic int *after)
{
	int n = atomic_load(after);

	return n > 0 && atomic_fetch_sub(after, 1) == 1;
}

int kvp_gpu_list(char uuids[][KVP_GPU_UUID], char *err, size_t err_bytes)
{
	(void)err;
	(void)err_bytes;
	(void)snprintf(uuids[0], KVP_GPU_UUID, "GPU-fake");
	return 1;
}

const char *kvp_gpu_build(void)
{
	return "fake";
}

int kvp_gpu_open(struct kvp_gpu **out, const char *name, char *err, size_t err_bytes)
{
	struct kvp_gpu *gpu = calloc(1, sizeof(*gpu));

	(void)err;
	(void)err_bytes;
	LT_REQUIRE(gpu);
	for (uint32_t i = 0; i < BATCHES; i++) {
		struct kvp_jobs *jobs = &gpu->batches[i].jobs;

		jobs->entries = calloc(ENTRIES, sizeof(*jobs->entries));
		jobs->runs = calloc(RUNS, sizeof(*jobs->runs));
		LT_REQUIRE(jobs->entries && jobs->runs);
		jobs->max_entries = ENTRIES;
		jobs->max_runs = RUNS;
	}
	(void)snprintf(gpu->name, sizeof(gpu->name), "%s", name);
	*out = gpu;
	return 0;
}

void kvp_gpu_close(struct kvp_gpu *gpu)
{
	if (!gpu)
		return;
	for (uint32_t i = 0; i < BATCHES; i++) {
		free(gpu->batches[i].jobs.entries);
		free(gpu->batches[i].jobs.runs);
	}
	free(gpu);
}

void kvp_gpu_pci(const struct kvp_gpu *gpu, char out[KVP_GPU_PCI])
{
	(void)gpu;
	out[0] = '\0';
}

const char *kvp_gpu_uuid(const struct kvp_gpu *gpu)
{
	return gpu->name;
}

const char *kvp_gpu_name(const struct kvp_gpu *gpu)
{
	(void)gpu;
	return "fake GPU";
}

const char *kvp_gpu_error(const struct kvp_gpu *gpu)
{
	return gpu->dead ? "cuEventQuery: FAKE_ERROR_ILLEGAL_ADDRESS"
			 : "cuLaunchKernel: FAKE_ERROR_OUT_OF_RESOURCES";
}

/* As a mapping: what uses it after the free crashes. The size lies in front, on its own page. */
int kvp_gpu_host_alloc(struct kvp_gpu *gpu, uint64_t bytes, void **out)
{
	uint64_t *base = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)gpu;
	LT_REQUIRE(base != MAP_FAILED);
	if (bytes > atomic_load(&fake_gpu_host_bytes)) {
		LT_REQUIRE(munmap(base, bytes + 4096) == 0);
		return -ENOMEM;
	}
	*base = bytes + 4096;
	*out = (char *)base + 4096;
	return 0;
}

void kvp_gpu_host_free(struct kvp_gpu *gpu, void *host)
{
	uint64_t *base = (uint64_t *)(void *)((char *)host - 4096);

	(void)gpu;
	LT_REQUIRE(munmap(base, *base) == 0);
}

/* ---- memory of the device -------------------------------------------------------------------- */

const struct kvp_gpu_traits *kvp_gpu_traits(const struct kvp_gpu *gpu)
{
	static struct kvp_gpu_traits traits = { .vmm = true, .vmm_rdma = true, .rdma = true };

	(void)gpu;
	traits.can_flush = atomic_load(&fake_gpu_can_flush);
	traits.ordering = atomic_load(&fake_gpu_ordering);
	return &traits;
}

int kvp_gpu_ring_alloc(struct kvp_gpu *gpu, bool vmm, uint64_t bytes, struct kvp_gpu_ring *out)
{
	struct ring *ring = calloc(1, sizeof(*ring));
	int fd = memfd_create("ring", 0);

	LT_REQUIRE(ring && fd >= 0);
	if (bytes > atomic_load(&fake_gpu_device_bytes)) {
		free(ring);
		close(fd);
		return -ENOMEM;
	}
	ring->bytes = KVP_ALIGN_UP(bytes, UINT64_C(65536));
	ring->gpu = gpu;
	LT_REQUIRE(ftruncate(fd, (off_t)ring->bytes) == 0);
	ring->device = mmap(NULL, ring->bytes, PROT_NONE, MAP_SHARED, fd, 0);
	ring->mirror = mmap(NULL, ring->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	LT_REQUIRE(ring->device != MAP_FAILED && ring->mirror != MAP_FAILED);
	memset(ring->mirror, OLD_BYTE, ring->bytes);
	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	ring->next = rings;
	rings = ring;
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
	atomic_fetch_add(&fake_gpu_rings, 1);
	*out = (struct kvp_gpu_ring){ .addr = (uintptr_t)ring->device,
				      .bytes = ring->bytes,
				      .vmm = vmm,
				      .rdma = true,
				      .dmabuf = fd };
	if (atomic_load(&fake_gpu_no_dmabuf)) {
		close(fd);
		out->dmabuf = -1;
	}
	return 0;
}

void kvp_gpu_ring_free(struct kvp_gpu *gpu, struct kvp_gpu_ring *out)
{
	struct ring **at = &rings, *ring;

	(void)gpu;
	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	while ((uintptr_t)(*at)->device != out->addr)
		at = &(*at)->next;
	ring = *at;
	*at = ring->next;
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
	LT_REQUIRE(munmap(ring->device, ring->bytes) == 0);
	LT_REQUIRE(munmap(ring->mirror, ring->bytes) == 0);
	free(ring);
	if (out->dmabuf >= 0)
		close(out->dmabuf);
	*out = (struct kvp_gpu_ring){ .dmabuf = -1 };
	atomic_fetch_sub(&fake_gpu_rings, 1);
}

/* The same byte where everybody may touch it; host memory stays what it is. */
static void *mirror_of(const void *at)
{
	const struct ring *ring;
	void *mirror = (void *)(uintptr_t)at;

	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	for (ring = rings; ring; ring = ring->next)
		if ((uintptr_t)at - (uintptr_t)ring->device < ring->bytes)
			mirror = ring->mirror + ((const uint8_t *)at - ring->device);
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
	return mirror;
}

/* Of this GPU only: no launch reaches into the rings of another. */
static void open_rings(struct kvp_gpu *gpu, int prot)
{
	const struct ring *ring;

	LT_REQUIRE(pthread_mutex_lock(&rings_lock) == 0);
	for (ring = rings; ring; ring = ring->next)
		if (ring->gpu == gpu)
			LT_REQUIRE(mprotect(ring->device, ring->bytes, prot) == 0);
	LT_REQUIRE(pthread_mutex_unlock(&rings_lock) == 0);
}

int kvp_gpu_write(struct kvp_gpu *gpu, uint64_t addr, const void *from, uint64_t bytes)
{
	void *to = mirror_of((void *)(uintptr_t)addr);

	(void)gpu;
	LT_REQUIRE((uintptr_t)to != addr);
	memcpy(to, from, bytes);
	return 0;
}

int kvp_gpu_flush(struct kvp_gpu *gpu)
{
	(void)gpu;
	LT_REQUIRE(atomic_load(&fake_gpu_can_flush));
	atomic_fetch_add(&fake_gpu_flushes, 1);
	return fails(&fake_gpu_fail_flush) ? -EREMOTEIO : 0;
}

/* ---- a transport that sends from there ------------------------------------------------------- */

static struct kvp_net_ops device_ops;

static int device_device(struct kvp_net *net, const struct kvp_net_memory *memory,
			 const char **word, char *err, size_t err_bytes)
{
	(void)net;
	(void)err;
	(void)err_bytes;
	LT_REQUIRE(!memory || (memory->device && mirror_of(memory->base) != memory->base));
	*word = "fake";
	return 0;
}

static int device_send(struct kvp_net *net, struct kvp_net_ep *ep, const void *hdr,
		       size_t hdr_bytes, const void *payload, size_t bytes, void *req)
{
	const void *from = payload ? mirror_of(payload) : NULL;
	uint8_t old[32];

	/* Nothing of what was in the ring at first goes along. */
	memset(old, OLD_BYTE, sizeof(old));
	LT_REQUIRE(!from || from == payload || !memmem(from, bytes, old, sizeof(old)));
	return kvp_net_ucx.send(net, ep, hdr, hdr_bytes, from, bytes, req);
}

static void make_ops(void)
{
	device_ops = kvp_net_ucx;
	device_ops.device = device_device;
	device_ops.send = device_send;
}

const struct kvp_net_ops *fake_gpu_net(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	LT_REQUIRE(pthread_once(&once, make_ops) == 0);
	return &device_ops;
}

/* Two lanes of three have their rings on the device; which, differs from test to test. */
const struct kvp_net_ops *lt_gpu_net(const struct kvp_net_ops *net)
{
	static unsigned n;

	if (n == 0)
		for (const char *c = criterion_current_test->name; *c; c++)
			n += (unsigned char)*c;
	return n++ % 3 ? fake_gpu_net() : net;
}

/* ---- launches -------------------------------------------------------------------------------- */

static struct batch *next_batch(struct kvp_gpu *gpu)
{
	return &gpu->batches[gpu->launched % BATCHES];
}

struct kvp_jobs *kvp_gpu_jobs(struct kvp_gpu *gpu)
{
	struct batch *batch = next_batch(gpu);

	if (batch->ticket > gpu->finished)
		return NULL;
	if (batch->ticket)
		kvp_jobs_reset(&batch->jobs);
	batch->ticket = 0;
	batch->jobs.max_runs = (uint32_t)atomic_load(&fake_gpu_max_runs);
	return &batch->jobs;
}

int kvp_gpu_drain(struct kvp_gpu *gpu)
{
	(void)gpu;
	return 0;
}

static void run_batches(struct kvp_gpu *gpu, bool all)
{
	while (gpu->finished < gpu->launched) {
		struct batch *batch = &gpu->batches[gpu->finished % BATCHES];

		if (!all && (atomic_load(&fake_gpu_stopped) || lt_now() < batch->due_ns))
			break;
		open_rings(gpu, PROT_READ | PROT_WRITE);
		kvp_jobs_run_host(&batch->jobs);
		open_rings(gpu, PROT_NONE);
		gpu->finished++;
	}
}

int kvp_gpu_launch(struct kvp_gpu *gpu, uint64_t *ticket)
{
	struct batch *batch = next_batch(gpu);

	*ticket = gpu->launched;
	if (batch->ticket || batch->jobs.n_entries == 0)
		return 0;
	if (fails(&fake_gpu_fail_launch)) {
		run_batches(gpu, true); /* it waits for what was launched before */
		kvp_jobs_reset(&batch->jobs);
		return -EREMOTEIO;
	}
	gpu->seed = gpu->seed * UINT64_C(6364136223846793005) + 1;
	batch->due_ns = lt_now() + (gpu->seed >> 33) % LATE_NS;
	batch->ticket = ++gpu->launched;
	*ticket = gpu->launched;
	atomic_fetch_add(&fake_gpu_launches, 1);
	return 0;
}

#ifdef KVP_TEST
void kvp_gpu_wild(struct kvp_gpu *gpu, bool on)
{
	(void)gpu;
	atomic_store(&fake_gpu_fail_poll, on);
}
#endif

uint64_t kvp_gpu_next(const struct kvp_gpu *gpu)
{
	return gpu->launched + 1;
}

int kvp_gpu_poll(struct kvp_gpu *gpu, uint64_t *ticket)
{
	if (gpu->dead || fails(&fake_gpu_fail_poll)) {
		gpu->dead = true;
		return -EIO;
	}
	run_batches(gpu, false);
	*ticket = gpu->finished;
	return 0;
}

/* ---- imports: a VMM chunk is a memfd here, an IPC handle holds an address of this process ------
 */

struct kvp_gpu_import {
	void *map;
	uint64_t bytes;
};

int kvp_gpu_imports_create(struct kvp_gpu_imports **out, struct kvp_gpu *gpu)
{
	(void)gpu;
	*out = NULL;
	return 0;
}

void kvp_gpu_imports_destroy(struct kvp_gpu_imports *imports)
{
	(void)imports;
}

int kvp_gpu_import_ipc(struct kvp_gpu_imports *imports, const struct kvp_gpu_ipc *ipc,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	uint64_t held[2]; /* address, bytes */

	(void)imports;
	memcpy(held, ipc->handle, sizeof(held));
	if (held[0] == 0 || ipc->offset > held[1] || ipc->bytes > held[1] - ipc->offset) {
		(void)snprintf(err, err_bytes, "cuIpcOpenMemHandle: FAKE_ERROR_INVALID_VALUE");
		return -EINVAL;
	}
	*out = calloc(1, sizeof(**out));
	LT_REQUIRE(*out);
	*addr = held[0] + ipc->offset;
	atomic_fetch_add(&fake_gpu_imports, 1);
	return 0;
}

int kvp_gpu_import_vmm(struct kvp_gpu_imports *imports, const struct kvp_gpu_chunks *chunks,
		       struct kvp_gpu_import **out, uint64_t *addr, char *err, size_t err_bytes)
{
	struct kvp_gpu_import *import = calloc(1, sizeof(*import));

	(void)imports;
	LT_REQUIRE(chunks->n == 1);
	if (!import)
		abort();
	import->bytes = chunks->bytes[0];
	import->map =
		mmap(NULL, import->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, chunks->fds[0], 0);
	if (import->map == MAP_FAILED) {
		free(import);
		(void)snprintf(err, err_bytes, "cuMemImportFromShareableHandle: FAKE_ERROR");
		return -EINVAL;
	}
	*out = import;
	*addr = (uint64_t)(uintptr_t)import->map;
	atomic_fetch_add(&fake_gpu_imports, 1);
	return 0;
}

int kvp_gpu_import_peer(struct kvp_gpu_imports *imports, const char *uuid, char *err,
			size_t err_bytes)
{
	(void)imports;
	if (!atomic_load(&fake_gpu_no_peer))
		return 0;
	(void)snprintf(err, err_bytes, "no peer access to %s", uuid);
	return -EOPNOTSUPP;
}

int kvp_gpu_import_dmabuf(struct kvp_gpu_imports *imports, const struct kvp_gpu_import *import,
			  int *fd, char *err, size_t err_bytes)
{
	(void)imports;
	*fd = import->map ? dup(atomic_load(&fake_gpu_import_fd)) : -1;
	if (*fd >= 0)
		return 0;
	(void)snprintf(err, err_bytes, "cuMemGetHandleForAddressRange: FAKE_ERROR");
	return -EINVAL;
}

void kvp_gpu_import_put(struct kvp_gpu_imports *imports, struct kvp_gpu_import *import)
{
	(void)imports;
	if (!import)
		return;
	if (import->map)
		LT_REQUIRE(munmap(import->map, import->bytes) == 0);
	free(import);
	atomic_fetch_sub(&fake_gpu_imports, 1);
}

uint32_t kvp_gpu_imports_count(const struct kvp_gpu_imports *imports, uint64_t *bytes)
{
	(void)imports;
	*bytes = 0;
	return (uint32_t)atomic_load(&fake_gpu_imports);
}
