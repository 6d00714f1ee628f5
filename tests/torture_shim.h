/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What tests/torture.c shares with a process whose foreign calls it lets fail: a file that both
 * have mapped. A site is one place in the program that calls one function.
 */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define TORTURE_SITES 2048u
#define TORTURE_LIBS 64u /* the first sites: calls that a library makes for itself, by function */
#define TORTURE_LIB_KINDS 3u
/* Places from here on are in libraries, which call a function that was handed to them. */
#define TORTURE_ELSEWHERE (UINT64_C(1) << 40)

struct torture_site {
	_Atomic uint64_t place; /* offset in the program; 0: not used yet */
	_Atomic uint32_t fn;
	_Atomic uint32_t calls; /* while counting is on */
};

struct torture {
	_Atomic uint32_t counting;
	/* The calls of this site that fail: so many pass before, then so many fail. */
	_Atomic uint32_t site; /* index; TORTURE_SITES: none */
	_Atomic uint32_t pass, fail;
	_Atomic uint32_t fired;  /* calls that have been made to fail */
	_Atomic uint32_t n_lost; /* sites that found no room */
	struct torture_site sites[TORTURE_SITES];
};

/* For a program that runs others with shims: what a sanitizer finds ends them with a signal, never
 * with a status that they have themselves. */
static inline void torture_options(void)
{
	(void)setenv("ASAN_OPTIONS", "abort_on_error=1", 1); /* fails without memory only */
	(void)setenv("UBSAN_OPTIONS", "abort_on_error=1:print_stacktrace=1", 1);
}
