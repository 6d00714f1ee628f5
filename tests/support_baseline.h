/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the benchmarks compare with, on the same machine and in the same run: a plain socket stream
 * and a naive row-by-row UCX put, each between two processes and pools of the same size. Bench
 * only.
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * Two nodes on one machine: each has half of the cores, so that what one does never waits for a
 * core of the other. Otherwise the scheduler decides anew in each run whether two ends share one.
 */
enum kvp_base_node {
	KVP_BASE_ANY,  /* wherever the scheduler likes */
	KVP_BASE_NEAR, /* the first half */
	KVP_BASE_FAR,  /* the second half */
};

/* The calling process, and those that it forks, run there from now on. */
void kvp_base_place(enum kvp_base_node node);

/* The bytes that one prompt moves: n_rows rows of row_bytes for each of n_dests destinations. */
struct kvp_base_job {
	uint64_t pool_bytes; /* of the source pool; each destination has pool_bytes / n_dests */
	uint64_t rows;       /* in all, over destinations and entries */
	uint32_t row_bytes;
	uint32_t n_dests; /* rows of destination r: r, r + n_dests, ... of the source pool */
	uint32_t repetitions;
	enum kvp_base_node far; /* where the receiver runs; a stream's sender: as the caller */
};

/* Each writes the seconds of each repetition, from the first byte sent to the receiver's answer
 * that all is there, to secs[repetitions]. Negative errno on failure. */
int kvp_base_stream(const struct kvp_base_job *job, double *secs);
int kvp_base_put(const struct kvp_base_job *job, double *secs);
/* Copies between two pools in one process, one memcpy for each MiB. */
int kvp_base_memcpy(const struct kvp_base_job *job, double *secs);

/* The same stream, one repetition at a time, for measurements in alternation. Close returns r, or
 * what went wrong in the receiver, which stops after job->repetitions. */
struct kvp_base_stream {
	struct kvp_base_job job;
	char *pool;
	int fd;
	pid_t pid;
};

int kvp_base_stream_open(struct kvp_base_stream *stream, const struct kvp_base_job *job);
int kvp_base_stream_run(struct kvp_base_stream *stream, double *secs);
int kvp_base_stream_close(struct kvp_base_stream *stream, int r);

/* The round trip of a small message, p50 over `rounds`, in seconds: over AF_UNIX SEQPACKET and over
 * a loopback TCP connection with blocking reads. `far`: ANY for both ends, or FAR: one end on each
 * half of the cores. */
int kvp_base_pingpong_unix(enum kvp_base_node far, uint32_t rounds, double *rtt);
int kvp_base_pingpong_tcp(enum kvp_base_node far, uint32_t rounds, double *rtt);

double kvp_base_now(void);
double kvp_base_median(double *values, uint32_t n);
