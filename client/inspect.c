/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "client/lib.h"

#define JSON_MAX (1ll << 30)

static int read_all(int fd, char **out)
{
	KVP_CLEANUP(kvp_freep) char *text = NULL;
	struct stat st;
	size_t n = 0, size;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size < 0 || st.st_size > JSON_MAX)
		return -EMSGSIZE;
	size = (size_t)st.st_size;
	text = malloc(size + 1);
	if (!text)
		return -ENOMEM;
	while (n < size) {
		ssize_t got = pread(fd, text + n, size - n, (off_t)n);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			break;
		n += (size_t)got;
	}
	text[n] = '\0';
	*out = KVP_TAKE(text);
	return 0;
}

int kvp_inspect(struct kvp_client *client, const char *what, const char *arg, char **json)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Inspect body = KVP__INSPECT__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_answer answer = { .fd = -1 };
	struct kvpl_packets packets;
	int r = kvpl_check_process(client);

	if (r < 0)
		return r;
	body.what = (char *)(what ?: "");
	body.all = arg && strcmp(arg, "all") == 0; /* no room's number, and labels have a prefix */
	if (arg && !body.all)
		body.arg = (char *)arg;
	msg.body_case = KVP__CLIENT_MSG__BODY_INSPECT;
	msg.inspect = &body;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, &msg, NULL, 0, &packets);
	if (r == 0)
		r = kvpl_request_call(client, &packets, &to, &answer);
	if (r == 0 && answer.fd < 0)
		r = kvpl_fail(client, -EPROTO, KVP_STATUS_PROTOCOL,
			      "the answer to inspect %s carries no file", what);
	else if (r == 0) {
		r = read_all(answer.fd, json);
		if (r < 0)
			(void)kvpl_fail(client, r, KVP_STATUS_SYSTEM,
					"cannot read the answer to inspect %s", what);
	}
	if (answer.fd >= 0)
		(void)close(answer.fd); /* only read */
	return r;
}
