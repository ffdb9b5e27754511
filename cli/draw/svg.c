/* See svg.h. Colors of ink and grid follow the reader's light or dark scheme. */
#include "svg.h"

enum { PALETTE = 8 };

/* Readable on white and on black alike. */
static const unsigned char palette[PALETTE][3] = {
    {0xd6, 0x45, 0x5d}, {0xd9, 0x8a, 0x0b}, {0x1f, 0x9e, 0x89}, {0x3d, 0x7f, 0xd9},
    {0x96, 0x6b, 0xb8}, {0x7a, 0x8a, 0x3a}, {0xb8, 0x6a, 0x4a}, {0x80, 0x80, 0x80},
};

void svg_begin(FILE *out, double width, double height)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
            "font-family=\"sans-serif\">\n",
            width, height, width, height);
    fputs("<style>text{fill:#222}.axis{stroke:#222}.grid{stroke:#ccc}"
          "@media (prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}}</style>\n",
          out);
}

void svg_line(FILE *out, const double *points, int64_t count, svg_color color, double width)
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

void svg_text(FILE *out, double x, double y, svg_anchor anchor, double size, const char *text)
{
    static const char *const names[] = {"start", "middle", "end"};
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%g\">", x, y, names[anchor], size);
    put_escaped(out, text);
    fputs("</text>\n", out);
}

void svg_end(FILE *out)
{
    fputs("</svg>\n", out);
}
