/* What a launch of an optimizer's update by a user's function works on: parameters by value, as many as fit among the
 * parameters of a kernel. The library includes this file, and its text goes before the user's source, where int64_t and
 * uint64_t are declared already. */
#ifndef TCHI_OPTIM_LIST_H
#define TCHI_OPTIM_LIST_H

#define TCHI_UPDATE_MOST 52     /* parameters of a launch: the list stays below 4096 bytes, which every GPU takes */
#define TCHI_UPDATE_CHUNK 2048  /* elements of a block of threads: two vec4s for each of them on a GPU */
#define TCHI_UPDATE_THREADS 256 /* on a GPU; a block on the CPU is one thread with a loop */

/* Where the numbers of a group and of a clock lie; see tch_hyper and tch_clock. */
enum {
    TCHI_HYPER_LR = 0,
    TCHI_HYPER_BETA1 = 1,
    TCHI_HYPER_BETA2 = 2,
    TCHI_HYPER_EPS = 3,
    TCHI_HYPER_DECAY = 4,
    TCHI_HYPER_MOMENTUM = 5,
    TCHI_HYPER_DAMPENING = 6,
    TCHI_CLOCK_STEP = 0,
    TCHI_CLOCK_CORRECTION1 = 1,
    TCHI_CLOCK_CORRECTION2 = 2
};

/* Types of memory, as tch_scalar numbers them. */
enum { TCHI_TYPE_F64 = 0, TCHI_TYPE_F32 = 1, TCHI_TYPE_F16 = 2, TCHI_TYPE_BF16 = 3 };

typedef struct tchi_update_rect {
    void *param;
    float *master; /* NULL, or the truth of which param is the rounding */
    const void *grad;
    void *state[3]; /* of the arithmetic's type, or NULL */
    const double *clock;
    int64_t count; /* elements */
    int32_t parameter;
    int32_t spare;
} tchi_update_rect;

typedef struct tchi_update_list {
    const double *hyper;
    const int32_t *skip;
    const float *grad_scale;
    uint64_t seed;
    int32_t param_type, grad_type;
    int32_t maximize, stochastic, l2, nesterov, amsgrad;
    int32_t count;
    int32_t first_chunk[TCHI_UPDATE_MOST + 1]; /* of each parameter, and behind the last: how many there are */
    tchi_update_rect rect[TCHI_UPDATE_MOST];
} tchi_update_list;

#endif
