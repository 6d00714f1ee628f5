/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ctl_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "proto/util.h"
#include "tests/support_plan.h"

/* What a run of the command left. */
struct outcome {
	int status;
	char *out, *err; /* until the next run */
};

/* The whole of a temporary file, NUL-terminated. */
static char *slurp(FILE *file)
{
	char *text = NULL;
	size_t size = 0;

	rewind(file);
	if (getdelim(&text, &size, '\0', file) < 0) {
		free(text);
		text = strdup("");
	}
	cr_assert(text);
	return text;
}

/* Runs the command with standard output and error in files. */
static struct outcome run_args(int argc, char **argv)
{
	FILE *out = tmpfile(), *err = tmpfile();
	int old_out = dup(STDOUT_FILENO), old_err = dup(STDERR_FILENO);
	static struct outcome o;

	cr_assert(out && err && old_out >= 0 && old_err >= 0);
	(void)fflush(stdout); /* what the runner wrote before */
	cr_assert(dup2(fileno(out), STDOUT_FILENO) >= 0 && dup2(fileno(err), STDERR_FILENO) >= 0);
	o.status = ctl_plan(argc, argv);
	(void)fflush(stdout); /* usage errors leave nothing there */
	cr_assert(dup2(old_out, STDOUT_FILENO) >= 0 && dup2(old_err, STDERR_FILENO) >= 0);
	(void)close(old_out);
	(void)close(old_err);
	free(o.out);
	free(o.err);
	o.out = slurp(out);
	o.err = slurp(err);
	(void)fclose(out); /* temporary */
	(void)fclose(err);
	return o;
}

static struct outcome run_path(const char *option, char *path)
{
	char plan[] = "plan", json[16];
	char *argv[] = { plan, path, NULL, NULL };

	if (option) {
		(void)snprintf(json, sizeof(json), "%s", option);
		argv[1] = json;
		argv[2] = path;
	}
	return run_args(option ? 3 : 2, argv);
}

static struct outcome run_text(const char *option, const char *text, size_t bytes)
{
	char path[] = "/tmp/test_ctl_plan.XXXXXX";
	int fd = mkstemp(path);
	struct outcome o;

	cr_assert(fd >= 0);
	cr_assert_eq(write(fd, text, bytes), (ssize_t)bytes);
	(void)close(fd);
	o = run_path(option, path);
	(void)unlink(path);
	return o;
}

static struct outcome run_lines(const char *option, const char *text)
{
	return run_text(option, text, strlen(text));
}

#define SIDE(rest) "{\"page\":4,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1," rest "}"
#define GOOD_SIDE SIDE("\"pos0\":0,\"pages\":[5,2]")
#define CASE(src, dst, rest) "{\"src\":" src ",\"dst\":" dst "," rest "}\n"
#define TWO CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":3,\"tokens\":2")
#define TWO_PLAN "{\"rows\":[[23,23],[8,8]],\"raw_runs\":2,\"packed_runs\":[[0,23,1],[1,8,1]]}\n"

/* Each line of the vectors ends in "expect":{...}} and the command prints the same text. */
Test(ctl_plan, vectors)
{
	FILE *file = plan_vectors_open();
	struct outcome o;
	char *text, *at, *line;
	int n = 0;

	if (!file)
		return;
	text = slurp(file);
	(void)fclose(file); /* only read */
	o = run_text("--json", text, strlen(text));
	cr_assert_eq(o.status, 0, "%s", o.err);
	cr_assert_str_empty(o.err);

	at = o.out;
	for (line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n++) {
		const char *want = strstr(line, "\"expect\":");
		size_t len;

		cr_assert(want);
		want += strlen("\"expect\":");
		len = strlen(want) - 1; /* without the brace of the case */
		cr_assert(!strncmp(at, want, len) && at[len] == '\n', "line %d: %.*s", n + 1,
			  (int)len, at);
		at += len + 1;
	}
	cr_assert_eq(*at, '\0');
	cr_assert_gt(n, 0);
	free(text);
}

