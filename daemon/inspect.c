/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/inspect.h"

#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <utlist.h>

#include "daemon/gpu.h"
#include "daemon/memfd.h"
#include "daemon/net.h"
#include "daemon/server.h"
#include "proto/limits.h"
#include "proto/msg.h"
#include "proto/util.h"

#define MS UINT64_C(1000000)

/* ---- what the parts share */

/* cJSON prints a number as a fraction and reads it back to see whether that was exact, which took
 * most of the time of a display. Digits of our own it only copies. */
static void add_raw(cJSON *object, const char *name, const char *digits)
{
	cJSON *item = cJSON_CreateRaw(digits);

	/* Names are constants. Fails without memory only, see below. */
	if (!cJSON_AddItemToObjectCS(object, name, item))
		cJSON_Delete(item);
}

void kvp_inspect_num(cJSON *object, const char *name, uint64_t value)
{
	char digits[24];
	char *at = &digits[sizeof(digits) - 1];

	*at = 0;
	do {
		*--at = (char)('0' + value % 10);
		value /= 10;
	} while (value);
	add_raw(object, name, at);
}

void kvp_inspect_append(cJSON *list, cJSON *item)
{
	if (!cJSON_AddItemToArray(list, item)) /* one of the two could not be made */
		cJSON_Delete(item);
}

void kvp_inspect_age(const struct kvp_inspect *ask, cJSON *object, const char *name,
		     uint64_t since_ns)
{
	uint64_t age_ms = since_ns && ask->now_ns > since_ns ? (ask->now_ns - since_ns) / MS : 0;
	char text[32];

	if (since_ns) {
		(void)snprintf(text, sizeof(text), "%" PRIu64 ".%03u", age_ms / 1000,
			       (unsigned)(age_ms % 1000)); /* fits */
		add_raw(object, name, text);
	} else {
		(void)cJSON_AddNullToObject(object, name);
	}
}

void kvp_inspect_hex(cJSON *object, const char *name, uint64_t value)
{
	char text[24];

	(void)snprintf(text, sizeof(text), "0x%" PRIx64, value); /* fits */
	(void)cJSON_AddStringToObject(object, name, text);
}

static void add_bytes(cJSON *object, const char *name, const uint8_t *bytes, size_t n)
{
	char text[2 * KVP_INCARNATION_BYTES + 1] = "";

	for (size_t i = 0; i < n && i < KVP_INCARNATION_BYTES; i++)
		(void)snprintf(text + 2 * i, 3, "%02x", bytes[i]); /* fits */
	(void)cJSON_AddStringToObject(object, name, text);
}

static void add_features(cJSON *object)
{
	cJSON *list = cJSON_AddArrayToObject(object, "features");

#ifdef KVP_TEST
	kvp_inspect_append(list, cJSON_CreateString("test_hold"));
#endif
	(void)list;
}

/* ---- status */

struct slow_path {
	const char *name;
	uint64_t count;
	const char *reason;
};

static void add_slow_path(cJSON *list, const struct slow_path *path)
{
	cJSON *object;

	if (path->count == 0)
		return;
	object = cJSON_CreateObject();
	(void)cJSON_AddStringToObject(object, "name", path->name);
	kvp_inspect_num(object, "count", path->count);
	(void)cJSON_AddStringToObject(object, "reason", path->reason);
	kvp_inspect_append(list, object);
}

