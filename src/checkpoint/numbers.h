/* Numbers as text, the same in every locale. */
#ifndef TCHI_CHECKPOINT_NUMBERS_H
#define TCHI_CHECKPOINT_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>

#define TCHI_NUMBER_SIZE 32

/* Seventeen digits, which single out one double. */
const char *tchi_number_text(double value, char text[TCHI_NUMBER_SIZE]);

/* False when the whole text is not one number. */
bool tchi_number_parse(const char *text, double *value);
bool tchi_integer_parse(const char *text, int64_t *value);

#endif
