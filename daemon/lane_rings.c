/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of the rings of a lane with a GPU: the device's where the transport can send from there
 * and land there, else pinned memory of the host, which any transport can.
 *
 * On the device both rings are one allocation, so that one dma-buf reaches both, and behind them
 * lie zeroes to clean slots with. Engines' bytes (the meta) never go there: the processor reads and
 * writes them, in twins of the slots.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/lane_impl.h"
#include "daemon/log.h"
#include "proto/util.h"

#define SLOTS_MIN 2u

/* Notes where the rings are, or why they are not on the device. */
KVP_PRINTF(3, 4)
static void say(struct kvp_lane *lane, const char *word, const char *fmt, ...)
{
	va_list args;

	lane->rings.word = word;
	va_start(args, fmt);
	(void)vsnprintf(lane->rings.reason, sizeof(lane->rings.reason), fmt, args); /* may be cut */
	va_end(args);
}

static bool puts_into_peer(const struct kvp_lane *lane)
{
	return lane->net && lane->config.net->put;
}

/* Bytes behind each slot that a transport writes itself and the processor reads. */
static uint32_t gap_of(const struct kvp_lane *lane)
{
	return puts_into_peer(lane) ? KVP_NET_TAIL_BYTES : 0;
}

static int init_rings(struct kvp_lane *lane, uint32_t n, uint8_t *base, uint32_t gap)
{
	const uint64_t slot = lane->config.slot_bytes;
	int r = kvp_ring_init_at(&lane->pack, n, slot, 0, base);

	return r < 0 ? r
		     : kvp_ring_init_at(&lane->land, n, slot, gap,
					base + kvp_ring_bytes(n, slot, 0));
}

/* ---- the host's ------------------------------------------------------------------------------ */

/* Both rings in one piece, of as many slots as there is memory for. */
static int host_rings(struct kvp_lane *lane, uint32_t *n)
{
	const uint64_t slot = lane->config.slot_bytes;
	int r = -ENOMEM;

	for (*n = lane->config.slots; r == -ENOMEM && *n >= SLOTS_MIN; *n /= 2) {
		uint64_t bytes =
			kvp_ring_bytes(*n, slot, 0) + kvp_ring_bytes(*n, slot, gap_of(lane));

		r = kvp_gpu_host_alloc(lane->mover.gpu, bytes, &lane->ring_memory);
		if (r == 0)
			return init_rings(lane, *n, lane->ring_memory, gap_of(lane));
	}
	return r;
}

/* ---- the device's ---------------------------------------------------------------------------- */

static int clean_slot(void *arg, struct kvp_slot *slot, uint64_t *ticket)
{
	return kvp_mover_zero(arg, slot->data, slot->dirty, ticket);
}

static uint64_t twin_stride(const struct kvp_lane *lane)
{
	return KVP_ALIGN_UP((uint64_t)KVP_LANE_META_MAX + gap_of(lane), UINT64_C(4096));
}

/* Twins of both rings' slots, and a block of zeroes behind the rings. */
static int make_twins(struct kvp_lane *lane)
{
	const uint64_t stride = twin_stride(lane), all = lane->pack.n * stride;
	const struct kvp_ring_twins none = { .bytes = KVP_LANE_META_MAX,
					     .stride = stride,
					     .clean = clean_slot,
					     .clean_arg = &lane->mover };
	struct kvp_ring_twins twins = none;
	static const uint8_t zeros[KVP_JOBS_ZEROS];
	int r = kvp_gpu_host_alloc(lane->mover.gpu, 2 * all, &lane->ring_memory);

	if (r < 0)
		return r;
	twins.twins = lane->ring_memory;
	kvp_ring_set_twins(&lane->pack, &twins);
	twins.twins = (uint8_t *)lane->ring_memory + all;
	kvp_ring_set_twins(&lane->land, &twins);
	lane->mover.zeros = lane->ring_device.addr + lane->pack.n * lane->pack.stride +
			    lane->land.n * lane->land.stride;
	return kvp_gpu_write(lane->mover.gpu, lane->mover.zeros, zeros, sizeof(zeros));
}

static struct kvp_net_memory ring_memory(const struct kvp_lane *lane, const struct kvp_ring *ring)
{
	struct kvp_net_memory memory = {
		.base = ring->base,
		.stride = ring->stride,
		.n = ring->n,
		.landing = ring == &lane->land,
		.device = lane->rings.device,
		.dmabuf = -1,
	};

