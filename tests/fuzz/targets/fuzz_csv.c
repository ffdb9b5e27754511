/* CSV data sets: accepted ones have finite features and valid class labels; rejected ones have a message. The first
 * byte chooses the label; an empty input has no file. */
#include <math.h>
#include <string.h>

#include "data/dataset.h"
#include "fuzz.h"

static void check_data(const dataset *data)
{
    REQUIRE(data->rows > 0 && data->cols > 0 && data->classes > 0);
    for (int64_t i = 0; i < data->rows * data->cols; i++) {
        REQUIRE(isfinite(data->features[i]));
    }
    for (int64_t i = 0; i < data->rows; i++) {
        REQUIRE(data->labels[i] >= 0 && data->labels[i] < data->classes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *const labels[] = {NULL, "label", "1", "3", "-1", ""};
    const char *label = labels[count > 0 ? bytes[0] / 8 % 6 : 0];
    dataset data = {0};
    dataset_error error = {.text = ""};
    const char *path = count > 0 ? fuzz_file(0, bytes + 1, count - 1) : "/nonexistent";
    fuzz_faults_begin(fuzz_hash(bytes, count));
    bool good = dataset_read_csv(path, label, &data, &error);
    (void)fuzz_faults_end();
    if (good) {
        check_data(&data);
        dataset_release(&data);
    } else {
        REQUIRE(error.text[0] != '\0' && data.features == NULL && data.labels == NULL);
    }
    return 0;
}
