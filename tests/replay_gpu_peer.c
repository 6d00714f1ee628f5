/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rooms between two GPUs of one daemon, by peer access where they have it: engines in processes of
 * their own, every byte compared, what the daemon says of how it moved. Without two GPUs on the
 * driver that is none, which can be told to refuse.
 *
 * usage: replay_gpu_peer [SCENARIO ...]
 */

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support_end.h"

#define RANKS 2u
#define CONFIG "[gpu]\ndevices = all\nslots = 2\nslot_bytes = 1M\n"

/* ---- what the daemon says -------------------------------------------------------------------- */

static uint32_t occurrences(const char *text, const char *what)
{
	uint32_t n = 0;

	for (const char *at = text; (at = strstr(at, what)); at++)
		n++;
	return n;
}

/* Modes of the rooms' legs that are over, and bytes by peer access. */
static void moved(const struct rig_daemon *daemon, uint32_t peer, const char *slow_path)
{
	cJSON *status = rig_ask(daemon, "status", NULL), *rooms = rig_ask(daemon, "room", "7");
	char *text = cJSON_PrintUnformatted(rooms), *all = cJSON_PrintUnformatted(status);
	const cJSON *counters = cJSON_GetObjectItemCaseSensitive(status, "counters");
	char want[64];

	RIG_REQUIRE(occurrences(text, "\"mode\":\"peer\"") >= peer, "%s", text);
	RIG_REQUIRE(peer || !strstr(text, "\"mode\":\"peer\""), "%s", text);
	RIG_REQUIRE(rig_number(counters, "rooms_peer") == peer, "%s", all);
	RIG_REQUIRE((rig_number(counters, "bytes_peer") > 0) == (peer > 0), "%s", all);
	if (peer)
		RIG_REQUIRE(rig_number(counters, "pieces_landed") == 0, "%s", all);
	snprintf(want, sizeof(want), "\"name\":\"%s\"", slow_path ? slow_path : "peer_");
	RIG_REQUIRE(!strstr(all, want) == !slow_path, "%s", all);
	cJSON_free(text);
	cJSON_free(all);
	cJSON_Delete(status);
	cJSON_Delete(rooms);
}

/* ---- scenarios ------------------------------------------------------------------------------- */

/* A daemon that sees two GPUs; `peer`: as in tests/fake_cuda.c. */
static struct rig_daemon *start(struct rig *rig, const char *peer, const char *config)
{
	struct rig_daemon *daemon;

	if (device_is_fake() && peer)
		RIG_REQUIRE(setenv("KVP_FAKE_CUDA_PEER", peer, 1) == 0);
	daemon = rig_daemon_start(rig, "node", config);
	RIG_REQUIRE(unsetenv("KVP_FAKE_CUDA_PEER") == 0);
	return daemon;
}

static struct end_plan sender(const struct rig_daemon *daemon, enum device_kind kind)
{
	return (struct end_plan){ daemon, .kind = kind, .room = 7, .tokens = 1000 };
}

/* Rank 0 is on the sender's GPU, rank 1 on the other. */
static struct end_plan receiver(const struct rig_daemon *daemon, enum device_kind kind,
				uint32_t rank)
{
	struct end_plan plan = sender(daemon, kind);

	plan.n_ranks = RANKS;
	plan.rank = rank;
	plan.gpu = (int)rank;
	return plan;
}

static void transfer(struct rig *rig, const struct rig_daemon *daemon, enum device_kind kind)
{
	struct end_plan send = sender(daemon, kind), receive;

	for (uint32_t r = 0; r < RANKS; r++) {
		receive = receiver(daemon, kind, r);
		rig_rank_start(rig, "decode", end_decode, &receive);
	}
	rig_rank_start(rig, "prefill", end_prefill, &send);
	rig_ranks_join(rig, END_SECS);
	end_unmapped(daemon);
}

static void by_handles(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG);

	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 1, NULL);
}

static void by_chunks(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG);

	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 1, NULL);
}

/* There is no transport to land by. */
static void without_transport(struct rig *rig)
{
	const struct rig_daemon *daemon;

	rig->alone = true;
	daemon = start(rig, NULL, CONFIG);
	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 1, NULL);
}

static void already(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, "already", CONFIG);

	transfer(rig, daemon, DEVICE_IPC);
	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 2, NULL);
}

static void off(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, NULL, CONFIG "peer = off\n");

	transfer(rig, daemon, DEVICE_IPC);
	moved(daemon, 0, "peer_off");
}

