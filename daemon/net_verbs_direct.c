/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Direct mode: memory of clients, windows through which peers may write into a part of it, and the
 * writes.
 *
 * Memory is registered without any remote right. What a peer gets is the key of a memory window of
 * each rail's device (type 1: over whichever connection it comes), which is bound for one grant.
 * Unbinding it is the device's word that nothing is written through it any more. A queue pair that
 * is connected to itself carries these requests, so that they do not depend on any peer. A dma-buf
 * cannot be bound to windows: there each grant is a registration of its own, and its end takes the
 * grant back.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/net_verbs.h"
#include "proto/util.h"

static struct kvp_log_limit log_limit = KVP_LOG_LIMIT(10, 10);

/* Registrations of one grant: each may get the number of one that was taken back. */
#define KEY_TRIES 8u

static int errno_or(int other)
{
	return errno ? -errno : other;
}

/* ---- the queue pairs that bind */

void kvp_vb_direct_init(struct kvp_net *net)
{
	TAILQ_INIT(&net->windows);
	TAILQ_INIT(&net->idle_windows);
	net->n_windows_max = KVP_VB_WINDOWS;
}

static int binder_connect(const struct kvp_vb_rail *rail, struct ibv_qp *qp)
{
	const struct kvp_net_verbs_config *config = &rail->net->config;
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = config->pkey_index,
		.port_num = rail->nic.port,
	};
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = rail->nic.mtu,
		.dest_qp_num = qp->qp_num,
		.min_rnr_timer = config->rnr_timer,
		.ah_attr = kvp_vb_way(rail, &rail->net->address.ends[rail->idx]),
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = config->timeout,
		.retry_cnt = config->retry_count,
	};
	int r = ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);

	if (r == 0)
		r = ibv_modify_qp(qp, &rtr,
				  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
					  IBV_QP_MIN_RNR_TIMER);
	if (r == 0)
		r = ibv_modify_qp(qp, &rts,
				  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					  IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					  IBV_QP_MAX_QP_RD_ATOMIC);
	return -r;
}

static void binder_close(struct kvp_vb_binder *binder)
{
	if (binder->qp)
		(void)ibv_destroy_qp(binder->qp);
	if (binder->cq)
		(void)ibv_destroy_cq(binder->cq); /* with what it may still say */
	*binder = (struct kvp_vb_binder){ 0 };
}

