/* SPDX-License-Identifier: Apache-2.0 */
#include "client/ctl_show.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl_table.h"
#include "proto/util.h"

#define STUCK_MS 5000.0 /* in a foreign call; of older daemons: with work and without a turn */

#define TABLE(columns, rows, empty) ctl_table_print(columns, KVP_ARRAY_SIZE(columns), rows, empty)

static bool any(const cJSON *list, bool (*test)(const cJSON *item))
{
	const cJSON *item;

	cJSON_ArrayForEach (item, list) {
		if (test(item))
			return true;
	}
	return false;
}

/* ---- lanes --------------------------------------------------------------------------------- */

/* One that waits for a peer has work, and makes no turn either. */
static bool is_lane_stuck(const cJSON *lane)
{
	if (ctl_member(lane, "stuck"))
		return ctl_flag(lane, "stuck") || ctl_number(lane, "call_ms") > STUCK_MS;
	return ctl_flag(lane, "work") && ctl_number(lane, "last_turn_ms") > STUCK_MS;
}

static bool lanes_wrong(const cJSON *answer)
{
	return any(ctl_member(answer, "lanes"), is_lane_stuck);
}

static void print_lanes(const cJSON *lanes)
{
	static const struct ctl_column state[] = {
		{ "LANE", "name", CTL_TEXT },
		{ "DEVICE", "device", CTL_TEXT },
		{ "TURNS", "turns", CTL_COUNT },
		{ "LAST TURN", "last_turn_ms", CTL_MS },
		{ "WORK", "work", CTL_FLAG },
		{ "PACK FREE", "pack_slots.free", CTL_COUNT },
		{ "OF", "pack_slots.n", CTL_COUNT },
		{ "LAND FREE", "land_slots.free", CTL_COUNT },
		{ "OF", "land_slots.n", CTL_COUNT },
		{ "SLOT", "land_slots.bytes", CTL_BYTES },
		{ "WANTS", "wants_queued", CTL_COUNT },
		{ "PACK", "pack", CTL_TEXT },
		{ "MODE", "mode", CTL_TEXT },
		{ "IN CALL", "call", CTL_TEXT },
		{ "TRANSPORT", "transport", CTL_TEXT },
	};
	static const struct ctl_column moved[] = {
		{ "LANE", "name", CTL_TEXT },
		{ "SENT", "bytes_sent", CTL_BYTES },
		{ "PIECES", "pieces_sent", CTL_COUNT },
		{ "LANDED", "bytes_landed", CTL_BYTES },
		{ "PIECES", "pieces_landed", CTL_COUNT },
		{ "LOCAL", "bytes_local", CTL_BYTES },
		{ "PIECES", "pieces_local", CTL_COUNT },
		{ "PEER", "bytes_peer", CTL_BYTES },
		{ "DIRECT", "bytes_direct", CTL_BYTES },
		{ "PIECES", "pieces_direct", CTL_COUNT },
		{ "RAW ROWS", "raw_rows", CTL_COUNT },
		{ "REPACKED", "repacked", CTL_COUNT },
		{ "NO TOKEN", "dropped_no_token", CTL_COUNT },
		{ "SPINS", "spins", CTL_COUNT },
		{ "SLEEPS", "sleeps", CTL_COUNT },
	};

	TABLE(state, lanes, "no lanes");
	(void)putchar('\n');
	TABLE(moved, lanes, "no lanes");
}

/* Those of the lanes that have such a member; the caller deletes the list. */
static cJSON *lanes_with(const cJSON *answer, const char *member)
{
	cJSON *some = cJSON_CreateArray();
	const cJSON *lane;

	cJSON_ArrayForEach (lane, ctl_member(answer, "lanes")) {
		if (ctl_member(lane, member))
			(void)cJSON_AddItemToArray(some, cJSON_Duplicate(lane, true));
	}
	return some;
}

