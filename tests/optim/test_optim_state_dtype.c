/* Moments in bfloat16 and in eight bits. Every step of AdamW, Lion and SGD is recomputed here in float64 from the
 * library's stored moments: parameters must agree to float32's rounding, and the new moments must be those selected by
 * the random bits of torchium/backend/update.h, so that rounding is unbiased. Also first moments over many steps,
 * second moments that never become 0, sizes around a block, skipped steps, and checkpoints.
 *
 * Codes are decoded by their definition in torchium/backend/update.h, and random bits come from the tests' own
 * generator. */
#include "support/elements.h"
#include "support/files.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define BLOCK 128

/* Around a block and around the minimum size, a column-major matrix, one that stays float32. */
static const trial_shape shapes[] = {
    {.ndim = 1, .shape = {4096}},
    {.ndim = 1, .shape = {4097}, .gradient = LAYOUT_OFFSET},
    {.ndim = 2, .shape = {67, 97}, .order = {1, 0}, .elementwise = 1, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 1, .shape = {4095}},
    {.ndim = 1, .shape = {8191}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static const char *const dtype_names[] = {"float32", "bfloat16", "int8"};

static tch_optim_config config_of(tch_optim_kind kind, tch_state_dtype dtype)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = kind == TCH_OPTIM_LION ? 1e-3 : 1e-2;
    c.adamw.lr = 1e-2;
    c.momentum = kind == TCH_OPTIM_SGD ? 0.9 : c.momentum;
    c.weight_decay = 0.1;
    c.memory.state_dtype = dtype;
    c.memory.seed = 0x123456789ABCDEFu;
    return c;
}

/* An optimizer of all shapes. */
static tch_optim_config open_kept(trial *t, tch_context *context, tch_optim_kind kind, int dtype)
{
    tch_optim_config c = config_of(kind, (tch_state_dtype)dtype);
    test_case("%s, moments in %s", tch_optim_kind_name(kind), dtype_names[dtype]);
    trial_open(t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    return c;
}

/* --- decoding ---------------------------------------------------------------------------------------------------- */

static tch_tensor *state_of(const trial *t, int32_t parameter, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "parameter%d/%s", parameter, what);
    return trial_state(t, name);
}

static float *scales_of(const trial *t, int32_t parameter, const char *what)
{
    char name[32];
    snprintf(name, sizeof name, "%s_scale", what);
    const tch_tensor *scales = state_of(t, parameter, name);
    int64_t blocks = (t->parameters[parameter].memory->count + BLOCK - 1) / BLOCK;
    CHECK(tch_tensor_numel(scales) == blocks, "not a scale for each block");
    return trial_read_bytes(t, scales);
}

/* A float32's bits as a number, linearly interpolated between two float32. */
static double bits_of(double x)
{
    int exponent;
    double fraction = frexp(x, &exponent);
    return x == 0.0 ? 0.0 : ldexp(exponent + 125 + 2.0 * fraction, 23);
}

static double of_bits(double bits)
{
    int exponent = (int)floor(ldexp(bits, -23));
    return ldexp(1.0 + ldexp(bits, -23) - exponent, exponent - 127);
}

/* The codes of a block: from `floor` upwards, `step` bits apart, and the subtracted offset. */
typedef struct lattice {
    double floor, top, step, raised;
} lattice;

static lattice lattice_of(int second, float scale)
{
    uint32_t word;
    memcpy(&word, &scale, sizeof word);
    lattice l = {.floor = ldexp(word & 0xFFFF, 16), .top = ldexp(word >> 16, 16)};
    if (word != 0 && !second) {
        l.raised = of_bits(l.floor);
        l.top = bits_of(of_bits(l.top) + l.raised);
    }
    l.step = second ? exp2(ceil(log2((l.top - l.floor) / 254.0))) : ceil((l.top - l.floor) / 127.0);
    return l;
}

static double decode(int second, unsigned code, float scale)
{
    lattice l = lattice_of(second, scale);
    int c = (int)(second ? code : code & 127);
    double magnitude = c == 0 ? 0.0 : of_bits(fmin(l.floor + (c - second) * l.step, l.top)) - l.raised;
    return !second && code > 127 ? -magnitude : magnitude;
}

/* A moment in memory order, in any form. */
static double *moment_of(const trial *t, int32_t parameter, const char *what, int second)
{
    int64_t count = t->parameters[parameter].memory->count;
    const tch_tensor *tensor = state_of(t, parameter, what);
    if (!tch_dtype_equal(tensor->dtype, TCH_INT32)) {
        tch_tensor flat = *tensor;
        flat.ndim = 1;
        flat.shape = &count;
        flat.strides = NULL;
        return trial_read(t, &flat);
    }
    CHECK(tch_tensor_numel(tensor) == (count + 3) / 4, "%lld words", (long long)tch_tensor_numel(tensor));
    unsigned char *codes = trial_read_bytes(t, tensor);
    float *scales = scales_of(t, parameter, what);
    double *values = test_alloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        values[i] = decode(second, codes[i], scales[i / BLOCK]);
    }
    for (int64_t i = count; i % 4 != 0; i++) {
        CHECK(codes[i] == 0, "the code behind the last is %d", codes[i]);
    }
    return values;
}

