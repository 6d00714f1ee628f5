/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support_faults.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "proto/msg.h"

#define PAGE 16u
#define PAGES 32u /* of a pool */
#define LAYERS 2u
#define ROW 576u
#define BLOB 4096u
#define SEGMENT 3u
#define META 100u

/* ---- rooms ---------------------------------------------------------------------------------- */

static struct rig_key key_of(const struct fault_room *room)
{
	return (struct rig_key){ room->id, room->generation };
}

static struct kvp_side_desc src_side(const struct fault_room *room, uint64_t from)
{
	uint32_t skip = (uint32_t)(from / PAGE);

	return (struct kvp_side_desc){ .page = PAGE,
				       .dcp_size = 1,
				       .interleave = 1,
				       .pos0 = skip * PAGE,
				       .n_pages = FAULT_TOKENS / PAGE - skip,
				       .pages = room->src.pages + skip };
}

static struct kvp_side_desc dst_side(const struct fault_room *room)
{
	return (struct kvp_side_desc){ .page = PAGE,
				       .dcp_size = 2,
				       .dcp_rank = 1,
				       .interleave = 1,
				       .n_pages = FAULT_TOKENS / PAGE / 2,
				       .pages = room->dst.pages };
}

static uint8_t *blob_of(const struct rig_pool *pool, uint8_t *mem)
{
	return mem + pool->entries[LAYERS].offset;
}

static void put_source(const struct fault_room *room, uint8_t *mem)
{
	struct kvp_side_desc side = src_side(room, 0);
	struct rig_key key = key_of(room);

	rig_put_rows(mem, &room->src.pool, &side, 0, FAULT_TOKENS, &key);
	rig_put_segment(blob_of(&room->src.pool, mem), BLOB, &key, SEGMENT);
}

static void end_make(struct fault_end *end, const struct rig_daemon *daemon, uint64_t seed,
		     uint32_t row_bytes)
{
	uint32_t layer;

	memset(end, 0, sizeof(*end));
	end->daemon = daemon;
	for (layer = 0; layer < LAYERS; layer++)
		(void)rig_pool_entry(&end->pool, layer, row_bytes, PAGE, PAGES);
	(void)rig_pool_blob(&end->pool, LAYERS, BLOB);
	rig_pool_allocate(&end->pool, "faults", seed);
	rig_pages(end->pages, KVP_ARRAY_SIZE(end->pages), 0, PAGES, seed);
}

void fault_room_make_rows(struct fault_room *room, uint64_t id, const struct rig_daemon *src,
			  const struct rig_daemon *dst, uint32_t row_bytes)
{
	memset(room, 0, sizeof(*room));
	room->id = id;
	end_make(&room->src, src, id * 2, row_bytes);
	end_make(&room->dst, dst, id * 2 + 1, row_bytes);
	put_source(room, room->src.pool.mem);
}

void fault_room_make(struct fault_room *room, uint64_t id, const struct rig_daemon *src,
		     const struct rig_daemon *dst)
{
	fault_room_make_rows(room, id, src, dst, ROW);
}

void fault_connect(struct fault_end *end, const char *name)
{
	struct kvp_pool_desc desc = KVP_POOL_DESC_INIT;

	end->client = rig_client(end->daemon, name);
	desc.entries = end->pool.entries;
	desc.n_entries = end->pool.n_entries;
	desc.fds = &end->pool.fd;
	desc.n_fds = 1;
	desc.layout_tag = end->tag ? end->tag : "faults";
	desc.tag_bytes = 6;
	desc.label = name;
	RIG_CALL(end->client, kvp_pool_register(end->client, &desc, &end->pool.id));
}

void fault_connect_both(struct fault_room *room)
{
	fault_connect(&room->src, "prefill");
	fault_connect(&room->dst, "decode");
}

static void end_close(struct fault_end *end)
{
	kvp_client_close(end->client);
	(void)munmap(end->pool.mem, end->pool.bytes);
	(void)close(end->pool.fd);
}

