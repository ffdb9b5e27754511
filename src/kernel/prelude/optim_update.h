/* An update by a user's function, around that function: which parameter a block of threads works on, what is read and
 * written, in which types. Stands before the user's source, whose macros must not reach it; optim_entry.h gives it the
 * function. TCHI_UPDATE_REAL is the type of the arithmetic, TCHI_UPDATE_HALVES 1 where a half type may come,
 * TCHI_UPDATE_STOCHASTIC 1 where one may be rounded at random.
 *
 * The function is compiled into as few places as can be: types are looked at where numbers are read and written. On a
 * GPU a thread has its vec4s of all arrays under way before it needs the first of them, as the built-in updates do. On
 * the CPU a block is one thread, whose loop the compiler makes vectors of. */
typedef TCHI_UPDATE_REAL tch_real;

struct tch_element {
    tch_real p, g, m, v, vmax;
};

struct tch_numbers {
    tch_real lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay, momentum, dampening;
    tch_real step, correction1, correction2;
    int l2, nesterov, amsgrad;
};

namespace tchi_update
{

/* --- types of memory --------------------------------------------------------------------------------------------- */

/* Decides whether a bfloat16 parameter is rounded at random, and how. */
struct dice {
    int rolls;
    uint32_t parameter, step, key0, key1;
};

/* Half types by their bits: CUDA's own headers for them need not be installed. A half below 2^-14 is a multiple of
 * 2^-24; above, its exponent moves by 112, and infinities and NaN stay what they are. */
static __device__ __forceinline__ float widen(int type, uint32_t bits)
{
    uint32_t sign = (bits & 0x8000) << 16, size = bits & 0x7FFF;
    uint32_t small = __float_as_uint((float)size * 5.9604644775390625e-8f);
    uint32_t large = (size << 13) + (size < 0x7C00 ? 112u << 23 : 224u << 23);
    uint32_t half = sign | (size < 0x400 ? small : large);
    return __uint_as_float(type == TCHI_TYPE_BF16 ? bits << 16 : half);
}

/* Word `element` % 4 of the Philox-4x32-10 counter that belongs to it; see tch_update in the library's backend.h. */
static __device__ __forceinline__ uint32_t roll(const dice &d, uint64_t element)
{
    uint32_t a = (uint32_t)(element / 4), b = (uint32_t)(element / 4 >> 32), c = d.parameter, e = d.step;
    uint32_t key0 = d.key0, key1 = d.key1;
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)0xD2511F53u * a, second = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(second >> 32) ^ b ^ key0, b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ e ^ key1, e = (uint32_t)first;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    uint32_t low = element & 1 ? b : a, high = element & 1 ? e : c;
    return element & 2 ? high : low;
}

