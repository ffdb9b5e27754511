/* Images and labels as IDX files. The first byte says how many of the others are the labels' file, from the end; where
 * it is 255 these are ten, and the file is found by the name of the images; at 254 that name does not tell, and at 253
 * the file is not there. */
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
    static int named[3] = {-1, -1, -1};
    char by_name[128];
    if (count == 0) {
        return 0;
    }
    size_t labels = bytes[0] >= 253 ? 10 : bytes[0];
    labels = labels < count ? labels : count - 1;
    size_t images = count - 1 - labels;
    dataset data = {0};
    dataset_error error = {.text = ""};
    const char *images_path = fuzz_file(0, bytes + 1, images);
    const char *labels_path = fuzz_file(1, bytes + 1 + images, labels);
    if (bytes[0] == 255 || bytes[0] == 253) {
        const char *name = bytes[0] == 255 ? "x-images-idx3-ubyte" : "y-images-idx3-ubyte";
        fuzz_write(name, &named[bytes[0] - 253], bytes + 1, images);
        fuzz_write("x-labels-idx1-ubyte", &named[1], bytes + 1 + images, labels);
        snprintf(by_name, sizeof by_name, "%s/%s", fuzz_folder(), name);
        images_path = by_name;
    }
    labels_path = bytes[0] >= 253 ? NULL : labels_path;
    fuzz_faults_begin(fuzz_hash(bytes, count));
    bool good = dataset_read_idx(images_path, labels_path, &data, &error);
    (void)fuzz_faults_end();
    if (good) {
        check_data(&data);
        dataset_release(&data);
    } else {
        REQUIRE(error.text[0] != '\0' && data.features == NULL && data.labels == NULL && data.class_names == NULL);
    }
    return 0;
}