	if (memory.device) {
		memory.dmabuf = lane->ring_device.dmabuf;
		memory.dmabuf_offset = (uintptr_t)ring->base - lane->ring_device.addr;
	}
	return memory;
}

static void free_rings(struct kvp_lane *lane)
{
	kvp_ring_fini(&lane->pack);
	kvp_ring_fini(&lane->land);
	if (lane->ring_memory)
		kvp_gpu_host_free(lane->mover.gpu, lane->ring_memory);
	lane->ring_memory = NULL;
	if (lane->ring_device.addr)
		kvp_gpu_ring_free(lane->mover.gpu, &lane->ring_device);
	lane->mover.zeros = 0;
	lane->rings.device = false;
}

/* Asks the transport about both rings. */
static int ask_both(const struct kvp_lane *lane, const char **word, char *why, size_t why_bytes)
{
	const struct kvp_ring *rings[] = { &lane->pack, &lane->land };
	int r = 0;

	for (size_t i = 0; r == 0 && i < KVP_ARRAY_SIZE(rings); i++) {
		const struct kvp_net_memory memory = ring_memory(lane, rings[i]);

		r = lane->config.net->device(lane->net, &memory, word, why, why_bytes);
	}
	return r;
}

static int ask_transport(struct kvp_lane *lane)
{
	struct kvp_gpu_ring *ring = &lane->ring_device;
	const char *word = "";
	char why[160] = "";
	int r = ask_both(lane, &word, why, sizeof(why));

	/* A card's driver that takes no dma-buf may find the memory by its address. */
	if (r < 0 && puts_into_peer(lane) && ring->dmabuf >= 0) {
		(void)snprintf(ring->dmabuf_reason, sizeof(ring->dmabuf_reason), "%s", why);
		kvp_closep(&ring->dmabuf);
		ring->dmabuf = -1;
		r = ask_both(lane, &word, why, sizeof(why));
	}
	if (r == 0)
		say(lane, word, "the transport takes %s memory of the device",
		    ring->vmm ? "virtual" : "plain");
	else if (puts_into_peer(lane) && ring->dmabuf_reason[0])
		say(lane, word, "%s; before that: %s", why, ring->dmabuf_reason);
	else
		say(lane, word, "%s", why);
	return r;
}

/* Rings on the device, of as many slots as it has memory for, if the transport takes them. */
static int try_device(struct kvp_lane *lane, bool vmm, uint32_t *n)
{
	const uint64_t slot = lane->config.slot_bytes;
	int r = -ENOMEM;

	for (*n = lane->config.slots; *n >= SLOTS_MIN; *n /= 2) {
		r = kvp_gpu_ring_alloc(lane->mover.gpu, vmm,
				       2 * kvp_ring_bytes(*n, slot, 0) + KVP_JOBS_ZEROS,
				       &lane->ring_device);
		if (r != -ENOMEM)
			break;
	}
	if (r < 0) {
		say(lane, r == -ENOMEM ? "no_memory" : "no_allocation", "%s",
		    kvp_gpu_error(lane->mover.gpu));
		return r;
	}
	lane->rings.device = true;
	r = init_rings(lane, *n, (uint8_t *)(uintptr_t)lane->ring_device.addr, 0);
	if (r == 0)
		r = make_twins(lane);
	if (r < 0)
		say(lane, "no_memory", "%s", strerror(-r));
	if (r == 0 && lane->net)
		r = ask_transport(lane);
	else if (r == 0)
		say(lane, "no_transport", "pack.memory is device, and nothing is sent");
	if (r < 0)
		free_rings(lane);
	return r;
}

/* Would the transport take any? */
static bool net_takes_device(struct kvp_lane *lane)
{
	const char *word = "transport";
	char why[160] = "it sends the host's memory only";

	if (lane->config.net->device &&
	    lane->config.net->device(lane->net, NULL, &word, why, sizeof(why)) == 0)
		return true;
	say(lane, word, "%s", why);
	return false;
}

