/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVPACK_H
#define KVPACK_H

/**
 * libkvpack: hands KV pools and transfer requests of one engine process to the node's kvpackd.
 *
 * Threads: a client is used by one thread at a time; different clients are independent. The library
 * starts no thread, installs no signal handler, raises no SIGPIPE and never logs. A client belongs
 * to the process that opened it: in a forked child every call is refused with -EINVAL, but for
 * kvp_client_close(), which there only frees.
 *
 * Errors: every function that can fail returns 0 (or a count) or a negative errno:
 *   -EINVAL     a malformed argument, or the daemon's status says the request was wrong
 *               (INVALID, GEOMETRY, ALIGNMENT, SRC_RANGE, DST_RANGE)
 *   -ENOENT     an unknown pool or room
 *   -ENOTCONN   no connection to the daemon now; kvp_process() reconnects by itself
 *   -ETIMEDOUT  a blocking call ran out of its time
 *   -ENOMEM, -EMSGSIZE, other negative errno of a system call
 *   -EREMOTEIO  the daemon refused: kvp_last_status() and kvp_last_error() say why in words
 * Output parameters are written on success only.
 *
 * Requests: a request struct starts with `size`, set by its initialiser macro; the library copies
 * all it needs before the call returns. With `done` NULL the call waits for the daemon's answer (at
 * most the client's timeout). With a `done` function the call returns at once and done() runs
 * exactly once, inside kvp_process() or another call on this client that waits, with the daemon's
 * answer. It may call anything but kvp_client_close(). Requests are answered in order and may be
 * pipelined; -EAGAIN says that too much waits for the daemon already: process, then try again.
 *
 * Losing the daemon: requests without an answer end with KVP_STATUS_DAEMON_LOST. The library
 * connects again (50 ms to 2 s apart), registers pools and fences anew, and repeats expectations of
 * which nothing has arrived and opens of which nothing was submitted, once the old daemon's process
 * is known to be dead. All other rooms fail at once (status DAEMON_LOST, retry set); they are
 * released when that process is dead. Blocking calls wait for the new connection within their
 * timeout.
 *
 * Transfers themselves never complete by a callback: a room's progress is state, kept here and read
 * by kvp_room_state(), which never blocks and never goes backwards.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default) /* the library itself is built with hidden symbols */
#endif

#define KVP_VERSION_MAJOR 0
#define KVP_VERSION_MINOR 1

#define KVP_MAX_SENDERS 64u /* sender numbers are 0 .. 63 */
#define KVP_MAX_DESTS 64u   /* destination numbers are 0 .. 63 */
#define KVP_MAX_META 65536u /* bytes of engine data that travel with a room */
#define KVP_MAX_TAG 64u     /* bytes of a layout tag */
#define KVP_MAX_LABEL 63u   /* bytes of a label, without the NUL */
#define KVP_KEY_BYTES 16u   /* of a room key */

/** Why a request was refused or a room failed. Stable: values are never reused. */
enum kvp_status {
	KVP_OK = 0,
	KVP_STATUS_INVALID = 1,
	KVP_STATUS_VERSION = 2,
	KVP_STATUS_LIMIT = 3,
	KVP_STATUS_NOT_FOUND = 4,
	KVP_STATUS_EXISTS = 5,
	KVP_STATUS_PAGE_HELD = 6,
	KVP_STATUS_DENIED = 7,
	KVP_STATUS_GEOMETRY = 8,
	KVP_STATUS_ALIGNMENT = 9,
	KVP_STATUS_SRC_RANGE = 10,
	KVP_STATUS_DST_RANGE = 11,
	KVP_STATUS_MISMATCH = 12,
	KVP_STATUS_ORDER = 13,
	KVP_STATUS_COVERAGE = 14,
	KVP_STATUS_TIMEOUT = 15,
	KVP_STATUS_ABORTED = 16,
	KVP_STATUS_PEER_LOST = 17,
	KVP_STATUS_CLIENT_LOST = 18,
	KVP_STATUS_DAEMON_LOST = 19,
	KVP_STATUS_DECLINED = 20,
	KVP_STATUS_LEASE = 21,
	KVP_STATUS_FENCE_TIMEOUT = 22,
	KVP_STATUS_LANE_STUCK = 23,
	KVP_STATUS_STOPPING = 24,
	KVP_STATUS_NO_MEMORY = 25,
	KVP_STATUS_SYSTEM = 26,
	KVP_STATUS_UNREACHABLE = 27,
	KVP_STATUS_PROTOCOL = 28,
	KVP_STATUS_POOL_GONE = 29,
	KVP_STATUS_TRANSPORT = 30,
	KVP_STATUS_UNSUPPORTED = 31,
	KVP_STATUS_CORRUPT = 32,
	KVP_STATUS_FORCE_WIDE_ =
		0x7fffffff /* values can be added without changing the enum's width */
};

