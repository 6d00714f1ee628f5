/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_msg.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

#define BYTES(s)                              \
	{                                     \
		sizeof(s) - 1, (uint8_t *)(s) \
	}
#define TEXT(s) ((char *)(s))
#define KEY "0123456789abcdef"

static size_t client(Kvp__ClientMsg *msg, Kvp__ClientMsg__BodyCase kind, uint8_t *buf)
{
	long n;

	msg->id = 7 + (uint64_t)kind;
	msg->body_case = kind;
	n = kvp_msg_encode_client(msg, buf, KVP_LIMIT_PACKET);
	assert(n > 0);
	return (size_t)n;
}

static size_t hello(uint8_t *buf)
{
	Kvp__Hello body = KVP__HELLO__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;

	body.version_min = KVP_PROTO_VERSION_MIN;
	body.version_max = KVP_PROTO_VERSION_MAX;
	body.name = TEXT("prefill-0");
	body.pid = 4711;
	msg.hello = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_HELLO, buf);
}

static size_t pool_register(uint8_t *buf)
{
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Entry entries[3] = { KVP__ENTRY__INIT, KVP__ENTRY__INIT, KVP__ENTRY__INIT };
	Kvp__Entry *list[3] = { &entries[0], &entries[1], &entries[2] };

	for (unsigned i = 0; i < 2; i++) {
		entries[i].layer = i;
		entries[i].offset = i * 64ull * 576 * 10;
		entries[i].bytes = 64ull * 576 * 10;
		entries[i].page_stride = 64ull * 576;
		entries[i].row_stride = 576;
		entries[i].row_bytes = 576;
		entries[i].full_bytes = 576;
		entries[i].rows_per_page = 64;
		entries[i].n_pages = 10;
	}
	entries[2].klass = KVP__ENTRY_CLASS__CLASS_BLOB;
	entries[2].offset = 1 << 20;
	entries[2].bytes = 4096;
	body.pool = 1;
	body.layout_tag = (ProtobufCBinaryData)BYTES("fp8 mla");
	body.entries = list;
	body.n_entries = 3;
	body.label = TEXT("kv");
	msg.pool_register = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_POOL_REGISTER, buf);
}

static size_t pages(uint8_t *buf)
{
	Kvp__Pages body = KVP__PAGES__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	uint32_t numbers[] = { 5, 4, 9 };

	body.list = 1;
	body.pages = numbers;
	body.n_pages = 3;
	msg.pages = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_PAGES, buf);
}

static void side_init(Kvp__Side *side)
{
	side->page = 64;
	side->dcp_size = 4;
	side->dcp_rank = 1;
	side->interleave = 1;
	side->pos0 = 512;
}

static size_t expect(uint8_t *buf)
{
	Kvp__Expect body = KVP__EXPECT__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Side side = KVP__SIDE__INIT, *sides[] = { &side };
	Kvp__ExpectSender one = KVP__EXPECT_SENDER__INIT, two = one;
	Kvp__ExpectSender *senders[] = { &one, &two };
	Kvp__ExpectSegment segment = KVP__EXPECT_SEGMENT__INIT, *segments[] = { &segment };
	Kvp__Timers timers = KVP__TIMERS__INIT;

	side_init(&side);
	side.list = 1;
	one.address = TEXT("10.0.0.1:7470");
	one.n_dests = 4;
	two.address = TEXT("10.0.0.2:7470");
	two.sender = 1;
	two.n_dests = 4;
	two.role = KVP__SENDER_ROLE__ROLE_NONE;
	segment.id = 3;
	segment.entry = 2;
	segment.bytes = 4096;
	timers.open_ms = 1000;
	body.handle = 1;
	body.room = 99;
	body.key = (ProtobufCBinaryData)BYTES(KEY);
	body.dest = 1;
	body.pool = 1;
	body.sides = sides;
	body.n_sides = 1;
	body.prefix = 512;
	body.end = 1000;
	body.segments = segments;
	body.n_segments = 1;
	body.senders = senders;
	body.n_senders = 2;
	body.label = TEXT("request 17");
	body.timers = &timers;
	msg.expect = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_EXPECT, buf);
}

