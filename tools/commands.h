/* SPDX-License-Identifier: Apache-2.0 */
/* Every subcommand, each defined in the file named after its group, and what several of them use. */
#ifndef LARDER_TOOLS_COMMANDS_H
#define LARDER_TOOLS_COMMANDS_H

#include "tools/ui.h"

extern const struct command cmd_doctor, cmd_status, cmd_tenant_add, cmd_tenant_ls, cmd_key_rotate;
extern const struct command cmd_dataset_import, cmd_dataset_ls, cmd_dataset_verify, cmd_dataset_cat,
    cmd_dataset_prune, cmd_dataset_destroy;
extern const struct command cmd_ckpt_ls, cmd_ckpt_show, cmd_ckpt_verify, cmd_ckpt_pin, cmd_ckpt_unpin,
    cmd_ckpt_mark, cmd_ckpt_prune, cmd_ckpt_save, cmd_ckpt_restore, cmd_ckpt_destroy;
extern const struct command cmd_feed_order;
extern const struct command cmd_bench_limits, cmd_bench_codec, cmd_bench_save, cmd_bench_restore,
    cmd_bench_feed;

/* The newest commit of a step (or the one of a sequence, if step is NULL): its sequence and step. 0 or an
 * exit code after telling. */
int commit_find(struct larder *c, enum larder_kind kind, const char *run, const uint64_t *step,
                uint64_t *sequence, uint64_t *found_step);
const char *commit_state_name(enum larder_commit_state state);

/* Shared by ckpt and dataset. */
int runs_list(struct larder *c, enum larder_kind kind, bool json);
int verify_run(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence, const char *level,
               bool mark_bad, bool json);
int prune_command(const struct command *cmd, enum larder_kind kind, int argc, char **argv);
int destroy_command(const struct command *cmd, enum larder_kind kind, int argc, char **argv);
/* "structure", "scrub" or "deep". */
bool verify_level(const char *word, enum larder_verify_level *out);

#endif
