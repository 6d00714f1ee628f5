/* SPDX-License-Identifier: Apache-2.0 */
/* Both protocols: round trips, truncation, each limit and one past it, packets, frames. */

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/util.h"
#include "tests/support_msg.h"

static uint8_t buf[KVP_LIMIT_FRAME + KVP_FRAME_HEAD + 16];
static uint8_t again[KVP_LIMIT_PACKET];
static char err[KVP_LIMIT_TEXT + 1];

enum { HELLO, REGISTER, PAGES, EXPECT, OPEN, SUBMIT, ASKING = 11 };

static Kvp__ClientMsg *client(unsigned i)
{
	Kvp__ClientMsg *msg = NULL;
	size_t n = support_client_msg(i, buf);

	cr_assert_eq(kvp_msg_decode_client(buf, n, &msg, err, sizeof(err)), 0, "%u: %s", i, err);
	return msg;
}

Test(msg, each_client_message_round_trips)
{
	unsigned kinds = 0;

	for (unsigned i = 0; i < SUPPORT_N_CLIENT; i++) {
		KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(i);
		size_t n = support_client_msg(i, buf);

		kinds |= 1u << msg->body_case;
		cr_expect_eq(kvp_msg_encode_client(msg, again, sizeof(again)), (long)n);
		cr_expect_eq(memcmp(buf, again, n), 0, "message %u", i);
		cr_expect_eq(kvp_msg_peek_id(buf, n), msg->id);
		cr_expect_eq(kvp_msg_encode_client(msg, again, n - 1), -EMSGSIZE);
	}
	cr_expect_eq(kinds, ((1u << SUPPORT_N_CLIENT) - 1) << 2, "one of each kind");
}

Test(msg, each_daemon_and_peer_message_round_trips)
{
	for (unsigned i = 0; i < SUPPORT_N_DAEMON; i++) {
		KVP_CLEANUP(kvp_msg_free_daemonp) Kvp__DaemonMsg *msg = NULL;
		size_t n = support_daemon_msg(i, buf);

		cr_assert_eq(kvp_msg_decode_daemon(buf, n, &msg, err, sizeof(err)), 0, "%s", err);
		cr_expect_eq(kvp_msg_encode_daemon(msg, again, sizeof(again)), (long)n);
		cr_expect_eq(memcmp(buf, again, n), 0);
	}
	for (unsigned i = 0; i < SUPPORT_N_PEER; i++) {
		KVP_CLEANUP(kvp_peer_freep) Kvp__PeerMsg *msg = NULL;
		size_t n = support_peer_msg(i, buf);

		cr_assert_eq(kvp_peer_decode(buf, n, &msg, err, sizeof(err)), 0, "%s", err);
		cr_expect_eq((unsigned)msg->body_case, i + 1);
		cr_expect_eq(kvp_peer_encode(msg, again, sizeof(again)), (long)n + 4);
		cr_expect_eq(kvp_peer_frame_bytes(msg), n + 4);
		cr_expect_eq(memcmp(buf, again + 4, n), 0);
	}
}

/* A cut may leave a valid shorter message, never a crash; what was refused leaves no object. */
Test(msg, every_truncation_is_answered)
{
	for (unsigned i = 0; i < SUPPORT_N_CLIENT; i++) {
		size_t n = support_client_msg(i, buf);

		for (size_t cut = 0; cut < n; cut++) {
			KVP_CLEANUP(kvp_freep) uint8_t *exact = malloc(cut + 1);
			KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = NULL;
			int r;

			memcpy(exact, buf, cut);
			err[0] = '\0';
			r = kvp_msg_decode_client(exact, cut, &msg, err, sizeof(err));
			cr_assert_eq(r == 0, msg != NULL);
			cr_assert(r == 0 || err[0] != '\0');
		}
	}
	for (unsigned i = 0; i < SUPPORT_N_PEER; i++) {
		size_t n = support_peer_msg(i, buf);

		for (size_t cut = 0; cut < n; cut++) {
			KVP_CLEANUP(kvp_peer_freep) Kvp__PeerMsg *msg = NULL;

			cr_assert_eq(kvp_peer_decode(buf, cut, &msg, err, sizeof(err)) == 0,
				     msg != NULL);
		}
	}
}

