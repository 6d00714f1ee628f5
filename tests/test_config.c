/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "daemon/config.h"

static struct kvp_config config;
static char err[512];

static int read_text(const char *text)
{
	FILE *file = fmemopen((void *)text, strlen(text), "r");
	int r;

	cr_assert_not_null(file);
	err[0] = '\0';
	r = kvp_config_read(&config, file, "test.conf", err, sizeof(err));
	fclose(file);
	return r;
}

Test(config, defaults)
{
	kvp_config_defaults(&config);
	cr_assert_str_eq(config.client.socket, "/run/kvpack/sock");
	cr_assert_eq(config.client.mode, 0660);
	cr_assert_eq(config.timers.open_ns, 300 * UINT64_C(1000000000));
	cr_assert_eq(config.host.slot_bytes, 512 << 10);
	cr_assert_eq(config.data.mode, KVP_DATA_AUTO);
	cr_assert_eq(config.data.checksum, KVP_CHECKSUM_OFF);
	cr_assert_eq(config.data.direct_run_bytes, 4096);
	cr_assert_eq(config.limits.max_room_pages, 1 << 20);
	cr_assert_leq(config.lane.spin_ns, 50000);
	cr_assert(config.lane.pack);
	cr_assert_neq(config.node.name[0], '\0');
	cr_assert_str_eq(config.peer.listen, "");
	cr_assert_eq(kvp_config_load(&config, NULL, err, sizeof(err)), 0, "%s", err);
}

Test(config, the_table_is_sound)
{
	size_t n;
	const struct kvp_config_key *keys = kvp_config_keys(&n);
	char text[256];

	for (size_t i = 0; i < n; i++) {
		cr_assert_leq(keys[i].offset + keys[i].size, sizeof(config));
		if (keys[i].type != KVP_CONFIG_STR && keys[i].type != KVP_CONFIG_LIST &&
		    keys[i].size < 8)
			cr_assert_lt(keys[i].max >> (8 * keys[i].size), 1);
		/* each default is a value that the file may have */
		snprintf(text, sizeof(text), "[%s]\n%s = %s\n", keys[i].section, keys[i].key,
			 keys[i].def);
		cr_assert_eq(read_text(text), 0, "%s", err);
	}
}

Test(config, values_and_units)
{
	cr_assert_eq(read_text("# comment\n[timers]\noffer = 1500ms ; why\n  open = 2m\nlease=1h\n"
			       "[lane]\nspin = 0\npack = off\n"
			       "[host]\nslot_bytes = 65536\nslots = 1k\n"
			       "[node]\nname = gpu-a\n[client]\nmode = 0600\ngroup =\n"
			       "[log]\nlevel = debug\n"),
		     0, "%s", err);
	cr_assert_eq(config.timers.offer_ns, UINT64_C(1500000000));
	cr_assert_eq(config.timers.open_ns, UINT64_C(120000000000));
	cr_assert_eq(config.timers.lease_ns, UINT64_C(3600000000000));
	cr_assert_eq(config.lane.spin_ns, 0);
	cr_assert_not(config.lane.pack);
	cr_assert_eq(config.host.slot_bytes, 65536);
	cr_assert_eq(config.host.slots, 1024);
	cr_assert_str_eq(config.node.name, "gpu-a");
	cr_assert_eq(config.client.mode, 0600);
	cr_assert_str_eq(config.client.group, "");
	cr_assert_eq(config.log.level, KVP_LOG_DEBUG);
}

Test(config, lists_append)
{
	cr_assert_eq(read_text("[peer]\nallow = 10.0.0.0/8\nallow = 192.168.1.0/24\n"), 0);
	cr_assert_str_eq(config.peer.allow, "10.0.0.0/8,192.168.1.0/24");
}

struct refusal {
	const char *text;
	const char *says; /* in the message */
};

