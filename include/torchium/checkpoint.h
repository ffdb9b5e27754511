/* Checkpoints: named tensors and settings in one file, or in one for each rank of a group.
 *
 * The file is a safetensors file, which any reader of that format opens (docs/checkpoints.md). Writing collects what
 * belongs in it, then saves all at once; reading opens a file, then takes out what is wanted:
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
 * Every tensor has a checksum in the file, a CRC-32C, and so has the header: a read gives
 * the bytes that were saved, or an error. It protects against accidents, not against deliberate changes.
 *
 * A save either happens or does not: whatever ends it, an error, a full disk or the end of the process, the path holds
 * the old file or the new one, whole. Files are untrusted: every name, shape and offset is checked before it
 * is used.
 *
 * Ranks that train one model save it together: each adds what it has to its own writer, rectangles of larger
 * tensors among it, and all call tch_checkpoint_writer_save_sharded. What they leave is a safetensors file of each rank
 * and an index, "model.safetensors.index.json" in the layout that sharded models have everywhere. It is opened by
 * tch_checkpoint_open as a file is, and any number of ranks reads from it, each what it needs:
 *
 *     tch_checkpoint_writer_add_shard(writer, "layer1.weight", &rows, shape, start);
 *     tch_checkpoint_writer_save_sharded(writer, context, comm, "model.safetensors.index.json");
 *
 *     tch_checkpoint_open("model.safetensors.index.json", &checkpoint);
 *     tch_checkpoint_read_shard(checkpoint, context, "layer1.weight", shape, other_start, &other_rows);
 *
 * A writer is used by one thread at a time. A checkpoint that is open never changes, and any number of threads may read
 * from it, each with its own context. Names, keys and text are UTF-8. */
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

/* What a file says of one of its tensors. Files by others may hold types and ranks that this library has no tensors of:
 * they are described here and cannot be read. The pointers are good until the checkpoint is closed. */
typedef struct tch_checkpoint_info {
    size_t struct_size;   /* set by TCH_CHECKPOINT_INFO_INIT */
    const char *name;     /* the tensor's */
    const char *type;     /* as the file spells it: "F32", "BF16", "F8_E4M3", ... */
    tch_dtype dtype;      /* the same in DLPack's numbers; tch_dtype_size() is 0 for one that cannot be read */
    int32_t ndim;         /* may be above TCH_MAX_RANK, and then the tensor cannot be read */
    const int64_t *shape; /* ndim sizes */
    int64_t bytes;        /* in the file */
    int32_t has_checksum; /* of those bytes: 0 where another program wrote it */
} tch_checkpoint_info;
#define TCH_CHECKPOINT_INFO_INIT                                                                                       \
    {                                                                                                                  \
        sizeof(tch_checkpoint_info), NULL, NULL, {0, 0, 0}, 0, NULL, 0, 0                                              \
    }

TCH_BEGIN_DECLS

/* --- writing ---------------------------------------------------------------------------------------------------- */

/* A writer with nothing in it. */
TCH_API tch_status tch_checkpoint_writer_create(tch_checkpoint_writer **writer);

/* NULL is allowed. */
TCH_API void tch_checkpoint_writer_destroy(tch_checkpoint_writer *writer);

/* Puts a tensor on the list, of any layout, in host memory or on a device. Name and description are copied; the
 * elements are read by each save, and their memory must stay until the last one. A name can be given once. */
TCH_API tch_status tch_checkpoint_writer_add(tch_checkpoint_writer *writer, const char *name, const tch_tensor *tensor);

/* The same for a rectangle of a larger tensor, which has `shape` and in which it begins at `start`, both with as many
 * numbers as `tensor` has dimensions. In the file it is called by its rectangle, "layer1.weight[0:64,0:128]", and
 * tch_checkpoint_read_shard finds it under `name`. Rectangles of one name do not overlap: saving an index and reading
 * them refuse those that do. */
TCH_API tch_status tch_checkpoint_writer_add_shard(tch_checkpoint_writer *writer, const char *name,
                                                   const tch_tensor *tensor, const int64_t *shape,
                                                   const int64_t *start);

