/* The files that a training run writes. Unwritable paths are errors before the run; later failures, such as a full
 * disk, are reported and do not stop it. */
#define _POSIX_C_SOURCE 200809L
#include "results.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "terminal/output.h"

/* --- before the run ----------------------------------------------------------------------------------------------- */

static int refuse_path(const char *option, const char *path, const char *what)
{
    return output_fail("train", "%s %.600s: %s", option, path, what);
}

/* The path up to its last slash: the system then checks that it is a folder. */
static int check_folder(const char *option, const char *path)
{
    char folder[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    if (slash != NULL && slash[1] == '\0') {
        return output_fail("train", "%s is '%.600s', expected the name of a file", option, path);
    }
    if (strlen(path) >= sizeof folder) {
        return refuse_path(option, path, strerror(ENAMETOOLONG));
    }
    if (slash != NULL) {
        snprintf(folder, sizeof folder, "%.*s", (int)(slash + 1 - path), path);
    }
    if (access(folder, W_OK | X_OK) != 0) {
        return output_fail("train", "%s %.600s: its folder cannot be written to: %s", option, path, strerror(errno));
    }
    return CLI_OK;
}

/* Checks an existing file of that name. A picture overwrites it and may be written to a device; a checkpoint replaces
 * it. */
static int check_target(const char *option, const char *path, bool written_into)
{
    struct stat facts;
    if (stat(path, &facts) != 0) {
        int problem = errno;
        if (problem == ENOENT && lstat(path, &facts) == 0) {
            return refuse_path(option, path, "is a link that leads nowhere");
        }
        return problem == ENOENT ? CLI_OK : refuse_path(option, path, strerror(problem));
    }
    if (S_ISDIR(facts.st_mode)) {
        return refuse_path(option, path, "is a folder, expected a file");
    }
    if (!S_ISREG(facts.st_mode) && !(written_into && S_ISCHR(facts.st_mode))) {
        return refuse_path(option, path, "is a pipe, a socket or a device, expected a file");
    }
    if (written_into && access(path, W_OK) != 0) {
        return refuse_path(option, path, strerror(errno));
    }
    return CLI_OK;
}

static bool are_same(const char *a, const char *b)
{
    struct stat x, y;
    if (strcmp(a, b) == 0) {
        return true;
    }
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int check_distinct(const char *option, const char *path, const char *other_option, const char *other)
{
    if (other == NULL || !are_same(path, other)) {
        return CLI_OK;
    }
    return output_fail("train", "%s %.600s: is the file of %s, which would be lost", option, path, other_option);
}

static int check_output(const train_plan *plan, const char *option, const char *path, bool written_into)
{
    int status;
    if (path == NULL) {
        return CLI_OK;
    }
    if ((status = check_folder(option, path)) || (status = check_target(option, path, written_into))) {
        return status;
    }
    return check_distinct(option, path, "--data", plan->data);
}

int train_outputs_check(const train_plan *plan)
{
    int status = check_output(plan, "--checkpoint", plan->checkpoint, false);
    if (status == CLI_OK) {
        status = check_output(plan, "--plot", plan->plot, true);
    }
    if (status == CLI_OK && plan->plot != NULL) {
        status = check_distinct("--plot", plan->plot, "--checkpoint", plan->checkpoint);
    }
    if (status == CLI_OK && plan->plot != NULL) {
        status = check_distinct("--plot", plan->plot, "--resume", plan->resume);
    }
    return status;
}

/* --- during the run ----------------------------------------------------------------------------------------------- */

void train_outputs_save(train_session *session, const train_run *run)
{
    train_saves *saves = &session->saves;
    if (session->setup.plan.checkpoint == NULL) {
        return;
    }
    progress_clear(&session->bar);
    const char *problem = train_checkpoint_save(session);
    if (problem == NULL) {
        *saves = (train_saves){.run = run, .step = run->step};
    } else if (saves->failed++ == 0) {
        output_warn("train", "the checkpoint could not be saved: %s", problem);
    }
}

/* --- after the run ------------------------------------------------------------------------------------------------ */

static int report_missing(const train_session *session)
{
    const train_saves *saves = &session->saves;
    const char *path = session->setup.plan.checkpoint;
    if (saves->run == NULL) {
        return output_fail("train", "the checkpoint %.600s is missing: it could not be saved in this run", path);
    }
    return output_fail("train", "the checkpoint %.600s is not from the end of the run: it holds step %lld of %s", path,
                       (long long)saves->step, saves->run->method.name);
}

int train_outputs_finish(const train_session *session)
{
    int status = session->setup.plan.plot != NULL ? train_plot(session) : CLI_OK;
    fflush(stdout);
    return session->saves.failed > 0 ? report_missing(session) : status;
}
