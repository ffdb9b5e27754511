/* What second-order optimizers do between parameters and blocks, through the operations table: gather, graft, Adam
 * inside blocks and apply, with every option and type against the reference, blocks as they are and transposed. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/update_cases.h"
#include "support/testing.h"

static const ref_setting plain_setting = {.grad_scale = 1.0};

static ref_setting lively_setting(void)
{
    ref_setting s = plain_setting;
    s.hyper = lively_hyper;
    return s;
}

static world *begin(void **state, int types, uint64_t stream)
{
    return world_begin(*state, &type_cases[types], shape_cases, SHAPE_CASES, stream + (uint64_t)types);
}

static void drop_block(world *w, int index)
{
    for (int64_t k = 0; k < w->count; k++) {
        w->rects[k].block[index] = NULL;
    }
}

static void set_skip(world *w, int32_t value)
{
    world_set(w, &value, &w->numbers->skip, sizeof value);
    w->update.skip = &w->numbers->skip;
}

/* --- largest elements -------------------------------------------------------------------------------------------- */

static uint32_t *largest, *filtered; /* on the device, one for a block each; or NULL */

static void *device_bytes(world *w, int64_t bytes)
{
    void *memory = NULL;
    unsigned char *poison = test_alloc((size_t)bytes);
    memset(poison, 0xff, (size_t)bytes);
    CHECK_OK(w->backend->device->allocate(w->context->state, bytes, &memory));
    world_set(w, poison, memory, bytes);
    return memory;
}

static void begin_largest(world *w)
{
    largest = device_bytes(w, w->blocks * (int64_t)sizeof *largest);
    filtered = device_bytes(w, w->blocks * (int64_t)sizeof *filtered);
}

static void end_largest(const world *w)
{
    w->backend->device->release(w->context->state, largest, w->blocks * (int64_t)sizeof *largest);
    w->backend->device->release(w->context->state, filtered, w->blocks * (int64_t)sizeof *filtered);
    largest = filtered = NULL;
}

static double number_at(const unsigned char *all, tch_scalar type, int64_t index)
{
    return type == TCH_SCALAR_F64 ? ((const double *)(const void *)all)[index]
                                  : (double)((const float *)(const void *)all)[index];
}

/* Of gradients, which stay, or of what was written to the second block. Two rectangles are a block. */
static void check_largest(world *w, ref_field field, const uint32_t *device)
{
    const unsigned char *all = field == REF_GRAD ? w->field[field].before : w->field[field].after;
    uint32_t *bits = test_alloc((size_t)w->blocks * sizeof *bits);
    float expected = 0.0F;
    world_get(w, bits, device, w->blocks * (int64_t)sizeof *bits);
    for (int64_t k = 0; k < w->count; k++) {
        for (int64_t e = 0; e < w->rects[k].rows * w->rects[k].cols; e++) {
            int64_t index = world_index(w, k, field, e / w->rects[k].cols, e % w->rects[k].cols);
            expected = fmaxf(expected, (float)fabs(number_at(all, w->field[field].type, index)));
        }
        if (k % 2 == 1 || k + 1 == w->count) {
            CHECK(memcmp(&bits[k / 2], &expected, sizeof expected) == 0, "block %lld: %#x, expected the bits of %g",
                  (long long)(k / 2), (unsigned)bits[k / 2], (double)expected);
            expected = 0.0F;
        }
    }
}

/* --- gather ------------------------------------------------------------------------------------------------------ */

static tch_status run_gather(world *w, const ref_setting *s)
{
    return w->backend->update->gather(w->context->state, &w->update, s->filter, s->l2, largest, filtered);
}

static void gather_once(world *w, const ref_setting *s)
{
    float scale = (float)s->grad_scale;
    world_set(w, &scale, &w->numbers->grad_scale, sizeof scale);
    w->update.grad_scale = s->grad_scale != 1.0 ? &w->numbers->grad_scale : NULL;
    w->update.maximize = s->maximize;
    world_run(w, run_gather, s);
    world_check(w, ref_gather, s, NULL);
}

static void gather_follows_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 1000);
        for (int options = 0; options < 12; options += OPTION_STEP(t)) {
            ref_setting s = lively_setting();
            test_case("gather, %s, options %d", type_cases[t].name, options);
            s.filter = (tch_filter)(options % 3);
            s.l2 = options / 3 & 1;
            s.maximize = options / 6;
            s.grad_scale = options / 6 ? 5.0 : 1.0;
            gather_once(w, &s);
        }
        world_close(w);
    }
}

