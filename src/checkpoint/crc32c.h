/* CRC-32C (Castagnoli), as in iSCSI, ext4 and processor instructions. It detects every burst of up to 32 bits, and
 * misses one in 2^32 other changes. It protects against accidents, not against deliberate changes. */
#ifndef TCHI_CHECKPOINT_CRC32C_H
#define TCHI_CHECKPOINT_CRC32C_H

#include <stdint.h>

/* Continues the sum `crc` with these bytes. Begin with 0: the sum of "123456789" is e3069283. */
uint32_t tchi_crc32c(uint32_t crc, const void *bytes, int64_t count);

/* Two implementations: portable, and for tchi_cpu_has_crc32c(). */
uint32_t tchi_crc32c_plain(uint32_t crc, const void *bytes, int64_t count);
uint32_t tchi_crc32c_fast(uint32_t crc, const void *bytes, int64_t count);

#define TCHI_CRC32C_POLYNOMIAL 0x82f63b78u /* its lowest power is the highest bit */

#endif
