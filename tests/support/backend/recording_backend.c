/* See recording_backend.h. Each operation has a function of the table, which fills an entry, and one that does the
 * entry. */
#include "recording_backend.h"

#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "support/testing.h"
#include "table_copy.h"

enum { MATRICES = 4, ARRAYS = 2 };

/* One operation with its arguments, those behind pointers copied. */
typedef struct entry entry;
struct entry {
    tch_status (*run)(void *state, const entry *e);
    tch_matrices m[MATRICES];
    bool has[MATRICES]; /* where a matrix may be left out */
    tch_array a[ARRAYS];
    int64_t shape[ARRAYS][TCH_MAX_RANK], strides[ARRAYS][TCH_MAX_RANK];
    tch_update update;
    tch_rect *rects;
    tch_root_norms norms;
    tch_newton_iteration newton;
    double d[4];
    int64_t i[4];
    const void *in[3];
    void *out[4];
};

typedef struct journal {
    entry *entries;
    int count, room;
} journal;

recording_figures recorded;
recording_faults recording_fault;

static const tch_backend *real;
static table_copy table;
static journal *under_way;

/* --- entries ----------------------------------------------------------------------------------------------------- */

static void write_down(const entry *e)
{
    journal *j = under_way;
    if (j->count == j->room) {
        j->room = j->room > 0 ? 2 * j->room : 64;
        j->entries = realloc(j->entries, (size_t)j->room * sizeof *j->entries);
        CHECK(j->entries != NULL, "no memory for a journal");
    }
    entry *kept = &j->entries[j->count++];
    *kept = *e;
    if (e->update.count > 0) {
        size_t bytes = (size_t)e->update.count * sizeof(tch_rect);
        kept->rects = test_keep(test_alloc(bytes));
        memcpy(kept->rects, e->update.rects, bytes);
    }
}

/* Pointers into an entry are made when it is done: entries move. */
static tch_status carry_out(void *state, const entry *e)
{
    entry here = *e;
    for (int k = 0; k < ARRAYS; k++) {
        here.a[k].shape = here.shape[k];
        here.a[k].strides = here.strides[k];
    }
    if (here.rects != NULL) {
        here.update.rects = here.rects;
    }
    return here.run(state, &here);
}

static tch_status take(void *state, const entry *e)
{
    if (under_way == NULL) {
        return carry_out(state, e);
    }
    write_down(e);
    return TCH_OK;
}

static void set_array(entry *e, int k, const tch_array *a)
{
    e->a[k] = *a;
    for (int32_t d = 0; d < a->rank; d++) {
        e->shape[k][d] = a->shape[d];
        e->strides[k][d] = a->strides[d];
    }
}

static void set_optional(entry *e, int k, const tch_matrices *m)
{
    e->has[k] = m != NULL;
    if (m != NULL) {
        e->m[k] = *m;
    }
}

static const tch_matrices *optional(const entry *e, int k)
{
    return e->has[k] ? &e->m[k] : NULL;
}

/* --- copies and elementwise -------------------------------------------------------------------------------------- */

static tch_status do_copy_bytes(void *state, const entry *e)
{
    return real->device->copy_bytes(state, e->out[0], e->in[0], e->i[0], (tch_copy_kind)e->i[1]);
}

static tch_status copy_bytes(void *state, void *dst, const void *src, int64_t bytes, tch_copy_kind kind)
{
    if (kind == TCH_COPY_NUMBERS) {
        return real->device->copy_bytes(state, dst, src, bytes, kind);
    }
    entry e = {.run = do_copy_bytes, .out = {dst}, .in = {src}, .i = {bytes, (int64_t)kind}};
    if (under_way != NULL && kind != TCH_COPY_DEVICE) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "a copy between host and device while recording");
    }
    return take(state, &e);
}

static tch_status do_zero_bytes(void *state, const entry *e)
{
    return real->device->zero_bytes(state, e->out[0], e->i[0]);
}

static tch_status zero_bytes(void *state, void *dst, int64_t bytes)
{
    entry e = {.run = do_zero_bytes, .out = {dst}, .i = {bytes}};
    return take(state, &e);
}

static tch_status do_copy(void *state, const entry *e)
{
    return real->matrix->copy(state, &e->a[0], &e->a[1]);
}

