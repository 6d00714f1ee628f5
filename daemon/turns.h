/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How long the loop was busy with one thing while everybody else waited: counts by powers of two of
 * a microsecond. Loop thread only. */

#include <stdint.h>

#define KVP_TURNS_N 16u /* of 1 us, 2 us, 4 us ... and what took 16 ms and more */

struct kvp_turns {
	uint64_t n[KVP_TURNS_N];
	uint64_t most_ns;
};

static inline void kvp_turns_count(struct kvp_turns *turns, uint64_t ns)
{
	uint32_t i = 0;

	for (uint64_t us = ns / 1000; us > 1 && i < KVP_TURNS_N - 1; us >>= 1)
		i++;
	turns->n[i]++;
	if (ns > turns->most_ns)
		turns->most_ns = ns;
}
