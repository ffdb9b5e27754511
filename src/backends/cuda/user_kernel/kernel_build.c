/* Compiles a custom kernel with NVRTC. The source is placed between a prelude, with what NVRTC lacks, and a text that
 * exports the kernel's parameters; #line directives keep the user's file and lines in messages. NVRTC needs no GPU. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "backends/cuda/cuda.h"
#include "backends/host_memory.h"
#include "core/sha256.h"
#include "kernel/macros.h"
#include "kernel/prelude.h"
#include "kernel_text.h"

#define TRY(call, what) TCHI_TRY(check_nvrtc(nvrtc, (call), (what)))

static tch_status check_nvrtc(const tchi_nvrtc *nvrtc, tchi_nvrtc_status status, const char *what)
{
    if (status == TCHI_NVRTC_SUCCESS) {
        return TCH_OK;
    }
    return tchi_cuda_host->fail(status == TCHI_NVRTC_OUT_OF_MEMORY ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_BACKEND,
                                "%s: NVRTC says: %s", what, nvrtc->get_error_string(status));
}

/* File name in messages about the text after the source. */
#define NAME_TITLE "the kernel's name"

/* Prelude, option macros, file name, source, kernel name and signature text. A source may end without a newline, or in
 * a comment's backslash: the directive after it is on a separate line. The signature is in global memory: the kernel's
 * constants may fill constant memory. */
#define FRAME                                                                                                          \
    "%s%s#line 1 \"%s\"\n%s\n\n#line 1 \"" NAME_TITLE "\"\n#undef TCHI_KERNEL\n#define TCHI_KERNEL %s\n"               \
    "#define TCHI_EXPORT extern \"C\" __device__\n%s"

/* --- the compiler and the architecture --------------------------------------------------------------------------- */

static tch_status find_target(const tchi_cuda_state *s, const tchi_nvrtc *nvrtc, tchi_cuda_target *target)
{
    enum { ROOM = 64 }; /* NVRTC 13 knows about a dozen */
    int known[ROOM];
    int count = 0;
    TRY(nvrtc->get_num_supported_archs(&count), "nvrtcGetNumSupportedArchs");
    if (count > ROOM) {
        return tchi_cuda_host->fail(TCH_ERR_BACKEND, "NVRTC %d.%d knows %d architectures, expected no more than %d",
                                    nvrtc->major, nvrtc->minor, count, ROOM);
    }
    TRY(nvrtc->get_supported_archs(known), "nvrtcGetSupportedArchs");
    if (!tchi_cuda_choose_target(s->device.major, s->device.minor, count, known, target)) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE,
                                    "NVRTC %d.%d (%.300s) does not compile for cuda:%d, compute capability %d.%d, any "
                                    "more: install an older one, or give its file in TORCHIUM_NVRTC",
                                    nvrtc->major, nvrtc->minor, nvrtc->library, s->device.index, s->device.major,
                                    s->device.minor);
    }
    return TCH_OK;
}

/* From Hopper on an architecture has specific instructions that its successors lack (sm_90a). */
enum { FIRST_SPECIFIC = 90 };

int tchi_cuda_choose_target(int32_t major, int32_t minor, int32_t count, const int *known, tchi_cuda_target *target)
{
    int32_t gpu = 10 * major + minor;
    int32_t nearest = 0;
    for (int32_t i = 0; i < count; i++) {
        if (known[i] <= gpu && known[i] > nearest) {
            nearest = known[i];
        }
    }
    target->number = nearest;
    target->code = nearest == gpu ? TCHI_CUDA_CODE_CUBIN : TCHI_CUDA_CODE_PTX;
    target->specific = nearest == gpu && gpu >= FIRST_SPECIFIC;
    return nearest != 0;
}

/* Identifies a file by resolved name, size and time: NVRTC's version is only two numbers. */
static void add_file(tchi_sha256_state *hash, const char *file)
{
    struct stat status;
    int64_t facts[4] = {0, 0, 0, 0};
    char whole[PATH_MAX];
    if (realpath(file, whole) != NULL) {
        file = whole;
    }
    if (stat(file, &status) == 0) {
        facts[0] = (int64_t)status.st_size;
        facts[1] = (int64_t)status.st_mtim.tv_sec;
        facts[2] = (int64_t)status.st_mtim.tv_nsec;
        facts[3] = (int64_t)status.st_ino;
    }
    tchi_sha256_add(hash, file, strlen(file) + 1);
    tchi_sha256_add(hash, facts, sizeof facts);
}