/* Gives a field of a valid message a value, expects the status, and puts the old one back. */
#define TRY(msg, field, value, want)                                                    \
	do {                                                                            \
		__typeof__(field) old_ = (field);                                       \
		int r_;                                                                 \
		(field) = (value);                                                      \
		r_ = kvp_msg_check_client(msg, err, sizeof(err));                       \
		cr_expect_eq(r_, (want), #field " = " #value " gives %d: %s", r_, err); \
		(field) = old_;                                                         \
	} while (0)
#define OK 0
#define BAD KVP_STATUS_INVALID

static char long_text[KVP_LIMIT_ADDRESS + 2];

/* A text of n letters. */
static char *text_of(size_t n)
{
	memset(long_text, 'x', sizeof(long_text));
	long_text[n] = '\0';
	return long_text;
}

Test(msg, limits_of_hello)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(HELLO);
	Kvp__Hello *m = msg->hello;

	TRY(msg, msg->id, 0, BAD);
	TRY(msg, m->version_min, 0, BAD);
	TRY(msg, m->version_min, m->version_max + 1, BAD);
	TRY(msg, m->pid, 0, BAD);
	TRY(msg, m->name, text_of(KVP_MAX_LABEL), OK);
	TRY(msg, m->name, text_of(KVP_MAX_LABEL + 1), BAD);
	TRY(msg, m->name, (char[]){ "a\nb" }, BAD);
	cr_expect_str_eq(err, "hello.name has control character 0x0a at byte 1");
	TRY(msg, m->name, (char[]){ "caf\xc3\xa9" }, OK);
	TRY(msg, m->name, (char[]){ "caf\xc3" }, BAD);
	TRY(msg, m->name, (char[]){ "\xed\xa0\x80" }, BAD);
}

Test(msg, limits_of_pool_entries)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(REGISTER);
	Kvp__PoolRegister *m = msg->pool_register;
	Kvp__Entry *e = m->entries[1];

	TRY(msg, m->pool, 0, BAD);
	TRY(msg, m->n_entries, 0, BAD);
	TRY(msg, m->layout_tag.len, KVP_MAX_TAG, OK);
	TRY(msg, m->layout_tag.len, KVP_MAX_TAG + 1, BAD);
	TRY(msg, e->klass, 3, BAD);
	TRY(msg, e->group, KVP_LIMIT_GROUPS - 1, OK);
	TRY(msg, e->group, KVP_LIMIT_GROUPS, BAD);
	cr_expect_str_eq(err, "pool_register.entries[1].group is 16, allowed 0 to 15");
	TRY(msg, e->fd_index, KVP_LIMIT_FDS - 1, OK);
	TRY(msg, e->fd_index, KVP_LIMIT_FDS, BAD);
	TRY(msg, e->row_bytes, 0, BAD);
	TRY(msg, e->row_bytes, KVP_LIMIT_ROW_BYTES + 1, BAD);
	TRY(msg, e->lo, 1, BAD);
	TRY(msg, e->full_bytes, KVP_LIMIT_FULL_BYTES, OK);
	TRY(msg, e->full_bytes, KVP_LIMIT_FULL_BYTES + 1, BAD);
	TRY(msg, e->rows_per_page, 0, BAD);
	TRY(msg, e->rows_per_page, 65, BAD);
	TRY(msg, e->rows_per_page, UINT32_MAX, BAD);
	TRY(msg, e->n_pages, 0, BAD);
	TRY(msg, e->n_pages, 11, BAD);
	TRY(msg, e->n_pages, UINT32_MAX, BAD);
	TRY(msg, e->bytes, 0, BAD);
	TRY(msg, e->bytes, e->bytes - 1, BAD);
	TRY(msg, e->bytes, UINT64_MAX, BAD);
	TRY(msg, e->offset, KVP_LIMIT_EXTENT + 1, BAD);
	TRY(msg, e->page_stride, UINT64_MAX, BAD);
	TRY(msg, e->page_stride, 64 * 576 - 1, BAD);
	TRY(msg, e->page_stride, 0, BAD);
	TRY(msg, e->row_stride, 575, BAD);
	TRY(msg, e->row_stride, UINT64_MAX, BAD);
	TRY(msg, m->entries[2]->bytes, 0, BAD);
	TRY(msg, e->layer, 0, BAD);
	cr_expect(strstr(err, "entry 0 of layer 0 holds bytes 0 to 575"), "%s", err);
	e->layer = 0;
	e->lo = 576;
	TRY(msg, e->full_bytes, 1152, BAD);
	m->entries[0]->full_bytes = 1152;
	TRY(msg, e->full_bytes, 1152, OK);
}

/* Slots outermost, pages inside: rows are apart as well. */
Test(msg, rows_may_nest_either_way)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(REGISTER);
	Kvp__Entry *e = msg->pool_register->entries[0];

	e->page_stride = 576;
	TRY(msg, e->row_stride, 10 * 576, OK);
	TRY(msg, e->row_stride, 10 * 576 - 1, BAD);
}

