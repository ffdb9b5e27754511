/* See layout.h. */
#include "layout.h"

#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "core/list.h"
#include "method.h"
#include "pieces.h"
#include "shape.h"

/* --- blocks and classes ------------------------------------------------------------------------------------------ */

static int64_t cut_at(const tchi_block_method *blocks, const tch_optim_config *config)
{
    return blocks->cut_at == NULL ? INT64_MAX : blocks->cut_at(config);
}

static int32_t transpose_tall(const tchi_block_method *blocks, tchi_class *c)
{
    if (!blocks->transposes_tall || c->size[0] <= c->size[1]) {
        return 0;
    }
    int64_t rows = c->size[0];
    c->size[0] = c->size[1];
    c->size[1] = rows;
    return 1;
}

/* The class of a block of this parameter with these sizes, as a value that can be compared. */
static tchi_class describe(const tchi_param *param, const tchi_cut *cut, const int64_t *size)
{
    tchi_class c = {.group = param->group, .order = cut->order, .type = param->type, .real = param->real};
    memcpy(c.size, size, (size_t)cut->order * sizeof *size);
    return c;
}

static bool same_class(const tchi_class *a, const tchi_class *b)
{
    return a->group == b->group && a->order == b->order && a->type == b->type && a->real == b->real &&
           memcmp(a->size, b->size, sizeof a->size) == 0;
}

static tch_status find_class(tch_optimizer *o, const tchi_group *group, const tchi_class *wanted, tchi_class **found)
{
    for (int64_t i = group->first_class; i < o->classes.count; i++) {
        *found = tchi_class_at(o, (int32_t)i);
        if (same_class(*found, wanted)) {
            return TCH_OK;
        }
    }
    TCHI_TRY(tchi_list_reserve(&o->classes, o->classes.count + 1));
    *found = tchi_list_extend(&o->classes);
    **found = *wanted;
    (*found)->elements = 1;
    for (int32_t k = 0; k < wanted->order; k++) {
        (*found)->elements *= wanted->size[k];
    }
    return TCH_OK;
}

/* Calls visit for every block of every blocked parameter of the group. */
typedef tch_status (*block_visit)(tch_optimizer *o, tchi_group *group, tchi_class *class, const tchi_block *block);

static tch_status for_each_block(tch_optimizer *o, int32_t index, block_visit visit)
{
    const tchi_block_method *blocks = o->method->blocks;
    tchi_group *group = tchi_group_at(o, index);
    for (int32_t p = group->first_param; p < group->first_param + group->params; p++) {
        const tchi_param *param = tchi_param_at(o, p);
        if (!param->blocked) {
            continue;
        }
        tchi_cut cut = tchi_cut_of(&param->dims, cut_at(blocks, &group->config));
        for (int64_t number = 0; number < cut.blocks; number++) {
            tchi_block block = {.param = p, .number = (int32_t)number};
            int64_t size[TCHI_MOST_ORDER];
            tchi_cut_block(&cut, number, block.start, size);
            tchi_class wanted = describe(param, &cut, size);
            block.transposed = transpose_tall(blocks, &wanted);
            tchi_class *class;
            TCHI_TRY(find_class(o, group, &wanted, &class));
            TCHI_TRY(visit(o, group, class, &block));
        }
    }
    return TCH_OK;
}

static tch_status count_block(tch_optimizer *o, tchi_group *group, tchi_class *class, const tchi_block *block)
{
    (void)o;
    (void)group;
    (void)block;
    class->count++;
    return TCH_OK;
}

static tch_status place_block(tch_optimizer *o, tchi_group *group, tchi_class *class, const tchi_block *block)
{
    (void)group;
    *tchi_block_at(o, class->first + class->count++) = *block;
    return TCH_OK;
}

static tch_status make_blocks(tch_optimizer *o, int32_t index)
{
    TCHI_TRY(for_each_block(o, index, count_block));
    tchi_group *group = tchi_group_at(o, index);
    group->classes = (int32_t)o->classes.count - group->first_class;
    int64_t total = o->blocks.count;
    for (int32_t i = 0; i < group->classes; i++) {
        tchi_class *class = tchi_class_at(o, group->first_class + i);
        class->first = total;
        total += class->count;
        class->count = 0;
    }
    TCHI_TRY(tchi_list_reserve(&o->blocks, total));
    while (o->blocks.count < total) {
        tchi_list_extend(&o->blocks);
    }
    return for_each_block(o, index, place_block);
}

/* --- families ---------------------------------------------------------------------------------------------------- */

static bool has_factor(const tchi_block_method *blocks, const tch_optim_config *config, int64_t size)
{
    return blocks->has_factor != NULL && blocks->has_factor(config, size);
}

