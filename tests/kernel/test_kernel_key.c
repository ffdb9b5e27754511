/* Cache keys: their hash, that they cover everything a compiled kernel depends on, and that a source which reads files
 * has none. A fake compiler counts its calls, except in the last tests. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <unistd.h>

#include "core/sha256.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/tensors.h"
#include "support/testing.h"

static void write_text(const char *name, const char *text)
{
    test_file_write(test_path(name), text, (int64_t)strlen(text));
}

/* --- hashes ----------------------------------------------------------------------------------------------------- */

static void check_digest(const uint8_t digest[TCHI_SHA256_BYTES], const char *expected)
{
    char text[2 * TCHI_SHA256_BYTES + 1];
    for (int i = 0; i < TCHI_SHA256_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    }
    assert_string_equal(text, expected);
}

/* NIST's examples for FIPS 180-4, and the empty message. */
TEST(published_digests)
{
    static const struct {
        const char *text, *digest;
    } cases[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqr"
         "stu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    };
    uint8_t digest[TCHI_SHA256_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tchi_sha256(cases[i].text, strlen(cases[i].text), digest);
        check_digest(digest, cases[i].digest);
    }
    char *million = test_alloc(1000000);
    memset(million, 'a', 1000000);
    tchi_sha256(million, 1000000, digest);
    check_digest(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    tchi_sha256_state chunks;
    tchi_sha256_begin(&chunks);
    for (size_t at = 0, part = 1; at < 1000000; at += part, part = part % 131 + 1) {
        part = part < 1000000 - at ? part : 1000000 - at;
        tchi_sha256_add(&chunks, million + at, part);
    }
    tchi_sha256_end(&chunks, digest);
    check_digest(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* --- keys ------------------------------------------------------------------------------------------------------- */

WITH_COMPILER(everything_counts)
{
    tch_context *context = *state;
    static const char *const one[] = {"-DA=1", "-DB"};
    static const char *const other[] = {"-DB", "-DA=1"};
    static const char *const joined[] = {"-DA=1-DB"};
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
    config.source = FAKE_SOURCE " ";
    assert_int_equal(fake_compile(context, &config), 1);
    config.name = "f<1>";
    assert_int_equal(fake_compile(context, &config), 1);
    config.path = "other.cu";
    assert_int_equal(fake_compile(context, &config), 1);
    config.option_count = 2, config.options = one;
    assert_int_equal(fake_compile(context, &config), 1);
    config.options = other;
    assert_int_equal(fake_compile(context, &config), 1);
    config.option_count = 1, config.options = joined;
    assert_int_equal(fake_compile(context, &config), 1);
    snprintf(fake.line, sizeof fake.line, "fake 2");
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
    config.use_cache = 0;
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_cache_count(".kernel"), 8);
    assert_int_equal(fake_cache_count(""), 8);
}

/* Compiled twice: 1, 1 if it is not cached, and then the cache has no folder; otherwise 1, 0. */
static void check_cached(tch_context *context, tch_kernel_config *config, int cached)
{
    fake_remove_tree(fake_cache());
    assert_int_equal(fake_compile(context, config), 1);
    assert_int_equal(fake_compile(context, config), !cached);
    assert_int_equal(fake_cache_count(""), cached ? 1 : -1);
}

WITH_COMPILER(sources_that_read_files)
{
    static const struct {
        const char *source;
        int cached;
    } cases[] = {
        {FAKE_SOURCE, 1},
        {"// include this, and #if that\n#define include %\\\n1\n#define N(x) #x\nint __hash_;\n" FAKE_SOURCE, 1},
        {"#include <cuda_fp16.h>\n # inc\\\nlude <math.h> // why\n%:include<cstdint>\n" FAKE_SOURCE, 1},
        {"#include \"a.h\"\n" FAKE_SOURCE, 0},
        {"#include \"math.h\"\n" FAKE_SOURCE, 0},
        {"#include <math.h\n>\n" FAKE_SOURCE, 0},
        {"#include <math.h>\n#include <a.h>\n" FAKE_SOURCE, 0},
        {"#if 0\n#include <a.h>\n#endif\n" FAKE_SOURCE, 0},
        {"#define H <math.h>\n#include H\n" FAKE_SOURCE, 0},
        {"#include_next <math.h>\n" FAKE_SOURCE, 0},
        {"#embed \"a.h\"\n" FAKE_SOURCE, 0},
        {"x\n \t# \v include \"a.h\"\n" FAKE_SOURCE, 0},
        {"#\\\ninc\\ \t\r\nl\\\rude \"a.h\"\n" FAKE_SOURCE, 0},
        {"%:include \"a.h\"\n" FAKE_SOURCE, 0},
        {"?\?=include \"a.h\"\n" FAKE_SOURCE, 0},
        {"#inc?\?/\nlude \"a.h\"\n" FAKE_SOURCE, 0},
        {"/* x\n */ # /* y */ include \"a.h\"\n" FAKE_SOURCE, 0},
        {"#if __has_include(\"a.h\")\n#endif\n" FAKE_SOURCE, 0},
        {"asm(\".incbin \\\"a\\\"\");\n" FAKE_SOURCE, 0},
        {"const char *t = __TIME__;\n" FAKE_SOURCE, 0},
    };
    static const char *const option[] = {"-DX=__has_include(\"a.h\")"};
    tch_kernel_config config = fake_config(FAKE_SOURCE "#if X\n#endif\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        test_case("%s", cases[i].source);
        tch_kernel_config one = fake_config(cases[i].source);
        check_cached(*state, &one, cases[i].cached);
    }
    config.option_count = 1, config.options = option;
    check_cached(*state, &config, 0);
}

/* A user's header with the name of a system header: a source that includes it uses it and is not cached, all others are
 * compiled without the folder. */
WITH_COMPILER(own_headers_of_the_user)
{
    const char *folders[] = {test_path("in")};
    tch_kernel_config config = fake_config("#include <math.h>\n" FAKE_SOURCE), plain = fake_config(FAKE_SOURCE);
    assert_int_equal(mkdir(test_path("in"), 0700), 0);
    config.include_count = plain.include_count = 1, config.includes = plain.includes = folders;
    check_cached(*state, &config, 1);
    CHECK(strstr(fake.asked, "include ") == NULL, "it was compiled with %s", fake.asked);
    write_text("in/math.h", "#error mine\n");
    check_cached(*state, &config, 0);
    CHECK(strstr(fake.asked, folders[0]) != NULL, "it was compiled with %s", fake.asked);
    check_cached(*state, &plain, 1);
    CHECK(strstr(fake.asked, "include ") == NULL, "it was compiled with %s", fake.asked);
}

/* --- the real compiler ------------------------------------------------------------------------------------------- */

/* Compiles and runs a kernel that writes VALUE. */
static void expect_kernel(tch_context *context, tch_kernel_config *config, int value, int cached)
{
    tch_kernel *kernel = NULL;
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    int64_t one = 1;
    test_tensor *y = test_tensor_make(context, TCH_INT32, 1, &one, LAYOUT_CONTIGUOUS);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&y->tensor);
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    CHECK_OK(tch_kernel_compile(context, config, &kernel));
    CHECK_OK(tch_kernel_get_info(kernel, &info));
    CHECK_OK(tch_kernel_launch(kernel, &shape, 1, &argument));
    double got = test_tensor_read(y)[0];
    tch_kernel_destroy(kernel);
    CHECK(got == value, "the kernel has %g, expected %d", got, value);
    CHECK(info.from_cache == cached, "it %s", info.from_cache ? "came from the cache" : "was compiled");
}

#define KERNEL "__global__ void f(int *y) { *y = VALUE; }\n"

/* A header changes, and then one of its name appears in an earlier folder, which is passed to the library or found by
 * the compiler only. */
WITH_REAL_COMPILER(headers_that_change)
{
    static const char *const ways[] = {"includes", "options", "CPATH", "CPLUS_INCLUDE_PATH"};
    char first[TEST_PATH_SIZE + 2], second[TEST_PATH_SIZE + 2], both[2 * TEST_PATH_SIZE + 2];
    snprintf(first, sizeof first, "-I%s", test_path("one"));
    snprintf(second, sizeof second, "-I%s", test_path("two"));
    snprintf(both, sizeof both, "%s:%s", first + 2, second + 2);
    const char *options[] = {first, second}, *folders[] = {first + 2, second + 2};
    assert_int_equal(mkdir(test_path("one"), 0700) + mkdir(test_path("two"), 0700), 0);
    for (int way = 0; way < 4; way++) {
        test_case("%s", ways[way]);
        tch_kernel_config config = fake_config("#include <value.h>\n" KERNEL);
        config.include_count = 2 * (way == 0), config.includes = folders;
        config.option_count = 2 * (way == 1), config.options = options;
        if (way > 1) {
            setenv(ways[way], both, 1);
        }
        write_text("two/value.h", "#define VALUE 2\n");
        expect_kernel(*state, &config, 2, 0);
        write_text("two/value.h", "#define VALUE 3\n");
        expect_kernel(*state, &config, 3, 0);
        write_text("one/value.h", "#define VALUE 1\n");
        expect_kernel(*state, &config, 1, 0);
        assert_int_equal(unlink(test_path("one/value.h")), 0);
        unsetenv(ways[way]);
    }
    assert_int_equal(fake_cache_count(""), -1);
}

/* Without includes a kernel is cached, unless the environment lets a header replace the system's. The linker's search
 * path is part of the key. */
WITH_REAL_COMPILER(a_source_without_includes)
{
    static const char *const option[] = {"-DVALUE=7"};
    tch_kernel_config config = fake_config(KERNEL);
    config.option_count = 1, config.options = option;
    expect_kernel(*state, &config, 7, 0);
    expect_kernel(*state, &config, 7, 1);
    setenv("CPATH", test_path("one"), 1);
    expect_kernel(*state, &config, 7, 0);
    unsetenv("CPATH");
    expect_kernel(*state, &config, 7, 1);
    setenv("LIBRARY_PATH", test_path("one"), 1);
    expect_kernel(*state, &config, 7, 0);
    expect_kernel(*state, &config, 7, 1);
    unsetenv("LIBRARY_PATH");
    expect_kernel(*state, &config, 7, 1);
}

TEST_MAIN(NULL, NULL)
