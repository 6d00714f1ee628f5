/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A scripted daemon for tests of the library: a real SEQPACKET listener served by a thread. It
 * keeps what it received, answers ok unless told otherwise, and sends what a test asks it to. The
 * process whose pidfd it hands out is a child that only sleeps, so that a test can kill "the
 * daemon".
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "proto/msg.h"

#define FAKE_LOG 4096u

struct fake {
	char dir[64];
	char path[96];
	char memfd_text[2048]; /* inspect is answered with it */
	int listener, conn, wake[2];
	pthread_t thread;
	pthread_mutex_t lock;
	pid_t child; /* 0: no pidfd is handed out */
	int child_pidfd;
	uint8_t incarnation;
	atomic_bool is_stopped;
	atomic_bool is_mute;    /* hello apart, nothing is answered */
	atomic_bool is_deaf;    /* nothing is read */
	atomic_int refuse_kind; /* Kvp__ClientMsg__BodyCase refused with refuse_status */
	atomic_int refuse_status;
	atomic_uint recalled_from;
	atomic_uint session;           /* that hello is answered with; 0: as an older daemon */
	Kvp__ClientMsg *log[FAKE_LOG]; /* what came, in order; under lock */
	size_t n_fds[FAKE_LOG];
	unsigned n_log;
};

/* At path, or in a new folder when path is NULL. has_child: hands out a pidfd. */
struct fake *fake_start(const char *path, uint8_t incarnation, bool has_child);
/* Ends thread, connection and listener; not the child. The path stays. */
void fake_stop(struct fake *fake);
void fake_free(struct fake *fake); /* fake_stop() and the rest, the folder with the first one */
void fake_kill_child(struct fake *fake);
/* Waits until n messages came (hello included) and gives the n-th, counted from 0. */
const Kvp__ClientMsg *fake_get(struct fake *fake, unsigned n);
unsigned fake_count(struct fake *fake);
void fake_reply(struct fake *fake, uint64_t id, int status, const char *text);
void fake_event(struct fake *fake, Kvp__RoomEvent *event);
void fake_raw(struct fake *fake, const void *data, size_t n);
