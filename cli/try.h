/* Propagates errors of the library; the caller reports them. */
#ifndef CLI_TRY_H
#define CLI_TRY_H

#include <torchium/status.h>

#define CLI_TRY(call)                                                                                                  \
    do {                                                                                                               \
        tch_status cli_try_status = (call);                                                                            \
        if (cli_try_status != TCH_OK) {                                                                                \
            return cli_try_status;                                                                                     \
        }                                                                                                              \
    } while (0)

#endif
