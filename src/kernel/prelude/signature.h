/* Describes the parameters of a kernel for launches. After the user's source, with TCHI_KERNEL the kernel's name
 * expression and TCHI_EXPORT the export of a constant array. The array has the number of parameters, then the six
 * numbers of tch_kernel_parameter for each. C++14 without headers, since NVRTC has none; all names are prefixed, since
 * the user's macros are still active. */
struct __half;
struct __nv_bfloat16;

namespace tchi_signature_parts
{

enum { TCHI_POINTER = 0, TCHI_INT = 1, TCHI_UINT = 2, TCHI_REAL = 3, TCHI_OTHER = 4 };

template <int tchi_code, int tchi_is_brain = 0> struct tchi_number {
    enum { tchi_what = tchi_code, tchi_brain = tchi_is_brain };
};

template <typename tchi_t> struct tchi_kind : tchi_number<TCHI_OTHER> {
};
template <typename tchi_t> struct tchi_kind<tchi_t *> : tchi_number<TCHI_POINTER> {
};
template <typename tchi_t> struct tchi_kind<const tchi_t> : tchi_kind<tchi_t> {
};
template <typename tchi_t> struct tchi_kind<volatile tchi_t> : tchi_kind<tchi_t> {
};
template <typename tchi_t> struct tchi_kind<const volatile tchi_t> : tchi_kind<tchi_t> {
};
#define TCHI_KIND(tchi_t, ...)                                                                                         \
    template <> struct tchi_kind<tchi_t> : tchi_number<__VA_ARGS__> {                                                  \
    };
TCHI_KIND(bool, TCHI_UINT)
TCHI_KIND(char, (char)-1 < 0 ? TCHI_INT : TCHI_UINT)
TCHI_KIND(signed char, TCHI_INT)
TCHI_KIND(short, TCHI_INT)
TCHI_KIND(int, TCHI_INT)
TCHI_KIND(long, TCHI_INT)
TCHI_KIND(long long, TCHI_INT)
TCHI_KIND(unsigned char, TCHI_UINT)
TCHI_KIND(unsigned short, TCHI_UINT)
TCHI_KIND(unsigned int, TCHI_UINT)
TCHI_KIND(unsigned long, TCHI_UINT)
TCHI_KIND(unsigned long long, TCHI_UINT)
TCHI_KIND(float, TCHI_REAL)
TCHI_KIND(double, TCHI_REAL)
TCHI_KIND(__half, TCHI_REAL)
TCHI_KIND(__nv_bfloat16, TCHI_REAL, 1)
#undef TCHI_KIND

/* 0 for types without a size: void and incomplete types. */
template <typename tchi_t, typename = void> struct tchi_size {
    enum { tchi_value = 0 };
};
template <typename> struct tchi_no_type {
    typedef void tchi_type;
};
template <> struct tchi_size<void, void> {
    enum { tchi_value = 0 };
};
template <> struct tchi_size<const void, void> {
    enum { tchi_value = 0 };
};
template <typename tchi_t> struct tchi_size<tchi_t, typename tchi_no_type<char[sizeof(tchi_t)]>::tchi_type> {
    enum { tchi_value = sizeof(tchi_t) };
};

template <typename tchi_t> struct tchi_constant {
    enum { tchi_value = 0 };
};
template <typename tchi_t> struct tchi_constant<const tchi_t> {
    enum { tchi_value = 1 };
};

template <typename tchi_t> struct tchi_pointee {
    enum { tchi_what = TCHI_OTHER, tchi_bytes = 0, tchi_read_only = 0, tchi_brain = 0 };
};
template <typename tchi_t> struct tchi_pointee<tchi_t *> {
    enum {
        tchi_what = tchi_kind<tchi_t>::tchi_what,
        tchi_bytes = tchi_size<tchi_t>::tchi_value,
        tchi_read_only = tchi_constant<tchi_t>::tchi_value,
        tchi_brain = tchi_kind<tchi_t>::tchi_brain
    };
};

struct tchi_one {
    int tchi_what, tchi_size, tchi_pointee, tchi_pointee_size, tchi_is_const, tchi_is_brain;
};
template <typename tchi_t> struct tchi_of;
template <typename... tchi_p> struct tchi_of<void (*)(tchi_p...)> {
    int tchi_count = sizeof...(tchi_p);
    tchi_one tchi_list[sizeof...(tchi_p)] = {{tchi_kind<tchi_p>::tchi_what, (int)sizeof(tchi_p),
                                              tchi_pointee<tchi_p>::tchi_what, tchi_pointee<tchi_p>::tchi_bytes,
                                              tchi_pointee<tchi_p>::tchi_read_only,
                                              tchi_kind<tchi_p>::tchi_brain | tchi_pointee<tchi_p>::tchi_brain}...};
};
template <> struct tchi_of<void (*)()> {
    int tchi_count = 0;
};

} // namespace tchi_signature_parts

TCHI_EXPORT tchi_signature_parts::tchi_of<decltype(&TCHI_KERNEL)> tchi_signature = {};
