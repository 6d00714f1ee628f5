/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/peer_msg.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/check.h"

static int check_hello(struct kvp_check *c, const Kvp__PeerHello *m)
{
	return kvp_check_range(c, "version_min", m->version_min, 1, m->version_max) ?:
	       kvp_check_count(c, "incarnation", m->incarnation.len, KVP_INCARNATION_BYTES,
			       KVP_INCARNATION_BYTES) ?:
	       kvp_check_label(c, "node", m->node, 0, KVP_MAX_LABEL) ?:
	       kvp_check_word(c, "address", m->address, 0, KVP_LIMIT_ADDRESS) ?:
	       kvp_check_enum(c, "status", (int)m->status, INT32_MAX) ?:
	       kvp_check_text(c, "text", m->text, KVP_LIMIT_TEXT);
}

static int check_leg(struct kvp_check *c, const Kvp__Leg *leg)
{
	if (!leg)
		return kvp_check_fail(c, KVP_STATUS_INVALID, "leg is missing");
	return kvp_check_range(c, "leg.dest", leg->dest, 0, KVP_MAX_DESTS - 1) ?:
	       kvp_check_range(c, "leg.sender", leg->sender, 0, KVP_MAX_SENDERS - 1) ?:
	       kvp_check_range(c, "leg.generation", leg->generation, 1, UINT64_MAX);
}

static int check_sides(struct kvp_check *c, Kvp__PeerSide *const *sides, size_t n)
{
	struct kvp_seen groups = { { 0 } };
	int r = kvp_check_count(c, "sides", n, 0, KVP_LIMIT_GROUPS);

	c->list = "sides";
	for (c->idx = 0; r == 0 && c->idx < n; c->idx++) {
		const Kvp__PeerSide *s = sides[c->idx];
		struct kvp_check_side side = { s->group, s->page, s->dcp_size, s->dcp_rank,
					       s->interleave };

		r = kvp_check_side(c, &side) ?:
		    kvp_check_new(c, &groups, "group", s->group) ?:
		    kvp_check_range(c, "pos0", s->pos0, 0, KVP_LIMIT_POSITION) ?:
		    kvp_check_range(c, "first", s->first, 0, KVP_LIMIT_POSITION);
		if (r == 0 && s->pos0 % ((uint64_t)s->page * s->dcp_size))
			r = kvp_check_fail(
				c, KVP_STATUS_ALIGNMENT,
				"pos0 is %llu, must be a multiple of page %u x dcp_size %u",
				(unsigned long long)s->pos0, s->page, s->dcp_size);
	}
	c->list = NULL;
	return r;
}

static int check_entries(struct kvp_check *c, Kvp__PeerEntry *const *entries, size_t n)
{
	struct kvp_check_rows rows[KVP_LIMIT_ENTRIES];
	int r = kvp_check_count(c, "entries", n, 0, KVP_LIMIT_ENTRIES);

	c->list = "entries";
	for (c->idx = 0; r == 0 && c->idx < n; c->idx++) {
		const Kvp__PeerEntry *e = entries[c->idx];

		rows[c->idx] = (struct kvp_check_rows){ (int)e->klass,   e->layer, e->group,
							e->row_bytes,    e->lo,    e->full_bytes,
							e->rows_per_page };
		r = kvp_check_rows(c, &rows[c->idx]);
	}
	r = r ?: kvp_check_rows_apart(c, rows, n);
	c->list = NULL;
	return r;
}

static int check_segments(struct kvp_check *c, Kvp__PeerSegment *const *segments, size_t n)
{
	uint32_t ids[KVP_LIMIT_SEGMENTS];
	int r = kvp_check_count(c, "segments", n, 0, KVP_LIMIT_SEGMENTS);

	c->list = "segments";
	for (c->idx = 0; r == 0 && c->idx < n; c->idx++) {
		ids[c->idx] = segments[c->idx]->id;
		r = kvp_check_range(c, "bytes", segments[c->idx]->bytes, 1, KVP_LIMIT_EXTENT);
	}
	c->list = NULL;
	return r ?: kvp_check_ids(c, "segments.id", ids, n);
}

