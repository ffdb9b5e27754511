/* The elementwise update by a function of the user's: the text around it, and the launches. The text is compiled once
 * for every arithmetic that the optimizer's parameters need; see optim_update.h in kernel/prelude. */
#include "user_kernel.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "kernel/macros.h"
#include "kernel/prelude.h"
#include "kernel/prelude/optim_list.h"

#include "method.h"

_Static_assert(sizeof(tchi_update_list) <= TCHI_PARAMETER_BYTES_MOST,
               "the list does not fit among a kernel's arguments");
_Static_assert((int)TCHI_TYPE_F64 == (int)TCH_SCALAR_F64 && (int)TCHI_TYPE_F32 == (int)TCH_SCALAR_F32 &&
                   (int)TCHI_TYPE_F16 == (int)TCH_SCALAR_F16 && (int)TCHI_TYPE_BF16 == (int)TCH_SCALAR_BF16,
               "the text numbers types otherwise");

#define HYPER_AT(member, index) (offsetof(tch_hyper, member) == (index) * sizeof(double))
#define CLOCK_AT(member, index) (offsetof(tch_clock, member) == (index) * sizeof(double))
_Static_assert(HYPER_AT(lr, TCHI_HYPER_LR) && HYPER_AT(beta1, TCHI_HYPER_BETA1) && HYPER_AT(beta2, TCHI_HYPER_BETA2) &&
                   HYPER_AT(eps, TCHI_HYPER_EPS) && HYPER_AT(weight_decay, TCHI_HYPER_DECAY) &&
                   HYPER_AT(momentum, TCHI_HYPER_MOMENTUM) && HYPER_AT(dampening, TCHI_HYPER_DAMPENING),
               "the text finds hyperparameters elsewhere");
_Static_assert(CLOCK_AT(step, TCHI_CLOCK_STEP) && CLOCK_AT(correction1, TCHI_CLOCK_CORRECTION1) &&
                   CLOCK_AT(correction2, TCHI_CLOCK_CORRECTION2),
               "the text finds the clock's numbers elsewhere");

/* --- the text ---------------------------------------------------------------------------------------------------- */

/* What the text is made for. */
typedef struct variant {
    tch_scalar real;
    bool stochastic; /* a parameter may be rounded at random */
    int64_t params;
} variant;

/* What is compiled: the text, and the options that are not in it. */
typedef struct whole_text {
    char *text, *file, *macros;
    const char **options;
    int32_t option_count;
    size_t bytes, file_bytes, macro_bytes, option_bytes;
} whole_text;

/* The user's function between our two texts, his file and lines as they are. */
static int write_text(char *room, size_t size, const tch_kernel_text *text, const whole_text *whole, const variant *v)
{
    return snprintf(
        room, size,
        "#line 1 \"torchium/optim_update.h\"\n"
        "#define TCHI_UPDATE_REAL %s\n#define TCHI_UPDATE_HALVES %d\n#define TCHI_UPDATE_STOCHASTIC %d\n%s%s"
        "%s#line 1 \"%s\"\n%s\n\n#line 1 \"the optimizer's call of the update\"\n#undef TCHI_UPDATE_CALL\n"
        "#define TCHI_UPDATE_CALL %s\n%s",
        v->real == TCH_SCALAR_F64 ? "double" : "float", v->real != TCH_SCALAR_F64, v->stochastic,
        tchi_prelude_optim_list, tchi_prelude_optim_update, whole->macros, whole->file, text->source, text->name,
        tchi_prelude_optim_entry);
}

static tch_status take_parts(const tch_kernel_text *text, whole_text *whole)
{
    whole->file_bytes = tchi_quoted_bytes(text->file);
    whole->macro_bytes = tchi_macro_bytes(text);
    whole->option_bytes = (size_t)text->option_count * sizeof *whole->options;
    TCHI_TRY(tchi_host_take(whole->file_bytes, "the name of a kernel's file", &whole->file));
    TCHI_TRY(tchi_host_take(whole->macro_bytes, "a kernel's macros", &whole->macros));
    return tchi_host_take(whole->option_bytes, "a kernel's options", &whole->options);
}

