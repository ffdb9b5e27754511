/* The plan of a session: parsed options, defaults that depend on the data, and configurations of the optimizers.
 * docs/training.md says how the rates were found. */
#include "plan.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "terminal/options.h"
#include "terminal/output.h"

static const double pi = 3.14159265358979323846;

enum { MOST_STEPS = 1000000000 };

/* The interval and Shampoo's power of the measurements in docs/training.md. */
static void suit_period(tch_optim_config *config)
{
    config->shampoo.exponent_override = config->kind == TCH_OPTIM_SHAMPOO ? 0 : config->shampoo.exponent_override;
    config->shampoo.precondition_frequency = 10;
    config->shampoo.refresh_drift = 0.0;
}

static void suit_sgd(tch_optim_config *config)
{
    config->momentum = 0.9;
}

/* One rate for all parameters, as other methods have. */
static void suit_muon(tch_optim_config *config)
{
    config->adamw.lr = config->lr;
}

/* SGD after preconditioning by the curvature. */
static void suit_curvature(tch_optim_config *config)
{
    config->momentum = 0.7;
    config->nesterov = 1;
}

static const train_method known_methods[TRAIN_METHODS] = {
    {"shampoo", TCH_OPTIM_SHAMPOO, TRAIN_PLAIN, 0.01, 0.02, suit_period, false},
    {"kl_shampoo", TCH_OPTIM_KL_SHAMPOO, TRAIN_PLAIN, 0.03, 0.04, suit_period, false},
    {"soap", TCH_OPTIM_SOAP, TRAIN_PLAIN, 0.01, 0.02, suit_period, false},
    {"muon", TCH_OPTIM_MUON, TRAIN_PLAIN, 0.02, 0.04, suit_muon, true},
    {"normuon", TCH_OPTIM_NORMUON, TRAIN_PLAIN, 0.01, 0.04, NULL, true},
    {"kfac", TCH_OPTIM_SGD, TRAIN_KFAC, 0.05, 0.0, suit_curvature, false},
    {"ekfac", TCH_OPTIM_SGD, TRAIN_EKFAC, 0.05, 0.0, suit_curvature, false},
    {"natural", TCH_OPTIM_SGD, TRAIN_NATURAL, 10.0, 0.0, suit_curvature, false},
    {"adamw", TCH_OPTIM_ADAMW, TRAIN_PLAIN, 0.01, 0.02, NULL, false},
    {"lion", TCH_OPTIM_LION, TRAIN_PLAIN, 0.003, 0.002, NULL, false},
    {"sgd", TCH_OPTIM_SGD, TRAIN_PLAIN, 0.3, 1.0, suit_sgd, false},
};

static const char *const activation_names[TCH_ACTIVATION_COUNT] = {"none", "relu", "tanh", "gelu"};
static const char *const task_names[] = {"classify", "autoencode"};
static const char *const schedule_names[] = {"constant", "cosine"};
static const char *const fisher_names[] = {"sampled", "empirical"};

static const train_plan defaults = {
    .task = "classify",
    .optimizer = "shampoo,adamw",
    .schedule = "cosine",
    .device = "auto",
    .samples = 12000,
    .test_fraction = 0.2,
    .warmup = -1,
    .damping = -1.0,
    .kl_clip = -1.0,
};

/* Defaults of the tasks. */
static const struct {
    const char *hidden, *activation;
    int64_t batch, steps, warmup;
} task_defaults[] = {{"256,128", "relu", 256, 150, 0}, {"128,64,32,12,32,64,128", "tanh", 512, 500, 50}};

static const char description[] =
    "Trains a multilayer network to classify a data set or to reproduce it (an autoencoder), with one optimizer or\n"
    "several in turn, all from the same initial weights and over the same batches. Without --data it draws distorted\n"
    "digits. At the end a table compares them by steps and by time. Ctrl-C stops after the current step, writes a\n"
    "checkpoint if --checkpoint is given, and prints the table so far.";