void fault_close(struct fault_room *room)
{
	end_close(&room->src);
	end_close(&room->dst);
}

int fault_try_expect(struct fault_room *room)
{
	struct kvp_expect expect = KVP_EXPECT_INIT;
	struct kvp_side_desc side = dst_side(room);
	struct kvp_segment segment = { .id = SEGMENT, .entry = LAYERS, .bytes = BLOB };
	struct kvp_expect_sender senders[4];
	uint32_t pages[KVP_ARRAY_SIZE(room->dst.pages)];
	uint32_t i;

	RIG_REQUIRE(room->n_missing < KVP_ARRAY_SIZE(senders));
	for (i = 0; i <= room->n_missing; i++)
		senders[i] = (struct kvp_expect_sender){
			.address = room->address ? room->address : room->src.daemon->address,
			.sender = i,
			.n_dests = 1,
			.role = KVP_ROLE_DATA,
		};
	expect.room = room->id;
	expect.pool = room->dst.pool.id;
	expect.sides = &side;
	expect.n_sides = 1;
	expect.segments = &segment;
	expect.n_segments = 1;
	expect.senders = senders;
	expect.n_senders = 1 + room->n_missing;
	expect.meta_from = 0;
	expect.end = FAULT_TOKENS;
	expect.label = "faults";
	expect.timers = room->timers;
	memcpy(pages, side.pages, side.n_pages * sizeof(*pages));
	side.pages = pages;
	if (room->on_expect)
		room->on_expect(&expect);
	return kvp_expect(room->dst.client, &expect, NULL, NULL, &room->dst.room);
}

int fault_try_open(struct fault_room *room)
{
	struct kvp_open open = KVP_OPEN_INIT;
	struct kvp_side_desc side = src_side(room, 0);

	open.room = room->id;
	open.pool = room->src.pool.id;
	open.sides = &side;
	open.n_sides = 1;
	open.label = "faults";
	open.timers = room->timers;
	if (room->on_open)
		room->on_open(&open);
	return kvp_open(room->src.client, &open, NULL, NULL, &room->src.room);
}

void fault_expect(struct fault_room *room)
{
	RIG_CALL(room->dst.client, fault_try_expect(room));
}

void fault_open(struct fault_room *room)
{
	RIG_CALL(room->src.client, fault_try_open(room));
}

int fault_try_submit(struct fault_room *room, enum fault_part part)
{
	uint64_t from = part == FAULT_FIRST ? 0 : part == FAULT_LAST ? FAULT_TOKENS : FAULT_HALF;
	struct kvp_chunk chunk = KVP_CHUNK_INIT;
	struct kvp_side_desc side = src_side(room, from);
	struct kvp_segment segment = { .id = SEGMENT, .entry = LAYERS, .bytes = BLOB };
	struct rig_key key = key_of(room);
	uint32_t pages[KVP_ARRAY_SIZE(room->src.pages)] = { 0 }; /* on_chunk may want more */
	uint8_t meta[META];

	chunk.start = from;
	if (part != FAULT_LAST) {
		chunk.tokens = FAULT_HALF;
		chunk.sides = &side;
		chunk.n_sides = 1;
	}
	if (part == FAULT_REST || part == FAULT_REST_OPEN) {
		chunk.segments = &segment;
		chunk.n_segments = 1;
	}
	if (part == FAULT_REST || part == FAULT_LAST) {
		rig_put_segment(meta, META, &key, 0);
		chunk.meta = meta;
		chunk.meta_bytes = META;
		chunk.last = 1;
	}
	memcpy(pages, side.pages, side.n_pages * sizeof(*pages));
	side.pages = pages;
	if (room->on_chunk)
		room->on_chunk(&chunk);
	return kvp_submit(room->src.client, room->src.room, &chunk, NULL, NULL, NULL);
}

void fault_submit(struct fault_room *room, enum fault_part part)
{
	RIG_CALL(room->src.client, fault_try_submit(room, part));
}

