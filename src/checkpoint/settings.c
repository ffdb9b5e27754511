/* Settings of an open file: text, and numbers read from it. */
#include "core/status.h"
#include "numbers.h"
#include "reader.h"
#include "utf8.h"

static const tchi_setting *setting_at(const tch_checkpoint *checkpoint, int64_t index)
{
    bool there = checkpoint != NULL && index >= 0 && index < checkpoint->header.settings.count;
    return there ? (const tchi_setting *)checkpoint->header.settings.items + index : NULL;
}

int64_t tch_checkpoint_key_count(const tch_checkpoint *checkpoint)
{
    return checkpoint == NULL ? 0 : checkpoint->header.settings.count;
}

const char *tch_checkpoint_key(const tch_checkpoint *checkpoint, int64_t index)
{
    const tchi_setting *setting = setting_at(checkpoint, index);
    return setting == NULL ? NULL : setting->key;
}

const char *tch_checkpoint_text(const tch_checkpoint *checkpoint, const char *key)
{
    if (checkpoint == NULL || key == NULL) {
        return NULL;
    }
    const tchi_setting *setting = setting_at(checkpoint, tchi_names_find(&checkpoint->header.keys, key));
    return setting == NULL ? NULL : setting->value;
}

/* What the two kinds of number have in common: everything but the number. */
static tch_status find_text(const char *function, const tch_checkpoint *checkpoint, const char *key, const void *value,
                            const char **text)
{
    char quoted[TCHI_QUOTE_SIZE];
    if (checkpoint == NULL || key == NULL || value == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function,
                         checkpoint == NULL ? "checkpoint"
                         : key == NULL      ? "key"
                                            : "value");
    }
    *text = tch_checkpoint_text(checkpoint, key);
    if (*text == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %.600s has no setting with the key \"%s\"", function,
                         checkpoint->path, tchi_quote(key, quoted));
    }
    return TCH_OK;
}

static tch_status no_number(const tch_checkpoint *checkpoint, const char *key, const char *text, const char *expected)
{
    char quoted_key[TCHI_QUOTE_SIZE];
    char quoted[TCHI_QUOTE_SIZE];
    return tchi_fail(TCH_ERR_IO, "%.600s: the setting with the key \"%s\" is \"%s\", expected %s", checkpoint->path,
                     tchi_quote(key, quoted_key), tchi_quote(text, quoted), expected);
}

tch_status tch_checkpoint_number(const tch_checkpoint *checkpoint, const char *key, double *value)
{
    const char *text = "";
    TCHI_TRY(find_text("tch_checkpoint_number", checkpoint, key, value, &text));
    return tchi_number_parse(text, value) ? TCH_OK : no_number(checkpoint, key, text, "a number");
}

tch_status tch_checkpoint_integer(const tch_checkpoint *checkpoint, const char *key, int64_t *value)
{
    const char *text = "";
    TCHI_TRY(find_text("tch_checkpoint_integer", checkpoint, key, value, &text));
    return tchi_integer_parse(text, value) ? TCH_OK : no_number(checkpoint, key, text, "a whole number of 64 bits");
}
