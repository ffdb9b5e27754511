/* The state of an optimizer or of KFAC, saved in one form, edited, and loaded in another: a rejected file changes
 * nothing relevant, and after an accepted one the optimizer continues. A form is the dtype of moments, packed factors
 * or not, and the dtype of roots. The first bytes are the kinds and forms of both and whether the file has checksums
 * and keeps its header length; then come edits: three bytes of position, one with the numbers of bytes removed (low
 * half) and inserted (high half), and the inserted bytes. */
#include <math.h>
#include <string.h>

#include "fuzz.h"

enum { SAVED_KIND, SAVED_FORM, LOADED_KIND, LOADED_FORM, OPTIONS, BEFORE_EDITS, EDIT_BYTES = 4 };
enum { CHECKSUMS = 1, KEEPS_LENGTH = 2 }; /* of OPTIONS */
enum {
    KFAC = TCH_OPTIM_KL_SHAMPOO + 1,
    KINDS,
    FORMS = 12,
    SIDE = 64,
    UNITS = 2
}; /* moments of fewer elements are float32 */

/* An optimizer with two parameters, or KFAC with one layer whose samples are the first parameter. */
typedef struct stateful {
    float weight[SIDE * SIDE], bias[4], weight_gradient[SIDE * SIDE], bias_gradient[4];
    tch_tensor tensors[2], gradients[2];
    tch_optimizer *optimizer;
    tch_kfac *kfac;
} stateful;

static void make_stateful(stateful *s, int kind, int form)
{
    static int64_t shapes[2][2] = {{SIDE, SIDE}, {4}};
    *s = (stateful){.bias = {1.0F, 1.0F, 1.0F, 1.0F}, .bias_gradient = {0.1F, 0.2F, 0.3F, 0.4F}};
    for (int i = 0; i < SIDE * SIDE; i++) {
        s->weight[i] = 0.1F * (float)(i % 23);
        s->weight_gradient[i] = 0.5F - 0.2F * (float)(i % 19);
    }
    s->tensors[0] = tch_tensor_view(s->weight, TCH_FLOAT32, 2, shapes[0]);
    s->tensors[1] = tch_tensor_view(s->bias, TCH_FLOAT32, 1, shapes[1]);
    s->gradients[0] = tch_tensor_view(s->weight_gradient, TCH_FLOAT32, 2, shapes[0]);
    s->gradients[1] = tch_tensor_view(s->bias_gradient, TCH_FLOAT32, 1, shapes[1]);
    if (kind == KFAC) {
        tch_kfac_layer layer = {.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .inputs = UNITS, .outputs = UNITS};
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        REQUIRE(tch_kfac_create(fuzz_context(), &config, NULL, 1, &layer, &s->kfac) == TCH_OK);
        return;
    }
    const tch_parameter parameters[] = {{.tensor = &s->tensors[0], .name = "w"},
                                        {.tensor = &s->tensors[1], .name = "b"}};
    tch_optim_config config = tch_optim_defaults((tch_optim_kind)kind);
    config.memory.state_dtype = (tch_state_dtype)(form % 3);
    config.memory.packed_factors = form / 3 % 2;
    config.memory.root_dtype = form / 6 % 2 ? TCH_STATE_BFLOAT16 : TCH_STATE_FLOAT32;
    config.momentum = 0.9;
    config.shampoo.precondition_frequency = 2;
    REQUIRE(tch_optimizer_create(fuzz_context(), &config, NULL, 2, parameters, &s->optimizer) == TCH_OK);
}

static void destroy_stateful(stateful *s)
{
    tch_optimizer_destroy(s->optimizer);
    tch_kfac_destroy(s->kfac);
}

static tch_status step(stateful *s)
{
    static int64_t samples[] = {16, UNITS};
    static int64_t weight[] = {UNITS, UNITS};
    const tch_tensor *gradients[] = {&s->gradients[0], &s->gradients[1]};
    if (s->optimizer != NULL) {
        return tch_optimizer_step(s->optimizer, 2, gradients);
    }
    tch_tensor input = tch_tensor_view(s->weight, TCH_FLOAT32, 2, samples);
    tch_tensor output = tch_tensor_view(s->weight_gradient, TCH_FLOAT32, 2, samples);
    tch_tensor gradient = tch_tensor_view(s->weight_gradient, TCH_FLOAT32, 2, weight);
    tch_status status = tch_kfac_observe(s->kfac, 0, &input, &output, 1.0, NULL);
    status = status != TCH_OK ? status : tch_kfac_refresh(s->kfac);
    return status != TCH_OK ? status : tch_kfac_precondition(s->kfac, 0.1, 2, (tch_tensor *const[]){&gradient, NULL});
}

static tch_checkpoint_writer *save(stateful *s, tch_status *status)
{
    tch_checkpoint_writer *writer = NULL;
    REQUIRE(tch_checkpoint_writer_create(&writer) == TCH_OK);
    *status =
        s->optimizer != NULL ? tch_optimizer_save(s->optimizer, writer, "o") : tch_kfac_save(s->kfac, writer, "o");
    return writer;
}