Test(ctl_plan, words)
{
	struct outcome o =
		run_lines(NULL, TWO "\n" CASE(GOOD_SIDE, GOOD_SIDE,
					      "\"name\":\"long\",\"start\":3,\"tokens\":9"));

	cr_assert_eq(o.status, 0);
	cr_assert(strstr(o.out, "2 raw, 2 packed: 1.0 times fewer"), "%s", o.out);
	cr_assert(strstr(o.out, "row 23 (page 5 slot 3) to row 23 (page 5 slot 3)"), "%s", o.out);
	cr_assert(strstr(o.out, ":3 long"), "%s", o.out);
	cr_assert(strstr(o.out, "refused      src_range: tokens lie outside"), "%s", o.out);
}

/* Sizes that no side can have are an answer, not bad input. */
Test(ctl_plan, impossible_sizes_are_geometry)
{
	static const char *const sides[] = {
		"{\"page\":-4,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1",
		"{\"page\":4294967296,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1",
		"{\"page\":4,\"dcp_size\":9007199254740991,\"dcp_rank\":0,\"interleave\":1",
		"{\"page\":4,\"dcp_size\":1,\"dcp_rank\":-1,\"interleave\":1",
		"{\"page\":4,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":4294967297",
	};
	char line[1024];

	for (size_t i = 0; i < KVP_ARRAY_SIZE(sides); i++) {
		struct outcome o;

		(void)snprintf(line, sizeof(line),
			       "{\"src\":%s,\"pos0\":0,\"pages\":[]},\"dst\":%s,\"start\":0,"
			       "\"tokens\":0}",
			       sides[i], GOOD_SIDE);
		o = run_lines("--json", line);
		cr_assert_eq(o.status, 0, "%s", o.err);
		cr_assert_str_eq(o.out, "{\"error\":\"geometry\"}\n");
	}
}

static const struct {
	const char *line, *want;
} malformed[] = {
	{ "nonsense\n", "not JSON" },
	{ "{\n", "not JSON" },
	{ "[]\n", "not a JSON object" },
	{ "{}\n", "src is missing" },
	{ "{\"src\":1}\n", "src is missing or not an object" },
	{ "{\"src\":{}}\n", "src.page is missing" },
	{ "{\"src\":" GOOD_SIDE "}\n", "dst is missing" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":0"), "tokens is missing" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":-1,\"tokens\":1"), "start is missing or not" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":0.5,\"tokens\":1"), "start is missing or not" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":0,\"tokens\":\"1\""), "tokens is missing or not" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":9007199254740992,\"tokens\":1"), "start is" },
	{ CASE(GOOD_SIDE, GOOD_SIDE, "\"start\":1e999,\"tokens\":1"), "start is" },
	{ CASE(GOOD_SIDE, SIDE("\"pos0\":0"), "\"start\":0,\"tokens\":1"), "dst.pages is missing" },
	{ CASE(GOOD_SIDE, SIDE("\"pages\":[1]"), "\"start\":0,\"tokens\":1"), "dst.pos0 is" },
	{ CASE(SIDE("\"pos0\":0,\"pages\":[1,-1]"), GOOD_SIDE, "\"start\":0,\"tokens\":1"),
	  "src.pages[1] is not" },
	{ CASE(SIDE("\"pos0\":0,\"pages\":[4294967296]"), GOOD_SIDE, "\"start\":0,\"tokens\":1"),
	  "src.pages[0] is not" },
	{ TWO TWO, NULL },
	{ "{\"src\":" GOOD_SIDE ",\"dst\":" GOOD_SIDE ",\"start\":3,\"tokens\":2} x\n",
	  "not JSON" },
};

