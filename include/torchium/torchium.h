/* Torchium: second-order optimization of neural networks, on GPUs and CPUs.
 *
 *     tch_context *ctx;
 *     tch_context_create("auto", &ctx);                       // the best device that works
 *     tch_inverse_root(ctx, &a, 4, NULL, &x, NULL, NULL);     // x = a^(-1/4)
 *     tch_context_destroy(ctx);
 *
 * Every call that can fail returns a tch_status, and tch_last_error() explains it. This header includes the others;
 * each can also be included alone. backend.h is for those who write a backend and is not included here. */
#ifndef TORCHIUM_TORCHIUM_H
#define TORCHIUM_TORCHIUM_H

#include <torchium/amp.h>
#include <torchium/checkpoint.h>
#include <torchium/context.h>
#include <torchium/device.h>
#include <torchium/grad.h>
#include <torchium/kernel.h>
#include <torchium/kfac.h>
#include <torchium/linalg.h>
#include <torchium/memory.h>
#include <torchium/network.h>
#include <torchium/optim.h>
#include <torchium/status.h>
#include <torchium/tensor.h>
#include <torchium/version.h>

#endif
