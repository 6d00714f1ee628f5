/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config.h"

#include <arpa/inet.h>
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <ini.h>

#include "proto/check.h"
#include "proto/limits.h"
#include "proto/util.h"

#define US UINT64_C(1000)
#define MS (1000 * US)
#define SEC (1000 * MS)
#define HOUR (3600 * SEC)
#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)

#define KVP_CONFIG_SECTION_MAX 49u

#define SPIN_AUTO UINT64_MAX /* only until the file is read */
#define SPIN_AUTO_NS (50 * US)
#define SPIN_MIN_CORES 4

static const struct kvp_config_choice trust_choices[] = {
	{ "loopback", KVP_TRUST_LOOPBACK },
	{ "trusted", KVP_TRUST_TRUSTED },
	{ NULL, 0 },
};

static const struct kvp_config_choice transport_choices[] = {
	{ "ucx", KVP_TRANSPORT_UCX },
	{ "verbs", KVP_TRANSPORT_VERBS },
	{ "auto", KVP_TRANSPORT_AUTO },
	{ NULL, 0 },
};

static const struct kvp_config_choice mode_choices[] = {
	{ "auto", KVP_DATA_AUTO },
	{ "direct", KVP_DATA_DIRECT },
	{ "landing", KVP_DATA_LANDING },
	{ NULL, 0 },
};

static const struct kvp_config_choice checksum_choices[] = {
	{ "off", KVP_CHECKSUM_OFF },
	{ "on", KVP_CHECKSUM_ON },
	{ "required", KVP_CHECKSUM_REQUIRED },
	{ NULL, 0 },
};

static const struct kvp_config_choice memory_choices[] = {
	{ "auto", KVP_RINGS_AUTO },
	{ "device", KVP_RINGS_DEVICE },
	{ "host", KVP_RINGS_HOST },
	{ NULL, 0 },
};

static const struct kvp_config_choice flush_choices[] = {
	{ "auto", KVP_FLUSH_AUTO },
	{ "always", KVP_FLUSH_ALWAYS },
	{ NULL, 0 },
};

static const struct kvp_config_choice peer_choices[] = {
	{ "auto", KVP_PEER_AUTO },
	{ "off", KVP_PEER_OFF },
	{ NULL, 0 },
};

static const struct kvp_config_choice network_choices[] = {
	{ "tcp", KVP_UCX_TCP },
	{ "rdma", KVP_UCX_RDMA },
	{ NULL, 0 },
};

static const struct kvp_config_choice connect_choices[] = {
	{ "control", KVP_CONNECT_CONTROL },
	{ "rdma_cm", KVP_CONNECT_RDMA_CM },
	{ NULL, 0 },
};

static const struct kvp_config_choice rail_choices[] = {
	{ "any", KVP_RAIL_ANY },
	{ "same", KVP_RAIL_SAME },
	{ NULL, 0 },
};

static const struct kvp_config_choice allow_choices[] = {
	{ "listed", KVP_ALLOW_LISTED },
	{ "all", KVP_ALLOW_ALL },
	{ NULL, 0 },
};

static const struct kvp_config_choice level_choices[] = {
	{ "error", KVP_LOG_ERR }, { "warning", KVP_LOG_WARNING }, { "notice", KVP_LOG_NOTICE },
	{ "info", KVP_LOG_INFO }, { "debug", KVP_LOG_DEBUG },     { NULL, 0 },
};

#define FIELD(section_, field_)                                 \
	.offset = offsetof(struct kvp_config, section_.field_), \
	.size = sizeof(((struct kvp_config *)0)->section_.field_)

/* Entries of the table: section, key, (type, smallest, largest,) default, help. */
#define KEY(s, k, type_, field, min_, max_, def_, choices_, help_)                     \
	{                                                                              \
		.section = #s, .key = #k, .type = KVP_CONFIG_##type_, FIELD(s, field), \
		.min = (min_), .max = (max_), .def = (def_), .choices = (choices_),    \
		.help = (help_)                                                        \
	}
#define STR(s, k, min, def, help) KEY(s, k, STR, k, min, KVP_CONFIG_STR_MAX - 1, def, NULL, help)
#define LIST(s, k, def, help) KEY(s, k, LIST, k, 0, KVP_CONFIG_LIST_MAX - 1, def, NULL, help)
#define NUM(s, k, type, min, max, def, help) KEY(s, k, type, k, min, max, def, NULL, help)
#define DUR(s, k, type, min, max, def, help) KEY(s, k, type, k##_ns, min, max, def, NULL, help)
#define CHOICE(s, k, choices, def, help) KEY(s, k, CHOICE, k, 0, 0, def, choices, help)

