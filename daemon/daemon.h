/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon: owns the loop and everything on it, starts the lanes, takes their boards, watches
 * that they turn, and stops in order. Runs on the calling thread.
 *
 * Stop (SIGTERM, SIGINT): new rooms are refused, those in motion may end within stop.drain, the
 * rest fails with a reason; clients get to read that; then sessions, pools, peers and lanes end,
 * each when the one before is quiet. A second signal skips the waiting for rooms and clients.
 */

#include "daemon/config.h"

/* Serves until a signal. Returns the process's exit status: 0 stopped in order, 1 failed (logged).
 * `config` is borrowed; `config_path` NULL: built-in values. */
int kvp_daemon_run(const struct kvp_config *config, const char *config_path);
