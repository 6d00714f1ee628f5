/* SPDX-License-Identifier: Apache-2.0 */

/* Lanes of a program that links this file write directly, on a device made of nothing. */

#include "tests/fake_verbs.h"
#include "tests/support_lane.h"

void lt_configure(struct kvp_lane_config *config)
{
	static struct kvp_net_verbs_config verbs;
	static bool first = true;

	if (!config->net)
		return;

	if (first) { /* one thread makes lanes */
		kvp_fake_reset();
		kvp_net_verbs_defaults(&verbs);
		verbs.keepalive_ns = UINT64_C(60000000000); /* an idle lane sleeps */
		first = false;
	}
	config->net = &kvp_net_verbs;
	config->verbs = &verbs;
	/* What a test has chosen stays. */
	if (config->mode == KVP_DATA_AUTO && config->pack && config->direct_run_bytes == 0)
		config->mode = KVP_DATA_DIRECT;
}
