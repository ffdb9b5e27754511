/* Keys of the cache: the hash they are made with, and that everything a compiled kernel depends on changes them. The
 * compiler is a pretended one that counts how often it is asked. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/sha256.h"
#include "kernel/includes.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/testing.h"

#define SOURCE "__global__ void f() {}\n"

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

/* The examples that NIST publishes with FIPS 180-4, and the empty message. */
static void published_digests(void **state)
{
    (void)state;
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

static void everything_counts(void **state)
{
    tch_context *context = *state;
    static const char *const one[] = {"-DA=1", "-DB"};
    static const char *const other[] = {"-DB", "-DA=1"};
    static const char *const joined[] = {"-DA=1-DB"};
    tch_kernel_config config = fake_config(SOURCE);
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
    config.source = SOURCE " ";
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

/* a.h includes b.h from its own folder, which includes a.h again, and one of a folder of includes. */
static void includes_count(void **state)
{
    tch_context *context = *state;
    assert_int_equal(mkdir(test_path("in"), 0700), 0);
    assert_int_equal(mkdir(test_path("in/deep"), 0700), 0);
    write_text("k.cu", "#include \"in/a.h\"\n" SOURCE);
    write_text("in/a.h", "#include \"deep/b.h\"\n");
    write_text("in/deep/b.h", "# include \"../a.h\"\n#include <c.h>\n");
    const char *folders[] = {test_path("in")};
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.path = test_path("k.cu"), config.name = "f";
    config.include_count = 1, config.includes = folders;
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
    write_text("in/c.h", "// now it exists\n");
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
    write_text("in/c.h", "// and changes\n");
    assert_int_equal(fake_compile(context, &config), 1);
    write_text("in/deep/b.h", "# include \"../a.h\"\n#include <c.h>\n// changed\n");
    assert_int_equal(fake_compile(context, &config), 1);
    write_text("c.h", "// the file's own folder comes first\n");
    assert_int_equal(fake_compile(context, &config), 1);
    assert_int_equal(fake_compile(context, &config), 0);
}

/* What only the compiler can know is compiled each time. */
static void some_sources_are_not_kept(void **state)
{
    tch_context *context = *state;
    static const char *const sources[] = {
        "#define H \"a.h\"\n#include H\n" SOURCE,
        "#include\\\n H\n" SOURCE,
        "#include \"a.h\n" SOURCE,
        "#include_next <a.h>\n" SOURCE,
        "#import \"a.h\"\n" SOURCE,
        "%:include H\n" SOURCE,
        "/* x */ # /* y */ include /* z */ H\n" SOURCE,
        "/* x\n */ #include H\n" SOURCE,
        "#if __has_include(\"a.h\")\n#endif\n" SOURCE,
        "const char *t = __TIME__;\n" SOURCE,
        "?\?=include \"a.h\"\n" SOURCE,
        "R\"(\n# /* )\"\n#include H\n*/\n" SOURCE,
    };
    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        test_case("source %zu", i);
        assert_int_equal(fake_compile_text(context, sources[i]), 1);
        assert_int_equal(fake_compile_text(context, sources[i]), 1);
    }
    assert_int_equal(fake_cache_count(""), -1);
}

static void directives_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *text, *name; /* NULL: none */
        int quoted;
    } cases[] = {
        {"#include \"a.h\"", "a.h", 1},
        {"  #\tinclude<b/c.h>\n", "b/c.h", 0},
        {"x\n#include \"a b.h\" // why", "a b.h", 1},
        {"#inc\\\nlude \"a\\\n.h\"", "a.h", 1},
        {"\\\r\n#include \"a.h\"", "a.h", 1},
        {"/* a */#include \"a.h\"", "a.h", 1},
        {"#/**/include/**/\"a.h\"", "a.h", 1},
        {"%: include \"a.h\"", "a.h", 1},
        {"#if 0\n#include \"a.h\"\n#endif", "a.h", 1},
        {"// #include \"a.h\"", NULL, 0},
        {" * use #include to\n", NULL, 0},
        {"x #include \"a.h\"", NULL, 0},
        {"#define include \"a.h\"", NULL, 0},
        {"#includes \"a.h\"", NULL, 0},
        {"#", NULL, 0},
        {"#include_", NULL, 0},
        {"\\", NULL, 0},
        {"# /*", NULL, 0},
        {"", NULL, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tchi_include include = {0};
        const char *at = cases[i].text;
        test_case("%s", cases[i].text);
        bool found = tchi_include_next(&at, &include);
        assert_int_equal(found, cases[i].name != NULL);
        if (found) {
            CHECK(include.known && include.quoted == cases[i].quoted, "known %d, quoted %d", include.known,
                  include.quoted);
            assert_string_equal(include.name, cases[i].name);
            CHECK(!tchi_include_next(&at, &include), "found twice");
        }
    }
}

#define WITH_COMPILER(test) cmocka_unit_test_setup_teardown(test, fake_compiler_open, fake_compiler_close)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_digests),      WITH_COMPILER(everything_counts),       WITH_COMPILER(includes_count),
        WITH_COMPILER(some_sources_are_not_kept), cmocka_unit_test(directives_are_found),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
