/* See update_reference.h. A size grows by every term that is added, and passes through a quotient by the rule of
 * differentials, so that it bounds the errors of the intermediate results as well. */
#include "update_reference.h"

#include <math.h>
#include <string.h>

typedef struct number {
    double value, size;
} number;

static number plus(number a, number b)
{
    return (number){a.value + b.value, a.size + b.size};
}

static number times(double factor, number a)
{
    return (number){factor * a.value, fabs(factor) * a.size};
}

static number squared(number a)
{
    return (number){a.value * a.value, a.size * a.size};
}

static number get(const ref_element *e, ref_field field)
{
    return (number){e->value[field], fabs(e->value[field])};
}

static void put(ref_element *e, ref_field field, number x)
{
    e->value[field] = x.value;
    e->size[field] = x.size;
    e->written[field] = true;
}

/* x / (sqrt(v / correction) + eps) */
static number whitened(number x, number v, double correction, double eps)
{
    double root = sqrt(v.value / correction);
    double below = root + eps;
    double root_size = root + eps + (v.value > 0 ? v.size / (2.0 * sqrt(v.value * correction)) : 0.0);
    return (number){x.value / below, x.size / below + fabs(x.value) * root_size / (below * below)};
}

static number gradient(const ref_setting *s, const ref_element *e, bool decayed)
{
    number g = times((s->maximize ? -1.0 : 1.0) / s->grad_scale, get(e, REF_GRAD));
    return decayed ? plus(g, times(s->hyper.weight_decay, get(e, REF_PARAM))) : g;
}

void ref_adamw(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    number g = gradient(s, e, s->l2);
    number p = s->l2 ? get(e, REF_PARAM) : times(1.0 - h->lr * h->weight_decay, get(e, REF_PARAM));
    number m = plus(times(h->beta1, get(e, REF_STATE_0)), times(1.0 - h->beta1, g));
    number v = plus(times(h->beta2, get(e, REF_STATE_1)), times(1.0 - h->beta2, squared(g)));
    put(e, REF_STATE_0, m);
    put(e, REF_STATE_1, v);
    if (s->amsgrad) {
        number so_far = get(e, REF_STATE_2);
        v = (number){fmax(v.value, so_far.value), fmax(v.size, so_far.size)};
        put(e, REF_STATE_2, v);
    }
    number d = whitened(m, v, s->clock.correction2, h->eps);
    put(e, REF_PARAM, plus(p, times(-h->lr * s->factor / s->clock.correction1, d)));
}

void ref_sgd(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    number d = gradient(s, e, true);
    if (h->momentum != 0 && s->has[REF_STATE_0]) {
        number g = d;
        number buffer =
            s->clock.step == 1 ? g : plus(times(h->momentum, get(e, REF_STATE_0)), times(1.0 - h->dampening, g));
        put(e, REF_STATE_0, buffer);
        d = s->nesterov ? plus(g, times(h->momentum, buffer)) : buffer;
    }
    put(e, REF_PARAM, plus(get(e, REF_PARAM), times(-h->lr * s->factor, d)));
}

/* Where the sum c is no more than its own rounding its sign may be any, and p may be off by two steps. */
void ref_lion(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    number g = gradient(s, e, false);
    number c = plus(times(h->beta1, get(e, REF_STATE_0)), times(1.0 - h->beta1, g));
    bool open = fabs(c.value) <= 8.0 * s->roundoff * c.size;
    number sign = {(double)((c.value > 0) - (c.value < 0)), open ? 2.0 / s->roundoff : 1.0};
    number p = times(1.0 - h->lr * h->weight_decay, get(e, REF_PARAM));
    put(e, REF_PARAM, plus(p, times(-h->lr * s->factor, sign)));
    put(e, REF_STATE_0, plus(times(h->beta2, get(e, REF_STATE_0)), times(1.0 - h->beta2, g)));
}

void ref_gather(const ref_setting *s, ref_element *e)
{
    double beta1 = s->hyper.beta1;
    number g = gradient(s, e, s->l2);
    if (s->has[REF_BLOCK_0]) {
        put(e, REF_BLOCK_0, g);
    }
    if (s->filter == TCH_FILTER_NONE) {
        return;
    }
    number m = plus(times(beta1, get(e, REF_STATE_0)), times(1.0 - beta1, g));
    put(e, REF_STATE_0, m);
    if (s->has[REF_BLOCK_1]) {
        put(e, REF_BLOCK_1,
            s->filter == TCH_FILTER_EMA ? times(1.0 / s->clock.correction1, m)
                                        : plus(times(beta1, m), times(1.0 - beta1, g)));
    }
}

