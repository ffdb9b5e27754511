/* Iterates over the rectangles of an update. Rectangles are divided into chunks that fit L1 and do not depend on the
 * number of threads, and chunks into runs, contiguous parts of a row. A run is accessed in the compute type: in place
 * if memory has that type, else through a buffer. */
#ifndef TCHI_CPU_UPDATES_RECTS_H
#define TCHI_CPU_UPDATES_RECTS_H

#include <stdbool.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/update/steps/steps.h"

/* In elements. A chunk of two float32 blocks and a run's buffers fit a 48 KB cache; 4 and 16 times larger chunks and
 * runs were no faster with AdamW, in or out of cache. */
#define TCHI_CPU_CHUNK 4096
#define TCHI_CPU_RUN 1024

static inline bool tchi_cpu_is_skipped(const tch_update *update)
{
    return update->skip != NULL && *update->skip != 0;
}

/* A rectangle of one rectangle. */
typedef struct tchi_cpu_chunk {
    const tch_rect *rect;
    int64_t row, col, rows, cols;
    int64_t number; /* among all chunks of the call */
} tchi_cpu_chunk;

typedef void (*tchi_cpu_chunk_task)(void *argument, const tchi_cpu_chunk *chunk);

/* Runs the task for every chunk, in parallel if worthwhile. `blocks`: whether the operation uses blocks; if not, a
 * dense rectangle is one row. An element counts as `work` operations. */
void tchi_cpu_for_chunks(const tchi_cpu_state *state, const tch_update *update, bool blocks, double work,
                         tchi_cpu_chunk_task task, void *argument);

/* Number of chunks of a rectangle, and an upper bound for rectangles with so many elements in all. */
int64_t tchi_cpu_chunks_of(const tch_rect *rect, bool blocks);
int64_t tchi_cpu_chunks_at_most(int64_t elements, int64_t rects);

/* --- runs ------------------------------------------------------------------------------------------------------- */

typedef struct tchi_cpu_run {
    const tch_update *update;
    const tch_rect *rect;
    const tchi_loops *loops; /* of the compute type, as are the steps */
    const tchi_cpu_steps *steps;
    const tchi_cpu_chunk *chunk;
    int64_t row, col; /* of its first element, in the chunk */
    int64_t n;
    int64_t at;     /* of its first element, in the parameter and arrays with the same layout */
    int64_t number; /* of its first element, for random numbers */
    _Alignas(64) char param[TCHI_CPU_RUN * sizeof(double)];
    _Alignas(64) char gradient[TCHI_CPU_RUN * sizeof(double)];
    _Alignas(64) char other[TCHI_CPU_RUN * sizeof(double)];
    _Alignas(64) float moment[2][TCHI_CPU_RUN]; /* of narrower types than the compute type */
} tchi_cpu_run;

/* tchi_cpu_run_begin(&run, update, chunk); while (tchi_cpu_run_next(&run)) { ... } */
void tchi_cpu_run_begin(tchi_cpu_run *run, const tch_update *update, const tchi_cpu_chunk *chunk);
bool tchi_cpu_run_next(tchi_cpu_run *run);

/* The parameter, or its master copy if any, for modification; and its store. */
void *tchi_cpu_run_param(tchi_cpu_run *run);
void tchi_cpu_run_store_param(tchi_cpu_run *run, const void *p);

/* The gradient, unscaled and with its sign; decay times p is added where p is not NULL. */
const void *tchi_cpu_run_gradient(tchi_cpu_run *run, const void *p, double decay);

void *tchi_cpu_run_state(const tchi_cpu_run *run, int index);

/* State 0 or 1 in the format of update->moments, for modification; and its store, of both for AdamW. */
void *tchi_cpu_run_moment(tchi_cpu_run *run, int index);
void tchi_cpu_run_store_moments(const tchi_cpu_run *run, tchi_code_use use);

/* --- blocks ----------------------------------------------------------------------------------------------------- */

/* A chunk of a block in the orientation of the parameter and in the compute type. */
typedef struct tchi_cpu_tile {
    char *data;  /* of the chunk's element (0, 0); NULL if the rectangle has no such block */
    int64_t ld;  /* in elements */
    bool direct; /* it is the block's own memory */
    _Alignas(64) char buffer[TCHI_CPU_CHUNK * sizeof(double)];
} tchi_cpu_tile;

/* `read` is false if the tile will be written without being read. */
void tchi_cpu_tile_open(tchi_cpu_tile *tile, const tch_update *update, const tchi_cpu_chunk *chunk, int index,
                        bool read);
void tchi_cpu_tile_store(const tchi_cpu_tile *tile, const tch_update *update, const tchi_cpu_chunk *chunk, int index);

/* The tile's part of a run. */
void *tchi_cpu_tile_run(const tchi_cpu_tile *tile, const tchi_cpu_run *run);

#endif