/* --- expected values --------------------------------------------------------------------------------------------- */

static uint32_t random_half(const tch_optim_config *c, int32_t parameter, int64_t step, int64_t element, int second)
{
    const uint32_t key[2] = {(uint32_t)c->memory.seed, (uint32_t)(c->memory.seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)(element / 4), 0, (uint32_t)parameter + 0x80000000u, (uint32_t)step};
    uint32_t words[4];
    test_philox(counter, key, words);
    return second ? words[element % 4] >> 16 : words[element % 4] & 0xFFFF;
}

/* The two representable neighbors of a magnitude; both are equal if it is representable. */
typedef struct neighbors {
    double below, above;
} neighbors;

/* A second moment below the least code becomes that, never 0. */
static neighbors neighboring_codes(int second, float scale, double magnitude)
{
    lattice l = lattice_of(second, scale);
    if (magnitude == 0.0) {
        return (neighbors){0.0, 0.0};
    }
    double steps = fmax((bits_of(magnitude + l.raised) - l.floor) / l.step, 0.0);
    double below = of_bits(fmin(l.floor + floor(steps) * l.step, l.top)) - l.raised;
    double above = of_bits(fmin(l.floor + ceil(steps) * l.step, l.top)) - l.raised;
    return (neighbors){below, above};
}

static neighbors neighbors_of(tch_state_dtype dtype, int second, float scale, double magnitude)
{
    if (dtype == TCH_STATE_FLOAT32) {
        return (neighbors){magnitude, magnitude};
    }
    if (dtype == TCH_STATE_INT8) {
        return neighboring_codes(second, scale, magnitude);
    }
    if (magnitude < 0x1p-126) {
        return (neighbors){0.0, magnitude > 0.0 ? 0x1p-126 : 0.0};
    }
    int exponent;
    double fraction = frexp(magnitude, &exponent) * 256.0;
    return (neighbors){ldexp(floor(fraction) / 256.0, exponent), ldexp(ceil(fraction) / 256.0, exponent)};
}

/* The fraction of a number between two neighbors: linear for bfloat16, in bits for codes. */
static double part_above(tch_state_dtype dtype, int second, float scale, neighbors n, double magnitude)
{
    if (dtype != TCH_STATE_INT8) {
        return (magnitude - n.below) / (n.above - n.below);
    }
    lattice l = lattice_of(second, scale);
    return (bits_of(magnitude + l.raised) - bits_of(n.below + l.raised)) / l.step;
}

/* A number, the sum of absolute values of its terms, and its previous value: float32's error is some units of that
 * size. */
typedef struct sum {
    double value, size, was;
} sum;

/* Twice the change of a first moment minus the code above it, negated: rounding is to nearest where that is not above
 * 0, except above the last code but one. */
static double short_of_a_code(float scale, sum exact)
{
    lattice l = lattice_of(0, scale);
    double next = bits_of(fabs(exact.value) + l.raised) + l.step;
    return next > l.top ? HUGE_VAL : of_bits(next) - l.raised - fabs(exact.value) - 2.0 * fabs(exact.value - exact.was);
}

/* Stochastic rounding goes up if the fraction exceeds the random bits. If the value is within float32's rounding of the
 * decision, either is right; `open` counts those. First moments but AdamW's are rounded to nearest after a change by
 * half a code. */
