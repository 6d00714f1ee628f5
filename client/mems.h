/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A pool's memories on their way into a message: exported where they are a device's. */

#include <stdbool.h>
#include <stddef.h>

#include "client/device.h"
#include "client/kvpack.h"
#include "proto/kvpack.pb-c.h"
#include "proto/limits.h"

#define KVPL_MEMS_MAX 64u

struct kvpl_mems {
	size_t n;
	Kvp__Memory *list[KVPL_MEMS_MAX]; /* into memories */
	Kvp__Memory memories[KVPL_MEMS_MAX];
	struct kvpl_export *exports; /* owned [n], of device memories */
	int fds[KVP_LIMIT_FDS];      /* borrowed: the caller's or the exports' */
	size_t n_fds;
};

/* Describes mems[n], with dma-bufs where they can be made if asked for. On failure a text in `err`
 * (KVPL_DEVICE_ERR bytes) and nothing to free. */
int kvpl_mems_init(struct kvpl_mems *out, const struct kvp_mem *mems, uint32_t n, bool dmabufs,
		   char *err);
/* Closes the exports' fds; zeroed memory is fine. */
void kvpl_mems_fini(struct kvpl_mems *out);
