/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Page lists that a client builds ahead of the request that consumes them. Loop thread only. */

#include <stdint.h>

#include "proto/util.h"

struct kvp_list {
	uint32_t id;
	uint32_t n;
	uint32_t cap;
	uint32_t *pages; /* owned [cap] */
	struct kvp_list *next;
};

/* Lists of one session; embedded. Zeroed memory is an empty table. */
struct kvp_lists {
	struct kvp_list *first;
	uint32_t n_lists;
	uint64_t n_pages; /* of all lists, for the gauge */
};

/*
 * Appends to list `id`, made on first use; `offset` must equal the pages so far. 0; -EINVAL when it
 * does not, -ENOSPC past max_pages, -EMFILE past max_lists, -ENOMEM.
 */
int kvp_lists_append(struct kvp_lists *lists, uint32_t id, uint32_t offset, const uint32_t *pages,
		     uint32_t n, uint32_t max_lists, uint32_t max_pages);
/* NULL when there is none. Stays the table's. */
const struct kvp_list *kvp_lists_find(const struct kvp_lists *lists, uint32_t id);
/* Frees one list if it exists: a request that names lists consumes them, accepted or refused. */
void kvp_lists_drop(struct kvp_lists *lists, uint32_t id);
void kvp_lists_clear(struct kvp_lists *lists);
