/* SPDX-License-Identifier: Apache-2.0 */

/* What only a lane with a GPU has: the imports of its pools, launches that are over, and what
 * happens when the GPU fails. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "daemon/log.h"
#include "proto/util.h"

/* ---- opening --------------------------------------------------------------------------------- */

int kvp_lane_gpu_open(struct kvp_lane *lane, char *err, size_t err_bytes)
{
	int r;

	kvp_lane_call(lane, "GPU open");
	r = kvp_mover_open(&lane->mover, lane->config.gpu, err, err_bytes);
	kvp_lane_call(lane, NULL);
	if (r < 0)
		return r;
	(void)snprintf(lane->device, sizeof(lane->device), "%s %s", kvp_gpu_name(lane->mover.gpu),
		       kvp_gpu_uuid(lane->mover.gpu)); /* fits */

	lane->local_pool = calloc(KVP_LANE_LOCAL_MOVES, sizeof(*lane->local_pool));
	if (!lane->local_pool) {
		(void)snprintf(err, err_bytes, "no memory");
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < KVP_LANE_LOCAL_MOVES; i++)
		TAILQ_INSERT_TAIL(&lane->local_free, &lane->local_pool[i], link);
	lane->n_local_free = KVP_LANE_LOCAL_MOVES;
	return 0;
}

void kvp_lane_gpu_close(struct kvp_lane *lane)
{
	kvp_lane_call(lane, "GPU close");
	kvp_lane_rings_free(lane);
	free(lane->local_pool);
	lane->local_pool = NULL;
	kvp_mover_close(&lane->mover);
	kvp_lane_call(lane, NULL);
}

/* ---- pools ----------------------------------------------------------------------------------- */

static int import_one(struct kvp_lane *lane, struct kvp_lane_pool *pool, uint32_t i, char *err,
		      size_t err_bytes)
{
	struct kvp_order_pool *order = pool->order;
	const struct kvp_lane_memory *memory = &order->memories[i];
	const struct kvp_gpu_chunks chunks = {
		.fds = order->chunk_fds + memory->first_chunk,
		.bytes = order->chunk_bytes + memory->first_chunk,
		.n = memory->n_chunks,
		.peer = order->home[0],
	};
	const struct kvp_gpu_ipc ipc = {
		.handle = memory->handle,
		.owner = order->owner,
		.offset = memory->offset,
		.bytes = memory->bytes,
		.peer = order->home[0],
	};
	uint64_t addr = 0;
	int r;

	if (memory->vmm)
		r = kvp_gpu_import_vmm(lane->mover.imports, &chunks, &pool->imports[i], &addr, err,
				       err_bytes);
	else
		r = kvp_gpu_import_ipc(lane->mover.imports, &ipc, &pool->imports[i], &addr, err,
				       err_bytes);
	if (r == 0)
		order->fd_maps[i] =
			(uint8_t *)(uintptr_t)(memory->vmm ? addr + memory->offset : addr);
	return r;
}

int kvp_lane_pool_import(struct kvp_lane *lane, struct kvp_lane_pool *pool, char *err,
			 size_t err_bytes)
{
	char why[KVP_BOARD_TEXT - 32] = "";
	int r = 0;

	if (lane->mover.dead) {
		(void)snprintf(err, err_bytes, "the GPU is lost to this daemon");
		return -EIO;
	}
	pool->imports = calloc(pool->order->n_fds, sizeof(*pool->imports));
	if (!pool->imports) {
		(void)snprintf(err, err_bytes, "no memory");
		return -ENOMEM;
	}
	kvp_lane_call(lane, "import of a pool");
	if (pool->order->home[0]) {
		r = kvp_gpu_import_peer(lane->mover.imports, pool->order->home, err, err_bytes);
		if (r < 0 && !err[0])
			(void)snprintf(err, err_bytes, "%s", strerror(-r));
	}
	for (uint32_t i = 0; r == 0 && i < pool->order->n_fds; i++) {
		r = import_one(lane, pool, i, why, sizeof(why));
		if (r < 0)
			(void)snprintf(err, err_bytes, "memories[%u]: %s", i,
				       why[0] ? why : strerror(-r)); /* may be cut */
	}
	kvp_lane_call(lane, NULL);
	return kvp_mover_called(&lane->mover, r);
}

void kvp_lane_pool_unmap(struct kvp_lane *lane, struct kvp_lane_pool *pool)
{
	if (!pool->imports)
		return;

	kvp_lane_call(lane, "unmapping of a pool");
	for (uint32_t i = 0; i < pool->order->n_fds; i++)
		kvp_gpu_import_put(lane->mover.imports, pool->imports[i]);
	kvp_lane_call(lane, NULL);
	free(pool->imports);
	pool->imports = NULL;
}

/* ---- failures -------------------------------------------------------------------------------- */

/* What a room is told; *status fits. */
static const char *failure(const struct kvp_lane *lane, int err, Kvp__Status *status)
{
	*status = err == -E2BIG ? KVP__STATUS__STATUS_LIMIT : KVP__STATUS__STATUS_SYSTEM;
	return err == -E2BIG ? "a piece has more runs of rows than a launch takes: larger pages or "
			       "smaller gpu.slot_bytes help"
			     : kvp_gpu_error(lane->mover.gpu);
}

void kvp_tx_move_failed(struct kvp_tx *tx, int err)
{
	Kvp__Status status;
	const char *why = failure(tx->lane, err, &status);

	kvp_tx_fail(tx, status, "lane %s: %s", tx->lane->config.name, why);
}

