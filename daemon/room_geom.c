/* SPDX-License-Identifier: Apache-2.0 */

/* What both ends of a leg compute alike, and how it travels. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room_internal.h"

/* ---- to and from the wire ----------------------------------------------------------------------
 */

static void entry_unpack(struct kvp_entry *entry, const Kvp__PeerEntry *msg)
{
	*entry = (struct kvp_entry){
		.layer = msg->layer,
		.group = msg->group,
		.row_bytes = msg->row_bytes,
		.lo = msg->lo,
		.full_bytes = msg->full_bytes,
		.rows_per_page = msg->rows_per_page,
		.n_pages = 1,
		.klass = (uint8_t)msg->klass,
	};
}

void kvp_geom_remote_fini(struct kvp_geom_remote *remote)
{
	free(remote->entries);
	remote->entries = NULL;
}

Kvp__Status kvp_geom_unpack(struct kvp_geom_remote *out, Kvp__PeerEntry *const *entries,
			    size_t n_entries, Kvp__PeerSide *const *sides, size_t n_sides,
			    char *err)
{
	memset(out, 0, sizeof(*out));
	if (n_entries > KVP_LIMIT_ENTRIES)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "the other end has %zu entries, limit %u", n_entries,
				       KVP_LIMIT_ENTRIES);
	out->entries = calloc(KVP_MAX(n_entries, (size_t)1), sizeof(*out->entries));
	if (!out->entries)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	out->n = (uint32_t)n_entries;
	for (size_t i = 0; i < n_entries; i++) {
		entry_unpack(&out->entries[i], entries[i]);
		if (!entries[i]->masked)
			out->mask[i / 64] |= UINT64_C(1) << (i % 64);
	}
	for (size_t i = 0; i < n_sides; i++) {
		const Kvp__PeerSide *msg = sides[i];

		if (msg->group >= KVP_LANE_GROUPS)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
					       "the other end has a side for group %u, limit %u",
					       msg->group, KVP_LANE_GROUPS - 1);
		out->sides[msg->group] = (struct kvp_side){
			.page = msg->page,
			.dcp_size = msg->dcp_size,
			.dcp_rank = msg->dcp_rank,
			.interleave = msg->interleave,
			.pos0 = msg->pos0,
			.n_pages = KVP_PAGES_ANY,
		};
		out->firsts[msg->group] = msg->first;
	}
	return KVP_ROOM_OK;
}

static void entry_pack(Kvp__PeerEntry *msg, const struct kvp_entry *entry, bool masked)
{
	kvp__peer_entry__init(msg);
	msg->layer = entry->layer;
	msg->klass = (Kvp__EntryClass)entry->klass;
	msg->group = entry->group;
	msg->row_bytes = entry->row_bytes;
	msg->lo = entry->lo;
	msg->full_bytes = entry->full_bytes;
	msg->rows_per_page = entry->rows_per_page;
	msg->masked = masked;
}

static void side_pack(Kvp__PeerSide *msg, const struct kvp_side *side, uint32_t group,
		      uint64_t first)
{
	kvp__peer_side__init(msg);
	msg->group = group;
	msg->page = side->page;
	msg->dcp_size = side->dcp_size;
	msg->dcp_rank = side->dcp_rank;
	msg->interleave = side->interleave;
	msg->pos0 = side->pos0;
	msg->first = first;
}

int kvp_geom_pack(struct kvp_geom_packed *out, const struct kvp_geom_end *end,
		  const uint64_t *firsts)
{
	size_t bytes = end->n * (sizeof(Kvp__PeerEntry) + sizeof(void *)) +
		       KVP_LANE_GROUPS * (sizeof(Kvp__PeerSide) + sizeof(void *));
	uint8_t *block = calloc(1, bytes);
	Kvp__PeerEntry *entries;
	Kvp__PeerSide *sides;

	memset(out, 0, sizeof(*out));
	if (!block)
		return -ENOMEM;
	out->block = block;
	entries = (void *)block;
	sides = (void *)(entries + end->n);
	out->entries = (void *)(sides + KVP_LANE_GROUPS);
	out->sides = (void *)(out->entries + end->n);
	for (uint32_t i = 0; i < end->n; i++) {
		entry_pack(&entries[i], &end->entries[i], !kvp_mask_has(end->mask, i));
		out->entries[i] = &entries[i];
	}
	out->n_entries = end->n;
	for (uint32_t g = 0; g < end->n_sides; g++) {
		if (end->sides[g].page == 0)
			continue;
		side_pack(&sides[out->n_sides], &end->sides[g], g, firsts ? firsts[g] : 0);
		out->sides[out->n_sides] = &sides[out->n_sides];
		out->n_sides++;
	}
	return 0;
}

/* ---- checks ------------------------------------------------------------------------------------
 */

