/* The SVG plot of a training run: training loss over steps and over seconds, in two panels with a common vertical axis.
 * Colors follow the reader's light or dark scheme. */
#define _POSIX_C_SOURCE 200809L
#include "results.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "terminal/output.h"
#include "text/text.h"

enum {
    WIDTH = 960,
    HEIGHT = 420,
    LEFT = 64,
    TOP = 92,
    BOTTOM = HEIGHT - 48,
    PANEL_WIDTH = 410,
    PANEL_DISTANCE = PANEL_WIDTH + 56,
    TICKS = 32,
    MOST_POINTS = 1000 /* of a curve: more than the pixels of a panel */
};

/* Maps values to positions on the page. */
typedef struct axis {
    double low, high;   /* values, or their logarithms if `log` */
    double start, stop; /* positions */
    bool log;
} axis;

static double place_value(const axis *a, double value)
{
    double at = a->log ? log10(value) : value;
    return a->start + (at - a->low) / (a->high - a->low) * (a->stop - a->start);
}

/* --- ranges and ticks -------------------------------------------------------------------------------------------- */

/* Panel 0 shows losses over steps, panel 1 over seconds. */
static double point_x(const train_point *point, int panel)
{
    return panel == 0 ? (double)point->step : point->seconds;
}

static axis horizontal_axis(const train_session *session, int panel)
{
    double high = 0.0, start = LEFT + panel * PANEL_DISTANCE;
    for (int32_t i = 0; i < session->run_count; i++) {
        const train_point *last = train_run_last(&session->runs[i]);
        high = last != NULL ? fmax(high, point_x(last, panel)) : high;
    }
    return (axis){0.0, high > 0.0 ? high : 1.0, start, start + PANEL_WIDTH, false};
}

/* Logarithmic where losses span more than a decade. */
static axis vertical_axis(const train_session *session)
{
    double low = DBL_MAX, high = 0.0;
    for (int32_t i = 0; i < session->run_count; i++) {
        for (int64_t k = 0; k < session->runs[i].point_count; k++) {
            double loss = session->runs[i].points[k].train_loss;
            if (isfinite(loss) && loss >= DBL_MIN) {
                low = fmin(low, loss);
                high = fmax(high, loss);
            }
        }
    }
    if (high <= 10.0 * low || high == 0.0) {
        return (axis){0.0, high > 0.0 ? high : 1.0, BOTTOM, TOP, false};
    }
    return (axis){log10(low), log10(high), BOTTOM, TOP, true};
}

/* Multiples of the first of 1, 2, 5, 10, 20, ... that gives at most six in the range. */
static int find_linear_ticks(const axis *a, double ticks[TICKS])
{
    static const double steps[] = {1, 2, 5, 10};
    double range = a->high - a->low, power = pow(10.0, floor(log10(range / 6)));
    int count = 0, chosen = 0;
    while (range / (steps[chosen] * power) > 6 && chosen < 3) {
        chosen++;
    }
    double distance = steps[chosen] * power;
    for (int64_t k = (int64_t)ceil(a->low / distance - 1e-9); count < TICKS && (double)k * distance <= a->high; k++) {
        ticks[count++] = (double)k * distance;
    }
    return count;
}

/* Powers of ten, with multiples by 2 and 5 where few; or multiples. */
static int find_ticks(const axis *a, double ticks[TICKS])
{
    static const double multiples[] = {1, 2, 5};
    int count = 0, used = a->high - a->low < 3.0 ? 3 : 1;
    if (!a->log) {
        return find_linear_ticks(a, ticks);
    }
    for (int k = (int)floor(a->low); k <= a->high; k++) {
        for (int i = 0; i < used && count < TICKS; i++) {
            double value = multiples[i] * pow(10.0, k);
            if (log10(value) >= a->low - 1e-9 && log10(value) <= a->high + 1e-9) {
                ticks[count++] = value;
            }
        }
    }
    return count;
}

/* --- drawing ----------------------------------------------------------------------------------------------------- */

/* Text whose baseline begins ("start"), has its middle ("middle") or ends ("end") at x, y. */
__attribute__((format(printf, 6, 7))) static void draw_text(FILE *out, double x, double y, const char *anchor, int size,
                                                            const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\">", x, y, anchor, size);
    vfprintf(out, format, arguments);
    fputs("</text>\n", out);
    va_end(arguments);
}

static void draw_line(FILE *out, double x0, double y0, double x1, double y1, const char *style)
{
    fprintf(out, "<polyline fill=\"none\" %s points=\"%.1f,%.1f %.1f,%.1f\"/>\n", style, x0, y0, x1, y1);
}

/* Readable on white and on black. */
static const char *color_of(int32_t run)
{
    static const char *const palette[] = {"#d6455d", "#d98a0b", "#1f9e89", "#3d7fd9",
                                          "#966bb8", "#7a8a3a", "#b86a4a", "#808080"};
    return palette[run % 8];
}

