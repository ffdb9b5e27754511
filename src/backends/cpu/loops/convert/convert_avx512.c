/* Conversions of element type for AVX-512. */
#include "convert_body.h"

const tchi_conversions tchi_conversions_avx512 = CONVERSIONS_TABLE;
