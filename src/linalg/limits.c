/* See limits.h. */
#include "limits.h"

#include <float.h>

#include "core/check.h"
#include "core/status.h"

/* Half a unit of the last place above the largest number of a type rounding gives infinity. */
double tchi_most_number(tch_scalar type)
{
    switch (type) {
    case TCH_SCALAR_F16:
        return 0x1.ffdffffffffffp+15;
    case TCH_SCALAR_BF16:
        return 0x1.fefffffffffffp+127;
    case TCH_SCALAR_F32:
        return 0x1.fffffefffffffp+127;
    default:
        return DBL_MAX;
    }
}

tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name)
{
    if (tensor->shape[tensor->ndim - 1] <= TCHI_MOST_SIZE && tensor->shape[tensor->ndim - 2] <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: one matrix can have at most %d rows and columns", name,
                     tchi_describe_shape(tensor, text, sizeof text), TCHI_MOST_SIZE);
}
