/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long device_ptr;

/* The driver's ABI as far as it is used here, so that no toolkit is needed to build. */
struct location {
	int type, id;
};

struct allocation {
	int type, handle_types;
	struct location location;
	void *metadata;
	unsigned char flags[8];
};

struct access {
	struct location location;
	int flags;
};

enum {
	PINNED = 1,
	POSIX_FD = 1,
	ON_DEVICE = 1,
	READ_WRITE = 3,
	NON_BLOCKING = 1,
	NOT_READY = 600,
};

/* clang-format off */
#define DRIVER_CALLS(X) \
	X(init, "cuInit", (unsigned int)) \
	X(count, "cuDeviceGetCount", (int *)) \
	X(get, "cuDeviceGet", (int *, int)) \
	X(name, "cuDeviceGetName", (char *, int, int)) \
	X(retain, "cuDevicePrimaryCtxRetain", (void **, int)) \
	X(current, "cuCtxSetCurrent", (void *)) \
	X(alloc, "cuMemAlloc_v2", (device_ptr *, size_t)) \
	X(free, "cuMemFree_v2", (device_ptr)) \
	X(info, "cuMemGetInfo_v2", (size_t *, size_t *)) \
	X(put, "cuMemcpyHtoD_v2", (device_ptr, const void *, size_t)) \
	X(get_bytes, "cuMemcpyDtoH_v2", (void *, device_ptr, size_t)) \
	X(copy, "cuMemcpyDtoDAsync_v2", (device_ptr, device_ptr, size_t, void *)) \
	X(fill, "cuMemsetD32Async", (device_ptr, unsigned int, size_t, void *)) \
	X(stream, "cuStreamCreate", (void **, unsigned int)) \
	X(query, "cuStreamQuery", (void *)) \
	X(sync, "cuStreamSynchronize", (void *)) \
	X(create, "cuMemCreate", (device_ptr *, size_t, const struct allocation *, unsigned long long)) \
	X(release, "cuMemRelease", (device_ptr)) \
	X(reserve, "cuMemAddressReserve", (device_ptr *, size_t, size_t, device_ptr, unsigned long long)) \
	X(unreserve, "cuMemAddressFree", (device_ptr, size_t)) \
	X(map, "cuMemMap", (device_ptr, size_t, size_t, device_ptr, unsigned long long)) \
	X(unmap, "cuMemUnmap", (device_ptr, size_t)) \
	X(permit, "cuMemSetAccess", (device_ptr, size_t, const struct access *, size_t)) \
	X(error_name, "cuGetErrorName", (int, const char **))
/* clang-format on */

#define CHUNK_BYTES (UINT64_C(2) << 20)

static struct driver {
#define FIELD(name, symbol, args) int(*name) args;
	DRIVER_CALLS(FIELD)
#undef FIELD
} driver;

static bool opened;
static int ordinal; /* of the GPU that is used */
static void *stream;

static const char *error_name(int res)
{
	const char *name = NULL;

	return driver.error_name(res, &name) == 0 && name ? name : "unknown CUDA error";
}