/* Hashes everything besides the user's text that determines the result. */
static void hash_dependencies(const tchi_nvrtc_files *nvrtc, uint8_t digest[TCHI_SHA256_BYTES])
{
    tchi_sha256_state hash;
    char header[sizeof nvrtc->headers + 16];
    tchi_sha256_begin(&hash);
    tchi_sha256_add(&hash, TCHI_CUDA_IMAGE_MAGIC FRAME, sizeof TCHI_CUDA_IMAGE_MAGIC FRAME);
    tchi_sha256_add(&hash, tchi_cuda_kernel_prelude, strlen(tchi_cuda_kernel_prelude) + 1);
    tchi_sha256_add(&hash, tchi_prelude_signature, strlen(tchi_prelude_signature) + 1);
    for (int i = 0; i < TCHI_CUDA_HEADERS; i++) {
        tchi_sha256_add(&hash, tchi_cuda_header_texts[i], strlen(tchi_cuda_header_texts[i]) + 1);
    }
    snprintf(header, sizeof header, "%s/cuda_fp16.h", nvrtc->headers);
    add_file(&hash, nvrtc->library);
    add_file(&hash, header);
    tchi_sha256_end(&hash, digest);
}

/* Does not open NVRTC: the kernel may be cached. */
tch_status tchi_cuda_kernel_compiler(void *state, char *text, size_t size)
{
    const tchi_cuda_state *s = state;
    const char *why = "";
    uint8_t digest[TCHI_SHA256_BYTES];
    uint64_t mark = 0;
    const tchi_nvrtc_files *nvrtc = tchi_nvrtc_locate(&why);
    if (nvrtc == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE, "%s", why);
    }
    hash_dependencies(nvrtc, digest);
    for (int i = 0; i < 8; i++) {
        mark = mark << 8 | digest[i];
    }
    snprintf(text, size, "cuda, compute capability %d.%d, nvrtc (%016llx)", s->device.major, s->device.minor,
             (unsigned long long)mark);
    return TCH_OK;
}

/* --- the text ---------------------------------------------------------------------------------------------------- */

static int write_text(char *room, size_t size, const tch_kernel_text *text, const char *macros, const char *file)
{
    return snprintf(room, size, FRAME, tchi_cuda_kernel_prelude, macros, file, text->source, text->name,
                    tchi_prelude_signature);
}

static tch_status make_text(const tch_kernel_text *text, char **whole, size_t *bytes)
{
    size_t file_bytes = tchi_quoted_bytes(text->file);
    size_t parts = file_bytes + tchi_macro_bytes(text);
    char *file;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, parts, "the name of a kernel's file and its macros", &file));
    char *macros = file + file_bytes;
    tchi_quoted_write(text->file, file);
    tchi_macros_write(text, macros, parts - file_bytes);
    char none[1];
    int length = write_text(none, sizeof none, text, macros, file);
    *bytes = length > 0 ? (size_t)length + 1 : 0;
    tch_status status = tchi_backend_take(tchi_cuda_host, *bytes, "a kernel's source", whole);
    if (status == TCH_OK) {
        write_text(*whole, *bytes, text, macros, file);
    }
    tchi_cuda_host->release(file, parts);
    return status;
}

/* --- options ----------------------------------------------------------------------------------------------------- */

/* Options in one block: an array of pointers, then their texts. */
typedef struct option_list {
    const char **items;
    int count;
    char *next; /* remaining room */
    size_t left;
    size_t bytes; /* of the block */
} option_list;

static void add_option(option_list *list, const char *before, const char *value, const char *after)
{
    int length = snprintf(list->next, list->left, "%s%s%s", before, value, after);
    list->items[list->count++] = list->next;
    list->next += length + 1;
    list->left -= (size_t)length + 1;
}

/* NVRTC has no -O: the level is passed to ptxas. Macros precede the source, see macros.h. Other permitted options are
 * NVRTC's own. */
static void add_user_option(option_list *list, const char *option)
{
    if (strncmp(option, "-O", 2) == 0) {
        add_option(list, "-Xptxas=", option, "");
    } else if (!tchi_option_is_macro(option) || tchi_option_is_for_both(option)) {
        add_option(list, option, "", "");
    }
}

static size_t text_bytes(int32_t count, const char *const *texts)
{
    size_t bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        bytes += strlen(texts[i]) + 32; /* what is written before and after it */
    }
    return bytes;
}

static tch_status reserve_image(option_list *list, const tch_kernel_text *text, const tchi_nvrtc *nvrtc)
{
    size_t pointers = (size_t)(text->option_count + text->include_count + 8) * sizeof(char *);
    size_t texts = text_bytes(text->option_count, text->options) + text_bytes(text->include_count, text->includes) +
                   2 * sizeof nvrtc->headers + 256;
    list->bytes = pointers + texts;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, list->bytes, "a kernel's options", (void *)&list->items));
    list->count = 0;
    list->next = (char *)list->items + pointers;
    list->left = texts;
    return TCH_OK;
}