static size_t open_room(uint8_t *buf)
{
	Kvp__Open body = KVP__OPEN__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Side side = KVP__SIDE__INIT, *sides[] = { &side };

	side_init(&side);
	side.pos0 = 0;
	body.handle = 2;
	body.room = 99;
	body.pool = 1;
	body.sides = sides;
	body.n_sides = 1;
	body.entry_mask = (ProtobufCBinaryData)BYTES("\x07");
	body.label = TEXT("request 17");
	msg.open = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_OPEN, buf);
}

static size_t submit(uint8_t *buf)
{
	Kvp__Submit body = KVP__SUBMIT__INIT;
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__ChunkSide side = KVP__CHUNK_SIDE__INIT, *sides[] = { &side };
	Kvp__SubmitSegment segment = KVP__SUBMIT_SEGMENT__INIT, *segments[] = { &segment };

	side.pos0 = 512;
	side.list = 2;
	segment.id = 3;
	segment.entry = 2;
	segment.bytes = 4096;
	body.handle = 2;
	body.start = 512;
	body.tokens = 488;
	body.sides = sides;
	body.n_sides = 1;
	body.fence = 1;
	body.fence_value = 5;
	body.segments = segments;
	body.n_segments = 1;
	body.last = true;
	body.meta = (ProtobufCBinaryData)BYTES("aux");
	msg.submit = &body;
	return client(&msg, KVP__CLIENT_MSG__BODY_SUBMIT, buf);
}

/* Those with an id and little else. */
static size_t small(unsigned i, uint8_t *buf)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause pause = KVP__POOL_PAUSE__INIT;
	Kvp__PoolResume resume = KVP__POOL_RESUME__INIT;
	Kvp__PoolUnregister unregister = KVP__POOL_UNREGISTER__INIT;
	Kvp__FenceRegister fence = KVP__FENCE_REGISTER__INIT;
	Kvp__FenceUnregister unfence = KVP__FENCE_UNREGISTER__INIT;

	pause.pool = resume.pool = unregister.pool = fence.fence = unfence.fence = 1;
	fence.words = 16;
	switch (i) {
	case 0:
		msg.pool_pause = &pause;
		return client(&msg, KVP__CLIENT_MSG__BODY_POOL_PAUSE, buf);
	case 1:
		msg.pool_resume = &resume;
		return client(&msg, KVP__CLIENT_MSG__BODY_POOL_RESUME, buf);
	case 2:
		msg.pool_unregister = &unregister;
		return client(&msg, KVP__CLIENT_MSG__BODY_POOL_UNREGISTER, buf);
	case 3:
		msg.fence_register = &fence;
		return client(&msg, KVP__CLIENT_MSG__BODY_FENCE_REGISTER, buf);
	default:
		msg.fence_unregister = &unfence;
		return client(&msg, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER, buf);
	}
}

static size_t asking(unsigned i, uint8_t *buf)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Recall recall = KVP__RECALL__INIT;
	Kvp__Renew renew = KVP__RENEW__INIT;
	Kvp__Decline decline = KVP__DECLINE__INIT;
	Kvp__Abort abort_room = KVP__ABORT__INIT;
	Kvp__Inspect inspect = KVP__INSPECT__INIT;
	Kvp__TestHold hold = KVP__TEST_HOLD__INIT;
	Kvp__Drain drain = KVP__DRAIN__INIT;
	Kvp__Settle settle = KVP__SETTLE__INIT;

	recall.handle = abort_room.handle = 2;
	recall.seq = 1;
	renew.address = decline.address = TEXT("10.0.0.1:7470");
	renew.room = decline.room = 99;
	renew.lease_ms = 1000;
	decline.reason = abort_room.reason = TEXT("no longer wanted");
	inspect.what = TEXT("rooms");
	inspect.arg = TEXT("");
	drain.on = true;
	drain.reason = TEXT("new kernel");
	settle.session = 3;
	hold.point = TEXT("after_grant");
	hold.on = true;
	switch (i) {
	case 0:
		msg.recall = &recall;
		return client(&msg, KVP__CLIENT_MSG__BODY_RECALL, buf);
	case 1:
		msg.renew = &renew;
		return client(&msg, KVP__CLIENT_MSG__BODY_RENEW, buf);
	case 2:
		msg.decline = &decline;
		return client(&msg, KVP__CLIENT_MSG__BODY_DECLINE, buf);
	case 3:
		msg.abort = &abort_room;
		return client(&msg, KVP__CLIENT_MSG__BODY_ABORT, buf);
	case 4:
		msg.inspect = &inspect;
		return client(&msg, KVP__CLIENT_MSG__BODY_INSPECT, buf);
	case 5:
		msg.drain = &drain;
		return client(&msg, KVP__CLIENT_MSG__BODY_DRAIN, buf);
	case 6:
		msg.settle = &settle;
		return client(&msg, KVP__CLIENT_MSG__BODY_SETTLE, buf);
	default:
		msg.test_hold = &hold;
		return client(&msg, KVP__CLIENT_MSG__BODY_TEST_HOLD, buf);
	}
}

