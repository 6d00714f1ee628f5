/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/inspect_look.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/memfd.h"
#include "daemon/session_io.h"
#include "proto/util.h"

#define ROOMS_A_STEP 1u

/* ---- text */

static void flush(struct kvp_look *look)
{
	if (!look->failed && kvp_memfd_write(look->fd, look->text, look->n_text) < 0)
		look->failed = true;
	look->n_text = 0;
}

void kvp_look_text(struct kvp_look *look, const char *text, size_t n)
{
	if (n > sizeof(look->text) - look->n_text)
		flush(look);
	if (n <= sizeof(look->text)) {
		memcpy(look->text + look->n_text, text, n);
		look->n_text += n;
	} else if (!look->failed && kvp_memfd_write(look->fd, text, n) < 0) {
		look->failed = true;
	}
}

void kvp_look_item(struct kvp_look *look, cJSON *item)
{
	char *text = item ? cJSON_PrintUnformatted(item) : NULL;

	if (text) {
		kvp_look_text(look, ",", look->n_items++ > 0);
		kvp_look_text(look, text, strlen(text));
	} else {
		look->failed = true;
	}
	cJSON_free(text);
	cJSON_Delete(item);
}

/* ---- a step */

static bool on_view(void *arg, const struct kvp_room_view *view)
{
	struct kvp_look *look = arg;
	cJSON *item = NULL;

	if (!look->kind->item(look, view, &item))
		look->failed = true;
	else if (item)
		kvp_look_item(look, item);
	return !look->failed;
}

static void begin(struct kvp_look *look)
{
	char text[48];

	look->begun = true;
	look->fd = kvp_memfd_make("kvpack-inspect");
	look->failed = look->fd < 0;
	(void)snprintf(text, sizeof(text), "{\"%s\":[", look->kind->list); /* fits */
	kvp_look_text(look, text, strlen(text));
	kvp_room_walk_begin(&look->walk, look->ask.core->rooms,
			    look->kind->ended == KVP_LOOK_ENDED ||
				    (look->kind->ended == KVP_LOOK_ASKED && look->ask.all),
			    on_view, look);
}

static void look_free(struct kvp_look *look)
{
	kvp_room_walk_end(&look->walk);
	if (look->fd >= 0)
		(void)close(look->fd);
	free(look);
}

static void on_drop(struct kvp_server_job *job)
{
	struct kvp_look *look = KVP_CONTAINER_OF(job, struct kvp_look, job);

	kvp_session_forget(look->pending);
	look_free(look);
}

static void answer(struct kvp_look *look)
{
	struct kvp_session_pending *pending = look->pending;

	look->kind->close(look);
	flush(look);
	if (!look->failed && kvp_memfd_seal(look->fd) < 0)
		look->failed = true;
	pending->session->looking = false;
	if (look->failed)
		kvp_session_answer_with(pending, KVP__STATUS__STATUS_NO_MEMORY,
					"inspect: no memory for the answer");
	else
		kvp_session_answer_fd(pending, KVP_TAKE_FD(look->fd));
	look_free(look);
}

static bool on_step(struct kvp_server_job *job)
{
	struct kvp_look *look = KVP_CONTAINER_OF(job, struct kvp_look, job);

	if (!look->pending->session) { /* it has ended: nobody reads this */
		on_drop(job);
		return false;
	}
	look->ask.now_ns = kvp_core_now_ns();
	if (!look->begun)
		begin(look);
	if (!look->failed && kvp_room_walk_step(&look->walk, ROOMS_A_STEP) && !look->failed)
		return true;
	answer(look);
	return false;
}

/* ---- begin */

bool kvp_inspect_is_look(const char *what)
{
	return kvp_look_kind(what) != NULL;
}

Kvp__Status kvp_inspect_look(const struct kvp_inspect *ask, const char *what,
			     struct kvp_session_pending *pending)
{
	struct kvp_look *look = calloc(1, sizeof(*look));

	if (!look) {
		(void)snprintf(ask->err, ask->err_bytes, "inspect: no memory"); /* fits */
		return KVP__STATUS__STATUS_NO_MEMORY;
	}
	look->job.step = on_step;
	look->job.drop = on_drop;
	look->kind = kvp_look_kind(what);
	look->pending = pending;
	look->fd = -1;
	look->ask = *ask;
	(void)snprintf(look->arg, sizeof(look->arg), "%s", ask->arg); /* fits */
	look->ask.arg = look->arg;
	if (look->kind->parse && !look->kind->parse(look)) {
		free(look);
		return KVP__STATUS__STATUS_INVALID;
	}
	pending->session->looking = true;
	kvp_server_defer(ask->core->server, &look->job);
	return KVP__STATUS__STATUS_OK;
}
