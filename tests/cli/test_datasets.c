/* The command's data sets: valid and invalid CSV files, random orders and splits, scaling, and generated digits. */
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "data/dataset.h"
#include "support/testing.h"

static char folder[] = "datasets-XXXXXX";

static int make_folder(void **state)
{
    return mkdtemp(folder) != NULL ? 0 : -1;
}

static int remove_folder(void **state)
{
    return rmdir(folder); /* fails if a test left a file there */
}

static const char *path_of(const char *name)
{
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *bytes, size_t size)
{
    FILE *file = fopen(path_of(name), "wb");
    CHECK(file != NULL && fwrite(bytes, 1, size, file) == size && fclose(file) == 0, "%s cannot be written", name);
}

/* The message is set and contains `part`, and nothing is leaked. */
static void check_refused(bool good, const dataset *data, const dataset_error *error, const char *part)
{
    CHECK(!good, "it was read, %lld rows", (long long)data->rows);
    CHECK(strstr(error->text, part) != NULL, "the message is \"%s\", expected \"%s\" in it", error->text, part);
    CHECK(data->features == NULL && data->labels == NULL, "something is left to free");
}

/* --- CSV --------------------------------------------------------------------------------------------------------- */

typedef struct csv_case {
    const char *text;
    const char *label;
    int64_t rows, cols;
    int32_t classes;
    float features[8];
    int32_t labels[4];
} csv_case;

static const csv_case good_csv[] = {
    {"a,b,y\n1,2,0\n3,4,1\n", NULL, 2, 2, 2, {1, 2, 3, 4}, {0, 1}},
    {"1,2,0\n3,4,1", NULL, 2, 2, 2, {1, 2, 3, 4}, {0, 1}},
    {"\xef\xbb\xbfx,y\r\n1.5,no\r\n-2e3,yes\r\n", NULL, 2, 1, 2, {1.5F, -2000}, {0, 1}},
    {"x;y;z\n1;2;b\n3;4;a\n\n\n5;6;b\n", NULL, 3, 2, 2, {1, 2, 3, 4, 5, 6}, {1, 0, 1}},
    {"x\ty\n1\t10\n2\t9\n3\t9.0\n", NULL, 3, 1, 2, {1, 2, 3}, {1, 0, 0}},
    {"y,a,b\nc,1,2\nd,3,4\n", "y", 2, 2, 2, {1, 2, 3, 4}, {0, 1}},
    {"c,1,2\nd,3,4\n", "1", 2, 2, 2, {1, 2, 3, 4}, {0, 1}},
    {"c,1,2\nd,3,4\n", "0000000000000000000000001", 2, 2, 2, {1, 2, 3, 4}, {0, 1}},
    {"\"a \"\"b\"\", c\",d\n\"x,\ny\", 1 \nz,2\n\"z\",3\n", "a \"b\", c", 3, 1, 2, {1, 2, 3}, {0, 1, 1}},
    {"a,y\n1,\"q\"\r\n\"2\",\"q\"\r\n", NULL, 2, 1, 1, {1, 2}, {0, 0}},
    {"a|y\n1|0\n", NULL, 1, 1, 1, {1}, {0}},
    {"5.1,3.5,setosa\n4.9,3.0,virginica\n", NULL, 2, 2, 2, {5.1F, 3.5F, 4.9F, 3.0F}, {0, 1}},
    {"1,10\n1,9\n1,-1\n", NULL, 3, 1, 3, {1, 1, 1}, {2, 1, 0}},
};

static void check_csv(const csv_case *c)
{
    dataset data;
    dataset_error error = {""};
    bool good = dataset_read_csv(path_of("good.csv"), c->label, &data, &error);
    CHECK(good, "it was refused: %s", error.text);
    CHECK(data.rows == c->rows && data.cols == c->cols && data.classes == c->classes,
          "%lld rows, %lld columns, %d classes", (long long)data.rows, (long long)data.cols, data.classes);
    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        CHECK(data.features[i] == c->features[i], "feature %lld is %g", (long long)i, (double)data.features[i]);
    }
    for (int64_t i = 0; i < c->rows; i++) {
        CHECK(data.labels[i] == c->labels[i], "label %lld is %d", (long long)i, data.labels[i]);
    }
    dataset_release(&data);
    CHECK(data.features == NULL && data.rows == 0, "the release left something");
}

TEST(csv_files_are_read)
{
    for (size_t i = 0; i < sizeof good_csv / sizeof good_csv[0]; i++) {
        test_case("good CSV %zu", i);
        write_file("good.csv", good_csv[i].text, strlen(good_csv[i].text));
        check_csv(&good_csv[i]);
    }
    unlink(path_of("good.csv"));
}