Test(config, refusals_name_line_key_value_and_range)
{
	static const struct refusal refusals[] = {
		{ "[timers]\n\noffer = 25h\n",
		  "test.conf:3: timers.offer = \"25h\": allowed: 10ms to 24h" },
		{ "[timers]\noffer = 30\n", "units ns, us, ms, s, m, h" },
		{ "[timers]\noffer = 5 days\n", "timers.offer = \"5 days\"" },
		{ "[timers]\noffer = -5s\n", "\"-5s\"" },
		{ "[timers]\noffer =\n", "\"\"" },
		{ "[timers]\noffer = 99999999999999999999s\n", "allowed" },
		{ "[timers]\noffer = 18446744073709551615h\n", "allowed" },
		{ "[timers]\noffer = 30s\noffer = 31s\n",
		  "test.conf:3: timers.offer: given twice, first in line 2" },
		{ "[timers]\noffers = 30s\n",
		  "test.conf:2: timers.offers: unknown key; known: offer, open, progress, fence, "
		  "drain, lease" },
		{ "[timer]\n",
		  "test.conf:1: [timer]: unknown section; known: node, log, client, " },
		{ "[0123456789012345678901234567890123456789012345678]\n", "too long" },
		{ "[host]\nslot_bytes = 1k\n", "host.slot_bytes = \"1k\": allowed: 64k to 64M" },
		{ "[host]\nslots = 1\n", "allowed: 2 to 4k" },
		{ "[client]\nmode = 0860\n", "allowed: 0600 to 0777" },
		{ "[client]\nsocket =\n", "client.socket = \"\": allowed are 1 to 107 bytes" },
		{ "[lane]\nspin = 1s\n", "allowed: auto, 0 to 10ms" },
		{ "[lane]\npack = maybe\n", "allowed: yes, no" },
		{ "[policy]\nallow = some\n", "allowed: listed, all" },
		{ "[log]\nlevel = loud\n", "allowed: error, warning, notice, info, debug" },
		{ "name = x\n", "test.conf:1: name: a key before the first [section]" },
		{ "[node]\nname = "
		  "0123456789012345678901234567890123456789012345678901234567890123\n",
		  "allowed are 0 to 63 bytes" },
		{ "[node]\nname = caf\xe9\n", "allowed: UTF-8 without control characters" },
		{ "[node]\nadvertise = my host:7470\n", "allowed: host:port" },
		{ "[node]\nname = gpu node\n[peer]\nlisten = 0.0.0.0:1\nplaintext = trusted\n",
		  "test.conf: peer.listen is at all addresses, so that peers would call" },
		{ "[gpu]\ndevices = GPU-1, GPU-12, GPU-1\n", "each once" },
		{ "[rail_of]\nmlx5_10 = 1\nmlx5_1 = 1\nmlx5_10 = 2\n",
		  "test.conf:4: rail_of.mlx5_10: given twice" },
		{ "[uid.1]\nmax_pools = 1\nmax_rooms = 0\nmax_rooms = 2\n",
		  "test.conf:4: uid.1.max_rooms: given twice" },
		{ "[node]\nnonsense\n", "test.conf:2: neither" },
		{ "[node\n", "test.conf:1: section header without ]" },
		{ "[uid.x]\n", "[uid.x]: unknown section" },
		{ "[uid.4294967295]\n", "unknown section" },
		{ "[uid.1]\n[gid.1]\n[uid.1]\n", "test.conf:3: [uid.1]: given twice" },
		{ "[uid.1]\nmax_rooms = 2M\n", "uid.1.max_rooms = \"2M\": allowed: 0 to 1048576" },
		{ "[uid.1]\nadmin = 1\n", "allowed: yes, no" },
		{ "[uid.1]\nrooms = 1\n",
		  "uid.1.rooms: unknown key; known: max_sessions, max_rooms, max_pools, admin" },
		{ "[peer]\nheartbeat = 3s\n", "peer.lost_after must be at least twice" },
		{ "[peer]\nretry_max = 50ms\n", "peer.retry_max must not be below" },
		{ "[ucx]\nport_lo = 1000\n", "both be given" },
		{ "[ucx]\nport_lo = 1000\nport_hi = 999\n", "port_hi must not be below" },
		{ "[ucx]\nport_lo = 65536\n", "allowed: 0 to 65535" },
		{ "[peer]\nallow = 10.0.0.0/8, 10.0.0.0/33\n",
		  "test.conf:2: peer.allow = \"10.0.0.0/8, 10.0.0.0/33\": allowed: networks" },
		{ "[peer]\nallow = ::1/x\n", "allowed: networks" },
		{ "[peer]\nlisten = ::1:7470\n", "allowed: address:port, port 0 to 65535, with" },
		{ "[node]\nadvertise = gpu-a\n", "test.conf:2: node.advertise = \"gpu-a\"" },
		{ "[verbs]\ngid_index = 1000\n", "test.conf:2: verbs.gid_index = \"1000\"" },
	};

	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		cr_assert_eq(read_text(refusals[i].text), -EINVAL, "accepted: %s",
			     refusals[i].text);
		cr_assert(strstr(err, refusals[i].says), "\"%s\" lacks \"%s\"", err,
			  refusals[i].says);
	}
}