void ref_gather_skipped(const ref_setting *s, ref_element *e)
{
    number zero = {0, 0};
    if (s->has[REF_BLOCK_0]) {
        put(e, REF_BLOCK_0, zero);
    }
    if (s->filter != TCH_FILTER_NONE && s->has[REF_BLOCK_1]) {
        put(e, REF_BLOCK_1, zero);
    }
}

void ref_graft(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    ref_field which = s->has[REF_BLOCK_1] ? REF_BLOCK_1 : REF_BLOCK_0;
    number g2 = squared(get(e, REF_BLOCK_0));
    number v = get(e, REF_STATE_1);
    number d = get(e, which);
    if (s->graft >= TCH_GRAFT_ADAGRAD) {
        v = s->graft == TCH_GRAFT_ADAGRAD ? plus(v, g2)
                                          : plus(times(h->graft_beta2, v), times(1.0 - h->graft_beta2, g2));
        put(e, REF_STATE_1, v);
        d = whitened(d, v, s->graft == TCH_GRAFT_ADAM ? s->clock.graft : 1.0, h->graft_eps);
    }
    if (s->replace) {
        put(e, which, d);
    }
    e->direction = d.value;
    e->direction_size = d.size;
}

void ref_gather_graft(const ref_setting *s, ref_element *e)
{
    ref_gather(s, e);
    ref_graft(s, e);
}

void ref_rotated_adam(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    number v = plus(times(h->beta2, get(e, REF_STATE_1)), times(1.0 - h->beta2, squared(get(e, REF_BLOCK_0))));
    put(e, REF_STATE_1, v);
    put(e, REF_BLOCK_1,
        times(sqrt(s->clock.correction2) / s->clock.correction1, whitened(get(e, REF_BLOCK_1), v, 1.0, h->eps)));
}

void ref_apply(const ref_setting *s, ref_element *e)
{
    const tch_hyper *h = &s->hyper;
    number d = times(s->block_scale, get(e, s->has[REF_BLOCK_1] ? REF_BLOCK_1 : REF_BLOCK_0));
    if (h->momentum != 0 && s->has[REF_STATE_2]) {
        number buffer = plus(times(h->momentum, get(e, REF_STATE_2)), d);
        put(e, REF_STATE_2, buffer);
        d = s->nesterov ? plus(d, times(h->momentum, buffer)) : buffer;
    }
    number p = times(s->decay ? 1.0 - h->lr * h->weight_decay : 1.0, get(e, REF_PARAM));
    put(e, REF_PARAM, plus(p, times(-h->lr * s->factor, d)));
}

void ref_unscale(const ref_setting *s, ref_element *e)
{
    put(e, REF_GRAD, times(1.0 / s->grad_scale, get(e, REF_GRAD)));
}

void ref_nothing(const ref_setting *s, ref_element *e)
{
    (void)s;
    (void)e;
}

/* --- clocks ------------------------------------------------------------------------------------------------------ */

void ref_advance(tch_clock *clock, const tch_hyper *h, bool skip, bool correct, tch_factor_rule rule)
{
    double step = clock->step + (skip ? 0 : 1);
    double ema = 1.0 - h->beta2;
    double corrected = ema / (1.0 - pow(h->beta2, step));
    double weight = rule == TCH_FACTOR_SUM ? 1.0 : rule == TCH_FACTOR_EMA ? ema : corrected;
    double rest = rule == TCH_FACTOR_SUM ? 1.0 : 1.0 - weight;
    clock->step = step;
    clock->correction1 = correct ? 1.0 - pow(h->beta1, step) : 1.0;
    clock->correction2 = correct ? 1.0 - pow(h->beta2, step) : 1.0;
    clock->graft = 1.0 - pow(h->graft_beta2, step);
    clock->factor[0] = skip ? 0.0 : weight;
    clock->factor[1] = skip ? 1.0 : rest;
    clock->narrow[0] = (float)clock->factor[0];
    clock->narrow[1] = (float)clock->factor[1];
}

/* --- stochastic rounding ----------------------------------------------------------------------------------------- */

void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t k0 = key[0];
    uint32_t k1 = key[1];
    memcpy(out, counter, 4 * sizeof *out);
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * out[0];
        uint64_t b = 0xCD9E8D57ull * out[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ out[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ out[3] ^ k1,
                            (uint32_t)a};
        memcpy(out, next, sizeof next);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

uint16_t ref_round_at_random(float value, uint64_t seed, uint32_t step, uint32_t parameter, uint64_t element)
{
    uint32_t counter[4] = {(uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), parameter, step};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    uint32_t bits;
    ref_philox(counter, key, words);
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + (words[element % 4] & 0xFFFFu)) >> 16);
}