/* Settings, kept as text under a key. A key that was set before gets the new value. Numbers are written so that they
 * read back exactly, infinities and NaN too. The key "format" and those that begin with "torchium." are the library's
 * own. */
TCH_API tch_status tch_checkpoint_writer_set_text(tch_checkpoint_writer *writer, const char *key, const char *value);
TCH_API tch_status tch_checkpoint_writer_set_number(tch_checkpoint_writer *writer, const char *key, double value);
TCH_API tch_status tch_checkpoint_writer_set_integer(tch_checkpoint_writer *writer, const char *key, int64_t value);

/* Whether saves write checksums: 1, as they do unless told, or 0. They cost a save a few percent of its time, and the
 * header about 30 bytes and the name of each tensor. */
TCH_API tch_status tch_checkpoint_writer_set_checksums(tch_checkpoint_writer *writer, int32_t checksums);

/* Writes the file, each tensor row-major without gaps. `context` is of the device the tensors are on; it may be NULL
 * when all are in host memory. Their values are those after the work already queued on its stream; the call waits for
 * it. Tensors that cannot be written in place pass through 16 MiB of host memory. They must not change during the
 * call: their checksum would not be that of the bytes written.
 *
 * The bytes go to a temporary file ".torchium-*.part" in the folder of `path`, and reach the disk before that file
 * takes the name `path`. When the call fails it is removed and `path` is as it was. A process killed on the way leaves
 * it behind; a save into the folder by the same user removes it once it is an hour old. A symbolic link at `path` is
 * replaced, not followed.
 *
 * The same writer can save again, to the same path or another. */
TCH_API tch_status tch_checkpoint_writer_save(tch_checkpoint_writer *writer, tch_context *context, const char *path);

/* Writes one checkpoint of all ranks of a group: every rank calls it, with its own writer and the same `path`, which
 * ends in ".index.json" and is in a folder that all of them see. The context is the one that the group is used with.
 * The files are next to the index, "model-NUMBER-00001-of-00004.safetensors": NUMBER is another at each save. A tensor
 * that several ranks add under one name is read from the first one's file. `comm` NULL: one process, one file.
 *
 * The index takes its name when every file is on the disk. When the call fails on one rank it fails on all, the files
 * are removed, and the old index stands with its own; when it succeeds, the first rank removes the files that the
 * replaced index named, and no others. The files have the permissions of those. Several processes or groups may save to
 * one path at once: the last one to finish stays, whole. For the moment in which the index is replaced the first rank
 * holds a lock on ".INDEX.lock" next to it, and waits up to two seconds for others; without it, files of the save that
 * was replaced may be left behind. */
TCH_API tch_status tch_checkpoint_writer_save_sharded(tch_checkpoint_writer *writer, tch_context *context,
                                                      tch_comm *comm, const char *path);

/* --- reading ---------------------------------------------------------------------------------------------------- */

/* Opens a safetensors file of whatever origin, or the files of an index where the path ends in ".index.json": they lie
 * in its folder. An index may have more files than the process has descriptors: half of these hold files open, so that
 * a later save takes nothing away from the reader, and the other files are opened for each read, which fails when they
 * were removed or replaced. A setting that several of them have is the first one's.
 *
 * TCH_ERR_IO, with what is wrong and where, for one that cannot be read, breaks a rule of the format, was written by a
 * later version of Torchium in a form this one does not know, or whose header is not what its checksum says. A file
 * without checksums, of another program or an older version, opens all the same: ask tch_checkpoint_has_checksums. */
TCH_API tch_status tch_checkpoint_open(const char *path, tch_checkpoint **checkpoint);

/* Views of the checkpoint's tensors end here. NULL is allowed. */
TCH_API void tch_checkpoint_close(tch_checkpoint *checkpoint);

/* Copies a tensor into `out`, which has the shape and element type of the file's: nothing is converted. Any layout, in
 * host memory or on the device of `context`, which may be NULL for host memory. When reading fails midway, because the
 * disk did or because the file was cut short, part of `out` has been written. The bytes are compared with their
 * checksum, where there is one: TCH_ERR_IO when they differ, and then `out` holds what the file does. */