Test(msg, limits_of_page_lists)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(PAGES);
	Kvp__Pages *m = msg->pages;

	TRY(msg, m->list, 0, BAD);
	TRY(msg, m->n_pages, 0, BAD);
	TRY(msg, m->n_pages, KVP_LIMIT_LIST_PAGES, OK);
	TRY(msg, m->n_pages, KVP_LIMIT_LIST_PAGES + 1, BAD);
	TRY(msg, m->offset, KVP_LIMIT_LIST_OFFSET - 3, OK);
	TRY(msg, m->offset, KVP_LIMIT_LIST_OFFSET - 2, BAD);
	TRY(msg, m->offset, UINT32_MAX, BAD);
}

Test(msg, limits_of_expect)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(EXPECT);
	Kvp__Expect *m = msg->expect;
	Kvp__Side *s = m->sides[0];

	TRY(msg, m->handle, 0, BAD);
	TRY(msg, m->key.len, 0, OK);
	TRY(msg, m->key.len, 15, BAD);
	TRY(msg, m->dest, KVP_MAX_DESTS - 1, OK);
	TRY(msg, m->dest, KVP_MAX_DESTS, BAD);
	TRY(msg, m->prefix, m->end + 24, BAD);
	TRY(msg, m->prefix, 256, OK);
	TRY(msg, m->prefix, 300, KVP_STATUS_ALIGNMENT);
	TRY(msg, m->end, KVP_LIMIT_POSITION, OK);
	TRY(msg, m->end, KVP_LIMIT_POSITION + 1, BAD);
	TRY(msg, m->label, text_of(KVP_MAX_LABEL), OK);
	TRY(msg, m->label, text_of(KVP_MAX_LABEL + 1), BAD);
	TRY(msg, m->n_sides, 0, OK);
	TRY(msg, m->n_senders, 0, BAD);
	TRY(msg, m->meta_from, 0, OK);
	TRY(msg, m->meta_from, 1, BAD);
	TRY(msg, m->meta_from, 2, BAD);
	TRY(msg, m->meta_from, -2, BAD);
	TRY(msg, s->page, 0, KVP_STATUS_GEOMETRY);
	TRY(msg, s->page, KVP_LIMIT_PAGE + 1, KVP_STATUS_GEOMETRY);
	TRY(msg, s->dcp_size, 0, KVP_STATUS_GEOMETRY);
	TRY(msg, s->dcp_size, UINT32_MAX, KVP_STATUS_GEOMETRY);
	TRY(msg, s->dcp_rank, 3, OK);
	TRY(msg, s->dcp_rank, 4, KVP_STATUS_GEOMETRY);
	TRY(msg, s->interleave, 0, KVP_STATUS_GEOMETRY);
	TRY(msg, s->interleave, 3, KVP_STATUS_GEOMETRY);
	TRY(msg, s->interleave, 64, OK);
	TRY(msg, s->pos0, 511, KVP_STATUS_ALIGNMENT);
	TRY(msg, s->group, KVP_LIMIT_GROUPS, BAD);
	TRY(msg, s->first, m->end, OK);
	TRY(msg, s->first, m->end + 1, BAD);
}

Test(msg, limits_of_expect_senders_and_segments)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(EXPECT);
	Kvp__Expect *m = msg->expect;
	Kvp__ExpectSender *s = m->senders[1];
	Kvp__ExpectSegment *g = m->segments[0];
	Kvp__ExpectSegment *two[] = { g, g };
	Kvp__ExpectSegment **one = m->segments;

	TRY(msg, s->sender, 63, OK);
	TRY(msg, s->sender, 64, BAD);
	TRY(msg, s->sender, 0, BAD);
	cr_expect_str_eq(err, "expect.senders[1].sender is 0, given twice");
	TRY(msg, s->n_dests, 0, BAD);
	TRY(msg, s->n_dests, 64, OK);
	TRY(msg, s->n_dests, 65, BAD);
	TRY(msg, s->role, 2, BAD);
	TRY(msg, s->address, text_of(0), BAD);
	TRY(msg, s->address, text_of(KVP_LIMIT_ADDRESS), OK);
	TRY(msg, s->address, text_of(KVP_LIMIT_ADDRESS + 1), BAD);
	TRY(msg, s->address, (char[]){ "a b" }, BAD);
	TRY(msg, g->bytes, 0, BAD);
	TRY(msg, g->offset, KVP_LIMIT_EXTENT - g->bytes, OK);
	TRY(msg, g->offset, KVP_LIMIT_EXTENT - g->bytes + 1, BAD);
	TRY(msg, g->offset, UINT64_MAX, BAD);
	m->segments = two;
	TRY(msg, m->n_segments, 2, BAD);
	cr_expect_str_eq(err, "expect.segments.id: 3 is given twice");
	m->segments = one;
}

