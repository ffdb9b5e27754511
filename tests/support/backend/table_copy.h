/* A copy of an operation table whose operations can be replaced. */
#ifndef TEST_TABLE_COPY_H
#define TEST_TABLE_COPY_H

#include <torchium/backend.h>

typedef struct table_copy {
    tch_backend backend;
    tch_device_ops device;
    tch_matrix_ops matrix;
    tch_update_ops update;
    tch_sample_ops sample;
    tch_network_ops network;
    tch_recording_ops recording;
    tch_kernel_ops kernel;
} table_copy;

#define TABLE_COPY_CHAPTER(copy, from, chapter)                                                                        \
    do {                                                                                                               \
        if ((from)->chapter != NULL) {                                                                                 \
            (copy)->chapter = *(from)->chapter;                                                                        \
            (copy)->backend.chapter = &(copy)->chapter;                                                                \
        }                                                                                                              \
    } while (0)

/* Chapters that `from` lacks stay NULL in copy->backend. */
static inline void table_copy_make(table_copy *copy, const tch_backend *from)
{
    copy->backend = *from;
    TABLE_COPY_CHAPTER(copy, from, device);
    TABLE_COPY_CHAPTER(copy, from, matrix);
    TABLE_COPY_CHAPTER(copy, from, update);
    TABLE_COPY_CHAPTER(copy, from, sample);
    TABLE_COPY_CHAPTER(copy, from, network);
    TABLE_COPY_CHAPTER(copy, from, recording);
    TABLE_COPY_CHAPTER(copy, from, kernel);
}

#endif
