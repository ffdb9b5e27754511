/* Compiling a kernel: texts written into a folder of our own, the compiler run on them, its output read back. The folder is
 * removed however it ends. The user's name and file reach the compiler inside the text only; options are arguments of their
 * own and begin with what kernel.h allows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernel.h"
#include "kernel/macros.h"
#include "kernel/prelude.h"

#define COMPILE_SECONDS 120
#define MOST_ARGUMENTS 256

typedef struct work {
    char folder[TCHI_PATH_SIZE];
    int open; /* the folder exists */
    char *log;
    size_t log_size;
} work;

/* Headers that CUDA sources include. What they have is in the prelude, or cannot be had. */
static const struct {
    const char *name, *text;
} shims[] = {
    {"cuda_fp16.h", ""},
    {"cuda_bf16.h", ""},
    {"cuda_runtime.h", ""},
    {"cuda.h", ""},
    {"assert.h", ""}, /* the prelude's ends the launch, not the process */
    {"cassert", ""},
    {"device_launch_parameters.h", ""},
    {"vector_types.h", ""},
    {"math_constants.h",
     "#define CUDART_INF_F HUGE_VALF\n#define CUDART_NAN_F NAN\n#define CUDART_INF HUGE_VAL\n"
     "#define CUDART_NAN ((double)NAN)\n#define CUDART_PI_F 3.141592654f\n#define CUDART_PI M_PI\n"},
    {"cooperative_groups.h", "#error \"cooperative groups are not available on the CPU\"\n"},
    {"mma.h", "#error \"tensor cores are not available on the CPU\"\n"},
    {"cuda_fp8.h", "#error \"8-bit floating-point types are not available on the CPU\"\n"},
    {"curand_kernel.h", "#error \"cuRAND is not available on the CPU\"\n"},
};

static const struct {
    const char *name, *text;
    const size_t *size;
} parts[] = {
    {"cpu_launch.h", tchi_prelude_cpu_launch, &tchi_prelude_cpu_launch_size},
    {"cpu_types.h", tchi_prelude_cpu_types, &tchi_prelude_cpu_types_size},
    {"cpu_threads.h", tchi_prelude_cpu_threads, &tchi_prelude_cpu_threads_size},
    {"cpu_math.h", tchi_prelude_cpu_math, &tchi_prelude_cpu_math_size},
    {"cpu_half.h", tchi_prelude_cpu_half, &tchi_prelude_cpu_half_size},
    {"cpu_atomics.h", tchi_prelude_cpu_atomics, &tchi_prelude_cpu_atomics_size},
    {"cpu_runner.h", tchi_prelude_cpu_runner, &tchi_prelude_cpu_runner_size},
    {"cpu_refused.h", tchi_prelude_cpu_refused, &tchi_prelude_cpu_refused_size},
    {"signature.h", tchi_prelude_signature, &tchi_prelude_signature_size},
    {"cpu_entry.h", tchi_prelude_cpu_entry, &tchi_prelude_cpu_entry_size},
};

static const size_t shim_count = sizeof shims / sizeof *shims;
static const size_t part_count = sizeof parts / sizeof *parts;

/* --- the folder ------------------------------------------------------------------------------------------------- */

static void path_of(const work *w, const char *name, char path[TCHI_PATH_SIZE + 64])
{
    snprintf(path, TCHI_PATH_SIZE + 64, "%s/%s", w->folder, name);
}

static FILE *create_file(const work *w, const char *name)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, name, path);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    FILE *stream = file >= 0 ? fdopen(file, "w") : NULL;
    if (file >= 0 && stream == NULL) {
        close(file);
    }
    return stream;
}

static tch_status close_file(const work *w, FILE *stream, const char *name)
{
    int failed = stream == NULL || ferror(stream);
    if (stream != NULL) {
        failed |= fclose(stream) != 0;
    }
    if (failed) {
        return tchi_cpu_host()->fail(TCH_ERR_IO, "cannot write %s/%s to compile a kernel: %s", w->folder, name,
                                     strerror(errno));
    }
    return TCH_OK;
}

static tch_status write_file(const work *w, const char *name, const char *text, size_t size)
{
    FILE *stream = create_file(w, name);
    if (stream != NULL) {
        fprintf(stream, "#line 1 \"torchium/%s\"\n", name);
        fwrite(text, 1, size, stream);
    }
    return close_file(w, stream, name);
}

static tch_status make_folder(work *w)
{
    const char *place = getenv("TMPDIR");
    if (place == NULL || place[0] != '/') {
        place = P_tmpdir;
    }
    int length = snprintf(w->folder, sizeof w->folder, "%s/torchium-XXXXXX", place);
    if (length >= (int)sizeof w->folder || mkdtemp(w->folder) == NULL) {
        return tchi_cpu_host()->fail(TCH_ERR_IO, "cannot make a folder in %.200s to compile a kernel in: %s", place,
                                     strerror(errno));
    }
    w->open = 1;
    return TCH_OK;
}

