/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Foreign functions that daemon, library and kvpackctl call. CALL: may fail, and tests/torture.c
 * makes each call of it fail in turn; the second word says how such a function fails, the third
 * with which error. Names that cannot fail, or whose failure changes nothing, are in
 * tests/check_torture.sh, which requires that every foreign function is in one of the two lists.
 *
 * NUL: returns NULL, errno set. ONE: -1, errno set. MAP: MAP_FAILED, errno set. UV: a negative
 * error. UVD: the same, after it has been done: what was to be accepted is gone. POS: a positive
 * one. UCS, UCSP: a status of UCX, or a pointer that is one.
 */

#include <glob.h>

/* clang-format off */
#define TORTURE_CALLS(CALL) \
	CALL(malloc, NUL, ENOMEM) \
	CALL(calloc, NUL, ENOMEM) \
	CALL(realloc, NUL, ENOMEM) \
	CALL(aligned_alloc, NUL, ENOMEM) \
	CALL(strdup, NUL, ENOMEM) \
	CALL(strndup, NUL, ENOMEM) \
	CALL(protobuf_c_message_unpack, NUL, ENOMEM) \
	CALL(__getdelim, ONE, ENOMEM) \
	CALL(vasprintf, ONE, ENOMEM) \
	CALL(glob, POS, GLOB_NOSPACE) \
	CALL(scandir, ONE, ENOMEM) \
	CALL(accept4, ONE, EMFILE) \
	CALL(bind, ONE, EADDRINUSE) \
	CALL(chmod, ONE, EPERM) \
	CALL(chown, ONE, EPERM) \
	CALL(connect, ONE, ECONNREFUSED) \
	CALL(epoll_create1, ONE, EMFILE) \
	CALL(epoll_ctl, ONE, ENOMEM) \
	CALL(epoll_wait, ONE, EINTR) \
	CALL(eventfd, ONE, EMFILE) \
	CALL(fcntl, ONE, EMFILE) \
	CALL(flock, ONE, ENOLCK) \
	CALL(fopen, NUL, EMFILE) \
	CALL(fstat, ONE, EIO) \
	CALL(fstatfs, ONE, EIO) \
	CALL(ftruncate, ONE, ENOSPC) \
	CALL(getifaddrs, ONE, ENOMEM) \
	CALL(gethostname, ONE, EINVAL) \
	CALL(getrlimit, ONE, EPERM) \
	CALL(getsockopt, ONE, ENOPROTOOPT) \
	CALL(listen, ONE, EADDRINUSE) \
	CALL(lseek, ONE, EIO) \
	CALL(lstat, ONE, EACCES) \
	CALL(madvise, ONE, EINVAL) \
	CALL(memfd_create, ONE, EMFILE) \
	CALL(mkdir, ONE, EACCES) \
	CALL(mmap, MAP, ENOMEM) \
	CALL(open, ONE, EMFILE) \
	CALL(poll, ONE, EINTR) \
	CALL(ppoll, ONE, EINTR) \
	CALL(prctl, ONE, EPERM) \
	CALL(pread, ONE, EIO) \
	CALL(pthread_create, POS, EAGAIN) \
	CALL(read, ONE, EIO) \
	CALL(recvmsg, ONE, ECONNRESET) \
	CALL(sched_getaffinity, ONE, EINVAL) \
	CALL(send, ONE, ENOBUFS) \
	CALL(sendmsg, ONE, ENOBUFS) \
	CALL(sendto, ONE, ENOBUFS) \
	CALL(setrlimit, ONE, EPERM) \
	CALL(setsockopt, ONE, ENOBUFS) \
	CALL(socket, ONE, EMFILE) \
	CALL(syscall, ONE, ENOSYS) \
	CALL(timerfd_create, ONE, EMFILE) \
	CALL(unlink, ONE, EACCES) \
	CALL(write, ONE, EINTR) \
	CALL(uv_accept, UVD, EMFILE) \
	CALL(uv_async_init, UV, EMFILE) \
	CALL(uv_getaddrinfo, UV, ENOMEM) \
	CALL(uv_listen, UV, EADDRINUSE) \
	CALL(uv_loop_init, UV, EMFILE) \
	CALL(uv_poll_init, UV, ENOMEM) \
	CALL(uv_random, UV, EIO) \
	CALL(uv_read_start, UV, ENOTCONN) \
	CALL(uv_signal_init, UV, EMFILE) \
	CALL(uv_signal_start, UV, EINVAL) \
	CALL(uv_tcp_bind, UV, EADDRINUSE) \
	CALL(uv_tcp_connect, UV, ECONNREFUSED) \
	CALL(uv_tcp_getpeername, UV, ENOTCONN) \
	CALL(uv_tcp_getsockname, UV, ENOBUFS) \
	CALL(uv_tcp_init, UV, EMFILE) \
	CALL(uv_tcp_keepalive, UV, EINVAL) \
	CALL(uv_tcp_nodelay, UV, EINVAL) \
	CALL(uv_write, UV, EPIPE) \
	CALL(ucp_am_recv_data_nbx, UCSP, 0) \
	CALL(ucp_am_send_nbx, UCSP, 0) \
	CALL(ucp_config_modify, UCS, 0) \
	CALL(ucp_config_read, UCS, 0) \
	CALL(ucp_ep_create, UCS, 0) \
	CALL(ucp_ep_flush_nbx, UCSP, 0) \
	CALL(ucp_worker_flush_nbx, UCSP, 0) \
	CALL(ucp_init_version, UCS, 0) \
	CALL(ucp_context_query, UCS, 0) \
	CALL(uct_component_query, UCS, 0) \
	CALL(uct_query_components, UCS, 0) \
	CALL(ucp_worker_arm, UCS, 0) \
	CALL(ucp_worker_create, UCS, 0) \
	CALL(ucp_worker_get_address, UCS, 0) \
	CALL(ucp_worker_get_efd, UCS, 0) \
	CALL(ucp_worker_set_am_recv_handler, UCS, 0) \
	TORTURE_VERBS(CALL)

