/* Handwritten digits. A glyph is a few lines and arcs in a unit square; an image deforms its points by a smooth random
 * field, rotates, shears, scales and shifts them, inks everything within half a pen's width, and adds clutter, uneven
 * light and noise. The strengths were tuned: with hidden layers of 256 and 128, Adam classifies 96 of 100 new images
 * correctly after 600 steps of 128 out of 10000 images; 82 with rotation, shear and shift 1.5x as large and more
 * clutter, 99 with all a third smaller. */
#include "dataset.h"

#include <math.h>
#include <string.h>

enum { PIXELS = DIGITS_SIZE * DIGITS_SIZE, ARC_PARTS = 12, MOST_POINTS = 80, MOST_STROKES = 5, VARIANTS = 2 };

static const double turn = 6.28318530717958647692;

/* --- glyphs ------------------------------------------------------------------------------------------------------ */

/* A line from (a, b) to (c, d), or the arc around (a, b) with radii c and d from angle `from` to `to`, in turns: 0 is
 * right, 0.25 down. y grows downward. */
typedef struct stroke {
    enum { STROKE_END = 0, STROKE_LINE, STROKE_ARC } kind;
    double a, b, c, d, from, to;
} stroke;

#define LINE(a, b, c, d)                                                                                               \
    {                                                                                                                  \
        STROKE_LINE, a, b, c, d, 0, 0                                                                                  \
    }
#define ARC(a, b, c, d, from, to)                                                                                      \
    {                                                                                                                  \
        STROKE_ARC, a, b, c, d, from, to                                                                               \
    }

/* Two ways to write each digit. */
static const stroke glyphs[10][VARIANTS][MOST_STROKES] = {
    {{ARC(0.5, 0.5, 0.3, 0.42, 0, 1)}, {ARC(0.5, 0.5, 0.24, 0.42, 0, 1), LINE(0.36, 0.72, 0.64, 0.28)}},
    {{LINE(0.52, 0.08, 0.52, 0.92), LINE(0.52, 0.08, 0.34, 0.26)},
     {LINE(0.52, 0.08, 0.52, 0.92), LINE(0.52, 0.08, 0.3, 0.3), LINE(0.34, 0.92, 0.7, 0.92)}},
    {{ARC(0.5, 0.32, 0.28, 0.24, 0.52, 1.12), LINE(0.7, 0.5, 0.22, 0.92), LINE(0.22, 0.92, 0.8, 0.92)},
     {ARC(0.48, 0.3, 0.27, 0.22, 0.55, 1.2), LINE(0.56, 0.51, 0.34, 0.78), ARC(0.3, 0.86, 0.1, 0.08, 0.2, 0.9),
      LINE(0.36, 0.81, 0.8, 0.9)}},
    {{ARC(0.46, 0.3, 0.28, 0.22, 0.58, 1.25), ARC(0.46, 0.7, 0.32, 0.22, 0.75, 1.42)},
     {LINE(0.24, 0.1, 0.74, 0.1), LINE(0.74, 0.1, 0.48, 0.42), ARC(0.47, 0.66, 0.3, 0.25, 0.74, 1.42)}},
    {{LINE(0.64, 0.08, 0.2, 0.64), LINE(0.2, 0.64, 0.84, 0.64), LINE(0.64, 0.08, 0.64, 0.92)},
     {LINE(0.3, 0.1, 0.24, 0.52), LINE(0.24, 0.52, 0.76, 0.52), LINE(0.7, 0.12, 0.66, 0.92)}},
    {{LINE(0.74, 0.1, 0.3, 0.1), LINE(0.3, 0.1, 0.27, 0.46), ARC(0.46, 0.66, 0.3, 0.25, 0.64, 1.4)},
     {LINE(0.76, 0.12, 0.34, 0.14), LINE(0.34, 0.14, 0.32, 0.48), ARC(0.44, 0.69, 0.26, 0.22, 0.7, 1.4)}},
    {{ARC(0.7, 0.58, 0.45, 0.5, 0.49, 0.74), ARC(0.5, 0.68, 0.26, 0.24, 0, 1)},
     {LINE(0.62, 0.08, 0.27, 0.6), ARC(0.5, 0.7, 0.25, 0.22, 0, 1)}},
    {{LINE(0.2, 0.1, 0.8, 0.1), LINE(0.8, 0.1, 0.4, 0.92)},
     {LINE(0.2, 0.12, 0.78, 0.1), LINE(0.78, 0.1, 0.42, 0.92), LINE(0.36, 0.5, 0.74, 0.5)}},
    {{ARC(0.5, 0.29, 0.23, 0.2, 0, 1), ARC(0.5, 0.7, 0.28, 0.22, 0, 1)},
     {ARC(0.52, 0.27, 0.2, 0.18, 0, 1), ARC(0.48, 0.68, 0.24, 0.24, 0, 1)}},
    {{ARC(0.5, 0.32, 0.26, 0.24, 0, 1), LINE(0.76, 0.32, 0.68, 0.92)},
     {ARC(0.48, 0.31, 0.25, 0.22, 0, 1), ARC(0.28, 0.42, 0.45, 0.5, 0, 0.24)}},
};

