/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GPU that is none, in the place of daemon/gpu.c: what is launched is done by the processor, but
 * only some time later and while it is being polled. Whoever frees, reuses or reports something too
 * early is found out. Programs that link it give every lane of the rig such a GPU.
 */

#include <stdatomic.h>

/* The launch after so many more fails, or the poll: once. 0: none does. */
extern _Atomic int fake_gpu_fail_launch, fake_gpu_fail_poll;
/* While set, nothing that is launched ends. */
extern _Atomic int fake_gpu_stopped;
/* Runs that a launch takes, at most 4096. */
extern _Atomic int fake_gpu_max_runs;
/* Launches so far, of all GPUs. */
extern _Atomic int fake_gpu_launches;
/* Memory imported now. */
extern _Atomic int fake_gpu_imports;
