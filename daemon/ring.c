/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ring.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "proto/util.h"

/* Slots with a gap begin on pages like those without. */
#define GAP_ALIGN 4096u

int kvp_ring_init(struct kvp_ring *ring, uint32_t n, uint64_t slot_bytes, uint32_t gap)
{
	void *base;

	*ring = (struct kvp_ring){ .slot_bytes = slot_bytes };
	if (n == 0 || slot_bytes == 0 || slot_bytes > SIZE_MAX / n - gap - GAP_ALIGN)
		return -ENOMEM;

	ring->stride = gap ? KVP_ALIGN_UP(slot_bytes + gap, GAP_ALIGN) : slot_bytes;

	ring->slots = calloc(n, sizeof(*ring->slots));
	if (!ring->slots)
		return -ENOMEM;

	base = mmap(NULL, n * ring->stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		    0);
	if (base == MAP_FAILED) {
		kvp_ring_fini(ring);
		return -ENOMEM;
	}

	ring->base = base;
	ring->n = n;
	ring->n_free = n;
	for (uint32_t i = n; i-- > 0;) {
		ring->slots[i].idx = i;
		ring->slots[i].data = ring->base + i * ring->stride;
		ring->slots[i].next_free = ring->free;
		ring->free = &ring->slots[i];
	}
	return 0;
}

void kvp_ring_fini(struct kvp_ring *ring)
{
	if (ring->base)
		(void)munmap(ring->base, ring->n * ring->stride); /* it was ours to map */
	free(ring->slots);
	*ring = (struct kvp_ring){ 0 };
}

struct kvp_slot *kvp_ring_take(struct kvp_ring *ring, uint32_t uid, uint64_t now_ns)
{
	struct kvp_slot *slot = ring->free;

	if (!slot)
		return NULL;

	ring->free = slot->next_free;
	ring->n_free--;
	if (slot->dirty && slot->uid != uid) {
		memset(slot->data, 0, slot->dirty);
		slot->dirty = 0;
	}
	slot->uid = uid;
	slot->refs = 1;
	slot->token = 0;
	slot->user = NULL;
	slot->since_ns = now_ns;
	return slot;
}

void kvp_ring_put(struct kvp_ring *ring, struct kvp_slot *slot)
{
	assert(slot->refs > 0);
	if (--slot->refs > 0)
		return;

	slot->token = 0;
	slot->user = NULL;
	slot->next_free = ring->free;
	ring->free = slot;
	ring->n_free++;
}
