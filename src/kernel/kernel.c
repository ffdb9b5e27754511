/* Kernel objects: compilation or cache lookup, queries, destruction. input.c validates the config before a compiler
 * starts. */
#include "kernel.h"

#include <string.h>

#include "cache.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/context.h"
#include "core/list.h"
#include "core/status.h"
#include "input.h"

#define COMPILER_SIZE 512
#define LOG_SIZE ((size_t)64 << 10) /* where the caller gives none, or a smaller one */
#define MESSAGE_MOST 1500           /* of a log, in the message of a failure */

/* Start of the excerpt if a log exceeds a message: the line of the first error, since warnings may fill the rest. */
static const char *first_error(const char *log)
{
    const char *at = strlen(log) > MESSAGE_MOST ? strstr(log, "error") : NULL;
    while (at != NULL && at > log && at[-1] != '\n') {
        at--;
    }
    return at != NULL ? at : log;
}

/* Puts the compiler's messages, if any, first. */
static tch_status explain_failure(tch_status status, const tch_kernel_text *text, const char *log)
{
    if (status != TCH_ERR_INVALID_ARGUMENT || log[0] == '\0') {
        return status;
    }
    return tchi_fail(status, "tch_kernel_compile: kernel %.200s in %.200s does not compile:\n%s", text->name,
                     text->file, first_error(log));
}

static tch_status build_image(tch_context *context, const tch_kernel_config *config, const tch_kernel_text *text,
                              tch_kernel_image *image)
{
    bool local = config->log_size < LOG_SIZE;
    size_t size = local ? LOG_SIZE : config->log_size;
    char *log = config->log;
    if (local) {
        TCHI_TRY(tchi_host_take(size, "a compiler's messages", &log));
    }
    log[0] = '\0';
    tch_status status = context->backend->kernel->build(context->state, text, image, log, size);
    status = explain_failure(status, text, log);
    if (local) {
        size_t used = config->log_size > 0 ? strnlen(log, config->log_size - 1) : 0;
        if (config->log != NULL) {
            memcpy(config->log, log, used);
            config->log[used] = '\0';
        }
        tchi_host_release(log, size);
    }
    return status;
}

static void release_image(tch_kernel_image *image)
{
    if (image->data != NULL) {
        tchi_host_release(image->data, image->bytes);
    }
    *image = (tch_kernel_image){0};
}

static tch_status load_image(tch_kernel *kernel, const tch_kernel_image *image)
{
    kernel->info = (tch_kernel_info)TCH_KERNEL_INFO_INIT;
    return kernel->context->backend->kernel->load(kernel->context->state, image, &kernel->handle, &kernel->info,
                                                  TCHI_PARAMETERS_MOST, kernel->parameters);
}

static tch_status load_cached(tch_kernel *kernel, const tchi_cache_key *key)
{
    tch_kernel_image image = {0};
    kernel->handle = NULL;
    if (!key->usable || !tchi_cache_find(key, &image)) {
        return TCH_OK;
    }
    tch_status status = load_image(kernel, &image);
    release_image(&image);
    if (status == TCH_ERR_IO) {
        kernel->handle = NULL;
        tchi_cache_remove(key);
        return TCH_OK;
    }
    return status;
}

/* Cached only after it loads, so that no entry fails on the machine that made it. */
static tch_status load_new(tch_kernel *kernel, const tch_kernel_config *config, const tch_kernel_text *text,
                           const tchi_cache_key *key)
{
    tch_kernel_image image = {0};
    tch_status status = build_image(kernel->context, config, text, &image);
    if (status == TCH_OK) {
        status = load_image(kernel, &image);
    }
    if (status == TCH_OK && key->usable) {
        tchi_cache_keep(key, &image);
    }
    release_image(&image);
    return status;
}

/* The compiler is identified before the cache lookup: it is part of the key, and a missing compiler is reported in one
 * way. A text that reads no files is compiled without include folders: a header there that shadows a system header
 * would change the image but not the key. */
static tch_status load_kernel(tch_kernel *kernel, const tch_kernel_config *config, const tchi_kernel_input *input)
{
    const tch_context *context = kernel->context;
    char compiler[COMPILER_SIZE] = "";
    tch_kernel_text text = input->text;
    tchi_cache_key key = {0};
    TCHI_TRY(context->backend->kernel->compiler(context->state, compiler, sizeof compiler));
    if (!tchi_kernel_reads_files(&text)) {
        text.include_count = 0;
        if (config->use_cache) {
            key = tchi_cache_key_make(&text, compiler);
        }
    }
    TCHI_TRY(load_cached(kernel, &key));
    kernel->info.from_cache = kernel->handle != NULL;
    return kernel->handle != NULL ? TCH_OK : load_new(kernel, config, &text, &key);
}

