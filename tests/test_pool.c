/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/lists.h"
#include "daemon/memfd.h"
#include "proto/util.h"
#include "tests/support.h"

TestSuite(pool, .timeout = 60);
TestSuite(lists, .timeout = 10);
TestSuite(memfd, .timeout = 10);

/* ---- lists */

Test(lists, grow_piece_by_piece_and_are_consumed)
{
	struct kvp_lists lists = { 0 };
	uint32_t pages[600];

	for (uint32_t i = 0; i < 600; i++)
		pages[i] = i * 3;
	for (uint32_t at = 0; at < 600; at += 100)
		cr_assert_eq(kvp_lists_append(&lists, 7, at, pages + at, 100, 2, 600), 0);
	cr_assert_eq(kvp_lists_find(&lists, 7)->n, 600);
	cr_assert_eq(memcmp(kvp_lists_find(&lists, 7)->pages, pages, sizeof(pages)), 0);
	cr_assert_eq(kvp_lists_append(&lists, 7, 600, pages, 1, 2, 600), -ENOSPC);
	cr_assert_eq(kvp_lists_append(&lists, 7, 599, pages, 1, 2, 700), -EINVAL);
	cr_assert_eq(kvp_lists_append(&lists, 8, 1, pages, 1, 2, 700), -EINVAL);
	cr_assert_eq(kvp_lists_append(&lists, 8, 0, pages, 1, 2, 700), 0);
	cr_assert_eq(kvp_lists_append(&lists, 9, 0, pages, 1, 2, 700), -EMFILE);
	cr_assert_eq(lists.n_pages, 601);
	kvp_lists_drop(&lists, 7);
	kvp_lists_drop(&lists, 7);
	cr_assert_null(kvp_lists_find(&lists, 7));
	cr_assert_eq(lists.n_lists, 1);
	cr_assert_eq(kvp_lists_append(&lists, 9, 0, pages, 600, 2, 600), 0);
	kvp_lists_clear(&lists);
	cr_assert_eq(lists.n_lists + lists.n_pages, 0);
}

/* ---- memfds */

static Kvp__Status map_it(int fd, struct kvp_memfd *mem, char *err)
{
	return kvp_memfd_map(fd, "fd 0", true, mem, err, 256);
}

Test(memfd, is_sealed_then_measured)
{
	struct kvp_memfd mem = { 0 };
	char err[256] = "";
	int fd = support_memfd(10000);

	cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_OK, "%s", err);
	cr_assert_eq(mem.bytes, 10000);
	cr_assert(mem.writable);
	cr_assert(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK);
	cr_assert_eq(ftruncate(fd, 9999), -1);
	cr_assert_eq(errno, EPERM);
	/* A hole reads as zeroes and takes new bytes. */
	memset(mem.map, 0xa5, mem.bytes);
	cr_assert_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192), 0);
	cr_assert_eq(mem.map[100], 0);
	cr_assert_eq(mem.map[9000], 0xa5);
	mem.map[100] = 7;
	kvp_memfd_unmap(&mem);
	close(fd);
}

Test(memfd, that_cannot_be_written_is_mapped_for_reading)
{
	struct kvp_memfd mem = { 0 };
	char err[256] = "", path[64];
	int fd = support_memfd(4096), reader;

	cr_assert_eq(pwrite(fd, "kv", 2, 0), 2);
	cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE), 0);
	cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_OK, "%s", err);
	cr_assert_not(mem.writable);
	cr_assert_eq(memcmp(mem.map, "kv", 2), 0);
	kvp_memfd_unmap(&mem);
	close(fd);

	fd = support_memfd(4096);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	reader = open(path, O_RDONLY | O_CLOEXEC);
	cr_assert_geq(reader, 0);
	cr_assert_eq(map_it(reader, &mem, err), KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(err, "fd 0") && strstr(err, "F_SEAL_SHRINK"), "%s", err);
	cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	cr_assert_eq(map_it(reader, &mem, err), KVP__STATUS__STATUS_OK, "%s", err);
	cr_assert_not(mem.writable);
	kvp_memfd_unmap(&mem);
	close(reader);
	close(fd);
}

