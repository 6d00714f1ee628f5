/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Events of a transport (daemon/net.h) that do not concern whoever plays a lane by hand. */

#include "daemon/net.h"

void events_no_data(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes);
void events_no_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place);
void events_no_failed(void *arg, struct kvp_net_ep *ep, int status);
void events_no_closed(void *arg, void *ep_arg);

/* Payload that a number gives, to be sent and looked at on arrival. */
void events_fill(unsigned char *to, size_t bytes, uint64_t seq);
bool events_match(const unsigned char *at, size_t bytes, uint64_t seq);
