/* The loops of packed.c, compiled once for any CPU and once for a newer one. Each runs over the
 * lanes of one row at a time, with the same shift for all, so that compilers make vectors of it. */
#ifndef TXNKV_ROWSET_PACKED_INLINE_H
#define TXNKV_ROWSET_PACKED_INLINE_H

#include <stdbool.h>

#include "common/bytes.h"
#include "rowset/packed.h"

#define PACKED_INLINE static inline __attribute__((always_inline))

PACKED_INLINE uint64_t packed_mask(unsigned bits) {
    return bits == 0 ? 0 : ~UINT64_C(0) >> (64 - bits);
}

/* Where the line of a frame is at its i-th number, above or below the base. */
PACKED_INLINE uint64_t packed_line(const packed_frame_t *frame, uint64_t i) {
    const uint64_t height = i * frame->slope >> frame->shift;
    return frame->falls ? 0 - height : height;
}

/* The lanes' next 16 rests, before the mask. Rest k of a lane begins at bit k * bits of its words. */
PACKED_INLINE void packed_take(const uint8_t *words, unsigned bits, uint32_t k, uint64_t *rests) {
    const uint32_t bit = k * bits, word = bit / 64, shift = bit % 64;
    const uint8_t *low = words + (size_t)word * PACKED_ROW_BYTES;
    for (uint32_t l = 0; l < PACKED_LANES; l++) rests[l] = load_le64(low + 8 * l) >> shift;
    if (shift + bits > 64) {
        const uint8_t *high = low + PACKED_ROW_BYTES;
        for (uint32_t l = 0; l < PACKED_LANES; l++) {
            rests[l] |= load_le64(high + 8 * l) << (64 - shift);
        }
    }
}

/* `falls` and `flat` are constants at each call. */
PACKED_INLINE void packed_rows(const packed_frame_t *frame, const uint8_t *words, uint32_t rows,
                               bool falls, bool flat, uint64_t *out) {
    const uint64_t mask = packed_mask(frame->bits), base = frame->base, slope = frame->slope;
    const unsigned shift = frame->shift, bits = frame->bits;
    uint64_t steps[PACKED_LANES], rests[PACKED_LANES];
    for (uint32_t l = 0; l < PACKED_LANES; l++) steps[l] = l * slope;
    for (uint32_t k = 0; k < rows; k++, out += PACKED_LANES) {
        const uint64_t start = k * PACKED_LANES * slope;
        packed_take(words, bits, k, rests);
        for (uint32_t l = 0; l < PACKED_LANES; l++) {
            const uint64_t height = flat ? 0 : (start + steps[l]) >> shift;
            out[l] = (falls ? base - height : base + height) + (rests[l] & mask);
        }
    }
}

/* A line without rests. */
PACKED_INLINE void packed_counter(const packed_frame_t *frame, uint32_t n, bool falls,
                                  uint64_t *out) {
    const uint64_t base = frame->base, slope = frame->slope;
    const unsigned shift = frame->shift;
    uint64_t height = 0;
    for (uint32_t i = 0; i < n; i++, height += slope) {
        out[i] = falls ? base - (height >> shift) : base + (height >> shift);
    }
}

PACKED_INLINE void packed_decode(const packed_frame_t *frame, const uint8_t *words, uint32_t n,
                                 uint64_t *out) {
    const uint32_t rows = (n + PACKED_LANES - 1) / PACKED_LANES;
    const bool flat = frame->slope == 0, falls = frame->falls != 0;
    if (frame->bits == 0) {
        if (falls) {
            packed_counter(frame, n, true, out);
        } else {
            packed_counter(frame, n, false, out);
        }
    } else if (flat) {
        packed_rows(frame, words, rows, false, true, out);
    } else if (falls) {
        packed_rows(frame, words, rows, true, false, out);
    } else {
        packed_rows(frame, words, rows, false, false, out);
    }
}

typedef struct {
    int64_t least;
    int64_t most;
} packed_span_t;

/* How far numbers are above and below the first, beside the line; `bits` of them count, by sign.
 * `flat` is a constant at each call. */
PACKED_INLINE packed_span_t packed_measure(const uint64_t *numbers, uint32_t n, unsigned bits,
                                           const packed_frame_t *frame, bool flat) {
    const uint64_t first = numbers[0], turn = frame->falls ? ~UINT64_C(0) : 0;
    const uint64_t slope = frame->slope;
    const unsigned shift = frame->shift;
    const uint64_t top = UINT64_C(1) << (bits - 1), mask = packed_mask(bits);
    packed_span_t span = {0, 0};
    uint64_t height = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t line = flat ? 0 : ((height >> shift) ^ turn) - turn;
        const uint64_t above = (((numbers[i] - first - line) & mask) ^ top) - top;
        const int64_t rest = (int64_t)above;
        span.least = rest < span.least ? rest : span.least;
        span.most = rest > span.most ? rest : span.most;
        height += slope;
    }
    return span;
}

PACKED_INLINE unsigned packed_bits_of(packed_span_t span) {
    const uint64_t range = (uint64_t)span.most - (uint64_t)span.least;
    return range == 0 ? 0 : 64 - (unsigned)__builtin_clzll(range);
}

