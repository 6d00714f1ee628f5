/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Inside of libkvpack. One file for each object: client.c (opening, closing, errors), conn.c
 * (socket, greeting, loss, reconnecting), request.c (ids, answers, blocking), pool.c, fence.c,
 * room.c (the table and what a room knows), expect.c and submit.c (requests about rooms),
 * inspect.c.
 *
 * Names begin with kvpl_, so that a static library does not meet names of the program. All objects
 * belong to their client and its thread. Callbacks may call anything but kvp_client_close(), so
 * no loop here keeps a pointer over one.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/idmap.h"
#include "client/kvpack.h"
#include "proto/msg.h"
#include "proto/util.h"

#define KVPL_OUT_MAX (16u << 20) /* bytes of packets that the socket did not take yet */
#define KVPL_REQUESTS_MAX 65536u /* requests without an answer */
#define KVPL_BACKOFF_MIN_MS 50u
#define KVPL_BACKOFF_MAX_MS 2000u
#define KVPL_TIMEOUT_MS 10000u /* of blocking calls, by default */
#define KVPL_GREETING_MS 5000u /* for a daemon to answer hello after a reconnect */

/* ---- packets ------------------------------------------------------------------------------- */

/*
 * A request without its id: ids are new each time it is sent, and field 1 comes first on the wire,
 * so a packet is the id's few bytes and this.
 */
struct kvpl_packet {
	struct kvpl_packet *next;
	uint64_t id;            /* 0: not given yet */
	int fds[KVP_LIMIT_FDS]; /* owned duplicates, [n_fds] */
	size_t n_fds;
	size_t len;
	uint8_t tail[];
};

struct kvpl_packets { /* a list, owned */
	struct kvpl_packet *head;
	struct kvpl_packet **end;
	size_t bytes;
};

void kvpl_packets_init(struct kvpl_packets *packets);
void kvpl_packets_fini(struct kvpl_packets *packets);
void kvpl_packets_add(struct kvpl_packets *packets, struct kvpl_packet *packet);
/* Copies the tails, without fds and ids. -ENOMEM. */
int kvpl_packets_copy(struct kvpl_packets *to, const struct kvpl_packets *from);
/* Packs msg (its id is left out) with duplicates of fds; validated. -EINVAL, -EMSGSIZE, -ENOMEM. */
int kvpl_packet_make(struct kvp_client *client, Kvp__ClientMsg *msg, const int *fds, size_t n_fds,
		     struct kvpl_packets *packets);

/* ---- requests ------------------------------------------------------------------------------ */

enum kvpl_kind {
	KVPL_PLAIN, /* only done matters */
	KVPL_PAGES, /* object: id of the request that consumes the list */
	KVPL_HELLO,
	KVPL_POOL_REGISTER, /* object: pool */
	KVPL_POOL_PAUSE,
	KVPL_POOL_RESUME,
	KVPL_POOL_UNREGISTER,
	KVPL_FENCE,  /* object: fence; only a replayed one */
	KVPL_ROOM,   /* expect or open; object: room */
	KVPL_SUBMIT, /* object: room */
	KVPL_SETTLE  /* object: grave */
};

/* What a blocking call waits for; lives on its stack. */
struct kvpl_answer {
	bool is_set;
	enum kvp_status status;
	uint32_t recalled_from;
	int fd; /* owned, -1: none came */
};

struct kvpl_request {
	struct kvpl_node node;
	enum kvpl_kind kind;
	uint64_t object;
	uint32_t seq, epoch; /* submit */
	kvp_done_fn *done;   /* NULL: none */
	void *arg;
	struct kvpl_answer *answer; /* borrowed from a blocking call; NULL: none, or it gave up */
	enum kvp_status early;      /* why a page list of it was refused */
	char *early_text;           /* owned */
};

/* What becomes of the answer: copied into the request's record. */
struct kvpl_reply_to {
	enum kvpl_kind kind;
	uint64_t object;
	uint32_t seq, epoch;
	kvp_done_fn *done;
	void *arg;
	struct kvpl_answer *answer;
};

/*
 * Gives ids to the packets and queues them in order; the last one is the request, those before it
 * are its page lists. Takes the packets over, also on failure. *id: of the last. -ENOTCONN,
 * -EAGAIN (too much unsent or unanswered: nothing was sent), -ENOMEM.
 */
