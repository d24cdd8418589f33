/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Intrusive doubly linked list. A head is a `struct list` pointing to itself; an entry that is on no list
 * points to itself too, so list_del may be called on it twice.
 */
#ifndef LARDER_BASE_LIST_H
#define LARDER_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
    struct list *next, *prev;
};

#define container_of(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

static inline void list_init(struct list *l)
{
    l->next = l->prev = l;
}
static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}
static inline void list_add_tail(struct list *head, struct list *entry)
{
    entry->prev = head->prev;
    entry->next = head;
    head->prev->next = entry;
    head->prev = entry;
}
static inline void list_add_head(struct list *head, struct list *entry)
{
    list_add_tail(head->next, entry);
}
static inline void list_del(struct list *entry)
{
    entry->prev->next = entry->next;
    entry->next->prev = entry->prev;
    list_init(entry);
}
/* First entry, taken off, or NULL. */
static inline struct list *list_pop(struct list *head)
{
    if (list_empty(head))
        return NULL;
    struct list *entry = head->next;
    list_del(entry);
    return entry;
}

#define list_for_each(it, head) for (struct list *it = (head)->next; it != (head); it = it->next)
/* The current entry may be deleted in the body; no other may. */
#define list_for_each_safe(it, head)                                          \
    for (struct list *it = (head)->next, *it##_next = it->next; it != (head); \
         it = it##_next, it##_next = it->next)

#endif