static void add_slow_paths(const struct kvp_inspect *ask, cJSON *status,
			   const struct kvp_rooms_stats *rooms, const struct kvp_lane_status *lane)
{
	const struct kvp_core *core = ask->core;
	cJSON *list = cJSON_AddArrayToObject(status, "slow_paths");
	const struct slow_path paths[] = {
		{ "raw_rows", lane->raw_rows, "rows sent one by one: lane.pack is off" },
		{ "repacked", lane->repacked,
		  "pieces packed again: grants of destinations with the same rows came too far "
		  "apart" },
		{ "slot_waits", lane->slot_waits,
		  "pieces that waited for a slot: host.slots, gpu.slots" },
		{ "want_refused", lane->want_refused, "wants beyond limits.max_wants" },
		{ "accept_pauses", core->server->accept_pauses,
		  "no file descriptor for a new client: raise LimitNOFILE" },
		{ "peer_accept_pauses", kvp_peers_accept_pauses(core->peers),
		  "no memory for a connection of a peer" },
		{ "rests", core->server->rests,
		  "times that a client's process was not read for a moment: it takes more than "
		  "half of the "
		  "loop's time" },
		{ "stalls", core->server->stalls,
		  "clients ended that did not read (client.stall)" },
		{ "drains_late", rooms->drains_late,
		  "rooms over but not quiet within timers.drain: their sessions were ended" },
		{ "lanes_stuck", core->lanes_stuck, "lanes without a turn for lane.stuck_after" },
	};

	for (size_t i = 0; i < KVP_ARRAY_SIZE(paths); i++)
		add_slow_path(list, &paths[i]);
	for (uint32_t i = KVP_SUMS_ON + 1; i < KVP_SUMS_N; i++) {
		char name[32];
		const struct slow_path path = { name, rooms->unchecked[i],
						kvp_sums_text((enum kvp_sums)i) };

		(void)snprintf(name, sizeof(name), "unchecked_%s",
			       kvp_sums_name((enum kvp_sums)i)); /* fits */
		add_slow_path(list, &path);
	}
	for (uint32_t i = KVP_ACROSS_PEER + 1; i < KVP_ACROSS_N; i++) {
		char name[32];
		const struct slow_path path = { name, rooms->across[i],
						kvp_across_text((enum kvp_across)i) };

		(void)snprintf(name, sizeof(name), "peer_%s",
			       kvp_across_name((enum kvp_across)i)); /* fits */
		add_slow_path(list, &path);
	}
	for (uint32_t i = KVP_WHY_NONE + 1; i < KVP_WHY_N; i++) {
		char name[32];
		const struct slow_path path = { name, lane->fell_back[i],
						kvp_why_text((enum kvp_why)i) };

		(void)snprintf(name, sizeof(name), "landed_%s",
			       kvp_why_name((enum kvp_why)i)); /* fits */
		add_slow_path(list, &path);
	}
}

static void add_counters(const struct kvp_core *core, cJSON *status,
			 const struct kvp_rooms_stats *rooms, const struct kvp_lane_status *lane)
{
	cJSON *counters = cJSON_AddObjectToObject(status, "counters");
	uint64_t failed = 0;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(rooms->failed_by_status); i++)
		failed += rooms->failed_by_status[i];
	kvp_inspect_num(counters, "sessions_accepted", core->server->accepted);
	kvp_inspect_num(counters, "sessions_refused_policy", core->server->refused_policy);
	kvp_inspect_num(counters, "sessions_refused_user", core->server->refused_user);
	kvp_inspect_num(counters, "requests", core->server->requests);
	kvp_inspect_num(counters, "events", core->server->events);
	kvp_inspect_num(counters, "turns_cut", core->server->turns_cut);
	kvp_inspect_num(counters, "event_turns_cut", core->server->event_turns_cut);
	kvp_inspect_num(counters, "bad_packets", core->server->bad_packets);
	kvp_inspect_num(counters, "expected", rooms->expected);
	kvp_inspect_num(counters, "opened", rooms->opened);
	kvp_inspect_num(counters, "completed", rooms->completed);
	kvp_inspect_num(counters, "failed", failed);
	kvp_inspect_num(counters, "aborts", rooms->aborts);
	kvp_inspect_num(counters, "renews", rooms->renews);
	kvp_inspect_num(counters, "declines", rooms->declines);
	kvp_inspect_num(counters, "late_messages", rooms->late_messages);
	kvp_inspect_num(counters, "room_bytes", rooms->bytes_rooms);
	kvp_inspect_num(counters, "pieces_sent", lane->pieces_sent);
	kvp_inspect_num(counters, "pieces_landed", lane->pieces_landed);
	kvp_inspect_num(counters, "pieces_local", lane->pieces_local);
	kvp_inspect_num(counters, "bytes_sent", lane->bytes_sent);
	kvp_inspect_num(counters, "bytes_landed", lane->bytes_landed);
	kvp_inspect_num(counters, "bytes_local", lane->bytes_local);
	kvp_inspect_num(counters, "rooms_peer", rooms->across[KVP_ACROSS_PEER]);
	kvp_inspect_num(counters, "pieces_peer", lane->pieces_peer);
	kvp_inspect_num(counters, "bytes_peer", lane->bytes_peer);
	kvp_inspect_num(counters, "pieces_direct", lane->pieces_direct);
	kvp_inspect_num(counters, "bytes_direct", lane->bytes_direct);
	kvp_inspect_num(counters, "direct_writes", lane->direct_writes);
	kvp_inspect_num(counters, "pieces_checked", lane->checked);
	kvp_inspect_num(counters, "pieces_corrupt", lane->corrupt);
	kvp_inspect_num(counters, "shared_slots", lane->shared);
	kvp_inspect_num(counters, "pieces_eager", lane->eager);
	kvp_inspect_num(counters, "eager_missed", lane->eager_missed);
	kvp_inspect_num(counters, "dropped_no_token", lane->no_token);
	kvp_inspect_num(counters, "dropped_stale", lane->stale);
	kvp_inspect_num(counters, "dropped_malformed", lane->bad_messages);
	kvp_inspect_num(counters, "log_lines_dropped", kvp_log_dropped());
}

