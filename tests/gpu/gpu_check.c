/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon's GPU parts on a GPU, without a daemon: launches of random tables against counting,
 * imports from real producer processes, and the speed of a gather and of a local move next to a
 * copy of the same bytes. Prints a line for each; the exit status says whether all were right.
 *
 * usage: gpu_check [ROUNDS]     of random tables, and nothing else: for a checker of memory
 */

#include <cuda.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu.h"
#include "daemon/gpu_import.h"
#include "proto/packet.h"
#include "proto/util.h"
#include "tests/gpu/common.h"
#include "tests/support_rows.h"
#include "tests/support_world.h"

#define POOL_BYTES (UINT64_C(512) << 20)
#define CHUNK_BYTES (UINT64_C(2) << 20)
#define CHUNKS 4u
#define ROUNDS 21

static struct kvp_gpu *gpu;

/* Launches the tables and waits for them. */
static void run(void)
{
	uint64_t ticket, over = 0;

	if (kvp_gpu_launch(gpu, &ticket) < 0)
		exit(1);
	while (over < ticket)
		if (kvp_gpu_poll(gpu, &over) < 0)
			exit(1);
}

/* ---- tables of launches ---------------------------------------------------------------------- */

unsigned char *world_memory(size_t bytes)
{
	void *at;

	if (kvp_gpu_host_alloc(gpu, bytes, &at) < 0)
		exit(1);
	return at;
}

void world_memory_free(void *at)
{
	kvp_gpu_host_free(gpu, at);
}

/* A wrong byte ends the program. */
static void check_tables(uint32_t rounds)
{
	static struct world w;
	unsigned char *slot = world_memory(RANKS_MAX << 20);
	uint32_t good = 0;

	for (uint32_t round = 0; round < rounds; round++) {
		world_make(&w);
		world_pools(&w);
		if (world_good(&w) && round % 2) {
			if (!world_add_moves(&w, kvp_gpu_jobs(gpu)))
				exit(1);
			run();
		} else if (world_good(&w)) {
			for (uint32_t r = 0; r < w.n_ranks; r++)
				good += world_add_piece(&w, r, true, kvp_gpu_jobs(gpu), slot);
			run();
			for (uint32_t r = 0; r < w.n_ranks; r++)
				good += world_add_piece(&w, r, false, kvp_gpu_jobs(gpu), slot);
			run();
		}
		if (world_good(&w))
			world_check(&w, round);
		world_free(&w);
	}
	world_memory_free(slot);
	say(good > rounds / 2, "random gathers, scatters and moves", "every byte as counting says");
}

/* ---- imports --------------------------------------------------------------------------------- */

struct offer {
	CUipcMemHandle handle, freed;
	uint64_t chunk_bytes;
};

