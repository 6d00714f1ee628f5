/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of GPUs: only with a UCX that has CUDA. One without takes a device's address for one of
 * the host and reads there, so it is asked, never trusted.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uct/api/uct.h>

#include "daemon/net_ucx.h"
#include "proto/util.h"

static bool is_cuda(uct_component_h component)
{
	uct_component_attr_t attr = { .field_mask = UCT_COMPONENT_ATTR_FIELD_NAME };

	return uct_component_query(component, &attr) == UCS_OK &&
	       strncmp(attr.name, "cuda_cpy", sizeof(attr.name)) == 0;
}

bool kvp_ucx_has_cuda(void)
{
	uct_component_h *components;
	unsigned n;
	bool found = false;

	if (uct_query_components(&components, &n) != UCS_OK)
		return false;
	for (unsigned i = 0; i < n && !found; i++)
		found = is_cuda(components[i]);
	uct_release_component_list(components);
	return found;
}

/* The text is UCX's own of the settings that it is going to use. */
static bool says(const ucp_config_t *config, const char *what)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *file = open_memstream(&text, &bytes);
	bool found;

	if (!file)
		return false;
	ucp_config_print(config, file, NULL, UCS_CONFIG_PRINT_CONFIG);
	found = fclose(file) == 0 && strstr(text, what) != NULL;
	free(text);
	return found;
}

bool kvp_ucx_believes(ucp_config_t *config)
{
	/* A setting that UCX does not know is no error to it. */
	return ucp_config_modify(config, "PROTO_ENABLE", "n") == UCS_OK &&
	       says(config, "UCX_PROTO_ENABLE=n\n");
}

int kvp_ucx_device(struct kvp_net *net, const struct kvp_net_memory *memory, const char **word,
		   char *err, size_t err_bytes)
{
	ucp_context_attr_t attr = { .field_mask = UCP_ATTR_FIELD_MEMORY_TYPES };
	const char *version = ucp_get_version_string();

	*word = "ucx_without_cuda";
	if (!kvp_ucx_has_cuda()) {
		(void)snprintf(err, err_bytes, "ucx %s is built without CUDA", version);
		return -EOPNOTSUPP;
	}
	/* Measured between two daemons: a quarter of what rings in pinned memory reach. */
	if (!net->rdma && !net->staged) {
		*word = "tcp";
		(void)snprintf(
			err, err_bytes,
			"tcp sends from the host: ucx %s would copy the device's memory there "
			"piece by piece",
			version);
		return -EOPNOTSUPP;
	}
	if (!net->believes) {
		(void)snprintf(err, err_bytes, "ucx %s does not let itself be told what memory is",
			       version);
		return -EOPNOTSUPP;
	}
	if (ucp_context_query(net->context, &attr) != UCS_OK ||
	    !(attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA))) {
		(void)snprintf(err, err_bytes, "ucx %s has CUDA, but does not find it usable here",
			       version);
		return -EOPNOTSUPP;
	}
	*word = "cuda";
	if (!memory)
		return 0;
	if (net->n_device == KVP_UCX_DEVICE_RANGES) {
		*word = "too_many";
		(void)snprintf(err, err_bytes, "more than %u memories of a device",
			       KVP_UCX_DEVICE_RANGES);
		return -ENOBUFS;
	}
	net->device[net->n_device++] = (struct kvp_ucx_range){
		.base = memory->base,
		.bytes = memory->stride * memory->n,
	};
	return 0;
}

ucs_memory_type_t kvp_ucx_memory_type(const struct kvp_net *net, const void *at)
{
	for (uint32_t i = 0; i < net->n_device; i++)
		if ((uintptr_t)at - (uintptr_t)net->device[i].base < net->device[i].bytes)
			return UCS_MEMORY_TYPE_CUDA;
	return UCS_MEMORY_TYPE_HOST;
}
