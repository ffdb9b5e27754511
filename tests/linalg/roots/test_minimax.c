/* The coefficients of polynomial steps and of sums of poles vs the theory that characterizes them: only the optimal
 * ones equioscillate. Their guarantees are checked on a fine grid in long double. */
#include <float.h>

#include "linalg/minimax.h"
#include "support/testing.h"

enum { GRID = 1000 };

static const double RATIOS[] = {0.97, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10};
enum { RATIO_COUNT = sizeof RATIOS / sizeof RATIOS[0] };

/* Term i of `count` in geometric progression between the given first and last terms. */
static double spread(int i, int count, double first, double last)
{
    return i == count - 1 ? last : first * pow(last / first, (double)i / (count - 1));
}

/* A function of x with its parameters: the curves below share the checks. */
typedef struct curve {
    long double (*value)(const struct curve *self, long double x);
    int root, poles;
    const double *coefficients, *shifts, *weights;
} curve;

static long double polynomial(const double *c, long double x)
{
    return c[0] + x * (c[1] + x * (c[2] + x * (c[3] + x * c[4])));
}

static long double power(long double x, int exponent)
{
    long double result = 1.0L;
    for (; exponent > 0; exponent--) {
        result *= x;
    }
    return result;
}

/* x^(1/p), by a step of Newton's method from the root in double, which doubles its digits: with long double in
 * software, powl took half of this program's time. */
static long double root_of(long double x, int root)
{
    long double guess = pow((double)x, 1.0 / root);
    long double rest = power(guess, root - 1);
    return guess - (guess * rest - x) / (root * rest);
}

/* x q(x)^p - 1 */
static long double step_error(const curve *self, long double x)
{
    return x * power(polynomial(self->coefficients, x), self->root) - 1.0L;
}

/* x^(1/p) (sum of poles) - 1 */
static long double pole_error(const curve *self, long double x)
{
    long double sum = 0.0L;
    for (int j = 0; j < self->poles; j++) {
        sum += self->weights[j] / (x + self->shifts[j]);
    }
    return root_of(x, self->root) * sum - 1.0L;
}

/* Even points evenly spaced, odd points in geometric progression, including both ends. */
static void fill_grid(long double lo, long double hi, long double *grid)
{
    int last = GRID / 2 - 1;
    long double factor = powl(hi / lo, 1.0L / last), x = lo;
    for (int i = 0; i <= last; i++) {
        grid[2 * i] = lo + (hi - lo) * i / last;
        grid[2 * i + 1] = fminl(x, hi);
        x *= factor;
    }
    grid[2 * last] = hi;
}

static long double largest_error(const curve *c, long double lo, long double hi)
{
    long double grid[GRID], largest = 0.0L;
    fill_grid(lo, hi, grid);
    for (int i = 0; i < GRID; i++) {
        largest = fmaxl(largest, fabsl(c->value(c, grid[i])));
    }
    return largest;
}

/* The extremum of sign * value between two points around it, by ternary search. */
static long double refine_extremum(const curve *c, long double left, long double right, long double sign)
{
    for (int i = 0; i < 60; i++) {
        long double third = (right - left) / 3.0L;
        if (sign * c->value(c, left + third) < sign * c->value(c, right - third)) {
            left += third;
        } else {
            right -= third;
        }
    }
    return c->value(c, 0.5L * (left + right));
}

/* Collects the values at the ends and at all local extrema in order; returns their number. */
static int find_extrema(const curve *c, long double lo, long double hi, long double *values, int room)
{
    int count = 0;
    long double before = lo, here = lo, value_before = c->value(c, lo), value_here = value_before;
    values[count++] = value_here;
    long double factor = powl(hi / lo, 1.0L / GRID), x = lo;
    for (int i = 1; i < GRID; i++) {
        x *= factor;
        long double value = c->value(c, x);
        int turns = (value_here - value_before) * (value - value_here) < 0.0L;
        if (turns && count < room - 1) {
            values[count++] = refine_extremum(c, before, x, value_here > value ? 1.0L : -1.0L);
        }
        before = here;
        value_before = value_here;
        here = x;
        value_here = value;
    }
    values[count++] = c->value(c, hi);
    return count;
}

