/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Who gets a connection: policy and limits, decided when it is accepted and told with the answer
 * to hello. Who only looks (hello.observer) has some connections beyond all limits, so that an
 * operator gets in when engines have taken the others. Loop thread only.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/session.h"

/* Connections beyond the limits, for observers; each for client.stall at most. */
#define KVP_SESSION_RESERVE 8u
#define KVP_SESSION_RESERVE_OTHERS 4u  /* of these, of users who are no administrators */
#define KVP_SESSION_RESERVE_PROCESS 2u /* and of one process */

/* Sets policy and rights, or the refusal. */
void kvp_session_judge(struct kvp_session *session);
/* Counts it among those that are served, or that wait to be told why they are not. */
void kvp_session_enter(struct kvp_session *session);
/* An observer greets who is one too many: it has one of the reserve, or the refusal says that these
 * are taken, too. */
void kvp_session_reserve(struct kvp_session *session);
/* It is being told its refusal, which counts from now on. */
void kvp_session_refused(struct kvp_session *session);
/* It is about to be freed. */
void kvp_session_leave(struct kvp_session *session);
