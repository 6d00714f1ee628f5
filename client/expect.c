/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/lib.h"

#define CHECK_COUNT(client, what, field, max)                                                 \
	((what)->field > (max) ? kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,               \
					   #field " is %u, at most %u", (what)->field, (max)) \
			       : 0)

/* Arrays that a message points to, for the time of packing it. */
struct expect_parts {
	Kvp__Side sides[KVP_LIMIT_GROUPS], *side_list[KVP_LIMIT_GROUPS];
	Kvp__ExpectSender senders[KVP_MAX_SENDERS], *sender_list[KVP_MAX_SENDERS];
	Kvp__ExpectSegment segments[KVP_LIMIT_SEGMENTS], *segment_list[KVP_LIMIT_SEGMENTS];
	Kvp__Timers timers;
};

int kvpl_pages_make(struct kvp_client *client, const uint32_t *pages, uint32_t n_pages,
		    uint32_t *list, struct kvpl_packets *packets)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Pages body = KVP__PAGES__INIT;

	*list = 0;
	if (n_pages == 0)
		return 0;
	if (!pages)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "pages is NULL with n_pages %u", n_pages);
	body.list = client->next_list++;
	if (client->next_list == 0)
		client->next_list = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_PAGES;
	msg.pages = &body;
	while (body.offset < n_pages) {
		int r;

		body.pages = (uint32_t *)pages + body.offset;
		body.n_pages = KVP_MIN(n_pages - body.offset, KVP_LIMIT_LIST_PAGES);
		r = kvpl_packet_make(client, &msg, NULL, 0, packets);
		if (r < 0)
			return r;
		body.offset += (uint32_t)body.n_pages;
	}
	*list = body.list;
	return 0;
}

static void key_fill(ProtobufCBinaryData *to, const void *key)
{
	to->data = (uint8_t *)key;
	to->len = key ? KVP_KEY_BYTES : 0;
}

/* NULL when none is set, so that it costs nothing on the wire. */
static Kvp__Timers *timers_fill(Kvp__Timers *to, const struct kvp_timers *from)
{
	kvp__timers__init(to);
	to->offer_ms = from->offer_ms;
	to->open_ms = from->open_ms;
	to->progress_ms = from->progress_ms;
	to->fence_ms = from->fence_ms;
	to->lease_ms = from->lease_ms;
	return protobuf_c_message_get_packed_size(&to->base) ? to : NULL;
}

static void side_fill(Kvp__Side *to, const struct kvp_side_desc *from)
{
	kvp__side__init(to);
	to->group = from->group;
	to->page = from->page;
	to->dcp_size = from->dcp_size;
	to->dcp_rank = from->dcp_rank;
	to->interleave = from->interleave;
	to->pos0 = from->pos0;
	to->first = from->first;
}

/* Sides with their page lists, which become packets of their own. */
static int expect_sides(struct kvp_client *client, const struct kvp_expect *expect,
			struct expect_parts *parts, struct kvpl_packets *packets)
{
	for (uint32_t i = 0; i < expect->n_sides; i++) {
		int r;

		side_fill(&parts->sides[i], &expect->sides[i]);
		parts->side_list[i] = &parts->sides[i];
		r = kvpl_pages_make(client, expect->sides[i].pages, expect->sides[i].n_pages,
				    &parts->sides[i].list, packets);
		if (r < 0)
			return r;
	}
	return 0;
}

static void expect_lists(const struct kvp_expect *expect, struct expect_parts *parts)
{
	for (uint32_t i = 0; i < expect->n_senders; i++) {
		Kvp__ExpectSender *to = &parts->senders[i];

		kvp__expect_sender__init(to);
		if (expect->senders[i].address)
			to->address = (char *)expect->senders[i].address;
		to->sender = expect->senders[i].sender;
		to->n_dests = expect->senders[i].n_dests;
		to->role = (Kvp__SenderRole)expect->senders[i].role;
		parts->sender_list[i] = to;
	}
	for (uint32_t i = 0; i < expect->n_segments; i++) {
		Kvp__ExpectSegment *to = &parts->segments[i];

		kvp__expect_segment__init(to);
		to->id = expect->segments[i].id;
		to->entry = expect->segments[i].entry;
		to->offset = expect->segments[i].offset;
		to->bytes = expect->segments[i].bytes;
		parts->segment_list[i] = to;
	}
}

