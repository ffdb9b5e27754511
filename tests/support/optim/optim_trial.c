/* Parameters are contiguous in memory order, so that test_tensor_read returns values in the order of the references;
 * the library gets a view of the same memory with permuted dimensions. */
#include "optim_trial.h"

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_defaults.h"
#include "support/testing.h"

#define PARAMETER_SCALE 0.5

tch_optim_config trial_config(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.weight_decay = 0.05;
    c.numerics.precision = TCH_PRECISION_HIGHEST;
    c.shampoo.precondition_frequency = 3;
    c.shampoo.stagger = 0;
    if (kind == TCH_OPTIM_SGD) {
        c.momentum = 0.9;
    }
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.beta2 = 0.95;
        c.numerics.damping = 1e-3;
        c.numerics.method = TCH_ROOT_EIGEN;
    }
    return c;
}

/* See the tests of each kind. A GPU orthogonalizes in bfloat16. */
double trial_tolerance(tch_optim_kind kind, tch_dtype dtype)
{
    static const double exact[] = {1e-13, 1e-13, 1e-11, 1e-10, 1e-11, 1e-13, 1e-11, 1e-10};
    static const double rounded[] = {5e-6, 5e-6, 1e-4, 1e-4, 1e-4, 5e-6, 1e-4, 1e-4};
    return dtype.bits == 64 ? exact[kind] : ref_orthogonalizes(kind) && !test_on_cpu() ? 0.05 : rounded[kind];
}

void trial_set(tch_optim_config *config, const trial_setting *settings)
{
    for (int i = 0; i < TRIAL_MOST_SETTINGS && settings[i].field.name != NULL; i++) {
        test_field_set(config, &settings[i].field, settings[i].value);
    }
}

static bool is_permuted(const trial_shape *s)
{
    bool permuted = false;
    for (int32_t d = 0; d < s->ndim; d++) {
        permuted = permuted || s->order[d] != 0;
    }
    return permuted;
}

/* The tensor's shape, and its strides over contiguous memory. */
static void lay_out(trial_parameter *p)
{
    const trial_shape *s = &p->shape;
    for (int32_t d = 0; d < s->ndim; d++) {
        int32_t m = is_permuted(s) ? s->order[d] : d;
        p->sizes[d] = s->shape[m];
        p->strides[d] = 1;
        for (int32_t i = m + 1; i < s->ndim; i++) {
            p->strides[d] *= s->shape[i];
        }
    }
}

static void view(const trial_parameter *p, const test_tensor *memory, tch_tensor *tensor)
{
    *tensor = memory->tensor;
    tensor->shape = (int64_t *)p->sizes;
    tensor->strides = is_permuted(&p->shape) ? (int64_t *)p->strides : NULL;
}

static void make_gradient(trial *t, trial_parameter *p)
{
    const trial_shape *s = &p->shape;
    if (s->gradient_follows) {
        p->gradient_memory = test_tensor_make(t->context, t->gradient_dtype, s->ndim, s->shape, LAYOUT_CONTIGUOUS);
        view(p, p->gradient_memory, &p->gradient);
    } else {
        p->gradient_memory = test_tensor_make(t->context, t->gradient_dtype, s->ndim, p->sizes, s->gradient);
        p->gradient = p->gradient_memory->tensor;
    }
    p->drawn = test_alloc((size_t)p->memory->count * sizeof *p->drawn);
}

/* A matrix whose first dimension is the inner one in memory. */
static int32_t lies_by_columns(const trial_parameter *p)
{
    int32_t first = -1;
    int32_t sides = 0;
    for (int32_t d = 0; d < p->shape.ndim; d++) {
        first = first < 0 && p->sizes[d] > 1 ? d : first;
        sides += p->sizes[d] > 1;
    }
    return sides == 2 && p->strides[first] == 1;
}

