/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Building blocks of the two protocols' validators. Each returns 0, or the enum kvp_status after
 * having written a text that names field, value and limit. Chains are written `a() ?: b()`: the
 * first refusal wins.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "proto/util.h"

/* Where the validator is: text goes to err; names are prefixed "message.list[index].". */
struct kvp_check {
	char *err; /* borrowed, errlen bytes; NULL: no text wanted */
	size_t errlen;
	const char *msg;  /* name of the message */
	const char *list; /* repeated field under test; NULL: a field of the message itself */
	size_t idx;       /* in that list */
};

int kvp_check_fail(const struct kvp_check *check, int status, const char *fmt, ...)
	KVP_PRINTF(3, 4);
int kvp_check_range(const struct kvp_check *check, const char *field, uint64_t value, uint64_t lo,
		    uint64_t hi);
/* A count of list elements or bytes. */
int kvp_check_count(const struct kvp_check *check, const char *field, size_t n, size_t lo,
		    size_t hi);
/* Display text: length, no control characters, UTF-8. */
int kvp_check_label(const struct kvp_check *check, const char *field, const char *s, size_t lo,
		    size_t hi);
/* Texts of other daemons may be cut anywhere: length and control characters only. */
int kvp_check_text(const struct kvp_check *check, const char *field, const char *s, size_t hi);
/* Printable ASCII without blanks. */
int kvp_check_word(const struct kvp_check *check, const char *field, const char *s, size_t lo,
		   size_t hi);
int kvp_check_key(const struct kvp_check *check, const ProtobufCBinaryData *key);
int kvp_check_enum(const struct kvp_check *check, const char *field, int value, int hi);

/* A set of small numbers, for finding repeated ones. */
struct kvp_seen {
	uint64_t bits[8]; /* 512 */
};
int kvp_check_new(const struct kvp_check *check, struct kvp_seen *seen, const char *field,
		  uint32_t value);

struct kvp_check_side {
	uint32_t group, page, dcp_size, dcp_rank, interleave;
};
int kvp_check_side(const struct kvp_check *check, const struct kvp_check_side *side);

struct kvp_check_rows { /* which bytes of which rows an entry holds */
	int klass;
	uint32_t layer, group, row_bytes, lo, full_bytes, rows_per_page;
};
int kvp_check_rows(const struct kvp_check *check, const struct kvp_check_rows *rows);
/* Entries of one layer and class must agree in full_bytes and not overlap. */
int kvp_check_rows_apart(const struct kvp_check *check, const struct kvp_check_rows *rows,
			 size_t n);
/* 32-bit ids, unique. Sorts in place. */
int kvp_check_ids(const struct kvp_check *check, const char *field, uint32_t *ids, size_t n);

/*
 * Unpacks with a bound on memory: protobuf-c allocates what a message asks for, and a few bytes can
 * ask for a hundred. NULL when malformed or beyond KVP_LIMIT_DECODED. Freed with the default
 * allocator.
 */
ProtobufCMessage *kvp_unpack(const ProtobufCMessageDescriptor *desc, const void *buf, size_t len);

/* Packs into the caller's buffer: bytes written, or -EMSGSIZE when it does not fit cap. */
long kvp_pack(const ProtobufCMessage *msg, void *buf, size_t cap);