static tch_status copy(void *state, const tch_array *dst, const tch_array *src)
{
    entry e = {.run = do_copy};
    set_array(&e, 0, dst);
    set_array(&e, 1, src);
    return take(state, &e);
}

static tch_status do_fill(void *state, const entry *e)
{
    return real->matrix->fill(state, &e->a[0], e->d[0]);
}

static tch_status fill(void *state, const tch_array *dst, double value)
{
    entry e = {.run = do_fill, .d = {value}};
    set_array(&e, 0, dst);
    return take(state, &e);
}

static tch_status do_combine(void *state, const entry *e)
{
    return real->matrix->combine(state, e->d[0], e->d[1], optional(e, 0), e->d[2], optional(e, 1), &e->m[2]);
}

static tch_status combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                          const tch_matrices *out)
{
    entry e = {.run = do_combine, .d = {c0, c1, c2}};
    set_optional(&e, 0, x);
    set_optional(&e, 1, y);
    e.m[2] = *out;
    return take(state, &e);
}

static tch_status do_shift_scale(void *state, const entry *e)
{
    return real->matrix->shift_scale(state, &e->m[0], e->in[0], e->in[1], e->d[0], &e->m[1]);
}

static tch_status shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                              double exponent, const tch_matrices *out)
{
    entry e = {.run = do_shift_scale, .m = {*x, *out}, .in = {shift, scale}, .d = {exponent}};
    return take(state, &e);
}

static tch_status do_scale_rows(void *state, const entry *e)
{
    return real->matrix->scale_rows(state, &e->m[0], &e->m[1], &e->m[2]);
}

static tch_status scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    entry e = {.run = do_scale_rows, .m = {*x, *w, *out}};
    return take(state, &e);
}

static tch_status do_select(void *state, const entry *e)
{
    return real->matrix->select(state, e->in[0], &e->m[0], &e->m[1]);
}

static tch_status choose(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out)
{
    entry e = {.run = do_select, .in = {flags}, .m = {*x, *out}};
    return take(state, &e);
}

/* --- reductions and decisions ------------------------------------------------------------------------------------ */

static tch_status do_reduce(void *state, const entry *e)
{
    return real->matrix->reduce(state, (tch_reduction)e->i[0], &e->m[0], e->out[0]);
}

static tch_status reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    entry e = {.run = do_reduce, .i = {(int64_t)kind}, .m = {*x}, .out = {out}};
    return take(state, &e);
}

static tch_status do_normalize(void *state, const entry *e)
{
    int32_t deferred;
    return real->matrix->normalize(state, e->d[0], &e->m[0], e->i[0], e->out[0], &deferred);
}

/* The CPU defers nothing. */
static tch_status normalize(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                            int32_t *deferred)
{
    entry e = {.run = do_normalize, .d = {eps}, .m = {*x}, .i = {all}, .out = {scale}};
    *deferred = 0;
    return take(state, &e);
}

static tch_status do_flag_overflow(void *state, const entry *e)
{
    return real->matrix->flag_overflow(state, &e->m[0], e->d[0], e->out[0]);
}

static tch_status flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags)
{
    entry e = {.run = do_flag_overflow, .m = {*x}, .d = {most}, .out = {flags}};
    return take(state, &e);
}

static tch_status do_root_setup(void *state, const entry *e)
{
    return real->matrix->root_setup(state, e->i[0], &e->norms, e->d[0], e->d[1], e->d[2], e->d[3], e->out[0], e->out[1],
                                    e->out[2]);
}

static tch_status root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps, double relative_eps,
                             double margin, double symmetry, double *damping, double *bound, int32_t *flags)
{
    entry e = {.run = do_root_setup,
               .i = {batch},
               .norms = *norms,
               .d = {eps, relative_eps, margin, symmetry},
               .out = {damping, bound, flags}};
    return take(state, &e);
}

/* --- products ---------------------------------------------------------------------------------------------------- */

static tch_status do_largest_eigenvalue(void *state, const entry *e)
{
    return real->matrix->largest_eigenvalue(state, &e->m[0], e->d[0], e->out[0], e->out[1]);
}

static tch_status largest_eigenvalue(void *state, const tch_matrices *x, double tolerance, double *out, void *scratch)
{
    entry e = {.run = do_largest_eigenvalue, .m = {*x}, .d = {tolerance}, .out = {out, scratch}};
    return take(state, &e);
}