static tch_status find_family(tch_optimizer *o, const tchi_group *group, const tchi_family *wanted, int32_t *found)
{
    for (*found = group->first_family; *found < o->families.count; (*found)++) {
        const tchi_family *f = tchi_family_at(o, *found);
        if (f->n == wanted->n && f->root == wanted->root && f->real == wanted->real) {
            return TCH_OK;
        }
    }
    TCHI_TRY(tchi_list_reserve(&o->families, o->families.count + 1));
    *(tchi_family *)tchi_list_extend(&o->families) = *wanted;
    return TCH_OK;
}

static tch_status join_families(tch_optimizer *o, int32_t index, tchi_class *class)
{
    const tchi_block_method *blocks = o->method->blocks;
    const tchi_group *group = tchi_group_at(o, index);
    const tch_optim_config *config = &group->config;
    int32_t root = blocks->root == NULL ? 0 : blocks->root(config, class->order);
    for (int32_t k = 0; k < class->order; k++) {
        class->family[k] = -1;
        if (has_factor(blocks, config, class->size[k])) {
            tchi_family wanted = {.group = index, .n = class->size[k], .root = root, .real = class->real};
            TCHI_TRY(find_family(o, group, &wanted, &class->family[k]));
            tchi_family *family = tchi_family_at(o, class->family[k]);
            class->position[k] = family->count;
            family->count += class->count;
        }
    }
    return TCH_OK;
}

static tch_status take_family_lists(tchi_family *f)
{
    size_t n = (size_t)f->count;
    TCHI_TRY(tchi_host_take(n * sizeof *f->phase, "a family of factors", &f->phase));
    TCHI_TRY(tchi_host_take(n, "a family of factors", &f->due));
    TCHI_TRY(tchi_host_take(n, "a family of factors", &f->trouble));
    TCHI_TRY(tchi_host_take(n, "a family of factors", &f->own));
    TCHI_TRY(tchi_host_take(n * sizeof *f->class, "a family of factors", &f->class));
    return tchi_host_take(n * sizeof *f->block, "a family of factors", &f->block);
}

void tchi_layout_free_family(tchi_family *f)
{
    size_t n = (size_t)f->count;
    tchi_host_release(f->phase, n * sizeof *f->phase);
    tchi_host_release(f->due, n);
    tchi_host_release(f->trouble, n);
    tchi_host_release(f->own, n);
    tchi_host_release(f->class, n * sizeof *f->class);
    tchi_host_release(f->block, n * sizeof *f->block);
}

/* Each factor knows whose it is. */
static void note_owners(tch_optimizer *o, int32_t class_index)
{
    const tchi_class *class = tchi_class_at(o, class_index);
    for (int32_t k = 0; k < class->order; k++) {
        if (class->family[k] < 0) {
            continue;
        }
        tchi_family *family = tchi_family_at(o, class->family[k]);
        for (int64_t b = 0; b < class->count; b++) {
            family->class[class->position[k] + b] = class_index;
            family->block[class->position[k] + b] = b;
        }
    }
}

static tch_status make_families(tch_optimizer *o, int32_t index)
{
    tchi_group *group = tchi_group_at(o, index);
    for (int32_t i = 0; i < group->classes; i++) {
        TCHI_TRY(join_families(o, index, tchi_class_at(o, group->first_class + i)));
    }
    group->families = (int32_t)o->families.count - group->first_family;
    for (int32_t i = 0; i < group->families; i++) {
        TCHI_TRY(take_family_lists(tchi_family_at(o, group->first_family + i)));
    }
    for (int32_t i = 0; i < group->classes; i++) {
        note_owners(o, group->first_class + i);
    }
    return TCH_OK;
}

tch_status tchi_layout_group(tch_optimizer *optimizer, int32_t group)
{
    TCHI_TRY(make_blocks(optimizer, group));
    return make_families(optimizer, group);
}

/* --- the state in memory ----------------------------------------------------------------------------------------- */

/* Where names of the state go, or nowhere while only memory is counted. */
typedef struct naming {
    tch_optimizer *optimizer;
    bool on;
} naming;

static tch_dtype dtype_of(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? TCH_FLOAT64 : TCH_FLOAT32;
}

static tch_status name_state(const naming *n, int32_t param, void *data, tch_scalar type, int32_t ndim,
                             const int64_t *shape, const int64_t *strides, const char *what)
{
    tch_optimizer *o = n->optimizer;
    if (!n->on) {
        return TCH_OK;
    }
    const tchi_param *p = tchi_param_at(o, param);
    TCHI_TRY(tchi_list_reserve(&o->states, o->states.count + 1));
    size_t bytes = sizeof(tchi_state) + strlen(p->name) + strlen(what) + 2;
    tchi_state *s = NULL;
    TCHI_TRY(tchi_host_take(bytes, "the name of a state", &s));
    *(tchi_state **)tchi_list_extend(&o->states) = s;
    s->bytes = bytes;
    s->param = param;
    snprintf(s->name, bytes - sizeof *s, "%s/%s", p->name, what);
    s->tensor = (tch_tensor){.data = data,
                             .device = tch_context_device(o->context),
                             .ndim = ndim,
                             .dtype = dtype_of(type),
                             .shape = s->shape,
                             .strides = s->strides};
    for (int32_t k = 0; k < ndim; k++) {
        s->shape[k] = shape[k];
        s->strides[k] = strides[k];
    }
    return TCH_OK;
}

