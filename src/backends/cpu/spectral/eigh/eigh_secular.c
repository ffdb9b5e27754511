/* Solves the secular equation f(x) = 1/rho + sum_i weight_i / (pole_i - x) = 0 for many roots at once: vector lanes are
 * roots, so one pass over the poles serves all of them without horizontal sums. The iteration is Li's (LAPACK working
 * note 89): f is modeled by a constant and the two poles around the root, alternating between keeping the nearer pole's
 * weight ("fixed weight") and matching both slopes ("middle way"), inside a shrinking bracket. */
#include "eigh_secular.h"

#include <math.h>
#include <stdbool.h>

#include "backends/cpu/runtime/vector_clones.h"

enum { LANES = TCHI_SECULAR_LANES, MAX_STEPS = 100, CUT_EVERY = 8 };

typedef struct lanes {
    double origin[LANES], offset[LANES];
    double low[LANES], high[LANES]; /* the bracket of offset */
    double left[LANES], right[LANES];
    double left_weight[LANES], right_weight[LANES];
    double psi[LANES], psi_slope[LANES]; /* the terms of the poles up to the root's own, at origin + offset */
    double phi[LANES], phi_slope[LANES]; /* the terms of the poles above it */
    double last_f[LANES];
    double middle_way[LANES]; /* 1 where the next step is the middle way */
    double done[LANES];
} lanes;

/* Adds the terms of poles [begin, end) to sum and slope. Four poles share a division, which dominates the time. */
VECTOR_INLINE void add_poles(const tchi_secular *s, const lanes *b, int64_t begin, int64_t end, double *restrict sum,
                             double *restrict slope)
{
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
        const double *p = s->pole + i, *w = s->weight + i;
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            double d0 = (p[0] - b->origin[l]) - b->offset[l], d1 = (p[1] - b->origin[l]) - b->offset[l];
            double d2 = (p[2] - b->origin[l]) - b->offset[l], d3 = (p[3] - b->origin[l]) - b->offset[l];
            double d01 = d0 * d1, d23 = d2 * d3, inverse = 1.0 / (d01 * d23);
            double i01 = inverse * d23, i23 = inverse * d01;
            double i0 = i01 * d1, i1 = i01 * d0, i2 = i23 * d3, i3 = i23 * d2;
            double t0 = w[0] * i0, t1 = w[1] * i1, t2 = w[2] * i2, t3 = w[3] * i3;
            sum[l] += (t0 + t1) + (t2 + t3);
            slope[l] += (t0 * i0 + t1 * i1) + (t2 * i2 + t3 * i3);
        }
    }
    for (; i < end; i++) {
        double p = s->pole[i], w = s->weight[i];
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            double inverse = 1.0 / ((p - b->origin[l]) - b->offset[l]), term = w * inverse;
            sum[l] += term;
            slope[l] += term * inverse;
        }
    }
}

/* The poles between the roots of the block. */
VECTOR_INLINE void add_block_poles(const tchi_secular *s, lanes *b, int64_t first, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        double p = s->pole[i], w = s->weight[i], lane = (double)(i - first);
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            double inverse = 1.0 / ((p - b->origin[l]) - b->offset[l]), term = w * inverse;
            double below = lane <= (double)l ? 1.0 : 0.0, above = 1.0 - below;
            b->psi[l] += below * term;
            b->psi_slope[l] += below * (term * inverse);
            b->phi[l] += above * term;
            b->phi_slope[l] += above * (term * inverse);
        }
    }
}

VECTOR_INLINE void evaluate_secular(const tchi_secular *s, lanes *b, int64_t first)
{
    for (int l = 0; l < LANES; l++) {
        b->psi[l] = b->psi_slope[l] = b->phi[l] = b->phi_slope[l] = 0.0;
    }
    int64_t above = first + LANES < s->k ? first + LANES : s->k;
    add_poles(s, b, 0, first + 1, b->psi, b->psi_slope);
    add_block_poles(s, b, first, first + 1, above);
    add_poles(s, b, above, s->k, b->phi, b->phi_slope);
}

/* The root of c x^2 - a x + b between the two poles of the model. */
VECTOR_INLINE double model_root(double a, double b, double c)
{
    double inside = a * a - 4.0 * b * c;
    double root = sqrt(inside > 0.0 ? inside : 0.0);
    double top = a > 0.0 ? 2.0 * b : a - root;
    double bottom = a > 0.0 ? a + root : 2.0 * c;
    return top / bottom;
}

