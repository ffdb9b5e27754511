/* A step copies each block of the parameter to a small dense array of rank 1 to 4, processes it, and copies it back.
 * Along dimension k such an array is `before` by size[k] by `after`; products along it have one implementation. */
#include "optim_reference.h"

#include "support/linalg/reference.h"
#include "support/testing.h"

/* --- boxes ------------------------------------------------------------------------------------------------------- */

static int32_t drop_ones(int32_t ndim, const int64_t *shape, int64_t *dims)
{
    int32_t n = 0;
    for (int32_t i = 0; i < ndim; i++) {
        if (shape[i] != 1) {
            dims[n++] = shape[i];
        }
    }
    return n;
}

/* At most four dimensions: the neighbors with the smallest product are merged. */
static int32_t merge_smallest(int32_t n, int64_t *dims)
{
    while (n > REF_MAX_ORDER) {
        int32_t best = 0;
        for (int32_t i = 1; i + 1 < n; i++) {
            best = dims[i] * dims[i + 1] < dims[best] * dims[best + 1] ? i : best;
        }
        dims[best] *= dims[best + 1];
        memmove(dims + best + 1, dims + best + 2, (size_t)(n - best - 2) * sizeof *dims);
        n--;
    }
    return n;
}

/* From the innermost dimension outwards. The outermost stays separate rather than leave a vector. */
static int32_t merge_dims(const tch_optim_config *config, int32_t ndim, int64_t *dims)
{
    int64_t merged[TCH_MAX_RANK];
    int32_t n = 0;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        bool fits = n > 0 && dims[i] * merged[n - 1] <= config->shampoo.max_preconditioner_dim;
        bool last = i == 0 && n == 1;
        if (config->shampoo.merge_dims && fits && !last) {
            merged[n - 1] *= dims[i];
        } else {
            merged[n++] = dims[i];
        }
    }
    for (int32_t i = 0; i < n; i++) {
        dims[i] = merged[n - 1 - i];
    }
    return merge_smallest(n, dims);
}

bool ref_has_blocks(tch_optim_kind kind)
{
    return kind == TCH_OPTIM_SHAMPOO || kind == TCH_OPTIM_KL_SHAMPOO || kind == TCH_OPTIM_SOAP ||
           ref_orthogonalizes(kind);
}

bool ref_orthogonalizes(tch_optim_kind kind)
{
    return kind == TCH_OPTIM_MUON || kind == TCH_OPTIM_NORMUON;
}

/* SOAP without blocks has no factor for a matrix with all sides above the limit. */
static void leave_large_sides(ref_optim *r, const tch_optim_config *config)
{
    bool fits = config->kind != TCH_OPTIM_SOAP || config->soap.block;
    for (int32_t k = 0; k < r->order; k++) {
        fits = fits || r->dims[k] <= config->shampoo.max_preconditioner_dim;
    }
    if (!fits) {
        r->method = TCH_OPTIM_ADAMW;
        r->scalar = 1;
        r->order = 1;
        r->dims[0] = r->count;
    }
}

static void choose_method(ref_optim *r, const tch_optim_config *config, int32_t ndim, const int64_t *shape,
                          int32_t elementwise)
{
    int64_t dims[TCH_MAX_RANK];
    int32_t n = drop_ones(ndim, shape, dims);
    bool vectors = config->shampoo.precondition_1d && !ref_orthogonalizes(config->kind);
    bool matrix = n >= (vectors ? 1 : 2) && !elementwise && r->count > 0;
    r->method = config->kind;
    r->order = 1;
    r->dims[0] = r->count;
    if (!ref_has_blocks(config->kind)) {
        return;
    }
    if (!matrix) {
        r->method = TCH_OPTIM_ADAMW;
        r->scalar = 1;
    } else if (ref_orthogonalizes(config->kind)) {
        r->order = 2;
        r->dims[0] = dims[0];
        r->dims[1] = r->count / dims[0];
    } else {
        r->order = merge_dims(config, n, dims);
        memcpy(r->dims, dims, (size_t)r->order * sizeof *dims);
        leave_large_sides(r, config);
    }
}