Kvp__Status kvp_geom_take_side(const struct kvp_pool *pool, const Kvp__Side *from,
			       struct kvp_side *sides, uint32_t n_sides, struct kvp_side **out,
			       char *err)
{
	if (from->group >= n_sides || pool->group_pages[from->group] == 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "sides: group %u has no rows in pool %u", from->group,
				       pool->client_id);
	if (sides[from->group].page)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_INVALID,
				       "sides: group %u stands twice", from->group);
	*out = &sides[from->group];
	**out = (struct kvp_side){
		.page = from->page,
		.dcp_size = from->dcp_size,
		.dcp_rank = from->dcp_rank,
		.interleave = from->interleave,
	};
	return KVP_ROOM_OK;
}

Kvp__Status kvp_geom_refuse_side(const struct kvp_side *side, uint32_t group, char *err)
{
	return kvp_room_refuse(err, KVP__STATUS__STATUS_GEOMETRY,
			       "sides: group %u: page %u, dcp_size %u, dcp_rank %u, interleave %u "
			       "cannot be",
			       group, side->page, side->dcp_size, side->dcp_rank, side->interleave);
}

Kvp__Status kvp_geom_check_sides(const struct kvp_geom_end *end, char *err)
{
	char text[KVP_PLAN_ERR_BYTES];

	for (uint32_t i = 0; i < end->n; i++) {
		const struct kvp_entry *entry = &end->entries[i];

		if (entry->klass == KVP_CLASS_BLOB || !kvp_mask_has(end->mask, i))
			continue;
		if (entry->group >= end->n_sides || end->sides[entry->group].page == 0)
			return kvp_room_refuse(err, KVP__STATUS__STATUS_GEOMETRY,
					       "sides: none for group %u, which entries[%u] has",
					       entry->group, i);
		if (kvp_sides_check(entry, 1, end->sides, end->n_sides, text, sizeof(text)) < 0)
			return kvp_room_refuse(
				err, KVP__STATUS__STATUS_GEOMETRY,
				"sides: entries[%u] has rows_per_page %u, the side of group %u %u",
				i, entry->rows_per_page, entry->group,
				kvp_entry_side(entry, end->sides).page);
	}
	return KVP_ROOM_OK;
}

static bool is_text(const uint8_t *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (bytes[i] < ' ' || bytes[i] > '~')
			return false;
	return true;
}

/* As it is if it can be read, else in hex. */
static void print_tag(const uint8_t *bytes, size_t n, char *out, size_t out_bytes)
{
	bool text = is_text(bytes, n);
	size_t width = text ? 1 : 2, shown = KVP_MIN(n, (out_bytes - 4) / width);

	for (size_t i = 0; i < shown; i++)
		(void)snprintf(out + width * i, 3, text ? "%c" : "%02x", bytes[i]);
	(void)snprintf(out + width * shown, 4, "%s", shown < n ? "..." : "");
}

Kvp__Status kvp_geom_check_tags(const struct kvp_pool *pool, const ProtobufCBinaryData *tag,
				uint32_t layout_version, char *err)
{
	char own[48], other[48];

	if (layout_version != KVP_LAYOUT_VERSION)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
				       "layout_version is %u here, %u at the other end",
				       KVP_LAYOUT_VERSION, layout_version);
	if (tag->len == pool->tag_bytes &&
	    (tag->len == 0 || memcmp(tag->data, pool->tag, tag->len) == 0))
		return KVP_ROOM_OK;
	print_tag(pool->tag, pool->tag_bytes, own, sizeof(own));
	print_tag(tag->data, tag->len, other, sizeof(other));
	return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH,
			       "layout_tag is \"%s\" (%u bytes) here, \"%s\" (%zu bytes) at the "
			       "other end",
			       own, pool->tag_bytes, other, tag->len);
}

/* ---- the geometry of a leg ---------------------------------------------------------------------
 */

