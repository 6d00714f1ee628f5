/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/lib.h"

struct submit_parts {
	Kvp__ChunkSide sides[KVP_LIMIT_GROUPS], *side_list[KVP_LIMIT_GROUPS];
	Kvp__SubmitSegment segments[KVP_LIMIT_SEGMENTS], *segment_list[KVP_LIMIT_SEGMENTS];
};

static int submit_sides(struct kvp_client *client, const struct kvp_chunk *chunk,
			struct submit_parts *parts, struct kvpl_packets *packets)
{
	for (uint32_t i = 0; i < chunk->n_sides; i++) {
		Kvp__ChunkSide *to = &parts->sides[i];
		int r;

		kvp__chunk_side__init(to);
		to->group = chunk->sides[i].group;
		to->pos0 = chunk->sides[i].pos0;
		parts->side_list[i] = to;
		r = kvpl_pages_make(client, chunk->sides[i].pages, chunk->sides[i].n_pages,
				    &to->list, packets);
		if (r < 0)
			return r;
	}
	return 0;
}

static void submit_segments(const struct kvp_chunk *chunk, struct submit_parts *parts)
{
	for (uint32_t i = 0; i < chunk->n_segments; i++) {
		Kvp__SubmitSegment *to = &parts->segments[i];

		kvp__submit_segment__init(to);
		to->id = chunk->segments[i].id;
		to->entry = chunk->segments[i].entry;
		to->offset = chunk->segments[i].offset;
		to->bytes = chunk->segments[i].bytes;
		parts->segment_list[i] = to;
	}
}

static int submit_pack(struct kvp_client *client, const struct kvp_chunk *chunk, uint64_t handle,
		       uint32_t seq, struct kvpl_packets *packets)
{
	KVP_CLEANUP(kvp_freep) struct submit_parts *parts = malloc(sizeof(*parts));
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Submit body = KVP__SUBMIT__INIT;
	int r;

	if (!parts)
		return -ENOMEM;
	r = submit_sides(client, chunk, parts, packets);
	if (r < 0)
		return r;
	submit_segments(chunk, parts);
	body.handle = handle;
	body.seq = seq;
	body.start = chunk->start;
	body.tokens = chunk->tokens;
	body.sides = parts->side_list;
	body.n_sides = chunk->n_sides;
	if (chunk->entry_set) {
		body.entry_set.data = (uint8_t *)chunk->entry_set;
		body.entry_set.len = chunk->set_bytes;
	}
	if (chunk->fence) {
		body.fence = chunk->fence->id;
		body.fence_word = chunk->fence_word;
		body.fence_value = chunk->fence_value;
	}
	body.segments = parts->segment_list;
	body.n_segments = chunk->n_segments;
	body.last = chunk->last != 0;
	if (chunk->meta) {
		body.meta.data = (uint8_t *)chunk->meta;
		body.meta.len = chunk->meta_bytes;
	}
	msg.body_case = KVP__CLIENT_MSG__BODY_SUBMIT;
	msg.submit = &body;
	return kvpl_packet_make(client, &msg, NULL, 0, packets);
}

static int chunk_check(struct kvp_client *client, const struct kvp_chunk *chunk)
{
	if (chunk->n_sides > KVP_LIMIT_GROUPS)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "submit.n_sides is %u, at most %u", chunk->n_sides,
				 KVP_LIMIT_GROUPS);
	if (chunk->n_segments > KVP_LIMIT_SEGMENTS)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "submit.n_segments is %u, at most %u", chunk->n_segments,
				 KVP_LIMIT_SEGMENTS);
	if (chunk->fence &&
	    (chunk->fence->client != client || chunk->fence_word >= chunk->fence->n_words))
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "submit.fence_word is %u: not of a fence of this client, or past "
				 "its last word",
				 chunk->fence_word);
	return 0;
}

/* A sender that can take chunks now. With wait it waits for a repeated open. */
static int sender_find(struct kvp_client *client, kvp_room_id id, bool wait, struct kvpl_room **out)
{
	int64_t deadline = kvpl_now_ms() + client->timeout_ms;

	for (;;) {
		struct kvpl_room *room = kvpl_room_find(client, id);

		if (!room || room->is_dest)
			return kvpl_fail(client, -ENOENT, KVP_STATUS_NOT_FOUND,
					 "room %llu is no sender of this client",
					 (unsigned long long)id);
		if (room->state.failed)
			return kvpl_fail(client, -EREMOTEIO, room->state.status,
					 "room has failed: %s", room->state.reason);
		if (room->state.complete)
			return kvpl_fail(client, -EREMOTEIO, KVP_STATUS_ORDER, "room is done");
		if (!room->to_repeat) {
			*out = room;
			return 0;
		}
		if (!wait || kvpl_conn_turn(client, deadline) == -ETIMEDOUT)
			return kvpl_fail(client, -ENOTCONN, KVP_STATUS_DAEMON_LOST,
					 "the room waits for a new daemon");
	}
}

/* The number is free again when the chunk was not sent; a refusal has seen to it already. */
static void submit_undo(struct kvp_client *client, const struct kvpl_reply_to *to)
{
	struct kvpl_room *room = kvpl_room_find(client, to->object);

	if (room && room->epoch == to->epoch && room->next_seq == to->seq + 1)
		room->next_seq = to->seq;
}

int kvp_submit(struct kvp_client *client, kvp_room_id id, const struct kvp_chunk *chunk,
	       kvp_done_fn *done, void *arg, uint32_t *seq)
{
	struct kvpl_reply_to to = { .kind = KVPL_SUBMIT, .object = id, .done = done, .arg = arg };
	struct kvp_chunk own;
	struct kvpl_packets packets;
	struct kvpl_room *room = NULL;
	int r = kvpl_check_process(client);

	if (r == 0 && kvpl_copy_args(&own, sizeof(own), chunk, sizeof(size_t)) < 0)
		r = kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID, "submit.size is not set");
	if (r == 0)
		r = chunk_check(client, &own);
	if (r == 0)
		r = sender_find(client, id, !done, &room);
	if (r)
		return r;
	to.seq = room->next_seq;
	to.epoch = room->epoch;
	kvpl_packets_init(&packets);
	r = submit_pack(client, &own, id, to.seq, &packets);
	if (r < 0) {
		kvpl_packets_fini(&packets);
		return r;
	}
	room->next_seq++; /* before a callback can submit the next one */
	r = kvpl_request_start(client, &packets, &to);
	if (r < 0 && r != -ETIMEDOUT)
		submit_undo(client, &to);
	if (r == 0 && seq)
		*seq = to.seq;
	return r;
}

int kvp_recall(struct kvp_client *client, kvp_room_id id, uint32_t seq, uint32_t *from)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Recall body = KVP__RECALL__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_answer answer = { .fd = -1 };
	struct kvpl_packets packets;
	struct kvpl_room *room = NULL;
	int r = kvpl_check_process(client);

	if (r == 0)
		r = sender_find(client, id, true, &room);
	if (r)
		return r;
	body.handle = id;
	body.seq = seq;
	msg.body_case = KVP__CLIENT_MSG__BODY_RECALL;
	msg.recall = &body;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, &msg, NULL, 0, &packets);
	if (r == 0)
		r = kvpl_request_call(client, &packets, &to, &answer);
	kvp_closep(&answer.fd);
	if (r < 0)
		return r;
	room = kvpl_room_find(client, id);
	if (room && answer.recalled_from < room->next_seq) {
		room->next_seq = answer.recalled_from;
		room->epoch++;
	}
	if (from)
		*from = answer.recalled_from;
	return 0;
}
