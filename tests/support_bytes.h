/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Fuzzers' input as a row of small decisions: past its end all are 0. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct bytes {
	const uint8_t *at;
	size_t left;
};

static inline uint8_t bytes_take(struct bytes *in)
{
	if (in->left == 0)
		return 0;
	in->left--;
	return *in->at++;
}

static inline uint64_t bytes_take64(struct bytes *in)
{
	uint64_t value = 0;

	for (int i = 0; i < 8; i++)
		value = value << 8 | bytes_take(in);
	return value;
}

/* Below `n` (at most 250) most of the time; any number of 64 bits, or one near an end of 32 or 64
 * bits, when the byte says so. */
static inline uint64_t bytes_field(struct bytes *in, uint32_t n)
{
	uint8_t byte = bytes_take(in);

	switch (byte) {
	case 255:
		return bytes_take64(in);
	case 254:
		return UINT32_MAX - bytes_take(in) % 4;
	case 253:
		return UINT64_MAX - bytes_take(in) % 4;
	case 252:
		return UINT64_C(1) << (bytes_take(in) % 64);
	default:
		return byte % n;
	}
}

/* Some of the bytes themselves; *n becomes what there is of them. */
static inline const uint8_t *bytes_span(struct bytes *in, size_t *n)
{
	const uint8_t *at = in->at;

	if (*n > in->left)
		*n = in->left;
	in->at += *n;
	in->left -= *n;
	return at;
}
