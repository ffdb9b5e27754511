/* Contexts: one device, one stream, one memory pool and one workspace.
 *
 * Contexts are independent of each other: two threads may use two contexts at once. One context is used by one thread
 * at a time.
 *
 * On the CPU a call returns when it is done. On a GPU it returns when its work is queued on the context's stream, in
 * the order of the calls; calls that synchronize say so, and tch_context_synchronize waits
 * for all. */
#ifndef TORCHIUM_CONTEXT_H
#define TORCHIUM_CONTEXT_H

#include <torchium/device.h>
#include <torchium/export.h>
#include <torchium/status.h>

typedef struct tch_context tch_context;

TCH_BEGIN_DECLS

/* `device` is "auto", "cpu", "cuda" or "cuda:N". "auto" is the best usable device, the CPU if there is no other; "cuda"
 * is the first GPU. N is CUDA's index, subject to CUDA_VISIBLE_DEVICES. No call changes the thread's current CUDA
 * device. */
TCH_API tch_status tch_context_create(const char *device, tch_context **context);

/* Waits for the context's stream and frees the context. Tensors made by it stay valid until destroyed. NULL is
 * allowed. */
TCH_API void tch_context_destroy(tch_context *context);

TCH_API tch_device tch_context_device(const tch_context *context);

/* Later calls run on the caller's stream, a cudaStream_t of the context's device; NULL is the device's default stream.
 * Before the first such call the context uses a private stream. On the CPU only NULL is accepted.
 *
 * Work on the new stream is ordered after earlier work of the context, without synchronizing the host, unless one of
 * the streams is being captured. Memory is freed in the order of the stream, so it must outlive the context and its
 * tensors: set another one before you destroy it. */
TCH_API tch_status tch_context_set_stream(tch_context *context, void *stream);
TCH_API void *tch_context_get_stream(const tch_context *context);

/* Waits for all work of this context and returns asynchronous errors. Not allowed while its stream is captured. */
TCH_API tch_status tch_context_synchronize(tch_context *context);

/* Limit, in bytes, on the scratch memory of a call; 0 (the default): none. Batched functions process the batch in
 * chunks to stay below it. A call that needs more for a single matrix fails, and the message has the size it needs. */
TCH_API tch_status tch_context_set_workspace_limit(tch_context *context, int64_t bytes);
TCH_API int64_t tch_context_get_workspace_limit(const tch_context *context);

/* Profiler callbacks: `push` at the beginning and `pop` at the end of every public call on this context and of every
 * phase inside one, in pairs, on the calling thread. They must not use the context. NULL, NULL removes them. On a GPU
 * the same names are also NVTX ranges. */
TCH_API tch_status tch_context_set_range_hook(tch_context *context, void (*push)(void *user, const char *name),
                                              void (*pop)(void *user), void *user);

TCH_END_DECLS

#endif
