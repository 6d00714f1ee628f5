/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admits.h"

#include <stdatomic.h>
#include <stdlib.h>

struct kvp_admits {
	uint32_t n;
	_Atomic uint32_t without; /* sessions whose other end has no numbers */
	_Atomic uint64_t numbers[];
};

struct kvp_admits *kvp_admits_create(uint32_t n)
{
	struct kvp_admits *admits = calloc(1, sizeof(*admits) + n * sizeof(admits->numbers[0]));

	if (admits)
		admits->n = n;
	return admits;
}

void kvp_admits_destroy(struct kvp_admits *admits)
{
	free(admits);
}

bool kvp_admits_add(struct kvp_admits *admits, uint64_t number)
{
	if (number == 0) {
		(void)atomic_fetch_add(&admits->without, 1);
		return true;
	}
	for (uint32_t i = 0; i < admits->n; i++) {
		if (atomic_load_explicit(&admits->numbers[i], memory_order_relaxed) == 0) {
			atomic_store_explicit(&admits->numbers[i], number, memory_order_release);
			return true;
		}
	}
	return false;
}

void kvp_admits_remove(struct kvp_admits *admits, uint64_t number)
{
	if (number == 0) {
		(void)atomic_fetch_sub(&admits->without, 1);
		return;
	}
	for (uint32_t i = 0; i < admits->n; i++) {
		if (atomic_load_explicit(&admits->numbers[i], memory_order_relaxed) == number) {
			atomic_store_explicit(&admits->numbers[i], 0, memory_order_release);
			return;
		}
	}
}

bool kvp_admits_has(const struct kvp_admits *admits, uint64_t number)
{
	if (number == 0)
		return atomic_load_explicit(&admits->without, memory_order_acquire) > 0;
	for (uint32_t i = 0; i < admits->n; i++)
		if (atomic_load_explicit(&admits->numbers[i], memory_order_acquire) == number)
			return true;
	return false;
}