Test(config, long_lines_are_refused_not_split)
{
	char text[400];

	memset(text, 'x', sizeof(text));
	memcpy(text, "[node]\nname = ", 14);
	text[sizeof(text) - 1] = '\0';
	cr_assert_eq(read_text(text), -EINVAL);
	cr_assert(strstr(err, "test.conf:2: line of more than"), "%s", err);
}

Test(config, unreadable_file_says_which)
{
	cr_assert_eq(kvp_config_load(&config, "/nonexistent/kvpackd.conf", err, sizeof(err)),
		     -ENOENT);
	cr_assert_str_eq(err, "/nonexistent/kvpackd.conf: No such file or directory");
}

Test(config, beyond_loopback_must_be_said)
{
	cr_assert_eq(read_text("[peer]\nlisten = 127.0.0.1:0\n"), 0, "%s", err);
	cr_assert_eq(read_text("[peer]\nlisten = [::1]:7470\n"), 0, "%s", err);
	cr_assert_eq(read_text("[peer]\nlisten = localhost:7470\n"), 0, "%s", err);

	cr_assert_eq(read_text("[peer]\nlisten = 127.evil.org:7470\n"), -EINVAL);
	cr_assert_eq(read_text("[peer]\nlisten = 10.0.0.1:7470\n"), -EINVAL);
	cr_assert(strstr(err, "peer.plaintext = trusted"), "%s", err);
	cr_assert_eq(read_text("[peer]\nlisten = 10.0.0.1:7470\nplaintext = trusted\n"), 0);

	cr_assert_eq(read_text("[peer]\nlisten = 127.0.0.1\n"), -EINVAL);
	cr_assert_eq(read_text("[peer]\nlisten = 127.0.0.1:70000\n"), -EINVAL);

	cr_assert_eq(read_text("[peer]\nlisten = 127.0.0.1:0\n[ucx]\ninterface = eth0\n"), -EINVAL);
	cr_assert(strstr(err, "ucx.tcp_network = trusted"), "%s", err);
	cr_assert_eq(read_text("[peer]\nlisten = 127.0.0.1:0\n[ucx]\ninterface = eth0\n"
			       "tcp_network = trusted\n"),
		     0);
}

