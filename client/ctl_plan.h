/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * kvpackctl plan [--json] FILE|-
 *
 * Reads one case a line: a JSON object with the sides `src` and `dst` (page, dcp_size, dcp_rank,
 * interleave, pos0, pages), `start` and `tokens`; other members but `name` are ignored, and blank
 * lines skipped. Prints for each what the planner makes of it: with --json one line a case,
 * {"rows":[[source,destination],...],"raw_runs":N,"packed_runs":[[packed,destination,rows],...]} or
 * {"error":"..."}; else in words.
 *
 * argv[0] is "plan". Returns the exit status: 0; 1 when a file cannot be read or standard output
 * not be written; 2 for wrong usage, and at the first line that is no case, with its number.
 */
int ctl_plan(int argc, char **argv);
