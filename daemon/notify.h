/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tells a service manager what state the process is in: one datagram to $NOTIFY_SOCKET. */

/* `state` as in sd_notify(3), such as "READY=1". 0, also without such a socket; negative errno. */
int kvp_notify(const char *state);
