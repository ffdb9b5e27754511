/* Conversions of element type, for any processor: the reference. */
#include "convert_body.h"

const tchi_conversions tchi_conversions_plain = CONVERSIONS_TABLE;