int kvpl_request_send(struct kvp_client *client, struct kvpl_packets *packets,
		      const struct kvpl_reply_to *to, uint64_t *id);
/* The same and waits: 0 or what the answer's status means as errno; -ETIMEDOUT. answer may be NULL.
 */
int kvpl_request_call(struct kvp_client *client, struct kvpl_packets *packets,
		      const struct kvpl_reply_to *to, struct kvpl_answer *answer);
/* Either of both: blocks when to->done is NULL. */
int kvpl_request_start(struct kvp_client *client, struct kvpl_packets *packets,
		       const struct kvpl_reply_to *to);
/* An answer came; fd (or -1) is taken over. */
void kvpl_request_answer(struct kvp_client *client, const Kvp__Reply *reply, int fd);
/* Ends all requests with DAEMON_LOST. */
void kvpl_requests_lose(struct kvp_client *client);
/* Frees all without a word. */
void kvpl_requests_fini(struct kvp_client *client);
int kvpl_status_errno(enum kvp_status status);

/* ---- objects ------------------------------------------------------------------------------- */

enum kvpl_pool_state { KVPL_POOL_MAPPED, KVPL_POOL_PAUSED };

struct kvpl_pool {
	struct kvpl_pool *next;
	uint32_t id;
	enum kvpl_pool_state state;
	bool is_known;              /* to the daemon of this connection */
	bool has_mems;              /* registered by mems, not by fds */
	struct kvpl_packets packet; /* the registration, without fds */
	int fds[KVP_LIMIT_FDS];     /* owned duplicates; none while paused */
	size_t n_fds;
};

struct kvp_fence {
	struct kvp_fence *next;
	struct kvp_client *client;
	uint32_t id;
	uint32_t n_words;
	uint64_t *words; /* mapping, owned */
	uint64_t device; /* the device's address of words; 0: not mapped there */
	int fd;          /* owned */
};

struct kvpl_room {
	struct kvpl_node node;
	bool is_dest;
	bool is_answered; /* the daemon took expect or open */
	bool to_repeat;   /* lost with its daemon, not in motion: sent again when that is safe */
	uint64_t grave;   /* serial of the lost daemon that may still touch its pages; 0: none */
	uint32_t next_seq, epoch;       /* sender; an epoch ends with a refused submit */
	uint64_t start;                 /* destination: the expectation's prefix */
	struct kvpl_packets packets;    /* page lists and the request, while it may be repeated */
	struct kvpl_room *next_changed; /* in the client's queue */
	bool is_changed;
	struct kvp_room_state state;
	void *meta; /* owned */
	char reason[KVP_LIMIT_TEXT + 1];
};

/* A daemon that was lost and may live on; then it says itself when the connection has settled. */
struct kvpl_grave {
	struct kvpl_grave *next;
	uint64_t serial;
	uint64_t session; /* the daemon's number of the lost connection; 0: it does not say */
	int pidfd;        /* owned; -1: unknown, then another incarnation is the proof */
	uint8_t incarnation[KVP_INCARNATION_BYTES];
};

enum kvpl_conn { KVPL_DOWN, KVPL_GREETING, KVPL_UP };

struct kvp_client {
	pid_t pid; /* a forked child must not use it */
	char *path;
	char name[KVP_MAX_LABEL + 1];
	uint32_t timeout_ms;
	bool no_reconnect, observer;
	bool is_closing;

	int epfd;  /* what the caller polls: holds the three below and the graves' pidfds */
	int timer; /* back-off, greeting, or 1 ns: there is something to process */
	int sock;  /* -1 when down */
	int pidfd; /* of the connected daemon; -1: unknown */
	bool wants_out;
	bool is_broken; /* a send failed: the next turn ends the connection */
	bool is_kicked;
	int64_t timer_at; /* ms; when the timer has to act, -1: not */
	enum kvpl_conn conn;
	uint64_t session; /* counts connections */
	uint64_t settle;  /* the daemon's number of this connection; 0: it does not say */
	uint32_t backoff_ms;
	uint32_t version;
	uint64_t features; /* of the connected daemon */
	bool was_up;
	bool has_repeats; /* rooms that did not fit the queue when they were to be repeated */
	uint8_t incarnation[KVP_INCARNATION_BYTES];
	char node[KVP_MAX_LABEL + 1];
	char address[KVP_LIMIT_ADDRESS + 1];