static void remove_folder(const work *w)
{
    static const char *const made[] = {"kernel.cpp", "kernel.so"};
    char path[TCHI_PATH_SIZE + 64];
    if (!w->open) {
        return;
    }
    for (size_t i = 0; i < shim_count + part_count + 2; i++) {
        path_of(w,
                i < shim_count                ? shims[i].name
                : i < shim_count + part_count ? parts[i - shim_count].name
                                              : made[i - shim_count - part_count],
                path);
        unlink(path);
    }
    rmdir(w->folder);
}

/* --- the text --------------------------------------------------------------------------------------------------- */

/* Before the source everything that does not wait for the kernel's name; the counter of waits is in the last. */
static void write_kernel(FILE *stream, const tch_kernel_text *text, const tchi_cpu_source *source, const char *macros,
                         const char *file)
{
    fprintf(stream, "%s%s", source->dynamic ? "#define TCHI_DYNAMIC 1\n" : "",
            source->stride ? "#define TCHI_STRIDE 1\n" : "");
    for (size_t i = 0; i < part_count; i++) {
        if (parts[i].text == tchi_prelude_signature) {
            fprintf(stream, "%s#line 1 \"%s\"\n%s\n#line 1 \"the kernel's name\"\n#define TCHI_KERNEL %s\n", macros,
                    file, source->text, text->name);
            fputs("#define TCHI_EXPORT extern \"C\" __attribute__((__visibility__(\"default\"), __used__)) const\n",
                  stream);
        }
        fprintf(stream, "#include \"%s\"\n", parts[i].name);
    }
}

/* kernel.cpp, which includes the prelude's parts. */
static tch_status write_source(const work *w, const tch_kernel_text *text)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_source source;
    size_t file_bytes = tchi_quoted_bytes(text->file), bytes = file_bytes + tchi_macro_bytes(text);
    char *file = host->allocate(bytes, 1);
    if (file == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a kernel's macros", bytes);
    }
    char *macros = file + file_bytes;
    tchi_quoted_write(text->file, file);
    tchi_macros_write(text, macros, bytes - file_bytes);
    tch_status status = tchi_cpu_source_prepare(text, &source);
    if (status == TCH_OK) {
        FILE *stream = create_file(w, "kernel.cpp");
        if (stream != NULL) {
            write_kernel(stream, text, &source, macros, file);
        }
        status = close_file(w, stream, "kernel.cpp");
        host->release(source.text, source.size);
    }
    host->release(file, bytes);
    return status;
}

static tch_status write_texts(const work *w, const tch_kernel_text *text)
{
    tch_status status = TCH_OK;
    for (size_t i = 0; i < shim_count && status == TCH_OK; i++) {
        status = write_file(w, shims[i].name, shims[i].text, strlen(shims[i].text));
    }
    for (size_t i = 0; i < part_count && status == TCH_OK; i++) {
        status = write_file(w, parts[i].name, parts[i].text, *parts[i].size);
    }
    return status == TCH_OK ? write_source(w, text) : status;
}

/* --- the compiler ----------------------------------------------------------------------------------------------- */

/* Arguments of the compiler; `room` holds the text of those that are made here. */
typedef struct command {
    char *arguments[MOST_ARGUMENTS + 1];
    int count;
    int overflow;
    char room[32768];
    size_t used;
} command;

static void add(command *c, const char *prefix, const char *rest)
{
    size_t left = sizeof c->room - c->used;
    int length = snprintf(c->room + c->used, left, "%s%s", prefix, rest);
    if (c->count == MOST_ARGUMENTS || (size_t)length >= left) {
        c->overflow = 1;
        return;
    }
    c->arguments[c->count++] = c->room + c->used;
    c->arguments[c->count] = NULL;
    c->used += (size_t)length + 1;
}

static void add_option(command *c, const char *option)
{
    if (strcmp(option, "--use_fast_math") == 0 || strcmp(option, "-use_fast_math") == 0) {
        add(c, "-ffast-math", "");
    } else if (strncmp(option, "-std=c++", 8) == 0) {
        add(c, "-std=gnu++", option + 8); /* the prelude has 128-bit integers and hexadecimal numbers */
    } else if (!tchi_option_is_macro(option) || tchi_option_is_for_both(option)) {
        add(c, option, "");
    }
}

/* Contraction is what a GPU's compiler does too. Threads of one grid index with unsigned numbers and reinterpret memory at
 * will, so that types say nothing about what overlaps. */
