/* Polynomial steps of the coupled inverse-root iteration, and plans made of them. The best q is computed in the form
 * x^(1/p) q(x), which equioscillates between two values over [lo, hi]; only the ratio of the two values matters. It is
 * computed without cancellation, and the scale is applied last. */
#include "minimax.h"

#include <math.h>

enum { MAX_EXCHANGES = 60 };

static const double LEAST_TOLERANCE = 1e-15;

/* Below this relative half-width degree 2 uses a series: the exchange would lose the coefficient of x^2 to cancellation
 * (its error is about 1e-16 over the square of the width), while the series is accurate to 1e-13. */
static const double NARROW = 1e-3;

/* Convergence is quadratic twice over: points that last moved by this much are accurate to its square, and the levelled
 * values to the square of that. Rounding moves points by up to 1e-6 on intervals close to NARROW. */
static const double SETTLED = 1e-4;

static double power(double x, int exponent)
{
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            result *= x;
        }
        x *= x;
    }
    return result;
}

/* Scales q so that the images of the extremal points, x q(x)^p, lie symmetrically around 1, and records their range. */
static void center(int root, const double *points, int count, tchi_minimax_step *step)
{
    const double *c = step->c;
    double least = INFINITY, most = 0.0;
    for (int i = 0; i < count; i++) {
        double x = points[i];
        double g = x * power(c[0] + x * (c[1] + x * (c[2] + x * (c[3] + x * c[4]))), root);
        least = fmin(least, g);
        most = fmax(most, g);
    }
    double gain = 2.0 / (least + most);
    double scale = pow(gain, 1.0 / root);
    for (int i = 0; i < 5; i++) {
        step->c[i] *= scale;
    }
    step->lo = gain * least;
    step->hi = gain * most;
}

/* q = 1 - c x, equal at both ends in x^(1/p) q(x), with its maximum at 1/(c (p + 1)). With L = ln(lo/hi), c hi = (1 -
 * e^(L/p)) / (1 - e^(L (1 + 1/p))), which expm1 computes to full precision for the narrowest interval. */
static void linear_step(int root, double lo, double hi, tchi_minimax_step *step)
{
    double a = 1.0 / root;
    double width = log1p((lo - hi) / hi);
    if (lo < 0.5 * hi) {
        width = log(lo / hi);
    }
    double c = expm1(a * width) / expm1((1.0 + a) * width) / hi;
    step->c[0] = 1.0;
    step->c[1] = -c;
    step->c[2] = step->c[3] = step->c[4] = 0.0;
    double points[3] = {lo, 1.0 / (c * (root + 1)), hi};
    center(root, points, 3, step);
}

/* The quadratic with x^a q(x) = m, 1, m, 1 at the four points z[0..3]; m is determined by existence: the third divided
 * difference of z^(-a) times those values must vanish. Grouped by value, all its terms have one sign. */
static void level(double a, const double *z, double *c)
{
    double v[4], difference[4];
    for (int i = 0; i < 4; i++) {
        double product = 1.0;
        for (int j = 0; j < 4; j++) {
            product *= i == j ? 1.0 : z[i] - z[j];
        }
        v[i] = pow(z[i], -a);
        difference[i] = fabs(v[i] / product);
    }
    v[2] *= (difference[1] + difference[3]) / (difference[0] + difference[2]);
    double first = (v[2] - v[1]) / (z[2] - z[1]);
    double second = ((v[3] - v[2]) / (z[3] - z[2]) - first) / (z[3] - z[1]);
    c[0] = v[1] - z[1] * first + z[1] * z[2] * second;
    c[1] = first - (z[1] + z[2]) * second;
    c[2] = second;
}

/* Moves the two inner points to the extrema of x^a q(x), the roots of a quadratic. Returns the distance moved. */
static double exchange(double a, const double *c, double *z)
{
    double half = -0.5 * (1.0 + a) * c[1], square = (2.0 + a) * c[2];
    double right = (half + sqrt(fmax(0.0, half * half - a * c[0] * square))) / square;
    double left = a * c[0] / (square * right);
    double moved = fmax(fabs(left - z[1]), fabs(right - z[2]));
    z[1] = left;
    z[2] = right;
    return moved;
}

