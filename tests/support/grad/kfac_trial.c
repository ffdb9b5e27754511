#include "kfac_trial.h"

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

enum { INPUT, OUTPUT };

static double *unit_matrices(int64_t groups, int64_t n)
{
    double *x = test_zeros(groups * n * n);
    for (int64_t i = 0; i < groups * n; i++) {
        x[i / n * n * n + i % n * (n + 1)] = 1.0;
    }
    return x;
}

/* --- construction ------------------------------------------------------------------------------------------------ */

void test_kfac_describe(int32_t count, const test_kfac_layer *layers, tch_kfac_layer *out)
{
    for (int32_t i = 0; i < count; i++) {
        const test_layer_case *c = layers[i].layer;
        out[i] = (tch_kfac_layer){.layer = c->layer, .outputs = c->outputs, .bias = layers[i].bias, .name = c->name};
        out[i].inputs = c->inputs / c->layer.groups;
        for (int32_t d = 0; c->layer.kind == TCH_LAYER_CONV && d < c->layer.dims; d++) {
            out[i].inputs *= c->layer.kernel[d];
        }
    }
}

static test_kfac_reference make_reference(const tch_kfac_config *config, const tch_kfac_layer *layer)
{
    test_kfac_reference r = {.groups = layer->layer.groups, .inputs = layer->inputs, .bias = layer->bias};
    r.n = layer->inputs + layer->bias;
    r.p = layer->outputs / r.groups;
    for (int side = 0; side < 2; side++) {
        int64_t n = side == INPUT ? r.n : r.p;
        r.factor[side] = config->use_bias_correction ? test_zeros(r.groups * n * n) : unit_matrices(r.groups, n);
        r.basis[side] = unit_matrices(r.groups, n);
        r.divisor[side] = unit_matrices(r.groups, n);
        r.values[side] = test_zeros(r.groups * n);
    }
    r.scales = test_zeros(r.groups * r.p * r.n);
    return r;
}

static void make_gradients(test_kfac_trial *t, test_layout layout)
{
    for (int32_t i = 0; i < t->count; i++) {
        const test_layer_case *c = t->layers[i].layer;
        int32_t dims = c->layer.kind == TCH_LAYER_CONV ? c->layer.dims : 0;
        int64_t shape[5] = {c->outputs, c->inputs / c->layer.groups};
        for (int32_t k = 0; k < dims; k++) {
            shape[2 + k] = c->layer.kernel[k];
        }
        t->gradients[2 * i] = test_tensor_make(t->context, t->dtype, 2 + dims, shape, layout);
        t->gradients[2 * i + 1] =
            t->layers[i].bias ? test_tensor_make(t->context, t->dtype, 1, shape, LAYOUT_CONTIGUOUS) : NULL;
    }
}

static void destroy_kfac(void *kfac)
{
    tch_kfac_destroy(kfac);
}

test_kfac_trial *test_kfac_make(tch_context *context, const tch_kfac_config *config, int32_t count,
                                const test_kfac_layer *layers, tch_dtype dtype)
{
    test_kfac_trial *t = test_alloc(sizeof *t);
    tch_kfac_layer *described = test_alloc((size_t)count * sizeof *described + 1);
    *t = (test_kfac_trial){context, *config, count, layers, dtype, NULL, NULL, NULL, NULL, 1000, false};
    test_kfac_describe(count, layers, described);
    t->reference = test_alloc((size_t)count * sizeof *t->reference + 1);
    t->gradients = test_alloc((size_t)count * 2 * sizeof(test_tensor *) + 1);
    t->expected = test_alloc((size_t)count * sizeof(double *) + 1);
    for (int32_t i = 0; i < count; i++) {
        t->reference[i] = make_reference(config, &described[i]);
        t->expected[i] = test_zeros(described[i].outputs * t->reference[i].n);
    }
    make_gradients(t, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_kfac_create(context, config, NULL, count, described, &t->kfac));
    test_own(t->kfac, destroy_kfac);
    return t;
}