/** Short lower-case name of a status, such as "page_held"; "unknown" for others. Any thread. */
const char *kvp_status_name(enum kvp_status status);

struct kvp_client;

/** Answer to one request. @text is "" or says field, value and limit; valid during the call. */
typedef void kvp_done_fn(void *arg, enum kvp_status status, const char *text);

struct kvp_client_options {
	size_t size;
	const char *socket;  /* path; NULL: $KVPACK_SOCKET, else /run/kvpack/sock */
	const char *name;    /* up to KVP_MAX_LABEL bytes, for displays; NULL: the program's name */
	uint32_t timeout_ms; /* of blocking calls; 0: 10,000 */
	uint32_t no_reconnect; /* not 0: stay down when the daemon is lost */
	/* Not 0: kvp_inspect() and kvp_drain() are all that is asked. Gets in when the other
	 * clients have taken all connections, then for client.stall (10 s) at most. */
	uint32_t observer;
};
#define KVP_CLIENT_OPTIONS_INIT                                        \
	{                                                              \
		sizeof(struct kvp_client_options), NULL, NULL, 0, 0, 0 \
	}

/** Connects and greets. @options may be NULL. Blocks up to the timeout. @ret is the caller's. */
int kvp_client_open(struct kvp_client **ret, const struct kvp_client_options *options);

/** Closes: the daemon drops pools and fails rooms of this client. NULL is fine. done() of pending
 * requests runs with KVP_STATUS_DAEMON_LOST. */
void kvp_client_close(struct kvp_client *client);

/** The last refusal or error on this client, in words; "" if none. Valid until the next call.
 * NULL asks about this thread's last kvp_client_open() that failed. */
const char *kvp_last_error(const struct kvp_client *client);
enum kvp_status kvp_last_status(const struct kvp_client *client);

/** What this node's daemon calls itself. Pointers live as long as the connection. */
const char *kvp_node_name(const struct kvp_client *client);
/** What remote expectations name as kvp_expect_sender.address for senders here; "" = no peers. */
const char *kvp_node_address(const struct kvp_client *client);

/*
 * Event loops: poll kvp_client_fd() for kvp_client_events() for at most kvp_client_timeout() ms
 * (-1: no limit), then call kvp_process(). The fd stays the same number over reconnects.
 */
int kvp_client_fd(const struct kvp_client *client);
short kvp_client_events(const struct kvp_client *client);
int kvp_client_timeout(const struct kvp_client *client);

/** Does what can be done now, never blocks. Returns how many answers and room changes were handled.
 */
int kvp_process(struct kvp_client *client);

/** kvp_process(), after waiting for something to process; -ETIMEDOUT after @timeout_ms. */
int kvp_wait(struct kvp_client *client, int timeout_ms);

/* ---- pools --------------------------------------------------------------------------------- */

enum kvp_class {
	KVP_SHARDED = 0,    /* rows are spread over the DCP ranks */
	KVP_REPLICATED = 1, /* every rank holds every token, such as draft KV */
	KVP_BLOB = 2        /* no rows; reached by segments only, such as recurrent state */
};

/**
 * One array of a pool. Row `slot` of page `page` is at
 *     offset + page * page_stride + slot * row_stride       (bytes in memory @fd)
 * and holds bytes [lo, lo + row_bytes) of a full row of full_bytes. Entries of the two ends pair by
 * layer and class and exchange the overlap of their byte ranges; entries of one pool with the same
 * layer and class must not overlap: K and V of a layer are two ranges of one full row, and so
 * are the heads of a head-major layout.
 */