/* Lanes over RDMA: memory of pools that peers may write into, and what connections went through. */
static void print_rdma(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "LANE", "name", CTL_TEXT },
		{ "REGIONS", "regions", CTL_COUNT },
		{ "BYTES", "region_bytes", CTL_BYTES },
		{ "BY OWNERS' DMA-BUF", "regions_dmabuf", CTL_COUNT },
		{ "BY OURS", "regions_vmm", CTL_COUNT },
		{ "WINDOWS", "windows", CTL_COUNT },
		{ "REJECTED", "rdma.rejected", CTL_COUNT },
		{ "STRANGERS", "rdma.strangers", CTL_COUNT },
		{ "KEEPALIVES", "rdma.keepalives", CTL_COUNT },
		{ "CALLS OUT", "rdma.calls_out", CTL_COUNT },
		{ "SLOW CALLS", "rdma.calls_slow", CTL_COUNT },
		{ "DEVICE EVENTS", "rdma.device_events", CTL_COUNT },
	};
	cJSON *some = lanes_with(answer, "rdma");

	if (cJSON_GetArraySize(some) > 0) {
		(void)putchar('\n');
		TABLE(columns, some, "");
	}
	cJSON_Delete(some);
}

/* Lanes with a GPU, and GPUs that have none. */
static void print_gpus(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "LANE", "name", CTL_TEXT },
		{ "RINGS", "gpu.rings", CTL_TEXT },
		{ "WHY", "gpu.rings_why", CTL_TEXT },
		{ "FLUSH", "gpu.flush", CTL_FLAG },
		{ "IMPORTS", "gpu.imports", CTL_COUNT },
		{ "BYTES", "gpu.import_bytes", CTL_BYTES },
		{ "LAUNCHES", "gpu.launches", CTL_COUNT },
		{ "BUSY", "gpu.busy", CTL_COUNT },
		{ "REASON", "gpu.rings_reason", CTL_TEXT },
	};
	static const struct ctl_column refused[] = {
		{ "GPU NOT SERVED", "gpu", CTL_TEXT },
		{ "REASON", "reason", CTL_TEXT },
	};
	cJSON *some = lanes_with(answer, "gpu");

	if (cJSON_GetArraySize(some) > 0) {
		(void)putchar('\n');
		TABLE(columns, some, "");
	}
	cJSON_Delete(some);
	if (cJSON_GetArraySize(ctl_member(answer, "gpus_refused")) > 0) {
		(void)putchar('\n');
		TABLE(refused, ctl_member(answer, "gpus_refused"), "");
	}
}

static void lanes_print(const cJSON *answer)
{
	print_lanes(ctl_member(answer, "lanes"));
	print_rdma(answer);
	print_gpus(answer);
}

/* ---- status -------------------------------------------------------------------------------- */

/* That one object is as large as may be is no failure. */
static bool is_limit_hit(const cJSON *limit)
{
	const char *of = ctl_text(limit, "of"); /* older daemons say only their own */

	return (*of == '\0' || strcmp(of, "daemon") == 0) && ctl_number(limit, "max") > 0 &&
	       ctl_number(limit, "used") >= ctl_number(limit, "max");
}

static bool status_wrong(const cJSON *answer)
{
	return ctl_flag(answer, "stopping") || lanes_wrong(answer) ||
	       any(ctl_member(answer, "limits"), is_limit_hit);
}

static void print_states(const cJSON *states)
{
	const cJSON *state;
	const char *before = ": ";

	cJSON_ArrayForEach (state, states) {
		(void)printf("%s%s %.0f", before, state->string, state->valuedouble);
		before = ", ";
	}
}

static double rooms_of(const cJSON *answer)
{
	return ctl_number(answer, "rooms.dest") + ctl_number(answer, "rooms.send");
}

static void print_drain(const cJSON *answer)
{
	KVP_CLEANUP(kvp_freep) char *since = ctl_cell(answer, "drain_s", CTL_SECONDS);

	if (!ctl_flag(answer, "draining"))
		return;
	(void)printf("draining for %s%s%s: no new legs, ", since,
		     ctl_text(answer, "drain_reason")[0] ? ", " : "",
		     ctl_text(answer, "drain_reason"));
	if (rooms_of(answer) > 0)
		(void)printf("%.0f rooms left\n", rooms_of(answer));
	else
		(void)puts("no rooms left");
}

static void drain_print(const cJSON *answer)
{
	if (ctl_flag(answer, "draining"))
		print_drain(answer);
	else
		(void)puts("takes new legs");
}

