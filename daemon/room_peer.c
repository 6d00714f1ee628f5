/* SPDX-License-Identifier: Apache-2.0 */

/* Rooms and their peers: which legs are on which session, what comes from there. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

/* ---- legs of a peer ----------------------------------------------------------------------------
 */

struct kvp_room_peer *kvp_room_peer_data(struct kvp_peer *peer)
{
	struct kvp_room_peer *data = kvp_peer_data(peer);

	if (data)
		return data;
	data = calloc(1, sizeof(*data));
	if (data)
		kvp_peer_set_data(peer, data);
	return data;
}

void kvp_room_peer_drop_empty(struct kvp_peer *peer)
{
	struct kvp_room_peer *data = kvp_peer_data(peer);

	if (!data || data->dlegs || data->slegs || data->n_parked)
		return;
	kvp_peer_set_data(peer, NULL);
	free(data);
}

int kvp_room_peer_add_dleg(struct kvp_dleg *leg)
{
	struct kvp_room_peer *data = kvp_room_peer_data(leg->peer);

	if (!data)
		return -ENOMEM;
	DL_APPEND(data->dlegs, leg);
	return 0;
}

int kvp_room_peer_add_sleg(struct kvp_sleg *leg)
{
	struct kvp_room_peer *data = kvp_room_peer_data(leg->peer);

	if (!data)
		return -ENOMEM;
	DL_APPEND(data->slegs, leg);
	return 0;
}

void kvp_room_peer_drop_dleg(struct kvp_dleg *leg)
{
	struct kvp_peer *peer = KVP_TAKE(leg->peer);
	struct kvp_room_peer *data;

	if (!peer)
		return;
	data = kvp_peer_data(peer);
	if (leg->prev) /* else the peer's memory ran out before it was listed */
		DL_DELETE(data->dlegs, leg);
	leg->prev = leg->next = NULL;
	kvp_room_peer_drop_empty(peer);
	kvp_peer_put(peer);
}

void kvp_room_peer_drop_sleg(struct kvp_sleg *leg)
{
	struct kvp_peer *peer = KVP_TAKE(leg->peer);
	struct kvp_room_peer *data;

	if (!peer)
		return;
	data = kvp_peer_data(peer);
	DL_DELETE(data->slegs, leg);
	kvp_room_peer_drop_empty(peer);
}

void kvp_room_abort_leg(struct kvp_peer *peer, const Kvp__Leg *leg, Kvp__Status status,
			const char *text, bool retry)
{
	Kvp__LegAbort abort = KVP__LEG_ABORT__INIT;
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;

	abort.leg = (Kvp__Leg *)leg;
	abort.status = status;
	abort.text = (char *)text;
	abort.retry = retry;
	msg.body_case = KVP__PEER_MSG__BODY_ABORT;
	msg.abort = &abort;
	(void)kvp_peer_send(peer, &msg); /* a lost session says the same */
}

/* ---- sessions come and go ----------------------------------------------------------------------
 */

static void notes_send(struct kvp_rooms *rooms, struct kvp_peer *peer);

static void on_up(void *arg, struct kvp_peer *peer)
{
	struct kvp_room_peer *data = kvp_peer_data(peer);
	struct kvp_dleg *leg, *tmp;

	if (data) {
		DL_FOREACH_SAFE (data->dlegs, leg, tmp) {
			if (leg->state != KVP_DLEG_UNSENT || kvp_room_terminal(leg->room))
				continue;
			kvp_dest_offer(leg);
			kvp_room_timer_update(leg->room);
		}
	}
	notes_send(arg, peer);
}

/* An offer without an answer is made again on the next session; what was accepted is broken. */
static void dleg_down(struct kvp_dleg *leg, Kvp__Status status, const char *why)
{
	struct kvp_room *room = leg->room;

	if (kvp_room_terminal(room))
		return;
	if (leg->state == KVP_DLEG_ACCEPTED) {
		kvp_room_fail(room, status, "peer %s %s", kvp_peer_name(leg->peer), why);
		return;
	}
	if (leg->state == KVP_DLEG_OFFERED) {
		leg->state = KVP_DLEG_UNSENT;
		leg->since_ns = kvp_room_now();
	}
	kvp_room_timer_update(room);
}