Test(config, a_second_user_with_peers_must_be_said)
{
	char text[256];

	cr_assert_eq(read_text("[uid.12345]\n"), 0, "%s", err);
	cr_assert_eq(read_text("[uid.12345]\n[peer]\nlisten = 127.0.0.1:0\n"), -EINVAL);
	cr_assert(strstr(err, "ucx.tcp_network = trusted"), "%s", err);
	cr_assert_eq(read_text("[gid.12345]\n[peer]\nlisten = 127.0.0.1:0\n"), -EINVAL);
	cr_assert_eq(read_text("[policy]\nallow = all\n[peer]\nlisten = 127.0.0.1:0\n"), -EINVAL);
	cr_assert_eq(read_text("[uid.12345]\n[peer]\nlisten = 127.0.0.1:0\n[ucx]\n"
			       "tcp_network = trusted\n"),
		     0, "%s", err);

	snprintf(text, sizeof(text), "[uid.%u]\n[peer]\nlisten = 127.0.0.1:0\n", geteuid());
	cr_assert_eq(read_text(text), 0, "%s", err);
}

Test(config, policies)
{
	struct kvp_policy policy = { .id = 99 };

	cr_assert_eq(read_text("[uid.1000]\nmax_rooms = 10\nadmin = yes\n[gid.50]\nmax_pools = 2\n"
			       "max_sessions = 3\n"
			       "[limits]\nmax_rooms = 500\n"),
		     0, "%s", err);
	cr_assert_eq(kvp_config_policy(&config, 1000, 50, &policy), 0);
	cr_assert(policy.admin && policy.max_rooms == 10 && policy.max_pools == 1024);
	cr_assert_eq(policy.max_sessions, 256u);
	cr_assert_eq(kvp_config_policy(&config, 1001, 50, &policy), 0);
	cr_assert(!policy.admin && policy.max_rooms == 500 && policy.max_pools == 2);
	cr_assert_eq(policy.max_sessions, 3u);
	cr_assert_eq(kvp_config_policy(&config, 1001, 51, &policy), -EACCES);
	cr_assert_eq(kvp_config_policy(&config, 0, 0, &policy), 0);
	cr_assert(policy.admin && policy.max_rooms == 500);

	cr_assert_eq(read_text("[policy]\nallow = all\n"), 0);
	cr_assert_eq(kvp_config_policy(&config, 1001, 51, &policy), 0);
	cr_assert(!policy.admin && policy.max_rooms == 50000);
}

/* The shipped file as text, with `#key = value` lines made real where `uncomment` is set. */
static char *shipped_file(bool uncomment)
{
	const char *top = getenv("KVP_TOP");
	char path[512], line[512];
	char *text = NULL;
	size_t bytes = 0;
	FILE *in, *out;

	snprintf(path, sizeof(path), "%s/conf/kvpackd.conf", top ? top : ".");
	in = fopen(path, "r");
	cr_assert_not_null(in, "%s", path);
	out = open_memstream(&text, &bytes);
	while (fgets(line, sizeof(line), in)) {
		bool key = line[0] == '#' && (islower((unsigned char)line[1]) || line[1] == '[');

		fputs(line + (uncomment && key ? 1 : 0), out);
	}
	fclose(in);
	fclose(out);
	return text;
}

Test(config, shipped_file_parses_as_it_is_and_uncommented)
{
	char *as_is = shipped_file(false), *uncommented = shipped_file(true);
	struct kvp_config defaults;

	kvp_config_defaults(&defaults);
	cr_assert_eq(read_text(as_is), 0, "%s", err);
	cr_assert_arr_eq(&config, &defaults, sizeof(config));
	cr_assert_eq(read_text(uncommented), 0, "%s", err);
	cr_assert_eq(config.n_policies, 1);
	free(as_is);
	free(uncommented);
}

/* Walks the file with its own eyes: section, then `#key = default`. */
static bool shipped_has(const char *text, const struct kvp_config_key *key)
{
	char section[64], line[256];
	const char *at, *end;

	snprintf(section, sizeof(section), "\n[%s]\n", key->section);
	snprintf(line, sizeof(line), "\n#%s =%s%s\n", key->key, key->def[0] ? " " : "", key->def);
	at = strstr(text, section);
	if (!at)
		return false;
	end = strstr(at + 2, "\n[");
	at = strstr(at, line);
	return at && (!end || at < end);
}

