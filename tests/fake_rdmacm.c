/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_rdmacm.h"

#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <unistd.h>

#include "proto/util.h"

/* Room for private data in a message of each kind, of RDMA_PS_TCP. */
#define REQUEST_BYTES 56u
#define ANSWER_BYTES 196u
#define REJECT_BYTES 148u
#define REJECTED_BY_PEER 28 /* IB_CM_REJ_CONSUMER_DEFINED */
#define PORT_MIN 20000u

enum state {
	STATE_NEW,
	STATE_LISTENS,
	STATE_ASKS,     /* its request is on its way, or looked at */
	STATE_ASKED,    /* made by a request that has no answer yet */
	STATE_ANSWERED, /* at both ends, until the one that asked says that it has seen it */
	STATE_UP,
	STATE_OVER,
};

struct fake_id {
	struct rdma_cm_id id;
	enum state state;
	struct fake_id *peer;   /* NULL: none, or no more */
	uint32_t qpn, peer_qpn; /* of the queue pairs */
	unsigned n_unacked;     /* events of it that are out */
	LIST_ENTRY(fake_id) link;
};

struct fake_event {
	struct rdma_cm_event event;
	struct fake_id *of; /* that counts it: of a request the id that listens */
	uint8_t data[ANSWER_BYTES];
	STAILQ_ENTRY(fake_event) link;
};

STAILQ_HEAD(fake_events, fake_event);

struct fake_channel {
	struct rdma_event_channel channel;
	struct fake_events events;
	struct fake_events late; /* not yet here */
	unsigned n_ids;
};

/* Private data as it is given. */
struct words {
	const void *data;
	size_t bytes, room;
};

struct kvp_fake_cm kvp_fake_cm;
static LIST_HEAD(, fake_id) ids = LIST_HEAD_INITIALIZER(ids);
static uint16_t next_port = PORT_MIN;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool stiff;

static void unlockp(int *unused)
{
	(void)unused;
	(void)pthread_mutex_unlock(&lock); /* ours */
}

/* Until the end of the function. */
#define LOCKED()                                                     \
	KVP_CLEANUP(unlockp) int locked = pthread_mutex_lock(&lock); \
	assert(locked == 0)

void kvp_fake_cm_reset(void)
{
	kvp_fake_cm = (struct kvp_fake_cm){
		.n_channels = kvp_fake_cm.n_channels,
		.n_ids = kvp_fake_cm.n_ids,
		.n_late = kvp_fake_cm.n_late,
	};
}

struct kvp_fake_cm kvp_fake_cm_look(void)
{
	LOCKED();
	return kvp_fake_cm;
}

void kvp_fake_cm_stick(bool on)
{
	LOCKED();
	stiff = on;
	(void)pthread_cond_broadcast(&changed);
}

static struct fake_id *fake_of(struct rdma_cm_id *id)
{
	return KVP_CONTAINER_OF(id, struct fake_id, id);
}

static struct fake_channel *channel_of(const struct fake_id *id)
{
	return KVP_CONTAINER_OF(id->id.channel, struct fake_channel, channel);
}

static int fail(int error)
{
	errno = error;
	return -1;
}

/* ---- events */

/* What comes when this does not work out. */
static enum rdma_cm_event_type failure_of(enum rdma_cm_event_type type)
{
	switch (type) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		return RDMA_CM_EVENT_ADDR_ERROR;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		return RDMA_CM_EVENT_ROUTE_ERROR;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		return type;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
	case RDMA_CM_EVENT_REJECTED:
		return RDMA_CM_EVENT_UNREACHABLE;
	case RDMA_CM_EVENT_ESTABLISHED:
		return RDMA_CM_EVENT_CONNECT_ERROR;
	default:
		return RDMA_CM_EVENT_DEVICE_REMOVAL;
	}
}

static void end(struct fake_id *id);

/* The descriptor is readable while there are events. */
static void show(const struct fake_channel *channel, bool on)
{
	uint64_t one = 1;

	if (on)
		assert(write(channel->channel.fd, &one, sizeof(one)) == sizeof(one));
	else
		assert(read(channel->channel.fd, &one, sizeof(one)) == sizeof(one));
}

static void spoil(struct fake_event *made)
{
	if (made->event.event == RDMA_CM_EVENT_CONNECT_REQUEST)
		made->data[0] ^= 0xff;
	else
		made->event.param.conn.private_data = NULL;
	made->event.event = failure_of(made->event.event);
	made->event.status = -ETIMEDOUT;
}