/* Not possible, or not to be had: it lands, and that is said. */
static void refused(struct rig *rig, const char *peer, const char *why)
{
	const struct rig_daemon *daemon = start(rig, peer, CONFIG);
	const struct end_plan plan = receiver(daemon, DEVICE_IPC, 1);
	struct end end;

	transfer(rig, daemon, DEVICE_IPC);
	transfer(rig, daemon, DEVICE_CHUNKS);
	moved(daemon, 0, "peer_unable");
	end_make(&end, &plan);
	rig_says(daemon, "pools", NULL, why); /* while there are some */
	end_close(&end);
}

static void not_possible(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "no", "no peer access from GPU-");
}

static void enabling_fails(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "fails", "cuCtxEnablePeerAccess: CUDA_ERROR_TOO_MANY_PEERS");
}

static void lost_writes(struct rig *rig)
{
	if (device_is_fake())
		refused(rig, "drops", "the bytes do not arrive");
}

static void busy(const char *path, bool on)
{
	int fd;

	if (!on) {
		RIG_REQUIRE(unlink(path) == 0);
		return;
	}
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	RIG_REQUIRE(fd >= 0);
	(void)close(fd);
}

static void wait_launches(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + END_SECS * UINT64_C(1000000000);

	while (end_lanes(daemon, "gpu", "busy") <= 0) {
		RIG_REQUIRE(rig_now_ns() < until, "nothing is launched");
		rig_sleep_ms(2);
	}
}

static uint32_t ends_failed(const struct rig_daemon *daemon)
{
	cJSON *root = rig_ask(daemon, "status", NULL);
	const cJSON *counters = cJSON_GetObjectItemCaseSensitive(root, "counters");
	uint32_t n = (uint32_t)rig_number(counters, "failed");

	cJSON_Delete(root);
	return n;
}

/*
 * The owner of the pool on the other GPU dies while a launch writes into it. Neither lane lets go
 * of the memory before the launch is over; both do then, and others are served.
 */
static void killed(struct rig *rig)
{
	uint64_t until = rig_now_ns() + END_SECS * UINT64_C(1000000000);
	const struct rig_daemon *daemon;
	struct end_plan send, receive;
	pid_t source, sinks[RANKS];
	char path[128];

	if (!device_is_fake())
		return;
	snprintf(path, sizeof(path), "%s/busy", rig->dir);
	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_BUSY", path, 1) == 0);
	daemon = start(rig, NULL, CONFIG);
	RIG_REQUIRE(unsetenv("KVP_FAKE_CUDA_BUSY") == 0);
	busy(path, true);
	send = sender(daemon, DEVICE_IPC);
	send.bereaved = true;
	source = rig_fork("prefill", end_prefill, &send);
	for (uint32_t r = 0; r < RANKS; r++) {
		receive = receiver(daemon, DEVICE_IPC, r);
		receive.bereaved = true;
		sinks[r] = rig_fork("decode", end_decode, &receive);
	}
	wait_launches(daemon);
	/* Each of three pools is mapped by both lanes. */
	RIG_REQUIRE(end_lanes(daemon, "gpu", "imports") == 6, "%.0f",
		    end_lanes(daemon, "gpu", "imports"));
	RIG_REQUIRE(kill(sinks[1], SIGKILL) == 0 && waitpid(sinks[1], NULL, 0) == sinks[1]);
	while (ends_failed(daemon) < 2) {
		RIG_REQUIRE(rig_now_ns() < until, "the rooms do not fail");
		rig_sleep_ms(2);
	}
	RIG_REQUIRE(end_lanes(daemon, "gpu", "imports") == 6,
		    "%.0f: memory that a launch uses is unmapped",
		    end_lanes(daemon, "gpu", "imports"));
	busy(path, false);
	(void)kill(sinks[0], SIGKILL);
	RIG_REQUIRE(waitpid(sinks[0], NULL, 0) == sinks[0]);
	(void)kill(source, SIGKILL);
	RIG_REQUIRE(waitpid(source, NULL, 0) == source);
	end_unmapped(daemon);
	transfer(rig, daemon, DEVICE_CHUNKS);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "by handles", by_handles },
		{ "by chunks", by_chunks },
		{ "without a transport", without_transport },
		{ "already enabled", already },
		{ "off", off },
		{ "not possible", not_possible },
		{ "enabling fails", enabling_fails },
		{ "writes that do not arrive", lost_writes },
		{ "killed in mid-move", killed },
	};

	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_GPUS", "2", 1) == 0);
	if (!device_or_fake(argv))
		return 77;
	if (device_count() < 2) {
		puts("one GPU: nothing to move between");
		return 77;
	}
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