Test(msg, limits_of_open_and_submit)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *open_msg = client(OPEN);
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(SUBMIT);
	Kvp__Open *o = open_msg->open;
	Kvp__Submit *m = msg->submit;

	TRY(open_msg, o->sender, 63, OK);
	TRY(open_msg, o->sender, 64, BAD);
	TRY(open_msg, o->entry_mask.len, KVP_LIMIT_MASK + 1, BAD);
	TRY(open_msg, o->sides[0]->list, 1, BAD);
	TRY(open_msg, o->sides[0]->page, 0, KVP_STATUS_GEOMETRY);
	TRY(msg, m->seq, KVP_LIMIT_SEQ + 1, BAD);
	TRY(msg, m->start, KVP_LIMIT_POSITION + 1, BAD);
	TRY(msg, m->tokens, KVP_LIMIT_POSITION - m->start, OK);
	TRY(msg, m->tokens, KVP_LIMIT_POSITION - m->start + 1, BAD);
	TRY(msg, m->tokens, UINT64_MAX, BAD);
	TRY(msg, m->meta.len, KVP_MAX_META + 1, BAD);
	TRY(msg, m->last, false, BAD);
	cr_expect_str_eq(err, "submit.meta has 3 bytes, allowed with last only");
	TRY(msg, m->fence, 0, BAD);
	TRY(msg, m->sides[0]->group, 16, BAD);
	m->meta.len = 0;
	TRY(msg, m->last, false, OK);
	m->last = false;
	m->n_segments = 0;
	TRY(msg, m->tokens, 0, BAD);
	m->n_segments = 1;
}

Test(msg, too_many_elements)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(EXPECT);
	Kvp__ExpectSegment *g = msg->expect->segments[0];
	Kvp__ExpectSegment **one = msg->expect->segments;
	Kvp__ExpectSegment store[KVP_LIMIT_SEGMENTS + 1], *many[KVP_LIMIT_SEGMENTS + 1];

	for (uint32_t i = 0; i <= KVP_LIMIT_SEGMENTS; i++) {
		store[i] = *g;
		store[i].id = i;
		many[i] = &store[i];
	}
	msg->expect->segments = many;
	TRY(msg, msg->expect->n_segments, KVP_LIMIT_SEGMENTS, OK);
	TRY(msg, msg->expect->n_segments, KVP_LIMIT_SEGMENTS + 1, BAD);
	msg->expect->segments = one;
}

Test(msg, unknown_and_empty_bodies_are_refused)
{
	static const uint8_t only_id[] = { 0x08, 0x05 };
	static const uint8_t unknown[] = { 0x08, 0x05, 0xfa, 0x07, 0x00 }; /* field 127 */
	Kvp__ClientMsg *msg = NULL;

	cr_expect_eq(kvp_msg_decode_client(only_id, 2, &msg, err, sizeof(err)), BAD);
	cr_expect_str_eq(err, "message.body is missing or unknown");
	cr_expect_eq(kvp_msg_decode_client(unknown, 5, &msg, err, sizeof(err)), BAD);
	cr_expect_eq(kvp_msg_peek_id(unknown, 5), 5);
	memset(buf, 0xff, 64);
	cr_expect_eq(kvp_msg_decode_client(buf, 64, &msg, err, sizeof(err)), BAD);
	cr_expect_str_eq(err, "message of 64 bytes is malformed");
	cr_expect_eq(kvp_msg_decode_client(buf, KVP_LIMIT_PACKET + 1, &msg, err, sizeof(err)), BAD);
	cr_expect_null(msg);
	cr_expect_eq(kvp_msg_peek_id(buf, 64), 0);
}

/* 60,000 empty entries are 120 KB on the wire and would be 6 MB as objects. */
Test(msg, small_packets_cannot_ask_for_much_memory)
{
	Kvp__ClientMsg *msg = NULL;
	size_t n = 0, inner = 2 * 60000;

	buf[n++] = 0x08;
	buf[n++] = 1;
	buf[n++] = 3 << 3 | 2; /* pool_register */
	for (size_t v = inner; v; v >>= 7)
		buf[n++] = (uint8_t)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));
	for (size_t i = 0; i < inner; i += 2) {
		buf[n++] = 3 << 3 | 2; /* an entry without fields */
		buf[n++] = 0;
	}
	cr_expect_eq(kvp_msg_decode_client(buf, n, &msg, err, sizeof(err)), BAD);
	cr_expect(strstr(err, "malformed"), "%s", err);
}

