/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * For tests that start real daemons and speak to them in raw packets: a private directory, a
 * configuration, the process, sockets, memfds, what kvpackctl would read. Every helper fails the
 * test when the environment does; refusals of the daemon are results.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cjson/cJSON.h>

#include "proto/kvpack.pb-c.h"

struct support_daemon {
	char dir[64];
	char socket[96];
	char config[96];
	char log[96];
	pid_t pid;             /* 0: not running */
	uint32_t fds_at_start; /* descriptors once it answered and the probe was gone */
};

/* Makes the directory, writes the configuration (loopback, no peers, `extra` lines at the end,
 * NULL: none), starts kvpackd and returns when it answers hello. */
void support_daemon_start(struct support_daemon *daemon, const char *extra);
/* Only makes the directory and the configuration. */
void support_daemon_prepare(struct support_daemon *daemon, const char *extra);
/* Starts the prepared daemon and waits until it answers. */
void support_daemon_run(struct support_daemon *daemon);
/* SIGTERM; returns the exit status, 128 + the signal that ended it, or -1 after 20 s (killed). */
int support_daemon_stop(struct support_daemon *daemon);
/* Asserts that the daemon lives and has as many descriptors as at start (waits up to 5 s for the
 * last ones to close), stops it, asserts exit status 0, removes the directory. */
void support_daemon_end(struct support_daemon *daemon);
/* Removes the directory. */
void support_daemon_clean(struct support_daemon *daemon);
bool support_log_has(const struct support_daemon *daemon, const char *text);

/* Path of a program that was built beside this one. */
void support_program(char *path, size_t bytes, const char *name);
uint32_t support_fd_count(pid_t pid);
void support_sleep_ms(unsigned ms);
uint64_t support_now_ms(void);

/* A connected socket; support_hello also greets, asserting OK. The caller closes both. */
int support_connect(const struct support_daemon *daemon);
int support_hello(const struct support_daemon *daemon, const char *name);

#define SUPPORT_TEXT 256u

struct support_reply {
	uint64_t id;
	Kvp__Status status;
	char text[SUPPORT_TEXT];
	uint32_t recalled_from;
	uint64_t session; /* of hello */
	int fd;           /* the caller's; -1: none came along */
};

/* Sends a raw packet with fds. 0 or negative errno. */
int support_send(int fd, const void *bytes, size_t n, const int *fds, size_t n_fds);
/* Sends a request, whatever it says. */
void support_send_msg(int fd, const Kvp__ClientMsg *msg, const int *fds, size_t n_fds);
/* The next reply, events skipped; false: none within `ms`, or the daemon closed. */
bool support_recv(int fd, struct support_reply *reply, int ms);
/* True: the daemon closes the connection within `ms`; packets before that are skipped. */
bool support_closed(int fd, int ms);
/* Sends with a fresh id, waits for its reply, asserts that one comes. */
struct support_reply support_call(int fd, Kvp__ClientMsg *msg, const int *fds, size_t n_fds);

/* A sealable memfd. */
int support_memfd(uint64_t bytes);

/* An entry of dense rows on fd 0: 64 rows a page, no gaps. */
void support_entry(Kvp__Entry *entry, uint32_t layer, uint32_t row_bytes, uint32_t n_pages);
/* Registers a pool of that one entry over the fds. */
struct support_reply support_register(int fd, uint32_t pool, Kvp__Entry *entry, const int *fds,
				      size_t n_fds);
/* Asks and asserts an answer. The caller frees it (cJSON_Delete). */
cJSON *support_inspect(int fd, const char *what, const char *arg);
/* A number of `what` = status, such as "pools". */
double support_status_number(int fd, const char *name);