static const struct {
    const char *text;
    const char *label;
    const char *part;
} bad_csv[] = {
    {"", NULL, "is empty"},
    {"\xef\xbb\xbf", NULL, "is empty"},
    {"a\n1\n2\n", NULL, "one column"},
    {"a,y\n", NULL, "no data"},
    {"a,b,y\n1,2,0\n3,1\n", NULL, "line 3: has 2 columns, the first line has 3"},
    {"a,b,y\n1,2,0\n3,1,4,5\n", NULL, "line 3: has 4 columns"},
    {"a,b,y\n1,,0\n", NULL, "line 2, column 2 (b): the cell is empty"},
    {"a,b,y\n1,2,0\n\n1,two,0\n", NULL, "line 4, column 2 (b): 'two' is not a number"},
    {"a,b,y\n1,nan,0\n", NULL, "not finite"},
    {"a,b,y\n1,1e39,0\n", NULL, "'1e39' is not finite in float32"},
    {"a,b,y\n1,2,\n", NULL, "line 2, column 3 (y): the label is missing"},
    {"a,b,y\n1,2,0\n", "z", "no column is called 'z'"},
    {"a,b,y\n1,2,0\n", "4", "no column is called '4'"},
    {"a,b,y\n1,2,0\n", "99999999999999999999", "'99999999999999999999'; columns also have the numbers 1 to 3"},
    {"a,b,y\n1,2,0\n", "-9223372036854775808", "'-9223372036854775808'; columns also have the numbers 1 to 3"},
    {"a,b,y\n1,2,0\n", "18446744073709551617", "no column is called"},
    {"a,b,y\n1,2,0\n", "", "no column is called ''"},
    {"1,2,0\n", "y", "there is no header"},
    {"a,y\n1,\"never\n2,3\n", NULL, "line 2: a quoted field is never closed"},
    {"a,y\n1,\"x\"y\n", NULL, "line 2: text follows a closing quote"},
    {"a,y\n\"1\n\",0\n2,0,\n", NULL, "line 4: has 3 columns"},
};

TEST(bad_csv_files_are_refused)
{
    for (size_t i = 0; i < sizeof bad_csv / sizeof bad_csv[0]; i++) {
        dataset data;
        dataset_error error = {""};
        test_case("bad CSV %zu", i);
        write_file("bad.csv", bad_csv[i].text, strlen(bad_csv[i].text));
        bool good = dataset_read_csv(path_of("bad.csv"), bad_csv[i].label, &data, &error);
        check_refused(good, &data, &error, bad_csv[i].part);
        CHECK(strstr(error.text, "bad.csv") != NULL, "the message does not name the file: %s", error.text);
    }
    unlink(path_of("bad.csv"));
}

/* Opening a pipe for reading blocks until there is a writer: that must not happen. */
static void check_no_file(const char *path, const char *part)
{
    dataset data;
    dataset_error error = {""};
    test_case("%s", part);
    check_refused(dataset_read_csv(path, NULL, &data, &error), &data, &error, part);
}

TEST(what_is_no_text_file_is_refused)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path_of("socket"));
    int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(listening >= 0 && bind(listening, (struct sockaddr *)&address, sizeof address) == 0, "there is no socket");
    CHECK(mkfifo(path_of("pipe"), 0600) == 0, "there is no pipe");
    check_no_file(path_of("pipe"), "not a regular file but a pipe");
    check_no_file(path_of("socket"), "not a regular file but a socket");
    check_no_file("/dev/null", "not a regular file but a device");
    check_no_file(folder, "not a regular file but a folder");
    check_no_file(path_of("none"), "No such file");
    write_file("bad.csv", "a,b\n1,\0,2\n", 10);
    check_no_file(path_of("bad.csv"), "is not text: byte 7");
    unlink(path_of("bad.csv"));
    close(listening);
    unlink(path_of("pipe"));
    unlink(path_of("socket"));
}

/* Worst-case files of four million bytes. Time must be linear in the size and memory bounded by it: quadratic time
 * would exceed the test's timeout. */
enum { HOSTILE = 4 << 20 };