static tch_tensor *find_state(const test_kfac_trial *t, int32_t layer, const char *what)
{
    char name[256];
    snprintf(name, sizeof name, "%s/%s", t->layers[layer].layer->name, what);
    for (int32_t i = 0; i < tch_kfac_state_count(t->kfac); i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_kfac_get_state(t->kfac, i, &state));
        if (strcmp(state.name, name) == 0) {
            CHECK(state.parameter == layer, "%s is said to be of layer %d", name, state.parameter);
            return state.tensor;
        }
    }
    return NULL;
}

double *test_kfac_state(const test_kfac_trial *t, int32_t layer, const char *what, int64_t *count)
{
    tch_tensor *tensor = find_state(t, layer, what);
    if (tensor == NULL) {
        return NULL;
    }
    *count = tch_tensor_numel(tensor);
    double *x = test_zeros(*count);
    tch_tensor view = tch_tensor_view(x, TCH_FLOAT64, tensor->ndim, tensor->shape);
    CHECK_OK(tch_tensor_copy(t->context, &view, tensor));
    return x;
}

void test_kfac_put_state(const test_kfac_trial *t, int32_t layer, const char *what, double *values)
{
    tch_tensor *tensor = find_state(t, layer, what);
    CHECK(tensor != NULL, "there is no state %s", what);
    tch_tensor view = tch_tensor_view(values, TCH_FLOAT64, tensor->ndim, tensor->shape);
    CHECK_OK(tch_tensor_copy(t->context, tensor, &view));
}

/* --- observing --------------------------------------------------------------------------------------------------- */

/* The weight of the newest update: (1 - decay), bias-corrected. */
static double share_of(const tch_kfac_config *config, int64_t updates)
{
    double decay = config->factor_decay;
    double seen = 0.0;
    for (int64_t i = 0; i < updates; i++) {
        seen = decay * seen + 1.0;
    }
    return config->use_bias_correction ? 1.0 / seen : 1.0 - decay;
}

/* target = beta target + added. */
static void accumulate(int64_t count, double beta, const double *added, double *target)
{
    for (int64_t i = 0; i < count; i++) {
        target[i] = beta * target[i] + added[i];
    }
}

static void observe_reference(const test_kfac_trial *t, test_kfac_reference *r, const test_positions *batch,
                              double scale)
{
    bool first = r->pending == 0;
    r->updates += first;
    r->pending = (r->pending + 1) % t->config.accumulation_steps;
    double share = share_of(&t->config, r->updates);
    double alpha = share / t->config.accumulation_steps;
    double beta = first ? 1.0 - share : 1.0;
    int64_t most = r->groups * (r->n > r->p ? r->n * r->n : r->p * r->p);
    double *added = test_zeros(most);
    double *sizes = test_zeros(most);
    double *a = test_with_bias(batch, r->bias);
    test_reference_factor(batch, a, r->n, t->config.sharing, 1, alpha, added, sizes);
    accumulate(r->groups * r->n * r->n, beta, added, r->factor[INPUT]);
    test_reference_factor(batch, batch->g, r->p, t->config.sharing, 0, alpha * scale * scale, added, sizes);
    accumulate(r->groups * r->p * r->p, beta, added, r->factor[OUTPUT]);
    if (t->config.method == TCH_KFAC_EKFAC && r->refreshes > 0) {
        double weight = (1.0 - t->config.factor_decay) / t->config.accumulation_steps;
        test_reference_scales(batch, a, r->n, r->basis[INPUT], r->basis[OUTPUT],
                              weight * scale * scale / (double)batch->samples, added, sizes);
        accumulate(r->groups * r->p * r->n, first ? t->config.factor_decay : 1.0, added, r->scales);
    }
}