static tch_status do_root_residual(void *state, const entry *e)
{
    return real->matrix->root_residual(state, (int32_t)e->i[0], &e->m[0], e->in[0], &e->m[1], (int32_t)e->i[1],
                                       e->out[0], e->out[1], e->d[0], e->out[3], e->out[2]);
}

static tch_status root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                const tch_matrices *x, int32_t probes, double *out, double *error, double tolerance,
                                int32_t *flags, void *scratch)
{
    entry e = {.run = do_root_residual, .i = {root, probes}, .m = {*a, *x}, .d = {tolerance}};
    e.in[0] = shift;
    e.out[0] = out;
    e.out[1] = error;
    e.out[2] = scratch;
    e.out[3] = flags;
    return take(state, &e);
}

static tch_status do_newton(void *state, const entry *e)
{
    return real->matrix->newton(state, &e->newton, &e->m[0], e->in[0], e->in[1], &e->m[1]);
}

static tch_status newton(void *state, const tch_newton_iteration *iteration, const tch_matrices *a, const double *shift,
                         const double *bound, const tch_matrices *x)
{
    entry e = {.run = do_newton, .newton = *iteration, .m = {*a, *x}, .in = {shift, bound}};
    return take(state, &e);
}

/* Where a device waits. */
static tch_status eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch)
{
    return under_way != NULL ? tchi_fail(TCH_ERR_UNSUPPORTED, "an eigensolver while recording")
                             : real->matrix->eigh(state, v, w, flags, scratch);
}

static tch_status do_gemm(void *state, const entry *e)
{
    return real->matrix->gemm(state, e->d[0], &e->m[0], (int32_t)e->i[0], &e->m[1], (int32_t)e->i[1], e->d[1],
                              &e->m[2]);
}

static tch_status gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                       int32_t transpose_b, double beta, const tch_matrices *c)
{
    entry e = {.run = do_gemm, .d = {alpha, beta}, .i = {transpose_a, transpose_b}, .m = {*a, *b, *c}};
    return take(state, &e);
}

static tch_status do_gram(void *state, const entry *e)
{
    return real->matrix->gram(state, e->d[0], &e->m[0], (int32_t)e->i[0], e->d[1], (int32_t)e->i[1], &e->m[1]);
}

static tch_status gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                       int32_t rounded, const tch_matrices *c)
{
    entry e = {.run = do_gram, .d = {alpha, beta}, .i = {transpose, rounded}, .m = {*a, *c}};
    return take(state, &e);
}

static tch_status do_symmetric_product(void *state, const entry *e)
{
    return real->matrix->symmetric_product(state, e->d[0], e->d[1], optional(e, 0), e->d[2], &e->m[1], &e->m[2],
                                           e->in[0], (int32_t)e->i[0], &e->m[3]);
}

static tch_status symmetric_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                    const tch_matrices *a, const tch_matrices *b, const double *scale, int32_t exponent,
                                    const tch_matrices *c)
{
    entry e = {.run = do_symmetric_product, .d = {c0, c1, c2}, .m = {{0}, *a, *b, *c}, .in = {scale}, .i = {exponent}};
    set_optional(&e, 0, d);
    return take(state, &e);
}

static tch_status do_update_factors(void *state, const entry *e)
{
    const tch_blocks a = {e->m[0], e->in[1]};
    return real->update->update_factors(state, &a, e->in[0], (int32_t)e->i[0], optional(e, 1), optional(e, 2),
                                        e->out[0], e->out[1], e->i[1]);
}

static tch_status update_factors(void *state, const tch_blocks *a, const tch_clock *clock, int32_t rounded,
                                 const tch_matrices *rows, const tch_matrices *columns, void *room, void *scratch,
                                 int64_t scratch_bytes)
{
    entry e = {.run = do_update_factors,
               .m = {a->matrices},
               .i = {rounded, scratch_bytes},
               .in = {clock, a->notes},
               .out = {room, scratch}};
    set_optional(&e, 1, rows);
    set_optional(&e, 2, columns);
    return take(state, &e);
}

static tch_status do_precondition(void *state, const entry *e)
{
    const tch_preconditioner p = {(tch_sides)e->i[0], optional(e, 0), optional(e, 1), e->out[2], (int32_t)e->i[1]};
    const tch_blocks x = {e->m[2], e->in[0]};
    return real->update->precondition(state, &p, &x, e->out[0], &e->m[3], e->out[1]);
}

