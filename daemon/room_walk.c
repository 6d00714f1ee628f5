/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A walk over all ends, a few at a time. Ends are listed in the order of their ids, so what was
 * made after the begin comes last and is left out; each end carries the number of the walk that has
 * seen it, also as history, so none is seen a second time when it is over meanwhile.
 */

#include <assert.h>

#include "daemon/room_internal.h"

void kvp_room_walk_begin(struct kvp_room_walk *walk, struct kvp_rooms *rooms, bool ended,
			 kvp_room_view_fn *fn, void *arg)
{
	assert(!rooms->walk);
	*walk = (struct kvp_room_walk){
		.rooms = rooms,
		.fn = fn,
		.arg = arg,
		.ended = ended,
		.at = rooms->all,
		.last_id = rooms->last_id,
		.number = ++rooms->n_walks,
	};
	rooms->walk = walk;
}

static bool step_live(struct kvp_room_walk *walk)
{
	struct kvp_room *room = walk->at;
	struct kvp_room_view view;

	if (!room || room->id > walk->last_id) {
		walk->past_live = true;
		walk->ended_at = walk->rooms->n_ended;
		return walk->ended;
	}
	walk->at = room->next;
	room->seen_by = walk->number;
	kvp_room_view_fill(room, &view);
	return walk->fn(walk->arg, &view);
}

/* From the newest that there was when the live ones had all been seen, to the oldest that is still
 * remembered. */
static bool step_ended(struct kvp_room_walk *walk)
{
	const struct kvp_rooms *rooms = walk->rooms;
	const struct kvp_room_view *view;

	if (walk->ended_at == 0 || rooms->n_ended - walk->ended_at >= rooms->n_history)
		return false;
	view = &rooms->history[--walk->ended_at % rooms->cap_history];
	if (view->seen_by == walk->number || view->id > walk->last_id)
		return true;
	return walk->fn(walk->arg, view);
}

bool kvp_room_walk_step(struct kvp_room_walk *walk, uint32_t n)
{
	bool more = true;

	while (n-- > 0 && more)
		more = walk->past_live ? step_ended(walk) : step_live(walk);
	return more;
}

void kvp_room_walk_end(struct kvp_room_walk *walk)
{
	if (walk->rooms)
		walk->rooms->walk = NULL;
	walk->rooms = NULL;
}

void kvp_room_walk_leave(struct kvp_room *room)
{
	struct kvp_room_walk *walk = room->rooms->walk;

	if (walk && walk->at == room)
		walk->at = room->next;
}