/* What the moments of a parameter are called, or NULL where it has none. */
static void moment_names(const tchi_optim_method *method, const tch_optim_config *config, bool blocked,
                         const char *names[TCHI_MOMENTS])
{
    names[0] = names[1] = names[2] = NULL;
    (blocked ? method->blocks->moments : method->elementwise->moments)(config, names);
}

/* The number of steps is the first thing in a clock. */
static tch_status place_param(const naming *n, int32_t index, const tch_optim_config *config, tchi_arena *arena)
{
    tchi_param *p = tchi_param_at(n->optimizer, index);
    const char *names[TCHI_MOMENTS];
    int64_t bytes = p->count * tchi_scalar_size(p->real);
    TCHI_TRY(name_state(n, index, p->clock, TCH_SCALAR_F64, 0, NULL, NULL, "step"));
    if (config->master_weights && tchi_scalar_size(p->type) == 2) {
        p->master = tchi_arena_take(arena, bytes);
        TCHI_TRY(name_state(n, index, p->master, p->real, p->ndim, p->shape, p->strides, "master"));
    }
    moment_names(n->optimizer->method, config, p->blocked, names);
    for (int32_t k = 0; k < TCHI_MOMENTS; k++) {
        if (names[k] != NULL) {
            p->moment[k] = tchi_arena_take(arena, bytes);
            TCHI_TRY(name_state(n, index, p->moment[k], p->real, p->ndim, p->shape, p->strides, names[k]));
        }
    }
    return TCH_OK;
}

static tch_status name_matrices(const naming *n, const tchi_class *class, int64_t block, int32_t k)
{
    static const char *const kept[] = {"root", "basis"};
    tch_optimizer *o = n->optimizer;
    const tchi_family *f = tchi_family_at(o, class->family[k]);
    const tchi_block *b = tchi_block_at(o, class->first + block);
    int64_t shape[2] = {f->n, f->n};
    int64_t strides[2] = {f->n, 1};
    int64_t at = (class->position[k] + block) * f->n * f->n * tchi_scalar_size(f->real);
    char what[64];
    snprintf(what, sizeof what, "factor.%d.%d", b->number, k);
    TCHI_TRY(name_state(n, b->param, f->factors + at, f->real, 2, shape, strides, what));
    snprintf(what, sizeof what, "%s.%d.%d", kept[f->root == 0], b->number, k);
    return name_state(n, b->param, f->roots + at, f->real, 2, shape, strides, what);
}

static tch_status name_block_state(const naming *n, const tchi_class *class, int64_t block)
{
    const tchi_block_method *blocks = n->optimizer->method->blocks;
    const tchi_block *b = tchi_block_at(n->optimizer, class->first + block);
    int64_t shape[TCHI_MOST_ORDER];
    int64_t strides[TCHI_MOST_ORDER];
    int64_t stride = 1;
    int32_t ndim = blocks->block_state_shape(class, tchi_block_param(n->optimizer, b), shape);
    for (int32_t k = ndim - 1; k >= 0; k--) {
        strides[k] = stride;
        stride *= shape[k];
    }
    int64_t at = block * blocks->block_state(class) * tchi_scalar_size(class->real);
    char what[64];
    snprintf(what, sizeof what, "%s.%d", blocks->block_state_name, b->number);
    return name_state(n, b->param, class->moment + at, class->real, ndim, shape, strides, what);
}

static tch_status name_class(const naming *n, const tchi_class *class)
{
    for (int64_t b = 0; n->on && b < class->count; b++) {
        for (int32_t k = 0; k < class->order; k++) {
            if (class->family[k] >= 0) {
                TCHI_TRY(name_matrices(n, class, b, k));
            }
        }
        if (class->moment != NULL) {
            TCHI_TRY(name_block_state(n, class, b));
        }
    }
    return TCH_OK;
}

static void place_family(tchi_family *f, tchi_arena *state, tchi_arena *beside)
{
    int64_t bytes = f->count * f->n * f->n * tchi_scalar_size(f->real);
    f->factors = tchi_arena_take(state, bytes);
    f->roots = tchi_arena_take(state, bytes);
    f->flags = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->flags);
    f->residuals = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->residuals);
    if (f->root == 0) {
        f->orders = tchi_arena_take(beside, f->count * f->n * (int64_t)sizeof *f->orders);
    }
}

