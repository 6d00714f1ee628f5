/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net_ucx.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#define FRAME_MAGIC 0x4b565541u /* "AUVK" in memory */
#define FRAME_VERSION 1u

/* Little-endian in memory and on the wire; the hash covers the inner address. */
struct frame {
	uint32_t magic;
	uint16_t version;
	uint16_t inner_bytes;
	uint64_t hash;
};
_Static_assert(sizeof(struct frame) == 16, "the frame has no padding");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the frame is written as it lies");

int kvp_ucx_address_frame(void *out, size_t room, const void *inner, size_t inner_bytes)
{
	struct frame frame = {
		.magic = FRAME_MAGIC,
		.version = FRAME_VERSION,
		.inner_bytes = (uint16_t)inner_bytes,
		.hash = XXH3_64bits(inner, inner_bytes),
	};

	if (inner_bytes == 0 || inner_bytes > UINT16_MAX || room < sizeof(frame) + inner_bytes)
		return -ENOBUFS;

	memcpy(out, &frame, sizeof(frame));
	memcpy((unsigned char *)out + sizeof(frame), inner, inner_bytes);
	return (int)(sizeof(frame) + inner_bytes);
}

int kvp_ucx_address_unframe(const void *framed, size_t framed_bytes, const void **inner)
{
	const unsigned char *body;
	struct frame frame;

	if (!framed || framed_bytes <= sizeof(frame) || framed_bytes > KVP_NET_ADDR_MAX)
		return -EPROTO;

	memcpy(&frame, framed, sizeof(frame));
	if (frame.magic != FRAME_MAGIC || frame.version != FRAME_VERSION)
		return -EPROTO;
	if (frame.inner_bytes != framed_bytes - sizeof(frame))
		return -EPROTO;

	body = (const unsigned char *)framed + sizeof(frame);
	if (frame.hash != XXH3_64bits(body, frame.inner_bytes))
		return -EPROTO;

	*inner = body;
	return frame.inner_bytes;
}
