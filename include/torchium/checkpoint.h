/* Checkpoints: named tensors and settings in one file, or in one file per rank of a group.
 *
 * The file is a safetensors file (docs/checkpoints.md). A writer collects tensors and settings, then saves them at
 * once; a reader opens a file and reads any of them:
 *
 *     tch_checkpoint_writer *writer;
 *     tch_checkpoint_writer_create(&writer);
 *     tch_checkpoint_writer_add(writer, "layer1.weight", &weight);
 *     tch_checkpoint_writer_set_integer(writer, "step", 1200);
 *     tch_checkpoint_writer_save(writer, context, "model.safetensors");
 *     tch_checkpoint_writer_destroy(writer);
 *
 *     tch_checkpoint *checkpoint;
 *     tch_checkpoint_open("model.safetensors", &checkpoint);
 *     tch_checkpoint_read(checkpoint, context, "layer1.weight", &weight);
 *     tch_checkpoint_integer(checkpoint, "step", &step);
 *     tch_checkpoint_close(checkpoint);
 *
 * Every tensor and the header have a CRC-32C checksum: a read returns the bytes that were saved, or an error. It
 * detects accidents, not deliberate changes.
 *
 * A save is atomic: after an error, a full disk or a killed process the path holds the whole old file or the whole new
 * one. Files are untrusted: every name, shape and offset is checked before use.
 *
 * Ranks of a group save together: each adds its tensors and shards to its own writer, and all call
 * tch_checkpoint_writer_save_sharded. This writes one safetensors file per rank and an index in the usual layout of
 * sharded models, "model.safetensors.index.json", which tch_checkpoint_open opens like a file. Any number of ranks
 * reads from it:
 *
 *     tch_checkpoint_writer_add_shard(writer, "layer1.weight", &rows, shape, start);
 *     tch_checkpoint_writer_save_sharded(writer, context, comm, "model.safetensors.index.json");
 *
 *     tch_checkpoint_open("model.safetensors.index.json", &checkpoint);
 *     tch_checkpoint_read_shard(checkpoint, context, "layer1.weight", shape, other_start, &other_rows);
 *
 * A writer is used by one thread at a time. An open checkpoint never changes; any number of threads may read from it,
 * each with its own context. Names, keys and text are UTF-8. */
#ifndef TORCHIUM_CHECKPOINT_H
#define TORCHIUM_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/comm.h>
#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_checkpoint_writer tch_checkpoint_writer;
typedef struct tch_checkpoint tch_checkpoint;

/* A tensor in a file. Files of other programs may have types and ranks that this library does not support: these are
 * described but cannot be read. Pointers are valid until the checkpoint is closed. */
typedef struct tch_checkpoint_info {
    size_t struct_size; /* set by TCH_CHECKPOINT_INFO_INIT */
    const char *name;
    const char *type;     /* as the file spells it: "F32", "BF16", "F8_E4M3", ... */
    tch_dtype dtype;      /* the same as in DLPack; tch_dtype_size() is 0 for an unsupported type */
    int32_t ndim;         /* above TCH_MAX_RANK: the tensor cannot be read */
    const int64_t *shape; /* ndim sizes */
    int64_t bytes;        /* in the file */
    int32_t has_checksum; /* 0 in files of other programs */
} tch_checkpoint_info;
#define TCH_CHECKPOINT_INFO_INIT                                                                                       \
    {                                                                                                                  \
        sizeof(tch_checkpoint_info), NULL, NULL, {0, 0, 0}, 0, NULL, 0, 0                                              \
    }

TCH_BEGIN_DECLS

/* --- writing ---------------------------------------------------------------------------------------------------- */

/* An empty writer. */
TCH_API tch_status tch_checkpoint_writer_create(tch_checkpoint_writer **writer);

/* NULL is allowed. */
TCH_API void tch_checkpoint_writer_destroy(tch_checkpoint_writer *writer);

/* Adds a tensor of any layout, in host memory or on a device, under a new name. Name and description are copied; each
 * save reads the elements, so their memory must stay valid until the last one. */