int train_plan_read(int argc, char **argv, train_plan *plan, bool *go)
{
    *plan = defaults;
    const option_spec specs[] = {
        {"--data", "FILE", OPTION_TEXT, &plan->data, 0, 0, "a CSV file: features and a label in each row"},
        {"--label", "COLUMN", OPTION_TEXT, &plan->label_column, 0, 0, "name or number of the label's column (last)"},
        {"--samples", "N", OPTION_INTEGER, &plan->samples, 2, 1e7, "number of built-in digits (12000)"},
        {"--test-fraction", "X", OPTION_REAL, &plan->test_fraction, 0.001, 0.999,
         "fraction held out for testing (0.2)"},
        {"--task", "NAME", OPTION_TEXT, &plan->task, 0, 0,
         "classify or autoencode; below, defaults of the latter come second (classify)"},
        {"--seed", "N", OPTION_INTEGER, &plan->seed, 0, 9e18, "random seed of digits, weights and order (0)"},
        {"--optimizer", "NAMES", OPTION_TEXT, &plan->optimizer, 0, 0,
         "shampoo,kl_shampoo,soap,muon,normuon,kfac,ekfac,natural,adamw,lion,sgd (shampoo,adamw)"},
        {"--lr", "X", OPTION_TEXT, &plan->lr, 0, 0, "learning rate, or rates: shampoo=0.01,adamw=0.003"},
        {"--schedule", "NAME", OPTION_TEXT, &plan->schedule, 0, 0, "learning rate: constant or cosine (cosine)"},
        {"--warmup", "N", OPTION_INTEGER, &plan->warmup, 0, 1e9, "warm-up steps (0 or 50)"},
        {"--weight-decay", "X", OPTION_REAL, &plan->weight_decay, 0, 1e6, "weight decay of every optimizer (0)"},
        {"--hidden", "WIDTHS", OPTION_TEXT, &plan->hidden, 0, 0,
         "hidden layers, or 'none' (256,128 or 128,64,32,12,32,64,128)"},
        {"--activation", "F", OPTION_TEXT, &plan->activation, 0, 0, "relu, tanh, gelu or none (relu or tanh)"},
        {"--batch", "N", OPTION_INTEGER, &plan->batch, 1, 1e7, "rows in a step (256 or 512)"},
        {"--steps", "N", OPTION_INTEGER, &plan->steps, 1, MOST_STEPS, "steps for each optimizer (150 or 500)"},
        {"--epochs", "N", OPTION_INTEGER, &plan->epochs, 1, 1e9, "the same in epochs"},
        {"--precondition-frequency", "N", OPTION_INTEGER, &plan->precondition_frequency, 1, 1e9,
         "shampoo, kl_shampoo, soap, kfac: steps between refreshes (10)"},
        {"--block", "N", OPTION_INTEGER, &plan->block, 1, 1e6, "shampoo, kl_shampoo, soap: largest block with factors"},
        {"--damping", "X", OPTION_REAL, &plan->damping, 1e-12, 1e6, "kfac, ekfac, natural: damping"},
        {"--kl-clip", "X", OPTION_REAL, &plan->kl_clip, 0, 1e6, "kfac, ekfac: bound on a step's change; 0 for none"},
        {"--fisher", "LABELS", OPTION_TEXT, &plan->fisher, 0, 0, "kfac, ekfac: sampled or empirical (sampled)"},
        {"--per-sample-clip", "C", OPTION_REAL, &plan->per_sample_clip, 1e-12, 1e12,
         "clip every sample's gradient to this norm"},
        {"--device", "D", OPTION_TEXT, &plan->device, 0, 0, "auto, cpu, cuda or cuda:N (auto)"},
        {"--threads", "N", OPTION_INTEGER, &plan->threads, 1, 1024, "CPU threads (all)"},
        {"--log-every", "N", OPTION_INTEGER, &plan->log_every, 1, 1e9, "steps between measurements (steps / 50)"},
        {"--plot", "FILE", OPTION_TEXT, &plan->plot, 0, 0, "learning curves, an .svg file"},
        {"--checkpoint", "FILE", OPTION_TEXT, &plan->checkpoint, 0, 0, "saved at the end and when interrupted"},
        {"--checkpoint-every", "N", OPTION_INTEGER, &plan->checkpoint_every, 1, 1e9, "also save every N steps"},
        {"--resume", "FILE", OPTION_TEXT, &plan->resume, 0, 0, "resume from a checkpoint, with its settings"},
        {"--json", NULL, OPTION_FLAG, &plan->json, 0, 0, "one JSON object per line instead of text"},
    };
    const option_table table = {"train", description, specs, sizeof specs / sizeof specs[0]};
    options_result result = options_read(&table, argc, argv);
    *go = result == OPTIONS_GO;
    return result == OPTIONS_WRONG ? CLI_USAGE : CLI_OK;
}

