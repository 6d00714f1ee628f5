/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What kvpackctl prints for each of the daemon's answers. */

#include <stdbool.h>

#include <cjson/cJSON.h>

struct ctl_command {
	const char *name;
	const char *usage; /* its arguments, "" for none */
	const char *brief;
	const char *help; /* what it shows and when it exits with 1 */
	const char *what; /* asked of the daemon; NULL: the name */
	/* True when the answer shows that something is wrong. */
	bool (*is_wrong)(const cJSON *answer);
	void (*print)(const cJSON *answer);
};

/* NULL for an unknown name. */
const struct ctl_command *ctl_command_find(const char *name);
/* The i-th; NULL past the end. */
const struct ctl_command *ctl_command_at(unsigned i);
