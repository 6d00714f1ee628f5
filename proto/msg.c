/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/msg.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/check.h"

static int check_hello(struct kvp_check *c, const Kvp__Hello *m)
{
	return kvp_check_range(c, "version_min", m->version_min, 1, m->version_max) ?:
	       kvp_check_range(c, "pid", m->pid, 1, INT32_MAX) ?:
	       kvp_check_label(c, "name", m->name, 0, KVP_MAX_LABEL);
}

/* Rows of different pages and slots must be different bytes: one of the two strides nests. */
static int check_entry_strides(const struct kvp_check *c, const Kvp__Entry *e)
{
	uint64_t slots = (uint64_t)(e->rows_per_page - 1) * e->row_stride + e->row_bytes;
	uint64_t pages = (uint64_t)(e->n_pages - 1) * e->page_stride + e->row_bytes;
	bool pages_outside = e->n_pages == 1 || e->page_stride >= slots;
	bool rows_outside = e->rows_per_page == 1 || e->row_stride >= pages;
	bool rows_apart = e->rows_per_page == 1 || e->row_stride >= e->row_bytes;
	bool pages_apart = e->n_pages == 1 || e->page_stride >= e->row_bytes;

	if ((pages_outside && rows_apart) || (rows_outside && pages_apart))
		return 0;
	return kvp_check_fail(c, KVP_STATUS_INVALID,
			      "page_stride %" PRIu64 " and row_stride %" PRIu64
			      " make rows of %u bytes overlap",
			      e->page_stride, e->row_stride, e->row_bytes);
}

static int check_entry_extent(const struct kvp_check *c, const Kvp__Entry *e)
{
	uint64_t need;
	int r = kvp_check_range(c, "bytes", e->bytes, 1, KVP_LIMIT_EXTENT)
			?: kvp_check_range(c, "offset", e->offset, 0, KVP_LIMIT_EXTENT);

	if (r || e->klass == KVP__ENTRY_CLASS__CLASS_BLOB)
		return r;
	/* Strides alone can be 2^46 and counts 2^31: bounding the extent bounds the products. */
	r = kvp_check_range(c, "n_pages", e->n_pages, 1, 1u << 31) ?:
	    kvp_check_range(c, "page_stride", e->page_stride, 0, e->bytes) ?:
	    kvp_check_range(c, "row_stride", e->row_stride, 0, e->bytes);
	if (r)
		return r;
	if (__builtin_mul_overflow((uint64_t)e->n_pages - 1, e->page_stride, &need) ||
	    need > KVP_LIMIT_EXTENT)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "n_pages %u with page_stride %" PRIu64
				      " is past the extent of %" PRIu64 " bytes",
				      e->n_pages, e->page_stride, e->bytes);
	/* At most 2^24 rows of at most 2^46 bytes would overflow: divide instead. */
	if (e->rows_per_page > 1 && e->row_stride > e->bytes / (e->rows_per_page - 1))
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "rows_per_page %u with row_stride %" PRIu64
				      " is past the extent of %" PRIu64 " bytes",
				      e->rows_per_page, e->row_stride, e->bytes);
	need += (uint64_t)(e->rows_per_page - 1) * e->row_stride + e->row_bytes;
	if (need > e->bytes)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "bytes is %" PRIu64 ", the last row ends at %" PRIu64,
				      e->bytes, need);
	return check_entry_strides(c, e);
}

/* They hold what the memory says to be in them. */
static int check_memory_chunks(const struct kvp_check *c, const Kvp__Memory *m)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < m->n_chunk_bytes; i++) {
		int r = kvp_check_range(c, "chunk_bytes", m->chunk_bytes[i], 1, KVP_LIMIT_EXTENT);

		if (r)
			return r;
		sum += m->chunk_bytes[i];
	}
	if (sum > KVP_LIMIT_EXTENT || m->offset > sum || m->bytes > sum - m->offset)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "offset %" PRIu64 " and bytes %" PRIu64
				      " do not lie in chunks of %" PRIu64 " bytes",
				      m->offset, m->bytes, sum);
	return 0;
}

