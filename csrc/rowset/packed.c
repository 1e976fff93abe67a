#include "rowset/packed.h"

#include "common/check.h"
#include "rowset/packed_inline.h"

_Static_assert(sizeof(packed_frame_t) == PACKED_FRAME_BYTES, "frozen format");
_Static_assert(offsetof(packed_frame_t, slope) == 8, "frozen format");
_Static_assert(offsetof(packed_frame_t, at) == 16, "frozen format");
_Static_assert(offsetof(packed_frame_t, bits) == 20, "frozen format");
_Static_assert(offsetof(packed_frame_t, falls) == 22, "frozen format");
_Static_assert(PACKED_ROW_BYTES == 8 * PACKED_LANES, "frozen format");

/* -- for any CPU, and for this one ---------------------------------------------- */

void packed_frame_plain(const packed_frame_t *frame, const uint8_t *words, uint32_t n,
                        uint64_t *out) {
    packed_decode(frame, words, n, out);
}

uint32_t packed_plan_plain(const uint64_t *numbers, uint32_t n, uint32_t bits, uint32_t at,
                           packed_frame_t *out) {
    return packed_choose(numbers, n, bits, at, out);
}

void packed_write_plain(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame,
                        uint8_t *out) {
    packed_encode(numbers, n, frame, out);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) static void frame_avx2(const packed_frame_t *frame,
                                                       const uint8_t *words, uint32_t n,
                                                       uint64_t *out) {
    packed_decode(frame, words, n, out);
}

__attribute__((target("avx2"))) static uint32_t plan_avx2(const uint64_t *numbers, uint32_t n,
                                                          uint32_t bits, uint32_t at,
                                                          packed_frame_t *out) {
    return packed_choose(numbers, n, bits, at, out);
}

__attribute__((target("avx2"))) static void write_avx2(const uint64_t *numbers, uint32_t n,
                                                       const packed_frame_t *frame, uint8_t *out) {
    packed_encode(numbers, n, frame, out);
}

#define CHOOSE(newer, plain) (__builtin_cpu_supports("avx2") ? (newer) : (plain))
#else
#define CHOOSE(newer, plain) (plain)
#endif

uint32_t packed_plan(const uint64_t *numbers, uint32_t n, uint32_t bits, uint32_t at,
                     packed_frame_t *out) {
    CHECK(n >= 1 && n <= PACKED_FRAME && bits >= 1 && bits <= 64);
    return CHOOSE(plan_avx2, packed_plan_plain)(numbers, n, bits, at, out);
}

void packed_write(const uint64_t *numbers, uint32_t n, const packed_frame_t *frame, uint8_t *out) {
    if (frame->bits != 0) CHOOSE(write_avx2, packed_write_plain)(numbers, n, frame, out);
}

/* -- reading -------------------------------------------------------------------- */

static uint64_t frames_of(uint32_t n) { return ((uint64_t)n + PACKED_FRAME - 1) / PACKED_FRAME; }

uint64_t packed_size(uint32_t n, uint64_t rows) {
    return frames_of(n) * PACKED_FRAME_BYTES + rows * PACKED_ROW_BYTES;
}

status_t packed_parse(const uint8_t *bytes, uint64_t len, uint32_t n, packed_t *out,
                      uint64_t *out_len) {
    const uint64_t head = frames_of(n) * PACKED_FRAME_BYTES;
    if (len < head) return STATUS_CORRUPT;
    *out = (packed_t){bytes, bytes + head, 0, n};
    *out_len = head;
    if (n == 0) return STATUS_OK;
    /* The last frame's rows are the last: it says how many there are. */
    packed_frame_t last;
    memcpy(&last, bytes + head - PACKED_FRAME_BYTES, sizeof last);
    const uint32_t count = (n - 1) % PACKED_FRAME + 1;
    out->rows = (uint64_t)last.at + packed_word_rows(count, last.bits);
    *out_len += out->rows * PACKED_ROW_BYTES;
    return *out_len <= len ? STATUS_OK : STATUS_CORRUPT;
}

/* Loads a frame of `count` numbers; false when its words are not all there. */
static inline bool load_frame(const packed_t *packed, uint32_t number, uint32_t count,
                              packed_frame_t *out) {
    memcpy(out, packed->frames + (size_t)number * PACKED_FRAME_BYTES, sizeof *out);
    return out->bits <= 64 && out->shift <= 63 &&
           (uint64_t)out->at + packed_word_rows(count, out->bits) <= packed->rows;
}

static inline uint32_t count_of(const packed_t *packed, uint32_t number) {
    const uint32_t left = packed->n - number * PACKED_FRAME;
    return left < PACKED_FRAME ? left : PACKED_FRAME;
}

bool packed_sane(const packed_t *packed) {
    packed_frame_t frame;
    for (uint32_t i = 0; i < frames_of(packed->n); i++) {
        if (!load_frame(packed, i, count_of(packed, i), &frame)) return false;
    }
    return true;
}

