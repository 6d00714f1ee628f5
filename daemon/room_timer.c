/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One timer for all rooms: a heap of deadlines and a uv timer for the nearest. Without a deadline
 * nothing wakes up.
 *
 * What the lane waits for changes without a word to the loop, so an end that is on the lane is
 * looked at once per its shortest timer; its deadline counts from when the wait began, not from the
 * look.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

#define NEVER UINT64_MAX
#define MS UINT64_C(1000000)

static double seconds(uint64_t ns)
{
	return (double)ns / 1e9;
}

/* ---- the heap ----------------------------------------------------------------------------------
 */

static void heap_put(struct kvp_rooms *rooms, uint32_t i, struct kvp_room *room)
{
	rooms->heap[i] = room;
	room->heap_idx = i;
}

static void heap_up(struct kvp_rooms *rooms, uint32_t i)
{
	struct kvp_room *room = rooms->heap[i];

	while (i > 0 && rooms->heap[(i - 1) / 2]->deadline_ns > room->deadline_ns) {
		heap_put(rooms, i, rooms->heap[(i - 1) / 2]);
		i = (i - 1) / 2;
	}
	heap_put(rooms, i, room);
}

static void heap_down(struct kvp_rooms *rooms, uint32_t i)
{
	struct kvp_room *room = rooms->heap[i];

	for (;;) {
		uint32_t child = 2 * i + 1;

		if (child + 1 < rooms->n_heap &&
		    rooms->heap[child + 1]->deadline_ns < rooms->heap[child]->deadline_ns)
			child++;
		if (child >= rooms->n_heap || rooms->heap[child]->deadline_ns >= room->deadline_ns)
			break;
		heap_put(rooms, i, rooms->heap[child]);
		i = child;
	}
	heap_put(rooms, i, room);
}

/* The heap has room for every end: it grows before it is needed, or the end has no timers. */
static int heap_reserve(struct kvp_rooms *rooms)
{
	uint32_t cap = KVP_MAX(2 * rooms->cap_heap, 64u);
	struct kvp_room **grown;

	if (rooms->n_heap < rooms->cap_heap)
		return 0;
	grown = realloc(rooms->heap, cap * sizeof(struct kvp_room *));
	if (!grown)
		return -ENOMEM;
	rooms->heap = grown;
	rooms->cap_heap = cap;
	return 0;
}

static void heap_remove(struct kvp_rooms *rooms, struct kvp_room *room)
{
	uint32_t i = room->heap_idx;
	struct kvp_room *moved;

	if (i == UINT32_MAX)
		return;
	room->heap_idx = UINT32_MAX;
	moved = rooms->heap[--rooms->n_heap];
	if (moved == room)
		return;
	heap_put(rooms, i, moved);
	heap_up(rooms, i);
	heap_down(rooms, moved->heap_idx);
}

static void heap_set(struct kvp_rooms *rooms, struct kvp_room *room, uint64_t deadline_ns)
{
	room->deadline_ns = deadline_ns;
	if (room->heap_idx == UINT32_MAX) {
		if (heap_reserve(rooms) < 0) {
			kvp_log_limited(&rooms->log_limit, KVP_LOG_ERR,
					"room 0x%llx has no timer: no memory",
					(unsigned long long)room->key.room);
			return;
		}
		rooms->heap[rooms->n_heap] = room;
		room->heap_idx = rooms->n_heap++;
	}
	heap_up(rooms, room->heap_idx);
	heap_down(rooms, room->heap_idx);
}

/* ---- deadlines ---------------------------------------------------------------------------------
 */

/* When an end is looked at next, and what is to be said if its time is over. */
struct due {
	uint64_t now, at;
	Kvp__Status status; /* OK: the time is not over */
	char text[KVP_BOARD_TEXT];
};

/* Takes in one timer: began at `since`, runs for `ns`. The first that is over gives the text. */
static void KVP_PRINTF(5, 6) due_timer(struct due *due, uint64_t since, uint64_t ns,
				       Kvp__Status status, const char *fmt, ...)
{
	uint64_t at = since + ns;
	va_list args;

	due->at = KVP_MIN(due->at, at);
	if (at > due->now || due->status != KVP_ROOM_OK)
		return;
	due->status = status;
	va_start(args, fmt);
	(void)vsnprintf(due->text, sizeof(due->text), fmt, args); /* cut texts are fine */
	va_end(args);
}

