/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The numbers of the control sessions that are up now. Whoever opens a data connection has to name
 * one: only the two daemons of a session know its number.
 *
 * The loop adds and removes; any lane asks, without a lock. An answer may be as old as the loop is
 * slow, which is right: a number is added before its peer is told where a lane is.
 */

#include <stdbool.h>
#include <stdint.h>

struct kvp_admits;

/* Room for so many sessions; NULL: no memory. */
struct kvp_admits *kvp_admits_create(uint32_t n);
void kvp_admits_destroy(struct kvp_admits *admits);
/* False: there is no room, and the session's data connections will be refused. The same number may
 * be there twice; 0, of sessions without one, any number of times. */
bool kvp_admits_add(struct kvp_admits *admits, uint64_t number);
void kvp_admits_remove(struct kvp_admits *admits, uint64_t number);
bool kvp_admits_has(const struct kvp_admits *admits, uint64_t number);
