/* Checkpoints of `torchium train`: settings as text, and for each run its network, the state of its optimizer and of
 * KFAC, and its curve. The order of the data needs no state: it follows from the seed and the step. */
#include "results.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "terminal/output.h"

static const char format_key[] = "train.format", fingerprint_key[] = "train.fingerprint";
enum { FORMAT = 1, NAME = 192 };

/* "--hidden" is stored as "train.hidden". */
static const char *setting_key(const train_setting *setting, char key[NAME])
{
    snprintf(key, NAME, "train.%s", setting->option + 2);
    return key;
}

static const char *run_key(const train_run *run, const char *what, char key[NAME])
{
    snprintf(key, NAME, "train.%s.%s", run->method.name, what);
    return key;
}

static const char *tensor_name(const train_run *run, const char *folder, const char *what, char name[NAME])
{
    snprintf(name, NAME, "%s/%s%s", run->method.name, folder, what);
    return name;
}

/* --- writing ----------------------------------------------------------------------------------------------------- */

static tch_status add_settings(const train_session *session, tch_checkpoint_writer *writer)
{
    train_setting settings[TRAIN_SETTINGS];
    char key[NAME], text[32];
    CLI_TRY(tch_checkpoint_writer_set_integer(writer, format_key, FORMAT));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)session->setup.data.fingerprint);
    CLI_TRY(tch_checkpoint_writer_set_text(writer, fingerprint_key, text));
    train_plan_settings(&session->setup.plan, settings);
    for (int i = 0; i < TRAIN_SETTINGS; i++) {
        if (settings[i].text[0] != '\0') {
            CLI_TRY(tch_checkpoint_writer_set_text(writer, setting_key(&settings[i], key), settings[i].text));
        }
    }
    return TCH_OK;
}

static tch_status add_network(const train_run *run, tch_checkpoint_writer *writer)
{
    char name[NAME];
    for (int32_t i = 0; i < tch_network_parameter_count(run->network); i++) {
        tensor_name(run, "network/", tch_network_parameter_name(run->network, i), name);
        CLI_TRY(tch_checkpoint_writer_add(writer, name, tch_network_parameter(run->network, i)));
    }
    return TCH_OK;
}

static tch_status add_numbers(const train_run *run, tch_checkpoint_writer *writer)
{
    char key[NAME];
    CLI_TRY(tch_checkpoint_writer_set_integer(writer, run_key(run, "step", key), run->step));
    CLI_TRY(tch_checkpoint_writer_set_number(writer, run_key(run, "seconds", key), run->seconds));
    return tch_checkpoint_writer_set_integer(writer, run_key(run, "diverged", key), run->diverged);
}

static void pack_curve(const train_run *run, double *numbers)
{
    for (int64_t i = 0; i < run->point_count; i++) {
        const train_point *point = &run->points[i];
        const double row[TRAIN_POINT_NUMBERS] = {(double)point->step, point->seconds, point->train_loss,
                                                 point->test_loss, point->test_accuracy};
        memcpy(numbers + TRAIN_POINT_NUMBERS * i, row, sizeof row);
    }
}

/* The curves of all runs are in `numbers`, which must live until the writer has saved. */
static tch_status add_runs(train_session *session, tch_checkpoint_writer *writer, double *numbers)
{
    char name[NAME];
    for (int32_t i = 0; i < session->run_count; i++) {
        train_run *run = &session->runs[i];
        int64_t shape[] = {run->point_count, TRAIN_POINT_NUMBERS};
        tch_tensor curve = tch_tensor_view(numbers, TCH_FLOAT64, 2, shape);
        pack_curve(run, numbers);
        numbers += TRAIN_POINT_NUMBERS * run->point_count;
        CLI_TRY(add_numbers(run, writer));
        CLI_TRY(add_network(run, writer));
        CLI_TRY(tch_optimizer_save(run->optimizer, writer, tensor_name(run, "optimizer", "", name)));
        if (run->curvature.kfac != NULL) {
            CLI_TRY(tch_kfac_save(run->curvature.kfac, writer, tensor_name(run, "kfac", "", name)));
        }
        if (run->point_count > 0) {
            CLI_TRY(tch_checkpoint_writer_add(writer, tensor_name(run, "curve", "", name), &curve));
        }
    }
    return TCH_OK;
}

