/* Storage of factors and roots: full, as lower triangles (packed_factors), and Shampoo's roots in bfloat16
 * (root_dtype). Triangles contain the same numbers as full matrices: results are bitwise identical, for every kind of
 * block and any number of chunks. A bfloat16 root is the float32 one rounded to nearest, and steps multiply by exactly
 * that. Checkpoints of any form load into any other. Also float64 parameters, and a backend without `pack`. The tests
 * of Shampoo and SOAP compare packed rows with float64 references.
 *
 * Factors do not depend on roots, so two optimizers with the same gradients have the same ones. On a GPU libraries
 * choose kernels by batch size, which differs, and by alignment. With `world_invariant` it is one at a time, and with
 * sizes that are multiples of 4 everything is aligned to 16 bytes: so bits are compared there too. */
#include "core/context.h"
#include "core/status.h"
#include "support/backend/table_copy.h"
#include "support/files.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

/* Several blocks of a size, blocks cut in both dimensions, a middle dimension, a vector, one without factors. */
static const trial_shape odd[] = {
    {.ndim = 2, .shape = {24, 17}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {24, 17}},
    {.ndim = 2, .shape = {9, 40}, .order = {1, 0}},
    {.ndim = 3, .shape = {5, 7, 6}},
    {.ndim = 1, .shape = {13}},
    {.ndim = 0},
};
static const trial_shape even[] = {
    {.ndim = 2, .shape = {24, 12}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {24, 12}},
    {.ndim = 2, .shape = {8, 48}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 8, 4}},
    {.ndim = 1, .shape = {12}},
    {.ndim = 0},
};

typedef struct kept_form {
    const char *name;
    int32_t packed;
    tch_state_dtype roots;
} kept_form;

/* SOAP, without roots, has the first two. */
static const kept_form forms[] = {
    {"whole", 0, TCH_STATE_FLOAT32},
    {"packed", 1, TCH_STATE_FLOAT32},
    {"bfloat16", 0, TCH_STATE_BFLOAT16},
    {"bfloat16 and packed", 1, TCH_STATE_BFLOAT16},
};
#define FORMS ((int)TEST_COUNT(forms))

static const trial_option options[] = {
    {.name = "defaults"},
    {"adaptive",
     {SET(shampoo.refresh_drift, 5.0),
      SET(shampoo.precondition_frequency, 8)}}, /* not with rounded roots, which drift more */
    {"at every step, without a filter", {SET(beta1, 0), SET(shampoo.precondition_frequency, 1)}},
    {"spread over a period", {SET(shampoo.stagger, 1), SET(shampoo.precondition_frequency, 3)}},
    {"every dimension, vectors too", {SET(shampoo.merge_dims, 0), SET(shampoo.precondition_1d, 1)}},
    {"little memory", {SET(memory.budget, 1)}},
    {.name = NULL},
};

/* Roots of the first step only. */
static const trial_option once[] = {{"once", {SET(shampoo.precondition_frequency, 1000)}}};

static tch_optim_config config_of(tch_optim_kind kind, const trial_option *option, const kept_form *form)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.shampoo.max_preconditioner_dim = 16;
    c.soap.block = 1;
    c.shampoo.precondition_frequency = 2;
    c.numerics.damping = 1e-3;
    c.shampoo.stagger = 0;
    trial_set(&c, option->settings);
    c.numerics.world_invariant = !test_on_cpu();
    c.memory.packed_factors = form->packed;
    c.memory.root_dtype = form->roots;
    return c;
}

/* Two trials of one kind with the same gradients. */
static void open_both(tch_context *context, trial *a, trial *b, tch_dtype dtype, const tch_optim_config *of_a,
                      const tch_optim_config *of_b)
{
    const trial_shape *shapes = test_on_cpu() ? odd : even;
    trial_open(a, context, dtype, dtype, of_a, (int32_t)TEST_COUNT(odd), shapes);
    trial_open(b, context, dtype, dtype, of_b, (int32_t)TEST_COUNT(odd), shapes);
    b->random = a->random;
}

static void step_both(trial *a, trial *b, int32_t steps)
{
    trial_steps(a, steps);
    trial_steps(b, steps);
}