static int binder_open(struct kvp_vb_rail *rail)
{
	struct kvp_vb_binder *binder = &rail->binder;
	struct ibv_qp_init_attr init = {
		.cap = { KVP_VB_BIND_DEPTH, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	int r;

	if (binder->qp)
		return 0;
	binder->cq = ibv_create_cq(rail->context, (int)KVP_VB_BIND_DEPTH, NULL, NULL, 0);
	if (!binder->cq)
		return errno_or(-ENOMEM);
	init.send_cq = init.recv_cq = binder->cq;
	binder->qp = ibv_create_qp(rail->pd, &init);
	r = binder->qp ? binder_connect(rail, binder->qp) : errno_or(-ENOMEM);
	if (r < 0)
		binder_close(binder);
	return r;
}

static void take_back(struct kvp_vb_rail *rail, uint32_t key)
{
	rail->old_keys[rail->n_old_keys++ % KVP_VB_OLD_KEYS] = key;
}

static void window_lose(struct kvp_net *net, struct kvp_net_window *window)
{
	/* Calls that return when it is so: no write goes through from here on. */
	for (unsigned i = 0; i < KVP_VB_RAILS; i++) {
		if (window->mw[i]) {
			take_back(&net->rails[i], window->mw[i]->rkey);
			(void)ibv_dealloc_mw(window->mw[i]);
		}
		if (window->mr[i]) {
			take_back(&net->rails[i], window->mr[i]->rkey);
			(void)ibv_dereg_mr(window->mr[i]);
		}
		window->mw[i] = NULL;
		window->mr[i] = NULL;
	}
	window->state = KVP_VB_WINDOW_LOST;
}

/* A rail has answered, or never will. */
static void window_answered(struct kvp_net *net, struct kvp_net_window *window, unsigned rail,
			    bool well)
{
	window->pending &= ~(1u << rail);
	window->failed = window->failed || !well;
	if (window->pending)
		return;
	if (window->failed)
		window_lose(net, window);
	else
		window->state = window->state == KVP_VB_WINDOW_BINDING ? KVP_VB_WINDOW_BOUND
								       : KVP_VB_WINDOW_IDLE;
}

/* The device refuses requests: those that it has taken may have happened or not. */
static void binder_lost(struct kvp_vb_rail *rail)
{
	struct kvp_net_window *window;

	binder_close(&rail->binder);
	TAILQ_FOREACH (window, &rail->net->windows, link) {
		if (window->pending & 1u << rail->idx)
			window_answered(rail->net, window, rail->idx, false);
	}
}

static void binder_answered(struct kvp_vb_rail *rail, const struct ibv_wc *wc)
{
	struct kvp_vb_binder *binder = &rail->binder;

	if (wc->status != IBV_WC_SUCCESS) {
		kvp_log_limited(&log_limit, KVP_LOG_WARNING,
				"verbs %s: binding a memory window: %s", rail->nic.device,
				ibv_wc_status_str(wc->status));
		binder_lost(rail);
		return;
	}
	binder->n_pending--;
	binder->moved_ns = rail->net->now_ns;
	binder->looks = 0;
	window_answered(rail->net, (struct kvp_net_window *)(uintptr_t)wc->wr_id, rail->idx, true);
}

/* Nothing was in the queue. What is not answered now will not be, and a room would wait for it. */
static bool binder_silent(struct kvp_vb_rail *rail)
{
	struct kvp_vb_binder *binder = &rail->binder;

	binder->looks++;
	return binder->looks >= KVP_VB_DRAIN_LOOKS &&
	       rail->net->now_ns - binder->moved_ns >= KVP_VB_DRAIN_NS;
}

static int binder_turn(struct kvp_vb_rail *rail)
{
	const struct kvp_vb_binder *binder = &rail->binder;
	struct ibv_wc wc;
	int n = 0, got = 0;

	while (binder->n_pending > 0 && (got = ibv_poll_cq(binder->cq, 1, &wc)) > 0) {
		binder_answered(rail, &wc);
		n++;
	}
	if (binder->n_pending == 0)
		return n;
	if (!rail->dead) {
		if (got == 0 && !binder_silent(rail))
			return n;
		kvp_log_limited(&log_limit, KVP_LOG_WARNING,
				"verbs %s: binding a memory window: %s", rail->nic.device,
				got < 0 ? "the queue of answers fails" : "no answer");
	}
	binder_lost(rail);
	return n + 1;
}

int kvp_vb_direct_turn(struct kvp_net *net)
{
	int n = 0;

	for (unsigned i = 0; i < net->n_rails; i++)
		n += binder_turn(&net->rails[i]);
	return n;
}

bool kvp_vb_direct_busy(const struct kvp_net *net)
{
	for (unsigned i = 0; i < net->n_rails; i++)
		if (net->rails[i].binder.n_pending > 0)
			return true;
	return false;
}

/* ---- regions */

static int rail_register(struct kvp_vb_rail *rail, struct kvp_net_region *region, char *err,
			 size_t err_bytes)
{
	struct ibv_device_attr attr;
	int r = -ibv_query_device(rail->context, &attr);

	if (r == 0 && (!(attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW) || attr.max_mw <= 0))
		r = -EOPNOTSUPP;
	if (r == 0) {
		rail->net->n_windows_max = KVP_MIN(rail->net->n_windows_max, (uint32_t)attr.max_mw);
		r = rail->nic.down ? 0 : binder_open(rail); /* it needs an address */
	}
	if (r < 0) {
		(void)snprintf(err, err_bytes, "%s has no memory windows: %s", rail->nic.device,
			       strerror(-r));
		return r;
	}
	region->mr[rail->idx] = ibv_reg_mr(rail->pd, (void *)(uintptr_t)region->addr, region->bytes,
					   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	if (region->mr[rail->idx])
		return 0;

	r = errno_or(-EIO);
	if (r == -ENOMEM && kvp_nic_memlock() != UINT64_MAX)
		kvp_nic_memlock_text("a pool", region->bytes, err, err_bytes);
	else
		(void)snprintf(err, err_bytes, "%s: registering %zu bytes of a pool: %s",
			       rail->nic.device, region->bytes, strerror(-r));
	return r;
}

static struct ibv_mr *dmabuf_register(const struct kvp_vb_rail *rail,
				      const struct kvp_net_region *region, int access)
{
	return ibv_reg_dmabuf_mr(rail->pd, region->dmabuf_offset, region->bytes, region->addr,
				 region->dmabuf_fd, access);
}

/* Whether the device takes it at all is tried now, without any remote right. */
static int rail_try(const struct kvp_vb_rail *rail, const struct kvp_net_region *region, char *err,
		    size_t err_bytes)
{
	struct ibv_mr *mr = dmabuf_register(rail, region, IBV_ACCESS_LOCAL_WRITE);

	if (!mr) {
		int r = errno_or(-EIO);

		(void)snprintf(err, err_bytes, "%s: registering %zu bytes of a dma-buf: %s",
			       rail->nic.device, region->bytes, strerror(-r));
		return r;
	}
	(void)ibv_dereg_mr(mr); /* nobody has had its key */
	return 0;
}

/* A rail whose device is gone gets no key. */
static int region_tell(struct kvp_net *net, struct kvp_net_region *region, char *err,
		       size_t err_bytes)
{
	int r = -ENODEV;

	for (unsigned i = 0; i < net->n_rails; i++) {
		struct kvp_vb_rail *rail = &net->rails[i];

		if (rail->dead)
			continue;
		if (region->dmabuf_fd >= 0)
			r = rail_try(rail, region, err, err_bytes);
		else
			r = rail_register(rail, region, err, err_bytes);
		if (r < 0)
			return r;
	}
	return r;
}

int kvp_vb_region_add(struct kvp_net *net, const struct kvp_net_span *span,
		      struct kvp_net_region **out, char *err, size_t err_bytes)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	struct kvp_net_region *region;
	int r = 0;

	if (span->bytes == 0 || span->bytes > UINT32_MAX)
		return -EINVAL;
	region = calloc(1, sizeof(*region));
	if (!region) {
		(void)snprintf(err, err_bytes, "no memory");
		return -ENOMEM;
	}

	region->addr = (uintptr_t)span->base;
	region->bytes = span->bytes;
	region->dmabuf_fd = -1;
	if (span->dmabuf_fd >= 0) {
		/* Both have to begin at the same byte of a page. Peers name any address that we
		 * choose: ours need not be so, since an allocation of another process is not at the
		 * same place of a page here. */
		region->addr -= (region->addr - span->dmabuf_offset) % page;
		region->dmabuf_offset = span->dmabuf_offset;
		region->dmabuf_fd = fcntl(span->dmabuf_fd, F_DUPFD_CLOEXEC, 0);
		r = region->dmabuf_fd < 0 ? -errno : 0;
	}
	if (r == 0)
		r = region_tell(net, region, err, err_bytes);
	if (r < 0) {
		kvp_vb_region_remove(net, region);
		return r;
	}
	*out = region;
	return 0;
}

void kvp_vb_region_remove(struct kvp_net *net, struct kvp_net_region *region)
{
	(void)net;
	for (unsigned i = 0; i < KVP_VB_RAILS; i++)
		if (region->mr[i])
			(void)ibv_dereg_mr(region->mr[i]); /* no window is bound to it */
	kvp_closep(&region->dmabuf_fd);
	free(region);
}

/* ---- windows */

static struct kvp_net_window *window_take(struct kvp_net *net)
{
	struct kvp_net_window *window = TAILQ_FIRST(&net->idle_windows);

	if (window) {
		TAILQ_REMOVE(&net->idle_windows, window, link);
	} else {
		if (net->n_windows >= net->n_windows_max)
			return NULL;
		window = calloc(1, sizeof(*window));
		if (!window)
			return NULL;
		net->n_windows++;
	}
	window->failed = false;
	TAILQ_INSERT_TAIL(&net->windows, window, link);
	return window;
}

/* Nobody can write through it, and nothing of it is at the card. */
static void window_put(struct kvp_net *net, struct kvp_net_window *window)
{
	window->state = KVP_VB_WINDOW_IDLE;
	window->region = NULL;
	TAILQ_REMOVE(&net->windows, window, link);
	TAILQ_INSERT_HEAD(&net->idle_windows, window, link);
}

/* Taken back; `apart` are the bits in which keys of one and the same may differ. */
static bool is_old_key(const struct kvp_vb_rail *rail, uint32_t key, uint32_t apart)
{
	for (unsigned i = 0; i < KVP_MIN(rail->n_old_keys, KVP_VB_OLD_KEYS); i++) {
		if (((rail->old_keys[i] ^ key) & ~apart) == 0)
			return true;
	}
	return false;
}

/* Each binding changes the low byte of a window's key, so one with the number of one that was lost
 * would come by all of its keys. Such a one is kept until there is another. */
static int window_anew(const struct kvp_vb_rail *rail, struct ibv_mw **out)
{
	struct ibv_mw *mw = NULL, *old[KEY_TRIES];
	unsigned n = 0;

	while (n < KEY_TRIES) {
		mw = ibv_alloc_mw(rail->pd, IBV_MW_TYPE_1);
		if (!mw || !is_old_key(rail, mw->rkey, 0xff))
			break;
		old[n++] = mw;
		mw = NULL;
		errno = EADDRINUSE; /* if this was the last try */
	}
	while (n > 0) {
		int saved = errno;

		(void)ibv_dealloc_mw(old[--n]); /* it was never bound */
		errno = saved;
	}
	if (!mw)
		return errno_or(-EIO);
	*out = mw;
	return 0;
}

/* Binds it on one rail to so many bytes of its region; 0 bytes: takes it back. */
static int rail_bind(struct kvp_vb_rail *rail, struct kvp_net_window *window, size_t bytes)
{
	struct ibv_mw_bind bind = {
		.wr_id = (uintptr_t)window,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = {
			.mr = window->region->mr[rail->idx],
			.addr = window->region->addr,
			.length = bytes,
			.mw_access_flags = bytes ? IBV_ACCESS_REMOTE_WRITE : 0,
		},
	};
	int r = binder_open(rail);

	if (r == 0 && !window->mw[rail->idx])
		r = window_anew(rail, &window->mw[rail->idx]);
	if (r == 0)
		r = -abs(ibv_bind_mw(rail->binder.qp, window->mw[rail->idx], &bind));
	if (r < 0)
		return r;

	if (rail->binder.n_pending++ == 0) {
		rail->binder.moved_ns = rail->net->now_ns;
		rail->binder.looks = 0;
	}
	window->pending |= 1u << rail->idx;
	return 0;
}

static bool binders_full(const struct kvp_net *net)
{
	for (unsigned i = 0; i < net->n_rails; i++)
		if (net->rails[i].binder.n_pending == KVP_VB_BIND_DEPTH)
			return true;
	return false;
}

/* On all rails. A failure shows when those that have taken it have answered. */
static int window_bind(struct kvp_net *net, struct kvp_net_window *window, bool on)
{
	int r = -ENODEV;

	if (binders_full(net))
		return -EAGAIN;
	for (unsigned i = 0; i < net->n_rails; i++) {
		struct kvp_vb_rail *rail = &net->rails[i];

		if (!window->region->mr[i] || ((rail->dead || rail->nic.down) && on) ||
		    (!on && !window->mw[i]))
			continue;
		r = rail_bind(rail, window, on ? window->region->bytes : 0);
		if (r < 0) {
			window->failed = true;
			break;
		}
	}
	if (!window->pending) {
		window_lose(net, window);
		return r < 0 ? r : -EIO;
	}
	window->state = on ? KVP_VB_WINDOW_BINDING : KVP_VB_WINDOW_UNBINDING;
	return 0;
}

/* Devices give a number again that has become free, and a write with the key of a grant that was
 * taken back may still be on its way: such a registration is kept until there is another. */
static struct ibv_mr *register_anew(const struct kvp_vb_rail *rail,
				    const struct kvp_net_region *region)
{
	struct ibv_mr *mr = NULL, *old[KEY_TRIES];
	unsigned n = 0;

	while (n < KEY_TRIES) {
		mr = dmabuf_register(rail, region,
				     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		if (!mr || !is_old_key(rail, mr->rkey, 0))
			break;
		old[n++] = mr;
		mr = NULL;
		errno = EADDRINUSE; /* if this was the last try */
	}
	while (n > 0) {
		int saved = errno;

		(void)ibv_dereg_mr(old[--n]); /* nobody has been told its key again */
		errno = saved;
	}
	return mr;
}

/* Of a dma-buf: remote write, for as long as the grant lasts. */
static int window_register(struct kvp_net *net, struct kvp_net_window *window)
{
	for (unsigned i = 0; i < net->n_rails; i++) {
		if (net->rails[i].dead)
			continue;
		window->mr[i] = register_anew(&net->rails[i], window->region);
		if (!window->mr[i]) {
			int r = errno_or(-EIO);

			window_lose(net, window);
			return r == -EAGAIN ? -ENOMEM : r;
		}
	}
	window->state = KVP_VB_WINDOW_BOUND;
	return 0;
}

int kvp_vb_window_open(struct kvp_net *net, struct kvp_net_region *region,
		       struct kvp_net_window **out)
{
	struct kvp_net_window *window = window_take(net);
	int r;

	if (!window)
		return -ENOBUFS;

	window->region = region;
	r = region->dmabuf_fd >= 0 ? window_register(net, window) : window_bind(net, window, true);
	if (r < 0) {
		window_put(net, window);
		return r;
	}
	*out = window;
	return 0;
}

int kvp_vb_window_key(struct kvp_net *net, const struct kvp_net_window *window,
		      struct kvp_net_key *key)
{
	struct kvp_vb_key mine = { .addr = window->region->addr };

	if (window->state != KVP_VB_WINDOW_BOUND)
		return window->state == KVP_VB_WINDOW_BINDING ? -EAGAIN : -EIO;

	for (unsigned i = 0; i < net->n_rails; i++) {
		if (window->mr[i])
			mine.rkey[i] = window->mr[i]->rkey;
		else if (window->mw[i])
			mine.rkey[i] = window->mw[i]->rkey;
	}
	memcpy(key, &mine, sizeof(*key));
	return 0;
}

int kvp_vb_window_close(struct kvp_net *net, struct kvp_net_window *window)
{
	switch (window->state) {
	case KVP_VB_WINDOW_BOUND:
		if (window->region->dmabuf_fd >= 0) {
			window_lose(net, window);
			break;
		}
		if (window_bind(net, window, false) == -EAGAIN ||
		    window->state == KVP_VB_WINDOW_UNBINDING)
			return -EAGAIN;
		break;
	case KVP_VB_WINDOW_BINDING:
	case KVP_VB_WINDOW_UNBINDING:
		return -EAGAIN;
	default:
		break;
	}
	window_put(net, window);
	return 0;
}

static void free_windows(struct kvp_net *net, struct kvp_vb_windows *list)
{
	struct kvp_net_window *window;

	while ((window = TAILQ_FIRST(list))) {
		TAILQ_REMOVE(list, window, link);
		window_lose(net, window);
		free(window);
	}
}

void kvp_vb_direct_fini(struct kvp_net *net)
{
	for (unsigned i = 0; i < net->n_rails; i++)
		binder_lost(&net->rails[i]);
	free_windows(net, &net->windows);
	free_windows(net, &net->idle_windows);
}

/* ---- writes */

uint32_t kvp_vb_write_max(struct kvp_net *net)
{
	return KVP_MIN(KVP_NET_RUNS_MAX, net->config.depth / 2);
}

static int check_runs(const struct kvp_net *net, const struct kvp_net_write *write)
{
	if (write->n == 0 || write->n > KVP_NET_RUNS_MAX || !write->req || write->hdr_bytes == 0 ||
	    write->hdr_bytes > KVP_NET_HDR_MAX)
		return -EINVAL;

	for (uint32_t i = 0; i < write->n; i++) {
		const struct kvp_net_run *run = &write->runs[i];

		if (run->bytes == 0 || run->bytes > net->max_msg_bytes)
			return -EMSGSIZE;
		if (!kvp_vb_region(net, run->from, run->bytes))
			return -EFAULT;
	}
	return 0;
}

/* Kept until it is over: another rail may have to write it again. */
static void fill_runs(struct kvp_vb_item *item, const struct kvp_net_write *write)
{
	for (uint32_t i = 0; i < write->n; i++) {
		const struct kvp_net_run *run = &write->runs[i];
		struct kvp_vb_run *mine = &item->runs[i];
		struct kvp_vb_key key;

		memcpy(&key, run->key, sizeof(key));
		mine->from = run->from;
		mine->remote = key.addr + run->offset;
		mine->bytes = run->bytes;
		memcpy(mine->rkey, key.rkey, sizeof(mine->rkey));
		item->bytes += run->bytes;
	}
	item->n_runs = write->n;
}

int kvp_vb_write(struct kvp_net *net, struct kvp_net_ep *ep, const struct kvp_net_write *write)
{
	struct kvp_vb_item *item = NULL;
	int r = check_runs(net, write);

	if (r == 0)
		r = kvp_vb_item_begin(ep, write, &item);
	if (r < 0 || !item)
		return r;

	ep->spread = true;
	fill_runs(item, write);
	return kvp_vb_item_send(item);
}

/* No device gives out key 0: that rail was not there when the window was bound. */
uint32_t kvp_vb_run_ends(const struct kvp_vb_item *item)
{
	uint32_t ends = UINT32_MAX;

	for (uint32_t i = 0; i < item->n_runs; i++) {
		for (unsigned k = 0; k < KVP_VB_RAILS; k++) {
			if (item->runs[i].rkey[k] == 0)
				ends &= ~(1u << k);
		}
	}
	return ends;
}

int kvp_vb_post_runs(struct kvp_vb_conn *conn, const struct kvp_vb_item *item)
{
	unsigned end = conn->ep->paths[conn->path].end;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < item->n_runs; i++) {
		const struct kvp_vb_run *run = &item->runs[i];
		const struct kvp_vb_region *from = kvp_vb_region(conn->net, run->from, run->bytes);
		const struct kvp_qp_request request = {
			.opcode = IBV_WR_RDMA_WRITE,
			.n_sge = 1,
			.sge[0] = { (uintptr_t)run->from, run->bytes,
				    from->mr[conn->rail->idx]->lkey },
			.remote = run->remote,
			.rkey = run->rkey[end],
		};

		r = kvp_qp_add(&conn->qp, &request);
	}
	return r;
}
