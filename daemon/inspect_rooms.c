/* SPDX-License-Identifier: Apache-2.0 */

/* Rooms, live and ended: what state they are in, what they wait for, how they failed. */

#include "daemon/inspect_look.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/msg.h"
#include "proto/util.h"

#define MS UINT64_C(1000000)
#define LEGS_MAX 4096u

static bool may_see(const struct kvp_inspect *ask, const struct kvp_room_view *view)
{
	return ask->admin || view->uid == ask->uid;
}

static const char *role(const struct kvp_room_view *view)
{
	return view->is_dest ? "dest" : "send";
}

static void add_leg(const struct kvp_inspect *ask, cJSON *list, const struct kvp_room_view *view,
		    const struct kvp_room_leg_view *leg)
{
	cJSON *object = cJSON_CreateObject();

	kvp_inspect_num(object, "sender", leg->sender);
	kvp_inspect_num(object, "dest", leg->dest);
	(void)cJSON_AddStringToObject(object, "peer", leg->peer);
	(void)cJSON_AddStringToObject(object, "state", leg->state);
	(void)cJSON_AddStringToObject(object, "mode", leg->mode);
	(void)cJSON_AddStringToObject(object, "checksum", leg->checksum);
	kvp_inspect_hex(object, "generation", leg->generation);
	(void)cJSON_AddStringToObject(object, "waits_for", leg->waits_text);
	if (leg->waits_text[0])
		kvp_inspect_age(ask, object, "waits_s", leg->waits_since_ns);
	/* The lane counts by room: with one leg that is the leg's. */
	if (view->n_legs == 1) {
		kvp_inspect_num(object, "pieces", view->pieces);
		kvp_inspect_num(object, "bytes", view->bytes);
		kvp_inspect_num(object, "raw_rows", view->raw_rows);
	}
	kvp_inspect_append(list, object);
}

static struct kvp_room_leg_view *get_legs(const struct kvp_inspect *ask,
					  const struct kvp_room_view *view, uint32_t *n)
{
	struct kvp_room_leg_view *legs;

	*n = 0;
	if (view->n_legs == 0 || view->ended_wall_ms)
		return NULL;
	legs = calloc(KVP_MIN(view->n_legs, LEGS_MAX), sizeof(*legs));
	if (legs)
		*n = kvp_room_legs(ask->core->rooms, view, legs, KVP_MIN(view->n_legs, LEGS_MAX));
	return legs;
}

static bool add_name_once(cJSON *list, const char *name)
{
	const cJSON *had;

	cJSON_ArrayForEach (had, list) {
		if (strcmp(had->valuestring, name) == 0)
			return false;
	}
	return cJSON_AddItemToArray(list, cJSON_CreateString(name));
}

static void add_legs(const struct kvp_look *look, cJSON *object, const struct kvp_room_view *view)
{
	KVP_CLEANUP(kvp_freep) struct kvp_room_leg_view *legs = NULL;
	cJSON *peers = cJSON_AddArrayToObject(object, "peers");
	cJSON *list = look->detail ? cJSON_AddArrayToObject(object, "legs") : NULL;
	uint32_t n;

	legs = get_legs(&look->ask, view, &n);
	for (uint32_t i = 0; i < n; i++) {
		(void)add_name_once(peers, legs[i].peer); /* false: has it */
		if (list)
			add_leg(&look->ask, list, view, &legs[i]);
	}
}

static void add_stage(cJSON *list, const char *name, uint64_t from_ns, uint64_t at_ns)
{
	cJSON *stage;

	if (!at_ns)
		return;
	stage = cJSON_CreateObject();
	(void)cJSON_AddStringToObject(stage, "name", name);
	(void)cJSON_AddNumberToObject(stage, "at_ms",
				      at_ns > from_ns ? (double)(at_ns - from_ns) / 1e6 : 0.0);
	/* CLOCK_MONOTONIC, for those who compare with times of their own on this machine. */
	(void)cJSON_AddNumberToObject(stage, "monotonic_us", (double)at_ns / 1e3);
	kvp_inspect_append(list, stage);
}

