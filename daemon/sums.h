/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Sums over rows where they lie in a pool of host memory. Any cut of the rows into runs gives the
 * same sum, so the two ends of a leg agree whatever their pages are. As of daemon/copy.h: nothing
 * allocates, blocks or checks.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/copy.h"

/* The sum of part `idx` of a piece whose `pool` is the source's, or the destination's. */
uint64_t kvp_sum_source(const struct kvp_copy_piece *piece, uint32_t idx);
uint64_t kvp_sum_dest(const struct kvp_copy_piece *piece, uint32_t idx);

/* Where both pools are at hand: are the rows of the part the same in both? */
bool kvp_rows_equal(const struct kvp_copy_piece *src, const struct kvp_copy_piece *dst,
		    uint32_t idx);

uint64_t kvp_sum_bytes(const void *at, uint64_t bytes, uint64_t seed);

#ifdef KVP_TEST
/* The first byte of the part in the destination's pool. */
unsigned char *kvp_sum_first(const struct kvp_copy_piece *piece, uint32_t idx);
#endif