/* The lane's waits: looked at again after `ns` at the latest. */
static void due_look(struct due *due, uint64_t ns)
{
	due->at = KVP_MIN(due->at, due->now + ns);
}

static bool any_in_doubt(const struct kvp_room *room)
{
	const struct kvp_sleg *leg;

	if (!room->key.is_dest) {
		DL_FOREACH2 (room->send.legs, leg, rnext) {
			if (leg->peer && kvp_peer_in_doubt(leg->peer))
				return true;
		}
		return false;
	}
	for (uint32_t i = 0; i < room->dest.n_legs; i++) {
		const struct kvp_peer *peer = room->dest.legs[i].peer;

		if (peer && kvp_peer_in_doubt(peer))
			return true;
	}
	return false;
}

/*
 * How long a timer runs that waits for what peers do. When it is over and a peer may be gone, the
 * time alone would blame whoever has not submitted, or not granted. The room is looked at again
 * until the peer is heard, and then fails with the timer's words, or is lost, and fails with that.
 */
static uint64_t peer_timer(const struct kvp_room *room, uint64_t since, uint64_t ns,
			   const struct due *due)
{
	if (since + ns > due->now || !any_in_doubt(room))
		return ns;
	return due->now - since + room->rooms->config->peer.heartbeat_ns;
}

static void leg_due(const struct kvp_dleg *leg, struct due *due)
{
	const struct kvp_room_timers *timers = &leg->room->timers;

	if (leg->state == KVP_DLEG_UNSENT)
		due_timer(due, leg->since_ns, timers->offer_ns, KVP__STATUS__STATUS_UNREACHABLE,
			  "peer %s could not be reached for %.1f s: it %s",
			  kvp_peer_name(leg->peer), seconds(timers->offer_ns),
			  kvp_peer_reason(leg->peer)[0] ? kvp_peer_reason(leg->peer)
							: "does not answer");
	else if (leg->state == KVP_DLEG_OFFERED && !kvp_dleg_met(leg))
		due_timer(due, leg->since_ns,
			  peer_timer(leg->room, leg->since_ns, timers->open_ns, due),
			  KVP__STATUS__STATUS_TIMEOUT,
			  "sender %u on %s has not opened the room for %.1f s", leg->sender,
			  kvp_peer_name(leg->peer), seconds(timers->open_ns));
}

/* A socket was too full for the offer: it has some time to drain. */
static void retry_offer(struct kvp_dleg *leg, struct due *due)
{
	if (leg->state != KVP_DLEG_UNSENT || !kvp_peer_is_up(leg->peer))
		return;
	kvp_dest_offer(leg);
	if (leg->state == KVP_DLEG_UNSENT)
		due_look(due, KVP_ROOM_UNSENT_RETRY_NS);
}

static void progress_due(const struct kvp_room *room, uint64_t since, uint32_t waits,
			 struct due *due)
{
	due_timer(due, since, peer_timer(room, since, room->timers.progress_ns, due),
		  KVP__STATUS__STATUS_TIMEOUT, "no progress for %.1f s, waiting for %s",
		  seconds(room->timers.progress_ns), kvp_wait_name((enum kvp_wait)waits));
}

static void dest_lane_due(const struct kvp_room *room, struct due *due)
{
	const struct kvp_room_timers *timers = &room->timers;
	const struct kvp_board *board = &room->board;
	uint32_t waits = atomic_load(&board->waits);
	uint64_t since = KVP_MAX(atomic_load(&board->waits_since_ns), room->accepted_ns);

	switch (waits) {
	case KVP_WAITS_SENDER:
		due_timer(due, since, peer_timer(room, since, timers->open_ns, due),
			  KVP__STATUS__STATUS_TIMEOUT,
			  "nothing came from the senders for %.1f s: their engines have submitted "
			  "no more",
			  seconds(timers->open_ns));
		break;
	case KVP_WAITS_LAND_SLOT:
	case KVP_WAITS_MEMORY:
	case KVP_WAITS_DATA:
	case KVP_WAITS_HELD:
	case KVP_WAITS_GPU:
		progress_due(room, since, waits, due);
		break;
	default:
		break;
	}
	due_look(due, KVP_MIN(timers->progress_ns, timers->open_ns));
}