static void end_completes(struct fault_end *end)
{
	struct kvp_room_state state =
		rig_await(end->client, end->room, KVP_WAIT_TERMINAL, FAULT_SECS);

	RIG_REQUIRE(state.complete && !state.failed, "status %s: %s", kvp_status_name(state.status),
		    state.reason);
	(void)rig_await(end->client, end->room, KVP_WAIT_RELEASED, FAULT_SECS);
}

void fault_completes(struct fault_room *room)
{
	struct rig_key key = key_of(room);
	struct kvp_room_state state;
	uint8_t meta[META];

	end_completes(&room->dst);
	state = rig_state(room->dst.client, room->dst.room);
	rig_put_segment(meta, META, &key, 0);
	RIG_REQUIRE(state.meta_bytes == META && !memcmp(state.meta, meta, META));
	fault_check_all(room);
	end_completes(&room->src);
	kvp_room_forget(room->dst.client, room->dst.room);
	kvp_room_forget(room->src.client, room->src.room);
}

void fault_transfer(struct fault_room *room)
{
	/* A client that has been idle hears of its daemon's end now, not by a lost request. */
	(void)kvp_process(room->dst.client);
	(void)kvp_process(room->src.client);
	fault_expect(room);
	fault_open(room);
	fault_submit(room, FAULT_FIRST);
	fault_submit(room, FAULT_REST);
	fault_completes(room);
}

/* ---- what ends see -------------------------------------------------------------------------- */

struct kvp_room_state fault_fails(const struct fault_end *end, enum kvp_status status)
{
	struct kvp_room_state state =
		rig_await(end->client, end->room, KVP_WAIT_TERMINAL, FAULT_SECS);

	RIG_REQUIRE(state.failed && !state.complete && state.status == status && state.reason[0],
		    "status %s, not %s: %s", kvp_status_name(state.status), kvp_status_name(status),
		    state.reason);
	return state;
}

void fault_released(struct fault_end *end)
{
	struct kvp_room_state state =
		rig_await(end->client, end->room, KVP_WAIT_RELEASED, FAULT_SECS);

	RIG_REQUIRE(state.failed && !state.complete);
	kvp_room_forget(end->client, end->room);
}

void fault_arrived(const struct fault_end *end, uint64_t position)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	struct kvp_room_state state = rig_state(end->client, end->room);

	while (state.arrived < position) {
		RIG_REQUIRE(!state.failed && rig_now_ns() < until, "arrived %llu; %s: %s",
			    (unsigned long long)state.arrived, kvp_status_name(state.status),
			    state.reason);
		(void)kvp_wait(end->client, 100);
		state = rig_state(end->client, end->room);
	}
}

static void check_source(const struct fault_room *room)
{
	uint8_t *source = rig_pool_image(&room->src.pool);

	put_source(room, source);
	rig_pool_check(&room->src.pool, source, "source");
	free(source);
}

static void check_dest(const struct fault_room *room, uint64_t arrived, bool segment)
{
	const struct rig_pool *pool = &room->dst.pool;
	uint8_t *before = rig_pool_image(pool), *must = rig_pool_image(pool);
	uint8_t *may = rig_pool_image(pool);
	struct kvp_side_desc side = dst_side(room);
	struct rig_key key = key_of(room);
	uint64_t i;

	rig_put_rows(may, pool, &side, 0, FAULT_TOKENS, &key);
	rig_put_segment(blob_of(pool, may), BLOB, &key, SEGMENT);
	rig_put_rows(must, pool, &side, 0, arrived, &key);
	if (segment)
		rig_put_segment(blob_of(pool, must), BLOB, &key, SEGMENT);
	for (i = 0; i < pool->bytes; i++)
		RIG_REQUIRE(pool->mem[i] == must[i] ||
				    (must[i] == before[i] && pool->mem[i] == may[i]),
			    "byte %llu of the destination", (unsigned long long)i);
	free(before);
	free(must);
	free(may);
}