/* A root or factor as a full matrix, however it is stored, and its size. */
static double *matrix_of(const trial *t, const char *name, int64_t *n)
{
    const tch_tensor *kept = trial_state(t, name);
    double *values = trial_read(t, kept);
    if (kept->ndim == 2) {
        *n = kept->shape[0];
        return values;
    }
    *n = (int64_t)((sqrt(8.0 * (double)kept->shape[0] + 1.0) - 1.0) / 2.0 + 0.5);
    CHECK(kept->shape[0] == *n * (*n + 1) / 2, "%s has %lld elements", name, (long long)kept->shape[0]);
    double *whole = test_zeros(*n * *n);
    for (int64_t i = 0, k = 0; i < *n; i++) {
        for (int64_t j = 0; j <= i; j++, k++) {
            whole[i * *n + j] = whole[j * *n + i] = values[k];
        }
    }
    return whole;
}

/* Rounds to eight significant bits, ties to even. */
static double to_bfloat16(double value)
{
    int exponent;
    double digits = frexp(value, &exponent);
    return ldexp(nearbyint(ldexp(digits, 8)), exponent - 8);
}

static bool is_narrow(const trial *t)
{
    return t->configs[0].memory.root_dtype == TCH_STATE_BFLOAT16 && t->dtype.bits != 64;
}

/* Compares matrices of `a` with those of `b`, whose roots are rounded if only it rounds. Returns their number. */
static int check_matrices(const trial *a, const trial *b)
{
    int matrices = 0;
    CHECK(tch_optimizer_state_count(a->optimizer) == tch_optimizer_state_count(b->optimizer), "other tensors of state");
    for (int32_t i = 0; i < tch_optimizer_state_count(a->optimizer); i++) {
        tch_optim_state s = trial_state_at(a, i);
        bool root = strstr(s.name, "/root.") != NULL;
        const tch_tensor *kept = trial_state(b, s.name);
        bool narrow = root && is_narrow(b);
        if (!root && strstr(s.name, "/factor.") == NULL) {
            CHECK(kept->ndim == s.tensor->ndim, "%s has %d dimensions", s.name, kept->ndim);
            continue;
        }
        tch_dtype real = b->dtype.bits == 64 ? TCH_FLOAT64 : TCH_FLOAT32;
        bool packed = b->configs[0].memory.packed_factors || narrow;
        CHECK(tch_dtype_equal(kept->dtype, narrow ? TCH_BFLOAT16 : real) && kept->ndim == (packed ? 1 : 2),
              "%s is %s of %d dimensions", s.name, tch_dtype_name(kept->dtype), kept->ndim);
        int64_t n;
        int64_t m;
        double *x = matrix_of(a, s.name, &n);
        double *y = matrix_of(b, s.name, &m);
        CHECK(n == m, "%s is of %lld rows, expected %lld", s.name, (long long)m, (long long)n);
        for (int64_t k = 0; k < n * n; k++) {
            double wanted = narrow && !is_narrow(a) ? to_bfloat16(x[k]) : x[k];
            CHECK(y[k] == wanted, "%s[%lld] is %.9g, expected %.9g", s.name, (long long)k, y[k], wanted);
        }
        matrices++;
    }
    return matrices;
}

static void compare_forms(tch_context *context, tch_optim_kind kind, tch_dtype dtype, const trial_option *option,
                          const kept_form *form)
{
    trial whole;
    trial other;
    tch_optim_config c = config_of(kind, option, &forms[0]);
    tch_optim_config d = config_of(kind, option, form);
    test_case("%s, %s, %s, %s", tch_optim_kind_name(kind), tch_dtype_name(dtype), option->name, form->name);
    open_both(context, &whole, &other, dtype, &c, &d);
    step_both(&whole, &other, 9);
    if (!is_narrow(&other)) {
        trial_check_same_parameters(&whole, &other);
    }
    int matrices = check_matrices(&whole, &other);
    CHECK(matrices >= (kind == TCH_OPTIM_SHAMPOO ? 24 : 6), "only %d matrices", matrices);
    CHECK(trial_stats(&other).failed == 0, "%lld refreshes failed", (long long)trial_stats(&other).failed);
}

/* On a GPU an outer product in float64 need not be bitwise symmetric, and most of SOAP's basis of a vector's factor is
 * determined by such bits. */
TEST(the_numbers_are_the_same)
{
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_BFLOAT16};
    int types_of_soap = test_on_cpu() ? 3 : 1;
    for (const trial_option *option = options; option->name != NULL; option++) {
        for (int k = 0; k < 3 * (FORMS - 1); k++) {
            const kept_form *form = &forms[1 + k / 3];
            if (form->roots != TCH_STATE_BFLOAT16 || option != &options[1]) {
                compare_forms(*state, TCH_OPTIM_SHAMPOO, dtypes[k % 3], option, form);
            }
        }
        for (int k = 0; k < types_of_soap; k++) {
            compare_forms(*state, TCH_OPTIM_SOAP, dtypes[k], option, &forms[1]);
        }
    }
}

