/* Kernels: the library around a fake compiler (messages, logs, arguments as the kernel sees them), and a small kernel
 * with the real compiler of the device under test. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <unistd.h>

#include "kernel/kernel.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/messages.h"
#include "support/tensors.h"
#include "support/testing.h"

/* --- compiling -------------------------------------------------------------------------------------------------- */

WITH_COMPILER(what_the_compiler_says)
{
    tch_context *context = *state;
    tch_kernel *kernel = NULL;
    char log[200] = "before", tiny[10] = "before";
    const struct {
        char *log;
        size_t size;
        const char *expected;
    } logs[] = {
        {log, sizeof log, "mine.cu:1: error: it says so itself\n"}, {tiny, sizeof tiny, "mine.cu:1"}, {NULL, 0, NULL}};
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = "#error\n", config.name = "f", config.path = "mine.cu";
    for (size_t i = 0; i < TEST_COUNT(logs); i++) {
        config.log = logs[i].log, config.log_size = logs[i].size;
        tch_status status = tch_kernel_compile(context, &config, &kernel);
        CHECK(status == TCH_ERR_INVALID_ARGUMENT && kernel == NULL, "gave %s", tch_status_name(status));
        CHECK(logs[i].log == NULL || strcmp(logs[i].log, logs[i].expected) == 0, "the log is %s", logs[i].log);
        CHECK(strstr(tch_last_error(), logs[0].expected) != NULL &&
                  strstr(tch_last_error(), "kernel f in mine.cu") != NULL,
              "the message is %s", tch_last_error());
    }
    config.source = FAKE_SOURCE, config.path = NULL;
    config.log = log, config.log_size = sizeof log;
    for (int cached = 0; cached < 2; cached++) {
        CHECK_OK(tch_kernel_compile(context, &config, &kernel));
        assert_string_equal(log, cached ? "" : "kernel.cu:1: warning: it is only pretended\n");
        tch_kernel_destroy(kernel);
    }
    fake.line[0] = '\0';
    tch_status status = tch_kernel_compile(context, &config, &kernel);
    CHECK(status == TCH_ERR_UNAVAILABLE && strstr(tch_last_error(), "install") != NULL, "gave %s: %s",
          tch_status_name(status), tch_last_error());
    assert_int_equal(fake.loads, fake.unloads);
}

WITH_COMPILER(what_a_kernel_knows)
{
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    tch_kernel_parameter parameter;
    fake.parameter_count = 2;
    fake.parameters[1] = fake_number(TCH_PARAMETER_INT, 4);
    fake.max_threads = 512;
    tch_kernel *kernel = fake_kernel(*state, "space::f<1>");
    CHECK_OK(tch_kernel_get_info(kernel, &info));
    CHECK(info.parameters == 2 && info.max_threads == 512, "the info is not the backend's");
    CHECK_OK(tch_kernel_get_parameter(kernel, 1, &parameter));
    CHECK(parameter.what == TCH_PARAMETER_INT && parameter.size == 4, "parameter 1 is another");
    assert_string_equal(tch_kernel_name(kernel), "space::f<1>");
    tch_kernel_destroy(kernel);
}

/* --- rounding --------------------------------------------------------------------------------------------------- */

/* The value of 16 bits with `fraction` bits of fraction, by definition. */
static double value_of(uint16_t bits, int fraction)
{
    int exponent = (bits & 0x7fff) >> fraction;
    int bias = (1 << (14 - fraction)) - 1;
    double rest = bits & ((1 << fraction) - 1);
    double size = exponent == 0 ? ldexp(rest, 1 - bias - fraction)
                                : ldexp(rest + ldexp(1.0, fraction), exponent - bias - fraction);
    return bits & 0x8000 ? -size : size;
}

/* Every finite number is unchanged; midpoints round to even, neighbors to nearest. */
static void check_rounding(int fraction)
{
    const int infinity = ((1 << (15 - fraction)) - 1) << fraction;
    for (int bits = 0; bits < infinity; bits++) {
        double x = value_of((uint16_t)bits, fraction);
        double middle = (x + value_of((uint16_t)(bits + 1), fraction)) / 2;
        int even = bits + bits % 2;
        test_case("bits %04x with %d bits of fraction", bits, fraction);
        assert_int_equal(tchi_round16(x, fraction), bits);
        assert_int_equal(tchi_round16(-x, fraction), bits | 0x8000);
        assert_int_equal(tchi_round16(middle, fraction), even);
        assert_int_equal(tchi_round16(nextafter(middle, 0.0), fraction), bits);
        assert_int_equal(tchi_round16(nextafter(-middle, -INFINITY), fraction), (bits + 1) | 0x8000);
    }
    assert_int_equal(tchi_round16(INFINITY, fraction), infinity);
    assert_int_equal(tchi_round16(-1e300, fraction), infinity | 0x8000);
    assert_int_equal(tchi_round16(5e-324, fraction), 0);
    CHECK((tchi_round16(NAN, fraction) & 0x7fff) > infinity, "NaN became a number");
}

