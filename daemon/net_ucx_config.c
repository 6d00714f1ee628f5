/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"
#include "daemon/net_ucx.h"
#include "daemon/nic.h"
#include "proto/util.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* Not in every installed set of UCX headers. Weak: a later UCX may lack it. */
extern void ucs_debug_disable_signals(void) __attribute__((weak));

/* 1.13.1 was seen to do it, the builds of 1.14.1 and later on PyPI were not. */
static const char ends_us[] = "its tcp can end this daemon (SIGABRT) when a peer dies while it "
			      "connects, or comes back after a partition; UCX 1.14 and later "
			      "were not seen to";

static atomic_bool in_doubt; /* this process has opened a context over tcp of such a UCX */

struct setting {
	const char *key;
	const char *value;
};

/* What differs from UCX's defaults, each for a measured or a safety reason. */
static const struct setting settings[] = {
	/* Nothing but tcp: shared memory wedges a survivor when its peer is killed. */
	{ "TLS", "tcp" },
	{ "RNDV_THRESH", "inf" },
	/* Puts are for hardware that checks keys. */
	{ "TCP_PUT_ENABLE", "n" },
	/* A slot travels as one fragment: the receiver scatters from UCX's own buffer. */
	{ "TCP_RX_SEG_SIZE", "1056768" },
	{ "TCP_RX_BUFS_GROW", "1" },
	/* A connect to a dead host must not stop the lane. */
	{ "TCP_CONN_NB", "y" },
	{ "TCP_KEEPIDLE", "3s" },
	{ "TCP_KEEPINTVL", "1s" },
	{ "TCP_KEEPCNT", "3" },
	{ "KEEPALIVE_INTERVAL", "2s" },
	/* Endpoints are many small peers, never a reason to pick another transport. */
	{ "TCP_MAX_NUM_EPS", "inf" },
};

/*
 * Up to 1.16 UCX looks for a transport's keys without the transport's prefix. It does not refuse
 * the other form, it ignores it with a warning when the worker is made.
 */
static const char *key_name(const char *key)
{
	unsigned major, minor, patch;

	ucp_get_version(&major, &minor, &patch);
	if (strncmp(key, "TCP_", 4) == 0 && major == 1 && minor <= 16)
		return key + 4;
	return key;
}

static int config_set(ucp_config_t *config, const char *key, const char *value, char *err,
		      size_t err_bytes)
{
	ucs_status_t status = ucp_config_modify(config, key_name(key), value);

	if (status == UCS_OK)
		return 0;
	(void)snprintf(err, err_bytes, "ucx refuses %s=%s: %s", key, value,
		       ucs_status_string(status)); /* cut at worst */
	return -EINVAL;
}

/* Reliable connections, with what UCX needs to make them. */
static int fill_rdma(ucp_config_t *ucp, const struct kvp_net_config *config, const char *devices,
		     char *err, size_t err_bytes)
{
	int r = config_set(ucp, "NET_DEVICES", devices, err, err_bytes);

	for (size_t i = 0; r == 0 && i < KVP_ARRAY_SIZE(settings); i++)
		r = config_set(ucp, settings[i].key, settings[i].value, err, err_bytes);
	if (r < 0)
		return r;
	return config_set(ucp, "TLS", config->device && kvp_ucx_has_cuda() ? "rc,cuda_copy" : "rc",
			  err, err_bytes);
}

/* "mlx5_0:1,mlx5_1:1" */
static int rdma_devices(const struct kvp_net_verbs_config *verbs, char *out, size_t out_bytes,
			char *err, size_t err_bytes)
{
	const struct kvp_nic_wish wish = {
		.devices = verbs->devices,
		.exclude = verbs->exclude,
		.near = verbs->near,
		.rail_of = verbs->rail_of,
		.port = verbs->port,
		.gid_index = verbs->gid_index,
	};
	struct kvp_nic nics[KVP_NIC_MAX];
	int n = kvp_nic_rails(nics, verbs->rails, &wish, err, err_bytes);
	size_t used = 0;

	for (int i = 0; i < n && used < out_bytes; i++) {
		if (nics[i].down) { /* UCX looks at devices when it is started, never again */
			kvp_log(KVP_LOG_WARNING,
				"ucx: %s:%u is down: left out until the next start", nics[i].device,
				nics[i].port);
			continue;
		}
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%s:%u", used ? "," : "",
					 nics[i].device, nics[i].port);
	}
	if (n == 0)
		return -ENODEV;
	kvp_nic_memlock_warn();
	return used < out_bytes ? 0 : -ENAMETOOLONG;
}

