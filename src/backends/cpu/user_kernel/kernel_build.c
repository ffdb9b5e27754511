/* Compiles a kernel in a new temporary folder, which is always removed, and reads back the object and its stack usage.
 * The user's name and file reach the compiler only inside the text; options are separate arguments that begin with what
 * kernel.h allows. */
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
#define STACK_OPTION "-fstack-usage"
#define MOST_ARGUMENTS 256

typedef struct work {
    char folder[TCHI_PATH_SIZE];
    int open; /* the folder exists */
    char *log;
    size_t log_size;
} work;

/* Headers that CUDA sources include: the prelude has their contents, or they are unavailable. */
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

const tchi_cpu_part tchi_cpu_parts[TCHI_CPU_PARTS] = {
    {"cpu_launch.h", tchi_prelude_cpu_launch},   {"cpu_types.h", tchi_prelude_cpu_types},
    {"cpu_threads.h", tchi_prelude_cpu_threads}, {"cpu_math.h", tchi_prelude_cpu_math},
    {"cpu_half.h", tchi_prelude_cpu_half},       {"cpu_atomics.h", tchi_prelude_cpu_atomics},
    {"cpu_runner.h", tchi_prelude_cpu_runner},   {"cpu_refused.h", tchi_prelude_cpu_refused},
    {"signature.h", tchi_prelude_signature},     {"cpu_entry.h", tchi_prelude_cpu_entry},
};

/* --- the folder ------------------------------------------------------------------------------------------------- */

static void path_of(const work *w, const char *name, char path[TCHI_PATH_SIZE + 64])
{
    snprintf(path, TCHI_PATH_SIZE + 64, "%s/%s", w->folder, name);
}

static FILE *create_file(const work *w, const char *name)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, name, path);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
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

static tch_status make_folder(work *w)
{
    const char *place = secure_getenv("TMPDIR");
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

static void remove_file(const work *w, const char *name)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, name, path);
    unlink(path);
}

static void remove_folder(const work *w)
{
    static const char *const made[] = {"kernel.cpp", "kernel.o", "kernel.su", "kernel.so", "kernel.log"};
    if (w->open) {
        for (size_t i = 0; i < sizeof shims / sizeof *shims; i++) {
            remove_file(w, shims[i].name);
        }
        for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
            remove_file(w, made[i]);
        }
        rmdir(w->folder);
    }
}

/* --- the text --------------------------------------------------------------------------------------------------- */

/* The prelude precedes the source, except for the parts that need the kernel's name. */
static void write_kernel(FILE *stream, const tch_kernel_text *text, const tchi_cpu_source *source, const char *macros,
                         const char *file)
{
    fputs(source->dynamic ? "#define TCHI_DYNAMIC 1\n" : "", stream);
    for (size_t i = 0; i < TCHI_CPU_PARTS; i++) {
        if (tchi_cpu_parts[i].text == tchi_prelude_signature) {
            fprintf(stream, "%s#line 1 \"%s\"\n%s\n#line 1 \"the kernel's name\"\n#define TCHI_KERNEL %s\n", macros,
                    file, source->text, text->name);
            fputs("#define TCHI_EXPORT extern \"C\" __attribute__((__visibility__(\"default\"), __used__)) const\n",
                  stream);
        }
        fprintf(stream, "#line 1 \"torchium/%s\"\n%s\n", tchi_cpu_parts[i].name, tchi_cpu_parts[i].text);
    }
}

static tch_status write_source(const work *w, const tch_kernel_text *text)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_source source;
    size_t file_bytes = tchi_quoted_bytes(text->file), bytes = file_bytes + tchi_macro_bytes(text);
    char *file;
    TCHI_TRY(tchi_backend_take(host, bytes, "a kernel's macros", &file));
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

static tch_status write_shims(const work *w)
{
    for (size_t i = 0; i < sizeof shims / sizeof *shims; i++) {
        FILE *stream = create_file(w, shims[i].name);
        if (stream != NULL) {
            fprintf(stream, "#line 1 \"torchium/%s\"\n%s", shims[i].name, shims[i].text);
        }
        TCHI_TRY(close_file(w, stream, shims[i].name));
    }
    return TCH_OK;
}

/* --- the compiler ----------------------------------------------------------------------------------------------- */

/* Arguments of the compiler; `room` holds generated text. */
typedef struct command {
    char *arguments[MOST_ARGUMENTS + 1];
    int count;
    int overflow;
    char room[32768];
    size_t used;
} command;

static void add_argument(command *c, const char *prefix, const char *rest)
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

static void add_list(command *c, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        add_argument(c, words[i], "");
    }
}

