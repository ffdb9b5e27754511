/* Curves side by side as an SVG picture. */
#ifndef CLI_CHART_H
#define CLI_CHART_H

#include <stdbool.h>
#include <stdint.h>

enum { CHART_SERIES = 8, CHART_PANELS = 2 };

typedef struct chart_series {
    const char *name;
    int64_t count;
    const double *x, *y; /* points that are not finite are passed over, as are those a logarithm cannot show */
} chart_series;

typedef struct chart_panel {
    const char *x_name;
    const chart_series *series; /* the same names in the same order in every panel: colors go by place */
} chart_panel;

typedef struct chart {
    const char *title, *remark; /* the first two lines */
    const char *y_name;
    int panel_count, series_count;
    chart_panel panels[CHART_PANELS];
} chart;

/* The vertical axis, shared by the panels, is logarithmic where the values span more than a decade. False, with errno
 * set, when the file cannot be written; then nothing is left of it. */
bool chart_write(const chart *c, const char *path);

#endif