/* The error equioscillates at exactly `expected` extrema. */
static void check_alternation(const curve *c, double lo, double hi, int expected, double size)
{
    long double values[64];
    int count = find_extrema(c, lo, hi, values, 64);
    CHECK(count == expected, "%d extrema instead of %d", count, expected);
    for (int i = 0; i < count; i++) {
        double deviation = (double)fabsl(fabsl(values[i]) / size - 1.0L);
        CHECK(deviation <= 1e-6, "extremum %d is %.3e away from the others", i, deviation);
        CHECK(i == 0 || values[i] * values[i - 1] < 0.0L, "extrema %d and %d have one sign", i - 1, i);
    }
}

static tchi_minimax_step make_step(int root, int degree, double lo, double hi)
{
    tchi_minimax_step step = {{NAN, NAN, NAN, NAN, NAN}, NAN, NAN};
    test_case("root %d, degree %d, [%.17g, %.17g]", root, degree, lo, hi);
    CHECK(tchi_minimax_polynomial(root, degree, lo, hi, &step) == 0, "no step");
    CHECK(fabs(step.lo + step.hi - 2.0) <= 1e-15, "[%.17g, %.17g] is not centered", step.lo, step.hi);
    return step;
}

/* Whether a step of degree 4 exists for an interval with this ratio of its ends. */
static bool quartic_exists(double ratio)
{
    return ratio >= 1e-9 && ratio <= 0.8;
}

TEST(steps_alternate_degree_plus_two_times)
{
    static const double more[] = {0.8, 0.3, 0.03, 1e-5, 1e-7, 1e-9};
    for (int i = 0; i < TCHI_MINIMAX_MAX_ROOT * (RATIO_COUNT + 6); i++) {
        int root = 1 + i / (RATIO_COUNT + 6), r = i % (RATIO_COUNT + 6);
        double ratio = r < RATIO_COUNT ? RATIOS[r] : more[r - RATIO_COUNT];
        double hi = r % 2 ? 1.9 : 1.0, before = 0.0;
        for (int degree = 1; degree <= (quartic_exists(ratio) ? 4 : 2); degree *= 2) {
            tchi_minimax_step step = make_step(root, degree, ratio * hi, hi);
            curve c = {.value = step_error, .root = root, .coefficients = step.c};
            check_alternation(&c, ratio * hi, hi, degree + 2, step.hi - 1.0);
            CHECK(step.lo > before, "degree %d is no better than half of it", degree);
            before = step.lo;
        }
    }
}

/* Close to convergence the step approaches Taylor's polynomial of x^(-1/p) at 1, whose coefficients must not be lost to
 * cancellation in an ever shorter interval: rounding puts eigenvalues outside it. */
TEST(short_intervals_give_taylor_polynomials)
{
    for (int root = 1; root <= TCHI_MINIMAX_MAX_ROOT; root++) {
        double a = 1.0 / root;
        for (int i = 0; i < 40; i++) {
            double half = spread(i, 40, 1e-2, 1e-14);
            double lo = 1.0 - half, hi = 1.0 + half;
            tchi_minimax_step line = make_step(root, 1, lo, hi);
            CHECK(fabs(line.c[0] - (1.0 + a)) <= half && fabs(line.c[1] + a) <= half, "%g %g", line.c[0], line.c[1]);
            CHECK(line.hi - 1.0 <= (1.0 + a) * half * half + 1e-14, "squares %g into %g", half, line.hi - 1.0);
            tchi_minimax_step parabola = make_step(root, 2, lo, hi);
            double second = 0.5 * a * (a + 1.0);
            CHECK(fabs(parabola.c[0] - (1.0 + a + second)) <= half + 1e-8, "c0 is %.17g", parabola.c[0]);
            CHECK(fabs(parabola.c[1] + (a + 2.0 * second)) <= half + 1e-8, "c1 is %.17g", parabola.c[1]);
            CHECK(fabs(parabola.c[2] - second) <= half + 1e-8, "c2 is %.17g", parabola.c[2]);
            double least = (a + 1.0) * (a + 2.0) / 24.0 * half * half * half; /* of all parabolas, as half -> 0 */
            CHECK(parabola.hi - 1.0 <= 1.01 * least + 1e-14, "%g instead of %g", parabola.hi - 1.0, least);
        }
    }
}