void packed_prefetch(const packed_t *packed, uint32_t i) {
    packed_frame_t frame;
    const uint32_t number = i / PACKED_FRAME, at = i % PACKED_FRAME;
    if (!load_frame(packed, number, count_of(packed, number), &frame) || frame.bits == 0) return;
    const size_t row = (size_t)frame.at + at / PACKED_LANES * frame.bits / 64;
    __builtin_prefetch(packed->words + row * PACKED_ROW_BYTES + 8 * (size_t)(at % PACKED_LANES));
}

uint32_t packed_frame(const packed_t *packed, uint32_t number, uint64_t *out) {
    packed_frame_t frame;
    const uint32_t count = count_of(packed, number);
    if (!load_frame(packed, number, count, &frame)) return 0;
    const uint8_t *words = packed->words + (size_t)frame.at * PACKED_ROW_BYTES;
    CHOOSE(frame_avx2, packed_frame_plain)(&frame, words, count, out);
    return count;
}

static inline uint64_t number_of(const packed_frame_t *frame, const uint8_t *words, uint32_t i) {
    const uint32_t bit = i / PACKED_LANES * frame->bits, shift = bit % 64;
    uint64_t rest = 0;
    if (frame->bits != 0) {
        const uint8_t *at =
            words + (size_t)(bit / 64) * PACKED_ROW_BYTES + 8 * (i % PACKED_LANES);
        rest = load_le64(at) >> shift;
        if (shift + frame->bits > 64) rest |= load_le64(at + PACKED_ROW_BYTES) << (64 - shift);
    }
    return frame->base + packed_line(frame, i) + (rest & packed_mask(frame->bits));
}

status_t packed_get(const packed_t *packed, uint32_t i, uint64_t *out) {
    packed_frame_t frame;
    const uint32_t number = i / PACKED_FRAME;
    if (!load_frame(packed, number, count_of(packed, number), &frame)) return STATUS_CORRUPT;
    const uint8_t *words = packed->words + (size_t)frame.at * PACKED_ROW_BYTES;
    *out = number_of(&frame, words, i % PACKED_FRAME);
    return STATUS_OK;
}

/* -- search --------------------------------------------------------------------- */

/* The last frame from first to last whose base is not above `number`: all behind it are above. */
static uint32_t frame_of(const packed_t *packed, uint64_t number, uint32_t first, uint32_t last) {
    uint32_t n = last - first + 1;
    while (n > 1) {
        const uint32_t half = n / 2;
        const uint8_t *frame = packed->frames + (size_t)(first + half) * PACKED_FRAME_BYTES;
        first += load_le64(frame) <= number ? half : 0;
        n -= half;
    }
    return first;
}

/* First position in [lo, hi) of a frame that is not below `number`, else hi. Where the line is
 * close, it says where to begin. */
static uint32_t search_frame(const packed_frame_t *frame, const uint8_t *words, uint64_t number,
                             uint32_t lo, uint32_t hi) {
    if (frame->slope != 0 && frame->bits < 32 && number >= frame->base) {
        const uint64_t slope = (frame->slope >> frame->shift) + 1;
        const uint64_t error = (UINT64_C(1) << frame->bits) / slope + 1;
        const uint64_t height = number - frame->base;
        if (error < PACKED_FRAME / 8 && height < UINT64_MAX >> frame->shift) {
            const uint64_t guess = (height << frame->shift) / frame->slope + 1;
            uint32_t high = guess < hi ? (uint32_t)guess : hi;
            uint32_t low = guess > error + 2 ? (uint32_t)(guess - error - 2 < hi ? guess - error - 2 : hi)
                                             : 0;
            if (low > lo && number_of(frame, words, low - 1) < number) lo = low;
            if (high > lo && high < hi && number_of(frame, words, high) >= number) hi = high;
        }
    }
    while (lo < hi) {
        const uint32_t middle = lo + (hi - lo) / 2;
        if (number_of(frame, words, middle) < number) {
            lo = middle + 1;
        } else {
            hi = middle;
        }
    }
    return lo;
}

status_t packed_lower_bound(const packed_t *packed, uint64_t number, uint32_t lo, uint32_t hi,
                            uint32_t *out) {
    *out = hi;
    if (lo >= hi) return STATUS_OK;
    const uint32_t first = lo / PACKED_FRAME;
    uint32_t at = frame_of(packed, number, first, (hi - 1) / PACKED_FRAME);
    for (;; at--) { /* equal numbers may begin in a frame before */
        packed_frame_t frame;
        const uint32_t start = at * PACKED_FRAME, count = count_of(packed, at);
        if (!load_frame(packed, at, count, &frame)) return STATUS_CORRUPT;
        const uint8_t *words = packed->words + (size_t)frame.at * PACKED_ROW_BYTES;
        const uint32_t from = at == first ? lo - start : 0;
        const uint32_t end = hi - start < count ? hi - start : count;
        *out = start + search_frame(&frame, words, number, from, end);
        if (at == first || *out != start) return STATUS_OK;
    }
}