static void check_kept(tch_state_dtype dtype, int second, bool nearest, float scale, sum exact, double kept,
                       uint32_t random, int64_t *open)
{
    double value = exact.value;
    neighbors n = neighbors_of(dtype, second, scale, fabs(value));
    double step = n.above - n.below;
    double slack = 0x1p-21 * exact.size + 1e-30;
    double magnitude = kept * value < 0.0 ? -fabs(kept) : fabs(kept);
    if (step <= 4.0 * slack) {
        CHECK(magnitude >= n.below - 2.0 * slack && magnitude <= n.above + 2.0 * slack, "%.9g is kept as %.9g", value,
              kept);
        return;
    }
    CHECK(magnitude >= n.below - step && magnitude <= n.above + step, "%.9g is kept as %.9g, far from %.9g and %.9g",
          value, kept, n.below, n.above);
    double part = part_above(dtype, second, scale, n, fabs(value));
    double missing = nearest && dtype == TCH_STATE_INT8 ? short_of_a_code(scale, exact) : HUGE_VAL;
    double least = missing <= 0.0 ? 0.5 : 1.0 - (random + 0.5) / 65536.0;
    double doubt = 2.0 * slack / step + (dtype == TCH_STATE_INT8 ? 0x1p-11 : 0x1p-16);
    if (fabs(part - least) <= doubt || fabs(missing) <= doubt * step) {
        ++*open;
        return;
    }
    double expected = part > least ? n.above : n.below;
    CHECK(fabs(magnitude - expected) <= slack + 1e-6 * expected,
          "%.9g is kept as %.9g, expected %.9g by the random bits", value, kept, expected);
}

/* --- one step ---------------------------------------------------------------------------------------------------- */

typedef struct element {
    double p, g;
    sum m, v;
} element;

static void average(sum *s, double keep, double take, double x)
{
    s->size = fabs(keep * s->value) + fabs(take * x);
    s->was = s->value;
    s->value = keep * s->value + take * x;
}

/* True if Lion's sign is undetermined. */
static bool reference_step(const tch_optim_config *c, int64_t step, element *e)
{
    bool rest = c->kind != TCH_OPTIM_ADAMW;
    double lr = rest ? c->adamw.lr : c->lr;
    double beta1 = rest ? c->adamw.beta1 : c->beta1;
    double beta2 = rest ? c->adamw.beta2 : c->beta2;
    if (c->kind == TCH_OPTIM_LION) {
        sum direction = e->m;
        average(&direction, c->beta1, 1.0 - c->beta1, e->g);
        average(&e->m, c->beta2, 1.0 - c->beta2, e->g);
        e->p = (1.0 - c->lr * c->weight_decay) * e->p - c->lr * ((direction.value > 0) - (direction.value < 0));
        return fabs(direction.value) <= 0x1p-21 * direction.size;
    }
    if (c->kind == TCH_OPTIM_SGD) {
        double g = e->g + c->weight_decay * e->p;
        average(&e->m, step == 1 ? 0.0 : c->momentum, 1.0, g);
        e->m.size += fabs(c->weight_decay * e->p);
        e->p -= c->lr * e->m.value;
        return false;
    }
    average(&e->m, beta1, 1.0 - beta1, e->g);
    average(&e->v, beta2, 1.0 - beta2, e->g * e->g);
    double root = sqrt(e->v.value / (1.0 - pow(beta2, (double)step))) + (rest ? c->adamw.eps : c->eps);
    e->p = (1.0 - lr * c->weight_decay) * e->p - lr * e->m.value / (1.0 - pow(beta1, (double)step)) / root;
    return false;
}

static const char *first_name(const tch_optim_config *c)
{
    return c->kind == TCH_OPTIM_SGD ? "momentum_buffer" : "exp_avg";
}

static bool has_second(const tch_optim_config *c)
{
    return c->kind != TCH_OPTIM_SGD && c->kind != TCH_OPTIM_LION;
}

static tch_state_dtype kept_as(const trial *t, int32_t i, const tch_optim_config *c)
{
    return t->parameters[i].memory->count < 4096 ? TCH_STATE_FLOAT32 : c->memory.state_dtype;
}

/* top is the largest magnitude, rounded up; floor is the smallest, rounded down, or for first moments what the
 * optimizer needs: see src/core/codes.h. Numbers rounded in float32 may be one bfloat16 off. */
