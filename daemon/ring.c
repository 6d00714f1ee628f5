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

static uint64_t stride_of(uint64_t slot_bytes, uint32_t gap)
{
	return gap ? KVP_ALIGN_UP(slot_bytes + gap, GAP_ALIGN) : slot_bytes;
}

uint64_t kvp_ring_bytes(uint32_t n, uint64_t slot_bytes, uint32_t gap)
{
	if (n == 0 || slot_bytes == 0 || slot_bytes > SIZE_MAX / n - gap - GAP_ALIGN)
		return 0;
	return n * stride_of(slot_bytes, gap);
}

int kvp_ring_init_at(struct kvp_ring *ring, uint32_t n, uint64_t slot_bytes, uint32_t gap,
		     void *base)
{
	*ring = (struct kvp_ring){ .slot_bytes = slot_bytes };
	if (kvp_ring_bytes(n, slot_bytes, gap) == 0)
		return -ENOMEM;

	ring->slots = calloc(n, sizeof(*ring->slots));
	if (!ring->slots)
		return -ENOMEM;

	ring->stride = stride_of(slot_bytes, gap);
	ring->base = base;
	ring->lent = true;
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

int kvp_ring_init(struct kvp_ring *ring, uint32_t n, uint64_t slot_bytes, uint32_t gap)
{
	uint64_t bytes = kvp_ring_bytes(n, slot_bytes, gap);
	void *base;
	int r;

	*ring = (struct kvp_ring){ .slot_bytes = slot_bytes };
	if (bytes == 0)
		return -ENOMEM;

	base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return -ENOMEM;

	/* Every byte is copied twice through here: a refusal of larger pages costs only time. */
	(void)madvise(base, bytes, MADV_HUGEPAGE);
	r = kvp_ring_init_at(ring, n, slot_bytes, gap, base);
	if (r < 0) {
		(void)munmap(base, bytes); /* it was ours to map */
		return r;
	}
	ring->lent = false;
	return 0;
}

void kvp_ring_fini(struct kvp_ring *ring)
{
	if (ring->base && !ring->lent)
		(void)munmap(ring->base, ring->n * ring->stride); /* it was ours to map */
	free(ring->slots);
	*ring = (struct kvp_ring){ 0 };
}

void kvp_ring_set_twins(struct kvp_ring *ring, const struct kvp_ring_twins *twins)
{
	ring->twins = twins->twins;
	ring->twin_bytes = twins->bytes;
	ring->twin_stride = twins->stride;
	ring->clean = twins->clean;
	ring->clean_arg = twins->clean_arg;
	for (uint32_t i = 0; i < ring->n; i++)
		ring->slots[i].twin = ring->twins + i * ring->twin_stride;
}

static void keep(struct kvp_ring *ring, struct kvp_slot *slot)
{
	slot->next_free = ring->kept;
	ring->kept = slot;
}

/* The first free slot has bytes of another user: has it zeroed, and kept until then. */
static int clean_first(struct kvp_ring *ring)
{
	struct kvp_slot *slot = ring->free;
	int r = ring->clean(ring->clean_arg, slot, &slot->ticket);

	if (r < 0)
		return r;
	memset(slot->twin, 0, KVP_MIN(slot->dirty, ring->twin_bytes));
	slot->cleaning = true;
	ring->free = slot->next_free;
	ring->n_free--;
	keep(ring, slot);
	return 0;
}

struct kvp_slot *kvp_ring_take(struct kvp_ring *ring, uint32_t uid, uint64_t now_ns)
{
	struct kvp_slot *slot;

	while ((slot = ring->free) && ring->clean && slot->dirty && slot->uid != uid)
		if (clean_first(ring) < 0)
			return NULL;
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
	slot->ticket = 0;
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
	if (slot->ticket > ring->over) {
		keep(ring, slot);
		return;
	}
	slot->next_free = ring->free;
	ring->free = slot;
	ring->n_free++;
}

/* Index of the slot whose memory begins there, of n that are stride apart; n: none. */
static uint32_t slot_index(const uint8_t *base, uint64_t stride, uint32_t n, const uint8_t *place)
{
	uintptr_t offset = (uintptr_t)place - (uintptr_t)base;

	if (!base || place < base || offset % stride != 0 || offset / stride >= n)
		return n;
	return (uint32_t)(offset / stride);
}

struct kvp_slot *kvp_ring_at(const struct kvp_ring *ring, const void *place)
{
	uint32_t idx = slot_index(ring->base, ring->stride, ring->n, place);

	if (idx == ring->n)
		idx = slot_index(ring->twins, ring->twin_stride, ring->n, place);
	return idx < ring->n ? &ring->slots[idx] : NULL;
}

void kvp_ring_over(struct kvp_ring *ring, uint64_t ticket)
{
	struct kvp_slot **at = &ring->kept;
	struct kvp_slot *slot;

	ring->over = ticket;
	while ((slot = *at)) {
		if (slot->ticket > ticket) {
			at = &slot->next_free;
			continue;
		}
		*at = slot->next_free;
		if (slot->cleaning)
			slot->dirty = 0;
		slot->cleaning = false;
		slot->next_free = ring->free;
		ring->free = slot;
		ring->n_free++;
	}
}

void kvp_ring_failed(struct kvp_ring *ring, uint64_t ticket)
{
	for (struct kvp_slot *slot = ring->kept; slot; slot = slot->next_free)
		if (slot->ticket == ticket)
			slot->cleaning = false; /* it is as dirty as before */
	kvp_ring_over(ring, ticket);
}
