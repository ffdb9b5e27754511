/* A backend in one file: the CPU's, with a line on standard error for every product and every eigendecomposition. Built
 * as libtorchium_traced.so and put where TORCHIUM_BACKEND_PATH says, it is the device "traced".
 * docs/adding-a-backend.md goes through it. */
#include <stdio.h>
#include <time.h>

#include <torchium/backend.h>

static const tch_backend *cpu;

static void trace(const char *what, const tch_matrices *result, clock_t since)
{
    fprintf(stderr, "%s: %lld of %lld x %lld, %.3f ms\n", what, (long long)result->batch, (long long)result->rows,
            (long long)result->cols, 1e3 * (double)(clock() - since) / CLOCKS_PER_SEC);
}

static tch_status traced_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                              const tch_matrices *b, int32_t transpose_b, double beta, int32_t rounded,
                              const tch_matrices *c)
{
    clock_t start = clock();
    tch_status status = cpu->matrix->gemm(state, alpha, a, transpose_a, b, transpose_b, beta, rounded, c);
    trace("product", c, start);
    return status;
}

static tch_status traced_eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch)
{
    clock_t start = clock();
    tch_status status = cpu->matrix->eigh(state, v, w, flags, scratch);
    trace("eigendecomposition", v, start);
    return status;
}

const tch_backend *torchium_backend_entry(uint32_t abi, const tch_backend_host *host, char *reason, size_t reason_size)
{
    static tch_matrix_ops matrix;
    static tch_backend table;
    if (abi != TCH_BACKEND_ABI) {
        snprintf(reason, reason_size, "built for backend interface %u, not %u", TCH_BACKEND_ABI, abi);
        return NULL;
    }
    cpu = host->cpu;
    matrix = *cpu->matrix;
    matrix.gemm = traced_gemm;
    matrix.eigh = traced_eigh;
    table = *cpu;
    table.name = "traced";
    table.device_type = TCH_DEVICE_EXTENSION;
    table.priority = -1; /* never what "auto" means */
    table.matrix = &matrix;
    return &table;
}
