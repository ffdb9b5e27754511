/* Lines and text on a page of fixed size, as SVG. Write errors are left to the stream's error indicator. */
#ifndef CLI_SVG_H
#define CLI_SVG_H

#include <stdint.h>
#include <stdio.h>

/* Colors by their purpose; SVG_SERIES + i is that of curve i. */
typedef enum svg_color { SVG_INK, SVG_GRID, SVG_SERIES } svg_color;

typedef enum svg_anchor { SVG_LEFT, SVG_MIDDLE, SVG_RIGHT } svg_anchor;

void svg_begin(FILE *out, double width, double height);

/* A line through `count` points x0, y0, x1, y1, ... */
void svg_line(FILE *out, const double *points, int64_t count, svg_color color, double width);

/* Text whose baseline begins, has its middle or ends at x, y. */
void svg_text(FILE *out, double x, double y, svg_anchor anchor, double size, const char *text);

void svg_end(FILE *out);

#endif