static void sleg_down(struct kvp_sleg *leg, Kvp__Status status, const char *why)
{
	struct kvp_room *room = leg->room;
	char name[128];

	(void)snprintf(name, sizeof(name), "%s", kvp_peer_name(leg->peer));
	kvp_room_peer_drop_sleg(leg); /* the peer goes with its session */
	if (kvp_room_terminal(room) || leg->state == KVP_SLEG_ENDED)
		return;
	if (leg->state == KVP_SLEG_GO) {
		kvp_room_fail(room, status, "peer %s %s", name, why);
		return;
	}
	kvp_sleg_free(leg);
	kvp_room_timer_update(room);
}

static Kvp__Status lost_status(Kvp__Status status)
{
	/* A dial that failed, a session that was let go: to a room its peer is lost. */
	switch (status) {
	case KVP__STATUS__STATUS_PROTOCOL:
	case KVP__STATUS__STATUS_TRANSPORT:
	case KVP__STATUS__STATUS_STOPPING:
	case KVP__STATUS__STATUS_LANE_STUCK:
		return status;
	default:
		return KVP__STATUS__STATUS_PEER_LOST;
	}
}

static void on_down(void *arg, struct kvp_peer *peer, Kvp__Status status, const char *why)
{
	struct kvp_rooms *rooms = arg;
	struct kvp_room_peer *data;
	struct kvp_dleg *dleg, *dtmp;
	struct kvp_sleg *sleg, *stmp;

	kvp_park_drop_peer(rooms, peer);
	kvp_rooms_drop_kept(rooms, peer);
	data = kvp_peer_data(peer); /* not before: it may have been kept by what was parked */
	if (!data)
		return;
	DL_FOREACH_SAFE (data->dlegs, dleg, dtmp) {
		dleg_down(dleg, lost_status(status), why);
	}
	sleg = data->slegs; /* dropping the last leg frees data */
	for (; sleg; sleg = stmp) {
		stmp = sleg->next;
		sleg_down(sleg, lost_status(status), why);
	}
}

/* ---- messages ----------------------------------------------------------------------------------
 */

static void on_offer(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	const Kvp__Leg *leg = msg->offer->leg;
	struct kvp_room *room = kvp_room_find(rooms, leg->room, leg->sender, false);
	char why[KVP_ROOM_ERR];

	if (rooms->closed)
		return; /* its session ends soon: then it is offered again, to the next process */
	if (kvp_room_no_legs(rooms, why, sizeof(why)) != KVP_ROOM_OK)
		kvp_room_abort_leg(peer, leg, KVP__STATUS__STATUS_STOPPING, why, true);
	else if (room && !kvp_room_terminal(room))
		kvp_send_offer(room, peer, msg);
	else
		kvp_park_offer(rooms, peer, msg);
}

static void on_abort(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__LegAbort *abort)
{
	struct kvp_dleg *dleg = kvp_dest_leg(rooms, peer, abort->leg);
	struct kvp_sleg *sleg = dleg ? NULL : kvp_send_leg(rooms, peer, abort->leg);
	Kvp__Status status = abort->status ? abort->status : KVP__STATUS__STATUS_ABORTED;

	if (dleg) {
		dleg->over = true;
		kvp_room_fail_as(dleg->room, status, abort->retry, "sender %u on %s: %s",
				 dleg->sender, kvp_peer_name(peer), abort->text);
	} else if (sleg) {
		sleg->over = true;
		kvp_room_fail_as(sleg->room, status, abort->retry, "destination %u on %s: %s",
				 sleg->dest, kvp_peer_name(peer), abort->text);
	} else {
		kvp_park_abort(rooms, peer, abort->leg);
	}
}

/* The sender of a renewal or decline, if it is there and the key is right. */
static struct kvp_room *noted_room(struct kvp_rooms *rooms, const struct kvp_peer *peer,
				   uint64_t id, uint32_t sender, const ProtobufCBinaryData *key)
{
	struct kvp_room *room = kvp_room_find(rooms, id, sender, false);

	if (!room || kvp_room_terminal(room)) {
		rooms->stats.late_messages++;
		return NULL;
	}
	if (kvp_room_key_fits(room, key))
		return room;
	kvp_log_limited(&rooms->log_limit, KVP_LOG_WARNING,
			"room 0x%llx sender %u: peer %s gave a wrong key", (unsigned long long)id,
			sender, kvp_peer_name(peer));
	return NULL;
}

static void on_renew(struct kvp_rooms *rooms, const struct kvp_peer *peer,
		     const Kvp__PeerRenew *msg)
{
	struct kvp_room *room = noted_room(rooms, peer, msg->room, msg->sender, &msg->key);
	uint64_t lease_ns;

	if (!room || room->send.ready)
		return;
	rooms->stats.renews++;
	lease_ns = KVP_MIN(msg->lease_ms * UINT64_C(1000000), rooms->config->timers.open_ns);
	room->send.leased = true;
	room->send.lease_ns = kvp_room_now() + lease_ns;
	kvp_room_timer_update(room);
}

