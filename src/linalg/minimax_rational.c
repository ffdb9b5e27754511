/* Sums of poles w/(x + s) for x^(-1/p), by Remez exchange from Zolotarev's solution for p = 2. Recovering poles from
 * values is ill-conditioned (about 1/error), so poles are kept and residuals computed in double-double arithmetic,
 * while the linear systems, which only give corrections, use doubles. Double-double needs strict IEEE arithmetic: never
 * compile this file with -ffast-math. */
#include "minimax.h"

#include <math.h>
#include <stdbool.h>

enum {
    MAX_POLES = TCHI_MINIMAX_MAX_POLES,
    MAX_POINTS = 2 * MAX_POLES + 1,
    MAX_LANDEN = 12,
    MAX_NEWTON = 30,
    MAX_ROUNDS = 8,
    SAMPLES_PER_GAP = 4
};

/* The error left by rounding the poles to doubles. */
static const double ROUNDING = 2e-16;

/* Requests are clamped to these limits, the range in which the method was tested. */
static const double LARGEST_LO = 0.99, LEAST_TOLERANCE = 1e-15, LARGEST_TOLERANCE = 0.5;

static const double PI = 3.14159265358979323846;

/* An unevaluated sum hi + lo with |lo| at most half an ulp of hi. */
typedef struct pair {
    double hi, lo;
} pair;

static pair pair_sum(double a, double b)
{
    double sum = a + b, shadow = sum - a;
    return (pair){sum, (a - (sum - shadow)) + (b - shadow)};
}

static pair pair_product(double a, double b)
{
    double product = a * b;
    return (pair){product, fma(a, b, -product)};
}

static pair pair_add(pair a, pair b)
{
    pair sum = pair_sum(a.hi, b.hi);
    return pair_sum(sum.hi, sum.lo + (a.lo + b.lo));
}

static pair pair_multiply(pair a, pair b)
{
    pair product = pair_product(a.hi, b.hi);
    return pair_sum(product.hi, product.lo + (a.hi * b.lo + a.lo * b.hi));
}

static pair pair_divide(pair a, pair b)
{
    double quotient = a.hi / b.hi;
    pair product = pair_product(quotient, b.hi);
    double rest = ((a.hi - product.hi) - product.lo) + (a.lo - quotient * b.lo);
    return pair_sum(quotient, rest / b.hi);
}

/* x^(1/root): one Newton step on y^root = x from the double result doubles its accuracy. */
static pair pair_root(double x, int root)
{
    double y = pow(x, 1.0 / root);
    pair power = {y, 0.0};
    for (int i = 1; i < root; i++) {
        power = pair_multiply(power, (pair){y, 0.0});
    }
    double rest = (x - power.hi) - power.lo;
    return pair_sum(y, y * rest / (root * x));
}

/* The state of the exchange: the sum of poles, and 2 poles + 1 points at which its relative error should alternate. */
typedef struct fit {
    int root, poles, points;
    pair shift[MAX_POLES], weight[MAX_POLES];
    double x[MAX_POINTS];
    pair x_root[MAX_POINTS];
    double level; /* the error at the first point; its sign alternates from there */
} fit;

/* Landen's sequence of arithmetic and geometric means for the modulus with complement sqrt(lo). */
typedef struct landen {
    int depth;
    double ratio[MAX_LANDEN];
    double mean;
} landen;

static landen landen_start(double complement)
{
    landen chain = {.depth = 0};
    double a = 1.0, b = complement;
    while (chain.depth < MAX_LANDEN && a - b > 1e-15 * a) {
        double mean = 0.5 * (a + b);
        chain.ratio[chain.depth++] = 0.5 * (a - b) / mean;
        b = sqrt(a * b);
        a = mean;
    }
    chain.mean = a;
    return chain;
}

/* sn/cn at `fraction` of the quarter period, for fractions up to 1/2. */
static double elliptic_tangent(const landen *chain, double fraction)
{
    double phase = ldexp(0.5 * PI * fraction, chain->depth);
    for (int i = chain->depth - 1; i >= 0; i--) {
        phase = 0.5 * (phase + asin(chain->ratio[i] * sin(phase)));
    }
    return tan(phase);
}

