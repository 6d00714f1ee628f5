/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The client protocol: encode, decode, validate, in one place for daemon, library and tests. No
 * state, any thread. What a decoder accepts satisfies every rule that can be tested without the
 * daemon's state: limits.h, geometry, uniqueness, order of bounds. Texts that travel as strings
 * have no control characters; display names are UTF-8.
 */

#include <stddef.h>
#include <stdint.h>

#include "proto/kvpack.pb-c.h"
#include "proto/limits.h"
#include "proto/packet.h"
#include "proto/status.h"

/*
 * Decodes a request. 0: *out is the caller's, to be freed by kvp_msg_free_client(). Else an enum
 * kvp_status, err [errlen] (may be NULL) says in words why, and *out is untouched.
 */
int kvp_msg_decode_client(const void *buf, size_t len, Kvp__ClientMsg **out, char *err,
			  size_t errlen);
/* The same for what a daemon sends. */
int kvp_msg_decode_daemon(const void *buf, size_t len, Kvp__DaemonMsg **out, char *err,
			  size_t errlen);

/* The request's id even if the rest is refused, so that there is one to answer; 0: unknown. */
uint64_t kvp_msg_peek_id(const void *buf, size_t len);

/* Tests how many file descriptors came with a decoded request against what it names. */
int kvp_msg_check_fds(const Kvp__ClientMsg *msg, size_t n_fds, char *err, size_t errlen);

/* Validates a message that was made here, not decoded. For the library's own arguments. */
int kvp_msg_check_client(const Kvp__ClientMsg *msg, char *err, size_t errlen);

void kvp_msg_free_client(Kvp__ClientMsg *msg);
void kvp_msg_free_daemon(Kvp__DaemonMsg *msg);
static inline void kvp_msg_free_clientp(Kvp__ClientMsg **msg)
{
	kvp_msg_free_client(*msg);
}
static inline void kvp_msg_free_daemonp(Kvp__DaemonMsg **msg)
{
	kvp_msg_free_daemon(*msg);
}

/* Bytes written to buf, or -EMSGSIZE when more than cap or than a packet may have. */
long kvp_msg_encode_client(const Kvp__ClientMsg *msg, void *buf, size_t cap);
long kvp_msg_encode_daemon(const Kvp__DaemonMsg *msg, void *buf, size_t cap);

/*
 * The highest version in both ranges. 0 and *version, or KVP_STATUS_VERSION and a text with both
 * ranges: ours first.
 */
int kvp_version_choose(const uint32_t ours[2], const uint32_t theirs[2], uint32_t *version,
		       char *err, size_t errlen);

/* Makes a text fit for the wire in place: control characters become '?', a cut last character of
 * UTF-8 goes. */
void kvp_text_clean(char *text);
