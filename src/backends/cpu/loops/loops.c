/* The choice of loops by what the processor can do. TORCHIUM_CPU (plain, avx2 or avx512; plain or neon) lowers it, for
 * tests and for finding out which one is at fault. */
#include "loops.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/cpu_features.h"

typedef struct level {
    const char *name;
    const tchi_loops *f32, *f64;
    const tchi_conversions *conversions;
    const tchi_thin_product *thin_product;
} level;

static const level plain = {"plain", &tchi_loops_f32_plain, &tchi_loops_f64_plain, &tchi_conversions_plain, NULL};

#if defined(__x86_64__)
static const level avx2 = {"avx2", &tchi_loops_f32_avx2, &tchi_loops_f64_avx2, &tchi_conversions_avx2, NULL};
static const level avx512 = {"avx512", &tchi_loops_f32_avx512, &tchi_loops_f64_avx512, &tchi_conversions_avx512,
                             &tchi_thin_product_avx512};

static const level *widest_level(void)
{
    const char *asked = getenv("TORCHIUM_CPU");
    bool no_wide = asked != NULL && strcmp(asked, "plain") == 0;
    bool no_wider = no_wide || (asked != NULL && strcmp(asked, "avx2") == 0);
    if (tchi_cpu_has_avx512() && !no_wider) {
        return &avx512;
    }
    return tchi_cpu_has_avx2() && !no_wide ? &avx2 : &plain;
}
#elif defined(__aarch64__)
static const level neon = {"neon", &tchi_loops_f32_neon, &tchi_loops_f64_neon, &tchi_conversions_neon,
                           &tchi_thin_product_neon};

/* Every processor for aarch64 has these vectors; the plain text is compiled for them too. */
static const level *widest_level(void)
{
    const char *asked = getenv("TORCHIUM_CPU");
    return asked != NULL && strcmp(asked, "plain") == 0 ? &plain : &neon;
}
#else
static const level *widest_level(void)
{
    return &plain;
}
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const level *chosen;

static void choose(void)
{
    chosen = widest_level();
}

static const level *level_now(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const tchi_loops *tchi_loops_for(tch_scalar type)
{
    const level *l = level_now();
    return type == TCH_SCALAR_F64 ? l->f64 : l->f32;
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