Test(config, shipped_file_lists_every_key_with_its_default)
{
	char *text = shipped_file(false);
	size_t n;
	const struct kvp_config_key *keys = kvp_config_keys(&n);

	for (size_t i = 0; i < n; i++)
		cr_assert(shipped_has(text, &keys[i]), "%s.%s = %s", keys[i].section, keys[i].key,
			  keys[i].def);
	free(text);
}

/* The comments above a key in the file, and those above the keys that follow each other there: from
 * the line after the last empty one or section, up to the key. The caller's. */
static char *comments_of(const char *text, const struct kvp_config_key *key)
{
	char section[64], line[64];
	const char *at, *next, *from;
	char *out = NULL;
	size_t bytes = 0;
	FILE *file = open_memstream(&out, &bytes);

	snprintf(section, sizeof(section), "\n[%s]\n", key->section);
	snprintf(line, sizeof(line), "#%s =", key->key);
	at = strstr(text, section);
	cr_assert_not_null(at, "%s", section);
	from = at += strlen(section);
	for (; strncmp(at, line, strlen(line)) != 0; at = next) {
		next = strchr(at, '\n') + 1;
		/* the first comment after a key begins anew */
		if (strncmp(at, "# ", 2) != 0 && strncmp(next, "# ", 2) == 0)
			from = next;
	}
	for (; from < at; from = strchr(from, '\n') + 1)
		if (strncmp(from, "# ", 2) == 0)
			fprintf(file, "%.*s ", (int)strcspn(from, "\n") - 2, from + 2);
	fclose(file);
	return out;
}

/* Whether a word of the comments says the value, in any unit. */
static bool comments_say(const char *comments, const struct kvp_config_key *key, uint64_t value)
{
	char words[2048], *rest = words, *word;
	char text[160];

	snprintf(words, sizeof(words), "%s", comments);
	while ((word = strtok_r(rest, " ,.;:()", &rest))) {
		uint64_t stored = 0;

		snprintf(text, sizeof(text), "[%s]\n%s = %s\n", key->section, key->key, word);
		if (!isdigit((unsigned char)*word) ||
		    (read_text(text) < 0 && strstr(err, "allowed")))
			continue; /* another error is of keys that depend on each other */
		memcpy(&stored, (const char *)&config + key->offset, key->size);
		if (stored == value)
			return true;
	}
	return false;
}

/* The range that the parser keeps is the one that an operator reads. */
Test(config, shipped_file_has_every_range_and_choice)
{
	char *text = shipped_file(false);
	size_t n;
	const struct kvp_config_key *keys = kvp_config_keys(&n);

	for (size_t i = 0; i < n; i++) {
		const struct kvp_config_key *key = &keys[i];
		char *comments = comments_of(text, key);

		for (const struct kvp_config_choice *c = key->choices; c && c->name; c++)
			cr_expect(strstr(comments, c->name), "%s.%s: %s is not in \"%s\"",
				  key->section, key->key, c->name, comments);
		if (key->type == KVP_CONFIG_COUNT || key->type == KVP_CONFIG_BYTES ||
		    key->type == KVP_CONFIG_DURATION || key->type == KVP_CONFIG_SPIN ||
		    key->type == KVP_CONFIG_MODE) {
			cr_expect(comments_say(comments, key, key->min),
				  "%s.%s: the least, %ju, is not in \"%s\"", key->section, key->key,
				  (uintmax_t)key->min, comments);
			cr_expect(comments_say(comments, key, key->max),
				  "%s.%s: the most, %ju, is not in \"%s\"", key->section, key->key,
				  (uintmax_t)key->max, comments);
		}
		cr_expect_gt(strlen(comments), 10u, "%s.%s has no comment", key->section, key->key);
		free(comments);
	}
	free(text);
}