/* Nobody ever knew it, and nobody hears of it. */
static void vanish(struct fake_id *id)
{
	id->peer->peer = NULL;
	id->peer = NULL;
	end(id);
}

/* The kernel keeps the order of what an id is told. */
static bool is_late(const struct fake_channel *channel, const struct fake_event *made,
		    uint64_t number)
{
	const struct fake_event *late;

	STAILQ_FOREACH (late, &channel->late, link) {
		if (late->event.id == made->event.id)
			return true;
	}
	return number == kvp_fake_cm.late_at;
}

static void bring(struct fake_channel *channel, struct fake_event *made)
{
	if (STAILQ_EMPTY(&channel->events))
		show(channel, true);
	STAILQ_INSERT_TAIL(&channel->events, made, link);
}

static void say_of(struct fake_id *of, struct fake_id *id, enum rdma_cm_event_type type,
		   const struct words *words)
{
	struct fake_channel *channel = channel_of(of);
	struct fake_event *made = calloc(1, sizeof(*made));
	uint64_t number = ++kvp_fake_cm.n_events;

	assert(made);
	made->of = of;
	made->event.id = &id->id;
	made->event.listen_id = of != id ? &of->id : NULL;
	made->event.event = type;
	made->event.status = type == RDMA_CM_EVENT_REJECTED ? REJECTED_BY_PEER : 0;
	if (words) {
		assert(words->bytes <= words->room && words->room <= sizeof(made->data));
		if (words->bytes)
			memcpy(made->data, words->data, words->bytes);
		made->event.param.conn.private_data = made->data;
		made->event.param.conn.private_data_len = (uint8_t)words->room;
	}
	if (number == kvp_fake_cm.spoil_at)
		spoil(made);
	if (number == kvp_fake_cm.lose_at) {
		free(made);
		if (of != id)
			vanish(id);
		return;
	}
	if (!is_late(channel, made, number)) {
		bring(channel, made);
		return;
	}
	STAILQ_INSERT_TAIL(&channel->late, made, link);
	kvp_fake_cm.n_late++;
}

void kvp_fake_cm_release(void)
{
	LOCKED();
	struct fake_id *id;

	LIST_FOREACH(id, &ids, link)
	{
		struct fake_channel *channel = channel_of(id);
		struct fake_event *late;

		while ((late = STAILQ_FIRST(&channel->late))) {
			STAILQ_REMOVE_HEAD(&channel->late, link);
			kvp_fake_cm.n_late--;
			bring(channel, late);
		}
	}
}

static void say(struct fake_id *to, enum rdma_cm_event_type type)
{
	say_of(to, to, type, NULL);
}

void kvp_fake_cm_say(struct rdma_cm_id *id, enum rdma_cm_event_type type, const void *data,
		     size_t bytes)
{
	LOCKED();
	const struct words words = { data, bytes, bytes };

	say_of(fake_of(id), fake_of(id), type, data ? &words : NULL);
}

int rdma_get_cm_event(struct rdma_event_channel *ours, struct rdma_cm_event **out)
{
	LOCKED();
	struct fake_channel *channel = KVP_CONTAINER_OF(ours, struct fake_channel, channel);
	struct fake_event *first = STAILQ_FIRST(&channel->events);

	if (!first)
		return fail(EAGAIN);
	STAILQ_REMOVE_HEAD(&channel->events, link);
	if (STAILQ_EMPTY(&channel->events))
		show(channel, false);
	first->of->n_unacked++;
	*out = &first->event;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	LOCKED();
	struct fake_event *made = KVP_CONTAINER_OF(event, struct fake_event, event);

	made->of->n_unacked--;
	(void)pthread_cond_broadcast(&changed);
	free(made);
	return 0;
}

/* ---- ids */

struct rdma_event_channel *rdma_create_event_channel(void)
{
	LOCKED();
	struct fake_channel *channel = calloc(1, sizeof(*channel));

