/* A page as SVG. Colors of ink and grid follow the reader's light or dark scheme. */
#include <errno.h>

#include "canvas.h"

const unsigned char canvas_palette[CANVAS_PALETTE][3] = {
    {0xd6, 0x45, 0x5d}, {0xd9, 0x8a, 0x0b}, {0x1f, 0x9e, 0x89}, {0x3d, 0x7f, 0xd9},
    {0x96, 0x6b, 0xb8}, {0x7a, 0x8a, 0x3a}, {0xb8, 0x6a, 0x4a}, {0x80, 0x80, 0x80},
};

static void svg_line(canvas *c, const double *points, int64_t count, canvas_color color, double width)
{
    fputs("<polyline fill=\"none\" ", c->out);
    if (color < CANVAS_SERIES) {
        fprintf(c->out, "class=\"%s\"", color == CANVAS_INK ? "axis" : "grid");
    } else {
        const unsigned char *rgb = canvas_palette[(color - CANVAS_SERIES) % CANVAS_PALETTE];
        fprintf(c->out, "stroke=\"#%02x%02x%02x\" stroke-linejoin=\"round\"", rgb[0], rgb[1], rgb[2]);
    }
    fprintf(c->out, " stroke-width=\"%g\" points=\"", width);
    for (int64_t i = 0; i < count; i++) {
        fprintf(c->out, "%s%.1f,%.1f", i > 0 ? " " : "", points[2 * i], points[2 * i + 1]);
    }
    fputs("\"/>\n", c->out);
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

static void svg_text(canvas *c, double x, double y, canvas_anchor anchor, double size, const char *text)
{
    static const char *const names[] = {"start", "middle", "end"};
    fprintf(c->out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%g\">", x, y, names[anchor], size);
    put_escaped(c->out, text);
    fputs("</text>\n", c->out);
}

static bool svg_finish(canvas *c)
{
    fputs("</svg>\n", c->out);
    return fflush(c->out) == 0 && !ferror(c->out);
}

bool canvas_svg(canvas *c, FILE *out, double width, double height)
{
    *c = (canvas){width, height, svg_line, svg_text, svg_finish, out, NULL};
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
            "font-family=\"sans-serif\">\n",
            width, height, width, height);
    fputs("<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc}"
          "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>\n",
          out);
    return true;
}
