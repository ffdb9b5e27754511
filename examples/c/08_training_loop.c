/* A complete training loop: gradients computed by hand, float16 with a loss scaler, Shampoo for a matrix and AdamW
 * for a vector, a learning rate schedule, and a checkpoint from which a second run resumes with bitwise identical
 * numbers. */
#include "example.h"

enum { ROWS = 64, IN = 24, OUT = 16, STEPS = 200, WARMUP = 20 };
static const char path[] = "example_08.safetensors";

/* y = W x + c, with gradients in float16 as a GPU would leave them. */
typedef struct model {
    float w[OUT * IN], c[OUT];
    int64_t shape[2];
    tch_tensor weight, offset, *weight_gradient, *offset_gradient;
    tch_optimizer *shampoo, *adamw;
    tch_scaler *scaler;
} model;

static void model_create(tch_context *context, model *m)
{
    *m = (model){.shape = {OUT, IN}};
    m->weight = tch_tensor_view(m->w, TCH_FLOAT32, 2, m->shape);
    m->offset = tch_tensor_view(m->c, TCH_FLOAT32, 1, m->shape);
    must(tch_tensor_create(context, TCH_FLOAT16, 2, m->shape, TCH_CONTIGUOUS, &m->weight_gradient));
    must(tch_tensor_create(context, TCH_FLOAT16, 1, m->shape, TCH_CONTIGUOUS, &m->offset_gradient));
    tch_optim_config shampoo = tch_optim_defaults(TCH_OPTIM_SHAMPOO), adamw = tch_optim_defaults(TCH_OPTIM_ADAMW);
    shampoo.shampoo.precondition_frequency = 10;
    shampoo.shampoo.grafting = TCH_GRAFTING_ADAM;
    const tch_parameter weight = {.tensor = &m->weight, .name = "weight"},
                        offset = {.tensor = &m->offset, .name = "offset"};
    must(tch_optimizer_create(context, &shampoo, NULL, 1, &weight, &m->shampoo));
    must(tch_optimizer_create(context, &adamw, NULL, 1, &offset, &m->adamw));
    must(tch_scaler_create(context, NULL, &m->scaler));
}

static void model_destroy(model *m)
{
    tch_scaler_destroy(m->scaler);
    tch_optimizer_destroy(m->adamw);
    tch_optimizer_destroy(m->shampoo);
    tch_tensor_destroy(m->weight_gradient);
    tch_tensor_destroy(m->offset_gradient);
}

/* Input i of row r, and the target of output o: a linear function of the inputs, which training has to find. */
static float input(int r, int i)
{
    return sinf(1.7f * (float)r * (float)(i + 1)) + 0.5f;
}

static float target(int r, int o)
{
    float y = 0.1f * (float)o;
    for (int i = 0; i < IN; i++) {
        y += cosf((float)(o * IN + i)) * input(r, i);
    }
    return y;
}

/* The mean squared error, and its gradients times the scale, which is in this program's own memory on the CPU. */
static double backward(tch_context *context, model *m)
{
    float scale = *(const float *)tch_scaler_scale(m->scaler)->data, dw[OUT * IN] = {0}, dc[OUT] = {0};
    double loss = 0.0;
    for (int r = 0; r < ROWS; r++) {
        for (int o = 0; o < OUT; o++) {
            float error = m->c[o] - target(r, o);
            for (int i = 0; i < IN; i++) {
                error += m->w[o * IN + i] * input(r, i);
            }
            loss += (double)error * error / (ROWS * OUT);
            dc[o] += scale * 2.0f / (ROWS * OUT) * error;
            for (int i = 0; i < IN; i++) {
                dw[o * IN + i] += scale * 2.0f / (ROWS * OUT) * error * input(r, i);
            }
        }
    }
    tch_tensor weight = tch_tensor_view(dw, TCH_FLOAT32, 2, m->shape);
    tch_tensor offset = tch_tensor_view(dc, TCH_FLOAT32, 1, m->shape);
    must(tch_tensor_copy(context, m->weight_gradient, &weight)); /* rounds to float16 */
    must(tch_tensor_copy(context, m->offset_gradient, &offset));
    return loss;
}

