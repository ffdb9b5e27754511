/* What the files of the emulated multiprocessor share with each other. */
#ifndef EMULATOR_INSIDE_H
#define EMULATOR_INSIDE_H

#include "machine.h"

#define EMULATOR_VARIABLES 24 /* shared variables of a block */

typedef struct shared_variable {
    const void *key; /* NULL for the dynamic array */
    const char *name;
    char *memory; /* what was allocated; the variable begins `front` bytes into it */
    size_t front, bytes, alignment;
} shared_variable;

/* A list that grows. */
typedef struct list {
    void *items;
    size_t count, room;
} list;

/* What a thread has under way. Items of a list carry the number of the group they belong to. */
typedef struct thread_work {
    list copies, products, stores;
    int copy_group, product_group;
    int turn; /* of two places for the records of an exchange */
} thread_work;

typedef struct emulated_block {
    struct tchi_fibers *fibers;
    int64_t number;
    int rank; /* in its cluster */
    int variable_count;
    size_t shared_bytes;
    shared_variable variables[EMULATOR_VARIABLES];
    thread_work *work;      /* of 1024 threads */
    unsigned char *records; /* of 32 warps, 2 turns, 32 lanes */
} emulated_block;

/* One for each thread of the CPU that launches kernels. */
typedef struct machine {
    const emulator_launch *launch;
    emulated_block blocks[EMULATOR_CLUSTER_MOST];
    emulated_block *now; /* whose thread runs */
    int count;           /* blocks of the cluster */
    uint64_t random;
    const char *kernel; /* that runs, by its own note */
    list loads;         /* of the tensor memory accelerator, on their way */
    char message[768];
} machine;

machine *emulator_machine(void);
/* Of the thread that runs. */
thread_work *emulator_work(void);
int emulator_thread(void);

/* A new item at the end of a list of such items; NULL never, for the process ends where there is no memory. */
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
