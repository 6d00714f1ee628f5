/* SPDX-License-Identifier: Apache-2.0 */

/* That the rig itself is what the other checks take it for. */

#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

#include "tests/rxe/checks.h"

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (size_t i = 0; list && list[i] && !context; i++) {
		if (strcmp(ibv_get_device_name(list[i]), name) == 0)
			context = ibv_open_device(list[i]);
	}
	ibv_free_device_list(list);
	return context;
}

static void devices_are_up(void)
{
	static const char *const names[] = { "rxe0", "rxe1", "rxe2", "rxe3", "rxe4" };

	for (size_t i = 0; i < 5; i++) {
		struct ibv_context *context = open_device(names[i]);
		struct ibv_port_attr port;
		struct ibv_gid_entry gid;

		KVP_EXPECT(context, "no device %s", names[i]);
		KVP_EXPECT(ibv_query_port(context, 1, &port) == 0);
		KVP_EXPECT(port.state == IBV_PORT_ACTIVE, "%s is %s", names[i],
			   ibv_port_state_str(port.state));
		KVP_EXPECT(port.active_mtu == IBV_MTU_4096);
		KVP_EXPECT(ibv_query_gid_ex(context, 1, 1, &gid, 0) == 0);
		KVP_EXPECT(gid.gid_type == IBV_GID_TYPE_ROCE_V2);
		(void)ibv_close_device(context);
	}
}

static void memory_is_registered(void)
{
	struct ibv_context *context = open_device("rxe0");
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	size_t bytes = 16u << 20;
	void *memory = malloc(bytes);
	struct ibv_mr *mr;

	KVP_EXPECT(pd && memory);
	mr = ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	KVP_EXPECT(mr, "%s", strerror(errno));
	KVP_EXPECT(ibv_dereg_mr(mr) == 0);
	(void)ibv_dealloc_pd(pd);
	(void)ibv_close_device(context);
	free(memory);
}

const struct kvp_check kvp_checks_rig[] = {
	{ "rig: devices are up", devices_are_up, 20 },
	{ "rig: memory is registered", memory_is_registered, 20 },
	{ NULL, NULL, 0 },
};