static bool count_one(void *arg, const struct kvp_peer_view *view)
{
	(void)view;
	++*(uint32_t *)arg;
	return true;
}

static void add_rooms(cJSON *status, const struct kvp_rooms_stats *stats)
{
	cJSON *rooms = cJSON_AddObjectToObject(status, "rooms");

	cJSON *by_state;

	kvp_inspect_num(rooms, "dest", stats->dests);
	kvp_inspect_num(rooms, "send", stats->sends);
	by_state = cJSON_AddObjectToObject(rooms, "by_state");
	for (unsigned i = 0; i < KVP_ROOM_STATES_N; i++) {
		if (stats->by_state[i])
			kvp_inspect_num(by_state, kvp_room_phase_name((enum kvp_room_phase)i),
					stats->by_state[i]);
	}
}

static void add_drain(const struct kvp_inspect *ask, cJSON *status)
{
	uint64_t since_ns;
	const char *reason = kvp_rooms_draining(ask->core->rooms, &since_ns);

	(void)cJSON_AddBoolToObject(status, "draining", reason != NULL);
	if (!reason)
		return;
	(void)cJSON_AddStringToObject(status, "drain_reason", reason);
	kvp_inspect_age(ask, status, "drain_s", since_ns);
}

/* For tests that look for what is left behind. */
static void add_heap(cJSON *status)
{
#ifdef KVP_TEST
	struct mallinfo2 info = mallinfo2();

	kvp_inspect_num(status, "heap_bytes", info.uordblks);
	kvp_inspect_num(status, "heap_mapped_bytes", info.hblkhd);
#endif
	(void)status;
}

static void add_lanes(const struct kvp_inspect *ask, cJSON *root);

/* Counts up to the last that is not 0. */
static void add_turns(cJSON *loop, const char *name, const struct kvp_turns *turns)
{
	cJSON *object = cJSON_CreateObject();
	cJSON *list = cJSON_AddArrayToObject(object, "log2_us");
	uint32_t n = KVP_TURNS_N;

	while (n > 0 && turns->n[n - 1] == 0)
		n--;
	for (uint32_t i = 0; i < n; i++)
		kvp_inspect_append(list, cJSON_CreateNumber((double)turns->n[i]));
	kvp_inspect_num(object, "most_us", turns->most_ns / 1000);
	if (!cJSON_AddItemToObjectCS(loop, name, object))
		cJSON_Delete(object);
}

/* What others waited for. */
static void add_loop(const struct kvp_server *server, cJSON *status)
{
	cJSON *loop = cJSON_AddObjectToObject(status, "loop");

	add_turns(loop, "client_turns", &server->client_turns);
	add_turns(loop, "accept_turns", &server->accept_turns);
	add_turns(loop, "job_turns", &server->job_turns);
}

/* The counts of all lanes together; of the rest only the fullest endpoint. */
static void sum_lanes(const struct kvp_core *core, struct kvp_lane_status *sum)
{
	enum {
		FIRST = offsetof(struct kvp_lane_status, pieces_sent) / sizeof(uint64_t),
		END = offsetof(struct kvp_lane_status, holds) / sizeof(uint64_t),
	};
	static struct kvp_lane_status lane; /* large; loop thread only */

	memset(sum, 0, sizeof(*sum));
	for (uint32_t i = 0; i < core->n_lanes; i++) {
		uint64_t *to = (uint64_t *)sum;
		const uint64_t *from = (const uint64_t *)&lane;

		kvp_lane_status_read(core->lanes[i], &lane);
		sum->wants_most = KVP_MAX(sum->wants_most, lane.wants_most);
		for (size_t k = FIRST; k < END; k++)
			to[k] += from[k];
	}
}

cJSON *kvp_inspect_status(const struct kvp_inspect *ask)
{
	struct kvp_core *core = ask->core;
	cJSON *status = cJSON_CreateObject();
	struct kvp_rooms_stats rooms = { 0 };
	static struct kvp_lane_status lane; /* large; loop thread only */
	uint32_t n_peers = 0;

	kvp_rooms_stats(core->rooms, &rooms);
	sum_lanes(core, &lane);
	kvp_peers_each(core->peers, count_one, &n_peers);
	(void)cJSON_AddStringToObject(status, "node", core->config->node.name);
	(void)cJSON_AddStringToObject(status, "version", KVP_VERSION);
	(void)cJSON_AddStringToObject(status, "cuda", kvp_gpu_build());
	(void)cJSON_AddStringToObject(status, "ucx", kvp_net_ucx_version());
	(void)cJSON_AddStringToObject(status, "ucx_doubt", kvp_net_ucx_doubt());
	add_bytes(status, "incarnation", core->incarnation, sizeof(core->incarnation));
	kvp_inspect_num(status, "pid", (uint64_t)getpid());
	kvp_inspect_age(ask, status, "uptime_s", core->started_ns);
	(void)cJSON_AddStringToObject(status, "config", core->config_path);
	(void)cJSON_AddStringToObject(status, "socket", core->server->path);
	(void)cJSON_AddStringToObject(status, "address", kvp_peers_address(core->peers));
	(void)cJSON_AddBoolToObject(status, "stopping", core->stopping);
	add_drain(ask, status);
	add_features(status);
	kvp_inspect_num(status, "clients", core->server->n_sessions);
	kvp_inspect_num(status, "pools", core->pools.n);
	kvp_inspect_num(status, "fences", core->fences.n);
	add_rooms(status, &rooms);
	kvp_inspect_num(status, "peers", n_peers);
	add_heap(status);
	add_loop(core->server, status);
	add_lanes(ask, status);
	kvp_inspect_limits(core, status, &rooms, &lane);
	add_slow_paths(ask, status, &rooms, &lane);
	add_counters(core, status, &rooms, &lane);
	return status;
}

