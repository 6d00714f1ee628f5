/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_events.h"

#include <stdlib.h>
#include <string.h>

void events_no_data(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes)
{
	(void)arg;
	(void)hdr;
	(void)hdr_bytes;
	(void)data;
	(void)bytes;
}

void events_no_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place)
{
	(void)arg;
	(void)hdr;
	(void)hdr_bytes;
	(void)place;
}

void events_no_failed(void *arg, struct kvp_net_ep *ep, int status)
{
	(void)arg;
	(void)ep;
	(void)status;
}

void events_no_closed(void *arg, void *ep_arg)
{
	(void)arg;
	(void)ep_arg;
}

void events_fill(unsigned char *to, size_t bytes, uint64_t seq)
{
	uint64_t x = seq * UINT64_C(0x9e3779b97f4a7c15) + 1;

	for (size_t i = 0; i < bytes; i++) {
		if (i % 8 == 0)
			x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		to[i] = (unsigned char)(x >> (8 * (i % 8)));
	}
}

bool events_match(const unsigned char *at, size_t bytes, uint64_t seq)
{
	unsigned char *want = malloc(bytes);
	bool same;

	if (!want)
		return false;
	events_fill(want, bytes, seq);
	same = memcmp(want, at, bytes) == 0;
	free(want);
	return same;
}