struct kvp_entry_desc {
	uint32_t layer;
	uint32_t klass;         /* enum kvp_class */
	uint32_t group;         /* entries of one group share a page list; 0 .. 15 */
	uint32_t mem;           /* index into kvp_pool_desc.mems, or .fds without mems */
	uint64_t offset;        /* bytes */
	uint64_t bytes;         /* extent from offset */
	uint64_t page_stride;   /* bytes */
	uint64_t row_stride;    /* bytes */
	uint32_t row_bytes;     /* 1 .. 1 MiB */
	uint32_t lo;            /* bytes */
	uint32_t full_bytes;    /* bytes */
	uint32_t rows_per_page; /* P; for KVP_REPLICATED on a DCP pool P * N */
	uint32_t n_pages;
};

enum kvp_mem_kind {
	KVP_MEM_FD = 0,    /* host memory: a memfd made with MFD_ALLOW_SEALING */
	KVP_MEM_DEVICE = 1 /* memory of a CUDA device, made by this process */
};

/**
 * Memory that entries lie in. Device memory is exported by the library: by a legacy IPC handle, or,
 * where it was made by the driver's virtual memory calls (torch's expandable segments), by the fds
 * of its physical chunks, which must have been created shareable. Where the daemon can use it and
 * the driver makes one, a dma-buf goes along, through which a NIC reaches the memory; it is closed
 * with the pool, and when the pool is paused. All memories of a pool are of the
 * host, or of one GPU. A pool on a GPU must stay allocated until it is unregistered or paused.
 */
struct kvp_mem {
	uint32_t kind;  /* enum kvp_mem_kind */
	int32_t fd;     /* KVP_MEM_FD; duplicated */
	uint64_t addr;  /* KVP_MEM_DEVICE: first byte, such as a tensor's data pointer */
	uint64_t bytes; /* KVP_MEM_DEVICE: from there on */
};

struct kvp_pool_desc {
	size_t size;
	const struct kvp_entry_desc *entries; /* [n_entries] */
	uint32_t n_entries;                   /* 1 .. 512 */
	const int *fds;             /* [n_fds] memfds made with MFD_ALLOW_SEALING; duplicated */
	uint32_t n_fds;             /* 1 .. 240 */
	const void *layout_tag;     /* [tag_bytes] opaque; must be equal at both ends */
	uint32_t tag_bytes;         /* 0 .. KVP_MAX_TAG */
	const char *label;          /* for displays; NULL: none */
	const struct kvp_mem *mems; /* [n_mems] instead of fds; NULL: fds */
	uint32_t n_mems;            /* 0 .. 512 */
};
#define KVP_POOL_DESC_INIT                                                             \
	{                                                                              \
		sizeof(struct kvp_pool_desc), NULL, 0, NULL, 0, NULL, 0, NULL, NULL, 0 \
	}

/** Host memory that a pool can live in: a sealable memfd of @bytes, mapped at *@addr. The fd and
 * the mapping (munmap) are the caller's; both may go once no pool uses them. */
int kvp_memory_create(const char *name, uint64_t bytes, int *fd, void **addr);

/** Registers a pool; the daemon seals the memfds against shrinking. *@pool is the client's id. */
int kvp_pool_register(struct kvp_client *client, const struct kvp_pool_desc *desc, uint32_t *pool);
/** Stops all use: rooms of it fail, the daemon unmaps, then answers. */
int kvp_pool_pause(struct kvp_client *client, uint32_t pool, kvp_done_fn *done, void *arg);
/** The same geometry with new memory. */
int kvp_pool_resume(struct kvp_client *client, uint32_t pool, const int *fds, uint32_t n_fds);
/** The same for pools registered with mems: as many as then, of the same kinds. */
int kvp_pool_resume_mems(struct kvp_client *client, uint32_t pool, const struct kvp_mem *mems,
			 uint32_t n_mems);
/** As pause, and forgets the pool when the daemon says ok. Afterwards the memory is the caller's
 * alone. */
int kvp_pool_unregister(struct kvp_client *client, uint32_t pool, kvp_done_fn *done, void *arg);

/* ---- fences -------------------------------------------------------------------------------- */

