/* The list of optimizers. A new one needs an entry here, a number in optim.h, and its file; see
 * docs/adding-an-optimizer.md. */
#include "method.h"

#include <string.h>

#include "config.h"

static const tchi_optim_method *const methods[] = {
    [TCH_OPTIM_SGD] = &tchi_method_sgd,
    [TCH_OPTIM_ADAMW] = &tchi_method_adamw,
    [TCH_OPTIM_SHAMPOO] = &tchi_method_shampoo,
    [TCH_OPTIM_SOAP] = &tchi_method_soap,
    [TCH_OPTIM_MUON] = &tchi_method_muon,
    [TCH_OPTIM_LION] = &tchi_method_lion,
    [TCH_OPTIM_NORMUON] = &tchi_method_normuon, /* muon.c */
    [TCH_OPTIM_KL_SHAMPOO] = &tchi_method_kl_shampoo,
};
#define METHODS ((int32_t)(sizeof methods / sizeof methods[0]))

static const tchi_optim_method *at(int32_t kind)
{
    return kind >= 0 && kind < METHODS ? methods[kind] : NULL;
}

const tchi_optim_method *tchi_method_of(const tch_optim_config *config)
{
    return at((int32_t)config->kind);
}

tch_status tchi_method_check(const char *function, const tch_optim_config *config)
{
    return tchi_method_of(config) != NULL
               ? TCH_OK
               : tchi_config_refuse(function, "kind", (double)config->kind, "one of tch_optim_kind");
}

const char *tch_optim_kind_name(tch_optim_kind kind)
{
    const tchi_optim_method *method = at((int32_t)kind);
    return method == NULL ? NULL : method->name;
}

int32_t tch_optim_kind_parse(const char *name)
{
    for (int32_t i = 0; name != NULL && i < METHODS; i++) {
        if (strcmp(name, methods[i]->name) == 0) {
            return i;
        }
    }
    return -1;
}

tch_optim_config tch_optim_defaults(tch_optim_kind kind)
{
    tch_optim_config c = tchi_config_defaults();
    const tchi_optim_method *method = at((int32_t)kind);
    c.kind = method == NULL ? TCH_OPTIM_SGD : kind;
    if (method != NULL && method->set_defaults != NULL) {
        method->set_defaults(&c);
    }
    return c;
}
