/* A custom kernel's source before any compiler sees it: the tokens, the rewriting for CPUs, and whether it reads files.
 * */
#include <string.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "fuzz.h"
#include "kernel/cache.h"

static size_t lines_of(const char *text)
{
    size_t count = 0;
    for (; *text != '\0'; text++) {
        count += *text == '\n';
    }
    return count;
}

static void prepare(const char *source, const char *name, int32_t option_count, uint64_t hash)
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

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    char *source = fuzz_text(bytes, count);
    const tch_kernel_text alone = {.source = source};
    (void)fuzz_context();
    REQUIRE(tchi_kernel_reads_files(&alone) || strstr(source, "#include \"") == NULL);
    prepare(source, "f", (int32_t)(count % 3), fuzz_hash(bytes, count));
    prepare(source, "a::b::f <float, 4>", 0, 1);
    free(source);
    return 0;
}