static tch_status check_parameters(const tch_kernel *kernel)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < kernel->info.parameters && i < TCHI_PARAMETERS_MOST; i++) {
        bytes += kernel->parameters[i].size;
    }
    if (kernel->info.parameters > TCHI_PARAMETERS_MOST || bytes > TCHI_PARAMETER_BYTES_MOST) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: kernel %.200s has %d parameters of %lld bytes, expected at most %d of %d",
                         kernel->name, kernel->info.parameters, (long long)bytes, TCHI_PARAMETERS_MOST,
                         TCHI_PARAMETER_BYTES_MOST);
    }
    return TCH_OK;
}

static tch_status fill_kernel(tch_context *context, const tch_kernel_config *config, const tchi_kernel_input *input,
                              tch_kernel *kernel)
{
    kernel->context = context;
    memcpy(kernel->name, config->name, strlen(config->name) + 1);
    TCHI_TRY(load_kernel(kernel, config, input));
    tch_status status = check_parameters(kernel);
    if (status != TCH_OK) {
        context->backend->kernel->unload(context->state, kernel->handle);
    }
    return status;
}

static tch_status create_kernel(tch_context *context, const tch_kernel_config *config, const tchi_kernel_input *input,
                                tch_kernel **kernel)
{
    size_t bytes = sizeof **kernel + strlen(config->name) + 1;
    if (config->log != NULL) {
        config->log[0] = '\0';
    }
    TCHI_TRY(tchi_host_take(bytes, "a kernel", kernel));
    (*kernel)->bytes = bytes;
    tch_status status = fill_kernel(context, config, input, *kernel);
    if (status != TCH_OK) {
        tchi_host_release(*kernel, bytes);
        *kernel = NULL;
    }
    return status;
}

tch_status tch_kernel_compile(tch_context *context, const tch_kernel_config *config, tch_kernel **kernel)
{
    tchi_kernel_input input;
    TCHI_ENTER_FOR(context, "tch_kernel_compile", kernel);
    if (kernel == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_compile: kernel is NULL");
    }
    *kernel = NULL;
    tch_status status = tchi_kernel_input_make(&input, config);
    if (status == TCH_OK) {
        status = create_kernel(context, config, &input, kernel);
    }
    tchi_kernel_input_release(&input);
    return status;
}

/* Releases memory even if the device has failed. */
void tch_kernel_destroy(tch_kernel *kernel)
{
    if (kernel == NULL) {
        return;
    }
    const tch_backend *backend = kernel->context->backend;
    void *state = kernel->context->state;
    bool begun = backend->device->begin(state) == TCH_OK;
    (void)backend->device->synchronize(state);
    backend->kernel->unload(state, kernel->handle);
    if (begun && backend->device->end != NULL) {
        backend->device->end(state);
    }
    tchi_host_release(kernel, kernel->bytes);
}

tch_status tch_kernel_get_info(const tch_kernel *kernel, tch_kernel_info *info)
{
    if (kernel == NULL || info == NULL || info->struct_size != sizeof *info) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_get_info: %s, expected a kernel and info set to TCH_KERNEL_INFO_INIT",
                         kernel == NULL ? "kernel is NULL" : "info is NULL or of another size");
    }
    *info = kernel->info;
    return TCH_OK;
}

tch_status tch_kernel_get_parameter(const tch_kernel *kernel, int32_t index, tch_kernel_parameter *parameter)
{
    if (kernel == NULL || parameter == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_get_parameter: %s is NULL",
                         kernel == NULL ? "kernel" : "parameter");
    }
    if (index < 0 || index >= kernel->info.parameters) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_get_parameter: index is %d, expected 0 to %d: kernel %.200s has %d parameters",
                         index, kernel->info.parameters - 1, kernel->name, kernel->info.parameters);
    }
    *parameter = kernel->parameters[index];
    return TCH_OK;
}

const char *tch_kernel_name(const tch_kernel *kernel)
{
    return kernel != NULL ? kernel->name : NULL;
}
