/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Names of the statuses and states on the wire. Any thread; the strings are constant. */

#include "client/kvpack.h"

/* "waiting", "ready", ...; "unknown" for others. kvp_status_name() is in kvpack.h. */
const char *kvp_room_phase_name(enum kvp_room_phase phase);

/* The status of that name, -1 if there is none. */
int kvp_status_from_name(const char *name);
