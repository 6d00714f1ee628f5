/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a daemon with a GPU is offered in the place of memory, by a client that speaks the protocol
 * itself: each is refused in words, and what comes after it is served. And a GPU that is lost in
 * the middle of rooms: a launch reads where no memory is, on a real one as on that which is none.
 *
 * usage: replay_gpu_bad [SCENARIO ...]
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/device.h"
#include "proto/limits.h"
#include "proto/msg.h"
#include "proto/packet.h"
#include "proto/util.h"
#include "tests/support_device.h"
#include "tests/support_faults.h"

#define PAGE 64u
#define PAGES 16u
#define ROW 576u
#define ENTRY_BYTES ((uint64_t)PAGES * PAGE * ROW)
#define POOL_BYTES (UINT64_C(4) << 20)
#define SECS 30
#define CONFIG "[gpu]\ndevices = all\nslots = 2\nslot_bytes = 1M\n"

/* ---- a client in packets --------------------------------------------------------------------- */

static uint64_t last_id;

static int talk_connect(const struct rig_daemon *daemon)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	RIG_REQUIRE(fd >= 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%.107s", daemon->socket);
	RIG_REQUIRE(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0, "%s",
		    strerror(errno));
	return fd;
}

/* The answer to the newest request: its status, with the daemon's words. */
static Kvp__Status talk_answer(int fd, char text[256])
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	KVP_CLEANUP(kvp_msg_free_daemonp) Kvp__DaemonMsg *msg = NULL;
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);
	int fds[KVP_LIMIT_FDS];
	size_t n_fds = 0;
	char err[128];
	ssize_t n;

	while ((n = kvp_packet_recv(fd, buf, sizeof(buf), fds, &n_fds, KVP_LIMIT_FDS)) == -EAGAIN) {
		RIG_REQUIRE(rig_now_ns() < until, "no answer");
		rig_sleep_ms(1);
	}
	RIG_REQUIRE(n > 0, "the daemon has hung up");
	for (size_t i = 0; i < n_fds; i++)
		(void)close(fds[i]);
	RIG_REQUIRE(kvp_msg_decode_daemon(buf, (size_t)n, &msg, err, sizeof(err)) == 0, "%s", err);
	RIG_REQUIRE(msg->body_case == KVP__DAEMON_MSG__BODY_REPLY && msg->reply->id == last_id);
	snprintf(text, 256, "%s", msg->reply->text);
	return msg->reply->status;
}

static Kvp__Status talk(int fd, Kvp__ClientMsg *msg, const int *fds, size_t n_fds, char text[256])
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	long n;

	msg->id = ++last_id;
	n = kvp_msg_encode_client(msg, buf, sizeof(buf));
	RIG_REQUIRE(n > 0 && kvp_packet_send(fd, buf, (size_t)n, fds, n_fds) == 0);
	return talk_answer(fd, text);
}

static void talk_hello(int fd)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	char text[256];

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.name = (char *)"bad";
	hello.pid = (uint32_t)getpid();
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	RIG_REQUIRE(talk(fd, &msg, NULL, 0, text) == KVP__STATUS__STATUS_OK, "%s", text);
}

static uint64_t row_stride = ROW; /* that pools say */

/* A pool of one entry in that memory. */
static Kvp__Status talk_pool(int fd, uint32_t id, Kvp__Memory *memory, const int *fds, size_t n_fds,
			     char text[256])
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__PoolRegister pool = KVP__POOL_REGISTER__INIT;
	Kvp__Entry entry = KVP__ENTRY__INIT, *entries[] = { &entry };

	entry.klass = KVP__ENTRY_CLASS__CLASS_SHARDED;
	entry.bytes = row_stride == ROW ? ENTRY_BYTES : memory->bytes;
	entry.page_stride = (uint64_t)PAGE * ROW;
	entry.row_stride = row_stride;
	entry.row_bytes = entry.full_bytes = ROW;
	entry.rows_per_page = PAGE;
	entry.n_pages = PAGES;
	pool.pool = id;
	pool.entries = entries;
	pool.n_entries = 1;
	pool.memories = &memory;
	pool.n_memories = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_POOL_REGISTER;
	msg.pool_register = &pool;
	return talk(fd, &msg, fds, n_fds, text);
}