static int config_fill(ucp_config_t *ucp, const struct kvp_net_config *config, char *err,
		       size_t err_bytes)
{
	char range[16];
	int r = config_set(ucp, "NET_DEVICES", config->interface, err, err_bytes);

	for (size_t i = 0; r == 0 && i < KVP_ARRAY_SIZE(settings); i++)
		r = config_set(ucp, settings[i].key, settings[i].value, err, err_bytes);
	/* It copies between the device and the buffers that tcp sends from. A UCX without it warns
	 * when it is named. */
	if (r == 0 && config->staged && kvp_ucx_has_cuda())
		r = config_set(ucp, "TLS", "tcp,cuda_copy", err, err_bytes);
	if (r < 0 || config->port_hi == 0)
		return r;

	(void)snprintf(range, sizeof(range), "%u-%u", config->port_lo, config->port_hi);
	return config_set(ucp, "TCP_PORT_RANGE", range, err, err_bytes);
}

/* UCX only says "no usable transports"; say what is wrong with the interface. */
static int interface_check(struct kvp_net *net, const char *name, char *err, size_t err_bytes)
{
	char text[INET_ADDRSTRLEN];
	struct ifaddrs *all;
	bool found = false;

	if (getifaddrs(&all) < 0)
		return -errno;

	for (struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
		struct sockaddr_in in;

		if (strcmp(i->ifa_name, name) != 0 || !i->ifa_addr ||
		    i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP))
			continue;
		memcpy(&in, i->ifa_addr, sizeof(in));
		found = inet_ntop(AF_INET, &in.sin_addr, text, sizeof(text)) != NULL;
	}
	freeifaddrs(all);
	if (!found) {
		(void)snprintf(err, err_bytes, "ucx.interface %s is missing, down or without IPv4",
			       name);
		return -ENODEV;
	}

	(void)snprintf(net->what, sizeof(net->what), "tcp %s %s", name, text);
	return 0;
}

/* Once is enough: each lane has a context. */
static void tell_doubt(void)
{
	unsigned major, minor, patch;

	ucp_get_version(&major, &minor, &patch);
	if (major > 1 || minor >= 14)
		return;
	if (!atomic_exchange_explicit(&in_doubt, true, memory_order_relaxed))
		kvp_log(KVP_LOG_WARNING, "UCX %s: %s", kvp_net_ucx_version(), ends_us);
}

const char *kvp_net_ucx_doubt(void)
{
	return atomic_load_explicit(&in_doubt, memory_order_relaxed) ? ends_us : "";
}

int kvp_ucx_context_create(struct kvp_net *net, const struct kvp_net_config *config, char *err,
			   size_t err_bytes)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
			      UCP_PARAM_FIELD_NAME,
		.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
		.mt_workers_shared = 0,
		.name = "kvpack",
	};
	char devices[KVP_NET_RAILS * (KVP_NIC_NAME_MAX + 5)] = "";
	ucp_config_t *ucp = NULL;
	ucs_status_t status;
	int r;

	if (!config->rdma && (!config->interface || config->port_lo > config->port_hi)) {
		(void)snprintf(err, err_bytes, "an interface and an ascending port range, please");
		return -EINVAL;
	}
	r = config->rdma ? rdma_devices(config->verbs, devices, sizeof(devices), err, err_bytes)
			 : interface_check(net, config->interface, err, err_bytes);
	if (r < 0)
		return r;
	if (config->rdma)
		(void)snprintf(net->what, sizeof(net->what), "rc %s", devices); /* cut at worst */

	status = ucp_config_read(NULL, NULL, &ucp);
	if (status != UCS_OK) {
		(void)snprintf(err, err_bytes, "ucx configuration: %s", ucs_status_string(status));
		return kvp_ucx_errno(status);
	}
	r = config->rdma ? fill_rdma(ucp, config, devices, err, err_bytes)
			 : config_fill(ucp, config, err, err_bytes);
	if (r == 0) {
		net->believes = kvp_ucx_believes(ucp);
		if (!net->believes)
			kvp_log(KVP_LOG_WARNING,
				"UCX %s does not turn its newer protocols off: over tcp they are "
				"half as fast",
				kvp_net_ucx_version());
		status = ucp_init(&params, ucp, &net->context);
		r = kvp_ucx_errno(status);
		if (r < 0)
			(void)snprintf(err, err_bytes, "ucx context on %s: %s", net->what,
				       ucs_status_string(status));
	}
	ucp_config_release(ucp);
	if (r == 0 && !config->rdma)
		tell_doubt();
	return r;
}

void kvp_net_ucx_give_back_signals(void)
{
	if (ucs_debug_disable_signals)
		ucs_debug_disable_signals();
}

const char *kvp_net_ucx_version(void)
{
	return ucp_get_version_string();
}