static void draw_grid(FILE *out, const axis *x, const axis *y)
{
    static const char grid[] = "class=\"grid\" stroke-width=\"0.6\"", ink[] = "class=\"axis\" stroke-width=\"1\"";
    double ticks[TICKS];
    int count = find_ticks(y, ticks);
    for (int i = 0; i < count; i++) {
        double at = place_value(y, ticks[i]);
        draw_line(out, x->start, at, x->stop, at, grid);
        draw_text(out, x->start - 8, at + 4, "end", 12, "%g", ticks[i]);
    }
    count = find_ticks(x, ticks);
    for (int i = 0; i < count; i++) {
        double at = place_value(x, ticks[i]);
        draw_line(out, at, y->start, at, y->stop, grid);
        draw_text(out, at, y->start + 18, "middle", 12, "%g", ticks[i]);
    }
    draw_line(out, x->start, y->start, x->stop, y->start, ink);
    draw_line(out, x->start, y->start, x->start, y->stop, ink);
}

/* Evenly spaced measurements and the last. Losses that are not finite, or not positive on a logarithmic axis, are
 * omitted. */
static void draw_curve(FILE *out, const train_run *run, int panel, const axis *x, const axis *y, const char *color)
{
    int64_t every = run->point_count / MOST_POINTS + 1;
    fprintf(out, "<polyline fill=\"none\" stroke=\"%s\" stroke-linejoin=\"round\" stroke-width=\"2\" points=\"", color);
    for (int64_t i = 0; i < run->point_count; i++) {
        const train_point *point = &run->points[i];
        bool shown = isfinite(point->train_loss) && (!y->log || point->train_loss >= DBL_MIN);
        if (shown && (i % every == 0 || i + 1 == run->point_count)) {
            fprintf(out, " %.1f,%.1f", place_value(x, point_x(point, panel)), place_value(y, point->train_loss));
        }
    }
    fputs("\"/>\n", out);
}

static void draw_legend(FILE *out, const train_session *session)
{
    double x = LEFT, y = TOP - 28;
    for (int32_t i = 0; i < session->run_count; i++) {
        const train_method *method = &session->runs[i].method;
        char style[64], name[64];
        snprintf(style, sizeof style, "stroke=\"%s\" stroke-width=\"3\"", color_of(i));
        snprintf(name, sizeof name, "%s, rate %.3g", method->name, method->rate);
        draw_line(out, x, y - 4, x + 24, y - 4, style);
        draw_text(out, x + 30, y, "start", 12, "%s", name);
        x += 56 + 8.0 * (double)strlen(name);
    }
}

static void draw_page(FILE *out, const train_session *session)
{
    const train_plan *plan = &session->setup.plan;
    const axis y = vertical_axis(session);
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\">\n"
            "<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc}"
            "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT);
    draw_text(out, 12, 24, "start", 16, "Training loss over steps and over time");
    draw_text(out, 12, 43, "start", 12, "%lld rows of %lld numbers, hidden layers %s, batches of %lld, %s rate",
              (long long)session->setup.data.train.rows, (long long)session->setup.data.train.cols, plan->hidden_text,
              (long long)plan->batch, plan->schedule);
    draw_legend(out, session);
    for (int panel = 0; panel < 2; panel++) {
        const axis x = horizontal_axis(session, panel);
        draw_grid(out, &x, &y);
        draw_text(out, x.start - 48, TOP - 10, "start", 12, "loss");
        draw_text(out, x.start + 0.5 * PANEL_WIDTH, HEIGHT - 12, "middle", 12, panel == 0 ? "steps" : "seconds");
        for (int32_t i = 0; i < session->run_count; i++) {
            draw_curve(out, &session->runs[i], panel, &x, &y, color_of(i));
        }
    }
    fputs("</svg>\n", out);
}

/* False, with errno set, if the file cannot be written. A partial picture is removed, unless it is a device or pipe. */
static bool write_picture(const train_session *session, const char *path)
{
    struct stat facts;
    FILE *out = fopen(path, "wb");
    if (out == NULL) {
        return false;
    }
    draw_page(out, session);
    bool good = fflush(out) == 0 && !ferror(out);
    int problem = errno;
    if (fclose(out) != 0 && good) {
        good = false;
        problem = errno;
    }
    if (!good && lstat(path, &facts) == 0 && S_ISREG(facts.st_mode)) {
        remove(path);
    }
    errno = problem;
    return good;
}

int train_plot(const train_session *session)
{
    const char *path = session->setup.plan.plot;
    char shown[TEXT_SHOWN];
    if (!write_picture(session, path)) {
        return output_fail("train", "the picture %s could not be written: %s", path, strerror(errno));
    }
    if (!session->setup.plan.json) {
        printf("Learning curves: %s\n", text_show(path, shown));
    }
    return CLI_OK;
}
