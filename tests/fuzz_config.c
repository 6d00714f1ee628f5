/* SPDX-License-Identifier: Apache-2.0 */
/* Any text as configuration: it is read or refused with a reason, never more. */

#include <stdio.h>
#include <stdlib.h>

#include "daemon/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct kvp_config config;
	char err[256] = "";
	FILE *file;

	if (size == 0)
		return 0;

	file = fmemopen((void *)data, size, "r");
	if (!file)
		return 0;
	if (kvp_config_read(&config, file, "fuzz", err, sizeof(err)) < 0 && !err[0])
		abort();
	(void)fclose(file);
	return 0;
}
