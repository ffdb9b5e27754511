/* A state that somebody else chose, loaded into an optimizer: what is refused changes nothing that matters, and with
 * what is taken the optimizer goes on. The first byte chooses the optimizer, the next two say how many bytes of the
 * file are tensors; the file follows. */
#include <string.h>

#include "fuzz.h"
#include "state.h"

#define BEFORE_FILE 3

static size_t data_bytes(const uint8_t *bytes)
{
    return (size_t)bytes[1] | (size_t)bytes[2] << 8;
}

void fuzz_repair(uint8_t *bytes, size_t count)
{
    if (count > BEFORE_FILE) {
        fuzz_repair_safetensors(bytes + BEFORE_FILE, count - BEFORE_FILE, data_bytes(bytes));
    }
}

/* One of each kind, made anew after it was changed. */
static stateful kept[STATE_KINDS];

static stateful *fresh(int kind)
{
    if (kept[kind].optimizer == NULL && kept[kind].kfac == NULL) {
        REQUIRE(stateful_make(fuzz_context(), kind, STATE_SMALL, &kept[kind]) == TCH_OK);
    }
    return &kept[kind];
}

/* Numbers may have become anything, so a step may skip or fail; it may not crash. */
static void go_on(stateful *s)
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_checkpoint_writer *writer = NULL;
    (void)stateful_step(s);
    (void)stateful_step(s);
    if (s->optimizer != NULL) {
        (void)tch_optimizer_get_stats(s->optimizer, &stats);
    }
    REQUIRE(tch_checkpoint_writer_create(&writer) == TCH_OK);
    (void)stateful_save(s, writer);
    tch_checkpoint_writer_destroy(writer);
    stateful_end(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    tch_checkpoint *checkpoint = NULL;
    if (count < BEFORE_FILE ||
        tch_checkpoint_open(fuzz_file(0, bytes + BEFORE_FILE, count - BEFORE_FILE), &checkpoint) != TCH_OK) {
        return 0;
    }
    stateful *s = fresh(bytes[0] % STATE_KINDS);
    tch_clear_error();
    tch_status status = stateful_load(s, checkpoint);
    REQUIRE(status == TCH_OK || tch_last_error()[0] != '\0');
    tch_checkpoint_close(checkpoint);
    if (status == TCH_OK || status == TCH_ERR_IO) { /* the second after a tensor that is not what its checksum says */
        go_on(s);
    }
    return 0;
}
