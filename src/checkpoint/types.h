/* The element types of safetensors files. */
#ifndef TCHI_CHECKPOINT_TYPES_H
#define TCHI_CHECKPOINT_TYPES_H

#include <stdint.h>

#include <torchium/tensor.h>

typedef struct tchi_file_type {
    const char *name; /* in the file */
    int32_t bits;     /* of one element; those below 8 are packed */
    tch_dtype dtype;  /* in DLPack's numbers */
} tchi_file_type;

/* NULL for a name or a type that the format does not have. */
const tchi_file_type *tchi_file_type_named(const char *name);
const tchi_file_type *tchi_file_type_of(tch_dtype dtype);

#endif
