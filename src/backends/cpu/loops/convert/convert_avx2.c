/* Conversions of element type for AVX2. */
#include "convert_body.h"

const tchi_conversions tchi_conversions_avx2 = CONVERSIONS_TABLE;
