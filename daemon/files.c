/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/files.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "daemon/log.h"
#include "proto/limits.h"
#include "proto/util.h"

/* Loop, lane and transport have 25 at rest over tcp; UCX has more while it looks around. */
#define START 64u
#define START_GPUS 64u
#define OF_CLIENT 2u      /* a socket and a pidfd */
#define SPARE_CLIENTS 64u /* that are refused, or look; their answers */
#define OF_PEER 3u        /* a control connection, and data both ways */

static uint64_t to_start(const struct kvp_config *config)
{
	return START + (strcmp(config->gpu.devices, "none") != 0 ? START_GPUS : 0);
}

static uint64_t for_all(const struct kvp_config *config)
{
	uint64_t clients = (uint64_t)config->client.max_sessions + SPARE_CLIENTS;
	uint64_t peers = config->peer.listen[0] ? config->peer.max_sessions : 0;

	return to_start(config) + KVP_LIMIT_FDS + OF_CLIENT * clients + OF_PEER * peers;
}

/* UINT64_MAX: there is none, or the kernel does not say. Nothing here uses select(), which is why
 * the soft limit is low elsewhere. */
static uint64_t raise_limit(uint64_t need)
{
	struct rlimit limit;
	rlim_t soft;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return UINT64_MAX;
	soft = limit.rlim_cur;
	if (soft < need && soft < limit.rlim_max) {
		limit.rlim_cur = KVP_MIN((rlim_t)need, limit.rlim_max);
		if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
			limit.rlim_cur = soft;
	}
	return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

int kvp_files_check(const struct kvp_config *config, char *err, size_t err_bytes)
{
	uint64_t need = for_all(config), limit = raise_limit(need);

	if (limit < to_start(config)) {
		(void)snprintf(err, err_bytes,
			       "RLIMIT_NOFILE is %" PRIu64 " open files, %" PRIu64
			       " are needed to start, %" PRIu64
			       " for all clients and peers: " KVP_FILES_ADVICE,
			       limit, to_start(config), need); /* fits */
		return -EMFILE;
	}
	if (limit < need)
		kvp_log(KVP_LOG_WARNING,
			"RLIMIT_NOFILE is %" PRIu64 " open files, client.max_sessions = %u and "
			"peer.max_sessions = %u may need %" PRIu64 ": " KVP_FILES_ADVICE,
			limit, config->client.max_sessions, config->peer.max_sessions, need);
	return 0;
}
