/* Symmetric matrices of a checkpoint that are packed where the optimizer has them whole, or in bfloat16 where it has
 * float32, or the other way round (packed_factors, root_dtype): read into host memory, and from there to the form that
 * the optimizer keeps. Only rounding to bfloat16 loses anything. */
#ifndef TCHI_OPTIM_SAVED_MATRIX_H
#define TCHI_OPTIM_SAVED_MATRIX_H

#include "optimizer.h"

/* Whether the file has the matrix of this name in the other form. */
bool tchi_saved_matrix_differs(const tchi_state *state, const tch_checkpoint *file, const char *name);

/* The file has it in that form, of the right size and type. */
tch_status tchi_saved_matrix_check(const tchi_state *state, const tch_checkpoint *file, const char *name);
tch_status tchi_saved_matrix_read(const tch_optimizer *optimizer, const tchi_state *state, const tch_checkpoint *file,
                                  const char *name);

#endif
