/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/lib.h"

/* Why the last kvp_client_open() of this thread failed: there is no client to ask. */
static _Thread_local char open_error[KVP_LIMIT_TEXT + 1];
static _Thread_local enum kvp_status open_status;

void kvpl_note(struct kvp_client *client, enum kvp_status status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(client->last_error, sizeof(client->last_error), fmt, ap);
	va_end(ap);
	client->last_status = status;
}

int kvpl_check_process(struct kvp_client *client)
{
	if (client->pid == getpid())
		return 0;
	return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
			 "the client belongs to process %d, which forked this one",
			 (int)client->pid);
}

int kvpl_copy_args(void *to, size_t to_size, const void *from, size_t least)
{
	size_t size;

	if (!from)
		return -EINVAL;
	memcpy(&size, from, sizeof(size));
	if (size < least)
		return -EINVAL;
	memset(to, 0, to_size);
	memcpy(to, from, KVP_MIN(size, to_size));
	return 0;
}

static void client_freep(struct kvp_client **client)
{
	if (!*client)
		return;
	kvpl_conn_fini(*client);
	kvpl_pools_fini(*client);
	kvpl_fences_fini(*client);
	kvpl_rooms_fini(*client);
	kvpl_requests_fini(*client);
	free((*client)->path);
	free(*client);
}

static int client_init(struct kvp_client *client, const struct kvp_client_options *options)
{
	const char *env = getenv("KVPACK_SOCKET");
	const char *path = options->socket ?: (env && env[0] ? env : "/run/kvpack/sock");
	const char *name = options->name ?: program_invocation_short_name;

	client->pid = getpid();
	client->timeout_ms = options->timeout_ms ?: KVPL_TIMEOUT_MS;
	client->no_reconnect = options->no_reconnect != 0;
	client->observer = options->observer != 0;
	client->next_request = client->next_room = 1;
	client->next_list = client->next_pool = client->next_fence = 1;
	client->changed_end = &client->changed;
	client->epfd = client->timer = client->sock = client->pidfd = -1;
	kvpl_packets_init(&client->out);
	if (options->name && strlen(name) > KVP_MAX_LABEL)
		return kvpl_fail(client, -EINVAL, KVP_STATUS_INVALID,
				 "options.name has %zu bytes, at most %u", strlen(name),
				 KVP_MAX_LABEL);
	(void)snprintf(client->name, sizeof(client->name), "%s", name);
	kvp_text_clean(client->name);
	client->path = strdup(path);
	if (!client->path)
		return -ENOMEM;
	return kvpl_conn_init(client);
}

static int client_connect(struct kvp_client *client)
{
	int64_t deadline = kvpl_now_ms() + client->timeout_ms;
	int r = kvpl_conn_start(client);

	/* A full backlog says EAGAIN, and there is no event to wait for. */
	while (r == -EAGAIN && kvpl_now_ms() < deadline) {
		(void)poll(NULL, 0, 10); /* a signal only makes the next try earlier */
		r = kvpl_conn_start(client);
	}
	if (r < 0)
		return r;
	r = kvpl_conn_wait_up(client, deadline);
	if (r == -ENOTCONN && client->last_status != KVP_OK &&
	    client->last_status != KVP_STATUS_DAEMON_LOST)
		return -EREMOTEIO; /* hello was refused, the text says why */
	return r;
}

int kvp_client_open(struct kvp_client **ret, const struct kvp_client_options *options)
{
	KVP_CLEANUP(client_freep) struct kvp_client *client = calloc(1, sizeof(*client));
	struct kvp_client_options own = KVP_CLIENT_OPTIONS_INIT;
	int r = 0;

	open_error[0] = '\0';
	open_status = KVP_OK;
	if (!client)
		return -ENOMEM;
	if (options)
		r = kvpl_copy_args(&own, sizeof(own), options, sizeof(size_t));
	if (r == 0)
		r = client_init(client, &own);
	if (r == 0)
		r = client_connect(client);
	if (r < 0) {
		memcpy(open_error, client->last_error, sizeof(open_error));
		open_status = client->last_status;
		return r;
	}
	*ret = KVP_TAKE(client);
	return 0;
}

void kvp_client_close(struct kvp_client *client)
{
	if (!client)
		return;
	client->is_closing = true;
	if (client->pid == getpid()) {
		client->conn = KVPL_DOWN; /* callbacks cannot start anything */
		kvpl_requests_lose(client);
	}
	client_freep(&client);
}

const char *kvp_last_error(const struct kvp_client *client)
{
	return client ? client->last_error : open_error;
}

enum kvp_status kvp_last_status(const struct kvp_client *client)
{
	return client ? client->last_status : open_status;
}

const char *kvp_node_name(const struct kvp_client *client)
{
	return client->node;
}

const char *kvp_node_address(const struct kvp_client *client)
{
	return client->address;
}

int kvp_client_fd(const struct kvp_client *client)
{
	return client->epfd;
}

short kvp_client_events(const struct kvp_client *client)
{
	(void)client; /* an epoll fd is readable when anything in it is ready */
	return POLLIN;
}

int kvp_client_timeout(const struct kvp_client *client)
{
	(void)client; /* timers are in the epoll fd too */
	return -1;
}