/* ---- memory that is none --------------------------------------------------------------------- */

/* What a client would send of this memory. */
struct offer {
	struct kvpl_export export;
	Kvp__Memory memory;
};

static void offer_make(struct offer *offer, uint64_t addr, uint64_t bytes)
{
	char err[KVPL_DEVICE_ERR];

	RIG_REQUIRE(kvpl_device_export(addr, bytes, &offer->export, err) == 0, "%s", err);
	kvp__memory__init(&offer->memory);
	offer->memory.gpu = (ProtobufCBinaryData){ 16, offer->export.gpu };
	offer->memory.offset = offer->export.offset;
	offer->memory.bytes = bytes;
	if (offer->export.n_chunks) {
		offer->memory.kind = KVP__MEMORY_KIND__MEMORY_CUDA_VMM;
		offer->memory.chunk_bytes = offer->export.chunk_bytes;
		offer->memory.n_chunk_bytes = offer->export.n_chunks;
	} else {
		offer->memory.kind = KVP__MEMORY_KIND__MEMORY_CUDA_IPC;
		offer->memory.handle =
			(ProtobufCBinaryData){ KVPL_IPC_BYTES, offer->export.handle };
	}
}

struct liar {
	int fd;
	uint32_t next; /* pool */
};

/* Refused, with a word of the reason; nothing of it is left, so the number can be used again. */
static void refused(struct liar *liar, struct offer *offer, const int *fds, const char *what,
		    const char *why)
{
	char text[256];
	Kvp__Status status =
		talk_pool(liar->fd, liar->next, &offer->memory, fds, offer->export.n_chunks, text);

	printf("     %s: status %d, %s\n", what, (int)status, text);
	fflush(stdout);
	RIG_REQUIRE(status != KVP__STATUS__STATUS_OK, "%s: taken", what);
	RIG_REQUIRE(strstr(text, why), "%s: \"%s\" does not say \"%s\"", what, text, why);
	RIG_REQUIRE(status == (strstr(text, "does not use")      ? KVP__STATUS__STATUS_UNSUPPORTED
			       : strstr(text, "ILLEGAL_ADDRESS") ? KVP__STATUS__STATUS_SYSTEM
								 : KVP__STATUS__STATUS_INVALID),
		    "%s: status %d", what, (int)status);
}

static void accepted(struct liar *liar, struct offer *offer, const char *what)
{
	char text[256];

	RIG_REQUIRE(talk_pool(liar->fd, liar->next++, &offer->memory, offer->export.fds,
			      offer->export.n_chunks, text) == KVP__STATUS__STATUS_OK,
		    "%s: %s", what, text);
}

/* A handle as the fake driver makes it, of the daemon's own process. */
static void own_handle(struct offer *offer, pid_t daemon)
{
	const uint64_t of_daemon = (uint64_t)daemon;

	memcpy(offer->export.handle + 8, &of_daemon, sizeof(of_daemon));
}