/* Copies the stored roots of `from` to the float32 roots of `to`. */
static void hand_over_roots(const trial *from, const trial *to)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(to->optimizer); i++) {
        tch_optim_state s = trial_state_at(to, i);
        if (strstr(s.name, "/root.") != NULL) {
            int64_t n;
            double *root = matrix_of(from, s.name, &n);
            int64_t shape[2] = {n, n};
            tch_tensor host = tch_tensor_view(root, TCH_FLOAT64, 2, shape);
            CHECK_OK(tch_tensor_copy(to->context, s.tensor, &host));
        }
    }
    CHECK_OK(tch_context_synchronize(to->context));
}

TEST(steps_multiply_by_what_is_kept)
{
    trial whole;
    trial rounded;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO, once, &forms[0]);
    tch_optim_config d = config_of(TCH_OPTIM_SHAMPOO, once, &forms[2]);
    test_case("float32 roots that are handed those of bfloat16");
    open_both(*state, &whole, &rounded, TCH_FLOAT32, &c, &d);
    step_both(&whole, &rounded, 1);
    hand_over_roots(&rounded, &whole);
    trial_copy_parameters(&whole, &rounded);
    step_both(&whole, &rounded, 4);
    trial_check_same_parameters(&whole, &rounded);
}

/* Every form loads every other; without rounding it continues like the saved one. */
static void exchange(tch_context *context, tch_optim_kind kind, const kept_form *from, const kept_form *to)
{
    trial a;
    trial b;
    bool narrow = from->roots == TCH_STATE_BFLOAT16 || to->roots == TCH_STATE_BFLOAT16;
    tch_optim_config c = config_of(kind, narrow ? once : options, from);
    tch_optim_config d = config_of(kind, narrow ? once : options, to);
    test_case("%s, %s to %s", tch_optim_kind_name(kind), from->name, to->name);
    open_both(context, &a, &b, TCH_FLOAT32, &c, &d);
    trial_steps(&a, 5);
    trial_take_over(&b, &a, test_path("form.safetensors"));
    check_matrices(&a, &b);
    step_both(&a, &b, 5);
    if (is_narrow(&a) || !is_narrow(&b)) {
        trial_check_same_parameters(&a, &b);
    }
}

TEST(checkpoints_are_exchanged)
{
    for (int k = 0; k < FORMS * FORMS; k++) {
        exchange(*state, TCH_OPTIM_SHAMPOO, &forms[k / FORMS], &forms[k % FORMS]);
        exchange(*state, TCH_OPTIM_KL_SHAMPOO, &forms[k / FORMS], &forms[k % FORMS]);
    }
    for (int k = 0; k < 2 * 2; k++) {
        exchange(*state, TCH_OPTIM_SOAP, &forms[k / 2], &forms[k % 2]);
    }
}

/* Rejected by a backend without `pack`; and fixed after creation. */
TEST(a_backend_that_cannot_pack)
{
    static const char *const words[] = {"packed_factors", "root_dtype is bfloat16"};
    static const char *const names[] = {"packed_factors", "root_dtype"};
    tch_context *context = *state;
    const tch_backend *own = context->backend;
    for (int i = 0; i < 2; i++) {
        static table_copy table;
        tch_optimizer *optimizer = NULL;
        test_tensor *p = test_tensor_make(context, TCH_FLOAT32, 2, (const int64_t[]){4, 4}, LAYOUT_CONTIGUOUS);
        const tch_parameter entry = {.tensor = &p->tensor};
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO, options, &forms[1 + i]);
        test_tensor_write(p, test_zeros(16));
        table_copy_make(&table, own);
        table.matrix.pack = NULL;
        context->backend = &table.backend;
        tch_status status = tch_optimizer_create(context, &c, NULL, 1, &entry, &optimizer);
        context->backend = own;
        test_check_refused(status, TCH_ERR_UNSUPPORTED, words[i]);
        CHECK_OK(tch_optimizer_create(context, &c, NULL, 1, &entry, &optimizer));
        c = config_of(TCH_OPTIM_SHAMPOO, options, &forms[0]);
        test_check_refused(tch_optimizer_set_config(optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, names[i]);
        tch_optimizer_destroy(optimizer);
    }
}

/* --- blocks in float16 -------------------------------------------------------------------------------------------- */

