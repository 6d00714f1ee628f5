/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client's room through a whole daemon to writes straight into pools on a GPU: engines in
 * processes of their own, the host's lane and the GPU's of one daemon with an RDMA device between
 * them, which is none (tests/fake_verbs.c), as the GPU's driver is (tests/fake_cuda.c). The device
 * reaches the memory by the dma-buf alone. Every byte is compared, and what the daemon says of it.
 *
 * usage: replay_gpu_direct [SCENARIO ...]
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "tests/support_end.h"
#include "tests/support_faults.h"

#define RANKS 2u
#define TOKENS UINT64_C(1000)
/* The rings are the host's: the device that is none reads and writes what the processor can. */
#define CONFIG                                               \
	"[gpu]\ndevices = all\nslots = 4\nslot_bytes = 1M\n" \
	"[verbs]\ndevice = fake0\n[data]\ntransport = verbs\n"

/* Nothing that a peer could write to is left, and nothing of clients is mapped. */
static void nothing_stays(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + END_SECS * UINT64_C(1000000000);

	while (end_lanes(daemon, NULL, "windows") != 0 || end_lanes(daemon, NULL, "regions") != 0 ||
	       end_lanes(daemon, "gpu", "imports") != 0) {
		RIG_REQUIRE(rig_now_ns() < until, "%.0f windows, %.0f regions, %.0f imports stay",
			    end_lanes(daemon, NULL, "windows"), end_lanes(daemon, NULL, "regions"),
			    end_lanes(daemon, "gpu", "imports"));
		rig_sleep_ms(2);
	}
}

static void went_directly(const struct rig_daemon *daemon)
{
	double landed = end_lanes(daemon, NULL, "pieces_landed");

	RIG_REQUIRE(landed > 0 && end_lanes(daemon, NULL, "pieces_direct") == landed,
		    "%.0f of %.0f pieces", end_lanes(daemon, NULL, "pieces_direct"), landed);
	RIG_REQUIRE(end_lanes(daemon, NULL, "bytes_direct") >= TOKENS * END_ROW * END_LAYERS);
	rig_says(daemon, "room", "7", "\"mode\":\"direct\"");
}

/* ---- scenarios ------------------------------------------------------------------------------- */

static struct rig_daemon *start(struct rig *rig, const char *config)
{
	rig->program = "tests/fake/kvpackd";
	return rig_daemon_start(rig, "node", config);
}

/* Of each decode rank's pool a window is open. */
static void wait_windows(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + END_SECS * UINT64_C(1000000000);

	while (end_lanes(daemon, NULL, "windows") < RANKS) {
		RIG_REQUIRE(rig_now_ns() < until, "%.0f windows are open",
			    end_lanes(daemon, NULL, "windows"));
		rig_sleep_ms(2);
	}
}

static struct end_plan sender(const struct rig_daemon *daemon)
{
	return (struct end_plan){ daemon, .kind = DEVICE_NONE, .room = 7, .tokens = TOKENS };
}

static struct end_plan receiver(const struct rig_daemon *daemon, enum device_kind kind,
				uint32_t rank)
{
	struct end_plan plan = sender(daemon);

	plan.kind = kind;
	plan.n_ranks = RANKS;
	plan.rank = rank;
	return plan;
}

static void begin(struct rig *rig, const struct rig_daemon *daemon, enum device_kind kind)
{
	struct end_plan send = sender(daemon), receive;

	for (uint32_t r = 0; r < RANKS; r++) {
		receive = receiver(daemon, kind, r);
		rig_rank_start(rig, "decode", end_decode, &receive);
	}
	rig_rank_start(rig, "prefill", end_prefill, &send);
}

/* Nothing is written before it was seen by which dma-bufs the device reaches the pools. */
static void transfer(struct rig *rig, const struct rig_daemon *daemon, enum device_kind kind,
		     const char *regions)
{
	fault_hold(daemon, "send", true);
	begin(rig, daemon, kind);
	wait_windows(daemon);
	RIG_REQUIRE(end_lanes(daemon, NULL, regions) == RANKS, "%s: %.0f", regions,
		    end_lanes(daemon, NULL, regions));
	fault_hold(daemon, "send", false);
	rig_ranks_join(rig, END_SECS);
	nothing_stays(daemon);
}