static const struct kvp_config_key keys[] = {
	KEY(node, name, STR, name, 0, KVP_MAX_LABEL, "", NULL,
	    "name in displays and logs; empty: the host's name"),
	STR(node, advertise, 0, "", "host:port that peers dial; empty: peer.listen"),

	CHOICE(log, level, level_choices, "info", "lines above it are left out"),

	STR(client, socket, 1, "/run/kvpack/sock", "path of the clients' socket"),
	NUM(client, mode, MODE, 0600, 0777, "0660", "permissions of the socket"),
	STR(client, group, 0, "kvpack", "group of the socket, if it exists and the daemon is root"),
	DUR(client, stall, DURATION, 100 * MS, HOUR, "10s",
	    "a client that reads nothing for so long is dropped"),
	NUM(client, max_sessions, COUNT, 1, 65536, "256", "connections of clients"),
	NUM(client, max_process_sessions, COUNT, 1, 65536, "64",
	    "of these, connections of one process"),

	STR(peer, listen, 0, "", "address:port for other daemons, port 0: any; empty: no peers"),
	CHOICE(peer, plaintext, trust_choices, "loopback",
	       "where the control channel may go without TLS"),
	LIST(peer, allow, "127.0.0.0/8", "networks whose daemons may connect"),
	DUR(peer, heartbeat, DURATION, 10 * MS, 60 * SEC, "1s", "time between signs of life"),
	DUR(peer, lost_after, DURATION, 50 * MS, 600 * SEC, "5s", "a silent peer is lost after it"),
	DUR(peer, retry_min, DURATION, MS, 60 * SEC, "100ms",
	    "first wait before a peer is dialled again"),
	DUR(peer, retry_max, DURATION, MS, HOUR, "5s",
	    "longest such wait; it doubles from the first"),
	DUR(peer, idle, DURATION, 0, HOUR, "60s",
	    "a connection that no room needs ends after it; 0: never"),
	NUM(peer, max_sessions, COUNT, 1, 65536, "256", "connections of peers"),
	NUM(peer, max_host_sessions, COUNT, 1, 65536, "64",
	    "of these, connections that daemons of one host have made"),

	CHOICE(ucx, network, network_choices, "tcp",
	       "rdma: reliable connections of the devices of [verbs], nothing else"),
	STR(ucx, interface, 1, "lo", "network interface that carries the data"),
	NUM(ucx, port_lo, COUNT, 0, 65535, "0", "first port for data; 0: any"),
	NUM(ucx, port_hi, COUNT, 0, 65535, "0", "last port for data; 0: any"),
	CHOICE(ucx, tcp_network, trust_choices, "loopback", "who may reach the data ports"),

	CHOICE(data, transport, transport_choices, "ucx",
	       "what carries the data; auto: verbs if there is a usable RDMA device, else ucx"),
	CHOICE(data, mode, mode_choices, "auto",
	       "over RDMA: direct writes into pools where possible, only those, or none"),
	NUM(data, direct_run_bytes, BYTES, 0, 1 << 20, "4096",
	    "auto: pieces whose runs of bytes in the pool are shorter on average land"),
	CHOICE(data, checksum, checksum_choices, "off",
	       "sums from pool to pool: on: where both ends can; required: or the room fails"),

	LIST(verbs, device, "",
	     "RDMA devices, a rail each, separated by commas; empty: the nearest that is usable"),
	CHOICE(verbs, connect, connect_choices, "control",
	       "how connections are made: over the control sessions, or by librdmacm"),
	STR(verbs, gid_index, 1, "auto", "GID to send from; auto: the best of RoCE v2"),
	NUM(verbs, port, COUNT, 0, 255, "0", "port of the device; 0: the first that is active"),
	NUM(verbs, mtu, COUNT, 0, 4096, "0", "largest packet, 256 to 4096; 0: as the port has it"),
	NUM(verbs, depth, COUNT, 16, 4096, "128", "requests of one connection under way"),
	NUM(verbs, inline_bytes, BYTES, 0, 1024, "192", "messages up to it travel in the request"),
	NUM(verbs, timeout, COUNT, 1, 31, "14", "wait for an answer: 4.096us times 2 to its power"),
	NUM(verbs, retry_count, COUNT, 1, 7, "3", "times that a packet without answer is resent"),
	NUM(verbs, rnr_timer, COUNT, 1, 31, "12", "code of the wait for a missing receive"),
	NUM(verbs, service_level, COUNT, 0, 15, "0", "service level of the packets"),
	NUM(verbs, traffic_class, COUNT, 0, 255, "0", "traffic class: DSCP times 4"),
	NUM(verbs, pkey_index, COUNT, 0, 65535, "0", "index of the partition key"),
	DUR(verbs, keepalive, DURATION, 10 * MS, 60 * SEC, "1s",
	    "how often an idle connection is tried"),
	DUR(verbs, idle, DURATION, 0, HOUR, "60s",
	    "a connection without messages ends after it; 0: never"),

	LIST(nics, exclude, "", "RDMA devices that are never chosen, separated by commas"),
	NUM(nics, rails, COUNT, 1, 4, "4", "devices that one lane uses at most"),
	CHOICE(nics, rail_policy, rail_choices, "any",
	       "same: connections join rails of the same number only"),

	DUR(lane, spin, SPIN, 0, 10 * MS, "auto",
	    "busy wait before sleeping; auto: 50us; gives way below 4 cores"),
	DUR(lane, stuck_after, DURATION, 100 * MS, HOUR, "5s",
	    "a lane with work and no turn for so long is stuck"),
	NUM(lane, pack, BOOL, 0, 1, "on", "off: each row is a message of its own; for comparisons"),

	NUM(host, slots, COUNT, 2, 4096, "128", "slots of the pack ring, and of the landing ring"),
	NUM(host, slot_bytes, BYTES, 64 * KIB, 64 * MIB, "512k", "bytes of one slot"),

	KEY(gpu, devices, STR, devices, 1, KVP_CONFIG_LIST_MAX - 1, "none", NULL,
	    "GPUs whose pools are served: none, all, or UUIDs (GPU-...) separated by commas"),
	NUM(gpu, slots, COUNT, 2, 256, "8", "slots of a GPU's pack ring, and of its landing ring"),
	NUM(gpu, slot_bytes, BYTES, 64 * KIB, 64 * MIB, "8M", "bytes of one slot"),
	CHOICE(gpu, flush, flush_choices, "auto",
	       "when a GPU is told to look at what a NIC wrote: auto: where it has to be"),
	CHOICE(gpu, peer, peer_choices, "auto",
	       "rooms between two GPUs of a daemon: auto: written from one to the other where it "
	       "can"),

	CHOICE(pack, memory, memory_choices, "auto",
	       "rings of GPUs; auto: on the device where the transport can, else the host's"),

	NUM(limits, max_rooms, COUNT, 1, 1 << 20, "50000", "rooms at the same time"),
	NUM(limits, max_pools, COUNT, 1, 65536, "1024", "pools"),
	NUM(limits, max_entries, COUNT, 1, 65536, "512", "entries of one pool"),
	NUM(limits, max_room_pages, COUNT, 1, 1 << 28, "1M", "pages of one list"),
	NUM(limits, max_parked_offers, COUNT, 1, 1 << 20, "65536",
	    "offers that no client has opened yet"),
	NUM(limits, max_parked_chunks, COUNT, 1, 65536, "1024",
	    "chunks of one open that wait for destinations"),
	NUM(limits, max_lists, COUNT, 1, 4096, "64",
	    "page lists that one session builds at a time"),
	NUM(limits, max_wants, COUNT, 1, 4096, "64",
	    "pieces that one peer may ask slots for at a time"),
	NUM(limits, history, COUNT, 0, 1 << 20, "10000", "ended rooms that kvpackctl still shows"),

	DUR(timers, offer, DURATION, 10 * MS, 24 * HOUR, "30s",
	    "from expect until a sender's daemon has the offer"),
	DUR(timers, open, DURATION, 10 * MS, 24 * HOUR, "300s",
	    "then until prefill's open; from open until decode shows up"),
	DUR(timers, progress, DURATION, 10 * MS, 24 * HOUR, "30s",
	    "without a piece while the peer owes one"),
	DUR(timers, fence, DURATION, 10 * MS, 24 * HOUR, "60s",
	    "from submit until the engine reaches the fence"),
	DUR(timers, drain, DURATION, 10 * MS, HOUR, "5s",
	    "for writers to stop; then their endpoint is destroyed"),
	DUR(timers, lease, DURATION, 10 * MS, 24 * HOUR, "30s",
	    "an open that decode does not renew ends after it"),

	DUR(stop, drain, DURATION, 0, HOUR, "10s", "at stop: rooms in motion may end within it"),

	CHOICE(policy, allow, allow_choices, "listed",
	       "who may connect: listed users, or all that can open the socket"),
};

