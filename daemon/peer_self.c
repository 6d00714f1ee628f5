/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <utlist.h>

#include "daemon/peer_internal.h"

int kvp_peer_become_self(struct kvp_peer *peer)
{
	struct kvp_peers *peers = peer->peers;
	struct kvp_peer *twin = kvp_peer_new(peers, peer->address, false);

	if (!twin)
		return -ENOMEM;
	peers->n_peers -= peer->self ? 1 : 2; /* in the list, but self peers do not count */
	kvp_peer_conn_close(peer->conn);
	peer->conn = NULL;
	peer->self = twin->self = true;
	peer->twin = twin;
	/* Without random numbers: 0, as of all. */
	(void)uv_random(NULL, NULL, &peer->number, sizeof(peer->number), 0, NULL);
	twin->number = peer->number;
	twin->twin = peer;
	kvp_peer_set_name(peer, peers->config->node.name);
	kvp_peer_set_name(twin, peers->config->node.name);
	memcpy(peer->incarnation, peers->incarnation, KVP_INCARNATION_BYTES);
	memcpy(twin->incarnation, peers->incarnation, KVP_INCARNATION_BYTES);
	(void)uv_timer_stop(&peer->timer); /* cannot fail */
	kvp_peer_up(twin);
	kvp_peer_up(peer);
	return 0;
}

struct kvp_peer *kvp_peer_self_get(struct kvp_peers *peers)
{
	struct kvp_peer *peer = peers->self;

	if (!peer) {
		peer = kvp_peer_new(peers, peers->address, true);
		if (!peer)
			return NULL;
		if (kvp_peer_become_self(peer) < 0) {
			kvp_peer_destroy(peer);
			return NULL;
		}
		peers->self = peer;
	}
	peer->holders++;
	return peer;
}

/* Through encoder and decoder, as over a socket: one path, one set of checks. */
int kvp_peer_self_send(struct kvp_peer *peer, const Kvp__PeerMsg *msg)
{
	struct kvp_peers *peers = peer->peers;
	size_t bytes = kvp_peer_frame_bytes(msg);
	KVP_CLEANUP(kvp_freep) uint8_t *frame = malloc(bytes);
	struct kvp_peer_looped *looped = calloc(1, sizeof(*looped));
	long n = frame ? kvp_peer_encode(msg, frame, bytes) : -ENOMEM;

	if (!looped || n < 0 ||
	    kvp_peer_decode(frame + KVP_FRAME_HEAD, (size_t)n - KVP_FRAME_HEAD, &looped->msg, NULL,
			    0)) {
		free(looped);
		return n < 0 ? (int)n : -EINVAL;
	}
	looped->to = peer->twin;
	*peers->looped_tail = looped;
	peers->looped_tail = &looped->next;
	if (!uv_is_active((uv_handle_t *)&peers->idle))
		(void)uv_idle_start(&peers->idle, kvp_peers_on_idle); /* fails without a callback */
	return (int)n;
}

/* What is sent while these are handled waits for the next iteration. */
void kvp_peers_on_idle(uv_idle_t *idle)
{
	struct kvp_peers *peers = idle->data;
	struct kvp_peer_looped **end = peers->looped_tail;

	while (peers->looped) {
		struct kvp_peer_looped *looped = peers->looped;
		bool last = &looped->next == end;

		peers->looped = looped->next;
		if (!peers->looped)
			peers->looped_tail = &peers->looped;
		looped->to->messages_recv++;
		if (looped->to->state == KVP_PEER_UP && peers->events.message)
			peers->events.message(peers->events_arg, looped->to, looped->msg);
		kvp_peer_free(looped->msg);
		free(looped);
		if (last)
			break;
	}
	if (!peers->looped)
		(void)uv_idle_stop(&peers->idle); /* cannot fail */
}

void kvp_peers_drop_looped(struct kvp_peers *peers, const struct kvp_peer *peer)
{
	struct kvp_peer_looped **at = &peers->looped;

	while (*at) {
		struct kvp_peer_looped *looped = *at;

		if (looped->to != peer) {
			at = &looped->next;
			continue;
		}
		*at = looped->next;
		kvp_peer_free(looped->msg);
		free(looped);
	}
	peers->looped_tail = at;
}