typedef struct point {
    double x, y;
} point;

/* Points of a pen stroke in order; `lift` marks the first of a stroke. */
typedef struct outline {
    int count;
    point points[MOST_POINTS];
    bool lift[MOST_POINTS];
} outline;

static void add_point(outline *o, double x, double y, bool lift)
{
    if (o->count < MOST_POINTS) {
        o->points[o->count] = (point){x, y};
        o->lift[o->count++] = lift;
    }
}

/* Lines are split too, so that they can bend. */
static void add_stroke(outline *o, const stroke *s)
{
    int parts = s->kind == STROKE_ARC ? ARC_PARTS : ARC_PARTS / 2;
    for (int i = 0; i <= parts; i++) {
        double part = (double)i / parts;
        double angle = turn * (s->from + part * (s->to - s->from));
        if (s->kind == STROKE_ARC) {
            add_point(o, s->a + s->c * cos(angle), s->b + s->d * sin(angle), i == 0);
        } else {
            add_point(o, s->a + part * (s->c - s->a), s->b + part * (s->d - s->b), i == 0);
        }
    }
}

/* --- random numbers of an image ----------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t key, counter;
} dice;

static double uniform(dice *d, double low, double high)
{
    double unit = (double)(dataset_bits(d->key, d->counter++) >> 11) * 0x1p-53;
    return low + (high - low) * unit;
}

/* Approximately normal with variance 1: the sum of four 16-bit numbers. */
static double bell(dice *d)
{
    uint64_t bits = dataset_bits(d->key, d->counter++);
    int64_t sum = (int64_t)(bits & 0xffff) + (int64_t)(bits >> 16 & 0xffff) + (int64_t)(bits >> 32 & 0xffff) +
                  (int64_t)(bits >> 48);
    return ((double)sum / 65535.0 - 2.0) * 1.7320508075688772;
}

/* --- deformation -------------------------------------------------------------------------------------------------- */

/* Waves across the square, one for each direction of shift. */
typedef struct wobble {
    double size, across, down, phase;
} wobble;

static wobble draw_wobble(dice *d)
{
    double size = uniform(d, 0, 0.07);
    double across = uniform(d, -1.2, 1.2);
    double down = uniform(d, -1.2, 1.2);
    return (wobble){size, across, down, uniform(d, 0, 1)};
}

static double wave_shift(wobble w, point p)
{
    return w.size * sin(turn * (w.across * p.x + w.down * p.y + w.phase));
}

static void bend_outline(outline *o, dice *d)
{
    wobble sideways = draw_wobble(d);
    wobble upright = draw_wobble(d);
    for (int i = 0; i < o->count; i++) {
        point p = o->points[i];
        o->points[i] = (point){p.x + wave_shift(sideways, p), p.y + wave_shift(upright, p)};
    }
}

/* From the unit square to pixels. */
static void place_outline(outline *o, dice *d)
{
    double angle = uniform(d, -0.25, 0.25);
    double shear = uniform(d, -0.25, 0.25);
    double wide = uniform(d, 0.65, 0.9) * DIGITS_SIZE;
    double tall = uniform(d, 0.65, 0.9) * DIGITS_SIZE;
    double right = DIGITS_SIZE * (0.5 + uniform(d, -0.08, 0.08));
    double below = DIGITS_SIZE * (0.5 + uniform(d, -0.08, 0.08));
    for (int i = 0; i < o->count; i++) {
        double y = (o->points[i].y - 0.5) * tall;
        double x = (o->points[i].x - 0.5) * wide + shear * y;
        o->points[i] = (point){right + x * cos(angle) - y * sin(angle), below + x * sin(angle) + y * cos(angle)};
    }
}

/* --- ink --------------------------------------------------------------------------------------------------------- */

static double clamp(double value, double low, double high)
{
    return value < low ? low : value > high ? high : value;
}