TEST(sixteen_bits)
{
    check_rounding(10);
    check_rounding(7);
}

/* --- arguments -------------------------------------------------------------------------------------------------- */

/* Launches a kernel of one parameter and compares the bytes it received. */
static void check_value(tch_context *context, tch_kernel_parameter parameter, tch_kernel_argument argument,
                        const void *expected)
{
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(3, 32);
    fake.parameter_count = 1;
    fake.parameters[0] = parameter;
    tch_kernel *kernel = fake_kernel(context, "f");
    int before = fake.launches;
    CHECK_OK(tch_kernel_launch(kernel, &shape, 1, &argument));
    CHECK(fake.launches == before + 1, "%d launches", fake.launches - before);
    CHECK(memcmp(fake.values[0], expected, (size_t)parameter.size) == 0, "the kernel got other bytes");
    tch_kernel_destroy(kernel);
}

WITH_COMPILER(integers)
{
    static const struct {
        tch_parameter_class what;
        int32_t size;
        int64_t number;
    } cases[] = {
        {TCH_PARAMETER_INT, 1, -128},       {TCH_PARAMETER_INT, 1, 127},         {TCH_PARAMETER_UINT, 1, 255},
        {TCH_PARAMETER_UINT, 1, 1},         {TCH_PARAMETER_INT, 2, -32768},      {TCH_PARAMETER_UINT, 2, 65535},
        {TCH_PARAMETER_INT, 4, INT32_MIN},  {TCH_PARAMETER_INT, 4, INT32_MAX},   {TCH_PARAMETER_UINT, 4, UINT32_MAX},
        {TCH_PARAMETER_INT, 8, INT64_MIN},  {TCH_PARAMETER_INT, 8, INT64_MAX},   {TCH_PARAMETER_UINT, 8, INT64_MAX},
        {TCH_PARAMETER_INT, 4, -123456789}, {TCH_PARAMETER_UINT, 4, 0x01020304},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t number = cases[i].number;
        tch_kernel_argument argument = TCH_ARGUMENT_INT(number);
        int8_t one = (int8_t)number;
        int16_t two = (int16_t)number;
        int32_t four = (int32_t)number;
        const void *expected[] = {NULL, &one, &two, NULL, &four, NULL, NULL, NULL, &number};
        test_case("%lld in %d bytes", (long long)number, cases[i].size);
        check_value(*state, fake_number(cases[i].what, cases[i].size), argument, expected[cases[i].size]);
    }
}

WITH_COMPILER(reals)
{
    static const double numbers[] = {0.0, -0.0, 1.0 / 3.0, 65504.0, 1e-30, INFINITY, -INFINITY, NAN, 65519.0};
    tch_kernel_parameter brain = fake_number(TCH_PARAMETER_REAL, 2);
    brain.is_brain = 1;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        tch_kernel_argument argument = TCH_ARGUMENT_REAL(numbers[i]);
        float single = (float)numbers[i];
        uint16_t half = tchi_round16(numbers[i], 10);
        uint16_t wide = tchi_round16(numbers[i], 7);
        test_case("%g", numbers[i]);
        check_value(*state, fake_number(TCH_PARAMETER_REAL, 8), argument, &numbers[i]);
        check_value(*state, fake_number(TCH_PARAMETER_REAL, 4), argument, &single);
        check_value(*state, fake_number(TCH_PARAMETER_REAL, 2), argument, &half);
        check_value(*state, brain, argument, &wide);
    }
}

