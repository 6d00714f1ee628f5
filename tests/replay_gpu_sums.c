/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sums and pools on a GPU, which can have none: who must have them is refused with the reason at
 * both ends, whichever end asks and inside one daemon too; who would like them gets the rows, and
 * that there were no sums is counted. Without a GPU on the driver that is none.
 *
 * usage: replay_gpu_sums [SCENARIO ...]
 */

#include <stdio.h>
#include <string.h>

#include "tests/support_end.h"

#define TOKENS (4 * END_PAGE)

/* What a daemon is configured with; NULL: nothing of sums. */
static struct rig_daemon *daemon_with(struct rig *rig, const char *name, const char *sums)
{
	char extra[256];

	snprintf(extra, sizeof(extra), "[gpu]\ndevices = all\nslots = 2\nslot_bytes = 1M\n%s%s\n",
		 sums ? "[data]\nchecksum = " : "", sums ? sums : "");
	return rig_daemon_start(rig, name, extra);
}

/* The room, announced at both ends. */
static void ends_begin(struct end *from, struct end *to, const struct rig_daemon *prefill,
		       const struct rig_daemon *decode)
{
	const struct end_plan send = { prefill, .kind = DEVICE_IPC, .room = 9, .tokens = TOKENS };
	struct end_plan receive = send;

	receive.daemon = decode;
	receive.prefill = prefill;
	receive.n_ranks = 1;
	end_make(from, &send);
	end_make(to, &receive);
	end_open(from);
	end_expect(to);
}

static void refused(struct end *end)
{
	struct kvp_room_state state = rig_await(end->client, end->id, KVP_WAIT_RELEASED, END_SECS);

	RIG_REQUIRE(state.failed && !state.complete && state.status == KVP_STATUS_UNSUPPORTED &&
			    !state.retry && strstr(state.reason, "data.checksum is required") &&
			    strstr(state.reason, "GPU"),
		    "%s: %s", kvp_status_name(state.status), state.reason);
}

/* One room that may not move without sums: not a byte of it does. */
static void must_fail(const struct rig_daemon *prefill, const struct rig_daemon *decode)
{
	struct end from, to;

	ends_begin(&from, &to, prefill, decode);
	refused(&from);
	refused(&to);
	end_check(&to, 0);
	end_close(&from);
	end_close(&to);
}

static void required_by_decode(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", NULL);

	must_fail(prefill, daemon_with(rig, "decode", "required"));
}

static void required_by_prefill(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "required");

	must_fail(prefill, daemon_with(rig, "decode", NULL));
}

static void required_by_one_asked_by_other(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "on");

	must_fail(prefill, daemon_with(rig, "decode", "required"));
}

static void required_inside_one_daemon(struct rig *rig)
{
	const struct rig_daemon *node = daemon_with(rig, "node", "required");

	must_fail(node, node);
}

static void asked_is_counted(struct rig *rig)
{
	const struct rig_daemon *prefill = daemon_with(rig, "prefill", "on");
	const struct rig_daemon *decode = daemon_with(rig, "decode", NULL);
	struct end from, to;

	ends_begin(&from, &to, prefill, decode);
	end_write(&from, 0, TOKENS);
	end_submit(&from, 0, TOKENS, NULL, 0);
	end_await(&to);
	end_await(&from);
	end_check(&to, TOKENS);
	rig_says(prefill, "status", NULL, "\"unchecked_gpu\"");
	end_close(&from);
	end_close(&to);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "required_by_decode", required_by_decode },
		{ "required_by_prefill", required_by_prefill },
		{ "required_by_one_asked_by_other", required_by_one_asked_by_other },
		{ "required_inside_one_daemon", required_inside_one_daemon },
		{ "asked_is_counted", asked_is_counted },
	};

	if (!device_or_fake(argv))
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