cJSON *kvp_inspect_version(const struct kvp_inspect *ask)
{
	cJSON *version = cJSON_CreateObject();

	(void)ask;
	(void)cJSON_AddStringToObject(version, "version", KVP_VERSION);
	kvp_inspect_num(version, "protocol_min", KVP_PROTO_VERSION_MIN);
	kvp_inspect_num(version, "protocol_max", KVP_PROTO_VERSION_MAX);
	add_features(version);
	(void)cJSON_AddStringToObject(version, "ucx", kvp_net_ucx_version());
	(void)cJSON_AddStringToObject(version, "cuda", kvp_gpu_build());
	return version;
}

/* ---- lanes */

static void add_ring(cJSON *lane, const char *name, const uint64_t n_bytes_free[3], int64_t held)
{
	cJSON *ring = cJSON_AddObjectToObject(lane, name);

	kvp_inspect_num(ring, "n", n_bytes_free[0]);
	kvp_inspect_num(ring, "bytes", n_bytes_free[1]);
	kvp_inspect_num(ring, "free", n_bytes_free[2]);
	if (held >= 0)
		kvp_inspect_num(ring, "held", (uint64_t)held);
}

static void add_lane_state(const struct kvp_inspect *ask, cJSON *lane, uint32_t i,
			   const struct kvp_lane_status *status)
{
	const struct kvp_core *core = ask->core;
	uint64_t turn_ms = ask->now_ns > status->turn_ns ? (ask->now_ns - status->turn_ns) / MS : 0;
	uint64_t call_ms = status->call && ask->now_ns > status->call_since_ns
				   ? (ask->now_ns - status->call_since_ns) / MS
				   : 0;

	(void)cJSON_AddStringToObject(lane, "name", core->lane_names[i]);
	(void)cJSON_AddStringToObject(lane, "device", kvp_lane_device(core->lanes[i]));
	(void)cJSON_AddStringToObject(lane, "transport",
				      status->net_describe[0] ? status->net_describe : "none");
	kvp_inspect_num(lane, "turns", status->turns);
	kvp_inspect_num(lane, "last_turn_ms", turn_ms);
	(void)cJSON_AddStringToObject(lane, "call", status->call ? status->call : "");
	kvp_inspect_num(lane, "call_ms", call_ms);
	(void)cJSON_AddBoolToObject(lane, "work", status->has_work);
	(void)cJSON_AddBoolToObject(lane, "stuck", core->stuck_at[i] == status->turns + 1);
}

#ifdef KVP_TEST
/* Pieces that a test point keeps here, by point; accepts that one keeps on the loop. */
static void add_holds(const struct kvp_core *core, cJSON *lane,
		      const struct kvp_lane_status *status)
{
	cJSON *holds = cJSON_AddObjectToObject(lane, "holds");

	for (uint32_t i = 0; i < KVP_HOLD_OFFER; i++)
		kvp_inspect_num(holds, kvp_hold_name((enum kvp_hold)i), status->holds[i]);
	kvp_inspect_num(holds, kvp_hold_name(KVP_HOLD_OFFER), kvp_rooms_kept_offers(core->rooms));
}
#endif

static void add_gpu(cJSON *lane, const struct kvp_lane *of, const struct kvp_lane_status *status)
{
	const struct kvp_lane_rings *rings = kvp_lane_rings(of);
	cJSON *gpu = cJSON_AddObjectToObject(lane, "gpu");

	(void)cJSON_AddStringToObject(gpu, "uuid", kvp_lane_gpu(of));
	(void)cJSON_AddStringToObject(gpu, "rings", rings->device ? "device" : "host");
	(void)cJSON_AddStringToObject(gpu, "rings_why", rings->word);
	(void)cJSON_AddStringToObject(gpu, "rings_reason", rings->reason);
	(void)cJSON_AddBoolToObject(gpu, "flush", rings->flush);
	kvp_inspect_num(gpu, "flushes", status->flushes);
	kvp_inspect_num(gpu, "launches", status->launches);
	kvp_inspect_num(gpu, "busy", status->gpu_busy);
	kvp_inspect_num(gpu, "imports", status->imports);
	kvp_inspect_num(gpu, "import_bytes", status->import_bytes);
}