static int check_dmabuf(const struct kvp_check *c, const Kvp__Memory *m)
{
	uint64_t most = m->kind == KVP__MEMORY_KIND__MEMORY_FD ? 0 : KVP_LIMIT_EXTENT;
	int r = kvp_check_range(c, "dmabuf_bytes", m->dmabuf_bytes, 0, most) ?:
		kvp_check_range(c, "dmabuf_offset", m->dmabuf_offset, 0, most) ?:
		kvp_check_text(c, "dmabuf_reason", m->dmabuf_reason, KVP_DMABUF_REASON);

	if (r || m->dmabuf_bytes == 0)
		return r;
	if (m->dmabuf_offset <= m->dmabuf_bytes && m->bytes <= m->dmabuf_bytes - m->dmabuf_offset)
		return 0;
	return kvp_check_fail(c, KVP_STATUS_INVALID,
			      "dmabuf_offset %" PRIu64 " and bytes %" PRIu64
			      " do not lie in a dma-buf of %" PRIu64 " bytes",
			      m->dmabuf_offset, m->bytes, m->dmabuf_bytes);
}

static int check_memory(const struct kvp_check *c, const Kvp__Memory *m)
{
	bool ipc = m->kind == KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
	bool vmm = m->kind == KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
	size_t handle = ipc ? KVP_IPC_HANDLE_BYTES : 0, gpu = ipc || vmm ? KVP_GPU_UUID_BYTES : 0;
	uint64_t most = ipc || vmm ? KVP_LIMIT_EXTENT : 0;
	int r = kvp_check_enum(c, "kind", (int)m->kind, KVP__MEMORY_KIND__MEMORY_CUDA_VMM) ?:
		kvp_check_count(c, "handle", m->handle.len, handle, handle) ?:
		kvp_check_count(c, "gpu", m->gpu.len, gpu, gpu) ?:
		kvp_check_range(c, "offset", m->offset, 0, most) ?:
		kvp_check_range(c, "bytes", m->bytes, ipc || vmm, most) ?:
		kvp_check_count(c, "chunk_bytes", m->n_chunk_bytes, vmm, vmm ? KVP_LIMIT_FDS : 0) ?:
		check_dmabuf(c, m);

	return r || !vmm ? r : check_memory_chunks(c, m);
}

/* All of the host, or all of one GPU: a pool has one lane. */
static int check_memories(struct kvp_check *c, Kvp__Memory *const *memories, size_t n)
{
	int r = kvp_check_count(c, "memories", n, 0, KVP_LIMIT_MEMORIES);

	c->list = "memories";
	for (c->idx = 0; r == 0 && c->idx < n; c->idx++) {
		const Kvp__Memory *m = memories[c->idx], *first = memories[0];

		r = check_memory(c, m);
		if (r == 0 &&
		    (m->gpu.len != first->gpu.len ||
		     (m->gpu.len && memcmp(m->gpu.data, first->gpu.data, m->gpu.len) != 0)))
			r = kvp_check_fail(c, KVP_STATUS_INVALID,
					   "gpu differs from that of memories[0]: a pool lies on "
					   "one GPU or in host memory");
	}
	c->list = NULL;
	return r;
}

static int check_pool_resume(struct kvp_check *c, const Kvp__PoolResume *m)
{
	return kvp_check_range(c, "pool", m->pool, 1, UINT32_MAX)
		       ?: check_memories(c, m->memories, m->n_memories);
}

static int check_pool_register(struct kvp_check *c, const Kvp__PoolRegister *m)
{
	struct kvp_check_rows rows[KVP_LIMIT_ENTRIES];
	uint64_t last_memory = (m->n_memories ? KVP_LIMIT_MEMORIES : KVP_LIMIT_FDS) - 1;
	int r = kvp_check_range(c, "pool", m->pool, 1, UINT32_MAX) ?:
		kvp_check_count(c, "layout_tag", m->layout_tag.len, 0, KVP_MAX_TAG) ?:
		kvp_check_label(c, "label", m->label, 0, KVP_MAX_LABEL) ?:
		kvp_check_count(c, "entries", m->n_entries, 1, KVP_LIMIT_ENTRIES) ?:
		check_memories(c, m->memories, m->n_memories);

	c->list = "entries";
	for (c->idx = 0; r == 0 && c->idx < m->n_entries; c->idx++) {
		const Kvp__Entry *e = m->entries[c->idx];

		rows[c->idx] = (struct kvp_check_rows){ (int)e->klass,   e->layer, e->group,
							e->row_bytes,    e->lo,    e->full_bytes,
							e->rows_per_page };
		r = kvp_check_rows(c, &rows[c->idx]) ?:
		    kvp_check_range(c, "fd_index", e->fd_index, 0, last_memory) ?:
		    check_entry_extent(c, e);
	}
	return r ?: kvp_check_rows_apart(c, rows, m->n_entries);
}

