/* Shared memory: every variable of a block is a separate allocation, filled with garbage when the block begins, to
 * detect uninitialized reads in results, and surrounded by guards, which are checked when the block ends. With
 * AddressSanitizer its red zones are the guards, and it reports the line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inside.h"

#if defined(EMULATOR_SANITIZED)
enum { MARK_BYTES = 0 };
#else
enum { MARK_BYTES = 256 };
#endif

/* NaN as a floating-point number of any type, -1 as an integer; and the guards. */
enum { GARBAGE = 0xFF, MARK = 0xA5 };

static shared_variable *add_variable(emulated_block *b, const void *key, size_t bytes, size_t alignment)
{
    shared_variable *v = &b->variables[b->variable_count];
    size_t front = (MARK_BYTES + alignment - 1) / alignment * alignment;
    void *memory = NULL;
    if (b->variable_count == EMULATOR_VARIABLES) {
        emulator_fail("more than %d shared variables", EMULATOR_VARIABLES);
    }
    if (posix_memalign(&memory, alignment < 16 ? 16 : alignment, front + (bytes > 0 ? bytes : 1) + MARK_BYTES) != 0) {
        emulator_fail("out of memory");
    }
    *v = (shared_variable){.key = key, .memory = memory, .front = front, .bytes = bytes, .alignment = alignment};
    b->variable_count++;
    return v;
}

static void make_new(shared_variable *v)
{
    memset(v->memory, MARK, v->front);
    memset(v->memory + v->front, GARBAGE, v->bytes);
    memset(v->memory + v->front + v->bytes, MARK, MARK_BYTES);
}

static shared_variable *find(emulated_block *b, const void *key)
{
    for (int i = 0; i < b->variable_count; i++) {
        if (b->variables[i].key == key) {
            return &b->variables[i];
        }
    }
    return NULL;
}

static shared_variable *find_or_add(emulated_block *b, const void *key, size_t bytes, size_t alignment,
                                    const char *name)
{
    shared_variable *v = find(b, key);
    if (v == NULL) {
        v = add_variable(b, key, bytes, alignment);
        v->name = name;
        make_new(v);
        b->shared_bytes += bytes;
        if (b->shared_bytes > EMULATOR_SHARED_MOST) {
            emulator_fail("%zu bytes of shared memory, more than there are", b->shared_bytes);
        }
    }
    return v;
}

void *emulator_shared(const void *key, size_t bytes, size_t alignment, const char *name)
{
    shared_variable *v = find_or_add(emulator_machine()->now, key, bytes, alignment, name);
    return v->memory + v->front;
}

/* The first variable, without a key. */
void *emulator_dynamic(void)
{
    const shared_variable *v = &emulator_machine()->now->variables[0];
    return v->memory + v->front;
}

void emulator_shared_begin(emulated_block *b, size_t dynamic_bytes)
{
    if (b->variable_count == 0) {
        add_variable(b, NULL, dynamic_bytes, 1024)->name = "dynamic shared memory";
        b->shared_bytes = dynamic_bytes;
    }
    for (int i = 0; i < b->variable_count; i++) {
        make_new(&b->variables[i]);
    }
}

static int is_marked(const char *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if ((unsigned char)from[i] != MARK) {
            return 0;
        }
    }
    return 1;
}

int emulator_shared_end(emulated_block *b, char *message, size_t size)
{
    for (int i = 0; i < b->variable_count; i++) {
        const shared_variable *v = &b->variables[i];
        int before = is_marked(v->memory, v->front);
        if (!before || !is_marked(v->memory + v->front + v->bytes, MARK_BYTES)) {
            snprintf(message, size, "block %lld wrote %s the %zu bytes of %s", (long long)b->number,
                     before ? "behind" : "before", v->bytes, v->name);
            return 0;
        }
    }
    return 1;
}

void emulator_shared_release(emulated_block *b)
{
    for (int i = 0; i < b->variable_count; i++) {
        free(b->variables[i].memory);
    }
    b->variable_count = 0;
}

/* --- addresses --------------------------------------------------------------------------------------------------- */

static const shared_variable *variable_at(const emulated_block *b, const char *at)
{
    for (int i = 0; i < b->variable_count; i++) {
        const shared_variable *v = &b->variables[i];
        if (at >= v->memory + v->front && at <= v->memory + v->front + v->bytes) {
            return v;
        }
    }
    emulator_fail("an address that is expected in shared memory of the block is not there");
}

void *emulator_cluster_map(void *shared, int rank)
{
    machine *m = emulator_machine();
    const shared_variable *v = variable_at(m->now, shared);
    if (rank < 0 || rank >= m->count) {
        emulator_fail("block %d of a cluster of %d", rank, m->count);
    }
    const shared_variable *other = find_or_add(&m->blocks[rank], v->key, v->bytes, v->alignment, v->name);
    return other->memory + other->front + ((char *)shared - (v->memory + v->front));
}

uint32_t emulator_shared_address(const void *shared)
{
    const emulated_block *b = emulator_machine()->now;
    const shared_variable *v = variable_at(b, shared);
    if (v != &b->variables[0]) {
        emulator_fail("the address of %s, which is not dynamic, is wanted in shared memory", v->name);
    }
    return (uint32_t)((const char *)shared - (v->memory + v->front));
}

char *emulator_shared_pointer(uint32_t address, size_t bytes)
{
    const shared_variable *v = &emulator_machine()->now->variables[0];
    if (address + bytes > v->bytes) {
        emulator_fail("a descriptor of shared memory reaches %zu bytes, but there are %zu", address + bytes, v->bytes);
    }
    return v->memory + v->front + address;
}
