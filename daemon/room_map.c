/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room_map.h"

#include <errno.h>
#include <stdlib.h>

#define MAP_FIRST_SLOTS 64u

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= UINT64_C(0xff51afd7ed558ccd);
	x ^= x >> 33;
	x *= UINT64_C(0xc4ceb9fe1a85ec53);
	return x ^ x >> 33;
}

static uint32_t slot_of(const struct kvp_map *map, uint64_t key0, uint64_t key1)
{
	return (uint32_t)mix(mix(key0 ^ map->seed) + key1) & (map->n_slots - 1);
}

int kvp_map_init(struct kvp_map *map, uint64_t seed)
{
	*map = (struct kvp_map){ .n_slots = MAP_FIRST_SLOTS, .seed = seed };
	map->slots = calloc(map->n_slots, sizeof(struct kvp_map_link *));
	return map->slots ? 0 : -ENOMEM;
}

void kvp_map_fini(struct kvp_map *map)
{
	free(map->slots);
	map->slots = NULL;
}

static void link_in(struct kvp_map *map, struct kvp_map_link *link)
{
	struct kvp_map_link **slot = &map->slots[slot_of(map, link->key[0], link->key[1])];

	link->next = *slot;
	*slot = link;
}

static void grow(struct kvp_map *map)
{
	struct kvp_map_link **old = map->slots, **slots;
	uint32_t n_old = map->n_slots;

	slots = calloc((size_t)n_old * 2, sizeof(struct kvp_map_link *));
	if (!slots)
		return;
	map->slots = slots;
	map->n_slots = 2 * n_old;
	for (uint32_t i = 0; i < n_old; i++) {
		while (old[i]) {
			struct kvp_map_link *link = old[i];

			old[i] = link->next;
			link_in(map, link);
		}
	}
	free(old);
}

void kvp_map_add(struct kvp_map *map, struct kvp_map_link *link)
{
	if (map->n >= map->n_slots && map->n_slots < 1u << 30)
		grow(map);
	link_in(map, link);
	map->n++;
}

void kvp_map_remove(struct kvp_map *map, struct kvp_map_link *link)
{
	struct kvp_map_link **at = &map->slots[slot_of(map, link->key[0], link->key[1])];

	while (*at != link)
		at = &(*at)->next;
	*at = link->next;
	map->n--;
}

struct kvp_map_link *kvp_map_find(const struct kvp_map *map, uint64_t key0, uint64_t key1)
{
	struct kvp_map_link *link = map->slots[slot_of(map, key0, key1)];

	while (link && (link->key[0] != key0 || link->key[1] != key1))
		link = link->next;
	return link;
}