/* An allocation with an IPC handle: by the dma-buf that its owner has sent along. */
static void by_the_owners_dma_buf(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
}

static void by_the_owners_dma_buf_of_chunks(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	transfer(rig, daemon, DEVICE_CHUNKS, "regions_dmabuf");
	went_directly(daemon);
}

/* The owner of the chunks cannot make one: the daemon makes it of its own mapping. */
static void by_a_dma_buf_of_the_mapping(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");

	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_DMABUF", "no", 1) == 0); /* for the engines */
	transfer(rig, daemon, DEVICE_CHUNKS, "regions_vmm");
	went_directly(daemon);
}

static void the_gpu_is_told(struct rig *rig)
{
	const struct rig_daemon *daemon =
		start(rig, CONFIG "mode = direct\n[gpu]\nflush = always\n");

	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
	RIG_REQUIRE(end_lanes(daemon, "gpu", "flushes") > 0);
}

/* The device takes no dma-buf: the rooms land, and it is said why. */
static void refused(struct rig *rig)
{
	const struct rig_daemon *daemon;

	RIG_REQUIRE(setenv("KVP_FAKE_VERBS_DMABUF", "refused", 1) == 0);
	daemon = start(rig, CONFIG "mode = auto\n");
	RIG_REQUIRE(unsetenv("KVP_FAKE_VERBS_DMABUF") == 0);
	begin(rig, daemon, DEVICE_IPC);
	rig_ranks_join(rig, END_SECS);
	nothing_stays(daemon);
	RIG_REQUIRE(end_lanes(daemon, NULL, "pieces_direct") == 0);
	RIG_REQUIRE(end_lanes(daemon, "fell_back", "memory") > 0 ||
		    end_lanes(daemon, "fell_back", "pending") > 0);
	rig_says(daemon, "room", "7", "\"mode\":\"landing\"");
}

/*
 * A decode engine dies while a peer has the keys of its pool and has not written yet: they are
 * taken back, the memory is let go of, and who comes next is served.
 */
static void killed(struct rig *rig)
{
	const struct rig_daemon *daemon = start(rig, CONFIG "mode = direct\n");
	struct end_plan send = sender(daemon), receive;
	pid_t source, sinks[RANKS];
	int status = -1;

	fault_hold(daemon, "send", true);
	for (uint32_t r = 0; r < RANKS; r++) {
		receive = receiver(daemon, DEVICE_IPC, r);
		receive.bereaved = true;
		sinks[r] = rig_fork("decode", end_decode, &receive);
	}
	send.bereaved = true;
	source = rig_fork("prefill", end_prefill, &send);
	wait_windows(daemon);
	for (uint32_t r = 0; r < RANKS; r++)
		RIG_REQUIRE(kill(sinks[r], SIGKILL) == 0 && waitpid(sinks[r], NULL, 0) == sinks[r]);
	RIG_REQUIRE(waitpid(source, &status, 0) == source && status == 0, "%#x", (unsigned)status);
	nothing_stays(daemon);
	RIG_REQUIRE(end_lanes(daemon, NULL, "pieces_landed") == 0);
	fault_hold(daemon, "send", false);
	transfer(rig, daemon, DEVICE_IPC, "regions_dmabuf");
	went_directly(daemon);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "by the owner's dma-buf", by_the_owners_dma_buf },
		{ "by the owner's dma-buf of chunks", by_the_owners_dma_buf_of_chunks },
		{ "by a dma-buf of the mapping", by_a_dma_buf_of_the_mapping },
		{ "the GPU is told", the_gpu_is_told },
		{ "refused", refused },
		{ "killed with keys out", killed },
	};

	if (!device_or_fake(argv))
		return 77;
	if (!device_is_fake()) {
		puts("a real GPU: the RDMA device that is none cannot write there");
		return 77;
	}
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