WITH_COMPILER(tensors)
{
    static double memory[8];
    static const struct {
        tch_parameter_class pointee;
        int32_t size;
        tch_dtype dtype;
    } cases[] = {
        {TCH_PARAMETER_REAL, 8, {TCH_FLOAT, 64, 1}},  {TCH_PARAMETER_REAL, 4, {TCH_FLOAT, 32, 1}},
        {TCH_PARAMETER_REAL, 2, {TCH_FLOAT, 16, 1}},  {TCH_PARAMETER_INT, 4, {TCH_INT, 32, 1}},
        {TCH_PARAMETER_UINT, 4, {TCH_INT, 32, 1}},    {TCH_PARAMETER_INT, 8, {TCH_INT, 64, 1}},
        {TCH_PARAMETER_UINT, 1, {TCH_UINT, 8, 1}},    {TCH_PARAMETER_INT, 1, {TCH_INT, 8, 1}},
        {TCH_PARAMETER_UINT, 1, {6, 8, 1}},           {TCH_PARAMETER_OTHER, 0, {TCH_FLOAT, 32, 1}},
        {TCH_PARAMETER_OTHER, 0, {TCH_UINT, 8, 1}},   {TCH_PARAMETER_OTHER, 16, {TCH_FLOAT, 32, 1}},
        {TCH_PARAMETER_POINTER, 8, {TCH_INT, 64, 1}},
    };
    int64_t shape[] = {2};
    int64_t zeros[] = {0};
    const void *null = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tch_tensor x = tch_tensor_view(memory, cases[i].dtype, 1, shape);
        tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&x);
        test_case("pointer %zu", i);
        x.byte_offset = 16;
        x.strides = zeros;
        const void *expected = memory + 2;
        check_value(*state, fake_pointer(cases[i].pointee, cases[i].size), argument, &expected);
        argument.tensor = NULL;
        check_value(*state, fake_pointer(cases[i].pointee, cases[i].size), argument, &null);
        x = tch_tensor_view(NULL, cases[i].dtype, 1, zeros);
        argument.tensor = &x;
        check_value(*state, fake_pointer(cases[i].pointee, cases[i].size), argument, &null);
    }
    tch_kernel_parameter brain = fake_pointer(TCH_PARAMETER_REAL, 2);
    tch_tensor x = tch_tensor_view(memory, TCH_BFLOAT16, 1, shape);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&x);
    const void *expected = memory;
    brain.is_brain = 1;
    check_value(*state, brain, argument, &expected);
}

WITH_COMPILER(structs)
{
    static const char bytes[] = "twelve bytes";
    uint64_t large = UINT64_MAX;
    tch_kernel_argument argument = TCH_ARGUMENT_BYTES(bytes, 12);
    tch_kernel_argument number = TCH_ARGUMENT_BYTES(&large, sizeof large);
    check_value(*state, fake_number(TCH_PARAMETER_OTHER, 12), argument, bytes);
    check_value(*state, fake_number(TCH_PARAMETER_UINT, 8), number, &large);
}

/* The maximum number, of odd sizes: none overlap, and each is aligned for any type. */
WITH_COMPILER(many_arguments)
{
    tch_context *context = *state;
    static char bytes[64][64];
    tch_kernel_argument arguments[64];
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    fake.parameter_count = 64;
    for (int i = 0; i < 64; i++) {
        memset(bytes[i], i + 1, sizeof bytes[i]);
        fake.parameters[i] = fake_number(TCH_PARAMETER_OTHER, i % 2 == 0 ? 63 : 64 - i);
        arguments[i] = (tch_kernel_argument)TCH_ARGUMENT_BYTES(bytes[i], (size_t)fake.parameters[i].size);
    }
    tch_kernel *kernel = fake_kernel(context, "f");
    CHECK_OK(tch_kernel_launch(kernel, &shape, 64, arguments));
    for (int i = 0; i < 64; i++) {
        CHECK(memcmp(fake.values[i], bytes[i], (size_t)fake.parameters[i].size) == 0, "argument %d is another", i);
    }
    tch_kernel_destroy(kernel);
}

WITH_COMPILER(shapes)
{
    tch_context *context = *state;
    tch_kernel *kernel = fake_kernel(context, "f");
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(INT32_MAX, 16);
    shape.grid[1] = shape.grid[2] = 65535;
    shape.block[2] = 64;
    shape.shared_bytes = 1000;
    CHECK_OK(tch_kernel_launch(kernel, &shape, 0, NULL));
    CHECK(memcmp(fake.run.grid, shape.grid, sizeof shape.grid) == 0 &&
              memcmp(fake.run.block, shape.block, sizeof shape.block) == 0 && fake.run.shared_bytes == 1000,
          "the backend got another shape");
    for (int i = 0; i < 3; i++) {
        tch_kernel_shape none = shape;
        none.grid[i] = 0;
        CHECK_OK(tch_kernel_launch(kernel, &none, 0, NULL));
    }
    assert_int_equal(fake.launches, 1);
    tch_kernel_destroy(kernel);
}