size_t support_client_msg(unsigned i, uint8_t *buf)
{
	static size_t (*const large[])(uint8_t *) = { hello,  pool_register, pages,
						      expect, open_room,     submit };

	if (i < 6)
		return large[i](buf);
	return i < 11 ? small(i - 6, buf) : asking(i - 11, buf);
}

size_t support_daemon_msg(unsigned i, uint8_t *buf)
{
	Kvp__DaemonMsg msg = KVP__DAEMON_MSG__INIT;
	Kvp__Reply reply = KVP__REPLY__INIT;
	Kvp__HelloReply hello_reply = KVP__HELLO_REPLY__INIT;
	Kvp__RoomEvent room = KVP__ROOM_EVENT__INIT;
	long n;

	msg.body_case = i < 2 ? KVP__DAEMON_MSG__BODY_REPLY : KVP__DAEMON_MSG__BODY_ROOM;
	hello_reply.version = KVP_PROTO_VERSION_MAX;
	hello_reply.incarnation = (ProtobufCBinaryData)BYTES(KEY);
	hello_reply.node = TEXT("gpu-a");
	hello_reply.address = TEXT("10.0.0.1:7470");
	reply.id = 8;
	if (i == 0) {
		reply.hello = &hello_reply;
	} else {
		reply.status = KVP__STATUS__STATUS_LIMIT;
		reply.text = TEXT("rooms: 64 of 64");
	}
	room.handle = 1;
	room.state = KVP__ROOM_STATE__ROOM_COMPLETE;
	room.arrived = room.end = 1000;
	room.complete = true;
	room.reason = TEXT("");
	room.meta = (ProtobufCBinaryData)BYTES("aux");
	if (i < 2)
		msg.reply = &reply;
	else
		msg.room = &room;
	n = kvp_msg_encode_daemon(&msg, buf, KVP_LIMIT_PACKET);
	assert(n > 0);
	return (size_t)n;
}

static size_t peer(Kvp__PeerMsg *msg, Kvp__PeerMsg__BodyCase kind, uint8_t *buf)
{
	msg->body_case = kind;
	assert(protobuf_c_message_get_packed_size(&msg->base) <= KVP_LIMIT_PACKET);
	return protobuf_c_message_pack(&msg->base, buf);
}

