/* Images and labels as IDX files. The first byte says how many of the others are the labels' file, from the end; where
 * it is 255 the labels are looked for by the name of the images, and at 254 that does not tell. */
#include <string.h>

#include "data/dataset_idx.h"
#include "fuzz.h"

static void check_data(const dataset *data)
{
    REQUIRE(data->rows > 0 && data->cols == data->height * data->width && data->classes > 0 && data->classes <= 256);
    for (int64_t i = 0; i < data->rows * data->cols; i++) {
        REQUIRE(data->features[i] >= 0.0F && data->features[i] <= 1.0F);
    }
    for (int64_t i = 0; i < data->rows; i++) {
        REQUIRE(data->labels[i] >= 0 && data->labels[i] < data->classes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static int named = -1;
    char by_name[128];
    if (count == 0) {
        return 0;
    }
    size_t labels = bytes[0] < count ? bytes[0] : count - 1;
    size_t images = count - 1 - labels;
    dataset data = {0};
    dataset_error error = {.text = ""};
    const char *images_path = fuzz_file(0, bytes + 1, images);
    const char *labels_path = fuzz_file(1, bytes + 1 + images, labels);
    if (bytes[0] == 255) {
        fuzz_write("x-images-idx3-ubyte", &named, bytes + 1, count - 1);
        snprintf(by_name, sizeof by_name, "%s/x-images-idx3-ubyte", fuzz_folder());
        images_path = by_name;
    }
    labels_path = bytes[0] >= 254 ? NULL : labels_path;
    if (dataset_read_idx(images_path, labels_path, &data, &error)) {
        check_data(&data);
        dataset_release(&data);
    } else {
        REQUIRE(error.text[0] != '\0' && data.features == NULL && data.labels == NULL && data.class_names == NULL);
    }
    return 0;
}
