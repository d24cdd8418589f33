/* SPDX-License-Identifier: Apache-2.0 */
/* larder status. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/commands.h"

static int widest(const json_t *o, int depth)
{
    const char *name;
    json_t *value;
    int most = 0;
    json_object_foreach((json_t *)o, name, value)
    {
        int n = json_is_object(value) ? widest(value, depth + 1) : 2 * depth + (int)strlen(name);
        most = n > most ? n : most;
    }
    return most;
}

/* Objects become indented groups; lists of objects one group each; a number of bytes is shown as a size. */
static void show(const char *key, const json_t *v, int depth, int width)
{
    const char *name;
    json_t *value;
    size_t i, n = strlen(key);
    if (json_is_object(v) || json_is_array(v))
        printf("%*s%s\n", 2 * depth, "", name_text(key).s);
    json_object_foreach((json_t *)v, name, value)
    {
        show(name, value, depth + 1, width);
    }
    json_array_foreach(v, i, value)
    {
        char number[24];
        snprintf(number, sizeof number, "%zu", i);
        show(number, value, depth + 1, width);
    }
    if (json_is_object(v) || json_is_array(v))
        return;
    printf("%*s%-*s  ", 2 * depth, "", width - 2 * depth, name_text(key).s);
    if (json_is_string(v))
        printf("%s\n", name_text(json_string_value(v)).s);
    else if (json_is_integer(v) && n > 6 && strcmp(key + n - 6, "_bytes") == 0)
        printf("%s\n", size_text((uint64_t)json_integer_value(v)).s);
    else if (json_is_integer(v))
        printf("%" JSON_INTEGER_FORMAT "\n", json_integer_value(v));
    else if (json_is_real(v))
        printf("%.6g\n", json_real_value(v));
    else
        printf("%s\n", json_is_true(v) ? "yes" : json_is_false(v) ? "no" : "-");
}

static int status_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct larder_info info = LARDER_INIT(larder_info);
    struct larder_error e = {0};
    struct larder *c = NULL;
    char *text = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, NULL, 0, 0, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (larder_info(c, &info, &e) < 0 || larder_status(c, &text, &e) < 0)
        return client_close(c, fail(&e));
    json_t *server = json_loads(text, 0, NULL);
    if (!server)
        status = fail_with(STATUS_OTHER, "the server's status is not JSON; is it of another version (%s)?",
                           name_text(info.server_software).s);
    else if (common.json)
        status = json_print(json_pack("{s:s,s:s,s:s,s:s,s:s,s:O}", "server", info.server, "software",
                                      info.server_software, "tenant", info.tenant, "role", info.role, "path",
                                      info.path, "status", server));
    else {
        printf("%s at %s, as %s (%s), by %s\n", name_text(info.server_software).s, info.server, info.tenant,
               info.role, info.path);
        const char *name;
        json_t *value;
        int width = widest(server, 0);
        json_object_foreach(server, name, value)
        {
            show(name, value, 0, width);
        }
    }
    json_decref(server);
    free(text);
    return client_close(c, status);
}

const struct command cmd_status = {
    "status", "what the server is, has and does",
    "usage: larder status [--json]\n"
    "  --json    {\"server\", \"software\", \"tenant\", \"role\", \"path\", \"status\": {...}}\n",
    status_run};