void test_kfac_observe(test_kfac_trial *t, int32_t layer, double scale)
{
    test_positions batch =
        test_positions_make(t->context, t->layers[layer].layer, t->dtype, LAYOUT_CONTIGUOUS, t->stream);
    t->stream += 2;
    TEST_WITHIN_LIMITS(t->context, t->little,
                       tch_kfac_observe(t->kfac, layer, &batch.input->tensor, &batch.gradient->tensor, scale, NULL));
    test_tensor_check_unchanged(batch.input, "input");
    test_tensor_check_unchanged(batch.gradient, "output_gradient");
    observe_reference(t, &t->reference[layer], &batch, scale);
}

/* --- refreshing -------------------------------------------------------------------------------------------------- */

/* out = (a + shift I)^-1, and its condition number. */
static double invert(int64_t n, const double *a, double shift, double *out)
{
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    ref_eigh(n, a, w, v);
    double condition = (w[n - 1] + shift) / (fmax(w[0], 0.0) + shift);
    for (int64_t i = 0; i < n; i++) {
        w[i] = 1.0 / (w[i] + shift);
    }
    ref_compose(n, v, w, out);
    return condition;
}

static void refresh_inverses(const test_kfac_trial *t, test_kfac_reference *r)
{
    for (int64_t g = 0; g < r->groups; g++) {
        const double *a = r->factor[INPUT] + g * r->n * r->n;
        const double *b = r->factor[OUTPUT] + g * r->p * r->p;
        double pi = sqrt((ref_trace(r->n, a) / (double)r->n) / (ref_trace(r->p, b) / (double)r->p));
        double root = sqrt(t->config.damping);
        double of_a = invert(r->n, a, pi * root, r->divisor[INPUT] + g * r->n * r->n);
        double of_b = invert(r->p, b, root / pi, r->divisor[OUTPUT] + g * r->p * r->p);
        r->condition = fmax(r->condition, of_a + of_b);
    }
}

static void refresh_bases(const test_kfac_trial *t, test_kfac_reference *r)
{
    double largest = 0.0;
    for (int64_t g = 0; g < r->groups; g++) {
        double product = 1.0;
        for (int side = 0; side < 2; side++) {
            int64_t n = side == INPUT ? r->n : r->p;
            double *w = r->values[side] + g * n;
            double *v = test_zeros(n * n);
            ref_eigh(n, r->factor[side] + g * n * n, w, v);
            ref_transpose(n, n, v, r->basis[side] + g * n * n);
            product *= w[n - 1];
            for (int64_t i = 0; i < n; i++) {
                w[i] = fmax(w[i], 0.0);
            }
        }
        largest = fmax(largest, product);
    }
    r->condition = (largest + t->config.damping) / t->config.damping;
}

/* Checks Q Q' = I and Q F Q' = diag(values) to the factors' roundoff. */
static void check_basis(const test_kfac_trial *t, const double *f, int64_t n, const double *q, const double *w)
{
    double u = test_unit_roundoff(t->config.factor_dtype);
    double bound = 40.0 * (double)n * u;
    double size = ref_norm(n * n, f);
    for (int64_t k = 0; k < n * n; k++) {
        double product = 0.0;
        double rotated = 0.0;
        for (int64_t i = 0; i < n; i++) {
            product += q[k / n * n + i] * q[k % n * n + i];
            for (int64_t j = 0; j < n; j++) {
                rotated += q[k / n * n + i] * f[i * n + j] * q[k % n * n + j];
            }
        }
        bool diagonal = k / n == k % n;
        CHECK(fabs(product - (diagonal ? 1.0 : 0.0)) <= bound, "Q Q' has %.17g at %lld", product, (long long)k);
        CHECK(fabs(rotated - (diagonal ? w[k / n] : 0.0)) <= bound * size, "Q F Q' has %.17g at %lld", rotated,
              (long long)k);
    }
}

