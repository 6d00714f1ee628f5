/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a session reads: packets become requests, requests become calls and one reply each. */

#include <stddef.h>
#include <stdint.h>

#include "daemon/session.h"

/* Handles one packet. The fds that came with it are this function's to close. */
void kvp_session_packet(struct kvp_session *session, const uint8_t *buf, size_t n, const int *fds,
			size_t n_fds);
/* Answers a packet that could not be read, if its first bytes tell the request's id. */
void kvp_session_refuse_packet(struct kvp_session *session, const uint8_t *buf, size_t n,
			       const char *text);