/* Line info includes file names, which NVRTC passes to ptxas unescaped: a quote would end the string. */
static int has_plain_names(const tch_kernel_text *text)
{
    int plain = strpbrk(text->file, "\"\\") == NULL;
    for (int32_t i = 0; i < text->include_count; i++) {
        plain = plain && strpbrk(text->includes[i], "\"\\") == NULL;
    }
    return plain;
}

/* The user's folders precede CUDA's. */
static tch_status make_options(option_list *list, const tch_kernel_text *text, const tchi_nvrtc *nvrtc,
                               const tchi_cuda_target *target)
{
    char architecture[48];
    TCHI_TRY(reserve_image(list, text, nvrtc));
    snprintf(architecture, sizeof architecture, "%s_%d%s", target->code == TCHI_CUDA_CODE_PTX ? "compute" : "sm",
             target->number, target->specific ? "a" : "");
    add_option(list, "--gpu-architecture=", architecture, "");
    if (has_plain_names(text)) {
        add_option(list, "--generate-line-info", "", "");
    }
    int has_standard = 0;
    for (int32_t i = 0; i < text->option_count; i++) {
        has_standard |= strncmp(text->options[i], "-std=", 5) == 0;
        add_user_option(list, text->options[i]);
    }
    if (!has_standard) {
        add_option(list, "-std=c++17", "", "");
    }
    for (int32_t i = 0; i < text->include_count; i++) {
        add_option(list, "--include-path=", text->includes[i], "");
    }
    if (nvrtc->headers[0] != '\0') {
        add_option(list, "--include-path=", nvrtc->headers, "");
        add_option(list, "--include-path=", nvrtc->headers, "/cccl");
    }
    return TCH_OK;
}

/* --- compiling --------------------------------------------------------------------------------------------------- */

/* For a missing CUDA header, adds where to get it. */
static void explain_headers(const tchi_nvrtc *nvrtc, char *log, size_t size)
{
    size_t used = strlen(log);
    if (nvrtc->headers[0] != '\0' || strstr(log, "open source file \"cuda") == NULL) {
        return;
    }
    snprintf(
        log + used, size - used,
        "CUDA's headers, such as cuda_fp16.h, were not found next to %.300s or in /usr/local/cuda/include: install "
        "them (pip install nvidia-cuda-runtime), or name the folder of a CUDA toolkit in TORCHIUM_CUDA_PATH.\n",
        nvrtc->library);
}

/* If the first error is after the source the kernel's name is wrong: replaces NVRTC's messages, which quote internal
 * texts, by its first sentence. */
static void explain_name(char *log, size_t size)
{
    char cause[512];
    const char *error = strstr(log, "error: ");
    if (error == NULL) {
        return;
    }
    const char *line = error;
    while (line > log && line[-1] != '\n') {
        line--;
    }
    if (strncmp(line, NAME_TITLE "(", strlen(NAME_TITLE "(")) != 0) {
        return;
    }
    error += strlen("error: ");
    snprintf(cause, sizeof cause, "%.*s", (int)strcspn(error, "\n"), error);
    int is_type = strstr(cause, "incomplete type") != NULL;
    snprintf(log, size,
             "the name is not that of one __global__ function%s%s; expected \"halve\", \"space::halve\", or of a "
             "template \"scale<float, 4>\", with all its arguments\n",
             is_type ? "" : ": ", is_type ? "" : cause);
}

/* NVRTC's log can only be read in full. */
static tch_status read_log(const tchi_nvrtc *nvrtc, tchi_nvrtc_handle program, char *log, size_t size)
{
    size_t bytes = 0;
    log[0] = '\0';
    TRY(nvrtc->get_program_log_size(program, &bytes), "nvrtcGetProgramLogSize");
    if (bytes <= 1) {
        return TCH_OK;
    }
    char *whole;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, bytes, "what NVRTC says", &whole));
    tch_status status = check_nvrtc(nvrtc, nvrtc->get_program_log(program, whole), "nvrtcGetProgramLog");
    if (status == TCH_OK) {
        snprintf(log, size, "%.*s", (int)(bytes < INT_MAX ? bytes : INT_MAX), whole);
    }
    tchi_cuda_host->release(whole, bytes);
    return status;
}

