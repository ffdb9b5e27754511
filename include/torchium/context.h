/* Contexts: one device, one stream, one memory pool and one workspace.
 *
 * Contexts are independent of each other: two threads may use two contexts at once. One context is used by one thread
 * at a time.
 *
 * On the CPU a call returns when it is done. On a GPU it returns when its work is queued on the context's stream, in
 * the order of the calls; where a call waits for the device its comment says so, and tch_context_synchronize waits for
 * all. */
#ifndef TORCHIUM_CONTEXT_H
#define TORCHIUM_CONTEXT_H

#include <torchium/device.h>
#include <torchium/export.h>
#include <torchium/status.h>

typedef struct tch_context tch_context;

TCH_BEGIN_DECLS

/* `device` is "auto", "cpu", "cuda" or "cuda:N". "auto" takes the best device that works, the CPU if there is no other;
 * "cuda" is the first GPU. N is CUDA's own number, which CUDA_VISIBLE_DEVICES changes. The thread's current CUDA device
 * is left as it was, by this and by every other call. */
TCH_API tch_status tch_context_create(const char *device, tch_context **context);

/* Waits for the context's stream and frees the context. Tensors made by it stay valid until destroyed. NULL is
 * allowed. */
TCH_API void tch_context_destroy(tch_context *context);

TCH_API tch_device tch_context_device(const tch_context *context);

/* Makes later calls run on the caller's stream: a cudaStream_t of the context's device, not owned. NULL is the device's
 * default stream. Until the first such call the context has its own stream. The CPU has no streams: only NULL is
 * accepted there.
 *
 * What the new stream gets from now on runs after all that the context gave the old one, without a wait of the host;
 * not so while one of the two is being captured in a graph. The stream must outlive the context and every tensor made
 * by it, since memory is given back in its order: set another one before you destroy it. */
TCH_API tch_status tch_context_set_stream(tch_context *context, void *stream);
TCH_API void *tch_context_get_stream(const tch_context *context);

/* Waits until everything asked of this context is done, and reports an error that happened on the way. An error while a
 * graph is being captured from its stream. */
TCH_API tch_status tch_context_synchronize(tch_context *context);

/* Upper limit, in bytes, of the scratch memory a call may take; 0 (the default) means no limit but the memory there is.
 * Batched functions work through the batch in chunks to stay below it. A limit too small for a single matrix is an
 * error of the call that needs more, and the message says how much. */
TCH_API tch_status tch_context_set_workspace_limit(tch_context *context, int64_t bytes);
TCH_API int64_t tch_context_get_workspace_limit(const tch_context *context);

/* Names of what a call is doing, for a profiler of the caller's own: `push` at the beginning of every public call on
 * this context and of every phase inside one, `pop` at its end, always in pairs, on the thread that called. They run in
 * the middle of the call and must not use the context. Both or neither; NULL, NULL takes them away. On a GPU the same
 * names are NVTX ranges with or without them. */
TCH_API tch_status tch_context_set_range_hook(tch_context *context, void (*push)(void *user, const char *name),
                                              void (*pop)(void *user), void *user);

TCH_END_DECLS

#endif