static void fill_command(command *c, const char *compiler, const work *w, const tch_kernel_text *text)
{
    static const char *const fixed[] = {
        "-x",
        "c++",
        "-std=gnu++17",
        "-O3",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-rtti",
        "-fno-exceptions",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-w",
        "-fno-strict-aliasing",
        "-fdiagnostics-color=never",
        "-fmax-errors=20",
#if defined(__x86_64__) || defined(__i386__)
        "-march=native",
#else
        "-mcpu=native",
#endif
        "-Wl,-z,defs",
        "-Wl,--as-needed"
    };
    char path[TCHI_PATH_SIZE + 64];
    add(c, compiler, "");
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        add(c, fixed[i], "");
    }
    for (int32_t i = 0; i < text->option_count; i++) {
        add_option(c, text->options[i]);
    }
    for (int32_t i = 0; i < text->include_count; i++) {
        add(c, "-I", text->includes[i]);
    }
    add(c, "-I", w->folder);
    add(c, "-o", "");
    path_of(w, "kernel.so", path);
    add(c, path, "");
    path_of(w, "kernel.cpp", path);
    add(c, path, "");
}

/* A compiler that crashes is asked again without vectors, where most such faults are: GCC 12.2 for aarch64 has one
 * that the largest of some halves is enough to meet. */
static int run_compiler(command *c, const work *w)
{
    int end = tchi_process_run(c->arguments, COMPILE_SECONDS, w->log, w->log_size);
    if (end > 0 && strstr(w->log, "internal compiler error") != NULL) {
        add(c, "-fno-tree-vectorize", "");
        end = c->overflow ? end : tchi_process_run(c->arguments, COMPILE_SECONDS, w->log, w->log_size);
    }
    return end;
}

static tch_status compile(const work *w, const tch_kernel_text *text)
{
    const tch_backend_host *host = tchi_cpu_host();
    char compiler[TCHI_PATH_SIZE];
    tch_status status = tchi_cpu_find_compiler(compiler);
    if (status != TCH_OK) {
        return status;
    }
    command *c = host->allocate(sizeof *c, _Alignof(command));
    if (c == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for the compiler's command", sizeof *c);
    }
    c->count = 0, c->overflow = 0, c->used = 0;
    fill_command(c, compiler, w, text);
    if (c->overflow) {
        status = host->fail(TCH_ERR_INVALID_ARGUMENT, "options and include folders are longer than %zu characters",
                            sizeof c->room);
    } else {
        int end = run_compiler(c, w);
        if (end == TCHI_PROCESS_NOT_STARTED) {
            status = host->fail(TCH_ERR_UNAVAILABLE, "the C++ compiler %.200s cannot be started", compiler);
        } else if (end == TCHI_PROCESS_TOO_LONG) {
            status = host->fail(TCH_ERR_INVALID_ARGUMENT, "%.200s took more than %d seconds for kernel %.200s",
                                compiler, COMPILE_SECONDS, text->name);
        } else if (end != 0) {
            status = host->fail(TCH_ERR_INVALID_ARGUMENT, "%.200s does not compile kernel %.200s:\n%.2000s", compiler,
                                text->name, w->log);
        }
    }
    host->release(c, sizeof *c);
    return status;
}

/* --- the image -------------------------------------------------------------------------------------------------- */

static tch_status read_object(const work *w, FILE *stream, tch_kernel_image *image)
{
    const tch_backend_host *host = tchi_cpu_host();
    struct stat about;
    if (fstat(fileno(stream), &about) != 0 || about.st_size <= 0) {
        return host->fail(TCH_ERR_IO, "the compiler left nothing in %s", w->folder);
    }
    tchi_cpu_image_header header = {TCHI_CPU_KERNEL_MAGIC, (uint64_t)about.st_size};
    size_t bytes = sizeof header + (size_t)about.st_size;
    char *data = host->allocate(bytes, 64);
    if (data == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a compiled kernel", bytes);
    }
    memcpy(data, &header, sizeof header);
    if (fread(data + sizeof header, 1, (size_t)about.st_size, stream) != (size_t)about.st_size) {
        host->release(data, bytes);
        return host->fail(TCH_ERR_IO, "cannot read %s/kernel.so", w->folder);
    }
    image->data = data;
    image->bytes = bytes;
    return TCH_OK;
}

static tch_status read_image(const work *w, tch_kernel_image *image)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, "kernel.so", path);
    FILE *stream = fopen(path, "re");
    if (stream == NULL) {
        return tchi_cpu_host()->fail(TCH_ERR_IO, "the compiler left no %s", path);
    }
    tch_status status = read_object(w, stream, image);
    fclose(stream);
    return status;
}

tch_status tchi_cpu_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                 size_t log_size)
{
    (void)state;
    work w = {.open = 0, .log = log, .log_size = log_size};
    log[0] = '\0';
    tch_status status = make_folder(&w);
    if (status == TCH_OK) {
        status = write_texts(&w, text);
    }
    if (status == TCH_OK) {
        status = compile(&w, text);
    }
    if (status == TCH_OK) {
        status = read_image(&w, image);
    }
    remove_folder(&w);
    return status;
}