static const struct {
    const char *before, *repeated, *after;
    const char *part; /* of the message; NULL if it is valid */
} hostile_csv[] = {
    {"", ",", "", "the cell is empty"},
    {"", "1,", "1\n", NULL},
    {"", "\"", "", "one column"},
    {"1,", "\"", "x", "text follows"},
    {"", "\"\",", "1\n", "the cell is empty"},
    {"a,b\n1,\"", "\"\"", "", "never closed"},
    {"a,b\n1,\"", "x\n", "", "never closed"},
    {"a,b\n1,\"", "x\n", "\"\n", NULL},
    {"", "\n", "", "is empty"},
    {"a,b\n", "\n", "1,2\n", NULL},
    {"a,b\n", " ", "1,2\n", NULL},
    {"a,b\n", "9", ",1\n", "not finite"},
    {"a,b\n0.", "0", "1,1\n", NULL},
    {"a,b\n1,", "x", "\n", NULL},
    {"", ",", "\n1\n1\n1\n1\n", "the first line has"},
    {"a,b\n", "1,2\n", "", NULL},
    {"a,b\n", "1\n", "", "has 1 columns"},
};

static void write_hostile(const char *before, const char *repeated, const char *after)
{
    size_t length = strlen(repeated);
    FILE *file = fopen(path_of("hostile.csv"), "wb");
    CHECK(file != NULL, "the file cannot be written");
    fputs(before, file);
    for (size_t i = 0; i < HOSTILE / length; i++) {
        fwrite(repeated, 1, length, file);
    }
    fputs(after, file);
    CHECK(fclose(file) == 0, "the file was not written");
}

static void check_ones(const dataset *data, int64_t count)
{
    CHECK(data->rows * data->cols == count, "%lld rows, %lld columns", (long long)data->rows, (long long)data->cols);
    for (int64_t i = 0; i < count; i++) {
        CHECK(data->features[i] == 1, "feature %lld is %g", (long long)i, (double)data->features[i]);
    }
}

TEST(hostile_csv_files_end_soon)
{
    for (size_t i = 0; i < sizeof hostile_csv / sizeof hostile_csv[0]; i++) {
        dataset data;
        dataset_error error = {""};
        test_case("hostile CSV %zu", i);
        write_hostile(hostile_csv[i].before, hostile_csv[i].repeated, hostile_csv[i].after);
        bool good = dataset_read_csv(path_of("hostile.csv"), NULL, &data, &error);
        if (hostile_csv[i].part != NULL) {
            check_refused(good, &data, &error, hostile_csv[i].part);
        } else {
            CHECK(good, "it was refused: %s", error.text);
            if (strncmp(hostile_csv[i].repeated, "1,", 2) == 0) {
                check_ones(&data, HOSTILE / (int64_t)strlen(hostile_csv[i].repeated));
            }
            dataset_release(&data);
        }
    }
    unlink(path_of("hostile.csv"));
}

/* --- orders, splits, scaling ------------------------------------------------------------------------------------- */

TEST(orders_are_permutations)
{
    enum { N = 1000 };
    int64_t first[N];
    int64_t again[N];
    int64_t other[N];
    char seen[N] = {0};
    int fixed = 0;
    dataset_order(N, 5, first);
    dataset_order(N, 5, again);
    dataset_order(N, 6, other);
    for (int i = 0; i < N; i++) {
        assert_in_range(first[i], 0, N - 1);
        CHECK(seen[first[i]]++ == 0, "%lld comes twice", (long long)first[i]);
        fixed += first[i] == i;
    }
    CHECK(fixed < 10, "%d of %d stayed in place", fixed, N); /* expected: one */
    CHECK(memcmp(first, again, sizeof first) == 0, "the same seed gave another order");
    CHECK(memcmp(first, other, sizeof first) != 0, "another seed gave the same order");
    dataset_order(0, 1, first);
    dataset_order(1, 1, first);
    assert_int_equal(first[0], 0);
}

/* Row i holds i and 2 i, and its label is i mod 3. */
static dataset counting_rows(int64_t rows)
{
    dataset data = {.rows = rows, .cols = 2, .classes = 3};
    dataset_error error;
    CHECK(dataset_allocate(&data, &error), "%s", error.text);
    for (int64_t i = 0; i < rows; i++) {
        data.features[2 * i] = (float)i;
        data.features[2 * i + 1] = (float)(2 * i);
        data.labels[i] = (int32_t)(i % 3);
    }
    return data;
}

static void mark_rows(const dataset *part, char *seen)
{
    for (int64_t i = 0; i < part->rows; i++) {
        int64_t row = (int64_t)part->features[2 * i];
        CHECK(seen[row]++ == 0, "row %lld comes twice", (long long)row);
        CHECK(part->features[2 * i + 1] == (float)(2 * row) && part->labels[i] == row % 3, "row %lld was torn apart",
              (long long)row);
    }
}

