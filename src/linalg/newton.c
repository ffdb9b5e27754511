/* The coupled iteration of docs/numerics/minimax.md: H = q(M), X <- X H, M <- H^p M, until M is the identity. All
 * iterates are polynomials in one symmetric matrix, so every product is symmetric and half of it suffices. */
#include "newton.h"

#include "core/status.h"

#include "algebra.h"

/* The five buffers by the part they play; parts change hands by pointer. */
typedef struct cast {
    tch_matrices *m, *x, *h, *s, *t;
} cast;

static void swap(tch_matrices **a, tch_matrices **b)
{
    tch_matrices *c = *a;
    *a = *b;
    *b = c;
}

/* H = c0 I + c1 M + c2 M^2, with S taking M^2. */
static tch_status make_step(tch_context *context, int degree, const tchi_minimax_step *step, cast *c)
{
    if (degree == 2) {
        TCHI_TRY(tchi_symmetric_product(context, c->m, c->m, c->s));
    }
    return context->backend->combine(context->state, step->c[0], step->c[1], c->m, step->c[2],
                                     degree == 2 ? c->s : NULL, c->h);
}

/* H^root into *power, which is H itself or one of S and T. */
static tch_status raise(tch_context *context, int32_t root, cast *c, tch_matrices **power)
{
    *power = c->h;
    if (root == 1) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_symmetric_product(context, c->h, c->h, c->s));
    *power = c->s;
    if (root == 2) {
        return TCH_OK;
    }
    /* T = H^3 on the way to 3 and 6, H^4 on the way to 4 and 8. */
    TCHI_TRY(tchi_symmetric_product(context, c->s, root % 3 == 0 ? c->h : c->s, c->t));
    *power = c->t;
    if (root == 3 || root == 4) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_symmetric_product(context, c->t, c->t, c->s));
    *power = c->s;
    return TCH_OK;
}

/* M <- H^root M, into whichever buffer is free by then. */
static tch_status update_m(tch_context *context, int32_t root, cast *c)
{
    tch_matrices *power;
    TCHI_TRY(raise(context, root, c, &power));
    tch_matrices **target = power == c->s ? &c->t : &c->s;
    TCHI_TRY(tchi_symmetric_product(context, power, c->m, *target));
    swap(&c->m, target);
    return TCH_OK;
}

static tch_status identity(tch_context *context, const tch_matrices *x)
{
    return context->backend->combine(context->state, 1.0, 0.0, NULL, 0.0, NULL, x);
}

tch_status tchi_newton(tch_context *context, int32_t root, int degree, const tchi_minimax_step *steps, int count,
                       tchi_newton_buffers *b, tch_matrices *result)
{
    cast c = {&b->m[0], &b->m[1], &b->m[2], &b->m[3], &b->m[4]};
    if (count == 0) {
        TCHI_TRY(identity(context, c.x));
    }
    for (int k = 0; k < count; k++) {
        TCHI_TRY(make_step(context, degree, &steps[k], &c));
        if (k == 0) { /* X is the identity: X H is H, and H is still needed */
            TCHI_TRY(context->backend->combine(context->state, 0.0, 1.0, c.h, 0.0, NULL, c.x));
        } else {
            TCHI_TRY(tchi_symmetric_product(context, c.x, c.h, c.t));
            swap(&c.x, &c.t);
        }
        if (k + 1 < count) {
            TCHI_TRY(update_m(context, root, &c));
        }
    }
    *result = *c.x;
    return TCH_OK;
}
