/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The memory of a rank, and what it has to contain at any moment. Each byte is what `image` says,
 * or what `next` says: they differ only in rows that an unreleased destination may be writing.
 * Pages are taken from a stack, so that what was given back last is used first.
 */

#include "tests/support_rig.h"

#define SOAK_PAGE 8u /* tokens */
#define SOAK_PAGES 512u
#define SOAK_TOKENS 256u /* of a room, at most */
#define SOAK_LIST (SOAK_TOKENS / SOAK_PAGE + 1)
#define SOAK_ROWS 3u /* entries with rows: two sharded, one replicated */
#define SOAK_BLOB SOAK_ROWS
#define SOAK_ENTRIES (SOAK_ROWS + 1)
#define SOAK_SEGMENT 256u /* bytes of blob that go with each page */

struct soak_pool {
	struct rig_pool pool;
	struct kvp_side_desc side; /* of the rank, without pages */
	uint8_t *image, *next;
	uint32_t free[SOAK_PAGES], n_free;
	uint64_t given[SOAK_PAGES]; /* when each was given back last, by soak_now; 0: never */
};

/* Where the row of a position lies in the pages of a list. */
struct soak_place {
	uint32_t page, own, all; /* slots: of a sharded entry, of a replicated one */
	bool mine;               /* has a row in sharded entries */
};

/* Whose bytes are looked at, for messages. */
struct soak_who {
	const char *rank, *what;
	uint64_t room, generation;
};

/* Bytes that were looked at, and those that were wrong, in all pools. */
extern uint64_t soak_checked, soak_wrong;
/* The caller's time, from 1 on; pages taken, those that had been used before, and of these those
 * that were given back at the same time. */
extern uint64_t soak_now, soak_taken, soak_reused, soak_at_once;

void soak_pool_make(struct soak_pool *soak, uint32_t dcp_size, uint32_t dcp_rank,
		    uint32_t interleave, uint64_t salt);
void soak_pool_free(struct soak_pool *soak);

/* The caller has reserved what it takes. */
void soak_take(struct soak_pool *soak, uint32_t *pages, uint32_t n);
void soak_give(struct soak_pool *soak, const uint32_t *pages, uint32_t n);
/* The rank's side with these pages for the positions [from, to): sets pos0, n_pages and pages. */
void soak_side(const struct soak_pool *soak, uint64_t from, uint64_t to, const uint32_t *pages,
	       struct kvp_side_desc *side);

/* A source: rows of [from, to), and the segment beside the first page; and something else over all
 * of the pages. Without tokens there is one page nevertheless, for the segment. */
void soak_source_write(struct soak_pool *soak, const struct kvp_side_desc *side, uint64_t from,
		       uint64_t to, const struct rig_key *key);
void soak_source_scribble(struct soak_pool *soak, const uint32_t *pages, uint32_t n, uint8_t with);

/* A destination: from now on its rows of [from, to) and its segment may come. Fills places[to -
 * from]. */
void soak_dest_begin(struct soak_pool *soak, const struct kvp_side_desc *side, uint64_t from,
		     uint64_t to, const struct rig_key *key, struct soak_place *places);
/* Rows of n positions have to be there; `set`: of which entries. */
void soak_dest_rows(const struct soak_pool *soak, const struct soak_place *places, uint64_t n,
		    uint8_t set, const struct soak_who *who);
/* Everything has to be there. */
void soak_dest_all(const struct soak_pool *soak, const uint32_t *pages, uint32_t n,
		   const struct soak_who *who);
/* Everything is as it has to be, whatever was there. */
void soak_dest_repair(struct soak_pool *soak, const uint32_t *pages, uint32_t n);
/* Nothing comes any more; what is there stays. */
void soak_dest_end(struct soak_pool *soak, const uint32_t *pages, uint32_t n,
		   const struct soak_who *who);
/* Looks at every byte of the pool. */
void soak_scan(const struct soak_pool *soak, const struct soak_who *who);
