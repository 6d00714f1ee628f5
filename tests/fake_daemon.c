/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Linked into a whole daemon with the RDMA device that is none: its lanes reach each other over it,
 * and no other process. KVP_FAKE_VERBS_DMABUF is "refused": the device takes no dma-buf.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fake_verbs.h"

__attribute__((constructor)) static void begin(void)
{
	const char *dmabuf = getenv("KVP_FAKE_VERBS_DMABUF");

	kvp_fake_reset();
	if (dmabuf && strcmp(dmabuf, "refused") == 0)
		kvp_fake.refuse_dmabuf = EOPNOTSUPP;
}
