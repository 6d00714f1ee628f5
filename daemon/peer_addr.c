/* SPDX-License-Identifier: Apache-2.0 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/peer_internal.h"

int kvp_peer_split(const char *address, char *host, size_t host_bytes, char *port,
		   size_t port_bytes)
{
	const char *colon = strrchr(address, ':');
	const char *from = address;
	size_t n;

	if (!colon || !colon[1])
		return -EINVAL;
	n = (size_t)(colon - address);
	if (*from == '[') {
		if (n < 3 || address[n - 1] != ']')
			return -EINVAL;
		from++;
		n -= 2;
	} else if (memchr(from, ':', n)) {
		return -EINVAL; /* IPv6 without brackets: which colon is the last? */
	}
	if (n == 0 || n >= host_bytes || strlen(colon + 1) >= port_bytes ||
	    strspn(colon + 1, "0123456789") != strlen(colon + 1) || strlen(colon + 1) > 5 ||
	    strtoul(colon + 1, NULL, 10) > UINT16_MAX)
		return -EINVAL;
	memcpy(host, from, n);
	host[n] = '\0';
	(void)snprintf(port, port_bytes, "%s", colon + 1);
	return 0;
}

bool kvp_peer_numeric(const char *host, const char *port, struct sockaddr_storage *out)
{
	int number = (int)strtoul(port, NULL, 10);

	memset(out, 0, sizeof(*out));
	return uv_ip4_addr(host, number, (struct sockaddr_in *)out) == 0 ||
	       uv_ip6_addr(host, number, (struct sockaddr_in6 *)out) == 0;
}

void kvp_peer_print_addr(const struct sockaddr *addr, char *out, size_t out_bytes)
{
	char ip[INET6_ADDRSTRLEN] = "?";

	if (addr->sa_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const void *)addr;

		(void)uv_ip6_name(in6, ip, sizeof(ip)); /* cannot fail with that size */
		(void)snprintf(out, out_bytes, "[%s]:%u", ip, ntohs(in6->sin6_port));
	} else {
		const struct sockaddr_in *in4 = (const void *)addr;

		(void)uv_ip4_name(in4, ip, sizeof(ip)); /* cannot fail with that size */
		(void)snprintf(out, out_bytes, "%s:%u", ip, ntohs(in4->sin_port));
	}
}

int kvp_peer_parse_allow(struct kvp_peers *peers, const char *list, char *err, size_t err_bytes)
{
	KVP_CLEANUP(kvp_freep) char *copy = strdup(list);
	char *save = NULL;

	if (!copy)
		return -ENOMEM;
	for (char *item = strtok_r(copy, ", \t", &save); item;
	     item = strtok_r(NULL, ", \t", &save)) {
		struct kvp_network *grown =
			realloc(peers->allow, (peers->n_allow + 1) * sizeof(*grown));

		if (!grown)
			return -ENOMEM;
		peers->allow = grown;
		memset(&grown[peers->n_allow], 0, sizeof(*grown));
		if (kvp_config_network(item, &grown[peers->n_allow]) < 0) {
			(void)snprintf(err, err_bytes,
				       "peer.allow: \"%s\" is no network such as 10.0.0.0/8", item);
			return -EINVAL;
		}
		peers->n_allow++;
	}
	return 0;
}

static bool bits_equal(const uint8_t *a, const uint8_t *b, unsigned bits)
{
	unsigned rest = bits % 8;

	if (memcmp(a, b, bits / 8) != 0)
		return false;
	return rest == 0 || (a[bits / 8] ^ b[bits / 8]) >> (8 - rest) == 0;
}

/* The address's bytes; an IPv4 address inside IPv6 counts as IPv4. */
static const uint8_t *addr_bytes(const struct sockaddr *addr, bool *v6)
{
	const struct sockaddr_in6 *in6 = (const void *)addr;

	*v6 = addr->sa_family == AF_INET6;
	if (!*v6)
		return (const void *)&((const struct sockaddr_in *)(const void *)addr)->sin_addr;
	if (!IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr))
		return in6->sin6_addr.s6_addr;
	*v6 = false;
	return in6->sin6_addr.s6_addr + 12;
}

bool kvp_peer_allowed(const struct kvp_peers *peers, const struct sockaddr *addr)
{
	bool v6;
	const uint8_t *bytes = addr_bytes(addr, &v6);

	for (uint32_t i = 0; i < peers->n_allow; i++) {
		const struct kvp_network *net = &peers->allow[i];

		if (net->v6 == v6 && bits_equal(net->addr, bytes, net->bits))
			return true;
	}
	return false;
}

bool kvp_peer_same_host(const struct sockaddr *a, const struct sockaddr *b)
{
	bool v6[2];
	const uint8_t *bytes[2] = { addr_bytes(a, &v6[0]), addr_bytes(b, &v6[1]) };

	return v6[0] == v6[1] && memcmp(bytes[0], bytes[1], v6[0] ? 16 : 4) == 0;
}

bool kvp_peer_may_dial(const struct kvp_peers *peers, const struct sockaddr *addr)
{
	static const uint8_t loopback6[16] = { [15] = 1 };
	bool v6;
	const uint8_t *bytes = addr_bytes(addr, &v6);

	if (peers->config->peer.plaintext == KVP_TRUST_TRUSTED)
		return true;
	return v6 ? memcmp(bytes, loopback6, sizeof(loopback6)) == 0 : bytes[0] == 127;
}
