/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib.h"
#include "client/mems.h"

static void pool_close_fds(struct kvpl_pool *pool)
{
	for (size_t i = 0; i < pool->n_fds; i++)
		(void)close(pool->fds[i]); /* duplicates */
	pool->n_fds = 0;
}

static void pool_free(struct kvpl_pool *pool)
{
	pool_close_fds(pool);
	kvpl_packets_fini(&pool->packet);
	free(pool);
}

static struct kvpl_pool *pool_find(const struct kvp_client *client, uint32_t id)
{
	struct kvpl_pool *pool = client->pools;

	while (pool && pool->id != id)
		pool = pool->next;
	return pool;
}

static void pool_remove(struct kvp_client *client, uint32_t id)
{
	struct kvpl_pool **link = &client->pools;
	struct kvpl_pool *pool;

	while (*link && (*link)->id != id)
		link = &(*link)->next;
	pool = *link;
	if (!pool)
		return;
	*link = pool->next;
	pool_free(pool);
}

static int pool_set_fds(struct kvp_client *client, struct kvpl_pool *pool, const int *fds, size_t n)
{
	pool_close_fds(pool);
	for (size_t i = 0; i < n; i++) {
		int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);

		if (fd < 0) {
			fd = errno;
			pool_close_fds(pool);
			return kvpl_fail(client, -fd, KVP_STATUS_SYSTEM, "fds[%zu] is %d: %s", i,
					 fds[i], strerror(fd));
		}
		pool->fds[pool->n_fds++] = fd;
	}
	return 0;
}

/* The registration as a packet with the pool's fds. */
static int pool_packet(const struct kvpl_pool *pool, struct kvpl_packets *packets)
{
	kvpl_packets_init(packets);
	if (kvpl_packets_copy(packets, &pool->packet) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < pool->n_fds; i++) {
		int fd = fcntl(pool->fds[i], F_DUPFD_CLOEXEC, 0);

		if (fd < 0) {
			kvpl_packets_fini(packets);
			return -errno;
		}
		packets->head->fds[packets->head->n_fds++] = fd;
	}
	return 0;
}

static void entry_fill(Kvp__Entry *entry, const struct kvp_entry_desc *desc)
{
	kvp__entry__init(entry);
	entry->layer = desc->layer;
	entry->klass = (Kvp__EntryClass)desc->klass;
	entry->group = desc->group;
	entry->fd_index = desc->mem;
	entry->offset = desc->offset;
	entry->bytes = desc->bytes;
	entry->page_stride = desc->page_stride;
	entry->row_stride = desc->row_stride;
	entry->row_bytes = desc->row_bytes;
	entry->lo = desc->lo;
	entry->full_bytes = desc->full_bytes;
	entry->rows_per_page = desc->rows_per_page;
	entry->n_pages = desc->n_pages;
}

/* The message with its entries; packed into pool->packet. */
static int pool_describe(struct kvp_client *client, struct kvpl_pool *pool,
			 const struct kvp_pool_desc *desc, struct kvpl_mems *mems)
{
	KVP_CLEANUP(kvp_freep) Kvp__Entry *entries = calloc(desc->n_entries, sizeof(*entries));
	KVP_CLEANUP(kvp_freep) Kvp__Entry **list = calloc(desc->n_entries, sizeof(Kvp__Entry *));
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister body = KVP__POOL_REGISTER__INIT;
	int r;

	if (!entries || !list)
		return -ENOMEM;
	for (uint32_t i = 0; i < desc->n_entries; i++) {
		entry_fill(&entries[i], &desc->entries[i]);
		list[i] = &entries[i];
	}
	body.pool = pool->id;
	body.layout_tag.data = (uint8_t *)desc->layout_tag;
	body.layout_tag.len = desc->tag_bytes;
	body.entries = list;
	body.n_entries = desc->n_entries;
	if (desc->label)
		body.label = (char *)desc->label;
	body.memories = mems->list;
	body.n_memories = mems->n;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &body;
	r = kvp_msg_check_fds(&msg, mems->n ? mems->n_fds : desc->n_fds, client->last_error,
			      sizeof(client->last_error));
	if (r) {
		client->last_status = (enum kvp_status)r;
		return -EINVAL;
	}
	return kvpl_packet_make(client, &msg, NULL, 0, &pool->packet);
}

