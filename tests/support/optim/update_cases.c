/* See update_cases.h. */
#include "update_cases.h"

#include "support/testing.h"

const world_types type_cases[TYPE_CASES] = {
    {"float64", TCH_SCALAR_F64, TCH_SCALAR_F64, TCH_SCALAR_F64, TCH_SCALAR_F64, false},
    {"float32", TCH_SCALAR_F32, TCH_SCALAR_F32, TCH_SCALAR_F32, TCH_SCALAR_F32, false},
    {"float32, float16 gradients", TCH_SCALAR_F32, TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_F32, false},
    {"float32, bfloat16 gradients and blocks", TCH_SCALAR_F32, TCH_SCALAR_F32, TCH_SCALAR_BF16, TCH_SCALAR_BF16, false},
    {"float16 with master", TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_F16, TCH_SCALAR_F32, true},
    {"float16", TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_F16, TCH_SCALAR_F16, false},
    {"bfloat16 with master", TCH_SCALAR_F32, TCH_SCALAR_BF16, TCH_SCALAR_BF16, TCH_SCALAR_F32, true},
    {"bfloat16", TCH_SCALAR_F32, TCH_SCALAR_BF16, TCH_SCALAR_BF16, TCH_SCALAR_F32, false},
    {"bfloat16 with master, float32 gradients", TCH_SCALAR_F32, TCH_SCALAR_BF16, TCH_SCALAR_F32, TCH_SCALAR_BF16, true},
    {"float64, float32 gradients", TCH_SCALAR_F64, TCH_SCALAR_F64, TCH_SCALAR_F32, TCH_SCALAR_F64, false},
};

const world_shape shape_cases[SHAPE_CASES] = {
    {1, 1, 0, 0, 0},     {1, 7, 0, 0, 0},     {3, 5, 2, 1, 0},    {3, 5, 2, 1, 1},     {0, 5, 0, 0, 0},
    {5, 0, 1, 1, 1},     {1, 4096, 0, 0, 0},  {1, 4097, 0, 0, 0}, {17, 33, 0, 0, 0},   {17, 33, 0, 3, 0},
    {33, 17, 7, 0, 1},   {64, 64, 0, 0, 1},   {65, 63, 1, 5, 1},  {130, 67, 64, 0, 1}, {2, 5000, 11, 3, 0},
    {3, 4500, 1, 0, 1},  {2500, 3, 2, 0, 0},  {2600, 2, 0, 3, 1}, {1, 300, 0, 0, 1},   {300, 1, 3, 0, 1},
    {96, 128, 32, 8, 0}, {1, 20011, 0, 0, 0},
};

const tch_hyper lively_hyper = {
    .lr = 0.05,
    .beta1 = 0.8,
    .beta2 = 0.97,
    .eps = 1e-4,
    .weight_decay = 0.3,
    .momentum = 0.7,
    .dampening = 0.2,
    .graft_beta2 = 0.9,
    .graft_eps = 1e-3,
};

const world_shape *many_shapes(void)
{
    static world_shape shapes[MANY_CHUNKS];
    for (int64_t k = 0; k < MANY_CHUNKS; k++) {
        shapes[k] = (world_shape){1 + k % 3, 1 + k % 23, k % 5, k % 2, (int32_t)(k % 4 == 3)};
    }
    shapes[0] = (world_shape){1, 30001, 0, 0, 0};
    shapes[MANY_CHUNKS - 1] = (world_shape){201, 99, 0, 0, 0};
    return shapes;
}

world *world_begin(tch_context *context, const world_types *types, const world_shape *shapes, int64_t count,
                   uint64_t stream)
{
    test_random random = test_random_stream(stream);
    world *w = world_open(context, types, shapes, count);
    world_fill(w, &random);
    world_set_hyper(w, &lively_hyper);
    world_set_steps(w, 3);
    world_advance(w, true);
    return w;
}

void world_run(world *w, world_operation operation, const ref_setting *setting)
{
    world_upload(w);
    CHECK_OK(operation(w, setting));
    world_download(w);
}