Test(memfd, refuses_what_could_shrink)
{
	struct kvp_memfd mem = { 0 };
	char err[256] = "", path[] = "/tmp/kvp-file-XXXXXX";
	int fd = mkstemp(path), shm;

	unlink(path);
	cr_assert_eq(ftruncate(fd, 4096), 0);
	cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(err, "fd 0"), "%s", err);
	close(fd);

	shm = shm_open("/kvp-test-pool", O_RDWR | O_CREAT | O_EXCL, 0600);
	if (shm >= 0) { /* a tmpfs file knows seals, but takes none */
		shm_unlink("/kvp-test-pool");
		cr_assert_eq(ftruncate(shm, 4096), 0);
		cr_assert_eq(map_it(shm, &mem, err), KVP__STATUS__STATUS_INVALID);
		close(shm);
	}
	fd = memfd_create("unsealable", MFD_CLOEXEC);
	cr_assert_eq(ftruncate(fd, 4096), 0);
	cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(err, "MFD_ALLOW_SEALING"), "%s", err);
	close(fd);
	fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
	if (fd >= 0) {
		cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_INVALID);
		cr_assert(strstr(err, "huge page"), "%s", err);
		close(fd);
	}
	fd = support_memfd(0);
	cr_assert_eq(map_it(fd, &mem, err), KVP__STATUS__STATUS_INVALID);
	cr_assert(strstr(err, "empty"), "%s", err);
	close(fd);
	cr_assert_null(mem.map);
}

/* ---- pools of a real daemon */

static struct support_daemon daemon_;

static void setup(void)
{
	support_daemon_start(&daemon_, "[limits]\nmax_pools = 3\nmax_entries = 8");
}

static void teardown(void)
{
	support_daemon_end(&daemon_);
}

static struct support_reply call_id(int fd, Kvp__ClientMsg__BodyCase body, uint32_t id)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause pause_ = KVP__POOL_PAUSE__INIT;
	Kvp__PoolUnregister unregister = KVP__POOL_UNREGISTER__INIT;
	Kvp__FenceUnregister fence = KVP__FENCE_UNREGISTER__INIT;

	msg.body_case = body;
	pause_.pool = unregister.pool = fence.fence = id;
	if (body == KVP__CLIENT_MSG__BODY_POOL_PAUSE)
		msg.pool_pause = &pause_;
	else if (body == KVP__CLIENT_MSG__BODY_POOL_UNREGISTER)
		msg.pool_unregister = &unregister;
	else
		msg.fence_unregister = &fence;
	return support_call(fd, &msg, NULL, 0);
}

static struct support_reply call_pause(int fd, uint32_t pool)
{
	return call_id(fd, KVP__CLIENT_MSG__BODY_POOL_PAUSE, pool);
}

static struct support_reply call_unregister(int fd, uint32_t pool)
{
	return call_id(fd, KVP__CLIENT_MSG__BODY_POOL_UNREGISTER, pool);
}

static struct support_reply call_resume(int fd, uint32_t pool, const int *fds, size_t n_fds)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolResume body = KVP__POOL_RESUME__INIT;

	body.pool = pool;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_RESUME;
	msg.pool_resume = &body;
	return support_call(fd, &msg, fds, n_fds);
}

static struct support_reply call_fence(int fd, uint32_t fence, uint32_t words, int mem)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__FenceRegister body = KVP__FENCE_REGISTER__INIT;

	body.fence = fence;
	body.words = words;
	msg.body_case = KVP__CLIENT_MSG__BODY_FENCE_REGISTER;
	msg.fence_register = &body;
	return support_call(fd, &msg, &mem, 1);
}

#define ASSERT_REFUSED(reply_, status_, ...)                                               \
	do {                                                                               \
		const struct support_reply r_ = (reply_);                                  \
		const char *const has_[] = { __VA_ARGS__ };                                \
		cr_assert_eq(r_.status, KVP__STATUS__STATUS_##status_, "status %d: %s",    \
			     (int)r_.status, r_.text);                                     \
		for (size_t i_ = 0; i_ < KVP_ARRAY_SIZE(has_); i_++)                       \
			cr_assert(strstr(r_.text, has_[i_]), "no \"%s\" in: %s", has_[i_], \
				  r_.text);                                                \
	} while (0)