	assert(channel);
	STAILQ_INIT(&channel->events);
	STAILQ_INIT(&channel->late);
	channel->channel.fd = eventfd(0, EFD_CLOEXEC);
	assert(channel->channel.fd >= 0);
	kvp_fake_cm.n_channels++;
	return &channel->channel;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ours)
{
	LOCKED();
	struct fake_channel *channel = KVP_CONTAINER_OF(ours, struct fake_channel, channel);

	assert(channel->n_ids == 0);
	assert(STAILQ_EMPTY(&channel->events) && STAILQ_EMPTY(&channel->late));
	(void)close(channel->channel.fd);
	free(channel);
	kvp_fake_cm.n_channels--;
}

static struct fake_id *make(struct fake_channel *channel, void *context)
{
	struct fake_id *id = calloc(1, sizeof(*id));

	assert(id);
	id->id.channel = &channel->channel;
	id->id.context = context;
	id->id.ps = RDMA_PS_TCP;
	channel->n_ids++;
	kvp_fake_cm.n_ids++;
	LIST_INSERT_HEAD(&ids, id, link);
	return id;
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *context,
		   enum rdma_port_space ps)
{
	LOCKED();

	assert(ps == RDMA_PS_TCP);
	*out = &make(KVP_CONTAINER_OF(channel, struct fake_channel, channel), context)->id;
	return 0;
}

/* What the peer hears of an id that ends. */
static void tell_peer(struct fake_id *id)
{
	const struct words nothing = { NULL, 0, REJECT_BYTES };
	struct fake_id *peer = id->peer;

	id->peer = NULL;
	if (!peer)
		return;
	peer->peer = NULL;
	peer->state = STATE_OVER;
	if (id->state == STATE_UP)
		say(peer, RDMA_CM_EVENT_DISCONNECTED);
	else
		say_of(peer, peer, RDMA_CM_EVENT_REJECTED, &nothing);
}

/* How many. */
static uint32_t drop_from(struct fake_events *events, struct fake_id *id)
{
	struct fake_event *made, *next;
	uint32_t n = 0;

	for (made = STAILQ_FIRST(events); made; made = next) {
		next = STAILQ_NEXT(made, link);
		if (made->of != id && made->event.id != &id->id)
			continue;
		STAILQ_REMOVE(events, made, fake_event, link);
		free(made);
		n++;
	}
	return n;
}

static void drop_events(struct fake_id *id)
{
	struct fake_channel *channel = channel_of(id);

	if (drop_from(&channel->events, id) > 0 && STAILQ_EMPTY(&channel->events))
		show(channel, false);
	kvp_fake_cm.n_late -= drop_from(&channel->late, id);
}

static struct fake_id *asked_in(const struct fake_events *events, const struct fake_id *listener)
{
	const struct fake_event *made;

	STAILQ_FOREACH (made, events, link) {
		if (made->of == listener && made->event.event == RDMA_CM_EVENT_CONNECT_REQUEST)
			return fake_of(made->event.id);
	}
	return NULL;
}

/* Requests that were never fetched go with who listens. */
static void drop_asked(const struct fake_id *listener)
{
	const struct fake_channel *channel = channel_of(listener);
	struct fake_id *asked;

	while ((asked = asked_in(&channel->events, listener)) ||
	       (asked = asked_in(&channel->late, listener)))
		end(asked);
}

static void end(struct fake_id *id)
{
	if (id->state == STATE_LISTENS)
		drop_asked(id);
	tell_peer(id);
	drop_events(id);
	assert(id->n_unacked == 0);
	channel_of(id)->n_ids--;
	LIST_REMOVE(id, link);
	free(id);
	kvp_fake_cm.n_ids--;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	LOCKED();

	while (stiff || fake_of(id)->n_unacked > 0)
		(void)pthread_cond_wait(&changed, &lock);
	end(fake_of(id));
	return 0;
}

/* ---- connections */

static size_t bytes_of(const struct sockaddr *addr)
{
	return addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
					   : sizeof(struct sockaddr_in);
}

static __be16 *port_of(struct sockaddr *addr)
{
	return addr->sa_family == AF_INET6 ? &((struct sockaddr_in6 *)(void *)addr)->sin6_port
					   : &((struct sockaddr_in *)(void *)addr)->sin_port;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
	LOCKED();
	struct sockaddr *ours = &id->route.addr.src_addr;

	memcpy(ours, addr, bytes_of(addr));
	if (*port_of(ours) == 0)
		*port_of(ours) = htons(next_port++);
	return 0;
}

