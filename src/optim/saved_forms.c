/* Converts checkpointed state to the optimizer's storage format: symmetric matrices that are packed or full, in
 * bfloat16 or float32 (packed_factors, root_dtype), and moments of another type (state_dtype). Data passes through host
 * memory. Only rounding to fewer bits loses information. */
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/arith.h"
#include "core/codes.h"
#include "core/status.h"

#include "saved_state.h"

/* --- matrices ---------------------------------------------------------------------------------------------------- */

/* The format of a matrix in a file: full or packed, and its type if it can be converted. */
typedef struct matrix_form {
    bool packed;
    tch_dtype dtype;
    int64_t shape[2];
} matrix_form;

static bool is_packed(const tchi_state *s)
{
    return s->tensor.ndim == 1;
}

static int64_t elements(int64_t n, bool packed)
{
    return packed ? n * (n + 1) / 2 : n * n;
}

static bool is_bf16_or_f32(tch_dtype dtype)
{
    return tch_dtype_equal(dtype, TCH_FLOAT32) || tch_dtype_equal(dtype, TCH_BFLOAT16);
}

/* A type that cannot be converted is reported as the optimizer's format, and the comparison with that fails. */
static matrix_form matrix_form_in(const tchi_state *s, const tch_checkpoint *file, const char *name)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    matrix_form f = {.packed = is_packed(s), .dtype = s->tensor.dtype};
    int64_t index = s->symmetric > 0 ? tch_checkpoint_find(file, name) : -1;
    if (index >= 0 && tch_checkpoint_get_info(file, index, &info) == TCH_OK) {
        f.packed = info.ndim == 1 || info.ndim == 2 ? info.ndim == 1 : f.packed;
        f.dtype = is_bf16_or_f32(info.dtype) && is_bf16_or_f32(f.dtype) ? info.dtype : f.dtype;
    }
    f.shape[0] = f.packed ? elements(s->symmetric, true) : s->symmetric;
    f.shape[1] = s->symmetric;
    return f;
}

static tch_tensor tensor_of(matrix_form *f, void *data)
{
    return tch_tensor_view(data, f->dtype, f->packed ? 1 : 2, f->shape);
}

bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    matrix_form f = matrix_form_in(state, file, name);
    return f.packed != is_packed(state) || !tch_dtype_equal(f.dtype, state->tensor.dtype);
}

tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name)
{
    matrix_form f = matrix_form_in(state, file, name);
    tch_tensor tensor = tensor_of(&f, NULL);
    return tchi_saved_check(file, name, &tensor);
}

/* Element (i, j) of the lower triangle is at i (i + 1) / 2 + j when packed. */
static void repack(int64_t n, size_t size, bool to_packed, char *to, const char *from)
{
    for (int64_t i = 0, k = 0; i < n; i++) {
        for (int64_t j = 0; j <= i; j++, k++) {
            if (to_packed) {
                memcpy(to + (size_t)k * size, from + (size_t)(i * n + j) * size, size);
            } else {
                memcpy(to + (size_t)(i * n + j) * size, from + (size_t)k * size, size);
                memcpy(to + (size_t)(j * n + i) * size, from + (size_t)k * size, size);
            }
        }
    }
}

/* Converts the type before the copy to the device. */
static tch_status read_other(const tch_optimizer *o, const tchi_state *s, const tch_checkpoint *file, const char *name,
                             matrix_form *f, void *theirs, void *ours)
{
    tch_tensor saved = tensor_of(f, theirs);
    TCHI_TRY(tch_checkpoint_read(file, NULL, name, &saved));
    bool repacked = f->packed != is_packed(s);
    if (repacked) {
        repack(s->symmetric, tch_dtype_size(f->dtype), is_packed(s), ours, theirs);
    }
    tch_tensor host = tch_tensor_view(repacked ? ours : theirs, f->dtype, s->tensor.ndim, (int64_t *)s->shape);
    tch_tensor device = s->tensor;
    TCHI_TRY(tch_tensor_copy(o->context, &device, &host));
    return tch_context_synchronize(o->context); /* before its memory is freed */
}

tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name)
{
    matrix_form f = matrix_form_in(state, file, name);
    size_t size = tch_dtype_size(f.dtype);
    size_t theirs_bytes = (size_t)elements(state->symmetric, f.packed) * size;
    size_t ours_bytes = (size_t)elements(state->symmetric, is_packed(state)) * size;
    void *theirs = NULL;
    void *ours = NULL;
    tch_status status = tchi_host_take(theirs_bytes, "a matrix to be converted", &theirs);
    status = status == TCH_OK ? tchi_host_take(ours_bytes, "a matrix to be converted", &ours) : status;
    status = status == TCH_OK ? read_other(optimizer, state, file, name, &f, theirs, ours) : status;
    tchi_host_release(theirs, theirs_bytes);
    tchi_host_release(ours, ours_bytes);
    return status;
}

/* --- moments ----------------------------------------------------------------------------------------------------- */

