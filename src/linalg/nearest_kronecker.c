/* The nearest Kronecker product. Rearranged so that each block of M is one row, M becomes a matrix R whose best
 * rank-one approximation is vec(A) vec(B)': the largest singular pair. If one side of R is small, the pair comes from
 * the eigenvectors of its Gram matrix, otherwise from block iteration. Everything is in float64. */
#include <torchium/linalg.h>

#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

#define EXACT_UP_TO 512 /* side of the Gram matrix: its eigenvectors take 15 ms at this size on two cores */
#define BLOCK 8         /* vectors iterated together: the rate is the ninth singular value over the first */
#define MOST_ROUNDS 200
#define SETTLED 1e-14 /* relative change of the squared singular value at which the iteration stops */

typedef struct nearest {
    tch_context *context;
    int64_t mn, pq;              /* sides of R */
    int64_t k;                   /* number of vectors: BLOCK, or fewer for a small R, or a whole side */
    tch_matrices r;              /* mn by pq */
    tch_matrices left, right;    /* mn by k, pq by k */
    tch_matrices gram, rotation; /* k by k */
    tch_matrices values;         /* 1 by k */
    tch_matrices u, v;           /* mn by 1, pq by 1: the pair */
    double *number;
    int32_t *flag;
    void *scratch;
} nearest;

static bool is_exact(const nearest *s)
{
    return s->mn <= EXACT_UP_TO || s->pq <= EXACT_UP_TO;
}

static tch_matrices scratch_matrix(tchi_arena *arena, int64_t rows, int64_t cols)
{
    return tchi_scratch_matrices(arena, TCH_SCALAR_F64, 1, rows, cols);
}

static void layout(nearest *s, tchi_arena *arena)
{
    const tch_context *c = s->context;
    int64_t side = s->mn < s->pq ? s->mn : s->pq;
    s->k = is_exact(s) ? side : BLOCK;
    s->r = scratch_matrix(arena, s->mn, s->pq);
    s->left = scratch_matrix(arena, is_exact(s) ? 0 : s->mn, s->k);
    s->right = scratch_matrix(arena, is_exact(s) ? 0 : s->pq, s->k);
    s->gram = scratch_matrix(arena, s->k, s->k);
    s->rotation = scratch_matrix(arena, s->k, s->k);
    s->values = scratch_matrix(arena, 1, s->k);
    s->u = scratch_matrix(arena, s->mn, 1);
    s->v = scratch_matrix(arena, s->pq, 1);
    s->number = tchi_arena_take(arena, (int64_t)sizeof(double));
    s->flag = tchi_arena_take(arena, (int64_t)sizeof(int32_t));
    s->scratch = tchi_arena_take(
        arena, c->backend->device->scratch_bytes(c->state, TCH_SCRATCH_EIGH, TCH_SCALAR_F64, s->k, s->k, 1, 0));
}

static tch_status gemm(nearest *s, double alpha, const tch_matrices *a, int ta, const tch_matrices *b, int tb,
                       double beta, const tch_matrices *c)
{
    return s->context->backend->matrix->gemm(s->context->state, alpha, a, ta, b, tb, beta, 0, c);
}

/* The rows of R are the blocks of M: copied from a view with reordered dimensions. */
static tch_status rearrange_blocks(nearest *s, const tchi_batch *m, int64_t index, const tch_tensor *a,
                                   const tch_tensor *b)
{
    int64_t p = b->shape[b->ndim - 2];
    int64_t q = b->shape[b->ndim - 1];
    const int64_t shape[4] = {a->shape[a->ndim - 2], a->shape[a->ndim - 1], p, q};
    const int64_t from[4] = {p * m->row_stride, q * m->col_stride, m->row_stride, m->col_stride};
    const int64_t to[4] = {shape[1] * p * q, p * q, q, 1};
    tch_array source = {tchi_batch_item(m, index), m->type, 4, shape, from};
    tch_array target = {s->r.data, TCH_SCALAR_F64, 4, shape, to};
    return s->context->backend->matrix->copy(s->context->state, &target, &source);
}

/* Eigenvectors of `gram`, as rows, in place; ascending eigenvalues. */
static tch_status decompose(nearest *s, const tch_matrices *gram)
{
    TCHI_TRY(s->context->backend->device->zero_bytes(s->context->state, s->flag, (int64_t)sizeof(int32_t)));
    return s->context->backend->matrix->eigh(s->context->state, gram, &s->values, s->flag, s->scratch);
}

static tch_status read_number(nearest *s, const void *device, double *value)
{
    return s->context->backend->device->copy_bytes(s->context->state, value, device, (int64_t)sizeof *value,
                                                   TCH_COPY_TO_HOST);
}