static int check_offer(struct kvp_check *c, const Kvp__Offer *m)
{
	return check_leg(c, m->leg) ?:
	       kvp_check_key(c, &m->key) ?:
	       kvp_check_range(c, "n_dests", m->n_dests, 1, KVP_MAX_DESTS) ?:
	       kvp_check_enum(c, "role", (int)m->role, KVP_ROLE_NONE) ?:
	       kvp_check_range(c, "end", m->end, 0, KVP_LIMIT_POSITION) ?:
	       kvp_check_range(c, "prefix", m->prefix, 0, m->end) ?:
	       kvp_check_count(c, "layout_tag", m->layout_tag.len, 0, KVP_MAX_TAG) ?:
	       kvp_check_range(c, "lane", m->lane, 0, KVP_LIMIT_LANES - 1) ?:
	       kvp_check_count(c, "lane_address", m->lane_address.len, 0,
			       KVP_LIMIT_LANE_ADDRESS) ?:
	       kvp_check_range(c, "slot_bytes", m->slot_bytes, 0, KVP_LIMIT_SLOT_BYTES) ?:
	       kvp_check_word(c, "transport", m->transport, 0, KVP_LIMIT_TRANSPORT) ?:
	       check_entries(c, m->entries, m->n_entries) ?:
	       check_sides(c, m->sides, m->n_sides) ?:
	       check_segments(c, m->segments, m->n_segments);
}

static int check_accept(struct kvp_check *c, const Kvp__Accept *m)
{
	return check_leg(c, m->leg) ?:
	       kvp_check_count(c, "layout_tag", m->layout_tag.len, 0, KVP_MAX_TAG) ?:
	       kvp_check_range(c, "lane", m->lane, 0, KVP_LIMIT_LANES - 1) ?:
	       kvp_check_count(c, "lane_address", m->lane_address.len, 0,
			       KVP_LIMIT_LANE_ADDRESS) ?:
	       kvp_check_range(c, "slot_bytes", m->slot_bytes, 0, KVP_LIMIT_SLOT_BYTES) ?:
	       check_entries(c, m->entries, m->n_entries) ?:
	       check_sides(c, m->sides, m->n_sides);
}

static int check_abort(struct kvp_check *c, const Kvp__LegAbort *m)
{
	return check_leg(c, m->leg) ?:
	       kvp_check_enum(c, "status", (int)m->status, INT32_MAX) ?:
	       kvp_check_text(c, "text", m->text, KVP_LIMIT_TEXT);
}

static int check_decline(struct kvp_check *c, const Kvp__PeerDecline *m)
{
	return kvp_check_range(c, "sender", m->sender, 0, KVP_MAX_SENDERS - 1) ?:
	       kvp_check_key(c, &m->key) ?:
	       kvp_check_text(c, "reason", m->reason, KVP_LIMIT_TEXT);
}

static int check_renew(struct kvp_check *c, const Kvp__PeerRenew *m)
{
	return kvp_check_range(c, "sender", m->sender, 0, KVP_MAX_SENDERS - 1) ?:
	       kvp_check_key(c, &m->key) ?:
	       kvp_check_range(c, "lease_ms", m->lease_ms, 1, UINT32_MAX);
}

static int check_peer(const Kvp__PeerMsg *m, char *err, size_t errlen)
{
	struct kvp_check c = { .err = err, .errlen = errlen, .msg = "peer_message" };

	switch (m->body_case) {
	case KVP__PEER_MSG__BODY_HELLO:
		c.msg = "hello";
		return check_hello(&c, m->hello);
	case KVP__PEER_MSG__BODY_OFFER:
		c.msg = "offer";
		return check_offer(&c, m->offer);
	case KVP__PEER_MSG__BODY_ACCEPT:
		c.msg = "accept";
		return check_accept(&c, m->accept);
	case KVP__PEER_MSG__BODY_GO:
		c.msg = "go";
		return check_leg(&c, m->go->leg);
	case KVP__PEER_MSG__BODY_ABORT:
		c.msg = "abort";
		return check_abort(&c, m->abort);
	case KVP__PEER_MSG__BODY_END:
		c.msg = "end";
		return check_leg(&c, m->end->leg);
	case KVP__PEER_MSG__BODY_DRAINED:
		c.msg = "drained";
		return check_leg(&c, m->drained->leg);
	case KVP__PEER_MSG__BODY_RENEW:
		c.msg = "renew";
		return check_renew(&c, m->renew);
	case KVP__PEER_MSG__BODY_DECLINE:
		c.msg = "decline";
		return check_decline(&c, m->decline);
	case KVP__PEER_MSG__BODY_HEARTBEAT:
		c.msg = "heartbeat";
		return kvp_check_count(&c, "lane_turns", m->heartbeat->n_lane_turns, 0,
				       KVP_LIMIT_LANES);
	default:
		return kvp_check_fail(&c, KVP_STATUS_INVALID, "body is missing or unknown");
	}
}