/* The Taylor cubic of z^(-a) around the midpoint, with its cubic term replaced by the best line on the interval. */
static void narrow_quadratic(double a, double middle, double half, double *c)
{
    double r = half / middle, top = pow(middle, -a);
    double slope = -a * (1.0 + 0.125 * (a + 1.0) * (a + 2.0) * r * r) * top / middle;
    double second = 0.5 * a * (a + 1.0) * top / (middle * middle);
    c[0] = top - middle * slope + middle * middle * second;
    c[1] = slope - 2.0 * middle * second;
    c[2] = second;
}

/* Uses z = x/hi on [lo/hi, 1]. A levelled quadratic equioscillates at four points, so it has exactly two extrema
 * inside, and exchanging them for the inner points converges from any start, quadratically. */
static int quadratic_step(int root, double lo, double hi, tchi_minimax_step *step)
{
    double a = 1.0 / root, least = lo / hi, width = (hi - lo) / hi;
    double z[4] = {least, least + 0.25 * width, least + 0.75 * width, 1.0};
    double *c = step->c;
    if (width < 2.0 * NARROW) {
        narrow_quadratic(a, 0.5 * (1.0 + least), 0.5 * width, c);
    } else {
        double moved = width;
        for (int i = 0; i < MAX_EXCHANGES && moved > SETTLED * width; i++) {
            level(a, z, c);
            moved = exchange(a, c, z);
            if (!(least < z[1] && z[1] < z[2] && z[2] < 1.0)) {
                return -1;
            }
        }
        if (moved > SETTLED * width) {
            return -1;
        }
        level(a, z, c);
    }
    c[1] /= hi;
    c[2] /= hi * hi;
    c[3] = c[4] = 0.0;
    for (int i = 0; i < 4; i++) {
        z[i] *= hi;
    }
    center(root, z, 4, step);
    return step->lo > 0.0 ? 0 : -1;
}

/* --- higher degrees ----------------------------------------------------------------------------------------------- */

enum { MOST_DEGREE = 6, MOST_NEWTON = 100 };

/* Coefficients of the polynomial through (x, f): divided differences, then the factors are multiplied out. */
static void interpolate(int count, const double *x, double *f, double *c)
{
    for (int order = 1; order < count; order++) {
        for (int i = count - 1; i >= order; i--) {
            f[i] = (f[i] - f[i - 1]) / (x[i] - x[i - order]);
        }
    }
    for (int i = 0; i < count; i++) {
        c[i] = 0.0;
    }
    for (int i = count - 1; i >= 0; i--) {
        for (int j = count - 1; j > 0; j--) {
            c[j] = c[j - 1] - x[i] * c[j];
        }
        c[0] = f[i] - x[i] * c[0];
    }
}

/* Like level(): x^a q(x) = m, 1, m, 1, ... at count + 1 points, for an odd number of coefficients. */
static void level_all(double a, int count, const double *z, double *c)
{
    double v[MOST_DEGREE + 2], sum[2] = {0.0, 0.0};
    for (int i = 0; i <= count; i++) {
        double product = 1.0;
        for (int j = 0; j <= count; j++) {
            product *= i == j ? 1.0 : z[i] - z[j];
        }
        v[i] = pow(z[i], -a);
        sum[i % 2] += fabs(v[i] / product);
    }
    for (int i = 0; i <= count; i += 2) {
        v[i] *= sum[1] / sum[0];
    }
    interpolate(count, z + 1, v + 1, c);
}

/* The least root above x of a polynomial whose roots are all real and above x: Newton's method converges monotonically.
 * Then deflates the polynomial. */
