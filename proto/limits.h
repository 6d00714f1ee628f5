/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the wire allows, whatever a configuration says. The decoders refuse anything beyond, so the
 * code behind them may rely on these. Limits that engines see too have the names of kvpack.h.
 */

#define KVP_LIMIT_PACKET                                                    \
	(128u * 1024u)                 /* bytes of a client protocol packet \
					*/
#define KVP_LIMIT_FRAME (256u * 1024u) /* bytes of a peer protocol frame, without its length */
#define KVP_LIMIT_HELLO_FRAME 4096u    /* of the first one: who has not greeted gets no more */
#define KVP_LIMIT_FDS 240u             /* file descriptors with a packet; Linux takes 253 */
#define KVP_LIMIT_MEMORIES 512u        /* of a pool */
#define KVP_IPC_HANDLE_BYTES 64u
#define KVP_GPU_UUID_BYTES 16u
#define KVP_DMABUF_REASON 63u            /* bytes */
#define KVP_LIMIT_DECODED (2u << 20)     /* bytes that one decoded message may take in memory */
#define KVP_LIMIT_ENTRIES 512u           /* of a pool */
#define KVP_LIMIT_MASK (512u / 8u)       /* bytes of a set of entries */
#define KVP_LIMIT_GROUPS 16u             /* of a pool; group numbers are 0 .. 15 */
#define KVP_LIMIT_SEGMENTS 256u          /* of an expectation, of a chunk */
#define KVP_LIMIT_LIST_PAGES 32000u      /* pages in one Pages packet */
#define KVP_LIMIT_LIST_OFFSET (1u << 30) /* pages in a whole list; configured maxima are lower */
#define KVP_LIMIT_FENCE_WORDS (1u << 20) /* 64-bit words of a fence */
#define KVP_LIMIT_LANES 64u              /* of a daemon */

#define KVP_LIMIT_REASON 159u        /* bytes of a reason */
#define KVP_LIMIT_TEXT 255u          /* bytes of an answer's text */
#define KVP_LIMIT_ADDRESS 255u       /* bytes of a peer address */
#define KVP_LIMIT_LANE_ADDRESS 4096u /* bytes of a data transport address */
#define KVP_LIMIT_TRANSPORT 31u      /* bytes of a transport's name */
#define KVP_LIMIT_WHAT 31u           /* bytes of inspect.what */
#define KVP_INCARNATION_BYTES 16u

#define KVP_LIMIT_ROW_BYTES (1u << 20)
#define KVP_LIMIT_FULL_BYTES (1u << 26)
#define KVP_LIMIT_PAGE (1u << 20)         /* tokens of a page of one rank */
#define KVP_LIMIT_VPAGE (1u << 24)        /* tokens of a virtual page */
#define KVP_LIMIT_MAPPED (1ull << 44)     /* bytes of memfds mapped for the pools of one user */
#define KVP_LIMIT_EXTENT (1ull << 46)     /* bytes of an entry, offsets and strides in it */
#define KVP_LIMIT_POSITION (1ull << 48)   /* positions end here, so that sums never overflow */
#define KVP_LIMIT_SEQ (1u << 30)          /* chunks of an open */
#define KVP_LIMIT_SLOT_BYTES (1ull << 32) /* of a landing slot */

#define KVP_MAX_SENDERS 64u
#define KVP_MAX_DESTS 64u
#define KVP_MAX_META 65536u
#define KVP_MAX_TAG 64u
#define KVP_MAX_LABEL 63u
#define KVP_KEY_BYTES 16u

/* Protocol versions, major << 16 | minor: this source speaks [MIN, MAX] of both protocols. */
#define KVP_PROTO_VERSION(major, minor) ((major) << 16 | (minor))
#define KVP_PROTO_VERSION_MIN KVP_PROTO_VERSION(1u, 0u)
#define KVP_PROTO_VERSION_MAX KVP_PROTO_VERSION(1u, 1u)
#define KVP_PROTO_VERSION_DRAIN KVP_PROTO_VERSION(1u, 1u) /* the first that has drain */

/* Feature bits: what a speaker can do beyond its version. Unknown bits are ignored. */
#define KVP_FEATURE_TEST_HOLD (1ull << 0) /* built with test points */
#define KVP_FEATURE_CUDA (1ull << 1)      /* pools in GPU memory */
#define KVP_FEATURE_DMABUF (1ull << 3)    /* takes dma-bufs of pools in GPU memory */
