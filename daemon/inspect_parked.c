/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Offers of other nodes that wait for an engine here. They belong to no room of this node yet, and
 * to no user: everybody may know how many there are, administrators which.
 */

#include "daemon/inspect.h"

#include <inttypes.h>
#include <stdio.h>

struct parked {
	const struct kvp_inspect *ask;
	cJSON *list;
	uint64_t room; /* whose offers are listed */
	uint64_t count, oldest_ns;
	char example[64];
};

static bool count_offer(void *arg, const struct kvp_parked_view *view)
{
	struct parked *parked = arg;

	if (parked->count++ > 0 && view->since_ns >= parked->oldest_ns)
		return true;
	parked->oldest_ns = view->since_ns;
	if (parked->ask->admin)
		(void)snprintf(parked->example, sizeof(parked->example), "0x%" PRIx64 " send %u",
			       view->room, view->sender); /* fits */
	return true;
}

bool kvp_inspect_parked_cause(const struct kvp_inspect *ask, cJSON **cause)
{
	struct parked parked = { .ask = ask };
	cJSON *object;

	kvp_rooms_each_parked(ask->core->rooms, count_offer, &parked);
	if (parked.count == 0)
		return true;
	object = cJSON_CreateObject();
	(void)cJSON_AddStringToObject(object, "cause",
				      "another node's offer: no engine here has opened its room");
	kvp_inspect_num(object, "count", parked.count);
	kvp_inspect_age(ask, object, "oldest_s", parked.oldest_ns);
	(void)cJSON_AddStringToObject(object, "example", parked.example);
	*cause = object;
	return object;
}

static bool add_offer(void *arg, const struct kvp_parked_view *view)
{
	const struct parked *parked = arg;
	cJSON *object;

	if (view->room != parked->room)
		return true;
	object = cJSON_CreateObject();
	kvp_inspect_num(object, "sender", view->sender);
	kvp_inspect_num(object, "dest", view->dest);
	(void)cJSON_AddStringToObject(object, "peer", view->peer);
	kvp_inspect_age(parked->ask, object, "since_s", view->since_ns);
	kvp_inspect_append(parked->list, object);
	return true;
}

cJSON *kvp_inspect_parked(const struct kvp_inspect *ask, uint64_t room)
{
	struct parked parked = { .ask = ask, .list = cJSON_CreateArray(), .room = room };

	if (parked.list && ask->admin)
		kvp_rooms_each_parked(ask->core->rooms, add_offer, &parked);
	return parked.list;
}