static bool is_finite(const stateful *s)
{
    bool finite = true;
    for (int i = 0; finite && i < SIDE * SIDE; i++) {
        finite = isfinite(s->weight[i]);
    }
    return finite;
}

typedef struct saved {
    uint8_t bytes[1 << 18];
    size_t count;
} saved;

/* The file of an optimizer after two steps, created by the first call. */
static const saved *file_of(int kind, int form, bool checksums)
{
    static saved files[KINDS][FORMS][2];
    static stateful s;
    saved *f = &files[kind][form][checksums];
    if (f->count == 0) {
        char path[128];
        tch_status status;
        make_stateful(&s, kind, form);
        REQUIRE(step(&s) == TCH_OK && step(&s) == TCH_OK);
        tch_checkpoint_writer *writer = save(&s, &status);
        REQUIRE(status == TCH_OK && tch_checkpoint_writer_set_checksums(writer, checksums) == TCH_OK);
        snprintf(path, sizeof path, "%s/saved", fuzz_folder());
        REQUIRE(tch_checkpoint_writer_save(writer, fuzz_context(), path) == TCH_OK);
        tch_checkpoint_writer_destroy(writer);
        destroy_stateful(&s);
        FILE *file = fopen(path, "rb");
        f->count = file == NULL ? 0 : fread(f->bytes, 1, sizeof f->bytes, file);
        REQUIRE(f->count > 8 && f->count < sizeof f->bytes);
        fclose(file);
    }
    return f;
}

/* Returns whether tensor data may differ. The header length is adjusted to the edits unless kept. */
static bool edit(saved *file, const uint8_t *edits, size_t left, bool keeps_length)
{
    uint64_t header;
    bool differs = false;
    memcpy(&header, file->bytes, sizeof header);
    size_t data = file->count - 8 - header;
    while (left >= EDIT_BYTES) {
        size_t at = ((size_t)edits[0] | (size_t)edits[1] << 8 | (size_t)edits[2] << 16) % file->count;
        size_t removed = edits[3] % 16u < file->count - at ? edits[3] % 16u : file->count - at - 1;
        size_t inserted = edits[3] / 16u < left - EDIT_BYTES ? edits[3] / 16u : left - EDIT_BYTES;
        if (file->count - removed + inserted < sizeof file->bytes) {
            bool in_data = at >= file->count - data;
            differs = differs || in_data || removed != inserted || at + removed > file->count - data;
            data += in_data ? inserted - removed : 0;
            memmove(file->bytes + at + inserted, file->bytes + at + removed, file->count - at - removed);
            memcpy(file->bytes + at, edits + EDIT_BYTES, inserted);
            file->count += inserted - removed;
        }
        left -= EDIT_BYTES + inserted;
        edits += EDIT_BYTES + inserted;
    }
    if (!keeps_length) {
        fuzz_repair_safetensors(file->bytes, file->count, data);
    }
    return differs;
}

/* Values are arbitrary, so a step may skip or fail, but must not crash. */
static void go_on(stateful *s)
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_status saved;
    (void)step(s);
    (void)step(s);
    if (s->optimizer != NULL) {
        (void)tch_optimizer_get_stats(s->optimizer, &stats);
    }
    tch_checkpoint_writer_destroy(save(s, &saved));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static stateful s;
    static saved copy;
    tch_checkpoint *checkpoint = NULL;
    if (count < BEFORE_EDITS) {
        return 0;
    }
    int kinds[] = {bytes[SAVED_KIND] % KINDS, bytes[LOADED_KIND] % KINDS};
    const saved *f = file_of(kinds[0], bytes[SAVED_FORM] % FORMS, (bytes[OPTIONS] & CHECKSUMS) != 0);
    copy = *f;
    bool differs = edit(&copy, bytes + BEFORE_EDITS, count - BEFORE_EDITS, (bytes[OPTIONS] & KEEPS_LENGTH) != 0);
    bool as_saved = copy.count == f->count && memcmp(copy.bytes, f->bytes, f->count) == 0;
    if (tch_checkpoint_open(fuzz_file(0, copy.bytes, copy.count), &checkpoint) != TCH_OK) {
        REQUIRE(!as_saved);
        return 0;
    }
    make_stateful(&s, kinds[1], bytes[LOADED_FORM] % FORMS);
    tch_clear_error();
    tch_status status =
        s.optimizer != NULL ? tch_optimizer_load(s.optimizer, checkpoint, "o") : tch_kfac_load(s.kfac, checkpoint, "o");
    REQUIRE(status == TCH_OK || tch_last_error()[0] != '\0');
    REQUIRE(status == TCH_OK || !as_saved || kinds[0] != kinds[1]);
    tch_checkpoint_close(checkpoint);
    go_on(&s);
    /* Edited values are arbitrary; unedited ones, and the previous state, lead to finite parameters. */
    REQUIRE((status == TCH_OK && differs) || status == TCH_ERR_IO || is_finite(&s));
    destroy_stateful(&s);
    return 0;
}
