/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_old.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_events.h"
#include "tests/support_faults.h"

/* As 1.0 had them. */
static const size_t msg_bytes[] = {
	[KVP_WIRE_WANT] = 152,  [KVP_WIRE_GRANT] = OLD_GRANT_BYTES,
	[KVP_WIRE_DATA] = 40,   [KVP_WIRE_LANDED] = 16,
	[KVP_WIRE_RETURN] = 24, [KVP_WIRE_REFUSE] = 24,
};

static void *on_message(void *arg, const void *hdr, size_t hdr_bytes, size_t bytes)
{
	struct old_lane *lane = arg;
	const struct kvp_wire_head *head = hdr;

	if (head->magic != KVP_WIRE_MAGIC || head->type >= KVP_ARRAY_SIZE(msg_bytes) ||
	    msg_bytes[head->type] != hdr_bytes) {
		lane->n_strange++;
		return NULL;
	}
	if (head->type == KVP_WIRE_DATA) {
		free(lane->payload);
		lane->payload = malloc(bytes);
		lane->payload_bytes = bytes;
		RIG_REQUIRE(lane->payload);
		return lane->payload;
	}
	/* What comes with a want may be ignored. */
	memcpy(&lane->got, hdr, hdr_bytes);
	lane->n_got++;
	return NULL;
}

static void on_data(void *arg, const void *hdr, size_t hdr_bytes, const void *data, size_t bytes)
{
	struct old_lane *lane = arg;

	(void)hdr;
	(void)hdr_bytes;
	if (data != lane->payload)
		memcpy(lane->payload, data, bytes);
	lane->n_payloads++;
}

static void on_sent(void *arg, void *req, int status)
{
	(void)req;
	RIG_REQUIRE(status == 0, "a payload: %s", strerror(-status));
	((struct old_lane *)arg)->n_sent++;
}

static const struct kvp_net_events events = { on_message, on_data,          events_no_lost,
					      on_sent,    events_no_failed, events_no_closed,
					      NULL };

static void progress_until(struct old_lane *lane, const uint32_t *count, const char *what)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);

	while (*count == 0) {
		RIG_REQUIRE(rig_now_ns() < until, "no %s; %u messages that 1.0 does not know", what,
			    lane->n_strange);
		if (kvp_net_ucx.progress(lane->net) == 0)
			rig_sleep_ms(1); /* and looks again */
	}
}

void old_lane_open(struct old_lane *lane)
{
	struct kvp_net_config config = { .events = &events, .arg = lane, .interface = "lo" };
	char err[256] = "";
	int n;

	memset(lane, 0, sizeof(*lane));
	RIG_REQUIRE(kvp_net_ucx.open(&lane->net, &config, err, sizeof(err)) == 0, "%s", err);
	n = kvp_net_ucx.address(lane->net, lane->address, sizeof(lane->address));
	RIG_REQUIRE(n > 0);
	lane->address_bytes = (uint32_t)n;
}

void old_lane_connect(struct old_lane *lane, const void *address, size_t bytes)
{
	RIG_REQUIRE(kvp_net_ucx.ep_open(lane->net, address, bytes, 0, NULL, &lane->ep) == 0);
}

void old_lane_close(struct old_lane *lane)
{
	kvp_net_ucx.close(lane->net);
	free(lane->payload);
}

union kvp_wire_msg old_lane_hear(struct old_lane *lane, enum kvp_wire_type type)
{
	progress_until(lane, &lane->n_got, "message of the lane");
	RIG_REQUIRE(lane->n_got == 1 && lane->got.head.type == type, "message %u, not %u",
		    lane->got.head.type, type);
	lane->n_got = 0;
	return lane->got;
}

void old_lane_land(struct old_lane *lane)
{
	progress_until(lane, &lane->n_payloads, "payload");
	RIG_REQUIRE(lane->n_payloads == 1);
	lane->n_payloads = 0;
}

void old_lane_say(struct old_lane *lane, const void *hdr, size_t hdr_bytes, const void *payload,
		  size_t bytes)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	int r;

	while ((r = kvp_net_ucx.send(lane->net, lane->ep, hdr, hdr_bytes, payload, bytes,
				     bytes ? lane : NULL)) == -EAGAIN) {
		RIG_REQUIRE(rig_now_ns() < until, "the transport takes nothing");
		(void)kvp_net_ucx.progress(lane->net);
	}
	RIG_REQUIRE(r == 0, "%s", strerror(-r));
	if (bytes) {
		progress_until(lane, &lane->n_sent, "end of the send");
		lane->n_sent = 0;
	}
	while (kvp_net_ucx.progress(lane->net) > 0)
		;
}
