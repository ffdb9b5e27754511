/* Inverse fourth roots of a batch, as Shampoo takes them of its factors: with damping, the certificate of every result,
 * and a report with the status of each matrix. One matrix is spoilt on purpose. */
#include "example.h"

enum { BATCH = 4, N = 128, SPOILT = 2 };

static const double damping = 1e-4; /* of the largest eigenvalue */

/* The matrix H diag((w + shift)^power) H, where w falls from 1 to 1e-8 and H = I - (2/N) 1 1' is a reflection. */
static void fill(float *out, double shift, double power)
{
    double f[N], sum = 0;
    for (int i = 0; i < N; i++) {
        f[i] = pow(pow(10.0, -8.0 * i / (N - 1)) + shift, power);
        sum += f[i];
    }
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) {
            out[i * N + j] = (float)((i == j ? f[i] : 0.0) - 2.0 / N * (f[i] + f[j]) + 4.0 / N / N * sum);
        }
    }
}

static double distance(const float *x, const float *exact)
{
    double error = 0, norm = 0;
    for (int i = 0; i < N * N; i++) {
        error += ((double)x[i] - exact[i]) * ((double)x[i] - exact[i]);
        norm += (double)exact[i] * exact[i];
    }
    return sqrt(error / norm);
}

int main(void)
{
    static float a[BATCH][N * N], x[BATCH][N * N], exact[N * N];
    double residuals[BATCH];
    int32_t reports[BATCH];
    int64_t shape[] = {BATCH, N, N};
    tch_tensor in = tch_tensor_view(a, TCH_FLOAT32, 3, shape);
    tch_tensor out = tch_tensor_view(x, TCH_FLOAT32, 3, shape);
    tch_tensor residual = tch_tensor_view(residuals, TCH_FLOAT64, 1, shape);
    tch_tensor report = tch_tensor_view(reports, TCH_INT32, 1, shape);
    for (int b = 0; b < BATCH; b++) {
        fill(a[b], 0.0, 1.0);
    }
    a[SPOILT][0] = NAN;

    tch_context *context;
    must(tch_context_create("cpu", &context));
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = damping;
    must(tch_inverse_root(context, &in, 4, &config, &out, &residual, &report));

    tch_root_method method;
    must(tch_inverse_root_plan(context, TCH_FLOAT32, BATCH, N, 4, &config, &method, NULL));
    printf("A^(-1/4) of %d matrices %d x %d, method %s\n", BATCH, N, N, tch_root_method_name(method));
    fill(exact, damping, -0.25);
    int wrong = 0;
    for (int b = 0; b < BATCH; b++) {
        if (reports[b] == TCH_REPORT_OK) {
            double error = distance(x[b], exact);
            printf("matrix %d: residual %.1e, error %.1e\n", b, residuals[b], error);
            wrong += b == SPOILT || error > 1e-3;
        } else {
            printf("matrix %d: not finite, so its output was left alone\n", b);
            wrong += b != SPOILT || reports[b] != TCH_REPORT_NOT_FINITE || x[b][0] != 0.0f;
        }
    }
    tch_context_destroy(context);
    return wrong == 0 ? 0 : 1;
}