TCH_API tch_status tch_checkpoint_read(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                                       tch_tensor *out);

/* The same for a rectangle of a tensor that is there in shards, or whole: `out` begins at `start` of a tensor of
 * `shape`, both with as many numbers as `out` has dimensions. The shards may be cut in another way, and the file's
 * tensor may have dimensions merged that `shape` has apart. What is not one shard is put together in host memory, after
 * the checksums of all its shards were compared: when one differs, nothing of `out` has been written. Shards that
 * overlap inside of it are refused. */
TCH_API tch_status tch_checkpoint_read_shard(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                                             const int64_t *shape, const int64_t *start, tch_tensor *out);

/* Whether that would find all of it, of this shape and type, for those who ask before they write anything. Reads no
 * element; of `out` only the description is looked at. */
TCH_API tch_status tch_checkpoint_check_shard(const tch_checkpoint *checkpoint, const char *name, const int64_t *shape,
                                              const int64_t *start, const tch_tensor *out);

/* A setting as text, or NULL when the file has none of this key. */
TCH_API const char *tch_checkpoint_text(const tch_checkpoint *checkpoint, const char *key);

/* The same as a number. TCH_ERR_INVALID_ARGUMENT when the file has no such key, TCH_ERR_IO when its text is no number
 * or, for an integer, not one of 64 bits. */
TCH_API tch_status tch_checkpoint_number(const tch_checkpoint *checkpoint, const char *key, double *value);
TCH_API tch_status tch_checkpoint_integer(const tch_checkpoint *checkpoint, const char *key, int64_t *value);

/* --- questions, and tensors without a copy ---------------------------------------------------------------------- */

/* How many tensors the file has. They are numbered as they follow each other in it. */
TCH_API int64_t tch_checkpoint_count(const tch_checkpoint *checkpoint);

/* The number of the tensor of this name, or -1. */
TCH_API int64_t tch_checkpoint_find(const tch_checkpoint *checkpoint, const char *name);

/* The name of tensor `index`, or NULL when there is none. */
TCH_API const char *tch_checkpoint_name(const tch_checkpoint *checkpoint, int64_t index);

TCH_API tch_status tch_checkpoint_get_info(const tch_checkpoint *checkpoint, int64_t index, tch_checkpoint_info *info);

/* How many settings it has, and the key of setting `index`, or NULL when there is none. Checksums are none. */
TCH_API int64_t tch_checkpoint_key_count(const tch_checkpoint *checkpoint);
TCH_API const char *tch_checkpoint_key(const tch_checkpoint *checkpoint, int64_t index);

/* 1 when the header and every tensor have a checksum, so that whatever is read is checked; else 0. */
TCH_API int32_t tch_checkpoint_has_checksums(const tch_checkpoint *checkpoint);

/* Reads a tensor, or all of them where `name` is NULL, only to compare it with its checksum. TCH_ERR_IO names the first
 * that differs. Those without a checksum pass. */
TCH_API tch_status tch_checkpoint_verify(const tch_checkpoint *checkpoint, const char *name);

/* A tensor as it lies in the file, mapped into memory and read-only: an input for others, such as tch_tensor_copy. The
 * view ends with the checkpoint. TCH_ERR_LAYOUT when the file does not align it; files of tch_checkpoint_writer_save
 * always do. The first view of a tensor reads all of it to compare it with its checksum, if it has one, and is
 * TCH_ERR_IO when they differ; later ones read nothing.
 *
 * A file that is cut short while it is mapped ends the process that looks at the missing part (SIGBUS), as with every
 * mapping. A save never does this to a reader: the file it replaces stays whole for those who have it open. Where
 * others may write to the file, use tch_checkpoint_read. */
TCH_API tch_status tch_checkpoint_view(const tch_checkpoint *checkpoint, const char *name, tch_tensor *view);

TCH_END_DECLS

#endif