static void make_block(ref_optim *r, const tch_optim_config *config, int64_t width, int64_t number, ref_block *b)
{
    memset(b, 0, sizeof *b);
    b->level = NAN;
    b->count = 1;
    for (int32_t k = r->order - 1; k >= 0; k--) {
        int64_t blocks = (r->dims[k] + width - 1) / width;
        b->start[k] = number % blocks * width;
        b->size[k] = r->dims[k] - b->start[k] < width ? r->dims[k] - b->start[k] : width;
        b->count *= b->size[k];
        number /= blocks;
    }
    bool second_order = ref_has_blocks(r->method) && !ref_orthogonalizes(r->method);
    for (int32_t k = 0; k < r->order && second_order; k++) {
        int64_t n = b->size[k];
        bool thin = r->order > 1 && n > 100 * (b->count / n);
        if (n <= config->shampoo.max_preconditioner_dim && !thin) {
            b->factor[k] = test_zeros(n * n);
            b->root[k] = test_zeros(n * n);
            for (int64_t i = 0; i < n; i++) {
                b->root[k][i * n + i] = 1.0;
            }
        }
    }
    b->average = test_zeros(b->count);
    b->square = test_zeros(b->count);
    b->largest = test_zeros(b->count);
    b->buffer = test_zeros(b->count);
}

ref_optim *ref_optim_make(const tch_optim_config *config, int32_t ndim, const int64_t *shape, int32_t elementwise,
                          const double *values)
{
    ref_optim *r = test_alloc(sizeof *r);
    memset(r, 0, sizeof *r);
    r->count = 1;
    for (int32_t i = 0; i < ndim; i++) {
        r->count *= shape[i];
    }
    choose_method(r, config, ndim, shape, elementwise);
    r->values = test_zeros(r->count);
    r->open = test_zeros(r->count);
    memcpy(r->values, values, (size_t)r->count * sizeof *values);
    bool cut = r->method == TCH_OPTIM_SHAMPOO || r->method == TCH_OPTIM_KL_SHAMPOO ||
               (r->method == TCH_OPTIM_SOAP && config->soap.block);
    int64_t width = cut ? config->shampoo.max_preconditioner_dim : INT64_MAX / 2;
    r->block_count = r->count > 0 ? 1 : 0;
    for (int32_t k = 0; k < r->order; k++) {
        r->block_count *= (int32_t)((r->dims[k] + width - 1) / width);
    }
    r->blocks = test_alloc((size_t)r->block_count * sizeof *r->blocks);
    for (int32_t i = 0; i < r->block_count; i++) {
        make_block(r, config, width, i, &r->blocks[i]);
    }
    return r;
}

/* The index of the block's element e in the parameter. */
static int64_t place(const ref_optim *r, const ref_block *b, int64_t e)
{
    int64_t offset = 0;
    int64_t stride = 1;
    for (int32_t k = r->order - 1; k >= 0; k--) {
        offset += (b->start[k] + e % b->size[k]) * stride;
        e /= b->size[k];
        stride *= r->dims[k];
    }
    return offset;
}

static double *take(const ref_optim *r, const ref_block *b, const double *from)
{
    double *x = test_zeros(b->count);
    for (int64_t e = 0; e < b->count; e++) {
        x[e] = from[place(r, b, e)];
    }
    return x;
}

/* --- products along a dimension ---------------------------------------------------------------------------------- */

static int64_t after(const ref_optim *r, const ref_block *b, int32_t k)
{
    int64_t count = 1;
    for (int32_t i = k + 1; i < r->order; i++) {
        count *= b->size[i];
    }
    return count;
}

/* C = weight G + keep C, G(i, j) being the product of slices i and j of x. */
static void update_factor(const ref_optim *r, ref_block *b, int32_t k, const double *x, double weight, double keep)
{
    int64_t n = b->factor[k] == NULL ? 0 : b->size[k];
    int64_t inner = after(r, b, k);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (int64_t e = 0; e < b->count / n; e++) {
                int64_t first = e / inner * n * inner + e % inner;
                sum += x[first + i * inner] * x[first + j * inner];
            }
            b->factor[k][i * n + j] = weight * sum + keep * b->factor[k][i * n + j];
        }
    }
}