static void bad_handles(struct liar *liar, const struct rig_daemon *daemon)
{
	uint64_t good = device_alloc(POOL_BYTES), gone = device_alloc(POOL_BYTES);
	static struct offer offer, freed;

	offer_make(&freed, gone, POOL_BYTES);
	device_free(gone);
	refused(liar, &freed, NULL, "handle of freed memory", "cuIpcOpenMemHandle");
	offer_make(&offer, good, POOL_BYTES);
	offer.memory.offset += POOL_BYTES;
	refused(liar, &offer, NULL, "offset past the allocation", "past the allocation");
	offer_make(&offer, good, POOL_BYTES);
	offer.export.gpu[3] ^= 0x55;
	refused(liar, &offer, NULL, "handle of another GPU", "does not use");
	offer_make(&offer, good, POOL_BYTES);
	memset(offer.export.handle, 0x3c, sizeof(offer.export.handle));
	refused(liar, &offer, NULL, "handle that is none", "cuIpcOpenMemHandle");
	if (device_is_fake()) { /* else a daemon gives none away: gpu_check has its own */
		offer_make(&offer, good, POOL_BYTES);
		own_handle(&offer, daemon->pid);
		refused(liar, &offer, NULL, "handle of the daemon itself", "cuIpcOpenMemHandle");
	}
	offer_make(&offer, good, POOL_BYTES);
	row_stride = UINT64_C(1) << 32; /* the kernel counts by 32 bits */
	offer.memory.bytes = PAGE * row_stride;
	refused(liar, &offer, NULL, "rows too far apart", "row_stride is 4294967296, at most");
	row_stride = ROW;
	offer_make(&offer, good, POOL_BYTES);
	accepted(liar, &offer, "a good handle after them");
}

static void bad_chunks(struct liar *liar)
{
	struct device_range range;
	static struct offer offer;
	int memfd = memfd_create("no chunk", MFD_CLOEXEC);
	int wrong[KVPL_DEVICE_CHUNKS];

	RIG_REQUIRE(memfd >= 0 && ftruncate(memfd, (off_t)POOL_BYTES) == 0);
	device_alloc_chunks(&range, POOL_BYTES);
	offer_make(&offer, range.addr, range.bytes);
	for (uint32_t i = 0; i < offer.export.n_chunks; i++)
		wrong[i] = i ? offer.export.fds[i] : memfd;
	refused(liar, &offer, wrong, "fd of the wrong kind", "cuMemImportFromShareableHandle");
	offer.export.chunk_bytes[0] *= 4;
	refused(liar, &offer, offer.export.fds, "chunk smaller than said", "cuMem");
	offer.export.chunk_bytes[0] /= 4;
	accepted(liar, &offer, "good chunks after them");
	kvpl_export_fini(&offer.export);
	(void)close(memfd);
}

static void no_memories(struct rig *rig)
{
	const struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct liar liar = { talk_connect(daemon), 1 };

	talk_hello(liar.fd);
	bad_handles(&liar, daemon);
	bad_chunks(&liar);
	(void)close(liar.fd);
}

/* Memory of one GPU in the name of the other, where each reaches the other's. */
static void other_gpu(struct rig *rig)
{
	struct device_range range;
	static struct offer ipc, chunks, there;
	struct liar liar = { .next = 1 };

	if (device_is_fake())
		RIG_REQUIRE(setenv("KVP_FAKE_CUDA_GPUS", "2", 1) == 0);
	if (device_count() < 2) {
		puts("     one GPU: there is no other");
		return;
	}
	liar.fd = talk_connect(rig_daemon_start(rig, "node", CONFIG));
	talk_hello(liar.fd);
	device_use(1);
	offer_make(&there, device_alloc(POOL_BYTES), POOL_BYTES);
	accepted(&liar, &there, "a handle of the second GPU");
	device_use(0);
	offer_make(&ipc, device_alloc(POOL_BYTES), POOL_BYTES);
	device_alloc_chunks(&range, POOL_BYTES);
	offer_make(&chunks, range.addr, range.bytes);
	accepted(&liar, &chunks, "chunks of the first GPU"); /* each is mapped for the other, too */
	ipc.memory.gpu.data = chunks.memory.gpu.data = there.export.gpu;
	refused(&liar, &ipc, NULL, "a handle in the name of the other", "memory of another GPU");
	refused(&liar, &chunks, chunks.export.fds, "chunks in its name", "memory of another GPU");
	ipc.memory.gpu.data = ipc.export.gpu;
	accepted(&liar, &ipc, "the handle under its own name");
	/* The second GPU's lane has it open now, too, as what it is. */
	ipc.memory.gpu.data = there.export.gpu;
	refused(&liar, &ipc, NULL, "a handle in the name of the other, again",
		"memory of another GPU");
	kvpl_export_fini(&chunks.export);
	(void)close(liar.fd);
}

