/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One valid message of each kind, encoded, for the tests of decoders. */

#include "proto/msg.h"
#include "proto/peer_msg.h"

#define SUPPORT_N_CLIENT 19u
#define SUPPORT_N_DAEMON 3u
#define SUPPORT_N_PEER 10u

/* Encodes the i-th into buf (KVP_LIMIT_PACKET bytes); its length. Peer messages have no length
 * head. */
size_t support_client_msg(unsigned i, uint8_t *buf);
size_t support_daemon_msg(unsigned i, uint8_t *buf);
size_t support_peer_msg(unsigned i, uint8_t *buf);