static void add_path(command *c, const work *w, const char *name)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, name, path);
    add_argument(c, path, "");
}

static void add_option(command *c, const char *option)
{
    if (strcmp(option, "--use_fast_math") == 0 || strcmp(option, "-use_fast_math") == 0) {
        add_argument(c, "-ffast-math", "");
    } else if (strncmp(option, "-std=c++", 8) == 0) {
        add_argument(c, "-std=gnu++", option + 8); /* the prelude has 128-bit integers and hexadecimal numbers */
    } else if (!tchi_option_is_macro(option) || tchi_option_is_for_both(option)) {
        add_argument(c, option, "");
    }
}

/* Contraction matches GPU compilers. CUDA code indexes with unsigned numbers and reinterprets memory freely, hence no
 * strict aliasing. With stack-clash protection a large frame touches every page in order and cannot skip the guard
 * below a stack. */
static void fill_command(command *c, const char *compiler, const work *w, const tch_kernel_text *text)
{
    static const char *const fixed[] = {
        "-x",
        "c++",
        "-std=gnu++17",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-rtti",
        "-fno-exceptions",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-w",
        "-fno-strict-aliasing",
        "-fstack-clash-protection",
        "-fdiagnostics-color=never",
        "-fmax-errors=20",
#if defined(__x86_64__) || defined(__i386__)
        "-march=native",
#else
        "-mcpu=native",
#endif
    };
    add_argument(c, compiler, "");
    add_list(c, fixed, sizeof fixed / sizeof *fixed);
    for (int32_t i = 0; i < text->option_count; i++) {
        add_option(c, text->options[i]);
    }
    for (int32_t i = 0; i < text->include_count; i++) {
        add_argument(c, "-I", text->includes[i]);
    }
    add_argument(c, "-I", w->folder);
    add_argument(c, STACK_OPTION, "");
    add_argument(c, "-c", "");
    add_argument(c, "-o", "");
    add_path(c, w, "kernel.o");
    add_path(c, w, "kernel.cpp");
}

/* Links in a separate step without the user's options: with -ffast-math GCC links startup code that changes the
 * floating-point mode of the whole process. */
static void fill_link(command *c, const char *compiler, const work *w)
{
    static const char *const fixed[] = {"-shared", "-Wl,-z,defs", "-Wl,--as-needed", "-o"};
    c->count = 0, c->overflow = 0, c->used = 0;
    add_argument(c, compiler, "");
    add_list(c, fixed, sizeof fixed / sizeof *fixed);
    add_path(c, w, "kernel.so");
    add_path(c, w, "kernel.o");
}

/* Retries without the option for compilers that lack it, such as clang before 13. */
static int drop_stack_option(command *c, const char *log)
{
    for (int i = 0; i < c->count && strstr(log, STACK_OPTION) != NULL; i++) {
        if (strcmp(c->arguments[i], STACK_OPTION) == 0) {
            c->arguments[i] = "-w";
            return 1;
        }
    }
    return 0;
}

/* Appends messages after `used` bytes of the log. */
static int run_command(const command *c, const work *w, size_t used)
{
    char path[TCHI_PATH_SIZE + 64];
    path_of(w, "kernel.log", path);
    return tchi_process_run(c->arguments, path, COMPILE_SECONDS, w->log + used, w->log_size - used);
}

/* Retries a crashed compiler without vectorization, the usual cause: GCC 12.2 for aarch64 crashes on a maximum of
 * float16. */
static int run_compiler(command *c, const work *w)
{
    int end = run_command(c, w, 0);
    if (end > 0 && drop_stack_option(c, w->log)) {
        end = run_command(c, w, 0);
    }
    if (end > 0 && strstr(w->log, "internal compiler error") != NULL) {
        add_argument(c, "-fno-tree-vectorize", "");
        end = c->overflow ? end : run_command(c, w, 0);
    }
    return end;
}

static tch_status check_end(const work *w, const tch_kernel_text *text, const char *compiler, int end)
{
    const tch_backend_host *host = tchi_cpu_host();
    if (end == TCHI_PROCESS_NOT_STARTED) {
        return host->fail(TCH_ERR_UNAVAILABLE, "the C++ compiler %.200s cannot be started", compiler);
    }
    if (end == TCHI_PROCESS_TOO_LONG) {
        return host->fail(TCH_ERR_INVALID_ARGUMENT, "%.200s took more than %d seconds for kernel %.200s", compiler,
                          COMPILE_SECONDS, text->name);
    }
    if (end != 0) {
        return host->fail(TCH_ERR_INVALID_ARGUMENT, "%.200s does not compile kernel %.200s:\n%.2000s", compiler,
                          text->name, w->log);
    }
    return TCH_OK;
}