TCH_API tch_status tch_checkpoint_writer_add(tch_checkpoint_writer *writer, const char *name, const tch_tensor *tensor);

/* Adds a shard: a rectangle at `start` of a larger tensor of `shape`, both with tensor->ndim entries. The file names it
 * by its rectangle, "layer1.weight[0:64,0:128]", and tch_checkpoint_read_shard finds it under `name`. Shards of one
 * name must not overlap, which saving an index and reading check. */
TCH_API tch_status tch_checkpoint_writer_add_shard(tch_checkpoint_writer *writer, const char *name,
                                                   const tch_tensor *tensor, const int64_t *shape,
                                                   const int64_t *start);

/* Settings, stored as text under a key; setting a key again replaces its value. Numbers round-trip exactly, including
 * infinities and NaN. The key "format" and keys beginning with "torchium." are reserved. */
TCH_API tch_status tch_checkpoint_writer_set_text(tch_checkpoint_writer *writer, const char *key, const char *value);
TCH_API tch_status tch_checkpoint_writer_set_number(tch_checkpoint_writer *writer, const char *key, double value);
TCH_API tch_status tch_checkpoint_writer_set_integer(tch_checkpoint_writer *writer, const char *key, int64_t value);

/* Whether saves write checksums: 1, the default, or 0. They cost a few percent of the time of a save, and in the header
 * about 30 bytes and the name per tensor. */
TCH_API tch_status tch_checkpoint_writer_set_checksums(tch_checkpoint_writer *writer, int32_t checksums);

/* Writes the file, each tensor row-major without gaps. `context` is on the tensors' device; NULL if all are in host
 * memory. The call waits for work queued on its stream. Tensors that cannot be written in place are copied through
 * 16 MiB of host memory. They must not change during the call, or their checksums are wrong.
 *
 * The bytes are written to a temporary file ".torchium-*.part" in the folder of `path` and synced to disk before it is
 * renamed to `path`. If the call fails it is removed, and `path` is unchanged. A killed process leaves it behind; a
 * later save into the folder by the same user removes it once it is an hour old. A symbolic link at `path` is replaced,
 * not followed.
 *
 * The same writer can save again, to the same path or another. */
TCH_API tch_status tch_checkpoint_writer_save(tch_checkpoint_writer *writer, tch_context *context, const char *path);

/* Writes one checkpoint of all ranks of a group, a collective: every rank passes its own writer and the same `path`,
 * which ends in ".index.json" and is in a folder that all can access. `context` is the one the group is used with. The
 * files are next to the index, "model-NUMBER-00001-of-00004.safetensors" with a new NUMBER for each save. A tensor that
 * several ranks add is read from the first one's file. `comm` NULL: one process, one file.
 *
 * The index is renamed to `path` after every file is on disk. If one rank fails all fail, the new files are removed,
 * and the old index and its files stay; on success the first rank removes the files of the replaced index, whose
 * permissions the new ones get. Several processes or groups may save to one path: the last to finish wins, whole. While
 * it replaces the index the first rank holds a lock on ".INDEX.lock" next to it, for which others wait up to two
 * seconds; without the lock, files of the replaced save may be left behind. */
TCH_API tch_status tch_checkpoint_writer_save_sharded(tch_checkpoint_writer *writer, tch_context *context,
                                                      tch_comm *comm, const char *path);

/* --- reading ---------------------------------------------------------------------------------------------------- */

/* Opens any safetensors file, or, if the path ends in ".index.json", the files of an index, which are in its folder.
 * Files of an index stay open, so that a later save cannot remove them from a reader, up to half of the process's
 * descriptors; the others are opened for each read, which fails if they were removed or replaced. A setting is that of
 * the first file that has it.
 *
 * TCH_ERR_IO, with the cause and position, for a file that cannot be read, violates the format, has a form of a later
 * version of Torchium, or whose header has a wrong checksum. Files without checksums are accepted: see
 * tch_checkpoint_has_checksums. */
TCH_API tch_status tch_checkpoint_open(const char *path, tch_checkpoint **checkpoint);