struct unit {
	const char *name;
	uint64_t factor;
};

/* Largest first, for printing. */
static const struct unit time_units[] = {
	{ "h", HOUR }, { "m", 60 * SEC }, { "s", SEC }, { "ms", MS },
	{ "us", US },  { "ns", 1 },       { NULL, 0 },
};

static const struct unit size_units[] = {
	{ "G", KIB *MIB }, { "M", MIB }, { "k", KIB }, { "", 1 }, { NULL, 0 },
};

/* ---- state while a file is read */

struct reader {
	struct kvp_config *config;
	FILE *file;       /* borrowed */
	const char *name; /* borrowed */
	char *err;        /* the first error is kept */
	size_t err_bytes;
	unsigned line;
	bool failed;
	unsigned seen[KVP_ARRAY_SIZE(keys)]; /* line of each key, 0: not yet */
};

KVP_PRINTF(2, 3)
static void reader_fail(struct reader *reader, const char *fmt, ...)
{
	va_list args;
	int n;

	if (reader->failed)
		return;

	reader->failed = true;
	n = snprintf(reader->err, reader->err_bytes, "%s:%u: ", reader->name, reader->line);
	if (n < 0 || (size_t)n >= reader->err_bytes)
		return;

	va_start(args, fmt);
	(void)vsnprintf(reader->err + n, reader->err_bytes - (size_t)n, fmt, args); /* may be cut */
	va_end(args);
}

/* ---- values */

static const struct unit *units_of(enum kvp_config_type type)
{
	return type == KVP_CONFIG_DURATION || type == KVP_CONFIG_SPIN ? time_units : size_units;
}

/* Digits and a unit; a time needs its unit unless it is 0. Returns 0, or -EINVAL. */
static int parse_number(const char *text, const struct unit *units, uint64_t *out)
{
	uint64_t value;
	char *end;

	if (!isdigit((unsigned char)*text))
		return -EINVAL;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno)
		return -EINVAL;
	while (*end == ' ')
		end++;

	for (; units->name; units++) {
		if (strcmp(units->name, end) != 0 && !(value == 0 && *end == '\0'))
			continue;
		return __builtin_mul_overflow(value, units->factor, out) ? -EINVAL : 0;
	}
	return -EINVAL;
}

static int parse_octal(const char *text, uint64_t *out)
{
	char *end;

	if (!isdigit((unsigned char)*text))
		return -EINVAL;
	*out = strtoull(text, &end, 8); /* an overflow is beyond every range */
	return *end ? -EINVAL : 0;
}

static int parse_bool(const char *text, uint64_t *out)
{
	static const char *const no_yes[][3] = { { "no", "off", "false" },
						 { "yes", "on", "true" } };

	for (uint64_t value = 0; value < 2; value++) {
		for (size_t i = 0; i < KVP_ARRAY_SIZE(no_yes[value]); i++) {
			if (strcmp(text, no_yes[value][i]) == 0) {
				*out = value;
				return 0;
			}
		}
	}
	return -EINVAL;
}

static int parse_choice(const char *text, const struct kvp_config_choice *choice, uint64_t *out)
{
	for (; choice->name; choice++) {
		if (strcmp(text, choice->name) == 0) {
			*out = choice->value;
			return 0;
		}
	}
	return -EINVAL;
}

static int parse_value(const struct kvp_config_key *key, const char *text, uint64_t *out)
{
	switch (key->type) {
	case KVP_CONFIG_BOOL:
		return parse_bool(text, out);
	case KVP_CONFIG_CHOICE:
		return parse_choice(text, key->choices, out);
	case KVP_CONFIG_MODE:
		return parse_octal(text, out);
	case KVP_CONFIG_SPIN:
		if (strcmp(text, "auto") == 0) {
			*out = SPIN_AUTO;
			return 0;
		}
		return parse_number(text, time_units, out);
	default:
		return parse_number(text, units_of(key->type), out);
	}
}

/* Writes a number in its largest unit without a rest. */
static void format_number(char *buf, size_t bytes, enum kvp_config_type type, uint64_t value)
{
	const struct unit *unit = units_of(type);

	if (type == KVP_CONFIG_MODE) {
		(void)snprintf(buf, bytes, "%04" PRIo64, value);
		return;
	}
	if (value == 0) {
		(void)snprintf(buf, bytes, "0");
		return;
	}
	while (value % unit->factor != 0)
		unit++;
	(void)snprintf(buf, bytes, "%" PRIu64 "%s", value / unit->factor, unit->name);
}

