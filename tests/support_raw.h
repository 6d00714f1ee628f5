/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A client of the daemon in raw packets, for programs that ask more, faster or stranger things than
 * the library would. What goes wrong ends the program (support_rig.h).
 */

#include <stdint.h>

#include "proto/msg.h"

#define RAW_PAGE 16u
#define RAW_ROW 64u
#define RAW_POOL_PAGES 256u
#define RAW_POOL_BYTES (RAW_POOL_PAGES * RAW_PAGE * RAW_ROW)
#define RAW_TEXT 256u

struct raw {
	int fd; /* owned */
	uint64_t last_id, next_handle;
	uint32_t next_page;
};

/* Connects, and does not greet. */
void raw_connect(struct raw *raw, const char *socket);
void raw_hello(struct raw *raw);
/* Both. */
void raw_greet(struct raw *raw, const char *socket);
/* Sends with a fresh id and waits for the reply; events on the way are read and forgotten. Its
 * status; text: RAW_TEXT bytes; *got_fd (unless NULL): what came along, or -1. */
Kvp__Status raw_call_fd(struct raw *raw, Kvp__ClientMsg *msg, int send_fd, int *got_fd, char *text);
/* The same; the status must be OK. */
void raw_call(struct raw *raw, Kvp__ClientMsg *msg, int send_fd);

/* One entry of RAW_POOL_PAGES pages of RAW_PAGE rows over a memfd of RAW_POOL_BYTES; its status. */
Kvp__Status raw_register(struct raw *raw, uint32_t id, int fd, char *text);
void raw_unregister(struct raw *raw, uint32_t id);
/* Adds the pool's next page to a list. */
void raw_pages(struct raw *raw, uint32_t list);
Kvp__Side raw_side(void);
/* As handle raw->next_handle, of pool 1. */
void raw_open(struct raw *raw, uint64_t room);
/* The chunk `seq` of that room, of one page that is in list 2. */
void raw_submit(struct raw *raw, uint64_t handle, uint32_t seq);
void raw_abort(struct raw *raw, uint64_t handle);
/* The memfd with the display; the caller's. */
int raw_inspect(struct raw *raw, const char *what);
