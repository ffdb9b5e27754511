/* Numbers of float16 as float32, and the bits of both. */
#ifndef EMULATOR_HALVES_H
#define EMULATOR_HALVES_H

#include <stdint.h>
#include <string.h>

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7FFFu;
    float small = (float)rest * 0x1p-24f;
    if (rest < 0x400u) {
        return sign != 0 ? -small : small;
    }
    return float_of(sign | (rest >= 0x7C00u ? 0x7F800000u | rest << 13 : (rest << 13) + 0x38000000u));
}

#endif
