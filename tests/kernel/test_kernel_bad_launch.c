/* Launching kernels with bad input: arguments that do not fit their parameters, shapes that no GPU has. Whatever it is,
 * the message says which argument and what was expected, and nothing is launched. */
#include <stdio.h>
#include <string.h>

#include "support/kernel/fake_compiler.h"
#include "support/messages.h"
#include "support/testing.h"

#define SOURCE "__global__ void f() {}\n"

static tch_kernel *compile(tch_context *context)
{
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(SOURCE);
    config.use_cache = 0;
    CHECK_OK(tch_kernel_compile(context, &config, &kernel));
    return kernel;
}

static void refuse_argument(tch_context *context, tch_kernel_parameter parameter, tch_kernel_argument argument,
                            tch_status expected, const char *words)
{
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    fake.parameter_count = 1;
    fake.parameters[0] = parameter;
    tch_kernel *kernel = compile(context);
    int before = fake.launches;
    test_check_refused(tch_kernel_launch(kernel, &shape, 1, &argument), expected, "arguments");
    CHECK(strstr(tch_last_error(), words) != NULL, "expected \"%s\" in: %s", words, tch_last_error());
    CHECK(fake.launches == before, "it was launched");
    tch_kernel_destroy(kernel);
}

static void numbers_that_do_not_fit(void **state)
{
    tch_context *context = *state;
    static const struct {
        tch_parameter_class what;
        int32_t size;
        int64_t number;
        const char *words;
    } cases[] = {
        {TCH_PARAMETER_INT, 1, 300, "300"},
        {TCH_PARAMETER_INT, 1, 128, "int8"},
        {TCH_PARAMETER_INT, 1, -129, "int8"},
        {TCH_PARAMETER_UINT, 1, 256, "uint8"},
        {TCH_PARAMETER_UINT, 1, -1, "uint8"},
        {TCH_PARAMETER_INT, 2, 32768, "int16"},
        {TCH_PARAMETER_UINT, 2, 65536, "uint16"},
        {TCH_PARAMETER_INT, 4, (int64_t)1 << 40, "int32"},
        {TCH_PARAMETER_INT, 4, (int64_t)INT32_MAX + 1, "int32"},
        {TCH_PARAMETER_INT, 4, (int64_t)INT32_MIN - 1, "int32"},
        {TCH_PARAMETER_UINT, 4, (int64_t)UINT32_MAX + 1, "uint32"},
        {TCH_PARAMETER_UINT, 8, -1, "uint64"},
        {TCH_PARAMETER_INT, 16, 1, "TCH_ARGUMENT_BYTES"},
        {TCH_PARAMETER_REAL, 4, 1, "TCH_ARGUMENT_REAL"},
        {TCH_PARAMETER_OTHER, 4, 1, "TCH_ARGUMENT_BYTES"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tch_kernel_argument argument = TCH_ARGUMENT_INT(cases[i].number);
        test_case("%s and %lld", cases[i].words, (long long)cases[i].number);
        refuse_argument(context, fake_number(cases[i].what, cases[i].size), argument, TCH_ERR_INVALID_ARGUMENT,
                        cases[i].words);
    }
    tch_kernel_argument one = TCH_ARGUMENT_INT(1);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), one, TCH_ERR_INVALID_ARGUMENT, "float *");
}

static void reals_that_do_not_fit(void **state)
{
    tch_context *context = *state;
    tch_kernel_parameter brain = fake_number(TCH_PARAMETER_REAL, 2);
    brain.is_brain = 1;
    tch_kernel_argument huge = TCH_ARGUMENT_REAL(1e300);
    tch_kernel_argument large = TCH_ARGUMENT_REAL(-65520.0);
    tch_kernel_argument edge = TCH_ARGUMENT_REAL(3.4e38);
    tch_kernel_argument half = TCH_ARGUMENT_REAL(0.5);
    refuse_argument(context, fake_number(TCH_PARAMETER_REAL, 4), huge, TCH_ERR_INVALID_ARGUMENT, "float");
    refuse_argument(context, fake_number(TCH_PARAMETER_REAL, 2), large, TCH_ERR_INVALID_ARGUMENT, "__half");
    refuse_argument(context, brain, edge, TCH_ERR_INVALID_ARGUMENT, "__nv_bfloat16");
    refuse_argument(context, fake_number(TCH_PARAMETER_INT, 4), half, TCH_ERR_INVALID_ARGUMENT, "TCH_ARGUMENT_INT");
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), half, TCH_ERR_INVALID_ARGUMENT, "a tensor");
    refuse_argument(context, fake_number(TCH_PARAMETER_OTHER, 8), half, TCH_ERR_INVALID_ARGUMENT, "8 bytes");
}

