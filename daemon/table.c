/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/table.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#define FIRST_BITS 6u
#define MOST_BITS 24u

/* Ids are counters or random: multiplying by an odd constant spreads both over the high bits. */
static size_t bucket_of(uint64_t id, unsigned bits)
{
	return (size_t)((id * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - bits));
}

int kvp_table_init(struct kvp_table *table)
{
	*table = (struct kvp_table){ .bits = FIRST_BITS };
	table->buckets = calloc((size_t)1 << FIRST_BITS, sizeof(*table->buckets));
	return table->buckets ? 0 : -ENOMEM;
}

void kvp_table_fini(struct kvp_table *table)
{
	free(table->buckets);
	table->buckets = NULL;
}

struct kvp_table_node *kvp_table_find(const struct kvp_table *table, uint64_t id)
{
	struct kvp_table_node *node = table->buckets[bucket_of(id, table->bits)];

	while (node && node->id != id)
		node = node->next;
	return node;
}

static void put(struct kvp_table_node **buckets, unsigned bits, struct kvp_table_node *node)
{
	struct kvp_table_node **head = &buckets[bucket_of(node->id, bits)];

	node->next = *head;
	*head = node;
}

/* Without memory the chains just become longer. */
static void grow(struct kvp_table *table)
{
	unsigned bits = table->bits + 1;
	struct kvp_table_node **buckets = calloc((size_t)1 << bits, sizeof(*buckets));

	if (!buckets)
		return;

	for (size_t i = 0; i < (size_t)1 << table->bits; i++) {
		struct kvp_table_node *node = table->buckets[i];

		while (node) {
			struct kvp_table_node *next = node->next;

			put(buckets, bits, node);
			node = next;
		}
	}
	free(table->buckets);
	table->buckets = buckets;
	table->bits = bits;
}

int kvp_table_add(struct kvp_table *table, struct kvp_table_node *node)
{
	if (kvp_table_find(table, node->id))
		return -EEXIST;

	if (table->n >= (size_t)1 << table->bits && table->bits < MOST_BITS)
		grow(table);
	put(table->buckets, table->bits, node);
	table->n++;
	return 0;
}

void kvp_table_remove(struct kvp_table *table, struct kvp_table_node *node)
{
	struct kvp_table_node **at = &table->buckets[bucket_of(node->id, table->bits)];

	while (*at != node) {
		assert(*at);
		at = &(*at)->next;
	}
	*at = node->next;
	node->next = NULL;
	table->n--;
}