/* One block for all that the geometry points to. */
static int geom_alloc(struct kvp_lane_geom *out, const struct kvp_geom_spec *spec,
		      const struct kvp_pair *pairs, uint32_t n_pairs)
{
	size_t entries_bytes = (spec->src.n + spec->dst.n) * sizeof(struct kvp_entry);
	size_t sides_bytes = 2u * KVP_LANE_GROUPS * sizeof(struct kvp_side);
	size_t starts_bytes = KVP_LANE_GROUPS * sizeof(uint64_t);
	size_t pairs_bytes = n_pairs * sizeof(struct kvp_pair);
	uint8_t *block = calloc(1, entries_bytes + sides_bytes + starts_bytes + pairs_bytes);
	struct kvp_entry *entries;
	struct kvp_side *sides;
	uint64_t *starts;
	struct kvp_pair *own_pairs;

	if (!block)
		return -ENOMEM;
	entries = (void *)block;
	sides = (void *)(block + entries_bytes);
	starts = (void *)(block + entries_bytes + sides_bytes);
	own_pairs = (void *)(block + entries_bytes + sides_bytes + starts_bytes);
	if (spec->src.n)
		memcpy(entries, spec->src.entries, spec->src.n * sizeof(*entries));
	if (spec->dst.n)
		memcpy(entries + spec->src.n, spec->dst.entries, spec->dst.n * sizeof(*entries));
	if (spec->src.n_sides)
		memcpy(sides, spec->src.sides, spec->src.n_sides * sizeof(*sides));
	if (spec->dst.n_sides)
		memcpy(sides + KVP_LANE_GROUPS, spec->dst.sides,
		       spec->dst.n_sides * sizeof(*sides));
	for (uint32_t i = 0; i < 2 * KVP_LANE_GROUPS; i++) {
		sides[i].pages = NULL; /* both ends know rows, each its own pages */
		sides[i].n_pages = KVP_PAGES_ANY;
	}
	if (spec->dst.n_sides)
		memcpy(starts, spec->starts, spec->dst.n_sides * sizeof(*starts));
	if (n_pairs)
		memcpy(own_pairs, pairs, pairs_bytes);
	memset(out, 0, sizeof(*out));
	out->block = block;
	out->n_src = spec->src.n;
	out->sums = spec->sums;
	out->slot_bytes = spec->sums ? kvp_sums_room(spec->slot_bytes, n_pairs) : spec->slot_bytes;
	out->geom = (struct kvp_leg_geom){
		.pairs = own_pairs,
		.src = entries,
		.dst = entries + spec->src.n,
		.src_sides = sides,
		.dst_sides = sides + KVP_LANE_GROUPS,
		.dst_starts = starts,
		.end = spec->end,
		.n_pairs = n_pairs,
		.sender = spec->sender,
	};
	for (uint32_t i = 0; i < spec->src.n; i++) /* blobs have no rows to wait for */
		if (kvp_mask_has(spec->src.mask, i) && spec->src.entries[i].klass != KVP_CLASS_BLOB)
			out->src_mask[i / 64] |= UINT64_C(1) << (i % 64);
	return 0;
}

static Kvp__Status geom_check(struct kvp_lane_geom *geom, uint64_t slot_bytes, char *err)
{
	char text[KVP_PLAN_ERR_BYTES];

	if (kvp_leg_check(&geom->geom, text, sizeof(text)) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_GEOMETRY, "%.180s", text);
	geom->piece_tokens = kvp_piece_tokens(&geom->geom, geom->slot_bytes);
	/* Registered with slots that are just large enough, or a peer has slots for less than the
	 * sums: both ends find so, and go without. */
	if (geom->sums && (geom->piece_tokens == 0 || geom->slot_bytes == 0)) {
		geom->sums = false;
		geom->slot_bytes = slot_bytes;
		geom->piece_tokens = kvp_piece_tokens(&geom->geom, geom->slot_bytes);
	}
	if (geom->piece_tokens == 0)
		return kvp_room_refuse(
			err, KVP__STATUS__STATUS_MISMATCH,
			"one token takes %llu bytes of a slot, the smaller slot has %llu",
			(unsigned long long)kvp_piece_worst(&geom->geom, 1),
			(unsigned long long)geom->slot_bytes);
	return KVP_ROOM_OK;
}

Kvp__Status kvp_geom_build(struct kvp_lane_geom *out, const struct kvp_geom_spec *spec, char *err)
{
	KVP_CLEANUP(kvp_freep)
	struct kvp_pair *pairs = malloc(KVP_PAIRS_MAX * sizeof(*pairs));
	const struct kvp_entry_list src = { spec->src.entries, spec->src.n, spec->src.mask };
	const struct kvp_entry_list dst = { spec->dst.entries, spec->dst.n, spec->dst.mask };
	char text[KVP_PLAN_ERR_BYTES] = "";
	Kvp__Status status = kvp_geom_check_sides(&spec->src, err);
	int n;

	if (status == KVP_ROOM_OK)
		status = kvp_geom_check_sides(&spec->dst, err);
	if (status != KVP_ROOM_OK)
		return status;
	if (!pairs)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	n = kvp_pair_entries(&src, &dst, pairs, KVP_PAIRS_MAX, text, sizeof(text));
	if (n == -ENOSPC)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_LIMIT,
				       "more than %u pairs of entries", KVP_PAIRS_MAX);
	if (n < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_MISMATCH, "%.180s", text);
	if (geom_alloc(out, spec, pairs, (uint32_t)n) < 0)
		return kvp_room_refuse(err, KVP__STATUS__STATUS_NO_MEMORY, "no memory");
	status = geom_check(out, spec->slot_bytes, err);
	if (status != KVP_ROOM_OK) {
		free(out->block);
		memset(out, 0, sizeof(*out));
	}
	return status;
}