static void other_arguments(void **state)
{
    tch_context *context = *state;
    float numbers[3] = {0};
    tch_kernel_argument short_one = TCH_ARGUMENT_BYTES(numbers, 8);
    tch_kernel_argument nothing = TCH_ARGUMENT_BYTES(NULL, 12);
    tch_kernel_argument odd = TCH_ARGUMENT_INT(1);
    odd.kind = (tch_argument_kind)17;
    refuse_argument(context, fake_number(TCH_PARAMETER_OTHER, 12), short_one, TCH_ERR_INVALID_ARGUMENT, "12 bytes");
    refuse_argument(context, fake_number(TCH_PARAMETER_OTHER, 12), nothing, TCH_ERR_INVALID_ARGUMENT, "NULL");
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), short_one, TCH_ERR_INVALID_ARGUMENT, "a tensor");
    refuse_argument(context, fake_number(TCH_PARAMETER_INT, 4), odd, TCH_ERR_INVALID_ARGUMENT, "17");
}

static void tensors_that_do_not_fit(void **state)
{
    tch_context *context = *state;
    static double memory[8];
    int64_t shape[] = {2};
    int64_t negative[] = {-1};
    tch_tensor x = tch_tensor_view(memory, TCH_FLOAT32, 1, shape);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&x);
    tch_kernel_parameter brain = fake_pointer(TCH_PARAMETER_REAL, 2);
    brain.is_brain = brain.is_const = 1;
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 8), argument, TCH_ERR_DTYPE, "double *");
    refuse_argument(context, fake_pointer(TCH_PARAMETER_INT, 4), argument, TCH_ERR_DTYPE, "int32 *");
    refuse_argument(context, brain, argument, TCH_ERR_DTYPE, "const __nv_bfloat16 *");
    refuse_argument(context, fake_number(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_INVALID_ARGUMENT, "float");
    x.dtype = TCH_FLOAT16;
    refuse_argument(context, brain, argument, TCH_ERR_DTYPE, "float16");
    x.dtype = TCH_BFLOAT16;
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 2), argument, TCH_ERR_DTYPE, "bfloat16");
    x.dtype = TCH_INT64;
    refuse_argument(context, fake_pointer(TCH_PARAMETER_UINT, 4), argument, TCH_ERR_DTYPE, "uint32 *");
    x.dtype = (tch_dtype){TCH_FLOAT, 32, 4};
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_DTYPE, "x 4");
    x = tch_tensor_view(memory, TCH_FLOAT32, 1, shape);
    x.device = (tch_device){TCH_DEVICE_CUDA, 0};
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_DEVICE, "device");
    x = tch_tensor_view(NULL, TCH_FLOAT32, 1, shape);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_INVALID_ARGUMENT, "NULL");
    x = tch_tensor_view((char *)memory + 2, TCH_FLOAT32, 1, shape);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_LAYOUT, "aligned");
    x = tch_tensor_view(memory, TCH_FLOAT32, 1, negative);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_SHAPE, "shape");
    x = tch_tensor_view(memory, TCH_FLOAT32, 9, shape);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_SHAPE, "shape");
    x = tch_tensor_view(memory, TCH_FLOAT32, 1, NULL);
    refuse_argument(context, fake_pointer(TCH_PARAMETER_REAL, 4), argument, TCH_ERR_SHAPE, "shape");
}