void fault_check_rows(const struct fault_room *room, uint64_t arrived)
{
	check_source(room);
	check_dest(room, arrived, false);
}

void fault_check_dest(const struct fault_room *room, uint64_t arrived)
{
	check_dest(room, arrived, false);
}

void fault_check_all(const struct fault_room *room)
{
	check_source(room);
	check_dest(room, FAULT_TOKENS, true);
}

void fault_renew(struct fault_room *room)
{
	room->generation++;
	put_source(room, room->src.pool.mem);
}

void fault_reset(struct fault_room *room)
{
	rig_pool_reset(&room->dst.pool);
}

void fault_check_untouched(const struct fault_room *room)
{
	uint8_t *image = rig_pool_image(&room->dst.pool);

	rig_pool_check(&room->dst.pool, image, "destination after its release");
	free(image);
}

void fault_poison(struct fault_room *room)
{
	memset(room->src.pool.mem, 0xee, room->src.pool.bytes);
}

void fault_restore(struct fault_room *room)
{
	rig_pool_reset(&room->src.pool);
	put_source(room, room->src.pool.mem);
}

/* ---- test points ---------------------------------------------------------------------------- */

static int raw_connect(const struct rig_daemon *daemon)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", daemon->socket);
	RIG_REQUIRE(fd >= 0 && connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0,
		    "%s: %s", daemon->name, strerror(errno));
	return fd;
}

/* Sends a request and requires OK. A descriptor that comes along is not taken. */
static void raw_call(int fd, Kvp__ClientMsg *msg)
{
	static uint8_t buf[KVP_LIMIT_PACKET];
	long n = kvp_msg_encode_client(msg, buf, sizeof(buf));
	Kvp__DaemonMsg *answer;
	ssize_t got;

	RIG_REQUIRE(n > 0 && send(fd, buf, (size_t)n, MSG_NOSIGNAL) == n, "%s", strerror(errno));
	got = recv(fd, buf, sizeof(buf), 0);
	RIG_REQUIRE(got > 0, "%s", strerror(errno));
	answer = kvp__daemon_msg__unpack(NULL, (size_t)got, buf);
	RIG_REQUIRE(answer && answer->body_case == KVP__DAEMON_MSG__BODY_REPLY &&
			    answer->reply->status == KVP__STATUS__STATUS_OK,
		    "%s", answer && answer->reply ? answer->reply->text : "no reply");
	kvp__daemon_msg__free_unpacked(answer, NULL);
}

bool fault_points(void)
{
#ifdef KVP_TEST
	return true;
#else
	printf("the daemons are built without test points: make KVP_TEST=1\n");
	return false;
#endif
}

/* ---- what a daemon shows -------------------------------------------------------------------- */

static uint64_t number(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	RIG_REQUIRE(cJSON_IsNumber(item), "%s", name);
	return (uint64_t)item->valuedouble;
}

static const cJSON *lane_of(const cJSON *root)
{
	return cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(root, "lanes"), 0);
}

static void hold_order(const struct rig_daemon *daemon, const char *point, bool on)
{
	Kvp__ClientMsg msg = KVP__CLIENT_MSG__INIT;
	Kvp__Hello hello = KVP__HELLO__INIT;
	Kvp__TestHold hold = KVP__TEST_HOLD__INIT;
	int fd = raw_connect(daemon);

	hello.version_min = KVP_PROTO_VERSION_MIN;
	hello.version_max = KVP_PROTO_VERSION_MAX;
	hello.name = (char *)"tester";
	hello.pid = (uint32_t)getpid();
	msg.id = 1;
	msg.body_case = KVP__CLIENT_MSG__BODY_HELLO;
	msg.hello = &hello;
	raw_call(fd, &msg);
	hold.point = (char *)point;
	hold.on = on;
	msg.id = 2;
	msg.body_case = KVP__CLIENT_MSG__BODY_TEST_HOLD;
	msg.test_hold = &hold;
	raw_call(fd, &msg);
	(void)close(fd);
}

