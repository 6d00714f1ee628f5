/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_peers.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/peer_msg.h"
#include "proto/util.h"

#define BEAT_NS UINT64_C(500000000)

struct peer {
	int listener, fd; /* -1: none */
	bool up;
	char address[PEERS_ADDRESS];
	struct kvp_frames frames;
	Kvp__Leg *legs; /* offered */
	uint32_t n_legs, cap_legs;
	uint64_t beats;
};

struct peers {
	uint32_t n;
	pthread_t thread;
	atomic_bool stop, abort_all;
	_Atomic uint32_t up;
	_Atomic uint64_t offers, words;
	struct peer peers[PEERS_MAX];
	struct pollfd pfds[2 * PEERS_MAX];
	uint8_t buf[65536];
};

static void must(bool ok, const char *what)
{
	if (ok)
		return;
	(void)fprintf(stderr, "support_peers: %s: %s\n", what, strerror(errno));
	abort();
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

static void peer_close(struct peers *peers, struct peer *peer)
{
	if (peer->up)
		peers->up--;
	peer->up = false;
	if (peer->fd >= 0)
		(void)close(peer->fd);
	peer->fd = -1;
	peer->n_legs = 0;
	kvp_frames_fini(&peer->frames);
	peer->frames = (struct kvp_frames){ 0 };
}

/* Blocks while the daemon does not read: it has to. */
static void peer_send(struct peers *peers, struct peer *peer, const Kvp__PeerMsg *msg)
{
	uint8_t buf[1024];
	long n = kvp_peer_encode(msg, buf, sizeof(buf));

	must(n > 0, "a message does not fit");
	if (peer->fd >= 0 && send(peer->fd, buf, (size_t)n, MSG_NOSIGNAL) != n)
		peer_close(peers, peer);
}

static void hello(struct peers *peers, struct peer *peer)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__PeerHello body = KVP__PEER_HELLO__INIT;
	uint8_t incarnation[KVP_INCARNATION_BYTES] = { 1 };
	uint32_t number = (uint32_t)(peer - peers->peers);

	memcpy(incarnation + 1, &number, sizeof(number));
	body.version_min = body.version_max = body.version = KVP_PROTO_VERSION_MAX;
	body.incarnation.data = incarnation;
	body.incarnation.len = sizeof(incarnation);
	body.node = (char *)"light";
	body.address = peer->address;
	msg.body_case = KVP__PEER_MSG__BODY_HELLO;
	msg.hello = &body;
	peer_send(peers, peer, &msg);
}

static void beat(struct peers *peers, struct peer *peer)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Heartbeat body = KVP__HEARTBEAT__INIT;

	body.count = ++peer->beats;
	msg.body_case = KVP__PEER_MSG__BODY_HEARTBEAT;
	msg.heartbeat = &body;
	peer_send(peers, peer, &msg);
}

static void keep_leg(struct peer *peer, const Kvp__Leg *leg)
{
	if (peer->n_legs == peer->cap_legs) {
		peer->cap_legs = KVP_MAX(2 * peer->cap_legs, 64u);
		peer->legs = realloc(peer->legs, peer->cap_legs * sizeof(*peer->legs));
		must(peer->legs, "no memory");
	}
	peer->legs[peer->n_legs++] = *leg;
}

static void drop_leg(struct peer *peer, const Kvp__Leg *leg)
{
	for (uint32_t i = 0; i < peer->n_legs; i++) {
		if (peer->legs[i].generation != leg->generation)
			continue;
		peer->legs[i] = peer->legs[--peer->n_legs];
		return;
	}
}

static void take(struct peers *peers, struct peer *peer, const Kvp__PeerMsg *msg)
{
	switch (msg->body_case) {
	case KVP__PEER_MSG__BODY_HELLO:
		hello(peers, peer);
		peer->up = true;
		peers->up++;
		return;
	case KVP__PEER_MSG__BODY_OFFER:
		keep_leg(peer, msg->offer->leg);
		peers->offers++;
		return;
	case KVP__PEER_MSG__BODY_ABORT:
		drop_leg(peer, msg->abort->leg);
		return;
	case KVP__PEER_MSG__BODY_RENEW:
	case KVP__PEER_MSG__BODY_DECLINE:
		peers->words++;
		return;
	default:
		return;
	}
}

