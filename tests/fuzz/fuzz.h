/* Shared by the fuzz targets. A target is a file with LLVMFuzzerTestOneInput, called by libFuzzer or by driver.c. It
 * must terminate for any input and checks its invariants with REQUIRE. */
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

/* For formats with a length that almost any mutation invalidates: corrects it, so that a mutated input passes the first
 * check. support.c has a default that does nothing. */
void fuzz_repair(uint8_t *bytes, size_t count);

/* Corrects the header length of a safetensors file with `data_bytes` of tensor data at its end. */
void fuzz_repair_safetensors(uint8_t *bytes, size_t count, size_t data_bytes);

/* Hash of an input: choices made by it are reproducible, and differ between most similar inputs. */
uint64_t fuzz_hash(const uint8_t *bytes, size_t count);

/* For one hash in sixteen, an allocation or a read fails between the two: the k-th, also chosen by the hash. The second
 * returns whether one did: then an input may be rejected for that. Not used around indispensable setup. */
void fuzz_faults_begin(uint64_t hash);
bool fuzz_faults_end(void);

/* The CPU context, created by the first call, before which there is no backend either. */
tch_context *fuzz_context(void);

/* The bytes as an unlinked file, one of two; the path is valid until the next call for it. */
const char *fuzz_file(int which, const uint8_t *bytes, size_t count);

/* The bytes as a NUL-terminated string in memory of exactly that size; the caller frees it. */
char *fuzz_text(const uint8_t *bytes, size_t count);

/* A folder, in memory if possible, removed at exit; and a file there, which is overwritten. The descriptor stays open,
 * so that rewriting it is cheap. */
const char *fuzz_folder(void);
void fuzz_empty_folder(void);
void fuzz_write(const char *name, int *descriptor, const uint8_t *bytes, size_t count);

#endif
