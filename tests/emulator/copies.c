/* Asynchronous hardware, as late as allowed: asynchronous copies and wgmma products run when their thread waits for
 * them, TMA loads after all threads have had a turn, TMA stores when the thread waits or exits. */
#include <string.h>

#include "inside.h"

#include "cuda/cudaTypedefs.h"

/* --- asynchronous copies of 16 bytes ----------------------------------------------------------------------------- */

typedef struct copy {
    char *to;
    const char *from;
    int bytes, group;
} copy;

void emulator_copy_16(void *shared, const void *global, int bytes_valid)
{
    thread_work *work = emulator_work();
    if ((uintptr_t)shared % 16 != 0 || (bytes_valid > 0 && (uintptr_t)global % 16 != 0)) {
        emulator_fail("an asynchronous copy of 16 bytes from %p to %p: both must be aligned to 16", global, shared);
    }
    if (bytes_valid < 0 || bytes_valid > 16) {
        emulator_fail("an asynchronous copy of %d bytes of 16", bytes_valid);
    }
    copy *c = list_add(&work->copies, sizeof *c);
    *c = (copy){.to = shared, .from = global, .bytes = bytes_valid, .group = work->copy_group};
}

void emulator_copy_commit(void)
{
    emulator_work()->copy_group++;
}

void emulator_copy_wait(int pending)
{
    thread_work *work = emulator_work();
    copy *all = work->copies.items;
    size_t done = 0;
    while (done < work->copies.count && all[done].group < work->copy_group - pending) {
        memset(all[done].to, 0, 16);
        memcpy(all[done].to, all[done].from, (size_t)all[done].bytes);
        done++;
    }
    work->copies.count -= done;
    if (work->copies.count > 0) {
        memmove(all, all + done, work->copies.count * sizeof *all);
    }
}

/* --- wgmma products ---------------------------------------------------------------------------------------------- */

typedef struct queued_product {
    emulator_wgmma product;
    int group;
    float rows[2][16]; /* of A, if it is in registers */
} queued_product;

void emulator_wgmma_start(const emulator_wgmma *product)
{
    thread_work *work = emulator_work();
    queued_product *q = list_add(&work->products, sizeof *q);
    *q = (queued_product){.product = *product, .group = work->product_group};
    if (product->rows != NULL) {
        memcpy(q->rows, product->rows, sizeof q->rows);
    }
}

void emulator_wgmma_commit(void)
{
    emulator_work()->product_group++;
}

/* Fields of a descriptor: start address and strides. */
typedef struct operand {
    const char *shared; /* address 0 */
    size_t bytes;       /* available from there on */
    uint32_t first, boxes_apart, rows_apart;
    emulator_operand type;
    int by_columns;
} operand;

static operand operand_of(uint64_t descriptor, const emulator_wgmma *p, int by_columns)
{
    operand o = {.shared = emulator_dynamic(),
                 .bytes = (size_t)emulator_machine()->launch->shared,
                 .first = (uint32_t)(descriptor & 0x3FFFu) << 4,
                 .boxes_apart = (uint32_t)(descriptor >> 16 & 0x3FFFu) << 4,
                 .rows_apart = (uint32_t)(descriptor >> 32 & 0x3FFFu) << 4,
                 .type = p->type,
                 .by_columns = by_columns};
    if (descriptor >> 62 != 1) {
        emulator_fail("a descriptor of wgmma without the permutation of 128 bytes, which alone is emulated");
    }
    return o;
}

/* 16-byte chunks are swizzled within 1024 bytes by their address: bits 4 to 6 are XORed with bits 7 to 9. */
static uint32_t permuted(uint32_t address)
{
    return address ^ (address >> 7 & 7u) << 4;
}

static const char *operand_at(const operand *o, uint32_t address, size_t bytes)
{
    uint32_t place = permuted(address);
    if (place + bytes > o->bytes) {
        emulator_fail("an operand of wgmma reaches %zu bytes of shared memory, but there are %zu", place + bytes,
                      o->bytes);
    }
    return o->shared + place;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7FFFu;
    float small = (float)rest * 0x1p-24f;
    if (rest < 0x400u) {
        return sign != 0 ? -small : small;
    }
    return float_of(sign | (rest >= 0x7C00u ? 0x7F800000u | rest << 13 : (rest << 13) + 0x38000000u));
}

static float short_of(emulator_operand type, uint16_t bits)
{
    return type == EMULATOR_F16 ? from_f16(bits) : float_of((uint32_t)bits << 16);
}

/* The bytes of an operand's line, and their values. Each of 32 threads reads all lines of B when it waits; lines are
 * converted only if their bytes have changed. */
typedef struct known_line {
    emulator_operand type;
    uint16_t bits[16];
    float numbers[16];
} known_line;

