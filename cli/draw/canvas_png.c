/* A page as PNG: lines are painted by their distance from each pixel, and text is lines too, from a small alphabet of
 * strokes, so that nothing else is needed to draw it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "canvas.h"
#include "png_rgb.h"

/* Pixels to a unit of the page. */
enum { SCALE = 2 };

/* --- the alphabet ------------------------------------------------------------------------------------------------ */

/* Each letter is strokes, separated by '|', through points of two digits: x from 0 to 4, and y down from 0, the height
 * of a capital, through 2, that of a small letter, and 6, the baseline, to 8. */
static const char *const strokes[128] = {
    ['0'] = "10 30 41 45 36 16 05 01 10",
    ['1'] = "11 20 26|16 36",
    ['2'] = "01 10 30 41 42 06 46",
    ['3'] = "01 10 30 41 42 33 44 45 36 16 05|13 33",
    ['4'] = "36 30 04 44",
    ['5'] = "40 00 03 12 32 43 45 36 16 05",
    ['6'] = "40 20 02 05 16 36 45 44 33 13 04",
    ['7'] = "00 40 16",
    ['8'] = "13 02 01 10 30 41 42 33 13 04 05 16 36 45 44 33",
    ['9'] = "06 26 44 41 30 10 01 02 13 33 42",
    ['A'] = "06 20 46|14 34",
    ['B'] = "06 00 30 41 42 33 03|33 44 45 36 06",
    ['C'] = "41 30 10 01 05 16 36 45",
    ['D'] = "06 00 20 42 44 26 06",
    ['E'] = "40 00 06 46|03 33",
    ['F'] = "40 00 06|03 33",
    ['G'] = "41 30 10 01 05 16 36 45 43 23",
    ['H'] = "00 06|40 46|03 43",
    ['I'] = "10 30|20 26|16 36",
    ['J'] = "40 45 36 16 05",
    ['K'] = "00 06|40 03 46",
    ['L'] = "00 06 46",
    ['M'] = "06 00 23 40 46",
    ['N'] = "06 00 46 40",
    ['O'] = "10 30 41 45 36 16 05 01 10",
    ['P'] = "06 00 30 41 42 33 03",
    ['Q'] = "10 30 41 45 36 16 05 01 10|34 46",
    ['R'] = "06 00 30 41 42 33 03|23 46",
    ['S'] = "41 30 10 01 02 13 33 44 45 36 16 05",
    ['T'] = "00 40|20 26",
    ['U'] = "00 05 16 36 45 40",
    ['V'] = "00 26 40",
    ['W'] = "00 16 22 36 40",
    ['X'] = "00 46|06 40",
    ['Y'] = "00 23 40|23 26",
    ['Z'] = "00 40 06 46",
    ['a'] = "12 32 43 46 16 05 14 44",
    ['b'] = "00 06|03 12 32 43 45 36 16 05",
    ['c'] = "43 32 12 03 05 16 36 45",
    ['d'] = "40 46|43 32 12 03 05 16 36 45",
    ['e'] = "04 44 43 32 12 03 05 16 36 45",
    ['f'] = "40 30 21 26|12 32",
    ['g'] = "42 47 38 18 07|43 32 12 03 05 16 36 45",
    ['h'] = "00 06|03 12 32 43 46",
    ['i'] = "22 26|20 20",
    ['j'] = "32 37 28 18|30 30",
    ['k'] = "00 06|42 04|23 46",
    ['l'] = "20 26",
    ['m'] = "02 06|03 12 23 26|23 32 43 46",
    ['n'] = "02 06|03 12 32 43 46",
    ['o'] = "12 32 43 45 36 16 05 03 12",
    ['p'] = "02 08|03 12 32 43 45 36 16 05",
    ['q'] = "42 48|43 32 12 03 05 16 36 45",
    ['r'] = "02 06|04 13 22 32",
    ['s'] = "42 12 03 14 34 45 36 06",
    ['t'] = "10 15 26 36|02 32",
    ['u'] = "02 05 16 36 45|42 46",
    ['v'] = "02 26 42",
    ['w'] = "02 16 24 36 42",
    ['x'] = "02 46|06 42",
    ['y'] = "02 26|42 08",
    ['z'] = "02 42 06 46",
    [' '] = "",
    ['.'] = "26 26",
    [','] = "26 17",
    [':'] = "23 23|26 26",
    [';'] = "23 23|26 17",
    ['-'] = "04 34",
    ['+'] = "04 44|22 26",
    ['='] = "03 43|05 45",
    ['/'] = "06 40",
    ['_'] = "07 47",
    ['%'] = "06 40|00 10 11 01 00|35 45 46 36 35",
    ['('] = "30 22 24 36",
    [')'] = "10 22 24 16",
    ['\''] = "20 21",
    ['!'] = "20 24|26 26",
    ['?'] = "01 10 30 41 42 23 24|26 26",
    ['<'] = "41 04 47",
    ['>'] = "01 44 07",
};
static const char unknown_letter[] = "00 40 46 06 00";

