/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/nic.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/log.h"
#include "proto/util.h"

static bool is_v4(const union ibv_gid *gid)
{
	static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };

	return memcmp(gid->raw, prefix, sizeof(prefix)) == 0;
}

const char *kvp_nic_gid_text(const union ibv_gid *gid, char *buf, size_t bytes)
{
	const char *text = is_v4(gid) ? inet_ntop(AF_INET, gid->raw + 12, buf, (socklen_t)bytes)
				      : inet_ntop(AF_INET6, gid->raw, buf, (socklen_t)bytes);

	return text ? text : "?";
}

int kvp_nic_gid_rank(const struct ibv_gid_entry *entry)
{
	static const union ibv_gid none;
	bool link_local = entry->gid.raw[0] == 0xfe && (entry->gid.raw[1] & 0xc0) == 0x80;

	if (entry->gid_type != IBV_GID_TYPE_ROCE_V2 || link_local ||
	    memcmp(&entry->gid, &none, sizeof(none)) == 0)
		return 0;
	return is_v4(&entry->gid) ? 2 : 1;
}

unsigned kvp_nic_distance(const char *a, const char *b)
{
	size_t common = 0;
	unsigned hops = 0;

	for (size_t i = 0;; i++) {
		bool end_a = a[i] == '/' || a[i] == '\0';
		bool end_b = b[i] == '/' || b[i] == '\0';

		if (end_a && end_b)
			common = i;
		if (a[i] != b[i] || a[i] == '\0')
			break;
	}
	for (const char *p = a + common; *p; p++)
		hops += *p == '/';
	for (const char *p = b + common; *p; p++)
		hops += *p == '/';
	return hops;
}

/* What the kernel asks where memory is pinned for a device; the user does not matter to it. */
static bool may_lock_all(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = { 0 };

	return syscall(SYS_capget, &header, data) == 0 &&
	       data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK);
}

uint64_t kvp_nic_memlock(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_MEMLOCK, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY ||
	    may_lock_all())
		return UINT64_MAX;
	return limit.rlim_cur;
}

#define MEMLOCK_ADVICE \
	"put LimitMEMLOCK=infinity below [Service] in the daemon's unit, or raise ulimit -l"

void kvp_nic_memlock_text(const char *what, uint64_t bytes, char *err, size_t err_bytes)
{
	(void)snprintf(err, err_bytes,
		       "%s: %" PRIu64 " bytes to lock, the limit is %" PRIu64 ": " MEMLOCK_ADVICE,
		       what, bytes, kvp_nic_memlock()); /* cut at worst */
}

void kvp_nic_memlock_warn(void)
{
	uint64_t limit = kvp_nic_memlock();

	if (limit != UINT64_MAX)
		kvp_log(KVP_LOG_WARNING,
			"RDMA: rings and pools are locked, and the limit is %" PRIu64
			" bytes: " MEMLOCK_ADVICE,
			limit);
}

static unsigned distance_to(const char *device, const char *near)
{
	char link[PATH_MAX];
	char nic_path[PATH_MAX], near_path[PATH_MAX];

	if (!near || !near[0])
		return UINT_MAX;

	(void)snprintf(link, sizeof(link), "/sys/class/infiniband/%s/device", device); /* fits */
	if (!realpath(link, nic_path))
		return UINT_MAX;
	(void)snprintf(link, sizeof(link), "/sys/bus/pci/devices/%s", near); /* cut: not found */
	if (!realpath(link, near_path))
		return UINT_MAX;
	return kvp_nic_distance(nic_path, near_path);
}

/* The place of a name in a list, -1: it is not there. `value`: what follows behind a '='. */
static int place_of(const char *list, const char *name, const char **value)
{
	size_t bytes = strlen(name);

	for (int i = 0; list && *list; i++) {
		size_t n = strcspn(list, "=, ");

		if (n == bytes && strncmp(list, name, n) == 0) {
			if (value)
				*value = list[n] == '=' ? list + n + 1 : NULL;
			return i;
		}
		list += strcspn(list, ", ");
		list += strspn(list, ", ");
	}
	return -1;
}

/* On Ethernet: the GID asked for, or the best. */
static int choose_gid(struct kvp_nic *nic, struct ibv_context *context, int wish, int n_gids)
{
	int best = 0;

	for (int i = 0; i < n_gids; i++) {
		struct ibv_gid_entry entry;
		int rank;

		if ((wish >= 0 && i != wish) ||
		    ibv_query_gid_ex(context, nic->port, (uint32_t)i, &entry, 0) != 0)
			continue;
		rank = kvp_nic_gid_rank(&entry);
		if (rank <= best)
			continue;
		best = rank;
		nic->gid_index = i;
		nic->gid = entry.gid;
	}
	return best > 0 ? 0 : -EADDRNOTAVAIL;
}

