/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ctl_plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "proto/plan.h"
#include "proto/util.h"

#define EXIT_USAGE 2
#define ROWS_SHOWN 8u

/* JSON numbers are doubles here, which hold every integer up to this one. */
#define JSON_MAX ((UINT64_C(1) << 53) - 1)

struct plan_case {
	const char *name; /* borrowed from the JSON; NULL: none */
	struct kvp_side src, dst;
	uint32_t *src_pages, *dst_pages; /* owned */
	uint64_t start, tokens;
};

/* Where a case comes from, for messages. */
struct place {
	const char *file;
	unsigned long line;
};

KVP_PRINTF(2, 3)
static int line_refuse(const struct place *at, const char *fmt, ...)
{
	va_list args;

	(void)fprintf(stderr, "kvpackctl plan: %s:%lu: ", at->file, at->line);
	va_start(args, fmt);
	(void)vfprintf(stderr, fmt, args); /* nowhere else to complain */
	va_end(args);
	(void)fputc('\n', stderr);
	return EXIT_USAGE;
}

/* ---- parsing */

/* An integer from -JSON_MAX to JSON_MAX. */
static bool json_integer(const cJSON *json, int64_t *value)
{
	if (!cJSON_IsNumber(json) || !(json->valuedouble >= -(double)JSON_MAX) ||
	    json->valuedouble > (double)JSON_MAX ||
	    (double)(int64_t)json->valuedouble != json->valuedouble)
		return false;

	*value = (int64_t)json->valuedouble;
	return true;
}

static int position_parse(const struct place *at, const cJSON *obj, const char *where,
			  const char *field, uint64_t *value)
{
	int64_t n;

	if (!json_integer(cJSON_GetObjectItemCaseSensitive(obj, field), &n) || n < 0)
		return line_refuse(at, "%s%s is missing or not an integer from 0 to %" PRIu64,
				   where, field, JSON_MAX);
	*value = (uint64_t)n;
	return 0;
}

/*
 * Sizes beyond 32 bits are geometry that no side can have, not malformed input: `instead` is a
 * value that the planner refuses for that reason.
 */
static int size_parse(const struct place *at, const cJSON *obj, const char *where,
		      const char *field, uint32_t instead, uint32_t *value)
{
	int64_t n;

	if (!json_integer(cJSON_GetObjectItemCaseSensitive(obj, field), &n))
		return line_refuse(at, "%s%s is missing or not an integer below %" PRIu64, where,
				   field, JSON_MAX);
	*value = n < 0 || n > UINT32_MAX ? instead : (uint32_t)n;
	return 0;
}

static int pages_parse(const struct place *at, const cJSON *obj, const char *where,
		       uint32_t **pages, uint32_t *n_pages)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(obj, "pages"), *item;
	size_t n = 0, used = 0;

	if (!cJSON_IsArray(list))
		return line_refuse(at, "%spages is missing or not an array", where);

	cJSON_ArrayForEach (item, list)
		n++;
	*pages = malloc((n + 1) * sizeof(**pages));
	if (!*pages)
		return line_refuse(at, "%spages: no memory for %zu numbers", where, n);

	cJSON_ArrayForEach (item, list) {
		int64_t page;

		if (!json_integer(item, &page) || page < 0 || page > UINT32_MAX)
			return line_refuse(at, "%spages[%zu] is not an integer from 0 to %u", where,
					   used, UINT32_MAX);
		(*pages)[used++] = (uint32_t)page;
	}
	*n_pages = (uint32_t)used; /* a line of 2^32 numbers has been refused by memory */
	return 0;
}

static int side_parse(const struct place *at, const cJSON *json, const char *field,
		      struct kvp_side *side, uint32_t **pages)
{
	const cJSON *obj = cJSON_GetObjectItemCaseSensitive(json, field);
	const char *where = field[0] == 's' ? "src." : "dst.";
	int r;

	if (!cJSON_IsObject(obj))
		return line_refuse(at, "%s is missing or not an object", field);

	r = size_parse(at, obj, where, "page", 0, &side->page);
	if (!r)
		r = size_parse(at, obj, where, "dcp_size", 0, &side->dcp_size);
	if (!r)
		r = size_parse(at, obj, where, "dcp_rank", UINT32_MAX, &side->dcp_rank);
	if (!r)
		r = size_parse(at, obj, where, "interleave", 0, &side->interleave);
	if (!r)
		r = position_parse(at, obj, where, "pos0", &side->pos0);
	if (!r)
		r = pages_parse(at, obj, where, pages, &side->n_pages);
	side->pages = *pages;
	return r;
}

