/* From packed numbers to values and back. */
#ifndef TXNKV_ROWSET_UNPACK_INLINE_H
#define TXNKV_ROWSET_UNPACK_INLINE_H

#include "common/bytes.h"
#include "rowset/block.h"

/* Powers of ten that a double has exactly. */
static inline double unpack_power(uint32_t digits) {
    static const double powers[BLOCK_MOST_DIGITS + 1] = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                         1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    return powers[digits];
}

/* 1.5 * 2^52: added to a double of less than 2^51, it leaves the nearest integer in the low bits.
 * So conversions are additions, of which compilers make vectors for any CPU. */
#define UNPACK_MAGIC 6755399441055744.0
#define UNPACK_LIMIT 2251799813685248.0 /* 2^51 */

static inline double unpack_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t unpack_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The float that stands for a number over a power of ten. */
static inline double unpack_decimal(uint64_t number, double power) {
    return (unpack_double(number + unpack_bits(UNPACK_MAGIC)) - UNPACK_MAGIC) / power;
}

/* The bytes of word `word` (0 or 1) of values of `width` bytes. */
static inline uint32_t unpack_word_bytes(uint32_t width, uint32_t word) {
    return width <= 8 ? width : word == 0 ? 8 : width - 8;
}

/* `bytes` of a value as a number, and back; `keys`: big-endian. */
static inline uint64_t unpack_load(const uint8_t *from, uint32_t bytes, uint32_t keys) {
    uint64_t number = 0;
    memcpy(&number, from, bytes);
    return keys ? __builtin_bswap64(number) >> (64 - 8 * bytes) : number;
}

static inline void unpack_store(uint64_t number, uint32_t bytes, uint32_t keys, uint8_t *to) {
    if (keys) number = __builtin_bswap64(number << (64 - 8 * bytes));
    memcpy(to, &number, bytes);
}

#endif
