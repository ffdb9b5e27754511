/* IDX files, the format of MNIST: two zero bytes, a type, a rank, the sizes as big-endian 32-bit numbers, and the
 * elements. Sizes are believed only after they were compared with the length of the file, so that a hostile header
 * cannot ask for memory that the file does not fill. */
#include "dataset_idx.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { IDX_UNSIGNED_BYTE = 0x08, IDX_MOST_RANK = 3 };

typedef struct idx_file {
    FILE *stream; /* NULL once it is closed */
    const char *path;
    int rank;
    int64_t sizes[IDX_MOST_RANK];
    int64_t count; /* elements, a byte each */
} idx_file;

static bool fail_and_close(idx_file *f, dataset_error *error, const char *what)
{
    char path[300];
    snprintf(path, sizeof path, "%s", f->path);
    if (f->stream != NULL) {
        fclose(f->stream);
    }
    f->stream = NULL;
    dataset_fail(error, "%s: %s", path, what);
    return false;
}

static bool read_sizes(idx_file *f, dataset_error *error)
{
    f->count = 1;
    for (int i = 0; i < f->rank; i++) {
        unsigned char b[4];
        if (fread(b, 1, sizeof b, f->stream) != sizeof b) {
            return fail_and_close(f, error, "the file ends inside its header");
        }
        f->sizes[i] = (int64_t)b[0] << 24 | (int64_t)b[1] << 16 | (int64_t)b[2] << 8 | (int64_t)b[3];
        if (f->sizes[i] == 0) {
            return fail_and_close(f, error, "the header gives a size of 0");
        }
        if (f->count > INT64_MAX / f->sizes[i]) {
            return fail_and_close(f, error, "the header gives sizes whose product does not fit in 64 bits");
        }
        f->count *= f->sizes[i];
    }
    return true;
}

static bool check_length(idx_file *f, dataset_error *error)
{
    struct stat facts;
    char text[200];
    if (fstat(fileno(f->stream), &facts) != 0) {
        return fail_and_close(f, error, strerror(errno));
    }
    int64_t header = 4 + 4 * f->rank;
    int64_t body = (int64_t)facts.st_size - header;
    if (body == f->count) {
        return true;
    }
    snprintf(text, sizeof text, "the header promises %lld bytes of data, the file has %lld: it is %s",
             (long long)f->count, (long long)body, body < f->count ? "cut short" : "longer than it says");
    return fail_and_close(f, error, text);
}

static bool check_magic(idx_file *f, const unsigned char *magic, int rank, const char *what, dataset_error *error)
{
    char text[200];
    if (magic[0] == 0x1f && magic[1] == 0x8b) {
        return fail_and_close(f, error, "is compressed; unpack it first: gunzip FILE");
    }
    if (magic[0] != 0 || magic[1] != 0) {
        return fail_and_close(f, error, "is not an IDX file: it does not begin with two zero bytes");
    }
    if (magic[2] != IDX_UNSIGNED_BYTE) {
        snprintf(text, sizeof text, "has elements of type 0x%02x, expected 0x08 (unsigned bytes)", magic[2]);
        return fail_and_close(f, error, text);
    }
    if (magic[3] != rank) {
        snprintf(text, sizeof text, "has %d dimensions, expected %d (%s)", magic[3], rank, what);
        return fail_and_close(f, error, text);
    }
    return true;
}

/* Opens a file of bytes with `rank` dimensions; the stream stands at the first element. */
static bool open_idx(const char *path, int rank, const char *what, idx_file *f, dataset_error *error)
{
    unsigned char magic[4];
    *f = (idx_file){.path = path, .rank = rank, .stream = dataset_open(path, error)};
    if (f->stream == NULL) {
        return false;
    }
    if (fread(magic, 1, sizeof magic, f->stream) != sizeof magic) {
        return fail_and_close(f, error, "is too short to be an IDX file");
    }
    return check_magic(f, magic, rank, what, error) && read_sizes(f, error) && check_length(f, error);
}