static int case_parse(const struct place *at, const cJSON *json, struct plan_case *c)
{
	int r;

	if (!cJSON_IsObject(json))
		return line_refuse(at, "not a JSON object");

	c->name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "name"));
	r = side_parse(at, json, "src", &c->src, &c->src_pages);
	if (!r)
		r = side_parse(at, json, "dst", &c->dst, &c->dst_pages);
	if (!r)
		r = position_parse(at, json, "", "start", &c->start);
	if (!r)
		r = position_parse(at, json, "", "tokens", &c->tokens);
	return r;
}

static void case_fini(struct plan_case *c)
{
	free(c->src_pages);
	free(c->dst_pages);
}

static void json_deletep(cJSON **json)
{
	cJSON_Delete(*json);
}

/* ---- one line of JSON a case */

static uint64_t src_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k)
{
	return (uint64_t)run->src_page * c->src.page + run->src_slot + (uint64_t)k * run->src_step;
}

static uint64_t dst_row(const struct plan_case *c, const struct kvp_run *run, uint32_t k)
{
	return (uint64_t)run->dst_page * c->dst.page + run->dst_slot + (uint64_t)k * run->dst_step;
}

static void rows_print(const struct plan_case *c)
{
	const char *comma = "";
	struct kvp_rows_iter it;
	struct kvp_run run;

	kvp_rows_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	while (kvp_rows_next(&it, &run)) {
		for (uint32_t k = 0; k < run.n; k++, comma = ",")
			(void)printf("%s[%" PRIu64 ",%" PRIu64 "]", comma, src_row(c, &run, k),
				     dst_row(c, &run, k));
	}
}

static void case_print_json(const struct plan_case *c)
{
	enum kvp_plan_error error = kvp_plan_check(&c->src, &c->dst, c->start, c->tokens);
	struct kvp_packed_run run;
	struct kvp_packed_iter it;
	const char *comma = "";

	if (error) {
		(void)printf("{\"error\":\"%s\"}\n", kvp_plan_error_name(error));
		return;
	}

	(void)printf("{\"rows\":[");
	rows_print(c);
	(void)printf("],\"raw_runs\":%" PRIu64 ",\"packed_runs\":[",
		     kvp_raw_runs(&c->src, &c->dst, c->start, c->tokens));
	kvp_packed_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	for (; kvp_packed_next(&it, &run); comma = ",")
		(void)printf("%s[%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]", comma, run.packed,
			     run.dst_row, run.n);
	(void)printf("]}\n");
}

/* ---- in words */

static const char *error_words(enum kvp_plan_error error)
{
	switch (error) {
	case KVP_PLAN_GEOMETRY:
		return "a size is zero or too large, a rank is not below its DCP size, or an "
		       "interleave does not divide its page";
	case KVP_PLAN_ALIGNMENT:
		return "a pos0 is not a multiple of page x dcp_size";
	case KVP_PLAN_SRC_RANGE:
		return "tokens lie outside the source's pages";
	case KVP_PLAN_DST_RANGE:
		return "tokens lie outside the destination's pages";
	case KVP_PLAN_OK:
		break;
	}
	return "nothing is wrong";
}

static void side_print(const char *what, const struct kvp_side *side)
{
	(void)printf("  %-12s pages of %u rows", what, side->page);
	if (side->dcp_size == 1)
		(void)printf(", no DCP");
	else
		(void)printf(
			", DCP rank %u of %u, interleave %u, %" PRIu64 " tokens a virtual page",
			side->dcp_rank, side->dcp_size, side->interleave, kvp_side_vpage(side));
	(void)printf(", %u page%s from position %" PRIu64 "\n", side->n_pages,
		     side->n_pages == 1 ? "" : "s", side->pos0);
}

static void first_rows_print(const struct plan_case *c, uint64_t rows)
{
	const char *head = "first rows";
	struct kvp_rows_iter it;
	struct kvp_run run;
	uint32_t shown = 0;

	kvp_rows_begin(&it, &c->src, &c->dst, c->start, c->tokens);
	while (shown < ROWS_SHOWN && kvp_rows_next(&it, &run)) {
		for (uint32_t k = 0; k < run.n && shown < ROWS_SHOWN; k++, shown++, head = "") {
			uint32_t s = run.src_slot + k * run.src_step;
			uint32_t d = run.dst_slot + k * run.dst_step;

			(void)printf("  %-12s row %" PRIu64 " (page %u slot %u) to row %" PRIu64
				     " (page %u slot %u)\n",
				     head, src_row(c, &run, k), run.src_page, s,
				     dst_row(c, &run, k), run.dst_page, d);
		}
	}
	if (rows > shown)
		(void)printf("  %-12s and %" PRIu64 " more\n", "", rows - shown);
}