static void make_parameter(trial *t, trial_parameter *p, const trial_shape *shape, int32_t group)
{
    memset(p, 0, sizeof *p);
    p->shape = *shape;
    p->group = group;
    lay_out(p);
    p->memory = test_tensor_make(t->context, t->dtype, shape->ndim, shape->shape, LAYOUT_CONTIGUOUS);
    view(p, p->memory, &p->tensor);
    double *values = test_alloc((size_t)p->memory->count * sizeof *values);
    for (int64_t i = 0; i < p->memory->count; i++) {
        values[i] = test_round(t->dtype, PARAMETER_SCALE * test_random_normal(&t->random));
    }
    test_tensor_write(p->memory, values);
    p->reference = ref_optim_make(&t->configs[group], shape->ndim, shape->shape, shape->elementwise, values);
    p->reference->roundoff = test_arithmetic_roundoff(t->dtype);
    p->reference->by_columns = lies_by_columns(p);
    const tch_optim_config *c = &t->configs[group];
    bool float32 = c->muon.ns_dtype == TCH_NS_FLOAT32 ||
                   (c->kind == TCH_OPTIM_SOAP && c->numerics.precision == TCH_PRECISION_HIGHEST);
    p->reference->rounds = !test_on_cpu() && t->dtype.bits != 64 && !float32;
    make_gradient(t, p);
    test_drop(values);
}

/* The documented default of scalar_lr. */
static void fill_in_scalar_lr(tch_optim_config *c)
{
    bool of_muons_size = ref_orthogonalizes(c->kind) && c->muon.adjust_lr_fn != TCH_ADJUST_LR_MATCH_RMS_ADAMW;
    if (c->adamw.lr == 0.0 && of_muons_size) {
        c->adamw.base_lr = 1.0;
        c->adamw.lr = 0.3;
    }
}

static void make_group(trial *t, const tch_optim_config *config, int32_t count, const trial_shape *shapes,
                       tch_parameter *entries)
{
    CHECK(t->groups < TRIAL_MOST_GROUPS && t->count + count <= TRIAL_MOST_PARAMETERS, "the trial is too large");
    t->configs[t->groups] = *config;
    t->configs[t->groups].adamw.base_lr = config->adamw.base_lr > 0.0 ? config->adamw.base_lr : config->lr;
    fill_in_scalar_lr(&t->configs[t->groups]);
    for (int32_t i = 0; i < count; i++) {
        trial_parameter *p = &t->parameters[t->count + i];
        make_parameter(t, p, &shapes[i], t->groups);
        entries[i] = (tch_parameter){.tensor = &p->tensor, .use_adamw = shapes[i].elementwise};
    }
    t->count += count;
    t->groups++;
}

void trial_prepare(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                   int32_t count, const trial_shape *shapes, tch_parameter *entries)
{
    memset(t, 0, sizeof *t);
    t->context = context;
    t->dtype = dtype;
    t->gradient_dtype = gradients;
    t->random = test_random_stream((uint64_t)config->kind * 1000 + (uint64_t)count);
    make_group(t, config, count, shapes, entries);
}

static void destroy_optimizer(void *optimizer)
{
    tch_optimizer_destroy(optimizer);
}

static void create_optimizer(trial *t, const tch_optim_config *config, int32_t count, const tch_parameter *entries)
{
    CHECK_OK(tch_optimizer_create(t->context, config, NULL, count, entries, &t->optimizer));
    test_own(t->optimizer, destroy_optimizer);
    t->owned = true;
}

void trial_open(trial *t, tch_context *context, tch_dtype dtype, tch_dtype gradients, const tch_optim_config *config,
                int32_t count, const trial_shape *shapes)
{
    tch_parameter entries[TRIAL_MOST_PARAMETERS];
    trial_prepare(t, context, dtype, gradients, config, count, shapes, entries);
    create_optimizer(t, config, count, entries);
}