static int look_at_port(struct kvp_nic *nic, struct ibv_context *context, uint8_t port,
			int gid_index, char *why, size_t why_bytes)
{
	struct ibv_port_attr attr;
	int err = ibv_query_port(context, port, &attr);

	if (err) {
		(void)snprintf(why, why_bytes, "port %u: %s", port, strerror(err));
		return -err;
	}
	nic->port = port;
	nic->max_msg_bytes = attr.max_msg_sz;
	nic->ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
	if (attr.state != IBV_PORT_ACTIVE) {
		(void)snprintf(why, why_bytes, "port %u is %s", port,
			       ibv_port_state_str(attr.state));
		return -ENETDOWN;
	}

	nic->lid = attr.lid;
	nic->mtu = attr.active_mtu;
	if (nic->ethernet) {
		if (choose_gid(nic, context, gid_index, attr.gid_tbl_len) == 0)
			return 0;
		(void)snprintf(why, why_bytes, "port %u has no RoCE v2 GID%s", port,
			       gid_index >= 0 ? " at that index" : " besides link-local ones");
		return -EADDRNOTAVAIL;
	}
	nic->gid_index = gid_index >= 0 ? gid_index : 0;
	return ibv_query_gid(context, port, nic->gid_index, &nic->gid) == 0 ? 0 : -EADDRNOTAVAIL;
}

int kvp_nic_look(struct kvp_nic *nic, struct ibv_context *context, int gid_index, char *err,
		 size_t err_bytes)
{
	struct kvp_nic now = *nic;
	int r = look_at_port(&now, context, nic->port, gid_index, err, err_bytes);

	if (r == 0)
		*nic = now;
	nic->down = r < 0;
	return r;
}

/* The first of its ports that is usable. Without any it has the first at all, and is down. */
static int look_at_device(struct kvp_nic *nic, struct ibv_context *context,
			  const struct kvp_nic_wish *wish, char *why, size_t why_bytes)
{
	struct ibv_device_attr attr;
	int r = ibv_query_device(context, &attr);
	uint8_t first = wish->port ? wish->port : 1;
	uint8_t last = wish->port ? wish->port : attr.phys_port_cnt;

	if (r) {
		(void)snprintf(why, why_bytes, "%s", strerror(r));
		return -r;
	}
	r = -ENODEV;
	for (unsigned port = first; r < 0 && port <= last; port++)
		r = look_at_port(nic, context, (uint8_t)port, wish->gid_index, why, why_bytes);
	if (r == 0)
		return 0;
	if (last > first)
		r = look_at_port(nic, context, first, wish->gid_index, why, why_bytes);
	nic->down = nic->port != 0 && (r == -ENETDOWN || r == -EADDRNOTAVAIL);
	return r;
}

/* Nearer, or named before the other. */
static bool before(const struct kvp_nic *a, const struct kvp_nic *b,
		   const struct kvp_nic_wish *wish)
{
	if (wish->devices[0])
		return place_of(wish->devices, a->device, NULL) <
		       place_of(wish->devices, b->device, NULL);
	return a->distance < b->distance;
}

static void keep_sorted(struct kvp_nic *nics, int *n, const struct kvp_nic *nic,
			const struct kvp_nic_wish *wish)
{
	int i = *n;

	if (*n == (int)KVP_NIC_MAX)
		return;
	for (; i > 0 && before(nic, &nics[i - 1], wish); i--)
		nics[i] = nics[i - 1];
	nics[i] = *nic;
	++*n;
}

static void look_at(struct ibv_device *device, struct kvp_nic *nics, int *n,
		    const struct kvp_nic_wish *wish, char *err, size_t err_bytes)
{
	const char *name = ibv_get_device_name(device);
	struct kvp_nic nic = { .gid_index = 0 };
	char why[96] = "cannot be opened";
	struct ibv_context *context;
	size_t used = strlen(err);
	int r = -ENODEV;

	if (place_of(wish->exclude, name, NULL) >= 0 ||
	    (wish->devices[0] && place_of(wish->devices, name, NULL) < 0))
		return;

	(void)snprintf(nic.device, sizeof(nic.device), "%s", name); /* the kernel's limit is ours */
	context = ibv_open_device(device);
	if (context) {
		r = look_at_device(&nic, context, wish, why, sizeof(why));
		(void)ibv_close_device(context);
	}
	if (r < 0)
		(void)snprintf(err + used, err_bytes - used, "%s%s: %s", used ? "; " : "", name,
			       why); /* cut texts are fine */
	if (r < 0 && !nic.down)
		return;
	nic.distance = distance_to(name, wish->near);
	keep_sorted(nics, n, &nic, wish);
}

