/* SPDX-License-Identifier: Apache-2.0 */
/* larder-demo: finds the command and runs it. */
#include <stdio.h>
#include <string.h>

#include "tools/demo/demo.h"

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {{"pack", pack_main}, {"train", train_main}, {"report", report_main}};
    for (size_t i = 0; argc > 1 && i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    bool help = argc > 1 && strcmp(argv[1], "--help") == 0;
    fprintf(help ? stdout : stderr, "usage: larder-demo pack|train|report ... (each has --help)\n");
    return help ? 0 : 2;
}