/* lo (sn/cn)^2, which covers (0, infinity) as the fraction of the quarter period covers (0, 1), symmetrically about
 * sqrt(lo). Zolotarev's poles are on this curve, and his extrema are lo (1 + s)/(lo + s) on it. */
static double zolotarev_curve(const landen *chain, double lo, double fraction)
{
    double tangent = elliptic_tangent(chain, fmin(fraction, 1.0 - fraction));
    double s = lo * tangent * tangent;
    return fraction <= 0.5 ? s : lo / s;
}

static void set_point(fit *f, int i, double x)
{
    f->x[i] = x;
    f->x_root[i] = pair_root(x, f->root);
}

/* Zolotarev's solution for root 2 is the midpoint rule along the curve for x^(-a) = sin(pi a)/pi times the integral of
 * s^(-a)/(x + s) over s > 0. Other roots use the same extrema, with the poles shifted along the curve by the phase of
 * the error of a midpoint rule on the whole line: close enough for Newton at every root and interval. */
static void start_fit(fit *f, int root, int poles, double lo)
{
    landen chain = landen_start(sqrt(lo));
    double a = 1.0 / root, offset = 0.25 - 0.5 * a;
    double quarter = 0.5 * PI / chain.mean;
    f->root = root;
    f->poles = poles;
    f->points = 2 * poles + 1;
    for (int j = 0; j < poles; j++) {
        double s = zolotarev_curve(&chain, lo, (j + 0.5 + offset) / poles);
        double density = 2.0 * sqrt(s * (1.0 + s) * (lo + s)) * quarter / poles;
        f->shift[j] = (pair){s, 0.0};
        f->weight[j] = (pair){sin(PI * a) / PI * pow(s, -a) * density, 0.0};
    }
    set_point(f, 0, lo);
    for (int i = 1; i < f->points - 1; i++) {
        double s = zolotarev_curve(&chain, lo, 1.0 - (double)i / (2 * poles));
        set_point(f, i, lo * (1.0 + s) / (lo + s));
    }
    set_point(f, f->points - 1, 1.0);
}

/* The relative error of the sum at x, given the root of x. */
static double error_at(const fit *f, double x, pair x_root)
{
    pair sum = {0.0, 0.0};
    for (int j = 0; j < f->poles; j++) {
        sum = pair_add(sum, pair_divide(f->weight[j], pair_add((pair){x, 0.0}, f->shift[j])));
    }
    pair ratio = pair_multiply(sum, x_root);
    return (ratio.hi - 1.0) + ratio.lo;
}

static double largest_residual(const fit *f, const double *errors)
{
    double largest = 0.0;
    for (int i = 0; i < f->points; i++) {
        largest = fmax(largest, fabs(errors[i] - (i % 2 ? -f->level : f->level)));
    }
    return largest;
}

static void measure_errors(const fit *f, double *errors)
{
    for (int i = 0; i < f->points; i++) {
        errors[i] = error_at(f, f->x[i], f->x_root[i]);
    }
}

/* Gaussian elimination with row pivoting; column n of the n rows is the right-hand side and receives the solution. */
static bool solve(int n, double rows[][MAX_POINTS + 1])
{
    for (int k = 0; k < n; k++) {
        int pivot = k;
        for (int i = k + 1; i < n; i++) {
            if (fabs(rows[i][k]) > fabs(rows[pivot][k])) {
                pivot = i;
            }
        }
        if (!(fabs(rows[pivot][k]) > 0.0)) {
            return false;
        }
        for (int j = k; j <= n && pivot != k; j++) {
            double kept = rows[k][j];
            rows[k][j] = rows[pivot][j];
            rows[pivot][j] = kept;
        }
        for (int i = k + 1; i < n; i++) {
            double factor = rows[i][k] / rows[k][k];
            for (int j = k + 1; j <= n; j++) {
                rows[i][j] -= factor * rows[k][j];
            }
        }
    }
    for (int k = n - 1; k >= 0; k--) {
        for (int j = k + 1; j < n; j++) {
            rows[k][n] -= rows[k][j] * rows[j][n];
        }
        rows[k][n] /= rows[k][k];
    }
    return true;
}

