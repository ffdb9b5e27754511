/* Launches: checks shape and arguments, packs arguments on the stack, calls the backend. Neither allocates nor
 * synchronizes, so that a launch costs little more than the device's own. Implicit conversions are refused. */
#include <math.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"
#include "kernel.h"

#define DLPACK_BOOL 6 /* a type code that tensors of the library never have, but those of others do */
#define WORDS 64

/* "int32", "float *": close to the source. */
static void type_words(tch_parameter_class what, int32_t size, bool brain, char words[WORDS])
{
    switch (what) {
    case TCH_PARAMETER_POINTER:
        snprintf(words, WORDS, "a pointer");
        return;
    case TCH_PARAMETER_INT:
    case TCH_PARAMETER_UINT:
        snprintf(words, WORDS, "%sint%d", what == TCH_PARAMETER_UINT ? "u" : "", 8 * size);
        return;
    case TCH_PARAMETER_REAL:
        snprintf(words, WORDS, "%s", size == 8 ? "double" : size == 4 ? "float" : brain ? "__nv_bfloat16" : "__half");
        return;
    default:
        snprintf(words, WORDS, size > 0 ? "a struct of %d bytes" : "void", size);
    }
}

static const char *parameter_words(const tch_kernel_parameter *p, char words[2 * WORDS])
{
    char type[WORDS];
    bool pointer = p->what == TCH_PARAMETER_POINTER;
    type_words(pointer ? p->pointee : p->what, pointer ? p->pointee_size : p->size, p->is_brain != 0, type);
    snprintf(words, (size_t)2 * WORDS, "%s%s%s", pointer && p->is_const ? "const " : "", type, pointer ? " *" : "");
    return words;
}

static const char *argument_words(const tch_kernel_parameter *p)
{
    static const char *const words[] = {"a tensor", "TCH_ARGUMENT_INT", "TCH_ARGUMENT_INT", "TCH_ARGUMENT_REAL"};
    return p->what <= TCH_PARAMETER_REAL && p->size <= 8 ? words[p->what] : "TCH_ARGUMENT_BYTES of its size";
}

/* "NAME: arguments[2] is HAVE, the kernel's parameter 2 is const float *: expected WANT". */
static tch_status refuse_argument(tch_status status, const tch_kernel *kernel, int32_t index, const char *have,
                                  const char *want)
{
    char words[2 * WORDS];
    return tchi_fail(status,
                     "tch_kernel_launch: kernel %.200s: arguments[%d] is %s, the kernel's parameter %d is %s: expected "
                     "%s",
                     kernel->name, index, have, index, parameter_words(&kernel->parameters[index], words), want);
}

/* --- tensors ---------------------------------------------------------------------------------------------------- */

/* Any type of whole bytes: kernels may use more types than the library. */
static int64_t element_size(tch_dtype dtype)
{
    int64_t bits = (int64_t)dtype.bits * dtype.lanes;
    return bits % 8 == 0 ? bits / 8 : 0;
}

static const char *tensor_words(const tch_tensor *tensor, char words[2 * WORDS])
{
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    tch_dtype dtype = tensor->dtype;
    const char *kind = dtype.code <= DLPACK_BOOL ? kinds[dtype.code] : "type ";
    int used = snprintf(words, (size_t)2 * WORDS, "a tensor of %s%d", kind, dtype.bits);
    if (dtype.lanes != 1) {
        snprintf(words + used, (size_t)2 * WORDS - (size_t)used, " x %d", dtype.lanes);
    }
    return words;
}

/* Whether the dtype matches the pointee. Structs are often several elements, like float4: for those, as for void, any
 * dtype is accepted. */
static bool type_fits(const tch_kernel_parameter *p, tch_dtype dtype)
{
    bool integer = dtype.code == TCH_INT || dtype.code == TCH_UINT || dtype.code == DLPACK_BOOL;
    if (p->pointee == TCH_PARAMETER_OTHER) {
        return element_size(dtype) > 0;
    }
    if (element_size(dtype) != p->pointee_size || dtype.lanes != 1) {
        return false;
    }
    return p->pointee == TCH_PARAMETER_REAL ? dtype.code == (p->is_brain ? TCH_BFLOAT : TCH_FLOAT) : integer;
}

static tch_status check_memory(const tch_kernel *kernel, int32_t index, const tch_tensor *tensor)
{
    tch_device device = tch_context_device(kernel->context);
    if (tensor->device.type != device.type || tensor->device.index != device.index) {
        char have[WORDS];
        snprintf(have, sizeof have, "a tensor on device %d:%d", tensor->device.type, tensor->device.index);
        return refuse_argument(TCH_ERR_DEVICE, kernel, index, have, "one on the device of the kernel's context");
    }
    if (tensor->ndim < 0 || tensor->ndim > TCH_MAX_RANK || (tensor->ndim > 0 && tensor->shape == NULL) ||
        tch_tensor_numel(tensor) < 0) {
        return refuse_argument(TCH_ERR_SHAPE, kernel, index, "a tensor without a valid shape",
                               "at most 8 sizes, none of them negative");
    }
    int64_t count = tch_tensor_numel(tensor);
    if (count > 0 && tensor->data == NULL) {
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, "a tensor whose data is NULL",
                               "memory, or tensor = NULL");
    }
    int64_t unit = tensor->dtype.bits / 8;
    if (count > 0 && unit > 1 && (uintptr_t)tchi_tensor_data(tensor) % (uintptr_t)unit != 0) {
        return refuse_argument(TCH_ERR_LAYOUT, kernel, index, "a tensor whose first element is not aligned to its size",
                               "an aligned one");
    }
    return TCH_OK;
}