/* Invalidates views of the checkpoint's tensors. NULL is allowed. */
TCH_API void tch_checkpoint_close(tch_checkpoint *checkpoint);

/* Reads a tensor into `out`, which has the shape and type of the file's (nothing is converted) and any layout, in host
 * memory or on the device of `context`, NULL for host memory. If the read fails midway, part of `out` has been written.
 * TCH_ERR_IO for a wrong checksum; `out` then holds the bytes of the file. */
TCH_API tch_status tch_checkpoint_read(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                                       tch_tensor *out);

/* Reads the rectangle at `start` of a tensor of `shape`, both with out->ndim entries, that the file has whole or in
 * shards of any other partition; the file's tensor may have dimensions merged that `shape` has separate. A rectangle of
 * several shards is assembled in host memory after their checksums have been verified: if one is wrong, `out` is not
 * written. Shards that overlap in the rectangle are an error. */
TCH_API tch_status tch_checkpoint_read_shard(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                                             const int64_t *shape, const int64_t *start, tch_tensor *out);

/* Whether tch_checkpoint_read_shard would find all of the rectangle with this shape and type. Reads no elements; of
 * `out` only the description is used. */
TCH_API tch_status tch_checkpoint_check_shard(const tch_checkpoint *checkpoint, const char *name, const int64_t *shape,
                                              const int64_t *start, const tch_tensor *out);

/* A setting as text; NULL if the file has no such key. */
TCH_API const char *tch_checkpoint_text(const tch_checkpoint *checkpoint, const char *key);

/* A setting as a number. TCH_ERR_INVALID_ARGUMENT if the file has no such key, TCH_ERR_IO if its text is not a number
 * or not a 64-bit integer. */
TCH_API tch_status tch_checkpoint_number(const tch_checkpoint *checkpoint, const char *key, double *value);
TCH_API tch_status tch_checkpoint_integer(const tch_checkpoint *checkpoint, const char *key, int64_t *value);

/* --- queries and zero-copy views -------------------------------------------------------------------------------- */

/* Number of tensors, which are indexed in the order of the file. */
TCH_API int64_t tch_checkpoint_count(const tch_checkpoint *checkpoint);

/* The index of the tensor of this name, or -1. */
TCH_API int64_t tch_checkpoint_find(const tch_checkpoint *checkpoint, const char *name);

/* The name of tensor `index`, or NULL. */
TCH_API const char *tch_checkpoint_name(const tch_checkpoint *checkpoint, int64_t index);

TCH_API tch_status tch_checkpoint_get_info(const tch_checkpoint *checkpoint, int64_t index, tch_checkpoint_info *info);

/* Number of settings, without checksums, and the key of setting `index`, or NULL. */
TCH_API int64_t tch_checkpoint_key_count(const tch_checkpoint *checkpoint);
TCH_API const char *tch_checkpoint_key(const tch_checkpoint *checkpoint, int64_t index);

/* 1 if the header and every tensor have a checksum, else 0. */
TCH_API int32_t tch_checkpoint_has_checksums(const tch_checkpoint *checkpoint);

/* Verifies the checksum of a tensor, or of all if `name` is NULL. TCH_ERR_IO names the first mismatch. Tensors without
 * a checksum pass. */
TCH_API tch_status tch_checkpoint_verify(const tch_checkpoint *checkpoint, const char *name);

/* A read-only memory-mapped view of a tensor in the file, valid until the checkpoint is closed: an input for
 * tch_tensor_copy, for example. TCH_ERR_LAYOUT if the file does not align it; files of tch_checkpoint_writer_save do.
 * The first view of a tensor verifies its checksum, which reads all of it; TCH_ERR_IO on a mismatch.
 *
 * Access to a part of the file that was truncated meanwhile raises SIGBUS, as for any mapping. A save never truncates:
 * open readers keep the replaced file. If other programs may write to the file, use tch_checkpoint_read. */
TCH_API tch_status tch_checkpoint_view(const tch_checkpoint *checkpoint, const char *name, tch_tensor *view);

TCH_END_DECLS

#endif
