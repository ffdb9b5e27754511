/* What the fuzz targets share. A target is a file with LLVMFuzzerTestOneInput, which libFuzzer calls, or driver.c where
 * the compiler has none. It must end, whatever the bytes are; what it must not do, it states by REQUIRE. */
#ifndef TORCHIUM_FUZZ_H
#define TORCHIUM_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/torchium.h>

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, tch_last_error());             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

/* Where a format has a length that hardly any change leaves right: sets it right, so that a change gets past the first
 * check. support.c has one that does nothing. */
void fuzz_repair(uint8_t *bytes, size_t count);

/* The length before the header of a safetensors file whose last `data_bytes` are the tensors'. */
void fuzz_repair_safetensors(uint8_t *bytes, size_t count, size_t data_bytes);

/* Of an input's bytes: what is chosen by it is the same whenever the input is tried, and another for most neighbors. */
uint64_t fuzz_hash(const uint8_t *bytes, size_t count);

/* For one hash in sixteen, an allocation or a read of a file fails between the two: the k-th, by the hash too. The
 * second says whether one did: then an input may be refused for that. Not around what the target cannot do without. */
void fuzz_faults_begin(uint64_t hash);
bool fuzz_faults_end(void);

/* The context of the CPU, made at the first call: before it the backend is not there either. */
tch_context *fuzz_context(void);

/* The bytes as a file that is in no folder, one of two; the path holds until the next call for it. */
const char *fuzz_file(int which, const uint8_t *bytes, size_t count);

/* The bytes as text with an end, in memory of exactly that size; to be freed. */
char *fuzz_text(const uint8_t *bytes, size_t count);

/* A folder in memory where the system has one, removed when the program ends; and a file there, which is overwritten.
 * The descriptor stays open, so that writing it again is cheap. */
const char *fuzz_folder(void);
void fuzz_empty_folder(void);
void fuzz_write(const char *name, int *descriptor, const uint8_t *bytes, size_t count);

#endif