/* ---- a daemon that is told of no GPU --------------------------------------------------------- */

static bool has_driver(const struct rig_daemon *daemon)
{
	char path[64], line[512];
	bool found = false;
	FILE *maps;

	(void)snprintf(path, sizeof(path), "/proc/%d/maps", (int)daemon->pid);
	maps = fopen(path, "re");
	RIG_REQUIRE(maps);
	while (fgets(line, sizeof(line), maps))
		found = found || strstr(line, "libcuda.so");
	(void)fclose(maps);
	return found;
}

/* It does not even load the driver, whatever it is offered. */
static void no_devices(struct rig *rig)
{
	const struct rig_daemon *with = rig_daemon_start(rig, "with", CONFIG);
	const struct rig_daemon *without = rig_daemon_start(rig, "without", NULL);
	struct liar liar = { .fd = talk_connect(without), .next = 1 };
	struct rig_pool pool = { 0 };
	struct kvp_client *client;
	struct offer offer;
	char *json = NULL;

	RIG_REQUIRE(has_driver(with) && !has_driver(without));
	talk_hello(liar.fd);
	offer_make(&offer, device_alloc(POOL_BYTES), POOL_BYTES);
	refused(&liar, &offer, NULL, "a pool on a GPU", "does not use (gpu.devices is none)");
	client = rig_client(without, "engine");
	(void)rig_pool_entry(&pool, 0, ROW, PAGE, PAGES);
	rig_pool_make(&pool, client, "host", 1);
	RIG_CALL(client, kvp_inspect(client, "status", NULL, &json));
	RIG_REQUIRE(strstr(json, "\"cuda\":\"kernels for sm_80, sm_90, sm_100"), "%s", json);
	RIG_REQUIRE(!has_driver(without));
	free(json);
	kvp_client_close(client);
	(void)close(liar.fd);
}

/* ---- a GPU that is lost ---------------------------------------------------------------------- */

struct two_ends {
	struct kvp_client *client;
	struct rig_pool from, to;
	struct kvp_fence *fence;
	kvp_room_id ids[2];
};

static void pool_make(struct rig_pool *pool, struct kvp_client *client, uint64_t salt)
{
	(void)rig_pool_entry(pool, 0, ROW, PAGE, PAGES);
	device_pool_allocate(pool, "engine", salt, DEVICE_IPC);
	device_pool_register(pool, client, "engine");
}

/* A room within the daemon that waits for its fence; both ends of it. */
static void room_begin(struct two_ends *ends, const char *address, uint64_t room)
{
	const uint32_t pages[] = { 0, 1, 2, 3 };
	struct kvp_side_desc side = { .page = PAGE, .dcp_size = 1, .interleave = 1 };
	struct kvp_expect_sender sender = { address, 0, 1, KVP_ROLE_DATA };
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_open open = KVP_OPEN_INIT;

	open.room = expect.room = room;
	open.pool = ends->from.id;
	open.sides = expect.sides = chunk.sides = &side;
	open.n_sides = expect.n_sides = chunk.n_sides = 1;
	RIG_CALL(ends->client, kvp_open(ends->client, &open, NULL, NULL, &ends->ids[0]));
	side.pages = pages;
	side.n_pages = KVP_ARRAY_SIZE(pages);
	expect.pool = ends->to.id;
	expect.senders = &sender;
	expect.n_senders = 1;
	expect.end = chunk.tokens = KVP_ARRAY_SIZE(pages) * PAGE;
	RIG_CALL(ends->client, kvp_expect(ends->client, &expect, NULL, NULL, &ends->ids[1]));
	RIG_REQUIRE(!rig_await(ends->client, ends->ids[0], KVP_WAIT_READY, SECS).failed);
	chunk.last = 1;
	chunk.fence = ends->fence;
	chunk.fence_value = 1;
	RIG_CALL(ends->client, kvp_submit(ends->client, ends->ids[0], &chunk, NULL, NULL, NULL));
}

