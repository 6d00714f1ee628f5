/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A rig for programs that play whole engines: real daemons in a private directory, ranks as
 * processes of their own, pools with bytes that tell where they belong, and a checker that places
 * every row by counting positions and shares no code with the planner.
 *
 * A scenario runs in a process of its own. What it starts dies with it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/kvpack.h"
#include "proto/util.h"

#define RIG_DAEMONS 12u
#define RIG_RANKS 32u
#define RIG_STAGES 64u
#define RIG_ENTRIES 64u

/* Runs once before the end, for whoever wants to know more; NULL: nothing. */
extern void (*rig_dying)(void);
/* Ends the process with exit status 1 and says where and why. */
void rig_die(const char *where, int line, const char *cond, const char *fmt, ...)
	__attribute__((noreturn, format(printf, 4, 5)));
#define RIG_REQUIRE(cond, ...)                                               \
	do {                                                                 \
		if (!(cond))                                                 \
			rig_die(__FILE__, __LINE__, #cond, " " __VA_ARGS__); \
	} while (0)

/* ---- daemons and processes ------------------------------------------------------------------ */

struct rig_daemon {
	char name[16];
	char socket[108];
	char address[64]; /* that expectations name */
	char log[128];
	const char *timing;
	bool alone; /* it has no peers */
	const char *program;
	pid_t pid; /* 0: not running */
};

struct rig_rank {
	char name[32];
	pid_t pid;
};

struct rig {
	char dir[64];
	struct rig_daemon daemons[RIG_DAEMONS];
	struct rig_rank ranks[RIG_RANKS];
	uint32_t n_daemons, n_ranks;
	bool alone;          /* daemons started from now on have no peers, and no transport */
	const char *program; /* of daemons started from now on; NULL: kvpackd */
	const char *timing;  /* lines of [peer] of daemons started from now on; NULL: short ones */
	_Atomic uint64_t *stages; /* [RIG_STAGES] shared by all processes of the scenario */
};

/* Makes the directory; rig_remove() takes it away again with all that is in it, unless KVP_RIG_KEEP
 * is set. */
void rig_begin(struct rig *rig);
void rig_remove(struct rig *rig);
/* Starts a daemon with the defaults of the rig (ports 0 on loopback, short heartbeats) and the
 * lines of `extra`, which may be NULL; returns when it answers a client. */
struct rig_daemon *rig_daemon_start(struct rig *rig, const char *name, const char *extra);
/* Starts one that is over again, with the same socket, address and log. */
void rig_daemon_restart(struct rig_daemon *daemon, const char *extra);
/* Ends it without a word, and waits until it is dead. */
void rig_daemon_kill(struct rig_daemon *daemon);
/* Stops it as systemd would; returns its exit status, or 128 + the signal. */
int rig_daemon_stop(struct rig_daemon *daemon);
/* Stops all daemons, which must exit with 0. */
void rig_end(struct rig *rig);

/* Forks a process that runs fn(arg) and exits 0 when it returns; the caller's to wait for. */
pid_t rig_fork(const char *name, void (*fn)(void *arg), void *arg);
/* The same for a rank. */
void rig_rank_start(struct rig *rig, const char *name, void (*fn)(void *arg), void *arg);
/* Waits for all ranks; requires that each exits with 0 within `secs`. */
void rig_ranks_join(struct rig *rig, int secs);

/* Numbers that processes of a scenario wait for: a stage only grows. */
void rig_stage_set(struct rig *rig, uint32_t stage, uint64_t value);
uint64_t rig_stage_get(const struct rig *rig, uint32_t stage);
void rig_stage_wait(const struct rig *rig, uint32_t stage, uint64_t value, int secs);

uint64_t rig_now_ns(void);
void rig_sleep_ms(unsigned int ms);
/* Path of a program that was built beside this one. */
void rig_program(char *buf, size_t bytes, const char *name);

struct rig_scenario {
	const char *name;
	void (*run)(struct rig *rig);
};
/* Seconds that a scenario may take. */
extern unsigned int rig_deadline_s;
/* Runs one in a process of its own, with a rig of its own; true if it ended well. */
bool rig_run(const struct rig_scenario *scenario);
/* Runs those that argv names, or all; prints a line for each and the sum. Returns the exit status.
 */
int rig_main(int argc, char **argv, const struct rig_scenario *scenarios, size_t n);

struct rig_section {
	const char *name;
	void (*run)(void);
};
/* Runs those in this process that argv names, or all. */
void rig_sections(int argc, char **argv, const struct rig_section *sections, size_t n);

/* ---- pools ---------------------------------------------------------------------------------- */

struct rig_pool {
	struct kvp_entry_desc entries[RIG_ENTRIES];
	uint32_t n_entries;
	uint64_t bytes; /* of the memory */
	uint8_t *mem;
	int fd;
	uint32_t id;   /* as registered */
	uint64_t salt; /* of its background */
	/* On a GPU (tests/support_device.h), with mem a copy; 0: mem is the pool. */
	uint64_t device, device_bytes, chunk_bytes;
};

/* Appends an entry behind those before, rows dense, 64 bytes between pages; the caller may change
 * it before the pool is made. */
struct kvp_entry_desc *rig_pool_entry(struct rig_pool *pool, uint32_t layer, uint32_t row_bytes,
				      uint32_t rows_per_page, uint32_t n_pages);
struct kvp_entry_desc *rig_pool_blob(struct rig_pool *pool, uint32_t layer, uint64_t bytes);
/* Allocates the memory, fills it with the background that `salt` gives, registers it. */
void rig_pool_make(struct rig_pool *pool, struct kvp_client *client, const char *label,
		   uint64_t salt);
/* Allocates and fills alone. */
void rig_pool_allocate(struct rig_pool *pool, const char *label, uint64_t salt);
/* Writes the background over everything. */
void rig_pool_reset(struct rig_pool *pool);
/* A copy of what the memory should be: the background; the caller's (free). */
uint8_t *rig_pool_image(const struct rig_pool *pool);
/* Names the entry, page, slot and byte of an offset in the pool's memory. */
void rig_pool_place(const struct rig_pool *pool, uint64_t at, char *buf, size_t bytes);
/* Requires that the memory equals the image, byte by byte. */
void rig_pool_check(const struct rig_pool *pool, const uint8_t *image, const char *what);

/* Which bytes a row has. */
struct rig_key {
	uint64_t room, generation;
};

/* Writes the rows of positions [from, to) that the side owns into `mem` (the pool's memory or an
 * image of it), for all entries of its group in the set (NULL: all). Counts positions, uses no
 * formula. */
void rig_put_rows(uint8_t *mem, const struct rig_pool *pool, const struct kvp_side_desc *side,
		  uint64_t from, uint64_t to, const struct rig_key *key);
void rig_put_rows_of(uint8_t *mem, const struct rig_pool *pool, const struct kvp_side_desc *side,
		     uint64_t from, uint64_t to, const struct rig_key *key, const uint8_t *set);
/* Bytes that belong to a segment id or the meta of a room. */
void rig_put_segment(uint8_t *mem, uint64_t bytes, const struct rig_key *key, uint32_t id);

/* `n` different page numbers of [lo, hi) in random order. */
void rig_pages(uint32_t *pages, uint32_t n, uint32_t lo, uint32_t hi, uint64_t seed);
uint64_t rig_random(uint64_t *seed);

/* ---- clients -------------------------------------------------------------------------------- */

struct kvp_client *rig_client(const struct rig_daemon *daemon, const char *name);
/* What the daemon shows (kvp_inspect()); `arg` may be NULL. cJSON_Delete() it. */
struct cJSON *rig_ask(const struct rig_daemon *daemon, const char *what, const char *arg);
/* Requires that what it shows has this text in it. */
void rig_says(const struct rig_daemon *daemon, const char *what, const char *arg, const char *text);
/* A number of it, which has to be there. */
double rig_number(const struct cJSON *object, const char *name);
struct kvp_room_state rig_state(const struct kvp_client *client, kvp_room_id id);
/* Requires that the room gets there in time, and returns its state. */
struct kvp_room_state rig_await(struct kvp_client *client, kvp_room_id id, enum kvp_wait_for what,
				int secs);
/* Requires 0 of a call on the client, and tells the client's last error otherwise. */
#define RIG_CALL(client, call) RIG_REQUIRE((call) == 0, "%s", kvp_last_error(client))
