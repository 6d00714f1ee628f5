/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>

#include "daemon/peer_internal.h"

struct kvp_peer_conn {
	uv_tcp_t tcp;
	uv_connect_t connect;
	struct kvp_peers *peers;
	struct kvp_peer *peer; /* NULL once the peer has let go */
	struct kvp_frames frames;
};

struct peer_write {
	uv_write_t req;
	uv_buf_t buf;
	uint8_t frame[];
};

/* A name is resolved in libuv's pool; the peer may be gone by the time of the answer. */
struct peer_resolve {
	uv_getaddrinfo_t req;
	struct kvp_peers *peers;
	uint64_t dial; /* which of its dials asked */
	struct kvp_peer *peer;
};

static void conn_closed(uv_handle_t *handle)
{
	struct kvp_peer_conn *conn = handle->data;

	conn->peers->n_handles--;
	kvp_frames_fini(&conn->frames);
	free(conn);
}

void kvp_peer_conn_close(struct kvp_peer_conn *conn)
{
	if (!conn)
		return;
	conn->peer = NULL;
	if (!uv_is_closing((uv_handle_t *)&conn->tcp))
		uv_close((uv_handle_t *)&conn->tcp, conn_closed);
}

static struct kvp_peer_conn *conn_new(struct kvp_peers *peers)
{
	struct kvp_peer_conn *conn = calloc(1, sizeof(*conn));

	if (!conn)
		return NULL;
	if (uv_tcp_init(peers->loop, &conn->tcp) < 0) {
		free(conn);
		return NULL;
	}
	conn->peers = peers;
	conn->tcp.data = conn;
	peers->n_handles++;
	return conn;
}

static void conn_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
	struct kvp_peer_conn *conn = handle->data;

	(void)suggested;
	*buf = uv_buf_init(conn->peers->read_buf, KVP_PEER_READ_BYTES);
}

/* Hands on every whole message; the peer may let go of the connection in between. */
static void conn_messages(struct kvp_peer_conn *conn)
{
	char err[KVP_LIMIT_TEXT + 1] = "";

	while (conn->peer) {
		KVP_CLEANUP(kvp_peer_freep) Kvp__PeerMsg *msg = NULL;
		int r;

		conn->frames.max = conn->peer->state == KVP_PEER_HELLO ? KVP_LIMIT_HELLO_FRAME : 0;
		r = kvp_frames_next(&conn->frames, &msg, err, sizeof(err));
		if (r == 0)
			return;
		if (r < 0) {
			kvp_peer_end(conn->peer, KVP__STATUS__STATUS_PROTOCOL,
				     "broke the protocol: %s", err);
			return;
		}
		kvp_peer_received(conn->peer, msg);
	}
}

/* Who is refused by address hears no word: only the other's log has it. */
static void conn_over(struct kvp_peer *peer, int r)
{
	const char *hint = peer->outgoing && peer->state == KVP_PEER_HELLO
				   ? " before it has greeted: its log says why (peer.allow, "
				     "peer.max_sessions)"
				   : "";

	if (r == UV_EOF)
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST, "closed the connection%s", hint);
	else
		kvp_peer_end(peer, KVP__STATUS__STATUS_PEER_LOST, "is lost: %s%s", uv_strerror(r),
			     hint);
}

static void conn_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
	struct kvp_peer_conn *conn = stream->data;
	struct kvp_peer *peer = conn->peer;

	if (!peer || n == 0)
		return;
	if (n < 0) {
		conn_over(peer, (int)n);
		return;
	}
	peer->bytes_recv += (uint64_t)n;
	kvp_peer_heard(peer);
	if (kvp_frames_push(&conn->frames, buf->base, (size_t)n) < 0) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_NO_MEMORY,
			     "needs more memory than there is");
		return;
	}
	conn_messages(conn);
}

static int conn_start(struct kvp_peer_conn *conn)
{
	int r = uv_tcp_nodelay(&conn->tcp, 1);

	if (r == 0)
		r = uv_tcp_keepalive(&conn->tcp, 1, 30);
	if (r == 0)
		r = uv_read_start((uv_stream_t *)&conn->tcp, conn_alloc, conn_read);
	return r;
}