/* --- parsing ------------------------------------------------------------------------------------------------------ */

/* Copies the next word of a comma-separated list to `word`. False at the end. */
static bool next_word(const char **list, char word[TRAIN_TEXT])
{
    if (*list == NULL) {
        return false;
    }
    size_t length = strcspn(*list, ",");
    snprintf(word, TRAIN_TEXT, "%.*s", (int)(length < TRAIN_TEXT ? length : TRAIN_TEXT - 1), *list);
    *list = (*list)[length] == ',' ? *list + length + 1 : NULL;
    return true;
}

static bool read_number(const char *text, double *number)
{
    char *end = NULL;
    *number = strtod(text, &end);
    return text[0] != '\0' && text[strspn(text, "+-.0123456789eE")] == '\0' && *end == '\0' && isfinite(*number);
}

static int unknown_word(const char *option, const char *word, const char *const *names, size_t count)
{
    const char *nearest = options_nearest(word, names, count);
    char all[TRAIN_TEXT] = "";
    for (size_t i = 0; i < count; i++) {
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", names[i]);
    }
    if (nearest != NULL) {
        return output_usage("train", "%s: unknown '%s'; did you mean '%s'?", option, word, nearest);
    }
    return output_usage("train", "%s: unknown '%s', expected one of %s", option, word, all);
}

/* The index of a word in names, or -1. */
static int find_word(const char *word, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(word, names[i]) == 0) {
            return (int)i;
        }
    }
    return -1;
}

static int parse_methods(train_plan *plan)
{
    const char *names[TRAIN_METHODS], *list = plan->optimizer;
    char word[TRAIN_TEXT];
    for (int i = 0; i < TRAIN_METHODS; i++) {
        names[i] = known_methods[i].name;
    }
    plan->method_count = 0;
    while (next_word(&list, word)) {
        int found = find_word(word, names, TRAIN_METHODS);
        if (found < 0) {
            return unknown_word("--optimizer", word, names, TRAIN_METHODS);
        }
        for (int32_t i = 0; i < plan->method_count; i++) {
            if (plan->methods[i].name == names[found]) {
                return output_usage("train", "--optimizer names '%s' twice", word);
            }
        }
        train_method *method = &plan->methods[plan->method_count++];
        *method = known_methods[found];
        if (plan->autoencode && method->curvature != TRAIN_PLAIN) {
            return output_usage("train", "--optimizer %s needs --task classify: its curvature is that of labels", word);
        }
        method->rate = plan->autoencode ? method->autoencode_rate : method->rate;
    }
    return CLI_OK;
}

/* An entry of --lr: "0.01" for all methods, "shampoo=0.01" for one. */
static int parse_rate(train_plan *plan, const char *word)
{
    const char *sign = strchr(word, '='), *text = sign ? sign + 1 : word;
    size_t length = sign ? (size_t)(sign - word) : 0;
    double rate;
    bool used = sign == NULL;
    if (!read_number(text, &rate) || rate < 0.0 || rate > 1e6) {
        return output_usage(
            "train", "--lr must be numbers from 0 to 1e6, as in 0.01 or shampoo=0.01,adamw=0.003, not '%s'", word);
    }
    for (int32_t i = 0; i < plan->method_count; i++) {
        train_method *method = &plan->methods[i];
        bool meant = sign == NULL || (strlen(method->name) == length && strncmp(method->name, word, length) == 0);
        method->rate = meant ? rate : method->rate;
        used = used || meant;
    }
    if (!used) {
        return output_usage("train", "--lr names '%.*s', which is not among the optimizers '%s'", (int)length, word,
                            plan->optimizer);
    }
    return CLI_OK;
}

static int parse_rates(train_plan *plan)
{
    const char *list = plan->lr;
    char word[TRAIN_TEXT];
    int status = CLI_OK;
    while (status == CLI_OK && next_word(&list, word)) {
        status = parse_rate(plan, word);
    }
    size_t used = 0;
    for (int32_t i = 0; i < plan->method_count; i++) {
        used += (size_t)snprintf(plan->lr_text + used, sizeof plan->lr_text - used, "%s%s=%.17g", i ? "," : "",
                                 plan->methods[i].name, plan->methods[i].rate);
    }
    return status;
}

