#include "codec/crc32c.h"

#include "codec/crc32c_shift.h"
#include "codec/crc32c_table.h"
#include "common/bytes.h"

uint32_t crc32c_portable(uint32_t seed, const uint8_t *data, size_t len) {
    uint32_t crc = ~seed;
    for (; len >= 8; len -= 8, data += 8) {
        const uint64_t word = load_le64(data) ^ crc;
        uint32_t next = 0;
        for (unsigned i = 0; i < 8; i++) next ^= crc32c_table[7 - i][(word >> (8 * i)) & 0xff];
        crc = next;
    }
    for (; len != 0; len--, data++) crc = crc >> 8 ^ crc32c_table[0][(crc ^ *data) & 0xff];
    return ~crc;
}

#if defined(__x86_64__)

#include <nmmintrin.h>
#if defined(__clang__) && __clang_major__ >= 14
#define CRC32C_TARGET __attribute__((target("sse4.2,crc32"))) /* one no longer implies the other */
#else
#define CRC32C_TARGET __attribute__((target("sse4.2")))
#endif
#define CRC32C_WORD(crc, word) _mm_crc32_u64((crc), (word))
#define CRC32C_BYTE(crc, byte) _mm_crc32_u8((crc), (byte))
static int crc32c_has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }

#elif defined(__aarch64__)

#include <arm_acle.h>
#ifdef __clang__
#define CRC32C_TARGET __attribute__((target("crc")))
#else
#define CRC32C_TARGET __attribute__((target("+crc")))
#endif
#define CRC32C_WORD(crc, word) __crc32cd((uint32_t)(crc), (word))
#define CRC32C_BYTE(crc, byte) __crc32cb((crc), (byte))
#if defined(__linux__)
#include <sys/auxv.h>
static int crc32c_has_instruction(void) { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }
#else
static int crc32c_has_instruction(void) { return 1; } /* every 64-bit Apple CPU has it */
#endif

#endif

#ifdef CRC32C_TARGET

static uint32_t shift_register(const uint32_t table[4][256], uint64_t crc) {
    return table[0][crc & 0xff] ^ table[1][crc >> 8 & 0xff] ^ table[2][crc >> 16 & 0xff] ^
           table[3][crc >> 24 & 0xff];
}

/* The instruction takes 3 cycles but one can begin in each: three thirds of a stripe are
 * summed at once, then joined. `third` is a constant, a multiple of 8. */
CRC32C_TARGET static inline uint64_t sum_stripe(uint64_t crc, const uint8_t *data, size_t third,
                                                const uint32_t table[4][256]) {
    uint64_t second = 0, last = 0;
    for (size_t i = 0; i < third; i += 8) {
        crc = CRC32C_WORD(crc, load_le64(data + i));
        second = CRC32C_WORD(second, load_le64(data + third + i));
        last = CRC32C_WORD(last, load_le64(data + 2 * third + i));
    }
    crc = shift_register(table, crc) ^ second;
    return shift_register(table, crc) ^ last;
}

CRC32C_TARGET static uint32_t crc32c_instruction(uint32_t seed, const uint8_t *data, size_t len) {
    uint64_t crc = ~seed;
    for (; len >= 3 * CRC32C_LONG; len -= 3 * CRC32C_LONG, data += 3 * CRC32C_LONG) {
        crc = sum_stripe(crc, data, CRC32C_LONG, crc32c_shift_long);
    }
    for (; len >= 3 * CRC32C_SHORT; len -= 3 * CRC32C_SHORT, data += 3 * CRC32C_SHORT) {
        crc = sum_stripe(crc, data, CRC32C_SHORT, crc32c_shift_short);
    }
    for (; len >= 8; len -= 8, data += 8) crc = CRC32C_WORD(crc, load_le64(data));
    uint32_t last = (uint32_t)crc;
    for (; len != 0; len--, data++) last = CRC32C_BYTE(last, *data);
    return ~last;
}

#endif

uint32_t crc32c(uint32_t seed, const uint8_t *data, size_t len) {
#ifdef CRC32C_TARGET
    if (crc32c_has_instruction()) return crc32c_instruction(seed, data, len);
#endif
    return crc32c_portable(seed, data, len);
}