static void convert_line(known_line *line)
{
    for (int i = 0; i < 16 && line->type != EMULATOR_TF32; i++) {
        line->numbers[i] = short_of(line->type, line->bits[i]);
    }
    for (int i = 0; i < 8 && line->type == EMULATOR_TF32; i++) {
        uint32_t word;
        memcpy(&word, &line->bits[2 * i], sizeof word);
        line->numbers[i] = float_of(word & 0xFFFFE000u);
    }
}

/* Line i of the operand, a row of A or of B': all 16 steps of the contraction, or 8 of TF32. They are contiguous 32
 * bytes, or 128 bytes apart. */
static const float *read_line(const operand *o, int i, known_line *line)
{
    uint16_t bits[16];
    for (uint32_t chunk = 0; chunk < 2 && !o->by_columns; chunk++) {
        uint32_t address = o->first + (uint32_t)(i / 8) * o->rows_apart + (uint32_t)(i % 8) * 128 + 16 * chunk;
        memcpy(bits + 8 * chunk, operand_at(o, address, 16), 16);
    }
    for (uint32_t k = 0; k < 16 && o->by_columns; k++) {
        uint32_t address = o->first + (uint32_t)(i / 64) * o->boxes_apart + k / 8 * o->rows_apart + k % 8 * 128;
        memcpy(&bits[k], operand_at(o, address + (uint32_t)(i % 64) * 2, sizeof *bits), sizeof *bits);
    }
    if (line->type != o->type || memcmp(line->bits, bits, sizeof bits) != 0) {
        line->type = o->type;
        memcpy(line->bits, bits, sizeof bits);
        convert_line(line);
    }
    return line->numbers;
}

/* This thread's part: rows 16 w + g and 8 more, columns 8 j + 2 t and the next. Lines of B are cached by operand, since
 * a thread may be several products ahead of the others. */
static void multiply(const queued_product *q)
{
    static _Thread_local known_line known[64][256];
    const emulator_wgmma *p = &q->product;
    operand b = operand_of(p->b, p, p->order != EMULATOR_BY_ROWS);
    int depth = p->type == EMULATOR_TF32 ? 8 : 16;
    int thread = emulator_thread() % 128;
    int row = thread / 32 * 16 + thread % 32 / 4;
    known_line own[2] = {0};
    const float *left[2] = {q->rows[0], q->rows[1]};
    if (p->rows == NULL) {
        operand a = operand_of(p->a, p, p->order == EMULATOR_BY_COLUMNS);
        left[0] = read_line(&a, row, &own[0]);
        left[1] = read_line(&a, row + 8, &own[1]);
    }
    for (int c = 0; c < p->cols / 4; c++) {
        float *low = &p->sums[c / 2 * 4 + c % 2];
        float sums[2] = {p->add ? low[0] : 0.0f, p->add ? low[2] : 0.0f};
        int col = c / 2 * 8 + thread % 4 * 2 + c % 2;
        const float *right = read_line(&b, col, &known[b.first / 16 * 2654435761u >> 26][col]);
        for (int k = 0; k < depth; k++) {
            sums[0] += left[0][k] * right[k];
            sums[1] += left[1][k] * right[k];
        }
        low[0] = sums[0];
        low[2] = sums[1];
    }
}

void emulator_wgmma_wait(int pending)
{
    thread_work *work = emulator_work();
    queued_product *all = work->products.items;
    size_t done = 0;
    while (done < work->products.count && all[done].group < work->product_group - pending) {
        multiply(&all[done]);
        done++;
    }
    work->products.count -= done;
    if (work->products.count > 0) {
        memmove(all, all + done, work->products.count * sizeof *all);
    }
}

/* --- barriers in shared memory ----------------------------------------------------------------------------------- */

/* Stored in the program's 64 bits. */
typedef struct phase_barrier {
    uint16_t expected, missing;
    int32_t bytes_and_phase; /* twice the pending bytes, plus the parity of the phase */
} phase_barrier;

static phase_barrier read_barrier(const uint64_t *at)
{
    phase_barrier b;
    memcpy(&b, at, sizeof b);
    return b;
}

static void write_barrier(uint64_t *at, phase_barrier b)
{
    if (b.missing == 0 && b.bytes_and_phase / 2 == 0) {
        b.missing = b.expected;
        b.bytes_and_phase ^= 1;
    }
    memcpy(at, &b, sizeof b);
}

void emulator_barrier_create(uint64_t *barrier, int arrivals)
{
    phase_barrier b = {.expected = (uint16_t)arrivals, .missing = (uint16_t)arrivals};
    memcpy(barrier, &b, sizeof b);
}

void emulator_barrier_arrive(uint64_t *barrier, int bytes)
{
    phase_barrier b = read_barrier(barrier);
    if (b.missing == 0 || b.expected == 0xFFFFu) {
        emulator_fail("an arrival at a barrier in shared memory that was not created, or that waits for nobody");
    }
    b.missing--;
    b.bytes_and_phase += 2 * bytes;
    write_barrier(barrier, b);
}