void trial_add_group(trial *t, const tch_optim_config *config, int32_t count, const trial_shape *shapes)
{
    tch_parameter entries[TRIAL_MOST_PARAMETERS];
    int32_t group = -1;
    int32_t expected = t->groups;
    make_group(t, config, count, shapes, entries);
    CHECK_OK(tch_optimizer_add_group(t->optimizer, config, count, entries, NULL, &group));
    CHECK(group == expected, "the new group is number %d, expected %d", group, expected);
}

void trial_close(trial *t)
{
    tch_optimizer_destroy(t->owned ? test_keep(t->optimizer) : t->optimizer);
    for (int32_t i = 0; i < t->count; i++) {
        test_tensor_free(t->parameters[i].memory);
        test_tensor_free(t->parameters[i].gradient_memory);
    }
    memset(t, 0, sizeof *t);
}

/* From memory order to row-major order of the tensor's shape. */
static double *in_tensor_order(const trial_parameter *p, const double *values)
{
    double *out = test_alloc((size_t)p->memory->count * sizeof *out);
    for (int64_t i = 0; i < p->memory->count; i++) {
        int64_t rest = i;
        int64_t from = 0;
        for (int32_t d = p->shape.ndim - 1; d >= 0; d--) {
            from += rest % p->sizes[d] * p->strides[d];
            rest /= p->sizes[d];
        }
        out[i] = values[from];
    }
    return out;
}

static void upload_gradient(trial_parameter *p)
{
    double *values = p->shape.gradient_follows ? NULL : in_tensor_order(p, p->drawn);
    test_tensor_write(p->gradient_memory, values == NULL ? p->drawn : values);
    test_drop(values);
}

/* Normal numbers of decreasing magnitude, so that factors have a spectrum. */
void trial_draw(trial *t)
{
    for (trial_parameter *p = t->parameters; p < t->parameters + t->count; p++) {
        for (int64_t i = 0; i < p->memory->count; i++) {
            double share = (double)i / (double)p->memory->count;
            p->drawn[i] = test_round(t->gradient_dtype, test_random_normal(&t->random) * (1.0 - 0.8 * share));
        }
        upload_gradient(p);
    }
}

void trial_list_gradients(const trial *t, const tch_tensor **gradients)
{
    for (int32_t i = 0; i < t->count; i++) {
        gradients[i] = t->parameters[i].missing ? NULL : &t->parameters[i].gradient;
    }
}

void trial_step_references(trial *t)
{
    t->steps++;
    for (int32_t i = 0; i < t->count; i++) {
        trial_parameter *p = &t->parameters[i];
        if (p->missing) {
            continue;
        }
        size_t bytes = (size_t)p->memory->count * sizeof(double);
        double *before = test_alloc(bytes);
        memcpy(before, p->reference->values, bytes);
        ref_optim_step(p->reference, &t->configs[p->group], p->drawn);
        p->path += ref_distance(p->memory->count, before, p->reference->values);
        p->size = fmax(p->size, ref_norm(p->memory->count, p->reference->values));
        test_drop(before);
    }
}

tch_status trial_step_library(const trial *t)
{
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    trial_list_gradients(t, gradients);
    return tch_optimizer_step(t->optimizer, t->count, gradients);
}

void trial_step(trial *t)
{
    trial_draw(t);
    CHECK_OK(trial_step_library(t));
    trial_step_references(t);
}

void trial_steps(trial *t, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        trial_step(t);
    }
}

void trial_erase(trial *t, int32_t parameter, int64_t count)
{
    trial_parameter *p = &t->parameters[parameter];
    memset(p->drawn, 0, (size_t)count * sizeof *p->drawn);
    upload_gradient(p);
}

void trial_spoil(trial *t, int32_t parameter, double value)
{
    trial_parameter *p = &t->parameters[parameter];
    double *values = test_tensor_read(p->gradient_memory);
    values[p->memory->count - 1] = value;
    test_tensor_write(p->gradient_memory, values);
    test_drop(values);
}