/* Why the exit status is 1. */
static void print_wrong(const cJSON *answer)
{
	const cJSON *item;

	cJSON_ArrayForEach (item, ctl_member(answer, "lanes")) {
		if (is_lane_stuck(item))
			(void)printf("lane %s is stuck: it has made no turn for %.0f s, in %s\n",
				     ctl_text(item, "name"),
				     ctl_number(item, "last_turn_ms") / 1000,
				     ctl_text(item, "call")[0] ? ctl_text(item, "call")
							       : "its own code");
	}
	cJSON_ArrayForEach (item, ctl_member(answer, "limits")) {
		if (is_limit_hit(item))
			(void)printf("limit reached: %s is %.0f; %.0f refused so far\n",
				     ctl_text(item, "name"), ctl_number(item, "max"),
				     ctl_number(item, "refused"));
	}
}

static void status_head(const cJSON *answer)
{
	KVP_CLEANUP(kvp_freep) char *uptime = ctl_cell(answer, "uptime_s", CTL_SECONDS);
	KVP_CLEANUP(kvp_freep) char *address = ctl_cell(answer, "address", CTL_TEXT);
	KVP_CLEANUP(kvp_freep) char *config = ctl_cell(answer, "config", CTL_TEXT);

	(void)printf("%s: kvpackd %s, process %.0f, up %s%s\n", ctl_text(answer, "node"),
		     ctl_text(answer, "version"), ctl_number(answer, "pid"), uptime,
		     ctl_flag(answer, "stopping") ? ", stopping" : "");
	(void)printf("config %s, peers call %s\n", config, address);
	if (ctl_text(answer, "cuda")[0]) /* else an older daemon */
		(void)printf("CUDA %s\n", ctl_text(answer, "cuda"));
	if (ctl_text(answer, "ucx_doubt")[0])
		(void)printf("UCX %s: %s\n", ctl_text(answer, "ucx"),
			     ctl_text(answer, "ucx_doubt"));
	(void)printf("clients %.0f, pools %.0f, peers %.0f\n", ctl_number(answer, "clients"),
		     ctl_number(answer, "pools"), ctl_number(answer, "peers"));
	(void)printf("rooms %.0f dest, %.0f send", ctl_number(answer, "rooms.dest"),
		     ctl_number(answer, "rooms.send"));
	print_states(ctl_member(answer, "rooms.by_state"));
	(void)putchar('\n');
	print_drain(answer);
	print_wrong(answer);
	(void)putchar('\n');
}

/* A copy of those items that have something to say, since most limits and paths never do. */
static cJSON *only(const cJSON *list, const char *key, const char *or_key)
{
	cJSON *some = cJSON_CreateArray();
	const cJSON *item;

	cJSON_ArrayForEach (item, list) {
		if (ctl_number(item, key) > 0 || ctl_number(item, or_key) > 0)
			(void)cJSON_AddItemToArray(some, cJSON_Duplicate(item, true));
	}
	return some;
}

static void print_counters(const cJSON *counters)
{
	const cJSON *counter;
	int width = 0;

	cJSON_ArrayForEach (counter, counters) {
		if (counter->valuedouble > 0)
			width = KVP_MAX(width, (int)strlen(counter->string));
	}
	if (width > 0)
		(void)puts("\nCOUNTERS");
	cJSON_ArrayForEach (counter, counters) {
		if (counter->valuedouble > 0)
			(void)printf("%-*s  %.0f\n", width, counter->string, counter->valuedouble);
	}
}

static void status_print(const cJSON *answer)
{
	static const struct ctl_column limits[] = {
		{ "LIMIT", "name", CTL_TEXT },       { "OF", "of", CTL_TEXT },
		{ "USED", "used", CTL_COUNT },       { "MAX", "max", CTL_COUNT },
		{ "REFUSED", "refused", CTL_COUNT },
	};
	static const struct ctl_column paths[] = {
		{ "SLOW PATH", "name", CTL_TEXT },
		{ "COUNT", "count", CTL_COUNT },
		{ "REASON", "reason", CTL_TEXT },
	};
	cJSON *used = only(ctl_member(answer, "limits"), "used", "refused");
	cJSON *slow = only(ctl_member(answer, "slow_paths"), "count", "count");

	status_head(answer);
	print_lanes(ctl_member(answer, "lanes"));
	print_gpus(answer);
	(void)putchar('\n');
	TABLE(limits, used, "limits: nothing used");
	if (cJSON_GetArraySize(slow) > 0) {
		(void)putchar('\n');
		TABLE(paths, slow, "");
	}
	print_counters(ctl_member(answer, "counters"));
	cJSON_Delete(used);
	cJSON_Delete(slow);
}

