/* Name and features of the processor. On x86-64 /proc/cpuinfo has the name; on ARM it has implementer and part numbers,
 * ARM's MIDR register, which a table translates. */
#include "processor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "core/cpu_features.h"

typedef struct part {
    unsigned implementer, number;
    const char *name;
} part;

static const part parts[] = {
    {0x41, 0xd05, "ARM Cortex-A55"},     {0x41, 0xd08, "ARM Cortex-A72"},  {0x41, 0xd0b, "ARM Cortex-A76"},
    {0x41, 0xd0c, "ARM Neoverse N1"},    {0x41, 0xd40, "ARM Neoverse V1"}, {0x41, 0xd42, "ARM Cortex-A78AE"},
    {0x41, 0xd48, "ARM Cortex-X2"},      {0x41, 0xd49, "ARM Neoverse N2"}, {0x41, 0xd4f, "ARM Neoverse V2"},
    {0x41, 0xd83, "ARM Neoverse V3AE"},  {0x41, 0xd84, "ARM Neoverse V3"}, {0x41, 0xd85, "ARM Cortex-X925"},
    {0x41, 0xd87, "ARM Cortex-A725"},    {0x41, 0xd8e, "ARM Neoverse N3"}, {0x42, 0x516, "Cavium ThunderX2"},
    {0x43, 0x0af, "Cavium ThunderX2"},   {0x46, 0x001, "Fujitsu A64FX"},   {0x48, 0xd01, "HiSilicon Kunpeng 920"},
    {0x4e, 0x004, "NVIDIA Carmel"},      {0x51, 0x001, "Qualcomm Oryon"},  {0x61, 0x022, "Apple M1 Icestorm"},
    {0x61, 0x023, "Apple M1 Firestorm"}, {0xc0, 0xac3, "Ampere-1"},        {0xc0, 0xac4, "Ampere-1A"},
};

/* The value if `line` is "key : value", else NULL. */
static const char *value_of(const char *line, const char *key)
{
    size_t length = strlen(key);
    if (strncmp(line, key, length) != 0) {
        return NULL;
    }
    line += length + strspn(line + length, " \t");
    return *line == ':' ? line + 1 + strspn(line + 1, " \t") : NULL;
}

static void write_part(unsigned implementer, unsigned number, char *name, size_t size)
{
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].implementer == implementer && parts[i].number == number) {
            snprintf(name, size, "%s", parts[i].name);
            return;
        }
    }
    snprintf(name, size, "ARM processor, implementer 0x%02x part 0x%03x", implementer, number);
}

/* Names each kind of core once, as far as there is room. */
static void add_part(unsigned implementer, unsigned number, char *name, size_t size)
{
    char one[64];
    size_t used = strlen(name);
    write_part(implementer, number, one, sizeof one);
    if (strstr(name, one) == NULL && used + strlen(one) + 4 < size) {
        snprintf(name + used, size - used, "%s%s", used > 0 ? " + " : "", one);
    }
}

void tchi_cpu_name_processor(const char *cpuinfo, char *name, size_t size)
{
    unsigned implementer = 0;
    const char *model = NULL;
    name[0] = '\0';
    for (const char *line = cpuinfo; *line != '\0'; line += line[0] == '\n') {
        const char *value;
        if ((value = value_of(line, "CPU implementer")) != NULL) {
            implementer = (unsigned)strtoul(value, NULL, 0);
        } else if ((value = value_of(line, "CPU part")) != NULL) {
            add_part(implementer, (unsigned)strtoul(value, NULL, 0), name, size);
        } else if (model == NULL) {
            model = value_of(line, "model name"); /* on ARM, if present, it names the architecture only */
        }
        line += strcspn(line, "\n");
    }
    if (name[0] == '\0' && model != NULL) {
        snprintf(name, size, "%.*s", (int)strcspn(model, "\n"), model);
    }
    if (name[0] == '\0') {
        snprintf(name, size, "CPU");
    }
}

void tchi_cpu_processor_name(char *name, size_t size)
{
    char text[1 << 14]; /* about twenty cores */
    size_t got = 0;
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file != NULL) {
        got = fread(text, 1, sizeof text - 1, file);
        fclose(file);
    }
    while (got == sizeof text - 1 && text[got - 1] != '\n') {
        got--; /* half a line could contain half a number */
    }
    text[got] = '\0';
    tchi_cpu_name_processor(text, name, size);
}

#if defined(__aarch64__) && defined(__linux__)

void tchi_cpu_processor_features(char *features, size_t size)
{
    static const struct {
        int second; /* in AT_HWCAP2 */
        unsigned long bit;
        const char *name;
    } known[] = {
        {0, HWCAP_ASIMD, "asimd"},
        {0, HWCAP_ASIMDHP, "fp16"},
        {0, HWCAP_ASIMDDP, "dotprod"},
        {0, HWCAP_SVE, "sve"},
#if defined(HWCAP2_BF16)
        {1, HWCAP2_SVE2, "sve2"},
        {1, HWCAP2_BF16, "bf16"},
        {1, HWCAP2_I8MM, "i8mm"},
#endif
    };
    const unsigned long has[2] = {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)};
    size_t used = 0;
    features[0] = '\0';
    for (size_t i = 0; i < sizeof known / sizeof *known && used < size; i++) {
        if (has[known[i].second] & known[i].bit) {
            used += (size_t)snprintf(features + used, size - used, "%s%s", used > 0 ? " " : "", known[i].name);
        }
    }
}

#else

void tchi_cpu_processor_features(char *features, size_t size)
{
    snprintf(features, size, "%s%s", tchi_cpu_has_avx2() ? "avx2 fma" : "", tchi_cpu_has_avx512() ? " avx512" : "");
}

#endif
