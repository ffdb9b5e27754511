/* The derivative of a matrix power over a damped spectrum, used by `divided_differences` of every device. C and CUDA C
 * include this file; functions here use only <math.h>. */
#ifndef TCHI_LOEWNER_H
#define TCHI_LOEWNER_H

#include <math.h>

#include <torchium/backend.h>

#ifdef __CUDACC__
#define TCHI_LOEWNER static __device__ inline
#else
#define TCHI_LOEWNER static inline
#endif

/* Eigenvalues this close to the largest, relative to it, are equal to it: float64's rounding with room to spare. */
#define TCHI_LOEWNER_EQUAL 1e-12

typedef struct tchi_spectrum {
    double largest; /* or 0, where that is negative */
    double added;   /* the damping */
    int relative;   /* the damping follows the largest eigenvalue */
} tchi_spectrum;

/* A damped eigenvalue, and the point where the function is evaluated: they differ where the function is flat. */
typedef struct tchi_damped {
    double base, place;
} tchi_damped;

TCHI_LOEWNER tchi_spectrum tchi_spectrum_of(const tch_spectrum_map *map, double last)
{
    tchi_spectrum s;
    s.largest = fmax(last, 0.0);
    s.relative = map->relative_eps * s.largest > map->eps;
    s.added = s.relative ? map->relative_eps * s.largest : map->eps;
    return s;
}

/* Negative within rounding counts as zero: a low-rank matrix has such eigenvalues of either sign, and its gradient
 * would consist of their signs. */
TCHI_LOEWNER tchi_damped tchi_damp(const tch_spectrum_map *map, const tchi_spectrum *s, double w)
{
    tchi_damped d;
    d.base = d.place = w + s->added;
    if (!(d.base > (map->clamp ? s->added : 0.0))) {
        d.place = s->added;
        d.base = w >= -map->negative * s->largest ? s->added : d.base;
    }
    return d;
}

/* (x^power - y^power) / (x - y), or the derivative at x = y, for x, y >= 0. Expanded from the larger power, x^power -
 * y^power = y^power (exp(power log(x/y)) - 1), without cancellation. */
TCHI_LOEWNER double tchi_power_slope(double power, double x, double y)
{
    if (power == 0.0) {
        return 0.0;
    }
    if (x == y) {
        return power * pow(x, power - 1.0);
    }
    double from = power > 0.0 ? fmax(x, y) : fmin(x, y);
    double to = power > 0.0 ? fmin(x, y) : fmax(x, y);
    double apart = (to - from) / from;
    double ratio = fabs(apart) < 0.5 ? log1p(apart) : log(to / from);
    return pow(from, power - 1.0) * (expm1(power * ratio) / apart);
}

TCHI_LOEWNER double tchi_divided_difference(double power, tchi_damped p, tchi_damped q)
{
    double slope = tchi_power_slope(power, p.place, q.place);
    if (p.base == p.place && q.base == q.place) {
        return slope;
    }
    return p.place == q.place ? 0.0 : slope * ((p.place - q.place) / (p.base - q.base));
}

#endif