static double take_root(int degree, double *r, double x)
{
    double step = INFINITY;
    for (int i = 0; i < MOST_NEWTON && fabs(step) > 1e-12 * x; i++) {
        double value = 0.0, slope = 0.0;
        for (int j = degree; j >= 0; j--) {
            slope = slope * x + value;
            value = value * x + r[j];
        }
        step = -value / slope;
        x += step;
    }
    for (int j = degree - 1; j >= 0; j--) {
        r[j] += x * r[j + 1];
    }
    for (int j = 0; j < degree; j++) {
        r[j] = r[j + 1];
    }
    return x;
}

/* Like exchange(): moves the inner points to the extrema of x^a q(x), the roots of a q(x) + x q'(x). */
static double exchange_all(double a, int degree, const double *c, double *z)
{
    double r[MOST_DEGREE + 1], x = 0.0, moved = 0.0;
    for (int j = 0; j <= degree; j++) {
        r[j] = (a + j) * c[j];
    }
    for (int k = 1; k <= degree; k++) {
        x = take_root(degree - k + 1, r, x);
        moved = fmax(moved, fabs(x - z[k]));
        z[k] = x;
    }
    return moved;
}

/* The best q of an even degree on [least, 1] up to scale, and the extremal points of x^a q(x). */
static int best_polynomial(double a, int degree, double least, double *c, double *z)
{
    const double angle = 4.0 * atan(1.0) / (degree + 1);
    double width = 1.0 - least, moved = width;
    if (degree < 2 || degree > MOST_DEGREE) {
        return -1;
    }
    for (int i = 0; i < degree + 2; i++) {
        z[i] = i == 0 ? least : least + 0.5 * width * (1.0 - cos(i * angle));
    }
    for (int i = 0; i < MAX_EXCHANGES && moved > SETTLED * width; i++) {
        level_all(a, degree + 1, z, c);
        moved = exchange_all(a, degree, c, z);
        for (int j = 0; j <= degree; j++) {
            if (!(z[j] < z[j + 1])) {
                return -1;
            }
        }
    }
    level_all(a, degree + 1, z, c);
    return moved > SETTLED * width ? -1 : 0;
}

/* Outside this range rounding dominates: either the coefficients, in the hundreds for q of at most about 1, or the
 * differences between the extrema. */
static const double QUARTIC_FROM = 1e-9, QUARTIC_TO = 0.8;

static int quartic_step(int root, double lo, double hi, tchi_minimax_step *step)
{
    double z[MOST_DEGREE + 2], c[5], scale = 1.0;
    if (!(lo >= QUARTIC_FROM * hi && lo <= QUARTIC_TO * hi) || best_polynomial(1.0 / root, 4, lo / hi, c, z) != 0) {
        return -1;
    }
    for (int i = 0; i < 5; i++) {
        step->c[i] = c[i] * scale;
        scale /= hi;
    }
    for (int i = 0; i < 6; i++) {
        z[i] *= hi;
    }
    center(root, z, 6, step);
    return 0;
}

int tchi_minimax_polynomial(int root, int degree, double lo, double hi, tchi_minimax_step *step)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || (degree != 1 && degree != 2 && degree != 4) || !step) {
        return -1;
    }
    if (!(lo > 0.0 && lo < hi && lo >= TCHI_MINIMAX_LEAST_RATIO * hi && isfinite(hi))) {
        return -1;
    }
    if (degree > 1) {
        return degree == 2 ? quadratic_step(root, lo, hi, step) : quartic_step(root, lo, hi, step);
    }
    linear_step(root, lo, hi, step);
    return 0;
}

/* --- the final polynomial ----------------------------------------------------------------------------------------- */

enum { POINTS = 5, SAMPLES = 40 };

tchi_minimax_quartic tchi_minimax_quartic_of(const double *c)
{
    tchi_minimax_quartic q = {.t2 = c[4], .s1 = c[3] / (2.0 * c[4])};
    q.s0 = (c[2] / c[4] - q.s1 * q.s1) / 2.0;
    q.t1 = c[1] - 2.0 * c[4] * q.s0 * q.s1;
    q.t0 = c[0] - c[4] * q.s0 * q.s0;
    return q;
}

