/* The run of one optimizer. A step never synchronizes. */
#include "run.h"

#include <math.h>
#include <stdlib.h>

/* Rows evaluated at once, to bound the memory of activations. */
enum { EVALUATED_ROWS = 1024 };

/* --- creation ----------------------------------------------------------------------------------------------------- */

static tch_status create_network(const train_setup *setup, tch_network **network)
{
    const train_plan *plan = &setup->plan;
    tch_network_config config = TCH_NETWORK_CONFIG_INIT;
    config.inputs = setup->data.train.cols;
    config.outputs = setup->data.outputs;
    config.loss = plan->autoencode ? TCH_LOSS_SQUARED : TCH_LOSS_CROSS_ENTROPY;
    config.hidden_count = plan->hidden_count;
    config.hidden = plan->widths;
    config.activation = plan->f;
    config.seed = (uint64_t)plan->seed;
    config.max_batch = plan->batch > EVALUATED_ROWS ? plan->batch : EVALUATED_ROWS;
    return tch_network_create(setup->context, &config, network);
}

/* Columns of the last layer belong to classes, and its update should not be orthogonal: AdamW updates it. */
static bool leaves_to_adamw(const train_run *run, int32_t index, int32_t count)
{
    return run->method.spares_last && index == count - 2;
}

static tch_status create_optimizer(const train_setup *setup, train_run *run)
{
    int32_t count = tch_network_parameter_count(run->network);
    tch_parameter parameters[TRAIN_PARAMETERS];
    for (int32_t i = 0; i < count; i++) {
        run->gradients[i] = tch_network_gradient(run->network, i);
        parameters[i] = (tch_parameter){.tensor = tch_network_parameter(run->network, i),
                                        .name = tch_network_parameter_name(run->network, i),
                                        .use_adamw = leaves_to_adamw(run, i, count)};
    }
    tch_optim_config config = train_plan_config(&setup->plan, &run->method);
    return tch_optimizer_create(setup->context, &config, NULL, count, parameters, &run->optimizer);
}

tch_status train_run_create(const train_setup *setup, const train_method *method, train_run *run)
{
    *run = (train_run){.method = *method};
    tch_status status = create_network(setup, &run->network);
    if (status == TCH_OK) {
        status = create_optimizer(setup, run);
    }
    if (status == TCH_OK) {
        status = train_curvature_create(setup, method->curvature, run->network, &run->curvature);
    }
    if (status != TCH_OK) {
        train_run_destroy(run);
    }
    return status;
}

void train_run_destroy(train_run *run)
{
    train_curvature_destroy(&run->curvature);
    tch_optimizer_destroy(run->optimizer);
    tch_network_destroy(run->network);
    free(run->points);
    *run = (train_run){.method = run->method};
}

/* --- stepping ---------------------------------------------------------------------------------------------------- */

/* An autoencoder reproduces its inputs. */
static const tch_tensor *batch_targets(const train_plan *plan, const train_batch *batch)
{
    return plan->autoencode ? &batch->inputs : &batch->labels;
}

tch_status train_run_step(train_setup *setup, train_run *run)
{
    train_batch batch;
    const train_plan *plan = &setup->plan;
    double rate = run->method.rate * train_plan_schedule(plan, run->step);
    CLI_TRY(train_data_batch(setup->context, &setup->data, plan, run->step, &batch));
    CLI_TRY(
        tch_network_loss_and_gradients(run->network, &batch.inputs, batch_targets(plan, &batch), NULL, setup->totals));
    CLI_TRY(train_curvature_apply(setup, &run->curvature, run->step, rate));
    CLI_TRY(tch_optimizer_set_lr(run->optimizer, 0, rate));
    CLI_TRY(tch_optimizer_step(run->optimizer, tch_network_parameter_count(run->network), run->gradients));
    run->step++;
    return TCH_OK;
}

/* --- measuring --------------------------------------------------------------------------------------------------- */

static tch_status evaluate_rows(const train_setup *setup, train_run *run, const train_rows *rows, double *loss,
                                double *accuracy)
{
    double totals[TCH_NETWORK_TOTALS] = {0};
    int64_t shape[] = {TCH_NETWORK_TOTALS}, count = rows->labels->shape[0];
    tch_tensor host = tch_tensor_view(totals, TCH_FLOAT64, 1, shape);
    tch_status status = tch_tensor_fill(setup->context, setup->totals, 0.0);
    for (int64_t first = 0; first < count && status == TCH_OK; first += EVALUATED_ROWS) {
        train_batch batch;
        train_data_view(rows, first, count - first < EVALUATED_ROWS ? count - first : EVALUATED_ROWS, &batch);
        status = tch_network_evaluate(run->network, &batch.inputs, batch_targets(&setup->plan, &batch), setup->totals);
    }
    if (status == TCH_OK) {
        status = tch_tensor_copy(setup->context, &host, setup->totals);
    }
    *loss = totals[TCH_TOTAL_LOSS] / totals[TCH_TOTAL_ROWS];
    *accuracy = setup->plan.autoencode ? (double)NAN : totals[TCH_TOTAL_RIGHT] / totals[TCH_TOTAL_ROWS];
    return status;
}

tch_status train_run_measure(const train_setup *setup, train_run *run, train_point *point)
{
    double ignored;
    *point = (train_point){.step = run->step, .seconds = run->seconds};
    CLI_TRY(evaluate_rows(setup, run, &setup->data.sample, &point->train_loss, &ignored));
    return evaluate_rows(setup, run, &setup->data.test_rows, &point->test_loss, &point->test_accuracy);
}

bool train_run_record(train_run *run, const train_point *point)
{
    if (run->point_count == run->point_room) {
        int64_t room = run->point_room > 0 ? 2 * run->point_room : 64;
        train_point *points = realloc(run->points, (size_t)room * sizeof *points);
        if (points == NULL) {
            return false;
        }
        run->points = points;
        run->point_room = room;
    }
    run->points[run->point_count++] = *point;
    run->diverged = run->diverged || !isfinite(point->train_loss);
    return true;
}

const train_point *train_run_last(const train_run *run)
{
    return run->point_count > 0 ? &run->points[run->point_count - 1] : NULL;
}

const train_point *train_run_reach(const train_run *run, double loss)
{
    for (int64_t i = 0; i < run->point_count; i++) {
        if (run->points[i].train_loss <= loss) {
            return &run->points[i];
        }
    }
    return NULL;
}
