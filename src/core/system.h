#ifndef TCHI_SYSTEM_H
#define TCHI_SYSTEM_H

#include <stdint.h>

/* Unpredictable bits. */
uint64_t tchi_random_bits(void);

/* The system's text for an errno. */
#define TCHI_ERRNO_SIZE 128
const char *tchi_errno_text(int error, char text[TCHI_ERRNO_SIZE]);

#endif