/* The equations error(x[i]) = (-1)^i level, linearized in the logarithms of shifts, of weights, and in the level. */
static void assemble(const fit *f, const double *errors, double rows[][MAX_POINTS + 1])
{
    int k = f->poles, n = f->points;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < k; j++) {
            double inverse = 1.0 / (f->x[i] + f->shift[j].hi);
            double term = f->x_root[i].hi * f->weight[j].hi * inverse;
            rows[i][j] = -term * f->shift[j].hi * inverse;
            rows[i][k + j] = term;
        }
        rows[i][n - 1] = i % 2 ? 1.0 : -1.0;
        rows[i][n] = -errors[i];
    }
}

/* Shortens a step that would change a logarithm by more than 1; only the first ones for large roots do. */
static bool newton_step(fit *f, const double *errors)
{
    double rows[MAX_POINTS][MAX_POINTS + 1] = {{0.0}}, longest = 1.0;
    int k = f->poles, n = f->points;
    assemble(f, errors, rows);
    if (!solve(n, rows)) {
        return false;
    }
    for (int i = 0; i < n - 1; i++) {
        longest = fmax(longest, fabs(rows[i][n]));
    }
    for (int j = 0; j < k; j++) {
        f->shift[j] = pair_multiply(f->shift[j], pair_sum(1.0, expm1(rows[j][n] / longest)));
        f->weight[j] = pair_multiply(f->weight[j], pair_sum(1.0, expm1(rows[k + j][n] / longest)));
    }
    f->level = rows[n - 1][n];
    return isfinite(longest) && isfinite(f->level);
}

/* Makes the errors at the current points alternate with equal size, to within a hundredth; the exchange does the
 * rest. */
static bool level_errors(fit *f)
{
    double errors[MAX_POINTS];
    measure_errors(f, errors);
    for (int i = 0; i < MAX_NEWTON; i++) {
        if (!newton_step(f, errors)) {
            return false;
        }
        measure_errors(f, errors);
        if (largest_residual(f, errors) <= fmax(0.01 * fabs(f->level), ROUNDING)) {
            return true;
        }
    }
    return false;
}

/* The extremum of the error near x[at], by Newton on its derivative in ln x. Doubles suffice: an error in the position
 * has a second-order effect. */
static double find_extremum(const fit *f, int at, double sign)
{
    double a = 1.0 / f->root, x = f->x[at];
    double left = sqrt(x * f->x[at - 1]), right = sqrt(x * f->x[at + 1]);
    for (int step = 0; step < 4; step++) {
        double x_root = pow(x, a), slope = 0.0, curvature = 0.0;
        for (int j = 0; j < f->poles; j++) {
            double share = x / (x + f->shift[j].hi), term = x_root * f->weight[j].hi / (x + f->shift[j].hi);
            slope += term * (a - share);
            curvature += term * ((a - share) * (a - share) - share * (1.0 - share));
        }
        double uphill = slope * sign > 0.0 ? right : left;
        double next = curvature * sign < 0.0 ? x * exp(-slope / curvature) : uphill;
        next = fmin(fmax(next, left), right);
        if (fabs(next - x) <= 1e-6 * (right - left)) {
            break;
        }
        x = next;
    }
    return x;
}

static void exchange_points(fit *f)
{
    double moved[MAX_POINTS];
    for (int i = 1; i < f->points - 1; i++) {
        moved[i] = find_extremum(f, i, i % 2 ? -f->level : f->level);
    }
    for (int i = 1; i < f->points - 1; i++) {
        set_point(f, i, moved[i]);
    }
}