static void add_direct(const struct kvp_core *core, cJSON *lane,
		       const struct kvp_lane_status *status)
{
	static const char *const modes[] = {
		[KVP_DATA_AUTO] = "auto",
		[KVP_DATA_DIRECT] = "direct",
		[KVP_DATA_LANDING] = "landing",
	};
	cJSON *fell_back = cJSON_AddObjectToObject(lane, "fell_back");

	(void)cJSON_AddStringToObject(lane, "mode", modes[core->config->data.mode]);
	kvp_inspect_num(lane, "pieces_direct", status->pieces_direct);
	kvp_inspect_num(lane, "bytes_direct", status->bytes_direct);
	kvp_inspect_num(lane, "direct_writes", status->direct_writes);
	kvp_inspect_num(lane, "windows", status->windows);
	kvp_inspect_num(lane, "regions", status->regions);
	kvp_inspect_num(lane, "region_bytes", status->region_bytes);
	kvp_inspect_num(lane, "regions_dmabuf", status->regions_dmabuf);
	kvp_inspect_num(lane, "regions_vmm", status->regions_vmm);
	for (uint32_t i = KVP_WHY_NONE + 1; i < KVP_WHY_N; i++)
		if (status->fell_back[i])
			kvp_inspect_num(fell_back, kvp_why_name((enum kvp_why)i),
					status->fell_back[i]);
}

/* Of a lane with rails. */
static void add_rdma(cJSON *lane, const struct kvp_net_stats *net)
{
	cJSON *rdma = cJSON_AddObjectToObject(lane, "rdma");

	kvp_inspect_num(rdma, "rejected", net->rejects);
	kvp_inspect_num(rdma, "strangers", net->strangers);
	kvp_inspect_num(rdma, "keepalives", net->keepalives);
	kvp_inspect_num(rdma, "calls_out", net->calls_out);
	kvp_inspect_num(rdma, "calls_slow", net->calls_slow);
	kvp_inspect_num(rdma, "device_events", net->events);
}

static void add_sums(const struct kvp_core *core, cJSON *lane, const struct kvp_lane_status *status)
{
	static const char *const wants[] = {
		[KVP_CHECKSUM_OFF] = "off",
		[KVP_CHECKSUM_ON] = "on",
		[KVP_CHECKSUM_REQUIRED] = "required",
	};

	(void)cJSON_AddStringToObject(lane, "checksum", wants[core->config->data.checksum]);
	kvp_inspect_num(lane, "pieces_checked", status->checked);
	kvp_inspect_num(lane, "pieces_corrupt", status->corrupt);
}

static cJSON *lane_object(const struct kvp_inspect *ask, uint32_t i)
{
	const struct kvp_core *core = ask->core;
	static struct kvp_lane_status status; /* large; loop thread only */
	uint64_t slot = kvp_lane_slot_bytes(core->lanes[i]);
	cJSON *lane = cJSON_CreateObject();

	kvp_lane_status_read(core->lanes[i], &status);
	add_lane_state(ask, lane, i, &status);
	add_ring(lane, "pack_slots", (uint64_t[]){ status.pack_slots, slot, status.pack_free },
		 status.pack_held);
	add_ring(lane, "land_slots", (uint64_t[]){ status.land_slots, slot, status.land_free }, -1);
	kvp_inspect_num(lane, "wants_queued", status.wants_queued);
	kvp_inspect_num(lane, "receivers", status.rxs);
	kvp_inspect_num(lane, "senders", status.txs);
	kvp_inspect_num(lane, "endpoints", status.eps);
	kvp_inspect_num(lane, "pieces_sent", status.pieces_sent);
	kvp_inspect_num(lane, "pieces_landed", status.pieces_landed);
	kvp_inspect_num(lane, "pieces_local", status.pieces_local);
	kvp_inspect_num(lane, "bytes_sent", status.bytes_sent);
	kvp_inspect_num(lane, "bytes_landed", status.bytes_landed);
	kvp_inspect_num(lane, "bytes_local", status.bytes_local);
	kvp_inspect_num(lane, "pieces_peer", status.pieces_peer);
	kvp_inspect_num(lane, "bytes_peer", status.bytes_peer);
	add_direct(core, lane, &status);
	add_sums(core, lane, &status);
	kvp_inspect_num(lane, "raw_rows", status.raw_rows);
	kvp_inspect_num(lane, "repacked", status.repacked);
	kvp_inspect_num(lane, "packed_together", status.together);
	kvp_inspect_num(lane, "dropped_no_token", status.no_token);
	kvp_inspect_num(lane, "spins", status.spins);
	kvp_inspect_num(lane, "sleeps", status.sleeps);
	kvp_inspect_num(lane, "wakes", status.wakes);
	kvp_inspect_num(lane, "quarantined", status.net.stuck);
	if (status.n_rails > 0)
		add_rdma(lane, &status.net);
	(void)cJSON_AddStringToObject(
		lane, "pack",
		core->config->lane.pack || kvp_lane_gpu(core->lanes[i])[0] ? "on" : "off");
	if (kvp_lane_gpu(core->lanes[i])[0])
		add_gpu(lane, core->lanes[i], &status);
#ifdef KVP_TEST
	add_holds(core, lane, &status);
#endif
	return lane;
}