/* Describes and exports what a pool lies in. */
static int pool_mems(struct kvp_client *client, struct kvpl_mems *out, const struct kvp_mem *mems,
		     uint32_t n)
{
	char err[KVPL_DEVICE_ERR] = "out of memory";
	int r = kvpl_mems_init(out, mems, n, client->features & KVP_FEATURE_DMABUF, err);

	return r ? kvpl_fail(client, r, r == -ENOSYS ? KVP_STATUS_UNSUPPORTED : KVP_STATUS_INVALID,
			     "%s", err)
		 : 0;
}

static int pool_create(struct kvp_client *client, const struct kvp_pool_desc *desc,
		       struct kvpl_pool **out)
{
	struct kvpl_mems mems = { 0 };
	struct kvpl_pool *pool;
	int r;

	if (desc->n_entries < 1 || desc->n_entries > KVP_LIMIT_ENTRIES || !desc->entries)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "pool.n_entries is %u, allowed 1 to %u", desc->n_entries,
				 KVP_LIMIT_ENTRIES);
	if (!desc->mems && (desc->n_fds < 1 || desc->n_fds > KVP_LIMIT_FDS || !desc->fds))
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "pool.n_fds is %u, allowed 1 to %u", desc->n_fds, KVP_LIMIT_FDS);
	if (desc->mems) {
		r = pool_mems(client, &mems, desc->mems, desc->n_mems);
		if (r)
			return r;
	}
	pool = calloc(1, sizeof(*pool));
	if (!pool) {
		kvpl_mems_fini(&mems);
		return -ENOMEM;
	}
	pool->id = client->next_pool++;
	pool->has_mems = desc->mems;
	kvpl_packets_init(&pool->packet);
	r = pool_describe(client, pool, desc, &mems);
	if (r == 0)
		r = desc->mems ? pool_set_fds(client, pool, mems.fds, mems.n_fds)
			       : pool_set_fds(client, pool, desc->fds, desc->n_fds);
	kvpl_mems_fini(&mems);
	if (r < 0) {
		pool_free(pool);
		return r;
	}
	*out = pool;
	return 0;
}

/* pause or unregister as a packet. */
static int pool_id_packet(struct kvp_client *client, Kvp__ClientMsg__BodyCase kind, uint32_t id,
			  struct kvpl_packets *packets)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolPause pause = KVP__POOL_PAUSE__INIT;
	Kvp__PoolUnregister unregister = KVP__POOL_UNREGISTER__INIT;

	pause.pool = unregister.pool = id;
	msg.body_case = kind;
	if (kind == KVP__CLIENT_MSG__BODY_POOL_PAUSE)
		msg.pool_pause = &pause;
	else
		msg.pool_unregister = &unregister;
	kvpl_packets_init(packets);
	return kvpl_packet_make(client, &msg, NULL, 0, packets);
}

/* An answer that was only late must not leave it registered. */
static void pool_take_back(struct kvp_client *client, uint32_t id)
{
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_packets packets;

	if (client->conn == KVPL_UP &&
	    pool_id_packet(client, KVP__CLIENT_MSG__BODY_POOL_UNREGISTER, id, &packets) == 0)
		(void)kvpl_request_send(client, &packets, &to,
					NULL); /* else the session's end does it */
}

int kvp_pool_register(struct kvp_client *client, const struct kvp_pool_desc *desc, uint32_t *ret)
{
	struct kvp_pool_desc own;
	struct kvpl_reply_to to = { .kind = KVPL_POOL_REGISTER };
	struct kvpl_packets packets;
	struct kvpl_pool *pool = NULL;
	uint32_t id;
	int r = kvpl_check_process(client);

	if (r == 0 && kvpl_copy_args(&own, sizeof(own), desc, sizeof(size_t)) < 0)
		r = kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID, "pool.size is not set");
	if (r == 0)
		r = kvpl_conn_wait_up(client, kvpl_now_ms() + client->timeout_ms);
	if (r == 0)
		r = pool_create(client, &own, &pool);
	if (r)
		return r;
	id = pool->id;
	pool->next = client->pools;
	client->pools = pool;
	r = pool_packet(pool, &packets);
	if (r == 0) {
		to.object = id;
		r = kvpl_request_start(client, &packets, &to);
	}
	if (r < 0) {
		if (r == -ETIMEDOUT)
			pool_take_back(client, id);
		pool_remove(client, id);
		return r;
	}
	*ret = id;
	return 0;
}