static void dest_due(struct kvp_room *room, struct due *due)
{
	const Kvp__RoomState offering = KVP__ROOM_STATE__ROOM_OFFERING;

	for (uint32_t i = 0; i < room->dest.n_legs && room->state == offering; i++) {
		retry_offer(&room->dest.legs[i], due);
		leg_due(&room->dest.legs[i], due);
	}
	/* An offer may have been all that was missing. */
	if (room->state != offering && !kvp_room_terminal(room))
		dest_lane_due(room, due);
}

static void send_waiting_due(const struct kvp_room *room, struct due *due)
{
	const struct kvp_room_send *send = &room->send;

	if (send->leased && !send->n_dests)
		due_timer(due, send->lease_ns, 0, KVP__STATUS__STATUS_LEASE,
			  "the lease expired: decode neither came nor renewed it");
	else if (send->leased)
		due_timer(due, send->lease_ns, 0, KVP__STATUS__STATUS_LEASE,
			  "the lease expired: decode came with %u of %u destinations", send->n_legs,
			  send->n_dests);
	else if (send->n_dests)
		due_timer(due, room->created_ns, room->timers.open_ns, KVP__STATUS__STATUS_TIMEOUT,
			  "offers of only %u of %u destinations came within %.1f s", send->n_legs,
			  send->n_dests, seconds(room->timers.open_ns));
	else
		due_timer(due, room->created_ns, room->timers.open_ns, KVP__STATUS__STATUS_TIMEOUT,
			  "no offer came from decode within %.1f s", seconds(room->timers.open_ns));
}

static void fence_due(const struct kvp_room *room, uint64_t since, struct due *due)
{
	const struct kvp_room_chunk *chunk = kvp_chunks_fenced(room);

	due_timer(due, since, room->timers.fence_ns, KVP__STATUS__STATUS_FENCE_TIMEOUT,
		  "the fence did not reach its value for %.1f s: word %u, value %llu, chunk from "
		  "%llu",
		  seconds(room->timers.fence_ns), chunk ? chunk->fence_word : 0,
		  (unsigned long long)(chunk ? chunk->fence_value : 0),
		  (unsigned long long)(chunk ? chunk->start : 0));
}

static void send_lane_due(const struct kvp_room *room, struct due *due)
{
	const struct kvp_room_timers *timers = &room->timers;
	uint32_t waits = atomic_load(&room->board.waits);
	uint64_t since = KVP_MAX(atomic_load(&room->board.waits_since_ns), room->accepted_ns);

	switch (waits) {
	case KVP_WAITS_FENCE:
		fence_due(room, since, due);
		break;
	case KVP_WAITS_WINDOW:
	case KVP_WAITS_GRANT:
	case KVP_WAITS_PACK_SLOT:
	case KVP_WAITS_LANDED:
	case KVP_WAITS_HELD:
	case KVP_WAITS_GPU:
		progress_due(room, since, waits, due);
		break;
	default:
		break; /* an engine may be silent as long as it likes */
	}
	due_look(due, KVP_MIN(timers->progress_ns, timers->fence_ns));
}

/* Other senders of the same destinations may still be at work. */
static void send_closing_due(const struct kvp_room *room, struct due *due)
{
	uint64_t since = room->state_since_ns;

	due_timer(due, since, peer_timer(room, since, room->timers.open_ns, due),
		  KVP__STATUS__STATUS_TIMEOUT,
		  "all is delivered, decode has not said complete for %.1f s",
		  seconds(room->timers.open_ns));
}

static void send_due(const struct kvp_room *room, struct due *due)
{
	switch (room->state) {
	case KVP__ROOM_STATE__ROOM_WAITING:
		send_waiting_due(room, due);
		break;
	case KVP__ROOM_STATE__ROOM_CLOSING:
		send_closing_due(room, due);
		break;
	default:
		send_lane_due(room, due);
		break;
	}
}

/*
 * An end that is over and cannot become quiet: what keeps it is in the transport's hands, and ends
 * with the sessions it is on. That is a proof, the timer is none.
 */