static int check_pages(struct kvp_check *c, const Kvp__Pages *m)
{
	return kvp_check_range(c, "list", m->list, 1, UINT32_MAX) ?:
	       kvp_check_count(c, "pages", m->n_pages, 1, KVP_LIMIT_LIST_PAGES) ?:
	       kvp_check_range(c, "offset", m->offset, 0, KVP_LIMIT_LIST_OFFSET - m->n_pages);
}

static int check_aligned(const struct kvp_check *c, const char *field, uint64_t value,
			 const Kvp__Side *side)
{
	uint64_t vpage = (uint64_t)side->page * side->dcp_size;

	if (value % vpage == 0)
		return 0;
	return kvp_check_fail(c, KVP_STATUS_ALIGNMENT,
			      "%s is %" PRIu64 ", must be a multiple of page %u x dcp_size %u",
			      field, value, side->page, side->dcp_size);
}

/* groups collects those of the sides so far. */
static int check_side(const struct kvp_check *c, const Kvp__Side *s, struct kvp_seen *groups)
{
	struct kvp_check_side side = { s->group, s->page, s->dcp_size, s->dcp_rank, s->interleave };

	return kvp_check_side(c, &side) ?: kvp_check_new(c, groups, "group", s->group);
}

static int check_expect_sides(struct kvp_check *c, const Kvp__Expect *m)
{
	const struct kvp_check whole = *c;
	struct kvp_seen groups = { { 0 } };
	uint32_t lists[KVP_LIMIT_GROUPS];
	size_t n_lists = 0;
	int r = kvp_check_count(c, "sides", m->n_sides, 0, KVP_LIMIT_GROUPS);

	c->list = "sides";
	for (c->idx = 0; r == 0 && c->idx < m->n_sides; c->idx++) {
		const Kvp__Side *s = m->sides[c->idx];

		r = check_side(c, s, &groups) ?:
		    kvp_check_range(c, "pos0", s->pos0, 0, KVP_LIMIT_POSITION) ?:
		    check_aligned(c, "pos0", s->pos0, s) ?:
		    check_aligned(&whole, "prefix", m->prefix, s) ?:
		    kvp_check_range(c, "first", s->first, 0, m->end);
		if (s->list)
			lists[n_lists++] = s->list;
	}
	c->list = NULL;
	return r ?: kvp_check_ids(c, "sides.list", lists, n_lists);
}

static int check_segment(const struct kvp_check *c, uint32_t entry, uint64_t offset, uint64_t bytes)
{
	return kvp_check_range(c, "entry", entry, 0, KVP_LIMIT_ENTRIES - 1) ?:
	       kvp_check_range(c, "bytes", bytes, 1, KVP_LIMIT_EXTENT) ?:
	       kvp_check_range(c, "offset", offset, 0, KVP_LIMIT_EXTENT - bytes);
}

static int check_expect_segments(struct kvp_check *c, const Kvp__Expect *m)
{
	uint32_t ids[KVP_LIMIT_SEGMENTS];
	int r = kvp_check_count(c, "segments", m->n_segments, 0, KVP_LIMIT_SEGMENTS);

	c->list = "segments";
	for (c->idx = 0; r == 0 && c->idx < m->n_segments; c->idx++) {
		const Kvp__ExpectSegment *s = m->segments[c->idx];

		ids[c->idx] = s->id;
		r = check_segment(c, s->entry, s->offset, s->bytes);
	}
	c->list = NULL;
	return r ?: kvp_check_ids(c, "segments.id", ids, m->n_segments);
}

