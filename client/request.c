/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "client/lib.h"

/* ---- packets ------------------------------------------------------------------------------- */

static void packet_destroy(struct kvpl_packet *packet)
{
	for (size_t i = 0; i < packet->n_fds; i++)
		(void)close(packet->fds[i]); /* a duplicate */
	free(packet);
}

void kvpl_packets_init(struct kvpl_packets *packets)
{
	packets->head = NULL;
	packets->end = &packets->head;
	packets->bytes = 0;
}

void kvpl_packets_fini(struct kvpl_packets *packets)
{
	while (packets->head) {
		struct kvpl_packet *packet = packets->head;

		packets->head = packet->next;
		packet_destroy(packet);
	}
	kvpl_packets_init(packets);
}

void kvpl_packets_add(struct kvpl_packets *packets, struct kvpl_packet *packet)
{
	packet->next = NULL;
	*packets->end = packet;
	packets->end = &packet->next;
	packets->bytes += packet->len;
}

int kvpl_packets_copy(struct kvpl_packets *to, const struct kvpl_packets *from)
{
	for (const struct kvpl_packet *p = from->head; p; p = p->next) {
		struct kvpl_packet *copy = calloc(1, sizeof(*copy) + p->len);

		if (!copy)
			return -ENOMEM;
		copy->len = p->len;
		memcpy(copy->tail, p->tail, p->len);
		kvpl_packets_add(to, copy);
	}
	return 0;
}

static int packet_dup_fds(struct kvpl_packet *packet, const int *fds, size_t n_fds)
{
	for (size_t i = 0; i < n_fds; i++) {
		int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);

		if (fd < 0)
			return -errno;
		packet->fds[packet->n_fds++] = fd;
	}
	return 0;
}

int kvpl_packet_make(struct kvp_client *client, Kvp__ClientMsg *msg, const int *fds, size_t n_fds,
		     struct kvpl_packets *packets)
{
	struct kvpl_packet *packet;
	size_t len;
	int r;

	msg->id = 1;
	r = kvp_msg_check_client(msg, client->last_error, sizeof(client->last_error));
	if (r) {
		client->last_status = (enum kvp_status)r;
		return -EINVAL;
	}
	msg->id = 0;
	len = protobuf_c_message_get_packed_size(&msg->base);
	if (len + 11 > KVP_LIMIT_PACKET)
		return kvpl_fail(client, -EMSGSIZE, KVP_STATUS_LIMIT,
				 "request has %zu bytes, a packet at most %u", len,
				 KVP_LIMIT_PACKET);
	packet = calloc(1, sizeof(*packet) + len);
	if (!packet)
		return -ENOMEM;
	packet->len = protobuf_c_message_pack(&msg->base, packet->tail);
	r = packet_dup_fds(packet, fds, n_fds);
	if (r < 0) {
		packet_destroy(packet);
		return kvpl_fail(client, r, KVP_STATUS_SYSTEM, "cannot duplicate fd: %s",
				 strerror(-r));
	}
	kvpl_packets_add(packets, packet);
	return 0;
}

/* ---- the table ----------------------------------------------------------------------------- */

int kvpl_status_errno(enum kvp_status status)
{
	switch ((int)status) {
	case KVP_OK:
		return 0;
	case KVP_STATUS_INVALID:
	case KVP_STATUS_GEOMETRY:
	case KVP_STATUS_ALIGNMENT:
	case KVP_STATUS_SRC_RANGE:
	case KVP_STATUS_DST_RANGE:
		return -EINVAL;
	case KVP_STATUS_DAEMON_LOST:
		return -ENOTCONN;
	default:
		return -EREMOTEIO;
	}
}

static struct kvpl_request *request_find(struct kvp_client *client, uint64_t id)
{
	struct kvpl_node *node = kvpl_idmap_find(&client->requests, id);

	return node ? KVP_CONTAINER_OF(node, struct kvpl_request, node) : NULL;
}

static void request_destroy(struct kvp_client *client, struct kvpl_request *req)
{
	kvpl_idmap_remove(&client->requests, &req->node);
	free(req->early_text);
	free(req);
}

