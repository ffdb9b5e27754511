/* The processor's name from /proc/cpuinfo of various kernels. */
#include "backends/cpu/runtime/processor.h"
#include "support/testing.h"

#define X86 "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Processor\n\n"
#define CORE(implementer, part)                                                                                        \
    "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve\nCPU implementer\t: " implementer                   \
    "\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: " part "\nCPU revision\t: 0\n\n"

static const struct {
    const char *text, *name;
} processors[] = {
    {X86, "Intel(R) Xeon(R) Processor"},
    {X86 X86, "Intel(R) Xeon(R) Processor"},
    {CORE("0x41", "0xd0c"), "ARM Neoverse N1"},
    {CORE("0x41", "0xd40") CORE("0x41", "0xd40"), "ARM Neoverse V1"},
    {CORE("0x41", "0xd4f"), "ARM Neoverse V2"}, /* NVIDIA Grace */
    {CORE("0x41", "0xd05") CORE("0x41", "0xd05") CORE("0x41", "0xd0b"), "ARM Cortex-A55 + ARM Cortex-A76"},
    {CORE("0x46", "0x001"), "Fujitsu A64FX"},
    {CORE("0x61", "0x022") CORE("0x61", "0x023"), "Apple M1 Icestorm + Apple M1 Firestorm"},
    {CORE("0xc0", "0xac3"), "Ampere-1"},
    {CORE("0x41", "0xfff"), "ARM processor, implementer 0x41 part 0xfff"},
    {CORE("0x40", "0xd0c"), "ARM processor, implementer 0x40 part 0xd0c"},
    {"model name\t: ARMv8 Processor rev 1 (v8l)\n" CORE("0x41", "0xd08"), "ARM Cortex-A72"},
    {"processor\t: 0\nisa\t\t: rv64imafdc\n", "CPU"},
    {"model name\t: cut off here", "cut off here"},
    {"model names\t: another key\n", "CPU"},
    {"", "CPU"},
};

TEST(names)
{
    for (size_t i = 0; i < sizeof processors / sizeof *processors; i++) {
        char name[128];
        tchi_cpu_name_processor(processors[i].text, name, sizeof name);
        assert_string_equal(name, processors[i].name);
    }
}

/* As many kinds of cores as fit, without truncating one. */
TEST(short_room)
{
    char name[20];
    tchi_cpu_name_processor(CORE("0x41", "0xd05") CORE("0x41", "0xd0b"), name, sizeof name);
    assert_string_equal(name, "ARM Cortex-A55");
}

TEST(this_one)
{
    char name[128], features[128];
    tchi_cpu_processor_name(name, sizeof name);
    assert_true(name[0] != '\0' && strchr(name, '\n') == NULL);
    tchi_cpu_processor_features(features, sizeof features);
#if defined(__aarch64__)
    assert_non_null(strstr(features, "asimd"));
#endif
}

int main(void)
{
    return test_run(__FILE__, NULL, NULL);
}