static void bad_shapes(void **state)
{
    tch_context *context = *state;
    static const struct {
        int64_t grid[3], block[3], shared;
        const char *word;
    } cases[] = {
        {{-1, 1, 1}, {1, 1, 1}, 0, "grid[0] is -1"},  {{(int64_t)1 << 31, 1, 1}, {1, 1, 1}, 0, "grid[0]"},
        {{1, 65536, 1}, {1, 1, 1}, 0, "grid[1]"},     {{1, 1, 65536}, {1, 1, 1}, 0, "grid[2]"},
        {{1, 1, INT64_MIN}, {1, 1, 1}, 0, "grid[2]"}, {{1, 1, 1}, {0, 1, 1}, 0, "block[0]"},
        {{1, 1, 1}, {1, 1025, 1}, 0, "block[1]"},     {{1, 1, 1}, {1, 1, 65}, 0, "block[2]"},
        {{1, 1, 1}, {32, 33, 1}, 0, "1056 threads"},  {{1, 1, 1}, {1024, 1024, 64}, 0, "threads"},
        {{1, 1, 1}, {1, 1, 1}, -1, "shared_bytes"},   {{1, 1, 1}, {1, 1, 1}, (int64_t)1 << 31, "shared_bytes"},
        {{0, 1, 1}, {0, 1, 1}, 0, "block[0]"},
    };
    tch_kernel *kernel = compile(context);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
        memcpy(shape.grid, cases[i].grid, sizeof shape.grid);
        memcpy(shape.block, cases[i].block, sizeof shape.block);
        shape.shared_bytes = cases[i].shared;
        test_case("%s", cases[i].word);
        test_check_refused(tch_kernel_launch(kernel, &shape, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "shape");
        CHECK(strstr(tch_last_error(), cases[i].word) != NULL, "the message is %s", tch_last_error());
    }
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    tch_kernel_argument one = TCH_ARGUMENT_INT(1);
    test_check_refused(tch_kernel_launch(NULL, &shape, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "kernel");
    test_check_refused(tch_kernel_launch(kernel, NULL, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "shape");
    test_check_refused(tch_kernel_launch(kernel, &shape, 1, &one), TCH_ERR_INVALID_ARGUMENT, "count");
    test_check_refused(tch_kernel_launch(kernel, &shape, -1, NULL), TCH_ERR_INVALID_ARGUMENT, "count");
    shape.struct_size = 0;
    test_check_refused(tch_kernel_launch(kernel, &shape, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "shape");
    tch_kernel_destroy(kernel);
    fake.parameter_count = 1;
    fake.parameters[0] = fake_number(TCH_PARAMETER_INT, 4);
    kernel = compile(context);
    shape.struct_size = sizeof shape;
    test_check_refused(tch_kernel_launch(kernel, &shape, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "count");
    test_check_refused(tch_kernel_launch(kernel, &shape, 1, NULL), TCH_ERR_INVALID_ARGUMENT, "arguments");
    tch_kernel_destroy(kernel);
    assert_int_equal(fake.launches, 0);
}

static void bad_questions(void **state)
{
    tch_kernel *kernel = compile(*state);
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    tch_kernel_parameter parameter;
    test_check_refused(tch_kernel_get_info(NULL, &info), TCH_ERR_INVALID_ARGUMENT, "kernel");
    test_check_refused(tch_kernel_get_info(kernel, NULL), TCH_ERR_INVALID_ARGUMENT, "info");
    info.struct_size = 1;
    test_check_refused(tch_kernel_get_info(kernel, &info), TCH_ERR_INVALID_ARGUMENT, "info");
    test_check_refused(tch_kernel_get_parameter(NULL, 0, &parameter), TCH_ERR_INVALID_ARGUMENT, "kernel");
    test_check_refused(tch_kernel_get_parameter(kernel, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_check_refused(tch_kernel_get_parameter(kernel, 0, &parameter), TCH_ERR_INVALID_ARGUMENT, "index");
    test_check_refused(tch_kernel_get_parameter(kernel, -1, &parameter), TCH_ERR_INVALID_ARGUMENT, "index");
    assert_null(tch_kernel_name(NULL));
    tch_kernel_destroy(NULL);
    tch_kernel_destroy(kernel);
}

#define WITH_COMPILER(test) cmocka_unit_test_setup_teardown(test, fake_compiler_open, fake_compiler_close)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        WITH_COMPILER(numbers_that_do_not_fit),
        WITH_COMPILER(reals_that_do_not_fit),
        WITH_COMPILER(other_arguments),
        WITH_COMPILER(tensors_that_do_not_fit),
        WITH_COMPILER(bad_shapes),
        WITH_COMPILER(bad_questions),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
