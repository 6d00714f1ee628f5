/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A CUDA driver that is none: libcuda.so.1 for a machine without a GPU. Device memory is memory of
 * the host that processes share, streams do at once what they are given, and the one kernel is done
 * by the processor. What it says of handles that are no good, of memory that a dead process's
 * mappings keep, and of how much is free, is what a real one says.
 *
 * The environment makes more of it. KVP_FAKE_CUDA_GPUS is 2: there are two GPUs. KVP_FAKE_CUDA_PEER
 * is "no": neither reaches the other's memory; "fails": enabling that fails; "already": somebody
 * has enabled it; "drops": what one writes to the other is lost. KVP_FAKE_CUDA_BUSY is a path:
 * while there is a file, nothing that was launched is seen to be over. KVP_FAKE_CUDA_LOST is one:
 * from the first call on that finds a file there, the GPU is lost. KVP_FAKE_CUDA_DMABUF is "no":
 * no dma-bufs can be made. KVP_FAKE_CUDA names the machine whose GPUs these are: programs that give
 * different names do not fill each other's memory.
 *
 * For the programs that play engines with real daemons. In-process tests have tests/fake_gpu.c.
 */

#include <cuda.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/move.h"

#define NAME "fake-gpu-memory" /* behind it the number of its GPU, a dot, and its machine */
#define GPUS 2
#define TOTAL_BYTES (UINT64_C(8) << 30)
#define MAPS 1024u
#define GRAIN (UINT64_C(2) << 20)
#define CONTEXT_BYTES (UINT64_C(256) << 20) /* must be free for the first context of a process */

static _Atomic int contexts;

/* A mapping of device memory: an allocation of this process or of another, or a chunk. */
struct map {
	uint64_t addr, bytes;
	int fd; /* -1: none of ours */
	bool chunk, reserved, ipc;
	int device;
	unsigned int seen_by; /* GPUs that may use it there, a bit each */
};

/* What a chunk's handle is. */
struct chunk {
	int fd;
	uint64_t bytes;
	int device;
};

