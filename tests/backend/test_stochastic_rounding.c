/* Stochastic rounding of bfloat16 parameters, bit by bit: SGD through the operation table, with steps that are exact in
 * float32, so that only the random bits of torchium/backend/update.h decide. Unbiasedness follows from the known
 * answers of the generator, which test_optim_steps.c checks for an optimizer as well. */
#include "support/backend/device_matrices.h"
#include "support/elements.h"
#include "support/tensors.h"
#include "support/testing.h"

#define LR (131.0 * 0x1p-23) /* times an 8-bit integer: 16 bits, the last of which is the last of 1 in float32 */

typedef struct rounding_case {
    uint64_t seed;
    int64_t rows, cols, first;
    int32_t parameter;
} rounding_case;

static const rounding_case cases[] = {
    {0, 1, 1, 0, 0},
    {1, 3, 5, 7, 2},
    {0x123456789abcdef0u, 17, 33, 1, 3},
    {0x123456789abcdef0u, 1, 4097, ((int64_t)1 << 34) - 3, 1}, /* across the low word of the counter */
    {5, 2, 5000, 6, 77},
    {6, 64, 128, 0, 4},
};

static void *address(const test_tensor *t)
{
    return (char *)t->tensor.data + t->tensor.byte_offset;
}

/* One step over one rectangle. */
static void step_sgd(tch_context *context, const rounding_case *c, double number, test_tensor *param, test_tensor *grad)
{
    const tch_hyper hyper = {.lr = LR};
    const tch_clock clock = {.step = number, .correction1 = 1.0, .correction2 = 1.0};
    tch_rect rect = {.param = address(param),
                     .grad = address(grad),
                     .clock = device_copy(context, &clock, sizeof clock),
                     .rows = c->rows,
                     .cols = c->cols,
                     .stride = c->rows == 1 ? c->cols : param->strides[0],
                     .first = c->first,
                     .parameter = c->parameter,
                     .factor = 1.0};
    tch_update update = {.rects = &rect,
                         .count = 1,
                         .real = TCH_SCALAR_F32,
                         .param_type = TCH_SCALAR_BF16,
                         .grad_type = TCH_SCALAR_F32,
                         .block_type = TCH_SCALAR_F32,
                         .hyper = device_copy(context, &hyper, sizeof hyper),
                         .stochastic = 1,
                         .seed = c->seed};
    CHECK_OK(context->backend->device->begin(context->state));
    const tch_elementwise_rule sgd = {.kind = TCH_ELEMENTWISE_SGD};
    CHECK_OK(context->backend->update->elementwise(context->state, &update, &sgd));
    if (context->backend->device->end != NULL) {
        context->backend->device->end(context->state);
    }
    CHECK_OK(tch_context_synchronize(context));
}

/* The random bits are added below the kept ones, and the sum is truncated. */
static double rounded(float value, const rounding_case *c, double number, uint64_t element)
{
    uint32_t counter[4] = {(uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), (uint32_t)c->parameter,
                           (uint32_t)number};
    uint32_t key[2] = {(uint32_t)c->seed, (uint32_t)(c->seed >> 32)};
    uint32_t words[4], bits;
    test_philox(counter, key, words);
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + (words[element % 4] & 0xFFFFu)) & 0xFFFF0000u;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void check_bits(tch_context *context, const rounding_case *c, uint64_t stream)
{
    const int64_t shape[] = {c->rows, c->cols};
    test_layout layout = c->rows == 1 ? LAYOUT_OFFSET : c->cols % 2 ? LAYOUT_ROW_GAPS : LAYOUT_CONTIGUOUS;
    test_tensor *param = test_tensor_make(context, TCH_BFLOAT16, 2, shape, layout);
    test_tensor *grad = test_tensor_make(context, TCH_FLOAT32, 2, shape, layout);
    test_random random = test_random_stream(stream);
    double *values = test_alloc((size_t)param->count * sizeof *values);
    for (int number = 1; number <= 2; number++) {
        test_case("%lld by %lld, seed %llx, step %d", (long long)c->rows, (long long)c->cols,
                  (unsigned long long)c->seed, number);
        for (int64_t i = 0; i < param->count; i++) {
            double sign = test_random_uniform(&random) < 0.5 ? -1.0 : 1.0;
            values[i] = sign * (1.0 + test_random_uniform(&random) * 0.9);
        }
        test_tensor_write(param, values);
        double *before = test_tensor_read(param);
        for (int64_t i = 0; i < grad->count; i++) {
            values[i] = floor(test_random_uniform(&random) * 511.0) - 255.0;
        }
        test_tensor_write(grad, values);
        step_sgd(context, c, number, param, grad);
        double *after = test_tensor_read(param);
        for (int64_t i = 0; i < param->count; i++) {
            int64_t stride = c->rows == 1 ? c->cols : param->strides[0];
            uint64_t element = (uint64_t)(c->first + i / c->cols * stride + i % c->cols);
            double expected = rounded((float)(before[i] - LR * values[i]), c, number, element);
            CHECK(after[i] == expected, "element %lld: %.9g, expected %.9g", (long long)i, after[i], expected);
        }
        test_tensor_check_written(param, "the parameter");
        test_tensor_check_unchanged(grad, "the gradient");
    }
}

TEST(random_bits_decide)
{
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        check_bits(*state, &cases[i], 900 + i);
    }
}

TEST(philox_gives_its_known_answers)
{
    static const uint32_t known[2][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}};
    for (int i = 0; i < 2; i++) {
        uint32_t fill = i == 0 ? 0 : 0xffffffffu;
        uint32_t counter[4] = {fill, fill, fill, fill};
        uint32_t key[2] = {fill, fill};
        uint32_t out[4];
        test_philox(counter, key, out);
        assert_memory_equal(out, known[i], sizeof out);
    }
}

/* Non-finite values are not rounded randomly: infinities stay, and every NaN stays a NaN, whatever its bits. */
TEST(what_is_not_finite_stays)
{
    static const uint32_t gradients[5] = {0x7f800000u, 0xff800000u, 0x7f800001u, 0x7fffffffu, 0xffc00000u};
    static const rounding_case c = {7, 1, 5, 0, 0};
    tch_context *context = *state;
    const int64_t shape[] = {1, 5};
    test_tensor *param = test_tensor_make(context, TCH_BFLOAT16, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor *grad = test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(param, (const double[]){1, 1, 1, 1, 1});
    CHECK_OK(context->backend->device->copy_bytes(context->state, address(grad), gradients, sizeof gradients,
                                                  TCH_COPY_TO_DEVICE));
    step_sgd(context, &c, 1.0, param, grad);
    double *got = test_tensor_read(param);
    for (int j = 0; j < 5; j++) {
        test_case("element %d", j);
        CHECK(j < 2 ? got[j] == (j == 0 ? -INFINITY : INFINITY) : isnan(got[j]), "got %g", got[j]);
    }
}

TEST_MAIN(test_open_context, test_close_context)
