/* What a chart is drawn on: lines and text on a page of fixed size, with two ways to keep them, SVG and PNG. */
#ifndef CLI_CANVAS_H
#define CLI_CANVAS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Colors by their purpose; CANVAS_SERIES + i is that of curve i. */
typedef enum canvas_color { CANVAS_INK, CANVAS_GRID, CANVAS_SERIES } canvas_color;
enum { CANVAS_PALETTE = 8 };

/* Readable on white and on black alike. */
extern const unsigned char canvas_palette[CANVAS_PALETTE][3];

typedef enum canvas_anchor { CANVAS_LEFT, CANVAS_MIDDLE, CANVAS_RIGHT } canvas_anchor;

typedef struct canvas canvas;
struct canvas {
    double width, height;
    /* A line through `count` points x0, y0, x1, y1, ... */
    void (*line)(canvas *c, const double *points, int64_t count, canvas_color color, double width);
    /* Text whose baseline begins, has its middle or ends at x, y. */
    void (*text)(canvas *c, double x, double y, canvas_anchor anchor, double size, const char *text);
    /* Writes what is missing and frees what the canvas holds. False, with errno set, when something was not written. */
    bool (*finish)(canvas *c);
    FILE *out;
    unsigned char *pixels; /* PNG: three bytes each */
};

/* Begins a page; false, with errno set, when there is no memory for it. */
bool canvas_svg(canvas *c, FILE *out, double width, double height);
bool canvas_png(canvas *c, FILE *out, double width, double height);

#endif
