/* SPDX-License-Identifier: Apache-2.0 */
/* Peer protocol: a stream in two pushes, cut where the first byte says. */

#include <assert.h>

#include "proto/peer_msg.h"
#include "proto/util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int pull(struct kvp_frames *frames)
{
	char err[64];
	int r;

	do {
		KVP_CLEANUP(kvp_peer_freep) Kvp__PeerMsg *msg = NULL;

		r = kvp_frames_next(frames, &msg, err, sizeof(err));
		assert((r == 1) == (msg != NULL));
	} while (r == 1);
	return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kvp_frames frames = { 0 };
	size_t cut;

	if (size == 0)
		return 0;
	cut = 1 + data[0] * (size - 1) / 256;
	if (kvp_frames_push(&frames, data + 1, cut - 1) == 0 && pull(&frames) == 0 &&
	    kvp_frames_push(&frames, data + cut, size - cut) == 0)
		(void)pull(&frames); /* a broken stream is fine */
	kvp_frames_fini(&frames);
	return 0;
}
