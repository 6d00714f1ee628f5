/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/lane.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <time.h>

#include "daemon/lane_impl.h"
#include "proto/util.h"

/* A yield that took longer let another run. */
#define YIELD_ALONE_NS 5000u

uint64_t kvp_lane_now(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail for this clock */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void kvp_board_add(_Atomic uint64_t *counter, uint64_t n)
{
	uint64_t old = atomic_load_explicit(counter, memory_order_relaxed);

	atomic_store_explicit(counter, old + n, memory_order_relaxed);
}

void kvp_board_once(_Atomic uint64_t *stamp, uint64_t now_ns)
{
	if (atomic_load_explicit(stamp, memory_order_relaxed) == 0)
		atomic_store_explicit(stamp, now_ns, memory_order_relaxed);
}

void kvp_lane_call(struct kvp_lane *lane, const char *call)
{
	if (call)
		atomic_store_explicit(&lane->call_since_ns, lane->now_ns, memory_order_relaxed);
	atomic_store_explicit(&lane->call, call, memory_order_release);
}

uint64_t kvp_lane_token(struct kvp_lane *lane)
{
	for (;;) {
		if (lane->n_tokens == 0) {
			/* 4 KiB come whole once the kernel's generator has been seeded; a signal
			 * can only shorten more than 256 bytes. */
			ssize_t n = getrandom(lane->tokens, sizeof(lane->tokens), 0);

			lane->n_tokens = n > 0 ? (uint32_t)((size_t)n / sizeof(uint64_t)) : 0;
			continue;
		}
		if (lane->tokens[--lane->n_tokens])
			return lane->tokens[lane->n_tokens];
	}
}

/* Orders in the order given. A list that was taken is handled whole: it is finite. */
static uint32_t take_orders(struct kvp_lane *lane)
{
	struct kvp_node *node = kvp_inbox_take(&lane->inbox);
	uint32_t n = 0;

	while (node) {
		struct kvp_node *next = node->next;

		kvp_lane_handle(lane, KVP_CONTAINER_OF(node, struct kvp_order, node));
		node = next;
		n++;
	}
	return n;
}

/* The transport has moved: what it refused may go now. */
static void links_unfill(struct kvp_lane *lane)
{
	struct kvp_link *link;

	TAILQ_FOREACH (link, &lane->links, link)
		link->full = false;
}

static uint32_t progress(struct kvp_lane *lane)
{
	uint32_t n = 0;
	int r;

	if (!lane->net)
		return 0;

	kvp_lane_call(lane, "transport progress");
	for (uint32_t i = 0; i < KVP_LANE_TURN_PROGRESS; i++) {
		r = lane->config.net->progress(lane->net);
		if (r <= 0)
			break;
		n += (uint32_t)r;
	}
	kvp_lane_call(lane, NULL);

	if (n > 0)
		links_unfill(lane);
	return n;
}

static uint32_t settle(struct kvp_lane *lane)
{
	uint32_t n = 0;
	struct kvp_rx *rx;
	struct kvp_tx *tx;

	while ((rx = TAILQ_FIRST(&lane->dirty_rxs))) {
		TAILQ_REMOVE(&lane->dirty_rxs, rx, dirty_link);
		rx->dirty = false;
		kvp_rx_settle(rx);
		n++;
	}
	while ((tx = TAILQ_FIRST(&lane->dirty_txs))) {
		TAILQ_REMOVE(&lane->dirty_txs, tx, dirty_link);
		tx->dirty = false;
		kvp_tx_settle(tx);
		n++;
	}
	return n;
}

/* One turn, from the end of the pipe to its start: what frees a slot comes before what needs one.
 */
static uint32_t turn(struct kvp_lane *lane)
{
	uint32_t n = 0;
	struct kvp_link *link;

	lane->now_ns = kvp_lane_now();
	n += progress(lane);
	n += kvp_lane_moved(lane);
	n += kvp_rx_scatters(lane);
	TAILQ_FOREACH (link, &lane->links, link)
		n += kvp_rx_answers(link) + kvp_link_tend(link) + kvp_rx_tell(link);
	n += kvp_rx_grants(lane);
	TAILQ_FOREACH (link, &lane->links, link)
		n += kvp_tx_sends(link);
	TAILQ_FOREACH (link, &lane->links, link)
		n += kvp_tx_wants(link);
	TAILQ_FOREACH (link, &lane->links, link)
		n += kvp_tx_ahead(link);
	n += kvp_tx_local(lane);
	n += kvp_direct_turn(lane);
	n += take_orders(lane);
	n += kvp_rx_late(lane);
	n += kvp_tx_fences(lane);
	n += settle(lane);
	kvp_mover_launch(&lane->mover);

	atomic_store_explicit(&lane->turn_ns, lane->now_ns, memory_order_relaxed);
	kvp_board_add(&lane->turns, 1);
	if (n > 0)
		kvp_lane_publish(lane);
	return n;
}

/* How long poll(2) may sleep; NULL: until something comes. */
static struct timespec *sleep_time(const struct kvp_lane *lane, struct timespec *ts)
{
	uint64_t ns = UINT64_MAX;

	if (!TAILQ_EMPTY(&lane->fenced))
		ns = lane->fence_next_ns > lane->now_ns ? lane->fence_next_ns - lane->now_ns : 0;
	if (lane->links_closing > (lane->net ? lane->config.net->stats(lane->net)->stuck : 0))
		ns = KVP_MIN(ns, KVP_LANE_CLOSE_POLL_NS);
	if (ns == UINT64_MAX)
		return NULL;

	*ts = (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u),
				 .tv_nsec = (long)(ns % 1000000000u) };
	return ts;
}

