/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The one clock of all test programs, for deadlines. KVP_SLOW=n says that everything takes n times
 * as long (valgrind, an emulator, an overloaded machine): then this clock goes n times as slowly,
 * so every deadline is n times as far away, and so are the time limits of Criterion's tests.
 */

#include <stdint.h>

/* At least 1. */
uint64_t support_slow(void);
/* Monotonic, divided by support_slow(). Not for comparing with times of a daemon. */
uint64_t support_clock_ns(void);
/* For what waits by itself: poll(2), the library's waits. */
int support_slow_ms(int ms);