/* GPUs that the configuration names and that have no lane. */
static void add_refused_gpus(const struct kvp_core *core, cJSON *object)
{
	cJSON *list = cJSON_AddArrayToObject(object, "gpus_refused");

	for (uint32_t i = 0; i < core->pools.n_refusals; i++) {
		const struct kvp_gpu_refusal *refusal = &core->pools.refusals[i];
		cJSON *gpu = cJSON_CreateObject();

		(void)cJSON_AddStringToObject(gpu, "gpu", refusal->uuid);
		(void)cJSON_AddStringToObject(gpu, "reason", refusal->reason);
		kvp_inspect_append(list, gpu);
	}
}

static void add_lanes(const struct kvp_inspect *ask, cJSON *root)
{
	cJSON *lanes = cJSON_AddArrayToObject(root, "lanes");

	for (uint32_t i = 0; i < ask->core->n_lanes; i++)
		kvp_inspect_append(lanes, lane_object(ask, i));
	add_refused_gpus(ask->core, root);
}

cJSON *kvp_inspect_lanes(const struct kvp_inspect *ask)
{
	cJSON *root = cJSON_CreateObject();

	add_lanes(ask, root);
	return root;
}

/* ---- peers */

struct peer_list {
	const struct kvp_inspect *ask;
	cJSON *list;
};

/* Of transports over RDMA: queue pairs that are up, of how many there may be. */
static void add_peer_rails(cJSON *peer, const struct kvp_peer_view *view)
{
	char text[32] = "";

	kvp_inspect_num(peer, "rails_open", view->rails_open);
	kvp_inspect_num(peer, "rails_possible", view->rails);
	if (view->rails > 0)
		(void)snprintf(text, sizeof(text), "%u of %u", view->rails_open, view->rails);
	(void)cJSON_AddStringToObject(peer, "rails", text);
}

static void add_rail(cJSON *list, const char *lane, const struct kvp_net_rail *rail)
{
	static const char *const states[] = { "up", "down", "gone" };
	cJSON *object = cJSON_CreateObject();

	(void)cJSON_AddStringToObject(object, "lane", lane);
	kvp_inspect_num(object, "number", rail->number);
	(void)cJSON_AddStringToObject(object, "device", rail->device);
	kvp_inspect_num(object, "port", rail->port);
	(void)cJSON_AddStringToObject(object, "state", states[rail->state]);
	kvp_inspect_num(object, "gid_index", rail->gid_index);
	(void)cJSON_AddStringToObject(object, "address", rail->address);
	kvp_inspect_num(object, "mtu", rail->mtu);
	kvp_inspect_num(object, "qps_connecting", rail->connecting);
	kvp_inspect_num(object, "qps_up", rail->open);
	kvp_inspect_num(object, "qps_in_error", rail->failed);
	kvp_inspect_num(object, "qps_lost", rail->lost);
	kvp_inspect_num(object, "bytes_sent", rail->bytes);
	kvp_inspect_num(object, "resent", rail->resent);
	kvp_inspect_append(list, object);
}

static void add_rails(const struct kvp_core *core, cJSON *root)
{
	static struct kvp_lane_status status; /* large; loop thread only */
	cJSON *list = cJSON_AddArrayToObject(root, "rails");

	for (uint32_t i = 0; i < core->n_lanes; i++) {
		kvp_lane_status_read(core->lanes[i], &status);
		for (uint32_t k = 0; k < KVP_MIN(status.n_rails, (uint64_t)KVP_NET_RAILS); k++)
			add_rail(list, core->lane_names[i], &status.rails[k]);
	}
}