/* A moment in host memory, in its stored format and as float32, in the order of the parameter's memory. */
typedef struct host_moment {
    tch_moments kept;
    int64_t count;
    float *values;
    void *raw; /* codes or bfloat16 */
    float *scales;
    size_t value_bytes, raw_bytes, scale_bytes;
} host_moment;

/* Allocates for either format; bfloat16 is the larger one. */
static tch_status allocate_moment(host_moment *h, int64_t count)
{
    *h = (host_moment){.count = count, .value_bytes = (size_t)count * sizeof(float)};
    h->raw_bytes = (size_t)tchi_round_up(count * 2, 4);
    h->scale_bytes = (size_t)tchi_ceil_div(count, TCH_CODE_BLOCK) * sizeof(float);
    TCHI_TRY(tchi_host_take(h->value_bytes, "a moment to be converted", &h->values));
    TCHI_TRY(tchi_host_take(h->raw_bytes, "a moment to be converted", &h->raw));
    return tchi_host_take(h->scale_bytes, "a moment to be converted", &h->scales);
}

static void widen(const host_moment *h, int32_t k)
{
    const uint8_t *codes = h->raw;
    const uint16_t *words = h->raw;
    for (int64_t i = 0; i < h->count && h->kept != TCH_MOMENTS_REAL; i++) {
        uint32_t scale = tchi_code_bits(h->scales[i / TCH_CODE_BLOCK]);
        h->values[i] = h->kept == TCH_MOMENTS_BF16 ? tchi_code_float((uint32_t)words[i] << 16)
                       : k == 0                    ? tchi_decode_signed(codes[i], tchi_code_range_signed(scale))
                                                   : tchi_decode_square(codes[i], tchi_code_range_squares(scale));
    }
}

/* Encoded as Lion's first moment, which needs no second; the next step of another optimizer chooses its floor. */
static void encode_block(const host_moment *h, int32_t k, int64_t first)
{
    uint8_t *codes = h->raw;
    int64_t end = tchi_min(h->count, first + TCH_CODE_BLOCK);
    tchi_code_extent extent = TCHI_CODE_EXTENT_INIT;
    for (int64_t i = first; i < end; i += 2) {
        const float pair[2] = {h->values[i], i + 1 < end ? h->values[i + 1] : 0.0f};
        extent = tchi_code_extend(extent, pair, pair);
    }
    uint32_t scale = k == 0 ? tchi_code_scale_signed(TCHI_CODE_LION, extent, 0) : tchi_code_scale_squares(extent);
    h->scales[first / TCH_CODE_BLOCK] = tchi_code_float(scale);
    if (k == 0) {
        tchi_code_rounding rounding = tchi_code_rounding_of(tchi_code_range_signed(scale));
        for (int64_t i = first; i < end; i++) {
            codes[i] = (uint8_t)tchi_code_signed(h->values[i], rounding, TCHI_CODE_NEAREST);
        }
    } else {
        tchi_code_range range = tchi_code_range_squares(scale);
        for (int64_t i = first; i < end; i++) {
            codes[i] = (uint8_t)tchi_code_square(h->values[i], range, TCHI_CODE_NEAREST);
        }
    }
}

static void round_to_kept(const host_moment *h, int32_t k)
{
    uint16_t *words = h->raw;
    for (int64_t i = 0; i < h->count && h->kept == TCH_MOMENTS_BF16; i++) {
        words[i] = tchi_code_bfloat(h->values[i], TCHI_CODE_NEAREST);
    }
    for (int64_t first = 0; first < h->count && h->kept == TCH_MOMENTS_CODES; first += TCH_CODE_BLOCK) {
        encode_block(h, k, first);
    }
}

static const char *scale_name(char text[TCHI_SAVED_NAME], const char *name)
{
    snprintf(text, TCHI_SAVED_NAME, "%s_scale", name);
    return text;
}

/* The tensors of a moment over this memory, or without data; `like` has the parameter's layout. */
typedef struct moment_forms {
    int64_t words, blocks;
    tch_tensor codes, scales, like;
} moment_forms;

static void describe(const tchi_param *p, const host_moment *h, moment_forms *f)
{
    f->words = tchi_ceil_div(p->count, 4);
    f->blocks = tchi_ceil_div(p->count, TCH_CODE_BLOCK);
    f->codes = tch_tensor_view(h->raw, TCH_INT32, 1, &f->words);
    f->scales = tch_tensor_view(h->scales, TCH_FLOAT32, 1, &f->blocks);
    bool half = h->kept == TCH_MOMENTS_BF16;
    f->like =
        tch_tensor_view(half ? h->raw : h->values, half ? TCH_BFLOAT16 : TCH_FLOAT32, p->ndim, (int64_t *)p->shape);
    f->like.strides = (int64_t *)p->strides;
}

static const int64_t beginning[TCH_MAX_RANK];

/* Whether the file has a tensor of this shape and type, whole or in shards. */
static bool has_like(const tch_checkpoint *file, const char *name, const tch_tensor *like)
{
    return tch_checkpoint_check_shard(file, name, like->shape, beginning, like) == TCH_OK;
}

