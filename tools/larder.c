/* SPDX-License-Identifier: Apache-2.0 */
/* larder: finds the subcommand and runs it. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "tools/commands.h"

static const struct command *const commands[] = {
    &cmd_doctor,          &cmd_status,     &cmd_tenant_add,     &cmd_tenant_ls,   &cmd_key_rotate,
    &cmd_dataset_import,  &cmd_dataset_ls, &cmd_dataset_verify, &cmd_dataset_cat, &cmd_dataset_prune,
    &cmd_dataset_destroy, &cmd_ckpt_ls,    &cmd_ckpt_show,      &cmd_ckpt_verify, &cmd_ckpt_pin,
    &cmd_ckpt_unpin,      &cmd_ckpt_mark,  &cmd_ckpt_prune,     &cmd_ckpt_save,   &cmd_ckpt_restore,
    &cmd_ckpt_destroy,    &cmd_feed_order, &cmd_bench_limits,   &cmd_bench_codec, &cmd_bench_save,
    &cmd_bench_restore,   &cmd_bench_feed,
};
#define COMMANDS (sizeof commands / sizeof commands[0])

static void help(FILE *to, const char *group)
{
    fprintf(to, "usage: larder %s%s[options]\n\n", *group ? group : "COMMAND", *group ? " COMMAND " : " ");
    for (size_t i = 0; i < COMMANDS; i++)
        if (strncmp(commands[i]->name, group, strlen(group)) == 0)
            fprintf(to, "  %-16s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(
        to,
        "\nEach has --help; those that read have --json. --credentials FILE, or LARDER_CREDENTIALS, names\n"
        "the credential file. larder --version tells the version; larder(1) lists the exit codes.\n");
}

/* How many of argv's words are the command's name; 0 if it is another. */
static int words_matched(const char *name, int argc, char **argv)
{
    int words = 0;
    while (*name) {
        size_t n = strcspn(name, " ");
        if (words >= argc || strlen(argv[words]) != n || strncmp(argv[words], name, n) != 0)
            return 0;
        words++;
        name += n + (name[n] == ' ');
    }
    return words;
}

static bool is_group(const char *word)
{
    size_t n = strlen(word);
    for (size_t i = 0; i < COMMANDS; i++)
        if (n > 0 && strncmp(commands[i]->name, word, n) == 0 && commands[i]->name[n] == ' ')
            return true;
    return false;
}

static int dispatch(int argc, char **argv)
{
    for (size_t i = 0; i < COMMANDS; i++) {
        int words = words_matched(commands[i]->name, argc, argv);
        if (words)
            return commands[i]->run(commands[i], argc - words, argv + words);
    }
    if (argc < 1) {
        help(stderr, "");
        return STATUS_USAGE;
    }
    if (strcmp(argv[0], "--version") == 0) {
        printf("larder %s\n", larder_version());
        return STATUS_OK;
    }
    if (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0 || strcmp(argv[0], "help") == 0) {
        help(stdout, argc > 1 && is_group(argv[1]) ? argv[1] : "");
        return STATUS_OK;
    }
    if (is_group(argv[0])) {
        if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
            help(stdout, argv[0]);
            return STATUS_OK;
        }
        if (argc > 1)
            return fail_usage(argv[0], "\"%s\" is not a command of larder %s", argv[1], argv[0]);
        help(stderr, argv[0]);
        return STATUS_USAGE;
    }
    return fail_usage("", "\"%s\" is not a command", argv[0]);
}

int main(int argc, char **argv)
{
#ifndef __SANITIZE_ADDRESS__   /* whose leak check attaches to its own process */
    prctl(PR_SET_DUMPABLE, 0); /* commands that make keys hold them for moments in ordinary memory */
#endif
    signal(SIGXFSZ, SIG_IGN); /* a file that grows beyond its limit fails its write, with EFBIG */
    int status = dispatch(argc - 1, argv + 1);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == STATUS_OK)
        status = fail_with(STATUS_OTHER, "the output could not be written: %m");
    return status;
}
