/* CRC-32C (Castagnoli), as in iSCSI and ext4. Pure; safe from any thread. */
#ifndef TXNKV_CODEC_CRC32C_H
#define TXNKV_CODEC_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of `data`, continued from `seed` (0 to begin): the checksum of a joined to b
 * is crc32c(crc32c(0, a), b). Uses the CPU's instructions where it has them. */
uint32_t crc32c(uint32_t seed, const uint8_t *data, size_t len);

/* The same by tables alone: what tests compare with, and the fallback. */
uint32_t crc32c_portable(uint32_t seed, const uint8_t *data, size_t len);

#endif