static void format_range(const struct kvp_config_key *key, char *buf, size_t bytes)
{
	char min[32], max[32];
	size_t n = 0;

	switch (key->type) {
	case KVP_CONFIG_BOOL:
		(void)snprintf(buf, bytes, "yes, no");
		return;
	case KVP_CONFIG_CHOICE:
		for (const struct kvp_config_choice *c = key->choices; c->name && n < bytes; c++) {
			int r = snprintf(buf + n, bytes - n, "%s%s", n ? ", " : "", c->name);

			n += r > 0 ? (size_t)r : 0;
		}
		return;
	default:
		format_number(min, sizeof(min), key->type, key->min);
		format_number(max, sizeof(max), key->type, key->max);
		(void)snprintf(buf, bytes, "%s%s to %s%s",
			       key->type == KVP_CONFIG_SPIN ? "auto, " : "", min, max,
			       units_of(key->type) == time_units ? " (units ns, us, ms, s, m, h)"
								 : "");
	}
}

static void field_store(struct kvp_config *config, const struct kvp_config_key *key, uint64_t value)
{
	/* Ranges in the table fit the field; little-endian is all that we build for. */
	_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "narrowing copies low bytes");
	memcpy((char *)config + key->offset, &value, key->size);
}

static uint64_t field_load(const struct kvp_config *config, const struct kvp_config_key *key)
{
	uint64_t value = 0;

	memcpy(&value, (const char *)config + key->offset, key->size);
	return value;
}

/* Splits "host:port" or "[v6]:port"; returns 0, or -EINVAL. */
static int split_address(const char *address, char *host, size_t host_bytes)
{
	const char *colon = strrchr(address, ':');
	size_t n = colon ? (size_t)(colon - address) : 0;
	uint64_t port;

	if (n == 0 || parse_number(colon + 1, &size_units[3], &port) < 0 || port > 65535)
		return -EINVAL;
	if (address[0] == '[' && address[n - 1] == ']') {
		address++;
		n -= 2;
	} else if (memchr(address, ':', n)) {
		return -EINVAL; /* which colon is the last? */
	}
	if (n == 0 || n >= host_bytes)
		return -EINVAL;

	memcpy(host, address, n);
	host[n] = '\0';
	return 0;
}

int kvp_config_network(const char *text, struct kvp_network *net)
{
	char ip[INET6_ADDRSTRLEN];
	size_t n = strcspn(text, "/");
	uint64_t bits;

	if (n == 0 || n >= sizeof(ip))
		return -EINVAL;
	memcpy(ip, text, n);
	ip[n] = '\0';
	*net = (struct kvp_network){ .v6 = strchr(ip, ':') != NULL };
	if (inet_pton(net->v6 ? AF_INET6 : AF_INET, ip, net->addr) != 1)
		return -EINVAL;
	bits = net->v6 ? 128 : 32;
	if (text[n] == '/' &&
	    (parse_number(text + n + 1, &size_units[3], &bits) < 0 || bits > (net->v6 ? 128 : 32)))
		return -EINVAL;
	net->bits = (uint8_t)bits;
	return 0;
}

/* ---- texts of a form of their own */

static bool are_networks(const char *text)
{
	char list[KVP_CONFIG_LIST_MAX], *rest = list, *item;
	struct kvp_network net;

	(void)snprintf(list, sizeof(list), "%s", text); /* what is cut is refused for its length */
	while ((item = strtok_r(rest, ", \t", &rest)))
		if (kvp_config_network(item, &net) < 0)
			return false;
	return true;
}

/* Others are told these, and refuse what is none. */
static bool is_label(const char *text)
{
	const struct kvp_check quiet = { .err = NULL };

	return kvp_check_label(&quiet, "", text, 0, KVP_CONFIG_STR_MAX) == 0;
}

static bool is_address(const char *text)
{
	const struct kvp_check quiet = { .err = NULL };
	char host[KVP_CONFIG_STR_MAX];

	return !text[0] || (split_address(text, host, sizeof(host)) == 0 &&
			    kvp_check_word(&quiet, "", text, 0, KVP_CONFIG_STR_MAX) == 0);
}

/* Each GPU has one lane. */
static bool are_gpus(const char *text)
{
	char list[KVP_CONFIG_LIST_MAX], *rest = list, *item;

	(void)snprintf(list, sizeof(list), "%s", text); /* what is cut is refused for its length */
	while ((item = strtok_r(rest, ", ", &rest))) {
		size_t n = strlen(item);

		for (const char *at = rest; at && (at = strstr(at, item)); at += n)
			if (strchr(", ", at[n]) && strchr(", ", at[-1]))
				return false;
	}
	return true;
}

static bool is_gid_index(const char *text)
{
	return strcmp(text, "auto") == 0 ||
	       (strlen(text) <= 3 && strspn(text, "0123456789") == strlen(text));
}

static const struct form {
	const char *section, *key;
	bool (*fits)(const char *text);
	const char *allowed;
} forms[] = {
	{ "node", "name", is_label, "UTF-8 without control characters" },
	{ "node", "advertise", is_address,
	  "host:port, port 0 to 65535, with brackets around an IPv6 address" },
	{ "peer", "listen", is_address,
	  "address:port, port 0 to 65535, with brackets around an IPv6 address" },
	{ "gpu", "devices", are_gpus, "none, all, or UUIDs separated by commas, each once" },
	{ "peer", "allow", are_networks, "networks such as 10.0.0.0/8, separated by commas" },
	{ "verbs", "gid_index", is_gid_index, "auto, 0 to 999" },
};