/* Its bytes are a pattern; lives until it is killed. */
static _Noreturn void producer(int fd)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
	};
	const CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	struct offer offer = { .chunk_bytes = CHUNK_BYTES };
	CUmemGenericAllocationHandle chunk;
	CUdeviceptr pool, gone, va;
	int fds[CHUNKS];

	context();
	CHECK(cuMemAlloc(&pool, POOL_BYTES));
	CHECK(cuMemsetD32(pool, 0x5aa51234, POOL_BYTES / 4));
	CHECK(cuIpcGetMemHandle(&offer.handle, pool));
	CHECK(cuMemAlloc(&gone, POOL_BYTES / 4));
	CHECK(cuIpcGetMemHandle(&offer.freed, gone));
	CHECK(cuMemFree(gone));
	CHECK(cuMemAddressReserve(&va, CHUNKS * CHUNK_BYTES, 0, 0, 0));
	for (uint32_t i = 0; i < CHUNKS; i++) {
		CHECK(cuMemCreate(&chunk, CHUNK_BYTES, &prop, 0));
		CHECK(cuMemMap(va + i * CHUNK_BYTES, CHUNK_BYTES, 0, chunk, 0));
		CHECK(cuMemExportToShareableHandle(&fds[i], chunk,
						   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	}
	CHECK(cuMemSetAccess(va, CHUNKS * CHUNK_BYTES, &access, 1));
	for (uint32_t i = 0; i < CHUNKS; i++)
		CHECK(cuMemsetD32(va + i * CHUNK_BYTES, 0x77770000 + i, CHUNK_BYTES / 4));
	CHECK(cuCtxSynchronize());
	if (kvp_packet_send(fd, &offer, sizeof(offer), fds, CHUNKS) != 0)
		exit(1);
	for (;;)
		pause();
}

static uint64_t free_bytes(void)
{
	size_t free_now, total;

	CHECK(cuMemGetInfo(&free_now, &total));
	return free_now;
}

static uint32_t word_at(uint64_t addr)
{
	uint32_t word;

	CHECK(cuMemcpyDtoH(&word, addr, sizeof(word)));
	return word;
}

static void refuse(int r, int want, const char *what, const char *err)
{
	char text[256];

	snprintf(text, sizeof(text), "%s: %s", strerror(-r), err);
	say(r == want, what, text);
}

static int import_ipc(struct kvp_gpu_imports *imports, const void *handle, uint64_t offset,
		      uint64_t bytes, struct kvp_gpu_import **out, uint64_t *addr, char err[200])
{
	const struct kvp_gpu_ipc ipc = { handle, 1, offset, bytes, false };

	return kvp_gpu_import_ipc(imports, &ipc, out, addr, err, 200);
}

static void bad_ipc(struct kvp_gpu_imports *imports, const struct offer *offer)
{
	struct kvp_gpu_import *import = NULL;
	CUipcMemHandle own, noise;
	CUdeviceptr mine;
	uint64_t addr;
	char err[200] = "";
	int r = import_ipc(imports, &offer->handle, POOL_BYTES - 4096, 8192, &import, &addr, err);

	refuse(r, -ERANGE, "offset past the allocation", err);
	r = import_ipc(imports, &offer->freed, 0, 4096, &import, &addr, err);
	say(r < 0, "handle of freed memory", err);
	memset(&noise, 0x3c, sizeof(noise));
	r = import_ipc(imports, &noise, 0, 4096, &import, &addr, err);
	say(r < 0, "handle that is none", err);
	CHECK(cuMemAlloc(&mine, 1 << 20));
	CHECK(cuIpcGetMemHandle(&own, mine));
	r = import_ipc(imports, &own, 0, 4096, &import, &addr, err);
	say(r < 0, "handle of this very process", err);
	CHECK(cuMemFree(mine));
}

static void bad_vmm(struct kvp_gpu_imports *imports, const int *fds)
{
	struct kvp_gpu_import *import;
	uint64_t addr, wrong = 4 * CHUNK_BYTES, right = CHUNK_BYTES;
	int memfd = memfd_create("no chunk", 0);
	struct kvp_gpu_chunks chunks = { &memfd, &right, 1, false };
	char err[200] = "";
	int r;

	if (ftruncate(memfd, (off_t)CHUNK_BYTES) < 0)
		exit(1);
	r = kvp_gpu_import_vmm(imports, &chunks, &import, &addr, err, sizeof(err));
	say(r < 0, "fd of the wrong kind", err);
	chunks = (struct kvp_gpu_chunks){ fds, &wrong, 1, false };
	r = kvp_gpu_import_vmm(imports, &chunks, &import, &addr, err, sizeof(err));
	say(r < 0, "chunk smaller than said", err);
	close(memfd);
}

/* By what a NIC may reach a pool: the driver makes a dma-buf of a chunk that another process made,
 * and none of what came by handle. */
static void check_dmabufs(struct kvp_gpu_imports *imports, const struct kvp_gpu_import *ipc,
			  const int *fds)
{
	const uint64_t bytes = CHUNK_BYTES;
	const struct kvp_gpu_chunks chunks = { fds, &bytes, 1, false };
	struct kvp_gpu_import *chunk;
	uint64_t addr;
	char err[200] = "";
	int fd = -1, r;

	refuse(kvp_gpu_import_dmabuf(imports, ipc, &fd, err, sizeof(err)), -EOPNOTSUPP,
	       "dma-buf of memory by IPC", err);
	if (kvp_gpu_import_vmm(imports, &chunks, &chunk, &addr, err, sizeof(err)) < 0) {
		say(false, "one chunk", err);
		return;
	}
	r = kvp_gpu_import_dmabuf(imports, chunk, &fd, err, sizeof(err));
	say(kvp_gpu_traits(gpu)->dmabuf ? r == 0 && fd >= 0 : r == -EOPNOTSUPP,
	    "dma-buf of an imported chunk", err);
	if (r == 0)
		close(fd);
	kvp_gpu_import_put(imports, chunk);
}

static void good_imports(struct kvp_gpu_imports *imports, const struct offer *offer, const int *fds,
			 pid_t pid)
{
	const uint64_t sizes[CHUNKS] = { CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES };
	const struct kvp_gpu_chunks chunks = { fds, sizes, CHUNKS, false };
	struct kvp_gpu_import *ipc[2], *vmm;
	uint64_t a[2], v, bytes;
	char err[200] = "", text[64];
	uint64_t before;

	for (int i = 0; i < 2; i++)
		if (import_ipc(imports, &offer->handle, (uint64_t)i * 4096, 8192, &ipc[i], &a[i],
			       err) < 0)
			exit(1);
	say(a[1] == a[0] + 4096 && kvp_gpu_imports_count(imports, &bytes) == 1 &&
		    word_at(a[1]) == 0x5aa51234,
	    "one allocation, imported twice", "opened once");
	if (kvp_gpu_import_vmm(imports, &chunks, &vmm, &v, err, sizeof(err)) < 0)
		say(false, "four chunks as one range", err);
	else
		say(word_at(v + 3 * CHUNK_BYTES) == 0x77770003, "four chunks as one range", "");
	check_dmabufs(imports, ipc[0], fds);
	before = free_bytes();
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	say(word_at(a[0] + 512) == 0x5aa51234, "producer killed: its mapping can be read", "");
	kvp_gpu_import_put(imports, ipc[0]);
	kvp_gpu_import_put(imports, ipc[1]);
	kvp_gpu_import_put(imports, vmm);
	snprintf(text, sizeof(text), "%lld MiB came back",
		 (long long)(free_bytes() - before) >> 20);
	say(free_bytes() >= before + POOL_BYTES, "unmapped: the dead producer's pool is freed",
	    text);
}

/* Forked before this process has touched the driver. */
static void check_imports(pid_t pid, int fd)
{
	struct kvp_gpu_imports *imports;
	struct offer offer = { 0 };
	int fds[CHUNKS];
	size_t n_fds = 0;
	ssize_t n;
	uint64_t bytes;

	while ((n = kvp_packet_recv(fd, &offer, sizeof(offer), fds, &n_fds, CHUNKS)) == -EAGAIN)
		usleep(1000);
	if (n != sizeof(offer) || n_fds != CHUNKS || kvp_gpu_imports_create(&imports, gpu) < 0) {
		say(false, "producer", "sent nothing");
		return;
	}
	bad_ipc(imports, &offer);
	bad_vmm(imports, fds);
	say(kvp_gpu_imports_count(imports, &bytes) == 0, "nothing is left of refused imports", "");
	good_imports(imports, &offer, fds, pid);
	for (uint32_t i = 0; i < CHUNKS; i++)
		close(fds[i]);
	kvp_gpu_imports_destroy(imports);
}

/* ---- speed ----------------------------------------------------------------------------------- */

struct speed {
	struct rows rows;
	CUdeviceptr src, dst, slots;
	unsigned char *src_map, *dst_maps[ROWS_RANKS];
	double table_us; /* of the processor, for one round */
};

static void add_moves(struct speed *s)
{
	const struct kvp_move_source source = {
		.src = { &s->src_map, &s->rows.src_side },
		.n_entries = ROWS_ENTRIES,
		.tokens = s->rows.tokens,
	};

	for (uint32_t r = 0; r < ROWS_RANKS; r++) {
		const struct kvp_move move = { &s->rows.legs[r],
					       { &s->dst_maps[r], &s->rows.dst_sides[r] } };

		if (kvp_jobs_move(kvp_gpu_jobs(gpu), &source, &move) < 0)
			exit(1);
	}
}

/* All of a rank as one piece; the place is as large as it takes. */
static void add_pieces(struct speed *s, bool gather)
{
	static struct kvp_part parts[ROWS_ENTRIES];
	uint64_t at = s->slots;

	for (uint32_t r = 0; r < ROWS_RANKS; r++) {
		struct kvp_copy_piece piece = {
			.leg = &s->rows.legs[r],
			.pool = { gather ? &s->src_map : &s->dst_maps[r],
				  gather ? &s->rows.src_side : &s->rows.dst_sides[r] },
			.tokens = s->rows.tokens,
			.parts = parts,
		};
		uint64_t bytes = kvp_piece_layout(piece.leg, NULL, 0, (uint32_t)s->rows.tokens,
						  parts, &piece.n_parts);

		if ((gather ? kvp_jobs_gather(kvp_gpu_jobs(gpu), &piece, at)
			    : kvp_jobs_scatter(kvp_gpu_jobs(gpu), &piece, at)) < 0)
			exit(1);
		at += KVP_ALIGN_UP(bytes, 4096u);
	}
}

/* Median of launch to polled end, in us: 0 a copy, 1 a move, 2 a gather, 3 a scatter. */
static double time_of(struct speed *s, int how, CUstream stream)
{
	double us[ROUNDS], table[ROUNDS];

	for (int i = 0; i < ROUNDS; i++) {
		double t0 = rows_now(), t1;

		if (how == 1)
			add_moves(s);
		else if (how)
			add_pieces(s, how == 2);
		t1 = rows_now();
		if (how) {
			run();
		} else {
			CHECK(cuMemcpyDtoDAsync(s->dst, s->src, s->rows.pool_bytes, stream));
			while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
				;
		}
		us[i] = (rows_now() - t1) * 1e6;
		table[i] = (t1 - t0) * 1e6;
	}
	s->table_us = rows_median(table, ROUNDS);
	return rows_median(us, ROUNDS);
}

static void speed_line(struct speed *s, const char *name, int how, double copy_us, CUstream stream)
{
	double us = time_of(s, how, stream);
	char text[128];

	snprintf(text, sizeof(text), "%8.1f us, copy %8.1f us, ratio %.3f, tables %.1f us", us,
		 copy_us, copy_us / us, s->table_us);
	say(true, name, text);
}

static void check_speed(uint32_t n_pages)
{
	static struct speed s;
	double copy_us;
	CUstream stream;

	memset(&s, 0, sizeof(s));
	rows_make(&s.rows, n_pages);
	printf("      %.1f MB: 7 layers of 576 bytes, %u tokens, pages of 64, DCP 4\n",
	       (double)s.rows.pool_bytes / 1e6, (unsigned)s.rows.tokens);
	CHECK(cuMemAlloc(&s.src, s.rows.pool_bytes));
	CHECK(cuMemAlloc(&s.dst, s.rows.pool_bytes));
	CHECK(cuMemAlloc(&s.slots, s.rows.pool_bytes + (1 << 20)));
	CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK(cuMemcpyHtoD(s.src, s.rows.src, s.rows.pool_bytes));
	s.src_map = (unsigned char *)(uintptr_t)s.src;
	for (uint32_t r = 0; r < ROWS_RANKS; r++)
		s.dst_maps[r] =
			(unsigned char *)(uintptr_t)s.dst + r * (s.rows.pool_bytes / ROWS_RANKS);
	copy_us = time_of(&s, 0, stream);
	CHECK(cuMemsetD8(s.dst, 0, s.rows.pool_bytes));
	CHECK(cuCtxSynchronize());
	speed_line(&s, "local move", 1, copy_us, stream);
	CHECK(cuMemcpyDtoH(s.rows.dst, s.dst, s.rows.pool_bytes));
	rows_check(&s.rows, "local move"); /* or the program ends */
	speed_line(&s, "gather", 2, copy_us, stream);
	CHECK(cuMemsetD8(s.dst, 0, s.rows.pool_bytes));
	CHECK(cuCtxSynchronize());
	speed_line(&s, "scatter", 3, copy_us, stream);
	CHECK(cuMemcpyDtoH(s.rows.dst, s.dst, s.rows.pool_bytes));
	rows_check(&s.rows, "gather and scatter");
	CHECK(cuMemFree(s.src));
	CHECK(cuMemFree(s.dst));
	CHECK(cuMemFree(s.slots));
	CHECK(cuStreamDestroy(stream));
}

static void open_gpu(void)
{
	char err[160];

	context();
	if (kvp_gpu_open(&gpu, "0", err, sizeof(err)) < 0) {
		fprintf(stderr, "%s\n", err);
		exit(1);
	}
	printf("%s %s\n", kvp_gpu_name(gpu), kvp_gpu_uuid(gpu));
}

int main(int argc, char **argv)
{
	int pair[2];
	pid_t pid;

	if (argc > 1) {
		open_gpu();
		check_tables((uint32_t)strtoul(argv[1], NULL, 10));
		kvp_gpu_close(gpu);
		return bad != 0;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) < 0)
		return 1;
	pid = fork(); /* each process opens the driver for itself */
	if (pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		producer(pair[1]);
	}
	close(pair[1]);
	open_gpu();
	check_imports(pid, pair[0]);
	check_tables(600);
	check_speed(32);
	check_speed(128);
	check_speed(512);
	check_speed(2048);
	kvp_gpu_close(gpu);
	printf("%s\n", bad ? "something is wrong" : "all right");
	return bad != 0;
}
