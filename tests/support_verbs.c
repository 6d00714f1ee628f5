/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_verbs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/util.h"
#include "tests/support_clock.h"
#include "tests/support_events.h"

uint64_t vp_ms(void)
{
	return support_clock_ns() / 1000000;
}

static void *on_message(void *arg, const void *data, size_t hdr_bytes, size_t bytes)
{
	struct vp_node *node = arg;
	struct vp_hdr hdr;

	if (hdr_bytes != sizeof(hdr) || (uintptr_t)data % 16 != 0) {
		node->bad++;
		return NULL;
	}
	memcpy(&hdr, data, sizeof(hdr));
	if (hdr.bytes != bytes || hdr.seq != node->next_seq || hdr.slot >= VP_SLOTS)
		node->bad++;
	node->next_seq = hdr.seq + 1;
	node->messages++;
	node->owed += node->echo;
	vp_echo(node);
	return hdr.refuse ? NULL : node->land + hdr.slot * node->stride + hdr.offset;
}

static void on_data(void *arg, const void *data, size_t hdr_bytes, const void *payload,
		    size_t bytes)
{
	struct vp_node *node = arg;
	struct vp_hdr hdr;

	(void)hdr_bytes;
	memcpy(&hdr, data, sizeof(hdr));
	node->data++;
	if (!events_match(payload, bytes, hdr.seq))
		node->bad++;
}

static void on_lost(void *arg, const void *hdr, size_t hdr_bytes, void *place)
{
	struct vp_node *node = arg;

	(void)hdr;
	(void)hdr_bytes;
	(void)place;
	node->lost++;
}

static void on_sent(void *arg, void *req, int status)
{
	struct vp_node *node = arg;

	(void)req;
	node->told++;
	if (status == 0)
		node->sent_ok++;
	else
		node->sent_bad++;
	if (status != 0 && status != -ECANCELED) /* not of what came behind the failure */
		node->last_status = status;
}

static void on_failed(void *arg, struct kvp_net_ep *ep, int status)
{
	struct vp_node *node = arg;

	node->failed++;
	node->last_status = status;
	if (ep != node->ep || status >= 0)
		node->bad++;
}

static void on_closed(void *arg, void *ep_arg)
{
	struct vp_node *node = arg;

	node->closed++;
	if (ep_arg != node)
		node->bad++;
	node->ep = NULL;
}

uint64_t vp_admitted = UINT64_MAX;

static bool on_admits(void *arg, uint64_t number)
{
	(void)arg;
	return vp_admitted == UINT64_MAX || vp_admitted == number;
}

static const struct kvp_net_events events = {
	.message = on_message,
	.data = on_data,
	.lost = on_lost,
	.sent = on_sent,
	.failed = on_failed,
	.closed = on_closed,
	.admits = on_admits,
};

bool vp_on_device;

static int make_known(struct vp_node *node, char *err, size_t err_bytes)
{
	struct kvp_net_memory memory = {
		.base = node->pack,
		.stride = node->stride,
		.n = VP_SLOTS,
		.device = vp_on_device,
		.dmabuf = vp_on_device ? 0 : -1, /* some descriptor */
		.dmabuf_offset = (uintptr_t)node->pack % 4096,
	};
	int r = kvp_net_verbs.memory(node->net, &memory, err, err_bytes);

	memory.base = node->land;
	memory.dmabuf_offset = (uintptr_t)node->land % 4096;
	memory.landing = true;
	if (r == 0)
		r = kvp_net_verbs.memory(node->net, &memory, err, err_bytes);
	for (uint32_t i = 0; r == 0 && i < VP_SLOTS; i++)
		r = kvp_net_verbs.expose(node->net, node->land + i * node->stride, node->slot_bytes,
					 &node->keys[i]);
	return r;
}

int vp_open(struct vp_node *node, const struct kvp_net_verbs_config *config, size_t slot_bytes,
	    char *err, size_t err_bytes)
{
	const struct kvp_net_config net = { .events = &events, .arg = node, .verbs = config };
	int r;

	*node = (struct vp_node){
		.slot_bytes = slot_bytes,
		.stride = KVP_ALIGN_UP(slot_bytes + KVP_NET_TAIL_BYTES, (size_t)4096),
	};
	node->land = calloc(VP_SLOTS, node->stride);
	node->pack = calloc(VP_SLOTS, node->stride);
	if (!node->land || !node->pack)
		return -ENOMEM;
	r = kvp_net_verbs.open(&node->net, &net, err, err_bytes);
	if (r == 0)
		r = make_known(node, err, err_bytes);
	if (r == 0)
		r = kvp_net_verbs.address(node->net, node->addr, sizeof(node->addr));
	if (r < 0) {
		kvp_net_verbs.close(node->net);
		free(node->land);
		free(node->pack);
		return r;
	}
	node->addr_bytes = (size_t)r;
	return 0;
}

void vp_close(struct vp_node *node)
{
	kvp_net_verbs.close(node->net);
	free(node->land);
	free(node->pack);
}

int vp_connect(struct vp_node *node, const struct vp_node *to)
{
	return kvp_net_verbs.ep_open(node->net, to->addr, to->addr_bytes, 0, node, &node->ep);
}

void vp_echo(struct vp_node *node)
{
	int r = 0;

	while (node->owed > 0 && (r = vp_send(node, node->echoed)) == 0) {
		node->echoed++;
		node->owed--;
	}
	if (r < 0 && r != -EAGAIN)
		node->bad++;
}

bool vp_turn(struct vp_node *a, struct vp_node *b, const uint64_t *counter, uint64_t want,
	     unsigned ms)
{
	uint64_t until = vp_ms() + ms;

	while (*counter < want && vp_ms() < until) {
		(void)kvp_net_verbs.progress(a->net);
		vp_echo(a);
		if (!b)
			continue;
		(void)kvp_net_verbs.progress(b->net);
		vp_echo(b);
	}
	return *counter >= want;
}

void vp_idle(struct vp_node *a, struct vp_node *b, unsigned ms)
{
	uint64_t none = 0;

	(void)vp_turn(a, b, &none, 1, ms);
}

int vp_send(struct vp_node *node, uint64_t seq)
{
	const struct vp_hdr hdr = { .seq = seq };

	return kvp_net_verbs.send(node->net, node->ep, &hdr, sizeof(hdr), NULL, 0, NULL);
}

int vp_put(struct vp_node *node, const struct vp_node *to, uint64_t seq, uint32_t slot,
	   uint32_t offset, size_t bytes, bool whole)
{
	unsigned char *from = node->pack + slot * node->stride + offset;
	const struct vp_hdr hdr = { .seq = seq, .bytes = bytes, .slot = slot, .offset = offset };
	const struct kvp_net_put put = {
		.hdr = &hdr,
		.hdr_bytes = sizeof(hdr),
		.payload = from,
		.bytes = bytes,
		.key = &to->keys[slot],
		.offset = offset,
		.whole = whole,
		.req = node,
	};

	events_fill(from, bytes, seq);
	return kvp_net_verbs.put(node->net, node->ep, &put);
}