/* Eight equioscillating extrema show that no polynomial of degree 6 is better. */
static void check_longer_ending(int root, double lo, double hi)
{
    tchi_minimax_sextic q;
    double error = NAN, most = 0.0, sign = 0.0;
    int turns = 0;
    test_case("root %d, an ending from %g to %g", root, lo, hi);
    assert_int_equal(tchi_minimax_longer_ending(root, lo, hi, &q, &error), 0);
    for (int j = 0; j <= 20000; j++) {
        double x = spread(j, 20001, lo, hi);
        double s = q.s0 + x * (q.s1 + x);
        double off = (q.t0 + q.t1 * x + q.t2 * s * (q.u0 + q.u1 * x + s * s)) * pow(x, 1.0 / root) - 1.0;
        most = fmax(most, fabs(off));
        if (fabs(off) > 0.999 * error && off * sign <= 0.0) {
            sign = off;
            turns++;
        }
    }
    CHECK(fabs(most / error - 1.0) <= 1e-3, "%g where it says %g", most, error);
    assert_int_equal(turns, 8);
}

TEST(longer_endings_are_the_best)
{
    for (int root = 1; root <= TCHI_MINIMAX_MAX_ROOT; root++) {
        for (int i = 0; i < 10; i++) {
            double lo = 0.02 + 0.83 * i / 9;
            check_longer_ending(root, lo, 2.0 - lo);
        }
        check_longer_ending(root, 1e-3, 1.0);
        check_longer_ending(root, 0.75, 1.0);
    }
    tchi_minimax_sextic q;
    double error;
    assert_int_equal(tchi_minimax_longer_ending(4, 0.394, 1.606, &q, &error), 0);
    CHECK(error > 6.7e-5 && error < 6.9e-5, "the error is %g", error);
}

typedef struct sum {
    int root, count;
    double lo, error;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES];
} sum;

static sum make_sum(int root, double lo, double tolerance)
{
    sum s = {.root = root, .lo = lo, .error = NAN};
    test_case("poles for root %d on [%.17g, 1] to %.17g", root, lo, tolerance);
    s.count = tchi_minimax_poles(root, lo, tolerance, s.shifts, s.weights, &s.error);
    CHECK(s.count >= 1 && s.count <= TCHI_MINIMAX_MAX_POLES, "%d poles", s.count);
    CHECK(s.error <= tolerance || s.count == TCHI_MINIMAX_MAX_POLES || tolerance < 2e-15, "error %g", s.error);
    for (int j = 0; j < s.count; j++) {
        CHECK(s.weights[j] > 0.0 && isfinite(s.weights[j]), "weight %d is %g", j, s.weights[j]);
        CHECK(s.shifts[j] > (j ? s.shifts[j - 1] : 0.0) && isfinite(s.shifts[j]), "shift %d is %g", j, s.shifts[j]);
    }
    return s;
}

static curve curve_of(const sum *s)
{
    return (curve){.value = pole_error, .root = s->root, .poles = s->count, .shifts = s->shifts, .weights = s->weights};
}

static void check_error_is_true(const sum *s)
{
    curve c = curve_of(s);
    long double largest = largest_error(&c, s->lo, 1.0L);
    CHECK(largest <= s->error * (1.0 + 1e-6) + 1e-16, "an error of %Lg where %g was stated", largest, s->error);
}

TEST(sums_alternate_at_all_points)
{
    const double tolerances[] = {3e-1, 1e-1, 1e-2, 1e-3, 1e-5, 1e-7, 1e-9};
    for (int root = 2; root <= TCHI_MINIMAX_MAX_ROOT; root++) {
        for (int r = 0; r < RATIO_COUNT; r++) {
            sum s = make_sum(root, RATIOS[r], tolerances[(root + r) % 7]);
            check_error_is_true(&s);
            if (s.error > 1e-9) { /* below that the rounding of the poles shows in the sixth digit */
                curve c = curve_of(&s);
                check_alternation(&c, s.lo, 1.0, 2 * s.count + 1, s.error);
            }
        }
    }
}

