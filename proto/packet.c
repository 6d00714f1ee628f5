/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/packet.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/limits.h"
#include "proto/util.h"

union control { /* aligned for its headers */
	struct cmsghdr align;
	char bytes[CMSG_SPACE(sizeof(int) * KVP_LIMIT_FDS)];
};

int kvp_packet_send(int fd, const void *buf, size_t len, const int *fds, size_t n_fds)
{
	union control control = { 0 };
	struct iovec iov = { (void *)buf, len };
	struct msghdr hdr = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;

	if (n_fds > KVP_LIMIT_FDS || len == 0)
		return -EINVAL;
	if (n_fds > 0) {
		struct cmsghdr *cmsg;

		hdr.msg_control = control.bytes;
		hdr.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
		cmsg = &control.align; /* the first */
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
		memcpy(CMSG_DATA(cmsg), fds, sizeof(int) * n_fds);
	}
	do {
		n = sendmsg(fd, &hdr, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

/* Moves the fds of one header to fds; those beyond max are closed. How many came. */
static size_t take_fds(struct cmsghdr *cmsg, int *fds, size_t n, size_t max)
{
	size_t came = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);

	for (size_t i = 0; i < came; i++) {
		int one;

		memcpy(&one, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(one));
		if (n + i < max)
			fds[n + i] = one;
		else
			(void)close(one); /* refused below */
	}
	return came;
}

ssize_t kvp_packet_recv(int fd, void *buf, size_t cap, int *fds, size_t *n_fds, size_t max)
{
	union control control;
	struct iovec iov = { buf, cap };
	struct msghdr hdr = { .msg_iov = &iov, .msg_iovlen = 1 };
	size_t came = 0;
	ssize_t n;

	max = KVP_MIN(max, (size_t)KVP_LIMIT_FDS);
	hdr.msg_control = control.bytes;
	hdr.msg_controllen = sizeof(control.bytes);
	do {
		n = recvmsg(fd, &hdr, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(&hdr); c; c = CMSG_NXTHDR(&hdr, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			came += take_fds(c, fds, came, max);
	}
	if (n == 0 || came > max || (hdr.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
		for (size_t i = 0; i < KVP_MIN(came, max); i++)
			(void)close(fds[i]); /* the packet is refused as a whole */
		came = 0;
		if (n > 0)
			return -EMSGSIZE;
	}
	*n_fds = came;
	return n;
}