#define DRIVER(call)                                                       \
	do {                                                               \
		int res_ = driver.call;                                    \
		RIG_REQUIRE(res_ == 0, "%s: %s", #call, error_name(res_)); \
	} while (0)

/* NULL, or why there is no driver. */
static const char *load(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int n = 0;

	if (!lib)
		return "no CUDA driver";
#define LOAD(name, symbol, args)                       \
	*(void **)&driver.name = dlsym(lib, (symbol)); \
	if (!driver.name)                              \
		return "the driver lacks " symbol;
	DRIVER_CALLS(LOAD)
#undef LOAD
	if (driver.init(0) != 0 || driver.count(&n) != 0 || n == 0)
		return "the driver lists no GPU";
	return NULL;
}

static void tell_found(int fd)
{
	const char *why = load();
	char text[100];
	int device;

	if (!why && (driver.get(&device, 0) != 0 || driver.name(text, sizeof(text), device) != 0))
		why = "the driver does not name it";
	dprintf(fd, "%s", why ? why : text);
	_exit(why ? 1 : 0);
}

bool device_found(char *text, size_t bytes)
{
	int fds[2], status = -1;
	ssize_t n;
	pid_t pid;

	RIG_REQUIRE(pipe(fds) == 0);
	pid = fork();
	RIG_REQUIRE(pid >= 0);
	if (pid == 0)
		tell_found(fds[1]);
	(void)close(fds[1]);
	n = read(fds[0], text, bytes - 1); /* one short write */
	text[n > 0 ? n : 0] = 0;
	(void)close(fds[0]);
	RIG_REQUIRE(waitpid(pid, &status, 0) == pid);
	return status == 0;
}

int device_count(void)
{
	int status = -1;
	pid_t pid = fork(); /* a process that has used the driver must not fork ranks */

	RIG_REQUIRE(pid >= 0);
	if (pid == 0) {
		int n = 0;

		if (load() || driver.count(&n) != 0)
			n = 0;
		_exit(n);
	}
	RIG_REQUIRE(waitpid(pid, &status, 0) == pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

bool device_served(void)
{
	char program[4096], command[4400], line[256] = "";
	bool without = false;
	FILE *pipe;

	rig_program(program, sizeof(program), "kvpackd");
	snprintf(command, sizeof(command), "'%s' --version", program);
	pipe = popen(command, "re"); /* NOLINT(cert-env33-c): a path of our own */
	RIG_REQUIRE(pipe);
	while (fgets(line, sizeof(line), pipe))
		without = without || strstr(line, "not built in");
	RIG_REQUIRE(pclose(pipe) == 0);
	return !without;
}

/* Starts over with the driver that is none; returns where there is none of that either. */
static void use_fake(char **argv)
{
	char dir[4096], path[4200], machine[16];

	rig_program(dir, sizeof(dir), "tests/fake");
	snprintf(path, sizeof(path), "%s/libcuda.so.1", dir);
	if (access(path, R_OK) < 0 || device_is_fake())
		return;
	snprintf(machine, sizeof(machine), "%d", (int)getpid());
	RIG_REQUIRE(setenv("LD_LIBRARY_PATH", dir, 1) == 0 &&
		    setenv("KVP_FAKE_CUDA", machine, 1) == 0);
	execv("/proc/self/exe", argv);
}

bool device_is_fake(void)
{
	return getenv("KVP_FAKE_CUDA") != NULL;
}

bool device_or_fake(char **argv)
{
	char gpu[100];

	if (!device_served()) {
		puts("built without CUDA");
		return false;
	}
	if (!device_found(gpu, sizeof(gpu))) {
		use_fake(argv);
		printf("no GPU: %s\n", gpu);
		return false;
	}
	printf("on %s\n", gpu);
	return true;
}

void device_use(int gpu)
{
	int device;
	void *ctx;

	device_open();
	ordinal = gpu;
	DRIVER(get(&device, gpu));
	DRIVER(retain(&ctx, device)); /* for good */
	DRIVER(current(ctx));
}

void device_open(void)
{
	const char *why;
	int device;
	void *ctx;

	if (opened)
		return;
	why = load();
	RIG_REQUIRE(!why, "%s", why);
	DRIVER(get(&device, 0));
	DRIVER(retain(&ctx, device)); /* for good */
	DRIVER(current(ctx));
	DRIVER(stream(&stream, NON_BLOCKING));
	opened = true;
}

/* ---- memory ---------------------------------------------------------------------------------- */

uint64_t device_alloc(uint64_t bytes)
{
	device_ptr addr = 0;

	device_open();
	DRIVER(alloc(&addr, bytes));
	return addr;
}

void device_free(uint64_t addr)
{
	DRIVER(free(addr));
}

/* Physical chunks behind the whole of the range. */
static void map_chunks(const struct device_range *range)
{
	const struct allocation what = {
		.type = PINNED,
		.handle_types = POSIX_FD,
		.location = { ON_DEVICE, ordinal },
	};
	const struct access access = { { ON_DEVICE, ordinal }, READ_WRITE };
	device_ptr chunk;

	for (uint64_t at = 0; at < range->bytes; at += range->chunk_bytes) {
		DRIVER(create(&chunk, range->chunk_bytes, &what, 0));
		DRIVER(map(range->addr + at, range->chunk_bytes, 0, chunk, 0));
		DRIVER(release(chunk)); /* the mapping keeps it */
	}
	DRIVER(permit(range->addr, range->bytes, &access, 1));
}

static void unmap_chunks(const struct device_range *range)
{
	for (uint64_t at = 0; at < range->bytes; at += range->chunk_bytes)
		DRIVER(unmap(range->addr + at, range->chunk_bytes));
}

void device_alloc_chunks(struct device_range *range, uint64_t bytes)
{
	device_ptr addr = 0;

	device_open();
	/* Few chunks: the library and the daemon take a bounded number. */
	range->chunk_bytes = KVP_ALIGN_UP(KVP_DIV_UP(bytes, UINT64_C(8)), CHUNK_BYTES);
	range->bytes = KVP_ALIGN_UP(bytes, range->chunk_bytes);
	DRIVER(reserve(&addr, range->bytes, 0, 0, 0));
	range->addr = addr;
	map_chunks(range);
}

void device_free_chunks(const struct device_range *range)
{
	unmap_chunks(range);
	DRIVER(unreserve(range->addr, range->bytes));
}

uint64_t device_free_bytes(void)
{
	size_t free_now = 0, total;

	device_open();
	DRIVER(info(&free_now, &total));
	return free_now;
}

void device_put(uint64_t dst, const void *src, uint64_t bytes)
{
	DRIVER(put(dst, src, bytes));
}

void device_get(void *dst, uint64_t src, uint64_t bytes)
{
	DRIVER(get_bytes(dst, src, bytes));
}

void *device_stream(void)
{
	device_open();
	return stream;
}

void device_fill(uint64_t addr, uint32_t word, uint64_t n_words)
{
	DRIVER(fill(addr, word, n_words, stream));
}

void device_copy(uint64_t dst, uint64_t src, uint64_t bytes)
{
	DRIVER(copy(dst, src, bytes, stream));
}

void device_sync(void)
{
	DRIVER(sync(stream));
}

double device_drain(void)
{
	uint64_t from = rig_now_ns();
	int res;

	while ((res = driver.query(stream)) == NOT_READY)
		;
	RIG_REQUIRE(res == 0, "cuStreamQuery: %s", error_name(res));
	return (double)(rig_now_ns() - from) / 1e9;
}

/* ---- pools ----------------------------------------------------------------------------------- */

void device_pool_allocate(struct rig_pool *pool, const char *label, uint64_t salt,
			  enum device_kind kind)
{
	struct device_range range;

	if (kind == DEVICE_NONE) {
		rig_pool_allocate(pool, label, salt);
		return;
	}
	pool->fd = -1;
	pool->salt = salt;
	pool->mem = malloc(pool->bytes);
	RIG_REQUIRE(pool->mem);
	rig_pool_reset(pool);
	if (kind == DEVICE_IPC) {
		pool->device = device_alloc(pool->bytes);
	} else {
		device_alloc_chunks(&range, pool->bytes);
		pool->device = range.addr;
		pool->device_bytes = range.bytes;
		pool->chunk_bytes = range.chunk_bytes;
	}
	device_pool_push(pool);
}

void device_pool_register(struct rig_pool *pool, struct kvp_client *client, const char *label)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;
	const struct kvp_mem mem = {
		.kind = pool->device ? KVP_MEM_DEVICE : KVP_MEM_FD,
		.fd = pool->fd,
		.addr = pool->device,
		.bytes = pool->device ? pool->bytes : 0,
	};

	desc.entries = pool->entries;
	desc.n_entries = pool->n_entries;
	desc.mems = &mem;
	desc.n_mems = 1;
	desc.layout_tag = "rig 1";
	desc.tag_bytes = 5;
	desc.label = label;
	RIG_CALL(client, kvp_pool_register(client, &desc, &pool->id));
}

void device_pool_push(const struct rig_pool *pool)
{
	if (pool->device)
		device_put(pool->device, pool->mem, pool->bytes);
}

void device_pool_pull(const struct rig_pool *pool)
{
	if (pool->device)
		device_get(pool->mem, pool->device, pool->bytes);
}

void device_pool_free(struct rig_pool *pool)
{
	const struct device_range range = { pool->device, pool->device_bytes, pool->chunk_bytes };

	if (!pool->device)
		return;
	if (pool->chunk_bytes)
		device_free_chunks(&range);
	else
		device_free(pool->device);
	free(pool->mem);
	pool->mem = NULL;
	pool->device = 0;
}

void device_pool_renew(struct rig_pool *pool)
{
	const struct device_range range = { pool->device, pool->device_bytes, pool->chunk_bytes };

	RIG_REQUIRE(pool->chunk_bytes, "only chunks can come back at the same address");
	unmap_chunks(&range);
	map_chunks(&range);
	rig_pool_reset(pool);
	device_pool_push(pool);
}
