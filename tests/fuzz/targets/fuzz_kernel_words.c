/* The small texts around a custom kernel: its name, its options as macros, the compiler's report on stacks, its rule
 * for make, and the list of files that a cached image carries. The first byte chooses which; where there is no other,
 * there is no text. */
#include <string.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "fuzz.h"
#include "kernel/macros.h"
#include "kernel/names.h"

/* A name that passes stands in the text that is compiled: nothing in it may end a line or a statement. */
static void check_name(const char *text)
{
    if (tchi_check_kernel_name(text) == TCH_OK) {
        REQUIRE(text != NULL);
        REQUIRE(strpbrk(text, "\n\r;(){}\"'#\\/") == NULL && text[0] != '\0');
    }
}

/* An option that passes reaches a command line; a macro of it becomes one line of the text. */
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

/* A header that is there, and was there long before any compiler was started. */
static const char *header(void)
{
    static int file = -1;
    static char path[128];
    if (file < 0) {
        fuzz_write("h.h", &file, (const uint8_t *)"int x;\n", 7);
        snprintf(path, sizeof path, "%s/h.h", fuzz_folder());
    }
    return path;
}

/* A compiler's rule, behind a header that is there where `with_header` says so. */
static void check_rule(const char *text, bool with_header, uint64_t hash)
{
    static const struct timespec never = {0}, far = {.tv_sec = INT32_MAX};
    tchi_cpu_files files = {NULL, 0, 0};
    size_t size = strlen(text) + 256;
    char *rule = malloc(size);
    REQUIRE(rule != NULL);
    snprintf(rule, size, "%s%s %s", with_header ? "a.o: " : "", with_header ? header() : "", text);
    fuzz_faults_begin(hash);
    tch_status status = tchi_cpu_files_make(&files, rule, "/nowhere", with_header ? &far : &never);
    bool faulted = fuzz_faults_end();
    REQUIRE(status == TCH_OK || (status == TCH_ERR_OUT_OF_MEMORY && faulted));
    if (status == TCH_OK && files.bytes > 0 && !with_header) {
        REQUIRE(!tchi_cpu_files_same(files.data, files.bytes)); /* nothing is older than 1970 */
    } else if (status == TCH_OK) {
        (void)tchi_cpu_files_same(files.data, files.bytes);
    }
    tchi_cpu_files_release(&files);
    free(rule);
}

/* The list that a cached image carries, of one file that is what it was, with bytes changed: each pair of the text is a
 * place and what to change there. */
static void check_list(const uint8_t *pairs, size_t count)
{
    static const struct timespec far = {.tv_sec = INT32_MAX};
    char rule[256];
    tchi_cpu_files files = {NULL, 0, 0};
    snprintf(rule, sizeof rule, "a.o: %s %s", header(), header());
    REQUIRE(tchi_cpu_files_make(&files, rule, "/nowhere", &far) == TCH_OK);
    REQUIRE(tchi_cpu_files_same(files.data, files.bytes));
    char *exact = malloc(files.bytes); /* so that a sanitizer sees a read behind the end */
    REQUIRE(exact != NULL);
    memcpy(exact, files.data, files.bytes);
    for (size_t i = 0; i + 1 < count; i += 2) {
        exact[pairs[i] % files.bytes] ^= (char)pairs[i + 1];
    }
    (void)tchi_cpu_files_same(exact, files.bytes);
    REQUIRE(!tchi_cpu_files_same(exact, files.bytes - 1));
    free(exact);
    tchi_cpu_files_release(&files);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (count == 0) {
        return 0;
    }
    (void)fuzz_context();
    char *text = fuzz_text(bytes + 1, count - 1);
    switch (bytes[0] % 8) {
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
    case 4:
    case 6:
        check_rule(text, bytes[0] % 8 == 6, fuzz_hash(bytes, count));
        break;
    case 7:
        check_list(bytes + 1, count - 1);
        break;
    default:
        (void)tchi_cpu_files_same(text, count - 1);
    }
    free(text);
    return 0;
}
