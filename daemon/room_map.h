/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A hash map of intrusive links by two numbers. Clients and peers choose the numbers, so where they
 * fall depends on a seed that nobody knows. Adding cannot fail: without memory to grow, chains
 * become longer.
 */

#include <stdint.h>

struct kvp_map_link {
	struct kvp_map_link *next;
	uint64_t key[2];
};

struct kvp_map {
	struct kvp_map_link **slots; /* owned [n_slots], a power of two */
	uint32_t n_slots, n;
	uint64_t seed;
};

/* 0 or -ENOMEM. */
int kvp_map_init(struct kvp_map *map, uint64_t seed);
/* Frees the slots; links are their owners'. */
void kvp_map_fini(struct kvp_map *map);
/* The keys are set and not in the map. */
void kvp_map_add(struct kvp_map *map, struct kvp_map_link *link);
/* The link is in the map. */
void kvp_map_remove(struct kvp_map *map, struct kvp_map_link *link);
/* NULL: none. */
struct kvp_map_link *kvp_map_find(const struct kvp_map *map, uint64_t key0, uint64_t key1);