/* Sleeps until an order, the transport or a fence's next look. The transport is armed first and
 * looked at once more: what came before arming would not wake us. */
static void rest(struct kvp_lane *lane)
{
	struct pollfd fds[2] = { { .fd = lane->wake_fd, .events = POLLIN }, { .fd = -1 } };
	struct timespec ts;

	if (lane->net) {
		if (lane->config.net->arm(lane->net) < 0) {
			/* It may have taken what came: the next turn's progress would not say so.
			 */
			links_unfill(lane);
			/* A close that is under way keeps the transport from being armed. */
			if (lane->links_closing)
				(void)poll(fds, 1, 1);
			return;
		}
		fds[1] = (struct pollfd){ .fd = lane->config.net->fd(lane->net), .events = POLLIN };
	}
	if (turn(lane) > 0)
		return;

	lane->counts.sleeps++;
	kvp_lane_publish(lane);
	(void)ppoll(fds, KVP_ARRAY_SIZE(fds), sleep_time(lane, &ts), NULL); /* a signal is a turn */
	lane->counts.wakes++;
	if (fds[0].revents)
		kvp_wakefd_clear(lane->wake_fd);
}

/* A GPU has no descriptor to sleep on: what is on its way there is looked at again soon. */
static void nap(struct kvp_lane *lane)
{
	const struct timespec ts = { .tv_nsec = KVP_LANE_NAP_NS };
	struct pollfd fd = { .fd = lane->wake_fd, .events = POLLIN };

	(void)ppoll(&fd, 1, &ts, NULL);
	if (fd.revents)
		kvp_wakefd_clear(lane->wake_fd);
}

/* With few cores another may want this one, and often it is the peer whose bytes we wait for. If
 * one ran while we gave way, we sleep: who wakes us finds us a core that is free. */
static bool may_spin(const struct kvp_lane *lane)
{
	uint64_t begin_ns;

	if (!lane->config.spin_yields)
		return true;
	begin_ns = kvp_lane_now();
	(void)sched_yield();
	return kvp_lane_now() - begin_ns < YIELD_ALONE_NS;
}

static void run(struct kvp_lane *lane)
{
	uint64_t progress_ns = kvp_lane_now();

	while (!atomic_load_explicit(&lane->stop, memory_order_acquire)) {
		if (turn(lane) > 0) {
			progress_ns = lane->now_ns;
			continue;
		}
		if (lane->now_ns - progress_ns < lane->config.spin_ns && may_spin(lane)) {
			lane->counts.spins++;
			continue;
		}
		if (kvp_mover_busy(&lane->mover))
			nap(lane);
		else
			rest(lane);
	}
}

static int open_net(struct kvp_lane *lane)
{
	struct kvp_net_verbs_config verbs;
	char near[KVP_GPU_PCI] = "";
	struct kvp_net_config config = {
		.events = &kvp_lane_events,
		.arg = lane,
		.interface = lane->config.interface,
		.port_lo = lane->config.port_lo,
		.port_hi = lane->config.port_hi,
		.verbs = lane->config.verbs,
		.rdma = lane->config.rdma,
		.device = kvp_lane_on_gpu(lane) && lane->config.memory != KVP_RINGS_HOST,
		.staged = kvp_lane_on_gpu(lane) && lane->config.memory == KVP_RINGS_DEVICE,
	};
	int r;

	if (!lane->config.net)
		return 0;

	if (config.verbs && kvp_lane_on_gpu(lane)) {
		verbs = *config.verbs;
		verbs.near = near;
		config.verbs = &verbs;
		kvp_gpu_pci(lane->mover.gpu, near);
	}
	lane->now_ns = kvp_lane_now();
	kvp_lane_call(lane, "transport open");
	r = lane->config.net->open(&lane->net, &config, lane->start_err, sizeof(lane->start_err));
	kvp_lane_call(lane, NULL);
	if (r < 0)
		return r;

	r = lane->config.net->address(lane->net, lane->addr, sizeof(lane->addr));
	if (r < 0) {
		(void)snprintf(lane->start_err, sizeof(lane->start_err),
			       "transport %s has no address: %s", lane->config.net->name,
			       strerror(-r));
		return r;
	}
	lane->addr_bytes = (uint32_t)r;
	return 0;
}

