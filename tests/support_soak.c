/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_soak.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SHOWN 20u /* wrong bytes that are printed */
#define BLOCK 4096u

uint64_t soak_checked, soak_wrong;
uint64_t soak_now = 1, soak_taken, soak_reused, soak_at_once;

/* ---- pools ---------------------------------------------------------------------------------- */

void soak_pool_make(struct soak_pool *soak, uint32_t dcp_size, uint32_t dcp_rank,
		    uint32_t interleave, uint64_t salt)
{
	struct kvp_entry_desc *entry;
	uint32_t i;

	memset(soak, 0, sizeof(*soak));
	(void)rig_pool_entry(&soak->pool, 0, 576, SOAK_PAGE, SOAK_PAGES);
	/* Between the rows of this one lie bytes of nobody. */
	entry = rig_pool_entry(&soak->pool, 1, 192, SOAK_PAGE, SOAK_PAGES);
	entry->row_bytes = entry->full_bytes = 132;
	entry = rig_pool_entry(&soak->pool, 7, 64, SOAK_PAGE * dcp_size, SOAK_PAGES);
	entry->klass = KVP_REPLICATED;
	(void)rig_pool_blob(&soak->pool, 9, (uint64_t)SOAK_PAGES * SOAK_SEGMENT);
	rig_pool_allocate(&soak->pool, "soak", salt);
	soak->image = rig_pool_image(&soak->pool);
	soak->next = rig_pool_image(&soak->pool);
	soak->side = (struct kvp_side_desc){ .page = SOAK_PAGE,
					     .dcp_size = dcp_size,
					     .dcp_rank = dcp_rank,
					     .interleave = interleave };
	for (i = 0; i < SOAK_PAGES; i++)
		soak->free[i] = i;
	soak->n_free = SOAK_PAGES;
}

void soak_pool_free(struct soak_pool *soak)
{
	free(soak->image);
	free(soak->next);
	(void)munmap(soak->pool.mem, soak->pool.bytes);
	(void)close(soak->pool.fd);
}

void soak_take(struct soak_pool *soak, uint32_t *pages, uint32_t n)
{
	uint32_t i;

	RIG_REQUIRE(n <= soak->n_free, "%u pages of %u", n, soak->n_free);
	for (i = 0; i < n; i++) {
		pages[i] = soak->free[--soak->n_free];
		soak_reused += soak->given[pages[i]] > 0;
		soak_at_once += soak->given[pages[i]] == soak_now;
	}
	soak_taken += n;
}

void soak_give(struct soak_pool *soak, const uint32_t *pages, uint32_t n)
{
	uint32_t i;

	RIG_REQUIRE(soak->n_free + n <= SOAK_PAGES);
	for (i = 0; i < n; i++) {
		soak->free[soak->n_free++] = pages[i];
		soak->given[pages[i]] = soak_now;
	}
}

void soak_side(const struct soak_pool *soak, uint64_t from, uint64_t to, const uint32_t *pages,
	       struct kvp_side_desc *side)
{
	uint64_t width = (uint64_t)soak->side.page * soak->side.dcp_size;

	*side = soak->side;
	side->pos0 = from / width * width;
	side->n_pages = (uint32_t)((to - side->pos0 + width - 1) / width);
	side->pages = pages;
}

/* The bytes that belong to a page: in each entry, with the gap behind it. */
static void area(const struct soak_pool *soak, uint32_t entry, uint32_t page, uint64_t *at,
		 uint64_t *bytes)
{
	const struct kvp_entry_desc *desc = &soak->pool.entries[entry];

	*bytes = entry == SOAK_BLOB ? SOAK_SEGMENT : desc->page_stride;
	*at = desc->offset + page * *bytes;
}

/* ---- sources -------------------------------------------------------------------------------- */

/* Shows the client's own writes of a page in its memory. */
static void page_publish(const struct soak_pool *soak, uint32_t page)
{
	uint64_t at, bytes;
	uint32_t entry;

	for (entry = 0; entry < SOAK_ENTRIES; entry++) {
		area(soak, entry, page, &at, &bytes);
		memcpy(soak->next + at, soak->image + at, bytes);
		memcpy(soak->pool.mem + at, soak->image + at, bytes);
	}
}

void soak_source_write(struct soak_pool *soak, const struct kvp_side_desc *side, uint64_t from,
		       uint64_t to, const struct rig_key *key)
{
	uint64_t at, bytes;
	uint32_t i;

	rig_put_rows(soak->image, &soak->pool, side, from, to, key);
	area(soak, SOAK_BLOB, side->pages[0], &at, &bytes);
	rig_put_segment(soak->image + at, bytes, key, 0);
	for (i = 0; i < KVP_MAX(side->n_pages, 1u); i++)
		page_publish(soak, side->pages[i]);
}

void soak_source_scribble(struct soak_pool *soak, const uint32_t *pages, uint32_t n, uint8_t with)
{
	uint64_t at, bytes;
	uint32_t i, entry;

	for (i = 0; i < n; i++) {
		for (entry = 0; entry < SOAK_ENTRIES; entry++) {
			area(soak, entry, pages[i], &at, &bytes);
			memset(soak->image + at, with, bytes);
		}
		page_publish(soak, pages[i]);
	}
}