tch_moments tchi_saved_moments_of(const tchi_param *param, const tch_checkpoint *file, const char *name)
{
    char text[TCHI_SAVED_NAME];
    moment_forms f;
    host_moment half = {.kept = TCH_MOMENTS_BF16};
    describe(param, &half, &f);
    scale_name(text, name);
    if (tch_checkpoint_find(file, text) >= 0 || has_like(file, text, &f.scales)) {
        return TCH_MOMENTS_CODES;
    }
    return has_like(file, name, &f.like) ? TCH_MOMENTS_BF16 : TCH_MOMENTS_REAL;
}

static tch_status check_like(const tch_checkpoint *file, const char *name, const tch_tensor *like)
{
    return tch_checkpoint_find(file, name) >= 0 ? tchi_saved_check(file, name, like)
                                                : tch_checkpoint_check_shard(file, name, like->shape, beginning, like);
}

/* Versions before 0.1.0 used power-of-two scales without a floor. */
tch_status tchi_saved_scales_check(const tchi_param *param, const tch_checkpoint *file, const char *name)
{
    int64_t blocks = tchi_ceil_div(param->count, TCH_CODE_BLOCK);
    tch_tensor scales = tch_tensor_view(NULL, TCH_FLOAT32, 1, &blocks);
    size_t bytes = (size_t)blocks * sizeof(float);
    uint32_t *words = NULL;
    TCHI_TRY(check_like(file, name, &scales));
    TCHI_TRY(tchi_host_take(bytes, "scales to be checked", &words));
    scales.data = words;
    tch_status status = tch_checkpoint_read_shard(file, NULL, name, &blocks, beginning, &scales);
    for (int64_t i = 0; status == TCH_OK && i < blocks; i++) {
        if (words[i] != 0 && (words[i] & 0xFFFFu) < TCHI_CODE_LEAST) {
            status = tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                               "%s is not a scale of 8-bit codes: they were written before version 0.1.0 or are "
                               "damaged; save the moments as float32 with the version that wrote them",
                               name);
        }
    }
    tchi_host_release(words, bytes);
    return status;
}

tch_status tchi_saved_moment_check(const tchi_param *param, const tch_checkpoint *file, const char *name)
{
    char text[TCHI_SAVED_NAME];
    moment_forms f;
    host_moment nowhere = {.kept = tchi_saved_moments_of(param, file, name)};
    describe(param, &nowhere, &f);
    if (nowhere.kept == TCH_MOMENTS_CODES) {
        TCHI_TRY(check_like(file, name, &f.codes));
        return tchi_saved_scales_check(param, file, scale_name(text, name));
    }
    return check_like(file, name, &f.like);
}

static tch_status read_form(const tchi_param *p, const tch_checkpoint *file, const char *name, host_moment *h)
{
    char text[TCHI_SAVED_NAME];
    moment_forms f;
    describe(p, h, &f);
    if (h->kept == TCH_MOMENTS_CODES) {
        TCHI_TRY(tch_checkpoint_read_shard(file, NULL, name, &f.words, beginning, &f.codes));
        return tch_checkpoint_read_shard(file, NULL, scale_name(text, name), &f.blocks, beginning, &f.scales);
    }
    return tch_checkpoint_read_shard(file, NULL, name, p->shape, beginning, &f.like);
}

static tch_status upload(const tch_optimizer *o, const tch_tensor *host, void *to)
{
    tch_tensor device = *host;
    device.data = to;
    device.device = tch_context_device(o->context);
    return tch_tensor_copy(o->context, &device, host);
}

static tch_status write_form(const tch_optimizer *o, const tchi_param *p, int32_t k, const host_moment *h)
{
    moment_forms f;
    describe(p, h, &f);
    if (h->kept == TCH_MOMENTS_CODES) {
        TCHI_TRY(upload(o, &f.codes, p->moment[k]));
        TCHI_TRY(upload(o, &f.scales, p->scale[k]));
    } else {
        int64_t count = p->count;
        tch_tensor flat = tch_tensor_view(f.like.data, f.like.dtype, 1, &count);
        TCHI_TRY(upload(o, &flat, p->moment[k]));
    }
    return tch_context_synchronize(o->context); /* before its memory is freed */
}

static tch_status convert(const tch_optimizer *o, const tchi_param *p, int32_t k, const tch_checkpoint *file,
                          const char *name, host_moment *h)
{
    TCHI_TRY(allocate_moment(h, p->count));
    h->kept = tchi_saved_moments_of(p, file, name);
    TCHI_TRY(read_form(p, file, name, h));
    widen(h, k);
    memset(h->raw, 0, h->raw_bytes);
    h->kept = p->moments;
    round_to_kept(h, k);
    return write_form(o, p, k, h);
}

tch_status tchi_saved_moment_read(const tch_optimizer *optimizer, const tchi_param *param, int32_t k,
                                  const tch_checkpoint *file, const char *name)
{
    host_moment h = {0};
    tch_status status = convert(optimizer, param, k, file, name, &h);
    tchi_host_release(h.values, h.value_bytes);
    tchi_host_release(h.raw, h.raw_bytes);
    tchi_host_release(h.scales, h.scale_bytes);
    return status;
}