/* --- pixels and labels ------------------------------------------------------------------------------------------- */

static bool read_pixels(idx_file *f, dataset *data)
{
    unsigned char bytes[4096];
    int64_t done = 0;
    while (done < f->count) {
        size_t want = f->count - done < (int64_t)sizeof bytes ? (size_t)(f->count - done) : sizeof bytes;
        if (fread(bytes, 1, want, f->stream) != want) {
            return false;
        }
        for (size_t i = 0; i < want; i++) {
            data->features[done + (int64_t)i] = (float)bytes[i] / 255.0F;
        }
        done += (int64_t)want;
    }
    return true;
}

/* Classes are 0 to the largest label. */
static bool read_labels(idx_file *f, unsigned char *bytes, int32_t *classes)
{
    if (fread(bytes, 1, (size_t)f->count, f->stream) != (size_t)f->count) {
        return false;
    }
    *classes = 0;
    for (int64_t i = 0; i < f->count; i++) {
        *classes = bytes[i] >= *classes ? bytes[i] + 1 : *classes;
    }
    return true;
}

static bool fill(idx_file *images, idx_file *labels, dataset *data, dataset_error *error)
{
    unsigned char *bytes = malloc((size_t)labels->count);
    if (bytes == NULL) {
        return fail_and_close(labels, error, "out of memory for the labels");
    }
    if (!read_labels(labels, bytes, &data->classes)) {
        free(bytes);
        return fail_and_close(labels, error, "the labels cannot be read");
    }
    bool good = dataset_allocate(data, error) && dataset_number_classes(data, error);
    for (int64_t i = 0; good && i < data->rows; i++) {
        data->labels[i] = bytes[i];
    }
    free(bytes);
    if (good && !read_pixels(images, data)) {
        dataset_release(data);
        return fail_and_close(images, error, "the images cannot be read");
    }
    return good;
}

/* "images-idx3" becomes "labels-idx1", the last time it occurs in the file's own name. */
static bool labels_beside(const char *images, char *labels, size_t size)
{
    static const char from[] = "images-idx3";
    static const char to[] = "labels-idx1";
    const char *slash = strrchr(images, '/');
    const char *found = strstr(slash != NULL ? slash : images, from);
    size_t length = strlen(images);
    if (found == NULL || length >= size) {
        return false;
    }
    memcpy(labels, images, length + 1);
    memcpy(labels + (found - images), to, sizeof to - 1);
    return true;
}

bool dataset_read_idx(const char *images_path, const char *labels_path, dataset *data, dataset_error *error)
{
    char beside[4096];
    idx_file images;
    idx_file labels = {0};
    *data = (dataset){0};
    if (!open_idx(images_path, 3, "images", &images, error)) {
        return false;
    }
    if (labels_path == NULL && !labels_beside(images_path, beside, sizeof beside)) {
        return fail_and_close(&images, error,
                              "where are its labels? The name does not tell: give their file too, or call the pair "
                              "NAME-images-idx3-ubyte and NAME-labels-idx1-ubyte");
    }
    bool good = open_idx(labels_path != NULL ? labels_path : beside, 1, "labels", &labels, error);
    if (good && labels.count != images.sizes[0]) {
        good = dataset_fail(error, "%.180s has %lld labels, %.180s has %lld images: they do not belong together",
                            labels.path, (long long)labels.count, images.path, (long long)images.sizes[0]);
    }
    data->rows = images.sizes[0];
    data->height = images.sizes[1];
    data->width = images.sizes[2];
    data->cols = data->height * data->width;
    good = good && fill(&images, &labels, data, error);
    if (images.stream != NULL) {
        fclose(images.stream);
    }
    if (labels.stream != NULL) {
        fclose(labels.stream);
    }
    if (!good) {
        *data = (dataset){0};
    }
    return good;
}
