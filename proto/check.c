/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/limits.h"
#include "proto/status.h"

int kvp_check_fail(const struct kvp_check *check, int status, const char *fmt, ...)
{
	char place[96];
	char text[KVP_LIMIT_TEXT];
	va_list ap;

	if (!check->err || check->errlen == 0)
		return status;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap); /* a cut text is still a text */
	va_end(ap);
	if (check->list)
		(void)snprintf(place, sizeof(place), "%s.%s[%zu]", check->msg, check->list,
			       check->idx);
	else
		(void)snprintf(place, sizeof(place), "%s", check->msg);
	(void)snprintf(check->err, check->errlen, "%s.%s", place, text);
	return status;
}

int kvp_check_range(const struct kvp_check *check, const char *field, uint64_t value, uint64_t lo,
		    uint64_t hi)
{
	if (value >= lo && value <= hi)
		return 0;
	return kvp_check_fail(check, KVP_STATUS_INVALID,
			      "%s is %" PRIu64 ", allowed %" PRIu64 " to %" PRIu64, field, value,
			      lo, hi);
}

int kvp_check_count(const struct kvp_check *check, const char *field, size_t n, size_t lo,
		    size_t hi)
{
	if (n >= lo && n <= hi)
		return 0;
	return kvp_check_fail(check, KVP_STATUS_INVALID, "%s: has %zu, allowed %zu to %zu", field,
			      n, lo, hi);
}