/* To the nearest, ties to even. Adding 1/2 to a number below 2^-14 rounds it to a multiple of 2^-24. */
static __device__ __forceinline__ uint32_t narrow_half(float x)
{
    uint32_t bits = __float_as_uint(x), size = bits & 0x7FFFFFFF;
    uint32_t small = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3F000000;
    uint32_t large = (size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
    uint32_t half = size < 0x38800000 ? small : size < 0x477FF000 ? large : size <= 0x7F800000 ? 0x7C00u : 0x7E00u;
    return (bits >> 16 & 0x8000) | half;
}

static __device__ __forceinline__ uint32_t narrow_brain(float x, const dice &d, uint64_t element)
{
    uint32_t bits = __float_as_uint(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    if (TCHI_UPDATE_STOCHASTIC && d.rolls) {
        rounded = (bits + (roll(d, element) & 0xFFFF)) >> 16;
    }
    uint32_t quiet = bits >> 16 | ((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x40u : 0u);
    return (bits & 0x7F800000) != 0x7F800000 ? rounded : quiet;
}

/* --- numbers ----------------------------------------------------------------------------------------------------- */

struct shared_numbers {
    tch_numbers k;
    tch_real divisor; /* of gradients: their scale, with a minus where they change their sign */
    dice d;
    int skip;
};

static __device__ __forceinline__ void set_numbers(const tchi_update_list &list, const tchi_update_rect &rect,
                                                   shared_numbers &n)
{
    const double *h = list.hyper, *c = rect.clock;
    tch_real scale = list.grad_scale != nullptr ? (tch_real)*list.grad_scale : (tch_real)1;
    n.k.lr = (tch_real)h[TCHI_HYPER_LR];
    n.k.beta1 = (tch_real)h[TCHI_HYPER_BETA1];
    n.k.beta2 = (tch_real)h[TCHI_HYPER_BETA2];
    n.k.one_minus_beta1 = (tch_real)(1.0 - h[TCHI_HYPER_BETA1]);
    n.k.one_minus_beta2 = (tch_real)(1.0 - h[TCHI_HYPER_BETA2]);
    n.k.eps = (tch_real)h[TCHI_HYPER_EPS];
    n.k.weight_decay = (tch_real)h[TCHI_HYPER_DECAY];
    n.k.momentum = (tch_real)h[TCHI_HYPER_MOMENTUM];
    n.k.dampening = (tch_real)h[TCHI_HYPER_DAMPENING];
    n.k.step = (tch_real)c[TCHI_CLOCK_STEP];
    n.k.correction1 = (tch_real)c[TCHI_CLOCK_CORRECTION1];
    n.k.correction2 = (tch_real)c[TCHI_CLOCK_CORRECTION2];
    n.k.l2 = list.l2, n.k.nesterov = list.nesterov, n.k.amsgrad = list.amsgrad;
    n.divisor = list.maximize ? -scale : scale;
    n.d.rolls = list.stochastic && rect.master == nullptr;
    n.d.parameter = (uint32_t)rect.parameter, n.d.step = (uint32_t)c[TCHI_CLOCK_STEP];
    n.d.key0 = (uint32_t)list.seed, n.d.key1 = (uint32_t)(list.seed >> 32);
    n.skip = list.skip != nullptr && *list.skip != 0;
}

/* --- a chunk ----------------------------------------------------------------------------------------------------- */

#if __CUDA_ARCH__

struct alignas(16) four {
    tch_real at[4];
};
struct alignas(8) packed {
    uint32_t at[2];
};

/* Asks for four elements, or as many as `left` says; at once where they are aligned for it. Those of a half type stay
 * packed in the first two places: to unpack them here would be to wait for them. */
static __device__ __forceinline__ void fetch(int type, const void *data, int64_t at, int64_t left, four &to)
{
    if (TCHI_UPDATE_HALVES && type >= TCHI_TYPE_F16) {
        const unsigned short *from = (const unsigned short *)data + at;
        packed raw;
        if (left >= 4 && (uint64_t)from % 8 == 0) {
            raw = *(const packed *)from;
        } else {
            raw.at[0] = (left > 0 ? from[0] : 0u) | (left > 1 ? from[1] : 0u) << 16;
            raw.at[1] = (left > 2 ? from[2] : 0u) | (left > 3 ? from[3] : 0u) << 16;
        }
        to.at[0] = __uint_as_float(raw.at[0]), to.at[1] = __uint_as_float(raw.at[1]);
        return;
    }
    const tch_real *from = (const tch_real *)data + at;
    if (left >= 4 && (uint64_t)from % 16 == 0) {
        to = *(const four *)from;
        return;
    }
    for (int k = 0; k < 4; k++) {
        to.at[k] = left > k ? from[k] : (tch_real)0;
    }
}

static __device__ __forceinline__ void unpack(int type, four &x)
{
    if (TCHI_UPDATE_HALVES && type >= TCHI_TYPE_F16) {
        uint32_t low = __float_as_uint(x.at[0]), high = __float_as_uint(x.at[1]);
        x.at[0] = widen(type, low & 0xFFFF), x.at[1] = widen(type, low >> 16);
        x.at[2] = widen(type, high & 0xFFFF), x.at[3] = widen(type, high >> 16);
    }
}

static __device__ __forceinline__ void store(int type, void *data, int64_t at, int64_t left, const four &x,
                                             const dice &d)
{
    if (TCHI_UPDATE_HALVES && type >= TCHI_TYPE_F16) {
        unsigned short *to = (unsigned short *)data + at;
        uint32_t bits[4];
        for (int k = 0; k < 4; k++) {
            bits[k] = type == TCHI_TYPE_F16 ? narrow_half(x.at[k]) : narrow_brain(x.at[k], d, (uint64_t)at + k);
        }
        if (left >= 4 && (uint64_t)to % 8 == 0) {
            packed raw = {{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16}};
            *(packed *)to = raw;
            return;
        }
        for (int k = 0; k < 4; k++) {
            if (left > k) {
                to[k] = (unsigned short)bits[k];
            }
        }
        return;
    }
    tch_real *to = (tch_real *)data + at;
    if (left >= 4 && (uint64_t)to % 16 == 0) {
        *(four *)to = x;
        return;
    }
    for (int k = 0; k < 4; k++) {
        if (left > k) {
            to[k] = x.at[k];
        }
    }
}

/* A thread's elements: the four from number 4 (256 step + thread) of the chunk on, at each step. */
struct place {
    int64_t at, left;
};

static __device__ __forceinline__ place place_of(const tchi_update_rect &rect, int64_t from, int step)
{
    int64_t at = from + 4 * (step * TCHI_UPDATE_THREADS + (int)threadIdx.x);
    return {at, rect.count - at};
}

/* In float32 with two states: 16 bytes read and 12 written for an element, and what the user's function computes. */
template <typename call>
static __device__ __forceinline__ void chunk(const tchi_update_list &list, const tchi_update_rect &rect, int64_t from)
{
    enum { STEPS = TCHI_UPDATE_CHUNK / (4 * TCHI_UPDATE_THREADS) };
    const int real = sizeof(tch_real) == 8 ? TCHI_TYPE_F64 : TCHI_TYPE_F32;
    const bool mastered = TCHI_UPDATE_HALVES && rect.master != nullptr;
    const int truth = mastered ? TCHI_TYPE_F32 : list.param_type;
    void *const param = mastered ? rect.master : rect.param;
    __shared__ shared_numbers n;
    four p[STEPS], g[STEPS], s[3][STEPS] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        place o = place_of(rect, from, i);
        fetch(list.grad_type, rect.grad, o.at, o.left, g[i]);
        fetch(truth, param, o.at, o.left, p[i]);
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (rect.state[k] != nullptr) {
                fetch(real, rect.state[k], o.at, o.left, s[k][i]);
            }
        }
    }
    if (threadIdx.x == 0) {
        set_numbers(list, rect, n);
    }
    __syncthreads();
    if (n.skip) {
        return;
    }
    const tch_numbers numbers = n.k;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        place o = place_of(rect, from, i);
        unpack(list.grad_type, g[i]);
        unpack(truth, p[i]);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (o.left > k) {
                tch_real gradient = n.divisor != (tch_real)1 ? g[i].at[k] / n.divisor : g[i].at[k];
                tch_element e = {p[i].at[k], gradient, s[0][i].at[k], s[1][i].at[k], s[2][i].at[k]};
                call::tchi_on(e, numbers);
                p[i].at[k] = e.p, s[0][i].at[k] = e.m, s[1][i].at[k] = e.v, s[2][i].at[k] = e.vmax;
            }
        }
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (rect.state[k] != nullptr) {
                store(real, rect.state[k], o.at, o.left, s[k][i], n.d);
            }
        }
        store(truth, param, o.at, o.left, p[i], n.d);
        if (mastered) {
            store(list.param_type, rect.param, o.at, o.left, p[i], n.d);
        }
    }
}