/* Pause and unregister: the pool's own state changes when the answer comes. */
static int pool_stop(struct kvp_client *client, uint32_t id, enum kvpl_kind kind, kvp_done_fn *done,
		     void *arg)
{
	struct kvpl_reply_to to = { .kind = kind, .object = id, .done = done, .arg = arg };
	Kvp__ClientMsg__BodyCase body = kind == KVPL_POOL_PAUSE
						? KVP__CLIENT_MSG__BODY_POOL_PAUSE
						: KVP__CLIENT_MSG__BODY_POOL_UNREGISTER;
	struct kvpl_packets packets;
	int r = kvpl_check_process(client);

	if (r < 0)
		return r;
	if (!pool_find(client, id))
		return kvpl_fail(client, -ENOENT, KVP_STATUS_NOT_FOUND, "pool %u is unknown", id);
	r = pool_id_packet(client, body, id, &packets);
	return r < 0 ? r : kvpl_request_start(client, &packets, &to);
}

int kvp_pool_pause(struct kvp_client *client, uint32_t pool, kvp_done_fn *done, void *arg)
{
	return pool_stop(client, pool, KVPL_POOL_PAUSE, done, arg);
}

int kvp_pool_unregister(struct kvp_client *client, uint32_t pool, kvp_done_fn *done, void *arg)
{
	return pool_stop(client, pool, KVPL_POOL_UNREGISTER, done, arg);
}

/* The registration again, with the memories of now: a daemon that comes later is given these. */
static int pool_repack(struct kvp_client *client, struct kvpl_pool *pool, struct kvpl_mems *mems)
{
	const struct kvpl_packet *old = pool->packet.head;
	Kvp__ClientMsg *msg = kvp__client_msg__unpack(NULL, old->len, old->tail);
	struct kvpl_packets packet;
	Kvp__Memory **list;
	size_t n;
	int r;

	if (!msg)
		return -ENOMEM;
	list = msg->pool_register->memories;
	n = msg->pool_register->n_memories;
	msg->pool_register->memories = mems->list;
	msg->pool_register->n_memories = mems->n;
	kvpl_packets_init(&packet);
	r = kvpl_packet_make(client, msg, NULL, 0, &packet);
	msg->pool_register->memories = list;
	msg->pool_register->n_memories = n;
	kvp__client_msg__free_unpacked(msg, NULL);
	if (r < 0)
		return r;
	kvpl_packets_fini(&pool->packet);
	kvpl_packets_init(&pool->packet);
	kvpl_packets_add(&pool->packet, packet.head);
	return 0;
}

static int resume_packet(struct kvp_client *client, uint32_t id, const int *fds, size_t n_fds,
			 struct kvpl_mems *mems, struct kvpl_packets *packets)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolResume resume = KVP__POOL_RESUME__INIT;

	resume.pool = id;
	resume.memories = mems->list;
	resume.n_memories = mems->n;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_RESUME;
	msg.pool_resume = &resume;
	kvpl_packets_init(packets);
	return kvpl_packet_make(client, &msg, fds, n_fds, packets);
}

/* `mems` is empty for a pool of fds. */
static int pool_resume(struct kvp_client *client, struct kvpl_pool *pool, const int *fds,
		       size_t n_fds, struct kvpl_mems *mems)
{
	struct kvpl_reply_to to = { .kind = KVPL_POOL_RESUME, .object = pool->id };
	struct kvpl_packets packets;
	int r = pool_set_fds(client, pool, fds, n_fds);

	if (r == 0 && mems->n)
		r = pool_repack(client, pool, mems);
	if (r < 0)
		return r;
	if (pool->is_known)
		r = resume_packet(client, pool->id, fds, n_fds, mems, &packets);
	else /* a daemon that came after the pause knows nothing of it */
		r = pool_packet(pool, &packets);
	return r < 0 ? r : kvpl_request_start(client, &packets, &to);
}

/* A paused pool, with a connection; else NULL and *r. */
static struct kvpl_pool *pool_paused(struct kvp_client *client, uint32_t id, int *r)
{
	struct kvpl_pool *pool;