/* The last row of the eigenvectors, as a column. */
static tch_matrices top_vector(const nearest *s, const tch_matrices *vectors)
{
    return tchi_matrices_new((double *)vectors->data + (s->k - 1) * s->k, TCH_SCALAR_F64, 1, s->k, 1);
}

static tch_status exact_pair(nearest *s)
{
    int rows_small = s->mn <= s->pq;
    TCHI_TRY(tchi_gram(s->context, 1.0, &s->r, !rows_small, 0.0, &s->gram));
    TCHI_TRY(decompose(s, &s->gram));
    tch_matrices top = top_vector(s, &s->gram);
    return s->context->backend->matrix->combine(s->context->state, 0.0, 1.0, &top, 0.0, NULL,
                                                rows_small ? &s->u : &s->v);
}

/* Orthonormalizes the columns of `block`: rotates to the eigenvectors of its Gram matrix and divides by their lengths.
 * Vanished directions stay zero. */
static tch_status orthonormalize(nearest *s, tch_matrices *block, tch_matrices *spare)
{
    const tch_backend *t = s->context->backend;
    void *state = s->context->state;
    double largest;
    TCHI_TRY(tchi_gram(s->context, 1.0, block, 1, 0.0, &s->gram));
    TCHI_TRY(decompose(s, &s->gram));
    TCHI_TRY(read_number(s, (double *)s->values.data + s->k - 1, &largest));
    const tch_spectrum_map map = {largest > 0 ? largest * 1e-30 : 1.0, 0.0, -0.5, 1, INFINITY};
    TCHI_TRY(t->matrix->spectrum_power(state, &map, &s->values, NULL, s->flag));
    TCHI_TRY(t->matrix->scale_rows(state, &s->gram, &s->values, &s->gram));
    TCHI_TRY(gemm(s, 1.0, block, 0, &s->gram, 1, 0.0, spare));
    tch_matrices swap = *block;
    *block = *spare;
    *spare = swap;
    return TCH_OK;
}

/* One iteration: right -> left -> right. With left orthonormal, the Gram matrix of R' left has the squared singular
 * values; the largest is read to test for convergence. */
static tch_status iterate_block(nearest *s, tch_matrices *spare_left, tch_matrices *spare_right, double *square)
{
    TCHI_TRY(gemm(s, 1.0, &s->r, 0, &s->right, 0, 0.0, &s->left));
    TCHI_TRY(orthonormalize(s, &s->left, spare_left));
    TCHI_TRY(gemm(s, 1.0, &s->r, 1, &s->left, 0, 0.0, &s->right));
    TCHI_TRY(tchi_gram(s->context, 1.0, &s->right, 1, 0.0, &s->rotation));
    TCHI_TRY(decompose(s, &s->rotation));
    TCHI_TRY(read_number(s, (double *)s->values.data + s->k - 1, square));
    tch_matrices top = top_vector(s, &s->rotation);
    TCHI_TRY(gemm(s, 1.0, &s->left, 0, &top, 0, 0.0, &s->u));
    return orthonormalize(s, &s->right, spare_right);
}

static tch_status iterated_pair(nearest *s, tch_matrices *spare_left, tch_matrices *spare_right)
{
    double before = 0;
    TCHI_TRY(s->context->backend->matrix->random_signs(s->context->state, 1, &s->right));
    TCHI_TRY(orthonormalize(s, &s->right, spare_right));
    for (int round = 0; round < MOST_ROUNDS; round++) {
        double square;
        TCHI_TRY(iterate_block(s, spare_left, spare_right, &square));
        if (fabs(square - before) <= SETTLED * square) {
            break;
        }
        before = square;
    }
    return TCH_OK;
}

/* --- from the singular pair to the factors ---------------------------------------------------------------------- */

static tch_status norm_of(nearest *s, const tch_matrices *x, double *norm)
{
    TCHI_TRY(s->context->backend->matrix->reduce(s->context->state, TCH_REDUCE_FROBENIUS, x, s->number));
    return read_number(s, s->number, norm);
}

static tch_status scale_matrix(nearest *s, const tch_matrices *x, double factor)
{
    return s->context->backend->matrix->combine(s->context->state, 0.0, factor, x, 0.0, NULL, x);
}

/* +1 or -1: the sign of the entry of u with the largest magnitude. */
static tch_status sign_of(nearest *s, const tch_matrices *u, double *sign)
{
    enum { CHUNK = 256 };
    double here[CHUNK];
    double largest = 0;
    *sign = 1.0;
    for (int64_t done = 0; done < u->rows; done += CHUNK) {
        int64_t n = u->rows - done < CHUNK ? u->rows - done : CHUNK;
        TCHI_TRY(s->context->backend->device->copy_bytes(s->context->state, here, (const double *)u->data + done,
                                                         n * (int64_t)sizeof *here, TCH_COPY_TO_HOST));
        for (int64_t i = 0; i < n; i++) {
            *sign = fabs(here[i]) > largest ? (here[i] < 0 ? -1.0 : 1.0) : *sign;
            largest = fmax(largest, fabs(here[i]));
        }
    }
    return TCH_OK;
}

