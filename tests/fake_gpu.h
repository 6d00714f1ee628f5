/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GPU that is none, in the place of daemon/gpu.c: what is launched is done by the processor, but
 * only some time later and while it is being polled. Whoever frees, reuses or reports something too
 * early is found out. Its memory, where rings may lie, cannot be touched but by its launches: who
 * tries crashes. Programs that link it give every lane of the rig such a GPU, and two of three
 * lanes a transport that sends from its memory.
 */

#include <stdatomic.h>
#include <stdint.h>

#include "daemon/net.h"

/* The launch after so many more fails, or the poll: once. 0: none does. */
extern _Atomic int fake_gpu_fail_launch, fake_gpu_fail_poll;
/* While set, nothing that is launched ends. */
extern _Atomic int fake_gpu_stopped;
/* Runs that a launch takes, at most 4096. */
extern _Atomic int fake_gpu_max_runs;
/* Launches so far, of all GPUs. */
extern _Atomic int fake_gpu_launches;
/* No GPU reaches the memory of another. */
extern _Atomic int fake_gpu_no_peer;
/* Memory imported now. */
extern _Atomic int fake_gpu_imports;
/* Bytes of the device, and pinned ones of the host, that one allocation may have. */
extern _Atomic uint64_t fake_gpu_device_bytes, fake_gpu_host_bytes;
/* Allocations of the device for rings that live. */
extern _Atomic int fake_gpu_rings;
/* What the device says of itself, and how often it was told to look at a NIC's writes. */
extern _Atomic int fake_gpu_can_flush, fake_gpu_flushes;
/* What it says of its own sight of a NIC's writes; the flush after so many more fails, once. */
extern _Atomic int fake_gpu_ordering, fake_gpu_fail_flush;
/* No dma-bufs are made of rings. */
extern _Atomic int fake_gpu_no_dmabuf;
/* The dma-buf of every import; -1: none is made. Borrowed. */
extern _Atomic int fake_gpu_import_fd;
/* The transport that sends from the device's memory, over UCX. */
const struct kvp_net_ops *fake_gpu_net(void);
