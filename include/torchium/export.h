/* What every public header needs: symbol visibility and C linkage. */
#ifndef TORCHIUM_EXPORT_H
#define TORCHIUM_EXPORT_H

#if defined(__GNUC__)
#define TCH_API __attribute__((visibility("default")))
#else
#define TCH_API
#endif

#ifdef __cplusplus
#define TCH_BEGIN_DECLS extern "C" {
#define TCH_END_DECLS }
#else
#define TCH_BEGIN_DECLS
#define TCH_END_DECLS
#endif

#endif