static void count_bytes(uint64_t *barrier, int bytes)
{
    phase_barrier b = read_barrier(barrier);
    b.bytes_and_phase -= 2 * bytes;
    write_barrier(barrier, b);
}

int emulator_barrier_has_ended(const uint64_t *barrier, int parity)
{
    return (read_barrier(barrier).bytes_and_phase & 1) != (parity & 1);
}

/* --- TMA --------------------------------------------------------------------------------------------------------- */

typedef struct box_copy {
    CUtensorMap map;
    int at[3];
    char *shared;
    uint64_t *barrier; /* of a load */
} box_copy;

static int box_bytes(const CUtensorMap *map)
{
    return map->box[0] * map->box[1] * map->box[2] * map->element_bytes;
}

/* The address of element (x, y) of a box in shared memory; and in the array, or NULL outside it. */
static char *in_box(const box_copy *c, int x, int y)
{
    uint32_t place = (uint32_t)(y * c->map.box[0] + x) * (uint32_t)c->map.element_bytes;
    return c->shared + permuted(place);
}

static char *in_array(const box_copy *c, int x, int y)
{
    int64_t i[3] = {(int64_t)c->at[0] + x, (int64_t)c->at[1] + y, c->at[2]};
    for (int d = 0; d < 3; d++) {
        if (i[d] < 0 || i[d] >= c->map.sizes[d]) {
            return NULL;
        }
    }
    return c->map.address + i[0] * c->map.element_bytes + i[1] * c->map.strides[0] + i[2] * c->map.strides[1];
}

static void load_box(const box_copy *c)
{
    size_t size = (size_t)c->map.element_bytes;
    for (int y = 0; y < c->map.box[1]; y++) {
        for (int x = 0; x < c->map.box[0]; x++) {
            const char *from = in_array(c, x, y);
            if (from != NULL) {
                memcpy(in_box(c, x, y), from, size);
            } else {
                memset(in_box(c, x, y), 0, size);
            }
        }
    }
    count_bytes(c->barrier, box_bytes(&c->map));
}

static void store_box(const box_copy *c)
{
    for (int y = 0; y < c->map.box[1]; y++) {
        for (int x = 0; x < c->map.box[0]; x++) {
            char *to = in_array(c, x, y);
            if (to != NULL) {
                memcpy(to, in_box(c, x, y), (size_t)c->map.element_bytes);
            }
        }
    }
}

/* Swizzling depends on addresses: in_box requires boxes aligned to 1024 bytes. */
static box_copy box_of(const void *map, const int at[3], const void *shared)
{
    box_copy c = {.shared = (char *)shared};
    memcpy(&c.map, map, sizeof c.map);
    memcpy(c.at, at, sizeof c.at);
    if (!c.map.known) {
        emulator_fail("a tensor map that cuTensorMapEncodeTiled has not made");
    }
    uint32_t first = emulator_shared_address(shared);
    emulator_shared_pointer(first, (size_t)box_bytes(&c.map));
    if (first % 1024 != 0) {
        emulator_fail("a box at %u in shared memory, which is no multiple of 1024", first);
    }
    return c;
}

void emulator_tma_load(uint32_t blocks, void *shared, const void *map, const int at[3], uint64_t *barrier)
{
    box_copy c = box_of(map, at, shared);
    machine *m = emulator_machine();
    for (int rank = 0; rank < m->count; rank++) {
        if (blocks >> rank & 1) {
            box_copy *one = list_add(&m->loads, sizeof *one);
            *one = c;
            one->shared = emulator_cluster_map(shared, rank);
            one->barrier = emulator_cluster_map(barrier, rank);
        }
    }
}

int emulator_deliver_loads(machine *m)
{
    const box_copy *all = m->loads.items;
    size_t count = m->loads.count;
    for (size_t i = 0; i < count; i++) {
        load_box(&all[i]);
    }
    m->loads.count = 0;
    return count > 0;
}

void emulator_tma_store(const void *map, const int at[3], const void *shared)
{
    box_copy *c = list_add(&emulator_work()->stores, sizeof *c);
    *c = box_of(map, at, shared);
}

void emulator_finish_stores(thread_work *work)
{
    const box_copy *all = work->stores.items;
    for (size_t i = 0; i < work->stores.count; i++) {
        store_box(&all[i]);
    }
    work->stores.count = 0;
}

void emulator_tma_wait_read(void)
{
    emulator_finish_stores(emulator_work());
}

void emulator_forget_work(thread_work *work)
{
    work->copies.count = work->products.count = work->stores.count = 0;
    work->copy_group = work->product_group = work->turn = 0;
}
