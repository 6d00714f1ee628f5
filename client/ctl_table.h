/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Aligned tables and readable numbers for kvpackctl. Exits with status 1 when memory runs out. */

#include <stdbool.h>
#include <stddef.h>

#include <cjson/cJSON.h>

enum ctl_kind {
	CTL_TEXT,
	CTL_COUNT,
	CTL_BYTES,   /* 1.5 GiB */
	CTL_SECONDS, /* 3m 12s */
	CTL_MS,      /* the same from milliseconds */
	CTL_FLAG,    /* yes, - */
	CTL_LIST     /* texts with commas */
};

struct ctl_column {
	const char *title;
	const char *key; /* member of the row's object; "a.b": member b of member a */
	enum ctl_kind kind;
};

/* What the member says in words: "-" when it is missing, null or empty. The caller frees it. */
char *ctl_cell(const cJSON *object, const char *key, enum ctl_kind kind);

/* Numbers are aligned to the right; nothing but the empty text when rows has no elements. */
void ctl_table_print(const struct ctl_column *columns, size_t n_columns, const cJSON *rows,
		     const char *empty);

double ctl_number(const cJSON *object, const char *key);    /* 0 when missing */
const char *ctl_text(const cJSON *object, const char *key); /* "" when missing */
bool ctl_flag(const cJSON *object, const char *key);
const cJSON *ctl_member(const cJSON *object, const char *key); /* NULL when missing; "a.b" too */
