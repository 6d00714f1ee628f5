/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Sums of pieces: with what a destination finds out that the bytes in its pool are not those of the
 * source's. Whether a leg has them is agreed by offer and accept; the pieces of such a leg carry
 * one sum for each part (what is not rows: one) behind their bytes. All of XXH3, 64 bits, seeded
 * with the place of the piece, so that one piece is not taken for another.
 *
 * Integers only, any thread.
 */

#include <stdbool.h>
#include <stdint.h>

#define KVP_SUM_BYTES 8u

/* What an end says of itself, in offer and accept. A daemon that knows nothing of sums says 0. */
enum kvp_sums_word {
	KVP_SUMS_CAN = 1,  /* it can compute sums of this pool */
	KVP_SUMS_ASK = 2,  /* it wants them */
	KVP_SUMS_MUST = 4, /* it moves nothing without them */
	KVP_SUMS_GPU = 8,  /* it cannot: the pool is on a GPU */
};

/* What comes of the words of both ends. The reasons are only for legs of which an end wants sums.
 */
enum kvp_sums {
	KVP_SUMS_OFF,     /* nobody wants them */
	KVP_SUMS_ON,      /* pieces have sums */
	KVP_SUMS_NO_GPU,  /* a pool is on a GPU */
	KVP_SUMS_NO_PEER, /* a daemon knows nothing of them */
	KVP_SUMS_NO_SLOT, /* a token's rows and they do not fit a slot: found with the geometry */
	KVP_SUMS_N,
};

/* The same whichever end is named first. */
enum kvp_sums kvp_sums_agree(uint32_t word, uint32_t other);

/* "off", "on", or the reason in a word and in words. */
const char *kvp_sums_name(enum kvp_sums sums);
const char *kvp_sums_text(enum kvp_sums sums);

/* How many bytes the sums of a leg's pieces have: the same in each piece, parts that are not there
 * have 0. */
static inline uint64_t kvp_sums_bytes(uint32_t n_pairs)
{
	return KVP_SUM_BYTES * (n_pairs ? n_pairs : UINT64_C(1));
}

/* Where they lie in the slot of a piece of that many bytes; what is between is 0. */
static inline uint64_t kvp_sums_offset(uint64_t bytes)
{
	return (bytes + KVP_SUM_BYTES - 1) / KVP_SUM_BYTES * KVP_SUM_BYTES;
}

/* Bytes of such a piece together with them. `bytes` is at most KVP_LIMIT_SLOT_BYTES. */
static inline uint64_t kvp_sums_end(uint64_t bytes, uint32_t n_pairs)
{
	return kvp_sums_offset(bytes) + kvp_sums_bytes(n_pairs);
}

/* What of a slot is left for the piece itself, a multiple of KVP_LAYOUT_ALIGN; 0: nothing. */
uint64_t kvp_sums_room(uint64_t slot_bytes, uint32_t n_pairs);

/* The seed of a part of rows (pair is its pair's index, start the piece's first position), and that
 * of bytes of a segment or the meta (id 0). */
static inline uint64_t kvp_sum_seed(uint64_t start, uint32_t pair)
{
	return start | (uint64_t)(pair + 1) << 48;
}
static inline uint64_t kvp_sum_seed_bytes(uint64_t offset, uint32_t id)
{
	return offset ^ (uint64_t)id << 32;
}
