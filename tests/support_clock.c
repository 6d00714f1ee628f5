/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_clock.h"

#include <stdlib.h>
#include <time.h>

uint64_t support_slow(void)
{
	const char *text = getenv("KVP_SLOW");
	long n = text ? strtol(text, NULL, 10) : 1;

	return n > 1 && n <= 1000 ? (uint64_t)n : 1;
}

uint64_t support_clock_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return ((uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec) / support_slow();
}

int support_slow_ms(int ms)
{
	return ms * (int)support_slow();
}