static void version_print(const cJSON *answer)
{
	(void)printf("kvpackd %s\n", ctl_text(answer, "version"));
}

/* ---- clients, pools, peers ----------------------------------------------------------------- */

static bool is_stalled(const cJSON *client)
{
	return ctl_number(client, "stalled_s") > 0;
}

static bool clients_wrong(const cJSON *answer)
{
	return any(ctl_member(answer, "clients"), is_stalled);
}

static void clients_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "ID", "id", CTL_COUNT },
		{ "NAME", "name", CTL_TEXT },
		{ "PROCESS", "pid", CTL_COUNT },
		{ "UID", "uid", CTL_COUNT },
		{ "AGE", "age_s", CTL_SECONDS },
		{ "POOLS", "pools", CTL_COUNT },
		{ "ROOMS", "rooms", CTL_COUNT },
		{ "REQUESTS", "requests", CTL_COUNT },
		{ "UNSENT", "unsent_bytes", CTL_BYTES },
		{ "STALLED", "stalled_s", CTL_SECONDS },
	};

	TABLE(columns, ctl_member(answer, "clients"), "no clients");
}

static void add_reaches(cJSON *all, const cJSON *pool)
{
	const cJSON *peer;

	cJSON_ArrayForEach (peer, ctl_member(pool, "peers")) {
		cJSON *row = cJSON_Duplicate(peer, true);

		(void)cJSON_AddNumberToObject(row, "pool", ctl_number(pool, "id"));
		(void)cJSON_AddItemToArray(all, row);
	}
}

/* Which other GPUs write into a pool, where a daemon has several. */
static void print_reaches(const cJSON *pools)
{
	static const struct ctl_column columns[] = {
		{ "POOL", "pool", CTL_COUNT },
		{ "FROM", "device", CTL_TEXT },
		{ "PEER ACCESS", "state", CTL_TEXT },
		{ "REASON", "reason", CTL_TEXT },
	};
	cJSON *all = cJSON_CreateArray();
	const cJSON *pool;

	cJSON_ArrayForEach (pool, pools) {
		add_reaches(all, pool);
	}
	if (cJSON_GetArraySize(all) > 0) {
		(void)putchar('\n');
		TABLE(columns, all, "");
	}
	cJSON_Delete(all);
}

static void pools_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "ID", "id", CTL_COUNT },
		{ "CLIENT", "client_name", CTL_TEXT },
		{ "LABEL", "label", CTL_TEXT },
		{ "STATE", "state", CTL_TEXT },
		{ "ENTRIES", "entries", CTL_COUNT },
		{ "GROUPS", "groups", CTL_COUNT },
		{ "BYTES", "bytes", CTL_BYTES },
		{ "ROOMS", "rooms", CTL_COUNT },
		{ "PAGES HELD", "pages_held", CTL_COUNT },
	};

	TABLE(columns, ctl_member(answer, "pools"), "no pools");
	print_reaches(ctl_member(answer, "pools"));
}

static bool is_peer_away(const cJSON *peer)
{
	const char *state = ctl_text(peer, "state");

	return strcmp(state, "up") != 0 && ctl_number(peer, "legs") > 0;
}

static bool peers_wrong(const cJSON *answer)
{
	return any(ctl_member(answer, "peers"), is_peer_away);
}