tch_status tchi_layout_state(tch_optimizer *optimizer, int32_t group, tchi_arena *state, tchi_arena *beside, bool names)
{
    naming n = {optimizer, names};
    const tchi_block_method *blocks = optimizer->method->blocks;
    tchi_group *g = tchi_group_at(optimizer, group);
    g->numbers = tchi_arena_take(beside, sizeof *g->numbers);
    tch_clock *clocks = tchi_arena_take(state, g->params * (int64_t)sizeof *clocks);
    for (int32_t i = 0; i < g->params; i++) {
        tchi_param_at(optimizer, g->first_param + i)->clock = clocks == NULL ? NULL : clocks + i;
    }
    for (int32_t i = 0; i < g->params; i++) {
        TCHI_TRY(place_param(&n, g->first_param + i, &g->config, state));
    }
    for (int32_t i = 0; i < g->families; i++) {
        place_family(tchi_family_at(optimizer, g->first_family + i), state, beside);
    }
    for (int32_t i = 0; i < g->classes; i++) {
        tchi_class *class = tchi_class_at(optimizer, g->first_class + i);
        if (blocks->block_state != NULL) {
            int64_t numbers = class->count * blocks->block_state(class);
            class->moment = tchi_arena_take(state, numbers * tchi_scalar_size(class->real));
        }
        TCHI_TRY(name_class(&n, class));
    }
    return TCH_OK;
}

/* --- scratch of a step ------------------------------------------------------------------------------------------- */

/* An eighth of the state is little beside it; a gibibyte is little on any GPU, and lets the roots of small models be taken
 * many at a time, which is what they are fast by. */
int64_t tchi_layout_budget(const tch_optimizer *optimizer)
{
    enum { GIBIBYTE = 1 << 30 };
    int64_t asked = optimizer->groups.count > 0 ? tchi_group_at(optimizer, 0)->config.memory_budget : 0;
    int64_t share = optimizer->state_bytes / 8;
    return asked > 0 ? asked : share > GIBIBYTE ? share : GIBIBYTE;
}

/* A block whose dimensions are cut in more than two places is no single rectangle. */
static int64_t pieces_of(const tch_optimizer *o, const tchi_class *class)
{
    int64_t most = 1;
    for (int64_t b = 0; b < class->count; b++) {
        int64_t pieces = tchi_block_pieces(o, class, b);
        most = pieces > most ? pieces : most;
    }
    return most;
}

/* Blocks of one pass, where so many fit: as few passes as may be, and all alike, since a last one with little to do keeps
 * little of a device busy. */
static int64_t chunk_of(int64_t count, int64_t fit)
{
    int64_t most = fit < 1 ? 1 : fit > count ? count : fit;
    int64_t passes = (count + most - 1) / most;
    return (count + passes - 1) / passes;
}

void tchi_layout_chunks(tch_optimizer *optimizer, tchi_arena *scratch)
{
    /* A refresh gets the rest: roots are what gains by more at a time. */
    int64_t budget = tchi_layout_budget(optimizer) / (optimizer->families.count > 0 ? 4 : 1);
    int64_t most_work = 0;
    int64_t most_blocks = 1;
    int64_t most_pieces = 1;
    int64_t most_elements = 1;
    for (int32_t i = 0; i < optimizer->classes.count; i++) {
        tchi_class *class = tchi_class_at(optimizer, i);
        const tch_optim_config *config = &tchi_group_at(optimizer, class->group)->config;
        int64_t each = optimizer->method->blocks->work(optimizer->context, config, class);
        int64_t fit = each > 0 ? budget / each : class->count;
        class->pieces = pieces_of(optimizer, class);
        class->chunk = chunk_of(class->count, fit);
        most_work = class->chunk * each > most_work ? class->chunk * each : most_work;
        most_blocks = class->chunk > most_blocks ? class->chunk : most_blocks;
        most_pieces = class->chunk * class->pieces > most_pieces ? class->chunk * class->pieces : most_pieces;
        int64_t elements = class->chunk * class->elements;
        most_elements = elements > most_elements ? elements : most_elements;
    }
    const tch_backend *t = optimizer->context->backend;
    optimizer->most_pieces = most_pieces;
    optimizer->work_bytes = most_work;
    optimizer->scratch = tchi_arena_take(scratch, most_work);
    optimizer->wanted = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(double));
    optimizer->norms = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(double));
    optimizer->graft_scratch =
        tchi_arena_take(scratch, t->device->scratch_bytes(optimizer->context->state, TCH_SCRATCH_GRAFT, TCH_SCALAR_F32,
                                                          most_elements, 1, most_pieces, 0));
}