Test(ctl_plan, malformed_lines)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(malformed); i++) {
		char text[2048];
		struct outcome o;

		(void)snprintf(text, sizeof(text), "%s%s%s", TWO, malformed[i].line, TWO);
		o = run_lines("--json", text);
		if (!malformed[i].want) {
			cr_assert_str_eq(o.out, TWO_PLAN TWO_PLAN TWO_PLAN TWO_PLAN);
			continue;
		}
		cr_assert_eq(o.status, 2, "%s", malformed[i].line);
		cr_assert(strstr(o.err, ":2: ") && strstr(o.err, malformed[i].want), "%s: %s",
			  malformed[i].line, o.err);
		cr_assert_str_eq(o.out, TWO_PLAN);
	}
}

Test(ctl_plan, zero_bytes_and_missing_newline)
{
	const char zero[] = TWO "{\"src\"\0:1}\n";
	struct outcome o = run_text("--json", zero, sizeof(zero) - 1);

	cr_assert_eq(o.status, 2);
	cr_assert(strstr(o.err, ":2: has a zero byte"), "%s", o.err);
	o = run_text("--json", TWO, sizeof(TWO) - 2);
	cr_assert_eq(o.status, 0);
	cr_assert_str_eq(o.out, TWO_PLAN);
	o = run_lines("--json", "");
	cr_assert_eq(o.status, 0);
	cr_assert_str_empty(o.out);
}

Test(ctl_plan, usage)
{
	char plan[] = "plan", json[] = "--json", bad[] = "--jason", file[] = "/nonexistent/file";
	char *none[] = { plan, json, NULL }, *unknown[] = { plan, bad, file, NULL };
	char *two[] = { plan, file, file, NULL }, *missing[] = { plan, file, NULL };
	char text[] = "--help", *help[] = { plan, text, NULL };
	struct outcome o;

	cr_assert_eq(run_args(2, none).status, 2);
	cr_assert_eq(run_args(3, unknown).status, 2);
	cr_assert_eq(run_args(3, two).status, 2);
	o = run_args(2, help);
	cr_assert_eq(o.status, 0);
	cr_assert(strstr(o.out, "\"tokens\":8"), "%s", o.out);
	o = run_args(2, missing);
	cr_assert_eq(o.status, 1);
	cr_assert(strstr(o.err, "No such file"), "%s", o.err);
}

/* A case with a million rows: every row is there, once, in order. */
Test(ctl_plan, a_million_rows)
{
	const uint32_t n = 1000000, pages = n / 64 + 1;
	char *text = malloc(32 * (size_t)n), *at = text;
	struct outcome o;

	cr_assert(text);
	for (int side = 0; side < 2; side++) {
		at += sprintf(at,
			      "%s{\"page\":64,\"dcp_size\":1,\"dcp_rank\":0,\"interleave\":1,"
			      "\"pos0\":0,\"pages\":[",
			      side ? ",\"dst\":" : "{\"src\":");
		for (uint32_t i = 0; i < pages; i++)
			at += sprintf(at, "%s%u", i ? "," : "", side ? i : 2 * i);
		at += sprintf(at, "]}");
	}
	(void)sprintf(at, ",\"start\":0,\"tokens\":%u}\n", n);
	o = run_lines("--json", text);
	cr_assert_eq(o.status, 0, "%s", o.err);

	cr_assert_eq(strncmp(o.out, "{\"rows\":[", 9), 0);
	at = o.out + 9;
	for (uint32_t i = 0; i < n; i++) {
		cr_assert_eq(strtoul(at + 1, &at, 10), i / 64 * 128 + i % 64);
		cr_assert_eq(strtoul(at + 1, &at, 10), i);
		cr_assert_eq(*at++, ']');
		cr_assert_eq(*at++, i + 1 < n ? ',' : ']');
	}
	cr_assert_str_eq(at, ",\"raw_runs\":15625,\"packed_runs\":[[0,0,1000000]]}\n");
	free(text);
}
