/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Objects by 64-bit id: a hash table of nodes that are embedded in the objects. One thread. */

#include <stddef.h>
#include <stdint.h>

struct kvp_table_node {
	uint64_t id;
	struct kvp_table_node *next; /* in its bucket */
};

struct kvp_table {
	struct kvp_table_node **buckets; /* owned [1 << bits] */
	unsigned bits;
	size_t n;
};

/* 0 or -ENOMEM. */
int kvp_table_init(struct kvp_table *table);
/* The nodes are the caller's; NULL buckets are fine. */
void kvp_table_fini(struct kvp_table *table);

/* The node of that id, or NULL. */
struct kvp_table_node *kvp_table_find(const struct kvp_table *table, uint64_t id);

/* Adds a node whose id is set; -EEXIST if the id is taken. Grows when there is memory for it. */
int kvp_table_add(struct kvp_table *table, struct kvp_table_node *node);

/* The node is in the table. */
void kvp_table_remove(struct kvp_table *table, struct kvp_table_node *node);