/** Timeline words that say when rows may be read. Owned by the client; freed by close or destroy.
 */
struct kvp_fence;
int kvp_fence_create(struct kvp_client *client, uint32_t words, struct kvp_fence **fence);
/** Only when no submitted chunk waits for it. NULL is fine. */
void kvp_fence_destroy(struct kvp_fence *fence);
/** Host producer: everything written before is readable by the daemon. Values only grow. Any
 * thread. */
void kvp_fence_signal(struct kvp_fence *fence, uint32_t word, uint64_t value);
/** The words themselves, for a producer that writes them by other means (8-byte aligned). */
uint64_t *kvp_fence_words(struct kvp_fence *fence);
/** Lets the device of the calling thread's CUDA context write the fence; once, before the next
 * call. */
int kvp_fence_map_device(struct kvp_fence *fence);
/** Queues a signal on a CUDA stream (a CUstream or cudaStream_t): what the stream was given before
 * is done when the daemon sees it. -EINVAL when the fence is not mapped. */
int kvp_fence_stream_signal(struct kvp_fence *fence, uint32_t word, uint64_t value, void *stream);
/** The device's address of word 0, for engines that write it in their own way; 0: not mapped. */
uint64_t kvp_fence_device_words(const struct kvp_fence *fence);

/* ---- rooms --------------------------------------------------------------------------------- */

/** How this end sees the tokens of one group; see docs/protocol.md, "Sides". */
struct kvp_side_desc {
	uint32_t group;
	uint32_t page;     /* P: tokens of a page of this rank */
	uint32_t dcp_size; /* N; 1 without context parallelism */
	uint32_t dcp_rank;
	uint32_t interleave; /* I, divides P; SGLang: 1 */
	uint32_t n_pages;
	const uint32_t *pages; /* [n_pages] page numbers of the pool; expect and submit only */
	uint64_t pos0;         /* position of the first token of pages[0]; multiple of P * N */
	uint64_t first; /* expect only: first position needed (sliding window); 0: the prefix */
};

struct kvp_timers { /* milliseconds; 0: the daemon's. Only shorter ones are honoured. */
	uint32_t offer_ms, open_ms, progress_ms, fence_ms, lease_ms;
};

enum kvp_sender_role {
	KVP_ROLE_DATA = 0,
	KVP_ROLE_NONE = 1 /* sends nothing, only learns the end (dummy ranks) */
};

struct kvp_expect_sender {
	const char *address; /* kvp_node_address() of the sender's node */
	uint32_t sender;     /* 0 .. 63 */
	uint32_t n_dests;    /* how many destinations that sender must hear from, 1 .. 64 */
	uint32_t role;       /* enum kvp_sender_role */
};

struct kvp_segment {     /* bytes that are not rows */
	uint32_t id;     /* chosen by the engines, unique in the room's destination */
	uint32_t entry;  /* blob entry of the own pool */
	uint64_t offset; /* in the entry */
	uint64_t bytes;  /* equal at both ends; > 0 */
};

/** Decode's side of a room. */
struct kvp_expect {
	size_t size;
	uint64_t room;
	const void *key; /* NULL or KVP_KEY_BYTES; both ends must give the same */
	uint32_t dest;   /* 0 .. 63 */
	uint32_t pool;
	const struct kvp_side_desc *sides;       /* [n_sides] */
	const struct kvp_segment *segments;      /* [n_segments], 0 .. 256 */
	const struct kvp_expect_sender *senders; /* [n_senders], 1 .. 64 */
	uint32_t n_sides;
	uint32_t n_segments;
	uint32_t n_senders;
	int32_t meta_from; /* sender that delivers meta; -1: none */
	uint64_t prefix;   /* tokens already here; multiple of the virtual page */
	uint64_t end;      /* tokens in all */
	const char *label;
	struct kvp_timers timers;
};
#define KVP_EXPECT_INIT                                                                        \
	{                                                                                      \
		sizeof(struct kvp_expect), 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, 0, -1, 0, 0, \
			NULL,                                                                  \
		{                                                                              \
			0, 0, 0, 0, 0                                                          \
		}                                                                              \
	}