/* --- with the device's compiler ---------------------------------------------------------------------------------- */

#define COUNT 1000

static const char real_source[] = "template <typename T>\n"
                                  "__global__ void axpy(T *y, const T *x, T a, int n)\n"
                                  "{\n"
                                  "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
                                  "    if (i < n) y[i] += a * x[i];\n"
                                  "}\n";

static void run_axpy(tch_context *context, tch_kernel *kernel)
{
    const int64_t size[] = {COUNT};
    double x[COUNT], ones[COUNT];
    test_tensor *tensors[] = {test_tensor_make(context, TCH_FLOAT32, 1, size, LAYOUT_CONTIGUOUS),
                              test_tensor_make(context, TCH_FLOAT32, 1, size, LAYOUT_CONTIGUOUS)};
    for (int i = 0; i < COUNT; i++) {
        x[i] = i, ones[i] = 1.0;
    }
    test_tensor_write(tensors[0], ones);
    test_tensor_write(tensors[1], x);
    tch_kernel_argument arguments[] = {TCH_ARGUMENT_TENSOR(&tensors[0]->tensor),
                                       TCH_ARGUMENT_TENSOR(&tensors[1]->tensor), TCH_ARGUMENT_REAL(0.5),
                                       TCH_ARGUMENT_INT(COUNT - 1)};
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT((COUNT + 255) / 256, 256);
    CHECK_OK(tch_kernel_launch(kernel, &shape, 4, arguments));
    test_tensor_check_unchanged(tensors[1], "x");
    double *y = test_tensor_read_written(tensors[0], "y");
    for (int i = 0; i < COUNT; i++) { /* exact: small multiples of a half */
        CHECK(y[i] == (i < COUNT - 1 ? 1.0 + 0.5 * i : 1.0), "y[%d] is %g", i, y[i]);
    }
}

/* Ends the test if the device has no compiler. */
static tch_kernel *compile_for_real(tch_context *context, const tch_kernel_config *config)
{
    tch_kernel *kernel = NULL;
    tch_status status = tch_kernel_compile(context, config, &kernel);
    if (status == TCH_ERR_UNAVAILABLE || status == TCH_ERR_UNSUPPORTED) {
        print_message("not run: %s\n", tch_last_error());
        skip();
    }
    CHECK_OK(status);
    return kernel;
}

/* File and folder names with special characters of shells and C. */
WITH_REAL_COMPILER(a_real_kernel_in_a_strange_place)
{
    tch_context *context = *state;
    char here[4096];
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    static const char folder[] = "-o \"b\" $(touch here) ; 'c' \\n @d";
    static const char file[] = "-o \"b\" $(touch here) ; 'c' \\n @d/-x \"k\\.cu";
    static const char header[] = "-o \"b\" $(touch here) ; 'c' \\n @d/scale.h";
    static const char includes[] = "#include \"scale.h\"\n";
    static const char wrong[] = "#include \"scale.h\"\n\nint x = nothing;\n";
    static const char *const options[] = {"-DFACTOR=(SCALE) /* $(touch here) */", "-DTEXT=\"a b\""};
    char text[sizeof includes + sizeof real_source];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(test_path(".")), 0);
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(text, sizeof text, "%s%s", includes, real_source);
    test_file_write(file, text, (int64_t)strlen(text));
    test_file_write(header, "#define SCALE 1\n", 16);
    config.path = file, config.name = "axpy<float>";
    config.option_count = 2, config.options = options;
    tch_kernel *kernel = compile_for_real(context, &config);
    run_axpy(context, kernel);
    tch_kernel_destroy(kernel);
    CHECK(access("here", F_OK) != 0 && access("b", F_OK) != 0, "a command was run");
    test_file_write(file, wrong, sizeof wrong - 1);
    tch_status status = tch_kernel_compile(context, &config, &kernel);
    CHECK(status == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), "nothing") != NULL, "gave %s: %s",
          tch_status_name(status), tch_last_error());
    CHECK(strstr(tch_last_error(), ":3:") != NULL || strstr(tch_last_error(), "(3)") != NULL,
          "the line is not in the message: %s", tch_last_error());
    assert_int_equal(chdir(here), 0);
}

TEST_MAIN(NULL, NULL)