/* Up over WARMUP steps, then down along a cosine. */
static double learning_rate(int step)
{
    double share = 0.5 * (1.0 + cos(3.141592653589793 * step / STEPS));
    return 0.2 * (step < WARMUP ? (double)(step + 1) / WARMUP : share);
}

static double train(tch_context *context, model *m, int from, int to)
{
    double loss = 0.0;
    for (int step = from; step < to; step++) {
        loss = backward(context, m);
        must(tch_optimizer_set_lr(m->shampoo, 0, learning_rate(step)));
        must(tch_optimizer_set_lr(m->adamw, 0, learning_rate(step)));
        must(tch_scaler_step(m->scaler, m->shampoo, 1, (const tch_tensor *[]){m->weight_gradient}));
        must(tch_scaler_step(m->scaler, m->adamw, 1, (const tch_tensor *[]){m->offset_gradient}));
        must(tch_scaler_update(m->scaler)); /* halves the scale if a gradient overflowed; the step was then skipped */
    }
    return loss;
}

static void save(tch_context *context, model *m, int step)
{
    tch_checkpoint_writer *writer;
    tch_scaler_state scaler = TCH_SCALER_STATE_INIT;
    must(tch_scaler_get_state(m->scaler, &scaler));
    must(tch_checkpoint_writer_create(&writer));
    must(tch_checkpoint_writer_add(writer, "weight", &m->weight));
    must(tch_checkpoint_writer_add(writer, "offset", &m->offset));
    must(tch_optimizer_save(m->shampoo, writer, "shampoo"));
    must(tch_optimizer_save(m->adamw, writer, "adamw"));
    must(tch_checkpoint_writer_set_number(writer, "scale", scaler.scale));
    must(tch_checkpoint_writer_set_integer(writer, "growth_tracker", scaler.growth_tracker));
    must(tch_checkpoint_writer_set_integer(writer, "step", step));
    must(tch_checkpoint_writer_save(writer, context, path)); /* all of it, or the old file stays */
    tch_checkpoint_writer_destroy(writer);
}

static int resume(tch_context *context, model *m)
{
    tch_checkpoint *checkpoint;
    tch_scaler_state scaler = TCH_SCALER_STATE_INIT;
    int64_t step, tracker;
    must(tch_scaler_get_state(m->scaler, &scaler));
    must(tch_checkpoint_open(path, &checkpoint));
    must(tch_checkpoint_read(checkpoint, context, "weight", &m->weight));
    must(tch_checkpoint_read(checkpoint, context, "offset", &m->offset));
    must(tch_optimizer_load(m->shampoo, checkpoint, "shampoo"));
    must(tch_optimizer_load(m->adamw, checkpoint, "adamw"));
    must(tch_checkpoint_number(checkpoint, "scale", &scaler.scale));
    must(tch_checkpoint_integer(checkpoint, "growth_tracker", &tracker));
    must(tch_checkpoint_integer(checkpoint, "step", &step));
    scaler.growth_tracker = (int32_t)tracker;
    must(tch_scaler_set_state(m->scaler, &scaler));
    tch_checkpoint_close(checkpoint);
    return (int)step;
}

static int differences(const float *a, const float *b, int count)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        found += a[i] != b[i];
    }
    return found;
}

int main(void)
{
    tch_context *context;
    must(tch_context_create("cpu", &context));
    static model whole, second;
    model_create(context, &whole);
    double first = train(context, &whole, 0, 1);
    train(context, &whole, 1, STEPS / 2);
    save(context, &whole, STEPS / 2);
    double last = train(context, &whole, STEPS / 2, STEPS);

    model_create(context, &second);
    train(context, &second, resume(context, &second), STEPS);
    int other = differences(whole.w, second.w, OUT * IN) + differences(whole.c, second.c, OUT);
    printf("loss %.4f, after %d steps %.2e; resumed run: %s\n", first, STEPS, last,
           other == 0 ? "identical" : "DIFFERENT");
    model_destroy(&whole);
    model_destroy(&second);
    tch_context_destroy(context);
    remove(path);
    return other == 0 && last < 0.01 * first ? 0 : 1;
}