static bool add_peer(void *arg, const struct kvp_peer_view *view)
{
	const struct peer_list *list = arg;
	const struct kvp_inspect *ask = list->ask;
	cJSON *peer = cJSON_CreateObject();
	uint64_t heard_ms =
		ask->now_ns > view->last_heard_ns ? (ask->now_ns - view->last_heard_ns) / MS : 0;
	uint64_t retry_ms =
		view->retry_at_ns > ask->now_ns ? (view->retry_at_ns - ask->now_ns) / MS : 0;

	(void)cJSON_AddStringToObject(peer, "address", view->address);
	(void)cJSON_AddStringToObject(peer, "node", view->node);
	(void)cJSON_AddStringToObject(peer, "direction", view->outgoing ? "out" : "in");
	(void)cJSON_AddBoolToObject(peer, "self", view->self);
	(void)cJSON_AddStringToObject(peer, "state", view->state);
	add_bytes(peer, "incarnation", view->incarnation, sizeof(view->incarnation));
	kvp_inspect_age(ask, peer, "age_s", view->since_ns);
	if (view->last_heard_ns)
		kvp_inspect_num(peer, "last_heard_ms", heard_ms);
	else
		(void)cJSON_AddNullToObject(peer, "last_heard_ms"); /* never */
	kvp_inspect_num(peer, "legs", view->holders);
	(void)cJSON_AddNumberToObject(peer, "retry_in_s", (double)retry_ms / 1000.0);
	(void)cJSON_AddStringToObject(peer, "transport",
				      view->self        ? "local"
				      : view->endpoints ? kvp_lane_transport(ask->core->lanes[0])
							: "");
	kvp_inspect_num(peer, "endpoints", view->endpoints);
	add_peer_rails(peer, view);
	(void)cJSON_AddStringToObject(peer, "reason", view->reason);
	kvp_inspect_num(peer, "bytes_sent", view->bytes_sent);
	kvp_inspect_num(peer, "bytes_recv", view->bytes_recv);
	kvp_inspect_num(peer, "unsent_bytes", view->unsent_bytes);
	kvp_inspect_num(peer, "reconnects", view->reconnects);
	kvp_inspect_append(list->list, peer);
	return true;
}

cJSON *kvp_inspect_peers(const struct kvp_inspect *ask)
{
	cJSON *root = cJSON_CreateObject();
	struct peer_list list = { ask, cJSON_AddArrayToObject(root, "peers") };

	kvp_peers_each(ask->core->peers, add_peer, &list);
	add_rails(ask->core, root);
	return root;
}

/* ---- clients and pools */

static cJSON *client_object(const struct kvp_inspect *ask, const struct kvp_session *session)
{
	cJSON *client = cJSON_CreateObject();

	kvp_inspect_num(client, "id", session->owner.id);
	kvp_inspect_num(client, "uid", session->owner.uid);
	kvp_inspect_age(ask, client, "age_s", session->created_ns);
	kvp_inspect_num(client, "pools", session->n_pools);
	kvp_inspect_num(client, "rooms", session->owner.n_rooms);
	if (!ask->admin && session->owner.uid != ask->uid)
		return client;
	(void)cJSON_AddStringToObject(client, "name", session->owner.name);
	kvp_inspect_num(client, "pid", session->pid);
	kvp_inspect_num(client, "gid", session->gid);
	(void)cJSON_AddBoolToObject(client, "admin", session->admin);
	(void)cJSON_AddBoolToObject(client, "observer", session->observer);
	(void)cJSON_AddBoolToObject(client, "reserved", session->reserved);
	kvp_inspect_num(client, "max_sessions", session->policy.max_sessions);
	kvp_inspect_num(client, "max_rooms", session->policy.max_rooms);
	kvp_inspect_num(client, "max_pools", session->policy.max_pools);
	kvp_inspect_num(client, "fences", session->n_fences);
	kvp_inspect_num(client, "lists", session->lists.n_lists);
	kvp_inspect_num(client, "list_pages", session->lists.n_pages);
	kvp_inspect_num(client, "requests", session->n_requests);
	kvp_inspect_num(client, "bad_packets", session->n_bad);
	kvp_inspect_num(client, "events", session->n_events);
	kvp_inspect_num(client, "waiting_requests", session->n_pending);
	kvp_inspect_num(client, "unsent_bytes", session->reply_bytes);
	(void)cJSON_AddBoolToObject(client, "dirty", session->owner.dirty != NULL);
	if (session->full)
		kvp_inspect_age(ask, client, "stalled_s", session->full_since_ns);
	else
		kvp_inspect_num(client, "stalled_s", 0);
	return client;
}

cJSON *kvp_inspect_clients(const struct kvp_inspect *ask)
{
	cJSON *root = cJSON_CreateObject();
	cJSON *list = cJSON_AddArrayToObject(root, "clients");
	const struct kvp_session *session;

	DL_FOREACH (ask->core->server->sessions, session) {
		if (session->state == KVP_SESSION_UP)
			kvp_inspect_append(list, client_object(ask, session));
	}
	return root;
}