/* The relative difference between the largest and the smallest error at the points, which bracket the optimum. */
static double unevenness(const fit *f)
{
    double errors[MAX_POINTS], least = INFINITY, most = 0.0;
    measure_errors(f, errors);
    for (int i = 0; i < f->points; i++) {
        least = fmin(least, fabs(errors[i]));
        most = fmax(most, fabs(errors[i]));
    }
    return most / least - 1.0;
}

/* The largest error over the points and some points between them. */
static double measured_error(const fit *f)
{
    double worst = 0.0;
    for (int i = 0; i + 1 < f->points; i++) {
        double ratio = f->x[i + 1] / f->x[i];
        for (int j = 0; j <= SAMPLES_PER_GAP; j++) {
            double x = j == SAMPLES_PER_GAP ? f->x[i + 1] : f->x[i] * pow(ratio, (double)j / SAMPLES_PER_GAP);
            worst = fmax(worst, fabs(error_at(f, x, pair_root(x, f->root))));
        }
    }
    return worst;
}

/* The best sum of this many poles, rounded to doubles, and its error; infinity if the iteration failed. */
static double best_fit(fit *f, int root, int poles, double lo)
{
    start_fit(f, root, poles, lo);
    bool even = false;
    for (int round = 0; round < MAX_ROUNDS && !even; round++) {
        if (!level_errors(f)) {
            return INFINITY;
        }
        if (fabs(f->level) < 100.0 * ROUNDING) {
            break;
        }
        exchange_points(f);
        even = unevenness(f) < 1e-6;
    }
    for (int j = 0; j < poles; j++) {
        f->shift[j].lo = 0.0;
        f->weight[j].lo = 0.0;
    }
    return measured_error(f);
}

/* The error decreases with the number k of poles like 4 sin(pi/p) exp(-rate k), rate = 2 pi K'/K for the elliptic
 * modulus sqrt(1 - lo). Below 1/2 it was measured at 0.93 to 1.4 times this, over all roots and intervals. */
static double decay_rate(double lo)
{
    return 2.0 * PI * landen_start(sqrt(lo)).mean / landen_start(sqrt(1.0 - lo)).mean;
}

/* If the best sum exceeds double precision, its system is singular to working precision; the best sum for a slightly
 * longer interval can be found and is as accurate as rounding allows. */
static double widen_interval(int root, int poles, double lo)
{
    while (4.0 * sin(PI / root) * exp(-decay_rate(lo) * poles) < 2.0 * ROUNDING) {
        lo = pow(lo, 1.02);
    }
    return lo;
}

/* Finds the best sum of this many poles and stores it if it beats the current one; returns the pole count of the
 * better. */
static int improve(int root, int poles, double lo, int best, double *shifts, double *weights, double *error)
{
    fit f;
    double reached = best_fit(&f, root, poles, widen_interval(root, poles, lo));
    if (!(reached < *error)) {
        return best;
    }
    *error = reached;
    for (int j = 0; j < poles; j++) {
        shifts[j] = f.shift[j].hi;
        weights[j] = f.weight[j].hi;
    }
    return poles;
}

int tchi_minimax_poles(int root, double lo, double tolerance, double *shifts, double *weights, double *error)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || !shifts || !weights || !error) {
        return -1;
    }
    if (!(lo >= TCHI_MINIMAX_LEAST_RATIO && lo < 1.0 && tolerance > 0.0)) {
        return -1;
    }
    if (root == 1) {
        shifts[0] = 0.0;
        weights[0] = 1.0;
        *error = 0.0;
        return 1;
    }
    lo = fmin(lo, LARGEST_LO);
    tolerance = fmin(fmax(tolerance, LEAST_TOLERANCE), LARGEST_TOLERANCE);
    double fewest = ceil(log(0.9 * 4.0 * sin(PI / root) / tolerance) / decay_rate(lo));
    int first = (int)fmin(fmax(fewest, 1.0), MAX_POLES);
    *error = INFINITY;
    int best = improve(root, first, lo, -1, shifts, weights, error);
    if (*error > tolerance && first < MAX_POLES) {
        best = improve(root, first + 1, lo, best, shifts, weights, error);
    }
    return best;
}