/* Computes the other vector from one unit vector of the pair, with length sigma, and divides sigma equally. */
static tch_status balance_pair(nearest *s, int have_u)
{
    double sign;
    double length;
    double sigma;
    const tch_matrices *unit = have_u ? &s->u : &s->v;
    const tch_matrices *other = have_u ? &s->v : &s->u;
    TCHI_TRY(norm_of(s, unit, &length));
    TCHI_TRY(scale_matrix(s, unit, length > 0 ? 1.0 / length : 0.0));
    TCHI_TRY(gemm(s, 1.0, &s->r, have_u, unit, 0, 0.0, other));
    TCHI_TRY(norm_of(s, other, &sigma));
    TCHI_TRY(sign_of(s, &s->u, &sign));
    TCHI_TRY(scale_matrix(s, unit, sign * sqrt(sigma)));
    return scale_matrix(s, other, sigma > 0 ? sign / sqrt(sigma) : 0.0);
}

static tch_status relative_error(nearest *s, double *error)
{
    double whole;
    double rest;
    TCHI_TRY(norm_of(s, &s->r, &whole));
    TCHI_TRY(gemm(s, -1.0, &s->u, 0, &s->v, 1, 1.0, &s->r));
    TCHI_TRY(norm_of(s, &s->r, &rest));
    *error = whole > 0 ? rest / whole : 0.0;
    return TCH_OK;
}

static tch_status write_factor(nearest *s, const tch_tensor *factor, int64_t index, const tch_matrices *vector)
{
    tchi_batch batch = tchi_batch_of(factor, 2);
    tch_matrices shaped = tchi_matrices_new(vector->data, TCH_SCALAR_F64, 1, batch.rows, batch.cols);
    return tchi_batch_write(s->context, &batch, index, &shaped);
}

/* Gram matrices square the entries of R. If the squares would overflow or underflow float64, R is first scaled by a
 * power of two, which is exact, and each factor by the inverse of its square root: `exponent` is even. */
static tch_status bring_near_one(nearest *s, int *exponent)
{
    double largest;
    TCHI_TRY(s->context->backend->matrix->reduce(s->context->state, TCH_REDUCE_MAX_ABS, &s->r, s->number));
    TCHI_TRY(read_number(s, s->number, &largest));
    *exponent = 0;
    if (largest == 0 || (largest > 0x1p-400 && largest < 0x1p+400)) {
        return TCH_OK;
    }
    *exponent = ilogb(largest) / 2 * 2;
    TCHI_TRY(scale_matrix(s, &s->r, ldexp(1.0, -*exponent / 2)));
    return scale_matrix(s, &s->r, ldexp(1.0, -*exponent / 2));
}

static tch_status write_error(nearest *s, const tch_tensor *error, int64_t index, double value)
{
    tchi_batch numbers = tchi_batch_of(error, 0);
    TCHI_TRY(s->context->backend->device->copy_bytes(s->context->state, s->number, &value, (int64_t)sizeof value,
                                                     TCH_COPY_TO_DEVICE));
    tch_matrices number = tchi_matrices_new(s->number, TCH_SCALAR_F64, 1, 1, 1);
    return tchi_batch_write(s->context, &numbers, index, &number);
}

static tch_status nearest_one(nearest *s, const tchi_batch *m, int64_t index, tch_tensor *a, tch_tensor *b,
                              tch_tensor *error)
{
    int exponent;
    double nonfinite;
    double value = 0.0;
    tch_matrices spare_left;
    tch_matrices spare_right;
    tchi_arena arena = {0};
    for (int pass = 0; pass < 2; pass++) {
        layout(s, &arena);
        spare_left = scratch_matrix(&arena, s->left.rows, s->k);
        spare_right = scratch_matrix(&arena, s->right.rows, s->k);
        if (pass == 0) {
            TCHI_TRY(tchi_arena_reserve(s->context, &arena));
        }
    }
    TCHI_TRY(rearrange_blocks(s, m, index, a, b));
    TCHI_TRY(s->context->backend->matrix->reduce(s->context->state, TCH_REDUCE_NONFINITE, &s->r, s->number));
    TCHI_TRY(read_number(s, s->number, &nonfinite));
    if (nonfinite > 0) {
        return tchi_fail(TCH_ERR_NUMERIC, "matrix %lld of m has entries that are infinite or NaN", (long long)index);
    }
    TCHI_TRY(bring_near_one(s, &exponent));
    TCHI_TRY(is_exact(s) ? exact_pair(s) : iterated_pair(s, &spare_left, &spare_right));
    TCHI_TRY(balance_pair(s, !is_exact(s) || s->mn <= s->pq));
    TCHI_TRY(error != NULL ? relative_error(s, &value) : TCH_OK);
    if (exponent != 0) {
        TCHI_TRY(scale_matrix(s, &s->u, ldexp(1.0, exponent / 2)));
        TCHI_TRY(scale_matrix(s, &s->v, ldexp(1.0, exponent / 2)));
    }
    TCHI_TRY(write_factor(s, a, index, &s->u));
    TCHI_TRY(write_factor(s, b, index, &s->v));
    return error != NULL ? write_error(s, error, index, value) : TCH_OK;
}

