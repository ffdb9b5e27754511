/* Memory under control: what a call needs, a limit it keeps, the figures of the pool, and a product in tiles. */
#include "example.h"

enum { BATCH = 16, N = 192, M = 1000 };

static tch_memory_info figures(tch_context *context)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    must(tch_memory_get_info(context, &info));
    return info;
}

/* What the call adds, at its highest, to the memory allocated before it: its scratch. */
static int64_t scratch_of_roots(tch_context *context, const tch_tensor *a, const tch_root_config *config, tch_tensor *x)
{
    must(tch_memory_trim(context, 0));
    must(tch_memory_reset_peak(context));
    int64_t before = figures(context).allocated;
    must(tch_inverse_root(context, a, 4, config, x, NULL, NULL));
    return figures(context).peak - before;
}

/* A batch whose scratch would pass the limit is processed in chunks; the results are the same. */
static int limited_roots(tch_context *context)
{
    int64_t shape[] = {BATCH, N, N}, one_matrix;
    tch_tensor *g = create_tensor(context, TCH_FLOAT32, 3, shape), *a = create_tensor(context, TCH_FLOAT32, 3, shape);
    tch_tensor *x = create_tensor(context, TCH_FLOAT32, 3, shape), *y = create_tensor(context, TCH_FLOAT32, 3, shape);
    float *numbers = g->data;
    for (int64_t i = 0; i < BATCH * N * N; i++) {
        numbers[i] = sinf((float)(i * i % 7919));
    }
    must(tch_gram(context, 1.0 / N, g, 0, 0.0, a));
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-4;
    must(tch_inverse_root_plan(context, TCH_FLOAT32, 1, N, 4, &config, NULL, &one_matrix));

    int64_t free_scratch = scratch_of_roots(context, a, &config, x);
    int64_t limit = 2 * one_matrix;
    must(tch_context_set_workspace_limit(context, limit));
    int64_t limited_scratch = scratch_of_roots(context, a, &config, y);
    printf("%d roots of %d x %d: %lld KiB of scratch without a limit\n", BATCH, N, N, (long long)free_scratch / 1024);
    printf("the same with a limit of %lld KiB: %lld KiB\n", (long long)limit / 1024, (long long)limited_scratch / 1024);

    double difference = 0;
    for (int64_t i = 0; i < BATCH * N * N; i++) {
        difference = fmax(difference, fabs((double)((float *)x->data)[i] - ((float *)y->data)[i]));
    }
    must(tch_context_set_workspace_limit(context, 4096));
    tch_status status = tch_inverse_root(context, a, 4, &config, y, NULL, NULL);
    printf("with 4096 bytes: %s: %s\n", tch_status_name(status), tch_last_error());
    must(tch_context_set_workspace_limit(context, 0));
    tch_tensor_destroy(g);
    tch_tensor_destroy(a);
    tch_tensor_destroy(x);
    tch_tensor_destroy(y);
    return limited_scratch > limit || limited_scratch >= free_scratch || difference > 1e-3 ||
           status != TCH_ERR_OUT_OF_MEMORY;
}

/* bfloat16 is multiplied in float32: whole copies would take 12 MB, tiles stay inside the budget. */
static int chunked_product(tch_context *context)
{
    const int64_t shape[] = {M, M}, budget = 1 << 20;
    tch_tensor *a = create_tensor(context, TCH_BFLOAT16, 2, shape), *b = create_tensor(context, TCH_BFLOAT16, 2, shape);
    tch_tensor *c = create_tensor(context, TCH_BFLOAT16, 2, shape),
               *wide = create_tensor(context, TCH_FLOAT32, 2, shape);
    must(tch_tensor_fill(context, a, 0.5));
    must(tch_tensor_fill(context, b, 0.25));
    must(tch_memory_trim(context, 0));
    must(tch_memory_reset_peak(context));
    int64_t before = figures(context).allocated;
    must(tch_matmul_chunked(context, a, b, budget, c));
    int64_t extra = figures(context).peak - before;
    must(tch_tensor_copy(context, wide, c));
    float first = ((float *)wide->data)[0], last = ((float *)wide->data)[M * M - 1];
    printf("%d x %d bfloat16 product: %lld KiB extra of a budget of %lld, entries %g and %g\n", M, M,
           (long long)extra / 1024, (long long)budget / 1024, first, last);
    tch_tensor_destroy(a);
    tch_tensor_destroy(b);
    tch_tensor_destroy(c);
    tch_tensor_destroy(wide);
    return extra > budget || first != 125.0f || last != 125.0f; /* 1000 * 0.5 * 0.25 */
}

int main(void)
{
    tch_context *context;
    must(tch_context_create("cpu", &context));
    int wrong = limited_roots(context) + chunked_product(context);
    tch_memory_info info = figures(context);
    printf("pool: %lld allocated, %lld reserved, peak %lld bytes; %lld requests, %lld of them new memory\n",
           (long long)info.allocated, (long long)info.reserved, (long long)info.peak, (long long)info.requests,
           (long long)info.misses);
    tch_context_destroy(context);
    return wrong == 0 ? 0 : 1;
}