static tch_status compile_and_link(const work *w, const tch_kernel_text *text)
{
    char compiler[TCHI_PATH_SIZE];
    command c = {.count = 0};
    TCHI_TRY(tchi_cpu_find_compiler(compiler));
    fill_command(&c, compiler, w, text);
    if (c.overflow) {
        return tchi_cpu_host()->fail(TCH_ERR_INVALID_ARGUMENT,
                                     "options and include folders are longer than %zu characters", sizeof c.room);
    }
    TCHI_TRY(check_end(w, text, compiler, run_compiler(&c, w)));
    fill_link(&c, compiler, w);
    return check_end(w, text, compiler, run_command(&c, w, strlen(w->log)));
}

/* --- the image -------------------------------------------------------------------------------------------------- */

/* A NUL-terminated file of the folder; `text` is NULL if it does not exist. */
typedef struct output {
    char *text;
    size_t bytes;
} output;

static void release_output(output *o)
{
    if (o->text != NULL) {
        tchi_cpu_host()->release(o->text, o->bytes + 1);
    }
    o->text = NULL;
}

static tch_status read_output(const work *w, const char *name, output *o)
{
    const tch_backend_host *host = tchi_cpu_host();
    char path[TCHI_PATH_SIZE + 64];
    struct stat about;
    *o = (output){NULL, 0};
    path_of(w, name, path);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return TCH_OK;
    }
    o->bytes = fstat(file, &about) == 0 && about.st_size > 0 ? (size_t)about.st_size : 0;
    tch_status status = tchi_backend_take(host, o->bytes + 1, "the output of a compiler", &o->text);
    if (status == TCH_OK && read(file, o->text, o->bytes) != (ssize_t)o->bytes) {
        release_output(o);
        status = host->fail(TCH_ERR_IO, "cannot read %s", path);
    }
    close(file);
    return status;
}

/* A stack that is too small would crash the process. */
static tch_status measure_stack(const work *w, const tch_kernel_text *text, uint64_t *stack_bytes)
{
    output lines;
    TCHI_TRY(read_output(w, "kernel.su", &lines));
    tchi_stack_use use = tchi_stack_use_read(lines.text);
    release_output(&lines);
    *stack_bytes = use.stack_bytes;
    if (use.largest > TCHI_CPU_LOCAL_MOST) {
        snprintf(w->log, w->log_size,
                 "kernel %.200s has %llu bytes of local variables, expected at most %d: use shared or global memory\n",
                 text->name, (unsigned long long)use.largest, TCHI_CPU_LOCAL_MOST);
        return tchi_cpu_host()->fail(TCH_ERR_INVALID_ARGUMENT, "%s", w->log);
    }
    return TCH_OK;
}

static tch_status join_image(const work *w, const output *object, uint64_t stack_bytes, tch_kernel_image *image)
{
    const tch_backend_host *host = tchi_cpu_host();
    tchi_cpu_image_header header = {TCHI_CPU_KERNEL_MAGIC, object->bytes, stack_bytes};
    size_t bytes = sizeof header + object->bytes;
    if (object->text == NULL || object->bytes == 0) {
        return host->fail(TCH_ERR_IO, "the compiler left nothing in %s", w->folder);
    }
    char *data;
    TCHI_TRY(tchi_backend_take(host, bytes, "a compiled kernel", &data));
    memcpy(data, &header, sizeof header);
    memcpy(data + sizeof header, object->text, object->bytes);
    *image = (tch_kernel_image){data, bytes};
    return TCH_OK;
}

static tch_status read_image(const work *w, const tch_kernel_text *text, tch_kernel_image *image)
{
    output object = {NULL, 0};
    uint64_t stack_bytes = 0;
    TCHI_TRY(measure_stack(w, text, &stack_bytes));
    TCHI_TRY(read_output(w, "kernel.so", &object));
    tch_status status = join_image(w, &object, stack_bytes, image);
    release_output(&object);
    return status;
}

static tch_status build_in_folder(work *w, const tch_kernel_text *text, tch_kernel_image *image)
{
    TCHI_TRY(make_folder(w));
    TCHI_TRY(write_shims(w));
    TCHI_TRY(write_source(w, text));
    TCHI_TRY(compile_and_link(w, text));
    return read_image(w, text, image);
}

tch_status tchi_cpu_kernel_build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log,
                                 size_t log_size)
{
    work w = {.open = 0, .log = log, .log_size = log_size};
    log[0] = '\0';
    tch_status status = build_in_folder(&w, text, image);
    remove_folder(&w);
    return status;
}
