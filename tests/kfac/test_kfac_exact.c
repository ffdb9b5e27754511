/* What KFAC claims to be, on networks small enough to say it whole.
 *
 * In a linear network with squared loss the derivative of the outputs with respect to a layer is B (x) a', with a the
 * layer's input and B the product of the weights above it, the same for all samples: the Gauss-Newton matrix E[J'J] is
 * then exactly (B'B) (x) E[a a'], in row-major order. KFAC sees it as the average over outputs k of g = B' e_k, for
 * which one step of as many observations serves. J is taken here by moving one weight at a time, which is exact for a
 * network that is linear in each.
 *
 * In a network that is not linear KFAC is no longer exact, and EKFAC, whose scales are the best there are in its basis,
 * must be nearer to the empirical Fisher matrix in the Frobenius norm: what it lacks is orthogonal to all that is
 * diagonal there, so that the distances of Fisher, EKFAC and KFAC obey Pythagoras. */
#include <math.h>
#include <string.h>

#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static double *numbers(int64_t count, uint64_t stream)
{
    double *x = test_alloc((size_t)count * sizeof *x);
    test_random random = test_random_stream(stream);
    test_random_fill_normal(&random, x, count);
    return x;
}

static test_tensor *matrix(tch_context *context, int64_t rows, int64_t cols, const double *values)
{
    test_tensor *t = test_tensor_make(context, TCH_FLOAT64, 2, (const int64_t[]){rows, cols}, LAYOUT_CONTIGUOUS);
    test_tensor_write(t, values);
    return t;
}

static double *state_of(tch_context *context, tch_kfac *kfac, int32_t index)
{
    tch_optim_state state = TCH_OPTIM_STATE_INIT;
    CHECK_OK(tch_kfac_get_state(kfac, index, &state));
    double *x = test_alloc((size_t)tch_tensor_numel(state.tensor) * sizeof *x);
    tch_tensor view = tch_tensor_view(x, TCH_FLOAT64, state.tensor->ndim, state.tensor->shape);
    CHECK_OK(tch_tensor_copy(context, &view, state.tensor));
    return x;
}

/* --- linear networks --------------------------------------------------------------------------------------------- */

#define DEPTH 3
#define SAMPLES 9
static const int64_t width[DEPTH + 1] = {4, 5, 3, 2}; /* of the input, and of each layer's output */
#define OUTPUTS 2

typedef struct linear_network {
    double *weights[DEPTH];
    double *inputs[DEPTH + 1]; /* of each layer, an example in each row; the last are the outputs */
} linear_network;

static void forward(linear_network *net)
{
    for (int l = 0; l < DEPTH; l++) {
        double *turned = test_alloc((size_t)(width[l] * width[l + 1]) * sizeof *turned);
        ref_transpose(width[l + 1], width[l], net->weights[l], turned);
        ref_matmul(SAMPLES, width[l], width[l + 1], net->inputs[l], turned, net->inputs[l + 1]);
    }
}

static linear_network make_network(void)
{
    linear_network net;
    for (int l = 0; l <= DEPTH; l++) {
        net.inputs[l] = numbers(SAMPLES * width[l], (uint64_t)(80 + l));
        if (l < DEPTH) {
            net.weights[l] = numbers(width[l] * width[l + 1], (uint64_t)(90 + l));
        }
    }
    forward(&net);
    return net;
}

/* E[J'J] of layer l: J's column is what the outputs change by when one weight grows by 1. */
static double *gauss_newton(linear_network *net, int l)
{
    int64_t count = width[l] * width[l + 1];
    int64_t outputs = SAMPLES * OUTPUTS;
    double *before = test_alloc((size_t)outputs * sizeof *before);
    double *jacobian = test_alloc((size_t)(outputs * count) * sizeof *jacobian);
    double *turned = test_alloc((size_t)(outputs * count) * sizeof *turned);
    double *product = test_alloc((size_t)(count * count) * sizeof *product);
    memcpy(before, net->inputs[DEPTH], (size_t)outputs * sizeof *before);
    for (int64_t k = 0; k < count; k++) {
        double kept = net->weights[l][k];
        net->weights[l][k] = kept + 1.0;
        forward(net);
        for (int64_t i = 0; i < outputs; i++) {
            jacobian[i * count + k] = (net->inputs[DEPTH][i] - before[i]) / sqrt(SAMPLES);
        }
        net->weights[l][k] = kept;
    }
    forward(net);
    ref_transpose(outputs, count, jacobian, turned);
    ref_matmul(count, outputs, count, turned, jacobian, product);
    return product;
}

