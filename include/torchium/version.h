/* The version of the headers, and of the library that is loaded. */
#ifndef TORCHIUM_VERSION_H
#define TORCHIUM_VERSION_H

#include <torchium/export.h>

#define TCH_VERSION_MAJOR 0
#define TCH_VERSION_MINOR 1
#define TCH_VERSION_PATCH 0
#define TCH_VERSION_STRING "0.1.0"

TCH_BEGIN_DECLS

/* The library's own version, such as "0.1.0". Compare with TCH_VERSION_STRING to find a mismatched installation. */
TCH_API const char *tch_version(void);

TCH_END_DECLS

#endif
