/* Parsing of kernel sources before compilation: megabytes of adversarial text must yield a text for the compiler or an
 * error, in linear time. fuzz_kernel cuts and mutates real sources. */
#include "backends/cpu/user_kernel/kernel.h"
#include "kernel/cache.h"
#include "support/testing.h"

static const char *const names[] = {"f", "a::b::f<float, 4>", "::f <1>"};

/* --- one text ---------------------------------------------------------------------------------------------------- */

static size_t lines_of(const char *text)
{
    size_t count = 0;
    for (; *text != '\0'; text++) {
        count += *text == '\n';
    }
    return count;
}

static void check_prepared(const char *source, const char *name)
{
    tchi_cpu_source made;
    const tch_kernel_text text = {.source = source, .file = "mine.cu", .name = name};
    tch_status status = tchi_cpu_source_prepare(&text, &made);
    if (status != TCH_OK) {
        CHECK(status == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), "not a kernel") != NULL, "gave %s: %s",
              tch_status_name(status), tch_last_error());
        return;
    }
    CHECK(memchr(made.text, '\0', made.size) != NULL, "the text has no end");
    CHECK(lines_of(made.text) == lines_of(source), "%zu lines became %zu", lines_of(source), lines_of(made.text));
    tchi_cpu_host()->release(made.text, made.size);
}

static void check_text(const char *text, size_t length)
{
    char *source = test_alloc(length + 1);
    memcpy(source, text, length);
    source[length] = '\0';
    check_prepared(source, names[length % TEST_COUNT(names)]);
    const tch_kernel_text alone = {.source = source};
    (void)tchi_kernel_reads_files(&alone);
}

/* --- long texts -------------------------------------------------------------------------------------------------- */

#define LONG_BYTES ((size_t)1 << 20)

static void repeat(const char *before, const char *unit, const char *after)
{
    size_t size = strlen(unit), used = strlen(before);
    char *text = test_alloc(used + LONG_BYTES + size + strlen(after) + 1);
    memcpy(text, before, used);
    while (used < LONG_BYTES) {
        memcpy(text + used, unit, size);
        used += size;
    }
    memcpy(text + used, after, strlen(after));
    test_case("\"%s\" many times", unit);
    check_text(text, used + strlen(after));
}

TEST(long_sources)
{
    static const char *const units[] = {
        "#/*\n",
        "#/**//*\n",
        "# /* */\n",
        "#include/*\n",
        "extern __shared__ ",
        "__shared__ extern x[] ",
        "f(",
        "void f(",
        "R\"(",
        "R\"))))",
        "R\"aaaaaaaa",
        "\"",
        "'",
        "/*",
        "/",
        "\\\n",
        "\\ ",
        "{",
        "namespace ",
        "(",
        "[]",
        "#\n",
        "#define a \\\n",
        "*/#",
    };
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        repeat("", units[i], "");
    }
    repeat("R\"", ")", "(");
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    (void)tch_backend_count(); /* provides the CPU backend's allocator */
    return test_run(__FILE__, NULL, NULL);
}
