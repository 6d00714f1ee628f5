/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/sums.h"

#include "proto/layout.h"
#include "proto/limits.h"

_Static_assert(KVP_LIMIT_POSITION <= UINT64_C(1) << 48 && KVP_PAIRS_MAX < 1u << 15, "seeds differ");

enum kvp_sums kvp_sums_agree(uint32_t word, uint32_t other)
{
	if (!((word | other) & KVP_SUMS_ASK))
		return KVP_SUMS_OFF;
	if (word & other & KVP_SUMS_CAN)
		return KVP_SUMS_ON;
	return word && other ? KVP_SUMS_NO_GPU : KVP_SUMS_NO_PEER;
}

static const struct {
	const char *name, *text;
} names[KVP_SUMS_N] = {
	[KVP_SUMS_OFF] = { "off", "data.checksum is off at both ends" },
	[KVP_SUMS_ON] = { "on", "" },
	[KVP_SUMS_NO_GPU] = { "gpu", "sums are for pools in host memory, and one is on a GPU" },
	[KVP_SUMS_NO_SLOT] = { "slot", "a token's rows fill the slot: larger host.slot_bytes" },
	[KVP_SUMS_NO_PEER] = { "peer", "the peer's daemon is of a version without sums" },
};

const char *kvp_sums_name(enum kvp_sums sums)
{
	return (unsigned)sums < KVP_SUMS_N ? names[sums].name : "unknown";
}

const char *kvp_sums_text(enum kvp_sums sums)
{
	return (unsigned)sums < KVP_SUMS_N ? names[sums].text : "unknown";
}

uint64_t kvp_sums_room(uint64_t slot_bytes, uint32_t n_pairs)
{
	uint64_t sums = kvp_sums_bytes(n_pairs);

	return slot_bytes <= sums ? 0 : (slot_bytes - sums) / KVP_LAYOUT_ALIGN * KVP_LAYOUT_ALIGN;
}
