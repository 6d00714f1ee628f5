/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the checks on a GPU begin with, and how they say what they found. */

#include <cuda.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static int bad; /* checks that failed */

#define CHECK(call)                                                             \
	do {                                                                    \
		CUresult res_ = (call);                                         \
		if (res_ != CUDA_SUCCESS) {                                     \
			fprintf(stderr, "%d: %s: %d\n", __LINE__, #call, res_); \
			exit(1);                                                \
		}                                                               \
	} while (0)

static void say(bool good, const char *what, const char *detail)
{
	printf("%-5s %-44s %s\n", good ? "ok" : "FAIL", what, detail);
	fflush(stdout);
	bad += !good;
}

static void context(void)
{
	CUdevice device;
	CUcontext ctx;

	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDevicePrimaryCtxRetain(&ctx, device)); /* for good */
	CHECK(cuCtxSetCurrent(ctx));
}