static void either_block_may_be_missing(void **state)
{
    for (int missing = 0; missing < 2; missing++) {
        for (int filter = 0; filter < 3; filter++) {
            world *w = begin(state, 1, 1100);
            ref_setting s = lively_setting();
            test_case("gather without block[%d], filter %d", missing, filter);
            s.filter = (tch_filter)filter;
            drop_block(w, missing);
            gather_once(w, &s);
            world_close(w);
        }
    }
}

/* Nothing that is not finite gets into a state or a block. */
static void gather_zeroes_blocks_when_skipping(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 1200);
        for (int filter = 0; filter < 3; filter++) {
            ref_setting s = lively_setting();
            test_case("gather, skipped, %s, filter %d", type_cases[t].name, filter);
            s.filter = (tch_filter)filter;
            set_skip(w, 1);
            world_fill_constant(w, REF_GRAD, (double)NAN);
            world_run(w, run_gather, &s);
            world_check(w, ref_gather_skipped, &s, NULL);
        }
        world_close(w);
    }
}

/* --- graft ------------------------------------------------------------------------------------------------------- */

static tch_status run_graft(world *w, const ref_setting *s)
{
    return w->backend->update->graft(w->context->state, &w->update, s->graft, s->replace, w->norms, w->scratch);
}

static void graft_follows_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        for (int filtered = 0; filtered < 2; filtered++) {
            world *w = begin(state, t, 1300);
            if (!filtered) {
                drop_block(w, 1);
            }
            for (int options = 0; options < 8; options += OPTION_STEP(t)) {
                ref_setting s = lively_setting();
                test_case("graft, %s, options %d, filtered %d", type_cases[t].name, options, filtered);
                s.graft = (tch_graft)(TCH_GRAFT_SGD + options % 4);
                s.replace = options / 4;
                world_run(w, run_graft, &s);
                world_check(w, ref_graft, &s, NULL);
            }
            world_close(w);
        }
    }
}

static void graft_takes_many_rects(void **state)
{
    for (int t = 0; t < TYPE_CASES; t += 3) {
        world *w = world_begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 1400);
        ref_setting s = lively_setting();
        test_case("graft, %s, many rectangles", type_cases[t].name);
        s.graft = TCH_GRAFT_ADAM;
        world_run(w, run_graft, &s);
        world_check(w, ref_graft, &s, NULL);
        world_close(w);
    }
}

/* Norms are sums over many chunks: the same bits from any number of threads, and again. */
static void norms_do_not_depend_on_threads(void **state)
{
    int32_t threads = tch_get_num_threads();
    world *w = world_begin(*state, &type_cases[1], many_shapes(), MANY_CHUNKS, 1500);
    size_t bytes = (size_t)w->blocks * sizeof(double);
    double *first = test_alloc(bytes);
    double *now = test_alloc(bytes);
    ref_setting s = lively_setting();
    s.graft = TCH_GRAFT_RMSPROP;
    for (int32_t n = 1; n <= 5; n++) {
        test_case("%d threads", n);
        CHECK_OK(tch_set_num_threads(n));
        CHECK_OK(w->backend->device->begin(w->context->state));
        world_run(w, run_graft, &s);
        if (w->backend->device->end != NULL) {
            w->backend->device->end(w->context->state);
        }
        world_get(w, n == 1 ? first : now, w->norms, (int64_t)bytes);
        CHECK(n == 1 || memcmp(first, now, bytes) == 0, "norms have other bits");
    }
    CHECK_OK(tch_set_num_threads(threads));
    world_close(w);
}

/* --- both in one pass -------------------------------------------------------------------------------------------- */

static tch_status run_gather_graft(world *w, const ref_setting *s)
{
    return w->backend->update->gather_graft(w->context->state, &w->update, s->filter, s->l2, s->graft, w->norms,
                                            w->scratch, largest, filtered);
}

static bool offers_gather_graft(void **state)
{
    const tch_context *context = *state;
    return context->backend->update->gather_graft != NULL;
}

/* Blocks of another type than the arithmetic's are not its business. */
static bool is_taken(const world *w)
{
    return w->update.block_type == w->update.real;
}

