/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/lists.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A session has a handful of lists at a time: a chain is enough. */
static struct kvp_list *find(const struct kvp_lists *lists, uint32_t id)
{
	struct kvp_list *list = lists->first;

	while (list && list->id != id)
		list = list->next;
	return list;
}

const struct kvp_list *kvp_lists_find(const struct kvp_lists *lists, uint32_t id)
{
	return find(lists, id);
}

static int reserve(struct kvp_list *list, uint32_t n, uint32_t max_pages)
{
	/* Doubling keeps a list of many packets from being copied for each of them. */
	uint64_t twice = KVP_MIN(2ull * list->cap, (unsigned long long)max_pages);
	uint64_t cap = KVP_MAX(twice, (uint64_t)list->n + n);
	uint32_t *pages;

	if ((uint64_t)list->n + n <= list->cap)
		return 0;
	pages = realloc(list->pages, cap * sizeof(*pages));
	if (!pages)
		return -ENOMEM;
	list->pages = pages;
	list->cap = (uint32_t)cap;
	return 0;
}

static int append(struct kvp_list *list, const uint32_t *pages, uint32_t n, uint32_t max_pages)
{
	int r = reserve(list, n, max_pages);

	if (r < 0)
		return r;
	if (n > 0) {
		assert(list->pages);
		memcpy(list->pages + list->n, pages, (size_t)n * sizeof(*pages));
	}
	list->n += n;
	return 0;
}

int kvp_lists_append(struct kvp_lists *lists, uint32_t id, uint32_t offset, const uint32_t *pages,
		     uint32_t n, uint32_t max_lists, uint32_t max_pages)
{
	struct kvp_list *list = find(lists, id);
	KVP_CLEANUP(kvp_freep) struct kvp_list *made = NULL;
	int r;

	if (offset != (list ? list->n : 0))
		return -EINVAL;
	if (n > max_pages || offset > max_pages - n)
		return -ENOSPC;
	if (!list && lists->n_lists >= max_lists)
		return -EMFILE;
	if (!list) {
		made = calloc(1, sizeof(*made));
		if (!made)
			return -ENOMEM;
		made->id = id;
		list = made;
	}
	r = append(list, pages, n, max_pages);
	if (r < 0)
		return r;
	lists->n_pages += n;
	if (made) {
		made->next = lists->first;
		lists->first = KVP_TAKE(made);
		lists->n_lists++;
	}
	return 0;
}

void kvp_lists_drop(struct kvp_lists *lists, uint32_t id)
{
	for (struct kvp_list **at = &lists->first; *at; at = &(*at)->next) {
		struct kvp_list *list = *at;

		if (list->id != id)
			continue;
		*at = list->next;
		assert(lists->n_pages >= list->n && lists->n_lists > 0);
		lists->n_pages -= list->n;
		lists->n_lists--;
		free(list->pages);
		free(list);
		return;
	}
}

void kvp_lists_clear(struct kvp_lists *lists)
{
	while (lists->first)
		kvp_lists_drop(lists, lists->first->id);
}