static tch_status precondition(void *state, const tch_preconditioner *p, const tch_blocks *x, void *other,
                               const tch_matrices *y, double *norms)
{
    entry e = {.run = do_precondition,
               .m = {{0}, {0}, x->matrices, *y},
               .i = {(int64_t)p->sides, p->rounded},
               .in = {x->notes},
               .out = {other, norms, p->room}};
    set_optional(&e, 0, p->left);
    set_optional(&e, 1, p->right);
    return take(state, &e);
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

static tch_status do_rotated_adam(void *state, const entry *e)
{
    return real->update->rotated_adam(state, &e->update, e->out[0]);
}

static tch_status rotated_adam(void *state, const tch_update *update, uint32_t *notes)
{
    entry e = {.run = do_rotated_adam, .update = *update, .out = {notes}};
    return take(state, &e);
}

static tch_status do_apply(void *state, const entry *e)
{
    return real->update->apply(state, &e->update, (tch_block_scale)e->i[0], e->in[0], e->in[1], (int32_t)e->i[1],
                               (int32_t)e->i[2]);
}

static tch_status apply(void *state, const tch_update *update, tch_block_scale scale, const double *targets,
                        const double *norms, int32_t nesterov, int32_t decay)
{
    entry e = {.run = do_apply, .update = *update, .i = {(int64_t)scale, nesterov, decay}, .in = {targets, norms}};
    return take(state, &e);
}

static tch_status do_apply_rows(void *state, const entry *e)
{
    return real->update->apply_rows(state, &e->update, e->out[0], e->out[1]);
}

static tch_status apply_rows(void *state, const tch_update *update, double *norms, double *parts)
{
    entry e = {.run = do_apply_rows, .update = *update, .out = {norms, parts}};
    return take(state, &e);
}

/* --- bases ------------------------------------------------------------------------------------------------------- */

static tch_status do_cholesky(void *state, const entry *e)
{
    return real->matrix->cholesky(state, &e->m[0], (int32_t)e->i[0], &e->m[1], e->out[0], e->out[1]);
}

static tch_status cholesky(void *state, const tch_matrices *a, int32_t inverse, const tch_matrices *x, int32_t *flags,
                           void *scratch)
{
    entry e = {.run = do_cholesky, .m = {*a, *x}, .i = {inverse}, .out = {flags, scratch}};
    return take(state, &e);
}

static tch_status do_row_dots(void *state, const entry *e)
{
    return real->matrix->row_dots(state, &e->m[0], &e->m[1], e->d[0], &e->m[2]);
}

static tch_status row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                           const tch_matrices *w)
{
    entry e = {.run = do_row_dots, .m = {*x, *y, *w}, .d = {exponent}};
    return take(state, &e);
}

static tch_status do_split_rows(void *state, const entry *e)
{
    const tch_split_matrices out = {e->m[2], e->m[3], e->d[0]};
    const tch_rows_to_split problem = {.x = &e->m[0],
                                       .rows = e->m[1].data != NULL ? &e->m[1] : NULL,
                                       .out = &out,
                                       .done = {e->in[0], e->d[1]},
                                       .shift = e->in[1],
                                       .bound = e->in[2]};
    return real->matrix->split_rows(state, &problem);
}

static tch_status split_rows(void *state, const tch_rows_to_split *p)
{
    entry e = {.run = do_split_rows,
               .m = {*p->x, p->rows != NULL ? *p->rows : (tch_matrices){0}, p->out->high, p->out->low},
               .in = {p->done.of, p->shift, p->bound},
               .d = {p->out->scale, p->done.most}};
    return take(state, &e);
}

static tch_status do_descending(void *state, const entry *e)
{
    return real->matrix->descending(state, &e->m[0], e->out[0]);
}

static tch_status descending(void *state, const tch_matrices *w, int32_t *order)
{
    entry e = {.run = do_descending, .m = {*w}, .out = {order}};
    return take(state, &e);
}

static tch_status do_reset_order(void *state, const entry *e)
{
    return real->matrix->reset_order(state, e->i[0], e->i[1], e->in[0], e->out[0]);
}

static tch_status reset_order(void *state, int64_t batch, int64_t n, const int32_t *flags, int32_t *order)
{
    entry e = {.run = do_reset_order, .i = {batch, n}, .in = {flags}, .out = {order}};
    return take(state, &e);
}

