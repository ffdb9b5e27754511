/* The choice of the optimizers' loops. It follows the choice of the other loops, so that TORCHIUM_CPU lowers both. */
#include "steps.h"

#include <string.h>

#include "backends/cpu/loops/loops.h"

typedef struct level {
    const char *name;
    const tchi_cpu_steps *f32, *f64;
} level;

static const level levels[] = {
#if defined(__x86_64__)
    {"avx512", &tchi_cpu_steps_f32_avx512, &tchi_cpu_steps_f64_avx512},
    {"avx2", &tchi_cpu_steps_f32_avx2, &tchi_cpu_steps_f64_avx2},
#elif defined(__aarch64__)
    {"neon", &tchi_cpu_steps_f32_neon, &tchi_cpu_steps_f64_neon},
#endif
    {"plain", &tchi_cpu_steps_f32_plain, &tchi_cpu_steps_f64_plain}, /* the last one serves every other name */
};

const tchi_cpu_steps *tchi_cpu_steps_for(tch_scalar type)
{
    const char *name = tchi_loops_name();
    const level *l = levels;
    while (strcmp(l->name, name) != 0 && strcmp(l->name, "plain") != 0) {
        l++;
    }
    return type == TCH_SCALAR_F64 ? l->f64 : l->f32;
}