/* ---- looking -------------------------------------------------------------------------------- */

static void wrong(const struct soak_pool *soak, uint64_t at, uint8_t is, const struct soak_who *who)
{
	char place[128];

	if (soak_wrong++ >= SHOWN)
		return;
	rig_pool_place(&soak->pool, at, place, sizeof(place));
	printf("WRONG: %s, %s of room 0x%llx generation %llu: %s is %02x, was %02x, may become "
	       "%02x\n",
	       who->rank, who->what, (unsigned long long)who->room,
	       (unsigned long long)who->generation, place, is, soak->image[at], soak->next[at]);
	fflush(stdout);
}

/* Bytes that have come: `next`. Those that may be coming: `image` or `next`, by what is expected
 * first. Each is read once, for it may change. */
static void look(const struct soak_pool *soak, const uint8_t *expected, uint64_t at, uint64_t bytes,
		 const struct soak_who *who)
{
	const volatile uint8_t *mem = soak->pool.mem;
	uint64_t i;
	uint8_t is;

	soak_checked += bytes;
	if (!memcmp(soak->pool.mem + at, expected + at, bytes))
		return;
	for (i = at; i < at + bytes; i++) {
		is = mem[i];
		if (is != expected[i] && is != soak->next[i])
			wrong(soak, i, is, who);
	}
}

void soak_scan(const struct soak_pool *soak, const struct soak_who *who)
{
	uint64_t at;

	for (at = 0; at < soak->pool.bytes; at += BLOCK)
		look(soak, soak->image, at, KVP_MIN((uint64_t)BLOCK, soak->pool.bytes - at), who);
}

/* ---- destinations --------------------------------------------------------------------------- */

static void places_fill(const struct kvp_side_desc *side, uint64_t from, uint64_t to,
			struct soak_place *places)
{
	uint32_t page = 0, own = 0, all = 0;
	uint64_t pos;
	bool mine;

	for (pos = side->pos0; pos < to; pos++) {
		mine = pos / side->interleave % side->dcp_size == side->dcp_rank;
		if (pos >= from)
			places[pos - from] =
				(struct soak_place){ side->pages[page], own, all, mine };
		own += mine;
		if (++all == side->page * side->dcp_size) {
			own = all = 0;
			page++;
		}
	}
}

void soak_dest_begin(struct soak_pool *soak, const struct kvp_side_desc *side, uint64_t from,
		     uint64_t to, const struct rig_key *key, struct soak_place *places)
{
	uint64_t at, bytes;

	rig_put_rows(soak->next, &soak->pool, side, from, to, key);
	area(soak, SOAK_BLOB, side->pages[0], &at, &bytes);
	rig_put_segment(soak->next + at, bytes, key, 0);
	places_fill(side, from, to, places);
}

void soak_dest_rows(const struct soak_pool *soak, const struct soak_place *places, uint64_t n,
		    uint8_t set, const struct soak_who *who)
{
	const struct kvp_entry_desc *entry;
	uint32_t e, slot;
	uint64_t i;

	for (i = 0; i < n; i++) {
		for (e = 0; e < SOAK_ROWS; e++) {
			entry = &soak->pool.entries[e];
			if (!(set >> e & 1) || (entry->klass == KVP_SHARDED && !places[i].mine))
				continue;
			slot = entry->klass == KVP_SHARDED ? places[i].own : places[i].all;
			look(soak, soak->next,
			     entry->offset + places[i].page * entry->page_stride +
				     slot * entry->row_stride,
			     entry->row_bytes, who);
		}
	}
}

void soak_dest_all(const struct soak_pool *soak, const uint32_t *pages, uint32_t n,
		   const struct soak_who *who)
{
	uint64_t at, bytes;
	uint32_t i, entry;

	for (i = 0; i < n; i++) {
		for (entry = 0; entry < SOAK_ENTRIES; entry++) {
			area(soak, entry, pages[i], &at, &bytes);
			look(soak, soak->next, at, bytes, who);
		}
	}
}

void soak_dest_repair(struct soak_pool *soak, const uint32_t *pages, uint32_t n)
{
	uint64_t at, bytes;
	uint32_t i, entry;

	for (i = 0; i < n; i++) {
		for (entry = 0; entry < SOAK_ENTRIES; entry++) {
			area(soak, entry, pages[i], &at, &bytes);
			memcpy(soak->pool.mem + at, soak->next + at, bytes);
		}
	}
}

void soak_dest_end(struct soak_pool *soak, const uint32_t *pages, uint32_t n,
		   const struct soak_who *who)
{
	uint64_t at, bytes;
	uint32_t i, entry;

	for (i = 0; i < n; i++) {
		for (entry = 0; entry < SOAK_ENTRIES; entry++) {
			area(soak, entry, pages[i], &at, &bytes);
			look(soak, soak->image, at, bytes, who);
			/* Whatever comes later differs from this. */
			memcpy(soak->image + at, soak->pool.mem + at, bytes);
			memcpy(soak->next + at, soak->image + at, bytes);
		}
	}
}