const char *train_checkpoint_save(train_session *session)
{
    size_t points = 1;
    tch_checkpoint_writer *writer = NULL;
    for (int32_t i = 0; i < session->run_count; i++) {
        points += (size_t)session->runs[i].point_count;
    }
    double *numbers = malloc(points * TRAIN_POINT_NUMBERS * sizeof *numbers);
    if (numbers == NULL) {
        return "out of memory for the curves";
    }
    bool failed = tch_checkpoint_writer_create(&writer) || add_settings(session, writer) ||
                  add_runs(session, writer, numbers) ||
                  tch_checkpoint_writer_save(writer, session->setup.context, session->setup.plan.checkpoint);
    tch_checkpoint_writer_destroy(writer);
    free(numbers);
    return failed ? tch_last_error() : NULL;
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

static int open_checkpoint(const char *path, tch_checkpoint **checkpoint)
{
    int64_t format = 0;
    if (tch_checkpoint_open(path, checkpoint)) {
        return output_fail_library("train");
    }
    if (tch_checkpoint_text(*checkpoint, format_key) == NULL) {
        return output_fail("train", "%s is a checkpoint, but not one of 'torchium train'", path);
    }
    if (tch_checkpoint_integer(*checkpoint, format_key, &format) || format != FORMAT) {
        return output_fail("train", "%s has the format %s, and this version knows %d", path,
                           tch_checkpoint_text(*checkpoint, format_key), FORMAT);
    }
    if (!tch_checkpoint_has_checksums(*checkpoint)) {
        output_warn("train", "%s has no checksums, so damage to it would not be seen; the next checkpoint has them",
                    path);
    }
    return CLI_OK;
}

static int refuse_change(const char *option, const char *was, const char *is, const char *path)
{
    return output_fail("train", "%s cannot change: it is '%s' in %s and '%s' here", option, was, path, is);
}

/* Checkpoints are untrusted: a file named by one is not opened. */
static int check_data(const train_plan *plan, const tch_checkpoint *checkpoint)
{
    const char *text = tch_checkpoint_text(checkpoint, "train.data");
    if (plan->data != NULL || text == NULL) {
        return CLI_OK;
    }
    return output_usage("train", "%s was trained with --data '%s': give --data again", plan->resume, text);
}

int train_resume_plan(int argc, char **argv, train_plan *plan, tch_checkpoint **checkpoint)
{
    train_setting settings[TRAIN_SETTINGS];
    bool go, own_length = plan->epochs > 0; /* would contradict the checkpoint's --steps */
    int count = 0, status = open_checkpoint(plan->resume, checkpoint);
    if (status != CLI_OK || (status = check_data(plan, *checkpoint))) {
        return status;
    }
    char **words = malloc(((size_t)argc + 2 * TRAIN_SETTINGS) * sizeof *words);
    if (words == NULL) {
        return output_fail("train", "out of memory");
    }
    train_plan_settings(plan, settings);
    for (int i = 0; i < TRAIN_SETTINGS; i++) {
        char key[NAME];
        const char *text = tch_checkpoint_text(*checkpoint, setting_key(&settings[i], key));
        if (text == NULL || settings[i].path || (own_length && strcmp(settings[i].option, "--steps") == 0)) {
            continue;
        }
        words[count++] = (char *)settings[i].option;
        words[count++] = (char *)text;
    }
    memcpy(words + count, argv, (size_t)argc * sizeof *words);
    status = train_plan_read(count + argc, words, plan, &go);
    free(words);
    /* Compared here: the checkpoint's rates have the names of its optimizers. */
    const char *optimizer = tch_checkpoint_text(*checkpoint, "train.optimizer");
    if (status == CLI_OK && optimizer != NULL && strcmp(optimizer, plan->optimizer) != 0) {
        return refuse_change("--optimizer", optimizer, plan->optimizer, plan->resume);
    }
    return status;
}

static int compare_settings(const train_session *session, const tch_checkpoint *checkpoint, const char *path)
{
    train_setting settings[TRAIN_SETTINGS];
    char key[NAME], fingerprint[32];
    snprintf(fingerprint, sizeof fingerprint, "%016llx", (unsigned long long)session->setup.data.fingerprint);
    const char *known = tch_checkpoint_text(checkpoint, fingerprint_key);
    if (known == NULL || strcmp(known, fingerprint) != 0) {
        return output_fail("train", "the data are not those that %s was trained with", path);
    }
    train_plan_settings(&session->setup.plan, settings);
    for (int i = 0; i < TRAIN_SETTINGS; i++) {
        const char *text = tch_checkpoint_text(checkpoint, setting_key(&settings[i], key));
        text = text != NULL ? text : "";
        if (!settings[i].free && strcmp(text, settings[i].text) != 0) {
            return refuse_change(settings[i].option, text, settings[i].text, path);
        }
    }
    return CLI_OK;
}

static bool read_numbers(train_run *run, const tch_checkpoint *checkpoint)
{
    char key[NAME];
    int64_t diverged = 0;
    if (tch_checkpoint_integer(checkpoint, run_key(run, "step", key), &run->step) ||
        tch_checkpoint_number(checkpoint, run_key(run, "seconds", key), &run->seconds) ||
        tch_checkpoint_integer(checkpoint, run_key(run, "diverged", key), &diverged)) {
        return false;
    }
    run->diverged = diverged != 0;
    return true;
}

static bool read_network(const train_session *session, const train_run *run, const tch_checkpoint *checkpoint)
{
    char name[NAME];
    for (int32_t i = 0; i < tch_network_parameter_count(run->network); i++) {
        tensor_name(run, "network/", tch_network_parameter_name(run->network, i), name);
        if (tch_checkpoint_read(checkpoint, session->setup.context, name, tch_network_parameter(run->network, i))) {
            return false;
        }
    }
    return true;
}

static bool record_rows(train_run *run, const double *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const double *row = numbers + TRAIN_POINT_NUMBERS * i;
        int64_t step = row[0] >= 0.0 && row[0] < 1e15 ? (int64_t)row[0] : 0;
        const train_point point = {step, row[1], row[2], row[3], row[4]};
        if (!train_run_record(run, &point)) {
            return false;
        }
    }
    return true;
}

