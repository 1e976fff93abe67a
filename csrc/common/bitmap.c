#include "common/bitmap.h"

#include "common/bits.h"
#include "common/rows.h"

uint64_t bitmap_count(const uint8_t *bits, uint64_t at, uint64_t n) {
    return bits_count(bits, at, n);
}

uint64_t bitmap_copy(const uint8_t *bits, uint64_t at, uint64_t n, uint8_t *out) {
    return bits_copy(bits, at, out, n);
}

static unsigned word_bits(uint32_t n, uint32_t at) { return n - at < 64 ? n - at : 64; }

uint32_t bitmap_positions(const uint8_t *bits, uint32_t n, unsigned wanted, uint32_t *out) {
    uint32_t found = 0;
    for (uint64_t i = 0; i < n; i += 64) {
        const unsigned count = word_bits(n, (uint32_t)i);
        const uint64_t all = count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << count) - 1;
        uint64_t word = bits_load(bits, i, count);
        if (wanted == 0) word = ~word & all;
        if (word == ~UINT64_C(0)) {
            for (uint32_t b = 0; b < 64; b++) out[found++] = (uint32_t)i + b;
            continue;
        }
        for (; word != 0; word &= word - 1) {
            out[found++] = (uint32_t)i + (uint32_t)__builtin_ctzll(word);
        }
    }
    return found;
}

status_t bitmap_of(const uint32_t *positions, uint32_t m, uint32_t n, uint8_t *out) {
    if (!rows_below(positions, m, n)) return STATUS_RANGE;
    if (n != 0) memset(out, 0, bits_bytes(n));
    for (uint32_t i = 0; i < m; i++) bits_set(out, positions[i]);
    return STATUS_OK;
}

#define COMBINE(name, expression)                                                          \
    uint32_t name(const uint8_t *a, const uint8_t *b, uint32_t n, uint8_t *out) {          \
        uint32_t set = 0;                                                                  \
        for (uint64_t i = 0; i < n; i += 64) {                                             \
            const unsigned count = word_bits(n, (uint32_t)i);                              \
            const uint64_t x = bits_load(a, i, count), y = bits_load(b, i, count);         \
            const uint64_t word = (expression);                                            \
            bits_store(out, i, word, count);                                               \
            set += (uint32_t)__builtin_popcountll(word);                                   \
        }                                                                                  \
        return set;                                                                        \
    }

COMBINE(bitmap_or, x | y)
COMBINE(bitmap_and, x & y)
COMBINE(bitmap_and_not, x & ~y)