static void one_pass_follows_the_formulas(void **state)
{
    for (int t = 0; t < TYPE_CASES && offers_gather_graft(state); t++) {
        for (int filtered = 0; filtered < 2; filtered++) {
            world *w = begin(state, t, 1900);
            if (!filtered) {
                drop_block(w, 1);
            }
            for (int options = 0; options < 12 && is_taken(w); options += OPTION_STEP(t)) {
                ref_setting s = lively_setting();
                test_case("gather and graft, %s, options %d, filtered %d", type_cases[t].name, options, filtered);
                s.filter = filtered ? (tch_filter)(1 + options / 3 % 2) : TCH_FILTER_NONE;
                s.graft = (tch_graft)(TCH_GRAFT_ADAGRAD + options % 3);
                s.l2 = options / 6;
                w->update.maximize = s.maximize = options % 2;
                world_run(w, run_gather_graft, &s);
                world_check(w, ref_gather_graft, &s, NULL);
            }
            world_close(w);
        }
    }
}

/* One after the other gives the same bits, over many rectangles too, and the largest is the largest. */
static void one_pass_has_the_bits_of_two(void **state)
{
    for (int t = 0; t < 2 && offers_gather_graft(state); t++) {
        world *w = world_begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 1950);
        size_t bytes = (size_t)w->blocks * sizeof(double);
        double *together = test_alloc(bytes);
        double *apart = test_alloc(bytes);
        ref_setting s = lively_setting();
        test_case("gather and graft, %s, many rectangles", type_cases[t].name);
        s.filter = TCH_FILTER_EMA;
        s.graft = TCH_GRAFT_ADAM;
        begin_largest(w);
        world_run(w, run_gather, &s);
        world_download(w);
        check_largest(w, REF_GRAD, largest);
        check_largest(w, REF_BLOCK_1, filtered);
        CHECK_OK(run_graft(w, &s));
        world_get(w, apart, w->norms, (int64_t)bytes);
        world_run(w, run_gather_graft, &s);
        world_get(w, together, w->norms, (int64_t)bytes);
        world_download(w);
        check_largest(w, REF_GRAD, largest);
        check_largest(w, REF_BLOCK_1, filtered);
        for (int64_t b = 0; b < w->blocks; b++) {
            CHECK(memcmp(&together[b], &apart[b], sizeof *apart) == 0, "block %lld: %.17g together and %.17g apart",
                  (long long)b, together[b], apart[b]);
        }
        world_check(w, ref_gather_graft, &s, NULL); /* last: what was before is not known after it */
        end_largest(w);
        world_close(w);
    }
}

/* --- blocks of float16 ------------------------------------------------------------------------------------------- */

/* The power of two that brings a number to between 2^14 and 2^15. */
static double power_for(uint32_t bits)
{
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest == 0.0F ? 1.0 : ldexp(1.0, 14 - ilogbf(largest));
}

/* Every number of blocks that gather_graft has written, once more in float16; and nothing between them. */
static void check_halves(const world *w, ref_field field, const uint32_t *bits, const uint16_t *halves)
{
    bool *seen = test_alloc((size_t)w->field[field].elements * sizeof *seen);
    memset(seen, 0, (size_t)w->field[field].elements * sizeof *seen);
    for (int64_t k = 0; k < w->count; k++) {
        for (int64_t e = 0; e < w->rects[k].rows * w->rects[k].cols; e++) {
            int64_t index = world_index(w, k, field, e / w->rects[k].cols, e % w->rects[k].cols);
            double x = number_at(w->field[field].after, TCH_SCALAR_F32, index);
            uint16_t expected;
            test_encode(TCH_FLOAT16, power_for(bits[k / 2]) * x, &expected);
            seen[index] = true;
            CHECK(halves[index] == expected, "rectangle %lld, element %lld of field %d: %#x, expected %#x for %g",
                  (long long)k, (long long)e, (int)field, (unsigned)halves[index], (unsigned)expected, x);
        }
    }
    for (int64_t index = 0; index < w->field[field].elements; index++) {
        CHECK(seen[index] || halves[index] == 0xFFFF, "element %lld between the rectangles was written",
              (long long)index);
    }
}

/* Where blocks of float32 have an element, those of float16 have it in arrays of their own. */
static tch_rect *halved_rects(const world *w, uint16_t *const blocks[2])
{
    tch_rect *rects = test_alloc((size_t)w->count * sizeof *rects);
    for (int64_t k = 0; k < w->count; k++) {
        rects[k] = w->rects[k];
        for (int i = 0; i < 2; i++) {
            ptrdiff_t at = (const float *)w->rects[k].block[i] - (const float *)w->field[REF_BLOCK_0 + i].device;
            rects[k].block[i] = blocks[i] + at;
        }
    }
    return rects;
}