/* Starts in the middle of each interval, where the sign of f tells which pole is nearer. Lanes past the last root
 * repeat it. */
VECTOR_INLINE void place_in_middle(const tchi_secular *s, lanes *b, int64_t first)
{
    for (int l = 0; l < LANES; l++) {
        int64_t j = first + l < s->k ? first + l : s->k - 1;
        b->left[l] = s->pole[j];
        b->right[l] = s->pole[j + 1];
        b->left_weight[l] = s->weight[j];
        b->right_weight[l] = j + 1 < s->k ? s->weight[j + 1] : 0.0;
        b->middle_way[l] = j + 1 < s->k ? 0.0 : 1.0;
        b->done[l] = 0.0;
        b->origin[l] = s->pole[j];
        b->offset[l] = 0.5 * (b->right[l] - b->left[l]);
    }
}

/* The first guess keeps the weights of the two poles around the root and approximates the rest of f by its value in the
 * middle. */
VECTOR_INLINE void guess_roots(const tchi_secular *s, lanes *b)
{
    double constant = 1.0 / s->rho;
#pragma omp simd
    for (int l = 0; l < LANES; l++) {
        double gap = b->right[l] - b->left[l], half = 0.5 * gap;
        double f = constant + b->psi[l] + b->phi[l];
        double from_left = f >= 0.0 || b->right_weight[l] == 0.0 ? 1.0 : 0.0;
        double rest = f + (b->left_weight[l] - b->right_weight[l]) / half;
        double sign = from_left > 0.0 ? 1.0 : -1.0;
        double a = sign * rest * gap + b->left_weight[l] + b->right_weight[l];
        double near = from_left > 0.0 ? b->left_weight[l] : b->right_weight[l];
        double low = from_left > 0.0 ? (f >= 0.0 ? 0.0 : half) : -half;
        double high = from_left > 0.0 ? (f >= 0.0 ? half : gap) : 0.0;
        double x = model_root(a, sign * near * gap, rest);
        b->origin[l] = from_left > 0.0 ? b->left[l] : b->right[l];
        b->low[l] = low;
        b->high[l] = high;
        b->offset[l] = x > low && x < high ? x : 0.5 * (low + high);
        b->last_f[l] = 0.0;
    }
}

/* Bisects the bracket, by exponents if both ends have the same sign: a root may be many orders of magnitude nearer to
 * its pole than the next pole. */
VECTOR_INLINE double inside_bracket(double low, double high)
{
    double product = low * high, mean = sqrt(product > 0.0 ? product : 0.0);
    double signed_mean = low < 0.0 ? -mean : mean;
    return mean > 0.0 ? signed_mean : 0.5 * (low + high);
}

/* The step to the root of a model of f: a constant and the poles left and right of the root, weighted to match f and
 * its slope. One degree of freedom remains, in which the two methods differ. */
VECTOR_INLINE double model_step(const lanes *b, int l, double f, double slope, double middle_way)
{
    double to_left = (b->left[l] - b->origin[l]) - b->offset[l], to_right = (b->right[l] - b->origin[l]) - b->offset[l];
    bool nearer_left = b->left[l] == b->origin[l];
    double near = nearer_left ? to_left : to_right, far = nearer_left ? to_right : to_left;
    double near_weight = nearer_left ? b->left_weight[l] : b->right_weight[l];
    double c_middle = f - to_left * b->psi_slope[l] - to_right * b->phi_slope[l];
    double c_fixed = f - far * slope - (near - far) * (near_weight / (near * near));
    double a = (to_left + to_right) * f - to_left * to_right * slope;
    return model_root(a, to_left * to_right * f, middle_way > 0.0 ? c_middle : c_fixed);
}

/* One step of every unfinished lane; returns whether all are done. If f shrank by less than ten without passing the
 * root the other method is next, and all unfinished lanes bisect if `cut` is 1. Booleans are 1.0, so that lanes stay in
 * vectors. */