/* False: there is no reason even to try; it is noted. */
static bool may_be_device(struct kvp_lane *lane)
{
	const struct kvp_gpu_traits *traits = kvp_gpu_traits(lane->mover.gpu);
	bool needed = puts_into_peer(lane) && traits->ordering < KVP_GPU_ORDERED;

	lane->rings.flush = needed || lane->config.flush == KVP_FLUSH_ALWAYS;
	if (lane->config.memory == KVP_RINGS_HOST)
		say(lane, "configured", "pack.memory is host");
	else if (!lane->net && lane->config.memory == KVP_RINGS_AUTO)
		say(lane, "no_transport", "nothing is sent: there are no peers");
	else if (lane->net && !net_takes_device(lane))
		; /* it has said why */
	else if (lane->rings.flush && !traits->can_flush)
		say(lane, "no_flush",
		    needed ? "the device does not see what a NIC writes, and cannot be told to"
			   : "gpu.flush is always, and the device cannot be told to");
	else
		return true;
	lane->rings.flush = false;
	return false;
}

static int device_rings(struct kvp_lane *lane, uint32_t *n)
{
	const struct kvp_gpu_traits *traits = kvp_gpu_traits(lane->mover.gpu);
	/* NICs reach virtual memory by dma-bufs only; plain memory also by the older interface. */
	bool vmm = traits->vmm && traits->vmm_rdma;
	int r;

	if (!may_be_device(lane))
		return -EOPNOTSUPP;
	r = try_device(lane, vmm, n);
	if (r == -ENOMEM || r == 0 || !vmm || !puts_into_peer(lane))
		return r;
	return try_device(lane, false, n);
}

/* ---- both ------------------------------------------------------------------------------------ */

int kvp_lane_rings_make(struct kvp_lane *lane, char *err, size_t err_bytes)
{
	const struct kvp_lane_config *config = &lane->config;
	uint32_t n = 0;
	int r;

	kvp_lane_call(lane, "GPU rings");
	r = device_rings(lane, &n);
	if (r < 0 && config->memory == KVP_RINGS_DEVICE) {
		(void)snprintf(err, err_bytes, "pack.memory is device: %s", lane->rings.reason);
	} else if (r < 0) {
		lane->rings.flush = false;
		r = host_rings(lane, &n);
		if (r < 0)
			(void)snprintf(err, err_bytes, "rings of %u slots of %llu bytes: %s",
				       SLOTS_MIN, (unsigned long long)config->slot_bytes,
				       kvp_gpu_error(lane->mover.gpu));
	}
	kvp_lane_call(lane, NULL);
	if (r == 0 && n < config->slots)
		kvp_log(KVP_LOG_WARNING, "lane %s: rings of %u slots in the place of %u: no memory",
			config->name, n, config->slots);
	return r;
}

void kvp_lane_rings_free(struct kvp_lane *lane)
{
	if (lane->mover.gpu && !lane->mover.dead)
		(void)kvp_gpu_drain(lane->mover.gpu); /* logged */
	free_rings(lane);
}

static int expose(struct kvp_lane *lane, uint8_t *place, uint64_t bytes, struct kvp_net_key *key)
{
	return lane->config.net->expose(lane->net, place, bytes, key);
}

static int tell_twins(struct kvp_lane *lane, char *err, size_t err_bytes)
{
	const struct kvp_ring *rings[] = { &lane->pack, &lane->land };
	int r = 0;

	for (size_t i = 0; r == 0 && i < KVP_ARRAY_SIZE(rings); i++) {
		const struct kvp_net_memory memory = {
			.base = rings[i]->twins,
			.stride = rings[i]->twin_stride,
			.n = rings[i]->n,
			.landing = i == 1,
			.dmabuf = -1,
		};

		r = lane->config.net->memory(lane->net, &memory, err, err_bytes);
	}
	for (uint32_t i = 0; r == 0 && i < lane->land.n; i++)
		r = expose(lane, lane->land.slots[i].twin, lane->land.twin_bytes,
			   &lane->land_keys[lane->config.slots + i]);
	return r;
}

int kvp_lane_rings_tell(struct kvp_lane *lane, char *err, size_t err_bytes)
{
	const struct kvp_net_ops *net = lane->config.net;
	const struct kvp_net_memory pack = ring_memory(lane, &lane->pack);
	const struct kvp_net_memory land = ring_memory(lane, &lane->land);
	int r;

	kvp_lane_call(lane, "registration of the rings");
	r = net->memory(lane->net, &pack, err, err_bytes);
	if (r == 0)
		r = net->memory(lane->net, &land, err, err_bytes);
	for (uint32_t i = 0; r == 0 && i < lane->land.n; i++)
		r = expose(lane, lane->land.slots[i].data, lane->land.slot_bytes,
			   &lane->land_keys[i]);
	if (r == 0 && lane->land.twins)
		r = tell_twins(lane, err, err_bytes);
	kvp_lane_call(lane, NULL);
	return r;
}