static void drain_over(struct kvp_room *room)
{
	uint64_t drain_ns = room->rooms->config->timers.drain_ns;
	struct kvp_sleg *leg;
	char why[96];

	room->drain_told = true;
	room->rooms->stats.drains_late++;
	kvp_log_limited(&room->rooms->log_limit, KVP_LOG_WARNING,
			"room 0x%llx %s %u \"%s\" is over but not quiet for %.1f s",
			(unsigned long long)room->key.room, room->key.is_dest ? "dest" : "sender",
			room->key.index, kvp_room_label(room), seconds(drain_ns));
	(void)snprintf(why, sizeof(why), "holds the bytes of a room that is over for %.1f s",
		       seconds(drain_ns));
	if (!room->key.is_dest) {
		DL_FOREACH2 (room->send.legs, leg, rnext) {
			if (leg->peer && !kvp_peer_is_self(leg->peer))
				kvp_peer_fail(leg->peer, KVP__STATUS__STATUS_TRANSPORT, why);
		}
		return;
	}
	for (uint32_t i = 0; i < room->dest.n_legs; i++) {
		struct kvp_peer *peer = room->dest.legs[i].peer;

		if (peer && room->dest.legs[i].state == KVP_DLEG_ACCEPTED &&
		    !kvp_peer_is_self(peer))
			kvp_peer_fail(peer, KVP__STATUS__STATUS_TRANSPORT, why);
	}
}

static uint64_t over_deadline(struct kvp_room *room, uint64_t now)
{
	uint64_t at = room->ended_ns + room->rooms->config->timers.drain_ns;

	if (room->released || room->drain_told)
		return NEVER;
	if (at > now)
		return at;
	drain_over(room);
	return NEVER;
}

void kvp_room_timer_update(struct kvp_room *room)
{
	struct kvp_rooms *rooms = room->rooms;
	struct due due = { .now = kvp_room_now(), .at = NEVER };

	if (!room->id || room->released)
		return;
	if (!kvp_room_terminal(room)) {
		if (room->key.is_dest)
			dest_due(room, &due);
		else
			send_due(room, &due);
		if (due.status != KVP_ROOM_OK)
			kvp_room_fail(room, due.status, "%s", due.text); /* comes back here */
	}
	if (kvp_room_terminal(room))
		due.at = over_deadline(room, due.now);
	if (due.at == NEVER)
		heap_remove(rooms, room);
	else
		heap_set(rooms, room, due.at);
	kvp_room_timer_arm(rooms);
}

void kvp_room_timer_remove(struct kvp_room *room)
{
	heap_remove(room->rooms, room);
	if (room->rooms->n_heap == 0)
		kvp_room_timer_arm(room->rooms); /* without rooms nothing wakes up */
}

/* ---- the timer ---------------------------------------------------------------------------------
 */

static void on_timer(uv_timer_t *timer)
{
	struct kvp_rooms *rooms = timer->data;
	uint64_t now = kvp_room_now();

	rooms->timer_at_ns = NEVER;
	while (rooms->n_heap && rooms->heap[0]->deadline_ns <= now) {
		struct kvp_room *room = rooms->heap[0];

		heap_remove(rooms, room);
		kvp_room_timer_update(room);
	}
	rooms->notes_at_ns = kvp_notes_expire(rooms, now);
	rooms->ended_at_ns = kvp_park_expire(rooms, now);
	kvp_room_timer_arm(rooms);
}

void kvp_room_timer_arm(struct kvp_rooms *rooms)
{
	uint64_t at = rooms->n_heap ? rooms->heap[0]->deadline_ns : NEVER;
	uint64_t now;

	at = KVP_MIN(at, rooms->notes ? rooms->notes_at_ns : NEVER);
	at = KVP_MIN(at, rooms->ended_at_ns);
	/* A later deadline than the one that is set: the timer fires once in vain, and costs less
	 * than being set anew with every step of every room. */
	if (at >= rooms->timer_at_ns && rooms->n_heap + rooms->n_notes > 0)
		return;
	rooms->timer_at_ns = at;
	if (at == NEVER) {
		(void)uv_timer_stop(&rooms->timer); /* cannot fail */
		return;
	}
	now = kvp_room_now();
	uv_update_time(rooms->loop); /* the timer counts from the loop's time */
	(void)uv_timer_start(&rooms->timer, on_timer, at > now ? KVP_DIV_UP(at - now, MS) : 0, 0);
}

int kvp_room_timer_init(struct kvp_rooms *rooms)
{
	rooms->timer.data = rooms;
	rooms->timer_at_ns = NEVER;
	rooms->notes_at_ns = NEVER;
	rooms->ended_at_ns = NEVER;
	return uv_timer_init(rooms->loop, &rooms->timer);
}
