/* SPDX-License-Identifier: Apache-2.0 */
#include "format/identity.h"

#include <string.h>

#include "format/commit.h"

int identity_parse(const char *uri, size_t n, struct identity *out, struct err *e)
{
    static const size_t scheme = sizeof IDENTITY_SCHEME - 1;
    char quoted[160], role[16];
    out->tenant[0] = '\0';
    out->role = ROLE_NONE;
    out->server = false;
    if (n < scheme || memcmp(uri, IDENTITY_SCHEME, scheme) != 0)
        goto refuse;
    const char *name = uri + scheme;
    size_t left = n - scheme;
    if (left == 6 && memcmp(name, "server", 6) == 0) {
        out->server = true;
        return 0;
    }
    const char *slash = memchr(name, '/', left);
    size_t name_bytes = slash ? (size_t)(slash - name) : 0;
    size_t role_bytes = slash ? left - name_bytes - 1 : 0;
    if (!slash || name_bytes > TENANT_NAME_BYTES_MAX || role_bytes >= sizeof role)
        goto refuse;
    memcpy(out->tenant, name, name_bytes);
    out->tenant[name_bytes] = '\0';
    if (strlen(out->tenant) != name_bytes || tenant_name_check(out->tenant, NULL) < 0)
        goto refuse;
    memcpy(role, slash + 1, role_bytes);
    role[role_bytes] = '\0';
    if (strlen(role) != role_bytes || role_of_name(role, &out->role) < 0)
        goto refuse;
    return 0;
refuse:
    out->tenant[0] = '\0';
    return err_set(e, ERR_DENIED,
                   "expected the identity larder://TENANT/ROLE or larder://server, found '%s'; have a new "
                   "certificate issued",
                   err_quote(quoted, sizeof quoted, uri, n));
}
