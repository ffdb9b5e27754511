/* See limits.h. */
#include "limits.h"

#include "core/check.h"
#include "core/status.h"

tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name)
{
    if (tensor->shape[tensor->ndim - 1] <= TCHI_MOST_SIZE && tensor->shape[tensor->ndim - 2] <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: one matrix can have at most %d rows and columns", name,
                     tchi_describe_shape(tensor, text, sizeof text), TCHI_MOST_SIZE);
}