/* Also those that are down. */
static int list_all(struct kvp_nic *nics, const struct kvp_nic_wish *wish, char *err,
		    size_t err_bytes)
{
	int n_devices = 0, n = 0;
	struct ibv_device **list = ibv_get_device_list(&n_devices);

	err[0] = '\0';
	if (!list)
		n_devices = 0;
	for (int i = 0; i < n_devices; i++)
		look_at(list[i], nics, &n, wish, err, err_bytes);
	if (list)
		ibv_free_device_list(list);
	if (n_devices == 0)
		(void)snprintf(err, err_bytes, "this machine has no RDMA device%s%s",
			       wish->devices[0] ? ", nor " : "", wish->devices);
	else if (n == 0 && err[0] == '\0')
		(void)snprintf(err, err_bytes, "no RDMA device%s%s among %d",
			       wish->devices[0] ? " " : "", wish->devices, n_devices);
	return n;
}

int kvp_nic_list(struct kvp_nic *nics, const struct kvp_nic_wish *wish, char *err, size_t err_bytes)
{
	int n = list_all(nics, wish, err, err_bytes), kept = 0;

	for (int i = 0; i < n; i++) {
		if (!nics[i].down)
			nics[kept++] = nics[i];
	}
	return kept;
}

static uint8_t rail_number(const struct kvp_nic *nic, const char *rail_of, int otherwise)
{
	const char *value = NULL;

	(void)place_of(rail_of, nic->device, &value);
	return value ? (uint8_t)strtoul(value, NULL, 10) : (uint8_t)otherwise; /* checked before */
}

static void sort_by_number(struct kvp_nic *nics, int n)
{
	for (int i = 1; i < n; i++) {
		struct kvp_nic nic = nics[i];
		int k = i;

		for (; k > 0 && nics[k - 1].number > nic.number; k--)
			nics[k] = nics[k - 1];
		nics[k] = nic;
	}
}

/* Marks those that are wanted, and are down or not, until so many are. */
static void want(const struct kvp_nic *nics, int n, bool down, const struct kvp_nic *first,
		 bool named, uint32_t most, uint32_t *wanted)
{
	for (int i = 0; i < n && (uint32_t)__builtin_popcount(*wanted) < most; i++) {
		const struct kvp_nic *nic = &nics[i];
		bool near = nic->distance != UINT_MAX && nic->distance == first->distance;

		if (nic->down == down && (nic == first || named || near) &&
		    nic->ethernet == first->ethernet)
			*wanted |= 1u << i;
	}
}

/* The number that a rail has by itself is its place among all of them, up or not. */
int kvp_nic_rails(struct kvp_nic *nics, uint32_t most, const struct kvp_nic_wish *wish, char *err,
		  size_t err_bytes)
{
	int n = list_all(nics, wish, err, err_bytes), first = 0, kept = 0;
	bool named = wish->devices[0];
	uint32_t wanted = 0;

	while (first < n && nics[first].down)
		first++;
	if (first == n)
		return 0;
	want(nics, n, false, &nics[first], named, most, &wanted);
	want(nics, n, true, &nics[first], named, most, &wanted);
	for (int i = 0; i < n; i++) {
		if (!(wanted & 1u << i))
			continue;
		nics[kept] = nics[i];
		nics[kept].number = rail_number(&nics[i], wish->rail_of, kept);
		kept++;
	}
	sort_by_number(nics, kept);
	return kept;
}

int kvp_nic_open(const struct kvp_nic *nic, struct ibv_context **out, char *err, size_t err_bytes)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (size_t i = 0; list && list[i] && !context; i++) {
		if (strcmp(ibv_get_device_name(list[i]), nic->device) == 0)
			context = ibv_open_device(list[i]);
	}
	if (list)
		ibv_free_device_list(list);
	if (!context) {
		(void)snprintf(err, err_bytes, "%s cannot be opened", nic->device);
		return -ENODEV;
	}
	*out = context;
	return 0;
}