Test(msg, limits_of_memories)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(REGISTER);
	Kvp__PoolRegister *m = msg->pool_register;
	uint8_t bytes[80] = { 1 }, other[16] = { 2 };
	uint64_t chunks[2] = { 2u << 20, 2u << 20 };
	Kvp__Memory ipc = KVP__MEMORY__INIT, vmm = KVP__MEMORY__INIT, host = KVP__MEMORY__INIT;
	Kvp__Memory *both[2] = { &ipc, &vmm };

	ipc.kind = KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
	ipc.handle = (ProtobufCBinaryData){ KVP_IPC_HANDLE_BYTES, bytes };
	ipc.bytes = 4096;
	vmm.kind = KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
	vmm.bytes = 4u << 20;
	vmm.chunk_bytes = chunks;
	vmm.n_chunk_bytes = 2;
	ipc.gpu = vmm.gpu = (ProtobufCBinaryData){ KVP_GPU_UUID_BYTES, bytes };
	m->memories = both;
	m->n_memories = 2;
	m->entries[2]->fd_index = 1;

	cr_expect_eq(kvp_msg_check_client(msg, err, sizeof(err)), OK, "%s", err);
	TRY(msg, ipc.kind, 3, BAD);
	TRY(msg, ipc.handle.len, 63, BAD);
	cr_expect_str_eq(err, "pool_register.memories[0].handle: has 63, allowed 64 to 64");
	TRY(msg, ipc.gpu.len, 0, BAD);
	TRY(msg, ipc.bytes, 0, BAD);
	TRY(msg, ipc.offset, KVP_LIMIT_EXTENT + 1, BAD);
	TRY(msg, vmm.handle.len, 64, BAD);
	TRY(msg, vmm.n_chunk_bytes, 0, BAD);
	TRY(msg, vmm.offset, 1, BAD);
	TRY(msg, vmm.bytes, (4u << 20) + 1, BAD);
	TRY(msg, chunks[1], 0, BAD);
	TRY(msg, vmm.gpu.data, other, BAD);
	TRY(msg, both[1], &host, BAD);
	TRY(msg, m->entries[0]->fd_index, KVP_LIMIT_MEMORIES, BAD);
	cr_expect_eq(kvp_msg_check_fds(msg, 2, err, sizeof(err)), OK, "%s", err);
	cr_expect_eq(kvp_msg_check_fds(msg, 1, err, sizeof(err)), BAD);
	m->entries[2]->fd_index = 0;
	cr_expect_eq(kvp_msg_check_fds(msg, 2, err, sizeof(err)), BAD);
	cr_expect_str_eq(err, "pool_register.entries: no entry uses memory 1 of 2");
	m->n_memories = 0;
	m->memories = NULL;
}

/* Their fds come behind those of the chunks. */
Test(msg, limits_of_dmabufs)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *msg = client(REGISTER);
	Kvp__PoolRegister *m = msg->pool_register;
	uint8_t bytes[80] = { 1 };
	char reason[KVP_DMABUF_REASON + 2];
	Kvp__Memory ipc = KVP__MEMORY__INIT, *one = &ipc;

	ipc.kind = KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
	ipc.handle = (ProtobufCBinaryData){ KVP_IPC_HANDLE_BYTES, bytes };
	ipc.bytes = 4096;
	ipc.gpu = (ProtobufCBinaryData){ KVP_GPU_UUID_BYTES, bytes };
	m->memories = &one;
	m->n_memories = 1;
	m->entries[2]->fd_index = 0;
	memset(reason, 'x', sizeof(reason));
	reason[sizeof(reason) - 1] = '\0';

	cr_expect_eq(kvp_msg_check_fds(msg, 0, err, sizeof(err)), OK, "%s", err);
	TRY(msg, ipc.dmabuf_reason, reason, BAD);
	TRY(msg, ipc.dmabuf_reason, reason + 1, OK);
	TRY(msg, ipc.dmabuf_bytes, 4095, BAD);
	cr_expect_str_eq(err, "pool_register.memories[0].dmabuf_offset 0 and bytes 4096 do not "
			      "lie in a dma-buf of 4095 bytes");
	ipc.dmabuf_bytes = 8192;
	TRY(msg, ipc.dmabuf_offset, 4096, OK);
	TRY(msg, ipc.dmabuf_offset, 4097, BAD);
	TRY(msg, ipc.dmabuf_offset, UINT64_MAX, BAD);
	TRY(msg, ipc.dmabuf_bytes, KVP_LIMIT_EXTENT + 1, BAD);
	TRY(msg, ipc.kind, KVP__MEMORY_KIND__MEMORY_FD, BAD);
	cr_expect_eq(kvp_msg_check_fds(msg, 0, err, sizeof(err)), BAD);
	cr_expect_eq(kvp_msg_check_fds(msg, 1, err, sizeof(err)), OK, "%s", err);
	m->n_memories = 0;
	m->memories = NULL;
}