static void add_stages(cJSON *object, const struct kvp_room_view *view)
{
	cJSON *list = cJSON_AddArrayToObject(object, "stages");
	const uint64_t from = view->created_ns;

	add_stage(list, "created", from, from);
	add_stage(list, "offered", from, view->offered_ns);
	add_stage(list, "accepted", from, view->accepted_ns);
	add_stage(list, "first chunk", from, view->first_chunk_ns);
	add_stage(list, "first fence", from, view->first_fence_ns);
	add_stage(list, "first want", from, view->first_want_ns);
	add_stage(list, "first grant", from, view->first_grant_ns);
	add_stage(list, "first packed", from, view->first_packed_ns);
	add_stage(list, "first data", from, view->first_data_ns);
	add_stage(list, "first unpack", from, view->first_unpack_ns);
	add_stage(list, "last landed", from, view->last_landed_ns);
	add_stage(list, "complete", from, view->complete_ns);
	add_stage(list, "failed", from, view->failed_ns);
	add_stage(list, "released", from, view->released_ns);
}

/* What everybody may know of a room. */
static cJSON *outline(const struct kvp_inspect *ask, const struct kvp_room_view *view)
{
	cJSON *object = cJSON_CreateObject();

	(void)cJSON_AddStringToObject(object, "role", role(view));
	(void)cJSON_AddStringToObject(object, "state",
				      kvp_room_phase_name((enum kvp_room_phase)view->state));
	kvp_inspect_age(ask, object, "age_s", view->created_ns);
	kvp_inspect_age(ask, object, "since_s", view->state_since_ns);
	(void)cJSON_AddBoolToObject(object, "ended", view->ended_wall_ms != 0);
	return object;
}

static void add_progress(const struct kvp_inspect *ask, cJSON *object,
			 const struct kvp_room_view *view)
{
	kvp_inspect_num(object, "tokens", view->end);
	kvp_inspect_num(object, "prefix", view->prefix);
	kvp_inspect_num(object, "arrived", view->arrived);
	kvp_inspect_num(object, "chunks", view->chunks);
	kvp_inspect_num(object, "source_free", view->source_free);
	kvp_inspect_num(object, "delivered", view->delivered);
	kvp_inspect_num(object, "pieces", view->pieces);
	kvp_inspect_num(object, "bytes", view->bytes);
	kvp_inspect_num(object, "raw_rows", view->raw_rows);
	(void)cJSON_AddNumberToObject(object, "gather_ms", (double)view->gather_ns / 1e6);
	(void)cJSON_AddStringToObject(object, "waits_for",
				      view->waits_text ? view->waits_text : "");
	kvp_inspect_age(ask, object, "waits_s",
			view->waits_text && view->waits_text[0] ? view->waits_since_ns : 0);
}

static cJSON *room_object(const struct kvp_look *look, const struct kvp_room_view *view)
{
	const struct kvp_inspect *ask = &look->ask;
	cJSON *object = outline(ask, view);

	if (!may_see(ask, view))
		return object;
	kvp_inspect_hex(object, "room", view->room);
	kvp_inspect_num(object, "index", view->index);
	(void)cJSON_AddStringToObject(object, "label", view->label);
	(void)cJSON_AddStringToObject(object, "client", view->client);
	kvp_inspect_num(object, "pool", view->pool_client_id);
	add_progress(ask, object, view);
	(void)cJSON_AddStringToObject(object, "mode", view->mode ? view->mode : "");
	kvp_inspect_num(object, "direct_pieces", view->direct_pieces);
	kvp_inspect_num(object, "direct_bytes", view->direct_bytes);
	(void)cJSON_AddStringToObject(object, "fell_back", view->fell_back ? view->fell_back : "");
	(void)cJSON_AddStringToObject(object, "verdict", view->verdict ? view->verdict : "");
	(void)cJSON_AddStringToObject(object, "status",
				      kvp_status_name((enum kvp_status)view->status));
	(void)cJSON_AddStringToObject(object, "reason", view->reason);
	(void)cJSON_AddBoolToObject(object, "retry", view->retry);
	(void)cJSON_AddBoolToObject(object, "released", view->released);
	kvp_inspect_num(object, "pages_held", view->pages_held);
	add_legs(look, object, view);
	if (look->detail)
		add_stages(object, view);
	return object;
}