static void case_print_words(const struct place *at, const struct plan_case *c)
{
	enum kvp_plan_error error = kvp_plan_check(&c->src, &c->dst, c->start, c->tokens);
	uint64_t rows, raw, packed;

	(void)printf("%s%s:%lu%s%s\n", at->line > 1 ? "\n" : "", at->file, at->line,
		     c->name ? " " : "", c->name ? c->name : "");
	side_print("source", &c->src);
	side_print("destination", &c->dst);
	(void)printf("  %-12s %" PRIu64 " from position %" PRIu64 "\n", "tokens", c->tokens,
		     c->start);
	if (error) {
		(void)printf("  %-12s %s: %s\n", "refused", kvp_plan_error_name(error),
			     error_words(error));
		return;
	}

	rows = kvp_rows_count(&c->src, &c->dst, c->start, c->tokens);
	raw = kvp_raw_runs(&c->src, &c->dst, c->start, c->tokens);
	packed = kvp_packed_runs(&c->src, &c->dst, c->start, c->tokens);
	(void)printf("  %-12s %" PRIu64 " that the source holds and the destination owns\n", "rows",
		     rows);
	(void)printf("  %-12s %" PRIu64 " raw, %" PRIu64 " packed", "writes", raw, packed);
	if (packed)
		(void)printf(": %.1f times fewer", (double)raw / (double)packed);
	(void)putchar('\n');
	first_rows_print(c, rows);
}

/* ---- files */

static bool line_blank(const char *line)
{
	return line[strspn(line, " \t\r\n")] == '\0';
}

static int line_plan(const struct place *at, const char *line, size_t len, bool json_wanted)
{
	KVP_CLEANUP(json_deletep) cJSON *json = NULL;
	KVP_CLEANUP(case_fini) struct plan_case c = { 0 };
	int r;

	if (memchr(line, '\0', len))
		return line_refuse(at, "has a zero byte");
	if (line_blank(line))
		return 0;

	json = cJSON_ParseWithLengthOpts(line, len + 1, NULL, true);
	if (!json)
		return line_refuse(at, "not JSON");
	r = case_parse(at, json, &c);
	if (r)
		return r;

	if (json_wanted)
		case_print_json(&c);
	else
		case_print_words(at, &c);
	return 0;
}

static int file_plan(const char *name, FILE *file, bool json_wanted)
{
	KVP_CLEANUP(kvp_freep) char *line = NULL;
	struct place at = { .file = name };
	size_t size = 0;
	ssize_t len;
	int r = 0;

	while (!r && (len = getline(&line, &size, file)) >= 0) {
		at.line++;
		r = line_plan(&at, line, (size_t)len, json_wanted);
	}
	if (!r && !feof(file)) { /* it may have no memory for a line, too */
		(void)fprintf(stderr, "kvpackctl plan: %s: %m\n", name);
		r = EXIT_FAILURE;
	}
	if (fflush(stdout) && !r) {
		(void)fprintf(stderr, "kvpackctl plan: standard output: %m\n");
		r = EXIT_FAILURE;
	}
	return r;
}

static int usage(FILE *out)
{
	(void)fputs("usage: kvpackctl plan [--json] FILE|-\n"
		    "\n"
		    "FILE has one transfer a line: how both ends see the tokens (as struct "
		    "kvp_side_desc),\nand which of them are sent.\n"
		    "\n"
		    "  {\"src\":{\"page\":4,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1,"
		    "\"pos0\":0,\"pages\":[5,2]},\n"
		    "   \"dst\":{\"page\":4,\"dcp_size\":2,\"dcp_rank\":0,\"interleave\":1,"
		    "\"pos0\":0,\"pages\":[6]},\n"
		    "   \"start\":0,\"tokens\":8}    (in one line; \"name\" may be added)\n"
		    "\n"
		    "Exits with 2 when a line is malformed.\n",
		    out);
	return out == stdout ? 0 : EXIT_USAGE;
}

int ctl_plan(int argc, char **argv)
{
	const char *name = NULL;
	bool json = false, options = true;
	FILE *file;
	int r;

	for (int i = 1; i < argc; i++) {
		if (options && !strcmp(argv[i], "--"))
			options = false;
		else if (options && !strcmp(argv[i], "--json"))
			json = true;
		else if (options && !strcmp(argv[i], "--help"))
			return usage(stdout);
		else if ((options && argv[i][0] == '-' && argv[i][1]) || name)
			return usage(stderr);
		else
			name = argv[i];
	}
	if (!name)
		return usage(stderr);
	if (!strcmp(name, "-"))
		return file_plan("standard input", stdin, json);

	file = fopen(name, "re");
	if (!file) {
		(void)fprintf(stderr, "kvpackctl plan: %s: %m\n", name);
		return EXIT_FAILURE;
	}
	r = file_plan(name, file, json);
	(void)fclose(file); /* only read */
	return r;
}