Test(msg, fds_are_counted_against_the_message)
{
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *reg = client(REGISTER);
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *pages = client(PAGES);
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *resume = client(7);
	KVP_CLEANUP(kvp_msg_free_clientp) Kvp__ClientMsg *fence = client(9);

	cr_expect_eq(kvp_msg_check_fds(reg, 1, err, sizeof(err)), OK);
	cr_expect_eq(kvp_msg_check_fds(reg, 0, err, sizeof(err)), BAD);
	cr_expect_eq(kvp_msg_check_fds(reg, 2, err, sizeof(err)), BAD);
	cr_expect_str_eq(err, "pool_register.entries: no entry uses fd 1 of 2");
	reg->pool_register->entries[2]->fd_index = 1;
	cr_expect_eq(kvp_msg_check_fds(reg, 2, err, sizeof(err)), OK);
	cr_expect_eq(kvp_msg_check_fds(reg, 1, err, sizeof(err)), BAD);
	cr_expect_eq(kvp_msg_check_fds(pages, 0, err, sizeof(err)), OK);
	cr_expect_eq(kvp_msg_check_fds(pages, 1, err, sizeof(err)), BAD);
	cr_expect_eq(kvp_msg_check_fds(resume, 16, err, sizeof(err)), OK);
	cr_expect_eq(kvp_msg_check_fds(fence, 1, err, sizeof(err)), OK);
	cr_expect_eq(kvp_msg_check_fds(fence, 2, err, sizeof(err)), BAD);
}

Test(msg, highest_common_version_wins)
{
	const uint32_t ours[2] = { 0x10001, 0x10003 };
	uint32_t v = 0;

	cr_expect_eq(kvp_version_choose(ours, (uint32_t[2]){ 0x10000, 0x10002 }, &v, err, 256), 0);
	cr_expect_eq(v, 0x10002);
	cr_expect_eq(kvp_version_choose(ours, (uint32_t[2]){ 0x10003, 0x20000 }, &v, err, 256), 0);
	cr_expect_eq(v, 0x10003);
	cr_expect_eq(kvp_version_choose(ours, (uint32_t[2]){ 0x20000, 0x20001 }, &v, err, 256),
		     KVP_STATUS_VERSION);
	cr_expect_str_eq(err, "no common protocol version: this end speaks 1.1 to 1.3, the other "
			      "2.0 to 2.1");
	cr_expect_eq(v, 0x10003);
}

Test(msg, texts_are_cleaned)
{
	char text[] = "a\tb\xc3\xa9\xe2\x82";
	char whole[] = "\xc3\xa9";

	kvp_text_clean(text);
	cr_expect_str_eq(text, "a?b\xc3\xa9");
	kvp_text_clean(whole);
	cr_expect_str_eq(whole, "\xc3\xa9");
}

Test(status, names)
{
	cr_expect_str_eq(kvp_status_name(KVP_OK), "ok");
	cr_expect_str_eq(kvp_status_name(KVP_STATUS_PAGE_HELD), "page_held");
	cr_expect_str_eq(kvp_status_name(KVP_STATUS_UNSUPPORTED), "unsupported");
	cr_expect_str_eq(kvp_status_name(KVP_STATUS_CORRUPT), "corrupt");
	cr_expect_str_eq(kvp_status_name((enum kvp_status)33), "unknown");
	cr_expect_str_eq(kvp_status_name((enum kvp_status) - 1), "unknown");
	cr_expect_str_eq(kvp_room_phase_name(KVP_ROOM_OFFERING), "offering");
	cr_expect_eq(kvp_status_from_name("page_held"), KVP_STATUS_PAGE_HELD);
	cr_expect_eq(kvp_status_from_name("nonsense"), -1);
}

/* ---- packets ------------------------------------------------------------------------------- */