static int expect_pack(struct kvp_client *client, const struct kvp_expect *expect, uint64_t handle,
		       struct kvpl_packets *packets)
{
	KVP_CLEANUP(kvp_freep) struct expect_parts *parts = malloc(sizeof(*parts));
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Expect body = KVP__EXPECT__INIT;
	int r;

	if (!parts)
		return -ENOMEM;
	r = expect_sides(client, expect, parts, packets);
	if (r < 0)
		return r;
	expect_lists(expect, parts);
	body.handle = handle;
	body.room = expect->room;
	key_fill(&body.key, expect->key);
	body.dest = expect->dest;
	body.pool = expect->pool;
	body.sides = parts->side_list;
	body.n_sides = expect->n_sides;
	body.prefix = expect->prefix;
	body.end = expect->end;
	body.segments = parts->segment_list;
	body.n_segments = expect->n_segments;
	body.meta_from = expect->meta_from;
	body.senders = parts->sender_list;
	body.n_senders = expect->n_senders;
	if (expect->label)
		body.label = (char *)expect->label;
	body.timers = timers_fill(&parts->timers, &expect->timers);
	msg.body_case = KVP__CLIENT_MSG__BODY_EXPECT;
	msg.expect = &body;
	return kvpl_packet_make(client, &msg, NULL, 0, packets);
}

/* Sends what announces a room and keeps a copy for repeating it. The room goes when that fails. */
static int room_start(struct kvp_client *client, struct kvpl_room *room,
		      struct kvpl_packets *packets, kvp_done_fn *done, void *arg, kvp_room_id *ret)
{
	uint64_t id = room->node.id;
	struct kvpl_reply_to to = { .kind = KVPL_ROOM, .object = id, .done = done, .arg = arg };
	int r = kvpl_packets_copy(&room->packets, packets);

	if (r == 0)
		r = kvpl_request_start(client, packets, &to);
	else
		kvpl_packets_fini(packets);
	if (r == 0) {
		*ret = id;
		return 0;
	}
	if (r == -ETIMEDOUT)
		kvp_room_forget(client, id); /* the answer may only be late */
	else if (kvpl_room_find(client, id))
		kvpl_room_destroy(client, kvpl_room_find(client, id));
	return r;
}

int kvp_expect(struct kvp_client *client, const struct kvp_expect *expect, kvp_done_fn *done,
	       void *arg, kvp_room_id *id)
{
	struct kvp_expect own;
	struct kvpl_packets packets;
	struct kvpl_room *room;
	int r = kvpl_check_process(client);

	if (r == 0 && kvpl_copy_args(&own, sizeof(own), expect, sizeof(size_t)) < 0)
		r = kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID, "expect.size is not set");
	if (r == 0)
		r = CHECK_COUNT(client, &own, n_sides, KVP_LIMIT_GROUPS) ?:
		    CHECK_COUNT(client, &own, n_segments, KVP_LIMIT_SEGMENTS) ?:
		    CHECK_COUNT(client, &own, n_senders, KVP_MAX_SENDERS);
	if (r)
		return r;
	room = kvpl_room_create(client, true);
	if (!room)
		return -ENOMEM;
	room->start = own.prefix;
	room->state.arrived = own.prefix;
	kvpl_packets_init(&packets);
	r = expect_pack(client, &own, room->node.id, &packets);
	if (r < 0) {
		kvpl_packets_fini(&packets);
		kvpl_room_destroy(client, room);
		return r;
	}
	return room_start(client, room, &packets, done, arg, id);
}