static void halves_are_the_blocks_again(void **state)
{
    static const tch_filter filters[] = {TCH_FILTER_EMA, TCH_FILTER_NESTEROV};
    for (int options = 0; options < 4 && offers_gather_graft(state); options++) {
        world *w = begin(state, 1, 2300 + (uint64_t)options);
        int64_t bytes[2] = {w->field[REF_BLOCK_0].elements * 2, w->field[REF_BLOCK_1].elements * 2};
        uint16_t *blocks[2] = {device_bytes(w, bytes[0]), device_bytes(w, bytes[1])};
        uint32_t *bits[2] = {test_alloc((size_t)w->blocks * 4), test_alloc((size_t)w->blocks * 4)};
        ref_setting s = lively_setting();
        s.filter = filters[options % 2];
        s.graft = TCH_GRAFT_ADAM;
        s.l2 = options / 2;
        test_case("halves, filter %d, weight decay %d", (int)s.filter, s.l2);
        begin_largest(w);
        world_run(w, run_gather_graft, &s);
        world_download(w);
        world_get(w, bits[0], largest, w->blocks * 4);
        world_get(w, bits[1], filtered, w->blocks * 4);
        tch_update update = w->update;
        update.rects = halved_rects(w, blocks);
        update.block_type = TCH_SCALAR_F16;
        CHECK_OK(w->backend->update->gather_halves(w->context->state, &update, s.filter, s.l2, largest, filtered));
        for (int i = 0; i < 2; i++) {
            uint16_t *halves = test_alloc((size_t)bytes[i]);
            world_get(w, halves, blocks[i], bytes[i]);
            check_halves(w, (ref_field)(REF_BLOCK_0 + i), bits[i], halves);
            w->backend->device->release(w->context->state, blocks[i], bytes[i]);
        }
        end_largest(w);
        world_close(w);
    }
}

static void one_pass_zeroes_blocks_when_skipping(void **state)
{
    for (int t = 0; t < 2 && offers_gather_graft(state); t++) {
        world *w = begin(state, t, 1980);
        ref_setting s = lively_setting();
        test_case("gather and graft, skipped, %s", type_cases[t].name);
        s.filter = TCH_FILTER_EMA;
        s.graft = TCH_GRAFT_ADAM;
        set_skip(w, 1);
        world_fill_constant(w, REF_GRAD, (double)NAN);
        world_run(w, run_gather_graft, &s);
        world_check(w, ref_gather_skipped, &s, NULL);
        world_close(w);
    }
}

/* --- Adam inside blocks ------------------------------------------------------------------------------------------ */

static tch_status run_rotated_adam(world *w, const ref_setting *s)
{
    (void)s;
    return w->backend->update->rotated_adam(w->context->state, &w->update, largest);
}

static void rotated_adam_follows_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 1600);
        ref_setting s = lively_setting();
        test_case("rotated_adam, %s", type_cases[t].name);
        world_run(w, run_rotated_adam, &s);
        world_check(w, ref_rotated_adam, &s, NULL);
        world_close(w);
    }
}

static void rotated_adam_leaves_its_largest(void **state)
{
    for (int t = 0; t < 2 && offers_gather_graft(state); t++) {
        world *w = world_begin(*state, &type_cases[t], many_shapes(), MANY_CHUNKS, 1650);
        ref_setting s = lively_setting();
        test_case("rotated_adam, %s, many rectangles", type_cases[t].name);
        begin_largest(w);
        world_run(w, run_rotated_adam, &s);
        world_download(w);
        check_largest(w, REF_BLOCK_1, largest);
        end_largest(w);
        world_close(w);
    }
}

/* --- apply ------------------------------------------------------------------------------------------------------- */

static tch_block_scale scale_rule;

static tch_status run_apply(world *w, const ref_setting *s)
{
    return w->backend->update->apply(w->context->state, &w->update, scale_rule, w->wanted, w->norms, s->nesterov,
                                     s->decay);
}

