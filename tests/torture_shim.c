/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linked into kvpackd, kvpackctl and libkvpack with --wrap for each function of
 * tests/torture_calls.h: counts the calls of each place, and lets those fail that the test names.
 * Without a file to share it does nothing.
 */

#include "tests/torture_shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <uv.h>

#include "daemon/cuda.h"
#include "tests/torture_calls.h"

/* Built for the library, it has another file and leaves the program's libraries alone. */
#ifdef TORTURE_LIBRARY
#define TORTURE_ENV "KVP_TORTURE_LIB"
#else
#define TORTURE_ENV "KVP_TORTURE"
#endif

/* Functions differ in what they take and return; on the platforms where this runs, eight words in
 * and one out carry any of those in the lists. */
typedef long any_fn(long, long, long, long, long, long, long, long);

enum { FAIL_NUL, FAIL_ONE, FAIL_MAP, FAIL_UV, FAIL_UVD, FAIL_POS, FAIL_UCS, FAIL_UCSP };

enum fn {
#define NUMBER(name, how, error) FN_##name,
	TORTURE_CALLS(NUMBER) FN_N
};

static struct torture *torture;
extern const char __ehdr_start[]
	__attribute__((visibility("hidden")));                  /* where the program begins */
extern const char _end[] __attribute__((visibility("hidden"))); /* and ends */

static __attribute__((constructor(101))) void share(void)
{
	const char *path = getenv(TORTURE_ENV);
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *map;

	if (fd < 0)
		return;
	map = mmap(NULL, sizeof(*torture), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	if (map != MAP_FAILED)
		torture = map;
}

/* The site of a place, entered when it is new; TORTURE_SITES: the table is full. */
static uint32_t find_site(uint64_t place, uint32_t fn)
{
	uint32_t n = TORTURE_SITES - TORTURE_LIBS;
	uint32_t at = (uint32_t)((place * UINT64_C(0x9e3779b97f4a7c15) >> 32) % n);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t site = TORTURE_LIBS + (at + i) % n;
		uint64_t had = 0;

		if (atomic_compare_exchange_strong(&torture->sites[site].place, &had, place))
			torture->sites[site].fn = fn;
		else if (had != place)
			continue;
		return site;
	}
	torture->n_lost++;
	return TORTURE_SITES;
}

static bool fails_at(uint32_t site)
{
	if (site >= TORTURE_SITES)
		return false;
	if (torture->counting)
		torture->sites[site].calls++;
	if (torture->site != site)
		return false;
	if (torture->pass > 0) {
		torture->pass--;
		return false;
	}
	if (torture->fail == 0)
		return false;
	torture->fail--;
	torture->fired++;
	return true;
}

/* The same in each process, wherever libraries are loaded. */
static uint64_t place_of(const char *caller)
{
	const char *name;
	uint64_t hash = 0;
	Dl_info info;

	if (caller >= __ehdr_start && caller < _end)
		return (uint64_t)(caller - __ehdr_start);
	if (!dladdr(caller, &info) || !info.dli_fname)
		return TORTURE_ELSEWHERE;
	name = strrchr(info.dli_fname, '/');
	for (name = name ? name : info.dli_fname; *name; name++)
		hash = hash * 31 + (uint8_t)*name;
	return TORTURE_ELSEWHERE + ((hash & 0xffffff) << 32) +
	       (uint64_t)(caller - (const char *)info.dli_fbase);
}

static bool fails(const void *caller, uint32_t fn)
{
	if (!torture || (!torture->counting && torture->site >= TORTURE_SITES))
		return false;
	/* A return address is the place of one call. */
	return fails_at(find_site(place_of(caller), fn));
}

static long failure(int how, int error)
{
	switch (how) {
	case FAIL_UV:
	case FAIL_UVD:
		return -error;
	case FAIL_POS:
		return error;
	case FAIL_UCS:
	case FAIL_UCSP:
		return -4; /* no memory */
	default:
		errno = error;
		return how == FAIL_NUL ? 0 : -1; /* MAP_FAILED is -1 too */
	}
}

