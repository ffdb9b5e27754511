/* How the command passes failures of the library on; who has called it says them at the end. */
#ifndef CLI_TRY_H
#define CLI_TRY_H

#include <torchium/status.h>

/* Returns from the enclosing function when the call failed. */
#define CLI_TRY(call)                                                                                                  \
    do {                                                                                                               \
        tch_status cli_try_status = (call);                                                                            \
        if (cli_try_status != TCH_OK) {                                                                                \
            return cli_try_status;                                                                                     \
        }                                                                                                              \
    } while (0)

#endif