static int count_fds(void)
{
	int n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

Test(packet, carries_bytes_and_fds)
{
	int pair[2], got[KVP_LIMIT_FDS], sent[KVP_LIMIT_FDS + 1];
	size_t n = 99;
	char data[8];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	for (unsigned i = 0; i <= KVP_LIMIT_FDS; i++)
		sent[i] = pair[0];
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 1), -EAGAIN);
	cr_expect_eq(kvp_packet_send(pair[0], "abc", 3, sent, 2), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, KVP_LIMIT_FDS), 3);
	cr_expect_eq(n, 2);
	cr_expect_eq(fcntl(got[0], F_GETFD), FD_CLOEXEC);
	(void)close(got[0]);
	(void)close(got[1]);
	cr_expect_eq(kvp_packet_send(pair[0], "abc", 3, sent, KVP_LIMIT_FDS + 1), -EINVAL);
	cr_expect_eq(kvp_packet_send(pair[0], "abc", 3, sent, KVP_LIMIT_FDS), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, KVP_LIMIT_FDS), 3);
	cr_expect_eq(n, KVP_LIMIT_FDS);
	(void)close(pair[0]);
	for (unsigned i = 0; i < n; i++)
		(void)close(got[i]);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 0), 0);
	cr_expect_eq(kvp_packet_send(pair[1], "abc", 3, NULL, 0), -EPIPE);
}

Test(packet, too_large_is_refused_and_leaks_nothing)
{
	int pair[2], got[KVP_LIMIT_FDS];
	int two[2];
	size_t n = 0;
	char data[8];
	int before;

	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	two[0] = two[1] = pair[0];
	before = count_fds();
	cr_expect_eq(kvp_packet_send(pair[0], "0123456789", 10, two, 2), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 2), -EMSGSIZE);
	cr_expect_eq(kvp_packet_send(pair[0], "01234567", 8, two, 2), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 1), -EMSGSIZE);
	cr_expect_eq(kvp_packet_send(pair[0], "01234567", 8, two, 1), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 0), -EMSGSIZE);
	cr_expect_eq(kvp_packet_send(pair[0], "01234567", 8, NULL, 0), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, 0), 8);
	cr_expect_eq(count_fds(), before);
}

/* It reads as the end of the connection: nobody would close what came with it. */
Test(packet, fds_of_an_empty_one_do_not_leak)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} control = { 0 };
	struct iovec iov = { control.bytes, 0 };
	struct msghdr hdr = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control.bytes,
			      .msg_controllen = sizeof(control.bytes) };
	int pair[2], got[KVP_LIMIT_FDS], before;
	size_t n = 99;
	char data[8];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	before = count_fds();
	CMSG_FIRSTHDR(&hdr)->cmsg_level = SOL_SOCKET;
	CMSG_FIRSTHDR(&hdr)->cmsg_type = SCM_RIGHTS;
	CMSG_FIRSTHDR(&hdr)->cmsg_len = CMSG_LEN(sizeof(pair));
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&hdr)), pair, sizeof(pair));
	cr_assert_eq(sendmsg(pair[0], &hdr, 0), 0);
	cr_expect_eq(kvp_packet_recv(pair[1], data, 8, got, &n, KVP_LIMIT_FDS), 0);
	cr_expect_eq(n, 0);
	cr_expect_eq(count_fds(), before);
}

/* ---- frames -------------------------------------------------------------------------------- */

/* All peer messages as one stream. */
static size_t stream(uint8_t *out)
{
	size_t n = 0;

	for (unsigned i = 0; i < SUPPORT_N_PEER; i++) {
		size_t len = support_peer_msg(i, out + n + 4);

		out[n] = (uint8_t)len;
		out[n + 1] = (uint8_t)(len >> 8);
		out[n + 2] = out[n + 3] = 0;
		n += len + 4;
	}
	return n;
}

Test(frames, any_cut_gives_the_same_messages)
{
	static const size_t steps[] = { 1, 2, 3, 5, 7, 64, 100000 };
	size_t len = stream(buf);

	for (unsigned s = 0; s < KVP_ARRAY_SIZE(steps); s++) {
		struct kvp_frames frames = { 0 };
		unsigned n = 0;

		for (size_t at = 0; at < len; at += steps[s]) {
			Kvp__PeerMsg *msg = NULL;

			cr_assert_eq(
				kvp_frames_push(&frames, buf + at, KVP_MIN(steps[s], len - at)), 0);
			while (kvp_frames_next(&frames, &msg, err, sizeof(err)) == 1) {
				n++;
				cr_expect_eq((unsigned)msg->body_case, n);
				kvp_peer_free(msg);
			}
		}
		cr_expect_eq(n, SUPPORT_N_PEER, "step %zu: %u", steps[s], n);
		kvp_frames_fini(&frames);
	}
}

