/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>

/*
 * kvpackctl doctor [--json]
 *
 * What this machine offers for data over RDMA, from sysfs alone: devices, ports, addresses,
 * hardware counters, the limit of locked memory, and in words what stands in the way. Needs no
 * daemon. KVP_SYSFS names another root than /sys.
 *
 * argv[0] is "doctor". Returns the exit status: 0; 1 when something stands in the way; 2 for wrong
 * usage.
 */
int ctl_doctor(int argc, char **argv);

/* Adds to each of the daemon's rails what the hardware has counted: "hw_resends", "hw_errors". */
void ctl_doctor_count(cJSON *rails);