TEST(splits_deal_every_row_once)
{
    const double fractions[] = {0.2, 0.5, 1e-9, 1 - 1e-9};
    const int64_t tested[] = {20, 51, 1, 100};
    dataset all = counting_rows(101);
    for (int k = 0; k < 4; k++) {
        char seen[101] = {0};
        dataset train;
        dataset test;
        dataset_error error;
        test_case("fraction %g", fractions[k]);
        CHECK(dataset_split(&all, fractions[k], 9, &train, &test, &error), "%s", error.text);
        CHECK(test.rows == tested[k] && train.rows == 101 - tested[k], "%lld rows to test", (long long)test.rows);
        mark_rows(&train, seen);
        mark_rows(&test, seen);
        CHECK(train.classes == 3 && test.classes == 3, "classes are missing");
        dataset_release(&train);
        dataset_release(&test);
    }
    dataset_release(&all);
}

TEST(bad_splits_are_refused)
{
    const double fractions[] = {0, 1, -0.5, 2, (double)NAN};
    dataset all = counting_rows(10);
    dataset train;
    dataset test;
    dataset_error error;
    for (int k = 0; k < 5; k++) {
        test_case("fraction %g", fractions[k]);
        check_refused(dataset_split(&all, fractions[k], 1, &train, &test, &error), &train, &error, "fraction");
    }
    all.rows = 1;
    check_refused(dataset_split(&all, 0.5, 1, &train, &test, &error), &train, &error, "cannot be split");
    dataset_release(&all);
}

TEST(columns_are_standardized)
{
    dataset train = counting_rows(50);
    dataset test = counting_rows(10);
    double sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < 50; i++) {
        train.features[2 * i + 1] = 1e6F; /* constant */
    }
    dataset_standardize(&train, &test);
    for (int64_t i = 0; i < 50; i++) {
        sum += (double)train.features[2 * i];
        squares += (double)train.features[2 * i] * (double)train.features[2 * i];
        CHECK(train.features[2 * i + 1] == 0, "a constant column became %g", (double)train.features[2 * i + 1]);
    }
    CHECK(fabs(sum) < 1e-4 && fabs(squares / 50 - 1) < 1e-5, "mean %g, variance %g", sum / 50, squares / 50);
    CHECK(test.features[6] == train.features[6] && test.features[7] == 0, "the other set was scaled in another way");
    dataset_release(&train);
    dataset_release(&test);
}

/* --- digits ------------------------------------------------------------------------------------------------------ */

TEST(digits_depend_on_seed_and_number)
{
    dataset some;
    dataset later;
    dataset other;
    dataset clean;
    dataset_error error;
    CHECK(digits_draw(0, 2000, 3, false, &some, &error) && digits_draw(1990, 10, 3, false, &later, &error) &&
              digits_draw(0, 10, 4, false, &other, &error) && digits_draw(0, 2000, 3, true, &clean, &error),
          "%s", error.text);
    CHECK(some.cols == DIGITS_SIZE * DIGITS_SIZE && some.images && some.classes == 10, "wrong sizes");
    size_t bytes = 10 * (size_t)some.cols * sizeof(float);
    CHECK(memcmp(some.features + 1990 * some.cols, later.features, bytes) == 0 &&
              memcmp(some.labels + 1990, later.labels, 10 * sizeof(int32_t)) == 0,
          "an image depends on those before it");
    CHECK(memcmp(some.features, other.features, bytes) != 0, "the seed changes nothing");
    for (int64_t i = 0; i < some.rows * some.cols; i++) {
        CHECK(some.features[i] >= 0 && some.features[i] <= 1, "pixel %lld is %g", (long long)i,
              (double)some.features[i]);
    }
    int64_t noisy_corners = 0, clean_corners = 0;
    for (int64_t i = 0; i < some.rows; i++) {
        assert_in_range(some.labels[i], 0, 9);
        assert_int_equal(clean.labels[i], some.labels[i]);
        noisy_corners += some.features[i * some.cols] > 0;
        clean_corners += clean.features[i * some.cols] > 0;
    }
    CHECK(noisy_corners > 400 && clean_corners < 20, "%lld noisy and %lld clean corners have ink",
          (long long)noisy_corners, (long long)clean_corners);
    dataset_release(&some);
    dataset_release(&later);
    dataset_release(&other);
    dataset_release(&clean);
}

TEST(absurd_sizes_are_refused)
{
    dataset data = {.rows = INT64_MAX / 2, .cols = 1000, .classes = 2};
    dataset_error error = {""};
    check_refused(dataset_allocate(&data, &error), &data, &error, "out of memory");
    data = (dataset){.rows = INT64_MAX / 64, .cols = 2, .classes = 2};
    check_refused(dataset_allocate(&data, &error), &data, &error, "out of memory");
}

TEST_MAIN(make_folder, remove_folder)
