/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "client/lib.h"

int kvp_drain(struct kvp_client *client, uint32_t on, const char *reason)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Drain body = KVP__DRAIN__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_packets packets;
	int r = kvpl_check_process(client);

	if (r == 0)
		r = kvpl_conn_wait_up(client, kvpl_now_ms() + client->timeout_ms);
	if (r < 0)
		return r;
	if (client->version < KVP_PROTO_VERSION_DRAIN)
		return kvpl_fail(client, -EREMOTEIO, KVP_STATUS_UNSUPPORTED,
				 "drain: the daemon speaks protocol %u.%u, from 1.1 on it can",
				 client->version >> 16, client->version & 0xffff);
	body.on = on != 0;
	body.reason = (char *)(reason ?: "");
	msg.body_case = KVP__CLIENT_MSG__BODY_DRAIN;
	msg.drain = &body;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, &msg, NULL, 0, &packets);
	return r < 0 ? r : kvpl_request_call(client, &packets, &to, NULL);
}