static void peers_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "ADDRESS", "address", CTL_TEXT },
		{ "NODE", "node", CTL_TEXT },
		{ "DIR", "direction", CTL_TEXT },
		{ "STATE", "state", CTL_TEXT },
		{ "AGE", "age_s", CTL_SECONDS },
		{ "HEARD", "last_heard_ms", CTL_MS },
		{ "LEGS", "legs", CTL_COUNT },
		{ "SENT", "bytes_sent", CTL_BYTES },
		{ "RECEIVED", "bytes_recv", CTL_BYTES },
		{ "UNSENT", "unsent_bytes", CTL_BYTES },
		{ "RETRY IN", "retry_in_s", CTL_SECONDS },
		{ "TRANSPORT", "transport", CTL_TEXT },
		{ "RAILS", "rails", CTL_TEXT },
		{ "REASON", "reason", CTL_TEXT },
	};
	static const struct ctl_column rails[] = {
		{ "LANE", "lane", CTL_TEXT },
		{ "RAIL", "number", CTL_COUNT },
		{ "DEVICE", "device", CTL_TEXT },
		{ "PORT", "port", CTL_COUNT },
		{ "STATE", "state", CTL_TEXT },
		{ "GID", "gid_index", CTL_COUNT },
		{ "ADDRESS", "address", CTL_TEXT },
		{ "MTU", "mtu", CTL_COUNT },
		{ "QPS UP", "qps_up", CTL_COUNT },
		{ "QPS CONNECTING", "qps_connecting", CTL_COUNT },
		{ "QPS IN ERROR", "qps_in_error", CTL_COUNT },
		{ "QPS LOST", "qps_lost", CTL_COUNT },
		{ "SENT", "bytes_sent", CTL_BYTES },
		{ "MESSAGES RESENT", "resent", CTL_COUNT },
		{ "CARD RESENDS", "hw_resends", CTL_COUNT },
		{ "CARD ERRORS", "hw_errors", CTL_COUNT },
	};

	TABLE(columns, ctl_member(answer, "peers"), "no peers");
	if (cJSON_GetArraySize(ctl_member(answer, "rails")) > 0) {
		(void)putchar('\n');
		TABLE(rails, ctl_member(answer, "rails"), "");
	}
}

/* ---- rooms --------------------------------------------------------------------------------- */

static void rooms_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "ROOM", "room", CTL_TEXT },        { "ROLE", "role", CTL_TEXT },
		{ "NO", "index", CTL_COUNT },        { "LABEL", "label", CTL_TEXT },
		{ "STATE", "state", CTL_TEXT },      { "AGE", "age_s", CTL_SECONDS },
		{ "TOKENS", "tokens", CTL_COUNT },   { "ARRIVED", "arrived", CTL_COUNT },
		{ "BYTES", "bytes", CTL_BYTES },     { "MODE", "mode", CTL_TEXT },
		{ "CLIENT", "client", CTL_TEXT },    { "PEERS", "peers", CTL_LIST },
		{ "WAITS", "waits_s", CTL_SECONDS }, { "FOR", "waits_for", CTL_TEXT },
		{ "VERDICT", "verdict", CTL_TEXT },  { "REASON", "reason", CTL_TEXT },
	};
	double ended = ctl_number(answer, "ended");

	TABLE(columns, ctl_member(answer, "rooms"), "no live rooms");
	if (ended > 0)
		(void)printf("\n%.0f ended rooms are remembered (rooms --all, room ID)\n", ended);
}

static void room_head(const cJSON *room)
{
	KVP_CLEANUP(kvp_freep) char *age = ctl_cell(room, "age_s", CTL_SECONDS);
	KVP_CLEANUP(kvp_freep) char *since = ctl_cell(room, "since_s", CTL_SECONDS);
	KVP_CLEANUP(kvp_freep) char *bytes = ctl_cell(room, "bytes", CTL_BYTES);
	KVP_CLEANUP(kvp_freep) char *waits = ctl_cell(room, "waits_s", CTL_SECONDS);
	KVP_CLEANUP(kvp_freep) char *mode = ctl_cell(room, "mode", CTL_TEXT);

	(void)printf("room %s %s %.0f: %s for %s, made %s ago", ctl_text(room, "room"),
		     ctl_text(room, "role"), ctl_number(room, "index"), ctl_text(room, "state"),
		     since, age);
	if (ctl_text(room, "label")[0])
		(void)printf(", label \"%s\"", ctl_text(room, "label"));
	(void)printf("\n  client %s, mode %s, tokens %.0f, ", ctl_text(room, "client"), mode,
		     ctl_number(room, "tokens"));
	if (strcmp(ctl_text(room, "role"), "send") == 0)
		(void)printf("chunks %.0f, source free %.0f, delivered %.0f, %s\n",
			     ctl_number(room, "chunks"), ctl_number(room, "source_free"),
			     ctl_number(room, "delivered"), bytes);
	else
		(void)printf("arrived %.0f, %s\n", ctl_number(room, "arrived"), bytes);
	if (ctl_number(room, "direct_pieces") > 0 || ctl_text(room, "fell_back")[0])
		(void)printf("  written directly: %.0f of %.0f pieces%s%s\n",
			     ctl_number(room, "direct_pieces"), ctl_number(room, "pieces"),
			     ctl_text(room, "fell_back")[0] ? "; others landed: " : "",
			     ctl_text(room, "fell_back"));
	if (ctl_text(room, "waits_for")[0] && !ctl_flag(room, "ended"))
		(void)printf("  waits, for %s now: %s\n", waits, ctl_text(room, "waits_for"));
	if (ctl_text(room, "reason")[0])
		(void)printf("  %s: %s%s\n", ctl_text(room, "status"), ctl_text(room, "reason"),
			     ctl_flag(room, "retry") ? " (a retry may work)" : "");
	if (ctl_text(room, "verdict")[0])
		(void)printf("  verdict: %s\n", ctl_text(room, "verdict"));
}