static bool rooms_item(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item)
{
	*item = room_object(look, view);
	return *item;
}

/* How many ended ones are remembered. */
static void rooms_close(struct kvp_look *look)
{
	struct kvp_rooms_stats stats;
	char text[48];

	kvp_rooms_stats(look->ask.core->rooms, &stats);
	(void)snprintf(text, sizeof(text), "],\"ended\":%u}", stats.remembered); /* fits */
	kvp_look_text(look, text, strlen(text));
}

static void list_close(struct kvp_look *look)
{
	kvp_look_text(look, "]}", 2);
}

/* ---- one room */

static bool parse_number(const char *text, uint64_t *value)
{
	char *end;

	errno = 0;
	*value = strtoull(text, &end, 0);
	return text[0] >= '0' && text[0] <= '9' && *end == 0 && errno == 0;
}

static bool room_parse(struct kvp_look *look)
{
	const struct kvp_inspect *ask = &look->ask;

	look->detail = true;
	if (strncmp(ask->arg, "label:", 6) == 0) {
		look->label = ask->arg + 6;
		return true;
	}
	if (parse_number(ask->arg, &look->room))
		return true;
	(void)snprintf(ask->err, ask->err_bytes,
		       "inspect.arg is \"%.40s\": a room is named by its number or as label:TEXT",
		       ask->arg);
	return false;
}

/* With what other nodes offer of it. */
static void room_close(struct kvp_look *look)
{
	cJSON *offers = look->label ? NULL : kvp_inspect_parked(&look->ask, look->room);
	char *text = offers ? cJSON_PrintUnformatted(offers) : NULL;

	if (!look->label && !text)
		look->failed = true;
	kvp_look_text(look, "]", 1);
	if (text) {
		kvp_look_text(look, ",\"offers\":", 10);
		kvp_look_text(look, text, strlen(text));
	}
	kvp_look_text(look, "}", 1);
	cJSON_free(text);
	cJSON_Delete(offers);
}

static bool room_item(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item)
{
	if (!may_see(&look->ask, view) ||
	    (look->label ? strcmp(view->label, look->label) != 0 : view->room != look->room))
		return true;
	return rooms_item(look, view, item);
}

/* ---- waiting */

/* NULL: more texts than there are. */
static struct kvp_look_cause *find_cause(struct kvp_look *look, const char *text)
{
	for (uint32_t i = 0; i < look->n_causes; i++) {
		if (strcmp(look->causes[i].text, text) == 0)
			return &look->causes[i];
	}
	if (look->n_causes == KVP_LOOK_CAUSES)
		return NULL;
	look->causes[look->n_causes].text = text;
	return &look->causes[look->n_causes++];
}

static bool waiting_item(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item)
{
	struct kvp_look_cause *cause;

	(void)item; /* one for each cause, at the end */
	if (!view->waits_text || !view->waits_text[0] || view->waits == KVP_WAITS_NOTHING)
		return true;
	cause = find_cause(look, view->waits_text);
	if (!cause)
		return true;
	cause->count++;
	if (cause->count > 1 && view->waits_since_ns >= cause->oldest_ns)
		return true;
	cause->oldest_ns = view->waits_since_ns;
	if (may_see(&look->ask, view))
		(void)snprintf(cause->example, sizeof(cause->example), "0x%" PRIx64 " %s %u %.40s",
			       view->room, role(view), view->index, view->label); /* fits */
	else
		cause->example[0] = 0;
	return true;
}

static void waiting_close(struct kvp_look *look)
{
	cJSON *offers = NULL;

	for (uint32_t i = 0; i < look->n_causes; i++) {
		const struct kvp_look_cause *cause = &look->causes[i];
		cJSON *object = cJSON_CreateObject();

		(void)cJSON_AddStringToObject(object, "cause", cause->text);
		kvp_inspect_num(object, "count", cause->count);
		kvp_inspect_age(&look->ask, object, "oldest_s", cause->oldest_ns);
		(void)cJSON_AddStringToObject(object, "example", cause->example);
		kvp_look_item(look, object);
	}
	if (!kvp_inspect_parked_cause(&look->ask, &offers))
		look->failed = true;
	else if (offers)
		kvp_look_item(look, offers);
	list_close(look);
}

/* ---- failures */

