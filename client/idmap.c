/* SPDX-License-Identifier: Apache-2.0 */
#include "client/idmap.h"

#include <errno.h>
#include <stdlib.h>

#define FIRST_BUCKETS 64u

/* Ids count up, so their low bits are spread already. */
static struct kvpl_node **bucket_of(const struct kvpl_idmap *map, uint64_t id)
{
	return &map->buckets[id & (map->n_buckets - 1)];
}

static int grow(struct kvpl_idmap *map)
{
	size_t n_buckets = map->n_buckets ? map->n_buckets * 2 : FIRST_BUCKETS;
	struct kvpl_node **buckets = calloc(n_buckets, sizeof(struct kvpl_node *));

	if (!buckets)
		return -ENOMEM;
	free(map->buckets);
	map->buckets = buckets;
	map->n_buckets = n_buckets;
	for (struct kvpl_node *node = map->first; node; node = node->next) {
		struct kvpl_node **bucket = bucket_of(map, node->id);

		node->chain = *bucket;
		*bucket = node;
	}
	return 0;
}

int kvpl_idmap_add(struct kvpl_idmap *map, struct kvpl_node *node)
{
	struct kvpl_node **bucket;

	/* A failed growth only makes chains longer, once there are buckets at all. */
	if (map->n >= map->n_buckets && grow(map) < 0 && !map->buckets)
		return -ENOMEM;
	bucket = bucket_of(map, node->id);
	node->chain = *bucket;
	*bucket = node;
	node->prev = map->last;
	node->next = NULL;
	if (map->last)
		map->last->next = node;
	else
		map->first = node;
	map->last = node;
	map->n++;
	return 0;
}

struct kvpl_node *kvpl_idmap_find(const struct kvpl_idmap *map, uint64_t id)
{
	struct kvpl_node *node = map->buckets ? *bucket_of(map, id) : NULL;

	while (node && node->id != id)
		node = node->chain;
	return node;
}

void kvpl_idmap_remove(struct kvpl_idmap *map, struct kvpl_node *node)
{
	struct kvpl_node **link = bucket_of(map, node->id);

	while (*link != node)
		link = &(*link)->chain;
	*link = node->chain;
	if (node->prev)
		node->prev->next = node->next;
	else
		map->first = node->next;
	if (node->next)
		node->next->prev = node->prev;
	else
		map->last = node->prev;
	map->n--;
}

void kvpl_idmap_fini(struct kvpl_idmap *map)
{
	free(map->buckets);
	*map = (struct kvpl_idmap){ 0 };
}