static int request_add(struct kvp_client *client, uint64_t id, const struct kvpl_reply_to *to)
{
	struct kvpl_request *req = calloc(1, sizeof(*req));

	if (!req)
		return -ENOMEM;
	req->node.id = id;
	req->kind = to->kind;
	req->object = to->object;
	req->seq = to->seq;
	req->epoch = to->epoch;
	req->done = to->done;
	req->arg = to->arg;
	req->answer = to->answer;
	if (kvpl_idmap_add(&client->requests, &req->node) < 0) {
		free(req);
		return -ENOMEM;
	}
	return 0;
}

/* Records for all packets, or for none. The last packet's id is first + n - 1. */
static int requests_add(struct kvp_client *client, size_t n, const struct kvpl_reply_to *to)
{
	uint64_t first = client->next_request;
	uint64_t last = first + n - 1;
	struct kvpl_reply_to pages = { .kind = KVPL_PAGES, .object = last };

	for (uint64_t id = first; id <= last; id++) {
		if (request_add(client, id, id == last ? to : &pages) < 0) {
			while (id-- > first)
				request_destroy(client, request_find(client, id));
			return -ENOMEM;
		}
	}
	client->next_request = last + 1;
	return 0;
}

int kvpl_request_send(struct kvp_client *client, struct kvpl_packets *packets,
		      const struct kvpl_reply_to *to, uint64_t *id)
{
	uint64_t next = client->next_request;
	size_t n = 0;
	int r = 0;

	for (struct kvpl_packet *p = packets->head; p; p = p->next)
		n++;
	if (client->conn == KVPL_DOWN || (client->conn == KVPL_GREETING && to->kind != KVPL_HELLO))
		r = kvpl_fail(client, -ENOTCONN, KVP_STATUS_DAEMON_LOST, "not connected to %s",
			      client->path);
	else if (client->out.head && client->out.bytes + packets->bytes > KVPL_OUT_MAX)
		r = kvpl_fail(client, -EAGAIN, KVP_STATUS_LIMIT,
			      "%zu bytes wait for the daemon to read, at most %u",
			      client->out.bytes, KVPL_OUT_MAX);
	else if (client->requests.n + n > KVPL_REQUESTS_MAX)
		r = kvpl_fail(client, -EAGAIN, KVP_STATUS_LIMIT,
			      "%zu requests have no answer yet, at most %u", client->requests.n,
			      KVPL_REQUESTS_MAX);
	else
		r = requests_add(client, n, to);
	if (r < 0) {
		kvpl_packets_fini(packets);
		return r;
	}
	while (packets->head) {
		struct kvpl_packet *p = packets->head;

		packets->head = p->next;
		p->id = next++;
		kvpl_packets_add(&client->out, p);
	}
	kvpl_packets_init(packets);
	if (id)
		*id = client->next_request - 1;
	kvpl_conn_flush(client);
	return 0;
}

/* Waits for answer; the request's record may outlive the wait, but not point to it. */
static int request_wait(struct kvp_client *client, uint64_t id, struct kvpl_answer *answer,
			int64_t deadline)
{
	while (!answer->is_set) {
		struct kvpl_request *req;

		if (kvpl_conn_turn(client, deadline) != -ETIMEDOUT || answer->is_set)
			continue;
		req = request_find(client, id);
		if (req)
			req->answer = NULL;
		return kvpl_fail(client, -ETIMEDOUT, KVP_STATUS_TIMEOUT,
				 "no answer from %s in %u ms", client->path, client->timeout_ms);
	}
	return kvpl_status_errno(answer->status);
}

int kvpl_request_call(struct kvp_client *client, struct kvpl_packets *packets,
		      const struct kvpl_reply_to *to, struct kvpl_answer *answer)
{
	int64_t deadline = kvpl_now_ms() + client->timeout_ms;
	struct kvpl_answer own = { .fd = -1 };
	struct kvpl_reply_to blocking = *to;
	uint64_t id;
	int r = kvpl_conn_wait_up(client, deadline);

	if (r < 0) {
		kvpl_packets_fini(packets);
		return r;
	}
	blocking.answer = answer ?: &own;
	r = kvpl_request_send(client, packets, &blocking, &id);
	if (r == 0)
		r = request_wait(client, id, blocking.answer, deadline);
	if (own.fd >= 0)
		(void)close(own.fd); /* came uninvited */
	return r;
}