static tch_status check_factor(tch_context *context, const tch_tensor *f, const char *name, const tch_tensor *m)
{
    TCHI_TRY(tchi_check_output(context, f, name));
    TCHI_TRY(tchi_check_matrix(f, name));
    TCHI_TRY(tchi_check_same_dtype(f, name, m, "m"));
    int64_t shape[TCH_MAX_RANK];
    memcpy(shape, m->shape, (size_t)m->ndim * sizeof *shape);
    shape[m->ndim - 2] = f->shape[f->ndim - 2];
    shape[m->ndim - 1] = f->shape[f->ndim - 1];
    return tchi_check_shape(f, name, m->ndim, shape);
}

static tch_status check_call(tch_context *context, const tch_tensor *m, const tch_tensor *a, const tch_tensor *b,
                             const tch_tensor *error)
{
    TCHI_TRY(tchi_check_input(context, m, "m"));
    TCHI_TRY(tchi_check_matrix(m, "m"));
    TCHI_TRY(tchi_check_float(m, "m"));
    TCHI_TRY(check_factor(context, a, "a", m));
    TCHI_TRY(check_factor(context, b, "b", m));
    TCHI_TRY(tchi_check_report(context, error, "error", m, TCH_FLOAT64));
    const tchi_named inputs[] = {{m, "m"}};
    const tchi_named outputs[] = {{a, "a"}, {b, "b"}, {error, "error"}};
    TCHI_TRY(tchi_check_all_disjoint(outputs, 3, inputs, 1));
    for (int32_t i = m->ndim - 2; i < m->ndim; i++) {
        if (m->shape[i] != a->shape[i] * b->shape[i]) {
            char text[TCHI_DESCRIBE_SIZE];
            return tchi_fail(TCH_ERR_SHAPE, "m has shape %s, expected %lld times %lld %s for these a and b",
                             tchi_describe_shape(m, text, sizeof text), (long long)a->shape[i], (long long)b->shape[i],
                             i == m->ndim - 1 ? "columns" : "rows");
        }
    }
    int64_t side_a = a->shape[a->ndim - 2] * a->shape[a->ndim - 1];
    int64_t side_b = b->shape[b->ndim - 2] * b->shape[b->ndim - 1];
    if (side_a > TCHI_MOST_SIZE || side_b > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_SHAPE, "a and b may have at most %d elements each", TCHI_MOST_SIZE);
    }
    return TCH_OK;
}

/* An empty product is matched by any factors, such as zeros. */
static tch_status write_zeros(tch_context *context, const tch_tensor *tensor)
{
    int64_t strides[TCH_MAX_RANK];
    if (tensor == NULL) {
        return TCH_OK;
    }
    tch_array array = tchi_array_of(tensor, strides);
    return context->backend->matrix->fill(context->state, &array, 0.0);
}

tch_status tch_nearest_kronecker(tch_context *context, const tch_tensor *m, tch_tensor *a, tch_tensor *b,
                                 tch_tensor *error)
{
    TCHI_ENTER(context, "tch_nearest_kronecker");
    TCHI_TRY(check_call(context, m, a, b, error));
    tchi_batch batch = tchi_batch_of(m, 2);
    nearest s = {.context = context};
    s.mn = a->shape[a->ndim - 2] * a->shape[a->ndim - 1];
    s.pq = b->shape[b->ndim - 2] * b->shape[b->ndim - 1];
    if (s.mn == 0 || s.pq == 0) {
        TCHI_TRY(write_zeros(context, a));
        TCHI_TRY(write_zeros(context, b));
        return write_zeros(context, error);
    }
    for (int64_t i = 0; i < batch.count; i++) {
        TCHI_TRY(nearest_one(&s, &batch, i, a, b, error));
    }
    return TCH_OK;
}
