/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A ring of equal slots: the pack ring or the landing ring of a lane. One thread. The memory is the
 * host's, or a GPU's, which nothing here touches: its slots are cleaned by a launch of their
 * user's, and have a small twin in the host's memory for what only the processor can read or write.
 *
 * A GPU may still read or write a slot that its users have put: a slot with a ticket that is not
 * over stays out of use until kvp_ring_over() has heard of it.
 *
 * The slot that was freed last is taken first: its memory is still in the cache, and a ring that is
 * never full touches only a part of its memory. A slot is zeroed when the uid whose bytes it holds
 * changes.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvp_slot {
	uint8_t *data;
	uint8_t *twin;     /* [ring->twin_bytes]; NULL: data is the host's memory */
	uint32_t idx;      /* fixed */
	uint32_t refs;     /* 0: free */
	uint64_t dirty;    /* bytes from data on that may hold something of `uid` */
	uint64_t token;    /* landing: what DATA must name; 0: none is accepted */
	void *user;        /* who shows as its holder */
	uint64_t since_ns; /* taken at */
	uint64_t ticket;   /* of the last launch that uses it; 0: none */
	uint32_t uid;      /* whose bytes it holds or held */
	bool cleaning;     /* zeroed by the launch of its ticket */
	struct kvp_slot *next_free;
};

struct kvp_ring {
	struct kvp_slot *slots; /* owned [n] */
	uint8_t *base;          /* mapping of n * stride, owned unless lent */
	bool lent;
	uint64_t slot_bytes;
	uint64_t stride; /* from slot to slot: a slot, its gap and what aligns the next */
	uint32_t n, n_free;
	struct kvp_slot *free; /* last freed first */
	struct kvp_slot *kept; /* put, but a launch uses them */
	uint64_t over;         /* tickets up to it are over */
	/* Of a GPU's memory: adds the zeroing of the slot's dirty bytes to a launch and says its
	 * ticket; negative: not now. */
	int (*clean)(void *arg, struct kvp_slot *slot, uint64_t *ticket);
	void *clean_arg;
	uint8_t *twins; /* lent, n * twin_stride */
	uint64_t twin_bytes, twin_stride;
};

/* `gap`: bytes that are to be left behind each slot. 0 or -ENOMEM. */
int kvp_ring_init(struct kvp_ring *ring, uint32_t n, uint64_t slot_bytes, uint32_t gap);
/* Bytes that such a ring takes; 0: more than there can be. */
uint64_t kvp_ring_bytes(uint32_t n, uint64_t slot_bytes, uint32_t gap);
/* The same in memory of the caller's, which outlives the ring. */
int kvp_ring_init_at(struct kvp_ring *ring, uint32_t n, uint64_t slot_bytes, uint32_t gap,
		     void *base);
/* Its memory is a GPU's: the twins lie at `twins`, twin_stride apart, cleaned by `clean`. */
struct kvp_ring_twins {
	void *twins;
	uint64_t bytes, stride;
	int (*clean)(void *arg, struct kvp_slot *slot, uint64_t *ticket);
	void *clean_arg;
};
void kvp_ring_set_twins(struct kvp_ring *ring, const struct kvp_ring_twins *twins);
/* A ring of zeroes is fine. */
void kvp_ring_fini(struct kvp_ring *ring);

/* A slot with one reference for bytes of that uid, or NULL: also while free ones are cleaned. */
struct kvp_slot *kvp_ring_take(struct kvp_ring *ring, uint32_t uid, uint64_t now_ns);

/* Gives one reference back; the last one frees the slot. */
void kvp_ring_put(struct kvp_ring *ring, struct kvp_slot *slot);

/* The slot that begins there, or whose twin does; NULL: none. */
struct kvp_slot *kvp_ring_at(const struct kvp_ring *ring, const void *place);

/* Launches with tickets up to that are over. */
void kvp_ring_over(struct kvp_ring *ring, uint64_t ticket);
/* The launch with that ticket has not happened; those before it are over. */
void kvp_ring_failed(struct kvp_ring *ring, uint64_t ticket);

/* Bytes [0, end) are about to be written. */
static inline void kvp_slot_dirty(struct kvp_slot *slot, uint64_t end)
{
	if (end > slot->dirty)
		slot->dirty = end;
}