static int check_expect_senders(struct kvp_check *c, const Kvp__Expect *m)
{
	struct kvp_seen seen = { { 0 } };
	bool meta_found = m->meta_from < 0;
	int r = kvp_check_count(c, "senders", m->n_senders, 1, KVP_MAX_SENDERS);

	c->list = "senders";
	for (c->idx = 0; r == 0 && c->idx < m->n_senders; c->idx++) {
		const Kvp__ExpectSender *s = m->senders[c->idx];

		r = kvp_check_word(c, "address", s->address, 1, KVP_LIMIT_ADDRESS) ?:
		    kvp_check_range(c, "sender", s->sender, 0, KVP_MAX_SENDERS - 1) ?:
		    kvp_check_new(c, &seen, "sender", s->sender) ?:
		    kvp_check_range(c, "n_dests", s->n_dests, 1, KVP_MAX_DESTS) ?:
		    kvp_check_enum(c, "role", (int)s->role, KVP_ROLE_NONE);
		meta_found |= (int64_t)s->sender == m->meta_from &&
			      s->role == KVP__SENDER_ROLE__ROLE_DATA;
	}
	c->list = NULL;
	if (r == 0 && !meta_found)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "meta_from is %d, which is no listed sender with data",
				      m->meta_from);
	return r;
}

static int check_expect(struct kvp_check *c, const Kvp__Expect *m)
{
	int r = kvp_check_range(c, "handle", m->handle, 1, UINT64_MAX) ?:
		kvp_check_key(c, &m->key) ?:
		kvp_check_range(c, "dest", m->dest, 0, KVP_MAX_DESTS - 1) ?:
		kvp_check_range(c, "pool", m->pool, 1, UINT32_MAX) ?:
		kvp_check_range(c, "end", m->end, 0, KVP_LIMIT_POSITION) ?:
		kvp_check_range(c, "prefix", m->prefix, 0, m->end) ?:
		kvp_check_label(c, "label", m->label, 0, KVP_MAX_LABEL);

	if (r == 0 && m->meta_from < -1)
		r = kvp_check_fail(c, KVP_STATUS_INVALID, "meta_from is %d, allowed -1 to %u",
				   m->meta_from, KVP_MAX_SENDERS - 1);
	return r ?: check_expect_sides(c, m) ?: check_expect_segments(c, m) ?:
					      check_expect_senders(c, m);
}

static int check_open(struct kvp_check *c, const Kvp__Open *m)
{
	struct kvp_seen groups = { { 0 } };
	int r = kvp_check_range(c, "handle", m->handle, 1, UINT64_MAX) ?:
		kvp_check_key(c, &m->key) ?:
		kvp_check_range(c, "sender", m->sender, 0, KVP_MAX_SENDERS - 1) ?:
		kvp_check_range(c, "pool", m->pool, 1, UINT32_MAX) ?:
		kvp_check_count(c, "entry_mask", m->entry_mask.len, 0, KVP_LIMIT_MASK) ?:
		kvp_check_label(c, "label", m->label, 0, KVP_MAX_LABEL) ?:
		kvp_check_count(c, "sides", m->n_sides, 0, KVP_LIMIT_GROUPS);

	c->list = "sides";
	for (c->idx = 0; r == 0 && c->idx < m->n_sides; c->idx++)
		r = check_side(c, m->sides[c->idx], &groups)
			    ?: kvp_check_range(c, "list", m->sides[c->idx]->list, 0, 0);
	return r;
}

static int check_submit_sides(struct kvp_check *c, const Kvp__Submit *m)
{
	struct kvp_seen groups = { { 0 } };
	uint32_t lists[KVP_LIMIT_GROUPS];
	size_t n_lists = 0;
	int r = kvp_check_count(c, "sides", m->n_sides, 0, KVP_LIMIT_GROUPS);

	c->list = "sides";
	for (c->idx = 0; r == 0 && c->idx < m->n_sides; c->idx++) {
		const Kvp__ChunkSide *s = m->sides[c->idx];

		r = kvp_check_range(c, "group", s->group, 0, KVP_LIMIT_GROUPS - 1) ?:
		    kvp_check_new(c, &groups, "group", s->group) ?:
		    kvp_check_range(c, "pos0", s->pos0, 0, KVP_LIMIT_POSITION);
		if (s->list)
			lists[n_lists++] = s->list;
	}
	c->list = NULL;
	return r ?: kvp_check_ids(c, "sides.list", lists, n_lists);
}