/* The line through the first and the last number. */
PACKED_INLINE packed_frame_t packed_ends_line(const uint64_t *numbers, uint32_t n, unsigned bits) {
    packed_frame_t frame = {0};
    if (n < 2) return frame;
    const uint64_t top = UINT64_C(1) << (bits - 1);
    const uint64_t rise = (((numbers[n - 1] - numbers[0]) & packed_mask(bits)) ^ top) - top;
    frame.falls = rise >> 63 != 0;
    const uint64_t height = frame.falls ? 0 - rise : rise;
    if (height == 0) return frame;
    const unsigned room = (unsigned)__builtin_clzll(height);
    frame.shift = (uint8_t)(room < 16 ? room : 16);
    frame.slope = ((height << frame.shift) + (n - 2) / 2) / (n - 1);
    while (frame.shift != 0 && frame.slope > UINT64_MAX / PACKED_FRAME) {
        frame.slope >>= 1;
        frame.shift--;
    }
    if (frame.slope > UINT64_MAX / PACKED_FRAME) frame.slope = 0;
    if (frame.slope == 0) frame.shift = frame.falls = 0;
    return frame;
}

PACKED_INLINE uint32_t packed_word_rows(uint32_t n, unsigned bits) {
    return ((n + PACKED_LANES - 1) / PACKED_LANES * bits + 63) / 64;
}

/* Unsigned: none is below the one before it. */
PACKED_INLINE bool packed_ascends(const uint64_t *numbers, uint32_t n) {
    const uint64_t top = UINT64_C(1) << 63;
    uint64_t falls = 0;
    for (uint32_t i = 1; i < n; i++) {
        falls |= (uint64_t)((int64_t)(numbers[i] ^ top) < (int64_t)(numbers[i - 1] ^ top));
    }
    return falls == 0;
}

/* A search of ascending numbers goes by the bases, so these are not above any number of their
 * frame, as unsigned. `bits` is 64 then. */
PACKED_INLINE uint32_t packed_choose(const uint64_t *numbers, uint32_t n, unsigned bits,
                                     uint32_t at, packed_frame_t *out) {
    packed_frame_t flat = {0}, line = packed_ends_line(numbers, n, bits);
    packed_span_t span = {0, (int64_t)(numbers[n - 1] - numbers[0])};
    const bool ascends = bits == 64 && packed_ascends(numbers, n);
    if (!ascends) span = packed_measure(numbers, n, bits, &flat, true);
    flat.bits = (uint8_t)packed_bits_of(span);
    if (flat.bits != 0 && line.slope != 0 && !(ascends && line.falls)) {
        const packed_span_t along = packed_measure(numbers, n, bits, &line, false);
        const bool wraps = along.least < 0 && numbers[0] < 0 - (uint64_t)along.least;
        line.bits = (uint8_t)packed_bits_of(along);
        if (line.bits < flat.bits && !(ascends && wraps)) {
            flat = line;
            span = along;
        }
    }
    flat.base = numbers[0] + (uint64_t)span.least;
    flat.at = at;
    *out = flat;
    return packed_word_rows(n, flat.bits);
}

/* The rests of a row of lanes. `flat` is a constant at each call. */
PACKED_INLINE void packed_rests(const uint64_t *numbers, uint32_t k, const packed_frame_t *frame,
                                bool flat, uint64_t *rests) {
    const uint64_t turn = frame->falls ? ~UINT64_C(0) : 0, mask = packed_mask(frame->bits);
    const uint64_t start = (uint64_t)k * PACKED_LANES * frame->slope, base = frame->base;
    const uint64_t slope = frame->slope;
    const unsigned shift = frame->shift;
    numbers += (size_t)k * PACKED_LANES;
    for (uint32_t l = 0; l < PACKED_LANES; l++) {
        const uint64_t line = flat ? 0 : (((start + l * slope) >> shift) ^ turn) - turn;
        rests[l] = (numbers[l] - base - line) & mask;
    }
}

PACKED_INLINE void packed_put(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame,
                              bool flat, uint8_t *out) {
    const uint32_t rows = (n + PACKED_LANES - 1) / PACKED_LANES;
    const unsigned bits = frame->bits;
    uint64_t words[PACKED_LANES] = {0}, rests[PACKED_LANES];
    uint32_t used = 0; /* bits of the words */
    for (uint32_t k = 0; k < rows; k++) {
        packed_rests(numbers, k, frame, flat, rests);
        if (used + bits < 64) {
            for (uint32_t l = 0; l < PACKED_LANES; l++) words[l] |= rests[l] << used;
            used += bits;
            continue;
        }
        uint64_t full[PACKED_LANES];
        for (uint32_t l = 0; l < PACKED_LANES; l++) full[l] = words[l] | rests[l] << used;
        memcpy(out, full, sizeof full);
        out += PACKED_ROW_BYTES;
        const unsigned put = 64 - used; /* of these rests, 1 to 64 bits */
        for (uint32_t l = 0; l < PACKED_LANES; l++) words[l] = rests[l] >> (put - 1) >> 1;
        used = bits - put;
    }
    if (used != 0) memcpy(out, words, sizeof words);
}

/* `numbers` goes on to a whole row of lanes. */
PACKED_INLINE void packed_encode(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame,
                                 uint8_t *out) {
    if (frame->slope == 0) {
        packed_put(numbers, n, frame, true, out);
    } else {
        packed_put(numbers, n, frame, false, out);
    }
}

#endif
