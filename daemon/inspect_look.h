/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A display of rooms while it is made: a few rooms a step, as text into a memfd, so that neither
 * the loop stands still nor memory is taken for all of them at once. Loop thread only.
 */

#include "daemon/inspect.h"
#include "daemon/server.h"

#define KVP_LOOK_CAUSES 64u /* there are fewer texts of what rooms wait for */

struct kvp_look;

/* Whether ended rooms are shown too. */
enum kvp_look_ended { KVP_LOOK_LIVE, KVP_LOOK_ASKED, KVP_LOOK_ENDED };

/* What is shown of rooms. */
struct kvp_look_kind {
	const char *name; /* as asked for */
	const char *list; /* in the answer */
	enum kvp_look_ended ended;
	/* Reads the argument; false: it is wrong, with a reason in ask.err. NULL: has none. */
	bool (*parse)(struct kvp_look *look);
	/* Sets *item, or leaves it NULL where the room is not shown. False: no memory. */
	bool (*item)(struct kvp_look *look, const struct kvp_room_view *view, cJSON **item);
	/* Says what comes behind the last item, from the list's end on. */
	void (*close)(struct kvp_look *look);
};

struct kvp_look_cause {
	const char *text;
	uint64_t count, oldest_ns;
	char example[80];
};

struct kvp_look {
	struct kvp_server_job job;
	struct kvp_inspect ask; /* arg is below; err is its caller's, to the begin only */
	const struct kvp_look_kind *kind;
	struct kvp_session_pending *pending; /* answered at the end */
	struct kvp_room_walk walk;
	bool begun, failed; /* failed: no memory, or the file takes no more */
	int fd;             /* owned */
	uint32_t n_items;
	size_t n_text;
	char text[16384]; /* not yet in the file */
	char arg[KVP_LIMIT_TEXT + 1];
	/* what is asked for */
	bool detail;
	uint64_t room;
	const char *label; /* NULL: by number */
	uint64_t since_s;
	/* what rooms wait for */
	uint32_t n_causes;
	struct kvp_look_cause causes[KVP_LOOK_CAUSES];
};

/* NULL: nothing of that name. */
const struct kvp_look_kind *kvp_look_kind(const char *name);

void kvp_look_text(struct kvp_look *look, const char *text, size_t n);
/* Takes the item over; NULL: there was no memory for it. */
void kvp_look_item(struct kvp_look *look, cJSON *item);
