/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's state as JSON, for kvpackctl and whoever else asks; fields are added, never
 * renamed. Loop thread only.
 *
 * Whoever is no admin sees that objects of other users exist and how many, not their labels,
 * processes, handles or reasons. Keys and tokens are shown to nobody.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "daemon/core.h"

/* Who asks. */
struct kvp_inspect {
	struct kvp_core *core;
	const char *arg;
	bool all;
	bool admin;
	uint32_t uid;
	uint64_t now_ns;
	char *err;
	size_t err_bytes;
};

/* A memfd with the JSON that the caller closes, or a negative Kvp__Status with the reason in
 * ask->err. For what is small; of rooms there are too many for one turn of the loop. */
int kvp_inspect_answer(const struct kvp_inspect *ask, const char *what);

struct kvp_session_pending;
/* `what` shows rooms. */
bool kvp_inspect_is_look(const char *what);
/* Answers `pending` by and by; until then nothing else of its session is read. OK, or a reason in
 * ask->err, and `pending` is still the caller's. */
Kvp__Status kvp_inspect_look(const struct kvp_inspect *ask, const char *what,
			     struct kvp_session_pending *pending);

/* The parts. */
cJSON *kvp_inspect_status(const struct kvp_inspect *ask);
cJSON *kvp_inspect_version(const struct kvp_inspect *ask);
cJSON *kvp_inspect_lanes(const struct kvp_inspect *ask);
cJSON *kvp_inspect_peers(const struct kvp_inspect *ask);
cJSON *kvp_inspect_clients(const struct kvp_inspect *ask);
cJSON *kvp_inspect_pools(const struct kvp_inspect *ask);

/* Offers that no engine here has opened: as one of the causes of `waiting` (NULL where there is
 * none; false: no memory), and those of a room (NULL: no memory). */
bool kvp_inspect_parked_cause(const struct kvp_inspect *ask, cJSON **cause);
cJSON *kvp_inspect_parked(const struct kvp_inspect *ask, uint64_t room);

/* The `limits` of the status; `lanes` has the counts of all. */
void kvp_inspect_limits(const struct kvp_core *core, cJSON *status,
			const struct kvp_rooms_stats *rooms, const struct kvp_lane_status *lanes);

/* Small things that the parts share. */
void kvp_inspect_num(cJSON *object, const char *name, uint64_t value);
/* Takes the item over, whether there was memory for it and for the list or not. */
void kvp_inspect_append(cJSON *list, cJSON *item);
/* Seconds since `since_ns`; null when that is 0. */
void kvp_inspect_age(const struct kvp_inspect *ask, cJSON *object, const char *name,
		     uint64_t since_ns);
void kvp_inspect_hex(cJSON *object, const char *name, uint64_t value);