static tch_status make_text(const tch_kernel_text *text, const variant *v, whole_text *whole)
{
    char none[1];
    TCHI_TRY(take_parts(text, whole));
    tchi_quoted_write(text->file, whole->file);
    tchi_macros_write(text, whole->macros, whole->macro_bytes);
    for (int32_t i = 0; i < text->option_count; i++) {
        if (!tchi_option_is_macro(text->options[i]) || tchi_option_is_for_both(text->options[i])) {
            whole->options[whole->option_count++] = text->options[i];
        }
    }
    whole->bytes = (size_t)write_text(none, sizeof none, text, whole, v) + 1;
    TCHI_TRY(tchi_host_take(whole->bytes, "a kernel's source", &whole->text));
    write_text(whole->text, whole->bytes, text, whole, v);
    return TCH_OK;
}

static void release_text(const whole_text *whole)
{
    tchi_host_release(whole->file, whole->file_bytes);
    tchi_host_release(whole->macros, whole->macro_bytes);
    tchi_host_release((void *)whole->options, whole->option_bytes);
    tchi_host_release(whole->text, whole->bytes);
}

/* --- compiling --------------------------------------------------------------------------------------------------- */

/* The message names the kernel around the function, which its author has never seen; what follows in it is the
 * compiler's. */
static tch_status name_update(tch_status status, const char *name)
{
    char message[sizeof((tchi_user_kernel *)0)->reason];
    snprintf(message, sizeof message, "%s", tch_last_error());
    const char *log = strchr(message, '\n');
    return status != TCH_ERR_INVALID_ARGUMENT || log == NULL
               ? status
               : tchi_fail(status, "the update %.200s does not compile:%s", name, log);
}

static tch_status compile(const tchi_user_kernel_request *request, const variant *v, tch_kernel **kernel)
{
    const tch_kernel_text *text = &request->input->text;
    tch_kernel_config config = *request->asked->kernel;
    whole_text whole = {0};
    tch_status status = make_text(text, v, &whole);
    config.source = whole.text;
    config.path = text->file;
    config.name = "tchi_update_kernel";
    config.option_count = whole.option_count;
    config.options = whole.options;
    config.include_count = text->include_count;
    config.includes = text->includes;
    if (status == TCH_OK) {
        status = name_update(tch_kernel_compile(request->optimizer->context, &config, kernel), text->name);
    }
    release_text(&whole);
    return status;
}

static variant variant_of(const tch_optimizer *o, tch_scalar real)
{
    variant v = {.real = real};
    for (int32_t i = 0; i < o->params.count; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        if (!p->blocked && p->real == real && p->moments == TCH_MOMENTS_REAL) {
            v.stochastic = v.stochastic || tchi_group_at(o, p->group)->config.stochastic_rounding;
            v.params++;
        }
    }
    return v;
}

static tch_status try_groups(const tchi_user_kernel_request *request, tchi_user_kernel *own, tch_scalar real)
{
    for (int32_t i = 0; i < own->groups; i++) {
        TCHI_TRY(tchi_user_kernel_update_probe(request->optimizer, own, i, real, request->input->text.name));
    }
    return TCH_OK;
}

static tch_status make_for(const tchi_user_kernel_request *request, tchi_user_kernel *own, tch_scalar real)
{
    tch_optimizer *o = request->optimizer;
    tch_kernel **kernel = &own->kernel[tchi_user_kernel_index(real)];
    variant v = variant_of(o, real);
    if (v.params == 0) {
        return TCH_OK;
    }
    tch_status status = compile(request, &v, kernel);
    if (status == TCH_OK) {
        status = try_groups(request, own, real);
    }
    *(status == TCH_OK ? &own->served : &own->left) += v.params;
    if (status == TCH_OK) {
        return TCH_OK;
    }
    bool found = tchi_user_kernel_finds(o, own, status);
    tch_kernel_destroy(*kernel);
    *kernel = NULL;
    return found ? TCH_OK : status;
}