VECTOR_INLINE bool improve_roots(const tchi_secular *s, lanes *b, double cut)
{
    double constant = 1.0 / s->rho, all = 1.0;
#pragma omp simd reduction(min : all)
    for (int l = 0; l < LANES; l++) {
        double x = b->offset[l], f = constant + b->psi[l] + b->phi[l], slope = b->psi_slope[l] + b->phi_slope[l];
        double low = f < 0.0 ? x : b->low[l], high = f < 0.0 ? b->high[l] : x;
        double slow = f * b->last_f[l] > 0.1 * b->last_f[l] * b->last_f[l] ? 1.0 : 0.0;
        double middle_way = fabs(b->middle_way[l] - slow);
        double next = x + model_step(b, l, f, slope, middle_way);

        double small = fabs(f) <= s->tolerance * (constant + b->phi[l] - b->psi[l]) ? 1.0 : 0.0;
        double still = fabs(next - x) <= 0x1p-52 * fabs(x) ? 1.0 : 0.0;
        double close = small + still > 0.0 ? 1.0 : 0.0;
        double inside = next > low && next < high ? 1.0 : 0.0;
        double otherwise = close > 0.0 ? x : inside_bracket(low, high);
        double chosen = inside > 0.0 && cut <= close ? next : otherwise;
        double done = b->done[l] > close ? b->done[l] : close;
        b->offset[l] = b->done[l] > 0.0 ? x : chosen;
        b->low[l] = low;
        b->high[l] = high;
        b->last_f[l] = f;
        b->middle_way[l] = middle_way;
        b->done[l] = done;
        all = done < all ? done : all;
    }
    return all > 0.0;
}

VECTOR_CLONES int tchi_secular_roots(const tchi_secular *s, int64_t begin, int64_t end)
{
    int failed = 0;
    for (int64_t first = begin; first < end; first += LANES) {
        lanes b;
        place_in_middle(s, &b, first);
        evaluate_secular(s, &b, first);
        guess_roots(s, &b);
        bool converged = false;
        for (int step = 0; step < MAX_STEPS && !converged; step++) {
            evaluate_secular(s, &b, first);
            converged = improve_roots(s, &b, step % CUT_EVERY == CUT_EVERY - 1 ? 1.0 : 0.0);
        }
        for (int l = 0; l < LANES && first + l < end; l++) {
            s->origin[first + l] = b.origin[l];
            s->offset[first + l] = b.offset[l];
            failed += b.done[l] == 0.0;
        }
    }
    return failed;
}

/* Multiplies product by (pole_i - root_j) / (pole_i - pole_j) for roots j in [begin, end) outside the lanes. */
VECTOR_INLINE void multiply_ratios(const tchi_secular *s, const double *restrict pole, int64_t begin, int64_t end,
                                   double *restrict product)
{
    int64_t j = begin;
    for (; j + 2 <= end; j += 2) {
        double o0 = s->origin[j], x0 = s->offset[j], p0 = s->pole[j];
        double o1 = s->origin[j + 1], x1 = s->offset[j + 1], p1 = s->pole[j + 1];
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            double top = ((pole[l] - o0) - x0) * ((pole[l] - o1) - x1);
            product[l] *= top / ((pole[l] - p0) * (pole[l] - p1));
        }
    }
    for (; j < end; j++) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            product[l] *= ((pole[l] - s->origin[j]) - s->offset[j]) / (pole[l] - s->pole[j]);
        }
    }
}

VECTOR_CLONES void tchi_secular_vector(const tchi_secular *s, int64_t begin, int64_t end, double *z)
{
    for (int64_t first = begin; first < end; first += LANES) {
        int64_t after = first + LANES < s->k ? first + LANES : s->k;
        double pole[LANES], product[LANES];
        for (int l = 0; l < LANES; l++) {
            pole[l] = s->pole[first + l < after ? first + l : after - 1];
            product[l] = 1.0;
        }
        multiply_ratios(s, pole, 0, first, product);
        multiply_ratios(s, pole, after, s->k, product);
        for (int64_t j = first; j < after; j++) {
#pragma omp simd
            for (int l = 0; l < LANES; l++) {
                double top = (pole[l] - s->origin[j]) - s->offset[j], bottom = pole[l] - s->pole[j];
                product[l] *= top / (bottom == 0.0 ? -1.0 : bottom);
            }
        }
        for (int64_t i = first; i < after && i < end; i++) {
            z[i] = sqrt(product[i - first] > 0.0 ? product[i - first] : 0.0);
        }
    }
}

/* The largest eigenvalue is at most the largest pole plus rho, widened to remain a bound when rounded. */
void tchi_secular_prepare(const tchi_secular *s)
{
    double last = s->pole[s->k - 1];
    s->pole[s->k] = last + s->rho * 1.0625 + 0x1p-48 * fabs(last);
}