static void conn_connected(uv_connect_t *req, int status)
{
	struct kvp_peer_conn *conn = req->data;
	int r = status;

	if (!conn->peer)
		return; /* closed meanwhile */
	if (r == 0)
		r = conn_start(conn);
	if (r < 0)
		kvp_peer_end(conn->peer, KVP__STATUS__STATUS_UNREACHABLE, "cannot be reached: %s",
			     uv_strerror(r));
	else
		kvp_peer_connected(conn->peer);
}

static void peer_connect(struct kvp_peer *peer, const struct sockaddr *addr)
{
	struct kvp_peer_conn *conn;
	int r;

	if (!kvp_peer_may_dial(peer->peers, addr)) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_DENIED,
			     "is beyond loopback, and peer.plaintext = loopback");
		return;
	}
	conn = conn_new(peer->peers);
	if (!conn) {
		kvp_peer_end(peer, KVP__STATUS__STATUS_NO_MEMORY, "cannot be dialled: no memory");
		return;
	}
	peer->conn = conn;
	conn->peer = peer;
	conn->connect.data = conn;
	r = uv_tcp_connect(&conn->connect, &conn->tcp, addr, conn_connected);
	if (r < 0)
		kvp_peer_end(peer, KVP__STATUS__STATUS_UNREACHABLE, "cannot be reached: %s",
			     uv_strerror(r));
}

/* Whether the dial that asked still waits for the name. */
static bool resolve_wanted(const struct peer_resolve *resolve)
{
	const struct kvp_peer *peer;

	for (peer = resolve->peers->list; peer; peer = peer->next)
		if (peer == resolve->peer)
			return peer->state == KVP_PEER_CONNECTING && !peer->conn &&
			       peer->dial == resolve->dial;
	return false;
}

static void resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *res)
{
	struct peer_resolve *resolve = req->data;

	resolve->peers->n_handles--;
	resolve->peers->n_lookups--;
	if (resolve_wanted(resolve)) {
		if (status == 0 && res)
			peer_connect(resolve->peer, res->ai_addr);
		else
			kvp_peer_end(resolve->peer, KVP__STATUS__STATUS_UNREACHABLE,
				     "cannot be reached: its name does not resolve: %s",
				     status ? uv_strerror(status) : "no address");
	}
	uv_freeaddrinfo(res);
	free(resolve);
}

static void peer_resolve(struct kvp_peer *peer, const char *host, const char *port)
{
	static const struct addrinfo hints = { .ai_socktype = SOCK_STREAM };
	struct peer_resolve *resolve = calloc(1, sizeof(*resolve));
	int r = UV_ENOMEM;

	if (resolve) {
		resolve->peers = peer->peers;
		resolve->peer = peer;
		resolve->dial = peer->dial;
		resolve->req.data = resolve;
		r = uv_getaddrinfo(peer->peers->loop, &resolve->req, resolved, host, port, &hints);
	}
	if (r < 0) {
		free(resolve);
		kvp_peer_end(peer, KVP__STATUS__STATUS_UNREACHABLE, "cannot be resolved: %s",
			     uv_strerror(r));
		return;
	}
	peer->peers->n_handles++;
	peer->peers->n_lookups++;
}

void kvp_peer_dial(struct kvp_peer *peer)
{
	char host[KVP_LIMIT_ADDRESS + 1], port[8];
	struct sockaddr_storage addr;

	kvp_peer_set_state(peer, KVP_PEER_CONNECTING);
	peer->was_up = false;
	peer->dial = ++peer->peers->next_dial;
	kvp_peer_set_timer(peer, peer->peers->config->peer.lost_after_ns);
	if (kvp_peer_split(peer->address, host, sizeof(host), port, sizeof(port)) < 0)
		kvp_peer_end(peer, KVP__STATUS__STATUS_INVALID, "has a malformed address");
	else if (kvp_peer_numeric(host, port, &addr))
		peer_connect(peer, (const struct sockaddr *)&addr);
	else
		peer_resolve(peer, host, port);
}