int tchi_minimax_ending(int root, double lo, double hi, tchi_minimax_quartic *q, double *error)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || !(lo > 0.0 && hi - lo > NARROW * hi && isfinite(hi))) {
        return -1;
    }
    const double quarter = atan(1.0);
    double x[POINTS], f[POINTS], c[POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[i] = 0.5 * (lo + hi) + 0.5 * (hi - lo) * cos((2 * i + 1) * 2.0 * quarter / POINTS);
        f[i] = pow(x[i], -1.0 / root);
    }
    interpolate(POINTS, x, f, c);
    *q = tchi_minimax_quartic_of(c);
    *error = 0.0;
    for (int i = 0; i <= SAMPLES; i++) {
        double at = lo + (hi - lo) * i / SAMPLES;
        double s = q->s0 + at * (q->s1 + at);
        *error = fmax(*error, fabs((q->t0 + q->t1 * at + q->t2 * s * s) * pow(at, 1.0 / root) - 1.0));
    }
    return 0;
}

/* From the coefficients in descending order: s u = s^3 + u1 x s + u0 s. */
static tchi_minimax_sextic sextic_of(const double *c)
{
    double lead = c[6];
    tchi_minimax_sextic q = {.t2 = lead, .s1 = c[5] / (3.0 * lead)};
    q.s0 = c[4] / (3.0 * lead) - q.s1 * q.s1;
    q.u1 = c[3] / lead - q.s1 * (q.s1 * q.s1 + 6.0 * q.s0);
    q.u0 = c[2] / lead - 3.0 * q.s0 * (q.s0 + q.s1 * q.s1) - q.s1 * q.u1;
    q.t1 = c[1] - lead * (3.0 * q.s0 * q.s0 * q.s1 + q.s0 * q.u1 + q.s1 * q.u0);
    q.t0 = c[0] - lead * q.s0 * (q.s0 * q.s0 + q.u0);
    return q;
}

/* The range in which this degree is useful; exchanges converge far beyond it. */
static const double SEXTIC_FROM = 1e-3, SEXTIC_TO = 0.75;

int tchi_minimax_longer_ending(int root, double lo, double hi, tchi_minimax_sextic *q, double *error)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || !(lo > 0.0 && isfinite(hi))) {
        return -1;
    }
    double a = 1.0 / root, c[7], z[MOST_DEGREE + 2];
    if (!(lo >= SEXTIC_FROM * hi && lo <= SEXTIC_TO * hi) || best_polynomial(a, 6, lo / hi, c, z) != 0) {
        return -1;
    }
    double value[2] = {0.0, 0.0}; /* x^a q(x) at its extrema, which have two heights */
    for (int i = 0; i < 2; i++) {
        for (int j = 6; j >= 0; j--) {
            value[i] = value[i] * z[i + 1] + c[j];
        }
        value[i] *= pow(z[i + 1], a);
    }
    double scale = 2.0 / (value[0] + value[1]) / pow(hi, a);
    for (int j = 0; j < 7; j++) {
        c[j] *= scale;
        scale /= hi;
    }
    *q = sextic_of(c);
    *error = fabs(value[1] - value[0]) / (value[0] + value[1]);
    return 0;
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

int tchi_minimax_plan(int root, int degree, double lo, double tolerance, tchi_minimax_step *steps)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || degree < 1 || degree > 2 || !steps) {
        return -1;
    }
    if (!(lo >= TCHI_MINIMAX_LEAST_RATIO && lo <= 1.0 && tolerance > 0.0)) {
        return -1;
    }
    double hi = 1.0;
    tolerance = fmax(tolerance, LEAST_TOLERANCE);
    int count = 0;
    /* The largest |m^(1/p) - 1| for m in [lo, hi]. */
    while (fmax(expm1(log(hi) / root), -expm1(log(lo) / root)) > tolerance) {
        if (count == TCHI_MINIMAX_MAX_STEPS || tchi_minimax_polynomial(root, degree, lo, hi, &steps[count]) != 0) {
            return -1;
        }
        lo = steps[count].lo;
        hi = steps[count].hi;
        count++;
    }
    return count;
}
