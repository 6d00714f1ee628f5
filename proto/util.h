/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Small language helpers that every part shares. Leaf: includes nothing of the project. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

/* Runs fn on the variable's address on every way out of the scope. */
#define KVP_CLEANUP(fn) __attribute__((cleanup(fn)))

/* Takes a pointer out of such a variable: it is the caller's now. */
#define KVP_TAKE(p)                         \
	({                                  \
		__typeof__(p) taken_ = (p); \
		(p) = NULL;                 \
		taken_;                     \
	})

/* The same for a file descriptor. */
#define KVP_TAKE_FD(fd)            \
	({                         \
		int taken_ = (fd); \
		(fd) = -1;         \
		taken_;            \
	})

#define KVP_ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#ifdef __cppcheck__ /* it cannot read these where a struct is initialised */
#define KVP_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KVP_MAX(a, b) ((a) > (b) ? (a) : (b))
#else
#define KVP_MIN(a, b)                   \
	({                              \
		__typeof__(a) a_ = (a); \
		__typeof__(b) b_ = (b); \
		a_ < b_ ? a_ : b_;      \
	})
#define KVP_MAX(a, b)                   \
	({                              \
		__typeof__(a) a_ = (a); \
		__typeof__(b) b_ = (b); \
		a_ > b_ ? a_ : b_;      \
	})
#endif
#define KVP_ALIGN_UP(x, a) (((x) + (a)-1) / (a) * (a))
#define KVP_DIV_UP(x, a) (((x) + (a)-1) / (a))
#define KVP_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
#define KVP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

static inline void kvp_freep(void *p)
{
	free(*(void **)p);
}

static inline void kvp_closep(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd); /* nothing to do about a failed close on an error path */
}
