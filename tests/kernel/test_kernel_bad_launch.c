/* Invalid launches: arguments that do not match their parameters, and shapes that no GPU supports. The message names
 * the argument and what was expected, and nothing is launched. */
#include "support/bad_input.h"
#include "support/kernel/fake_compiler.h"
#include "support/testing.h"

static void refuse_argument(tch_context *context, tch_kernel_parameter parameter, tch_kernel_argument argument,
                            tch_status expected, const char *words)
{
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    fake.parameter_count = 1;
    fake.parameters[0] = parameter;
    tch_kernel *kernel = fake_kernel(context, "f");
    int before = fake.launches;
    test_check_refused(tch_kernel_launch(kernel, &shape, 1, &argument), expected, "arguments");
    CHECK(strstr(tch_last_error(), words) != NULL, "expected \"%s\" in: %s", words, tch_last_error());
    CHECK(fake.launches == before, "it was launched");
    tch_kernel_destroy(kernel);
}

static tch_kernel_parameter brain(tch_kernel_parameter parameter)
{
    parameter.is_brain = 1;
    parameter.is_const = parameter.what == TCH_PARAMETER_POINTER;
    return parameter;
}

WITH_COMPILER(numbers_that_do_not_fit)
{
    float numbers[3] = {0};
    const struct {
        tch_kernel_parameter parameter;
        tch_kernel_argument argument;
        const char *words;
    } cases[] = {
        {fake_number(TCH_PARAMETER_INT, 1), TCH_ARGUMENT_INT(300), "300"},
        {fake_number(TCH_PARAMETER_INT, 1), TCH_ARGUMENT_INT(128), "int8"},
        {fake_number(TCH_PARAMETER_INT, 1), TCH_ARGUMENT_INT(-129), "int8"},
        {fake_number(TCH_PARAMETER_UINT, 1), TCH_ARGUMENT_INT(256), "uint8"},
        {fake_number(TCH_PARAMETER_UINT, 1), TCH_ARGUMENT_INT(-1), "uint8"},
        {fake_number(TCH_PARAMETER_INT, 2), TCH_ARGUMENT_INT(32768), "int16"},
        {fake_number(TCH_PARAMETER_UINT, 2), TCH_ARGUMENT_INT(65536), "uint16"},
        {fake_number(TCH_PARAMETER_INT, 4), TCH_ARGUMENT_INT((int64_t)1 << 40), "int32"},
        {fake_number(TCH_PARAMETER_INT, 4), TCH_ARGUMENT_INT((int64_t)INT32_MAX + 1), "int32"},
        {fake_number(TCH_PARAMETER_INT, 4), TCH_ARGUMENT_INT((int64_t)INT32_MIN - 1), "int32"},
        {fake_number(TCH_PARAMETER_UINT, 4), TCH_ARGUMENT_INT((int64_t)UINT32_MAX + 1), "uint32"},
        {fake_number(TCH_PARAMETER_UINT, 8), TCH_ARGUMENT_INT(-1), "uint64"},
        {fake_number(TCH_PARAMETER_INT, 16), TCH_ARGUMENT_INT(1), "TCH_ARGUMENT_BYTES"},
        {fake_number(TCH_PARAMETER_REAL, 4), TCH_ARGUMENT_INT(1), "TCH_ARGUMENT_REAL"},
        {fake_number(TCH_PARAMETER_OTHER, 4), TCH_ARGUMENT_INT(1), "TCH_ARGUMENT_BYTES"},
        {fake_pointer(TCH_PARAMETER_REAL, 4), TCH_ARGUMENT_INT(1), "float *"},
        {fake_number(TCH_PARAMETER_REAL, 4), TCH_ARGUMENT_REAL(1e300), "float"},
        {fake_number(TCH_PARAMETER_REAL, 2), TCH_ARGUMENT_REAL(-65520.0), "__half"},
        {brain(fake_number(TCH_PARAMETER_REAL, 2)), TCH_ARGUMENT_REAL(3.4e38), "__nv_bfloat16"},
        {fake_number(TCH_PARAMETER_INT, 4), TCH_ARGUMENT_REAL(0.5), "TCH_ARGUMENT_INT"},
        {fake_pointer(TCH_PARAMETER_REAL, 4), TCH_ARGUMENT_REAL(0.5), "a tensor"},
        {fake_number(TCH_PARAMETER_OTHER, 8), TCH_ARGUMENT_REAL(0.5), "8 bytes"},
        {fake_number(TCH_PARAMETER_OTHER, 12), TCH_ARGUMENT_BYTES(numbers, 8), "12 bytes"},
        {fake_number(TCH_PARAMETER_OTHER, 12), TCH_ARGUMENT_BYTES(NULL, 12), "NULL"},
        {fake_pointer(TCH_PARAMETER_REAL, 4), TCH_ARGUMENT_BYTES(numbers, 8), "a tensor"},
        {fake_number(TCH_PARAMETER_INT, 4), {(tch_argument_kind)17, NULL, 1, 0.0, NULL, 0}, "17"},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("row %d: %s", (int)i, cases[i].words);
        refuse_argument(*state, cases[i].parameter, cases[i].argument, TCH_ERR_INVALID_ARGUMENT, cases[i].words);
    }
}

