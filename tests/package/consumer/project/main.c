/* A minimal program with the installed library: one inverse root with a known value. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <torchium/torchium.h>

int main(void)
{
    float a[4] = {16.0f, 0.0f, 0.0f, 81.0f}, x[4] = {0};
    int64_t shape[2] = {2, 2};
    tch_tensor in = tch_tensor_view(a, TCH_FLOAT32, 2, shape);
    tch_tensor out = tch_tensor_view(x, TCH_FLOAT32, 2, shape);
    tch_context *context = NULL;

    if (strcmp(tch_version(), TCH_VERSION_STRING) != 0) {
        fprintf(stderr, "headers are of %s, the library is %s\n", TCH_VERSION_STRING, tch_version());
        return 1;
    }
    if (tch_context_create("cpu", &context) != TCH_OK ||
        tch_inverse_root(context, &in, 4, NULL, &out, NULL, NULL) != TCH_OK) {
        fprintf(stderr, "%s\n", tch_last_error());
        tch_context_destroy(context);
        return 1;
    }
    tch_context_destroy(context);
    printf("torchium %s: diag(16, 81)^(-1/4) = diag(%.4f, %.4f)\n", tch_version(), (double)x[0], (double)x[3]);
    return fabsf(x[0] - 0.5f) < 1e-4f && fabsf(x[3] - 1.0f / 3.0f) < 1e-4f ? 0 : 1;
}
