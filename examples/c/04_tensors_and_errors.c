/* Tensors over your own memory: strides, slices and transposes without copies, leading dimensions as a batch, and what
 * an error looks like. */
#include <string.h>

#include "example.h"

/* A 3 by 2 block of a 4 by 5 array, and its transpose: the same memory, other strides. */
static int strided_views(tch_context *context)
{
    double array[4 * 5], product[4];
    for (int i = 0; i < 4 * 5; i++) {
        array[i] = i;
    }
    int64_t shape[] = {3, 2}, strides[] = {5, 1};
    tch_tensor block = {.data = array,
                        .device = {TCH_DEVICE_CPU, 0},
                        .ndim = 2,
                        .dtype = {TCH_FLOAT, 64, 1},
                        .shape = shape,
                        .strides = strides,
                        .byte_offset = (1 * 5 + 2) * sizeof(double)}; /* row 1, column 2 */
    int64_t transposed_shape[] = {2, 3}, transposed_strides[] = {1, 5};
    tch_tensor transposed = block;
    transposed.shape = transposed_shape;
    transposed.strides = transposed_strides;

    int64_t out_shape[] = {2, 2};
    tch_tensor out = tch_tensor_view(product, TCH_FLOAT64, 2, out_shape);
    must(tch_matmul(context, &transposed, &block, &out));
    /* rows (7, 8), (12, 13), (17, 18) of the block */
    printf("B'B = [%g %g; %g %g]\n", product[0], product[1], product[2], product[3]);
    return product[0] != 7 * 7 + 12 * 12 + 17 * 17 || product[1] != 7 * 8 + 12 * 13 + 17 * 18;
}

/* [2, 3, n, n] times one [n, n]: leading dimensions are the batch, and they broadcast. */
static int batches(tch_context *context)
{
    enum { N = 4 };
    float a[2 * 3 * N * N], b[N * N] = {0}, c[2 * 3 * N * N];
    for (int i = 0; i < 2 * 3 * N * N; i++) {
        a[i] = (float)i;
    }
    for (int i = 0; i < N; i++) {
        b[i * N + i] = 2.0f;
    }
    int64_t many[] = {2, 3, N, N}, one[] = {N, N};
    tch_tensor left = tch_tensor_view(a, TCH_FLOAT32, 4, many);
    tch_tensor right = tch_tensor_view(b, TCH_FLOAT32, 2, one);
    tch_tensor out = tch_tensor_view(c, TCH_FLOAT32, 4, many);
    must(tch_matmul(context, &left, &right, &out));
    printf("last entry of six products: %g\n", c[2 * 3 * N * N - 1]);
    return c[2 * 3 * N * N - 1] != 190.0f;
}

/* The status says what kind of error it is, the message says which argument, what it was and what was expected. */
static int errors(tch_context *context)
{
    float a[2 * 3] = {0}, b[2 * 3] = {0}, c[2 * 2] = {-1, -1, -1, -1};
    int64_t shape[] = {2, 3}, out_shape[] = {2, 2};
    tch_tensor left = tch_tensor_view(a, TCH_FLOAT32, 2, shape);
    tch_tensor right = tch_tensor_view(b, TCH_FLOAT32, 2, shape);
    tch_tensor out = tch_tensor_view(c, TCH_FLOAT32, 2, out_shape);
    tch_status status = tch_matmul(context, &left, &right, &out);
    if (status != TCH_OK) {
        printf("%s: %s\n", tch_status_name(status), tch_last_error());
    }
    return status != TCH_ERR_SHAPE || strlen(tch_last_error()) == 0 || c[0] != -1.0f; /* and nothing was written */
}

/* Without a report, a bad matrix is an error that names it; the good ones are done all the same. */
static int bad_matrix(tch_context *context)
{
    double a[2 * 2 * 2] = {4, 0, 0, 4, /* good */ 1, 2, 0, 1 /* not symmetric */}, x[2 * 2 * 2] = {0};
    int64_t shape[] = {2, 2, 2};
    tch_tensor in = tch_tensor_view(a, TCH_FLOAT64, 3, shape);
    tch_tensor out = tch_tensor_view(x, TCH_FLOAT64, 3, shape);
    tch_status status = tch_inverse_root(context, &in, 2, NULL, &out, NULL, NULL);
    printf("%s: %s\n", tch_status_name(status), tch_last_error());
    return status != TCH_ERR_NUMERIC || x[0] < 0.49999 || x[0] > 0.50001 || x[4] != 0.0;
}

int main(void)
{
    tch_context *context;
    must(tch_context_create("cpu", &context));
    must(tch_set_num_threads(2)); /* for all contexts, from the next call on */
    int wrong = strided_views(context) + batches(context) + errors(context) + bad_matrix(context);
    tch_context_destroy(context);
    return wrong == 0 ? 0 : 1;
}