static tch_status pack_tensor(const tch_kernel *kernel, int32_t index, const tch_tensor *tensor, void *value)
{
    const tch_kernel_parameter *p = &kernel->parameters[index];
    char have[2 * WORDS];
    const void *address = NULL;
    if (p->what != TCH_PARAMETER_POINTER) {
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, "a tensor", argument_words(p));
    }
    if (tensor != NULL) {
        if (!type_fits(p, tensor->dtype)) {
            return refuse_argument(TCH_ERR_DTYPE, kernel, index, tensor_words(tensor, have), "elements of that type");
        }
        TCHI_TRY(check_memory(kernel, index, tensor));
        address = tchi_tensor_data(tensor);
    }
    memcpy(value, &address, sizeof address);
    return TCH_OK;
}

/* --- numbers ---------------------------------------------------------------------------------------------------- */

static bool integer_fits(const tch_kernel_parameter *p, int64_t number)
{
    bool is_signed = p->what == TCH_PARAMETER_INT;
    if (p->size >= 8) {
        return is_signed || number >= 0;
    }
    int bits = 8 * p->size - is_signed;
    int64_t most = ((int64_t)1 << bits) - 1;
    return number <= most && number >= (is_signed ? -most - 1 : 0);
}

static tch_status pack_integer(const tch_kernel *kernel, int32_t index, int64_t number, void *value)
{
    const tch_kernel_parameter *p = &kernel->parameters[index];
    bool integer = (p->what == TCH_PARAMETER_INT || p->what == TCH_PARAMETER_UINT) && p->size <= 8;
    if (!integer || !integer_fits(p, number)) {
        char have[WORDS];
        snprintf(have, sizeof have, "the integer %lld", (long long)number);
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, have,
                               integer ? "a number that it holds" : argument_words(p));
    }
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low bytes come first");
    memcpy(value, &number, (size_t)p->size);
    return TCH_OK;
}

/* One unit in the last place is 2^(e - fraction), with e the exponent of x or the smallest normal one. x is rounded
 * once in this unit; a carry propagates from the fraction into the exponent, up to infinity. */
uint16_t tchi_round16(double x, int fraction)
{
    const int bias = (1 << (14 - fraction)) - 1;
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const uint16_t infinity = (uint16_t)((2 * bias + 1) << fraction);
    int e;
    if (isnan(x)) {
        return (uint16_t)(sign | infinity | 1 << (fraction - 1));
    }
    if (isinf(x) || fabs(x) >= ldexp(1.0, bias + 1)) {
        return sign | infinity;
    }
    frexp(x, &e);
    e = x == 0.0 || e - 1 < 1 - bias ? 1 - bias : e - 1;
    int bits = ((e + bias - 1) << fraction) + (int)rint(ldexp(fabs(x), fraction - e));
    return (uint16_t)(sign | bits);
}

/* False if a finite number overflows. */
static bool round_real(const tch_kernel_parameter *p, double number, void *value)
{
    if (p->size == (int32_t)sizeof(double)) {
        memcpy(value, &number, sizeof number);
        return true;
    }
    if (p->size == (int32_t)sizeof(float)) {
        float rounded = (float)number;
        memcpy(value, &rounded, sizeof rounded);
        return !isinf(rounded) || isinf(number);
    }
    int fraction = p->is_brain ? 7 : 10;
    uint16_t rounded = tchi_round16(number, fraction);
    memcpy(value, &rounded, sizeof rounded);
    return isinf(number) || isnan(number) || (rounded & 0x7fff) != tchi_round16(INFINITY, fraction);
}

static tch_status pack_real(const tch_kernel *kernel, int32_t index, double number, void *value)
{
    const tch_kernel_parameter *p = &kernel->parameters[index];
    bool real = p->what == TCH_PARAMETER_REAL;
    if (!real || !round_real(p, number, value)) {
        char have[WORDS];
        snprintf(have, sizeof have, "the number %.17g", number);
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, have,
                               real ? "a number that it holds" : argument_words(p));
    }
    return TCH_OK;
}

static tch_status pack_bytes(const tch_kernel *kernel, int32_t index, const tch_kernel_argument *argument, void *value)
{
    const tch_kernel_parameter *p = &kernel->parameters[index];
    if (p->what == TCH_PARAMETER_POINTER || argument->bytes == NULL || argument->size != (size_t)p->size) {
        char have[WORDS];
        snprintf(have, sizeof have, "%zu bytes%s", argument->size, argument->bytes == NULL ? " at NULL" : "");
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, have,
                               p->what == TCH_PARAMETER_POINTER ? argument_words(p) : "as many bytes as it has");
    }
    memcpy(value, argument->bytes, argument->size);
    return TCH_OK;
}

