/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How many files the daemon may have open (RLIMIT_NOFILE). Libraries that find none left report it
 * as anything, so the limit is compared with what the configuration needs before they are asked.
 */

#include <stddef.h>

#include "daemon/config.h"

#define KVP_FILES_ADVICE \
	"put LimitNOFILE=65536 below [Service] in the daemon's unit, or raise ulimit -n"

/* Raises the soft limit as far as needed and allowed. -EMFILE: the rest does not do to start with,
 * `err` says what would. Less than all configured maxima need is a warning. */
int kvp_files_check(const struct kvp_config *config, char *err, size_t err_bytes);
