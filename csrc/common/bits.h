/* Bitmaps in Arrow's order: bit i is bit i % 8 of byte i / 8. */
#ifndef TXNKV_COMMON_BITS_H
#define TXNKV_COMMON_BITS_H

#include "common/bytes.h"

static inline size_t bits_bytes(uint64_t bits) { return (size_t)((bits + 7) / 8); }

static inline unsigned bits_get(const uint8_t *bits, uint64_t i) {
    return (unsigned)(bits[i >> 3] >> (i & 7)) & 1u;
}

static inline void bits_set(uint8_t *bits, uint64_t i) {
    bits[i >> 3] = (uint8_t)(bits[i >> 3] | (1u << (i & 7)));
}

static inline void bits_or(uint8_t *bits, uint64_t i, unsigned bit) {
    bits[i >> 3] = (uint8_t)(bits[i >> 3] | (bit << (i & 7)));
}

/* Loads `count` <= 64 bits beginning at bit `at`; the rest of the word is 0. */
static inline uint64_t bits_load(const uint8_t *bits, uint64_t at, unsigned count) {
    const uint8_t *p = bits + (at >> 3);
    const unsigned shift = (unsigned)(at & 7), bytes = (shift + count + 7) / 8;
    uint64_t word = 0;
    if (count == 0) return 0;
    memcpy(&word, p, bytes < 8 ? bytes : 8);
    word >>= shift;
    if (bytes > 8) word |= (uint64_t)p[8] << (64 - shift);
    return count == 64 ? word : word & ((UINT64_C(1) << count) - 1);
}

/* Stores `count` <= 64 bits at bit `at`, a multiple of 8; bits behind them become 0. */
static inline void bits_store(uint8_t *bits, uint64_t at, uint64_t word, unsigned count) {
    memcpy(bits + (at >> 3), &word, (count + 7) / 8);
}

/* Sets `count` <= 64 bits from bit `at` on, where all bits are 0 yet. */
static inline void bits_append(uint8_t *bits, uint64_t at, uint64_t word, unsigned count) {
    uint8_t *p = bits + (at >> 3);
    const unsigned shift = (unsigned)(at & 7), bytes = (shift + count + 7) / 8;
    uint64_t low = 0;
    if (count == 0) return;
    memcpy(&low, p, bytes < 8 ? bytes : 8);
    low |= word << shift;
    memcpy(p, &low, bytes < 8 ? bytes : 8);
    if (bytes > 8) p[8] = (uint8_t)(word >> (64 - shift));
}

/* Copies n bits from bit `from_at` of `from` to bit 0 of `to`; the last byte is filled up
 * with zeros. Returns how many of them are set. */
static inline uint64_t bits_copy(const uint8_t *from, uint64_t from_at, uint8_t *to, uint64_t n) {
    uint64_t set = 0;
    for (uint64_t i = 0; i < n; i += 64) {
        const unsigned count = n - i < 64 ? (unsigned)(n - i) : 64;
        const uint64_t word = bits_load(from, from_at + i, count);
        bits_store(to, i, word, count);
        set += (uint64_t)__builtin_popcountll(word);
    }
    return set;
}

static inline uint64_t bits_count(const uint8_t *bits, uint64_t at, uint64_t n) {
    uint64_t set = 0;
    for (uint64_t i = 0; i < n; i += 64) {
        const unsigned count = n - i < 64 ? (unsigned)(n - i) : 64;
        set += (uint64_t)__builtin_popcountll(bits_load(bits, at + i, count));
    }
    return set;
}

#endif
