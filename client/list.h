/* SPDX-License-Identifier: Apache-2.0 */
/* Listings that come in pages: all of it, or an error. */
#ifndef LARDER_CLIENT_LIST_H
#define LARDER_CLIENT_LIST_H

#include "client/client.h"

/* Called per item with a cursor that the callback moves behind it. A non-zero value ends the listing and is
 * returned. */
typedef int list_item(void *arg, struct rcur *in, struct err *e);

/* msg_run_item of every run of that kind. */
must_check int list_runs(struct larder *c, enum run_kind kind, list_item *each, void *arg, struct err *e);
/* msg_commit_item of every commit of a run, by sequence. */
must_check int list_commits(struct larder *c, enum run_kind kind, const char *run, bool with_pending,
                            list_item *each, void *arg, struct err *e);
/* msg_tenant_item; msg_published_item. */
must_check int list_tenants(struct larder *c, list_item *each, void *arg, struct err *e);
must_check int list_published(struct larder *c, list_item *each, void *arg, struct err *e);

/* ERR_EXISTS: the run has one for that epoch. */
must_check int run_envelope_put(struct larder *c, const struct id *run_id,
                                const uint8_t envelope[ENVELOPE_BYTES], struct err *e);

#endif