/* x = M x along dimension k, or M' x. */
static void multiply(const ref_optim *r, const ref_block *b, int32_t k, const double *m, bool transpose, double *x)
{
    int64_t n = b->size[k];
    int64_t inner = after(r, b, k);
    double *column = test_zeros(n);
    for (int64_t e = 0; e < b->count / n; e++) {
        double *first = x + e / inner * n * inner + e % inner;
        for (int64_t i = 0; i < n; i++) {
            column[i] = 0.0;
            for (int64_t j = 0; j < n; j++) {
                column[i] += m[transpose ? j * n + i : i * n + j] * first[j * inner];
            }
        }
        for (int64_t i = 0; i < n; i++) {
            first[i * inner] = column[i];
        }
    }
}

static void multiply_all(const ref_optim *r, const ref_block *b, bool transpose, double *x)
{
    for (int32_t k = 0; k < r->order; k++) {
        if (b->root[k] != NULL) {
            multiply(r, b, k, b->root[k], transpose, x);
        }
    }
}

/* What p is multiplied by in a step along u, which is never with L2. */
static double keep_of(const tch_optim_config *c, double lr, double decay, double u, double p)
{
    bool decays = c->weight_decay_type == TCH_WEIGHT_DECAY_DECOUPLED ||
                  (c->weight_decay_type == TCH_WEIGHT_DECAY_CAUTIOUS && u * p >= 0.0);
    return decays ? 1.0 - lr * decay : 1.0;
}

static void add_l2(const tch_optim_config *c, const ref_block *b, const double *p, double *g)
{
    for (int64_t e = 0; e < b->count && c->weight_decay_type == TCH_WEIGHT_DECAY_L2; e++) {
        g[e] += c->weight_decay * p[e];
    }
}

/* --- elementwise methods ----------------------------------------------------------------------------------------- */

/* Hyperparameters of the method itself, or of AdamW for other methods' parameters. */
static void step_adamw(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    bool l2 = c->weight_decay_type == TCH_WEIGHT_DECAY_L2;
    bool follows = r->scalar && c->adamw.lr != 0.0;
    bool decays = r->scalar && c->adamw.weight_decay >= 0.0;
    double lr = follows ? c->adamw.lr * c->lr / c->adamw.base_lr : c->lr;
    double decay = decays ? c->adamw.weight_decay : c->weight_decay;
    double beta1 = r->scalar ? c->adamw.beta1 : c->beta1;
    double beta2 = r->scalar ? c->adamw.beta2 : c->beta2;
    double eps = r->scalar ? c->adamw.eps : c->eps;
    double correction1 = 1.0 - pow(beta1, (double)r->step);
    double correction2 = 1.0 - pow(beta2, (double)r->step);
    for (int64_t e = 0; e < b->count; e++) {
        g[e] += l2 ? decay * p[e] : 0.0;
        b->average[e] = beta1 * b->average[e] + (1.0 - beta1) * g[e];
        b->square[e] = beta2 * b->square[e] + (1.0 - beta2) * g[e] * g[e];
        b->largest[e] = fmax(b->largest[e], b->square[e]);
        double v = c->amsgrad && !r->scalar ? b->largest[e] : b->square[e];
        double u = b->average[e] / correction1 / (sqrt(v / correction2) + eps);
        p[e] = keep_of(c, lr, decay, u, p[e]) * p[e] - lr * u;
    }
}

static void step_sgd(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    add_l2(c, b, p, g);
    for (int64_t e = 0; e < b->count; e++) {
        double d = g[e];
        if (c->momentum != 0.0) {
            b->buffer[e] = r->step == 1 ? d : c->momentum * b->buffer[e] + (1.0 - c->dampening) * d;
            d = c->nesterov ? d + c->momentum * b->buffer[e] : b->buffer[e];
        }
        p[e] = keep_of(c, c->lr, c->weight_decay, d, p[e]) * p[e] - c->lr * d;
    }
}

/* Each step rounds the average at most three times. */
static void step_lion(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    add_l2(c, b, p, g);
    for (int64_t e = 0; e < b->count; e++) {
        double kept = c->beta1 * b->average[e];
        double taken = (1.0 - c->beta1) * g[e];
        double direction = kept + taken;
        double rounding = 4.0 * (double)r->step * r->roundoff * (fabs(kept) + fabs(taken));
        double u = (double)((direction > 0.0) - (direction < 0.0));
        r->open[e] += fabs(direction) < rounding ? (2.0 + c->weight_decay * fabs(p[e])) * c->lr : 0.0;
        p[e] = keep_of(c, c->lr, c->weight_decay, u, p[e]) * p[e] - c->lr * u;
        b->average[e] = c->beta2 * b->average[e] + (1.0 - c->beta2) * g[e];
    }
}