	struct kvpl_packets out;
	struct kvpl_idmap requests;
	uint64_t next_request;
	uint64_t hello_id;
	uint32_t next_list, next_pool, next_fence;
	uint64_t next_room;
	struct kvpl_pool *pools;
	struct kvp_fence *fences;
	struct kvpl_idmap rooms;
	struct kvpl_room *changed;
	struct kvpl_room **changed_end;
	struct kvpl_grave *graves;
	struct kvpl_grave *next_to_dig; /* allocated before there is a connection */
	uint64_t next_grave;
	unsigned handled; /* answers and room changes so far */

	enum kvp_status last_status;
	char last_error[KVP_LIMIT_TEXT + 1];
	uint8_t buf[KVP_LIMIT_PACKET + 16];
};

/* Keeps status and text for kvp_last_status() and kvp_last_error(). */
void kvpl_note(struct kvp_client *client, enum kvp_status status, const char *fmt, ...)
	KVP_PRINTF(3, 4);
/* The same as the last thing before returning r. */
#define kvpl_fail(client, r, ...) (kvpl_note((client), __VA_ARGS__), (r))
/* -EINVAL in a forked child, else 0. */
int kvpl_check_process(struct kvp_client *client);

/* conn.c */
int kvpl_conn_init(struct kvp_client *client);
void kvpl_conn_fini(struct kvp_client *client);
int kvpl_conn_start(struct kvp_client *client); /* connects and sends hello: 0 or errno */
int kvpl_conn_wait_up(struct kvp_client *client, int64_t deadline_ms);
void kvpl_conn_flush(struct kvp_client *client);
void kvpl_conn_kick(struct kvp_client *client); /* makes the fd readable */
void kvpl_conn_greeted(struct kvp_client *client, const Kvp__Reply *reply, int pidfd);
/* The daemon has let go of all that a lost connection had: a grave is answered. */
void kvpl_conn_settled(struct kvp_client *client, uint64_t grave, enum kvp_status status);
/* Waits until deadline (-1: for ever) for something to process, then processes. -ETIMEDOUT. */
int kvpl_conn_turn(struct kvp_client *client, int64_t deadline_ms);
int64_t kvpl_now_ms(void);
/* -1 stays -1: no deadline. */
int64_t kvpl_deadline(int timeout_ms);

/* pool.c, fence.c, room.c: what they do when a connection goes or comes */
void kvpl_pool_answered(struct kvp_client *client, const struct kvpl_request *req,
			enum kvp_status status);
void kvpl_pools_lose(struct kvp_client *client);
void kvpl_pools_repeat(struct kvp_client *client);
void kvpl_pools_fini(struct kvp_client *client);
void kvpl_fences_repeat(struct kvp_client *client);
void kvpl_fences_fini(struct kvp_client *client);

struct kvpl_room *kvpl_room_create(struct kvp_client *client, bool is_dest);
struct kvpl_room *kvpl_room_find(const struct kvp_client *client, uint64_t id);
void kvpl_room_destroy(struct kvp_client *client, struct kvpl_room *room);
void kvpl_room_event(struct kvp_client *client, const Kvp__RoomEvent *event);
/* expect, open or submit was answered. text: why not. */
void kvpl_room_answered(struct kvp_client *client, const struct kvpl_request *req,
			enum kvp_status status, const char *text);
void kvpl_room_fail(struct kvp_client *client, struct kvpl_room *room, enum kvp_status status,
		    const char *text, bool retry);
void kvpl_room_release(struct kvp_client *client, struct kvpl_room *room);
void kvpl_rooms_lose(struct kvp_client *client, uint64_t grave);
void kvpl_rooms_buried(struct kvp_client *client, uint64_t grave); /* that daemon is dead */
/* The same daemon answered: its old rooms cannot be told from new ones, so none is repeated. */
void kvpl_rooms_same_daemon(struct kvp_client *client, uint64_t grave);
void kvpl_rooms_repeat(struct kvp_client *client);
void kvpl_rooms_fini(struct kvp_client *client);

/* expect.c: page lists. Adds Pages packets for one side; *list is the id, 0 for no pages. */
int kvpl_pages_make(struct kvp_client *client, const uint32_t *pages, uint32_t n_pages,
		    uint32_t *list, struct kvpl_packets *packets);

/* Copies a request struct that begins with its size: fields that the caller does not know are 0. */
int kvpl_copy_args(void *to, size_t to_size, const void *from, size_t least);
