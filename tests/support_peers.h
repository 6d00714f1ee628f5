/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Light peers: other daemons as far as the control protocol goes, many in one thread. Each accepts
 * where it listens, greets, beats its heart, and counts the offers that come; it answers them with
 * an abort when it is told to. It has no lanes.
 */

#include <stdint.h>

#define PEERS_MAX 512u
#define PEERS_ADDRESS 32u

struct peers;

struct peers *peers_start(uint32_t n);
/* "127.0.0.1:port" of one. */
const char *peers_address(const struct peers *peers, uint32_t i);
/* Sessions that are up, and offers, renewals and declines that came, of all. */
uint32_t peers_up(struct peers *peers);
uint64_t peers_offers(struct peers *peers);
uint64_t peers_words(struct peers *peers);
/* Every leg that was offered, and not aborted by the other end, is aborted now. */
void peers_abort_all(struct peers *peers);
void peers_stop(struct peers *peers);