static void check_scale(const tch_optim_config *c, int second, float scale, float squares, int64_t count,
                        const sum *exact)
{
    uint32_t word;
    uint32_t range;
    double largest = 0.0;
    double least = HUGE_VAL;
    memcpy(&word, &scale, sizeof word);
    memcpy(&range, &squares, sizeof range);
    int top = (int)(word >> 16);
    int bottom = (int)(word & 0xFFFF);
    bool pairs = !second && c->kind == TCH_OPTIM_LION;
    for (int64_t k = 0; k < count; k++) {
        double size = fabs(exact[k].value);
        double next = k + 1 < count ? fabs(exact[k + 1].value) : 0.0;
        double change = fabs(exact[k].value - exact[k].was);
        change = k + 1 < count ? fmax(change, fabs(exact[k + 1].value - exact[k + 1].was)) : change;
        double one = !pairs ? size : k % 2 == 0 ? fmax(fmax(size, next), 16.0 * change) : HUGE_VAL;
        largest = fmax(largest, size);
        least = one > 0.0 ? fmin(least, one) : least;
    }
    CHECK(fabs(top - ceil(bits_of(largest) / 65536.0)) <= 1, "top is %#x, the largest %.9g", (unsigned)top, largest);
    double below = floor(bits_of(pairs ? least / 4.0 : least) / 65536.0);
    int expected = second || pairs            ? (int)below
                   : c->kind == TCH_OPTIM_SGD ? top - 2 * 128
                                              : top + 128 - ((int)(range >> 16) - (int)(range & 0xFFFF)) / 2;
    int lowest = top - (second ? 48 : 24) * 128;
    int highest = top + (second ? -1 : 128);
    expected = expected < lowest ? lowest : expected > highest ? highest : expected;
    CHECK(abs(bottom - expected) <= 1, "floor is %#x, expected %#x; top is %#x", (unsigned)bottom, (unsigned)expected,
          (unsigned)top);
}

static void check_scales(const trial *t, int32_t i, const tch_optim_config *c, const float *scales, int second,
                         const sum *exact)
{
    int64_t count = t->parameters[i].memory->count;
    float *squares = has_second(c) ? scales_of(t, i, "exp_avg_sq") : NULL;
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t size = count - first < BLOCK ? count - first : BLOCK;
        float range = squares == NULL ? 0.0f : squares[first / BLOCK];
        check_scale(c, second, scales[first / BLOCK], range, size, exact + first);
    }
}

static void check_moment(const trial *t, int32_t i, const tch_optim_config *c, const char *what, int second,
                         const sum *exact)
{
    int64_t count = t->parameters[i].memory->count;
    tch_state_dtype dtype = kept_as(t, i, c);
    double *kept = moment_of(t, i, what, second);
    float *scales = NULL;
    int64_t open = 0;
    if (dtype == TCH_STATE_INT8) {
        scales = scales_of(t, i, what);
        check_scales(t, i, c, scales, second, exact);
    }
    for (int64_t k = 0; k < count; k++) {
        uint32_t random = random_half(c, i, t->steps, k, second);
        check_kept(dtype, second, !has_second(c), scales == NULL ? 1.0f : scales[k / BLOCK], exact[k], kept[k], random,
                   &open);
    }
    CHECK(open <= 4 + count / 200, "%lld of %lld are open: the test decides too little", (long long)open,
          (long long)count);
}

static sum *sums_of(int64_t count, const double *values)
{
    sum *sums = test_alloc((size_t)count * sizeof *sums);
    for (int64_t k = 0; k < count; k++) {
        sums[k] = (sum){.value = values[k]};
    }
    return sums;
}

/* A parameter before a step. */
typedef struct before {
    double *p;
    sum *m, *v;
} before;

static before before_of(const trial *t, int32_t i, const tch_optim_config *c)
{
    int64_t count = t->parameters[i].memory->count;
    double *m = moment_of(t, i, first_name(c), 0);
    double *v = has_second(c) ? moment_of(t, i, "exp_avg_sq", 1) : test_zeros(count);
    return (before){test_tensor_read(t->parameters[i].memory), sums_of(count, m), sums_of(count, v)};
}

