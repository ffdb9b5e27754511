/* Setting a kernel of the user's, and saying what became of it. A new one is made beside the one there is, and takes
 * its place when nothing can fail any more. */
#include "user_kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"

#include "method.h"

/* --- findings ---------------------------------------------------------------------------------------------------- */

/* The first reason stays. A compiler's words end in a new line, a reason does not. */
void tchi_user_kernel_explain(tchi_user_kernel *own, const char *reason)
{
    if (own->reason[0] != '\0') {
        return;
    }
    snprintf(own->reason, sizeof own->reason, "%s", reason);
    size_t length = strlen(own->reason);
    while (length > 0 && own->reason[length - 1] == '\n') {
        own->reason[--length] = '\0';
    }
}

/* A kernel that stops (an assertion, a trap) is a finding where the device goes on; after it a GPU does not. */
bool tchi_user_kernel_finds(const tch_optimizer *optimizer, tchi_user_kernel *own, tch_status status)
{
    const tch_context *context = optimizer->context;
    bool stopped = status == TCH_ERR_BACKEND && context->backend->host_memory;
    if (status != TCH_ERR_INVALID_ARGUMENT && status != TCH_ERR_UNAVAILABLE && status != TCH_ERR_UNSUPPORTED &&
        status != TCH_ERR_NUMERIC && !stopped) {
        return false;
    }
    tchi_user_kernel_explain(own, tch_last_error());
    return true;
}

/* --- what is asked for ------------------------------------------------------------------------------------------- */

static tch_status check_part(const tch_optimizer *o, const char *function, tch_optim_part part)
{
    if (o == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: optimizer is NULL", function);
    }
    if (part != TCH_OPTIM_PART_ROOT && part != TCH_OPTIM_PART_UPDATE) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: part is %d, expected one of tch_optim_part", function,
                         (int)part);
    }
    bool has_roots = o->method->blocks != NULL && o->method->blocks->root != NULL;
    if (part == TCH_OPTIM_PART_ROOT && !has_roots) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: part is ROOT, which %s does not have; Shampoo has", function,
                         o->method->name);
    }
    return TCH_OK;
}

static tch_status check_asked(const char *function, tch_optim_part part, const tch_optim_kernel *asked)
{
    if (asked->struct_size != sizeof *asked) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: kernel must point to a struct set to TCH_OPTIM_KERNEL_INIT",
                         function);
    }
    if (!isfinite(asked->tolerance) || asked->tolerance < 0.0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: tolerance is %g, expected a finite number, 0 or more", function,
                         asked->tolerance);
    }
    if (part == TCH_OPTIM_PART_ROOT &&
        (asked->most_size < 0 || asked->threads < 0 || asked->threads > 1024 || asked->shared_bytes < 0)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: most_size is %lld, threads %d and shared_bytes %lld, expected none below 0 and at most "
                         "1024 threads",
                         function, (long long)asked->most_size, asked->threads, (long long)asked->shared_bytes);
    }
    if (part == TCH_OPTIM_PART_UPDATE && (asked->most_size != 0 || asked->threads != 0 || asked->shared_bytes != 0)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: most_size is %lld, threads %d and shared_bytes %lld, expected 0: they are for roots",
                         function, (long long)asked->most_size, asked->threads, (long long)asked->shared_bytes);
    }
    return TCH_OK;
}

/* --- replacing --------------------------------------------------------------------------------------------------- */

void tchi_user_kernel_release(tchi_user_kernel *own)
{
    tch_kernel_destroy(own->kernel[0]);
    tch_kernel_destroy(own->kernel[1]);
    *own = (tchi_user_kernel){0};
}

static void replace(tch_optimizer *o, tch_optim_part part, const tchi_user_kernel *made)
{
    tchi_user_kernel_release(&o->own[part]);
    o->own[part] = *made;
    o->own[part].launches = 0; /* those of the check */
}

/* `passed` is NULL for none. The workspace will have to hold the kernel's scratch too. */
static void set_factor_batches(tch_optimizer *o, const bool *passed)
{
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        f->own_root = passed != NULL && passed[i];
        memset(f->own, TCHI_USER_KERNEL_NEVER, (size_t)f->count);
        int64_t need = f->own_root ? tchi_user_kernel_root_bytes(o, f) / 4 * 5 : 0;
        o->least_workspace = need > o->least_workspace ? need : o->least_workspace;
    }
}

static tch_status set_root(const tchi_user_kernel_request *request, tchi_user_kernel *made)
{
    tch_optimizer *o = request->optimizer;
    size_t bytes = (size_t)o->factor_batches.count * sizeof(bool);
    bool *passed = NULL;
    TCHI_TRY(tchi_host_take(bytes, "what a kernel has passed", &passed));
    tch_status status = tchi_user_kernel_root_make(request, made, passed);
    if (status == TCH_OK) {
        replace(o, TCH_OPTIM_PART_ROOT, made);
        set_factor_batches(o, passed);
    }
    tchi_host_release(passed, bytes);
    return status;
}

static tch_status set_update(const tchi_user_kernel_request *request, tchi_user_kernel *made)
{
    TCHI_TRY(tchi_user_kernel_update_make(request, made));
    replace(request->optimizer, TCH_OPTIM_PART_UPDATE, made);
    return TCH_OK;
}

static tch_status set(tch_optimizer *o, tch_optim_part part, const tch_optim_kernel *asked)
{
    tchi_kernel_input input;
    tchi_user_kernel made = {.groups = (int32_t)o->groups.count,
                             .threads = asked->threads,
                             .shared_bytes = asked->shared_bytes,
                             .most_size = asked->most_size,
                             .tolerance = asked->tolerance};
    tchi_user_kernel_request request = {o, asked, &input};
    tch_status status = tchi_kernel_input_make(&input, asked->kernel);
    if (status == TCH_OK) {
        status = part == TCH_OPTIM_PART_ROOT ? set_root(&request, &made) : set_update(&request, &made);
    }
    tchi_kernel_input_release(&input);
    if (status != TCH_OK) {
        tchi_user_kernel_release(&made);
    }
    return status;
}

/* --- the public calls -------------------------------------------------------------------------------------------- */

tch_status tch_optimizer_set_kernel(tch_optimizer *optimizer, tch_optim_part part, const tch_optim_kernel *kernel)
{
    static const char function[] = "tch_optimizer_set_kernel";
    TCHI_TRY(check_part(optimizer, function, part));
    TCHI_ENTER(optimizer->context, function);
    if (kernel == NULL) {
        tchi_user_kernel_release(&optimizer->own[part]);
        if (part == TCH_OPTIM_PART_ROOT) {
            set_factor_batches(optimizer, NULL);
        }
        return TCH_OK;
    }
    TCHI_TRY(check_asked(function, part, kernel));
    return set(optimizer, part, kernel);
}

tch_status tch_optimizer_get_kernel(const tch_optimizer *optimizer, tch_optim_part part, tch_optim_kernel_info *info)
{
    static const char function[] = "tch_optimizer_get_kernel";
    TCHI_TRY(check_part(optimizer, function, part));
    if (info == NULL || info->struct_size != sizeof *info) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: info must point to a struct set to TCH_OPTIM_KERNEL_INFO_INIT",
                         function);
    }
    const tchi_user_kernel *own = &optimizer->own[part];
    *info = (tch_optim_kernel_info){
        sizeof *info, tchi_user_kernel_in_use(own), own->reason, own->served, own->left, own->launches, own->refused,
        own->worst};
    return TCH_OK;
}
