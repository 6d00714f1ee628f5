/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The peer protocol: frames of a 32-bit little-endian length and one PeerMsg. Encode, decode and
 * validate as in msg.h. A leg that a message needs is there (never NULL) in what was accepted.
 */

#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"
#include "proto/peer.pb-c.h"
#include "proto/status.h"

#define KVP_FRAME_HEAD 4u /* bytes of a frame's length */

/* Decodes one message without its length. 0 or an enum kvp_status, as kvp_msg_decode_client(). */
int kvp_peer_decode(const void *buf, size_t len, Kvp__PeerMsg **out, char *err, size_t errlen);
void kvp_peer_free(Kvp__PeerMsg *msg);
static inline void kvp_peer_freep(Kvp__PeerMsg **msg)
{
	kvp_peer_free(*msg);
}

/* Bytes of the message's frame, length included. */
size_t kvp_peer_frame_bytes(const Kvp__PeerMsg *msg);
/* Writes the frame: its bytes, or -EMSGSIZE when more than cap or than a frame may have. */
long kvp_peer_encode(const Kvp__PeerMsg *msg, void *buf, size_t cap);

/* Cuts a byte stream into messages. Zeroed is empty. One thread at a time. */
struct kvp_frames {
	uint8_t *buf; /* owned, cap bytes; the bytes in [pos, len) are not pulled yet */
	size_t cap;
	size_t pos;
	size_t len;
	uint32_t max; /* bytes that a frame may have; 0: KVP_LIMIT_FRAME */
};

/*
 * Takes bytes of the stream. It holds at most a frame and n bytes when every push is followed by
 * pulling until there is nothing. -ENOMEM.
 */
int kvp_frames_push(struct kvp_frames *frames, const void *data, size_t n);
/*
 * 1: *out is the next message, the caller's (kvp_peer_free). 0: more bytes are needed. -EPROTO: the
 * stream is broken for good, err says why: an impossible length as soon as it is seen, or a message
 * that the validator refused.
 */
int kvp_frames_next(struct kvp_frames *frames, Kvp__PeerMsg **out, char *err, size_t errlen);
void kvp_frames_fini(struct kvp_frames *frames);