static int next_of(const uint8_t *data, size_t n)
{
	struct kvp_frames frames = { 0 };
	Kvp__PeerMsg *msg = NULL;
	int r;

	cr_assert_eq(kvp_frames_push(&frames, data, n), 0);
	r = kvp_frames_next(&frames, &msg, err, sizeof(err));
	kvp_peer_free(msg);
	kvp_frames_fini(&frames);
	return r;
}

Test(frames, impossible_lengths_are_refused_at_once)
{
	cr_expect_eq(next_of((const uint8_t[]){ 0, 0, 0, 0 }, 4), -EPROTO);
	cr_expect_eq(next_of((const uint8_t[]){ 1, 0, 4, 0 }, 4), -EPROTO);
	cr_expect_str_eq(err, "frame length is 262145, allowed 1 to 262144");
	cr_expect_eq(next_of((const uint8_t[]){ 0, 0, 4, 0 }, 4), 0);
	cr_expect_eq(next_of((const uint8_t[]){ 0, 0, 4 }, 3), 0);
	cr_expect_eq(next_of((const uint8_t[]){ 1, 0, 0, 0, 0xff }, 5), -EPROTO);
}

/* Changes one field of a decoded peer message and sends it through the decoder. */
#define TRY_PEER(i, body, field, value, want)                                                    \
	do {                                                                                     \
		Kvp__PeerMsg *msg_ = NULL, *out_ = NULL;                                         \
		__typeof__(msg_->body->field) old_;                                              \
		long n_;                                                                         \
		int r_;                                                                          \
		cr_assert_eq(                                                                    \
			kvp_peer_decode(buf, support_peer_msg(i, buf), &msg_, err, sizeof(err)), \
			0);                                                                      \
		old_ = msg_->body->field;                                                        \
		msg_->body->field = (value);                                                     \
		n_ = kvp_peer_encode(msg_, buf, sizeof(buf));                                    \
		cr_assert_gt(n_, 4);                                                             \
		r_ = kvp_peer_decode(buf + 4, (size_t)n_ - 4, &out_, err, sizeof(err));          \
		cr_expect_eq(r_, (want), #field " = " #value " gives %d: %s", r_, err);          \
		msg_->body->field = old_;                                                        \
		kvp_peer_free(msg_);                                                             \
		kvp_peer_free(out_);                                                             \
	} while (0)

Test(peer, limits)
{
	TRY_PEER(0, hello, version_min, 0, BAD);
	TRY_PEER(0, hello, incarnation.len, 15, BAD);
	TRY_PEER(1, offer, leg, NULL, BAD);
	TRY_PEER(1, offer, leg->dest, 64, BAD);
	TRY_PEER(1, offer, leg->sender, 64, BAD);
	TRY_PEER(1, offer, leg->generation, 0, BAD);
	TRY_PEER(1, offer, key.len, 0, OK);
	TRY_PEER(1, offer, n_dests, 65, BAD);
	TRY_PEER(1, offer, prefix, 1001, BAD);
	TRY_PEER(1, offer, end, KVP_LIMIT_POSITION + 1, BAD);
	TRY_PEER(1, offer, lane, 64, BAD);
	TRY_PEER(1, offer, slot_bytes, KVP_LIMIT_SLOT_BYTES + 1, BAD);
	TRY_PEER(1, offer, transport, text_of(KVP_LIMIT_TRANSPORT + 1), BAD);
	TRY_PEER(1, offer, entries[0]->row_bytes, 577, BAD);
	TRY_PEER(1, offer, sides[0]->dcp_rank, 4, KVP_STATUS_GEOMETRY);
	TRY_PEER(1, offer, sides[0]->pos0, 8, KVP_STATUS_ALIGNMENT);
	TRY_PEER(1, offer, segments[0]->bytes, 0, BAD);
	TRY_PEER(2, accept, leg, NULL, BAD);
	TRY_PEER(2, accept, lane, 64, BAD);
	TRY_PEER(3, go, leg, NULL, BAD);
	TRY_PEER(4, abort, text, text_of(KVP_LIMIT_TEXT), OK);
	TRY_PEER(4, abort, leg, NULL, BAD);
	TRY_PEER(5, end, leg, NULL, BAD);
	TRY_PEER(6, drained, leg, NULL, BAD);
	TRY_PEER(7, renew, lease_ms, 0, BAD);
	TRY_PEER(8, decline, sender, 64, BAD);
}
