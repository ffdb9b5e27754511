/* After the user's source: exports the kernel TCHI_KERNEL. The source's macros are still active, so no name here may be
 * one of them. */
namespace tchi
{
enum { tchi_uses_waits = __COUNTER__ - tchi_counter_before > 1 };
} // namespace tchi

extern "C" __attribute__((__visibility__("default"), __used__)) const tchi_cpu_kernel_entry tchi_kernel =
    tchi::tchi_describe<tchi::tchi_uses_waits, tchi::tchi_entry<decltype(&TCHI_KERNEL), &TCHI_KERNEL>>::tchi_value;