void trial_scale_gradients(trial *t, double factor)
{
    for (int32_t i = 0; i < t->count; i++) {
        test_tensor *gradient = t->parameters[i].gradient_memory;
        double *values = test_tensor_read(gradient);
        for (int64_t k = 0; k < gradient->count; k++) {
            values[k] *= factor;
        }
        test_tensor_write(gradient, values);
        test_drop(values);
    }
}

tch_optim_stats trial_stats(const trial *t)
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t->optimizer, &stats));
    return stats;
}

tch_optim_state trial_state_at(const trial *t, int32_t index)
{
    tch_optim_state s = TCH_OPTIM_STATE_INIT;
    CHECK_OK(tch_optimizer_get_state(t->optimizer, index, &s));
    return s;
}

tch_tensor *trial_state(const trial *t, const char *name)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = trial_state_at(t, i);
        if (strcmp(s.name, name) == 0) {
            return s.tensor;
        }
    }
    test_fail(__FILE__, __LINE__, "there is no state '%s'", name);
}

double *trial_read(const trial *t, const tch_tensor *tensor)
{
    double *values = test_alloc((size_t)tch_tensor_numel(tensor) * sizeof *values);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, tensor->ndim, tensor->shape);
    tch_tensor *copy = NULL;
    CHECK_OK(tch_tensor_create(t->context, TCH_FLOAT64, tensor->ndim, tensor->shape, TCH_CONTIGUOUS, &copy));
    CHECK_OK(tch_tensor_copy(t->context, copy, tensor));
    CHECK_OK(tch_tensor_copy(t->context, &host, copy));
    CHECK_OK(tch_context_synchronize(t->context));
    tch_tensor_destroy(copy);
    return values;
}

void *trial_read_bytes(const trial *t, const tch_tensor *tensor)
{
    void *bytes = test_alloc((size_t)tch_tensor_numel(tensor) * tch_dtype_size(tensor->dtype) + 1);
    tch_tensor host = tch_tensor_view(bytes, tensor->dtype, tensor->ndim, tensor->shape);
    CHECK_OK(tch_tensor_copy(t->context, &host, tensor));
    CHECK_OK(tch_context_synchronize(t->context));
    return bytes;
}

/* Copies the state to `all`, or compares it with `before`, unless NULL. Returns its bytes. */
static size_t visit_state(const trial *t, int32_t parameter, unsigned char *all, const unsigned char *before)
{
    size_t at = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = trial_state_at(t, i);
        if (parameter >= 0 && s.parameter != parameter) {
            continue;
        }
        size_t size = (size_t)tch_tensor_numel(s.tensor) * tch_dtype_size(s.tensor->dtype);
        void *now = trial_read_bytes(t, s.tensor);
        if (all != NULL) {
            memcpy(all + at, now, size);
        }
        CHECK(before == NULL || memcmp(before + at, now, size) == 0, "%s has changed", s.name);
        test_drop(now);
        at += size;
    }
    return at;
}

unsigned char *trial_snapshot(const trial *t, int32_t parameter)
{
    unsigned char *all = test_alloc(visit_state(t, parameter, NULL, NULL) + 1);
    visit_state(t, parameter, all, NULL);
    return all;
}

void trial_check_snapshot(const trial *t, int32_t parameter, const unsigned char *before)
{
    visit_state(t, parameter, NULL, before);
}

void trial_save(const trial *t, const char *path)
{
    tch_checkpoint_writer *writer = NULL;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_optimizer_save(t->optimizer, writer, "optimizer"));
    CHECK_OK(tch_checkpoint_writer_save(writer, t->context, path));
    tch_checkpoint_writer_destroy(writer);
}

tch_status trial_load(const trial *t, const char *path)
{
    tch_checkpoint *file = NULL;
    CHECK_OK(tch_checkpoint_open(path, &file));
    tch_status status = tch_optimizer_load(t->optimizer, file, "optimizer");
    tch_checkpoint_close(file);
    return status;
}