/* Those that tests/torture_verbs.c lets fail too, where a device is there. */
#define TORTURE_VERBS(CALL) \
	CALL(ibv_alloc_pd, NUL, ENOMEM) \
	CALL(ibv_create_ah, NUL, ENOMEM) \
	CALL(ibv_create_comp_channel, NUL, EMFILE) \
	CALL(ibv_create_cq, NUL, ENOMEM) \
	CALL(ibv_create_qp, NUL, ENOMEM) \
	CALL(ibv_get_async_event, ONE, EIO) \
	CALL(ibv_get_cq_event, ONE, EIO) \
	CALL(ibv_get_device_list, NUL, ENOSYS) \
	CALL(ibv_modify_qp, POS, EINVAL) \
	CALL(ibv_open_device, NUL, EACCES) \
	CALL(ibv_query_device, POS, EIO) \
	CALL(ibv_query_gid, ONE, EIO) \
	CALL(_ibv_query_gid_ex, POS, EIO) \
	CALL(ibv_query_port, POS, EIO) \
	CALL(ibv_reg_dmabuf_mr, NUL, EINVAL) \
	CALL(ibv_reg_mr, NUL, ENOMEM) \
	CALL(ibv_reg_mr_iova2, NUL, ENOMEM) \
	CALL(rdma_accept, ONE, EINVAL) \
	CALL(rdma_bind_addr, ONE, EADDRINUSE) \
	CALL(rdma_connect, ONE, EINVAL) \
	CALL(rdma_create_event_channel, NUL, EMFILE) \
	CALL(rdma_create_id, ONE, ENOMEM) \
	CALL(rdma_establish, ONE, EINVAL) \
	CALL(rdma_get_cm_event, ONE, EIO) \
	CALL(rdma_init_qp_attr, ONE, EINVAL) \
	CALL(rdma_listen, ONE, EADDRINUSE) \
	CALL(rdma_reject, ONE, EINVAL) \
	CALL(rdma_resolve_addr, ONE, ENODEV) \
	CALL(rdma_resolve_route, ONE, ENETUNREACH)
/* clang-format on */