/* Numbers of the blocks, one norm of them 0, and the scales that follow. */
static void fill_scales(world *w, tch_block_scale rule, double *scales)
{
    double *wanted = test_alloc((size_t)w->blocks * sizeof *wanted);
    double *norms = test_alloc((size_t)w->blocks * sizeof *norms);
    for (int64_t b = 0; b < w->blocks; b++) {
        wanted[b] = 1.0 + (double)(b % 5);
        norms[b] = b % 4 == 3 ? 0.0 : 0.5 + (double)(b % 3);
        double target = rule == TCH_BLOCK_UNIT_RMS ? sqrt(wanted[b]) : wanted[b];
        scales[b] = rule == TCH_BLOCK_AS_IS ? 1.0 : norms[b] == 0 ? 0.0 : target / norms[b];
    }
    world_set(w, wanted, w->wanted, w->blocks * (int64_t)sizeof *wanted);
    world_set(w, norms, w->norms, w->blocks * (int64_t)sizeof *norms);
    scale_rule = rule;
}

static void apply_once(world *w, int options)
{
    ref_setting s = lively_setting();
    double scales[SHAPE_CASES];
    s.nesterov = options / 3 & 1;
    s.decay = options / 6 & 1;
    s.hyper.momentum = options / 12 ? 0.7 : 0.0;
    world_set_hyper(w, &s.hyper);
    fill_scales(w, (tch_block_scale)(options % 3), scales);
    world_run(w, run_apply, &s);
    world_check(w, ref_apply, &s, scales);
}

static void apply_follows_the_formula(void **state)
{
    for (int t = 0; t < TYPE_CASES; t++) {
        world *w = begin(state, t, 1700);
        for (int options = 0; options < 24; options += OPTION_STEP(t)) {
            test_case("apply, %s, options %d", type_cases[t].name, options);
            apply_once(w, options);
        }
        test_case("apply, %s, block[0]", type_cases[t].name);
        drop_block(w, 1);
        apply_once(w, 23);
        test_case("apply, %s, no buffer", type_cases[t].name);
        for (int64_t k = 0; k < w->count; k++) {
            w->rects[k].state[2] = NULL;
        }
        apply_once(w, 23);
        world_close(w);
    }
}

static void skipping_writes_nothing(void **state)
{
    static const world_operation operations[] = {run_graft, run_rotated_adam, run_apply};
    for (int i = 0; i < 3; i++) {
        world *w = begin(state, 4, 1800);
        ref_setting s = lively_setting();
        test_case("operation %d, skipped", i);
        s.graft = TCH_GRAFT_ADAM;
        s.replace = 1;
        scale_rule = TCH_BLOCK_AS_IS;
        set_skip(w, 1);
        world_fill_constant(w, REF_BLOCK_0, (double)NAN);
        world_run(w, operations[i], &s);
        world_check(w, ref_nothing, &s, NULL);
        world_close(w);
    }
}

/* --- chunks that are all alike ----------------------------------------------------------------------------------- */

enum { ALIKE_ROWS = 64, ALIKE_COLS = 128, ALIKE = ALIKE_ROWS * ALIKE_COLS, ALIKE_FIELDS = 7 };
enum { ALIKE_NUMBERS = (ALIKE_FIELDS + 1) * ALIKE + 2 }; /* blocks of float16 and a norm behind them */

/* Every array begins `shift` elements behind an aligned place, so that with 1 none of it is aligned. */
static tch_rect alike_rect(const world *w, float *memory, int shift, int32_t transposed)
{
    float *at[ALIKE_FIELDS];
    for (int f = 0; f < ALIKE_FIELDS; f++) {
        at[f] = memory + (int64_t)f * (ALIKE + 4) + shift;
    }
    return (tch_rect){.param = at[0],
                      .grad = at[1],
                      .state = {at[2], at[3], at[4]},
                      .block = {at[5], at[6]},
                      .clock = w->clocks,
                      .rows = ALIKE_ROWS,
                      .cols = ALIKE_COLS,
                      .stride = ALIKE_COLS,
                      .block_ld = transposed ? ALIKE_ROWS : ALIKE_COLS,
                      .transposed = transposed,
                      .factor = 1.0};
}

