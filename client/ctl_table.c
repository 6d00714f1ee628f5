/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ctl_table.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/util.h"

_Noreturn static void out_of_memory(void)
{
	(void)fputs("kvpackctl: out of memory\n", stderr);
	exit(1);
}

static char *need(char *p)
{
	if (!p)
		out_of_memory();
	return p;
}

KVP_PRINTF(1, 2) static char *format(const char *fmt, ...)
{
	char *text = NULL;
	va_list ap;

	va_start(ap, fmt);
	if (vasprintf(&text, fmt, ap) < 0)
		text = NULL;
	va_end(ap);
	return need(text);
}

const cJSON *ctl_member(const cJSON *object, const char *key)
{
	const char *dot = strchr(key, '.');
	char head[32];

	if (!dot)
		return cJSON_GetObjectItemCaseSensitive(object, key);
	(void)snprintf(head, sizeof(head), "%.*s", (int)(dot - key), key);
	return ctl_member(cJSON_GetObjectItemCaseSensitive(object, head), dot + 1);
}

double ctl_number(const cJSON *object, const char *key)
{
	const cJSON *item = ctl_member(object, key);

	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

const char *ctl_text(const cJSON *object, const char *key)
{
	const cJSON *item = ctl_member(object, key);

	return cJSON_IsString(item) ? item->valuestring : "";
}

bool ctl_flag(const cJSON *object, const char *key)
{
	return cJSON_IsTrue(ctl_member(object, key));
}

/* ---- cells --------------------------------------------------------------------------------- */

static char *bytes_text(double value)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
	size_t unit = 0;

	while (value >= 1024 && unit + 1 < KVP_ARRAY_SIZE(units)) {
		value /= 1024;
		unit++;
	}
	return format(unit == 0 || value >= 100 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

static char *seconds_text(double s)
{
	unsigned long whole = s > 0 ? (unsigned long)s : 0;

	if (s < 1)
		return format("%.0f ms", s * 1000);
	if (s < 60)
		return format("%.1f s", s);
	if (whole < 3600)
		return format("%lum %02lus", whole / 60, whole % 60);
	if (whole < 86400)
		return format("%luh %02lum", whole / 3600, whole / 60 % 60);
	return format("%lud %02luh", whole / 86400, whole / 3600 % 24);
}

static char *number_text(double value, enum ctl_kind kind)
{
	switch (kind) {
	case CTL_BYTES:
		return bytes_text(value);
	case CTL_SECONDS:
		return seconds_text(value);
	case CTL_MS:
		return seconds_text(value / 1000);
	default:
		return format("%.0f", value);
	}
}

static char *list_text(const cJSON *list)
{
	char *text = need(strdup(""));
	const cJSON *item;

	cJSON_ArrayForEach (item, list) {
		char *longer;

		if (!cJSON_IsString(item))
			continue;
		longer = format("%s%s%s", text, text[0] ? ", " : "", item->valuestring);
		free(text);
		text = longer;
	}
	return text;
}

char *ctl_cell(const cJSON *object, const char *key, enum ctl_kind kind)
{
	const cJSON *item = ctl_member(object, key);
	char *text = NULL;

	if (kind == CTL_FLAG)
		text = format("%s", cJSON_IsTrue(item) ? "yes" : "");
	else if (cJSON_IsNumber(item))
		text = number_text(item->valuedouble, kind);
	else if (cJSON_IsString(item))
		text = format("%s", item->valuestring);
	else if (cJSON_IsArray(item))
		text = list_text(item);
	if (text && text[0])
		return text;
	free(text);
	return need(strdup("-"));
}

/* ---- tables -------------------------------------------------------------------------------- */

/* Characters, not bytes: labels may be any UTF-8. */
static size_t width_of(const char *text)
{
	size_t n = 0;

	for (; *text; text++)
		n += ((unsigned char)*text & 0xc0) != 0x80;
	return n;
}

static bool is_right(enum ctl_kind kind)
{
	return kind == CTL_COUNT || kind == CTL_BYTES || kind == CTL_SECONDS || kind == CTL_MS;
}

static void put_padded(const char *text, size_t width, bool right, bool last)
{
	size_t have = width_of(text);
	int pad = have < width ? (int)(width - have) : 0;

	if (right)
		(void)printf("%*s%s", pad, "", text);
	else
		(void)printf("%s%*s", text, last ? 0 : pad, "");
	(void)fputs(last ? "\n" : "  ", stdout); /* main() looks at the stream's error in the end */
}

static void print_rows(const struct ctl_column *columns, size_t n_columns, char **cells,
		       size_t n_rows, const size_t *widths)
{
	for (size_t c = 0; c < n_columns; c++)
		put_padded(columns[c].title, widths[c], is_right(columns[c].kind),
			   c + 1 == n_columns);
	for (size_t i = 0; i < n_rows; i++, cells += n_columns) {
		for (size_t c = 0; c < n_columns; c++)
			put_padded(cells[c] ?: "-", widths[c], is_right(columns[c].kind),
				   c + 1 == n_columns);
	}
}

void ctl_table_print(const struct ctl_column *columns, size_t n_columns, const cJSON *rows,
		     const char *empty)
{
	size_t n_rows = (size_t)cJSON_GetArraySize(rows);
	KVP_CLEANUP(kvp_freep) char **cells = NULL;
	KVP_CLEANUP(kvp_freep) size_t *widths = NULL;
	const cJSON *row;
	size_t n = 0;

	if (n_rows == 0) {
		(void)printf("%s\n", empty);
		return;
	}
	cells = calloc(n_rows * n_columns, sizeof(*cells));
	widths = calloc(n_columns, sizeof(*widths));
	if (!cells || !widths)
		out_of_memory();
	for (size_t c = 0; c < n_columns; c++)
		widths[c] = width_of(columns[c].title);
	cJSON_ArrayForEach (row, rows) {
		for (size_t c = 0; c < n_columns; c++, n++) {
			cells[n] = ctl_cell(row, columns[c].key, columns[c].kind);
			widths[c] = KVP_MAX(widths[c], width_of(cells[n]));
		}
	}
	print_rows(columns, n_columns, cells, n_rows, widths);
	for (size_t i = 0; i < n; i++)
		free(cells[i]);
}