static int check_submit_segments(struct kvp_check *c, const Kvp__Submit *m)
{
	uint32_t ids[KVP_LIMIT_SEGMENTS];
	int r = kvp_check_count(c, "segments", m->n_segments, 0, KVP_LIMIT_SEGMENTS);

	c->list = "segments";
	for (c->idx = 0; r == 0 && c->idx < m->n_segments; c->idx++) {
		const Kvp__SubmitSegment *s = m->segments[c->idx];

		ids[c->idx] = s->id;
		r = check_segment(c, s->entry, s->offset, s->bytes);
	}
	c->list = NULL;
	return r ?: kvp_check_ids(c, "segments.id", ids, m->n_segments);
}

static int check_submit(struct kvp_check *c, const Kvp__Submit *m)
{
	int r = kvp_check_range(c, "handle", m->handle, 1, UINT64_MAX) ?:
		kvp_check_range(c, "seq", m->seq, 0, KVP_LIMIT_SEQ) ?:
		kvp_check_range(c, "start", m->start, 0, KVP_LIMIT_POSITION) ?:
		kvp_check_range(c, "tokens", m->tokens, 0, KVP_LIMIT_POSITION - m->start) ?:
		kvp_check_count(c, "entry_set", m->entry_set.len, 0, KVP_LIMIT_MASK) ?:
		kvp_check_count(c, "meta", m->meta.len, 0, KVP_MAX_META) ?:
		check_submit_sides(c, m) ?:
		check_submit_segments(c, m);

	if (r)
		return r;
	if (m->meta.len > 0 && !m->last)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "meta has %zu bytes, allowed with last only", m->meta.len);
	if (m->tokens == 0 && m->n_segments == 0 && !m->last)
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "tokens is 0, allowed with last or segments only");
	if (m->fence == 0 && (m->fence_word || m->fence_value))
		return kvp_check_fail(c, KVP_STATUS_INVALID,
				      "fence is 0 with fence_word %u and fence_value %" PRIu64,
				      m->fence_word, m->fence_value);
	return 0;
}

static int check_renew(struct kvp_check *c, const Kvp__Renew *m)
{
	return kvp_check_word(c, "address", m->address, 1, KVP_LIMIT_ADDRESS) ?:
	       kvp_check_key(c, &m->key) ?:
	       kvp_check_range(c, "sender", m->sender, 0, KVP_MAX_SENDERS - 1) ?:
	       kvp_check_range(c, "lease_ms", m->lease_ms, 1, UINT32_MAX);
}

static int check_decline(struct kvp_check *c, const Kvp__Decline *m)
{
	return kvp_check_word(c, "address", m->address, 1, KVP_LIMIT_ADDRESS) ?:
	       kvp_check_key(c, &m->key) ?:
	       kvp_check_range(c, "sender", m->sender, 0, KVP_MAX_SENDERS - 1) ?:
	       kvp_check_label(c, "reason", m->reason, 0, KVP_LIMIT_REASON);
}

static int check_fence_register(struct kvp_check *c, const Kvp__FenceRegister *m)
{
	return kvp_check_range(c, "fence", m->fence, 1, UINT32_MAX)
		       ?: kvp_check_range(c, "words", m->words, 1, KVP_LIMIT_FENCE_WORDS);
}

