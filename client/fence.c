/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <sys/mman.h>

#include "client/device.h"
#include "client/lib.h"

static void fence_free(struct kvp_fence *fence)
{
	if (fence->device)
		kvpl_device_unmap_host(fence->words);
	if (fence->words)
		(void)munmap(fence->words, fence->n_words * sizeof(uint64_t)); /* our mapping */
	kvp_closep(&fence->fd);
	free(fence);
}

static int fence_send(struct kvp_client *client, const struct kvp_fence *fence, bool is_call)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__FenceRegister body = KVP__FENCE_REGISTER__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_FENCE, .object = fence->id };
	struct kvpl_packets packets;
	int r;

	body.fence = fence->id;
	body.words = fence->n_words;
	msg.body_case = KVP__CLIENT_MSG__BODY_FENCE_REGISTER;
	msg.fence_register = &body;
	kvpl_packets_init(&packets);
	r = kvpl_packet_make(client, &msg, &fence->fd, 1, &packets);
	if (r < 0)
		return r;
	return is_call ? kvpl_request_call(client, &packets, &to, NULL)
		       : kvpl_request_send(client, &packets, &to, NULL);
}

/* Else the daemon drops it with the session. */
static void fence_take_back(struct kvp_client *client, uint32_t id)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__FenceUnregister body = KVP__FENCE_UNREGISTER__INIT;
	struct kvpl_reply_to to = { .kind = KVPL_PLAIN };
	struct kvpl_packets packets;

	body.fence = id;
	msg.body_case = KVP__CLIENT_MSG__BODY_FENCE_UNREGISTER;
	msg.fence_unregister = &body;
	kvpl_packets_init(&packets);
	if (client->conn == KVPL_UP && kvpl_packet_make(client, &msg, NULL, 0, &packets) == 0)
		(void)kvpl_request_send(client, &packets, &to, NULL);
}

int kvp_fence_create(struct kvp_client *client, uint32_t words, struct kvp_fence **ret)
{
	struct kvp_fence *fence;
	void *addr = NULL;
	int r = kvpl_check_process(client);

	if (r < 0)
		return r;
	if (words < 1 || words > KVP_LIMIT_FENCE_WORDS)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "words is %u, allowed 1 to %u", words, KVP_LIMIT_FENCE_WORDS);
	r = kvpl_conn_wait_up(client, kvpl_now_ms() + client->timeout_ms);
	if (r < 0)
		return r;
	fence = calloc(1, sizeof(*fence));
	if (!fence)
		return -ENOMEM;
	fence->fd = -1;
	fence->client = client;
	fence->n_words = words;
	fence->id = client->next_fence++;
	r = kvp_memory_create("kvpack-fence", words * sizeof(uint64_t), &fence->fd, &addr);
	if (r == 0) {
		fence->words = addr;
		r = fence_send(client, fence, true);
	}
	if (r < 0) {
		if (r == -ETIMEDOUT) /* an answer that was only late must not leave it there */
			fence_take_back(client, fence->id);
		fence_free(fence);
		return r;
	}
	/* Listed only now: a reconnect in between must not register it behind the call's back. */
	fence->next = client->fences;
	client->fences = fence;
	*ret = fence;
	return 0;
}

void kvp_fence_destroy(struct kvp_fence *fence)
{
	struct kvp_fence **link;

	if (!fence || fence->client->pid != getpid())
		return;
	link = &fence->client->fences;
	while (*link && *link != fence)
		link = &(*link)->next;
	if (*link)
		*link = fence->next;
	fence_take_back(fence->client, fence->id);
	fence_free(fence);
}

void kvp_fence_signal(struct kvp_fence *fence, uint32_t word, uint64_t value)
{
	if (word < fence->n_words)
		__atomic_store_n(&fence->words[word], value, __ATOMIC_RELEASE);
}

uint64_t *kvp_fence_words(struct kvp_fence *fence)
{
	return fence->words;
}

void kvpl_fences_repeat(struct kvp_client *client)
{
	for (struct kvp_fence *fence = client->fences; fence; fence = fence->next)
		(void)fence_send(client, fence,
				 false); /* chunks that name it are refused in words */
}

void kvpl_fences_fini(struct kvp_client *client)
{
	while (client->fences) {
		struct kvp_fence *fence = client->fences;

		client->fences = fence->next;
		fence_free(fence);
	}
}

/* ---- written by a device ------------------------------------------------------------------- */

int kvp_fence_map_device(struct kvp_fence *fence)
{
	char err[KVPL_DEVICE_ERR] = "";
	uint64_t addr = 0;
	int r;

	if (!fence)
		return -EINVAL;
	if (fence->device)
		return 0;
	r = kvpl_device_map_host(fence->words, fence->n_words * sizeof(uint64_t), &addr, err);
	if (r)
		return kvpl_fail(fence->client, r,
				 r == -ENOSYS ? KVP_STATUS_UNSUPPORTED : KVP_STATUS_INVALID,
				 "fence: %s", err);
	fence->device = addr;
	return 0;
}

uint64_t kvp_fence_device_words(const struct kvp_fence *fence)
{
	return fence ? fence->device : 0;
}

int kvp_fence_stream_signal(struct kvp_fence *fence, uint32_t word, uint64_t value, void *stream)
{
	char err[KVPL_DEVICE_ERR] = "";
	int r;

	if (!fence || word >= fence->n_words || !fence->device)
		return -EINVAL;
	r = kvpl_device_stream_write(stream, fence->device + word * sizeof(uint64_t), value, err);
	return r ? kvpl_fail(fence->client, r, KVP_STATUS_INVALID, "fence: %s", err) : 0;
}
