/* Tensors saved as rectangles by several ranks. A shard is a tensor of a file whose name ends in its rectangle,
 * "layer1.weight[0:64,0:128]", with a setting, "torchium.shard/" and its name: the full sizes and the shard's first
 * indices, "256,128;0,0". */
#ifndef TCHI_CHECKPOINT_SHARDS_H
#define TCHI_CHECKPOINT_SHARDS_H

#include <torchium/checkpoint.h>

#include "core/list.h"
#include "names.h"
#include "slice.h"

#define TCHI_SHARD_PREFIX "torchium.shard/"

typedef struct tchi_shard_entry {
    int64_t tensor; /* its index */
    int64_t whole;  /* index of its whole */
    int64_t start[TCH_MAX_RANK];
    int64_t next; /* of the same whole, or -1 */
} tchi_shard_entry;

/* A tensor with shards. */
typedef struct tchi_whole {
    char *name;
    size_t name_bytes;
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK];
    int64_t first; /* shard */
} tchi_whole;

typedef struct tchi_shards {
    tchi_list entries; /* tchi_shard_entry */
    tchi_list wholes;  /* tchi_whole */
    tchi_names names;  /* of wholes */
} tchi_shards;

/* Finds the shards of an open file or index by its settings. */
tch_status tchi_shards_find(tch_checkpoint *checkpoint);
void tchi_shards_release(tchi_shards *shards);

/* Checks that no shards of a tensor overlap: TCH_ERR_IO names both. Quadratic in the shards of a tensor, for a
 * checkpoint being saved; reading checks the rectangle that is read. */
tch_status tchi_shards_check_overlaps(const tch_checkpoint *checkpoint);

/* The suffix of a shard's name. */
#define TCHI_SHARD_SUFFIX_SIZE (TCH_MAX_RANK * 42 + 3)
const char *tchi_shard_suffix(const tchi_slice *slice, char text[TCHI_SHARD_SUFFIX_SIZE]);

#endif
