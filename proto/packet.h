/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One message of the client protocol: a SEQPACKET packet with file descriptors. Any thread. */

#include <stddef.h>
#include <sys/types.h>

/*
 * Sends one packet, never blocks, never raises SIGPIPE. fds [n_fds], at most KVP_LIMIT_FDS, stay
 * the caller's. 0; -EAGAIN: the socket is full, nothing was sent; -EPIPE, -ECONNRESET: closed;
 * -EMSGSIZE, other negative errno.
 */
int kvp_packet_send(int fd, const void *buf, size_t len, const int *fds, size_t n_fds);

/*
 * Receives one packet, never blocks. fds [max], at most KVP_LIMIT_FDS: *n_fds received ones are the
 * caller's, close-on-exec. Bytes of the packet; 0: the other end closed, or has sent a packet of no
 * bytes, which is none of ours and whose fds are closed; -EAGAIN: none now;
 * -EMSGSIZE: larger than cap or more fds than max, the packet is lost and its fds are closed.
 */
ssize_t kvp_packet_recv(int fd, void *buf, size_t cap, int *fds, size_t *n_fds, size_t max);