/* Bodies that are little more than an id. */
static int check_small(struct kvp_check *c, const Kvp__ClientMsg *m)
{
	switch (m->body_case) {
	case KVP__CLIENT_MSG__BODY_POOL_PAUSE:
		c->msg = "pool_pause";
		return kvp_check_range(c, "pool", m->pool_pause->pool, 1, UINT32_MAX);
	case KVP__CLIENT_MSG__BODY_POOL_RESUME:
		c->msg = "pool_resume";
		return check_pool_resume(c, m->pool_resume);
	case KVP__CLIENT_MSG__BODY_POOL_UNREGISTER:
		c->msg = "pool_unregister";
		return kvp_check_range(c, "pool", m->pool_unregister->pool, 1, UINT32_MAX);
	case KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER:
		c->msg = "fence_unregister";
		return kvp_check_range(c, "fence", m->fence_unregister->fence, 1, UINT32_MAX);
	case KVP__CLIENT_MSG__BODY_RECALL:
		c->msg = "recall";
		return kvp_check_range(c, "handle", m->recall->handle, 1, UINT64_MAX)
			       ?: kvp_check_range(c, "seq", m->recall->seq, 0, KVP_LIMIT_SEQ);
	case KVP__CLIENT_MSG__BODY_ABORT:
		c->msg = "abort";
		return kvp_check_range(c, "handle", m->abort->handle, 1, UINT64_MAX)
			       ?: kvp_check_label(c, "reason", m->abort->reason, 0,
						  KVP_LIMIT_REASON);
	case KVP__CLIENT_MSG__BODY_INSPECT:
		c->msg = "inspect";
		return kvp_check_word(c, "what", m->inspect->what, 1, KVP_LIMIT_WHAT)
			       ?: kvp_check_label(c, "arg", m->inspect->arg, 0, KVP_LIMIT_TEXT);
	case KVP__CLIENT_MSG__BODY_DRAIN:
		c->msg = "drain";
		return kvp_check_label(c, "reason", m->drain->reason, 0, KVP_LIMIT_REASON);
	case KVP__CLIENT_MSG__BODY_TEST_HOLD:
		c->msg = "test_hold";
		return kvp_check_word(c, "point", m->test_hold->point, 1, KVP_MAX_LABEL);
	case KVP__CLIENT_MSG__BODY_SETTLE:
		c->msg = "settle";
		return kvp_check_range(c, "session", m->settle->session, 1, UINT64_MAX);
	default:
		return kvp_check_fail(c, KVP_STATUS_INVALID, "body is missing or unknown");
	}
}

int kvp_msg_check_client(const Kvp__ClientMsg *m, char *err, size_t errlen)
{
	struct kvp_check c = { .err = err, .errlen = errlen, .msg = "message" };
	int r = kvp_check_range(&c, "id", m->id, 1, UINT64_MAX);

	if (r)
		return r;
	switch (m->body_case) {
	case KVP__CLIENT_MSG__BODY_HELLO:
		c.msg = "hello";
		return check_hello(&c, m->hello);
	case KVP__CLIENT_MSG__BODY_POOL_REGISTER:
		c.msg = "pool_register";
		return check_pool_register(&c, m->pool_register);
	case KVP__CLIENT_MSG__BODY_FENCE_REGISTER:
		c.msg = "fence_register";
		return check_fence_register(&c, m->fence_register);
	case KVP__CLIENT_MSG__BODY_PAGES:
		c.msg = "pages";
		return check_pages(&c, m->pages);
	case KVP__CLIENT_MSG__BODY_EXPECT:
		c.msg = "expect";
		return check_expect(&c, m->expect);
	case KVP__CLIENT_MSG__BODY_OPEN:
		c.msg = "open";
		return check_open(&c, m->open);
	case KVP__CLIENT_MSG__BODY_SUBMIT:
		c.msg = "submit";
		return check_submit(&c, m->submit);
	case KVP__CLIENT_MSG__BODY_RENEW:
		c.msg = "renew";
		return check_renew(&c, m->renew);
	case KVP__CLIENT_MSG__BODY_DECLINE:
		c.msg = "decline";
		return check_decline(&c, m->decline);
	default:
		return check_small(&c, m);
	}
}

static int check_reply(struct kvp_check *c, const Kvp__Reply *m)
{
	int r = kvp_check_enum(c, "status", (int)m->status, INT32_MAX)
			?: kvp_check_text(c, "text", m->text, KVP_LIMIT_TEXT);

	if (r || !m->hello)
		return r;
	c->msg = "hello_reply";
	return kvp_check_count(c, "incarnation", m->hello->incarnation.len, KVP_INCARNATION_BYTES,
			       KVP_INCARNATION_BYTES) ?:
	       kvp_check_label(c, "node", m->hello->node, 0, KVP_MAX_LABEL) ?:
	       kvp_check_text(c, "address", m->hello->address, KVP_LIMIT_ADDRESS);
}

static int check_room_event(struct kvp_check *c, const Kvp__RoomEvent *m)
{
	int r = kvp_check_range(c, "handle", m->handle, 1, UINT64_MAX) ?:
		kvp_check_enum(c, "state", (int)m->state, KVP_ROOM_RELEASED) ?:
		kvp_check_enum(c, "status", (int)m->status, INT32_MAX) ?:
		kvp_check_text(c, "reason", m->reason, KVP_LIMIT_TEXT) ?:
		kvp_check_count(c, "meta", m->meta.len, 0, KVP_MAX_META);

	if (r == 0 && m->complete && m->failed)
		return kvp_check_fail(c, KVP_STATUS_INVALID, "complete and failed are both set");
	return r;
}

