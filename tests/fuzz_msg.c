/* SPDX-License-Identifier: Apache-2.0 */
/* Client protocol, both directions: what a decoder accepts encodes and keeps its id. */

#include <assert.h>

#include "proto/msg.h"
#include "proto/util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t buf[KVP_LIMIT_PACKET];

static void client_again(const Kvp__ClientMsg *msg)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *again = NULL;
	long n = kvp_msg_encode_client(msg, buf, sizeof(buf));

	if (n < 0)
		return; /* a denser encoding of the same came in */
	/* Unknown fields are kept and may have tags that no encoder makes: those alone can fail. */
	if (kvp_msg_decode_client(buf, (size_t)n, &again, NULL, 0) == 0)
		assert(again->id == msg->id && kvp_msg_peek_id(buf, (size_t)n) == msg->id);
	(void)kvp_msg_check_fds(msg, (size_t)n % 17, NULL, 0); /* any answer, no crash */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *client = NULL;
	KVP_CLEANUP(kvp_msg_free_daemonp) Kvp__DaemonMsg *daemon = NULL;
	char err[64]; /* shorter than most texts */

	if (kvp_msg_decode_client(data, size, &client, err, sizeof(err)) == 0)
		client_again(client);
	if (kvp_msg_decode_daemon(data, size, &daemon, err, sizeof(err)) == 0)
		(void)kvp_msg_encode_daemon(daemon, buf, sizeof(buf)); /* may not fit */
	(void)kvp_msg_peek_id(data, size);
	return 0;
}
