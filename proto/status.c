/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/status.h"

#include <assert.h>
#include <string.h>

#include "proto/kvpack.pb-c.h"
#include "proto/util.h"

/* X(suffix, name): one line for each status; the numbers are those of kvpack.h.
 */
#define KVP_STATUSES(X)                   \
	X(INVALID, "invalid")             \
	X(VERSION, "version")             \
	X(LIMIT, "limit")                 \
	X(NOT_FOUND, "not_found")         \
	X(EXISTS, "exists")               \
	X(PAGE_HELD, "page_held")         \
	X(DENIED, "denied")               \
	X(GEOMETRY, "geometry")           \
	X(ALIGNMENT, "alignment")         \
	X(SRC_RANGE, "src_range")         \
	X(DST_RANGE, "dst_range")         \
	X(MISMATCH, "mismatch")           \
	X(ORDER, "order")                 \
	X(COVERAGE, "coverage")           \
	X(TIMEOUT, "timeout")             \
	X(ABORTED, "aborted")             \
	X(PEER_LOST, "peer_lost")         \
	X(CLIENT_LOST, "client_lost")     \
	X(DAEMON_LOST, "daemon_lost")     \
	X(DECLINED, "declined")           \
	X(LEASE, "lease")                 \
	X(FENCE_TIMEOUT, "fence_timeout") \
	X(LANE_STUCK, "lane_stuck")       \
	X(STOPPING, "stopping")           \
	X(NO_MEMORY, "no_memory")         \
	X(SYSTEM, "system")               \
	X(UNREACHABLE, "unreachable")     \
	X(PROTOCOL, "protocol")           \
	X(POOL_GONE, "pool_gone")         \
	X(TRANSPORT, "transport")         \
	X(UNSUPPORTED, "unsupported")     \
	X(CORRUPT, "corrupt")

static_assert((int)KVP_OK == (int)KVP__STATUS__STATUS_OK, "status");
#define KVP_SAME(s, n) \
	static_assert((int)KVP_STATUS_##s == (int)KVP__STATUS__STATUS_##s, "status " n);
KVP_STATUSES(KVP_SAME)

#define KVP_PHASES(X)           \
	X(NONE, "none")         \
	X(WAITING, "waiting")   \
	X(READY, "ready")       \
	X(SENDING, "sending")   \
	X(CLOSING, "closing")   \
	X(DONE, "done")         \
	X(FAILED, "failed")     \
	X(GONE, "gone")         \
	X(OFFERING, "offering") \
	X(ACCEPTED, "accepted") \
	X(LANDING, "landing")   \
	X(COMPLETE, "complete") \
	X(RELEASED, "released")

#define KVP_SAME_PHASE(s, n) \
	static_assert((int)KVP_ROOM_##s == (int)KVP__ROOM_STATE__ROOM_##s, "phase " n);
KVP_PHASES(KVP_SAME_PHASE)

static_assert((int)KVP_SHARDED == (int)KVP__ENTRY_CLASS__CLASS_SHARDED, "class");
static_assert((int)KVP_REPLICATED == (int)KVP__ENTRY_CLASS__CLASS_REPLICATED, "class");
static_assert((int)KVP_BLOB == (int)KVP__ENTRY_CLASS__CLASS_BLOB, "class");
static_assert((int)KVP_ROLE_DATA == (int)KVP__SENDER_ROLE__ROLE_DATA, "role");
static_assert((int)KVP_ROLE_NONE == (int)KVP__SENDER_ROLE__ROLE_NONE, "role");

#define KVP_STATUS_NAME(s, n) [KVP_STATUS_##s] = n,
static const char *const status_names[] = { [KVP_OK] = "ok", KVP_STATUSES(KVP_STATUS_NAME) };
#define KVP_PHASE_NAME(s, n) [KVP_ROOM_##s] = n,
static const char *const phase_names[] = { KVP_PHASES(KVP_PHASE_NAME) };

const char *kvp_status_name(enum kvp_status status)
{
	size_t i = (size_t)status;

	return i < KVP_ARRAY_SIZE(status_names) && status_names[i] ? status_names[i] : "unknown";
}

const char *kvp_room_phase_name(enum kvp_room_phase phase)
{
	size_t i = (size_t)phase;

	return i < KVP_ARRAY_SIZE(phase_names) && phase_names[i] ? phase_names[i] : "unknown";
}

int kvp_status_from_name(const char *name)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(status_names); i++) {
		if (status_names[i] && strcmp(status_names[i], name) == 0)
			return (int)i;
	}
	return -1;
}