struct ipc {
	char magic[8];
	uint64_t pid, fd, inode, bytes;
	int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct map maps[MAPS];
static int kernels[KVP_MOVE_SIZES], gpus[GPUS], something; /* their addresses are handles */
static _Thread_local int current;
static _Thread_local int pushed[8], n_pushed;
static bool enabled[GPUS][GPUS]; /* under the lock: the first reaches the other's memory */

/* ---- GPUs ------------------------------------------------------------------------------------ */

static int n_gpus(void)
{
	const char *text = getenv("KVP_FAKE_CUDA_GPUS");

	return text && text[0] == '2' ? 2 : 1;
}

static bool peer_is(const char *what)
{
	const char *text = getenv("KVP_FAKE_CUDA_PEER");

	return text && strcmp(text, what) == 0;
}

static int device_of(CUcontext ctx)
{
	return (void *)ctx == (void *)&gpus[1] ? 1 : 0;
}

/* May the current GPU use the other's memory? An import enables that by itself where it can. */
static bool reaches(int device, unsigned int flags)
{
	if (device != current && flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && !peer_is("no") &&
	    !peer_is("fails"))
		enabled[current][device] = true;
	return device == current || enabled[current][device];
}

/* Once a launch has read where no memory is, the GPU is lost to this process. */
static _Atomic bool lost;

static CUresult is_lost(void)
{
	const char *path = getenv("KVP_FAKE_CUDA_LOST");

	if (path && access(path, F_OK) == 0)
		atomic_store(&lost, true);
	return atomic_load(&lost) ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static struct map *map_new(void)
{
	for (uint32_t i = 0; i < MAPS; i++)
		if (!maps[i].addr)
			return &maps[i];
	abort();
}

static struct map *map_at(uint64_t addr)
{
	for (uint32_t i = 0; i < MAPS; i++)
		if (maps[i].addr && !maps[i].reserved && addr >= maps[i].addr &&
		    addr < maps[i].addr + maps[i].bytes)
			return &maps[i];
	return NULL;
}

static struct map *map_add(uint64_t addr, uint64_t bytes, int fd)
{
	struct map *map = map_new();

	*map = (struct map){
		.addr = addr, .bytes = bytes, .fd = fd, .device = current, .seen_by = 1u << current
	};
	return map;
}

static const char *machine(void)
{
	const char *text = getenv("KVP_FAKE_CUDA");

	return text ? text : "";
}

static void memory_name(char name[64], int device)
{
	(void)snprintf(name, 64, NAME "%d.%s", device, machine());
}

static int memory_new(uint64_t bytes, int device)
{
	char name[64];
	int fd;

	memory_name(name, device);
	fd = memfd_create(name, MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		abort();
	return fd;
}

static void *memory_map(int fd, uint64_t bytes, void *at)
{
	void *map =
		mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);

	if (map == MAP_FAILED)
		abort();
	return map;
}

/* Each inode once, whoever maps it: its size, from the lines of /proc/PID/maps. */
static void used_by(const char *pid, uint64_t inodes[MAPS], uint32_t *n, uint64_t *used)
{
	char path[300], line[512], here[64];
	FILE *file;

	(void)snprintf(here, sizeof(here), ".%s ", machine()); /* "(deleted)" follows */
	(void)snprintf(path, sizeof(path), "/proc/%s/maps", pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		uint64_t from, to, inode;
		uint32_t i = 0;

		if (!strstr(line, "/memfd:" NAME) || !strstr(line, here) ||
		    /* NOLINTNEXTLINE(cert-err34-c): the kernel's numbers */
		    sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64, &from, &to,
			   &inode) != 3)
			continue;
		while (i < *n && inodes[i] != inode)
			i++;
		if (i < *n || *n == MAPS)
			continue;
		inodes[(*n)++] = inode;
		*used += to - from;
	}
	if (file)
		(void)fclose(file);
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total)
{
	uint64_t inodes[MAPS], used = 0;
	uint32_t n = 0;
	DIR *dir = opendir("/proc");

	for (const struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir))
		if (e->d_name[0] >= '0' && e->d_name[0] <= '9')
			used_by(e->d_name, inodes, &n, &used);
	if (dir)
		(void)closedir(dir);
	*total = TOTAL_BYTES;
	*free_bytes = used < TOTAL_BYTES ? TOTAL_BYTES - used : 0;
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
	size_t left, total;
	int fd;

