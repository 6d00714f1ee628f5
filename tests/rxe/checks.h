/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checks that need real verbs. All are in one program, since starting a program is slow in the
 * guest; each runs in a child of its own, so that none can break another.
 */

#include <stdio.h>
#include <stdlib.h>

struct kvp_check {
	const char *name;
	void (*run)(void); /* in a child; returns or leaves by KVP_EXPECT() */
	unsigned seconds;  /* limit */
};

/* Lists end with a NULL name. */
extern const struct kvp_check kvp_checks_rig[];
extern const struct kvp_check kvp_checks_net[];
extern const struct kvp_check kvp_checks_rails[];
extern const struct kvp_check kvp_checks_rooms[]; /* in two guests */
extern const struct kvp_check kvp_checks_nodes[]; /* the same; the end of the second */

#define KVP_EXPECT(cond, ...)                                              \
	do {                                                               \
		if (!(cond)) {                                             \
			printf("  %s:%d: %s:", __FILE__, __LINE__, #cond); \
			printf(" " __VA_ARGS__);                           \
			printf("\n");                                      \
			(void)fflush(stdout);                              \
			_Exit(1);                                          \
		}                                                          \
	} while (0)

/* Ends the check as skipped, with the reason. */
#define KVP_SKIP(...)                  \
	do {                           \
		printf("  skipped: "); \
		printf(__VA_ARGS__);   \
		printf("\n");          \
		(void)fflush(stdout);  \
		_Exit(77);             \
	} while (0)

/* Milliseconds of a clock that never goes back. */
double kvp_check_ms(void);