#define WRAP(name, how, error)                                                              \
	long __real_##name(long, long, long, long, long, long, long, long);                 \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h); \
	long __wrap_##name(long a, long b, long c, long d, long e, long f, long g, long h)  \
	{                                                                                   \
		if (fails(__builtin_return_address(0), FN_##name)) {                        \
			if (FAIL_##how == FAIL_UVD)                                         \
				(void)__real_##name(a, b, c, d, e, f, g, h);                \
			return failure(FAIL_##how, error);                                  \
		}                                                                           \
		return __real_##name(a, b, c, d, e, f, g, h);                               \
	}
/* NOLINTNEXTLINE(readability-function-size): eight arguments stand for any */
TORTURE_CALLS(WRAP)

#ifndef TORTURE_LIBRARY
/* ---- what libraries allocate for the daemon ----------------------------------------------------
 */

static bool lib_fails(uint32_t lib)
{
	if (!torture || (!torture->counting && torture->site >= TORTURE_SITES))
		return false;
	torture->sites[lib].place = 1;
	torture->sites[lib].fn = FN_N + lib;
	return fails_at(lib);
}

static void *json_malloc(size_t n)
{
	return lib_fails(0) ? NULL : (void *)__real_malloc((long)n, 0, 0, 0, 0, 0, 0, 0);
}

static void *lib_malloc(size_t n)
{
	return lib_fails(1) ? NULL : (void *)__real_malloc((long)n, 0, 0, 0, 0, 0, 0, 0);
}

static void *lib_calloc(size_t n, size_t bytes)
{
	return lib_fails(2) ? NULL : (void *)__real_calloc((long)n, (long)bytes, 0, 0, 0, 0, 0, 0);
}

/* libuv ends the process when it cannot enlarge its table of descriptors: not ours to survive. */
static void *lib_realloc(void *old, size_t bytes)
{
	return (void *)__real_realloc((long)old, (long)bytes, 0, 0, 0, 0, 0, 0);
}

static __attribute__((constructor(102))) void hook(void)
{
	cJSON_Hooks hooks = { json_malloc, free };

	if (!torture)
		return;
	cJSON_InitHooks(&hooks);
	(void)uv_replace_allocator(lib_malloc, lib_realloc, lib_calloc, free);
}

/* ---- the CUDA driver, which the daemon looks up -------------------------------------------------
 */

#ifdef KVP_CUDA
typedef long cuda_fn(long, long, long, long, long, long, long, long, long, long, long);

enum cuda_fn_number {
#define CUDA_NUMBER(fn) CUDA_##fn,
	KVP_CUDA_CALLS(CUDA_NUMBER) KVP_CUDA_LATER(CUDA_NUMBER) CUDA_N
};

/* What ends something has done so when it fails: else the driver would keep it, whatever we do. */
static bool ends_something(enum cuda_fn_number fn)
{
	switch (fn) {
	case CUDA_cuDevicePrimaryCtxRelease:
	case CUDA_cuModuleUnload:
	case CUDA_cuStreamDestroy:
	case CUDA_cuEventDestroy:
	case CUDA_cuMemFree:
	case CUDA_cuMemFreeHost:
	case CUDA_cuIpcCloseMemHandle:
	case CUDA_cuMemAddressFree:
	case CUDA_cuMemUnmap:
	case CUDA_cuMemRelease:
		return true;
	default:
		return false;
	}
}

#define CUDA_WRAP(fn)                                                                             \
	static cuda_fn *real_##fn;                                                                \
	static long wrap_##fn(long a, long b, long c, long d, long e, long f, long g, long h,     \
			      long i, long j, long k)                                             \
	{                                                                                         \
		bool failed =                                                                     \
			fails(__builtin_return_address(0), FN_N + TORTURE_LIB_KINDS + CUDA_##fn); \
		long result = CUDA_ERROR_OUT_OF_MEMORY;                                           \
                                                                                                  \
		if (!failed || ends_something(CUDA_##fn))                                         \
			result = real_##fn(a, b, c, d, e, f, g, h, i, j, k);                      \
		return failed ? CUDA_ERROR_OUT_OF_MEMORY : result;                                \
	}
/* NOLINTBEGIN(readability-function-size): eleven arguments stand for any */
KVP_CUDA_CALLS(CUDA_WRAP)
KVP_CUDA_LATER(CUDA_WRAP)
/* NOLINTEND(readability-function-size) */

static const struct {
	const char *name;
	cuda_fn **real, *wrap;
} cuda_fns[CUDA_N] = {
#define CUDA_ENTRY(fn) { #fn, &real_##fn, wrap_##fn },
	KVP_CUDA_CALLS(CUDA_ENTRY) KVP_CUDA_LATER(CUDA_ENTRY)
};

/* The name, or a later version of it: "cuMemAlloc_v2". */
static bool is_version(const char *name, const char *of)
{
	size_t n = strlen(of);

	return strncmp(name, of, n) == 0 && (name[n] == 0 || name[n] == '_');
}
#endif

void *__real_dlsym(void *lib, const char *name);
void *__wrap_dlsym(void *lib, const char *name);
void *__wrap_dlsym(void *lib, const char *name)
{
	void *at = __real_dlsym(lib, name);

#ifdef KVP_CUDA
	for (size_t i = 0; i < CUDA_N && torture && at; i++) {
		if (!is_version(name, cuda_fns[i].name))
			continue;
		*cuda_fns[i].real = (cuda_fn *)at;
		return (void *)cuda_fns[i].wrap;
	}
#endif
	return at;
}
#endif