static void on_decline(struct kvp_rooms *rooms, const struct kvp_peer *peer,
		       const Kvp__PeerDecline *msg)
{
	struct kvp_room *room = noted_room(rooms, peer, msg->room, msg->sender, &msg->key);

	if (!room)
		return;
	rooms->stats.declines++;
	kvp_room_fail(room, KVP__STATUS__STATUS_DECLINED, "decode on %s declined%s%s",
		      kvp_peer_name(peer), msg->reason[0] ? ": " : "", msg->reason);
}

static void on_go(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg)
{
	struct kvp_sleg *sleg = kvp_send_leg(rooms, peer, leg);

	if (sleg)
		kvp_send_go(sleg);
}

static void on_end(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg)
{
	struct kvp_sleg *sleg = kvp_send_leg(rooms, peer, leg);

	if (sleg)
		kvp_send_ended(sleg);
	else
		kvp_park_end(rooms, peer, leg);
}

static void on_drained(struct kvp_rooms *rooms, const struct kvp_peer *peer, const Kvp__Leg *leg)
{
	struct kvp_dleg *dleg = kvp_dest_leg(rooms, peer, leg);

	if (dleg)
		dleg->drained = true;
}

static void on_message(void *arg, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct kvp_rooms *rooms = arg;

	switch (msg->body_case) {
	case KVP__PEER_MSG__BODY_OFFER:
		on_offer(rooms, peer, msg);
		break;
	case KVP__PEER_MSG__BODY_ACCEPT:
		kvp_dest_accept(rooms, peer, msg);
		break;
	case KVP__PEER_MSG__BODY_GO:
		on_go(rooms, peer, msg->go->leg);
		break;
	case KVP__PEER_MSG__BODY_ABORT:
		on_abort(rooms, peer, msg->abort);
		break;
	case KVP__PEER_MSG__BODY_END:
		on_end(rooms, peer, msg->end->leg);
		break;
	case KVP__PEER_MSG__BODY_DRAINED:
		on_drained(rooms, peer, msg->drained->leg);
		break;
	case KVP__PEER_MSG__BODY_RENEW:
		on_renew(rooms, peer, msg->renew);
		break;
	case KVP__PEER_MSG__BODY_DECLINE:
		on_decline(rooms, peer, msg->decline);
		break;
	default:
		break; /* the decoder lets nothing else through */
	}
}

void kvp_room_peer_events(struct kvp_rooms *rooms)
{
	static const struct kvp_peer_events events = { on_up, on_down, on_message };

	kvp_peers_set_events(rooms->peers, &events, rooms);
}

/* ---- renewals and declines ---------------------------------------------------------------------
 */

static void note_free(struct kvp_rooms *rooms, struct kvp_room_note *note)
{
	DL_DELETE(rooms->notes, note);
	rooms->n_notes--;
	kvp_peer_put(note->peer);
	kvp_peer_free(note->msg);
	free(note);
}

static void notes_send(struct kvp_rooms *rooms, struct kvp_peer *peer)
{
	struct kvp_room_note *note, *tmp;

	DL_FOREACH_SAFE (rooms->notes, note, tmp) {
		if (note->peer != peer || kvp_peer_send(peer, note->msg) == -ENOTCONN)
			continue;
		note_free(rooms, note);
	}
}

uint64_t kvp_notes_expire(struct kvp_rooms *rooms, uint64_t now)
{
	struct kvp_room_note *note, *tmp;
	uint64_t next = UINT64_MAX;

	DL_FOREACH_SAFE (rooms->notes, note, tmp) {
		if (note->deadline_ns > now) {
			next = KVP_MIN(next, note->deadline_ns);
			continue;
		}
		kvp_log_limited(&rooms->log_limit, KVP_LOG_WARNING,
				"a renewal or decline for peer %s is dropped: it %s",
				kvp_peer_name(note->peer), kvp_peer_reason(note->peer));
		note_free(rooms, note);
	}
	return next;
}

void kvp_notes_clear(struct kvp_rooms *rooms)
{
	while (rooms->notes)
		note_free(rooms, rooms->notes);
}