/* Whether the accepted connection may stay; the refusal is logged, the other sees a close. */
static bool accept_allowed(struct kvp_peers *peers, const struct sockaddr *addr, const char *text)
{
	if (!kvp_peer_allowed(peers, addr)) {
		kvp_log_limited(&peers->log_limit, KVP_LOG_WARNING,
				"peer %s refused: not in peer.allow", text);
		return false;
	}
	if (kvp_peers_full(peers)) {
		peers->refused++;
		kvp_log_limited(&peers->log_limit, KVP_LOG_WARNING,
				"peer %s refused: peer.max_sessions is %u", text,
				peers->config->peer.max_sessions);
		return false;
	}
	return true;
}

int kvp_peer_accept(struct kvp_peers *peers)
{
	struct kvp_peer_conn *conn = conn_new(peers);
	struct sockaddr_storage addr = { 0 };
	int addr_bytes = sizeof(addr);
	struct kvp_peer *peer;
	char text[64];

	if (!conn)
		return -ENOMEM;
	if (uv_accept((uv_stream_t *)&peers->listener, (uv_stream_t *)&conn->tcp) < 0 ||
	    uv_tcp_getpeername(&conn->tcp, (struct sockaddr *)&addr, &addr_bytes) < 0) {
		kvp_peer_conn_close(conn);
		return 0;
	}
	kvp_peer_print_addr((const struct sockaddr *)&addr, text, sizeof(text));
	if (!accept_allowed(peers, (const struct sockaddr *)&addr, text) || conn_start(conn) < 0) {
		kvp_peer_conn_close(conn);
		return 0;
	}
	peer = kvp_peer_new(peers, text, false);
	if (!peer) {
		kvp_peer_conn_close(conn); /* its daemon comes again */
		return 0;
	}
	peer->from = addr;
	peer->conn = conn;
	conn->peer = peer;
	kvp_peer_connected(peer);
	return 0;
}

static void conn_written(uv_write_t *req, int status)
{
	struct peer_write *write = (struct peer_write *)req;
	struct kvp_peer_conn *conn = req->handle->data;

	free(write);
	if (status < 0 && conn->peer)
		kvp_peer_end(conn->peer, KVP__STATUS__STATUS_PEER_LOST, "is lost: %s",
			     uv_strerror(status));
}

bool kvp_peer_conn_same_host(const struct kvp_peer_conn *a, const struct kvp_peer_conn *b)
{
	struct sockaddr_storage addrs[2] = { 0 };
	int bytes[2] = { sizeof(addrs[0]), sizeof(addrs[1]) };

	return uv_tcp_getpeername(&a->tcp, (struct sockaddr *)&addrs[0], &bytes[0]) == 0 &&
	       uv_tcp_getpeername(&b->tcp, (struct sockaddr *)&addrs[1], &bytes[1]) == 0 &&
	       kvp_peer_same_host((const struct sockaddr *)&addrs[0],
				  (const struct sockaddr *)&addrs[1]);
}

uint32_t kvp_peer_conn_unsent(const struct kvp_peer_conn *conn)
{
	return (uint32_t)uv_stream_get_write_queue_size((const uv_stream_t *)&conn->tcp);
}

int kvp_peer_conn_send(struct kvp_peer_conn *conn, const Kvp__PeerMsg *msg)
{
	size_t bytes = kvp_peer_frame_bytes(msg);
	struct peer_write *write;
	long n;
	int r;

	if (bytes > KVP_LIMIT_FRAME + KVP_FRAME_HEAD)
		return -EMSGSIZE;
	if (kvp_peer_conn_unsent(conn) + bytes > KVP_PEER_UNSENT_MAX)
		return -ENOBUFS;
	write = malloc(sizeof(*write) + bytes);
	if (!write)
		return -ENOMEM;
	n = kvp_peer_encode(msg, write->frame, bytes);
	if (n < 0) {
		free(write);
		return (int)n;
	}
	write->buf = uv_buf_init((char *)write->frame, (unsigned)n);
	r = uv_write(&write->req, (uv_stream_t *)&conn->tcp, &write->buf, 1, conn_written);
	if (r < 0) {
		free(write);
		return r;
	}
	return (int)n;
}