static size_t offer_or_accept(bool is_offer, Kvp__Leg *leg, uint8_t *buf)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Offer offer = KVP__OFFER__INIT;
	Kvp__Accept accept = KVP__ACCEPT__INIT;
	Kvp__PeerEntry entry = KVP__PEER_ENTRY__INIT, *entries[] = { &entry };
	Kvp__PeerSide side = KVP__PEER_SIDE__INIT, *sides[] = { &side };
	Kvp__PeerSegment segment = KVP__PEER_SEGMENT__INIT, *segments[] = { &segment };

	entry.row_bytes = entry.full_bytes = 576;
	entry.rows_per_page = 64;
	side.page = 64;
	side.dcp_size = 4;
	side.dcp_rank = 3;
	side.interleave = 1;
	segment.id = 3;
	segment.bytes = 4096;
	offer.leg = accept.leg = leg;
	offer.n_dests = 4;
	offer.prefix = 512;
	offer.end = 1000;
	offer.layout_tag = accept.layout_tag = (ProtobufCBinaryData)BYTES("fp8 mla");
	offer.entries = accept.entries = entries;
	offer.n_entries = accept.n_entries = 1;
	offer.sides = accept.sides = sides;
	offer.n_sides = accept.n_sides = 1;
	offer.segments = segments;
	offer.n_segments = 1;
	offer.lane_address = accept.lane_address = (ProtobufCBinaryData)BYTES("\1\2\3");
	offer.slot_bytes = accept.slot_bytes = 1 << 20;
	offer.layout_version = accept.layout_version = 1;
	offer.transport = TEXT("ucx");
	if (is_offer)
		msg.offer = &offer;
	else
		msg.accept = &accept;
	return peer(&msg, is_offer ? KVP__PEER_MSG__BODY_OFFER : KVP__PEER_MSG__BODY_ACCEPT, buf);
}

static size_t peer_hello(uint8_t *buf)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__PeerHello body = KVP__PEER_HELLO__INIT;

	body.version_min = KVP_PROTO_VERSION_MIN;
	body.version_max = KVP_PROTO_VERSION_MAX;
	body.incarnation = (ProtobufCBinaryData)BYTES(KEY);
	body.node = TEXT("gpu-a");
	body.address = TEXT("10.0.0.1:7470");
	msg.hello = &body;
	return peer(&msg, KVP__PEER_MSG__BODY_HELLO, buf);
}

static size_t about_leg(unsigned i, Kvp__Leg *leg, uint8_t *buf)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Go go = KVP__GO__INIT;
	Kvp__LegAbort leg_abort = KVP__LEG_ABORT__INIT;
	Kvp__LegEnd end = KVP__LEG_END__INIT;
	Kvp__Drained drained = KVP__DRAINED__INIT;

	go.leg = leg_abort.leg = end.leg = drained.leg = leg;
	leg_abort.status = KVP__STATUS__STATUS_TIMEOUT;
	leg_abort.text = TEXT("open timer ran out");
	switch (i) {
	case 0:
		msg.go = &go;
		return peer(&msg, KVP__PEER_MSG__BODY_GO, buf);
	case 1:
		msg.abort = &leg_abort;
		return peer(&msg, KVP__PEER_MSG__BODY_ABORT, buf);
	case 2:
		msg.end = &end;
		return peer(&msg, KVP__PEER_MSG__BODY_END, buf);
	default:
		msg.drained = &drained;
		return peer(&msg, KVP__PEER_MSG__BODY_DRAINED, buf);
	}
}

size_t support_peer_msg(unsigned i, uint8_t *buf)
{
	Kvp__PeerMsg msg = KVP__PEER_MSG__INIT;
	Kvp__Leg leg = KVP__LEG__INIT;
	Kvp__PeerRenew renew = KVP__PEER_RENEW__INIT;
	Kvp__PeerDecline decline = KVP__PEER_DECLINE__INIT;
	Kvp__Heartbeat heartbeat = KVP__HEARTBEAT__INIT;
	uint64_t turns[] = { 17, 4 };

	leg.room = renew.room = decline.room = 99;
	leg.dest = 1;
	leg.sender = 2;
	leg.generation = 3;
	if (i == 0)
		return peer_hello(buf);
	if (i < 3)
		return offer_or_accept(i == 1, &leg, buf);
	if (i < 7)
		return about_leg(i - 3, &leg, buf);
	renew.lease_ms = 1000;
	decline.reason = TEXT("no longer wanted");
	heartbeat.lane_turns = turns;
	heartbeat.n_lane_turns = 2;
	if (i == 7) {
		msg.renew = &renew;
		return peer(&msg, KVP__PEER_MSG__BODY_RENEW, buf);
	}
	if (i == 8) {
		msg.decline = &decline;
		return peer(&msg, KVP__PEER_MSG__BODY_DECLINE, buf);
	}
	msg.heartbeat = &heartbeat;
	return peer(&msg, KVP__PEER_MSG__BODY_HEARTBEAT, buf);
}