/* "2026-01-31T12:00:00.000Z" of milliseconds since 1970. */
static void add_time(cJSON *object, const char *name, uint64_t wall_ms)
{
	time_t secs = (time_t)(wall_ms / 1000);
	char date[32], text[48];
	struct tm tm;

	if (!gmtime_r(&secs, &tm) || strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &tm) == 0)
		return;
	(void)snprintf(text, sizeof(text), "%s.%03uZ", date, (unsigned)(wall_ms % 1000)); /* fits */
	(void)cJSON_AddStringToObject(object, name, text);
}

static bool failures_item(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item)
{
	const struct kvp_inspect *ask = &look->ask;
	uint64_t ago_ns = ask->now_ns > view->failed_ns ? ask->now_ns - view->failed_ns : 0;
	struct timespec wall;
	cJSON *object;

	if (!view->failed || ago_ns / 1000000000 > look->since_s)
		return true;
	(void)clock_gettime(CLOCK_REALTIME, &wall); /* cannot fail with this clock */
	object = cJSON_CreateObject();
	add_time(object, "at",
		 (uint64_t)wall.tv_sec * 1000 + (uint64_t)wall.tv_nsec / MS - ago_ns / MS);
	(void)cJSON_AddNumberToObject(object, "ago_s", (double)ago_ns / 1e9);
	(void)cJSON_AddStringToObject(object, "role", role(view));
	(void)cJSON_AddStringToObject(object, "status",
				      kvp_status_name((enum kvp_status)view->status));
	(void)cJSON_AddBoolToObject(object, "retry", view->retry);
	if (may_see(ask, view)) {
		kvp_inspect_hex(object, "room", view->room);
		kvp_inspect_num(object, "index", view->index);
		(void)cJSON_AddStringToObject(object, "label", view->label);
		(void)cJSON_AddStringToObject(object, "client", view->client);
		(void)cJSON_AddStringToObject(object, "reason", view->reason);
		(void)cJSON_AddStringToObject(object, "verdict",
					      view->verdict ? view->verdict : "");
	}
	*item = object;
	return object;
}

static bool failures_parse(struct kvp_look *look)
{
	const struct kvp_inspect *ask = &look->ask;

	look->since_s = UINT64_MAX;
	if (!ask->arg[0] || parse_number(ask->arg, &look->since_s))
		return true;
	(void)snprintf(ask->err, ask->err_bytes,
		       "inspect.arg is \"%.40s\": failures takes a number of seconds", ask->arg);
	return false;
}

/* ---- pins */

static bool pins_item(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item)
{
	const struct kvp_inspect *ask = &look->ask;
	cJSON *object;

	if (!view->is_dest || view->pages_held == 0)
		return true;
	object = cJSON_CreateObject();
	kvp_inspect_num(object, "pages", view->pages_held);
	kvp_inspect_age(ask, object, "since_s", view->created_ns);
	(void)cJSON_AddStringToObject(object, "state",
				      kvp_room_phase_name((enum kvp_room_phase)view->state));
	if (may_see(ask, view)) {
		kvp_inspect_num(object, "pool", view->pool_client_id);
		(void)cJSON_AddStringToObject(object, "client_name", view->client);
		kvp_inspect_hex(object, "room", view->room);
		kvp_inspect_num(object, "dest", view->index);
		(void)cJSON_AddStringToObject(object, "label", view->label);
	}
	*item = object;
	return object;
}

/* ---- all */

static const struct kvp_look_kind kinds[] = {
	{ "rooms", "rooms", KVP_LOOK_ASKED, NULL, rooms_item, rooms_close },
	{ "room", "rooms", KVP_LOOK_ENDED, room_parse, room_item, room_close },
	{ "waiting", "waiting", KVP_LOOK_LIVE, NULL, waiting_item, waiting_close },
	{ "failures", "failures", KVP_LOOK_ENDED, failures_parse, failures_item, list_close },
	{ "pins", "pins", KVP_LOOK_LIVE, NULL, pins_item, list_close },
};

const struct kvp_look_kind *kvp_look_kind(const char *name)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(kinds); i++) {
		if (strcmp(kinds[i].name, name) == 0)
			return &kinds[i];
	}
	return NULL;
}