static void print_stages(const cJSON *stages)
{
	const cJSON *stage;
	const char *before = "  stages: ";

	cJSON_ArrayForEach (stage, stages) {
		KVP_CLEANUP(kvp_freep) char *at = ctl_cell(stage, "at_ms", CTL_MS);

		(void)printf("%s%s +%s", before, ctl_text(stage, "name"), at);
		before = ", ";
	}
	if (cJSON_GetArraySize(stages) > 0)
		(void)putchar('\n');
}

static void print_offers(const cJSON *offers)
{
	const cJSON *offer;

	cJSON_ArrayForEach (offer, offers) {
		KVP_CLEANUP(kvp_freep) char *since = ctl_cell(offer, "since_s", CTL_SECONDS);

		(void)printf("%s offers it to sender %.0f, from destination %.0f: no engine here "
			     "has opened it, for %s now\n",
			     ctl_text(offer, "peer"), ctl_number(offer, "sender"),
			     ctl_number(offer, "dest"), since);
	}
}

static void room_print(const cJSON *answer)
{
	static const struct ctl_column legs[] = {
		{ "SENDER", "sender", CTL_COUNT },     { "DEST", "dest", CTL_COUNT },
		{ "PEER", "peer", CTL_TEXT },          { "STATE", "state", CTL_TEXT },
		{ "MODE", "mode", CTL_TEXT },          { "GENERATION", "generation", CTL_TEXT },
		{ "PIECES", "pieces", CTL_COUNT },     { "BYTES", "bytes", CTL_BYTES },
		{ "RAW ROWS", "raw_rows", CTL_COUNT }, { "WAITS", "waits_s", CTL_SECONDS },
		{ "FOR", "waits_for", CTL_TEXT },
	};
	const cJSON *rooms = ctl_member(answer, "rooms"), *offers = ctl_member(answer, "offers");
	const cJSON *room;

	print_offers(offers);
	if (cJSON_GetArraySize(rooms) == 0 && cJSON_GetArraySize(offers) == 0)
		(void)puts("no such room, live or among the last that ended");
	cJSON_ArrayForEach (room, rooms) {
		room_head(room);
		print_stages(ctl_member(room, "stages"));
		if (cJSON_GetArraySize(ctl_member(room, "legs")) > 0)
			TABLE(legs, ctl_member(room, "legs"), "");
		if (room->next)
			(void)putchar('\n');
	}
}

static bool is_room_failed(const cJSON *room)
{
	const char *status = ctl_text(room, "status");

	return strcmp(ctl_text(room, "state"), "failed") == 0 ||
	       (status[0] && strcmp(status, "ok") != 0);
}

static bool room_wrong(const cJSON *answer)
{
	const cJSON *rooms = ctl_member(answer, "rooms");

	return (cJSON_GetArraySize(rooms) == 0 &&
		cJSON_GetArraySize(ctl_member(answer, "offers")) == 0) ||
	       any(rooms, is_room_failed);
}

static void waiting_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "COUNT", "count", CTL_COUNT },
		{ "OLDEST", "oldest_s", CTL_SECONDS },
		{ "WAITS FOR", "cause", CTL_TEXT },
		{ "EXAMPLE", "example", CTL_TEXT },
	};

	TABLE(columns, ctl_member(answer, "waiting"), "nothing waits");
}

static bool failures_wrong(const cJSON *answer)
{
	return cJSON_GetArraySize(ctl_member(answer, "failures")) > 0;
}