/* Parameters whose moments are in less than float32, which the kernel around the user's function does not read. */
static int64_t count_narrow(const tch_optimizer *o)
{
    int64_t count = 0;
    for (int32_t i = 0; i < o->params.count; i++) {
        count += tchi_param_at(o, i)->moments != TCH_MOMENTS_REAL;
    }
    return count;
}

tch_status tchi_user_kernel_update_make(const tchi_user_kernel_request *request, tchi_user_kernel *own)
{
    int64_t narrow = count_narrow(request->optimizer);
    TCHI_TRY(make_for(request, own, TCH_SCALAR_F32));
    TCHI_TRY(make_for(request, own, TCH_SCALAR_F64));
    own->left += narrow;
    if (narrow > 0) {
        tchi_user_kernel_explain(own, "state_dtype keeps moments in less than float32, and the built-in updates those");
    }
    if (own->served == 0) {
        tchi_user_kernel_explain(own, "the optimizer has no parameters that are updated element by element");
    }
    return TCH_OK;
}

/* --- launching --------------------------------------------------------------------------------------------------- */

bool tchi_user_kernel_updates(const tchi_user_kernel *own, int32_t group, tch_scalar real)
{
    return group < own->groups && own->kernel[tchi_user_kernel_index(real)] != NULL;
}

static void pack_shared(const tchi_update_flags *flags, const tch_update *update, tchi_update_list *list)
{
    list->hyper = (const double *)update->hyper;
    list->skip = update->skip;
    list->grad_scale = update->grad_scale;
    list->seed = update->seed;
    list->param_type = (int32_t)update->param_type;
    list->grad_type = (int32_t)update->grad_type;
    list->maximize = update->maximize;
    list->stochastic = update->stochastic;
    list->l2 = flags->l2;
    list->nesterov = flags->nesterov;
    list->amsgrad = flags->amsgrad;
}

static tchi_update_rect pack_rect(const tch_rect *from)
{
    return (tchi_update_rect){
        .param = from->param,
        .master = from->master,
        .grad = from->grad,
        .state = {from->state[0], from->state[1], from->state[2]},
        .clock = (const double *)from->clock,
        .count = from->rows * from->cols,
        .parameter = from->parameter,
    };
}

/* As many parameters from *next on as a launch takes; the number of their chunks. Elementwise rectangles are whole
 * parameters, and dense; no memory holds so many elements that the chunks of a launch would not be counted by 31
 * bits. */
static int64_t pack(const tch_update *update, int64_t *next, tchi_update_list *list)
{
    int64_t chunks = 0;
    list->count = 0;
    for (; *next < update->count && list->count < TCHI_UPDATE_MOST; ++*next) {
        tchi_update_rect rect = pack_rect(&update->rects[*next]);
        list->first_chunk[list->count] = (int32_t)chunks;
        list->rect[list->count++] = rect;
        chunks += (rect.count + TCHI_UPDATE_CHUNK - 1) / TCHI_UPDATE_CHUNK;
    }
    list->first_chunk[list->count] = (int32_t)chunks;
    return chunks;
}

tch_status tchi_user_kernel_update(const tch_optimizer *optimizer, tchi_user_kernel *own, int32_t group,
                                   const tch_update *update)
{
    const tch_backend *t = optimizer->context->backend;
    const tch_kernel *kernel = own->kernel[tchi_user_kernel_index(update->real)];
    tchi_update_list list;
    const void *arguments[] = {&list};
    tchi_update_flags flags = optimizer->method->elementwise->flags(&tchi_group_at(optimizer, group)->config);
    pack_shared(&flags, update, &list);
    for (int64_t next = 0; next < update->count;) {
        tch_kernel_run run = {.grid = {pack(update, &next, &list), 1, 1},
                              .block = {t->host_memory ? 1 : TCHI_UPDATE_THREADS, 1, 1},
                              .arguments = arguments};
        if (run.grid[0] > 0) {
            TCHI_TRY(t->kernel->launch(optimizer->context->state, kernel->handle, &run));
            own->launches++;
        }
    }
    return TCH_OK;
}
