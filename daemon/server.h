/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The clients' socket: opens it (or takes it from systemd), accepts, applies the policy, keeps the
 * sessions. Loop thread only.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/core.h"
#include "daemon/session.h"
#include "daemon/turns.h"
#include "proto/limits.h"

/* Connections that are kept just to be told why they are refused, or to say that they only look: as
 * many as are accepted in two turns of the loop, so that who has greeted is heard. */
#define KVP_SERVER_REFUSED_MAX 32u
#define KVP_SERVER_REFUSED_PROCESS 8u /* of these, of one process */

/* Work of the loop that takes long: it is done a little a turn, one after the other. */
struct kvp_server_job {
	/* Does a little of it, within some tens of microseconds. False: that was all, it is freed.
	 */
	bool (*step)(struct kvp_server_job *job);
	/* It will not come to its end: frees it. */
	void (*drop)(struct kvp_server_job *job);
	struct kvp_server_job *prev, *next;
};

struct kvp_server {
	struct kvp_core *core; /* borrowed */
	int fd;                /* owned; -1: closed */
	bool activated;        /* systemd's socket: its file is not ours to remove */
	uint64_t file_dev, file_ino;
	char path[KVP_CONFIG_STR_MAX];
	uv_poll_t listener;
	uv_timer_t pause;            /* runs while accepting rests for want of descriptors */
	uv_prepare_t flush;          /* writes to touched sessions before the loop sleeps */
	uv_idle_t work;              /* runs while there are jobs, or more to write than a turn's */
	uv_timer_t rest;             /* runs while sessions rest */
	uint32_t n_handles;          /* not yet closed */
	struct kvp_server_job *jobs; /* owned (utlist) */
	struct kvp_session *sessions;  /* utlist */
	struct kvp_session *touched;   /* have something to write; chained by touched_next */
	struct kvp_session *flushing;  /* those of this turn, while it goes through them */
	struct kvp_process *processes; /* owned (utlist) */
	uint64_t turn;                 /* of the loop */
	struct kvp_settle *settles;    /* owned (utlist) */
	uint32_t n_sessions;           /* admitted ones */
	uint32_t n_refused;            /* being told why */
	uint32_t n_reserved, n_reserved_others; /* of the reserve; of those, not administrators' */
	uint64_t last_id;
	/* gauges and counters */
	uint64_t accepted, refused_limit, refused_policy, accept_pauses, bad_packets, stalls,
		requests, events, refused_lists, refused_pages, rests, turns_cut, event_turns_cut,
		refused_process, refused_user, refused_reserve;
	uint32_t turn_packets, turn_events; /* the most that one session had in a turn */
	struct kvp_turns client_turns, accept_turns, job_turns;
	uint8_t buffer[KVP_LIMIT_PACKET]; /* of the packet that is being read */
};

/* Opens the socket and starts to accept. 0; negative errno, `err` says why. */
int kvp_server_create(struct kvp_server **out, struct kvp_core *core, char *err, size_t err_bytes);
/* Accepts no more; the socket's file goes. */
void kvp_server_close(struct kvp_server *server);
/* Ends all sessions. */
void kvp_server_end_sessions(struct kvp_server *server, const char *why);
/* No session and no handle is left (after kvp_server_close and loop iterations). */
bool kvp_server_idle(const struct kvp_server *server);
void kvp_server_destroy(struct kvp_server *server);

/* The process's sessions are not read for a moment. */
void kvp_server_rest(struct kvp_server *server, struct kvp_process *process);
/* Takes it over. */
void kvp_server_defer(struct kvp_server *server, struct kvp_server_job *job);
/* The session has something to write. */
void kvp_server_touch(struct kvp_server *server, struct kvp_session *session);
/* The session's handles have closed: it is about to be freed. */
void kvp_server_forget(struct kvp_server *server, struct kvp_session *session);
/* NULL: gone. */
struct kvp_session *kvp_server_session(const struct kvp_server *server, uint64_t id);
/* Admitted sessions of a user, and live rooms and pools of all of them. */
uint32_t kvp_server_sessions_of(const struct kvp_server *server, uint32_t uid);
uint32_t kvp_server_rooms_of(const struct kvp_server *server, uint32_t uid);
uint32_t kvp_server_pools_of(const struct kvp_server *server, uint32_t uid);