#else

enum { RUN = 512 }; /* elements whose numbers are brought into the type of the arithmetic at once */

/* In the type of the arithmetic: where they are, or in the buffer. */
static __device__ inline tch_real *read(int type, void *data, int64_t at, int count, tch_real *buffer)
{
    if (!TCHI_UPDATE_HALVES || type < TCHI_TYPE_F16) {
        return (tch_real *)data + at;
    }
    const unsigned short *from = (const unsigned short *)data + at;
    for (int i = 0; i < count; i++) {
        buffer[i] = widen(type, from[i]);
    }
    return buffer;
}

static __device__ inline void write(int type, void *data, int64_t at, int count, const tch_real *from, const dice &d)
{
    unsigned short *to = (unsigned short *)data + at;
    for (int i = 0; i < count && type == TCHI_TYPE_F16; i++) {
        to[i] = (unsigned short)narrow_half(from[i]);
    }
    for (int i = 0; i < count && type == TCHI_TYPE_BF16; i++) {
        to[i] = (unsigned short)narrow_brain(from[i], d, (uint64_t)(at + i));
    }
}

template <typename call, int states>
static __device__ inline void loop(const tch_numbers &numbers, int count, tch_real *__restrict__ p,
                                   const tch_real *__restrict__ g, tch_real *__restrict__ m, tch_real *__restrict__ v,
                                   tch_real *__restrict__ vmax)
{
    const tch_numbers k = numbers;
#pragma GCC ivdep
    for (int i = 0; i < count; i++) {
        tch_element e = {p[i], g[i], states > 0 ? m[i] : 0, states > 1 ? v[i] : 0, states > 2 ? vmax[i] : 0};
        call::tchi_on(e, k);
        p[i] = e.p;
        if (states > 0) {
            m[i] = e.m;
        }
        if (states > 1) {
            v[i] = e.v;
        }
        if (states > 2) {
            vmax[i] = e.vmax;
        }
    }
}

