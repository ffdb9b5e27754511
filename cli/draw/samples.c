/* See samples.h. */
#include "samples.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "png_rgb.h"

enum { MOST_SIDE = 30000 }; /* pixels */

static unsigned char shade(float value)
{
    float ink = value < 0 ? 0 : value > 1 ? 1 : value;
    return (unsigned char)(255.0F * (1.0F - ink) + 0.5F);
}

static void paint(const dataset *data, int64_t columns, int64_t zoom, int64_t width, int64_t height,
                  unsigned char *pixels)
{
    for (int64_t y = 0; y < height; y++) {
        for (int64_t x = 0; x < width; x++) {
            int64_t image = y / zoom / data->height * columns + x / zoom / data->width;
            int64_t pixel = y / zoom % data->height * data->width + x / zoom % data->width;
            memset(pixels + 3 * (y * width + x), shade(data->features[image * data->cols + pixel]), 3);
        }
    }
}

static bool write_picture(const char *path, int64_t width, int64_t height, const unsigned char *pixels,
                          dataset_error *error)
{
    FILE *out = fopen(path, "wb");
    if (out == NULL) {
        return dataset_fail(error, "%.300s cannot be written: %s", path, strerror(errno));
    }
    bool written = png_write_rgb(out, (int)width, (int)height, pixels);
    written = fclose(out) == 0 && written;
    return written ? true : dataset_fail(error, "%.300s cannot be written: %s", path, strerror(errno));
}

bool samples_write_png(const char *path, const dataset *data, int64_t rows, int64_t columns, int64_t zoom,
                       dataset_error *error)
{
    if (data->width == 0) {
        return dataset_fail(error, "the rows of this data set are not images");
    }
    if (rows < 1 || columns < 1 || zoom < 1 || rows > data->rows || columns > data->rows / rows) {
        return dataset_fail(error, "%lld by %lld samples were requested, there are %lld images", (long long)rows,
                            (long long)columns, (long long)data->rows);
    }
    if (columns > MOST_SIDE / zoom / data->width || rows > MOST_SIDE / zoom / data->height) {
        return dataset_fail(error, "a picture can have at most %d pixels each way", MOST_SIDE);
    }
    int64_t width = columns * data->width * zoom;
    int64_t height = rows * data->height * zoom;
    unsigned char *pixels = malloc((size_t)(3 * width * height));
    if (pixels == NULL) {
        return dataset_fail(error, "out of memory for a picture of %lld by %lld pixels", (long long)width,
                            (long long)height);
    }
    paint(data, columns, zoom, width, height, pixels);
    bool good = write_picture(path, width, height, pixels, error);
    free(pixels);
    return good;
}