/* What the key takes, if that is not the text; NULL: it is fine. */
static const char *form_missed(const struct kvp_config_key *key, const char *text)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(forms); i++)
		if (strcmp(forms[i].section, key->section) == 0 &&
		    strcmp(forms[i].key, key->key) == 0 && !forms[i].fits(text))
			return forms[i].allowed;
	return NULL;
}

static bool key_is_text(const struct kvp_config_key *key)
{
	return key->type == KVP_CONFIG_STR || key->type == KVP_CONFIG_LIST;
}

/* Returns 0, or -EINVAL: text out of the key's length. */
static int store_text(struct kvp_config *config, const struct kvp_config_key *key, const char *text,
		      bool append)
{
	char *field = (char *)config + key->offset;
	size_t old = append ? strlen(field) : 0;
	size_t bytes = strlen(text);

	if (old)
		old++; /* for the comma */
	if (bytes < key->min || old + bytes > key->max)
		return -EINVAL;
	if (old)
		field[old - 1] = ',';
	memcpy(field + old, text, bytes + 1);
	return 0;
}

static void set_text(struct reader *reader, const struct kvp_config_key *key, const char *text,
		     bool again)
{
	const char *allowed = form_missed(key, text);

	if (allowed)
		reader_fail(reader, "%s.%s = \"%s\": allowed: %s", key->section, key->key, text,
			    allowed);
	else if (store_text(reader->config, key, text, again) < 0)
		reader_fail(reader, "%s.%s = \"%s\": allowed are %" PRIu64 " to %" PRIu64 " bytes",
			    key->section, key->key, text, key->min, key->max);
}

static void set_number(struct reader *reader, const struct kvp_config_key *key, const char *text)
{
	uint64_t value = 0;
	char range[128];
	bool fits = parse_value(key, text, &value) == 0;

	if (key->type != KVP_CONFIG_CHOICE && !(key->type == KVP_CONFIG_SPIN && value == SPIN_AUTO))
		fits = fits && value >= key->min && value <= key->max;
	if (fits) {
		field_store(reader->config, key, value);
		return;
	}
	format_range(key, range, sizeof(range));
	reader_fail(reader, "%s.%s = \"%s\": allowed: %s", key->section, key->key, text, range);
}

/* ---- sections and keys */

static const struct kvp_config_key *key_find(const char *section, const char *name)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(keys); i++) {
		if (strcmp(keys[i].section, section) == 0 && strcmp(keys[i].key, name) == 0)
			return &keys[i];
	}
	return NULL;
}

/* What there is, for who has misspelt it: the keys of a section, or (NULL) the sections. */
static const char *known(const char *section, char *buf, size_t bytes)
{
	const char *last = "";
	size_t n = 0;

	buf[0] = '\0';
	for (size_t i = 0; i < KVP_ARRAY_SIZE(keys) && n < bytes; i++) {
		const char *name = section ? keys[i].key : keys[i].section;
		int r;

		if (section ? strcmp(keys[i].section, section) != 0 : strcmp(last, name) == 0)
			continue;
		last = name;
		r = snprintf(buf + n, bytes - n, "%s%s", n ? ", " : "", name);
		n += r > 0 ? (size_t)r : 0;
	}
	return buf;
}

static bool section_known(const char *section)
{
	for (size_t i = 0; i < KVP_ARRAY_SIZE(keys); i++) {
		if (strcmp(keys[i].section, section) == 0)
			return true;
	}
	return false;
}

/* "uid.N" or "gid.N": returns 0 and the id, or -EINVAL. */
static int policy_section(const char *section, bool *is_gid, uint32_t *id)
{
	uint64_t value;

	if (strncmp(section, "uid.", 4) != 0 && strncmp(section, "gid.", 4) != 0)
		return -EINVAL;
	if (!isdigit((unsigned char)section[4]))
		return -EINVAL;
	if (parse_number(section + 4, &size_units[3], &value) < 0 || value >= UINT32_MAX)
		return -EINVAL;

	*is_gid = section[0] == 'g';
	*id = (uint32_t)value;
	return 0;
}

static struct kvp_policy *policy_find(const struct kvp_config *config, bool is_gid, uint32_t id)
{
	for (uint32_t i = 0; i < config->n_policies; i++) {
		const struct kvp_policy *policy = &config->policies[i];

		if (policy->is_gid == is_gid && policy->id == id)
			return (struct kvp_policy *)policy;
	}
	return NULL;
}

/* "gpu.X": returns X, or NULL. */
static const char *gpu_section(const char *section)
{
	return strncmp(section, "gpu.", 4) == 0 && section[4] ? section + 4 : NULL;
}

static struct kvp_gpu_nics *gpu_find(struct kvp_config *config, const char *gpu)
{
	for (uint32_t i = 0; i < config->n_gpu_nics; i++) {
		if (strcmp(config->gpu_nics[i].gpu, gpu) == 0)
			return &config->gpu_nics[i];
	}
	return NULL;
}

static void add_gpu(struct reader *reader, const char *gpu)
{
	struct kvp_config *config = reader->config;
	struct kvp_gpu_nics *nics = &config->gpu_nics[config->n_gpu_nics];

	if (gpu_find(config, gpu)) {
		reader_fail(reader, "[gpu.%s]: given twice", gpu);
	} else if (config->n_gpu_nics == KVP_CONFIG_GPUS_MAX || strlen(gpu) >= sizeof(nics->gpu)) {
		reader_fail(reader, "[gpu.%s]: more than %u such sections, or too long a name", gpu,
			    KVP_CONFIG_GPUS_MAX);
	} else {
		memcpy(nics->gpu, gpu, strlen(gpu) + 1);
		config->n_gpu_nics++;
	}
}

static void set_gpu(struct reader *reader, const char *gpu, const char *name, const char *text)
{
	struct kvp_gpu_nics *nics = gpu_find(reader->config, gpu);

	if (strcmp(name, "nics") != 0)
		reader_fail(reader, "gpu.%s.%s: unknown key; known: nics", gpu, name);
	else if (nics && (nics->nics[0] || !text[0] || strlen(text) >= sizeof(nics->nics)))
		reader_fail(reader, "gpu.%s.nics = \"%s\": once, 1 to %zu bytes", gpu, text,
			    sizeof(nics->nics) - 1);
	else if (nics)
		memcpy(nics->nics, text, strlen(text) + 1);
}