/** Prefill's side of a room. */
struct kvp_open {
	size_t size;
	uint64_t room;
	const void *key;
	uint32_t sender;
	uint32_t pool;
	const struct kvp_side_desc *sides; /* [n_sides] geometry only: pages are given by submit */
	uint32_t n_sides;
	uint32_t mask_bytes;
	const uint8_t *entry_mask; /* [mask_bytes] bit i: entry i takes part; NULL: all */
	const char *label;
	struct kvp_timers timers;
};
#define KVP_OPEN_INIT                                                           \
	{                                                                       \
		sizeof(struct kvp_open), 0, NULL, 0, 0, NULL, 0, 0, NULL, NULL, \
		{                                                               \
			0, 0, 0, 0, 0                                           \
		}                                                               \
	}

/** A token range of a sender. */
struct kvp_chunk {
	size_t size;
	uint64_t start;  /* position; equals the previous end of each entry in the set */
	uint64_t tokens; /* may be 0 (with last, segments or meta) */
	const struct kvp_side_desc
		*sides; /* [n_sides] group, pages, pos0; the rest is the open's */
	uint32_t n_sides;
	uint32_t set_bytes;
	const uint8_t *entry_set;      /* [set_bytes] NULL: all entries of the open */
	const struct kvp_fence *fence; /* NULL: the rows are ready now */
	uint32_t fence_word;
	uint32_t last;        /* not 0: nothing follows */
	uint64_t fence_value; /* ready when word >= value */
	const struct kvp_segment *segments;
	uint32_t n_segments;
	uint32_t meta_bytes; /* with last only */
	const void *meta;
};
#define KVP_CHUNK_INIT                                                                            \
	{                                                                                         \
		sizeof(struct kvp_chunk), 0, 0, NULL, 0, 0, NULL, NULL, 0, 0, 0, NULL, 0, 0, NULL \
	}

/** One end of a room in this process. 0 is never a valid id. */
typedef uint64_t kvp_room_id;

enum kvp_room_phase { /* same numbers as RoomState in proto/kvpack.proto */
		      KVP_ROOM_NONE = 0,
		      KVP_ROOM_WAITING = 1,
		      KVP_ROOM_READY = 2,
		      KVP_ROOM_SENDING = 3,
		      KVP_ROOM_CLOSING = 4,
		      KVP_ROOM_DONE = 5,
		      KVP_ROOM_FAILED = 6,
		      KVP_ROOM_GONE = 7,
		      KVP_ROOM_OFFERING = 8,
		      KVP_ROOM_ACCEPTED = 9,
		      KVP_ROOM_LANDING = 10,
		      KVP_ROOM_COMPLETE = 11,
		      KVP_ROOM_RELEASED = 12,
		      KVP_ROOM_PHASE_FORCE_WIDE_ = 0x7fffffff
};

struct kvp_room_state {
	size_t size;
	uint32_t phase;         /* enum kvp_room_phase */
	uint32_t complete;      /* destination: every byte is in place and visible. Sticky. sender:
				   decode said so */
	uint32_t failed;        /* excludes complete. Sticky. */
	uint32_t released;      /* destination: pages may be reused; sender: all sources are free.
				   Sticky. */
	uint32_t source_free;   /* sender: chunks [0, source_free) may be overwritten */
	uint32_t delivered;     /* sender: chunks [0, delivered) have landed at every destination */
	uint64_t arrived;       /* destination: [0, arrived) is present in all entries */
	uint64_t prefix, end;   /* sender: known from READY on */
	enum kvp_status status; /* when failed */
	uint32_t retry;         /* when failed: not 0 if the same request may succeed later */
	const char *reason;     /* when failed, in words; else "" */
	const void *meta;       /* destination, when complete: [meta_bytes], else NULL */
	uint32_t meta_bytes;
};
#define KVP_ROOM_STATE_INIT                                                                        \
	{                                                                                          \
		sizeof(struct kvp_room_state), 0, 0, 0, 0, 0, 0, 0, 0, 0, KVP_OK, 0, NULL, NULL, 0 \
	}

/** Announces what this decode rank expects; the daemon calls the senders' daemons. On refusal with
 * a done function the room's state becomes failed with the reason. *@id is valid until
 * kvp_room_forget(). */
