/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GPU as programs that play engines use it: memory, copies, one stream. The driver is loaded at
 * run time, so that they build and run without one. A process that has used it must not fork ranks
 * that use it, too: ask with device_found() first, which looks from a child.
 *
 * Every call but device_found() ends the process on failure (rig_die).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/support_rig.h"

/* Has this machine a GPU? Its name, or why not, in `text`. */
bool device_found(char *text, size_t bytes);
/* For main(): is there a GPU, or the driver that is none (tests/fake_cuda.c), with which the
 * program starts over? Says on which, or why not. */
bool device_or_fake(char **argv);
bool device_is_fake(void);
/* How many GPUs there are. */
int device_count(void);
/* Can the daemon beside this program use it? No: it was built without CUDA. */
bool device_served(void);
/* Opens the first GPU for this process; more often is fine. */
void device_open(void);

/* What is allocated from here on is on that GPU, by its ordinal. */
void device_use(int gpu);

/* Memory that the library exports by an IPC handle, or, in physical chunks, by their fds. */
uint64_t device_alloc(uint64_t bytes);
void device_free(uint64_t addr);
struct device_range {
	uint64_t addr, bytes, chunk_bytes;
};
void device_alloc_chunks(struct device_range *range, uint64_t bytes);
void device_free_chunks(const struct device_range *range);
/* Free on the GPU, by whomever. */
uint64_t device_free_bytes(void);

void device_put(uint64_t dst, const void *src, uint64_t bytes);
void device_get(void *dst, uint64_t src, uint64_t bytes);

/* On the process's stream, in order, without waiting. */
void *device_stream(void);
void device_fill(uint64_t addr, uint32_t word, uint64_t n_words);
void device_copy(uint64_t dst, uint64_t src, uint64_t bytes);
void device_sync(void);
/* Seconds from now until the stream is empty, spinning. */
double device_drain(void);

/* ---- pools of the rig ------------------------------------------------------------------------ */

enum device_kind { DEVICE_NONE, DEVICE_IPC, DEVICE_CHUNKS };

/* As rig_pool_allocate() and rig_pool_make(), on the GPU; pool->mem is a copy of it in the host's
 * memory. */
void device_pool_allocate(struct rig_pool *pool, const char *label, uint64_t salt,
			  enum device_kind kind);
void device_pool_register(struct rig_pool *pool, struct kvp_client *client, const char *label);
/* The copy to the GPU, the GPU to the copy; nothing where the pool is the host's. */
void device_pool_push(const struct rig_pool *pool);
void device_pool_pull(const struct rig_pool *pool);
void device_pool_free(struct rig_pool *pool);
/* A pool in chunks: these are given back, and new ones with the background take their place at the
 * same address. */
void device_pool_renew(struct rig_pool *pool);
