/* Element types of the format, as of version 0.8 of its library. Types without a tch_dtype_size are named and measured,
 * but not loaded. */
#include "format.h"

#include <stddef.h>
#include <string.h>

/* DLPack's codes for types that tensors cannot have. */
enum {
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E4M3FNUZ = 11,
    DL_FLOAT8_E5M2 = 12,
    DL_FLOAT8_E5M2FNUZ = 13,
    DL_FLOAT8_E8M0FNU = 14,
    DL_FLOAT6_E2M3FN = 15,
    DL_FLOAT6_E3M2FN = 16,
    DL_FLOAT4_E2M1FN = 17
};

static const tchi_file_type types[] = {
    {"F64", 64, {TCH_FLOAT, 64, 1}},
    {"F32", 32, {TCH_FLOAT, 32, 1}},
    {"F16", 16, {TCH_FLOAT, 16, 1}},
    {"BF16", 16, {TCH_BFLOAT, 16, 1}},
    {"I64", 64, {TCH_INT, 64, 1}},
    {"I32", 32, {TCH_INT, 32, 1}},
    {"I16", 16, {TCH_INT, 16, 1}},
    {"I8", 8, {TCH_INT, 8, 1}},
    {"U64", 64, {TCH_UINT, 64, 1}},
    {"U32", 32, {TCH_UINT, 32, 1}},
    {"U16", 16, {TCH_UINT, 16, 1}},
    {"U8", 8, {TCH_UINT, 8, 1}},
    {"BOOL", 8, {DL_BOOL, 8, 1}},
    {"C64", 64, {DL_COMPLEX, 64, 1}},
    {"F8_E4M3", 8, {DL_FLOAT8_E4M3FN, 8, 1}},
    {"F8_E4M3FNUZ", 8, {DL_FLOAT8_E4M3FNUZ, 8, 1}},
    {"F8_E5M2", 8, {DL_FLOAT8_E5M2, 8, 1}},
    {"F8_E5M2FNUZ", 8, {DL_FLOAT8_E5M2FNUZ, 8, 1}},
    {"F8_E8M0", 8, {DL_FLOAT8_E8M0FNU, 8, 1}},
    {"F6_E2M3", 6, {DL_FLOAT6_E2M3FN, 6, 1}},
    {"F6_E3M2", 6, {DL_FLOAT6_E3M2FN, 6, 1}},
    {"F4", 4, {DL_FLOAT4_E2M1FN, 4, 1}},
};
#define TYPES (sizeof types / sizeof types[0])

const tchi_file_type *tchi_file_type_named(const char *name)
{
    for (size_t i = 0; i < TYPES; i++) {
        if (strcmp(types[i].name, name) == 0) {
            return &types[i];
        }
    }
    return NULL;
}

const tchi_file_type *tchi_file_type_of(tch_dtype dtype)
{
    for (size_t i = 0; i < TYPES; i++) {
        if (tch_dtype_equal(types[i].dtype, dtype)) {
            return &types[i];
        }
    }
    return NULL;
}