static bool rail_given(const char *list, const char *nic)
{
	size_t n = strlen(nic);

	for (const char *at = list; at; at = strchr(at, ',')) {
		at += *at == ',';
		if (strncmp(at, nic, n) == 0 && at[n] == '=')
			return true;
	}
	return false;
}

/* rail_of.NIC = number */
static void set_rail(struct reader *reader, const char *nic, const char *text)
{
	char *list = reader->config->rail_of;
	size_t used = strlen(list), room = sizeof(reader->config->rail_of) - used;
	uint64_t number;

	if (parse_number(text, &size_units[3], &number) < 0 || number > 255)
		reader_fail(reader, "rail_of.%s = \"%s\": allowed: 0 to 255", nic, text);
	else if (rail_given(list, nic))
		reader_fail(reader, "rail_of.%s: given twice", nic);
	else if ((size_t)snprintf(list + used, room, "%s%s=%u", used ? "," : "", nic,
				  (unsigned)number) >= room)
		reader_fail(reader, "rail_of.%s: too many", nic);
}

/* A section header: unknown ones are refused even when they are empty. */
static void read_section(struct reader *reader, const char *section)
{
	struct kvp_config *config = reader->config;
	bool is_gid;
	uint32_t id;

	if (section_known(section) || strcmp(section, "rail_of") == 0)
		return;
	if (gpu_section(section)) {
		add_gpu(reader, gpu_section(section));
		return;
	}
	if (policy_section(section, &is_gid, &id) < 0) {
		char names[256];

		reader_fail(reader,
			    "[%s]: unknown section; known: %s, gpu.UUID, rail_of, uid.NUMBER, "
			    "gid.NUMBER",
			    section, known(NULL, names, sizeof(names)));
		return;
	}
	if (policy_find(config, is_gid, id)) {
		reader_fail(reader, "[%s]: given twice", section);
		return;
	}
	if (config->n_policies == KVP_CONFIG_POLICIES_MAX) {
		reader_fail(reader, "[%s]: more than %u policy sections", section,
			    KVP_CONFIG_POLICIES_MAX);
		return;
	}
	/* UINT32_MAX: as in [limits], which may follow. */
	config->policies[config->n_policies++] = (struct kvp_policy){
		.is_gid = is_gid,
		.id = id,
		.max_sessions = UINT32_MAX,
		.max_rooms = UINT32_MAX,
		.max_pools = UINT32_MAX,
	};
}

/* NULL: no key of that name. */
static uint32_t *policy_max(struct kvp_policy *policy, const char *name)
{
	if (strcmp(name, "max_sessions") == 0)
		return &policy->max_sessions;
	if (strcmp(name, "max_rooms") == 0)
		return &policy->max_rooms;
	return strcmp(name, "max_pools") == 0 ? &policy->max_pools : NULL;
}

static void set_policy(struct reader *reader, struct kvp_policy *policy, const char *section,
		       const char *name, const char *text)
{
	bool sessions = strcmp(name, "max_sessions") == 0;
	const struct kvp_config_key *limit = key_find(sessions ? "client" : "limits", name);
	uint32_t *max = policy_max(policy, name);
	uint64_t value;

	if (strcmp(name, "admin") == 0) {
		if (parse_bool(text, &value) < 0)
			reader_fail(reader, "%s.admin = \"%s\": allowed: yes, no", section, text);
		else
			policy->admin = value;
	} else if (max) {
		if (parse_number(text, size_units, &value) < 0 || value > limit->max)
			reader_fail(reader, "%s.%s = \"%s\": allowed: 0 to %" PRIu64, section, name,
				    text, limit->max);
		else if (*max != UINT32_MAX)
			reader_fail(reader, "%s.%s: given twice", section, name);
		else
			*max = (uint32_t)value;
	} else {
		reader_fail(reader,
			    "%s.%s: unknown key; known: max_sessions, max_rooms, max_pools, admin",
			    section, name);
	}
}

static void unknown_key(struct reader *reader, const char *section, const char *name)
{
	char names[256];

	if (section[0])
		reader_fail(reader, "%s.%s: unknown key; known: %s", section, name,
			    known(section, names, sizeof(names)));
	else
		reader_fail(reader, "%s: a key before the first [section]", name);
}

static int on_value(void *arg, const char *section, const char *name, const char *value)
{
	struct reader *reader = arg;
	const struct kvp_config_key *key = key_find(section, name);
	bool is_gid;
	uint32_t id;
	unsigned *seen;

	if (policy_section(section, &is_gid, &id) == 0) {
		struct kvp_policy *policy = policy_find(reader->config, is_gid, id);

		if (policy)
			set_policy(reader, policy, section, name, value);
		return 1;
	}
	if (gpu_section(section)) {
		set_gpu(reader, gpu_section(section), name, value);
		return 1;
	}
	if (strcmp(section, "rail_of") == 0) {
		set_rail(reader, name, value);
		return 1;
	}
	if (!key) {
		unknown_key(reader, section, name);
		return 1;
	}

	seen = &reader->seen[key - keys];
	if (*seen && key->type != KVP_CONFIG_LIST)
		reader_fail(reader, "%s.%s: given twice, first in line %u", section, name, *seen);
	else if (key_is_text(key))
		set_text(reader, key, value, *seen != 0);
	else
		set_number(reader, key, value);
	*seen = reader->line;
	return 1;
}

/*
 * Gives inih one line without leading blanks (it would take an indented line for the continuation
 * of the last value), counts lines, and looks at section headers, of which inih tells nothing.
 */