/* g = B' e_k for every sample, B the product of the weights above layer l. */
static double *output_gradients(const linear_network *net, int l, int64_t k)
{
    double *g = test_alloc(SAMPLES * 8 * sizeof *g);
    double row[8] = {0};
    row[k] = 1.0;
    for (int above = DEPTH - 1; above > l; above--) {
        double below[8];
        ref_matmul(1, width[above + 1], width[above], row, net->weights[above], below);
        memcpy(row, below, sizeof row);
    }
    for (int64_t i = 0; i < SAMPLES; i++) {
        memcpy(g + i * width[l + 1], row, (size_t)width[l + 1] * sizeof *g);
    }
    return g;
}

static void observe_network(tch_context *context, tch_kfac *kfac, const linear_network *net)
{
    for (int l = 0; l < DEPTH; l++) {
        test_tensor *a = matrix(context, SAMPLES, width[l], net->inputs[l]);
        for (int64_t k = 0; k < OUTPUTS; k++) {
            double *values = output_gradients(net, l, k);
            test_tensor *g = matrix(context, SAMPLES, width[l + 1], values);
            CHECK_OK(tch_kfac_observe(kfac, l, &a->tensor, &g->tensor, sqrt(OUTPUTS), NULL));
        }
    }
}

static tch_kfac *make_kfac(tch_context *context, tch_kfac_method method, double damping)
{
    tch_kfac_layer layers[DEPTH] = {0};
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    tch_kfac *kfac;
    config.method = method;
    config.damping = damping;
    config.kl_clip = 0.0;
    config.accumulation = OUTPUTS;
    config.factor_dtype = TCH_FLOAT64;
    for (int l = 0; l < DEPTH; l++) {
        layers[l].layer = (tch_layer)TCH_LAYER_INIT(TCH_LAYER_LINEAR);
        layers[l].inputs = width[l];
        layers[l].outputs = width[l + 1];
    }
    CHECK_OK(tch_kfac_create(context, &config, NULL, DEPTH, layers, &kfac));
    return kfac;
}

/* Kronecker products and sums of SAMPLES terms in float64. */
static void factors_give_the_gauss_newton_matrix(void **state)
{
    linear_network net = make_network();
    tch_kfac *kfac = make_kfac(*state, TCH_KFAC_INVERSE, 1e-3);
    observe_network(*state, kfac, &net);
    for (int l = 0; l < DEPTH; l++) {
        int64_t d = width[l];
        int64_t p = width[l + 1];
        double *a = state_of(*state, kfac, 4 * l);
        double *g = state_of(*state, kfac, 4 * l + 1);
        double *product = test_alloc((size_t)(d * p * d * p) * sizeof *product);
        double *exact = gauss_newton(&net, l);
        ref_kronecker(p, p, g, d, d, a, product);
        double distance = ref_distance(d * p * d * p, product, exact);
        test_case("layer %d", l);
        CHECK(distance <= 1e-13 * ref_norm(d * p * d * p, exact), "off by %.3g of its size",
              distance / ref_norm(d * p * d * p, exact));
    }
    tch_kfac_destroy(kfac);
}

/* (E[J'J] + damping I)^-1 gradient by the eigenvectors of the whole matrix. */
static double *solve_densely(const double *curvature, int64_t n, double damping, const double *gradient)
{
    double *w = test_alloc((size_t)n * sizeof *w);
    double *v = test_alloc((size_t)(n * n) * sizeof *v);
    double *inverse = test_alloc((size_t)(n * n) * sizeof *inverse);
    double *out = test_alloc((size_t)n * sizeof *out);
    ref_eigh(n, curvature, w, v);
    for (int64_t i = 0; i < n; i++) {
        w[i] = 1.0 / (fmax(w[i], 0.0) + damping);
    }
    ref_compose(n, v, w, inverse);
    ref_matmul(n, n, 1, inverse, gradient, out);
    return out;
}

/* In the eigenbasis damping is added to the whole matrix, so the step is the damped Gauss-Newton step itself. */
static void the_step_is_the_gauss_newton_step(void **state)
{
    const double damping = 1e-2;
    linear_network net = make_network();
    tch_kfac *kfac = make_kfac(*state, TCH_KFAC_EIGEN, damping);
    double *before[DEPTH];
    test_tensor *gradients[DEPTH];
    tch_tensor *arguments[2 * DEPTH] = {0};
    observe_network(*state, kfac, &net);
    CHECK_OK(tch_kfac_refresh(kfac));
    for (int l = 0; l < DEPTH; l++) {
        before[l] = numbers(width[l] * width[l + 1], (uint64_t)(70 + l));
        gradients[l] = matrix(*state, width[l + 1], width[l], before[l]);
        arguments[2 * l] = &gradients[l]->tensor;
    }
    CHECK_OK(tch_kfac_precondition(kfac, 1.0, 2 * DEPTH, arguments));
    for (int l = 0; l < DEPTH; l++) {
        int64_t count = width[l] * width[l + 1];
        double *exact = gauss_newton(&net, l);
        double *expected = solve_densely(exact, count, damping, before[l]);
        double *got = test_tensor_read(gradients[l]);
        double distance = ref_distance(count, got, expected);
        test_case("layer %d", l);
        CHECK(distance <= 1e-10 * ref_norm(count, expected), "off by %.3g of its size",
              distance / ref_norm(count, expected));
    }
    tch_kfac_destroy(kfac);
}