static int check_daemon(const Kvp__DaemonMsg *m, char *err, size_t errlen)
{
	struct kvp_check c = { .err = err, .errlen = errlen, .msg = "message" };

	switch (m->body_case) {
	case KVP__DAEMON_MSG__BODY_REPLY:
		c.msg = "reply";
		return check_reply(&c, m->reply);
	case KVP__DAEMON_MSG__BODY_ROOM:
		c.msg = "room";
		return check_room_event(&c, m->room);
	default:
		return kvp_check_fail(&c, KVP_STATUS_INVALID, "body is missing or unknown");
	}
}

/* Unpacks either kind; NULL with a text. */
static ProtobufCMessage *unpack(const ProtobufCMessageDescriptor *desc, const void *buf, size_t len,
				char *err, size_t errlen)
{
	ProtobufCMessage *msg = NULL;

	if (len <= KVP_LIMIT_PACKET)
		msg = kvp_unpack(desc, buf, len);
	if (!msg && err && len > KVP_LIMIT_PACKET)
		(void)snprintf(err, errlen, "message has %zu bytes, at most %u", len,
			       KVP_LIMIT_PACKET);
	else if (!msg && err)
		(void)snprintf(err, errlen, "message of %zu bytes is malformed", len);
	return msg;
}

int kvp_msg_decode_client(const void *buf, size_t len, Kvp__ClientMsg **out, char *err,
			  size_t errlen)
{
	KVP_CLEANUP(kvp_msg_free_clientp)
	Kvp__ClientMsg *msg =
		(Kvp__ClientMsg *)unpack(&kvp__client_msg__descriptor, buf, len, err, errlen);
	int r = msg ? kvp_msg_check_client(msg, err, errlen) : KVP_STATUS_INVALID;

	if (r == 0)
		*out = KVP_TAKE(msg);
	return r;
}

int kvp_msg_decode_daemon(const void *buf, size_t len, Kvp__DaemonMsg **out, char *err,
			  size_t errlen)
{
	KVP_CLEANUP(kvp_msg_free_daemonp)
	Kvp__DaemonMsg *msg =
		(Kvp__DaemonMsg *)unpack(&kvp__daemon_msg__descriptor, buf, len, err, errlen);
	int r = msg ? check_daemon(msg, err, errlen) : KVP_STATUS_INVALID;

	if (r == 0)
		*out = KVP_TAKE(msg);
	return r;
}

void kvp_msg_free_client(Kvp__ClientMsg *msg)
{
	kvp__client_msg__free_unpacked(msg, NULL);
}

void kvp_msg_free_daemon(Kvp__DaemonMsg *msg)
{
	kvp__daemon_msg__free_unpacked(msg, NULL);
}

long kvp_msg_encode_client(const Kvp__ClientMsg *msg, void *buf, size_t cap)
{
	return kvp_pack(&msg->base, buf, KVP_MIN(cap, (size_t)KVP_LIMIT_PACKET));
}

long kvp_msg_encode_daemon(const Kvp__DaemonMsg *msg, void *buf, size_t cap)
{
	return kvp_pack(&msg->base, buf, KVP_MIN(cap, (size_t)KVP_LIMIT_PACKET));
}

uint64_t kvp_msg_peek_id(const void *buf, size_t len)
{
	const uint8_t *p = buf;
	uint64_t id = 0;

	/* Encoders write fields in order: the id, field 1 as a varint, comes first.
	 */
	if (len < 2 || p[0] != 0x08)
		return 0;
	for (size_t i = 1; i < len && i <= 10; i++) {
		id |= (uint64_t)(p[i] & 0x7f) << 7 * (i - 1);
		if (!(p[i] & 0x80))
			return id;
	}
	return 0;
}

/* How many fds the memories take. */
static size_t memories_fds(Kvp__Memory *const *memories, size_t n)
{
	size_t n_fds = 0;

	for (size_t i = 0; i < n; i++)
		n_fds += memories[i]->kind == KVP__MEMORY_KIND__MEMORY_FD
				 ? 1
				 : memories[i]->n_chunk_bytes + (memories[i]->dmabuf_bytes > 0);
	return n_fds;
}