template <typename call>
static __device__ inline void run(const tchi_update_list &list, const tchi_update_rect &rect, const shared_numbers &n,
                                  int64_t at, int count)
{
    tch_real p_buffer[RUN], g_buffer[RUN];
    tch_real *s[3];
    for (int k = 0; k < 3; k++) {
        s[k] = rect.state[k] != nullptr ? (tch_real *)rect.state[k] + at : nullptr;
    }
    const int truth = rect.master != nullptr ? TCHI_TYPE_F32 : list.param_type;
    tch_real *p = read(truth, rect.master != nullptr ? rect.master : rect.param, at, count, p_buffer);
    tch_real *g = read(list.grad_type, (void *)rect.grad, at, count, g_buffer);
    if (n.divisor != (tch_real)1) {
        for (int i = 0; i < count; i++) {
            g_buffer[i] = g[i] / n.divisor;
        }
        g = g_buffer;
    }
    switch ((s[0] != nullptr) + (s[1] != nullptr) + (s[2] != nullptr)) {
    case 0:
        loop<call, 0>(n.k, count, p, g, nullptr, nullptr, nullptr);
        break;
    case 1:
        loop<call, 1>(n.k, count, p, g, s[0], nullptr, nullptr);
        break;
    case 2:
        loop<call, 2>(n.k, count, p, g, s[0], s[1], nullptr);
        break;
    default:
        loop<call, 3>(n.k, count, p, g, s[0], s[1], s[2]);
    }
    if (TCHI_UPDATE_HALVES) {
        write(list.param_type, rect.param, at, count, p, n.d);
    }
}

template <typename call>
static __device__ inline void chunk(const tchi_update_list &list, const tchi_update_rect &rect, int64_t from)
{
    shared_numbers n;
    set_numbers(list, rect, n);
    const int64_t end = from + TCHI_UPDATE_CHUNK < rect.count ? from + TCHI_UPDATE_CHUNK : rect.count;
    for (int64_t at = from; at < end && !n.skip; at += RUN) {
        run<call>(list, rect, n, at, end - at < RUN ? (int)(end - at) : RUN);
    }
}

#endif

/* --- which chunk ------------------------------------------------------------------------------------------------- */

/* The parameter of the block's chunk; block b has chunk b. */
static __device__ __forceinline__ int find(const tchi_update_list &list)
{
    int low = 0, high = list.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (list.first_chunk[middle] <= (int)blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <typename call> static __device__ __forceinline__ void update(const tchi_update_list &list)
{
    int index = find(list);
    chunk<call>(list, list.rect[index], (int64_t)((int)blockIdx.x - list.first_chunk[index]) * TCHI_UPDATE_CHUNK);
}

} // namespace tchi_update