int kvp_peer_decode(const void *buf, size_t len, Kvp__PeerMsg **out, char *err, size_t errlen)
{
	KVP_CLEANUP(kvp_peer_freep) Kvp__PeerMsg *msg = NULL;
	int r;

	if (len > 0 && len <= KVP_LIMIT_FRAME)
		msg = (Kvp__PeerMsg *)kvp_unpack(&kvp__peer_msg__descriptor, buf, len);
	if (!msg) {
		if (err)
			(void)snprintf(err, errlen, "frame of %zu bytes is malformed", len);
		return KVP_STATUS_INVALID;
	}
	r = check_peer(msg, err, errlen);
	if (r == 0)
		*out = KVP_TAKE(msg);
	return r;
}

void kvp_peer_free(Kvp__PeerMsg *msg)
{
	kvp__peer_msg__free_unpacked(msg, NULL);
}

size_t kvp_peer_frame_bytes(const Kvp__PeerMsg *msg)
{
	return KVP_FRAME_HEAD + protobuf_c_message_get_packed_size(&msg->base);
}

long kvp_peer_encode(const Kvp__PeerMsg *msg, void *buf, size_t cap)
{
	uint8_t *p = buf;
	long n;

	if (cap < KVP_FRAME_HEAD)
		return -EMSGSIZE;
	n = kvp_pack(&msg->base, p + KVP_FRAME_HEAD,
		     KVP_MIN(cap - KVP_FRAME_HEAD, (size_t)KVP_LIMIT_FRAME));
	if (n < 0)
		return n;
	for (unsigned i = 0; i < KVP_FRAME_HEAD; i++)
		p[i] = (uint8_t)((unsigned long)n >> 8 * i);
	return n + (long)KVP_FRAME_HEAD;
}

int kvp_frames_push(struct kvp_frames *frames, const void *data, size_t n)
{
	size_t held = frames->len - frames->pos;
	uint8_t *grown;

	if (n == 0)
		return 0;
	if (frames->pos > 0) {
		memmove(frames->buf, frames->buf + frames->pos, held);
		frames->pos = 0;
		frames->len = held;
	}
	if (held + n > frames->cap) {
		/* Grows with what has arrived, never with what a length claims. */
		size_t twice = KVP_MIN(frames->cap * 2, (size_t)KVP_LIMIT_FRAME);
		size_t cap = KVP_MAX(held + n, twice);

		grown = realloc(frames->buf, cap);
		if (!grown)
			return -ENOMEM;
		frames->buf = grown;
		frames->cap = cap;
	}
	memcpy(frames->buf + held, data, n);
	frames->len = held + n;
	return 0;
}

int kvp_frames_next(struct kvp_frames *frames, Kvp__PeerMsg **out, char *err, size_t errlen)
{
	const uint8_t *p;
	size_t held = frames->len - frames->pos;
	uint32_t max = frames->max ? frames->max : KVP_LIMIT_FRAME;
	uint32_t len;
	int r;

	if (held < KVP_FRAME_HEAD)
		return 0;
	p = frames->buf + frames->pos;
	len = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
	if (len == 0 || len > max) {
		if (err)
			(void)snprintf(err, errlen, "frame length is %u, allowed 1 to %u", len,
				       max);
		return -EPROTO;
	}
	if (held - KVP_FRAME_HEAD < len)
		return 0;
	r = kvp_peer_decode(p + KVP_FRAME_HEAD, len, out, err, errlen);
	if (r)
		return -EPROTO;
	frames->pos += KVP_FRAME_HEAD + len;
	return 1;
}

void kvp_frames_fini(struct kvp_frames *frames)
{
	free(frames->buf);
	*frames = (struct kvp_frames){ 0 };
}