#define ASSERT_OK(reply_)                                                                        \
	do {                                                                                     \
		const struct support_reply r_ = (reply_);                                        \
		cr_assert_eq(r_.status, KVP__STATUS__STATUS_OK, "status %d: %s", (int)r_.status, \
			     r_.text);                                                           \
	} while (0)

Test(pool, register_pause_resume_unregister, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	int other = support_memfd(2 << 20), small = support_memfd(4096);
	Kvp__Entry entry;

	support_entry(&entry, 3, 256, 64);
	ASSERT_OK(support_register(fd, 1, &entry, &mem, 1));
	cr_assert_eq(support_status_number(fd, "pools"), 1);
	ASSERT_REFUSED(support_register(fd, 1, &entry, &mem, 1), EXISTS, "pool", "1");
	ASSERT_REFUSED(call_resume(fd, 1, &other, 1), INVALID, "active");

	ASSERT_OK(call_pause(fd, 1));
	ASSERT_REFUSED(call_pause(fd, 1), POOL_GONE, "paused");
	ASSERT_REFUSED(call_resume(fd, 1, &small, 1), INVALID, "entries[0]", "4096");
	ASSERT_REFUSED(call_resume(fd, 1, (int[]){ other, mem }, 2), INVALID, "2 fds", "1");
	ASSERT_OK(call_resume(fd, 1, &other, 1));
	cr_assert_eq(ftruncate(other, 1 << 20), -1);

	ASSERT_OK(call_unregister(fd, 1));
	ASSERT_REFUSED(call_unregister(fd, 1), NOT_FOUND, "1");
	cr_assert_eq(support_status_number(fd, "pools"), 0);
	ASSERT_OK(support_register(fd, 1, &entry, &mem, 1));
	ASSERT_OK(call_pause(fd, 1));
	ASSERT_OK(call_unregister(fd, 1));
	/* One that the session leaves behind. */
	ASSERT_OK(support_register(fd, 2, &entry, &mem, 1));
	close(mem);
	close(other);
	close(small);
	close(fd);
}

Test(pool, wrong_descriptors_are_refused, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	int small = support_memfd((1 << 20) - 1), pipe_[2];
	int unsealable = memfd_create("unsealable", MFD_CLOEXEC);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	cr_assert_eq(ftruncate(unsealable, 1 << 20), 0);
	cr_assert_eq(pipe2(pipe_, O_CLOEXEC), 0);
	ASSERT_REFUSED(support_register(fd, 1, &entry, NULL, 0), INVALID, "fds");
	ASSERT_REFUSED(support_register(fd, 1, &entry, (int[]){ mem, small }, 2), INVALID, "fd 1");
	ASSERT_REFUSED(support_register(fd, 1, &entry, pipe_, 1), INVALID, "fd 0", "memfd");
	ASSERT_REFUSED(support_register(fd, 1, &entry, &fd, 1), INVALID, "fd 0", "memfd");
	ASSERT_REFUSED(support_register(fd, 1, &entry, &unsealable, 1), INVALID, "fd 0",
		       "MFD_ALLOW_SEALING");
	ASSERT_REFUSED(support_register(fd, 1, &entry, &small, 1), INVALID, "entries[0]",
		       "1048575");
	entry.fd_index = 1;
	ASSERT_REFUSED(support_register(fd, 1, &entry, &mem, 1), INVALID, "fd_index", "1");
	cr_assert_eq(support_status_number(fd, "pools"), 0);
	close(pipe_[0]);
	close(pipe_[1]);
	close(unsealable);
	close(mem);
	close(small);
	close(fd);
}

/* One wrong field at a time. */
struct bad_entry {
	const char *name; /* that the text must have */
	void (*spoil)(Kvp__Entry *entry);
};

#define SPOIL(fn, what)                   \
	static void fn(Kvp__Entry *entry) \
	{                                 \
		what;                     \
	}
