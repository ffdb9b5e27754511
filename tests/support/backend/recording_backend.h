/* The CPU's table as a device that can record, for tests of src/core/recording.c: while it does, fills are written down
 * and not done, and a replay does what was written down. Whatever else is queued while recording would be done at once:
 * optimizers are recorded on the emulated CUDA device (tests/emulator). */
#ifndef TORCHIUM_TESTS_RECORDING_BACKEND_H
#define TORCHIUM_TESTS_RECORDING_BACKEND_H

#include <stdbool.h>

#include "core/context.h"

typedef struct recording_figures {
    int begun, kept, replayed, released; /* calls so far; kept: ends that gave a recording */
    int operations;                      /* of the latest recording */
} recording_figures;

/* What goes wrong from now on. */
typedef struct recording_faults {
    bool impossible;  /* as if the caller were recording himself */
    bool begin_fails; /* and so on */
    bool end_fails;   /* as if the stream could not be put back */
    bool end_gives_nothing;
    bool replay_fails;  /* with nothing queued */
    bool replay_breaks; /* with a part queued */
} recording_faults;

extern recording_figures recorded;
extern recording_faults recording_fault;

/* For one context on the CPU at a time; figures and faults begin at 0. */
void recording_backend_install(tch_context *context);
void recording_backend_remove(tch_context *context);

#endif
