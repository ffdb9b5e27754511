/* PNG files in color. */
#ifndef CLI_PNG_RGB_H
#define CLI_PNG_RGB_H

#include <stdbool.h>
#include <stdio.h>

/* Writes an image of three bytes a pixel. */
bool png_write_rgb(FILE *out, int width, int height, const unsigned char *pixels);

#endif