/* In float32 a step makes a dozen roundings of numbers no larger than p and the step, which includes m's terms. */
static void check_parameter(const trial *t, int32_t i, const tch_optim_config *c, before *was)
{
    double *after = test_tensor_read(t->parameters[i].memory);
    for (int64_t k = 0; k < t->parameters[i].memory->count; k++) {
        element e = {was->p[k], t->parameters[i].drawn[k], was->m[k], was->v[k]};
        bool open = reference_step(c, t->steps, &e);
        double step = fabs(e.p - was->p[k]) * fmax(1.0, e.m.size / (fabs(e.m.value) + 1e-30));
        CHECK(open || fabs(after[k] - e.p) <= 0x1p-20 * (fabs(was->p[k]) + step),
              "parameter %d, element %lld: %.9g, expected %.9g", i, (long long)k, after[k], e.p);
        was->m[k] = e.m;
        was->v[k] = e.v;
    }
    check_moment(t, i, c, first_name(c), 0, was->m);
    if (has_second(c)) {
        check_moment(t, i, c, "exp_avg_sq", 1, was->v);
    }
}

static void check_step(trial *t, const tch_optim_config *c)
{
    before was[SHAPES];
    const tch_tensor *gradients[SHAPES];
    size_t mark = test_mark();
    for (int32_t i = 0; i < t->count; i++) {
        was[i] = before_of(t, i, c);
    }
    trial_draw(t);
    trial_list_gradients(t, gradients);
    CHECK_OK(tch_optimizer_step(t->optimizer, t->count, gradients));
    t->steps++;
    for (int32_t i = 0; i < t->count; i++) {
        check_parameter(t, i, c, &was[i]);
    }
    test_release_since(mark);
}

/* A skipped step leaves moments unchanged. */
static void check_skipped_step(trial *t)
{
    unsigned char *before = trial_snapshot(t, -1);
    trial_draw(t);
    trial_spoil(t, 4, (double)NAN);
    CHECK_OK(trial_step_library(t));
    trial_check_snapshot(t, -1, before);
    CHECK(trial_stats(t).skipped == 1, "%lld steps were skipped", (long long)trial_stats(t).skipped);
}

/* Shampoo uses AdamW for vectors and elementwise parameters. */
TEST(every_step_is_the_formula)
{
    const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_LION, TCH_OPTIM_SGD, TCH_OPTIM_SHAMPOO};
    for (int k = 0; k < 12; k++) {
        trial t;
        tch_optim_config c = open_kept(&t, *state, kinds[k / 3], k % 3);
        for (int i = 0; i < 4; i++) {
            check_step(&t, &c);
        }
        for (int32_t i = 0; i < SHAPES; i++) {
            test_tensor_check_written(t.parameters[i].memory, "the parameter");
            test_tensor_check_unchanged(t.parameters[i].gradient_memory, "the gradient");
        }
        check_skipped_step(&t);
    }
}

/* --- many steps -------------------------------------------------------------------------------------------------- */

/* The mean of the stored values over that of the expected ones. */
static void check_mean(int64_t count, const double *kept, const double *expected)
{
    double ratio = 0.0;
    for (int64_t k = 0; k < count; k++) {
        ratio += kept[k] / expected[k] / (double)count;
    }
    CHECK(fabs(ratio - 1.0) < 0.01, "moments are %.4f times what they should be", ratio);
}

/* One vector that begins at 0. */
static void open_vector(trial *t, tch_context *context, const tch_optim_config *c, int64_t count)
{
    const trial_shape shape = {.ndim = 1, .shape = {count}};
    trial_open(t, context, TCH_FLOAT32, TCH_FLOAT32, c, 1, &shape);
    test_tensor_write(t->parameters[0].memory, test_zeros(count));
}

/* Constant gradients, which moments approach by a hundredth of the difference per step: less than a code. With rounding
 * to nearest, Lion's would stop at 0.966 of the limit. */
TEST(first_moments_follow_slow_changes)
{
    enum { COUNT = 4160, STEPS = 300, SIZES = 97 };
    const tch_optim_kind kinds[] = {TCH_OPTIM_LION, TCH_OPTIM_SGD};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        trial t;
        tch_optim_config c = config_of(kinds[k], TCH_STATE_INT8);
        double *values = test_zeros(COUNT);
        test_case("%s", tch_optim_kind_name(c.kind));
        c.beta2 = c.momentum = 0.99;
        c.weight_decay = 0.0;
        open_vector(&t, *state, &c, COUNT);
        for (int i = 0; i < COUNT; i++) {
            values[i] = test_round(TCH_FLOAT32, (i % SIZES + 1.0) / SIZES);
        }
        test_tensor_write(t.parameters[0].gradient_memory, values);
        for (int step = 0; step < STEPS; step++) {
            CHECK_OK(trial_step_library(&t));
        }
        for (int i = 0; i < COUNT; i++) {
            values[i] *= (c.kind == TCH_OPTIM_SGD ? 100.0 : 1.0) * (1.0 - pow(0.99, STEPS));
        }
        check_mean(COUNT, moment_of(&t, 0, first_name(&c), 0), values);
    }
}

