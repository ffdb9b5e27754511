/* Shared by the files of the emulated multiprocessor. */
#ifndef EMULATOR_INSIDE_H
#define EMULATOR_INSIDE_H

#include "machine.h"

#define EMULATOR_VARIABLES 24 /* shared variables of a block */

typedef struct shared_variable {
    const void *key; /* NULL for the dynamic array */
    const char *name;
    char *memory; /* the allocation; the variable begins `front` bytes into it */
    size_t front, bytes, alignment;
} shared_variable;

typedef struct list {
    void *items;
    size_t count, room;
} list;

/* A thread's pending work. Items of a list carry the number of their group. */
typedef struct thread_work {
    list copies, products, stores;
    int copy_group, product_group;
    int turn; /* which of two record buffers an exchange uses */
} thread_work;

typedef struct emulated_block {
    struct tchi_fibers *fibers;
    int64_t number;
    int rank; /* rank in its cluster */
    int variable_count;
    size_t shared_bytes;
    shared_variable variables[EMULATOR_VARIABLES];
    thread_work *work;      /* of 1024 threads */
    unsigned char *records; /* of 32 warps, 2 turns, 32 lanes */
} emulated_block;

/* One per CPU thread that launches kernels. */
typedef struct machine {
    const emulator_launch *launch;
    emulated_block blocks[EMULATOR_CLUSTER_MOST];
    emulated_block *now; /* whose thread is running */
    int count;           /* blocks of the cluster */
    uint64_t random;
    const char *kernel; /* the running kernel, as noted by itself */
    list loads;         /* pending TMA copies */
    char message[768];
} machine;

machine *emulator_machine(void);
/* Of the running thread. */
thread_work *emulator_work(void);
int emulator_thread(void);

/* Appends an item to a list. Never NULL: exits if memory runs out. */
void *list_add(list *l, size_t item_bytes);

/* shared.c: before and after each block. */
void emulator_shared_begin(emulated_block *block, size_t dynamic_bytes);
int emulator_shared_end(emulated_block *block, char *message, size_t size);
void emulator_shared_release(emulated_block *block);

/* copies.c */
int emulator_deliver_loads(machine *m); /* whether there were any */
void emulator_finish_stores(thread_work *work);
void emulator_forget_work(thread_work *work);

#endif
