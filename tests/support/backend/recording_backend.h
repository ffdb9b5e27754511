/* The CPU's table as a device that can record, for tests of src/core/recording.c: fills are recorded instead of
 * executed, and a replay executes them. Other operations are executed even while recording: recorded optimizers are
 * tested on the emulated CUDA device (tests/emulator). */
#ifndef TORCHIUM_TESTS_RECORDING_BACKEND_H
#define TORCHIUM_TESTS_RECORDING_BACKEND_H

#include <stdbool.h>

#include "core/context.h"

typedef struct recording_figures {
    int begun, kept, replayed, released; /* calls so far; kept: ends that returned a recording */
    int operations;                      /* of the latest recording */
} recording_figures;

/* Failures from now on. */
typedef struct recording_faults {
    bool impossible; /* as if the caller were recording */
    bool begin_fails;
    bool end_fails; /* as if the stream could not be restored */
    bool end_gives_nothing;
    bool replay_fails;  /* with nothing queued */
    bool replay_breaks; /* with some work queued */
} recording_faults;

extern recording_figures recorded;
extern recording_faults recording_fault;

/* For one CPU context at a time; counts and failures are reset. */
void recording_backend_install(tch_context *context);
void recording_backend_remove(tch_context *context);

#endif
