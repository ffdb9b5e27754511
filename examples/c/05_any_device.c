/* Inverse roots on the best device of this machine: memory of the device, copies in and out, and a report, so that no
 * call in between synchronizes. */
#include "example.h"

#define BATCH 64
#define N 128

/* A = 1 + I, all entries 1 and the diagonal 2: eigenvalues N + 1 and 1. */
static void fill(float *a)
{
    for (int64_t i = 0; i < (int64_t)BATCH * N * N; i++) {
        a[i] = i / N % N == i % N ? 2.0f : 1.0f;
    }
}

int main(void)
{
    int64_t shape[] = {BATCH, N, N};
    float *host = malloc(sizeof(float) * BATCH * N * N);
    int32_t reports[BATCH];
    if (host == NULL) {
        return 1;
    }
    fill(host);
    tch_tensor numbers = tch_tensor_view(host, TCH_FLOAT32, 3, shape);
    tch_tensor verdicts = tch_tensor_view(reports, TCH_INT32, 1, shape);

    tch_context *context;
    must(tch_context_create("auto", &context)); /* a GPU if one can be used, else the CPU */
    tch_tensor *a = create_tensor(context, TCH_FLOAT32, 3, shape);
    tch_tensor *x = create_tensor(context, TCH_FLOAT32, 3, shape);
    tch_tensor *report = create_tensor(context, TCH_INT32, 1, shape);

    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-6;
    must(tch_tensor_copy(context, a, &numbers));
    must(tch_inverse_root(context, a, 4, &config, x, NULL, report)); /* queued; asynchronous */
    must(tch_tensor_copy(context, &numbers, x));                     /* synchronizes */
    must(tch_tensor_copy(context, &verdicts, report));

    int bad = 0;
    for (int i = 0; i < BATCH; i++) {
        bad += reports[i] != TCH_REPORT_OK;
    }
    tch_device device = tch_context_device(context);
    printf("%d roots on %s, %d failed, A^(-1/4)[0][0] = %.4f\n", BATCH, device.type == TCH_DEVICE_CUDA ? "cuda" : "cpu",
           bad, host[0]);
    tch_tensor_destroy(a);
    tch_tensor_destroy(x);
    tch_tensor_destroy(report);
    tch_context_destroy(context);
    double expected = (pow(N + 1, -0.25) - 1.0) / N + 1.0;
    int good = bad == 0 && fabs(host[0] - expected) < 1e-3;
    free(host);
    return good ? 0 : 1;
}