static void peer_read(struct peers *peers, struct peer *peer)
{
	ssize_t n = recv(peer->fd, peers->buf, sizeof(peers->buf), MSG_DONTWAIT);
	Kvp__PeerMsg *msg;
	char err[256];

	if (n < 0 && errno == EAGAIN)
		return;
	if (n <= 0) {
		peer_close(peers, peer);
		return;
	}
	must(kvp_frames_push(&peer->frames, peers->buf, (size_t)n) == 0, "no memory");
	while (peer->fd >= 0 && kvp_frames_next(&peer->frames, &msg, err, sizeof(err)) == 1) {
		take(peers, peer, msg);
		kvp_peer_free(msg);
	}
}

static void abort_legs(struct peers *peers, struct peer *peer)
{
	for (uint32_t i = 0; i < peer->n_legs; i++) {
		Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
		Kvp__LegAbort body = KVP__LEG_ABORT__INIT;

		body.leg = &peer->legs[i];
		body.status = KVP__STATUS__STATUS_ABORTED;
		body.text = (char *)"the light peer gives up";
		msg.body_case = KVP__PEER_MSG__BODY_ABORT;
		msg.abort = &body;
		peer_send(peers, peer, &msg);
	}
	peer->n_legs = 0;
}

static void poll_all(struct peers *peers)
{
	for (uint32_t i = 0; i < peers->n; i++) {
		struct peer *peer = &peers->peers[i];

		peers->pfds[2 * i] = (struct pollfd){ .fd = peer->fd < 0 ? peer->listener : -1,
						      .events = POLLIN };
		peers->pfds[2 * i + 1] = (struct pollfd){ .fd = peer->fd, .events = POLLIN };
	}
	(void)poll(peers->pfds, 2 * peers->n, 10); /* looks at the flags again */
	for (uint32_t i = 0; i < peers->n; i++) {
		struct peer *peer = &peers->peers[i];

		if (peers->pfds[2 * i].revents)
			peer->fd = accept4(peer->listener, NULL, NULL, SOCK_CLOEXEC);
		else if (peers->pfds[2 * i + 1].revents)
			peer_read(peers, peer);
	}
}

static void *run(void *arg)
{
	struct peers *peers = arg;
	uint64_t beat_at = 0;

	while (!peers->stop) {
		bool beats = now_ns() >= beat_at,
		     aborts = atomic_exchange(&peers->abort_all, false);

		poll_all(peers);
		for (uint32_t i = 0; i < peers->n; i++) {
			if (peers->peers[i].up && beats)
				beat(peers, &peers->peers[i]);
			if (aborts)
				abort_legs(peers, &peers->peers[i]);
		}
		if (beats)
			beat_at = now_ns() + BEAT_NS;
	}
	return NULL;
}

static void peer_listen(struct peer *peer)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	socklen_t len = sizeof(addr);

	peer->fd = -1;
	peer->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	must(peer->listener >= 0 &&
		     bind(peer->listener, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
		     listen(peer->listener, 8) == 0 &&
		     getsockname(peer->listener, (struct sockaddr *)&addr, &len) == 0,
	     "listen");
	(void)snprintf(peer->address, sizeof(peer->address), "127.0.0.1:%u", ntohs(addr.sin_port));
}

struct peers *peers_start(uint32_t n)
{
	struct peers *peers = calloc(1, sizeof(*peers));

	must(peers && n <= PEERS_MAX, "peers");
	peers->n = n;
	for (uint32_t i = 0; i < n; i++)
		peer_listen(&peers->peers[i]);
	must(pthread_create(&peers->thread, NULL, run, peers) == 0, "pthread_create");
	return peers;
}

const char *peers_address(const struct peers *peers, uint32_t i)
{
	return peers->peers[i].address;
}

uint32_t peers_up(struct peers *peers)
{
	return peers->up;
}

uint64_t peers_offers(struct peers *peers)
{
	return peers->offers;
}

uint64_t peers_words(struct peers *peers)
{
	return peers->words;
}

void peers_abort_all(struct peers *peers)
{
	peers->abort_all = true;
}

void peers_stop(struct peers *peers)
{
	peers->stop = true;
	(void)pthread_join(peers->thread, NULL);
	for (uint32_t i = 0; i < peers->n; i++) {
		peer_close(peers, &peers->peers[i]);
		(void)close(peers->peers[i].listener);
		free(peers->peers[i].legs);
	}
	free(peers);
}