static uint64_t lane_turns(const struct rig_daemon *daemon)
{
	cJSON *root = rig_ask(daemon, "lanes", NULL);
	uint64_t n = number(lane_of(root), "turns");

	cJSON_Delete(root);
	return n;
}

/* The answer comes from the loop, and "offer" is its own point. Of the others the lane has heard
 * when it has begun another turn since; an idle one makes a turn for each order. */
void fault_hold(const struct rig_daemon *daemon, const char *point, bool on)
{
	uint64_t before = lane_turns(daemon);
	bool lanes = strcmp(point, "offer") != 0;

	do
		hold_order(daemon, point, on);
	while (lanes && lane_turns(daemon) < before + 2);
}

void fault_held(const struct rig_daemon *daemon, const char *point)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000), n = 0;

	for (;;) {
		cJSON *root = rig_ask(daemon, "lanes", NULL);

		n = number(cJSON_GetObjectItemCaseSensitive(lane_of(root), "holds"), point);
		cJSON_Delete(root);
		if (n > 0)
			return;
		RIG_REQUIRE(rig_now_ns() < until, "%s: nothing reaches point %s", daemon->name,
			    point);
		rig_sleep_ms(2);
	}
}

static uint64_t taken(const cJSON *lane, const char *ring)
{
	const cJSON *object = cJSON_GetObjectItemCaseSensitive(lane, ring);

	return number(object, "n") - number(object, "free");
}

static void idle(const struct rig_daemon *daemon, bool but_sent)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);

	for (;;) {
		cJSON *root = rig_ask(daemon, "status", NULL);
		const cJSON *rooms = cJSON_GetObjectItemCaseSensitive(root, "rooms");
		const cJSON *lane = lane_of(root);
		uint64_t n = number(rooms, "dest") + number(rooms, "send");
		uint64_t slots = taken(lane, "land_slots");
		uint64_t work = number(lane, "receivers") + number(lane, "senders") +
				number(lane, "wants_queued");

		if (!but_sent) {
			slots += taken(lane, "pack_slots");
			work += number(lane, "quarantined");
		}
		cJSON_Delete(root);
		if (n + slots + work == 0)
			return;
		RIG_REQUIRE(rig_now_ns() < until, "%s: %llu rooms, %llu slots taken, work %llu",
			    daemon->name, (unsigned long long)n, (unsigned long long)slots,
			    (unsigned long long)work);
		rig_sleep_ms(2);
	}
}

void fault_idle(const struct rig_daemon *daemon)
{
	idle(daemon, false);
}

void fault_idle_but_sent(const struct rig_daemon *daemon)
{
	idle(daemon, true);
}

void fault_parked(const struct rig_daemon *daemon)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000), n = 0;
	const cJSON *limit;

	while (n == 0) {
		cJSON *root = rig_ask(daemon, "status", NULL);

		cJSON_ArrayForEach (limit, cJSON_GetObjectItemCaseSensitive(root, "limits")) {
			const cJSON *name = cJSON_GetObjectItemCaseSensitive(limit, "name");

			if (!strcmp(cJSON_GetStringValue(name), "limits.max_parked_offers"))
				n = number(limit, "used");
		}
		cJSON_Delete(root);
		RIG_REQUIRE(rig_now_ns() < until, "%s: no offer is parked", daemon->name);
		if (n == 0)
			rig_sleep_ms(2);
	}
}

/* Is a session with that peer up that was so before? */
static bool has_session(const cJSON *peers, const char *address, uint64_t since_ns)
{
	const cJSON *peer;

	cJSON_ArrayForEach (peer, peers) {
		const cJSON *state = cJSON_GetObjectItemCaseSensitive(peer, "state");
		const cJSON *with = cJSON_GetObjectItemCaseSensitive(peer, "address");
		const cJSON *age = cJSON_GetObjectItemCaseSensitive(peer, "age_s");

		if (!strcmp(cJSON_GetStringValue(state), "up") &&
		    !strcmp(cJSON_GetStringValue(with), address) &&
		    age->valuedouble * 1e9 > (double)(rig_now_ns() - since_ns))
			return true;
	}
	return false;
}