SPOIL(zero_width, entry->row_bytes = 0)
SPOIL(huge_width, entry->row_bytes = entry->full_bytes = UINT32_MAX)
SPOIL(zero_full, entry->full_bytes = 0)
SPOIL(outside_full, entry->lo = 1)
SPOIL(zero_rows, entry->rows_per_page = 0)
SPOIL(huge_rows, entry->rows_per_page = UINT32_MAX)
SPOIL(zero_pages, entry->n_pages = 0)
SPOIL(one_page_more, entry->n_pages++)
SPOIL(huge_pages, entry->n_pages = UINT32_MAX)
SPOIL(zero_page_stride, entry->page_stride = 0)
SPOIL(huge_page_stride, entry->page_stride = UINT64_MAX / 2)
SPOIL(zero_row_stride, entry->row_stride = 0)
SPOIL(narrow_row_stride, entry->row_stride = entry->row_bytes - 1)
SPOIL(huge_row_stride, entry->row_stride = UINT64_MAX)
SPOIL(zero_bytes, entry->bytes = 0)
SPOIL(huge_bytes, entry->bytes = UINT64_MAX)
SPOIL(shifted, entry->offset = 1)
SPOIL(huge_offset, entry->offset = UINT64_MAX - 10)
SPOIL(wrong_group, entry->group = 16)
SPOIL(wrong_class, entry->klass = (Kvp__EntryClass)9)

/* Sparse memfds of one user do not take the address space of all. */
Test(pool, mapped_bytes_are_limited, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	int huge = support_memfd((UINT64_C(1) << 44) - (1 << 20) + 4096);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	ASSERT_OK(support_register(fd, 1, &entry, &mem, 1));
	ASSERT_REFUSED(support_register(fd, 2, &entry, &huge, 1), LIMIT, "fd 0", "1048576 of this",
		       "17592186044416");
	cr_assert_eq(support_status_number(fd, "pools"), 1);
	close(mem);
	close(huge);
	close(fd);
}

Test(pool, impossible_entries_are_refused, .init = setup, .fini = teardown)
{
	static const struct bad_entry bad[] = {
		{ "row_bytes", zero_width },     { "row_bytes", huge_width },
		{ "full_bytes", zero_full },     { "full_bytes", outside_full },
		{ "rows_per_page", zero_rows },  { "rows_per_page", huge_rows },
		{ "n_pages", zero_pages },       { "bytes", one_page_more },
		{ "n_pages", huge_pages },       { "stride", zero_page_stride },
		{ "stride", huge_page_stride },  { "stride", zero_row_stride },
		{ "stride", narrow_row_stride }, { "stride", huge_row_stride },
		{ "bytes", zero_bytes },         { "bytes", huge_bytes },
		{ "entries[0]", shifted },       { "offset", huge_offset },
		{ "group", wrong_group },        { "klass", wrong_class },
	};
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	Kvp__Entry entry;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad); i++) {
		struct support_reply reply;

		support_entry(&entry, 0, 256, 64);
		bad[i].spoil(&entry);
		reply = support_register(fd, 1, &entry, &mem, 1);
		cr_expect_eq(reply.status, KVP__STATUS__STATUS_INVALID, "%zu: status %d: %s", i,
			     (int)reply.status, reply.text);
		cr_expect(strstr(reply.text, bad[i].name), "%zu: no %s in: %s", i, bad[i].name,
			  reply.text);
	}
	support_entry(&entry, 0, 256, 64);
	ASSERT_OK(support_register(fd, 1, &entry, &mem, 1));
	close(mem);
	close(fd);
}

Test(pool, limits_are_named, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	int wide = support_memfd(64ull << 20);
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;
	Kvp__Entry entries[9], *list[9];

	for (uint32_t i = 0; i < 9; i++) {
		support_entry(&entries[i], i, 1u << 20, 1);
		entries[i].rows_per_page = 1;
		entries[i].row_stride = entries[i].page_stride = entries[i].bytes = 1 << 20;
		entries[i].offset = (uint64_t)i << 20;
		list[i] = &entries[i];
	}
	body.pool = 1;
	body.entries = list;
	body.n_entries = 9;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &body;
	ASSERT_REFUSED(support_call(fd, &msg, &wide, 1), LIMIT, "9", "8", "limits.max_entries");
	/* Two rows of 1 MiB each: one token does not fit a slot. */
	body.n_entries = 2;
	ASSERT_REFUSED(support_call(fd, &msg, &wide, 1), INVALID, "2097152", "524288",
		       "host.slot_bytes");

	support_entry(&entries[0], 0, 256, 64);
	for (uint32_t i = 1; i <= 3; i++)
		ASSERT_OK(support_register(fd, i, &entries[0], &mem, 1));
	ASSERT_REFUSED(support_register(fd, 4, &entries[0], &mem, 1), LIMIT, "3", "max_pools");
	close(wide);
	close(mem);
	close(fd);
}