/* The host's are there already. Which memory a GPU's lie in depends on the transport. */
static int open_rings(struct kvp_lane *lane)
{
	int r = 0;

	if (kvp_lane_on_gpu(lane))
		r = kvp_lane_rings_make(lane, lane->start_err, sizeof(lane->start_err));
	if (r == 0 && lane->net && lane->config.net->put)
		r = kvp_lane_rings_tell(lane, lane->start_err, sizeof(lane->start_err));
	return r;
}

/* The transport lives and dies on the lane's thread. */
static void *lane_main(void *arg)
{
	struct kvp_lane *lane = arg;
	int r = 0;

	(void)prctl(PR_SET_TIMERSLACK, 1000UL); /* naps are short; else they are longer */
	lane->now_ns = kvp_lane_now();
	if (kvp_lane_on_gpu(lane))
		r = kvp_lane_gpu_open(lane, lane->start_err, sizeof(lane->start_err));
	if (r == 0)
		r = open_net(lane);
	if (r == 0)
		r = open_rings(lane);
	kvp_lane_publish(lane);
	lane->start_result = r;
	(void)sem_post(&lane->started); /* cannot overflow: posted once */
	if (r == 0)
		run(lane);
	if (lane->net) {
		kvp_lane_call(lane, "transport close");
		lane->config.net->close(lane->net);
		lane->net = NULL;
	}
	if (kvp_lane_on_gpu(lane))
		kvp_lane_gpu_close(lane);
	return NULL;
}

static void lane_free(struct kvp_lane *lane)
{
	struct kvp_node *node;

	if (!lane)
		return;

	while ((node = kvp_inbox_take(&lane->inbox))) {
		while (node) {
			struct kvp_node *next = node->next;

			kvp_order_free(KVP_CONTAINER_OF(node, struct kvp_order, node));
			node = next;
		}
	}
	kvp_inbox_fini(&lane->inbox);
	kvp_closep(&lane->wake_fd);
	kvp_ring_fini(&lane->pack);
	kvp_ring_fini(&lane->land);
	kvp_table_fini(&lane->pools);
	kvp_table_fini(&lane->fences);
	kvp_table_fini(&lane->eps);
	kvp_table_fini(&lane->shares_by_id);
	kvp_table_fini(&lane->rxs);
	kvp_table_fini(&lane->txs);
	free(lane->rx_pool);
	free(lane->tx_pool);
	free(lane->parts);
	free(lane->runs);
	free(lane->land_keys);
	(void)sem_destroy(&lane->started); /* nobody waits */
	free(lane);
}

static void lane_freep(struct kvp_lane **lane)
{
	lane_free(*lane);
}

static int init_memory(struct kvp_lane *lane)
{
	struct kvp_table *tables[] = { &lane->pools,        &lane->fences, &lane->eps,
				       &lane->shares_by_id, &lane->rxs,    &lane->txs };
	int r;

	for (size_t i = 0; i < KVP_ARRAY_SIZE(tables); i++) {
		r = kvp_table_init(tables[i]);
		if (r < 0)
			return r;
	}
	lane->rx_pool = calloc(KVP_LANE_RX_PIECES, sizeof(*lane->rx_pool));
	lane->tx_pool = calloc(KVP_LANE_TX_PIECES, sizeof(*lane->tx_pool));
	lane->parts = calloc(KVP_GATHER_TOGETHER * KVP_PAIRS_MAX, sizeof(*lane->parts));
	lane->land_keys = calloc(2 * (size_t)lane->config.slots, sizeof(*lane->land_keys));
	lane->runs = calloc(KVP_WIRE_PIECE_RUNS, sizeof(*lane->runs));
	if (!lane->rx_pool || !lane->tx_pool || !lane->parts || !lane->land_keys || !lane->runs)
		return -ENOMEM;

	if (kvp_lane_on_gpu(lane)) /* its rings are made when it is open */
		return 0;
	r = kvp_ring_init(&lane->pack, lane->config.slots, lane->config.slot_bytes, 0);
	if (r < 0)
		return r;
	return kvp_ring_init(&lane->land, lane->config.slots, lane->config.slot_bytes,
			     lane->config.net && lane->config.net->put ? KVP_NET_TAIL_BYTES : 0);
}

