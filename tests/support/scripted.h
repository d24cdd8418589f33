/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A server for tests that says what it is told to: one thread, clear channel, hello answered by itself, every
 * other frame given to the test's function.
 */
#ifndef LARDER_TESTS_SCRIPTED_H
#define LARDER_TESTS_SCRIPTED_H

#include "format/channel.h"

struct scripted;

enum scripted_next { SCRIPT_GO_ON, SCRIPT_HANG_UP };

struct scripted_options {
    /* On the server's thread; answers with scripted_answer, now or at a later frame. */
    enum scripted_next (*frame)(void *arg, struct scripted *s, const struct frame_header *h,
                                const uint8_t *payload);
    void *arg;
    int refuse_class;  /* enum err_class: hello is refused so */
    bool refuse_early; /* as before hello was read: with no request's id */
    bool silent;       /* connections are taken and never answered */
};

struct scripted *scripted_start(const struct scripted_options *o);
const char *scripted_port(const struct scripted *s);
/* From within `frame` only. flags: FRAME_MORE, or 0. */
void scripted_answer(struct scripted *s, const struct frame_header *h, uint32_t flags, const void *p,
                     size_t n);
void scripted_refuse(struct scripted *s, const struct frame_header *h, int class, const char *text);
unsigned scripted_connections(struct scripted *s); /* accepted so far */
void scripted_stop(struct scripted *s);

#endif