/* Until the session is up, the note waits as long as an offer would. */
static int note_keep(struct kvp_rooms *rooms, struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct kvp_room_note *note = calloc(1, sizeof(*note));

	if (!note)
		return -ENOMEM;
	note->msg = kvp_room_copy_msg(msg);
	if (!note->msg) {
		free(note);
		return -ENOMEM;
	}
	note->peer = peer;
	note->deadline_ns = kvp_room_now() + rooms->config->timers.offer_ns;
	DL_APPEND(rooms->notes, note);
	rooms->n_notes++;
	rooms->notes_at_ns = KVP_MIN(rooms->notes_at_ns, note->deadline_ns);
	kvp_room_timer_arm(rooms);
	return 0;
}

Kvp__Status kvp_room_peer_status(int error)
{
	switch (error) {
	case EMFILE:
		return KVP__STATUS__STATUS_LIMIT;
	case EACCES:
		return KVP__STATUS__STATUS_DENIED;
	case ENOMEM:
		return KVP__STATUS__STATUS_NO_MEMORY;
	case ECANCELED:
		return KVP__STATUS__STATUS_STOPPING;
	default:
		return KVP__STATUS__STATUS_INVALID;
	}
}

static Kvp__Status note_send(struct kvp_rooms *rooms, const char *address, const Kvp__PeerMsg *msg,
			     char *err)
{
	struct kvp_peer *peer;
	int r;

	if (rooms->closed)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_STOPPING, "the daemon stops");
	if (rooms->n_notes >= rooms->config->limits.max_parked_offers) {
		rooms->stats.refused_notes++;
		return kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
				       "renewals and declines waiting for peers: %u, limit "
				       "limits.max_parked_offers %u",
				       rooms->n_notes, rooms->config->limits.max_parked_offers);
	}
	errno = EINVAL;
	peer = kvp_peer_get(rooms->peers, address, err, KVP_ROOM_ERR);
	if (!peer)
		return kvp_room_peer_status(errno);
	r = kvp_peer_is_up(peer) ? kvp_peer_send(peer, msg) : -ENOTCONN;
	if (r == 0) {
		kvp_peer_put(peer);
		return KVP_ROOM_OK;
	}
	r = note_keep(rooms, peer, msg);
	if (r == 0)
		return KVP_ROOM_OK;
	kvp_peer_put(peer);
	return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
}

Kvp__Status kvp_rooms_renew(struct kvp_rooms *rooms, const Kvp__Renew *msg, char *err)
{
	Kvp__PeerRenew renew = KVP__PEER_RENEW__INIT;
	Kvp__PeerMsg out = KVP__PEER_MSG__INIT;

	renew.room = msg->room;
	renew.sender = msg->sender;
	renew.key = msg->key;
	renew.lease_ms = msg->lease_ms;
	out.body_case = KVP__PEER_MSG__BODY_RENEW;
	out.renew = &renew;
	return note_send(rooms, msg->address, &out, err);
}

Kvp__Status kvp_rooms_decline(struct kvp_rooms *rooms, const Kvp__Decline *msg, char *err)
{
	Kvp__PeerDecline decline = KVP__PEER_DECLINE__INIT;
	Kvp__PeerMsg out = KVP__PEER_MSG__INIT;

	decline.room = msg->room;
	decline.sender = msg->sender;
	decline.key = msg->key;
	decline.reason = msg->reason;
	out.body_case = KVP__PEER_MSG__BODY_DECLINE;
	out.decline = &decline;
	return note_send(rooms, msg->address, &out, err);
}

/* ---- a test point: answers to offers are kept --------------------------------------------------
 */

void kvp_rooms_drop_kept(struct kvp_rooms *rooms, const struct kvp_peer *peer)
{
	struct kvp_room_kept **at = &rooms->kept;

	while (*at) {
		struct kvp_room_kept *kept = *at;

		if (peer && kept->peer != peer) {
			at = &kept->next;
			continue;
		}
		*at = kept->next;
		kvp_peer_free(kept->msg);
		free(kept);
	}
}

#ifdef KVP_TEST
void kvp_rooms_hold_offers(struct kvp_rooms *rooms, bool on)
{
	rooms->hold_offers = on;
	while (!on && rooms->kept) {
		struct kvp_room_kept *kept = rooms->kept;

		rooms->kept = kept->next;
		kvp_dest_accept(rooms, kept->peer, kept->msg);
		kvp_peer_free(kept->msg);
		free(kept);
	}
}

uint32_t kvp_rooms_kept_offers(const struct kvp_rooms *rooms)
{
	const struct kvp_room_kept *kept;
	uint32_t n = 0;

	for (kept = rooms->kept; kept; kept = kept->next)
		n++;
	return n;
}
#endif