/* A tolerance slightly below the error of k poles must give k + 1, exactly that error must give k. */
TEST(sums_have_the_fewest_poles)
{
    const int roots[] = {2, 3, 4, 6, 8, 16};
    const double ends[] = {0.99, 0.5, 1e-1, 1e-3, 1e-6, 1e-10, 1e-14};
    for (int i = 0; i < 6; i++) {
        for (int e = 0; e < 7; e++) {
            sum s = make_sum(roots[i], ends[e], 0.5);
            while (s.count < TCHI_MINIMAX_MAX_POLES && s.error > 1e-13) {
                sum same = make_sum(roots[i], ends[e], s.error * (1.0 + 1e-5));
                CHECK(same.count == s.count, "%d poles where %d suffice", same.count, s.count);
                sum next = make_sum(roots[i], ends[e], s.error * (1.0 - 1e-3));
                CHECK(next.count == s.count + 1, "%d poles after %d", next.count, s.count);
                s = next;
            }
        }
    }
}

TEST(sums_stop_at_their_limits)
{
    sum s = make_sum(4, 1e-14, 1e-13); /* would take 55 poles */
    assert_int_equal(s.count, TCHI_MINIMAX_MAX_POLES);
    CHECK(s.error > 1e-6 && s.error < 1e-5, "24 poles reach %g", s.error);
    check_error_is_true(&s);
    for (int root = 2; root <= TCHI_MINIMAX_MAX_ROOT; root++) {
        for (int i = 0; i < 100; i++) {
            double gap = i < 80 ? spread(i, 80, 0.9, 1e-2) : spread(i - 80, 20, 1e-2, 1e-15);
            s = make_sum(root, 1.0 - gap, 1e-300);
            CHECK(s.error <= 2e-15, "rounding stops at %g", s.error);
            check_error_is_true(&s);
        }
    }
}

TEST(root_one_is_one_exact_pole)
{
    double shift = NAN, weight = NAN, error = NAN;
    assert_int_equal(tchi_minimax_poles(1, 1e-6, 1e-3, &shift, &weight, &error), 1);
    assert_true(shift == 0.0 && weight == 1.0 && error == 0.0);
}

/* --- bad arguments ----------------------------------------------------------------------------------------------- */

typedef struct results {
    tchi_minimax_step step, steps[TCHI_MINIMAX_MAX_STEPS];
    tchi_minimax_quartic quartic;
    tchi_minimax_sextic sextic;
    double shifts[TCHI_MINIMAX_MAX_POLES], weights[TCHI_MINIMAX_MAX_POLES], error;
} results;

typedef enum function { STEP, PLAN, ENDING, LONGER, SUM } function;

static int call_function(function f, int root, int degree, double lo, double end, results *r)
{
    switch (f) {
    case STEP:
        return tchi_minimax_polynomial(root, degree, lo, end, &r->step);
    case PLAN:
        return tchi_minimax_plan(root, degree, lo, end, r->steps);
    case ENDING:
        return tchi_minimax_ending(root, lo, end, &r->quartic, &r->error);
    case LONGER:
        return tchi_minimax_longer_ending(root, lo, end, &r->sextic, &r->error);
    default:
        return tchi_minimax_poles(root, lo, end, r->shifts, r->weights, &r->error);
    }
}

/* `end` is the upper end of the interval or, of plans and sums, the tolerance. The last two endings would be rounding,
 * or of no use. */