static int parse_hidden(train_plan *plan)
{
    const char *list = strcmp(plan->hidden, "none") == 0 ? NULL : plan->hidden;
    char word[TRAIN_TEXT];
    size_t used = 0;
    plan->hidden_count = 0;
    snprintf(plan->hidden_text, sizeof plan->hidden_text, "none");
    while (next_word(&list, word)) {
        double width;
        if (!read_number(word, &width) || width != floor(width) || width < 1 || width > 1e6) {
            return output_usage("train", "--hidden must be integers from 1 to 1000000, as in 256,128, not '%s'", word);
        }
        if (plan->hidden_count == TRAIN_HIDDEN) {
            return output_usage("train", "--hidden has at most %d layers", TRAIN_HIDDEN);
        }
        used += (size_t)snprintf(plan->hidden_text + used, sizeof plan->hidden_text - used, "%s%.0f",
                                 plan->hidden_count ? "," : "", width);
        plan->widths[plan->hidden_count++] = (int64_t)width;
    }
    return CLI_OK;
}

/* Rejects contradictory settings. */
static int check_settings(const train_plan *plan)
{
    if (plan->steps > 0 && plan->epochs > 0) {
        return output_usage("train", "give --steps or --epochs, not both");
    }
    if (plan->label_column != NULL && plan->data == NULL) {
        return output_usage("train", "--label names a column of --data, which is missing");
    }
    if (plan->checkpoint_every > 0 && plan->checkpoint == NULL) {
        return output_usage("train", "--checkpoint-every belongs to --checkpoint, which is missing");
    }
    size_t length = plan->plot != NULL ? strlen(plan->plot) : 0;
    if (plan->plot != NULL && (length < 5 || strcmp(plan->plot + length - 4, ".svg") != 0)) {
        return output_usage("train", "--plot writes SVG: use a name that ends in .svg, not '%s'", plan->plot);
    }
    return CLI_OK;
}

int train_plan_parse(train_plan *plan)
{
    int status, task = find_word(plan->task, task_names, 2);
    if (task < 0) {
        return unknown_word("--task", plan->task, task_names, 2);
    }
    plan->autoencode = task == 1;
    plan->hidden = plan->hidden != NULL ? plan->hidden : task_defaults[task].hidden;
    plan->activation = plan->activation != NULL ? plan->activation : task_defaults[task].activation;
    plan->batch = plan->batch > 0 ? plan->batch : task_defaults[task].batch;
    plan->warmup = plan->warmup >= 0 ? plan->warmup : task_defaults[task].warmup;
    if ((status = check_settings(plan)) || (status = parse_methods(plan)) || (status = parse_rates(plan)) ||
        (status = parse_hidden(plan))) {
        return status;
    }
    int activation = find_word(plan->activation, activation_names, TCH_ACTIVATION_COUNT);
    if (activation < 0) {
        return unknown_word("--activation", plan->activation, activation_names, TCH_ACTIVATION_COUNT);
    }
    int schedule = find_word(plan->schedule, schedule_names, 2);
    if (schedule < 0) {
        return unknown_word("--schedule", plan->schedule, schedule_names, 2);
    }
    int fisher = plan->fisher != NULL ? find_word(plan->fisher, fisher_names, 2) : 0;
    if (fisher < 0) {
        return unknown_word("--fisher", plan->fisher, fisher_names, 2);
    }
    plan->f = (tch_activation)activation;
    plan->empirical = fisher == 1;
    plan->cosine = schedule == 1;
    return CLI_OK;
}

/* --- values that depend on the data ------------------------------------------------------------------------------- */

int train_plan_settle(train_plan *plan, int64_t rows)
{
    plan->batch = plan->batch < rows ? plan->batch : rows;
    int64_t batches = rows / plan->batch;
    if (plan->epochs > MOST_STEPS / batches) {
        return output_usage("train", "--epochs must be from 1 to %lld with %lld batches in each, not '%lld'",
                            (long long)(MOST_STEPS / batches), (long long)batches, (long long)plan->epochs);
    }
    if (plan->epochs > 0) {
        plan->steps = plan->epochs * batches;
    } else if (plan->steps == 0) {
        plan->steps = task_defaults[plan->autoencode].steps;
    }
    if (plan->log_every == 0) {
        plan->log_every = plan->steps > 50 ? plan->steps / 50 : 1;
    }
    return CLI_OK;
}

/* The text is empty if the option was not given. */
__attribute__((format(printf, 4, 5))) static void add_setting(train_setting **next, const char *option, bool given,
                                                              const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    **next = (train_setting){.option = option};
    if (given) {
        vsnprintf((*next)->text, sizeof(*next)->text, format, arguments);
    }
    (*next)++;
    va_end(arguments);
}

