/* Lays out and draws a chart as SVG: title, legend, and panels that share a vertical axis. Colors of ink and grid
 * follow the reader's light or dark scheme. Write errors are left to the stream's error indicator. */
#define _POSIX_C_SOURCE 200809L
#include "chart.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const double page_width = 960, page_height = 420, left_margin = 64, right_margin = 20, top_margin = 92,
                    bottom_margin = 48, gap = 56, letters = 12;

/* From values to places on the page. */
typedef struct axis {
    double low, high;   /* values, their logarithms where `log` is set */
    double start, stop; /* places */
    bool log;
} axis;

static double place_value(const axis *a, double value)
{
    double at = a->log ? log10(value) : value;
    return a->start + (at - a->low) / (a->high - a->low) * (a->stop - a->start);
}

static bool can_show(const axis *a, double value)
{
    return isfinite(value) && (!a->log || value > 0.0);
}

/* --- ranges and ticks -------------------------------------------------------------------------------------------- */

static void widen_range(const double *values, int64_t count, double least, double *low, double *high)
{
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(values[i]) && values[i] >= least) {
            *low = fmin(*low, values[i]);
            *high = fmax(*high, values[i]);
        }
    }
}

static axis horizontal_axis(const chart *c, const chart_panel *panel, double start, double stop)
{
    double low = 0.0, high = 0.0;
    for (int i = 0; i < c->series_count; i++) {
        widen_range(panel->series[i].x, panel->series[i].count, 0.0, &low, &high);
    }
    return (axis){low, high > low ? high : low + 1.0, start, stop, false};
}

static axis vertical_axis(const chart *c)
{
    double low = DBL_MAX, high = 0.0, start = page_height - bottom_margin;
    for (int p = 0; p < c->panel_count; p++) {
        for (int i = 0; i < c->series_count; i++) {
            widen_range(c->panels[p].series[i].y, c->panels[p].series[i].count, DBL_MIN, &low, &high);
        }
    }
    if (high == 0.0) {
        return (axis){0.0, 1.0, start, top_margin, false};
    }
    if (high <= 10.0 * low) {
        return (axis){0.0, high, start, top_margin, false};
    }
    return (axis){log10(low), log10(high), start, top_margin, true};
}

/* The first of 1, 2, 5, 10, 20, ... with at most `most` of it in the range. */
static double tick_distance(double range, int most)
{
    static const double steps[] = {1, 2, 5, 10};
    double power = pow(10.0, floor(log10(range / most)));
    for (int i = 0; i < 4; i++) {
        if (range / (steps[i] * power) <= most) {
            return steps[i] * power;
        }
    }
    return 10.0 * power;
}

enum { TICKS = 32 };

static int linear_ticks(const axis *a, double ticks[TICKS])
{
    double distance = tick_distance(a->high - a->low, 6);
    int count = 0;
    int64_t first = (int64_t)ceil(a->low / distance - 1e-9), last = (int64_t)floor(a->high / distance + 1e-9);
    for (int64_t k = first; k <= last && count < TICKS; k++) {
        ticks[count++] = (double)k * distance;
    }
    return count;
}

/* Powers of ten, and where there are few of them their multiples by 2 and 5. */
static int log_ticks(const axis *a, double ticks[TICKS])
{
    static const double multiples[] = {1, 2, 5};
    int count = 0, used = a->high - a->low < 3.0 ? 3 : 1;
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

static int find_ticks(const axis *a, double ticks[TICKS])
{
    return a->log ? log_ticks(a, ticks) : linear_ticks(a, ticks);
}

/* --- SVG --------------------------------------------------------------------------------------------------------- */

/* Colors by their purpose; SVG_SERIES + i is that of curve i. */
typedef enum svg_color { SVG_INK, SVG_GRID, SVG_SERIES } svg_color;

typedef enum svg_anchor { SVG_LEFT, SVG_MIDDLE, SVG_RIGHT } svg_anchor;

enum { PALETTE = 8 };

/* Readable on white and on black alike. */
static const unsigned char palette[PALETTE][3] = {
    {0xd6, 0x45, 0x5d}, {0xd9, 0x8a, 0x0b}, {0x1f, 0x9e, 0x89}, {0x3d, 0x7f, 0xd9},
    {0x96, 0x6b, 0xb8}, {0x7a, 0x8a, 0x3a}, {0xb8, 0x6a, 0x4a}, {0x80, 0x80, 0x80},
};

static void begin_page(FILE *out)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
            "font-family=\"sans-serif\">\n",
            page_width, page_height, page_width, page_height);
    fputs("<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc}"
          "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>\n",
          out);
}

/* A polyline through `count` points x0, y0, x1, y1, ... */
static void draw_polyline(FILE *out, const double *points, int64_t count, svg_color color, double width)
{
    fputs("<polyline fill=\"none\" ", out);
    if (color < SVG_SERIES) {
        fprintf(out, "class=\"%s\"", color == SVG_INK ? "axis" : "grid");
    } else {
        const unsigned char *rgb = palette[(color - SVG_SERIES) % PALETTE];
        fprintf(out, "stroke=\"#%02x%02x%02x\" stroke-linejoin=\"round\"", rgb[0], rgb[1], rgb[2]);
    }
    fprintf(out, " stroke-width=\"%g\" points=\"", width);
    for (int64_t i = 0; i < count; i++) {
        fprintf(out, "%s%.1f,%.1f", i > 0 ? " " : "", points[2 * i], points[2 * i + 1]);
    }
    fputs("\"/>\n", out);
}