/* --- bounded steps ----------------------------------------------------------------------------------------------- */

/* One element of each block has gradients 1e12 times larger than the others, whose second moments, 1e-24 of the
 * largest, have no code. They keep the least one, the square of 2^-24 of the largest root. Their steps stay below
 * AdamW's own bound, |m| <= 7.3 sqrt(v): the least first moment above 0 is 0.37 2^-24 of the largest. eps is 0: nothing
 * else bounds them. */
TEST(steps_have_a_bound)
{
    enum { COUNT = 4160, STEPS = 60 };
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW, TCH_STATE_INT8);
    test_random random = test_random_stream(77);
    test_case("gradients of 1 and of 1e-12");
    c.eps = 0.0;
    c.weight_decay = 0.0;
    open_vector(&t, *state, &c, COUNT);
    double *before = test_zeros(COUNT);
    for (int step = 0; step < STEPS; step++) {
        double *values = test_zeros(COUNT);
        for (int i = 0; i < COUNT; i++) {
            double size = i % BLOCK == 5 ? 1.0 : i % BLOCK == 6 ? 0.0 : 1e-12;
            values[i] = test_round(TCH_FLOAT32, size * test_random_normal(&random));
        }
        test_tensor_write(t.parameters[0].gradient_memory, values);
        CHECK_OK(trial_step_library(&t));
        double *after = test_tensor_read(t.parameters[0].memory);
        double *v = moment_of(&t, 0, "exp_avg_sq", 1);
        double *m = moment_of(&t, 0, "exp_avg", 0);
        for (int i = 0; i < COUNT; i++) {
            bool still = i % BLOCK == 6; /* never had a gradient: 0 / 0 is not tested, eps being 0 */
            CHECK(still ? v[i] == 0.0 && m[i] == 0.0 : v[i] > 0.0, "step %d: second moment %d is %g", step, i, v[i]);
            CHECK(still || fabs(after[i] - before[i]) <= c.lr * 7.3, "step %d moves element %d by %g", step, i,
                  after[i] - before[i]);
        }
        before = after;
    }
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

/* Another form rounded to nearest: within half the distance of its neighbors. */
static void check_converted(tch_state_dtype to, int second, float scale, double from, double got)
{
    neighbors n = neighbors_of(to, second, scale, fabs(from));
    bool exact = n.above == n.below;
    double part = exact ? 0.0 : part_above(to, second, scale, n, fabs(from));
    double nearest = part > 0.5 ? n.above : n.below;
    CHECK(got == from || fabs(part - 0.5) < 1e-3 || fabs(fabs(got) - nearest) <= 1e-6 * fabs(from) + 1e-30,
          "%.9g became %.9g", from, got);
    CHECK(got * from >= 0.0, "%.9g became %.9g", from, got);
}

static void check_conversion(const trial *a, const trial *b, int32_t i, const char *what, int second)
{
    tch_state_dtype to = kept_as(b, i, &b->configs[0]);
    double *from = moment_of(a, i, what, second);
    double *got = moment_of(b, i, what, second);
    float *scales = to == TCH_STATE_INT8 ? scales_of(b, i, what) : NULL;
    for (int64_t k = 0; k < a->parameters[i].memory->count; k++) {
        float scale = scales == NULL ? 1.0f : scales[k / BLOCK];
        check_converted(to, second, scale, from[k], got[k]);
        CHECK(to != TCH_STATE_FLOAT32 || from[k] == got[k], "%.9g became %.9g in float32", from[k], got[k]);
    }
}