/* --- Shampoo ----------------------------------------------------------------------------------------------------- */

static void accumulate(ref_optim *r, const tch_optim_config *c, ref_block *b, const double *g)
{
    double weight = 1.0;
    double keep = 1.0;
    if (c->beta2 != 1.0) {
        weight = (1.0 - c->beta2) / (c->use_bias_correction ? 1.0 - pow(c->beta2, (double)r->step) : 1.0);
        keep = c->use_bias_correction ? 1.0 - weight : c->beta2;
    }
    for (int32_t k = 0; k < r->order; k++) {
        update_factor(r, b, k, g, weight, keep);
    }
}

static void take_root(const tch_optim_config *c, int32_t order, int64_t n, const double *factor, double *root)
{
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    ref_eigh(n, factor, w, v);
    double damping = fmax(c->eps, c->numerics.damping * w[n - 1]);
    double power = -1.0 / (c->shampoo.exponent_override > 0 ? c->shampoo.exponent_override : 2 * order);
    for (int64_t i = 0; i < n; i++) {
        w[i] = pow(fmax(w[i], 0.0) + damping, power);
    }
    ref_compose(n, v, w, root);
}

static int64_t first_refresh(const tch_optim_config *c)
{
    return c->shampoo.start_preconditioning_step > 1 ? c->shampoo.start_preconditioning_step : 1;
}

/* After the first refresh, `since` steps ago. Adaptive intervals are at most that divided by `parts`, if not 0. */
static bool is_due(const tch_optim_config *c, const ref_block *b, int32_t k, int64_t since, int64_t parts)
{
    bool told = c->shampoo.stagger && c->shampoo.precondition_frequency > 1;
    bool adaptive = c->shampoo.refresh_drift > 0.0 && parts > 0;
    int64_t gap = adaptive ? 1 : c->shampoo.precondition_frequency;
    while (adaptive && 2 * gap * parts <= since && gap < c->shampoo.precondition_frequency) {
        gap *= 2;
    }
    gap = gap < c->shampoo.precondition_frequency ? gap : c->shampoo.precondition_frequency;
    return b->stale || (told ? b->due[k] : since % gap == 0);
}

/* The rule of adaptive refresh, from the direction before grafting or clipping. */
static void judge_roots(const tch_optim_config *c, ref_block *b, const double *direction)
{
    double norm = ref_norm(b->count, direction);
    double level = round(64.0 * log2(norm * norm / (double)b->count));
    double limit = 64.0 * log2(c->shampoo.refresh_drift);
    bool judged = c->shampoo.refresh_drift > 0.0 && norm > 0.0;
    b->stale = judged && !b->refreshed && !(level - b->level <= limit && level - b->level >= -limit - 64.0);
    b->level = judged && b->refreshed ? level : b->level;
    b->refreshed = false;
}

static void refresh_roots(ref_optim *r, const tch_optim_config *c, ref_block *b)
{
    int64_t since = r->step - first_refresh(c);
    for (int32_t k = 0; k < r->order && since >= 0; k++) {
        if (b->factor[k] != NULL && is_due(c, b, k, since, 10)) {
            take_root(c, r->order, b->size[k], b->factor[k], b->root[k]);
            b->refreshed = true;
        }
    }
}

/* d from g and f, with v in b->square. */
static void graft(ref_optim *r, const tch_optim_config *c, ref_block *b, const double *g, const double *f, double *d)
{
    double correction = 1.0 - pow(c->shampoo.grafting_beta2, (double)r->step);
    for (int64_t e = 0; e < b->count; e++) {
        double *v = &b->square[e];
        d[e] = f[e];
        if (c->shampoo.grafting == TCH_GRAFTING_ADAGRAD) {
            *v += g[e] * g[e];
        } else {
            *v = c->shampoo.grafting_beta2 * *v + (1.0 - c->shampoo.grafting_beta2) * g[e] * g[e];
        }
        if (c->shampoo.grafting > TCH_GRAFTING_SGD) {
            d[e] /= sqrt(c->shampoo.grafting == TCH_GRAFTING_ADAM ? *v / correction : *v) + c->shampoo.grafting_eps;
        }
    }
}

