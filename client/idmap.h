/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Finds objects by a 64-bit id and walks them in the order in which they came. Owns nothing but its
 * buckets; the node sits inside the object. */

#include <stddef.h>
#include <stdint.h>

struct kvpl_node {
	uint64_t id;                   /* unique in the map; set before adding */
	struct kvpl_node *chain;       /* same bucket */
	struct kvpl_node *prev, *next; /* order of arrival */
};

struct kvpl_idmap {                 /* zeroed is empty */
	struct kvpl_node **buckets; /* owned, [n_buckets], a power of two; NULL: none yet */
	size_t n_buckets;
	size_t n;
	struct kvpl_node *first, *last;
};

int kvpl_idmap_add(struct kvpl_idmap *map, struct kvpl_node *node);           /* -ENOMEM */
struct kvpl_node *kvpl_idmap_find(const struct kvpl_idmap *map, uint64_t id); /* NULL: none */
void kvpl_idmap_remove(struct kvpl_idmap *map, struct kvpl_node *node);
void kvpl_idmap_fini(struct kvpl_idmap *map);