static void init_lists(struct kvp_lane *lane)
{
	TAILQ_INIT(&lane->links);
	TAILQ_INIT(&lane->shares);
	TAILQ_INIT(&lane->rx_here);
	TAILQ_INIT(&lane->dirty_rxs);
	TAILQ_INIT(&lane->dirty_txs);
	TAILQ_INIT(&lane->local);
	TAILQ_INIT(&lane->fenced);
	TAILQ_INIT(&lane->rx_free);
	TAILQ_INIT(&lane->tx_free);
	TAILQ_INIT(&lane->gathering);
	TAILQ_INIT(&lane->scattering);
	TAILQ_INIT(&lane->local_free);
	TAILQ_INIT(&lane->local_moving);
	TAILQ_INIT(&lane->leaving_rxs);
	TAILQ_INIT(&lane->leaving_txs);
	TAILQ_INIT(&lane->returning);
	TAILQ_INIT(&lane->registering);
}

static int lane_create(struct kvp_lane **out, const struct kvp_lane_config *config)
{
	KVP_CLEANUP(lane_freep) struct kvp_lane *lane = calloc(1, sizeof(*lane));
	int r;

	if (!lane)
		return -ENOMEM;

	lane->config = *config;
	lane->wake_fd = -1;
	lane->ring_device.dmabuf = -1;
	lane->config.pack = config->pack || config->gpu; /* a transport cannot read a GPU's rows */
	(void)snprintf(lane->device, sizeof(lane->device), "host memory");
	lane->rings.word = "host_lane";
	init_lists(lane);
	kvp_inbox_init(&lane->inbox, kvp_wakefd_wake, &lane->wake_fd);
	if (sem_init(&lane->started, 0, 0) < 0)
		return -errno;
	r = kvp_wakefd_open();
	if (r < 0)
		return r;
	lane->wake_fd = r;
	r = init_memory(lane);
	if (r < 0)
		return r;
	*out = KVP_TAKE(lane);
	return 0;
}

int kvp_lane_start(struct kvp_lane **out, const struct kvp_lane_config *config, char *err,
		   size_t err_bytes)
{
	KVP_CLEANUP(lane_freep) struct kvp_lane *lane = NULL;
	int r = lane_create(&lane, config);

	if (r < 0) {
		const char *section = config->gpu ? "gpu" : "host";

		(void)snprintf(err, err_bytes,
			       "lane %s: %s for two rings of %u slots of %llu bytes (%s.slots, "
			       "%s.slot_bytes)",
			       config->name, strerror(-r), config->slots,
			       (unsigned long long)config->slot_bytes, section, section);
		return r;
	}

	assert(lane);
	r = -pthread_create(&lane->thread, NULL, lane_main, lane);
	if (r < 0) {
		(void)snprintf(err, err_bytes, "lane %s: no thread: %s", config->name,
			       strerror(-r));
		return r;
	}
	while (sem_wait(&lane->started) < 0 && errno == EINTR)
		;
	if (lane->start_result < 0) {
		r = lane->start_result;
		(void)snprintf(err, err_bytes, "lane %s: %s", config->name, lane->start_err);
		(void)pthread_join(lane->thread, NULL); /* it has nothing to wait for */
		return r;
	}
	*out = KVP_TAKE(lane);
	return 0;
}

void kvp_lane_stop(struct kvp_lane *lane)
{
	if (!lane)
		return;

	atomic_store_explicit(&lane->stop, true, memory_order_release);
	kvp_wakefd_wake(&lane->wake_fd);
	(void)pthread_join(lane->thread, NULL); /* our own thread, joined once */
	assert(lane->rxs.n == 0 && lane->txs.n == 0 && lane->pools.n == 0);
	lane_free(lane);
}

void kvp_lane_order(struct kvp_lane *lane, struct kvp_order *order)
{
	kvp_inbox_push(&lane->inbox, &order->node);
}

const void *kvp_lane_address(const struct kvp_lane *lane, uint32_t *bytes)
{
	*bytes = lane->addr_bytes;
	return lane->addr;
}

uint64_t kvp_lane_slot_bytes(const struct kvp_lane *lane)
{
	return lane->config.slot_bytes;
}

const char *kvp_lane_gpu(const struct kvp_lane *lane)
{
	return lane->config.gpu ? lane->config.gpu : "";
}

const char *kvp_lane_device(const struct kvp_lane *lane)
{
	return lane->device;
}

const struct kvp_lane_rings *kvp_lane_rings(const struct kvp_lane *lane)
{
	return &lane->rings;
}

const char *kvp_lane_transport(const struct kvp_lane *lane)
{
	return lane->config.net ? lane->config.net->name : "";
}