/* Which other GPUs reach it, or why not. */
static void add_guests(cJSON *object, const struct kvp_pool *pool)
{
	static const char *const states[] = {
		[KVP_GUEST_NONE] = "not reached",
		[KVP_GUEST_STARTING] = "starting",
		[KVP_GUEST_READY] = "reached",
	};
	cJSON *list = cJSON_AddArrayToObject(object, "peers");

	for (uint32_t i = 0; i < pool->n_guests; i++) {
		const struct kvp_pool_guest *guest = &pool->guests[i];
		cJSON *peer = cJSON_CreateObject();

		(void)cJSON_AddStringToObject(peer, "device", kvp_lane_device(guest->lane));
		(void)cJSON_AddStringToObject(peer, "state", states[guest->state]);
		(void)cJSON_AddStringToObject(peer, "reason", guest->reason);
		kvp_inspect_append(list, peer);
	}
}

static cJSON *pool_object(const struct kvp_inspect *ask, const struct kvp_pool *pool)
{
	static const char *const states[] = {
		[KVP_POOL_STARTING] = "starting",
		[KVP_POOL_ACTIVE] = "active",
		[KVP_POOL_ENDING] = "ending",
		[KVP_POOL_PAUSED] = "paused",
	};
	cJSON *object = cJSON_CreateObject();

	kvp_inspect_num(object, "id", pool->id);
	kvp_inspect_num(object, "client", pool->session);
	kvp_inspect_num(object, "uid", pool->uid);
	(void)cJSON_AddStringToObject(object, "state", states[pool->state]);
	(void)cJSON_AddStringToObject(object, "device", kvp_lane_device(pool->lane));
	kvp_inspect_num(object, "bytes", pool->bytes);
	kvp_inspect_num(object, "rooms", pool->n_users);
	if (!ask->admin && pool->uid != ask->uid)
		return object;
	kvp_inspect_num(object, "client_id", pool->client_id);
	(void)cJSON_AddStringToObject(object, "client_name", pool->client_name);
	(void)cJSON_AddStringToObject(object, "label", pool->label);
	kvp_inspect_num(object, "entries", pool->n_entries);
	kvp_inspect_num(object, "groups", pool->n_groups);
	kvp_inspect_num(object, "pages_held", pool->pages_held);
	kvp_inspect_num(object, "tag", pool->tag_bytes);
	(void)cJSON_AddBoolToObject(object, "writable", pool->writable);
	if (pool->on_gpu) {
		kvp_inspect_num(object, "dmabufs", pool->n_dmabufs);
		(void)cJSON_AddStringToObject(object, "dmabuf_reason", pool->dmabuf_reason);
		add_guests(object, pool);
	}
	return object;
}

cJSON *kvp_inspect_pools(const struct kvp_inspect *ask)
{
	cJSON *root = cJSON_CreateObject();
	cJSON *list = cJSON_AddArrayToObject(root, "pools");
	const struct kvp_pool *pool;

	DL_FOREACH (ask->core->pools.first, pool)
		kvp_inspect_append(list, pool_object(ask, pool));
	return root;
}

/* ---- answer */

struct part {
	const char *name;
	cJSON *(*make)(const struct kvp_inspect *ask);
};

static const struct part parts[] = {
	{ "status", kvp_inspect_status },   { "version", kvp_inspect_version },
	{ "lanes", kvp_inspect_lanes },     { "peers", kvp_inspect_peers },
	{ "clients", kvp_inspect_clients }, { "pools", kvp_inspect_pools },
};

static int to_memfd(const cJSON *root)
{
	KVP_CLEANUP(kvp_closep) int fd = kvp_memfd_make("kvpack-inspect");
	char *text = cJSON_PrintUnformatted(root);
	int r = fd < 0 ? fd : text ? kvp_memfd_write(fd, text, strlen(text)) : -ENOMEM;

	cJSON_free(text);
	if (r == 0)
		r = kvp_memfd_seal(fd);
	return r < 0 ? r : KVP_TAKE_FD(fd);
}

int kvp_inspect_answer(const struct kvp_inspect *ask, const char *what)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(parts); i++) {
		cJSON *root;
		int fd;

		if (strcmp(what, parts[i].name) != 0)
			continue;
		root = parts[i].make(ask);
		fd = to_memfd(root);
		cJSON_Delete(root);
		if (fd >= 0)
			return fd;
		(void)snprintf(ask->err, ask->err_bytes, "inspect: no memory for the answer");
		return -(int)KVP__STATUS__STATUS_NO_MEMORY;
	}
	(void)snprintf(ask->err, ask->err_bytes, "inspect.what is \"%.31s\": nothing of that name",
		       what);
	return -(int)KVP__STATUS__STATUS_NOT_FOUND;
}