void train_plan_settings(const train_plan *plan, train_setting settings[TRAIN_SETTINGS])
{
    train_setting *next = settings;
    const int64_t period = plan->precondition_frequency;
    add_setting(&next, "--data", plan->data != NULL, "%s", plan->data);
    next[-1].free = next[-1].path = true; /* the rows are compared instead of the path */
    add_setting(&next, "--label", plan->label_column != NULL, "%s", plan->label_column);
    add_setting(&next, "--samples", plan->data == NULL, "%lld", (long long)plan->samples);
    add_setting(&next, "--test-fraction", true, "%.17g", plan->test_fraction);
    add_setting(&next, "--task", plan->autoencode, "autoencode");
    add_setting(&next, "--seed", plan->seed > 0, "%lld", (long long)plan->seed);
    add_setting(&next, "--optimizer", true, "%s", plan->optimizer);
    add_setting(&next, "--lr", true, "%s", plan->lr_text);
    add_setting(&next, "--schedule", true, "%s", plan->schedule);
    add_setting(&next, "--warmup", plan->autoencode || plan->warmup > 0, "%lld", (long long)plan->warmup);
    add_setting(&next, "--weight-decay", true, "%.17g", plan->weight_decay);
    add_setting(&next, "--hidden", true, "%s", plan->hidden_text);
    add_setting(&next, "--activation", plan->activation != NULL, "%s", plan->activation);
    add_setting(&next, "--batch", true, "%lld", (long long)plan->batch);
    add_setting(&next, "--precondition-frequency", period > 0, "%lld", (long long)period);
    add_setting(&next, "--block", plan->block > 0, "%lld", (long long)plan->block);
    add_setting(&next, "--damping", plan->damping > 0.0, "%.17g", plan->damping);
    add_setting(&next, "--kl-clip", plan->kl_clip >= 0.0, "%.17g", plan->kl_clip);
    add_setting(&next, "--fisher", plan->fisher != NULL, "%s", plan->fisher);
    add_setting(&next, "--per-sample-clip", plan->per_sample_clip > 0.0, "%.17g", plan->per_sample_clip);
    add_setting(&next, "--steps", plan->steps > 0, "%lld", (long long)plan->steps);
    next[-1].free = !plan->cosine; /* a constant rate does not depend on the length */
    add_setting(&next, "--log-every", plan->log_every > 0, "%lld", (long long)plan->log_every);
    next[-1].free = true;
}

/* --- the optimizers ---------------------------------------------------------------------------------------------- */

tch_optim_config train_plan_config(const train_plan *plan, const train_method *method)
{
    tch_optim_config config = tch_optim_defaults(method->kind);
    config.lr = method->rate;
    config.weight_decay = plan->weight_decay;
    config.memory.seed = (uint64_t)plan->seed;
    if (method->suit != NULL) {
        method->suit(&config);
    }
    if (plan->precondition_frequency > 0) {
        config.shampoo.precondition_frequency = (int32_t)plan->precondition_frequency;
        config.shampoo.refresh_drift = 0.0;
    }
    if (plan->block > 0) {
        config.shampoo.max_preconditioner_dim = plan->block;
        config.soap.block = 1;
    }
    return config;
}

tch_kfac_config train_plan_kfac(const train_plan *plan, train_curvature kind)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.method = kind == TRAIN_EKFAC ? TCH_KFAC_EKFAC : TCH_KFAC_EIGEN;
    config.damping = train_plan_damping(plan, kind);
    config.kl_clip = plan->kl_clip >= 0.0 ? plan->kl_clip : 0.3;
    return config;
}

double train_plan_damping(const train_plan *plan, train_curvature kind)
{
    double own = kind == TRAIN_NATURAL ? 10.0 : 0.04;
    return plan->damping > 0.0 ? plan->damping : own;
}

int64_t train_plan_frequency(const train_plan *plan)
{
    return plan->precondition_frequency > 0 ? plan->precondition_frequency : 10;
}

double train_plan_schedule(const train_plan *plan, int64_t step)
{
    double share = plan->cosine ? 0.5 * (1.0 + cos(pi * (double)step / (double)plan->steps)) : 1.0;
    double rise = plan->warmup > 0 ? (double)(step + 1) / (double)plan->warmup : 1.0;
    return rise < 1.0 ? rise * share : share;
}
