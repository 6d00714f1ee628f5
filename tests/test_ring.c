/* SPDX-License-Identifier: Apache-2.0 */

/* Slots and tables: what lanes keep their pieces and objects in. */

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/ring.h"
#include "daemon/table.h"

Test(ring, takes_the_last_freed_first)
{
	struct kvp_ring ring;
	struct kvp_slot *a, *b;

	cr_assert_eq(kvp_ring_init(&ring, 2, 4096, 0), 0);
	a = kvp_ring_take(&ring, 1, 5);
	b = kvp_ring_take(&ring, 1, 6);
	cr_assert(a && b && a != b);
	cr_assert_eq(b->data - a->data, 4096);
	cr_assert_null(kvp_ring_take(&ring, 1, 7));
	cr_assert_eq(ring.n_free, 0);
	a->refs++;
	kvp_ring_put(&ring, a);
	cr_assert_null(kvp_ring_take(&ring, 1, 7));
	kvp_ring_put(&ring, b);
	kvp_ring_put(&ring, a);
	cr_assert_eq(ring.n_free, 2);
	cr_assert_eq(kvp_ring_take(&ring, 1, 8), a);
	kvp_ring_put(&ring, a);
	kvp_ring_fini(&ring);
}

Test(ring, zeroes_what_another_uid_left)
{
	struct kvp_ring ring;
	struct kvp_slot *slot;

	cr_assert_eq(kvp_ring_init(&ring, 1, 4096, 64), 0);
	slot = kvp_ring_take(&ring, 1, 0);
	memset(slot->data, 7, 100);
	kvp_slot_dirty(slot, 100);
	kvp_ring_put(&ring, slot);

	slot = kvp_ring_take(&ring, 1, 0);
	cr_assert_eq(slot->data[99], 7);
	kvp_ring_put(&ring, slot);

	slot = kvp_ring_take(&ring, 2, 0);
	for (uint32_t i = 0; i < 4096; i++)
		cr_assert_eq(slot->data[i], 0);
	kvp_ring_put(&ring, slot);
	kvp_ring_fini(&ring);
}

/* Notes what it is to clean; launches have the tickets from 5 on. */
struct cleaner {
	uint64_t ticket;
	const struct kvp_slot *slot;
	int refuses;
};

static int clean(void *arg, struct kvp_slot *slot, uint64_t *ticket)
{
	struct cleaner *cleaner = arg;

	if (cleaner->refuses)
		return -EAGAIN;
	cleaner->slot = slot;
	*ticket = cleaner->ticket++;
	return 0;
}

static void device_ring(struct kvp_ring *ring, struct cleaner *cleaner, uint8_t *twins)
{
	const struct kvp_ring_twins with = {
		.twins = twins, .bytes = 64, .stride = 64, .clean = clean, .clean_arg = cleaner
	};

	/* Memory that may not be touched. */
	cr_assert_eq(kvp_ring_init_at(ring, 2, 4096, 0, (void *)(uintptr_t)1), 0);
	kvp_ring_set_twins(ring, &with);
}

Test(ring, of_a_device_is_cleaned_by_launches)
{
	uint8_t twins[128];
	struct cleaner cleaner = { .ticket = 5 };
	struct kvp_ring ring;
	struct kvp_slot *a, *b;

	memset(twins, 7, sizeof(twins));
	device_ring(&ring, &cleaner, twins);
	a = kvp_ring_take(&ring, 1, 0);
	b = kvp_ring_take(&ring, 1, 0);
	kvp_slot_dirty(a, 100);
	kvp_ring_put(&ring, a);
	cr_assert_eq(kvp_ring_take(&ring, 1, 0), a); /* its own user's */
	cr_assert_null(cleaner.slot);
	kvp_ring_put(&ring, a);

	cleaner.refuses = 1;
	cr_assert_null(kvp_ring_take(&ring, 2, 0));
	cleaner.refuses = 0;
	cr_assert_null(kvp_ring_take(&ring, 2, 0));
	cr_assert_eq(cleaner.slot, a);
	cr_assert_eq(a->twin[63], 0);
	cr_assert_eq(b->twin[0], 7);
	cr_assert_eq(ring.n_free, 0);
	kvp_ring_over(&ring, 4);
	cr_assert_null(kvp_ring_take(&ring, 2, 0));

	kvp_ring_failed(&ring, 5); /* it is as dirty as before */
	cr_assert_eq(ring.n_free, 1);
	cleaner.slot = NULL;
	cr_assert_null(kvp_ring_take(&ring, 2, 0));
	cr_assert_eq(cleaner.slot, a);
	kvp_ring_put(&ring, b); /* never dirty: at once */
	cr_assert_eq(kvp_ring_take(&ring, 2, 0), b);
	kvp_ring_over(&ring, 6);
	cr_assert_eq(kvp_ring_take(&ring, 2, 0), a);
	cr_assert_eq(a->uid, 2);
	cr_assert_eq(a->dirty, 0);
	kvp_ring_put(&ring, a);
	kvp_ring_put(&ring, b);
	kvp_ring_fini(&ring);
}

Test(ring, refuses_sizes_that_cannot_be)
{
	struct kvp_ring ring;

	cr_assert_eq(kvp_ring_init(&ring, 0, 4096, 0), -ENOMEM);
	cr_assert_eq(kvp_ring_init(&ring, 4, 0, 0), -ENOMEM);
	cr_assert_eq(kvp_ring_init(&ring, 4, UINT64_MAX / 2, 0), -ENOMEM);
	kvp_ring_fini(&ring);
}

Test(table, keeps_what_was_added)
{
	enum { N = 5000 };
	struct kvp_table_node *nodes = calloc(N, sizeof(*nodes)), twin = { .id = 77 };
	struct kvp_table table;

	cr_assert_eq(kvp_table_init(&table), 0);
	for (uint64_t i = 0; i < N; i++) {
		nodes[i].id = i % 2 ? i : i << 40;
		cr_assert_eq(kvp_table_add(&table, &nodes[i]), 0);
	}
	cr_assert_eq(table.n, N);
	cr_assert_eq(kvp_table_add(&table, &twin), -EEXIST);
	for (uint64_t i = 0; i < N; i++)
		cr_assert_eq(kvp_table_find(&table, nodes[i].id), &nodes[i]);
	cr_assert_null(kvp_table_find(&table, N + 1));
	for (uint64_t i = 0; i < N; i += 3)
		kvp_table_remove(&table, &nodes[i]);
	for (uint64_t i = 0; i < N; i++)
		cr_assert_eq(kvp_table_find(&table, nodes[i].id), i % 3 ? &nodes[i] : NULL);
	kvp_table_fini(&table);
	free(nodes);
}