TEST(bad_arguments_are_refused)
{
    static const struct {
        function f;
        int root, degree;
        double lo, end;
    } bad[] = {
        {STEP, 0, 1, 0.1, 1.0},        {STEP, -4, 1, 0.1, 1.0},   {STEP, 17, 1, 0.1, 1.0},
        {STEP, 4, 0, 0.1, 1.0},        {STEP, 4, 3, 0.1, 1.0},    {STEP, 4, 1, 0.0, 1.0},
        {STEP, 4, 2, -0.1, 1.0},       {STEP, 4, 2, 1.0, 1.0},    {STEP, 4, 2, 2.0, 1.0},
        {STEP, 4, 2, NAN, 1.0},        {STEP, 4, 2, 0.1, NAN},    {STEP, 4, 1, 0.1, INFINITY},
        {STEP, 4, 1, 1e-16, 1.0},      {STEP, 4, 2, 1e-16, 1.0},  {STEP, 4, 2, -2.0, -1.0},
        {STEP, 4, 4, 1e-10, 1.0},      {STEP, 4, 4, 0.85, 1.0},   {STEP, 4, 4, NAN, 1.0},
        {STEP, 4, 4, 2.0, 1.0},        {STEP, 4, 5, 0.1, 1.0},    {STEP, 0, 4, 0.1, 1.0},
        {PLAN, 0, 1, 0.1, 1e-3},       {PLAN, 4, 3, 0.1, 1e-3},   {PLAN, 4, 4, 0.1, 1e-3},
        {PLAN, 4, 1, 0.0, 1e-3},       {PLAN, 4, 1, 1.5, 1e-3},   {PLAN, 4, 1, NAN, 1e-3},
        {PLAN, 4, 1, 0.1, 0.0},        {PLAN, 4, 1, 0.1, NAN},    {ENDING, 0, 0, 0.5, 1.5},
        {ENDING, 17, 0, 0.5, 1.5},     {ENDING, 4, 0, 0.0, 1.5},  {ENDING, 4, 0, NAN, 1.5},
        {ENDING, 4, 0, 0.5, INFINITY}, {ENDING, 4, 0, 1.5, 0.5},  {ENDING, 4, 0, 1.0 - 1e-5, 1.0 + 1e-5},
        {LONGER, 0, 0, 0.5, 1.5},      {LONGER, 17, 0, 0.5, 1.5}, {LONGER, 4, 0, 0.0, 1.5},
        {LONGER, 4, 0, NAN, 1.5},      {LONGER, 4, 0, 1.5, 0.5},  {LONGER, 4, 0, -0.5, 1.5},
        {LONGER, 4, 0, 0.5, INFINITY}, {LONGER, 4, 0, 0.5, NAN},  {LONGER, 4, 0, 1e-4, 1.0},
        {LONGER, 4, 0, 0.99, 1.01},    {SUM, 0, 0, 1e-3, 1e-3},   {SUM, 17, 0, 1e-3, 1e-3},
        {SUM, 4, 0, 0.0, 1e-3},        {SUM, 4, 0, 1.0, 1e-3},    {SUM, 4, 0, 1e-16, 1e-3},
        {SUM, 4, 0, NAN, 1e-3},        {SUM, 4, 0, 1e-3, 0.0},    {SUM, 4, 0, 1e-3, NAN},
    };
    static results r, untouched;
    memset(&r, 0x41, sizeof r);
    untouched = r;
    for (size_t i = 0; i < TEST_COUNT(bad); i++) {
        test_case("bad arguments, row %zu", i);
        assert_int_equal(call_function(bad[i].f, bad[i].root, bad[i].degree, bad[i].lo, bad[i].end, &r), -1);
        CHECK(memcmp(&r, &untouched, sizeof r) == 0, "results were written");
    }
    assert_int_equal(tchi_minimax_polynomial(4, 1, 0.1, 1.0, NULL), -1);
    assert_int_equal(tchi_minimax_plan(4, 1, 0.1, 1e-3, NULL), -1);
    assert_int_equal(tchi_minimax_poles(4, 1e-3, 1e-3, NULL, r.weights, &r.error), -1);
    assert_int_equal(tchi_minimax_poles(4, 1e-3, 1e-3, r.shifts, NULL, &r.error), -1);
    assert_int_equal(tchi_minimax_poles(4, 1e-3, 1e-3, r.shifts, r.weights, NULL), -1);
}

TEST_MAIN(NULL, NULL)
