/* Polynomial steps of the coupled inverse-root iteration, and plans made of them. Before changing anything, know that
 * the best q is found in the form x^(1/p) q(x), which alternates between two values over [lo, hi], and that only the
 * ratio of the two values matters: it is computed without cancellation, the scale is put in last. */
#include "minimax.h"

#include <math.h>

enum { MAX_EXCHANGES = 60 };

static const double LEAST_TOLERANCE = 1e-15;

/* Below this relative half-width degree 2 is taken from a series: the exchange would lose the coefficient of x^2 to
 * cancellation (its error is about 1e-16 over the square of the width), the series is then good to 1e-13. */
static const double NARROW = 1e-3;

/* Convergence is quadratic twice over: points that last moved by this much are good to its square, and the levelled
 * values to the square of that. Rounding moves them by up to 1e-6 where the interval is almost narrow. */
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

/* x q(x)^p: what the step makes of an eigenvalue x of M. */
static double image(const double *c, int root, double x)
{
    return x * power(c[0] + x * (c[1] + x * c[2]), root);
}

/* Scales q so that the images of the extremal points lie symmetrically around 1, and records their range. */
static void center(int root, const double *points, int count, tchi_minimax_step *step)
{
    double least = INFINITY, most = 0.0;
    for (int i = 0; i < count; i++) {
        double g = image(step->c, root, points[i]);
        least = fmin(least, g);
        most = fmax(most, g);
    }
    double gain = 2.0 / (least + most);
    double scale = pow(gain, 1.0 / root);
    for (int i = 0; i < 3; i++) {
        step->c[i] *= scale;
    }
    step->lo = gain * least;
    step->hi = gain * most;
}

/* q = 1 - c x, equal at both ends in x^(1/p) q(x); its maximum lies at 1/(c (p + 1)). With L = ln(lo/hi),
 * c hi = (1 - e^(L/p)) / (1 - e^(L (1 + 1/p))), which expm1 gives to full precision for the narrowest interval. */
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
    step->c[2] = 0.0;
    double points[3] = {lo, 1.0 / (c * (root + 1)), hi};
    center(root, points, 3, step);
}

/* The quadratic with x^a q(x) = m, 1, m, 1 at the four points z[0..3], m chosen so that there is one. The third divided
 * difference of z^(-a) times those values must vanish; grouped by value all its terms have one sign. */
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

/* Moves the two inner points to the extrema of x^a q(x), the roots of a quadratic. Returns how far they went. */
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

/* Taylor's cubic of z^(-a) around the middle, with the line that is best on the interval for its cubic term. */
static void narrow_quadratic(double a, double middle, double half, double *c)
{
    double r = half / middle, top = pow(middle, -a);
    double slope = -a * (1.0 + 0.125 * (a + 1.0) * (a + 2.0) * r * r) * top / middle;
    double second = 0.5 * a * (a + 1.0) * top / (middle * middle);
    c[0] = top - middle * slope + middle * middle * second;
    c[1] = slope - 2.0 * middle * second;
    c[2] = second;
}

/* Works on z = x/hi, whose interval is [lo/hi, 1]. A levelled quadratic alternates at four points, so it has exactly
 * two extrema inside, and exchanging them for the inner points converges from any start, quadratically. */
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
    for (int i = 0; i < 4; i++) {
        z[i] *= hi;
    }
    center(root, z, 4, step);
    return step->lo > 0.0 ? 0 : -1;
}

int tchi_minimax_polynomial(int root, int degree, double lo, double hi, tchi_minimax_step *step)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || degree < 1 || degree > 2 || !step) {
        return -1;
    }
    if (!(lo > 0.0 && lo < hi && lo >= TCHI_MINIMAX_LEAST_RATIO * hi && isfinite(hi))) {
        return -1;
    }
    if (degree == 2) {
        return quadratic_step(root, lo, hi, step);
    }
    linear_step(root, lo, hi, step);
    return 0;
}

/* --- the ending --------------------------------------------------------------------------------------------------- */

enum { POINTS = 5, SAMPLES = 40 };

/* Coefficients of the polynomial with the values f at the points x: divided differences, then one factor after the
 * other multiplied out. */
static void interpolate(const double *x, double *f, double *c)
{
    for (int order = 1; order < POINTS; order++) {
        for (int i = POINTS - 1; i >= order; i--) {
            f[i] = (f[i] - f[i - 1]) / (x[i] - x[i - order]);
        }
    }
    for (int i = 0; i < POINTS; i++) {
        c[i] = 0.0;
    }
    for (int i = POINTS - 1; i >= 0; i--) {
        for (int j = POINTS - 1; j > 0; j--) {
            c[j] = c[j - 1] - x[i] * c[j];
        }
        c[0] = f[i] - x[i] * c[0];
    }
}

static double quartic_error(int root, const tchi_minimax_quartic *q, double x)
{
    double s = q->s0 + x * (q->s1 + x);
    return fabs((q->t0 + q->t1 * x + q->t2 * s * s) * pow(x, 1.0 / root) - 1.0);
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
    interpolate(x, f, c);
    q->t2 = c[4];
    q->s1 = c[3] / (2.0 * c[4]);
    q->s0 = (c[2] / c[4] - q->s1 * q->s1) / 2.0;
    q->t1 = c[1] - 2.0 * c[4] * q->s0 * q->s1;
    q->t0 = c[0] - c[4] * q->s0 * q->s0;
    *error = 0.0;
    for (int i = 0; i <= SAMPLES; i++) {
        *error = fmax(*error, quartic_error(root, q, lo + (hi - lo) * i / SAMPLES));
    }
    return 0;
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

/* The largest |m^(1/p) - 1| for m in [lo, hi]. */
static double root_error(int root, double lo, double hi)
{
    return fmax(expm1(log(hi) / root), -expm1(log(lo) / root));
}

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
    while (root_error(root, lo, hi) > tolerance) {
        if (count == TCHI_MINIMAX_MAX_STEPS || tchi_minimax_polynomial(root, degree, lo, hi, &steps[count]) != 0) {
            return -1;
        }
        lo = steps[count].lo;
        hi = steps[count].hi;
        count++;
    }
    return count;
}

/* Products in H^p by squaring and multiplying. */
static int power_products(int exponent)
{
    int products = 0;
    for (; exponent > 1; exponent >>= 1) {
        products += 1 + (exponent & 1);
    }
    return products;
}

int tchi_minimax_plan_products(int root, int degree, int steps)
{
    if (root < 1 || root > TCHI_MINIMAX_MAX_ROOT || degree < 1 || degree > 2) {
        return -1;
    }
    if (steps < 0 || steps > TCHI_MINIMAX_MAX_STEPS) {
        return -1;
    }
    if (steps == 0) {
        return 0;
    }
    int squares = (degree - 1) * steps;
    int updates_of_m = (steps - 1) * (power_products(root) + 1);
    int updates_of_x = steps - 1;
    return squares + updates_of_m + updates_of_x;
}
