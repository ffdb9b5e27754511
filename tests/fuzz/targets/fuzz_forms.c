/* The state of an optimizer, saved in one form, changed, and loaded in another: moments in float32, bfloat16 or int8,
 * factors packed or not, roots in float32 or bfloat16. The first bytes are the kinds and forms of both and whether the
 * file has checksums; then come changes, each three bytes of a position and one to combine with what is there. */
#include <math.h>
#include <string.h>

#include "fuzz.h"
#include "state.h"

enum { SAVED_KIND, SAVED_FORM, LOADED_KIND, LOADED_FORM, CHECKSUMS, BEFORE_CHANGES, CHANGE_BYTES = 4 };

static bool is_finite(const stateful *s)
{
    bool finite = true;
    for (int64_t i = 0; finite && i < s->shape[0] * s->shape[1]; i++) {
        finite = isfinite(s->weight[i]);
    }
    return finite;
}

static void step_twice(stateful *s)
{
    (void)stateful_step(s);
    (void)stateful_step(s);
}

typedef struct saved {
    uint8_t bytes[1 << 18];
    size_t count;
} saved;

/* The file of an optimizer after two steps, made at the first call. */
static const saved *file_of(int kind, int form, bool checksums)
{
    static saved files[STATE_KINDS][STATE_FORMS][2];
    static stateful s;
    saved *f = &files[kind][form][checksums];
    if (f->count == 0) {
        char path[128];
        tch_checkpoint_writer *writer = NULL;
        REQUIRE(stateful_make(fuzz_context(), kind, form, &s) == TCH_OK);
        step_twice(&s);
        REQUIRE(tch_checkpoint_writer_create(&writer) == TCH_OK && stateful_save(&s, writer) == TCH_OK);
        REQUIRE(tch_checkpoint_writer_set_checksums(writer, checksums) == TCH_OK);
        snprintf(path, sizeof path, "%s/saved", fuzz_folder());
        REQUIRE(tch_checkpoint_writer_save(writer, fuzz_context(), path) == TCH_OK);
        tch_checkpoint_writer_destroy(writer);
        stateful_end(&s);
        FILE *file = fopen(path, "rb");
        f->count = file == NULL ? 0 : fread(f->bytes, 1, sizeof f->bytes, file);
        REQUIRE(f->count > 8 && f->count < sizeof f->bytes);
        fclose(file);
    }
    return f;
}

/* Returns whether a byte of some tensor differs. */
static bool change(saved *file, const uint8_t *changes, size_t left)
{
    uint64_t header;
    bool changed = false;
    memcpy(&header, file->bytes, sizeof header);
    for (; left >= CHANGE_BYTES; left -= CHANGE_BYTES, changes += CHANGE_BYTES) {
        size_t at = ((size_t)changes[0] | (size_t)changes[1] << 8 | (size_t)changes[2] << 16) % file->count;
        file->bytes[at] ^= changes[3];
        changed = changed || (at >= header + 8 && changes[3] != 0);
    }
    return changed;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static stateful s;
    static saved copy;
    tch_checkpoint *checkpoint = NULL;
    if (count < BEFORE_CHANGES) {
        return 0;
    }
    bool checksums = bytes[CHECKSUMS] % 2 != 0;
    const saved *f = file_of(bytes[SAVED_KIND] % STATE_KINDS, bytes[SAVED_FORM] % STATE_FORMS, checksums);
    copy = *f;
    bool changed = change(&copy, bytes + BEFORE_CHANGES, count - BEFORE_CHANGES);
    bool as_saved = memcmp(copy.bytes, f->bytes, f->count) == 0;
    if (tch_checkpoint_open(fuzz_file(0, copy.bytes, copy.count), &checkpoint) != TCH_OK) {
        REQUIRE(!as_saved);
        return 0;
    }
    REQUIRE(stateful_make(fuzz_context(), bytes[LOADED_KIND] % STATE_KINDS, bytes[LOADED_FORM] % STATE_FORMS, &s) ==
            TCH_OK);
    tch_clear_error();
    tch_status status = stateful_load(&s, checkpoint);
    REQUIRE(status == TCH_OK || tch_last_error()[0] != '\0');
    REQUIRE(status == TCH_OK || !as_saved || bytes[SAVED_KIND] % STATE_KINDS != bytes[LOADED_KIND] % STATE_KINDS);
    tch_checkpoint_close(checkpoint);
    step_twice(&s);
    /* Numbers that were changed may be anything; others, and the state of before, lead to finite parameters. */
    REQUIRE((status == TCH_OK && changed) || status == TCH_ERR_IO || is_finite(&s));
    stateful_end(&s);
    return 0;
}