/* The direction overwrites f. */
static void precondition(ref_optim *r, const tch_optim_config *c, ref_block *b, const double *g, double *f)
{
    double *d = test_zeros(b->count);
    graft(r, c, b, g, f, d);
    if (r->step < first_refresh(c)) {
        memcpy(f, d, (size_t)b->count * sizeof *f);
    } else {
        multiply_all(r, b, false, f);
        judge_roots(c, b, f);
        double norm = ref_norm(b->count, f);
        double scale = norm > 0.0 ? ref_norm(b->count, d) / norm : 0.0;
        for (int64_t e = 0; e < b->count && c->shampoo.grafting != TCH_GRAFTING_NONE; e++) {
            f[e] *= scale;
        }
    }
}

/* V = W - lr |W| D / |D|; W = |W| V / |V| */
static void keep_norm(const tch_optim_config *c, int64_t count, double *p, const double *d)
{
    double radius = ref_norm(count, p);
    double length = ref_norm(count, d);
    for (int64_t e = 0; e < count && length > 0.0; e++) {
        p[e] -= c->lr * radius / length * d[e];
    }
    double now = ref_norm(count, p);
    for (int64_t e = 0; e < count && now > 0.0; e++) {
        p[e] *= radius / now;
    }
}

static void apply(const tch_optim_config *c, ref_block *b, double *p, const double *d)
{
    if (c->constant_norm) {
        keep_norm(c, b->count, p, d);
        return;
    }
    for (int64_t e = 0; e < b->count; e++) {
        double step = d[e];
        if (c->kind == TCH_OPTIM_SHAMPOO && c->momentum != 0.0) {
            b->buffer[e] = c->momentum * b->buffer[e] + d[e];
            step = c->nesterov ? d[e] + c->momentum * b->buffer[e] : b->buffer[e];
        }
        p[e] = keep_of(c, c->lr, c->weight_decay, step, p[e]) * p[e] - c->lr * step;
    }
}

static void step_shampoo(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    double *f = test_zeros(b->count);
    double correction = c->use_bias_correction ? 1.0 - pow(c->beta1, (double)r->step) : 1.0;
    add_l2(c, b, p, g);
    accumulate(r, c, b, g);
    refresh_roots(r, c, b);
    for (int64_t e = 0; e < b->count; e++) {
        b->average[e] = c->beta1 * b->average[e] + (1.0 - c->beta1) * g[e];
        f[e] = c->beta1 != 0.0 ? b->average[e] / correction : g[e];
    }
    precondition(r, c, b, g, f);
    apply(c, b, p, f);
}

/* --- KL-Shampoo -------------------------------------------------------------------------------------------------- */

/* Later factors see a refreshed root. */
static void update_whitened_factor(ref_optim *r, const tch_optim_config *c, ref_block *b, int32_t k, const double *g)
{
    double correction = c->use_bias_correction ? 1.0 - pow(c->beta2, (double)r->step) : 1.0;
    double weight = (1.0 - c->beta2) / correction;
    double *u = test_zeros(b->count);
    memcpy(u, g, (size_t)b->count * sizeof *u);
    for (int32_t j = 0; j < r->order; j++) {
        if (j != k && b->root[j] != NULL) {
            multiply(r, b, j, b->root[j], false, u);
        }
    }
    double others = (double)(b->count / b->size[k]);
    update_factor(r, b, k, u, weight / others, c->use_bias_correction ? 1.0 - weight : c->beta2);
    bool zero = ref_norm(b->size[k] * b->size[k], b->factor[k]) == 0.0;
    if (is_due(c, b, k, r->step - 1, 50) || r->step == 1) {
        b->refreshed = true;
        if (!zero || c->eps > 0.0) {
            take_root(c, r->order, b->size[k], b->factor[k], b->root[k]);
        }
    }
}

static void step_kl_shampoo(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    double correction = c->use_bias_correction ? 1.0 - pow(c->beta1, (double)r->step) : 1.0;
    add_l2(c, b, p, g);
    for (int32_t k = 0; k < r->order; k++) {
        if (b->factor[k] != NULL) {
            update_whitened_factor(r, c, b, k, g);
        }
    }
    for (int64_t e = 0; e < b->count; e++) {
        b->average[e] = c->beta1 * b->average[e] + (1.0 - c->beta1) * g[e];
        g[e] = b->average[e] / correction;
    }
    multiply_all(r, b, false, g);
    judge_roots(c, b, g);
    double rms = ref_norm(b->count, g) / sqrt((double)b->count);
    for (int64_t e = 0; e < b->count; e++) {
        g[e] /= fmax(rms, 1.0);
    }
    apply(c, b, p, g);
}