/* In units of the grid: from one letter to the next, and the height of a line of text. */
static const double advance = 5.6, em = 8.4;

/* --- painting ---------------------------------------------------------------------------------------------------- */

static void color_of(canvas_color color, unsigned char rgb[3])
{
    static const unsigned char ink[3] = {0x22, 0x22, 0x22}, grid[3] = {0xd4, 0xd4, 0xd4};
    const unsigned char *from = color == CANVAS_INK    ? ink
                                : color == CANVAS_GRID ? grid
                                                       : canvas_palette[(color - CANVAS_SERIES) % CANVAS_PALETTE];
    memcpy(rgb, from, 3);
}

/* Distance of a point from the segment a b; all in pixels. */
static double distance(double x, double y, const double *a, const double *b)
{
    double dx = b[0] - a[0], dy = b[1] - a[1], length = dx * dx + dy * dy;
    double t = length > 0.0 ? ((x - a[0]) * dx + (y - a[1]) * dy) / length : 0.0;
    t = t < 0.0 ? 0.0 : t > 1.0 ? 1.0 : t;
    return hypot(x - a[0] - t * dx, y - a[1] - t * dy);
}

static void blend(unsigned char *pixel, const unsigned char rgb[3], double cover)
{
    for (int i = 0; i < 3; i++) {
        pixel[i] = (unsigned char)(pixel[i] + cover * (rgb[i] - pixel[i]) + 0.5);
    }
}

static int clamp(double value, int most)
{
    return value < 0.0 ? 0 : value > most ? most : (int)value;
}

static void paint_segment(canvas *c, const double *a, const double *b, double width, const unsigned char rgb[3])
{
    int columns = (int)c->width * SCALE, rows = (int)c->height * SCALE;
    double reach = 0.5 * width + 1.0;
    int left = clamp(fmin(a[0], b[0]) - reach, columns), right = clamp(fmax(a[0], b[0]) + reach + 1.0, columns);
    int top = clamp(fmin(a[1], b[1]) - reach, rows), bottom = clamp(fmax(a[1], b[1]) + reach + 1.0, rows);
    for (int y = top; y < bottom; y++) {
        for (int x = left; x < right; x++) {
            double cover = 0.5 * width + 0.5 - distance(x + 0.5, y + 0.5, a, b);
            if (cover > 0.0) {
                blend(c->pixels + 3 * ((size_t)y * (size_t)columns + (size_t)x), rgb, cover < 1.0 ? cover : 1.0);
            }
        }
    }
}

static void png_line(canvas *c, const double *points, int64_t count, canvas_color color, double width)
{
    unsigned char rgb[3];
    color_of(color, rgb);
    for (int64_t i = 0; i + 1 < count; i++) {
        const double *p = points + 2 * i;
        const double a[] = {SCALE * p[0], SCALE * p[1]}, b[] = {SCALE * p[2], SCALE * p[3]};
        paint_segment(c, a, b, SCALE * width, rgb);
    }
}

/* One letter with the beginning of its baseline at x, y. */
static void paint_letter(canvas *c, double x, double y, double unit, const char *letter)
{
    double line[4];
    int known = 0; /* points of the stroke so far, as far as they matter: 0 or 1 */
    for (; *letter != '\0'; letter++) {
        if (*letter == '|') {
            known = 0;
        }
        if (*letter < '0' || *letter > '9') {
            continue;
        }
        line[2 * known] = x + unit * (letter[0] - '0');
        line[2 * known + 1] = y + unit * (letter[1] - '0' - 6);
        if (known == 1) {
            png_line(c, line, 2, CANVAS_INK, 0.95 * unit);
            line[0] = line[2];
            line[1] = line[3];
        }
        known = 1;
        letter++;
    }
}

static void png_text(canvas *c, double x, double y, canvas_anchor anchor, double size, const char *text)
{
    double unit = size / em, width = unit * (advance * (double)strlen(text) - 1.6);
    x -= anchor == CANVAS_MIDDLE ? 0.5 * width : anchor == CANVAS_RIGHT ? width : 0.0;
    for (; *text != '\0'; text++) {
        unsigned char code = (unsigned char)*text;
        const char *letter = code < 128 ? strokes[code] : NULL;
        paint_letter(c, x, y, unit, letter != NULL ? letter : unknown_letter);
        x += unit * advance;
    }
}

static bool png_finish(canvas *c)
{
    bool good = png_write_rgb(c->out, (int)c->width * SCALE, (int)c->height * SCALE, c->pixels);
    free(c->pixels);
    c->pixels = NULL;
    return good;
}

bool canvas_png(canvas *c, FILE *out, double width, double height)
{
    size_t bytes = 3 * (size_t)width * SCALE * (size_t)height * SCALE;
    *c = (canvas){width, height, png_line, png_text, png_finish, out, malloc(bytes)};
    if (c->pixels == NULL) {
        return false;
    }
    memset(c->pixels, 0xff, bytes);
    return true;
}