/* Gathers, grafts and applies, in both ways, and leaves all arrays and a norm in `after`. */
static void step_alike(world *w, float *memory, const float *before, int shift, int32_t transposed, float *after)
{
    const tch_update_ops *t = w->backend->update;
    tch_rect rect = alike_rect(w, memory, shift, transposed);
    const int64_t bytes = (int64_t)sizeof(float) * ALIKE;
    for (int f = 0; f < ALIKE_FIELDS; f++) {
        world_set(w, before + (int64_t)f * ALIKE, memory + (int64_t)f * (ALIKE + 4) + shift, bytes);
    }
    w->update.rects = &rect;
    w->update.count = 1;
    CHECK_OK(t->gather(w->context->state, &w->update, TCH_FILTER_EMA, 0, NULL, NULL));
    CHECK_OK(t->graft(w->context->state, &w->update, TCH_GRAFT_ADAM, 0, w->norms, w->scratch));
    CHECK_OK(t->apply(w->context->state, &w->update, TCH_BLOCK_AS_IS, w->wanted, w->norms, 0, 1));
    if (t->gather_graft != NULL) {
        CHECK_OK(t->gather_graft(w->context->state, &w->update, TCH_FILTER_EMA, 0, TCH_GRAFT_ADAM, w->norms, w->scratch,
                                 NULL, NULL));
    }
    for (int f = 0; f < ALIKE_FIELDS; f++) {
        world_get(w, after + (int64_t)f * ALIKE, memory + (int64_t)f * (ALIKE + 4) + shift, bytes);
    }
    world_get(w, after + (int64_t)(ALIKE_FIELDS + 1) * ALIKE, w->norms, sizeof(double));
    if (t->gather_halves != NULL) {
        static const uint32_t two = 0x40000000;
        uint32_t *bits = device_bytes(w, sizeof two);
        world_set(w, &two, bits, sizeof two);
        w->update.block_type = TCH_SCALAR_F16;
        CHECK_OK(t->gather_halves(w->context->state, &w->update, TCH_FILTER_EMA, 0, bits, bits));
        w->update.block_type = TCH_SCALAR_F32;
        world_get(w, after + (int64_t)ALIKE_FIELDS * ALIKE, rect.block[0], bytes / 2);
        world_get(w, after + (int64_t)ALIKE_FIELDS * ALIKE + ALIKE / 2, rect.block[1], bytes / 2);
        w->backend->device->release(w->context->state, bits, sizeof two);
    }
}

static void chunks_that_are_alike_have_the_bits_of_others(void **state)
{
    const int64_t count = (int64_t)ALIKE_FIELDS * ALIKE;
    float *before = test_alloc((size_t)count * sizeof(float));
    float *after[2] = {(float *)(void *)test_zeros(ALIKE_NUMBERS / 2), (float *)(void *)test_zeros(ALIKE_NUMBERS / 2)};
    test_random random = test_random_stream(2100);
    for (int64_t i = 0; i < count; i++) {
        before[i] = (float)(0.1 + fabs(test_random_normal(&random)));
    }
    for (int32_t transposed = 0; transposed < 2; transposed++) {
        world *w = begin(state, 1, 2100);
        int64_t bytes = (int64_t)sizeof(float) * ALIKE_FIELDS * (ALIKE + 4);
        float *memory = device_bytes(w, bytes);
        test_case("aligned and not, transposed %d", transposed);
        for (int shift = 0; shift < 2; shift++) {
            step_alike(w, memory, before, shift, transposed, after[shift]);
        }
        CHECK(memcmp(after[0], after[1], (size_t)ALIKE_NUMBERS * sizeof(float)) == 0,
              "other bits where all is aligned");
        CHECK(memcmp(after[0], before, (size_t)ALIKE * sizeof(float)) != 0, "the parameter was not changed");
        w->backend->device->release(w->context->state, memory, bytes);
        w->update.rects = w->rects;
        w->update.count = w->count;
        world_close(w);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_follows_the_formula),
        cmocka_unit_test(either_block_may_be_missing),
        cmocka_unit_test(gather_zeroes_blocks_when_skipping),
        cmocka_unit_test(graft_follows_the_formula),
        cmocka_unit_test(graft_takes_many_rects),
        cmocka_unit_test(norms_do_not_depend_on_threads),
        cmocka_unit_test(one_pass_follows_the_formulas),
        cmocka_unit_test(one_pass_has_the_bits_of_two),
        cmocka_unit_test(halves_are_the_blocks_again),
        cmocka_unit_test(one_pass_zeroes_blocks_when_skipping),
        cmocka_unit_test(rotated_adam_follows_the_formula),
        cmocka_unit_test(rotated_adam_leaves_its_largest),
        cmocka_unit_test(apply_follows_the_formula),
        cmocka_unit_test(skipping_writes_nothing),
        cmocka_unit_test(chunks_that_are_alike_have_the_bits_of_others),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