/* 0 for a run without a curve; -1 for an unreadable one. */
static int64_t curve_length(const tch_checkpoint *checkpoint, const char *name)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    int64_t index = tch_checkpoint_find(checkpoint, name);
    if (index < 0) {
        return 0;
    }
    if (tch_checkpoint_get_info(checkpoint, index, &info) || info.ndim != 2 || info.shape[1] != TRAIN_POINT_NUMBERS) {
        return -1;
    }
    return info.shape[0];
}

static int read_curve(train_run *run, const tch_checkpoint *checkpoint, const char *path)
{
    char name[NAME];
    int64_t count = curve_length(checkpoint, tensor_name(run, "curve", "", name));
    int64_t shape[] = {count, TRAIN_POINT_NUMBERS};
    if (count == 0) {
        return CLI_OK;
    }
    if (count < 0) {
        return output_fail("train", "%s: the tensor %s is not a table of %d columns", path, name, TRAIN_POINT_NUMBERS);
    }
    double *numbers = malloc((size_t)count * TRAIN_POINT_NUMBERS * sizeof *numbers);
    if (numbers == NULL) {
        return output_fail("train", "out of memory for the curve of %s", run->method.name);
    }
    tch_tensor curve = tch_tensor_view(numbers, TCH_FLOAT64, 2, shape);
    int status = CLI_OK;
    if (tch_checkpoint_read(checkpoint, NULL, name, &curve)) {
        status = output_fail_library("train");
    } else if (!record_rows(run, numbers, count)) {
        status = output_fail("train", "out of memory for the curve of %s", run->method.name);
    }
    free(numbers);
    return status;
}

static int resume_run(train_session *session, train_run *run, tch_checkpoint *checkpoint, const char *path)
{
    char name[NAME];
    const train_plan *plan = &session->setup.plan;
    if (!read_numbers(run, checkpoint) || !read_network(session, run, checkpoint) ||
        tch_optimizer_load(run->optimizer, checkpoint, tensor_name(run, "optimizer", "", name))) {
        return output_fail_library("train");
    }
    if (run->curvature.kfac != NULL &&
        tch_kfac_load(run->curvature.kfac, checkpoint, tensor_name(run, "kfac", "", name))) {
        return output_fail_library("train");
    }
    if (run->step < 0 || run->step > plan->steps) {
        return output_fail("train", "%s has run %lld steps in %s, and %lld are requested", run->method.name,
                           (long long)run->step, path, (long long)plan->steps);
    }
    session->bar.total -= (double)run->step;
    return read_curve(run, checkpoint, path);
}

int train_resume_runs(train_session *session, tch_checkpoint *checkpoint, const char *path)
{
    int status = compare_settings(session, checkpoint, path);
    for (int32_t i = 0; i < session->run_count && status == CLI_OK; i++) {
        status = resume_run(session, &session->runs[i], checkpoint, path);
    }
    return status;
}