static tch_status do_permute(void *state, const entry *e)
{
    return real->matrix->permute(state, &e->m[0], e->in[0], e->in[1], &e->m[1]);
}

static tch_status permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                          const tch_matrices *out)
{
    entry e = {.run = do_permute, .m = {*x, *out}, .in = {rows, cols}};
    return take(state, &e);
}

/* --- recording --------------------------------------------------------------------------------------------------- */

static void discard(journal *j)
{
    for (int i = 0; i < j->count; i++) {
        free(j->entries[i].rects);
    }
    free(j->entries);
    free(j);
}

static void release(void *state, void *recording)
{
    recorded.released++;
    discard(recording);
}

static tch_status record(void *state, tch_status (*work)(void *argument), void *argument, void **recording,
                         int64_t *kernels)
{
    *recording = NULL;
    recorded.begun++;
    if (recording_fault.begin_fails) {
        return TCH_OK;
    }
    under_way = test_keep(test_alloc(sizeof *under_way));
    *under_way = (journal){0};
    tch_status status = work(argument);
    journal *j = under_way;
    under_way = NULL;
    recorded.operations = j->count;
    *kernels = j->count;
    if (recording_fault.end_gives_nothing) {
        discard(j);
        return TCH_OK;
    }
    recorded.kept++;
    if (status != TCH_OK || recording_fault.end_fails) {
        release(state, j);
        return recording_fault.end_fails ? tchi_fail(TCH_ERR_BACKEND, "the stream is lost") : TCH_OK;
    }
    *recording = j;
    return TCH_OK;
}

static tch_status replay(void *state, void *recording, int32_t *begun)
{
    const journal *j = recording;
    recorded.replayed++;
    *begun = recording_fault.replay_breaks;
    if (recording_fault.replay_fails || recording_fault.replay_breaks) {
        return tchi_fail(TCH_ERR_BACKEND, "no replay");
    }
    *begun = 1;
    for (int i = 0; i < j->count; i++) {
        TCHI_TRY(carry_out(state, &j->entries[i]));
    }
    return TCH_OK;
}

static int64_t bytes_of(void *state, int64_t kernels)
{
    return recording_fault.impossible || under_way != NULL ? -1 : RECORDING_KERNEL_BYTES * kernels;
}

static void set_operations(table_copy *t)
{
    t->device.copy_bytes = copy_bytes;
    t->device.zero_bytes = zero_bytes;
    t->matrix.copy = copy;
    t->matrix.fill = fill;
    t->matrix.combine = combine;
    t->matrix.shift_scale = shift_scale;
    t->matrix.scale_rows = scale_rows;
    t->matrix.select = choose;
    t->matrix.reduce = reduce;
    t->matrix.normalize = normalize;
    t->matrix.flag_overflow = flag_overflow;
    t->matrix.root_setup = root_setup;
    t->matrix.largest_eigenvalue = real->matrix->largest_eigenvalue != NULL ? largest_eigenvalue : NULL;
    t->matrix.root_residual = real->matrix->root_residual != NULL ? root_residual : NULL;
    t->matrix.newton = real->matrix->newton != NULL ? newton : NULL;
    t->matrix.eigh = eigh;
    t->matrix.gemm = gemm;
    t->matrix.gram = real->matrix->gram != NULL ? gram : NULL;
    t->matrix.symmetric_product = real->matrix->symmetric_product != NULL ? symmetric_product : NULL;
    t->update.update_factors = update_factors;
    t->update.precondition = precondition;
    t->update.rotated_adam = rotated_adam;
    t->update.apply = apply;
    t->update.apply_rows = apply_rows;
    t->matrix.cholesky = cholesky;
    t->matrix.row_dots = row_dots;
    t->matrix.split_rows = split_rows;
    t->matrix.descending = descending;
    t->matrix.reset_order = reset_order;
    t->matrix.permute = permute;
}

void recording_backend_install(tch_context *context)
{
    recorded = (recording_figures){0};
    recording_fault = (recording_faults){0};
    real = context->backend;
    table_copy_make(&table, real);
    set_operations(&table);
    table.backend.recording = &table.recording;
    table.recording.record = record;
    table.recording.replay = replay;
    table.recording.bytes = bytes_of;
    table.recording.release = release;
    context->backend = &table.backend;
}

void recording_backend_remove(tch_context *context)
{
    context->backend = real;
}