/* EKFAC continues in the library's basis. */
static void take_basis(const test_kfac_trial *t, int32_t layer)
{
    static const char *const bases[] = {"input_basis", "output_basis"};
    static const char *const values[] = {"input_values", "output_values"};
    test_kfac_reference *r = &t->reference[layer];
    for (int side = 0; side < 2; side++) {
        int64_t n = side == INPUT ? r->n : r->p;
        int64_t count;
        double *q = test_kfac_state(t, layer, bases[side], &count);
        double *w = test_kfac_state(t, layer, values[side], &count);
        for (int64_t g = 0; g < r->groups; g++) {
            check_basis(t, r->factor[side] + g * n * n, n, q + g * n * n, w + g * n);
        }
        memcpy(r->basis[side], q, (size_t)(r->groups * n * n) * sizeof *q);
        memcpy(r->values[side], w, (size_t)(r->groups * n) * sizeof *w);
    }
    for (int64_t k = 0; k < r->groups * r->p * r->n; k++) {
        int64_t row = k / r->n;
        r->scales[k] = r->values[OUTPUT][row] * r->values[INPUT][row / r->p * r->n + k % r->n];
    }
}

void test_kfac_refresh(test_kfac_trial *t)
{
    TEST_WITHIN_LIMITS(t->context, t->little, tch_kfac_refresh(t->kfac));
    for (int32_t i = 0; i < t->count; i++) {
        test_kfac_reference *r = &t->reference[i];
        if (r->updates == 0) {
            continue;
        }
        r->refreshes++;
        r->condition = 0.0;
        if (t->config.method == TCH_KFAC_INVERSE) {
            refresh_inverses(t, r);
        } else {
            refresh_bases(t, r);
        }
        if (t->config.method == TCH_KFAC_EKFAC) {
            take_basis(t, i);
        }
    }
}

/* --- preconditioning --------------------------------------------------------------------------------------------- */

void test_kfac_draw_gradients(test_kfac_trial *t, test_layout layout)
{
    for (int32_t i = 0; i < 2 * t->count; i++) {
        if (t->gradients[i] != NULL) {
            test_tensor_free(t->gradients[i]);
        }
    }
    make_gradients(t, layout);
    for (int32_t i = 0; i < t->count; i++) {
        test_kfac_reference *r = &t->reference[i];
        int64_t rows = r->groups * r->p;
        double *weight = test_zeros(rows * r->inputs);
        double *bias = test_zeros(rows);
        test_random random = test_random_stream(t->stream++);
        for (int64_t k = 0; k < rows * r->n; k++) {
            double value = test_round(t->dtype, test_random_normal(&random));
            bool is_bias = k % r->n == r->inputs;
            *(is_bias ? &bias[k / r->n] : &weight[k / r->n * r->inputs + k % r->n]) = value;
            t->expected[i][k] = value;
        }
        test_tensor_write(t->gradients[2 * i], weight);
        if (r->bias) {
            test_tensor_write(t->gradients[2 * i + 1], bias);
        }
    }
}

/* x = l x r for l p by p, x p by n, r n by n. */
static void multiply_both_sides(int64_t p, int64_t n, const double *l, const double *r, double *x)
{
    double *left = test_zeros(p * n);
    ref_matmul(p, p, n, l, x, left);
    ref_matmul(p, n, n, left, r, x);
}

static double *transposed(int64_t n, const double *q)
{
    double *out = test_zeros(n * n);
    ref_transpose(n, n, q, out);
    return out;
}

static void precondition_group(const test_kfac_trial *t, const test_kfac_reference *r, int64_t g, double *x)
{
    int64_t at_a = g * r->n * r->n;
    int64_t at_g = g * r->p * r->p;
    if (t->config.method == TCH_KFAC_INVERSE) {
        multiply_both_sides(r->p, r->n, r->divisor[OUTPUT] + at_g, r->divisor[INPUT] + at_a, x);
        return;
    }
    double *qa = transposed(r->n, r->basis[INPUT] + at_a);
    double *qg = transposed(r->p, r->basis[OUTPUT] + at_g);
    multiply_both_sides(r->p, r->n, r->basis[OUTPUT] + at_g, qa, x);
    for (int64_t k = 0; k < r->p * r->n; k++) {
        double by = t->config.method == TCH_KFAC_EKFAC
                        ? r->scales[g * r->p * r->n + k]
                        : r->values[OUTPUT][g * r->p + k / r->n] * r->values[INPUT][g * r->n + k % r->n];
        x[k] /= by + t->config.damping;
    }
    multiply_both_sides(r->p, r->n, qg, r->basis[INPUT] + at_a, x);
}

