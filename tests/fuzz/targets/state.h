/* The optimizers whose state is fuzzed: fuzz_state.c and fuzz_forms.c load into them, state_corpus.c saves theirs. */
#ifndef TORCHIUM_FUZZ_STATE_H
#define TORCHIUM_FUZZ_STATE_H

#include <torchium/torchium.h>

/* The kinds of optimizers, and then: KFAC; Shampoo whose factors are packed and whose roots are bfloat16. */
enum { STATE_KFAC = TCH_OPTIM_NORMUON + 1, STATE_NARROW, STATE_KINDS };

/* How an optimizer keeps its state: the type of moments, whether factors are packed, the type of roots. Moments of less
 * than 4096 elements are float32, so with a form other than STATE_SMALL the weight is that large. */
enum { STATE_SMALL = -1, STATE_FORMS = 12, STATE_SIDE = 64 };

/* An optimizer with two parameters, or KFAC with one layer. */
typedef struct stateful {
    int64_t shape[2]; /* of the weight */
    float weight[STATE_SIDE * STATE_SIDE], bias[4], weight_gradient[STATE_SIDE * STATE_SIDE], bias_gradient[4];
    tch_tensor tensors[2], gradients[2];
    tch_optimizer *optimizer;
    tch_kfac *kfac;
} stateful;

/* Creates the one of this number, at the beginning of its life. It must not be moved. */
const char *stateful_name(int kind);
tch_status stateful_make(tch_context *context, int kind, int form, stateful *s);
void stateful_end(stateful *s);
tch_status stateful_step(stateful *s);
tch_status stateful_save(stateful *s, tch_checkpoint_writer *writer);
tch_status stateful_load(stateful *s, tch_checkpoint *checkpoint);

#endif