Test(pool, is_reached_by_its_own_session_only, .init = setup, .fini = teardown)
{
	int one = support_hello(&daemon_, "one"), two = support_hello(&daemon_, "two");
	int mem = support_memfd(1 << 20);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	ASSERT_OK(support_register(one, 1, &entry, &mem, 1));
	ASSERT_REFUSED(call_pause(two, 1), NOT_FOUND, "1");
	ASSERT_REFUSED(call_unregister(two, 1), NOT_FOUND, "1");
	ASSERT_REFUSED(call_resume(two, 1, &mem, 1), NOT_FOUND, "1");
	/* The same number is another pool there. */
	ASSERT_OK(support_register(two, 1, &entry, &mem, 1));
	ASSERT_OK(call_unregister(two, 1));
	ASSERT_OK(call_pause(one, 1));
	close(mem);
	close(one);
	close(two);
}

Test(pool, holes_and_truncation_do_no_harm, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(1 << 20);
	Kvp__Entry entry;

	support_entry(&entry, 0, 256, 64);
	ASSERT_OK(support_register(fd, 1, &entry, &mem, 1));
	cr_assert_eq(ftruncate(mem, 0), -1);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(fallocate(mem, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 20), 0);
	cr_assert_eq(ftruncate(mem, 2 << 20), 0, "growing is harmless");
	ASSERT_OK(call_pause(fd, 1));
	ASSERT_OK(call_resume(fd, 1, &mem, 1));
	close(mem);
	close(fd);
}

Test(pool, fences, .init = setup, .fini = teardown)
{
	int fd = support_hello(&daemon_, "engine"), mem = support_memfd(4096);
	int unsealable = memfd_create("unsealable", MFD_CLOEXEC), other;

	cr_assert_eq(ftruncate(unsealable, 4096), 0);
	ASSERT_OK(call_fence(fd, 1, 512, mem));
	cr_assert_eq(ftruncate(mem, 0), -1);
	ASSERT_REFUSED(call_fence(fd, 1, 1, mem), EXISTS, "1");
	ASSERT_REFUSED(call_fence(fd, 2, 513, mem), INVALID, "513", "512");
	ASSERT_REFUSED(call_fence(fd, 2, 0, mem), INVALID, "words");
	ASSERT_REFUSED(call_fence(fd, 2, 1, unsealable), INVALID, "MFD_ALLOW_SEALING");
	other = support_hello(&daemon_, "other");
	ASSERT_REFUSED(call_id(other, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER, 1), NOT_FOUND, "1");
	close(other);
	ASSERT_OK(call_id(fd, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER, 1));
	ASSERT_REFUSED(call_id(fd, KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER, 1), NOT_FOUND, "1");
	/* One that the session leaves behind. */
	ASSERT_OK(call_fence(fd, 1, 512, mem));
	close(unsealable);
	close(mem);
	close(fd);
}

static struct support_reply call_pages(int fd, uint32_t list, uint32_t offset, uint32_t n)
{
	static uint32_t pages[32000];
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Pages body = KVP__PAGES__INIT;

	body.list = list;
	body.offset = offset;
	body.pages = pages;
	body.n_pages = n;
	msg.body_case = KVP__CLIENT_MSG__BODY_PAGES;
	msg.pages = &body;
	return support_call(fd, &msg, NULL, 0);
}

Test(pool, page_lists_are_bounded)
{
	struct support_daemon daemon;
	int fd;

	support_daemon_start(&daemon, "[limits]\nmax_lists = 2\nmax_room_pages = 32001");
	fd = support_hello(&daemon, "engine");
	ASSERT_OK(call_pages(fd, 1, 0, 32000));
	ASSERT_REFUSED(call_pages(fd, 1, 0, 1), INVALID, "offset", "32000");
	ASSERT_REFUSED(call_pages(fd, 1, 32000, 2), LIMIT, "32002", "32001");
	ASSERT_OK(call_pages(fd, 1, 32000, 1));
	ASSERT_OK(call_pages(fd, 2, 0, 1));
	ASSERT_REFUSED(call_pages(fd, 3, 0, 1), LIMIT, "2", "max_lists");
	close(fd);
	support_daemon_end(&daemon);
}