static int open_pack(struct kvp_client *client, const struct kvp_open *open, uint64_t handle,
		     struct kvpl_packets *packets)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Open body = KVP__OPEN__INIT;
	Kvp__Side sides[KVP_LIMIT_GROUPS], *side_list[KVP_LIMIT_GROUPS];
	Kvp__Timers timers;

	for (uint32_t i = 0; i < open->n_sides; i++) {
		side_fill(&sides[i], &open->sides[i]);
		sides[i].pos0 = sides[i].first = 0; /* come with each chunk */
		side_list[i] = &sides[i];
	}
	body.handle = handle;
	body.room = open->room;
	key_fill(&body.key, open->key);
	body.sender = open->sender;
	body.pool = open->pool;
	body.sides = side_list;
	body.n_sides = open->n_sides;
	if (open->entry_mask) {
		body.entry_mask.data = (uint8_t *)open->entry_mask;
		body.entry_mask.len = open->mask_bytes;
	}
	if (open->label)
		body.label = (char *)open->label;
	body.timers = timers_fill(&timers, &open->timers);
	msg.body_case = KVP__CLIENT_MSG__BODY_OPEN;
	msg.open = &body;
	return kvpl_packet_make(client, &msg, NULL, 0, packets);
}

int kvp_open(struct kvp_client *client, const struct kvp_open *open, kvp_done_fn *done, void *arg,
	     kvp_room_id *id)
{
	struct kvp_open own;
	struct kvpl_packets packets;
	struct kvpl_room *room;
	int r = kvpl_check_process(client);

	if (r == 0 && kvpl_copy_args(&own, sizeof(own), open, sizeof(size_t)) < 0)
		r = kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID, "open.size is not set");
	if (r == 0)
		r = CHECK_COUNT(client, &own, n_sides, KVP_LIMIT_GROUPS);
	if (r)
		return r;
	room = kvpl_room_create(client, false);
	if (!room)
		return -ENOMEM;
	kvpl_packets_init(&packets);
	r = open_pack(client, &own, room->node.id, &packets);
	if (r < 0) {
		kvpl_packets_fini(&packets);
		kvpl_room_destroy(client, room);
		return r;
	}
	return room_start(client, room, &packets, done, arg, id);
}

/* Renew and decline: about a sender's open, before a room exists here. */
static int ask(struct kvp_client *client, Kvp__ClientMsg *msg, kvp_done_fn *done, void *arg)
{
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN, .done = done, .arg = arg };
	struct kvpl_packets packets;
	int r = kvpl_check_process(client);

	if (r < 0)
		return r;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, msg, NULL, 0, &packets);
	return r < 0 ? r : kvpl_request_start(client, &packets, &to);
}

/* The public signature is what it is. NOLINTNEXTLINE(readability-function-size) */
int kvp_renew(struct kvp_client *client, const char *address, uint64_t room, const void *key,
	      uint32_t sender, uint32_t lease_ms, kvp_done_fn *done, void *arg)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Renew body = KVP__RENEW__INIT;

	body.address = (char *)(address ?: "");
	body.room = room;
	key_fill(&body.key, key);
	body.sender = sender;
	body.lease_ms = lease_ms;
	msg.body_case = KVP__CLIENT_MSG__BODY_RENEW;
	msg.renew = &body;
	return ask(client, &msg, done, arg);
}

/* NOLINTNEXTLINE(readability-function-size) */
int kvp_decline(struct kvp_client *client, const char *address, uint64_t room, const void *key,
		uint32_t sender, const char *reason, kvp_done_fn *done, void *arg)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Decline body = KVP__DECLINE__INIT;

	body.address = (char *)(address ?: "");
	body.room = room;
	key_fill(&body.key, key);
	body.sender = sender;
	body.reason = (char *)(reason ?: "");
	msg.body_case = KVP__CLIENT_MSG__BODY_DECLINE;
	msg.decline = &body;
	return ask(client, &msg, done, arg);
}