void fault_session_lost(const struct rig_daemon *daemon, const struct rig_daemon *peer,
			uint64_t since_ns)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	bool up = true;

	while (up) {
		cJSON *root = rig_ask(daemon, "peers", NULL);

		up = has_session(cJSON_GetObjectItemCaseSensitive(root, "peers"), peer->address,
				 since_ns);
		cJSON_Delete(root);
		RIG_REQUIRE(rig_now_ns() < until, "%s: the session with %s is up", daemon->name,
			    peer->name);
		if (up)
			rig_sleep_ms(5);
	}
}

uint32_t fault_maps(const struct rig_daemon *daemon)
{
	char path[64], line[1024];
	uint32_t n = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/maps", (int)daemon->pid);
	file = fopen(path, "re");
	RIG_REQUIRE(file, "%s: %s", path, strerror(errno));
	while (fgets(line, sizeof(line), file))
		n += strstr(line, "/memfd:") != NULL;
	(void)fclose(file);
	return n;
}

void fault_maps_back(const struct rig_daemon *daemon, uint32_t maps)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	uint32_t n;

	while ((n = fault_maps(daemon)) > maps) {
		RIG_REQUIRE(rig_now_ns() < until, "%s: %u memfds mapped, %u before", daemon->name,
			    n, maps);
		rig_sleep_ms(5);
	}
}

void fault_heap(const struct rig_daemon *daemon, uint64_t bytes[2])
{
	cJSON *root = rig_ask(daemon, "status", NULL);

	bytes[0] = number(root, "heap_bytes");
	bytes[1] = number(root, "heap_mapped_bytes");
	cJSON_Delete(root);
}

uint32_t fault_fds(const struct rig_daemon *daemon)
{
	char path[64];
	uint32_t n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)daemon->pid);
	dir = opendir(path);
	RIG_REQUIRE(dir, "%s: %s", path, strerror(errno));
	while (readdir(dir)) /* NOLINT(concurrency-mt-unsafe): own dir */
		n++;
	(void)closedir(dir);
	return n - 2; /* . and .. */
}

void fault_fds_back(const struct rig_daemon *daemon, uint32_t fds)
{
	uint64_t until = rig_now_ns() + FAULT_SECS * UINT64_C(1000000000);
	uint32_t n;

	while ((n = fault_fds(daemon)) > fds) {
		RIG_REQUIRE(rig_now_ns() < until, "%s: %u descriptors, %u before", daemon->name, n,
			    fds);
		rig_sleep_ms(5);
	}
}

/* ---- processes ------------------------------------------------------------------------------ */

pid_t fault_child(void (*fn)(void *arg), void *arg)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	RIG_REQUIRE(pid >= 0, "%s", strerror(errno));
	if (pid)
		return pid;
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	fn(arg);
	for (;;)
		(void)pause();
}

void fault_kill(pid_t pid)
{
	int status;

	RIG_REQUIRE(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid &&
			    WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
		    "process %d had ended by itself", (int)pid);
}

void fault_stop(pid_t pid)
{
	int status;

	RIG_REQUIRE(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid &&
		    WIFSTOPPED(status));
}

void fault_go_on(pid_t pid)
{
	RIG_REQUIRE(kill(pid, SIGCONT) == 0);
}

static unsigned int slow_ms; /* of the process that makes it so */

static void crawl(void *arg)
{
	const struct rig_daemon *daemon = arg;

	for (;;) {
		(void)kill(daemon->pid, SIGSTOP);
		rig_sleep_ms(slow_ms);
		(void)kill(daemon->pid, SIGCONT);
		rig_sleep_ms(slow_ms / 10);
	}
}

pid_t fault_slow(const struct rig_daemon *daemon, unsigned int ms)
{
	slow_ms = ms;
	return fault_child(crawl, (void *)daemon);
}