void trial_replace_optimizer(trial *t, const tch_optim_config *config)
{
    tch_parameter entries[TRIAL_MOST_PARAMETERS];
    for (int32_t i = 0; i < t->count; i++) {
        const trial_parameter *p = &t->parameters[i];
        entries[i] = (tch_parameter){.tensor = (tch_tensor *)&p->tensor, .use_adamw = p->shape.elementwise};
    }
    tch_optimizer_destroy(test_keep(t->optimizer));
    t->optimizer = NULL;
    create_optimizer(t, config, t->count, entries);
}

void trial_copy_parameters(const trial *to, const trial *from)
{
    for (int32_t i = 0; i < from->count; i++) {
        test_tensor_write(to->parameters[i].memory, test_tensor_read(from->parameters[i].memory));
    }
}

test_tensor *trial_move_parameter(trial *t, int32_t parameter)
{
    trial_parameter *p = &t->parameters[parameter];
    test_tensor *old = p->memory;
    const double *values = test_tensor_read(old);
    p->memory = test_tensor_make(t->context, t->dtype, p->shape.ndim, p->shape.shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(p->memory, values);
    test_tensor_write(old, values);
    view(p, p->memory, &p->tensor);
    CHECK_OK(tch_optimizer_set_parameter(t->optimizer, parameter, &p->tensor));
    return old;
}

void trial_take_over(trial *to, const trial *from, const char *path)
{
    trial_save(from, path);
    trial_copy_parameters(to, from);
    CHECK_OK(trial_load(to, path));
    to->random = from->random;
}

void trial_check_same_parameters(const trial *a, const trial *b)
{
    for (int32_t i = 0; i < a->count; i++) {
        double *x = test_tensor_read(a->parameters[i].memory);
        double *y = test_tensor_read(b->parameters[i].memory);
        CHECK(memcmp(x, y, (size_t)a->parameters[i].memory->count * sizeof *x) == 0, "parameter %d went another way",
              i);
    }
}

void trial_for_every_kind(tch_context *context, const char *what, void (*check)(tch_context *, tch_optim_kind))
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        test_case("%s, %s", tch_optim_kind_name(kind), what);
        check(context, (tch_optim_kind)kind);
    }
}

void trial_set_config(trial *t, int32_t group, const tch_optim_config *config)
{
    double base = t->configs[group].adamw.base_lr;
    bool brings = config->adamw.lr != t->configs[group].adamw.lr;
    t->configs[group] = *config;
    if (config->adamw.base_lr == 0.0) {
        t->configs[group].adamw.base_lr = brings ? config->lr : base;
    }
    fill_in_scalar_lr(&t->configs[group]);
    CHECK_OK(tch_optimizer_set_config(t->optimizer, group, config));
}

double trial_error(const trial *t, int32_t parameter, double roundings)
{
    const trial_parameter *p = &t->parameters[parameter];
    double *values = test_tensor_read(p->memory);
    for (int64_t i = 0; i < p->memory->count; i++) {
        double off = values[i] - p->reference->values[i];
        values[i] -= fmin(fmax(off, -p->reference->open[i]), p->reference->open[i]);
    }
    double distance = ref_distance(p->memory->count, values, p->reference->values);
    test_drop(values);
    distance -= roundings * test_unit_roundoff(t->dtype) * p->size;
    return distance <= 0.0 ? 0.0 : distance / (p->path > 0.0 ? p->path : 1e-300);
}

void trial_check(const trial *t, double tolerance)
{
    for (int32_t i = 0; i < t->count; i++) {
        const trial_parameter *p = &t->parameters[i];
        double error = trial_error(t, i, (double)t->steps);
        CHECK(error <= tolerance, "parameter %d: off by %.3e of the path after %lld steps, expected %.1e", i, error,
              (long long)t->steps, tolerance);
        CHECK(p->path > 0.0 || p->memory->count == 0 || p->missing, "parameter %d: the reference has not moved", i);
        test_tensor_check_written(p->memory, "the parameter");
        test_tensor_check_unchanged(p->gradient_memory, "the gradient");
    }
}