static void ends_make(struct two_ends *ends, const struct rig_daemon *daemon, const char *name,
		      uint64_t room)
{
	ends->client = rig_client(daemon, name);
	pool_make(&ends->from, ends->client, 2 * room);
	pool_make(&ends->to, ends->client, 2 * room + 1);
	RIG_CALL(ends->client, kvp_fence_create(ends->client, 1, &ends->fence));
	room_begin(ends, daemon->address, room);
}

/* Both ends hear of it, with the driver's name for it. */
static void ends_told(const struct two_ends *ends, const char *name)
{
	for (int i = 0; i < 2; i++) {
		struct kvp_room_state state =
			rig_await(ends->client, ends->ids[i], KVP_WAIT_TERMINAL, SECS);

		printf("     %s, %s: %s\n", name, i ? "destination" : "sender", state.reason);
		fflush(stdout);
		RIG_REQUIRE(state.failed && strstr(state.reason, "CUDA_ERROR_ILLEGAL_ADDRESS"),
			    "%s", state.reason);
	}
}

/* It ends by itself, and says so by its exit status. */
static void exits(struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + SECS * UINT64_C(1000000000);
	int status = 0;
	pid_t ended;

	while ((ended = waitpid(daemon->pid, &status, WNOHANG)) == 0) {
		RIG_REQUIRE(rig_now_ns() < until, "the daemon hangs");
		rig_sleep_ms(5);
	}
	RIG_REQUIRE(ended == daemon->pid);
	daemon->pid = 0;
	RIG_REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %#x", (unsigned)status);
}

/* One client's room moves; another's waits for a fence that is never reached. */
static void lost_gpu(struct rig *rig)
{
	struct rig_daemon *daemon = rig_daemon_start(rig, "node", CONFIG);
	struct two_ends moving = { 0 }, waiting = { 0 };

	ends_make(&moving, daemon, "engine", 7);
	ends_make(&waiting, daemon, "other", 8);
	fault_hold(daemon, "wild", true);
	kvp_fence_signal(moving.fence, 0, 1);
	ends_told(&moving, "moving");
	ends_told(&waiting, "waiting");
	exits(daemon);
	kvp_client_close(moving.client);
	kvp_client_close(waiting.client);
}

/* Nothing moves when it is lost: who brings a pool next finds out, and all are told. */
static void lost_idle(struct rig *rig)
{
	struct two_ends waiting = { 0 };
	struct rig_daemon *daemon;
	struct offer offer;
	struct liar liar = { .next = 1 };
	char path[128];
	int fd;

	if (!device_is_fake())
		return; /* how to break a real one that does nothing? */
	snprintf(path, sizeof(path), "%s/lost", rig->dir);
	RIG_REQUIRE(setenv("KVP_FAKE_CUDA_LOST", path, 1) == 0);
	daemon = rig_daemon_start(rig, "node", CONFIG);
	RIG_REQUIRE(unsetenv("KVP_FAKE_CUDA_LOST") == 0);
	ends_make(&waiting, daemon, "other", 8);
	liar.fd = talk_connect(daemon);
	talk_hello(liar.fd);
	offer_make(&offer, device_alloc(POOL_BYTES), POOL_BYTES);
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	RIG_REQUIRE(fd >= 0);
	(void)close(fd);
	refused(&liar, &offer, NULL, "a pool on a lost GPU",
		"cuIpcOpenMemHandle: CUDA_ERROR_ILLEGAL_ADDRESS");
	ends_told(&waiting, "waiting");
	exits(daemon);
	(void)close(liar.fd);
	kvp_client_close(waiting.client);
}

int main(int argc, char **argv)
{
	static const struct rig_scenario scenarios[] = {
		{ "memory that is none", no_memories },
		{ "memory of the other GPU", other_gpu },
		{ "a daemon without GPUs", no_devices },
		{ "a GPU that is lost", lost_gpu },
		{ "a GPU that is lost while nothing moves", lost_idle },
	};

	if (!device_or_fake(argv))
		return 77;
	return rig_main(argc, argv, scenarios, KVP_ARRAY_SIZE(scenarios));
}