int kvp_expect(struct kvp_client *client, const struct kvp_expect *expect, kvp_done_fn *done,
	       void *arg, kvp_room_id *id);
/** Announces that this prefill rank will send. */
int kvp_open(struct kvp_client *client, const struct kvp_open *open, kvp_done_fn *done, void *arg,
	     kvp_room_id *id);
/** Submits the next chunk; accepted before the room is ready too. *@seq (may be NULL) is its
 * number. The source rows must not change until source_free > seq. After a refusal the number is
 * used again. */
int kvp_submit(struct kvp_client *client, kvp_room_id id, const struct kvp_chunk *chunk,
	       kvp_done_fn *done, void *arg, uint32_t *seq);
/** Withdraws chunks >= seq that are not packed yet; *@from (may be NULL): the first one withdrawn,
 * whose number the next submit has again. Blocks. */
int kvp_recall(struct kvp_client *client, kvp_room_id id, uint32_t seq, uint32_t *from);
/** Ends this end's room without success. Harmless when it is over. @reason may be NULL. */
int kvp_abort(struct kvp_client *client, kvp_room_id id, const char *reason);

/** Decode, before kvp_expect(): prolongs the lease of a sender's open, or says that nobody will
 * come. */
int kvp_renew(struct kvp_client *client, const char *address, uint64_t room, const void *key,
	      uint32_t sender, uint32_t lease_ms, kvp_done_fn *done, void *arg);
int kvp_decline(struct kvp_client *client, const char *address, uint64_t room, const void *key,
		uint32_t sender, const char *reason, kvp_done_fn *done, void *arg);

/** Copies the state known now. Never blocks. -ENOENT: unknown id. Pointers live until
 * kvp_room_forget(). */
int kvp_room_state(const struct kvp_client *client, kvp_room_id id, struct kvp_room_state *state);
enum kvp_wait_for {
	KVP_WAIT_READY = 1,    /* sender is ready (or terminal) */
	KVP_WAIT_TERMINAL = 2, /* complete, done or failed */
	KVP_WAIT_RELEASED = 4  /* released */
};
/** Processes until the condition holds; -ETIMEDOUT. Returns 0 also when the room failed: read the
 * state. */
int kvp_room_wait(struct kvp_client *client, kvp_room_id id, enum kvp_wait_for what,
		  int timeout_ms);
/** As above for source_free >= n, delivered >= n. -ECANCELED when the room ended without. */
int kvp_room_wait_source_free(struct kvp_client *client, kvp_room_id id, uint32_t n,
			      int timeout_ms);
int kvp_room_wait_delivered(struct kvp_client *client, kvp_room_id id, uint32_t n, int timeout_ms);
/** The next room whose state changed since it was last returned here; 0: none. */
kvp_room_id kvp_room_next_changed(struct kvp_client *client);
/** Frees the local record; a live room is aborted first. */
void kvp_room_forget(struct kvp_client *client, kvp_room_id id);

/* ---- the whole daemon ---------------------------------------------------------------------- */

/**
 * Empties the node, before maintenance: until @on is 0 again the daemon refuses new legs with
 * KVP_STATUS_STOPPING and the reason (up to 159 bytes; NULL: none), at both ends; rooms that still
 * wait for the other end fail so at once. Those whose ends have met go on to their end, and all
 * that is over is released as ever. Administrators only. Blocks.
 */
int kvp_drain(struct kvp_client *client, uint32_t on, const char *reason);

/* ---- looking inside ------------------------------------------------------------------------ */

/**
 * The daemon's state as one JSON document; docs/protocol.md lists its fields.
 *
 * @what  "status", "clients", "pools", "rooms", "room", "waiting", "failures", "pins", "peers",
 *        "lanes" or "version".
 * @arg   NULL, or for "room" a room's number (decimal or 0x..) or "label:TEXT", for "failures" how
 * many seconds back, for "rooms" "all": those that have ended too.
 * @json  The caller's (free).
 *
 * Blocks. -EREMOTEIO, -EINVAL: refused, kvp_last_error() says why.
 */
int kvp_inspect(struct kvp_client *client, const char *what, const char *arg, char **json);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
