/* SPDX-License-Identifier: Apache-2.0 */

/* Registered memory: rings in slices, and the places in them that peers may write to. */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/net_verbs.h"
#include "proto/util.h"

/* Some devices cannot register 4 GiB at once, and a smaller piece fails with a clearer reason. */
#define SLICE_BYTES (UINT64_C(2) << 30)

uint64_t kvp_vb_random(struct kvp_net *net)
{
	net->rng ^= net->rng << 13;
	net->rng ^= net->rng >> 7;
	net->rng ^= net->rng << 17;
	return net->rng;
}

/* Nobody writes into what is only sent from, and nobody ever reads. */
static int access_of(const struct kvp_net_memory *memory)
{
	return memory->landing ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0;
}

/* Of a device: by its dma-buf, or as the peer memory interface finds it by its address. */
static struct ibv_mr *slice_register(const struct kvp_vb_rail *rail,
				     const struct kvp_net_memory *memory, size_t skip, size_t bytes)
{
	uint8_t *base = (uint8_t *)memory->base + skip;

	if (memory->device && memory->dmabuf >= 0)
		return ibv_reg_dmabuf_mr(rail->pd, memory->dmabuf_offset + skip, bytes,
					 (uintptr_t)base, memory->dmabuf, access_of(memory));
	return ibv_reg_mr(rail->pd, base, bytes, access_of(memory));
}

static int register_on(struct kvp_vb_rail *rail, struct kvp_vb_region *region,
		       const struct kvp_net_memory *memory, char *err, size_t err_bytes)
{
	size_t skip = (size_t)(region->base - (uint8_t *)memory->base);
	int e;

	region->mr[rail->idx] = slice_register(rail, memory, skip, region->bytes);
	if (region->mr[rail->idx])
		return 0;

	e = errno;
	if (e == ENOMEM && kvp_nic_memlock() != UINT64_MAX)
		kvp_nic_memlock_text(rail->nic.device, region->bytes, err, err_bytes);
	else
		(void)snprintf(err, err_bytes, "%s: registering %zu bytes: %s", rail->nic.device,
			       region->bytes, strerror(e));
	return -e;
}

static int slice_add(struct kvp_net *net, const struct kvp_net_memory *memory, size_t skip,
		     size_t bytes, char *err, size_t err_bytes)
{
	struct kvp_vb_region *region = &net->regions[net->n_regions];
	int r = 0;

	if (net->n_regions == KVP_VB_REGIONS) {
		(void)snprintf(err, err_bytes, "more than %u memory regions", KVP_VB_REGIONS);
		return -ENOBUFS;
	}

	*region = (struct kvp_vb_region){
		.base = (uint8_t *)memory->base + skip,
		.bytes = bytes,
		.landing = memory->landing,
		.device = memory->device,
	};
	net->n_regions++; /* what was registered of it is undone at the end */
	for (unsigned i = 0; r == 0 && i < net->n_rails; i++)
		r = register_on(&net->rails[i], region, memory, err, err_bytes);
	return r;
}

int kvp_vb_memory(struct kvp_net *net, const struct kvp_net_memory *memory, char *err,
		  size_t err_bytes)
{
	size_t slots = KVP_MAX(SLICE_BYTES / memory->stride, UINT64_C(1));
	uint64_t bytes = (uint64_t)memory->n * memory->stride * net->n_rails;

	if (memory->stride + KVP_NET_TAIL_BYTES > net->max_msg_bytes) {
		(void)snprintf(
			err, err_bytes,
			"%s moves at most %u bytes at once: slots of %zu bytes are too large",
			net->rails[0].nic.device, net->max_msg_bytes, memory->stride);
		return -EMSGSIZE;
	}
	if (!memory->device) { /* said before anything is half done; each rail counts for itself */
		net->locked_bytes += bytes;
		if (net->locked_bytes > kvp_nic_memlock()) {
			kvp_nic_memlock_text("rings", net->locked_bytes, err, err_bytes);
			return -ENOMEM;
		}
	}
	for (size_t i = 0; i < memory->n; i += slots) {
		size_t n = KVP_MIN(slots, memory->n - i);
		int r = slice_add(net, memory, i * memory->stride, n * memory->stride, err,
				  err_bytes);

		if (r < 0)
			return r;
	}
	return 0;
}

/* Registers the memory and takes that back: whether it works says nobody but the card's driver. */
static int try_register(const struct kvp_vb_rail *rail, const struct kvp_net_memory *memory)
{
	struct ibv_mr *mr =
		slice_register(rail, memory, 0, KVP_MIN(memory->n * memory->stride, SLICE_BYTES));

	return mr ? -ibv_dereg_mr(mr) : -errno;
}

int kvp_vb_device(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		  char *err, size_t err_bytes)
{
	bool dmabuf = memory && memory->dmabuf >= 0;
	unsigned i = 0;
	int r = 0;

	while (memory && r == 0 && i < net->n_rails)
		r = try_register(&net->rails[i++], memory);
	*word = dmabuf ? "dmabuf" : "peermem";
	if (r == 0)
		return 0;
	*word = "not_registered";
	(void)snprintf(err, err_bytes, "%s: registering memory of the device by %s: %s",
		       net->rails[i - 1].nic.device,
		       dmabuf ? "dma-buf" : "its address (peer memory)", strerror(-r));
	return r;
}

const struct kvp_vb_region *kvp_vb_region(const struct kvp_net *net, const void *at, size_t bytes)
{
	for (uint32_t i = 0; i < net->n_regions; i++) {
		const struct kvp_vb_region *region = &net->regions[i];
		size_t skip = (size_t)((const uint8_t *)at - region->base);

		if ((const uint8_t *)at >= region->base && skip < region->bytes &&
		    bytes <= region->bytes - skip)
			return region;
	}
	return NULL;
}

int kvp_vb_expose(struct kvp_net *net, void *place, size_t bytes, struct kvp_net_key *key)
{
	const struct kvp_vb_region *region = kvp_vb_region(net, place, bytes);
	struct kvp_vb_key mine;

	/* The tail is the processor's to read. */
	if (!region || !region->landing ||
	    (!region->device && !kvp_vb_region(net, place, bytes + KVP_NET_TAIL_BYTES)))
		return -EINVAL;
	if (net->n_places == KVP_VB_PLACES)
		return -ENOBUFS;

	mine = (struct kvp_vb_key){
		.addr = (uintptr_t)place,
		.idx = (uint16_t)(net->n_places | (region->device ? KVP_VB_APART : 0)),
		.nonce = (uint16_t)kvp_vb_random(net),
	};
	for (unsigned i = 0; i < net->n_rails; i++)
		mine.rkey[i] = region->mr[i]->rkey;
	net->places[net->n_places++] = (struct kvp_vb_place){
		.base = place,
		.bytes = bytes,
		.nonce = mine.nonce,
		.apart = region->device,
	};
	memcpy(key, &mine, sizeof(*key));
	return 0;
}

void kvp_vb_memory_fini(struct kvp_net *net)
{
	while (net->n_regions > 0) {
		const struct kvp_vb_region *region = &net->regions[--net->n_regions];

		for (unsigned i = 0; i < net->n_rails; i++) {
			if (region->mr[i])
				(void)ibv_dereg_mr(region->mr[i]); /* no queue pair is left */
		}
	}
}
