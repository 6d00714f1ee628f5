/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Random plans, and an oracle that walks positions one by one and uses no closed formula. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/plan.h"

#define PLAN_CASE_TOKENS 512u
#define PLAN_CASE_PAGES 2048u

struct plan_case {
	struct kvp_side src, dst; /* lists are those below, when made by plan_case_make() */
	uint64_t start, tokens;
	uint32_t src_pages[PLAN_CASE_PAGES], dst_pages[PLAN_CASE_PAGES];
};

struct oracle_row {
	uint64_t pos, src, dst;
};

/* For failed assertions: what the case was. */
#define CASE_FMT "src %ux%u r%u i%u pos0 %llu dst %ux%u r%u i%u pos0 %llu [%llu + %llu]"
#define CASE_ARGS(c)                                                                       \
	(c)->src.page, (c)->src.dcp_size, (c)->src.dcp_rank, (c)->src.interleave,          \
		(unsigned long long)(c)->src.pos0, (c)->dst.page, (c)->dst.dcp_size,       \
		(c)->dst.dcp_rank, (c)->dst.interleave, (unsigned long long)(c)->dst.pos0, \
		(unsigned long long)(c)->start, (unsigned long long)(c)->tokens

/* The next number of a generator with that state; any state will do. */
uint64_t plan_random(uint64_t *seed);

/* Makes a case that plans without error: at most PLAN_CASE_TOKENS tokens. */
void plan_case_make(struct plan_case *c, uint64_t *seed);

/* The definition of ownership. */
bool oracle_owns(const struct kvp_side *side, uint64_t pos);

/* Rows of the case, in position order; `rows` has room for PLAN_CASE_TOKENS. */
uint64_t oracle_rows(const struct plan_case *c, struct oracle_row *rows);

/* Rows k of a run, as page * P + slot. */
uint64_t run_src_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k);
uint64_t run_dst_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k);

/* plan.jsonl in $KVP_VECTORS, where it must be, else beside the source tree; NULL: none, said so.
 */
FILE *plan_vectors_open(void);