int kvpl_request_start(struct kvp_client *client, struct kvpl_packets *packets,
		       const struct kvpl_reply_to *to)
{
	if (to->done)
		return kvpl_request_send(client, packets, to, NULL);
	return kvpl_request_call(client, packets, to, NULL);
}

/* ---- answers ------------------------------------------------------------------------------- */

/* Tells the object, then the caller. The record is gone first: done() may do anything. */
static void request_finish(struct kvp_client *client, struct kvpl_request *req,
			   enum kvp_status status, const char *text)
{
	struct kvpl_request copy = *req;

	copy.early_text = NULL;
	request_destroy(client, req);
	if (status != KVP_OK && (copy.answer || copy.done))
		(void)kvpl_fail(client, 0, status, "%s", text); /* kept for kvp_last_error() */
	if (copy.kind >= KVPL_POOL_REGISTER && copy.kind <= KVPL_POOL_UNREGISTER)
		kvpl_pool_answered(client, &copy, status);
	else if (copy.kind == KVPL_ROOM || copy.kind == KVPL_SUBMIT)
		kvpl_room_answered(client, &copy, status, text);
	else if (copy.kind == KVPL_SETTLE)
		kvpl_conn_settled(client, copy.object, status);
	if (copy.answer) {
		copy.answer->status = status;
		copy.answer->is_set = true;
	}
	client->handled++;
	if (copy.done)
		copy.done(copy.arg, status, text);
}

/* A page list was refused: the request that names it will be too, and this is the reason. */
static void pages_refused(struct kvp_client *client, uint64_t owner, const Kvp__Reply *reply)
{
	struct kvpl_request *req = request_find(client, owner);

	if (!req || req->early != KVP_OK)
		return;
	req->early = (enum kvp_status)reply->status;
	req->early_text = strdup(reply->text);
}

void kvpl_request_answer(struct kvp_client *client, const Kvp__Reply *reply, int fd)
{
	struct kvpl_request *req = request_find(client, reply->id);
	enum kvp_status status = (enum kvp_status)reply->status;

	if (req && req->kind == KVPL_HELLO) {
		request_destroy(client, req);
		kvpl_conn_greeted(client, reply, fd);
		return;
	}
	if (req && req->answer) {
		req->answer->fd = fd;
		req->answer->recalled_from = reply->recalled_from;
		fd = -1;
	}
	if (fd >= 0)
		(void)close(fd); /* nobody asked for it, or does any more */
	if (!req)
		return;
	if (req->kind == KVPL_PAGES) {
		if (status != KVP_OK)
			pages_refused(client, req->object, reply);
		request_destroy(client, req);
	} else if (status != KVP_OK && req->early != KVP_OK) {
		KVP_CLEANUP(kvp_freep) char *text = KVP_TAKE(req->early_text);

		request_finish(client, req, req->early, text ?: "");
	} else {
		request_finish(client, req, status, reply->text);
	}
}

void kvpl_requests_lose(struct kvp_client *client)
{
	uint64_t before = client->next_request;

	/* done() may send new requests when it reconnects: those have later ids. */
	for (;;) {
		struct kvpl_node *first = client->requests.first;
		struct kvpl_request *found;

		if (!first || first->id >= before)
			return;
		found = KVP_CONTAINER_OF(first, struct kvpl_request, node);
		if (found->kind == KVPL_PAGES || found->kind == KVPL_HELLO)
			request_destroy(client, found);
		else
			request_finish(client, found, KVP_STATUS_DAEMON_LOST,
				       "the connection to the daemon was lost");
	}
}

void kvpl_requests_fini(struct kvp_client *client)
{
	while (client->requests.first)
		request_destroy(client, KVP_CONTAINER_OF(client->requests.first,
							 struct kvpl_request, node));
	kvpl_idmap_fini(&client->requests);
}