/* Writes kernel->parameters[index].size bytes to `value`. */
static tch_status pack_argument(const tch_kernel *kernel, int32_t index, const tch_kernel_argument *argument,
                                void *value)
{
    char have[WORDS];
    switch (argument->kind) {
    case TCH_ARGUMENT_KIND_TENSOR:
        return pack_tensor(kernel, index, argument->tensor, value);
    case TCH_ARGUMENT_KIND_INT:
        return pack_integer(kernel, index, argument->integer, value);
    case TCH_ARGUMENT_KIND_REAL:
        return pack_real(kernel, index, argument->real, value);
    case TCH_ARGUMENT_KIND_BYTES:
        return pack_bytes(kernel, index, argument, value);
    default:
        snprintf(have, sizeof have, "of kind %d", (int)argument->kind);
        return refuse_argument(TCH_ERR_INVALID_ARGUMENT, kernel, index, have, "a tch_argument_kind");
    }
}

/* --- launches ---------------------------------------------------------------------------------------------------- */

#define ALIGNMENT 16 /* of a value: no type of CUDA wants more */
#define VALUE_BYTES (TCHI_PARAMETER_BYTES_MOST + TCHI_PARAMETERS_MOST * ALIGNMENT)

/* CUDA's limits, also on the CPU, so that a launch that works there works everywhere. */
static const int64_t grid_most[3] = {INT32_MAX, 65535, 65535};
static const int64_t block_most[3] = {1024, 1024, 64};

static tch_status check_axes(const tch_kernel *kernel, const char *name, const int64_t sizes[3], int64_t least,
                             const int64_t most[3])
{
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < least || sizes[i] > most[i]) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                             "tch_kernel_launch: kernel %.200s: shape's %s[%d] is %lld, expected %lld to %lld",
                             kernel->name, name, i, (long long)sizes[i], (long long)least, (long long)most[i]);
        }
    }
    return TCH_OK;
}

static tch_status check_shape(const tch_kernel *kernel, const tch_kernel_shape *shape)
{
    if (shape == NULL || shape->struct_size != sizeof *shape) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: shape must point to a struct set to TCH_KERNEL_SHAPE_INIT");
    }
    TCHI_TRY(check_axes(kernel, "grid", shape->grid, 0, grid_most));
    TCHI_TRY(check_axes(kernel, "block", shape->block, 1, block_most));
    int64_t threads = shape->block[0] * shape->block[1] * shape->block[2];
    if (threads > kernel->info.max_threads) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "tch_kernel_launch: kernel %.200s: shape's block has %lld threads, expected at most %d for this "
            "kernel",
            kernel->name, (long long)threads, kernel->info.max_threads);
    }
    if (shape->shared_bytes < 0 || shape->shared_bytes > INT32_MAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: kernel %.200s: shape's shared_bytes is %lld, expected 0 to %d",
                         kernel->name, (long long)shape->shared_bytes, INT32_MAX);
    }
    return TCH_OK;
}

static tch_status check_count(const tch_kernel *kernel, int32_t count, const tch_kernel_argument *arguments)
{
    if (count != kernel->info.parameters) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: kernel %.200s: count is %d, expected %d: one argument for each parameter",
                         kernel->name, count, kernel->info.parameters);
    }
    if (count > 0 && arguments == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_launch: kernel %.200s: arguments is NULL", kernel->name);
    }
    return TCH_OK;
}

static tch_status pack_and_launch(const tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                                  const tch_kernel_argument *arguments)
{
    alignas(ALIGNMENT) char values[VALUE_BYTES];
    const void *pointers[TCHI_PARAMETERS_MOST];
    char *value = values;
    for (int32_t i = 0; i < count; i++) {
        TCHI_TRY(pack_argument(kernel, i, &arguments[i], value));
        pointers[i] = value;
        value += (kernel->parameters[i].size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    if (shape->grid[0] == 0 || shape->grid[1] == 0 || shape->grid[2] == 0) {
        return TCH_OK;
    }
    tch_kernel_run run = {.shared_bytes = shape->shared_bytes, .arguments = pointers};
    memcpy(run.grid, shape->grid, sizeof run.grid);
    memcpy(run.block, shape->block, sizeof run.block);
    return kernel->context->backend->kernel->launch(kernel->context->state, kernel->handle, &run);
}

tch_status tch_kernel_launch(tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                             const tch_kernel_argument *arguments)
{
    if (kernel == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_launch: kernel is NULL");
    }
    TCHI_ENTER(kernel->context, "tch_kernel_launch");
    TCHI_TRY(check_shape(kernel, shape));
    TCHI_TRY(check_count(kernel, count, arguments));
    return pack_and_launch(kernel, shape, count, arguments);
}
