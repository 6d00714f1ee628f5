/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "proto/util.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

/* What is being looked at, for texts. */
struct looked_at {
	int fd;
	const char *what;
	char *err;
	size_t err_bytes;
};

static Kvp__Status KVP_PRINTF(3, 4)
	refuse(const struct looked_at *at, Kvp__Status status, const char *fmt, ...)
{
	int n = snprintf(at->err, at->err_bytes, "%s: ", at->what);
	va_list args;

	va_start(args, fmt);
	if (n >= 0 && (size_t)n < at->err_bytes)
		(void)vsnprintf(at->err + n, at->err_bytes - (size_t)n, fmt, args); /* may be cut */
	va_end(args);
	return status;
}

/* Ends with F_SEAL_SHRINK set, or a refusal. */
static Kvp__Status seal(const struct looked_at *at, int *seals)
{
	struct statfs fs;

	*seals = fcntl(at->fd, F_GET_SEALS);
	if (*seals < 0)
		return refuse(at, KVP__STATUS__STATUS_INVALID,
			      "not a memfd: host memory is registered as memfds");
	if (fstatfs(at->fd, &fs) < 0)
		return refuse(at, KVP__STATUS__STATUS_SYSTEM, "fstatfs: %s", strerror(errno));
	if (fs.f_type == HUGETLBFS_MAGIC)
		return refuse(
			at, KVP__STATUS__STATUS_INVALID,
			"huge page memfds are not supported: a hole in one can kill its reader");
	if (*seals & F_SEAL_SHRINK)
		return KVP__STATUS__STATUS_OK;
	if (fcntl(at->fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
		return KVP__STATUS__STATUS_OK;
	if (errno != EPERM)
		return refuse(at, KVP__STATUS__STATUS_SYSTEM, "F_ADD_SEALS: %s", strerror(errno));
	if ((fcntl(at->fd, F_GETFL) & O_ACCMODE) == O_RDONLY)
		return refuse(at, KVP__STATUS__STATUS_INVALID,
			      "open for reading only and not yet sealed: add F_SEAL_SHRINK before");
	return refuse(at, KVP__STATUS__STATUS_INVALID,
		      "cannot be sealed against shrinking: create it with MFD_ALLOW_SEALING");
}

Kvp__Status kvp_memfd_map(int fd, const char *what, bool write, struct kvp_memfd *out, char *err,
			  size_t err_bytes)
{
	const struct looked_at at = { fd, what, err, err_bytes };
	struct stat st;
	int seals;
	void *map;
	Kvp__Status status = seal(&at, &seals);

	if (status != KVP__STATUS__STATUS_OK)
		return status;
	/* Not before: only now the size cannot fall any more. */
	if (fstat(fd, &st) < 0)
		return refuse(&at, KVP__STATUS__STATUS_SYSTEM, "fstat: %s", strerror(errno));
	if (st.st_size <= 0)
		return refuse(&at, KVP__STATUS__STATUS_INVALID, "is empty, 0 bytes");

	write = write && !(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) &&
		(fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
	/* Kernels before 6.7 do not map a write-sealed file shared; its bytes never change, so a
	 * private mapping sees the same. */
	map = mmap(NULL, (size_t)st.st_size, PROT_READ | (write ? PROT_WRITE : 0),
		   seals & F_SEAL_WRITE ? MAP_PRIVATE : MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return refuse(&at, KVP__STATUS__STATUS_SYSTEM, "mmap of %lld bytes: %s",
			      (long long)st.st_size, strerror(errno));
	*out = (struct kvp_memfd){ map, (uint64_t)st.st_size, write };
	return KVP__STATUS__STATUS_OK;
}

void kvp_memfd_unmap(struct kvp_memfd *mem)
{
	if (mem->map)
		(void)munmap(mem->map, mem->bytes); /* cannot fail for a whole mapping */
	*mem = (struct kvp_memfd){ 0 };
}

int kvp_memfd_make(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	return fd < 0 ? -errno : fd;
}

int kvp_memfd_write(int fd, const void *bytes, size_t n)
{
	const uint8_t *at = bytes;

	while (n > 0) {
		ssize_t done = write(fd, at, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -errno;
		at += done;
		n -= (size_t)done;
	}
	return 0;
}

int kvp_memfd_seal(int fd)
{
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0 ||
	    lseek(fd, 0, SEEK_SET) < 0)
		return -errno;
	return 0;
}