__be16 rdma_get_src_port(struct rdma_cm_id *id)
{
	LOCKED();
	return *port_of(&id->route.addr.src_addr);
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	LOCKED();

	(void)backlog;
	assert(id->route.addr.src_addr.sa_family != 0);
	fake_of(id)->state = STATE_LISTENS;
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
	LOCKED();

	(void)ms;
	(void)rdma_bind_addr(id, from); /* cannot fail here */
	memcpy(&id->route.addr.dst_addr, to, bytes_of(to));
	say(fake_of(id), RDMA_CM_EVENT_ADDR_RESOLVED);
	return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms)
{
	LOCKED();

	(void)ms;
	say(fake_of(id), RDMA_CM_EVENT_ROUTE_RESOLVED);
	return 0;
}

static struct fake_id *listener_at(const struct sockaddr *addr)
{
	struct fake_id *id;

	LIST_FOREACH(id, &ids, link)
	{
		if (id->state == STATE_LISTENS &&
		    memcmp(&id->id.route.addr.src_addr, addr, bytes_of(addr)) == 0)
			return id;
	}
	return NULL;
}

int rdma_connect(struct rdma_cm_id *ours, struct rdma_conn_param *param)
{
	LOCKED();
	const struct words words = { param->private_data, param->private_data_len, REQUEST_BYTES };
	struct fake_id *id = fake_of(ours), *to = listener_at(&ours->route.addr.dst_addr), *asked;

	if (kvp_fake_cm.unreachable || !to) {
		say(id, to ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_REJECTED);
		return 0;
	}
	asked = make(channel_of(to), to->id.context);
	asked->state = STATE_ASKED;
	asked->peer = id;
	asked->peer_qpn = id->qpn = param->qp_num;
	memcpy(&asked->id.route.addr.src_addr, &to->id.route.addr.src_addr,
	       sizeof(struct sockaddr_storage));
	memcpy(&asked->id.route.addr.dst_addr, &ours->route.addr.src_addr,
	       sizeof(struct sockaddr_storage));
	id->state = STATE_ASKS;
	id->peer = asked;
	say_of(to, asked, RDMA_CM_EVENT_CONNECT_REQUEST, &words);
	return 0;
}

int rdma_accept(struct rdma_cm_id *ours, struct rdma_conn_param *param)
{
	LOCKED();
	const struct words words = { param->private_data, param->private_data_len, ANSWER_BYTES };
	struct fake_id *id = fake_of(ours), *peer = id->peer;

	if (id->state != STATE_ASKED || !peer)
		return fail(EINVAL);
	id->qpn = peer->peer_qpn = param->qp_num;
	id->state = peer->state = STATE_ANSWERED;
	say_of(peer, peer, RDMA_CM_EVENT_CONNECT_RESPONSE, &words);
	return 0;
}

int rdma_reject(struct rdma_cm_id *ours, const void *data, uint8_t bytes)
{
	LOCKED();
	const struct words words = { data, bytes, REJECT_BYTES };
	struct fake_id *id = fake_of(ours), *peer = id->peer;

	if ((id->state != STATE_ASKED && id->state != STATE_ANSWERED) || !peer)
		return fail(EINVAL);
	id->peer = peer->peer = NULL;
	id->state = peer->state = STATE_OVER;
	say_of(peer, peer, RDMA_CM_EVENT_REJECTED, &words);
	return 0;
}

int rdma_establish(struct rdma_cm_id *ours)
{
	LOCKED();
	struct fake_id *id = fake_of(ours);

	if (id->state != STATE_ANSWERED || !id->peer)
		return fail(EINVAL);
	id->state = id->peer->state = STATE_UP;
	say(id->peer, RDMA_CM_EVENT_ESTABLISHED);
	return 0;
}

int rdma_init_qp_attr(struct rdma_cm_id *ours, struct ibv_qp_attr *attr, int *mask)
{
	LOCKED();
	const struct fake_id *id = fake_of(ours);

	if (id->state != STATE_ASKED && id->state != STATE_ANSWERED)
		return fail(EINVAL);
	*mask = IBV_QP_STATE;
	if (attr->qp_state == IBV_QPS_RTS) {
		*mask |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			 IBV_QP_MAX_QP_RD_ATOMIC;
		return 0;
	}
	assert(attr->qp_state == IBV_QPS_RTR);
	attr->dest_qp_num = id->peer_qpn;
	attr->path_mtu = IBV_MTU_1024;
	*mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return 0;
}