/* The new gradients in `expected`, and their inner product with the old ones. */
static double precondition_layer(const test_kfac_trial *t, int32_t layer)
{
    const test_kfac_reference *r = &t->reference[layer];
    int64_t count = r->groups * r->p * r->n;
    double *before = test_zeros(count);
    double dot = 0.0;
    memcpy(before, t->expected[layer], (size_t)count * sizeof *before);
    for (int64_t g = 0; g < r->groups; g++) {
        precondition_group(t, r, g, t->expected[layer] + g * r->p * r->n);
    }
    for (int64_t k = 0; k < count; k++) {
        dot += before[k] * t->expected[layer][k];
    }
    return dot;
}

void test_kfac_precondition(test_kfac_trial *t, double lr)
{
    tch_tensor **arguments = test_alloc((size_t)t->count * 2 * sizeof *arguments + 1);
    double dot = 0.0;
    for (int32_t i = 0; i < 2 * t->count; i++) {
        arguments[i] = t->gradients[i] == NULL ? NULL : &t->gradients[i]->tensor;
    }
    TEST_WITHIN_LIMITS(t->context, t->little, tch_kfac_precondition(t->kfac, lr, 2 * t->count, arguments));
    for (int32_t i = 0; i < t->count; i++) {
        dot += t->reference[i].refreshes > 0 ? precondition_layer(t, i) : 0.0;
    }
    double scale = t->config.kl_clip > 0.0 && dot != 0.0 ? sqrt(t->config.kl_clip / fabs(lr * lr * dot)) : 1.0;
    scale = scale < 1.0 ? scale : 1.0;
    for (int32_t i = 0; i < t->count; i++) {
        const test_kfac_reference *r = &t->reference[i];
        for (int64_t k = 0; k < r->groups * r->p * r->n && r->refreshes > 0; k++) {
            t->expected[i][k] *= scale;
        }
    }
}

/* Rounding errors of factors, bases and products, a few per term of their sums, are magnified by the condition number
 * of what is inverted; the result is rounded once more. */
static void check_layer(const test_kfac_trial *t, int32_t layer)
{
    const test_kfac_reference *r = &t->reference[layer];
    int64_t rows = r->groups * r->p;
    double *weight = test_tensor_read(t->gradients[2 * layer]);
    double *bias = r->bias ? test_tensor_read(t->gradients[2 * layer + 1]) : NULL;
    double distance = 0.0;
    double size = ref_norm(rows * r->n, t->expected[layer]);
    for (int64_t k = 0; k < rows * r->n; k++) {
        bool is_bias = k % r->n == r->inputs;
        double got = is_bias ? bias[k / r->n] : weight[k / r->n * r->inputs + k % r->n];
        double error = got - t->expected[layer][k];
        distance += error * error;
    }
    double u = fmax(test_unit_roundoff(t->config.factor_dtype), test_arithmetic_roundoff(t->dtype));
    double errors = 4.0 * (double)(r->n + r->p) * u * fmax(r->condition, 1.0) + test_unit_roundoff(t->dtype);
    CHECK(sqrt(distance) <= errors * size, "layer %s is off by %.3g of its size, more than %.3g",
          t->layers[layer].layer->name, sqrt(distance) / size, errors);
}

void test_kfac_check_gradients(const test_kfac_trial *t)
{
    for (int32_t i = 0; i < t->count; i++) {
        test_tensor_check_written(t->gradients[2 * i], "the weight's gradient");
        check_layer(t, i);
    }
}
