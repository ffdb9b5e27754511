/* See agree.h. */
#include "agree.h"

#include <stdio.h>

#include "core/status.h"

/* FNV-1a, without the sign: it goes through a maximum together with its complement. */
static int32_t hash_of(const tchi_loading *l)
{
    uint32_t hash = 0x811C9DC5u;
    for (int64_t i = 0; i < l->count; i++) {
        hash = (hash ^ (uint32_t)l->counts[i]) * 0x01000193u;
    }
    return (int32_t)(hash & 0x7FFFFFFF);
}

tch_status tchi_loading_agree(const tchi_loading *loading, tch_status status, const char *otherwise)
{
    char message[1024];
    if (loading->comm == NULL) {
        return status;
    }
    snprintf(message, sizeof message, "%s", status == TCH_OK ? "" : tch_last_error());
    int32_t number = hash_of(loading);
    int32_t seen[4] = {status != TCH_OK, number, ~number, 0};
    TCHI_TRY(tchi_comm_largest(loading->comm, loading->context, seen));
    if (status != TCH_OK) {
        return tchi_fail(status, "%s", message);
    }
    if (seen[0] != 0) {
        return tchi_fail(TCH_ERR_COMM, "%s: another rank could not load its part; %s", loading->function, otherwise);
    }
    return seen[1] == ~seen[2] ? TCH_OK
                               : tchi_fail(TCH_ERR_COMM,
                                           "%s: the ranks have opened different checkpoints: their numbers of steps "
                                           "differ",
                                           loading->function);
}
