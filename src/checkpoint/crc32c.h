/* CRC-32C, the cyclic sum with Castagnoli's polynomial: that of iSCSI, ext4 and the processors' own instruction. It
 * sees every change of up to 32 bits in a row and lets one in 2^32 of the others pass. It is meant for accidents:
 * whoever changes a file on purpose makes a new sum. */
#ifndef TCHI_CHECKPOINT_CRC32C_H
#define TCHI_CHECKPOINT_CRC32C_H

#include <stdint.h>

/* The sum of what gave `crc` followed by these bytes. Begin with 0: that of "123456789" is e3069283. */
uint32_t tchi_crc32c(uint32_t crc, const void *bytes, int64_t count);

/* The same in two ways, of which the first works everywhere and the second where tchi_cpu_has_crc32c(). */
uint32_t tchi_crc32c_plain(uint32_t crc, const void *bytes, int64_t count);
uint32_t tchi_crc32c_fast(uint32_t crc, const void *bytes, int64_t count);

#define TCHI_CRC32C_POLYNOMIAL 0x82f63b78u /* its lowest power is the highest bit */

#endif