static double distance_to(point p, point from, point to)
{
    double dx = to.x - from.x;
    double dy = to.y - from.y;
    double length = dx * dx + dy * dy;
    double along = length > 0 ? clamp(((p.x - from.x) * dx + (p.y - from.y) * dy) / length, 0, 1) : 0;
    double x = p.x - from.x - along * dx;
    double y = p.y - from.y - along * dy;
    return sqrt(x * x + y * y);
}

/* Inks a segment: a pixel's value is its coverage, with an edge of one pixel. Overlapping segments take the maximum, so
 * that joints are no darker. */
static void ink_segment(float *image, point from, point to, double width, double strength)
{
    double reach = 0.5 * width + 0.5;
    int left = (int)clamp(floor(fmin(from.x, to.x) - reach), 0, DIGITS_SIZE);
    int right = (int)clamp(ceil(fmax(from.x, to.x) + reach), 0, DIGITS_SIZE);
    int top = (int)clamp(floor(fmin(from.y, to.y) - reach), 0, DIGITS_SIZE);
    int bottom = (int)clamp(ceil(fmax(from.y, to.y) + reach), 0, DIGITS_SIZE);
    for (int y = top; y < bottom; y++) {
        for (int x = left; x < right; x++) {
            point center = {x + 0.5, y + 0.5};
            float ink = (float)(strength * clamp(reach - distance_to(center, from, to), 0, 1));
            float *pixel = &image[y * DIGITS_SIZE + x];
            *pixel = ink > *pixel ? ink : *pixel;
        }
    }
}

static void ink_outline(float *image, const outline *o, double width, double strength)
{
    for (int i = 1; i < o->count; i++) {
        if (!o->lift[i]) {
            ink_segment(image, o->points[i - 1], o->points[i], width, strength);
        }
    }
}

/* Scratches that are not part of a digit. */
static void add_clutter(float *image, dice *d)
{
    int count = (int)uniform(d, 0, 3);
    for (int i = 0; i < count; i++) {
        point from = {uniform(d, 0, DIGITS_SIZE), uniform(d, 0, DIGITS_SIZE)};
        double length = uniform(d, 2, 8);
        double angle = uniform(d, 0, turn);
        point to = {from.x + length * cos(angle), from.y + length * sin(angle)};
        double width = uniform(d, 0.6, 1.5);
        ink_segment(image, from, to, width, uniform(d, 0.3, 0.8));
    }
}

/* Light that falls off to one side, and grain. */
static void add_light_and_grain(float *image, dice *d)
{
    double across = uniform(d, -0.15, 0.15);
    double down = uniform(d, -0.15, 0.15);
    double grain = uniform(d, 0.05, 0.18);
    for (int y = 0; y < DIGITS_SIZE; y++) {
        for (int x = 0; x < DIGITS_SIZE; x++) {
            float *pixel = &image[y * DIGITS_SIZE + x];
            double light = across * (x - 0.5 * DIGITS_SIZE) + down * (y - 0.5 * DIGITS_SIZE);
            *pixel = (float)clamp((double)*pixel + light / DIGITS_SIZE + grain * bell(d), 0, 1);
        }
    }
}

static int32_t draw_digit(dice *d, bool clean, float *image)
{
    int32_t digit = (int32_t)uniform(d, 0, 10);
    const stroke *s = glyphs[digit][(int)uniform(d, 0, VARIANTS)];
    outline o = {0};
    for (int i = 0; i < MOST_STROKES && s[i].kind != STROKE_END; i++) {
        add_stroke(&o, &s[i]);
    }
    bend_outline(&o, d);
    place_outline(&o, d);
    memset(image, 0, PIXELS * sizeof *image);
    if (!clean) {
        add_clutter(image, d);
    }
    double width = uniform(d, 1.0, 2.6);
    ink_outline(image, &o, width, uniform(d, 0.6, 1.0));
    if (!clean) {
        add_light_and_grain(image, d);
    }
    return digit;
}

bool digits_draw(int64_t first, int64_t count, uint64_t seed, bool clean, dataset *data, dataset_error *error)
{
    *data = (dataset){.rows = count, .cols = PIXELS, .images = true, .classes = 10};
    if (!dataset_allocate(data, error)) {
        return false;
    }
    for (int64_t i = 0; i < count; i++) {
        dice d = {dataset_bits(seed, (uint64_t)(first + i)), 0};
        data->labels[i] = draw_digit(&d, clean, data->features + i * PIXELS);
    }
    return true;
}