/* Scales that are powers of two, as in earlier versions, in a state of the same form and in one to be converted. */
static void check_earlier_codes_refused(const trial *coded, const trial *other, const char *path)
{
    const tch_tensor *scales = state_of(coded, 4, "exp_avg_sq_scale");
    float power = 0x1p-20f;
    tch_tensor one = tch_tensor_view(&power, TCH_FLOAT32, 1, (int64_t[]){1});
    tch_tensor last = *scales;
    last.shape = (int64_t[]){1};
    last.byte_offset += (uint64_t)(tch_tensor_numel(scales) - 1) * sizeof(float);
    CHECK_OK(tch_tensor_copy(coded->context, &last, &one));
    trial_save(coded, path);
    unsigned char *before = trial_snapshot(other, -1);
    test_check_refused(trial_load(other, path), TCH_ERR_INVALID_ARGUMENT, "exp_avg_sq_scale");
    trial_check_snapshot(other, -1, before);
}

TEST(other_forms_are_converted)
{
    const char *path = test_path("state_dtype.safetensors");
    for (int k = 0; k < 9; k++) {
        trial a;
        trial b;
        open_kept(&a, *state, TCH_OPTIM_ADAMW, k / 3);
        open_kept(&b, *state, TCH_OPTIM_ADAMW, k % 3);
        test_case("%s to %s", dtype_names[k / 3], dtype_names[k % 3]);
        trial_steps(&a, 6);
        trial_steps(&b, 1);
        trial_save(&a, path);
        CHECK_OK(trial_load(&b, path));
        for (int32_t i = 0; i < SHAPES; i++) {
            check_conversion(&a, &b, i, "exp_avg", 0);
            check_conversion(&a, &b, i, "exp_avg_sq", 1);
        }
        trial_steps(&b, 1);
        if (k / 3 == TCH_STATE_INT8) {
            check_earlier_codes_refused(&a, &b, path);
        }
    }
}

/* --- matrices ---------------------------------------------------------------------------------------------------- */

/* Wide and tall, in one block and in several; rows that are no whole blocks of codes, which are kept in bfloat16; in
 * column-major order, of three dimensions, and one that stays float32, with blocks of the third's size. */
static const trial_shape matrices[] = {
    {.ndim = 2, .shape = {33, 128}},
    {.ndim = 2, .shape = {160, 128}},
    {.ndim = 2, .shape = {20, 384}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {67, 65}},
    {.ndim = 2, .shape = {40, 128}, .order = {1, 0}},
    {.ndim = 3, .shape = {3, 12, 128}},
    {.ndim = 2, .shape = {20, 128}},
};
#define MATRICES ((int32_t)(sizeof matrices / sizeof matrices[0]))

static tch_state_dtype matrix_kept_as(int32_t i, tch_state_dtype asked)
{
    return i == 6 ? TCH_STATE_FLOAT32 : i == 3 && asked == TCH_STATE_INT8 ? TCH_STATE_BFLOAT16 : asked;
}

static const char *average_name(tch_optim_kind kind)
{
    return ref_orthogonalizes(kind) ? "momentum_buffer" : "exp_avg";
}

static void open_matrices(trial *t, tch_context *context, tch_optim_kind kind, tch_state_dtype dtype)
{
    tch_optim_config c = config_of(kind, dtype);
    c.shampoo.max_preconditioner_dim = 128;
    c.shampoo.precondition_frequency = 4; /* not in the skipped step, in which a GPU computes roots again */
    c.shampoo.stagger = c.shampoo.merge_dims = 0;
    c.shampoo.grafting = kind == TCH_OPTIM_SHAMPOO ? TCH_GRAFTING_ADAM : TCH_GRAFTING_NONE;
    c.momentum = kind == TCH_OPTIM_SHAMPOO ? 0.5 : c.momentum;
    c.soap.block = 1;
    trial_open(t, context, TCH_FLOAT32, TCH_FLOAT32, &c, MATRICES, matrices);
}

/* The averages of `narrow` are those of `exact`, which took the same step from the same state, rounded by the random
 * bits. */
static void check_rounded(const trial *narrow, const trial *exact, int32_t i, const double *was)
{
    tch_optim_config c = narrow->configs[0];
    const char *name = average_name(c.kind);
    double *m = moment_of(exact, i, name, 0);
    sum *sums = sums_of(narrow->parameters[i].memory->count, m);
    for (int64_t k = 0; k < narrow->parameters[i].memory->count; k++) {
        sums[k].was = was[k];
    }
    c.memory.state_dtype = matrix_kept_as(i, c.memory.state_dtype);
    c.kind = TCH_OPTIM_SGD; /* codes as of its momentum */
    check_moment(narrow, i, &c, name, 0, sums);
}