void kvp_rx_move_failed(struct kvp_rx *rx, int err)
{
	Kvp__Status status;
	const char *why = failure(rx->lane, err, &status);

	kvp_rx_fail(rx, status, "lane %s: %s", rx->lane->config.name, why);
}

static void fail_all(struct kvp_lane *lane)
{
	for (size_t i = 0; i < (size_t)1 << lane->txs.bits; i++)
		for (struct kvp_table_node *at = lane->txs.buckets[i]; at; at = at->next)
			kvp_tx_move_failed(KVP_CONTAINER_OF(at, struct kvp_tx, node), -EIO);
	for (size_t i = 0; i < (size_t)1 << lane->rxs.bits; i++)
		for (struct kvp_table_node *at = lane->rxs.buckets[i]; at; at = at->next)
			kvp_rx_move_failed(KVP_CONTAINER_OF(at, struct kvp_rx, node), -EIO);
}

/* One end that has something in the launch; false: there is none left. */
static bool fail_one(struct kvp_lane *lane, uint64_t ticket)
{
	struct kvp_local_move *move;
	struct kvp_tx_piece *out;
	struct kvp_rx_piece *in;

	TAILQ_FOREACH (out, &lane->gathering, moving)
		if (out->slot->ticket == ticket) {
			kvp_tx_move_failed(out->leg->tx, -EREMOTEIO);
			return true;
		}
	TAILQ_FOREACH (in, &lane->scattering, queue)
		if (in->slot->ticket == ticket) {
			kvp_rx_move_failed(in->leg->rx, -EREMOTEIO);
			return true;
		}
	TAILQ_FOREACH (move, &lane->local_moving, link)
		if (move->placed && move->ticket == ticket) {
			if (move->piece.leg)
				kvp_rx_move_failed(move->piece.leg->rx, -EREMOTEIO);
			if (move->leg)
				kvp_tx_move_failed(move->leg->tx, -EREMOTEIO);
			move->ticket = 0; /* there is nothing to wait for */
			return true;
		}
	return false;
}

/* A launch did not happen: who was in it fails, and nothing waits for it. */
static void launch_failed(struct kvp_lane *lane, uint64_t ticket)
{
	struct kvp_rx *rx;
	struct kvp_tx *tx;

	while (fail_one(lane, ticket))
		;
	TAILQ_FOREACH (rx, &lane->leaving_rxs, dirty_link)
		rx->ticket = KVP_MIN(rx->ticket, lane->mover.last);
	TAILQ_FOREACH (tx, &lane->leaving_txs, dirty_link)
		tx->ticket = KVP_MIN(tx->ticket, lane->mover.last);
	kvp_ring_failed(&lane->pack, ticket);
	kvp_ring_failed(&lane->land, ticket);
}

static void device_failed(struct kvp_lane *lane)
{
	uint64_t ticket = lane->mover.failed;

	lane->mover.failed = 0;
	kvp_log(KVP_LOG_ERR, "lane %s: %s%s", lane->config.name, kvp_gpu_error(lane->mover.gpu),
		lane->mover.dead ? ": the GPU is lost to this process" : "");
	if (!lane->mover.dead) {
		launch_failed(lane, ticket);
		return;
	}
	fail_all(lane);
	if (lane->config.board)
		(void)kvp_board_fail(lane->config.board, lane->config.loop,
				     KVP__STATUS__STATUS_SYSTEM, "lane %s: %s", lane->config.name,
				     kvp_gpu_error(lane->mover.gpu));
}

/* ---- what is over ---------------------------------------------------------------------------- */

static uint32_t pieces_moved(struct kvp_lane *lane)
{
	const struct kvp_mover *mover = &lane->mover;
	struct kvp_tx_piece *out;
	struct kvp_rx_piece *in;
	uint32_t n = 0;

	while ((out = TAILQ_FIRST(&lane->gathering)) && kvp_mover_over(mover, out->slot->ticket)) {
		TAILQ_REMOVE(&lane->gathering, out, moving);
		out->gathering = false;
		out->leg->tx->n_moving--;
		kvp_tx_gathered(out);
		n++;
	}
	while ((in = TAILQ_FIRST(&lane->scattering)) && kvp_mover_over(mover, in->slot->ticket)) {
		TAILQ_REMOVE(&lane->scattering, in, queue);
		in->leg->rx->n_moving--;
		kvp_rx_landed(in);
		n++;
	}
	return n;
}

static uint32_t leave(struct kvp_lane *lane)
{
	struct kvp_rx *rx;
	struct kvp_tx *tx;
	uint32_t n = 0;

	while ((rx = TAILQ_FIRST(&lane->leaving_rxs)) && kvp_mover_over(&lane->mover, rx->ticket)) {
		TAILQ_REMOVE(&lane->leaving_rxs, rx, dirty_link);
		kvp_rx_leave(rx);
		n++;
	}
	while ((tx = TAILQ_FIRST(&lane->leaving_txs)) && kvp_mover_over(&lane->mover, tx->ticket)) {
		TAILQ_REMOVE(&lane->leaving_txs, tx, dirty_link);
		kvp_tx_leave(tx);
		n++;
	}
	return n;
}

uint32_t kvp_lane_moved(struct kvp_lane *lane)
{
	uint32_t n;

	if (!kvp_lane_on_gpu(lane))
		return 0;

	(void)kvp_mover_poll(&lane->mover); /* what follows looks at everything anyway */
	if (lane->mover.failed)
		device_failed(lane);
	kvp_ring_over(&lane->pack, lane->mover.over);
	kvp_ring_over(&lane->land, lane->mover.over);
	n = pieces_moved(lane) + kvp_local_moved(lane) + leave(lane);
	(void)kvp_local_place(lane); /* else later */
	return n;
}