/* --- orthogonalization ------------------------------------------------------------------------------------------- */

/* Polar Express as published: optimal step by step, all but the last with its safety factor of 1.01. After minimax
 * steps the last. */
static void ortho_coefficients(const tch_optim_config *config, bool longs, int32_t step, double *k)
{
    static const double polar[6][3] = {{8.2872, -23.5959, 17.3004}, {4.1071, -2.9478, 0.5448},
                                       {3.9487, -2.9089, 0.5518},   {3.3184, -2.4885, 0.5100},
                                       {2.3007, -1.6689, 0.4188},   {1.875, -1.25, 0.375}};
    static const double muon[3] = {3.4445, -4.7750, 2.0315};
    const double *own = config->muon.ns_coefficients;
    step = longs ? 5 : step;
    if (config->muon.method == TCH_ORTHO_MUON) {
        memcpy(k, own[0] != 0.0 || own[1] != 0.0 || own[2] != 0.0 ? own : muon, sizeof muon);
        return;
    }
    memcpy(k, polar[step < 5 ? step : 5], sizeof muon);
    for (int i = 0; i < 3 && step < 5; i++) {
        k[i] /= pow(1.01, 2 * i + 1);
    }
}

/* In place. */
static void orthogonalize(const tch_optim_config *config, int32_t rounds, int64_t m, int64_t n, double *x)
{
    double k[3];
    double *short_side = test_zeros(m * n);
    double norm = fmax(ref_norm(m * n, x), config->eps);
    norm = norm > 0.0 ? norm : 1.0;
    int64_t rows = m < n ? m : n;
    for (int64_t i = 0; i < m * n; i++) {
        x[i] /= norm;
    }
    if (m > n) {
        ref_transpose(m, n, x, short_side);
    } else {
        memcpy(short_side, x, (size_t)(m * n) * sizeof *x);
    }
    bool minimax = config->muon.method == TCH_ORTHO_MINIMAX;
    bool longs = minimax && !rounds;
    int32_t steps = config->muon.ns_steps > 0 ? config->muon.ns_steps : minimax ? REF_LONG_STEPS : 5;
    steps += minimax && rounds ? 2 : 0; /* of Polar Express, if there were as many */
    for (int32_t step = 0; step < steps; step++) {
        if (longs && step < REF_LONG_STEPS) {
            ref_long_step(step, rows, m * n / rows, short_side);
            continue;
        }
        ortho_coefficients(config, longs, step, k);
        ref_schulz_step(rows, m * n / rows, k, short_side);
    }
    if (m > n) {
        ref_transpose(n, m, short_side, x);
    } else {
        memcpy(x, short_side, (size_t)(m * n) * sizeof *x);
    }
}

/* --- SOAP -------------------------------------------------------------------------------------------------------- */

/* Eigenvectors in the columns, the largest eigenvalue first. */
static void first_basis(int64_t n, const double *factor, double *basis)
{
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    ref_eigh(n, factor, w, v);
    for (int64_t i = 0; i < n * n; i++) {
        basis[i] = v[i / n * n + (n - 1 - i % n)];
    }
}

/* Gram-Schmidt on the columns, each twice. */
static void orthonormalize(int64_t n, double *x)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t k = 0; k < 2 * j; k++) {
            double along = 0.0;
            for (int64_t i = 0; i < n; i++) {
                along += x[i * n + k % j] * x[i * n + j];
            }
            for (int64_t i = 0; i < n; i++) {
                x[i * n + j] -= along * x[i * n + k % j];
            }
        }
        double square = 0.0;
        for (int64_t i = 0; i < n; i++) {
            square += x[i * n + j] * x[i * n + j];
        }
        for (int64_t i = 0; i < n; i++) {
            x[i * n + j] /= sqrt(square);
        }
    }
}

/* order[i] is the index of the i-th largest diagonal element of Q' C Q. */
static void order_of(int64_t n, const double *q, const double *cq, int64_t *order)
{
    double *w = test_zeros(n);
    for (int64_t i = 0; i < n * n; i++) {
        w[i % n] += q[i] * cq[i];
    }
    for (int64_t i = 0; i < n; i++) {
        order[i] = 0;
        for (int64_t j = 1; j < n; j++) {
            order[i] = w[j] > w[order[i]] ? j : order[i];
        }
        w[order[i]] = -HUGE_VAL;
    }
}

