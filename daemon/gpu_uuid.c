/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "daemon/gpu.h"

void kvp_gpu_uuid_text(char out[KVP_GPU_UUID], const uint8_t bytes[16])
{
	const uint8_t *b = bytes;

	(void)snprintf(out, KVP_GPU_UUID, /* fits */
		       "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		       b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11],
		       b[12], b[13], b[14], b[15]);
}
