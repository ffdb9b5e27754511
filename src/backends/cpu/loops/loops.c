/* Selects loops by processor. TORCHIUM_CPU (plain, avx2 or avx512; plain or neon) forces a lower set, for tests and
 * diagnosis. */
#include "loops.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/update/steps/steps.h"
#include "core/cpu_features.h"

#define DECLARE_LEVEL(level)                                                                                           \
    extern const tchi_loops tchi_loops_f32_##level, tchi_loops_f64_##level;                                            \
    extern const tchi_cpu_steps tchi_cpu_steps_f32_##level, tchi_cpu_steps_f64_##level;                                \
    extern const tchi_conversions tchi_conversions_##level
#define TABLES(level)                                                                                                  \
#level, {&tchi_loops_f32_##level, &tchi_loops_f64_##level },                                                       \
             {&tchi_cpu_steps_f32_##level, &tchi_cpu_steps_f64_##level }, &tchi_conversions_##level

DECLARE_LEVEL(plain);
DECLARE_LEVEL(avx2);
DECLARE_LEVEL(avx512);
DECLARE_LEVEL(neon);
extern const tchi_thin_product tchi_thin_product_avx512, tchi_thin_product_neon;

static bool is_always_usable(void)
{
    return true;
}

const tchi_cpu_level tchi_cpu_levels[] = {
#if defined(__x86_64__)
    {TABLES(avx512), &tchi_thin_product_avx512, tchi_cpu_has_avx512},
    {TABLES(avx2), NULL, tchi_cpu_has_avx2},
#elif defined(__aarch64__)
    {TABLES(neon), &tchi_thin_product_neon, is_always_usable}, /* the plain text also compiles for these vectors */
#endif
    {TABLES(plain), NULL, is_always_usable},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const tchi_cpu_level *chosen = tchi_cpu_levels;

static void choose_level(void)
{
    const char *asked = getenv("TORCHIUM_CPU");
    for (size_t i = 0; asked != NULL && i < sizeof tchi_cpu_levels / sizeof *tchi_cpu_levels; i++) {
        chosen = strcmp(asked, tchi_cpu_levels[i].name) == 0 ? &tchi_cpu_levels[i] : chosen;
    }
    while (!chosen->is_usable()) {
        chosen++;
    }
}

static const tchi_cpu_level *level_now(void)
{
    pthread_once(&once, choose_level);
    return chosen;
}

const tchi_loops *tchi_loops_for(tch_scalar type)
{
    return level_now()->loops[type == TCH_SCALAR_F64];
}

const tchi_cpu_steps *tchi_cpu_steps_for(tch_scalar type)
{
    return level_now()->steps[type == TCH_SCALAR_F64];
}

const tchi_thin_product *tchi_thin_product_now(void)
{
    return level_now()->thin_product;
}

const char *tchi_loops_name(void)
{
    return level_now()->name;
}

void tchi_convert(int64_t n, tch_scalar dst_type, void *dst, tch_scalar src_type, const void *src)
{
    static const int64_t sizes[TCH_SCALAR_COUNT] = {8, 4, 2, 2, 4, 8, 4};
    if (dst_type == src_type) {
        memcpy(dst, src, (size_t)(n * sizes[dst_type]));
        return;
    }
    level_now()->conversions->run[dst_type][src_type](n, src, dst);
}