/* A factor is tracked with this fraction of its trace added: the eigenvectors are the same, and its null space stays
 * fixed (docs/numerics/soap-basis.md). */
#define BASIS_SHIFT 1e-7

/* One orthogonal iteration: columns ordered by the diagonal of Q' C Q, second moments with them, then QR of C Q. */
static void track(const ref_optim *r, ref_block *b, int32_t k)
{
    int64_t n = b->size[k];
    int64_t inner = after(r, b, k);
    double *product = test_zeros(n * n);
    double *square = test_zeros(b->count);
    int64_t *order = test_alloc((size_t)n * sizeof *order);
    double shift = BASIS_SHIFT * ref_trace(n, b->factor[k]);
    ref_matmul(n, n, n, b->factor[k], b->root[k], product);
    for (int64_t i = 0; i < n * n; i++) {
        product[i] += shift * b->root[k][i];
    }
    order_of(n, b->root[k], product, order);
    for (int64_t i = 0; i < n * n; i++) {
        b->root[k][i] = product[i / n * n + order[i % n]];
    }
    for (int64_t e = 0; e < b->count; e++) {
        int64_t i = e / inner % n;
        square[e] = b->square[e + (order[i] - i) * inner];
    }
    memcpy(b->square, square, (size_t)b->count * sizeof *square);
    orthonormalize(n, b->root[k]);
}

/* 0.2 sqrt(max(rows, columns)) times the polar factor, by the usual minimax steps. */
static void make_orthogonal(const ref_optim *r, const ref_block *b, double *m)
{
    tch_optim_config muon = tch_optim_defaults(TCH_OPTIM_MUON);
    int64_t rows = b->size[0];
    int64_t cols = b->count / rows;
    muon.eps = 0.0;
    orthogonalize(&muon, r->rounds, rows, cols, m);
    for (int64_t e = 0; e < b->count; e++) {
        m[e] *= 0.2 * sqrt((double)(rows > cols ? rows : cols));
    }
}

/* m becomes the direction in the original space. */
static void adam_in_basis(ref_optim *r, const tch_optim_config *c, ref_block *b, const double *g, double *m)
{
    double moments = (double)(r->step - 1);
    double *rotated = test_zeros(b->count);
    double scale = c->use_bias_correction ? sqrt(1.0 - pow(c->beta2, moments)) / (1.0 - pow(c->beta1, moments)) : 1.0;
    memcpy(rotated, g, (size_t)b->count * sizeof *g);
    multiply_all(r, b, true, rotated);
    multiply_all(r, b, true, m);
    for (int64_t e = 0; e < b->count; e++) {
        b->square[e] = c->beta2 * b->square[e] + (1.0 - c->beta2) * rotated[e] * rotated[e];
        m[e] *= scale / (sqrt(b->square[e]) + c->eps);
    }
    multiply_all(r, b, false, m);
    double norm = ref_norm(b->count, m);
    for (int64_t e = 0; e < b->count && c->soap.normalize_grads; e++) {
        m[e] *= norm > 0.0 ? sqrt((double)b->count) / norm : 0.0;
    }
    if (c->soap.orthogonalize) {
        make_orthogonal(r, b, m);
    }
}

static void update_bases(ref_optim *r, const tch_optim_config *c, ref_block *b, const double *g)
{
    double beta = c->soap.shampoo_beta < 0.0 ? c->beta2 : c->soap.shampoo_beta;
    for (int32_t k = 0; k < r->order; k++) {
        if (b->factor[k] == NULL) {
            continue;
        }
        update_factor(r, b, k, g, 1.0 - beta, beta);
        if (r->step == 1) {
            first_basis(b->size[k], b->factor[k], b->root[k]);
        } else if (is_due(c, b, k, r->step - 1, 0)) {
            track(r, b, k);
        }
    }
}

/* The first gradient only initializes the bases. */
static void step_soap(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    add_l2(c, b, p, g);
    if (r->step > 1) {
        double *m = test_zeros(b->count);
        for (int64_t e = 0; e < b->count; e++) {
            m[e] = b->average[e] = c->beta1 * b->average[e] + (1.0 - c->beta1) * g[e];
        }
        adam_in_basis(r, c, b, g, m);
        apply(c, b, p, m);
    }
    update_bases(r, c, b, g);
}

