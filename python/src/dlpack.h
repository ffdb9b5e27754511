/* DLPack's binary interface, as far as it is used here: managed tensors, old and versioned, and the table of C
 * functions that a library may publish on its array type. Names are DLPack's; DLTensor and tch_tensor have one
 * layout. */
#ifndef TORCHIUM_PYTHON_DLPACK_H
#define TORCHIUM_PYTHON_DLPACK_H

#include <stdint.h>

#include <torchium/tensor.h>

#define DLPACK_MAJOR 1 /* another major version has another layout */
#define DLPACK_MINOR 1 /* written into exported capsules */

#define DLPACK_READ_ONLY ((uint64_t)1)
#define DLPACK_IS_COPIED ((uint64_t)2)

typedef struct DLPackVersion {
    uint32_t major;
    uint32_t minor;
} DLPackVersion;

/* In a capsule named "dltensor", which the consumer renames "used_dltensor". */
typedef struct DLManagedTensor {
    tch_tensor tensor;
    void *owner;
    void (*deleter)(struct DLManagedTensor *self); /* may be NULL */
} DLManagedTensor;

/* In a capsule named "dltensor_versioned", renamed "used_dltensor_versioned". Up to `flags` the layout is the same for
 * every major version, so that the deleter can always be called. */
typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *owner;
    void (*deleter)(struct DLManagedTensorVersioned *self); /* may be NULL */
    uint64_t flags;
    tch_tensor tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeHeader {
    DLPackVersion version;
    struct DLPackExchangeHeader *previous; /* the table of an older major version, or NULL */
} DLPackExchangeHeader;

/* In a capsule named "dlpack_exchange_api", the attribute __dlpack_c_exchange_api__ of the arrays' type. All functions
 * require the GIL, and return 0, or -1 with an exception set. */
typedef struct DLPackExchange {
    DLPackExchangeHeader header;
    int (*allocate)(tch_tensor *prototype, DLManagedTensorVersioned **out, void *error,
                    void (*set_error)(void *error, const char *kind, const char *message));
    int (*managed_from_object)(void *object, DLManagedTensorVersioned **out);
    int (*object_from_managed)(DLManagedTensorVersioned *tensor, void **object);
    int (*borrow)(void *object, tch_tensor *out); /* valid as long as the object is unchanged; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_index, void **stream);
} DLPackExchange;

#endif
