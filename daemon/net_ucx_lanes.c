/* SPDX-License-Identifier: Apache-2.0 */

/* What really carries an endpoint. UCX says that only in the text that it prints for people. */

#include "daemon/net_ucx.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"

/* Reliable connections, and datagrams to make them; between a device and ours only copies. */
static const char *const allowed[] = { "rc_", "dc_", "ud_", "cuda_copy", "gdr_copy" };

static bool is_allowed(const char *transport)
{
	for (size_t i = 0; i < sizeof(allowed) / sizeof(allowed[0]); i++) {
		if (strncmp(transport, allowed[i], strlen(allowed[i])) == 0)
			return true;
	}
	return false;
}

/* "#   lane[0]:  2:rc_verbs/rxe0:1.0 md[1] ..." */
int kvp_ucx_lanes_read(const char *text, char *bad, size_t bad_bytes)
{
	const char *line = text;
	unsigned n = 0;

	(void)snprintf(bad, bad_bytes, "no lane");
	while ((line = strstr(line, "lane["))) {
		char transport[32] = "";

		if (sscanf(line, "lane[%*u]: %*u:%31[^/ \t\n]", transport) == 1 &&
		    !is_allowed(transport)) {
			(void)snprintf(bad, bad_bytes, "%s", transport); /* cut at worst */
			return -EPROTONOSUPPORT;
		}
		n += transport[0] != '\0';
		line++;
	}
	return n > 0 ? 0 : -EPROTONOSUPPORT;
}

int kvp_ucx_lanes_check(struct kvp_net_ep *ep)
{
	static struct kvp_log_limit limit = KVP_LOG_LIMIT(5, 10);
	char *text = NULL, bad[32];
	size_t bytes = 0;
	FILE *out = open_memstream(&text, &bytes);
	int r = -ENOMEM;

	if (!out)
		return r;
	ucp_ep_print_info(ep->ucp, out);
	if (fclose(out) == 0)
		r = kvp_ucx_lanes_read(text, bad, sizeof(bad));
	if (r == -EPROTONOSUPPORT)
		kvp_log_limited(&limit, KVP_LOG_ERR,
				"ucx: an endpoint over %s is refused, only RDMA is wanted", bad);
	free(text);
	return r;
}