/* Bytes of the UTF-8 sequence at s; 0 if it is none. Ends at a NUL by itself: not a follower. */
static size_t utf8_len(const unsigned char *s)
{
	size_t n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;

	if (n == 0 || s[0] > 0xf4)
		return 0;
	for (size_t i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	}
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
	    (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return n;
}

static bool is_control(unsigned char c)
{
	return c < 0x20 || c == 0x7f;
}

int kvp_check_text(const struct kvp_check *check, const char *field, const char *s, size_t hi)
{
	size_t len = strlen(s);

	if (len > hi)
		return kvp_check_fail(check, KVP_STATUS_INVALID, "%s has %zu bytes, at most %zu",
				      field, len, hi);
	for (size_t i = 0; i < len; i++) {
		if (is_control((unsigned char)s[i]))
			return kvp_check_fail(check, KVP_STATUS_INVALID,
					      "%s has control character 0x%02x at byte %zu", field,
					      (unsigned char)s[i], i);
	}
	return 0;
}

int kvp_check_label(const struct kvp_check *check, const char *field, const char *s, size_t lo,
		    size_t hi)
{
	const unsigned char *u = (const unsigned char *)s;
	int r = kvp_check_text(check, field, s, hi)
			?: kvp_check_count(check, field, strlen(s), lo, hi);

	while (r == 0 && *u) {
		size_t n = utf8_len(u);

		if (n == 0)
			return kvp_check_fail(check, KVP_STATUS_INVALID,
					      "%s is not UTF-8 at byte %td", field,
					      u - (const unsigned char *)s);
		u += n;
	}
	return r;
}

int kvp_check_word(const struct kvp_check *check, const char *field, const char *s, size_t lo,
		   size_t hi)
{
	size_t len = strlen(s);

	if (len < lo || len > hi)
		return kvp_check_fail(check, KVP_STATUS_INVALID,
				      "%s has %zu bytes, allowed %zu to %zu", field, len, lo, hi);
	for (size_t i = 0; i < len; i++) {
		if (s[i] <= 0x20 || s[i] >= 0x7f)
			return kvp_check_fail(check, KVP_STATUS_INVALID,
					      "%s has character 0x%02x at byte %zu, allowed are "
					      "printable ones without blanks",
					      field, (unsigned char)s[i], i);
	}
	return 0;
}

int kvp_check_key(const struct kvp_check *check, const ProtobufCBinaryData *key)
{
	if (key->len == 0 || key->len == KVP_KEY_BYTES)
		return 0;
	return kvp_check_fail(check, KVP_STATUS_INVALID, "key has %zu bytes, allowed 0 or %u",
			      key->len, KVP_KEY_BYTES);
}

int kvp_check_enum(const struct kvp_check *check, const char *field, int value, int hi)
{
	if (value >= 0 && value <= hi)
		return 0;
	return kvp_check_fail(check, KVP_STATUS_INVALID, "%s is %d, allowed 0 to %d", field, value,
			      hi);
}

int kvp_check_new(const struct kvp_check *check, struct kvp_seen *seen, const char *field,
		  uint32_t value)
{
	uint64_t bit = 1ull << value % 64;
	uint64_t *word = &seen->bits[value / 64 % KVP_ARRAY_SIZE(seen->bits)];

	if (*word & bit)
		return kvp_check_fail(check, KVP_STATUS_INVALID, "%s is %u, given twice", field,
				      value);
	*word |= bit;
	return 0;
}

int kvp_check_side(const struct kvp_check *check, const struct kvp_check_side *side)
{
	uint64_t vpage = (uint64_t)side->page * side->dcp_size;

	if (side->page < 1 || side->page > KVP_LIMIT_PAGE)
		return kvp_check_fail(check, KVP_STATUS_GEOMETRY, "page is %u, allowed 1 to %u",
				      side->page, KVP_LIMIT_PAGE);
	if (side->dcp_size < 1 || vpage > KVP_LIMIT_VPAGE)
		return kvp_check_fail(check, KVP_STATUS_GEOMETRY,
				      "dcp_size is %u, allowed 1 to %u with page %u",
				      side->dcp_size, KVP_LIMIT_VPAGE / side->page, side->page);
	if (side->dcp_rank >= side->dcp_size)
		return kvp_check_fail(check, KVP_STATUS_GEOMETRY,
				      "dcp_rank is %u, must be below dcp_size %u", side->dcp_rank,
				      side->dcp_size);
	if (side->interleave < 1 || side->page % side->interleave)
		return kvp_check_fail(check, KVP_STATUS_GEOMETRY,
				      "interleave is %u, must divide page %u", side->interleave,
				      side->page);
	return kvp_check_range(check, "group", side->group, 0, KVP_LIMIT_GROUPS - 1);
}

int kvp_check_rows(const struct kvp_check *check, const struct kvp_check_rows *rows)
{
	int r = kvp_check_enum(check, "klass", rows->klass, KVP_BLOB)
			?: kvp_check_range(check, "group", rows->group, 0, KVP_LIMIT_GROUPS - 1);

	if (r || rows->klass == KVP_BLOB)
		return r;
	r = kvp_check_range(check, "row_bytes", rows->row_bytes, 1, KVP_LIMIT_ROW_BYTES) ?:
	    kvp_check_range(check, "full_bytes", rows->full_bytes, 1, KVP_LIMIT_FULL_BYTES) ?:
	    kvp_check_range(check, "rows_per_page", rows->rows_per_page, 1, KVP_LIMIT_VPAGE);
	if (r)
		return r;
	if ((uint64_t)rows->lo + rows->row_bytes > rows->full_bytes)
		return kvp_check_fail(check, KVP_STATUS_INVALID,
				      "lo %u + row_bytes %u is past full_bytes %u", rows->lo,
				      rows->row_bytes, rows->full_bytes);
	return 0;
}

/* Orders by layer, class, lo. */
static int rows_order(const void *a, const void *b)
{
	const struct kvp_check_rows *x = *(const struct kvp_check_rows *const *)a;
	const struct kvp_check_rows *y = *(const struct kvp_check_rows *const *)b;

	if (x->layer != y->layer)
		return x->layer < y->layer ? -1 : 1;
	if (x->klass != y->klass)
		return x->klass < y->klass ? -1 : 1;
	return x->lo < y->lo ? -1 : x->lo > y->lo;
}

int kvp_check_rows_apart(const struct kvp_check *check, const struct kvp_check_rows *rows, size_t n)
{
	const struct kvp_check_rows *sorted[KVP_LIMIT_ENTRIES];
	struct kvp_check at = *check;
	size_t m = 0;

	for (size_t i = 0; i < n && i < KVP_LIMIT_ENTRIES; i++) {
		if (rows[i].klass != KVP_BLOB)
			sorted[m++] = &rows[i];
	}
	if (m < 2)
		return 0;
	qsort(sorted, m, sizeof(sorted[0]), rows_order);
	for (size_t i = 1; i < m; i++) {
		const struct kvp_check_rows *a = sorted[i - 1], *b = sorted[i];

		if (a->layer != b->layer || a->klass != b->klass)
			continue;
		at.idx = (size_t)(b - rows);
		if (a->full_bytes != b->full_bytes)
			return kvp_check_fail(&at, KVP_STATUS_INVALID,
					      "full_bytes is %u, entry %td of layer %u has %u",
					      b->full_bytes, a - rows, a->layer, a->full_bytes);
		if (a->lo + a->row_bytes > b->lo)
			return kvp_check_fail(
				&at, KVP_STATUS_INVALID,
				"lo is %u, entry %td of layer %u holds bytes %u to %u", b->lo,
				a - rows, a->layer, a->lo, a->lo + a->row_bytes - 1);
	}
	return 0;
}

static int id_order(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

int kvp_check_ids(const struct kvp_check *check, const char *field, uint32_t *ids, size_t n)
{
	struct kvp_check at = *check;

	at.list = NULL;
	qsort(ids, n, sizeof(ids[0]), id_order);
	for (size_t i = 1; i < n; i++) {
		if (ids[i] == ids[i - 1])
			return kvp_check_fail(&at, KVP_STATUS_INVALID, "%s: %u is given twice",
					      field, ids[i]);
	}
	return 0;
}

/* Counts what was asked for in all, not what is held: unpacking frees little on the way. */
static void *budget_alloc(void *arg, size_t size)
{
	size_t *left = arg;

	if (size > *left)
		return NULL;
	*left -= size;
	return malloc(size);
}

static void budget_free(void *arg, void *p)
{
	(void)arg; /* the budget only shrinks */
	free(p);
}

ProtobufCMessage *kvp_unpack(const ProtobufCMessageDescriptor *desc, const void *buf, size_t len)
{
	size_t left = KVP_LIMIT_DECODED;
	ProtobufCAllocator budget = { budget_alloc, budget_free, &left };

	return protobuf_c_message_unpack(desc, &budget, len, buf);
}

long kvp_pack(const ProtobufCMessage *msg, void *buf, size_t cap)
{
	if (protobuf_c_message_get_packed_size(msg) > cap)
		return -EMSGSIZE;
	return (long)protobuf_c_message_pack(msg, buf);
}