/* --- EKFAC ------------------------------------------------------------------------------------------------------- */

#define MANY 400
#define D 4
#define P 3

/* Inputs and output gradients of the first of two layers with a tanh between them, of the squared distance to targets
 * that depend on the input: what g is depends on what a is. */
static void nonlinear_batch(double *a, double *g)
{
    double *w1 = numbers(D * P, 60);
    double *w2 = numbers(P, 61);
    test_random random = test_random_stream(62);
    for (int64_t i = 0; i < MANY; i++) {
        double hidden[P];
        double output = 0.0;
        for (int k = 0; k < D; k++) {
            a[i * D + k] = test_random_normal(&random);
        }
        for (int j = 0; j < P; j++) {
            double z = 0.0;
            for (int k = 0; k < D; k++) {
                z += w1[j * D + k] * a[i * D + k];
            }
            hidden[j] = tanh(z);
            output += w2[j] * hidden[j];
        }
        double error = output - sin(2.0 * a[i * D]) * a[i * D + 1];
        for (int j = 0; j < P; j++) {
            g[i * P + j] = error * w2[j] * (1.0 - hidden[j] * hidden[j]);
        }
    }
}

/* E[v v'] of the per-sample gradients v = g (x) a. */
static void empirical_fisher(const double *a, const double *g, double *fisher)
{
    memset(fisher, 0, sizeof(double) * D * P * D * P);
    for (int64_t i = 0; i < MANY; i++) {
        double v[D * P];
        for (int k = 0; k < D * P; k++) {
            v[k] = g[i * P + k / D] * a[i * D + k % D];
        }
        for (int k = 0; k < D * P * D * P; k++) {
            fisher[k] += v[k / (D * P)] * v[k % (D * P)] / MANY;
        }
    }
}

/* Q' diag(s) Q for Q = Q_G (x) Q_A. */
static void compose(const double *qa, const double *qg, const double *scales, double *out)
{
    double q[D * P * D * P];
    double v[D * P * D * P];
    ref_kronecker(P, P, qg, D, D, qa, q);
    ref_transpose(D * P, D * P, q, v);
    ref_compose(D * P, v, scales, out);
}

static void ekfac_is_nearer_than_kfac(void **state)
{
    double a[MANY * D];
    double g[MANY * P];
    double fisher[D * P * D * P];
    double kfac_matrix[D * P * D * P];
    double ekfac_matrix[D * P * D * P];
    tch_kfac_layer layer = {TCH_LAYER_INIT(TCH_LAYER_LINEAR), D, P, 0, NULL};
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    tch_kfac *kfac;
    config.method = TCH_KFAC_EKFAC;
    config.factor_decay = 0.0;
    config.factor_dtype = TCH_FLOAT64;
    nonlinear_batch(a, g);
    empirical_fisher(a, g, fisher);
    test_tensor *input = matrix(*state, MANY, D, a);
    test_tensor *gradient = matrix(*state, MANY, P, g);
    CHECK_OK(tch_kfac_create(*state, &config, NULL, 1, &layer, &kfac));
    CHECK_OK(tch_kfac_observe(kfac, 0, &input->tensor, &gradient->tensor, 1.0, NULL));
    CHECK_OK(tch_kfac_refresh(kfac));
    double *of_factors = state_of(*state, kfac, 6);
    CHECK_OK(tch_kfac_observe(kfac, 0, &input->tensor, &gradient->tensor, 1.0, NULL));
    double *of_gradients = state_of(*state, kfac, 6);
    double *qa = state_of(*state, kfac, 2);
    double *qg = state_of(*state, kfac, 4);
    compose(qa, qg, of_factors, kfac_matrix);
    compose(qa, qg, of_gradients, ekfac_matrix);
    double far = ref_distance(D * P * D * P, kfac_matrix, fisher);
    double near = ref_distance(D * P * D * P, ekfac_matrix, fisher);
    test_case("a network with a tanh");
    double apart = ref_distance(D * P * D * P, kfac_matrix, ekfac_matrix);
    CHECK(near < far && apart > 1e-3 * far, "EKFAC is %.4g from the Fisher matrix, KFAC %.4g, %.4g apart", near, far,
          apart);
    CHECK(fabs(near * near + apart * apart - far * far) <= 1e-10 * far * far,
          "EKFAC is not the nearest in its basis: %.17g and %.17g make %.17g", near, apart, far);
    tch_kfac_destroy(kfac);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(factors_give_the_gauss_newton_matrix),
        cmocka_unit_test(the_step_is_the_gauss_newton_step),
        cmocka_unit_test(ekfac_is_nearer_than_kfac),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
