/* Texts of a custom kernel: source preprocessing (tokens, rewriting for CPUs, detection of included files), name,
 * options as macros, file name, and the compiler's stack report. The first byte chooses one; the rest is the text. */
#include <string.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "fuzz.h"
#include "kernel/cache.h"
#include "kernel/input.h"
#include "kernel/macros.h"

/* An accepted name becomes part of the compiled text: it must not end a line or a statement. */
static void check_name(const char *text)
{
    if (tchi_check_kernel_name(text) == TCH_OK) {
        REQUIRE(text != NULL);
        REQUIRE(strpbrk(text, "\n\r;(){}\"'#\\/") == NULL && text[0] != '\0');
    }
}

/* An accepted option is passed on a command line; its macro becomes one line of the text. */
static void check_option(const char *text)
{
    const char *options[] = {text, "-DX=1"};
    const tch_kernel_text given = {.option_count = 2, .options = options};
    if (tchi_check_kernel_option(text, 0) != TCH_OK) {
        return;
    }
    REQUIRE(text != NULL && text[0] == '-' && tchi_is_printable(text));
    size_t size = tchi_macro_bytes(&given);
    char *room = malloc(size);
    REQUIRE(room != NULL);
    tchi_macros_write(&given, room, size);
    REQUIRE(strlen(room) < size);
    free(room);
}

static void check_file_name(const char *text)
{
    size_t size = tchi_quoted_bytes(text);
    char *room = malloc(size);
    REQUIRE(room != NULL);
    tchi_quoted_write(text, room);
    REQUIRE(strlen(room) < size && strlen(room) >= strlen(text));
    free(room);
}

static void check_stack(const char *text)
{
    tchi_stack_use use = tchi_stack_use_read(text);
    REQUIRE(use.stack_bytes > 0 && use.stack_bytes <= 2 * TCHI_CPU_LOCAL_MOST);
}

static size_t lines_of(const char *text)
{
    size_t count = 0;
    for (; *text != '\0'; text++) {
        count += *text == '\n';
    }
    return count;
}

static void prepare_source(const char *source, const char *name, int32_t option_count, uint64_t hash)
{
    tchi_cpu_source made;
    const char *options[] = {"-DSIZE=4", "-DTYPE=float"};
    const tch_kernel_text text = {
        .source = source, .file = "mine.cu", .name = name, .options = options, .option_count = option_count};
    fuzz_faults_begin(hash);
    tch_status status = tchi_cpu_source_prepare(&text, &made);
    bool faulted = fuzz_faults_end();
    REQUIRE(status == TCH_OK || status == TCH_ERR_INVALID_ARGUMENT || (status == TCH_ERR_OUT_OF_MEMORY && faulted));
    if (status == TCH_OK) {
        REQUIRE(memchr(made.text, '\0', made.size) != NULL);
        REQUIRE(lines_of(made.text) == lines_of(source));
        tchi_cpu_host()->release(made.text, made.size);
    }
}

static void check_source(const char *text)
{
    const tch_kernel_text alone = {.source = text};
    uint64_t hash = fuzz_hash((const uint8_t *)text, strlen(text));
    REQUIRE(tchi_kernel_reads_files(&alone) || strstr(text, "#include \"") == NULL);
    prepare_source(text, "f", (int32_t)(hash % 3), hash);
    prepare_source(text, "a::b::f <float, 4>", 0, 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count == 0) {
        return 0;
    }
    (void)fuzz_context();
    char *text = fuzz_text(bytes + 1, count - 1);
    switch (bytes[0] % 5) {
    case 0:
        check_name(count > 1 ? text : NULL);
        break;
    case 1:
        check_option(count > 1 ? text : NULL);
        break;
    case 2:
        check_file_name(text);
        break;
    case 3:
        check_stack(text);
        break;
    default:
        check_source(text);
    }
    free(text);
    return 0;
}