static tch_status compile_program(const tchi_nvrtc *nvrtc, tchi_nvrtc_handle program, const tch_kernel_text *text,
                                  const tchi_cuda_target *target, char *log, size_t log_size)
{
    option_list options = {NULL, 0, NULL, 0, 0};
    TRY(nvrtc->add_name_expression(program, text->name), "nvrtcAddNameExpression");
    TCHI_TRY(make_options(&options, text, nvrtc, target));
    tchi_nvrtc_status result = nvrtc->compile_program(program, options.count, options.items);
    tchi_cuda_host->release((void *)options.items, options.bytes);
    TCHI_TRY(read_log(nvrtc, program, log, log_size));
    if (result == TCHI_NVRTC_COMPILATION) {
        explain_headers(nvrtc, log, log_size);
        explain_name(log, log_size);
        return tchi_cuda_host->fail(TCH_ERR_INVALID_ARGUMENT, "the kernel %s does not compile:\n%s", text->name, log);
    }
    if (result != TCHI_NVRTC_SUCCESS) {
        return tchi_cuda_host->fail(result == TCHI_NVRTC_OUT_OF_MEMORY ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_BACKEND,
                                    "NVRTC %d.%d (%.300s) cannot compile: %s\n%s", nvrtc->major, nvrtc->minor,
                                    nvrtc->library, nvrtc->get_error_string(result), log);
    }
    return TCH_OK;
}

/* --- the image --------------------------------------------------------------------------------------------------- */

static tch_status measure_code(const tchi_nvrtc *nvrtc, tchi_nvrtc_handle program, tchi_cuda_image *header)
{
    size_t bytes = 0;
    if (header->code == TCHI_CUDA_CODE_PTX) {
        TRY(nvrtc->get_ptx_size(program, &bytes), "nvrtcGetPTXSize");
    } else {
        TRY(nvrtc->get_cubin_size(program, &bytes), "nvrtcGetCUBINSize");
    }
    uint32_t names = (uint32_t)sizeof *header + header->lowered_bytes + header->name_bytes;
    header->code_offset = (names + 15) / 16 * 16;
    header->code_bytes = bytes;
    return TCH_OK;
}

static tch_status make_image(const tchi_nvrtc *nvrtc, tchi_nvrtc_handle program, const char *name, tchi_cuda_code code,
                             tch_kernel_image *image)
{
    const char *lowered = NULL;
    tchi_cuda_image header = {.magic = TCHI_CUDA_IMAGE_MAGIC, .code = code};
    TRY(nvrtc->get_lowered_name(program, name, &lowered), "nvrtcGetLoweredName");
    header.lowered_bytes = (uint32_t)strlen(lowered) + 1;
    header.name_bytes = (uint32_t)strlen(name) + 1;
    TCHI_TRY(measure_code(nvrtc, program, &header));

    size_t bytes = header.code_offset + (size_t)header.code_bytes;
    char *data;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, bytes, "a compiled kernel", &data));
    memcpy(data, &header, sizeof header);
    memcpy(data + sizeof header, lowered, header.lowered_bytes);
    memcpy(data + sizeof header + header.lowered_bytes, name, header.name_bytes);
    char *place = data + header.code_offset;
    tch_status status = check_nvrtc(
        nvrtc, code == TCHI_CUDA_CODE_PTX ? nvrtc->get_ptx(program, place) : nvrtc->get_cubin(program, place),
        "taking the compiled kernel from NVRTC");
    if (status != TCH_OK) {
        tchi_cuda_host->release(data, bytes);
        return status;
    }
    image->data = data;
    image->bytes = bytes;
    return TCH_OK;
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

static tch_status build_image(const tchi_nvrtc *nvrtc, const tchi_cuda_target *target, const tch_kernel_text *text,
                              const char *whole, tch_kernel_image *image, char *log, size_t log_size)
{
    tchi_nvrtc_handle program = NULL;
    /* NVRTC would parse a name that begins with a dash as an option; the user's name is in the #line directive. */
    TRY(nvrtc->create_program(&program, whole, "kernel.cu", TCHI_CUDA_HEADERS, tchi_cuda_header_texts,
                              tchi_cuda_header_names),
        "nvrtcCreateProgram");
    tch_status status = compile_program(nvrtc, program, text, target, log, log_size);
    if (status == TCH_OK) {
        status = make_image(nvrtc, program, text->name, target->code, image);
    }
    nvrtc->destroy_program(&program);
    return status;
}

tch_status tchi_cuda_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                  size_t log_size)
{
    const char *why = "";
    const tchi_nvrtc *nvrtc = tchi_nvrtc_open(&why);
    tchi_cuda_target target = {0};
    char *whole = NULL;
    size_t bytes = 0;
    log[0] = '\0';
    if (nvrtc == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE, "%s", why);
    }
    TCHI_TRY(find_target(state, nvrtc, &target));
    TCHI_TRY(make_text(text, &whole, &bytes));
    tch_status status = build_image(nvrtc, &target, text, whole, image, log, log_size);
    tchi_cuda_host->release(whole, bytes);
    return status;
}