	*r = kvpl_check_process(client);
	if (*r == 0)
		*r = kvpl_conn_wait_up(client, kvpl_now_ms() + client->timeout_ms);
	if (*r < 0)
		return NULL;
	pool = pool_find(client, id);
	if (!pool)
		*r = kvpl_fail(client, -ENOENT, KVP_STATUS_NOT_FOUND, "pool %u is unknown", id);
	else if (pool->state != KVPL_POOL_PAUSED)
		*r = kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID, "pool %u is not paused", id);
	return *r < 0 ? NULL : pool;
}

int kvp_pool_resume(struct kvp_client *client, uint32_t id, const int *fds, uint32_t n_fds)
{
	struct kvpl_mems mems = { 0 };
	int r;
	struct kvpl_pool *pool = pool_paused(client, id, &r);

	if (!pool)
		return r;
	if (n_fds < 1 || n_fds > KVP_LIMIT_FDS || !fds)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "n_fds is %u, allowed 1 to %u", n_fds, KVP_LIMIT_FDS);
	return pool_resume(client, pool, fds, n_fds, &mems);
}

int kvp_pool_resume_mems(struct kvp_client *client, uint32_t id, const struct kvp_mem *list,
			 uint32_t n_mems)
{
	struct kvpl_mems mems;
	int r;
	struct kvpl_pool *pool = pool_paused(client, id, &r);

	if (!pool)
		return r;
	if (!pool->has_mems || !list)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "pool %u was registered without mems", id);
	r = pool_mems(client, &mems, list, n_mems);
	if (r < 0)
		return r;
	r = pool_resume(client, pool, mems.fds, mems.n_fds, &mems);
	kvpl_mems_fini(&mems);
	return r;
}

void kvpl_pool_answered(struct kvp_client *client, const struct kvpl_request *req,
			enum kvp_status status)
{
	struct kvpl_pool *pool = pool_find(client, (uint32_t)req->object);

	if (!pool || status == KVP_STATUS_DAEMON_LOST)
		return;
	if (req->kind == KVPL_POOL_REGISTER) {
		pool->is_known = status == KVP_OK;
	} else if (req->kind == KVPL_POOL_RESUME) {
		if (status == KVP_OK) {
			pool->is_known = true;
			pool->state = KVPL_POOL_MAPPED;
		} else {
			pool_close_fds(pool);
		}
	} else if (status == KVP_OK && req->kind == KVPL_POOL_PAUSE) {
		pool->state = KVPL_POOL_PAUSED;
		pool_close_fds(pool);
	} else if (status == KVP_OK || status == KVP_STATUS_NOT_FOUND) {
		pool_remove(client, pool->id);
	}
}

void kvpl_pools_lose(struct kvp_client *client)
{
	for (struct kvpl_pool *pool = client->pools; pool; pool = pool->next)
		pool->is_known = false;
}

/* In the order in which they were made does not matter: rooms come later. */
void kvpl_pools_repeat(struct kvp_client *client)
{
	for (struct kvpl_pool *pool = client->pools; pool; pool = pool->next) {
		struct kvpl_reply_to to = { .kind = KVPL_POOL_REGISTER, .object = pool->id };
		struct kvpl_packets packets;

		if (pool->is_known || pool->state != KVPL_POOL_MAPPED ||
		    (pool->n_fds == 0 && !pool->has_mems))
			continue;
		if (pool_packet(pool, &packets) == 0)
			(void)kvpl_request_send(client, &packets, &to, NULL);
		/* else rooms of it are refused by the daemon, in words */
	}
}

void kvpl_pools_fini(struct kvp_client *client)
{
	while (client->pools)
		pool_remove(client, client->pools->id);
}

/* ---- memory -------------------------------------------------------------------------------- */

int kvp_memory_create(const char *name, uint64_t bytes, int *fd_out, void **addr_out)
{
	KVP_CLEANUP(kvp_closep) int fd = -1;
	void *addr;

	if (bytes == 0 || bytes > INT64_MAX || bytes > SIZE_MAX)
		return -EINVAL;
	fd = memfd_create(name ?: "kvpack", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)bytes) < 0)
		return -errno;
	addr = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (addr == MAP_FAILED)
		return -errno;
	*fd_out = KVP_TAKE_FD(fd);
	*addr_out = addr;
	return 0;
}
