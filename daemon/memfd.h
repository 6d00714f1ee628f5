/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Memory that a client shares by memfd: sealed against shrinking, then measured, then mapped.
 *
 * In that order, because a file that could still shrink would turn the daemon's next access into
 * SIGBUS. With F_SEAL_SHRINK in place the size is a lower bound for good, and a hole that the
 * client punches reads as zeroes. Huge page memfds are refused: a hole there takes a page from a
 * finite reserve, and when that is empty, touching the hole raises SIGBUS.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/kvpack.pb-c.h"

struct kvp_memfd {
	uint8_t *map;   /* owned mapping of all bytes */
	uint64_t bytes; /* of the file, at the time of the seal */
	bool writable;  /* false: mapped for reading only */
};

/*
 * Seals, measures and maps `fd`, which stays the caller's; the mapping does not need it. `what`
 * names it in texts ("fd 0"). With `write` false, or when the file does not allow writing, the
 * mapping is read-only. STATUS_OK; else *out is untouched and err says why: INVALID for what is no
 * memfd, cannot be sealed or is empty; SYSTEM when the mapping fails.
 */
Kvp__Status kvp_memfd_map(int fd, const char *what, bool write, struct kvp_memfd *out, char *err,
			  size_t err_bytes);
/* Harmless on zeroed memory. */
void kvp_memfd_unmap(struct kvp_memfd *mem);

/* A memfd to be sent to a client: made, written, sealed. Negative errno; the caller closes it. */
int kvp_memfd_make(const char *name);
int kvp_memfd_write(int fd, const void *bytes, size_t n);
/* Its bytes never change any more, and are read from the first on. */
int kvp_memfd_seal(int fd);