/* The defect of a float32 tensor, and words of the message. */
WITH_COMPILER(tensors_that_do_not_fit)
{
    const test_flaw none = {"", TCH_ERR_DTYPE, PART_OFFSET, 0, {0}};
    const test_flaw none_for_a_number = {"", TCH_ERR_INVALID_ARGUMENT, PART_OFFSET, 0, {0}};
    const tch_kernel_parameter floats = fake_pointer(TCH_PARAMETER_REAL, 4);
    const struct {
        tch_kernel_parameter parameter;
        test_flaw flaw;
        const char *words;
    } cases[] = {
        {fake_pointer(TCH_PARAMETER_REAL, 8), none, "double *"},
        {fake_pointer(TCH_PARAMETER_INT, 4), none, "int32 *"},
        {brain(fake_pointer(TCH_PARAMETER_REAL, 2)), none, "const __nv_bfloat16 *"},
        {fake_number(TCH_PARAMETER_REAL, 4), none_for_a_number, "float"},
        {brain(fake_pointer(TCH_PARAMETER_REAL, 2)), {"", TCH_ERR_DTYPE, PART_DTYPE, 0, TCH_FLOAT16}, "float16"},
        {fake_pointer(TCH_PARAMETER_REAL, 2), {"", TCH_ERR_DTYPE, PART_DTYPE, 0, TCH_BFLOAT16}, "bfloat16"},
        {fake_pointer(TCH_PARAMETER_UINT, 4), {"", TCH_ERR_DTYPE, PART_DTYPE, 0, TCH_INT64}, "uint32 *"},
        {floats, {"", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 32, 4}}, "x 4"},
        {floats, {"", TCH_ERR_DEVICE, PART_DEVICE, TCH_DEVICE_CUDA, {0}}, "device"},
        {floats, {"", TCH_ERR_INVALID_ARGUMENT, PART_DATA, 0, {0}}, "NULL"},
        {floats, {"", TCH_ERR_LAYOUT, PART_OFFSET, 2, {0}}, "aligned"},
        {floats, {"", TCH_ERR_SHAPE, PART_SIZE, -1, {0}}, "shape"},
        {floats, {"", TCH_ERR_SHAPE, PART_RANK, 9, {0}}, "shape"},
        {floats, {"", TCH_ERR_SHAPE, PART_SHAPE, 0, {0}}, "shape"},
    };
    static double memory[8];
    int64_t shape[] = {2};
    tch_tensor x = tch_tensor_view(memory, TCH_FLOAT32, 1, shape);
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_broken b;
        tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(test_broken_make(&b, &x, &cases[i].flaw));
        test_case("row %d: %s", (int)i, cases[i].words);
        refuse_argument(*state, cases[i].parameter, argument, cases[i].flaw.expected, cases[i].words);
    }
}

WITH_COMPILER(bad_shapes)
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
    tch_kernel *kernel = fake_kernel(context, "f");
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
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
    kernel = fake_kernel(context, "f");
    shape.struct_size = sizeof shape;
    test_check_refused(tch_kernel_launch(kernel, &shape, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "count");
    test_check_refused(tch_kernel_launch(kernel, &shape, 1, NULL), TCH_ERR_INVALID_ARGUMENT, "arguments");
    tch_kernel_destroy(kernel);
    assert_int_equal(fake.launches, 0);
}

WITH_COMPILER(bad_questions)
{
    tch_kernel *kernel = fake_kernel(*state, "f");
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

TEST_MAIN(NULL, NULL)