/* --- Muon -------------------------------------------------------------------------------------------------------- */

/* The learning rate of a matrix by its shape. */
static double muon_rate(const ref_optim *r, const tch_optim_config *c)
{
    double m = (double)r->dims[r->by_columns ? 1 : 0];
    double n = (double)r->count / m;
    if (c->muon.adjust_lr_fn == TCH_ADJUST_LR_ORIGINAL) {
        return c->lr * sqrt(fmax(1.0, m / n));
    }
    return c->muon.adjust_lr_fn == TCH_ADJUST_LR_MATCH_RMS_ADAMW ? c->lr * 0.2 * sqrt(fmax(m, n)) : c->lr;
}

/* Row by row of the tensor, with its second moment in b->square; element j of row i is at (i, j) of memory or (j,
 * i). */
static void normalize_rows(const ref_optim *r, const tch_optim_config *c, ref_block *b, double *d)
{
    int64_t inner = r->dims[1];
    int64_t rows = r->dims[r->by_columns ? 1 : 0];
    int64_t length = r->count / rows;
    for (int64_t i = 0; i < rows; i++) {
        double mean = 0.0;
        for (int64_t j = 0; j < length; j++) {
            double x = d[r->by_columns ? j * inner + i : i * inner + j];
            mean += x * x / (double)length;
        }
        b->square[i] = c->beta2 * b->square[i] + (1.0 - c->beta2) * mean;
        double below = sqrt(b->square[i]) + c->eps;
        for (int64_t j = 0; j < length; j++) {
            d[r->by_columns ? j * inner + i : i * inner + j] /= below > 0.0 ? below : 1.0;
        }
    }
}

/* With rows of even length for NorMuon. */
static void step_muon(ref_optim *r, const tch_optim_config *c, ref_block *b, double *p, double *g)
{
    double lr = muon_rate(r, c);
    add_l2(c, b, p, g);
    for (int64_t e = 0; e < b->count; e++) {
        b->average[e] += (1.0 - c->momentum) * (g[e] - b->average[e]);
        g[e] = c->nesterov ? g[e] + c->momentum * (b->average[e] - g[e]) : b->average[e];
    }
    orthogonalize(c, r->rounds, r->dims[0], r->dims[1], g);
    if (r->method == TCH_OPTIM_NORMUON) {
        double rows = (double)r->dims[r->by_columns ? 1 : 0];
        normalize_rows(r, c, b, g);
        double norm = ref_norm(b->count, g);
        lr *= norm > 0.0 ? sqrt(fmin(rows, (double)r->count / rows)) / norm : 0.0;
    }
    if (c->constant_norm) {
        keep_norm(c, b->count, p, g);
        return;
    }
    for (int64_t e = 0; e < b->count; e++) {
        p[e] = keep_of(c, c->lr, c->weight_decay, g[e], p[e]) * p[e] - lr * g[e];
    }
}

void ref_optim_step(ref_optim *r, const tch_optim_config *config, const double *gradient)
{
    static void (*const steps[])(ref_optim *, const tch_optim_config *, ref_block *, double *, double *) = {
        [TCH_OPTIM_SGD] = step_sgd,         [TCH_OPTIM_ADAMW] = step_adamw,
        [TCH_OPTIM_SHAMPOO] = step_shampoo, [TCH_OPTIM_SOAP] = step_soap,
        [TCH_OPTIM_MUON] = step_muon,       [TCH_OPTIM_LION] = step_lion,
        [TCH_OPTIM_NORMUON] = step_muon,    [TCH_OPTIM_KL_SHAMPOO] = step_kl_shampoo,
    };
    r->step++;
    for (int32_t i = 0; i < r->block_count; i++) {
        ref_block *b = &r->blocks[i];
        size_t mark = test_mark();
        double *p = take(r, b, r->values);
        double *g = take(r, b, gradient);
        for (int64_t e = 0; e < b->count; e++) {
            g[e] = config->maximize ? -g[e] : g[e];
        }
        steps[r->method](r, config, b, p, g);
        for (int64_t e = 0; e < b->count; e++) {
            r->values[place(r, b, e)] = p[e];
        }
        test_release_since(mark);
    }
}