/* The fds of a pool's packet: as many as its memories take, or without any, at least one. */
static int check_memories_fds(const struct kvp_check *c, Kvp__Memory *const *memories, size_t n,
			      size_t n_fds)
{
	size_t need;

	if (n == 0)
		return kvp_check_count(c, "fds", n_fds, 1, KVP_LIMIT_FDS);
	need = memories_fds(memories, n);
	if (n_fds == need && need <= KVP_LIMIT_FDS)
		return 0;
	return kvp_check_fail(c, KVP_STATUS_INVALID,
			      "memories take %zu fds, %zu came along, at most %u can", need, n_fds,
			      KVP_LIMIT_FDS);
}

/* Each memory, or fd, is used by an entry, and each entry names one. */
static int check_pool_fds(struct kvp_check *c, const Kvp__PoolRegister *m, size_t n_fds)
{
	const char *what = m->n_memories ? "memories" : "fds";
	size_t n = m->n_memories ? m->n_memories : n_fds;
	struct kvp_seen used = { { 0 } };

	for (size_t i = 0; i < m->n_entries; i++) {
		uint32_t fd = m->entries[i]->fd_index;

		if (fd >= n)
			return kvp_check_fail(c, KVP_STATUS_INVALID,
					      "entries[%zu].fd_index is %u, %zu %s came along", i,
					      fd, n, what);
		used.bits[fd / 64] |= 1ull << fd % 64;
	}
	for (size_t i = 0; i < n; i++) {
		if (!(used.bits[i / 64] & 1ull << i % 64))
			return kvp_check_fail(c, KVP_STATUS_INVALID,
					      "entries: no entry uses %s %zu of %zu",
					      m->n_memories ? "memory" : "fd", i, n);
	}
	return 0;
}

int kvp_msg_check_fds(const Kvp__ClientMsg *msg, size_t n_fds, char *err, size_t errlen)
{
	struct kvp_check c = { .err = err, .errlen = errlen, .msg = "message" };

	switch (msg->body_case) {
	case KVP__CLIENT_MSG__BODY_POOL_REGISTER:
		c.msg = "pool_register";
		return check_memories_fds(&c, msg->pool_register->memories,
					  msg->pool_register->n_memories, n_fds)
			       ?: check_pool_fds(&c, msg->pool_register, n_fds);
	case KVP__CLIENT_MSG__BODY_POOL_RESUME:
		c.msg = "pool_resume";
		return check_memories_fds(&c, msg->pool_resume->memories,
					  msg->pool_resume->n_memories, n_fds);
	case KVP__CLIENT_MSG__BODY_FENCE_REGISTER:
		c.msg = "fence_register";
		return kvp_check_count(&c, "fds", n_fds, 1, 1);
	default:
		return kvp_check_count(&c, "fds", n_fds, 0, 0);
	}
}

int kvp_version_choose(const uint32_t ours[2], const uint32_t theirs[2], uint32_t *version,
		       char *err, size_t errlen)
{
	uint32_t lo = KVP_MAX(ours[0], theirs[0]);
	uint32_t hi = KVP_MIN(ours[1], theirs[1]);

	if (lo <= hi) {
		*version = hi;
		return 0;
	}
	if (err)
		(void)snprintf(err, errlen,
			       "no common protocol version: this end speaks %u.%u to %u.%u, the "
			       "other %u.%u to %u.%u",
			       ours[0] >> 16, ours[0] & 0xffff, ours[1] >> 16, ours[1] & 0xffff,
			       theirs[0] >> 16, theirs[0] & 0xffff, theirs[1] >> 16,
			       theirs[1] & 0xffff);
	return KVP_STATUS_VERSION;
}

void kvp_text_clean(char *text)
{
	size_t len = strlen(text);
	size_t tail = 0;

	for (size_t i = 0; i < len; i++) {
		if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
			text[i] = '?';
	}
	while (tail < 3 && tail < len && ((unsigned char)text[len - 1 - tail] & 0xc0) == 0x80)
		tail++;
	if (tail < len) {
		unsigned char lead = (unsigned char)text[len - 1 - tail];
		size_t need = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;

		if (need > tail)
			text[len - 1 - tail] = '\0';
	}
}