/* Float16 blocks of Shampoo and SOAP, on backends that support them: bitwise equal to float32 blocks converted later,
 * with and without filtering and refreshes, in any layout. The other path is forced by a table whose `gather` claims
 * float64 factors, which no float16 product writes; scales of the copies are computed in any case. Backends that keep
 * the type run the same path twice. */

/* Sizes and numbers for which a GPU of 132 multiprocessors has kernels for both factors and both roots. */
static const trial_shape large[] = {
    {.ndim = 2, .shape = {1024, 1032}},
    {.ndim = 2, .shape = {1024, 1032}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {1032, 1024}, .order = {1, 0}},
    {.ndim = 2, .shape = {1024, 1032}},
};
static const trial_shape small[] = {
    {.ndim = 2, .shape = {24, 16}},
    {.ndim = 2, .shape = {24, 16}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {16, 24}, .order = {1, 0}},
    {.ndim = 2, .shape = {24, 16}},
};
#define SHAPES ((int32_t)TEST_COUNT(large))

static const trial_option shampoo_blocks[] = {
    {.name = "defaults"},
    {"without grafting", {SET(shampoo.grafting, TCH_GRAFTING_NONE)}},
    {"without roots at first or a filter", {SET(beta1, 0), SET(shampoo.start_preconditioning_step, 3)}},
    {"without a filter", {SET(beta1, 0)}},
    {"weight decay in gradients", {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(weight_decay, 0.1)}},
    {"momentum, every step", {SET(momentum, 0.9), SET(shampoo.precondition_frequency, 1)}},
    {"packed factors", {SET(memory.packed_factors, 1)}},
    {"packed factors, roots of bfloat16", {SET(memory.packed_factors, 1), SET(memory.root_dtype, TCH_STATE_BFLOAT16)}},
    {.name = NULL},
};

static const trial_option soap_blocks[] = {
    {.name = "SOAP"},
    {"SOAP, weight decay in gradients", {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(weight_decay, 0.1)}},
    {"SOAP, packed factors, every step", {SET(memory.packed_factors, 1), SET(shampoo.precondition_frequency, 1)}},
    {.name = NULL},
};

static table_copy table;
static const tch_backend *real;
static int written; /* blocks stored in the backend's type */

static tch_status gather_with_sides(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    TCHI_TRY(real->update->gather(state, update, how, chosen));
    written += chosen != NULL && *chosen != update->block_type;
    return TCH_OK;
}

static tch_status gather_in_float32(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    tch_gathering wide = *how;
    tch_block_sides sides;
    if (how->sides != NULL) {
        sides = *how->sides;
        sides.factors[0].type = TCH_SCALAR_F64;
        wide.sides = &sides;
    }
    TCHI_TRY(real->update->gather(state, update, &wide, chosen));
    CHECK(chosen == NULL || *chosen == update->block_type, "blocks have another type");
    return TCH_OK;
}

static void step_with(tch_context *context, trial *t, tch_gather_op *gather, int32_t steps)
{
    table_copy_make(&table, real);
    table.update.gather = gather;
    context->backend = &table.backend;
    for (int32_t i = 0; i < steps; i++) {
        trial_draw(t);
        CHECK_OK(trial_step_library(t));
    }
    context->backend = real;
}

static bool is_hopper(const tch_context *context)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    CHECK_OK(tch_device_info_get(tch_context_device(context), &info));
    return info.compute_major == 9;
}

static void check_options(tch_context *context, const tch_optim_config *config, const trial_option *of)
{
    const trial_shape *shapes = test_on_cpu() ? small : large;
    real = context->backend;
    for (const trial_option *option = of; option->name != NULL; option++) {
        static trial with, without;
        tch_optim_config c = *config;
        c.lr = 0.01;
        c.beta2 = 0.95;
        c.shampoo.precondition_frequency = 3;
        trial_set(&c, option->settings);
        test_case("%s", option->name);
        written = 0;
        trial_open(&with, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        step_with(context, &with, gather_with_sides, 5);
        trial_open(&without, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        step_with(context, &without, gather_in_float32, 5);
        trial_check_same_parameters(&with, &without);
        CHECK(!is_hopper(context) || written > 0, "no block had another type");
    }
}

TEST(fp16_blocks_change_no_bit)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    c.shampoo.grafting = TCH_GRAFTING_ADAM;
    c.numerics.damping = 1e-6;
    check_options(*state, &c, shampoo_blocks);
}

TEST(fp16_blocks_change_no_bit_of_soap)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SOAP);
    c.soap.block = 1;
    c.shampoo.max_preconditioner_dim = 1024;
    check_options(*state, &c, soap_blocks);
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)