static void failures_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "AT", "at", CTL_TEXT },           { "AGO", "ago_s", CTL_SECONDS },
		{ "ROOM", "room", CTL_TEXT },       { "ROLE", "role", CTL_TEXT },
		{ "NO", "index", CTL_COUNT },       { "LABEL", "label", CTL_TEXT },
		{ "STATUS", "status", CTL_TEXT },   { "RETRY", "retry", CTL_FLAG },
		{ "VERDICT", "verdict", CTL_TEXT }, { "REASON", "reason", CTL_TEXT },
	};

	TABLE(columns, ctl_member(answer, "failures"), "no failures");
}

static void pins_print(const cJSON *answer)
{
	static const struct ctl_column columns[] = {
		{ "POOL", "pool", CTL_COUNT },      { "CLIENT", "client_name", CTL_TEXT },
		{ "ROOM", "room", CTL_TEXT },       { "DEST", "dest", CTL_COUNT },
		{ "LABEL", "label", CTL_TEXT },     { "PAGES", "pages", CTL_COUNT },
		{ "HELD", "since_s", CTL_SECONDS }, { "STATE", "state", CTL_TEXT },
	};

	TABLE(columns, ctl_member(answer, "pins"), "no pages are held");
}

/* ---- the list ------------------------------------------------------------------------------ */

static bool never_wrong(const cJSON *answer)
{
	(void)answer;
	return false;
}

static const struct ctl_command commands[] = {
	{ "status", "", "node, lanes, limits, slow paths, counters",
	  "Exits with 1 when the daemon is stopping, a lane is stuck (lane.stuck_after, or in one\n"
	  "call for 5 s), or a limit is reached. Limits, slow paths and counters that are 0 are\n"
	  "left out (not with --json).",
	  NULL, status_wrong, status_print },
	{ "clients", "", "connected engine processes",
	  "Exits with 1 when one does not read what the daemon sends (STALLED).", NULL,
	  clients_wrong, clients_print },
	{ "pools", "", "registered pools", "Exits with 0.", NULL, never_wrong, pools_print },
	{ "rooms", "[--all]", "live rooms, with --all ended ones too", "Exits with 0.", NULL,
	  never_wrong, rooms_print },
	{ "room", "ID | --label L", "one room in full, live or ended",
	  "ID is a number, decimal or 0x... Shows stages with times, what each end waits for and "
	  "since\n"
	  "when, and one verdict word: engine, us, peer or network. Exits with 1 when there is no "
	  "such\n"
	  "room or one has failed.",
	  NULL, room_wrong, room_print },
	{ "waiting", "", "what rooms wait for, by cause", "Exits with 0.", NULL, never_wrong,
	  waiting_print },
	{ "failures", "[--since TIME]", "failed rooms with reasons",
	  "TIME is a number with s, m, h or d: 10m. Exits with 1 when there is any.", NULL,
	  failures_wrong, failures_print },
	{ "pins", "", "pages that rooms hold, and whose", "Exits with 0.", NULL, never_wrong,
	  pins_print },
	{ "peers", "", "daemons of other nodes",
	  "Exits with 1 when one that rooms need is not connected.", NULL, peers_wrong,
	  peers_print },
	{ "lanes", "", "threads that move data, their rings and counters",
	  "Exits with 1 when a lane is stuck (lane.stuck_after, or in one call for 5 s).", NULL,
	  lanes_wrong, lanes_print },
	{ "drain", "[--reason TEXT]", "refuses new legs; what moves goes on to its end",
	  "Rooms that still wait for the other end fail with `stopping` and the text, new ones are "
	  "refused\n"
	  "with it, until undrain or a restart. Administrators only. Exits with 0.",
	  "status", never_wrong, drain_print },
	{ "undrain", "", "takes new legs again", "Administrators only. Exits with 0.", "status",
	  never_wrong, drain_print },
	{ "version", "", "versions of kvpackctl and of the daemons",
	  "Exits with 0, also without a daemon.", NULL, never_wrong, version_print },
};

const struct ctl_command *ctl_command_find(const char *name)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(commands); i++) {
		if (strcmp(commands[i].name, name) == 0)
			return &commands[i];
	}
	return NULL;
}

const struct ctl_command *ctl_command_at(unsigned i)
{
	return i < KVP_ARRAY_SIZE(commands) ? &commands[i] : NULL;
}