Test(config, print_is_read_back)
{
	struct kvp_config before;
	char *text = NULL;
	size_t bytes = 0;
	FILE *out;

	cr_assert_eq(read_text("[timers]\noffer = 1500us\noffer = 1500us\n"), -EINVAL);
	cr_assert_eq(read_text("[timers]\noffer = 15ms\n[limits]\nmax_rooms = 3000\n[uid.7]\n"
			       "max_rooms = 5\n[policy]\nallow = all\n"),
		     0, "%s", err);
	before = config;
	out = open_memstream(&text, &bytes);
	kvp_config_print(&config, out);
	fclose(out);
	cr_assert_eq(read_text(text), 0, "%s in %s", err, text);
	cr_assert_arr_eq(&config, &before, sizeof(config));
	free(text);
}

Test(config, checksum)
{
	cr_assert_eq(read_text("[data]\nchecksum = on\n"), 0);
	cr_assert_eq(config.data.checksum, KVP_CHECKSUM_ON);
	cr_assert_eq(read_text("[data]\nchecksum = required\n"), 0);
	cr_assert_eq(config.data.checksum, KVP_CHECKSUM_REQUIRED);
	cr_assert_eq(read_text("[data]\nchecksum = maybe\n"), -EINVAL);
}

Test(config, rails)
{
	static const char *const bad[] = {
		"[rail_of]\nmlx5_0 = 256\n",     "[rail_of]\nmlx5_0 = first\n",
		"[gpu.0]\nnics = a\nnics = b\n", "[gpu.0]\n[gpu.0]\n",
		"[gpu.0]\nslots = 8\n",          "[gpu.]\nnics = a\n",
		"[nics]\nrails = 5\n",           "[nics]\nrail_policy = some\n",
		"[verbs]\nconnect = tcp\n",      "[ucx]\nnetwork = shm\n",
	};

	cr_assert_eq(read_text("[verbs]\ndevice = mlx5_2\ndevice = mlx5_3\nconnect = rdma_cm\n"
			       "[nics]\nexclude = mlx5_9\nrails = 2\nrail_policy = same\n"
			       "[gpu.GPU-12]\nnics = mlx5_0, mlx5_1\n[gpu.3]\nnics = mlx5_4\n"
			       "[rail_of]\nmlx5_0 = 0\nmlx5_1 = 255\n"),
		     0);
	cr_assert_str_eq(config.verbs.device, "mlx5_2,mlx5_3");
	cr_assert_eq(config.verbs.connect, KVP_CONNECT_RDMA_CM);
	cr_assert_eq(config.nics.rails, 2);
	cr_assert_eq(config.nics.rail_policy, KVP_RAIL_SAME);
	cr_assert_eq(config.n_gpu_nics, 2);
	cr_assert_str_eq(config.gpu_nics[0].gpu, "GPU-12");
	cr_assert_str_eq(config.gpu_nics[0].nics, "mlx5_0, mlx5_1");
	cr_assert_str_eq(config.gpu_nics[1].nics, "mlx5_4");
	cr_assert_str_eq(config.rail_of, "mlx5_0=0,mlx5_1=255");
	cr_assert_str_eq(config.nics.exclude, "mlx5_9");
	cr_assert_str_eq(kvp_config_gpu_nics(&config, "GPU-12", 0), "mlx5_0, mlx5_1");
	cr_assert_str_eq(kvp_config_gpu_nics(&config, "GPU-77", 3), "mlx5_4");
	cr_assert_str_eq(kvp_config_gpu_nics(&config, "GPU-77", 12), "mlx5_2,mlx5_3",
			 "no section of its own");
	for (size_t i = 0; i < KVP_ARRAY_SIZE(bad); i++)
		cr_assert_eq(read_text(bad[i]), -EINVAL, "%s", bad[i]);
}