/* Both optimizers begin with the same state, converted without loss, and take one step, whose arithmetic is the same:
 * parameters are bitwise equal. On a GPU they are nearly so: matrices with other moments are other runs, and libraries
 * choose algorithms by the number of blocks, which round to 11 bits. */
static void check_matrix_step(trial *narrow, trial *exact, const char *path)
{
    const char *name = average_name(narrow->configs[0].kind);
    double *was[MATRICES];
    double *began[MATRICES];
    size_t mark = test_mark();
    trial_take_over(exact, narrow, path);
    for (int32_t i = 0; i < MATRICES; i++) {
        began[i] = test_tensor_read(exact->parameters[i].memory);
        size_t bytes = (size_t)narrow->parameters[i].memory->count * sizeof(double);
        was[i] = moment_of(narrow, i, name, 0);
        CHECK(memcmp(was[i], moment_of(exact, i, name, 0), bytes) == 0, "the conversion has lost something");
    }
    trial_draw(narrow);
    trial_draw(exact);
    CHECK_OK(trial_step_library(narrow));
    CHECK_OK(trial_step_library(exact));
    narrow->steps = (int64_t)*trial_read(narrow, state_of(narrow, 0, "step"));
    for (int32_t i = 0; i < MATRICES; i++) {
        int64_t count = narrow->parameters[i].memory->count;
        double *x = test_tensor_read(narrow->parameters[i].memory);
        double *y = test_tensor_read(exact->parameters[i].memory);
        double most = test_on_cpu() ? 0.0 : 0x1p-6 * ref_distance(count, y, began[i]);
        CHECK(ref_distance(count, x, y) <= most, "parameter %d went another way", i);
        check_rounded(narrow, exact, i, was[i]);
    }
    test_release_since(mark);
}

static void check_matrices(tch_context *context, tch_optim_kind kind, tch_state_dtype dtype)
{
    const char *path = test_path("matrices.safetensors");
    trial narrow;
    trial exact;
    trial resumed;
    test_case("matrices, %s, moments in %s", tch_optim_kind_name(kind), dtype_names[dtype]);
    open_matrices(&narrow, context, kind, dtype);
    open_matrices(&exact, context, kind, TCH_STATE_FLOAT32);
    trial_draw(&narrow);
    CHECK_OK(trial_step_library(&narrow)); /* SOAP's has no direction */
    for (int step = 0; step < 4; step++) {
        check_matrix_step(&narrow, &exact, path);
    }
    check_skipped_step(&narrow);
    open_matrices(&resumed, context, kind, dtype);
    trial_take_over(&resumed, &narrow, path);
    trial_check_snapshot(&resumed, -1, trial_snapshot(&narrow, -1));
    for (int step = 0; step < 2; step++) {
        trial_draw(&narrow);
        trial_draw(&resumed);
        CHECK_OK(trial_step_library(&narrow));
        CHECK_OK(trial_step_library(&resumed));
    }
    trial_check_same_parameters(&narrow, &resumed);
    trial_check_snapshot(&resumed, -1, trial_snapshot(&narrow, -1));
    trial_take_over(&narrow, &exact, path);
    for (int32_t i = 0; i < MATRICES; i++) {
        narrow.configs[0].memory.state_dtype = matrix_kept_as(i, dtype);
        check_conversion(&exact, &narrow, i, average_name(kind), 0);
    }
}

TEST(matrices_step_as_with_float32)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (int dtype = TCH_STATE_BFLOAT16; dtype <= TCH_STATE_INT8 && ref_has_blocks((tch_optim_kind)kind); dtype++) {
            check_matrices(*state, (tch_optim_kind)kind, (tch_state_dtype)dtype);
        }
    }
}

/* float64 parameters keep float64 moments for any setting, bitwise. */
TEST(float64_stays)
{
    double *got[2];
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = config_of(TCH_OPTIM_ADAMW, k ? TCH_STATE_INT8 : TCH_STATE_FLOAT32);
        test_case("float64 parameters, moments in %s", dtype_names[c.memory.state_dtype]);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, shapes);
        trial_steps(&t, 5);
        got[k] = test_tensor_read(t.parameters[0].memory);
        CHECK(tch_dtype_equal(state_of(&t, 0, "exp_avg")->dtype, TCH_FLOAT64), "the moments are not float64");
    }
    CHECK(memcmp(got[0], got[1], 4096 * sizeof(double)) == 0, "the option has changed float64 parameters");
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)