static char *read_line(char *buf, int bytes, void *arg)
{
	struct reader *reader = arg;
	char *text, *end;

	if (reader->failed || !fgets(buf, bytes, reader->file))
		return NULL;

	reader->line++;
	if (!strchr(buf, '\n') && strlen(buf) + 1 == (size_t)bytes) {
		reader_fail(reader, "line of more than %d bytes", bytes - 2);
		return NULL;
	}

	text = buf + strspn(buf, " \t");
	memmove(buf, text, strlen(text) + 1);
	if (buf[0] == '[') {
		char section[KVP_CONFIG_SECTION_MAX] = ""; /* inih cuts what is longer */

		end = strchr(buf, ']');
		if (end && (size_t)(end - buf) <= sizeof(section)) {
			memcpy(section, buf + 1, (size_t)(end - buf) - 1);
			read_section(reader, section);
		} else {
			reader_fail(reader, "section header without ], or too long");
		}
	}
	return reader->failed ? NULL : buf;
}

/* ---- defaults */

static bool few_cores(void)
{
	cpu_set_t cpus;

	return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 && CPU_COUNT(&cpus) < SPIN_MIN_CORES;
}

static void resolve(struct kvp_config *config)
{
	if (config->lane.spin_ns == SPIN_AUTO)
		config->lane.spin_ns = SPIN_AUTO_NS;
	/* A lane that only spins takes the core that its peer needs. */
	config->lane.spin_yields = few_cores();

	if (!config->node.name[0]) {
		if (gethostname(config->node.name, sizeof(config->node.name)) < 0)
			(void)snprintf(config->node.name, sizeof(config->node.name), "node");
		config->node.name[KVP_MAX_LABEL] = '\0';
	}

	for (uint32_t i = 0; i < config->n_policies; i++) {
		struct kvp_policy *policy = &config->policies[i];

		policy->max_sessions = KVP_MIN(policy->max_sessions, config->client.max_sessions);
		policy->max_rooms = KVP_MIN(policy->max_rooms, config->limits.max_rooms);
		policy->max_pools = KVP_MIN(policy->max_pools, config->limits.max_pools);
	}
}

static void set_defaults(struct kvp_config *config)
{
	memset(config, 0, sizeof(*config));
	for (size_t i = 0; i < KVP_ARRAY_SIZE(keys); i++) {
		const struct kvp_config_key *key = &keys[i];
		uint64_t value = 0;
		int r;

		if (key_is_text(key)) {
			(void)store_text(config, key, key->def,
					 false); /* a test checks the table */
			continue;
		}
		r = parse_value(key, key->def, &value);
		assert(r == 0);
		field_store(config, key, value);
	}
}

void kvp_config_defaults(struct kvp_config *config)
{
	set_defaults(config);
	resolve(config);
}

/* ---- checks of the whole */

static bool host_is_loopback(const char *host)
{
	unsigned char v4[4], v6[16];

	if (strcmp(host, "localhost") == 0)
		return true;
	if (inet_pton(AF_INET, host, v4) == 1)
		return v4[0] == 127;
	return inet_pton(AF_INET6, host, v6) == 1 && memcmp(v6, &in6addr_loopback, sizeof(v6)) == 0;
}

static const char *check_order(const struct kvp_config *config)
{
	if (config->peer.lost_after_ns < 2 * config->peer.heartbeat_ns)
		return "peer.lost_after must be at least twice peer.heartbeat";
	if (config->peer.retry_max_ns < config->peer.retry_min_ns)
		return "peer.retry_max must not be below peer.retry_min";
	if ((config->ucx.port_lo == 0) != (config->ucx.port_hi == 0))
		return "ucx.port_lo and ucx.port_hi must both be given, or none";
	if (config->ucx.port_hi < config->ucx.port_lo)
		return "ucx.port_hi must not be below ucx.port_lo";
	if (config->verbs.mtu > 0 &&
	    (config->verbs.mtu < 256 || (config->verbs.mtu & (config->verbs.mtu - 1)) != 0))
		return "verbs.mtu must be 0, 256, 512, 1024, 2048 or 4096";
	return NULL;
}

/* Who reaches the data port of a daemon can write its memory: see the comments in kvpackd.conf. */
static bool admits_others(const struct kvp_config *config)
{
	if (config->policy.allow == KVP_ALLOW_ALL)
		return true;

	for (uint32_t i = 0; i < config->n_policies; i++) {
		const struct kvp_policy *policy = &config->policies[i];

		if (policy->is_gid || (policy->id != geteuid() && policy->id != 0))
			return true;
	}
	return false;
}

/* Who listens at all addresses is called by its name. */
static bool can_be_called(const struct kvp_config *config, const char *host)
{
	const struct kvp_check quiet = { .err = NULL };
	const char *name = config->node.name;

	return config->node.advertise[0] ||
	       (strcmp(host, "0.0.0.0") != 0 && strcmp(host, "::") != 0) ||
	       (kvp_check_word(&quiet, "", name, 1, KVP_MAX_LABEL) == 0 && !strchr(name, ':'));
}

static const char *check_peers(const struct kvp_config *config)
{
	char host[KVP_CONFIG_STR_MAX];
	bool trusted = config->ucx.tcp_network == KVP_TRUST_TRUSTED;

	if (!config->peer.listen[0])
		return NULL;
	if (split_address(config->peer.listen, host, sizeof(host)) < 0)
		return "peer.listen must be address:port, with brackets around an IPv6 address";
	if (!can_be_called(config, host))
		return "peer.listen is at all addresses, so that peers would call node.name, "
		       "which is no host name: set node.advertise";
	if (!host_is_loopback(host) && config->peer.plaintext != KVP_TRUST_TRUSTED)
		return "peer.listen is beyond loopback, where the control channel has no TLS: "
		       "only with peer.plaintext = trusted";
	if (config->data.transport == KVP_TRANSPORT_VERBS || config->ucx.network == KVP_UCX_RDMA)
		return NULL; /* the card checks keys and bounds of what peers write */
	if (strcmp(config->ucx.interface, "lo") != 0 && !trusted)
		return "ucx.interface is not lo, and who reaches the data ports can write this "
		       "daemon's memory: only with ucx.tcp_network = trusted";
	if (admits_others(config) && !trusted)
		return "the policy admits other users than the daemon's own, who can reach the "
		       "data ports on loopback and through them write this daemon's memory: with "
		       "peers only if ucx.tcp_network = trusted";
	return NULL;
}