static void put_escaped(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '<') {
            fputs("&lt;", out);
        } else if (*text == '&') {
            fputs("&amp;", out);
        } else {
            fputc((unsigned char)*text < 0x20 ? ' ' : *text, out);
        }
    }
}

/* Text whose baseline begins, has its middle or ends at x, y. */
static void draw_text(FILE *out, double x, double y, svg_anchor anchor, double size, const char *text)
{
    static const char *const names[] = {"start", "middle", "end"};
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%g\">", x, y, names[anchor], size);
    put_escaped(out, text);
    fputs("</text>\n", out);
}

/* --- drawing ----------------------------------------------------------------------------------------------------- */

static void draw_line(FILE *out, double x0, double y0, double x1, double y1, svg_color color, double width)
{
    const double points[] = {x0, y0, x1, y1};
    draw_polyline(out, points, 2, color, width);
}

static void draw_grid(FILE *out, const axis *x, const axis *y)
{
    double ticks[TICKS];
    char text[32];
    int count = find_ticks(y, ticks);
    for (int i = 0; i < count; i++) {
        double at = place_value(y, ticks[i]);
        draw_line(out, x->start, at, x->stop, at, SVG_GRID, 0.6);
        snprintf(text, sizeof text, "%g", ticks[i]);
        draw_text(out, x->start - 8, at + 4, SVG_RIGHT, letters, text);
    }
    count = find_ticks(x, ticks);
    for (int i = 0; i < count; i++) {
        double at = place_value(x, ticks[i]);
        draw_line(out, at, y->start, at, y->stop, SVG_GRID, 0.6);
        snprintf(text, sizeof text, "%g", ticks[i]);
        draw_text(out, at, y->start + 18, SVG_MIDDLE, letters, text);
    }
    draw_line(out, x->start, y->start, x->stop, y->start, SVG_INK, 1);
    draw_line(out, x->start, y->start, x->start, y->stop, SVG_INK, 1);
}

/* `points` has room for the longest series. */
static void draw_curve(FILE *out, const axis *x, const axis *y, const chart_series *series, int color, double *points)
{
    int64_t count = 0;
    for (int64_t i = 0; i < series->count; i++) {
        if (!can_show(x, series->x[i]) || !can_show(y, series->y[i])) {
            continue;
        }
        points[2 * count] = place_value(x, series->x[i]);
        points[2 * count + 1] = place_value(y, series->y[i]);
        count++;
    }
    if (count > 1) {
        draw_polyline(out, points, count, (svg_color)(SVG_SERIES + color), 2);
    }
}

static void draw_legend(FILE *out, const chart *c)
{
    double x = left_margin, y = top_margin - 28;
    for (int i = 0; i < c->series_count; i++) {
        const char *name = c->panels[0].series[i].name;
        draw_line(out, x, y - 4, x + 24, y - 4, (svg_color)(SVG_SERIES + i), 3);
        draw_text(out, x + 30, y, SVG_LEFT, letters, name);
        x += 56 + 8.0 * (double)strlen(name);
    }
}

static void draw_chart(FILE *out, const chart *c, double *points)
{
    double width = (page_width - left_margin - right_margin - gap * (c->panel_count - 1)) / c->panel_count;
    axis y = vertical_axis(c);
    draw_text(out, 12, 24, SVG_LEFT, 16, c->title);
    draw_text(out, 12, 43, SVG_LEFT, letters, c->remark);
    draw_legend(out, c);
    for (int p = 0; p < c->panel_count; p++) {
        double start = left_margin + p * (width + gap);
        axis x = horizontal_axis(c, &c->panels[p], start, start + width);
        draw_grid(out, &x, &y);
        draw_text(out, start - 48, top_margin - 10, SVG_LEFT, letters, c->y_name);
        draw_text(out, start + 0.5 * width, page_height - 12, SVG_MIDDLE, letters, c->panels[p].x_name);
        for (int i = 0; i < c->series_count; i++) {
            draw_curve(out, &x, &y, &c->panels[p].series[i], i, points);
        }
    }
}

static double *allocate_points(const chart *c)
{
    int64_t most = 1;
    for (int p = 0; p < c->panel_count; p++) {
        for (int i = 0; i < c->series_count; i++) {
            most = c->panels[p].series[i].count > most ? c->panels[p].series[i].count : most;
        }
    }
    return malloc(2 * (size_t)most * sizeof(double));
}

static bool write_page(const chart *c, FILE *out)
{
    double *points = allocate_points(c);
    if (points == NULL) {
        errno = ENOMEM;
        return false;
    }
    begin_page(out);
    draw_chart(out, c, points);
    fputs("</svg>\n", out);
    free(points);
    return fflush(out) == 0 && !ferror(out);
}

/* Half a picture is no picture; but a device or a pipe by that name is not ours to remove. */
static void remove_file(const char *path)
{
    struct stat facts;
    if (lstat(path, &facts) == 0 && S_ISREG(facts.st_mode)) {
        remove(path);
    }
}

bool chart_write(const chart *c, const char *path)
{
    FILE *out = fopen(path, "wb");
    if (out == NULL) {
        return false;
    }
    bool good = write_page(c, out);
    int problem = errno;
    if (fclose(out) != 0 && good) {
        good = false;
        problem = errno;
    }
    if (!good) {
        remove_file(path);
    }
    errno = problem;
    return good;
}