	(void)cuMemGetInfo(&left, &total); /* cannot fail */
	if (bytes == 0 || bytes > left)
		return bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
	bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
	fd = memory_new(bytes, current);
	pthread_mutex_lock(&lock);
	*out = map_add((uintptr_t)memory_map(fd, bytes, NULL), bytes, fd)->addr;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr addr, bool ipc)
{
	struct map *map;
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	if (map && map->addr == addr && !map->chunk && map->ipc == ipc) {
		(void)munmap((void *)(uintptr_t)addr, map->bytes);
		if (map->fd >= 0)
			(void)close(map->fd);
		map->addr = 0;
		res = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuMemFree(CUdeviceptr addr)
{
	return unmap(addr, false);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr addr)
{
	const struct map *map;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	if (map && base)
		*base = map->addr;
	if (map && bytes)
		*bytes = map->bytes;
	pthread_mutex_unlock(&lock);
	return map ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
	(void)flags;
	*out = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (*out == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*(size_t *)*out = bytes + 4096;
	*out = (char *)*out + 4096;
	return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *host)
{
	void *base = (char *)host - 4096;

	return munmap(base, *(size_t *)base) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *host, unsigned int flags)
{
	(void)flags;
	*out = (uintptr_t)host;
	return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void *host, size_t bytes, unsigned int flags)
{
	(void)bytes;
	(void)flags;
	return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostUnregister(void *host)
{
	return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- other processes ------------------------------------------------------------------------- */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr addr)
{
	const struct map *map;
	struct ipc ipc = { .magic = "fakegpu", .pid = (uint64_t)getpid() };
	struct stat st;
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	if (map && !map->chunk && map->fd >= 0 && fstat(map->fd, &st) == 0) {
		ipc.fd = (uint64_t)map->fd;
		ipc.bytes = map->bytes;
		ipc.inode = st.st_ino;
		ipc.device = map->device;
		memset(handle, 0, sizeof(*handle));
		memcpy(handle, &ipc, sizeof(ipc));
		res = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)
{
	CUresult res = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	struct ipc ipc;
	struct stat st;
	char path[64];
	int fd;

	if (is_lost() != CUDA_SUCCESS)
		return is_lost();
	memcpy(&ipc, &handle, sizeof(ipc));
	if (memcmp(ipc.magic, "fakegpu", 8) != 0 || ipc.device < 0 || ipc.device >= n_gpus())
		return CUDA_ERROR_INVALID_VALUE;
	if (ipc.pid == (uint64_t)getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	(void)snprintf(path, sizeof(path), "/proc/%" PRIu64 "/fd/%" PRIu64, ipc.pid, ipc.fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || st.st_ino != ipc.inode) {
		if (fd >= 0)
			(void)close(fd);
		return CUDA_ERROR_MAP_FAILED;
	}
	pthread_mutex_lock(&lock);
	if (reaches(ipc.device, flags)) {
		struct map *map;

		*out = (uintptr_t)memory_map(fd, ipc.bytes, NULL);
		map = map_add(*out, ipc.bytes, -1);
		map->ipc = true;
		map->device = ipc.device;
		res = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	(void)close(fd);
	return res;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr addr)
{
	return unmap(addr, true);
}

/* ---- virtual memory: a handle is a struct chunk ---------------------------------------------- */

static CUmemGenericAllocationHandle chunk_handle(int fd, uint64_t bytes, int device)
{
	struct chunk *chunk = malloc(sizeof(*chunk));

	if (!chunk)
		abort();
	*chunk = (struct chunk){ fd, bytes, device };
	return (uintptr_t)chunk;
}

static struct chunk *chunk_of(CUmemGenericAllocationHandle handle)
{
	return (struct chunk *)(uintptr_t)handle;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
		     const CUmemAllocationProp *prop, unsigned long long flags)
{
	(void)flags;
	size_t left, total;

	if (bytes == 0 || bytes % GRAIN || prop->location.id < 0 || prop->location.id >= n_gpus() ||
	    prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	(void)cuMemGetInfo(&left, &total); /* cannot fail */
	if (bytes > left)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*out = chunk_handle(memory_new(bytes, prop->location.id), bytes, prop->location.id);
	return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	(void)close(chunk_of(handle)->fd);
	free(chunk_of(handle));
	return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr at,
			     unsigned long long flags)
{
	void *map =
		mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	(void)align;
	(void)at;
	(void)flags;
	if (map == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*out = (uintptr_t)map;
	pthread_mutex_lock(&lock);
	map_add(*out, bytes, -1)->reserved = true;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr addr, size_t bytes)
{
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < MAPS; i++)
		if (maps[i].reserved && maps[i].addr == addr && maps[i].bytes == bytes) {
			(void)munmap((void *)(uintptr_t)addr, bytes);
			maps[i] = (struct map){ 0 };
			res = CUDA_SUCCESS;
		}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuMemMap(CUdeviceptr addr, size_t bytes, size_t offset,
		  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	const struct chunk *chunk = chunk_of(handle);
	struct map *map;

	(void)flags;
	if (offset || bytes < chunk->bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (bytes > chunk->bytes)
		return CUDA_ERROR_NOT_SUPPORTED; /* what an H200 says (driver 580.159) */
	pthread_mutex_lock(&lock);
	(void)memory_map(chunk->fd, bytes, (void *)(uintptr_t)addr);
	map = map_add(addr, bytes, dup(chunk->fd));
	map->chunk = true;
	map->device = chunk->device;
	map->seen_by = 0; /* until access is set */
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr addr, size_t bytes)
{
	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < MAPS; i++)
		if (maps[i].chunk && maps[i].addr >= addr &&
		    maps[i].addr + maps[i].bytes <= addr + bytes) {
			(void)mmap((void *)(uintptr_t)maps[i].addr, maps[i].bytes, PROT_NONE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
			(void)close(maps[i].fd);
			maps[i] = (struct map){ 0 };
		}
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr addr, size_t bytes, const CUmemAccessDesc *desc, size_t n)
{
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < MAPS; i++) {
		struct map *map = &maps[i];

		if (!map->chunk || map->addr < addr || map->addr + map->bytes > addr + bytes)
			continue;
		res = CUDA_SUCCESS;
		for (size_t k = 0; k < n; k++)
			if (desc[k].location.id != map->device &&
			    !enabled[desc[k].location.id][map->device])
				res = CUDA_ERROR_INVALID_DEVICE;
			else
				map->seen_by |= 1u << desc[k].location.id;
		if (res != CUDA_SUCCESS)
			break;
	}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *addr)
{
	const struct map *map;
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	pthread_mutex_lock(&lock);
	map = map_at((uintptr_t)addr);
	if (map && map->chunk) {
		*out = chunk_handle(dup(map->fd), map->bytes, map->device);
		res = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
				      CUmemAllocationHandleType type, unsigned long long flags)
{
	(void)flags;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	*(int *)out = dup(chunk_of(handle)->fd);
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *fd,
					CUmemAllocationHandleType type)
{
	char path[64], link[128] = "";
	const char *name;
	struct stat st;

	(void)type;
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", (int)(intptr_t)fd);
	if (readlink(path, link, sizeof(link) - 1) < 0 || !(name = strstr(link, NAME)) ||
	    fstat((int)(intptr_t)fd, &st) < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*out = chunk_handle(dup((int)(intptr_t)fd), (uint64_t)st.st_size,
			    name[strlen(NAME)] == '1');
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
						CUmemGenericAllocationHandle handle)
{
	memset(prop, 0, sizeof(*prop));
	prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop->location.id = chunk_of(handle)->device;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop,
				       CUmemAllocationGranularity_flags flags)
{
	(void)prop;
	(void)flags;
	*bytes = GRAIN;
	return CUDA_SUCCESS;
}

/* A dma-buf is the memory's own file. */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr addr, size_t bytes,
				       CUmemRangeHandleType type, unsigned long long flags)
{
	const char *dmabuf = getenv("KVP_FAKE_CUDA_DMABUF");
	const struct map *map;
	CUresult res = CUDA_ERROR_INVALID_VALUE;

	if (dmabuf && strcmp(dmabuf, "no") == 0)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || addr % 4096 || bytes % 4096)
		return res;
	pthread_mutex_lock(&lock);
	map = map_at(addr);
	if (map && !map->ipc && bytes <= map->bytes - (addr - map->addr)) {
		*(int *)handle = fcntl(map->fd, F_DUPFD_CLOEXEC, 0);
		res = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr addr)
{
	(void)value;
	(void)attribute;
	(void)addr;
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr addr)
{
	const struct map *map;
	bool chunk = false;
	int device = 0;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	if (map) {
		chunk = map->chunk;
		device = map->device;
	}
	pthread_mutex_unlock(&lock);
	if (!map)
		return CUDA_ERROR_INVALID_VALUE;
	switch ((int)attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(void **)out = chunk ? NULL : &gpus[device];
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)out = CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)out = device;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(int *)out = !chunk;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

/* ---- streams do everything at once ----------------------------------------------------------- */

CUresult cuMemcpyHtoD(CUdeviceptr dst, const void *src, size_t bytes)
{
	memcpy((void *)(uintptr_t)dst, src, bytes);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void *dst, CUdeviceptr src, size_t bytes)
{
	memcpy(dst, (const void *)(uintptr_t)src, bytes);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
	(void)stream;
	memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
	return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char byte, size_t n, CUstream stream)
{
	(void)stream;
	memset((void *)(uintptr_t)dst, byte, n);
	return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int word, size_t n, CUstream stream)
{
	uint32_t *at = (uint32_t *)(uintptr_t)dst;

	(void)stream;
	for (size_t i = 0; i < n; i++)
		at[i] = word;
	return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value,
			      unsigned int flags)
{
	(void)stream;
	(void)flags;
	atomic_store((_Atomic uint64_t *)(uintptr_t)addr, value);
	return CUDA_SUCCESS;
}

static bool is_dropped(uint64_t addr)
{
	const struct map *map;
	bool dropped;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	dropped = map && map->device != current && peer_is("drops");
	pthread_mutex_unlock(&lock);
	return dropped;
}

static void run_rows(const struct kvp_move_entry *e, const struct kvp_move_run *run)
{
	const char *src = (const char *)(uintptr_t)e->src + run->src_page * e->src_page_stride +
			  (uint64_t)run->src_slot * e->src_row_stride;
	char *dst = (char *)(uintptr_t)e->dst + run->dst_page * e->dst_page_stride +
		    (uint64_t)run->dst_slot * e->dst_row_stride;

	for (uint32_t i = 0; i < run->n; i++) {
		memcpy(dst, src, e->width);
		src += (uint64_t)run->src_step * e->src_row_stride;
		dst += (uint64_t)run->dst_step * e->dst_row_stride;
	}
}

/* Where memory is another GPU's, or nobody's; the host's is everybody's. */
static bool is_foreign(uint64_t addr)
{
	const struct map *map;
	bool foreign;

	pthread_mutex_lock(&lock);
	map = map_at(addr);
	/* What another allocates is seen by who may reach it, what it imports is not. */
	foreign = addr < 65536 || (map && !(map->seen_by >> current & 1) &&
				   (map->chunk || map->ipc || !enabled[current][map->device]));
	pthread_mutex_unlock(&lock);
	return foreign;
}

static bool is_wild(const struct kvp_move_entry *e)
{
	return e->n_runs && (is_foreign(e->src) || is_foreign(e->dst));
}

static CUresult move_rows(CUfunction fn, void **params)
{
	const union kvp_move_params *p = params[0];
	const struct kvp_move_entry *entries = p->small.entries; /* in the same place in all */
	const struct kvp_move_run *table = p->small.runs;

	if (is_lost() != CUDA_SUCCESS)
		return is_lost();
	if ((void *)fn == (void *)&kernels[KVP_MOVE_NEAR])
		table = p->near.runs;
	else if ((void *)fn == (void *)&kernels[KVP_MOVE_WIDE])
		table = p->wide.runs;
	else if ((void *)fn == (void *)&kernels[KVP_MOVE_TALL])
		table = p->tall.runs;
	else if ((void *)fn == (void *)&kernels[KVP_MOVE_LONG])
		table = p->lengthy.runs;
	for (uint32_t i = 0; i < p->head.n_entries; i++)
		if (is_wild(&entries[i]))
			atomic_store(&lost, true); /* what runs shows later */
	if (is_lost() != CUDA_SUCCESS)
		return CUDA_SUCCESS;
	for (uint32_t i = 0; i < p->head.n_entries; i++)
		for (uint32_t k = 0; k < entries[i].n_runs && !is_dropped(entries[i].dst); k++)
			run_rows(&entries[i], &table[entries[i].first_run + k]);
	return CUDA_SUCCESS;
}

/* NOLINTNEXTLINE(readability-function-size): the driver has it so */
CUresult cuLaunchKernel(CUfunction fn, unsigned int x, unsigned int y, unsigned int z,
			unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
			CUstream stream, void **params, void **extra)
{
	(void)shared;
	(void)stream;
	(void)extra;
	if (!x || !y || !z || !bx || by != 1 || bz != 1)
		return CUDA_ERROR_INVALID_VALUE;
	return move_rows(fn, params);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction fn, void **params, void **extra)
{
	return cuLaunchKernel(fn, config->gridDimX, config->gridDimY, config->gridDimZ,
			      config->blockDimX, config->blockDimY, config->blockDimZ,
			      config->sharedMemBytes, config->hStream, params, extra);
}

/* ---- what has nothing to do ------------------------------------------------------------------ */

CUresult cuInit(unsigned int flags)
{
	(void)flags;
	return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult res, const char **name)
{
	*name = res == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
		: res == CUDA_ERROR_NOT_READY       ? "CUDA_ERROR_NOT_READY"
		: res == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
		: res == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
		: res == CUDA_ERROR_TOO_MANY_PEERS  ? "CUDA_ERROR_TOO_MANY_PEERS"
						    : "CUDA_ERROR_FAKE";
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n)
{
	*n = n_gpus();
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	*device = ordinal;
	return ordinal >= 0 && ordinal < n_gpus() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
	(void)device;
	(void)snprintf(name, (size_t)bytes, "no GPU, the processor");
	return CUDA_SUCCESS;
}

/* By both names: cuda.h has renamed it. */
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	memcpy(uuid->bytes, "fake GPU, no. 0", 16);
	uuid->bytes[14] = (char)('0' + device);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	return cuDeviceGetUuid(uuid, device);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	(void)device;
	*value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
		 attribute == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
	/* It sees by itself what a NIC writes, and can be told to look. */
	if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
		*value = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
	if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
		*value = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
	if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
		*value = 9;
	return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
				    CUflushGPUDirectRDMAWritesScope scope)
{
	(void)target;
	(void)scope;
	return is_lost();
}

/* It sits in no slot. */
CUresult cuDeviceGetPCIBusId(char *id, int bytes, CUdevice device)
{
	(void)device;
	if (bytes > 0)
		id[0] = '\0';
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
	size_t left, total;

	(void)cuMemGetInfo(&left, &total); /* cannot fail */
	if (atomic_load(&contexts) == 0 && left < CONTEXT_BYTES)
		return CUDA_ERROR_OUT_OF_MEMORY;
	atomic_fetch_add(&contexts, 1);
	*ctx = (CUcontext)(void *)&gpus[device];
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
	(void)device;
	atomic_fetch_sub(&contexts, 1);
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
	current = device_of(ctx);
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext ctx)
{
	if (n_pushed == (int)(sizeof(pushed) / sizeof(pushed[0])))
		return CUDA_ERROR_INVALID_CONTEXT;
	pushed[n_pushed++] = current;
	current = device_of(ctx);
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *ctx)
{
	*ctx = (CUcontext)(void *)&gpus[current];
	current = n_pushed ? pushed[--n_pushed] : 0;
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *able, CUdevice device, CUdevice peer)
{
	*able = device != peer && !peer_is("no");
	return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext ctx, unsigned int flags)
{
	CUresult res = CUDA_SUCCESS;

	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (peer_is("no"))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	if (peer_is("fails"))
		return CUDA_ERROR_TOO_MANY_PEERS;
	pthread_mutex_lock(&lock);
	if (enabled[current][device_of(ctx)] || peer_is("already"))
		res = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	enabled[current][device_of(ctx)] = true;
	pthread_mutex_unlock(&lock);
	return res;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	(void)image;
	*module = (CUmodule)(void *)&something;
	return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module)
{
	(void)module;
	return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *fn, CUmodule module, const char *name)
{
	static const char *const names[] = {
#define KERNEL_NAME(kernel, n_entries, n_runs) #kernel,
		KVP_MOVE_KERNELS(KERNEL_NAME)
	};

	(void)module;
	for (int i = 0; i < KVP_MOVE_SIZES; i++)
		if (!strcmp(name, names[i])) {
			*fn = (CUfunction)(void *)&kernels[i];
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_NOT_FOUND;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	*stream = (CUstream)(void *)&something;
	return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	(void)priority;
	return cuStreamCreate(stream, flags);
}

CUresult cuStreamDestroy(CUstream stream)
{
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream)
{
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	(void)flags;
	*event = (CUevent)(void *)&something;
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
	(void)event;
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	(void)event;
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	(void)stream;
	(void)event;
	(void)flags;
	return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event)
{
	const char *path = getenv("KVP_FAKE_CUDA_BUSY");

	(void)event;
	return path && access(path, F_OK) == 0 ? CUDA_ERROR_NOT_READY : is_lost();
}