int kvp_config_read(struct kvp_config *config, FILE *file, const char *name, char *err,
		    size_t err_bytes)
{
	struct reader reader = {
		.config = config, .file = file, .name = name, .err = err, .err_bytes = err_bytes
	};
	const char *wrong;
	int r;

	set_defaults(config);
	r = file ? ini_parse_stream(read_line, &reader, on_value, &reader) : 0;
	if (!reader.failed && r > 0) {
		reader.line = (unsigned)r;
		reader_fail(&reader, "neither [section] nor key = value");
	}
	if (!reader.failed && file && ferror(file)) {
		(void)snprintf(err, err_bytes, "%s: cannot be read: %s", name, strerror(errno));
		return -EIO;
	}
	if (reader.failed)
		return -EINVAL;

	resolve(config);
	wrong = check_order(config);
	if (!wrong)
		wrong = check_peers(config);
	if (!wrong)
		return 0;

	(void)snprintf(err, err_bytes, "%s: %s", name, wrong);
	return -EINVAL;
}

int kvp_config_load(struct kvp_config *config, const char *path, char *err, size_t err_bytes)
{
	FILE *file;
	int r;

	if (!path)
		return kvp_config_read(config, NULL, "defaults", err, err_bytes);

	file = fopen(path, "re");
	if (!file) {
		r = -errno;
		(void)snprintf(err, err_bytes, "%s: %s", path, strerrordesc_np(-r));
		return r;
	}
	r = kvp_config_read(config, file, path, err, err_bytes);
	(void)fclose(file); /* only read */
	return r;
}

/* ---- use */

const struct kvp_config_key *kvp_config_keys(size_t *n_keys)
{
	*n_keys = KVP_ARRAY_SIZE(keys);
	return keys;
}

int kvp_config_policy(const struct kvp_config *config, uint32_t uid, uint32_t gid,
		      struct kvp_policy *policy)
{
	const struct kvp_policy *found = policy_find(config, false, uid);
	bool own = uid == 0 || uid == geteuid();

	if (!found)
		found = policy_find(config, true, gid);
	if (found) {
		*policy = *found;
		return 0;
	}
	if (!own && config->policy.allow != KVP_ALLOW_ALL)
		return -EACCES;

	*policy = (struct kvp_policy){
		.id = uid,
		.admin = own,
		.max_sessions = config->client.max_sessions,
		.max_rooms = config->limits.max_rooms,
		.max_pools = config->limits.max_pools,
	};
	return 0;
}

static void print_key(const struct kvp_config *config, const struct kvp_config_key *key, FILE *out)
{
	uint64_t value = key_is_text(key) ? 0 : field_load(config, key);
	const struct kvp_config_choice *choice = key->choices;
	char text[32];

	(void)fprintf(out, "# %s\n%s = ", key->help, key->key);
	if (key_is_text(key)) {
		(void)fprintf(out, "%s\n", (const char *)config + key->offset);
	} else if (key->type == KVP_CONFIG_BOOL) {
		(void)fprintf(out, "%s\n", value ? "yes" : "no");
	} else if (choice) {
		while (choice->name && choice->value != value)
			choice++;
		(void)fprintf(out, "%s\n", choice->name ? choice->name : "?");
	} else {
		format_number(text, sizeof(text), key->type, value);
		(void)fprintf(out, "%s\n", text);
	}
}

const char *kvp_config_gpu_nics(const struct kvp_config *config, const char *uuid, uint32_t idx)
{
	char number[12];

	(void)snprintf(number, sizeof(number), "%u", idx); /* fits */
	for (uint32_t i = 0; i < config->n_gpu_nics; i++) {
		const struct kvp_gpu_nics *nics = &config->gpu_nics[i];

		if (nics->nics[0] && (!strcmp(nics->gpu, uuid) || !strcmp(nics->gpu, number)))
			return nics->nics;
	}
	return config->verbs.device;
}

static void print_rails(const struct kvp_config *config, FILE *out)
{
	char list[KVP_CONFIG_LIST_MAX], *rest = list, *rail;

	if (!config->rail_of[0])
		return;
	memcpy(list, config->rail_of, sizeof(list));
	(void)fprintf(out, "\n[rail_of]\n");
	while ((rail = strtok_r(rest, ",", &rest)))
		(void)fprintf(out, "%.*s = %s\n", (int)strcspn(rail, "="), rail,
			      strchr(rail, '=') + 1);
}

void kvp_config_print(const struct kvp_config *config, FILE *out)
{
	const char *section = "";

	for (size_t i = 0; i < KVP_ARRAY_SIZE(keys); i++) {
		if (strcmp(section, keys[i].section) != 0) {
			(void)fprintf(out, "%s[%s]\n", i ? "\n" : "", keys[i].section);
			section = keys[i].section;
		}
		print_key(config, &keys[i], out);
	}
	for (uint32_t i = 0; i < config->n_policies; i++) {
		const struct kvp_policy *policy = &config->policies[i];

		(void)fprintf(out,
			      "\n[%s.%u]\nmax_sessions = %u\nmax_rooms = %u\nmax_pools = %u\n"
			      "admin = %s\n",
			      policy->is_gid ? "gid" : "uid", policy->id, policy->max_sessions,
			      policy->max_rooms, policy->max_pools, policy->admin ? "yes" : "no");
	}
	for (uint32_t i = 0; i < config->n_gpu_nics; i++)
		(void)fprintf(out, "\n[gpu.%s]\nnics = %s\n", config->gpu_nics[i].gpu,
			      config->gpu_nics[i].nics);
	print_rails(config, out);
}
