/* The smallest program: the inverse fourth root of one matrix. Its eigenvalues are 81 and 1, so the answer is known. */
#include <math.h>
#include <stdio.h>

#include <torchium/torchium.h>

int main(void)
{
    float a[] = {41, 40, 40, 41}, x[4];
    int64_t shape[] = {2, 2};
    tch_tensor in = tch_tensor_view(a, TCH_FLOAT32, 2, shape);
    tch_tensor out = tch_tensor_view(x, TCH_FLOAT32, 2, shape);
    tch_context *context;
    if (tch_context_create("cpu", &context) || tch_inverse_root(context, &in, 4, NULL, &out, NULL, NULL)) {
        fprintf(stderr, "%s\n", tch_last_error());
        return 1;
    }
    printf("A^(-1/4) = [%.4f %.4f; %.4f %.4f]\n", x[0], x[1], x[2], x[3]);
    tch_context_destroy(context);
    return fabsf(x[0] - 2.0f / 3.0f) < 1e-5f && fabsf(x[1] + 1.0f / 3.0f) < 1e-5f ? 0 : 1;
}
